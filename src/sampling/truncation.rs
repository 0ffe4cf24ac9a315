//! The parameters of truncation: checked once, here.

use crate::empty::{full, to_f32};
use candle_core::{bail, DType, Device, Layout, Result, Tensor};

/// What the nucleus threshold p is a fraction of, where a top-k stands before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Mass {
    /// Of the mass that top-k leaves (vLLM, Hugging Face transformers, Qrita).
    #[default]
    Renormalized,
    /// Of the whole vocabulary's mass (`candle_transformers::generation::LogitsProcessor`).
    Joint,
}

/// Temperature, top-k, top-p and min-p, the same for every row, applied in this order.
///
/// Per-row parameters are a tensor instead: see [`Truncation::rows`] and [`pack_rows`].
///
/// | parameter | keeps | no limit | an error | as a device value |
/// |---|---|---|---|---|
/// | temperature T | logits become (x - row max) / T in f32; T = 0 is greedy | 1 | T < 0, NaN | greedy |
/// | top-k | the min(k, logits above -inf) largest, ties by lowest id | 0, k >= V | | k < 0 or NaN: no limit |
/// | top-p | tokens in descending order while the mass before them is below p | p >= 1 | p <= 0, NaN | the best token |
/// | min-p | tokens with at least min_p times the greatest probability | 0 | outside [0, 1], NaN | below 0: no limit; above 1, NaN: the best token |
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Truncation {
    top_k: u32,
    top_p: f32,
    min_p: f32,
    temperature: f32,
    mass: Mass,
}

impl Default for Truncation {
    /// No limit at all, at temperature 1.
    fn default() -> Self {
        Self {
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            temperature: 1.0,
            mass: Mass::default(),
        }
    }
}

impl Truncation {
    /// No limit at all, at temperature 1.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Keeps the `k` largest logits; 0 is no limit, and so is what reaches the vocabulary. Below it
    /// every k up to 2^24 is accepted; above that an op refuses a k that f32 cannot hold.
    #[must_use]
    pub fn with_top_k(mut self, k: usize) -> Self {
        // A k beyond u32 exceeds every vocabulary: no limit, like 0.
        self.top_k = u32::try_from(k).unwrap_or(0);
        self
    }

    /// Keeps the nucleus of mass `p`; 1 and above is no limit.
    #[must_use]
    pub fn with_top_p(mut self, p: f32) -> Self {
        self.top_p = p;
        self
    }

    /// Keeps what has at least `min_p` times the greatest probability; 0 is no limit.
    #[must_use]
    pub fn with_min_p(mut self, min_p: f32) -> Self {
        self.min_p = min_p;
        self
    }

    /// Divides the logits; 0 is greedy.
    #[must_use]
    pub fn with_temperature(mut self, temperature: f32) -> Self {
        self.temperature = temperature;
        self
    }

    /// How p is read after a top-k.
    #[must_use]
    pub fn with_mass(mut self, mass: Mass) -> Self {
        self.mass = mass;
        self
    }

    /// How p is read after a top-k.
    pub fn mass(&self) -> Mass {
        self.mass
    }

    /// The per-row parameters of a batch, F32 `[B, 4]` on `device`: the second operand of
    /// [`MaskRows`](super::MaskRows), [`SampleRows`](super::SampleRows) and the functions beside
    /// them. How p is read is the op's, not a row's, and is not part of it.
    ///
    /// # Errors
    /// Where a row's parameters are none (the table above) or f32 cannot hold its k, naming the row;
    /// where `rows` is empty.
    pub fn rows(rows: &[Truncation], device: &Device) -> Result<Tensor> {
        let packed = Self::pack("truncation rows", 0, rows)?;
        Tensor::from_vec(packed, (rows.len(), PACKED), device)
    }

    /// The packed form of rows, of which the first is row `first` of its batch.
    pub(crate) fn pack(op: &str, first: usize, rows: &[Truncation]) -> Result<Vec<f32>> {
        let mut packed = Vec::with_capacity(rows.len() * PACKED);
        for (i, row) in rows.iter().enumerate() {
            let i = first + i;
            row.check(op).map_err(|e| e.context(format!("row {i}")))?;
            if !row.holds_top_k() {
                bail!(
                    "{op}: row {i}: top_k is {}, a packed k is an f32: at most 2^24 = 16777216 is accepted, and 0 for no limit",
                    row.top_k
                )
            }
            packed.extend(row.packed());
        }
        if rows.is_empty() {
            bail!("{op}: no row given, one for each row of the logits is needed")
        }
        Ok(packed)
    }

    /// Rejects host values that mean nothing.
    pub(crate) fn check(&self, op: &str) -> Result<()> {
        if self.top_p <= 0.0 || self.top_p.is_nan() {
            bail!(
                "{op}: top_p is {}, it must be above 0 (1 and above is no limit)",
                self.top_p
            )
        }
        if !(0.0..=1.0).contains(&self.min_p) {
            bail!("{op}: min_p is {}, it must lie in [0, 1]", self.min_p)
        }
        if self.temperature < 0.0 || self.temperature.is_nan() {
            bail!(
                "{op}: temperature is {}, it must be 0 (greedy) or above",
                self.temperature
            )
        }
        Ok(())
    }

    /// The divisor of the logits; 0 is greedy.
    pub(crate) fn temperature(&self) -> f32 {
        self.temperature
    }

    /// Whether k survives being an f32.
    fn holds_top_k(&self) -> bool {
        self.top_k as f32 as u32 == self.top_k
    }

    /// The scalars as the kernels take them, in the order of a packed row.
    pub(crate) fn packed(&self) -> [f32; PACKED] {
        [self.top_k as f32, self.top_p, self.min_p, self.temperature]
    }
}

/// Columns of a packed row: top-k, top-p, min-p, temperature.
pub(crate) const PACKED: usize = 4;

/// Packs per-row parameters that lie on a device into the F32 `[B, 4]` of [`Truncation::rows`],
/// without a copy to the host. Each is `[B]`, of any number dtype; `None` is the default of
/// [`Truncation`]. Values are read by the kernel: the last column of [`Truncation`]'s table says
/// what an odd one does. A k is exact up to 2^24.
///
/// # Errors
/// Where none is given, where a shape is not `[B]`, or where devices differ.
pub fn pack_rows(
    top_k: Option<&Tensor>,
    top_p: Option<&Tensor>,
    min_p: Option<&Tensor>,
    temperature: Option<&Tensor>,
) -> Result<Tensor> {
    let columns = [
        ("top_k", top_k, 0f32),
        ("top_p", top_p, 1.0),
        ("min_p", min_p, 0.0),
        ("temperature", temperature, 1.0),
    ];
    let Some(first) = columns.iter().find_map(|(_, t, _)| *t) else {
        bail!("pack_rows: no parameter given, at least one [B] tensor is needed")
    };
    let mut packed = Vec::with_capacity(PACKED);
    for (name, tensor, default) in columns {
        packed.push(match tensor {
            None => full(default, first.dims(), first.device())?,
            Some(t) if t.rank() != 1 || t.dims() != first.dims() => bail!(
                "pack_rows: {name} has shape {:?}, [B] is needed, with the same B in all (another has {:?})",
                t.dims(),
                first.dims()
            ),
            Some(t) => to_f32(t)?,
        });
    }
    Tensor::stack(&packed, 1)
}

/// The parameters that an op brings to a backend: scalars, or packed rows in their stead.
pub(crate) struct Operand<'a, S> {
    pub scalars: [f32; PACKED],
    pub rows: Option<(&'a S, &'a Layout)>,
    pub mass: Mass,
}

impl<S> Operand<'_, S> {
    pub fn scalar(op: &str, rows: &Rows, truncation: &Truncation) -> Result<Self> {
        let mut truncation = *truncation;
        if truncation.top_k as usize >= rows.vocab {
            truncation.top_k = 0;
        }
        if !truncation.holds_top_k() {
            bail!(
                "{op}: top_k is {} for a vocabulary of {}, at most 2^24 = 16777216 is accepted, and 0 or the vocabulary for no limit",
                truncation.top_k,
                rows.vocab
            )
        }
        Ok(Self {
            scalars: truncation.packed(),
            rows: None,
            mass: truncation.mass,
        })
    }
}

/// The strides of a `[B, n]` operand, or of `[n]` for a single row.
pub(crate) fn row_and_column(layout: &Layout) -> (usize, usize) {
    match layout.stride() {
        [row, column] => (*row, *column),
        [column] => (0, *column),
        _ => unreachable!("operands of other ranks are refused before"),
    }
}

impl<'a, S: candle_core::backend::BackendStorage> Operand<'a, S> {
    pub fn rows(
        op: &str,
        rows: &Rows,
        storage: &'a S,
        layout: &'a Layout,
        mass: Mass,
    ) -> Result<Self> {
        rows.check_params(op, layout, storage.dtype())?;
        Ok(Self {
            scalars: Truncation::default().packed(),
            rows: Some((storage, layout)),
            mass,
        })
    }
}

/// The parameters that a function over tensors is given.
pub(crate) enum Given<'a> {
    Scalar(Truncation),
    Rows(&'a Tensor, Mass),
}

impl Given<'_> {
    /// The packed rows, if these are the parameters.
    pub fn tensor(&self) -> Option<&Tensor> {
        match self {
            Self::Scalar(_) => None,
            Self::Rows(tensor, _) => Some(tensor),
        }
    }

    /// `params` are the storage and layout of [`Self::tensor`].
    pub fn operand<'a, S: candle_core::backend::BackendStorage>(
        &self,
        op: &str,
        rows: &Rows,
        params: Option<(&'a S, &'a Layout)>,
    ) -> Result<Operand<'a, S>> {
        match (self, params) {
            (Self::Rows(_, mass), Some((storage, layout))) => {
                Operand::rows(op, rows, storage, layout, *mass)
            }
            (Self::Scalar(truncation), _) => Operand::scalar(op, rows, truncation),
            (Self::Rows(..), None) => unreachable!("packed rows bring their storage"),
        }
    }
}

/// Refuses an argument that lies on another device than the logits.
pub(crate) fn check_device(op: &str, logits: &Tensor, name: &str, argument: &Tensor) -> Result<()> {
    if !logits.device().same_device(argument.device()) {
        bail!(
            "{op}: logits are on {:?} and {name} on {:?}, they must be on one device",
            logits.device().location(),
            argument.device().location()
        )
    }
    Ok(())
}

/// What `hold` gave of an argument on the CPU, by its backend; for one that
/// [`check_device`] has let pass.
macro_rules! on_cpu {
    ($guard:expr) => {
        match &**$guard.0 {
            candle_core::Storage::Cpu(storage) => (storage, $guard.1),
            _ => unreachable!("all arguments are on one device"),
        }
    };
}
/// The same on CUDA.
macro_rules! on_cuda {
    ($guard:expr) => {
        match &**$guard.0 {
            candle_core::Storage::Cuda(storage) => (storage, $guard.1),
            _ => unreachable!("all arguments are on one device"),
        }
    };
}
pub(crate) use {on_cpu, on_cuda};

/// One row's parameters, in the form that the CPU backend works with.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct RowTruncation {
    /// `None` is no limit; never `Some(0)`.
    pub top_k: Option<u32>,
    /// `None` is no limit; above 0 and below 1.
    pub top_p: Option<f32>,
    /// `None` is no limit; above 0, at most 1.
    pub min_p: Option<f32>,
    /// Above 0.
    pub temperature: f32,
}

impl RowTruncation {
    /// Only the best token.
    const GREEDY: Self = Self {
        top_k: Some(1),
        top_p: None,
        min_p: None,
        temperature: 1.0,
    };

    /// Reads packed parameters as device values: an odd value never fails. Kernels do the same.
    pub fn from_packed([top_k, top_p, min_p, temperature]: [f32; PACKED]) -> Self {
        // NaN fails each comparison.
        let meaningful = temperature > 0.0 && top_p > 0.0 && min_p <= 1.0;
        if !meaningful {
            return Self::GREEDY;
        }
        Self {
            // The cast saturates, and sends NaN to 0.
            top_k: Some(top_k as u32).filter(|k| *k > 0),
            top_p: Some(top_p).filter(|p| *p < 1.0),
            min_p: Some(min_p).filter(|p| *p > 0.0),
            temperature,
        }
    }
}

/// The rows of a logits tensor: `[V]` is one row, `[B, V]` are B.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Rows {
    pub batch: usize,
    pub vocab: usize,
    /// Elements from the start of one row to the next.
    pub stride: usize,
    pub start: usize,
    /// Whether the logits were `[V]`: the output then has no batch dimension either.
    pub single: bool,
}

impl Rows {
    /// Reads the rows out of a layout of logits.
    pub fn of(op: &str, layout: &Layout, dtype: DType) -> Result<Self> {
        if !matches!(dtype, DType::F32 | DType::F16 | DType::BF16) {
            bail!("{op}: logits are {dtype:?}, F32, F16 or BF16 is needed")
        }
        let (batch, vocab, stride, last, single) = match (layout.dims(), layout.stride()) {
            ([v], [s]) => (1, *v, 0, *s, true),
            ([b, v], [r, s]) => (*b, *v, *r, *s, false),
            (dims, _) => bail!("{op}: logits have shape {dims:?}, [V] or [B, V] is needed"),
        };
        if vocab == 0 {
            bail!(
                "{op}: logits have shape {:?}, a vocabulary of at least 1 is needed",
                layout.dims()
            )
        }
        // Kernels hold positions, a vector's width beyond the row included, in an i32.
        if vocab > i32::MAX as usize - 64 {
            bail!("{op}: the vocabulary is {vocab}, at most 2^31 - 65 is supported")
        }
        // A grid is as long, and a row may take eight blocks.
        if batch > i32::MAX as usize / 8 {
            bail!("{op}: the batch is {batch}, at most 2^28 - 1 is supported")
        }
        if last != 1 && vocab > 1 {
            bail!("{op}: the last dimension of the logits has stride {last}, it must be dense (stride 1); call contiguous() first")
        }
        Ok(Self {
            batch,
            vocab,
            stride,
            start: layout.start_offset(),
            single,
        })
    }

    /// The output shape with one value a row, or with `extra` values a row.
    pub fn shape(&self, extra: Option<usize>) -> candle_core::Shape {
        let batch = (!self.single).then_some(self.batch);
        batch.into_iter().chain(extra).collect::<Vec<_>>().into()
    }

    /// Reads the rows of the output that these rows are written to.
    pub fn output(
        &self,
        op: &str,
        dtype: DType,
        shape: &[usize],
        out: &Layout,
        out_dtype: DType,
    ) -> Result<Self> {
        if out_dtype != dtype || out.dims() != shape {
            bail!(
                "{op}: the output is {out_dtype:?} {:?}, {dtype:?} {shape:?} is needed, as the logits are",
                out.dims()
            )
        }
        let (stride, last) = match out.stride() {
            [row, last] => (*row, *last),
            [last] => (0, *last),
            _ => unreachable!("logits of other ranks are refused before"),
        };
        if last != 1 && self.vocab > 1 {
            bail!("{op}: the last dimension of the output has stride {last}, it must be dense (stride 1)")
        }
        let rows = Self {
            stride,
            start: out.start_offset(),
            ..*self
        };
        rows.check_disjoint(op, "the output")?;
        Ok(rows)
    }

    /// Rows that share elements cannot be written.
    pub fn check_disjoint(&self, op: &str, what: &str) -> Result<()> {
        if self.batch > 1 && self.stride < self.vocab {
            bail!(
                "{op}: the rows of {what}, of {} elements, lie {} apart and overlap, they must be disjoint",
                self.vocab,
                self.stride
            )
        }
        Ok(())
    }

    /// Checks the layout of packed per-row parameters against these rows.
    pub fn check_params(&self, op: &str, layout: &Layout, dtype: DType) -> Result<()> {
        let dims = layout.dims();
        let fits = dims == [self.batch, PACKED] || (self.single && dims == [PACKED]);
        if dtype != DType::F32 || !fits {
            bail!(
                "{op}: per-row parameters are {dtype:?} {dims:?}, F32 [{}, {PACKED}] is needed (Truncation::rows or pack_rows make it)",
                self.batch
            )
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn odd_host_values_are_errors_that_say_what_came() {
        let cases = [
            (Truncation::new().with_top_p(0.0), "top_p is 0"),
            (Truncation::new().with_top_p(-1.0), "top_p is -1"),
            (Truncation::new().with_top_p(f32::NAN), "top_p is NaN"),
            (Truncation::new().with_min_p(1.5), "min_p is 1.5"),
            (Truncation::new().with_min_p(-0.1), "min_p is -0.1"),
            (Truncation::new().with_min_p(f32::NAN), "min_p is NaN"),
            (
                Truncation::new().with_temperature(-1.0),
                "temperature is -1",
            ),
            (
                Truncation::new().with_temperature(f32::NAN),
                "temperature is NaN",
            ),
        ];
        for (truncation, part) in cases {
            let message = truncation.check("mask").unwrap_err().to_string();
            assert!(
                message.contains("mask") && message.contains(part),
                "{message}"
            );
        }
        let rows = [Truncation::new(), Truncation::new().with_min_p(2.0)];
        let message = Truncation::rows(&rows, &Device::Cpu)
            .unwrap_err()
            .to_string();
        assert!(
            message.contains("row 1") && message.contains("min_p is 2"),
            "{message}"
        );
        assert!(Truncation::rows(&[], &Device::Cpu).is_err());
    }

    #[test]
    fn odd_device_values_keep_the_best_token_or_set_no_limit() {
        let none = RowTruncation::from_packed([0.0, 1.0, 0.0, 1.0]);
        assert_eq!((none.top_k, none.top_p, none.min_p), (None, None, None));
        assert_eq!(RowTruncation::from_packed([-1.0, 1.0, -0.5, 1.0]), none);
        assert_eq!(RowTruncation::from_packed([f32::NAN, 2.0, 0.0, 1.0]), none);
        for packed in [
            [0.0, 0.0, 0.0, 1.0],
            [0.0, -1.0, 0.0, 1.0],
            [0.0, f32::NAN, 0.0, 1.0],
            [0.0, 1.0, 1.5, 1.0],
            [0.0, 1.0, f32::NAN, 1.0],
            [0.0, 1.0, 0.0, 0.0],
            [0.0, 1.0, 0.0, -1.0],
            [0.0, 1.0, 0.0, f32::NAN],
        ] {
            assert_eq!(
                RowTruncation::from_packed(packed),
                RowTruncation::GREEDY,
                "{packed:?}"
            );
        }
    }

    #[test]
    fn device_parameters_are_packed_by_name() -> Result<()> {
        let k = Tensor::new(&[5i64, -1], &Device::Cpu)?;
        let t = Tensor::new(&[0.5f32, 2.0], &Device::Cpu)?;
        let packed = pack_rows(Some(&k), None, None, Some(&t))?;
        assert_eq!(
            packed.to_vec2::<f32>()?,
            [[5.0, 1.0, 0.0, 0.5], [-1.0, 1.0, 0.0, 2.0]]
        );
        assert!(pack_rows(None, None, None, None).is_err());
        let short = Tensor::new(&[0.5f32], &Device::Cpu)?;
        let message = pack_rows(Some(&k), Some(&short), None, None)
            .unwrap_err()
            .to_string();
        assert!(message.contains("top_p has shape [1]"), "{message}");
        Ok(())
    }
}
