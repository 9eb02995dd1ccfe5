"""Read training logs: log.jsonl and log.txt of this trainer, and text logs of the public records.

A text log starts with its source, whose print statements look like lines of a run, so patterns match whole lines after
the environment block only. Times of a clock that was set back do not count (`Run.void`).
"""
import functools
import hashlib
import json
import math
import os
import re
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
GPU = re.compile(rb"^\|\s+\d+\s+NVIDIA (\S+(?: \S+)*)\s+(?:On|Off)\s+\|", re.M)
LOG_SUFFIXES = ("", ".txt", ".log", ".out", ".stdout", ".jsonl")
CHANGING = "seed", "source_sha256", "torch", "hardware", "attention", "head"       # facts that a resume may change
RESET_STEPS = 12                       # logs of 2024 restart their clock after 10 steps; a later one voids the times
TIME_DIGIT_S = 0.001                   # train_time is printed in whole ms
THREADS = re.compile(r", (\d+) threads$")                                      # of one rank, at the end of `hardware`

# Columns of `Run.steps`; train_loss is that of the next token.
COLUMNS = "step", "seconds", "train_loss", "tokens", "normuon_lr", "adam_lr"
Facts = dict[str, Any]                 # a JSON object

class Point(NamedTuple):
    """One validation; `seconds` is None if the log has no time for it, or one of an earlier clock."""
    step: int
    loss: float
    seconds: float | None

@dataclass(eq=False)
class Run:
    """One training run, as its log states it; times in s, losses in nats per token."""
    path: Path
    kind: str                                             # "ours" (log.jsonl) or "text"
    total: int | None = None                              # planned steps
    val: list[Point] = field(default_factory=list)
    steps: np.ndarray = field(default_factory=lambda: np.empty((0, len(COLUMNS))))        # nan: unknown
    seed: int | None = None
    facts: Facts = field(default_factory=dict)            # ours: the header
    untimed_s: Facts = field(default_factory=dict)        # seconds of untimed phases; those of one name add up
    result: Facts = field(default_factory=dict)
    aborted: str | None = None                            # cause of the abort
    void: str | None = None                               # reason why its times do not count
    refused: str | None = None                            # reason why the run is not used
    notes: list[str] = field(default_factory=list)

    @functools.cached_property
    def settings(self) -> Facts:
        """The settings; those of the rows of a list are NAME[ROW] COLUMN."""
        found: Facts = {}
        for name, value in self.facts.get("config", {}).items():
            if isinstance(value, list) and value and isinstance(value[0], dict):
                for number, row in enumerate(value):
                    found |= {f"{name}[{number}] {column}": cell for column, cell in row.items()}
            else:
                found[name] = value
        return found

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
        return bool(self.final) and self.final.step == self.total

    @property
    def reached(self) -> int:
        return max([*(point.step for point in self.val), *map(int, self.steps[-1:, 0])], default=0)

    def ends(self) -> list[object]:
        """Return what two logs of one run have in common: its end, with all digits and as text logs print it."""
        if self.final is None or not self.final.step:     # losses before training are alike
            return [id(self)]
        last = self.val[-1]
        printed = f"{last.step} {last.loss:.4f} {1000 * (last.seconds or 0):.0f}"
        return [last, printed] if self.kind == "ours" else [printed]

class Reading(NamedTuple):
    runs: list[Run]
    unread: Sequence[tuple[Path, str]] = ()               # files without a run, and the reasons

    def unread_in_words(self) -> str:
        reasons = Counter(reason for _, reason in self.unread)
        parts = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common(4))
        return f"{counted(reasons.total(), 'file')} not read: {parts}" if parts else ""

def read_runs(paths: Iterable[Path | str]) -> Reading:
    """Read files, and directories recursively; of a run directory log.jsonl only, because log.txt is the same run."""
    runs: list[Run] = []
    unread = []
    for path in dict.fromkeys(file for path in map(Path, paths) for file in log_files(path)):
        try:
            runs += read_file(path)
        except (ToolError, *FOREIGN_ERRORS) as error:
            unread.append((path, getattr(error, "strerror", None) or str(error)))
    known: set[object] = set()
    for run in sorted(runs, key=lambda run: (run.kind == "ours", len(run.val), len(run.facts)), reverse=True):
        if run.ends()[0] in known:
            runs.remove(run)
            unread.append((run.path, "duplicate run"))
        known.update(run.ends())
    return Reading(runs, unread)

def log_files(path: Path) -> Iterator[Path]:
    """Yield a file, or the files of a directory that are logs by their names."""
    path = files.stored(path)
    if not path.exists():
        raise ToolError(f"{path} does not exist: give a file or a directory")
    if not path.is_dir():
        yield path
    for folder, inner, names in os.walk(path):
        inner.sort()
        logs = {"log.jsonl", "log.jsonl.gz"}.intersection(names)
        if logs:                                          # a run directory
            inner[:] = [name for name in inner if name not in ("save", "checkpoints")]
        for name in sorted(logs or names):
            if Path(name.removesuffix(files.SUFFIX)).suffix.lower() in LOG_SUFFIXES:
                yield Path(folder, name)

def read_file(path: Path) -> list[Run]:
    data = files.read_bytes(path)
    if path.name.removesuffix(files.SUFFIX).endswith(".jsonl"):
        return [read_ours(files.stored(path), data)]
    return read_text(files.stored(path), data)

def read_ours(path: Path, data: bytes) -> Run:
    """Read a log.jsonl, whose last line may be incomplete; a resumed run is one run. Raises ToolError."""
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
                raise ToolError(f"line {line_num} is not valid in a log.jsonl") from None
            run.notes.append("last line incomplete")
    if not run.facts:
        raise ToolError("no header line")

    config = run.facts["config"]
    planned = config.get("num_scheduled_steps", 0) + config.get("num_extension_steps", 0)
    run.total = min(config.get("max_steps") or planned, planned) or None
    run.seed = run.facts.get("seed")
    threads = THREADS.search(str(run.facts.get("hardware")))
    run.facts["threads"] = threads and int(threads[1]) * run.facts.get("world_size", 1)     # of all ranks
    run.steps = np.array(rows).reshape(-1, len(COLUMNS))
    run.void = run.result.get("void")
    lines = [*run.steps[:, :2].tolist(), *([point.step, point.seconds] for point in run.val)]
    times = [seconds for _, seconds in sorted(lines, key=lambda line: line[0])]     # a step is before its validation
    if not (np.diff(times) >= -TIME_DIGIT_S).all():                                 # also if one of them is nan
        run.void = run.void or "its clock was set back"
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
            raise ToolError("no header line at the start")
        run.facts = event
    elif kind == "header":
        raise ToolError("a second header line: logs of several runs in one file")
    elif kind == "step":
        # `train_loss` may be a sum over several predicted tokens.
        rest = (event.get(key, math.nan) for key in ("train_loss_next", "tokens", "normuon_lr", "adam_lr"))
        rows.append((int(event["step"]), event["train_time_ms"] / 1000, *map(float, rest)))
    elif kind == "val":
        run.val.append(Point(int(event["step"]), float(event["val_loss"]), event["train_time_ms"] / 1000))
    elif kind == "phase" and not event["timed"]:
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
        run.facts |= {"config": event.get("config", run.facts["config"])}      # another end

def read_text(path: Path, data: bytes) -> list[Run]:
    torch = TORCH.search(data)
    if torch:
        start = torch.start()                             # the first one; a resumed log has several
    else:                                                 # the last separator that validations follow
        ends = [separator.end() for separator in SEPARATOR.finditer(data)]
        start = max((end for end in ends if data.find(b" val_loss:", end) >= 0), default=0)
    runs: list[Run] = []
    for lines in split(LINE.findall(data, start)):
        run = read_block(path, lines)
        if runs and set(run.val) <= set(runs[-1].val):    # validations that are repeated after the end
            continue
        if runs and run.val[0].step != runs[0].val[0].step:                    # a resume, or a run that lost its start
            run.refused = f"starts at step {run.val[0].step}, unlike the first run of the file"
        runs += [run] * bool(run.val)
    if not runs:
        raise ToolError("no line of the form step:N/M val_loss:X")
    facts = environment(data, start, torch)
    peak = PEAK.search(data, max(start, data.rfind(b"\npeak memory ")))
    for run in runs:
        run.facts = facts
        if peak:
            run.result = {"peak_memory_mib": {peak[1].decode(): int(peak[2])}}
        if run.final.step != run.total:
            run.notes.append(f"stops at step {run.reached} of {run.total}")
    return runs

def environment(data: bytes, start: int, torch: re.Match[bytes] | None) -> Facts:
    gpus = GPU.findall(data, start, LINE.search(data, start).start())
    facts: Facts = {}
    if gpus:                                              # all GPUs of the node, of which a run may use fewer
        facts |= {"hardware": f"NVIDIA {gpus[0].decode()} x {len(gpus)}", "world_size": len(gpus)}
    if torch:
        facts |= {"torch": torch[1].decode(), "cuda": torch[2].decode()}
        source = data[:max(0, data.rfind(b"\n" + b"=" * 20, 0, start))].strip()
        if source:
            facts["source_sha256"] = hashlib.sha256(source).hexdigest()
        if torch[4]:
            facts |= {"hardware": torch[3].decode().strip(), "world_size": int(torch[4])}
    return facts

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
    table = np.full((len(lines), len(COLUMNS)), math.nan)                      # no text log states its tokens
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
    for step, seconds, loss, *_ in table[is_val].tolist():
        run.val.append(Point(int(step), loss, seconds if math.isfinite(seconds) else None))
    run.steps = table[~is_val]
    return run
