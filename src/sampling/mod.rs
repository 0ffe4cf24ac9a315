//! Logits to kept sets, and kept sets to tokens: the ops [`mask`](fn@mask),
//! [`candidates`](fn@candidates) and [`sample`](fn@sample), and the drop-in [`LogitsProcessor`] on
//! them.
//!
//! | | same parameters for every row | per-row parameters |
//! |---|---|---|
//! | logits with all else at -inf | [`mask`](fn@mask), [`mask_into`], [`Mask`] | [`mask_rows`], [`mask_rows_into`], [`MaskRows`] |
//! | ids, log-probabilities, counts | [`candidates`](fn@candidates) | [`candidates_rows`], [`CandidateBuffers`] |
//! | tokens | [`sample`](fn@sample), [`sample_batch`], [`Sample`], [`SampleRows`] | [`sample_rows`], [`SampleRows`], [`SampleBuffers`] |
//! | tokens and their log-probabilities | [`sample_batch_with_log_probs`] | [`sample_rows_with_log_probs`], [`SampleBuffers`] |
//!
//! # Contract
//!
//! * **Exact.** Numbers are compared as numbers (-0 equals +0, subnormals count, NaN is below -inf
//!   and never kept), and equal logits are ordered by token id, the lower first. The kept set is
//!   the one that a stable sort gives; there is no tolerance and no iteration limit.
//! * **Deterministic.** The same row, parameters and draw give the same bits on every run, in any
//!   batch, at any place in it. Masses are integer sums, so no order of summation shows. The
//!   backends repeat one sequence of f32 operations, so CPU and CUDA keep the same sets and draw
//!   the same tokens.
//! * **Order.** Temperature, top-k, top-p, min-p: see [`Truncation`].
//! * **Special rows.** +inf logits share all the mass. A row with nothing above -inf keeps nothing:
//!   its token is `u32::MAX`. A bad row never changes another row.
//! * **Layouts.** Row stride and offset are free; the last dimension must be dense.
//! * **No allocation** where the name ends in `_into`: one launch that writes into the caller's
//!   tensor or into buffers at fixed addresses, without an upload, a readback or a
//!   synchronisation, so that a CUDA graph can hold it. No op needs a workspace: a row is worked
//!   on in the shared memory of its blocks.
//! * **Devices.** CPU, and CUDA with the feature `cuda`. The ops give an error elsewhere.

mod buffers;
mod candidates;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(not(feature = "cuda"))]
#[path = "no_cuda.rs"]
mod cuda;
mod mask;
mod philox;
mod processor;
mod repeat_penalty;
mod sample;
mod softmax;
mod truncation;

pub use buffers::{CandidateBuffers, Routes, SampleBuffers};
pub use candidates::{candidates, candidates_rows, Candidates};
pub use mask::{mask, mask_into, mask_rows, mask_rows_into, Mask, MaskRows};
pub use processor::LogitsProcessor;
pub use repeat_penalty::apply_repeat_penalty;
pub use sample::{
    sample, sample_batch, sample_batch_with_log_probs, sample_rows, sample_rows_with_log_probs,
    Draw, Sample, SampleRows,
};
pub use truncation::{pack_rows, Mass, Truncation};

fn no_metal<T>(op: &str) -> candle_core::Result<T> {
    candle_core::bail!("{op}: Metal tensors are not supported, CPU and CUDA ones are; move the logits with to_device")
}
