//! The CPU backend: the readable statement of the contract, and the oracle of the GPU tests.
//!
//! A kept set is always a prefix of the order of [`crate::order`], so it is described by the rank
//! of its last member. Selection works on ranks, with a quickselect instead of a sort, and first on
//! the elements above a pivot taken from a sample of the row (Qrita's truncation, section 3.1): the
//! rest of the row is looked at again only where those do not hold the set.

use super::philox;
use super::sample::{Draw, DrawOperand};
use super::softmax::{self, Softmax};
use super::truncation::{Mass, Operand, RowTruncation, Rows, PACKED};
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
        let parts = in_chunks(row, |start, chunk| {
            let (mut max, mut numbers, mut nans) = (f32::NEG_INFINITY, 0u32, 0u32);
            for &x in chunk {
                max = if x > max { x } else { max };
                numbers += (x > f32::NEG_INFINITY) as u32;
                nans += x.is_nan() as u32;
            }
            let best = chunk
                .iter()
                .position(|&x| numbers > 0 && x == max)
                .map(|i| rank(max, (start + i) as u32));
            Summary {
                best,
                numbers: numbers as usize,
                has_nan: nans > 0,
                has_infinity: max == f32::INFINITY,
            }
        });
        parts.into_iter().fold(Summary::default(), |a, b| Summary {
            best: a.best.max(b.best),
            numbers: a.numbers + b.numbers,
            has_nan: a.has_nan | b.has_nan,
            has_infinity: a.has_infinity | b.has_infinity,
        })
    }
}

/// The kept set of a row.
#[derive(Debug, Clone)]
pub(crate) struct Kept {
    /// The rank that the least member has, or a rank between it and the next: a member is what has
    /// this rank or a greater one. `None` is the empty set.
    cut: Option<u64>,
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
            cut: Some(order::LEAST_NUMBER),
            softmax,
            members: None,
        };
        let top_k = truncation.top_k.map(|k| k as usize);
        match top_k.filter(|k| *k < summary.numbers) {
            Some(1) => {
                kept.cut = Some(best);
                kept.members = Some(vec![best]);
            }
            Some(k) => kept.top_k(row, k),
            None => {}
        }
        if let Some(p) = truncation.top_p {
            kept.top_p(row, summary, p, mass);
        }
        if let Some(min_p) = truncation.min_p {
            kept.min_p(min_p, rank_key(best));
        }
        kept
    }

    /// Whether the element at `position` belongs to the set.
    #[inline(always)]
    pub fn holds(&self, position: usize, x: f32) -> bool {
        self.cut.is_some_and(|cut| rank(x, position as u32) >= cut)
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
    pub fn token(&self, row: &[f32], draw: u64) -> Option<u32> {
        self.cut?;
        if self.members.is_some() {
            let (_, total) = self.count_and_mass(row);
            let point = softmax::inverted(total, draw);
            let positions = self.positions(row);
            return self.walk(row, positions.into_iter(), 0, point);
        }
        let keeps_all = self.cut == Some(order::LEAST_NUMBER);
        let chunks = in_chunks(row, |start, chunk| {
            let mass = if keeps_all {
                // What is not above -inf weighs nothing.
                self.softmax.sum(chunk, |_, _| true)
            } else {
                self.softmax.sum(chunk, |i, x| self.holds(start + i, x))
            };
            (start, chunk.len(), mass)
        });
        let point = softmax::inverted(chunks.iter().map(|c| c.2).sum(), draw);
        let mut before = 0;
        for (start, len, mass) in chunks {
            if before + mass > point {
                let ids = (start as u32)..(start + len) as u32;
                let members = ids.filter(|&i| self.holds(i as usize, row[i as usize]));
                return self.walk(row, members, before, point);
            }
            before += mass;
        }
        None
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
            .map(|pivot| gather(row, pivot))
            .filter(|ranks| ranks.len() >= k)
            .unwrap_or_else(|| gather(row, f32::MIN));
        let (_, last, _) = ranks.select_nth_unstable_by(k - 1, |a, b| b.cmp(a));
        self.cut = Some(*last);
        ranks.truncate(k);
        self.members = Some(ranks);
    }

    /// Keeps the nucleus of mass `p` of what is kept so far.
    fn top_p(&mut self, row: &[f32], summary: &Summary, p: f32, mass: Mass) {
        let softmax = self.softmax;
        let whole_row = || -> u128 {
            in_chunks(row, |_, chunk| softmax.sum(chunk, |_, _| true))
                .into_iter()
                .sum()
        };
        let target = match (&self.members, mass) {
            (Some(members), Mass::Renormalized) => softmax::nucleus(p, mass_of(&softmax, members)),
            _ => softmax::nucleus(p, whole_row()),
        };
        let ranks = match self.members.take() {
            Some(members) if mass_of(&softmax, &members) < target => {
                self.members = Some(members);
                return;
            }
            Some(members) => members,
            None => sampled_pivot(row, summary.numbers / 16)
                .map(|pivot| gather(row, pivot))
                .filter(|ranks| mass_of(&softmax, ranks) >= target)
                .unwrap_or_else(|| gather(row, f32::MIN)),
        };
        let (cut, members) = nucleus_of(&softmax, ranks, target);
        self.cut = Some(cut);
        self.members = Some(members);
    }

    /// Keeps what has at least `min_p` times the greatest weight, which is 1.
    fn min_p(&mut self, min_p: f32, best: u32) {
        // The weight grows with the key, so the least key that weighs enough is searched for
        // without a look at the row. The best token always weighs enough.
        let (mut low, mut high) = (order::NEG_INFINITY_KEY + 1, best);
        while low < high {
            let middle = low + (high - low) / 2;
            if self.softmax.weight(order::value(middle)) >= min_p {
                high = middle;
            } else {
                low = middle + 1;
            }
        }
        let least = (low as u64) << 32;
        if self.cut.is_some_and(|cut| cut < least) {
            self.cut = Some(least);
            if let Some(members) = &mut self.members {
                members.retain(|&r| r >= least);
            }
        }
    }
}

/// The shortest prefix of `ranks` in the order whose mass reaches `target`, and its last rank.
/// The mass of all reaches it.
fn nucleus_of(softmax: &Softmax, mut ranks: Vec<u64>, target: u128) -> (u64, Vec<u64>) {
    // ranks[..from] is in the prefix, with this mass; ranks[to..] is not.
    let (mut from, mut to, mut mass) = (0, ranks.len(), 0u128);
    while to - from > 1 {
        let half = (to - from) / 2;
        ranks[from..to].select_nth_unstable_by(half - 1, |a, b| b.cmp(a));
        let upper = mass_of(softmax, &ranks[from..from + half]);
        if mass + upper >= target {
            to = from + half;
        } else {
            from += half;
            mass += upper;
        }
    }
    let cut = ranks[from];
    ranks.truncate(to);
    (cut, ranks)
}

fn mass_of(softmax: &Softmax, ranks: &[u64]) -> u128 {
    let mass = |&r: &u64| softmax.mass(order::value(rank_key(r))) as u128;
    ranks.iter().map(mass).sum()
}

/// A value that about `count` elements of the row reach, by an even sample of the row; `None` where
/// that is no small part of the row.
fn sampled_pivot(row: &[f32], count: usize) -> Option<f32> {
    const SAMPLE: usize = 2048;
    if row.len() < 4 * SAMPLE || count > row.len() / 4 {
        return None;
    }
    let stride = row.len() / SAMPLE;
    let mut sample: Vec<u32> = row.iter().step_by(stride).map(|&x| order::key(x)).collect();
    // Twice the expected rank and a few more: a miss costs more than a larger gather.
    let nth = (2 * count * sample.len() / row.len() + 8).min(sample.len() - 1);
    let (_, pivot, _) = sample.select_nth_unstable_by(nth, |a, b| b.cmp(a));
    (*pivot > order::NEG_INFINITY_KEY).then(|| order::value(*pivot))
}

/// The ranks of all elements that reach `pivot`, a number above -inf.
fn gather(row: &[f32], pivot: f32) -> Vec<u64> {
    let parts = in_chunks(row, |start, chunk| {
        let mut ranks = Vec::new();
        for (i, &x) in chunk.iter().enumerate() {
            if x >= pivot {
                ranks.push(rank(x, (start + i) as u32));
            }
        }
        ranks
    });
    parts.concat()
}

/// `f(start, chunk)` for consecutive chunks of a row, in parallel where the row is long.
fn in_chunks<R: Send>(row: &[f32], f: impl Fn(usize, &[f32]) -> R + Sync) -> Vec<R> {
    const CHUNK: usize = 8192;
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
                let (row, column) = match layout.stride() {
                    [column] => (0, *column),
                    [row, column] => (*row, *column),
                    _ => unreachable!("Rows::check_params admits rank 1 and 2"),
                };
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
                let (row, column) = match layout.stride() {
                    [column] => (0, *column),
                    [row, column] => (*row, *column),
                    _ => unreachable!("check_draws admits rank 1 and 2"),
                };
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
    out.par_chunks_mut(rows.vocab)
        .enumerate()
        .for_each(|(b, row)| mask_row(row, b, parameters));
    out
}

pub(crate) fn mask_in_place<T: Logit>(data: &mut [T], rows: &Rows, parameters: &Parameters) {
    data[rows.start..]
        .par_chunks_mut(rows.stride.max(rows.vocab))
        .take(rows.batch)
        .enumerate()
        .for_each(|(b, row)| mask_row(&mut row[..rows.vocab], b, parameters));
}

/// Ids, log-probabilities and counts of the kept sets.
pub(crate) fn candidates<T: Logit>(
    data: &[T],
    rows: &Rows,
    parameters: &Parameters,
    capacity: usize,
) -> (Vec<u32>, Vec<f32>, Vec<u32>) {
    let mut ids = vec![u32::MAX; rows.batch * capacity];
    let mut log_probs = vec![f32::NEG_INFINITY; rows.batch * capacity];
    let mut counts = vec![0u32; rows.batch];
    let outputs = ids
        .par_chunks_mut(capacity)
        .zip(log_probs.par_chunks_mut(capacity))
        .zip(&mut counts);
    outputs
        .enumerate()
        .for_each(|(b, ((ids, log_probs), count))| {
            let row = T::widen(row_of(data, rows, b));
            let (_, kept) = kept_of(&row, b, parameters);
            let positions = kept.positions(&row);
            let (_, mass) = kept.count_and_mass(&row);
            let log_mass = softmax::to_f64(mass).ln();
            *count = positions.len() as u32;
            for ((id, log_prob), position) in ids.iter_mut().zip(log_probs).zip(positions) {
                *id = position;
                *log_prob = kept.softmax.log_weight(row[position as usize], log_mass);
            }
        });
    (ids, log_probs, counts)
}

/// What became of a row: its token, and what the logits held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Drawn {
    /// `u32::MAX` where the row has none.
    pub token: u32,
    pub has_nan: bool,
    pub has_infinity: bool,
}

pub(crate) fn sample<T: Logit>(
    data: &[T],
    rows: &Rows,
    parameters: &Parameters,
    draws: &Draws,
) -> Vec<Drawn> {
    (0..rows.batch)
        .into_par_iter()
        .map(|b| {
            let row = T::widen(row_of(data, rows, b));
            let (summary, kept) = kept_of(&row, b, parameters);
            Drawn {
                token: kept.token(&row, draws.row(b)).unwrap_or(u32::MAX),
                has_nan: summary.has_nan,
                has_infinity: summary.has_infinity,
            }
        })
        .collect()
}
