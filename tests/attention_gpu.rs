//! The attention ops on a CUDA device, against sums in f64, against the CPU and against themselves.
#![cfg(feature = "cuda")]

mod common;

use candle_core::cuda_backend::cudarc::driver::sys::{
    CUgraphInstantiate_flags, CUstreamCaptureMode,
};
use candle_core::cuda_backend::WrapErr;
use candle_core::{DType, Device, Result, Tensor};
use candle_topk::attention::{
    index_topk, index_topk_into, indexer_scores, IndexBuffers, IndexKeys, Visible, Workspace,
};
use candle_topk::cuda::{preload_attention, with_form, Form as Compiled};
use candle_topk::selection::{Order, TopK};
use common::attention::{self as cases, bits, distance, ints, numbers, tensor, Form};
use common::dsa::{self, MODELS};
use common::{normal, rng};
use rand::Rng;
use std::sync::{Mutex, MutexGuard};

/// One CUDA device for all tests, one test at a time: each handle of its own would load all kernels
/// anew, and no other thread may synchronise the context while one captures.
fn gpu() -> Result<(Device, MutexGuard<'static, Option<Device>>)> {
    static DEVICE: Mutex<Option<Device>> = Mutex::new(None);
    let mut device = DEVICE
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner());
    if device.is_none() {
        let made = Device::new_cuda_with_stream(0)?;
        // SAFETY: one test at a time, and this thread, uses one stream.
        unsafe { made.as_cuda_device()?.disable_event_tracking() };
        *device = Some(made);
    }
    Ok((device.clone().expect("just made"), device))
}

/// In the form that the device takes by itself, and in the one that every device runs.
fn in_both(case: impl Fn(&Device) -> Result<()>) -> Result<()> {
    let (device, _guard) = gpu()?;
    case(&device)?;
    with_form(Compiled::Sm80, || case(&device))
}

const DTYPES: [DType; 4] = [DType::F32, DType::F16, DType::BF16, DType::F8E4M3];

// ---------------------------------------------------------------- indexer scores

#[test]
#[ignore = "needs a CUDA GPU"]
fn scores() -> Result<()> {
    let heads = [1, 2, 3, 7, 8, 16, 17, 31, 32, 33, 64, 100, 128];
    in_both(|device| {
        for dtype in DTYPES {
            cases::scores_against_double(dtype, &heads, device)?;
        }
        Ok(())
    })
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn scores_repeat() -> Result<()> {
    in_both(|device| {
        DTYPES
            .iter()
            .try_for_each(|&dtype| cases::scores_repeat(dtype, device))
    })
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn scores_of_caches() -> Result<()> {
    in_both(|device| {
        DTYPES
            .iter()
            .try_for_each(|&dtype| cases::scores_of_caches(dtype, device))
    })
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn scores_of_packed_sequences() -> Result<()> {
    in_both(cases::scores_of_packed_sequences)
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn scores_of_views() -> Result<()> {
    in_both(cases::scores_of_views)
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn scores_of_special_keys() -> Result<()> {
    in_both(cases::scores_of_special_keys)
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn scores_of_many_rows() -> Result<()> {
    in_both(cases::scores_of_many_rows)
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn score_refusals() -> Result<()> {
    let (device, _guard) = gpu()?;
    cases::score_refusals(&device)?;
    let q = Tensor::zeros((1, 129, 32), DType::BF16, &device)?;
    let keys = IndexKeys::packed(&Tensor::zeros((3, 32), DType::BF16, &device)?);
    let weights = Tensor::zeros((1, 129), DType::F32, &device)?;
    let refused = indexer_scores(&q, &keys, &weights, &Visible::all());
    cases::refused(refused, &["129 heads of dimension 32", "at most 128"]);
    let q = Tensor::zeros((1, 2, 130), DType::BF16, &device)?;
    let keys = IndexKeys::packed(&Tensor::zeros((3, 130), DType::BF16, &device)?);
    let weights = Tensor::zeros((1, 2), DType::F32, &device)?;
    let refused = indexer_scores(&q, &keys, &weights, &Visible::all());
    cases::refused(refused, &["dimension 130", "at most 128"]);
    Ok(())
}

/// Every head count, on one shape that takes several units, and several items a block.
#[test]
#[ignore = "needs a CUDA GPU"]
fn every_head_count() -> Result<()> {
    in_both(|device| {
        for heads in 1..=128 {
            agrees_with_the_cpu(11, 130, heads, [128, 64, 96, 20][heads % 4], device)?;
        }
        Ok(())
    })
}

/// Scores of all dtypes are those of the CPU up to rounding, of dimensions of any size.
fn agrees_with_the_cpu(
    rows: usize,
    length: usize,
    heads: usize,
    dim: usize,
    device: &Device,
) -> Result<()> {
    let rng = &mut rng((heads * 1000 + dim) as u64);
    let mut normals = |n: usize| -> Vec<f32> { (0..n).map(|_| normal(rng)).collect() };
    let (q, k) = (normals(rows * heads * dim), normals(length * dim));
    let (weights, scales) = (normals(rows * heads), normals(length));
    let scales: Vec<f32> = scales.iter().map(|x| x.abs()).collect();
    let ends: Vec<i64> = (0..rows)
        .map(|row| (row * 13 % (length + 9)) as i64)
        .collect();
    for dtype in DTYPES {
        let run = |device: &Device| -> Result<Vec<f64>> {
            let q = tensor(&q, &[rows, heads, dim], dtype, device)?;
            let keys = IndexKeys::packed(&tensor(&k, &[length, dim], dtype, device)?);
            let keys = keys.with_scales(&tensor(&scales, &[length], DType::F32, device)?);
            let weights = tensor(&weights, &[rows, heads], DType::F32, device)?;
            let visible = Visible::between(None, Some(&ints(&ends, 1, device)?));
            numbers(&indexer_scores(&q, &keys, &weights, &visible)?)
        };
        let distance = distance(&run(device)?, &run(&Device::Cpu)?)?;
        assert!(
            distance < 5e-6,
            "{dtype:?}, {heads} heads x {dim}: {distance:e}"
        );
    }
    Ok(())
}

/// A row has the same bits in every kernel that could serve it: alone, with a few more of its sequence,
/// in a long prefill, by tiles of the copy engine and from rows that it cannot read.
#[test]
#[ignore = "needs a CUDA GPU"]
fn bits_do_not_depend_on_the_batch() -> Result<()> {
    let (device, _guard) = gpu()?;
    let rng = &mut rng(71);
    let (rows, length) = (40, 1000);
    for dtype in [DType::BF16, DType::F8E4M3] {
        for (heads, dim) in [(64, 128), (32, 128), (9, 128), (128, 128), (64, 64)] {
            let mut normals = |n: usize| -> Vec<f32> { (0..n).map(|_| normal(rng)).collect() };
            let q = tensor(
                &normals(rows * heads * dim),
                &[rows, heads, dim],
                dtype,
                &device,
            )?;
            let weights = tensor(&normals(rows * heads), &[rows, heads], DType::F32, &device)?;
            let k = normals(length * dim);
            let keys = tensor(&k, &[length, dim], dtype, &device)?;
            // The same keys an odd number of elements apart.
            let spread: Vec<f32> = k
                .chunks(dim)
                .flat_map(|key| key.iter().copied().chain([f32::NAN]))
                .collect();
            let spread = tensor(&spread, &[length, dim + 1], dtype, &device)?.narrow(1, 0, dim)?;
            let all = Visible::all();
            let keys = IndexKeys::packed(&keys);
            let whole = bits(&indexer_scores(&q, &keys, &weights, &all)?)?;
            let apart = indexer_scores(&q, &IndexKeys::packed(&spread), &weights, &all)?;
            assert_eq!(bits(&apart)?, whole, "{dtype:?}, {heads} x {dim}, spread");
            for (first, count) in [(0, 1), (39, 1), (5, 2), (7, 3), (3, 4), (10, 9)] {
                let part = |t: &Tensor| t.narrow(0, first, count);
                let scores = indexer_scores(&part(&q)?, &keys, &part(&weights)?, &all)?;
                assert_eq!(
                    bits(&scores)?,
                    whole[first * length..(first + count) * length],
                    "{dtype:?}, {heads} x {dim}, rows {first} and {count}"
                );
            }
        }
    }
    Ok(())
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn index_topk_is_exact() -> Result<()> {
    in_both(|device| {
        DTYPES
            .iter()
            .try_for_each(|&dtype| cases::index_topk_is_exact(dtype, device))
    })
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn index_topk_of_one_sequence() -> Result<()> {
    in_both(cases::index_topk_of_one_sequence)
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn index_topk_of_caches() -> Result<()> {
    in_both(cases::index_topk_of_caches)
}

/// Packed and ragged bounds are those of the CPU, of lengths that make sense and of others.
#[test]
#[ignore = "needs a CUDA GPU"]
fn bounds() -> Result<()> {
    let (device, _guard) = gpu()?;
    let rng = &mut rng(81);
    for case in 0..60 {
        let sequences = rng.random_range(1..200);
        let sane = case % 3 > 0;
        let mut cumulative = |most: i64| -> Vec<i64> {
            let mut sum = 0;
            let mut all = vec![0];
            for _ in 0..sequences {
                sum += match sane {
                    true => rng.random_range(0..most),
                    false => rng.random_range(-most..most),
                };
                all.push(sum);
            }
            all
        };
        let (queries, keys) = (cumulative(9), cumulative(40));
        let offsets = cumulative(5)[1..].to_vec();
        let run = |device: &Device| -> Result<_> {
            let queries = ints(&queries, case, device)?;
            let keys = ints(&keys, case + 1, device)?;
            let offsets = ints(&offsets, case + 2, device)?;
            let offsets = (case % 2 == 0).then_some(&offsets);
            let visible = Visible::packed(&queries, &keys, offsets);
            let (starts, ends) = visible.bounds(777, device)?;
            Ok((
                starts.expect("packed").to_vec1::<i64>()?,
                ends.expect("packed").to_vec1::<i64>()?,
            ))
        };
        assert_eq!(run(&device)?, run(&Device::Cpu)?, "case {case}");
        let lengths: Vec<i64> = (0..sequences).map(|i| i as i64 * 3 - 9).collect();
        let run = |device: &Device| -> Result<_> {
            let visible = Visible::decode(&ints(&lengths, case, device)?);
            let ends = visible.bounds(3 * sequences, device)?.1;
            ends.expect("decoding").to_vec1::<i64>()
        };
        assert_eq!(run(&device)?, run(&Device::Cpu)?, "case {case}");
    }
    Ok(())
}

/// Scores and selection in one captured graph, replayed with lengths that change in between: growing,
/// none at all, padding rows, and all of the cache.
#[test]
#[ignore = "needs a CUDA GPU"]
fn graph_replays() -> Result<()> {
    let (device, _guard) = gpu()?;
    for dtype in [DType::BF16, DType::F8E4M3, DType::F32] {
        preload_attention(&device, dtype)?;
        for n in [1, 2] {
            replay(dtype, n, &device)?;
        }
    }
    Ok(())
}

fn replay(dtype: DType, n: usize, device: &Device) -> Result<()> {
    let rng = &mut rng(91);
    let (sequences, length, heads, dim, k) = (6, 5000, 32, 128, 256);
    let rows = sequences * n;
    let mut normals = |n: usize| -> Vec<f32> { (0..n).map(|_| normal(rng)).collect() };
    let q = tensor(
        &normals(rows * heads * dim),
        &[rows, heads, dim],
        dtype,
        device,
    )?;
    let weights = tensor(&normals(rows * heads), &[rows, heads], DType::F32, device)?;
    let keys = tensor(
        &normals(sequences * length * dim),
        &[sequences, length, dim],
        dtype,
        device,
    )?;
    let keys = IndexKeys::batched(&keys);
    let lengths = Tensor::zeros(sequences, DType::I64, device)?;
    let decode = Visible::decode(&lengths);
    let ends = Tensor::zeros(rows, DType::I64, device)?;
    let visible = Visible::between(None, Some(&ends));
    let top = TopK::new(k)?.order(Order::ByPosition);
    let mut out = IndexBuffers::new(rows, length, k, device)?;
    let mut workspace = Workspace::new(device)?;
    let stream = device.as_cuda_device()?.cuda_stream();
    let mut step = || -> Result<()> {
        decode.bounds_into(None, &ends)?;
        index_topk_into(
            &q,
            &keys,
            &weights,
            &visible,
            &top,
            &mut out,
            &mut workspace,
        )
    };
    step()?;
    device.synchronize()?;
    stream
        .begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED)
        .w()?;
    let captured = step();
    let graph = stream.end_capture(CUgraphInstantiate_flags(0)).w()?;
    captured?;
    let graph = graph.expect("a graph was captured");
    for given in [
        [5000i64, 1, 0, 300, 256, 4999],
        [0; 6],
        [-1, 5000, -1, 5000, 2, 77],
        [5000; 6],
        [9000, 3, 255, 257, 1, 0],
    ] {
        lengths.slice_set(&ints(&given, 0, device)?, 0, 0)?;
        graph.launch().w()?;
        let chosen = out.chosen().selection()?;
        let fresh = Visible::decode(&ints(&given, 1, device)?);
        let wanted = index_topk(&q, &keys, &weights, &fresh, &top, 1 << 22)?;
        assert_eq!(
            chosen.positions.to_vec2::<u32>()?,
            wanted.positions.to_vec2::<u32>()?,
            "{dtype:?}, n {n}, {given:?}"
        );
        assert_eq!(
            chosen.counts.to_vec1::<u32>()?,
            wanted.counts.to_vec1::<u32>()?
        );
    }
    Ok(())
}

// ---------------------------------------------------------------- attention over positions

#[test]
#[ignore = "needs a CUDA GPU"]
fn attention_forms() -> Result<()> {
    in_both(|device| {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            cases::attention_forms(dtype, &[0, 1, 2, 3, 4, 5, 6, 7], device)?;
        }
        Ok(())
    })
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn attention_of_tiles() -> Result<()> {
    in_both(|device| {
        cases::attention_of_tiles(DType::BF16, device)?;
        cases::attention_of_tiles(DType::F16, device)
    })
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn attention_head_counts() -> Result<()> {
    in_both(cases::attention_head_counts)
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn attention_of_caches() -> Result<()> {
    in_both(|device| {
        cases::attention_of_caches(Form::MLA, device)?;
        cases::attention_of_caches(Form::GQA, device)
    })
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn block_lists_of_caches() -> Result<()> {
    in_both(|device| {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            cases::block_lists_of_caches(dtype, 64, device)?;
            cases::block_lists_of_caches(dtype, 128, device)?;
        }
        Ok(())
    })
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn attention_of_nothing() -> Result<()> {
    in_both(cases::attention_of_nothing)
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn attention_of_infinities() -> Result<()> {
    in_both(cases::attention_of_infinities)
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn attention_in_any_order() -> Result<()> {
    in_both(cases::attention_in_any_order)
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn attention_of_views() -> Result<()> {
    in_both(cases::attention_of_views)
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn attention_of_many_rows() -> Result<()> {
    in_both(cases::attention_of_many_rows)
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn attention_refusals() -> Result<()> {
    cases::attention_refusals(&gpu()?.0)
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn steps_into_buffers() -> Result<()> {
    in_both(cases::steps_into_buffers)
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn beyond_two_to_the_31() -> Result<()> {
    cases::beyond_two_to_the_31(&gpu()?.0)
}

// ---------------------------------------------------------------- small shapes

fn small_scores(dtype: DType, device: &Device) -> Result<()> {
    cases::scores_against_double(dtype, &[3, 64], device)?;
    cases::index_topk_is_exact(dtype, device)
}

macro_rules! sanitize {
    ($($name:ident, $sm80:ident: $case:expr, $dtype:ident;)*) => {
        $(#[test]
        #[ignore = "needs a CUDA GPU"]
        fn $name() -> Result<()> {
            let (device, _guard) = gpu()?;
            $case(DType::$dtype, &device)
        }

        #[test]
        #[ignore = "needs a CUDA GPU"]
        fn $sm80() -> Result<()> {
            let (device, _guard) = gpu()?;
            with_form(Compiled::Sm80, || $case(DType::$dtype, &device))
        })*
    };
}

// Small shapes for every kernel and every form of the cache: what `compute-sanitizer` runs.
sanitize! {
    sanitize_scores_f32, sanitize_scores_f32_sm80: small_scores, F32;
    sanitize_scores_bf16, sanitize_scores_bf16_sm80: small_scores, BF16;
    sanitize_scores_fp8, sanitize_scores_fp8_sm80: small_scores, F8E4M3;
    sanitize_caches_f32, sanitize_caches_f32_sm80: cases::scores_of_caches, F32;
    sanitize_caches_bf16, sanitize_caches_bf16_sm80: cases::scores_of_caches, BF16;
    sanitize_caches_fp8, sanitize_caches_fp8_sm80: cases::scores_of_caches, F8E4M3;
    sanitize_attention_f32, sanitize_attention_f32_sm80: cases::attention_of_every_kernel, F32;
    sanitize_attention_f16, sanitize_attention_f16_sm80: cases::attention_of_every_kernel, F16;
    sanitize_attention_bf16, sanitize_attention_bf16_sm80: cases::attention_of_every_kernel, BF16;
}

/// What small shapes take clusters for, by single blocks.
#[test]
#[ignore = "needs a CUDA GPU"]
fn sanitize_attention_of_single_blocks() -> Result<()> {
    let (device, _guard) = gpu()?;
    with_form(Compiled::Sm80Wide, || {
        cases::attention_of_every_kernel(DType::BF16, &device)
    })
}

// ---------------------------------------------------------------- the layer

#[test]
#[ignore = "needs a CUDA GPU"]
fn layer_matches_transformers() -> Result<()> {
    let (device, _guard) = gpu()?;
    for name in MODELS {
        dsa::matches_transformers(name, &device)?;
        dsa::bf16_matches_transformers(name, &device)?;
        dsa::layouts_differ(name, &device)?;
    }
    Ok(())
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn layers_share_positions() -> Result<()> {
    dsa::shares_positions(&gpu()?.0)
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn layer_batches() -> Result<()> {
    let (device, _guard) = gpu()?;
    for name in MODELS {
        dsa::chunks_are_the_whole(name, &device)?;
        dsa::ragged_batches(name, &device)?;
        dsa::packed_batches(name, &device)?;
        dsa::fp8_index_keys(name, &device)?;
    }
    dsa::fp8_weights(&device)
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn layer_graphs() -> Result<()> {
    let (device, _guard) = gpu()?;
    for name in MODELS {
        for dtype in [DType::F32, DType::BF16] {
            dsa::decode_graphs(name, dtype, &device)?;
        }
    }
    dsa::decodes_on_device(&device)
}
