//! The launches of `kernels/attention/dsa.cuh` and `steps.cu`, products of cuBLAS into given memory, and
//! captured graphs.

use super::super::super::parts::Part;
use super::{Cache, Fp8, Keys, Product, Queries, Rows};
use crate::cuda::{arg, of_dtype, Addresses, Kernel, Teams, DSA, STEPS};
use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::cublas::{result, sys};
use candle_core::cuda_backend::cudarc::driver::sys::{
    CUgraphInstantiate_flags, CUstreamCaptureMode,
};
use candle_core::cuda_backend::cudarc::driver::{CudaGraph, DeviceRepr};
use candle_core::cuda_backend::{gemm_reduced_precision_f32, CudaStorageSlice, WrapErr};
use candle_core::{bail, CudaDevice, CudaStorage, DType, Device, Error, Result};
use std::ffi::c_int;

const OP: &str = "DsaAttention";

/// What allocates or uploads is not to be captured.
pub(in super::super::super) fn refuse_capture(op: &'static str, device: &Device) -> Result<()> {
    crate::cuda::refuse_capture(op, device.as_cuda_device()?)
}

/// Threads of every kernel here: `kThreads` in `kernels/attention/dsa.cuh`.
const THREADS: u32 = 256;
const WARPS: usize = THREADS as usize / 32;

/// `Rows` in `kernels/attention/dsa.cuh`.
#[repr(C)]
#[derive(Clone, Copy)]
struct RowsOf {
    ends: u64,
    sequences: u64,
    cos: u64,
    sin: u64,
    first: i64,
    each: i64,
    rotated: i32,
    eps: f32,
}

/// `KeysRequest` in `kernels/attention/dsa.cuh`.
#[repr(C)]
#[derive(Clone, Copy)]
struct KeysRequest {
    rows: RowsOf,
    products: u64,
    pitch: i64,
    query_gain: u64,
    latent_gain: u64,
    key_gain: u64,
    key_shift: u64,
    query_latent: u64,
    cache: u64,
    cache_strides: [i64; 2],
    index_keys: u64,
    keys_strides: [i64; 2],
    scales: u64,
    scales_strides: [i64; 2],
    rank: i32,
    latent: i32,
    dim: i32,
    interleaved: i32,
    fp8: [i32; 2],
}

/// `QueriesRequest` in `kernels/attention/dsa.cuh`.
#[repr(C)]
#[derive(Clone, Copy)]
struct QueriesRequest {
    rows: RowsOf,
    products: u64,
    pitch: i64,
    queries: u64,
    index_queries: u64,
    weights: u64,
    count: i64,
    heads: i32,
    nope: i32,
    latent: i32,
    index_heads: i32,
    dim: i32,
    interleaved: i32,
    fp8: [i32; 2],
}

const _: () = assert!(
    size_of::<RowsOf>() == 56
        && size_of::<KeysRequest>() == 208
        && size_of::<QueriesRequest>() == 136,
    "the kernels take as much"
);

// SAFETY: plain old data, laid out as the kernels' structs of the same names.
unsafe impl DeviceRepr for RowsOf {}
// SAFETY: likewise.
unsafe impl DeviceRepr for KeysRequest {}
// SAFETY: likewise.
unsafe impl DeviceRepr for QueriesRequest {}

/// Loads all kernels for a layer of this dtype.
pub(in super::super::super) fn preload(device: &CudaDevice, dtype: DType) -> Result<()> {
    for name in ["dsa_keys", "dsa_queries", "dsa_weights", "dsa_bias"] {
        of_dtype(&DSA, dtype).kernel(device, name, 0)?;
    }
    for name in ["steps_advance", "steps_everything"] {
        STEPS.kernel(device, name, 0)?;
    }
    Ok(())
}

/// The address of a tensor's first element.
fn read<'a>(addresses: &mut Addresses<'a>, part: &Part<'a, CudaStorage>) -> Result<u64> {
    let offset = part.layout.start_offset();
    Ok(match &part.storage.slice {
        CudaStorageSlice::F32(slice) => addresses.of(slice, offset),
        CudaStorageSlice::F16(slice) => addresses.of(slice, offset),
        CudaStorageSlice::BF16(slice) => addresses.of(slice, offset),
        CudaStorageSlice::U32(slice) => addresses.of(slice, offset),
        _ => bail!(
            "{OP}: a tensor is {:?}, F32, F16, BF16 or U32 is needed",
            part.storage.dtype()
        ),
    })
}

/// The address of the first element of a tensor that is written.
fn written<'a>(
    addresses: &mut Addresses<'a>,
    storage: &'a mut CudaStorage,
    offset: usize,
) -> Result<u64> {
    let dtype = storage.dtype();
    let at = match &mut storage.slice {
        CudaStorageSlice::F32(slice) => addresses.written(slice),
        CudaStorageSlice::F16(slice) => addresses.written(slice),
        CudaStorageSlice::BF16(slice) => addresses.written(slice),
        CudaStorageSlice::F8E4M3(slice) => addresses.written(slice),
        CudaStorageSlice::U32(slice) => addresses.written(slice),
        _ => bail!("{OP}: an output is {dtype:?}, F32, F16, BF16, F8E4M3 or U32 is needed"),
    };
    Ok(at + (offset * dtype.size_in_bytes()) as u64)
}

/// A size as cuBLAS and the kernels take it.
fn int(what: &str, value: usize) -> Result<c_int> {
    c_int::try_from(value).map_err(|_| {
        Error::msg(format!(
            "{OP}: {what} are {value}, at most 2^31 - 1 are accepted"
        ))
    })
}

fn teams(blocks: usize, shared_bytes: usize) -> Result<Teams> {
    Ok(Teams {
        rows: int("blocks of a launch", blocks)? as u32,
        blocks: 1,
        threads: THREADS,
        shared_bytes: shared_bytes as u32,
    })
}

/// Blocks for so many elements, which walk over them.
fn walkers(elements: usize) -> usize {
    elements.div_ceil(THREADS as usize).min(1 << 16)
}

fn kernel(device: &CudaDevice, dtype: DType, name: &str, shared_bytes: usize) -> Result<Kernel> {
    of_dtype(&DSA, dtype).kernel(device, name, shared_bytes as u32)
}

/// A product, in f32 and rounded once, and a bias `[outputs]` added to each of its rows, which then
/// are dense. `x` begins at its layout's offset, the matrices at theirs, one behind the other; the output at the first
/// element.
pub(in super::super::super) fn product(
    of: Product,
    x: Part<CudaStorage>,
    matrices: Part<CudaStorage>,
    bias: Option<Part<CudaStorage>>,
    out: &mut CudaStorage,
) -> Result<()> {
    use sys::{
        cublasComputeType_t as Compute, cublasOperation_t as Operation, cudaDataType_t as Type,
    };
    if of.rows * of.matrices * of.outputs == 0 {
        return Ok(());
    }
    let dtype = x.storage.dtype();
    if [matrices.storage.dtype(), out.dtype()] != [dtype; 2] {
        bail!(
            "{OP}: the operands of a product are {dtype:?}, {:?} and {:?}, they must be of one dtype",
            matrices.storage.dtype(),
            out.dtype()
        )
    }
    let plain = Compute::CUBLAS_COMPUTE_32F;
    let (element, compute) = match dtype {
        DType::F16 => (Type::CUDA_R_16F, plain),
        DType::BF16 => (Type::CUDA_R_16BF, plain),
        // As Candle's own products.
        _ if gemm_reduced_precision_f32() => {
            (Type::CUDA_R_32F, Compute::CUBLAS_COMPUTE_32F_FAST_TF32)
        }
        _ => (Type::CUDA_R_32F, plain),
    };
    let device = x.storage.device().clone();
    let stream = device.cuda_stream();
    let mut addresses = Addresses::new(&stream);
    let from = read(&mut addresses, &x)?;
    let by = read(&mut addresses, &matrices)?;
    let to = written(&mut addresses, out, 0)?;
    let blas = device.cublas_handle();
    // A row's pitch means nothing where there is one row, and must not be less than its length.
    let pitch = |[row, _]: [usize; 2], length| if of.rows == 1 { length } else { row };
    let (operation, leading) = match of.transposed {
        true => (Operation::CUBLAS_OP_T, of.inputs),
        false => (Operation::CUBLAS_OP_N, of.outputs),
    };
    let (one, zero) = (1f32, 0f32);
    // cuBLAS has columns first: its matrices are ours transposed.
    // SAFETY: the layer has made the sizes of what it loaded and allocated: each matrix has its rows of x
    // and of the output, with the strides given.
    unsafe {
        result::gemm_strided_batched_ex(
            *blas.handle(),
            operation,
            Operation::CUBLAS_OP_N,
            int("outputs of a product", of.outputs)?,
            int("rows", of.rows)?,
            int("inputs of a product", of.inputs)?,
            (&raw const one).cast(),
            by as *const _,
            element,
            int("numbers of a row", leading)?,
            (of.inputs * of.outputs) as i64,
            from as *const _,
            element,
            int("numbers of a row", pitch(of.x, of.inputs))?,
            of.x[1] as i64,
            (&raw const zero).cast(),
            to as *mut _,
            element,
            int("numbers of a row", pitch(of.out, of.outputs))?,
            of.out[1] as i64,
            int("matrices", of.matrices)?,
            compute,
            sys::cublasGemmAlgo_t::CUBLAS_GEMM_DEFAULT_TENSOR_OP,
        )
    }
    .map_err(Error::wrap)?;
    if let Some(bias) = bias {
        let count = of.rows * of.outputs;
        let kernel = kernel(&device, dtype, "dsa_bias", 0)?;
        let bias = read(&mut addresses, &bias)?;
        let teams = teams(walkers(count), 0)?;
        let (count, outputs) = (count as u64, of.outputs as u32);
        let arguments = [arg(&to), arg(&bias), arg(&count), arg(&outputs)];
        // SAFETY: the output has so many elements, and the bias one for each of a row.
        unsafe { kernel.launch(teams, arguments)? };
    }
    Ok(())
}

fn rows<'a>(addresses: &mut Addresses<'a>, rows: &Rows<'a, CudaStorage>) -> Result<RowsOf> {
    Ok(RowsOf {
        ends: read(addresses, &rows.ends)?,
        sequences: match &rows.sequences {
            Some(sequences) => read(addresses, sequences)?,
            None => 0,
        },
        cos: read(addresses, &rows.cos)?,
        sin: read(addresses, &rows.sin)?,
        first: rows.first as i64,
        each: rows.each.max(1) as i64,
        rotated: int("numbers that RoPE turns", rows.rotated)?,
        eps: rows.eps,
    })
}

fn fp8(how: Fp8) -> [i32; 2] {
    [how.hadamard as i32, how.power_of_two as i32]
}

/// The first element of a cache, and the strides of a sequence and of a token.
fn token_of<'a>(
    addresses: &mut Addresses<'a>,
    cache: Option<Cache<'a, '_, CudaStorage>>,
) -> Result<(u64, [i64; 2])> {
    let Some(Cache { storage, layout }) = cache else {
        return Ok((0, [0; 2]));
    };
    let strides = std::array::from_fn(|i| layout.stride()[i] as i64);
    Ok((written(addresses, storage, layout.start_offset())?, strides))
}

/// The queries' latent `[rows, rank]`, and new keys into the cache: `[B, C, 1, latent + rotated]`, and of an indexer
/// `[B, C, dim]` and scales `[B, C]`.
pub(in super::super::super) fn keys(
    request: &Keys<CudaStorage>,
    query_latent: &mut CudaStorage,
    cache: Cache<CudaStorage>,
    index_keys: Option<Cache<CudaStorage>>,
    scales: Option<Cache<CudaStorage>>,
) -> Result<()> {
    let count = request.rows.count;
    if count == 0 {
        return Ok(());
    }
    let dtype = request.products.storage.dtype();
    let device = request.products.storage.device();
    let dim = request.index.as_ref().map_or(0, |index| index.dim);
    let shared_bytes = dim * size_of::<f32>();
    check_dim(dim)?;
    let kernel = kernel(device, dtype, "dsa_keys", shared_bytes)?;
    let stream = kernel.stream.clone();
    let mut addresses = Addresses::new(&stream);
    let (cache, cache_strides) = token_of(&mut addresses, Some(cache))?;
    let (index_keys, keys_strides) = token_of(&mut addresses, index_keys)?;
    let (scales, scales_strides) = token_of(&mut addresses, scales)?;
    let gains = match &request.index {
        Some(index) => [
            read(&mut addresses, &index.gain)?,
            read(&mut addresses, &index.shift)?,
        ],
        None => [0; 2],
    };
    let asked = KeysRequest {
        rows: rows(&mut addresses, &request.rows)?,
        products: read(&mut addresses, &request.products)?,
        pitch: request.products.layout.stride()[0] as i64,
        query_gain: read(&mut addresses, &request.query_gain)?,
        latent_gain: read(&mut addresses, &request.latent_gain)?,
        key_gain: gains[0],
        key_shift: gains[1],
        query_latent: written(&mut addresses, query_latent, 0)?,
        cache,
        cache_strides,
        index_keys,
        keys_strides,
        scales,
        scales_strides,
        rank: int("numbers of a latent", request.rank)?,
        latent: int("numbers of a latent", request.latent)?,
        dim: dim as i32,
        interleaved: request
            .index
            .as_ref()
            .is_some_and(|index| index.interleaved) as i32,
        fp8: fp8(request
            .index
            .as_ref()
            .map_or_else(Fp8::default, |index| index.fp8)),
    };
    let parts = if request.index.is_some() { 3 } else { 2 };
    // SAFETY: every row has its products, its end and sequence, a position that the table and the cache
    // hold or none, and its part of the latent.
    unsafe { kernel.launch(teams(count * parts, shared_bytes)?, [arg(&asked)]) }
}

/// Refuses vectors of an indexer that a block could not hold. Those of scores have fewer numbers.
fn check_dim(dim: usize) -> Result<()> {
    const MOST: usize = 1024;
    if dim > MOST {
        bail!("{OP}: the indexer's dimension is {dim}, at most {MOST} are supported on CUDA")
    }
    Ok(())
}

/// RoPE: the last numbers of queries `[rows, heads, latent + rotated]`, and index queries `[rows, index_heads,
/// dim]`; of F8E4M3 ones the scales go into the weights `[rows, index_heads]`.
pub(in super::super::super) fn queries(
    request: &Queries<CudaStorage>,
    queries: &mut CudaStorage,
    index_queries: Option<&mut CudaStorage>,
    weights: Option<&mut CudaStorage>,
) -> Result<()> {
    let count = request.rows.count;
    if count == 0 {
        return Ok(());
    }
    let dtype = request.products.storage.dtype();
    let device = request.products.storage.device();
    check_dim(request.dim)?;
    let shared_bytes = match request.index_heads {
        0 => 0,
        _ => WARPS * request.dim * size_of::<f32>(),
    };
    let kernel = kernel(device, dtype, "dsa_queries", shared_bytes)?;
    let stream = kernel.stream.clone();
    let mut addresses = Addresses::new(&stream);
    let asked = QueriesRequest {
        rows: rows(&mut addresses, &request.rows)?,
        products: read(&mut addresses, &request.products)?,
        pitch: request.products.layout.stride()[0] as i64,
        queries: written(&mut addresses, queries, 0)?,
        index_queries: match index_queries {
            Some(storage) => written(&mut addresses, storage, 0)?,
            None => 0,
        },
        weights: match weights {
            Some(storage) => written(&mut addresses, storage, 0)?,
            None => 0,
        },
        count: count as i64,
        heads: int("heads", request.heads)?,
        nope: int("numbers of a head", request.nope)?,
        latent: int("numbers of a latent", request.latent)?,
        index_heads: int("heads", request.index_heads)?,
        dim: request.dim as i32,
        interleaved: request.interleaved as i32,
        fp8: fp8(request.fp8),
    };
    let vectors = count * (request.heads + request.index_heads);
    // SAFETY: every row has its products, its end, and its part of each output.
    unsafe { kernel.launch(teams(vectors.div_ceil(WARPS), shared_bytes)?, [arg(&asked)]) }
}

/// `x` `[rows, n]`, of rows that are dense, by `matrix` F32 `[heads, n]`, to F32 `[rows, heads]`.
pub(in super::super::super) fn weights(
    x: Part<CudaStorage>,
    matrix: Part<CudaStorage>,
    out: &mut CudaStorage,
) -> Result<()> {
    let (count, n) = x.layout.shape().dims2()?;
    let (heads, _) = matrix.layout.shape().dims2()?;
    if count * heads == 0 {
        return Ok(());
    }
    let kernel = kernel(x.storage.device(), x.storage.dtype(), "dsa_weights", 0)?;
    let stream = kernel.stream.clone();
    let mut addresses = Addresses::new(&stream);
    let from = read(&mut addresses, &x)?;
    let by = read(&mut addresses, &matrix)?;
    let to = written(&mut addresses, out, 0)?;
    let pitch = x.layout.stride()[0] as i64;
    /// Rows of a block: `kTogether` in `kernels/attention/dsa.cuh`.
    const TOGETHER: usize = 4;
    let teams = teams(heads * count.div_ceil(TOGETHER), 0)?;
    let (count, n) = (int("rows", count)?, int("hidden states", n)?);
    let heads = int("heads", heads)?;
    let arguments = [
        arg(&from),
        arg(&pitch),
        arg(&by),
        arg(&count),
        arg(&n),
        arg(&heads),
        arg(&to),
    ];
    // SAFETY: x has so many rows, and the matrix and the output a row and a column for each head.
    unsafe { kernel.launch(teams, arguments) }
}

/// The positions below the ends U32 `[rows]`, of which no row has more than k: U32 `[rows, k]`.
pub(in super::super::super) fn everything(
    ends: Part<CudaStorage>,
    k: usize,
    out: &mut CudaStorage,
) -> Result<()> {
    let count = ends.layout.shape().elem_count() * k;
    if count == 0 {
        return Ok(());
    }
    let kernel = STEPS.kernel(ends.storage.device(), "steps_everything", 0)?;
    let stream = kernel.stream.clone();
    let mut addresses = Addresses::new(&stream);
    let ends = read(&mut addresses, &ends)?;
    let to = written(&mut addresses, out, 0)?;
    let teams = teams(walkers(count), 0)?;
    let (count, k) = (count as u64, k as u32);
    // SAFETY: there are as many ends as rows, and the output is of so many elements.
    unsafe { kernel.launch(teams, [arg(&ends), arg(&count), arg(&k), arg(&to)]) }
}

/// A step of `each` tokens of all sequences: their lengths U32 `[B]` with these, and the ends U32
/// `[B each]` of their rows.
pub(in super::super::super) fn advance(
    lengths: &mut CudaStorage,
    each: usize,
    most: usize,
    ends: &mut CudaStorage,
) -> Result<()> {
    let device = lengths.device().clone();
    let sequences = match &lengths.slice {
        CudaStorageSlice::U32(slice) => slice.len(),
        _ => bail!("{OP}: lengths are {:?}, U32 is needed", lengths.dtype()),
    };
    let kernel = STEPS.kernel(&device, "steps_advance", 0)?;
    let stream = kernel.stream.clone();
    let mut addresses = Addresses::new(&stream);
    let lengths = written(&mut addresses, lengths, 0)?;
    let ends = written(&mut addresses, ends, 0)?;
    let teams = teams(sequences.div_ceil(THREADS as usize), 0)?;
    let sequences = int("sequences", sequences)?;
    let (each, most) = (int("tokens", each)?, int("positions", most)?);
    let arguments = [
        arg(&lengths),
        arg(&sequences),
        arg(&each),
        arg(&most),
        arg(&ends),
    ];
    // SAFETY: every sequence has a length and so many ends.
    unsafe { kernel.launch(teams, arguments) }
}

/// A captured step.
pub(in super::super::super) struct Graph(CudaGraph);

impl Graph {
    pub fn launch(&self) -> Result<()> {
        self.0.launch().w()
    }
}

/// Captures what `enqueue` launches.
pub(in super::super::super) fn capture(
    op: &str,
    device: &CudaDevice,
    enqueue: impl FnOnce() -> Result<()>,
) -> Result<Graph> {
    let stream = device.cuda_stream();
    if stream.cu_stream().is_null() {
        bail!("{op}: the device runs on the default stream, of which no graph can be made; make it with Device::new_cuda_with_stream")
    }
    if device.is_event_tracking() {
        bail!("{op}: the device tracks events, which no graph can hold; call disable_event_tracking on it before any tensor is made")
    }
    let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
    stream.begin_capture(mode).w()?;
    let enqueued = enqueue();
    // Ended whatever came of it: the stream is of no use otherwise.
    let graph = stream.end_capture(CUgraphInstantiate_flags(0)).w();
    enqueued?;
    match graph? {
        Some(graph) => {
            graph.upload().w()?;
            Ok(Graph(graph))
        }
        None => bail!("{op}: the capture gave no graph"),
    }
}
