//! The op: scores and bounds to positions.

use super::buffers::{SelectionBuffers, Workspace};
use super::cpu::{self, with_scores};
use super::plan::{plan, DeviceProps, Overrides, Plan, PlanRequest};
use super::rows::{check_bound, Bounds, Rows};
use super::{cuda, MAX_K, OP};
use crate::buffer::Buffer;
use crate::held::hold;
use candle_core::backend::BackendStorage;
use candle_core::{
    bail, CpuStorage, CudaStorage, CustomOp1, CustomOp2, DType, Layout, MetalStorage, Result,
    Shape, Storage, Tensor,
};

/// What `hold` gave of a bound that `Bounds::check` has let pass, by its backend.
macro_rules! on_cpu {
    ($guard:expr) => {
        match &**$guard.0 {
            Storage::Cpu(storage) => (storage, $guard.1),
            _ => unreachable!("all arguments are on one device"),
        }
    };
}
macro_rules! on_cuda {
    ($guard:expr) => {
        match &**$guard.0 {
            Storage::Cuda(storage) => (storage, $guard.1),
            _ => unreachable!("all arguments are on one device"),
        }
    };
}
/// The order of a row's positions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Order {
    /// Any order, which may differ from run to run: the set alone is promised.
    #[default]
    Unordered,
    /// The lowest position first.
    ByPosition,
    /// The greatest score first; equal scores by position, the lower first.
    ByValue,
}

/// The K best positions of each row of F32, F16 or BF16 scores `[N]` or `[M, N]`, K from 1 to
/// [`MAX_K`].
///
/// A `CustomOp1` of the scores, and a `CustomOp2` of the scores and the rows' ends: both give the
/// positions alone. [`select`](Self::select) gives counts and values too.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_topk::selection::{Order, TopK};
///
/// # fn main() -> candle_core::Result<()> {
/// let scores = Tensor::new(&[1f32, 3., 2., 3.], &Device::Cpu)?;
/// let top = TopK::new(2)?.order(Order::ByPosition);
/// assert_eq!(scores.apply_op1_no_bwd(&top)?.to_vec1::<u32>()?, [1, 3]);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TopK {
    pub(super) k: usize,
    pub(super) order: Order,
    pub(super) values: bool,
    pub(super) overrides: Overrides,
}

/// What [`TopK::select`] gives, on the scores' device. Without M where the scores are `[N]`.
#[derive(Debug, Clone)]
pub struct Selection {
    /// U32 `[M, K]`: columns of the scores, and `u32::MAX` after the last of a row that has fewer
    /// than K.
    pub positions: Tensor,
    /// U32 `[M]`: how many positions each row has.
    pub counts: Tensor,
    /// F32 `[M, K]`, where asked for: the scores at these positions, -inf after the last. F32 holds
    /// every F16 and BF16 exactly. A zero is +0, and NaN any NaN.
    pub values: Option<Tensor>,
}

impl TopK {
    /// The `k` best, unordered, without their values.
    ///
    /// # Errors
    /// For a `k` of 0 or above [`MAX_K`].
    pub fn new(k: usize) -> Result<Self> {
        if k == 0 || k > MAX_K {
            bail!("{OP}: k is {k}, 1 to {MAX_K} are accepted")
        }
        Ok(Self {
            k,
            order: Order::Unordered,
            values: false,
            overrides: Overrides::default(),
        })
    }

    /// The order of each row's positions.
    pub fn order(self, order: Order) -> Self {
        Self { order, ..self }
    }

    /// Gives the values too.
    pub fn with_values(self) -> Self {
        Self {
            values: true,
            ..self
        }
    }

    /// Changes the plan: for tests and measurements. Results do not depend on it.
    pub fn with_overrides(self, overrides: Overrides) -> Self {
        Self { overrides, ..self }
    }

    /// K.
    pub fn k(&self) -> usize {
        self.k
    }

    pub(crate) fn has_values(&self) -> bool {
        self.values
    }

    /// How [`select`](Self::select) would run these scores on this device.
    ///
    /// # Errors
    /// As [`plan`](fn@plan).
    pub fn plan(
        &self,
        m: usize,
        n: usize,
        pitch: usize,
        dtype: DType,
        device: DeviceProps,
    ) -> Result<Plan> {
        plan(&PlanRequest {
            k: self.k,
            m,
            n,
            pitch,
            dtype,
            device,
            overrides: self.overrides,
        })
    }

    /// The K best of each row.
    ///
    /// # Errors
    /// For scores or bounds of a wrong rank, dtype, shape, layout or device, and for overrides that
    /// the device or the shape does not admit.
    pub fn select(&self, scores: &Tensor, bounds: &Bounds) -> Result<Selection> {
        let rows = Rows::of(scores.layout(), scores.dtype())?;
        bounds.check(&rows, scores)?;
        let [storage, start, end] = hold([Some(scores), bounds.start, bounds.end]);
        let (storage, _) = storage.expect("there are scores");
        let (positions, counts, values) = match &**storage {
            Storage::Cpu(storage) => {
                let bounds = [&start, &end].map(|b| b.as_ref().map(|b| on_cpu!(b)));
                let (positions, counts, values) = cpu_select(self, storage, &rows, bounds)?;
                (
                    Storage::Cpu(CpuStorage::U32(positions)),
                    Storage::Cpu(CpuStorage::U32(counts)),
                    values.map(|values| Storage::Cpu(CpuStorage::F32(values))),
                )
            }
            Storage::Cuda(storage) => {
                let bounds = [&start, &end].map(|b| b.as_ref().map(|b| on_cuda!(b)));
                let (positions, counts, values) = cuda::select(self, storage, &rows, bounds)?;
                (
                    Storage::Cuda(positions),
                    Storage::Cuda(counts),
                    values.map(Storage::Cuda),
                )
            }
            Storage::Metal(_) => return no_metal(),
        };
        let selected = rows.shape(Some(self.k));
        Ok(Selection {
            positions: Tensor::from((positions, selected.clone())),
            counts: Tensor::from((counts, rows.shape(None))),
            values: values.map(|values| Tensor::from((values, selected))),
        })
    }

    /// The K best of each row, into the first rows of the buffers; the others keep what they hold.
    ///
    /// One launch and nothing else: no allocation, no upload, no readback, no synchronisation. So it
    /// can be captured in a CUDA graph, once the kernels are loaded (`cuda::preload`). The graph
    /// holds the addresses of scores, bounds, buffers and workspace, all of which must outlive it,
    /// and a replay sees what they then hold. Two launches that may run at once need a workspace
    /// each.
    ///
    /// # Errors
    /// As [`select`](Self::select); for buffers of another K, of fewer rows or without the values
    /// that are asked for, and for buffers or a workspace on another device.
    pub fn select_into(
        &self,
        scores: &Tensor,
        bounds: &Bounds,
        out: &mut SelectionBuffers,
        workspace: &mut Workspace,
    ) -> Result<()> {
        let rows = Rows::of(scores.layout(), scores.dtype())?;
        bounds.check(&rows, scores)?;
        out.check(self, &rows, scores)?;
        workspace.check(scores)?;
        let [storage, start, end] = hold([Some(scores), bounds.start, bounds.end]);
        let (storage, _) = storage.expect("there are scores");
        match &**storage {
            Storage::Cpu(storage) => {
                let bounds = [&start, &end].map(|b| b.as_ref().map(|b| on_cpu!(b)));
                cpu_select_into(self, storage, &rows, bounds, out)
            }
            Storage::Cuda(storage) => {
                let bounds = [&start, &end].map(|b| b.as_ref().map(|b| on_cuda!(b)));
                cuda::select_into(
                    self,
                    storage,
                    &rows,
                    bounds,
                    cuda::Outputs {
                        positions: out.positions.on_cuda(),
                        counts: out.counts.on_cuda(),
                        values: self
                            .values
                            .then(|| out.values.as_mut().map(Buffer::on_cuda))
                            .flatten(),
                        routes: out.routes.as_mut().map(Buffer::on_cuda),
                    },
                    workspace,
                )
            }
            Storage::Metal(_) => no_metal(),
        }
    }
}

/// A row's start and end, where given.
pub(super) type BoundsOf<'a, S> = [Option<(&'a S, &'a Layout)>; 2];

type Selected = (Vec<u32>, Vec<u32>, Option<Vec<f32>>);

fn cpu_select(
    top: &TopK,
    storage: &CpuStorage,
    rows: &Rows,
    bounds: BoundsOf<CpuStorage>,
) -> Result<Selected> {
    let mut positions = vec![0; rows.count * top.k];
    let mut counts = vec![0; rows.count];
    let mut values = top.values.then(|| vec![0.0; rows.count * top.k]);
    let out = cpu::Outputs {
        positions: &mut positions,
        counts: &mut counts,
        values: values.as_deref_mut(),
    };
    let bounds = cpu::Bounds::new(bounds)?;
    with_scores!(storage, |data| cpu::select(
        top.k, top.order, data, rows, &bounds, out
    ));
    Ok((positions, counts, values))
}

fn cpu_select_into(
    top: &TopK,
    storage: &CpuStorage,
    rows: &Rows,
    bounds: BoundsOf<CpuStorage>,
    out: &mut SelectionBuffers,
) -> Result<()> {
    let values = out.values.as_mut().filter(|_| top.values);
    let out = cpu::Outputs {
        positions: &mut out.positions.on_cpu()[..rows.count * top.k],
        counts: &mut out.counts.on_cpu()[..rows.count],
        values: values.map(|values| &mut values.on_cpu()[..rows.count * top.k]),
    };
    let bounds = cpu::Bounds::new(bounds)?;
    with_scores!(storage, |data| cpu::select(
        top.k, top.order, data, rows, &bounds, out
    ));
    Ok(())
}

fn no_metal<T>() -> Result<T> {
    bail!(
        "{OP}: Metal tensors are not supported, CPU and CUDA ones are; move the scores with to_device"
    )
}

impl CustomOp1 for TopK {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let rows = Rows::of(layout, storage.dtype())?;
        let (positions, _, _) = cpu_select(self, storage, &rows, [None, None])?;
        Ok((CpuStorage::U32(positions), rows.shape(Some(self.k))))
    }

    fn cuda_fwd(&self, storage: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        let rows = Rows::of(layout, storage.dtype())?;
        let (positions, _, _) = cuda::select(self, storage, &rows, [None, None])?;
        Ok((positions, rows.shape(Some(self.k))))
    }

    fn metal_fwd(&self, _: &MetalStorage, _: &Layout) -> Result<(MetalStorage, Shape)> {
        no_metal()
    }
}

impl CustomOp2 for TopK {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(
        &self,
        storage: &CpuStorage,
        layout: &Layout,
        ends: &CpuStorage,
        ends_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let rows = Rows::of(layout, storage.dtype())?;
        check_bound("end", ends_layout, ends.dtype(), &rows)?;
        let bounds = [None, Some((ends, ends_layout))];
        let (positions, _, _) = cpu_select(self, storage, &rows, bounds)?;
        Ok((CpuStorage::U32(positions), rows.shape(Some(self.k))))
    }

    fn cuda_fwd(
        &self,
        storage: &CudaStorage,
        layout: &Layout,
        ends: &CudaStorage,
        ends_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        let rows = Rows::of(layout, storage.dtype())?;
        check_bound("end", ends_layout, ends.dtype(), &rows)?;
        let bounds = [None, Some((ends, ends_layout))];
        let (positions, _, _) = cuda::select(self, storage, &rows, bounds)?;
        Ok((positions, rows.shape(Some(self.k))))
    }

    fn metal_fwd(
        &self,
        _: &MetalStorage,
        _: &Layout,
        _: &MetalStorage,
        _: &Layout,
    ) -> Result<(MetalStorage, Shape)> {
        no_metal()
    }
}
