"""Reads training logs: this trainer's log.jsonl ("ours"), and every family of text log in the speedrun's records:

A llm.c lines, B ms with training loss, C ms with `nan` averages, D ms, E1 seconds, E2 seconds with timing lines, F
extra keys, G several runs in a file, H console copy without source, I one line, R lists in a README. Expressions are
anchored to whole lines and used after the last separator only: a log holds its source, and that prints such lines."""
from __future__ import annotations

import hashlib, json, math, os, re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

NUMBER = rb"[0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|nan|inf"
EXTRA = rb"((?: [a-z_]+:\S+)*?)"
LINE = re.compile(rb"^step:(\d+)/(\d+)(?: (val_loss|train_loss):(%b))?%b train_time:(%b)(ms|s) step_avg:(%b)ms%b\s*?$"
                  % (NUMBER, EXTRA, NUMBER, NUMBER, EXTRA), re.M)
LLMC = re.compile(rb"^s:(\d+) (tel|trl):(%b)(?: .*)?$" % NUMBER, re.M)
PEAK = re.compile(rb"^peak memory (allocated|consumption): (\d+) MiB(?: reserved: (\d+) MiB)?\s*$", re.M)
SEPARATOR = b"=" * 20              # at least; the line holds nothing else
TORCH = re.compile(rb"Running [Pp]y[Tt]orch (\S+) compiled for CUDA (\S+)(?: on (.*?)\s+with world_size (\d+))?\s")
PYTHON = re.compile(rb"^Running Python (\S+)", re.M)
DRIVER = re.compile(rb"Driver Version: (\S+)")
GPU = re.compile(rb"^\|\s+\d+\s+NVIDIA (.+?)\s+(?:On|Off)\s+\|", re.M)
TRIAL = re.compile(rb"^trial:\d+/\d+ seed:(\d+)\s*$", re.M)
LIST = re.compile(r"^[ \t>]*([A-Za-z_]*(?:loss|acc|time)\w*)[ \t]*=[ \t]*\[([^\]]*)\]", re.M | re.I)
LOG_SUFFIXES = ("", ".txt", ".log", ".out", ".stdout", ".json", ".jsonl", ".md")
ENVIRONMENT_BYTES = 1 << 14        # of the tables of GPUs and processes, at most
UNKNOWN_STEP = -1                  # a list in a README has no steps
LOSS_RANGE, SECONDS_RANGE = (1.0, 4.0), (20.0, 4000.0)      # README lists: what is larger is milliseconds

class ToolError(Exception):
    """What was found, what was expected, and what to do about it."""
    def __init__(self, what: str, found: object, expected: object, do: str) -> None:
        super().__init__(f"{what}\n  found:    {found}\n  expected: {expected}\n  do:       {do}")

class NotALog(Exception): """Why a file holds no run."""

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
    notes: list[str] = field(default_factory=list)

    @property
    def final(self) -> Point | None:
        """The last validation at the planned end; of a run that stopped early its last one."""
        at_end = [point for point in self.val if point.step == self.total]
        return (at_end or self.val or [None])[-1]

    @property
    def loss(self) -> float | None:
        return self.final.loss if self.final else None

    @property
    def seconds(self) -> float | None:
        """Training time at the final validation; None where there is none, or where it does not count."""
        return self.final.seconds if self.final and not self.void else None

    @property
    def finished(self) -> bool:
        """Ours: there is a result line. Others: a validation at the planned last step, or no plan to miss."""
        if self.family == "ours":
            return bool(self.result) and self.aborted is None and self.final is not None
        return self.final is not None and self.total in (None, self.final.step)

class Reading(NamedTuple):
    runs: list[Run]
    unread: list[tuple[Path, str]]
    duplicates: list[tuple[Path, Path]]                   # left out, and the file that has the same run

def read(paths: Iterable[Path]) -> Reading:
    """All runs of files and directories (read to the bottom, in the order of names), and what could not be read.
    In a run directory (a folder with log.jsonl) log.txt is the same run and is not read. README lists count only where
    no log was found: they repeat the logs beside them.
    Raises   ToolError if a path does not exist."""
    runs, unread = [], []
    for path, named in files(paths):
        try:
            if not named and path.suffix.lower() not in LOG_SUFFIXES:
                raise NotALog(f"not a log by its name ({path.suffix})")
            runs += read_file(path)
        except NotALog as reason:
            unread.append((path, str(reason)))
        except OSError as error:
            unread.append((path, error.strerror or str(error)))
    lists = [run.path for run in runs if run.family == "R"]
    if len(lists) < len(runs):
        unread += [(page, f"lists of {lists.count(page)} runs in a README: logs count") for page in sorted(set(lists))]
        runs = [run for run in runs if run.family != "R"]
    runs, duplicates = without_duplicates(runs)
    return Reading(runs, unread, duplicates)

def files(paths: Iterable[Path]) -> Iterator[tuple[Path, bool]]:
    """Each file once, and whether it was named itself."""
    seen = set()
    for path in map(Path, paths):
        if not path.exists():
            raise ToolError("path", path, "a file or a directory", "check the spelling")
        found = [path] if not path.is_dir() else sorted(
            Path(folder, name) for folder, inner, names in os.walk(path)
            for name in names + [link for link in inner if Path(folder, link).is_symlink()]      # named, not followed
            if not (name == "log.txt" and "log.jsonl" in names))
        yield from ((file, file == path) for file in found if file not in seen)
        seen.update(found)

def read_file(path: Path) -> list[Run]:
    """The runs of one file. Raises NotALog with the reason if it holds none."""
    data = path.read_bytes()
    if not data.strip() or b"\0" in data:
        raise NotALog("binary" if data.strip() else "empty")
    if path.suffix == ".jsonl":
        return [read_ours(path, data)]
    if path.suffix.lower() == ".md":
        return read_readme(path, data)
    return read_llmc(path, data) if data.startswith(b"s:") else read_text(path, data)

def read_ours(path: Path, data: bytes) -> Run:
    """log.jsonl. The last line may be torn by a crash; a resumed log reads as one run."""
    run, lines = Run(path, "ours"), data.split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith(b'{"type": "comms"'):          # most of the lines, and not needed here
            continue
        try:
            take(run, json.loads(line))
        except (ValueError, KeyError, AttributeError, TypeError):
            if number < len(lines):
                raise NotALog(f"line {number} is not one of a log.jsonl") from None
            run.notes.append("last line torn")
    if not run.facts:
        raise NotALog("no header line")
    run.void = run.result.get("void")
    if not run.result and run.aborted is None:
        run.notes.append("no result line and no cause")
    return run

def take(run: Run, event: dict[str, Any]) -> None:
    """Add one line of a log.jsonl to its run."""
    kind = event.pop("type")
    if not run.facts:
        if kind != "header":
            raise NotALog("no header line at the start")
        whole = event["config"].get("num_scheduled_steps", 0) + event["config"].get("num_extension_steps", 0)
        run.facts, run.seed = event, event.get("seed")
        run.total = min(event["config"].get("max_steps") or whole, whole) or None
    elif kind == "step":
        run.steps.append((event["step"], event["train_time_ms"] / 1000, event["train_loss"]))
    elif kind == "val":
        run.val.append(Point(event["step"], event["val_loss"], event["train_time_ms"] / 1000))
    elif kind == "phase":
        run.phases.append(event)
    elif kind == "budget":
        run.total = event["steps"]
    elif kind == "result":
        run.result = event
    elif kind == "aborted":
        run.aborted = str(event.get("cause", "not said"))
    elif kind == "resumed":                                                   # what the earlier part did after its
        run.steps = [step for step in run.steps if step[0] <= event["step"]]  # checkpoint was done again
        run.val = [point for point in run.val if point.step <= event["step"]]
        run.aborted = None
        run.notes.append(f"resumed at step {event['step']}")

def read_llmc(path: Path, data: bytes) -> list[Run]:
    lines = [(int(step), kind, float(loss)) for step, kind, loss in LLMC.findall(data)]
    run = Run(path, "A", val=[Point(step, loss, None) for step, kind, loss in lines if kind == b"tel"],
              steps=[(step, None, loss) for step, kind, loss in lines if kind == b"trl"])
    if not run.val:
        raise NotALog("no validation line")
    return [run]

def read_text(path: Path, data: bytes) -> list[Run]:
    """Families B to I."""
    start = body_start(data)
    lines = LINE.findall(data, start)
    if not any(line[2] == b"val_loss" for line in lines):
        raise NotALog("no validation line" + " after the last separator" * bool(start))
    runs, facts = split(path, lines), environment(data, start, LINE.search(data, start).start())
    seeds, peak, kind = TRIAL.findall(data, start), PEAK.search(data, start), family(data, start, lines, len(runs))
    for index, run in enumerate(runs):
        run.index, run.facts, run.family = index, facts, kind
        run.seed = int(seeds[index]) if len(seeds) == len(runs) else None
        if peak:
            mib = zip((peak[1].decode(), "reserved"), peak.groups()[1:])
            run.result = {"peak_memory_mib": {name: int(value) for name, value in mib if value}}
        run.notes += [] if run.finished else [f"stops at {run.final.step} of {run.total}"]
    return runs

def body_start(data: bytes) -> int:
    """Where the last separator line ends; 0 where there is none."""
    at = data.rfind(SEPARATOR)
    while at >= 0:
        start, end = data.rfind(b"\n", 0, at) + 1, (data + b"\n").find(b"\n", at)
        if not data[start:end].strip(b"=\r"):
            return end
        at = data.rfind(SEPARATOR, 0, start)
    return 0

def family(data: bytes, start: int, lines: list[tuple[bytes, ...]], runs: int) -> str:
    if b"\n" not in data.strip():
        return "I"
    if runs > 1:
        return "G"
    if lines[0][6] == b"ms":
        nan = any(line[7] == b"nan" and line[0] != b"0" for line in lines)
        return "B" if any(line[2] == b"train_loss" for line in lines) else "C" if nan else "D"
    extra = any(line[4] or line[8] for line in lines)
    return "H" if not start else "F" if extra else "E1" if all(line[2] for line in lines) else "E2"

def split(path: Path, lines: list[tuple[bytes, ...]]) -> list[Run]:
    """Runs of one file: a new one where a validation's step does not rise, or another line's falls.
    Where the clock of a run falls, it was started anew (families B and C after 10 steps): what was read before is of
    another clock, and its seconds become None. Blocks that start later than the first and only repeat points of the run
    before them are left out."""
    runs: list[Run] = []
    last = last_val = math.inf
    for step, total, kind, loss, _, time, unit, _, _ in lines:
        at, seconds = int(step), float(time) / 1000 if unit == b"ms" else float(time)
        if at < last or (kind == b"val_loss" and at <= last_val):
            runs.append(Run(path, "", total=int(total)))
            last_val, clock = -1, 0.0
        run = runs[-1]
        if seconds < clock:
            run.notes.append(f"timer restarts at step {at}")
            run.val = [point._replace(seconds=None) for point in run.val]
            run.steps = [(before, None, loss_before) for before, _, loss_before in run.steps]
        last, clock = at, seconds
        if kind == b"val_loss":
            run.val.append(Point(at, float(loss), seconds))
            last_val = at
        else:
            run.steps.append((at, seconds, float(loss) if loss else None))
    kept: list[Run] = []
    for run in (run for run in runs if run.val):
        if kept and run.val[0].step != kept[0].val[0].step and set(run.val) <= set(kept[-1].val):
            kept[-1].notes.append(f"its last {len(run.val)} points stand twice in the file")
        else:
            kept.append(run)
    return kept

def environment(data: bytes, start: int, first: int) -> dict[str, Any]:
    """Versions, hardware and source hash, from the block that ends before the first line of a step (at `first`)."""
    at = max(data.rfind(b"\nRunning PyTorch ", 0, first), data.rfind(b"\nRunning pytorch ", 0, first)) + 1
    at = at or max(0, start - ENVIRONMENT_BYTES)
    torch, python = TORCH.match(data, at), PYTHON.search(data, max(0, at - ENVIRONMENT_BYTES), at)
    gpus, driver = GPU.findall(data, at, first), DRIVER.search(data, at, first)
    facts: dict[str, Any] = {"python": python and python[1].decode(), "driver": driver and driver[1].decode()}
    if gpus:                                              # of the node; a process on it may use fewer
        facts |= {"hardware": f"NVIDIA {gpus[0].decode()} x {len(gpus)}", "world_size": len(gpus)}
    if torch:
        source = data[:max(0, data.rfind(b"\n" + SEPARATOR, 0, at))].strip()
        facts |= {"torch": torch[1].decode(), "cuda": torch[2].decode(),
                  "source_sha256": hashlib.sha256(source).hexdigest() if source else None}
    if torch and torch[4]:
        facts |= {"hardware": torch[3].decode(), "world_size": int(torch[4])}
    return {key: value for key, value in facts.items() if value is not None}

def read_readme(path: Path, data: bytes) -> list[Run]:
    """Lists of losses and times in a README, paired by position; a second list of a kind starts the next pool."""
    pools: list[dict[str, Any]] = []
    for name, body in LIST.findall(data.decode(errors="replace")):
        kind, values = numbers(body)
        base = name.lower().startswith("baseline")
        if kind and (not pools or kind in pools[-1] or base != pools[-1]["baseline"]):
            pools.append({"baseline": base})
        if kind:
            pools[-1][kind] = values
    runs = []
    for number, pool in enumerate(pools):
        for loss, seconds in zip_longest(pool.get("loss", []), pool.get("seconds", [])):
            point = Point(UNKNOWN_STEP, math.nan if loss is None else loss, seconds)
            runs.append(Run(path, "R", len(runs), val=[point], facts={"pool": number, "baseline": pool["baseline"]}))
    if not runs:
        raise NotALog("a page without a list of losses or times")
    return runs

def numbers(body: str) -> tuple[str | None, list[float]]:
    """Kind ("loss", "seconds", None) and values of a list's text; of a comprehension those of its inner list."""
    body = re.sub(r"#.*|^[ \t]*>", "", body, flags=re.M)
    body = re.split(r"[\[(]", body)[-1] if " for " in body else body
    try:
        values = [float(re.sub(r"m?s$", "", item.strip())) for item in body.split(",") if item.strip()]
    except ValueError:
        return None, []
    low, high = min(values, default=0.0), max(values, default=0.0)
    if low > SECONDS_RANGE[1]:
        return "seconds", [value / 1000 for value in values]
    kinds = (("loss", LOSS_RANGE), ("seconds", SECONDS_RANGE))
    return next((kind for kind, span in kinds if span[0] <= low and high <= span[1]), None), values

def content(run: Run) -> tuple[Any, ...]:
    """Last three validations, which tell a run from others: ours to the last bit, else as any wrapper prints them.
    Two runs of one seed may well agree to the ms that is printed. Empty for a README's list."""
    points = run.val[-3:] if run.family != "R" else []
    return tuple(points) if run.family == "ours" else printed(points)

def printed(points: list[Point]) -> tuple[str, ...]:
    return tuple(f"{step} {loss:.4f} {'-' if time is None else f'{1000 * time:.0f}'}" for step, loss, time in points)

def without_duplicates(runs: list[Run]) -> tuple[list[Run], list[tuple[Path, Path]]]:
    """Each run once, where most is known of it; a log of one line is matched by its last line."""
    kept: dict[Any, Run] = {}
    duplicates = []
    for run in sorted(runs, key=lambda run: (run.family != "ours", -len(run.val), -len(run.facts))):
        key = content(run) or id(run)
        if key in kept:
            duplicates.append((run.path, kept[key].path))
            continue
        kept[key] = run
        for points in (run.val[-3:], run.val[-1:]) if content(run) else ():
            kept.setdefault(printed(points), run)
    ids = set(map(id, kept.values()))
    return [run for run in runs if id(run) in ids], duplicates
