//! The shape sequences that the bench of selection replays.

#[path = "common/traces.rs"]
mod traces;

use traces::{Call, Trace, TRACES};

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
