//! What score rows of a real text look like: the paper's figure 3.

use anyhow::Result;
use plotters::style::RGBColor;

use crate::lines::{Line, Results, Run};
use crate::plot::{Axes, Curve, Plots, COLORS, GREY};
use crate::text::{number, optional, table};

/// The lines of one file of scores.
fn latest(results: &Results) -> Option<Run<'_>> {
    results.latest(|l| l.is("score_statistics"))
}

/// The paper's figure 3 in numbers.
pub fn statistics(results: &Results) -> Vec<String> {
    let Some(run) = latest(results) else {
        return Vec::new();
    };
    let at = |part: &str, key: &str, value: f64| {
        run.line(|l| l.text("part") == part && l.number(key) == Some(value))
    };
    let mut out = vec![
        "### Scores of a real text (the paper's figure 3)".to_string(),
        String::new(),
    ];
    if let Some(line) = run.lines.last() {
        out.extend([
            format!(
                "{} rows of {} to {} indexer-like scores, K = {}: `examples/indexer_scores` says how they are made.",
                line.int("rows"),
                line.int("length_min"),
                line.int("length_max"),
                line.int("k")
            ),
            String::new(),
        ]);
    }
    let count = |line: Option<&Line>, key: &str| optional(line.and_then(|l| l.number(key)), number);
    let mut rows = Vec::new();
    for gaps in [100.0, 500.0, 1000.0] {
        let line = at("tail", "gaps", gaps);
        rows.push(vec![
            format!("values above a boundary {gaps} gaps too low"),
            count(line, "median"),
            format!("95 % at most {}", count(line, "p95")),
        ]);
    }
    for stride in [64.0, 128.0] {
        let line = run.line(|l| {
            l.text("part") == "view"
                && (l.number("stride"), l.number("target")) == (Some(stride), Some(1.5))
        });
        rows.push(vec![
            format!("rank that a view of every {stride}th finds for 1.5 K"),
            count(line, "median"),
            format!("{} to {} in 90 %", count(line, "p5"), count(line, "p95")),
        ]);
    }
    let share = |decile: f64| at("decile", "decile", decile).and_then(|l| l.number("share"));
    let ends = share(1.0).zip(share(10.0));
    rows.push(vec![
        "share of the top K in the first and last tenth".to_string(),
        optional(ends, |(a, b)| format!("{:.0} %", (a + b) * 100.0)),
        optional(ends, |(a, b)| {
            format!("first {:.0} %, last {:.0} %", a * 100.0, b * 100.0)
        }),
    ]);
    for stride in [64.0, 128.0] {
        let line = at("rank_error", "stride", stride);
        let reference = line.and_then(|l| l.number("exchangeable_rms"));
        let ratio = line.and_then(|l| l.number("rms")).zip(reference);
        rows.push(vec![
            format!("RMS rank error of every {stride}th at 1.5 K"),
            count(line, "rms"),
            optional(ratio, |(rms, reference)| {
                format!(
                    "{:+.0} % of exchangeable positions' {reference:.0}",
                    (rms / reference - 1.0) * 100.0
                )
            }),
        ]);
    }
    out.extend(table(&["what", "median or value", "spread"], &rows));
    out.extend([String::new(), format!("{}.", run.source()), String::new()]);
    out
}

/// A plot for each part of the figure.
pub fn draw(results: &Results, plots: &mut Plots) -> Result<()> {
    if let Some(run) = latest(results) {
        let points = |part: &str, x: &str, y: &str| -> Vec<(f64, f64)> {
            let lines = run.lines.iter().filter(|l| l.text("part") == part);
            lines.filter_map(|l| l.number(x).zip(l.number(y))).collect()
        };
        let k = run.lines.last().map_or(0, |l| l.int("k")) as f64;
        let tail = points("tail", "gaps", "median");
        let exact = tail.iter().map(|point| (point.0, k)).collect();
        let curves = vec![
            Curve::beside("K", GREY, exact),
            Curve::main("median", COLORS[0], tail),
            Curve::beside("95 %", COLORS[0], points("tail", "gaps", "p95")),
        ];
        let axes = Axes::logarithmic("boundary error, gaps at K", "values retained");
        plots.draw(
            "scores-tail",
            "Retained by a displaced boundary",
            axes,
            curves,
        )?;

        let mut curves = Vec::new();
        let strides = run.all(|l| l.int("stride"));
        let colors = [
            COLORS[0],
            COLORS[1],
            COLORS[2],
            RGBColor(0x94, 0x67, 0xbd),
            RGBColor(0xff, 0x7f, 0x0e),
        ];
        for (stride, color) in strides.into_iter().filter(|&s| s > 0).zip(colors) {
            let of = run
                .lines
                .iter()
                .filter(|l| l.text("part") == "view" && l.int("stride") == stride);
            let points = of.filter_map(|l| {
                let (target, median) = l.number("target").zip(l.number("median"))?;
                Some((target, median / k))
            });
            curves.push(Curve::main(format!("1/{stride}"), color, points.collect()));
        }
        curves.push(Curve::beside(
            "as asked",
            GREY,
            vec![(1.0, 1.0), (2.0, 2.0)],
        ));
        let axes = Axes::linear("rank asked, K", "median rank in the row, K");
        plots.draw(
            "scores-views",
            "Ranks that strided views find",
            axes,
            curves,
        )?;

        let share = points("decile", "decile", "share");
        let percent = share
            .iter()
            .map(|&(decile, share)| (decile, share * 100.0))
            .collect();
        let uniform = share.iter().map(|point| (point.0, 10.0)).collect();
        let curves = vec![
            Curve::main("top K", COLORS[0], percent),
            Curve::beside("uniform", GREY, uniform),
        ];
        let axes = Axes::linear("tenth of the row", "share of the top K, %");
        plots.draw("scores-deciles", "Where the top K lie", axes, curves)?;

        let curves = vec![
            Curve::main("measured", COLORS[0], points("rank_error", "stride", "rms")),
            Curve::beside(
                "exchangeable positions",
                GREY,
                points("rank_error", "stride", "exchangeable_rms"),
            ),
        ];
        let axes = Axes::logarithmic("sampling stride", "RMS rank error at 1.5 K");
        plots.draw("scores-rank-error", "How far off a view is", axes, curves)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_a_file_lacks_is_a_dash() {
        let all = Results::of(&[
            json!({"op": "score_statistics", "part": "decile", "decile": 1, "share": 0.25, "k": 8, "rows": 2}),
            json!({"op": "score_statistics", "part": "decile", "decile": 10, "share": 0.5, "k": 8, "rows": 2}),
            json!({
                "op": "score_statistics", "part": "rank_error", "stride": 64, "rms": 80.0,
                "exchangeable_rms": 100.0, "k": 8, "rows": 2,
            }),
        ]);
        let table = statistics(&all);
        for row in [
            "| share of the top K in the first and last tenth | 75 % | first 25 %, last 50 % |",
            "| RMS rank error of every 64th at 1.5 K | 80 | -20 % of exchangeable positions' 100 |",
            "| RMS rank error of every 128th at 1.5 K | - | - |",
        ] {
            assert!(table.contains(&row.to_string()), "{table:#?}");
        }
        assert!(statistics(&Results::default()).is_empty());
    }
}
