//! Device times of the attention ops as JSON lines: indexer scores, and scores and selection together.
//!
//! ```bash
//! cargo bench --features cuda --bench attention                       # all grids
//! cargo bench --features cuda --bench attention -- --grid decode --dtype fp8 --quick
//! ```
//!
//! | `--grid` | op | what it measures |
//! |---|---|---|
//! | `scores` | `indexer_scores` | causal prefill: the last 8192 of 8K and 64K tokens, 64 and 32 heads x 128 |
//! | `decode` | `index_topk` | 1, 8 and 64 sequences of 64K tokens, one and two new ones each, batched and paged |
//! | `prefill` | `index_topk` | the last 8192 of 64K tokens under a budget of 1 GB, beside the sum of its parts |
//! | `chain` | `index_topk`, `name` "gqa chain" | a step of decoding of a GQA model, 8 sequences of 128K tokens: scores of an indexer with one bf16 key a token, selection and attention of 32 heads on 8 in one graph |
//! | `terminal` | `index_topk` | the last full call of the paper's requests of 245K and 430K tokens (section 6.3), in one graph |
//!
//! How it is measured is how `selection` does it: ops are captured in CUDA graphs whose replays are timed
//! by events, and before each a buffer of 256 MB is read and, where keys would stay in L2, the op runs on
//! other keys. `prefill` allocates between its chunks and is launched, not replayed. Beside `index_topk`
//! stand its parts, each in a graph of its own: `scores_us` and `selection_us`. *Read floor*: one pass
//! over the bytes of all keys, and of their scales, by 16-byte loads.
//!
//! Before an op is timed its scores are overwritten with NaN, its graph is replayed, and rows are checked:
//! stretches of scores by their distance to sums in f64 over the numbers as stored, and positions
//! against a stable sort of the row's scores as computed. A mismatch is named on stderr and makes the run
//! fail at its end.

#[path = "../tests/common/check.rs"]
mod check;
#[path = "../tests/common/mod.rs"]
mod common;
mod device;
#[path = "../tests/common/traces.rs"]
mod traces;

use candle_core::cuda_backend::cudarc::driver::sys::CUevent_flags;
use candle_core::cuda_backend::cudarc::driver::{CudaGraph, PushKernelArg};
use candle_core::cuda_backend::WrapErr;
use candle_core::{bail, DType, Device, Result, Tensor};
use candle_topk::attention::{
    index_topk, index_topk_into, indexer_scores_into, IndexBuffers, IndexKeys, KeyValues,
    SparseAttention, Visible, Workspace,
};
use candle_topk::selection::{self, Bounds, Order, Selection, SelectionBuffers, TopK};
use check::{compare, Given};
use clap::{Parser, ValueEnum};
use common::attention::{close, distance, numbers};
use device::{host_row, median, or, us, write, Gpu, EVICTED_BYTES};
use rand::Rng;
use serde_json::{json, Value};
use traces::TRACES;

const HEADS: usize = 64;
const DIM: usize = 128;
/// Positions that are selected.
const K: usize = 2048;
/// Keys of a page.
const PAGE: usize = 64;
/// Scores that are checked in a stretch.
const CHECKED: usize = 512;
/// How far they may be from sums in f64.
const DISTANCE: f64 = 5e-6;

/// Times the attention ops on the first CUDA device.
#[derive(Parser)]
struct Args {
    /// What to measure [default: all]
    #[arg(long, value_enum, value_delimiter = ',')]
    grid: Vec<Grid>,
    /// Types of queries and keys [default: fp8,bf16]
    #[arg(long, value_enum, value_delimiter = ',')]
    dtype: Vec<Type>,
    /// Tokens of a sequence, of the grids other than `terminal`; `chain` takes twice as many
    #[arg(long, default_value_t = 64 << 10)]
    t: usize,
    /// Bytes that scores of `prefill` take at a time [default: 1073741824]
    #[arg(long, value_delimiter = ',')]
    budget: Vec<usize>,
    /// How many rows of each shape are checked
    #[arg(long, default_value_t = 3)]
    check: usize,
    /// 20 replays instead of 50
    #[arg(long)]
    quick: bool,
    /// The seed of the checked rows [default: a new one]
    #[arg(long)]
    seed: Option<u64>,
    /// As cargo calls a bench.
    #[arg(long, hide = true)]
    bench: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
enum Grid {
    Scores,
    Decode,
    Prefill,
    Chain,
    Terminal,
}

impl Grid {
    const ALL: [Self; 5] = [
        Self::Scores,
        Self::Decode,
        Self::Prefill,
        Self::Chain,
        Self::Terminal,
    ];

    /// Prints its lines; gives the number of mismatches.
    fn run(self, bench: &Bench) -> Result<usize> {
        match self {
            Self::Scores => bench.each(&[DType::BF16, DType::F8E4M3], |dtype| {
                let mut mismatches = 0;
                let t = bench.args.t;
                for (length, heads) in [(t.min(8 << 10), HEADS), (t, HEADS), (t, 32)] {
                    mismatches += bench.scores(dtype, length, heads)?;
                }
                Ok(mismatches)
            }),
            Self::Decode => bench.each(&[DType::F8E4M3, DType::BF16], |dtype| {
                let mut mismatches = 0;
                for paged in [false, true] {
                    for new in [1, 2] {
                        for sequences in [1, 8, 64] {
                            mismatches += bench.decode(dtype, sequences, new, paged)?;
                        }
                    }
                }
                Ok(mismatches)
            }),
            Self::Prefill => {
                bench.each(&[DType::F8E4M3, DType::BF16], |dtype| bench.prefill(dtype))
            }
            Self::Chain => bench.chain(),
            Self::Terminal => {
                bench.each(&[DType::F8E4M3, DType::BF16], |dtype| bench.terminal(dtype))
            }
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
enum Type {
    F32,
    Bf16,
    Fp8,
}

impl Type {
    fn dtype(self) -> DType {
        match self {
            Self::F32 => DType::F32,
            Self::Bf16 => DType::BF16,
            Self::Fp8 => DType::F8E4M3,
        }
    }
}

fn dtype_name(dtype: DType) -> &'static str {
    match dtype {
        DType::F8E4M3 => "fp8",
        other => other.as_str(),
    }
}

/// Queries and keys of an indexer, all normal(0, 1).
struct Operands {
    q: Tensor,
    weights: Tensor,
    /// `[B, T, D]`, and of the shape `[B, T]` the scales.
    keys: Tensor,
    scales: Option<Tensor>,
    /// Each sequence's pages, where there are any.
    table: Option<Tensor>,
    visible: Visible,
    /// The keys that each row sees.
    ends: Vec<u32>,
}

impl Operands {
    fn new(
        gpu: &Gpu,
        dtype: DType,
        heads: usize,
        (sequences, length): (usize, usize),
        ends: Vec<u32>,
        paged: bool,
    ) -> Result<Self> {
        let (device, rows) = (&gpu.device, ends.len());
        let scales = match dtype {
            DType::F8E4M3 => Some(Tensor::rand(0.5f32, 1.5, (sequences, length), device)?),
            _ => None,
        };
        let table = match paged {
            false => None,
            true => {
                // Every page once, none beside the one before it.
                let blocks = length / PAGE;
                let pages = (sequences * blocks) as u32;
                let step = (pages / 3..)
                    .find(|&step| gcd(step.max(1), pages) == 1)
                    .unwrap_or(1);
                let at = (0..pages).map(|i| (i as u64 * step.max(1) as u64 % pages as u64) as u32);
                Some(Tensor::from_vec(at.collect(), (sequences, blocks), device)?)
            }
        };
        let bounds = Tensor::new(ends.as_slice(), device)?;
        Ok(Self {
            q: normal(gpu, &[rows, heads, DIM], dtype)?,
            weights: Tensor::randn(0f32, 1., (rows, heads), device)?,
            keys: normal(gpu, &[sequences, length, DIM], dtype)?,
            scales,
            table,
            visible: Visible::between(None, Some(&bounds)),
            ends,
        })
    }

    fn keys(&self) -> Result<IndexKeys> {
        let (sequences, length, _) = self.keys.dims3()?;
        let shape = match &self.table {
            Some(_) => (sequences * length / PAGE, PAGE),
            None => (sequences, length),
        };
        let keys = self.keys.reshape((shape.0, shape.1, DIM))?;
        let keys = match &self.table {
            Some(table) => IndexKeys::paged(&keys, table),
            None if sequences == 1 => IndexKeys::packed(&keys.squeeze(0)?),
            None => IndexKeys::batched(&keys),
        };
        let packed = self.table.is_none() && sequences == 1;
        Ok(match &self.scales {
            None => keys,
            Some(scales) if packed => keys.with_scales(&scales.squeeze(0)?),
            Some(scales) => keys.with_scales(&scales.reshape(shape)?),
        })
    }

    /// The bytes that a pass over all keys reads.
    fn bytes(&self) -> usize {
        let of = |t: &Tensor| t.elem_count() * t.dtype().size_in_bytes();
        of(&self.keys) + self.scales.as_ref().map_or(0, of)
    }

    /// Operations of the products that rows see.
    fn flops(&self) -> f64 {
        let pairs: f64 = self.ends.iter().map(|&end| end as f64).sum();
        2.0 * pairs * (self.q.dims()[1] * DIM) as f64
    }

    /// How far scores of a row, `count` from `first` on, are from sums in f64.
    fn distance(&self, row: usize, first: usize, scores: &[f32]) -> Result<f64> {
        let (sequences, length, _) = self.keys.dims3()?;
        let sequence = row / (self.ends.len() / sequences);
        let places: Vec<usize> = match &self.table {
            None => (0..scores.len())
                .map(|i| sequence * length + first + i)
                .collect(),
            Some(table) => {
                let pages = table.get(sequence)?.to_vec1::<u32>()?;
                let place = |t: usize| pages[t / PAGE] as usize * PAGE + t % PAGE;
                (0..scores.len()).map(|i| place(first + i)).collect()
            }
        };
        let flat = self.keys.reshape((sequences * length, DIM))?;
        let q = numbers(&self.q.narrow(0, row, 1)?.force_contiguous()?)?;
        let weights = numbers(&self.weights.narrow(0, row, 1)?.force_contiguous()?)?;
        let scales = match &self.scales {
            Some(scales) => Some(scales.flatten_all()?),
            None => None,
        };
        let mut wanted = vec![];
        // What lies together is copied together.
        for run in places.chunk_by(|a, b| a + 1 == *b) {
            let part = |t: &Tensor| numbers(&t.narrow(0, run[0], run.len())?.force_contiguous()?);
            let keys = part(&flat)?;
            let scales = scales.as_ref().map(part).transpose()?;
            for (i, key) in keys.chunks(DIM).enumerate() {
                let mut sum = 0.0;
                for (q, w) in q.chunks(DIM).zip(&weights) {
                    let dot: f64 = q.iter().zip(key).map(|(q, k)| q * k).sum();
                    sum += w * dot.max(0.0);
                }
                wanted.push(sum * scales.as_ref().map_or(1.0, |scales| scales[i]));
            }
        }
        let scores: Vec<f64> = scores.iter().map(|&x| x as f64).collect();
        distance(&scores, &wanted)
    }
}

/// normal(0, 1), other numbers at every call.
fn normal(gpu: &Gpu, dims: &[usize], dtype: DType) -> Result<Tensor> {
    let tensor = Tensor::zeros(dims, dtype, &gpu.device)?;
    let kernel = gpu.kernel(&format!("normal_{}", dtype_name(dtype)))?;
    let (pairs, seed) = (tensor.elem_count() as u64 / 2, rand::rng().random::<u64>());
    write(&tensor, |address| {
        let mut launch = gpu.stream.launch_builder(&kernel);
        launch.arg(&address).arg(&pairs).arg(&seed);
        launch.arg(&0f32).arg(&1f32);
        // SAFETY: the tensor has so many pairs.
        unsafe { launch.launch(gpu.config(8, 256)) }.w()?;
        Ok(())
    })?;
    Ok(tensor)
}

fn gcd(a: u32, b: u32) -> u32 {
    if b == 0 {
        a
    } else {
        gcd(b, a % b)
    }
}

struct Bench {
    gpu: Gpu,
    args: Args,
}

impl Bench {
    /// For each dtype of the grid, or that are given.
    fn each(&self, dtypes: &[DType], run: impl Fn(DType) -> Result<usize>) -> Result<usize> {
        let given: Vec<DType> = self.args.dtype.iter().map(|dtype| dtype.dtype()).collect();
        let mut mismatches = 0;
        for dtype in or(&given, dtypes) {
            mismatches += run(dtype)?;
        }
        Ok(mismatches)
    }

    /// Rows to look at: the first, the last, and others.
    fn picked(&self, rows: usize) -> Vec<usize> {
        let mut rng = common::rng(self.gpu.seed ^ rows as u64);
        let mut picked = vec![0, rows - 1];
        picked.extend((2..self.args.check).map(|_| rng.random_range(0..rows)));
        picked.truncate(self.args.check);
        picked.sort_unstable();
        picked.dedup();
        picked
    }

    /// Checks scores of some rows; gives the number of mismatches.
    fn check_scores(&self, what: &str, operands: &Operands, scores: &Tensor) -> Result<usize> {
        let mut mismatches = 0;
        for row in self.picked(operands.ends.len()) {
            let end = operands.ends[row] as usize;
            let all = host_row(scores, row)?;
            let count = CHECKED.min(end);
            for first in [0, (end - count) / 2 / 3 * 2, end - count] {
                let distance = operands.distance(row, first, &all[first..first + count])?;
                if distance.is_nan() || distance >= DISTANCE {
                    eprintln!(
                        "MISMATCH: {what}, row {row}, scores from {first}: distance {distance:e}"
                    );
                    mismatches += 1;
                }
            }
        }
        Ok(mismatches)
    }

    /// Checks positions of some rows against their scores.
    fn check_positions(
        &self,
        what: &str,
        operands: &Operands,
        scores: &Tensor,
        chosen: &Selection,
    ) -> Result<usize> {
        let counts = chosen.counts.to_vec1::<u32>()?;
        let mut mismatches = 0;
        for row in self.picked(operands.ends.len()) {
            let mut all = host_row(scores, row)?;
            all.truncate(operands.ends[row] as usize);
            let positions = chosen.positions.get(row)?.force_contiguous()?;
            let given = Given {
                positions: positions.to_vec1()?,
                count: counts[row],
                values: None,
            };
            if let Err(mismatch) = compare(&all, K, Order::Unordered, &given) {
                eprintln!("MISMATCH: {what}, row {row}: {mismatch}");
                mismatches += 1;
            }
        }
        Ok(mismatches)
    }

    /// The least time to read as many bytes.
    fn read_floor(&self, bytes: usize) -> Result<f64> {
        let other = Tensor::randn(0f32, 1., bytes.div_ceil(16) * 4, &self.gpu.device)?;
        self.gpu.floor(false, &other, bytes)
    }

    fn replays(&self, graph: &CudaGraph, decoy: Option<&CudaGraph>) -> Result<Vec<f64>> {
        self.gpu.time(graph, decoy, self.gpu.replays, || Ok(()))
    }

    fn print(&self, op: &str, times: &[f64], more: Value) {
        let mut line = self.gpu.line(op, times);
        if let Value::Object(more) = more {
            line.extend(more.into_iter().filter(|(_, value)| !value.is_null()));
        }
        println!("{}", Value::Object(line));
    }

    /// Scores of the last 8192 tokens.
    fn scores(&self, dtype: DType, length: usize, heads: usize) -> Result<usize> {
        let rows = length.min(8192);
        let gpu = &self.gpu;
        let ends: Vec<u32> = (length - rows..length).map(|row| row as u32 + 1).collect();
        let operands = Operands::new(gpu, dtype, heads, (1, length), ends, false)?;
        let keys = operands.keys()?;
        let scores = Tensor::zeros((rows, length), DType::F32, &gpu.device)?;
        let run = || {
            let Operands {
                q,
                weights,
                visible,
                ..
            } = &operands;
            indexer_scores_into(q, &keys, weights, visible, &scores)
        };
        run()?;
        let graph = gpu.capture(run)?;
        gpu.poison(&scores)?;
        graph.launch().w()?;
        let what = format!("indexer_scores, {dtype:?}, {heads} heads, T {length}");
        let mismatches = self.check_scores(&what, &operands, &scores)?;
        let times = self.replays(&graph, None)?;
        let tflops = operands.flops() / median(&times) / 1e6;
        self.print(
            "indexer_scores",
            &times,
            json!({
                "phase": "prefill", "s": rows, "t": length, "h": heads, "d": DIM,
                "dtype": dtype_name(dtype), "lens": "causal", "tflops": tflops.round(),
                "read_floor_us": us(self.read_floor(operands.bytes())?), "l2": "rotated",
                "exact": mismatches == 0,
            }),
        );
        Ok(mismatches)
    }

    /// Scores and selection in one graph, and each alone.
    fn together(
        &self,
        operands: &Operands,
        decoy: Option<&Operands>,
        what: &str,
        more: Value,
    ) -> Result<usize> {
        let gpu = &self.gpu;
        let (rows, length) = (operands.ends.len(), operands.keys.dims()[1]);
        let top = TopK::new(K)?;
        let mut out = IndexBuffers::new(rows, length, K, &gpu.device)?;
        let mut space = Workspace::new(&gpu.device)?;
        let mut whole = |of: &Operands, out: &mut IndexBuffers| {
            let keys = of.keys()?;
            let Operands {
                q,
                weights,
                visible,
                ..
            } = of;
            index_topk_into(q, &keys, weights, visible, &top, out, &mut space)
        };
        whole(operands, &mut out)?;
        let graph = gpu.capture(|| whole(operands, &mut out))?;
        let other = match decoy {
            Some(decoy) => Some(gpu.capture(|| whole(decoy, &mut out))?),
            None => None,
        };
        gpu.poison(out.scores())?;
        graph.launch().w()?;
        let mut mismatches = self.check_scores(what, operands, out.scores())?;
        let chosen = out.chosen().selection()?;
        mismatches += self.check_positions(what, operands, out.scores(), &chosen)?;
        drop(chosen);
        let times = self.replays(&graph, other.as_ref())?;

        let scores = out.scores().clone();
        let score = |of: &Operands| {
            let keys = of.keys()?;
            indexer_scores_into(&of.q, &keys, &of.weights, &of.visible, &scores)
        };
        let alone = gpu.capture(|| score(operands))?;
        let other = match decoy {
            Some(decoy) => Some(gpu.capture(|| score(decoy))?),
            None => None,
        };
        let scores_times = self.replays(&alone, other.as_ref())?;
        let mut positions = SelectionBuffers::new(rows, K, &gpu.device)?;
        let mut space = selection::Workspace::new(&gpu.device)?;
        let ends = Tensor::new(operands.ends.as_slice(), &gpu.device)?;
        let mut select =
            || top.select_into(&scores, &Bounds::ends(&ends), &mut positions, &mut space);
        select()?;
        let alone = gpu.capture(select)?;
        let selection_times = self.replays(&alone, None)?;

        let bytes = operands.bytes();
        let mut line = json!({
            "t": length, "h": operands.q.dims()[1], "d": DIM, "k": K, "s": rows,
            "dtype": dtype_name(operands.q.dtype()),
            "scores_us": us(median(&scores_times)), "selection_us": us(median(&selection_times)),
            "tflops": (operands.flops() / median(&scores_times) / 1e6).round(),
            "gbps": (bytes as f64 / median(&scores_times) / 1e3).round(),
            "read_floor_us": us(self.read_floor(bytes)?), "l2": "rotated",
            "exact": mismatches == 0,
        });
        if let (Value::Object(line), Value::Object(more)) = (&mut line, more) {
            line.extend(more);
        }
        self.print("index_topk", &times, line);
        Ok(mismatches)
    }

    /// A step of decoding.
    fn decode(&self, dtype: DType, sequences: usize, new: usize, paged: bool) -> Result<usize> {
        let length = self.args.t;
        let ends: Vec<u32> = (0..sequences * new)
            .map(|row| (length - new + 1 + row % new) as u32)
            .collect();
        let make = || {
            let shape = (sequences, length);
            Operands::new(&self.gpu, dtype, HEADS, shape, ends.clone(), paged)
        };
        let operands = make()?;
        let decoy = match operands.bytes() < EVICTED_BYTES / 2 {
            true => Some(make()?),
            false => None,
        };
        let cache = if paged { "paged" } else { "batched" };
        let what = format!("index_topk, {dtype:?}, B {sequences}, n {new}, {cache}");
        let more = json!({
            "phase": "decode", "b": sequences, "n": new, "cache": cache,
            "page": paged.then_some(PAGE), "lens": "full",
        });
        self.together(&operands, decoy.as_ref(), &what, more)
    }

    /// In chunks under budgets.
    fn prefill(&self, dtype: DType) -> Result<usize> {
        let length = self.args.t;
        let rows = length.min(8192);
        let gpu = &self.gpu;
        let ends: Vec<u32> = (length - rows..length).map(|row| row as u32 + 1).collect();
        let operands = Operands::new(gpu, dtype, HEADS, (1, length), ends, false)?;
        let keys = operands.keys()?;
        let Operands {
            q,
            weights,
            visible,
            ..
        } = &operands;
        let top = TopK::new(K)?;
        // All scores at once, to look at and to time the parts with.
        let scores = Tensor::zeros((rows, length), DType::F32, &gpu.device)?;
        gpu.poison(&scores)?;
        let score = || indexer_scores_into(q, &keys, weights, visible, &scores);
        score()?;
        let what = format!("index_topk, {dtype:?}, under a budget");
        let of_scores = self.check_scores(&what, &operands, &scores)?;
        let scores_times = self.replays(&gpu.capture(score)?, None)?;
        let mut positions = SelectionBuffers::new(rows, K, &gpu.device)?;
        let mut space = selection::Workspace::new(&gpu.device)?;
        let ends = Tensor::new(operands.ends.as_slice(), &gpu.device)?;
        let mut select =
            || top.select_into(&scores, &Bounds::ends(&ends), &mut positions, &mut space);
        select()?;
        let selection_times = self.replays(&gpu.capture(select)?, None)?;
        let parts = median(&scores_times) + median(&selection_times);
        let mut all = 0;
        for budget in or(&self.args.budget, &[1 << 30]) {
            let whole = || index_topk(q, &keys, weights, visible, &top, budget);
            let chosen = whole()?;
            let mismatches =
                of_scores + self.check_positions(&what, &operands, &scores, &chosen)?;
            all += mismatches;
            drop(chosen);
            let mut times = vec![];
            for i in 0..gpu.replays.min(20) + 2 {
                let event = || {
                    let context = gpu.stream.context();
                    context.new_event(Some(CUevent_flags::CU_EVENT_DEFAULT)).w()
                };
                let (start, end) = (event()?, event()?);
                start.record(&gpu.stream).w()?;
                let chosen = whole()?;
                end.record(&gpu.stream).w()?;
                let took = start.elapsed_ms(&end).w()? as f64 * 1e3;
                drop(chosen);
                if i >= 2 {
                    times.push(took);
                }
            }
            times.sort_by(f64::total_cmp);
            self.print(
                "index_topk",
                &times,
                json!({
                    "phase": "prefill", "s": rows, "t": length, "h": HEADS, "d": DIM, "k": K,
                    "dtype": dtype_name(dtype), "lens": "causal", "budget": budget,
                    "scores_us": us(median(&scores_times)),
                    "selection_us": us(median(&selection_times)),
                    "over_parts": us(median(&times) / parts),
                    "tflops": (operands.flops() / median(&scores_times) / 1e6).round(),
                    "l2": "warm", "exact": mismatches == 0,
                }),
            );
        }
        Ok(all)
    }

    /// A step of decoding of a GQA model.
    fn chain(&self) -> Result<usize> {
        let gpu = &self.gpu;
        let (sequences, length) = (8, 2 * self.args.t);
        let (heads, kv_heads) = (32, 8);
        let ends = vec![length as u32; sequences];
        let shape = (sequences, length);
        let operands = Operands::new(gpu, DType::BF16, HEADS, shape, ends, false)?;
        let keys = operands.keys()?;
        let q = normal(gpu, &[sequences, heads, DIM], DType::BF16)?;
        let dims = [sequences, length, kv_heads, DIM];
        let k = normal(gpu, &dims, DType::BF16)?;
        let v = normal(gpu, &dims, DType::BF16)?;
        let kv = KeyValues::batched(&k, &v);
        let attention = SparseAttention::new((DIM as f32).powf(-0.5));
        let out = Tensor::zeros((sequences, heads, DIM), DType::BF16, &gpu.device)?;
        let lse = Tensor::zeros((sequences, heads), DType::F32, &gpu.device)?;
        let mut chosen = IndexBuffers::new(sequences, length, K, &gpu.device)?;
        let mut space = Workspace::new(&gpu.device)?;
        let top = TopK::new(K)?;
        let mut step = |chosen: &mut IndexBuffers| {
            let Operands {
                q: index_q,
                weights,
                visible,
                ..
            } = &operands;
            index_topk_into(index_q, &keys, weights, visible, &top, chosen, &mut space)?;
            attention.forward_into(&q, &kv, chosen.chosen(), [&out, &lse], &mut space)
        };
        step(&mut chosen)?;
        let graph = gpu.capture(|| step(&mut chosen))?;
        gpu.poison(chosen.scores())?;
        gpu.poison(&out)?;
        graph.launch().w()?;
        let what = "a step of decoding";
        let mut mismatches = self.check_scores(what, &operands, chosen.scores())?;
        let selection = chosen.chosen().selection()?;
        mismatches += self.check_positions(what, &operands, chosen.scores(), &selection)?;
        for row in self.picked(sequences) {
            // The row's own keys and values, on the CPU.
            let positions = selection.positions.get(row)?;
            let on_cpu = |of: &Tensor| {
                let gathered = of.get(row)?.index_select(&positions, 0)?;
                gathered.to_device(&Device::Cpu)?.to_dtype(DType::F32)
            };
            let own = |of: &Tensor| {
                let row = of.narrow(0, row, 1)?.to_device(&Device::Cpu)?;
                row.to_dtype(DType::F32)
            };
            let all = Tensor::arange(0u32, K as u32, &Device::Cpu)?.unsqueeze(0)?;
            let kv = KeyValues::packed(&on_cpu(&k)?, &on_cpu(&v)?);
            let wanted = attention.forward(&own(&q)?, &kv, &all)?.out;
            let (got, wanted) = (numbers(&own(&out)?)?, numbers(&wanted)?);
            if let Err(error) = close(&got, &wanted, 8e-4, 3. / 128., what) {
                eprintln!("MISMATCH: {what}, row {row}: {error}");
                mismatches += 1;
            }
        }
        drop(selection);
        let times = self.replays(&graph, None)?;
        // All keys and values, once.
        let bytes = k.elem_count() * DType::BF16.size_in_bytes();
        let dense = 2.0 * gpu.floor(false, &k, bytes)?;
        self.print(
            "index_topk",
            &times,
            json!({
                "name": "gqa chain", "phase": "decode", "s": sequences, "t": length, "h": heads,
                "kv_h": kv_heads, "d": DIM, "dv": DIM, "k": K, "block": 1, "shared": 1,
                "index_h": HEADS, "index_d": DIM, "dtype": "bf16", "l2": "rotated",
                "dense_read_us": us(dense), "over_dense_read": us(dense / median(&times)),
                "read_floor_us": us(self.read_floor(operands.bytes())?), "exact": mismatches == 0,
            }),
        );
        Ok(mismatches)
    }

    /// The widest calls of the paper's requests.
    fn terminal(&self, dtype: DType) -> Result<usize> {
        let mut mismatches = 0;
        for trace in &TRACES {
            let call = trace.terminal();
            let ends: Vec<u32> = (0..call.rows)
                .map(|row| (call.first + row) as u32)
                .collect();
            let shape = (1, call.width);
            let operands = Operands::new(&self.gpu, dtype, HEADS, shape, ends, false)?;
            let what = format!("index_topk, {dtype:?}, {} terminal", trace.name);
            let more = json!({"phase": "prefill", "lens": "causal", "trace": trace.name, "first": call.first});
            mismatches += self.together(&operands, None, &what, more)?;
        }
        Ok(mismatches)
    }
}

fn main() -> Result<()> {
    let args = Args::parse();
    let replays = if args.quick { 20 } else { 50 };
    let seed = args.seed.unwrap_or_else(|| rand::rng().random());
    let gpu = Gpu::new(0, replays, seed)?;
    println!("{}", gpu.empty_graph()?);
    let start = std::time::Instant::now();
    let bench = Bench { gpu, args };
    let mut mismatches = 0;
    for grid in or(&bench.args.grid, &Grid::ALL) {
        let failed = |e: candle_core::Error| e.context(format!("{grid:?}"));
        mismatches += grid.run(&bench).map_err(failed)?;
    }
    eprintln!("{:.1} s, seed {seed}", start.elapsed().as_secs_f64());
    if mismatches > 0 {
        bail!("{mismatches} rows differ from the host's, named above")
    }
    Ok(())
}
