//! Sampling, in each form of its kernels, against the CPU backend.

use super::common::{logits, rng, Float, Law, Params, LAWS};
use super::softmax::{inverted, Softmax};
use super::Emulated;
use candle_core::{DType, Device, Result, Tensor};
use candle_topk::sampling::{
    candidates_rows, mask_rows, sample_rows_with_log_probs, Candidates, Mass, Truncation,
};
use half::{bf16, f16};
use rand::{rngs::StdRng, Rng};
use std::sync::atomic::{AtomicUsize, Ordering};

/// A form of the kernels: what its .cu files define, and how many blocks may share a row.
struct Form {
    name: &'static str,
    threads: u32,
    candidates: u32,
    clusters: &'static [u32],
}

const ONE_BLOCK: Form = Form {
    name: "block",
    threads: 256,
    candidates: 4096,
    clusters: &[1],
};
const WIDE_BLOCK: Form = Form {
    name: "wide",
    threads: 1024,
    candidates: 4096,
    clusters: &[1],
};
/// Of all ops but masks.
const LARGE_BLOCK: Form = Form {
    name: "large",
    threads: 512,
    candidates: 4096,
    clusters: &[1],
};
/// The sizes that `cuda::teams` chooses from.
const CLUSTER: Form = Form {
    name: "cluster",
    threads: 512,
    candidates: 2048,
    clusters: &[8, 6, 4, 3, 2],
};

impl Form {
    fn start(&self) -> Result<Emulated> {
        let definitions = [
            format!("-DFORM_THREADS={}", self.threads),
            format!("-DFORM_CANDIDATES={}", self.candidates),
            format!("-DFORM_CLUSTER={}", self.clusters[0]),
        ];
        Emulated::start(self.name, "sampling.cpp", &definitions)
    }
}

#[derive(Debug, Clone, Copy)]
enum Op {
    Mask,
    Sample,
    Candidates,
}

/// By the counters; or all the same, the lowest or the highest of 32 bits.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Draws {
    Random,
    Lowest,
    Highest,
}

/// A launch: `Case` of sampling.cpp, and what follows it.
#[derive(Debug)]
struct Case {
    op: Op,
    dtype: DType,
    law: Law,
    vocab: usize,
    /// How many elements the rows start after the beginning of a line of 128 bytes, and lie apart beyond their width.
    shift: usize,
    gap: usize,
    blocks: u32,
    /// Whether a cluster gets the shared memory to hold its rows.
    staged: bool,
    draws: Draws,
    mass: Mass,
    params: Vec<Params>,
    /// Whether all that equals the last of a set is kept with it: by runs of the ablation.
    keeps_equals: bool,
}

const CAPACITY: usize = 40;

impl Case {
    /// Rows of f32, aligned and dense, that a cluster holds on chip.
    fn of(op: Op, vocab: usize, blocks: u32, params: Vec<Params>) -> Self {
        Self {
            op,
            dtype: DType::F32,
            law: LAWS[0],
            vocab,
            shift: 0,
            gap: 0,
            blocks,
            staged: blocks > 1,
            draws: Draws::Random,
            mass: Mass::Renormalized,
            params,
            keeps_equals: false,
        }
    }

    fn random(form: &Form, rng: &mut StdRng) -> Self {
        let widest = if form.clusters.len() > 1 {
            24_000
        } else {
            40_000
        };
        let vocab = match rng.random_range(0..4) {
            0 => rng.random_range(1..700),
            1 => rng.random_range(700..6_000),
            _ => rng.random_range(6_000..widest),
        };
        let pick = |rng: &mut StdRng| Params {
            k: [0, 0, 0, 1, 2, 20, 50, 95, 96, 97, 128, 129, 300, 3000][rng.random_range(0..14)],
            p: [1.0, 1.0, 0.05, 0.5, 0.9, 0.9, 0.95, 0.999][rng.random_range(0..8)],
            min_p: [0.0, 0.0, 0.0, 0.05][rng.random_range(0..4)],
            temperature: [0.0, 1.0, 1.0, 0.7, 0.1, 3.0, 1e-3][rng.random_range(0..7)],
            mass: Mass::Renormalized,
        };
        Self {
            op: [Op::Mask, Op::Sample, Op::Candidates][rng.random_range(0..3)],
            dtype: [DType::F32, DType::F32, DType::BF16, DType::F16][rng.random_range(0..4)],
            law: LAWS[rng.random_range(0..LAWS.len())],
            vocab,
            shift: rng.random_range(0..64),
            gap: rng.random_range(0..3),
            blocks: form.clusters[rng.random_range(0..form.clusters.len())],
            staged: form.clusters.len() > 1 && rng.random_range(0..3) > 0,
            draws: [Draws::Lowest, Draws::Random, Draws::Random, Draws::Highest]
                [rng.random_range(0..4)],
            mass: [Mass::Renormalized, Mass::Joint][rng.random_range(0..2)],
            params: (0..2).map(|_| pick(rng)).collect(),
            keeps_equals: false,
        }
    }

    /// For a run of the ablation.
    fn of_run(run: &Run, rng: &mut StdRng) -> Self {
        let vocab = [300, 5_000, 9_000, 12_000][rng.random_range(0..4)] - rng.random_range(0..9);
        let pick = |rng: &mut StdRng| Params {
            k: [0, 2, 50, 50, 300, 5000][rng.random_range(0..6)],
            p: [1.0, 0.5, 0.9, 0.9, 0.999][rng.random_range(0..5)],
            min_p: [0.0, 0.0, 0.0, 0.05][rng.random_range(0..4)],
            temperature: [1.0, 1.0, 0.5, 3.0][rng.random_range(0..4)],
            mass: Mass::Renormalized,
        };
        Self {
            op: [Op::Mask, Op::Sample][rng.random_range(0..2)],
            dtype: DType::F32,
            law: LAWS[rng.random_range(0..LAWS.len())],
            vocab,
            shift: rng.random_range(0..4),
            gap: rng.random_range(0..3),
            blocks: 1,
            staged: false,
            draws: Draws::Random,
            mass: [Mass::Renormalized, Mass::Joint][rng.random_range(0..2)],
            params: (0..2).map(|_| pick(rng)).collect(),
            keeps_equals: run.keeps_equals,
        }
    }

    /// Truncations that keep the same sets, with all that equals their last.
    fn with_equals(&self, logits: &Tensor, packed: &Tensor) -> Result<Tensor> {
        let masked = mask_rows(logits, packed, self.mass)?.to_dtype(DType::F32)?;
        let rows = logits.to_dtype(DType::F32)?.to_vec2::<f32>()?;
        let mut truncations = vec![];
        for ((row, masked), params) in rows.iter().zip(masked.to_vec2::<f32>()?).zip(&self.params) {
            let kept = masked.into_iter().filter(|&x| x > f32::NEG_INFINITY);
            let last = kept.fold(f32::INFINITY, f32::min);
            truncations.push(
                Truncation::new()
                    .with_top_k(row.iter().filter(|&&x| x >= last).count())
                    .with_temperature(params.temperature),
            );
        }
        Truncation::rows(&truncations, &Device::Cpu)
    }

    /// Runs it by the emulator and by the CPU backend, and tells which routes the rows took.
    fn check<T: Float>(
        &self,
        rng: &mut StdRng,
        emulated: &mut Emulated,
        what: &str,
    ) -> Result<Vec<u32>> {
        let rows = self.params.len();
        let what = format!("{what}: {self:?}");
        let mut flat = vec![];
        for _ in 0..rows {
            let mut row = logits(self.law, self.vocab, rng);
            // Far from 0, as measured by their spread, or by the temperature.
            if self.dtype == DType::F32 && rng.random_range(0..5) == 0 {
                let (by, to) = [(4.0, 1e5), (0.004, 100.0), (1.0, -3e4)][rng.random_range(0..3)];
                row.iter_mut().for_each(|x| *x = *x * by + to);
            }
            // What is rare, in one row of eight.
            if rng.random_range(0..8) == 0 {
                let at = rng.random_range(0..self.vocab);
                let rare = [f32::NAN, f32::INFINITY, 60.0, 60.0][rng.random_range(0..4)];
                // Equal ones share all the mass, so that a nucleus may end between two of them.
                let many = [1, 1, 2, 4, 64][rng.random_range(0..5)];
                (0..many).for_each(|i| row[(at + 7 * i) % self.vocab] = rare);
            }
            flat.extend(row.into_iter().map(T::round));
        }
        self.check_rows(flat, rng, emulated, &what)
    }

    /// The same of these rows, one after the other.
    fn check_rows<T: Float>(
        &self,
        flat: Vec<T>,
        rng: &mut StdRng,
        emulated: &mut Emulated,
        what: &str,
    ) -> Result<Vec<u32>> {
        let counters = self.check_counted(flat, rng, emulated, what)?;
        Ok(counters.iter().map(|row| row[0]).collect())
    }

    /// What the counters say of each row: its route, candidates, steps and passes.
    fn check_counted<T: Float>(
        &self,
        flat: Vec<T>,
        rng: &mut StdRng,
        emulated: &mut Emulated,
        what: &str,
    ) -> Result<Vec<[u32; 4]>> {
        let rows = self.params.len();
        let tensor = Tensor::from_vec(flat.clone(), (rows, self.vocab), &Device::Cpu)?;
        let truncations: Vec<Truncation> = self.params.iter().map(Params::truncation).collect();
        let packed = Truncation::rows(&truncations, &Device::Cpu)?;
        let draws: Vec<i64> = (0..2 * rows).map(|_| rng.random()).collect();

        let number = |x: usize| x as u32;
        let header = [
            self.op as u32,
            match self.dtype {
                DType::F32 => 0,
                DType::BF16 => 1,
                _ => 2,
            },
            number(rows),
            number(self.vocab),
            number(self.vocab + self.gap),
            number(self.shift),
            self.blocks,
            self.staged as u32,
            (self.mass == Mass::Joint) as u32,
            number(CAPACITY),
            rng.random(),
            self.draws as u32,
        ];
        let mut bytes: Vec<u8> = header.iter().flat_map(|x| x.to_ne_bytes()).collect();
        let params = packed.flatten_all()?.to_vec1::<f32>()?;
        bytes.extend(params.iter().flat_map(|x| x.to_ne_bytes()));
        bytes.extend(draws.iter().flat_map(|x| x.to_ne_bytes()));
        for row in flat.chunks(self.vocab) {
            bytes.extend(row.iter().flat_map(|x| x.bytes()));
            bytes.extend((0..self.gap).flat_map(|_| T::round(f32::NAN).bytes()));
        }
        emulated.say(&bytes, what);
        let packed = match self.keeps_equals {
            true => self.with_equals(&tensor, &packed)?,
            false => packed,
        };

        match self.op {
            Op::Mask => {
                let want = mask_rows(&tensor, &packed, self.mass)?
                    .flatten_all()?
                    .to_vec1::<T>()?;
                let want: Vec<u8> = want.into_iter().flat_map(T::bytes).collect();
                let got = emulated.bytes(rows * self.vocab * size_of::<T>(), what);
                let at = got.iter().zip(&want).position(|(g, w)| g != w);
                assert_eq!(at.map(|at| at / size_of::<T>()), None, "{what}: the mask");
            }
            Op::Sample if self.draws != Draws::Random => {
                let masked = mask_rows(&tensor, &packed, self.mass)?;
                let masked = masked.to_dtype(DType::F32)?.to_vec2::<f32>()?;
                let tokens = emulated.words(rows, what);
                emulated.words(2 * rows, what);
                for ((row, token), params) in masked.iter().zip(tokens).zip(&self.params) {
                    match self.draws {
                        Draws::Lowest => self.check_lowest(row, token, params.temperature, what),
                        _ => self.check_highest(row, token, params.temperature, what),
                    }
                }
            }
            Op::Sample => {
                let draws = Tensor::from_vec(draws, (rows, 2), &Device::Cpu)?;
                let (tokens, log_probs) =
                    sample_rows_with_log_probs(&tensor, &draws, &packed, self.mass)?;
                assert_eq!(
                    emulated.words(rows, what),
                    tokens.to_vec1::<u32>()?,
                    "{what}: tokens"
                );
                let notes = flat.chunks(self.vocab).map(|row| {
                    let any = |f: fn(f32) -> bool| row.iter().any(|&x| f(x.wide())) as u32;
                    any(f32::is_nan) | any(|x| x == f32::INFINITY) << 1
                });
                assert_eq!(
                    emulated.words(rows, what),
                    notes.collect::<Vec<_>>(),
                    "{what}: notes"
                );
                check_log_probs(&emulated.words(rows, what), &log_probs, what)?;
            }
            Op::Candidates => {
                let Candidates {
                    ids,
                    log_probs,
                    counts,
                } = candidates_rows(&tensor, &packed, self.mass, CAPACITY)?;
                assert_eq!(
                    emulated.words(rows, what),
                    counts.to_vec1::<u32>()?,
                    "{what}: counts"
                );
                let ids = ids.flatten_all()?.to_vec1::<u32>()?;
                assert_eq!(emulated.words(rows * CAPACITY, what), ids, "{what}: ids");
                check_log_probs(&emulated.words(rows * CAPACITY, what), &log_probs, what)?;
            }
        }
        let counters = emulated.words(4 * rows, what);
        Ok(counters.as_chunks().0.to_vec())
    }
}

impl Case {
    /// A draw of 0 falls on the first token that has any mass, which may be little.
    fn check_lowest(&self, masked: &[f32], token: u32, temperature: f32, what: &str) {
        let most = masked.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        if !most.is_finite() {
            return;
        }
        let kept = masked
            .iter()
            .enumerate()
            .filter(|(_, &x)| x > f32::NEG_INFINITY);
        for (id, &x) in kept {
            let exponent = match x == most {
                true => 0.0,
                false => (x as f64 - most as f64) / temperature as f64,
            };
            // A mass is below one unit from e^-42.97 on.
            let may = exponent > -43.1;
            if may && id as u32 == token {
                return;
            }
            assert!(
                exponent < -42.9,
                "{what}: token {token}, {id} is before it and has exponent {exponent}"
            );
        }
        panic!("{what}: token {token} has no mass");
    }
}

impl Case {
    /// The token that the highest draw falls on, by exact sums.
    fn check_highest(&self, masked: &[f32], token: u32, temperature: f32, what: &str) {
        let most = masked.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        if most == f32::NEG_INFINITY {
            return;
        }
        let softmax = Softmax::new(most, if temperature > 0.0 { temperature } else { 1.0 });
        let mass = |&x: &f32| softmax.mass(x) as u128;
        let point = inverted(masked.iter().map(mass).sum(), (u32::MAX as u64) << 32);
        let mut sum = 0;
        let want = masked.iter().position(|x| {
            sum += mass(x);
            point < sum
        });
        assert_eq!(Some(token as usize), want, "{what}: the highest draw");
    }
}

/// The logarithm is the platform's.
fn check_log_probs(got: &[u32], want: &Tensor, what: &str) -> Result<()> {
    let want = want.flatten_all()?.to_vec1::<f32>()?;
    for (got, want) in got.iter().map(|&bits| f32::from_bits(bits)).zip(want) {
        let close = got == want || (got - want).abs() <= 1e-6 * (1.0 + want.abs());
        assert!(close, "{what}: log-probability {got}, {want} expected");
    }
    Ok(())
}

/// Random launches of a form. `routes`: those that rows must have taken, or the test shows too little.
fn random_launches(form: &Form, cases: usize, routes: &[u32]) -> Result<()> {
    let mut emulated = form.start()?;
    let rng = &mut rng(90 + form.threads as u64);
    let mut taken = 0;
    for i in 0..cases {
        let case = Case::random(form, rng);
        let what = format!("{} {i}", form.name);
        let routes = match case.dtype {
            DType::F32 => case.check::<f32>(rng, &mut emulated, &what)?,
            DType::BF16 => case.check::<bf16>(rng, &mut emulated, &what)?,
            _ => case.check::<f16>(rng, &mut emulated, &what)?,
        };
        routes.iter().for_each(|route| taken |= route);
    }
    emulated.end()?;
    for route in routes {
        assert_eq!(taken & route, *route, "no row took route {route}");
    }
    Ok(())
}

// `RouteCounters` in kernels/sampling/truncate.cuh.
const HIT: u32 = 1;
const SECOND_PASS: u32 = 2;
const FALLBACK: u32 = 4;
const NO_TRUNCATION: u32 = 8;
const ALL: &[u32] = &[HIT, SECOND_PASS, FALLBACK, NO_TRUNCATION];

#[test]
fn one_block_a_row() -> Result<()> {
    random_launches(&ONE_BLOCK, 300, ALL)
}

#[test]
fn a_wide_block_a_row() -> Result<()> {
    random_launches(&WIDE_BLOCK, 120, ALL)
}

#[test]
fn a_large_block_a_row() -> Result<()> {
    random_launches(&LARGE_BLOCK, 120, ALL)
}

#[test]
fn a_cluster_a_row() -> Result<()> {
    random_launches(&CLUSTER, 150, ALL)
}

/// A logit between -43 and 0 of the greatest mass that is at most this, in a row whose greatest is 0.
fn logit_of(mass: u128) -> f32 {
    let softmax = Softmax::new(0.0, 1.0);
    let (mut from, mut to) = (0, 43f32.to_bits());
    while from < to {
        let middle = (from + to) / 2;
        match softmax.mass(-f32::from_bits(middle)) as u128 <= mass {
            true => to = middle,
            false => from = middle + 1,
        }
    }
    -f32::from_bits(from)
}

/// The members of a cluster have the elements in orders of their own. The nucleus ends so close to the first that
/// sums which an order could change would send some of them for the exact one, and some not.
#[test]
fn members_decide_alike() -> Result<()> {
    const VOCAB: usize = 20_000;
    let softmax = Softmax::new(0.0, 1.0);
    let mut emulated = CLUSTER.start()?;
    let rng = &mut rng(7);
    for i in 0..24 {
        // Where a doubt of 2^-44 begins, one of 2^-27, and one of 2^-19.
        let (at, spread) = [
            (1i64 << 20, 1i64 << 12),
            (1 << 36, 1 << 23),
            (1 << 44, 1 << 41),
        ][i % 3];
        let short = at + rng.random_range(-spread..spread);
        let mut kept = vec![0f32];
        kept.extend((0..105).map(|_| rng.random_range(-36.3f32..-35.6)));
        let mass = |x: &f32| softmax.mass(*x) as u128;
        let mut rest = 2 * mass(&0.0) - short as u128 - kept.iter().map(mass).sum::<u128>();
        while kept.len() < 120 && mass(&logit_of(rest)) > 0 {
            kept.push(logit_of(rest));
            rest -= mass(&logit_of(rest));
        }
        let mut row = vec![-200f32; VOCAB];
        (330..VOCAB).step_by(70).for_each(|at| row[at] = -80.0);
        let places = rand::seq::index::sample(rng, 300, kept.len());
        places.iter().zip(&kept).for_each(|(at, &x)| row[at] = x);
        let case = Case::of(
            Op::Mask,
            VOCAB,
            8,
            vec![Params {
                p: 0.5,
                ..Params::NONE
            }],
        );
        case.check_rows(row, rng, &mut emulated, &format!("short by {short}"))?;
    }
    emulated.end()
}

/// The first guess of a cluster, from the greatest of parts of the row, gathers far too few, so that the sample is asked
/// and a second pass begins, whose sums take the place of those that the members decided by.
#[test]
fn members_propose_again_alike() -> Result<()> {
    const VOCAB: usize = 20_000;
    let mut emulated = CLUSTER.start()?;
    let rng = &mut rng(45);
    for i in 0..32 {
        let mut row = vec![-40f32; VOCAB];
        let places = rand::seq::index::sample(rng, VOCAB, 8_950);
        for (i, at) in places.iter().enumerate() {
            row[at] = if i < 1450 { 0.3f32.ln() } else { 0.01f32.ln() };
        }
        // Each where a piece of the sample is, of which every group has a few.
        (0..50).for_each(|group| row[4 * (2 * group * (VOCAB / 4 - 3) / 256)] = 0.0);
        let case = Case::of(
            Op::Mask,
            VOCAB,
            8,
            vec![Params {
                p: 0.9,
                ..Params::NONE
            }],
        );
        let routes = case.check_rows(row, rng, &mut emulated, &format!("row {i}"))?;
        assert_eq!(routes[0] & SECOND_PASS, SECOND_PASS, "row {i}");
    }
    emulated.end()
}

/// Rows whose sample says little of their set: fewer numbers than top-k asks for, some of them below the proposal; a
/// flat row with one logit that outweighs the others, and one with a few of them.
#[test]
fn what_a_sample_misses() -> Result<()> {
    const VOCAB: usize = 12_000;
    for form in [&ONE_BLOCK, &WIDE_BLOCK, &CLUSTER] {
        let mut emulated = form.start()?;
        let rng = &mut rng(8);
        for i in 0..12 {
            let mut row = vec![f32::NEG_INFINITY; VOCAB];
            let (numbers, outliers, k, p) = [
                (900, 0, 1000, 0.9),
                (900, 0, 1000, 1.0),
                (VOCAB, 1, 0, 0.9),
                (VOCAB, 1, 7_000, 0.9),
                (VOCAB, 30, 0, 0.95),
                (VOCAB, 30, 6_000, 1.0),
            ][i / 2];
            for at in rand::seq::index::sample(rng, VOCAB, numbers) {
                row[at] = rng.random_range(-1.0..1.0);
            }
            for at in rand::seq::index::sample(rng, VOCAB, outliers) {
                row[at] = rng.random_range(9.0..11.0);
            }
            let case = Case {
                shift: i % 4,
                staged: form.clusters.len() > 1 && i % 3 > 0,
                ..Case::of(
                    [Op::Mask, Op::Sample][i % 2],
                    VOCAB,
                    form.clusters[i % form.clusters.len()],
                    vec![Params {
                        k,
                        p,
                        ..Params::NONE
                    }],
                )
            };
            let what = format!("{numbers} numbers, {outliers} above, k {k}, p {p}");
            case.check_rows(row, rng, &mut emulated, &what)?;
        }
        emulated.end()?;
    }
    Ok(())
}

/// Rows whose sets are larger than what is gathered, and how their sample may mislead.
const LARGE: [&str; 9] = [
    "normal",
    "sampled low",
    "sampled high",
    "two values",
    "few values",
    "subnormal",
    "outlier",
    "masked",
    "far from 0",
];

fn large_row(kind: &str, form: &Form, dtype: DType, vocab: usize, rng: &mut StdRng) -> Vec<f32> {
    let mut row = logits(Law::Normal, vocab, rng);
    // The positions of `Sampled` in kernels/sampling/truncate.cuh.
    let width = 16 / dtype.size_in_bytes();
    let vectors = vocab.div_ceil(width);
    let sampled = (form.threads as usize * width).max(4096) / width;
    match kind {
        "sampled low" | "sampled high" => {
            let by = if kind == "sampled low" { -3.0 } else { 3.0 };
            for at in 0..sampled {
                let first = at * vectors / sampled * width;
                let last = (first + width).min(vocab);
                // Not all of them, where the row has few more.
                if vectors > 2 * sampled || at % 2 == 0 {
                    row[first..last].iter_mut().for_each(|x| *x += by);
                }
            }
        }
        "two values" => {
            let split = rng.random_range(-1.5f32..1.5);
            row.iter_mut().for_each(|x| *x = (*x > split) as u8 as f32);
        }
        "few values" => row.iter_mut().for_each(|x| *x = (*x * 8.0).round() / 8.0),
        // Most are closer to 0 than any normal number, or 0 of either sign.
        "subnormal" => {
            for x in row.iter_mut() {
                *x = match rng.random_range(0..8) {
                    0 => *x,
                    1 => 0.0,
                    2 => -0.0,
                    _ => *x * 1e-40,
                }
            }
        }
        "outlier" => row[rng.random_range(0..vocab)] = 9.0,
        "masked" => {
            for x in row.iter_mut() {
                if rng.random_range(0..3) == 0 {
                    *x = [f32::NEG_INFINITY, -6e4][rng.random_range(0..2)];
                }
            }
        }
        "far from 0" => row.iter_mut().for_each(|x| *x += 300.0),
        _ => {}
    }
    row
}

fn large_sets(form: &Form) -> Result<()> {
    let mut emulated = form.start()?;
    let rng = &mut rng(600 + form.threads as u64);
    for (i, kind) in LARGE.iter().cycle().take(3 * LARGE.len()).enumerate() {
        let vocab = rng.random_range(12_000..24_000);
        let half = vocab / 2;
        let param = |k: usize, p: f32, min_p: f32| Params {
            k,
            p,
            min_p,
            ..Params::NONE
        };
        let all = [
            param(half, 1.0, 0.0),
            param(0, 0.9, 0.0),
            param(vocab - rng.random_range(1..20), 1.0, 0.0),
            param(0, [0.5, 0.97, 0.9999][i % 3], 0.0),
            param(rng.random_range(2100..vocab), 0.9, 0.0),
            param(half, 1.0, 0.3),
            param(0, 0.8, 0.2),
        ];
        let mut params: Vec<Params> = (0..2).map(|j| all[(i + 3 * j) % all.len()]).collect();
        params[1].temperature = [1.0, 0.6, 1.7][i / 3 % 3];
        let case = Case {
            dtype: [DType::F32, DType::F32, DType::BF16, DType::F16][i / 2 % 4],
            shift: i % 4,
            gap: i % 3,
            mass: [Mass::Renormalized, Mass::Joint][i / 2 % 2],
            staged: form.clusters.len() > 1 && i % 3 > 0,
            ..Case::of(
                [Op::Mask, Op::Sample, Op::Candidates, Op::Mask][i % 4],
                vocab,
                form.clusters[i % form.clusters.len()],
                params,
            )
        };
        let what = format!("{}, {kind}: {case:?}", form.name);
        let rows: Vec<f32> = (0..2)
            .flat_map(|_| large_row(kind, form, case.dtype, vocab, rng))
            .collect();
        fn rounded<T: Float>(rows: Vec<f32>) -> Vec<T> {
            rows.into_iter().map(T::round).collect()
        }
        match case.dtype {
            DType::F32 => case.check_rows::<f32>(rows, rng, &mut emulated, &what)?,
            DType::BF16 => case.check_rows::<bf16>(rounded(rows), rng, &mut emulated, &what)?,
            _ => case.check_rows::<f16>(rounded(rows), rng, &mut emulated, &what)?,
        };
    }
    emulated.end()
}

#[test]
fn large_sets_by_blocks() -> Result<()> {
    large_sets(&ONE_BLOCK)?;
    large_sets(&WIDE_BLOCK)
}

#[test]
fn large_sets_by_clusters() -> Result<()> {
    large_sets(&CLUSTER)
}

/// Logits so close to each other that the bins of a bracket have no width in f32, while their exponents are ordinary: a
/// temperature of 1e-38. The sample misleads, so that the bracket misses the cut.
#[test]
fn bins_without_width() -> Result<()> {
    const VOCAB: usize = 60_000;
    for form in [&ONE_BLOCK, &WIDE_BLOCK] {
        let mut emulated = form.start()?;
        let rng = &mut rng(5);
        for (temperature, crowd) in [
            (1.0, 1000),
            (1e-38, 500),
            (1e-38, 1000),
            (1e-38, 1100),
            (1e-38, 1200),
            (1e-38, 1300),
        ] {
            let mut row = vec![f32::NAN; VOCAB];
            // What the sample may see: pieces of four vectors, aligned.
            for piece in 0..256 {
                let vector = piece * (VOCAB / 4 - 3) / 256;
                let seen = 4 * (vector.max(3) - 3)..4 * (vector + 4);
                row[seen].fill_with(|| rng.random_range(-10.0..0.0));
            }
            row[0] = 0.0;
            let others = row.iter_mut().filter(|x| x.is_nan());
            for (i, x) in others.enumerate() {
                *x = match i {
                    i if i < 3000 => -2.38 - 1e-6 * i as f32,
                    i if i < 3000 + crowd => -2.9,
                    _ => -60.0,
                };
            }
            row.iter_mut().for_each(|x| *x *= temperature);
            let case = Case::of(
                Op::Mask,
                VOCAB,
                1,
                vec![Params {
                    p: 0.9,
                    temperature,
                    ..Params::NONE
                }],
            );
            let what = format!("{}: {crowd} at {temperature}", form.name);
            case.check_rows(row, rng, &mut emulated, &what)?;
        }
        emulated.end()?;
    }
    Ok(())
}

/// How often the row was gone over; a cluster has it on chip, and there looks for the elements of the bin that a cut is
/// in, and for a top-p's bracket at all of it.
#[test]
fn passes_are_counted() -> Result<()> {
    const VOCAB: usize = 33_000;
    for form in [&ONE_BLOCK, &WIDE_BLOCK, &CLUSTER] {
        let mut emulated = form.start()?;
        let rng = &mut rng(21);
        let looks = form.clusters.len().min(2) as u32 - 1;
        for (k, p, route, passes) in [
            (16_000, 1.0, FALLBACK, 1 + looks),
            (0, 0.9, FALLBACK | SECOND_PASS, 2 + 2 * looks),
            (0, 1.0, NO_TRUNCATION, 1),
            (50, 1.0, HIT, 1),
        ] {
            let case = Case::of(
                Op::Sample,
                VOCAB,
                form.clusters[0],
                vec![Params {
                    k,
                    p,
                    ..Params::NONE
                }],
            );
            let row = logits(Law::Normal, VOCAB, rng);
            let what = format!("{}: k {k}, p {p}", form.name);
            let counted = case.check_counted(row, rng, &mut emulated, &what)?[0];
            assert_eq!(
                (counted[0], counted[3]),
                (route, passes),
                "{what}: {counted:?}"
            );
        }
        emulated.end()?;
    }
    Ok(())
}

/// Every warp of a cluster has a part of a row on chip, so that as many parts as there are can show a top-k.
#[test]
fn every_part_proposes() -> Result<()> {
    let mut emulated = CLUSTER.start()?;
    let rng = &mut rng(23);
    for (vocab, blocks, k) in [(16_405, 8, 110), (50_257, 8, 122), (32_000, 6, 90)] {
        let mut case = Case::of(
            Op::Sample,
            vocab,
            blocks,
            vec![Params { k, ..Params::NONE }],
        );
        case.dtype = DType::BF16;
        let row: Vec<bf16> = logits(Law::Normal, vocab, rng)
            .iter()
            .map(|&x| bf16::from_f32(x))
            .collect();
        let what = format!("{vocab} logits, {blocks} blocks, k {k}");
        let counted = case.check_counted(row, rng, &mut emulated, &what)?[0];
        assert_eq!((counted[0], counted[3]), (HIT, 1), "{what}: {counted:?}");
    }
    emulated.end()
}

/// What a sample proposes: by the weight that a top-p spares, fewer than the lowest rank of the sample; for a top-k beyond
/// its ranks, by the normal law.
#[test]
fn a_sample_proposes_little() -> Result<()> {
    const VOCAB: usize = 33_000;
    for form in [&ONE_BLOCK, &LARGE_BLOCK] {
        let mut emulated = form.start()?;
        let rng = &mut rng(24);
        let mut row = logits(Law::Normal, VOCAB, rng);
        row.iter_mut().for_each(|x| *x = 2.2 * *x - 1.0);
        for part in 0..64 {
            row[part * VOCAB / 64 + rng.random_range(0..VOCAB / 65)] = rng.random_range(6.0..18.0);
        }
        for (k, p, least, most) in [(0, 0.9, 1, 100), (300, 1.0, 300, 4096)] {
            let params = Params {
                k,
                p,
                ..Params::NONE
            };
            let case = Case::of(Op::Sample, VOCAB, 1, vec![params]);
            let what = format!("{}: k {k}, p {p}", form.name);
            let [route, gathered, _, passes] =
                case.check_counted(row.clone(), rng, &mut emulated, &what)?[0];
            assert_eq!((route, passes), (HIT, 1), "{what}");
            assert!((least..=most).contains(&gathered), "{what}: {gathered}");
        }
        emulated.end()?;
    }
    Ok(())
}

/// A temperature alone: all that has mass may be drawn.
fn rows_without_limits(form: &Form) -> Result<()> {
    let mut emulated = form.start()?;
    let rng = &mut rng(700 + form.threads as u64);
    let kinds = [
        "normal",
        "equal",
        "one above",
        "masked",
        "few",
        "far from 0",
        "infinite",
    ];
    for i in 0..42 {
        let kind = kinds[i % kinds.len()];
        let vocab = match i % 3 {
            0 => rng.random_range(1..300),
            1 => rng.random_range(300..9_000),
            _ => rng.random_range(9_000..24_000),
        };
        let temperatures = [1.0, 0.7, 1.0, 1e-3, 3.0, 1e30, 1e-38, f32::INFINITY];
        let params = (0..2).map(|j| Params {
            temperature: temperatures[(i + 3 * j) % temperatures.len()],
            ..Params::NONE
        });
        let case = Case {
            dtype: [DType::F32, DType::F32, DType::BF16, DType::F16][i / 2 % 4],
            shift: i % 8,
            gap: i % 3,
            draws: [Draws::Random, Draws::Random, Draws::Lowest, Draws::Highest][i % 4],
            staged: form.clusters.len() > 1 && i % 4 > 0,
            ..Case::of(
                Op::Sample,
                vocab,
                form.clusters[i % form.clusters.len()],
                params.collect(),
            )
        };
        let mut rows = vec![];
        for _ in 0..2 {
            let mut row = logits(Law::Normal, vocab, rng);
            match kind {
                "equal" => row.fill(rng.random_range(-4.0..4.0)),
                "one above" => row[rng.random_range(0..vocab)] = 40.0,
                "masked" => row
                    .iter_mut()
                    .step_by(3)
                    .for_each(|x| *x = f32::NEG_INFINITY),
                "few" => {
                    row.fill(f32::NEG_INFINITY);
                    (0..3).for_each(|_| row[rng.random_range(0..vocab)] = 1.5);
                }
                "far from 0" => row.iter_mut().for_each(|x| *x += 300.0),
                "infinite" => (0..3).for_each(|_| row[rng.random_range(0..vocab)] = f32::INFINITY),
                _ => {}
            }
            rows.extend(row);
        }
        let what = format!("{}, {kind}: {case:?}", form.name);
        fn rounded<T: Float>(rows: Vec<f32>) -> Vec<T> {
            rows.into_iter().map(T::round).collect()
        }
        match case.dtype {
            DType::F32 => case.check_rows::<f32>(rows, rng, &mut emulated, &what)?,
            DType::BF16 => case.check_rows::<bf16>(rounded(rows), rng, &mut emulated, &what)?,
            _ => case.check_rows::<f16>(rounded(rows), rng, &mut emulated, &what)?,
        };
    }
    emulated.end()
}

#[test]
fn rows_without_limits_by_blocks() -> Result<()> {
    rows_without_limits(&ONE_BLOCK)?;
    rows_without_limits(&WIDE_BLOCK)
}

#[test]
fn rows_without_limits_by_clusters() -> Result<()> {
    rows_without_limits(&CLUSTER)
}

/// A min-p that lies between the least number above 0 and those below: no number has the key below that of 0.
#[test]
fn a_cut_at_zero() -> Result<()> {
    let mut emulated = ONE_BLOCK.start()?;
    let rng = &mut rng(33);
    for op in [Op::Mask, Op::Sample] {
        let mut row = vec![-1f32; 20_000];
        row.iter_mut().step_by(2).for_each(|x| *x = 0.0);
        row.iter_mut().step_by(3).for_each(|x| *x = -0.0);
        let case = Case::of(
            op,
            row.len(),
            1,
            vec![Params {
                min_p: 1.0,
                ..Params::NONE
            }],
        );
        case.check_rows(row, rng, &mut emulated, &format!("{op:?}"))?;
    }
    emulated.end()
}

/// A run of the ablation: the name of its .cu file.
struct Run {
    name: &'static str,
    /// Whether its truncation can hit.
    hits: bool,
    keeps_equals: bool,
}

const fn run(name: &'static str, hits: bool, keeps_equals: bool) -> Run {
    Run {
        name,
        hits,
        keeps_equals,
    }
}

/// Those that have a technique that no other has: the others combine the same.
const RUNS: [Run; 7] = [
    run("shipped_miss", false, false),
    run("a", true, false),
    run("d", false, true),
    run("f", true, true),
    run("h", false, true),
    run("i", true, true),
    run("j", false, true),
];

impl Run {
    fn launches(&self, cases: usize) -> Result<()> {
        let file = format!("../../kernels/sampling/ablation/run_{}.cu", self.name);
        let mut emulated =
            Emulated::start(self.name, "sampling.cpp", &[format!("-DRUN=\"{file}\"")])?;
        let rng = &mut rng(91);
        let mut taken = 0;
        for i in 0..cases {
            let case = Case::of_run(self, rng);
            let what = format!("run {} {i}", self.name);
            let routes = case.check::<f32>(rng, &mut emulated, &what)?;
            routes.iter().for_each(|route| taken |= route);
        }
        emulated.end()?;
        assert_eq!(taken & HIT != 0, self.hits, "run {}: a hit", self.name);
        Ok(())
    }
}

/// What `cargo bench --features cuda,ablation --bench kernels -- --ablation` measures.
#[test]
fn runs_of_the_ablation() -> Result<()> {
    let next = AtomicUsize::new(0);
    let work = || -> Result<()> {
        while let Some(run) = RUNS.get(next.fetch_add(1, Ordering::Relaxed)) {
            run.launches(6)?;
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let other = scope.spawn(work);
        work()?;
        other.join().expect("named above")
    })
}
