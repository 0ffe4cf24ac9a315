//! Selection, in every mapping, against a sort.

use super::common::selection::{oracle, scores, Law, LAWS};
use super::common::{rng, Float};
use super::Emulated;
use candle_core::{DType, Result};
use candle_topk::selection::{
    plan, DeviceProps, Mapping, Overrides, Plan, PlanRequest, View, MAX_K,
};
use half::{bf16, f16};
use rand::{rngs::StdRng, Rng};
use std::collections::BTreeSet;

/// A launch: `Case` of selection.cpp, and what follows it.
#[derive(Debug)]
struct Case {
    plan: Plan,
    dtype: DType,
    law: Law,
    width: usize,
    /// Scores between the rows, and before the first one after a boundary of 16 bytes.
    gap: usize,
    shift: usize,
    k: usize,
    order: u32,
    values: bool,
    /// The rows' starts and ends as given, if they are.
    bounds: u32,
    rows: Vec<[i64; 2]>,
}

const UNORDERED: u32 = 0;
const BY_POSITION: u32 = 1;

impl Case {
    /// None where no such mapping holds such rows.
    fn random(mapping: Mapping, rng: &mut StdRng) -> Option<Self> {
        let any = |rng: &mut StdRng, of: &[usize]| of[rng.random_range(0..of.len())];
        let width = match rng.random_range(0..4) {
            0 => rng.random_range(1..600),
            1 => any(rng, &[2048, 4095, 4096, 4097, 8191, 8192, 8193]),
            // More than one round of a cluster's tiles.
            2 if matches!(mapping, Mapping::Exact(_)) => rng.random_range(100_000..700_000),
            _ => rng.random_range(600..30_000),
        };
        let dtype = [DType::F32, DType::F32, DType::BF16, DType::F16][rng.random_range(0..4)];
        // Around what a block holds.
        let width = match (mapping, dtype) {
            (Mapping::Held, _) if rng.random_range(0..4) > 0 => width,
            (Mapping::Held, DType::F32) => any(rng, &[32_769, 36_861, 36_864, 40_957, 40_960]),
            (Mapping::Held, _) => any(rng, &[49_153, 65_528, 65_535, 65_536]),
            _ => width,
        };
        let gap = any(rng, &[0, 0, 1, 2]);
        let shift = any(rng, &[0, 0, 1, 3, 7]);
        let k = any(rng, &[1, 7, 64, 512, 2048, MAX_K]);
        let pick = rng.random_range(0..8);
        let plan = plan(&PlanRequest {
            k,
            m: 2,
            n: width,
            // As the CUDA backend plans for rows that begin anywhere.
            pitch: (width + gap) | (shift > 0) as usize,
            dtype,
            device: DeviceProps::H200,
            overrides: Overrides {
                mapping: Some(mapping),
                stride: [
                    None,
                    None,
                    None,
                    None,
                    Some(1),
                    Some(16),
                    Some(64),
                    Some(256),
                ][pick],
                margin: [None, None, None, Some(1.0)][pick / 2],
                band: [None, Some(false)][rng.random_range(0..2)],
                view: [None, Some(View::FixedStride)][rng.random_range(0..2)],
            },
        })
        .ok()?;
        let bounds = rng.random_range(0..5);
        let rows: Vec<_> = (0..2)
            .map(|_| {
                let n = width as i64;
                let near = |at: i64, rng: &mut StdRng| at + rng.random_range(-2..3);
                let end = match rng.random_range(0..6) {
                    0 => near(k as i64, rng),
                    1 => rng.random_range(-5..n + 9),
                    _ => near(n, rng),
                };
                let start = match rng.random_range(0..3) {
                    0 => rng.random_range(-3..n),
                    _ => 0,
                };
                match bounds {
                    0 => [0, n],
                    1 => [0, end],
                    _ => [start, end],
                }
            })
            .collect();
        Some(Self {
            plan,
            dtype,
            law: LAWS[rng.random_range(0..LAWS.len())],
            width,
            gap,
            shift,
            k,
            order: rng.random_range(0..3),
            values: rng.random(),
            bounds,
            rows,
        })
    }

    fn check<T: Float>(&self, rng: &mut StdRng, emulated: &mut Emulated, what: &str) -> Vec<u32> {
        let what = format!("{what}: {self:?}");
        let (m, k) = (self.rows.len(), self.k);
        let rows: Vec<Vec<T>> = self
            .rows
            .iter()
            .map(|&[start, end]| {
                let mut row = scores(self.law, self.width, rng);
                // What lies outside the bounds would win.
                for (i, x) in row.iter_mut().enumerate() {
                    if (i as i64) < start || i as i64 >= end {
                        *x = [1e9, f32::NAN][i % 2];
                    }
                }
                row.into_iter().map(T::round).collect()
            })
            .collect();
        let number = |x: usize| x as u32;
        let mapping = match self.plan.mapping {
            Mapping::Short => 0,
            Mapping::Block => 1,
            Mapping::RowLocal => 2,
            Mapping::Split(_) => 3,
            Mapping::Cluster(_) => 4,
            Mapping::Exact(_) => 5,
            Mapping::Held => 6,
        };
        let header = [
            mapping,
            match self.dtype {
                DType::F32 => 0,
                DType::BF16 => 1,
                _ => 2,
            },
            number(m),
            number(self.width),
            number(self.width + self.gap),
            number(self.shift),
            number(k),
            self.order,
            self.values as u32,
            self.bounds,
            self.plan.mapping.blocks(),
            number(self.plan.capacity),
            self.plan.stride,
            (self.plan.view == View::FixedStride) as u32,
            self.plan.band as u32,
            number(self.plan.shared_bytes),
            number(self.plan.workspace_bytes / 4),
            rng.random(),
        ];
        let floats = [self.plan.margin.unwrap_or(0.0), self.plan.deviations];
        let mut bytes: Vec<u8> = header.iter().flat_map(|x| x.to_ne_bytes()).collect();
        bytes.extend(floats.iter().flat_map(|x| x.to_ne_bytes()));
        bytes.extend(self.rows.iter().flatten().flat_map(|x| x.to_ne_bytes()));
        for row in &rows {
            bytes.extend(row.iter().flat_map(|x| x.bytes()));
            bytes.extend((0..self.gap).flat_map(|_| T::round(1e9).bytes()));
        }
        emulated.say(&bytes, &what);

        let counts = emulated.words(m, &what);
        let positions = emulated.words(m * k, &what);
        let routes = emulated.words(4 * m, &what);
        let values = match self.values {
            true => emulated.words(m * k, &what),
            false => vec![],
        };
        for (r, (row, [start, end])) in rows.iter().zip(&self.rows).enumerate() {
            let wide: Vec<f32> = row.iter().map(|x| x.wide()).collect();
            let inside = |bound: i64| bound.clamp(0, self.width as i64) as usize;
            let (start, end) = (inside(*start), inside(*end));
            let mut wanted = oracle(&wide, start, end.max(start), k);
            assert_eq!(counts[r] as usize, wanted.len(), "{what}, row {r}: count");
            let (own, rest) = positions[r * k..][..k].split_at(wanted.len());
            assert!(rest.iter().all(|&p| p == u32::MAX), "{what}, row {r}: rest");
            if self.values {
                let beyond = &values[r * k..][wanted.len()..k];
                let none = f32::NEG_INFINITY.to_bits();
                assert!(beyond.iter().all(|&v| v == none), "{what}, row {r}: rest");
                let own_values = &values[r * k..][..wanted.len()];
                for (&position, &value) in own.iter().zip(own_values) {
                    let (x, value) = (wide[position as usize], f32::from_bits(value));
                    let same = x == value || (x.is_nan() && value.is_nan());
                    assert!(same, "{what}, row {r}: value {value} of {x}");
                }
            }
            let mut own = own.to_vec();
            if self.order == UNORDERED {
                own.sort_unstable();
            }
            if self.order == UNORDERED || self.order == BY_POSITION {
                wanted.sort_unstable();
            }
            let at = own.iter().zip(&wanted).position(|(g, w)| g != w);
            assert_eq!(at, None, "{what}, row {r}");
        }
        routes.chunks(4).map(|row| row[0]).collect()
    }
}

/// `routes`: those that rows must have taken, or the test shows too little.
fn random_launches(
    seed: u64,
    name: &str,
    mappings: &[Mapping],
    cases: usize,
    routes: &[u32],
) -> Result<()> {
    let mut emulated = Emulated::start(&format!("select-{name}"), "selection.cpp", &[])?;
    let rng = &mut rng(seed);
    let mut taken = BTreeSet::new();
    let (mut done, mut refused) = (0, 0);
    while done < cases {
        let mapping = mappings[rng.random_range(0..mappings.len())];
        let Some(case) = Case::random(mapping, rng) else {
            refused += 1;
            assert!(refused < 10 * cases, "{name}: the planner refuses them all");
            continue;
        };
        let what = format!("{name} {done}");
        taken.extend(match case.dtype {
            DType::F32 => case.check::<f32>(rng, &mut emulated, &what),
            DType::BF16 => case.check::<bf16>(rng, &mut emulated, &what),
            _ => case.check::<f16>(rng, &mut emulated, &what),
        });
        done += 1;
    }
    for route in routes {
        assert!(
            taken.contains(route),
            "{name}: no row took route {route} of {taken:?}"
        );
    }
    emulated.end()
}

// `Route` in kernels/selection/select.cuh.
const DIRECT: u32 = 1;
const PRIMARY: u32 = 2;
const BAND: u32 = 3;
const RECOVERED: u32 = 4;
const SAMPLED: &[u32] = &[DIRECT, PRIMARY, RECOVERED];

#[test]
fn short() -> Result<()> {
    random_launches(701, "short", &[Mapping::Short], 300, &[DIRECT])
}

#[test]
fn block() -> Result<()> {
    let mappings = [Mapping::Block, Mapping::RowLocal];
    random_launches(
        702,
        "block",
        &mappings,
        300,
        &[DIRECT, PRIMARY, BAND, RECOVERED],
    )
}

#[test]
fn held() -> Result<()> {
    let routes = &[DIRECT, PRIMARY, RECOVERED];
    random_launches(706, "held", &[Mapping::Held], 200, routes)
}

#[test]
fn split() -> Result<()> {
    let mappings = [2, 4, 8, 16].map(Mapping::Split);
    random_launches(703, "split", &mappings, 100, SAMPLED)
}

#[test]
fn cluster() -> Result<()> {
    let mappings = [2, 4, 8, 16].map(Mapping::Cluster);
    random_launches(704, "cluster", &mappings, 80, SAMPLED)
}

#[test]
fn exact() -> Result<()> {
    let mappings = [1, 2, 4, 8, 16].map(Mapping::Exact);
    random_launches(705, "exact", &mappings, 120, &[DIRECT])
}
