//! Sparse attention over positions that an indexer chooses (DeepSeek Sparse Attention).

mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(not(feature = "cuda"))]
#[path = "no_cuda.rs"]
mod cuda;
pub mod dsa;
mod indexer;
mod keys;
mod parts;
mod sparse;

pub use indexer::{index_topk, indexer_scores, indexer_scores_into, IndexKeys};
pub use keys::Visible;
pub use sparse::{Attention, KeyValues, SparseAttention, SparseAttentionOp, Values};

fn no_metal<T>(op: &str) -> candle_core::Result<T> {
    candle_core::bail!("{op}: Metal tensors are not supported, CPU and CUDA ones are; move the tensors with to_device")
}
