//! The CUDA backend: one launch of `kernels/selection`, as planned.

use super::buffers::Workspace;
use super::plan::{DeviceProps, Mapping, Plan, View, THREADS, VECTOR_BYTES};
use super::rows::Rows;
use super::topk::{BoundsOf, Order, TopK};
use super::OP;
use crate::buffer::{Buffer, DeviceBuffer};
use crate::cuda::{
    alloc, arg, forced_sm80, of_dtype, runs_sm90, Addresses, Kernel, Teams, SELECT, SELECT_CLUSTER,
    SELECT_EXACT,
};
use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::sys::CUdevice_attribute_enum as Attribute;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, DeviceRepr};
use candle_core::cuda_backend::{CudaStorageSlice, WrapErr};
use candle_core::{bail, CudaDevice, CudaStorage, DType, Layout, Result};

/// `Bound` in `kernels/selection/select.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Bound {
    at: u64,
    stride: i64,
    kind: i32,
}

/// `Request` in `kernels/selection/select.cuh`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Request {
    scores: u64,
    pitch: i64,
    width: i32,
    k: i32,
    start: Bound,
    end: Bound,
    positions: u64,
    values: u64,
    counts: u64,
    routes: u64,
    workspace: u64,
    capacity: i32,
    stride: i32,
    margin: f32,
    deviations: f32,
    order: i32,
    band: i32,
    fixed_stride: i32,
    blocks: i32,
}

const _: () = assert!(
    size_of::<Bound>() == 24 && size_of::<Request>() == 144,
    "the kernels take as much"
);

// SAFETY: plain old data, laid out as the kernels' struct of the same name.
unsafe impl DeviceRepr for Request {}

/// What of a device a plan depends on.
pub(super) fn device_props(device: &CudaDevice) -> Result<DeviceProps> {
    let stream = device.cuda_stream();
    let context = stream.context();
    let attribute = |attribute| context.attribute(attribute).w();
    let clusters = runs_sm90(device)? && !forced_sm80();
    let multiprocessors = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as usize;
    // A cluster lies in one of up to 8 groups of multiprocessors, which have an even number each: with
    // more than 14 a group on average, one has room for 16 blocks. A part of a device, or a device with
    // fewer, may have no such group, and a launch would fail.
    let large = multiprocessors > 8 * 14;
    Ok(DeviceProps {
        multiprocessors,
        capability: context.compute_capability().w()?,
        shared_per_block: attribute(
            Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
        )? as usize,
        cluster: match (clusters, large) {
            (true, true) => 16,
            (true, false) => 8,
            (false, _) => 0,
        },
    })
}

fn kernel(device: &CudaDevice, dtype: DType, mapping: Mapping, shared: usize) -> Result<Kernel> {
    let (modules, name) = match mapping {
        Mapping::Short => (SELECT, "select_short"),
        Mapping::Block => (SELECT, "select_block"),
        Mapping::Split(_) => (SELECT, "select_split"),
        Mapping::RowLocal => (SELECT, "select_row_local"),
        Mapping::Cluster(_) => (SELECT_CLUSTER, "select_cluster"),
        Mapping::Exact(_) => (SELECT_EXACT, "select_exact"),
        Mapping::Held => (SELECT_EXACT, "select_held"),
    };
    let kernel = of_dtype(&modules, dtype).kernel(device, name, shared as u32)?;
    if let Mapping::Cluster(9..) | Mapping::Exact(9..) = mapping {
        kernel.allow_large_clusters()?;
    }
    Ok(kernel)
}

/// Loads all kernels for scores of this dtype.
pub(crate) fn preload(device: &CudaDevice, dtype: DType) -> Result<()> {
    for mapping in [
        Mapping::Short,
        Mapping::Block,
        Mapping::Split(2),
        Mapping::RowLocal,
    ] {
        kernel(device, dtype, mapping, 0)?;
    }
    if runs_sm90(device)? {
        kernel(device, dtype, Mapping::Cluster(16), 0)?;
        kernel(device, dtype, Mapping::Exact(16), 0)?;
        kernel(device, dtype, Mapping::Held, 0)?;
    }
    Ok(())
}

/// Where a launch writes.
pub(super) struct Outputs<'a> {
    pub positions: &'a mut DeviceBuffer<u32>,
    pub counts: &'a mut DeviceBuffer<u32>,
    pub values: Option<&'a mut DeviceBuffer<f32>>,
    pub routes: Option<&'a mut DeviceBuffer<u32>>,
}

/// The memory of one launch.
struct Memory<'a> {
    positions: &'a mut CudaSlice<u32>,
    counts: &'a mut CudaSlice<u32>,
    values: Option<&'a mut CudaSlice<f32>>,
    routes: Option<&'a mut CudaSlice<u32>>,
    workspace: Option<&'a mut CudaSlice<u32>>,
}

fn bound<'a>(
    addresses: &mut Addresses<'a>,
    bound: Option<(&'a CudaStorage, &'a Layout)>,
) -> Result<Bound> {
    let Some((storage, layout)) = bound else {
        return Ok(Bound::default());
    };
    let offset = layout.start_offset();
    let (at, kind) = match &storage.slice {
        CudaStorageSlice::I32(slice) => (addresses.of(slice, offset), 1),
        CudaStorageSlice::I64(slice) => (addresses.of(slice, offset), 2),
        CudaStorageSlice::U32(slice) => (addresses.of(slice, offset), 3),
        _ => bail!(
            "{OP}: the rows' bounds are {:?}, I32, I64 or U32 is needed",
            storage.dtype()
        ),
    };
    Ok(Bound {
        at,
        stride: layout.stride().first().copied().unwrap_or(0) as i64,
        kind,
    })
}

fn plan(top: &TopK, storage: &CudaStorage, rows: &Rows, props: DeviceProps) -> Result<Plan> {
    let dtype = storage.dtype();
    // A pitch that is none of whole vectors: what is planned for holds rows wherever they begin.
    let pitch = match rows.start % (VECTOR_BYTES / dtype.size_in_bytes()) {
        0 => rows.pitch,
        _ => rows.pitch | 1,
    };
    top.plan(rows.count, rows.width, pitch, dtype, props)
}

fn launch(
    top: &TopK,
    storage: &CudaStorage,
    rows: &Rows,
    [start, end]: BoundsOf<CudaStorage>,
    memory: Memory,
) -> Result<()> {
    if rows.count == 0 {
        return Ok(());
    }
    let device = storage.device();
    let props = device_props(device)?;
    let plan = plan(top, storage, rows, props)?;
    if plan.shared_bytes > props.shared_per_block {
        bail!(
            "{OP}: {} bytes of shared memory a block are needed, the device has {}",
            plan.shared_bytes,
            props.shared_per_block
        )
    }
    let kernel = kernel(device, storage.dtype(), plan.mapping, plan.shared_bytes)?;
    let stream = kernel.stream.clone();
    let mut addresses = Addresses::new(&stream);
    let scores = match &storage.slice {
        CudaStorageSlice::F32(slice) => addresses.of(slice, rows.start),
        CudaStorageSlice::F16(slice) => addresses.of(slice, rows.start),
        CudaStorageSlice::BF16(slice) => addresses.of(slice, rows.start),
        _ => bail!(
            "{OP}: scores are {:?}, F32, F16 or BF16 is needed",
            storage.dtype()
        ),
    };
    let request = Request {
        scores,
        pitch: rows.pitch as i64,
        start: bound(&mut addresses, start)?,
        end: bound(&mut addresses, end)?,
        positions: addresses.written(memory.positions),
        values: memory.values.map_or(0, |values| addresses.written(values)),
        counts: addresses.written(memory.counts),
        routes: memory.routes.map_or(0, |routes| addresses.written(routes)),
        workspace: memory.workspace.map_or(0, |words| addresses.written(words)),
        width: rows.width as i32,
        k: top.k as i32,
        capacity: plan.capacity as i32,
        stride: plan.stride as i32,
        margin: plan.margin.unwrap_or(0.0),
        deviations: plan.deviations,
        order: match top.order {
            Order::Unordered => 0,
            Order::ByPosition => 1,
            Order::ByValue => 2,
        },
        band: plan.band as i32,
        fixed_stride: (plan.view == View::FixedStride) as i32,
        blocks: plan.mapping.blocks() as i32,
    };
    let blocks = plan.mapping.blocks();
    let (teams, of_cluster) = match plan.mapping {
        Mapping::Cluster(_) | Mapping::Exact(_) => (rows.count as u32, blocks),
        _ => (rows.count as u32 * blocks, 1),
    };
    let teams = Teams {
        rows: teams,
        blocks: of_cluster,
        threads: THREADS,
        shared_bytes: plan.shared_bytes as u32,
    };
    // SAFETY: `Rows` has checked that every row lies in the scores, `check_bound` that each has a
    // bound, and the outputs hold as many rows; the workspace has a segment for every block of the
    // plan.
    unsafe { kernel.launch(teams, [arg(&request)]) }
}

/// Positions, counts and, if asked for, values.
pub(super) fn select(
    top: &TopK,
    storage: &CudaStorage,
    rows: &Rows,
    bounds: BoundsOf<CudaStorage>,
) -> Result<(CudaStorage, CudaStorage, Option<CudaStorage>)> {
    let device = storage.device();
    let slots = rows.count * top.k;
    // SAFETY: the kernel writes every element.
    let (mut positions, mut counts, mut values) = unsafe {
        (
            alloc::<u32>(device, slots)?,
            alloc::<u32>(device, rows.count)?,
            match top.values {
                true => Some(alloc::<f32>(device, slots)?),
                false => None,
            },
        )
    };
    let props = device_props(device)?;
    let plan = plan(top, storage, rows, props)?;
    let mut workspace = match plan.workspace_bytes {
        0 => None,
        bytes => Some(device.alloc_zeros::<u32>(bytes / size_of::<u32>())?),
    };
    let memory = Memory {
        positions: &mut positions,
        counts: &mut counts,
        values: values.as_mut(),
        routes: None,
        workspace: workspace.as_mut(),
    };
    launch(top, storage, rows, bounds, memory)?;
    let wrap_u32 = |slice| CudaStorage::wrap_cuda_slice(slice, device.clone());
    Ok((
        wrap_u32(positions),
        wrap_u32(counts),
        values.map(|slice| CudaStorage::wrap_cuda_slice(slice, device.clone())),
    ))
}

pub(super) fn select_into(
    top: &TopK,
    storage: &CudaStorage,
    rows: &Rows,
    bounds: BoundsOf<CudaStorage>,
    out: Outputs,
    workspace: &mut Workspace,
) -> Result<()> {
    let workspace = match &mut workspace.words {
        Buffer::Cuda(words) => Some(&mut words.slice),
        Buffer::Cpu(_) => None,
    };
    let memory = Memory {
        positions: &mut out.positions.slice,
        counts: &mut out.counts.slice,
        values: out.values.map(|values| &mut values.slice),
        routes: out.routes.map(|routes| &mut routes.slice),
        workspace,
    };
    launch(top, storage, rows, bounds, memory)
}
