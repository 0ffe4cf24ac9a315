//! Token ids drawn from the kept sets.

use super::cpu::{self, with_logits, Drawn};
use super::truncation::{check_device, on_cpu, on_cuda, Given, Mass, Operand, Rows, Truncation};
use super::{cuda, philox};
use crate::held::hold;
use candle_core::backend::BackendStorage;
use candle_core::{
    bail, CpuStorage, CudaStorage, CustomOp1, CustomOp2, CustomOp3, DType, Layout, MetalStorage,
    Result, Shape, Storage, Tensor,
};

/// Where one row's random bits come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Draw {
    /// Philox4x32-10 with this key and counter: the request's own seed and its own step. 64 bits.
    Counter {
        /// The request's seed.
        seed: i64,
        /// The request's step: how many tokens it has drawn.
        step: i64,
    },
    /// Bits drawn elsewhere: the point u = bits / 2^32 of the CDF.
    Bits(u32),
}

impl Draw {
    /// The point of the CDF as a fraction of 2^64.
    pub(crate) fn bits(self) -> u64 {
        match self {
            Self::Counter { seed, step } => philox::draw(seed, step),
            Self::Bits(bits) => (bits as u64) << 32,
        }
    }
}

/// The op `sample` for one row: F32, F16 or BF16 logits `[V]` or `[1, V]` to a token id, U32 of
/// shape `[]` or `[1]`. A `CustomOp1`.
///
/// The CDF of the kept set is inverted in token-id order. A row with nothing above -inf has no
/// token and gives `u32::MAX`. Deterministic: the token is a function of the row, the parameters
/// and the draw.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_topk::sampling::{Draw, Sample, Truncation};
///
/// # fn main() -> candle_core::Result<()> {
/// let logits = Tensor::new(&[1f32, 3., 2., 3.], &Device::Cpu)?;
/// let op = Sample::new(
///     Truncation::new().with_top_k(2).with_temperature(0.7),
///     Draw::Counter { seed: 42, step: 0 },
/// )?;
/// let token = logits.apply_op1_no_bwd(&op)?.to_scalar::<u32>()?;
/// assert!(token == 1 || token == 3);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Copy)]
pub struct Sample {
    truncation: Truncation,
    draw: Draw,
}

impl Sample {
    /// # Errors
    /// Where a parameter means nothing: see the table of [`Truncation`].
    pub fn new(truncation: Truncation, draw: Draw) -> Result<Self> {
        truncation.check(OP)?;
        Ok(Self { truncation, draw })
    }
}

/// The op `sample` for a batch: logits `[B, V]` and draws to U32 `[B]`.
///
/// The draws are the second operand, on the logits' device: I64 `[B, 2]`, each row's own seed and
/// step (see [`Draw::Counter`]), or U32 `[B]`, bits drawn elsewhere ([`Draw::Bits`]). A row's token
/// depends on its own logits, parameters and draw alone, not on its neighbours or its place.
///
/// A `CustomOp2` of logits and draws with the same parameters for every row, made by
/// [`SampleRows::new`]; a `CustomOp3` of logits, draws and packed per-row parameters (see
/// [`Truncation::rows`]), of which then only the [`Mass`] of these parameters counts.
#[derive(Debug, Clone, Copy, Default)]
pub struct SampleRows(Truncation);

impl SampleRows {
    /// # Errors
    /// Where a parameter means nothing: see the table of [`Truncation`].
    pub fn new(truncation: Truncation) -> Result<Self> {
        truncation.check(OP)?;
        Ok(Self(truncation))
    }
}

const OP: &str = "sample";

/// [`Sample`] as a function.
///
/// # Errors
/// For parameters that mean nothing, logits of a wrong rank, dtype, layout or device, and for more
/// than one row: one draw would serve all.
pub fn sample(logits: &Tensor, truncation: Truncation, draw: Draw) -> Result<Tensor> {
    logits.apply_op1_no_bwd(&Sample::new(truncation, draw)?)
}

/// [`SampleRows`] as a function, with the same parameters for every row.
///
/// # Errors
/// For parameters that mean nothing, draws that are neither I64 `[B, 2]` nor U32 `[B]` on the
/// logits' device, and logits of a wrong rank, dtype, layout or device.
pub fn sample_batch(logits: &Tensor, truncation: Truncation, draws: &Tensor) -> Result<Tensor> {
    logits.apply_op2_no_bwd(draws, &SampleRows::new(truncation)?)
}

/// [`SampleRows`] as a function, with packed per-row parameters (see [`Truncation::rows`]).
///
/// # Errors
/// As [`sample_batch`], and for parameters that are not F32 `[B, 4]` on the logits' device.
pub fn sample_rows(logits: &Tensor, draws: &Tensor, rows: &Tensor, mass: Mass) -> Result<Tensor> {
    let op = SampleRows::new(Truncation::new().with_mass(mass))?;
    logits.apply_op3_no_bwd(draws, rows, &op)
}

/// [`sample_batch`] with the log-probabilities of the tokens: U32 `[B]` and F32 `[B]`.
///
/// The natural logarithm of the token's probability in the kept set, at the temperature given, in
/// the very bits that [`candidates`](fn@super::candidates) gives for it: 0 in a set of one, -inf
/// for a row without a token.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_topk::sampling::{sample_batch_with_log_probs, Truncation};
///
/// # fn main() -> candle_core::Result<()> {
/// let logits = Tensor::new(&[[2f32, 5., 2.], [0., 9., 9.]], &Device::Cpu)?;
/// let draws = Tensor::new(&[[42i64, 0], [7, 3]], &Device::Cpu)?;
/// let greedy = Truncation::new().with_top_k(1);
/// let (tokens, log_probs) = sample_batch_with_log_probs(&logits, greedy, &draws)?;
/// assert_eq!(tokens.to_vec1::<u32>()?, [1, 1]);
/// assert_eq!(log_probs.to_vec1::<f32>()?, [0., 0.]);
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// As [`sample_batch`].
pub fn sample_batch_with_log_probs(
    logits: &Tensor,
    truncation: Truncation,
    draws: &Tensor,
) -> Result<(Tensor, Tensor)> {
    truncation.check(OP)?;
    with_log_probs(logits, draws, Given::Scalar(truncation))
}

/// [`sample_rows`] with the log-probabilities of the tokens: see [`sample_batch_with_log_probs`].
///
/// # Errors
/// As [`sample_rows`].
pub fn sample_rows_with_log_probs(
    logits: &Tensor,
    draws: &Tensor,
    rows: &Tensor,
    mass: Mass,
) -> Result<(Tensor, Tensor)> {
    with_log_probs(logits, draws, Given::Rows(rows, mass))
}

fn with_log_probs(logits: &Tensor, draws: &Tensor, parameters: Given) -> Result<(Tensor, Tensor)> {
    let rows = Rows::of(OP, logits.layout(), logits.dtype())?;
    check_device(OP, logits, "draws", draws)?;
    if let Some(params) = parameters.tensor() {
        check_device(OP, logits, "per-row parameters", params)?;
    }
    let [storage, draws, params] = hold([Some(logits), Some(draws), parameters.tensor()]);
    let (storage, _) = storage.expect("there are logits");
    let draws = draws.expect("there are draws");
    let (tokens, log_probs) = match &**storage {
        Storage::Cpu(storage) => {
            let (draws, layout) = on_cpu!(draws);
            let draws = DrawOperand::rows(&rows, draws, layout)?;
            let params = params.as_ref().map(|params| on_cpu!(params));
            let operand = parameters.operand(OP, &rows, params)?;
            let (drawn, log_probs) = cpu_draw(storage, &rows, operand, draws)?;
            (
                Storage::Cpu(tokens_of(drawn)),
                Storage::Cpu(CpuStorage::F32(log_probs)),
            )
        }
        Storage::Cuda(storage) => {
            let (draws, layout) = on_cuda!(draws);
            let draws = DrawOperand::rows(&rows, draws, layout)?;
            let params = params.as_ref().map(|params| on_cuda!(params));
            let operand = parameters.operand(OP, &rows, params)?;
            let (tokens, log_probs) = cuda::sample_with_log_probs(storage, &rows, operand, draws)?;
            (Storage::Cuda(tokens), Storage::Cuda(log_probs))
        }
        Storage::Metal(_) => return super::no_metal(OP),
    };
    let shape = rows.shape(None);
    Ok((
        Tensor::from((tokens, shape.clone())),
        Tensor::from((log_probs, shape)),
    ))
}

/// The draws that an op brings to a backend.
pub(crate) enum DrawOperand<'a, S> {
    One(Draw),
    /// I64 `[B, 2]` or U32 `[B]`.
    Rows(&'a S, &'a Layout),
}

impl<'a, S: BackendStorage> DrawOperand<'a, S> {
    fn one(rows: &Rows, draw: Draw) -> Result<Self> {
        if rows.batch != 1 {
            bail!(
                "{OP}: one draw for {} rows would serve them all; give draws I64 [{}, 2] (seed and step of each row) to SampleRows",
                rows.batch,
                rows.batch
            )
        }
        Ok(Self::One(draw))
    }

    fn rows(rows: &Rows, storage: &'a S, layout: &'a Layout) -> Result<Self> {
        let (dims, dtype, b) = (layout.dims(), storage.dtype(), rows.batch);
        let fits = match dtype {
            DType::I64 => dims == [b, 2] || (rows.single && dims == [2]),
            DType::U32 => dims == [b] || (rows.single && dims.is_empty()),
            _ => false,
        };
        if !fits {
            bail!("{OP}: draws are {dtype:?} {dims:?}, I64 [{b}, 2] (seed and step) or U32 [{b}] (bits) is needed")
        }
        Ok(Self::Rows(storage, layout))
    }
}

/// The draws of a batch, all of a kind, as the operand of an op on the CPU.
pub(super) fn packed(draws: &[Draw]) -> (CpuStorage, Layout) {
    let rows = draws.len();
    if let Some(Draw::Counter { .. }) = draws.first() {
        let counters = draws.iter().flat_map(|draw| match *draw {
            Draw::Counter { seed, step } => [seed, step],
            Draw::Bits(_) => unreachable!("draws are all of a kind"),
        });
        return (
            CpuStorage::I64(counters.collect()),
            Layout::contiguous((rows, 2)),
        );
    }
    let bits = draws.iter().map(|draw| match *draw {
        Draw::Bits(bits) => bits,
        Draw::Counter { .. } => unreachable!("draws are all of a kind"),
    });
    (CpuStorage::U32(bits.collect()), Layout::contiguous(rows))
}

pub(super) fn cpu_draw(
    storage: &CpuStorage,
    rows: &Rows,
    operand: Operand<CpuStorage>,
    draws: DrawOperand<CpuStorage>,
) -> Result<(Vec<Drawn>, Vec<f32>)> {
    let parameters = cpu::Parameters::new(&operand)?;
    let draws = cpu::Draws::new(&draws)?;
    with_logits!(OP, storage, |data| Ok(cpu::sample(
        data,
        rows,
        &parameters,
        &draws
    )))
}

fn cpu_sample(
    storage: &CpuStorage,
    rows: &Rows,
    operand: Operand<CpuStorage>,
    draws: DrawOperand<CpuStorage>,
) -> Result<(CpuStorage, Shape)> {
    let (drawn, _) = cpu_draw(storage, rows, operand, draws)?;
    Ok((tokens_of(drawn), rows.shape(None)))
}

fn tokens_of(drawn: Vec<Drawn>) -> CpuStorage {
    CpuStorage::U32(drawn.into_iter().map(|d| d.token).collect())
}

impl CustomOp1 for Sample {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let rows = Rows::of(OP, layout, storage.dtype())?;
        let draws = DrawOperand::one(&rows, self.draw)?;
        cpu_sample(
            storage,
            &rows,
            Operand::scalar(OP, &rows, &self.truncation)?,
            draws,
        )
    }

    fn cuda_fwd(&self, storage: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        let rows = Rows::of(OP, layout, storage.dtype())?;
        let draws = DrawOperand::one(&rows, self.draw)?;
        let out = cuda::sample(
            storage,
            &rows,
            Operand::scalar(OP, &rows, &self.truncation)?,
            draws,
        )?;
        Ok((out, rows.shape(None)))
    }

    fn metal_fwd(&self, _: &MetalStorage, _: &Layout) -> Result<(MetalStorage, Shape)> {
        super::no_metal(OP)
    }
}

impl CustomOp2 for SampleRows {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(
        &self,
        storage: &CpuStorage,
        layout: &Layout,
        draws: &CpuStorage,
        draws_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let rows = Rows::of(OP, layout, storage.dtype())?;
        let draws = DrawOperand::rows(&rows, draws, draws_layout)?;
        cpu_sample(storage, &rows, Operand::scalar(OP, &rows, &self.0)?, draws)
    }

    fn cuda_fwd(
        &self,
        storage: &CudaStorage,
        layout: &Layout,
        draws: &CudaStorage,
        draws_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        let rows = Rows::of(OP, layout, storage.dtype())?;
        let draws = DrawOperand::rows(&rows, draws, draws_layout)?;
        let out = cuda::sample(storage, &rows, Operand::scalar(OP, &rows, &self.0)?, draws)?;
        Ok((out, rows.shape(None)))
    }

    fn metal_fwd(
        &self,
        _: &MetalStorage,
        _: &Layout,
        _: &MetalStorage,
        _: &Layout,
    ) -> Result<(MetalStorage, Shape)> {
        super::no_metal(OP)
    }
}

impl CustomOp3 for SampleRows {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(
        &self,
        storage: &CpuStorage,
        layout: &Layout,
        draws: &CpuStorage,
        draws_layout: &Layout,
        params: &CpuStorage,
        params_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let rows = Rows::of(OP, layout, storage.dtype())?;
        let draws = DrawOperand::rows(&rows, draws, draws_layout)?;
        let operand = Operand::rows(OP, &rows, params, params_layout, self.0.mass())?;
        cpu_sample(storage, &rows, operand, draws)
    }

    fn cuda_fwd(
        &self,
        storage: &CudaStorage,
        layout: &Layout,
        draws: &CudaStorage,
        draws_layout: &Layout,
        params: &CudaStorage,
        params_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        let rows = Rows::of(OP, layout, storage.dtype())?;
        let draws = DrawOperand::rows(&rows, draws, draws_layout)?;
        let operand = Operand::rows(OP, &rows, params, params_layout, self.0.mass())?;
        let out = cuda::sample(storage, &rows, operand, draws)?;
        Ok((out, rows.shape(None)))
    }

    fn metal_fwd(
        &self,
        _: &MetalStorage,
        _: &Layout,
        _: &MetalStorage,
        _: &Layout,
        _: &MetalStorage,
        _: &Layout,
    ) -> Result<(MetalStorage, Shape)> {
        super::no_metal(OP)
    }
}
