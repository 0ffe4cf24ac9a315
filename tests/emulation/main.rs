//! The CUDA kernels of sampling and selection without a GPU: compiled by a C++ compiler for an emulator of
//! blocks, warps and clusters (`include/emulator`), and compared with the CPU backend or a sort.
//!
//! It shows what the kernels compute, whatever the order in which warps and blocks run. Threads change at
//! steps of a warp and at barriers alone, messages arrive at once, and functions of the device that are
//! approximate are exact: what else the device may do, it does not show, nor how long anything takes.

#![cfg(all(
    target_os = "linux",
    any(target_arch = "x86_64", target_arch = "aarch64")
))]

#[path = "../common/mod.rs"]
mod common;
mod sampling;
mod selection;
#[allow(dead_code)] // The weights alone are used here.
#[path = "../../src/sampling/softmax.rs"]
mod softmax;

use candle_core::Result;
use std::io::{Read, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

/// Kernels under emulation, that take cases and give results.
struct Emulated {
    program: Child,
    to: Option<ChildStdin>,
    from: ChildStdout,
}

impl Emulated {
    /// Compiles a source of this folder and starts it. `name` is its own among those that run at once.
    fn start(name: &str, source: &str, definitions: &[String]) -> Result<Self> {
        let program =
            Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}", std::process::id()));
        let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".into());
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/emulation");
        // It may say more than a name.
        let mut said = compiler.split_whitespace();
        let status = Command::new(said.next().unwrap_or("c++"))
            .args(said)
            // Thread-local memory must lie alike in all threads, and no sum be fused.
            .args([
                "-std=c++20",
                "-O1",
                "-ffp-contract=off",
                "-fno-strict-aliasing",
            ])
            .args(["-ftls-model=local-exec", "-no-pie", "-pthread", "-w"])
            .arg("-DCANDLE_TOPK_EMULATOR")
            .args(definitions)
            .arg("-I")
            .arg(folder.join("include"))
            .arg(folder.join(source))
            .arg("-o")
            .arg(&program)
            .status()
            .unwrap_or_else(|e| panic!("`{compiler}` ($CXX, else c++) can't be run: {e}"));
        assert!(status.success(), "`{compiler}` did not compile {source}");
        let mut child = Command::new(&program)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        // It runs; its name is not needed any more.
        std::fs::remove_file(&program)?;
        Ok(Self {
            to: child.stdin.take(),
            from: child.stdout.take().expect("piped"),
            program: child,
        })
    }

    /// Gives it a case; `what` it is, its failure will say.
    fn say(&mut self, bytes: &[u8], what: &str) {
        let to = self.to.as_mut().expect("open until the end");
        let said = to.write_all(bytes).and_then(|_| to.flush());
        said.unwrap_or_else(|_| self.fail(what));
    }

    fn bytes(&mut self, count: usize, what: &str) -> Vec<u8> {
        let mut bytes = vec![0; count];
        let read = self.from.read_exact(&mut bytes);
        read.unwrap_or_else(|_| self.fail(what));
        bytes
    }

    fn words(&mut self, count: usize, what: &str) -> Vec<u32> {
        let word = |b: &[u8]| u32::from_ne_bytes([b[0], b[1], b[2], b[3]]);
        self.bytes(4 * count, what).chunks(4).map(word).collect()
    }

    fn fail(&mut self, what: &str) -> ! {
        panic!("{what}: the emulator ended ({:?})", self.program.wait())
    }

    fn end(mut self) -> Result<()> {
        self.to = None;
        assert!(self.program.wait()?.success(), "the emulator failed");
        Ok(())
    }
}

impl Drop for Emulated {
    fn drop(&mut self) {
        // After a failure it may still be at work.
        let _ = self.program.kill();
        let _ = self.program.wait();
    }
}
