//! Inputs and outputs at fixed addresses: the forms of the ops that allocate nothing.

use super::cpu::{self, with_logits};
use super::truncation::{Mass, Rows, Truncation, PACKED};
use super::{candidates, cuda, Candidates};
use crate::buffer::Buffer;
use candle_core::{bail, Device, Result, Storage, Tensor};

/// What the kernels counted on the way to one row's kept set: how it was found, not what it is.
///
/// A measurement of the implementation, for tuning and for tests: it may differ between the forms
/// of the kernels and between versions, where results may not. Not counted on the CPU, where all of
/// it is 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Routes {
    route: u32,
    gathered: u32,
    steps: u32,
    passes: u32,
}

/// What error messages call these buffers.
const WHAT: &str = "sampling buffers";

/// Counters of a row: `RouteCounters` in `kernels/sampling/truncate.cuh`.
const COUNTERS: usize = 4;

impl Routes {
    fn of(counters: &[u32]) -> Self {
        Self {
            route: counters[0],
            gathered: counters[1],
            steps: counters[2],
            passes: counters[3],
        }
    }

    /// The proposal of sigma-truncation was certified: the kept set lies in the candidates that the
    /// first pass gathered.
    pub fn hit(&self) -> bool {
        self.route & 1 != 0
    }

    /// A further pass summed masses over the row: exactly, for the threshold of top-p. That may be the
    /// one that a histogram was taken in.
    pub fn second_pass(&self) -> bool {
        self.route & 2 != 0
    }

    /// The proposal missed, or there was none: histograms narrowed the search, of a part of the row
    /// that a sample proposes, or of the whole.
    pub fn fallback(&self) -> bool {
        self.route & 4 != 0
    }

    /// Everything above -inf is kept.
    pub fn no_truncation(&self) -> bool {
        self.route & 8 != 0
    }

    /// Candidates gathered by the last pass that gathered any, or left to be gathered by what the op
    /// reads afterwards. Above the kernels' room, what did not fit was counted and dropped.
    pub fn gathered(&self) -> u32 {
        self.gathered
    }

    /// Steps of the searches for the cut: of pivots, and of histograms.
    pub fn steps(&self) -> u32 {
        self.steps
    }

    /// Passes over the row that finding the set took. What an op reads or writes of the row
    /// afterwards comes on top.
    pub fn passes(&self) -> u32 {
        self.passes
    }
}

/// What the buffers of both ops have: the parameters of up to `size` rows.
#[derive(Debug)]
struct Batch {
    op: &'static str,
    size: usize,
    device: Device,
    params: Buffer<f32>,
    routes: Option<Buffer<u32>>,
}

impl Batch {
    fn new(op: &'static str, size: usize, device: &Device) -> Result<Self> {
        let most = i32::MAX as usize / 8;
        if size == 0 || size > most {
            bail!("{op} buffers: the batch is {size}, 1 to 2^28 - 1 rows are accepted")
        }
        let params = Truncation::default().packed().repeat(size);
        Ok(Self {
            op,
            size,
            device: device.clone(),
            params: Buffer::new(WHAT, device, params)?,
            routes: None,
        })
    }

    fn count_routes(&mut self) -> Result<()> {
        self.routes = Some(Buffer::new(
            WHAT,
            &self.device,
            vec![0; self.size * COUNTERS],
        )?);
        Ok(())
    }

    fn check_count(&self, what: &str, count: usize) -> Result<()> {
        if count == 0 || count > self.size {
            bail!(
                "{} buffers: {count} {what} are given, 1 to {} are accepted, the first for row 0",
                self.op,
                self.size
            )
        }
        Ok(())
    }

    fn check_row(&self, row: usize) -> Result<()> {
        if row >= self.size {
            bail!(
                "{} buffers: the row is {row}, 0 to {} are accepted",
                self.op,
                self.size - 1
            )
        }
        Ok(())
    }

    fn set_params(&mut self, first: usize, rows: &[Truncation]) -> Result<()> {
        let packed = Truncation::pack(self.op, first, rows)?;
        self.params.write(first * PACKED, &packed)
    }

    fn rows(&self, logits: &Tensor) -> Result<Rows> {
        let op = self.op;
        let rows = Rows::of(op, logits.layout(), logits.dtype())?;
        if !logits.device().same_device(&self.device) {
            bail!(
                "{op}: logits are on {:?} and the buffers on {:?}, they must be on one device",
                logits.device().location(),
                self.device.location()
            )
        }
        if rows.batch > self.size {
            bail!(
                "{op}: logits have shape {:?}, the buffers hold {} rows, at most as many are accepted",
                logits.dims(),
                self.size
            )
        }
        Ok(rows)
    }

    fn routes(&self) -> Result<Vec<Routes>> {
        match &self.routes {
            Some(routes) => Ok(routes.read()?.chunks(COUNTERS).map(Routes::of).collect()),
            None => bail!(
                "{} buffers: routes are not counted, make the buffers with with_routes()",
                self.op
            ),
        }
    }
}

/// The parameters, requests and tokens of a batch of up to B rows, at fixed addresses:
/// [`sample_into`](Self::sample_into) draws the next token of every row and allocates nothing.
///
/// Each row is a request with its own seed and step. A draw advances the row's step in place, so
/// launching again, or replaying a CUDA graph that holds the launch, draws the next token.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_topk::sampling::{Mass, SampleBuffers, Truncation};
///
/// # fn main() -> candle_core::Result<()> {
/// let logits = Tensor::new(&[[1f32, 3., 2., 3.], [0., 0., 7., 0.]], &Device::Cpu)?;
/// let mut buffers = SampleBuffers::new(2, &Device::Cpu)?;
/// buffers.set_params(&[Truncation::new().with_top_k(2), Truncation::new().with_top_p(0.9)])?;
/// buffers.set_requests(&[(42, 0), (1234, 17)])?;
/// buffers.sample_into(&logits, Mass::Renormalized)?;
/// let tokens = buffers.tokens()?;
/// assert!((tokens[0] == 1 || tokens[0] == 3) && tokens[1] == 2);
/// assert_eq!(buffers.log_probs()?, [0.5f32.ln(), 0.]);
/// assert_eq!(buffers.steps()?, [1, 18]);
/// # Ok(())
/// # }
/// ```
///
/// # CUDA graphs
/// [`sample_into`](Self::sample_into) can be captured once the kernels are loaded (`cuda::preload`).
/// The graph holds the addresses of these buffers and of the logits: both must outlive it. Between
/// replays the setters change what the next one sees; they and the readers go on the stream of the
/// buffers' device, so they keep their order, and give an `Err` while that stream captures. Switch
/// cudarc's event tracking off before anything is made that the graph uses: an event of before the
/// capture cannot be waited for in it.
#[derive(Debug)]
pub struct SampleBuffers {
    batch: Batch,
    /// The seed and the step of each row.
    counters: Buffer<i64>,
    tokens: Buffer<u32>,
    log_probs: Buffer<f32>,
}

impl SampleBuffers {
    /// Buffers of `batch` rows. Until they are set, no row has a limit, and row b has seed b and
    /// step 0.
    ///
    /// # Errors
    /// For a batch of 0 or above 2^28 - 1, and on a device that is neither the CPU nor CUDA.
    pub fn new(batch: usize, device: &Device) -> Result<Self> {
        let shared = Batch::new("sample", batch, device)?;
        let counters = (0..batch as i64).flat_map(|b| [b, 0]).collect();
        Ok(Self {
            batch: shared,
            counters: Buffer::new(WHAT, device, counters)?,
            tokens: Buffer::new(WHAT, device, vec![u32::MAX; batch])?,
            log_probs: Buffer::new(WHAT, device, vec![f32::NEG_INFINITY; batch])?,
        })
    }

    /// Counts the [`Routes`] of every launch from here on.
    ///
    /// # Errors
    /// Where the device has no memory for them.
    pub fn with_routes(mut self) -> Result<Self> {
        self.batch.count_routes()?;
        Ok(self)
    }

    /// The parameters of the first rows, as many as are given; the others keep theirs. How p is
    /// read is the launch's, as in [`Truncation::rows`].
    ///
    /// # Errors
    /// As [`Truncation::rows`]; for more rows than the buffers hold, and during a capture.
    pub fn set_params(&mut self, rows: &[Truncation]) -> Result<()> {
        self.batch.check_count("rows of parameters", rows.len())?;
        self.batch.set_params(0, rows)
    }

    /// The parameters of one row.
    ///
    /// # Errors
    /// As [`set_params`](Self::set_params), and for a row that the buffers do not hold.
    pub fn set_params_row(&mut self, row: usize, truncation: Truncation) -> Result<()> {
        self.batch.check_row(row)?;
        self.batch.set_params(row, &[truncation])
    }

    /// The seeds and steps of the first rows, as many as are given; the others keep theirs.
    ///
    /// # Errors
    /// For none, for more than the buffers hold, and during a capture.
    pub fn set_requests(&mut self, requests: &[(i64, i64)]) -> Result<()> {
        self.batch.check_count("requests", requests.len())?;
        let counters: Vec<i64> = requests.iter().flat_map(|r| [r.0, r.1]).collect();
        self.counters.write(0, &counters)
    }

    /// The seed and step of one row: a new request takes its place.
    ///
    /// # Errors
    /// For a row that the buffers do not hold, and during a capture.
    pub fn set_request(&mut self, row: usize, seed: i64, step: i64) -> Result<()> {
        self.batch.check_row(row)?;
        self.counters.write(2 * row, &[seed, step])
    }

    /// Draws a token for each row of the logits, F32, F16 or BF16, `[V]` or `[b, V]` with b at most
    /// B: row i with the parameters, seed and step of row i here, whose step grows by one (and
    /// wraps), with or without a token. Rows from b on keep what they hold. The tokens are those of
    /// [`sample_rows`](super::sample_rows).
    ///
    /// One launch and nothing else: no allocation, no upload, no readback, no synchronisation, and
    /// no workspace, at any batch and vocabulary.
    ///
    /// # Errors
    /// For logits of a wrong rank, dtype, layout or device, or of more rows than the buffers hold.
    /// No step advances then.
    pub fn sample_into(&mut self, logits: &Tensor, mass: Mass) -> Result<()> {
        let rows = self.batch.rows(logits)?;
        let Batch { params, routes, .. } = &mut self.batch;
        let (storage, _) = logits.storage_and_layout();
        match &*storage {
            Storage::Cpu(storage) => {
                let parameters = cpu::Parameters::packed(params.on_cpu(), mass);
                let counters = self.counters.on_cpu();
                let draws = cpu::Draws::Counters(counters, 0, 2, 1);
                let (drawn, log_probs) = with_logits!("sample", storage, |data| cpu::sample(
                    data,
                    &rows,
                    &parameters,
                    &draws
                ));
                for (token, drawn) in self.tokens.on_cpu().iter_mut().zip(drawn) {
                    *token = drawn.token;
                }
                self.log_probs.on_cpu()[..rows.batch].copy_from_slice(&log_probs);
                for counter in counters.chunks_mut(2).take(rows.batch) {
                    counter[1] = counter[1].wrapping_add(1);
                }
                Ok(())
            }
            Storage::Cuda(storage) => cuda::sample_into(
                storage,
                &rows,
                (params.on_cuda(), mass),
                self.counters.on_cuda(),
                (self.tokens.on_cuda(), self.log_probs.on_cuda()),
                routes.as_mut().map(Buffer::on_cuda),
            ),
            Storage::Metal(_) => super::no_metal("sample"),
        }
    }

    /// The tokens of all B rows, read back; `u32::MAX` for a row without one, and for a row that no
    /// launch has reached.
    ///
    /// # Errors
    /// Where the device fails, and during a capture.
    pub fn tokens(&self) -> Result<Vec<u32>> {
        self.tokens.read()
    }

    /// The tokens' log-probabilities, read back: those of
    /// [`sample_batch_with_log_probs`](super::sample_batch_with_log_probs).
    ///
    /// # Errors
    /// Where the device fails, and during a capture.
    pub fn log_probs(&self) -> Result<Vec<f32>> {
        self.log_probs.read()
    }

    /// The steps, read back: what the next draw of each row takes.
    ///
    /// # Errors
    /// Where the device fails, and during a capture.
    pub fn steps(&self) -> Result<Vec<i64>> {
        Ok(self.counters.read()?.chunks(2).map(|c| c[1]).collect())
    }

    /// How the last launch that reached each row found its kept set.
    ///
    /// # Errors
    /// Without [`with_routes`](Self::with_routes), where the device fails, and during a capture.
    pub fn routes(&self) -> Result<Vec<Routes>> {
        self.batch.routes()
    }

    /// The tokens as a tensor, U32 `[B]`: a copy on the device.
    ///
    /// # Errors
    /// Where the device fails, and during a capture.
    pub fn tokens_tensor(&self) -> Result<Tensor> {
        self.tokens.to_tensor(self.batch.size)
    }

    /// The log-probabilities as a tensor, F32 `[B]`: a copy on the device.
    ///
    /// # Errors
    /// Where the device fails, and during a capture.
    pub fn log_probs_tensor(&self) -> Result<Tensor> {
        self.log_probs.to_tensor(self.batch.size)
    }
}

/// The parameters and kept sets of a batch of up to B rows, at fixed addresses:
/// [`candidates_into`](Self::candidates_into) allocates nothing.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_topk::sampling::{CandidateBuffers, Mass, Truncation};
///
/// # fn main() -> candle_core::Result<()> {
/// let logits = Tensor::new(&[[1f32, 3., 2., 3.]], &Device::Cpu)?;
/// let mut buffers = CandidateBuffers::new(1, 4, &Device::Cpu)?;
/// buffers.set_params(&[Truncation::new().with_top_k(3)])?;
/// buffers.candidates_into(&logits, Mass::Renormalized)?;
/// let set = buffers.candidates()?;
/// assert_eq!(set.ids.to_vec2::<u32>()?, [[1, 2, 3, u32::MAX]]);
/// assert_eq!(set.counts.to_vec1::<u32>()?, [3]);
/// # Ok(())
/// # }
/// ```
///
/// What [`SampleBuffers`] says of CUDA graphs holds here too.
#[derive(Debug)]
pub struct CandidateBuffers {
    batch: Batch,
    capacity: usize,
    ids: Buffer<u32>,
    log_probs: Buffer<f32>,
    counts: Buffer<u32>,
}

impl CandidateBuffers {
    /// Buffers of `batch` rows with room for `capacity` candidates each. Until parameters are set,
    /// no row has a limit.
    ///
    /// # Errors
    /// For a batch of 0 or above 2^28 - 1, a capacity of 0 or of over 2^35 candidates in all, and
    /// on a device that is neither the CPU nor CUDA.
    pub fn new(batch: usize, capacity: usize, device: &Device) -> Result<Self> {
        const OP: &str = "candidates";
        let shared = Batch::new(OP, batch, device)?;
        candidates::check_capacity(OP, batch, capacity)?;
        let all = batch * capacity;
        Ok(Self {
            batch: shared,
            capacity,
            ids: Buffer::new(WHAT, device, vec![u32::MAX; all])?,
            log_probs: Buffer::new(WHAT, device, vec![f32::NEG_INFINITY; all])?,
            counts: Buffer::new(WHAT, device, vec![0; batch])?,
        })
    }

    /// Counts the [`Routes`] of every launch from here on.
    ///
    /// # Errors
    /// Where the device has no memory for them.
    pub fn with_routes(mut self) -> Result<Self> {
        self.batch.count_routes()?;
        Ok(self)
    }

    /// As [`SampleBuffers::set_params`].
    ///
    /// # Errors
    /// As [`SampleBuffers::set_params`].
    pub fn set_params(&mut self, rows: &[Truncation]) -> Result<()> {
        self.batch.check_count("rows of parameters", rows.len())?;
        self.batch.set_params(0, rows)
    }

    /// As [`SampleBuffers::set_params_row`].
    ///
    /// # Errors
    /// As [`SampleBuffers::set_params_row`].
    pub fn set_params_row(&mut self, row: usize, truncation: Truncation) -> Result<()> {
        self.batch.check_row(row)?;
        self.batch.set_params(row, &[truncation])
    }

    /// The kept set of each row of the logits, F32, F16 or BF16, `[V]` or `[b, V]` with b at most B,
    /// with the parameters of the same row here. Rows from b on keep what they hold.
    ///
    /// One launch and nothing else: no allocation, no upload, no readback, no synchronisation, and
    /// no workspace, at any batch and vocabulary.
    ///
    /// # Errors
    /// For logits of a wrong rank, dtype, layout or device, or of more rows than the buffers hold.
    pub fn candidates_into(&mut self, logits: &Tensor, mass: Mass) -> Result<()> {
        let rows = self.batch.rows(logits)?;
        let Batch { params, routes, .. } = &mut self.batch;
        let capacity = self.capacity;
        let (storage, _) = logits.storage_and_layout();
        match &*storage {
            Storage::Cpu(storage) => {
                let parameters = cpu::Parameters::packed(params.on_cpu(), mass);
                let out = (
                    self.ids.on_cpu(),
                    self.log_probs.on_cpu(),
                    self.counts.on_cpu(),
                );
                with_logits!("candidates", storage, |data| cpu::candidates_into(
                    data,
                    &rows,
                    &parameters,
                    capacity,
                    out
                ));
                Ok(())
            }
            Storage::Cuda(storage) => cuda::candidates_into(
                storage,
                &rows,
                (params.on_cuda(), mass),
                capacity,
                (
                    self.ids.on_cuda(),
                    self.log_probs.on_cuda(),
                    self.counts.on_cuda(),
                ),
                routes.as_mut().map(Buffer::on_cuda),
            ),
            Storage::Metal(_) => super::no_metal("candidates"),
        }
    }

    /// The kept sets of all B rows: a copy on the device. A row that no launch has reached is
    /// empty.
    ///
    /// # Errors
    /// Where the device fails, and during a capture.
    pub fn candidates(&self) -> Result<Candidates> {
        let per_candidate = (self.batch.size, self.capacity);
        Ok(Candidates {
            ids: self.ids.to_tensor(per_candidate)?,
            log_probs: self.log_probs.to_tensor(per_candidate)?,
            counts: self.counts.to_tensor(self.batch.size)?,
        })
    }

    /// How the last launch that reached each row found its kept set.
    ///
    /// # Errors
    /// Without [`with_routes`](Self::with_routes), where the device fails, and during a capture.
    pub fn routes(&self) -> Result<Vec<Routes>> {
        self.batch.routes()
    }
}
