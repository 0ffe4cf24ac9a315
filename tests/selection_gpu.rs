//! Ragged top-K selection on a CUDA device, in every mapping, against an oracle that compares floats.
#![cfg(feature = "cuda")]

mod common;

use candle_core::cuda_backend::cudarc::driver::sys::{
    CUgraphInstantiate_flags, CUstreamCaptureMode,
};
use candle_core::cuda_backend::WrapErr;
use candle_core::{DType, Device, Result, Tensor};
use candle_topk::cuda::preload;
use candle_topk::selection::{
    Bounds, Mapping, Order, Overrides, Route, SelectionBuffers, TopK, View, Workspace,
};
use common::rng;
use common::selection::{self as cases, Batch, Got, Law};
use half::{bf16, f16};
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
        // SAFETY: one test at a time, and this thread, uses one stream; the two that use others
        // synchronise in between.
        unsafe { made.as_cuda_device()?.disable_event_tracking() };
        *device = Some(made);
    }
    Ok((device.clone().expect("just made"), device))
}

fn forced(mapping: Mapping) -> Overrides {
    Overrides {
        mapping: Some(mapping),
        ..Overrides::default()
    }
}

const MAPPINGS: [Mapping; 15] = [
    Mapping::Block,
    Mapping::RowLocal,
    Mapping::Held,
    Mapping::Split(2),
    Mapping::Split(4),
    Mapping::Split(8),
    Mapping::Cluster(2),
    Mapping::Cluster(4),
    Mapping::Cluster(8),
    Mapping::Cluster(16),
    Mapping::Exact(1),
    Mapping::Exact(2),
    Mapping::Exact(4),
    Mapping::Exact(8),
    Mapping::Exact(16),
];

#[test]
#[ignore = "needs a CUDA GPU"]
fn laws() -> Result<()> {
    let (device, _guard) = gpu()?;
    for n in [9, 5000, 16_384, 40_001] {
        // One block holds no longer ones.
        let alone = [Mapping::Exact(1), Mapping::Held];
        let fits = |mapping: &Mapping| !alone.contains(mapping) || n <= 16_384;
        for mapping in MAPPINGS.into_iter().filter(fits) {
            cases::laws::<f32>(n, &[7, 2048], forced(mapping), &device)?;
        }
        in_each_dtype!(laws, n, &[1, 64, 512, 4096], Overrides::default(), &device)?;
    }
    for mapping in [
        Mapping::Block,
        Mapping::Held,
        Mapping::Split(4),
        Mapping::Cluster(8),
        Mapping::Exact(4),
    ] {
        cases::laws::<bf16>(40_001, &[2048], forced(mapping), &device)?;
        cases::laws::<f16>(40_001, &[512], forced(mapping), &device)?;
    }
    Ok(())
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn long_rows() -> Result<()> {
    let (device, _guard) = gpu()?;
    for mapping in [
        Mapping::Block,
        Mapping::Split(8),
        Mapping::Cluster(2),
        Mapping::Cluster(16),
        Mapping::Exact(16),
    ] {
        let mut rng = rng(5);
        for law in [
            Law::Normal,
            Law::Ties,
            Law::Sink,
            Law::Equal,
            Law::Ascending,
            Law::Special,
        ] {
            // A cluster holds no longer ones.
            let n = match mapping {
                Mapping::Exact(_) => 500_003,
                _ => (1 << 20) + 3,
            };
            let batch = Batch::new(law, n, vec![(0, n as i64), (1, n as i64 - 1)], &mut rng);
            let top = TopK::new(2048)?
                .order(Order::ByValue)
                .with_overrides(forced(mapping));
            let got = cases::run::<f32>(&batch, top, &device, (n, 0), DType::I64)?;
            cases::check::<f32>(
                &batch,
                2048,
                Order::ByValue,
                &got,
                &format!("{law:?}, {mapping:?}"),
            );
        }
    }
    Ok(())
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn lengths() -> Result<()> {
    let (device, _guard) = gpu()?;
    let edges = [
        2, 31, 33, 2047, 4095, 4097, 6143, 6144, 6145, 8191, 8192, 8193, 12_289,
    ];
    for k in [1, 7, 64, 2048, 4096] {
        for mapping in MAPPINGS {
            cases::lengths::<f32>(&edges, k, forced(mapping), &device)?;
        }
        in_each_dtype!(lengths, &edges, k, Overrides::default(), &device)?;
    }
    let long = [16_383, 32_769, 65_535, 65_537, 131_072];
    for mapping in [
        Mapping::Block,
        Mapping::Split(4),
        Mapping::Cluster(4),
        Mapping::Cluster(16),
        Mapping::Exact(4),
        Mapping::Exact(16),
    ] {
        cases::lengths::<f32>(&long, 2048, forced(mapping), &device)?;
        cases::lengths::<bf16>(&long, 512, forced(mapping), &device)?;
    }
    Ok(())
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn through_candle_traits() -> Result<()> {
    cases::through_candle_traits(&gpu()?.0)
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn buffers() -> Result<()> {
    let (device, _guard) = gpu()?;
    in_each_dtype!(buffers, &device)
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn reported_elsewhere() -> Result<()> {
    cases::reported_elsewhere(&gpu()?.0)
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn refusals() -> Result<()> {
    cases::refusals(&gpu()?.0)
}

/// Every setting of the proposal gives the same sets.
#[test]
#[ignore = "needs a CUDA GPU"]
fn ablations() -> Result<()> {
    let (device, _guard) = gpu()?;
    for stride in [1, 2, 8, 16, 64, 128, 256] {
        for view in [View::Jittered, View::FixedStride] {
            for mapping in [
                Mapping::Block,
                Mapping::RowLocal,
                Mapping::Held,
                Mapping::Split(2),
                Mapping::Cluster(4),
            ] {
                let overrides = Overrides {
                    mapping: Some(mapping),
                    stride: Some(stride),
                    margin: Some([1.0, 1.5, 4.0][stride as usize % 3]),
                    band: Some(stride % 16 != 0),
                    view: Some(view),
                };
                let mut rng = rng(stride as u64);
                for law in [
                    Law::Normal,
                    Law::Ties,
                    Law::Alias,
                    Law::AliasLow,
                    Law::LowBits,
                ] {
                    let batch = Batch::new(
                        law,
                        15_000,
                        vec![(0, 15_000), (0, 9000), (3, 14_999)],
                        &mut rng,
                    );
                    let top = TopK::new(512)?.with_overrides(overrides);
                    let got = cases::run::<f32>(&batch, top, &device, (15_000, 0), DType::U32)?;
                    cases::check::<f32>(
                        &batch,
                        512,
                        Order::Unordered,
                        &got,
                        &format!("{law:?}, {overrides:?}"),
                    );
                }
            }
        }
    }
    Ok(())
}

/// A batch that every row of takes one route, and what it is.
fn expect_route(
    batch: &Batch,
    top: TopK,
    device: &Device,
    route: Route,
    what: &str,
) -> Result<Vec<u32>> {
    let (got, routes) = cases::routes_of::<f32>(batch, top, device)?;
    cases::check::<f32>(batch, top.k(), Order::Unordered, &got, what);
    for (row, counted) in routes.iter().enumerate() {
        assert_eq!(counted.route, route, "{what}, row {row}: {counted:?}");
    }
    Ok(routes.iter().map(|r| r.raised).collect())
}

/// Rows that force every route, in every mapping, and are counted as such.
#[test]
#[ignore = "needs a CUDA GPU"]
fn routes() -> Result<()> {
    let (device, _guard) = gpu()?;
    let n = 65_536;
    let mut rng = rng(21);
    for mapping in [
        Mapping::Block,
        Mapping::Split(4),
        Mapping::Cluster(4),
        Mapping::Cluster(16),
    ] {
        let fixed = Overrides {
            mapping: Some(mapping),
            stride: Some(64),
            view: Some(View::FixedStride),
            ..Overrides::default()
        };
        let top = TopK::new(2048)?;
        let what = format!("{mapping:?}");
        let full = vec![(0, n as i64); 4];
        // The law that the sample is made for.
        let batch = Batch::new(Law::Normal, n, full.clone(), &mut rng);
        let raised = expect_route(
            &batch,
            top.with_overrides(forced(mapping)),
            &device,
            Route::Primary,
            &what,
        )?;
        assert_eq!(raised, [0; 4], "{what}");
        // A short row.
        let batch = Batch::new(Law::Normal, n, vec![(0, 5000), (0, 2049)], &mut rng);
        expect_route(
            &batch,
            top.with_overrides(forced(mapping)),
            &device,
            Route::Direct,
            &what,
        )?;
        // What the sample sees lies high, and all else low: nothing but the sampled scores reaches the
        // primary cutoff.
        let sampled = |row: usize, i: usize| i % 64 == (row * 17 + 13) % 64;
        let mut batch = Batch::new(Law::Normal, n, full.clone(), &mut rng);
        for (r, row) in batch.rows.iter_mut().enumerate() {
            for (i, x) in row.iter_mut().enumerate() {
                *x += if sampled(r, i) { 100.0 } else { 0.0 };
            }
        }
        expect_route(
            &batch,
            top.with_overrides(fixed),
            &device,
            Route::Recovered,
            &what,
        )?;
        let no_band = Overrides {
            band: Some(false),
            ..fixed
        };
        expect_route(
            &batch,
            top.with_overrides(no_band),
            &device,
            Route::Recovered,
            &what,
        )?;
        // The jittered view has no such period.
        expect_route(
            &batch,
            top.with_overrides(forced(mapping)),
            &device,
            Route::Primary,
            &what,
        )?;
        // What the sample sees lies low: all else reaches the cutoff, and the list is cut down.
        let mut batch = Batch::new(Law::Normal, n, full.clone(), &mut rng);
        for (r, row) in batch.rows.iter_mut().enumerate() {
            for (i, x) in row.iter_mut().enumerate() {
                *x += if sampled(r, i) { 0.0 } else { 100.0 };
            }
        }
        let raised = expect_route(
            &batch,
            top.with_overrides(fixed),
            &device,
            Route::Primary,
            &what,
        )?;
        assert!(raised.iter().all(|&n| n > 0), "{what}: {raised:?}");
        // Just short of K above the cutoff that the sample suggests, and the rest a little below it: an
        // aim of exactly K misses in half of all rows, and the band is enough.
        let even = Overrides {
            margin: Some(1.0),
            ..fixed
        };
        let mut batch = Batch::new(Law::Uniform, n, full.clone(), &mut rng);
        for (r, row) in batch.rows.iter_mut().enumerate() {
            for (i, x) in row.iter_mut().enumerate() {
                *x = if sampled(r, i) { *x } else { *x * 0.999 };
            }
        }
        let (got, routes) = cases::routes_of::<f32>(&batch, top.with_overrides(even), &device)?;
        cases::check::<f32>(&batch, 2048, Order::Unordered, &got, &what);
        let reached = routes
            .iter()
            .filter(|r| r.route != Route::Primary && r.route != Route::Direct);
        for counted in reached {
            assert!(matches!(counted.route, Route::Band | Route::Recovered));
            assert!(counted.row_equivalents(n) > 1.9, "{counted:?}");
        }
    }
    // With an aim of exactly K, about half of many rows need the band, and little else.
    let even = Overrides {
        mapping: Some(Mapping::Block),
        stride: Some(64),
        margin: Some(1.0),
        ..Overrides::default()
    };
    let batch = Batch::new(Law::Normal, 20_000, vec![(0, 20_000); 200], &mut rng);
    let (got, routes) =
        cases::routes_of::<f32>(&batch, TopK::new(512)?.with_overrides(even), &device)?;
    cases::check::<f32>(&batch, 512, Order::Unordered, &got, "an aim of K");
    let of = |route| routes.iter().filter(|r| r.route == route).count();
    let (primary, band) = (of(Route::Primary), of(Route::Band));
    assert!(primary > 40 && band > 40, "{primary} primary, {band} band");
    Ok(())
}

/// Rows that are held on chip take no proposal, whatever they hold. They are read once, and more often only
/// where a bin of their scores has more than fits.
#[test]
#[ignore = "needs a CUDA GPU"]
fn routes_of_held_rows() -> Result<()> {
    let (device, _guard) = gpu()?;
    let n = 65_536;
    let mut rng = rng(22);
    for mapping in [Mapping::Exact(4), Mapping::Exact(16)] {
        for (law, passes) in [
            (Law::Normal, 1.0..1.01),
            (Law::Alias, 1.0..1.01),
            (Law::Equal, 2.0..9.0),
            (Law::LowBits, 2.0..9.0),
        ] {
            let what = format!("{law:?}, {mapping:?}");
            let batch = Batch::new(law, n, vec![(0, n as i64); 4], &mut rng);
            let top = TopK::new(2048)?.with_overrides(forced(mapping));
            let (got, routes) = cases::routes_of::<f32>(&batch, top, &device)?;
            cases::check::<f32>(&batch, 2048, Order::Unordered, &got, &what);
            for counted in routes {
                assert_eq!(counted.route, Route::Direct, "{what}: {counted:?}");
                let reads = counted.row_equivalents(n);
                assert!(passes.contains(&reads), "{what}: {counted:?}");
            }
        }
    }
    Ok(())
}

/// 2^20 ties at rank K, and a few above; half as many in rows that a cluster holds.
#[test]
#[ignore = "needs a CUDA GPU"]
fn a_million_ties() -> Result<()> {
    let (device, _guard) = gpu()?;
    let batch = |n: usize| {
        let mut row = vec![1.0f32; n];
        for i in 0..2000 {
            row[n - 1 - 31 * i] = 2.0 + (i % 7) as f32;
            row[17 * i] = 0.5;
        }
        Batch {
            rows: vec![row.clone(), row],
            bounds: vec![(0, n as i64), (12_345, n as i64 - 77)],
            n,
        }
    };
    for mapping in [
        Mapping::Block,
        Mapping::Split(8),
        Mapping::Cluster(16),
        Mapping::Exact(16),
    ] {
        let batch = batch(match mapping {
            Mapping::Exact(_) => (1 << 19) + 5000,
            _ => (1 << 20) + 5000,
        });
        let n = batch.n;
        let top = TopK::new(2048)?
            .order(Order::ByValue)
            .with_overrides(forced(mapping));
        let got = cases::run::<f32>(&batch, top, &device, (n, 0), DType::I64)?;
        cases::check::<f32>(&batch, 2048, Order::ByValue, &got, &format!("{mapping:?}"));
    }
    Ok(())
}

/// Rows times pitch beyond 2^31 elements.
#[test]
#[ignore = "needs a CUDA GPU"]
fn beyond_31_bits() -> Result<()> {
    let (device, _guard) = gpu()?;
    let (pitch, n, k) = (1usize << 26, 50_000, 100);
    let m = 34;
    let all = Tensor::zeros(m * pitch, DType::BF16, &device)?;
    let mut rng = rng(31);
    let batch = Batch::new(Law::Normal, n, vec![(0, n as i64); 1], &mut rng);
    let row = batch.tensor::<bf16>(n, 0, &device)?.squeeze(0)?;
    for at in [0, 31, 32, m - 1] {
        all.slice_set(&row, 0, at * pitch)?;
    }
    let scores = all.reshape((m, pitch))?.narrow(1, 0, n)?;
    for mapping in [
        Mapping::Block,
        Mapping::Held,
        Mapping::Split(4),
        Mapping::Cluster(4),
        Mapping::Exact(4),
    ] {
        let top = TopK::new(k)?
            .order(Order::ByPosition)
            .with_overrides(forced(mapping));
        let got = top
            .select(&scores, &Bounds::full())?
            .positions
            .to_vec2::<u32>()?;
        let one = top
            .select(&row, &Bounds::full())?
            .positions
            .to_vec1::<u32>()?;
        for at in [0, 31, 32, m - 1] {
            assert_eq!(got[at], one, "row {at}, {mapping:?}");
        }
        assert_eq!(got[1], (0..k as u32).collect::<Vec<_>>(), "{mapping:?}");
    }
    Ok(())
}

/// 1,000 replays of one capture, with lengths and scores that change in between, and then launches of
/// other row counts through the same buffers and workspace.
#[test]
#[ignore = "needs a CUDA GPU"]
fn graph_replays() -> Result<()> {
    let (device, _guard) = gpu()?;
    preload(&device, DType::F32)?;
    for (mapping, n, replays) in [
        (Mapping::Short, 8191, 300),
        (Mapping::Block, 9000, 1000),
        (Mapping::RowLocal, 9000, 300),
        (Mapping::Held, 30_001, 300),
        (Mapping::Split(4), 9000, 1000),
        (Mapping::Cluster(4), 9000, 1000),
        (Mapping::Cluster(16), 70_001, 50),
        (Mapping::Exact(4), 9000, 1000),
        (Mapping::Exact(16), 70_001, 50),
    ] {
        replay(&device, mapping, n, replays)?;
    }
    Ok(())
}

fn replay(device: &Device, mapping: Mapping, n: usize, replays: usize) -> Result<()> {
    const M: usize = 3;
    const K: usize = 64;
    let mut rng = rng(n as u64);
    let stream = device.as_cuda_device()?.cuda_stream();
    let laws = [
        Law::Normal,
        Law::Ties,
        Law::Special,
        Law::Equal,
        Law::Ascending,
    ];
    let pool: Vec<Vec<f32>> = laws
        .iter()
        .map(|&law| cases::scores(law, n, &mut rng))
        .collect();
    let on_device = Tensor::from_vec(pool.concat(), (laws.len(), n), device)?;
    let scores = on_device.narrow(0, 0, M)?.copy()?;
    let mut batch = Batch {
        rows: pool[..M].to_vec(),
        bounds: vec![(0, n as i64); M],
        n,
    };
    let start = cases::bounds_tensor(&[0; M], DType::I64, device)?;
    let end = cases::bounds_tensor(&[n as i64; M], DType::I64, device)?;
    let mut out = SelectionBuffers::new(M + 1, K, device)?.with_values()?;
    let mut workspace = Workspace::new(device)?;
    let top = TopK::new(K)?
        .order(Order::ByPosition)
        .with_values()
        .with_overrides(forced(mapping));
    let read = |out: &SelectionBuffers, rows: usize| -> Result<Got> {
        let all = out.selection()?;
        let mut positions = all.positions.to_vec2()?;
        let mut counts = all.counts.to_vec1()?;
        let mut values = all.values.expect("asked for").to_vec2()?;
        positions.truncate(rows);
        counts.truncate(rows);
        values.truncate(rows);
        Ok(Got {
            positions,
            counts,
            values: Some(values),
        })
    };

    top.select_into(
        &scores,
        &Bounds::new(&start, &end),
        &mut out,
        &mut workspace,
    )?;
    device.synchronize()?;
    stream
        .begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED)
        .w()?;
    top.select_into(
        &scores,
        &Bounds::new(&start, &end),
        &mut out,
        &mut workspace,
    )?;
    let refused = out.selection().map(drop).expect_err("refused").to_string();
    assert!(refused.contains("capturing a CUDA graph"), "{refused}");
    let graph = stream.end_capture(CUgraphInstantiate_flags(0)).w()?;
    let graph = graph.expect("a graph was captured");

    for replay in 0..replays {
        for row in 0..M {
            let at = rng.random_range(0..laws.len());
            batch.rows[row].clone_from(&pool[at]);
            scores.slice_set(&on_device.narrow(0, at, 1)?, 0, row)?;
            let length = match rng.random_range(0..4) {
                0 => rng.random_range(-1..=K as i64 + 1),
                _ => rng.random_range(0..=n as i64),
            };
            let first = rng.random_range(0..=n as i64 - length.max(0));
            batch.bounds[row] = (first, first + length);
        }
        let starts: Vec<i64> = batch.bounds.iter().map(|b| b.0).collect();
        let ends: Vec<i64> = batch.bounds.iter().map(|b| b.1).collect();
        start.slice_set(&cases::bounds_tensor(&starts, DType::I64, device)?, 0, 0)?;
        end.slice_set(&cases::bounds_tensor(&ends, DType::I64, device)?, 0, 0)?;
        graph.launch().w()?;
        let got = read(&out, M)?;
        cases::check::<f32>(
            &batch,
            K,
            Order::ByPosition,
            &got,
            &format!("{mapping:?}, replay {replay}"),
        );
    }
    for rows in [1, 2] {
        let fewer = Batch {
            rows: batch.rows[..rows].to_vec(),
            bounds: vec![(0, n as i64); rows],
            n,
        };
        top.select_into(
            &scores.narrow(0, 0, rows)?,
            &Bounds::full(),
            &mut out,
            &mut workspace,
        )?;
        cases::check::<f32>(
            &fewer,
            K,
            Order::ByPosition,
            &read(&out, rows)?,
            &format!("{mapping:?}, {rows} rows"),
        );
    }
    Ok(())
}

/// Lists that overflow in some of the blocks of a row and not in the others: together they must have all of
/// the row, and nothing twice.
#[test]
#[ignore = "needs a CUDA GPU"]
fn overfull_in_some_blocks() -> Result<()> {
    let (device, _guard) = gpu()?;
    let n = 40_001;
    let mut rng = rng(8);
    for law in [Law::Equal, Law::LowBits] {
        let bounds = (35_000..38_700)
            .step_by(160)
            .map(|length| (1261, 1261 + length))
            .collect();
        let batch = Batch::new(law, n, bounds, &mut rng);
        for mapping in [Mapping::Cluster(8), Mapping::Split(8), Mapping::Exact(8)] {
            let top = TopK::new(512)?.with_overrides(forced(mapping));
            let what = format!("{law:?}, {mapping:?}");
            let got = cases::run::<f32>(&batch, top, &device, (n + 3, 1), DType::I32)?;
            cases::check::<f32>(&batch, 512, Order::Unordered, &got, &what);
            let got = cases::run::<f16>(&batch, top, &device, (n + 3, 1), DType::I32)?;
            cases::check::<f16>(&batch, 512, Order::Unordered, &got, &what);
        }
    }
    Ok(())
}

/// Two streams at once, each with its own device handle and workspace.
#[test]
#[ignore = "needs a CUDA GPU"]
fn two_streams_at_once() -> Result<()> {
    let (_, _guard) = gpu()?;
    let work = |seed: u64| -> Result<()> {
        let device = Device::new_cuda_with_stream(0)?;
        let mut rng = rng(seed);
        let batches: Vec<Batch> = (0..4)
            .map(|i| {
                Batch::new(
                    cases::LAWS[i],
                    30_000,
                    vec![(0, 30_000), (9, 20_000)],
                    &mut rng,
                )
            })
            .collect();
        for round in 0..40 {
            let mapping = [
                Mapping::Split(8),
                Mapping::Cluster(8),
                [Mapping::Block, Mapping::Held][round / 16 % 2],
                Mapping::Exact(8),
            ][round / 4 % 4];
            let top = TopK::new(512)?.with_overrides(forced(mapping));
            let batch = &batches[round % 4];
            let got = cases::run::<f32>(batch, top, &device, (30_000, 0), DType::I32)?;
            cases::check::<f32>(batch, 512, Order::Unordered, &got, &format!("{mapping:?}"));
        }
        Ok(())
    };
    let other = std::thread::spawn(move || work(1));
    work(2)?;
    other.join().expect("no panic")
}

/// The same row gives the same bits: run to run, in any batch, in every mapping.
#[test]
#[ignore = "needs a CUDA GPU"]
fn deterministic() -> Result<()> {
    let (device, _guard) = gpu()?;
    let n = 50_000;
    let mut rng = rng(77);
    let batch = Batch::new(Law::Ties, n, vec![(0, n as i64); 8], &mut rng);
    let scores = batch.tensor::<f32>(n, 0, &device)?;
    for order in [Order::ByPosition, Order::ByValue] {
        let top = TopK::new(2048)?.order(order);
        let want = top
            .select(&scores, &Bounds::full())?
            .positions
            .to_vec2::<u32>()?;
        for mapping in [
            Mapping::Block,
            Mapping::Split(2),
            Mapping::Split(8),
            Mapping::Cluster(16),
            Mapping::Exact(8),
        ] {
            let top = top.with_overrides(forced(mapping));
            for _ in 0..20 {
                let got = top
                    .select(&scores, &Bounds::full())?
                    .positions
                    .to_vec2::<u32>()?;
                assert!(got == want, "{order:?}, {mapping:?}");
            }
            let one = top.select(&scores.narrow(0, 5, 1)?, &Bounds::full())?;
            assert_eq!(
                one.positions.to_vec2::<u32>()?[0],
                want[5],
                "{order:?}, {mapping:?}"
            );
        }
    }
    Ok(())
}

/// Small shapes that take every route of every mapping: what `compute-sanitizer` runs.
fn small(mapping: Mapping) -> Result<()> {
    let (device, _guard) = gpu()?;
    let mut rng = rng(9);
    for law in [
        Law::Normal,
        Law::Equal,
        Law::LowBits,
        Law::Alias,
        Law::AliasLow,
        Law::Special,
        Law::Ascending,
    ] {
        for order in [Order::Unordered, Order::ByPosition, Order::ByValue] {
            let overrides = Overrides {
                view: (law == Law::Alias || law == Law::AliasLow).then_some(View::FixedStride),
                margin: (order == Order::ByPosition).then_some(1.0),
                ..forced(mapping)
            };
            let n = match mapping {
                Mapping::Short => 7001,
                _ => 15_001,
            };
            let batch = Batch::new(
                law,
                n,
                vec![(0, n as i64), (3, 7000), (0, 20), (5, 5)],
                &mut rng,
            );
            let top = TopK::new(100)?
                .order(order)
                .with_values()
                .with_overrides(overrides);
            let got = cases::run::<f32>(&batch, top, &device, (n + 1, 0), DType::I32)?;
            cases::check::<f32>(&batch, 100, order, &got, &format!("{law:?}, {overrides:?}"));
        }
    }
    Ok(())
}

macro_rules! sanitize {
    ($($name:ident: $mapping:expr;)*) => {
        $(#[test]
        #[ignore = "needs a CUDA GPU"]
        fn $name() -> Result<()> {
            small($mapping)
        })*
    };
}

sanitize! {
    sanitize_short: Mapping::Short;
    sanitize_block: Mapping::Block;
    sanitize_row_local: Mapping::RowLocal;
    sanitize_held: Mapping::Held;
    sanitize_split: Mapping::Split(4);
    sanitize_cluster: Mapping::Cluster(4);
    sanitize_exact: Mapping::Exact(4);
}
