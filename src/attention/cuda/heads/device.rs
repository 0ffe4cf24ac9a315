//! One strided batched product of cuBLAS for all heads, between rows as they lie: Candle's would take
//! a dense copy of each operand, with the heads first, and give such a result.

use crate::cuda::{alloc, Addresses};
use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::cublas::{result, sys};
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, DeviceRepr, ValidAsZeroBits};
use candle_core::cuda_backend::{gemm_reduced_precision_f32, CudaDType, CudaStorageSlice};
use candle_core::{bail, CudaStorage, DType, Error, Layout, Result};
use half::{bf16, f16};
use std::ffi::c_int;

const OP: &str = "DsaAttention";

/// A tensor of three dimensions.
type Part<'a> = (&'a CudaStorage, &'a Layout);

/// `x` `[R, H, K]`, whose last dimension is dense, by `matrices` `[H, K, N]`, dense: `[R, H, N]`, in f32
/// and rounded once. Behind each row's N numbers come those of `tail` `[R, H, P]`, where there is one.
pub(in super::super::super) fn by_head(
    x: Part,
    matrices: Part,
    tail: Option<Part>,
) -> Result<CudaStorage> {
    use sys::{cublasComputeType_t as Compute, cudaDataType_t as Type};
    let plain = Compute::CUBLAS_COMPUTE_32F;
    match x.0.dtype() {
        DType::F16 => run::<f16>(x, matrices, tail, Type::CUDA_R_16F, plain),
        DType::BF16 => run::<bf16>(x, matrices, tail, Type::CUDA_R_16BF, plain),
        // As Candle's own products.
        _ if gemm_reduced_precision_f32() => {
            let fast = Compute::CUBLAS_COMPUTE_32F_FAST_TF32;
            run::<f32>(x, matrices, tail, Type::CUDA_R_32F, fast)
        }
        _ => run::<f32>(x, matrices, tail, Type::CUDA_R_32F, plain),
    }
}

/// The elements, of a dtype that must be `T`.
fn address<'a, T>(addresses: &mut Addresses<'a>, (storage, layout): Part<'a>) -> Result<u64> {
    let offset = layout.start_offset();
    let size = storage.dtype().size_in_bytes();
    Ok(match &storage.slice {
        CudaStorageSlice::F32(slice) if size == size_of::<T>() => addresses.of(slice, offset),
        CudaStorageSlice::F16(slice) if size == size_of::<T>() => addresses.of(slice, offset),
        CudaStorageSlice::BF16(slice) if size == size_of::<T>() => addresses.of(slice, offset),
        _ => bail!(
            "{OP}: an operand of a product is {:?}, the dtype of the others is needed",
            storage.dtype()
        ),
    })
}

fn int(what: &str, value: usize) -> Result<c_int> {
    c_int::try_from(value).map_err(|_| {
        Error::msg(format!(
            "{OP}: {what} are {value}, at most 2^31 - 1 are accepted"
        ))
    })
}

fn run<T: CudaDType + DeviceRepr + ValidAsZeroBits>(
    x: Part,
    matrices: Part,
    tail: Option<Part>,
    of: sys::cudaDataType_t,
    compute: sys::cublasComputeType_t,
) -> Result<CudaStorage> {
    use sys::cublasOperation_t::CUBLAS_OP_N as PLAIN;
    let device = x.0.device();
    let (rows, heads, inputs) = x.1.shape().dims3()?;
    let (_, _, outputs) = matrices.1.shape().dims3()?;
    let more = match tail {
        Some((_, layout)) => layout.shape().dims3()?.2,
        None => 0,
    };
    let width = outputs + more;
    // SAFETY: the product and the copy write every element.
    let mut out: CudaSlice<T> = unsafe { alloc(device, rows * heads * width)? };
    let stream = device.cuda_stream();
    if rows * heads > 0 {
        let mut addresses = Addresses::new(&stream);
        let from = address::<T>(&mut addresses, x)?;
        let by = address::<T>(&mut addresses, matrices)?;
        let to = addresses.written(&mut out);
        let blas = device.cublas_handle();
        let stride = x.1.stride();
        // A row's pitch means nothing where there is one row, and must not be less than its length.
        let pitch = if rows == 1 { inputs } else { stride[0] };
        let one = 1f32;
        let zero = 0f32;
        // cuBLAS has columns first: its matrices are ours transposed.
        // SAFETY: the caller has checked the shapes: each head has its rows of x, `pitch` apart, its
        // matrix, and its rows of the output.
        unsafe {
            result::gemm_strided_batched_ex(
                *blas.handle(),
                PLAIN,
                PLAIN,
                int("numbers of a head", outputs)?,
                int("rows", rows)?,
                int("numbers of a head", inputs)?,
                (&raw const one).cast(),
                by as *const _,
                of,
                int("numbers of a head", outputs)?,
                (inputs * outputs) as i64,
                from as *const _,
                of,
                int("numbers of a row", pitch)?,
                stride[1] as i64,
                (&raw const zero).cast(),
                to as *mut _,
                of,
                int("numbers of a row", heads * width)?,
                width as i64,
                int("heads", heads)?,
                compute,
                sys::cublasGemmAlgo_t::CUBLAS_GEMM_DEFAULT_TENSOR_OP,
            )
        }
        .map_err(Error::wrap)?;
    }
    let mut out = CudaStorage::wrap_cuda_slice(out, device.clone());
    if let Some((storage, layout)) = tail {
        let first = layout.start_offset();
        storage.copy2d(&mut out, rows * heads, more, more, width, first, outputs)?;
    }
    Ok(out)
}
