//! Indexer-like scores of a real text, for the benches of selection, and what figure 3 of the HPC-Ops
//! paper shows of them.
//!
//! ```bash
//! bible -f "gen1:1-rev22:21" > text.txt      # Debian's bible-kjv, or any long text
//! cargo run --release --example indexer_scores -- --text text.txt --tokens 131072 --rows 512 --out scores.safetensors
//! cargo run --release --example indexer_scores -- --statistics scores.safetensors > score_statistics.jsonl
//! cargo bench --features cuda --bench selection -- --grid real --real scores.safetensors
//! ```
//!
//! A score is the sum over heads of w ReLU(q k), as in DeepSeek's lightning indexer, from the queries and
//! keys that a Llama model (SmolLM2 by default) has in one of its layers, with equal weights w. They are
//! indexer-*like*: the model has no indexer, and was not trained to attend by these scores.
//!
//! What is the model's own and what is not: SmolLM2 was trained on 8,192 tokens, and the texts are
//! longer. So the text goes through the model in windows, each of which holds the first tokens of the
//! text (the attention sink), the half window before, and the new half: no query or key is computed at
//! a position that the model was not trained on. The scores then need positions over the whole text, and
//! there `--rotary` chooses: "interpolated" divides them so that the last is the last that the model
//! knows, "extrapolated" takes them as they are, which no such model was trained on, and "none" leaves
//! queries and keys as they are, so that scores know the words alone.

mod llama;
#[path = "../../tests/common/machine.rs"]
mod machine;
mod scores;
#[allow(dead_code)] // Shared with `generate`, which uses all of it.
#[path = "../generate/source.rs"]
mod source;
mod statistics;
#[allow(dead_code)]
#[path = "../generate/tokenizer.rs"]
mod tokenizer;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{ensure, Context, Result};
use candle_core::{DType, Device, Tensor};
use clap::{Parser, ValueEnum};

use llama::Llama;
use scores::Scores;
use statistics::Statistics;

/// Tokens at the begin of the text that every window sees: where attention sinks.
const SINKS: usize = 4;

#[derive(Parser)]
struct Args {
    /// The text
    #[arg(long, required_unless_present = "statistics", requires = "out")]
    text: Option<PathBuf>,

    /// Where the scores go: a .safetensors file
    #[arg(long)]
    out: Option<PathBuf>,

    /// A local folder, a .gguf or .safetensors file or a hub id of a Llama model [default: SmolLM2]
    #[arg(long)]
    model: Option<String>,

    /// Take the queries and keys of this layer, from 0
    #[arg(long, default_value_t = 8)]
    layer: usize,

    /// How many tokens of the text [default: all]
    #[arg(long)]
    tokens: Option<usize>,

    /// Queries: of the last so many tokens
    #[arg(long, default_value_t = 512)]
    rows: usize,

    /// Tokens of a window [default: what the model was trained on, and at most 2048]
    #[arg(long)]
    window: Option<usize>,

    /// Positions in the scores
    #[arg(long, value_enum, default_value_t = Positions::Interpolated)]
    rotary: Positions,

    /// Print what figure 3 shows of a file of scores, as JSON lines
    #[arg(long, value_name = "FILE", conflicts_with = "text")]
    statistics: Option<PathBuf>,

    /// Of the statistics: K
    #[arg(long, default_value_t = 2048)]
    k: usize,

    /// Of the statistics: rows at equal spacing
    #[arg(long, default_value_t = 128)]
    sample: usize,

    /// Work on the CPU though there is a GPU
    #[arg(long)]
    cpu: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Positions {
    Interpolated,
    Extrapolated,
    None,
}

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("error: {e:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<()> {
    if let Some(file) = &args.statistics {
        return print_statistics(args, file);
    }
    let device = match args.cpu {
        true => Device::Cpu,
        false => Device::cuda_if_available(0)?,
    };
    let (Some(text), Some(out)) = (&args.text, &args.out) else {
        return Ok(()); // clap has said what is missing
    };
    let text =
        std::fs::read_to_string(text).with_context(|| format!("cannot read {}", text.display()))?;
    let files = source::find(&source::Request {
        model: args.model.as_deref(),
        ..source::Request::default()
    })?;
    let (model, tokenizer) = llama::load(&files, args.layer, &device)?;
    let mut tokens = tokenizer::encode_prompt(&tokenizer, &text)?;
    if let Some(most) = args.tokens {
        ensure!(
            most <= tokens.len(),
            "--tokens is {most}, the text has {}",
            tokens.len()
        );
        tokens.truncate(most);
    }
    let window = args.window.unwrap_or(model.config.context.min(2048));
    ensure!(
        (2 * SINKS + 2..=model.config.context).contains(&window),
        "--window is {window}, accepted are {} to the model's context of {}",
        2 * SINKS + 2,
        model.config.context
    );
    ensure!(
        (1..=tokens.len()).contains(&args.rows),
        "--rows is {}, accepted are 1 to the {} tokens",
        args.rows,
        tokens.len()
    );
    let start = Instant::now();
    let scores = make(&model, &tokens, args.rows, window, args.rotary)?;
    scores.save(out)?;
    let extrapolated = match args.rotary {
        Positions::Extrapolated => tokens.len().saturating_sub(model.config.context),
        _ => 0,
    };
    println!(
        "{}: {} queries and {} keys of layer {} of {}, {} heads; positions: {:?}, {extrapolated} beyond the model's \
         context of {}; {:.1} s",
        out.display(),
        args.rows,
        tokens.len(),
        args.layer,
        files.name,
        model.config.heads,
        args.rotary,
        model.config.context,
        start.elapsed().as_secs_f64()
    );
    Ok(())
}

/// A window of a text: what it reads, and which of it is new.
#[derive(Debug, PartialEq, Eq)]
struct Window {
    /// From here on, after the sinks where it is not 0.
    begin: usize,
    /// From here on, to `end`.
    new: usize,
    end: usize,
}

/// The windows of a text of `n` tokens.
fn windows(n: usize, window: usize) -> Vec<Window> {
    let mut windows = vec![Window {
        begin: 0,
        new: 0,
        end: n.min(window),
    }];
    let half = window / 2;
    for new in (window..n).step_by(half) {
        windows.push(Window {
            begin: new - (window - half - SINKS),
            new,
            end: n.min(new + half),
        });
    }
    windows
}

fn make(
    model: &Llama,
    tokens: &[u32],
    rows: usize,
    window: usize,
    rotary: Positions,
) -> Result<Scores> {
    let n = tokens.len();
    let scale = match rotary {
        Positions::Interpolated => (model.config.context as f64 / n as f64).min(1.0),
        Positions::Extrapolated => 1.0,
        Positions::None => 0.0,
    };
    let rotate = |x: &Tensor, first: usize| -> Result<Tensor> {
        let count = x.dim(0)?;
        let positions: Vec<f64> = (first..first + count).map(|i| i as f64 * scale).collect();
        Ok(model.rotate(x, &positions)?.to_dtype(DType::F16)?)
    };
    let (mut queries, mut keys) = (vec![], vec![]);
    for part in windows(n, window) {
        let sinks = if part.begin > 0 { SINKS } else { 0 };
        let read = [&tokens[..sinks], &tokens[part.begin..part.end]].concat();
        let (q, k) = model.queries_and_keys(&read)?;
        let known = sinks + part.new - part.begin;
        let count = part.end - part.new;
        keys.push(rotate(&k.narrow(0, known, count)?, part.new)?);
        let first = part.new.max(n - rows);
        if first < part.end {
            let q = q.narrow(0, known + first - part.new, part.end - first)?;
            queries.push(rotate(&q, first)?);
        }
    }
    let (queries, keys) = (Tensor::cat(&queries, 0)?, Tensor::cat(&keys, 0)?);
    let (_, heads, d) = queries.dims3()?;
    let weight = 1.0 / (heads as f64 * (d as f64).sqrt());
    let weights = Tensor::full(weight as f32, heads, queries.device())?;
    Ok(Scores::new(queries, keys, weights)?)
}

fn print_statistics(args: &Args, file: &Path) -> Result<()> {
    let scores = Scores::load(file)?;
    let (m, _) = scores.dims()?;
    let shortest = scores.length(0)?;
    ensure!(
        shortest >= 4 * args.k,
        "--k is {}, the shortest row has {shortest} scores: at most {} is accepted",
        args.k,
        shortest / 4
    );
    let sample = args.sample.clamp(1, m);
    let mut statistics = Statistics::new(args.k);
    for row in (0..sample).map(|i| i * m / sample) {
        let values = scores.rows(row, 1)?.flatten_all()?.to_vec1::<f32>()?;
        statistics.add(&values[..scores.length(row)?])?;
    }
    let name = file.file_name().unwrap_or_default().to_string_lossy();
    let machine = machine::Machine::of(&Device::Cpu);
    for mut line in statistics.lines() {
        line["scores"] = name.as_ref().into();
        line["gpu"] = machine.gpu.as_str().into();
        line["rev"] = machine.rev.as_str().into();
        line["date"] = machine.date.as_str().into();
        println!("{line}");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_token_is_new_once_and_no_window_is_too_long() {
        for (n, window) in [
            (1, 16),
            (16, 16),
            (17, 16),
            (100, 16),
            (1000, 31),
            (4096, 64),
        ] {
            let mut next = 0;
            for part in windows(n, window) {
                assert_eq!(part.new, next);
                assert!(part.begin <= part.new && part.new < part.end);
                let sinks = if part.begin > 0 { SINKS } else { 0 };
                assert!(part.end - part.begin + sinks <= window);
                assert!(part.begin == 0 || part.begin >= SINKS, "sinks come twice");
                next = part.end;
            }
            assert_eq!(next, n);
        }
    }

    #[test]
    fn a_row_is_the_weighted_sum_over_heads() -> candle_core::Result<()> {
        let cpu = &Device::Cpu;
        let queries = Tensor::new(&[[[1f32, 0.0], [0.0, 2.0]], [[1.0, 1.0], [-1.0, 0.0]]], cpu)?;
        let keys = Tensor::new(&[[[1f32, 1.0]], [[-1.0, 2.0]], [[0.5, 0.0]]], cpu)?;
        let weights = Tensor::new(&[1f32, 0.5], cpu)?;
        let scores = Scores::new(
            queries.to_dtype(DType::F16)?,
            keys.to_dtype(DType::F16)?,
            weights,
        )?;
        let file = std::env::temp_dir().join(format!("scores-{}.safetensors", std::process::id()));
        scores.save(&file)?;
        let again = Scores::load(&file)?;
        std::fs::remove_file(&file)?;
        assert_eq!(again.dims()?, (2, 3));
        assert_eq!([again.length(0)?, again.length(1)?], [2, 3]);
        let rows = again.rows(0, 2)?.to_vec2::<f32>()?;
        assert_eq!(rows, [[1.0 + 1.0, 0.0 + 2.0, 0.5], [2.0, 1.0 + 0.5, 0.5]]);
        assert_eq!(again.rows(1, 1)?.to_vec2::<f32>()?[0], rows[1]);
        Ok(())
    }

    #[test]
    fn what_does_not_fit_is_an_error() -> candle_core::Result<()> {
        let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::F16, &Device::Cpu);
        let weights = || Tensor::zeros(3, DType::F32, &Device::Cpu);
        assert!(Scores::new(zeros(&[2, 3, 4])?, zeros(&[5, 2, 4])?, weights()?).is_err());
        assert!(Scores::new(zeros(&[6, 3, 4])?, zeros(&[5, 1, 4])?, weights()?).is_err());
        assert!(Scores::new(zeros(&[2, 2, 4])?, zeros(&[5, 1, 4])?, weights()?).is_err());
        assert!(Scores::new(zeros(&[2, 3, 4])?, zeros(&[5, 1, 4])?, weights()?).is_ok());
        Ok(())
    }
}
