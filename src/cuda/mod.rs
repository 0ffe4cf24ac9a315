//! All that touches the driver: the kernels' modules and their loading.
//!
//! Kernels are loaded when they are first used, which takes the driver some tenths of a second and
//! cannot happen while a CUDA graph is captured. [`preload`] does it ahead of time.

use candle_core::cuda_backend::cudarc::driver::sys::{
    CUdevice_attribute_enum as Attribute, CUfunction_attribute_enum as FunctionAttribute,
};
use candle_core::cuda_backend::cudarc::driver::{CudaFunction, CudaStream};
use candle_core::cuda_backend::{CudaDevice, WrapErr};
use candle_core::{bail, Device, Result};
use std::cell::Cell;
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

/// The same kernels in both forms.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Forms {
    pub sm80: Module,
    pub sm90: Module,
}

pub(crate) const MASK: Forms = Forms {
    sm80: module!("sampling/mask", ptx::MASK),
    sm90: module!("sampling/sm90_mask", ptx::SM90_MASK),
};
pub(crate) const CANDIDATES: Forms = Forms {
    sm80: module!("sampling/candidates", ptx::CANDIDATES),
    sm90: module!("sampling/sm90_candidates", ptx::SM90_CANDIDATES),
};
pub(crate) const SAMPLE: Forms = Forms {
    sm80: module!("sampling/sample", ptx::SAMPLE),
    sm90: module!("sampling/sm90_sample", ptx::SM90_SAMPLE),
};
pub(crate) const REPEAT_PENALTY: Module = module!("sampling/repeat_penalty", ptx::REPEAT_PENALTY);

/// A form that kernels are compiled in. Results do not depend on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// One block a row, on any device of compute capability 8.0 or later.
    Sm80,
    /// A thread-block cluster a row, on devices of compute capability 9.0. By default it serves
    /// batches that would leave most of the device idle.
    Sm90,
}

thread_local! {
    static FORCED: Cell<Option<Form>> = const { Cell::new(None) };
}

/// Runs `f` with all kernels that this thread launches in one form, where the device can run it:
/// for tests and measurements.
pub fn with_form<R>(form: Form, f: impl FnOnce() -> R) -> R {
    struct Restore(Option<Form>);
    impl Drop for Restore {
        fn drop(&mut self) {
            FORCED.set(self.0);
        }
    }
    let _restore = Restore(FORCED.replace(Some(form)));
    f()
}

/// The form to launch in, where the sm_90 one gives each row `blocks` blocks.
pub(crate) fn form(device: &CudaDevice, rows: usize, blocks: usize) -> Result<Form> {
    let stream = device.cuda_stream();
    let context = stream.context();
    if context.compute_capability().w()? != (9, 0) {
        return Ok(Form::Sm80);
    }
    if let Some(forced) = FORCED.get() {
        return Ok(forced);
    }
    let multiprocessors = context
        .attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)
        .w()?;
    let idle = rows * blocks <= multiprocessors as usize;
    Ok(if idle { Form::Sm90 } else { Form::Sm80 })
}

/// A kernel, ready to be launched on its device's stream.
pub(crate) struct Kernel {
    pub function: CudaFunction,
    pub stream: Arc<CudaStream>,
}

impl Module {
    /// The kernel `name`, with this much dynamic shared memory allowed.
    pub fn kernel(&self, device: &CudaDevice, name: &str, shared_bytes: u32) -> Result<Kernel> {
        let function = device
            .get_or_load_custom_func(name, self.name, self.ptx)?
            .into_cuda_function();
        // What a kernel gets without being asked for.
        const GRANTED: u32 = 48 * 1024;
        if shared_bytes > GRANTED {
            function
                .set_attribute(
                    FunctionAttribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
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
    let sm90 = form(device, 1, 1)? == Form::Sm90;
    for (forms, name) in [
        (MASK, "mask_f32"),
        (CANDIDATES, "candidates_f32"),
        (SAMPLE, "sample_f32"),
    ] {
        forms.sm80.kernel(device, name, 0)?;
        if sm90 {
            forms.sm90.kernel(device, name, 0)?;
        }
    }
    REPEAT_PENALTY.kernel(device, "repeat_penalty", 0)?;
    Ok(())
}
