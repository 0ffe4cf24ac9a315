//! The CUDA backend: launches of `kernels/sampling`, one block a row, or on sm_90 a cluster.

use super::cpu::Drawn;
use super::sample::{self, Draw, DrawOperand};
use super::truncation::{row_and_column, Mass, Operand, Rows, Truncation, PACKED};
use crate::buffer::DeviceBuffer as Buffer;
use crate::cuda::{
    self, alloc, arg, Addresses, Demand, Family, Form, Kernel, Teams, CANDIDATES, MASK,
    REPEAT_PENALTY, SAMPLE,
};
use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::cuda_backend::cudarc::driver::{
    CudaSlice, CudaStream, DevicePtrMut, DeviceRepr, LaunchConfig, PushKernelArg, SyncOnDrop,
    ValidAsZeroBits,
};
use candle_core::cuda_backend::{CudaDType, CudaStorageSlice, WrapErr};
use candle_core::{bail, CudaDevice, CudaStorage, DType, Result, Shape, Storage, Tensor};
use half::{bf16, f16};

/// `kThreads` in a kernel's file and how many blocks of it a multiprocessor has, and `sizeof(Shared)` in
/// `kernels/sampling/truncate.cuh`.
fn demand(family: &Family, form: Form) -> Demand {
    let (threads, blocks) = match form {
        Form::Sm80 => (256, 4),
        // A mask's passes over large sets need all loads in flight that there can be.
        Form::Sm80Wide if family.name == MASK.name => (1024, 1),
        Form::Sm80Wide => (512, 2),
        Form::Sm90 => (512, 1),
    };
    Demand {
        threads,
        blocks,
        shared_bytes: 3200 + (32 << 10),
    }
}

/// The kernel of an op for these rows, and how to launch it.
fn kernel(
    family: &Family,
    device: &CudaDevice,
    dtype: DType,
    rows: &Rows,
) -> Result<(Kernel, Teams)> {
    // By vectors of 16 bytes, wherever the row starts between two.
    let width = 16 / dtype.size_in_bytes();
    let vectors = (rows.vocab + 2 * (width - 1)) / width;
    // `Row::slice_length` in `kernels/common/row.cuh`, and a line, as slices need not begin with one.
    const LINE: usize = 8;
    let slice_bytes = |blocks: u32| {
        let length = vectors.div_ceil(blocks as usize).next_multiple_of(LINE);
        (length + LINE) as u64 * 16
    };
    let demand = |form| demand(family, form);
    cuda::teams(device, family, dtype, rows.batch, demand, slice_bytes)
}

/// `Request` in `kernels/sampling/truncate.cuh`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Request {
    logits: u64,
    row_stride: i64,
    params: u64,
    params_row: i64,
    params_column: i64,
    scalars: [f32; 4],
    vocab: i32,
    joint: i32,
    routes: u64,
}

// SAFETY: plain old data, laid out as the kernels' struct of the same name.
unsafe impl DeviceRepr for Request {}

/// `DrawSource` in `kernels/sampling/sample.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct DrawSource {
    counters: u64,
    counters_row: i64,
    counters_column: i64,
    bits: u64,
    bits_row: i64,
    one: u64,
}

// SAFETY: plain old data, laid out as the kernels' struct of the same name.
unsafe impl DeviceRepr for DrawSource {}

/// `SampleOutputs` in `kernels/sampling/sample.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct SampleOutputs {
    tokens: u64,
    notes: u64,
    log_probs: u64,
    advance: u64,
    refused: u32,
}

// SAFETY: plain old data, laid out as the kernels' struct of the same name.
unsafe impl DeviceRepr for SampleOutputs {}

impl<'a> Addresses<'a> {
    fn of_logits(&mut self, storage: &'a CudaStorage, offset: usize) -> Result<u64> {
        Ok(match &storage.slice {
            CudaStorageSlice::F32(slice) => self.of(slice, offset),
            CudaStorageSlice::F16(slice) => self.of(slice, offset),
            CudaStorageSlice::BF16(slice) => self.of(slice, offset),
            _ => bail!(
                "logits are {:?}, F32, F16 or BF16 is needed",
                storage.dtype()
            ),
        })
    }

    fn request(
        &mut self,
        storage: &'a CudaStorage,
        rows: &Rows,
        operand: &Operand<'a, CudaStorage>,
    ) -> Result<Request> {
        let logits = self.of_logits(storage, rows.start)?;
        self.request_at(logits, rows, operand)
    }

    fn request_at(
        &mut self,
        logits: u64,
        rows: &Rows,
        operand: &Operand<'a, CudaStorage>,
    ) -> Result<Request> {
        let (params, params_row, params_column) = match operand.rows {
            None => (0, 0, 0),
            Some((params, layout)) => {
                let address = self.of(params.as_cuda_slice::<f32>()?, layout.start_offset());
                let (row, column) = row_and_column(layout);
                (address, row as i64, column as i64)
            }
        };
        Ok(Request {
            logits,
            row_stride: rows.stride as i64,
            params,
            params_row,
            params_column,
            scalars: operand.scalars,
            vocab: rows.vocab as i32,
            joint: (operand.mass == Mass::Joint) as i32,
            routes: 0,
        })
    }

    /// With parameters that lie in a buffer, a packed row behind the other.
    fn request_packed(
        &mut self,
        storage: &'a CudaStorage,
        rows: &Rows,
        (params, mass): (&'a Buffer<f32>, Mass),
        routes: Option<&'a mut Buffer<u32>>,
    ) -> Result<Request> {
        Ok(Request {
            logits: self.of_logits(storage, rows.start)?,
            row_stride: rows.stride as i64,
            params: self.of(&params.slice, 0),
            params_row: PACKED as i64,
            params_column: 1,
            scalars: Truncation::default().packed(),
            vocab: rows.vocab as i32,
            joint: (mass == Mass::Joint) as i32,
            routes: routes.map_or(0, |routes| self.written(&mut routes.slice)),
        })
    }

    fn draws(&mut self, draws: &DrawOperand<'a, CudaStorage>) -> Result<DrawSource> {
        Ok(match draws {
            DrawOperand::One(draw) => DrawSource {
                one: draw.bits(),
                ..DrawSource::default()
            },
            DrawOperand::Rows(storage, layout) if storage.dtype() == DType::I64 => {
                let (row, column) = row_and_column(layout);
                DrawSource {
                    counters: self.of(storage.as_cuda_slice::<i64>()?, layout.start_offset()),
                    counters_row: row as i64,
                    counters_column: column as i64,
                    ..DrawSource::default()
                }
            }
            DrawOperand::Rows(storage, layout) => DrawSource {
                bits: self.of(storage.as_cuda_slice::<u32>()?, layout.start_offset()),
                bits_row: layout.stride().first().copied().unwrap_or(0) as i64,
                ..DrawSource::default()
            },
        })
    }
}

pub(super) fn mask(
    storage: &CudaStorage,
    rows: &Rows,
    operand: Operand<CudaStorage>,
) -> Result<CudaStorage> {
    fn run<T: CudaDType + DeviceRepr + ValidAsZeroBits>(
        storage: &CudaStorage,
        rows: &Rows,
        operand: Operand<CudaStorage>,
    ) -> Result<CudaStorage> {
        let device = storage.device();
        // SAFETY: the kernel writes every element.
        let mut out = unsafe { alloc::<T>(device, rows.batch * rows.vocab)? };
        if rows.batch > 0 {
            let (kernel, teams) = kernel(&MASK, device, storage.dtype(), rows)?;
            let stream = kernel.stream.clone();
            let mut addresses = Addresses::new(&stream);
            let request = addresses.request(storage, rows, &operand)?;
            let stride = rows.vocab as i64;
            let to = addresses.written(&mut out);
            // SAFETY: `Rows` has checked that every row lies in the logits, `Operand` that every
            // packed row does, and `out` holds a dense row for each team.
            unsafe { kernel.launch(teams, [arg(&request), arg(&to), arg(&stride)]) }?;
        }
        Ok(CudaStorage::wrap_cuda_slice(out, device.clone()))
    }
    match storage.dtype() {
        DType::F16 => run::<f16>(storage, rows, operand),
        DType::BF16 => run::<bf16>(storage, rows, operand),
        _ => run::<f32>(storage, rows, operand),
    }
}

pub(super) fn mask_into(
    out: &mut CudaStorage,
    out_rows: &Rows,
    storage: &CudaStorage,
    rows: &Rows,
    operand: Operand<CudaStorage>,
) -> Result<()> {
    if rows.batch == 0 {
        return Ok(());
    }
    let dtype = storage.dtype();
    let (kernel, teams) = kernel(&MASK, storage.device(), dtype, rows)?;
    let stream = kernel.stream.clone();
    let mut addresses = Addresses::new(&stream);
    let request = addresses.request(storage, rows, &operand)?;
    let (address, _guard) = address_mut(out, &stream)?;
    let out = address + (out_rows.start * dtype.size_in_bytes()) as u64;
    let stride = out_rows.stride as i64;
    // SAFETY: as in `mask`; `Rows::output` has checked that the output has a row of its own for
    // each team, and Candle that it is another storage than the logits.
    unsafe { kernel.launch(teams, [arg(&request), arg(&out), arg(&stride)]) }
}

/// The address of logits that are written.
fn address_mut<'a>(
    storage: &'a mut CudaStorage,
    stream: &'a CudaStream,
) -> Result<(u64, SyncOnDrop<'a>)> {
    Ok(match &mut storage.slice {
        CudaStorageSlice::F32(slice) => slice.device_ptr_mut(stream),
        CudaStorageSlice::F16(slice) => slice.device_ptr_mut(stream),
        CudaStorageSlice::BF16(slice) => slice.device_ptr_mut(stream),
        _ => bail!("mask: logits are neither F32 nor F16 nor BF16, one of them is needed"),
    })
}

pub(super) fn mask_in_place(
    storage: &mut CudaStorage,
    rows: &Rows,
    operand: Operand<CudaStorage>,
) -> Result<()> {
    if rows.batch == 0 {
        return Ok(());
    }
    let dtype = storage.dtype();
    let (kernel, teams) = kernel(&MASK, &storage.device, dtype, rows)?;
    let stream = kernel.stream.clone();
    let (address, _guard) = address_mut(storage, &stream)?;
    let logits = address + (rows.start * dtype.size_in_bytes()) as u64;
    let mut addresses = Addresses::new(&stream);
    let request = addresses.request_at(logits, rows, &operand)?;
    let stride = rows.stride as i64;
    // SAFETY: as in `mask`; the rows are disjoint, and a team writes its row only after all of its
    // threads have read what they decide by.
    unsafe { kernel.launch(teams, [arg(&request), arg(&logits), arg(&stride)]) }
}

pub(super) fn candidates(
    storage: &CudaStorage,
    rows: &Rows,
    operand: Operand<CudaStorage>,
    capacity: usize,
) -> Result<(CudaStorage, CudaStorage, CudaStorage)> {
    let device = storage.device();
    // SAFETY: the kernel writes every element of all three.
    let (mut ids, mut log_probs, mut counts) = unsafe {
        (
            alloc::<u32>(device, rows.batch * capacity)?,
            alloc::<f32>(device, rows.batch * capacity)?,
            alloc::<u32>(device, rows.batch)?,
        )
    };
    if rows.batch > 0 {
        let dtype = storage.dtype();
        let (kernel, teams) = kernel(&CANDIDATES, device, dtype, rows)?;
        let stream = kernel.stream.clone();
        let mut addresses = Addresses::new(&stream);
        let request = addresses.request(storage, rows, &operand)?;
        let capacity = capacity as i64;
        let outputs = [
            addresses.written(&mut ids),
            addresses.written(&mut log_probs),
            addresses.written(&mut counts),
        ];
        // SAFETY: as in `mask`; each team writes `capacity` ids and log-probabilities and one
        // count.
        unsafe { launch_candidates(&kernel, teams, &request, outputs, &capacity) }?;
    }
    Ok((
        CudaStorage::wrap_cuda_slice(ids, device.clone()),
        CudaStorage::wrap_cuda_slice(log_probs, device.clone()),
        CudaStorage::wrap_cuda_slice(counts, device.clone()),
    ))
}

pub(super) fn candidates_into(
    storage: &CudaStorage,
    rows: &Rows,
    params: (&Buffer<f32>, Mass),
    capacity: usize,
    (ids, log_probs, counts): (&mut Buffer<u32>, &mut Buffer<f32>, &mut Buffer<u32>),
    routes: Option<&mut Buffer<u32>>,
) -> Result<()> {
    if rows.batch == 0 {
        return Ok(());
    }
    let (kernel, teams) = kernel(&CANDIDATES, storage.device(), storage.dtype(), rows)?;
    let stream = kernel.stream.clone();
    let mut addresses = Addresses::new(&stream);
    let request = addresses.request_packed(storage, rows, params, routes)?;
    let capacity = capacity as i64;
    let outputs = [
        addresses.written(&mut ids.slice),
        addresses.written(&mut log_probs.slice),
        addresses.written(&mut counts.slice),
    ];
    // SAFETY: as in `candidates`; the buffers hold at least as many rows as the logits have.
    unsafe { launch_candidates(&kernel, teams, &request, outputs, &capacity) }
}

/// # Safety
/// The addresses are those of ids, log-probabilities and counts of every row.
unsafe fn launch_candidates(
    kernel: &Kernel,
    teams: Teams,
    request: &Request,
    [ids, log_probs, counts]: [u64; 3],
    capacity: &i64,
) -> Result<()> {
    let arguments = [
        arg(request),
        arg(&ids),
        arg(&log_probs),
        arg(&counts),
        arg(capacity),
    ];
    // SAFETY: the caller's promise; these are the kernel's parameters.
    unsafe { kernel.launch(teams, arguments) }
}

/// Bits of a row's note, which are those of `refused` too.
const NAN: u32 = 1;
const INFINITY: u32 = 2;

/// Where a launch of `sample` writes.
struct Outputs<'a> {
    /// The tokens, and the notes behind them where `noted`.
    tokens: &'a mut CudaSlice<u32>,
    noted: bool,
    log_probs: Option<&'a mut CudaSlice<f32>>,
    refused: u32,
}

impl<'a> Outputs<'a> {
    fn tokens(tokens: &'a mut CudaSlice<u32>) -> Self {
        Self {
            tokens,
            noted: false,
            log_probs: None,
            refused: 0,
        }
    }
}

fn launch_sample(
    storage: &CudaStorage,
    rows: &Rows,
    operand: &Operand<CudaStorage>,
    draws: &DrawOperand<CudaStorage>,
    out: Outputs,
) -> Result<()> {
    if rows.batch == 0 {
        return Ok(());
    }
    let (kernel, teams) = kernel(&SAMPLE, storage.device(), storage.dtype(), rows)?;
    let stream = kernel.stream.clone();
    let mut addresses = Addresses::new(&stream);
    let request = addresses.request(storage, rows, operand)?;
    let draws = addresses.draws(draws)?;
    let tokens = addresses.written(out.tokens);
    let notes = if out.noted {
        tokens + (rows.batch * size_of::<u32>()) as u64
    } else {
        0
    };
    let outputs = SampleOutputs {
        tokens,
        notes,
        log_probs: out.log_probs.map_or(0, |slice| addresses.written(slice)),
        advance: 0,
        refused: out.refused,
    };
    // SAFETY: as in `mask`; `DrawOperand` has checked that there is a draw for every row, and the
    // outputs hold a token, and where asked for a note and a log-probability, for each team.
    unsafe { kernel.launch(teams, [arg(&request), arg(&draws), arg(&outputs)]) }
}

pub(super) fn sample(
    storage: &CudaStorage,
    rows: &Rows,
    operand: Operand<CudaStorage>,
    draws: DrawOperand<CudaStorage>,
) -> Result<CudaStorage> {
    let device = storage.device();
    // SAFETY: the kernel writes every token.
    let mut tokens = unsafe { alloc::<u32>(device, rows.batch)? };
    let out = Outputs::tokens(&mut tokens);
    launch_sample(storage, rows, &operand, &draws, out)?;
    Ok(CudaStorage::wrap_cuda_slice(tokens, device.clone()))
}

/// The tokens and their log-probabilities.
pub(super) fn sample_with_log_probs(
    storage: &CudaStorage,
    rows: &Rows,
    operand: Operand<CudaStorage>,
    draws: DrawOperand<CudaStorage>,
) -> Result<(CudaStorage, CudaStorage)> {
    let device = storage.device();
    // SAFETY: the kernel writes every token and every log-probability.
    let (mut tokens, mut log_probs) = unsafe {
        (
            alloc::<u32>(device, rows.batch)?,
            alloc::<f32>(device, rows.batch)?,
        )
    };
    let out = Outputs {
        log_probs: Some(&mut log_probs),
        ..Outputs::tokens(&mut tokens)
    };
    launch_sample(storage, rows, &operand, &draws, out)?;
    Ok((
        CudaStorage::wrap_cuda_slice(tokens, device.clone()),
        CudaStorage::wrap_cuda_slice(log_probs, device.clone()),
    ))
}

/// Draws with the counters, seed and step of each row, and advances their steps.
pub(super) fn sample_into(
    storage: &CudaStorage,
    rows: &Rows,
    params: (&Buffer<f32>, Mass),
    counters: &mut Buffer<i64>,
    (tokens, log_probs): (&mut Buffer<u32>, &mut Buffer<f32>),
    routes: Option<&mut Buffer<u32>>,
) -> Result<()> {
    if rows.batch == 0 {
        return Ok(());
    }
    let (kernel, teams) = kernel(&SAMPLE, storage.device(), storage.dtype(), rows)?;
    let stream = kernel.stream.clone();
    let mut addresses = Addresses::new(&stream);
    let request = addresses.request_packed(storage, rows, params, routes)?;
    let counters = addresses.written(&mut counters.slice);
    let draws = DrawSource {
        counters,
        counters_row: 2,
        counters_column: 1,
        ..DrawSource::default()
    };
    let outputs = SampleOutputs {
        tokens: addresses.written(&mut tokens.slice),
        log_probs: addresses.written(&mut log_probs.slice),
        advance: counters,
        ..SampleOutputs::default()
    };
    // SAFETY: as in `mask`; the buffers hold at least as many rows as the logits have, and a row's
    // step is written by one thread, after its team has read it.
    unsafe { kernel.launch(teams, [arg(&request), arg(&draws), arg(&outputs)]) }
}

/// Draws that the processor makes. A single row's goes along with the launch; a batch's are
/// uploaded.
fn with_draws<R>(
    device: &CudaDevice,
    draws: &[Draw],
    f: impl FnOnce(&DrawOperand<CudaStorage>) -> Result<R>,
) -> Result<R> {
    if let [one] = draws {
        return f(&DrawOperand::One(*one));
    }
    let (draws, layout) = sample::packed(draws);
    f(&DrawOperand::Rows(
        &device.storage_from_cpu_storage(&draws)?,
        &layout,
    ))
}

/// Tokens on the device; `u32::MAX` for a row that the processor refuses.
pub(super) fn sample_strict(
    storage: &CudaStorage,
    rows: &Rows,
    truncation: &Truncation,
    draws: &[Draw],
    strict: bool,
) -> Result<CudaStorage> {
    let device = storage.device();
    // SAFETY: the kernel writes every token.
    let mut tokens = unsafe { alloc::<u32>(device, rows.batch)? };
    let refused = if strict { NAN | INFINITY } else { NAN };
    with_draws(device, draws, |draws| {
        let operand = Operand::scalar("sample", rows, truncation)?;
        let out = Outputs {
            refused,
            ..Outputs::tokens(&mut tokens)
        };
        launch_sample(storage, rows, &operand, draws, out)
    })?;
    Ok(CudaStorage::wrap_cuda_slice(tokens, device.clone()))
}

/// Where tokens come back to the host: a buffer that a processor keeps for its device.
pub(super) struct Readback(Option<(CudaDevice, CudaSlice<u32>)>);

impl Readback {
    pub fn new() -> Self {
        Self(None)
    }

    pub fn sample(
        &mut self,
        storage: &CudaStorage,
        rows: &Rows,
        truncation: &Truncation,
        draws: &[Draw],
    ) -> Result<Vec<Drawn>> {
        if rows.batch == 0 {
            return Ok(vec![]);
        }
        let device = storage.device();
        let needed = 2 * rows.batch;
        let kept = self
            .0
            .take()
            .filter(|(of, buffer)| of.id() == device.id() && buffer.len() >= needed);
        let (_, buffer) = self.0.insert(match kept {
            Some(kept) => kept,
            // SAFETY: the kernel writes what is read back.
            None => (device.clone(), unsafe { alloc::<u32>(device, needed)? }),
        });
        with_draws(device, draws, |draws| {
            let operand = Operand::scalar("sample", rows, truncation)?;
            let out = Outputs {
                noted: true,
                ..Outputs::tokens(buffer)
            };
            launch_sample(storage, rows, &operand, draws, out)
        })?;
        let host = device.clone_dtoh(&buffer.slice(..needed))?;
        let (tokens, notes) = host.split_at(rows.batch);
        let drawn = tokens.iter().zip(notes).map(|(&token, note)| Drawn {
            token,
            has_nan: note & NAN != 0,
            has_infinity: note & INFINITY != 0,
        });
        Ok(drawn.collect())
    }
}

/// The repetition penalty on F32 logits `[V]`; `ids` are distinct and inside the vocabulary.
pub(super) fn penalise(logits: &Tensor, penalty: f32, ids: &[u32]) -> Result<Tensor> {
    let logits = logits.contiguous()?;
    let vocab = logits.elem_count();
    let (storage, layout) = logits.storage_and_layout();
    let Storage::Cuda(storage) = &*storage else {
        unreachable!("the caller has looked at the device")
    };
    let device = storage.device();
    let source = storage.as_cuda_slice::<f32>()?;
    let source = source.slice(layout.start_offset()..layout.start_offset() + vocab);
    // SAFETY: written by the copy.
    let mut out = unsafe { alloc::<f32>(device, vocab)? };
    device.memcpy_dtod(&source, &mut out)?;
    if !ids.is_empty() {
        let Kernel { function, stream } = REPEAT_PENALTY.kernel(device, "repeat_penalty", 0)?;
        let ids_on_device = device.clone_htod(ids)?;
        let count = ids.len() as u32;
        let mut launch = stream.launch_builder(&function);
        launch
            .arg(&mut out)
            .arg(&ids_on_device)
            .arg(&count)
            .arg(&penalty);
        // SAFETY: every id is below `vocab`, and none comes twice, so no two threads write the
        // same element.
        unsafe { launch.launch(LaunchConfig::for_num_elems(count)) }.w()?;
    }
    let out = CudaStorage::wrap_cuda_slice(out, device.clone());
    Ok(Tensor::from((Storage::Cuda(out), Shape::from(vocab))))
}
