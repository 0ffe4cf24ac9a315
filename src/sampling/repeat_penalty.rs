//! The repetition penalty, on the device.

use super::cuda;
use crate::empty::to_f32;
use candle_core::{bail, DType, Device, Result, Tensor};

/// Drop-in for `candle_transformers::utils::apply_repeat_penalty`: each token of `context` once,
/// its logit divided by `penalty` where it is at least 0 and multiplied by it where it is below.
/// Logits `[V]` of any dtype that casts to F32 give F32 `[V]` on the same device, the same bits as
/// Candle's; ids outside the vocabulary are ignored.
///
/// On CUDA only the context goes up to the device, and nothing comes back.
///
/// # Errors
/// For logits that are not `[V]`.
pub fn apply_repeat_penalty(logits: &Tensor, penalty: f32, context: &[u32]) -> Result<Tensor> {
    if logits.rank() != 1 {
        bail!(
            "apply_repeat_penalty: logits have shape {:?}, [V] is needed",
            logits.dims()
        )
    }
    let vocab = logits.elem_count();
    let mut ids: Vec<u32> = context
        .iter()
        .copied()
        .filter(|&id| (id as usize) < vocab)
        .collect();
    ids.sort_unstable();
    ids.dedup();
    if vocab == 0 {
        return to_f32(logits);
    }
    let device = logits.device();
    if device.is_cuda() && cfg!(feature = "cuda") {
        return cuda::penalise(&logits.to_dtype(DType::F32)?, penalty, &ids);
    }
    let mut values = logits
        .to_device(&Device::Cpu)?
        .to_dtype(DType::F32)?
        .to_vec1::<f32>()?;
    for id in ids {
        let logit = &mut values[id as usize];
        *logit = if *logit >= 0.0 {
            *logit / penalty
        } else {
            *logit * penalty
        };
    }
    Tensor::from_vec(values, vocab, device)
}
