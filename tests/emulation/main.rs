//! The CUDA kernels of sampling and selection without a GPU: compiled by a C++ compiler for an emulator of
//! blocks, warps and clusters (`include/emulator`), and compared with the CPU backend or a sort, bit by bit.
//!
//! It shows what the kernels compute, whatever the order in which warps run and messages come: not what
//! the device's memory model allows beyond that, nor how long it takes.

#![cfg(all(
    target_os = "linux",
    any(target_arch = "x86_64", target_arch = "aarch64")
))]

#[path = "../common/mod.rs"]
mod common;
mod sampling;
mod selection;

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
        let status = Command::new(&compiler)
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

    fn say(&mut self, bytes: &[u8]) -> Result<()> {
        let to = self.to.as_mut().expect("open until the end");
        to.write_all(bytes)?;
        Ok(to.flush()?)
    }

    fn bytes(&mut self, count: usize) -> Result<Vec<u8>> {
        let mut bytes = vec![0; count];
        self.from.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    fn words(&mut self, count: usize) -> Result<Vec<u32>> {
        let word = |b: &[u8]| u32::from_ne_bytes([b[0], b[1], b[2], b[3]]);
        Ok(self.bytes(4 * count)?.chunks(4).map(word).collect())
    }

    fn end(mut self) -> Result<()> {
        self.to = None;
        assert!(self.program.wait()?.success(), "the emulator failed");
        Ok(())
    }
}
