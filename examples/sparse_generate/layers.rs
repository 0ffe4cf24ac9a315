//! One layer of the size of a real model, with random weights: the time of each part.

use std::time::Instant;

use anyhow::Result;
use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use candle_topk::attention::dsa::{DsaAttention, DsaCache, DsaConfig, Rope};
use candle_topk::attention::{
    index_topk, indexer_scores, IndexKeys, KeyValues, SparseAttention, Values, Visible,
};
use candle_topk::selection::{Bounds, Order, TopK};
use serde_json::{json, Value};

/// Which layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Size {
    /// MLA: 128 heads over keys of 576, an indexer of 64 heads x 128.
    #[value(name = "deepseek-v3.2")]
    DeepSeekV32,
    /// GQA: 32 heads and 8 of keys x 128, scored by 32 heads over one shared key of 128.
    #[value(name = "llama-8b")]
    Llama8b,
}

impl Size {
    pub fn name(self) -> &'static str {
        match self {
            Self::DeepSeekV32 => "deepseek-v3.2",
            Self::Llama8b => "llama-8b",
        }
    }
}

/// What is timed.
#[derive(Debug, Clone, Copy)]
pub struct Timed {
    pub size: Size,
    /// Keys.
    pub context: usize,
    /// New tokens at their end: 1 is decoding.
    pub rows: usize,
    pub k: usize,
    pub dtype: DType,
    pub budget: usize,
    pub rounds: usize,
}

const CONFIG: &str = include_str!("deepseek-v3.2.json");

/// Random numbers of a standard deviation.
fn random(dims: &[usize], scale: f32, dtype: DType, device: &Device) -> Result<Tensor> {
    Ok(Tensor::randn(0f32, scale, dims, device)?.to_dtype(dtype)?)
}

/// The median of `rounds` runs after one to warm up, in us. Reading a number of the result waits
/// for the device.
fn time(rounds: usize, run: impl Fn() -> Result<Tensor>) -> Result<f64> {
    let once = || -> Result<f64> {
        let start = Instant::now();
        let tensor = run()?;
        tensor.device().synchronize()?;
        Ok(start.elapsed().as_secs_f64() * 1e6)
    };
    once()?;
    let mut times = (0..rounds).map(|_| once()).collect::<Result<Vec<_>>>()?;
    times.sort_unstable_by(f64::total_cmp);
    Ok(times[times.len() / 2])
}

/// One JSON object for each part.
pub fn measure(timed: Timed, device: &Device) -> Result<Vec<Value>> {
    let Timed {
        size,
        context,
        rows,
        k,
        dtype,
        budget,
        rounds,
    } = timed;
    let (index_heads, heads, kv_heads, key_dim, value_dim) = match size {
        Size::DeepSeekV32 => (64, 128, 1, 576, 512),
        Size::Llama8b => (32, 32, 8, 128, 128),
    };
    let ends: Vec<u32> = (context - rows..context).map(|p| p as u32 + 1).collect();
    let ends = Tensor::new(ends, device)?;
    let visible = Visible::between(None, Some(&ends));
    let index_q = random(&[rows, index_heads, 128], 1.0, dtype, device)?;
    let index_keys = IndexKeys::packed(&random(&[context, 128], 1.0, dtype, device)?);
    let weights = random(&[rows, index_heads], 0.1, DType::F32, device)?;
    let q = random(&[rows, heads, key_dim], 1.0, dtype, device)?;
    let keys = random(&[context, kv_heads, key_dim], 1.0, dtype, device)?;
    let kv = match size {
        Size::DeepSeekV32 => KeyValues::packed(&keys, Values::OfKeys(512)),
        Size::Llama8b => {
            let values = random(&[context, kv_heads, value_dim], 1.0, dtype, device)?;
            KeyValues::packed(&keys, &values)
        }
    };
    let top = TopK::new(k)?.order(Order::ByPosition);
    let attention = SparseAttention::new((key_dim as f32).powf(-0.5)).with_visible(&visible);

    let mut lines = Vec::new();
    let mut line = |part: &str, us: f64| {
        lines.push(json!({
            "op": "layer_part", "part": part, "model": size.name(), "s": rows, "t": context, "k": k,
            "h": heads, "d": key_dim, "phase": if rows == 1 { "decode" } else { "prefill" },
            "dtype": crate::dtype_name(dtype), "us": us,
        }));
    };
    // Whole scores may not fit, so scores and selection alone are of as many rows as the budget
    // takes, scaled to all.
    let each = (budget / (4 * context)).clamp(1, rows);
    let of_all = rows as f64 / each as f64;
    let part = |tensor: &Tensor| tensor.narrow(0, rows - each, each);
    let part_visible = Visible::between(None, Some(&part(&ends)?));
    let scores = || -> Result<Tensor> {
        let (q, weights) = (part(&index_q)?, part(&weights)?);
        Ok(indexer_scores(&q, &index_keys, &weights, &part_visible)?)
    };
    line("scores", of_all * time(rounds, scores)?);
    let made = scores()?;
    let part_ends = part(&ends)?;
    let select = || Ok(top.select(&made, &Bounds::ends(&part_ends))?.positions);
    line("selection", of_all * time(rounds, select)?);
    drop(made);
    let choose = || -> Result<Tensor> {
        Ok(index_topk(&index_q, &index_keys, &weights, &visible, &top, budget)?.positions)
    };
    line("scores and selection", time(rounds, choose)?);
    let positions = choose()?;
    let attend = || Ok(attention.forward(&q, &kv, &positions)?.out);
    line("attention", time(rounds, attend)?);
    let all = Tensor::arange(0u32, context.div_ceil(128) as u32, device)?;
    let all = all
        .unsqueeze(0)?
        .broadcast_as((rows, context.div_ceil(128)))?;
    let dense = attention.clone().with_block_size(128);
    let dense = || Ok(dense.forward(&q, &kv, &all)?.out);
    line("dense, by blocks", time(rounds, dense)?);

    if size == Size::DeepSeekV32 {
        // The whole layer, weights and all: new tokens behind a cache of random keys.
        let mut config = DsaConfig::from_json(CONFIG)?;
        config.index_topk = k;
        let rope = Rope::new(&config, context, device)?;
        let vb = VarBuilder::from_backend(Box::new(Random), dtype, device.clone());
        let layer = DsaAttention::load(&config, 0, &rope, vb)?.with_score_budget(budget);
        let mut cache = DsaCache::new(&config, 0, 1, context, dtype, device)?;
        let filled = context - rows;
        for first in (0..filled).step_by(4096) {
            let n = 4096.min(filled - first);
            let x = random(&[1, n, 7168], 1.0, dtype, device)?;
            layer.forward(&x, &mut cache, 0, None)?;
        }
        let x = random(&[1, rows, 7168], 1.0, dtype, device)?;
        let cache = std::cell::RefCell::new(cache);
        let step = || -> Result<Tensor> {
            let mut cache = cache.borrow_mut();
            cache.truncate(0, filled)?;
            Ok(layer.forward(&x, &mut cache, 0, None)?.hidden)
        };
        line("layer", time(rounds, step)?);
    }
    Ok(lines)
}

/// Weights of whatever shape is asked for.
struct Random;

impl candle_nn::var_builder::SimpleBackend for Random {
    fn get(
        &self,
        shape: candle_core::Shape,
        _: &str,
        _: candle_nn::Init,
        dtype: DType,
        device: &Device,
    ) -> candle_core::Result<Tensor> {
        let inputs = shape.dims().last().copied().unwrap_or(1);
        let scale = match shape.rank() {
            1 => 1.0,
            _ => (inputs as f32).powf(-0.5),
        };
        Tensor::randn(0f32, scale, shape, device)?.to_dtype(dtype)
    }

    fn get_unchecked(&self, name: &str, _: DType, _: &Device) -> candle_core::Result<Tensor> {
        candle_core::bail!("the shape of {name} is not known")
    }

    fn contains_tensor(&self, name: &str) -> bool {
        !name.ends_with("weight_scale_inv")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_is_timed() -> Result<()> {
        let timed = Timed {
            size: Size::Llama8b,
            context: 200,
            rows: 3,
            k: 16,
            dtype: DType::F32,
            budget: 1000,
            rounds: 1,
        };
        let lines = measure(timed, &Device::Cpu)?;
        let parts: Vec<&str> = lines.iter().filter_map(|l| l["part"].as_str()).collect();
        let wanted = [
            "scores",
            "selection",
            "scores and selection",
            "attention",
            "dense, by blocks",
        ];
        assert_eq!(parts, wanted);
        assert!(lines.iter().all(|line| line["us"].as_f64().unwrap() > 0.0));
        Ok(())
    }
}
