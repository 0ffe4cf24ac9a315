//! Selection: device times of `topk` against the floor, the bars and the peers, and over the calls of
//! long requests.

use anyhow::Result;
use serde::Deserialize;

use crate::kernels::{floor, us, verdict};
use crate::lines::{Line, Results, Run};
use crate::plot::{Axes, Curve, Plots, COLORS, GREY};
use crate::text::{geometric_mean, number, optional, table};

/// K of the paper and of the peers.
const K: u64 = 2048;

/// The latest run of the op as it is: ablations and traces may be of another.
pub fn latest(results: &Results) -> Option<Run<'_>> {
    results.latest(is_plain)
}

/// What a line measures, but for its shape: unordered positions of f32 scores with raised ends at
/// K = 2048 is the standard, and all else is held against it.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Kind<'a> {
    k: u64,
    dtype: &'a str,
    dist: &'a str,
    order: &'a str,
    values: bool,
}

const STANDARD: Kind = Kind {
    k: K,
    dtype: "f32",
    dist: "sink",
    order: "unordered",
    values: false,
};

fn kind(line: &Line) -> Kind<'_> {
    Kind {
        k: line.int("k"),
        dtype: line.text("dtype"),
        dist: line.text("dist"),
        order: line.text("order"),
        values: line.flag("values"),
    }
}

pub fn shape(line: &Line) -> (u64, u64) {
    (line.int("m"), line.int("n"))
}

/// No ablation, and no call of a trace.
fn is_plain(line: &Line) -> bool {
    line.is("topk") && !line.has("variant") && !line.has("trace")
}

fn is_standard(line: &Line) -> bool {
    is_plain(line) && kind(line) == STANDARD
}

fn standard<'a>(run: &Run<'a>, (m, n): (u64, u64)) -> Option<&'a Line> {
    run.line(|l| is_standard(l) && shape(l) == (m, n))
}

pub fn floors(line: &Line) -> f64 {
    us(line) / floor(line)
}

/// Widths as the field writes them.
pub fn width(n: u64) -> String {
    match n {
        n if n > 0 && n % (1 << 20) == 0 => format!("{}M", n >> 20),
        n if n > 0 && n % 1024 == 0 => format!("{}K", n >> 10),
        n => n.to_string(),
    }
}

fn place(line: &Line) -> String {
    let (m, n) = shape(line);
    format!("M {m}, N {}", width(n))
}

/// What differs from the standard.
fn difference(line: &Line) -> String {
    let is = kind(line);
    let mut parts = Vec::new();
    if is.k != K {
        parts.push(format!("K {}", is.k));
    }
    if is.dtype != STANDARD.dtype {
        parts.push(is.dtype.to_string());
    }
    if is.dist != STANDARD.dist {
        parts.push(format!("{} scores", is.dist));
    }
    if is.order != STANDARD.order {
        parts.push(is.order.replace('_', " "));
    }
    if is.values {
        parts.push("values".to_string());
    }
    match parts.is_empty() {
        true => "-".to_string(),
        false => parts.join(", "),
    }
}

/// What others take on the same device: `selection` in `peers.json`.
#[derive(Debug, Deserialize)]
pub struct Peer {
    name: String,
    /// When and on what it was measured.
    source: String,
    /// Geometric means of the gains that are to be reached.
    must: f64,
    goal: Option<f64>,
    cells: Vec<PeerCell>,
}

#[derive(Debug, Deserialize)]
struct PeerCell {
    m: u64,
    n: u64,
    us: f64,
    /// In the peer's own run.
    floor_us: f64,
    #[serde(default)]
    call: String,
}

impl PeerCell {
    fn floors(&self) -> f64 {
        self.us / self.floor_us
    }
}

impl Peer {
    fn cell(&self, of: (u64, u64)) -> Option<&PeerCell> {
        self.cells.iter().find(|cell| (cell.m, cell.n) == of)
    }

    /// Our lines for the peer's cells, and how many times as long the peer takes: time over floor
    /// against time over floor, as the two were measured in different runs.
    fn gains<'a>(&self, run: &Run<'a>) -> Vec<(&'a Line, f64)> {
        let pairs = self.cells.iter().filter_map(|cell| {
            let ours = standard(run, (cell.m, cell.n))?;
            Some((ours, cell.floors() / floors(ours)))
        });
        pairs.collect()
    }
}

/// A row a cell of the first peer, with the others beside it.
pub fn against(run: &Run, peers: &[Peer]) -> Vec<String> {
    let Some(first) = peers.first() else {
        return Vec::new();
    };
    let mut rows = Vec::new();
    for cell in &first.cells {
        let at = (cell.m, cell.n);
        let Some(ours) = standard(run, at) else {
            continue;
        };
        let mut row = vec![
            cell.m.to_string(),
            width(cell.n),
            number(floor(ours)),
            format!("{} ({:.2})", number(us(ours)), floors(ours)),
            match cell.call.as_str() {
                "" => first.name.clone(),
                call => format!("`{call}`"),
            },
        ];
        for peer in peers {
            let theirs = peer.cell(at);
            row.push(optional(theirs.map(|c| c.us), number));
            let gain = theirs.map(|c| c.floors() / floors(ours));
            row.push(optional(gain, |gain| format!("{gain:.2} x")));
        }
        rows.push(row);
    }
    if rows.is_empty() {
        return Vec::new();
    }
    let means = peers.iter().filter_map(|peer| {
        let gains: Vec<_> = peer.gains(run).into_iter().map(|gain| gain.1).collect();
        let mean = geometric_mean(&gains)?;
        Some(format!("{mean:.2} x against {}", peer.name))
    });
    let mut out = vec![
        "### Top-K against its peers".to_string(),
        String::new(),
        format!(
            "In us, and in brackets how many read floors; a gain is the ratio of times over the floors of their own \
             runs. Geometric means: {}. {}",
            means.collect::<Vec<_>>().join(", "),
            first.source
        ),
        String::new(),
    ];
    let mut head = vec!["M", "N", "read floor", "us", "peer"];
    let names: Vec<_> = peers.iter().map(|p| format!("{}, us", p.name)).collect();
    for name in &names {
        head.extend([name.as_str(), "gain"]);
    }
    out.extend(table(&head, &rows));
    out.push(String::new());
    out
}

/// A measured cell against a bar and the goal beyond it.
struct Measured {
    value: f64,
    place: String,
}

/// A bar: every cell is to be at most `must`, and better at most `goal`.
fn at_most(name: &str, must: f64, goal: f64, cells: Vec<Measured>) -> Option<Vec<String>> {
    let worst = cells.iter().max_by(|a, b| a.value.total_cmp(&b.value))?;
    let within = |bar: f64| cells.iter().filter(|c| c.value <= bar).count();
    Some(vec![
        name.to_string(),
        cells.len().to_string(),
        format!("<= {must}"),
        verdict(within(must), cells.len()),
        format!("<= {goal}"),
        verdict(within(goal), cells.len()),
        format!("{:.2} at {}", worst.value, worst.place),
    ])
}

/// Lines of another kind over the standard line of their shape.
fn over_standard(run: &Run, of: impl Fn(&Line) -> bool) -> Vec<Measured> {
    let lines = run.lines.iter().filter(|l| is_plain(l) && of(l));
    lines
        .filter_map(|line| {
            let base = standard(run, shape(line))?;
            Some(Measured {
                value: us(line) / us(base),
                place: format!("{}, {}", place(line), difference(line)),
            })
        })
        .collect()
}

/// The bars that are set for selection, with what was reached.
pub fn bars(run: &Run, peers: &[Peer]) -> Vec<String> {
    let mut rows = Vec::new();
    let in_floors = |of: fn((u64, u64)) -> bool| {
        let lines = run.lines.iter().filter(|l| is_standard(l) && of(shape(l)));
        let measured = lines.map(|line| Measured {
            value: floors(line),
            place: place(line),
        });
        measured.collect::<Vec<_>>()
    };
    for (at, peer) in peers.iter().enumerate() {
        let gains = peer.gains(run);
        let values: Vec<_> = gains.iter().map(|gain| gain.1).collect();
        if let Some(mean) = geometric_mean(&values) {
            let slower = values.iter().filter(|&&gain| gain < 1.0).count();
            let least = values.iter().copied().fold(f64::INFINITY, f64::min);
            let met = |bar: f64| match (mean >= bar, slower) {
                (true, 0) => "yes".to_string(),
                (_, 0) => "no".to_string(),
                (_, slower) => format!("no: slower in {slower}"),
            };
            rows.push(vec![
                format!("against {}, geometric mean, slower in no cell", peer.name),
                values.len().to_string(),
                format!(">= {} x", peer.must),
                met(peer.must),
                optional(peer.goal, |goal| format!(">= {goal} x")),
                optional(peer.goal, met),
                format!("mean {mean:.2} x, least {least:.2} x"),
            ]);
        }
        if at == 0 {
            let few = gains
                .iter()
                .filter(|(line, _)| line.int("m") <= 8 && line.int("n") >= 32 << 10)
                .map(|(line, gain)| Measured {
                    value: 1.0 / gain,
                    place: place(line),
                });
            let name = format!("M <= 8, N >= 32K, of the time of {}", peer.name);
            rows.extend(at_most(&name, 0.8, 0.6, few.collect()));
        }
    }
    let long = in_floors(|(m, n)| m >= 128 && n >= 256 << 10);
    rows.extend(at_most(
        "M >= 128, N >= 256K, in read floors",
        1.3,
        1.15,
        long,
    ));
    let many = in_floors(|(m, n)| m >= 512 && n == 128 << 10);
    rows.extend(at_most(
        "M >= 512, N = 128K, in read floors",
        1.5,
        1.25,
        many,
    ));
    for (name, must, goal, of) in [
        (
            "normal, uniform and 1/64-rounded scores, of the time of raised ends",
            1.5,
            1.1,
            (|is| ["normal", "uniform", "ties"].contains(&is.dist) && like(is, |k| k.dist = "sink"))
                as fn(Kind) -> bool,
        ),
        (
            "aliased and equal scores, of the time of raised ends",
            4.5,
            2.5,
            |is| ["alias", "equal"].contains(&is.dist) && like(is, |k| k.dist = "sink"),
        ),
        ("K = 512, 1024, 4096, of the time of 2048", 1.3, 1.1, |is| {
            [512, 1024, 4096].contains(&is.k) && like(is, |k| k.k = K)
        }),
        (
            "in order, or with values, of the time of unordered",
            1.15,
            1.15,
            |is| {
                (is.order != "unordered" || is.values)
                    && like(is, |k| (k.order, k.values) = ("unordered", false))
            },
        ),
    ] {
        rows.extend(at_most(
            name,
            must,
            goal,
            over_standard(run, |l| of(kind(l))),
        ));
    }
    let halves = over_standard(run, |l| {
        let long = l.int("m") >= 128 && l.int("n") >= 256 << 10;
        long && kind(l).dtype == "bf16" && like(kind(l), |k| k.dtype = "f32")
    });
    let name = "bf16, M >= 128, N >= 256K, of the f32 time";
    rows.extend(at_most(name, 0.65, 0.55, halves));
    let space = run.lines.iter().filter(|l| l.has("workspace"));
    let space = space.map(|line| Measured {
        value: (line.int("workspace") as f64 / (1 << 20) as f64 * 100.0).ceil() / 100.0,
        place: place(line),
    });
    rows.extend(at_most(
        "workspace, any shape, in MB",
        64.0,
        16.0,
        space.collect(),
    ));
    let exact = run.lines.iter().filter(|l| l.flag("exact")).count();
    let checked: u64 = run.lines.iter().map(|l| l.int("checked_rows")).sum();
    rows.push(vec![
        "rows equal to a selection in order on the host".to_string(),
        run.lines.len().to_string(),
        "all".to_string(),
        verdict(exact, run.lines.len()),
        "-".to_string(),
        "-".to_string(),
        format!("{checked} rows checked"),
    ]);
    let head = ["bar", "cells", "must", "met", "goal", "reached", "worst"];
    table(&head, &rows)
}

/// Whether a kind is the standard once `change` has been undone.
fn like(mut is: Kind<'_>, change: fn(&mut Kind<'_>)) -> bool {
    change(&mut is);
    is == STANDARD
}

/// A row an M, a column an N.
fn matrix(run: &Run, of: impl Fn((u64, u64)) -> bool) -> Vec<String> {
    let wanted = |l: &Line| is_standard(l) && of(shape(l));
    let lines: Vec<_> = run.lines.iter().filter(|l| wanted(l)).collect();
    let all = |key: &str| {
        let mut values: Vec<_> = lines.iter().map(|l| l.int(key)).collect();
        values.sort_unstable();
        values.dedup();
        values
    };
    let (rows, columns) = (all("m"), all("n"));
    let cell = |m, n| {
        let line = standard(run, (m, n));
        optional(line, |l| format!("{} ({:.2})", number(us(l)), floors(l)))
    };
    let body: Vec<_> = rows
        .iter()
        .map(|&m| {
            let mut row = vec![m.to_string()];
            row.extend(columns.iter().map(|&n| cell(m, n)));
            row
        })
        .collect();
    let names: Vec<_> = columns.iter().map(|&n| format!("N {}", width(n))).collect();
    let mut head = vec!["M"];
    head.extend(names.iter().map(String::as_str));
    match body.is_empty() {
        true => Vec::new(),
        false => table(&head, &body),
    }
}

/// The paper's 20 configurations, and few rows as in decoding.
pub fn grid(run: &Run) -> Vec<String> {
    let mut out = Vec::new();
    let parts: [(&str, Vec<String>); 2] = [
        (
            "### Top-K, many rows (the paper's figure 7)",
            matrix(run, |(m, n)| m >= 512 && n >= 128 << 10),
        ),
        ("### Top-K, few rows", matrix(run, |(m, _)| m <= 256)),
    ];
    for (title, table) in parts {
        if !table.is_empty() {
            out.extend([
                title.to_string(),
                String::new(),
                format!(
                    "K = {K}, f32, causal rows with raised ends: in us, and in brackets how many read floors."
                ),
                String::new(),
            ]);
            out.extend(table);
            out.push(String::new());
        }
    }
    out
}

/// Shares of rows by their routes.
pub fn routes(line: &Line) -> [String; 3] {
    let share = |key: &str| optional(line.number(key), |x| format!("{:.2} %", x * 100.0));
    [
        share("p_band"),
        share("p_exact"),
        optional(line.number("row_reads"), |x| format!("{x:.2}")),
    ]
}

/// Everything else than the standard, beside it.
pub fn kinds(run: &Run) -> Vec<String> {
    let lines = run.lines.iter().filter(|l| is_plain(l) && !is_standard(l));
    let mut rows = Vec::new();
    for line in lines {
        let base = standard(run, shape(line));
        let mut row = vec![
            line.int("m").to_string(),
            width(line.int("n")),
            difference(line),
            number(us(line)),
            format!("{:.2}", floors(line)),
            optional(base.map(|base| us(line) / us(base)), |x| {
                format!("{x:.2} x")
            }),
        ];
        row.extend(routes(line));
        rows.push(row);
    }
    if rows.is_empty() {
        return Vec::new();
    }
    let mut out = vec![
        "### Top-K of other kinds".to_string(),
        String::new(),
        "Beside f32, raised ends, K = 2048, unordered, without values, at the same shape. *Band*, *recovered*: shares \
         of the rows whose first proposal was extended, and whose boundary was found from the whole row (the paper's \
         p_band and p_exact); *row reads*: scores read over scores valid (R_eq)."
            .to_string(),
        String::new(),
    ];
    let head = [
        "M",
        "N",
        "variant",
        "us",
        "floors",
        "of the standard",
        "band",
        "recovered",
        "row reads",
    ];
    out.extend(table(&head, &rows));
    out.push(String::new());
    out
}

/// The paper's figure 8: sums over the calls of a request.
pub fn traces(results: &Results) -> Vec<String> {
    let Some(run) = results.latest(|l| l.is("topk") && l.has("trace") && !l.has("variant")) else {
        return Vec::new();
    };
    let mut rows = Vec::new();
    for trace in run.all(|l| l.text("trace")) {
        // The last line of each call.
        let calls = run.all(|l| (l.text("trace"), l.int("call")));
        let of: Vec<_> = calls
            .into_iter()
            .filter(|(name, _)| *name == trace)
            .filter_map(|call| run.line(|l| (l.text("trace"), l.int("call")) == call))
            .collect();
        let sum = |value: fn(&Line) -> f64| of.iter().map(|l| value(l)).sum::<f64>() / 1e3;
        rows.push(vec![
            trace.to_string(),
            of.len().to_string(),
            optional(of.first().and_then(|l| l.number("calls")), number),
            format!("{:.2}", sum(floor)),
            format!("{:.2}", sum(us)),
            format!("{:.2}", sum(us) / sum(floor)),
        ]);
    }
    let mut out = vec![
        "### Top-K over the calls of a request (the paper's figure 8)".to_string(),
        String::new(),
        "A prompt in steps of 64K query tokens, whose rows are cut into calls of at most 5.85 GiB of f32 scores; sums \
         in ms."
            .to_string(),
        String::new(),
    ];
    let head = [
        "request",
        "calls measured",
        "calls",
        "read floors, ms",
        "ms",
        "floors",
    ];
    out.extend(table(&head, &rows));
    out.extend([String::new(), format!("{}.", run.source()), String::new()]);
    out
}

/// Times against M at each width, and against N for few rows.
pub fn draw(results: &Results, peers: &[Peer], plots: &mut Plots) -> Result<()> {
    if let Some(run) = latest(results) {
        let times = |of: &dyn Fn(&Line) -> bool, x: &str, value: fn(&Line) -> f64| {
            let lines = run.lines.iter().filter(|l| is_standard(l) && of(l));
            lines
                .map(|l| (l.int(x) as f64, value(l)))
                .collect::<Vec<_>>()
        };
        for n in run.all(|l| l.int("n")) {
            let of = |l: &Line| l.int("n") == n && l.int("m") >= 512;
            let mut curves = vec![
                Curve::beside("read floor", GREY, times(&of, "m", floor)),
                Curve::main("candle-topk", COLORS[0], times(&of, "m", us)),
            ];
            for (peer, color) in peers.iter().zip([COLORS[1], COLORS[2]]) {
                let cells = peer.cells.iter().filter(|c| c.n == n && c.m >= 512);
                let points = cells.map(|c| (c.m as f64, c.us)).collect();
                curves.push(Curve::beside(peer.name.clone(), color, points));
            }
            if curves[1].points.len() > 1 {
                let title = format!("top-K, K = {K}, N = {}", width(n));
                plots.draw(
                    &format!("topk-n{}", width(n)),
                    &title,
                    Axes::logarithmic("rows M", "us"),
                    curves,
                )?;
            }
        }
        let kilo = |points: Vec<(f64, f64)>| {
            let in_k = points.into_iter().map(|(n, us)| (n / 1024.0, us));
            in_k.collect::<Vec<_>>()
        };
        for m in [1, 8, 64, 256] {
            let of = |l: &Line| l.int("m") == m;
            let mut curves = vec![
                Curve::beside("read floor", GREY, kilo(times(&of, "n", floor))),
                Curve::main("candle-topk", COLORS[0], kilo(times(&of, "n", us))),
            ];
            for (peer, color) in peers.iter().zip([COLORS[1], COLORS[2]]) {
                let cells = peer.cells.iter().filter(|c| c.m == m);
                let points = cells.map(|c| (c.n as f64 / 1024.0, c.us)).collect();
                curves.push(Curve::beside(peer.name.clone(), color, points));
            }
            if curves[1].points.len() > 1 {
                let title = format!("top-K, K = {K}, M = {m}");
                plots.draw(
                    &format!("topk-m{m}"),
                    &title,
                    Axes::logarithmic("width N, K", "us"),
                    curves,
                )?;
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{json, Value};

    fn line(more: Value) -> Value {
        let mut line = json!({
            "op": "topk", "m": 512, "n": 131072, "k": 2048, "lens": "causal", "dist": "sink", "dtype": "f32",
            "order": "unordered", "values": false, "us": 75.0, "read_floor_us": 60.0, "workspace": 1 << 20,
            "exact": true, "checked_rows": 4, "rev": "r", "gpu": "g", "date": "2026-01-01",
        });
        for (key, value) in more.as_object().unwrap() {
            line[key] = value.clone();
        }
        line
    }

    fn peers() -> Vec<Peer> {
        serde_json::from_value(json!([
            {
                "name": "P", "source": "s", "must": 1.25, "goal": 1.4,
                "cells": [
                    {"m": 512, "n": 131072, "us": 120.0, "floor_us": 60.0, "call": "c"},
                    {"m": 8, "n": 131072, "us": 12.0, "floor_us": 6.0, "call": "d"},
                    {"m": 1, "n": 8192, "us": 7.0, "floor_us": 5.0, "call": "d"},
                ],
            },
            {"name": "Q", "source": "s", "must": 1.0, "cells": [
                {"m": 512, "n": 131072, "us": 70.0, "floor_us": 60.0},
            ]},
        ]))
        .unwrap()
    }

    fn row<'a>(table: &'a [String], of: &str) -> Vec<&'a str> {
        let found = table.iter().find(|l| l.contains(of));
        let line = found.unwrap_or_else(|| panic!("no {of} in {table:#?}"));
        line.trim_matches('|').split('|').map(str::trim).collect()
    }

    #[test]
    fn bars_hold_each_cell_against_its_own() {
        let all = Results::of(&[
            line(json!({})),
            line(json!({"m": 8, "us": 9.0, "read_floor_us": 6.0})),
            line(json!({"dist": "ties", "us": 90.0})),
            line(json!({"dist": "alias", "us": 300.0, "exact": false})),
            line(json!({"order": "by_value", "us": 84.0})),
            line(json!({"order": "by_position", "values": true, "us": 90.0})),
            line(json!({"k": 512, "us": 78.0})),
            line(json!({"m": 128, "n": 262144, "us": 50.0, "read_floor_us": 40.0})),
            line(
                json!({"m": 128, "n": 262144, "us": 30.0, "read_floor_us": 20.0, "dtype": "bf16"}),
            ),
            // Differs in two things, and says nothing of either.
            line(json!({"k": 512, "dist": "ties", "us": 1000.0})),
        ]);
        let run = latest(&all).unwrap();
        let table = bars(&run, &peers());
        // 2 floors against 1.25 and 1.5.
        let peer = row(&table, "against P");
        assert_eq!(peer[1..6], ["2", ">= 1.25 x", "yes", ">= 1.4 x", "yes"]);
        assert_eq!(peer[6], "mean 1.46 x, least 1.33 x");
        assert_eq!(
            row(&table, "against Q")[1..6],
            ["1", ">= 1 x", "no: slower in 1", "-", "-"]
        );
        assert_eq!(
            row(&table, "M <= 8")[1..6],
            ["1", "<= 0.8", "yes", "<= 0.6", "no: 0 of 1"]
        );
        assert_eq!(
            row(&table, "N = 128K, in read")[1..6],
            ["1", "<= 1.5", "yes", "<= 1.25", "yes"]
        );
        assert_eq!(
            row(&table, "rounded")[6],
            "1.20 at M 512, N 128K, ties scores"
        );
        assert_eq!(
            row(&table, "aliased")[3..6],
            ["yes", "<= 2.5", "no: 0 of 1"]
        );
        assert_eq!(
            row(&table, "in order")[1..4],
            ["2", "<= 1.15", "no: 1 of 2"]
        );
        assert_eq!(row(&table, "K = 512")[6], "1.04 at M 512, N 128K, K 512");
        assert_eq!(row(&table, "bf16")[3..6], ["yes", "<= 0.55", "no: 0 of 1"]);
        assert_eq!(row(&table, "workspace")[3..6], ["yes", "<= 16", "yes"]);
        assert_eq!(row(&table, "on the host")[3], "no: 9 of 10");
    }

    #[test]
    fn every_cell_of_a_peer_is_a_row_where_it_is_measured() {
        let all = Results::of(&[line(json!({}))]);
        let run = latest(&all).unwrap();
        let table = against(&run, &peers());
        assert_eq!(
            row(&table, "| 512 |"),
            [
                "512",
                "128K",
                "60",
                "75 (1.25)",
                "`c`",
                "120",
                "1.60 x",
                "70",
                "0.93 x"
            ]
        );
        assert!(!table.iter().any(|l| l.starts_with("| 8 |")));
        assert!(grid(&run).contains(&"| 512 | 75 (1.25) |".to_string()));
    }

    #[test]
    fn a_trace_is_the_sum_of_its_calls_and_no_cell() {
        let call = |call: u64, us: f64| {
            line(json!({"trace": "245K", "call": call, "calls": 2, "us": us, "m": call, "n": 9}))
        };
        let all = Results::of(&[call(0, 999.0), call(0, 1500.0), call(1, 900.0)]);
        let table = traces(&all);
        let row = row(&table, "| 245K |");
        assert_eq!(row, ["245K", "2", "2.0", "0.12", "2.40", "20.00"]);
        assert!(latest(&all).is_none());
    }
}
