"""Verb `show`: summarize runs of one program, and test whether they prove a target.

    python records show POOL --target=3.28       is the mean loss below the target?
    python records show RUN --against POOL       is a run inside the band of others? Also during the run
    python records show RUN --baselines          next to the latest entry like it, and unigrams; after each `./run.sh`

A band contains 99 % of runs of the pool's kind, and takes five of them. --baselines needs numpy only.

Exit status: 0 proven, inside or no target; 6 no record; 7 not proven, partly proven, undecided; 8 not comparable;
9 outside; 2 invalid input.
"""
from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from pathlib import Path

from tools import record, report, statistics
from tools.files import counted, inside
from tools.read import Facts, Reading, Run, ToolError, read_runs
from tools.report import MACHINE, PARTLY, SOFTWARE, Side, clipped, listed, mixtures
from tools.statistics import ALPHA

FEWEST_IN_BAND = 5                     # fewest runs of a pool that make a band
SAME_RUN = "data_sha256", "val_tokens", "preset", "tokens"
UNITS = {"loss": "nats", "time": "s"}

def show(side: Side, target: float | None = None) -> Facts:
    """Summarize one pool; return what `show --json` prints."""
    mixed = mixtures(side)
    outcome = "no target", "--target is not given, and the logs state no target"
    if importlib.util.find_spec("scipy"):
        target = target or report.target_of(side)
    elif not target:
        outcome = "no target", "a test takes scipy: pip install -r records/requirements.txt"
    if mixed:
        outcome = "not comparable", mixed[0]
    elif target:
        outcome = report.proof(side, target)
        if outcome[0] == "proven" and report.missing(side):
            outcome = PARTLY, outcome[1]
    found = {"verdict": outcome[0], "reason": outcome[1], "target": target, **report.facts_of(side, target)}
    known = [key for key in (*MACHINE, *SOFTWARE) if side.values(key)]
    found["machine"] = [f"{key} {clipped(side.values(key))}" for key in known]
    return found | {"notes": [*report.notes_of(side), *mixed[1:]]}


# ---- The band of a pool ---------------------------------------------------------------------------------------------
def placed(values: dict[int, float], pool: Sequence[dict[int, float]]) -> Facts | None:
    """Compare a run with the band of a pool, at its last step that enough of the pool have; None without such a step.

    values, pool: values of the run, and of each run of the pool, by step.
    """
    steps = [step for step in values if sum(step in other for other in pool) >= FEWEST_IN_BAND]
    if not steps:
        return None
    step = max(steps)
    others = [other[step] for other in pool if step in other]
    low, high = statistics.band(others, ALPHA / 2)         # loss and time together have a level of 1 %
    return {"step": step, "value": values[step], "mean": statistics.summary(others).mean, "low": low, "high": high,
            "inside": low <= values[step] <= high}

def by_step(run: Run, what: str) -> dict[int, float]:
    """Return losses or seconds at validations by step; step 0 is before training."""
    if what == "loss":
        found = {point.step: point.loss for point in run.val}
    else:
        found = {point.step: point.seconds for point in run.val if not run.void}
    return {step: value for step, value in found.items() if step and value is not None and math.isfinite(value)}

def place(run: Run, pool: Side) -> Facts:
    """Compare the last loss and the last time of a run with a pool; return what `show --against --json` prints.

    If the pool has runs of the same program, these alone count.
    """
    side = Side("run", [run], [], Reading([run]), 1)
    others = [other for other in pool.runs if other.ends() != run.ends()]
    own = report.program(run)
    pool.runs = [other for other in others if report.program(other) == own] or others
    without_time = [*filter(None, [run.refused, report.apart(pool, side)])]         # why times are not compared
    points = {}
    for what in ("loss",) if without_time else UNITS:
        point = placed(by_step(run, what), [by_step(other, what) for other in pool.runs])
        if point:
            points[what] = point
    word = "undecided"
    reason = f"no step of the run is in at least {FEWEST_IN_BAND} runs of the pool"
    mixed = mixtures(pool)
    if mixed:
        reason = f"no run of the pool has the source and settings of this run, and {mixed[0]}"
    elif points:
        word = "inside" if all(point["inside"] for point in points.values()) else "outside"
        decisive = {what: point for what, point in points.items() if point["inside"] == (word == "inside")}
        reason = "; ".join(f"{what} at step {point['step']} is {point['value'] - point['mean']:+.4f} {UNITS[what]} off "
                           "the mean of the pool" for what, point in decisive.items())
    found = {"verdict": word, "reason": reason, "run": str(run.path), "reached": run.reached, **points}
    found |= {"pool_runs": len(pool.runs), "differs": report.differing(pool, side)}
    found["notes"] = [*(f"time is not compared: {why}" for why in without_time), *run.notes, *mixed]
    return found

def place_in_words(found: Facts) -> str:
    lines = [f"run {found['run']}, step {found['reached']}, compared with {counted(found['pool_runs'], 'run')}"]
    rows = [[name, *list(found[name].values())[:-1]] for name in UNITS if name in found]
    return report.in_words(found, more=[*lines, report.markdown(" | step | run | pool | from | to", rows)])


# ---- Baselines ------------------------------------------------------------------------------------------------------
def entry_beside(run: Run) -> tuple[str, list[Run]]:
    """Return the latest entry with the preset, data and number of tokens of a run in words, and its runs."""
    for entry in reversed(record.entries_of(record.RECORDS)):
        stated = entry["stated"]
        if any(entry["machine"].get(key) != record.value(run, key) for key in SAME_RUN):
            continue
        folder = inside(record.RECORDS, record.folder_name(entry))
        pool = record.read_group(folder, stated, stated["main"])
        n, mean, _ = statistics.summary(pool.losses())
        spread = f"{min(pool.losses()):.3f} to {max(pool.losses()):.3f}"
        return f"record {stated['number']} {mean:.3f} ({spread}, {counted(n, 'seed')})", pool.runs
    return "no record has this preset, these data and as many tokens", []

def main(argv: list[str]) -> int:
    """Run `show`; return the exit status. argv: the verb and its arguments."""
    parser = report.make_parser("show", "files or directories of one pool, or of one run", __doc__)
    parser.add_argument("--against", nargs="+", default=[], metavar="POOL", help="runs whose band may contain PATH")
    parser.add_argument("--baselines", action="store_true", help="compare also with a record of the same data")
    args = parser.parse_args(argv[1:])
    if args.against:
        runs = read_runs(map(Path, args.paths)).runs
        if len(runs) != 1:
            raise ToolError(f"{listed(args.paths)} has {counted(len(runs), 'run')}: --against takes one run")
        pool = report.side_of("pool", args.against)
        found = place(runs[0], pool)
        return report.finish(found, place_in_words(found), {"pool": pool.runs, "run": runs}, args)
    side = report.side_of("runs", args.paths)
    found = show(side, args.target)
    groups = {side.name: side.runs}
    lines = [f"machine: {listed(found['machine'], 5) or 'unknown'}"]
    if args.baselines and side.losses():
        words, others = entry_beside(side.runs[0])
        entropy = record.value(side.runs[0], "unigram_nats")
        unigrams = f"unigram entropy {entropy:.3f}, " if entropy else ""
        found["baselines"] = f"{unigrams}{words}"
        lines.append(f"for comparison, nats per token: {found['baselines']}")
        groups = {words.partition(" (")[0]: others} | groups
    return report.finish(found, report.in_words(found, [found], lines), groups, args)
