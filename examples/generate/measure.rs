//! Serving, measured: a batch of requests of equal lengths, with each sampler and with none.

use std::time::{Duration, Instant};

use anyhow::{ensure, Result};
use candle_core::{Device, Tensor};
use candle_transformers::generation::Sampling;
use serde_json::{json, Value as Json};

use crate::model::Model;
use crate::sampler::{self, Kind};

/// What every request of a measurement is.
#[derive(Clone, Debug)]
pub struct Workload {
    /// The same for each request of a batch: the draws differ, the work does not.
    pub prompt: Vec<u32>,
    pub new_tokens: usize,
    /// Batches served one after another: a measurement has as many times to the first token.
    pub rounds: usize,
    pub temperature: f64,
    pub seed: u64,
}

/// The samplings of the paper's tables, by the names that lines give them.
pub fn samplings(temperature: f64) -> [Sampling; 3] {
    let (k, p) = (50, 0.9);
    [
        Sampling::TopK { k, temperature },
        Sampling::TopP { p, temperature },
        Sampling::TopKThenTopP { k, p, temperature },
    ]
}

/// Times of a batch's rounds. The requests of a batch go in step, so each time is that of all.
#[derive(Clone, Debug, Default)]
pub struct Times {
    pub first: Vec<Duration>,
    /// Of each token after the first.
    pub next: Vec<Duration>,
    pub whole: Vec<Duration>,
}

impl Times {
    /// Tokens a second of `requests` requests, prompt included.
    fn rate(&self, requests: usize, new_tokens: usize) -> f64 {
        let whole: Duration = self.whole.iter().sum();
        (requests * new_tokens * self.whole.len()) as f64 / whole.as_secs_f64()
    }
}

/// The least of the times that at least `percent` of them do not exceed, in ms.
fn percentile(times: &[Duration], percent: usize) -> Option<f64> {
    let mut times = times.to_vec();
    times.sort_unstable();
    let rank = (times.len() * percent).div_ceil(100);
    Some(times.get(rank.max(1) - 1)?.as_secs_f64() * 1e3)
}

/// Draws for a batch as a program would that has one request a row.
enum Sampler {
    Candle(Vec<candle_transformers::generation::LogitsProcessor>),
    Topk(Box<candle_topk::LogitsProcessor>),
    Skip(Vec<u32>),
}

impl Sampler {
    fn new(kind: Kind, sampling: &Sampling, batch: usize, work: &Workload) -> Self {
        match kind {
            Kind::Candle => Self::Candle(
                (0..batch as u64)
                    .map(|row| {
                        candle_transformers::generation::LogitsProcessor::from_sampling(
                            work.seed + row,
                            sampling.clone(),
                        )
                    })
                    .collect(),
            ),
            Kind::Topk => Self::Topk(Box::new(candle_topk::LogitsProcessor::from_sampling(
                work.seed,
                sampling.clone(),
            ))),
            // Any token will do: the model takes as long for one as for another.
            Kind::Skip => Self::Skip(vec![work.prompt[0]; batch]),
        }
    }

    /// A token for each row of logits [B, V]; the device has then finished them.
    fn sample(&mut self, logits: &Tensor, device: &Device) -> Result<Vec<u32>> {
        Ok(match self {
            Self::Candle(processors) => {
                let rows = processors.iter_mut().enumerate();
                rows.map(|(row, p)| p.sample(&logits.get(row)?))
                    .collect::<candle_core::Result<_>>()?
            }
            Self::Topk(processor) => processor.sample_batch(logits)?,
            Self::Skip(tokens) => {
                // The others have waited for the logits.
                device.synchronize()?;
                tokens.clone()
            }
        })
    }
}

/// Serves `rounds` batches. Also gives the size of the vocabulary and the logits' type.
pub fn serve(
    model: &mut Model,
    kind: Kind,
    sampling: &Sampling,
    batch: usize,
    work: &Workload,
) -> Result<(Times, usize, String)> {
    let length = work.prompt.len();
    ensure!(length > 0, "the prompt has no tokens: give a --prompt");
    ensure!(
        length + work.new_tokens <= model.context,
        "--prompt-tokens {length} and --sample-len {} exceed the model's context of {}",
        work.new_tokens,
        model.context
    );
    let device = model.device().clone();
    let mut sampler = Sampler::new(kind, sampling, batch, work);
    let mut times = Times::default();
    let (mut vocab, mut dtype) = (0, String::new());
    for _ in 0..work.rounds {
        device.synchronize()?;
        let start = Instant::now();
        let mut last = start;
        let mut input = Tensor::from_vec(work.prompt.repeat(batch), (batch, length), &device)?;
        for step in 0..work.new_tokens {
            let logits = match step {
                0 => model.begin_batch(&input)?,
                _ => model.forward_batch(&input, length + step - 1)?,
            };
            let tokens = sampler.sample(&logits, &device)?;
            let now = Instant::now();
            if step == 0 {
                times.first.push(now - last);
                (vocab, dtype) = (logits.dim(1)?, logits.dtype().as_str().to_string());
            } else {
                times.next.push(now - last);
            }
            last = now;
            if step + 1 < work.new_tokens {
                input = Tensor::from_vec(tokens, (batch, 1), &device)?;
            }
        }
        times.whole.push(last - start);
    }
    Ok((times, vocab, dtype))
}

/// A line of a measurement, without what is the same in all lines of a program.
pub fn line(times: &Times, kind: Kind, sampling: &Sampling, batch: usize, work: &Workload) -> Json {
    let mut line = json!({
        "op": "generate",
        "engine": "candle",
        "sampler": kind.name(),
        "mode": sampler::mode(sampling),
        "b": batch,
        "prompt_tokens": work.prompt.len(),
        "new_tokens": work.new_tokens,
        "rounds": work.rounds,
        "tokens_per_s": times.rate(batch, work.new_tokens),
    });
    for (name, times) in [
        ("ttft", &times.first),
        ("tpot", &times.next),
        ("e2e", &times.whole),
    ] {
        for percent in [50, 95, 99] {
            line[format!("{name}_ms_p{percent}")] = json!(percentile(times, percent));
        }
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(times: &[u64]) -> Vec<Duration> {
        times.iter().map(|&t| Duration::from_millis(t)).collect()
    }

    #[test]
    fn percentiles_are_times_that_occurred() {
        let times = ms(&(1..=100).rev().collect::<Vec<_>>());
        assert_eq!(percentile(&times, 50), Some(50.0));
        assert_eq!(percentile(&times, 95), Some(95.0));
        assert_eq!(percentile(&times, 99), Some(99.0));
        assert_eq!(percentile(&ms(&[7, 3]), 50), Some(3.0));
        assert_eq!(percentile(&ms(&[7]), 99), Some(7.0));
        assert_eq!(percentile(&[], 50), None);
    }

    #[test]
    fn a_rate_counts_the_tokens_of_all_requests() {
        let times = Times {
            first: ms(&[100, 100]),
            next: ms(&[50, 50]),
            whole: ms(&[150, 250]),
        };
        // Two rounds of 4 requests with 2 tokens each, in 0.4 s.
        assert_eq!(times.rate(4, 2), 40.0);
    }
}
