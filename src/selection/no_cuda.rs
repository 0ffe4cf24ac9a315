//! The CUDA backend of a build without the feature `cuda`: errors that name the feature.

use super::buffers::Workspace;
use super::plan::DeviceProps;
use super::rows::Rows;
use super::topk::{BoundsOf, TopK};
use super::OP;
use crate::buffer::DeviceBuffer;
use candle_core::{bail, CudaDevice, CudaStorage, Result};

fn missing<T>() -> Result<T> {
    bail!("{OP}: the scores are on a CUDA device, but candle-topk was built without its feature `cuda`; build with it, or move the scores with to_device")
}

pub(super) fn device_props(_: &CudaDevice) -> Result<DeviceProps> {
    missing()
}

/// Where a launch writes.
#[allow(dead_code)] // Read by the CUDA backend alone.
pub(super) struct Outputs<'a> {
    pub positions: &'a mut DeviceBuffer<u32>,
    pub counts: &'a mut DeviceBuffer<u32>,
    pub values: Option<&'a mut DeviceBuffer<f32>>,
    pub routes: Option<&'a mut DeviceBuffer<u32>>,
}

pub(super) fn select(
    _: &TopK,
    _: &CudaStorage,
    _: &Rows,
    _: BoundsOf<CudaStorage>,
) -> Result<(CudaStorage, CudaStorage, Option<CudaStorage>)> {
    missing()
}

pub(super) fn select_into(
    _: &TopK,
    _: &CudaStorage,
    _: &Rows,
    _: BoundsOf<CudaStorage>,
    _: Outputs,
    _: &mut Workspace,
) -> Result<()> {
    missing()
}
