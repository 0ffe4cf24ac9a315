//! The attention ops on the CPU, against sums in f64.

mod common;

use candle_core::{DType, Device, Result, Tensor};
use candle_topk::attention::{KeyValues, SparseAttention};
use common::attention::{self as cases, Form};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

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
fn index_topk_of_one_sequence() -> Result<()> {
    cases::index_topk_of_one_sequence(CPU)
}

/// Keys and values in one storage that another thread writes to: neither waits for the other for ever.
#[test]
fn beside_a_writer() -> Result<()> {
    let kv = Tensor::zeros((64, 2, 64), DType::F32, CPU)?;
    let q = Tensor::ones((8, 1, 64), DType::F32, CPU)?;
    let positions = Tensor::zeros((8, 16), DType::U32, CPU)?;
    let (done, ends) = mpsc::channel();
    for writes in [false, true] {
        let (kv, q, positions, done) = (kv.clone(), q.clone(), positions.clone(), done.clone());
        thread::spawn(move || {
            let run = || -> Result<()> {
                let one = Tensor::ones((1, 2, 64), DType::F32, CPU)?;
                for i in 0..3000 {
                    if writes {
                        kv.slice_set(&one, 0, i % 64)?;
                    } else {
                        let (k, v) = (kv.narrow(1, 0, 1)?, kv.narrow(1, 1, 1)?);
                        SparseAttention::new(1.).forward(
                            &q,
                            &KeyValues::packed(&k, &v),
                            &positions,
                        )?;
                    }
                }
                Ok(())
            };
            done.send(run()).expect("the test waits");
        });
    }
    for _ in 0..2 {
        let end = ends.recv_timeout(Duration::from_secs(120));
        end.expect("both threads come to an end")?;
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
fn attention_of_tiles() -> Result<()> {
    cases::attention_of_tiles(DType::F32, CPU)
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
fn block_lists_of_caches() -> Result<()> {
    cases::block_lists_of_caches(DType::BF16, 128, CPU)?;
    cases::block_lists_of_caches(DType::F16, 64, CPU)
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
fn attention_weights() -> Result<()> {
    cases::attention_weights(DType::F32, 2, &[128, 384], CPU)
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
