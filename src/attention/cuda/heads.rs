//! Products with a matrix a head on a CUDA device.

#[cfg(feature = "cuda")]
mod device;
#[cfg(not(feature = "cuda"))]
#[path = "heads/no_cuda.rs"]
mod device;

pub(in super::super) use device::by_head;
