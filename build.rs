//! Compiles the CUDA kernels for the feature `cuda`: to PTX, and that to machine code for the GPU that the
//! build is for.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=kernels");
    #[cfg(feature = "cuda")]
    if let Err(error) = kernels::build() {
        eprintln!("candle-topk: the CUDA kernels were not built: {error}");
        std::process::exit(1);
    }
}

#[cfg(feature = "cuda")]
mod kernels {
    use cudaforge::{CudaToolkit, GpuArch, KernelBuilder};
    use std::hash::{DefaultHasher, Hash, Hasher};
    use std::path::{Path, PathBuf};
    use std::process::Command;
    use std::sync::atomic::{AtomicUsize, Ordering};

    type Error = Box<dyn std::error::Error + Send + Sync>;

    /// The least compute capability that the kernels are written for. Their PTX is compiled for it
    /// whatever the device, which the driver finishes for any later one. What starts with `sm90_`
    /// is for 9.0 alone.
    const FORM: usize = 80;

    pub fn build() -> Result<(), Error> {
        let arch = cudaforge::detect_compute_cap()?;
        if arch.base() < FORM {
            return Err(format!(
                "compute capability {} is asked for (CUDA_COMPUTE_CAP or the local GPU), 8.0 or later is needed",
                arch.base() as f64 / 10.0
            )
            .into());
        }
        let out = PathBuf::from(std::env::var("OUT_DIR")?);
        // Where the CPU repeats the same operations, one rounding each, nothing may be contracted.
        let mut families = vec![
            ("sampling", "kernels/sampling", "-fmad=false"),
            ("selection", "kernels/selection", "-fmad=false"),
            ("attention", "kernels/attention", "-fmad=true"),
        ];
        // Minutes more of compilation, for one bench.
        if cfg!(feature = "ablation") {
            families.push(("ablation", "kernels/sampling/ablation", "-fmad=false"));
        }
        for (name, own, contract) in families {
            // An inner folder's kernels include those around it.
            let around = Path::new(own)
                .ancestors()
                .filter(|at| at.components().count() > 1);
            let headers: Vec<_> = std::iter::once(Path::new("kernels/common"))
                .chain(around)
                .flat_map(|folder| std::fs::read_dir(folder).into_iter().flatten().flatten())
                .map(|entry| entry.path())
                .filter(|path| path.extension().is_some_and(|e| e == "cuh"))
                .collect();
            KernelBuilder::new()
                .source_glob(&format!("{own}/*.cu"))
                .watch(headers)
                .compute_cap(FORM)
                .with_compute_override("sm90_*.cu", 90)
                .arg("-O3")
                .arg("-std=c++17")
                .arg(contract)
                .build_ptx()?
                .write(out.join(format!("{name}_ptx.rs")))?;
            let cubins = assemble(own, &arch, &out)?;
            std::fs::write(out.join(format!("{name}_cubin.rs")), cubins)?;
        }
        std::fs::write(
            out.join("cubin_capability.rs"),
            format!("({}, {})", arch.base() / 10, arch.base() % 10),
        )?;
        // What the benches measure with. A file of its own, which only they include: no program
        // that uses the crate carries it.
        KernelBuilder::new()
            .source_glob("kernels/bench/*.cu")
            .watch(["kernels/bench/random.cuh"])
            .compute_cap(FORM)
            .arg("-O3")
            .arg("-std=c++17")
            .build_ptx()?
            .write(out.join("bench_ptx.rs"))?;
        Ok(())
    }

    /// Assembles the PTX of a folder's kernels for the GPU that the build is for, and declares each: a
    /// `Some`, or `None` where the kernel isn't for it. The driver would take seconds for each when it
    /// is first loaded.
    fn assemble(folder: &str, arch: &GpuArch, out: &Path) -> Result<String, Error> {
        let nvcc = CudaToolkit::detect()?.nvcc_path;
        let nvcc = nvcc.canonicalize().unwrap_or(nvcc);
        let mut names: Vec<_> = std::fs::read_dir(folder)?
            .flatten()
            .map(|entry| entry.path())
            .filter(|path| path.extension().is_some_and(|e| e == "cu"))
            .filter_map(|path| Some(path.file_stem()?.to_str()?.to_string()))
            .collect();
        names.sort();
        let serves = |name: &str| !name.starts_with("sm90_") || arch.base() == 90;
        let next = AtomicUsize::new(0);
        let work = || -> Result<(), Error> {
            while let Some(name) = names.get(next.fetch_add(1, Ordering::Relaxed)) {
                if serves(name) {
                    assemble_one(&nvcc, arch, &out.join(name))?;
                }
            }
            Ok(())
        };
        let threads = std::thread::available_parallelism()?.get();
        std::thread::scope(|scope| {
            let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
            let ends = workers.into_iter().map(|worker| worker.join());
            ends.map(|end| end.expect("the assembler's thread does not panic"))
                .collect::<Result<Vec<()>, Error>>()
        })?;
        let declarations = names.iter().map(|name| {
            let value = match serves(name) {
                true => {
                    format!("Some(include_bytes!(concat!(env!(\"OUT_DIR\"), \"/{name}.cubin\")))")
                }
                false => "None".to_string(),
            };
            format!(
                "pub const {}: Option<&[u8]> = {value};\n",
                name.to_uppercase()
            )
        });
        Ok(declarations.collect())
    }

    fn assemble_one(nvcc: &Path, arch: &GpuArch, kernel: &Path) -> Result<(), Error> {
        let (ptx, cubin) = (kernel.with_extension("ptx"), kernel.with_extension("cubin"));
        // What it is made of and for, and that it was written whole. Times would not tell of another GPU's
        // build, nor where machines share a target folder.
        let stamp = kernel.with_extension("cubin-of");
        let mut hasher = DefaultHasher::new();
        std::fs::read(&ptx)?.hash(&mut hasher);
        let of = format!("{} {:016x}", arch.to_nvcc_arch(), hasher.finish());
        let made = |cubin: &Path| Some(format!("{of} {}", whole_elf(&std::fs::read(cubin).ok()?)?));
        if made(&cubin).is_some_and(|own| std::fs::read_to_string(&stamp).is_ok_and(|it| it == own))
        {
            return Ok(());
        }
        let _ = std::fs::remove_file(&stamp);
        let output = Command::new(nvcc)
            .args(["-cubin", &format!("-arch={}", arch.to_nvcc_arch())])
            .args([&ptx, Path::new("-o"), &cubin])
            .current_dir(kernel.parent().unwrap_or(Path::new(".")))
            .output()
            .map_err(|error| format!("{}: {error}", nvcc.display()))?;
        if !output.status.success() {
            return Err(format!(
                "{}: {}",
                ptx.display(),
                String::from_utf8_lossy(&output.stderr)
            )
            .into());
        }
        // It succeeds on a full disk, too.
        let own = made(&cubin).ok_or_else(|| {
            format!(
                "{} was not written whole: is the disk full?",
                cubin.display()
            )
        })?;
        std::fs::write(stamp, own)?;
        Ok(())
    }

    /// The length of an ELF file for 64 bits that holds all its tables, which lie at its end.
    fn whole_elf(file: &[u8]) -> Option<usize> {
        let number = |at: usize, bytes: usize| -> Option<u64> {
            let field = file.get(at..at + bytes)?.iter().rev();
            Some(field.fold(0, |number, &byte| number << 8 | byte as u64))
        };
        for (offset, size, count) in [(0x20, 0x36, 0x38), (0x28, 0x3a, 0x3c)] {
            let table = number(size, 2)? * number(count, 2)?;
            if number(offset, 8)?.checked_add(table)? > file.len() as u64 {
                return None;
            }
        }
        file.starts_with(b"\x7fELF").then_some(file.len())
    }
}
