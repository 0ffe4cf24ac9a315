//! What the bench of selection is made of and needs no GPU: the calls of long requests, and the check
//! of rows.

#[path = "common/check.rs"]
mod check;
mod common;
#[path = "common/traces.rs"]
mod traces;

use candle_core::{Device, Result, Tensor};
use candle_topk::selection::{Bounds, Order, TopK};
use check::{compare, Given};
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

const ORDERS: [Order; 3] = [Order::Unordered, Order::ByPosition, Order::ByValue];

fn given(row: &[f32], k: usize, order: Order) -> Result<Given> {
    let scores = Tensor::new(row, &Device::Cpu)?.unsqueeze(0)?;
    let top = TopK::new(k)?.order(order).with_values();
    let selected = top.select(&scores, &Bounds::full())?;
    let values = selected.values.map(|values| values.get(0)?.to_vec1());
    Ok(Given {
        positions: selected.positions.get(0)?.to_vec1()?,
        count: selected.counts.to_vec1::<u32>()?[0],
        values: values.transpose()?,
    })
}

#[test]
fn what_the_cpu_selects_passes_the_check() -> Result<()> {
    let mut rng = common::rng(rand::random());
    for law in common::selection::LAWS {
        for n in [1, 9, 1000] {
            let row = common::selection::scores(law, n, &mut rng);
            for order in ORDERS {
                let given = given(&row, 9, order)?;
                assert_eq!(compare(&row, 9, order, &given), Ok(()), "{law:?} {n}");
            }
        }
    }
    Ok(())
}

#[test]
fn whatever_is_wrong_with_a_row_is_found() -> Result<()> {
    let row = [1.0, 7.0, 3.0, 7.0, f32::NAN, 2.0];
    let spoil: [fn(&mut Given); 5] = [
        |given| given.count -= 1,
        // The lower of two equal scores comes first.
        |given| given.positions.swap(0, 1),
        |given| given.positions[0] = 4,
        |given| given.positions[1] = given.positions[0],
        |given| given.values = Some(vec![7.0, 7.0, 2.0]),
    ];
    for wrong in spoil {
        let mut given = given(&row, 3, Order::ByValue)?;
        wrong(&mut given);
        assert!(compare(&row, 3, Order::ByValue, &given).is_err());
    }
    // What is out of order is right where none is asked for.
    let mut swapped = given(&row, 3, Order::Unordered)?;
    swapped.positions.reverse();
    swapped.values.as_mut().unwrap().reverse();
    assert_eq!(compare(&row, 3, Order::Unordered, &swapped), Ok(()));
    let mut short = given(&row[..2], 3, Order::ByPosition)?;
    assert_eq!(compare(&row[..2], 3, Order::ByPosition, &short), Ok(()));
    short.positions[2] = 2;
    assert!(compare(&row[..2], 3, Order::ByPosition, &short).is_err());
    Ok(())
}
