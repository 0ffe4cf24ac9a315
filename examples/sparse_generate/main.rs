//! A real model over chosen positions: SmolLM2, or another llama, whose attention is this crate's.
//!
//! Its own queries and keys are the indexer, without any training: a key's score is the sum over
//! heads of ReLU(q . k), for each head, for each group of heads or for all together. A text is read with dense and
//! with sparse attention at several K; what comes out is the perplexity, the speed, and the share of
//! the attention's mass that the chosen positions hold.
//!
//! ```bash
//! cargo run --release --example sparse_generate -- --text text.txt --context 2048 -k 256,512,1024
//! cargo run --release --example sparse_generate -- --prompt "Once upon a time" -k 256 -n 64
//! cargo run --release --features cuda --example sparse_generate -- --dummy-weights deepseek-v3.2
//! ```
//!
//! The model is in `model.rs`, its attention in `attend.rs`, reading a text in `perplexity.rs`. With
//! `--dummy-weights` the parts of one layer of the size of DeepSeek-V3.2 or llama-8B are timed
//! instead (`layers.rs`).

mod attend;
mod layers;
#[path = "../../tests/common/machine.rs"]
mod machine;
mod model;
mod perplexity;
#[allow(dead_code)] // What only the other example needs.
#[path = "../generate/source.rs"]
mod source;
#[allow(dead_code)]
#[path = "../generate/tokenizer.rs"]
mod tokenizer;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{bail, ensure, Context, Result};
use candle_core::{DType, Device, D};
use clap::Parser;
use serde_json::{json, Value};

use attend::{Scoring, Sparse};
use layers::{Size, Timed};
use machine::Machine;
use model::Llama;
use perplexity::{Outcome, Reading};

/// Reads or continues a text with a llama over chosen positions.
#[derive(Parser, Debug)]
#[command(version)]
struct Args {
    /// A local folder, a .gguf or .safetensors file, a hub id (owner/name), or "smollm2"
    #[arg(long, default_value = "smollm2")]
    model: String,

    /// Which .gguf file of a folder or hub model to take
    #[arg(long, value_name = "NAME")]
    gguf_file: Option<String>,

    /// Read this text, in windows of --context tokens
    #[arg(long, value_name = "FILE")]
    text: Option<PathBuf>,

    /// Tokens of a window [default: the model's context]
    #[arg(long)]
    context: Option<usize>,

    /// How many windows
    #[arg(long, default_value_t = 1)]
    windows: usize,

    /// Tokens that go through the model at a time
    #[arg(long, default_value_t = 256)]
    chunk: usize,

    /// Positions that a token attends to
    #[arg(short, long, value_delimiter = ',', default_values_t = [64, 128, 256, 512, 1024])]
    k: Vec<usize>,

    /// Positions for each head, for each group of heads, or the same for all
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = [Scoring::Head, Scoring::Group, Scoring::Shared])]
    scoring: Vec<Scoring>,

    /// Whether the mean of the earlier keys is taken off the indexer's keys
    #[arg(long, value_delimiter = ',', default_values_t = [true])]
    center: Vec<bool>,

    /// First positions that are always among the K
    #[arg(long, value_delimiter = ',', default_values_t = [0, 4])]
    first: Vec<usize>,

    /// Last positions that are always among the K, for each of --first
    #[arg(long, value_delimiter = ',', default_values_t = [0, 32])]
    last: Vec<usize>,

    /// Choose by blocks of so many positions: 1, 64 or 128
    #[arg(long, default_value_t = 1)]
    block: usize,

    /// First layers that stay dense
    #[arg(long, default_value_t = 0)]
    dense_layers: usize,

    /// Measure the share of the attention's mass too, by a dense pass beside the sparse one
    #[arg(long)]
    share: bool,

    /// Continue this text instead, densely and with the first K
    #[arg(long, conflicts_with = "text")]
    prompt: Option<String>,

    /// Tokens to continue with
    #[arg(short = 'n', long, default_value_t = 64)]
    sample_len: usize,

    /// Time the parts of a layer of this size, with random weights
    #[arg(long, value_enum, value_name = "SIZE", conflicts_with_all = ["text", "prompt"])]
    dummy_weights: Option<Size>,

    /// Keys of the layer
    #[arg(long, value_delimiter = ',', default_values_t = [8192, 32768, 131072])]
    contexts: Vec<usize>,

    /// New tokens at their end: 1 is decoding
    #[arg(long, value_delimiter = ',', default_values_t = [1, 4096])]
    rows: Vec<usize>,

    /// K of the layer
    #[arg(long, default_value_t = 2048)]
    layer_k: usize,

    /// How often each part is timed
    #[arg(long, default_value_t = 20)]
    rounds: usize,

    /// Bytes that scores take at a time
    #[arg(long, default_value_t = 256 << 20)]
    budget: usize,

    /// Run on the CPU even where there is a GPU
    #[arg(long)]
    cpu: bool,

    /// The type of weights and caches [default: f32 on the CPU, bf16 on a GPU]
    #[arg(long, value_parser = ["f32", "f16", "bf16"])]
    dtype: Option<String>,

    /// Append the measurements to this file, one JSON object a line
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,

    /// The revision of the code, for --json [default: what git says]
    #[arg(long, env = "CANDLE_TOPK_REV")]
    rev: Option<String>,
}

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            let message = format!("{e:#}");
            eprintln!("error: {}", message.lines().next().unwrap_or_default());
            ExitCode::FAILURE
        }
    }
}

/// A dtype in measurements.
pub fn dtype_name(dtype: DType) -> &'static str {
    match dtype {
        DType::F16 => "f16",
        DType::BF16 => "bf16",
        _ => "f32",
    }
}

fn device(cpu: bool) -> Result<Device> {
    if cpu || !candle_core::utils::cuda_is_available() {
        return Ok(Device::Cpu);
    }
    Ok(Device::new_cuda(0)?)
}

fn run(args: &Args) -> Result<()> {
    let device = device(args.cpu)?;
    let dtype = match args.dtype.as_deref() {
        Some("f16") => DType::F16,
        Some("bf16") => DType::BF16,
        None if !device.is_cpu() => DType::BF16,
        _ => DType::F32,
    };
    if let Some(size) = args.dummy_weights {
        return time_layers(args, size, dtype, &device);
    }
    let files = source::find(&source::Request {
        model: Some(&args.model),
        revision: None,
        gguf_file: args.gguf_file.as_deref(),
    })?;
    let (model, tokenizer) = model::load(&files, dtype, &device)?;
    match (&args.text, &args.prompt) {
        (Some(path), _) => read_text(args, &model, &tokenizer, path, &files.name),
        (None, Some(prompt)) => continue_text(args, &model, &tokenizer, prompt),
        (None, None) => bail!("give a --text to read, a --prompt to continue or --dummy-weights"),
    }
}

impl Args {
    /// Pairs of forced first and last positions.
    fn forced(&self) -> Result<Vec<(usize, usize)>> {
        ensure!(
            self.first.len() == self.last.len(),
            "--first has {} numbers and --last {}, as many are needed",
            self.first.len(),
            self.last.len()
        );
        Ok(self
            .first
            .iter()
            .copied()
            .zip(self.last.iter().copied())
            .collect())
    }

    /// All ways to choose, but for those whose forced positions leave no choice.
    fn ways(&self) -> Result<Vec<Sparse>> {
        ensure!(
            matches!(self.block, 1 | 64 | 128),
            "--block is {}, accepted are 1, 64 and 128",
            self.block
        );
        let mut ways = Vec::new();
        for &scoring in &self.scoring {
            for &center in &self.center {
                for (first, last) in self.forced()? {
                    let way = |&k: &usize| Sparse {
                        k,
                        block: self.block,
                        scoring,
                        first,
                        last,
                        center,
                        dense_layers: self.dense_layers,
                        budget: self.budget,
                    };
                    ways.extend(self.k.iter().map(way).filter(Sparse::has_choice));
                }
            }
        }
        Ok(ways)
    }

    fn keep(&self, mut line: Value, device: &Device) -> Result<()> {
        let Some(path) = &self.json else {
            return Ok(());
        };
        let machine = Machine::of(device);
        line["gpu"] = json!(machine.gpu);
        line["rev"] = json!(self.rev.as_ref().unwrap_or(&machine.rev));
        line["date"] = json!(machine.date);
        let mut file = std::fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(path)
            .with_context(|| format!("cannot write {}", path.display()))?;
        Ok(writeln!(file, "{line}")?)
    }
}

fn read_text(
    args: &Args,
    model: &Llama,
    tokenizer: &tokenizers::Tokenizer,
    path: &Path,
    name: &str,
) -> Result<()> {
    let text =
        std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    let context = args.context.unwrap_or(model.sizes.context);
    ensure!(
        (2..=model.sizes.context).contains(&context),
        "--context is {context}, the model accepts 2 to {}",
        model.sizes.context
    );
    ensure!(args.chunk > 0, "--chunk is 0, at least 1 token is needed");
    // A token has a byte at least in what is read of the text; the rest need not be encoded.
    let enough = text
        .char_indices()
        .nth(16 * context * args.windows)
        .map_or(text.len(), |(at, _)| at);
    let tokens = tokenizer::encode_prompt(tokenizer, &text[..enough])?;
    let windows: Vec<&[u32]> = tokens.chunks_exact(context).take(args.windows).collect();
    ensure!(
        windows.len() == args.windows && args.windows > 0,
        "the text has {} tokens, {} windows of {context} are asked for",
        tokens.len(),
        args.windows
    );
    println!(
        "{name}, {} window(s) of {context} tokens of {}",
        windows.len(),
        path.display()
    );
    println!("    K  scoring  center  first  last   perplexity  against dense   late tokens  against dense   mass share  tokens/s");
    let reading = |late_from| Reading {
        chunk: args.chunk,
        share: args.share,
        late_from,
    };
    let ways = args.ways()?;
    // Late tokens are those from K on, so dense attention has a line for each K.
    let outcomes = perplexity::read_from(model, &windows, reading(0), None, &args.k)?;
    let dense: Vec<(usize, Outcome)> = args.k.iter().copied().zip(outcomes).collect();
    for (k, outcome) in &dense {
        print_line(args, model, name, context, (*k, None), outcome, outcome)?;
    }
    for way in ways {
        let outcome = perplexity::read(model, &windows, reading(way.k), Some(way))?;
        let (_, dense) = dense
            .iter()
            .find(|(k, _)| *k == way.k)
            .expect("dense attention is read for each K");
        print_line(
            args,
            model,
            name,
            context,
            (way.k, Some(way)),
            &outcome,
            dense,
        )?;
    }
    Ok(())
}

fn print_line(
    args: &Args,
    model: &Llama,
    name: &str,
    context: usize,
    (k, way): (usize, Option<Sparse>),
    outcome: &Outcome,
    dense: &Outcome,
) -> Result<()> {
    let percent = |own: f64, dense: f64| format!("{:+.2} %", 100.0 * (own / dense - 1.0));
    let or_dash = |text: Option<String>| text.unwrap_or("-".to_string());
    let late = outcome.late_perplexity();
    let late_ratio = late.zip(dense.late_perplexity());
    println!(
        "{k:>5}  {:<7}  {:<6}  {:>5}  {:>4}   {:>10.4}  {:>13}   {:>11}  {:>13}   {:>10}  {:>8.1}",
        way.map_or("dense", |way| way.scoring.name()),
        or_dash(way.map(|way| way.center.to_string())),
        or_dash(way.map(|way| way.first.to_string())),
        or_dash(way.map(|way| way.last.to_string())),
        outcome.perplexity(),
        percent(outcome.perplexity(), dense.perplexity()),
        or_dash(late.map(|late| format!("{late:.4}"))),
        or_dash(late_ratio.map(|(own, dense)| percent(own, dense))),
        or_dash(outcome.share().map(|share| format!("{share:.4}"))),
        outcome.tokens_per_second(),
    );
    let line = json!({
        "op": "perplexity", "model": name, "phase": "prefill", "t": context, "k": k,
        "h": model.sizes.heads, "d": model.sizes.head_dim, "dtype": dtype_name(model.dtype),
        "mode": way.map_or("dense", |way| way.scoring.name()),
        "center": way.map(|way| way.center), "first": way.map(|way| way.first), "last": way.map(|way| way.last),
        "perplexity": outcome.perplexity(), "over_dense": outcome.perplexity() / dense.perplexity(),
        "late_perplexity": late,
        "block": way.map(|way| way.block), "dense_layers": way.map(|way| way.dense_layers), "mass_share": outcome.share(),
        "mass_share_layers": outcome.layer_shares(), "tokens_per_s": outcome.tokens_per_second(),
    });
    args.keep(line, &model.device)
}

fn continue_text(
    args: &Args,
    model: &Llama,
    tokenizer: &tokenizers::Tokenizer,
    prompt: &str,
) -> Result<()> {
    let tokens = tokenizer::encode_prompt(tokenizer, prompt)?;
    ensure!(
        !tokens.is_empty(),
        "the prompt has no tokens: give a --prompt"
    );
    let capacity = (tokens.len() + args.sample_len).min(model.sizes.context);
    ensure!(
        capacity > tokens.len(),
        "the prompt has {} tokens, the model's context is {}",
        tokens.len(),
        model.sizes.context
    );
    let way = args.ways()?.into_iter().next();
    for way in [None, way] {
        let mut attend = |step: &model::Step| match way {
            None => attend::dense(step),
            Some(way) if step.layer < way.dense_layers => attend::dense(step),
            Some(way) => Ok(way.run(step)?.0),
        };
        let mut cache = model.cache(capacity)?;
        let mut hidden = None;
        for tokens in tokens.chunks(args.chunk.max(1)) {
            hidden = Some(model.forward(tokens, &mut cache, &mut attend)?);
        }
        let mut hidden = hidden.expect("the prompt has tokens");
        let mut out = Vec::new();
        let start = Instant::now();
        while cache.length < capacity {
            let last = hidden.narrow(0, hidden.dims()[0] - 1, 1)?;
            let token = model.logits(&last)?.argmax(D::Minus1)?.to_vec1::<u32>()?[0];
            out.push(token);
            hidden = model.forward(&[token], &mut cache, &mut attend)?;
        }
        let rate = out.len() as f64 / start.elapsed().as_secs_f64();
        match way {
            None => println!("dense, {rate:.1} token/s:"),
            Some(way) => println!(
                "K = {} ({}, {} first, {} last), {rate:.1} token/s:",
                way.k,
                way.scoring.name(),
                way.first,
                way.last
            ),
        }
        let text = tokenizer.decode(&out, true);
        println!("{}\n", text.map_err(|e| anyhow::anyhow!("{e}"))?);
    }
    Ok(())
}

fn time_layers(args: &Args, size: Size, dtype: DType, device: &Device) -> Result<()> {
    println!(
        "{}, {}, K = {}",
        size.name(),
        dtype_name(dtype),
        args.layer_k
    );
    println!("    keys  new tokens  part                          us");
    for &context in &args.contexts {
        for &rows in args
            .rows
            .iter()
            .filter(|&&rows| (1..=context).contains(&rows))
        {
            let timed = Timed {
                size,
                context,
                rows,
                k: args.layer_k,
                dtype,
                budget: args.budget,
                rounds: args.rounds.max(1),
            };
            for line in layers::measure(timed, device)? {
                let part = line["part"].as_str().unwrap_or_default();
                let us = line["us"].as_f64().unwrap_or_default();
                println!("{context:>8}  {rows:>10}  {part:<22}  {us:>10.1}");
                args.keep(line, device)?;
            }
        }
    }
    Ok(())
}
