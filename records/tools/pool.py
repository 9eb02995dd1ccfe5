"""Verbs `show` and `place`: what one pool of runs says, and whether one more run belongs to it.

    python records show PATH... [--target=3.28]       numbers of a pool, outliers, drift, what an entry needs
    python records place RUN POOL...                  is my run inside the band of that pool, in loss and in time

`place` takes a run that is still going: it is judged as far as it has come. The band is where one more run of the same
kind lies with 99 % chance, for all its points together; the pool's seeds make the band of the losses, all its runs that
of the times. Seconds since the previous point tell where time is lost.

Exit status of show: 0 the target is proven, or there is none; 6 no record; 7 undecided; 8 the pool is mixed.
Exit status of place: 0 inside, 9 outside, 7 undecided. Of both: 2 bad input."""
from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tools import compare, logs, verdict
from tools.logs import Run, ToolError
from tools.sides import KIND, MACHINE, SOFTWARE, Choice, Side, cut, expanded, hash_or_text, machine_of, short, shown
from tools.sides import side_of
from tools.timing import Timed, rentals_of
from tools.verdict import mean, summary

OUTSIDE = 9                        # exit status
FEWEST = 3                         # runs of a pool that make a band
SHOWN_POINTS = 24                  # rows of a table: the last ones are the ones that matter


# ---- show -----------------------------------------------------------------------------------------------------------

def show(side: Side, target: float | None = None) -> dict[str, Any]:
    """All that `show --json` prints: times in s, losses in nats per token."""
    target = compare.target_of(side, side, target)
    mixed = compare.mixtures(side) + compare.mixed_kinds(side)
    found = compare.facts(side, target) | {"target": target, "mixed": mixed, "kinds": kinds(side)}
    found["machine"] = {key: side.values(key) for key in (*KIND, *SOFTWARE, *MACHINE) if side.values(key)}
    found["loss_band"] = verdict.band(side.losses())
    found["time_band"] = verdict.band(side.times)
    found["outliers"] = outliers(side)
    found["drift"] = drift(side)
    found["groups"] = verdict.modes(side.times)
    found["proven_at"] = proven_at(side, target) if target else []
    word = word_of_pool(side, target, mixed)
    return found | {"verdict": word.word, "reason": word.reason}


def kinds(side: Side) -> list[dict[str, Any]]:
    """What may be chosen by --source and --steps."""
    found: Counter = Counter()
    for run in side.runs:
        found[hash_or_text(run.facts.get("source_sha256") or "not known"), run.final.step, run.total] += 1
    return [{"source": source, "end": end, "planned": planned, "runs": n}
            for (source, end, planned), n in found.most_common()]


def outliers(side: Side) -> list[str]:
    """Runs whose loss or time is not of the others' kind. They count all the same: the tail of a pool is part of it."""
    found = []
    seeds = side.seeds()
    losses = [mean(run.loss for run in same) for same in seeds]
    if all(map(math.isfinite, losses)):
        for place in verdict.outliers(losses):
            found.append(f"{shown(seeds[place][0].path)}: loss {losses[place]:.5f}")
    for place in verdict.outliers(side.times):
        found.append(f"{shown(side.timed[place].path)}: {side.times[place]:.3f} s")
    return found


def in_one_rental(runs: Sequence[Run]) -> bool:
    timed = [Timed(run.seconds, None, run.started, machine_of(run)) for run in runs]
    rentals = set(rentals_of(timed))
    return len(rentals) == 1 and None not in rentals


def drift(side: Side) -> dict[str, Any] | None:
    """Of the times, as a share of their mean a run; None where the order in time, or that it is one rental, is not
    said."""
    if not side.timed or not in_one_rental(side.timed):
        return None
    by_clock = sorted(side.timed, key=lambda run: run.started)
    found = verdict.drift_of([run.seconds for run in by_clock])
    return {"share": found.mean / mean(side.times), "p": found.p}


def proven_at(side: Side, target: float) -> list[dict[str, Any]]:
    """Validations that all seeds have and at which they prove the target."""
    tables = [compare.validation_table(same[0]) for same in side.seeds()]
    found = []
    for step in sorted(set.intersection(*map(set, tables))):
        losses = [table[step] for table in tables]
        p = verdict.one_sample(losses, target)
        if p < verdict.ALPHA:
            found.append({"step": step, "mean": mean(losses), "p": p})
    return found


def word_of_pool(side: Side, target: float | None, mixed: list[str]) -> verdict.Verdict:
    if mixed:
        return verdict.Verdict("not comparable", mixed[0])
    diverged = compare.divergences(side, side)
    if diverged:
        return verdict.Verdict("undecided", diverged[0])
    if not target:
        return verdict.Verdict("no target", "none was named, and the logs state none")
    found = compare.proof(side, target)
    if math.isnan(found.mean):
        return verdict.Verdict("undecided", "the losses are not said")
    if not found.mean < target:
        return verdict.Verdict("no record", f"the mean loss of {found.mean:.5f} is not below the target of {target:g}")
    if found.p < verdict.ALPHA:
        return verdict.Verdict("proven", f"the mean loss of {found.mean:.5f} is below {target:g}, p {found.p:.2g}")
    return verdict.Verdict("undecided", f"the mean loss of {found.mean:.5f} is below {target:g}, not proven: p "
                                        f"{found.p:.2g} is not below {verdict.ALPHA:g}")


def show_in_words(found: dict[str, Any]) -> str:
    lines = compare.side_in_words("pool", found)
    lines += compare.table({"": found}, found["target"])
    if len(found["kinds"]) > 1:
        lines += [f"   {kind['runs']} runs of source {kind['source']}, end at step {kind['end']} of {kind['planned']}"
                  for kind in found["kinds"]]
    nats = numbers(found["loss_band"], ".5f", "nats")
    seconds = numbers(found["time_band"], ".3f", "s")
    lines.append(f"one more run lies, with 99 % chance, between {nats}, and between {seconds}")
    lines.append(f"outliers: {short(found['outliers']) or 'none'}")
    lines.append(f"drift of the times: {drift_in_words(found['drift'])}")
    if found["groups"]:
        sizes = ", ".join(f"{len(xs)} near {mean(xs):.5g} s" for xs in found["groups"])
        lines.append(f"times fall in two groups: {sizes}")
    machine = short(f"{key} {cut(values)}" for key, values in found["machine"].items())
    lines.append(f"machine: {machine or 'not said'}")
    if found["target"]:
        lines += needs_in_words(found)
    lines.append(f"verdict: {found['verdict']}: {found['reason']}")
    return "\n".join(lines)


def numbers(band: tuple[float, float], form: str, unit: str) -> str:
    if not math.isfinite(band[0]):
        return f"- and - {unit}"
    return f"{band[0]:{form}} and {band[1]:{form}} {unit}"


def drift_in_words(found: dict[str, Any] | None) -> str:
    if found is None:
        return "not judged (logs do not say that it was one machine in one go, and in which order)"
    if math.isnan(found["share"]):
        return "not judged (fewer than three times)"
    surely = "surely" if found["p"] < verdict.ALPHA else "not surely"
    return f"{found['share']:+.3%} a run, {surely} one (p {found['p']:.2g})"


def needs_in_words(found: dict[str, Any]) -> list[str]:
    """What an entry needs, and has."""
    lines = []
    needed = found["runs_for_target"]
    have = found["loss"].n
    if needed is None:
        lines.append("an entry needs a mean below the target; no number of such runs is likely to prove it")
    else:
        more = max(0, needed - have)
        lines.append(f"an entry needs p < {verdict.ALPHA:g}: at this mean and spread {needed} seeds reach it four "
                     f"times of five ({have} here, {more} more)")
    if found["proven_at"]:
        steps = ", ".join(f"{point['step']} (p {point['p']:.2g})" for point in found["proven_at"][:3])
        lines.append(f"first validations at which the target is proven: {steps}; to stop there is to be decided before "
                     "new runs")
    lines.append("and, for a claim on time: its parent, run in turn with it on one machine (python records bench)")
    return lines


# ---- place ----------------------------------------------------------------------------------------------------------

class Placed(NamedTuple):
    """One number of a run beside those of a pool."""
    step: int
    value: float
    mean: float                    # of the pool
    low: float                     # the band
    high: float
    n: int                         # of the pool

    @property
    def inside(self) -> bool:
        return self.low <= self.value <= self.high


def placed(values: dict[int, float], pool: Sequence[dict[int, float]], level: float) -> list[Placed]:
    """By step, where at least FEWEST of the pool have a value; level: of each band."""
    found = []
    for step in sorted(values):
        others = [of_run[step] for of_run in pool if step in of_run]
        others = [x for x in others if math.isfinite(x)]
        if len(others) < FEWEST:
            continue
        low, high = verdict.band(others, level)
        found.append(Placed(step, values[step], mean(others), low, high, len(others)))
    return found


def judged(values: dict[int, float], pool: Sequence[dict[int, float]]) -> list[Placed]:
    """With the level shared among the points that the pool can judge."""
    points = placed(values, pool, verdict.ALPHA)
    return placed(values, pool, verdict.ALPHA / max(1, len(points)))


def validation_seconds(run: Run) -> dict[int, float]:
    """By step, with the last training line where that is later: of a run that is still going."""
    if run.void:
        return {}
    seconds = {point.step: point.seconds for point in run.val if point.seconds is not None}
    timed = [(step, time) for step, time, _ in run.steps if time is not None]
    if timed and timed[-1][0] > max(seconds, default=-1):
        seconds[timed[-1][0]] = timed[-1][1]
    return seconds


def all_seconds(run: Run) -> dict[int, float]:
    """By step; a validation's time is the official one."""
    if run.void:
        return {}
    seconds = {step: time for step, time, _ in run.steps if time is not None}
    return seconds | {point.step: point.seconds for point in run.val if point.seconds is not None}


def place(run: Run, pool: Side) -> dict[str, Any]:
    """All that `place --json` prints."""
    of_seeds = [compare.validation_table(same[0]) for same in pool.seeds()]
    losses = judged(compare.validation_table(run), of_seeds)
    times = judged(validation_seconds(run), [all_seconds(other) for other in pool.runs])
    notes = notes_on(run, pool)
    word = word_of_place(run, losses, times)
    return {
        "verdict": word.word, "reason": word.reason, "run": shown(run.path), "seed": run.seed,
        "finished": run.finished, "pool": list(map(shown, pool.paths)), "pool_runs": len(pool.runs),
        "losses": losses, "times": times, "lost": lost(times), "notes": notes,
        "environment": differences_of_facts(run, pool),
    }


def lost(times: Sequence[Placed]) -> list[dict[str, float]]:
    """Seconds more than the pool's mean, between one point and the next."""
    found = []
    before = 0.0
    last = 0
    for point in times:
        behind = point.value - point.mean
        found.append({"from_step": last, "to_step": point.step, "seconds": behind - before})
        before = behind
        last = point.step
    return found


def notes_on(run: Run, pool: Side) -> list[str]:
    notes = list(run.notes)
    if run.refused or run.void or run.aborted is not None:
        notes.append(f"of the run: {run.refused or run.void or 'aborted: ' + run.aborted}")
    totals = {other.total for other in pool.runs}
    if totals != {run.total}:
        planned = ", ".join(map(str, sorted(totals, key=str)))
        notes.append(f"the run is planned for {run.total} steps, the pool for {planned}: losses before the end are of "
                     "other schedules")
    if len(pool.seeds()) < FEWEST:
        notes.append(f"the pool has {len(pool.seeds())} seeds: a band takes {FEWEST}")
    return notes + compare.mixtures(pool) + compare.mixed_kinds(pool)


def differences_of_facts(run: Run, pool: Side) -> dict[str, tuple[list[str], list[str]]]:
    """What the run says of its machine, software, source and settings, and the pool does not."""
    alone = Side("run", [run.path], logs.Reading([], [], []), runs=[run])
    return compare.unequal(pool, alone, [*compare.ENVIRONMENT, *compare.settings_of(pool, alone)])


def word_of_place(run: Run, losses: Sequence[Placed], times: Sequence[Placed]) -> verdict.Verdict:
    if not losses and not times:
        return verdict.Verdict("undecided", f"no step of the run is one of at least {FEWEST} runs of the pool")
    left = []
    for name, points, form in (("loss", losses, "+.5f"), ("time", times, "+.3f")):
        away = [point for point in points if not point.inside]
        if away:
            unit = "nats" if name == "loss" else "s"
            behind = away[-1].value - away[-1].mean
            left.append(f"{name} leaves the band at step {away[0].step}; at step {away[-1].step} it is {behind:{form}} "
                        f"{unit} off the mean")
    if left:
        return verdict.Verdict("outside", "; ".join(left))
    reached = max(point.step for point in (*losses, *times))
    untimed = "" if times else "; no time can be judged"
    unfinished = "" if run.finished else f", as far as it has come (step {reached})"
    return verdict.Verdict("inside", f"every loss and time lies in its band{unfinished}{untimed}")


def place_in_words(found: dict[str, Any]) -> str:
    lines = [f"run {found['run']}, beside {found['pool_runs']} runs of {compare.paths_in_words(found['pool'])}"]
    lines += table_of("loss", found["losses"], ".5f")
    lines += table_of("time s", found["times"], ".3f", found["lost"])
    lines += [f"note: {note}" for note in found["notes"]]
    changes = (f"{name} {cut(one)} -> {cut(other)}" for name, (one, other) in found["environment"].items())
    lines.append(f"the run differs from the pool in: {short(changes) or 'nothing known'}")
    worst = max(found["lost"], key=lambda part: abs(part["seconds"]), default=None)
    if worst and any(not point.inside for point in found["times"]):
        lines.append(f"most of the time is lost between steps {worst['from_step']} and {worst['to_step']}: "
                     f"{worst['seconds']:+.3f} s")
    lines.append(f"verdict: {found['verdict']}: {found['reason']}")
    return "\n".join(lines)


def table_of(name: str, points: Sequence[Placed], form: str, parts: Sequence[dict[str, float]] = ()) -> list[str]:
    if not points:
        return [f"{name}: no step that the pool can judge"]
    rows = []
    for point in points:
        cells = [f"{x:{form}}" for x in (point.value, point.mean, point.low, point.high)]
        rows.append([str(point.step), *cells, where(point)])
    for row, part in zip(rows, parts):
        row.append(f"{part['seconds']:+{form}}")
    head = ["step", f"{name} of run", "pool", "from", "to", ""]
    if parts:
        head.append("since last")
    return compare.aligned([head, *rows[-SHOWN_POINTS:]])


def where(point: Placed) -> str:
    if point.inside:
        return ""
    return "below" if point.value < point.low else "ABOVE"


# ---- The commands ---------------------------------------------------------------------------------------------------

def parser_of(verb: str, usage: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(f"python records {verb}", description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter, usage=usage)
    parser.add_argument("paths", nargs="+", metavar="PATH", help="files, directories (read to the bottom), 'patterns*'")
    parser.add_argument("--steps", type=int, metavar="N", help="runs that end at step N, else all up to there")
    parser.add_argument("--source", metavar="HASH", help="runs of this source")
    parser.add_argument("--exclude", action="append", default=[], metavar="PATTERN", help="paths to leave out")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    return parser


def choice_of(args: argparse.Namespace) -> Choice:
    return Choice(args.steps, args.source, tuple(args.exclude))


def printed(found: dict[str, Any], words: Callable[[dict[str, Any]], str], as_json: bool) -> None:
    print(json.dumps(compare.jsonable(found), indent=1) if as_json else words(found))


def main_show(argv: list[str]) -> int:
    parser = parser_of("show", "%(prog)s PATH... [settings]")
    parser.add_argument("--target", type=float, help="loss to reach, nats per token; default: target_loss of the logs")
    args = parser.parse_args(argv)
    compare.refuse_wrong(target=args.target)
    found = show(side_of("pool", expanded(args.paths), choice_of(args)), args.target)
    printed(found, show_in_words, args.json)
    return verdict.STATUS.get(found["verdict"], 0)


def run_of(path: Path) -> Run:
    """The one run of a path, finished or not; of several in a file the last. Raises ToolError."""
    reading = logs.read([path])
    if not reading.runs:
        why = short(f"{shown(file)}: {reason}" for file, reason in reading.unread)
        raise ToolError(f"run {shown(path)}", why or "no file", "the log of one run", "give a log, or a run directory")
    return reading.runs[-1]


def main_place(argv: list[str]) -> int:
    args = parser_of("place", "%(prog)s RUN POOL... [settings]").parse_args(argv)
    run_path, *pool_paths = expanded(args.paths)
    if not pool_paths:
        raise ToolError("paths", shown(run_path), "a run and a pool", "python records place RUN POOL")
    run = run_of(run_path)
    pool = side_of("pool", pool_paths, choice_of(args))
    pool.runs = [other for other in pool.runs if logs.content(other) != logs.content(run)]     # not beside itself
    if not pool.runs:
        raise ToolError(f"pool {short(map(shown, pool_paths))}", "only the run itself", "other runs", "name others")
    found = place(run, pool)
    printed(found, place_in_words, args.json)
    return OUTSIDE if found["verdict"] == "outside" else verdict.STATUS.get(found["verdict"], 0)
