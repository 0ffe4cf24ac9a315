//! From logits to a token: Candle's sampler, this crate's, or none.

use anyhow::Result;
use candle_core::Tensor;
use candle_transformers::generation::Sampling;

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Kind {
    /// candle_transformers::generation::LogitsProcessor
    Candle,
    /// candle_topk::LogitsProcessor
    Topk,
    /// No sampling at all: the same token over and over, to see what the model alone takes
    Skip,
}

impl Kind {
    pub fn name(self) -> &'static str {
        match self {
            Self::Candle => "candle",
            Self::Topk => "topk",
            Self::Skip => "skip",
        }
    }
}

/// Which tokens are in the running, by the flags that were given.
pub fn sampling(temperature: f64, top_k: Option<usize>, top_p: Option<f64>) -> Sampling {
    if temperature <= 0.0 {
        return Sampling::ArgMax;
    }
    match (top_k, top_p) {
        (None, None) => Sampling::All { temperature },
        (Some(k), None) => Sampling::TopK { k, temperature },
        (None, Some(p)) => Sampling::TopP { p, temperature },
        (Some(k), Some(p)) => Sampling::TopKThenTopP { k, p, temperature },
    }
}

/// What a report calls it: "argmax", "all", "k50", "p0.9", "k50p0.9".
pub fn mode(sampling: &Sampling) -> String {
    match sampling {
        Sampling::ArgMax => "argmax".to_string(),
        Sampling::All { .. } => "all".to_string(),
        Sampling::TopK { k, .. } => format!("k{k}"),
        Sampling::TopP { p, .. } => format!("p{p}"),
        Sampling::TopKThenTopP { k, p, .. } => format!("k{k}p{p}"),
        Sampling::GumbelSoftmax { .. } => "gumbel".to_string(),
    }
}

#[derive(Clone, Debug)]
pub struct Settings {
    pub sampling: Sampling,
    pub seed: u64,
    /// 1 is no penalty.
    pub repeat_penalty: f32,
    /// How many of the last tokens are penalized.
    pub repeat_last_n: usize,
}

pub struct Sampler {
    processor: Processor,
    repeat_penalty: f32,
    repeat_last_n: usize,
}

enum Processor {
    Candle(candle_transformers::generation::LogitsProcessor),
    Topk(candle_topk::LogitsProcessor),
    Skip(u32),
}

impl Sampler {
    /// `dummy` is the token that a sampler which doesn't sample gives.
    pub fn new(kind: Kind, settings: &Settings, dummy: u32) -> Self {
        let (seed, sampling) = (settings.seed, settings.sampling.clone());
        Self {
            processor: match kind {
                Kind::Candle => Processor::Candle(
                    candle_transformers::generation::LogitsProcessor::from_sampling(seed, sampling),
                ),
                Kind::Topk => {
                    Processor::Topk(candle_topk::LogitsProcessor::from_sampling(seed, sampling))
                }
                Kind::Skip => Processor::Skip(dummy),
            },
            repeat_penalty: settings.repeat_penalty,
            repeat_last_n: settings.repeat_last_n,
        }
    }

    pub fn reads_logits(&self) -> bool {
        !matches!(self.processor, Processor::Skip(_))
    }

    /// The logits with the penalty on what `tokens` repeats. Each sampler has its own library's.
    pub fn penalize(&self, logits: &Tensor, tokens: &[u32]) -> Result<Tensor> {
        if self.repeat_penalty == 1.0 {
            return Ok(logits.clone());
        }
        let context = &tokens[tokens.len().saturating_sub(self.repeat_last_n)..];
        Ok(match self.processor {
            Processor::Candle(_) => candle_transformers::utils::apply_repeat_penalty(
                logits,
                self.repeat_penalty,
                context,
            )?,
            Processor::Topk(_) => {
                candle_topk::apply_repeat_penalty(logits, self.repeat_penalty, context)?
            }
            Processor::Skip(_) => logits.clone(),
        })
    }

    /// Draws a token from penalized logits [V].
    pub fn sample(&mut self, logits: &Tensor) -> Result<u32> {
        Ok(match &mut self.processor {
            Processor::Candle(p) => p.sample(logits)?,
            Processor::Topk(p) => p.sample(logits)?,
            Processor::Skip(token) => *token,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    #[test]
    fn the_flags_given_decide_the_mode() {
        let mode = |t, k, p| mode(&sampling(t, k, p));
        assert_eq!(mode(0.8, None, None), "all");
        assert_eq!(mode(0.8, Some(50), None), "k50");
        assert_eq!(mode(0.8, None, Some(0.9)), "p0.9");
        assert_eq!(mode(0.8, Some(50), Some(0.9)), "k50p0.9");
        assert_eq!(mode(0.0, Some(50), Some(0.9)), "argmax");
    }

    #[test]
    fn both_samplers_penalize_and_pick_alike() {
        let logits = Tensor::new(&[0f32, 3.0, 2.9, -1.0], &Device::Cpu).unwrap();
        let settings = Settings {
            sampling: Sampling::ArgMax,
            seed: 0,
            repeat_penalty: 1.5,
            repeat_last_n: 2,
        };
        let picks = |kind, tokens: &[u32]| {
            let mut sampler = Sampler::new(kind, &settings, 3);
            let penalized = sampler.penalize(&logits, tokens).unwrap();
            sampler.sample(&penalized).unwrap()
        };
        for kind in [Kind::Candle, Kind::Topk] {
            assert_eq!(picks(kind, &[]), 1);
            assert_eq!(picks(kind, &[0, 1]), 2);
            // Too long ago to count.
            assert_eq!(picks(kind, &[1, 0, 0]), 1);
        }
        assert_eq!(picks(Kind::Skip, &[1]), 3);
    }
}
