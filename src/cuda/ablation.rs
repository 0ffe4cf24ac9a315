//! The sampling kernels with techniques exchanged, as in the Qrita paper's table 4: for the ablation of
//! `benches/kernels.rs`, and no part of the crate's API.

use super::{Family, Kernel, Module, Teams};
use candle_core::cuda_backend::{CudaDevice, WrapErr};
use candle_core::{bail, DType, Result};
use std::cell::Cell;

mod ptx {
    include!(concat!(env!("OUT_DIR"), "/ablation_ptx.rs"));
}

mod cubin {
    include!(concat!(env!("OUT_DIR"), "/ablation_cubin.rs"));
}

/// A run of the ablation: kernels of `mask` and `sample` for F32 logits, one block a row.
#[derive(Debug, Clone, Copy)]
pub struct Run {
    /// "A" to "J", as in the paper's table, or what is changed in the kernels that ship.
    pub name: &'static str,
    /// "hit", "miss" or "none".
    pub truncation: &'static str,
    /// "ranked", as in the kernels that ship, "quaternary", "binary" or "sort".
    pub search: &'static str,
    /// Whether elements that equal the last of a set are cut where the set has no room for them.
    pub duplicates: bool,
    /// Whether the block's size is the one that suits the batch, and not one tile for all loops.
    pub tuned: bool,
    module: Module,
}

macro_rules! run {
    ($name:literal, $kernels:ident, $truncation:literal, $search:literal, $duplicates:literal, $tuned:literal) => {
        Run {
            name: $name,
            truncation: $truncation,
            search: $search,
            duplicates: $duplicates,
            tuned: $tuned,
            module: Module {
                name: concat!(
                    "candle-topk/",
                    env!("CARGO_PKG_VERSION"),
                    "/ablation/",
                    stringify!($kernels)
                ),
                ptx: ptx::$kernels,
                cubin: cubin::$kernels,
            },
        }
    };
}

/// What `kernels/sampling/ablation` holds.
#[rustfmt::skip]
pub const RUNS: [Run; 13] = [
    run!("shipped, one size", RUN_SHIPPED_SIZE, "hit", "ranked", true, false),
    run!("shipped, miss", RUN_SHIPPED_MISS, "miss", "ranked", true, true),
    run!("shipped, none", RUN_SHIPPED_NONE, "none", "ranked", true, true),
    run!("A", RUN_A, "hit", "quaternary", true, true),
    run!("B", RUN_B, "hit", "quaternary", true, false),
    run!("C", RUN_C, "hit", "quaternary", false, false),
    run!("D", RUN_D, "miss", "quaternary", false, false),
    run!("E", RUN_E, "none", "quaternary", false, false),
    run!("F", RUN_F, "hit", "binary", false, false),
    run!("G", RUN_G, "miss", "binary", false, false),
    run!("H", RUN_H, "none", "binary", false, false),
    run!("I", RUN_I, "hit", "sort", false, false),
    run!("J", RUN_J, "none", "sort", false, false),
];

thread_local! {
    static CURRENT: Cell<Option<Run>> = const { Cell::new(None) };
}

pub(super) fn current() -> Option<Run> {
    CURRENT.get()
}

/// Runs `f` with the run's kernels in place of those that `mask` and `sample` launch on this thread.
///
/// # Safety
/// A run that searches by "sort" has been lent memory ([`Run::lend`]) for every row of every launch.
pub unsafe fn with_run<R>(run: Run, f: impl FnOnce() -> R) -> R {
    struct Restore(Option<Run>);
    impl Drop for Restore {
        fn drop(&mut self) {
            CURRENT.set(self.0);
        }
    }
    let _restore = Restore(CURRENT.replace(Some(run)));
    f()
}

impl Run {
    /// `kThreads` in the run's file.
    fn threads(&self) -> u32 {
        match self.tuned {
            true => 256,
            false => 1024,
        }
    }

    pub(super) fn teams(
        &self,
        device: &CudaDevice,
        family: &Family,
        dtype: DType,
        rows: usize,
        shared_bytes: u32,
    ) -> Result<(Kernel, Teams)> {
        if dtype != DType::F32 || !["mask", "sample"].contains(&family.name) {
            bail!(
                "ablation: run {} is of mask and sample of F32, {} of {dtype:?} is asked for",
                self.name,
                family.name
            )
        }
        // What the kernels declare beside their dynamic shared memory is less.
        const STATIC_BYTES: u32 = 16 << 10;
        let kernel = self
            .module
            .kernel(device, family.name, shared_bytes + STATIC_BYTES)?;
        let teams = Teams {
            rows: rows as u32,
            blocks: 1,
            threads: self.threads(),
            shared_bytes,
        };
        Ok((kernel, teams))
    }

    /// Loads the run's kernels.
    ///
    /// # Errors
    /// Where the driver cannot.
    pub fn preload(&self, device: &CudaDevice) -> Result<()> {
        for name in ["mask", "sample"] {
            self.module.kernel(device, name, 0)?;
        }
        Ok(())
    }

    /// Gives the run device memory to sort rows in: for each row of a launch, 16 bytes a logit.
    ///
    /// # Safety
    /// The memory stays allocated for as long as the run's kernels are launched.
    ///
    /// # Errors
    /// Where the driver cannot launch.
    pub unsafe fn lend(&self, device: &CudaDevice, address: u64) -> Result<()> {
        use candle_core::cuda_backend::cudarc::driver::{LaunchConfig, PushKernelArg};
        if self.search != "sort" {
            return Ok(());
        }
        let Kernel { function, stream } = self.module.kernel(device, "lend", 0)?;
        let mut launch = stream.launch_builder(&function);
        launch.arg(&address);
        let one = LaunchConfig {
            grid_dim: (1, 1, 1),
            block_dim: (1, 1, 1),
            shared_mem_bytes: 0,
        };
        // SAFETY: the kernel's parameter; it notes the address, which the caller answers for.
        unsafe { launch.launch(one) }.w()?;
        Ok(())
    }
}
