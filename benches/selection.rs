//! Device times of `selection::TopK`, beside the least time in which its scores can be read, as JSON
//! lines of op "topk":
//!
//! ```bash
//! cargo bench --features cuda --bench selection                                     # what the bars are about
//! cargo bench --features cuda --bench selection -- --grid traces,ablations
//! cargo bench --features cuda --bench selection -- --grid real --real scores.safetensors
//! cargo bench --features cuda --bench selection -- --m 1,512 --n 128K --dist ties --order by-value --quick
//! ```
//!
//! | `--grid` | what it measures |
//! |---|---|
//! | `paper` | the HPC-Ops paper's 20 configurations: M 512 to 8192, N 128K to 1M |
//! | `decode` | few rows: M 1 to 256, N 8K to 1M |
//! | `kinds` | other laws, K, dtypes and orders at five shapes |
//! | `traces` | every call of the paper's requests of 245K and 430K tokens (section 6.3) |
//! | `ablations` | margin, stride, band, view and exact proposal at a full call of either request's last step (figures 9 to 11) |
//! | `crossover` | sampled against exact proposals from N = 16K to 64K (figure 12b) |
//! | `real` | scores of a text, from a file that `examples/indexer_scores` wrote |
//! | `quick` | five shapes, to look at |
//!
//! With `--m`, `--n` and the like a grid is cut down to what they name; without `--grid` they make one of
//! their own.
//!
//! How it is measured is how `kernels` does it: the op is captured in a CUDA graph, whose replays are
//! timed by events; before each a buffer of 256 MB is read and, below 128 MB of scores, the op runs on
//! a copy of them, so that L2 holds its code and not its input. *Read floor*: one pass by 16-byte loads
//! over as many bytes as the rows have valid, of several launch shapes the fastest.
//!
//! Row r of causal rows has N - M + 1 + r scores, and what follows them is NaN or greater than all of
//! them. Before an op is timed its outputs are overwritten with those of empty rows, its graph is
//! replayed, and rows are compared with a selection on the host: all of them up to 4M scores, else
//! `--check` of them, the first and the last among them. A mismatch is named on stderr and makes the
//! run fail at its end.

#[path = "../tests/common/check.rs"]
mod check;
#[path = "../tests/common/mod.rs"]
mod common;
mod device;
#[path = "../examples/indexer_scores/scores.rs"]
mod scores;
#[path = "../tests/common/traces.rs"]
mod traces;

use candle_core::cuda_backend::cudarc::driver::{LaunchConfig, PushKernelArg};
use candle_core::cuda_backend::WrapErr;
use candle_core::{bail, DType, Result, Tensor};
use candle_topk::selection::{
    Bounds, DeviceProps, Mapping, Order, Overrides, Route, SelectionBuffers, TopK, View, Workspace,
};
use check::{compare, Given};
use clap::{Parser, ValueEnum};
use common::rng;
use device::{host_row, median, or, read, us, write, Gpu, EVICTED_BYTES};
use rand::Rng;
use scores::Scores;
use serde_json::{json, Map, Value};
use std::path::PathBuf;
use traces::{Trace, TRACES};

/// K of the paper, and of the peers.
const K: usize = 2048;
/// Up to so many scores all rows are checked.
const ALL_CHECKED: usize = 4 << 20;
/// Rows of real scores that are made at a time.
const REAL_ROWS: usize = 256;

/// Times top-K selection on the first CUDA device.
#[derive(Parser)]
struct Args {
    /// What to measure [default: paper,decode,kinds; without --grid and with a shape, that]
    #[arg(long, value_enum, value_delimiter = ',')]
    grid: Vec<Grid>,
    /// Rows
    #[arg(long, value_delimiter = ',', value_parser = size)]
    m: Vec<usize>,
    /// Widths: 131072 or 128K
    #[arg(long, value_delimiter = ',', value_parser = size)]
    n: Vec<usize>,
    /// K
    #[arg(long, value_delimiter = ',', value_parser = size)]
    k: Vec<usize>,
    /// Types of scores
    #[arg(long, value_enum, value_delimiter = ',')]
    dtype: Vec<Type>,
    /// Laws of scores
    #[arg(long, value_enum, value_delimiter = ',')]
    dist: Vec<Dist>,
    /// Lengths of rows, of a grid of its own
    #[arg(long, value_enum, default_value_t = Lens::Causal)]
    lens: Lens,
    /// Orders of positions
    #[arg(long, value_enum, value_delimiter = ',')]
    order: Vec<OrderName>,
    /// Values too, in a grid of its own
    #[arg(long)]
    values: bool,
    /// Only ablations whose name holds this
    #[arg(long)]
    variant: Option<String>,
    /// A file of scores, for the grid and the law "real"
    #[arg(long)]
    real: Option<PathBuf>,
    /// How many rows of each shape are compared with a selection on the host
    #[arg(long, default_value_t = 4)]
    check: usize,
    /// 20 replays instead of 50
    #[arg(long)]
    quick: bool,
    /// The seed of the scores [default: a new one]
    #[arg(long)]
    seed: Option<u64>,
    /// As cargo calls a bench.
    #[arg(long, hide = true)]
    bench: bool,
}

/// "131072", "128K" or "1M".
fn size(text: &str) -> std::result::Result<usize, String> {
    let (digits, unit) = match text.as_bytes().last() {
        Some(b'K') => (&text[..text.len() - 1], 1 << 10),
        Some(b'M') => (&text[..text.len() - 1], 1 << 20),
        _ => (text, 1),
    };
    let number = digits.parse::<usize>().ok().filter(|&n| n > 0);
    number
        .and_then(|n| n.checked_mul(unit))
        .ok_or_else(|| "a number from 1 up is needed, like 512, 128K or 1M".to_string())
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Grid {
    Paper,
    Decode,
    Kinds,
    Traces,
    Ablations,
    Crossover,
    Real,
    Quick,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Type {
    F32,
    Bf16,
    F16,
}

impl Type {
    fn dtype(self) -> DType {
        match self {
            Self::F32 => DType::F32,
            Self::Bf16 => DType::BF16,
            Self::F16 => DType::F16,
        }
    }
}

/// Laws of scores. The first six are `Law` in `kernels/bench/scores.cu`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Dist {
    /// normal(0, 1) + 1.2 exp(-i / 0.06 L) + 1.6 exp(-(L - 1 - i) / 0.05 L): raised ends
    Sink,
    /// normal(0, 1)
    Normal,
    /// uniform(0, 1)
    Uniform,
    /// normal(0, 1), rounded to 1/64
    Ties,
    /// normal(0, 1), and 8 higher in one residue class modulo 128, another in each row
    Alias,
    /// all equal
    Equal,
    /// of a text, from `--real`
    Real,
}

impl Dist {
    fn name(self) -> &'static str {
        match self {
            Self::Sink => "sink",
            Self::Normal => "normal",
            Self::Uniform => "uniform",
            Self::Ties => "ties",
            Self::Alias => "alias",
            Self::Equal => "equal",
            Self::Real => "real",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Lens {
    /// The last rows of a prompt: N - M + 1 to N
    Causal,
    /// N
    Full,
    /// uniform in [N / 4, N]
    Ragged,
}

impl Lens {
    fn name(self) -> &'static str {
        match self {
            Self::Causal => "causal",
            Self::Full => "full",
            Self::Ragged => "ragged",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum OrderName {
    Unordered,
    ByPosition,
    ByValue,
}

impl OrderName {
    fn order(self) -> Order {
        match self {
            Self::Unordered => Order::Unordered,
            Self::ByPosition => Order::ByPosition,
            Self::ByValue => Order::ByValue,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Unordered => "unordered",
            Self::ByPosition => "by_position",
            Self::ByValue => "by_value",
        }
    }
}

/// Rows of scores.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Shape {
    m: usize,
    n: usize,
    dtype: Type,
    dist: Dist,
    lens: Lens,
    /// Of causal rows: the length of the first.
    first: usize,
}

impl Shape {
    fn causal(m: usize, n: usize) -> Self {
        Self {
            m,
            n,
            dtype: Type::F32,
            dist: Dist::Sink,
            lens: Lens::Causal,
            first: (n + 1).saturating_sub(m),
        }
    }

    /// Scores from one row to the next: whole 16 bytes.
    fn pitch(&self) -> usize {
        self.n.next_multiple_of(8)
    }

    fn lengths(&self, seed: u64) -> Vec<u32> {
        let mut rng = rng(seed ^ (self.m * self.n) as u64);
        let length = |row: usize| match self.lens {
            Lens::Causal => (self.first + row).min(self.n),
            Lens::Full => self.n,
            Lens::Ragged => rng.random_range(self.n / 4..=self.n),
        };
        let lengths = (0..self.m).map(length);
        lengths.map(|length| length as u32).collect()
    }
}

/// An ablation: what is forced, and how a line names it.
#[derive(Clone, Debug)]
struct Variant {
    ablation: &'static str,
    name: String,
    overrides: Overrides,
}

/// One line.
#[derive(Clone, Debug)]
struct Cell {
    shape: Shape,
    k: usize,
    order: OrderName,
    values: bool,
    variant: Option<Variant>,
    /// The request, which call of it this is, and how many it makes.
    call: Option<(&'static str, usize, usize)>,
}

impl Cell {
    fn of(shape: Shape) -> Self {
        Self {
            shape,
            k: K,
            order: OrderName::Unordered,
            values: false,
            variant: None,
            call: None,
        }
    }
}

/// All shapes of these rows and widths, widths first: what is made for one serves the next.
fn shapes(rows: &[usize], widths: &[usize]) -> Vec<Cell> {
    let of_width = |&n: &usize| rows.iter().map(move |&m| Cell::of(Shape::causal(m, n)));
    widths.iter().flat_map(of_width).collect()
}

fn kilo<const N: usize>(sizes: [usize; N]) -> [usize; N] {
    sizes.map(|size| size << 10)
}

/// At each shape one thing at a time differs from f32 scores with raised ends and K = 2048.
fn kinds() -> Vec<Cell> {
    let mut cells = vec![];
    for (m, n) in [(8, 128), (128, 256), (512, 128), (2048, 256), (512, 512)] {
        let base = Cell::of(Shape::causal(m, n << 10));
        cells.push(base.clone());
        for k in [512, 1024, 4096] {
            cells.push(Cell { k, ..base.clone() });
        }
        for order in [OrderName::ByPosition, OrderName::ByValue] {
            cells.push(Cell {
                order,
                ..base.clone()
            });
        }
        cells.push(Cell {
            values: true,
            ..base.clone()
        });
        for dist in [
            Dist::Normal,
            Dist::Uniform,
            Dist::Ties,
            Dist::Alias,
            Dist::Equal,
        ] {
            let shape = Shape { dist, ..base.shape };
            cells.push(Cell {
                shape,
                ..base.clone()
            });
        }
        for dtype in [Type::Bf16, Type::F16] {
            let shape = Shape {
                dtype,
                ..base.shape
            };
            cells.push(Cell {
                shape,
                ..base.clone()
            });
        }
    }
    cells
}

fn shape_of(call: &traces::Call) -> Shape {
    Shape {
        first: call.first,
        ..Shape::causal(call.rows, call.width)
    }
}

fn trace(trace: &Trace) -> Vec<Cell> {
    let calls = trace.calls();
    let count = calls.len();
    let cell = |(at, call): (usize, &traces::Call)| Cell {
        call: Some((trace.name, at, count)),
        ..Cell::of(shape_of(call))
    };
    calls.iter().enumerate().map(cell).collect()
}

/// The paper's policies: a fixed stride of 128 at a margin of 1.5 K, in one block a row.
const PAPER: Overrides = Overrides {
    mapping: Some(Mapping::Block),
    stride: Some(128),
    margin: Some(1.5),
    band: Some(false),
    view: Some(View::FixedStride),
};

fn ablations() -> Vec<Variant> {
    let none = Overrides::default();
    let mut variants = vec![];
    let mut push = |ablation, name: String, overrides| {
        variants.push(Variant {
            ablation,
            name,
            overrides,
        })
    };
    push("default", "default".into(), none);
    // Figures 9 and 10 are without the band.
    for margin in [1.0, 1.25, 1.5, 1.75, 2.0] {
        let overrides = Overrides {
            margin: Some(margin),
            ..PAPER
        };
        push("margin", format!("margin {margin}"), overrides);
    }
    for stride in [16, 32, 64, 128, 256] {
        let overrides = Overrides {
            stride: Some(stride),
            ..PAPER
        };
        push("stride", format!("stride {stride}"), overrides);
    }
    let banded = Overrides {
        band: Some(true),
        ..PAPER
    };
    push("band", "margin 1.5, with the band".into(), banded);
    for stride in [64, 128, 256] {
        let jittered = Overrides {
            view: Some(View::Jittered),
            stride: Some(stride),
            ..PAPER
        };
        push("view", format!("jittered, stride {stride}"), jittered);
    }
    for (ablation, name, overrides) in [
        (
            "view",
            "fixed stride",
            Overrides {
                view: Some(View::FixedStride),
                ..none
            },
        ),
        (
            "band",
            "without the band",
            Overrides {
                band: Some(false),
                ..none
            },
        ),
        (
            "proposal",
            "exact proposal",
            Overrides {
                stride: Some(1),
                ..none
            },
        ),
    ] {
        push(ablation, name.into(), overrides);
    }
    variants
}

fn crossover() -> Vec<Cell> {
    let widths = kilo([16, 24, 32, 40, 48, 56, 64]);
    let variants = [
        ("exact proposal", 1),
        ("stride 64", 64),
        ("stride 128", 128),
    ];
    let mut cells = vec![];
    for cell in shapes(&[64, 128, 256, 512, 1024, 2048, 4096], &widths) {
        for (name, stride) in variants {
            let variant = Variant {
                ablation: "crossover",
                name: name.into(),
                overrides: Overrides {
                    mapping: Some(Mapping::Block),
                    stride: Some(stride),
                    ..Overrides::default()
                },
            };
            cells.push(Cell {
                variant: Some(variant),
                ..cell.clone()
            });
        }
    }
    cells
}

fn cells(args: &Args, real: Option<&Scores>) -> Result<Vec<Cell>> {
    let mut cells = vec![];
    let named = [&args.m, &args.n, &args.k].iter().any(|of| !of.is_empty())
        || !args.dtype.is_empty()
        || !args.dist.is_empty()
        || !args.order.is_empty()
        || args.values
        || args.lens != Lens::Causal;
    if args.grid.is_empty() && named {
        return own(args, real);
    }
    for grid in or(&args.grid, &[Grid::Paper, Grid::Decode, Grid::Kinds]) {
        match grid {
            Grid::Paper => cells.extend(shapes(
                &[512, 1024, 2048, 4096, 8192],
                &kilo([128, 256, 512, 1024]),
            )),
            Grid::Decode => cells.extend(shapes(
                &[1, 2, 4, 8, 16, 32, 64, 128, 256],
                &kilo([8, 16, 32, 64, 128, 256, 512, 1024]),
            )),
            Grid::Kinds => cells.extend(kinds()),
            Grid::Traces => cells.extend(TRACES.iter().flat_map(trace)),
            Grid::Ablations => {
                for trace in &TRACES {
                    let cell = Cell::of(shape_of(&trace.terminal()));
                    cells.extend(ablations().into_iter().map(|variant| Cell {
                        variant: Some(variant),
                        ..cell.clone()
                    }));
                }
            }
            Grid::Crossover => cells.extend(crossover()),
            Grid::Real => {
                let Some(real) = real else {
                    bail!("--grid real needs a file of scores: --real FILE")
                };
                let (most, n) = real.dims()?;
                for m in [1, 8, 64, 128, 512, 2048]
                    .into_iter()
                    .filter(|&m| m <= most)
                {
                    for dist in [Dist::Real, Dist::Sink] {
                        let causal = Shape::causal(m, n);
                        cells.push(Cell::of(Shape { dist, ..causal }));
                    }
                }
            }
            Grid::Quick => {
                for (m, n) in [(1, 8), (8, 128), (128, 256), (512, 128), (2048, 128)] {
                    cells.push(Cell::of(Shape::causal(m, n << 10)));
                }
            }
        }
    }
    fn takes<T: PartialEq>(given: &[T], is: T) -> bool {
        given.is_empty() || given.contains(&is)
    }
    cells.retain(|cell| {
        let shape = &cell.shape;
        let name = cell.variant.as_ref().map_or("", |v| v.name.as_str());
        takes(&args.m, shape.m)
            && takes(&args.n, shape.n)
            && takes(&args.k, cell.k)
            && takes(&args.dtype, shape.dtype)
            && takes(&args.dist, shape.dist)
            && takes(&args.order, cell.order)
            && args
                .variant
                .as_deref()
                .is_none_or(|part| name.contains(part))
    });
    Ok(cells)
}

/// The product of what is named.
fn own(args: &Args, real: Option<&Scores>) -> Result<Vec<Cell>> {
    let mut cells = vec![];
    for n in or(&args.n, &[128 << 10]) {
        for m in or(&args.m, &[512]) {
            for dtype in or(&args.dtype, &[Type::F32]) {
                for dist in or(&args.dist, &[Dist::Sink]) {
                    let mut shape = Shape {
                        dtype,
                        dist,
                        lens: args.lens,
                        ..Shape::causal(m, n)
                    };
                    if dist == Dist::Real {
                        let Some(real) = real else {
                            bail!("--dist real needs a file of scores: --real FILE")
                        };
                        shape.n = real.dims()?.1;
                        shape.first = (shape.n + 1).saturating_sub(m);
                        if args.lens != Lens::Causal {
                            bail!("--dist real has causal rows, and --lens is {:?}", args.lens)
                        }
                    }
                    for k in or(&args.k, &[K]) {
                        for order in or(&args.order, &[OrderName::Unordered]) {
                            cells.push(Cell {
                                k,
                                order,
                                values: args.values,
                                ..Cell::of(shape)
                            });
                        }
                    }
                }
            }
        }
    }
    Ok(cells)
}

/// Rows of scores on the device, and what is known of them.
struct Input {
    shape: Shape,
    /// `[M, N]`, of rows a pitch apart.
    scores: Tensor,
    /// The same at another place: what the op runs on before it is timed. None beyond L2.
    decoy: Option<Tensor>,
    lengths: Vec<u32>,
    ends: Tensor,
    floor_us: f64,
    /// Of all valid scores.
    bytes: usize,
    /// The valid scores of those rows that are checked.
    rows: Vec<(usize, Vec<f32>)>,
}

impl Input {
    fn new(gpu: &Gpu, shape: Shape, check: usize, real: Option<&Scores>) -> Result<Self> {
        let Shape { m, n, .. } = shape;
        let lengths = shape.lengths(gpu.seed);
        let ends = Tensor::new(lengths.as_slice(), &gpu.device)?;
        let whole = match (shape.dist, real) {
            (Dist::Real, Some(real)) => real_rows(real, shape)?.to_device(&gpu.device)?,
            _ => {
                let dtype = shape.dtype.dtype();
                let whole = Tensor::zeros((m, shape.pitch()), dtype, &gpu.device)?;
                generate(gpu, &whole, &ends, shape.dist)?;
                whole
            }
        };
        let size = shape.dtype.dtype().size_in_bytes();
        let bytes = lengths.iter().map(|&length| length as usize * size).sum();
        let scores = whole.narrow(1, 0, n)?;
        let decoy = match m * shape.pitch() * size < EVICTED_BYTES / 2 {
            true => Some(whole.copy()?.narrow(1, 0, n)?),
            false => None,
        };
        let mut rng = rng(gpu.seed ^ (m * n) as u64);
        let picked = match m * n <= ALL_CHECKED {
            true => (0..m).collect(),
            false => {
                let mut picked = vec![0, m - 1];
                picked.extend((2..check).map(|_| rng.random_range(0..m)));
                picked.truncate(check);
                picked.sort_unstable();
                picked.dedup();
                picked
            }
        };
        let mut rows = vec![];
        for row in picked {
            let mut values = host_row(&whole, row)?;
            values.truncate(lengths[row] as usize);
            rows.push((row, values));
        }
        Ok(Self {
            shape,
            floor_us: gpu.floor(false, &whole, bytes)?,
            scores,
            decoy,
            lengths,
            ends,
            bytes,
            rows,
        })
    }
}

/// Fills rows by a law, and what lies beyond their ends with what no op may take.
fn generate(gpu: &Gpu, whole: &Tensor, ends: &Tensor, dist: Dist) -> Result<()> {
    let (m, pitch) = whole.dims2()?;
    let kernel = gpu.kernel(&format!("scores_{}", whole.dtype().as_str()))?;
    let ends = read(ends, &gpu.stream)?;
    write(whole, |address| {
        let (rows, pitch, law) = (m as u64, pitch as u64, dist as i32);
        let mut launch = gpu.stream.launch_builder(&kernel);
        launch.arg(&address).arg(&rows).arg(&pitch).arg(&ends);
        launch.arg(&gpu.seed).arg(&law);
        let config = LaunchConfig {
            grid_dim: (pitch.div_ceil(2048) as u32, m.clamp(1, 65535) as u32, 1),
            block_dim: (256, 1, 1),
            shared_mem_bytes: 0,
        };
        // SAFETY: the tensor has so many rows, the pitch is even, and every row has an end.
        unsafe { launch.launch(config) }.w()?;
        Ok(())
    })
}

/// The last rows of a file, each with the scores of later positions beyond its end.
fn real_rows(real: &Scores, shape: Shape) -> Result<Tensor> {
    let (most, n) = real.dims()?;
    if shape.n != n || n % 8 != 0 || shape.m > most {
        bail!(
            "rows are {} x {}, the file of --real has {most} x {n}, accepted are up to as many rows of that width, \
             which must be a multiple of 8",
            shape.m,
            shape.n
        )
    }
    let mut parts = vec![];
    for first in (most - shape.m..most).step_by(REAL_ROWS) {
        let rows = real.rows(first, REAL_ROWS.min(most - first))?;
        parts.push(rows.to_dtype(shape.dtype.dtype())?);
    }
    Tensor::cat(&parts, 0)
}

/// Shares of rows by route, what was admitted, and the traffic of equation 29.
fn routes(
    gpu: &Gpu,
    cell: &Cell,
    top: &TopK,
    input: &Input,
    space: &mut Workspace,
) -> Result<Value> {
    let mut out = buffers(gpu, cell)?.with_routes()?;
    top.select_into(&input.scores, &Bounds::ends(&input.ends), &mut out, space)?;
    let routes = out.routes()?;
    let m = routes.len() as f64;
    let share = |of: &[Route]| {
        let count = routes.iter().filter(|row| of.contains(&row.route)).count();
        count as f64 / m
    };
    let banded = cell
        .variant
        .as_ref()
        .and_then(|variant| variant.overrides.band)
        .unwrap_or(true);
    let admitted: f64 = routes.iter().map(|row| row.admitted as f64).sum();
    let raised = routes.iter().filter(|row| row.raised > 0).count() as f64;
    let scores_read: f64 = routes.iter().map(|row| row.scores_read as f64).sum();
    let valid: f64 = input.lengths.iter().map(|&length| length as f64).sum();
    Ok(json!({
        "p_direct": share(&[Route::Direct]), "p_primary": share(&[Route::Primary]),
        "p_band": if banded { share(&[Route::Band, Route::Recovered]) } else { 0.0 },
        "p_exact": share(&[Route::Recovered]), "p_raised": raised / m,
        "admitted": admitted / m, "row_reads": scores_read / valid.max(1.0),
    }))
}

fn buffers(gpu: &Gpu, cell: &Cell) -> Result<SelectionBuffers> {
    let out = SelectionBuffers::new(cell.shape.m, cell.k, &gpu.device)?;
    match cell.values {
        true => out.with_values(),
        false => Ok(out),
    }
}

/// Prints the line of a cell; gives the number of mismatches.
fn measure(gpu: &Gpu, cell: &Cell, input: &Input, space: &mut Workspace) -> Result<usize> {
    let shape = &cell.shape;
    let mut top = TopK::new(cell.k)?.order(cell.order.order());
    if cell.values {
        top = top.with_values();
    }
    if let Some(variant) = &cell.variant {
        top = top.with_overrides(variant.overrides);
    }
    let plan = top.plan(
        shape.m,
        shape.n,
        shape.pitch(),
        shape.dtype.dtype(),
        DeviceProps::of(&gpu.device)?,
    )?;
    let mut out = buffers(gpu, cell)?;
    let empty = Tensor::zeros(shape.m, DType::U32, &gpu.device)?;
    // With the outputs of empty rows, and so that what is captured next is loaded. `preload` would
    // load all kernels of a dtype, which the driver compiles for a minute on the first run.
    top.select_into(&input.scores, &Bounds::ends(&empty), &mut out, space)?;
    let ends = Bounds::ends(&input.ends);
    let graph = gpu.capture(|| top.select_into(&input.scores, &ends, &mut out, space))?;
    let decoy = match &input.decoy {
        Some(decoy) => Some(gpu.capture(|| top.select_into(decoy, &ends, &mut out, space))?),
        None => None,
    };
    graph.launch().w()?;
    let selected = out.selection()?;
    let counts = selected.counts.to_vec1::<u32>()?;
    let mut mismatches = 0;
    for (row, values) in &input.rows {
        // A copy of its own first: a view would bring the whole batch along.
        let of = |tensor: &Tensor| tensor.get(*row)?.force_contiguous();
        let given = Given {
            positions: of(&selected.positions)?.to_vec1()?,
            count: counts[*row],
            values: match &selected.values {
                Some(values) => Some(of(values)?.to_vec1()?),
                None => None,
            },
        };
        if let Err(mismatch) = compare(values, cell.k, cell.order.order(), &given) {
            eprintln!(
                "MISMATCH: {cell:?}, {plan}, row {row}, seed {}: {mismatch}",
                gpu.seed
            );
            mismatches += 1;
        }
    }
    drop(selected);
    let times = gpu.time(&graph, decoy.as_ref(), gpu.replays, || Ok(()))?;
    let mut line = gpu.line("topk", &times);
    let mut add = |more: Value| {
        if let Value::Object(more) = more {
            line.extend(more);
        }
    };
    let plan_text = plan.to_string();
    add(json!({
        "m": shape.m, "n": shape.n, "k": cell.k, "lens": shape.lens.name(), "dist": shape.dist.name(),
        "dtype": shape.dtype.dtype().as_str(), "order": cell.order.name(), "values": cell.values,
        "route": plan_text.split(',').next(), "plan": plan_text,
        "read_floor_us": us(input.floor_us), "gbps": (input.bytes as f64 / median(&times) / 1e3).round(),
        "l2": "rotated", "workspace": plan.workspace_bytes,
        "exact": mismatches == 0 && !input.rows.is_empty(), "checked_rows": input.rows.len(),
    }));
    add(routes(gpu, cell, &top, input, space)?);
    if let Some((trace, call, calls)) = cell.call {
        add(json!({"trace": trace, "call": call, "calls": calls, "first": shape.first}));
    }
    if let Some(variant) = &cell.variant {
        let of = &variant.overrides;
        add(json!({
            "ablation": variant.ablation, "variant": variant.name, "first": shape.first,
            "stride": plan.stride, "margin": of.margin, "band": plan.band,
        }));
    }
    let line: Map<String, Value> = line.into_iter().filter(|(_, v)| !v.is_null()).collect();
    println!("{}", Value::Object(line));
    Ok(mismatches)
}

fn main() -> Result<()> {
    let args = Args::parse();
    let replays = if args.quick { 20 } else { 50 };
    let seed = args.seed.unwrap_or_else(|| rand::rng().random());
    let gpu = Gpu::new(0, replays, seed)?;
    let real = match &args.real {
        Some(file) => Some(Scores::load(file)?),
        None => None,
    };
    let cells = cells(&args, real.as_ref())?;
    if cells.is_empty() {
        bail!("nothing is measured: no cell of the grids has what --m, --n, --k, --dtype, --dist, --order and --variant name")
    }
    println!("{}", gpu.empty_graph()?);
    let start = std::time::Instant::now();
    let mut space = Workspace::new(&gpu.device)?;
    let mut input: Option<Input> = None;
    let mut mismatches = 0;
    for cell in &cells {
        let shape = cell.shape;
        let failed = |e: candle_core::Error| e.context(format!("{cell:?}"));
        if input.as_ref().is_none_or(|input| input.shape != shape) {
            // Before the next is made: two of the largest would not fit on a smaller device.
            drop(input.take());
            input = Some(Input::new(&gpu, shape, args.check, real.as_ref()).map_err(failed)?);
        }
        if let Some(input) = &input {
            mismatches += measure(&gpu, cell, input, &mut space).map_err(failed)?;
        }
    }
    eprintln!(
        "{} cells in {:.1} s, seed {seed}",
        cells.len(),
        start.elapsed().as_secs_f64()
    );
    if mismatches > 0 {
        bail!("{mismatches} rows differ from the selection on the host, named above")
    }
    Ok(())
}
