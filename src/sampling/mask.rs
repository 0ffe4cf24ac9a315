//! Logits with everything outside the kept set at -inf.

use super::cpu::{self, with_logits};
use super::cuda;
use super::truncation::{Mass, Operand, Rows, Truncation};
use candle_core::backend::BackendStorage;
use candle_core::{
    CpuStorage, CudaStorage, CustomOp1, CustomOp2, InplaceOp1, InplaceOp2, InplaceOp3, Layout,
    MetalStorage, Result, Shape, Tensor,
};

/// The op `mask` with the same parameters for every row: F32, F16 or BF16 logits `[V]` or `[B, V]`
/// to logits of the same shape and dtype, where survivors keep their bits and all else is -inf.
///
/// A `CustomOp1`; in place an `InplaceOp1`; an `InplaceOp2` of the output and the logits, as
/// [`mask_into`]. Deterministic; ties are kept by lowest id. A row
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
/// A `CustomOp2`; in place an `InplaceOp2`; an `InplaceOp3` of the output, the logits and the
/// parameters, as [`mask_rows_into`].
#[derive(Debug, Clone, Copy, Default)]
pub struct MaskRows(Mass);

impl MaskRows {
    /// `mass` says how p is read after a top-k.
    pub fn new(mass: Mass) -> Self {
        Self(mass)
    }
}

const OP: &str = "mask";
const IN_PLACE: &str = "mask in place";

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

/// [`Mask`] into `out`, a tensor of the logits' shape and dtype on their device, whose last
/// dimension is dense and whose rows are disjoint.
///
/// One launch and nothing else: no allocation, no upload, no readback, no synchronisation, and no
/// workspace, at any batch and vocabulary. So it can be captured in a CUDA graph, once the kernels
/// are loaded.
///
/// # Errors
/// As [`mask()`], and for an output of another shape, dtype or device, with a strided last
/// dimension, with overlapping rows, or in the logits' own storage: in place there is
/// `logits.inplace_op1(&Mask::new(truncation)?)`, which allocates nothing either.
pub fn mask_into(logits: &Tensor, out: &Tensor, truncation: Truncation) -> Result<()> {
    out.inplace_op2(logits, &Mask::new(truncation)?)
}

/// [`MaskRows`] into `out`: [`mask_into`] with packed per-row parameters, which the launch reads
/// where they lie. A replayed CUDA graph sees what the tensor then holds.
///
/// # Errors
/// As [`mask_into`], and for parameters that are not F32 `[B, 4]` on the logits' device.
pub fn mask_rows_into(logits: &Tensor, out: &Tensor, rows: &Tensor, mass: Mass) -> Result<()> {
    out.inplace_op3(logits, rows, &MaskRows::new(mass))
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
    rows.check_disjoint(IN_PLACE, "the logits")?;
    let parameters = cpu::Parameters::new(&operand)?;
    with_logits!(OP, storage, |data| {
        cpu::mask_in_place(data, rows, &parameters);
        Ok(())
    })
}

fn cpu_mask_into(
    out: &mut CpuStorage,
    out_rows: &Rows,
    storage: &CpuStorage,
    rows: &Rows,
    operand: Operand<CpuStorage>,
) -> Result<()> {
    let parameters = cpu::Parameters::new(&operand)?;
    match (out, storage) {
        (CpuStorage::F32(out), CpuStorage::F32(data)) => {
            cpu::mask_into(data, rows, &parameters, out, out_rows)
        }
        (CpuStorage::F16(out), CpuStorage::F16(data)) => {
            cpu::mask_into(data, rows, &parameters, out, out_rows)
        }
        (CpuStorage::BF16(out), CpuStorage::BF16(data)) => {
            cpu::mask_into(data, rows, &parameters, out, out_rows)
        }
        _ => unreachable!("`Rows` has seen the dtype of the logits, and the output has the same"),
    }
    Ok(())
}

/// The rows of the logits and those of the output.
fn rows_and_output<S: BackendStorage>(
    out: &S,
    out_layout: &Layout,
    storage: &S,
    layout: &Layout,
) -> Result<(Rows, Rows)> {
    let rows = Rows::of(OP, layout, storage.dtype())?;
    let out_rows = rows.output(OP, storage.dtype(), layout.dims(), out_layout, out.dtype())?;
    Ok((rows, out_rows))
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
        rows.check_disjoint(IN_PLACE, "the logits")?;
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
        rows.check_disjoint(IN_PLACE, "the logits")?;
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

impl InplaceOp2 for Mask {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(
        &self,
        out: &mut CpuStorage,
        out_layout: &Layout,
        storage: &CpuStorage,
        layout: &Layout,
    ) -> Result<()> {
        let (rows, out_rows) = rows_and_output(out, out_layout, storage, layout)?;
        let operand = Operand::scalar(OP, &rows, &self.0)?;
        cpu_mask_into(out, &out_rows, storage, &rows, operand)
    }

    fn cuda_fwd(
        &self,
        out: &mut CudaStorage,
        out_layout: &Layout,
        storage: &CudaStorage,
        layout: &Layout,
    ) -> Result<()> {
        let (rows, out_rows) = rows_and_output(out, out_layout, storage, layout)?;
        let operand = Operand::scalar(OP, &rows, &self.0)?;
        cuda::mask_into(out, &out_rows, storage, &rows, operand)
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

impl InplaceOp3 for MaskRows {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(
        &self,
        out: &mut CpuStorage,
        out_layout: &Layout,
        storage: &CpuStorage,
        layout: &Layout,
        params: &CpuStorage,
        params_layout: &Layout,
    ) -> Result<()> {
        let (rows, out_rows) = rows_and_output(out, out_layout, storage, layout)?;
        let operand = Operand::rows(OP, &rows, params, params_layout, self.0)?;
        cpu_mask_into(out, &out_rows, storage, &rows, operand)
    }

    fn cuda_fwd(
        &self,
        out: &mut CudaStorage,
        out_layout: &Layout,
        storage: &CudaStorage,
        layout: &Layout,
        params: &CudaStorage,
        params_layout: &Layout,
    ) -> Result<()> {
        let (rows, out_rows) = rows_and_output(out, out_layout, storage, layout)?;
        let operand = Operand::rows(OP, &rows, params, params_layout, self.0)?;
        cuda::mask_into(out, &out_rows, storage, &rows, operand)
    }

    fn metal_fwd(
        &self,
        _: &mut MetalStorage,
        _: &Layout,
        _: &MetalStorage,
        _: &Layout,
        _: &MetalStorage,
        _: &Layout,
    ) -> Result<()> {
        super::no_metal(OP)
    }
}
