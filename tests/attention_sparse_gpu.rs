//! Attention over positions on a CUDA device: against sums in f64, in both forms.
#![cfg(feature = "cuda")]

mod common;

use candle_core::cuda_backend::cudarc::driver::sys::{
    CUgraphInstantiate_flags, CUstreamCaptureMode,
};
use candle_core::cuda_backend::WrapErr;
use candle_core::{DType, Device, Result, Tensor};
use candle_topk::attention::{KeyValues, SparseAttention, Values, Visible, Workspace};
use candle_topk::cuda::{preload_attention, with_form, Form as Kernels};
use common::attention::{self as cases, Attended, Extras, Form};
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

/// Runs `f` with the kernels that the device has by default, and with those for any device.
fn in_both_forms(f: impl Fn() -> Result<()>) -> Result<()> {
    f()?;
    with_form(Kernels::Sm80, f)
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn forms() -> Result<()> {
    let (device, _guard) = gpu()?;
    in_both_forms(|| {
        cases::attention_forms(DType::F32, &[0, 1, 2, 3, 4, 5, 6, 7], &device)?;
        cases::attention_forms(DType::BF16, &[0, 1, 2, 3, 4, 5, 6, 7], &device)?;
        cases::attention_forms(DType::F16, &[0, 7], &device)
    })
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn head_counts() -> Result<()> {
    let (device, _guard) = gpu()?;
    cases::attention_head_counts(&device)?;
    // Those of multi-head latent attention.
    in_both_forms(|| {
        for heads in [1, 16, 17, 32, 33, 64, 65, 100, 128] {
            for key_dim in [512, 576] {
                let form = Form {
                    heads,
                    key_dim,
                    rows: 3,
                    length: 700,
                    width: 600,
                    ..Form::MLA
                };
                let extras = Extras {
                    counts: heads % 2 == 0,
                    bounds: heads % 3 == 0,
                    sink: heads > 1,
                };
                let case = Attended::random(form, extras, heads as u64, &device)?;
                let (out, lse) = case.run(heads, &device)?;
                case.check(&out, &lse, &format!("{heads} heads of {key_dim}"))?;
            }
        }
        Ok(())
    })
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn caches() -> Result<()> {
    let (device, _guard) = gpu()?;
    in_both_forms(|| {
        cases::attention_of_caches(Form::MLA, &device)?;
        let heads = 128;
        cases::attention_of_caches(Form { heads, ..Form::MLA }, &device)?;
        cases::attention_of_caches(Form::GQA, &device)?;
        let dtype = DType::F32;
        cases::attention_of_caches(Form { dtype, ..Form::GQA }, &device)
    })
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn special_rows() -> Result<()> {
    let (device, _guard) = gpu()?;
    cases::attention_of_nothing(&device)?;
    cases::attention_of_infinities(&device)?;
    cases::attention_in_any_order(&device)?;
    cases::attention_of_views(&device)?;
    cases::attention_of_many_rows(&device)?;
    cases::attention_refusals(&device)
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn weights() -> Result<()> {
    let (device, _guard) = gpu()?;
    in_both_forms(|| {
        for dtype in [DType::BF16, DType::F16] {
            cases::attention_weights(dtype, 40, &[128, 256, 384, 640, 1280, 2560], &device)?;
        }
        Ok(())
    })
}

/// Sizes that have no kernel of their own, odd ones among them.
#[test]
#[ignore = "needs a CUDA GPU"]
fn other_sizes() -> Result<()> {
    let (device, _guard) = gpu()?;
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        for (i, (key_dim, value_dim)) in [
            (1, 1),
            (7, 13),
            (40, 40),
            (192, 128),
            (100, 36),
            (576, 512),
            (300, 260),
            (600, 520),
            (64, 1100),
        ]
        .into_iter()
        .enumerate()
        {
            let form = Form {
                key_dim,
                value_dim: Some(value_dim),
                heads: 20,
                kv_heads: [1, 5][i % 2],
                width: [64, 700][i % 2],
                length: 800,
                dtype,
                ..Form::GQA
            };
            let extras = Extras {
                counts: true,
                bounds: true,
                sink: true,
            };
            let case = Attended::random(form, extras, i as u64, &device)?;
            let (out, lse) = case.run(i, &device)?;
            case.check(&out, &lse, &format!("{form:?}"))?;
        }
    }
    Ok(())
}

/// A row gives the same bits alone and among others, so whether its segments have blocks of their own
/// or share one, twenty times; also with keys that lie at odd addresses.
#[test]
#[ignore = "needs a CUDA GPU"]
fn batches() -> Result<()> {
    let (device, _guard) = gpu()?;
    in_both_forms(|| {
        for (heads, kv_heads, key_dim, value_dim, dtype) in [
            (128, 1, 576, None, DType::BF16),
            (64, 1, 512, None, DType::F16),
            (20, 1, 576, None, DType::BF16),
            (8, 2, 128, Some(128), DType::BF16),
            (6, 6, 96, Some(96), DType::F16),
            (8, 2, 64, Some(64), DType::F32),
        ] {
            let form = Form {
                rows: 700,
                length: 3000,
                heads,
                kv_heads,
                key_dim,
                value_dim,
                width: 1900,
                per_head: kv_heads > 1,
                block: 1,
                dtype,
            };
            let few = Form { rows: 3, ..form };
            let case = Attended::random(few, Extras::default(), 3, &device)?;
            let (out, lse) = case.run(0, &device)?;
            case.check(&out, &lse, &format!("{few:?}"))?;
            let bits = |t: &Tensor| cases::bits(t);
            let (out, lse) = (bits(&out)?, bits(&lse)?);
            for _ in 0..20 {
                let (again, lse_again) = case.run(0, &device)?;
                assert!(bits(&again)? == out && bits(&lse_again)? == lse, "{few:?}");
            }
            let repeat = |t: &Tensor| Tensor::cat(&vec![t; 240], 0);
            let attend = |q: &Tensor, k: &Tensor, v: Values, positions: &Tensor| {
                let op = SparseAttention::new(case.scale);
                op.forward(q, &KeyValues::packed(k, v), positions)
            };
            let positions = case.positions(&device)?;
            let many = attend(
                &repeat(&case.q)?,
                &case.k,
                case.values(),
                &repeat(&positions)?,
            )?;
            let (many_out, many_lse) = (bits(&many.out)?, bits(&many.lse)?);
            for (i, part) in many_out.chunks(out.len()).enumerate() {
                assert!(part == out, "{form:?}, batch {i}");
            }
            assert!(many_lse.chunks(lse.len()).all(|part| part == lse));

            // Keys, values and queries one element off.
            let moved = |t: &Tensor| -> Result<Tensor> {
                let wide = t.pad_with_zeros(2, 1, 1)?;
                wide.narrow(2, 1, t.dims()[2])
            };
            let values = match case.values() {
                Values::Tensor(values) => Values::Tensor(moved(&values)?),
                of_keys => of_keys,
            };
            let odd = attend(&moved(&case.q)?, &moved(&case.k)?, values, &positions)?;
            assert!(bits(&odd.out)? == out && bits(&odd.lse)? == lse, "{form:?}");
        }
        Ok(())
    })
}

/// Latent attention gives the same bits by clusters as by single blocks, whatever the rows see.
#[test]
#[ignore = "needs a CUDA GPU"]
fn clusters() -> Result<()> {
    let (device, _guard) = gpu()?;
    let single = |f: &dyn Fn() -> Result<()>| with_form(Kernels::Sm80Wide, f);
    let clustered = |f: &dyn Fn() -> Result<()>| with_form(Kernels::Sm90, f);
    let bits = |t: &Tensor| cases::bits(t);
    for (i, (rows, heads, key_dim, length, width, block, dtype)) in [
        (1, 128, 576, 5000, 4096, 1, DType::BF16),
        (4, 128, 576, 3000, 2048, 1, DType::BF16),
        (5, 64, 576, 600, 512, 1, DType::BF16),
        (8, 100, 512, 900, 513, 1, DType::BF16),
        (4, 33, 576, 300, 129, 1, DType::F16),
        (9, 128, 512, 2500, 1900, 1, DType::F16),
        (4, 65, 576, 90, 64, 1, DType::BF16),
        (3, 128, 576, 40, 1, 1, DType::BF16),
        (2, 128, 576, 40, 95, 1, DType::F16),
        (4, 64, 576, 1000, 11, 64, DType::BF16),
        (4, 64, 512, 1000, 5, 128, DType::BF16),
        (1, 64, 576, 20_000, 16_384, 1, DType::BF16),
    ]
    .into_iter()
    .enumerate()
    {
        let form = Form {
            rows,
            length,
            heads,
            key_dim,
            width,
            block,
            dtype,
            ..Form::MLA
        };
        for extra in [false, true] {
            let extras = Extras {
                counts: extra,
                bounds: extra,
                sink: extra,
            };
            let case = Attended::random(form, extras, 70 + i as u64, &device)?;
            let run = || case.run(i, &device);
            let (out, lse) = with_form(Kernels::Sm80Wide, run)?;
            case.check(&out, &lse, &format!("{form:?} {extras:?}"))?;
            let (out, lse) = (bits(&out)?, bits(&lse)?);
            for _ in 0..5 {
                let (again, lse_again) = with_form(Kernels::Sm90, run)?;
                assert!(bits(&again)? == out, "{form:?} {extras:?}");
                assert!(bits(&lse_again)? == lse, "{form:?} {extras:?}");
            }
            // Queries and keys one element off.
            let moved = |t: &Tensor| -> Result<Tensor> {
                let wide = t.pad_with_zeros(2, 1, 1)?;
                wide.narrow(2, 1, t.dims()[2])
            };
            if !extra {
                let op = SparseAttention::new(case.scale).with_block_size(block);
                let positions = case.positions(&device)?;
                let k = moved(&case.k)?;
                let kv = KeyValues::packed(&k, case.values());
                let odd = with_form(Kernels::Sm90, || {
                    op.forward(&moved(&case.q)?, &kv, &positions)
                })?;
                assert!(bits(&odd.out)? == out && bits(&odd.lse)? == lse, "{form:?}");
            }
        }
    }
    for heads in [64, 128] {
        let run = || cases::attention_of_caches(Form { heads, ..Form::MLA }, &device);
        single(&run)?;
        clustered(&run)?;
    }
    for dtype in [DType::BF16, DType::F16] {
        let run = || cases::attention_weights(dtype, 40, &[128, 512, 640, 1280], &device);
        single(&run)?;
        clustered(&run)?;
    }
    Ok(())
}

/// Decoding in a captured graph, whose lengths, counts and positions change between replays.
#[test]
#[ignore = "needs a CUDA GPU"]
fn graph_replays() -> Result<()> {
    let (device, _guard) = gpu()?;
    let stream = device.as_cuda_device()?.cuda_stream();
    preload_attention(&device, DType::BF16)?;
    let mut rng = common::rng(5);
    for (rows, heads, kv_heads, key_dim) in [(6, 128, 1, 576), (2, 128, 1, 576), (6, 8, 2, 128)] {
        let (length, width) = (2048, 1500);
        let tensor = |dims: &[usize]| Tensor::randn(0f32, 1., dims, &device)?.to_dtype(DType::BF16);
        let q = tensor(&[rows, heads, key_dim])?;
        let k = tensor(&[rows, length, kv_heads, key_dim])?;
        let kv = match kv_heads {
            1 => KeyValues::batched(&k, Values::OfKeys(512)),
            _ => KeyValues::batched(&k, &k.copy()?),
        };
        let value_dim = if kv_heads == 1 { 512 } else { key_dim };
        let positions = Tensor::zeros((rows, width), DType::U32, &device)?;
        let ends = Tensor::zeros(rows, DType::I64, &device)?;
        let counts = Tensor::zeros(rows, DType::U32, &device)?;
        let out = Tensor::full(7f32, (rows, heads, value_dim), &device)?.to_dtype(DType::BF16)?;
        let lse = Tensor::full(7f32, (rows, heads), &device)?;
        let mut workspace = Workspace::new(&device)?;
        let op = SparseAttention::new(0.05)
            .with_visible(&Visible::between(None, Some(&ends)))
            .with_counts(&counts);
        op.forward_into(&q, &kv, &positions, [&out, &lse], &mut workspace)?;
        device.synchronize()?;
        stream
            .begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED)
            .w()?;
        op.forward_into(&q, &kv, &positions, [&out, &lse], &mut workspace)?;
        let graph = stream.end_capture(CUgraphInstantiate_flags(0)).w()?;
        let graph = graph.expect("a graph was captured");
        for round in 0..12 {
            let mut lists = Vec::new();
            for _ in 0..rows {
                let mut all: Vec<u32> = (0..length as u32).collect();
                for i in 0..width {
                    all.swap(i, rng.random_range(i..length));
                }
                lists.extend_from_slice(&all[..width]);
            }
            // Padding rows have no length.
            let lengths: Vec<i64> = (0..rows)
                .map(|row| match (row + round) % 3 {
                    0 => 0,
                    _ => rng.random_range(-1..length as i64 + 9),
                })
                .collect();
            let some: Vec<u32> = (0..rows)
                .map(|_| rng.random_range(0..width as u32 + 9))
                .collect();
            positions.slice_set(&Tensor::from_vec(lists, (rows, width), &device)?, 0, 0)?;
            ends.slice_set(&Tensor::from_vec(lengths, rows, &device)?, 0, 0)?;
            counts.slice_set(&Tensor::from_vec(some, rows, &device)?, 0, 0)?;
            graph.launch().w()?;
            let wanted = op.forward(&q, &kv, &positions)?;
            assert!(cases::bits(&out)? == cases::bits(&wanted.out)?);
            assert!(cases::bits(&lse)? == cases::bits(&wanted.lse)?);
        }
    }
    Ok(())
}
