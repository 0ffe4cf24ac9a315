//! Attention: indexer scores, scores with selection, and attention over positions, against the bars.

use anyhow::Result;

use crate::kernels::{floor, us, verdict};
use crate::lines::{Line, Results, Run};
use crate::plot::{Axes, Curve, Plots, COLORS, GREY};
use crate::selection::width;
use crate::text::{number, optional, table};

const OPS: [&str; 3] = ["indexer_scores", "index_topk", "sparse_attention"];

/// What is measured of a cell, and which way is better.
enum Value {
    AtLeast(fn(&Line) -> Option<f64>),
    AtMost(fn(&Line) -> Option<f64>),
}

struct Bar {
    name: &'static str,
    value: Value,
    must: f64,
    goal: Option<f64>,
    of: fn(&Line) -> bool,
}

fn tflops(line: &Line) -> Option<f64> {
    line.number("tflops")
}

fn time(line: &Line) -> Option<f64> {
    Some(us(line))
}

fn floors(line: &Line) -> Option<f64> {
    Some(us(line) / floor(line))
}

fn scores(line: &Line, dtype: &str) -> bool {
    let shape = [line.int("s"), line.int("t"), line.int("h")];
    line.is("indexer_scores") && line.text("dtype") == dtype && shape == [8192, 65536, 64]
}

/// One new token of so many sequences.
fn decode(line: &Line, dtype: &str, sequences: u64) -> bool {
    line.is("index_topk")
        && line.text("phase") == "decode"
        && line.text("cache") == "batched"
        && line.text("dtype") == dtype
        && [line.int("b"), line.int("n"), line.int("t")] == [sequences, 1, 65536]
}

fn latent(line: &Line, name: &str, [s, t]: [u64; 2]) -> bool {
    line.is("sparse_attention")
        && line.text("name") == name
        && line.text("dtype") == "bf16"
        && [line.int("s"), line.int("t"), line.int("h")] == [s, t, 128]
}

const BARS: [Bar; 16] = [
    Bar {
        name: "indexer scores bf16, 64 heads x 128, S = 8192, T = 64K causal, TFLOP/s",
        value: Value::AtLeast(tflops),
        must: 350.0,
        goal: Some(600.0),
        of: |l| scores(l, "bf16"),
    },
    Bar {
        name: "the same in fp8, TFLOP/s",
        value: Value::AtLeast(tflops),
        must: 500.0,
        goal: Some(980.0),
        of: |l| scores(l, "fp8"),
    },
    Bar {
        name: "`index_topk`, S = 8192, T = 64K, 1 GB, of scores and selection alone",
        value: Value::AtMost(|l| l.number("over_parts")),
        must: 1.1,
        goal: Some(1.0),
        of: |l| l.is("index_topk") && l.has("budget"),
    },
    Bar {
        name: "`index_topk` fp8, a token of 1 sequence of 64K, us",
        value: Value::AtMost(time),
        must: 30.0,
        goal: Some(15.0),
        of: |l| decode(l, "fp8", 1),
    },
    Bar {
        name: "of 8 sequences, us",
        value: Value::AtMost(time),
        must: 55.0,
        goal: Some(33.0),
        of: |l| decode(l, "fp8", 8),
    },
    Bar {
        name: "of 64 sequences, us",
        value: Value::AtMost(time),
        must: 230.0,
        goal: Some(166.0),
        of: |l| decode(l, "fp8", 64),
    },
    Bar {
        name: "the same in bf16, in read floors of the keys",
        value: Value::AtMost(floors),
        must: 1.6,
        goal: Some(1.2),
        of: |l| decode(l, "bf16", 64),
    },
    Bar {
        name: "MLA prefill bf16, 128 heads, K = 2048, S = 4096, T = 8K, TFLOP/s",
        value: Value::AtLeast(tflops),
        must: 300.0,
        goal: Some(600.0),
        of: |l| latent(l, "latent prefill", [4096, 8192]),
    },
    Bar {
        name: "the same at T = 128K, TFLOP/s",
        value: Value::AtLeast(tflops),
        must: 270.0,
        goal: Some(520.0),
        of: |l| latent(l, "latent prefill", [4096, 131072]),
    },
    Bar {
        name: "MLA decode bf16, 128 heads, K = 2048, 1 sequence, us",
        value: Value::AtMost(time),
        must: 30.0,
        goal: Some(15.0),
        of: |l| latent(l, "latent decode", [1, 65536]),
    },
    Bar {
        name: "64 sequences, us",
        value: Value::AtMost(time),
        must: 150.0,
        goal: Some(85.0),
        of: |l| latent(l, "latent decode", [64, 65536]),
    },
    Bar {
        name: "a step of GQA decoding, 8 sequences of 128K, of reading the dense keys and values once, x",
        value: Value::AtLeast(|l| l.number("over_dense_read")),
        must: 6.0,
        goal: Some(9.0),
        of: |l| l.text("name") == "gqa chain",
    },
    Bar {
        name: "GQA prefill bf16, 32 / 8 heads x 128, blocks of 64 that neighbours share, TFLOP/s",
        value: Value::AtLeast(tflops),
        must: 300.0,
        goal: Some(500.0),
        of: |l| {
            l.is("sparse_attention")
                && l.text("name") == "gqa prefill"
                && l.text("dtype") == "bf16"
                && l.int("block") == 64
                && l.int("shared") > 1
        },
    },
    Bar {
        name: "a whole layer, the last 4096 of 8K to 128K tokens, of the sum of its parts",
        value: Value::AtMost(|l| l.number("over_parts")),
        must: 1.15,
        goal: Some(1.05),
        of: |l| l.is("layer") && l.text("phase") == "prefill",
    },
    Bar {
        name: "a token of 1 and of 8 sequences",
        value: Value::AtMost(|l| l.number("over_parts")),
        must: 1.15,
        goal: Some(1.05),
        of: |l| l.is("layer") && l.text("phase") == "decode",
    },
    Bar {
        name: "SmolLM2's perplexity at K = 1024 of 8192 tokens, positions a group of heads, of the dense one's",
        value: Value::AtMost(|l| l.number("over_dense")),
        must: 1.01,
        goal: None,
        of: |l| {
            l.is("perplexity")
                && l.text("mode") == "group"
                && l.flag("center")
                && [l.int("k"), l.int("t")] == [1024, 8192]
        },
    },
];

/// The latest run of each op that was measured.
fn runs(results: &Results) -> Vec<Run<'_>> {
    let ops = OPS.into_iter().chain(["layer", "perplexity"]);
    ops.filter_map(|op| results.latest(|l| l.is(op))).collect()
}

/// The bars that have been measured. Each op's lines are those of its own latest run.
fn bars(results: &Results) -> Vec<Vec<String>> {
    let runs = runs(results);
    let lines: Vec<&Line> = runs.iter().flat_map(|run| &run.lines).copied().collect();
    let mut rows = Vec::new();
    for bar in &BARS {
        let cells = lines.iter().filter(|line| (bar.of)(line));
        // The worst of several.
        let (sign, value) = match bar.value {
            Value::AtLeast(value) => (-1.0, value),
            Value::AtMost(value) => (1.0, value),
        };
        let values = cells
            .filter_map(|line| value(line))
            .map(|value| sign * value);
        let Some(worst) = values.max_by(f64::total_cmp) else {
            continue;
        };
        let within = |bar: f64| verdict((worst <= sign * bar) as usize, 1);
        let bound = |bar: f64| format!("{} {bar}", if sign < 0.0 { ">=" } else { "<=" });
        rows.push(vec![
            bar.name.to_string(),
            match sign * worst {
                worst if worst < 2.0 => format!("{worst:.3}"),
                worst => format!("{worst:.2}"),
            },
            bound(bar.must),
            within(bar.must),
            optional(bar.goal, bound),
            optional(bar.goal, within),
        ]);
    }
    rows
}

const BAR_HEAD: [&str; 6] = ["bar", "measured", "must", "met", "goal", "reached"];

/// What the README shows: bars, layers, the perplexity.
pub fn summary(results: &Results) -> Vec<String> {
    let rows = bars(results);
    if rows.is_empty() {
        return vec![];
    }
    let mut out = vec![
        "**Sparse attention**: device times of the ops as replays of a CUDA graph, and layers as a model calls them; \
         each bar by its worst cell."
            .to_string(),
        String::new(),
    ];
    out.extend(table(&BAR_HEAD, &rows));
    out.push(String::new());
    let mut sources: Vec<String> = runs(results).iter().map(Run::source).collect();
    sources.dedup();
    out.extend(sources.iter().map(|source| format!("* {source}")));
    out.extend([String::new()]);
    out.extend(layers(results));
    out.extend(perplexity(results));
    out.truncate(out.len() - 1);
    out
}

/// Whole layers, and their parts.
fn layers(results: &Results) -> Vec<String> {
    let Some(run) = results.latest(|l| l.is("layer")) else {
        return vec![];
    };
    const PARTS: [&str; 8] = [
        "projections",
        "norms",
        "cache",
        "scores",
        "selection",
        "attention",
        "output",
        "dense",
    ];
    let mut rows = Vec::new();
    for line in &run.lines {
        let mut row = vec![
            line.text("model").to_string(),
            line.text("phase").to_string(),
            line.int("b").to_string(),
            width(line.int("t")),
            number(us(line)),
            format!("{:.2}", line.number("over_parts").unwrap_or(f64::NAN)),
            optional(line.number("graph_us"), number),
        ];
        row.extend(PARTS.map(|part| optional(line.number(&format!("{part}_us")), number)));
        rows.push(row);
    }
    let head = [
        "model",
        "phase",
        "B",
        "T",
        "us",
        "of its parts",
        "as a graph",
        "projections",
        "norms, RoPE",
        "cache",
        "scores",
        "selection",
        "attention",
        "output",
        "dense attention",
    ];
    let mut out = vec![
        "Whole layers in bf16 over 2048 positions, and their parts, in us: prefill is the last 4096 of T tokens, decoding a \
         token of each of B sequences, and the same *as a graph*. *Dense attention* is this crate's own, over all blocks."
            .to_string(),
        String::new(),
    ];
    out.extend(table(&head, &rows));
    out.push(String::new());
    out
}

/// The perplexity over K, of each way to choose.
fn perplexity(results: &Results) -> Vec<String> {
    let Some(run) = results.latest(|l| l.is("perplexity")) else {
        return vec![];
    };
    let way = |l: &Line| {
        let mut way = match l.text("mode") {
            "dense" => "dense".to_string(),
            "shared" => "the same for all heads".to_string(),
            mode => format!("a {mode}"),
        };
        if l.int("first") + l.int("last") > 0 {
            way += &format!(", first {} and last {}", l.int("first"), l.int("last"));
        }
        if l.has("center") && !l.flag("center") {
            way += ", keys as they are";
        }
        format!("{way}, {}", l.text("dtype"))
    };
    let ks = run.all(|l| l.int("k"));
    let mut ways: Vec<String> = run.lines.iter().map(|l| way(l)).collect();
    let mut seen = std::collections::HashSet::new();
    ways.retain(|way| seen.insert(way.clone()));
    let mut rows = Vec::new();
    for name in ways {
        let mut row = vec![name.clone()];
        for &k in &ks {
            let line = run.line(|l| l.int("k") == k && way(l) == name);
            row.push(match line {
                None => "-".to_string(),
                Some(l) if l.text("mode") == "dense" => {
                    optional(l.number("perplexity"), |x| format!("{x:.3}"))
                }
                Some(l) => optional(l.number("over_dense"), |x| {
                    format!("{:+.2} %", 100.0 * (x - 1.0))
                }),
            });
        }
        rows.push(row);
    }
    let tokens = run.all(|l| l.int("t"));
    let model = run.lines[0].text("model");
    let head: Vec<String> = ["mode".to_string()]
        .into_iter()
        .chain(ks.iter().map(|k| format!("K = {k}")))
        .collect();
    let mut out = vec![
        format!(
            "Perplexity of {} over {} tokens of the King James Bible: dense, and how much more with K positions.",
            crate::readme::model_name(model),
            tokens.iter().map(u64::to_string).collect::<Vec<_>>().join(", "),
        ),
        String::new(),
    ];
    let head: Vec<&str> = head.iter().map(String::as_str).collect();
    out.extend(table(&head, &rows));
    out.push(String::new());
    out
}

/// Bars and all lines.
pub fn tables(results: &Results) -> Vec<String> {
    let mut out = Vec::new();
    let rows = bars(results);
    if !rows.is_empty() {
        out.extend(["## Attention".to_string(), String::new()]);
        out.extend(table(&BAR_HEAD, &rows));
        out.push(String::new());
    }
    for (title, part) in [
        ("### Layers", layers(results)),
        ("### Perplexity", perplexity(results)),
    ] {
        if !part.is_empty() {
            out.extend([title.to_string(), String::new()]);
            out.extend(part);
        }
    }
    for op in OPS {
        let Some(run) = results.latest(|l| l.is(op)) else {
            continue;
        };
        let exact = run.lines.iter().filter(|l| l.flag("exact")).count();
        out.extend([format!("### `{op}`"), String::new()]);
        out.extend([
            format!(
                "{}. {exact} of {} cells are right.",
                run.source(),
                run.lines.len()
            ),
            String::new(),
        ]);
        let rows = run.lines.iter().map(|line| {
            let number_of = |key| optional(line.number(key), number);
            vec![
                what(line),
                line.text("dtype").to_string(),
                line.int("s").to_string(),
                width(line.int("t")),
                number(us(line)),
                number_of("tflops"),
                number_of("gbps"),
                number_of("read_floor_us"),
                number_of("scores_us"),
                number_of("selection_us"),
            ]
        });
        let head = [
            "what",
            "dtype",
            "S",
            "T",
            "us",
            "TFLOP/s",
            "GB/s",
            "read floor",
            "scores",
            "selection",
        ];
        out.extend(table(&head, &rows.collect::<Vec<_>>()));
        out.push(String::new());
    }
    out
}

/// What a line measures, but for its size.
fn what(line: &Line) -> String {
    let mut parts = vec![match line.text("name") {
        "" => line.text("phase").to_string(),
        name => name.to_string(),
    }];
    if line.has("kv_h") {
        parts.push(format!("{} / {} heads", line.int("h"), line.int("kv_h")));
    } else {
        parts.push(format!("{} heads", line.int("h")));
    }
    if line.int("n") > 1 {
        parts.push(format!("{} new tokens", line.int("n")));
    }
    if line.text("cache") == "paged" {
        parts.push(format!("pages of {}", line.int("page")));
    }
    if line.int("block") > 1 {
        parts.push(format!("blocks of {}", line.int("block")));
    }
    if line.int("shared") > 1 {
        parts.push(format!("{} rows share them", line.int("shared")));
    }
    if line.has("trace") {
        parts.push(format!("the last call of {}", line.text("trace")));
    }
    parts.join(", ")
}

pub fn draw(results: &Results, plots: &mut Plots) -> Result<()> {
    if let Some(run) = results.latest(|l| l.is("index_topk")) {
        for (dtype, color) in [("bf16", COLORS[0]), ("fp8", COLORS[1])] {
            let of = |l: &&&Line| {
                l.text("phase") == "decode"
                    && l.text("cache") == "batched"
                    && l.text("dtype") == dtype
                    && l.int("n") == 1
            };
            let points = |value: fn(&Line) -> Option<f64>| {
                let lines = run.lines.iter().filter(of);
                lines
                    .filter_map(|l| Some((l.int("b") as f64, value(l)?)))
                    .collect::<Vec<_>>()
            };
            let curves = vec![
                Curve::beside("read floor", GREY, points(|l| Some(floor(l)))),
                Curve::beside("scores", COLORS[2], points(|l| l.number("scores_us"))),
                Curve::main("scores and selection", color, points(time)),
            ];
            let title = format!("index_topk, {dtype}, a token a sequence");
            let axes = Axes::logarithmic("sequences B", "us");
            plots.draw(&format!("index-topk-{dtype}"), &title, axes, curves)?;
        }
    }
    if let Some(run) = results.latest(|l| l.is("sparse_attention")) {
        let mut curves = Vec::new();
        for (name, color) in [("latent decode", COLORS[0]), ("gqa decode", COLORS[1])] {
            let lines = run.lines.iter().filter(|l| l.text("name") == name);
            let points = lines.map(|l| (l.int("s") as f64, us(l))).collect();
            curves.push(Curve::main(name, color, points));
        }
        let axes = Axes::logarithmic("sequences B", "us");
        plots.draw(
            "sparse-decode",
            "attention over 2048 positions",
            axes,
            curves,
        )?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn measured() -> Results {
        Results::of(&[
            json!({"op": "indexer_scores", "dtype": "bf16", "s": 8192, "t": 65536, "h": 64, "phase": "prefill",
                "us": 20000.0, "tflops": 412.0, "read_floor_us": 5.0, "exact": true}),
            json!({"op": "index_topk", "dtype": "fp8", "s": 8, "t": 65536, "h": 64, "b": 8, "n": 1, "phase": "decode",
                "cache": "batched", "us": 60.0, "scores_us": 30.0, "selection_us": 20.0, "read_floor_us": 16.0,
                "exact": true}),
            json!({"op": "sparse_attention", "name": "latent decode", "phase": "decode", "dtype": "bf16", "s": 1,
                "t": 65536, "h": 128, "kv_h": 1, "us": 14.0, "tflops": 40.0, "read_floor_us": 2.0, "exact": false}),
            json!({"op": "layer", "model": "glm-5", "phase": "prefill", "b": 1, "s": 4096, "t": 8192, "us": 104.0,
                "parts_us": 100.0, "over_parts": 1.04, "scores_us": 7.0}),
            json!({"op": "perplexity", "model": "smollm2", "mode": "dense", "dtype": "bf16", "k": 1024, "t": 8192,
                "perplexity": 6.75, "over_dense": 1.0}),
            json!({"op": "perplexity", "model": "smollm2", "mode": "group", "dtype": "bf16", "k": 1024, "t": 8192,
                "center": true, "first": 4, "last": 32, "perplexity": 6.77, "over_dense": 1.003}),
        ])
    }

    #[test]
    fn bars_are_held_against_what_is_measured() {
        let rows = bars(&measured());
        let of = |name: &str| {
            rows.iter()
                .find(|row| row[0].starts_with(name))
                .expect(name)[1..]
                .join(" ")
        };
        assert_eq!(
            of("indexer scores bf16"),
            "412.00 >= 350 yes >= 600 no: 0 of 1"
        );
        assert_eq!(
            of("of 8 sequences"),
            "60.00 <= 55 no: 0 of 1 <= 33 no: 0 of 1"
        );
        assert_eq!(of("MLA decode"), "14.00 <= 30 yes <= 15 yes");
        assert_eq!(of("a whole layer"), "1.040 <= 1.15 yes <= 1.05 yes");
        assert_eq!(of("SmolLM2's perplexity"), "1.003 <= 1.01 yes - -");
        assert_eq!(rows.len(), 5, "nothing is said of what was not measured");
        assert!(bars(&Results::of(&[])).is_empty());
    }

    #[test]
    fn every_line_is_shown() {
        let text = tables(&measured()).join("\n");
        assert!(
            text.contains("| decode, 64 heads | fp8 | 8 | 64K | 60 | - | - | 16 | 30 | 20 |"),
            "{text}"
        );
        assert!(text.contains("latent decode, 128 / 1 heads"), "{text}");
        assert!(text.contains("0 of 1 cells are right"), "{text}");
        let layer =
            "| glm-5 | prefill | 1 | 8K | 104 | 1.04 | - | - | - | - | 7.0 | - | - | - | - |";
        assert!(text.contains(layer), "{text}");
        assert!(text.contains("| dense, bf16 | 6.750 |"), "{text}");
        let group = "| a group, first 4 and last 32, bf16 | +0.30 % |";
        assert!(text.contains(group), "{text}");
        let summary = summary(&measured()).join("\n");
        assert!(
            summary.contains(group) && summary.contains(layer),
            "{summary}"
        );
        assert!(super::summary(&Results::of(&[])).is_empty());
    }
}
