//! The ops on the CPU, against a stable sort in f64.

mod common;

use candle_core::{Device, Result};
use common::{cases, into, Law, LAWS};
use half::{bf16, f16};

const CPU: &Device = &Device::Cpu;

#[test]
fn every_law_at_every_width() -> Result<()> {
    for vocab in cases::WIDTHS {
        for (i, law) in LAWS.into_iter().enumerate() {
            // The widest rows take the laws in turn, to end in time without a GPU.
            if vocab < 100_000 || i == vocab % LAWS.len() || law == Law::Peaked {
                cases::check_grid::<f32>(law, vocab, CPU)?;
            }
        }
    }
    Ok(())
}

#[test]
fn half_precision() -> Result<()> {
    for vocab in [1, 2, 111, 1000, 32000] {
        for law in LAWS {
            cases::check_grid::<f16>(law, vocab, CPU)?;
            cases::check_grid::<bf16>(law, vocab, CPU)?;
        }
    }
    cases::check_grid::<bf16>(Law::Peaked, 128256, CPU)?;
    Ok(())
}

#[test]
fn widths_around_every_boundary() -> Result<()> {
    for vocab in cases::EDGES {
        cases::check_grid::<f32>(Law::Normal, vocab, CPU)?;
        cases::check_grid::<f32>(Law::Ties, vocab, CPU)?;
    }
    Ok(())
}

#[test]
fn special_rows() -> Result<()> {
    for vocab in [1, 2, 111, 5000, 32000] {
        cases::check_special::<f32>(vocab, CPU)?;
    }
    cases::check_special::<f16>(5000, CPU)?;
    cases::check_special::<bf16>(5000, CPU)
}

#[test]
fn mixed_batches() -> Result<()> {
    cases::mixed_batches(CPU)
}

#[test]
fn views() -> Result<()> {
    cases::views(CPU)
}

#[test]
fn through_candle_traits() -> Result<()> {
    cases::through_candle_traits(CPU)
}

#[test]
fn candidates_beyond_capacity() -> Result<()> {
    cases::candidates_beyond_capacity(CPU)
}

#[test]
fn reported_elsewhere() -> Result<()> {
    cases::reported_elsewhere(CPU)
}

#[test]
fn frequencies() -> Result<()> {
    cases::frequencies(CPU, 200_000)
}

#[test]
fn independence() -> Result<()> {
    cases::independence(CPU)
}

#[test]
fn device_parameters() -> Result<()> {
    cases::device_parameters(CPU)
}

#[test]
fn refusals() -> Result<()> {
    cases::refusals(CPU)
}

#[test]
fn greedy() -> Result<()> {
    cases::greedy(CPU)
}

#[test]
fn log_probs() -> Result<()> {
    into::log_probs::<f32>(CPU)?;
    into::log_probs::<bf16>(CPU)
}

#[test]
fn sample_buffers() -> Result<()> {
    into::sample_buffers::<f32>(CPU)?;
    into::sample_buffers::<f16>(CPU)
}

#[test]
fn candidate_buffers() -> Result<()> {
    into::candidate_buffers::<f32>(CPU)?;
    into::candidate_buffers::<bf16>(CPU)
}

#[test]
fn mask_into_tensors() -> Result<()> {
    into::mask_into_tensors::<f32>(CPU)?;
    into::mask_into_tensors::<f16>(CPU)?;
    into::mask_into_tensors::<bf16>(CPU)
}

#[test]
fn into_refusals() -> Result<()> {
    into::into_refusals(CPU)
}
