//! The CUDA backend of a build without the feature `cuda`: errors that name the feature.

use super::super::super::buffers::Workspace;
use super::super::super::sparse::Attend;
use candle_core::{bail, CudaDevice, CudaStorage, Layout, Result};

fn missing<T>(op: &str) -> Result<T> {
    bail!("{op}: the tensors are on a CUDA device, but candle-topk was built without its feature `cuda`; build with it, or move them with to_device")
}

pub(in super::super::super) fn sparse_attention(
    _: &Attend<CudaStorage>,
) -> Result<(CudaStorage, CudaStorage)> {
    missing("sparse_attention")
}

pub(in super::super::super) fn sparse_attention_into(
    _: &Attend<CudaStorage>,
    _: [(&mut CudaStorage, &Layout); 2],
    _: &mut Workspace,
) -> Result<()> {
    missing("sparse_attention")
}

pub(in super::super::super) fn workspace_floats(_: &CudaDevice) -> Result<usize> {
    missing("attention workspace")
}
