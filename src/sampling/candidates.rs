//! The kept set itself, compact.

use super::cpu::{self, with_logits};
use super::cuda;
use super::truncation::{check_device, on_cpu, on_cuda, Given, Mass, Rows, Truncation};
use crate::held::hold;
use candle_core::{bail, CpuStorage, Result, Storage, Tensor};

/// The kept sets of a batch. For logits `[V]` the dimension B is absent.
#[derive(Debug, Clone)]
pub struct Candidates {
    /// U32 `[B, C]`: token ids in ascending order, then `u32::MAX`. Where the set exceeds the
    /// capacity C, its C lowest ids.
    pub ids: Tensor,
    /// F32 `[B, C]`: natural log-probabilities over the whole kept set, then -inf.
    pub log_probs: Tensor,
    /// U32 `[B]`: the true size of the set, even where it exceeds C.
    pub counts: Tensor,
}

const OP: &str = "candidates";

/// Candidates of a batch, padding included: 128 GiB of ids and as much of log-probabilities.
const MOST_ELEMENTS: usize = 1 << 35;

/// Refuses a capacity that no device could hold.
pub(super) fn check_capacity(op: &str, batch: usize, capacity: usize) -> Result<()> {
    if capacity == 0 {
        bail!("{op}: the capacity is 0, at least 1 is needed")
    }
    // Beyond the vocabulary there is only padding; what is far beyond it cannot be allocated, and
    // sizes in bytes would wrap on the way to the device.
    let elements = batch.max(1).checked_mul(capacity);
    if elements.is_none_or(|n| n > MOST_ELEMENTS) {
        bail!(
            "{op}: a capacity of {capacity} for {batch} rows is too much, at most {MOST_ELEMENTS} candidates in all are supported"
        )
    }
    Ok(())
}

/// The kept set of each row, with the same parameters for every row. Logits are F32, F16 or BF16,
/// `[V]` or `[B, V]`; `capacity` is C, at least 1. A row with nothing above -inf has no candidate.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_topk::sampling::{candidates, Truncation};
///
/// # fn main() -> candle_core::Result<()> {
/// let logits = Tensor::new(&[1f32, 3., 2., 3.], &Device::Cpu)?;
/// let set = candidates(&logits, Truncation::new().with_top_k(3), 4)?;
/// assert_eq!(set.ids.to_vec1::<u32>()?, [1, 2, 3, u32::MAX]);
/// assert_eq!(set.counts.to_scalar::<u32>()?, 3);
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// For parameters that mean nothing, a capacity of 0 or of over 2^35 candidates in all, and logits of a wrong rank, dtype, layout or
/// device.
pub fn candidates(logits: &Tensor, truncation: Truncation, capacity: usize) -> Result<Candidates> {
    truncation.check(OP)?;
    run(logits, Given::Scalar(truncation), capacity)
}

/// [`candidates`] with per-row parameters: see [`Truncation::rows`].
///
/// # Errors
/// As [`candidates`], and for parameters that are not F32 `[B, 4]` on the logits' device.
pub fn candidates_rows(
    logits: &Tensor,
    rows: &Tensor,
    mass: Mass,
    capacity: usize,
) -> Result<Candidates> {
    run(logits, Given::Rows(rows, mass), capacity)
}

fn run(logits: &Tensor, parameters: Given, capacity: usize) -> Result<Candidates> {
    let rows = Rows::of(OP, logits.layout(), logits.dtype())?;
    check_capacity(OP, rows.batch, capacity)?;
    if let Some(params) = parameters.tensor() {
        check_device(OP, logits, "per-row parameters", params)?;
    }
    let [storage, params] = hold([Some(logits), parameters.tensor()]);
    let (storage, _) = storage.expect("there are logits");
    let (ids, log_probs, counts) = match &**storage {
        Storage::Cpu(storage) => {
            let params = params.as_ref().map(|params| on_cpu!(params));
            let operand = parameters.operand(OP, &rows, params)?;
            let parameters = cpu::Parameters::new(&operand)?;
            let (ids, log_probs, counts) = with_logits!(OP, storage, |data| cpu::candidates(
                data,
                &rows,
                &parameters,
                capacity
            ));
            (
                Storage::Cpu(CpuStorage::U32(ids)),
                Storage::Cpu(CpuStorage::F32(log_probs)),
                Storage::Cpu(CpuStorage::U32(counts)),
            )
        }
        Storage::Cuda(storage) => {
            let params = params.as_ref().map(|params| on_cuda!(params));
            let operand = parameters.operand(OP, &rows, params)?;
            let (ids, log_probs, counts) = cuda::candidates(storage, &rows, operand, capacity)?;
            (
                Storage::Cuda(ids),
                Storage::Cuda(log_probs),
                Storage::Cuda(counts),
            )
        }
        Storage::Metal(_) => return super::no_metal(OP),
    };
    let per_candidate = rows.shape(Some(capacity));
    Ok(Candidates {
        ids: Tensor::from((ids, per_candidate.clone())),
        log_probs: Tensor::from((log_probs, per_candidate)),
        counts: Tensor::from((counts, rows.shape(None))),
    })
}
