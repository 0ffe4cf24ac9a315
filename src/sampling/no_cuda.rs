//! The CUDA backend of a build without the feature `cuda`: errors that name the feature.

use super::cpu::Drawn;
use super::sample::{Draw, DrawOperand};
use super::truncation::{Mass, Operand, Rows, Truncation};
use crate::buffer::DeviceBuffer as Buffer;
use candle_core::{bail, CudaStorage, Result, Tensor};

fn missing<T>(op: &str) -> Result<T> {
    bail!("{op}: the logits are on a CUDA device, but candle-topk was built without its feature `cuda`; build with it, or move the logits with to_device")
}

pub(super) fn mask(_: &CudaStorage, _: &Rows, _: Operand<CudaStorage>) -> Result<CudaStorage> {
    missing("mask")
}

pub(super) fn mask_into(
    _: &mut CudaStorage,
    _: &Rows,
    _: &CudaStorage,
    _: &Rows,
    _: Operand<CudaStorage>,
) -> Result<()> {
    missing("mask")
}

pub(super) fn mask_in_place(_: &mut CudaStorage, _: &Rows, _: Operand<CudaStorage>) -> Result<()> {
    missing("mask")
}

pub(super) fn candidates(
    _: &CudaStorage,
    _: &Rows,
    _: Operand<CudaStorage>,
    _: usize,
) -> Result<(CudaStorage, CudaStorage, CudaStorage)> {
    missing("candidates")
}

pub(super) fn sample(
    _: &CudaStorage,
    _: &Rows,
    _: Operand<CudaStorage>,
    _: DrawOperand<CudaStorage>,
) -> Result<CudaStorage> {
    missing("sample")
}

pub(super) fn sample_with_log_probs(
    _: &CudaStorage,
    _: &Rows,
    _: Operand<CudaStorage>,
    _: DrawOperand<CudaStorage>,
) -> Result<(CudaStorage, CudaStorage)> {
    missing("sample")
}

pub(super) fn sample_into(
    _: &CudaStorage,
    _: &Rows,
    _: (&Buffer<f32>, Mass),
    _: &mut Buffer<i64>,
    _: (&mut Buffer<u32>, &mut Buffer<f32>),
    _: Option<&mut Buffer<u32>>,
) -> Result<()> {
    missing("sample")
}

pub(super) fn candidates_into(
    _: &CudaStorage,
    _: &Rows,
    _: (&Buffer<f32>, Mass),
    _: usize,
    _: (&mut Buffer<u32>, &mut Buffer<f32>, &mut Buffer<u32>),
    _: Option<&mut Buffer<u32>>,
) -> Result<()> {
    missing("candidates")
}

pub(super) fn sample_strict(
    _: &CudaStorage,
    _: &Rows,
    _: &Truncation,
    _: &[Draw],
    _: bool,
) -> Result<CudaStorage> {
    missing("sample")
}

pub(super) fn penalise(_: &Tensor, _: f32, _: &[u32]) -> Result<Tensor> {
    missing("apply_repeat_penalty")
}

/// Where tokens come back to the host.
pub(super) struct Readback;

impl Readback {
    pub fn new() -> Self {
        Self
    }

    pub fn sample(
        &mut self,
        _: &CudaStorage,
        _: &Rows,
        _: &Truncation,
        _: &[Draw],
    ) -> Result<Vec<Drawn>> {
        missing("sample")
    }
}
