//! The CPU backend: the readable statement of the contract, and the oracle of the GPU tests.
//!
//! A kept set is always a prefix of the order of [`crate::order`], so it is described by where it
//! ends. Selection works on ranks, with a quickselect instead of a sort, and on few of them:
//! for top-k on the elements above a pivot taken from a sample of the row (Qrita's truncation,
//! section 3.1; all of them where those are fewer than k), for top-p on the bin of a histogram that
//! the nucleus ends in.

use super::philox;
use super::sample::{Draw, DrawOperand};
use super::softmax::{self, Softmax};
use super::truncation::{row_and_column, Mass, Operand, RowTruncation, Rows, Truncation, PACKED};
use crate::order::{self, rank, rank_key, rank_position};
use candle_core::{CpuStorage, Result};
use half::{bf16, f16, slice::HalfFloatSliceExt};
use rayon::prelude::*;
use std::borrow::Cow;

/// A dtype that logits come in, widened exactly to f32.
pub(crate) trait Logit: candle_core::WithDType + Send + Sync {
    const NEG_INFINITY: Self;
    fn widen(row: &[Self]) -> Cow<'_, [f32]>;
}

impl Logit for f32 {
    const NEG_INFINITY: Self = f32::NEG_INFINITY;
    fn widen(row: &[Self]) -> Cow<'_, [f32]> {
        row.into()
    }
}

impl Logit for f16 {
    const NEG_INFINITY: Self = f16::NEG_INFINITY;
    fn widen(row: &[Self]) -> Cow<'_, [f32]> {
        row.to_f32_vec().into()
    }
}

impl Logit for bf16 {
    const NEG_INFINITY: Self = bf16::NEG_INFINITY;
    fn widen(row: &[Self]) -> Cow<'_, [f32]> {
        row.to_f32_vec().into()
    }
}

/// What a look at the whole row says.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Summary {
    /// The rank of the best element above -inf, if any.
    pub best: Option<u64>,
    /// How many elements are above -inf.
    pub numbers: usize,
    pub has_nan: bool,
    pub has_infinity: bool,
}

impl Summary {
    pub fn of(row: &[f32]) -> Self {
        /// Independent lanes, so that the compiler uses vectors.
        const LANES: usize = 16;
        let parts = in_chunks(row, |start, chunk| {
            let mut max = [f32::NEG_INFINITY; LANES];
            let (mut numbers, mut nans) = ([0u32; LANES], [0u32; LANES]);
            for elements in chunk.chunks(LANES) {
                for (j, &x) in elements.iter().enumerate() {
                    max[j] = if x > max[j] { x } else { max[j] };
                    numbers[j] += (x > f32::NEG_INFINITY) as u32;
                    nans[j] += x.is_nan() as u32;
                }
            }
            let max = max.into_iter().fold(f32::NEG_INFINITY, f32::max);
            let sum = |lanes: [u32; LANES]| lanes.into_iter().sum::<u32>() as usize;
            (start, chunk, max, sum(numbers), sum(nans))
        });
        let max = parts.iter().map(|p| p.2).fold(f32::NEG_INFINITY, f32::max);
        let best = (max > f32::NEG_INFINITY).then(|| {
            parts
                .iter()
                .filter(|p| p.2 == max)
                .find_map(|(start, chunk, ..)| {
                    let at = chunk.iter().position(|&x| x == max)?;
                    Some(rank(max, (start + at) as u32))
                })
                .expect("the maximum is an element")
        });
        Summary {
            best,
            numbers: parts.iter().map(|p| p.3).sum(),
            has_nan: parts.iter().any(|p| p.4 > 0),
            has_infinity: max == f32::INFINITY,
        }
    }
}

/// Where a kept set ends: what is above `edge` belongs to it, and what equals it at a position
/// below `end`.
#[derive(Debug, Clone, Copy)]
struct Cut {
    edge: f32,
    end: u32,
}

impl Cut {
    /// Everything above -inf.
    const NONE: Self = Self {
        edge: f32::NEG_INFINITY,
        end: 0,
    };

    /// Everything down to this element.
    fn at(rank: u64) -> Self {
        Self {
            edge: order::value(rank_key(rank)),
            end: rank_position(rank) + 1,
        }
    }

    #[inline(always)]
    fn holds(&self, position: usize, x: f32) -> bool {
        (x > self.edge) | ((x == self.edge) & (position < self.end as usize))
    }
}

/// The kept set of a row.
#[derive(Debug, Clone)]
pub(crate) struct Kept {
    /// `None` is the empty set.
    cut: Option<Cut>,
    pub softmax: Softmax,
    /// The members' ranks in some order, where truncation has them at hand.
    members: Option<Vec<u64>>,
}

impl Kept {
    /// Truncates a row.
    pub fn of(row: &[f32], summary: &Summary, truncation: &RowTruncation, mass: Mass) -> Self {
        let Some(best) = summary.best else {
            return Self {
                cut: None,
                softmax: Softmax::new(0.0, 1.0),
                members: Some(vec![]),
            };
        };
        let softmax = Softmax::new(order::value(rank_key(best)), truncation.temperature);
        let mut kept = Self {
            cut: Some(Cut::NONE),
            softmax,
            members: None,
        };
        let top_k = truncation.top_k.map(|k| k as usize);
        match top_k.filter(|k| *k < summary.numbers) {
            Some(1) => {
                kept.cut = Some(Cut::at(best));
                kept.members = Some(vec![best]);
            }
            Some(k) => kept.top_k(row, k),
            None => {}
        }
        if let Some(p) = truncation.top_p {
            kept.top_p(row, p, mass);
        }
        if let Some(min_p) = truncation.min_p {
            kept.min_p(min_p, rank_key(best));
        }
        kept
    }

    /// Whether the element at `position` belongs to the set.
    #[inline(always)]
    pub fn holds(&self, position: usize, x: f32) -> bool {
        self.cut.is_some_and(|cut| cut.holds(position, x))
    }

    /// The set's size and mass.
    pub fn count_and_mass(&self, row: &[f32]) -> (usize, u128) {
        if let Some(members) = &self.members {
            return (members.len(), mass_of(&self.softmax, members));
        }
        let parts = in_chunks(row, |start, chunk| {
            let holds = |i: usize, x: f32| self.holds(start + i, x);
            let count = chunk
                .iter()
                .enumerate()
                .filter(|(i, &x)| holds(*i, x))
                .count();
            (count, self.softmax.sum(chunk, holds))
        });
        parts
            .into_iter()
            .fold((0, 0), |(n, m), (dn, dm)| (n + dn, m + dm))
    }

    /// The positions of the members, ascending.
    pub fn positions(&self, row: &[f32]) -> Vec<u32> {
        match &self.members {
            Some(members) => {
                let mut positions: Vec<u32> = members.iter().map(|&r| rank_position(r)).collect();
                positions.sort_unstable();
                positions
            }
            None => (0..row.len() as u32)
                .filter(|&i| self.holds(i as usize, row[i as usize]))
                .collect(),
        }
    }

    /// The token that a 64-bit draw falls on: the CDF of the set inverted in token-id order.
    /// With it the log-probability over the set, in the bits of [`candidates`].
    pub fn token(&self, row: &[f32], draw: u64) -> Option<(u32, f32)> {
        let cut = self.cut?;
        let with_log_prob = |token: u32, total: u128| {
            let log_mass = softmax::to_f64(total).ln();
            let log_prob = self.softmax.log_weight(row[token as usize], log_mass);
            (token, log_prob)
        };
        if self.members.is_some() {
            let (_, total) = self.count_and_mass(row);
            let point = softmax::inverted(total, draw);
            let positions = self.positions(row);
            let token = self.walk(row, positions.into_iter(), 0, point)?;
            return Some(with_log_prob(token, total));
        }
        // By blocks, of which only the one that the point falls into is walked.
        const BLOCK: usize = 256;
        let masses = in_chunks(row, |start, chunk| -> Vec<u128> {
            let mass = |(b, block): (usize, &[f32])| {
                let start = start + b * BLOCK;
                self.softmax.sum(block, |i, x| cut.holds(start + i, x))
            };
            chunk.chunks(BLOCK).enumerate().map(mass).collect()
        })
        .concat();
        let total = masses.iter().sum();
        let point = softmax::inverted(total, draw);
        let mut before = 0;
        let block = masses.iter().position(|mass| {
            let falls = before + mass > point;
            before += if falls { 0 } else { *mass };
            falls
        })?;
        let ids = block * BLOCK..row.len().min((block + 1) * BLOCK);
        let members = ids.filter(|&i| cut.holds(i, row[i])).map(|i| i as u32);
        let token = self.walk(row, members, before, point)?;
        Some(with_log_prob(token, total))
    }

    /// The first of `members` at which the cumulative mass exceeds `point`.
    fn walk(
        &self,
        row: &[f32],
        mut members: impl Iterator<Item = u32>,
        mut before: u128,
        point: u128,
    ) -> Option<u32> {
        members.find(|&i| {
            before += self.softmax.mass(row[i as usize]) as u128;
            before > point
        })
    }

    /// Keeps the `k` first in the order; k is below the number of elements above -inf.
    fn top_k(&mut self, row: &[f32], k: usize) {
        let mut ranks = sampled_pivot(row, 2 * k)
            .map(|pivot| gather(row, |key| key >= pivot))
            .filter(|ranks| ranks.len() >= k)
            .unwrap_or_else(|| gather(row, |key| key > order::NEG_INFINITY_KEY));
        let (_, last, _) = ranks.select_nth_unstable_by(k - 1, |a, b| b.cmp(a));
        self.cut = Some(Cut::at(*last));
        ranks.truncate(k);
        self.members = Some(ranks);
    }

    /// Keeps the nucleus of mass `p` of what is kept so far.
    fn top_p(&mut self, row: &[f32], p: f32, mass: Mass) {
        let Some(members) = self.members.take() else {
            return self.nucleus_of_row(row, p);
        };
        let softmax = self.softmax;
        let kept = mass_of(&softmax, &members);
        let whole = match mass {
            Mass::Renormalized => kept,
            Mass::Joint => in_chunks(row, |_, chunk| softmax.sum(chunk, |_, _| true))
                .into_iter()
                .sum(),
        };
        let target = softmax::nucleus(p, whole);
        self.members = Some(if kept < target {
            members
        } else {
            let (last, members) = nucleus_of(&softmax, members, 0, target);
            self.cut = Some(Cut::at(last));
            members
        });
    }

    /// The nucleus of a row without a top-k: a histogram of its mass, by the upper bits of the
    /// keys, says in which bin the set ends, and what is in that bin is searched.
    fn nucleus_of_row(&mut self, row: &[f32], p: f32) {
        let histogram = Histogram::of(row, &self.softmax);
        let target = softmax::nucleus(p, histogram.mass.iter().sum());
        let (mut before, mut above) = (0, 0);
        let mut bin = BINS - 1;
        while before + histogram.mass[bin] < target {
            before += histogram.mass[bin];
            above += histogram.counts[bin];
            bin -= 1;
        }
        let bin = bin as u32;
        let count = above + histogram.counts[bin as usize];
        if count <= 4096 {
            // Few: all of them at once.
            let all = gather(row, |key| bin_of(key) >= bin);
            let (last, members) = nucleus_of(&self.softmax, all, 0, target);
            self.cut = Some(Cut::at(last));
            self.members = Some(members);
        } else {
            let inside = gather(row, |key| bin_of(key) == bin);
            let (last, _) = nucleus_of(&self.softmax, inside, before, target);
            self.cut = Some(Cut::at(last));
        }
    }

    /// Keeps what has at least `min_p` times the greatest probability.
    fn min_p(&mut self, min_p: f32, best: u32) {
        // By exponents: weights come to an end where exponents do not. They grow with the key, so
        // the least key that suffices is searched for without a look at the row. The best token
        // always does.
        let least = (min_p as f64).ln();
        let (mut low, mut high) = (order::NEG_INFINITY_KEY + 1, best);
        while low < high {
            let middle = low + (high - low) / 2;
            if self.softmax.exponent(order::value(middle)) as f64 >= least {
                high = middle;
            } else {
                low = middle + 1;
            }
        }
        let edge = order::value(low);
        if self.cut.is_some_and(|cut| cut.edge < edge) {
            let end = u32::MAX;
            self.cut = Some(Cut { edge, end });
            if let Some(members) = &mut self.members {
                members.retain(|&r| rank_key(r) >= low);
            }
        }
    }
}

/// The shortest prefix of `ranks` in the order whose mass, with that `before` them, reaches
/// `target`, and its last rank. The mass of all reaches it, and that before them does not.
fn nucleus_of(
    softmax: &Softmax,
    mut ranks: Vec<u64>,
    mut before: u128,
    target: u128,
) -> (u64, Vec<u64>) {
    // ranks[..from] is in the prefix; ranks[to..] is not.
    let (mut from, mut to) = (0, ranks.len());
    while to - from > 1 {
        let half = (to - from) / 2;
        ranks[from..to].select_nth_unstable_by(half - 1, |a, b| b.cmp(a));
        let upper = mass_of(softmax, &ranks[from..from + half]);
        if before + upper >= target {
            to = from + half;
        } else {
            from += half;
            before += upper;
        }
    }
    let last = ranks[from];
    ranks.truncate(to);
    (last, ranks)
}

fn mass_of(softmax: &Softmax, ranks: &[u64]) -> u128 {
    let mass = |&r: &u64| softmax.mass(order::value(rank_key(r))) as u128;
    ranks.iter().map(mass).sum()
}

const BINS: usize = 2048;

/// A bin of the histogram: sign, exponent and two bits of the fraction.
#[inline(always)]
fn bin_of(key: u32) -> u32 {
    key >> 21
}

/// The elements of a row by the upper bits of their keys.
struct Histogram {
    mass: Vec<u128>,
    counts: Vec<u32>,
}

impl Histogram {
    fn of(row: &[f32], softmax: &Softmax) -> Self {
        let mut parts = in_chunks(row, |_, chunk| {
            let mut part = Self {
                mass: vec![0; BINS],
                counts: vec![0; BINS],
            };
            let mut weights = [0f32; 256];
            for elements in chunk.chunks(weights.len()) {
                for (w, &x) in weights.iter_mut().zip(elements) {
                    *w = softmax.weight(x);
                }
                for (&w, &x) in weights.iter().zip(elements) {
                    let bin = bin_of(order::key(x)) as usize;
                    part.mass[bin] += softmax::mass(w) as u128;
                    part.counts[bin] += 1;
                }
            }
            part
        });
        let mut whole = parts.pop().expect("a row has an element");
        for part in parts {
            whole
                .mass
                .iter_mut()
                .zip(part.mass)
                .for_each(|(a, b)| *a += b);
            whole
                .counts
                .iter_mut()
                .zip(part.counts)
                .for_each(|(a, b)| *a += b);
        }
        whole
    }
}

/// A key that about `count` elements of the row reach, by an even sample of the row; `None` where
/// that is no small part of the row.
fn sampled_pivot(row: &[f32], count: usize) -> Option<u32> {
    const SAMPLE: usize = 2048;
    if row.len() < 4 * SAMPLE || count > row.len() / 4 {
        return None;
    }
    let stride = row.len() / SAMPLE;
    let mut sample: Vec<u32> = row.iter().step_by(stride).map(|&x| order::key(x)).collect();
    // Twice the expected rank and a few more: a miss costs more than a larger gather.
    let nth = (2 * count * sample.len() / row.len() + 8).min(sample.len() - 1);
    let (_, pivot, _) = sample.select_nth_unstable_by(nth, |a, b| b.cmp(a));
    (*pivot > order::NEG_INFINITY_KEY).then_some(*pivot)
}

/// The ranks of all elements whose keys `wanted` admits.
fn gather(row: &[f32], wanted: impl Fn(u32) -> bool + Sync) -> Vec<u64> {
    let parts = in_chunks(row, |start, chunk| {
        let mut ranks = Vec::new();
        for (i, &x) in chunk.iter().enumerate() {
            if wanted(order::key(x)) {
                ranks.push(rank(x, (start + i) as u32));
            }
        }
        ranks
    });
    parts.concat()
}

/// `f(start, chunk)` for consecutive chunks of a row, in parallel where the row is long.
fn in_chunks<'a, R: Send>(row: &'a [f32], f: impl Fn(usize, &'a [f32]) -> R + Sync) -> Vec<R> {
    /// A multiple of the block that tokens are found by.
    const CHUNK: usize = 16384;
    if row.len() <= 2 * CHUNK {
        row.chunks(CHUNK)
            .enumerate()
            .map(|(c, chunk)| f(c * CHUNK, chunk))
            .collect()
    } else {
        row.par_chunks(CHUNK)
            .enumerate()
            .map(|(c, chunk)| f(c * CHUNK, chunk))
            .collect()
    }
}

/// Runs `f` for the element type of CPU logits; [`super::truncation::Rows::of`] has refused others.
macro_rules! with_logits {
    ($op:expr, $storage:expr, |$slice:ident| $body:expr) => {
        match $storage {
            candle_core::CpuStorage::F32($slice) => $body,
            candle_core::CpuStorage::F16($slice) => $body,
            candle_core::CpuStorage::BF16($slice) => $body,
            other => candle_core::bail!("{}: logits are {:?}, F32, F16 or BF16 is needed", $op, {
                use candle_core::backend::BackendStorage;
                other.dtype()
            }),
        }
    };
}
pub(crate) use with_logits;

/// Parameters of a batch on the CPU.
pub(crate) struct Parameters<'a> {
    scalars: [f32; PACKED],
    /// The packed rows, their first element, and the strides of a row and of a column.
    rows: Option<(&'a [f32], usize, usize, usize)>,
    mass: Mass,
}

impl<'a> Parameters<'a> {
    pub fn new(operand: &Operand<'a, CpuStorage>) -> Result<Self> {
        let rows = match operand.rows {
            None => None,
            Some((storage, layout)) => {
                let (row, column) = row_and_column(layout);
                Some((
                    storage.as_slice::<f32>()?,
                    layout.start_offset(),
                    row,
                    column,
                ))
            }
        };
        Ok(Self {
            scalars: operand.scalars,
            rows,
            mass: operand.mass,
        })
    }

    /// Packed rows that lie one behind the other.
    pub fn packed(rows: &'a [f32], mass: Mass) -> Self {
        Self {
            scalars: Truncation::default().packed(),
            rows: Some((rows, 0, PACKED, 1)),
            mass,
        }
    }

    fn row(&self, b: usize) -> RowTruncation {
        RowTruncation::from_packed(match self.rows {
            None => self.scalars,
            Some((data, start, row, column)) => {
                std::array::from_fn(|c| data[start + b * row + c * column])
            }
        })
    }
}

/// The draws of a batch on the CPU: 64 bits for each row.
pub(crate) enum Draws<'a> {
    One(u64),
    /// Seed and step: the data, its first element, and the strides of a row and of a column.
    Counters(&'a [i64], usize, usize, usize),
    Bits(&'a [u32], usize, usize),
}

impl<'a> Draws<'a> {
    pub fn new(operand: &DrawOperand<'a, CpuStorage>) -> Result<Self> {
        Ok(match operand {
            DrawOperand::One(draw) => Self::One(draw.bits()),
            DrawOperand::Rows(CpuStorage::I64(data), layout) => {
                let (row, column) = row_and_column(layout);
                Self::Counters(data, layout.start_offset(), row, column)
            }
            DrawOperand::Rows(storage, layout) => {
                let stride = layout.stride().first().copied().unwrap_or(0);
                Self::Bits(storage.as_slice::<u32>()?, layout.start_offset(), stride)
            }
        })
    }

    fn row(&self, b: usize) -> u64 {
        match *self {
            Self::One(bits) => bits,
            Self::Counters(data, start, row, column) => {
                let at = start + b * row;
                philox::draw(data[at], data[at + column])
            }
            Self::Bits(data, start, stride) => Draw::Bits(data[start + b * stride]).bits(),
        }
    }
}

/// `f` for every row, in parallel. A single row stays on this thread: to wake another takes longer
/// than a short row.
fn for_each_row<T: Send>(
    rows: impl ExactSizeIterator<Item = T> + Send,
    f: impl Fn(T) + Sync + Send,
) {
    if rows.len() == 1 {
        rows.for_each(f)
    } else {
        rows.par_bridge().for_each(f)
    }
}

/// One row of a batch.
fn row_of<'a, T>(data: &'a [T], rows: &Rows, b: usize) -> &'a [T] {
    &data[rows.start + b * rows.stride..][..rows.vocab]
}

fn kept_of(row: &[f32], b: usize, parameters: &Parameters) -> (Summary, Kept) {
    let summary = Summary::of(row);
    let kept = Kept::of(row, &summary, &parameters.row(b), parameters.mass);
    (summary, kept)
}

fn mask_row<T: Logit>(row: &mut [T], b: usize, parameters: &Parameters) {
    let wide = T::widen(row);
    let (_, kept) = kept_of(&wide, b, parameters);
    let wide = wide.into_owned();
    for (i, (out, x)) in row.iter_mut().zip(wide).enumerate() {
        if !kept.holds(i, x) {
            *out = T::NEG_INFINITY;
        }
    }
}

pub(crate) fn mask<T: Logit>(data: &[T], rows: &Rows, parameters: &Parameters) -> Vec<T> {
    let mut out = Vec::with_capacity(rows.batch * rows.vocab);
    for b in 0..rows.batch {
        out.extend_from_slice(row_of(data, rows, b));
    }
    for_each_row(out.chunks_mut(rows.vocab).enumerate(), |(b, row)| {
        mask_row(row, b, parameters)
    });
    out
}

pub(crate) fn mask_in_place<T: Logit>(data: &mut [T], rows: &Rows, parameters: &Parameters) {
    let each = data[rows.start..]
        .chunks_mut(rows.stride.max(rows.vocab))
        .take(rows.batch)
        .enumerate();
    for_each_row(each, |(b, row)| {
        mask_row(&mut row[..rows.vocab], b, parameters)
    });
}

/// Into rows that lie elsewhere.
pub(crate) fn mask_into<T: Logit>(
    data: &[T],
    rows: &Rows,
    parameters: &Parameters,
    out: &mut [T],
    out_rows: &Rows,
) {
    for b in 0..rows.batch {
        out[out_rows.start + b * out_rows.stride..][..rows.vocab]
            .copy_from_slice(row_of(data, rows, b));
    }
    mask_in_place(out, out_rows, parameters);
}

/// Ids, log-probabilities and counts of the kept sets.
pub(crate) fn candidates<T: Logit>(
    data: &[T],
    rows: &Rows,
    parameters: &Parameters,
    capacity: usize,
) -> (Vec<u32>, Vec<f32>, Vec<u32>) {
    let mut ids = vec![0; rows.batch * capacity];
    let mut log_probs = vec![0.0; rows.batch * capacity];
    let mut counts = vec![0u32; rows.batch];
    let out = (&mut ids[..], &mut log_probs[..], &mut counts[..]);
    candidates_into(data, rows, parameters, capacity, out);
    (ids, log_probs, counts)
}

/// The same into buffers of at least as many rows.
pub(crate) fn candidates_into<T: Logit>(
    data: &[T],
    rows: &Rows,
    parameters: &Parameters,
    capacity: usize,
    (ids, log_probs, counts): (&mut [u32], &mut [f32], &mut [u32]),
) {
    let outputs = ids
        .chunks_mut(capacity)
        .zip(log_probs.chunks_mut(capacity))
        .zip(counts);
    let each = outputs.take(rows.batch).enumerate();
    for_each_row(each, |(b, ((ids, log_probs), count))| {
        let row = T::widen(row_of(data, rows, b));
        let (_, kept) = kept_of(&row, b, parameters);
        let positions = kept.positions(&row);
        let (_, mass) = kept.count_and_mass(&row);
        let log_mass = softmax::to_f64(mass).ln();
        *count = positions.len() as u32;
        ids.fill(u32::MAX);
        log_probs.fill(f32::NEG_INFINITY);
        for ((id, log_prob), position) in ids.iter_mut().zip(log_probs).zip(positions) {
            *id = position;
            *log_prob = kept.softmax.log_weight(row[position as usize], log_mass);
        }
    });
}

/// What became of a row: its token, and what the logits held.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Drawn {
    /// `u32::MAX` where the row has none.
    pub token: u32,
    pub has_nan: bool,
    pub has_infinity: bool,
}

/// What became of each row, and its token's log-probability: -inf without a token.
pub(crate) fn sample<T: Logit>(
    data: &[T],
    rows: &Rows,
    parameters: &Parameters,
    draws: &Draws,
) -> (Vec<Drawn>, Vec<f32>) {
    let mut drawn = vec![Drawn::default(); rows.batch];
    let mut log_probs = vec![f32::NEG_INFINITY; rows.batch];
    let each = drawn.iter_mut().zip(&mut log_probs).enumerate();
    for_each_row(each, |(b, (drawn, log_prob))| {
        let row = T::widen(row_of(data, rows, b));
        let (summary, kept) = kept_of(&row, b, parameters);
        let (token, its_log_prob) = kept
            .token(&row, draws.row(b))
            .unwrap_or((u32::MAX, f32::NEG_INFINITY));
        *drawn = Drawn {
            token,
            has_nan: summary.has_nan,
            has_infinity: summary.has_infinity,
        };
        *log_prob = its_log_prob;
    });
    (drawn, log_probs)
}
