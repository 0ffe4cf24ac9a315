//! Log-probabilities of drawn tokens, and the forms that write into the caller's memory, as
//! functions of the device.

use super::cases::special_rows;
use super::*;
use candle_core::{DType, Device, Result, Tensor};
use candle_topk::sampling::{
    candidates_rows, mask, mask_into, mask_rows, mask_rows_into, sample_batch,
    sample_batch_with_log_probs, sample_rows, sample_rows_with_log_probs, CandidateBuffers, Mask,
    MaskRows, Routes, SampleBuffers,
};

const INF: f32 = f32::INFINITY;

/// Parameters that take each route of the kernels.
pub fn choices(vocab: usize) -> [Params; 8] {
    let none = Params::NONE;
    [
        none,
        Params { k: 50, ..none },
        Params { p: 0.9, ..none },
        Params {
            k: vocab / 2 + 1,
            p: 0.95,
            ..none
        },
        Params {
            k: 40,
            p: 0.5,
            temperature: 0.7,
            ..none
        },
        Params {
            min_p: 0.02,
            temperature: 1.5,
            ..none
        },
        Params {
            temperature: 0.0,
            ..none
        },
        Params {
            p: 0.3,
            min_p: 0.001,
            ..none
        },
    ]
}

fn truncations(params: &[Params]) -> Vec<Truncation> {
    params.iter().map(Params::truncation).collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

/// Both backends take the logarithm of the same mass, each with its platform's f64 `log`, before
/// they round to f32.
pub fn assert_one_ulp(got: &[f32], want: &[f32], what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        let apart = (g.to_bits() as i64 - w.to_bits() as i64).abs();
        assert!(apart <= 1, "{what}: {g} at {i}, {w} expected");
    }
}

/// The bits of `candidates` for the drawn token, close to the f64 oracle; 0 in a set of one, -inf
/// without a token.
pub fn log_probs<T: Float>(device: &Device) -> Result<()> {
    for vocab in [1, 300, 9001, 33000] {
        let mut rng = rng(vocab as u64 + 77);
        let mut rows: Vec<Vec<f32>> = LAWS
            .into_iter()
            .map(|law| logits(law, vocab, &mut rng))
            .collect();
        if vocab < 10_000 {
            rows.extend(special_rows(vocab).into_iter().map(|(_, row)| row));
        }
        let flat: Vec<T> = rows.iter().flatten().map(|&x| T::round(x)).collect();
        let batch = rows.len();
        let tensor = Tensor::from_vec(flat, (batch, vocab), device)?;
        let wide: Vec<Vec<f32>> = tensor
            .to_vec2::<T>()?
            .into_iter()
            .map(|row| row.into_iter().map(T::wide).collect())
            .collect();
        let oracles: Vec<Oracle> = wide.iter().map(|row| Oracle::new(row)).collect();
        let seeds: Vec<i64> = (0..2 * batch).map(|_| rng.random()).collect();
        let draws = Tensor::from_vec(seeds, (batch, 2), device)?;
        for (params, mass) in choices(vocab)
            .into_iter()
            .flat_map(|p| [(p, Mass::Renormalized), (p, Mass::Joint)])
        {
            let params = Params { mass, ..params };
            let what = format!("V {vocab}, {:?}, {params:?}", T::DTYPE);
            let truncation = params.truncation();
            let (tokens, log_probs) = sample_batch_with_log_probs(&tensor, truncation, &draws)?;
            assert_eq!(log_probs.dtype(), DType::F32);
            let tokens = tokens.to_vec1::<u32>()?;
            let log_probs = log_probs.to_vec1::<f32>()?;
            let plain = sample_batch(&tensor, truncation, &draws)?.to_vec1::<u32>()?;
            assert_eq!(tokens, plain, "{what}: tokens");
            // Packed, the same bits.
            let packed = Truncation::rows(&vec![truncation; batch], device)?;
            let by_row = sample_rows_with_log_probs(&tensor, &draws, &packed, mass)?;
            assert_eq!(by_row.0.to_vec1::<u32>()?, tokens, "{what}: packed");
            assert_eq!(
                bits(&by_row.1.to_vec1::<f32>()?),
                bits(&log_probs),
                "{what}: packed"
            );
            let set = candidates_rows(&tensor, &packed, mass, vocab)?;
            let (ids, listed) = (set.ids.to_vec2::<u32>()?, set.log_probs.to_vec2::<f32>()?);
            let counts = set.counts.to_vec1::<u32>()?;
            for b in 0..batch {
                let (token, got) = (tokens[b], log_probs[b]);
                if counts[b] == 0 {
                    assert_eq!((token, got), (u32::MAX, -INF), "{what}, row {b}");
                    continue;
                }
                let at = ids[b].iter().position(|&id| id == token);
                let at = at.unwrap_or_else(|| panic!("{what}, row {b}: {token} is not kept"));
                assert_eq!(
                    got.to_bits(),
                    listed[b][at].to_bits(),
                    "{what}, row {b}: {got} of {token}, {} among the candidates",
                    listed[b][at]
                );
                if counts[b] == 1 {
                    assert_eq!(got.to_bits(), 0, "{what}, row {b}: a set of one");
                    continue;
                }
                let oracle = &oracles[b];
                let weights = oracle.weights(params.temperature);
                let total: f64 = weights[..counts[b] as usize].iter().sum();
                let rank = oracle.order.iter().position(|&id| id == token).unwrap();
                let want = (weights[rank] / total).ln();
                assert!(
                    (got as f64 - want).abs() <= 1e-6 * (1.0 + want.abs()),
                    "{what}, row {b}: {got}, {want} expected"
                );
            }
            if !device.is_cpu() {
                let cpu = &Device::Cpu;
                let (on_cpu, want) = sample_batch_with_log_probs(
                    &tensor.to_device(cpu)?,
                    truncation,
                    &draws.to_device(cpu)?,
                )?;
                assert_eq!(tokens, on_cpu.to_vec1::<u32>()?, "{what}: the CPU");
                assert_one_ulp(&log_probs, &want.to_vec1::<f32>()?, &what);
            }
        }
    }
    // One row without a batch dimension, and bits drawn elsewhere.
    let one = Tensor::new(&[1f32, 3., 2., 3.], device)?;
    let truncation = Truncation::new().with_top_k(2);
    let draws = Tensor::new(3u32 << 30, device)?;
    let (token, log_prob) = sample_batch_with_log_probs(&one, truncation, &draws)?;
    assert_eq!(token.to_scalar::<u32>()?, 3);
    assert_eq!(log_prob.to_scalar::<f32>()?, 0.5f32.ln());
    Ok(())
}

/// Launch after launch: the tokens of `sample_rows` at each step, whose counter advances in place;
/// fewer rows, other parameters and new requests in between.
pub fn sample_buffers<T: Float>(device: &Device) -> Result<()> {
    for vocab in [111, 9001, 33000] {
        let mut rng = rng(vocab as u64 + 5);
        let mut params = choices(vocab);
        let batch = params.len();
        let flat: Vec<T> = (0..batch)
            .flat_map(|b| logits(LAWS[b % LAWS.len()], vocab, &mut rng))
            .map(T::round)
            .collect();
        let tensor = Tensor::from_vec(flat, (batch, vocab), device)?;
        let mut buffers = SampleBuffers::new(batch, device)?.with_routes()?;
        // Untouched: no token, and every row its own seed.
        assert_eq!(buffers.tokens()?, vec![u32::MAX; batch]);
        assert!(buffers.log_probs()?.iter().all(|&l| l == -INF));
        assert_eq!(buffers.routes()?, vec![Routes::default(); batch]);
        let mut requests: Vec<(i64, i64)> = (0..batch as i64).map(|b| (b, 0)).collect();
        let mut tokens = vec![u32::MAX; batch];
        let mut log_probs = vec![-INF; batch];
        let mut packed = vec![Params::NONE; batch];
        for round in 0..12 {
            let rows = [batch, batch - 3, 1][round % 3];
            match round {
                1 => {
                    buffers.set_params(&truncations(&params))?;
                    packed = params.to_vec();
                }
                4 => {
                    params.reverse();
                    buffers.set_params(&truncations(&params[..3]))?;
                    packed[..3].copy_from_slice(&params[..3]);
                }
                5 => {
                    let k = Params {
                        k: 7,
                        ..Params::NONE
                    };
                    buffers.set_params_row(0, k.truncation())?;
                    packed[0] = k;
                }
                7 => {
                    // The step wraps.
                    buffers.set_requests(&[(-5, i64::MAX), (i64::MIN, -1)])?;
                    requests[..2].copy_from_slice(&[(-5, i64::MAX), (i64::MIN, -1)]);
                }
                9 => {
                    buffers.set_request(batch - 1, 1 << 40, 3)?;
                    requests[batch - 1] = (1 << 40, 3);
                }
                _ => {}
            }
            let mass = [Mass::Renormalized, Mass::Joint][round / 2 % 2];
            let logits = tensor.narrow(0, 0, rows)?;
            let draws: Vec<i64> = requests[..rows]
                .iter()
                .flat_map(|&(seed, step)| [seed, step])
                .collect();
            let draws = Tensor::from_vec(draws, (rows, 2), device)?;
            let limits = Truncation::rows(&truncations(&packed[..rows]), device)?;
            let (want, want_log_probs) =
                sample_rows_with_log_probs(&logits, &draws, &limits, mass)?;
            tokens[..rows].copy_from_slice(&want.to_vec1::<u32>()?);
            log_probs[..rows].copy_from_slice(&want_log_probs.to_vec1::<f32>()?);
            assert_eq!(
                sample_rows(&logits, &draws, &limits, mass)?.to_vec1::<u32>()?,
                tokens[..rows]
            );
            if rows == 1 {
                buffers.sample_into(&logits.get(0)?, mass)?;
            } else {
                buffers.sample_into(&logits, mass)?;
            }
            for request in &mut requests[..rows] {
                request.1 = request.1.wrapping_add(1);
            }
            let what = format!("V {vocab}, round {round}");
            assert_eq!(buffers.tokens()?, tokens, "{what}");
            assert_eq!(bits(&buffers.log_probs()?), bits(&log_probs), "{what}");
            let steps: Vec<i64> = requests.iter().map(|r| r.1).collect();
            assert_eq!(buffers.steps()?, steps, "{what}");
            assert_eq!(buffers.tokens_tensor()?.to_vec1::<u32>()?, tokens);
            let tensor = buffers.log_probs_tensor()?.to_vec1::<f32>()?;
            assert_eq!(bits(&tensor), bits(&log_probs));
            if device.is_cpu() {
                assert_eq!(buffers.routes()?, vec![Routes::default(); batch]);
            }
        }
    }
    // A row without a token advances too, beside one with.
    let tensor = Tensor::new(&[[-INF, f32::NAN], [0.0, 1.0]], device)?;
    let mut buffers = SampleBuffers::new(2, device)?;
    buffers.set_requests(&[(1, 10), (2, 20)])?;
    buffers.set_params(&[Truncation::new().with_top_k(1); 2])?;
    buffers.sample_into(&tensor, Mass::Renormalized)?;
    assert_eq!(buffers.tokens()?, [u32::MAX, 1]);
    assert_eq!(buffers.log_probs()?, [-INF, 0.0]);
    assert_eq!(buffers.steps()?, [11, 21]);
    // No rows at all is no error.
    let none = Tensor::zeros((0, 3), DType::F32, device)?;
    buffers.sample_into(&none, Mass::Renormalized)?;
    assert_eq!(buffers.steps()?, [11, 21]);
    Ok(())
}

/// The kept sets of `candidates_rows`, for fewer and for all rows, over what was there before.
pub fn candidate_buffers<T: Float>(device: &Device) -> Result<()> {
    for (vocab, capacity) in [(111, 200), (9001, 64), (33000, 300)] {
        let mut rng = rng(vocab as u64 + 6);
        let params = choices(vocab);
        let batch = params.len();
        let flat: Vec<T> = (0..batch)
            .flat_map(|b| logits(LAWS[b % LAWS.len()], vocab, &mut rng))
            .map(T::round)
            .collect();
        let tensor = Tensor::from_vec(flat, (batch, vocab), device)?;
        let mut buffers = CandidateBuffers::new(batch, capacity, device)?.with_routes()?;
        assert_eq!(
            buffers.candidates()?.counts.to_vec1::<u32>()?,
            vec![0; batch]
        );
        for mass in [Mass::Renormalized, Mass::Joint] {
            buffers.set_params(&vec![Truncation::new(); batch])?;
            buffers.candidates_into(&tensor, mass)?;
            buffers.set_params(&truncations(&params))?;
            buffers.set_params_row(1, params[4].truncation())?;
            let mut params = params;
            params[1] = params[4];
            for rows in [3, batch] {
                buffers.candidates_into(&tensor.narrow(0, 0, rows)?, mass)?;
                let packed = Truncation::rows(&truncations(&params[..rows]), device)?;
                let want = candidates_rows(&tensor.narrow(0, 0, rows)?, &packed, mass, capacity)?;
                let got = buffers.candidates()?;
                assert_eq!(got.ids.dims(), [batch, capacity]);
                assert_eq!(
                    got.ids.narrow(0, 0, rows)?.to_vec2::<u32>()?,
                    want.ids.to_vec2::<u32>()?
                );
                assert_eq!(
                    got.counts.narrow(0, 0, rows)?.to_vec1::<u32>()?,
                    want.counts.to_vec1::<u32>()?
                );
                let flat = |t: Tensor| -> Result<Vec<u32>> {
                    Ok(bits(&t.flatten_all()?.to_vec1::<f32>()?))
                };
                assert_eq!(
                    flat(got.log_probs.narrow(0, 0, rows)?)?,
                    flat(want.log_probs)?
                );
                if rows < batch {
                    let untouched = got.counts.to_vec1::<u32>()?[rows];
                    let row: Vec<f32> = tensor.get(rows)?.to_dtype(DType::F32)?.to_vec1()?;
                    let numbers = row.iter().filter(|&&x| x > -INF).count();
                    assert_eq!(untouched as usize, numbers, "as the first launch left it");
                }
            }
        }
        if device.is_cpu() {
            assert_eq!(buffers.routes()?, vec![Routes::default(); batch]);
        }
    }
    Ok(())
}

/// Into a tensor: the bits of the op that makes a new one, whatever the output held, in a view too,
/// outside of which nothing is touched.
pub fn mask_into_tensors<T: Float>(device: &Device) -> Result<()> {
    for vocab in [1, 1000, 9001, 33000] {
        let mut rng = rng(vocab as u64 + 7);
        let params = choices(vocab);
        let batch = params.len();
        let flat: Vec<T> = (0..batch)
            .flat_map(|b| logits(LAWS[b % LAWS.len()], vocab, &mut rng))
            .map(T::round)
            .collect();
        let tensor = Tensor::from_vec(flat, (batch, vocab), device)?;
        let packed = Truncation::rows(&truncations(&params), device)?;
        let all = |t: &Tensor| -> Result<Vec<u32>> {
            let t = t.to_dtype(DType::F32)?.flatten_all()?;
            Ok(bits(&t.to_vec1::<f32>()?))
        };
        for mass in [Mass::Renormalized, Mass::Joint] {
            let want = all(&mask_rows(&tensor, &packed, mass)?)?;
            let out = Tensor::full(T::round(7.0), (batch, vocab), device)?.contiguous()?;
            mask_rows_into(&tensor, &out, &packed, mass)?;
            assert_eq!(all(&out)?, want, "V {vocab}");
            out.inplace_op3(&tensor, &packed, &MaskRows::new(mass))?;
            assert_eq!(all(&out)?, want, "V {vocab}, again");
            // Rows further apart than they are wide, at odd addresses.
            let (left, right) = (3, 2);
            let wide =
                Tensor::full(T::round(7.0), (batch, left + vocab + right), device)?.contiguous()?;
            let view = wide.narrow(1, left, vocab)?;
            mask_rows_into(&tensor, &view, &packed, mass)?;
            assert_eq!(all(&view)?, want, "V {vocab}, a view");
            for (start, width) in [(0, left), (left + vocab, right)] {
                let outside = all(&wide.narrow(1, start, width)?)?;
                assert!(outside.iter().all(|&b| b == 7f32.to_bits()));
            }
        }
        let truncation = params[3].truncation();
        let want = all(&mask(&tensor, truncation)?)?;
        let out = tensor.zeros_like()?;
        mask_into(&tensor, &out, truncation)?;
        assert_eq!(all(&out)?, want, "V {vocab}, scalars");
        let row = tensor.get(1)?;
        let out = row.zeros_like()?;
        out.inplace_op2(&row, &Mask::new(truncation)?)?;
        assert_eq!(all(&out)?, all(&mask(&row, truncation)?)?, "V {vocab}, [V]");
    }
    let none = Tensor::zeros((0, 3), DType::F32, device)?;
    mask_into(&none, &none.zeros_like()?, Truncation::new())
}

/// What is refused, and what the refusal says.
pub fn into_refusals(device: &Device) -> Result<()> {
    fn has<T>(result: Result<T>, parts: &[&str]) {
        let text = match result {
            Ok(_) => panic!("not refused: {parts:?}"),
            Err(error) => error.to_string(),
        };
        for part in parts {
            assert!(text.contains(part), "{text:?} lacks {part:?}");
        }
    }
    let new = Truncation::new;
    let joint = Mass::Joint;
    has(
        SampleBuffers::new(0, device),
        &["sample buffers", "batch is 0", "2^28 - 1"],
    );
    has(
        CandidateBuffers::new(1 << 28, 1, device),
        &["candidates buffers", "batch is 268435456", "2^28 - 1"],
    );
    has(
        CandidateBuffers::new(2, 0, device),
        &["candidates", "capacity is 0", "at least 1"],
    );
    has(
        CandidateBuffers::new(2, 1 << 60, device),
        &["candidates", "capacity of", "2 rows", "at most"],
    );
    let mut buffers = SampleBuffers::new(2, device)?;
    has(
        buffers.routes(),
        &["sample buffers", "routes", "with_routes()"],
    );
    has(
        buffers.set_params(&[]),
        &["sample buffers", "0 rows of parameters", "1 to 2"],
    );
    has(
        buffers.set_params(&[new(); 3]),
        &["sample buffers", "3 rows of parameters", "1 to 2"],
    );
    has(
        buffers.set_params(&[new(), new().with_top_p(0.0)]),
        &["sample", "row 1", "top_p is 0"],
    );
    has(
        buffers.set_params_row(1, new().with_top_k((1 << 24) + 1)),
        &["sample", "row 1", "top_k is 16777217", "2^24"],
    );
    has(
        buffers.set_params_row(2, new()),
        &["sample buffers", "row is 2", "0 to 1"],
    );
    has(
        buffers.set_requests(&[]),
        &["sample buffers", "0 requests", "1 to 2"],
    );
    has(
        buffers.set_requests(&[(0, 0); 3]),
        &["sample buffers", "3 requests", "1 to 2"],
    );
    has(
        buffers.set_request(7, 0, 0),
        &["sample buffers", "row is 7", "0 to 1"],
    );
    let zeros = |shape: &[usize], dtype| Tensor::zeros(shape, dtype, device);
    let three = zeros(&[3, 5], DType::F32)?;
    has(
        buffers.sample_into(&three, joint),
        &["sample", "[3, 5]", "2 rows"],
    );
    has(
        buffers.sample_into(&zeros(&[2, 5], DType::U32)?, joint),
        &["sample", "U32", "F32, F16 or BF16"],
    );
    has(
        buffers.sample_into(&zeros(&[2, 5, 1], DType::F32)?, joint),
        &["sample", "[2, 5, 1]", "[V] or [B, V]"],
    );
    has(
        buffers.sample_into(&zeros(&[5, 2], DType::F32)?.t()?, joint),
        &["sample", "stride 2", "contiguous"],
    );
    assert_eq!(buffers.steps()?, [0, 0], "nothing has been drawn");
    let mut sets = CandidateBuffers::new(2, 4, device)?;
    has(
        sets.candidates_into(&three, joint),
        &["candidates", "[3, 5]", "2 rows"],
    );
    has(
        sets.set_params_row(2, new()),
        &["candidates buffers", "row is 2", "0 to 1"],
    );
    has(sets.routes(), &["candidates buffers", "with_routes()"]);
    if !device.is_cpu() {
        let elsewhere = Tensor::zeros((2, 5), DType::F32, &Device::Cpu)?;
        has(
            buffers.sample_into(&elsewhere, joint),
            &["sample", "logits are on Cpu", "Cuda"],
        );
        let draws = Tensor::zeros(3, DType::U32, &Device::Cpu)?;
        has(
            sample_batch_with_log_probs(&three, new(), &draws),
            &["sample", "draws on Cpu", "one device"],
        );
    }
    let draws = zeros(&[3], DType::I64)?;
    has(
        sample_batch_with_log_probs(&three, new(), &draws),
        &["sample", "I64 [3]", "I64 [3, 2]", "U32 [3]"],
    );
    has(
        sample_batch_with_log_probs(&three, new().with_top_p(0.0), &draws),
        &["sample", "top_p is 0"],
    );
    has(
        sample_rows_with_log_probs(
            &three,
            &zeros(&[3], DType::U32)?,
            &zeros(&[2, 4], DType::F32)?,
            joint,
        ),
        &["sample", "F32 [2, 4]", "F32 [3, 4]"],
    );

    let out = three.zeros_like()?;
    has(
        mask_into(&three, &out, new().with_min_p(2.0)),
        &["mask", "min_p is 2"],
    );
    has(
        mask_into(&three, &zeros(&[3, 6], DType::F32)?, new()),
        &["mask", "output is F32 [3, 6]", "F32 [3, 5] is needed"],
    );
    has(
        mask_into(&three, &zeros(&[3, 5], DType::BF16)?, new()),
        &["mask", "output is BF16 [3, 5]", "F32 [3, 5] is needed"],
    );
    has(
        mask_into(&three, &zeros(&[5, 3], DType::F32)?.t()?, new()),
        &["mask", "output has stride 3", "dense"],
    );
    has(
        mask_into(&zeros(&[3, 5], DType::U32)?, &out, new()),
        &["mask", "logits are U32"],
    );
    has(
        mask_rows_into(&three, &out, &zeros(&[2, 4], DType::F32)?, joint),
        &["mask", "F32 [2, 4]", "F32 [3, 4]"],
    );
    // The logits' own storage, an output whose rows are one, parameters in the output.
    has(
        mask_into(&three, &three, new()),
        &["mask", "shares storage"],
    );
    let one = zeros(&[1, 5], DType::F32)?.broadcast_as((3, 5))?;
    has(mask_into(&three, &one, new()), &["mask"]);
    let square = zeros(&[4, 4], DType::F32)?;
    has(
        mask_rows_into(&square.copy()?, &square, &square, joint),
        &["mask", "shares storage"],
    );
    Ok(())
}
