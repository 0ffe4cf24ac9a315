//! The calls of top-K that a long request makes while its prompt is read (section 6.3 of the HPC-Ops
//! paper), from the rules of the scheduler alone.
//!
//! The prompt is read in steps of so many tokens. All queries of a step see scores of one width, the
//! tokens so far; the rows of a step are cut into as many calls as keep a call's score matrix
//! within the workspace.

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_requests_make_the_papers_calls() {
        let steps = |trace: &Trace| {
            let calls = trace.calls();
            let mut counts = vec![0; calls[calls.len() - 1].step + 1];
            calls.iter().for_each(|call| counts[call.step] += 1);
            counts
        };
        assert_eq!(steps(&TRACES[0]), [3, 6, 9, 8]);
        assert_eq!(steps(&TRACES[1]), [3, 6, 9, 11, 14, 17, 11]);
        assert_eq!(TRACES.map(|trace| trace.calls().len()), [26, 71]);
    }

    #[test]
    fn every_token_is_a_row_once_and_no_call_is_over_the_workspace() {
        for trace in TRACES {
            let mut length = 1;
            for call in trace.calls() {
                assert_eq!(call.first, length);
                length += call.rows;
                assert!(length - 1 <= call.width);
                assert!(call.rows * call.width * 4 <= trace.workspace);
            }
            assert_eq!(length, trace.tokens + 1);
            let causal = trace.tokens * (trace.tokens + 1) / 2;
            assert_eq!(
                trace.calls().iter().map(Call::scores).sum::<usize>(),
                causal
            );
            let terminal = trace.terminal();
            assert_eq!(terminal.width, trace.tokens);
            assert_eq!(terminal.rows, trace.workspace / (4 * trace.tokens));
        }
    }
}
