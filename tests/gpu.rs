//! The ops and the drop-in on a CUDA device: against a stable sort in f64, against the CPU backend
//! bit by bit, and beside Candle's own processor.
#![cfg(feature = "cuda")]

mod common;

use candle_core::cuda_backend::cudarc::driver::sys;
use candle_core::cuda_backend::WrapErr;
use candle_core::{DType, Device, Result, Tensor};
use candle_topk::cuda::{preload, with_form, Form};
use candle_topk::sampling::{
    candidates_rows, mask, mask_into, mask_rows, sample_batch, sample_rows, CandidateBuffers, Mass,
    Routes, SampleBuffers, Truncation,
};
use common::cases::{self, Batch};
use common::{into, logits, processor, rng, Law, Oracle, Params, LAWS};
use half::{bf16, f16};
use rand::Rng;
use std::ops::Deref;
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::thread;
use std::time::Instant;

/// A handle of the CUDA device, with a stream of its own: what a thread reads back does not wait for
/// what others launch. Handles are used again, since each loads its kernels anew.
struct Gpu(Option<Device>);

/// Handles that no thread uses.
fn idle() -> MutexGuard<'static, Vec<Device>> {
    static IDLE: Mutex<Vec<Device>> = Mutex::new(vec![]);
    IDLE.lock().expect("no panic while it is held")
}

impl Deref for Gpu {
    type Target = Device;

    fn deref(&self) -> &Device {
        self.0.as_ref().expect("it is taken when it is dropped")
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        idle().extend(self.0.take());
    }
}

/// The device keeps what is freed: the tests allocate much, and giving memory back takes the driver
/// longer than all else.
fn gpu() -> Result<Gpu> {
    if let Some(device) = idle().pop() {
        return Ok(Gpu(Some(device)));
    }
    let device = Device::new_cuda_with_stream(0)?;
    let ordinal = device.as_cuda_device()?.cuda_stream().context().cu_device();
    let mut pool = std::ptr::null_mut();
    let mut threshold = u64::MAX;
    // SAFETY: the device is there, and the attribute is a 64-bit number.
    unsafe {
        sys::cuDeviceGetDefaultMemPool(&mut pool, ordinal)
            .result()
            .w()?;
        let attribute = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
        sys::cuMemPoolSetAttribute(pool, attribute, (&raw mut threshold).cast())
            .result()
            .w()?;
    }
    Ok(Gpu(Some(device)))
}

/// Runs a case for every item, some at a time, each thread with a handle of its own.
fn for_all<T: Sync>(items: &[T], case: impl Fn(&T, &Device) -> Result<()> + Sync) -> Result<()> {
    const THREADS: usize = 6;
    let next = AtomicUsize::new(0);
    let work = || -> Result<()> {
        let device = gpu()?;
        while let Some(item) = items.get(next.fetch_add(1, Ordering::Relaxed)) {
            case(item, &device)?;
        }
        Ok(())
    };
    thread::scope(|scope| {
        let threads: Vec<_> = items
            .iter()
            .take(THREADS)
            .map(|_| scope.spawn(work))
            .collect();
        let join = |thread: thread::ScopedJoinHandle<_>| {
            thread.join().unwrap_or_else(|e| resume_unwind(e))
        };
        threads.into_iter().try_for_each(join)
    })
}

/// Runs a case in each form of the kernels. `check_batch` does so by itself.
fn in_each_form(case: impl Fn(&Device) -> Result<()> + Sync) -> Result<()> {
    for_all(&Form::ALL, |&form, device| with_form(form, || case(device)))
}

/// What a long test covered, for `--show-output`.
struct Covered {
    since: Instant,
    rows: AtomicUsize,
}

impl Covered {
    fn start() -> Self {
        Self {
            since: Instant::now(),
            rows: AtomicUsize::new(0),
        }
    }

    fn add(&self, rows: usize) {
        self.rows.fetch_add(rows, Ordering::Relaxed);
    }
}

impl Drop for Covered {
    fn drop(&mut self) {
        let rows = self.rows.load(Ordering::Relaxed);
        let seconds = self.since.elapsed().as_secs_f64();
        println!("{rows} rows, each in every form: {seconds:.1} s");
    }
}

macro_rules! on_gpu {
    ($($name:ident $(: $($argument:expr),+)? => $case:expr;)*) => {
        $(#[test]
        #[ignore = "needs a CUDA GPU"]
        fn $name() -> Result<()> {
            in_each_form(|device| $case(device $($(, $argument)+)?))
        })*
    };
}

on_gpu! {
    views => cases::views;
    through_candle_traits => cases::through_candle_traits;
    candidates_beyond_capacity => cases::candidates_beyond_capacity;
    reported_elsewhere => cases::reported_elsewhere;
    frequencies: 262_144 => cases::frequencies;
    independence => cases::independence;
    device_parameters => cases::device_parameters;
    refusals => cases::refusals;
    greedy => cases::greedy;
    log_probs => into::log_probs::<f32>;
    log_probs_bf16 => into::log_probs::<bf16>;
    sample_buffers => into::sample_buffers::<f32>;
    sample_buffers_f16 => into::sample_buffers::<f16>;
    candidate_buffers => into::candidate_buffers::<f32>;
    candidate_buffers_bf16 => into::candidate_buffers::<bf16>;
    mask_into_tensors => into::mask_into_tensors::<f32>;
    mask_into_tensors_f16 => into::mask_into_tensors::<f16>;
    mask_into_tensors_bf16 => into::mask_into_tensors::<bf16>;
    into_refusals => into::into_refusals;
    same_answers_as_candle: 3 => processor::same_answers;
    arg_max => processor::arg_max;
    top_k_distributions: 1_000_000 => processor::top_k_distributions;
    processor_batches => processor::batches;
    processor_refusals => processor::refusals;
    processor_dtypes => processor::dtypes;
    processor_sample_f => processor::sample_f;
    repeat_penalty => processor::repeat_penalty;
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn every_law_at_every_width() -> Result<()> {
    let covered = Covered::start();
    // The widest first: they take longest.
    let widths = cases::WIDTHS.into_iter().rev();
    let cells: Vec<_> = widths
        .flat_map(|vocab| LAWS.map(|law| (law, vocab)))
        .collect();
    for_all(&cells, |&(law, vocab), device| {
        covered.add(cases::check_grid::<f32>(law, vocab, device)?);
        // Half precision in turns at the widest, to end in time.
        if vocab < 100_000 || law == Law::Normal {
            covered.add(cases::check_grid::<f16>(law, vocab, device)?);
        }
        if vocab < 100_000 || law == Law::Peaked {
            covered.add(cases::check_grid::<bf16>(law, vocab, device)?);
        }
        Ok(())
    })
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn mixed_batches() -> Result<()> {
    let device = gpu()?;
    cases::mixed_batches(&device)
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn widths_around_every_boundary() -> Result<()> {
    let covered = Covered::start();
    for_all(&cases::EDGES, |&vocab, device| {
        for law in [Law::Normal, Law::Ties] {
            covered.add(cases::check_grid::<f32>(law, vocab, device)?);
            covered.add(cases::check_grid::<bf16>(law, vocab, device)?);
        }
        Ok(())
    })
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn special_rows() -> Result<()> {
    let covered = Covered::start();
    let mut rows = vec![];
    for vocab in [128256, 32000, 5000, 111, 2, 1] {
        let count = cases::special_rows(vocab).len();
        rows.extend((0..count).map(|row| (vocab, row)));
    }
    for_all(&rows, |&(vocab, row), device| {
        covered.add(cases::check_special_row::<f32>(vocab, row, device)?);
        if [111, 32000].contains(&vocab) {
            covered.add(cases::check_special_row::<f16>(vocab, row, device)?);
            covered.add(cases::check_special_row::<bf16>(vocab, row, device)?);
        }
        Ok(())
    })
}

/// Fresh rows with fresh parameters: `rounds` batches of `rows`, of widths that `vocab` gives.
fn random_batches(
    rounds: usize,
    rows: usize,
    vocab: impl Fn(usize, &mut rand::rngs::StdRng) -> usize + Sync,
) -> Result<()> {
    let covered = Covered::start();
    let seed = rand::random::<u32>() as u64;
    println!("seed {seed}");
    let rounds: Vec<usize> = (0..rounds).collect();
    for_all(&rounds, |&round, device| {
        let mut rng = rng(seed << 16 | round as u64);
        let vocab = vocab(round, &mut rng);
        let mut batch = Batch {
            rows: vec![],
            params: vec![],
        };
        for _ in 0..rows {
            batch.rows.push(logits(
                LAWS[rng.random_range(0..LAWS.len())],
                vocab,
                &mut rng,
            ));
            batch.params.push(Params {
                k: [0, rng.random_range(1..=vocab), rng.random_range(1..200)]
                    [rng.random_range(0..3)],
                p: [1.0, rng.random_range(0.01..1.0)][rng.random_range(0..2)],
                min_p: [0.0, rng.random_range(0.0..0.2)][rng.random_range(0..2)],
                temperature: [1.0, rng.random_range(0.1..3.0)][rng.random_range(0..2)],
                mass: Mass::Joint,
            });
        }
        let mass = [Mass::Joint, Mass::Renormalized][round / 2 % 2];
        let what = format!("seed {seed}, round {round}");
        cases::check_batch::<f32>(&batch, mass, &Device::Cpu, &what)?;
        cases::check_batch::<f32>(&batch, mass, device, &what)?;
        covered.add(batch.rows.len());
        Ok(())
    })
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn random_rows() -> Result<()> {
    random_batches(40, 64, |round, rng| {
        [rng.random_range(1..3000), rng.random_range(8000..60000)][round % 2]
    })
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn hundred_thousand_random_rows() -> Result<()> {
    random_batches(100, 1000, |_, rng| rng.random_range(1..2500))
}

/// The same bits from two runs and from the CPU, for tokens of every law and route.
#[test]
#[ignore = "needs a CUDA GPU"]
fn tokens_equal_the_cpu() -> Result<()> {
    in_each_form(|device| {
        for (vocab, rows) in [(1000, 300), (32000, 100), (151936, 40)] {
            let mut rng = rng(vocab as u64);
            for law in LAWS {
                let flat: Vec<f32> = (0..rows)
                    .flat_map(|_| logits(law, vocab, &mut rng))
                    .collect();
                let on_cpu = Tensor::from_vec(flat, (rows, vocab), &Device::Cpu)?;
                let on_gpu = on_cpu.to_device(device)?;
                let seeds: Vec<i64> = (0..2 * rows).map(|_| rng.random()).collect();
                let seeds = Tensor::from_vec(seeds, (rows, 2), &Device::Cpu)?;
                let seeds_on_gpu = seeds.to_device(device)?;
                for truncation in [
                    Truncation::new(),
                    Truncation::new().with_top_k(50),
                    Truncation::new().with_top_p(0.9).with_temperature(0.8),
                    Truncation::new().with_top_k(vocab / 2).with_top_p(0.95),
                    Truncation::new().with_min_p(0.02).with_temperature(1.5),
                ] {
                    let tokens = |logits: &Tensor, seeds: &Tensor| -> Result<Vec<u32>> {
                        sample_batch(logits, truncation, seeds)?.to_vec1()
                    };
                    let got = tokens(&on_gpu, &seeds_on_gpu)?;
                    assert_eq!(got, tokens(&on_gpu, &seeds_on_gpu)?, "two runs");
                    assert_eq!(
                        got,
                        tokens(&on_cpu, &seeds)?,
                        "{law:?}, V {vocab}, {truncation:?}"
                    );
                }
            }
        }
        Ok(())
    })
}

/// The counters say which way a row went; both ops go the same.
#[test]
#[ignore = "needs a CUDA GPU"]
fn routes() -> Result<()> {
    for_all(&Form::ALL, |&form, device| {
        with_form(form, || routes_taken(device, form))
    })
}

fn routes_taken(device: &Device, form: Form) -> Result<()> {
    let of = |row: Vec<f32>, params: Params| -> Result<Routes> {
        let logits = Tensor::from_vec(row.clone(), row.len(), device)?;
        let mut tokens = SampleBuffers::new(1, device)?.with_routes()?;
        let mut sets = CandidateBuffers::new(1, 8, device)?.with_routes()?;
        tokens.set_params(&[params.truncation()])?;
        sets.set_params(&[params.truncation()])?;
        tokens.sample_into(&logits, params.mass)?;
        sets.candidates_into(&logits, params.mass)?;
        let routes = tokens.routes()?;
        assert_eq!(routes, sets.routes()?, "{params:?}");
        // Not summed up from launch to launch.
        tokens.sample_into(&logits, params.mass)?;
        assert_eq!(routes, tokens.routes()?, "{params:?}, again");
        Ok(routes[0])
    };
    let row = |law, vocab| logits(law, vocab, &mut rng(21));
    let none = Params::NONE;

    let peaked = of(row(Law::Peaked, 33000), Params { k: 50, ..none })?;
    assert!(peaked.hit() && !peaked.fallback(), "{peaked:?}");
    assert!(
        !peaked.no_truncation() && !peaked.second_pass(),
        "{peaked:?}"
    );
    assert!((50..=8192).contains(&peaked.gathered()), "{peaked:?}");
    assert!(peaked.passes() == 1 && peaked.steps() > 0, "{peaked:?}");

    let half = of(row(Law::Normal, 33000), Params { k: 16000, ..none })?;
    assert!(half.fallback() && !half.hit(), "{half:?}");
    // The pass that writes, or sums for a draw, gathers what is left. A cluster has the row on chip, and looks there.
    let looks = matches!(form, Form::Sm90) as u32;
    assert!(half.passes() == 1 + looks && half.steps() > 0, "{half:?}");

    // More candidates than fit: the mass of the whole row and a histogram, in one pass. For a cluster there is one more
    // on chip, for a bracket of all of the row.
    let flat = of(row(Law::Normal, 33000), Params { p: 0.9, ..none })?;
    assert!(
        flat.fallback() && flat.second_pass() && !flat.hit(),
        "{flat:?}"
    );
    assert_eq!(flat.passes(), 2 + 2 * looks, "{flat:?}");

    let all = of(row(Law::Normal, 33000), none)?;
    assert!(all.no_truncation() && !all.fallback(), "{all:?}");
    assert_eq!((all.passes(), all.steps()), (1, 0), "{all:?}");

    let greedy = Params {
        temperature: 0.0,
        ..none
    };
    let greedy = of(row(Law::Normal, 33000), greedy)?;
    assert!(!greedy.fallback() && !greedy.no_truncation(), "{greedy:?}");
    assert_eq!(greedy.passes(), 1, "{greedy:?}");

    let empty = of(vec![f32::NEG_INFINITY; 33000], Params { k: 50, ..none })?;
    assert!(!empty.hit() && !empty.fallback() && !empty.no_truncation());
    Ok(())
}

/// More than 2^31 elements: rows beyond them are read and written where they are.
#[test]
#[ignore = "needs a CUDA GPU"]
fn beyond_two_to_the_31_elements() -> Result<()> {
    in_each_form(|device| {
        let vocab = 151936;
        let rows = (1usize << 31) / vocab + 64;
        let all = Tensor::full(bf16::from_f32(-1.0), (rows, vocab), device)?.contiguous()?;
        let mut rng = rng(31);
        let probes = [0, 1, rows / 2, rows - 40, rows - 1];
        for (i, &at) in probes.iter().enumerate() {
            let row: Vec<bf16> = logits(Law::Peaked, vocab, &mut rng)
                .iter()
                .map(|&x| bf16::from_f32(x + i as f32))
                .collect();
            all.slice_set(&Tensor::from_vec(row, (1, vocab), device)?, 0, at)?;
        }
        let truncation = Truncation::new().with_top_k(50);
        let masked = mask(&all, truncation)?;
        let draws = Tensor::full(1u32 << 31, rows, device)?.contiguous()?;
        let tokens = sample_batch(&all, truncation, &draws)?.to_vec1::<u32>()?;
        for (at, token) in tokens.iter().enumerate() {
            let probe = probes.contains(&at);
            if !probe && at % 1000 != 7 {
                continue;
            }
            // A copy of the row alone: Candle reads back the whole storage of a view.
            let read = |from: &Tensor| -> Result<Vec<f32>> {
                let row = from.get(at)?.force_contiguous()?.to_vec1::<bf16>()?;
                Ok(row.iter().map(|x| x.to_f32()).collect())
            };
            let (row, got) = (read(&all)?, read(&masked)?);
            let kept: Vec<u32> = (0..vocab as u32)
                .filter(|&i| got[i as usize] > f32::NEG_INFINITY)
                .collect();
            let params = Params {
                k: 50,
                ..Params::NONE
            };
            Oracle::new(&row).check(&params, &kept, &format!("row {at}"));
            assert!(kept.contains(token), "row {at}");
            if !probe {
                assert_eq!(kept, (0..50).collect::<Vec<_>>());
            }
        }
        Ok(())
    })
}

/// Two streams at once, each with its own device handle.
#[test]
#[ignore = "needs a CUDA GPU"]
fn two_streams_at_once() -> Result<()> {
    let work = |seed: u64| -> Result<()> {
        let device = Device::new_cuda_with_stream(0)?;
        for round in 0..20 {
            let batch = Batch {
                rows: (0..8)
                    .map(|i| logits(LAWS[i % 5], 20000, &mut rng(seed + round + i as u64)))
                    .collect(),
                params: (0..8)
                    .map(|i| Params {
                        k: 10 + i,
                        p: 0.9,
                        ..Params::NONE
                    })
                    .collect(),
            };
            cases::check_batch::<f32>(&batch, Mass::Joint, &device, "two streams")?;
        }
        Ok(())
    };
    let other = std::thread::spawn(move || work(1));
    work(1000)?;
    other.join().expect("no panic")
}

/// A batch masked, the ids of its sets, and its tokens.
type Outcome = (Vec<Vec<f32>>, Vec<Vec<u32>>, Vec<u32>);

/// Small shapes that take every route of every kernel: what `compute-sanitizer` runs, one form at a
/// time.
fn small_shapes(device: &Device) -> Result<()> {
    let few = Params {
        k: 40,
        p: 0.5,
        min_p: 0.01,
        temperature: 0.7,
        ..Params::NONE
    };
    let params = [
        Params::NONE,
        Params {
            k: 50,
            ..Params::NONE
        },
        Params { k: 4300, ..few },
        Params {
            p: 0.9,
            ..Params::NONE
        },
        few,
        Params {
            temperature: 0.0,
            ..Params::NONE
        },
    ];
    let params = params.map(|p| p.truncation());
    let mut rng = rng(8);
    let compare = |on_cpu: &Tensor, params: &[Truncation], what: &str| -> Result<()> {
        let draws = Tensor::from_iter(0..2 * params.len() as i64, &Device::Cpu)?;
        let draws = draws.reshape((params.len(), 2))?;
        for mass in [Mass::Renormalized, Mass::Joint] {
            let run = |device: &Device| -> Result<Outcome> {
                let logits = on_cpu.to_device(device)?;
                let packed = Truncation::rows(params, device)?;
                let masked = mask_rows(&logits, &packed, mass)?.to_dtype(DType::F32)?;
                let set = candidates_rows(&logits, &packed, mass, 100)?;
                let tokens = sample_rows(&logits, &draws.to_device(device)?, &packed, mass)?;
                Ok((masked.to_vec2()?, set.ids.to_vec2()?, tokens.to_vec1()?))
            };
            assert_eq!(run(device)?, run(&Device::Cpu)?, "{what}");
        }
        Ok(())
    };
    for (law, vocab, dtype) in [
        (Law::Normal, 9, DType::F32),
        (Law::Peaked, 1000, DType::F16),
        (Law::Normal, 9001, DType::F32),
        (Law::Ties, 9001, DType::BF16),
    ] {
        let rows: Vec<f32> = (0..params.len())
            .flat_map(|_| logits(law, vocab, &mut rng))
            .collect();
        let on_cpu = Tensor::from_vec(rows, (params.len(), vocab), &Device::Cpu)?;
        let on_cpu = on_cpu.to_dtype(dtype)?;
        let what = format!("{law:?}, V {vocab}");
        compare(&on_cpu, &params, &what)?;
        let logits = on_cpu.to_device(device)?;
        let mut tokens = SampleBuffers::new(params.len(), device)?.with_routes()?;
        tokens.set_params(&params)?;
        tokens.sample_into(&logits, Mass::Joint)?;
        assert_eq!(tokens.steps()?, vec![1; params.len()]);
        mask_into(&logits, &logits.zeros_like()?, params[4])?;
    }
    // More of one value than fit on chip: histograms down to a single key, and its positions.
    let equal = Tensor::full(1.5f32, (2, 20001), &Device::Cpu)?;
    let limits = [
        Truncation::new().with_top_k(9000),
        Truncation::new().with_top_p(0.5),
    ];
    compare(&equal.contiguous()?, &limits, "all equal")?;
    processor::repeat_penalty(device)
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn sanitize_one_block() -> Result<()> {
    let device = gpu()?;
    with_form(Form::Sm80, || small_shapes(&device))
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn sanitize_wide_block() -> Result<()> {
    let device = gpu()?;
    with_form(Form::Sm80Wide, || small_shapes(&device))
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn sanitize_cluster() -> Result<()> {
    let device = gpu()?;
    with_form(Form::Sm90, || small_shapes(&device))
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn preloads() -> Result<()> {
    let device = gpu()?;
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        preload(&device, dtype)?;
    }
    let error = preload(&device, DType::U32).unwrap_err();
    assert!(error.to_string().contains("U32"), "{error}");
    assert!(preload(&Device::Cpu, DType::F32).is_err());
    Ok(())
}
