//! What figure 3 of the HPC-Ops paper shows of score rows: how many values lie above a displaced
//! boundary, whether a strided view finds the ranks of the row, where the top K lie, and how far off
//! a view is, beside what a view of exchangeable positions would be.

use anyhow::{ensure, Result};
use serde_json::{json, Value as Json};

/// Figure 3a: boundary errors in gaps between the values of rank K and K + 1.
const GAPS: [f64; 13] = [
    1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4,
];
/// Figure 3b and d: positions of a view lie so far apart.
const STRIDES: [usize; 5] = [16, 32, 64, 128, 256];
/// Figure 3b: ranks that are asked for, in K.
const TARGETS: [f64; 5] = [1.0, 1.25, 1.5, 1.75, 2.0];
/// Which of them figure 3d is about.
const MIDDLE: usize = 2;
const DECILES: usize = 10;

/// Gathered over rows.
pub struct Statistics {
    k: usize,
    rows: usize,
    lengths: Vec<usize>,
    /// Rows whose values at ranks K and K + 1 are equal have no gap.
    tied: usize,
    /// By gap: C of each row.
    tails: Vec<Vec<usize>>,
    /// By stride and target: the row's rank of the view's value, of each row and phase.
    ranks: Vec<[Vec<usize>; TARGETS.len()]>,
    /// By stride: the sum over rows and phases of the squared error that exchangeable positions give.
    exchangeable: Vec<f64>,
    deciles: [usize; DECILES],
}

impl Statistics {
    pub fn new(k: usize) -> Self {
        Self {
            k,
            rows: 0,
            lengths: vec![],
            tied: 0,
            tails: vec![vec![]; GAPS.len()],
            ranks: STRIDES.map(|_| Default::default()).into(),
            exchangeable: vec![0.0; STRIDES.len()],
            deciles: [0; DECILES],
        }
    }

    /// Takes the valid scores of a row: as in the paper, of at least 4 K.
    pub fn add(&mut self, row: &[f32]) -> Result<()> {
        let (k, length) = (self.k, row.len());
        ensure!(
            length >= 4 * k,
            "a row of {length} scores, at least 4 K = {} are needed",
            4 * k
        );
        ensure!(
            row.iter().all(|x| x.is_finite()),
            "a row has scores that are not finite"
        );
        self.rows += 1;
        self.lengths.push(length);
        let mut order: Vec<u32> = (0..length as u32).collect();
        // Of equal values the lower position comes first.
        order.sort_by(|&a, &b| row[b as usize].total_cmp(&row[a as usize]).then(a.cmp(&b)));
        let value = |rank: usize| row[order[rank - 1] as usize] as f64;

        let gap = value(k) - value(k + 1);
        if gap > 0.0 {
            for (tail, gaps) in self.tails.iter_mut().zip(GAPS) {
                let bar = value(k) - gaps * gap;
                tail.push(order.partition_point(|&i| row[i as usize] as f64 >= bar));
            }
        } else {
            self.tied += 1;
        }
        for &i in &order[..k] {
            self.deciles[i as usize * DECILES / length] += 1;
        }
        for (at, &stride) in STRIDES.iter().enumerate() {
            let quotas =
                TARGETS.map(|target| ((target * k as f64) / stride as f64).ceil() as usize);
            let mut seen = vec![0; stride];
            for (rank, &i) in order.iter().enumerate() {
                let phase = &mut seen[i as usize % stride];
                *phase += 1;
                for (target, &quota) in quotas.iter().enumerate() {
                    if *phase == quota {
                        self.ranks[at][target].push(rank + 1);
                    }
                }
            }
            let asked = TARGETS[MIDDLE] * k as f64;
            for phase in 0..stride {
                let positions = (length - phase).div_ceil(stride);
                self.exchangeable[at] += squared_error(length, positions, quotas[MIDDLE], asked);
            }
        }
        Ok(())
    }

    /// A line for each point of figure 3.
    pub fn lines(&self) -> Vec<Json> {
        let (k, rows) = (self.k, self.rows);
        let base = |part: &str| {
            json!({
                "op": "score_statistics", "part": part, "k": k, "rows": rows,
                "length_min": self.lengths.iter().min(), "length_max": self.lengths.iter().max(),
            })
        };
        let mut lines = vec![];
        let mut push = |part: &str, more: Json| {
            let mut line = base(part);
            for (key, value) in more.as_object().into_iter().flatten() {
                line[key] = value.clone();
            }
            lines.push(line);
        };
        for (tail, gaps) in self.tails.iter().zip(GAPS) {
            if let Some([median, high]) = quantiles(tail, [0.5, 0.95]) {
                push(
                    "tail",
                    json!({"gaps": gaps, "median": median, "p95": high, "tied_rows": self.tied}),
                );
            }
        }
        for (at, &stride) in STRIDES.iter().enumerate() {
            for (ranks, target) in self.ranks[at].iter().zip(TARGETS) {
                if let Some([low, median, high]) = quantiles(ranks, [0.05, 0.5, 0.95]) {
                    push(
                        "view",
                        json!({"stride": stride, "target": target, "p5": low, "median": median, "p95": high}),
                    );
                }
            }
        }
        let selected: usize = self.deciles.iter().sum();
        for (decile, &count) in self.deciles.iter().enumerate() {
            let share = count as f64 / selected.max(1) as f64;
            push("decile", json!({"decile": decile + 1, "share": share}));
        }
        for (at, &stride) in STRIDES.iter().enumerate() {
            let ranks = &self.ranks[at][MIDDLE];
            let asked = TARGETS[MIDDLE] * k as f64;
            let squares = ranks.iter().map(|&rank| (rank as f64 - asked).powi(2));
            let phases = (rows * stride).max(1) as f64;
            push(
                "rank_error",
                json!({
                    "stride": stride, "rms": (squares.sum::<f64>() / ranks.len().max(1) as f64).sqrt(),
                    "exchangeable_rms": (self.exchangeable[at] / phases).sqrt(),
                    // A phase may hold fewer values than are asked for.
                    "found": ranks.len() as f64 / phases,
                }),
            );
        }
        lines
    }
}

/// Equation 8: the mean square of J - `asked`, where J is the rank in a row of `length` of the q-th
/// largest among `positions` drawn from it.
fn squared_error(length: usize, positions: usize, q: usize, asked: f64) -> f64 {
    let (l, n, q) = (length as f64, positions as f64, q as f64);
    let mean = q * (l + 1.0) / (n + 1.0);
    let variance = q * (n - q + 1.0) * (l + 1.0) * (l - n) / ((n + 1.0).powi(2) * (n + 2.0));
    variance + (mean - asked).powi(2)
}

fn quantiles<const N: usize>(values: &[usize], at: [f64; N]) -> Option<[usize; N]> {
    let mut sorted = values.to_vec();
    sorted.sort_unstable();
    let last = sorted.len().checked_sub(1)?;
    Some(at.map(|at| sorted[(last as f64 * at).round() as usize]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::{rngs::StdRng, seq::SliceRandom, SeedableRng};

    fn find<'a>(lines: &'a [Json], part: &str, key: &str, at: f64) -> &'a Json {
        let of = |line: &&Json| line["part"] == part && line[key].as_f64() == Some(at);
        lines.iter().find(of).unwrap()
    }

    #[test]
    fn a_descending_row_is_known_in_all_parts() {
        // Rank r lies at position r - 1 and has the value -r.
        let row: Vec<f32> = (1..=1000).map(|rank| -(rank as f32)).collect();
        let mut statistics = Statistics::new(100);
        statistics.add(&row).unwrap();
        let lines = statistics.lines();
        for (gaps, tail) in [(1.0, 101), (50.0, 150), (2e3, 1000)] {
            assert_eq!(find(&lines, "tail", "gaps", gaps)["median"], tail);
        }
        assert_eq!(find(&lines, "decile", "decile", 1.0)["share"], 1.0);
        assert_eq!(find(&lines, "decile", "decile", 2.0)["share"], 0.0);
        // The 7th of a stride of 16 has ranks 97 to 112, by the phase.
        let view = find(&lines, "view", "stride", 16.0);
        assert_eq!((&view["p5"], &view["p95"]), (&json!(98), &json!(111)));
        let error = find(&lines, "rank_error", "stride", 16.0);
        // The 10th: ranks 145 to 160, of which 150 is asked.
        let rms = (145..=160).map(|j| f64::from(j - 150).powi(2)).sum::<f64>() / 16.0;
        assert!((error["rms"].as_f64().unwrap() - rms.sqrt()).abs() < 1e-9);
    }

    #[test]
    fn exchangeable_rows_err_as_equation_8_says() {
        let mut rng = StdRng::seed_from_u64(rand::random());
        let mut statistics = Statistics::new(64);
        let mut row: Vec<f32> = (0..4096).map(|i| i as f32).collect();
        for _ in 0..200 {
            row.shuffle(&mut rng);
            statistics.add(&row).unwrap();
        }
        let lines = statistics.lines();
        for stride in [16.0, 32.0] {
            let line = find(&lines, "rank_error", "stride", stride);
            let ratio = line["rms"].as_f64().unwrap() / line["exchangeable_rms"].as_f64().unwrap();
            // Phases of a row depend on each other, so this is a rough test.
            assert!((0.85..1.15).contains(&ratio), "{ratio}");
            assert_eq!(line["found"], 1.0);
        }
    }

    #[test]
    fn ties_have_no_gap_and_short_rows_are_refused() {
        let mut statistics = Statistics::new(10);
        statistics.add(&[1.0; 40]).unwrap();
        let lines = statistics.lines();
        assert!(lines.iter().all(|line| line["part"] != "tail"));
        assert!(statistics.add(&[1.0; 39]).is_err());
        assert!(statistics.add(&[f32::NAN; 40]).is_err());
    }
}
