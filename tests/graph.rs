//! CUDA-graph capture and replay of what allocates nothing. A program of its own: while a stream is
//! captured, no other thread may synchronise its context, and making a device does.
#![cfg(feature = "cuda")]

mod common;

use candle_core::cuda_backend::cudarc::driver::sys::{
    CUgraphInstantiate_flags, CUstreamCaptureMode,
};
use candle_core::cuda_backend::WrapErr;
use candle_core::{DType, Device, Result, Tensor};
use candle_topk::cuda::{preload, with_form, Form};
use candle_topk::sampling::{
    candidates_rows, mask, mask_into, mask_rows, mask_rows_into, sample_rows_with_log_probs,
    CandidateBuffers, MaskRows, Mass, SampleBuffers, Truncation,
};
use common::{into, logits, rng, LAWS};
use rand::Rng;

/// One capture of every form that allocates nothing, 1,000 replays. Between them logits, parameters
/// and requests change in device memory, the steps advance in the kernel, and every replay gives
/// what the CPU does.
#[test]
#[ignore = "needs a CUDA GPU"]
fn graph_replays() -> Result<()> {
    for form in Form::ALL {
        let device = Device::new_cuda_with_stream(0)?;
        let cuda = device.as_cuda_device()?;
        // SAFETY: this thread uses one stream and no other device handle, so nothing is ordered by
        // events.
        unsafe { cuda.disable_event_tracking() };
        preload(&device, DType::F32)?;
        with_form(form, || replay_graph(&device, 9001, 1000))?;
        with_form(form, || replay_graph(&device, 128_256, 20))?;
    }
    Ok(())
}

fn replay_graph(device: &Device, vocab: usize, replays: usize) -> Result<()> {
    const BATCH: usize = 4;
    const CAPACITY: usize = 64;
    const POOL: usize = 10;
    let cpu = &Device::Cpu;
    let stream = device.as_cuda_device()?.cuda_stream();
    let mut rng = rng(vocab as u64);
    let mass = Mass::Renormalized;
    let first = Truncation::new().with_top_k(vocab / 3);
    let choices = into::choices(vocab).map(|params| params.truncation());

    // Rows that take turns in the logits, each replaced by a fresh one now and then.
    let mut pool: Vec<Vec<f32>> = (0..POOL)
        .map(|i| logits(LAWS[i % LAWS.len()], vocab, &mut rng))
        .collect();
    let flat: Vec<f32> = pool.concat();
    let on_device = Tensor::from_vec(flat, (POOL, vocab), device)?;
    let mut rows = [0, 1, 2, 3];
    let logits_at = on_device.narrow(0, 0, BATCH)?.copy()?;
    let mut limits = [choices[0]; BATCH];
    let limits_at = Truncation::rows(&limits, device)?;
    let mut requests = [(5i64, 0i64), (5, 1 << 40), (-7, i64::MAX - 100), (8, 8)];
    let mut tokens = SampleBuffers::new(BATCH, device)?.with_routes()?;
    let mut sets = CandidateBuffers::new(BATCH, CAPACITY, device)?.with_routes()?;
    tokens.set_requests(&requests)?;
    let masked = logits_at.zeros_like()?;
    let twice = logits_at.zeros_like()?;

    device.synchronize()?;
    stream
        .begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED)
        .w()?;
    tokens.sample_into(&logits_at, mass)?;
    sets.candidates_into(&logits_at, mass)?;
    mask_rows_into(&logits_at, &masked, &limits_at, mass)?;
    mask_into(&logits_at, &twice, first)?;
    twice.inplace_op2(&limits_at, &MaskRows::new(mass))?;
    // What would not survive a replay is refused.
    for refused in [
        tokens.set_params(&limits),
        tokens.set_request(0, 1, 1),
        tokens.tokens().map(drop),
        sets.candidates().map(drop),
        SampleBuffers::new(1, device).map(drop),
    ] {
        let message = refused.expect_err("refused").to_string();
        assert!(message.contains("capturing a CUDA graph"), "{message}");
    }
    let graph = stream.end_capture(CUgraphInstantiate_flags(0)).w()?;
    let graph = graph.expect("a graph was captured");

    for replay in 0..replays {
        if replay % 5 == 4 {
            let at = rng.random_range(0..POOL);
            let law = LAWS[rng.random_range(0..LAWS.len())];
            pool[at] = logits(law, vocab, &mut rng);
            let fresh = Tensor::from_slice(&pool[at], (1, vocab), device)?;
            on_device.slice_set(&fresh, 0, at)?;
        }
        for (b, row) in rows.iter_mut().enumerate() {
            if rng.random_bool(0.7) {
                *row = rng.random_range(0..POOL);
            }
            logits_at.slice_set(&on_device.narrow(0, *row, 1)?, 0, b)?;
            if rng.random_bool(0.4) {
                limits[b] = choices[rng.random_range(0..choices.len())];
                tokens.set_params_row(b, limits[b])?;
                sets.set_params_row(b, limits[b])?;
            }
            if rng.random_bool(0.05) {
                requests[b] = (rng.random(), rng.random());
                tokens.set_request(b, requests[b].0, requests[b].1)?;
            }
        }
        limits_at.slice_set(&Truncation::rows(&limits, device)?, 0, 0)?;
        graph.launch().w()?;

        let what = format!("V {vocab}, replay {replay}, rows {rows:?}, {limits:?}");
        let flat: Vec<f32> = rows.iter().flat_map(|&row| pool[row].clone()).collect();
        let source = Tensor::from_vec(flat, (BATCH, vocab), cpu)?;
        let packed = Truncation::rows(&limits, cpu)?;
        let draws: Vec<i64> = requests.iter().flat_map(|r| [r.0, r.1]).collect();
        let draws = Tensor::from_vec(draws, (BATCH, 2), cpu)?;
        let (want, want_log_probs) = sample_rows_with_log_probs(&source, &draws, &packed, mass)?;
        assert_eq!(tokens.tokens()?, want.to_vec1::<u32>()?, "{what}");
        let want = want_log_probs.to_vec1::<f32>()?;
        into::assert_one_ulp(&tokens.log_probs()?, &want, &what);
        for request in &mut requests {
            request.1 = request.1.wrapping_add(1);
        }
        assert_eq!(tokens.steps()?, requests.map(|r| r.1), "{what}");

        let want = candidates_rows(&source, &packed, mass, CAPACITY)?;
        let got = sets.candidates()?;
        let (ids, counts) = (got.ids.to_vec2::<u32>()?, got.counts.to_vec1::<u32>()?);
        assert_eq!(ids, want.ids.to_vec2::<u32>()?, "{what}");
        assert_eq!(counts, want.counts.to_vec1::<u32>()?, "{what}");
        let got = got.log_probs.flatten_all()?.to_vec1::<f32>()?;
        let want = want.log_probs.flatten_all()?.to_vec1::<f32>()?;
        into::assert_one_ulp(&got, &want, &what);

        let bits = |masked: &Tensor| -> Result<Vec<u32>> {
            let masked = masked.flatten_all()?.to_vec1::<f32>()?;
            Ok(masked.into_iter().map(f32::to_bits).collect())
        };
        assert!(
            bits(&masked)? == bits(&mask_rows(&source, &packed, mass)?)?,
            "{what}: mask"
        );
        let want = mask_rows(&mask(&source, first)?, &packed, mass)?;
        assert!(bits(&twice)? == bits(&want)?, "{what}: mask in place");
    }
    Ok(())
}
