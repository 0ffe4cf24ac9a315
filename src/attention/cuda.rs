//! Tensors on a CUDA device, which these ops don't take.

use super::buffers::Workspace;
use super::indexer::{Rows, Scores};
use super::keys::Lengths;
use super::sparse::Attend;
use candle_core::{bail, CudaStorage, Layout, Result};

fn missing<T>(op: &str) -> Result<T> {
    bail!("{op}: the tensors are on a CUDA device, CPU ones are accepted; move them with to_device")
}

/// The starts, where there are any, and the ends of the rows: I64 `[S]` each.
pub(super) fn bounds(
    _: &Lengths<CudaStorage>,
    _: usize,
) -> Result<(Option<CudaStorage>, CudaStorage)> {
    missing("visible keys")
}

/// The same into I64 tensors that begin at these elements, dense.
pub(super) fn bounds_into(
    _: &Lengths<CudaStorage>,
    _: usize,
    _: Option<(&mut CudaStorage, usize)>,
    _: (&mut CudaStorage, usize),
) -> Result<()> {
    missing("visible keys")
}

/// Scores F32 `[S, T]`, dense, with -inf where a row doesn't see.
pub(super) fn indexer_scores(_: &Scores<CudaStorage>) -> Result<CudaStorage> {
    missing("indexer_scores")
}

/// Scores into rows of f32 that lie elsewhere; what a row doesn't see is left as it was.
pub(super) fn indexer_scores_into(
    _: &Scores<CudaStorage>,
    _: &mut CudaStorage,
    _: Rows,
) -> Result<()> {
    missing("indexer_scores")
}

/// The output `[S, Hq, Dv]` of the queries' dtype and the lse F32 `[S, Hq]`, both dense.
pub(super) fn sparse_attention(_: &Attend<CudaStorage>) -> Result<(CudaStorage, CudaStorage)> {
    missing("sparse_attention")
}

/// The same into tensors of these layouts.
pub(super) fn sparse_attention_into(
    _: &Attend<CudaStorage>,
    _: [(&mut CudaStorage, &Layout); 2],
    _: &mut Workspace,
) -> Result<()> {
    missing("sparse_attention")
}
