//! The attention layer of DeepSeek-V3.2 and GLM-5: multi-head latent attention over the positions
//! that its indexer chooses.
//!
//! [`DsaAttention`] is the module `self_attn` of a decoder layer. It takes hidden states after the
//! layer's input norm and gives what is added to the residual; all else of the model (feed-forward
//! parts, embeddings) is not here.
//!
//! ```no_run
//! use candle_core::{DType, Device, Tensor};
//! use candle_nn::VarBuilder;
//! use candle_topk::attention::dsa::{DsaAttention, DsaCache, DsaConfig, Rope};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let (device, files) = (Device::Cpu, [""]);
//! let config = DsaConfig::from_json(&std::fs::read_to_string("config.json")?)?;
//! // SAFETY: the files are not changed while they are mapped.
//! let vb = unsafe { VarBuilder::from_mmaped_safetensors(&files, DType::BF16, &device)? };
//! let rope = Rope::new(&config, 32768, &device)?;
//! let attention = DsaAttention::load(&config, 0, &rope, vb.pp("model.layers.0.self_attn"))?;
//!
//! let mut cache = DsaCache::new(&config, 0, 1, 32768, DType::BF16, &device)?;
//! let prompt = Tensor::randn(0f32, 1., (1, 5000, config.hidden_size), &device)?.to_dtype(DType::BF16)?;
//! let prefilled = attention.forward(&prompt, &mut cache, 0, None)?;
//! let token = Tensor::randn(0f32, 1., (1, 1, config.hidden_size), &device)?.to_dtype(DType::BF16)?;
//! let decoded = attention.forward(&token, &mut cache, 0, None)?;
//! assert_eq!(decoded.positions.dims(), [1, config.index_topk]);
//! # let _ = prefilled;
//! # Ok(())
//! # }
//! ```
//!
//! On CUDA a step of decoding is also a CUDA graph: [`DecodeGraph`] of a layer, or
//! [`decode_into`](DsaAttention::decode_into) within one of a model.

mod cache;
mod config;
mod decode;
mod rope;
mod step;
mod weights;

pub use cache::DsaCache;
pub use config::{DsaConfig, IndexerType, RopeLayout, Yarn};
pub use decode::{DecodeBuffers, DecodeGraph};
pub use rope::Rope;

use super::{index_topk, IndexKeys, KeyValues, Positions, SparseAttention, Values};
use crate::selection::{Order, TopK};
use cache::CachedKeys;
use candle_core::{bail, DType, Result, Tensor, D};
use candle_nn::VarBuilder;
use rope::Rotation;
use step::{At, Memory};
use weights::{by_head, check_hidden, Fp8, LayerNorm, Linear, RmsNorm};

const OP: &str = "DsaAttention";

/// What the layer gives for b sequences of n new tokens each.
#[derive(Debug, Clone)]
pub struct DsaOutput {
    /// `[b, n, hidden_size]`, of the hidden states' dtype.
    pub hidden: Tensor,
    /// U32 `[b n, index_topk]`: the positions in its sequence that each token attended to, behind
    /// them `u32::MAX`. What a layer of [`IndexerType::Shared`] takes.
    pub positions: Tensor,
}

/// A layer's attention with its weights.
#[derive(Debug, Clone)]
pub struct DsaAttention {
    heads: usize,
    nope: usize,
    rotated: usize,
    rank: usize,
    latent: usize,
    value: usize,
    hidden: usize,
    topk: usize,
    scale: f32,
    rope: Rope,
    /// What is made of the hidden states: the queries' latent, the keys' latent with what is rotated, and the
    /// index key. One product on CUDA.
    first: Linear,
    /// What is made of the queries' latent: the queries, and those of the indexer.
    second: Linear,
    /// Parts of these.
    q_a: Linear,
    q_b: Linear,
    kv_a: Linear,
    q_a_norm: RmsNorm,
    kv_a_norm: RmsNorm,
    /// Queries without RoPE to the latent space, `[heads, nope, latent]`.
    to_latent: Tensor,
    /// The latent to values, `[heads, latent, value]`.
    to_values: Tensor,
    o: Linear,
    indexer: Option<Indexer>,
    budget: usize,
}

/// The lightning indexer.
#[derive(Debug, Clone)]
struct Indexer {
    heads: usize,
    dim: usize,
    layout: RopeLayout,
    /// Parts of the layer's second and first product.
    q_b: Linear,
    k: Linear,
    k_norm: LayerNorm,
    /// In f32, as both models compute it, times the scale of the scores.
    weights: Linear,
    fp8: Fp8,
}

impl Indexer {
    fn load(config: &DsaConfig, vb: &VarBuilder) -> Result<Self> {
        let vb = vb.pp("indexer");
        let (heads, dim) = (config.index_n_heads, config.index_head_dim);
        let (hidden, rank) = (config.hidden_size, config.q_lora_rank);
        let sizes = (heads, hidden);
        let weights = Linear::load_dtype(config, &vb, "weights_proj", sizes, false, DType::F32)?;
        // H^-1/2 of the sum, and D^-1/2 of the products: positive, so ReLU lets it through.
        let scale = ((heads * dim) as f64).powf(-0.5);
        Ok(Self {
            heads,
            dim,
            layout: config.indexer_rope,
            q_b: Linear::load(config, &vb, "wq_b", (heads * dim, rank), false)?,
            k: Linear::load(config, &vb, "wk", (dim, hidden), false)?,
            k_norm: LayerNorm::load(&vb, "k_norm", dim)?,
            weights: weights.scaled(scale)?,
            fp8: Fp8::new(dim, config.ue8m0, vb.device())?,
        })
    }

    /// Keys `[R, D]` of hidden states `[R, hidden]`, in fp8 where the cache is.
    fn keys(&self, x: &Tensor, rotation: &Rotation, fp8: bool) -> Result<CachedKeys> {
        let keys = self.k_norm.forward(&self.k.forward(x)?)?.unsqueeze(1)?;
        rotation.in_place(&keys, 0, self.layout)?;
        let keys = keys.squeeze(1)?;
        Ok(if fp8 {
            let (keys, scales) = self.fp8.quantize(&keys)?;
            let scales = Some(scales);
            CachedKeys { keys, scales }
        } else {
            let scales = None;
            CachedKeys { keys, scales }
        })
    }

    /// Queries `[R, H, D]` and weights `[R, H]`, for scores without any further scale.
    fn queries(
        &self,
        x: &Tensor,
        latent: &Tensor,
        rotation: &Rotation,
        fp8: bool,
    ) -> Result<(Tensor, Tensor)> {
        let rows = x.dims()[0];
        let q = self.q_b.forward(latent)?;
        let q = q.reshape((rows, self.heads, self.dim))?;
        rotation.in_place(&q, 0, self.layout)?;
        let weights = self.weights.forward(&x.to_dtype(DType::F32)?)?;
        if fp8 {
            // The scale of a query is positive too, and goes into its weight.
            let (q, scales) = self.fp8.quantize(&q)?;
            return Ok((q, (weights * scales)?));
        }
        Ok((q, weights))
    }
}

impl DsaAttention {
    /// Loads the weights of a layer, `vb` being at its `self_attn`, under the checkpoint's names:
    /// q_a_proj, q_a_layernorm, q_b_proj, kv_a_proj_with_mqa, kv_a_layernorm, kv_b_proj, o_proj, and
    /// where the layer has one indexer.{wq_b, wk, k_norm, weights_proj}. They become of the builder's
    /// dtype (F32, F16 or BF16), with fp8 weights multiplied by their `weight_scale_inv`.
    ///
    /// # Errors
    /// For weights that are missing or of another shape, a layer that the model doesn't have, a RoPE table
    /// of other dimensions or on another device, and an `index_topk` above
    /// [`MAX_K`](crate::selection::MAX_K).
    pub fn load(config: &DsaConfig, layer: usize, rope: &Rope, vb: VarBuilder) -> Result<Self> {
        let dtype = vb.dtype();
        if !matches!(dtype, DType::F32 | DType::F16 | DType::BF16) {
            bail!("{OP}: the weights are to be {dtype:?}, F32, F16 or BF16 is needed")
        }
        let rotated = config.qk_rope_head_dim;
        if !rotated.is_multiple_of(2) || rotated > config.index_head_dim {
            bail!(
                "{OP}: qk_rope_head_dim is {rotated}, an even number is needed, of at most index_head_dim = {}",
                config.index_head_dim
            )
        }
        if rope.dim() != rotated || !rope.cos.device().same_device(vb.device()) {
            bail!(
                "{OP}: the RoPE table is of {} dimensions on {:?}, {rotated} on {:?} are needed",
                rope.dim(),
                rope.cos.device().location(),
                vb.device().location()
            )
        }
        // Refused here, not at the first long sequence.
        TopK::new(config.index_topk).map_err(|e| e.context(OP))?;
        let heads = config.num_attention_heads;
        let nope = config.qk_nope_head_dim;
        let (latent, value) = (config.kv_lora_rank, config.v_head_dim);
        let (hidden, rank) = (config.hidden_size, config.q_lora_rank);
        let bias = config.attention_bias;
        let linear = |name, sizes, bias| Linear::load(config, &vb, name, sizes, bias);
        let kv_b = linear("kv_b_proj", (heads * (nope + value), latent), false)?;
        let kv_b = kv_b.weight.reshape((heads, nope + value, latent))?;
        let q_a = linear("q_a_proj", (rank, hidden), bias)?;
        let q_b = linear("q_b_proj", (heads * (nope + rotated), rank), false)?;
        let kv_a = linear("kv_a_proj_with_mqa", (latent + rotated, hidden), bias)?;
        let mut indexer = match config.indexer_type(layer)? {
            IndexerType::Full => Some(Indexer::load(config, &vb)?),
            IndexerType::Shared => None,
        };
        let [first, second] = match &indexer {
            Some(indexer) => [
                Linear::beside(&[&q_a, &kv_a, &indexer.k])?,
                Linear::beside(&[&q_b, &indexer.q_b])?,
            ],
            None => [Linear::beside(&[&q_a, &kv_a])?, q_b],
        };
        // The weights are there once: what was loaded goes.
        let own = heads * (nope + rotated);
        if let Some(indexer) = &mut indexer {
            indexer.k = first.outputs(rank + latent + rotated, indexer.dim)?;
            indexer.q_b = second.outputs(own, indexer.heads * indexer.dim)?;
        }
        Ok(Self {
            heads,
            nope,
            rotated,
            rank,
            latent,
            value,
            hidden,
            topk: config.index_topk,
            scale: config.softmax_scale() as f32,
            rope: rope.clone(),
            q_a: first.outputs(0, rank)?,
            q_b: second.outputs(0, own)?,
            kv_a: first.outputs(rank, latent + rotated)?,
            first,
            second,
            q_a_norm: RmsNorm::load(&vb, "q_a_layernorm", rank)?,
            kv_a_norm: RmsNorm::load(&vb, "kv_a_layernorm", latent)?,
            to_latent: kv_b.narrow(1, 0, nope)?.contiguous()?,
            to_values: kv_b.narrow(1, nope, value)?.transpose(1, 2)?.contiguous()?,
            o: linear("o_proj", (hidden, heads * value), bias)?,
            indexer,
            budget: 256 << 20,
        })
    }

    /// The most bytes that the indexer's scores take at a time, 256 MiB unless set: longer prefills
    /// are scored and selected in chunks of rows.
    #[must_use]
    pub fn with_score_budget(mut self, bytes: usize) -> Self {
        self.budget = bytes;
        self
    }

    /// Attends with n new tokens of b sequences: `x` is `[b, n, hidden_size]`, of sequences `first`
    /// to `first + b - 1` of the cache, to which their keys are added. n is the length of a prompt
    /// or of a chunk of it, or 1 and a few more in decoding; each token sees what is before it and
    /// itself.
    ///
    /// `positions`, where given, are what each token attends to in place of the indexer's choice: the
    /// output of another layer, which a layer of [`IndexerType::Shared`] needs. What a token
    /// doesn't see is skipped there. As long as no sequence has more than `index_topk` tokens every
    /// token attends to all before it, and nothing is scored.
    ///
    /// # Errors
    /// For hidden states of a wrong shape, dtype or device, sequences that the cache doesn't hold or
    /// that outgrow it or the RoPE table, positions of a wrong shape, and none where the layer
    /// needs them. The cache's lengths are then as before.
    pub fn forward(
        &self,
        x: &Tensor,
        cache: &mut DsaCache,
        first: usize,
        positions: Option<&Tensor>,
    ) -> Result<DsaOutput> {
        let [sequences, tokens] = check_hidden(OP, x, &self.first.weight, "[B, n, ", self.hidden)?;
        let output = self.run(
            &x.reshape((sequences * tokens, self.hidden))?,
            &vec![tokens; sequences],
            cache,
            first,
            positions,
        )?;
        Ok(DsaOutput {
            hidden: output.hidden.reshape(x.dims())?,
            positions: output.positions,
        })
    }

    /// [`forward`](Self::forward) with new tokens of any number for each sequence, one sequence
    /// behind the other: `x` is `[S, hidden_size]`, the first `tokens[0]` of sequence `first`, and so
    /// on. Prompts, chunks of prompts and decoding go together in one batch. A sequence may have
    /// none. The output is `[S, hidden_size]`.
    ///
    /// # Errors
    /// As [`forward`](Self::forward), and for tokens whose sum is not S.
    pub fn forward_packed(
        &self,
        x: &Tensor,
        tokens: &[usize],
        cache: &mut DsaCache,
        first: usize,
        positions: Option<&Tensor>,
    ) -> Result<DsaOutput> {
        let [rows] = check_hidden(OP, x, &self.first.weight, "[S, ", self.hidden)?;
        let sum = tokens.iter().try_fold(0usize, |sum, &n| sum.checked_add(n));
        if sum != Some(rows) {
            bail!("{OP}: the hidden states are of {rows} tokens, those of the sequences are {tokens:?}")
        }
        self.run(x, tokens, cache, first, positions)
    }

    /// Both forms: rows of hidden states, so many of each sequence.
    fn run(
        &self,
        x: &Tensor,
        tokens: &[usize],
        cache: &mut DsaCache,
        first: usize,
        positions: Option<&Tensor>,
    ) -> Result<DsaOutput> {
        let rows = x.dims()[0];
        let sequences = tokens.len();
        let grown = cache.grown(OP, first, tokens)?;
        let longest = grown.iter().copied().max().unwrap_or(0);
        if longest > self.rope.positions() {
            bail!(
                "{OP}: a sequence comes to {longest} tokens, the RoPE table has {} positions",
                self.rope.positions()
            )
        }
        self.check_cache(x, cache)?;
        if let Some(positions) = positions {
            if positions.dims() != [rows, self.topk] || positions.dtype() != DType::U32 {
                bail!(
                    "{OP}: positions are {:?} {:?}, U32 [{rows}, {}] is needed",
                    positions.dtype(),
                    positions.dims(),
                    self.topk
                )
            }
        } else if self.indexer.is_none() {
            bail!("{OP}: the layer has no indexer, the positions of a layer before it are needed")
        }

        if rows == 0 {
            return Ok(DsaOutput {
                hidden: x.clone(),
                positions: Tensor::zeros((0, self.topk), DType::U32, x.device())?,
            });
        }

        let device = x.device();
        let new = tokens.iter().zip(&grown);
        let at = |(count, length): (&usize, &usize)| (length - count) as u32..*length as u32;
        let places: Vec<u32> = new.flat_map(at).collect();
        // Where all have as many, the ops tell by themselves whose a row is.
        let ragged = tokens.iter().any(|&count| count != tokens[0]);
        let mut words: Vec<u32> = places.iter().map(|place| place + 1).collect();
        if ragged {
            let of = |(i, &count): (usize, &usize)| std::iter::repeat_n(i as u32, count);
            words.extend(tokens.iter().enumerate().flat_map(of));
        }
        let words = Tensor::new(words, device)?;
        let ends = words.narrow(0, 0, rows)?;
        let map = match ragged {
            true => Some(words.narrow(0, rows, rows)?),
            false => None,
        };
        let at = At {
            ends: &ends,
            map: map.as_ref(),
            first,
            sequences,
            longest,
        };
        let x = &x.contiguous()?;
        let output = match device.is_cuda() {
            true => self.run_on_device(x, cache, &at, positions)?,
            false => self.run_on_host(x, cache, (tokens, &grown, &places), &at, positions)?,
        };
        cache.set_lengths(first, &grown);
        Ok(output)
    }

    /// On a CUDA device.
    fn run_on_device(
        &self,
        x: &Tensor,
        cache: &DsaCache,
        at: &At,
        positions: Option<&Tensor>,
    ) -> Result<DsaOutput> {
        let memory = &mut Memory::new(x.device());
        let scoring = positions.is_none() && at.longest > self.topk;
        let (queries, scored) = self.project(x, cache, at, scoring, memory)?;
        let positions = match (positions, scored) {
            (Some(positions), _) => positions.clone(),
            (None, Some(scored)) => self.choose(cache, at, &scored.q, &scored.weights)?,
            (None, None) => self.everything_on_device(at.ends)?,
        };
        let chosen = Positions::Tensor(&positions);
        let hidden = self.attend(&queries, cache, at, chosen, memory, None)?;
        Ok(DsaOutput { hidden, positions })
    }

    /// The indexer's positions for queries `[rows, heads, dim]` and weights `[rows, heads]`.
    fn choose(&self, cache: &DsaCache, at: &At, q: &Tensor, weights: &Tensor) -> Result<Tensor> {
        let held = cache.index_keys.as_ref().expect("the layer has an indexer");
        let mut keys = IndexKeys::batched(&at.cached(&held.keys)?);
        if let Some(scales) = &held.scales {
            keys = keys.with_scales(&at.cached(scales)?);
        }
        if let Some(map) = at.map {
            keys = keys.with_row_sequences(map);
        }
        // By position, so that equal sets are equal sequences, and sums equal bits.
        let topk = TopK::new(self.topk)?.order(Order::ByPosition);
        Ok(index_topk(q, &keys, weights, &at.visible(), &topk, self.budget)?.positions)
    }

    /// On the CPU: the layer as its papers and models write it. `of` are the new tokens of each sequence, its
    /// length with them, and the position of each row.
    fn run_on_host(
        &self,
        x: &Tensor,
        cache: &DsaCache,
        (tokens, grown, places): (&[usize], &[usize], &[u32]),
        at: &At,
        positions: Option<&Tensor>,
    ) -> Result<DsaOutput> {
        let rows = places.len();
        let rotation = self.rope.at(places)?;
        let q_latent = self.q_a_norm.forward(&self.q_a.forward(x)?)?;
        let kv = self.kv_a.forward(x)?;
        let latent = self.kv_a_norm.forward(&kv.narrow(1, 0, self.latent)?)?;
        // Into its place: what comes of a product is nobody else's.
        kv.slice_set(&latent, 1, 0)?;
        let key = kv.unsqueeze(1)?;
        rotation.in_place(&key, self.latent, RopeLayout::Interleaved)?;
        let fp8 = cache.fp8();
        let index_keys = match &self.indexer {
            Some(indexer) => Some(indexer.keys(x, &rotation, fp8)?),
            None => None,
        };
        cache.write((at.first, tokens, grown), &key, index_keys.as_ref())?;

        let positions = match (positions, &self.indexer) {
            (Some(positions), _) => positions.clone(),
            (None, Some(_)) if at.longest <= self.topk => self.everything(at.ends)?,
            (None, Some(indexer)) => {
                let (q, weights) = indexer.queries(x, &q_latent, &rotation, fp8)?;
                self.choose(cache, at, &q, &weights)?
            }
            (None, None) => unreachable!("it is refused above"),
        };

        let q = self.q_b.forward(&q_latent)?;
        let q = q.reshape((rows, self.heads, self.nope + self.rotated))?;
        let rotated = q.narrow(2, self.nope, self.rotated)?;
        let rotated = rotation.of(&rotated, RopeLayout::Interleaved)?;
        let absorbed = q.narrow(2, 0, self.nope)?;
        let q = Tensor::cat(
            &[&by_head(&absorbed, &self.to_latent)?, &rotated],
            D::Minus1,
        )?;
        let mut kv = KeyValues::batched(&at.cached(&cache.latent)?, Values::OfKeys(self.latent));
        if let Some(map) = at.map {
            kv = kv.with_row_sequences(map);
        }
        let attention = SparseAttention::new(self.scale)
            .with_visible(&at.visible())
            .forward(&q, &kv, &positions)?;
        let values = by_head(&attention.out, &self.to_values)?;
        let values = values.reshape((rows, self.heads * self.value))?;
        let hidden = self.o.forward(&values)?;
        Ok(DsaOutput { hidden, positions })
    }

    /// Refuses a cache that was made for another layer, model or dtype.
    fn check_cache(&self, x: &Tensor, cache: &DsaCache) -> Result<()> {
        if self.indexer.is_some() != cache.index_keys.is_some() {
            bail!("{OP}: the cache is of another layer, whose indexer type differs")
        }
        let own = (x.dtype(), self.latent + self.rotated);
        let (dtype, width) = (cache.latent.dtype(), cache.latent.dims()[3]);
        if own != (dtype, width) {
            bail!(
                "{OP}: the cache is {dtype:?} with {width} numbers a token, {:?} with {} is needed",
                own.0,
                own.1
            )
        }
        if let (Some(indexer), Some(cached)) = (&self.indexer, &cache.index_keys) {
            let (dtype, width) = (cached.keys.dtype(), cached.keys.dims()[2]);
            let wanted = match &cached.scales {
                Some(_) => DType::F8E4M3,
                None => x.dtype(),
            };
            if (dtype, width) != (wanted, indexer.dim) {
                bail!(
                    "{OP}: the cache's index keys are {dtype:?} with {width} numbers a token, {wanted:?} with {} is needed",
                    indexer.dim
                )
            }
        }
        if !x.device().same_device(cache.latent.device()) {
            bail!(
                "{OP}: the hidden states are on {:?} and the cache on {:?}, they must be on one device",
                x.device().location(),
                cache.latent.device().location()
            )
        }
        Ok(())
    }

    /// All positions below the ends, of rows that have no more than K.
    fn everything(&self, ends: &Tensor) -> Result<Tensor> {
        let shape = (ends.dims()[0], self.topk);
        let all = Tensor::arange(0, self.topk as u32, ends.device())?;
        let all = all.unsqueeze(0)?.broadcast_as(shape)?;
        let none = Tensor::full(u32::MAX, shape, ends.device())?;
        let seen = all.lt(&ends.unsqueeze(1)?.broadcast_as(shape)?)?;
        seen.where_cond(&all, &none)
    }
}
