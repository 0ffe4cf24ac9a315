//! Buffers at fixed addresses, for the forms of the ops that allocate nothing.

use candle_core::{bail, Device, Result, Shape, Storage, Tensor, WithDType};

#[cfg(feature = "cuda")]
pub(crate) use crate::cuda::DeviceBuffer;
#[cfg(not(feature = "cuda"))]
pub(crate) use no_device::DeviceBuffer;

#[cfg(feature = "cuda")]
use candle_core::cuda_backend::CudaDType as OnDevice;
#[cfg(feature = "cuda")]
pub(crate) trait Element:
    WithDType + OnDevice + candle_core::cuda_backend::cudarc::driver::DeviceRepr
{
}
#[cfg(feature = "cuda")]
impl<T: WithDType + OnDevice + candle_core::cuda_backend::cudarc::driver::DeviceRepr> Element
    for T
{
}
#[cfg(not(feature = "cuda"))]
pub(crate) trait Element: WithDType {}
#[cfg(not(feature = "cuda"))]
impl<T: WithDType> Element for T {}

/// A buffer of our own, so that nothing is written through a tensor's shared storage.
#[derive(Debug)]
pub(crate) enum Buffer<T> {
    Cpu(Vec<T>),
    Cuda(DeviceBuffer<T>),
}

impl<T: Element> Buffer<T> {
    /// `what` names the buffer's owner in errors.
    pub fn new(what: &'static str, device: &Device, values: Vec<T>) -> Result<Self> {
        Ok(match device {
            Device::Cpu => Self::Cpu(values),
            Device::Cuda(device) => Self::Cuda(DeviceBuffer::new(what, device, &values)?),
            Device::Metal(_) => {
                bail!("{what}: Metal is not supported, the CPU and CUDA are")
            }
        })
    }

    /// A buffer of `rows` times `each` elements, all of this value.
    pub fn filled(
        what: &'static str,
        device: &Device,
        value: T,
        (rows, each): (usize, usize),
    ) -> Result<Self> {
        let mut values = Vec::new();
        // `vec!` would abort the process.
        let count = rows.checked_mul(each);
        match count.map(|count| values.try_reserve_exact(count)) {
            Some(Ok(())) => values.resize(rows * each, value),
            _ => bail!(
                "{what}: {rows} rows of {each} {:?} are asked for, there is not so much memory",
                T::DTYPE
            ),
        }
        Self::new(what, device, values)
    }

    pub fn write(&mut self, start: usize, values: &[T]) -> Result<()> {
        match self {
            Self::Cpu(data) => {
                data[start..start + values.len()].copy_from_slice(values);
                Ok(())
            }
            Self::Cuda(buffer) => buffer.write(start, values),
        }
    }

    pub fn read(&self) -> Result<Vec<T>> {
        match self {
            Self::Cpu(data) => Ok(data.clone()),
            Self::Cuda(buffer) => buffer.read(),
        }
    }

    pub fn to_tensor(&self, shape: impl Into<Shape>) -> Result<Tensor> {
        let storage = match self {
            Self::Cpu(data) => Storage::Cpu(T::to_cpu_storage(data)),
            Self::Cuda(buffer) => Storage::Cuda(buffer.copy()?),
        };
        Ok(Tensor::from((storage, shape.into())))
    }

    /// What lies on the CPU, for reading.
    pub fn as_cpu(&self) -> &[T] {
        match self {
            Self::Cpu(data) => data,
            Self::Cuda(_) => unreachable!("buffers lie where the op's input does"),
        }
    }

    pub fn on_cpu(&mut self) -> &mut [T] {
        match self {
            Self::Cpu(data) => data,
            Self::Cuda(_) => unreachable!("buffers lie where the op's input does"),
        }
    }

    pub fn on_cuda(&mut self) -> &mut DeviceBuffer<T> {
        match self {
            Self::Cuda(buffer) => buffer,
            Self::Cpu(_) => unreachable!("buffers lie where the op's input does"),
        }
    }
}

/// The buffer of a build without the feature `cuda`, which can make none.
#[cfg(not(feature = "cuda"))]
mod no_device {
    use candle_core::{bail, CudaDevice, CudaStorage, Result};
    use std::{convert::Infallible, marker::PhantomData};

    #[derive(Debug)]
    pub(crate) struct DeviceBuffer<T>(Infallible, PhantomData<T>);

    impl<T> DeviceBuffer<T> {
        pub fn new(what: &'static str, _: &CudaDevice, _: &[T]) -> Result<Self> {
            bail!("{what}: the device is a CUDA device, but candle-topk was built without its feature `cuda`; build with it, or make the buffers on the CPU")
        }

        pub fn write(&mut self, _: usize, _: &[T]) -> Result<()> {
            match self.0 {}
        }

        pub fn read(&self) -> Result<Vec<T>> {
            match self.0 {}
        }

        pub fn copy(&self) -> Result<CudaStorage> {
            match self.0 {}
        }
    }
}
