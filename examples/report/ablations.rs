//! Selection with one thing forced at a time: the paper's figures 9 to 12.

use anyhow::Result;

use crate::kernels::us;
use crate::lines::{Line, Results, Run};
use crate::plot::{Axes, Curve, Plots, Scale, COLORS};
use crate::selection::{floors, routes, shape, width};
use crate::text::{number, optional, table};

fn latest(results: &Results) -> Option<Run<'_>> {
    results.latest(|l| l.is("topk") && l.has("variant"))
}

/// The unforced line that a variant is held against.
fn base_of<'a>(run: &Run<'a>, line: &Line) -> Option<&'a Line> {
    let key = |l: &Line| (shape(l), l.int("first"));
    run.line(|l| l.has("variant") && l.text("variant") == "default" && key(l) == key(line))
}

/// The paper's figures 9 to 11.
pub fn ablations(results: &Results) -> Vec<String> {
    let Some(run) = latest(results) else {
        return Vec::new();
    };
    let mut rows = Vec::new();
    for line in run
        .lines
        .iter()
        .filter(|l| l.text("ablation") != "crossover")
    {
        let base = base_of(&run, line);
        let mut row = vec![
            line.int("m").to_string(),
            width(line.int("n")),
            line.text("variant").to_string(),
            number(us(line)),
            format!("{:.2}", floors(line)),
            optional(base.map(|base| us(line) / us(base)), |x| {
                format!("{x:.2} x")
            }),
        ];
        row.extend(routes(line));
        row.push(optional(line.number("admitted"), number));
        rows.push(row);
    }
    if rows.is_empty() {
        return Vec::new();
    }
    let mut out = vec![
        "### Top-K, ablations (the paper's figures 9 to 11)".to_string(),
        String::new(),
        "A full call of the last step of each request, with one thing forced at a time; *admitted*: candidates a row."
            .to_string(),
        String::new(),
    ];
    let head = [
        "M",
        "N",
        "variant",
        "us",
        "floors",
        "of the default",
        "band",
        "recovered",
        "row reads",
        "admitted",
    ];
    out.extend(table(&head, &rows));
    out.extend([String::new(), format!("{}.", run.source()), String::new()]);
    out
}

/// What sampling gains over the exact proposal at a width: least, median and greatest over M.
struct Crossing {
    n: u64,
    cells: usize,
    least: f64,
    median: f64,
    most: f64,
}

fn crossings(run: &Run, variant: &str) -> Vec<Crossing> {
    let of = |l: &Line| l.text("ablation") == "crossover";
    let widths = run.all(|l| l.int("n"));
    let mut out = Vec::new();
    for n in widths {
        let mut gains: Vec<_> = run
            .lines
            .iter()
            .filter(|l| of(l) && l.int("n") == n && l.text("variant") == variant)
            .filter_map(|line| {
                let exact = run.line(|l| {
                    of(l) && shape(l) == shape(line) && l.text("variant") == "exact proposal"
                })?;
                Some(us(exact) / us(line))
            })
            .collect();
        gains.sort_by(f64::total_cmp);
        if let (Some(&least), Some(&most)) = (gains.first(), gains.last()) {
            let median = (gains[(gains.len() - 1) / 2] + gains[gains.len() / 2]) / 2.0;
            out.push(Crossing {
                n,
                cells: gains.len(),
                least,
                median,
                most,
            });
        }
    }
    out
}

/// The strides of figure 12b, by the names of their variants.
const CROSSING: [&str; 2] = ["stride 64", "stride 128"];

/// The paper's figure 12b.
pub fn crossover(results: &Results) -> Vec<String> {
    let Some(run) = latest(results) else {
        return Vec::new();
    };
    let mut rows = Vec::new();
    for variant in CROSSING {
        for at in crossings(&run, variant) {
            rows.push(vec![
                variant.to_string(),
                width(at.n),
                at.cells.to_string(),
                format!("{:.2} x", at.least),
                format!("{:.2} x", at.median),
                format!("{:.2} x", at.most),
            ]);
        }
    }
    if rows.is_empty() {
        return Vec::new();
    }
    let mut out = vec![
        "### Top-K, where sampling pays (the paper's figure 12b)".to_string(),
        String::new(),
        "The time with the exact proposal over that with a sampled one, over M from 64 to 4096."
            .to_string(),
        String::new(),
    ];
    out.extend(table(
        &["variant", "N", "cells", "least", "median", "most"],
        &rows,
    ));
    out.extend([String::new(), format!("{}.", run.source()), String::new()]);
    out
}

/// Times and recoveries against margin and stride, and the gain against the width.
pub fn draw(results: &Results, plots: &mut Plots) -> Result<()> {
    if let Some(run) = latest(results) {
        for (ablation, key, what) in [
            ("margin", "margin", "requested rank, K"),
            ("stride", "stride", "sampling stride"),
        ] {
            let (mut times, mut recovered) = (Vec::new(), Vec::new());
            let is_of = |l: &Line| l.text("ablation") == ablation;
            let mut widths: Vec<_> = run
                .lines
                .iter()
                .filter(|l| is_of(l))
                .map(|l| l.int("n"))
                .collect();
            widths.sort_unstable();
            widths.dedup();
            for (n, color) in widths.into_iter().zip(COLORS) {
                let lines = || {
                    let of = move |l: &&&Line| is_of(l) && l.int("n") == n;
                    run.lines.iter().filter(of)
                };
                let over = |l: &Line| us(l) / base_of(&run, l).map_or(f64::NAN, us);
                let points = |value: &dyn Fn(&Line) -> f64| {
                    let points = lines().map(|l| (l.number(key).unwrap_or(f64::NAN), value(l)));
                    points
                        .filter(|p| p.0.is_finite() && p.1.is_finite())
                        .collect()
                };
                times.push(Curve::main(format!("N = {n}"), color, points(&over)));
                let share = |l: &Line| l.number("p_exact").unwrap_or(f64::NAN) * 100.0;
                recovered.push(Curve::main(format!("N = {n}"), color, points(&share)));
            }
            let x = match ablation {
                "stride" => Scale::Logarithmic,
                _ => Scale::Linear,
            };
            let axes = |y| Axes {
                x: (what, x),
                y: (y, Scale::Linear),
            };
            plots.draw(
                &format!("topk-{ablation}-time"),
                &format!("top-K, time by {ablation}"),
                axes("of the default's time"),
                times,
            )?;
            plots.draw(
                &format!("topk-{ablation}-recovery"),
                &format!("top-K, rows recovered by {ablation}"),
                axes("rows recovered, %"),
                recovered,
            )?;
        }
        let mut curves = Vec::new();
        for (variant, color) in CROSSING.into_iter().zip(COLORS) {
            let all = crossings(&run, variant);
            let of = |value: fn(&Crossing) -> f64| {
                all.iter()
                    .map(|at| (at.n as f64 / 1024.0, value(at)))
                    .collect()
            };
            curves.push(Curve::main(
                format!("{variant}, median"),
                color,
                of(|at| at.median),
            ));
            curves.push(Curve::beside(
                format!("{variant}, least"),
                color,
                of(|at| at.least),
            ));
            curves.push(Curve::beside(
                format!("{variant}, most"),
                color,
                of(|at| at.most),
            ));
        }
        let axes = Axes::linear("width N, K", "gain over the exact proposal");
        plots.draw("topk-crossover", "top-K, where sampling pays", axes, curves)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{json, Value};

    fn line(m: u64, n: u64, ablation: &str, variant: &str, us: f64) -> Value {
        json!({
            "op": "topk", "m": m, "n": n, "k": 2048, "lens": "causal", "dist": "sink", "dtype": "f32",
            "order": "unordered", "values": false, "us": us, "read_floor_us": 10.0, "exact": true,
            "ablation": ablation, "variant": variant, "p_band": 0.0125, "p_exact": 0.5, "row_reads": 1.5,
            "admitted": 3000.0,
        })
    }

    #[test]
    fn a_variant_is_held_against_the_default_of_its_shape() {
        let all = Results::of(&[
            line(8, 1000, "default", "default", 20.0),
            line(8, 2000, "default", "default", 99.0),
            line(8, 1000, "margin", "margin 1.25", 30.0),
        ]);
        let table = ablations(&all);
        let row =
            "| 8 | 1000 | margin 1.25 | 30 | 3.00 | 1.50 x | 1.25 % | 50.00 % | 1.50 | 3000 |";
        assert!(table.contains(&row.to_string()), "{table:#?}");
    }

    #[test]
    fn a_crossing_is_over_the_shapes_of_a_width() {
        let mut lines = Vec::new();
        for (m, sampled) in [(64, 20.0), (128, 8.0), (256, 5.0)] {
            lines.push(line(m, 65536, "crossover", "exact proposal", 10.0));
            lines.push(line(m, 65536, "crossover", "stride 64", sampled));
        }
        let table = crossover(&Results::of(&lines));
        let row = "| stride 64 | 64K | 3 | 0.50 x | 1.25 x | 2.00 x |";
        assert!(table.contains(&row.to_string()), "{table:#?}");
        assert!(ablations(&Results::of(&lines)).is_empty());
    }
}
