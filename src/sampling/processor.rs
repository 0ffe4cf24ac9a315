//! The drop-in logits processor.

use super::cpu::{Drawn, Summary};
use super::cuda;
use super::sample::{self, Draw, DrawOperand};
use super::softmax;
use super::truncation::{Mass, Operand, Rows, Truncation};
use crate::empty::to_f32;
use crate::order::{self, rank, rank_position};
use candle_core::{bail, DType, Device, Result, Storage, Tensor};
use candle_transformers::generation::Sampling;
use rand::{rngs::StdRng, Rng, SeedableRng};

/// Drop-in for `candle_transformers::generation::LogitsProcessor`: the same constructors, methods
/// and [`Sampling`], so that the import is the whole change.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_topk::LogitsProcessor; // was: candle_transformers::generation::LogitsProcessor
///
/// # fn main() -> candle_core::Result<()> {
/// let mut processor = LogitsProcessor::new(299792458, Some(0.8), Some(0.9));
/// let logits = Tensor::new(&[0.1f32, 2.0, 1.9, -1.0], &Device::Cpu)?;
/// let token = processor.sample(&logits)?;
/// assert!(token == 1 || token == 2);
/// # Ok(())
/// # }
/// ```
///
/// On CUDA the logits stay on the device: one kernel truncates and draws, and eight bytes come
/// back. Other devices without a backend here (Metal, and CUDA in a build without the feature
/// `cuda`) are copied to the CPU, as Candle does.
///
/// # Same answers as Candle's
///
/// * Each token takes one u32 from the same `StdRng`, and the same CDF is inverted in token-id
///   order: with equal seeds `TopP` and `All` give Candle's token, except where the draw falls
///   within the rounding of Candle's sequential f32 sum of an edge of the CDF. Ours is exact there.
/// * `ArgMax` gives the greatest logit and, of equal ones, the lowest id.
/// * `TopK` and `TopKThenTopP` keep the same tokens, ties by lowest id. Candle draws over them in
///   the order that its quickselect leaves, so tokens agree in distribution only. As there, p is a
///   fraction of the whole vocabulary's mass ([`Mass::Joint`]).
/// * `GumbelSoftmax` draws from the exact softmax, with 64 bits that a u32 of the processor's own
///   generator seeds; Candle's clips its noise and takes it from the device.
///
/// # Errors
///
/// NaN logits, +inf logits (but for `ArgMax`), a row with nothing above -inf, k = 0, a negative or
/// NaN temperature or NaN p are an `Err` that says so, and the generator does not advance. p <= 0 or
/// p >= 1 is no filter, as in Candle; temperature 0 is greedy. Logits are `[V]`, of any dtype that
/// casts to F32.
pub struct LogitsProcessor {
    rng: StdRng,
    sampling: Sampling,
    readback: cuda::Readback,
}

const OP: &str = "LogitsProcessor";

impl LogitsProcessor {
    /// With this seed and this way of sampling.
    pub fn from_sampling(seed: u64, sampling: Sampling) -> Self {
        Self {
            rng: StdRng::seed_from_u64(seed),
            sampling,
            readback: cuda::Readback::new(),
        }
    }

    /// `ArgMax` without a temperature or below 1e-7, else `TopP` where there is a p, else `All`.
    pub fn new(seed: u64, temperature: Option<f64>, top_p: Option<f64>) -> Self {
        let sampling = match temperature {
            None => Sampling::ArgMax,
            Some(temperature) if temperature < 1e-7 => Sampling::ArgMax,
            Some(temperature) => match top_p {
                None => Sampling::All { temperature },
                Some(p) => Sampling::TopP { p, temperature },
            },
        };
        Self::from_sampling(seed, sampling)
    }

    /// The next token for logits `[V]`.
    ///
    /// # Errors
    /// See [`LogitsProcessor`]; the generator then has not advanced.
    pub fn sample(&mut self, logits: &Tensor) -> Result<u32> {
        if logits.rank() != 1 {
            bail!(
                "{OP}: logits have shape {:?}, [V] is needed; sample_batch takes [B, V]",
                logits.dims()
            )
        }
        Ok(self.tokens(logits)?[0])
    }

    /// The next token of each row of logits `[B, V]`. One u32 of the generator a row, in row order:
    /// the same tokens as `B` calls of [`sample`](Self::sample).
    ///
    /// # Errors
    /// As [`sample`](Self::sample), naming the row; the generator then has not advanced.
    pub fn sample_batch(&mut self, logits: &Tensor) -> Result<Vec<u32>> {
        if logits.rank() != 2 {
            bail!(
                "{OP}: logits have shape {:?}, [B, V] is needed",
                logits.dims()
            )
        }
        self.tokens(logits)
    }

    /// The next tokens as a U32 tensor on the logits' device, `[]` for `[V]` and `[B]` for
    /// `[B, V]`, without a readback: the same tokens as [`sample`](Self::sample) and
    /// [`sample_batch`](Self::sample_batch). A row that these refuse gives `u32::MAX`, which this
    /// method cannot report, and its draw is spent.
    ///
    /// The draws come from the host: a batch's are uploaded, and a captured CUDA graph would repeat
    /// them. [`sample_batch`](fn@super::sample_batch) takes draws that lie on the device.
    ///
    /// # Errors
    /// For a way of sampling that means nothing, and logits of a wrong rank or device.
    pub fn sample_tensor(&mut self, logits: &Tensor) -> Result<Tensor> {
        let truncation = truncation(&self.sampling)?;
        let (logits, rows) = prepare(logits)?;
        let mut rng = self.rng.clone();
        let draws = draws(&self.sampling, &mut rng, rows.batch);
        let shape = rows.shape(None);
        let tokens = {
            let (storage, _) = logits.storage_and_layout();
            match &*storage {
                Storage::Cpu(storage) => {
                    let drawn = on_cpu(storage, &rows, &truncation, &draws)?;
                    let tokens = drawn.iter().map(|d| {
                        if refusal(d, self.strict()).is_some() {
                            u32::MAX
                        } else {
                            d.token
                        }
                    });
                    Tensor::from_vec(tokens.collect(), shape, &Device::Cpu)?
                }
                Storage::Cuda(storage) => {
                    let tokens =
                        cuda::sample_strict(storage, &rows, &truncation, &draws, self.strict())?;
                    Tensor::from((Storage::Cuda(tokens), shape))
                }
                Storage::Metal(_) => unreachable!("prepare moves Metal logits to the CPU"),
            }
        };
        self.rng = rng;
        Ok(tokens)
    }

    /// [`sample`](Self::sample) with the probabilities in `f`'s hands before truncation: after
    /// temperature and softmax, of the whole vocabulary, free to be changed to any weights that are
    /// finite and not negative. As in Candle, `f` is not called for `ArgMax` and `GumbelSoftmax`,
    /// and a p between 0 and 1 is compared with the sum of the weights as they are.
    ///
    /// This copies all V logits to the host and works there, as Candle does. Where `f` only masks
    /// or penalises tokens, a change of the logits on the device before
    /// [`sample`](Self::sample) costs far less.
    ///
    /// # Errors
    /// As [`sample`](Self::sample), and for weights that are negative, not finite or all zero.
    pub fn sample_f(&mut self, logits: &Tensor, f: impl FnOnce(&mut [f32])) -> Result<u32> {
        if matches!(
            self.sampling,
            Sampling::ArgMax | Sampling::GumbelSoftmax { .. }
        ) {
            return self.sample(logits);
        }
        if logits.rank() != 1 {
            bail!("{OP}: logits have shape {:?}, [V] is needed", logits.dims())
        }
        let truncation = truncation(&self.sampling)?;
        let row = logits
            .to_device(&Device::Cpu)?
            .to_dtype(DType::F32)?
            .to_vec1::<f32>()?;
        let summary = Summary::of(&row);
        let drawn = Drawn {
            token: summary.best.map_or(u32::MAX, rank_position),
            has_nan: summary.has_nan,
            has_infinity: summary.has_infinity,
        };
        if let Some(reason) = refusal(&drawn, true) {
            bail!("{OP}: {reason}")
        }
        let mut weights = probabilities(&row, &summary, truncation.temperature());
        f(&mut weights);
        let mut rng = self.rng.clone();
        let u = Draw::Bits(candle_bits(&mut rng)).bits();
        let token = sample_weights(&weights, &self.sampling, u)?;
        self.rng = rng;
        Ok(token)
    }

    /// Whether +inf has no answer: it has a greatest logit.
    fn strict(&self) -> bool {
        !matches!(self.sampling, Sampling::ArgMax)
    }

    fn tokens(&mut self, logits: &Tensor) -> Result<Vec<u32>> {
        let truncation = truncation(&self.sampling)?;
        let (logits, rows) = prepare(logits)?;
        let mut rng = self.rng.clone();
        let draws = draws(&self.sampling, &mut rng, rows.batch);
        let drawn = {
            let (storage, _) = logits.storage_and_layout();
            match &*storage {
                Storage::Cpu(storage) => on_cpu(storage, &rows, &truncation, &draws)?,
                Storage::Cuda(storage) => {
                    self.readback.sample(storage, &rows, &truncation, &draws)?
                }
                Storage::Metal(_) => unreachable!("prepare moves Metal logits to the CPU"),
            }
        };
        for (b, row) in drawn.iter().enumerate() {
            if let Some(reason) = refusal(row, self.strict()) {
                if rows.single {
                    bail!("{OP}: {reason}")
                }
                bail!("{OP}: row {b}: {reason}")
            }
        }
        self.rng = rng;
        Ok(drawn.into_iter().map(|d| d.token).collect())
    }
}

/// What the ops take for a way of sampling. Greedy where it is `ArgMax`.
fn truncation(sampling: &Sampling) -> Result<Truncation> {
    let base = Truncation::new().with_mass(Mass::Joint);
    let top_p = |truncation: Truncation, p: f64| {
        if p.is_nan() {
            bail!("{OP}: top-p is NaN, a number is needed (p <= 0 and p >= 1 are no filter)")
        }
        if p <= 0.0 || p >= 1.0 {
            return Ok(truncation);
        }
        // A p that f32 rounds to 0 keeps the best token, like any other that small.
        Ok(truncation.with_top_p((p as f32).max(f32::MIN_POSITIVE)))
    };
    let top_k = |truncation: Truncation, k: usize| {
        if k == 0 {
            bail!("{OP}: top-k is 0, which keeps no token; at least 1 is needed")
        }
        Ok(truncation.with_top_k(k))
    };
    let (truncation, temperature) = match *sampling {
        Sampling::ArgMax => (base, 0.0),
        Sampling::All { temperature } | Sampling::GumbelSoftmax { temperature } => {
            (base, temperature)
        }
        Sampling::TopK { k, temperature } => (top_k(base, k)?, temperature),
        Sampling::TopP { p, temperature } => (top_p(base, p)?, temperature),
        Sampling::TopKThenTopP { k, p, temperature } => (top_p(top_k(base, k)?, p)?, temperature),
    };
    let truncation = truncation.with_temperature(temperature as f32);
    truncation.check(OP)?;
    Ok(truncation)
}

/// Logits in a dtype, layout and place that a backend takes.
fn prepare(logits: &Tensor) -> Result<(Tensor, Rows)> {
    let logits = match logits.dtype() {
        DType::F32 | DType::F16 | DType::BF16 => logits.clone(),
        _ => to_f32(logits)?,
    };
    let here = logits.device().is_cpu() || (logits.device().is_cuda() && cfg!(feature = "cuda"));
    let logits = if here {
        logits
    } else {
        logits.to_device(&Device::Cpu)?
    };
    let logits = if logits.stride().last().is_some_and(|s| *s != 1) {
        logits.contiguous()?
    } else {
        logits
    };
    let rows = Rows::of(OP, logits.layout(), logits.dtype())?;
    Ok((logits, rows))
}

/// The bits of the uniform that Candle's sampler draws: `rand` gives f32 23 of a u32's bits.
fn candle_bits(rng: &mut StdRng) -> u32 {
    rng.random::<u32>() & !0x1ff
}

/// One draw a row, in row order, all of a kind; greedy sampling draws nothing, as in Candle.
fn draws(sampling: &Sampling, rng: &mut StdRng, batch: usize) -> Vec<Draw> {
    let mut draw = || match sampling {
        Sampling::ArgMax => Draw::Bits(0),
        // Candle's takes no bits of this generator, so there are none to repeat, and 23 would leave
        // the rarest tokens out.
        Sampling::GumbelSoftmax { .. } => Draw::Counter {
            seed: rng.random::<u32>() as i64,
            step: 0,
        },
        _ => Draw::Bits(candle_bits(rng)),
    };
    (0..batch).map(|_| draw()).collect()
}

fn on_cpu(
    storage: &candle_core::CpuStorage,
    rows: &Rows,
    truncation: &Truncation,
    draws: &[Draw],
) -> Result<Vec<Drawn>> {
    let (draws, layout) = sample::packed(draws);
    let draws = DrawOperand::Rows(&draws, &layout);
    let operand = Operand::scalar(OP, rows, truncation)?;
    let (drawn, _) = sample::cpu_draw(storage, rows, operand, draws)?;
    Ok(drawn)
}

/// Why a row has no answer, if it has none.
fn refusal(row: &Drawn, strict: bool) -> Option<&'static str> {
    if row.has_nan {
        Some("the logits hold NaN, which has no place in a distribution")
    } else if row.has_infinity && strict {
        Some("the logits hold +inf, which has no place in a distribution")
    } else if row.token == u32::MAX {
        Some("no logit is above -inf, so there is no token to draw")
    } else {
        None
    }
}

/// The softmax of a row in f32; all of it on the best token at temperature 0.
fn probabilities(row: &[f32], summary: &Summary, temperature: f32) -> Vec<f32> {
    let Some(best) = summary.best else {
        return vec![0.0; row.len()];
    };
    if temperature == 0.0 {
        let mut one_hot = vec![0.0; row.len()];
        one_hot[rank_position(best) as usize] = 1.0;
        return one_hot;
    }
    let softmax = softmax::Softmax::new(order::value(order::rank_key(best)), temperature);
    let total = softmax::to_f64(softmax.sum(row, |_, _| true));
    row.iter()
        .map(|&x| (softmax.weight(x) as f64 / total) as f32)
        .collect()
}

/// Truncates weights as Candle truncates probabilities, and inverts their CDF in token-id order.
fn sample_weights(weights: &[f32], sampling: &Sampling, draw: u64) -> Result<u32> {
    for (token, &weight) in weights.iter().enumerate() {
        if !(weight >= 0.0 && weight.is_finite()) {
            bail!("{OP}: sample_f left token {token} the weight {weight}, weights must be finite and not negative")
        }
    }
    let (k, p) = match *sampling {
        Sampling::TopK { k, .. } => (k, 0.0),
        Sampling::TopKThenTopP { k, p, .. } => (k, p),
        Sampling::TopP { p, .. } => (weights.len(), p),
        _ => (weights.len(), 0.0),
    };
    let mut kept: Vec<u32> = (0..weights.len() as u32).collect();
    let order = |i: &u32| std::cmp::Reverse(rank(weights[*i as usize], *i));
    if k < kept.len() {
        kept.select_nth_unstable_by_key(k - 1, order);
        kept.truncate(k);
    }
    if p > 0.0 && p < 1.0 {
        kept.sort_unstable_by_key(order);
        let mut before = 0f64;
        let len = kept
            .iter()
            .take_while(|&&i| {
                let keep = before < p as f32 as f64;
                before += weights[i as usize] as f64;
                keep
            })
            .count();
        kept.truncate(len.max(1));
    }
    kept.sort_unstable();
    let total: f64 = kept.iter().map(|&i| weights[i as usize] as f64).sum();
    if total == 0.0 {
        bail!("{OP}: sample_f left every token the weight 0, so there is no token to draw")
    }
    let point = draw as f64 / softmax::TWO_64 * total;
    let mut before = 0f64;
    let positive = |i: &&u32| weights[**i as usize] > 0.0;
    let found = kept.iter().find(|&&i| {
        before += weights[i as usize] as f64;
        before > point
    });
    // The point may reach the total by rounding: the last token that weighs anything has it.
    let token = found.or_else(|| kept.iter().rev().find(positive));
    Ok(*token.expect("a positive total has a positive weight"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_have_the_bits_that_they_say() {
        let temperature = 1.0;
        let mut rng = StdRng::seed_from_u64(5);
        let fresh = rng.clone();
        draws(&Sampling::ArgMax, &mut rng, 9);
        assert_eq!(rng, fresh, "greedy sampling draws nothing");
        let beyond_23 = |sampling, rng: &mut StdRng| -> Vec<u64> {
            let draws = draws(&sampling, rng, 64);
            draws.iter().map(|draw| draw.bits() << 23).collect()
        };
        let all = beyond_23(Sampling::All { temperature }, &mut rng.clone());
        assert_eq!(all, [0; 64]);
        let mut gumbel = beyond_23(Sampling::GumbelSoftmax { temperature }, &mut rng);
        gumbel.sort_unstable();
        gumbel.dedup();
        assert_eq!(gumbel.len(), 64, "no two alike beyond the first 23 bits");
    }

    #[test]
    fn weights_are_truncated_as_candle_truncates_them() {
        let weights = [0.1, 0.4, 0.0, 0.3, 0.2];
        let at = |u: f64, sampling: &Sampling| {
            sample_weights(&weights, sampling, (u * softmax::TWO_64) as u64).unwrap()
        };
        let temperature = 1.0;
        let all = Sampling::All { temperature };
        assert_eq!(
            [at(0.0, &all), at(0.3, &all), at(0.6, &all), at(0.9, &all)],
            [0, 1, 3, 4]
        );
        let top_k = Sampling::TopK { k: 2, temperature };
        assert_eq!(
            [at(0.0, &top_k), at(0.56, &top_k), at(0.58, &top_k)],
            [1, 1, 3]
        );
        let top_p = Sampling::TopP {
            p: 0.35,
            temperature,
        };
        assert_eq!([at(0.0, &top_p), at(0.999, &top_p)], [1, 1]);
        // p is a fraction of all, not of what top-k leaves: 0.4 and 0.3 stay.
        let both = Sampling::TopKThenTopP {
            k: 3,
            p: 0.65,
            temperature,
        };
        assert_eq!(
            [
                at(0.0, &both),
                at(0.56, &both),
                at(0.58, &both),
                at(0.999, &both)
            ],
            [1, 1, 3, 3]
        );
    }

    #[test]
    fn weights_that_mean_nothing_are_errors() {
        let all = Sampling::All { temperature: 1.0 };
        for (weights, part) in [
            (vec![0.5, -0.5], "token 1 the weight -0.5"),
            (vec![f32::NAN, 0.5], "token 0 the weight NaN"),
            (vec![f32::INFINITY], "the weight inf"),
            (vec![0.0, 0.0], "every token the weight 0"),
        ] {
            let message = sample_weights(&weights, &all, 0).unwrap_err().to_string();
            assert!(message.contains(part), "{message}");
        }
    }
}
