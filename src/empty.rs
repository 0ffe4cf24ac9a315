//! Candle's kernels over tensors that may have no elements: on CUDA it launches them with a grid of no
//! blocks, which the driver refuses.

use candle_core::{DType, Device, Result, Shape, Tensor, WithDType};

/// [`Tensor::full`], also of no elements.
pub(crate) fn full<T: WithDType>(
    value: T,
    shape: impl Into<Shape>,
    device: &Device,
) -> Result<Tensor> {
    let shape = shape.into();
    match shape.elem_count() {
        0 => Tensor::zeros(shape, T::DTYPE, device),
        _ => Tensor::full(value, shape, device),
    }
}

/// [`Tensor::to_dtype`] to F32, also of no elements.
pub(crate) fn to_f32(tensor: &Tensor) -> Result<Tensor> {
    match tensor.elem_count() {
        0 => Tensor::zeros(tensor.shape(), DType::F32, tensor.device()),
        _ => tensor.to_dtype(DType::F32),
    }
}
