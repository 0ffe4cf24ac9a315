//! The attention ops on the CPU, against sums in f64.

mod common;

use candle_core::{DType, Device, Result};
use common::attention::{self as cases, Form};

const CPU: &Device = &Device::Cpu;

#[test]
fn scores_in_f32() -> Result<()> {
    cases::scores_against_double(DType::F32, &[1, 2, 3, 7, 8, 31, 64, 128], CPU)
}

#[test]
fn scores_in_half_precision() -> Result<()> {
    cases::scores_against_double(DType::BF16, &[1, 4, 32, 64], CPU)?;
    cases::scores_against_double(DType::F16, &[1, 5, 64], CPU)
}

#[test]
fn scores_in_fp8() -> Result<()> {
    cases::scores_against_double(DType::F8E4M3, &[1, 6, 32, 64], CPU)
}

#[test]
fn scores_repeat() -> Result<()> {
    for dtype in [DType::F32, DType::BF16, DType::F8E4M3] {
        cases::scores_repeat(dtype, CPU)?;
    }
    Ok(())
}

#[test]
fn scores_of_caches() -> Result<()> {
    for dtype in [DType::F32, DType::BF16, DType::F8E4M3] {
        cases::scores_of_caches(dtype, CPU)?;
    }
    Ok(())
}

#[test]
fn scores_of_packed_sequences() -> Result<()> {
    cases::scores_of_packed_sequences(CPU)
}

#[test]
fn scores_of_views() -> Result<()> {
    cases::scores_of_views(CPU)
}

#[test]
fn scores_of_special_keys() -> Result<()> {
    cases::scores_of_special_keys(CPU)
}

#[test]
fn scores_of_many_rows() -> Result<()> {
    cases::scores_of_many_rows(CPU)
}

#[test]
fn score_refusals() -> Result<()> {
    cases::score_refusals(CPU)
}

#[test]
fn index_topk_is_exact() -> Result<()> {
    for dtype in [DType::F32, DType::BF16, DType::F8E4M3] {
        cases::index_topk_is_exact(dtype, CPU)?;
    }
    Ok(())
}

#[test]
fn index_topk_of_caches() -> Result<()> {
    cases::index_topk_of_caches(CPU)
}

#[test]
fn attention_in_f32() -> Result<()> {
    cases::attention_forms(DType::F32, &[0, 1, 2, 3, 4, 5, 6, 7], CPU)
}

#[test]
fn attention_in_half_precision() -> Result<()> {
    cases::attention_forms(DType::BF16, &[0, 3, 4, 7], CPU)?;
    cases::attention_forms(DType::F16, &[7], CPU)
}

#[test]
fn attention_head_counts() -> Result<()> {
    cases::attention_head_counts(CPU)
}

#[test]
fn attention_of_caches() -> Result<()> {
    cases::attention_of_caches(Form::MLA, CPU)?;
    cases::attention_of_caches(Form::GQA, CPU)
}

#[test]
fn attention_of_nothing() -> Result<()> {
    cases::attention_of_nothing(CPU)
}

#[test]
fn attention_of_infinities() -> Result<()> {
    cases::attention_of_infinities(CPU)
}

#[test]
fn attention_in_any_order() -> Result<()> {
    cases::attention_in_any_order(CPU)
}

#[test]
fn attention_of_views() -> Result<()> {
    cases::attention_of_views(CPU)
}

#[test]
fn attention_of_many_rows() -> Result<()> {
    cases::attention_of_many_rows(CPU)
}

#[test]
fn attention_refusals() -> Result<()> {
    cases::attention_refusals(CPU)
}

#[test]
fn steps_into_buffers() -> Result<()> {
    cases::steps_into_buffers(CPU)
}

#[test]
fn beyond_two_to_the_31() -> Result<()> {
    cases::beyond_two_to_the_31(CPU)
}
