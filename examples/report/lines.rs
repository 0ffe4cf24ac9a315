//! What the benches printed: JSON objects, one a line.

use std::path::{Path, PathBuf};

use anyhow::{bail, Context, Result};
use serde_json::Value;

/// The keys that a line of an op must have.
const REQUIRED: &[(&str, &[&str])] = &[
    ("sampler", &["sampler", "b", "v", "mode", "dist", "us"]),
    (
        "generate",
        &["model", "sampler", "b", "mode", "tokens_per_s"],
    ),
    ("mask", KERNEL),
    ("candidates", KERNEL),
    ("sample", KERNEL),
    ("hit_rates", &["model", "mode", "positions", "hit_rate"]),
    (
        "topk",
        &[
            "m",
            "n",
            "k",
            "lens",
            "dist",
            "dtype",
            "order",
            "values",
            "us",
            "read_floor_us",
            "exact",
        ],
    ),
    ("score_statistics", &["part", "k", "rows"]),
    ("indexer_scores", ATTENTION),
    ("index_topk", ATTENTION),
    ("sparse_attention", ATTENTION),
    (
        "layer",
        &[
            "model",
            "phase",
            "b",
            "s",
            "t",
            "us",
            "parts_us",
            "over_parts",
        ],
    ),
    (
        "perplexity",
        &[
            "model",
            "mode",
            "dtype",
            "k",
            "t",
            "perplexity",
            "over_dense",
        ],
    ),
];
const ATTENTION: &[&str] = &["phase", "s", "t", "h", "dtype", "us", "exact"];
const KERNEL: &[&str] = &[
    "b",
    "v",
    "mode",
    "dist",
    "dtype",
    "us",
    "read_floor_us",
    "copy_floor_us",
];

#[derive(Clone, Debug)]
pub struct Line {
    value: Value,
    file: PathBuf,
}

impl Line {
    /// Empty where there is none.
    pub fn text(&self, key: &str) -> &str {
        self.value[key].as_str().unwrap_or_default()
    }

    pub fn number(&self, key: &str) -> Option<f64> {
        self.value[key].as_f64()
    }

    /// 0 where there is none.
    pub fn int(&self, key: &str) -> u64 {
        self.value[key].as_u64().unwrap_or(0)
    }

    pub fn flag(&self, key: &str) -> bool {
        self.value[key].as_bool().unwrap_or(false)
    }

    pub fn has(&self, key: &str) -> bool {
        !self.value[key].is_null()
    }

    pub fn is(&self, op: &str) -> bool {
        self.text("op") == op
    }

    #[cfg(test)]
    fn of(value: Value) -> Self {
        Self {
            value,
            file: PathBuf::from("test.jsonl"),
        }
    }
}

/// All lines of a folder's `*.jsonl`, by the names of the files, and what its summaries say.
#[derive(Debug, Default)]
pub struct Results {
    pub lines: Vec<Line>,
    /// Revisions and the driver that they ran with.
    drivers: Vec<(String, String)>,
}

/// The lines of one kind that one file has of one revision and machine.
#[derive(Debug)]
pub struct Run<'a> {
    file: &'a Path,
    revision: &'a str,
    gpu: &'a str,
    driver: Option<&'a str>,
    date: &'a str,
    pub lines: Vec<&'a Line>,
}

impl Results {
    #[cfg(test)]
    pub fn of(lines: &[Value]) -> Self {
        Self {
            lines: lines.iter().cloned().map(Line::of).collect(),
            drivers: Vec::new(),
        }
    }

    pub fn read(folder: &Path) -> Result<Self> {
        let mut results = Self::default();
        let entries = std::fs::read_dir(folder)
            .with_context(|| format!("cannot read the folder {}", folder.display()))?;
        let mut files = Vec::new();
        for entry in entries {
            files.push(entry?.path());
        }
        files.sort();
        for file in files {
            let extension = file.extension().and_then(|e| e.to_str());
            if !matches!(extension, Some("jsonl" | "txt")) {
                continue;
            }
            let bytes =
                std::fs::read(&file).with_context(|| format!("cannot read {}", file.display()))?;
            let text = String::from_utf8_lossy(&bytes);
            if extension == Some("jsonl") {
                results.add(&file, &text)?;
            } else {
                results.drivers.extend(driver(&text));
            }
        }
        Ok(results)
    }

    /// Lines that are no objects with an op are passed over: a program's whole output will do.
    pub fn add(&mut self, file: &Path, text: &str) -> Result<()> {
        for (number, text) in text.lines().enumerate() {
            if !text.starts_with('{') {
                continue;
            }
            let at = || format!("{}:{}", file.display(), number + 1);
            let value: Value =
                serde_json::from_str(text).with_context(|| format!("{}: no JSON", at()))?;
            let Some(op) = value["op"].as_str() else {
                continue;
            };
            let required = REQUIRED.iter().find(|(of, _)| *of == op);
            let keys = required.map_or(&[][..], |(_, keys)| keys);
            let missing: Vec<_> = keys.iter().filter(|k| value.get(**k).is_none()).collect();
            if !missing.is_empty() {
                bail!("{}: a line of op {op:?} has no {missing:?}", at())
            }
            let file = file.to_path_buf();
            self.lines.push(Line { value, file });
        }
        Ok(())
    }

    /// The latest run that has lines which `wanted` takes. No table mixes revisions; of one day's
    /// runs the last one counts.
    pub fn latest(&self, wanted: impl Fn(&Line) -> bool) -> Option<Run<'_>> {
        let mut runs: Vec<Run> = Vec::new();
        for line in self.lines.iter().filter(|line| wanted(line)) {
            let key = (
                line.file.as_path(),
                Some(line.text("rev"))
                    .filter(|rev| !rev.is_empty())
                    .unwrap_or("unknown"),
                Some(line.text("gpu"))
                    .filter(|gpu| !gpu.is_empty())
                    .unwrap_or("unknown GPU"),
            );
            let known = runs
                .iter()
                .position(|run| (run.file, run.revision, run.gpu) == key);
            let at = known.unwrap_or_else(|| {
                runs.push(Run {
                    file: key.0,
                    revision: key.1,
                    gpu: key.2,
                    driver: self.driver_of(key.1),
                    date: "",
                    lines: Vec::new(),
                });
                runs.len() - 1
            });
            runs[at].date = runs[at].date.max(line.text("date"));
            runs[at].lines.push(line);
        }
        // The last of equals.
        runs.into_iter().max_by_key(|run| run.date)
    }

    fn driver_of(&self, revision: &str) -> Option<&str> {
        let found = self.drivers.iter().find(|(of, _)| of == revision);
        found.map(|(_, driver)| driver.as_str())
    }
}

/// From the head of a summary of run-gpu.sh: "revision R, run TIME", then "GPU, driver, memory".
fn driver(summary: &str) -> Option<(String, String)> {
    let mut lines = summary.lines();
    let (revision, _) = lines.next()?.strip_prefix("revision ")?.split_once(',')?;
    let machine: Vec<_> = lines.next()?.split(", ").collect();
    match machine[..] {
        [_, driver, _] => Some((revision.to_string(), driver.to_string())),
        _ => None,
    }
}

impl<'a> Run<'a> {
    /// Which file this is from, and what it was measured on and when.
    pub fn source(&self) -> String {
        let short = self.revision.strip_suffix("-dirty");
        let changed = match short {
            Some(_) => " with uncommitted changes",
            None => "",
        };
        let short = short.unwrap_or(self.revision);
        let driver = match self.driver {
            Some(driver) => format!(" (driver {driver})"),
            None => String::new(),
        };
        format!(
            "`{}`: {}{driver}, revision `{}`{changed}, {}",
            self.file.display(),
            self.gpu,
            short.get(..12).unwrap_or(short),
            self.date
        )
    }

    /// The line with these properties: the last one where a file has several.
    pub fn line(&self, wanted: impl Fn(&Line) -> bool) -> Option<&'a Line> {
        self.lines.iter().rev().find(|line| wanted(line)).copied()
    }

    /// What occurs, ascending.
    pub fn all<K: Ord>(&self, key: impl Fn(&'a Line) -> K) -> Vec<K> {
        let mut keys: Vec<K> = self.lines.iter().map(|line| key(line)).collect();
        keys.sort();
        keys.dedup();
        keys
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn results(text: &str) -> Result<Results> {
        let mut results = Results::default();
        results.add(Path::new("a.jsonl"), text)?;
        Ok(results)
    }

    #[test]
    fn what_is_no_line_of_an_op_is_passed_over_and_what_is_broken_is_named() {
        let ok = "running\n{\"op\":\"other\",\"us\":3}\n{\"x\":1}\n";
        assert_eq!(results(ok).unwrap().lines.len(), 1);
        let error = format!("{:#}", results("\n{\"op\":").unwrap_err());
        assert!(error.starts_with("a.jsonl:2: no JSON"), "{error}");
        let error = results("{\"op\":\"hit_rates\",\"mode\":\"k50\"}").unwrap_err();
        assert!(error.to_string().contains("\"model\""), "{error}");
    }

    #[test]
    fn the_latest_run_counts_and_of_a_day_the_last() {
        let line = |rev: &str, date: &str, us: u64| {
            format!("{{\"op\":\"x\",\"rev\":\"{rev}\",\"date\":\"{date}\",\"us\":{us}}}\n")
        };
        let text = [
            line("a", "2026-01-02", 1),
            line("b", "2026-01-02", 2),
            line("c", "2026-01-01", 3),
            line("b", "2026-01-01", 4),
        ]
        .concat();
        let results = results(&text).unwrap();
        let run = results.latest(|line| line.is("x")).unwrap();
        assert_eq!(run.all(|line| line.int("us")), [2, 4]);
        assert_eq!(run.line(|_| true).unwrap().int("us"), 4);
        assert_eq!(
            run.source(),
            "`a.jsonl`: unknown GPU, revision `b`, 2026-01-02"
        );
        assert!(results.latest(|line| line.is("y")).is_none());
    }

    #[test]
    fn a_driver_is_taken_from_a_summary_of_the_revision() {
        let summary = "revision abc-dirty, run 2026\nNVIDIA H200, 580.1, 143771 MiB\n";
        let found = driver(summary).unwrap();
        assert_eq!(found, ("abc-dirty".to_string(), "580.1".to_string()));
        assert_eq!(
            driver("revision abc, run 2026\nnvidia-smi shows no GPU\n"),
            None
        );
    }
}
