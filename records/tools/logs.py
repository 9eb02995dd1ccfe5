"""Reads training logs: this trainer's log.jsonl ("ours"), and every family of text log in the speedrun's records:

A llm.c lines, B ms with training loss, C ms with `nan` averages, D ms, E1 seconds, E2 seconds with timing lines, F
extra keys, G several runs in a file, H console copy without source, I one line, R lists in a README. Expressions are
anchored to whole lines and used after the environment only: a log holds its source, and that prints such lines.

A log is believed no further than it agrees with itself: a time that its own averages or training lines contradict, or
of a clock that was set back, does not count (`Run.void`); a run whose loss is told twice and differently is not used
at all (`Run.refused`)."""
from __future__ import annotations

import calendar
import hashlib
import json
import math
import os
import re
import signal
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from multiprocessing import TimeoutError as NoAnswer
from multiprocessing import get_all_start_methods, get_context
from pathlib import Path
from typing import Any, NamedTuple

from tools.calibrate import cores

NUMBER = rb"-?(?:[0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|[nN][aA][nN]|[iI]nf)"
EXTRA = rb"((?: [a-z_]+:\S+)*?)"
COUNT = rb"(\d{1,18})"                 # of steps, or a seed
LINE = re.compile(rb"^step:%b/%b(?: (val_loss|train_loss):(%b))?%b train_time:(%b)(ms|s) step_avg:(%b)ms%b\s*?$"
                  % (COUNT, COUNT, NUMBER, EXTRA, NUMBER, NUMBER, EXTRA), re.M)
LLMC = re.compile(rb"^s:%b (tel|trl):(%b)(?: .*)?$" % (COUNT, NUMBER), re.M)
# What launchers and collectors write in front of a line: "[rank0]:", "0: ", a date and time, a level.
PREFIX = (rb"(?:\[[^\]\n]{1,60}\]:?[ \t]*|\d{1,5}:[ \t]+|(?:INFO|DEBUG)[ \t:|-]+"
          rb"|\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?[ \t:|-]*)+")
PREFIXED_LINE = re.compile(rb"^%bstep:\d+/\d+ val_loss:" % PREFIX, re.M)
PREFIXES = re.compile(rb"^%b" % PREFIX, re.M)
PEAK = re.compile(rb"^peak memory (allocated|consumption): (\d+) MiB(?: reserved: (\d+) MiB)?\s*$", re.M)
SEPARATOR = b"=" * 20                  # at least; the line holds nothing else
TORCH = re.compile(rb"Running [Pp]y[Tt]orch (\S+) compiled for CUDA (\S+)(?: on (.*?)\s+with world_size (\d{1,6}))?\s")
PYTHON = re.compile(rb"^Running Python (\S+)", re.M)
DRIVER = re.compile(rb"Driver Version: (\S+)")
GPU = re.compile(rb"^\|\s+\d+\s+NVIDIA (.+?)\s+(?:On|Off)\s+\|\s+([0-9A-Fa-f:.]+)?", re.M)
DATE = re.compile(rb"^(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun) ([A-Z][a-z]{2} +\d{1,2} \d\d:\d\d:\d\d \d{4})\s*$", re.M)
STAMP = re.compile(r"(?:^|/)(\d{8}-\d{6})-")         # of a run directory that the trainer named
TRIAL = re.compile(rb"^trial:\d+/\d+ seed:%b\s*$" % COUNT, re.M)
PYTHON_SOURCE = re.compile(rb"^(?:import|from|def|class) \w+", re.M)
LIST = re.compile(r"^[ \t>]*([A-Za-z_]*(?:loss|acc|time)\w*)[ \t]*=[ \t]*\[([^\]]*)\]", re.M | re.I)
LOG_SUFFIXES = ("", ".txt", ".log", ".out", ".stdout", ".json", ".jsonl", ".md")
ENVIRONMENT_BYTES = 1 << 14            # of the tables of GPUs and processes, at most
UNKNOWN_STEP = -1                      # a list in a README has no steps
LOSS_RANGE = (1.0, 4.0)                # of a list in a README
SECONDS_RANGE = (20.0, 4000.0)         # of such a list; what is larger is milliseconds
FIXED = "source_sha256", "torch", "hardware", "attention", "head"      # facts that a resumed run may have twice
BESIDE_A_LOG = "log.txt", "settings.json", "checkpoints"
LARGEST = 1e15                         # what is more is as good as infinite, and sums of its powers overflow
SEVERAL_READERS_BYTES = 32 << 20       # below that, starting processes takes longer than reading
MAX_READERS = 16                       # processes
PARTS_PER_READER = 16                  # of the files: few messages, and all readers end together
READING_TIMEOUT_S = 120.0              # for the next part
# A log against itself
RESET_STEPS = 12                       # families B and C start their clock anew after 10 steps; later is no habit
AVERAGE_DIGIT_MS = 0.006               # step_avg is printed with two digits
TIME_DIGIT_MS = 1.0                    # train_time is printed in whole ms
LATE_S = 0.5                           # a validation's time is up to 0.31 s behind its last timing line (public logs)
LATE_STEPS = 5                         # and so many steps, where steps are long


class ToolError(Exception):
    """What was found, what was expected, and what to do about it."""

    def __init__(self, what: str, found: object, expected: object, do: str) -> None:
        super().__init__(f"{what}\n  found:    {found}\n  expected: {expected}\n  do:       {do}")


class NotALog(Exception):
    """Why a file holds no run."""


class Point(NamedTuple):
    """One validation; `seconds` is None where the log has no time, or one of another clock."""
    step: int
    loss: float
    seconds: float | None


@dataclass
class Run:
    """One training run as its log tells it; times in s, losses in nats per token."""
    path: Path
    family: str
    index: int = 0                                        # position in a file of several runs
    total: int | None = None                              # steps planned
    val: list[Point] = field(default_factory=list)
    steps: list[tuple[int, float | None, float | None]] = field(default_factory=list)    # step, seconds, training loss
    seed: int | None = None
    facts: dict[str, Any] = field(default_factory=dict)   # ours: the header
    phases: list[dict[str, Any]] = field(default_factory=list)
    result: dict[str, Any] = field(default_factory=dict)
    aborted: str | None = None                            # cause
    void: str | None = None                               # why its times do not count
    refused: str | None = None                            # why nothing of it counts: it contradicts itself
    started: float | None = None                          # s on its machine's clock, as the log dates it
    notes: list[str] = field(default_factory=list)

    @property
    def final(self) -> Point | None:
        """The last validation at the planned end; of a run that stopped early its last one."""
        for point in reversed(self.val):
            if point.step == self.total:
                return point
        return self.val[-1] if self.val else None

    @property
    def loss(self) -> float | None:
        return self.final.loss if self.final else None

    @property
    def seconds(self) -> float | None:
        """Training time at the final validation; None where there is none, or where it does not count."""
        if self.final is None or self.void:
            return None
        return self.final.seconds

    @property
    def finished(self) -> bool:
        """Whether it came to its end, believed or not. Ours: there is a result line. Others: a validation at the
        planned last step, or no plan to miss."""
        if self.final is None:
            return False
        if self.family == "ours":
            return bool(self.result) and self.aborted is None
        return self.total in (None, self.final.step)


class Reading(NamedTuple):
    runs: list[Run]
    unread: list[tuple[Path, str]]
    duplicates: list[tuple[Path, Path]]                   # left out, and the file that has the same run


# ---- Files ----------------------------------------------------------------------------------------------------------

def read(paths: Iterable[Path]) -> Reading:
    """All runs of files and directories (read to the bottom, in the order of names), and what could not be read.
    In a run directory (a folder with log.jsonl) log.txt is the same run, and what else the trainer leaves there is no
    log: neither is read. README lists count only where no log was found: they repeat the logs beside them.
    Raises   ToolError if a path does not exist."""
    runs = []
    unread = []
    named_files = list(files(paths))
    for (path, _), (found, reason) in zip(named_files, attempts(named_files)):
        runs += found
        if reason is not None:
            unread.append((path, reason))

    listed = [run.path for run in runs if run.family == "R"]
    if len(listed) < len(runs):
        for page in sorted(set(listed)):
            unread.append((page, f"lists of {listed.count(page)} runs in a README: logs count"))
        runs = [run for run in runs if run.family != "R"]
    runs, duplicates = without_duplicates(runs)
    return Reading(runs, unread, duplicates)


def files(paths: Iterable[Path]) -> Iterator[tuple[Path, bool]]:
    """Each file once, and whether it was named itself."""
    seen = set()
    for path in map(Path, paths):
        if not path.exists():
            raise ToolError("path", path, "a file or a directory", "check the spelling")
        found = sorted(files_below(path)) if path.is_dir() else [path]
        for file in found:
            if file not in seen:
                yield file, file == path
        seen.update(found)


def files_below(root: Path) -> Iterator[Path]:
    """All files, and links to directories, which are named and not followed."""
    for folder, inner, names in os.walk(root):
        if "log.jsonl" in names:                           # a run directory
            names = [name for name in names if name not in BESIDE_A_LOG]
            inner[:] = [name for name in inner if name not in BESIDE_A_LOG]
        for name in names:
            yield Path(folder, name)
        for name in inner:
            link = Path(folder, name)
            if link.is_symlink():
                yield link


def attempts(named_files: list[tuple[Path, bool]]) -> Iterator[tuple[list[Run], str | None]]:
    """What `attempt` gives for each file, in their order; read by several processes where that pays."""
    readers = min(cores(), MAX_READERS)
    size = sum(path.stat().st_size for path, _ in named_files if path.is_file())
    if readers < 2 or size < SEVERAL_READERS_BYTES or "fork" not in get_all_start_methods():
        yield from map(attempt, named_files)
        return

    size_of_part = math.ceil(len(named_files) / (PARTS_PER_READER * readers))
    parts = [named_files[at:at + size_of_part] for at in range(0, len(named_files), size_of_part)]
    with get_context("fork").Pool(readers, initializer=end_as_told) as pool:   # its end ends the processes
        results = pool.imap(attempt_all, parts)
        for part in parts:
            try:
                yield from results.next(READING_TIMEOUT_S)
            except NoAnswer:
                raise ToolError(f"reading {part[0][0]}", f"nothing after {READING_TIMEOUT_S:.0f} s",
                                "a disk that answers", "give fewer paths, or copy them to a local disk") from None


def end_as_told() -> None:
    """A reader ends at SIGTERM at once, whatever the process that it was forked from does with it."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def attempt_all(named_files: list[tuple[Path, bool]]) -> list[tuple[list[Run], str | None]]:
    return list(map(attempt, named_files))


def attempt(named_file: tuple[Path, bool]) -> tuple[list[Run], str | None]:
    """The runs of one file, or why there are none."""
    path, named = named_file
    if path.exists() and not path.is_file() and not path.is_dir():
        return [], "a pipe or a device"
    if not named and path.suffix.lower() not in LOG_SUFFIXES:
        return [], f"not a log by its name ({path.suffix})"
    try:
        return read_file(path), None
    except NotALog as reason:
        return [], str(reason)
    except OSError as error:
        return [], error.strerror or str(error)
    except UnicodeDecodeError:
        return [], "its environment is no UTF-8"


def read_file(path: Path) -> list[Run]:
    """The runs of one file. Raises NotALog with the reason if it holds none."""
    data = path.read_bytes()
    if not data.strip():
        raise NotALog("empty")
    if b"\0" in data:
        raise NotALog("binary")
    if path.suffix == ".jsonl":
        return [read_ours(path, data)]
    if path.suffix.lower() == ".md":
        return read_readme(path, data)
    if data.startswith(b"s:"):
        return read_llmc(path, data)
    return read_text(path, data)


# ---- Ours: log.jsonl ------------------------------------------------------------------------------------------------

def read_ours(path: Path, data: bytes) -> Run:
    """log.jsonl. The last line may be torn by a crash; a resumed log reads as one run."""
    run = Run(path, "ours")
    lines = data.split(b"\n")
    for place, line in enumerate(lines, 1):
        if not line.strip() or line.startswith(b'{"type": "comms"'):          # most of the lines, and not needed here
            continue
        try:
            take(run, json.loads(line))
        except (ValueError, KeyError, AttributeError, TypeError, OverflowError, RecursionError):
            if place < len(lines):
                raise NotALog(f"line {place} is not one of a log.jsonl") from None
            run.notes.append("last line torn")

    if not run.facts:
        raise NotALog("no header line")
    run.started = date_of_ours(run)
    run.void = run.result.get("void") or contradiction(run)
    run.refused = two_results(run)
    if not run.result and run.aborted is None:
        run.notes.append("no result line and no cause")
    return run


def take(run: Run, event: dict[str, Any]) -> None:
    """Add one line of a log.jsonl to its run."""
    kind = event.pop("type")
    if not run.facts:
        if kind != "header":
            raise NotALog("no header line at the start")
        take_header(run, event)
    elif kind == "step":
        seconds = logged(event["train_time_ms"]) / 1000
        run.steps.append((step_of(event), seconds, logged(event["train_loss"])))
    elif kind == "val":
        seconds = logged(event["train_time_ms"]) / 1000
        run.val.append(Point(step_of(event), logged(event["val_loss"]), seconds))
    elif kind == "phase":
        of_type(event["name"], str)
        of_type(event["timed"], bool)
        logged(event["ms"])
        run.phases.append(event)
    elif kind == "budget":
        run.total = of_type(event["steps"], int)
    elif kind == "result":
        of_type(event.get("run_dir", ""), str)
        values = [event[key] for key in ("val_loss", "train_time_ms") if key in event]
        for value in (*values, *event.get("peak_memory_mib", {}).values()):
            logged(value)
        run.result = event
    elif kind == "aborted":
        run.aborted = str(event.get("cause", "not said"))
    elif kind == "resumed":                                                   # what the earlier part did after its
        run.steps = [step for step in run.steps if step[0] <= event["step"]]  # checkpoint was done again
        run.val = [point for point in run.val if point.step <= event["step"]]
        run.aborted = None
        run.notes.append(f"resumed at step {event['step']}")
        take_resumed(run, event)


def of_type(value: Any, *types: type) -> Any:
    """The value. Raises TypeError if it is of another type."""
    if not isinstance(value, types):
        raise TypeError(f"{value!r} is no {types[0].__name__}")
    return value


def logged(value: Any) -> float:
    return number(of_type(value, int, float))


def step_of(event: dict[str, Any]) -> int:
    step = of_type(event["step"], int)
    if abs(step) > LARGEST:
        raise ValueError(f"{step} is no step")
    return step


def take_header(run: Run, event: dict[str, Any]) -> None:
    for key in ("source_sha256", "data_sha256"):
        of_type(event.get(key), str, type(None))
    of_type(event.get("changed", {}), dict)
    logged(event.get("target_loss") or 0)
    of_type(event.get("seed"), int, type(None))
    config = event["config"]
    whole = config.get("num_scheduled_steps", 0) + config.get("num_extension_steps", 0)
    run.facts = event
    run.seed = event.get("seed")
    if whole:
        run.total = min(config.get("max_steps") or whole, whole)


def take_resumed(run: Run, event: dict[str, Any]) -> None:
    """Take the later settings; a run of two sources, versions or machines has both, and a note that says so."""
    before = run.facts
    after = {key: value for key, value in event.items() if key not in ("step", "source")}
    if "config" not in after:                                                 # a log of an older trainer
        return
    for key in FIXED:
        if after.get(key) != before.get(key):
            run.notes.append(f"resumed with another {key}")
            after[key] = f"{before.get(key)}, then {after.get(key)}"
    take_header(run, before | after | {"started": before.get("started")})


def date_of_ours(run: Run) -> float | None:
    """When the run began: `started` of the header, else the date in the name that the trainer gave its directory."""
    said = run.facts.get("started")
    if isinstance(said, str):
        return seconds_of(said[:19], "%Y-%m-%dT%H:%M:%S")
    for folder in (run.facts["config"].get("run_dir"), run.result.get("run_dir")):
        stamp = STAMP.search(f"{folder}-")
        if stamp:
            return seconds_of(stamp[1], "%Y%m%d-%H%M%S")
    return None


def seconds_of(text: str, form: str) -> float | None:
    """Seconds of a date without a time zone: differences are right on one machine. None if it is no date."""
    try:
        return float(calendar.timegm(time.strptime(text, form)))
    except ValueError:
        return None


def two_results(run: Run) -> str | None:
    """Why a log.jsonl contradicts itself: its result is not its last validation."""
    told = run.result.get("val_loss")
    if told is None or run.final is None:
        return None
    if told == run.loss or (math.isnan(told) and math.isnan(run.loss)):
        return None
    return f"the result says a loss of {told}, the last validation {run.loss}"


# ---- Text: families A to I ------------------------------------------------------------------------------------------

def read_llmc(path: Path, data: bytes) -> list[Run]:
    run = Run(path, "A")
    for step, kind, loss in LLMC.findall(data):
        if kind == b"tel":
            run.val.append(Point(int(step), number(loss), None))
        else:
            run.steps.append((int(step), None, number(loss)))
    if not run.val:
        raise NotALog("no validation line")
    return [run]


def number(given: bytes | float) -> float:
    """As it stands; infinite where it is out of all bounds."""
    value = float(given)
    if abs(value) > LARGEST:
        return math.copysign(math.inf, value)
    return value


class Body(NamedTuple):
    """The part of a text log that its run printed."""
    data: bytes                        # of the whole file, without prefixes
    start: int                         # where lines of steps may begin
    lines: list[tuple[bytes, ...]]     # the groups of LINE
    first: int                         # where the first of them begins
    separated: bool                    # by a separator line or an environment from what stands above


def read_text(path: Path, data: bytes) -> list[Run]:
    """Families B to I."""
    body = body_of(data)
    if body is None:
        prefixed = PREFIXED_LINE.search(data)
        body = body_of(PREFIXES.sub(b"", data)) if prefixed else None
    if body is None:
        raise NotALog("no validation line" + " after the last separator" * bool(last_separator(data, len(data))))

    runs = split(path, body.lines)
    facts, started = environment(body)
    seeds = seeds_of_trials(body)
    memory = peak_memory(body)
    kind = family(body, len(runs))
    for index, run in enumerate(runs):
        run.index = index
        run.facts = facts
        run.family = kind
        run.started = started
        run.result = dict(memory)
        if len(seeds) == len(runs):
            run.seed = int(seeds[index])
        if started is not None and run.final.seconds is not None:
            started += run.final.seconds                                       # the next one of this process
        if run.total not in (None, run.final.step):
            run.notes.append(f"stops at {run.final.step} of {run.total}")
    return runs


def body_of(data: bytes) -> Body | None:
    """What stands after the environment; else after the last separator that lines of a validation follow; of a file
    that begins with such lines, and is no source, all. None if there is no validation."""
    environment_at = environment_start(data)
    if environment_at:
        return body_from(data, environment_at, True)
    end = len(data)
    while end > 0:
        separator = last_separator(data, end)
        start = separator[1] if separator else 0
        body = body_from(data, start, separator is not None)
        if body and (separator or end == len(data) or not PYTHON_SOURCE.search(data, 0, body.first)):
            return body
        end = separator[0] if separator else 0
    return None


def body_from(data: bytes, start: int, separated: bool) -> Body | None:
    lines = LINE.findall(data, start)
    if not any(line[2] == b"val_loss" for line in lines):
        return None
    return Body(data, start, lines, LINE.search(data, start).start(), separated)


def environment_start(data: bytes) -> int:
    """Where the last line begins that names the version of torch; 0 where there is none."""
    return 1 + max(data.rfind(b"\nRunning PyTorch "), data.rfind(b"\nRunning pytorch "))


def last_separator(data: bytes, before: int) -> tuple[int, int] | None:
    """Start and end of the last separator line that begins before a place."""
    at = data.rfind(SEPARATOR, 0, before)
    while at >= 0:
        start = data.rfind(b"\n", 0, at) + 1
        end = data.find(b"\n", at)
        if end < 0:
            end = len(data)
        if not data[start:end].strip(b"=\r"):
            return start, end
        at = data.rfind(SEPARATOR, 0, start)
    return None


def family(body: Body, runs: int) -> str:
    if b"\n" not in body.data.strip():
        return "I"
    if runs > 1:
        return "G"
    if body.lines[0][6] == b"ms":
        if any(line[2] == b"train_loss" for line in body.lines):
            return "B"
        nan = any(line[7] == b"nan" and line[0] != b"0" for line in body.lines)
        return "C" if nan else "D"
    if not body.separated:
        return "H"
    if any(line[4] or line[8] for line in body.lines):
        return "F"
    only_validations = all(line[2] for line in body.lines)
    return "E1" if only_validations else "E2"


def seeds_of_trials(body: Body) -> list[bytes]:
    if body.data.find(b"trial:", body.start) < 0:                              # much faster than an expression
        return []
    return TRIAL.findall(body.data, body.start)


def peak_memory(body: Body) -> dict[str, Any]:
    """The part of a result line of ours that a text log has."""
    at = body.data.find(b"peak memory ", body.start)                           # much faster than an expression
    peak = PEAK.search(body.data, max(body.start, at - 1)) if at >= 0 else None
    if not peak:
        return {}
    names = (peak[1].decode(), "reserved")
    return {"peak_memory_mib": {name: int(mib) for name, mib in zip(names, peak.groups()[1:]) if mib}}


def split(path: Path, lines: list[tuple[bytes, ...]]) -> list[Run]:
    """Runs of one file: a new one where a validation's step does not rise, or another line's falls.
    Where the clock of a run falls, it was started anew: what was read before is of another clock, and its seconds
    become None; later than in families B and C (after 10 steps) no time of that run counts. Blocks that start later
    than the first and only repeat points of the run before them are left out; other such blocks are refused."""
    runs: list[Run] = []
    averages: dict[int, list[float]] = {}                                     # of the validations of runs, by their id
    last = last_val = math.inf
    for step, total, kind, loss, _, printed_time, unit, average, _ in lines:
        at = int(step)
        seconds = number(printed_time)
        if unit == b"ms":
            seconds /= 1000
        if at < last or (kind == b"val_loss" and at <= last_val):
            runs.append(Run(path, "", total=int(total)))
            averages[id(runs[-1])] = []
            last_val = -1
            clock = 0.0
        run = runs[-1]
        if seconds < clock:
            forget_clock(run, at)
        last = at
        clock = seconds
        if kind == b"val_loss":
            run.val.append(Point(at, number(loss), seconds))
            averages[id(run)].append(number(average))
            last_val = at
        else:
            run.steps.append((at, seconds, number(loss) if loss else None))

    for run in runs:
        run.void = run.void or average_contradicts(run, averages[id(run)]) or contradiction(run)
    return without_repeats([run for run in runs if run.val])


def forget_clock(run: Run, step: int) -> None:
    """The timer of a run was started anew at a step."""
    run.notes.append(f"timer restarts at step {step}")
    run.val = [point._replace(seconds=None) for point in run.val]
    run.steps = [(before, None, loss) for before, _, loss in run.steps]
    if step > RESET_STEPS or step == run.total:
        run.void = f"its clock was set back at step {step}"


def without_repeats(runs: list[Run]) -> list[Run]:
    """Runs without the blocks that only repeat; what begins late and tells something else is no run of its own."""
    kept: list[Run] = []
    for run in runs:
        if not kept or run.val[0].step == kept[0].val[0].step:
            kept.append(run)
        elif set(run.val) <= set(kept[-1].val):
            kept[-1].notes.append(f"its last {len(run.val)} points stand twice in the file")
        else:
            run.refused = f"begins at step {run.val[0].step}, unlike the run before it in the file"
            kept.append(run)
    return kept


def environment(body: Body) -> tuple[dict[str, Any], float | None]:
    """Versions, hardware and source hash, and the date, from the block before the first line of a step."""
    data = body.data
    at = environment_start(data)
    if not at:
        at = max(0, body.start - ENVIRONMENT_BYTES)
    torch = TORCH.match(data, at)
    python = PYTHON.search(data, max(0, at - ENVIRONMENT_BYTES), at)
    driver = DRIVER.search(data, at, body.first)
    gpus = GPU.findall(data, at, body.first)
    date = DATE.search(data, at, body.first)

    facts: dict[str, Any] = {}
    if python:
        facts["python"] = python[1].decode()
    if driver:
        facts["driver"] = driver[1].decode()
    if gpus:                                              # of the node; a process on it may use fewer
        facts["hardware"] = f"NVIDIA {gpus[0][0].decode()} x {len(gpus)}"
        facts["world_size"] = len(gpus)
        facts["buses"] = " ".join(bus.decode() for _, bus in gpus)
    if torch:
        facts["torch"] = torch[1].decode()
        facts["cuda"] = torch[2].decode()
        source = data[:max(0, data.rfind(b"\n" + SEPARATOR, 0, at))].strip()
        if source:
            facts["source_sha256"] = hashlib.sha256(source).hexdigest()
    if torch and torch[4]:
        facts["hardware"] = torch[3].decode()
        facts["world_size"] = int(torch[4])
    return facts, seconds_of(date[1].decode(), "%b %d %H:%M:%S %Y") if date else None


# ---- A log against itself -------------------------------------------------------------------------------------------

def contradiction(run: Run) -> str | None:
    """Why the times of a run cannot be right: its clock falls, or its end is before, or long after, its last step."""
    final = run.final
    if final is None or final.seconds is None:
        return None
    clock = [point.seconds for point in run.val if point.seconds is not None]
    if not all(map(math.isfinite, clock)):
        return "a time of its validations is no number"
    if clock != sorted(clock):
        return "the times of its validations fall"
    for step, seconds, _ in reversed(run.steps):
        if seconds is not None and step <= final.step:
            break
    else:
        return None

    step_s = seconds / max(1, step)
    earliest = seconds - TIME_DIGIT_MS / 1000
    latest = seconds + (final.step - step + LATE_STEPS) * step_s + LATE_S
    if earliest <= final.seconds <= latest:
        return None
    return f"its final time is {final.seconds:.3f} s, that of its training line {step} is {seconds:.3f} s"


def average_contradicts(run: Run, averages: list[float]) -> str | None:
    """Why a final time is not what its step_avg says, by the reading of step_avg that the run's other lines obey: the
    time over all steps, or over those after the first ten. Where they obey neither, nothing is said."""
    if not run.val or run.final is not run.val[-1] or run.final.seconds is None:
        return None
    obeyed = []
    for untimed in (0, 10):
        fits = [average_fits(point, average, untimed) for point, average in zip(run.val, averages)
                if point.step > untimed and point.seconds is not None]
        before = fits[:-1]
        if before and all(before):
            obeyed.append(fits[-1])
    if not obeyed or any(obeyed):
        return None
    return (f"its final time is {run.final.seconds:.3f} s, but its step_avg of {averages[-1]:.2f} ms is of another "
            "time, by the rule of its other lines")


def average_fits(point: Point, average: float, untimed: int) -> bool:
    steps = point.step - untimed
    return abs(1000 * point.seconds - average * steps) <= AVERAGE_DIGIT_MS * steps + TIME_DIGIT_MS


# ---- Lists in a README ----------------------------------------------------------------------------------------------

def read_readme(path: Path, data: bytes) -> list[Run]:
    """Lists of losses and times in a README, paired by position; a second list of a kind starts the next pool."""
    pools: list[dict[str, Any]] = []
    for name, body in LIST.findall(data.decode(errors="replace")):
        kind, values = numbers(body)
        if not kind:
            continue
        base = name.lower().startswith("baseline")
        if not pools or kind in pools[-1] or base != pools[-1]["baseline"]:
            pools.append({"baseline": base})
        pools[-1][kind] = values

    runs = []
    for number, pool in enumerate(pools):
        facts = {"pool": number, "baseline": pool["baseline"]}
        for loss, seconds in zip_longest(pool.get("loss", []), pool.get("seconds", [])):
            point = Point(UNKNOWN_STEP, math.nan if loss is None else loss, seconds)
            runs.append(Run(path, "R", len(runs), val=[point], facts=facts))
    if not runs:
        raise NotALog("a page without a list of losses or times")
    return runs


def numbers(body: str) -> tuple[str | None, list[float]]:
    """Kind ("loss", "seconds", None) and values of a list's text; of a comprehension those of its inner list."""
    body = re.sub(r"#.*|^[ \t]*>", "", body, flags=re.M)
    if " for " in body:
        body = re.split(r"[\[(]", body)[-1]
    try:
        values = [float(re.sub(r"m?s$", "", item.strip())) for item in body.split(",") if item.strip()]
    except ValueError:
        return None, []

    low = min(values, default=0.0)
    high = max(values, default=0.0)
    if low > SECONDS_RANGE[1]:
        return "seconds", [value / 1000 for value in values]
    for kind, span in (("loss", LOSS_RANGE), ("seconds", SECONDS_RANGE)):
        if span[0] <= low and high <= span[1]:
            return kind, values
    return None, values


# ---- The same run twice ---------------------------------------------------------------------------------------------

def content(run: Run) -> tuple[Any, ...]:
    """Last three validations, which tell a run from others: ours to the last bit, else as any wrapper prints them.
    Two runs of one seed may well agree to the ms that is printed. Empty for a README's list."""
    if run.family == "R":
        return ()
    points = run.val[-3:]
    return tuple(points) if run.family == "ours" else printed(points)


def printed(points: list[Point]) -> tuple[str, ...]:
    texts = []
    for step, loss, seconds in points:
        ms = "-" if seconds is None else f"{1000 * seconds:.0f}"
        texts.append(f"{step} {loss:.4f} {ms}")
    return tuple(texts)


def how_much_is_known(run: Run) -> tuple[bool, int, int]:
    return run.family == "ours", len(run.val), len(run.facts)


def without_duplicates(runs: list[Run]) -> tuple[list[Run], list[tuple[Path, Path]]]:
    """Each run once, where most is known of it; a log of one line is matched by its last line."""
    kept: dict[Any, Run] = {}
    duplicates = []
    for run in sorted(runs, key=how_much_is_known, reverse=True):
        key = content(run) or id(run)
        if key in kept:
            duplicates.append((run.path, kept[key].path))
            continue
        kept[key] = run
        if run.family != "R":
            for points in (run.val[-3:], run.val[-1:]):
                kept.setdefault(printed(points), run)
    ids = set(map(id, kept.values()))
    return [run for run in runs if id(run) in ids], duplicates
