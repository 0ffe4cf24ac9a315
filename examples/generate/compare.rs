//! Why two samplers with the same seed may give different tokens, and whether they may here.
//!
//! Candle and this crate draw the same number and invert the same CDF. Candle sums the CDF's
//! weights one after the other in f32, so its edges are off by up to a known amount, and a draw
//! that falls that close to an edge may go either way. Here the step at which two runs part is
//! computed once more in f64 to see whether it was such a draw.

use candle_transformers::generation::Sampling;
use rand::rngs::StdRng;
use rand::{RngCore, SeedableRng};

/// A step at which the two samplers gave different tokens.
pub struct Step<'a> {
    /// The logits that both drew from, penalty applied.
    pub logits: &'a [f32],
    pub sampling: &'a Sampling,
    pub seed: u64,
    /// How many tokens were drawn before this one.
    pub drawn: usize,
    pub candle: u32,
    pub topk: u32,
}

#[derive(Clone, Debug)]
pub struct Verdict {
    pub legitimate: bool,
    pub reason: String,
}

pub fn explain(step: &Step) -> Verdict {
    let in_range = |token: u32| (token as usize) < step.logits.len();
    if !in_range(step.candle) || !in_range(step.topk) {
        return Verdict {
            legitimate: false,
            reason: format!(
                "a token lies outside the vocabulary of {}",
                step.logits.len()
            ),
        };
    }
    match *step.sampling {
        Sampling::ArgMax => argmax(step),
        Sampling::All { temperature } => by_cdf(step, temperature, 1.0),
        Sampling::TopP { p, temperature } => by_cdf(step, temperature, p),
        Sampling::TopK { k, temperature } => by_set(step, temperature, k, None),
        Sampling::TopKThenTopP { k, p, temperature } if k < step.logits.len() => {
            by_set(step, temperature, k, Some(p))
        }
        Sampling::TopKThenTopP { p, temperature, .. } => by_cdf(step, temperature, p),
        Sampling::GumbelSoftmax { .. } => Verdict {
            legitimate: true,
            reason:
                "Candle's Gumbel-softmax draws from the device's own generator, not from the seed"
                    .into(),
        },
    }
}

fn argmax(step: &Step) -> Verdict {
    let logit = |token: u32| step.logits[token as usize];
    let greatest = step
        .logits
        .iter()
        .copied()
        .fold(f32::NEG_INFINITY, f32::max);
    let tie = logit(step.candle) == greatest && logit(step.topk) == greatest;
    Verdict {
        legitimate: tie,
        reason: if tie {
            format!(
                "both tokens have the greatest logit, {greatest}: candle-topk takes the lowest id, \
                 Candle either"
            )
        } else {
            format!(
                "the greatest logit is {greatest}, candle's token has {} and topk's {}",
                logit(step.candle),
                logit(step.topk)
            )
        },
    }
}

/// Softmax in f64, and the bound on the relative error of Candle's f32 weights.
fn softmax(logits: &[f32], temperature: f64) -> (Vec<f64>, f64) {
    let scaled: Vec<f64> = logits.iter().map(|&l| f64::from(l) / temperature).collect();
    let greatest = scaled.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = scaled.iter().map(|s| (s - greatest).exp()).collect();
    let total: f64 = weights.iter().sum();
    let least = scaled
        .iter()
        .copied()
        .filter(|s| s.is_finite())
        .fold(greatest, f64::min);
    // Scaling rounds a logit twice and subtracting the maximum once more: an absolute error of the
    // exponent, and so a relative one of the weight. The exponential and the division add a few
    // units of their own.
    let widest = least.abs().max(greatest.abs());
    let error = (4.0 * widest + 8.0) * UNIT;
    (weights.iter().map(|w| w / total).collect(), error)
}

/// Half the distance from 1 to the next f32.
const UNIT: f64 = 1.0 / (1u64 << 24) as f64;

/// Tokens by descending probability, the lower id first among equals.
fn descending(probabilities: &[f64]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..probabilities.len()).collect();
    order.sort_by(|&a, &b| probabilities[b].total_cmp(&probabilities[a]));
    order
}

fn by_cdf(step: &Step, temperature: f64, p: f64) -> Verdict {
    let (probabilities, weight_error) = softmax(step.logits, temperature);
    let order = descending(&probabilities);
    let filtered = p > 0.0 && p < 1.0;

    // The set, and the mass of those tokens of which f32 can't say whether they are in it.
    let mut kept = vec![!filtered; probabilities.len()];
    let mut unsure = 0.0;
    if filtered {
        let mut before = 0.0;
        for (rank, &token) in order.iter().enumerate() {
            let bound = (rank as f64 * UNIT + weight_error) * p;
            kept[token] = before < p;
            if (before - p).abs() <= bound {
                kept[token] = true;
                unsure += probabilities[token];
            }
            if before > p + bound {
                break;
            }
            before += probabilities[token];
        }
    }
    let count = kept.iter().filter(|&&k| k).count();

    // The draw as rand's WeightedIndex makes it of one u32.
    let mut rng = StdRng::seed_from_u64(step.seed);
    let mut word = 0;
    for _ in 0..=step.drawn {
        word = rng.next_u32();
    }
    let uniform = f64::from(word >> 9) / f64::from(1u32 << 23);

    let (low, high) = (
        step.candle.min(step.topk) as usize,
        step.candle.max(step.topk) as usize,
    );
    if !kept[low] || !kept[high] {
        return Verdict {
            legitimate: false,
            reason: format!("a token lies outside the kept set of {count}"),
        };
    }
    // The CDF in f64, and beside it Candle's sum: f32, one weight after the other in the order of
    // the ids.
    let (mut exact, mut of_rounded, mut sum) = (0f64, 0f64, 0f32);
    let (mut after_low, mut before_high) = (0.0, 0.0);
    let mut edges = Vec::with_capacity(count);
    for (token, &probability) in probabilities.iter().enumerate() {
        if token == high {
            before_high = exact;
        }
        if kept[token] {
            exact += probability;
            of_rounded += f64::from(probability as f32);
            sum += probability as f32;
            edges.push((of_rounded, f64::from(sum)));
        }
        if token == low {
            after_low = exact;
        }
    }
    // Only the sum's own rounding: both sides add the same f32 weights. Weights that differ in the
    // last bit round otherwise, but no worse than about twice.
    let sum_error = edges
        .iter()
        .map(|(right, candle)| (right / of_rounded - candle / f64::from(sum)).abs())
        .fold(0.0, f64::max);
    // How far the edges would have to move for the one token, and for the other.
    let draw = uniform * exact;
    let distance = (draw - after_low).max(before_high - draw).max(0.0) / exact;
    let bound = 2.0 * (sum_error + weight_error) + unsure / exact;
    Verdict {
        legitimate: distance <= bound,
        reason: format!(
            "in f64 the draw lies {distance:.1e} of the mass beyond the edge between the two \
             tokens, and Candle's f32 sum over {count} weights places that edge to within \
             {bound:.1e}"
        ),
    }
}

fn by_set(step: &Step, temperature: f64, k: usize, p: Option<f64>) -> Verdict {
    let (probabilities, weight_error) = softmax(step.logits, temperature);
    let order = descending(&probabilities);
    let k = k.min(order.len());
    let allowed = |token: u32| {
        let probability = probabilities[token as usize];
        // Equal to the last of the k is as good as among them.
        let in_k = k > 0 && probability >= probabilities[order[k - 1]];
        let in_p = p.is_none_or(|p| {
            let before: f64 = order
                .iter()
                .map(|&t| probabilities[t])
                .take_while(|&q| q > probability)
                .sum();
            p <= 0.0 || before < p + k as f64 * UNIT + weight_error
        });
        in_k && in_p
    };
    let legitimate = allowed(step.candle) && allowed(step.topk);
    Verdict {
        legitimate,
        reason: if legitimate {
            format!(
                "both tokens are in the kept set: Candle lays out the {k} survivors of a top-k in \
                 an order that it leaves open, so only the distributions agree"
            )
        } else {
            format!("a token lies outside the kept set of at most {k}")
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The draw number `drawn` of a seed, from 0 to 1.
    fn uniform(seed: u64, drawn: usize) -> f64 {
        let mut rng = StdRng::seed_from_u64(seed);
        (0..drawn).for_each(|_| {
            rng.next_u32();
        });
        f64::from(rng.next_u32() >> 9) / f64::from(1u32 << 23)
    }

    /// Logits of two tokens such that the edge between them lies `off` above the draw.
    fn two_tokens(edge: f64) -> Vec<f32> {
        vec![edge.ln() as f32, (1.0 - edge).ln() as f32]
    }

    fn verdict(logits: &[f32], sampling: Sampling, candle: u32, topk: u32) -> Verdict {
        explain(&Step {
            logits,
            sampling: &sampling,
            seed: 7,
            drawn: 3,
            candle,
            topk,
        })
    }

    #[test]
    fn a_draw_at_an_edge_may_go_either_way_and_another_may_not() {
        let draw = uniform(7, 3);
        let all = || Sampling::All { temperature: 1.0 };
        assert!(verdict(&two_tokens(draw + 1e-8), all(), 0, 1).legitimate);
        assert!(verdict(&two_tokens(draw + 1e-8), all(), 1, 0).legitimate);
        for off in [1e-4, -1e-4] {
            let v = verdict(&two_tokens(draw + off), all(), 0, 1);
            assert!(
                !v.legitimate && v.reason.contains("e-4") || v.reason.contains("e-5"),
                "{}",
                v.reason
            );
        }
    }

    #[test]
    fn the_draw_is_the_one_that_candle_makes() {
        let logits: Vec<f32> = (0..40).map(|i| ((i * 7) % 13) as f32 / 3.0).collect();
        let tensor =
            candle_core::Tensor::new(logits.as_slice(), &candle_core::Device::Cpu).unwrap();
        for (sampling, p) in [
            (Sampling::All { temperature: 0.7 }, 1.0),
            (
                Sampling::TopP {
                    p: 0.8,
                    temperature: 0.7,
                },
                0.8,
            ),
        ] {
            let mut processor = candle_transformers::generation::LogitsProcessor::from_sampling(
                7,
                sampling.clone(),
            );
            for drawn in 0..50 {
                let token = processor.sample(&tensor).unwrap();
                let step = Step {
                    logits: &logits,
                    sampling: &sampling,
                    seed: 7,
                    drawn,
                    candle: token,
                    topk: token,
                };
                // Against itself the distance says whether the draw lies inside the token's
                // interval.
                assert!(
                    by_cdf(&step, 0.7, p).reason.contains("lies 0.0e0"),
                    "{}",
                    by_cdf(&step, 0.7, p).reason
                );
            }
        }
    }

    #[test]
    fn greedy_tokens_may_differ_in_a_tie_alone() {
        assert!(verdict(&[1.0, 2.0, 2.0], Sampling::ArgMax, 2, 1).legitimate);
        assert!(!verdict(&[1.0, 2.0, 1.9], Sampling::ArgMax, 2, 1).legitimate);
        assert!(!verdict(&[1.0, 2.0], Sampling::ArgMax, 9, 1).legitimate);
    }

    #[test]
    fn after_a_top_k_both_tokens_have_to_be_in_the_set() {
        let logits = [0.0, 3.0, 2.0, 1.0];
        let k = |k| Sampling::TopK {
            k,
            temperature: 1.0,
        };
        assert!(verdict(&logits, k(2), 1, 2).legitimate);
        assert!(!verdict(&logits, k(2), 1, 3).legitimate);
        // The third token's predecessors hold 0.88 of the mass.
        let both = |p| Sampling::TopKThenTopP {
            k: 3,
            p,
            temperature: 1.0,
        };
        assert!(verdict(&logits, both(0.9), 1, 3).legitimate);
        assert!(!verdict(&logits, both(0.8), 1, 3).legitimate);
    }

    #[test]
    fn a_token_outside_the_nucleus_is_never_legitimate() {
        let top_p = Sampling::TopP {
            p: 0.5,
            temperature: 1.0,
        };
        let v = verdict(&[0.0, 3.0, 2.0, 1.0], top_p, 1, 0);
        assert!(
            !v.legitimate && v.reason.contains("outside"),
            "{}",
            v.reason
        );
    }
}
