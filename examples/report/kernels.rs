//! Device times: against the floors, against the bars that are set, and against peers.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result};
use serde::Deserialize;

use crate::lines::{Line, Results, Run};
use crate::selection;
use crate::text::{geometric_mean, mode_order, number, optional, table};

const OPS: [&str; 3] = ["mask", "candidates", "sample"];
pub const MODES: [&str; 3] = ["k50", "p0.9", "k50p0.9"];

/// Whether a line is a device time of an op as it is, and no variant of an ablation.
fn is_op(line: &Line) -> bool {
    OPS.contains(&line.text("op")) && !line.has("variant")
}

pub fn latest(results: &Results) -> Option<Run<'_>> {
    results.latest(is_op)
}

/// What the op's time is held against: an op that writes the row copies it.
pub fn floor(line: &Line) -> f64 {
    let key = match line.text("op") {
        "mask" => "copy_floor_us",
        _ => "read_floor_us",
    };
    line.number(key).unwrap_or(f64::NAN)
}

pub fn us(line: &Line) -> f64 {
    line.number("us").unwrap_or(f64::NAN)
}

/// "mask in place" is one of the ops.
pub fn name(line: &Line) -> &str {
    match line.flag("in_place") {
        true => "mask in place",
        false => line.text("op"),
    }
}

fn place(line: &Line) -> String {
    format!(
        "V {}, B {}, {}, {}",
        line.int("v"),
        line.int("b"),
        line.text("mode"),
        name(line)
    )
}

/// One table for each op, dtype and law.
pub fn grid(run: &Run) -> Vec<String> {
    let mut out = Vec::new();
    for (op, dtype, dist) in run.all(|l| (name(l), l.text("dtype"), l.text("dist"))) {
        let of = |l: &Line| name(l) == op && l.text("dtype") == dtype && l.text("dist") == dist;
        let lines: Vec<_> = run.lines.iter().copied().filter(|l| of(l)).collect();
        let mut modes: Vec<_> = lines.iter().map(|l| l.text("mode")).collect();
        mode_order(&mut modes);
        modes.dedup();
        let mut shapes: Vec<_> = lines.iter().map(|l| (l.int("v"), l.int("b"))).collect();
        shapes.sort();
        shapes.dedup();
        let mut rows = Vec::new();
        for (v, b) in shapes {
            let at = |mode: &str| {
                run.line(|l| of(l) && (l.int("v"), l.int("b"), l.text("mode")) == (v, b, mode))
            };
            let any = modes.iter().find_map(|mode| at(mode));
            let floor_of = |key| optional(any.and_then(|l| l.number(key)), number);
            let mut row = vec![v.to_string(), b.to_string()];
            row.extend([floor_of("read_floor_us"), floor_of("copy_floor_us")]);
            row.extend(modes.iter().map(|mode| {
                at(mode).map_or("-".to_string(), |l| {
                    format!("{} ({:.2})", number(us(l)), us(l) / floor(l))
                })
            }));
            rows.push(row);
        }
        let against = if op.starts_with("mask") {
            "copy"
        } else {
            "read"
        };
        out.extend([
            format!("### {op}, {dtype}, {dist} logits"),
            String::new(),
            format!("In us, and in brackets how many {against} floors."),
            String::new(),
        ]);
        let mut head = vec!["V", "B", "read floor", "copy floor"];
        head.extend(&modes);
        out.extend(table(&head, &rows));
        out.push(String::new());
    }
    out
}

/// What is to be reached: a cell's time over this many floors, or over `least_us` where those are
/// fewer.
#[derive(Clone, Copy)]
struct Limit {
    least_us: f64,
    floors: f64,
}

/// A bar of the ops' own, and the goal beyond it.
struct Bar {
    name: &'static str,
    must: Limit,
    goal: Option<Limit>,
    of: fn(&Line) -> bool,
}

const fn floors(floors: f64) -> Limit {
    let least_us = 0.0;
    Limit { least_us, floors }
}

const fn or_us(least_us: f64, floors: f64) -> Limit {
    Limit { least_us, floors }
}

fn f32_peaked(line: &Line) -> bool {
    line.text("dtype") == "f32"
        && line.text("dist") == "peaked"
        && MODES.contains(&line.text("mode"))
}

const BARS: [Bar; 5] = [
    Bar {
        name: "`mask` f32, B >= 128, in copy floors",
        must: floors(1.6),
        goal: Some(floors(1.25)),
        of: |l| f32_peaked(l) && l.is("mask") && l.int("b") >= 128,
    },
    Bar {
        name: "`sample` and `candidates` f32, B >= 128, in read floors",
        must: floors(1.6),
        goal: Some(floors(1.2)),
        of: |l| f32_peaked(l) && !l.is("mask") && l.int("b") >= 128,
    },
    Bar {
        name: "`sample` f32, B <= 32, in read floors or 12 (8) us",
        must: or_us(12.0, 2.0),
        goal: Some(or_us(8.0, 1.4)),
        of: |l| f32_peaked(l) && l.is("sample") && l.int("b") <= 32,
    },
    Bar {
        name: "`mask` f32, B <= 32, in copy floors or 15 (10) us",
        must: or_us(15.0, 1.6),
        goal: Some(or_us(10.0, 1.3)),
        of: |l| f32_peaked(l) && l.is("mask") && l.int("b") <= 32,
    },
    Bar {
        name: "`mask` f32 on flat logits, in copy floors",
        must: floors(3.0),
        goal: None,
        of: |l| l.text("dtype") == "f32" && l.text("dist") == "normal" && l.is("mask"),
    },
];

/// A cell against a bar: what is to be compared with the must and the goal, and where it is.
struct Measured {
    value: f64,
    must: f64,
    goal: Option<f64>,
    place: String,
}

/// How many cells are within a bar, as a verdict.
pub fn verdict(met: usize, of: usize) -> String {
    match met == of {
        true => "yes".to_string(),
        false => format!("no: {met} of {of}"),
    }
}

fn at_most(
    name: &str,
    must: String,
    goal: Option<String>,
    cells: &[Measured],
) -> Option<Vec<String>> {
    let worst = cells
        .iter()
        .max_by(|a, b| (a.value / a.must).total_cmp(&(b.value / b.must)))?;
    let met = cells.iter().filter(|c| c.value <= c.must).count();
    let reached = cells
        .iter()
        .filter(|c| c.goal.is_some_and(|goal| c.value <= goal))
        .count();
    Some(vec![
        name.to_string(),
        cells.len().to_string(),
        format!("<= {must}"),
        verdict(met, cells.len()),
        goal.as_ref()
            .map_or("-".to_string(), |goal| format!("<= {goal}")),
        goal.map_or("-".to_string(), |_| verdict(reached, cells.len())),
        format!("{:.2} at {}", worst.value, worst.place),
    ])
}

/// The bars, with what was reached.
pub fn bars(run: &Run, peers: &Peers) -> Result<Vec<String>> {
    let mut rows = Vec::new();
    for bar in &BARS {
        let cells: Vec<_> = run
            .lines
            .iter()
            .filter(|l| (bar.of)(l))
            .map(|l| {
                let limit = |of: Limit| of.floors.max(of.least_us / floor(l));
                Measured {
                    value: us(l) / floor(l),
                    must: limit(bar.must),
                    goal: bar.goal.map(limit),
                    place: place(l),
                }
            })
            .collect();
        let goal = bar.goal.map(|goal| goal.floors.to_string());
        rows.extend(at_most(bar.name, bar.must.floors.to_string(), goal, &cells));
    }
    let halves: Vec<_> = run
        .lines
        .iter()
        .filter(|l| l.text("dtype") == "bf16" && l.text("dist") == "peaked" && l.int("b") >= 256)
        .filter_map(|half| {
            let whole = run.line(|l| f32_peaked(l) && same_cell(l, half))?;
            Some(Measured {
                value: us(half) / us(whole),
                must: 0.65,
                goal: Some(0.55),
                place: place(half),
            })
        })
        .collect();
    let name = "bf16, B >= 256, of the f32 time";
    rows.extend(at_most(name, "0.65".into(), Some("0.55".into()), &halves));
    for peer in &peers.peers {
        let gains: Vec<_> = peer.gains(run).into_iter().map(|gain| gain.2).collect();
        let Some(mean) = geometric_mean(&gains) else {
            continue;
        };
        let faster = gains.iter().filter(|&&gain| gain > 1.0).count();
        let least = gains.iter().copied().fold(f64::INFINITY, f64::min);
        let met = |bar: f64| match mean >= bar && faster == gains.len() {
            true => "yes".to_string(),
            false => format!("no: faster in {faster}"),
        };
        rows.push(vec![
            format!(
                "against {}, geometric mean, faster in every cell",
                peer.name
            ),
            gains.len().to_string(),
            format!(">= {} x", peer.must),
            met(peer.must),
            format!(">= {} x", peer.goal),
            met(peer.goal),
            format!("mean {mean:.2} x, least {least:.2} x"),
        ]);
    }
    let at = |l: &&&Line| l.int("b") == 1024 && l.int("v") == 262208 && l.has("workspace");
    let bytes = run
        .lines
        .iter()
        .filter(at)
        .map(|l| l.int("workspace"))
        .max();
    if let Some(bytes) = bytes {
        rows.push(vec![
            "workspace at B = 1024, V = 262208".to_string(),
            "1".to_string(),
            "<= 8 MB".to_string(),
            verdict((bytes <= 8 << 20) as usize, 1),
            "-".to_string(),
            "-".to_string(),
            format!("{bytes} bytes"),
        ]);
    }
    let exact = run.lines.iter().filter(|l| l.flag("exact")).count();
    rows.push(vec![
        "rows equal to a stable sort in f64".to_string(),
        run.lines.len().to_string(),
        "all".to_string(),
        verdict(exact, run.lines.len()),
        "-".to_string(),
        "-".to_string(),
        "-".to_string(),
    ]);
    let head = ["bar", "cells", "must", "met", "goal", "reached", "worst"];
    Ok(table(&head, &rows))
}

fn same_cell(a: &Line, b: &Line) -> bool {
    let key = |l: &Line| (l.int("v"), l.int("b"), l.flag("in_place"));
    key(a) == key(b)
        && ["op", "mode", "dist"]
            .iter()
            .all(|k| a.text(k) == b.text(k))
}

/// What others take on the same device: `peers.json`.
#[derive(Debug, Default, Deserialize)]
pub struct Peers {
    pub peers: Vec<Peer>,
    #[serde(default)]
    pub selection: Vec<selection::Peer>,
}

#[derive(Debug, Deserialize)]
pub struct Peer {
    pub name: String,
    /// The op that does as much, and whether in place.
    op: String,
    in_place: bool,
    /// When and on what it was measured.
    source: String,
    /// Geometric means of the gains that are to be reached.
    must: f64,
    goal: f64,
    pub cells: Vec<PeerCell>,
}

#[derive(Debug, Deserialize)]
pub struct PeerCell {
    pub b: u64,
    pub v: u64,
    pub mode: String,
    pub us: f64,
    /// In the peer's own run: copied for an op that writes the row, else read.
    floor_us: f64,
    #[serde(default)]
    call: String,
}

impl Peers {
    /// Of `peers.json` in the folder; none where there is no such file.
    pub fn read(folder: &Path) -> Result<Self> {
        let path = folder.join("peers.json");
        if !path.exists() {
            return Ok(Self::default());
        }
        let text = std::fs::read_to_string(&path)
            .with_context(|| format!("cannot read {}", path.display()))?;
        serde_json::from_str(&text).with_context(|| format!("{}", path.display()))
    }
}

impl Peer {
    /// Whether a line measures what the peer does.
    pub fn matches(&self, line: &Line) -> bool {
        f32_peaked(line) && line.is(&self.op) && line.flag("in_place") == self.in_place
    }

    /// The peer's cells, our lines for them, and how many times as long the peer takes: time over
    /// floor against time over floor, as the two were measured in different runs. A vocabulary of
    /// within a thousandth is the same.
    fn gains<'a>(&self, run: &Run<'a>) -> Vec<(&PeerCell, &'a Line, f64)> {
        let pairs = self.cells.iter().filter_map(|cell| {
            let ours = run.line(|l| {
                self.matches(l)
                    && l.int("b") == cell.b
                    && l.int("v").abs_diff(cell.v) * 1000 <= cell.v
                    && l.text("mode") == cell.mode
            })?;
            let gain = (cell.us / cell.floor_us) / (us(ours) / floor(ours));
            Some((cell, ours, gain))
        });
        pairs.collect()
    }

    /// A row a cell, and the geometric mean.
    pub fn table(&self, run: &Run) -> Option<Vec<String>> {
        let gains = self.gains(run);
        let mean = geometric_mean(&gains.iter().map(|gain| gain.2).collect::<Vec<_>>())?;
        let rows: Vec<_> = gains
            .iter()
            .map(|(cell, ours, gain)| {
                vec![
                    cell.v.to_string(),
                    cell.b.to_string(),
                    cell.mode.clone(),
                    match cell.call.as_str() {
                        "" => self.name.clone(),
                        call => format!("`{call}`"),
                    },
                    format!("{} ({:.2})", number(cell.us), cell.us / cell.floor_us),
                    format!("{} ({:.2})", number(us(ours)), us(ours) / floor(ours)),
                    format!("{gain:.2} x"),
                ]
            })
            .collect();
        let mut out = vec![
            format!("### Against {}", self.name),
            String::new(),
            format!(
                "In us, and in brackets how many floors of its own run; the gain is the ratio of the two in brackets. \
                 Geometric mean {mean:.2} x. {}",
                self.source
            ),
            String::new(),
        ];
        let head = ["V", "B", "mode", "peer", "its us", "us", "gain"];
        out.extend(table(&head, &rows));
        out.push(String::new());
        Some(out)
    }
}

/// Like the paper's figure 4: bytes beside the logits and the output.
pub fn workspace(run: &Run) -> Vec<String> {
    const MULTIPROCESSORS: u64 = 132;
    let mut cells = BTreeMap::new();
    for line in run.lines.iter().filter(|l| l.has("workspace")) {
        let bytes = cells.entry((line.int("v"), line.int("b"))).or_insert(0);
        *bytes = line.int("workspace").max(*bytes);
    }
    if cells.is_empty() {
        return Vec::new();
    }
    let rows: Vec<_> = cells
        .iter()
        .map(|(&(v, b), bytes)| {
            let (qrita, sort) = (b.min(MULTIPROCESSORS) * v * 4, b * v * 12);
            [v, b, *bytes, qrita, sort].map(|n| n.to_string()).to_vec()
        })
        .collect();
    let mut out = vec![
        "### Workspace (the paper's figure 4)".to_string(),
        String::new(),
        format!(
            "In bytes, the most of all ops; computed for the others: Qrita's buffer of V f32 for each of its programs, \
             of which there are as many as rows and at most {MULTIPROCESSORS} on an H200, and a sort's values (f32) and \
             indices (64 bits), without its temporaries."
        ),
        String::new(),
    ];
    out.extend(table(&["V", "B", "candle-topk", "Qrita", "sort"], &rows));
    out.push(String::new());
    out
}

/// The times of the paper's runs in ms, on an H100 and its own logits: k = 50, p = 0.9, V = 128256, B = 1024.
const PAPER_RUNS: [(&str, f64); 10] = [
    ("A", 0.919),
    ("B", 1.354),
    ("C", 1.308),
    ("D", 5.373),
    ("E", 4.931),
    ("F", 1.281),
    ("G", 7.773),
    ("H", 7.274),
    ("I", 2.099),
    ("J", 16.487),
];

/// What each run means for these kernels.
const RUNS: &str = "\
*Shipped* is what the crate runs: where the cut lies among the best 128 candidates, all pairs of these are compared \
(*ranked*), which also gives a small set to write without another look at the row, and the pass's f32 sum with its \
error bound stands in for a top-p's exact sum; where the truncation misses, histograms of 2048 bins narrow the row. \
Runs A to J are the paper's, with its steps in these kernels: a search finds the cut, a top-p alone sums the row \
exactly in a second pass, and the kept set is written, or drawn from, by another look at the row or at the candidates. \
*Hit*: the search is among the candidates on chip. *Miss*: candidates are gathered and given up, and the search is over \
the row in memory, a pass a step (in *shipped*: by histograms). *None*: nothing is sampled or gathered, a pass counts and \
finds the maximum, then as with a miss. *Quaternary* and *binary* search by three pivots a step or one, and leave the last \
32 elements to a warp. *Sort*: of the candidates by a bitonic sort on chip; of the row by a radix sort through memory, a \
block a row, four passes of eight bits over pairs of key and position. *Duplicates*: without, all that equals the last \
of a set is kept. *One size*: blocks of 1024 threads and a vector each in flight, 4096 logits a tile, in place of 256 \
threads, four such blocks to a multiprocessor and four vectors each.";

/// The paper's table 4: runs of kernels with techniques exchanged, beside the kernels as they are.
pub fn ablation(results: &Results) -> Vec<String> {
    let Some(run) = results.latest(|l| OPS.contains(&l.text("op")) && l.has("variant")) else {
        return Vec::new();
    };
    let mut out = vec![
        "### Ablation (the paper's table 4)".to_string(),
        String::new(),
        RUNS.to_string(),
        String::new(),
    ];
    for (v, b) in run.all(|l| (l.int("v"), l.int("b"))) {
        let lines: Vec<_> = run
            .lines
            .iter()
            .filter(|l| (l.int("v"), l.int("b")) == (v, b))
            .collect();
        // In the order of the bench.
        let mut variants = Vec::new();
        for line in &lines {
            if !variants.contains(&line.text("variant")) {
                variants.push(line.text("variant"));
            }
        }
        let mut modes: Vec<_> = lines.iter().map(|l| l.text("mode")).collect();
        mode_order(&mut modes);
        modes.dedup();
        let at = |variant: &str, op: &str, mode: &str| {
            let wanted =
                |l: &Line| (l.text("variant"), name(l), l.text("mode")) == (variant, op, mode);
            lines.iter().rev().find(|l| wanted(l))
        };
        let mut columns = Vec::new();
        for op in ["mask in place", "sample"] {
            columns.extend(modes.iter().map(|&mode| (op, mode)));
        }
        columns.retain(|&(op, mode)| variants.iter().any(|of| at(of, op, mode).is_some()));
        let (mut times, mut counts) = (Vec::new(), Vec::new());
        for &variant in &variants {
            let Some(any) = lines.iter().find(|l| l.text("variant") == variant) else {
                continue;
            };
            let yes = |key| if any.flag(key) { "yes" } else { "no" }.to_string();
            let mut row = vec![
                variant.to_string(),
                any.text("truncation").to_string(),
                any.text("search").to_string(),
                yes("duplicates"),
                if any.flag("tuned") { "tuned" } else { "one" }.to_string(),
            ];
            row.extend(columns.iter().map(|&(op, mode)| {
                let us_at = |of: &str| at(of, op, mode).map(|l| us(l));
                match (us_at(variant), us_at("shipped")) {
                    (Some(its), Some(shipped)) => {
                        format!("{} ({:.2})", number(its), its / shipped)
                    }
                    (its, _) => optional(its, number),
                }
            }));
            let paper = PAPER_RUNS.iter().find(|(of, _)| *of == variant);
            row.push(optional(paper, |(_, ms)| format!("{ms:.3}")));
            times.push(row);
            let mut row = vec![variant.to_string()];
            for &mode in &modes {
                let number_of = |key| at(variant, "sample", mode).and_then(|l| l.number(key));
                row.push(
                    ["hit_rate", "gathered", "steps", "row_reads"]
                        .map(|key| {
                            optional(number_of(key), |x| match key {
                                "hit_rate" => format!("{:.1} %", 100.0 * x),
                                _ => number(x),
                            })
                        })
                        .join(" / "),
                );
            }
            counts.push(row);
        }
        let floor_of = |key| {
            let floor = lines.first().and_then(|l| l.number(key));
            optional(floor, number)
        };
        out.extend([
            format!(
                "V = {v}, B = {b}, {}; in us, and in brackets of the time of what ships. A read floor is {} us, a copy \
                 floor {} us. The paper's times are of its mask of k50p0.9, in ms.",
                lines.first().map_or("", |l| l.text("dtype")),
                floor_of("read_floor_us"),
                floor_of("copy_floor_us"),
            ),
            String::new(),
        ]);
        let columns = columns.iter().map(|(op, mode)| format!("{op}, {mode}"));
        let mut head: Vec<String> = ["variant", "truncation", "search", "duplicates", "sizes"]
            .map(String::from)
            .into();
        head.extend(columns);
        head.push("paper".to_string());
        out.extend(table(
            &head.iter().map(String::as_str).collect::<Vec<_>>(),
            &times,
        ));
        out.extend([
            String::new(),
            "Means over the rows: hits / candidates gathered / steps of the search, sorts and histograms / passes over \
             the row until the cut is known (those of `sample`; `mask` has the same)."
                .to_string(),
            String::new(),
        ]);
        let mut head = vec!["variant"];
        head.extend(&modes);
        out.extend(table(&head, &counts));
        out.push(String::new());
    }
    out.extend([format!("{}.", run.source()), String::new()]);
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{json, Value};

    fn line(more: Value) -> Value {
        let mut line = json!({
            "op": "sample", "b": 128, "v": 128256, "mode": "k50", "dist": "peaked", "dtype": "f32",
            "us": 30.0, "read_floor_us": 20.0, "copy_floor_us": 40.0, "exact": true, "workspace": 0,
            "rev": "r", "gpu": "g", "date": "2026-01-01",
        });
        for (key, value) in more.as_object().unwrap() {
            line[key] = value.clone();
        }
        line
    }

    fn peers() -> Peers {
        serde_json::from_value(json!({"peers": [{
            "name": "P", "op": "sample", "in_place": false, "source": "s", "must": 2.0, "goal": 4.0,
            "cells": [
                {"b": 128, "v": 128256, "mode": "k50", "us": 90.0, "floor_us": 20.0},
                {"b": 8, "v": 128256, "mode": "k50", "us": 1.0, "floor_us": 20.0},
            ],
        }]}))
        .unwrap()
    }

    fn row<'a>(table: &'a [String], of: &str) -> Vec<&'a str> {
        let line = table.iter().find(|l| l.contains(of)).unwrap();
        line.trim_matches('|').split('|').map(str::trim).collect()
    }

    #[test]
    fn bars_count_the_cells_that_meet_them() {
        let all = Results::of(&[
            line(json!({})),
            line(json!({"op": "candidates", "us": 33.0})),
            line(json!({"b": 32, "us": 11.0, "read_floor_us": 4.0})),
            line(json!({"op": "mask", "in_place": true, "us": 44.0, "exact": false})),
        ]);
        let run = latest(&all).unwrap();
        let table = bars(&run, &peers()).unwrap();
        let sample = row(&table, "`candidates` f32, B >= 128");
        assert_eq!(
            sample[1..6],
            ["2", "<= 1.6", "no: 1 of 2", "<= 1.2", "no: 0 of 2"]
        );
        assert_eq!(sample[6], "1.65 at V 128256, B 128, k50, candidates");
        // 11 us are over two floors of 4, and under 12.
        let small = row(&table, "`sample` f32, B <= 32");
        assert_eq!(small[3..6], ["yes", "<= 1.4", "no: 0 of 1"]);
        let mask = row(&table, "`mask` f32, B >= 128");
        assert_eq!(mask[3..6], ["yes", "<= 1.25", "yes"]);
        assert_eq!(row(&table, "stable sort")[3], "no: 3 of 4");
        // 4.5 floors against 1.5.
        let peer = row(&table, "against P");
        assert_eq!(
            peer[1..6],
            ["1", ">= 2 x", "yes", ">= 4 x", "no: faster in 1"]
        );
    }

    #[test]
    fn half_precision_is_held_against_the_same_cell_in_f32() {
        let all = Results::of(&[
            line(json!({"b": 256, "us": 100.0})),
            line(json!({"b": 256, "us": 60.0, "dtype": "bf16"})),
            line(json!({"b": 512, "us": 60.0, "dtype": "bf16"})),
        ]);
        let table = bars(&latest(&all).unwrap(), &Peers::default()).unwrap();
        assert_eq!(
            row(&table, "bf16")[1..6],
            ["1", "<= 0.65", "yes", "<= 0.55", "no: 0 of 1"]
        );
    }

    #[test]
    fn a_peer_is_compared_by_time_over_floor() {
        let all = Results::of(&[line(json!({}))]);
        let peers = peers();
        let table = peers.peers[0].table(&latest(&all).unwrap()).unwrap();
        assert_eq!(
            row(&table, "| k50 |"),
            [
                "128256",
                "128",
                "k50",
                "P",
                "90 (4.50)",
                "30 (1.50)",
                "3.00 x"
            ]
        );
        assert!(peers.peers[0]
            .table(&latest(&Results::of(&[line(json!({"b": 4}))])).unwrap())
            .is_none());
    }

    #[test]
    fn variants_stay_out_of_the_grid_and_are_held_against_what_ships() {
        let of = |variant: &str, us: f64| {
            line(json!({
                "variant": variant, "truncation": "hit", "search": "binary", "duplicates": false, "tuned": true,
                "us": us, "steps": 7.0,
            }))
        };
        let all = Results::of(&[line(json!({})), of("shipped", 40.0), of("F", 60.0)]);
        let run = latest(&all).unwrap();
        assert_eq!(run.lines.len(), 1);
        assert!(grid(&run).iter().any(|l| l.contains("30 (1.50)")));
        let table = ablation(&all);
        let cells = ["F", "hit", "binary", "no", "tuned", "60 (1.50)", "1.281"];
        assert_eq!(row(&table, "| F |"), cells);
        assert!(table.contains(&"| F | - / - / 7.0 / - |".to_string()));
    }

    #[test]
    fn workspaces_of_others_are_bounded_as_theirs_are() {
        let all = Results::of(&[line(json!({"b": 1024}))]);
        let table = workspace(&latest(&all).unwrap());
        let cells = row(&table, "| 1024 |");
        assert_eq!(cells[2..], ["0", "67719168", "1576009728"]);
    }
}
