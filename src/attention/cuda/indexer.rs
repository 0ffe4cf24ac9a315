//! Indexer scores on a CUDA device, and the bounds of their rows.

use super::super::indexer::{Rows, Scores};
use super::super::keys::Lengths;
use super::missing;
use candle_core::{CudaStorage, Result};

/// The starts, where there are any, and the ends of the rows: I64 `[S]` each.
pub(in super::super) fn bounds(
    _: &Lengths<CudaStorage>,
    _: usize,
) -> Result<(Option<CudaStorage>, CudaStorage)> {
    missing("visible keys")
}

/// The same into I64 tensors that begin at these elements, dense.
pub(in super::super) fn bounds_into(
    _: &Lengths<CudaStorage>,
    _: usize,
    _: Option<(&mut CudaStorage, usize)>,
    _: (&mut CudaStorage, usize),
) -> Result<()> {
    missing("visible keys")
}

/// Scores F32 `[S, T]`, dense, with -inf where a row doesn't see.
pub(in super::super) fn indexer_scores(_: &Scores<CudaStorage>) -> Result<CudaStorage> {
    missing("indexer_scores")
}

/// Scores into rows of f32 that lie elsewhere; what a row doesn't see is left as it was.
pub(in super::super) fn indexer_scores_into(
    _: &Scores<CudaStorage>,
    _: &mut CudaStorage,
    _: Rows,
) -> Result<()> {
    missing("indexer_scores")
}
