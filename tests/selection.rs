//! Ragged top-K selection on the CPU, against an oracle that compares floats.

mod common;

use candle_core::{DType, Device, Result};
use candle_topk::selection::{plan, DeviceProps, Mapping, Overrides, PlanRequest};
use common::selection as cases;

const CPU: &Device = &Device::Cpu;

#[test]
fn laws() -> Result<()> {
    let all = [1, 7, 64, 512, 2048, 4096];
    for (n, ks) in [
        (1, &all[..]),
        (9, &all),
        (3000, &all),
        (20_000, &[64, 4096]),
    ] {
        in_each_dtype!(laws, n, ks, Overrides::default(), CPU)?;
    }
    Ok(())
}

#[test]
fn lengths() -> Result<()> {
    for k in [1, 7, 64, 2048, 4096] {
        in_each_dtype!(
            lengths,
            &[2, 8, 33, 8191, 8193],
            k,
            Overrides::default(),
            CPU
        )?;
    }
    Ok(())
}

#[test]
fn through_candle_traits() -> Result<()> {
    cases::through_candle_traits(CPU)
}

#[test]
fn buffers() -> Result<()> {
    in_each_dtype!(buffers, CPU)
}

#[test]
fn reported_elsewhere() -> Result<()> {
    cases::reported_elsewhere(CPU)
}

#[test]
fn refusals() -> Result<()> {
    cases::refusals(CPU)
}

/// The planner knows no device but what it is told.
#[test]
fn plans_are_pure() -> Result<()> {
    let request = PlanRequest {
        k: 2048,
        m: 8,
        n: 131_072,
        pitch: 131_072,
        dtype: DType::F32,
        device: DeviceProps::H200,
        overrides: Overrides::default(),
    };
    let planned = plan(&request)?;
    assert_eq!(planned, plan(&request)?);
    assert!(matches!(planned.mapping, Mapping::Exact(_)), "{planned}");
    assert!(DeviceProps::of(CPU).is_err());
    Ok(())
}
