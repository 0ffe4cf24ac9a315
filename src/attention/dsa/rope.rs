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

#[cfg(test)]
mod tests {
    use super::*;

    /// What transformers computes for the fixtures' configurations, near and far.
    fn against_transformers(json: &str, data: &[u8]) -> Result<()> {
        let config = DsaConfig::from_json(json)?;
        let tensors = candle_core::safetensors::load_buffer(data, &Device::Cpu)?;
        let positions = &tensors["rope.positions"];
        let rope = Rope::new(&config, 10240, &Device::Cpu)?;
        assert_eq!(rope.positions(), 10240);
        let rotation = rope.at(&positions.to_dtype(DType::U32)?)?;
        let (frequencies, _) = config.frequencies();
        for (ours, name) in [(rotation.cos, "rope.cos"), (rotation.sin, "rope.sin")] {
            let ours = ours.squeeze(1)?.to_vec2::<f32>()?;
            let theirs = tensors[name].to_vec2::<f32>()?;
            let positions = positions.to_vec1::<i64>()?;
            for ((ours, theirs), &position) in ours.iter().zip(&theirs).zip(&positions) {
                for ((a, b), frequency) in ours.iter().zip(theirs).zip(&frequencies) {
                    // A frequency that differs in its last bits is off by as much of the angle.
                    let angle = position as f32 * frequency;
                    let bound = 1e-6 + angle * 2.0 * f32::EPSILON;
                    assert!((a - b).abs() <= bound, "{name} at {position}: {a}, {b}");
                }
            }
        }
        Ok(())
    }

    #[test]
    fn tables_are_those_of_transformers() -> Result<()> {
        against_transformers(
            include_str!("../../../tests/fixtures/deepseek_v32.json"),
            include_bytes!("../../../tests/fixtures/deepseek_v32.safetensors"),
        )?;
        against_transformers(
            include_str!("../../../tests/fixtures/glm_moe_dsa.json"),
            include_bytes!("../../../tests/fixtures/glm_moe_dsa.safetensors"),
        )
    }
}
