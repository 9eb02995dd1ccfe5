"""One side of a comparison: which runs were read, which of them count, and what they say of themselves."""
from __future__ import annotations

import fnmatch
import glob
import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tools import logs
from tools.layout import MANIFEST, MANIFEST_DEPTH, lines, shown
from tools.logs import Run, ToolError
from tools.timing import Timed
from tools.verdict import mean

KIND = ("hardware", "world_size", "clock")             # of machine and clock: times of two kinds are not compared
SOFTWARE = ("torch", "cuda", "triton", "nccl", "python")
MACHINE = ("driver", "buses")                          # tell machines of one kind apart
NO_MATTER = ("seed", "run_dir", "save", "sample", "prompt", "ranks", "sample_tokens", "comm_timeout", "resume", "runs",
             "checkpoint_every", "target_loss", "profile")                    # fields of a config that change no result
SHOWN = 6                          # items of a list; the JSON has all
SHOWN_CHARACTERS = 60              # of an item
HASH_CHARACTERS = 8                # of a hash in a report
HASH_LENGTH = 64                   # of a whole one


@dataclass(frozen=True)
class Choice:
    """Which of the runs that were read are meant."""
    steps: int | None = None               # those that end at this step, else all up to it
    source: str | None = None              # first digits of their source's sha256
    exclude: tuple[str, ...] = ()          # patterns of paths


@dataclass
class Side:
    """What was read for one side, and what of it counts: runs, those with a time, their times in s."""
    name: str
    paths: list[Path]
    reading: logs.Reading
    runs: list[Run] = field(default_factory=list)
    left: list[str] = field(default_factory=list)          # path and reason of what does not count

    def __post_init__(self) -> None:
        some_ended = any(run.finished for run in self.reading.runs)
        for run in self.reading.runs:
            counts = run.finished
            if not some_ended and run.family != "ours":                       # peers may stop all runs on purpose
                counts = run.final is not None
            if counts and not run.refused:
                self.runs.append(run)
            else:
                self.left.append(f"{shown(run.path)}: {why_left(run)}")

    @property
    def timed(self) -> list[Run]:
        return [run for run in self.runs if run.seconds is not None]

    @property
    def times(self) -> list[float]:
        return [run.seconds for run in self.timed]

    def seeds(self) -> list[list[Run]]:
        """Runs by what fixes their losses; runs without a known seed that have the same curve are one seed too."""
        found: dict[Any, list[Run]] = {}
        for run in self.runs:
            found.setdefault(what_fixes_losses(run), []).append(run)
        return list(found.values())

    def losses(self) -> list[float]:
        """One final loss per seed, the mean of its runs; without those that are not finite."""
        means = [mean(run.loss for run in same) for same in self.seeds()]
        return [loss for loss in means if math.isfinite(loss)]

    def values(self, key: str) -> list[str]:
        """All values of a setting or fact on this side, as text."""
        found = {text_of(value) for value in self.each(key) if value is not None}
        return sorted(found)

    def each(self, key: str) -> list[Any]:
        """A setting or fact by run; None where it is not said."""
        return [fact(run, key) for run in self.runs]

    def memory(self) -> list[float]:
        """Peak memory by run, MiB: allocated on a GPU, of the process on a CPU."""
        found = []
        for run in self.runs:
            found += list(run.result.get("peak_memory_mib", {}).values())[:1]
        return found


def side_of(name: str, paths: list[Path], choice: Choice = Choice()) -> Side:
    """Raises ToolError with the reasons if nothing there is a run that counts."""
    reading = logs.read(paths)
    chosen, passed = chosen_of(reading.runs, choice)
    side = Side(name, paths, reading._replace(runs=chosen))
    side.left = passed + side.left
    if not side.runs:
        why = side.left + [f"{shown(path)}: {reason}" for path, reason in reading.unread]
        raise ToolError(f"side {name}: {short(map(shown, paths))}", short(why) or "no file",
                        "at least one finished run",
                        "give a log.jsonl, a run directory, a text log, or a directory of them")
    return side


# ---- Which runs are meant -------------------------------------------------------------------------------------------

def expanded(names: Iterable[str | Path]) -> list[Path]:
    """Paths, with patterns replaced by what they match. A name that exists is no pattern."""
    paths = []
    for name in map(str, names):
        matches = [name] if os.path.exists(name) else sorted(glob.glob(name, recursive=True))
        paths += map(Path, matches or [name])
    return paths


def chosen_of(runs: list[Run], choice: Choice) -> tuple[list[Run], list[str]]:
    """The runs that are meant, and a line for each other."""
    chosen = []
    passed = []
    for run in runs:
        source = fact(run, "source_sha256")
        source = "" if source is None else source
        if any(fnmatch.fnmatch(str(run.path), f"*{pattern}*") for pattern in choice.exclude):
            passed.append(f"{shown(run.path)}: excluded")
        elif choice.source and not source.startswith(choice.source):
            passed.append(f"{shown(run.path)}: its source is {hash_or_text(source) or 'not known'}")
        else:
            chosen.append(run)
    if choice.steps is None:
        return chosen, passed
    return at_steps(chosen, passed, choice.steps)


def at_steps(runs: list[Run], passed: list[str], steps: int) -> tuple[list[Run], list[str]]:
    """Runs that end at a step; if there are none, those that validate there, up to it."""
    ended = [run for run in runs if run.final and run.final.step == steps]
    if ended:
        kept = {id(run) for run in ended}
        passed += [f"{shown(run.path)}: does not end at step {steps}" for run in runs if id(run) not in kept]
        return [replace(run, total=steps) for run in ended], passed

    chosen = []
    for run in runs:
        if any(point.step == steps for point in run.val):
            chosen.append(cut_at(run, steps))
        else:
            passed.append(f"{shown(run.path)}: no validation at step {steps}")
    return chosen, passed


def cut_at(run: Run, steps: int) -> Run:
    """A run as if it had been planned to end at one of its validations."""
    val = [point for point in run.val if point.step <= steps]
    trained = [step for step in run.steps if step[0] <= steps]
    return replace(run, total=steps, val=val, steps=trained, notes=[*run.notes, f"taken at step {steps}"])


def why_left(run: Run) -> str:
    if run.refused:
        return run.refused
    if run.aborted is not None:
        return f"aborted: {run.aborted}"
    return "; ".join(run.notes) or "no validation"


# ---- What runs say of themselves ------------------------------------------------------------------------------------

def config(run: Run) -> dict[str, Any]:
    """Settings that may change a result; ours only."""
    settings = run.facts.get("config", {})
    return {key: value for key, value in settings.items() if key not in NO_MATTER}


def fact(run: Run, key: str) -> Any:
    if key == "clock":
        return clock_of(run)
    settings = config(run)
    return settings[key] if key in settings else run.facts.get(key)


def clock_of(run: Run) -> str | None:
    """How its time was taken; None for a list in a README, which does not say."""
    if run.family == "R":
        return None
    for note in run.notes:
        if note.startswith("timer"):
            return note
    return "never restarts"


def what_fixes_losses(run: Run) -> Any:
    """Equal for runs of which only one tells something about the loss."""
    if run.seed is not None:
        return run.seed, run.facts.get("source_sha256"), run.facts.get("data_sha256"), text_of(config(run))
    curve = tuple((point.step, point.loss) for point in run.val)
    return curve if len(curve) > 2 else id(run)


def machine_of(run: Run) -> str | None:
    """Hardware, clock, software, and what tells machines of one kind apart; None if hardware or clock is not said."""
    if fact(run, "hardware") is None or clock_of(run) is None:
        return None
    return ", ".join(text_of(fact(run, key)) for key in (*KIND, *SOFTWARE, *MACHINE))


def timed_of(side: Side, pairs: dict[int, int], places: dict[int, int]) -> list[Timed]:
    """The times of a side; pairs and places of a bench by id of the run."""
    found = []
    for run in side.timed:
        steps = run.final.step if run.final.step > 0 else None
        found.append(Timed(run.seconds, steps, run.started, machine_of(run), pairs.get(id(run)), places.get(id(run))))
    return found


# ---- The manifest of a bench ----------------------------------------------------------------------------------------

def manifest_of(a: Side, b: Side) -> tuple[dict[int, int], dict[int, int], list[str]]:
    """By id of a run its pair and its place in time, from a manifest above both sides; and what it says of its runs."""
    pairs: dict[int, int] = {}
    places: dict[int, int] = {}
    notes = []
    for path in sorted(manifests_above(a) & manifests_above(b)):
        ends = lines(path, "end")
        for run, line in noted(a.timed + b.timed, path, ends):
            places[id(run)] = line["run"]
            pairs[id(run)] = line.get("pair")
        outcomes = Counter(line.get("outcome") for line in ends)
        told = ", ".join(f"{n} runs {word}" for word, n in outcomes.items())
        notes.append(f"manifest: {told}, {len(places)} of them compared")
    return pairs, places, notes


def noted(runs: list[Run], manifest: Path, ends: list[dict[str, Any]]) -> Iterator[tuple[Run, dict[str, Any]]]:
    """Runs with the lines that tell of their end."""
    by_folder = {(manifest.parent / line["folder"]).resolve(): line for line in ends if "folder" in line}
    for run in runs:
        for folder in run.path.resolve().parents:
            if folder in by_folder:
                yield run, by_folder[folder]
                break


def told_apart(a: Side, b: Side) -> bool:
    """Whether a bench noted other flags, or other imported files, for the sides: a text log tells neither."""
    for manifest in manifests_above(a) & manifests_above(b):
        if plans_in(manifest, a) != plans_in(manifest, b):
            return True
    return False


def plans_in(manifest: Path, side: Side) -> set[str]:
    """Sources and flags of a side's runs; the flags of ours stand in their logs, with the defaults."""
    plans = {}
    for line in lines(manifest, "bench"):
        plans |= line.get("sides", {})
    found = set()
    for run, line in noted(side.runs, manifest, lines(manifest, "end")):
        plan = plans.get(line.get("side"), {})
        sources = sorted(plan.get("sources", {}).values())
        flags = [flag for flag in plan.get("flags", []) if name_of(flag) not in NO_MATTER]
        found.add(text_of(sources if run.family == "ours" else sources + flags))
    return found


def name_of(flag: str) -> str:
    return flag.lstrip("-").partition("=")[0]


def manifests_above(side: Side) -> set[Path]:
    found = set()
    for run in side.runs:
        for folder in list(run.path.resolve().parents)[:MANIFEST_DEPTH]:
            path = folder / MANIFEST
            if path.is_file():
                found.add(path)
    return found


# ---- Words ----------------------------------------------------------------------------------------------------------

def text_of(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def short(items: Iterable[str]) -> str:
    items = list(items)
    more = f"; and {len(items) - SHOWN} more" if len(items) > SHOWN else ""
    return "; ".join(items[:SHOWN]) + more


def hash_or_text(value: str) -> str:
    """The first digits of a hash; any other text as it is."""
    if len(value) == HASH_LENGTH and set(value) <= set("0123456789abcdef"):
        return value[:HASH_CHARACTERS]
    return value


def cut(values: list[str]) -> str:
    together = " and ".join(map(hash_or_text, values))
    return together[:SHOWN_CHARACTERS] or "not said"
