//! All that touches the driver: the kernels' modules and their loading.
//!
//! Kernels are loaded when they are first used, which cannot be while a CUDA graph is captured.
//! [`preload`] loads them ahead of time. On a device other than those that the build is for (by
//! `CUDA_COMPUTE_CAP`, or the GPU found then) the driver compiles them first, which takes it a few seconds
//! for each, and keeps the result on disk for later processes.

use candle_core::cuda_backend::cudarc::driver::sys::{
    self, CUdevice_attribute_enum as Attribute, CUfunction_attribute_enum as FunctionAttribute,
};
use candle_core::cuda_backend::cudarc::driver::{CudaFunction, CudaModule, CudaStream};
use candle_core::cuda_backend::cudarc::nvrtc::Ptx;
use candle_core::cuda_backend::{CudaDevice, WrapErr};
use candle_core::{bail, DType, Device, Result};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, PoisonError};

#[cfg(feature = "ablation")]
#[doc(hidden)]
pub mod ablation;
mod memory;
pub(crate) use memory::{alloc, arg, refuse_capture, Addresses, DeviceBuffer};

mod ptx {
    include!(concat!(env!("OUT_DIR"), "/sampling_ptx.rs"));
    include!(concat!(env!("OUT_DIR"), "/selection_ptx.rs"));
    include!(concat!(env!("OUT_DIR"), "/attention_ptx.rs"));
}

/// Machine code for devices of one compute capability.
mod cubin {
    include!(concat!(env!("OUT_DIR"), "/sampling_cubin.rs"));
    include!(concat!(env!("OUT_DIR"), "/selection_cubin.rs"));
    include!(concat!(env!("OUT_DIR"), "/attention_cubin.rs"));

    pub const CAPABILITY: (i32, i32) = include!(concat!(env!("OUT_DIR"), "/cubin_capability.rs"));
}

/// A file of kernels. Modules are cached by Candle under their names, on each device.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Module {
    name: &'static str,
    ptx: &'static str,
    cubin: Option<&'static [u8]>,
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
            cubin: cubin::$ptx,
        }
    };
}

/// One kernel in all its files: for F32, F16 and BF16 logits, each in both forms. A file a dtype:
/// the driver compiles a whole file when it first loads it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Family {
    pub name: &'static str,
    sm80: [Module; 3],
    sm80_wide: [Module; 3],
    sm90: [Module; 3],
}

pub(crate) const MASK: Family = Family {
    name: "mask",
    sm80: [
        module!(SM80_F32_MASK),
        module!(SM80_F16_MASK),
        module!(SM80_BF16_MASK),
    ],
    sm80_wide: [
        module!(SM80_F32_MASK_WIDE),
        module!(SM80_F16_MASK_WIDE),
        module!(SM80_BF16_MASK_WIDE),
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
    sm80_wide: [
        module!(SM80_F32_CANDIDATES_WIDE),
        module!(SM80_F16_CANDIDATES_WIDE),
        module!(SM80_BF16_CANDIDATES_WIDE),
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
    sm80_wide: [
        module!(SM80_F32_SAMPLE_WIDE),
        module!(SM80_F16_SAMPLE_WIDE),
        module!(SM80_BF16_SAMPLE_WIDE),
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
/// Selection by a cluster a row, which has it on chip.
pub(crate) const SELECT_EXACT: [Module; 3] = [
    module!(SM90_F32_SELECT_EXACT),
    module!(SM90_F16_SELECT_EXACT),
    module!(SM90_BF16_SELECT_EXACT),
];
/// Selection by a cluster a row.
pub(crate) const SELECT_CLUSTER: [Module; 3] = [
    module!(SM90_F32_SELECT_CLUSTER),
    module!(SM90_F16_SELECT_CLUSTER),
    module!(SM90_BF16_SELECT_CLUSTER),
];
/// Bounds of rows from lengths.
pub(crate) const BOUNDS: Module = module!(BOUNDS);
/// Indexer scores of F16, BF16, F8E4M3 and F32.
pub(crate) const INDEXER_SM80: [Module; 4] = [
    module!(SM80_F16_INDEXER),
    module!(SM80_BF16_INDEXER),
    module!(SM80_FP8_INDEXER),
    module!(SM80_F32_INDEXER),
];
/// The same of F16, BF16 and F8E4M3 on devices of compute capability 9.0: of dimension 128 with few
/// and with many rows of queries a sequence, and of any dimension.
pub(crate) const INDEXER_SM90: [[Module; 3]; 3] = [
    [
        module!(SM90_F16_INDEXER_FEW),
        module!(SM90_F16_INDEXER_MANY),
        module!(SM90_F16_INDEXER_ANY),
    ],
    [
        module!(SM90_BF16_INDEXER_FEW),
        module!(SM90_BF16_INDEXER_MANY),
        module!(SM90_BF16_INDEXER_ANY),
    ],
    [
        module!(SM90_FP8_INDEXER_FEW),
        module!(SM90_FP8_INDEXER_MANY),
        module!(SM90_FP8_INDEXER_ANY),
    ],
];
/// -inf in scores of what a row doesn't see.
pub(crate) const INDEXER_FILL: Module = module!(INDEXER_FILL);
/// Attention over positions: of any size, and by tensor cores with keys of up to 256.
pub(crate) const SPARSE: [Module; 3] = [
    module!(SM80_F32_SPARSE),
    module!(SM80_F16_SPARSE),
    module!(SM80_BF16_SPARSE),
];
/// The same with longer keys, F16 and BF16.
pub(crate) const SPARSE_WIDE: [Module; 2] = [
    module!(SM80_F16_SPARSE_WIDE),
    module!(SM80_BF16_SPARSE_WIDE),
];
/// Multi-head latent attention over positions, F16 and BF16.
pub(crate) const SPARSE_LATENT: [Module; 2] = [
    module!(SM90_F16_SPARSE_LATENT),
    module!(SM90_BF16_SPARSE_LATENT),
];
/// The same of few rows, F16 and BF16.
pub(crate) const SPARSE_LATENT_FEW: [Module; 2] = [
    module!(SM90_F16_SPARSE_LATENT_FEW),
    module!(SM90_BF16_SPARSE_LATENT_FEW),
];
/// Attention over blocks of keys, F16 and BF16.
pub(crate) const SPARSE_TILE: [Module; 2] = [
    module!(SM90_F16_SPARSE_TILE),
    module!(SM90_BF16_SPARSE_TILE),
];
/// A layer's rows between its products.
pub(crate) const DSA: [Module; 3] = [
    module!(SM80_F32_DSA),
    module!(SM80_F16_DSA),
    module!(SM80_BF16_DSA),
];
/// Steps of decoding, and rows that attend to everything.
pub(crate) const STEPS: Module = module!(STEPS);
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
            Form::Sm80Wide => self.sm80_wide,
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

/// A form that kernels are compiled in. Results do not depend on it, but for the rounding of scores of an
/// indexer and of attention, which is that of the tensor cores' instructions: a device takes the same for
/// all calls. Latent attention has a form of clusters, too, which gives the bits of its other form: with
/// `Sm90` it takes them wherever it can, and with the others never.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// One small block a row, several on a multiprocessor, on any device of compute capability 8.0 or
    /// later.
    Sm80,
    /// One large block a row, of which one or two fill a multiprocessor, likewise. By default it serves batches
    /// whose rows all find room at once.
    Sm80Wide,
    /// A thread-block cluster a row, of 2, 4 or 8 blocks that hold it on chip where it fits, on devices
    /// of compute capability 9.0. By default it serves the smallest batches.
    Sm90,
}

impl Form {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Sm80, Self::Sm80Wide, Self::Sm90];
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

/// Whether this thread launches kernels of clusters wherever there are any, or nowhere; `None`: where
/// they are faster.
pub(crate) fn forced_clusters() -> Option<bool> {
    FORCED.get().map(|form| form == Form::Sm90)
}

pub(crate) fn runs_sm90(device: &CudaDevice) -> Result<bool> {
    let capability = device.cuda_stream().context().compute_capability().w()?;
    Ok(capability == (9, 0))
}

/// What a block of a form takes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Demand {
    pub threads: u32,
    /// How many a multiprocessor has at once.
    pub blocks: usize,
    /// Dynamic shared memory, without a copy of a part of the row.
    pub shared_bytes: u32,
}

/// What launches are planned by: of a device, and asked of the driver once.
#[derive(Debug, Clone, Copy)]
struct Facts {
    multiprocessors: usize,
    /// Shared memory that a block may have.
    shared_bytes: u64,
    /// How many clusters of so many blocks, each on a multiprocessor of its own, run at once: their
    /// multiprocessors lie in one of the device's groups, which don't divide evenly. None where the
    /// device has no clusters.
    clusters: [(u32, usize); 5],
}

impl Facts {
    fn of(device: &CudaDevice, family: &Family, dtype: DType, threads: u32) -> Result<Self> {
        static KNOWN: Mutex<BTreeMap<usize, Facts>> = Mutex::new(BTreeMap::new());
        let stream = device.cuda_stream();
        let ordinal = stream.context().ordinal();
        let known = || KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(facts) = known().get(&ordinal) {
            return Ok(*facts);
        }
        let attribute = |attribute| stream.context().attribute(attribute).w();
        let shared_bytes =
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)? as u32;
        let mut clusters = [8, 6, 4, 3, 2].map(|blocks| (blocks, 0));
        if runs_sm90(device)? {
            let kernel = family.kernel(device, dtype, Form::Sm90, shared_bytes)?;
            for (blocks, most) in &mut clusters {
                *most = kernel.clusters(*blocks, threads)?;
            }
        }
        let facts = Self {
            multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?
                as usize,
            shared_bytes: shared_bytes as u64,
            clusters,
        };
        known().insert(ordinal, facts);
        Ok(facts)
    }
}

/// The kernel of a family to launch, and how: a block a row, or a cluster. `demand` is a form's, and
/// `slice_bytes` tells how many bytes of a row each of so many blocks would hold.
///
/// What is fastest on an H200: the largest cluster of which there can be one for each row at once, one
/// that holds the row on chip before one that doesn't; then a large block, then small ones.
pub(crate) fn teams(
    device: &CudaDevice,
    family: &Family,
    dtype: DType,
    rows: usize,
    demand: impl Fn(Form) -> Demand,
    slice_bytes: impl Fn(u32) -> u64,
) -> Result<(Kernel, Teams)> {
    #[cfg(feature = "ablation")]
    if let Some(run) = ablation::current() {
        return run.teams(device, family, dtype, rows, demand(Form::Sm80).shared_bytes);
    }
    let facts = Facts::of(device, family, dtype, demand(Form::Sm90).threads)?;
    let forced = FORCED.get();
    let clusters = facts.clusters.iter().any(|&(_, most)| most > 0);
    let mut planned = None;
    if clusters && forced.is_none_or(|form| form == Form::Sm90) {
        // What the kernels declare beside their dynamic shared memory is less.
        const STATIC_BYTES: u64 = 8 << 10;
        let shared_bytes = demand(Form::Sm90).shared_bytes;
        let fits =
            |blocks| shared_bytes as u64 + STATIC_BYTES + slice_bytes(blocks) <= facts.shared_bytes;
        let mut sizes = facts.clusters.iter().filter(|&&(_, most)| rows <= most);
        let on_chip = sizes.clone().find(|&&(blocks, _)| fits(blocks));
        let blocks = on_chip.or(sizes.next()).map(|&(blocks, _)| blocks);
        planned = blocks.or(forced.map(|_| 2)).map(|blocks| {
            let copied = fits(blocks).then(|| slice_bytes(blocks) as u32);
            (Form::Sm90, blocks, copied.unwrap_or(0))
        });
    }
    let (form, blocks, copied) = planned.unwrap_or_else(|| {
        let form = match forced {
            Some(Form::Sm80) => Form::Sm80,
            Some(Form::Sm80Wide) => Form::Sm80Wide,
            _ if rows <= facts.multiprocessors * demand(Form::Sm80Wide).blocks => Form::Sm80Wide,
            _ => Form::Sm80,
        };
        (form, 1, 0)
    });
    let Demand {
        threads,
        shared_bytes,
        ..
    } = demand(form);
    let teams = Teams {
        rows: rows as u32,
        blocks,
        threads,
        shared_bytes: shared_bytes + copied,
    };
    let kernel = family.kernel(device, dtype, form, teams.shared_bytes)?;
    Ok((kernel, teams))
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

fn cluster_of(blocks: u32) -> sys::CUlaunchAttribute {
    let mut cluster = sys::CUlaunchAttribute {
        id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION,
        pad: [0; 4],
        value: sys::CUlaunchAttributeValue { pad: [0; 64] },
    };
    cluster.value.clusterDim = sys::CUlaunchAttributeValue_union__bindgen_ty_1 {
        x: blocks,
        y: 1,
        z: 1,
    };
    cluster
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

    /// How many clusters of so many blocks run at once, with as much shared memory as a block may have.
    pub fn clusters(&self, blocks: u32, threads: u32) -> Result<usize> {
        self.stream.context().bind_to_thread().w()?;
        let shared_bytes = self
            .function
            .get_attribute(FunctionAttribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES)
            .w()?;
        let mut cluster = cluster_of(blocks);
        let config = self.config(
            Teams {
                rows: 1,
                blocks,
                threads,
                shared_bytes: shared_bytes as u32,
            },
            &mut cluster,
        );
        let mut most = 0;
        // SAFETY: the function is alive in `self`, and the driver reads what is passed.
        let answer = unsafe {
            sys::cuOccupancyMaxActiveClusters(&mut most, self.function.cu_function(), &config)
        };
        // A part of a device may be too small for any: then there are none.
        Ok(answer.result().map_or(0, |()| most as usize))
    }

    fn config(&self, teams: Teams, cluster: &mut sys::CUlaunchAttribute) -> sys::CUlaunchConfig {
        sys::CUlaunchConfig {
            gridDimX: teams.rows * teams.blocks,
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: teams.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: teams.shared_bytes,
            hStream: self.stream.cu_stream(),
            attrs: cluster,
            numAttrs: (teams.blocks > 1) as u32,
        }
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
        let mut cluster = cluster_of(teams.blocks);
        let config = self.config(teams, &mut cluster);
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
    /// The machine code, loaded, where the build has made any for the device and the driver takes it.
    /// (Candle loads PTX alone.)
    fn assembled(&self, device: &CudaDevice) -> Result<Option<Arc<CudaModule>>> {
        const REFUSED: [sys::CUresult; 3] = [
            sys::CUresult::CUDA_ERROR_INVALID_IMAGE,
            sys::CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU,
            sys::CUresult::CUDA_ERROR_INVALID_SOURCE,
        ];
        type Loaded = BTreeMap<(usize, &'static str), Option<Arc<CudaModule>>>;
        static LOADED: Mutex<Loaded> = Mutex::new(BTreeMap::new());
        let stream = device.cuda_stream();
        let context = stream.context();
        let Some(code) = self.cubin else {
            return Ok(None);
        };
        let key = (context.cu_ctx().addr(), self.name);
        let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(module) = loaded.get(&key) {
            return Ok(module.clone());
        }
        let module = match context.compute_capability().w()? == cubin::CAPABILITY {
            true => match context.load_module(Ptx::from_binary(code.to_vec())) {
                Ok(module) => Some(module),
                // A driver that is older than the build's nvcc.
                Err(error) if REFUSED.contains(&error.0) => None,
                // What may be otherwise next time, and what the driver says of PTX, too.
                Err(_) => return Ok(None),
            },
            false => None,
        };
        loaded.insert(key, module.clone());
        Ok(module)
    }

    /// The kernel `name`, with this much dynamic shared memory allowed and perhaps more. What a kernel was once
    /// looked up with is kept: the driver's answers take as long as a launch.
    pub fn kernel(&self, device: &CudaDevice, name: &str, shared_bytes: u32) -> Result<Kernel> {
        // What a kernel gets without being asked for is 48 KB, its static part included.
        const GRANTED: u32 = 40 * 1024;
        struct Found {
            name: String,
            function: CudaFunction,
            /// Whether it may have more.
            granted: bool,
        }
        type Known = BTreeMap<(usize, &'static str), Vec<Found>>;
        static KNOWN: Mutex<Known> = Mutex::new(BTreeMap::new());
        let stream = device.cuda_stream();
        let key = (stream.context().cu_ctx().addr(), self.name);
        let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
        let of_module = known.entry(key).or_default();
        let at = match of_module.iter().position(|found| found.name == name) {
            Some(at) => at,
            None => {
                let function = match self.assembled(device)? {
                    Some(module) => module.load_function(name).w()?,
                    None => device
                        .get_or_load_custom_func(name, self.name, self.ptx)?
                        .into_cuda_function(),
                };
                of_module.push(Found {
                    name: name.to_string(),
                    function,
                    granted: false,
                });
                of_module.len() - 1
            }
        };
        let found = &mut of_module[at];
        // Where it needs more it is allowed all there is: a limit of each launch's own would be another
        // thread's too.
        if shared_bytes > GRANTED && !found.granted {
            let most = stream
                .context()
                .attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
                .w()?;
            let own = found
                .function
                .get_attribute(FunctionAttribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)
                .w()?;
            found
                .function
                .set_attribute(
                    FunctionAttribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                    most - own,
                )
                .w()?;
            found.granted = true;
        }
        Ok(Kernel {
            function: found.function.clone(),
            stream,
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

/// The one of two modules that serves this half type: F16 or BF16.
pub(crate) fn of_half(modules: &[Module; 2], dtype: DType) -> Module {
    match dtype {
        DType::F16 => modules[0],
        _ => modules[1],
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
        for form in Form::ALL {
            if form != Form::Sm90 || sm90 {
                family.kernel(device, dtype, form, 0)?;
            }
        }
    }
    REPEAT_PENALTY.kernel(device, "repeat_penalty", 0)?;
    crate::selection::preload(device, dtype)
}

/// Loads the kernels of [`attention`](crate::attention) for queries of this dtype (F32, F16, BF16 or
/// F8E4M3) onto a CUDA device, and those that select among its scores.
///
/// # Errors
/// As [`preload`].
pub fn preload_attention(device: &Device, dtype: DType) -> Result<()> {
    let Device::Cuda(device) = device else {
        bail!(
            "preload_attention: the device is {:?}, a CUDA device is needed",
            device.location()
        )
    };
    crate::attention::preload(device, dtype)?;
    crate::selection::preload(device, DType::F32)
}
