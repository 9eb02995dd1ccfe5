"""Read training logs: log.jsonl and log.txt of this trainer, and text logs of the public records.

A text log starts with its source, whose print statements look like lines of a run, so patterns match whole lines after
the environment block only. Times that contradict `step_avg` or the training lines do not count (`Run.void`). A
block of a text log that begins elsewhere than the first one is not used (`Run.refused`).
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
LINE = re.compile(rb"^step:%b/%b(?: (val_loss|train_loss):(%b))?%b train_time:(%b)(ms|s) step_avg:(%b)ms%b\s*?$"
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
CHANGING = "source_sha256", "torch", "hardware", "attention", "head"     # facts that a resume may change
RESET_STEPS = 12                       # logs of 2024 restart their clock after 10 steps; a later one voids the times
AVERAGE_DIGIT_MS = 0.006               # step_avg is printed with two decimals
TIME_DIGIT_MS = 1.0                    # train_time is printed in whole ms
LATE_S, LATE_STEPS = 0.5, 5            # public logs have up to 0.31 s between the last timing line and the validation

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
        steps = [point.step for point in self.val]
        return max([*steps, *map(int, self.steps[-1:, 0])], default=0)

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
        found, reason = read_or_reason(path, by_name)
        runs += found
        if reason is not None:
            unread.append((path, reason))
    run_ids = without_duplicates(runs)
    unread += [(run.path, "duplicate run") for run in runs if id(run) not in run_ids]
    return Reading([run for run in runs if id(run) in run_ids], unread)

def raise_unreadable(error: OSError) -> None:
    raise ToolError(f"directory {error.filename} cannot be read ({error.strerror}): fix its permissions")

def log_files(path: Path) -> Iterator[tuple[Path, bool]]:
    """Yield each file at or below a path, and whether the path itself named it."""
    path = files.stored(path)
    if not path.is_dir():
        if not path.exists():
            raise ToolError(f"{path} does not exist: give a file or a directory")
        yield path, True
        return
    for folder, inner, names in os.walk(path, onerror=raise_unreadable):
        inner.sort()
        if {"log.jsonl", "log.jsonl.gz"}.intersection(names):                  # a run directory
            inner[:] = [name for name in inner if name not in BESIDE_A_LOG]
            names = [name for name in names if name.removesuffix(files.SUFFIX) not in BESIDE_A_LOG]
        for name in sorted(names):
            yield Path(folder, name), False

def read_or_reason(path: Path, by_name: bool) -> tuple[list[Run], str | None]:
    """Return the runs of one file, or the reason why there are none."""
    if not by_name and files.uncompressed(path).suffix.lower() not in LOG_SUFFIXES:
        return [], "not a log by its name"
    try:
        return read_file(path), None
    except NotALog as reason:
        return [], str(reason)
    except FOREIGN_ERRORS as error:
        return [], getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"

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
    known: set[tuple[Any, ...]] = set()
    for run in sorted(runs, key=lambda run: (run.kind == "ours", len(run.val), len(run.facts)), reverse=True):
        printed = tuple(point.printed() for point in run.val)
        keys = {tuple(run.val[-3:])}                      # two seeds may print the same
        if run.kind == "text":
            keys = {printed[-3:]}
            if any(point.seconds for point in run.val):
                keys.add(run.identity())                  # two logs of one run may print its end differently
        # Losses before training hardly differ between runs.
        if known.isdisjoint(keys) or not any(point.step for point in run.val):
            distinct.add(id(run))
            known |= keys | {printed[-3:], printed[-1:]}
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
    run.void = run.result.get("void")
    if not run.void:
        run.void = clock_contradicts(run)
    run.started = seconds_of(str(run.facts.get("started"))[:19], "%Y-%m-%dT%H:%M:%S")
    if run.aborted is not None:
        run.notes.append(f"interrupted at step {run.reached}: {run.aborted}")
    elif not run.result:
        run.notes.append(f"no result yet: running or killed, at step {run.reached}")
    return run

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
        take_resumed(run, event)

def take_header(run: Run, event: Facts) -> None:
    config = event["config"]
    planned = config.get("num_scheduled_steps", 0) + config.get("num_extension_steps", 0)
    run.facts = event
    run.seed = event.get("seed")
    if planned:
        run.total = min(config.get("max_steps") or planned, planned)

def take_resumed(run: Run, event: Facts) -> None:
    """Store the facts of a resumed run; what changed gets both values, so that the run equals neither program."""
    before = run.facts
    differs = {key: (before.get(key), event.get(key)) for key in CHANGING if event.get(key) != before.get(key)}
    differs |= event.pop("differs", None) or {}
    take_header(run, before | event | {"started": before.get("started")})
    for key, (then, now) in differs.items():
        run.notes.append(f"resumed with another {RENAMED.get(key, key)}")
        where = run.facts["config"] if key in run.facts["config"] else run.facts
        if key != "seed":
            where[key] = f"{then}, then {now}"

def seconds_of(text: str, form: str) -> float | None:
    try:
        return float(calendar.timegm(time.strptime(text, form)))
    except ValueError:
        return None

def read_text(path: Path, data: bytes) -> list[Run]:
    """Read a text log in the format of the speedrun: one run, or several in sequence."""
    ends = [separator.end() for separator in SEPARATOR.finditer(data)]
    named = max(data.find(b"\nRunning PyTorch "), data.find(b"\nRunning pytorch "))
    if named >= 0:
        start = named + 1                                 # the first one; a resumed log has several
    else:                                                 # the last separator that validations follow
        start = max((end for end in ends if data.find(b" val_loss:", end) >= 0), default=0)
    lines = LINE.findall(data, start)
    if not any(line[2] == b"val_loss" for line in lines):
        raise NotALog("no line of the form step:N/M val_loss:X")
    runs = split(path, lines)
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
    gpus = GPU.findall(data, start, first)
    date = DATE.search(data, start, first)
    facts: Facts = {}
    if driver:
        facts["driver"] = driver[1].decode()
    if gpus:                                              # all GPUs of the node, of which a run may use fewer
        facts |= {"hardware": f"NVIDIA {gpus[0][0].decode()} x {len(gpus)}", "world_size": len(gpus)}
        facts["buses"] = " ".join(bus.decode() for _, bus in gpus)
    if torch:
        facts |= {"torch": torch[1].decode(), "cuda": torch[2].decode()}
        source = data[:max(0, data.rfind(b"\n" + b"=" * 20, 0, start))].strip()
        if source:
            facts["source_sha256"] = hashlib.sha256(source).hexdigest()
    if torch and torch[4]:
        facts |= {"hardware": torch[3].decode().strip(), "world_size": int(torch[4])}
    return facts, seconds_of(date[1].decode(), "%b %d %H:%M:%S %Y") if date else None

def split(path: Path, lines: list[tuple[bytes, ...]]) -> list[Run]:
    """Split the lines of one file into runs; a block that only repeats validations of the run before is skipped."""
    columns = list(zip(*lines))
    is_val = np.array([kind == b"val_loss" for kind in columns[2]])
    in_ms = columns[5][0] == b"ms"
    table = np.empty((len(lines), 4))                     # step, seconds, loss, step_avg in ms
    for index, column in enumerate((columns[0], columns[4], columns[3], columns[6])):
        table[:, index] = [float(text or b"nan") for text in column]
    table[:, 1] /= 1000 if in_ms else 1

    # A new run begins where the step falls, and at a validation whose step is not after that of the one before.
    falls = set(np.nonzero(np.diff(table[:, 0]) < 0)[0] + 1)
    validations = np.nonzero(is_val)[0]
    for before, index in zip(validations, validations[1:]):
        if table[index, 0] <= table[before, 0] and not any(before < fall <= index for fall in falls):
            falls.add(index)
    bounds = [0, *sorted(map(int, falls)), len(lines)]
    runs: list[Run] = []
    for start, end in zip(bounds, bounds[1:]):
        if not is_val[start:end].any():
            continue
        run = block(path, table[start:end], is_val[start:end], in_ms)
        run.total = int(columns[1][start])
        run.void = run.void or clock_contradicts(run)
        if runs and run.val[0].step != runs[0].val[0].step:
            if set(run.val) <= set(runs[-1].val):
                continue
            run.refused = f"starts at step {run.val[0].step}, unlike the first run of the file"
        runs.append(run)
    return runs

def block(path: Path, table: np.ndarray, is_val: np.ndarray, in_ms: bool) -> Run:
    """Build one run of a text log. Times before a restart of its clock are unknown: logs of 2024 restart it once."""
    run = Run(path, "text")
    for index in np.nonzero(np.diff(table[:, 1]) < 0)[0] + 1:
        step = int(table[index, 0])
        table[:index, 1] = math.nan
        run.notes.append(f"timer restarts at step {step}")
        if step > RESET_STEPS:
            run.void = f"its clock was set back at step {step}"
    if in_ms:                                             # logs in s have no common rule for step_avg
        run.void = run.void or averages_contradict(table)
    for step, seconds, loss, _ in table[is_val].tolist():
        run.val.append(Point(int(step), loss, None if math.isnan(seconds) else seconds))
    run.steps = table[~is_val]
    run.steps[:, 3] = math.nan                            # step_avg; no text log states its tokens
    return run

def averages_contradict(table: np.ndarray) -> str | None:
    """Return why times in ms do not fit step_avg, the mean over all steps or over those after ten; None if they do."""
    step, seconds, _, average = table.T
    known = np.isfinite(average) & np.isfinite(seconds) & (step > 0)
    rules = []
    for untimed in (0, 10):
        off_ms = np.abs(1000 * seconds - average * (step - untimed))
        fits = off_ms <= AVERAGE_DIGIT_MS * (step - untimed) + TIME_DIGIT_MS
        rules.append(fits[known & (step > untimed)])
    if not known.any() or any(fits.all() for fits in rules):
        return None
    return "its times contradict its step_avg, both over all steps and over those after the first ten"

def clock_contradicts(run: Run) -> str | None:
    """Return why the clock of a run falls, or does not fit its last training line; None if it is right."""
    final = run.final
    if final is None or final.seconds is None:
        return None
    times = [point.seconds for point in run.val if point.seconds is not None]
    if not all(map(math.isfinite, times)) or times != sorted(times):
        return "the times of its validations decrease or are not finite"
    timed = run.steps[np.isfinite(run.steps[:, 1]) & (run.steps[:, 0] <= final.step)]
    if not len(timed):
        return None
    step, seconds = timed[-1, :2].tolist()
    latest = seconds + (final.step - step + LATE_STEPS) * seconds / max(1, step) + LATE_S
    if seconds - TIME_DIGIT_MS / 1000 <= final.seconds <= latest:
        return None
    return f"its final time is {final.seconds:.3f} s, but its training step {step:.0f} ended at {seconds:.3f} s"
