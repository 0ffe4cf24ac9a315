//! Exact top-k and top-p for [Candle](https://github.com/huggingface/candle), on the GPU.
//!
//! Candle's own sampler copies every logit to the CPU and sorts. This crate truncates and draws
//! where the logits are, exactly and deterministically. Change one import:
//!
//! ```diff
//! - use candle_transformers::generation::LogitsProcessor;
//! + use candle_topk::LogitsProcessor;
//! ```
//!
//! [`sampling`] has the ops beneath it, for a batch with its own parameters for each row: the
//! masked logits, the candidate set, the token.
//!
//! [`selection`] has the exact top-K of ragged score rows, for sparse attention: positions instead
//! of tokens.
//!
//! [`attention`] is DeepSeek Sparse Attention on top of it: indexer scores, attention over the
//! positions selected, and the layer of DeepSeek-V3.2 and GLM-5.
//!
//! # Features
//!
//! | feature | what it adds |
//! |---|---|
//! | `cuda` | the CUDA backend; needs nvcc and a device of compute capability 8.0 or later |
//! | `ablation` | `cuda`, and for `benches/kernels.rs` variants of its kernels; no API |
//!
//! Without it the whole API but the module `cuda` (loading kernels ahead of time) is there and works
//! on the CPU.

#![deny(missing_docs)]
#![warn(clippy::undocumented_unsafe_blocks)]

pub mod attention;
mod buffer;
#[cfg(feature = "cuda")]
pub mod cuda;
mod empty;
mod held;
mod order;
pub mod sampling;
pub mod selection;

pub use candle_transformers::generation::Sampling;
pub use sampling::{apply_repeat_penalty, LogitsProcessor};

/// The README's code is tested with the crate's.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
