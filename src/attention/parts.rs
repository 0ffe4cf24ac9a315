//! What the attention ops share: tensors as the backends see them, and integers on a device.

use crate::held::{address, lock};
use candle_core::backend::BackendStorage;
use candle_core::{
    bail, CpuStorage, CudaStorage, DType, InplaceOp1, Layout, MetalStorage, Result, Storage,
    StorageRef, Tensor,
};
use half::slice::HalfFloatSliceExt;
use std::cell::{Cell, OnceCell};
use std::rc::Rc;

/// A storage of one of the two backends.
pub(crate) trait Backend: BackendStorage {
    /// The storage, of a tensor that is known to lie on this backend.
    fn of(storage: &Storage) -> &Self;
}

impl Backend for CpuStorage {
    fn of(storage: &Storage) -> &Self {
        match storage {
            Storage::Cpu(storage) => storage,
            _ => unreachable!("all arguments are on one device"),
        }
    }
}

impl Backend for CudaStorage {
    fn of(storage: &Storage) -> &Self {
        match storage {
            Storage::Cuda(storage) => storage,
            _ => unreachable!("all arguments are on one device"),
        }
    }
}

/// A tensor as a backend sees it.
pub(crate) struct Part<'a, S> {
    pub storage: &'a S,
    pub layout: &'a Layout,
}

/// A tensor whose storage is held for reading as long as this lives, once it is locked.
pub(crate) struct Held<'a> {
    tensor: &'a Tensor,
    storage: OnceCell<Rc<StorageRef<'a>>>,
}

impl<'a> Held<'a> {
    pub fn new(tensor: &'a Tensor) -> Self {
        Self {
            tensor,
            storage: OnceCell::new(),
        }
    }

    /// Locks their storages, each once.
    pub fn lock(all: &[&Self]) {
        let tensors: Vec<&Tensor> = all.iter().map(|held| held.tensor).collect();
        for (held, storage) in all.iter().zip(lock(&tensors)) {
            held.storage.get_or_init(|| storage);
        }
    }

    pub fn part<S: Backend>(&self) -> Part<'_, S> {
        Part {
            storage: S::of(self.storage()),
            layout: self.tensor.layout(),
        }
    }

    pub fn storage(&self) -> &Storage {
        self.storage
            .get()
            .expect("operands are locked before they are read")
    }
}

/// A storage that an op writes to.
pub(crate) enum Output<'a> {
    Cpu(&'a mut CpuStorage),
    Cuda(&'a mut CudaStorage),
}

impl Output<'_> {
    /// The CUDA storage behind `self`, where the queries lie on CUDA too.
    pub fn cuda(&mut self) -> &mut CudaStorage {
        match self {
            Self::Cuda(storage) => storage,
            Self::Cpu(_) => unreachable!("all arguments are on one device"),
        }
    }

    /// f32 numbers on the CPU.
    pub fn f32(&mut self) -> &mut [f32] {
        match self {
            Self::Cpu(CpuStorage::F32(data)) => data,
            _ => unreachable!("the dtype and the device are checked before"),
        }
    }

    /// I64 numbers on the CPU.
    pub fn i64(&mut self) -> &mut [i64] {
        match self {
            Self::Cpu(CpuStorage::I64(data)) => data,
            _ => unreachable!("the dtype and the device are checked before"),
        }
    }

    /// The CPU storage behind `self`, where the queries lie on the CPU too.
    pub fn cpu(&mut self) -> &mut CpuStorage {
        match self {
            Self::Cpu(storage) => storage,
            Self::Cuda(_) => unreachable!("all arguments are on one device"),
        }
    }
}

struct Write<F> {
    op: &'static str,
    write: Cell<Option<F>>,
}

impl<F: FnOnce(Output) -> Result<()>> Write<F> {
    fn run(&self, output: Output) -> Result<()> {
        let write = self.write.take();
        write.expect("Candle runs an op once")(output)
    }
}

impl<F: FnOnce(Output) -> Result<()>> InplaceOp1 for Write<F> {
    fn name(&self) -> &'static str {
        self.op
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, _: &Layout) -> Result<()> {
        self.run(Output::Cpu(storage))
    }

    fn cuda_fwd(&self, storage: &mut CudaStorage, _: &Layout) -> Result<()> {
        self.run(Output::Cuda(storage))
    }

    fn metal_fwd(&self, _: &mut MetalStorage, _: &Layout) -> Result<()> {
        super::no_metal(self.op)
    }
}

/// Writes to a tensor. The operands are held for reading meanwhile, so an output in the storage of
/// one of them is refused: to wait for it would never end.
pub(crate) fn write_to(
    op: &'static str,
    out: &Tensor,
    held: &[&Held],
    write: impl FnOnce(Output) -> Result<()>,
) -> Result<()> {
    let own = address(&out.storage_and_layout().0);
    if held.iter().any(|held| address(held.storage()) == own) {
        bail!("{op}: an output lies in the storage of an operand, it needs one of its own")
    }
    out.inplace_op1(&Write {
        op,
        write: Cell::new(Some(write)),
    })
}

/// Writes to several tensors, each in a storage of its own.
pub(crate) fn write_to_all(
    op: &'static str,
    outputs: &[&Tensor],
    held: &[&Held],
    write: impl FnOnce(&mut [Output]) -> Result<()>,
) -> Result<()> {
    type Then<'f> = dyn FnMut(Vec<(usize, Output)>) -> Result<()> + 'f;
    fn next(
        op: &'static str,
        outputs: &[(usize, &Tensor)],
        held: &[&Held],
        locked: Vec<(usize, Output)>,
        write: &mut Then,
    ) -> Result<()> {
        let Some((&(place, first), others)) = outputs.split_first() else {
            return write(locked);
        };
        write_to(op, first, held, |output| {
            // Of the shorter life of the two.
            let mut both = locked;
            both.push((place, output));
            next(op, others, held, both, write)
        })
    }
    // Locked in one order whatever the roles, so that two calls never wait for each other.
    let storage = |tensor: &Tensor| address(&tensor.storage_and_layout().0);
    let mut ordered: Vec<(usize, &Tensor)> = outputs.iter().copied().enumerate().collect();
    ordered.sort_by_key(|(_, tensor)| storage(tensor));
    if ordered
        .windows(2)
        .any(|two| storage(two[0].1) == storage(two[1].1))
    {
        bail!("{op}: two outputs lie in one storage, each needs one of its own")
    }
    let mut write = Some(write);
    next(op, &ordered, held, Vec::new(), &mut |mut locked| {
        locked.sort_by_key(|(place, _)| *place);
        let mut outputs: Vec<Output> = locked.into_iter().map(|(_, output)| output).collect();
        write.take().expect("it is called once")(&mut outputs)
    })
}

/// Refuses an argument that lies on another device than the queries.
pub(crate) fn check_device(op: &str, q: &Tensor, name: &str, argument: &Tensor) -> Result<()> {
    if !q.device().same_device(argument.device()) {
        bail!(
            "{op}: q is on {:?} and {name} on {:?}, they must be on one device",
            q.device().location(),
            argument.device().location()
        )
    }
    Ok(())
}

/// Refuses a tensor whose last dimension is not dense.
pub(crate) fn check_dense(op: &str, name: &str, layout: &Layout) -> Result<()> {
    match (layout.dims().last(), layout.stride().last()) {
        (Some(&dim), Some(&stride)) if stride != 1 && dim > 1 => bail!(
            "{op}: the last dimension of {name} has stride {stride}, it must be dense (stride 1); call contiguous() first"
        ),
        _ => Ok(()),
    }
}

/// Refuses results that no device could hold: views of a single element can be of any size, and
/// sizes in bytes would wrap on the way to the device.
pub(crate) fn check_size(op: &str, what: &str, dims: &[usize]) -> Result<()> {
    const MOST: usize = 1 << 36;
    let elements = dims.iter().try_fold(1usize, |n, &dim| n.checked_mul(dim));
    if elements.is_none_or(|n| n > MOST) {
        bail!("{op}: {what} would have shape {dims:?}, at most 2^36 elements are supported")
    }
    Ok(())
}

/// Refuses integers of another dtype or shape.
pub(crate) fn check_ints(op: &str, name: &str, tensor: &Tensor, dims: &[usize]) -> Result<()> {
    if !matches!(tensor.dtype(), DType::I32 | DType::I64 | DType::U32) || tensor.dims() != dims {
        bail!(
            "{op}: {name} is {:?} {:?}, I32, I64 or U32 {dims:?} is needed",
            tensor.dtype(),
            tensor.dims()
        )
    }
    Ok(())
}

/// `[B, n, ..]` as `[B n, ..]`: without a copy, but where one may be made.
pub(crate) fn merged_rows(
    op: &str,
    name: &str,
    tensor: &Tensor,
    allocates: bool,
) -> Result<Tensor> {
    match *tensor.dims() {
        [1, ..] => tensor.squeeze(0),
        [_, 1, ..] => tensor.squeeze(1),
        _ if allocates || tensor.is_contiguous() => tensor.flatten(0, 1),
        _ => bail!(
            "{op}: {name} is {} with strides {:?}, of which rows can't be made without a copy; it must be contiguous, or come as rows, with the first two dimensions as one",
            shown(tensor),
            tensor.stride()
        ),
    }
}

/// Refuses f32 numbers of another dtype or shape.
pub(crate) fn check_f32(op: &str, name: &str, tensor: &Tensor, dims: &[usize]) -> Result<()> {
    if tensor.dtype() != DType::F32 || tensor.dims() != dims {
        bail!(
            "{op}: {name} is {:?} {:?}, F32 {dims:?} is needed",
            tensor.dtype(),
            tensor.dims()
        )
    }
    Ok(())
}

/// `dims` beside a dtype, for messages.
pub(crate) fn shown(tensor: &Tensor) -> String {
    format!("{:?} {:?}", tensor.dtype(), tensor.dims())
}

/// Integers on the CPU, of one or two dimensions.
pub(crate) struct Ints<'a> {
    data: IntData<'a>,
    start: usize,
    strides: [usize; 2],
}

enum IntData<'a> {
    I32(&'a [i32]),
    I64(&'a [i64]),
    U32(&'a [u32]),
}

impl<'a> Ints<'a> {
    /// Of a part that [`check_ints`] has let pass.
    pub fn new(part: &Part<'a, CpuStorage>) -> Result<Self> {
        let data = match part.storage {
            CpuStorage::I32(data) => IntData::I32(data),
            CpuStorage::I64(data) => IntData::I64(data),
            other => IntData::U32(other.as_slice::<u32>()?),
        };
        let strides = match part.layout.stride() {
            [] => [0, 0],
            [row] => [*row, 0],
            [row, column, ..] => [*row, *column],
        };
        Ok(Self {
            data,
            start: part.layout.start_offset(),
            strides,
        })
    }

    /// A U32 from 2^31 up is read as negative: it is an I32 -1 that Candle can hold.
    pub fn get(&self, row: usize, column: usize) -> i64 {
        let at = self.start + row * self.strides[0] + column * self.strides[1];
        match self.data {
            IntData::I32(data) => data[at] as i64,
            IntData::I64(data) => data[at],
            IntData::U32(data) => data[at] as i32 as i64,
        }
    }
}

/// Floating-point numbers on the CPU, read as f32.
pub(crate) struct Floats<'a> {
    storage: &'a CpuStorage,
}

impl<'a> Floats<'a> {
    pub fn new(storage: &'a CpuStorage) -> Self {
        Self { storage }
    }

    /// The numbers from `at` on, as many as `buffer` holds; in it, where they are not f32 already.
    pub fn read<'b>(&self, at: usize, buffer: &'b mut [f32]) -> &'b [f32]
    where
        'a: 'b,
    {
        if let CpuStorage::F32(data) = self.storage {
            return &data[at..at + buffer.len()];
        }
        self.copy(at, buffer);
        buffer
    }

    /// The same into `buffer` whatever they are.
    pub fn copy(&self, at: usize, buffer: &mut [f32]) {
        let range = at..at + buffer.len();
        match self.storage {
            CpuStorage::F32(data) => buffer.copy_from_slice(&data[range]),
            CpuStorage::F16(data) => data[range].convert_to_f32_slice(buffer),
            CpuStorage::BF16(data) => data[range].convert_to_f32_slice(buffer),
            CpuStorage::F8E4M3(data) => {
                for (wide, x) in buffer.iter_mut().zip(&data[range]) {
                    *wide = x.to_f32();
                }
            }
            _ => unreachable!("other dtypes are refused before"),
        }
    }
}

/// f32 numbers rounded to one of the dtypes of queries.
pub(crate) fn rounded(dtype: DType, data: Vec<f32>) -> CpuStorage {
    match dtype {
        DType::F16 => CpuStorage::F16(data.into_iter().map(half::f16::from_f32).collect()),
        DType::BF16 => CpuStorage::BF16(data.into_iter().map(half::bf16::from_f32).collect()),
        _ => CpuStorage::F32(data),
    }
}
