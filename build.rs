//! Compiles the CUDA kernels to PTX for the feature `cuda`.

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
    use cudaforge::KernelBuilder;
    use std::path::PathBuf;

    /// The least compute capability that the kernels are written for. Their PTX is compiled for it
    /// whatever the device, which the driver finishes for any later one. What starts with `sm90_`
    /// is for 9.0 alone.
    const FORM: usize = 80;

    pub fn build() -> Result<(), Box<dyn std::error::Error>> {
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
        for (folder, contract) in [
            ("sampling", "-fmad=false"),
            ("selection", "-fmad=false"),
            ("attention", "-fmad=true"),
        ] {
            let own = format!("kernels/{folder}");
            let headers: Vec<_> = ["kernels/common", &own]
                .iter()
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
                .write(out.join(format!("{folder}_ptx.rs")))?;
        }
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
}
