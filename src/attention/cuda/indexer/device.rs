//! The launches of `kernels/attention/bounds.cu` and `indexer*.cu`.

use super::super::super::indexer::{Rows, Scores};
use super::super::super::keys::{Bounded, Lengths, Places};
use super::super::super::parts::Part;
use super::super::ints::{ints, Ints};
use crate::cuda::{
    alloc, arg, forced_sm80, runs_sm90, Addresses, Kernel, Teams, BOUNDS, INDEXER_FILL,
    INDEXER_SM80, INDEXER_SM90,
};
use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::sys::{
    self, CUdevice_attribute_enum as Attribute, CUtensorMapDataType_enum as Element,
    CUtensorMapSwizzle_enum as Swizzle,
};
use candle_core::cuda_backend::cudarc::driver::DeviceRepr;
use candle_core::cuda_backend::{CudaStorageSlice, WrapErr};
use candle_core::{bail, CudaDevice, CudaStorage, DType, Result};

const OP: &str = "indexer_scores";
const BOUNDS_OP: &str = "visible keys";

/// The most heads, and elements of one of them, that the kernels are compiled for.
const MOST_HEADS: usize = 128;
const MOST_DIM: usize = 128;

/// Keys of a unit: `kUnit` in `kernels/attention/indexer.cuh`.
const UNIT: usize = 64;
/// Columns of the kernels of compute capability 8.0: `kColumns` in `indexer_mma.cuh`.
const SM80_COLUMNS: usize = 128;
const SM80_THREADS: u32 = 128;
/// Threads of those of 9.0, and their dynamic shared memory: `kThreads` and `kShared` in
/// `indexer_wgmma.cuh`.
const SM90_THREADS: u32 = 512;
const SM90_SHARED: u32 = 224 * 1024;

/// `Request` in `kernels/attention/indexer.cuh`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Request {
    queries: u64,
    keys: u64,
    scales: u64,
    weights: u64,
    scores: u64,
    query_strides: [i64; 2],
    key_strides: [i64; 2],
    scale_strides: [i64; 2],
    weight_strides: [i64; 2],
    pitch: i64,
    starts: Ints,
    ends: Ints,
    row_sequences: Ints,
    table: Ints,
    sequences: i64,
    pages: i64,
    length: u32,
    page: u32,
    page_shift: i32,
    rows: i32,
    rows_each: i32,
    items: i32,
    items_each: i32,
    heads: i32,
    bytes: i32,
    query_vectors: i32,
    key_vectors: i32,
    tile: i32,
    alignment: u32,
    scale_tiles: i32,
    unused: i32,
}

const _: () = assert!(
    size_of::<Ints>() == 32 && size_of::<Request>() == 320,
    "the kernels take as much"
);

/// `TensorMap` in `kernels/common/pipeline.cuh`.
#[repr(C, align(64))]
#[derive(Clone, Copy, Default)]
struct TensorMap([u64; 16]);

/// `Maps` in `kernels/attention/indexer_wgmma.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Maps {
    queries: TensorMap,
    keys: TensorMap,
    scales: TensorMap,
}

// SAFETY: plain old data, laid out as the kernels' structs of the same names.
unsafe impl DeviceRepr for Request {}
// SAFETY: likewise.
unsafe impl DeviceRepr for Maps {}

fn floats<'a>(addresses: &mut Addresses<'a>, part: &Part<'a, CudaStorage>) -> Result<u64> {
    let offset = part.layout.start_offset();
    Ok(match &part.storage.slice {
        CudaStorageSlice::F32(slice) => addresses.of(slice, offset),
        CudaStorageSlice::F16(slice) => addresses.of(slice, offset),
        CudaStorageSlice::BF16(slice) => addresses.of(slice, offset),
        CudaStorageSlice::F8E4M3(slice) => addresses.of(slice, offset),
        _ => bail!(
            "{OP}: a tensor is {:?}, F32, F16, BF16 or F8E4M3 is needed",
            part.storage.dtype()
        ),
    })
}

/// A number as the kernels take it, with room for what they add.
fn int(op: &str, what: &str, number: usize) -> Result<i32> {
    const MOST: usize = 1 << 30;
    if number > MOST {
        bail!("{op}: there are {number} {what}, at most 2^30 are supported on CUDA")
    }
    Ok(number as i32)
}

/// Which kernel serves a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Choice {
    /// Of compute capability 9.0.
    sm90: Option<Columns>,
    /// Heads that a query is given columns for.
    heads: usize,
}

/// The columns of a kernel of compute capability 9.0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Columns {
    /// 64 of dimension 128: the fewest queries that share a read of the keys, for decoding.
    Few,
    /// Twice 128 of dimension 128.
    Many,
    /// 128 of any dimension.
    Any,
}

impl Choice {
    /// `rows_each` are the rows of a sequence, or 0 where only the device knows.
    fn new(sm90: bool, heads: usize, dim: usize, rows_each: usize) -> Self {
        let heads = heads.next_power_of_two().max(16);
        let few = heads <= 64 && (1..=64 / heads).contains(&rows_each);
        let columns = match dim {
            MOST_DIM if few => Columns::Few,
            MOST_DIM => Columns::Many,
            _ => Columns::Any,
        };
        Self {
            sm90: sm90.then_some(columns),
            heads,
        }
    }

    fn columns(self) -> usize {
        match self.sm90 {
            None => SM80_COLUMNS,
            Some(Columns::Few) => 64,
            Some(Columns::Many | Columns::Any) => 128,
        }
    }

    /// Rows of queries of an item.
    fn rows(self) -> usize {
        let passes = if self.sm90 == Some(Columns::Many) {
            2
        } else {
            1
        };
        passes * self.columns() / self.heads
    }

    fn kernel(self, device: &CudaDevice, dtype: DType, shared_bytes: u32) -> Result<Kernel> {
        let which = match dtype {
            DType::F16 => 0,
            DType::BF16 => 1,
            DType::F8E4M3 => 2,
            _ => 3,
        };
        let heads = self.heads;
        let (module, name) = match self.sm90 {
            None => (INDEXER_SM80[which], format!("indexer_{heads}")),
            Some(columns) => {
                let (module, columns) = match columns {
                    Columns::Few => (0, "few"),
                    Columns::Many => (1, "many"),
                    Columns::Any => (2, "any"),
                };
                let name = format!("indexer_{columns}_{heads}");
                (INDEXER_SM90[which][module], name)
            }
        };
        module.kernel(device, &name, shared_bytes)
    }
}

/// Whether the kernels of compute capability 9.0 serve this dtype. Of f32 tensor cores would round
/// the factors.
fn serves_sm90(device: &CudaDevice, dtype: DType) -> Result<bool> {
    Ok(dtype != DType::F32 && !forced_sm80() && runs_sm90(device)?)
}

/// Loads all kernels that would serve queries of this dtype.
pub(in super::super::super) fn preload(device: &CudaDevice, dtype: DType) -> Result<()> {
    let sm90 = serves_sm90(device, dtype)?;
    for name in ["bounds_decode", "bounds_packed"] {
        BOUNDS.kernel(device, name, 0)?;
    }
    INDEXER_FILL.kernel(device, "indexer_fill", 0)?;
    for heads in [16, 32, 64, 128] {
        for dim in [MOST_DIM, MOST_DIM / 2] {
            for rows_each in [1, 0] {
                Choice::new(sm90, heads, dim, rows_each).kernel(device, dtype, SM90_SHARED)?;
            }
        }
    }
    Ok(())
}

fn multiprocessors(device: &CudaDevice) -> Result<u32> {
    let stream = device.cuda_stream();
    let count = stream
        .context()
        .attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)
        .w()?;
    Ok(count as u32)
}

/// The address of this element of an I64 storage.
fn written<'a>(
    addresses: &mut Addresses<'a>,
    (storage, start): (&'a mut CudaStorage, usize),
) -> Result<u64> {
    let dtype = storage.dtype();
    match &mut storage.slice {
        CudaStorageSlice::I64(slice) => {
            Ok(addresses.written(slice) + (start * size_of::<i64>()) as u64)
        }
        _ => bail!("{BOUNDS_OP}: an output is {dtype:?}, I64 is needed"),
    }
}

fn launch_bounds(
    lengths: &Lengths<CudaStorage>,
    rows: usize,
    starts: Option<(&mut CudaStorage, usize)>,
    ends: (&mut CudaStorage, usize),
) -> Result<()> {
    const THREADS: u32 = 256;
    if rows == 0 {
        return Ok(());
    }
    let device = ends.0.device().clone();
    let kernel = BOUNDS.kernel(
        &device,
        match lengths {
            Lengths::Decode { .. } => "bounds_decode",
            Lengths::Packed { .. } => "bounds_packed",
        },
        0,
    )?;
    let stream = kernel.stream.clone();
    let mut addresses = Addresses::new(&stream);
    let ends = written(&mut addresses, ends)?;
    let starts = match starts {
        Some(starts) => written(&mut addresses, starts)?,
        None => 0,
    };
    let threads_each = match lengths {
        Lengths::Decode { .. } => 1,
        Lengths::Packed { .. } => 32,
    };
    let blocks = (rows * threads_each).div_ceil(THREADS as usize);
    let teams = Teams {
        rows: blocks.min(1 << 20) as u32,
        blocks: 1,
        threads: THREADS,
        shared_bytes: 0,
    };
    let count = rows as i64;
    match lengths {
        Lengths::Decode { lengths } => {
            let each = (rows / lengths.layout.dims()[0].max(1)) as i64;
            let lengths = ints(BOUNDS_OP, &mut addresses, Some(lengths))?;
            // SAFETY: every row has a length, and an element of the output.
            unsafe { kernel.launch(teams, [arg(&lengths), arg(&each), arg(&count), arg(&ends)]) }
        }
        Lengths::Packed {
            sequences,
            queries,
            keys,
            offsets,
        } => {
            let queries = ints(BOUNDS_OP, &mut addresses, Some(queries))?;
            let keys = ints(BOUNDS_OP, &mut addresses, Some(keys))?;
            let offsets = ints(BOUNDS_OP, &mut addresses, offsets.as_ref())?;
            let sequences = *sequences as i64;
            let arguments = [
                arg(&queries),
                arg(&keys),
                arg(&offsets),
                arg(&sequences),
                arg(&count),
                arg(&starts),
                arg(&ends),
            ];
            // SAFETY: the tensors have the lengths that are checked before: an element more than
            // there are sequences, and the outputs one for every row.
            unsafe { kernel.launch(teams, arguments) }
        }
    }
}

/// The starts, where there are any, and the ends of the rows: I64 `[S]` each.
pub(in super::super::super) fn bounds(
    lengths: &Lengths<CudaStorage>,
    rows: usize,
) -> Result<(Option<CudaStorage>, CudaStorage)> {
    let (device, packed) = match lengths {
        Lengths::Decode { lengths } => (lengths.storage.device(), false),
        Lengths::Packed { queries, .. } => (queries.storage.device(), true),
    };
    let unset = || -> Result<CudaStorage> {
        // SAFETY: the kernel writes every element that there is a row for.
        let slice = unsafe { alloc::<i64>(device, rows)? };
        Ok(CudaStorage::wrap_cuda_slice(slice, device.clone()))
    };
    let mut starts = packed.then(unset).transpose()?;
    let mut ends = unset()?;
    launch_bounds(
        lengths,
        rows,
        starts.as_mut().map(|starts| (starts, 0)),
        (&mut ends, 0),
    )?;
    Ok((starts, ends))
}

/// The same into I64 tensors that begin at these elements, dense.
pub(in super::super::super) fn bounds_into(
    lengths: &Lengths<CudaStorage>,
    rows: usize,
    starts: Option<(&mut CudaStorage, usize)>,
    ends: (&mut CudaStorage, usize),
) -> Result<()> {
    launch_bounds(lengths, rows, starts, ends)
}

/// A tensor of three dimensions that the copy engine reads in tiles: its innermost dimension dense,
/// the strides of the others in bytes. `None` where it cannot.
fn tensor_map(
    element: Element,
    at: u64,
    dims: [usize; 3],
    strides: [i64; 2],
    tile: [usize; 3],
    swizzle: Swizzle,
) -> Option<TensorMap> {
    // What a dimension of 1 has as its stride means nothing, and is often 0.
    let stride = |i: usize| {
        if dims[i + 1] == 1 {
            16
        } else {
            strides[i] as u64
        }
    };
    let strides = [stride(0), stride(1)];
    // Coordinates are signed.
    let fits = dims.iter().all(|&dim| (1..1 << 31).contains(&dim))
        && strides
            .iter()
            .all(|&stride| stride > 0 && stride.is_multiple_of(16) && stride < 1 << 40)
        && at.is_multiple_of(16);
    if !fits {
        return None;
    }
    let dims = dims.map(|dim| dim as u64);
    let tile = tile.map(|dim| dim as u32);
    let mut map = sys::CUtensorMap { opaque: [0; 16] };
    // SAFETY: all arrays have the three or two elements that the rank asks for, and nothing is read
    // of the tensor itself.
    let encoded = unsafe {
        sys::cuTensorMapEncodeTiled(
            &mut map,
            element,
            3,
            at as *mut std::ffi::c_void,
            dims.as_ptr(),
            strides.as_ptr(),
            tile.as_ptr(),
            [1u32; 3].as_ptr(),
            sys::CUtensorMapInterleave_enum::CU_TENSOR_MAP_INTERLEAVE_NONE,
            swizzle,
            sys::CUtensorMapL2promotion_enum::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            sys::CUtensorMapFloatOOBfill_enum::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    };
    encoded.result().ok().map(|()| TensorMap(map.opaque))
}

/// Has the copy engine fetch what it can: queries and keys, or neither, and then scales too.
fn plan_tiles(request: &mut Request, places: &Places, choice: Choice, dtype: DType) -> Maps {
    let mut maps = Maps::default();
    if choice.sm90.is_none() {
        return maps;
    }
    let tile = match places.page {
        0 => UNIT,
        page => UNIT.min(1 << page.trailing_zeros()),
    };
    // Eight keys are the least that a tile of swizzled rows has.
    if tile < 8 {
        return maps;
    }
    let size = dtype.size_in_bytes();
    let element = match size {
        1 => Element::CU_TENSOR_MAP_DATA_TYPE_UINT8,
        _ => Element::CU_TENSOR_MAP_DATA_TYPE_UINT16,
    };
    let (tokens, outer) = match places.page {
        0 => (places.length, places.sequences),
        page => (page, places.pages),
    };
    let dim = request.bytes as usize / size;
    let swizzle = Swizzle::CU_TENSOR_MAP_SWIZZLE_128B;
    let [query_row, query_head] = request.query_strides;
    let [key_outer, key_token] = request.key_strides;
    let queries = tensor_map(
        element,
        request.queries,
        [dim, request.heads as usize, request.rows as usize],
        [query_head, query_row],
        [128 / size, choice.heads, choice.columns() / choice.heads],
        swizzle,
    );
    let keys = tensor_map(
        element,
        request.keys,
        [dim, tokens, outer],
        [key_token, key_outer],
        [128 / size, tile, 1],
        swizzle,
    );
    let (Some(queries), Some(keys)) = (queries, keys) else {
        return maps;
    };
    (maps.queries, maps.keys) = (queries, keys);
    request.tile = tile as i32;
    if places.page != 0 {
        request.alignment = tile as u32;
    }
    // Tiles begin at multiples of 128 bytes of shared memory.
    let [scale_outer, scale_token] = request.scale_strides;
    if request.scales != 0 && tile >= 32 && (scale_token == 1 || tokens == 1) {
        let map = tensor_map(
            Element::CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
            request.scales,
            [tokens, 1, outer],
            [16, scale_outer * size_of::<f32>() as i64],
            [tile, 1, 1],
            Swizzle::CU_TENSOR_MAP_SWIZZLE_NONE,
        );
        if let Some(map) = map {
            maps.scales = map;
            request.scale_tiles = 1;
        }
    }
    maps
}

/// Writes the scores of what rows see, and with `fill` -inf for the rest.
fn launch(
    request: &Scores<CudaStorage>,
    out: &mut CudaStorage,
    rows: Rows,
    fill: bool,
) -> Result<()> {
    let Scores { heads, dim, .. } = *request;
    let places = request.located.places;
    let dtype = request.q.storage.dtype();
    if heads > MOST_HEADS || dim > MOST_DIM {
        bail!("{OP}: q has {heads} heads of dimension {dim}, at most {MOST_HEADS} of at most {MOST_DIM} are supported on CUDA")
    }
    if request.rows == 0 || places.length == 0 {
        return Ok(());
    }
    let device = request.q.storage.device();
    let choice = Choice::new(serves_sm90(device, dtype)?, heads, dim, places.rows_each);
    let (items, items_each) = match &request.located.row_sequences {
        Some(_) => (request.rows, 0),
        None => {
            let each = places.rows_each.div_ceil(choice.rows());
            (places.sequences * each, each)
        }
    };
    let size = dtype.size_in_bytes();
    let bytes = dim * size;
    let (threads, shared_bytes) = match choice.sm90 {
        Some(_) => (SM90_THREADS, SM90_SHARED),
        None => {
            // Queries of fp8 are held as f16, and of f32 a single unit is on chip at a time.
            let (held, stages) = match dtype {
                DType::F32 => (bytes, 1),
                DType::F8E4M3 => (2 * bytes, 3),
                _ => (bytes, 3),
            };
            let rows = |count: usize, bytes: usize| count * bytes.next_multiple_of(128);
            let bytes = rows(SM80_COLUMNS, held) + stages * rows(UNIT, bytes);
            (SM80_THREADS, bytes as u32)
        }
    };
    let kernel = choice.kernel(device, dtype, shared_bytes)?;
    let stream = kernel.stream.clone();
    let mut addresses = Addresses::new(&stream);

    let scale = size_of::<f32>();
    let Bounded { starts, ends } = &request.bounded;
    let in_bytes = |strides: [usize; 2]| strides.map(|stride| (stride * size) as i64);
    let plain = |strides: [usize; 2]| strides.map(|stride| stride as i64);
    let query = request.q.layout.stride();
    let weight = request.weights.layout.stride();
    let page = u32::try_from(places.page).map_err(candle_core::Error::wrap)?;
    let out_dtype = out.dtype();
    let scores = match &mut out.slice {
        CudaStorageSlice::F32(slice) => addresses.written(slice) + (rows.start * scale) as u64,
        _ => bail!("{OP}: the output is {out_dtype:?}, F32 is needed"),
    };
    let mut launched = Request {
        queries: floats(&mut addresses, &request.q)?,
        keys: floats(&mut addresses, &request.keys)?,
        scales: match &request.scales {
            Some(scales) => floats(&mut addresses, scales)?,
            None => 0,
        },
        weights: floats(&mut addresses, &request.weights)?,
        scores,
        query_strides: in_bytes([query[0], query[1]]),
        key_strides: in_bytes(places.strides(request.keys.layout.stride())),
        scale_strides: match &request.scales {
            Some(scales) => plain(places.strides(scales.layout.stride())),
            None => [0; 2],
        },
        weight_strides: plain([weight[0], weight[1]]),
        pitch: rows.stride as i64,
        starts: ints(OP, &mut addresses, starts.as_ref())?,
        ends: ints(OP, &mut addresses, ends.as_ref())?,
        row_sequences: ints(OP, &mut addresses, request.located.row_sequences.as_ref())?,
        table: ints(OP, &mut addresses, request.located.table.as_ref())?,
        sequences: places.sequences as i64,
        pages: places.pages as i64,
        length: u32::try_from(places.length).map_err(candle_core::Error::wrap)?,
        page,
        page_shift: match page.is_power_of_two() {
            true => page.trailing_zeros() as i32,
            false => -1,
        },
        rows: int(OP, "rows of queries", request.rows)?,
        rows_each: int(OP, "rows of queries", places.rows_each)?,
        items: int(OP, "sequences", items)?,
        items_each: int(OP, "rows of queries", items_each)?,
        heads: heads as i32,
        bytes: bytes as i32,
        query_vectors: 0,
        key_vectors: 0,
        tile: 0,
        alignment: 8,
        scale_tiles: 0,
        unused: 0,
    };
    let vectors = |at: u64, strides: [i64; 2]| {
        (at.is_multiple_of(16) && strides.iter().all(|stride| stride % 16 == 0)) as i32
    };
    launched.query_vectors = vectors(launched.queries, launched.query_strides);
    launched.key_vectors = vectors(launched.keys, launched.key_strides);
    let maps = plan_tiles(&mut launched, &places, choice, dtype);

    let processors = multiprocessors(device)?;
    if fill {
        let kernel = INDEXER_FILL.kernel(device, "indexer_fill", 0)?;
        let teams = Teams {
            rows: processors * 8,
            blocks: 1,
            threads: 256,
            shared_bytes: 0,
        };
        // SAFETY: as below.
        unsafe { kernel.launch(teams, [arg(&launched)])? };
    }
    let teams = Teams {
        // Of compute capability 8.0, what is resident at a time where shared memory is not all taken.
        rows: processors * if choice.sm90.is_some() { 1 } else { 2 },
        blocks: 1,
        threads,
        shared_bytes,
    };
    let (of_all, of_sm90) = (arg(&launched), arg(&maps));
    // SAFETY: shapes are checked before: every row of queries has its heads and weights, every
    // position of a sequence or a page a key and a scale, every row of the output an element for every
    // position, and where there are bounds or sequences every row one.
    unsafe {
        match choice.sm90 {
            Some(_) => kernel.launch(teams, [of_all, of_sm90]),
            None => kernel.launch(teams, [of_all]),
        }
    }
}

/// Scores F32 `[S, T]`, dense, with -inf where a row doesn't see.
pub(in super::super::super) fn indexer_scores(
    request: &Scores<CudaStorage>,
) -> Result<CudaStorage> {
    let device = request.q.storage.device();
    let length = request.located.places.length;
    // SAFETY: every element is written: what its row sees by one kernel, and the rest by the other.
    let slice = unsafe { alloc::<f32>(device, request.rows * length)? };
    let mut out = CudaStorage::wrap_cuda_slice(slice, device.clone());
    let rows = Rows {
        start: 0,
        stride: length,
    };
    launch(request, &mut out, rows, true)?;
    Ok(out)
}

/// Scores into rows of f32 that lie elsewhere; what a row doesn't see is left as it was.
pub(in super::super::super) fn indexer_scores_into(
    request: &Scores<CudaStorage>,
    out: &mut CudaStorage,
    rows: Rows,
) -> Result<()> {
    launch(request, out, rows, false)
}
