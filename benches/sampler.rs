//! One call of the drop-in, host included, beside Candle's own, as JSON lines:
//! `cargo bench --features cuda --bench sampler` on the first CUDA device, else on the CPU.
//!
//! Times are the host's, from a call on idle, ready logits to its token; the median of many calls,
//! Candle's and ours in turn. `sample_batch` and `sample_tensor` follow at larger batches, the
//! second timed over a run of calls that one synchronisation ends.

#[path = "../tests/common/mod.rs"]
mod common;

use candle_core::{Device, Result, Tensor};
use candle_topk::{LogitsProcessor, Sampling};
use candle_transformers::generation::LogitsProcessor as Candle;
use common::machine::Machine;
use common::{logits, rng, Law};
use std::time::Instant;

const WIDTHS: [usize; 6] = [32000, 49152, 128256, 201088, 248320, 262208];

fn modes() -> [(&'static str, Sampling); 5] {
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
    ]
}

struct Bench {
    device: Device,
    machine: Machine,
}

impl Bench {
    fn new() -> Self {
        let device = Device::cuda_if_available(0).unwrap_or(Device::Cpu);
        Self {
            machine: Machine::of(&device),
            device,
        }
    }

    fn line(&self, what: &str, v: usize, b: usize, mode: &str, law: Law, times: &mut [f64]) {
        times.sort_by(f64::total_cmp);
        let law = match law {
            Law::Peaked => "peaked",
            _ => "normal",
        };
        println!(
            r#"{{"op":"sampler","sampler":"{what}","b":{b},"v":{v},"mode":"{mode}","dist":"{law}","dtype":"f32","us":{:.1},"us_min":{:.1},"us_max":{:.1},"l2":"warm","gpu":"{}","rev":"{}","date":"{}"}}"#,
            times[times.len() / 2],
            times[0],
            times[times.len() - 1],
            self.machine.gpu,
            self.machine.rev,
            self.machine.date
        );
    }

    /// Host times of `calls` calls of each, in turn.
    fn in_turn(
        &self,
        calls: usize,
        run: &mut [&mut dyn FnMut() -> Result<u32>],
    ) -> Result<Vec<Vec<f64>>> {
        let mut times = vec![vec![]; run.len()];
        for call in 0..calls + 10 {
            for (run, times) in run.iter_mut().zip(&mut times) {
                self.device.synchronize()?;
                let start = Instant::now();
                run()?;
                let spent = start.elapsed().as_secs_f64() * 1e6;
                if call >= 10 {
                    times.push(spent);
                }
            }
        }
        Ok(times)
    }
}

fn main() -> Result<()> {
    let bench = Bench::new();
    let calls = if bench.device.is_cpu() { 20 } else { 100 };
    for law in [Law::Peaked, Law::Normal] {
        for v in WIDTHS {
            let row = logits(law, v, &mut rng(v as u64));
            let tensor = Tensor::from_vec(row, v, &bench.device)?;
            for (mode, sampling) in modes() {
                let mut candle = Candle::from_sampling(1, sampling.clone());
                let mut ours = LogitsProcessor::from_sampling(1, sampling);
                let mut times = bench.in_turn(
                    calls,
                    &mut [&mut || candle.sample(&tensor), &mut || ours.sample(&tensor)],
                )?;
                bench.line("candle", v, 1, mode, law, &mut times[0]);
                bench.line("topk", v, 1, mode, law, &mut times[1]);
            }
        }
    }
    let v = 128256;
    for b in [8, 32, 128, 1024] {
        if bench.device.is_cpu() {
            break;
        }
        let mut rng = rng(b as u64);
        let row = logits(Law::Peaked, v, &mut rng);
        // Rows of one law, each shifted in its own way.
        let flat: Vec<f32> = (0..b)
            .flat_map(|i| [&row[i * 7 % v..], &row[..i * 7 % v]].concat())
            .collect();
        let tensor = Tensor::from_vec(flat, (b, v), &bench.device)?;
        for (mode, sampling) in modes() {
            let mut host = LogitsProcessor::from_sampling(1, sampling.clone());
            let mut times = bench.in_turn(20, &mut [&mut || Ok(host.sample_batch(&tensor)?[0])])?;
            bench.line("topk sample_batch", v, b, mode, Law::Peaked, &mut times[0]);
            let mut device = LogitsProcessor::from_sampling(1, sampling);
            let mut times = bench.in_turn(
                5,
                &mut [&mut || {
                    for _ in 0..20 {
                        device.sample_tensor(&tensor)?;
                    }
                    bench.device.synchronize()?;
                    Ok(0)
                }],
            )?;
            times[0].iter_mut().for_each(|t| *t /= 20.0);
            bench.line("topk sample_tensor", v, b, mode, Law::Peaked, &mut times[0]);
        }
    }
    Ok(())
}
