//! What a layer keeps of earlier tokens.

use super::config::{DsaConfig, IndexerType};
use candle_core::{bail, DType, Device, Result, Tensor};

/// The cache of one layer: for B sequences of up to C tokens the latent and the rotated part of
/// their keys, and where the layer has an indexer its keys.
///
/// Sequences may have different lengths. A sequence is begun anew with [`reset`](Self::reset), and
/// shortened with [`truncate`](Self::truncate) where speculated tokens are refused.
#[derive(Debug)]
pub struct DsaCache {
    /// `[B, C, 1, kv_lora_rank + qk_rope_head_dim]`: latent, then rotated part.
    pub(super) latent: Tensor,
    pub(super) index_keys: Option<CachedKeys>,
    lengths: Vec<usize>,
}

/// Keys of an indexer.
#[derive(Debug)]
pub(super) struct CachedKeys {
    /// `[B, C, index_head_dim]`.
    pub keys: Tensor,
    /// `[B, C]`, where the keys are fp8.
    pub scales: Option<Tensor>,
}

const OP: &str = "DsaCache";

impl DsaCache {
    /// An empty cache for a layer: 0 tokens of `sequences` sequences, room for `capacity` each.
    ///
    /// # Errors
    /// For a capacity above the model's context or of 0, a layer that the model doesn't have, and
    /// where the device has no memory for it.
    pub fn new(
        config: &DsaConfig,
        layer: usize,
        sequences: usize,
        capacity: usize,
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        let most = config.max_position_embeddings;
        if capacity == 0 || capacity > most {
            bail!("{OP}: the capacity is {capacity}, 1 to {most} tokens are accepted")
        }
        let zeros = |dims: &[usize]| Tensor::zeros(dims, dtype, device);
        let width = config.kv_lora_rank + config.qk_rope_head_dim;
        Ok(Self {
            latent: zeros(&[sequences, capacity, 1, width])?,
            index_keys: match config.indexer_type(layer)? {
                IndexerType::Full => Some(CachedKeys {
                    keys: zeros(&[sequences, capacity, config.index_head_dim])?,
                    scales: None,
                }),
                IndexerType::Shared => None,
            },
            lengths: vec![0; sequences],
        })
    }

    /// Keeps the indexer's keys in fp8 (e4m3) with a scale each, as DeepSeek-V3.2 does, and so scores
    /// in fp8: about half the memory of bf16, and other positions where scores are close. It empties
    /// the cache. Nothing changes for a layer without an indexer.
    ///
    /// # Errors
    /// Where the device has no memory for it.
    pub fn with_fp8_index_keys(mut self) -> Result<Self> {
        if let Some(cached) = &mut self.index_keys {
            let dims = cached.keys.dims().to_vec();
            let device = cached.keys.device().clone();
            cached.keys = Tensor::zeros(dims.as_slice(), DType::F8E4M3, &device)?;
            cached.scales = Some(Tensor::zeros(&dims[..2], DType::F32, &device)?);
        }
        self.lengths.fill(0);
        Ok(self)
    }

    /// Tokens of each sequence.
    pub fn lengths(&self) -> &[usize] {
        &self.lengths
    }

    /// The tokens that a sequence can have.
    pub fn capacity(&self) -> usize {
        self.latent.dims()[1]
    }

    /// Forgets all tokens of a sequence.
    ///
    /// # Errors
    /// For a sequence that the cache doesn't hold.
    pub fn reset(&mut self, sequence: usize) -> Result<()> {
        self.truncate(sequence, 0)
    }

    /// Forgets the tokens of a sequence from position `length` on.
    ///
    /// # Errors
    /// For a sequence that the cache doesn't hold, or that is shorter.
    pub fn truncate(&mut self, sequence: usize, length: usize) -> Result<()> {
        let sequences = self.lengths.len();
        match self.lengths.get_mut(sequence) {
            None => bail!("{OP}: the sequence is {sequence}, the cache holds {sequences}"),
            Some(own) if length > *own => {
                bail!(
                    "{OP}: sequence {sequence} has {own} tokens, it can't be truncated to {length}"
                )
            }
            Some(own) => *own = length,
        }
        Ok(())
    }

    /// Says that a sequence has `length` tokens: after steps whose lengths only the device counted
    /// ([`DecodeBuffers`](super::DecodeBuffers)).
    ///
    /// # Errors
    /// For a sequence that the cache doesn't hold, and a length above its capacity.
    pub fn set_length(&mut self, sequence: usize, length: usize) -> Result<()> {
        let (sequences, capacity) = (self.lengths.len(), self.capacity());
        match self.lengths.get_mut(sequence) {
            None => bail!("{OP}: the sequence is {sequence}, the cache holds {sequences}"),
            Some(_) if length > capacity => {
                bail!("{OP}: the length is {length}, the cache has room for {capacity}")
            }
            Some(own) => *own = length,
        }
        Ok(())
    }

    /// Whether index keys are in fp8.
    pub(super) fn fp8(&self) -> bool {
        let cached = self.index_keys.as_ref();
        cached.is_some_and(|cached| cached.scales.is_some())
    }

    /// Lengths of the sequences from `first` on with so many tokens more each; checked, not yet in
    /// force.
    pub(super) fn grown(&self, op: &str, first: usize, tokens: &[usize]) -> Result<Vec<usize>> {
        let lengths = self.lengths.get(first..);
        let Some(lengths) = lengths.and_then(|lengths| lengths.get(..tokens.len())) else {
            bail!(
                "{op}: the hidden states are of {} sequences from {first} on, the cache holds {}",
                tokens.len(),
                self.lengths.len()
            )
        };
        let grown = lengths.iter().zip(tokens);
        let grown: Vec<usize> = grown.map(|(length, more)| length + more).collect();
        if let Some(length) = grown.iter().find(|&&length| length > self.capacity()) {
            bail!(
                "{op}: a sequence comes to {length} tokens, the cache has room for {}",
                self.capacity()
            )
        }
        Ok(grown)
    }

    /// Writes rows `[R, ..]`, so many for each sequence from `first` on, behind the tokens of each;
    /// the new lengths are `grown`.
    pub(super) fn write(
        &self,
        (first, tokens, grown): (usize, &[usize], &[usize]),
        latent: &Tensor,
        index_keys: Option<&CachedKeys>,
    ) -> Result<()> {
        let append = |cache: &Tensor, new: &Tensor| append(cache, first, tokens, grown, new);
        append(&self.latent, latent)?;
        if let (Some(cache), Some(new)) = (&self.index_keys, index_keys) {
            append(&cache.keys, &new.keys)?;
            if let (Some(cache), Some(new)) = (&cache.scales, &new.scales) {
                append(cache, new)?;
            }
        }
        Ok(())
    }

    /// Puts lengths into force.
    pub(super) fn set_lengths(&mut self, first: usize, grown: &[usize]) {
        self.lengths[first..first + grown.len()].copy_from_slice(grown);
    }
}

fn append(
    cache: &Tensor,
    first: usize,
    tokens: &[usize],
    grown: &[usize],
    new: &Tensor,
) -> Result<()> {
    let new = new.contiguous()?;
    let rest = &new.dims()[1..];
    let equal = |sizes: &[usize]| sizes.windows(2).all(|pair| pair[0] == pair[1]);
    if equal(tokens) && equal(grown) {
        let dims = [&[tokens.len(), tokens[0]], rest].concat();
        let whole = cache.narrow(0, first, tokens.len())?;
        return whole.slice_set(&new.reshape(dims)?, 1, grown[0] - tokens[0]);
    }
    let mut from = 0;
    for (i, (&count, &length)) in tokens.iter().zip(grown).enumerate() {
        if count > 0 {
            let part = new.narrow(0, from, count)?.unsqueeze(0)?;
            let own = cache.narrow(0, first + i, 1)?;
            own.slice_set(&part, 1, length - count)?;
            from += count;
        }
    }
    Ok(())
}
