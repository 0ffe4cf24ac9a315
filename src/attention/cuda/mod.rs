//! Tensors on a CUDA device.

pub(super) mod dsa;
mod indexer;
#[cfg(feature = "cuda")]
mod ints;
mod sparse;

#[cfg(feature = "cuda")]
pub(super) use indexer::preload as preload_indexer;
pub(super) use indexer::{bounds, bounds_into, indexer_scores, indexer_scores_into};
#[cfg(feature = "cuda")]
pub(super) use sparse::preload as preload_sparse;
pub(super) use sparse::{sparse_attention, sparse_attention_into, workspace_floats};
