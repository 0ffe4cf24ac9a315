//! Weights under the names of the checkpoints.

use super::config::DsaConfig;
use candle_core::{bail, DType, Result, Tensor, D};
use candle_nn::VarBuilder;

/// A linear map.
#[derive(Debug, Clone)]
pub struct Linear {
    /// `[out, in]`.
    pub weight: Tensor,
    bias: Option<Tensor>,
}

impl Linear {
    /// `NAME.weight`, of the builder's dtype. Where `NAME.weight_scale_inv` stands beside it, the
    /// weight is fp8 with a scale for each block.
    pub fn load(
        config: &DsaConfig,
        vb: &VarBuilder,
        name: &str,
        (out, inputs): (usize, usize),
        bias: bool,
    ) -> Result<Self> {
        let dtype = vb.dtype();
        Self::load_dtype(config, vb, name, (out, inputs), bias, dtype)
    }

    pub fn load_dtype(
        config: &DsaConfig,
        vb: &VarBuilder,
        name: &str,
        (out, inputs): (usize, usize),
        bias: bool,
        dtype: DType,
    ) -> Result<Self> {
        let vb = vb.pp(name);
        let get = |shape: &[usize], name: &str, dtype| {
            vb.get_with_hints_dtype(shape, name, candle_nn::Init::Const(0.0), dtype)
        };
        let weight = if vb.contains_tensor("weight_scale_inv") {
            let block = config.weight_block_size.unwrap_or([128, 128]);
            let weight = get(&[out, inputs], "weight", DType::F32)?;
            let blocks = [out.div_ceil(block[0]), inputs.div_ceil(block[1])];
            let scales = get(&blocks, "weight_scale_inv", DType::F32)?;
            dequantized(&weight, &scales, block)?.to_dtype(dtype)?
        } else {
            get(&[out, inputs], "weight", dtype)?
        };
        let bias = match bias {
            true => Some(get(&[out], "bias", dtype)?),
            false => None,
        };
        Ok(Self { weight, bias })
    }

    /// `[rows, in]` to `[rows, out]`.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let y = x.matmul(&self.weight.t()?)?;
        match &self.bias {
            Some(bias) => y.broadcast_add(bias),
            None => Ok(y),
        }
    }
}

/// Each block of the weight times its scale.
fn dequantized(weight: &Tensor, scales: &Tensor, [rows, columns]: [usize; 2]) -> Result<Tensor> {
    let (out, inputs) = weight.dims2()?;
    let (a, b) = scales.dims2()?;
    let scales = scales
        .reshape((a, 1, b, 1))?
        .broadcast_as((a, rows, b, columns))?
        .reshape((a * rows, b * columns))?
        .narrow(0, 0, out)?
        .narrow(1, 0, inputs)?;
    weight * scales
}

/// RMS norm with the eps of the attention's own norms, in f32 whatever the dtype.
#[derive(Debug, Clone)]
pub struct RmsNorm {
    weight: Tensor,
}

/// Both models' code has this eps here, whatever `rms_norm_eps` says.
const EPS: f64 = 1e-6;

impl RmsNorm {
    pub fn load(vb: &VarBuilder, name: &str, dim: usize) -> Result<Self> {
        let weight = vb
            .pp(name)
            .get_with_hints(dim, "weight", candle_nn::Init::Const(1.0))?;
        Ok(Self { weight })
    }

    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        candle_nn::ops::rms_norm(&x.contiguous()?, &self.weight, EPS as f32)
    }
}

/// Layer norm in f32, rounded to the dtype of its input.
#[derive(Debug, Clone)]
pub struct LayerNorm {
    weight: Tensor,
    bias: Tensor,
}

impl LayerNorm {
    pub fn load(vb: &VarBuilder, name: &str, dim: usize) -> Result<Self> {
        let vb = vb.pp(name);
        let get = |name, value| {
            vb.get_with_hints_dtype(dim, name, candle_nn::Init::Const(value), DType::F32)
        };
        Ok(Self {
            weight: get("weight", 1.0)?,
            bias: get("bias", 0.0)?,
        })
    }

    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let wide = x.to_dtype(DType::F32)?.contiguous()?;
        candle_nn::ops::layer_norm(&wide, &self.weight, &self.bias, EPS as f32)?.to_dtype(x.dtype())
    }
}

/// Refuses hidden states of another shape, dtype or device.
pub fn check_hidden(op: &str, x: &Tensor, weight: &Tensor, width: usize) -> Result<(usize, usize)> {
    let &[sequences, tokens, hidden] = x.dims() else {
        bail!(
            "{op}: the hidden states have shape {:?}, [B, n, {width}] is needed",
            x.dims()
        )
    };
    if hidden != width || x.dtype() != weight.dtype() {
        bail!(
            "{op}: the hidden states are {:?} {:?}, {:?} [B, n, {width}] is needed",
            x.dtype(),
            x.dims(),
            weight.dtype()
        )
    }
    if !x.device().same_device(weight.device()) {
        bail!(
            "{op}: the hidden states are on {:?} and the weights on {:?}, they must be on one device",
            x.device().location(),
            weight.device().location()
        )
    }
    Ok((sequences, tokens))
}

/// Scales vectors to fp8: e4m3 and a scale for each, F8E4M3 of the same shape and F32 without the
/// last dimension (`act_quant` of DeepSeek-V3.2, with one block a vector).
pub fn quantized(x: &Tensor, power_of_two: bool) -> Result<(Tensor, Tensor)> {
    let x = x.to_dtype(DType::F32)?;
    let most = x.abs()?.max_keepdim(D::Minus1)?.maximum(1e-4)?;
    let mut scale = (most / 448.0)?;
    if power_of_two {
        scale = power_of_two_above(&scale)?;
    }
    let fp8 = x
        .broadcast_div(&scale)?
        .clamp(-448f32, 448f32)?
        .to_dtype(DType::F8E4M3)?;
    Ok((fp8, scale.squeeze(D::Minus1)?))
}

/// 2^ceil(log2 x).
fn power_of_two_above(x: &Tensor) -> Result<Tensor> {
    ((x.log()? / std::f64::consts::LN_2)?.ceil()? * std::f64::consts::LN_2)?.exp()
}
