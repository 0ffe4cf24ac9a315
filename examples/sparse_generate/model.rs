//! A llama whose attention is handed in: weights from a GGUF file or safetensors, all else by Candle.

use std::fs::File;
use std::path::PathBuf;

use anyhow::{bail, ensure, Context, Result};
use candle_core::quantized::gguf_file::{Content, Value};
use candle_core::safetensors::MmapedSafetensors;
use candle_core::{DType, Device, Tensor};
use candle_nn::ops::{rms_norm, silu};
use candle_nn::rotary_emb::{rope, rope_i};
use candle_transformers::models::llama::{Llama3RopeConfig, Llama3RopeType, LlamaConfig};
use tokenizers::Tokenizer;

use crate::source::{ModelFiles, Weights};
use crate::tokenizer;

/// Sizes of a model.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sizes {
    pub layers: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub context: usize,
    pub eps: f32,
    pub theta: f32,
}

struct Layer {
    attention_norm: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    mlp_norm: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
}

pub struct Llama {
    pub sizes: Sizes,
    pub device: Device,
    pub dtype: DType,
    embeddings: Tensor,
    layers: Vec<Layer>,
    norm: Tensor,
    head: Tensor,
    /// F32 `[context, head_dim / 2]`.
    cos: Tensor,
    sin: Tensor,
    /// GGUF files hold q and k with the pairs of RoPE side by side.
    interleaved: bool,
}

/// Keys and values of one sequence, `[capacity, kv_heads, head_dim]` for each layer.
pub struct Cache {
    keys: Vec<Tensor>,
    values: Vec<Tensor>,
    pub length: usize,
}

/// What a layer's attention is given: n new tokens at the end of T.
pub struct Step<'a> {
    pub layer: usize,
    /// `[n, heads, head_dim]`, rotated.
    pub q: &'a Tensor,
    /// `[T, kv_heads, head_dim]`, rotated.
    pub k: &'a Tensor,
    /// `[T, kv_heads, head_dim]`.
    pub v: &'a Tensor,
    /// The position of the first new token: T - n.
    pub first: usize,
    pub scale: f32,
}

/// Attention of a layer: `[n, heads, head_dim]`.
pub type Attend<'a> = dyn FnMut(&Step) -> Result<Tensor> + 'a;

impl Llama {
    pub fn cache(&self, capacity: usize) -> Result<Cache> {
        let sizes = self.sizes;
        let zeros = || -> Result<Vec<Tensor>> {
            let dims = (capacity, sizes.kv_heads, sizes.head_dim);
            let each = (0..sizes.layers).map(|_| Tensor::zeros(dims, self.dtype, &self.device));
            Ok(each.collect::<candle_core::Result<_>>()?)
        };
        Ok(Cache {
            keys: zeros()?,
            values: zeros()?,
            length: 0,
        })
    }

    /// Runs the model over tokens that follow those of the cache; their last hidden states,
    /// `[n, hidden]`.
    pub fn forward(
        &self,
        tokens: &[u32],
        cache: &mut Cache,
        attend: &mut Attend,
    ) -> Result<Tensor> {
        let (n, first) = (tokens.len(), cache.length);
        let sizes = self.sizes;
        ensure!(
            first + n <= sizes.context,
            "{} tokens are more than the model's context of {}",
            first + n,
            sizes.context
        );
        let ids = Tensor::new(tokens, &self.device)?;
        let mut x = self.embeddings.index_select(&ids, 0)?;
        let table = |table: &Tensor| table.narrow(0, first, n)?.unsqueeze(1)?.contiguous();
        let (cos, sin) = (table(&self.cos)?, table(&self.sin)?);
        let heads = |x: Tensor, heads| x.reshape((n, heads, sizes.head_dim));
        let rotate = |x: Tensor| -> candle_core::Result<Tensor> {
            // Each token is a batch of its own, at its own position.
            let x = x.unsqueeze(2)?.to_dtype(DType::F32)?.contiguous()?;
            let x = match self.interleaved {
                true => rope_i(&x, &cos, &sin)?,
                false => rope(&x, &cos, &sin)?,
            };
            x.squeeze(2)?.to_dtype(self.dtype)
        };
        for (i, layer) in self.layers.iter().enumerate() {
            let h = rms_norm(&x, &layer.attention_norm, sizes.eps)?;
            let project = |w: &Tensor| h.matmul(&w.t()?);
            let q = rotate(heads(project(&layer.q)?, sizes.heads)?)?;
            let k = rotate(heads(project(&layer.k)?, sizes.kv_heads)?)?;
            let v = heads(project(&layer.v)?, sizes.kv_heads)?;
            cache.keys[i].slice_set(&k.contiguous()?, 0, first)?;
            cache.values[i].slice_set(&v.contiguous()?, 0, first)?;
            let step = Step {
                layer: i,
                q: &q,
                k: &cache.keys[i].narrow(0, 0, first + n)?,
                v: &cache.values[i].narrow(0, 0, first + n)?,
                first,
                scale: (sizes.head_dim as f32).powf(-0.5),
            };
            let out = attend(&step)?.reshape((n, sizes.heads * sizes.head_dim))?;
            x = (x + out.matmul(&layer.o.t()?)?)?;
            let h = rms_norm(&x, &layer.mlp_norm, sizes.eps)?;
            let gate = silu(&h.matmul(&layer.gate.t()?)?)?;
            let up = h.matmul(&layer.up.t()?)?;
            x = (x + (gate * up)?.matmul(&layer.down.t()?)?)?;
        }
        cache.length += n;
        Ok(rms_norm(&x, &self.norm, sizes.eps)?)
    }

    /// Logits F32 `[n, vocabulary]` of hidden states.
    pub fn logits(&self, hidden: &Tensor) -> Result<Tensor> {
        Ok(hidden.matmul(&self.head.t()?)?.to_dtype(DType::F32)?)
    }
}

/// Loads a llama and its tokenizer.
pub fn load(files: &ModelFiles, dtype: DType, device: &Device) -> Result<(Llama, Tokenizer)> {
    match &files.weights {
        Weights::Gguf(path) => {
            let mut file =
                File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
            let content = Content::read(&mut file)
                .with_context(|| format!("{} is not a readable GGUF file", path.display()))?;
            let tokenizer = match files.beside("tokenizer.json") {
                Some(path) => tokenizer::from_json(&path)?,
                None => tokenizer::from_gguf(&content)?,
            };
            let model = from_gguf(&content, &mut file, dtype, device)
                .with_context(|| format!("cannot load {}", path.display()))?;
            Ok((model, tokenizer))
        }
        Weights::Safetensors(paths) => {
            let beside = |name| {
                let path = files.beside(name);
                path.with_context(|| format!("there is no {name} beside the weights"))
            };
            let tokenizer = tokenizer::from_json(&beside("tokenizer.json")?)?;
            let config = std::fs::read_to_string(beside("config.json")?)?;
            Ok((from_safetensors(paths, &config, dtype, device)?, tokenizer))
        }
    }
}

fn from_gguf(content: &Content, file: &mut File, dtype: DType, device: &Device) -> Result<Llama> {
    match content.metadata.get("general.architecture") {
        Some(Value::String(name)) if name == "llama" => (),
        other => bail!("its architecture is {other:?}, a llama is needed"),
    }
    let size = |name: &str| -> Result<usize> {
        let key = format!("llama.{name}");
        let value = content.metadata.get(&key).and_then(tokenizer::to_id);
        Ok(value.with_context(|| format!("it has no number {key:?}"))? as usize)
    };
    let number = |name: &str, default: f32| match content.metadata.get(&format!("llama.{name}")) {
        Some(Value::F32(value)) => *value,
        _ => default,
    };
    ensure!(
        !content.tensor_infos.contains_key("rope_freqs.weight"),
        "its RoPE is scaled, which this example doesn't do for GGUF files: take safetensors"
    );
    let heads = size("attention.head_count")?;
    let sizes = Sizes {
        layers: size("block_count")?,
        heads,
        kv_heads: size("attention.head_count_kv").unwrap_or(heads),
        head_dim: size("attention.key_length").unwrap_or(size("embedding_length")? / heads),
        context: size("context_length")?,
        eps: number("attention.layer_norm_rms_epsilon", 1e-5),
        theta: number("rope.freq_base", 10000.0),
    };
    let mut get = |name: &str| -> Result<Tensor> {
        let tensor = content.tensor(file, name, device)?;
        Ok(tensor.dequantize(device)?.to_dtype(dtype)?)
    };
    let mut layers = Vec::new();
    for i in 0..sizes.layers {
        let mut get = |name: &str| get(&format!("blk.{i}.{name}.weight"));
        layers.push(Layer {
            attention_norm: get("attn_norm")?,
            q: get("attn_q")?,
            k: get("attn_k")?,
            v: get("attn_v")?,
            o: get("attn_output")?,
            mlp_norm: get("ffn_norm")?,
            gate: get("ffn_gate")?,
            up: get("ffn_up")?,
            down: get("ffn_down")?,
        });
    }
    let embeddings = get("token_embd.weight")?;
    let norm = get("output_norm.weight")?;
    let head = match content.tensor_infos.contains_key("output.weight") {
        true => get("output.weight")?,
        false => embeddings.clone(),
    };
    let frequencies = frequencies(&sizes, None);
    Llama::new(sizes, [embeddings, norm, head], layers, &frequencies, true)
}

fn from_safetensors(
    paths: &[PathBuf],
    config: &str,
    dtype: DType,
    device: &Device,
) -> Result<Llama> {
    let value: serde_json::Value = serde_json::from_str(config)?;
    ensure!(
        value["model_type"] == "llama",
        "the model is a {}, a \"llama\" is needed",
        value["model_type"]
    );
    let head_dim = value["head_dim"].as_u64();
    let config: LlamaConfig = serde_json::from_value(value)?;
    let config = config.into_config(false);
    let sizes = Sizes {
        layers: config.num_hidden_layers,
        heads: config.num_attention_heads,
        kv_heads: config.num_key_value_heads,
        head_dim: head_dim.map_or(config.hidden_size / config.num_attention_heads, |d| {
            d as usize
        }),
        context: config.max_position_embeddings,
        eps: config.rms_norm_eps as f32,
        theta: config.rope_theta,
    };
    // SAFETY: nothing changes the files while they are mapped.
    let files = unsafe { MmapedSafetensors::multi(paths)? };
    let get = |name: String| -> Result<Tensor> { Ok(files.load(&name, device)?.to_dtype(dtype)?) };
    let mut layers = Vec::new();
    for i in 0..sizes.layers {
        let get = |name: &str| get(format!("model.layers.{i}.{name}.weight"));
        layers.push(Layer {
            attention_norm: get("input_layernorm")?,
            q: get("self_attn.q_proj")?,
            k: get("self_attn.k_proj")?,
            v: get("self_attn.v_proj")?,
            o: get("self_attn.o_proj")?,
            mlp_norm: get("post_attention_layernorm")?,
            gate: get("mlp.gate_proj")?,
            up: get("mlp.up_proj")?,
            down: get("mlp.down_proj")?,
        });
    }
    let embeddings = get("model.embed_tokens.weight".into())?;
    let norm = get("model.norm.weight".into())?;
    let head = match config.tie_word_embeddings {
        true => embeddings.clone(),
        false => get("lm_head.weight".into())?,
    };
    let frequencies = frequencies(&sizes, config.rope_scaling.as_ref());
    Llama::new(sizes, [embeddings, norm, head], layers, &frequencies, false)
}

/// RoPE's frequencies, with Llama 3's scaling where the model has it.
fn frequencies(sizes: &Sizes, scaling: Option<&Llama3RopeConfig>) -> Vec<f32> {
    let dim = sizes.head_dim;
    let plain = (0..dim / 2).map(|i| 1.0 / sizes.theta.powf((2 * i) as f32 / dim as f32));
    let Some(scaling) = scaling.filter(|s| matches!(s.rope_type, Llama3RopeType::Llama3)) else {
        return plain.collect();
    };
    let trained = scaling.original_max_position_embeddings as f32;
    let scaled = plain.map(|frequency| {
        let turns = trained * frequency / std::f32::consts::TAU;
        let (low, high) = (scaling.low_freq_factor, scaling.high_freq_factor);
        let kept = ((turns - low) / (high - low)).clamp(0.0, 1.0);
        frequency * kept + frequency / scaling.factor * (1.0 - kept)
    });
    scaled.collect()
}

impl Llama {
    fn new(
        sizes: Sizes,
        [embeddings, norm, head]: [Tensor; 3],
        layers: Vec<Layer>,
        frequencies: &[f32],
        interleaved: bool,
    ) -> Result<Self> {
        let device = embeddings.device().clone();
        let table = |f: fn(f32) -> f32| -> Result<Tensor> {
            let positions = 0..sizes.context;
            let data: Vec<f32> = positions
                .flat_map(|p| frequencies.iter().map(move |&w| f(p as f32 * w)))
                .collect();
            let shape = (sizes.context, frequencies.len());
            Ok(Tensor::from_vec(data, shape, &device)?)
        };
        Ok(Self {
            cos: table(f32::cos)?,
            sin: table(f32::sin)?,
            dtype: embeddings.dtype(),
            device,
            sizes,
            embeddings,
            layers,
            norm,
            head,
            interleaved,
        })
    }

    /// A small model with random weights.
    #[cfg(test)]
    pub fn random(sizes: Sizes, hidden: usize, vocabulary: usize) -> Result<Self> {
        let device = &Device::Cpu;
        let random = |out: usize, inputs: usize| {
            Tensor::randn(0f32, (inputs as f32).powf(-0.5), (out, inputs), device)
        };
        let ones = || Tensor::ones(hidden, DType::F32, device);
        let (q, kv) = (
            sizes.heads * sizes.head_dim,
            sizes.kv_heads * sizes.head_dim,
        );
        let layers = (0..sizes.layers).map(|_| -> Result<Layer> {
            Ok(Layer {
                attention_norm: ones()?,
                q: random(q, hidden)?,
                k: random(kv, hidden)?,
                v: random(kv, hidden)?,
                o: random(hidden, q)?,
                mlp_norm: ones()?,
                gate: random(2 * hidden, hidden)?,
                up: random(2 * hidden, hidden)?,
                down: random(hidden, 2 * hidden)?,
            })
        });
        let outer = [
            random(vocabulary, hidden)?,
            ones()?,
            random(vocabulary, hidden)?,
        ];
        let layers = layers.collect::<Result<_>>()?;
        Self::new(sizes, outer, layers, &frequencies(&sizes, None), false)
    }
}
