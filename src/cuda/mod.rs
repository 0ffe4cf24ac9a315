//! All that touches the driver: the kernels' modules and their loading.
//!
//! Kernels are loaded when they are first used. The driver then compiles them, which takes it a
//! second or two, and keeps the result on disk for later processes; and a kernel cannot be loaded
//! while a CUDA graph is captured. [`preload`] loads them ahead of time.

use candle_core::cuda_backend::cudarc::driver::sys::{
    self, CUdevice_attribute_enum as Attribute, CUfunction_attribute_enum as FunctionAttribute,
};
use candle_core::cuda_backend::cudarc::driver::{CudaFunction, CudaStream};
use candle_core::cuda_backend::{CudaDevice, WrapErr};
use candle_core::{bail, DType, Device, Result};
use std::cell::Cell;
use std::ffi::c_void;
use std::sync::Arc;

mod memory;
pub(crate) use memory::{arg, Addresses, DeviceBuffer};

mod ptx {
    include!(concat!(env!("OUT_DIR"), "/sampling_ptx.rs"));
    include!(concat!(env!("OUT_DIR"), "/selection_ptx.rs"));
}

/// A file of kernels. Modules are cached by Candle under their names, on each device.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Module {
    name: &'static str,
    ptx: &'static str,
}

macro_rules! module {
    ($ptx:ident) => {
        Module {
            // Unique among crates and versions, so that no other module is taken for ours.
            name: concat!(
                "candle-topk/",
                env!("CARGO_PKG_VERSION"),
                "/",
                stringify!($ptx)
            ),
            ptx: ptx::$ptx,
        }
    };
}

/// One kernel in all its files: for F32, F16 and BF16 logits, each in both forms. A file a dtype:
/// the driver compiles a whole file when it first loads it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Family {
    name: &'static str,
    sm80: [Module; 3],
    sm90: [Module; 3],
}

pub(crate) const MASK: Family = Family {
    name: "mask",
    sm80: [
        module!(SM80_F32_MASK),
        module!(SM80_F16_MASK),
        module!(SM80_BF16_MASK),
    ],
    sm90: [
        module!(SM90_F32_MASK),
        module!(SM90_F16_MASK),
        module!(SM90_BF16_MASK),
    ],
};
pub(crate) const CANDIDATES: Family = Family {
    name: "candidates",
    sm80: [
        module!(SM80_F32_CANDIDATES),
        module!(SM80_F16_CANDIDATES),
        module!(SM80_BF16_CANDIDATES),
    ],
    sm90: [
        module!(SM90_F32_CANDIDATES),
        module!(SM90_F16_CANDIDATES),
        module!(SM90_BF16_CANDIDATES),
    ],
};
pub(crate) const SAMPLE: Family = Family {
    name: "sample",
    sm80: [
        module!(SM80_F32_SAMPLE),
        module!(SM80_F16_SAMPLE),
        module!(SM80_BF16_SAMPLE),
    ],
    sm90: [
        module!(SM90_F32_SAMPLE),
        module!(SM90_F16_SAMPLE),
        module!(SM90_BF16_SAMPLE),
    ],
};
/// Selection by one block a row, in two forms, and by several that meet in the workspace.
pub(crate) const SELECT: [Module; 3] = [
    module!(SM80_F32_SELECT),
    module!(SM80_F16_SELECT),
    module!(SM80_BF16_SELECT),
];
/// Selection by a cluster a row.
pub(crate) const SELECT_CLUSTER: [Module; 3] = [
    module!(SM90_F32_SELECT_CLUSTER),
    module!(SM90_F16_SELECT_CLUSTER),
    module!(SM90_BF16_SELECT_CLUSTER),
];
pub(crate) const REPEAT_PENALTY: Module = module!(REPEAT_PENALTY);

impl Family {
    /// The kernel for this dtype in this form, with this much dynamic shared memory allowed.
    pub fn kernel(
        &self,
        device: &CudaDevice,
        dtype: DType,
        form: Form,
        shared_bytes: u32,
    ) -> Result<Kernel> {
        let modules = match form {
            Form::Sm80 => self.sm80,
            Form::Sm90 => self.sm90,
        };
        let [f32, f16, bf16] = modules;
        let module = match dtype {
            DType::F32 => f32,
            DType::F16 => f16,
            DType::BF16 => bf16,
            _ => bail!(
                "{}: logits are {dtype:?}, F32, F16 or BF16 is needed",
                self.name
            ),
        };
        module.kernel(device, self.name, shared_bytes)
    }
}

/// A form that kernels are compiled in. Results do not depend on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// One block a row, on any device of compute capability 8.0 or later.
    Sm80,
    /// A thread-block cluster a row, of 2, 4 or 8 blocks, on devices of compute capability 9.0. By
    /// default it serves batches of no more rows than the device has multiprocessors.
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

/// Whether this thread launches no kernels of clusters.
pub(crate) fn forced_sm80() -> bool {
    FORCED.get() == Some(Form::Sm80)
}

pub(crate) fn runs_sm90(device: &CudaDevice) -> Result<bool> {
    let capability = device.cuda_stream().context().compute_capability().w()?;
    Ok(capability == (9, 0))
}

/// The form to launch in, and how many blocks it gives each row: of what a cluster holds on every
/// device, as many as run at once, two on a multiprocessor.
pub(crate) fn form(device: &CudaDevice, rows: usize) -> Result<(Form, u32)> {
    if !runs_sm90(device)? {
        return Ok((Form::Sm80, 1));
    }
    let stream = device.cuda_stream();
    let multiprocessors = stream
        .context()
        .attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)
        .w()?;
    let fitting = [8, 4, 2]
        .into_iter()
        .find(|&blocks| rows * blocks <= 2 * multiprocessors as usize);
    Ok(match (FORCED.get(), fitting) {
        (Some(Form::Sm80), _) | (None, None) => (Form::Sm80, 1),
        (_, blocks) => (Form::Sm90, blocks.unwrap_or(2) as u32),
    })
}

/// A kernel, ready to be launched on its device's stream.
pub(crate) struct Kernel {
    pub function: CudaFunction,
    pub stream: Arc<CudaStream>,
}

/// How a kernel is launched: a team of blocks a row.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Teams {
    pub rows: u32,
    /// Blocks of a team; more than one are a cluster.
    pub blocks: u32,
    pub threads: u32,
    pub shared_bytes: u32,
}

impl Kernel {
    /// Lets clusters have 16 blocks, beyond the 8 that every device of compute capability 9.0 has.
    pub fn allow_large_clusters(&self) -> Result<()> {
        self.function
            .set_attribute(
                FunctionAttribute::CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED,
                1,
            )
            .w()
    }

    /// Launches the kernel. (cudarc's own launch knows no clusters but those that a kernel is
    /// compiled for.)
    ///
    /// # Safety
    /// The arguments point to values of the kernel's parameter types, in order, and what these
    /// address is valid, and ordered on the stream, as long as the kernel runs.
    pub unsafe fn launch<const N: usize>(
        &self,
        teams: Teams,
        mut arguments: [*const c_void; N],
    ) -> Result<()> {
        self.stream.context().bind_to_thread().w()?;
        let mut cluster = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue { pad: [0; 64] },
        };
        cluster.value.clusterDim = sys::CUlaunchAttributeValue_union__bindgen_ty_1 {
            x: teams.blocks,
            y: 1,
            z: 1,
        };
        let config = sys::CUlaunchConfig {
            gridDimX: teams.rows * teams.blocks,
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: teams.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: teams.shared_bytes,
            hStream: self.stream.cu_stream(),
            attrs: &mut cluster,
            numAttrs: (teams.blocks > 1) as u32,
        };
        // SAFETY: function and stream are alive in `self`; the rest is the caller's promise. The
        // driver reads the arguments and writes none.
        unsafe {
            sys::cuLaunchKernelEx(
                &config,
                self.function.cu_function(),
                arguments.as_mut_ptr().cast(),
                std::ptr::null_mut(),
            )
        }
        .result()
        .w()
    }
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

/// The one of three modules that serves this dtype: F32, F16 or BF16.
pub(crate) fn of_dtype(modules: &[Module; 3], dtype: DType) -> Module {
    match dtype {
        DType::F16 => modules[1],
        DType::BF16 => modules[2],
        _ => modules[0],
    }
}

/// Loads the kernels for logits and scores of this dtype (F32, F16 or BF16) onto a CUDA device.
///
/// # Errors
/// For a device that is not CUDA, another dtype, or a device that the driver cannot load the
/// kernels on.
pub fn preload(device: &Device, dtype: DType) -> Result<()> {
    let Device::Cuda(device) = device else {
        bail!(
            "preload: the device is {:?}, a CUDA device is needed",
            device.location()
        )
    };
    let sm90 = runs_sm90(device)?;
    for family in [MASK, CANDIDATES, SAMPLE] {
        family.kernel(device, dtype, Form::Sm80, 0)?;
        if sm90 {
            family.kernel(device, dtype, Form::Sm90, 0)?;
        }
    }
    REPEAT_PENALTY.kernel(device, "repeat_penalty", 0)?;
    crate::selection::preload(device, dtype)
}
