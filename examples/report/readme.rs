//! The README's tables: what lies between its results markers.

use std::path::Path;

use anyhow::{bail, ensure, Context, Result};

use crate::attention;
use crate::kernels;
use crate::lines::{Line, Results};
use crate::selection;
use crate::text::{mode_order, number, optional, ratio, table};

const BEGIN: &str = "<!-- results:begin -->";
const END: &str = "<!-- results:end -->";

/// What the README calls a mode.
fn mode_name(mode: &str) -> &str {
    match mode {
        "argmax" => "`ArgMax`",
        "all" => "`All`",
        "k50" => "`TopK` 50",
        "p0.9" => "`TopP` 0.9",
        "k50p0.9" => "`TopKThenTopP` 50, 0.9",
        other => other,
    }
}

/// By the name in the line, which is the file's for a local one: it does not say what the weights
/// are.
pub fn model_name(model: &str) -> &str {
    match model {
        "smollm2" => "SmolLM2-135M-Instruct, Q4_1",
        "gemma3" | "gemma3-270m" => "Gemma 3 270M, Q4_K_M",
        other => other,
    }
}

/// Rewrites the README, or with `check` only says whether it is up to date.
pub fn update(readme: &Path, results: &Results, peers: &kernels::Peers, check: bool) -> Result<()> {
    let name = readme.display();
    let text = std::fs::read_to_string(readme).with_context(|| format!("cannot read {name}"))?;
    let new = replaced(&text, &section(results, peers)?)
        .with_context(|| format!("{name}: one {BEGIN} is needed, and one {END} after it"))?;
    if new == text {
        println!("{name} is up to date");
    } else if check {
        bail!("{name} does not show what the results hold: run the report with --readme")
    } else {
        std::fs::write(readme, new).with_context(|| format!("cannot write {name}"))?;
        println!("{name} rewritten");
    }
    Ok(())
}

fn replaced(text: &str, section: &str) -> Result<String> {
    let (before, rest) = text.split_once(BEGIN).context("there is no first marker")?;
    let (old, after) = rest.split_once(END).context("there is no second marker")?;
    ensure!(
        ![before, old, after]
            .iter()
            .any(|part| part.contains(BEGIN) || part.contains(END)),
        "a marker comes twice"
    );
    Ok(format!("{before}{BEGIN}\n{section}\n{END}{after}"))
}

fn section(results: &Results, peers: &kernels::Peers) -> Result<String> {
    let mut parts = vec![drop_in(results), batches(results), generate(results)];
    if let Some(run) = kernels::latest(results) {
        let mut part = vec![
            "**Device times** of the ops, as replays of a CUDA graph, against the time in which the logits can be \
             read, and copied, in the same run; `benches/results/h200/README.md` says how, and the report has every cell."
                .to_string(),
            String::new(),
        ];
        part.extend(kernels::bars(&run, peers)?);
        part.extend([String::new(), format!("{}.", run.source())]);
        parts.push(part);
    }
    if let Some(run) = selection::latest(results) {
        let mut part = vec![
            "**Device times** of `selection::TopK`, as replays of a CUDA graph, against the time in which the valid \
             scores can be read in the same run."
                .to_string(),
            String::new(),
        ];
        part.extend(selection::bars(&run, &peers.selection));
        part.extend([String::new(), format!("{}.", run.source())]);
        parts.push(part);
    }
    let attention = attention::summary(results);
    if !attention.is_empty() {
        parts.push(attention);
    }
    let parts: Vec<_> = parts.iter().map(|lines| lines.join("\n")).collect();
    Ok(parts.join("\n\n"))
}

fn drop_in(results: &Results) -> Vec<String> {
    let mut out = vec![
        "**One token, B = 1**: a call of `sample` on idle, ready f32 logits, host included, median, in us; \
         temperature 0.8. 64 logits of the row stand out, so that top-p keeps few tokens."
            .to_string(),
        String::new(),
    ];
    let wanted = |l: &Line| {
        l.is("sampler") && l.int("b") == 1 && ["candle", "topk"].contains(&l.text("sampler"))
    };
    let Some(run) = results.latest(wanted) else {
        out.push("Not measured.".to_string());
        return out;
    };
    let pairs = |dist: &str| {
        let of = |l: &&&Line| l.text("dist") == dist;
        let mut modes: Vec<_> = run
            .lines
            .iter()
            .filter(of)
            .map(|l| l.text("mode"))
            .collect();
        mode_order(&mut modes);
        modes.dedup();
        let mut pairs = Vec::new();
        for v in run.all(|l| l.int("v")) {
            for &mode in &modes {
                let us = |sampler| {
                    let line = run.line(|l| {
                        (
                            l.text("dist"),
                            l.int("v"),
                            l.text("mode"),
                            l.text("sampler"),
                        ) == (dist, v, mode, sampler)
                    });
                    line.and_then(|l| l.number("us"))
                };
                if let (Some(candle), Some(ours)) = (us("candle"), us("topk")) {
                    pairs.push((v, mode, candle, ours));
                }
            }
        }
        pairs
    };
    let rows: Vec<_> = pairs("peaked")
        .into_iter()
        .map(|(v, mode, candle, ours)| {
            vec![
                v.to_string(),
                mode_name(mode).to_string(),
                number(candle),
                number(ours),
                ratio(candle / ours),
            ]
        })
        .collect();
    let head = ["vocabulary", "mode", "Candle", "candle-topk", "ratio"];
    out.extend(table(&head, &rows));
    let normal = pairs("normal");
    if !normal.is_empty() {
        let ratios = || normal.iter().map(|(_, _, candle, ours)| candle / ours);
        let mut text = format!(
            "On flat (standard normal) logits, where `TopP` 0.9 keeps about half of the vocabulary: {} to {}",
            ratio(ratios().fold(f64::INFINITY, f64::min)),
            ratio(ratios().fold(0.0, f64::max)),
        );
        let top_p = normal.iter().filter(|(_, mode, ..)| *mode == "p0.9");
        if let Some((v, mode, candle, ours)) = top_p.min_by_key(|(v, ..)| v.abs_diff(128256)) {
            text += &format!(
                "; {} at {v} takes {} and {} us",
                mode_name(mode),
                number(*candle),
                number(*ours)
            );
        }
        out.extend([String::new(), text + "."]);
    }
    out.extend([String::new(), format!("{}.", run.source())]);
    out
}

fn batches(results: &Results) -> Vec<String> {
    const CALLS: [&str; 2] = ["topk sample_batch", "topk sample_tensor"];
    let mut out = vec![
        "**A batch**: `sample_batch`, which returns the tokens, and `sample_tensor`, which leaves them on the GPU \
         (a run of calls, so launches overlap), in us a batch."
            .to_string(),
        String::new(),
    ];
    let wanted = |l: &Line| {
        l.is("sampler") && CALLS.contains(&l.text("sampler")) && l.text("dist") == "peaked"
    };
    let Some(run) = results.latest(wanted) else {
        out.push("Not measured.".to_string());
        return out;
    };
    let mut modes = run.all(|l| l.text("mode"));
    mode_order(&mut modes);
    let mut rows = Vec::new();
    for (v, b) in run.all(|l| (l.int("v"), l.int("b"))) {
        let mut row = vec![v.to_string(), b.to_string()];
        for &mode in &modes {
            let us = CALLS.map(|call| {
                let line = run.line(|l| {
                    (l.int("v"), l.int("b"), l.text("mode"), l.text("sampler"))
                        == (v, b, mode, call)
                });
                optional(line.and_then(|l| l.number("us")), number)
            });
            row.push(us.join(" / "));
        }
        rows.push(row);
    }
    let mut head = vec!["vocabulary", "B"];
    head.extend(modes.iter().map(|mode| mode_name(mode)));
    out.extend(table(&head, &rows));
    out.extend([String::new(), format!("{}.", run.source())]);
    out
}

fn generate(results: &Results) -> Vec<String> {
    let mut out = vec![
        "**A whole model**: `generate --compare`, batch 1, in tokens a second after the first; one run a row."
            .to_string(),
        String::new(),
    ];
    // `generate --measure` has the same op and times of its own.
    let wanted = |l: &Line| l.is("generate") && !l.has("ttft_ms_p50");
    let compared = results.lines.iter().filter(|l| wanted(l));
    let mut models: Vec<_> = compared.map(|l| l.text("model")).collect();
    let rank = |model: &str| {
        let known = ["smollm2", "gemma3", "gemma3-270m"];
        known
            .iter()
            .position(|m| *m == model)
            .unwrap_or(known.len())
    };
    models.sort_by_key(|model| (rank(model), model.to_string()));
    models.dedup();
    let (mut rows, mut sources, mut alone) = (Vec::new(), Vec::new(), Vec::new());
    for model in models {
        let Some(run) = results.latest(|l| wanted(l) && l.text("model") == model) else {
            continue;
        };
        let mut modes = run.all(|l| l.text("mode"));
        mode_order(&mut modes);
        let mut skipped = Vec::new();
        for mode in modes {
            let of = |sampler: &str, key: &str| {
                let line = run.line(|l| (l.text("mode"), l.text("sampler")) == (mode, sampler));
                line.and_then(|l| l.number(key))
            };
            let rates = ["skip", "candle", "topk"].map(|sampler| of(sampler, "tokens_per_s"));
            skipped.extend(rates[0]);
            let gain = rates[1].zip(rates[2]).map(|(candle, ours)| ours / candle);
            let spent = ["candle", "topk"].map(|s| optional(of(s, "sampler_us"), number));
            let mut row = vec![model_name(model).to_string(), mode_name(mode).to_string()];
            row.extend(rates.map(|rate| optional(rate, number)));
            row.extend([optional(gain, ratio), spent.join(" / ")]);
            rows.push(row);
        }
        if skipped.len() > 1 {
            alone.push((model_name(model), skipped));
        }
        let source = run.source();
        if !sources.contains(&source) {
            sources.push(source);
        }
    }
    if rows.is_empty() {
        out.push("Not measured.".to_string());
        return out;
    }
    out.extend(table(
        &[
            "model",
            "mode",
            "no sampling",
            "Candle",
            "candle-topk",
            "ratio",
            "sampler, us: Candle / candle-topk",
        ],
        &rows,
    ));
    if !alone.is_empty() {
        // The one column that repeats a measurement, and so the only word on the error of the
        // others.
        let spread: Vec<_> = alone
            .iter()
            .map(|(model, rates)| {
                let least = rates.iter().copied().fold(f64::INFINITY, f64::min);
                let most = rates.iter().copied().fold(0.0, f64::max);
                format!("{least:.0} to {most:.0} ({model})")
            })
            .collect();
        out.extend([
            String::new(),
            format!(
                "The host bounds these rates, and they vary: *no sampling* is the same work in every row of a model \
                 and came to {}. Ratios within that spread say nothing.",
                spread.join(", ")
            ),
        ]);
    }
    out.extend([String::new(), format!("{}.", sources.join("; "))]);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_lies_between_the_markers_is_replaced() {
        let text = format!("a\n{BEGIN}\nold\n{END}\nb\n");
        let new = replaced(&text, "new").unwrap();
        assert_eq!(new, format!("a\n{BEGIN}\nnew\n{END}\nb\n"));
        assert_eq!(replaced(&new, "new").unwrap(), new);
        assert!(replaced("a", "new").is_err());
        assert!(replaced(&format!("{END}{BEGIN}"), "new").is_err());
        assert!(replaced(&format!("{text}{text}"), "new").is_err());
    }

    #[test]
    fn a_table_without_lines_says_so() {
        let none = Results::default();
        for part in [drop_in(&none), batches(&none), generate(&none)] {
            assert_eq!(part.last().unwrap(), "Not measured.");
        }
    }
}
