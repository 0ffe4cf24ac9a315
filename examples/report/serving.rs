//! Whole models: throughput and latency of batches, and how often the truncation hits.

use crate::kernels::MODES;
use crate::lines::{Line, Results, Run};
use crate::readme::model_name;
use crate::text::{geometric_mean, number, optional, table};

fn is_serving(line: &Line) -> bool {
    line.is("generate") && line.has("ttft_ms_p50")
}

/// A model, a batch, and the tokens of a request.
fn workloads<'a>(run: &Run<'a>) -> Vec<(&'a str, u64, u64, u64)> {
    run.all(|l| {
        let tokens = (l.int("prompt_tokens"), l.int("new_tokens"));
        (l.text("model"), l.int("b"), tokens.0, tokens.1)
    })
}

/// The line of a sampler; without one, modes are all the same.
fn line_of<'a>(
    run: &Run<'a>,
    (model, b, prompt, new): (&str, u64, u64, u64),
    sampler: &str,
    mode: &str,
) -> Option<&'a Line> {
    run.line(|l| {
        (l.text("model"), l.int("b"), l.text("sampler")) == (model, b, sampler)
            && (l.int("prompt_tokens"), l.int("new_tokens")) == (prompt, new)
            && (sampler == "skip" || l.text("mode") == mode)
    })
}

/// Like the paper's table 2.
pub fn throughput(results: &Results) -> Vec<String> {
    let Some(run) = results.latest(is_serving) else {
        return Vec::new();
    };
    let mut rows = Vec::new();
    for work in workloads(&run) {
        let rate = |sampler, mode| {
            line_of(&run, work, sampler, mode).and_then(|l| l.number("tokens_per_s"))
        };
        let mut row = vec![
            model_name(work.0).to_string(),
            work.1.to_string(),
            format!("{}/{}", work.2, work.3),
            optional(rate("skip", ""), number),
        ];
        let mut gains = Vec::new();
        for mode in MODES {
            let (candle, ours) = (rate("candle", mode), rate("topk", mode));
            gains.extend(candle.zip(ours).map(|(candle, ours)| ours / candle));
            row.push(format!(
                "{} / {}",
                optional(candle, number),
                optional(ours, number)
            ));
        }
        row.push(optional(geometric_mean(&gains), |gain| {
            format!("{gain:.2} x")
        }));
        rows.push(row);
    }
    let mut out = vec![
        "### Throughput of whole models (the paper's table 2)".to_string(),
        String::new(),
        "`generate --measure`: tokens a second of all requests of a batch, prompts included; for each mode Candle's \
         sampler, once a row, / `sample_batch`; the gain is the geometric mean of the three."
            .to_string(),
        String::new(),
    ];
    let mut head = vec!["model", "B", "prompt/new", "no sampling"];
    head.extend(MODES);
    head.push("gain");
    out.extend(table(&head, &rows));
    out.extend([String::new(), format!("{}.", run.source()), String::new()]);
    out
}

/// Like the paper's table 3.
pub fn latency(results: &Results) -> Vec<String> {
    let Some(run) = results.latest(is_serving) else {
        return Vec::new();
    };
    let mut rows = Vec::new();
    for work in workloads(&run) {
        let none = [("skip", "")];
        let sampled = MODES.map(|mode| [("candle", mode), ("topk", mode)]);
        for &(sampler, mode) in none.iter().chain(sampled.as_flattened()) {
            let Some(line) = line_of(&run, work, sampler, mode) else {
                continue;
            };
            let mut row = vec![
                model_name(work.0).to_string(),
                work.1.to_string(),
                format!("{}/{}", work.2, work.3),
                if mode.is_empty() { "-" } else { mode }.to_string(),
                sampler.to_string(),
            ];
            for time in ["ttft", "tpot", "e2e"] {
                let percentiles = [50, 95, 99].map(|percent| {
                    let ms = line.number(&format!("{time}_ms_p{percent}"));
                    optional(ms, |ms| format!("{ms:.2}"))
                });
                row.push(percentiles.join(" / "));
            }
            rows.push(row);
        }
    }
    let mut out = vec![
        "### Latency of whole models (the paper's table 3)".to_string(),
        String::new(),
        "To the first token, of each token after it, and end to end, in ms: p50 / p95 / p99."
            .to_string(),
        String::new(),
    ];
    let head = [
        "model",
        "B",
        "prompt/new",
        "mode",
        "sampler",
        "TTFT",
        "TPOT",
        "E2EL",
    ];
    out.extend(table(&head, &rows));
    out.extend([String::new(), format!("{}.", run.source()), String::new()]);
    out
}

/// Like the paper's table 1.
pub fn hit_rates(results: &Results) -> Vec<String> {
    let Some(run) = results.latest(|l| l.is("hit_rates")) else {
        return Vec::new();
    };
    let mut rows = Vec::new();
    for model in run.all(|l| l.text("model")) {
        for mode in MODES {
            let of = |l: &Line| (l.text("model"), l.text("mode")) == (model, mode);
            let Some(line) = run.line(of) else { continue };
            let share = |key| optional(line.number(key), |x| format!("{x:.3}"));
            let three = |what| {
                let count = |of| optional(line.number(&format!("{what}_{of}")), number);
                ["mean", "p50", "p99"].map(count).join(" / ")
            };
            rows.push(vec![
                model_name(model).to_string(),
                mode.to_string(),
                line.int("positions").to_string(),
                share("hit_rate"),
                share("second_pass_rate"),
                share("fallback_rate"),
                three("gathered"),
                share("gathered_mass"),
                three("kept"),
                share("kept_mass"),
            ]);
        }
    }
    let mut out = vec![
        "### Hit rates on real logits (the paper's table 1)".to_string(),
        String::new(),
        "`generate --hit-rates`: shares of the positions of a text; candidates gathered where the truncation hit \
         (N_t, their mass S_t), and tokens kept: mean / p50 / p99."
            .to_string(),
        String::new(),
    ];
    let head = [
        "model",
        "mode",
        "positions",
        "hit rate",
        "second pass",
        "fallback",
        "gathered",
        "their mass",
        "kept",
        "kept mass",
    ];
    out.extend(table(&head, &rows));
    out.extend([String::new(), format!("{}.", run.source()), String::new()]);
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_gain_is_over_the_modes_that_both_have() {
        let line = |sampler: &str, mode: &str, rate: f64| {
            json!({
                "op": "generate", "model": "m", "b": 4, "sampler": sampler, "mode": mode,
                "prompt_tokens": 8, "new_tokens": 16, "tokens_per_s": rate,
                "ttft_ms_p50": 1.0, "tpot_ms_p50": 2.0, "rev": "r", "gpu": "g",
            })
        };
        let results = Results::of(&[
            line("skip", "", 900.0),
            line("candle", "k50", 100.0),
            line("topk", "k50", 200.0),
            line("candle", "p0.9", 100.0),
            line("topk", "p0.9", 800.0),
            line("topk", "k50p0.9", 700.0),
        ]);
        let table = throughput(&results);
        assert!(
            table.contains(
                &"| m | 4 | 8/16 | 900 | 100 / 200 | 100 / 800 | - / 700 | 4.00 x |".to_string()
            ),
            "{table:#?}"
        );
        let table = latency(&results);
        assert!(table.contains(
            &"| m | 4 | 8/16 | k50 | topk | 1.00 / - / - | 2.00 / - / - | - / - / - |".to_string()
        ));
    }
}
