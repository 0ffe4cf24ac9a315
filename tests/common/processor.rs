//! The drop-in beside Candle's own processor, as functions of the device.

use super::*;
use candle_core::{DType, Device, Result, Tensor};
use candle_topk::{LogitsProcessor, Sampling};
use candle_transformers::generation::LogitsProcessor as Candle;

const INF: f32 = f32::INFINITY;

/// The uniform that both processors draw from this seed at this step, from `rand` alone.
fn uniform(seed: u64, step: usize) -> f64 {
    let mut rng = rng(seed);
    let bits = (0..=step).map(|_| rng.random::<u32>()).last().unwrap();
    (bits >> 9) as f64 / (1u64 << 23) as f64
}

/// The exact CDF in token-id order over the set that a stable sort keeps, and the greatest error of
/// the CDF that Candle sums in f32, each at the end of every token.
fn cdfs(row: &[f32], probs: &[f32], sampling: &Sampling) -> (Vec<f64>, f64) {
    let (p, temperature) = match *sampling {
        Sampling::TopP { p, temperature } => (p as f32, temperature),
        Sampling::All { temperature } => (1.0, temperature),
        _ => unreachable!("only these invert the CDF in token-id order"),
    };
    let params = Params {
        p,
        temperature: temperature as f32,
        mass: Mass::Joint,
        ..Params::NONE
    };
    let oracle = Oracle::new(row);
    let len = oracle.expected(&params).len;
    let weights = oracle.weights(params.temperature);
    let total: f64 = weights[..len].iter().sum();
    let mut exact = vec![0f64; row.len()];
    for (&id, weight) in oracle.order[..len].iter().zip(weights.iter()) {
        exact[id as usize] = weight / total;
    }
    let mut sum = 0.0;
    for x in &mut exact {
        sum += *x;
        *x = sum;
    }

    // Candle: sorted in f32, summed in f32, cut; then summed in f32 in token-id order.
    let mut kept = probs.to_vec();
    if p < 1.0 {
        let mut order: Vec<usize> = (0..probs.len()).collect();
        order.sort_by(|&i, &j| probs[j].total_cmp(&probs[i]));
        let mut before = 0f32;
        for i in order {
            if before >= p {
                kept[i] = 0.0;
            } else {
                before += probs[i];
            }
        }
    }
    let total = kept.iter().fold(0f32, |sum, x| sum + x);
    let mut sum = 0f32;
    let mut error = 0f64;
    for (x, exact) in kept.iter().zip(&exact) {
        sum += x;
        error = error.max((sum as f64 / total as f64 - exact).abs());
    }
    (exact, error)
}

/// What a differential run saw.
#[derive(Debug, Default)]
pub struct Tally {
    pub draws: usize,
    pub different: usize,
}

/// Draws with both processors from equal seeds; every difference must be one that the error of
/// Candle's sums explains.
pub fn differential(
    device: &Device,
    row: &[f32],
    sampling: &Sampling,
    seeds: std::ops::Range<u64>,
    steps: usize,
) -> Result<Tally> {
    let logits = Tensor::new(row, device)?;
    let mut tally = Tally::default();
    let mut sums = None;
    for seed in seeds {
        let mut ours = LogitsProcessor::from_sampling(seed, sampling.clone());
        let mut candle = Candle::from_sampling(seed, sampling.clone());
        for step in 0..steps {
            let (got, want) = (ours.sample(&logits)?, candle.sample(&logits)?);
            tally.draws += 1;
            let temperature = match *sampling {
                Sampling::All { temperature } | Sampling::TopP { temperature, .. } => temperature,
                _ => unreachable!("only these invert the CDF in token-id order"),
            };
            let u = uniform(seed, step);
            let (exact, error) = match &sums {
                Some(sums) => sums,
                None => {
                    let probs = candle_nn::ops::softmax_last_dim(&(&logits / temperature)?)?;
                    sums.insert(cdfs(row, &probs.to_vec1::<f32>()?, sampling))
                }
            };
            // Ours is the exact answer, up to the rounding of a weight.
            let start = if got == 0 {
                0.0
            } else {
                exact[got as usize - 1]
            };
            let what = format!("{sampling:?}, V {}, seed {seed}, step {step}", row.len());
            assert!(
                start - 1e-6 <= u && u < exact[got as usize] + 1e-6,
                "{what}: token {got} spans {start} to {}, the draw is {u}",
                exact[got as usize]
            );
            if got != want {
                tally.different += 1;
                let edges = got.min(want) as usize..got.max(want) as usize;
                let distance = exact[edges]
                    .iter()
                    .map(|e| (e - u).abs())
                    .fold(0.0, f64::max);
                // The draw times the total is rounded too, to 24 bits.
                let bound = error + 2f64.powi(-23);
                assert!(
                    distance <= bound,
                    "{what}: {got} here and {want} in Candle, {distance:e} from the edge, where Candle's sums err by {error:e}"
                );
            }
        }
    }
    Ok(tally)
}

/// Laws, widths and modes against Candle; prints the rate of differences.
pub fn same_answers(device: &Device, effort: u64) -> Result<()> {
    let temperature = 0.8;
    for (vocab, seeds) in [(1000, 400), (32000, 40), (128256, 10)] {
        for law in [Law::Peaked, Law::Normal, Law::Zipf] {
            let row = logits(law, vocab, &mut rng(vocab as u64 + 77));
            for sampling in [
                Sampling::TopP {
                    p: 0.9,
                    temperature,
                },
                Sampling::TopP {
                    p: 0.5,
                    temperature,
                },
                Sampling::All { temperature },
            ] {
                let tally = differential(device, &row, &sampling, 0..seeds * effort, 3)?;
                println!(
                    "{law:?}, V {vocab}, {sampling:?}: {} of {} draws differ",
                    tally.different, tally.draws
                );
                // Small sets: Candle's sum over them has next to no error.
                if law == Law::Peaked && matches!(sampling, Sampling::TopP { .. }) {
                    assert_eq!(tally.different, 0, "{law:?}, V {vocab}, {sampling:?}");
                }
            }
        }
    }
    Ok(())
}

/// `ArgMax` gives Candle's token where there are no ties, and the lowest id where there are.
pub fn arg_max(device: &Device) -> Result<()> {
    for vocab in [1, 2, 111, 32000, 128256] {
        let mut row = logits(Law::Normal, vocab, &mut rng(9));
        row[vocab / 2] = 50.0;
        let logits = Tensor::new(row.as_slice(), device)?;
        let mut ours = LogitsProcessor::new(1, None, Some(0.5));
        let mut candle = Candle::new(1, None, Some(0.5));
        assert_eq!(ours.sample(&logits)?, candle.sample(&logits)?);
        row[vocab / 3] = 50.0;
        let logits = Tensor::new(row.as_slice(), device)?;
        assert_eq!(ours.sample(&logits)?, (vocab / 3) as u32);
    }
    Ok(())
}

/// The top-k variants and Gumbel-softmax have the exact distribution, over the exact set.
pub fn top_k_distributions(device: &Device, draws: usize) -> Result<()> {
    let vocab = 1000;
    let temperature = 0.9;
    for (sampling, params) in [
        (
            Sampling::TopK { k: 50, temperature },
            Params {
                k: 50,
                ..Params::NONE
            },
        ),
        (
            Sampling::TopKThenTopP {
                k: 50,
                p: 0.6,
                temperature,
            },
            Params {
                k: 50,
                p: 0.6,
                ..Params::NONE
            },
        ),
        (Sampling::GumbelSoftmax { temperature }, Params::NONE),
    ] {
        let params = Params {
            temperature: temperature as f32,
            mass: Mass::Joint,
            ..params
        };
        // Ties at the edge of the set: only the lowest ids may be drawn.
        let row = logits(Law::Ties, vocab, &mut rng(31));
        let oracle = Oracle::new(&row);
        let len = oracle.expected(&params).len;
        let weights = oracle.weights(params.temperature);
        let total: f64 = weights[..len].iter().sum();
        let mut probs = vec![0f64; vocab];
        for (&id, w) in oracle.order[..len].iter().zip(weights.iter()) {
            probs[id as usize] = w / total;
        }
        let batch = 2000;
        let tensor = Tensor::new(row.as_slice(), device)?.broadcast_as((batch, vocab))?;
        let mut processor = LogitsProcessor::from_sampling(7, sampling.clone());
        let mut counts = vec![0u64; vocab];
        for _ in 0..draws.div_ceil(batch) {
            for token in processor.sample_batch(&tensor)? {
                assert!(
                    probs[token as usize] > 0.0,
                    "{sampling:?}: {token} is outside the set"
                );
                counts[token as usize] += 1;
            }
        }
        let excess = chi_square_excess(&counts, &probs);
        assert!(
            excess < 5.0,
            "{sampling:?}: chi-square is {excess:.1} deviations high"
        );
    }
    Ok(())
}

/// A batch draws what its rows draw one after the other, on the host and as a tensor.
pub fn batches(device: &Device) -> Result<()> {
    let vocab = 9000;
    let mut rng = rng(2);
    let rows = 6;
    let flat: Vec<f32> = (0..rows)
        .flat_map(|i| logits(LAWS[i % 5], vocab, &mut rng))
        .collect();
    let logits = Tensor::from_vec(flat, (rows, vocab), device)?;
    let temperature = 1.1;
    for sampling in [
        Sampling::ArgMax,
        Sampling::All { temperature },
        Sampling::TopP {
            p: 0.8,
            temperature,
        },
        Sampling::TopK { k: 20, temperature },
        Sampling::TopKThenTopP {
            k: 100,
            p: 0.3,
            temperature,
        },
        Sampling::GumbelSoftmax { temperature },
    ] {
        let new = || LogitsProcessor::from_sampling(99, sampling.clone());
        let (mut one, mut batch, mut tensor) = (new(), new(), new());
        let mut single_tensor = new();
        for _ in 0..3 {
            let want: Vec<u32> = (0..rows)
                .map(|b| one.sample(&logits.get(b)?))
                .collect::<Result<_>>()?;
            assert_eq!(batch.sample_batch(&logits)?, want, "{sampling:?}");
            let tokens = tensor.sample_tensor(&logits)?;
            assert_eq!(tokens.dtype(), DType::U32);
            assert_eq!(tokens.device().location(), device.location());
            assert_eq!(tokens.to_vec1::<u32>()?, want, "{sampling:?} as a tensor");
            for (b, &want) in want.iter().enumerate() {
                let token = single_tensor.sample_tensor(&logits.get(b)?)?;
                assert_eq!(
                    token.to_scalar::<u32>()?,
                    want,
                    "{sampling:?} as a scalar tensor"
                );
            }
        }
    }
    Ok(())
}

/// Bad logits and parameters are errors that say so, and the generator does not advance.
pub fn refusals(device: &Device) -> Result<()> {
    let temperature = 1.0;
    let good = Tensor::new(&[0f32, 1.0, 2.0, 0.5], device)?;
    let row = |x: &[f32]| Tensor::new(x, device);
    let all = Sampling::All { temperature };
    for (sampling, logits, part) in [
        (all.clone(), row(&[0.0, f32::NAN])?, "NaN"),
        (all.clone(), row(&[0.0, INF])?, "+inf"),
        (all.clone(), row(&[-INF, -INF])?, "no logit is above -inf"),
        (Sampling::ArgMax, row(&[0.0, f32::NAN])?, "NaN"),
        (
            Sampling::ArgMax,
            row(&[-INF, -INF])?,
            "no logit is above -inf",
        ),
        (all.clone(), good.unsqueeze(0)?, "[1, 4]"),
        (
            Sampling::TopK { k: 0, temperature },
            good.clone(),
            "top-k is 0",
        ),
        (
            Sampling::TopP {
                p: f64::NAN,
                temperature,
            },
            good.clone(),
            "top-p is NaN",
        ),
        (
            Sampling::All { temperature: -1.0 },
            good.clone(),
            "temperature is -1",
        ),
        (
            Sampling::All {
                temperature: f64::NAN,
            },
            good.clone(),
            "temperature is NaN",
        ),
        (
            Sampling::GumbelSoftmax { temperature: -1.0 },
            good.clone(),
            "temperature is -1",
        ),
    ] {
        let mut processor = LogitsProcessor::from_sampling(5, sampling.clone());
        let message = processor.sample(&logits).expect_err("refused").to_string();
        assert!(
            message.contains(part) && message.contains("LogitsProcessor"),
            "{message}"
        );
        let message = processor
            .sample_f(&logits, |_| {})
            .expect_err("refused")
            .to_string();
        assert!(message.contains(part), "{message}");
    }
    let mut tried = LogitsProcessor::from_sampling(5, all.clone());
    let mut fresh = LogitsProcessor::from_sampling(5, all.clone());
    assert!(tried.sample(&row(&[f32::NAN, 1.0])?).is_err());
    assert!(tried.sample_f(&good, |weights| weights.fill(0.0)).is_err());
    let mixed = Tensor::new(&[[0f32, 1.0], [INF, 0.0]], device)?;
    let message = tried.sample_batch(&mixed).expect_err("refused").to_string();
    assert!(message.contains("row 1"), "{message}");
    assert!(tried.sample_batch(&good).is_err());
    for _ in 0..20 {
        assert_eq!(tried.sample(&good)?, fresh.sample(&good)?);
    }
    // As a tensor a refused row is u32::MAX; its neighbours have their tokens.
    let tokens = fresh.sample_tensor(&mixed)?.to_vec1::<u32>()?;
    assert!(tokens[0] < 2 && tokens[1] == u32::MAX, "{tokens:?}");

    // What Candle takes as no filter, or better.
    for (sampling, same) in [
        (
            Sampling::TopP {
                p: 0.0,
                temperature,
            },
            all.clone(),
        ),
        (
            Sampling::TopP {
                p: -1.0,
                temperature,
            },
            all.clone(),
        ),
        (
            Sampling::TopP {
                p: 1.0,
                temperature,
            },
            all.clone(),
        ),
        (Sampling::TopK { k: 4, temperature }, all.clone()),
        (
            Sampling::TopKThenTopP {
                k: 9,
                p: 2.0,
                temperature,
            },
            all.clone(),
        ),
        (
            Sampling::TopP {
                p: 1e-60,
                temperature,
            },
            Sampling::TopK { k: 1, temperature },
        ),
        (
            Sampling::All { temperature: 0.0 },
            Sampling::TopK { k: 1, temperature },
        ),
    ] {
        let mut a = LogitsProcessor::from_sampling(8, sampling.clone());
        let mut b = LogitsProcessor::from_sampling(8, same);
        for _ in 0..20 {
            assert_eq!(a.sample(&good)?, b.sample(&good)?, "{sampling:?}");
        }
    }
    // +inf has an argmax.
    let mut argmax = LogitsProcessor::new(0, Some(1e-8), None);
    assert_eq!(argmax.sample(&row(&[0.0, INF, INF])?)?, 1);
    // A NaN temperature isn't taken for greedy.
    assert!(LogitsProcessor::new(0, Some(f64::NAN), None)
        .sample(&good)
        .is_err());
    Ok(())
}

/// Every dtype that Candle casts to F32.
pub fn dtypes(device: &Device) -> Result<()> {
    let whole = Tensor::new(&[3f32, 0.0, 7.0, 7.0, 1.0], device)?;
    for dtype in [
        DType::F32,
        DType::F64,
        DType::F16,
        DType::BF16,
        DType::U8,
        DType::U32,
        DType::I64,
    ] {
        let logits = whole.to_dtype(dtype)?;
        let mut processor = LogitsProcessor::new(3, Some(0.5), Some(0.95));
        let mut reference = LogitsProcessor::new(3, Some(0.5), Some(0.95));
        for _ in 0..10 {
            assert_eq!(
                processor.sample(&logits)?,
                reference.sample(&whole)?,
                "{dtype:?}"
            );
        }
        assert_eq!(LogitsProcessor::new(3, None, None).sample(&logits)?, 2);
    }
    // A column is made dense first.
    let column = Tensor::new(&[[0f32, 9.0], [5.0, 9.0], [1.0, 9.0]], device)?
        .t()?
        .get(0)?;
    assert_eq!(LogitsProcessor::new(3, None, None).sample(&column)?, 1);
    // A batch of none.
    for dtype in [DType::F32, DType::F64] {
        let none = Tensor::zeros((0, 5), dtype, device)?;
        let mut processor = LogitsProcessor::new(3, Some(0.5), None);
        assert!(processor.sample_batch(&none)?.is_empty());
    }
    Ok(())
}

/// The closure over probabilities: what it sees, that its edits count, when it isn't called.
pub fn sample_f(device: &Device) -> Result<()> {
    let row = logits(Law::Normal, 2000, &mut rng(17));
    let tensor = Tensor::new(row.as_slice(), device)?;
    let temperature = 0.7;
    let seen = |sampling: Sampling| -> Result<Option<Vec<f32>>> {
        let mut seen = None;
        LogitsProcessor::from_sampling(1, sampling)
            .sample_f(&tensor, |probs| seen = Some(probs.to_vec()))?;
        Ok(seen)
    };
    let probs = seen(Sampling::TopP {
        p: 0.5,
        temperature,
    })?
    .expect("called");
    let want = candle_nn::ops::softmax_last_dim(&(&tensor / temperature)?)?.to_vec1::<f32>()?;
    for (got, want) in probs.iter().zip(want) {
        assert!((got - want).abs() <= 2e-6 * want, "{got} and {want}");
    }
    assert!(seen(Sampling::ArgMax)?.is_none());
    assert!(seen(Sampling::GumbelSoftmax { temperature })?.is_none());

    for sampling in [
        Sampling::All { temperature },
        Sampling::TopP {
            p: 0.5,
            temperature,
        },
        Sampling::TopK { k: 20, temperature },
        Sampling::TopKThenTopP {
            k: 50,
            p: 0.02,
            temperature,
        },
    ] {
        let new = || LogitsProcessor::from_sampling(4, sampling.clone());
        let (mut plain, mut closure, mut candle) =
            (new(), new(), Candle::from_sampling(4, sampling.clone()));
        let mut differ = 0;
        for _ in 0..100 {
            let token = plain.sample(&tensor)?;
            assert_eq!(closure.sample_f(&tensor, |_| {})?, token, "{sampling:?}");
            let theirs = candle.sample(&tensor)?;
            differ += (theirs != token) as usize;
        }
        if !matches!(
            sampling,
            Sampling::TopK { .. } | Sampling::TopKThenTopP { .. }
        ) {
            assert!(
                differ <= 1,
                "{sampling:?}: {differ} of 100 differ from Candle's"
            );
        }
        // Only the tokens that the closure leaves.
        let mut closure = new();
        for _ in 0..50 {
            let token = closure.sample_f(&tensor, |probs| {
                probs
                    .iter_mut()
                    .enumerate()
                    .for_each(|(i, p)| *p *= (i % 3 == 0) as u8 as f32)
            })?;
            assert_eq!(token % 3, 0, "{sampling:?}");
        }
    }
    Ok(())
}

/// The same bits as Candle's penalty.
pub fn repeat_penalty(device: &Device) -> Result<()> {
    use candle_transformers::utils::apply_repeat_penalty as candle;
    let mut rng = rng(6);
    for vocab in [1, 100, 50000] {
        let mut row = logits(Law::Normal, vocab, &mut rng);
        row[vocab / 2] = 0.0;
        row[vocab / 3] = -INF;
        let base = Tensor::new(row.as_slice(), device)?;
        let context: Vec<u32> = (0..300)
            .map(|_| rng.random_range(0..vocab as u32 + 5))
            .collect();
        for dtype in [DType::F32, DType::BF16, DType::F64] {
            let logits = base.to_dtype(dtype)?;
            for (penalty, context) in [(1.1, &context[..]), (0.5, &context[..3]), (1.3, &[])] {
                let got = candle_topk::apply_repeat_penalty(&logits, penalty, context)?;
                let want = candle(&logits, penalty, context)?;
                assert_eq!((got.dtype(), got.dims()), (DType::F32, want.dims()));
                let bits = |t: &Tensor| -> Result<Vec<u32>> {
                    Ok(t.to_vec1::<f32>()?.into_iter().map(f32::to_bits).collect())
                };
                assert_eq!(bits(&got)?, bits(&want)?, "V {vocab}, {dtype:?}, {penalty}");
            }
            // The logits themselves stay.
            assert_eq!(
                logits.to_dtype(DType::F32)?.to_vec1::<f32>()?,
                base.to_dtype(dtype)?
                    .to_dtype(DType::F32)?
                    .to_vec1::<f32>()?
            );
        }
        let view =
            Tensor::new([row.clone(), row.clone()].concat(), device)?.narrow(0, vocab, vocab)?;
        let got = candle_topk::apply_repeat_penalty(&view, 1.2, &context)?.to_vec1::<f32>()?;
        assert_eq!(got, candle(&view, 1.2, &context)?.to_vec1::<f32>()?);
    }
    let none = Tensor::zeros(0, DType::BF16, device)?;
    let got = candle_topk::apply_repeat_penalty(&none, 1.2, &[0, 1])?;
    assert_eq!((got.dtype(), got.dims()), (DType::F32, &[0][..]));
    let batch = Tensor::zeros((2, 3), DType::F32, device)?;
    let message = candle_topk::apply_repeat_penalty(&batch, 1.1, &[])
        .expect_err("refused")
        .to_string();
    assert!(
        message.contains("[2, 3]") && message.contains("[V]"),
        "{message}"
    );
    Ok(())
}
