//! Rotary position embeddings of the attention and its indexer.

use super::config::{DsaConfig, RopeLayout};
use candle_core::{bail, DType, Device, Result, Tensor, D};

/// Cosines and sines for the positions of a context: one table for all layers.
#[derive(Debug, Clone)]
pub struct Rope {
    /// F32 `[positions, d/2]`.
    cos: Tensor,
    sin: Tensor,
    dim: usize,
}

impl Rope {
    /// For the positions `0..positions`.
    ///
    /// # Errors
    /// For more positions than the model has, and where the device has no memory for them.
    pub fn new(config: &DsaConfig, positions: usize, device: &Device) -> Result<Self> {
        if positions > config.max_position_embeddings {
            bail!(
                "Rope: {positions} positions are asked for, the model has {}",
                config.max_position_embeddings
            )
        }
        let (frequencies, scale) = config.frequencies();
        let pairs = frequencies.len();
        let mut cos = Vec::with_capacity(positions * pairs);
        let mut sin = Vec::with_capacity(positions * pairs);
        for position in 0..positions {
            for &frequency in &frequencies {
                let angle = (position as f32 * frequency) as f64;
                cos.push(angle.cos() as f32 * scale);
                sin.push(angle.sin() as f32 * scale);
            }
        }
        Ok(Self {
            cos: Tensor::from_vec(cos, (positions, pairs), device)?,
            sin: Tensor::from_vec(sin, (positions, pairs), device)?,
            dim: 2 * pairs,
        })
    }

    /// How many positions the table has.
    pub fn positions(&self) -> usize {
        self.cos.dims()[0]
    }

    /// The rows of the table at these positions, U32 `[R]`.
    pub(super) fn at(&self, positions: &Tensor) -> Result<Rotation> {
        let rows = |table: &Tensor| table.index_select(positions, 0)?.unsqueeze(1);
        Ok(Rotation {
            cos: rows(&self.cos)?,
            sin: rows(&self.sin)?,
            dim: self.dim,
        })
    }
}

/// Cosines and sines of R rows, `[R, 1, d/2]` each.
pub(super) struct Rotation {
    cos: Tensor,
    sin: Tensor,
    dim: usize,
}

impl Rotation {
    /// Rotates the d numbers from `start` on in each vector of `x` `[R, heads, n]`. In f32, rounded
    /// once.
    pub fn apply(&self, x: &Tensor, start: usize, layout: RopeLayout) -> Result<Tensor> {
        let (_, _, width) = x.dims3()?;
        // A row is a batch of its own to Candle's op, with a single token.
        let part = x.narrow(2, start, self.dim)?.unsqueeze(2)?;
        let part = part.to_dtype(DType::F32)?.contiguous()?;
        let rotated = match layout {
            RopeLayout::HalfSplit => candle_nn::rotary_emb::rope(&part, &self.cos, &self.sin)?,
            RopeLayout::Interleaved => candle_nn::rotary_emb::rope_i(&part, &self.cos, &self.sin)?,
        };
        let rotated = rotated.squeeze(2)?.to_dtype(x.dtype())?;
        let end = start + self.dim;
        let mut parts = Vec::with_capacity(3);
        if start > 0 {
            parts.push(x.narrow(2, 0, start)?);
        }
        parts.push(rotated);
        if end < width {
            parts.push(x.narrow(2, end, width - end)?);
        }
        joined(&parts)
    }
}

/// Vectors one behind the other, dense: of strided parts Candle's cat makes a strided whole.
pub(super) fn joined(parts: &[Tensor]) -> Result<Tensor> {
    let dense: Vec<_> = parts
        .iter()
        .map(Tensor::contiguous)
        .collect::<Result<_>>()?;
    Tensor::cat(&dense, D::Minus1)
}
