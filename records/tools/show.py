"""Verb `show`: summarize runs of one program, and test whether they prove a target.

    python records show POOL --target=3.28       is the mean loss below the target?
    python records show RUN --against POOL       is a run inside the band of others? Also during the run
    python records show RUN --baselines          next to the latest entry like it, and unigrams; after each `./run.sh`

A band contains 99 % of runs of the pool's kind, and takes five of them. --baselines needs numpy only.
"""
import argparse
import importlib.util
import math

from tools import record, report, statistics
from tools.files import counted, inside
from tools.read import Facts, Reading, Run, ToolError, read_runs
from tools.report import MACHINE, PARTLY, SOFTWARE, Side, clipped, listed, mixtures

FEWEST_IN_BAND = 5                     # fewest runs of a pool that make a band
SAME_RUN = "data_sha256", "val_tokens", "preset", "tokens"

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

def losses_by_step(run: Run) -> dict[int, float]:
    return {point.step: point.loss for point in run.val if point.step and math.isfinite(point.loss)}

def place(run: Run, pool: Side) -> Facts:
    """Compare a run with the band of a pool, at its last validation that enough of the pool have.

    If the pool has runs of the same program, these alone count. Returns what `show --against --json` prints.
    """
    others = [other for other in pool.runs if other.ends() != run.ends()]
    own = report.program(run)
    pool.runs = [other for other in others if report.program(other) == own] or others
    losses = losses_by_step(run)
    of_pool = [losses_by_step(other) for other in pool.runs]
    steps = [step for step in losses if sum(step in other for other in of_pool) >= FEWEST_IN_BAND]
    found = {"verdict": "undecided", "run": str(run.path), "pool_runs": len(pool.runs)}
    mixed = mixtures(pool)
    if mixed:
        found["reason"] = f"no run of the pool has the source and settings of this run, and {mixed[0]}"
    elif not steps:
        found["reason"] = f"no step of the run is in at least {FEWEST_IN_BAND} runs of the pool"
    else:
        step = max(steps)
        low, high = statistics.band([other[step] for other in of_pool if step in other])
        found |= {"step": step, "loss": losses[step], "low": low, "high": high}
        found["verdict"] = "inside" if low <= losses[step] <= high else "outside"
        found["reason"] = (f"loss {losses[step]:.4f} at step {step}; 99 % of runs like the "
                           f"{len(of_pool)} of the pool have {low:.4f} to {high:.4f}")
    found["differs"] = report.differing(pool, Side("run", [run], [], Reading([run]), 1))
    return found | {"notes": [*run.notes, *mixed]}

def entry_beside(run: Run) -> tuple[str, list[Run]]:
    """Return the latest entry with the preset, data and number of tokens of a run in words, and its runs."""
    for entry in reversed(record.entries_of(record.RECORDS)):
        stated = entry["stated"]
        if any(entry["machine"].get(key) != report.fact(run, key) for key in SAME_RUN):
            continue
        folder = inside(record.RECORDS, record.folder_name(entry))
        pool = record.read_group(folder, stated, stated["main"])
        of_pool = statistics.summary(pool.losses())
        spread = f"{min(pool.losses()):.3f} to {max(pool.losses()):.3f}"
        return f"record {stated['number']} {of_pool.mean:.3f} ({spread}, {counted(of_pool.n, 'seed')})", pool.runs
    return "no record has this preset, these data and as many tokens", []

def main(parser: argparse.ArgumentParser, argv: list[str]) -> int:
    report.add_arguments(parser, "files or directories of one pool, or of one run")
    parser.add_argument("--against", nargs="+", default=[], metavar="POOL", help="runs whose band may contain PATH")
    parser.add_argument("--baselines", action="store_true", help="compare also with a record of the same data")
    args = parser.parse_args(argv[1:])
    if args.against:
        runs = read_runs(args.paths).runs
        if len(runs) != 1:
            raise ToolError(f"{listed(args.paths)} has {counted(len(runs), 'run')}: --against takes one run")
        pool = report.side_of("pool", args.against)
        found = place(runs[0], pool)
        return report.finish(found, report.in_words(found), {"pool": pool.runs, "run": runs}, args)
    side = report.side_of("runs", args.paths)
    found = show(side, args.target)
    groups = {side.name: side.runs}
    lines = [f"machine: {listed(found['machine'], 5) or 'unknown'}"]
    if args.baselines and side.losses():
        words, others = entry_beside(side.runs[0])
        entropy = report.fact(side.runs[0], "unigram_nats")
        unigrams = f"unigram entropy {entropy:.3f}, " if entropy else ""
        found["baselines"] = f"{unigrams}{words}"
        lines.append(f"for comparison, nats per token: {found['baselines']}")
        groups = {words.partition(" (")[0]: others} | groups
    return report.finish(found, report.in_words(found, [found], lines), groups, args)
