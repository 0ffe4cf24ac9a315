//! Text generation with a real model, with Candle's sampler or with this crate's.
//!
//! ```bash
//! cargo run --release --example generate -- --prompt "What is the capital of France?"
//! cargo run --release --example generate -- --compare --top-p 0.9 --prompt "Tell me a story."
//! ```
//!
//! The one change that a program needs for the second sampler is in `sampler.rs`; all else here is
//! loading a model (`source.rs`, `model.rs`), turning text into tokens and back (`tokenizer.rs`,
//! `chat.rs`), the loop with its clock (`run.rs`), and holding the two samplers against each other
//! (`compare.rs`). `measure.rs` serves batches with each sampler and with none, and `hit_rates.rs`
//! counts on real logits which way the kernels took:
//!
//! ```bash
//! cargo run --release --features cuda --example generate -- --measure -n 128 --json lines.jsonl
//! cargo run --release --features cuda --example generate -- --hit-rates text.txt --json lines.jsonl
//! ```

mod chat;
mod compare;
mod hit_rates;
mod measure;
mod model;
mod run;
mod sampler;
mod source;
mod tokenizer;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{bail, ensure, Context, Result};
use candle_core::{DType, Device};
use clap::Parser;
use serde_json::{json, Value as Json};

use model::Loaded;
use run::{Limits, Outcome, Timings};
use sampler::{Kind, Sampler, Settings};

/// Generates text with a model of the Hugging Face hub, a local folder or a file.
#[derive(Parser, Debug)]
#[command(version)]
struct Args {
    /// What the model is to answer, or with --raw to continue
    #[arg(long, default_value = "What is the capital of France?")]
    prompt: String,

    /// A local folder, a .gguf or .safetensors file, a hub id (owner/name), or one of "smollm2" and
    /// "gemma3-270m"
    #[arg(long, default_value = "smollm2")]
    model: String,

    /// The branch, tag or commit of a hub model [default: main]
    #[arg(long)]
    revision: Option<String>,

    /// Which .gguf file of a folder or hub model to take
    #[arg(long, value_name = "NAME")]
    gguf_file: Option<String>,

    /// A tokenizer.json to take instead of the model's own
    #[arg(long, value_name = "FILE")]
    tokenizer_file: Option<PathBuf>,

    /// Give the model the bare prompt, without its chat template
    #[arg(long, visible_alias = "no-chat")]
    raw: bool,

    /// A system message for the chat template
    #[arg(long, conflicts_with = "raw")]
    system: Option<String>,

    /// What turns logits into tokens
    #[arg(long, value_enum, default_value_t = Kind::Topk)]
    sampler: Kind,

    /// 0 takes the most likely token each time
    #[arg(long, default_value_t = 0.8, value_parser = temperature)]
    temperature: f64,

    /// Draw from the fewest tokens that hold this much of the probability
    #[arg(long, value_parser = fraction)]
    top_p: Option<f64>,

    /// Draw from this many of the most likely tokens
    #[arg(long, value_parser = positive)]
    top_k: Option<usize>,

    /// The seed of the draws
    #[arg(long, default_value_t = 299792458)]
    seed: u64,

    /// The most tokens to generate
    #[arg(short = 'n', long, default_value_t = 256, value_parser = positive)]
    sample_len: usize,

    /// Go on where the model would end
    #[arg(long)]
    ignore_eos: bool,

    /// How much less likely a token becomes that occurred before; 1 is no penalty
    #[arg(long, default_value_t = 1.1, value_parser = penalty)]
    repeat_penalty: f32,

    /// How many tokens back the penalty reaches
    #[arg(long, default_value_t = 128)]
    repeat_last_n: usize,

    /// Run on the CPU even where there is a GPU
    #[arg(long)]
    cpu: bool,

    /// The type of the weights, for safetensors [default: f32 on the CPU, bf16 on a GPU, f32 for
    /// Gemma 3]
    #[arg(long, value_parser = ["f32", "f16", "bf16"])]
    dtype: Option<String>,

    /// Run the weights of a Gemma 3 GGUF file unquantized, in --dtype [default: f32]
    #[arg(long)]
    dequantize: bool,

    /// Run both samplers on the same prompt and seed, and the model without any
    #[arg(long, conflicts_with = "sampler")]
    compare: bool,

    /// Serve batches with each sampler and with none, top-k 50, top-p 0.9 and both, and print one JSON
    /// object a line
    #[arg(long, conflicts_with_all = ["sampler", "compare", "top_k", "top_p"])]
    measure: bool,

    /// The batches of --measure
    #[arg(long, value_delimiter = ',', default_values_t = [1, 2, 4, 8, 16, 32, 64], value_parser = positive)]
    batches: Vec<usize>,

    /// The tokens of each prompt of --measure: the prompt's, over and over
    #[arg(long, default_value_t = 128, value_parser = positive)]
    prompt_tokens: usize,

    /// How often --measure serves each batch
    #[arg(long, default_value_t = 5, value_parser = positive)]
    rounds: usize,

    /// Read this text with the model, in pieces of --sample-len tokens, and print as JSON lines how
    /// often the kernels' truncation hits on its logits; needs a GPU
    #[arg(long, value_name = "FILE", conflicts_with_all = ["sampler", "compare", "measure"])]
    hit_rates: Option<PathBuf>,

    /// Time the sampler at every token; on a GPU, where that needs a wait for the device, otherwise
    /// at every eighth
    #[arg(long)]
    time_sampler: bool,

    /// Append the measurements to this file, one JSON object a line
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,

    /// The revision of the code, for --json
    #[arg(long, env = "CANDLE_TOPK_REV", default_value = "unknown")]
    rev: String,
}

fn temperature(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(t) if t >= 0.0 && t.is_finite() => Ok(t),
        _ => Err("a number from 0 up is accepted".to_string()),
    }
}

fn fraction(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(p) if p > 0.0 && p <= 1.0 => Ok(p),
        _ => Err("a number above 0 and up to 1 is accepted".to_string()),
    }
}

fn positive(text: &str) -> Result<usize, String> {
    match text.parse::<usize>() {
        Ok(n) if n > 0 => Ok(n),
        _ => Err("a whole number from 1 up is accepted".to_string()),
    }
}

fn penalty(text: &str) -> Result<f32, String> {
    match text.parse::<f32>() {
        Ok(p) if p > 0.0 && p.is_finite() => Ok(p),
        _ => Err("a number above 0 is accepted".to_string()),
    }
}

impl Args {
    fn settings(&self) -> Settings {
        Settings {
            sampling: sampler::sampling(self.temperature, self.top_k, self.top_p),
            seed: self.seed,
            repeat_penalty: self.repeat_penalty,
            repeat_last_n: self.repeat_last_n,
        }
    }

    fn dtype(&self) -> Result<Option<DType>> {
        match self.dtype.as_deref() {
            None => Ok(None),
            Some("f32") => Ok(Some(DType::F32)),
            Some("f16") => Ok(Some(DType::F16)),
            Some("bf16") => Ok(Some(DType::BF16)),
            Some(other) => bail!("--dtype is {other:?}, accepted are f32, f16 and bf16"),
        }
    }
}

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            // Causes may come with a backtrace or line breaks of their own; the first line says it.
            let message = format!("{e:#}");
            eprintln!("error: {}", message.lines().next().unwrap_or_default());
            ExitCode::FAILURE
        }
    }
}

/// The device and what to call it.
fn device(cpu: bool) -> Result<(Device, String)> {
    #[cfg(feature = "cuda")]
    if !cpu {
        match Device::new_cuda(0) {
            Ok(device) => {
                let name = device.as_cuda_device()?.cuda_stream().context().name();
                return Ok((device, name.unwrap_or_else(|_| "cuda".to_string())));
            }
            Err(e) => {
                let reason = e.to_string();
                eprintln!(
                    "no GPU ({}): running on the CPU",
                    reason.lines().next().unwrap_or_default()
                );
            }
        }
    }
    #[cfg(not(feature = "cuda"))]
    let _ = cpu;
    Ok((Device::Cpu, "cpu".to_string()))
}

fn run(args: &Args) -> Result<()> {
    let settings = args.settings();
    let format = model::Format {
        dtype: args.dtype()?,
        dequantize: args.dequantize,
    };
    let files = source::find(&source::Request {
        model: Some(&args.model),
        revision: args.revision.as_deref(),
        gguf_file: args.gguf_file.as_deref(),
    })?;
    let (device, gpu) = device(args.cpu)?;
    let started = std::time::Instant::now();
    let loaded = model::load(&files, args.tokenizer_file.as_deref(), format, &device)?;
    eprintln!(
        "loaded {} on {gpu} in {:.1} s",
        files.name,
        started.elapsed().as_secs_f64()
    );

    let text = match &loaded.chat {
        Some(chat) if !args.raw => chat.render(args.system.as_deref(), &args.prompt)?,
        None if args.system.is_some() => {
            bail!("the model has no chat template to put --system into: put it into --prompt")
        }
        _ => args.prompt.clone(),
    };
    let prompt = tokenizer::encode_prompt(&loaded.tokenizer, &text)?;
    ensure!(
        !prompt.is_empty(),
        "the prompt has no tokens: give a --prompt"
    );
    let limits = Limits {
        tokens: args.sample_len,
        ends: if args.ignore_eos {
            Vec::new()
        } else {
            loaded.end_tokens.clone()
        },
        time_every: if device.is_cpu() || args.time_sampler {
            1
        } else {
            8
        },
    };
    let mut session = Session {
        args,
        settings,
        limits,
        prompt,
        loaded,
        name: files.name,
        gpu,
    };
    if args.compare {
        session.compare()
    } else if args.measure {
        session.measure()
    } else if let Some(file) = &args.hit_rates {
        session.hit_rates(file)
    } else {
        session.generate()
    }
}

/// One prompt for one model.
struct Session<'a> {
    args: &'a Args,
    settings: Settings,
    limits: Limits,
    prompt: Vec<u32>,
    loaded: Loaded,
    name: String,
    gpu: String,
}

impl Session<'_> {
    fn sampler(&self, kind: Kind) -> Sampler {
        // Any token of the vocabulary will do for a dummy: the model takes as long for one as for
        // another.
        Sampler::new(kind, &self.settings, self.prompt[self.prompt.len() - 1])
    }

    fn generate(&mut self) -> Result<()> {
        let kind = self.args.sampler;
        if self.args.raw || self.loaded.chat.is_none() {
            print!("{}", self.args.prompt);
        }
        let (outcome, vocab, dtype) = self.stream(kind)?;
        if outcome.out_of_context {
            eprintln!(
                "stopped at the model's context of {} tokens",
                self.loaded.model.context
            );
        }
        let t = &outcome.timings;
        println!(
            "{} prompt tokens processed: {:.2} token/s",
            t.prompt_tokens,
            t.prompt_rate()
        );
        println!("{}", generated(t));
        if kind != Kind::Skip {
            println!("{}", sampler_line(t, kind));
        }
        self.record(kind, t, vocab, &dtype)
    }

    /// Generates and prints the text as it comes. Also gives the size of the vocabulary and the
    /// logits' type.
    fn stream(&mut self, kind: Kind) -> Result<(Outcome, usize, String)> {
        let mut sampler = self.sampler(kind);
        let mut stream = tokenizer::TokenStream::new(&self.loaded.tokenizer);
        let ends = &self.loaded.end_tokens;
        let (mut vocab, mut dtype) = (0, String::new());
        let outcome = run::generate(
            &mut self.loaded.model,
            &self.prompt,
            &mut sampler,
            &self.limits,
            |token, logits| {
                if vocab == 0 {
                    (vocab, dtype) = (logits.elem_count(), logits.dtype().as_str().to_string());
                }
                if kind != Kind::Skip && !ends.contains(&token) {
                    if let Some(text) = stream.push(token)? {
                        print(&text)?;
                    }
                }
                Ok(())
            },
        )?;
        if let Some(rest) = stream.finish()? {
            print(&rest)?;
        }
        println!();
        Ok((outcome, vocab, dtype))
    }

    fn compare(&mut self) -> Result<()> {
        // Kernels load and caches fill at first use, which is no sampler's fault.
        let warm_up = Limits {
            tokens: 4,
            ends: Vec::new(),
            time_every: 1,
        };
        for kind in [Kind::Candle, Kind::Topk] {
            let mut sampler = self.sampler(kind);
            run::generate(
                &mut self.loaded.model,
                &self.prompt,
                &mut sampler,
                &warm_up,
                |_, _| Ok(()),
            )?;
        }

        let mut sampler = self.sampler(Kind::Candle);
        let candle = run::generate(
            &mut self.loaded.model,
            &self.prompt,
            &mut sampler,
            &self.limits,
            |_, _| Ok(()),
        )?;

        let mut sampler = self.sampler(Kind::Topk);
        let mut drawn = 0;
        let mut difference = None;
        let (mut vocab, mut dtype) = (0, String::new());
        let topk = run::generate(
            &mut self.loaded.model,
            &self.prompt,
            &mut sampler,
            &self.limits,
            |token, logits| {
                if drawn == 0 {
                    (vocab, dtype) = (logits.elem_count(), logits.dtype().as_str().to_string());
                }
                match candle.tokens.get(drawn) {
                    Some(&other) if other != token && difference.is_none() => {
                        let logits = logits.to_dtype(DType::F32)?.to_device(&Device::Cpu)?;
                        difference = Some((drawn, other, token, logits));
                    }
                    _ => (),
                }
                drawn += 1;
                Ok(())
            },
        )?;

        let mut sampler = self.sampler(Kind::Skip);
        let as_long = Limits {
            tokens: topk.tokens.len(),
            ends: Vec::new(),
            ..self.limits.clone()
        };
        let skip = run::generate(
            &mut self.loaded.model,
            &self.prompt,
            &mut sampler,
            &as_long,
            |_, _| Ok(()),
        )?;

        println!("{}", self.text(&topk.tokens)?);
        for (kind, outcome) in [(Kind::Candle, &candle), (Kind::Topk, &topk)] {
            println!("{:>6}: {}", kind.name(), generated(&outcome.timings));
            println!("{:>6}  {}", "", sampler_line(&outcome.timings, kind));
            self.record(kind, &outcome.timings, vocab, &dtype)?;
        }
        println!("{:>6}: {}", "skip", generated(&skip.timings));
        self.record(Kind::Skip, &skip.timings, vocab, &dtype)?;

        match difference {
            None => {
                ensure!(
                    candle.tokens == topk.tokens,
                    "candle gave {} tokens and topk {}, all equal as far as they go",
                    candle.tokens.len(),
                    topk.tokens.len()
                );
                println!("all {} tokens agree", topk.tokens.len());
                Ok(())
            }
            Some((drawn, candle, topk, logits)) => self.judge(drawn, candle, topk, &logits),
        }
    }

    /// Says at which token the two samplers part and whether they may.
    fn judge(
        &self,
        drawn: usize,
        candle: u32,
        topk: u32,
        logits: &candle_core::Tensor,
    ) -> Result<()> {
        let values = logits.to_vec1::<f32>()?;
        let verdict = compare::explain(&compare::Step {
            logits: &values,
            sampling: &self.settings.sampling,
            seed: self.settings.seed,
            drawn,
            candle,
            topk,
        });
        let word =
            |token: u32| -> Result<String> { Ok(format!("{token} ({:?})", self.text(&[token])?)) };
        println!(
            "the first {drawn} tokens agree, then candle has {} and topk {}: {}",
            word(candle)?,
            word(topk)?,
            verdict.reason
        );
        ensure!(
            verdict.legitimate,
            "the two samplers differ where they should agree"
        );
        println!("so the difference is legitimate");
        Ok(())
    }

    fn measure(&mut self) -> Result<()> {
        let prompt = self.prompt.iter().copied().cycle();
        let work = measure::Workload {
            prompt: prompt.take(self.args.prompt_tokens).collect(),
            new_tokens: self.args.sample_len,
            rounds: self.args.rounds,
            temperature: self.args.temperature,
            seed: self.args.seed,
        };
        let kinds = [Kind::Skip, Kind::Candle, Kind::Topk];
        for &batch in &self.args.batches {
            // Kernels load and caches fill at first use, which is no sampler's fault.
            let warm_up = measure::Workload {
                new_tokens: work.new_tokens.min(3),
                rounds: 1,
                ..work.clone()
            };
            for (i, sampling) in measure::samplings(work.temperature).iter().enumerate() {
                for kind in kinds {
                    // Without a sampler there is nothing that the modes could differ in.
                    if kind == Kind::Skip && i > 0 {
                        continue;
                    }
                    let model = &mut self.loaded.model;
                    measure::serve(model, kind, sampling, batch, &warm_up)?;
                    let (times, vocab, dtype) =
                        measure::serve(model, kind, sampling, batch, &work)?;
                    let mut line = measure::line(&times, kind, sampling, batch, &work);
                    if kind == Kind::Skip {
                        line["mode"] = Json::Null;
                    }
                    let together = batch == 1 || self.loaded.model.takes_prompts_together();
                    line["prompt"] = json!(if together { "whole" } else { "by token" });
                    line["v"] = json!(vocab);
                    line["dtype"] = json!(dtype);
                    self.put(line)?;
                }
            }
        }
        Ok(())
    }

    fn hit_rates(&mut self, file: &Path) -> Result<()> {
        let text = std::fs::read_to_string(file)
            .with_context(|| format!("cannot read {} (--hit-rates)", file.display()))?;
        // More than is needed, and less than would take the tokenizer long.
        let most = hit_rates::PIECES * self.args.sample_len * 16;
        let end = (0..=most.min(text.len()))
            .rev()
            .find(|&i| text.is_char_boundary(i));
        let text = &text[..end.unwrap_or(0)];
        let tokens = tokenizer::encode_prompt(&self.loaded.tokenizer, text)?;
        let model = &mut self.loaded.model;
        for line in hit_rates::measure(model, &tokens, self.args.sample_len)? {
            self.put(line)?;
        }
        Ok(())
    }

    /// Prints a line of measurements, with what it was measured on, and appends it to --json.
    fn put(&self, mut line: Json) -> Result<()> {
        line["model"] = json!(self.name);
        line["gpu"] = json!(self.gpu);
        line["rev"] = json!(self.args.rev);
        line["date"] = json!(chat::format_date("%Y-%m-%d", chat::seconds_since_1970()));
        println!("{line}");
        match &self.args.json {
            Some(path) => append(path, &line.to_string()),
            None => Ok(()),
        }
    }

    fn text(&self, tokens: &[u32]) -> Result<String> {
        self.loaded
            .tokenizer
            .decode(tokens, true)
            .map_err(|e| anyhow::anyhow!("cannot decode the tokens: {e}"))
    }

    fn record(&self, kind: Kind, t: &Timings, vocab: usize, dtype: &str) -> Result<()> {
        let Some(path) = &self.args.json else {
            return Ok(());
        };
        let line = json!({
            "op": "generate",
            "model": self.name,
            "engine": "candle",
            "sampler": kind.name(),
            "mode": sampler::mode(&self.settings.sampling),
            "tokens_per_s": t.rate(),
            "prompt_tokens_per_s": t.prompt_rate(),
            "sampler_us": if kind == Kind::Skip { None } else { t.sampler_us() },
            "b": 1,
            "v": vocab,
            "dtype": dtype,
            "gpu": self.gpu,
            "rev": self.args.rev,
            "date": chat::format_date("%Y-%m-%d", chat::seconds_since_1970()),
        });
        append(path, &line.to_string())
    }
}

fn append(path: &Path, line: &str) -> Result<()> {
    std::fs::OpenOptions::new()
        .create(true)
        .append(true)
        .open(path)
        .and_then(|mut file| writeln!(file, "{line}"))
        .with_context(|| format!("cannot write to {} (--json)", path.display()))
}

fn print(text: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes())?;
    Ok(out.flush()?)
}

fn generated(t: &Timings) -> String {
    // The first token is part of the prompt's time, as in Candle's own examples.
    match t.rate() {
        Some(rate) => format!("{} tokens generated: {rate:.2} token/s", t.tokens),
        None => "1 token generated".to_string(),
    }
}

fn sampler_line(t: &Timings, kind: Kind) -> String {
    match (t.sampler_us(), t.sampler_share()) {
        (Some(us), Some(share)) => {
            format!(
                "sampler ({}): {us:.0} us a token, {:.1} % of its time",
                kind.name(),
                share * 100.0
            )
        }
        _ => format!("sampler ({}): too few tokens to time it", kind.name()),
    }
}
