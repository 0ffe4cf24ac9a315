//! Logits with everything outside the kept set at -inf.

use super::cpu::{self, with_logits};
use super::cuda;
use super::truncation::{Mass, Operand, Rows, Truncation};
use candle_core::backend::BackendStorage;
use candle_core::{
    bail, CpuStorage, CudaStorage, CustomOp1, CustomOp2, InplaceOp1, InplaceOp2, Layout,
    MetalStorage, Result, Shape, Tensor,
};

/// The op `mask` with the same parameters for every row: F32, F16 or BF16 logits `[V]` or `[B, V]`
/// to logits of the same shape and dtype, where survivors keep their bits and all else is -inf.
///
/// A `CustomOp1`, and in place an `InplaceOp1`. Deterministic; ties are kept by lowest id. A row
/// with nothing above -inf comes out all -inf.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_topk::sampling::{Mask, Truncation};
///
/// # fn main() -> candle_core::Result<()> {
/// let logits = Tensor::new(&[1f32, 3., 2., 3.], &Device::Cpu)?;
/// let masked = logits.apply_op1_no_bwd(&Mask::new(Truncation::new().with_top_k(2))?)?;
/// let inf = f32::INFINITY;
/// assert_eq!(masked.to_vec1::<f32>()?, [-inf, 3., -inf, 3.]);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Copy)]
pub struct Mask(Truncation);

impl Mask {
    /// # Errors
    /// Where a parameter means nothing: see the table of [`Truncation`].
    pub fn new(truncation: Truncation) -> Result<Self> {
        truncation.check(OP)?;
        Ok(Self(truncation))
    }
}

/// The op `mask` with per-row parameters as the second operand: see [`Truncation::rows`].
///
/// A `CustomOp2`, and in place an `InplaceOp2`.
#[derive(Debug, Clone, Copy, Default)]
pub struct MaskRows(Mass);

impl MaskRows {
    /// `mass` says how p is read after a top-k.
    pub fn new(mass: Mass) -> Self {
        Self(mass)
    }
}

const OP: &str = "mask";

/// [`Mask`] as a function: a new tensor, no gradient.
///
/// # Errors
/// For parameters that mean nothing, and logits of a wrong rank, dtype, layout or device.
pub fn mask(logits: &Tensor, truncation: Truncation) -> Result<Tensor> {
    logits.apply_op1_no_bwd(&Mask::new(truncation)?)
}

/// [`MaskRows`] as a function: a new tensor, no gradient.
///
/// # Errors
/// For parameters that are not F32 `[B, 4]` on the logits' device, and logits of a wrong rank,
/// dtype, layout or device.
pub fn mask_rows(logits: &Tensor, rows: &Tensor, mass: Mass) -> Result<Tensor> {
    logits.apply_op2_no_bwd(rows, &MaskRows::new(mass))
}

fn cpu_mask(storage: &CpuStorage, rows: &Rows, operand: Operand<CpuStorage>) -> Result<CpuStorage> {
    let parameters = cpu::Parameters::new(&operand)?;
    with_logits!(OP, storage, |data| Ok(
        candle_core::WithDType::to_cpu_storage_owned(cpu::mask(data, rows, &parameters))
    ))
}

fn cpu_mask_in_place(
    storage: &mut CpuStorage,
    rows: &Rows,
    operand: Operand<CpuStorage>,
) -> Result<()> {
    check_in_place(rows)?;
    let parameters = cpu::Parameters::new(&operand)?;
    with_logits!(OP, storage, |data| {
        cpu::mask_in_place(data, rows, &parameters);
        Ok(())
    })
}

/// Rows that share elements cannot be written in place.
fn check_in_place(rows: &Rows) -> Result<()> {
    if rows.batch > 1 && rows.stride < rows.vocab {
        bail!(
            "{OP} in place: rows of {} elements lie {} apart and overlap, they must be disjoint",
            rows.vocab,
            rows.stride
        )
    }
    Ok(())
}

impl CustomOp1 for Mask {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let rows = Rows::of(OP, layout, storage.dtype())?;
        let out = cpu_mask(storage, &rows, Operand::scalar(OP, &rows, &self.0)?)?;
        Ok((out, layout.shape().clone()))
    }

    fn cuda_fwd(&self, storage: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        let rows = Rows::of(OP, layout, storage.dtype())?;
        let out = cuda::mask(storage, &rows, Operand::scalar(OP, &rows, &self.0)?)?;
        Ok((out, layout.shape().clone()))
    }

    fn metal_fwd(&self, _: &MetalStorage, _: &Layout) -> Result<(MetalStorage, Shape)> {
        super::no_metal(OP)
    }
}

impl InplaceOp1 for Mask {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
        let rows = Rows::of(OP, layout, storage.dtype())?;
        cpu_mask_in_place(storage, &rows, Operand::scalar(OP, &rows, &self.0)?)
    }

    fn cuda_fwd(&self, storage: &mut CudaStorage, layout: &Layout) -> Result<()> {
        let rows = Rows::of(OP, layout, storage.dtype())?;
        check_in_place(&rows)?;
        cuda::mask_in_place(storage, &rows, Operand::scalar(OP, &rows, &self.0)?)
    }

    fn metal_fwd(&self, _: &mut MetalStorage, _: &Layout) -> Result<()> {
        super::no_metal(OP)
    }
}

impl CustomOp2 for MaskRows {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(
        &self,
        storage: &CpuStorage,
        layout: &Layout,
        params: &CpuStorage,
        params_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let rows = Rows::of(OP, layout, storage.dtype())?;
        let operand = Operand::rows(OP, &rows, params, params_layout, self.0)?;
        Ok((cpu_mask(storage, &rows, operand)?, layout.shape().clone()))
    }

    fn cuda_fwd(
        &self,
        storage: &CudaStorage,
        layout: &Layout,
        params: &CudaStorage,
        params_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        let rows = Rows::of(OP, layout, storage.dtype())?;
        let operand = Operand::rows(OP, &rows, params, params_layout, self.0)?;
        Ok((cuda::mask(storage, &rows, operand)?, layout.shape().clone()))
    }

    fn metal_fwd(
        &self,
        _: &MetalStorage,
        _: &Layout,
        _: &MetalStorage,
        _: &Layout,
    ) -> Result<(MetalStorage, Shape)> {
        super::no_metal(OP)
    }
}

impl InplaceOp2 for MaskRows {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(
        &self,
        storage: &mut CpuStorage,
        layout: &Layout,
        params: &CpuStorage,
        params_layout: &Layout,
    ) -> Result<()> {
        let rows = Rows::of(OP, layout, storage.dtype())?;
        let operand = Operand::rows(OP, &rows, params, params_layout, self.0)?;
        cpu_mask_in_place(storage, &rows, operand)
    }

    fn cuda_fwd(
        &self,
        storage: &mut CudaStorage,
        layout: &Layout,
        params: &CudaStorage,
        params_layout: &Layout,
    ) -> Result<()> {
        let rows = Rows::of(OP, layout, storage.dtype())?;
        check_in_place(&rows)?;
        let operand = Operand::rows(OP, &rows, params, params_layout, self.0)?;
        cuda::mask_in_place(storage, &rows, operand)
    }

    fn metal_fwd(
        &self,
        _: &mut MetalStorage,
        _: &Layout,
        _: &MetalStorage,
        _: &Layout,
    ) -> Result<()> {
        super::no_metal(OP)
    }
}
