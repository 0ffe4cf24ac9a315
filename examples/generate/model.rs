//! Candle's models behind one face: tokens and a position in, the last token's logits out.

use std::collections::HashMap;
use std::fs::File;
use std::path::Path;

use anyhow::{bail, ensure, Context, Result};
use candle_core::quantized::gguf_file::{Content, Value};
use candle_core::safetensors::MmapedSafetensors;
use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::{
    gemma3, llama, mistral, quantized_gemma3, quantized_llama, quantized_qwen2, quantized_qwen3,
    qwen2, qwen3,
};
use serde_json::{json, Value as Json};
use tokenizers::Tokenizer;

use crate::chat::ChatTemplate;
use crate::source::{ModelFiles, Weights};
use crate::tokenizer;

/// A model with all that generation needs to know about it.
pub struct Loaded {
    pub model: Model,
    pub tokenizer: Tokenizer,
    pub chat: Option<ChatTemplate>,
    /// Generation ends at any of these.
    pub end_tokens: Vec<u32>,
}

pub struct Model {
    network: Network,
    device: Device,
    /// The greatest number of tokens, prompt included.
    pub context: usize,
}

enum Network {
    Llama {
        model: llama::Llama,
        cache: llama::Cache,
        empty: llama::Cache,
    },
    Mistral(mistral::Model),
    Qwen2(qwen2::ModelForCausalLM),
    Qwen3(qwen3::ModelForCausalLM),
    Gemma3(gemma3::Model),
    QuantizedLlama(quantized_llama::ModelWeights),
    QuantizedQwen2(quantized_qwen2::ModelWeights),
    QuantizedQwen3(quantized_qwen3::ModelWeights),
    QuantizedGemma3(quantized_gemma3::ModelWeights),
}

impl Model {
    /// Runs the model over `tokens`, the first of which stands at `position`, and gives the logits
    /// [V] of the last.
    pub fn forward(&mut self, tokens: &[u32], position: usize) -> Result<Tensor> {
        let input = Tensor::new(tokens, &self.device)?.unsqueeze(0)?;
        Ok(self.forward_batch(&input, position)?.squeeze(0)?)
    }

    /// Runs the model over tokens [B, T] of sequences of equal lengths, all at `position`, and gives
    /// the logits [B, V] of the last ones.
    pub fn forward_batch(&mut self, input: &Tensor, position: usize) -> Result<Tensor> {
        let logits = match &mut self.network {
            Network::Llama { model, cache, .. } => model.forward(input, position, cache)?,
            Network::Mistral(m) => m.forward(input, position)?,
            Network::Qwen2(m) => m.forward(input, position)?,
            Network::Qwen3(m) => m.forward(input, position)?,
            Network::Gemma3(m) => m.forward(input, position)?,
            Network::QuantizedLlama(m) => m.forward(input, position)?,
            Network::QuantizedQwen2(m) => m.forward(input, position)?,
            Network::QuantizedQwen3(m) => m.forward(input, position)?,
            Network::QuantizedGemma3(m) => m.forward(input, position)?,
        };
        // One row a sequence, as [B, V] or [B, 1, V].
        let batch = input.dim(0)?;
        Ok(logits.reshape((batch, logits.elem_count() / batch))?)
    }

    /// Whether prompts of several sequences go through the model in one pass. Candle's quantized
    /// models take the last positions of a batch as a view, which their products then refuse.
    pub fn takes_prompts_together(&self) -> bool {
        !matches!(
            self.network,
            Network::QuantizedLlama(_)
                | Network::QuantizedQwen2(_)
                | Network::QuantizedQwen3(_)
                | Network::QuantizedGemma3(_)
        )
    }

    /// Begins sequences with prompts [B, T] and gives the logits [B, V] after them: in one pass, or
    /// where the model doesn't take that, a token of each at a time.
    pub fn begin_batch(&mut self, prompts: &Tensor) -> Result<Tensor> {
        self.reset();
        let (batch, length) = prompts.dims2()?;
        if batch == 1 || self.takes_prompts_together() {
            return self.forward_batch(prompts, 0);
        }
        for position in 0..length.saturating_sub(1) {
            self.forward_batch(&prompts.narrow(1, position, 1)?.contiguous()?, position)?;
        }
        let last = length.saturating_sub(1);
        self.forward_batch(&prompts.narrow(1, last, 1)?.contiguous()?, last)
    }

    /// Forgets the tokens seen so far.
    pub fn reset(&mut self) {
        match &mut self.network {
            Network::Llama { cache, empty, .. } => *cache = empty.clone(),
            Network::Mistral(m) => m.clear_kv_cache(),
            Network::Qwen2(m) => m.clear_kv_cache(),
            Network::Qwen3(m) => m.clear_kv_cache(),
            Network::Gemma3(m) => m.clear_kv_cache(),
            Network::QuantizedLlama(m) => m.clear_kv_cache(),
            Network::QuantizedQwen2(m) => m.clear_kv_cache(),
            Network::QuantizedQwen3(m) => m.clear_kv_cache(),
            // Has no such method and needs none: it begins anew at position 0.
            Network::QuantizedGemma3(_) => (),
        }
    }

    pub fn device(&self) -> &Device {
        &self.device
    }
}

/// How to hold the weights.
#[derive(Clone, Copy, Debug, Default)]
pub struct Format {
    /// The type of weights that aren't quantized; a quantized GGUF file has its own.
    pub dtype: Option<DType>,
    /// Whether a GGUF file's weights are made into such.
    pub dequantize: bool,
}

/// Loads a model and its tokenizer.
pub fn load(
    files: &ModelFiles,
    tokenizer_file: Option<&Path>,
    format: Format,
    device: &Device,
) -> Result<Loaded> {
    let generation_config = match files.beside("generation_config.json") {
        Some(path) => tokenizer::read_json(&path)?,
        None => Json::Null,
    };
    let tokenizer_config = match files.beside("tokenizer_config.json") {
        Some(path) => tokenizer::read_json(&path)?,
        None => Json::Null,
    };
    let tokenizer_file = tokenizer_file
        .map(Path::to_path_buf)
        .or_else(|| files.beside("tokenizer.json"));
    let mut eos = tokenizer::eos_of_config(&generation_config);
    let mut chat = ChatTemplate {
        source: String::new(),
        bos_token: tokenizer::special_token_of_config(&tokenizer_config, "bos_token"),
        eos_token: tokenizer::special_token_of_config(&tokenizer_config, "eos_token"),
    };
    let mut template = match files.beside("chat_template.jinja") {
        Some(path) => Some(
            std::fs::read_to_string(&path)
                .with_context(|| format!("cannot read {}", path.display()))?,
        ),
        None => ChatTemplate::source_of_config(&tokenizer_config),
    };

    let (model, tokenizer) = match &files.weights {
        Weights::Gguf(path) => {
            let mut file =
                File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
            let content = Content::read(&mut file)
                .with_context(|| format!("{} is not a readable GGUF file", path.display()))?;
            let tokenizer = match &tokenizer_file {
                Some(file) => tokenizer::from_json(file)?,
                None => tokenizer::from_gguf(&content)?,
            };
            eos.extend(
                content
                    .metadata
                    .get("tokenizer.ggml.eos_token_id")
                    .and_then(tokenizer::to_id),
            );
            if let Some(Value::String(source)) = content.metadata.get("tokenizer.chat_template") {
                template.get_or_insert_with(|| source.clone());
            }
            for (token, name) in [(&mut chat.bos_token, "bos"), (&mut chat.eos_token, "eos")] {
                if token.is_none() {
                    *token = tokenizer::special_token_of_gguf(&content, name);
                }
            }
            let model = load_gguf(content, &mut file, format, device)
                .with_context(|| format!("cannot load {}", path.display()))?;
            (model, tokenizer)
        }
        Weights::Safetensors(paths) => {
            let config = files
                .beside("config.json")
                .context("there is no config.json beside the .safetensors file")?;
            let config = tokenizer::read_json(&config)?;
            if eos.is_empty() {
                eos = tokenizer::eos_of_config(&config);
            }
            let tokenizer_file = tokenizer_file.context(
                "there is no tokenizer.json beside the weights: name one with --tokenizer-file",
            )?;
            let tokenizer = tokenizer::from_json(&tokenizer_file)?;
            let model = load_safetensors(config, paths, format.dtype, device)?;
            (model, tokenizer)
        }
    };
    Ok(Loaded {
        end_tokens: tokenizer::end_tokens(&eos, &tokenizer),
        chat: template.map(|source| ChatTemplate { source, ..chat }),
        model,
        tokenizer,
    })
}

fn load_gguf(content: Content, file: &mut File, format: Format, device: &Device) -> Result<Model> {
    let architecture = match content.metadata.get("general.architecture") {
        Some(Value::String(name)) => name.clone(),
        _ => bail!("the file names no architecture"),
    };
    let trained = content
        .metadata
        .get(&format!("{architecture}.context_length"))
        .and_then(tokenizer::to_id)
        .map_or(usize::MAX, |n| n as usize);
    ensure!(
        architecture == "gemma3" || !format.dequantize,
        "its architecture is {architecture:?}, --dequantize accepts gemma3"
    );
    let (network, limit) = match architecture.as_str() {
        "llama" => (
            Network::QuantizedLlama(quantized_llama::ModelWeights::from_gguf(
                content, file, device,
            )?),
            quantized_llama::MAX_SEQ_LEN,
        ),
        "qwen2" => (
            Network::QuantizedQwen2(quantized_qwen2::ModelWeights::from_gguf(
                content, file, device,
            )?),
            trained,
        ),
        "qwen3" => (
            Network::QuantizedQwen3(quantized_qwen3::ModelWeights::from_gguf(
                content, file, device,
            )?),
            trained,
        ),
        "gemma3" if format.dequantize => {
            let dtype = format.dtype.unwrap_or(DType::F32);
            return dequantized_gemma3(&content, file, dtype, device);
        }
        "gemma3" => {
            eprintln!(
                "note: Candle's quantized Gemma 3 has SiLU where the model has GELU, and its text \
                 suffers: --dequantize takes Candle's other Gemma 3"
            );
            (
                Network::QuantizedGemma3(quantized_gemma3::ModelWeights::from_gguf(
                    content, file, device,
                )?),
                quantized_gemma3::MAX_SEQ_LEN,
            )
        }
        other => {
            bail!("its architecture is {other:?}, accepted are llama, qwen2, qwen3 and gemma3")
        }
    };
    Ok(Model {
        network,
        device: device.clone(),
        context: trained.min(limit),
    })
}

/// A GGUF file's Gemma 3 through Candle's unquantized model, whose names and conventions are
/// Hugging Face's.
fn dequantized_gemma3(
    content: &Content,
    file: &mut File,
    dtype: DType,
    device: &Device,
) -> Result<Model> {
    const OF_THE_MODEL: [(&str, &str); 2] =
        [("token_embd", "embed_tokens"), ("output_norm", "norm")];
    const OF_A_LAYER: [(&str, &str); 13] = [
        ("attn_norm", "input_layernorm"),
        ("attn_q", "self_attn.q_proj"),
        ("attn_k", "self_attn.k_proj"),
        ("attn_v", "self_attn.v_proj"),
        ("attn_output", "self_attn.o_proj"),
        ("attn_q_norm", "self_attn.q_norm"),
        ("attn_k_norm", "self_attn.k_norm"),
        ("post_attention_norm", "post_attention_layernorm"),
        ("ffn_norm", "pre_feedforward_layernorm"),
        ("ffn_gate", "mlp.gate_proj"),
        ("ffn_up", "mlp.up_proj"),
        ("ffn_down", "mlp.down_proj"),
        ("post_ffw_norm", "post_feedforward_layernorm"),
    ];
    let size = |name: &str| -> Result<u32> {
        let key = format!("gemma3.{name}");
        let value = content.metadata.get(&key).and_then(tokenizer::to_id);
        value.with_context(|| format!("it has no number {key:?}"))
    };
    let number = |name: &str| match content.metadata.get(&format!("gemma3.{name}")) {
        Some(Value::F32(value)) => json!(value),
        _ => Json::Null,
    };
    let layers = size("block_count")?;

    let of_the_model = OF_THE_MODEL.map(|(from, to)| (from.to_string(), format!("model.{to}")));
    let of_the_layers = (0..layers).flat_map(|layer| {
        OF_A_LAYER.map(|(from, to)| {
            (
                format!("blk.{layer}.{from}"),
                format!("model.layers.{layer}.{to}"),
            )
        })
    });
    let mut tensors = HashMap::new();
    let mut vocab = 0;
    for (from, to) in of_the_model.into_iter().chain(of_the_layers) {
        let quantized = content.tensor(file, &format!("{from}.weight"), device)?;
        let mut tensor = quantized.dequantize(device)?;
        if from == "token_embd" {
            vocab = tensor.dim(0)?;
        }
        // GGUF files hold the factor itself, Hugging Face's weights what it exceeds 1 by.
        if from.ends_with("norm") {
            tensor = (tensor - 1.0)?;
        }
        tensors.insert(format!("{to}.weight"), tensor.to_dtype(dtype)?);
    }
    let config = json!({
        "vocab_size": vocab,
        "hidden_size": size("embedding_length")?,
        "intermediate_size": size("feed_forward_length")?,
        "num_hidden_layers": layers,
        "num_attention_heads": size("attention.head_count")?,
        "num_key_value_heads": size("attention.head_count_kv")?,
        "head_dim": size("attention.key_length")?,
        "sliding_window": size("attention.sliding_window")?,
        "max_position_embeddings": size("context_length")?,
        "rms_norm_eps": number("attention.layer_norm_rms_epsilon"),
        "rope_theta": number("rope.freq_base"),
    });
    let config = serde_json::from_value(normalize(config, Architecture::Gemma3))?;
    let vb = VarBuilder::from_tensors(tensors, dtype, device);
    Ok(Model {
        network: Network::Gemma3(gemma3::Model::new(false, &config, vb)?),
        device: device.clone(),
        context: size("context_length")? as usize,
    })
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Architecture {
    Llama,
    Mistral,
    Qwen2,
    Qwen3,
    Gemma3,
}

impl Architecture {
    fn of_config(config: &Json) -> Result<Self> {
        let class = config["architectures"][0].as_str();
        let model_type = config["model_type"].as_str();
        Ok(match (class, model_type) {
            (Some("LlamaForCausalLM"), _) | (None, Some("llama")) => Self::Llama,
            (Some("MistralForCausalLM"), _) | (None, Some("mistral")) => Self::Mistral,
            (Some("Qwen2ForCausalLM"), _) | (None, Some("qwen2")) => Self::Qwen2,
            (Some("Qwen3ForCausalLM"), _) | (None, Some("qwen3")) => Self::Qwen3,
            (Some("Gemma3ForCausalLM" | "Gemma3ForConditionalGeneration"), _)
            | (None, Some("gemma3_text" | "gemma3")) => Self::Gemma3,
            _ => bail!(
                "the model's architecture is {}, accepted are LlamaForCausalLM, \
                 MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, Gemma3ForCausalLM and \
                 Gemma3ForConditionalGeneration",
                class.or(model_type).unwrap_or("not in config.json")
            ),
        })
    }
}

fn load_safetensors(
    config: Json,
    paths: &[std::path::PathBuf],
    dtype: Option<DType>,
    device: &Device,
) -> Result<Model> {
    let architecture = Architecture::of_config(&config)?;
    ensure!(
        config["quantization_config"].is_null(),
        "the weights are quantized ({}): take the unquantized model or a GGUF file",
        config["quantization_config"]["quant_method"]
    );
    let config = normalize(config, architecture);
    let dtype = dtype.unwrap_or(match architecture {
        _ if device.is_cpu() => DType::F32,
        // Candle computes this model's rotary angles in the model's own type, and bf16 can't tell
        // position 257 from 256.
        Architecture::Gemma3 => DType::F32,
        _ => DType::BF16,
    });

    // SAFETY: the files are mapped, so nobody may write to them meanwhile; they are a model's
    // weights, which programs replace but don't edit in place.
    let tensors = unsafe { MmapedSafetensors::multi(paths) }
        .with_context(|| format!("cannot read {}", paths[0].display()))?;
    let has = |name: &str| tensors.get(name).is_ok();
    let in_language_model = has("language_model.model.embed_tokens.weight");

    let context = config["max_position_embeddings"]
        .as_u64()
        .and_then(|n| usize::try_from(n).ok())
        .context("config.json has no max_position_embeddings")?;
    let unreadable = "config.json doesn't describe such a model";
    let network = match architecture {
        Architecture::Llama => {
            check_llama(&config, &tensors)?;
            let config: llama::LlamaConfig = serde_json::from_value(config).context(unreadable)?;
            let config = config.into_config(false);
            let vb = VarBuilder::from_backend(Box::new(tensors), dtype, device.clone());
            let empty = llama::Cache::new(true, dtype, &config, device)?;
            Network::Llama {
                model: llama::Llama::load(vb, &config)?,
                cache: empty.clone(),
                empty,
            }
        }
        other => {
            let mut vb = VarBuilder::from_backend(Box::new(tensors), dtype, device.clone());
            if in_language_model {
                vb = vb.pp("language_model");
            }
            match other {
                Architecture::Llama | Architecture::Mistral => {
                    let config = serde_json::from_value(config).context(unreadable)?;
                    Network::Mistral(mistral::Model::new(&config, vb)?)
                }
                Architecture::Qwen2 => {
                    let config = serde_json::from_value(config).context(unreadable)?;
                    Network::Qwen2(qwen2::ModelForCausalLM::new(&config, vb)?)
                }
                Architecture::Qwen3 => {
                    let config = serde_json::from_value(config).context(unreadable)?;
                    Network::Qwen3(qwen3::ModelForCausalLM::new(&config, vb)?)
                }
                Architecture::Gemma3 => {
                    let config = serde_json::from_value(config).context(unreadable)?;
                    Network::Gemma3(gemma3::Model::new(false, &config, vb)?)
                }
            }
        }
    };
    Ok(Model {
        network,
        device: device.clone(),
        context,
    })
}

/// Brings a `config.json` of any age into the form that Candle's structs read.
///
/// Recent ones keep the rotary base in `rope_parameters`; multimodal ones keep the text model's
/// part in `text_config` and leave out what equals the library's defaults; and Gemma 3's has
/// renamed a field.
fn normalize(mut config: Json, architecture: Architecture) -> Json {
    if config["text_config"].is_object() {
        config = config["text_config"].take();
    }
    let Some(fields) = config.as_object_mut() else {
        return config;
    };
    let default = |fields: &mut serde_json::Map<String, Json>, name: &str, value: Json| {
        if fields.get(name).is_none_or(Json::is_null) {
            fields.insert(name.to_string(), value);
        }
    };
    if let Some(rope) = fields.remove("rope_parameters") {
        let of = |kind: &str| match &rope[kind]["rope_theta"] {
            Json::Null => rope["rope_theta"].clone(),
            theta => theta.clone(),
        };
        default(fields, "rope_theta", of("full_attention"));
        if architecture == Architecture::Gemma3 {
            default(fields, "rope_local_base_freq", of("sliding_attention"));
        }
        if rope["rope_type"]
            .as_str()
            .is_some_and(|kind| kind != "default")
        {
            default(fields, "rope_scaling", rope);
        }
    }
    match architecture {
        Architecture::Gemma3 => {
            if let Some(pattern) = fields.remove("_sliding_window_pattern") {
                default(fields, "sliding_window_pattern", pattern);
            }
            for (name, value) in [
                ("attention_bias", json!(false)),
                ("head_dim", json!(256)),
                ("hidden_activation", json!("gelu_pytorch_tanh")),
                ("max_position_embeddings", json!(131_072)),
                ("num_attention_heads", json!(8)),
                ("num_key_value_heads", json!(4)),
                ("query_pre_attn_scalar", json!(256)),
                ("rms_norm_eps", json!(1e-6)),
                ("rope_local_base_freq", json!(10_000.0)),
                ("rope_theta", json!(1_000_000.0)),
                ("sliding_window", json!(4096)),
                ("sliding_window_pattern", json!(6)),
                ("vocab_size", json!(262_208)),
            ] {
                default(fields, name, value);
            }
        }
        Architecture::Qwen2 | Architecture::Qwen3 => {
            let context = fields
                .get("max_position_embeddings")
                .cloned()
                .unwrap_or(Json::Null);
            let layers = fields
                .get("num_hidden_layers")
                .cloned()
                .unwrap_or(Json::Null);
            default(fields, "attention_bias", json!(false));
            default(fields, "max_window_layers", layers);
            default(fields, "tie_word_embeddings", json!(false));
            default(fields, "use_sliding_window", json!(false));
            if architecture == Architecture::Qwen2 {
                default(fields, "sliding_window", context);
            }
        }
        Architecture::Llama | Architecture::Mistral => (),
    }
    config
}

/// Checks what Candle's Llama takes for granted: it panics on a missing or misshapen weight, and
/// passes over biases and a head size of the model's own.
fn check_llama(config: &Json, tensors: &MmapedSafetensors) -> Result<()> {
    for name in ["attention_bias", "mlp_bias"] {
        ensure!(
            config[name].as_bool() != Some(true),
            "config.json has {name}, which Candle's Llama doesn't know"
        );
    }
    let size = |name: &str| -> Result<usize> {
        let value = config[name].as_u64().and_then(|n| usize::try_from(n).ok());
        value
            .filter(|&n| n > 0)
            .with_context(|| format!("config.json has no {name} above 0"))
    };
    let (hidden, inner, vocab) = (
        size("hidden_size")?,
        size("intermediate_size")?,
        size("vocab_size")?,
    );
    let heads = size("num_attention_heads")?;
    let kv_heads = if config["num_key_value_heads"].is_null() {
        heads
    } else {
        size("num_key_value_heads")?
    };
    let head = hidden / heads;
    let given = config["head_dim"].as_u64().unwrap_or(head as u64);
    ensure!(
        hidden.is_multiple_of(heads) && heads.is_multiple_of(kv_heads) && given == head as u64,
        "config.json has hidden_size {hidden}, {heads} heads, {kv_heads} key-value heads and a \
         head_dim of {given}: Candle's Llama takes a head_dim of hidden_size / heads, and heads in \
         equal groups"
    );

    let mut expected = vec![
        ("model.embed_tokens.weight".to_string(), vec![vocab, hidden]),
        ("model.norm.weight".to_string(), vec![hidden]),
    ];
    if config["tie_word_embeddings"].as_bool() != Some(true) {
        expected.push(("lm_head.weight".to_string(), vec![vocab, hidden]));
    }
    for layer in 0..size("num_hidden_layers")? {
        for (name, shape) in [
            ("self_attn.q_proj", vec![hidden, hidden]),
            ("self_attn.k_proj", vec![kv_heads * head, hidden]),
            ("self_attn.v_proj", vec![kv_heads * head, hidden]),
            ("self_attn.o_proj", vec![hidden, hidden]),
            ("mlp.gate_proj", vec![inner, hidden]),
            ("mlp.up_proj", vec![inner, hidden]),
            ("mlp.down_proj", vec![hidden, inner]),
            ("input_layernorm", vec![hidden]),
            ("post_attention_layernorm", vec![hidden]),
        ] {
            expected.push((format!("model.layers.{layer}.{name}.weight"), shape));
        }
    }
    for (name, shape) in expected {
        let tensor = tensors
            .get(&name)
            .with_context(|| format!("the weights have no {name}"))?;
        ensure!(
            tensor.shape() == shape,
            "the weight {name} has shape {:?}, config.json asks for {shape:?}",
            tensor.shape()
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::{self, tests::TestFolder, Request};

    /// Sizes so small that a test takes no time, and unequal so that no two can be confused.
    fn config(architecture: &str) -> Json {
        json!({
            "architectures": [architecture],
            "hidden_size": 8, "intermediate_size": 12, "vocab_size": 273, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "rms_norm_eps": 1e-5,
            "max_position_embeddings": 64, "rope_theta": 10000.0, "tie_word_embeddings": true,
            "hidden_act": "silu", "eos_token_id": [1],
            "sliding_window": architecture.starts_with("Gemma").then_some(16),
        })
    }

    fn write_model(folder: &TestFolder, config: &Json, extra: &[(&str, &[usize])], drop: &str) {
        let n = |name: &str| config[name].as_u64().unwrap() as usize;
        let (hidden, inner, vocab) = (n("hidden_size"), n("intermediate_size"), n("vocab_size"));
        let mut shapes: Vec<(String, Vec<usize>)> = vec![
            ("model.embed_tokens.weight".into(), vec![vocab, hidden]),
            ("model.norm.weight".into(), vec![hidden]),
        ];
        if config["tie_word_embeddings"] == json!(false) {
            shapes.push(("lm_head.weight".into(), vec![vocab, hidden]));
        }
        for layer in 0..n("num_hidden_layers") {
            let base: [(&str, &[usize]); 9] = [
                ("self_attn.q_proj.weight", &[hidden, hidden]),
                ("self_attn.k_proj.weight", &[4, hidden]),
                ("self_attn.v_proj.weight", &[4, hidden]),
                ("self_attn.o_proj.weight", &[hidden, hidden]),
                ("mlp.gate_proj.weight", &[inner, hidden]),
                ("mlp.up_proj.weight", &[inner, hidden]),
                ("mlp.down_proj.weight", &[hidden, inner]),
                ("input_layernorm.weight", &[hidden]),
                ("post_attention_layernorm.weight", &[hidden]),
            ];
            for (name, shape) in base.iter().chain(extra) {
                shapes.push((format!("model.layers.{layer}.{name}"), shape.to_vec()));
            }
        }
        let mut tensors = HashMap::new();
        for (i, (name, shape)) in shapes.into_iter().enumerate() {
            let count: usize = shape.iter().product();
            let values: Vec<f32> = (0..count)
                .map(|j| ((i * 31 + j * 17) % 23) as f32 / 23.0 - 0.4)
                .collect();
            if name != drop {
                tensors.insert(name, Tensor::from_vec(values, shape, &Device::Cpu).unwrap());
            }
        }
        candle_core::safetensors::save(&tensors, folder.path().join("model.safetensors")).unwrap();
        folder.write("config.json", config.to_string());
        crate::tokenizer::tests::tiny_tokenizer()
            .save(folder.path().join("tokenizer.json"), false)
            .unwrap();
    }

    fn load_folder(folder: &TestFolder) -> Result<Loaded> {
        let files = source::find(&Request {
            model: folder.path().to_str(),
            ..Request::default()
        })?;
        load(&files, None, Format::default(), &Device::Cpu)
    }

    /// A model fed at once, token by token, and after a reset gives the same logits.
    fn check(architecture: &str, extra: &[(&str, &[usize])]) {
        let folder = TestFolder::new(architecture);
        let mut config = config(architecture);
        // Candle's Mistral has no other form.
        config["tie_word_embeddings"] = json!(architecture != "MistralForCausalLM");
        write_model(&folder, &config, extra, "");
        let mut loaded = load_folder(&folder).unwrap();
        assert_eq!(loaded.end_tokens, [1]);
        assert_eq!(loaded.model.context, 64);
        let values = |t: Tensor| t.to_dtype(DType::F32).unwrap().to_vec1::<f32>().unwrap();
        let model = &mut loaded.model;
        let at_once = values(model.forward(&[3, 1, 4, 1, 5], 0).unwrap());
        assert_eq!(at_once.len(), 273);
        let is_like_at_once = |other: Tensor| {
            let other = values(other);
            let off = at_once
                .iter()
                .zip(&other)
                .map(|(a, b)| (a - b).abs())
                .fold(0.0, f32::max);
            assert!(off < 1e-4, "{architecture}: {off}");
        };
        for _ in 0..2 {
            model.reset();
            model.forward(&[3, 1, 4], 0).unwrap();
            model.forward(&[1], 3).unwrap();
            is_like_at_once(model.forward(&[5], 4).unwrap());
        }
        // Sequences side by side don't see each other.
        let prompts = Tensor::new(&[[7u32, 2, 6, 2], [3, 1, 4, 1]], &Device::Cpu).unwrap();
        assert_eq!(model.begin_batch(&prompts).unwrap().dims(), [2, 273]);
        let next = Tensor::new(&[[9u32], [5]], &Device::Cpu).unwrap();
        is_like_at_once(model.forward_batch(&next, 4).unwrap().get(1).unwrap());
    }

    const HEAD_NORMS: [(&str, &[usize]); 2] = [
        ("self_attn.q_norm.weight", &[4]),
        ("self_attn.k_norm.weight", &[4]),
    ];

    #[test]
    fn llama_and_mistral_load_and_remember() {
        check("LlamaForCausalLM", &[]);
        check("MistralForCausalLM", &[]);
    }

    #[test]
    fn qwen3_loads_and_remembers() {
        check("Qwen3ForCausalLM", &HEAD_NORMS);
    }

    #[test]
    fn qwen2_loads_and_remembers() {
        let biases: [(&str, &[usize]); 3] = [
            ("self_attn.q_proj.bias", &[8]),
            ("self_attn.k_proj.bias", &[4]),
            ("self_attn.v_proj.bias", &[4]),
        ];
        check("Qwen2ForCausalLM", &biases);
    }

    #[test]
    fn gemma3_loads_and_remembers() {
        let [q, k] = HEAD_NORMS;
        check(
            "Gemma3ForCausalLM",
            &[
                q,
                k,
                ("pre_feedforward_layernorm.weight", &[8]),
                ("post_feedforward_layernorm.weight", &[8]),
            ],
        );
    }

    #[test]
    fn what_is_wrong_with_a_model_is_said_and_never_a_panic() {
        let message = |config: Json, drop: &str| {
            let folder = TestFolder::new("wrong");
            write_model(&folder, &config, &[], drop);
            match load_folder(&folder) {
                Ok(_) => String::new(),
                Err(e) => format!("{e:#}"),
            }
        };
        let llama = || config("LlamaForCausalLM");
        let lost = "model.layers.1.mlp.up_proj.weight";
        assert!(message(llama(), lost).contains(lost));
        let mut wider = llama();
        wider["intermediate_size"] = json!(13);
        // The weights follow the config here, so change the config alone.
        let folder = TestFolder::new("wider");
        write_model(&folder, &llama(), &[], "");
        folder.write("config.json", wider.to_string());
        let text = format!("{:#}", load_folder(&folder).err().unwrap());
        assert!(
            text.contains("gate_proj") && text.contains("[13, 8]"),
            "{text}"
        );

        assert!(message(config("OPTForCausalLM"), "").contains("LlamaForCausalLM"));
        let mut biased = llama();
        biased["attention_bias"] = json!(true);
        assert!(message(biased, "").contains("attention_bias"));
        let mut quantized = llama();
        quantized["quantization_config"] = json!({"quant_method": "gptq"});
        assert!(message(quantized, "").contains("gptq"));
        let mut headless = llama();
        headless["num_attention_heads"] = json!(0);
        assert!(message(headless, "").contains("num_attention_heads"));
    }

    #[test]
    fn recent_configs_are_brought_into_the_older_form() {
        let new = json!({
            "rope_parameters": {
                "full_attention": {"rope_theta": 1e6, "rope_type": "default"},
                "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
            },
            "_sliding_window_pattern": 5,
        });
        let old = normalize(new, Architecture::Gemma3);
        assert_eq!(old["rope_theta"], json!(1e6));
        assert_eq!(old["rope_local_base_freq"], json!(1e4));
        assert_eq!(old["sliding_window_pattern"], json!(5));

        let scaled =
            json!({"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", "factor": 8.0}});
        let old = normalize(scaled, Architecture::Llama);
        assert_eq!(old["rope_theta"], json!(5e5));
        assert_eq!(old["rope_scaling"]["factor"], json!(8.0));

        let multimodal = json!({"text_config": {"hidden_size": 2560}});
        let old = normalize(multimodal, Architecture::Gemma3);
        assert_eq!(old["hidden_size"], json!(2560));
        assert_eq!(old["sliding_window_pattern"], json!(6));
    }
}
