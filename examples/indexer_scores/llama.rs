//! The first layers of a Llama model, with the queries and keys of the last of them: Candle's own
//! models keep those to themselves.

use std::fs::File;
use std::io::BufReader;

use anyhow::{bail, ensure, Context, Result};
use candle_core::quantized::gguf_file::{Content, Value};
use candle_core::safetensors::MmapedSafetensors;
use candle_core::{DType, Device, Module, Tensor, D};
use candle_nn::{Embedding, Linear, RmsNorm};
use tokenizers::Tokenizer;

use crate::source::{ModelFiles, Weights};
use crate::tokenizer;

/// The sizes that a model's files name.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    pub heads: usize,
    pub kv_heads: usize,
    pub layers: usize,
    /// The greatest number of tokens that it was trained on.
    pub context: usize,
    theta: f64,
    epsilon: f64,
    /// GGUF files keep a pair of rotated dimensions side by side, safetensors files half a head apart.
    interleaved: bool,
}

struct Layer {
    attention_norm: RmsNorm,
    q: Linear,
    k: Linear,
    /// What the layer does with its attention; the last layer's is not needed.
    rest: Option<Rest>,
}

struct Rest {
    v: Linear,
    o: Linear,
    norm: RmsNorm,
    gate: Linear,
    up: Linear,
    down: Linear,
}

/// Layers 0 to `layer` of a model, in F32.
pub struct Llama {
    pub config: Config,
    embedding: Embedding,
    layers: Vec<Layer>,
    device: Device,
}

/// Where tensors come from, by the GGUF's and the safetensors' names.
enum Source {
    Gguf(Content, BufReader<File>),
    Safetensors(MmapedSafetensors),
}

impl Source {
    fn get(&mut self, gguf: &str, safetensors: &str, device: &Device) -> Result<Tensor> {
        match self {
            Self::Gguf(content, file) => {
                let name = format!("{gguf}.weight");
                let tensor = content.tensor(file, &name, device)?;
                Ok(tensor.dequantize(device)?)
            }
            Self::Safetensors(tensors) => {
                let name = format!("model.{safetensors}.weight");
                Ok(tensors.load(&name, device)?.to_dtype(DType::F32)?)
            }
        }
    }

    fn config(&self, files: &ModelFiles) -> Result<Config> {
        match self {
            Self::Gguf(content, _) => {
                let architecture = match content.metadata.get("general.architecture") {
                    Some(Value::String(name)) => name.as_str(),
                    _ => "",
                };
                ensure!(
                    architecture == "llama",
                    "the model's architecture is {architecture:?}, llama is accepted"
                );
                Config::of(true, |name, _| {
                    let value = content.metadata.get(&format!("llama.{name}"))?;
                    let whole = tokenizer::to_id(value).map(f64::from);
                    whole.or_else(|| value.to_f32().ok().map(f64::from))
                })
            }
            Self::Safetensors(_) => {
                let file = files
                    .beside("config.json")
                    .context("there is no config.json beside the .safetensors file")?;
                let config = tokenizer::read_json(&file)?;
                let kind = config["model_type"].as_str().unwrap_or_default();
                ensure!(
                    kind == "llama",
                    "the model_type of config.json is {kind:?}, \"llama\" is accepted"
                );
                ensure!(
                    config["rope_scaling"].is_null(),
                    "config.json scales its rotary embedding, which is not implemented here"
                );
                Config::of(false, |_, name| config[name].as_f64())
            }
        }
    }
}

impl Config {
    /// From numbers by the GGUF's and the safetensors' names.
    fn of(interleaved: bool, number: impl Fn(&str, &str) -> Option<f64>) -> Result<Self> {
        let need = |gguf: &str, name: &str| {
            number(gguf, name).with_context(|| format!("the model's files name no {name}"))
        };
        let heads = need("attention.head_count", "num_attention_heads")? as usize;
        let config = Self {
            heads,
            kv_heads: number("attention.head_count_kv", "num_key_value_heads")
                .map_or(heads, |n| n as usize),
            layers: need("block_count", "num_hidden_layers")? as usize,
            context: need("context_length", "max_position_embeddings")? as usize,
            theta: number("rope.freq_base", "rope_theta").unwrap_or(10_000.0),
            epsilon: need("attention.layer_norm_rms_epsilon", "rms_norm_eps")?,
            interleaved,
        };
        ensure!(
            config.kv_heads > 0 && heads > 0 && heads.is_multiple_of(config.kv_heads),
            "{heads} heads cannot share {} key heads in equal groups",
            config.kv_heads
        );
        Ok(config)
    }
}

/// Loads the layers up to `layer`, and the tokenizer.
pub fn load(files: &ModelFiles, layer: usize, device: &Device) -> Result<(Llama, Tokenizer)> {
    let mut source = match &files.weights {
        Weights::Gguf(path) => {
            let file =
                File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
            let mut file = BufReader::new(file);
            let content = Content::read(&mut file)
                .with_context(|| format!("{} is not a readable GGUF file", path.display()))?;
            Source::Gguf(content, file)
        }
        Weights::Safetensors(paths) => {
            // SAFETY: the files are not changed while they are mapped.
            Source::Safetensors(unsafe { MmapedSafetensors::multi(paths) }?)
        }
    };
    let config = source.config(files)?;
    ensure!(
        layer < config.layers,
        "--layer is {layer}, the model has the layers 0 to {}",
        config.layers - 1
    );
    let tokenizer = match (&source, files.beside("tokenizer.json")) {
        (_, Some(file)) => tokenizer::from_json(&file)?,
        (Source::Gguf(content, _), None) => tokenizer::from_gguf(content)?,
        _ => bail!("there is no tokenizer.json beside the weights"),
    };
    Ok((Llama::new(&mut source, config, layer, device)?, tokenizer))
}

impl Llama {
    fn new(source: &mut Source, config: Config, layer: usize, device: &Device) -> Result<Self> {
        let table = source.get("token_embd", "embed_tokens", device)?;
        let hidden = table.dim(1)?;
        ensure!(
            hidden.is_multiple_of(2 * config.heads),
            "a hidden size of {hidden} does not make {} heads of an even size",
            config.heads
        );
        let mut layers = vec![];
        for at in 0..=layer {
            let mut get = |gguf: &str, safetensors: &str| {
                source.get(
                    &format!("blk.{at}.{gguf}"),
                    &format!("layers.{at}.{safetensors}"),
                    device,
                )
            };
            let mut linear = |gguf: &str, name: &str| -> Result<Linear> {
                Ok(Linear::new(get(gguf, name)?, None))
            };
            let (q, k) = (
                linear("attn_q", "self_attn.q_proj")?,
                linear("attn_k", "self_attn.k_proj")?,
            );
            let rest = match at < layer {
                true => Some(Rest {
                    v: linear("attn_v", "self_attn.v_proj")?,
                    o: linear("attn_output", "self_attn.o_proj")?,
                    gate: linear("ffn_gate", "mlp.gate_proj")?,
                    up: linear("ffn_up", "mlp.up_proj")?,
                    down: linear("ffn_down", "mlp.down_proj")?,
                    norm: RmsNorm::new(
                        get("ffn_norm", "post_attention_layernorm")?,
                        config.epsilon,
                    ),
                }),
                false => None,
            };
            let norm = get("attn_norm", "input_layernorm")?;
            layers.push(Layer {
                attention_norm: RmsNorm::new(norm, config.epsilon),
                q,
                k,
                rest,
            });
        }
        Ok(Self {
            config,
            embedding: Embedding::new(table, hidden),
            layers,
            device: device.clone(),
        })
    }

    /// Queries [T, H, D] and keys [T, G, D] of the last layer, not rotated, of tokens at the
    /// positions from 0 on that see what is before them.
    pub fn queries_and_keys(&self, tokens: &[u32]) -> Result<(Tensor, Tensor)> {
        let t = tokens.len();
        let tokens = Tensor::new(tokens, &self.device)?;
        let mut x = self.embedding.forward(&tokens)?;
        let d = x.dim(1)? / self.config.heads;
        let positions: Vec<f64> = (0..t).map(|i| i as f64).collect();
        let rotary = Rotary::new(&positions, d, self.config, &self.device)?;
        let mask = causal(t, &self.device)?;
        for layer in &self.layers {
            let h = layer.attention_norm.forward(&x)?;
            let heads = |x: Tensor| x.reshape((t, (), d));
            let (q, k) = (heads(layer.q.forward(&h)?)?, heads(layer.k.forward(&h)?)?);
            let Some(rest) = &layer.rest else {
                return Ok((q, k));
            };
            let v = heads(rest.v.forward(&h)?)?;
            let attended = attention(&rotary.apply(&q)?, &rotary.apply(&k)?, &v, &mask)?;
            x = (x + rest.o.forward(&attended)?)?;
            let h = rest.norm.forward(&x)?;
            let inner = (candle_nn::ops::silu(&rest.gate.forward(&h)?)? * rest.up.forward(&h)?)?;
            x = (x + rest.down.forward(&inner)?)?;
        }
        bail!("the model has no layers")
    }

    /// Rotates [T, H, D] to these positions.
    pub fn rotate(&self, x: &Tensor, positions: &[f64]) -> Result<Tensor> {
        Rotary::new(positions, x.dim(D::Minus1)?, self.config, &self.device)?.apply(x)
    }
}

/// 0 where a query sees a key and -inf where not.
fn causal(t: usize, device: &Device) -> Result<Tensor> {
    let mask: Vec<f32> = (0..t * t)
        .map(|i| match i % t > i / t {
            true => f32::NEG_INFINITY,
            false => 0.0,
        })
        .collect();
    Ok(Tensor::from_vec(mask, (t, t), device)?)
}

/// Of queries [T, H, D] over keys and values [T, G, D]: [T, H D].
fn attention(q: &Tensor, k: &Tensor, v: &Tensor, mask: &Tensor) -> Result<Tensor> {
    let (t, heads, d) = q.dims3()?;
    let groups = k.dim(1)?;
    // The heads of a group lie one below the other, and its keys serve them all.
    let q = q
        .transpose(0, 1)?
        .reshape((groups, heads / groups * t, d))?;
    let k = k.transpose(0, 1)?.contiguous()?;
    let v = v.transpose(0, 1)?.contiguous()?;
    let scores = (q.matmul(&k.t()?)? * (1.0 / (d as f64).sqrt()))?;
    let scores = scores.reshape((heads, t, t))?.broadcast_add(mask)?;
    let weights = candle_nn::ops::softmax_last_dim(&scores)?;
    let out = weights
        .reshape((groups, heads / groups * t, t))?
        .matmul(&v)?;
    let out = out.reshape((heads, t, d))?.transpose(0, 1)?;
    Ok(out.reshape((t, heads * d))?)
}

struct Rotary {
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
}

impl Rotary {
    fn new(positions: &[f64], d: usize, config: Config, device: &Device) -> Result<Self> {
        // In f64: at position 10^6 an angle in f32 is off by some hundredths.
        let angles: Vec<f64> = positions
            .iter()
            .flat_map(|position| {
                (0..d / 2).map(move |i| position * config.theta.powf(-2.0 * i as f64 / d as f64))
            })
            .collect();
        let of = |f: fn(f64) -> f64| {
            let values: Vec<f32> = angles.iter().map(|&angle| f(angle) as f32).collect();
            Tensor::from_vec(values, (positions.len(), d / 2), device)
        };
        Ok(Self {
            cos: of(f64::cos)?,
            sin: of(f64::sin)?,
            interleaved: config.interleaved,
        })
    }

    fn apply(&self, x: &Tensor) -> Result<Tensor> {
        let x = x.transpose(0, 1)?.unsqueeze(0)?.contiguous()?;
        let rotated = match self.interleaved {
            true => candle_nn::rotary_emb::rope_i(&x, &self.cos, &self.sin)?,
            false => candle_nn::rotary_emb::rope(&x, &self.cos, &self.sin)?,
        };
        Ok(rotated.squeeze(0)?.transpose(0, 1)?.contiguous()?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_nn::VarBuilder;
    use candle_transformers::models::llama;
    use std::collections::HashMap;

    /// Candle's own model gives the logits of the last token. Where its head is the next layer's
    /// query projection, and its norm that layer's, they are that layer's queries.
    #[test]
    fn queries_are_what_candles_model_would_take_further() -> Result<()> {
        const HIDDEN: usize = 16;
        const INNER: usize = 24;
        const LAYERS: usize = 2;
        let cpu = &Device::Cpu;
        let random = |shape: &[usize]| Tensor::randn(0f32, 0.5, shape, cpu);
        let mut tensors: HashMap<String, Tensor> = HashMap::new();
        let table = random(&[HIDDEN, HIDDEN])?;
        tensors.insert("model.embed_tokens.weight".into(), table);
        for layer in 0..=LAYERS {
            for (name, shape) in [
                ("self_attn.q_proj", &[HIDDEN, HIDDEN][..]),
                ("self_attn.k_proj", &[HIDDEN / 2, HIDDEN]),
                ("self_attn.v_proj", &[HIDDEN / 2, HIDDEN]),
                ("self_attn.o_proj", &[HIDDEN, HIDDEN]),
                ("mlp.gate_proj", &[INNER, HIDDEN]),
                ("mlp.up_proj", &[INNER, HIDDEN]),
                ("mlp.down_proj", &[HIDDEN, INNER]),
                ("input_layernorm", &[HIDDEN]),
                ("post_attention_layernorm", &[HIDDEN]),
            ] {
                tensors.insert(
                    format!("model.layers.{layer}.{name}.weight"),
                    random(shape)?,
                );
            }
        }
        for (name, from) in [
            ("lm_head", "self_attn.q_proj"),
            ("model.norm", "input_layernorm"),
        ] {
            let tensor = tensors[&format!("model.layers.{LAYERS}.{from}.weight")].clone();
            tensors.insert(format!("{name}.weight"), tensor);
        }
        let file = std::env::temp_dir().join(format!("llama-{}.safetensors", std::process::id()));
        candle_core::safetensors::save(&tensors, &file)?;
        // SAFETY: nobody else knows the file.
        let mut source = Source::Safetensors(unsafe { MmapedSafetensors::multi(&[&file]) }?);
        let config = Config {
            heads: 4,
            kv_heads: 2,
            layers: LAYERS + 1,
            context: 64,
            theta: 1000.0,
            epsilon: 1e-5,
            interleaved: false,
        };
        let ours = Llama::new(&mut source, config, LAYERS, cpu)?;
        std::fs::remove_file(&file)?;
        let tokens = [3u32, 1, 4, 1, 5, 9, 2, 6, 5];
        let (q, k) = ours.queries_and_keys(&tokens)?;
        assert_eq!((q.dims(), k.dims()), (&[9, 4, 4][..], &[9, 2, 4][..]));

        let config = serde_json::json!({
            "hidden_size": HIDDEN, "intermediate_size": INNER, "vocab_size": HIDDEN,
            "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2,
            "rms_norm_eps": 1e-5, "rope_theta": 1000.0, "max_position_embeddings": 64,
            "tie_word_embeddings": false,
        });
        let config = serde_json::from_value::<llama::LlamaConfig>(config)?.into_config(false);
        let mut cache = llama::Cache::new(false, DType::F32, &config, cpu)?;
        let vb = VarBuilder::from_tensors(tensors, DType::F32, cpu);
        let theirs = llama::Llama::load(vb, &config)?;
        let logits = theirs.forward(&Tensor::new(&[tokens], cpu)?, 0, &mut cache)?;
        let off = (logits.flatten_all()? - q.get(8)?.flatten_all()?)?;
        let off = off.abs()?.max(0)?.to_scalar::<f32>()?;
        assert!(off < 1e-4, "{off}");
        Ok(())
    }

    #[test]
    fn rotated_products_know_only_distances() -> Result<()> {
        let config = Config {
            heads: 1,
            kv_heads: 1,
            layers: 1,
            context: 8,
            theta: 100.0,
            epsilon: 1e-5,
            interleaved: true,
        };
        let x = Tensor::randn(0f32, 1.0, (2, 1, 8), &Device::Cpu)?;
        let product = |a: f64, b: f64| -> Result<f32> {
            let x = Rotary::new(&[a, b], 8, config, &Device::Cpu)?.apply(&x)?;
            Ok((x.get(0)? * x.get(1)?)?.sum_all()?.to_scalar::<f32>()?)
        };
        let near = product(3.0, 1.0)?;
        assert!((near - product(1e5 + 3.0, 1e5 + 1.0)?).abs() < 1e-3);
        assert!((near - product(3.0, 1.5)?).abs() > 1e-4);
        Ok(())
    }
}
