//! Rotary position embeddings of the attention and its indexer.

use super::config::{DsaConfig, RopeLayout};
use candle_core::{bail, DType, Device, Result, Tensor};

/// Cosines and sines for the positions of a context: one table for all layers.
#[derive(Clone)]
pub struct Rope {
    /// F32 `[positions, d/2]`.
    pub(super) cos: Tensor,
    pub(super) sin: Tensor,
    dim: usize,
}

impl std::fmt::Debug for Rope {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.debug_struct("Rope")
            .field("positions", &self.positions())
            .field("dim", &self.dim)
            .finish()
    }
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
            cos: Tensor::from_slice(&cos, (positions, pairs), device)?,
            sin: Tensor::from_slice(&sin, (positions, pairs), device)?,
            dim: 2 * pairs,
        })
    }

    pub(super) fn dim(&self) -> usize {
        self.dim
    }

    /// How many positions the table has.
    pub fn positions(&self) -> usize {
        self.cos.dims()[0]
    }

    /// The rows of the table at these positions, of which there is one.
    pub(super) fn at(&self, positions: &[u32]) -> Result<Rotation> {
        let (first, rows) = (positions[0] as usize, positions.len());
        let rotation = |cos: Tensor, sin: Tensor| {
            Ok(Rotation {
                cos: cos.unsqueeze(1)?,
                sin: sin.unsqueeze(1)?,
                dim: self.dim,
            })
        };
        let mut following = positions.iter().zip(first..);
        if following.all(|(&at, next)| at as usize == next) {
            let part = |table: &Tensor| table.narrow(0, first, rows);
            return rotation(part(&self.cos)?, part(&self.sin)?);
        }
        let positions = Tensor::new(positions, self.cos.device())?;
        let select = |table: &Tensor| table.index_select(&positions, 0);
        rotation(select(&self.cos)?, select(&self.sin)?)
    }
}

/// Cosines and sines of R rows, `[R, 1, d/2]` each.
pub(super) struct Rotation {
    cos: Tensor,
    sin: Tensor,
    dim: usize,
}

impl Rotation {
    /// `x` `[R, heads, d]` rotated, dense. In f32, rounded once.
    pub fn of(&self, x: &Tensor, layout: RopeLayout) -> Result<Tensor> {
        // A row is a batch of its own to Candle's op, with a single token.
        let wide = x.unsqueeze(2)?.to_dtype(DType::F32)?.contiguous()?;
        let rotated = match layout {
            RopeLayout::HalfSplit => candle_nn::rotary_emb::rope(&wide, &self.cos, &self.sin)?,
            RopeLayout::Interleaved => candle_nn::rotary_emb::rope_i(&wide, &self.cos, &self.sin)?,
        };
        rotated.squeeze(2)?.to_dtype(x.dtype())
    }

    /// Rotates the d numbers from `start` on in each vector of `x` `[R, heads, n]`, dense, where they
    /// lie: nothing else may hold the tensor.
    pub fn in_place(&self, x: &Tensor, start: usize, layout: RopeLayout) -> Result<()> {
        let rotated = self.of(&x.narrow(2, start, self.dim)?, layout)?;
        x.slice_set(&rotated, 2, start)
    }
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
        let positions = positions.to_dtype(DType::U32)?;
        let rotation = rope.at(&positions.to_vec1::<u32>()?)?;
        let (frequencies, _) = config.frequencies();
        for (ours, name) in [(rotation.cos, "rope.cos"), (rotation.sin, "rope.sin")] {
            let ours = ours.squeeze(1)?.to_vec2::<f32>()?;
            let theirs = tensors[name].to_vec2::<f32>()?;
            let positions = positions.to_vec1::<u32>()?;
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

    /// Rows that follow each other, few, and many.
    #[test]
    fn rows_are_those_of_the_table() -> Result<()> {
        let json = include_str!("../../../tests/fixtures/deepseek_v32.json");
        let rope = Rope::new(&DsaConfig::from_json(json)?, 2000, &Device::Cpu)?;
        let all = [rope.cos.to_vec2::<f32>()?, rope.sin.to_vec2::<f32>()?];
        let follow = (7..1999).collect();
        let apart = |rows: u32| (0..rows).map(|row| row * 701 % 2000).collect();
        for positions in [follow, vec![5], apart(3), apart(600)] as [Vec<u32>; 4] {
            let rotation = rope.at(&positions)?;
            for (rows, all) in [rotation.cos, rotation.sin].iter().zip(&all) {
                let rows = rows.squeeze(1)?.to_vec2::<f32>()?;
                let wanted = positions.iter().map(|&at| &all[at as usize]);
                assert!(rows.iter().eq(wanted), "{} rows", positions.len());
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
