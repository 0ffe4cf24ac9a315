//! Device times of `attention::SparseAttention`, as JSON lines of op "sparse_attention":
//!
//! ```bash
//! cargo bench --features cuda --bench sparse_attention
//! cargo bench --features cuda --bench sparse_attention -- --only latent,decode --dtype f16 --quick
//! ```
//!
//! | name | what it measures |
//! |---|---|
//! | `latent prefill` | MLA: 64 and 128 heads, keys of 576, values of 512, K = 2048, S = 4096, T = 8K and 128K |
//! | `latent decode` | the same with 1 to 128 sequences of 64K in a cache of their own |
//! | `gqa decode` | 32 heads on 8, dimension 128, K = 2048 of 128K, 1 to 64 sequences |
//! | `gqa prefill` | the same with S = 4096 rows of one sequence: positions of tokens, of blocks of 64 that every row chooses for itself, and of blocks that 64 neighbouring rows share |
//!
//! How it is measured is how `kernels` does it: the op is captured in a CUDA graph, whose replays are
//! timed by events, and before each a buffer of 256 MB is read, so that L2 holds nothing of the input.
//! *Read floor*: one pass by 16-byte loads over as many bytes as the keys and values that are attended
//! to have, each counted once. TFLOP/s counts 2 S Hq K (Dk + Dv).
//!
//! Before an op is timed its output is overwritten with NaN, its graph is replayed, and rows are compared
//! with those of the CPU backend. A mismatch is named on stderr and makes the run fail at its end.

#[path = "../tests/common/mod.rs"]
mod common;
mod device;

use candle_core::{bail, DType, Device, Result, Tensor};
use candle_topk::attention::{KeyValues, SparseAttention, Values, Workspace};
use clap::{Parser, ValueEnum};
use common::rng;
use device::{median, us, Gpu};
use rand::Rng;
use serde_json::{json, Value};

/// Times attention over positions on the first CUDA device.
#[derive(Parser)]
struct Args {
    /// Only cells whose name holds all of these
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Type of queries, keys and values
    #[arg(long, value_enum, default_value_t = Type::Bf16)]
    dtype: Type,
    /// How many rows of each cell are compared with the CPU backend
    #[arg(long, default_value_t = 3)]
    check: usize,
    /// 20 replays instead of 50
    #[arg(long)]
    quick: bool,
    /// The seed [default: a new one]
    #[arg(long)]
    seed: Option<u64>,
    /// As cargo calls a bench.
    #[arg(long, hide = true)]
    bench: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Type {
    F32,
    F16,
    Bf16,
}

impl Type {
    fn dtype(self) -> DType {
        match self {
            Self::F32 => DType::F32,
            Self::F16 => DType::F16,
            Self::Bf16 => DType::BF16,
        }
    }
}

/// One line.
#[derive(Clone, Copy, Debug)]
struct Cell {
    name: &'static str,
    rows: usize,
    /// Sequences with a cache of their own; 0: one that all rows are of.
    sequences: usize,
    length: usize,
    heads: usize,
    kv_heads: usize,
    key_dim: usize,
    /// Of values of their own; `None`: the first 512 of each key.
    value_dim: Option<usize>,
    /// Keys of a row.
    k: usize,
    block: usize,
    /// Neighbouring rows with the same positions.
    shared: usize,
}

impl Cell {
    fn values_dim(&self) -> usize {
        self.value_dim.unwrap_or(512)
    }
}

fn cells() -> Vec<Cell> {
    let mut cells = vec![];
    let latent = Cell {
        name: "latent prefill",
        rows: 4096,
        sequences: 0,
        length: 8 << 10,
        heads: 128,
        kv_heads: 1,
        key_dim: 576,
        value_dim: None,
        k: 2048,
        block: 1,
        shared: 1,
    };
    for heads in [128, 64] {
        for length in [8 << 10, 128 << 10] {
            cells.push(Cell {
                heads,
                length,
                ..latent
            });
        }
    }
    for rows in [1, 8, 64, 128] {
        cells.push(Cell {
            name: "latent decode",
            rows,
            sequences: rows,
            length: 64 << 10,
            ..latent
        });
    }
    let gqa = Cell {
        heads: 32,
        kv_heads: 8,
        key_dim: 128,
        value_dim: Some(128),
        length: 128 << 10,
        ..latent
    };
    for rows in [1, 8, 32] {
        cells.push(Cell {
            name: "gqa decode",
            rows,
            sequences: rows,
            ..gqa
        });
    }
    for length in [8 << 10, 128 << 10] {
        for (name, block, shared) in [
            ("gqa prefill tokens", 1, 1),
            ("gqa prefill blocks", 64, 1),
            ("gqa prefill blocks shared", 64, 64),
        ] {
            cells.push(Cell {
                name,
                block,
                shared,
                length,
                ..gqa
            });
        }
    }
    cells
}

/// Distinct positions of each row, `[S, K / block]`, of the cell's positions or blocks in no order.
fn positions(cell: &Cell, seed: u64) -> Vec<u32> {
    let mut rng = rng(seed);
    let (places, width) = (cell.length / cell.block, cell.k / cell.block);
    let mut all = Vec::with_capacity(cell.rows * width);
    for row in 0..cell.rows {
        if row % cell.shared != 0 {
            all.extend_from_within(all.len() - width..);
            continue;
        }
        // One of each of as many stretches, shuffled.
        let start = all.len();
        for i in 0..width {
            let (from, to) = (i * places / width, (i + 1) * places / width);
            all.push(rng.random_range(from..to) as u32);
        }
        for i in (1..width).rev() {
            all.swap(start + i, start + rng.random_range(0..=i));
        }
    }
    all
}

fn random(gpu: &Gpu, dims: &[usize], dtype: DType) -> Result<Tensor> {
    // In parts: f32 numbers come first.
    let (first, rest) = (dims[0], &dims[1..]);
    let each: usize = rest.iter().product();
    let out = Tensor::zeros(dims, dtype, &gpu.device)?;
    let part = ((1 << 28) / each).clamp(1, first);
    for start in (0..first).step_by(part) {
        let mut dims = dims.to_vec();
        dims[0] = part.min(first - start);
        let numbers = Tensor::randn(0f32, 1., dims, &gpu.device)?.to_dtype(dtype)?;
        out.slice_set(&numbers, 0, start)?;
    }
    Ok(out)
}

/// Compares a row with the CPU backend's, over copies of the keys that it attends to.
fn check(
    cell: &Cell,
    op: &SparseAttention,
    [q, k, out, lse]: [&Tensor; 4],
    v: Option<&Tensor>,
    lists: &[u32],
    row: usize,
) -> Result<()> {
    let width = cell.k / cell.block;
    let list = &lists[row * width..][..width];
    let keys: Vec<u32> = list
        .iter()
        .flat_map(|&p| (0..cell.block as u32).map(move |i| p * cell.block as u32 + i))
        .collect();
    let index = Tensor::from_vec(keys, cell.k, q.device())?;
    let take = |t: &Tensor| -> Result<Tensor> {
        let own = match cell.sequences {
            0 => t.clone(),
            _ => t.get(row * cell.sequences / cell.rows)?,
        };
        own.index_select(&index, 0)?.to_device(&Device::Cpu)
    };
    let cpu = |t: &Tensor| {
        t.narrow(0, row, 1)?
            .force_contiguous()?
            .to_device(&Device::Cpu)
    };
    let values = match v {
        Some(v) => Values::Tensor(take(v)?),
        None => Values::OfKeys(512),
    };
    let all = Tensor::arange(0u32, cell.k as u32, &Device::Cpu)?.unsqueeze(0)?;
    let op = op.clone().with_block_size(1);
    let wide = |t: &Tensor| t.to_dtype(DType::F32);
    let values = match values {
        Values::Tensor(v) => Values::Tensor(wide(&v)?),
        of_keys => of_keys,
    };
    let kv = KeyValues::packed(&wide(&take(k)?)?, values);
    let wanted = op.forward(&wide(&cpu(q)?)?, &kv, &all)?;
    let (abs, rel) = match q.dtype() {
        DType::F32 => (2e-6, 2e-5),
        _ => (8e-4, 3.0 / 128.0),
    };
    for (what, got, wanted, abs, rel) in [
        ("output", cpu(out)?, wanted.out, abs, rel),
        ("lse", cpu(lse)?, wanted.lse, 1e-6, 2.0 / 65536.0),
    ] {
        let numbers = |t: &Tensor| t.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>();
        for (i, (got, wanted)) in numbers(&got)?.iter().zip(numbers(&wanted)?).enumerate() {
            let error = (got - wanted).abs();
            if !(error <= abs || error <= rel * wanted.abs()) {
                bail!("row {row}: {what} {i} is {got}, {wanted} is expected")
            }
        }
    }
    Ok(())
}

fn run(gpu: &Gpu, cell: &Cell, args: &Args) -> Result<Value> {
    let dtype = args.dtype.dtype();
    let leading = match cell.sequences {
        0 => vec![cell.length],
        sequences => vec![sequences, cell.length],
    };
    let tensor = |dim: usize| {
        random(
            gpu,
            &[leading.clone(), vec![cell.kv_heads, dim]].concat(),
            dtype,
        )
    };
    let q = random(gpu, &[cell.rows, cell.heads, cell.key_dim], dtype)?;
    let k = tensor(cell.key_dim)?;
    let v = cell.value_dim.map(tensor).transpose()?;
    let lists = positions(cell, gpu.seed ^ cell.rows as u64);
    let width = cell.k / cell.block;
    let chosen = Tensor::from_slice(&lists, (cell.rows, width), &gpu.device)?;
    let values = || match &v {
        Some(v) => Values::from(v),
        None => Values::OfKeys(512),
    };
    let kv = match cell.sequences {
        0 => KeyValues::packed(&k, values()),
        _ => KeyValues::batched(&k, values()),
    };
    let op = SparseAttention::new((cell.key_dim as f32).powf(-0.5)).with_block_size(cell.block);
    let dims = (cell.rows, cell.heads, cell.values_dim());
    let out = Tensor::zeros(dims, dtype, &gpu.device)?;
    let lse = Tensor::zeros((cell.rows, cell.heads), DType::F32, &gpu.device)?;
    let mut workspace = Workspace::new(&gpu.device)?;

    // The kernels are loaded before the capture.
    op.forward_into(&q, &kv, &chosen, [&out, &lse], &mut workspace)?;
    gpu.poison(&out)?;
    gpu.poison(&lse)?;
    gpu.device.synchronize()?;
    let graph = gpu.capture(|| op.forward_into(&q, &kv, &chosen, [&out, &lse], &mut workspace))?;
    graph.launch().map_err(candle_core::Error::wrap)?;
    let last = cell.rows - 1;
    let mut rows: Vec<usize> = (0..args.check.min(cell.rows))
        .map(|i| i * last / args.check.max(2).saturating_sub(1).max(1))
        .collect();
    rows.dedup();
    let mut exact = true;
    for row in rows {
        if let Err(error) = check(cell, &op, [&q, &k, &out, &lse], v.as_ref(), &lists, row) {
            eprintln!("{} of {cell:?}: {error}", cell.name);
            exact = false;
        }
    }
    let times = gpu.time(&graph, None, gpu.replays, || Ok(()))?;

    // Rows of one sequence can attend to all of it and to no more.
    let each = cell.kv_heads * (cell.key_dim + cell.value_dim.unwrap_or(0));
    let keys = match cell.sequences {
        0 => (cell.rows.div_ceil(cell.shared) * cell.k).min(cell.length),
        _ => cell.rows * cell.k,
    };
    let bytes = keys * each * dtype.size_in_bytes();
    let have = k.elem_count() * dtype.size_in_bytes();
    let floor = gpu.floor(false, &k, bytes.min(have))? * (bytes as f64 / bytes.min(have) as f64);
    let flops = 2.0 * (cell.rows * cell.heads * cell.k * (cell.key_dim + cell.values_dim())) as f64;
    let mut line = gpu.line("sparse_attention", &times);
    let more = json!({
        "name": cell.name, "phase": if cell.sequences == 0 { "prefill" } else { "decode" },
        "s": cell.rows, "t": cell.length, "h": cell.heads, "kv_h": cell.kv_heads,
        "d": cell.key_dim, "dv": cell.values_dim(), "k": cell.k, "block": cell.block,
        "shared": cell.shared, "dtype": format!("{dtype:?}").to_lowercase(), "l2": "rotated",
        "tflops": us(flops / median(&times) / 1e6), "read_floor_us": us(floor),
        "gbps": us(bytes as f64 / median(&times) / 1e3), "exact": exact,
    });
    line.extend(more.as_object().cloned().unwrap_or_default());
    Ok(Value::Object(line))
}

fn main() -> Result<()> {
    let args = Args::parse();
    let seed = args.seed.unwrap_or_else(rand::random);
    let gpu = Gpu::new(0, if args.quick { 20 } else { 50 }, seed)?;
    gpu.device.set_seed(seed)?;
    let mut failed = 0;
    for cell in cells() {
        if !args.only.iter().all(|part| cell.name.contains(part)) {
            continue;
        }
        let line = run(&gpu, &cell, &args)?;
        failed += (line["exact"] != true) as usize;
        println!("{line}");
    }
    if failed > 0 {
        bail!("{failed} cells don't match the CPU backend")
    }
    Ok(())
}
