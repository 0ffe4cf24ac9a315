//! What a measurement was made on, for the lines that benches print.

use candle_core::Device;
use std::process::Command;

pub struct Machine {
    pub gpu: String,
    pub rev: String,
    pub date: String,
}

impl Machine {
    pub fn of(device: &Device) -> Self {
        let gpu = if device.is_cpu() {
            None
        } else {
            first_line("nvidia-smi", &["--query-gpu=name", "--format=csv,noheader"])
        };
        Self {
            gpu: gpu.unwrap_or("cpu".into()),
            // A packed program says it in the variable: where it runs there is no repository.
            rev: std::env::var("CANDLE_TOPK_REV")
                .ok()
                .or_else(|| first_line("git", &["rev-parse", "HEAD"]))
                .unwrap_or("unknown".into()),
            date: first_line("date", &["-u", "+%F"]).unwrap_or_default(),
        }
    }
}

fn first_line(program: &str, arguments: &[&str]) -> Option<String> {
    let out = Command::new(program).args(arguments).output().ok()?;
    let text = String::from_utf8(out.stdout).ok()?;
    Some(text.lines().next()?.trim().to_string()).filter(|_| out.status.success())
}
