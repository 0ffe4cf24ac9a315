//! The CUDA backend of a build without the feature `cuda`: errors that name the feature.

use super::super::super::indexer::{Rows, Scores};
use super::super::super::keys::Lengths;
use candle_core::{bail, CudaStorage, Result};

fn missing<T>(op: &str) -> Result<T> {
    bail!("{op}: the tensors are on a CUDA device, but candle-topk was built without its feature `cuda`; build with it, or move them with to_device")
}

pub(in super::super::super) fn bounds(
    _: &Lengths<CudaStorage>,
    _: usize,
) -> Result<(Option<CudaStorage>, CudaStorage)> {
    missing("visible keys")
}

pub(in super::super::super) fn bounds_into(
    _: &Lengths<CudaStorage>,
    _: usize,
    _: Option<(&mut CudaStorage, usize)>,
    _: (&mut CudaStorage, usize),
) -> Result<()> {
    missing("visible keys")
}

pub(in super::super::super) fn indexer_scores(_: &Scores<CudaStorage>) -> Result<CudaStorage> {
    missing("indexer_scores")
}

pub(in super::super::super) fn indexer_scores_into(
    _: &Scores<CudaStorage>,
    _: &mut CudaStorage,
    _: Rows,
) -> Result<()> {
    missing("indexer_scores")
}
