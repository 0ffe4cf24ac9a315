//! Attention over positions on a CUDA device.

use super::super::buffers::Workspace;
use super::super::sparse::Attend;
use super::missing;
use candle_core::{CudaStorage, Layout, Result};

/// The output `[S, Hq, Dv]` of the queries' dtype and the lse F32 `[S, Hq]`, both dense.
pub(in super::super) fn sparse_attention(
    _: &Attend<CudaStorage>,
) -> Result<(CudaStorage, CudaStorage)> {
    missing("sparse_attention")
}

/// The same into tensors of these layouts.
pub(in super::super) fn sparse_attention_into(
    _: &Attend<CudaStorage>,
    _: [(&mut CudaStorage, &Layout); 2],
    _: &mut Workspace,
) -> Result<()> {
    missing("sparse_attention")
}
