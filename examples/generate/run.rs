//! One generation: the loop, and how long its parts took.

use std::time::{Duration, Instant};

use anyhow::{ensure, Result};
use candle_core::Tensor;

use crate::model::Model;
use crate::sampler::Sampler;

#[derive(Clone, Debug)]
pub struct Limits {
    /// The most tokens to generate.
    pub tokens: usize,
    /// Generation ends after one of these.
    pub ends: Vec<u32>,
    /// The sampler is timed at every so many tokens, the device having been waited for. On a GPU
    /// the wait costs a little of the overlap between host and device; on the CPU there is nothing
    /// to wait for.
    pub time_every: usize,
}

#[derive(Clone, Debug)]
pub struct Timings {
    pub prompt_tokens: usize,
    /// From the start to the first token.
    pub prompt: Duration,
    /// Tokens after the first, and the time that they took.
    pub tokens: usize,
    pub generation: Duration,
    /// Penalty and draw of single tokens after the first.
    pub sampler: Vec<Duration>,
}

impl Timings {
    pub fn prompt_rate(&self) -> f64 {
        self.prompt_tokens as f64 / self.prompt.as_secs_f64()
    }

    /// Tokens a second after the first, if there are such.
    pub fn rate(&self) -> Option<f64> {
        (self.tokens > 0).then(|| self.tokens as f64 / self.generation.as_secs_f64())
    }

    /// The median time in microseconds that the sampler took for a token.
    pub fn sampler_us(&self) -> Option<f64> {
        let mut times = self.sampler.clone();
        times.sort_unstable();
        let n = times.len();
        if n == 0 {
            return None;
        }
        let median = (times[(n - 1) / 2] + times[n / 2]) / 2;
        Some(median.as_secs_f64() * 1e6)
    }

    /// The sampler's part of a token's time, from 0 to 1.
    pub fn sampler_share(&self) -> Option<f64> {
        Some(self.sampler_us()? * 1e-6 * self.rate()?)
    }
}

pub struct Outcome {
    pub tokens: Vec<u32>,
    pub timings: Timings,
    /// Whether the model's context ended it, before the model or the limit did.
    pub out_of_context: bool,
}

/// Continues `prompt`. `on_token` sees each token as it is drawn, with the penalized logits it was
/// drawn from.
pub fn generate(
    model: &mut Model,
    prompt: &[u32],
    sampler: &mut Sampler,
    limits: &Limits,
    mut on_token: impl FnMut(u32, &Tensor) -> Result<()>,
) -> Result<Outcome> {
    ensure!(
        !prompt.is_empty(),
        "the prompt has no tokens: give a --prompt"
    );
    ensure!(limits.tokens > 0, "--sample-len is 0: give at least 1");
    ensure!(
        prompt.len() <= model.context,
        "the prompt has {} tokens and the model's context is {}: shorten the prompt",
        prompt.len(),
        model.context
    );
    model.reset();
    let mut all = prompt.to_vec();
    let mut sampler_times = Vec::new();
    let mut position = 0;
    let start = Instant::now();
    let mut first = None;
    let out_of_context = loop {
        let logits = model.forward(&all[position..], position)?;
        position = all.len();
        let step = position - prompt.len();
        let timed = step > 0 && step.is_multiple_of(limits.time_every);
        if timed {
            model.device().synchronize()?;
        }
        let before = Instant::now();
        let logits = sampler.penalize(&logits, &all)?;
        let token = sampler.sample(&logits)?;
        if timed {
            sampler_times.push(before.elapsed());
        }
        all.push(token);
        if step == 0 {
            // A sampler that reads the logits has waited for them.
            if !sampler.reads_logits() {
                model.device().synchronize()?;
            }
            first = Some(Instant::now());
        }
        on_token(token, &logits)?;
        if limits.ends.contains(&token) || step + 1 == limits.tokens {
            break false;
        }
        if all.len() > model.context {
            break true;
        }
    };
    model.device().synchronize()?;
    let end = Instant::now();
    let first = first.unwrap_or(end);
    let tokens = all.split_off(prompt.len());
    Ok(Outcome {
        timings: Timings {
            prompt_tokens: prompt.len(),
            prompt: first - start,
            tokens: tokens.len() - 1,
            generation: end - first,
            sampler: sampler_times,
        },
        tokens,
        out_of_context,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn timings(sampler_us: &[u64]) -> Timings {
        Timings {
            prompt_tokens: 10,
            prompt: Duration::from_millis(100),
            tokens: 50,
            generation: Duration::from_secs(1),
            sampler: sampler_us
                .iter()
                .map(|&us| Duration::from_micros(us))
                .collect(),
        }
    }

    #[test]
    fn rates_and_the_sampler_s_share() {
        let t = timings(&[100, 9000, 200]);
        assert_eq!(t.prompt_rate(), 100.0);
        assert_eq!(t.rate(), Some(50.0));
        assert_eq!(t.sampler_us(), Some(200.0));
        // 200 us of 20 ms.
        assert!((t.sampler_share().unwrap() - 0.01).abs() < 1e-12);
        assert_eq!(timings(&[100, 200]).sampler_us(), Some(150.0));
        assert_eq!(timings(&[]).sampler_us(), None);
        let one_token = Timings {
            tokens: 0,
            ..timings(&[])
        };
        assert_eq!(one_token.rate(), None);
        assert_eq!(one_token.sampler_share(), None);
    }
}
