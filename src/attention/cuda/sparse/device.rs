//! The launches of `kernels/attention`, as planned.

use super::super::super::buffers::Workspace;
use super::super::super::parts::Part;
use super::super::super::sparse::{Attend, Source};
use super::super::ints::{ints, Ints};
use super::plan::{self, Few, Kind, Plan, Props};
use crate::buffer::Buffer;
use crate::cuda::{
    arg, forced_clusters, forced_sm80, of_dtype, of_half, runs_sm90, Addresses, Kernel, Teams,
    SPARSE, SPARSE_LATENT, SPARSE_LATENT_FEW, SPARSE_TILE, SPARSE_WIDE,
};
use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::sys::CUdevice_attribute_enum as Attribute;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, DeviceRepr};
use candle_core::cuda_backend::{CudaStorageSlice, WrapErr};
use candle_core::{bail, CudaDevice, CudaStorage, DType, Layout, Result};
use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

const OP: &str = "sparse_attention";

/// `Vectors` in `kernels/attention/sparse.cuh`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Vectors {
    at: u64,
    outer: i64,
    token: i64,
    head: i64,
}

/// `Request` in `kernels/attention/sparse.cuh`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Request {
    q: u64,
    q_strides: [i64; 2],
    keys: Vectors,
    values: Vectors,
    positions: u64,
    list_strides: [i64; 3],
    counts: Ints,
    starts: Ints,
    ends: Ints,
    sequences: Ints,
    table: Ints,
    sink: u64,
    sink_stride: i64,
    out: u64,
    out_strides: [i64; 2],
    lse: u64,
    lse_strides: [i64; 2],
    parts: u64,
    length: i64,
    sequence_count: i64,
    rows_each: i64,
    page: i64,
    pages: i64,
    width: i64,
    segment: i64,
    first_unit: i64,
    rows: i64,
    segments: i32,
    split: i32,
    group: i32,
    head_tiles: i32,
    column_tiles: i32,
    tiles: i32,
    slot_heads: i32,
    slot_columns: i32,
    key_dim: i32,
    value_dim: i32,
    block_shift: i32,
    aligned: i32,
    scale: f32,
    units: i32,
    tile_rows: i32,
    unused: i32,
}

const _: () = assert!(
    size_of::<Ints>() == 32 && size_of::<Vectors>() == 32 && size_of::<Request>() == 488,
    "the kernels take as much"
);

// SAFETY: plain old data, laid out as the kernels' struct of the same name.
unsafe impl DeviceRepr for Request {}

fn props(device: &CudaDevice) -> Result<Props> {
    let stream = device.cuda_stream();
    let attribute =
        |attribute| -> Result<usize> { Ok(stream.context().attribute(attribute).w()? as usize) };
    Ok(Props {
        multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        shared_per_block: attribute(
            Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
        )?,
        shared_per_multiprocessor: attribute(
            Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR,
        )?,
        sm90: runs_sm90(device)? && !forced_sm80(),
        clusters: 0,
    })
}

/// How many clusters of the form for few rows run at once, asked of the driver once.
fn clusters(device: &CudaDevice, dtype: DType) -> Result<usize> {
    static KNOWN: Mutex<BTreeMap<usize, usize>> = Mutex::new(BTreeMap::new());
    let stream = device.cuda_stream();
    let ordinal = stream.context().ordinal();
    let known = || KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    // Every form is loaded by the first call: none may be while a later one is captured.
    let kernel = few(device, dtype, 576)?;
    few(device, dtype, 512)?;
    if let Some(&most) = known().get(&ordinal) {
        return Ok(most);
    }
    let most = kernel.clusters(Few::BLOCKS as u32, Few::THREADS as u32)?;
    known().insert(ordinal, most);
    Ok(most)
}

fn few(device: &CudaDevice, dtype: DType, key_dim: usize) -> Result<Kernel> {
    let name = match key_dim {
        512 => "sparse_latent_few_512",
        _ => "sparse_latent_few_576",
    };
    of_half(&SPARSE_LATENT_FEW, dtype).kernel(device, name, Few::SHARED_BYTES as u32)
}

/// Floats of the workspace.
pub(in super::super::super) fn workspace_floats(device: &CudaDevice) -> Result<usize> {
    Ok(plan::workspace_floats(props(device)?.multiprocessors))
}

fn kernel(device: &CudaDevice, dtype: DType, kind: Kind) -> Result<Kernel> {
    let narrow = of_dtype(&SPARSE, dtype);
    let (module, name) = match kind {
        Kind::Fma(1) => (narrow, "sparse_fma_1"),
        Kind::Fma(_) => (narrow, "sparse_fma_4"),
        Kind::Narrow(64, 1) => (narrow, "sparse_mma_64_64_1"),
        Kind::Narrow(64, _) => (narrow, "sparse_mma_64_64_2"),
        Kind::Narrow(128, 1) => (narrow, "sparse_mma_128_128_1"),
        Kind::Narrow(128, _) => (narrow, "sparse_mma_128_128_2"),
        Kind::Narrow(_, 1) => (narrow, "sparse_mma_256_256_1"),
        Kind::Narrow(_, _) => (narrow, "sparse_mma_256_256_2"),
        Kind::Wide => (of_half(&SPARSE_WIDE, dtype), "sparse_mma_576_512_1"),
        Kind::Shared(1) => (of_half(&SPARSE_WIDE, dtype), "sparse_mma_shared_1"),
        Kind::Shared(_) => (of_half(&SPARSE_WIDE, dtype), "sparse_mma_shared_2"),
        Kind::Latent(512) => (of_half(&SPARSE_LATENT, dtype), "sparse_latent_512"),
        Kind::Latent(_) => (of_half(&SPARSE_LATENT, dtype), "sparse_latent_576"),
        Kind::Tile(64) => (of_half(&SPARSE_TILE, dtype), "sparse_tile_64"),
        Kind::Tile(_) => (of_half(&SPARSE_TILE, dtype), "sparse_tile_128"),
    };
    module.kernel(device, name, kind.shared_bytes() as u32)
}

/// Merging is of the file that every dtype has.
fn merging(device: &CudaDevice, dtype: DType) -> Result<Kernel> {
    of_dtype(&SPARSE, dtype).kernel(device, "sparse_merge", 0)
}

/// Loads all kernels for tensors of this dtype.
pub(crate) fn preload(device: &CudaDevice, dtype: DType) -> Result<()> {
    let mut kinds = vec![Kind::Fma(1), Kind::Fma(4)];
    if dtype != DType::F32 {
        for tiles in [1, 2] {
            kinds.extend([64, 128, 256].map(|dim| Kind::Narrow(dim, tiles)));
            kinds.push(Kind::Shared(tiles));
        }
        kinds.push(Kind::Wide);
        if runs_sm90(device)? {
            kinds.extend([Kind::Latent(512), Kind::Latent(576)]);
            kinds.extend([Kind::Tile(64), Kind::Tile(128)]);
            clusters(device, dtype)?;
        }
    }
    for kind in kinds {
        kernel(device, dtype, kind)?;
    }
    merging(device, dtype)?;
    Ok(())
}

fn floats<'a>(addresses: &mut Addresses<'a>, part: &Part<'a, CudaStorage>) -> Result<u64> {
    let offset = part.layout.start_offset();
    Ok(match &part.storage.slice {
        CudaStorageSlice::F32(slice) => addresses.of(slice, offset),
        CudaStorageSlice::F16(slice) => addresses.of(slice, offset),
        CudaStorageSlice::BF16(slice) => addresses.of(slice, offset),
        _ => bail!(
            "{OP}: a tensor is {:?}, F32, F16 or BF16 is needed",
            part.storage.dtype()
        ),
    })
}

fn written<'a>(addresses: &mut Addresses<'a>, storage: &'a mut CudaStorage) -> Result<u64> {
    let dtype = storage.dtype();
    Ok(match &mut storage.slice {
        CudaStorageSlice::F32(slice) => addresses.written(slice),
        CudaStorageSlice::F16(slice) => addresses.written(slice),
        CudaStorageSlice::BF16(slice) => addresses.written(slice),
        _ => bail!("{OP}: an output is {dtype:?}, F32, F16 or BF16 is needed"),
    })
}

/// Where a launch writes.
struct Memory<'a> {
    out: (&'a mut CudaStorage, &'a Layout),
    lse: (&'a mut CudaStorage, &'a Layout),
    parts: Option<&'a mut CudaSlice<f32>>,
}

fn planned(request: &Attend<CudaStorage>) -> Result<(Plan, Props)> {
    let device = request.q.storage.device();
    let dtype = request.q.storage.dtype();
    let mut props = props(device)?;
    let half = dtype != DType::F32;
    let places = &request.located.places;
    let rows_each = match request.located.row_sequences {
        Some(_) => 0,
        None => places.rows_each,
    };
    let values_of_keys = request.values.is_none();
    let plan = |props: &Props| {
        plan::plan(
            &request.dims,
            half,
            values_of_keys,
            request.scale,
            rows_each,
            props,
        )
    };
    let mut planned = plan(&props);
    if matches!(planned.kind, Kind::Latent(_)) {
        props.clusters = match (clusters(device, dtype)?, forced_clusters()) {
            (0, _) | (_, Some(false)) => 0,
            (_, Some(true)) => usize::MAX,
            (most, None) => most,
        };
        planned = plan(&props);
    }
    Ok((planned, props))
}

fn launch(request: &Attend<CudaStorage>, plan: &Plan, props: &Props, memory: Memory) -> Result<()> {
    let dims = request.dims;
    if plan.units == 0 {
        return Ok(());
    }
    let device = request.q.storage.device();
    let dtype = request.q.storage.dtype();
    let kernel = match plan.few {
        true => few(device, dtype, dims.key_dim)?,
        false => kernel(device, dtype, plan.kind)?,
    };
    let merge = match plan.split {
        true => Some(merging(device, dtype)?),
        false => None,
    };
    let stream = kernel.stream.clone();
    let mut addresses = Addresses::new(&stream);

    let element = dtype.size_in_bytes();
    let aligned = |at: u64, strides: &[usize]| {
        at.is_multiple_of(16)
            && strides
                .iter()
                .all(|stride| (stride * element).is_multiple_of(16))
    };
    let places = request.located.places;
    let vectors = |at: u64, layout: &Layout| {
        let strides = layout.stride();
        let [outer, token] = places.strides(strides);
        let head = strides[strides.len() - 2];
        let vectors = Vectors {
            at,
            outer: outer as i64,
            token: token as i64,
            head: head as i64,
        };
        (vectors, aligned(at, &[outer, token, head]))
    };
    let q = floats(&mut addresses, &request.q)?;
    let q_strides = &request.q.layout.stride()[..2];
    let at = floats(&mut addresses, &request.keys)?;
    let (keys, keys_aligned) = vectors(at, request.keys.layout);
    let (values, values_aligned) = match &request.values {
        Some(part) => vectors(floats(&mut addresses, part)?, part.layout),
        None => (keys, keys_aligned),
    };
    let positions = match request.positions.source {
        Source::Storage(storage) => match &storage.slice {
            CudaStorageSlice::U32(slice) => addresses.of(slice, request.positions.start),
            _ => bail!("{OP}: positions are {:?}, U32 is needed", storage.dtype()),
        },
        Source::Buffer(Buffer::Cuda(buffer)) => {
            addresses.of(&buffer.slice, request.positions.start)
        }
        Source::Buffer(Buffer::Cpu(_)) => unreachable!("all arguments are on one device"),
    };
    let mut list_strides = request.positions.strides.map(|stride| stride as i64);
    if dims.lists == 1 {
        list_strides[1] = 0;
    }
    let (out, out_layout) = memory.out;
    let (lse, lse_layout) = memory.lse;
    let out = written(&mut addresses, out)? + (out_layout.start_offset() * element) as u64;
    let lse = written(&mut addresses, lse)? + (lse_layout.start_offset() * size_of::<f32>()) as u64;
    let out_strides = &out_layout.stride()[..2];
    let flags = [
        aligned(q, q_strides),
        keys_aligned,
        values_aligned,
        aligned(out, out_strides) && dims.value_dim.is_multiple_of(2),
    ];
    let mut asked = Request {
        q,
        q_strides: [q_strides[0] as i64, q_strides[1] as i64],
        keys,
        values,
        positions,
        list_strides,
        counts: ints(OP, &mut addresses, request.counts.as_ref())?,
        starts: ints(OP, &mut addresses, request.bounded.starts.as_ref())?,
        ends: ints(OP, &mut addresses, request.bounded.ends.as_ref())?,
        sequences: ints(OP, &mut addresses, request.located.row_sequences.as_ref())?,
        table: ints(OP, &mut addresses, request.located.table.as_ref())?,
        sink: match &request.sink {
            Some(sink) => floats(&mut addresses, sink)?,
            None => 0,
        },
        sink_stride: match &request.sink {
            Some(sink) => sink.layout.stride()[0] as i64,
            None => 0,
        },
        out,
        out_strides: [out_strides[0] as i64, out_strides[1] as i64],
        lse,
        lse_strides: [lse_layout.stride()[0] as i64, lse_layout.stride()[1] as i64],
        parts: memory.parts.map_or(0, |parts| addresses.written(parts)),
        length: places.length as i64,
        sequence_count: places.sequences as i64,
        rows_each: places.rows_each.max(1) as i64,
        page: places.page as i64,
        pages: places.pages as i64,
        width: dims.width as i64,
        segment: plan.segment as i64,
        first_unit: 0,
        rows: dims.rows as i64,
        segments: plan.segments as i32,
        split: plan.split as i32,
        group: (dims.heads / dims.kv_heads) as i32,
        head_tiles: plan.head_tiles as i32,
        column_tiles: plan.column_tiles as i32,
        tiles: plan.tiles as i32,
        slot_heads: plan.slot_heads as i32,
        slot_columns: plan.slot_columns as i32,
        key_dim: dims.key_dim as i32,
        value_dim: dims.value_dim as i32,
        block_shift: dims.block.trailing_zeros() as i32,
        aligned: flags
            .iter()
            .enumerate()
            .map(|(bit, &flag)| (flag as i32) << bit)
            .sum(),
        scale: request.scale * std::f32::consts::LOG2_E,
        units: 0,
        tile_rows: plan.tile_rows as i32,
        unused: 0,
    };
    if plan.kind.shared_bytes() > props.shared_per_block {
        bail!(
            "{OP}: {} bytes of shared memory a block are needed, the device has {}",
            plan.kind.shared_bytes(),
            props.shared_per_block
        )
    }
    for first in (0..plan.units).step_by(plan.units_per_launch) {
        let units = plan.units_per_launch.min(plan.units - first);
        asked.first_unit = first as i64;
        asked.units = units as i32;
        let jobs = units * if plan.split { plan.segments } else { 1 };
        let teams = match plan.few {
            true => Teams {
                rows: jobs as u32,
                blocks: Few::BLOCKS as u32,
                threads: Few::THREADS as u32,
                shared_bytes: Few::SHARED_BYTES as u32,
            },
            false => Teams {
                rows: plan.walkers.map_or(jobs, |walkers| jobs.min(walkers)) as u32,
                blocks: 1,
                threads: plan.kind.threads() as u32,
                shared_bytes: plan.kind.shared_bytes() as u32,
            },
        };
        // SAFETY: `Checked` has held the shapes against each other, so every row, list, bound and
        // output that the kernel derives from a unit lies in its tensor; keys are read only at
        // positions below the length and on pages that exist. The parts hold what the plan says.
        unsafe { kernel.launch(teams, [arg(&asked)])? };
        if let Some(merge) = &merge {
            let teams = Teams {
                rows: (units * plan.slot_heads) as u32,
                blocks: 1,
                threads: 128,
                shared_bytes: 0,
            };
            // SAFETY: as above; the launch before on the same stream has written the parts.
            unsafe { merge.launch(teams, [arg(&asked)])? };
        }
    }
    Ok(())
}

/// The output `[S, Hq, Dv]` of the queries' dtype and the lse F32 `[S, Hq]`, both dense.
pub(in super::super::super) fn sparse_attention(
    request: &Attend<CudaStorage>,
) -> Result<(CudaStorage, CudaStorage)> {
    let dims = request.dims;
    let device = request.q.storage.device();
    let (plan, props) = planned(request)?;
    let lse_layout = Layout::contiguous((dims.rows, dims.heads));
    let out_layout = Layout::contiguous((dims.rows, dims.heads, dims.value_dim));
    let elements = dims.rows * dims.heads * dims.value_dim;
    macro_rules! alloc {
        ($type:ty, $count:expr) => {
            // SAFETY: the kernels write every element.
            CudaStorage::wrap_cuda_slice(unsafe { device.alloc::<$type>($count)? }, device.clone())
        };
    }
    let mut out = match request.q.storage.dtype() {
        DType::F16 => alloc!(half::f16, elements),
        DType::BF16 => alloc!(half::bf16, elements),
        _ => alloc!(f32, elements),
    };
    let mut lse = alloc!(f32, dims.rows * dims.heads);
    let mut parts = match plan.part_floats {
        0 => None,
        // SAFETY: no kernel reads what none has written.
        floats => Some(unsafe { device.alloc::<f32>(floats)? }),
    };
    let memory = Memory {
        out: (&mut out, &out_layout),
        lse: (&mut lse, &lse_layout),
        parts: parts.as_mut(),
    };
    launch(request, &plan, &props, memory)?;
    Ok((out, lse))
}

/// The same into tensors of these layouts.
pub(in super::super::super) fn sparse_attention_into(
    request: &Attend<CudaStorage>,
    [out, lse]: [(&mut CudaStorage, &Layout); 2],
    workspace: &mut Workspace,
) -> Result<()> {
    let (plan, props) = planned(request)?;
    let Buffer::Cuda(parts) = &mut workspace.parts else {
        unreachable!("the workspace is on the device of the queries")
    };
    let memory = Memory {
        out,
        lse,
        parts: Some(&mut parts.slice),
    };
    launch(request, &plan, &props, memory)
}
