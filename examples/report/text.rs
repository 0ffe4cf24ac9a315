//! Markdown tables and the numbers in them.

/// A Markdown table: names to the left, numbers to the right.
pub fn table(head: &[&str], rows: &[Vec<String>]) -> Vec<String> {
    const NAMES: [&str; 14] = [
        "mode",
        "model",
        "bar",
        "sampler",
        "peer",
        "variant",
        "worst",
        "request",
        "what",
        "spread",
        "truncation",
        "search",
        "duplicates",
        "sizes",
    ];
    let line = |cells: Vec<&str>| format!("| {} |", cells.join(" | "));
    let rule = head.iter().map(|name| match NAMES.contains(name) {
        true => "---",
        false => "---:",
    });
    let mut lines = vec![line(head.to_vec()), line(rule.collect())];
    lines.extend(
        rows.iter()
            .map(|row| line(row.iter().map(String::as_str).collect())),
    );
    lines
}

pub fn number(value: f64) -> String {
    if value < 10.0 {
        format!("{value:.1}")
    } else {
        format!("{value:.0}")
    }
}

pub fn ratio(value: f64) -> String {
    if value < 100.0 {
        format!("{value:.1} x")
    } else {
        format!("{value:.0} x")
    }
}

pub fn optional<T>(value: Option<T>, format: impl Fn(T) -> String) -> String {
    value.map_or("-".to_string(), format)
}

pub fn geometric_mean(values: &[f64]) -> Option<f64> {
    if values.is_empty() {
        return None;
    }
    let logarithms: f64 = values.iter().map(|v| v.ln()).sum();
    Some((logarithms / values.len() as f64).exp())
}

/// Modes in the order of the tables, unknown ones last.
pub fn mode_order(modes: &mut [&str]) {
    const KNOWN: [&str; 5] = ["argmax", "all", "k50", "p0.9", "k50p0.9"];
    let rank = |mode: &str| KNOWN.iter().position(|k| *k == mode).unwrap_or(KNOWN.len());
    modes.sort_by_key(|mode| (rank(mode), mode.to_string()));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_are_markdown() {
        let rows = vec![vec!["k50".to_string(), "3".to_string()]];
        assert_eq!(
            table(&["mode", "us"], &rows),
            ["| mode | us |", "| --- | ---: |", "| k50 | 3 |"]
        );
    }

    #[test]
    fn numbers_are_rounded_to_what_they_are_worth() {
        assert_eq!(number(9.94), "9.9");
        assert_eq!(number(123.4), "123");
        assert_eq!(ratio(117.3), "117 x");
        assert_eq!(optional(None, number), "-");
    }

    #[test]
    fn a_geometric_mean_is_that_of_factors() {
        assert!((geometric_mean(&[2.0, 8.0]).unwrap() - 4.0).abs() < 1e-12);
        assert_eq!(geometric_mean(&[]), None);
    }

    #[test]
    fn modes_come_in_the_order_of_the_tables() {
        let mut modes = ["k50p0.9", "k9", "p0.9", "k50"];
        mode_order(&mut modes);
        assert_eq!(modes, ["k50", "p0.9", "k50p0.9", "k9"]);
    }
}
