//! Tensors on a CUDA device.

mod indexer;
mod sparse;

#[cfg(feature = "cuda")]
pub(super) use indexer::preload as preload_indexer;
pub(super) use indexer::{bounds, bounds_into, indexer_scores, indexer_scores_into, to_fp8};
pub(super) use sparse::{sparse_attention, sparse_attention_into};

use candle_core::{bail, Result};

fn missing<T>(op: &str) -> Result<T> {
    bail!("{op}: the tensors are on a CUDA device, CPU ones are accepted; move them with to_device")
}
