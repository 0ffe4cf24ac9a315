//! Indexer scores on a CUDA device, and the bounds of their rows.

#[cfg(feature = "cuda")]
mod device;
#[cfg(not(feature = "cuda"))]
#[path = "indexer/no_cuda.rs"]
mod device;

#[cfg(feature = "cuda")]
pub(in super::super) use device::preload;
pub(in super::super) use device::{bounds, bounds_into, indexer_scores, indexer_scores_into};
