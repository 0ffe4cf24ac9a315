//! The cases that every backend passes, as functions of the device.

use super::*;
use candle_core::{DType, Device, Result, Tensor};
use candle_topk::sampling::{
    candidates, candidates_rows, mask, mask_rows, pack_rows, sample, sample_batch, sample_rows,
    Candidates, Draw, Mask, MaskRows, Sample, SampleRows, Truncation,
};

const INF: f32 = f32::INFINITY;

/// Rows of one width with their parameters, run as one batch.
pub struct Batch {
    pub rows: Vec<Vec<f32>>,
    pub params: Vec<Params>,
}

impl Batch {
    fn logits<T: Float>(&self, device: &Device) -> Result<Tensor> {
        let vocab = self.rows[0].len();
        let flat: Vec<T> = self.rows.iter().flatten().map(|&x| T::round(x)).collect();
        Tensor::from_vec(flat, (self.rows.len(), vocab), device)
    }

    fn packed(&self, device: &Device) -> Result<Tensor> {
        let rows: Vec<Truncation> = self.params.iter().map(Params::truncation).collect();
        Truncation::rows(&rows, device)
    }
}

/// The ids that a masked row keeps; asserts that survivors keep their bits and the rest is -inf.
fn survivors<T: Float>(row: &[T], masked: &[T], what: &str) -> Vec<u32> {
    let mut kept = vec![];
    for (i, (x, y)) in row.iter().zip(masked).enumerate() {
        let (x, y) = (x.wide(), y.wide());
        if y == -INF {
            continue;
        }
        assert_eq!(x.to_bits(), y.to_bits(), "{what}: id {i} changed");
        kept.push(i as u32);
    }
    kept
}

/// Masks the batch, checks each row against the oracle and the candidates against the mask. On a GPU:
/// all of it against the CPU, bit by bit, in both forms of the kernels.
pub fn check_batch<T: Float>(batch: &Batch, mass: Mass, device: &Device, what: &str) -> Result<()> {
    #[cfg(feature = "cuda")]
    if device.is_cuda() {
        use candle_topk::cuda::{with_form, Form};
        let logits = batch.logits::<T>(&Device::Cpu)?;
        let want = Results::<T>::of(&logits, batch, mass)?;
        let logits = logits.to_device(device)?;
        for form in Form::ALL {
            let got = with_form(form, || Results::<T>::of(&logits, batch, mass))?;
            got.check(&want, &format!("{what}, {:?}, {form:?}", T::DTYPE));
        }
        return Ok(());
    }
    let logits = batch.logits::<T>(device)?;
    let packed = batch.packed(device)?;
    let (_, vocab) = logits.dims2()?;
    let masked = mask_rows(&logits, &packed, mass)?;
    assert_eq!(masked.dtype(), logits.dtype());
    let source = logits.to_vec2::<T>()?;
    let masked = masked.to_vec2::<T>()?;
    let capacity = vocab.min(300);
    let set = candidates_rows(&logits, &packed, mass, capacity)?;
    let ids = set.ids.to_vec2::<u32>()?;
    let log_probs = set.log_probs.to_vec2::<f32>()?;
    let counts = set.counts.to_vec1::<u32>()?;
    let mut oracle: Option<(&Vec<f32>, Oracle)> = None;
    let wide: Vec<Vec<f32>> = source
        .iter()
        .map(|row| row.iter().map(|x| x.wide()).collect())
        .collect();
    for (b, params) in batch.params.iter().enumerate() {
        let what = format!("{what}, row {b}, V {vocab}, {:?}", T::DTYPE);
        let params = Params { mass, ..*params };
        // Consecutive rows are often the same: sorted once.
        let same = |a: &[f32], b: &[f32]| {
            a.iter()
                .map(|x| x.to_bits())
                .eq(b.iter().map(|x| x.to_bits()))
        };
        if !oracle
            .as_ref()
            .is_some_and(|(seen, _)| same(seen, &wide[b]))
        {
            oracle = Some((&wide[b], Oracle::new(&wide[b])));
        }
        let oracle = &oracle.as_ref().unwrap().1;
        let kept = survivors(&source[b], &masked[b], &what);
        oracle.check(&params, &kept, &what);

        assert_eq!(counts[b] as usize, kept.len(), "{what}: count");
        let listed = kept.len().min(capacity);
        assert_eq!(ids[b][..listed], kept[..listed], "{what}: candidates");
        assert!(
            ids[b][listed..].iter().all(|&id| id == u32::MAX),
            "{what}: padding"
        );
        assert!(
            log_probs[b][listed..].iter().all(|&l| l == -INF),
            "{what}: padding"
        );
        check_log_probs(oracle, &params, &kept, &log_probs[b][..listed], &what);
    }
    Ok(())
}

/// What the ops make of a batch, row behind row.
#[cfg(feature = "cuda")]
struct Results<T> {
    vocab: usize,
    masked: Vec<T>,
    ids: Vec<u32>,
    log_probs: Vec<f32>,
    counts: Vec<u32>,
}

#[cfg(feature = "cuda")]
impl<T: Float> Results<T> {
    fn of(logits: &Tensor, batch: &Batch, mass: Mass) -> Result<Self> {
        let packed = batch.packed(logits.device())?;
        let vocab = logits.dim(1)?;
        let set = candidates_rows(logits, &packed, mass, vocab.min(300))?;
        Ok(Self {
            vocab,
            masked: mask_rows(logits, &packed, mass)?.flatten_all()?.to_vec1()?,
            ids: set.ids.flatten_all()?.to_vec1()?,
            log_probs: set.log_probs.flatten_all()?.to_vec1()?,
            counts: set.counts.to_vec1()?,
        })
    }

    fn check(&self, want: &Self, what: &str) {
        let v = self.vocab;
        let bits = |x: &T| x.wide().to_bits();
        let differs = |(got, want): (&T, &T)| bits(got) != bits(want);
        let at = self.masked.iter().zip(&want.masked).position(differs);
        if let Some(at) = at {
            panic!(
                "{what}, V {v}, row {}: logit {} of the mask",
                at / v,
                at % v
            );
        }
        assert_eq!(self.counts, want.counts, "{what}, V {v}: counts");
        let at = self.ids.iter().zip(&want.ids).position(|(g, w)| g != w);
        assert_eq!(at, None, "{what}, V {v}: ids");
        // The logarithm is the platform's.
        let far = |(g, w): (&f32, &f32)| g != w && (g - w).abs() > 1e-6 * (1.0 + w.abs());
        let at = self.log_probs.iter().zip(&want.log_probs).position(far);
        assert_eq!(at, None, "{what}, V {v}: log-probabilities");
    }
}

fn check_log_probs(oracle: &Oracle, params: &Params, kept: &[u32], got: &[f32], what: &str) {
    let temperature = if params.temperature == 0.0 {
        1.0
    } else {
        params.temperature
    };
    let weights = oracle.weights(temperature);
    let total: f64 = weights[..kept.len()].iter().sum();
    // The listed ids are the lowest of the set.
    let Some(&greatest) = kept[..got.len()].last() else {
        return;
    };
    let mut by_id = vec![f64::NAN; greatest as usize + 1];
    for (&id, &weight) in oracle.order[..kept.len()].iter().zip(weights.iter()) {
        if id <= greatest {
            by_id[id as usize] = weight;
        }
    }
    for (&id, &got) in kept.iter().zip(got) {
        let want = (by_id[id as usize] / total).ln();
        // Weights that f64 rounds to 0 have only their sign and size to compare.
        let close = if want.is_finite() {
            (got as f64 - want).abs() <= 1e-6 * (1.0 + want.abs())
        } else {
            got < -700.0
        };
        assert!(
            close,
            "{what}: log-probability of {id} is {got}, {want} expected"
        );
    }
}

/// Every pair of a k and a p, and the other parameters alone and together.
pub fn grid(vocab: usize) -> Vec<Params> {
    let mut params = vec![];
    for k in [1, 2, 50, vocab - 1, vocab, vocab + 1, 0] {
        for p in [1e-9, 0.1, 0.9, 0.999999, 1.0] {
            params.push(Params {
                k,
                p,
                ..Params::NONE
            });
        }
    }
    for min_p in [1e-30, 1e-9, 0.05, 0.5, 1.0] {
        params.push(Params {
            min_p,
            ..Params::NONE
        });
        params.push(Params {
            min_p,
            k: 50,
            p: 0.9,
            ..Params::NONE
        });
        params.push(Params {
            min_p,
            p: 0.9,
            temperature: 0.7,
            ..Params::NONE
        });
    }
    // So low that 1 / T overflows: only subnormal differences count.
    params.push(Params {
        temperature: 1e-42,
        p: 0.9,
        ..Params::NONE
    });
    for temperature in [0.0, 1e-30, 0.7, 1e30, 1e38, INF] {
        params.push(Params {
            temperature,
            ..Params::NONE
        });
        params.push(Params {
            temperature,
            p: 0.9,
            ..Params::NONE
        });
        params.push(Params {
            temperature,
            k: 50,
            p: 0.5,
            min_p: 0.01,
            ..Params::NONE
        });
    }
    params
}

/// One law at one width: all the grid as one batch, for both readings of p. How many rows that was.
pub fn check_grid<T: Float>(law: Law, vocab: usize, device: &Device) -> Result<usize> {
    let mut rng = rng(vocab as u64 * 31 + law as u64);
    let row = logits(law, vocab, &mut rng);
    let params = grid(vocab);
    let batch = Batch {
        rows: vec![row; params.len()],
        params,
    };
    for mass in [Mass::Renormalized, Mass::Joint] {
        check_batch::<T>(&batch, mass, device, &format!("{law:?}"))?;
    }
    Ok(2 * batch.rows.len())
}

/// Widths around every boundary of a vector, a tile, a chunk, the sample and the on-chip buffer.
pub const EDGES: [usize; 27] = [
    3, 4, 5, 7, 8, 9, 255, 256, 257, 1023, 1024, 1025, 2047, 2049, 4095, 4097, 8191, 8192, 8193,
    8199, 16383, 16385, 32767, 32769, 65535, 65536, 65537,
];

/// Vocabularies of models, and the least ones.
pub const WIDTHS: [usize; 9] = [1, 2, 111, 1000, 32000, 49152, 128256, 151936, 262144];

/// Rows of which nothing should go wrong, and of which something did elsewhere.
pub fn special_rows(vocab: usize) -> Vec<(&'static str, Vec<f32>)> {
    let mut rng = rng(vocab as u64);
    let n = vocab;
    let mut rows: Vec<(&'static str, Vec<f32>)> = vec![];
    let base: Vec<f32> = (0..n).map(|_| normal(&mut rng)).collect();
    let with = |at: usize, x: f32| {
        let mut row = base.clone();
        row[at.min(n - 1)] = x;
        row
    };
    let scaled = |s: f32| base.iter().map(|x| x * s).collect::<Vec<_>>();
    rows.push(("all equal", vec![1.25; n]));
    rows.push((
        "all zero, of both signs",
        (0..n)
            .map(|i| if i % 2 == 0 { 0.0 } else { -0.0 })
            .collect(),
    ));
    rows.push(("all equal but one", {
        let mut row = vec![1.25; n];
        row[n / 2] = 1.5;
        row
    }));
    rows.push(("all equal but a lower one", {
        let mut row = vec![1.25; n];
        row[n / 2] = 1.0;
        row
    }));
    rows.push(("near equal", base.iter().map(|x| 1.0 + x * 1e-6).collect()));
    rows.push(("scaled by 1e-8", scaled(1e-8)));
    rows.push(("scaled by 1e-30", scaled(1e-30)));
    rows.push((
        "subnormals",
        (0..n)
            .map(|_| f32::from_bits(rng.random_range(0..1000)))
            .collect(),
    ));
    rows.push(("one 1e9", with(13, 1e9)));
    rows.push(("one 1e9 further on", with(20000, 1e9)));
    rows.push(("one 1e9 / 0.6", with(n - 1, 1e9 / 0.6)));
    rows.push(("one 1e30", with(7, 1e30)));
    rows.push(("one -1e30", with(5, -1e30)));
    rows.push((
        "f32 extremes",
        (0..n)
            .map(|i| if i % 3 == 0 { f32::MAX } else { f32::MIN })
            .collect(),
    ));
    rows.push(("fill of -f32::MAX in front", {
        let mut row = base.clone();
        row.iter_mut().take(100).for_each(|x| *x = f32::MIN);
        row
    }));
    rows.push(("fill of -f32::MAX but for five", {
        let mut row = vec![f32::MIN; n];
        for i in 0..5.min(n) {
            row[i * n / 5] = i as f32;
        }
        row
    }));
    for (name, per_mille) in [
        ("-inf on 50 %", 500),
        ("-inf on 90 %", 900),
        ("-inf on 99.9 %", 999),
    ] {
        let masked = base.iter().map(|&x| {
            if rng.random_range(0..1000) < per_mille {
                -INF
            } else {
                x
            }
        });
        rows.push((name, masked.collect()));
    }
    rows.push(("fewer numbers than k", {
        let mut row = vec![-INF; n];
        for i in 0..30.min(n) {
            row[(i * 977) % n] = base[i % n];
        }
        row
    }));
    rows.push(("all -inf", vec![-INF; n]));
    rows.push(("all NaN", vec![f32::NAN; n]));
    rows.push((
        "NaN and -inf",
        (0..n)
            .map(|i| if i % 2 == 0 { f32::NAN } else { -INF })
            .collect(),
    ));
    rows.push(("one NaN", with(n / 3, f32::NAN)));
    rows.push(("one -NaN", with(n / 3, -f32::NAN)));
    rows.push((
        "NaN on half",
        base.iter()
            .enumerate()
            .map(|(i, &x)| if i % 2 == 0 { f32::NAN } else { x })
            .collect(),
    ));
    rows.push(("one +inf", with(n / 2, INF)));
    rows.push(("three +inf", {
        let mut row = base.clone();
        [0, n / 2, n - 1].iter().for_each(|&i| row[i] = INF);
        row
    }));
    rows.push(("all +inf", vec![INF; n]));
    rows.push(("ascending", (0..n).map(|i| i as f32 * 1e-3).collect()));
    rows.push(("descending", (0..n).map(|i| -(i as f32) * 1e-3).collect()));
    rows.push((
        "one token holds 45 %",
        with(n / 2, (0.45f32 / 0.55 * n as f32 * 1.6487).ln()),
    ));
    rows.push(("a thousand ties across the nucleus", {
        let mut row = vec![-10.0; n];
        row.iter_mut().take(1000).for_each(|x| *x = 3.0);
        row
    }));
    rows.push(("4096 ties, 37 apart", {
        let mut row = base.clone();
        for i in 0..4096.min(n) {
            row[(i * 37) % n] = 4.5;
        }
        row
    }));
    rows.push(("a hundred ties and one of 1e-38 of their weight", {
        let mut row = vec![-1000.0; n];
        let ties = 100.min(n);
        (0..ties).for_each(|i| row[i * n / ties] = 0.0);
        row[n - 1] = -87.2;
        row
    }));
    rows.push(("64 equal ones share all the mass", {
        let mut row = base.clone();
        (0..64.min(n)).for_each(|i| row[i * n / 64.min(n)] = 90.0);
        row
    }));
    rows.push(("one and a tail of a millionth", {
        let mut row = vec![(1e-6f32 / n as f32).ln(); n];
        row[n / 2] = 0.0;
        row
    }));
    rows
}

pub fn check_special<T: Float>(vocab: usize, device: &Device) -> Result<()> {
    for row in 0..special_rows(vocab).len() {
        check_special_row::<T>(vocab, row, device)?;
    }
    Ok(())
}

/// One of the special rows, with all parameters and for both readings of p. How many rows that was.
pub fn check_special_row<T: Float>(vocab: usize, row: usize, device: &Device) -> Result<usize> {
    // The widest rows share the parameters among them, to end in time.
    let stride = if vocab > 100_000 { 4 } else { 1 };
    let params: Vec<Params> = grid(vocab)
        .into_iter()
        .skip(row % stride)
        .step_by(stride)
        .collect();
    let (name, row) = special_rows(vocab).swap_remove(row);
    let batch = Batch {
        rows: vec![row; params.len()],
        params,
    };
    for mass in [Mass::Renormalized, Mass::Joint] {
        check_batch::<T>(&batch, mass, device, name)?;
    }
    Ok(2 * batch.rows.len())
}

/// Batches of mixed rows with mixed parameters: each row gets what it gets alone.
pub fn mixed_batches(device: &Device) -> Result<()> {
    for (size, vocab) in [(1, 1000), (3, 32000), (64, 9001), (257, 8200)] {
        let mut rng = rng(size as u64);
        let choices = grid(vocab);
        let mut batch = Batch {
            rows: vec![],
            params: vec![],
        };
        let mut special = special_rows(vocab).into_iter().map(|(_, row)| row).cycle();
        for b in 0..size {
            batch.rows.push(match b % 3 {
                0 => special.next().unwrap(),
                _ => logits(LAWS[b % LAWS.len()], vocab, &mut rng),
            });
            batch
                .params
                .push(choices[rng.random_range(0..choices.len())]);
        }
        check_batch::<f32>(&batch, Mass::Renormalized, device, "mixed")?;
        check_batch::<bf16>(&batch, Mass::Joint, device, "mixed")?;
        // Alone, with scalars instead of packed rows.
        let all = batch.logits::<f32>(device)?;
        let together = mask_rows(&all, &batch.packed(device)?, Mass::Renormalized)?;
        for b in (0..size).step_by(7) {
            let alone = mask(&all.get(b)?, batch.params[b].truncation())?;
            let bits = |t: Tensor| -> Result<Vec<u32>> {
                Ok(t.to_vec1::<f32>()?.into_iter().map(f32::to_bits).collect())
            };
            assert_eq!(
                bits(alone)?,
                bits(together.get(b)?)?,
                "row {b} of {size} alone"
            );
        }
    }
    Ok(())
}

/// Views: a wider pitch, an offset, a single row, rows repeated by a stride of 0, in place.
pub fn views(device: &Device) -> Result<()> {
    for (vocab, pad) in [(1000, 8), (1000, 1), (9001, 3), (32000, 7)] {
        let mut rng = rng(vocab as u64);
        let rows = 5;
        let wide: Vec<f32> = (0..rows * (vocab + pad))
            .map(|_| normal(&mut rng) * 3.0)
            .collect();
        let all = Tensor::from_vec(wide, (rows, vocab + pad), device)?;
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let all = all.to_dtype(dtype)?;
            for offset in 0..=pad.min(5) {
                let view = all.narrow(1, offset, vocab)?;
                let dense = view.contiguous()?;
                let truncation = Truncation::new().with_top_k(77).with_top_p(0.8);
                let exact = |t: &Tensor| t.to_dtype(DType::F32)?.to_vec2::<f32>();
                let want = exact(&mask(&dense, truncation)?)?;
                assert_eq!(
                    exact(&mask(&view, truncation)?)?,
                    want,
                    "{dtype:?} at {offset}"
                );
                let ids = |t: &Tensor| -> Result<_> {
                    candidates(t, truncation, 80)?.ids.to_vec2::<u32>()
                };
                assert_eq!(ids(&view)?, ids(&dense)?);
                let draws = Tensor::arange(0u32, rows as u32, device)?.affine(9e8, 1.0)?;
                let tokens = |t: &Tensor| -> Result<_> {
                    sample_batch(t, truncation, &draws)?.to_vec1::<u32>()
                };
                assert_eq!(tokens(&view)?, tokens(&dense)?);

                let copy = all.copy()?;
                let inside = copy.narrow(1, offset, vocab)?;
                inside.inplace_op1(&Mask::new(truncation)?)?;
                assert_eq!(exact(&inside)?, want, "{dtype:?} at {offset} in place");
                // Nothing outside the view is touched.
                let outside = |t: &Tensor| -> Result<Vec<Vec<f32>>> {
                    let left = t.narrow(1, 0, offset)?;
                    let right = t.narrow(1, offset + vocab, pad - offset)?;
                    exact(&Tensor::cat(&[left, right], 1)?)
                };
                assert_eq!(outside(&copy)?, outside(&all)?);
            }
        }
        let one = all.get(3)?.narrow(0, 1, vocab)?;
        let repeated = one.broadcast_as((4, vocab))?;
        let truncation = Truncation::new().with_top_p(0.7);
        let want = mask(&one, truncation)?.to_vec1::<f32>()?;
        for row in mask(&repeated, truncation)?.to_vec2::<f32>()? {
            assert_eq!(row, want);
        }
    }
    Ok(())
}

/// Each op through `apply_op*` and in place, scalar and per row.
pub fn through_candle_traits(device: &Device) -> Result<()> {
    let mut rng = rng(3);
    let vocab = 500;
    let flat: Vec<f32> = (0..3 * vocab).map(|_| normal(&mut rng) * 2.0).collect();
    let logits = Tensor::from_vec(flat, (3, vocab), device)?;
    let truncation = Truncation::new()
        .with_top_k(40)
        .with_top_p(0.6)
        .with_temperature(0.8);
    let rows = Truncation::rows(&[truncation; 3], device)?;
    let want = mask(&logits, truncation)?.to_vec2::<f32>()?;
    let op = Mask::new(truncation)?;
    assert_eq!(logits.apply_op1(op)?.to_vec2::<f32>()?, want);
    assert_eq!(logits.apply_op1_no_bwd(&op)?.to_vec2::<f32>()?, want);
    let op = MaskRows::new(Mass::Renormalized);
    assert_eq!(logits.apply_op2(&rows, op)?.to_vec2::<f32>()?, want);
    assert_eq!(logits.apply_op2_no_bwd(&rows, &op)?.to_vec2::<f32>()?, want);
    let place = logits.copy()?;
    place.inplace_op1(&Mask::new(truncation)?)?;
    assert_eq!(place.to_vec2::<f32>()?, want);
    let place = logits.copy()?;
    place.inplace_op2(&rows, &op)?;
    assert_eq!(place.to_vec2::<f32>()?, want);

    let seeds = Tensor::new(&[[11i64, 0], [12, 5], [13, 9]], device)?;
    let tokens = sample_batch(&logits, truncation, &seeds)?.to_vec1::<u32>()?;
    let op = SampleRows::new(truncation)?;
    assert_eq!(logits.apply_op2(&seeds, op)?.to_vec1::<u32>()?, tokens);
    assert_eq!(
        logits.apply_op3(&seeds, &rows, op)?.to_vec1::<u32>()?,
        tokens
    );
    assert_eq!(
        sample_rows(&logits, &seeds, &rows, Mass::Renormalized)?.to_vec1::<u32>()?,
        tokens
    );
    for (b, (seed, step)) in [(11, 0), (12, 5), (13, 9)].into_iter().enumerate() {
        let op = Sample::new(truncation, Draw::Counter { seed, step })?;
        assert_eq!(logits.get(b)?.apply_op1(op)?.to_scalar::<u32>()?, tokens[b]);
        assert_eq!(
            logits
                .narrow(0, b, 1)?
                .apply_op1_no_bwd(&op)?
                .to_vec1::<u32>()?,
            [tokens[b]]
        );
    }
    Ok(())
}

/// A capacity below the set: its lowest ids, and the true count.
pub fn candidates_beyond_capacity(device: &Device) -> Result<()> {
    for vocab in [1000, 20000] {
        let mut rng = rng(8);
        let row = logits(Law::Normal, vocab, &mut rng);
        let tensor = Tensor::from_vec(row.clone(), vocab, device)?;
        let truncation = Truncation::new().with_top_k(600);
        let mut want = Oracle::new(&row).order[..600].to_vec();
        want.sort_unstable();
        for capacity in [1, 2, 599, 600, 601, 2000] {
            let Candidates {
                ids,
                counts,
                log_probs,
            } = candidates(&tensor, truncation, capacity)?;
            assert_eq!(counts.to_scalar::<u32>()?, 600);
            let ids = ids.to_vec1::<u32>()?;
            let listed = capacity.min(600);
            assert_eq!(ids[..listed], want[..listed], "capacity {capacity}");
            assert!(ids[listed..].iter().all(|&id| id == u32::MAX));
            assert_eq!(log_probs.dims(), [capacity]);
        }
    }
    Ok(())
}

/// The fixed answers of the bug reports that touch these ops.
pub fn reported_elsewhere(device: &Device) -> Result<()> {
    let kept = |row: &[f32], truncation: Truncation| -> Result<Vec<u32>> {
        let set = candidates(&Tensor::new(row, device)?, truncation, row.len())?;
        let count = set.counts.to_scalar::<u32>()? as usize;
        Ok(set.ids.to_vec1::<u32>()?[..count].to_vec())
    };
    let new = Truncation::new;
    // Exactly k among ties, the lowest ids.
    assert_eq!(kept(&[1., 2., 2., 2., 3.], new().with_top_k(3))?, [1, 2, 4]);
    // The crossing token is kept: 0.499 < 0.5.
    let logs = |probs: &[f32]| probs.iter().map(|p| p.ln()).collect::<Vec<_>>();
    assert_eq!(
        kept(&logs(&[0.501, 0.3, 0.199]), new().with_top_p(0.5))?,
        [0]
    );
    assert_eq!(
        kept(&logs(&[0.499, 0.3, 0.201]), new().with_top_p(0.5))?,
        [0, 1]
    );
    // k = 1 with a p below the best probability is never empty.
    assert_eq!(
        kept(&logs(&[0.4, 0.3, 0.3]), new().with_top_k(1).with_top_p(0.8))?,
        [0]
    );
    assert_eq!(kept(&[1., 500.], new().with_top_p(0.9))?, [1]);
    // p = 1 keeps twenty tokens of a billionth each.
    let mut row = logs(&[1e-9; 20]);
    row.push(0.0);
    assert_eq!(kept(&row, new().with_top_p(1.0))?.len(), 21);
    // k = 0 and k > V are no limit; fewer numbers than k still get the top-p.
    assert_eq!(kept(&[1., 2., 3.], new())?, [0, 1, 2]);
    assert_eq!(kept(&[1., 2., 3.], new().with_top_k(9))?, [0, 1, 2]);
    let mut row = vec![-INF; 1000];
    (0..30).for_each(|i| row[i * 31] = 0.0);
    let set = kept(&row, new().with_top_k(50).with_top_p(0.5))?;
    assert_eq!(set, (0..15).map(|i| i * 31).collect::<Vec<_>>());
    // [.4, .3, .3, 0] with k = 2: the third and fourth are never drawn.
    let row = Tensor::new(&[0.4f32.ln(), 0.3f32.ln(), 0.3f32.ln(), -INF], device)?;
    for step in 0..1000 {
        let token = sample(&row, new().with_top_k(2), Draw::Counter { seed: 1, step })?;
        assert!(token.to_scalar::<u32>()? < 2);
    }
    // Special rows.
    assert!(kept(&[-INF, -INF], new())?.is_empty());
    assert_eq!(kept(&[f32::NAN, -INF, 1.0], new())?, [2]);
    assert_eq!(kept(&[0.0, INF, 1.0, INF], new().with_top_p(0.99))?, [1, 3]);
    assert_eq!(kept(&[0.0, INF, 1.0], new())?, [0, 1, 2]);
    let none = Tensor::new(&[-INF, f32::NAN], device)?;
    let draw = Draw::Counter { seed: 0, step: 0 };
    assert_eq!(sample(&none, new(), draw)?.to_scalar::<u32>()?, u32::MAX);
    Ok(())
}

/// Every draw lies in the kept set, and the frequencies are the softmax's over it. `draws` for
/// each of the cases.
pub fn frequencies(device: &Device, draws: usize) -> Result<()> {
    let narrow = [
        (
            Law::Peaked,
            111,
            Params {
                p: 0.9,
                ..Params::NONE
            },
        ),
        (
            Law::Normal,
            111,
            Params {
                k: 50,
                temperature: 0.7,
                ..Params::NONE
            },
        ),
        (
            Law::Ties,
            111,
            Params {
                k: 30,
                p: 0.8,
                ..Params::NONE
            },
        ),
        (
            Law::Zipf,
            1000,
            Params {
                min_p: 0.05,
                ..Params::NONE
            },
        ),
        (
            Law::Normal,
            9000,
            Params {
                p: 0.9,
                ..Params::NONE
            },
        ),
        (Law::Normal, 9000, Params::NONE),
    ];
    let wide = [
        (
            Law::Normal,
            32000,
            Params {
                k: 5000,
                p: 0.9,
                ..Params::NONE
            },
        ),
        (
            Law::Peaked,
            128256,
            Params {
                p: 0.9,
                temperature: 1.5,
                ..Params::NONE
            },
        ),
        (Law::Zipf, 128256, Params::NONE),
    ];
    // A million rows of a vocabulary take the CPU an hour.
    let wide = if device.is_cpu() { &[][..] } else { &wide };
    for &(law, vocab, params) in narrow.iter().chain(wide) {
        let mut rng = rng(vocab as u64 + 5);
        let row = logits(law, vocab, &mut rng);
        let oracle = Oracle::new(&row);
        let len = oracle.expected(&params).len;
        let weights = oracle.weights(params.temperature);
        let total: f64 = weights[..len].iter().sum();
        let mut probs = vec![0f64; vocab];
        for (&id, w) in oracle.order[..len].iter().zip(weights.iter()) {
            probs[id as usize] = w / total;
        }
        let tensor = Tensor::from_vec(row.clone(), vocab, device)?;
        let mut counts = vec![0u64; vocab];
        let batch = draws.min(65536);
        for round in 0..draws.div_ceil(batch) {
            let seeds: Vec<i64> = (0..batch)
                .flat_map(|b| [(round * batch + b) as i64 * 7919, round as i64])
                .collect();
            let seeds = Tensor::from_vec(seeds, (batch, 2), device)?;
            let repeated = tensor.broadcast_as((batch, vocab))?;
            for token in sample_batch(&repeated, params.truncation(), &seeds)?.to_vec1::<u32>()? {
                counts[token as usize] += 1;
            }
        }
        for (id, &count) in counts.iter().enumerate() {
            assert!(
                count == 0 || probs[id] > 0.0,
                "{law:?} {params:?}: id {id} is outside the set"
            );
        }
        let excess = chi_square_excess(&counts, &probs);
        println!(
            "{law:?}, V {vocab}, {params:?}: {draws} draws, chi-square {excess:.1} deviations high"
        );
        assert!(
            excess < 5.0,
            "{law:?} {params:?}: chi-square is {excess:.1} deviations high"
        );
    }
    Ok(())
}

/// Tokens do not change with neighbours, place, batch size or run; per-row parameters and seeds
/// reach their own rows; the CDF is inverted at its ends.
pub fn independence(device: &Device) -> Result<()> {
    for vocab in [700, 33000] {
        let mut rng = rng(vocab as u64);
        let rows: Vec<Vec<f32>> = (0..24)
            .map(|i| logits(LAWS[i % 4], vocab, &mut rng))
            .collect();
        let params: Vec<Params> = (0..24)
            .map(|i| match i % 4 {
                0 => Params::NONE,
                1 => Params {
                    k: 50,
                    ..Params::NONE
                },
                2 => Params {
                    p: 0.9,
                    temperature: 1.3,
                    ..Params::NONE
                },
                _ => Params {
                    k: 500,
                    p: 0.95,
                    min_p: 0.001,
                    ..Params::NONE
                },
            })
            .collect();
        let tokens = |order: &[usize]| -> Result<Vec<u32>> {
            let flat: Vec<f32> = order.iter().flat_map(|&i| rows[i].clone()).collect();
            let logits = Tensor::from_vec(flat, (order.len(), vocab), device)?;
            let truncations: Vec<_> = order.iter().map(|&i| params[i].truncation()).collect();
            let packed = Truncation::rows(&truncations, device)?;
            let seeds: Vec<i64> = order
                .iter()
                .flat_map(|&i| [1111 * i as i64 - 9, i as i64])
                .collect();
            let seeds = Tensor::from_vec(seeds, (order.len(), 2), device)?;
            sample_rows(&logits, &seeds, &packed, Mass::Renormalized)?.to_vec1::<u32>()
        };
        let all: Vec<usize> = (0..24).collect();
        let want = tokens(&all)?;
        assert_eq!(tokens(&all)?, want, "two runs");
        let turned: Vec<usize> = all.iter().rev().copied().collect();
        assert!(
            tokens(&turned)?.iter().eq(want.iter().rev()),
            "another place"
        );
        for i in all {
            assert_eq!(tokens(&[i])?, [want[i]], "row {i} alone");
            assert_eq!(
                tokens(&[5, i, i, 3])?[1..3],
                [want[i]; 2],
                "row {i} elsewhere"
            );
            let op = Draw::Counter {
                seed: 1111 * i as i64 - 9,
                step: i as i64,
            };
            let row = Tensor::new(rows[i].as_slice(), device)?;
            let scalar = sample(&row, params[i].truncation(), op)?.to_scalar::<u32>()?;
            assert_eq!(scalar, want[i], "row {i} with scalars");
            // The ends of the CDF are the ends of the set.
            let oracle = Oracle::new(&rows[i]);
            let len = oracle.expected(&params[i]).len;
            let set = &oracle.order[..len];
            let first = sample(&row, params[i].truncation(), Draw::Bits(0))?.to_scalar::<u32>()?;
            assert_eq!(first, *set.iter().min().unwrap());
            let last =
                sample(&row, params[i].truncation(), Draw::Bits(u32::MAX))?.to_scalar::<u32>()?;
            assert!(set.contains(&last));
        }
    }
    Ok(())
}

/// Parameters that lie on the device, odd values among them.
pub fn device_parameters(device: &Device) -> Result<()> {
    let mut rng = rng(4);
    let vocab = 300;
    let row = logits(Law::Normal, vocab, &mut rng);
    let best = Oracle::new(&row).order[0];
    let tensor = Tensor::from_vec(row, vocab, device)?;
    let nan = f32::NAN;
    // k, p, min-p, temperature, and the size of the set; `None` is the best token alone.
    type Case = (i64, f32, f32, f32, Option<usize>);
    let cases: [Case; 12] = [
        (0, 1.0, 0.0, 1.0, Some(300)),
        (-1, 1.0, 0.0, 1.0, Some(300)),
        (7, 1.0, 0.0, 1.0, Some(7)),
        (1 << 40, 2.0, -1.0, 1.0, Some(300)),
        (0, 0.0, 0.0, 1.0, None),
        (0, -1.0, 0.0, 1.0, None),
        (0, nan, 0.0, 1.0, None),
        (0, 1.0, 1.5, 1.0, None),
        (0, 1.0, nan, 1.0, None),
        (0, 1.0, 0.0, 0.0, None),
        (0, 1.0, 0.0, -2.0, None),
        (0, 1.0, 0.0, nan, None),
    ];
    let column = |f: fn(&Case) -> f32| Tensor::from_iter(cases.iter().map(f), device);
    let k = Tensor::from_iter(cases.iter().map(|c| c.0), device)?;
    let (p, min_p, t) = (column(|c| c.1)?, column(|c| c.2)?, column(|c| c.3)?);
    let packed = pack_rows(Some(&k), Some(&p), Some(&min_p), Some(&t))?;
    let repeated = tensor.broadcast_as((cases.len(), vocab))?;
    let set = candidates_rows(&repeated, &packed, Mass::Renormalized, 4)?;
    let (counts, ids) = (set.counts.to_vec1::<u32>()?, set.ids.to_vec2::<u32>()?);
    for (b, case) in cases.iter().enumerate() {
        match case.4 {
            Some(count) => assert_eq!(counts[b] as usize, count, "{case:?}"),
            None => assert_eq!((counts[b], ids[b][0]), (1, best), "{case:?}"),
        }
    }
    // A transposed view of packed parameters, and one row's for `[V]`.
    let columns = packed.t()?.contiguous()?.t()?;
    let again = candidates_rows(&repeated, &columns, Mass::Renormalized, 4)?;
    assert_eq!(again.counts.to_vec1::<u32>()?, counts);
    let single = candidates_rows(&tensor, &packed.get(2)?, Mass::Renormalized, 8)?;
    assert_eq!(single.counts.to_scalar::<u32>()?, 7);

    // One row of parameters and one draw for all, and draws in columns.
    let one = packed.narrow(0, 2, 1)?.broadcast_as((cases.len(), 4))?;
    let sevens = candidates_rows(&repeated, &one, Mass::Renormalized, 4)?;
    assert_eq!(sevens.counts.to_vec1::<u32>()?, [7; 12]);
    let draws = Tensor::from_iter(0..24i64, device)?.reshape((2, 12))?;
    let (columns, dense) = (draws.t()?, draws.t()?.contiguous()?);
    let one = dense.narrow(0, 3, 1)?.broadcast_as((12, 2))?;
    let tokens = |draws: &Tensor| -> Result<Vec<u32>> {
        sample_rows(&repeated, draws, &packed, Mass::Renormalized)?.to_vec1()
    };
    let want = tokens(&dense)?;
    assert_eq!(tokens(&columns)?, want);
    let alike = tokens(&one)?;
    assert_eq!((alike[3], alike[0]), (want[3], alike[1]));
    let all = Truncation::new();
    let bits = Tensor::new(&[[1u32 << 30, 0], [3 << 30, 0]], device)?;
    let pair = repeated.narrow(0, 0, 2)?;
    assert_eq!(
        sample_batch(&pair, all, &bits.narrow(1, 0, 1)?.squeeze(1)?)?.to_vec1::<u32>()?,
        sample_batch(&pair, all, &Tensor::new(&[1u32 << 30, 3 << 30], device)?)?
            .to_vec1::<u32>()?,
    );
    Ok(())
}

/// What is refused, and what the refusal says.
pub fn refusals(device: &Device) -> Result<()> {
    let message = |r: Result<Tensor>| r.expect_err("refused").to_string();
    let new = Truncation::new;
    let has = |text: String, parts: &[&str]| {
        for part in parts {
            assert!(text.contains(part), "{text:?} lacks {part:?}");
        }
    };
    let logits = Tensor::zeros((2, 3), DType::F32, device)?;
    let of_rank_3 = Tensor::zeros((1, 2, 3), DType::F32, device)?;
    has(
        message(mask(&of_rank_3, new())),
        &["mask", "[1, 2, 3]", "[V] or [B, V]"],
    );
    let integers = Tensor::zeros((2, 3), DType::U32, device)?;
    has(
        message(mask(&integers, new())),
        &["mask", "U32", "F32, F16 or BF16"],
    );
    has(
        message(mask(&logits.t()?, new())),
        &["mask", "stride", "contiguous"],
    );
    let empty = Tensor::zeros((2, 0), DType::F32, device)?;
    has(message(mask(&empty, new())), &["[2, 0]", "at least 1"]);
    has(
        message(mask(&logits, new().with_top_p(0.0))),
        &["mask", "top_p is 0"],
    );
    has(
        message(mask(&logits, new().with_temperature(-1.0))),
        &["temperature is -1"],
    );
    has(
        message(mask(&logits, new().with_min_p(1.5))),
        &["min_p is 1.5", "[0, 1]"],
    );
    let wrong = Tensor::zeros((3, 4), DType::F32, device)?;
    has(
        message(mask_rows(&logits, &wrong, Mass::Joint)),
        &["[3, 4]", "F32 [2, 4]"],
    );
    let wrong = Tensor::zeros((2, 4), DType::U32, device)?;
    has(
        message(mask_rows(&logits, &wrong, Mass::Joint)),
        &["U32", "F32 [2, 4]"],
    );
    // A k that f32 cannot hold, where it is a limit; packed, where that can't be known.
    let odd = (1 << 24) + 1;
    has(
        Truncation::rows(&[new(), new().with_top_k(odd)], device)
            .expect_err("refused")
            .to_string(),
        &["row 1", "top_k is 16777217", "2^24"],
    );
    let kept = mask(&logits, new().with_top_k(odd))?.to_vec2::<f32>()?;
    assert_eq!(kept, [[0.0; 3]; 2], "above the vocabulary it is no limit");
    let wide = Tensor::zeros((1, (1 << 24) + 8), DType::BF16, device)?;
    has(
        message(mask(&wide, new().with_top_k(odd))),
        &["mask", "top_k is 16777217", "16777224", "2^24"],
    );
    let draw = Draw::Counter { seed: 0, step: 0 };
    has(
        message(sample(&logits, new(), draw)),
        &["one draw for 2 rows", "SampleRows"],
    );
    let draws = Tensor::zeros(2, DType::I64, device)?;
    has(
        message(sample_batch(&logits, new(), &draws)),
        &["I64 [2]", "I64 [2, 2]", "U32 [2]"],
    );
    let error = candidates(&logits, new(), 0)
        .expect_err("refused")
        .to_string();
    has(error, &["candidates", "capacity is 0"]);
    for capacity in [
        usize::MAX,
        usize::MAX / 4,
        1 << 62,
        (1 << 62) + 1024,
        1 << 60,
    ] {
        let error = candidates(&logits, new(), capacity).expect_err("refused");
        has(
            error.to_string(),
            &["candidates", "capacity of", "2 rows", "at most"],
        );
    }
    let error = candidates_rows(&logits, &wrong, Mass::Joint, 3)
        .expect_err("refused")
        .to_string();
    has(error, &["candidates", "U32", "F32 [2, 4]"]);
    // In place: rows that overlap, parameters that share the logits' storage.
    let repeated = Tensor::zeros(3, DType::F32, device)?.broadcast_as((2, 3))?;
    assert!(repeated.inplace_op1(&Mask::new(new())?).is_err());
    let square = Tensor::zeros((4, 4), DType::F32, device)?;
    assert!(square.inplace_op2(&square, &MaskRows::default()).is_err());
    // No rows at all is no error.
    let none = Tensor::zeros((0, 3), DType::F32, device)?;
    assert_eq!(mask(&none, new())?.dims(), [0, 3]);
    assert_eq!(candidates(&none, new(), 2)?.ids.dims(), [0, 2]);
    let draws = Tensor::zeros(0, DType::U32, device)?;
    assert_eq!(sample_batch(&none, new(), &draws)?.dims(), [0]);
    let packed = pack_rows(Some(&draws), None, None, None)?;
    assert_eq!(packed.dims(), [0, 4]);
    assert_eq!(mask_rows(&none, &packed, Mass::Joint)?.dims(), [0, 3]);
    let set = candidates_rows(&none, &packed, Mass::Joint, 2)?;
    assert_eq!(set.log_probs.dims(), [0, 2]);
    Ok(())
}

/// The greatest logit, by the lowest id where several are equal.
pub fn greedy(device: &Device) -> Result<()> {
    for vocab in [1, 5, 1024, 50000] {
        for (name, row) in special_rows(vocab.max(1)) {
            let oracle = Oracle::new(&row);
            let want = oracle.order.first().copied().unwrap_or(u32::MAX);
            let tensor = Tensor::from_vec(row.clone(), vocab, device)?;
            let draw = Draw::Bits(0xdead_beef);
            for truncation in [
                Truncation::new().with_temperature(0.0),
                Truncation::new().with_top_k(1),
            ] {
                let token = sample(&tensor, truncation, draw)?.to_scalar::<u32>()?;
                assert_eq!(token, want, "{name}, V {vocab}");
            }
        }
    }
    Ok(())
}
