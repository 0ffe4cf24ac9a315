//! All that touches the driver: the kernels' modules and their loading.
//!
//! Kernels are loaded when they are first used, which takes the driver some tenths of a second and
//! cannot happen while a CUDA graph is captured. [`preload`] does it ahead of time.

use candle_core::cuda_backend::cudarc::driver::{CudaFunction, CudaStream};
use candle_core::cuda_backend::{CudaDevice, WrapErr};
use candle_core::{bail, Device, Result};
use std::sync::Arc;

mod ptx {
    include!(concat!(env!("OUT_DIR"), "/sampling_ptx.rs"));
}

/// A file of kernels. Modules are cached by Candle under their names, on each device.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Module {
    name: &'static str,
    ptx: &'static str,
}

macro_rules! module {
    ($name:literal, $ptx:expr) => {
        Module {
            // Unique among crates and versions, so that no other module is taken for ours.
            name: concat!("candle-topk/", env!("CARGO_PKG_VERSION"), "/", $name),
            ptx: $ptx,
        }
    };
}

pub(crate) const MASK: Module = module!("sampling/mask", ptx::MASK);
pub(crate) const CANDIDATES: Module = module!("sampling/candidates", ptx::CANDIDATES);
pub(crate) const SAMPLE: Module = module!("sampling/sample", ptx::SAMPLE);
pub(crate) const REPEAT_PENALTY: Module = module!("sampling/repeat_penalty", ptx::REPEAT_PENALTY);

/// A kernel, ready to be launched on its device's stream.
pub(crate) struct Kernel {
    pub function: CudaFunction,
    pub stream: Arc<CudaStream>,
}

impl Module {
    /// The kernel `name`, with this much dynamic shared memory allowed.
    pub fn kernel(&self, device: &CudaDevice, name: &str, shared_bytes: u32) -> Result<Kernel> {
        use candle_core::cuda_backend::cudarc::driver::sys::CUfunction_attribute_enum as Attribute;
        let function = device
            .get_or_load_custom_func(name, self.name, self.ptx)?
            .into_cuda_function();
        // What a kernel gets without being asked for.
        const GRANTED: u32 = 48 * 1024;
        if shared_bytes > GRANTED {
            function
                .set_attribute(
                    Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                    shared_bytes as i32,
                )
                .w()?;
        }
        Ok(Kernel {
            function,
            stream: device.cuda_stream(),
        })
    }
}

/// Loads all kernels of this crate onto a CUDA device.
///
/// # Errors
/// For a device that is not CUDA, or one that the driver cannot load the kernels on.
pub fn preload(device: &Device) -> Result<()> {
    let Device::Cuda(device) = device else {
        bail!(
            "preload: the device is {:?}, a CUDA device is needed",
            device.location()
        )
    };
    for (module, name) in [
        (MASK, "mask_f32"),
        (CANDIDATES, "candidates_f32"),
        (SAMPLE, "sample_f32"),
        (REPEAT_PENALTY, "repeat_penalty"),
    ] {
        module.kernel(device, name, 0)?;
    }
    Ok(())
}
