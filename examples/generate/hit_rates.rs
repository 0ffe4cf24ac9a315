//! How often sigma-truncation hits on real logits (table 1 of the paper), from the kernels' own
//! counters: a model reads a text, and its logits at each position go through the ops.

use anyhow::{ensure, Result};
use candle_core::{DType, Tensor};
use candle_topk::sampling::{
    mask, mask_rows, CandidateBuffers, Mass, Routes, SampleBuffers, Truncation,
};
use serde_json::{json, Value as Json};

use crate::model::Model;

/// The modes, by the names that lines give them.
fn modes() -> [(&'static str, Truncation); 3] {
    let (k, p) = (50, 0.9);
    [
        ("k50", Truncation::new().with_top_k(k)),
        ("p0.9", Truncation::new().with_top_p(p)),
        ("k50p0.9", Truncation::new().with_top_k(k).with_top_p(p)),
    ]
}

/// What is counted over the positions of a text.
#[derive(Default)]
struct Counts {
    routes: Vec<Routes>,
    /// The true sizes of the kept sets.
    sizes: Vec<u32>,
    /// Of the whole distribution: what lies above the threshold, where there was a hit, and what is
    /// kept.
    gathered_mass: Vec<f32>,
    kept_mass: Vec<f32>,
}

/// The mass of the whole distribution that F32 `masked` [B, V] keeps of `logits`.
fn mass(logits: &Tensor, masked: &Tensor) -> Result<Vec<f32>> {
    let share = (masked.log_sum_exp(1)? - logits.log_sum_exp(1)?)?.exp()?;
    Ok(share.to_vec1()?)
}

/// Pieces of the text that the model reads side by side.
pub const PIECES: usize = 64;

/// A line a mode, over pieces of `length` tokens from the whole text. The model reads one token of
/// each at a time: it gives the logits of a sequence's last position alone.
pub fn measure(model: &mut Model, text: &[u32], length: usize) -> Result<Vec<Json>> {
    let batch = PIECES;
    let device = model.device().clone();
    ensure!(
        device.is_cuda(),
        "--hit-rates reads the route counters of the CUDA kernels, and this runs on the CPU: build with --features cuda and run on a GPU"
    );
    ensure!(
        length <= model.context,
        "--sample-len is {length}, the model's context is {}",
        model.context
    );
    ensure!(
        text.len() >= batch * length,
        "--hit-rates: the text has {} tokens, {batch} pieces of {length} take {}: give a longer text or a lower --sample-len",
        text.len(),
        batch * length
    );
    // Spread over the whole text.
    let stride = text.len() / batch;
    let modes = modes();
    let mut counts: [Counts; 3] = Default::default();
    let mut samples = Vec::new();
    let mut sets = Vec::new();
    for (_, truncation) in &modes {
        let mut sample = SampleBuffers::new(batch, &device)?.with_routes()?;
        sample.set_params(&vec![*truncation; batch])?;
        samples.push(sample);
        // For the sizes alone.
        let mut set = CandidateBuffers::new(batch, 1, &device)?;
        set.set_params(&vec![*truncation; batch])?;
        sets.push(set);
    }
    let (mut vocab, mut dtype) = (0, String::new());
    model.reset();
    for position in 0..length {
        let tokens: Vec<u32> = (0..batch).map(|i| text[i * stride + position]).collect();
        let input = Tensor::from_vec(tokens, (batch, 1), &device)?;
        let logits = model.forward_batch(&input, position)?;
        (vocab, dtype) = (logits.dim(1)?, logits.dtype().as_str().to_string());
        let wide = logits.to_dtype(DType::F32)?;
        for (i, (_, truncation)) in modes.iter().enumerate() {
            let counts = &mut counts[i];
            samples[i].sample_into(&logits, Mass::Renormalized)?;
            let routes = samples[i].routes()?;
            sets[i].candidates_into(&logits, Mass::Renormalized)?;
            counts
                .sizes
                .extend(sets[i].candidates()?.counts.to_vec1::<u32>()?);
            counts
                .kept_mass
                .extend(mass(&wide, &mask(&wide, *truncation)?)?);
            // What was gathered is what lies above a threshold: the best so many.
            let gathered: Vec<Truncation> = routes
                .iter()
                .map(|r| Truncation::new().with_top_k(r.gathered() as usize))
                .collect();
            let rows = Truncation::rows(&gathered, &device)?;
            let above = mass(&wide, &mask_rows(&wide, &rows, Mass::Renormalized)?)?;
            let hits = routes.iter().zip(above).filter(|(r, _)| r.hit());
            counts.gathered_mass.extend(hits.map(|(_, mass)| mass));
            counts.routes.extend(routes);
        }
    }
    let lines = modes.iter().zip(&counts).map(|((mode, _), counts)| {
        let mut line = counts.line();
        line["mode"] = json!(mode);
        line["v"] = json!(vocab);
        line["dtype"] = json!(dtype);
        line["b"] = json!(batch);
        line
    });
    Ok(lines.collect())
}

impl Counts {
    fn line(&self) -> Json {
        let rate = |has: fn(&Routes) -> bool| {
            self.routes.iter().filter(|r| has(r)).count() as f64 / self.routes.len() as f64
        };
        let of = |get: fn(&Routes) -> u32| -> Vec<f64> {
            self.routes.iter().map(|r| f64::from(get(r))).collect()
        };
        let hits = self.routes.iter().filter(|r| r.hit());
        let gathered: Vec<f64> = hits.map(|r| f64::from(r.gathered())).collect();
        let sizes: Vec<f64> = self.sizes.iter().map(|&n| f64::from(n)).collect();
        let wide = |x: &[f32]| -> Vec<f64> { x.iter().map(|&m| f64::from(m)).collect() };
        json!({
            "op": "hit_rates",
            "dist": "real",
            "positions": self.routes.len(),
            "hit_rate": rate(Routes::hit),
            "second_pass_rate": rate(Routes::second_pass),
            "fallback_rate": rate(Routes::fallback),
            "no_truncation_rate": rate(Routes::no_truncation),
            "gathered_mean": mean(&gathered),
            "gathered_p50": quantile(&gathered, 50),
            "gathered_p99": quantile(&gathered, 99),
            "gathered_mass": mean(&wide(&self.gathered_mass)),
            "kept_mean": mean(&sizes),
            "kept_p50": quantile(&sizes, 50),
            "kept_p99": quantile(&sizes, 99),
            "kept_mass": mean(&wide(&self.kept_mass)),
            "steps_mean": mean(&of(Routes::steps)),
            "passes_mean": mean(&of(Routes::passes)),
        })
    }
}

fn mean(values: &[f64]) -> Option<f64> {
    (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
}

/// The least value that at least `percent` of the values do not exceed.
fn quantile(values: &[f64], percent: usize) -> Option<f64> {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    let rank = (values.len() * percent).div_ceil(100);
    values.get(rank.max(1) - 1).copied()
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    #[test]
    fn the_mass_is_that_of_the_whole_distribution() {
        let logits = Tensor::new(&[[0f32, 0., 0., 0.], [50., 0., 0., 0.]], &Device::Cpu).unwrap();
        let masked = mask(&logits, Truncation::new().with_top_k(1)).unwrap();
        let mass = mass(&logits, &masked).unwrap();
        assert!((mass[0] - 0.25).abs() < 1e-6, "{mass:?}");
        assert!((mass[1] - 1.0).abs() < 1e-6, "{mass:?}");
    }

    #[test]
    fn means_and_quantiles_of_nothing_are_nothing() {
        assert_eq!(mean(&[]), None);
        assert_eq!(quantile(&[], 50), None);
        assert_eq!(mean(&[1.0, 2.0]), Some(1.5));
        assert_eq!(quantile(&[3.0, 1.0, 2.0], 50), Some(2.0));
        assert_eq!(quantile(&[3.0, 1.0, 2.0], 99), Some(3.0));
    }
}
