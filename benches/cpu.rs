//! The drop-in beside Candle's own processor on the CPU: `cargo bench --bench cpu`.
//!
//! After criterion's own report one line a case gives the ratio of the two medians of this run.

#[path = "../tests/common/mod.rs"]
mod common;

use candle_core::{Device, Result, Tensor};
use candle_topk::{LogitsProcessor, Sampling};
use candle_transformers::generation::LogitsProcessor as Candle;
use common::{logits, rng, Law};
use criterion::{BenchmarkId, Criterion};
use std::time::{Duration, Instant};

const WIDTHS: [usize; 5] = [32000, 49152, 128256, 151936, 262144];

fn modes() -> [(&'static str, Sampling); 6] {
    let temperature = 0.8;
    [
        ("argmax", Sampling::ArgMax),
        ("all", Sampling::All { temperature }),
        ("k50", Sampling::TopK { k: 50, temperature }),
        (
            "p0.9",
            Sampling::TopP {
                p: 0.9,
                temperature,
            },
        ),
        (
            "k50p0.9",
            Sampling::TopKThenTopP {
                k: 50,
                p: 0.9,
                temperature,
            },
        ),
        ("gumbel", Sampling::GumbelSoftmax { temperature }),
    ]
}

fn main() -> Result<()> {
    let mut criterion = Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_secs(1))
        .configure_from_args();
    let mut lines = vec![];
    for law in [Law::Peaked, Law::Normal] {
        for vocab in WIDTHS {
            let row = logits(law, vocab, &mut rng(vocab as u64));
            let tensor = Tensor::from_vec(row, vocab, &Device::Cpu)?;
            for (mode, sampling) in modes() {
                let name = format!("{law:?}/{mode}");
                let mut group = criterion.benchmark_group(name.to_lowercase());
                let mut medians = [0.0; 2];
                let mut ours = LogitsProcessor::from_sampling(1, sampling.clone());
                let mut candle = Candle::from_sampling(1, sampling.clone());
                let mut run = |engine: usize| -> Result<u32> {
                    match engine {
                        0 => candle.sample(&tensor),
                        _ => ours.sample(&tensor),
                    }
                };
                for (engine, name) in ["candle", "topk"].into_iter().enumerate() {
                    let mut times = vec![];
                    group.bench_function(BenchmarkId::new(name, vocab), |bench| {
                        bench.iter_custom(|iterations| {
                            let start = Instant::now();
                            for _ in 0..iterations {
                                run(engine).expect("these logits have a token");
                            }
                            let spent = start.elapsed();
                            times.push(spent.as_secs_f64() * 1e6 / iterations as f64);
                            spent
                        })
                    });
                    times.sort_by(f64::total_cmp);
                    medians[engine] = times.get(times.len() / 2).copied().unwrap_or(f64::NAN);
                }
                group.finish();
                let [candle, ours] = medians;
                // What a filter leaves out has no times.
                if candle.is_finite() && ours.is_finite() {
                    lines.push(format!(
                        "{:>7} {mode:>8} V {vocab:>6}: Candle {candle:>8.0} us, candle-topk {ours:>7.0} us, {:>6.1} x",
                        format!("{law:?}").to_lowercase(),
                        candle / ours
                    ));
                }
            }
        }
    }
    criterion.final_summary();
    println!("{}", lines.join("\n"));
    Ok(())
}
