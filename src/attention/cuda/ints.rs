//! Integers that a caller gives on a CUDA device, as the kernels of attention take them.

use super::super::parts::Part;
use crate::cuda::Addresses;
use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::DeviceRepr;
use candle_core::cuda_backend::CudaStorageSlice;
use candle_core::{bail, CudaStorage, Result};

/// `Ints` in `kernels/attention/ints.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct Ints {
    at: u64,
    strides: [i64; 2],
    bytes: i32,
    unused: i32,
}

// SAFETY: plain old data, laid out as the kernels' struct of the same name.
unsafe impl DeviceRepr for Ints {}

/// Those of a part, or none. Dtypes have been checked before.
pub(super) fn ints<'a>(
    op: &str,
    addresses: &mut Addresses<'a>,
    part: Option<&Part<'a, CudaStorage>>,
) -> Result<Ints> {
    let Some(part) = part else {
        return Ok(Ints::default());
    };
    let offset = part.layout.start_offset();
    let (at, bytes) = match &part.storage.slice {
        CudaStorageSlice::I32(slice) => (addresses.of(slice, offset), 4),
        CudaStorageSlice::U32(slice) => (addresses.of(slice, offset), 4),
        CudaStorageSlice::I64(slice) => (addresses.of(slice, offset), 8),
        _ => bail!(
            "{op}: integers are {:?}, I32, I64 or U32 is needed",
            part.storage.dtype()
        ),
    };
    let stride = |i: usize| part.layout.stride().get(i).copied().unwrap_or(0) as i64;
    Ok(Ints {
        at,
        strides: [stride(0), stride(1)],
        bytes,
        unused: 0,
    })
}
