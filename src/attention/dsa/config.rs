//! Hugging Face's `config.json` of the models with DeepSeek Sparse Attention.

use candle_core::{bail, Error, Result};
use serde::Deserialize;

/// How the pairs that RoPE rotates lie in a vector.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RopeLayout {
    /// (0, d/2), (1, d/2 + 1), ...: non-interleaved, NeoX.
    HalfSplit,
    /// (0, 1), (2, 3), ...: GPT-J.
    Interleaved,
}

/// Whether a layer chooses its positions itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IndexerType {
    /// It has an indexer.
    Full,
    /// It takes the positions of the last full layer before it (IndexCache, arXiv 2603.12201).
    Shared,
}

/// YaRN, the scaling of RoPE beyond the trained context.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Yarn {
    /// How far positions are stretched.
    pub factor: f64,
    /// The trained context.
    pub original_max_position_embeddings: usize,
    /// Rotations within the trained context above which a frequency is kept.
    pub beta_fast: f64,
    /// Rotations below which it is stretched in full.
    pub beta_slow: f64,
    /// Of the scale of the rotated part.
    pub mscale: Option<f64>,
    /// Of the softmax scale.
    pub mscale_all_dim: Option<f64>,
    /// The scale of the rotated part, instead of what both mscales give.
    pub attention_factor: Option<f64>,
    /// Whether the range between both betas is widened to whole dimensions.
    pub truncate: bool,
}

/// The attention of a DeepSeek-V3.2 (`deepseek_v32`) or GLM-5 (`glm_moe_dsa`) model.
#[derive(Debug, Clone, PartialEq)]
pub struct DsaConfig {
    /// `deepseek_v32` or `glm_moe_dsa`.
    pub model_type: String,
    /// Numbers of a hidden state.
    pub hidden_size: usize,
    /// Layers.
    pub num_hidden_layers: usize,
    /// Heads of the attention.
    pub num_attention_heads: usize,
    /// Rank of the latent that queries are made of, for the attention and the indexer.
    pub q_lora_rank: usize,
    /// Rank of the latent that keys and values are made of, and that is cached.
    pub kv_lora_rank: usize,
    /// Numbers of a head's query and key without RoPE.
    pub qk_nope_head_dim: usize,
    /// Numbers with RoPE, one such part of the key shared by all heads.
    pub qk_rope_head_dim: usize,
    /// Numbers of a head's value.
    pub v_head_dim: usize,
    /// Whether q_a_proj, kv_a_proj_with_mqa and o_proj have a bias.
    pub attention_bias: bool,
    /// Of the norms outside the attention; its own have 1e-6 in both models.
    pub rms_norm_eps: f64,
    /// The longest context.
    pub max_position_embeddings: usize,
    /// The base of RoPE's frequencies.
    pub rope_theta: f64,
    /// The scaling of RoPE.
    pub yarn: Option<Yarn>,
    /// Heads of the indexer.
    pub index_n_heads: usize,
    /// Numbers of the indexer's queries and keys, of which the first `qk_rope_head_dim` have RoPE.
    pub index_head_dim: usize,
    /// K: positions that a token attends to.
    pub index_topk: usize,
    /// RoPE in the indexer; that of the attention itself is interleaved.
    pub indexer_rope: RopeLayout,
    /// Of each layer.
    pub indexer_types: Vec<IndexerType>,
    /// Layers from the first on whose feed-forward part is dense.
    pub first_k_dense_replace: usize,
    /// Rows and columns that share a scale in fp8 weights.
    pub weight_block_size: Option<[usize; 2]>,
    /// Whether scales of fp8 activations are powers of two.
    pub ue8m0: bool,
}

#[derive(Deserialize)]
struct Raw {
    model_type: String,
    hidden_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: Option<usize>,
    q_lora_rank: Option<usize>,
    kv_lora_rank: usize,
    qk_nope_head_dim: usize,
    qk_rope_head_dim: usize,
    v_head_dim: usize,
    attention_bias: Option<bool>,
    rms_norm_eps: Option<f64>,
    max_position_embeddings: usize,
    rope_theta: Option<f64>,
    rope_scaling: Option<Rope>,
    rope_parameters: Option<Rope>,
    index_n_heads: usize,
    index_head_dim: usize,
    index_topk: usize,
    indexer_rope_interleave: Option<bool>,
    indexer_types: Option<Vec<String>>,
    index_topk_pattern: Option<Pattern>,
    index_topk_freq: Option<usize>,
    index_skip_topk_offset: Option<i64>,
    use_index_cache: Option<bool>,
    first_k_dense_replace: Option<usize>,
    quantization_config: Option<Quantization>,
}

/// `rope_scaling`, or `rope_parameters` in newer files.
#[derive(Deserialize, Clone)]
struct Rope {
    #[serde(alias = "type")]
    rope_type: Option<String>,
    rope_theta: Option<f64>,
    factor: Option<f64>,
    original_max_position_embeddings: Option<usize>,
    beta_fast: Option<f64>,
    beta_slow: Option<f64>,
    mscale: Option<f64>,
    mscale_all_dim: Option<f64>,
    attention_factor: Option<f64>,
    truncate: Option<bool>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Pattern {
    Letters(String),
    Names(Vec<String>),
}

#[derive(Deserialize)]
struct Quantization {
    scale_fmt: Option<String>,
    weight_block_size: Option<[usize; 2]>,
}

const OP: &str = "DsaConfig";

impl DsaConfig {
    /// Reads a `config.json`. Fields of other parts of the model are not looked at.
    ///
    /// # Errors
    /// For text that is no such file, another model type, and values that no such model has.
    pub fn from_json(json: &str) -> Result<Self> {
        // rope_type and type may stand side by side: the older name goes.
        let mut value: serde_json::Value = serde_json::from_str(json).map_err(Error::wrap)?;
        for name in ["rope_scaling", "rope_parameters"] {
            if let Some(rope) = value.get_mut(name).and_then(|rope| rope.as_object_mut()) {
                if rope.contains_key("rope_type") {
                    rope.remove("type");
                }
            }
        }
        let raw: Raw = serde_json::from_value(value).map_err(Error::wrap)?;
        raw.config()
    }

    /// Whether a layer has an indexer.
    pub fn indexer_type(&self, layer: usize) -> Result<IndexerType> {
        match self.indexer_types.get(layer) {
            Some(&kind) => Ok(kind),
            None => bail!(
                "{OP}: the layer is {layer}, the model has {}",
                self.num_hidden_layers
            ),
        }
    }

    /// What q . k is multiplied by: the head dimension to the power of -1/2, and YaRN's part.
    pub fn softmax_scale(&self) -> f64 {
        let scale = ((self.qk_nope_head_dim + self.qk_rope_head_dim) as f64).powf(-0.5);
        match self.yarn {
            Some(Yarn {
                factor,
                mscale_all_dim: Some(mscale),
                ..
            }) if mscale != 0.0 => scale * yarn_mscale(factor, mscale).powi(2),
            _ => scale,
        }
    }

    /// The frequencies of RoPE's pairs, and the scale of its cosines and sines. In f32, step by
    /// step as the models were trained: at position 100,000 an angle's rounding shows.
    pub(super) fn frequencies(&self) -> (Vec<f32>, f32) {
        let dim = self.qk_rope_head_dim;
        let base = self.rope_theta as f32;
        let periods = (0..dim / 2).map(|i| base.powf((2 * i) as f32 / dim as f32));
        let Some(yarn) = self.yarn else {
            return (periods.map(|period| 1.0 / period).collect(), 1.0);
        };
        // The pair that turns `rotations` times within the trained context.
        let trained = yarn.original_max_position_embeddings as f64;
        let pair = |rotations: f64| {
            let turns = trained / (rotations * std::f64::consts::TAU);
            dim as f64 * turns.ln() / (2.0 * self.rope_theta.ln())
        };
        let (mut low, mut high) = (pair(yarn.beta_fast), pair(yarn.beta_slow));
        if yarn.truncate {
            (low, high) = (low.floor(), high.ceil());
        }
        let (low, mut high) = (low.max(0.0), high.min(dim as f64 - 1.0));
        if low == high {
            high += 0.001;
        }
        let factor = yarn.factor as f32;
        let stretched = periods.enumerate().map(|(i, period)| {
            let ramp = (i as f32 - low as f32) / (high - low) as f32;
            let kept = 1.0 - ramp.clamp(0.0, 1.0);
            1.0 / (factor * period) * (1.0 - kept) + 1.0 / period * kept
        });
        let scale = match (yarn.attention_factor, yarn.mscale, yarn.mscale_all_dim) {
            (Some(scale), ..) => scale,
            (None, Some(mscale), Some(all)) if mscale != 0.0 && all != 0.0 => {
                yarn_mscale(yarn.factor, mscale) / yarn_mscale(yarn.factor, all)
            }
            _ => yarn_mscale(yarn.factor, 1.0),
        };
        (stretched.collect(), scale as f32)
    }
}

fn yarn_mscale(factor: f64, mscale: f64) -> f64 {
    if factor <= 1.0 {
        1.0
    } else {
        0.1 * mscale * factor.ln() + 1.0
    }
}

impl Raw {
    fn config(self) -> Result<DsaConfig> {
        let interleaved = match self.model_type.as_str() {
            "deepseek_v32" => false,
            "glm_moe_dsa" => true,
            other => bail!(
                "{OP}: model_type is {other:?}, \"deepseek_v32\" and \"glm_moe_dsa\" are accepted"
            ),
        };
        let Some(q_lora_rank) = self.q_lora_rank else {
            bail!("{OP}: q_lora_rank is missing, the indexer's queries are made of that latent")
        };
        for (name, value) in [
            ("hidden_size", self.hidden_size),
            ("num_hidden_layers", self.num_hidden_layers),
            ("num_attention_heads", self.num_attention_heads),
            ("q_lora_rank", q_lora_rank),
            ("kv_lora_rank", self.kv_lora_rank),
            ("qk_nope_head_dim", self.qk_nope_head_dim),
            ("qk_rope_head_dim", self.qk_rope_head_dim),
            ("v_head_dim", self.v_head_dim),
            ("index_n_heads", self.index_n_heads),
            ("index_head_dim", self.index_head_dim),
            ("index_topk", self.index_topk),
        ] {
            if value == 0 {
                bail!("{OP}: {name} is 0, at least 1 is needed")
            }
        }
        if !self.qk_rope_head_dim.is_multiple_of(2) || self.index_head_dim < self.qk_rope_head_dim {
            bail!(
                "{OP}: qk_rope_head_dim is {}, an even number is needed, of at most index_head_dim = {}",
                self.qk_rope_head_dim,
                self.index_head_dim
            )
        }
        let heads = self.num_attention_heads;
        if let Some(kv_heads) = self.num_key_value_heads.filter(|&n| n != heads) {
            bail!("{OP}: num_key_value_heads is {kv_heads}, as many as num_attention_heads = {heads} are needed: the latent is expanded to all heads")
        }
        let rope = self.rope_parameters.clone().or(self.rope_scaling.clone());
        let theta = rope.as_ref().and_then(|rope| rope.rope_theta);
        let yarn = match rope {
            Some(rope) => rope.yarn(self.max_position_embeddings)?,
            None => None,
        };
        let indexer_types = self.indexer_types()?;
        let quantization = self.quantization_config.as_ref();
        Ok(DsaConfig {
            hidden_size: self.hidden_size,
            num_hidden_layers: self.num_hidden_layers,
            num_attention_heads: heads,
            q_lora_rank,
            kv_lora_rank: self.kv_lora_rank,
            qk_nope_head_dim: self.qk_nope_head_dim,
            qk_rope_head_dim: self.qk_rope_head_dim,
            v_head_dim: self.v_head_dim,
            attention_bias: self.attention_bias.unwrap_or(false),
            rms_norm_eps: self.rms_norm_eps.unwrap_or(1e-6),
            max_position_embeddings: self.max_position_embeddings,
            rope_theta: theta.or(self.rope_theta).unwrap_or(10000.0),
            yarn,
            index_n_heads: self.index_n_heads,
            index_head_dim: self.index_head_dim,
            index_topk: self.index_topk,
            indexer_rope: match self.indexer_rope_interleave.unwrap_or(interleaved) {
                true => RopeLayout::Interleaved,
                false => RopeLayout::HalfSplit,
            },
            indexer_types,
            first_k_dense_replace: self.first_k_dense_replace.unwrap_or(0),
            weight_block_size: quantization.and_then(|q| q.weight_block_size),
            ue8m0: quantization.is_some_and(|q| q.scale_fmt.as_deref() == Some("ue8m0")),
            model_type: self.model_type,
        })
    }

    /// By the list of types, else the pattern, else the frequency: the order of Hugging Face's
    /// configuration. `use_index_cache: false` gives every layer its own.
    fn indexer_types(&self) -> Result<Vec<IndexerType>> {
        let layers = self.num_hidden_layers;
        if self.use_index_cache == Some(false) {
            return Ok(vec![IndexerType::Full; layers]);
        }
        let named = |names: &[String]| -> Result<Vec<IndexerType>> {
            names.iter().map(|name| indexer_type(name)).collect()
        };
        let types = match (&self.indexer_types, &self.index_topk_pattern) {
            (Some(names), _) | (None, Some(Pattern::Names(names))) => named(names)?,
            (None, Some(Pattern::Letters(letters))) => letters
                .chars()
                .map(|letter| indexer_type(&letter.to_string()))
                .collect::<Result<_>>()?,
            (None, None) => {
                let frequency = self.index_topk_freq.unwrap_or(1).max(1) as i64;
                let offset = self.index_skip_topk_offset.unwrap_or(2);
                (0..layers as i64)
                    .map(|i| match (i - offset + 1).max(0) % frequency {
                        0 => IndexerType::Full,
                        _ => IndexerType::Shared,
                    })
                    .collect()
            }
        };
        if types.len() < layers {
            bail!(
                "{OP}: {} layers have an indexer type, the model has {layers}",
                types.len()
            )
        }
        if types.first() == Some(&IndexerType::Shared) {
            bail!("{OP}: layer 0 shares the positions of a layer before it, there is none")
        }
        Ok(types[..layers].to_vec())
    }
}

fn indexer_type(name: &str) -> Result<IndexerType> {
    Ok(match name {
        "full" | "F" => IndexerType::Full,
        "shared" | "S" => IndexerType::Shared,
        other => bail!(
            "{OP}: an indexer type is {other:?}, \"full\" (F) and \"shared\" (S) are accepted"
        ),
    })
}

impl Rope {
    fn yarn(&self, max_position_embeddings: usize) -> Result<Option<Yarn>> {
        match self.rope_type.as_deref() {
            None | Some("default") => return Ok(None),
            Some("yarn") => (),
            Some(other) => {
                bail!("{OP}: the RoPE scaling is {other:?}, \"yarn\" and \"default\" are accepted")
            }
        }
        let Some(trained) = self.original_max_position_embeddings.filter(|&n| n > 0) else {
            bail!("{OP}: YaRN needs original_max_position_embeddings")
        };
        let factor = self
            .factor
            .unwrap_or(max_position_embeddings as f64 / trained as f64);
        if !(factor > 0.0 && factor.is_finite()) {
            bail!("{OP}: YaRN's factor is {factor}, a number above 0 is needed")
        }
        // 0 and absent mean the default, as in the reference.
        let beta = |beta: Option<f64>, default| beta.filter(|&b| b != 0.0).unwrap_or(default);
        Ok(Some(Yarn {
            factor,
            original_max_position_embeddings: trained,
            beta_fast: beta(self.beta_fast, 32.0),
            beta_slow: beta(self.beta_slow, 1.0),
            mscale: self.mscale,
            mscale_all_dim: self.mscale_all_dim,
            attention_factor: self.attention_factor,
            truncate: self.truncate.unwrap_or(true),
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const V32: &str = r#"{
        "architectures": ["DeepseekV32ForCausalLM"], "attention_bias": false, "model_type": "deepseek_v32",
        "first_k_dense_replace": 3, "hidden_size": 7168, "index_head_dim": 128, "index_n_heads": 64,
        "index_topk": 2048, "kv_lora_rank": 512, "max_position_embeddings": 163840,
        "num_attention_heads": 128, "num_hidden_layers": 61, "num_key_value_heads": 128,
        "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
        "quantization_config": {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
            "scale_fmt": "ue8m0", "weight_block_size": [128, 128]},
        "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0,
            "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096, "type": "yarn"},
        "rope_theta": 10000, "v_head_dim": 128, "vocab_size": 129280
    }"#;

    fn edited(edit: impl FnOnce(&mut serde_json::Map<String, serde_json::Value>)) -> String {
        let mut value: serde_json::Value = serde_json::from_str(V32).unwrap();
        edit(value.as_object_mut().unwrap());
        value.to_string()
    }

    #[test]
    fn deepseek_v32() -> Result<()> {
        let config = DsaConfig::from_json(V32)?;
        assert_eq!(config.indexer_rope, RopeLayout::HalfSplit);
        assert_eq!(config.indexer_types, [IndexerType::Full; 61]);
        assert!(config.ue8m0);
        assert_eq!(config.weight_block_size, Some([128, 128]));
        // 192^-1/2 (0.1 ln 40 + 1)^2, and equal mscales cancel in the rotated part.
        assert!((config.softmax_scale() - 0.135_233).abs() < 1e-5);
        let (frequencies, scale) = config.frequencies();
        assert_eq!((frequencies.len(), scale), (32, 1.0));
        assert_eq!(frequencies[0], 1.0);
        // The slowest pair is stretched in full.
        let slowest = 1e4f32.powf(-62.0 / 64.0) / 40.0;
        assert!((frequencies[31] / slowest - 1.0).abs() < 1e-6);
        Ok(())
    }

    #[test]
    fn glm() -> Result<()> {
        let json = edited(|config| {
            config.insert("model_type".into(), "glm_moe_dsa".into());
            config.remove("rope_scaling");
            config.remove("rope_theta");
            config.insert(
                "rope_parameters".into(),
                serde_json::json!({"rope_theta": 1000000, "rope_type": "default"}),
            );
            config.insert("index_topk_freq".into(), 4.into());
            config.insert("num_hidden_layers".into(), 9.into());
        });
        let config = DsaConfig::from_json(&json)?;
        assert_eq!(config.indexer_rope, RopeLayout::Interleaved);
        assert_eq!((config.rope_theta, config.yarn), (1e6, None));
        use IndexerType::{Full, Shared};
        let types = [
            Full, Full, Shared, Shared, Shared, Full, Shared, Shared, Shared,
        ];
        assert_eq!(config.indexer_types, types);
        assert_eq!(config.indexer_type(5)?, Full);
        assert!(config.indexer_type(9).is_err());
        Ok(())
    }

    #[test]
    fn patterns_of_indexers() -> Result<()> {
        use IndexerType::{Full, Shared};
        for (name, value) in [
            ("index_topk_pattern", serde_json::json!("FSF")),
            (
                "index_topk_pattern",
                serde_json::json!(["full", "shared", "full"]),
            ),
            (
                "indexer_types",
                serde_json::json!(["full", "shared", "full"]),
            ),
        ] {
            let json = edited(|config| {
                config.insert("num_hidden_layers".into(), 3.into());
                config.insert(name.into(), value.clone());
            });
            let config = DsaConfig::from_json(&json)?;
            assert_eq!(config.indexer_types, [Full, Shared, Full], "{name} {value}");
            let json = json.replacen('{', r#"{"use_index_cache": false,"#, 1);
            assert_eq!(DsaConfig::from_json(&json)?.indexer_types, [Full; 3]);
        }
        Ok(())
    }

    #[test]
    fn refusals() {
        type Edit = fn(&mut serde_json::Map<String, serde_json::Value>);
        let cases: [(Edit, &str); 9] = [
            (
                |c| drop(c.insert("model_type".into(), "llama".into())),
                "model_type is \"llama\"",
            ),
            (
                |c| drop(c.insert("q_lora_rank".into(), serde_json::Value::Null)),
                "q_lora_rank",
            ),
            (
                |c| drop(c.insert("index_topk".into(), 0.into())),
                "index_topk is 0",
            ),
            (|c| drop(c.remove("index_topk")), "index_topk"),
            (
                |c| drop(c.insert("index_head_dim".into(), 32.into())),
                "index_head_dim = 32",
            ),
            (
                |c| drop(c.insert("num_key_value_heads".into(), 8.into())),
                "num_key_value_heads is 8",
            ),
            (
                |c| drop(c.insert("index_topk_pattern".into(), "FX".into())),
                "\"X\"",
            ),
            (
                |c| drop(c.insert("index_topk_pattern".into(), "F".into())),
                "61",
            ),
            (
                |c| c["rope_scaling"]["type"] = "linear".into(),
                "\"linear\"",
            ),
        ];
        for (edit, part) in cases {
            let message = DsaConfig::from_json(&edited(edit)).unwrap_err().to_string();
            assert!(message.contains(part), "{message:?} says {part:?}");
        }
        assert!(DsaConfig::from_json("{").is_err());
    }
}
