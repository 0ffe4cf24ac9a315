//! The drop-in logits processor on the CPU, beside Candle's own.

mod common;

use candle_core::{Device, Result};
use common::processor;

const CPU: &Device = &Device::Cpu;

#[test]
fn same_answers_as_candle() -> Result<()> {
    processor::same_answers(CPU, 1)
}

#[test]
fn arg_max() -> Result<()> {
    processor::arg_max(CPU)
}

#[test]
fn top_k_distributions() -> Result<()> {
    processor::top_k_distributions(CPU, 100_000)
}

#[test]
fn batches() -> Result<()> {
    processor::batches(CPU)
}

#[test]
fn refusals() -> Result<()> {
    processor::refusals(CPU)
}

#[test]
fn dtypes() -> Result<()> {
    processor::dtypes(CPU)
}

#[test]
fn sample_f() -> Result<()> {
    processor::sample_f(CPU)
}

#[test]
fn repeat_penalty() -> Result<()> {
    processor::repeat_penalty(CPU)
}

/// As Candle's own is: a server moves its processors between threads.
#[test]
fn moves_between_threads() {
    fn check<T: Send + Sync>() {}
    check::<candle_topk::LogitsProcessor>();
    check::<candle_transformers::generation::LogitsProcessor>();
}
