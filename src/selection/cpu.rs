//! The CPU backend: the contract, readably.

use super::rows::Rows;
use super::topk::{BoundsOf, Order};
use super::OP;
use crate::order::{rank, rank_key, rank_position, value};
use candle_core::{bail, CpuStorage, Layout, Result, WithDType};
use rayon::prelude::*;

/// Runs the body on scores of whatever dtype they have.
macro_rules! with_scores {
    ($storage:expr, |$slice:ident| $body:expr) => {
        match $storage {
            candle_core::CpuStorage::F32($slice) => $body,
            candle_core::CpuStorage::F16($slice) => $body,
            candle_core::CpuStorage::BF16($slice) => $body,
            _ => unreachable!("`Rows` has seen the dtype of the scores"),
        }
    };
}
pub(super) use with_scores;

/// Bounds of a batch.
pub(super) struct Bounds<'a>([Option<Bound<'a>>; 2]);

struct Bound<'a> {
    values: Integers<'a>,
    start: usize,
    stride: usize,
}

enum Integers<'a> {
    I32(&'a [i32]),
    I64(&'a [i64]),
    U32(&'a [u32]),
}

impl<'a> Bounds<'a> {
    pub fn new(bounds: BoundsOf<'a, CpuStorage>) -> Result<Self> {
        let [start, end] = bounds;
        let read = |bound: Option<(&'a CpuStorage, &'a Layout)>| match bound {
            Some((storage, layout)) => Bound::new(storage, layout).map(Some),
            None => Ok(None),
        };
        Ok(Self([read(start)?, read(end)?]))
    }

    /// The bounds of a row, inside `[0, width]`, the end not before the start.
    fn of(&self, row: usize, width: usize) -> (usize, usize) {
        let [start, end] = &self.0;
        let clamp = |bound: &Bound| bound.at(row).clamp(0, width as i64) as usize;
        let start = start.as_ref().map_or(0, clamp);
        let end = end.as_ref().map_or(width, clamp);
        (start, end.max(start))
    }
}

impl<'a> Bound<'a> {
    fn new(storage: &'a CpuStorage, layout: &Layout) -> Result<Self> {
        let values = match storage {
            CpuStorage::I32(values) => Integers::I32(values),
            CpuStorage::I64(values) => Integers::I64(values),
            CpuStorage::U32(values) => Integers::U32(values),
            _ => bail!("{OP}: the rows' bounds are neither I32 nor I64 nor U32"),
        };
        Ok(Self {
            values,
            start: layout.start_offset(),
            stride: layout.stride().first().copied().unwrap_or(0),
        })
    }

    fn at(&self, row: usize) -> i64 {
        let i = self.start + row * self.stride;
        match self.values {
            Integers::I32(values) => values[i].into(),
            Integers::I64(values) => values[i],
            // From 2^31 up: a negative number that was stored as unsigned.
            Integers::U32(values) => (values[i] as i32).into(),
        }
    }
}

/// Where a batch's results go, row after row.
pub(super) struct Outputs<'a> {
    pub positions: &'a mut [u32],
    pub counts: &'a mut [u32],
    pub values: Option<&'a mut [f32]>,
}

pub(super) fn select<T: WithDType>(
    k: usize,
    order: Order,
    data: &[T],
    rows: &Rows,
    bounds: &Bounds,
    out: Outputs,
) {
    let one = |row: usize, positions: &mut [u32], count: &mut u32, values: Option<&mut [f32]>| {
        let (start, end) = bounds.of(row, rows.width);
        let first = rows.start + row * rows.pitch;
        let ranks = best(k, order, &data[first..first + rows.width], start, end);
        *count = ranks.len() as u32;
        positions.fill(u32::MAX);
        for (to, &rank) in positions.iter_mut().zip(&ranks) {
            *to = rank_position(rank);
        }
        if let Some(values) = values {
            values.fill(f32::NEG_INFINITY);
            for (to, &rank) in values.iter_mut().zip(&ranks) {
                *to = value(rank_key(rank));
            }
        }
    };
    let positions = out.positions.par_chunks_mut(k);
    let counts = out.counts.par_iter_mut();
    match out.values {
        None => positions
            .zip(counts)
            .enumerate()
            .for_each(|(row, (positions, count))| one(row, positions, count, None)),
        Some(values) => positions
            .zip(counts)
            .zip(values.par_chunks_mut(k))
            .enumerate()
            .for_each(|(row, ((positions, count), values))| {
                one(row, positions, count, Some(values))
            }),
    }
}

/// The ranks of the `k` best of `[start, end)`, in order.
fn best<T: WithDType>(k: usize, order: Order, row: &[T], start: usize, end: usize) -> Vec<u64> {
    let scores = row[start..end].iter().enumerate();
    let mut ranks: Vec<u64> = scores
        .map(|(i, x)| rank(x.to_f64() as f32, (start + i) as u32))
        .collect();
    if ranks.len() > k {
        ranks.select_nth_unstable_by(k - 1, |a, b| b.cmp(a));
        ranks.truncate(k);
    }
    match order {
        Order::ByValue => ranks.sort_unstable_by(|a, b| b.cmp(a)),
        Order::Unordered | Order::ByPosition => {
            ranks.sort_unstable_by_key(|&rank| rank_position(rank))
        }
    }
    ranks
}
