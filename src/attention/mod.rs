//! DeepSeek Sparse Attention: an indexer scores every key, the best K are selected, and attention
//! reads those alone.
//!
//! | step | allocating | into the caller's memory |
//! |---|---|---|
//! | scores of the lightning indexer | [`indexer_scores`] | [`indexer_scores_into`] |
//! | scores and selection, in chunks of rows | [`index_topk`] | [`index_topk_into`], [`IndexBuffers`] |
//! | attention over positions: MLA, MQA, GQA | [`SparseAttention::forward`], [`SparseAttentionOp`] | [`SparseAttention::forward_into`] |
//! | the layer of DeepSeek-V3.2 and GLM-5 | [`dsa::DsaAttention`] | [`dsa::DecodeGraph`], [`dsa::DsaAttention::decode_into`] |
//!
//! Positions are an ordinary U32 tensor between the steps: another layer's, a heuristic's or a
//! learned gate's do as well as the indexer's. Here a GQA model whose own queries and keys are the
//! indexer:
//!
//! ```
//! use candle_core::{DType, Device, Tensor};
//! use candle_topk::attention::{index_topk, IndexKeys, KeyValues, SparseAttention, Visible};
//! use candle_topk::selection::{Order, TopK};
//!
//! # fn main() -> candle_core::Result<()> {
//! let device = &Device::Cpu;
//! let (tokens, heads, dim) = (100, 8, 64);
//! let q = Tensor::randn(0f32, 1., (tokens, heads, dim), device)?;
//! let k = Tensor::randn(0f32, 1., (tokens, 1, dim), device)?;
//! let v = Tensor::randn(0f32, 1., (tokens, 1, dim), device)?;
//! let weights = Tensor::ones((tokens, heads), DType::F32, device)?;
//!
//! let ends = Tensor::arange(1u32, tokens as u32 + 1, device)?; // causal
//! let visible = Visible::between(None, Some(&ends));
//! let top = TopK::new(16)?.order(Order::ByPosition);
//! let keys = IndexKeys::packed(&k.squeeze(1)?);
//! let chosen = index_topk(&q, &keys, &weights, &visible, &top, 64 << 20)?;
//! let attention = SparseAttention::new((dim as f32).powf(-0.5)).with_visible(&visible);
//! let out = attention.forward(&q, &KeyValues::packed(&k, &v), &chosen.positions)?.out;
//! assert_eq!(out.dims(), [tokens, heads, dim]);
//! # Ok(())
//! # }
//! ```
//!
//! # Contract
//!
//! * **Ragged.** Every row of queries has bounds of its own ([`Visible`]): prefill of packed
//!   sequences, chunks of a prompt, decoding of several tokens of each sequence, padding rows. Keys
//!   lie packed, in a cache of a stretch for each sequence, or in pages.
//! * **Nothing invisible is read into a result**, whatever it holds: keys outside the bounds, unused
//!   parts of a cache and of its last page, pages that do not exist, sentinels among positions. A
//!   row that sees nothing gives 0, and an lse of -inf.
//! * **Exact and deterministic.** Selection is exact on the scores as computed, lowest positions
//!   first among equals; a row's result is a function of its own operands, the same on every run, in
//!   any batch, in any form of the cache; but for sums below 2^-126, which become 0 where segments are
//!   merged, and stay where a row has one.
//! * **No allocation** in the forms whose names end in `_into`, where bounds are tensors already: a
//!   CUDA graph can hold them. Lengths, bounds, tables and positions are read on the device.
//! * **Layouts.** Strides and offsets are free; last dimensions must be dense. Offsets are of 64
//!   bits.
//! * **Devices.** The CPU, in f32 whatever the dtype, and CUDA with the feature `cuda`. The ops give an
//!   error elsewhere. Results of one device are those of another up to rounding.

mod buffers;
mod cpu;
mod cuda;
pub mod dsa;
mod indexer;
mod keys;
mod parts;
mod sparse;

pub use buffers::{IndexBuffers, Workspace};
pub use indexer::{index_topk, index_topk_into, indexer_scores, indexer_scores_into, IndexKeys};
pub use keys::Visible;
pub use sparse::{Attention, KeyValues, Positions, SparseAttention, SparseAttentionOp, Values};

/// Loads all kernels for queries of this dtype.
#[cfg(feature = "cuda")]
pub(crate) fn preload(
    device: &candle_core::CudaDevice,
    dtype: candle_core::DType,
) -> candle_core::Result<()> {
    use candle_core::DType;
    if !matches!(dtype, DType::F32 | DType::F16 | DType::BF16 | DType::F8E4M3) {
        candle_core::bail!(
            "preload_attention: queries are {dtype:?}, F32, F16, BF16 or F8E4M3 is needed"
        )
    }
    cuda::preload_indexer(device, dtype)?;
    match dtype {
        // Of an indexer alone.
        DType::F8E4M3 => Ok(()),
        _ => {
            cuda::dsa::preload(device, dtype)?;
            cuda::preload_sparse(device, dtype)
        }
    }
}

fn no_metal<T>(op: &str) -> candle_core::Result<T> {
    candle_core::bail!(
        "{op}: the tensors are on a Metal device, CPU and CUDA ones are accepted; move them with to_device"
    )
}
