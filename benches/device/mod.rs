//! What the benches on a device share: captured launches, timed by events with a known state of L2,
//! and the least time in which the same bytes can be read.

#![allow(dead_code)] // Each bench uses its part.

use crate::common::machine::Machine;
use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::sys::{
    CUdevice_attribute_enum, CUevent_flags, CUgraphInstantiate_flags, CUstreamCaptureMode,
};
use candle_core::cuda_backend::cudarc::driver::{
    CudaFunction, CudaGraph, CudaSlice, CudaStream, DevicePtr, DevicePtrMut, LaunchConfig,
    PushKernelArg,
};
use candle_core::cuda_backend::{CudaStorageSlice, WrapErr};
use candle_core::{
    bail, CpuStorage, CudaDevice, CudaStorage, DType, Device, InplaceOp1, Layout, Result, Storage,
    Tensor,
};
use serde_json::json;
use std::sync::Arc;

mod ptx {
    include!(concat!(env!("OUT_DIR"), "/bench_ptx.rs"));
}

/// Several times the L2 of any device.
pub const EVICTED_BYTES: usize = 256 << 20;
/// How long the host may take to queue a replay and its events.
const QUEUE_NS: u64 = 20_000;
const WARM_UP: usize = 3;

/// What is given, or else the default.
pub fn or<T: Clone>(given: &[T], default: &[T]) -> Vec<T> {
    if given.is_empty() { default } else { given }.to_vec()
}

/// The device, its stream, and the kernels of `kernels/bench`.
pub struct Gpu {
    pub device: Device,
    pub cuda: CudaDevice,
    pub stream: Arc<CudaStream>,
    multiprocessors: u32,
    pub machine: Machine,
    /// Read to clear L2, and written by the copy floor.
    scratch: std::cell::RefCell<CudaSlice<u8>>,
    pub replays: usize,
    pub seed: u64,
}

/// How a floor is launched.
#[derive(Clone, Copy)]
pub struct FloorShape {
    blocks_each: u32,
    threads: u32,
    in_flight: usize,
}

const fn shape(blocks_each: u32, threads: u32, in_flight: usize) -> FloorShape {
    FloorShape {
        blocks_each,
        threads,
        in_flight,
    }
}

pub const FLOOR_SHAPES: [FloorShape; 6] = [
    shape(1, 1024, 4),
    shape(2, 1024, 8),
    shape(2, 512, 1),
    shape(4, 512, 4),
    shape(4, 256, 8),
    shape(8, 256, 4),
];

impl Gpu {
    pub fn new(scratch: usize, replays: usize, seed: u64) -> Result<Self> {
        // A stream of its own: the default one cannot be captured.
        let device = Device::new_cuda_with_stream(0)?;
        let cuda = device.as_cuda_device()?.clone();
        let stream = cuda.cuda_stream();
        // SAFETY: all work goes to the one stream. Events on it would break its captures.
        unsafe { cuda.disable_event_tracking() };
        let multiprocessors = stream
            .context()
            .attribute(CUdevice_attribute_enum::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)
            .w()?;
        Ok(Self {
            machine: Machine::of(&device),
            scratch: cuda.alloc_zeros::<u8>(scratch.max(EVICTED_BYTES))?.into(),
            multiprocessors: multiprocessors as u32,
            device,
            cuda,
            stream,
            replays,
            seed,
        })
    }

    pub fn kernel(&self, name: &str) -> Result<CudaFunction> {
        let family = name.split('_').next().unwrap_or(name);
        let (module, ptx) = match family {
            "normal" | "peaks" => ("candle-topk/bench/laws", ptx::LAWS),
            "scores" => ("candle-topk/bench/scores", ptx::SCORES),
            _ => ("candle-topk/bench/floors", ptx::FLOORS),
        };
        Ok(self
            .cuda
            .get_or_load_custom_func(name, module, ptx)?
            .into_cuda_function())
    }

    pub fn config(&self, blocks_each: u32, threads: u32) -> LaunchConfig {
        LaunchConfig {
            grid_dim: (self.multiprocessors * blocks_each, 1, 1),
            block_dim: (threads, 1, 1),
            shared_mem_bytes: 0,
        }
    }

    /// Overwrites a tensor whose bytes are whole words with NaN, which no op gives.
    pub fn poison(&self, tensor: &Tensor) -> Result<()> {
        let fill = self.kernel("fill")?;
        let words = (tensor.elem_count() * tensor.dtype().size_in_bytes() / 4) as u64;
        write(tensor, |address| {
            let mut launch = self.stream.launch_builder(&fill);
            launch.arg(&address).arg(&words).arg(&0x7fd17fd1u32);
            // SAFETY: the tensor has so many words.
            unsafe { launch.launch(self.config(8, 256)) }.w()?;
            Ok(())
        })
    }

    /// One pass over `bytes` bytes from `address` on, and with `copy` a copy of them.
    fn pass(&self, copy: bool, shape: FloorShape, address: u64, bytes: usize) -> Result<()> {
        let what = if copy { "copy" } else { "read" };
        let kernel = self.kernel(&format!("{what}_{}", shape.in_flight))?;
        let mut scratch = self.scratch.borrow_mut();
        let (target, _guard) = scratch.device_ptr_mut(&self.stream);
        let vectors = (bytes / 16) as u64;
        let mut launch = self.stream.launch_builder(&kernel);
        launch.arg(&address).arg(&vectors).arg(&target);
        // SAFETY: the source has so many vectors, and `scratch` is no smaller.
        unsafe { launch.launch(self.config(shape.blocks_each, shape.threads)) }.w()?;
        Ok(())
    }

    /// Leaves nothing in L2 but a buffer that nothing else reads, and the stream busy for as long as
    /// the host needs to queue what comes next.
    fn evict(&self) -> Result<()> {
        let address = self.scratch.borrow().device_ptr(&self.stream).0;
        self.pass(false, FLOOR_SHAPES[3], address, EVICTED_BYTES)?;
        let busy = self.kernel("busy")?;
        let mut launch = self.stream.launch_builder(&busy);
        launch.arg(&QUEUE_NS);
        let config = LaunchConfig {
            grid_dim: (1, 1, 1),
            block_dim: (1, 1, 1),
            shared_mem_bytes: 0,
        };
        // SAFETY: touches no memory.
        unsafe { launch.launch(config) }.w()?;
        Ok(())
    }

    pub fn capture(&self, launch: impl FnOnce() -> Result<()>) -> Result<CudaGraph> {
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        self.stream.begin_capture(mode).w()?;
        let launched = launch();
        // Ended whatever came of it: the stream is of no use otherwise.
        let graph = self.stream.end_capture(CUgraphInstantiate_flags(0)).w();
        launched?;
        match graph? {
            Some(graph) => {
                graph.upload().w()?;
                Ok(graph)
            }
            None => bail!("the capture gave no graph"),
        }
    }

    /// Times of replays in us, ascending. Before each, `restore` and then the decoy run.
    pub fn time(
        &self,
        graph: &CudaGraph,
        decoy: Option<&CudaGraph>,
        replays: usize,
        mut restore: impl FnMut() -> Result<()>,
    ) -> Result<Vec<f64>> {
        let event = || {
            let context = self.stream.context();
            context.new_event(Some(CUevent_flags::CU_EVENT_DEFAULT)).w()
        };
        let mut events = vec![];
        for _ in 0..WARM_UP + replays {
            let (start, end) = (event()?, event()?);
            restore()?;
            self.evict()?;
            if let Some(decoy) = decoy {
                decoy.launch().w()?;
            }
            start.record(&self.stream).w()?;
            graph.launch().w()?;
            end.record(&self.stream).w()?;
            events.push((start, end));
        }
        let mut times = vec![];
        for (start, end) in &events[WARM_UP..] {
            times.push(start.elapsed_ms(end).w()? as f64 * 1e3);
        }
        times.sort_by(f64::total_cmp);
        Ok(times)
    }

    /// The median of the fastest launch shape, over the first `bytes` bytes of a dense tensor: read,
    /// or copied.
    pub fn floor(&self, copy: bool, tensor: &Tensor, bytes: usize) -> Result<f64> {
        let address = read(tensor, &self.stream)?;
        let time = |shape, replays| -> Result<f64> {
            let graph = self.capture(|| self.pass(copy, shape, address, bytes))?;
            Ok(median(&self.time(&graph, None, replays, || Ok(()))?))
        };
        // Passes over GBs vary little: a few say which shape is the fastest.
        let long = bytes >= 1 << 30;
        let mut least = (f64::INFINITY, FLOOR_SHAPES[0]);
        for shape in FLOOR_SHAPES {
            let took = time(shape, if long { 3 } else { 20 })?;
            if took < least.0 {
                least = (took, shape);
            }
        }
        if long {
            time(least.1, 20)
        } else {
            Ok(least.0)
        }
    }

    /// The keys that every line has.
    pub fn line(&self, op: &str, times: &[f64]) -> serde_json::Map<String, serde_json::Value> {
        let line = json!({
            "op": op, "us": us(median(times)), "us_min": us(times[0]),
            "us_max": us(times[times.len() - 1]), "seed": self.seed, "gpu": self.machine.gpu,
            "rev": self.machine.rev, "date": self.machine.date,
        });
        line.as_object().cloned().unwrap_or_default()
    }

    /// The line of a replay that does nothing: a part of every other time.
    pub fn empty_graph(&self) -> Result<serde_json::Value> {
        let empty = self.capture(|| Ok(()))?;
        let times = self.time(&empty, None, self.replays, || Ok(()))?;
        Ok(serde_json::Value::Object(self.line("empty_graph", &times)))
    }
}

pub fn median(ascending: &[f64]) -> f64 {
    let n = ascending.len();
    (ascending[(n - 1) / 2] + ascending[n / 2]) / 2.0
}

/// To three decimals: the events' clock has no more.
pub fn us(time: f64) -> f64 {
    (time * 1e3).round() / 1e3
}

/// Calls `launch` with the address of a dense tensor that it may write.
pub fn write(tensor: &Tensor, launch: impl Fn(u64) -> Result<()>) -> Result<()> {
    struct Write<F>(F);
    impl<F: Fn(u64) -> Result<()>> InplaceOp1 for Write<F> {
        fn name(&self) -> &'static str {
            "write"
        }
        fn cpu_fwd(&self, _: &mut CpuStorage, _: &Layout) -> Result<()> {
            bail!("write: the tensor is on the CPU, a CUDA one is needed")
        }
        fn cuda_fwd(&self, storage: &mut CudaStorage, layout: &Layout) -> Result<()> {
            let stream = storage.device().cuda_stream();
            let size = storage.dtype().size_in_bytes();
            let (address, _guard) = match &mut storage.slice {
                CudaStorageSlice::F32(slice) => slice.device_ptr_mut(&stream),
                CudaStorageSlice::F16(slice) => slice.device_ptr_mut(&stream),
                CudaStorageSlice::BF16(slice) => slice.device_ptr_mut(&stream),
                CudaStorageSlice::U32(slice) => slice.device_ptr_mut(&stream),
                CudaStorageSlice::F8E4M3(slice) => slice.device_ptr_mut(&stream),
                _ => bail!(
                    "write: the tensor is {:?}, F32, F16, BF16, F8E4M3 or U32 is needed",
                    storage.dtype()
                ),
            };
            (self.0)(address + (layout.start_offset() * size) as u64)
        }
    }
    tensor.inplace_op1(&Write(launch))
}

/// The address of a dense tensor without an offset, to be read for as long as the tensor lives.
pub fn read(tensor: &Tensor, stream: &CudaStream) -> Result<u64> {
    let (storage, _) = tensor.storage_and_layout();
    let Storage::Cuda(storage) = &*storage else {
        bail!("read: the tensor is on the CPU, a CUDA one is needed")
    };
    Ok(match &storage.slice {
        CudaStorageSlice::F32(slice) => slice.device_ptr(stream).0,
        CudaStorageSlice::F16(slice) => slice.device_ptr(stream).0,
        CudaStorageSlice::BF16(slice) => slice.device_ptr(stream).0,
        CudaStorageSlice::U32(slice) => slice.device_ptr(stream).0,
        _ => bail!(
            "read: the tensor is {:?}, F32, F16, BF16 or U32 is needed",
            storage.dtype()
        ),
    })
}

/// A row, as f32 on the host.
pub fn host_row(tensor: &Tensor, row: usize) -> Result<Vec<f32>> {
    // A copy of its own first: a view would bring the whole batch along.
    let row = tensor.get(row)?.force_contiguous()?;
    let row = row.to_device(&Device::Cpu)?;
    row.to_dtype(DType::F32)?.to_vec1()
}
