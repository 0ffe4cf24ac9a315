//! What the tests compare with: a stable sort and sums in f64, written without a look at the crate.

#![allow(dead_code)] // Each test binary uses its part.

pub mod attention;
pub mod cases;
pub mod dsa;
pub mod into;
pub mod machine;
pub mod processor;
pub mod selection;

use candle_topk::sampling::{Mass, Truncation};
use half::{bf16, f16};
use rand::{rngs::StdRng, Rng, SeedableRng};

/// One row's parameters, as a user would write them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Params {
    pub k: usize,
    pub p: f32,
    pub min_p: f32,
    pub temperature: f32,
    pub mass: Mass,
}

impl Params {
    pub const NONE: Self = Self {
        k: 0,
        p: 1.0,
        min_p: 0.0,
        temperature: 1.0,
        mass: Mass::Renormalized,
    };

    pub fn truncation(&self) -> Truncation {
        Truncation::new()
            .with_top_k(self.k)
            .with_top_p(self.p)
            .with_min_p(self.min_p)
            .with_temperature(self.temperature)
            .with_mass(self.mass)
    }
}

/// A row in the order of selection, sorted once.
pub struct Oracle<'a> {
    row: &'a [f32],
    /// Softmax weights in the order, relative to the greatest, by the bits of the temperature.
    weights: std::cell::RefCell<std::collections::HashMap<u32, std::rc::Rc<Vec<f64>>>>,
    /// The ids of everything above -inf, best first.
    pub order: Vec<u32>,
}

/// The set that a stable sort gives, and how far rounding may move its end.
pub struct Expected {
    /// The size of the exact set.
    pub len: usize,
    /// The least and the greatest size that the window around p (and f32 at the edge of min-p)
    /// admits.
    pub least: usize,
    pub most: usize,
}

impl<'a> Oracle<'a> {
    pub fn new(row: &'a [f32]) -> Self {
        let mut order: Vec<u32> = (0..row.len() as u32)
            .filter(|&i| row[i as usize] > f32::NEG_INFINITY)
            .collect();
        order.sort_by(|&a, &b| row[b as usize].partial_cmp(&row[a as usize]).unwrap());
        Self {
            row,
            weights: Default::default(),
            order,
        }
    }

    /// Softmax weights in the order, relative to the greatest.
    pub fn weights(&self, temperature: f32) -> std::rc::Rc<Vec<f64>> {
        let mut known = self.weights.borrow_mut();
        let compute = || std::rc::Rc::new(self.weights_at(temperature));
        known
            .entry(temperature.to_bits())
            .or_insert_with(compute)
            .clone()
    }

    fn weights_at(&self, temperature: f32) -> Vec<f64> {
        let Some(&best) = self.order.first() else {
            return vec![];
        };
        let max = self.row[best as usize] as f64;
        let weight = |&i: &u32| {
            let x = self.row[i as usize] as f64;
            if x == max {
                1.0
            } else if max == f64::INFINITY {
                0.0
            } else {
                ((x - max) / temperature as f64).exp()
            }
        };
        self.order.iter().map(weight).collect()
    }

    pub fn expected(&self, params: &Params) -> Expected {
        let exactly = |len| Expected {
            len,
            least: len,
            most: len,
        };
        if self.order.is_empty() {
            return exactly(0);
        }
        if params.temperature == 0.0 {
            return exactly(1);
        }
        let weights = self.weights(params.temperature);
        let limit = match params.k {
            0 => self.order.len(),
            k => k.min(self.order.len()),
        };
        let mut expected = exactly(limit);
        if params.p < 1.0 {
            let p = params.p as f64;
            let whole: f64 = match params.mass {
                Mass::Renormalized => weights[..limit].iter().sum(),
                Mass::Joint => weights.iter().sum(),
            };
            let window = 4e-6 * p * (1.0 - p) + 1e-9;
            let (mut len, mut least, mut most) = (0, 0, 0);
            let mut before = 0.0;
            for weight in &weights[..limit] {
                let share = before / whole;
                len += (share < p) as usize;
                least += (share < p - window) as usize;
                most += (share < p + window) as usize;
                before += weight;
            }
            expected = Expected {
                len: len.max(1),
                least: least.max(1),
                most: most.max(1),
            };
        }
        if params.min_p > 0.0 {
            let count = |bar: f64| weights.iter().take_while(|&&w| w >= bar).count().max(1);
            let min_p = params.min_p as f64;
            expected.len = expected.len.min(count(min_p));
            expected.least = expected.least.min(count(min_p * (1.0 + 4e-6)));
            expected.most = expected.most.min(count(min_p * (1.0 - 4e-6)));
        }
        expected
    }

    /// Asserts that `kept` (ids in any order) is a prefix of the order whose size is the expected
    /// one, up to the window.
    pub fn check(&self, params: &Params, kept: &[u32], what: &str) {
        if let Err(mismatch) = self.compare(params, kept) {
            panic!("{what}: {mismatch}");
        }
    }

    /// The first mismatch that [`Oracle::check`] would panic at.
    pub fn compare(&self, params: &Params, kept: &[u32]) -> Result<(), String> {
        let expected = self.expected(params);
        if !(expected.least..=expected.most).contains(&kept.len()) {
            return Err(format!(
                "{} kept, {} expected ({} to {} admitted) for {params:?}",
                kept.len(),
                expected.len,
                expected.least,
                expected.most
            ));
        }
        let mut wanted = vec![false; self.row.len()];
        for &id in &self.order[..kept.len()] {
            wanted[id as usize] = true;
        }
        for &id in kept {
            // Cleared, so that an id that comes twice is found too.
            if !wanted.get_mut(id as usize).is_some_and(std::mem::take) {
                return Err(format!(
                    "id {id} ({:?}) does not belong to the {} best, for {params:?}",
                    self.row.get(id as usize),
                    kept.len()
                ));
            }
        }
        Ok(())
    }
}

pub fn rng(seed: u64) -> StdRng {
    StdRng::seed_from_u64(seed)
}

pub fn normal(rng: &mut StdRng) -> f32 {
    let u: f64 = 1.0 - rng.random::<f64>();
    let v: f64 = rng.random();
    ((-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos()) as f32
}

/// Laws of logits.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Law {
    /// Flat: a nucleus of 0.9 holds most of the vocabulary.
    Normal,
    /// normal(-1, 2.2) with 64 logits replaced by uniform(6, 18), like a language model's.
    Peaked,
    /// rank^-1.1, shuffled.
    Zipf,
    /// A few values, so that every cut falls among ties.
    Ties,
    /// 99 in 100 are -inf, as under a grammar.
    Masked,
}

pub const LAWS: [Law; 5] = [Law::Normal, Law::Peaked, Law::Zipf, Law::Ties, Law::Masked];

pub fn logits(law: Law, vocab: usize, rng: &mut StdRng) -> Vec<f32> {
    match law {
        Law::Normal => (0..vocab).map(|_| normal(rng)).collect(),
        Law::Peaked => {
            let mut row: Vec<f32> = (0..vocab).map(|_| normal(rng) * 2.2 - 1.0).collect();
            for _ in 0..64 {
                let at = rng.random_range(0..vocab);
                row[at] = rng.random_range(6.0..18.0);
            }
            row
        }
        Law::Zipf => {
            let mut row: Vec<f32> = (1..=vocab).map(|r| -1.1 * (r as f32).ln()).collect();
            for i in (1..vocab).rev() {
                row.swap(i, rng.random_range(0..=i));
            }
            row
        }
        Law::Ties => (0..vocab)
            .map(|_| (normal(rng) * 2.0).round() * 0.5)
            .collect(),
        Law::Masked => (0..vocab)
            .map(|_| match rng.random_range(0..100) {
                0 => normal(rng) * 3.0,
                _ => f32::NEG_INFINITY,
            })
            .collect(),
    }
}

/// A dtype of logits.
pub trait Float: candle_core::WithDType {
    fn round(x: f32) -> Self;
    fn wide(self) -> f32;
    fn bytes(self) -> Vec<u8>;
}

impl Float for f32 {
    fn round(x: f32) -> Self {
        x
    }
    fn wide(self) -> f32 {
        self
    }
    fn bytes(self) -> Vec<u8> {
        self.to_ne_bytes().to_vec()
    }
}

impl Float for f16 {
    fn round(x: f32) -> Self {
        f16::from_f32(x)
    }
    fn wide(self) -> f32 {
        self.to_f32()
    }
    fn bytes(self) -> Vec<u8> {
        self.to_ne_bytes().to_vec()
    }
}

impl Float for bf16 {
    fn round(x: f32) -> Self {
        bf16::from_f32(x)
    }
    fn wide(self) -> f32 {
        self.to_f32()
    }
    fn bytes(self) -> Vec<u8> {
        self.to_ne_bytes().to_vec()
    }
}

/// How many standard deviations the chi-square of `counts` lies above what draws from `probs` give.
/// Neighbouring categories are pooled until each pool expects at least 50.
pub fn chi_square_excess(counts: &[u64], probs: &[f64]) -> f64 {
    let draws: u64 = counts.iter().sum();
    let (mut chi, mut pools) = (0.0, 0);
    let (mut seen, mut wanted) = (0.0, 0.0);
    let (mut rest_seen, mut rest_wanted) = (0.0, 0.0);
    for (&count, &prob) in counts.iter().zip(probs) {
        seen += count as f64;
        wanted += prob * draws as f64;
        if wanted >= 50.0 {
            chi += (seen - wanted).powi(2) / wanted;
            pools += 1;
            (seen, wanted) = (0.0, 0.0);
        }
        (rest_seen, rest_wanted) = (seen, wanted);
    }
    if rest_wanted > 0.0 {
        chi += (rest_seen - rest_wanted).powi(2) / rest_wanted.max(1.0);
        pools += 1;
    }
    let freedom = (pools - 1).max(1) as f64;
    (chi - freedom) / (2.0 * freedom).sqrt()
}
