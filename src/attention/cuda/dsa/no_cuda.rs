//! The CUDA backend of a build without the feature `cuda`: errors that name the feature.

use super::super::super::parts::Part;
use super::{Cache, Keys, Product, Queries};
use candle_core::{bail, CudaStorage, Device, Result};

fn missing<T>() -> Result<T> {
    bail!("DsaAttention: the tensors are on a CUDA device, but candle-topk was built without its feature `cuda`; build with it, or move them with to_device")
}

pub(in super::super::super) fn refuse_capture(_: &str, _: &Device) -> Result<()> {
    missing()
}

pub(in super::super::super) fn product(
    _: Product,
    _: Part<CudaStorage>,
    _: Part<CudaStorage>,
    _: Option<Part<CudaStorage>>,
    _: &mut CudaStorage,
) -> Result<()> {
    missing()
}

pub(in super::super::super) fn keys(
    _: &Keys<CudaStorage>,
    _: &mut CudaStorage,
    _: Cache<CudaStorage>,
    _: Option<Cache<CudaStorage>>,
    _: Option<Cache<CudaStorage>>,
) -> Result<()> {
    missing()
}

pub(in super::super::super) fn queries(
    _: &Queries<CudaStorage>,
    _: &mut CudaStorage,
    _: Option<&mut CudaStorage>,
    _: Option<&mut CudaStorage>,
) -> Result<()> {
    missing()
}

pub(in super::super::super) fn weights(
    _: Part<CudaStorage>,
    _: Part<CudaStorage>,
    _: &mut CudaStorage,
) -> Result<()> {
    missing()
}

pub(in super::super::super) fn everything(
    _: Part<CudaStorage>,
    _: usize,
    _: &mut CudaStorage,
) -> Result<()> {
    missing()
}

pub(in super::super::super) fn advance(
    _: &mut CudaStorage,
    _: usize,
    _: usize,
    _: &mut CudaStorage,
) -> Result<()> {
    missing()
}
