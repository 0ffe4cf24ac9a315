//! The calls of top-K that a long request makes while its prompt is read (section 6.3 of the HPC-Ops
//! paper), from the rules of the scheduler alone.
//!
//! The prompt is read in steps of so many tokens. All queries of a step see scores of one width, the
//! tokens so far; the rows of a step are cut into as many calls as keep a call's score matrix
//! within the workspace.

#![allow(dead_code)] // Each program uses its part.

/// One call: rows of lengths `first`, `first + 1`, ... over `width` columns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Call {
    pub step: usize,
    pub rows: usize,
    pub first: usize,
    pub width: usize,
}

impl Call {
    /// How many scores are valid.
    pub fn scores(&self) -> usize {
        self.rows * self.first + self.rows * self.rows.saturating_sub(1) / 2
    }
}

/// A request, and how it is scheduled.
#[derive(Debug, Clone, Copy)]
pub struct Trace {
    pub name: &'static str,
    pub tokens: usize,
    pub step_tokens: usize,
    /// Of the F32 scores of one call.
    pub workspace: usize,
}

/// The paper's two requests: 64K query tokens a step, and 5.85 GiB of scores, with which they make
/// the paper's 26 and 71 calls.
pub const TRACES: [Trace; 2] = [trace("245K", 244_650), trace("430K", 430_000)];

const fn trace(name: &'static str, tokens: usize) -> Trace {
    Trace {
        name,
        tokens,
        step_tokens: 64 << 10,
        workspace: (5 << 30) + (85 << 30) / 100,
    }
}

impl Trace {
    pub fn calls(&self) -> Vec<Call> {
        let mut calls = vec![];
        for (step, begin) in (0..self.tokens).step_by(self.step_tokens).enumerate() {
            let width = self.tokens.min(begin + self.step_tokens);
            let most = (self.workspace / (width * 4)).max(1);
            for first in (begin..width).step_by(most) {
                calls.push(Call {
                    step,
                    rows: most.min(width - first),
                    first: first + 1,
                    width,
                });
            }
        }
        calls
    }

    /// The widest call of the last step with as many rows as fit.
    pub fn terminal(&self) -> Call {
        let calls = self.calls();
        let last = calls
            .iter()
            .filter(|call| call.step == calls[calls.len() - 1].step);
        last.max_by_key(|call| (call.rows, call.first))
            .copied()
            .unwrap_or(calls[0])
    }
}
