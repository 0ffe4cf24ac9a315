//! The DSA layer on the CPU, against transformers and against itself.

mod common;

use candle_core::{Device, Result};
use common::dsa::{self as cases, MODELS};

const CPU: &Device = &Device::Cpu;

#[test]
fn deepseek_v32_matches_transformers() -> Result<()> {
    cases::matches_transformers("deepseek_v32", CPU)
}

#[test]
fn glm_moe_dsa_matches_transformers() -> Result<()> {
    cases::matches_transformers("glm_moe_dsa", CPU)
}

#[test]
fn bf16_matches_transformers() -> Result<()> {
    for name in MODELS {
        cases::bf16_matches_transformers(name, CPU)?;
    }
    Ok(())
}

#[test]
fn layouts_differ() -> Result<()> {
    for name in MODELS {
        cases::layouts_differ(name, CPU)?;
    }
    Ok(())
}

#[test]
fn layers_share_positions() -> Result<()> {
    cases::shares_positions(CPU)
}

#[test]
fn chunks_are_the_whole() -> Result<()> {
    for name in MODELS {
        cases::chunks_are_the_whole(name, CPU)?;
    }
    Ok(())
}

#[test]
fn ragged_batches() -> Result<()> {
    for name in MODELS {
        cases::ragged_batches(name, CPU)?;
    }
    Ok(())
}

#[test]
fn packed_batches() -> Result<()> {
    for name in MODELS {
        cases::packed_batches(name, CPU)?;
    }
    Ok(())
}

#[test]
fn fp8_weights() -> Result<()> {
    cases::fp8_weights(CPU)
}

#[test]
fn fp8_index_keys() -> Result<()> {
    for name in MODELS {
        cases::fp8_index_keys(name, CPU)?;
    }
    Ok(())
}

#[test]
fn layer_refusals() -> Result<()> {
    cases::layer_refusals(CPU)
}

#[test]
fn decoding_refusals() -> Result<()> {
    cases::decoding_refusals()
}
