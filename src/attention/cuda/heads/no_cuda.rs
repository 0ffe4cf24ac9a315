//! The CUDA backend of a build without the feature `cuda`: an error that names the feature.

use candle_core::{bail, CudaStorage, Layout, Result};

type Part<'a> = (&'a CudaStorage, &'a Layout);

pub(in super::super::super) fn by_head(_: Part, _: Part, _: Option<Part>) -> Result<CudaStorage> {
    bail!("DsaAttention: the tensors are on a CUDA device, but candle-topk was built without its feature `cuda`; build with it, or move them with to_device")
}
