//! Device times of the ops, beside the least time that their bytes take, as JSON lines:
//!
//! ```bash
//! cargo bench --features cuda --bench kernels                      # the whole grid
//! cargo bench --features cuda --bench kernels -- --v 128256 --b 1,32,1024 --op sample --mode k50 --quick
//! cargo bench --features cuda,ablation --bench kernels -- --ablation         # the paper's table 4
//! ```
//!
//! Each op is captured in a CUDA graph, and the graph's replays are timed by events, after warm-up;
//! the median of at least 20. Before each replay a buffer of at least 256 MB is read, so that
//! nothing of inputs or outputs is left in L2, and the device is busy until everything that is timed
//! is queued. An op in place destroys its input: it is made anew before each replay, by the same
//! counters. The line of op "empty_graph" says what a replay takes that does nothing; it is part of
//! every figure.
//!
//! *Read floor*: one pass over the logits by 16-byte loads; *copy floor*: read and written. Of
//! several launch shapes the fastest, over the same bytes, in the same run, with the same state of L2.
//!
//! Before an op is timed, its outputs are overwritten with what no op gives, its graph is replayed,
//! and rows are compared with a stable sort in f64: the key "exact". A mismatch is named on stderr
//! and makes the run fail at its end.

#[cfg(feature = "ablation")]
mod ablation;
#[path = "../tests/common/mod.rs"]
mod common;
mod device;

use candle_core::cuda_backend::cudarc::driver::{LaunchConfig, PushKernelArg};
use candle_core::cuda_backend::WrapErr;
use candle_core::{bail, DType, Device, Result, Tensor};
use candle_topk::sampling::{
    mask_into, sample, CandidateBuffers, Draw, Mask, Routes, SampleBuffers,
};
use clap::{Parser, ValueEnum};
use common::{rng, Oracle, Params};
use device::{host_row, or, us, write, Gpu, EVICTED_BYTES};
use rand::Rng;
use serde_json::json;

const WIDTHS: [usize; 5] = [128256, 151936, 201088, 248320, 262208];
const BATCHES: [usize; 11] = [1, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048];
const ABLATION_OPS: [Op; 2] = [Op::MaskInPlace, Op::Sample];
/// Of `candidates`.
const CAPACITY: usize = 256;
/// No op takes any: what a launch needs beside inputs and outputs is on chip.
const WORKSPACE: usize = 0;

/// Times ops on the first CUDA device.
#[derive(Parser)]
struct Args {
    /// Vocabularies [default: 128256,151936,201088,248320,262208; 128256 for "normal"]
    #[arg(long, value_delimiter = ',')]
    v: Vec<usize>,
    /// Batches [default: 1,4,8,...,2048; 1,32,128,1024 for "normal"]
    #[arg(long, value_delimiter = ',')]
    b: Vec<usize>,
    /// Ops [default: all; without candidates for "normal"]
    #[arg(long, value_delimiter = ',')]
    op: Vec<Op>,
    /// "k50", "p0.9", "k50p0.9" and the like; "khalf" is k = V / 2, "all" no limit [default: these three;
    /// p0.9, khalf and, of the op sample, all for "normal"]
    #[arg(long, value_delimiter = ',')]
    mode: Vec<String>,
    /// Types of logits [default: f32,bf16; f32 for "normal"]
    #[arg(long, value_delimiter = ',')]
    dtype: Vec<Type>,
    /// Laws of logits [default: peaked; with none of the above, normal as well]
    #[arg(long, value_delimiter = ',')]
    dist: Vec<Dist>,
    /// The techniques of the kernels, one exchanged at a time: in-place mask and sample, f32, by default of
    /// 1024 rows of 128256 logits (needs the feature `ablation`)
    #[arg(long)]
    ablation: bool,
    /// 20 replays instead of 50
    #[arg(long)]
    quick: bool,
    /// The seed of logits and draws [default: a new one]
    #[arg(long)]
    seed: Option<u64>,
    /// How many rows of each shape are compared with the stable sort
    #[arg(long, default_value_t = 2)]
    check: usize,
    /// As cargo calls a bench.
    #[arg(long, hide = true)]
    bench: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
enum Op {
    Mask,
    MaskInPlace,
    Candidates,
    Sample,
}

#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
enum Type {
    F32,
    Bf16,
}

impl Type {
    fn dtype(self) -> DType {
        match self {
            Self::F32 => DType::F32,
            Self::Bf16 => DType::BF16,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
enum Dist {
    /// normal(-1, 2.2) with 64 positions of a row replaced by uniform(6, 18)
    Peaked,
    /// normal(0, 1): no few tokens hold the mass
    Normal,
}

impl Dist {
    fn name(self) -> &'static str {
        match self {
            Self::Peaked => "peaked",
            Self::Normal => "normal",
        }
    }
}

/// "k50p0.9" and its like, and what it is called in a line.
fn mode(text: &str, v: usize) -> Result<(String, Params)> {
    let parse = || {
        let text = match text {
            "khalf" => format!("k{}", v / 2),
            _ => text.to_string(),
        };
        let (k, p) = match text.strip_prefix('k') {
            Some(rest) => {
                let end = rest.find('p').unwrap_or(rest.len());
                (rest[..end].parse().ok().filter(|&k| k > 0)?, &rest[end..])
            }
            None if text == "all" => (0, ""),
            None => (0, text.as_str()),
        };
        let p = match p.strip_prefix('p') {
            Some(p) => p.parse().ok().filter(|&p| p > 0.0 && p <= 1.0)?,
            None if p.is_empty() => 1.0,
            None => return None,
        };
        let params = Params {
            k,
            p,
            ..Params::NONE
        };
        Some((text, params))
    };
    match parse() {
        Some(mode) => Ok(mode),
        None => bail!("--mode is {text:?}, accepted are k50, p0.9, k50p0.9 and their like with k from 1 up and p in (0, 1], khalf and all"),
    }
}

impl Gpu {
    /// Fills logits `[b, v]`, the same at every call.
    fn generate(&self, logits: &Tensor, dist: Dist) -> Result<()> {
        let (b, v) = logits.dims2()?;
        let name = logits.dtype().as_str();
        let normal = self.kernel(&format!("normal_{name}"))?;
        let peaks = self.kernel(&format!("peaks_{name}"))?;
        let (mean, deviation) = match dist {
            Dist::Peaked => (-1f32, 2.2f32),
            Dist::Normal => (0.0, 1.0),
        };
        write(logits, |address| {
            let (pairs, vocab) = ((b * v / 2) as u64, v as i64);
            let mut launch = self.stream.launch_builder(&normal);
            launch.arg(&address).arg(&pairs).arg(&self.seed);
            launch.arg(&mean).arg(&deviation);
            // SAFETY: `pairs` pairs are b x v values, v being even.
            unsafe { launch.launch(self.config(8, 256)) }.w()?;
            if dist == Dist::Peaked {
                let mut launch = self.stream.launch_builder(&peaks);
                launch.arg(&address).arg(&vocab).arg(&self.seed);
                let config = LaunchConfig {
                    grid_dim: (b as u32, 1, 1),
                    block_dim: (64, 1, 1),
                    shared_mem_bytes: 0,
                };
                // SAFETY: a block a row, and each writes inside its row.
                unsafe { launch.launch(config) }.w()?;
            }
            Ok(())
        })
    }
}

/// What an op is run on.
#[derive(Clone, Copy)]
struct Case<'a> {
    gpu: &'a Gpu,
    logits: &'a Tensor,
    /// Of the logits' shape and dtype.
    masked: &'a Tensor,
    params: Params,
}

/// An op at one shape, with its outputs.
trait Run {
    /// The op and nothing else: this is captured.
    fn launch(&mut self, case: &Case) -> Result<()>;

    /// What the last launch has kept of a row, against the row as it was.
    fn compare(&mut self, case: &Case, row: &Row) -> Result<std::result::Result<(), String>>;

    /// How each row's cut is found, where the op can tell; else nothing. Counted by a launch of its own: what
    /// is timed counts nothing.
    fn routes(&self, _: &Case) -> Result<Vec<Routes>> {
        Ok(vec![])
    }
}

/// A row that is checked.
struct Row<'a> {
    index: usize,
    logits: &'a [f32],
    oracle: Oracle<'a>,
}

/// An op, or a variant of its kernels, under the names that its lines give. What is listed is
/// measured side by side on the same case; a line with a variant is one of an ablation.
struct Entry {
    op: Op,
    name: &'static str,
    variant: Option<Variant>,
    make: Make,
}

type Make = Box<dyn Fn(&Case) -> Result<Box<dyn Run>>>;

/// What a line says of a variant: its name, and its techniques by their keys.
#[derive(Clone)]
struct Variant {
    name: &'static str,
    techniques: serde_json::Value,
}

impl Entry {
    /// The op as it is.
    fn of(op: Op) -> Self {
        let (name, make): (_, Make) = match op {
            Op::MaskInPlace => (
                "mask",
                Box::new(|_: &Case| Ok(Box::new(MaskRun { in_place: true }) as _)),
            ),
            Op::Mask => (
                "mask",
                Box::new(|_: &Case| Ok(Box::new(MaskRun { in_place: false }) as _)),
            ),
            Op::Candidates => (
                "candidates",
                Box::new(|case: &Case| Ok(Box::new(CandidatesRun(candidate_buffers(case)?)) as _)),
            ),
            Op::Sample => (
                "sample",
                Box::new(|case: &Case| Ok(Box::new(SampleRun::new(case)?) as _)),
            ),
        };
        Self {
            op,
            name,
            variant: None,
            make,
        }
    }
}

/// What is measured side by side.
fn entries(args: &Args) -> Vec<Entry> {
    #[cfg(feature = "ablation")]
    if args.ablation {
        return ablation::entries();
    }
    let _ = args.ablation;
    [Op::MaskInPlace, Op::Mask, Op::Candidates, Op::Sample]
        .map(Entry::of)
        .into()
}

fn candidate_buffers(case: &Case) -> Result<CandidateBuffers> {
    let b = case.logits.dim(0)?;
    let mut buffers = CandidateBuffers::new(b, CAPACITY, &case.gpu.device)?;
    buffers.set_params(&vec![case.params.truncation(); b])?;
    Ok(buffers)
}

fn sample_buffers(case: &Case, requests: &[(i64, i64)]) -> Result<SampleBuffers> {
    let b = requests.len();
    let mut buffers = SampleBuffers::new(b, &case.gpu.device)?;
    buffers.set_params(&vec![case.params.truncation(); b])?;
    buffers.set_requests(requests)?;
    Ok(buffers)
}

struct MaskRun {
    in_place: bool,
}

impl Run for MaskRun {
    fn launch(&mut self, case: &Case) -> Result<()> {
        let truncation = case.params.truncation();
        if self.in_place {
            case.logits.inplace_op1(&Mask::new(truncation)?)
        } else {
            mask_into(case.logits, case.masked, truncation)
        }
    }

    fn compare(&mut self, case: &Case, row: &Row) -> Result<std::result::Result<(), String>> {
        let out = if self.in_place {
            case.logits
        } else {
            case.masked
        };
        let out = host_row(out, row.index)?;
        let mut kept = vec![];
        for (id, (&is, &was)) in out.iter().zip(row.logits).enumerate() {
            if is.to_bits() == was.to_bits() {
                kept.push(id as u32);
            } else if is != f32::NEG_INFINITY {
                return Ok(Err(format!("id {id} is {is}, it was {was}")));
            }
        }
        Ok(row.oracle.compare(&case.params, &kept))
    }
}

struct CandidatesRun(CandidateBuffers);

impl Run for CandidatesRun {
    fn launch(&mut self, case: &Case) -> Result<()> {
        self.0.candidates_into(case.logits, case.params.mass)
    }

    fn routes(&self, case: &Case) -> Result<Vec<Routes>> {
        let mut buffers = candidate_buffers(case)?.with_routes()?;
        buffers.candidates_into(case.logits, case.params.mass)?;
        buffers.routes()
    }

    fn compare(&mut self, case: &Case, row: &Row) -> Result<std::result::Result<(), String>> {
        let set = self.0.candidates()?;
        let count = set.counts.get(row.index)?.to_scalar::<u32>()?;
        let ids = set.ids.get(row.index)?.to_vec1::<u32>()?;
        if count as usize > CAPACITY {
            let expected = row.oracle.expected(&case.params);
            return Ok(
                match (expected.least..=expected.most).contains(&(count as usize)) {
                    true => Ok(()),
                    false => Err(format!("{count} counted, {} expected", expected.len)),
                },
            );
        }
        let kept = &ids[..count as usize];
        if !kept.is_sorted() {
            return Ok(Err(format!("ids are not ascending: {kept:?}")));
        }
        Ok(row.oracle.compare(&case.params, kept))
    }
}

struct SampleRun {
    buffers: SampleBuffers,
    /// Seed and step of each row's first draw.
    requests: Vec<(i64, i64)>,
}

impl SampleRun {
    fn new(case: &Case) -> Result<Self> {
        let b = case.logits.dim(0)? as i64;
        let seed = case.gpu.seed as i64;
        let requests: Vec<_> = (0..b).map(|i| (seed ^ i, i)).collect();
        let buffers = sample_buffers(case, &requests)?;
        Ok(Self { buffers, requests })
    }
}

impl Run for SampleRun {
    fn launch(&mut self, case: &Case) -> Result<()> {
        self.buffers.sample_into(case.logits, case.params.mass)
    }

    fn routes(&self, case: &Case) -> Result<Vec<Routes>> {
        let mut buffers = sample_buffers(case, &self.requests)?.with_routes()?;
        buffers.sample_into(case.logits, case.params.mass)?;
        buffers.routes()
    }

    fn compare(&mut self, case: &Case, row: &Row) -> Result<std::result::Result<(), String>> {
        let token = self.buffers.tokens()?[row.index];
        let most = row.oracle.expected(&case.params).most;
        if !row.oracle.order[..most].contains(&token) {
            return Ok(Err(format!(
                "token {token} is none of the {most} best, for {:?}",
                case.params
            )));
        }
        // Where in the set the draw falls is the CPU backend's to say: equal sets, equal tokens.
        let (seed, step) = self.requests[row.index];
        let logits = Tensor::new(row.logits, &Device::Cpu)?.to_dtype(case.logits.dtype())?;
        let draw = Draw::Counter { seed, step };
        let on_cpu = sample(&logits, case.params.truncation(), draw)?.to_scalar::<u32>()?;
        Ok(match token == on_cpu {
            true => Ok(()),
            false => Err(format!("token {token}, the CPU draws {on_cpu}")),
        })
    }
}

/// Everything at one batch of logits. Gives the number of mismatches.
fn measure(gpu: &Gpu, args: &Args, dist: Dist, dtype: Type, b: usize, v: usize) -> Result<usize> {
    let logits = Tensor::zeros((b, v), dtype.dtype(), &gpu.device)?;
    let masked = Tensor::zeros((b, v), dtype.dtype(), &gpu.device)?;
    gpu.generate(&logits, dist)?;
    // What the op runs on before it is timed, so that its code is where repeated use leaves it, and
    // its input is not. A batch beyond L2 needs no other.
    let bytes = b * v * dtype.dtype().size_in_bytes();
    let decoy = match bytes < EVICTED_BYTES / 2 {
        true => Some(logits.copy()?),
        false => None,
    };
    let floors = (
        gpu.floor(false, &logits, bytes)?,
        gpu.floor(true, &logits, bytes)?,
    );

    let mut mismatches = 0;
    let mut rng = rng(gpu.seed ^ (b * v) as u64);
    let checked = rand::seq::index::sample(&mut rng, b, args.check.min(b)).into_vec();
    let mut host = vec![];
    for &index in &checked {
        host.push(host_row(&logits, index)?);
    }
    let rows: Vec<Row> = checked
        .iter()
        .zip(&host)
        .map(|(&index, logits)| Row {
            index,
            logits,
            oracle: Oracle::new(logits),
        })
        .collect();

    let (ops, modes): (&[Op], &[&str]) = match dist {
        _ if args.ablation => (&ABLATION_OPS, &["k50", "p0.9", "k50p0.9"]),
        Dist::Peaked => (Op::value_variants(), &["k50", "p0.9", "k50p0.9"]),
        Dist::Normal => (
            &[Op::Mask, Op::MaskInPlace, Op::Sample],
            &["p0.9", "khalf", "all"],
        ),
    };
    // Without a limit they have nothing to do.
    let without_limits: &[Op] = match args.op.is_empty() {
        true => &[Op::Sample],
        false => &args.op[..],
    };
    let ops = or(&args.op, ops);
    let modes = or(
        &args.mode,
        &modes.iter().map(|m| m.to_string()).collect::<Vec<_>>(),
    );
    for text in &modes {
        let (mode, params) = mode(text, v)?;
        let case = Case {
            gpu,
            logits: &logits,
            masked: &masked,
            params,
        };
        let ops = match mode.as_str() {
            "all" => without_limits,
            _ => &ops[..],
        };
        for entry in entries(args).iter().filter(|entry| ops.contains(&entry.op)) {
            let in_place = entry.op == Op::MaskInPlace;
            let mut run = (entry.make)(&case)?;
            let graph = gpu.capture(|| run.launch(&case))?;
            let decoy_graph = match &decoy {
                Some(decoy) => {
                    let other = Case {
                        logits: decoy,
                        ..case
                    };
                    Some(gpu.capture(|| run.launch(&other))?)
                }
                None => None,
            };
            if entry.op == Op::Mask {
                gpu.poison(&masked)?;
            }
            graph.launch().w()?;
            let mut exact = !rows.is_empty();
            for row in &rows {
                if let Err(mismatch) = run.compare(&case, row)? {
                    eprintln!(
                        "MISMATCH: {:?} {}, b {b}, v {v}, {dtype:?}, {}, {mode}, row {}, seed {}: {mismatch}",
                        entry.op,
                        entry.variant.as_ref().map_or("as it is", |variant| variant.name),
                        dist.name(),
                        row.index,
                        gpu.seed
                    );
                    exact = false;
                    mismatches += 1;
                }
            }
            // Only an op in place leaves its input masked.
            let restore = || match in_place {
                true => {
                    gpu.generate(&logits, dist)?;
                    decoy.iter().try_for_each(|d| gpu.generate(d, dist))
                }
                false => Ok(()),
            };
            let times = gpu.time(&graph, decoy_graph.as_ref(), gpu.replays, restore)?;
            restore()?;
            let mut line = gpu.line(entry.name, &times);
            let more = json!({
                "b": b, "v": v, "mode": mode, "dist": dist.name(), "dtype": dtype.dtype().as_str(),
                "read_floor_us": us(floors.0), "copy_floor_us": us(floors.1),
                "l2": "rotated", "workspace": WORKSPACE, "exact": exact,
            });
            line.extend(more.as_object().cloned().unwrap_or_default());
            match entry.op {
                Op::Mask | Op::MaskInPlace => line.insert("in_place".into(), in_place.into()),
                Op::Candidates => line.insert("capacity".into(), CAPACITY.into()),
                Op::Sample => None,
            };
            let routes = run.routes(&case)?;
            let mean = |of: &dyn Fn(&Routes) -> f64| {
                routes.iter().map(of).sum::<f64>() / routes.len().max(1) as f64
            };
            if !routes.is_empty() {
                let hits = mean(&|routes| routes.hit() as u32 as f64);
                line.insert("hit_rate".into(), hits.into());
            }
            if let Some(Variant { name, techniques }) = &entry.variant {
                line.insert("variant".into(), (*name).into());
                line.extend(techniques.as_object().cloned().unwrap_or_default());
                if !routes.is_empty() {
                    line.insert("gathered".into(), mean(&|r| r.gathered() as f64).into());
                    line.insert("steps".into(), mean(&|r| r.steps() as f64).into());
                    line.insert("row_reads".into(), mean(&|r| r.passes() as f64).into());
                }
            }
            println!("{}", serde_json::Value::Object(line));
        }
    }
    Ok(mismatches)
}

fn main() -> Result<()> {
    let args = Args::parse();
    if args.ablation && !cfg!(feature = "ablation") {
        bail!("--ablation is given, and the bench was built without the feature `ablation`")
    }
    if args.ablation && !args.op.iter().all(|op| ABLATION_OPS.contains(op)) {
        bail!(
            "--op is {:?}, with --ablation mask-in-place and sample are accepted",
            args.op
        )
    }
    if args.ablation && args.dtype.contains(&Type::Bf16) {
        bail!("--dtype has bf16, with --ablation f32 is accepted")
    }
    let mut shapes = vec![];
    let none_given = [
        args.v.is_empty(),
        args.b.is_empty(),
        args.op.is_empty(),
        args.mode.is_empty(),
        args.dtype.is_empty(),
    ];
    let laws: &[Dist] = match none_given.iter().all(|&none| none) {
        true if !args.ablation => Dist::value_variants(),
        _ => &[Dist::Peaked],
    };
    for dist in or(&args.dist, laws) {
        let (widths, batches, types): (&[usize], &[usize], &[Type]) = match dist {
            _ if args.ablation => (&WIDTHS[..1], &[1024], &[Type::F32]),
            Dist::Peaked => (&WIDTHS, &BATCHES, Type::value_variants()),
            Dist::Normal => (&WIDTHS[..1], &[1, 32, 128, 1024], &[Type::F32]),
        };
        for v in or(&args.v, widths) {
            if v == 0 || v % 8 != 0 || v > i32::MAX as usize {
                bail!("--v is {v}, accepted are multiples of 8 (16 bytes of bf16) up to 2^31")
            }
            for text in &args.mode {
                mode(text, v)?;
            }
            for dtype in or(&args.dtype, types) {
                for b in or(&args.b, batches) {
                    if b == 0 {
                        bail!("--b is 0, accepted are numbers from 1 up")
                    }
                    shapes.push((dist, dtype, b, v));
                }
            }
        }
    }
    let bytes =
        |&(_, dtype, b, v): &(Dist, Type, usize, usize)| b * v * dtype.dtype().size_in_bytes();
    let most = shapes.iter().map(bytes).max().unwrap_or(0);
    let replays = if args.quick { 20 } else { 50 };
    let seed = args.seed.unwrap_or_else(|| rand::rng().random());
    let gpu = Gpu::new(most, replays, seed)?;
    for dtype in [DType::F32, DType::BF16] {
        candle_topk::cuda::preload(&gpu.device, dtype)?;
    }
    #[cfg(feature = "ablation")]
    let _scratch = ablation::prepare(&gpu, &args, &shapes)?;
    for name in ["normal_f32", "fill"] {
        gpu.kernel(name)?;
    }
    println!("{}", gpu.empty_graph()?);
    let start = std::time::Instant::now();
    let mut mismatches = 0;
    for &(dist, dtype, b, v) in &shapes {
        mismatches += measure(&gpu, &args, dist, dtype, b, v)
            .map_err(|e| e.context(format!("b {b}, v {v}, {}", dist.name())))?;
    }
    eprintln!(
        "{} shapes in {:.1} s, seed {seed}",
        shapes.len(),
        start.elapsed().as_secs_f64()
    );
    if mismatches > 0 {
        bail!("{mismatches} mismatches with the stable sort, named above")
    }
    Ok(())
}
