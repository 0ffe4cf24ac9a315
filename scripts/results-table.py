#!/usr/bin/env python3
"""Writes the README's tables from what the benches measured.

  scripts/results-table.py            rewrites what lies between the README's results markers
  scripts/results-table.py --check    only says whether it is up to date: exit status 1 if it is not

Reads benches/results/h200/*.jsonl, one JSON object a line as the benches and the generate example
print them; lines that are not objects are passed over, so that a program's whole output will do.
No table mixes revisions: of several runs it takes the latest. Where a summary of run-gpu.sh of the
same revision (*.txt) lies beside the file, the driver is taken from it.
"""

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
RESULTS = ROOT / "benches" / "results" / "h200"
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"

MODES = {
    "argmax": "`ArgMax`",
    "all": "`All`",
    "k50": "`TopK` 50",
    "p0.9": "`TopP` 0.9",
    "k50p0.9": "`TopKThenTopP` 50, 0.9",
}
GEMMA = "Gemma 3 270M, Q4_K_M"
# By the name in the line, which is the file's for a local one: it does not say what the weights are.
MODELS = {"smollm2": "SmolLM2-135M-Instruct, Q4_1", "gemma3": GEMMA, "gemma3-270m": GEMMA}
BATCH_CALLS = ["topk sample_batch", "topk sample_tensor"]
REQUIRED = {
    "sampler": ["sampler", "b", "v", "mode", "dist", "us"],
    "generate": ["model", "sampler", "mode", "tokens_per_s"],
}


class Run:
    """The lines of one kind that one file has of one revision and machine."""

    def __init__(self, path, revision, gpu):
        self.path, self.revision, self.gpu = path, revision, gpu
        self.date = ""
        self.lines = []

    def source(self):
        """Which file this is from, and what it was measured on and when."""
        machine = self.gpu
        driver = driver_of(self.revision)
        if driver:
            machine += f" (driver {driver})"
        short = self.revision.removesuffix("-dirty")[:12]
        changed = " with uncommitted changes" if self.revision.endswith("-dirty") else ""
        return f"`{self.path.relative_to(ROOT)}`: {machine}, revision `{short}`{changed}, {self.date}"


def read(path):
    """The JSON objects of a file that have an op."""
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not text.startswith("{"):
            continue
        try:
            line = json.loads(text)
        except ValueError as error:
            sys.exit(f"{path.relative_to(ROOT)}:{number}: {error}")
        if not isinstance(line, dict):
            continue
        missing = [key for key in REQUIRED.get(line.get("op"), []) if key not in line]
        if missing:
            sys.exit(f"{path.relative_to(ROOT)}:{number}: a line of op {line['op']!r} has no {', '.join(missing)}")
        yield line


def latest(wanted):
    """The latest run that has lines which `wanted` takes; None if there is none."""
    runs = {}
    for path in sorted(RESULTS.glob("*.jsonl")):
        for line in read(path):
            if not wanted(line):
                continue
            key = (path, line.get("rev", "unknown"), line.get("gpu", "unknown GPU"))
            run = runs.setdefault(key, Run(*key))
            run.lines.append(line)
            run.date = max(run.date, line.get("date", ""))
    # Of one day's runs the last one named.
    return max(reversed(list(runs.values())), key=lambda run: run.date, default=None)


def driver_of(revision):
    """From the head of a summary of run-gpu.sh: "revision R, run TIME", then "GPU, driver, memory"."""
    for path in sorted(RESULTS.glob("*.txt")):
        head = path.read_text(encoding="utf-8", errors="replace").splitlines()[:2]
        if len(head) == 2 and head[0].startswith(f"revision {revision},") and head[1].count(", ") == 2:
            return head[1].split(", ")[1]
    return None


def by_key(run, *keys):
    """One line a key: the last one where a file has several."""
    return {tuple(line.get(key) for key in keys): line for line in run.lines}


def table(head, rows):
    """A Markdown table: models and modes to the left, numbers to the right."""
    rule = ["---" if name in ("mode", "model") else "---:" for name in head]
    return ["| " + " | ".join(row) + " |" for row in [head, rule, *rows]]


def modes_of(found):
    known = list(MODES)
    return sorted(found, key=lambda mode: (known.index(mode) if mode in known else len(known), mode))


def number(value):
    return f"{value:.1f}" if value < 10 else f"{value:.0f}"


def ratio(value):
    return f"{value:.1f} x" if value < 100 else f"{value:.0f} x"


def drop_in():
    head = [
        "**One token, B = 1**: a call of `sample` on idle, ready f32 logits, host included, median, in us; "
        "temperature 0.8. 64 logits of the row stand out, so that top-p keeps few tokens."
    ]
    run = latest(lambda l: l.get("op") == "sampler" and l["b"] == 1 and l["sampler"] in ("candle", "topk"))
    if run is None:
        return head + ["", "Not measured."]
    cells = by_key(run, "dist", "v", "mode", "sampler")

    def pairs(dist):
        keys = {key[1:3] for key in cells if key[0] == dist}
        order = modes_of({mode for _, mode in keys})
        for v, mode in sorted(keys, key=lambda key: (key[0], order.index(key[1]))):
            both = [cells.get((dist, v, mode, sampler)) for sampler in ("candle", "topk")]
            if all(both):
                yield v, mode, both[0]["us"], both[1]["us"]

    rows = [
        [str(v), MODES.get(mode, mode), number(candle), number(ours), ratio(candle / ours)]
        for v, mode, candle, ours in pairs("peaked")
    ]
    out = head + ["", *table(["vocabulary", "mode", "Candle", "candle-topk", "ratio"], rows)]
    normal = list(pairs("normal"))
    if normal:
        least = min(candle / ours for _, _, candle, ours in normal)
        most = max(candle / ours for _, _, candle, ours in normal)
        text = "On flat (standard normal) logits, where `TopP` 0.9 keeps about half of the vocabulary: "
        text += f"{ratio(least)} to {ratio(most)}"
        at = [row for row in normal if row[1] == "p0.9"]
        if at:
            v, _, candle, ours = min(at, key=lambda row: abs(row[0] - 128256))
            text += f"; {MODES['p0.9']} at {v} takes {number(candle)} and {number(ours)} us"
        out += ["", text + "."]
    return out + ["", run.source() + "."]


def batches():
    head = [
        "**A batch**: `sample_batch`, which returns the tokens, and `sample_tensor`, which leaves them on the GPU "
        "(a run of calls, so launches overlap), in us a batch."
    ]
    run = latest(lambda l: l.get("op") == "sampler" and l["sampler"] in BATCH_CALLS and l["dist"] == "peaked")
    if run is None:
        return head + ["", "Not measured."]
    cells = by_key(run, "v", "b", "mode", "sampler")
    order = modes_of({mode for _, _, mode, _ in cells})
    rows = []
    for v, b in sorted({key[:2] for key in cells}):
        row = [str(v), str(b)]
        for mode in order:
            pair = [cells.get((v, b, mode, call)) for call in BATCH_CALLS]
            row.append(" / ".join(number(line["us"]) if line else "-" for line in pair))
        rows.append(row)
    names = [MODES.get(mode, mode) for mode in order]
    return head + ["", *table(["vocabulary", "B", *names], rows), "", run.source() + "."]


def generate():
    head = ["**A whole model**: `generate --compare`, batch 1, in tokens a second after the first; one run a row."]
    rows, sources = [], []
    models, alone = set(), {}
    for path in RESULTS.glob("*.jsonl"):
        models |= {line["model"] for line in read(path) if line.get("op") == "generate"}
    known = list(MODELS)
    for model in sorted(models, key=lambda m: (known.index(m) if m in known else len(known), m)):
        run = latest(lambda l: l.get("op") == "generate" and l["model"] == model)
        cells = by_key(run, "mode", "sampler")
        for mode in modes_of({mode for mode, _ in cells}):
            candle, ours, skip = (cells.get((mode, sampler), {}) for sampler in ("candle", "topk", "skip"))
            rate = [line.get("tokens_per_s") for line in (skip, candle, ours)]
            if rate[0]:
                alone.setdefault(MODELS.get(model, model), []).append(rate[0])
            spent = [line.get("sampler_us") for line in (candle, ours)]
            rows.append(
                [
                    MODELS.get(model, model),
                    MODES.get(mode, mode),
                    *(number(x) if x else "-" for x in rate),
                    ratio(rate[2] / rate[1]) if rate[1] and rate[2] else "-",
                    " / ".join(number(x) if x else "-" for x in spent),
                ]
            )
        if run.source() not in sources:
            sources.append(run.source())
    if not rows:
        return head + ["", "Not measured."]
    names = ["model", "mode", "no sampling", "Candle", "candle-topk", "ratio", "sampler, us: Candle / candle-topk"]
    out = head + ["", *table(names, rows)]
    spread = [f"{min(x):.0f} to {max(x):.0f} ({model})" for model, x in alone.items() if len(x) > 1]
    if spread:
        # The one column that repeats a measurement, and so the only word on the error of the others.
        out += [
            "",
            "The host bounds these rates, and they vary: *no sampling* is the same work in every row of a model and "
            f"came to {', '.join(spread)}. Ratios within that spread say nothing.",
        ]
    return out + ["", "; ".join(sources) + "."]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the README is not up to date")
    check = parser.parse_args().check

    text = README.read_text(encoding="utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        sys.exit(f"README.md: one {BEGIN} is needed, and one {END} after it")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    results = "\n\n".join("\n".join(part()) for part in (drop_in, batches, generate))
    new = f"{before}{BEGIN}\n{results}\n{END}{after}"
    if new == text:
        print("README.md is up to date")
    elif check:
        sys.exit("README.md does not show what benches/results/h200 holds: run scripts/results-table.py")
    else:
        README.write_text(new, encoding="utf-8")
        print("README.md rewritten")


if __name__ == "__main__":
    main()
