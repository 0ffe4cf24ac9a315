//! Ragged score rows to the positions of their K best: [`TopK`].
//!
//! Sparse attention scores every key for every query and attends to the K best. This is the step
//! between: scores `[M, N]`, each row with its own bounds, to positions `[M, K]`. The algorithm is
//! that of HPC-Ops Top-K (arXiv 2609.08450): a sample of the row proposes a cutoff, one pass over
//! the row collects what reaches it and certifies that it is enough, and what was collected is
//! refined on chip. Rows that are short, or so few that each has a cluster of blocks that need to hold
//! little of it, are held on chip instead and counted exactly.
//!
//! ```
//! use candle_core::{Device, Tensor};
//! use candle_topk::selection::{Bounds, Order, TopK};
//!
//! # fn main() -> candle_core::Result<()> {
//! let scores = Tensor::new(&[[1f32, 3., 2., 3.], [0., 7., 9., 9.]], &Device::Cpu)?;
//! let ends = Tensor::new(&[4u32, 2], &Device::Cpu)?;
//! let top = TopK::new(3)?.order(Order::ByValue).with_values();
//! let selected = top.select(&scores, &Bounds::ends(&ends))?;
//! let none = u32::MAX;
//! assert_eq!(selected.positions.to_vec2::<u32>()?, [[1, 3, 2], [1, 0, none]]);
//! assert_eq!(selected.counts.to_vec1::<u32>()?, [3, 2]);
//! assert_eq!(selected.values.unwrap().to_vec2::<f32>()?[0], [3., 3., 2.]);
//! # Ok(())
//! # }
//! ```
//!
//! # Contract
//!
//! * **Exact.** Numbers are compared as numbers: -0 equals +0, subnormals count, NaN is below -inf.
//!   Equal scores are ordered by position, the lower first. So a row of more than K scores has one
//!   right set of K, the one that a stable sort gives, and that set is what comes out.
//! * **Ragged.** A row's scores are those at positions `[start, end)`, clamped to `[0, N]`; an end
//!   at or before the start is an empty row, and so is a negative end. What lies outside is never
//!   read as a score, whatever it holds. -inf and, last of all, NaN are selected when nothing else
//!   is left. A row of at most K scores gives all its positions, and `u32::MAX` after them.
//! * **Deterministic.** The set always; with [`Order::ByPosition`] and [`Order::ByValue`] every bit
//!   of the output. [`Order::Unordered`] promises the set alone.
//! * **No allocation** in [`TopK::select_into`], so that a CUDA graph can hold it: bounds and scores
//!   are read where they lie, and lengths never come to the host. The launch depends on the shape
//!   alone ([`plan`](fn@plan)).
//! * **Layouts.** Row stride and offset are free; the last dimension must be dense. Offsets are of 64
//!   bits.
//! * **Devices.** CPU, and CUDA with the feature `cuda`. The ops give an error elsewhere.

mod buffers;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(not(feature = "cuda"))]
#[path = "no_cuda.rs"]
mod cuda;
mod plan;
mod rows;
mod topk;

pub use buffers::{Route, RowRoute, SelectionBuffers, Workspace};
pub use plan::{plan, DeviceProps, Mapping, Overrides, Plan, PlanRequest, View};
pub use rows::Bounds;
pub use topk::{Order, Selection, TopK};

#[cfg(feature = "cuda")]
pub(crate) use cuda::preload;

/// The greatest K.
pub const MAX_K: usize = 4096;

const OP: &str = "top-k selection";
