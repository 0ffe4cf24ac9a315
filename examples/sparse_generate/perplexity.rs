//! Perplexity of a text under dense and under sparse attention.

use std::time::Instant;

use anyhow::{ensure, Result};
use candle_core::{Device, Tensor};

use crate::attend::{self, Sparse};
use crate::model::Llama;

/// What a run over windows of a text came to.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Outcome {
    /// Sum of -ln p, and how many tokens.
    loss: f64,
    predicted: usize,
    /// The same of the tokens at positions from K on, where dense and sparse differ.
    late_loss: f64,
    late: usize,
    /// Of each layer the sum of shares over chunks, weighted by tokens; empty where they are not
    /// measured.
    shares: Vec<f64>,
    pub seconds: f64,
    pub tokens: usize,
}

impl Outcome {
    pub fn perplexity(&self) -> f64 {
        (self.loss / self.predicted as f64).exp()
    }

    /// Of the tokens at positions from K on; `None` where there are none.
    pub fn late_perplexity(&self) -> Option<f64> {
        (self.late > 0).then(|| (self.late_loss / self.late as f64).exp())
    }

    /// The mean share of the attention's mass on the chosen positions, where it was measured.
    pub fn share(&self) -> Option<f64> {
        let shares = self.layer_shares();
        (!shares.is_empty()).then(|| shares.iter().sum::<f64>() / shares.len() as f64)
    }

    /// The same of each layer; a dense one has 1.
    pub fn layer_shares(&self) -> Vec<f64> {
        let mean = |sum: &f64| sum / self.tokens as f64;
        self.shares.iter().map(mean).collect()
    }

    pub fn tokens_per_second(&self) -> f64 {
        self.tokens as f64 / self.seconds
    }
}

/// How a text is read.
#[derive(Debug, Clone, Copy)]
pub struct Reading {
    /// Tokens that go through the model at a time.
    pub chunk: usize,
    /// Whether the share of the attention's mass is measured, by a dense pass beside it.
    pub share: bool,
    /// From which position on tokens are counted apart.
    pub late_from: usize,
}

/// Reads windows of a text with the model.
pub fn read(
    model: &Llama,
    windows: &[&[u32]],
    reading: Reading,
    sparse: Option<Sparse>,
) -> Result<Outcome> {
    let mut outcomes = read_from(model, windows, reading, sparse, &[reading.late_from])?;
    Ok(outcomes.remove(0))
}

/// The same with an outcome for each position that late tokens may count from.
pub fn read_from(
    model: &Llama,
    windows: &[&[u32]],
    reading: Reading,
    sparse: Option<Sparse>,
    late_from: &[usize],
) -> Result<Vec<Outcome>> {
    let mut outcome = Outcome::default();
    let mut late = vec![(0.0, 0); late_from.len()];
    let start = Instant::now();
    for window in windows {
        ensure!(window.len() > 1, "a window needs 2 tokens or more");
        let mut cache = model.cache(window.len())?;
        for (i, tokens) in window.chunks(reading.chunk).enumerate() {
            let hidden = model.forward(tokens, &mut cache, &mut |step| {
                let sparse = sparse.filter(|sparse| step.layer >= sparse.dense_layers);
                let mut share = 1.0;
                let out = match sparse {
                    None => attend::dense(step)?,
                    Some(sparse) => {
                        let (out, lse) = sparse.run(step)?;
                        if reading.share {
                            share = attend::share(&lse, &attend::dense_lse(step)?)?;
                        }
                        out
                    }
                };
                if reading.share {
                    outcome.shares.resize(model.sizes.layers, 0.0);
                    outcome.shares[step.layer] += share * tokens.len() as f64;
                }
                Ok(out)
            })?;
            // Each token but the window's last predicts the next.
            let first = i * reading.chunk;
            let next = &window[first + 1..(first + tokens.len() + 1).min(window.len())];
            if next.is_empty() {
                continue;
            }
            let logits = model.logits(&hidden.narrow(0, 0, next.len())?)?;
            for (j, loss) in losses(&logits, next)?.into_iter().enumerate() {
                outcome.loss += loss as f64;
                outcome.predicted += 1;
                for ((sum, count), &from) in late.iter_mut().zip(late_from) {
                    if first + j >= from {
                        *sum += loss as f64;
                        *count += 1;
                    }
                }
            }
        }
        outcome.tokens += window.len();
    }
    outcome.seconds = start.elapsed().as_secs_f64();
    let with_late = |(late_loss, late)| Outcome {
        late_loss,
        late,
        ..outcome.clone()
    };
    Ok(late.into_iter().map(with_late).collect())
}

/// -ln p of each token.
fn losses(logits: &Tensor, tokens: &[u32]) -> Result<Vec<f32>> {
    let log_probs = candle_nn::ops::log_softmax(logits, 1)?;
    let ids = Tensor::new(tokens, logits.device())?.unsqueeze(1)?;
    let own = log_probs.gather(&ids, 1)?.neg()?;
    Ok(own.flatten_all()?.to_device(&Device::Cpu)?.to_vec1()?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attend::Scoring;
    use crate::model::Sizes;

    fn model() -> Result<Llama> {
        let sizes = Sizes {
            layers: 2,
            heads: 6,
            kv_heads: 2,
            head_dim: 16,
            context: 64,
            eps: 1e-5,
            theta: 10000.0,
        };
        Llama::random(sizes, 48, 50)
    }

    const READING: Reading = Reading {
        chunk: 40,
        share: true,
        late_from: 16,
    };

    #[test]
    fn sparse_is_dense_where_all_is_attended_to() -> Result<()> {
        let model = model()?;
        let text: Vec<u32> = (0..80).map(|i| i * 7 % 50).collect();
        let windows: Vec<&[u32]> = text.chunks(40).collect();
        let dense = read(&model, &windows, READING, None)?;
        assert_eq!((dense.predicted, dense.late, dense.tokens), (78, 46, 80));
        assert_eq!(dense.share(), Some(1.0));
        for scoring in [Scoring::Head, Scoring::Group, Scoring::Shared] {
            for (k, last, chunk) in [(40, 0, 40), (64, 8, 7), (40, 0, 1)] {
                let sparse = Sparse {
                    k,
                    block: 1,
                    scoring,
                    first: 0,
                    last,
                    center: chunk == 7,
                    dense_layers: 0,
                    budget: 1 << 20,
                };
                let reading = Reading { chunk, ..READING };
                let all = read(&model, &windows, reading, Some(sparse))?;
                let ratio = all.perplexity() / dense.perplexity();
                assert!((ratio - 1.0).abs() < 1e-4, "{scoring:?} {k}: {ratio}");
                assert!((all.share().unwrap() - 1.0).abs() < 1e-4);
            }
            let sparse = Sparse {
                k: 4,
                block: 1,
                scoring,
                first: 0,
                last: 1,
                center: true,
                dense_layers: 0,
                budget: 1 << 20,
            };
            let few = read(&model, &windows, READING, Some(sparse))?;
            assert!(few.share().unwrap() < 0.9);
            assert_ne!(few.late_perplexity(), dense.late_perplexity());
            let half = Sparse {
                dense_layers: 1,
                ..sparse
            };
            let half = read(&model, &windows, READING, Some(half))?;
            let shares = half.layer_shares();
            assert!(shares[0] == 1.0 && shares[1] < 0.9, "{shares:?}");
        }
        Ok(())
    }
}
