//! Weights under the names of the checkpoints.

use super::config::DsaConfig;
use candle_core::{bail, DType, Device, Result, Tensor, D};
use candle_nn::VarBuilder;

/// A linear map.
#[derive(Debug, Clone)]
pub struct Linear {
    /// `[out, in]`.
    pub weight: Tensor,
    pub bias: Option<Tensor>,
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
            // On the CPU: Candle casts F8E4M3 nowhere else.
            let host = vb.clone().set_device(Device::Cpu);
            let get = |shape: &[usize], name: &str| {
                let init = candle_nn::Init::Const(0.0);
                host.get_with_hints_dtype(shape, name, init, DType::F32)
            };
            let block = config.weight_block_size.unwrap_or([128, 128]);
            let weight = get(&[out, inputs], "weight")?;
            let blocks = [out.div_ceil(block[0]), inputs.div_ceil(block[1])];
            let scales = get(&blocks, "weight_scale_inv")?;
            let weight = dequantized(&weight, &scales, block)?.to_dtype(dtype)?;
            weight.to_device(vb.device())?
        } else {
            get(&[out, inputs], "weight", dtype)?
        };
        let bias = match bias {
            true => Some(get(&[out], "bias", dtype)?),
            false => None,
        };
        Ok(Self { weight, bias })
    }

    /// The same map times a number.
    pub fn scaled(self, scale: f64) -> Result<Self> {
        let scaled = |tensor: Tensor| tensor * scale;
        Ok(Self {
            weight: scaled(self.weight)?,
            bias: self.bias.map(scaled).transpose()?,
        })
    }

    /// The outputs of all of these, one behind the other.
    pub fn beside(all: &[&Self]) -> Result<Self> {
        let weights: Vec<&Tensor> = all.iter().map(|linear| &linear.weight).collect();
        let bias = match all.iter().any(|linear| linear.bias.is_some()) {
            true => {
                let bias = |linear: &&Self| match &linear.bias {
                    Some(bias) => Ok(bias.clone()),
                    None => linear.weight.narrow(1, 0, 1)?.squeeze(1)?.zeros_like(),
                };
                let all = all.iter().map(bias).collect::<Result<Vec<_>>>()?;
                Some(Tensor::cat(&all, 0)?)
            }
            false => None,
        };
        Ok(Self {
            weight: Tensor::cat(&weights, 0)?,
            bias,
        })
    }

    /// These outputs alone: a view.
    pub fn outputs(&self, first: usize, count: usize) -> Result<Self> {
        let part = |tensor: &Tensor| tensor.narrow(0, first, count);
        Ok(Self {
            weight: part(&self.weight)?,
            bias: self.bias.as_ref().map(part).transpose()?,
        })
    }

    /// `[rows, in]` to `[rows, out]`, in a tensor of its own.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let y = x.matmul(&self.weight.t()?)?;
        match &self.bias {
            Some(bias) => y.broadcast_add(bias),
            None => Ok(y),
        }
    }
}

/// `x` `[R, H, K]` by the matrix of each head, `[H, K, N]`: `[R, H, N]`.
pub fn by_head(x: &Tensor, matrices: &Tensor) -> Result<Tensor> {
    let product = x.transpose(0, 1)?.contiguous()?.matmul(matrices)?;
    product.transpose(0, 1)?.contiguous()
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
    pub weight: Tensor,
}

/// Both models' code has this eps here, whatever `rms_norm_eps` says.
pub const EPS: f64 = 1e-6;

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
    pub weight: Tensor,
    pub bias: Tensor,
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

/// The leading dimensions of hidden states; refuses another shape, dtype or device. `form` is the
/// shape up to its last dimension.
pub fn check_hidden<const N: usize>(
    op: &str,
    x: &Tensor,
    weight: &Tensor,
    form: &str,
    width: usize,
) -> Result<[usize; N]> {
    let leading = match x.dims() {
        [leading @ .., last] if *last == width => <[usize; N]>::try_from(leading).ok(),
        _ => None,
    };
    let Some(leading) = leading.filter(|_| x.dtype() == weight.dtype()) else {
        bail!(
            "{op}: the hidden states are {:?} {:?}, {:?} {form}{width}] is needed",
            x.dtype(),
            x.dims(),
            weight.dtype()
        )
    };
    if !x.device().same_device(weight.device()) {
        bail!(
            "{op}: the hidden states are on {:?} and the weights on {:?}, they must be on one device",
            x.device().location(),
            weight.device().location()
        )
    }
    Ok(leading)
}

/// Vectors in fp8 (e4m3) with a scale for each: F8E4M3 of the same shape, and F32 without the last
/// dimension (`act_quant` of DeepSeek-V3.2, of which a vector is one block).
#[derive(Debug, Clone)]
pub struct Fp8 {
    /// Orthonormal, `[D, D]`: spreads outliers over the vector; products of two vectors that both
    /// go through it stay what they are. Of a dimension that is no power of two there is none.
    pub hadamard: Option<Tensor>,
    pub power_of_two: bool,
}

impl Fp8 {
    pub fn new(dim: usize, power_of_two: bool, device: &Device) -> Result<Self> {
        let hadamard = dim.is_power_of_two().then(|| {
            let scale = (dim as f32).powf(-0.5);
            let sign = |i: usize, j: usize| match (i & j).count_ones() % 2 {
                0 => scale,
                _ => -scale,
            };
            let data = (0..dim * dim).map(|at| sign(at / dim, at % dim));
            Tensor::from_vec(data.collect::<Vec<_>>(), (dim, dim), device)
        });
        Ok(Self {
            hadamard: hadamard.transpose()?,
            power_of_two,
        })
    }

    /// Of `[.., D]`.
    pub fn quantize(&self, x: &Tensor) -> Result<(Tensor, Tensor)> {
        let dims = x.dims();
        let dim = dims[dims.len() - 1];
        let mut x = x.to_dtype(DType::F32)?;
        if let Some(hadamard) = &self.hadamard {
            let rows = x.elem_count() / dim;
            x = x.reshape((rows, dim))?.matmul(hadamard)?.reshape(dims)?;
        }
        let most = x.abs()?.max_keepdim(D::Minus1)?.maximum(1e-4)?;
        let mut scale = (most / 448.0)?;
        if self.power_of_two {
            scale = power_of_two_above(&scale)?;
        }
        let fp8 = x.broadcast_div(&scale)?.clamp(-448f32, 448f32)?;
        let fp8 = fp8.to_dtype(DType::F8E4M3)?;
        Ok((fp8, scale.squeeze(D::Minus1)?))
    }
}

/// The least power of two that is not below x, elementwise: exactly, though Candle's exp and log
/// are only nearly right.
fn power_of_two_above(x: &Tensor) -> Result<Tensor> {
    const LEAST: i32 = -60;
    let powers: Vec<f32> = (LEAST..=-LEAST).map(|e| 2f32.powi(e)).collect();
    let powers = Tensor::from_vec(powers, (1 - 2 * LEAST) as usize, x.device())?;
    let flat = x.flatten_all()?;
    let nearest = (flat.log()? / std::f64::consts::LN_2)?.round()?;
    let at = (nearest - LEAST as f64)?.clamp(0f32, (-2 * LEAST - 1) as f32)?;
    let at = at.to_dtype(DType::U32)?;
    let power = powers.index_select(&at, 0)?;
    let twice = (&power * 2.0)?;
    power
        .ge(&flat)?
        .where_cond(&power, &twice)?
        .reshape(x.dims())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn powers_of_two() -> Result<()> {
        let (mut x, mut wanted) = (Vec::new(), Vec::new());
        for e in -22..20 {
            let power = 2f32.powi(e);
            for (factor, above) in [
                (1.0, 1.0),
                (1.0 + f32::EPSILON, 2.0),
                (1.4, 2.0),
                (1.42, 2.0),
            ] {
                x.push(power * factor);
                wanted.push(power * above);
            }
            x.push(power * (1.0 - f32::EPSILON / 2.0));
            wanted.push(power);
        }
        let x = Tensor::new(x, &Device::Cpu)?;
        assert_eq!(power_of_two_above(&x)?.to_vec1::<f32>()?, wanted);
        Ok(())
    }

    #[test]
    fn quantized_vectors() -> Result<()> {
        let x = Tensor::randn(0f32, 1.0, (5, 3, 128), &Device::Cpu)?;
        let plain = Fp8 {
            hadamard: None,
            power_of_two: false,
        };
        let (fp8, scales) = plain.quantize(&x)?;
        assert_eq!((fp8.dtype(), scales.dims()), (DType::F8E4M3, &[5, 3][..]));
        let back = fp8
            .to_dtype(DType::F32)?
            .broadcast_mul(&scales.unsqueeze(2)?)?;
        // Three bits of fraction: half of an eighth.
        let error = ((back - &x)?.abs()? / x.abs()?.maximum(0.05)?)?;
        assert!(error.max_all()?.to_scalar::<f32>()? <= 1.0 / 16.0 + 1e-3);
        // Orthonormal: products stay what they are.
        let rotated = Fp8::new(128, false, &Device::Cpu)?.hadamard.unwrap();
        let a = x.reshape((15, 128))?;
        let b = a.matmul(&rotated)?;
        let difference = (a.matmul(&a.t()?)? - b.matmul(&b.t()?)?)?.abs()?;
        assert!(difference.max_all()?.to_scalar::<f32>()? < 1e-3);
        assert!(Fp8::new(96, false, &Device::Cpu)?.hadamard.is_none());
        Ok(())
    }
}
