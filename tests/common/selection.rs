//! Cases of ragged top-K selection, for both devices, against an oracle of its own.

use super::rng;
use candle_core::{DType, Device, Result, Tensor, WithDType};
use candle_topk::selection::{
    Bounds, Order, Overrides, RowRoute, SelectionBuffers, TopK, Workspace, MAX_K,
};
use half::{bf16, f16};
use rand::rngs::StdRng;
use rand::Rng;

/// Laws of scores.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Law {
    Normal,
    Uniform,
    /// Normal, rounded to 1/64.
    Ties,
    /// Normal, raised at both ends, as rows of indexers are.
    Sink,
    /// One value.
    Equal,
    /// Two values, evenly.
    Two,
    /// 1.125 and its last ten bits.
    LowBits,
    /// [1, 1.245).
    Narrow,
    /// Sums of ReLUs: more than half are exactly 0.
    Relu,
    Ascending,
    Descending,
    /// Everything below 1e-38.
    Subnormal,
    /// -0, +0, infinities, NaN, subnormals and a few numbers.
    Special,
    /// Mostly NaN.
    Nan,
    /// Mostly -inf.
    Masked,
    /// One residue class of 64 is high, all else low.
    Alias,
    /// One residue class of 64 is low, all else high.
    AliasLow,
    /// One score of 1e30 in an even row.
    Outlier,
}

pub const LAWS: [Law; 18] = [
    Law::Normal,
    Law::Uniform,
    Law::Ties,
    Law::Sink,
    Law::Equal,
    Law::Two,
    Law::LowBits,
    Law::Narrow,
    Law::Relu,
    Law::Ascending,
    Law::Descending,
    Law::Subnormal,
    Law::Special,
    Law::Nan,
    Law::Masked,
    Law::Alias,
    Law::AliasLow,
    Law::Outlier,
];

fn normal(rng: &mut StdRng) -> f32 {
    let (u, v): (f32, f32) = (rng.random(), rng.random());
    (-2.0 * (1.0 - u).ln()).sqrt() * (std::f32::consts::TAU * v).cos()
}

pub fn scores(law: Law, n: usize, rng: &mut StdRng) -> Vec<f32> {
    let class = rng.random_range(0..64);
    let one = |i: usize, rng: &mut StdRng| match law {
        Law::Normal => normal(rng),
        Law::Uniform => rng.random(),
        Law::Ties => (normal(rng) * 64.0).round() / 64.0,
        Law::Sink => {
            let (i, n) = (i as f32, n as f32);
            normal(rng) + 1.2 * (-i / (0.06 * n)).exp() + 1.6 * (-(n - 1.0 - i) / (0.05 * n)).exp()
        }
        Law::Equal => 1.5,
        Law::Two => rng.random_range(0..2) as f32,
        Law::LowBits => f32::from_bits(0x3f90_0000 | rng.random_range(0..1024)),
        Law::Narrow => rng.random_range(1.0..1.245),
        Law::Relu => (normal(rng) - 0.3).max(0.0),
        Law::Ascending => i as f32 * 0.25,
        Law::Descending => -(i as f32),
        Law::Subnormal => {
            f32::from_bits(rng.random_range(0..0x0080_0000) | rng.random_range(0..2) << 31)
        }
        Law::Special => match rng.random_range(0..10) {
            0 => f32::NAN,
            1 => f32::INFINITY,
            2 => f32::NEG_INFINITY,
            3 => -0.0,
            4 => 0.0,
            5 => f32::from_bits(rng.random_range(1..9)),
            6 => -f32::from_bits(rng.random_range(1..9)),
            7 => -f32::NAN,
            _ => rng.random_range(-3..3) as f32,
        },
        Law::Nan if rng.random_bool(0.99) => f32::NAN,
        Law::Masked if rng.random_bool(0.99) => f32::NEG_INFINITY,
        Law::Nan | Law::Masked => normal(rng),
        Law::Alias => normal(rng) + if i % 64 == class { 100.0 } else { 0.0 },
        Law::AliasLow => normal(rng) + if i % 64 == class { 0.0 } else { 100.0 },
        Law::Outlier => rng.random(),
    };
    let mut row: Vec<f32> = (0..n).map(|i| one(i, rng)).collect();
    if law == Law::Outlier && n > 0 {
        row[n / 2] = 1e30;
    }
    row
}

/// The `k` best of a row in order: numbers as numbers, NaN last, equal ones by position. Written with
/// comparisons of floats, not of bits.
pub fn oracle(row: &[f32], start: usize, end: usize, k: usize) -> Vec<u32> {
    use std::cmp::Ordering;
    let order = |&a: &u32, &b: &u32| -> Ordering {
        let (x, y) = (row[a as usize], row[b as usize]);
        match (x.is_nan(), y.is_nan()) {
            (false, false) => y.partial_cmp(&x).expect("numbers").then(a.cmp(&b)),
            (true, true) => a.cmp(&b),
            (true, false) => Ordering::Greater,
            (false, true) => Ordering::Less,
        }
    };
    let mut best: Vec<u32> = (start as u32..end as u32).collect();
    if best.len() > k {
        best.select_nth_unstable_by(k - 1, order);
        best.truncate(k);
    }
    best.sort_unstable_by(order);
    best
}

/// A batch of rows in one tensor, and what lies around them.
pub struct Batch {
    pub rows: Vec<Vec<f32>>,
    /// Signed, and as far outside as they like.
    pub bounds: Vec<(i64, i64)>,
    pub n: usize,
}

impl Batch {
    pub fn new(law: Law, n: usize, bounds: Vec<(i64, i64)>, rng: &mut StdRng) -> Self {
        let rows = bounds.iter().map(|_| scores(law, n, rng)).collect();
        Self { rows, bounds, n }
    }

    /// Fills what lies outside the bounds.
    pub fn poison(mut self, with: f32) -> Self {
        for row in 0..self.rows.len() {
            let (start, end) = self.clamped(row);
            self.rows[row][..start].fill(with);
            self.rows[row][end..].fill(with);
        }
        self
    }

    pub fn clamped(&self, row: usize) -> (usize, usize) {
        let (start, end) = self.bounds[row];
        let n = self.n as i64;
        let (start, end) = (start.clamp(0, n) as usize, end.clamp(0, n) as usize);
        (start, end.max(start))
    }

    /// The scores with this pitch and this many elements before the first row; what lies between
    /// rows is 1e9.
    pub fn tensor<T: WithDType>(
        &self,
        pitch: usize,
        offset: usize,
        device: &Device,
    ) -> Result<Tensor> {
        let m = self.rows.len();
        let mut flat = vec![T::from_f64(1e9); offset + m * pitch];
        for (i, row) in self.rows.iter().enumerate() {
            let at = offset + i * pitch;
            for (to, &x) in flat[at..at + self.n].iter_mut().zip(row) {
                *to = narrow::<T>(x);
            }
        }
        let all = Tensor::from_vec(flat, offset + m * pitch, device)?;
        all.narrow(0, offset, m * pitch)?
            .reshape((m, pitch))?
            .narrow(1, 0, self.n)
    }

    /// What the dtype makes of the rows.
    fn rounded<T: WithDType>(&self, row: usize) -> Vec<f32> {
        self.rows[row]
            .iter()
            .map(|&x| narrow::<T>(x).to_f64() as f32)
            .collect()
    }
}

/// As Candle converts, and NaN to NaN.
fn narrow<T: WithDType>(x: f32) -> T {
    T::from_f64(x as f64)
}

/// The bounds as a tensor of a dtype.
pub fn bounds_tensor(bounds: &[i64], dtype: DType, device: &Device) -> Result<Tensor> {
    match dtype {
        DType::I32 => {
            let narrow = |&b: &i64| b.clamp(i32::MIN as i64, i32::MAX as i64) as i32;
            Tensor::from_vec(
                bounds.iter().map(narrow).collect::<Vec<i32>>(),
                bounds.len(),
                device,
            )
        }
        DType::U32 => {
            let narrow = |&b: &i64| b.clamp(i32::MIN as i64, i32::MAX as i64) as i32 as u32;
            Tensor::from_vec(
                bounds.iter().map(narrow).collect::<Vec<u32>>(),
                bounds.len(),
                device,
            )
        }
        _ => Tensor::from_vec(bounds.to_vec(), bounds.len(), device),
    }
}

/// What came of a selection, on the host.
pub struct Got {
    pub positions: Vec<Vec<u32>>,
    pub counts: Vec<u32>,
    pub values: Option<Vec<Vec<f32>>>,
}

/// Compares with the oracle: counts, sets, orders, values, and every slot written.
pub fn check<T: WithDType>(batch: &Batch, k: usize, order: Order, got: &Got, what: &str) {
    for row in 0..batch.rows.len() {
        let (start, end) = batch.clamped(row);
        let scores = batch.rounded::<T>(row);
        let want = oracle(&scores, start, end, k);
        check_row(
            &scores,
            &want,
            k,
            order,
            got,
            row,
            &format!("{what}, row {row} [{start}, {end})"),
        );
    }
}

fn check_row(
    scores: &[f32],
    want: &[u32],
    k: usize,
    order: Order,
    got: &Got,
    row: usize,
    what: &str,
) {
    let positions = &got.positions[row];
    let count = got.counts[row] as usize;
    assert_eq!(positions.len(), k, "{what}");
    assert_eq!(count, want.len(), "{what}: count");
    assert!(
        positions[count..].iter().all(|&p| p == u32::MAX),
        "{what}: what follows the last is no sentinel"
    );
    let mut by_position = want.to_vec();
    by_position.sort_unstable();
    let mut set = positions[..count].to_vec();
    set.sort_unstable();
    if set != by_position {
        let missing = by_position
            .iter()
            .filter(|p| set.binary_search(p).is_err())
            .count();
        let at = set.iter().zip(&by_position).position(|(a, b)| a != b);
        panic!("{what}: {missing} of {count} positions are missing, the first that differs is number {at:?}");
    }
    match order {
        Order::Unordered => {}
        Order::ByPosition => assert!(positions[..count] == by_position, "{what}: not by position"),
        Order::ByValue => {
            let at = positions.iter().zip(want).position(|(a, b)| a != b);
            assert!(
                positions[..count] == *want,
                "{what}: not by value, from number {at:?}"
            )
        }
    }
    if let Some(values) = &got.values {
        for (i, &value) in values[row].iter().enumerate() {
            let right = match positions.get(i).filter(|_| i < count) {
                Some(&p) => {
                    value == scores[p as usize] || (value.is_nan() && scores[p as usize].is_nan())
                }
                None => value == f32::NEG_INFINITY,
            };
            assert!(right, "{what}: value {i} is {value}");
        }
    }
}

/// Runs a batch through `select`.
pub fn run<T: WithDType>(
    batch: &Batch,
    top: TopK,
    device: &Device,
    (pitch, offset): (usize, usize),
    dtype: DType,
) -> Result<Got> {
    let scores = batch.tensor::<T>(pitch, offset, device)?;
    let starts: Vec<i64> = batch.bounds.iter().map(|b| b.0).collect();
    let ends: Vec<i64> = batch.bounds.iter().map(|b| b.1).collect();
    let starts = bounds_tensor(&starts, dtype, device)?;
    let ends = bounds_tensor(&ends, dtype, device)?;
    let selected = top.select(&scores, &Bounds::new(&starts, &ends))?;
    Ok(Got {
        positions: selected.positions.to_vec2()?,
        counts: selected.counts.to_vec1()?,
        values: selected.values.map(|v| v.to_vec2()).transpose()?,
    })
}

const ORDERS: [Order; 3] = [Order::Unordered, Order::ByPosition, Order::ByValue];

/// K by K, law by law: a long row, a short one, an empty one, a long one again.
pub fn laws<T: WithDType>(
    n: usize,
    ks: &[usize],
    overrides: Overrides,
    device: &Device,
) -> Result<()> {
    let mut rng = rng(n as u64);
    for (i, law) in LAWS.into_iter().enumerate() {
        for (j, &k) in ks.iter().enumerate() {
            let length = n as i64;
            let short = rng.random_range(0..=length.min(k as i64 + 1));
            let inner = rng.random_range(0..=length / 3);
            let bounds = vec![
                (0, length),
                (inner, inner + short),
                (5, 5),
                (inner, length - inner / 2),
            ];
            let batch = Batch::new(law, n, bounds, &mut rng);
            let order = ORDERS[(i + j) % 3];
            let top = TopK::new(k)?
                .order(order)
                .with_values()
                .with_overrides(overrides);
            let what = format!(
                "{law:?}, N {n}, K {k}, {order:?}, {:?}, {overrides:?}",
                T::DTYPE
            );
            let got = run::<T>(&batch, top, device, (n, 0), DType::I64)?;
            check::<T>(&batch, k, order, &got, &what);
        }
    }
    Ok(())
}

/// Lengths around K, vectors, tiles and splits, with what lies outside the bounds poisoned, at odd
/// pitches and offsets.
pub fn lengths<T: WithDType>(
    lengths: &[usize],
    k: usize,
    overrides: Overrides,
    device: &Device,
) -> Result<()> {
    let mut rng = rng(k as u64);
    let around = [0, 1, k - 1, k, k + 1];
    let all: Vec<usize> = lengths.iter().chain(&around).copied().collect();
    let n = all.iter().max().expect("lengths") + 40;
    let mut bounds = vec![
        (-3, -1),
        (0, -1),
        (7, 3),
        (i64::MIN, i64::MAX),
        (n as i64, n as i64 + 9),
    ];
    for &length in &all {
        for start in [0, rng.random_range(0..40)] {
            bounds.push((start, start + length as i64));
        }
    }
    for (i, with) in [f32::NAN, 1e9, f32::INFINITY].into_iter().enumerate() {
        let law = [Law::Normal, Law::Ties, Law::Sink][i];
        let dtype = [DType::I32, DType::I64, DType::U32][i];
        let order = ORDERS[i];
        let top = TopK::new(k)?.order(order).with_overrides(overrides);
        let top = if i == 2 { top.with_values() } else { top };
        let what = format!(
            "lengths, K {k}, {order:?}, poison {with}, {:?}, {overrides:?}",
            T::DTYPE
        );
        // As few rows at a time as any mapping takes.
        for bounds in bounds.chunks(16) {
            let batch = Batch::new(law, n, bounds.to_vec(), &mut rng).poison(with);
            let got = run::<T>(&batch, top, device, (n + i, [0, 1, 3][i]), dtype)?;
            check::<T>(&batch, k, order, &got, &what);
        }
    }
    Ok(())
}

/// As a `CustomOp1` and a `CustomOp2`, of one row and of several, whole and strided bounds.
pub fn through_candle_traits(device: &Device) -> Result<()> {
    let mut rng = rng(3);
    let (m, n, k) = (3, 5000, 64);
    let batch = Batch::new(
        Law::Normal,
        n,
        vec![(0, 5000), (0, 4000), (0, 10)],
        &mut rng,
    );
    let scores = batch.tensor::<f32>(n, 0, device)?;
    let top = TopK::new(k)?.order(Order::ByValue);
    let dense = scores.apply_op1_no_bwd(&top)?;
    assert_eq!(dense.dims(), [m, k]);
    let ends = Tensor::new(&[[5000i64, 0], [4000, 0], [10, 0]], device)?
        .narrow(1, 0, 1)?
        .squeeze(1)?;
    let ragged = scores.apply_op2_no_bwd(&ends, &top)?.to_vec2::<u32>()?;
    for (row, ragged) in ragged.iter().enumerate() {
        let whole = oracle(&batch.rows[row], 0, n, k);
        assert_eq!(dense.get(row)?.to_vec1::<u32>()?, whole);
        let one = scores.get(row)?.apply_op1_no_bwd(&top)?;
        assert_eq!(one.to_vec1::<u32>()?, whole);
        let mut want = oracle(&batch.rows[row], 0, batch.clamped(row).1, k);
        want.resize(k, u32::MAX);
        assert_eq!(*ragged, want);
    }
    // One row, and its bounds as a scalar.
    let end = Tensor::new(100u32, device)?;
    let one = top.select(&scores.get(1)?, &Bounds::ends(&end))?;
    assert_eq!(
        (one.positions.dims(), one.counts.dims()),
        (&[k][..], &[][..])
    );
    assert_eq!(
        one.positions.to_vec1::<u32>()?,
        oracle(&batch.rows[1], 0, 100, k)
    );
    // Starts alone, and a row that many share.
    let shared = scores.get(0)?.broadcast_as((2, n))?;
    let starts = Tensor::new(&[4900i32, 4990], device)?;
    let selected = top.select(&shared, &Bounds::full().with_start(&starts))?;
    assert_eq!(selected.counts.to_vec1::<u32>()?, [64, 10]);
    assert_eq!(
        selected.positions.get(0)?.to_vec1::<u32>()?,
        oracle(&batch.rows[0], 4900, n, k)
    );
    Ok(())
}

/// Buffers: fewer rows than fit, the rest untouched; values and routes.
pub fn buffers<T: WithDType>(device: &Device) -> Result<()> {
    let mut rng = rng(11);
    let (n, k) = (20_000, 100);
    let mut out = SelectionBuffers::new(4, k, device)?
        .with_values()?
        .with_routes()?;
    let mut workspace = Workspace::new(device)?;
    let top = TopK::new(k)?.order(Order::ByPosition).with_values();
    for bounds in [
        vec![(0, 20_000); 4],
        vec![(0, 20_000), (10, 30)],
        vec![(0, 0), (0, 9), (0, 19_999)],
    ] {
        let m = bounds.len();
        let before = out.selection()?;
        let batch = Batch::new(Law::Normal, n, bounds, &mut rng);
        let scores = batch.tensor::<T>(n, 0, device)?;
        let pair = |at: fn(&(i64, i64)) -> i64| {
            bounds_tensor(
                &batch.bounds.iter().map(at).collect::<Vec<_>>(),
                DType::I32,
                device,
            )
        };
        let (starts, ends) = (pair(|b| b.0)?, pair(|b| b.1)?);
        top.select_into(
            &scores,
            &Bounds::new(&starts, &ends),
            &mut out,
            &mut workspace,
        )?;
        let after = out.selection()?;
        let got = Got {
            positions: after.positions.to_vec2()?,
            counts: after.counts.to_vec1()?,
            values: after.values.map(|v| v.to_vec2()).transpose()?,
        };
        check::<T>(&batch, k, Order::ByPosition, &got, "buffers");
        let untouched = before.positions.to_vec2::<u32>()?;
        assert_eq!(
            got.positions[m..],
            untouched[m..],
            "rows that were not selected from"
        );
        assert_eq!(out.routes()?.len(), 4);
    }
    Ok(())
}

/// The routes of a batch.
pub fn routes_of<T: WithDType>(
    batch: &Batch,
    top: TopK,
    device: &Device,
) -> Result<(Got, Vec<RowRoute>)> {
    let m = batch.rows.len();
    let mut out = SelectionBuffers::new(m, top.k(), device)?
        .with_values()?
        .with_routes()?;
    let mut workspace = Workspace::new(device)?;
    let scores = batch.tensor::<T>(batch.n, 0, device)?;
    let ends: Vec<i64> = batch.bounds.iter().map(|b| b.1).collect();
    let ends = bounds_tensor(&ends, DType::I64, device)?;
    top.select_into(&scores, &Bounds::ends(&ends), &mut out, &mut workspace)?;
    let selected = out.selection()?;
    let got = Got {
        positions: selected.positions.to_vec2()?,
        counts: selected.counts.to_vec1()?,
        values: None,
    };
    Ok((got, out.routes()?))
}

/// What users of such kernels reported elsewhere.
pub fn reported_elsewhere(device: &Device) -> Result<()> {
    let select = |row: &[f32], k: usize| -> Result<Vec<u32>> {
        let scores = Tensor::from_slice(row, row.len(), device)?;
        scores
            .apply_op1_no_bwd(&TopK::new(k)?.order(Order::ByPosition))?
            .to_vec1()
    };
    // Exactly three of [1, 2, 2, 2, 3], by one rule.
    assert_eq!(select(&[1., 2., 2., 2., 3.], 3)?, [1, 2, 4]);
    // 100 winners and 8,220 zeros for 2,048 places; more than fit in one bin.
    let mut row = vec![0f32; 8320];
    for i in 0..100 {
        row[83 * i + 7] = 1.0 + i as f32;
    }
    let got = select(&row, 2048)?;
    let mut want = oracle(&row, 0, row.len(), 2048);
    want.sort_unstable();
    assert_eq!(got, want);
    // A row with exactly K scores, and one with one more.
    let row: Vec<f32> = (0..2049).map(|i| (i * 37 % 100) as f32).collect();
    assert_eq!(select(&row[..2048], 2048)?, (0..2048).collect::<Vec<u32>>());
    assert_eq!(select(&row, 2048)?.len(), 2048);
    // A length of -1, as graph padding gives it: in U32 it is 2^32 - 1.
    let scores = Tensor::from_slice(&row, (1, row.len()), device)?;
    for end in [
        Tensor::new(&[-1i32], device)?,
        Tensor::new(&[u32::MAX], device)?,
    ] {
        let got = TopK::new(8)?.select(&scores, &Bounds::ends(&end))?;
        assert_eq!(got.counts.to_vec1::<u32>()?, [0]);
        assert_eq!(got.positions.to_vec2::<u32>()?, [[u32::MAX; 8]]);
    }
    Ok(())
}

/// Errors name the op, the argument, what came and what is accepted.
pub fn refusals(device: &Device) -> Result<()> {
    let refused = |result: Result<()>, parts: &[&str]| {
        let message = result.expect_err("refused").to_string();
        for part in parts.iter().chain(&["select"]) {
            assert!(message.contains(part), "{message}: no {part}");
        }
    };
    refused(TopK::new(0).map(drop), &["k is 0", "4096"]);
    refused(TopK::new(MAX_K + 1).map(drop), &["4097"]);
    let top = TopK::new(4)?;
    let scores = Tensor::zeros((2, 10), DType::F32, device)?;
    let full = Bounds::full();
    let of = |scores: &Tensor| top.select(scores, &Bounds::full()).map(drop);
    refused(of(&scores.to_dtype(DType::F64)?), &["F64", "BF16"]);
    refused(of(&scores.reshape((1, 2, 10))?), &["[1, 2, 10]", "[M, N]"]);
    refused(of(&scores.t()?), &["stride 10", "contiguous"]);
    refused(of(&Tensor::zeros((2, 0), DType::F32, device)?), &["0 wide"]);
    for ends in [
        Tensor::zeros(3, DType::U32, device)?,
        Tensor::zeros(2, DType::F32, device)?,
        Tensor::zeros((2, 1), DType::I64, device)?,
    ] {
        refused(
            top.select(&scores, &Bounds::ends(&ends)).map(drop),
            &["end", "I64"],
        );
        refused(
            scores.apply_op2_no_bwd(&ends, &top).map(drop),
            &["end", "[2]"],
        );
    }
    let mut workspace = Workspace::new(device)?;
    let mut small = SelectionBuffers::new(1, 4, device)?;
    refused(
        top.select_into(&scores, &full, &mut small, &mut workspace),
        &["hold 1 rows"],
    );
    let mut other = SelectionBuffers::new(2, 5, device)?;
    refused(
        top.select_into(&scores, &full, &mut other, &mut workspace),
        &["4", "5"],
    );
    let mut plain = SelectionBuffers::new(2, 4, device)?;
    refused(
        top.with_values()
            .select_into(&scores, &full, &mut plain, &mut workspace),
        &["with_values"],
    );
    refused(plain.routes().map(drop), &["with_routes"]);
    refused(SelectionBuffers::new(0, 4, device).map(drop), &["0"]);
    refused(SelectionBuffers::new(1, 0, device).map(drop), &["4096"]);
    // 2 TiB.
    refused(
        SelectionBuffers::new((1 << 27) - 1, 4096, device).map(drop),
        &["134217727", "memory"],
    );
    // No rows are no error.
    let none = top.select(&scores.narrow(0, 0, 0)?, &full)?;
    assert_eq!(none.positions.dims(), [0, 4]);
    Ok(())
}

/// For `T` in each dtype of scores.
pub fn each_dtype(
    f32: impl Fn() -> Result<()>,
    bf16: impl Fn() -> Result<()>,
    f16: impl Fn() -> Result<()>,
) -> Result<()> {
    f32()?;
    bf16()?;
    f16()
}

/// The same case in each dtype.
#[macro_export]
macro_rules! in_each_dtype {
    ($case:ident, $($argument:expr),*) => {
        $crate::common::selection::each_dtype(
            || $crate::common::selection::$case::<f32>($($argument),*),
            || $crate::common::selection::$case::<half::bf16>($($argument),*),
            || $crate::common::selection::$case::<half::f16>($($argument),*),
        )
    };
}

/// So that both programs name them alike.
pub type Half = (bf16, f16);
