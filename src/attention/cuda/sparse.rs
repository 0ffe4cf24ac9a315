//! Attention over positions on a CUDA device.

#[cfg(feature = "cuda")]
mod device;
#[cfg(not(feature = "cuda"))]
#[path = "sparse/no_cuda.rs"]
mod device;
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
mod plan;

#[cfg(feature = "cuda")]
pub(crate) use device::preload;
pub(in super::super) use device::{sparse_attention, sparse_attention_into, workspace_floats};
