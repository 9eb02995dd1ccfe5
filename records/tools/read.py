"""Read training logs: log.jsonl and log.txt of this trainer, and text logs of the public records.

A text log starts with its source, whose print statements look like lines of a run, so patterns match whole lines after
the environment block only. Times of a clock that was set back do not count (`Run.void`). A block of a text log that
begins elsewhere than the first one is not used (`Run.refused`).
"""
from __future__ import annotations

import calendar
import functools
import hashlib
import json
import math
import os
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tools import files
from tools.files import FOREIGN_ERRORS, ToolError, counted

NUMBER = rb"-?(?:[0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|[nN][aA][nN]|[iI]nf)"
EXTRA = rb"(?: [a-z_]+:\S+){0,20}?"
COUNT = rb"(\d{1,15})"                 # a step or a seed
LINE = re.compile(rb"^step:%b/%b(?: (val_loss|train_loss):(%b))?%b train_time:(%b)(ms|s) step_avg:%bms%b\s*?$"
                  % (COUNT, COUNT, NUMBER, EXTRA, NUMBER, NUMBER, EXTRA), re.M)
PEAK = re.compile(rb"^peak memory (allocated|consumption):? (\d+) MiB", re.M)
TORCH = re.compile(rb"^Running [Pp]y[Tt]orch (\S+) compiled for CUDA (\S+)(?: on (.*)\swith world_size (\d+))?\s*?$",
                   re.M)
SEPARATOR = re.compile(rb"^={20,}\s*?$", re.M)
DRIVER = re.compile(rb"Driver Version: (\S+)")
GPU = re.compile(rb"^\|\s+\d+\s+NVIDIA (\S+(?: \S+)*)\s+(?:On|Off)\s+\|\s+([0-9A-Fa-f:.]+)?", re.M)
DATE = re.compile(rb"^(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun) ([A-Z][a-z]{2} +\d{1,2} \d\d:\d\d:\d\d \d{4})\s*?$", re.M)
TRIAL = re.compile(rb"^trial:\d+/\d+ seed:%b\s*?$" % COUNT, re.M)
LOG_SUFFIXES = ("", ".txt", ".log", ".out", ".stdout", ".jsonl")
BESIDE_A_LOG = "log.txt", "settings.json", "train_gpt.py", "loss.png", "loss.svg", "save", "checkpoints"
# Names of settings in logs and records from before 2026-11-26, and the names that the trainer uses now.
RENAMED = {"num_slots": "seqs_per_step", "slots_per_micro_batch": "micro_batch_size", "document_start": "bos_id"}
RENAMED_IN_ROWS = {"place": "layer", "home": "location", "cadence": "update_every"}
# Settings that the trainer no longer has, with the values that do what it always does now.
GONE = {"time_budget": 0.0, "debug_rows": 0}
GONE_IN_TABLES = {"signs": 0, "location": "device"}
CHANGING = "seed", "source_sha256", "torch", "hardware", "attention", "head"       # facts that a resume may change
RESET_STEPS = 12                       # logs of 2024 restart their clock after 10 steps; a later one voids the times
TIME_DIGIT_S = 0.001                   # train_time is printed in whole ms

Facts = dict[str, Any]                 # a JSON object

class NotALog(Exception):
    """Says why a file contains no run."""

class Point(NamedTuple):
    """One validation; `seconds` is None if the log has no time for it, or one of an earlier clock."""
    step: int
    loss: float
    seconds: float | None

    def printed(self) -> str:                             # as every text log prints it
        return f"{self.step} {self.loss:.4f} {0 if self.seconds is None else 1000 * self.seconds:.0f}"

@dataclass
class Run:
    """One training run, as its log states it; times in s, losses in nats per token."""
    path: Path
    kind: str                                             # "ours" (log.jsonl) or "text"
    total: int | None = None                              # planned steps
    val: list[Point] = field(default_factory=list)
    # step, seconds, training loss of the next token, tokens trained on so far; nan: unknown
    steps: np.ndarray = field(default_factory=lambda: np.empty((0, 4)))
    seed: int | None = None
    facts: Facts = field(default_factory=dict)            # ours: the header
    untimed_s: Facts = field(default_factory=dict)        # seconds of untimed phases; those of one name add up
    result: Facts = field(default_factory=dict)
    aborted: str | None = None                            # cause of the abort
    void: str | None = None                               # reason why its times do not count
    refused: str | None = None                            # reason why the run is not used
    started: float | None = None                          # local time of its machine, s
    notes: list[str] = field(default_factory=list)
    manifest: tuple[Path | None, Facts] | None = None     # what `report.manifest_of` found; None before its first call

    @functools.cached_property
    def settings(self) -> Facts:
        """The settings under current names; those of the rows of a list are NAME[ROW] COLUMN."""
        found: Facts = {}
        for key, value in self.facts.get("config", {}).items():
            name = RENAMED.get(key, key)
            if isinstance(value, list) and value and isinstance(value[0], dict):
                for number, row in enumerate(value):
                    row = {RENAMED_IN_ROWS.get(column, column): cell for column, cell in row.items()
                           if (column, cell) != ("rounding", "nearest")}      # as it always is now
                    row = GONE_IN_TABLES | row if name == "tables" else row
                    found |= {f"{name}[{number}] {column}": cell for column, cell in row.items()}
            else:
                found[name] = value
        return GONE | found if found else found

    @property
    def final(self) -> Point | None:
        """The validation at the planned last step, or the last one of a run that stopped early."""
        planned = [point for point in self.val if point.step == self.total]
        return (planned or self.val or [None])[-1]

    @property
    def loss(self) -> float:
        return self.final.loss if self.final else math.nan

    @property
    def seconds(self) -> float | None:
        """Training time at the final validation; None if the log has none, or if it does not count."""
        return None if self.final is None or self.void else self.final.seconds

    @property
    def finished(self) -> bool:
        """Whether the run was completed: ours has a result line, others a validation at the planned last step."""
        if self.kind == "ours":
            return bool(self.final and self.result and self.aborted is None)
        return bool(self.final) and self.total in (None, self.final.step)

    @property
    def reached(self) -> int:
        return max([*(point.step for point in self.val), *map(int, self.steps[-1:, 0])], default=0)

    def identity(self) -> tuple[Any, ...]:
        """Return a key that is equal for two logs of one run, even if one of them is incomplete."""
        timed = [point for point in self.val if point.seconds] or self.val
        if self.kind == "ours":
            return tuple(timed[:2])                       # with all digits, because two runs may print the same
        return tuple(point.printed() for point in timed[:2])

class Reading(NamedTuple):
    """The runs below some paths, and the files that contain none."""
    runs: list[Run]
    unread: Sequence[tuple[Path, str]] = ()               # files without a run, and the reasons

    def unread_in_words(self) -> str:
        reasons = Counter(reason for _, reason in self.unread)
        parts = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common(4))
        return f"{counted(reasons.total(), 'file')} not read: {parts}" if parts else ""

def read_runs(paths: Iterable[Path]) -> Reading:
    """Read files, and directories recursively; of a run directory log.jsonl only, because log.txt is the same run."""
    runs: list[Run] = []
    unread = []
    for path, by_name in dict.fromkeys(file for path in map(Path, paths) for file in log_files(path)):
        try:
            if not by_name and files.uncompressed(path).suffix.lower() not in LOG_SUFFIXES:
                raise NotALog("not a log by its name")
            runs += read_file(path)
        except NotALog as reason:
            unread.append((path, str(reason)))
        except FOREIGN_ERRORS as error:
            unread.append((path, getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"))
    run_ids = without_duplicates(runs)
    unread += [(run.path, "duplicate run") for run in runs if id(run) not in run_ids]
    return Reading([run for run in runs if id(run) in run_ids], unread)

def raise_unreadable(error: OSError) -> None:
    raise ToolError(f"directory {error.filename} cannot be read ({error.strerror}): fix its permissions")

def log_files(path: Path) -> Iterator[tuple[Path, bool]]:
    """Yield each file at or below a path, and whether the path itself named it."""
    path = files.stored(path)
    if not path.exists():
        raise ToolError(f"{path} does not exist: give a file or a directory")
    if not path.is_dir():
        yield path, True
        return
    for folder, inner, names in os.walk(path, onerror=raise_unreadable):
        inner.sort()
        if {"log.jsonl", "log.jsonl.gz"}.intersection(names):                  # a run directory
            inner[:] = [name for name in inner if name not in BESIDE_A_LOG]
            names = [name for name in names if name.removesuffix(files.SUFFIX) not in BESIDE_A_LOG]
        for name in sorted(names):
            yield Path(folder, name), False

def read_file(path: Path) -> list[Run]:
    """Read the runs of one file. Raises NotALog with the reason if it contains none."""
    data = files.read_bytes(path)
    if not data.strip() or b"\0" in data:
        raise NotALog("binary" if data.strip() else "empty")
    if files.uncompressed(path).suffix == ".jsonl":
        return [read_ours(files.stored(path), data)]
    return read_text(files.stored(path), data)

def without_duplicates(runs: list[Run]) -> set[int]:
    """Return the `id` of each distinct run, in its most complete log."""
    distinct: set[int] = set()
    known: set[Any] = set()
    for run in sorted(runs, key=lambda run: (run.kind == "ours", len(run.val), len(run.facts)), reverse=True):
        ends = {run.val[-1], run.val[-1].printed()} if run.val else set()
        keys = {*run.val[-1:]}                            # with all digits, because two seeds may print the same
        if run.kind == "text":
            keys = ends | {run.identity()}                # two logs of one run may print its end differently
            if not any(point.seconds for point in run.val):
                keys = {tuple(run.val)}                   # without times, only equal losses show that it is one
        if known.isdisjoint(keys) or not any(point.step for point in run.val):     # losses before training are alike
            distinct.add(id(run))
            known |= keys | ends
    return distinct

def read_ours(path: Path, data: bytes) -> Run:
    """Read a log.jsonl, whose last line may be incomplete; a resumed run is one run. Raises NotALog."""
    run = Run(path, "ours")
    rows: list[tuple[float, ...]] = []
    lines = data.split(b"\n")
    for line_num, line in enumerate(lines, 1):
        if not line.strip() or line.startswith(b'{"type": "comms"'):          # most lines of logs before 2026-11-26
            continue
        try:
            take_event(run, rows, json.loads(line))
        except FOREIGN_ERRORS:
            if line_num < len(lines):
                raise NotALog(f"line {line_num} is not valid in a log.jsonl") from None
            run.notes.append("last line incomplete")
    if not run.facts:
        raise NotALog("no header line")

    run.steps = np.array(rows).reshape(-1, 4)
    run.void = run.result.get("void") or clock_fault(run)
    run.started = seconds_of(str(run.facts.get("started"))[:19], "%Y-%m-%dT%H:%M:%S")
    if run.aborted is not None:
        run.notes.append(f"interrupted at step {run.reached}: {run.aborted}")
    elif not run.result:
        run.notes.append(f"no result yet: running or killed, at step {run.reached}")
    return run

def clock_fault(run: Run) -> str | None:
    """Say where the clock of a run was set back, None if nowhere. A step is over before it is validated."""
    lines = [(step, 0, seconds) for step, seconds in run.steps[:, :2].tolist()]
    lines = sorted([*lines, *((point.step, 1, point.seconds) for point in run.val)])
    for (*_, before), (step, _, after) in zip(lines, lines[1:]):
        if not before - TIME_DIGIT_S <= after < math.inf:                      # also if one of them is nan
            return f"its clock was set back at step {step:.0f}, from {before:.3f} s to {after:.3f} s"
    return None

def take_event(run: Run, rows: list[tuple[float, ...]], event: Facts) -> None:
    """Add one line of a log.jsonl to its run; rows: of `Run.steps`."""
    kind = event.pop("type")
    if not run.facts:
        if kind != "header":
            raise NotALog("no header line at the start")
        take_header(run, event)
    elif kind == "header":
        raise NotALog("a second header line: logs of several runs in one file")
    elif kind == "step":
        # `train_loss` may be a sum over several predicted tokens.
        loss = float(event.get("train_loss_next", math.nan))
        rows.append((int(event["step"]), event["train_time_ms"] / 1000, loss, event.get("tokens", math.nan)))
    elif kind == "val":
        run.val.append(Point(int(event["step"]), float(event["val_loss"]), event["train_time_ms"] / 1000))
    elif kind == "phase":
        if not event["timed"]:
            name = str(event["name"])
            run.untimed_s[name] = run.untimed_s.get(name, 0.0) + event["ms"] / 1000
    elif kind == "result":
        run.result = event
    elif kind == "aborted":
        run.aborted = str(event.get("cause", "unknown cause"))
    elif kind == "resumed":
        # Steps after the checkpoint were repeated, so drop their first results.
        rows[:] = [row for row in rows if row[0] <= event["step"]]
        run.val = [point for point in run.val if point.step <= event["step"]]
        run.aborted = None
        run.result = {}
        run.notes.append(f"resumed at step {event['step']}")
        changed = {key for key in CHANGING if event.get(key) != run.facts.get(key)} | {*(event.get("differs") or {})}
        if changed:
            run.refused = f"resumed with another {', '.join(sorted(changed))}"      # it is a run of neither program
        take_header(run, run.facts | {"config": event.get("config", run.facts["config"])})     # another end

def take_header(run: Run, event: Facts) -> None:
    config = event["config"]
    planned = config.get("num_scheduled_steps", 0) + config.get("num_extension_steps", 0)
    run.facts = event
    run.seed = event.get("seed")
    if planned:
        run.total = min(config.get("max_steps") or planned, planned)

def seconds_of(text: str, form: str) -> float | None:
    try:
        return float(calendar.timegm(time.strptime(text, form)))
    except ValueError:
        return None

def read_text(path: Path, data: bytes) -> list[Run]:
    named = max(data.find(b"\nRunning PyTorch "), data.find(b"\nRunning pytorch "))
    if named >= 0:
        start = named + 1                                 # the first one; a resumed log has several
    else:                                                 # the last separator that validations follow
        ends = [separator.end() for separator in SEPARATOR.finditer(data)]
        start = max((end for end in ends if data.find(b" val_loss:", end) >= 0), default=0)
    runs: list[Run] = []
    for lines in split(LINE.findall(data, start)):
        run = read_block(path, lines)
        if runs and set(run.val) <= set(runs[-1].val):    # validations that are repeated after the end
            continue
        if runs and run.val[0].step != runs[0].val[0].step:
            run.refused = f"starts at step {run.val[0].step}, unlike the first run of the file"
        runs += [run] * bool(run.val)
    if not runs:
        raise NotALog("no line of the form step:N/M val_loss:X")
    facts, started = environment(data, start)
    seeds = TRIAL.findall(data, start) if data.find(b"\ntrial:", start) >= 0 else []
    peak = PEAK.search(data, max(start, data.rfind(b"\npeak memory ")))
    for index, run in enumerate(runs):
        run.facts = facts
        run.started = started
        if peak:
            run.result = {"peak_memory_mib": {peak[1].decode(): int(peak[2])}}
        if len(seeds) == len(runs):
            run.seed = int(seeds[index])
        if started is not None and run.final.seconds is not None:
            started += run.final.seconds                                       # start of the next run of this process
        if run.total not in (None, run.final.step):
            run.notes.append(f"stops at step {run.reached} of {run.total}")
    return runs

def environment(data: bytes, start: int) -> tuple[Facts, float | None]:
    """Return versions, hardware and source hash from the block before the first step, and the date in s."""
    first = LINE.search(data, start).start()
    torch = TORCH.match(data, start)
    driver = DRIVER.search(data, start, first)
    gpus = [(name.decode(), bus.decode()) for name, bus in GPU.findall(data, start, first)]
    date = DATE.search(data, start, first)
    facts: Facts = {}
    if driver:
        facts["driver"] = driver[1].decode()
    if gpus:                                              # all GPUs of the node, of which a run may use fewer
        facts |= {"hardware": f"NVIDIA {gpus[0][0]} x {len(gpus)}", "world_size": len(gpus),
                  "buses": " ".join(bus for _, bus in gpus)}
    if torch:
        facts |= {"torch": torch[1].decode(), "cuda": torch[2].decode()}
        source = data[:max(0, data.rfind(b"\n" + b"=" * 20, 0, start))].strip()
        if source:
            facts["source_sha256"] = hashlib.sha256(source).hexdigest()
        if torch[4]:
            facts |= {"hardware": torch[3].decode().strip(), "world_size": int(torch[4])}
    return facts, seconds_of(date[1].decode(), "%b %d %H:%M:%S %Y") if date else None

def split(lines: Iterable[tuple[bytes, ...]]) -> list[list[tuple[bytes, ...]]]:
    """Split matches of LINE: a run begins where the step falls, and at a validation not after the one before."""
    blocks: list[list[tuple[bytes, ...]]] = []
    last_step = last_validated = math.inf
    for line in lines:
        step = int(line[0])
        is_val = line[2] == b"val_loss"
        if step < last_step or (is_val and step <= last_validated):
            blocks.append([])
            last_validated = -1
        blocks[-1].append(line)
        last_step = step
        if is_val:
            last_validated = step
    return blocks

def read_block(path: Path, lines: list[tuple[bytes, ...]]) -> Run:
    """Build one run of a text log. Times before a restart of its clock are unknown: logs of 2024 restart it once."""
    run = Run(path, "text", total=int(lines[0][1]))
    is_val = np.array([line[2] == b"val_loss" for line in lines])
    table = np.full((len(lines), 4), math.nan)            # no text log states its tokens
    for index, column in enumerate((0, 4, 3)):
        table[:, index] = [float(line[column] or b"nan") for line in lines]
    if lines[0][5] == b"ms":
        table[:, 1] /= 1000
    for index in np.nonzero(np.diff(table[:, 1]) < 0)[0] + 1:
        step = int(table[index, 0])
        table[:index, 1] = math.nan
        run.notes.append(f"timer restarts at step {step}")
        if step > RESET_STEPS:
            run.void = f"its clock was set back at step {step}"
    for step, seconds, loss, _ in table[is_val].tolist():
        run.val.append(Point(int(step), loss, seconds if math.isfinite(seconds) else None))
    run.steps = table[~is_val]
    return run
