//! Whether a launch of top-K selection has given a row what it should.

use crate::common::selection::oracle;
use candle_topk::selection::Order;

/// What a launch has given for a row.
pub struct Given {
    pub positions: Vec<u32>,
    pub count: u32,
    pub values: Option<Vec<f32>>,
}

/// The first difference from the right answer for a row of valid scores.
pub fn compare(row: &[f32], k: usize, order: Order, given: &Given) -> Result<(), String> {
    let expected = oracle(row, 0, row.len(), k);
    if given.count as usize != expected.len() {
        return Err(format!(
            "the count is {}, not {}",
            given.count,
            expected.len()
        ));
    }
    let (taken, rest) = given.positions.split_at(expected.len());
    if let Some(position) = rest.iter().find(|&&position| position != u32::MAX) {
        return Err(format!("position {position} after the last"));
    }
    let mut wanted = expected.clone();
    let mut sorted = taken.to_vec();
    match order {
        Order::ByValue => (),
        Order::ByPosition => wanted.sort_unstable(),
        Order::Unordered => {
            wanted.sort_unstable();
            sorted.sort_unstable();
        }
    }
    if let Some(at) = (0..wanted.len()).find(|&at| wanted[at] != sorted[at]) {
        return Err(format!(
            "position {} at {at}, not {} ({order:?})",
            sorted[at], wanted[at]
        ));
    }
    if let Some(values) = &given.values {
        for (&position, &value) in taken.iter().zip(values) {
            let is = row[position as usize];
            if value != is && !(value.is_nan() && is.is_nan()) {
                return Err(format!("the value at {position} is {value}, not {is}"));
            }
        }
        if values[taken.len()..]
            .iter()
            .any(|&v| v != f32::NEG_INFINITY)
        {
            return Err("a value after the last that is not -inf".to_string());
        }
    }
    Ok(())
}
