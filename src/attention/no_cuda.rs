//! The CUDA backend of a build without the feature `cuda`: errors that name the feature.

use super::buffers::Workspace;
use super::indexer::{Rows, Scores};
use super::keys::Lengths;
use super::sparse::Attend;
use candle_core::{bail, CudaDevice, CudaStorage, Layout, Result};

fn missing<T>(op: &str) -> Result<T> {
    bail!("{op}: q is on a CUDA device, but candle-topk was built without its feature `cuda`; build with it, or move the tensors with to_device")
}

pub(super) fn bounds(
    _: &Lengths<CudaStorage>,
    _: usize,
) -> Result<(Option<CudaStorage>, CudaStorage)> {
    missing("visible keys")
}

pub(super) fn bounds_into(
    _: &Lengths<CudaStorage>,
    _: usize,
    _: Option<(&mut CudaStorage, usize)>,
    _: (&mut CudaStorage, usize),
) -> Result<()> {
    missing("visible keys")
}

pub(super) fn indexer_scores(_: &Scores<CudaStorage>) -> Result<CudaStorage> {
    missing("indexer_scores")
}

pub(super) fn indexer_scores_into(
    _: &Scores<CudaStorage>,
    _: &mut CudaStorage,
    _: Rows,
) -> Result<()> {
    missing("indexer_scores")
}

pub(super) fn sparse_attention(_: &Attend<CudaStorage>) -> Result<(CudaStorage, CudaStorage)> {
    missing("sparse_attention")
}

pub(super) fn sparse_attention_into(
    _: &Attend<CudaStorage>,
    _: [(&mut CudaStorage, &Layout); 2],
    _: &mut Workspace,
) -> Result<()> {
    missing("sparse_attention")
}

pub(super) fn workspace_bytes(_: &CudaDevice) -> Result<usize> {
    missing("attention workspace")
}
