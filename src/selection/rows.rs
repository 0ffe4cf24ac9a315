//! The door: shapes, dtypes and layouts of scores and bounds, checked once.

use super::OP;
use candle_core::{bail, DType, Layout, Result, Tensor};

/// The bounds of each row: its scores are at positions `[start, end)`.
///
/// Either may be left out: a row then starts at 0, or ends at N. The tensors are I32, I64 or U32
/// `[M]` on the scores' device, with any stride. They are read on the device when the selection
/// runs, clamped to `[0, N]`; U32 from 2^31 up count as negative. An end at or before its start is an
/// empty row.
#[derive(Debug, Clone, Copy, Default)]
pub struct Bounds<'a> {
    pub(super) start: Option<&'a Tensor>,
    pub(super) end: Option<&'a Tensor>,
}

impl<'a> Bounds<'a> {
    /// Every row is N scores long.
    pub fn full() -> Self {
        Self::default()
    }

    /// Rows from 0 to `end`.
    pub fn ends(end: &'a Tensor) -> Self {
        Self {
            start: None,
            end: Some(end),
        }
    }

    /// Rows from `start` to `end`.
    pub fn new(start: &'a Tensor, end: &'a Tensor) -> Self {
        Self {
            start: Some(start),
            end: Some(end),
        }
    }

    /// The same with rows that begin at `start`.
    pub fn with_start(self, start: &'a Tensor) -> Self {
        Self {
            start: Some(start),
            ..self
        }
    }

    pub(super) fn check(&self, rows: &Rows, scores: &Tensor) -> Result<()> {
        for (name, bound) in [("start", self.start), ("end", self.end)] {
            let Some(bound) = bound else { continue };
            check_bound(name, bound.layout(), bound.dtype(), rows)?;
            if !scores.device().same_device(bound.device()) {
                bail!(
                    "{OP}: scores are on {:?} and the rows' {name} on {:?}, they must be on one device",
                    scores.device().location(),
                    bound.device().location()
                )
            }
        }
        Ok(())
    }
}

/// Checks one bound of all rows.
pub(super) fn check_bound(name: &str, layout: &Layout, dtype: DType, rows: &Rows) -> Result<()> {
    let known = matches!(dtype, DType::I32 | DType::I64 | DType::U32);
    let fits = layout.dims() == [rows.count] || (rows.single && layout.dims().is_empty());
    if !known || !fits {
        bail!(
            "{OP}: the rows' {name} is {dtype:?} {:?}, I32, I64 or U32 [{}] is needed",
            layout.dims(),
            rows.count
        )
    }
    Ok(())
}

/// The rows of a scores tensor: `[N]` is one row, `[M, N]` are M.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Rows {
    pub count: usize,
    pub width: usize,
    /// Elements from the start of one row to the next.
    pub pitch: usize,
    pub start: usize,
    /// Whether the scores were `[N]`: the outputs then have no row dimension either.
    pub single: bool,
}

impl Rows {
    pub fn of(layout: &Layout, dtype: DType) -> Result<Self> {
        if !matches!(dtype, DType::F32 | DType::F16 | DType::BF16) {
            bail!("{OP}: scores are {dtype:?}, F32, F16 or BF16 is needed")
        }
        let (count, width, pitch, last, single) = match (layout.dims(), layout.stride()) {
            ([n], [s]) => (1, *n, 0, *s, true),
            ([m, n], [r, s]) => (*m, *n, *r, *s, false),
            (dims, _) => bail!("{OP}: scores have shape {dims:?}, [N] or [M, N] is needed"),
        };
        check_size(count, width)?;
        if last != 1 && width > 1 {
            bail!("{OP}: the last dimension of the scores has stride {last}, it must be dense (stride 1); call contiguous() first")
        }
        Ok(Self {
            count,
            width,
            pitch,
            start: layout.start_offset(),
            single,
        })
    }

    /// The output shape with one value a row, or with `extra` values a row.
    pub fn shape(&self, extra: Option<usize>) -> candle_core::Shape {
        let count = (!self.single).then_some(self.count);
        count.into_iter().chain(extra).collect::<Vec<_>>().into()
    }
}

/// Checks the size of a batch of rows.
pub(super) fn check_size(count: usize, width: usize) -> Result<()> {
    // Kernels hold positions, a tile beyond the row included, in an i32.
    if width == 0 || width > i32::MAX as usize - (1 << 20) {
        bail!("{OP}: scores are {width} wide, 1 to 2^31 - 2^20 - 1 are supported")
    }
    // A grid is as long, and a row may take 16 blocks.
    if count > i32::MAX as usize / 16 {
        bail!("{OP}: scores have {count} rows, at most 2^27 - 1 are supported")
    }
    Ok(())
}
