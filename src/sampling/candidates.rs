//! The kept set itself, compact.

use super::cpu::{self, with_logits};
use super::cuda;
use super::truncation::{Mass, Operand, Rows, Truncation};
use candle_core::backend::BackendStorage;
use candle_core::{bail, CpuStorage, Layout, Result, Storage, Tensor};

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
    run(logits, Parameters::Scalar(truncation), capacity)
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
    run(logits, Parameters::Rows(rows, mass), capacity)
}

enum Parameters<'a> {
    Scalar(Truncation),
    Rows(&'a Tensor, Mass),
}

fn run(logits: &Tensor, parameters: Parameters, capacity: usize) -> Result<Candidates> {
    if capacity == 0 {
        bail!("{OP}: the capacity is 0, at least 1 is needed")
    }
    let rows = Rows::of(OP, logits.layout(), logits.dtype())?;
    // Beyond the vocabulary there is only padding; what is far beyond it cannot be allocated, and
    // sizes in bytes would wrap on the way to the device.
    let elements = rows.batch.max(1).checked_mul(capacity);
    if elements.is_none_or(|n| n > MOST_ELEMENTS) {
        bail!(
            "{OP}: a capacity of {capacity} for {} rows is too much, at most {MOST_ELEMENTS} candidates in all are supported",
            rows.batch
        )
    }
    if let Parameters::Rows(params, _) = &parameters {
        if !logits.device().same_device(params.device()) {
            bail!(
                "{OP}: logits are on {:?} and per-row parameters on {:?}, they must be on one device",
                logits.device().location(),
                params.device().location()
            )
        }
    }
    let (storage, _) = logits.storage_and_layout();
    let params = match &parameters {
        Parameters::Scalar(_) => None,
        Parameters::Rows(tensor, _) => Some(tensor.storage_and_layout()),
    };
    let (ids, log_probs, counts) = match &*storage {
        Storage::Cpu(storage) => {
            let params = match &params {
                Some((params, layout)) => match &**params {
                    Storage::Cpu(params) => Some((params, *layout)),
                    _ => unreachable!("both are on one device"),
                },
                None => None,
            };
            let operand = parameters.operand(&rows, params)?;
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
            let params = match &params {
                Some((params, layout)) => match &**params {
                    Storage::Cuda(params) => Some((params, *layout)),
                    _ => unreachable!("both are on one device"),
                },
                None => None,
            };
            let operand = parameters.operand(&rows, params)?;
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

impl Parameters<'_> {
    fn operand<'a, S: BackendStorage>(
        &self,
        rows: &Rows,
        params: Option<(&'a S, &'a Layout)>,
    ) -> Result<Operand<'a, S>> {
        match (self, params) {
            (Parameters::Rows(_, mass), Some((storage, layout))) => {
                Operand::rows(OP, rows, storage, layout, *mass)
            }
            (Parameters::Scalar(truncation), _) => Operand::scalar(OP, rows, truncation),
            (Parameters::Rows(..), None) => unreachable!("packed rows bring their storage"),
        }
    }
}
