//! Times of whole attention layers as JSON lines, beside the sum of their parts.
//!
//! ```bash
//! cargo bench --features cuda --bench dsa
//! cargo bench --features cuda --bench dsa -- --model deepseek-v3.2 --t 131072 --quick
//! ```
//!
//! | `--model` | the layer |
//! |---|---|
//! | `deepseek-v3.2` | `DsaAttention`: 128 heads over a latent of 512 + 64, an indexer of 64 heads x 128 |
//! | `glm-5` | `DsaAttention`: 64 heads, an indexer of 32 heads x 128 |
//! | `llama-8b` | 32 heads on 8 of keys x 128; its own queries are the indexer's, over a key of 128 for all of them |
//!
//! Weights and hidden states are random, in bf16; K is 2048. Prefill is the last chunk of 4096 tokens behind
//! a cache of the rest, decoding one token a sequence. A layer and each of its parts are called in the
//! same way: as a model would, one call after the other without waiting, until the device has done them all. So
//! a time is the device's where it has enough to do, and else the host's. `us` is the layer, and of its parts
//! there are
//!
//! | key | part |
//! |---|---|
//! | `projections_us` | all products up to the scores and the attention, of dense operands |
//! | `norms_us` | norms and RoPE, in f32 as the layer has them |
//! | `cache_us` | new keys into the cache |
//! | `scores_us`, `selection_us` | the indexer, by chunks of the layer's budget |
//! | `attention_us` | over the positions |
//! | `output_us` | the products behind it |
//!
//! Products are timed one by one, and norms and RoPE as Candle's ops, one after the other: on CUDA `DsaAttention` has
//! fewer and fused ones. `over_parts` is `us` over the sum of the parts. `graph_us` is a step of decoding as a CUDA
//! graph (`DecodeGraph`), its inputs and lengths copied in, and `graph_over_parts` that over the same sum. `dense_us` is attention over all positions, by blocks of 128, of at
//! most 512 of the rows and scaled to all. Before anything is timed, a layer in bf16 is compared with the same in
//! f32: where both attend to everything the outputs must be close, and behind that they must choose
//! nearly the same positions (`exact`).

#[path = "../tests/common/mod.rs"]
mod common;
mod device;

use candle_core::{bail, DType, Device, Result, Tensor};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::VarBuilder;
use candle_topk::attention::dsa::{DecodeGraph, DsaAttention, DsaCache, DsaConfig, Rope};
use candle_topk::attention::{
    index_topk, indexer_scores_into, IndexKeys, KeyValues, SparseAttention, Values, Visible,
};
use candle_topk::selection::{Bounds, Order, TopK};
use clap::{Parser, ValueEnum};
use common::attention::{distance, numbers};
use device::{median, or, us, Gpu};
use serde_json::json;
use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Mutex;
use std::time::Instant;

const K: usize = 2048;
/// New tokens of a chunk of prefill.
const CHUNK: usize = 4096;
/// Bytes that scores take at a time: the layer's default.
const BUDGET: usize = 256 << 20;
const DENSE_BLOCK: usize = 128;
const DENSE_ROWS: usize = 512;
const DTYPE: DType = DType::BF16;

/// Times attention layers on the first CUDA device.
#[derive(Parser)]
struct Args {
    /// Which layers [default: all]
    #[arg(long, value_enum, value_delimiter = ',')]
    model: Vec<Model>,
    /// Tokens of a sequence, the new ones included [default: 8192,32768,131072]
    #[arg(long, value_delimiter = ',')]
    t: Vec<usize>,
    /// Fewer calls
    #[arg(long)]
    quick: bool,
    /// Without steps as graphs
    #[arg(long)]
    plain: bool,
    /// As cargo calls a bench.
    #[arg(long, hide = true)]
    bench: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
enum Model {
    #[value(name = "deepseek-v3.2")]
    DeepSeek,
    #[value(name = "glm-5")]
    Glm,
    #[value(name = "llama-8b")]
    Llama,
}

const DEEPSEEK: &str = include_str!("../examples/sparse_generate/deepseek-v3.2.json");

const GLM: &str = r#"{
    "model_type": "glm_moe_dsa", "hidden_size": 6144, "num_hidden_layers": 1,
    "num_attention_heads": 64, "q_lora_rank": 2048, "kv_lora_rank": 512, "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64, "v_head_dim": 256, "max_position_embeddings": 202752,
    "rope_theta": 1000000, "index_n_heads": 32, "index_head_dim": 128, "index_topk": 2048,
    "indexer_rope_interleave": true
}"#;

impl Model {
    const ALL: [Self; 3] = [Self::DeepSeek, Self::Glm, Self::Llama];

    fn name(self) -> &'static str {
        match self {
            Self::DeepSeek => "deepseek-v3.2",
            Self::Glm => "glm-5",
            Self::Llama => "llama-8b",
        }
    }

    fn config(self) -> Result<Option<DsaConfig>> {
        match self {
            Self::DeepSeek => DsaConfig::from_json(DEEPSEEK).map(Some),
            Self::Glm => DsaConfig::from_json(GLM).map(Some),
            Self::Llama => Ok(None),
        }
    }
}

/// Random numbers of a standard deviation.
fn random(dims: &[usize], scale: f64, dtype: DType, device: &Device) -> Result<Tensor> {
    Tensor::randn(0f32, scale as f32, dims, device)?.to_dtype(dtype)
}

/// A weight `[out, in]` that keeps the size of its inputs.
fn weight(out: usize, inputs: usize, dtype: DType, device: &Device) -> Result<Tensor> {
    random(&[out, inputs], (inputs as f64).powf(-0.5), dtype, device)
}

/// Random weights of whatever shape is asked for, the same under the same name.
#[derive(Default)]
struct Weights(Mutex<HashMap<String, Tensor>>);

impl SimpleBackend for &'static Weights {
    fn get(
        &self,
        shape: candle_core::Shape,
        name: &str,
        _: candle_nn::Init,
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor> {
        let mut known = self.0.lock().expect("no panic while it is held");
        if let Some(tensor) = known.get(name) {
            return tensor.to_dtype(dtype);
        }
        let inputs = shape.dims().last().copied().unwrap_or(1);
        let scale = match shape.rank() {
            1 => 1.0,
            _ => (inputs as f64).powf(-0.5),
        };
        // Rounded to bf16: the layer in f32 has the same.
        let tensor = random(shape.dims(), scale, DType::BF16, device)?;
        known.insert(name.to_string(), tensor.clone());
        tensor.to_dtype(dtype)
    }

    fn get_unchecked(&self, name: &str, _: DType, _: &Device) -> Result<Tensor> {
        bail!("the shape of {name} is not known")
    }

    fn contains_tensor(&self, name: &str) -> bool {
        !name.ends_with("weight_scale_inv")
    }
}

/// New tokens of some sequences.
#[derive(Clone, Copy)]
struct Step {
    sequences: usize,
    tokens: usize,
    /// Of each sequence, with the new ones.
    length: usize,
}

impl Step {
    /// Takes the new tokens out of a cache that has them already.
    fn forget(&self, cache: &mut DsaCache) -> Result<()> {
        let filled = self.length - self.tokens;
        for sequence in 0..self.sequences {
            if cache.lengths()[sequence] > filled {
                cache.truncate(sequence, filled)?;
            }
        }
        Ok(())
    }

    fn rows(&self) -> usize {
        self.sequences * self.tokens
    }

    fn ends(&self, device: &Device) -> Result<Tensor> {
        let first = (self.length - self.tokens) as u32;
        let ends: Vec<u32> = (0..self.rows())
            .map(|row| first + (row % self.tokens) as u32 + 1)
            .collect();
        Tensor::new(ends, device)
    }
}

/// Sizes of an indexer and of the attention behind it.
#[derive(Clone, Copy)]
struct Sizes {
    index_heads: usize,
    heads: usize,
    kv_heads: usize,
    key_dim: usize,
    /// Of values of their own; `None`: the first 512 of each key.
    value_dim: Option<usize>,
}

const INDEX_DIM: usize = 128;

/// Replays a step.
type Replay<'a> = Box<dyn Fn() -> Result<()> + 'a>;

/// A layer, and what it writes new keys into.
trait Layer {
    /// What all new tokens become.
    fn run(&self, x: &Tensor, step: Step) -> Result<Tensor>;
    fn hidden(&self) -> usize;
    fn sizes(&self) -> Sizes;
    /// A step that is captured once and replayed, where the layer has one.
    fn graph<'a>(&'a self, x: &'a Tensor, step: Step) -> Result<Option<Replay<'a>>>;
    /// Makes products up to the attention.
    fn projections(&self, rows: usize) -> Result<Box<dyn Fn() -> Result<()>>>;
    fn norms(&self, rows: usize) -> Result<Box<dyn Fn() -> Result<()>>>;
    fn output(&self, rows: usize) -> Result<Box<dyn Fn() -> Result<()>>>;
}

struct Dsa {
    config: DsaConfig,
    layer: DsaAttention,
    cache: RefCell<DsaCache>,
    device: Device,
}

/// `x` by each of some weights `[out, in]`.
type Product = (Tensor, Tensor);

fn products(of: Vec<Product>) -> Box<dyn Fn() -> Result<()>> {
    Box::new(move || {
        for (x, weight) in &of {
            x.matmul(weight)?;
        }
        Ok(())
    })
}

/// Dense operands of a product of so many rows.
fn product(
    rows: usize,
    [inputs, out]: [usize; 2],
    dtype: DType,
    device: &Device,
) -> Result<Product> {
    let x = random(&[rows, inputs], 1.0, dtype, device)?;
    Ok((x, weight(out, inputs, dtype, device)?.t()?))
}

/// The same for each head.
fn by_head(rows: usize, [heads, inputs, out]: [usize; 3], device: &Device) -> Result<Product> {
    let x = random(&[heads, rows, inputs], 1.0, DTYPE, device)?;
    let scale = (inputs as f64).powf(-0.5);
    Ok((x, random(&[heads, inputs, out], scale, DTYPE, device)?))
}

/// RoPE in f32 of vectors `[rows, heads, dim]`.
struct Rotated {
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
}

impl Rotated {
    fn new(dims: [usize; 3], interleaved: bool, device: &Device) -> Result<Self> {
        let [rows, _, dim] = dims;
        let table = || Tensor::rand(-1f32, 1., (rows, 1, dim / 2), device);
        Ok(Self {
            x: random(&dims, 1.0, DTYPE, device)?.unsqueeze(2)?,
            cos: table()?,
            sin: table()?,
            interleaved,
        })
    }

    fn run(&self) -> Result<()> {
        let x = self.x.to_dtype(DType::F32)?;
        let rotated = match self.interleaved {
            true => candle_nn::rotary_emb::rope_i(&x, &self.cos, &self.sin)?,
            false => candle_nn::rotary_emb::rope(&x, &self.cos, &self.sin)?,
        };
        rotated.to_dtype(DTYPE)?;
        Ok(())
    }
}

impl Dsa {
    fn new(config: &DsaConfig, sequences: usize, length: usize, device: &Device) -> Result<Self> {
        let weights: &'static Weights = Box::leak(Box::default());
        let (layer, cache) = Self::load(config, weights, sequences, length, DTYPE, device)?;
        Ok(Self {
            config: config.clone(),
            layer,
            cache: cache.into(),
            device: device.clone(),
        })
    }

    fn load(
        config: &DsaConfig,
        weights: &'static Weights,
        sequences: usize,
        length: usize,
        dtype: DType,
        device: &Device,
    ) -> Result<(DsaAttention, DsaCache)> {
        let rope = Rope::new(config, length, device)?;
        let vb = VarBuilder::from_backend(Box::new(weights), dtype, device.clone());
        let layer = DsaAttention::load(config, 0, &rope, vb)?.with_score_budget(BUDGET);
        let cache = DsaCache::new(config, 0, sequences, length, dtype, device)?;
        Ok((layer, cache))
    }

    /// Whether bf16 gives what f32 gives: the distance of the outputs of tokens that attend to
    /// everything, and the share of positions that both choose for the others.
    fn check(config: &DsaConfig, device: &Device) -> Result<(f64, f64)> {
        let weights: &'static Weights = Box::leak(Box::default());
        let tokens = K + 1024;
        let x = random(&[1, tokens, config.hidden_size], 1.0, DType::BF16, device)?;
        let run = |dtype| -> Result<_> {
            let (layer, mut cache) = Self::load(config, weights, 1, tokens, dtype, device)?;
            let out = layer.forward(&x.to_dtype(dtype)?, &mut cache, 0, None)?;
            let seen = numbers(&out.hidden.narrow(1, 0, K)?.force_contiguous()?)?;
            let chosen = out.positions.narrow(0, K, tokens - K)?.force_contiguous()?;
            Ok((seen, chosen.to_vec2::<u32>()?))
        };
        let ((a, chosen), (b, others)) = (run(DType::F32)?, run(DType::BF16)?);
        let mut common = 0;
        for (a, b) in chosen.iter().zip(&others) {
            let of: std::collections::HashSet<u32> = a.iter().copied().collect();
            common += b.iter().filter(|p| of.contains(p)).count();
        }
        let share = common as f64 / (chosen.len() * K) as f64;
        weights.0.lock().expect("no panic while it is held").clear();
        Ok((distance(&a, &b)?, share))
    }
}

impl Layer for Dsa {
    fn run(&self, x: &Tensor, step: Step) -> Result<Tensor> {
        let mut cache = self.cache.borrow_mut();
        step.forget(&mut cache)?;
        Ok(self.layer.forward(x, &mut cache, 0, None)?.hidden)
    }

    fn graph<'a>(&'a self, x: &'a Tensor, step: Step) -> Result<Option<Replay<'a>>> {
        let (first, sequences) = (0, step.sequences);
        let cache = &self.cache;
        step.forget(&mut cache.borrow_mut())?;
        let wanted = self.run(x, step)?;
        let graph = DecodeGraph::new(
            &self.layer,
            &mut cache.borrow_mut(),
            first,
            sequences,
            step.tokens,
        )?;
        let graph = RefCell::new(graph);
        let replay = move || -> Result<Tensor> {
            let mut cache = cache.borrow_mut();
            step.forget(&mut cache)?;
            graph.borrow_mut().step(x, &mut cache)
        };
        // Bit for bit, or its time says nothing.
        let bits = |tensor: &Tensor| tensor.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>();
        if bits(&replay()?)? != bits(&wanted)? {
            bail!("a captured step gives other hidden states than the step itself")
        }
        Ok(Some(Box::new(move || replay().map(drop))))
    }

    fn hidden(&self) -> usize {
        self.config.hidden_size
    }

    fn sizes(&self) -> Sizes {
        let config = &self.config;
        Sizes {
            index_heads: config.index_n_heads,
            heads: config.num_attention_heads,
            kv_heads: 1,
            key_dim: config.kv_lora_rank + config.qk_rope_head_dim,
            value_dim: None,
        }
    }

    fn projections(&self, rows: usize) -> Result<Box<dyn Fn() -> Result<()>>> {
        let (c, device) = (&self.config, &self.device);
        let (hidden, rank, heads) = (c.hidden_size, c.q_lora_rank, c.num_attention_heads);
        let mut all = Vec::new();
        for sizes in [
            [hidden, rank],
            [rank, heads * (c.qk_nope_head_dim + c.qk_rope_head_dim)],
            [hidden, c.kv_lora_rank + c.qk_rope_head_dim],
            [rank, c.index_n_heads * INDEX_DIM],
            [hidden, INDEX_DIM],
        ] {
            all.push(product(rows, sizes, DTYPE, device)?);
        }
        all.push(product(
            rows,
            [hidden, c.index_n_heads],
            DType::F32,
            device,
        )?);
        all.push(by_head(
            rows,
            [heads, c.qk_nope_head_dim, c.kv_lora_rank],
            device,
        )?);
        Ok(products(all))
    }

    fn norms(&self, rows: usize) -> Result<Box<dyn Fn() -> Result<()>>> {
        let (c, device) = (&self.config, &self.device);
        let mut normed = Vec::new();
        for dim in [c.q_lora_rank, c.kv_lora_rank] {
            let x = random(&[rows, dim], 1.0, DTYPE, device)?;
            normed.push((x, random(&[dim], 1.0, DTYPE, device)?));
        }
        let keys = random(&[rows, INDEX_DIM], 1.0, DTYPE, device)?;
        let gain = random(&[INDEX_DIM], 1.0, DType::F32, device)?;
        let dim = c.qk_rope_head_dim;
        let mut rotated = Vec::new();
        for heads in [c.num_attention_heads, 1, c.index_n_heads, 1] {
            rotated.push(Rotated::new([rows, heads, dim], true, device)?);
        }
        Ok(Box::new(move || {
            for (x, gain) in &normed {
                candle_nn::ops::rms_norm(x, gain, 1e-6)?;
            }
            let wide = keys.to_dtype(DType::F32)?;
            candle_nn::ops::layer_norm(&wide, &gain, &gain, 1e-6)?.to_dtype(DTYPE)?;
            rotated.iter().try_for_each(Rotated::run)
        }))
    }

    fn output(&self, rows: usize) -> Result<Box<dyn Fn() -> Result<()>>> {
        let (c, device) = (&self.config, &self.device);
        let (heads, values) = (c.num_attention_heads, c.v_head_dim);
        Ok(products(vec![
            by_head(rows, [heads, c.kv_lora_rank, values], device)?,
            product(rows, [heads * values, c.hidden_size], DTYPE, device)?,
        ]))
    }
}

/// Grouped-query attention whose queries are its indexer's too.
struct Gqa {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    index_key: Tensor,
    index_weights: Tensor,
    /// `[B, T, ..]`.
    keys: Tensor,
    values: Tensor,
    index_keys: Tensor,
    cos: Tensor,
    sin: Tensor,
    device: Device,
}

impl Gqa {
    const HIDDEN: usize = 4096;
    const HEADS: usize = 32;
    const KV_HEADS: usize = 8;
    const DIM: usize = 128;

    fn new(sequences: usize, length: usize, device: &Device) -> Result<Self> {
        let weight = |out| weight(out, Self::HIDDEN, DTYPE, device);
        let cached = |heads| random(&[sequences, length, heads, Self::DIM], 1.0, DTYPE, device);
        let table = || Tensor::rand(-1f32, 1., (length, Self::DIM / 2), device);
        Ok(Self {
            q: weight(Self::HEADS * Self::DIM)?,
            k: weight(Self::KV_HEADS * Self::DIM)?,
            v: weight(Self::KV_HEADS * Self::DIM)?,
            o: weight(Self::HIDDEN)?,
            index_key: weight(Self::DIM)?,
            index_weights: self::weight(Self::HEADS, Self::HIDDEN, DType::F32, device)?,
            keys: cached(Self::KV_HEADS)?,
            values: cached(Self::KV_HEADS)?,
            index_keys: cached(1)?.squeeze(2)?,
            cos: table()?,
            sin: table()?,
            device: device.clone(),
        })
    }
}

impl Layer for Gqa {
    fn run(&self, x: &Tensor, step: Step) -> Result<Tensor> {
        let (rows, dim) = (step.rows(), Self::DIM);
        let x = x.reshape((rows, Self::HIDDEN))?;
        let ends = step.ends(&self.device)?;
        let first = step.length - step.tokens;
        // All sequences stand at the same positions: a view of the table serves them.
        let at = |table: &Tensor| table.narrow(0, first, step.tokens);
        let (cos, sin) = (at(&self.cos)?, at(&self.sin)?);
        let rotated = |x: Tensor, heads: usize| -> Result<Tensor> {
            let dims = (step.sequences, step.tokens, heads, dim);
            let x = x.reshape(dims)?.to_dtype(DType::F32)?;
            let x = candle_nn::rotary_emb::rope_thd(&x, &cos, &sin)?.to_dtype(DTYPE)?;
            x.reshape((rows, heads, dim))
        };
        let q = rotated(x.matmul(&self.q.t()?)?, Self::HEADS)?;
        let k = rotated(x.matmul(&self.k.t()?)?, Self::KV_HEADS)?;
        let index_key = rotated(x.matmul(&self.index_key.t()?)?, 1)?;
        let v = x.matmul(&self.v.t()?)?;
        let weights = x.to_dtype(DType::F32)?.matmul(&self.index_weights.t()?)?;
        let write = |cache: &Tensor, new: &Tensor| -> Result<()> {
            let dims = [&[step.sequences, step.tokens], &cache.dims()[2..]].concat();
            cache.slice_set(&new.reshape(dims)?, 1, first)
        };
        write(&self.keys, &k)?;
        write(&self.values, &v)?;
        write(&self.index_keys, &index_key)?;
        let visible = Visible::between(None, Some(&ends));
        let top = TopK::new(K)?.order(Order::ByPosition);
        let keys = IndexKeys::batched(&self.index_keys);
        let chosen = index_topk(&q, &keys, &weights, &visible, &top, BUDGET)?;
        let attention = SparseAttention::new((dim as f32).powf(-0.5)).with_visible(&visible);
        let kv = KeyValues::batched(&self.keys, &self.values);
        let out = attention.forward(&q, &kv, &chosen.positions)?.out;
        out.reshape((rows, Self::HEADS * dim))?.matmul(&self.o.t()?)
    }

    fn graph<'a>(&'a self, _: &'a Tensor, _: Step) -> Result<Option<Replay<'a>>> {
        Ok(None)
    }

    fn hidden(&self) -> usize {
        Self::HIDDEN
    }

    fn sizes(&self) -> Sizes {
        Sizes {
            index_heads: Self::HEADS,
            heads: Self::HEADS,
            kv_heads: Self::KV_HEADS,
            key_dim: Self::DIM,
            value_dim: Some(Self::DIM),
        }
    }

    fn projections(&self, rows: usize) -> Result<Box<dyn Fn() -> Result<()>>> {
        let mut all = Vec::new();
        for heads in [Self::HEADS, Self::KV_HEADS, Self::KV_HEADS, 1] {
            all.push(product(
                rows,
                [Self::HIDDEN, heads * Self::DIM],
                DTYPE,
                &self.device,
            )?);
        }
        all.push(product(
            rows,
            [Self::HIDDEN, Self::HEADS],
            DType::F32,
            &self.device,
        )?);
        Ok(products(all))
    }

    fn norms(&self, rows: usize) -> Result<Box<dyn Fn() -> Result<()>>> {
        let mut rotated = Vec::new();
        for heads in [Self::HEADS, Self::KV_HEADS, 1] {
            rotated.push(Rotated::new([rows, heads, Self::DIM], false, &self.device)?);
        }
        Ok(Box::new(move || rotated.iter().try_for_each(Rotated::run)))
    }

    fn output(&self, rows: usize) -> Result<Box<dyn Fn() -> Result<()>>> {
        let sizes = [Self::HEADS * Self::DIM, Self::HIDDEN];
        Ok(products(vec![product(rows, sizes, DTYPE, &self.device)?]))
    }
}

struct Bench {
    gpu: Gpu,
    quick: bool,
    plain: bool,
}

impl Bench {
    /// The time of a call in us, of calls that follow each other until the device has done them all:
    /// the median of several such runs, ascending.
    fn time(&self, decode: bool, run: impl Fn() -> Result<()>) -> Result<Vec<f64>> {
        let (calls, runs) = match (decode, self.quick) {
            (true, true) => (10, 3),
            (true, false) => (20, 7),
            (false, true) => (1, 3),
            (false, false) => (2, 5),
        };
        run()?;
        self.gpu.device.synchronize()?;
        let mut times = Vec::new();
        for _ in 0..runs {
            let start = Instant::now();
            for _ in 0..calls {
                run()?;
            }
            self.gpu.device.synchronize()?;
            times.push(start.elapsed().as_secs_f64() * 1e6 / calls as f64);
        }
        times.sort_by(f64::total_cmp);
        Ok(times)
    }

    /// Prints the line of a layer whose cache holds all but the new tokens.
    fn measure(
        &self,
        model: Model,
        layer: &dyn Layer,
        step: Step,
        exact: Option<(f64, f64)>,
    ) -> Result<()> {
        let device = &self.gpu.device;
        let (rows, decode) = (step.rows(), step.tokens == 1);
        let sizes = layer.sizes();
        let median_of = |run: &dyn Fn() -> Result<()>| {
            Ok::<f64, candle_core::Error>(median(&self.time(decode, run)?))
        };

        let x = random(
            &[step.sequences, step.tokens, layer.hidden()],
            1.0,
            DTYPE,
            device,
        )?;
        let whole = self.time(decode, || layer.run(&x, step).map(drop))?;
        let replayed =
            |graph: Replay| Ok::<f64, candle_core::Error>(median(&self.time(decode, graph)?));
        let graph = match decode && !self.plain {
            true => layer.graph(&x, step)?.map(replayed).transpose()?,
            false => None,
        };
        drop(x);
        let projections = median_of(&*layer.projections(rows)?)?;
        let norms = median_of(&*layer.norms(rows)?)?;
        let output = median_of(&*layer.output(rows)?)?;

        // The indexer and the attention, over a cache of their own.
        let ends = step.ends(device)?;
        let visible = Visible::between(None, Some(&ends));
        let cached = |dims: &[usize]| {
            let dims = [&[step.sequences, step.length], dims].concat();
            random(&dims, 1.0, DTYPE, device)
        };
        let index_keys = cached(&[INDEX_DIM])?;
        let keys = cached(&[sizes.kv_heads, sizes.key_dim])?;
        let values = match sizes.value_dim {
            Some(dim) => Some(cached(&[sizes.kv_heads, dim])?),
            None => None,
        };
        let mut caches = vec![&index_keys, &keys];
        caches.extend(&values);
        let mut new = Vec::new();
        for cache in caches {
            let part = cache.narrow(1, 0, step.tokens)?.force_contiguous()?;
            new.push((cache.clone(), part));
        }
        let cache = median_of(&|| {
            new.iter()
                .try_for_each(|(cache, part)| cache.slice_set(part, 1, step.length - step.tokens))
        })?;
        drop(new);

        let index_q = random(&[rows, sizes.index_heads, INDEX_DIM], 1.0, DTYPE, device)?;
        let weights = random(&[rows, sizes.index_heads], 0.1, DType::F32, device)?;
        let top = TopK::new(K)?.order(Order::ByPosition);
        let held = IndexKeys::batched(&index_keys);
        let most = (BUDGET / (4 * step.length)).clamp(1, rows);
        let each = rows.div_ceil(rows.div_ceil(most));
        let map: Vec<u32> = (0..rows).map(|row| (row / step.tokens) as u32).collect();
        let map = Tensor::new(map, device)?;
        let scores = Tensor::zeros((each, step.length), DType::F32, device)?;
        let mut chunks = Vec::new();
        for first in (0..rows).step_by(each) {
            let count = each.min(rows - first);
            let part = |tensor: &Tensor| tensor.narrow(0, first, count);
            let keys = match each == rows {
                true => held.clone(),
                false => held.clone().with_row_sequences(&part(&map)?),
            };
            let into = scores.narrow(0, 0, count)?;
            chunks.push((part(&index_q)?, part(&weights)?, part(&ends)?, keys, into));
        }
        let scoring = median_of(&|| {
            chunks
                .iter()
                .try_for_each(|(q, weights, ends, keys, into)| {
                    let visible = Visible::between(None, Some(ends));
                    indexer_scores_into(q, keys, weights, &visible, into)
                })
        })?;
        let selection = median_of(&|| {
            chunks.iter().try_for_each(|(_, _, ends, _, scores)| {
                top.select(scores, &Bounds::ends(ends)).map(drop)
            })
        })?;
        drop(chunks);
        let positions = index_topk(&index_q, &held, &weights, &visible, &top, BUDGET)?.positions;

        let q = random(&[rows, sizes.heads, sizes.key_dim], 1.0, DTYPE, device)?;
        let kv = KeyValues::batched(
            &keys,
            match &values {
                Some(values) => Values::from(values),
                None => Values::OfKeys(512),
            },
        );
        let op = SparseAttention::new((sizes.key_dim as f32).powf(-0.5));
        let attend = op.clone().with_visible(&visible);
        let attention = median_of(&|| attend.forward(&q, &kv, &positions).map(drop))?;

        let few = match decode {
            true => rows,
            false => rows.min(DENSE_ROWS),
        };
        let blocks = step.length.div_ceil(DENSE_BLOCK);
        let all = Tensor::arange(0u32, blocks as u32, device)?;
        let all = all
            .unsqueeze(0)?
            .broadcast_as((few, blocks))?
            .contiguous()?;
        let (last_q, last_ends) = (
            q.narrow(0, rows - few, few)?,
            ends.narrow(0, rows - few, few)?,
        );
        let dense = op
            .with_visible(&Visible::between(None, Some(&last_ends)))
            .with_block_size(DENSE_BLOCK);
        let dense = median_of(&|| dense.forward(&last_q, &kv, &all).map(drop))?;
        let dense = dense * rows as f64 / few as f64;

        let parts = [
            projections,
            norms,
            cache,
            scoring,
            selection,
            attention,
            output,
        ];
        let sum: f64 = parts.iter().sum();
        let mut line = self.gpu.line("layer", &whole);
        let keys = json!({
            "model": model.name(), "phase": if decode { "decode" } else { "prefill" },
            "b": step.sequences, "n": step.tokens, "s": rows, "t": step.length, "k": K,
            "h": sizes.heads, "dtype": "bf16", "budget": BUDGET,
            "projections_us": us(projections), "norms_us": us(norms), "cache_us": us(cache),
            "scores_us": us(scoring), "selection_us": us(selection), "attention_us": us(attention),
            "output_us": us(output), "parts_us": us(sum),
            "over_parts": (1e3 * median(&whole) / sum).round() / 1e3, "dense_us": us(dense),
            "tokens_per_s": (rows as f64 / median(&whole) * 1e6).round(),
        });
        line.extend(keys.as_object().cloned().unwrap_or_default());
        if let Some(graph) = graph {
            line.insert("graph_us".into(), json!(us(graph)));
            let over = (1e3 * graph / sum).round() / 1e3;
            line.insert("graph_over_parts".into(), json!(over));
        }
        if let Some((distance, share)) = exact {
            line.insert("distance".into(), json!(distance));
            line.insert("common_positions".into(), json!(share));
            line.insert("exact".into(), json!(close((distance, share))));
        }
        println!("{}", serde_json::Value::Object(line));
        Ok(())
    }

    /// A chunk of prefill, then tokens of one sequence and of several.
    fn model(&self, model: Model, lengths: &[usize]) -> Result<bool> {
        let device = &self.gpu.device;
        let config = model.config()?;
        let exact = match &config {
            Some(config) => Some(Dsa::check(config, device)?),
            None => None,
        };
        let layer = |sequences, length| -> Result<Box<dyn Layer>> {
            let Some(config) = &config else {
                return Ok(Box::new(Gqa::new(sequences, length, device)?));
            };
            let layer = Dsa::new(config, sequences, length, device)?;
            for first in (0..length - 1).step_by(CHUNK) {
                let tokens = CHUNK.min(length - 1 - first);
                let dims = [sequences, tokens, config.hidden_size];
                let x = random(&dims, 1.0, DTYPE, device)?;
                let mut cache = layer.cache.borrow_mut();
                layer.layer.forward(&x, &mut cache, 0, None)?;
            }
            Ok(Box::new(layer))
        };
        for &length in lengths {
            let one = layer(1, length)?;
            let step = |sequences, tokens| Step {
                sequences,
                tokens,
                length,
            };
            self.measure(model, &*one, step(1, 1), exact)?;
            self.measure(model, &*one, step(1, CHUNK.min(length)), exact)?;
            drop(one);
            // Filling more takes minutes.
            if length <= 32 << 10 {
                self.measure(model, &*layer(8, length)?, step(8, 1), exact)?;
            }
        }
        Ok(exact.is_none_or(close))
    }
}

/// Whether a layer in bf16 is the one in f32.
fn close((distance, share): (f64, f64)) -> bool {
    distance < 1e-4 && share > 0.95
}

fn main() -> Result<()> {
    let args = Args::parse();
    let gpu = Gpu::new(0, 20, 0)?;
    let bench = Bench {
        gpu,
        quick: args.quick,
        plain: args.plain,
    };
    let start = Instant::now();
    let lengths = or(&args.t, &[8 << 10, 32 << 10, 128 << 10]);
    let mut wrong = Vec::new();
    for model in or(&args.model, &Model::ALL) {
        let failed = |e: candle_core::Error| e.context(format!("{model:?}"));
        if !bench.model(model, &lengths).map_err(failed)? {
            wrong.push(model.name());
        }
    }
    eprintln!("{:.1} s", start.elapsed().as_secs_f64());
    if !wrong.is_empty() {
        bail!("layers in bf16 differ from the same in f32: {wrong:?}")
    }
    Ok(())
}
