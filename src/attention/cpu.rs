//! The CPU backend: the contracts as code, and the oracle of the kernels.

use super::indexer::{Rows, Scores};
use super::keys::{Clamped, Locator, Places};
use super::parts::{Floats, Ints, Part};
use super::sparse::{Attend, Source};
use candle_core::{CpuStorage, Layout, Result};
use rayon::prelude::*;

/// Below this many products a task stays on its thread: to wake another takes longer.
const SERIAL: usize = 1 << 16;

/// `f` for every item, in parallel where the work is worth it.
fn for_each<T: Send>(
    items: impl Iterator<Item = T> + Send,
    products: usize,
    f: impl Fn(T) + Sync + Send,
) {
    if products <= SERIAL {
        items.for_each(f)
    } else {
        items.par_bridge().for_each(f)
    }
}

/// The dot product in f32, in an order that only the length decides: sixteen running sums, then
/// those two by two.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    const LANES: usize = 16;
    let mut sums = [0f32; LANES];
    let (a, b) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let rest: f32 = a
        .remainder()
        .iter()
        .zip(b.remainder())
        .map(|(a, b)| a * b)
        .sum();
    for (a, b) in a.zip(b) {
        for i in 0..LANES {
            sums[i] += a[i] * b[i];
        }
    }
    let mut half = LANES / 2;
    while half > 0 {
        for i in 0..half {
            sums[i] += sums[i + half];
        }
        half /= 2;
    }
    sums[0] + rest
}

/// Keys that one task scores.
const KEYS: usize = 2048;

/// Scores of what the rows see, into `out`.
pub(super) fn indexer_scores(
    request: &Scores<CpuStorage>,
    out: &mut [f32],
    rows: Rows,
) -> Result<()> {
    let (heads, dim) = (request.heads, request.dim);
    let places = request.located.places;
    let locator = Locator::new(&request.located)?;
    let bounds = Clamped::new(&request.bounded, places.length)?;
    let mut tasks = Vec::new();
    if places.length > 0 {
        let outputs = out[rows.start..].chunks_mut(rows.stride.max(places.length));
        for (row, out) in outputs.take(request.rows).enumerate() {
            let Some(sequence) = locator.sequence(row) else {
                continue;
            };
            let visible = bounds.row(row);
            let first = visible.start;
            for (chunk, out) in out[visible].chunks_mut(KEYS).enumerate() {
                tasks.push((row, sequence, first + chunk * KEYS, out));
            }
        }
    }
    let products = tasks.iter().map(|task| task.3.len()).sum::<usize>() * heads * dim;

    let queries = Floats::new(request.q.storage);
    let query = request.q.layout;
    let keys = Floats::new(request.keys.storage);
    let key_start = request.keys.layout.start_offset();
    let key_strides = places.strides(request.keys.layout.stride());
    let scales = match &request.scales {
        None => None,
        Some(scales) => Some((
            &scales.storage.as_slice::<f32>()?[scales.layout.start_offset()..],
            places.strides(scales.layout.stride()),
        )),
    };
    let weights = request.weights.storage.as_slice::<f32>()?;
    let weight = request.weights.layout;
    for_each(
        tasks.into_iter(),
        products,
        |(row, sequence, first, out)| {
            let mut q = vec![0f32; heads * dim];
            let mut w = vec![0f32; heads];
            for (head, (q, w)) in q.chunks_mut(dim).zip(&mut w).enumerate() {
                queries.copy(
                    query.start_offset() + row * query.stride()[0] + head * query.stride()[1],
                    q,
                );
                *w = weights
                    [weight.start_offset() + row * weight.stride()[0] + head * weight.stride()[1]];
            }
            let mut buffer = vec![0f32; dim];
            for (position, score) in (first..).zip(out) {
                let Some(at) = locator.at(sequence, position, key_strides) else {
                    *score = f32::NEG_INFINITY;
                    continue;
                };
                let key = keys.read(key_start + at, &mut buffer);
                let mut sum = 0f32;
                for (q, w) in q.chunks(dim).zip(&w) {
                    sum += w * relu(dot(q, key));
                }
                *score = match scales {
                    None => sum,
                    Some((scales, strides)) => {
                        let at = locator.at(sequence, position, strides);
                        sum * scales[at.expect("the page exists")]
                    }
                };
            }
        },
    );
    Ok(())
}

/// NaN stays NaN, as in the frameworks that models are trained in.
fn relu(x: f32) -> f32 {
    if x < 0.0 {
        0.0
    } else {
        x
    }
}

/// Heads that one task attends with: they read a key once.
const HEADS: usize = 16;

/// Keys or values with what finds a vector of them.
struct Vectors<'a> {
    floats: Floats<'a>,
    start: usize,
    strides: [usize; 2],
    head: usize,
}

impl<'a> Vectors<'a> {
    fn new(part: &Part<'a, CpuStorage>, places: &Places) -> Self {
        let strides = part.layout.stride();
        Self {
            floats: Floats::new(part.storage),
            start: part.layout.start_offset(),
            strides: places.strides(strides),
            head: strides[strides.len() - 2],
        }
    }
}

/// The keys that a list of positions names to a row, in its order.
struct Attended<'a> {
    locator: Locator<'a>,
    bounds: Clamped<'a>,
    positions: &'a [u32],
    first: usize,
    strides: [usize; 3],
    counts: Option<Ints<'a>>,
    width: usize,
    block: usize,
    length: usize,
}

impl<'a> Attended<'a> {
    fn new(request: &Attend<'a, CpuStorage>) -> Result<Self> {
        let length = request.located.places.length;
        Ok(Self {
            locator: Locator::new(&request.located)?,
            bounds: Clamped::new(&request.bounded, length)?,
            positions: match request.positions.source {
                Source::Storage(storage) => storage.as_slice::<u32>()?,
                Source::Buffer(buffer) => buffer.as_cpu(),
            },
            first: request.positions.start,
            strides: request.positions.strides,
            counts: request.counts.as_ref().map(Ints::new).transpose()?,
            width: request.dims.width,
            block: request.dims.block,
            length,
        })
    }

    /// Sequences and positions of the keys.
    fn of(&self, row: usize, list: usize) -> Vec<(usize, usize)> {
        let Some(sequence) = self.locator.sequence(row) else {
            return Vec::new();
        };
        let visible = self.bounds.row(row);
        let width = match &self.counts {
            None => self.width,
            Some(counts) => counts.get(row, 0).clamp(0, self.width as i64) as usize,
        };
        let strides = self.strides;
        let first = self.first + row * strides[0] + list * strides[1];
        let mut keys = Vec::with_capacity((width * self.block).min(visible.len()));
        for entry in 0..width {
            let position = self.positions[first + entry * strides[2]];
            if position == u32::MAX {
                continue;
            }
            let from = position as usize * self.block;
            let block = from.max(visible.start)..(from + self.block).min(visible.end);
            keys.extend(block.map(|position| (sequence, position)));
        }
        debug_assert!(keys.iter().all(|&(_, position)| position < self.length));
        keys
    }
}

/// The output `[S, Hq, Dv]` and the lse `[S, Hq]`, dense and in f32.
pub(super) fn sparse_attention(request: &Attend<CpuStorage>) -> Result<(Vec<f32>, Vec<f32>)> {
    let dims = request.dims;
    let places = request.located.places;
    let mut out = vec![0f32; dims.rows * dims.heads * dims.value_dim];
    let mut lse = vec![f32::NEG_INFINITY; dims.rows * dims.heads];
    let attended = Attended::new(request)?;
    let keys = Vectors::new(&request.keys, &places);
    let values = Vectors::new(request.values.as_ref().unwrap_or(&request.keys), &places);
    let queries = Floats::new(request.q.storage);
    let query = request.q.layout;
    let sink = match &request.sink {
        None => None,
        Some(sink) => Some((
            &sink.storage.as_slice::<f32>()?[sink.layout.start_offset()..],
            sink.layout.stride()[0],
        )),
    };

    let group = dims.heads / dims.kv_heads;
    let mut tasks = Vec::new();
    let groups = out
        .chunks_mut(group * dims.value_dim)
        .zip(lse.chunks_mut(group));
    for (i, (out, lse)) in groups.enumerate() {
        let (row, kv_head) = (i / dims.kv_heads, i % dims.kv_heads);
        let parts = out
            .chunks_mut(HEADS * dims.value_dim)
            .zip(lse.chunks_mut(HEADS));
        for (part, (out, lse)) in parts.enumerate() {
            let head = kv_head * group + part * HEADS;
            tasks.push((row, kv_head, head, out, lse));
        }
    }
    let products = dims.rows * dims.heads * dims.width * dims.block;
    let products = products * (dims.key_dim + dims.value_dim);
    for_each(tasks.into_iter(), products, |task| {
        let (row, kv_head, first_head, out, lse) = task;
        let list = if dims.lists == 1 { 0 } else { kv_head };
        let vector = |vectors: &Vectors, sequence, position| {
            let at = attended.locator.at(sequence, position, vectors.strides)?;
            Some(vectors.start + at + kv_head * vectors.head)
        };
        let attended_keys: Vec<(usize, usize)> = attended
            .of(row, list)
            .into_iter()
            .filter_map(|(sequence, position)| {
                let key = vector(&keys, sequence, position)?;
                Some((key, vector(&values, sequence, position)?))
            })
            .collect();
        let count = attended_keys.len();
        if count == 0 {
            return;
        }
        let heads = lse.len();
        let mut q = vec![0f32; heads * dims.key_dim];
        for (i, q) in q.chunks_mut(dims.key_dim).enumerate() {
            let head = first_head + i;
            let strides = query.stride();
            queries.copy(
                query.start_offset() + row * strides[0] + head * strides[1],
                q,
            );
        }
        let mut weights = vec![0f32; heads * count];
        let mut buffer = vec![0f32; dims.key_dim.max(dims.value_dim)];
        for (i, &(at, _)) in attended_keys.iter().enumerate() {
            let key = keys.floats.read(at, &mut buffer[..dims.key_dim]);
            for (head, q) in q.chunks(dims.key_dim).enumerate() {
                weights[head * count + i] = request.scale * dot(q, key);
            }
        }
        let mut shares = vec![0f32; heads];
        for (head, scores) in weights.chunks_mut(count).enumerate() {
            let sink = sink.map(|(sink, stride)| sink[(first_head + head) * stride]);
            (lse[head], shares[head]) = softmax(scores, sink);
        }
        for (i, &(_, at)) in attended_keys.iter().enumerate() {
            let value = values.floats.read(at, &mut buffer[..dims.value_dim]);
            for (head, out) in out.chunks_mut(dims.value_dim).enumerate() {
                let weight = weights[head * count + i];
                for (out, value) in out.iter_mut().zip(value) {
                    *out += weight * value;
                }
            }
        }
        for ((out, &share), &lse) in out.chunks_mut(dims.value_dim).zip(&shares).zip(&*lse) {
            if lse == f32::NEG_INFINITY {
                // No score above -inf: there is nothing to attend to.
                out.fill(0.0);
            } else {
                out.iter_mut().for_each(|out| *out *= share);
            }
        }
    });
    Ok((out, lse))
}

/// Turns scores into exponentials relative to the greatest. The lse, and what the sum over values
/// is to be multiplied by.
fn softmax(scores: &mut [f32], sink: Option<f32>) -> (f32, f32) {
    if scores.iter().any(|x| x.is_nan()) {
        scores.fill(f32::NAN);
        return (f32::NAN, f32::NAN);
    }
    let max = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    if max == f32::NEG_INFINITY {
        scores.fill(0.0);
        return (max, 0.0);
    }
    let mut sum = 0f32;
    for x in scores.iter_mut() {
        *x = (*x - max).exp();
        sum += *x;
    }
    let lse = if max == f32::INFINITY {
        max
    } else {
        max + sum.ln()
    };
    let all = sum + sink.map_or(0.0, |sink| (sink - max).exp());
    (lse, 1.0 / all)
}

/// Copies dense data to where a layout says.
pub(super) fn store(data: CpuStorage, to: &mut CpuStorage, layout: &Layout) {
    fn copy<T: Copy>(data: &[T], to: &mut [T], layout: &Layout) {
        for (i, &x) in data.iter().enumerate() {
            let (mut rest, mut at) = (i, layout.start_offset());
            for (&dim, &stride) in layout.dims().iter().zip(layout.stride()).rev() {
                at += rest % dim * stride;
                rest /= dim;
            }
            to[at] = x;
        }
    }
    match (data, to) {
        (CpuStorage::F32(data), CpuStorage::F32(to)) => copy(&data, to, layout),
        (CpuStorage::F16(data), CpuStorage::F16(to)) => copy(&data, to, layout),
        (CpuStorage::BF16(data), CpuStorage::BF16(to)) => copy(&data, to, layout),
        _ => unreachable!("both are of the dtype of the queries"),
    }
}
