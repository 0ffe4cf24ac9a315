//! Tables and plots from what the benches measured.
//!
//! ```bash
//! cargo run --release --example report                 # all tables as Markdown; plots beside the results
//! cargo run --release --example report -- --readme     # rewrites the README's tables
//! cargo run --release --example report -- --check      # fails where the README's are not up to date
//! ```
//!
//! Reads `*.jsonl` of a folder (`benches/results/h200` if none is given), one JSON object a line as
//! the benches and `examples/generate` print them, and `peers.json`, what others take on the same
//! device. No table mixes revisions: of several runs it shows the latest. Where a summary of
//! run-gpu.sh of the same revision (`*.txt`) lies beside it, the driver is taken from that.

mod ablations;
mod attention;
mod kernels;
mod lines;
mod plot;
mod readme;
mod scores;
mod selection;
mod serving;
mod text;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Parser;

#[derive(Parser)]
struct Args {
    /// The folder of the results
    #[arg(default_value = "benches/results/h200")]
    results: PathBuf,

    /// Where the plots go [default: plots in the folder of the results]
    #[arg(long, value_name = "FOLDER")]
    plots: Option<PathBuf>,

    /// Rewrite what lies between the README's results markers, and nothing else
    #[arg(long)]
    readme: bool,

    /// Only say whether the README is up to date
    #[arg(long, conflicts_with = "readme")]
    check: bool,
}

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("error: {e:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<()> {
    let results = lines::Results::read(&args.results)?;
    let peers = kernels::Peers::read(&args.results)?;
    if args.readme || args.check {
        return readme::update("README.md".as_ref(), &results, &peers, args.check);
    }
    let folder = args.plots.clone().unwrap_or(args.results.join("plots"));
    std::fs::create_dir_all(&folder)
        .with_context(|| format!("cannot make the folder {}", folder.display()))?;
    let (mut out, mut files) = (Vec::new(), Vec::new());
    if let Some(run) = kernels::latest(&results) {
        out.extend(["## Device times".to_string(), String::new()]);
        out.extend([format!("{}.", run.source()), String::new()]);
        if let Some(empty) = results.latest(|l| l.is("empty_graph")) {
            let us = empty.lines.last().and_then(|l| l.number("us"));
            let us = text::optional(us, text::number);
            out.push(format!(
                "A replay of an empty graph takes {us} us, which is part of every time."
            ));
            out.push(String::new());
        }
        out.extend(["### Bars".to_string(), String::new()]);
        out.extend(kernels::bars(&run, &peers)?);
        out.push(String::new());
        out.extend(
            peers
                .peers
                .iter()
                .filter_map(|peer| peer.table(&run))
                .flatten(),
        );
        out.extend(kernels::workspace(&run));
        out.extend(kernels::grid(&run));
        files.extend(plot::draw(&run, &peers, &folder)?);
    }
    if let Some(run) = selection::latest(&results) {
        out.extend(["## Selection".to_string(), String::new()]);
        out.extend([format!("{}.", run.source()), String::new()]);
        out.extend(["### Bars of selection".to_string(), String::new()]);
        out.extend(selection::bars(&run, &peers.selection));
        out.push(String::new());
        out.extend(selection::against(&run, &peers.selection));
        out.extend(selection::grid(&run));
        out.extend(selection::kinds(&run));
    }
    out.extend(selection::traces(&results));
    out.extend(ablations::ablations(&results));
    out.extend(ablations::crossover(&results));
    out.extend(scores::statistics(&results));
    out.extend(attention::tables(&results));
    let mut plots = plot::Plots::new(&folder);
    selection::draw(&results, &peers.selection, &mut plots)?;
    ablations::draw(&results, &mut plots)?;
    scores::draw(&results, &mut plots)?;
    attention::draw(&results, &mut plots)?;
    files.extend(plots.files);
    for file in files {
        eprintln!("drawn: {}", file.display());
    }
    out.extend(kernels::ablation(&results));
    out.extend(serving::hit_rates(&results));
    out.extend(serving::throughput(&results));
    out.extend(serving::latency(&results));
    if out.is_empty() {
        out.push("Not measured.".to_string());
    }
    println!("{}", out.join("\n").trim_end());
    Ok(())
}
