//! Device memory that kernels read and write: buffers of our own, and the addresses of a launch.

use candle_core::cuda_backend::cudarc::driver::sys::CUstreamCaptureStatus;
use candle_core::cuda_backend::cudarc::driver::{
    CudaSlice, CudaStream, DevicePtr, DevicePtrMut, DeviceRepr, SyncOnDrop, ValidAsZeroBits,
};
use candle_core::cuda_backend::{CudaDType, WrapErr};
use candle_core::{bail, CudaDevice, CudaStorage, Result};
use std::ffi::c_void;

/// Memory for so many elements, or for one where there are none: not every device gives an allocation
/// of no bytes.
///
/// # Safety
/// Elements are written before they are read.
pub(crate) unsafe fn alloc<T: DeviceRepr + ValidAsZeroBits>(
    device: &CudaDevice,
    count: usize,
) -> Result<CudaSlice<T>> {
    match count {
        // Zero: Candle reads back all that a storage holds.
        0 => device.alloc_zeros(1),
        // SAFETY: the caller's promise.
        _ => unsafe { device.alloc(count) },
    }
}

/// An argument of a launch.
pub(crate) fn arg<T: DeviceRepr>(value: &T) -> *const c_void {
    (value as *const T).cast()
}

/// A buffer of our own, at one address as long as it lives.
#[derive(Debug)]
pub(crate) struct DeviceBuffer<T> {
    pub slice: CudaSlice<T>,
    device: CudaDevice,
    what: &'static str,
}

impl<T: CudaDType + DeviceRepr> DeviceBuffer<T> {
    pub fn new(what: &'static str, device: &CudaDevice, values: &[T]) -> Result<Self> {
        refuse_capture(what, device)?;
        Ok(Self {
            slice: device.cuda_stream().clone_htod(values).w()?,
            device: device.clone(),
            what,
        })
    }

    /// Uploads `values` to where element `start` lies; they fit.
    pub fn write(&mut self, start: usize, values: &[T]) -> Result<()> {
        refuse_capture(self.what, &self.device)?;
        let mut part = self.slice.slice_mut(start..start + values.len());
        self.device
            .cuda_stream()
            .memcpy_htod(values, &mut part)
            .w()?;
        Ok(())
    }

    pub fn read(&self) -> Result<Vec<T>> {
        refuse_capture(self.what, &self.device)?;
        self.device.cuda_stream().clone_dtoh(&self.slice).w()
    }

    pub fn copy(&self) -> Result<CudaStorage> {
        refuse_capture(self.what, &self.device)?;
        let copy = self.device.cuda_stream().clone_dtod(&self.slice).w()?;
        Ok(CudaStorage::wrap_cuda_slice(copy, self.device.clone()))
    }
}

/// Captured, an upload would be replayed from host memory that is gone by then, and an allocation
/// would be freed by no one.
pub(crate) fn refuse_capture(what: &str, device: &CudaDevice) -> Result<()> {
    let status = device.cuda_stream().capture_status().w()?;
    if status != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE {
        bail!("{what}: the stream is capturing a CUDA graph, into which only the ops whose names end in _into go; make, set and read buffers before or after")
    }
    Ok(())
}

/// Device addresses in use by a launch: the guards keep them valid, and ordered among streams,
/// until the launch is enqueued.
pub(crate) struct Addresses<'a> {
    stream: &'a CudaStream,
    guards: Vec<SyncOnDrop<'a>>,
}

impl<'a> Addresses<'a> {
    pub fn new(stream: &'a CudaStream) -> Self {
        Self {
            stream,
            guards: Vec::with_capacity(8),
        }
    }

    pub fn of<T>(&mut self, slice: &'a CudaSlice<T>, offset: usize) -> u64 {
        let (address, guard) = slice.device_ptr(self.stream);
        self.guards.push(guard);
        address + (offset * size_of::<T>()) as u64
    }

    pub fn written<T>(&mut self, slice: &'a mut CudaSlice<T>) -> u64 {
        let (address, guard) = slice.device_ptr_mut(self.stream);
        self.guards.push(guard);
        address
    }
}
