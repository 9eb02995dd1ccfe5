"""Contradictions between the files of a record: the manifest of a bench, and log.jsonl and log.txt of each run.

Several files state the same numbers, so an edit of one file contradicts the others. `new` and `check` report each
contradiction. "Which logs are trusted?" in records/README.md lists the edits that no file contradicts.
"""
from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from tools import files, page
from tools.read import Facts, Point, Run, seconds_of
from tools.report import MANIFEST, manifest_lines, manifest_of

LOG, TEXT_LOG = "log.jsonl", "log.txt"
STEP_LINE = re.compile(r"^step:(\d+)/\d+ (?:val_loss:(\S+) )?train_time:(\d+)ms ", re.M)
PHASE_LINE = re.compile(r"^phase (.+): (\d+\.\d\d) s( \(on the clock\))?$", re.M)
TIME = "%Y-%m-%dT%H:%M:%S"             # format of times in a manifest
UNTIMED_PHASES = re.compile(r"set-up|validation data|warm-up( of (stage \d+( \(\d+ of \d+\))?|validation))?|reset|"
                            r"checkpoint( at step \d+)?|evaluation")
# A setting and a fact of these names may differ: "auto" and what it was, a default and the values of all tables, and
# directories of logs that were moved.
OTHER_MEANING = {"attention", "head", "table_home", "run_dir"}
SEED_FLAG = re.compile(r"--seed=(\S+)")
CLOCK_S = 60.0                         # largest difference between the clocks of a bench and of rank 0
# Wall time of a run in a bench, less its training time and untimed phases: start, end, and the validations before the
# final one, which no phase states. In records 09 to 27 it is 2 to 15 s, of which validations are up to 10 s.
MOST_OTHER_S = 30.0
# The starts in a manifest are in whole s. In records 09 to 27, a run starts up to 0.9 s before the end of the last one.
OVERLAP_S = 2.0
# Half of the last digit that log.txt has, and rounding errors.
LOSS_DIGIT, MS_DIGIT, PHASE_DIGIT_S = 5.1e-5, 0.502, 0.00501
MOST_VOCABULARIES = {"embed": 1, "value_embed": 10}    # most rows, over the vocabulary, of tables without a setting
NUMBERED = ("a start line and an end line of each run, numbered from 1 without a gap; if the tool was killed, repeat "
            "the bench command, which adds the end line")

Problem = tuple[str, Any, Any]         # what, found, expected

def in_manifest(manifest: Path) -> Iterator[Problem]:
    """Yield the contradictions between the lines of a manifest."""
    plans, starts, ends = (manifest_lines(manifest, kind) for kind in ("bench", "start", "end"))
    for number, (start, end) in enumerate(zip_longest(starts, ends, fillvalue={}), 1):
        if not start.get("run") == end.get("run") == number:
            found = f"start line of run {start.get('run')}, end line of run {end.get('run')}"
            yield f"{MANIFEST}, run {number}", found, NUMBERED
            break
        changed = [key for key in start if key not in ("time", "type") and end.get(key) != start[key]]
        if changed:
            yield f"{MANIFEST}, run {number}", f"start and end lines differ in {changed}", "equal facts"
    yield from overlaps(starts, ends)
    sides = plans[0]["sides"] if plans else {}
    yield from incomplete_pairs(starts, ends, set(sides))
    unfinished: set[int] = set()
    for line in ends:
        name = f"{MANIFEST}, {line['folder']}"
        pair = line["pair"]
        if pair in unfinished:
            yield name, f"a run of pair {pair}, after a run of this pair that was not done", "a new pair"
        if line["outcome"] != "done":
            unfinished.add(pair)
        if line["side"] not in sides:
            yield name, f"side {line['side']}", f"one of the planned sides {[*sides]}"
        else:
            yield from unplanned(name, line, sides[line["side"]])

def incomplete_pairs(starts: list[Facts], ends: list[Facts], sides: set[str]) -> Iterator[Problem]:
    """Yield the pairs that lack a side or have one twice, and gaps in their numbers.

    A pair ends early only if one of its runs was not done. The last pair may lack sides, because the bench may go on.
    """
    by_pair: dict[int, list[str]] = {}
    for start in starts:
        by_pair.setdefault(start.get("pair"), []).append(start.get("side"))
    if [*by_pair] != [*range(1, len(by_pair) + 1)]:
        yield f"{MANIFEST}, pairs", [*by_pair], f"1 to {len(by_pair)}, in this order"
    stopped = {end.get("pair") for end in ends if end.get("outcome") != "done"}
    for pair, ran in by_pair.items():
        lacking = set() if pair in stopped or pair == max(by_pair) else sides - {*ran}
        if lacking or len({*ran}) < len(ran):
            yield f"{MANIFEST}, pair {pair}", f"runs of {ran}", f"one run of each planned side, {sorted(sides)}"

def overlaps(starts: list[Facts], ends: list[Facts]) -> Iterator[Problem]:
    """Yield the runs of a bench that start before the run before them has ended, and those without a time."""
    free_s = -math.inf
    for start, end in zip(starts, ends):
        started_s = seconds_of(str(start.get("time")), TIME)
        if started_s is None or started_s < free_s - OVERLAP_S:
            found = f"start {start.get('time')}"
            yield f"{MANIFEST}, run {start['run']}", found, "a time after the run before it ended"
        free_s = (started_s or free_s) + end.get("wall_s", 0.0)

def unplanned(name: str, line: Facts, plan: Facts) -> Iterator[Problem]:
    """Yield the differences between the line of a run and the plan of its side."""
    # Manifests before 2026-11-24 state the hash of each file of a side, and may state a seed for each run.
    sources = [*plan.get("sources", {}).values(), plan.get("source_sha256", line["source_sha256"])]
    if line["source_sha256"] not in sources:
        yield name, f"source {line['source_sha256'][:8]}", f"source {sources[-1][:8]}, as planned"
    flags = [flag.replace("{seed}", str(line.get("seed", line["pair"]))) for flag in plan["flags"]]
    command = shlex.split(line.get("command", ""))
    if command and command[len(command) - len(flags):] != flags:
        yield name, line["command"], f"a command that ends with the planned flags: {shlex.join(flags)}"

def of_run(run: Run) -> Iterator[Problem]:
    """Yield the contradictions in the log of a finished run, and between its log, its log.txt and its manifest."""
    name = run.path.parent.name
    for contradictions in (in_log(run), in_text_log(run), in_manifest_of(run)):
        for what, found, expected in contradictions:
            yield f"{name}, {what}", found, expected

def in_manifest_of(run: Run) -> Iterator[Problem]:
    """Yield the contradictions between the log of a run and the lines of its manifest."""
    manifest, end = manifest_of(run)
    if not manifest:
        return
    if end["outcome"] != "done":
        yield MANIFEST, f"{end['outcome']}, although its log has a result", "a run that counts: all runs count"
        return
    logged = {"val_loss": run.loss, "train_s": run.seconds, "source_sha256": run.facts.get("source_sha256")}
    for key, value in logged.items():
        if end.get(key) != value:
            yield f"{key} of {MANIFEST}", end.get(key), f"{value}, as {LOG} has it"
    untimed_s = page.without_parts(run.untimed_s())
    clocked_s = run.final.seconds + sum(untimed_s.values())
    most_s = clocked_s + MOST_OTHER_S + (len(run.val) - 1) * untimed_s.get("evaluation", 0.0)
    if not clocked_s <= end.get("wall_s", math.nan) <= most_s:
        yield f"wall_s of {MANIFEST}", end.get("wall_s"), f"{clocked_s:.1f} to {most_s:.1f} s, by the phases in {LOG}"
    seeds = SEED_FLAG.findall(end.get("command", ""))
    if seeds and seeds[-1] != str(run.seed):
        yield "seed", run.seed, f"{seeds[-1]}, as in the command in {MANIFEST}"
    starts = {line["run"]: line.get("time") for line in manifest_lines(manifest, "start")}
    start = starts.get(end["run"])
    launched = seconds_of(str(start), TIME)
    if launched is None or run.started is None:
        return
    if not launched - CLOCK_S <= run.started <= launched + end.get("wall_s", math.inf) + CLOCK_S:
        yield "start", run.facts.get("started"), f"between start and end of the run in {MANIFEST}: {start}"

def in_log(run: Run) -> Iterator[Problem]:
    """Yield the contradictions between the lines of a log.jsonl."""
    final = run.final
    for key, known in (("train_time_ms", 1000 * final.seconds), ("steps", final.step)):
        if not math.isclose(run.result[key], known, rel_tol=1e-9):
            yield f"{key} of the result", run.result[key], f"{known}, as the last validation has it"
    # A last step may be any number, so a list of its steps is built only if the log has as many lines.
    if len(run.steps) != final.step or not np.array_equal(run.steps[:, 0], np.arange(1, final.step + 1)):
        yield "training lines", f"{len(run.steps)} lines", f"one line for each step, 1 to {final.step}"
    settings = run.facts["config"]
    for where, facts in (("settings", settings), ("result", run.result)):
        header = run.facts if where == "settings" else settings | run.facts
        for key in sorted(facts.keys() & header.keys() - OTHER_MEANING):
            if facts[key] != header[key]:
                yield f"{key} of the {where}", facts[key], f"{header[key]}, as the header has it"
    every = settings.get("val_every")
    validated = [point.step for point in run.val]
    planned = range(0, final.step if every else 0, every or 1)
    if every is not None and (len(validated) != len(planned) + 1 or validated != [*planned, final.step]):
        yield "steps of its validations", validated, f"{[*planned[:3]]}... {final.step}, as val_every is {every}"
    names = {phase["name"] for phase in run.phases}
    for phase in run.phases:
        if not phase["timed"] and not UNTIMED_PHASES.fullmatch(phase["name"]):
            found = f"{phase['name']!r}, {phase['ms'] / 1000:.1f} s"
            yield "untimed phase", found, "only phases of this trainer"
    if "first batch" not in names or not names & {"warm-up", "reset"}:
        yield "phases", sorted(names), "'first batch', and 'warm-up' or 'reset'"
    # With --compile=-1, the device decides. In a process of several runs, only the log of the first run has the line.
    compiles = {0: False, 1: "warm-up" in names}.get(settings.get("compile"))
    if compiles is not None and compiles != (run.graphs is not None):
        yield "line `compiled`", f"{run.graphs} graphs", f"what compile={settings['compile']} implies"
    for label, rows in (run.facts.get("table_rows") or {}).items():
        if not is_configured(settings, label, rows):
            yield f"rows of table {label}", rows, "the rows in the settings"

def configured_rows(settings: Facts) -> list[tuple[str, int]]:
    """Return the label and the number of rows of each table that the settings name."""
    built_in = [(key, count) for key, count in settings.items() if key.endswith("_rows") and isinstance(count, int)]
    rows = [(key.removesuffix("_rows") + "_embed", count) for key, count in built_in]
    return rows + [(table.get("label", ""), table["rows"]) for table in settings.get("tables") or ()]

def is_configured(settings: Facts, label: str, rows: int) -> bool:
    """Return whether a table of the model has the number of rows that its setting states.

    A table that a trainer adds without a setting has at most as many rows as the largest table of the settings.
    """
    if label in MOST_VOCABULARIES:
        vocabulary = settings.get("padded_vocab", settings.get("vocab_size"))
        return rows % vocabulary == 0 and rows <= MOST_VOCABULARIES[label] * vocabulary
    configured = configured_rows(settings)
    own = [count for name, count in configured if name == label]
    if own:
        return rows in own
    return rows <= max((count for _, count in configured), default=0)

def in_text_log(run: Run) -> Iterator[Problem]:
    """Yield the contradictions between log.jsonl and log.txt, in which numbers are rounded."""
    path = run.path.with_name(TEXT_LOG)
    text = ""
    if files.stored(path).is_file():
        text = files.read_bytes(path).decode("utf-8")
    text = text[max(0, text.find("\nRunning PyTorch ")):]                    # the source is above this line
    first_lines = text.partition("\nstep:")[0]
    machine = str(run.facts.get("hardware")).partition(", then ")[0]         # hardware before a resume
    for fact in (f"seed {run.seed}\n", f"on {machine} with world_size {run.facts.get('world_size')}\n"):
        if fact not in first_lines:
            yield f"first lines of {TEXT_LOG}", "different seed or machine", f"{fact.strip()}, as {LOG} has it"
    peaks = run.result.get("peak_memory_mib", {})
    memory = " ".join(f"{kind}: {mib} MiB" for kind, mib in peaks.items())
    for fact in (f" s, {run.final.step} steps, {run.result['tokens']:,} tokens", f"\npeak memory {memory}"):
        if fact not in text:
            expected = f"{fact.strip()!r}, as {LOG} has it"
            yield f"last lines of {TEXT_LOG}", "different steps, tokens or memory", expected

    lines = STEP_LINE.findall(text)
    trained = [Point(int(step), math.nan, seconds) for step, seconds in run.steps[:, :2].tolist()]
    yield from step_lines("validations", [line for line in lines if line[1]], run.val)
    yield from step_lines("training lines", [line for line in lines if not line[1]], trained)
    phases = [phase for phase in run.phases if phase["name"] != "set-up"]    # only log.jsonl has this phase
    printed = PHASE_LINE.findall(text)
    if len(printed) != len(phases):
        yield f"phases of {TEXT_LOG}", len(printed), f"{len(phases)}, as {LOG} has them"
    for (name, seconds, on_clock), phase in zip(printed, phases):
        close = abs(float(seconds) - phase["ms"] / 1000) <= PHASE_DIGIT_S
        if (name, bool(on_clock), close) != (phase["name"], phase["timed"], True):
            yield f"phases of {TEXT_LOG}", f"{name} {seconds} s", f"{phase}, as {LOG} has it"
            break

def step_lines(what: str, lines: list[tuple[str, str, str]], points: list[Point]) -> Iterator[Problem]:
    """Yield the first contradiction between lines of a log.txt and points of a log.jsonl.

    lines: step, loss ("" in a training line) and ms, as printed.
    """
    if len(lines) != len(points):
        yield f"{what} of {TEXT_LOG}", len(lines), f"{len(points)}, as {LOG} has them"
    for (step, loss, ms), point in zip(lines, points):
        off = abs(float(ms) - 1000 * point.seconds) / MS_DIGIT
        if loss:
            off = max(off, abs(float(loss) - point.loss) / LOSS_DIGIT)
        if int(step) != point.step or off > 1:
            yield f"step {step} of {TEXT_LOG}", f"loss {loss}, {ms} ms", f"{point}, as {LOG} has it"
            break
