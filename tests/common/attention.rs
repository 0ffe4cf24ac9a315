//! Cases of the attention ops, for any device, and an oracle in f64.
//!
//! What users of such kernels have reported is among them: NaN beyond a row's end or in the rest of
//! its last page, stale or negative lengths of padding rows, tables that name no page, rows of
//! exactly K keys or fewer, first tiles that are all invalid, unsorted positions, scores of one
//! chunk taken for those of a sequence, strides and offsets beyond 32 bits, more rows than a grid's
//! second dimension, head dimensions below the swizzle's width.

use super::{normal, rng};
use candle_core::{bail, DType, Device, Result, Tensor};
use candle_topk::attention::{
    index_topk, index_topk_into, indexer_scores, indexer_scores_into, Attention, IndexBuffers,
    IndexKeys, KeyValues, SparseAttention, Values, Visible, Workspace,
};
use candle_topk::selection::{Order, TopK};
use rand::{rngs::StdRng, Rng};

pub const NONE: u32 = u32::MAX;

/// Numbers that `dtype` holds, and the tensor of them.
pub fn tensor(data: &[f32], dims: &[usize], dtype: DType, device: &Device) -> Result<Tensor> {
    // Rounded on the CPU: every device sees the same numbers.
    Tensor::from_slice(data, dims, &Device::Cpu)?
        .to_dtype(dtype)?
        .to_device(device)
}

/// Every number, as f64.
pub fn numbers(tensor: &Tensor) -> Result<Vec<f64>> {
    let tensor = tensor.to_device(&Device::Cpu)?.to_dtype(DType::F32)?;
    let data = tensor.flatten_all()?.to_vec1::<f32>()?;
    Ok(data.into_iter().map(|x| x as f64).collect())
}

pub fn bits(tensor: &Tensor) -> Result<Vec<u32>> {
    let tensor = tensor.to_device(&Device::Cpu)?.to_dtype(DType::F32)?;
    let data = tensor.flatten_all()?.to_vec1::<f32>()?;
    Ok(data.into_iter().map(f32::to_bits).collect())
}

/// Integers in one of the dtypes that bounds may have.
pub fn ints(data: &[i64], which: usize, device: &Device) -> Result<Tensor> {
    match which % 3 {
        0 => Tensor::new(data, device),
        1 => {
            let data: Vec<u32> = data.iter().map(|&x| x as i32 as u32).collect();
            Tensor::new(data, device)
        }
        _ => {
            let data: Vec<i32> = data.iter().map(|&x| x as i32).collect();
            Tensor::new(data, device)
        }
    }
}

fn normals(n: usize, rng: &mut StdRng) -> Vec<f32> {
    (0..n).map(|_| normal(rng)).collect()
}

/// 1 - 2 <a, b> / (|a|^2 + |b|^2), of what is finite in both; masks of the rest must be equal.
pub fn distance(a: &[f64], b: &[f64]) -> Result<f64> {
    let (mut product, mut squares) = (0.0, 0.0);
    for (i, (&a, &b)) in a.iter().zip(b).enumerate() {
        if a.is_finite() && b.is_finite() {
            product += a * b;
            squares += a * a + b * b;
        } else if a.is_nan() != b.is_nan() || (!a.is_nan() && a != b) {
            bail!("element {i} is {a}, {b} is expected")
        }
    }
    Ok(if squares == 0.0 {
        0.0
    } else {
        1.0 - 2.0 * product / squares
    })
}

/// A bound as the ops read it.
fn clamp(bound: i64, length: usize) -> usize {
    bound.clamp(0, length as i64) as usize
}

// ---------------------------------------------------------------- indexer scores

struct ScoreCase {
    rows: usize,
    length: usize,
    heads: usize,
    dim: usize,
    dtype: DType,
    scaled: bool,
}

/// Random operands of packed keys, bounds of every kind, NaN where no row looks.
struct Scored {
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    scales: Option<Tensor>,
    starts: Vec<i64>,
    ends: Vec<i64>,
    wanted: Vec<f64>,
}

impl ScoreCase {
    fn random(&self, seed: u64, device: &Device) -> Result<Scored> {
        let Self {
            rows,
            length,
            heads,
            dim,
            ..
        } = *self;
        let rng = &mut rng(seed);
        let n = length as i64;
        let starts: Vec<i64> = (0..rows)
            .map(|_| match rng.random_range(0..4) {
                0 => -3,
                1 => rng.random_range(0..=n),
                _ => 0,
            })
            .collect();
        let ends: Vec<i64> = (0..rows)
            .map(|row| match rng.random_range(0..6) {
                0 => -1,
                1 => n + 5,
                2 => row as i64,
                _ => rng.random_range(0..=n),
            })
            .collect();
        let seen = |row: usize, t: usize| {
            (clamp(starts[row], length)..clamp(ends[row], length)).contains(&t)
        };
        let q = tensor(
            &normals(rows * heads * dim, rng),
            &[rows, heads, dim],
            self.dtype,
            device,
        )?;
        let mut k = normals(length * dim, rng);
        let mut scales: Vec<f32> = (0..length).map(|_| rng.random_range(0.01..3.0)).collect();
        for t in 0..length {
            if !(0..rows).any(|row| seen(row, t)) {
                k[t * dim..(t + 1) * dim].fill(f32::NAN);
                scales[t] = f32::NAN;
            }
        }
        let k = tensor(&k, &[length, dim], self.dtype, device)?;
        let weights = tensor(
            &normals(rows * heads, rng),
            &[rows, heads],
            DType::F32,
            device,
        )?;
        let scales = match self.scaled {
            true => Some(tensor(&scales, &[length], DType::F32, device)?),
            false => None,
        };

        let (qn, kn, wn) = (numbers(&q)?, numbers(&k)?, numbers(&weights)?);
        let sn = scales.as_ref().map(numbers).transpose()?;
        let mut wanted = vec![f64::NEG_INFINITY; rows * length];
        for row in 0..rows {
            for t in (0..length).filter(|&t| seen(row, t)) {
                let mut sum = 0.0;
                for h in 0..heads {
                    let q = &qn[(row * heads + h) * dim..][..dim];
                    let dot: f64 = q.iter().zip(&kn[t * dim..]).map(|(q, k)| q * k).sum();
                    sum += wn[row * heads + h] * dot.max(0.0);
                }
                wanted[row * length + t] = sum * sn.as_ref().map_or(1.0, |s| s[t]);
            }
        }
        Ok(Scored {
            q,
            k,
            weights,
            scales,
            starts,
            ends,
            wanted,
        })
    }
}

impl Scored {
    fn keys(&self) -> IndexKeys {
        let keys = IndexKeys::packed(&self.k);
        match &self.scales {
            Some(scales) => keys.with_scales(scales),
            None => keys,
        }
    }

    fn visible(&self, which: usize, device: &Device) -> Result<Visible> {
        let starts = ints(&self.starts, which, device)?;
        let ends = ints(&self.ends, which / 2, device)?;
        Ok(Visible::between(Some(&starts), Some(&ends)))
    }

    fn scores(&self, which: usize, device: &Device) -> Result<Tensor> {
        let visible = self.visible(which, device)?;
        indexer_scores(&self.q, &self.keys(), &self.weights, &visible)
    }
}

/// Scores against sums in f64 over the numbers as stored, for these heads and dimensions.
pub fn scores_against_double(dtype: DType, heads: &[usize], device: &Device) -> Result<()> {
    let mut seed = 100;
    for &heads in heads {
        for dim in [32, 64, 128] {
            for (rows, length) in [(1, 1), (1, 300), (7, 130), (33, 65), (0, 5), (5, 0), (3, 1)] {
                seed += 1;
                let case = ScoreCase {
                    rows,
                    length,
                    heads,
                    dim,
                    dtype,
                    scaled: dtype == DType::F8E4M3 || seed % 5 == 0,
                };
                let random = case.random(seed, device)?;
                let scores = random.scores(seed as usize, device)?;
                assert_eq!(scores.dims(), [rows, length]);
                let distance = distance(&numbers(&scores)?, &random.wanted)?;
                assert!(
                    distance < 5e-6,
                    "{dtype:?}, {heads} heads x {dim}, {rows} x {length}: distance {distance:e}"
                );
            }
        }
    }
    Ok(())
}

/// Twenty runs give the same bits, for every dimension, and so does a row alone.
pub fn scores_repeat(dtype: DType, device: &Device) -> Result<()> {
    for dim in [32, 64, 128] {
        scores_repeat_of(dim, dtype, device)?;
    }
    Ok(())
}

fn scores_repeat_of(dim: usize, dtype: DType, device: &Device) -> Result<()> {
    let case = ScoreCase {
        rows: 12,
        length: 150,
        heads: 8,
        dim,
        dtype,
        scaled: true,
    };
    let random = case.random(7, device)?;
    let first = bits(&random.scores(0, device)?)?;
    let visible = random.visible(0, device)?;
    let top = TopK::new(16)?.order(Order::ByPosition);
    let choose = || -> Result<Vec<u32>> {
        let (q, weights) = (&random.q, &random.weights);
        let chosen = index_topk(q, &random.keys(), weights, &visible, &top, 5000)?;
        chosen.positions.flatten_all()?.to_vec1::<u32>()
    };
    let chosen = choose()?;
    for _ in 0..20 {
        assert_eq!(bits(&random.scores(0, device)?)?, first);
        assert_eq!(choose()?, chosen);
    }
    // A row alone.
    let visible = visible.bounds(case.rows, device)?;
    for row in [0, 5, 11] {
        let narrow = |t: &Tensor| t.narrow(0, row, 1);
        let (starts, ends) = (
            narrow(visible.0.as_ref().unwrap())?,
            narrow(visible.1.as_ref().unwrap())?,
        );
        let alone = indexer_scores(
            &narrow(&random.q)?,
            &random.keys(),
            &narrow(&random.weights)?,
            &Visible::between(Some(&starts), Some(&ends)),
        )?;
        let n = case.length;
        assert_eq!(bits(&alone)?, first[row * n..(row + 1) * n]);
    }
    Ok(())
}

/// The pages of `data` `[B, T, ..]`, T a multiple of the page, in an order of their own among pages
/// of NaN; and their table, whose entries beyond `lengths` name nothing or another's page.
pub fn paged(
    data: &Tensor,
    page: usize,
    lengths: &[i64],
    rng: &mut StdRng,
) -> Result<(Tensor, Vec<i64>)> {
    let device = data.device().clone();
    let (sequences, length) = (data.dims()[0], data.dims()[1]);
    let blocks = length / page;
    let pages = sequences * blocks + 3;
    let mut order: Vec<usize> = (0..pages).collect();
    for i in (1..pages).rev() {
        order.swap(i, rng.random_range(0..=i));
    }
    let width: usize = data.dims()[2..].iter().product();
    let numbers = data
        .to_device(&Device::Cpu)?
        .to_dtype(DType::F32)?
        .flatten_all()?
        .to_vec1::<f32>()?;
    let mut pool = vec![f32::NAN; pages * page * width];
    let mut table = vec![0i64; sequences * blocks];
    for b in 0..sequences {
        for block in 0..blocks {
            let at = order[b * blocks + block];
            let used = (block * page) < lengths[b].max(0) as usize;
            table[b * blocks + block] = match (used, rng.random_range(0..3)) {
                (true, _) => at as i64,
                (false, 0) => -1,
                (false, 1) => pages as i64 + 7,
                (false, _) => order[pages - 1] as i64,
            };
            let from = (b * length + block * page) * width;
            pool[at * page * width..(at + 1) * page * width]
                .copy_from_slice(&numbers[from..from + page * width]);
        }
    }
    let dims: Vec<usize> = [pages, page]
        .into_iter()
        .chain(data.dims()[2..].iter().copied())
        .collect();
    Ok((tensor(&pool, &dims, data.dtype(), &device)?, table))
}

/// Decoding over packed, batched and paged keys gives the same bits; n new tokens see each other
/// causally; sequences may be empty, and lengths negative.
pub fn scores_of_caches(dtype: DType, device: &Device) -> Result<()> {
    let rng = &mut rng(11);
    let (sequences, length, heads, dim) = (5, 96, 4, 32);
    for n in [1, 2, 3] {
        let lengths = [96i64, 0, 17, -1, n.min(1)];
        let rows = sequences * n as usize;
        let q = tensor(
            &normals(rows * heads * dim, rng),
            &[sequences, n as usize, heads, dim],
            dtype,
            device,
        )?;
        let weights = tensor(
            &normals(rows * heads, rng),
            &[sequences, n as usize, heads],
            DType::F32,
            device,
        )?;
        let mut keys = normals(sequences * length * dim, rng);
        let mut scales: Vec<f32> = (0..sequences * length)
            .map(|_| rng.random_range(0.5..2.0))
            .collect();
        for (b, &used) in lengths.iter().enumerate() {
            for t in clamp(used, length)..length {
                keys[(b * length + t) * dim..][..dim].fill(f32::NAN);
                scales[b * length + t] = f32::NAN;
            }
        }
        let keys = tensor(&keys, &[sequences, length, dim], dtype, device)?;
        let scales = tensor(&scales, &[sequences, length], DType::F32, device)?;
        let visible = Visible::decode(&ints(&lengths, n as usize, device)?);
        let batched = IndexKeys::batched(&keys).with_scales(&scales);
        let scores = indexer_scores(&q, &batched, &weights, &visible)?;
        assert_eq!(scores.dims(), [rows, length]);
        let wanted = bits(&scores)?;
        for (row, scores) in numbers(&scores)?.chunks(length).enumerate() {
            let (b, j) = (row / n as usize, (row % n as usize) as i64);
            let end = clamp(lengths[b].max(0) - n + 1 + j, length);
            assert!(scores[..end].iter().all(|x| x.is_finite()), "row {row}");
            assert!(
                scores[end..].iter().all(|&x| x == f64::NEG_INFINITY),
                "row {row}"
            );
        }

        for page in [1, 3, 16, 32] {
            let (pool, table) = paged(&keys, page, &lengths, rng)?;
            let (pool_scales, same) = {
                // The same pages for the scales: by the table that the keys were given.
                let mut pool = vec![f32::NAN; pool.dims()[0] * page];
                let numbers = numbers(&scales)?;
                for (i, &at) in table.iter().enumerate() {
                    let used =
                        i % (length / page) * page < lengths[i / (length / page)].max(0) as usize;
                    if used {
                        for p in 0..page {
                            pool[at as usize * page + p] = numbers[i * page + p] as f32;
                        }
                    }
                }
                (
                    tensor(&pool, &[pool.len() / page, page], DType::F32, device)?,
                    table.clone(),
                )
            };
            let table = ints(&same, page, device)?.reshape((sequences, length / page))?;
            let keys = IndexKeys::paged(&pool, &table).with_scales(&pool_scales);
            let scores = indexer_scores(&q, &keys, &weights, &visible)?;
            assert_eq!(bits(&scores)?, wanted, "pages of {page}, n = {n}");
        }

        // One row of each sequence at a time, in an order of its own; a row of no sequence.
        let order = [3usize, 0, 4, 2, 1];
        let map: Vec<i64> = order.iter().map(|&b| b as i64).chain([-1, 99]).collect();
        let pick = |t: &Tensor| -> Result<Tensor> {
            let ids: Vec<u32> = order
                .iter()
                .chain(&[0, 0])
                .map(|&b| (b * n as usize) as u32)
                .collect();
            // On the CPU: Candle casts F8E4M3 nowhere else.
            let t = t.to_device(&Device::Cpu)?.to_dtype(DType::F32)?;
            t.flatten(0, 1)?
                .index_select(&Tensor::new(ids, &Device::Cpu)?, 0)
        };
        let ends: Vec<i64> = order
            .iter()
            .map(|&b| lengths[b].max(0) - n + 1)
            .chain([9, 9])
            .collect();
        let visible = Visible::between(None, Some(&ints(&ends, 0, device)?));
        let mapped = batched
            .clone()
            .with_row_sequences(&ints(&map, n as usize, device)?);
        let picked = pick(&q)?.to_dtype(dtype)?.to_device(device)?;
        let scores = bits(&indexer_scores(
            &picked,
            &mapped,
            &pick(&weights)?.to_device(device)?,
            &visible,
        )?)?;
        for (i, &b) in order.iter().enumerate() {
            let row = b * n as usize;
            assert_eq!(
                scores[i * length..(i + 1) * length],
                wanted[row * length..(row + 1) * length]
            );
        }
        let none = f32::NEG_INFINITY.to_bits();
        assert!(scores[5 * length..].iter().all(|&x| x == none));
    }
    Ok(())
}

/// Packed sequences of which some have earlier tokens, and padding rows; as if each were alone.
pub fn scores_of_packed_sequences(device: &Device) -> Result<()> {
    let rng = &mut rng(12);
    let (heads, dim) = (3, 32);
    let queries = [0i64, 4, 4, 9, 10];
    let lengths = [0i64, 4, 7, 30, 31];
    let (rows, keys) = (12, 31);
    let q = tensor(
        &normals(rows * heads * dim, rng),
        &[rows, heads, dim],
        DType::F32,
        device,
    )?;
    let k = tensor(&normals(keys * dim, rng), &[keys, dim], DType::F32, device)?;
    let weights = tensor(
        &normals(rows * heads, rng),
        &[rows, heads],
        DType::F32,
        device,
    )?;
    let visible = |offsets: Option<&Tensor>| -> Result<Visible> {
        Ok(Visible::packed(
            &ints(&queries, 1, device)?,
            &ints(&lengths, 2, device)?,
            offsets,
        ))
    };
    let scores = numbers(&indexer_scores(
        &q,
        &IndexKeys::packed(&k),
        &weights,
        &visible(None)?,
    )?)?;
    for b in 0..4 {
        let (first, past) = (queries[b] as usize, queries[b + 1] as usize);
        let (start, end) = (lengths[b] as usize, lengths[b + 1] as usize);
        for row in first..past {
            let last = end - (past - 1 - row);
            for (t, score) in scores[row * keys..(row + 1) * keys].iter().enumerate() {
                assert_eq!(
                    score.is_finite(),
                    (start..last).contains(&t),
                    "row {row}, key {t}"
                );
            }
        }
    }
    assert!(
        scores[10 * keys..].iter().all(|&x| x == f64::NEG_INFINITY),
        "padding rows"
    );
    // Offsets that put the queries earlier: a chunk in the middle.
    let offsets = ints(&[0, 0, 3, 0], 0, device)?;
    let ends = visible(Some(&offsets))?.bounds(rows, device)?.1.unwrap();
    let ends = ends.to_device(&Device::Cpu)?.to_vec1::<i64>()?;
    assert_eq!(ends, [1, 2, 3, 4, 11, 12, 13, 14, 15, 31, 0, 0]);
    Ok(())
}

/// Strided and offset views, and outputs of any pitch that keep what isn't visible.
pub fn scores_of_views(device: &Device) -> Result<()> {
    let rng = &mut rng(13);
    let (rows, keys, heads, dim) = (6, 40, 4, 32);
    let q = tensor(
        &normals((rows + 2) * 2 * heads * dim, rng),
        &[rows + 2, 2 * heads, dim],
        DType::BF16,
        device,
    )?;
    let q = q.narrow(0, 1, rows)?.narrow(1, 3, heads)?;
    let k = tensor(
        &normals((keys + 3) * 2 * dim, rng),
        &[keys + 3, 2 * dim],
        DType::BF16,
        device,
    )?;
    let k = k.narrow(0, 3, keys)?.narrow(1, dim, dim)?;
    let weights = tensor(
        &normals(rows * heads, rng),
        &[heads, rows],
        DType::F32,
        device,
    )?
    .t()?;
    let ends: Vec<i64> = (0..rows as i64).map(|row| 7 * row).collect();
    let ends = ints(&ends, 0, device)?;
    let visible = Visible::between(None, Some(&ends));
    let views = indexer_scores(&q, &IndexKeys::packed(&k), &weights, &visible)?;
    let dense = indexer_scores(
        &q.contiguous()?,
        &IndexKeys::packed(&k.contiguous()?),
        &weights.contiguous()?,
        &visible,
    )?;
    assert_eq!(bits(&views)?, bits(&dense)?);

    for pitch in [keys, keys + 1, keys + 24] {
        let whole = Tensor::full(123f32, (rows, pitch), device)?;
        let out = whole.narrow(1, 0, keys)?;
        indexer_scores_into(&q, &IndexKeys::packed(&k), &weights, &visible, &out)?;
        let (whole, wanted) = (numbers(&whole)?, numbers(&dense)?);
        for row in 0..rows {
            for t in 0..pitch {
                let wanted = if t < 7 * row && t < keys {
                    wanted[row * keys + t]
                } else {
                    123.0
                };
                assert_eq!(
                    whole[row * pitch + t],
                    wanted,
                    "pitch {pitch}, row {row}, key {t}"
                );
            }
        }
    }
    Ok(())
}

/// Zeros of ReLU are exact and tie; NaN of a visible key stays; what a row can't see is not read.
pub fn scores_of_special_keys(device: &Device) -> Result<()> {
    let dim = 32;
    let mut q = vec![0f32; 2 * dim];
    (q[0], q[dim + 1]) = (1.0, 1.0);
    let q = tensor(&q, &[1, 2, dim], DType::F32, device)?;
    let mut k = vec![0f32; 5 * dim];
    (k[0], k[1]) = (-4.0, -4.0);
    k[dim] = 2.0;
    k[2 * dim + 1] = 3.0;
    k[3 * dim] = f32::NAN;
    k[4 * dim] = f32::INFINITY;
    let k = tensor(&k, &[5, dim], DType::F32, device)?;
    let weights = tensor(&[1.0, -2.0], &[1, 2], DType::F32, device)?;
    let scores = indexer_scores(&q, &IndexKeys::packed(&k), &weights, &Visible::all())?;
    let scores = numbers(&scores)?;
    assert_eq!(scores[..3], [0.0, 2.0, -6.0]);
    assert!(scores[3].is_nan(), "{}", scores[3]);
    // Infinity meets zeros of the other head: inf x 0.
    assert!(
        scores[4].is_nan() || scores[4] == f64::INFINITY,
        "{}",
        scores[4]
    );
    Ok(())
}

/// More rows than a grid's second dimension takes.
pub fn scores_of_many_rows(device: &Device) -> Result<()> {
    let rng = &mut rng(14);
    let (rows, keys, dim) = (70_000, 3, 32);
    let q = tensor(
        &normals(rows * dim, rng),
        &[rows, 1, dim],
        DType::BF16,
        device,
    )?;
    let k = tensor(&normals(keys * dim, rng), &[keys, dim], DType::BF16, device)?;
    let weights = Tensor::ones((rows, 1), DType::F32, device)?;
    let scores = indexer_scores(&q, &IndexKeys::packed(&k), &weights, &Visible::all())?;
    let (q, k) = (q.to_dtype(DType::F32)?.squeeze(1)?, k.to_dtype(DType::F32)?);
    let wanted = q.matmul(&k.t()?)?.relu()?;
    let distance = distance(&numbers(&scores)?, &numbers(&wanted)?)?;
    assert!(distance < 5e-6, "{distance:e}");
    Ok(())
}

/// Asserts that a refusal says all of `parts`.
pub fn refused<T>(result: Result<T>, parts: &[&str]) {
    let Err(error) = result else {
        panic!("accepted, where an error that says {parts:?} is expected")
    };
    let message = error.to_string();
    for part in parts {
        assert!(message.contains(part), "{message:?} says {part:?}");
    }
}

pub fn score_refusals(device: &Device) -> Result<()> {
    let zeros = |dims: &[usize], dtype| Tensor::zeros(dims, dtype, device);
    let (q, k, w) = (
        zeros(&[4, 2, 32], DType::F32)?,
        zeros(&[9, 32], DType::F32)?,
        zeros(&[4, 2], DType::F32)?,
    );
    let all = Visible::all();
    let run = |q: &Tensor, k: &IndexKeys, w: &Tensor, v: &Visible| indexer_scores(q, k, w, v);
    let packed = IndexKeys::packed(&k);
    refused(
        run(&k, &packed, &w, &all),
        &["indexer_scores", "q is F32 [9, 32]", "[S, H, D]"],
    );
    refused(
        run(&zeros(&[4, 2, 32], DType::U32)?, &packed, &w, &all),
        &["q is U32", "BF16"],
    );
    refused(
        run(
            &zeros(&[4, 0, 32], DType::F32)?,
            &packed,
            &zeros(&[4, 0], DType::F32)?,
            &all,
        ),
        &["at least 1 head"],
    );
    refused(
        run(
            &q,
            &IndexKeys::packed(&zeros(&[9, 64], DType::F32)?),
            &w,
            &all,
        ),
        &["keys are F32 [9, 64]", "D = 32"],
    );
    refused(
        run(
            &q,
            &IndexKeys::packed(&zeros(&[9, 32], DType::BF16)?),
            &w,
            &all,
        ),
        &["keys are BF16", "F32 [T, D]"],
    );
    refused(
        run(&q, &packed, &zeros(&[4, 3], DType::F32)?, &all),
        &["weights is F32 [4, 3]", "F32 [4, 2]"],
    );
    refused(
        run(&q, &packed, &zeros(&[4, 2], DType::BF16)?, &all),
        &["weights is BF16"],
    );
    refused(
        run(
            &q,
            &IndexKeys::batched(&zeros(&[3, 9, 32], DType::F32)?),
            &w,
            &all,
        ),
        &["4 rows for 3 sequences"],
    );
    refused(
        run(&q, &packed.clone().with_scales(&w), &w, &all),
        &["scales", "[9]"],
    );
    refused(
        run(&q, &packed.clone().with_row_sequences(&w), &w, &all),
        &["sequences of the rows is F32"],
    );
    let table = Tensor::zeros((2, 3), DType::F32, device)?;
    let pages = zeros(&[5, 4, 32], DType::F32)?;
    refused(
        run(&q, &IndexKeys::paged(&pages, &table), &w, &all),
        &["block table is F32 [2, 3]"],
    );
    let table = Tensor::zeros((2, 3), DType::U32, device)?;
    refused(
        run(
            &q,
            &IndexKeys::paged(&zeros(&[5, 0, 32], DType::F32)?, &table),
            &w,
            &all,
        ),
        &["pages hold 0"],
    );
    let bad = Tensor::zeros(5, DType::I64, device)?;
    refused(
        run(&q, &packed, &w, &Visible::between(None, Some(&bad))),
        &["indexer_scores", "ends is I64 [5]", "[4]"],
    );
    refused(
        run(
            &q,
            &packed,
            &w,
            &Visible::decode(&Tensor::zeros(3, DType::U32, device)?),
        ),
        &["4 rows for 3 lengths"],
    );
    refused(
        run(&q, &packed, &w, &Visible::packed(&bad, &bad, Some(&bad))),
        &["query offsets is I64 [5]", "[4]"],
    );
    // Of how many sequences.
    let four = IndexKeys::batched(&zeros(&[4, 9, 32], DType::F32)?);
    refused(
        run(
            &q.reshape((2, 2, 2, 32))?,
            &four,
            &w.reshape((2, 2, 2))?,
            &all,
        ),
        &["q is for 2 sequences", "keys are of 4"],
    );
    let two = Tensor::zeros(2, DType::U32, device)?;
    refused(
        run(&q, &four, &w, &Visible::decode(&two)),
        &["lengths is for 2 sequences", "keys are of 4"],
    );
    // Rows that can't be made of it without a copy.
    let wide = zeros(&[2, 2, 4, 32], DType::F32)?.narrow(2, 0, 2)?;
    refused(
        indexer_scores_into(
            &wide.narrow(1, 0, 2)?.transpose(0, 1)?,
            &packed,
            &w.reshape((2, 2, 2))?,
            &all,
            &zeros(&[4, 9], DType::F32)?,
        ),
        &["q is F32 [2, 2, 2, 32] with strides", "contiguous"],
    );
    let transposed = zeros(&[32, 9], DType::F32)?.t()?;
    refused(
        run(&q, &IndexKeys::packed(&transposed), &w, &all),
        &["last dimension of the keys has stride 9", "contiguous()"],
    );
    // Views of any size over a single row.
    let (many, far) = (1usize << 40, 1usize << 31);
    let huge_q = zeros(&[1, 2, 32], DType::F32)?.broadcast_as((many, 2, 32))?;
    let huge_w = zeros(&[1, 2], DType::F32)?.broadcast_as((many, 2))?;
    let huge_k = IndexKeys::packed(&zeros(&[1, 32], DType::F32)?.broadcast_as((far, 32))?);
    refused(
        run(&huge_q, &packed, &huge_w, &all),
        &["scores would have shape", "2^36"],
    );
    refused(run(&huge_q, &huge_k, &huge_w, &all), &["2^36"]);
    let top = TopK::new(8)?;
    refused(
        index_topk(&huge_q, &packed, &huge_w, &all, &top, 1 << 20),
        &["positions would have shape", "2^36"],
    );
    let pages = zeros(&[1, 1, 32], DType::F32)?.broadcast_as((5, 1 << 30, 32))?;
    let table = Tensor::zeros((1, 1), DType::U32, device)?.broadcast_as((2, 1 << 40))?;
    refused(
        run(&q, &IndexKeys::paged(&pages, &table), &w, &all),
        &["at most 2^32 - 2"],
    );
    let into = |out: &Tensor| indexer_scores_into(&q, &packed, &w, &all, out);
    refused(
        into(&zeros(&[4, 8], DType::F32)?),
        &["output is F32 [4, 8]", "[4, 9]"],
    );
    refused(
        into(&zeros(&[1, 9], DType::F32)?.broadcast_as((4, 9))?),
        &["overlap"],
    );
    let both = zeros(&[300], DType::F32)?;
    let q = both.narrow(0, 0, 256)?.reshape((4, 2, 32))?;
    let out = both.narrow(0, 256, 36)?.reshape((4, 9))?;
    refused(
        indexer_scores_into(&q, &packed, &w, &all, &out),
        &["output lies in the storage of an operand"],
    );
    Ok(())
}

// ---------------------------------------------------------------- scores and selection

/// The set that a stable sort of the scores gives, by position.
fn best(scores: &[f64], start: usize, end: usize, k: usize) -> Vec<u32> {
    let mut order: Vec<usize> = (start..end).collect();
    order.sort_by(|&a, &b| scores[b].partial_cmp(&scores[a]).unwrap());
    order.truncate(k);
    order.sort_unstable();
    order.into_iter().map(|p| p as u32).collect()
}

/// Positions are those of a stable sort of the scores as computed, under any budget.
pub fn index_topk_is_exact(dtype: DType, device: &Device) -> Result<()> {
    let mut seed = 300;
    for (rows, length, k) in [
        (1, 1, 1),
        (9, 200, 16),
        (9, 200, 199),
        (9, 200, 200),
        (9, 200, 201),
        (30, 40, 64),
        (3, 5000, 2048),
        (0, 10, 4),
        (4, 0, 4),
    ] {
        seed += 1;
        let case = ScoreCase {
            rows,
            length,
            heads: 2,
            dim: 32,
            dtype,
            scaled: seed % 2 == 0,
        };
        let random = case.random(seed, device)?;
        let visible = random.visible(seed as usize, device)?;
        let scores = numbers(&random.scores(seed as usize, device)?)?;
        let top = TopK::new(k)?.order(Order::ByPosition).with_values();
        let row = (length * 4).max(1);
        for budget in [row, 3 * row + 1, 1 << 30] {
            let chosen = index_topk(
                &random.q,
                &random.keys(),
                &random.weights,
                &visible,
                &top,
                budget,
            )?;
            assert_eq!(chosen.positions.dims(), [rows, k]);
            let positions = chosen
                .positions
                .to_device(&Device::Cpu)?
                .flatten_all()?
                .to_vec1::<u32>()?;
            let counts = chosen.counts.to_device(&Device::Cpu)?.to_vec1::<u32>()?;
            let values = match &chosen.values {
                Some(values) => numbers(values)?,
                None => vec![0.0; rows * k],
            };
            for r in 0..rows {
                let (start, end) = (
                    clamp(random.starts[r], length),
                    clamp(random.ends[r], length),
                );
                let own = &scores[r * length..(r + 1) * length];
                let wanted = best(own, start, end.max(start), k);
                let what = format!("{rows} x {length}, k {k}, budget {budget}, row {r}");
                assert_eq!(counts[r] as usize, wanted.len(), "{what}");
                let positions = &positions[r * k..(r + 1) * k];
                assert_eq!(positions[..wanted.len()], wanted, "{what}");
                assert!(
                    positions[wanted.len()..].iter().all(|&p| p == NONE),
                    "{what}"
                );
                for (i, &p) in wanted.iter().enumerate() {
                    assert_eq!(values[r * k + i], own[p as usize], "{what}");
                }
            }
        }
    }
    Ok(())
}

/// Decoding with a paged cache, mixed short and long sequences, and packed prefill of the same
/// tokens choose the same keys; equal scores go to the lowest positions.
/// A long prompt of one sequence in a cache, in chunks of rows, in any form of the cache.
pub fn index_topk_of_one_sequence(device: &Device) -> Result<()> {
    let rng = &mut rng(43);
    let (rows, length, heads, dim, k) = (150, 192, 4, 32, 12);
    let random = |dims: &[usize], dtype, rng: &mut StdRng| {
        tensor(&normals(dims.iter().product(), rng), dims, dtype, device)
    };
    let q = random(&[1, rows, heads, dim], DType::BF16, rng)?;
    let weights = random(&[1, rows, heads], DType::F32, rng)?;
    let keys = random(&[1, length, dim], DType::BF16, rng)?;
    let ends: Vec<i64> = (0..rows as i64).map(|row| row + 1).collect();
    let visible = Visible::between(None, Some(&ints(&ends, 1, device)?));
    let top = TopK::new(k)?.order(Order::ByPosition).with_values();
    let run = |keys: &IndexKeys, rows: usize| -> Result<_> {
        let chosen = index_topk(&q, keys, &weights, &visible, &top, rows * length * 4)?;
        let positions = chosen.positions.to_device(&Device::Cpu)?.to_vec2::<u32>()?;
        let values = numbers(&chosen.values.expect("they are asked for"))?;
        Ok((positions, values))
    };
    let whole = run(&IndexKeys::packed(&keys.squeeze(0)?), rows)?;
    for (row, positions) in whole.0.iter().enumerate() {
        let valid = positions.iter().filter(|&&p| p != NONE).count();
        assert_eq!(valid, k.min(row + 1), "row {row}");
    }
    let (pool, table) = paged(&keys, 16, &[length as i64], rng)?;
    let table = ints(&table, 0, device)?.reshape((1, length / 16))?;
    for (form, keys) in [
        ("packed", IndexKeys::packed(&keys.squeeze(0)?)),
        ("batched", IndexKeys::batched(&keys)),
        ("paged", IndexKeys::paged(&pool, &table)),
    ] {
        for rows in [1, 7, 64, 149, 150] {
            assert!(run(&keys, rows)? == whole, "{form}, {rows} rows at a time");
        }
    }
    Ok(())
}

pub fn index_topk_of_caches(device: &Device) -> Result<()> {
    let rng = &mut rng(41);
    let (length, heads, dim, k) = (64, 4, 32, 12);
    let lengths = [64i64, 1, 12, 0, 13, 40];
    let (sequences, n) = (lengths.len(), 2i64);
    let rows = sequences * n as usize;
    let q = tensor(
        &normals(rows * heads * dim, rng),
        &[rows, heads, dim],
        DType::BF16,
        device,
    )?;
    let weights = tensor(
        &normals(rows * heads, rng),
        &[rows, heads],
        DType::F32,
        device,
    )?;
    let keys = tensor(
        &normals(sequences * length * dim, rng),
        &[sequences, length, dim],
        DType::BF16,
        device,
    )?;
    let top = TopK::new(k)?.order(Order::ByPosition);
    let run = |keys: &IndexKeys, visible: &Visible, budget| -> Result<Vec<Vec<u32>>> {
        let chosen = index_topk(&q, keys, &weights, visible, &top, budget)?;
        chosen.positions.to_device(&Device::Cpu)?.to_vec2::<u32>()
    };
    let decode = Visible::decode(&ints(&lengths, 0, device)?);
    let batched = run(&IndexKeys::batched(&keys), &decode, 1 << 30)?;
    for page in [4, 16] {
        let (pool, table) = paged(&keys, page, &lengths, rng)?;
        let table = ints(&table, page / 4, device)?.reshape((sequences, length / page))?;
        let keys = IndexKeys::paged(&pool, &table);
        assert_eq!(run(&keys, &decode, 1 << 30)?, batched, "pages of {page}");
        // In chunks that cut sequences in two.
        assert_eq!(
            run(&keys, &decode, 3 * length * 4)?,
            batched,
            "pages of {page}, in chunks"
        );
    }
    for (row, positions) in batched.iter().enumerate() {
        let end = clamp(lengths[row / 2] - n + 1 + (row % 2) as i64, length);
        let valid = positions.iter().filter(|&&p| p != NONE).count();
        assert_eq!(valid, end.min(k), "row {row}");
        assert!(
            positions[..valid].windows(2).all(|p| p[0] < p[1]),
            "row {row}"
        );
        assert!(
            positions[..valid].iter().all(|&p| (p as usize) < end),
            "row {row}"
        );
        if end <= k {
            let all: Vec<u32> = (0..end as u32).collect();
            assert_eq!(positions[..valid], all, "row {row}");
        }
    }

    // The same as a packed prefill: positions become rows of the packed keys.
    let used: Vec<Tensor> = lengths
        .iter()
        .enumerate()
        .map(|(b, &length)| {
            keys.narrow(0, b, 1)?
                .squeeze(0)?
                .narrow(0, 0, length as usize)
        })
        .collect::<Result<_>>()?;
    let packed = Tensor::cat(&used, 0)?;
    let cumulative = |each: &mut dyn Iterator<Item = i64>| -> Vec<i64> {
        let mut sum = 0;
        std::iter::once(0)
            .chain(each.map(|n| {
                sum += n;
                sum
            }))
            .collect()
    };
    let queries = cumulative(&mut lengths.iter().map(|_| n));
    let starts = cumulative(&mut lengths.iter().copied());
    let visible = Visible::packed(
        &ints(&queries, 1, device)?,
        &ints(&starts, 0, device)?,
        None,
    );
    let chosen = run(&IndexKeys::packed(&packed), &visible, 1 << 30)?;
    for (row, (chosen, batched)) in chosen.iter().zip(&batched).enumerate() {
        let start = starts[row / 2] as u32;
        let wanted: Vec<u32> = batched
            .iter()
            .map(|&p| if p == NONE { NONE } else { p + start })
            .collect();
        assert_eq!(chosen, &wanted, "row {row}");
    }

    // Heads that all see nothing: every score is 0, and the first positions win.
    let zeros = weights.zeros_like()?;
    let chosen = index_topk(
        &q,
        &IndexKeys::batched(&keys),
        &zeros,
        &Visible::all(),
        &top,
        1 << 30,
    )?;
    for row in chosen.positions.to_device(&Device::Cpu)?.to_vec2::<u32>()? {
        assert_eq!(row, (0..k as u32).collect::<Vec<_>>());
    }
    refused(
        index_topk(&q, &IndexKeys::batched(&keys), &weights, &decode, &top, 255),
        &["index_topk", "budget is 255", "256"],
    );
    Ok(())
}

// ---------------------------------------------------------------- attention over positions

/// A shape of attention.
#[derive(Debug, Clone, Copy)]
pub struct Form {
    pub rows: usize,
    pub length: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub key_dim: usize,
    /// Of values of their own; `None`: the first 512 of each key.
    pub value_dim: Option<usize>,
    pub width: usize,
    pub per_head: bool,
    pub block: usize,
    pub dtype: DType,
}

impl Form {
    pub const MLA: Self = Self {
        rows: 5,
        length: 300,
        heads: 16,
        kv_heads: 1,
        key_dim: 576,
        value_dim: None,
        width: 64,
        per_head: false,
        block: 1,
        dtype: DType::BF16,
    };
    pub const GQA: Self = Self {
        rows: 5,
        length: 300,
        heads: 8,
        kv_heads: 2,
        key_dim: 64,
        value_dim: Some(64),
        width: 64,
        per_head: true,
        block: 1,
        dtype: DType::BF16,
    };

    fn lists(&self) -> usize {
        if self.per_head {
            self.kv_heads
        } else {
            1
        }
    }

    fn values_dim(&self) -> usize {
        self.value_dim.unwrap_or(512)
    }
}

/// Operands, and what comes of them in f64.
pub struct Attended {
    pub form: Form,
    pub q: Tensor,
    pub k: Tensor,
    pub v: Option<Tensor>,
    pub positions: Vec<u32>,
    pub counts: Option<Vec<i64>>,
    pub starts: Option<Vec<i64>>,
    pub ends: Option<Vec<i64>>,
    pub sink: Option<Vec<f32>>,
    pub scale: f32,
    pub out: Vec<f64>,
    pub lse: Vec<f64>,
}

/// What a case has beside positions.
#[derive(Debug, Clone, Copy, Default)]
pub struct Extras {
    pub counts: bool,
    pub bounds: bool,
    pub sink: bool,
}

impl Attended {
    /// Random operands: positions in no order, sentinels and positions beyond the keys among them,
    /// and NaN wherever nothing attends.
    pub fn random(form: Form, extras: Extras, seed: u64, device: &Device) -> Result<Self> {
        let rng = &mut rng(seed);
        let Form {
            rows,
            length,
            heads,
            kv_heads,
            key_dim,
            width,
            block,
            ..
        } = form;
        let blocks = length.div_ceil(block);
        let mut positions = Vec::new();
        for row in 0..rows {
            for _ in 0..form.lists() {
                let mut all: Vec<u32> = (0..blocks as u32).collect();
                for i in (1..all.len()).rev() {
                    all.swap(i, rng.random_range(0..=i));
                }
                all.resize(width.max(all.len()), NONE);
                all.truncate(width);
                for position in &mut all {
                    match (row % 4, rng.random_range(0..8)) {
                        // Nothing at all; a few; some.
                        (1, _) => *position = NONE,
                        (2, 0..7) => *position = NONE,
                        (3, 0) => *position = NONE,
                        (3, 1) => *position = blocks as u32 + rng.random_range(0..5),
                        (3, 2) => *position |= 1 << 31,
                        _ => (),
                    }
                }
                positions.extend(all);
            }
        }
        let n = length as i64;
        let bound = |rng: &mut StdRng, low: i64, high: i64| -> Vec<i64> {
            (0..rows).map(|_| rng.random_range(low..=high)).collect()
        };
        let counts = extras.counts.then(|| bound(rng, -1, width as i64 + 2));
        let starts = extras.bounds.then(|| bound(rng, -2, n / 4));
        let ends = extras.bounds.then(|| bound(rng, -1, n + 3));
        let sink = extras.sink.then(|| {
            let mut sink = normals(heads, rng);
            sink[0] = f32::NEG_INFINITY;
            sink[heads - 1] = f32::INFINITY;
            sink
        });
        let q = tensor(
            &normals(rows * heads * key_dim, rng),
            &[rows, heads, key_dim],
            form.dtype,
            device,
        )?;
        let dv = form.values_dim();
        let mut case = Self {
            form,
            q,
            k: Tensor::zeros(0, DType::F32, device)?,
            v: None,
            positions,
            counts,
            starts,
            ends,
            sink,
            scale: (key_dim as f32).powf(-0.5),
            out: Vec::new(),
            lse: Vec::new(),
        };
        let mut used = vec![false; length * kv_heads];
        for row in 0..rows {
            for head in 0..kv_heads {
                for t in case.attended(row, head) {
                    used[t * kv_heads + head] = true;
                }
            }
        }
        let poisoned = |rng: &mut StdRng, dim: usize| {
            let mut data = normals(length * kv_heads * dim, rng);
            for (vector, used) in data.chunks_mut(dim).zip(&used) {
                if !used {
                    vector.fill(f32::NAN);
                }
            }
            tensor(&data, &[length, kv_heads, dim], form.dtype, device)
        };
        case.k = poisoned(rng, key_dim)?;
        if form.value_dim.is_some() {
            case.v = Some(poisoned(rng, dv)?);
        }
        case.solve()?;
        Ok(case)
    }

    /// The keys that a row attends to.
    pub fn attended(&self, row: usize, kv_head: usize) -> Vec<usize> {
        let form = self.form;
        let list = if form.per_head { kv_head } else { 0 };
        let positions = &self.positions[(row * form.lists() + list) * form.width..][..form.width];
        let count = self
            .counts
            .as_ref()
            .map_or(form.width, |c| clamp(c[row], form.width));
        let start = self
            .starts
            .as_ref()
            .map_or(0, |s| clamp(s[row], form.length));
        let end = self
            .ends
            .as_ref()
            .map_or(form.length, |e| clamp(e[row], form.length));
        let mut keys = Vec::new();
        for &position in &positions[..count] {
            for i in 0..form.block {
                let t = position as usize * form.block + i;
                if position != NONE && t >= start && t < end {
                    keys.push(t);
                }
            }
        }
        keys
    }

    /// The reference: everything in f64.
    fn solve(&mut self) -> Result<()> {
        let form = self.form;
        let (dk, dv) = (form.key_dim, form.values_dim());
        let (q, k) = (numbers(&self.q)?, numbers(&self.k)?);
        let v = match &self.v {
            Some(v) => numbers(v)?,
            None => k.chunks(dk).flat_map(|key| &key[..dv]).copied().collect(),
        };
        let group = form.heads / form.kv_heads;
        self.out = vec![0.0; form.rows * form.heads * dv];
        self.lse = vec![f64::NEG_INFINITY; form.rows * form.heads];
        for row in 0..form.rows {
            for head in 0..form.heads {
                let keys = self.attended(row, head / group);
                let q = &q[(row * form.heads + head) * dk..][..dk];
                let at = |t: usize| t * form.kv_heads + head / group;
                let scores: Vec<f64> = keys
                    .iter()
                    .map(|&t| {
                        let k = &k[at(t) * dk..][..dk];
                        self.scale as f64 * q.iter().zip(k).map(|(q, k)| q * k).sum::<f64>()
                    })
                    .collect();
                let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                if max == f64::NEG_INFINITY {
                    continue;
                }
                let sum: f64 = scores.iter().map(|x| (x - max).exp()).sum();
                self.lse[row * form.heads + head] = max + sum.ln();
                let sink = self
                    .sink
                    .as_ref()
                    .map_or(0.0, |s| (s[head] as f64 - max).exp());
                let out = &mut self.out[(row * form.heads + head) * dv..][..dv];
                for (&t, score) in keys.iter().zip(&scores) {
                    let weight = (score - max).exp() / (sum + sink);
                    for (out, v) in out.iter_mut().zip(&v[at(t) * dv..]) {
                        *out += weight * v;
                    }
                }
            }
        }
        Ok(())
    }

    pub fn op(&self, which: usize, device: &Device) -> Result<SparseAttention> {
        let mut op = SparseAttention::new(self.scale).with_block_size(self.form.block);
        if let Some(sink) = &self.sink {
            op = op.with_sink(&Tensor::new(sink.as_slice(), device)?);
        }
        if let Some(counts) = &self.counts {
            op = op.with_counts(&ints(counts, which, device)?);
        }
        let bound = |data: &Option<Vec<i64>>, which| -> Result<Option<Tensor>> {
            data.as_ref()
                .map(|data| ints(data, which, device))
                .transpose()
        };
        let (starts, ends) = (
            bound(&self.starts, which + 1)?,
            bound(&self.ends, which + 2)?,
        );
        Ok(op.with_visible(&Visible::between(starts.as_ref(), ends.as_ref())))
    }

    pub fn values(&self) -> Values {
        match &self.v {
            Some(v) => v.into(),
            None => Values::OfKeys(512),
        }
    }

    pub fn positions(&self, device: &Device) -> Result<Tensor> {
        let form = self.form;
        Tensor::from_slice(
            &self.positions,
            (form.rows, form.lists(), form.width),
            device,
        )
    }

    pub fn run(&self, which: usize, device: &Device) -> Result<(Tensor, Tensor)> {
        let kv = KeyValues::packed(&self.k, self.values());
        let attention = self
            .op(which, device)?
            .forward(&self.q, &kv, &self.positions(device)?)?;
        Ok((attention.out, attention.lse))
    }

    /// Holds a result against the reference.
    pub fn check(&self, out: &Tensor, lse: &Tensor, what: &str) -> Result<()> {
        let form = self.form;
        assert_eq!(
            out.dims(),
            [form.rows, form.heads, form.values_dim()],
            "{what}"
        );
        assert_eq!(lse.dims(), [form.rows, form.heads], "{what}");
        assert_eq!(
            (out.dtype(), lse.dtype()),
            (form.dtype, DType::F32),
            "{what}"
        );
        // f32 is held to f32, the half types to their rounding.
        let (out_abs, out_rel, cosine) = match form.dtype {
            DType::F32 => (2e-6, 2e-5, 1e-10),
            _ => (8e-4, 3.0 / 128.0, 7e-6),
        };
        close(
            &numbers(out)?,
            &self.out,
            out_abs,
            out_rel,
            &format!("{what}, output"),
        )?;
        close(
            &numbers(lse)?,
            &self.lse,
            1e-6,
            2.0 / 65536.0,
            &format!("{what}, lse"),
        )?;
        let distance = distance(&numbers(out)?, &self.out)?;
        assert!(distance < cosine, "{what}: distance {distance:e}, {form:?}");
        Ok(())
    }
}

/// Every element within an absolute or a relative error; infinities and NaN equal exactly.
pub fn close(got: &[f64], wanted: &[f64], abs: f64, rel: f64, what: &str) -> Result<()> {
    assert_eq!(got.len(), wanted.len(), "{what}");
    for (i, (&got, &wanted)) in got.iter().zip(wanted).enumerate() {
        let error = (got - wanted).abs();
        let same = got == wanted || (got.is_nan() && wanted.is_nan());
        if !(same || error <= abs || error <= rel * wanted.abs()) {
            bail!("{what}: element {i} is {got}, {wanted} is expected")
        }
    }
    Ok(())
}

/// Every form, with what bits of `extras` say beside positions: 1 counts, 2 bounds, 4 a sink.
pub fn attention_forms(dtype: DType, extras: &[u32], device: &Device) -> Result<()> {
    let mut seed = 1000;
    for (key_dim, value_dim, heads, kv_heads) in [
        (576, None, 16, 1),
        (576, None, 3, 1),
        (512, None, 5, 1),
        (64, Some(64), 8, 2),
        (96, Some(96), 6, 6),
        (128, Some(128), 32, 8),
        (256, Some(256), 4, 1),
    ] {
        for (block, width, length) in [
            (1, 64, 300),
            (1, 95, 40),
            (1, 1, 1),
            (64, 3, 300),
            (128, 4, 500),
        ] {
            for &extras in extras {
                seed += 1;
                let form = Form {
                    rows: 1 + seed as usize % 5,
                    length,
                    heads,
                    kv_heads,
                    key_dim,
                    value_dim,
                    width,
                    per_head: seed % 2 == 0,
                    block,
                    dtype,
                };
                let extras = Extras {
                    counts: extras & 1 != 0,
                    bounds: extras & 2 != 0,
                    sink: extras & 4 != 0,
                };
                let case = Attended::random(form, extras, seed, device)?;
                let (out, lse) = case.run(seed as usize, device)?;
                case.check(&out, &lse, &format!("{form:?} {extras:?}"))?;
            }
        }
    }
    Ok(())
}

/// Rows of few keys and of many, among which kernels may round weights differently, and scales of
/// either sign.
pub fn attention_weights(
    dtype: DType,
    heads: usize,
    keys: &[usize],
    device: &Device,
) -> Result<()> {
    for (key_dim, value_dim, heads, kv_heads, block) in [
        (576, None, heads, 1, 1),
        (64, Some(64), 4, 2, 64),
        (128, Some(128), 8, 2, 128),
    ] {
        for &keys in keys {
            for scale in [None, Some(0.0), Some(-0.125), Some(0.75)] {
                // Every scale once is enough.
                if scale.is_some() && keys != 384 {
                    continue;
                }
                let form = Form {
                    rows: 1,
                    length: keys + 200,
                    heads,
                    kv_heads,
                    key_dim,
                    value_dim,
                    width: keys / block,
                    per_head: false,
                    block,
                    dtype,
                };
                let mut case =
                    Attended::random(form, Extras::default(), 7300 + keys as u64, device)?;
                if let Some(scale) = scale {
                    case.scale = scale;
                    case.solve()?;
                }
                let (out, lse) = case.run(keys, device)?;
                case.check(&out, &lse, &format!("{form:?}, scale {}", case.scale))?;
            }
        }
    }
    Ok(())
}

/// Blocks of keys with so many rows that several share a tile, of one head of a group and of many.
pub fn attention_of_tiles(dtype: DType, device: &Device) -> Result<()> {
    let mut seed = 7000;
    for (rows, heads, kv_heads) in [
        (2300, 4, 4),
        (300, 32, 32),
        (700, 8, 2),
        (700, 6, 2),
        (150, 64, 1),
    ] {
        for (key_dim, block, width, length) in [(64, 64, 3, 500), (128, 128, 2, 900)] {
            seed += 1;
            let form = Form {
                rows,
                length,
                heads,
                kv_heads,
                key_dim,
                value_dim: Some(key_dim),
                width,
                per_head: seed % 2 == 0,
                block,
                dtype,
            };
            let extras = Extras {
                counts: true,
                bounds: true,
                sink: seed % 3 == 0,
            };
            let case = Attended::random(form, extras, seed, device)?;
            let (out, lse) = case.run(seed as usize, device)?;
            case.check(&out, &lse, &format!("{form:?} {extras:?}"))?;
        }
    }
    Ok(())
}

/// Small shapes for every kernel, with lists of one segment and of two that have a block each or share
/// one, and for blocks of keys with a tile for each row and for several.
pub fn attention_of_every_kernel(dtype: DType, device: &Device) -> Result<()> {
    let mut seed = 9000;
    let mut check = |form: Form| -> Result<()> {
        seed += 1;
        let extras = Extras {
            counts: seed % 2 == 0,
            bounds: seed % 3 == 0,
            sink: seed % 2 == 1,
        };
        let case = Attended::random(form, extras, seed, device)?;
        let (out, lse) = case.run(seed as usize, device)?;
        case.check(&out, &lse, &format!("{form:?} {extras:?}"))
    };
    for (key_dim, value_dim, heads, kv_heads) in [
        (64, Some(64), 4, 2),
        (64, Some(64), 20, 1),
        (100, Some(36), 3, 1),
        (128, Some(128), 20, 1),
        (256, Some(256), 4, 1),
        (256, Some(256), 20, 1),
        (576, Some(512), 4, 1),
        (576, None, 3, 1),
        (576, None, 20, 1),
        (512, None, 40, 1),
        (576, None, 70, 1),
        (600, Some(520), 3, 1),
    ] {
        for (rows, width, length) in [(3, 70, 60), (2, 600, 700)] {
            check(Form {
                rows,
                length,
                heads,
                kv_heads,
                key_dim,
                value_dim,
                width,
                per_head: kv_heads > 1,
                block: 1,
                dtype,
            })?;
        }
    }
    // More rows than are at work at a time.
    let narrow = Form {
        heads: 2,
        kv_heads: 1,
        per_head: false,
        ..Form::GQA
    };
    let latent = |heads| Form { heads, ..Form::MLA };
    for (form, rows) in [(narrow, 600), (latent(3), 300), (latent(40), 140)] {
        if dtype != DType::F32 || form.key_dim == narrow.key_dim {
            check(Form {
                rows,
                length: 30,
                width: 600,
                dtype,
                ..form
            })?;
        }
    }
    for (key_dim, block, rows) in [(64, 64, 3), (128, 64, 150), (64, 128, 150), (96, 64, 3)] {
        check(Form {
            rows,
            length: 300,
            heads: 4,
            kv_heads: 2,
            key_dim,
            value_dim: Some(key_dim),
            width: 3,
            per_head: true,
            block,
            dtype,
        })?;
    }
    Ok(())
}

/// Every head count from 1 to 128, for one key head and for every one that divides.
pub fn attention_head_counts(device: &Device) -> Result<()> {
    for heads in 1..=128 {
        for kv_heads in [1, 2, 8, heads] {
            if heads % kv_heads != 0 || (heads > 1 && kv_heads == heads && heads % 16 != 0) {
                continue;
            }
            let form = Form {
                rows: 2,
                length: 40,
                heads,
                kv_heads,
                width: 20,
                ..Form::GQA
            };
            let case = Attended::random(form, Extras::default(), heads as u64, device)?;
            let (out, lse) = case.run(0, device)?;
            case.check(&out, &lse, &format!("{heads} heads, {kv_heads} of keys"))?;
        }
    }
    Ok(())
}

/// Decoding over packed, batched and paged caches gives the same bits, twenty times.
pub fn attention_of_caches(form: Form, device: &Device) -> Result<()> {
    let rng = &mut rng(form.heads as u64);
    let (sequences, n, length) = (4, 2, 64);
    let form = Form {
        rows: sequences * n,
        length: sequences * length,
        ..form
    };
    // Packed: every sequence's keys one behind the other, positions in its stretch.
    let mut case = Attended::random(form, Extras::default(), 77, device)?;
    let lengths = [64i64, 0, 33, 1];
    let mut local = Vec::new();
    for row in 0..form.rows {
        let b = row / n;
        for _ in 0..form.lists() {
            for _ in 0..form.width {
                let position = rng.random_range(0..length as u32 + 4);
                let seen = (position as i64) < lengths[b] - 1 + (row % n) as i64;
                // A position that comes twice would count twice: only what the batch form skips may.
                let first = !local[local.len() / form.width * form.width..].contains(&position);
                local.push(if seen && first { position } else { NONE });
            }
        }
    }
    let each = form.lists() * form.width;
    case.positions = local
        .iter()
        .enumerate()
        .map(|(i, &p)| match p {
            NONE => NONE,
            p => p + (i / each / n * length) as u32,
        })
        .collect();
    let k = tensor(
        &normals(form.length * form.kv_heads * form.key_dim, rng),
        case.k.dims(),
        form.dtype,
        device,
    )?;
    case.k = k;
    if let Some(v) = &case.v {
        let data = normals(v.elem_count(), rng);
        case.v = Some(tensor(&data, v.dims(), form.dtype, device)?);
    }
    case.solve()?;
    let (out, lse) = case.run(0, device)?;
    case.check(&out, &lse, "packed")?;
    let wanted = (bits(&out)?, bits(&lse)?);

    let cache = |t: &Tensor| t.reshape((sequences, length, form.kv_heads, t.dims()[2]));
    let k = cache(&case.k)?;
    let v = case.v.as_ref().map(cache).transpose()?;
    let positions = Tensor::from_slice(&local, (form.rows, form.lists(), form.width), device)?;
    let q = case.q.reshape((sequences, n, form.heads, form.key_dim))?;
    let visible = Visible::decode(&ints(&lengths, 1, device)?);
    let op = SparseAttention::new(case.scale).with_visible(&visible);
    let values = |v: &Option<Tensor>| match v {
        Some(v) => Values::from(v),
        None => Values::OfKeys(512),
    };
    let run = |kv: &KeyValues| -> Result<_> {
        let attention = op.forward(&q, kv, &positions)?;
        Ok((bits(&attention.out)?, bits(&attention.lse)?))
    };
    let batched = KeyValues::batched(&k, values(&v));
    for _ in 0..20 {
        assert_eq!(run(&batched)?, wanted, "batched");
    }
    for page in [1, 16, 64] {
        let seed = rng.random();
        let (k_pool, table) = paged(&k, page, &lengths, &mut super::rng(seed))?;
        let v_pool = match &v {
            // The same seed: the same pages.
            Some(v) => Some(paged(v, page, &lengths, &mut super::rng(seed))?.0),
            None => None,
        };
        let table = ints(&table, page, device)?.reshape((sequences, length / page))?;
        let kv = KeyValues::paged(&k_pool, values(&v_pool), &table);
        assert_eq!(run(&kv)?, wanted, "pages of {page}");
        let map: Vec<i64> = (0..form.rows).map(|row| (row / n) as i64).collect();
        let mapped = kv.with_row_sequences(&ints(&map, page, device)?);
        assert_eq!(run(&mapped)?, wanted, "pages of {page}, rows mapped");
    }
    Ok(())
}

/// Lists of blocks over batched and paged caches: the bits of packed keys, and of each row by itself.
pub fn block_lists_of_caches(dtype: DType, dim: usize, device: &Device) -> Result<()> {
    let rng = &mut rng(dim as u64);
    let (sequences, n, length, block) = (3, 4, 512, 64);
    let (heads, kv_heads, width) = (8, 2, 5);
    let (rows, blocks) = (sequences * n, length / block);
    // The last block that a row sees is seen in part.
    let lengths = [512i64, 100, 3];
    let q = tensor(
        &normals(rows * heads * dim, rng),
        &[rows, heads, dim],
        dtype,
        device,
    )?;
    let mut keys = || {
        let data = normals(sequences * length * kv_heads * dim, rng);
        tensor(&data, &[sequences, length, kv_heads, dim], dtype, device)
    };
    let (k, v) = (keys()?, keys()?);
    let mut local = Vec::new();
    for _ in 0..rows * kv_heads {
        let mut all: Vec<u32> = (0..blocks as u32 + 2).collect();
        for i in (1..all.len()).rev() {
            all.swap(i, rng.random_range(0..=i));
        }
        local.extend(all[..width].iter().map(|&p| match rng.random_range(0..9) {
            0 => NONE,
            _ => p,
        }));
    }
    let global: Vec<u32> = local
        .iter()
        .enumerate()
        .map(|(i, &p)| match p as usize >= blocks {
            true => NONE,
            false => p + (i / width / kv_heads / n * blocks) as u32,
        })
        .collect();
    let lists = |data: &[u32], rows| Tensor::from_slice(data, (rows, kv_heads, width), device);
    let op = SparseAttention::new((dim as f32).powf(-0.5)).with_block_size(block);
    let taken = |out: Attention| -> Result<_> { Ok((bits(&out.out)?, bits(&out.lse)?)) };

    let first = |row: usize| (row / n * length) as i64;
    let seen = |row: usize| lengths[row / n] - n as i64 + (row % n) as i64 + 1;
    let starts: Vec<i64> = (0..rows).map(first).collect();
    let ends: Vec<i64> = (0..rows).map(|row| first(row) + seen(row)).collect();
    let flat = |t: &Tensor| t.reshape((sequences * length, kv_heads, dim));
    let packed = KeyValues::packed(&flat(&k)?, &flat(&v)?);
    let (starts, ends) = (ints(&starts, 1, device)?, ints(&ends, 2, device)?);
    let visible = Visible::between(Some(&starts), Some(&ends));
    let own = op.clone().with_visible(&visible);
    let wanted = taken(own.forward(&q, &packed, &lists(&global, rows)?)?)?;
    for row in 0..rows {
        let visible = Visible::between(
            Some(&starts.narrow(0, row, 1)?),
            Some(&ends.narrow(0, row, 1)?),
        );
        let each = kv_heads * width;
        let list = lists(&global[row * each..][..each], 1)?;
        let own = op.clone().with_visible(&visible);
        let (out, lse) = taken(own.forward(&q.narrow(0, row, 1)?, &packed, &list)?)?;
        assert_eq!(
            out,
            wanted.0[row * heads * dim..][..heads * dim],
            "row {row}"
        );
        assert_eq!(lse, wanted.1[row * heads..][..heads], "row {row}: lse");
    }

    let positions = lists(&local, rows)?;
    let q = q.reshape((sequences, n, heads, dim))?;
    let visible = Visible::decode(&ints(&lengths, 1, device)?);
    let own = op.clone().with_visible(&visible);
    let batched = KeyValues::batched(&k, Values::from(&v));
    assert_eq!(
        taken(own.forward(&q, &batched, &positions)?)?,
        wanted,
        "batched"
    );
    for page in [16, 64, 128] {
        let seed = rng.random();
        let (k_pool, table) = paged(&k, page, &lengths, &mut super::rng(seed))?;
        // The same seed: the same pages.
        let v_pool = paged(&v, page, &lengths, &mut super::rng(seed))?.0;
        let table = ints(&table, page, device)?.reshape((sequences, length / page))?;
        let kv = KeyValues::paged(&k_pool, Values::from(&v_pool), &table);
        let got = taken(own.forward(&q, &kv, &positions)?)?;
        assert_eq!(got, wanted, "pages of {page}");
    }
    Ok(())
}

/// S, T and K of 0, one key, and rows of which none attends.
pub fn attention_of_nothing(device: &Device) -> Result<()> {
    for form in [Form::MLA, Form::GQA] {
        for (rows, length, width) in [(0, 10, 4), (3, 0, 4), (3, 10, 0), (3, 1, 1), (2, 1, 64)] {
            let form = Form {
                rows,
                length,
                width,
                ..form
            };
            let case = Attended::random(form, Extras::default(), 5, device)?;
            let (out, lse) = case.run(0, device)?;
            case.check(&out, &lse, &format!("{form:?}"))?;
        }
        // Nothing but what is skipped, also with a sink.
        let mut case = Attended::random(
            form,
            Extras {
                sink: true,
                ..Extras::default()
            },
            6,
            device,
        )?;
        case.positions.fill(NONE);
        case.k = Tensor::full(f32::NAN, case.k.dims(), device)?.to_dtype(form.dtype)?;
        if let Some(v) = &case.v {
            case.v = Some(Tensor::full(f32::NAN, v.dims(), device)?.to_dtype(form.dtype)?);
        }
        let (out, lse) = case.run(0, device)?;
        assert!(numbers(&out)?.iter().all(|&x| x == 0.0));
        assert!(numbers(&lse)?.iter().all(|&x| x == f64::NEG_INFINITY));
    }
    Ok(())
}

/// The first positions of a row all invalid, so that a running maximum starts from nothing; and
/// scores that are infinite.
pub fn attention_of_infinities(device: &Device) -> Result<()> {
    let form = Form {
        rows: 1,
        length: 300,
        width: 256,
        ..Form::GQA
    };
    let mut case = Attended::random(form, Extras::default(), 8, device)?;
    for list in case.positions.chunks_mut(form.width) {
        list[..200].fill(NONE);
    }
    case.solve()?;
    let (out, lse) = case.run(0, device)?;
    case.check(&out, &lse, "late positions")?;

    let q = Tensor::ones((1, 1, 64), DType::F32, device)?;
    let mut k = vec![0f32; 3 * 64];
    k[..64].fill(f32::NEG_INFINITY);
    k[128..].fill(f32::INFINITY);
    let k = tensor(&k, &[3, 1, 64], DType::F32, device)?;
    let v = Tensor::ones((3, 1, 64), DType::F32, device)?;
    let kv = KeyValues::packed(&k, &v);
    let run = |positions: &[u32]| -> Result<(f64, f64)> {
        let positions = Tensor::from_slice(positions, (1, positions.len()), device)?;
        let attention = SparseAttention::new(1.0).forward(&q, &kv, &positions)?;
        Ok((numbers(&attention.out)?[0], numbers(&attention.lse)?[0]))
    };
    assert_eq!(run(&[0])?, (0.0, f64::NEG_INFINITY));
    assert_eq!(run(&[0, 1])?, (1.0, 0.0));
    let (out, lse) = run(&[1, 2])?;
    assert!(out.is_nan() && lse == f64::INFINITY, "{out} {lse}");
    Ok(())
}

/// The order of positions changes nothing but roundings, and duplicates of sentinels nothing at all.
pub fn attention_in_any_order(device: &Device) -> Result<()> {
    let form = Form {
        dtype: DType::F32,
        rows: 4,
        ..Form::GQA
    };
    let mut case = Attended::random(
        form,
        Extras {
            bounds: true,
            ..Extras::default()
        },
        9,
        device,
    )?;
    for (i, list) in case.positions.chunks_mut(form.width).enumerate() {
        match i % 3 {
            0 => list.sort_unstable(),
            1 => list.sort_unstable_by(|a, b| b.cmp(a)),
            _ => list.reverse(),
        }
    }
    let (out, lse) = case.run(0, device)?;
    case.check(&out, &lse, "reordered")
}

/// Views of every operand, outputs into views, and the CustomOp3, give the same bits.
pub fn attention_of_views(device: &Device) -> Result<()> {
    let form = Form {
        rows: 3,
        ..Form::GQA
    };
    let extras = Extras {
        counts: true,
        bounds: true,
        sink: true,
    };
    let case = Attended::random(form, extras, 10, device)?;
    let (out, lse) = case.run(0, device)?;
    case.check(&out, &lse, "dense")?;
    let wanted = (bits(&out)?, bits(&lse)?);
    let widen = |t: &Tensor| -> Result<Tensor> {
        let junk = Tensor::full(f32::NAN, t.dims(), device)?.to_dtype(t.dtype())?;
        let wide = Tensor::cat(&[&junk, t, &junk], 1)?;
        let wide = Tensor::cat(&[&wide, &wide], 0)?;
        wide.narrow(0, t.dims()[0], t.dims()[0])?
            .narrow(1, t.dims()[1], t.dims()[1])
    };
    let (q, k, v) = (
        widen(&case.q)?,
        widen(&case.k)?,
        widen(case.v.as_ref().unwrap())?,
    );
    let positions = case.positions(device)?;
    let strided = Tensor::stack(&[&positions, &positions.zeros_like()?], 3)?
        .narrow(3, 0, 1)?
        .squeeze(3)?;
    let op = case.op(0, device)?;
    let kv = KeyValues::packed(&k, &v);
    let views = op.forward(&q, &kv, &strided)?;
    assert_eq!((bits(&views.out)?, bits(&views.lse)?), wanted);

    let by_candle =
        case.q
            .apply_op3_no_bwd(&case.k, case.v.as_ref().unwrap(), &op.over(&positions))?;
    assert_eq!(bits(&by_candle)?, wanted.0);

    let dims = (2 * form.heads, form.rows, form.values_dim());
    let whole = Tensor::full(-7f32, dims, device)?.to_dtype(form.dtype)?;
    let to = whole.narrow(0, form.heads, form.heads)?.transpose(0, 1)?;
    let mut workspace = Workspace::new(device)?;
    let lse_to = Tensor::full(-7f32, (form.rows, 2 * form.heads), device)?;
    let lse_to = lse_to.narrow(1, 0, form.heads)?;
    op.forward_into(&q, &kv, &positions, [&to, &lse_to], &mut workspace)?;
    assert_eq!((bits(&to)?, bits(&lse_to)?), wanted);
    let before = numbers(&whole.narrow(0, 0, form.heads)?)?;
    assert!(before.iter().all(|&x| x == -7.0));
    Ok(())
}

/// More rows than a grid's second dimension takes.
pub fn attention_of_many_rows(device: &Device) -> Result<()> {
    let rng = &mut rng(21);
    let rows = 70_000;
    let q = tensor(
        &normals(rows * 64, rng),
        &[rows, 1, 64],
        DType::BF16,
        device,
    )?;
    let k = tensor(&normals(2 * 64, rng), &[2, 1, 64], DType::BF16, device)?;
    let v = tensor(&normals(2 * 64, rng), &[2, 1, 64], DType::BF16, device)?;
    let positions: Vec<u32> = (0..rows as u32).map(|row| row % 2).collect();
    let positions = Tensor::from_vec(positions, (rows, 1), device)?;
    let attention =
        SparseAttention::new(0.125).forward(&q, &KeyValues::packed(&k, &v), &positions)?;
    // One key: its value, whatever the score.
    let (out, v) = (bits(&attention.out)?, bits(&v)?);
    for (row, out) in out.chunks(64).enumerate() {
        assert_eq!(out, &v[row % 2 * 64..][..64], "row {row}");
    }
    Ok(())
}

pub fn attention_refusals(device: &Device) -> Result<()> {
    let zeros = |dims: &[usize], dtype| Tensor::zeros(dims, dtype, device);
    let q = zeros(&[4, 6, 64], DType::F32)?;
    let kv = zeros(&[9, 2, 64], DType::F32)?;
    let positions = zeros(&[4, 3], DType::U32)?;
    let op = SparseAttention::new(1.0);
    let both = KeyValues::packed(&kv, &kv);
    refused(
        op.forward(&kv, &both, &positions),
        &["sparse_attention", "positions are U32 [4, 3]", "[9, K]"],
    );
    refused(
        op.forward(&zeros(&[4, 6], DType::F32)?, &both, &positions),
        &["q is F32 [4, 6]", "[S, Hq, Dk]"],
    );
    refused(
        op.forward(&zeros(&[4, 6, 64], DType::F8E4M3)?, &both, &positions),
        &["q is F8E4M3", "BF16"],
    );
    refused(
        op.forward(&zeros(&[4, 5, 64], DType::F32)?, &both, &positions),
        &["5 heads", "2", "multiple"],
    );
    refused(
        op.forward(
            &q,
            &KeyValues::packed(&zeros(&[9, 64], DType::F32)?, &kv),
            &positions,
        ),
        &["keys are F32 [9, 64]"],
    );
    refused(
        op.forward(
            &q,
            &KeyValues::packed(&kv, &zeros(&[8, 2, 64], DType::F32)?),
            &positions,
        ),
        &["values are F32 [8, 2, 64]"],
    );
    refused(
        op.forward(&q, &KeyValues::packed(&kv, Values::OfKeys(65)), &positions),
        &["first 65", "Dk = 64"],
    );
    refused(
        op.forward(
            &q,
            &KeyValues::packed(&zeros(&[9, 2, 64], DType::F16)?, &kv),
            &positions,
        ),
        &["keys are F16"],
    );
    refused(
        op.forward(&q, &both, &zeros(&[4, 3], DType::I64)?),
        &["positions are I64"],
    );
    refused(
        op.forward(&q, &both, &zeros(&[4, 3, 3], DType::U32)?),
        &["[4, 2, K]"],
    );
    refused(
        op.clone()
            .with_block_size(32)
            .forward(&q, &both, &positions),
        &["block size is 32", "64"],
    );
    refused(
        SparseAttention::new(f32::NAN).forward(&q, &both, &positions),
        &["scale is NaN"],
    );
    refused(
        op.clone()
            .with_sink(&zeros(&[4], DType::F32)?)
            .forward(&q, &both, &positions),
        &["sink is F32 [4]", "[6]"],
    );
    refused(
        op.clone()
            .with_counts(&zeros(&[6], DType::U32)?)
            .forward(&q, &both, &positions),
        &["counts is U32 [6]", "[4]"],
    );
    let visible = Visible::between(None, Some(&zeros(&[3], DType::U32)?));
    refused(
        op.clone()
            .with_visible(&visible)
            .forward(&q, &both, &positions),
        &["sparse_attention", "ends is U32 [3]"],
    );
    let (out, lse) = (zeros(&[4, 6, 64], DType::F32)?, zeros(&[4, 6], DType::F32)?);
    let huge_q = zeros(&[1, 6, 64], DType::F32)?.broadcast_as((1 << 40, 6, 64))?;
    let huge_positions = zeros(&[1, 3], DType::U32)?.broadcast_as((1 << 40, 3))?;
    refused(
        op.forward(&huge_q, &both, &huge_positions),
        &["output would have shape", "2^36"],
    );
    let mut workspace = Workspace::new(device)?;
    refused(
        op.forward_into(&q, &both, &positions, [&lse, &lse], &mut workspace),
        &["output is F32 [4, 6]"],
    );
    refused(
        op.forward_into(&q, &both, &positions, [&q, &lse], &mut workspace),
        &["storage of an operand"],
    );
    let shared = zeros(&[4 * 6 * 65], DType::F32)?;
    let shared_out = shared.narrow(0, 0, 4 * 6 * 64)?.reshape((4, 6, 64))?;
    let shared_lse = shared.narrow(0, 4 * 6 * 64, 4 * 6)?.reshape((4, 6))?;
    refused(
        op.forward_into(
            &q,
            &both,
            &positions,
            [&shared_out, &shared_lse],
            &mut workspace,
        ),
        &["two outputs lie in one storage"],
    );
    op.forward_into(&q, &both, &positions, [&out, &lse], &mut workspace)?;
    let other = kv.apply_op3_no_bwd(&kv, &kv, &op.over(&positions));
    refused(other, &["positions are U32 [4, 3]"]);
    Ok(())
}

/// A decoding step in memory at fixed addresses, with lengths that change in place from step to
/// step: bounds, scores, selection and attention are those of the forms that allocate.
pub fn steps_into_buffers(device: &Device) -> Result<()> {
    let rng = &mut rng(51);
    let (sequences, n, length, k) = (5, 2usize, 48, 8);
    let rows = sequences * n;
    let q = tensor(
        &normals(rows * 4 * 32, rng),
        &[rows, 4, 32],
        DType::BF16,
        device,
    )?;
    let index_keys = normals(sequences * length * 32, rng);
    let index_keys = tensor(&index_keys, &[sequences, length, 32], DType::BF16, device)?;
    let weights = tensor(&normals(rows * 4, rng), &[rows, 4], DType::F32, device)?;
    let queries = tensor(
        &normals(rows * 8 * 64, rng),
        &[rows, 8, 64],
        DType::BF16,
        device,
    )?;
    let kv = normals(sequences * length * 2 * 64, rng);
    let kv = tensor(&kv, &[sequences, length, 2, 64], DType::BF16, device)?;
    let index_keys = IndexKeys::batched(&index_keys);
    let kv = KeyValues::batched(&kv, &kv);
    let top = TopK::new(k)?.order(Order::ByPosition);

    let ends = Tensor::full(-9i64, rows, device)?;
    let bounded = Visible::between(None, Some(&ends));
    // Room for more rows and keys than there are.
    let mut chosen = IndexBuffers::new(rows + 3, length + 5, k, device)?;
    let mut workspace = Workspace::new(device)?;
    let out = Tensor::full(7f32, (rows, 8, 64), device)?.to_dtype(DType::BF16)?;
    let lse = Tensor::full(7f32, (rows, 8), device)?;
    let op = SparseAttention::new(0.125);
    for lengths in [[48i64, 2, 0, 9, 33], [1, 48, 17, -1, 0], [0; 5]] {
        let decode = Visible::decode(&ints(&lengths, lengths[0] as usize, device)?);
        decode.bounds_into(None, &ends)?;
        let allocated = decode.bounds(rows, device)?.1.unwrap();
        assert_eq!(ends.to_vec1::<i64>()?, allocated.to_vec1::<i64>()?);
        index_topk_into(
            &q,
            &index_keys,
            &weights,
            &bounded,
            &top,
            &mut chosen,
            &mut workspace,
        )?;
        let wanted = index_topk(&q, &index_keys, &weights, &decode, &top, 1 << 20)?;
        let own = chosen.chosen().selection()?;
        for (own, wanted) in [
            (&own.positions, &wanted.positions),
            (&own.counts, &wanted.counts),
        ] {
            let own = own.narrow(0, 0, rows)?.flatten_all()?;
            assert_eq!(
                own.to_vec1::<u32>()?,
                wanted.flatten_all()?.to_vec1::<u32>()?
            );
        }
        let op = op.clone().with_visible(&bounded);
        op.forward_into(&queries, &kv, chosen.chosen(), [&out, &lse], &mut workspace)?;
        let attention = op.forward(&queries, &kv, &wanted.positions)?;
        assert_eq!(bits(&out)?, bits(&attention.out)?);
        assert_eq!(bits(&lse)?, bits(&attention.lse)?);
        let same = op.forward(&queries, &kv, chosen.chosen())?;
        assert_eq!(bits(&same.out)?, bits(&attention.out)?);
    }

    let packed = ints(&[0, 4, 10], 0, device)?;
    let visible = Visible::packed(&packed, &packed, None);
    let starts = Tensor::full(-9i64, rows, device)?;
    visible.bounds_into(Some(&starts), &ends)?;
    assert_eq!(starts.to_vec1::<i64>()?, [0, 0, 0, 0, 4, 4, 4, 4, 4, 4]);
    assert_eq!(ends.to_vec1::<i64>()?, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]);
    refused(visible.bounds_into(None, &ends), &["starts are needed too"]);
    refused(visible.bounds_into(Some(&ends), &ends), &["one storage"]);
    refused(
        visible.bounds_into(Some(&packed), &ends),
        &["starts is I64 [3]", "[10]"],
    );
    refused(bounded.bounds_into(None, &ends), &["given as they are"]);
    let decode = Visible::decode(&ints(&[3; 5], 0, device)?);
    refused(
        decode.bounds_into(Some(&starts), &ends),
        &["starts are given"],
    );
    let mut small = IndexBuffers::new(rows - 1, length, k, device)?;
    let mut run = |out: &mut IndexBuffers, top: &TopK| {
        index_topk_into(
            &q,
            &index_keys,
            &weights,
            &bounded,
            top,
            out,
            &mut workspace,
        )
    };
    refused(
        run(&mut small, &top),
        &["10 rows of 48 keys", "up to 9 rows"],
    );
    refused(run(&mut chosen, &TopK::new(9)?), &["k is 9", "8"]);
    refused(
        op.forward(&queries, &kv, small.chosen()),
        &["q has 10 rows", "of 9"],
    );
    refused(IndexBuffers::new(1, 0, 1, device), &["width is 0"]);
    Ok(())
}

/// Elements beyond 2^31: of scores, of keys and of values. Most of that memory is never touched.
pub fn beyond_two_to_the_31(device: &Device) -> Result<()> {
    let rng = &mut rng(61);
    let pitch = 1 << 30;
    let whole = Tensor::zeros(2 * pitch + 8, DType::F32, device)?;
    let q = tensor(&normals(3 * 32, rng), &[3, 1, 32], DType::F32, device)?;
    let k = tensor(&normals(8 * 32, rng), &[8, 32], DType::F32, device)?;
    let weights = Tensor::ones((3, 1), DType::F32, device)?;
    // Rows that lie 2^30 elements apart, as a view.
    let (dims, keys) = ((2, pitch), IndexKeys::packed(&k));
    let out = whole
        .narrow(0, 8, 2 * pitch)?
        .reshape(dims)?
        .narrow(1, pitch - 8, 8)?;
    let part = |t: &Tensor| t.narrow(0, 1, 2);
    let (q, weights) = (part(&q)?, part(&weights)?);
    indexer_scores_into(&q, &keys, &weights, &Visible::all(), &out)?;
    let wanted = indexer_scores(&q, &keys, &weights, &Visible::all())?;
    // A copy of the rows alone: Candle reads back the whole storage of a view.
    assert_eq!(bits(&out.force_contiguous()?)?, bits(&wanted)?);
    assert!(out.layout().start_offset() + pitch >= 1 << 31);
    drop((out, whole));

    let (length, dim) = ((1 << 25) + 70, 64);
    let keys = Tensor::zeros((length, 1, dim), DType::F32, device)?;
    let values = Tensor::zeros((length, 1, dim), DType::F32, device)?;
    let tail = tensor(&normals(64 * dim, rng), &[64, 1, dim], DType::F32, device)?;
    for tensor in [&keys, &values] {
        tensor.slice_set(&tail, 0, length - 64)?;
    }
    let q = tensor(&normals(4 * dim, rng), &[1, 4, dim], DType::F32, device)?;
    let op = SparseAttention::new(0.125);
    let run = |k: &Tensor, v: &Tensor, first: u32| -> Result<_> {
        let positions = Tensor::arange(first, first + 64, device)?.unsqueeze(0)?;
        let attention = op.forward(&q, &KeyValues::packed(k, v), &positions)?;
        Ok((bits(&attention.out)?, bits(&attention.lse)?))
    };
    let far = run(&keys, &values, length as u32 - 64)?;
    assert_eq!(far, run(&tail, &tail, 0)?);

    // And of the keys of an indexer, whose last row of a long cache is the one that is seen.
    let flat = keys.reshape((length, dim))?;
    let starts = ints(&[length as i64 - 64], 0, device)?;
    let visible = Visible::between(Some(&starts), None);
    let top = TopK::new(3)?.order(Order::ByPosition);
    let weights = Tensor::ones((1, 4), DType::F32, device)?;
    let chosen = index_topk(
        &q,
        &IndexKeys::packed(&flat),
        &weights,
        &visible,
        &top,
        1 << 30,
    )?;
    let near = IndexKeys::packed(&tail.squeeze(1)?);
    let near = index_topk(&q, &near, &weights, &Visible::all(), &top, 1 << 30)?;
    let positions = |t: &Tensor| t.to_device(&Device::Cpu)?.flatten_all()?.to_vec1::<u32>();
    let moved: Vec<u32> = positions(&near.positions)?
        .into_iter()
        .map(|p| p + length as u32 - 64)
        .collect();
    assert_eq!(positions(&chosen.positions)?, moved);
    Ok(())
}
