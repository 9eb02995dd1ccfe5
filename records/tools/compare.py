"""Verb `compare`: is B faster than A, at the same loss? From logs of this trainer or of its relatives.

    python records compare A B                            files, directories (read to the bottom), or 'patterns*'
    python records compare A1 A2 --against B1 B2          several of them for a side
A manifest.jsonl of `bench` above the runs tells which were measured in pairs. The rule of the verdict is in verdict.py,
which times are trusted in timing.py.

Exit status: 0 faster, 3 slower, 4 same, 5 same program, 6 no record, 7 undecided, 8 not comparable; 2 bad input."""
from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tools import logs, verdict
from tools.logs import Run, ToolError
from tools.plots import plot
from tools.sides import KIND, MACHINE, SOFTWARE, Choice, Side, config, cut, expanded, hash_or_text, manifest_of
from tools.sides import short, shown, side_of, timed_of, told_apart
from tools.timing import FLOOR, KIND_FLOOR, Timing, rental_shift, timing
from tools.verdict import Difference, Evidence, Proof, Target, Verdict, mean, summary

ENVIRONMENT = (*KIND, *SOFTWARE, *MACHINE)
FACTS = ("source_sha256", "attention", "head", "grad_accum_steps", "params_total", "table_bytes",
         "untimed_warmup_steps")
ACROSS = ("--across: the same source differs by 0.1 to 1.8 % between machines of one kind (once 8 %), by 7.8 % between "
          "versions of torch; a smaller difference may be the machine's, not B's")
SAME_KIND = "not in pairs: B's doing only if all ran on one machine (those of one kind differ by 0.1 to 1.8 %)"
HOW_TO_CHOOSE = "choose with --steps, --source or --exclude"
END_SPAN = 0.05                    # share of the steps over which the slope at the end is taken, at least
SLOPE_DOUBT = 2.0                  # a shorter schedule costs this much less loss per step than the slope (public runs)
LISTS = {"not_counted": "not counted", "times_void": "times do not count", "notes": "notes",
         "same_run_twice": "the same run twice", "not_read": "not read"}      # of a side, and their names in a report
__all__ = ["Side", "config", "mean", "plot", "side_of"]                       # from here, for the other verbs


# ---- Curves ---------------------------------------------------------------------------------------------------------

def validation_table(run: Run) -> dict[int, float]:
    return {point.step: point.loss for point in run.val}


def training_table(run: Run) -> dict[int, float]:
    return {step: loss for step, _, loss in run.steps if loss is not None}


def parting(a: Side, b: Side) -> tuple[int | None, str]:
    """First step at which the mean curves differ beyond the seeds' spread (at ALPHA over the number of points).
    Validation points if two steps are shared, else training losses; one run per seed."""
    for kind, table_of in (("validation", validation_table), ("training", training_table)):
        tables_a = [table_of(same[0]) for same in a.seeds()]
        tables_b = [table_of(same[0]) for same in b.seeds()]
        steps = sorted(set.intersection(*map(set, tables_a + tables_b)))
        if len(steps) > 1:
            break
    if len(steps) < 2 or min(len(tables_a), len(tables_b)) < 2:
        return None, "where the curves part is not judged: that takes two seeds a side and two shared steps"

    shared = f"{len(steps)} shared steps up to {steps[-1]}"
    for step in steps:
        losses_a = [table[step] for table in tables_a]
        losses_b = [table[step] for table in tables_b]
        if verdict.two_samples(losses_a, losses_b).p < verdict.ALPHA / len(steps):
            return step, f"mean {kind} curves part at step {step} beyond the seeds' spread ({shared})"
    return None, f"mean {kind} curves do not part beyond the seeds' spread ({shared})"


def curves_by_seed(side: Side) -> dict[int | None, dict[tuple[int, str], float]]:
    """All losses of the first run of each seed, by step and kind."""
    found = {}
    for same in side.seeds():
        run = same[0]
        curve = {(step, "training"): loss for step, loss in training_table(run).items()}
        curve |= {(step, "validation"): loss for step, loss in validation_table(run).items()}
        found[run.seed] = curve
    return found


def bitwise(a: Side, b: Side) -> tuple[bool, str]:
    """Whether all seeds are shared and give equal losses to the last bit; else where the first of them parts."""
    curves_a = curves_by_seed(a)
    curves_b = curves_by_seed(b)
    shared = sorted((set(curves_a) & set(curves_b)) - {None})
    if not shared:
        return False, ""
    parted = []
    for seed in shared:
        one = curves_a[seed]
        other = curves_b[seed]
        parted += [point for point in one.keys() | other.keys() if one.get(point) != other.get(point)]
    if parted:
        step, kind = min(parted)
        return False, f"equal seeds have equal losses until step {step} ({kind})"
    all_shared = set(curves_a) == set(curves_b) == set(shared)
    seeds = ", ".join(map(str, shared))
    return all_shared, f"seeds {seeds}: losses and curves are equal to the last bit on both sides"


class Price(NamedTuple):
    nats_per_step: float
    s_per_nat: float


def price(side: Side) -> Price | None:
    """What loss is worth at the end of the mean validation curve; None if it does not fall there."""
    timed = [{point.step: point for point in run.val if point.seconds is not None} for run in side.runs]
    shared = set.intersection(*map(set, timed))
    end = max(shared, default=0)
    start = max((step for step in shared if step <= end * (1 - END_SPAN)), default=end)
    if start == end:
        return None
    drop = mean(points[start].loss - points[end].loss for points in timed)
    lasted = mean(points[end].seconds - points[start].seconds for points in timed)
    if drop > 0 and lasted > 0:
        return Price(drop / (end - start), lasted / drop)
    return None


def seconds_and_losses(side: Side) -> list[tuple[float, float]]:
    """Means by seed; without seeds of which a time is missing."""
    found = []
    for same in side.seeds():
        if all(run.seconds is not None for run in same):
            found.append((mean(run.seconds for run in same), mean(run.loss for run in same)))
    return found


def at_equal_loss(a: Side, b: Side, worth: Price | None) -> list[Difference]:
    """Difference of times plus what the losses are worth: by the price, and by twice that."""
    pairs_a = seconds_and_losses(a)
    pairs_b = seconds_and_losses(b)
    if worth is None or min(len(pairs_a), len(pairs_b)) < 2:
        return []
    tests = []
    for doubt in (1.0, SLOPE_DOUBT):
        s_per_nat = worth.s_per_nat * doubt
        priced_a = [seconds + nats * s_per_nat for seconds, nats in pairs_a]
        priced_b = [seconds + nats * s_per_nat for seconds, nats in pairs_b]
        tests.append(verdict.two_samples(priced_a, priced_b))
    return tests


# ---- What forbids a comparison --------------------------------------------------------------------------------------

def refusals(a: Side, b: Side) -> list[str]:
    """Why the sides cannot be compared."""
    found = mixtures(a) + mixtures(b) + cut_short(a, b) + cut_short(b, a)
    twice = {logs.content(run) for run in a.runs} & {logs.content(run) for run in b.runs} - {()}
    if twice:
        found.append(f"{len(twice)} runs are on both sides")
    data = sorted({*a.values("data_sha256"), *b.values("data_sha256")})
    if len(data) > 1:
        found.append(f"other data: data_sha256 {', '.join(map(hash_or_text, data))}")
    return found


def mixtures(side: Side) -> list[str]:
    """What runs of one side must have in common, and have not."""
    found = []
    ends = Counter(f"{run.final.step} of {run.total} steps" for run in side.runs)
    if len(ends) > 1:
        found.append(f"{side.name} mixes {counted(ends)}; {HOW_TO_CHOOSE}")
    sources = Counter(hash_or_text(source or "not known") for source in side.each("source_sha256"))
    if len(sources) > 1:
        found.append(f"{side.name} mixes sources: {counted(sources)}; {HOW_TO_CHOOSE}")
    for key in sorted({key for run in side.runs for key in config(run)}):
        values = side.values(key)
        if len(values) > 1:
            found.append(f"{side.name} mixes {key}: {cut(values)}; {HOW_TO_CHOOSE}")
    if len(set(side.each("pool"))) > 1:
        found.append(f"{side.name} has several lists of one kind, and which is the base is not said")
    return found


def counted(found: Counter) -> str:
    return short(f"{n} runs of {what}" for what, n in found.most_common())


def cut_short(side: Side, other: Side) -> list[str]:
    """That no run of a side came to its planned end, and runs of the other did."""
    if any(run.finished for run in side.runs) or not any(run.finished for run in other.runs):
        return []
    final = side.runs[0].final.step
    return [f"{side.name}'s runs are cut short (step {final} of {side.runs[0].total}) and {other.name}'s are not; "
            f"--steps={final} says that this was the plan"]


def mixed_kinds(side: Side) -> list[str]:
    """Kinds of machine, clock and software of which runs of one side state different ones."""
    found = []
    for key in (*KIND, *SOFTWARE):
        values = side.values(key)
        if len(values) > 1:
            found.append(f"{side.name} mixes {key}: {cut(values)}; choose with --exclude")
    return found


def differing(a: Side, b: Side) -> list[str]:
    """Kinds of machine, clock and software of which the sides state different ones."""
    found = []
    for key in (*KIND, *SOFTWARE):
        of_a = a.values(key)
        of_b = b.values(key)
        if of_a and of_b and len({*of_a, *of_b}) > 1:
            found.append(f"{key} differs: {cut(of_a)} -> {cut(of_b)}")
    return found


def same_program(a: Side, b: Side) -> bool:
    """Equal source, settings, steps and software, all of it said where it can be, and no bench that knows better."""
    sources = {*a.each("source_sha256"), *b.each("source_sha256")}
    if len(sources) != 1 or None in sources:
        return False
    if {run.final.step for run in a.runs} != {run.final.step for run in b.runs}:
        return False
    settings = {key for run in a.runs + b.runs for key in config(run)}
    if told_apart(a, b):
        return False
    return all(a.values(key) == b.values(key) for key in (*SOFTWARE, *settings))


# ---- The comparison -------------------------------------------------------------------------------------------------

def target_of(a: Side, b: Side, named: float | None) -> float | None:
    """The target that was named, else the one that all logs state."""
    if named:
        return named
    stated = {run.facts.get("target_loss") for run in a.runs + b.runs}
    if len(stated) != 1:
        return None
    return stated.pop() or None                                              # 0: a preset without a target


def proof(side: Side, target: float) -> Proof:
    losses = side.losses()
    return Proof(summary(losses).mean, verdict.one_sample(losses, target))


def loss_difference(a: Side, b: Side, same_bits: bool) -> Difference | None:
    """None: fewer than two seeds of which something can be said."""
    if same_bits:
        return Difference(0.0, 0.0, 0.0, 1.0)
    losses = [side.losses() for side in (a, b)]
    if min(len(set(of_side)) for of_side in losses) < 2:
        return None
    return verdict.two_samples(*losses)


def divergences(a: Side, b: Side) -> list[str]:
    """Sides with runs without a finite loss; a list in a README may lack losses."""
    found = []
    for side in (a, b):
        count = sum(not math.isfinite(run.loss) for run in side.runs)
        if count and side.runs[0].family != "R":
            found.append(f"{side.name}: {count} of {len(side.runs)} runs have no finite loss")
    return found


def times_between(a: Side, b: Side, stated: bool, least_floor: float) -> Timing:
    """`timing` of two sides with times; the floor is also what one program differs by between its own rentals."""
    pairs, places, notes = manifest_of(a, b)
    of_a = timed_of(a, pairs, places)
    of_b = timed_of(b, pairs, places)
    floor = max(least_floor, rental_shift(of_a), rental_shift(of_b))
    found = timing(of_a, of_b, stated, floor)
    found.notes = notes + found.notes
    return found


def of_machines(times: Sequence[Difference], base: float) -> str:
    said = "source, flags and software are equal"
    if not times:
        return said
    share = times[0].mean / base
    return (f"{said}; their times differ by {share:+.2%} (p {times[0].p:.2g}), which is of machines, days or chance: a "
            "comparison across them resolves no less")


def compare(a: Side, b: Side, target: float | None = None, across: bool = False,
            margin: float = verdict.SAME_MARGIN, same_machine: bool = False, floor: float = FLOOR) -> dict[str, Any]:
    """All that `--json` prints: times in s, losses in nats per token, memory in MiB, differences B minus A.
    across         compare times of other kinds of machines or software too
    same_machine   the user states that all ran on one machine in one rental, where logs do not say
    floor          share of the time that one program differs by between rentals"""
    target = target_of(a, b, target)
    whole = refusals(a, b)
    unlike = differing(a, b)
    same = same_program(a, b)

    same_bits, bits = bitwise(a, b)
    loss = loss_difference(a, b, same_bits)
    times = Timing()
    if a.times and b.times and (across or same or not unlike):
        times = times_between(a, b, same_machine, max(floor, KIND_FLOOR) if unlike else floor)
    worth = price(a)
    priced = at_equal_loss(a, b, worth) if times.tests else []

    evidence = Evidence(
        loss=loss,
        times=times.tests,
        room=margin * mean(a.times),
        at_equal_loss=priced,
        least=times.least,
        same_steps={run.final.step for run in a.runs} == {run.final.step for run in b.runs},
        diverged=divergences(a, b),
        doubts=times.doubts,
        target=Target(target, proof(a, target), proof(b, target)) if target else None,
    )
    word = verdict.decide(evidence)
    if whole:
        word = Verdict("not comparable", whole[0])
    elif same:
        word = Verdict("same program", of_machines(times.tests, mean(a.times)))
    elif unlike and not across and word.word != "no record":                 # a missed target needs no times
        word = Verdict("not comparable", f"{unlike[0]} (--across compares nevertheless)")
    elif word.word in ("faster", "slower"):
        word = word._replace(reason="; ".join([word.reason, *remarks(evidence, worth, times)]))

    parts_at, curves = parting(a, b)
    report = {
        "verdict": word.word, "reason": word.reason, "target": target, "a": facts(a, target), "b": facts(b, target),
        "loss": loss, "time": times.tests[0] if times.tests else None, "time_tests": times.tests,
        "method": times.method, "floor": times.floor, "memory": memory_difference(a, b), "at_equal_loss": priced,
        "nats_per_step": None, "s_per_nat": None, "equivalent_steps": None,
        "parts_at": parts_at, "curves": curves, "runs_to_settle": runs_to_settle(word, evidence, times),
        "phases": phases(a, b), "environment": unequal(a, b, ENVIRONMENT), "config": unequal(a, b, settings_of(a, b)),
        "notes": notes_of(a, b, whole + unlike, bits, evidence, times, across and bool(unlike)),
    }
    if worth is not None:
        report |= worth._asdict()
        if loss is not None:
            report["equivalent_steps"] = loss.mean / worth.nats_per_step
    return report


def remarks(evidence: Evidence, worth: Price | None, times: Timing) -> list[str]:
    """What a reader of `faster` or `slower` should know besides."""
    found = []
    if worth is not None and evidence.loss is not None and not uses_price(evidence):
        worst = max(-evidence.loss.low, evidence.loss.high) * worth.s_per_nat
        if worst > abs(evidence.times[0].mean):
            found.append(f"losses may differ by what {worst:.3g} s are worth")
    if not times.paired:
        found.append(SAME_KIND)
    return found


def uses_price(evidence: Evidence) -> bool:
    """Whether the verdict was spoken at equal loss."""
    if evidence.target is not None:
        return False
    return evidence.loss.p < verdict.SHARE or not evidence.same_steps


def runs_to_settle(word: Verdict, evidence: Evidence, times: Timing) -> int | None:
    """Runs a side that would decide the times, where nothing else is in the way."""
    if word.word != "undecided" or evidence.doubts or evidence.diverged or not times.tests:
        return None
    if evidence.target is not None:
        in_the_way = not evidence.target.b.p < verdict.ALPHA
    else:
        in_the_way = evidence.loss is None or evidence.loss.p < verdict.SHARE
    if in_the_way:
        return None
    return verdict.runs_to_settle(times.tests[-1], times.sd, evidence.room)


def memory_difference(a: Side, b: Side) -> Difference | None:
    memory = [side.memory() for side in (a, b)]
    return verdict.welch(*memory) if all(memory) else None


def notes_of(a: Side, b: Side, refused: list[str], bits: str, evidence: Evidence, times: Timing,
             across: bool) -> list[str]:
    notes = list(refused)
    if bits:
        notes.append(bits)
    notes += evidence.diverged
    notes += times.notes
    notes += times.doubts[1:]                                                # the first is the reason of the verdict
    if across:
        notes.append(ACROSS)
    for side in (a, b):
        if not side.values("hardware"):
            notes.append(f"hardware of {side.name} is not recorded")
    return notes


def facts(side: Side, target: float | None) -> dict[str, Any]:
    """One side: what was read and what was not, and its numbers."""
    found = {
        "paths": list(map(shown, side.paths)), "runs": len(side.runs), "seeds": len(side.seeds()),
        "started": dates(side),
        "families": Counter(run.family for run in side.runs), "loss": summary(side.losses()),
        "time": summary(side.times), "memory": summary(side.memory()), "p_target": None, "runs_for_target": None,
        "each": [each_run(run) for run in side.runs], **read_and_not(side),
    }
    if target:
        found["p_target"] = verdict.one_sample(side.losses(), target)
        found["runs_for_target"] = runs_for_target(side, target)
    return found


def read_and_not(side: Side) -> dict[str, list[str]]:
    """The lists whose names LISTS has."""
    notes = Counter(note for run in side.runs for note in run.notes)
    return {
        "not_counted": side.left,
        "times_void": [f"{shown(run.path)}: {run.void}" for run in side.runs if run.void],
        "notes": [f"{note} ({n} runs)" for note, n in notes.items()],
        "same_run_twice": [f"{shown(path)} is {shown(kept)}" for path, kept in side.reading.duplicates],
        "not_read": [f"{shown(path)}: {why}" for path, why in side.reading.unread],
    }


def each_run(run: Run) -> dict[str, Any]:
    return {"path": shown(run.path), "index": run.index, "seed": run.seed, "loss": run.loss, "seconds": run.seconds}


def dates(side: Side) -> list[str]:
    """When its first and last run began, as their logs say; empty where one does not."""
    starts = [run.started for run in side.runs]
    if None in starts:
        return []
    return [time.strftime("%Y-%m-%d %H:%M", time.gmtime(start)) for start in (min(starts), max(starts))]


def runs_for_target(side: Side, target: float) -> int | None:
    """Seeds that prove the target four times of five, if mean and spread are as measured."""
    losses = summary(side.losses())
    if not losses.mean < target:
        return None
    return verdict.runs_needed(target - losses.mean, losses.sd, 1, verdict.ALPHA)


def phases(a: Side, b: Side) -> list[dict[str, Any]]:
    """Mean seconds of each phase on both sides, and whether it is on the clock: work moved out of the clock shows."""
    found: dict[tuple[str, bool], dict[str, Any]] = {}
    for key, side in (("a_s", a), ("b_s", b)):
        for run in side.runs:
            for phase in run.phases:
                name = phase["name"]
                timed = phase["timed"]
                line = found.setdefault((name, timed), {"name": name, "timed": timed, "a_s": 0.0, "b_s": 0.0})
                line[key] += phase["ms"] / 1000 / len(side.runs)
    return list(found.values())


def settings_of(a: Side, b: Side) -> list[str]:
    settings = sorted({key for run in a.runs + b.runs for key in config(run)})
    return [*FACTS, *settings]


def unequal(a: Side, b: Side, keys: Iterable[str]) -> dict[str, tuple[list[str], list[str]]]:
    return {key: (a.values(key), b.values(key)) for key in keys if a.values(key) != b.values(key)}


# ---- The report -----------------------------------------------------------------------------------------------------

def text(report: dict[str, Any]) -> str:
    """The report for people, about 40 lines at most."""
    sides = {"A": report["a"], "B": report["b"]}
    lines = []
    for name, side in sides.items():
        lines += side_in_words(name, side)
    lines += table(sides, report["target"])
    if report["target"]:
        needed = ", ".join(f"{name} {side['runs_for_target'] or '-'}" for name, side in sides.items())
        lines.append(f"runs that reach p < {verdict.ALPHA:g} four times of five at these means: {needed}")
    lines += differences_in_words(report)
    lines.append(report["curves"])
    lines += phases_in_words(report["phases"])
    for key in ("environment", "config"):
        changes = (f"{name} {cut(one)} -> {cut(other)}" for name, (one, other) in report[key].items())
        lines.append(f"{key}: {short(changes) or 'no difference known'}")
    lines += [f"note: {note}" for note in report["notes"]]
    if report["runs_to_settle"]:
        needed = report["runs_to_settle"]
        have = min(side["time"].n for side in sides.values())
        lines.append(f"settled by about {needed} runs a side ({max(0, needed - have)} more), if the difference is as "
                     "measured")
    lines.append(f"verdict: {report['verdict']}: {report['reason']}")
    return "\n".join(lines)


def paths_in_words(paths: Sequence[str]) -> str:
    """One or two whole; more of them by where they lie."""
    if len(paths) <= 2:
        return " and ".join(paths)
    return f"{len(paths)} paths in {os.path.commonpath(paths) or '.'}, {paths[0]} the first"


def side_in_words(name: str, side: dict[str, Any]) -> list[str]:
    kinds = ", ".join(f"{n} of family {kind}" for kind, n in side["families"].items())
    paths = paths_in_words(side["paths"])
    when = f", begun {' to '.join(side['started'])}" if side["started"] else ""
    lines = [f"{name}  {paths}: {side['runs']} runs of {side['seeds']} seeds ({kinds}){when}"]
    for key, title in LISTS.items():
        if side[key]:
            lines.append(f"   {title} ({len(side[key])}): {short(side[key])}")
    return lines


def table(sides: dict[str, dict[str, Any]], target: float | None) -> list[str]:
    """One row a side, right-aligned; a dash where there is no number."""
    p_title = f"p (< {target})" if target else ""
    rows = [["", "seeds", "loss", "sd", p_title, "n", "time s", "sd", "peak MiB"]]
    for name, side in sides.items():
        loss = side["loss"]
        seconds = side["time"]
        p = f"{side['p_target']:.3g}" if target else ""
        rows.append([name, f"{loss.n}", f"{loss.mean:.5f}", f"{loss.sd:.5f}", p, f"{seconds.n}",
                     f"{seconds.mean:.3f}", f"{seconds.sd:.3f}", f"{side['memory'].mean:.0f}"])
    return aligned(rows)


def aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = []
    for row in rows:
        cells = [cell.replace("nan", "-").rjust(width) for cell, width in zip(row, widths)]
        lines.append("  ".join(cells))
    return lines


def differences_in_words(report: dict[str, Any]) -> list[str]:
    base = report["a"]["time"].mean
    lines = [f"B - A [{1 - verdict.ALPHA:.0%} interval]; test of times: {report['method']}",
             "  loss    " + spread(report["loss"], "+.5f", "nats")]
    for test in report["time_tests"] or [None]:
        lines.append("  time    " + spread(test, "+.3f", "s", base))
    lines.append("  memory  " + spread(report["memory"], "+.1f", "MiB", report["a"]["memory"].mean))
    slopes = ("by the slope at the end:", "by half of that slope:  ")
    for slope, test in zip(slopes, report["at_equal_loss"]):
        lines.append(f"  time at equal loss, {slope} {spread(test, '+.3f', 's', base)}")
    if report["floor"]:
        lines.append(f"  times of other days or machines count from {report['floor']:.1%} on")
    if report["equivalent_steps"] is not None:
        lines.append(f"equivalent steps: B's loss difference is worth {report['equivalent_steps']:+.1f} steps of A by "
                     f"its slope at the end ({100 * report['nats_per_step']:.4f} nats per 100 steps)")
    return lines


def spread(test: Difference | None, form: str, unit: str, base: float | None = None) -> str:
    if test is None:
        return "not compared"
    share = ""
    if base:
        share = f" = {test.mean / base:+.2%} [{test.low / base:+.2%}, {test.high / base:+.2%}]"
    return f"{test.mean:{form}} {unit} [{test.low:{form}}, {test.high:{form}}]{share}, p {test.p:.2g}"


def phases_in_words(found: list[dict[str, Any]]) -> list[str]:
    lines = []
    for timed, where in ((False, "off"), (True, "on")):
        some = [phase for phase in found if phase["timed"] == timed]
        if not some:
            continue
        names = {phase["name"] for phase in some}
        whole = [phase for phase in some if not is_part(phase["name"], names)]
        a_s = sum(phase["a_s"] for phase in whole)
        b_s = sum(phase["b_s"] for phase in whole)
        each = short(f"{phase['name']} {phase['a_s']:.2f}, {phase['b_s']:.2f}" for phase in some)
        lines.append(f"phases {where} the clock: A {a_s:.2f} s, B {b_s:.2f} s; {each}")
    return lines


def is_part(name: str, names: set[str]) -> bool:
    """Whether a phase ran inside another one, as "warm-up of stage 1" in "warm-up"."""
    head, of, _ = name.partition(" of ")
    return bool(of) and head in names


def jsonable(value: Any) -> Any:
    """Named tuples as objects, and null for what JSON has no number for."""
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, dict):
        return {key: jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return list(map(jsonable, value))
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


# ---- The command ----------------------------------------------------------------------------------------------------

def parsed(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python records compare", description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter,
                                     usage="%(prog)s A B [settings], or A... --against B... [settings]")
    parser.add_argument("paths", nargs="+", metavar="PATH", help="A and B; with --against all of A")
    parser.add_argument("--against", nargs="+", metavar="PATH", help="all of B")
    parser.add_argument("--target", type=float, help="loss to reach, nats per token; default: target_loss of the logs")
    parser.add_argument("--steps", default="", metavar="N[,N]", help="runs that end at step N, else all up to their "
                                                                     "validation there; for A and B")
    parser.add_argument("--source", default="", metavar="HASH[,HASH]", help="runs of this source, for A and B")
    parser.add_argument("--exclude", action="append", default=[], metavar="PATTERN", help="paths to leave out")
    parser.add_argument("--across", action="store_true", help="compare times of other kinds of machines, clocks or "
                                                              "software too")
    parser.add_argument("--same-machine", action="store_true", help="state that all ran on one machine, in one rental "
                                                                    "and by one clock, where logs do not say")
    parser.add_argument("--floor", type=float, default=FLOOR, help="share of the time below which other days or "
                                                                   "machines decide nothing, at least 0.02")
    parser.add_argument("--margin", type=float, default=verdict.SAME_MARGIN, help="of `same`: share of A's time")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw loss over steps and over time")
    args = parser.parse_args(argv)
    if args.against is None and len(args.paths) != 2:
        raise ToolError("sides", f"{len(args.paths)} paths", "two, A and B", "give all of B behind --against")
    refuse_wrong(target=args.target, floor=args.floor, margin=args.margin)
    return args


def refuse_wrong(**settings: float | None) -> None:
    """A setting that no comparison can have would decide silently: nothing is below nan."""
    for name, given in settings.items():
        if given is not None and not 0 < given < math.inf:
            raise ToolError(f"--{name}", given, "a number above 0", f"leave --{name} out for its default")


def choices(args: argparse.Namespace) -> list[Choice]:
    """Of A and of B: one value is for both."""
    steps = args.steps.split(",")
    sources = args.source.split(",")
    found = []
    for name, given in (("--steps", steps), ("--source", sources)):
        if len(given) > 2:
            raise ToolError(name, ",".join(given), "one, or two with a comma: of A, of B", "compare twice")
    for side in (0, -1):
        at = steps[side]
        if at and not at.isdigit():
            raise ToolError("--steps", at, "a step, or two with a comma", "--steps=1390,1385")
        found.append(Choice(int(at) if at else None, sources[side] or None, tuple(args.exclude)))
    return found


def main(argv: list[str]) -> int:
    args = parsed(argv)
    names = [args.paths, args.against]
    if args.against is None:
        names = [args.paths[:1], args.paths[1:]]
    a, b = (side_of(name, expanded(paths), choice) for name, paths, choice in zip("AB", names, choices(args)))
    report = compare(a, b, args.target, args.across, args.margin, args.same_machine, max(args.floor, FLOOR))
    print(json.dumps(jsonable(report), indent=1) if args.json else text(report))
    if args.plot:
        labels = {f"{side.name} {paths_in_words(list(map(shown, side.paths)))}": side.runs for side in (a, b)}
        plot(labels, args.plot, report["target"])
    return verdict.STATUS[report["verdict"]]
