"""What runs must have in common to stand in one record, and what an entry of a track must be, as far as a program can
tell; all the rules: records/README.md."""
from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tools import ablate, compare, prediction
from tools.compare import Side
from tools.layout import LOG, MANIFEST, lines, predicts, sha256, short_hashes
from tools.logs import Run

PLAIN_ROWS = 10                    # class plain: no table has more rows than this many times the vocabulary
BUDGET_OFF = 0.03                  # a run that ends further off its time budget is no entry
ENTRY = "params_total", "params_per_token", "table_rows", "table_bytes", "tokens_trained", "untimed_warmup_steps"
FITTED = "steps", "num_scheduled_steps", "num_extension_steps"               # by a run to its time budget
ALIKE = "data_sha256", "hardware", "world_size", "torch", "cuda"             # throughout a record

Problem = tuple[str, Any, str]     # what, found, expected


class Track(NamedTuple):
    """The rules that a program can apply."""
    target: float | None           # the mean final validation loss is to be below, nats per token
    rank: str                      # "seconds" or "loss": the lower the better
    needs: dict[str, Any]          # what each run must have
    alike: tuple[str, ...]         # what entries share that are ranked together, besides the class


def race(world_size: int) -> Track:
    """Against the clock, on the data of the public records."""
    needs = {"world_size": world_size, "val_tokens": 10_485_760}
    return Track(3.28, "seconds", needs, ("hardware", "data_sha256"))


TRACKS = {
    "8xGPU": race(8),
    "1xGPU": race(1),
    "pocket": Track(None, "loss", {"tokens": 563_200, "val_tokens": 65_536}, ("data_sha256",)),
    "budget": Track(None, "loss", {}, ("hardware", "budget_s", "data_sha256", "val_tokens")),
}


def value(run: Run, key: str) -> Any:
    """A fact of a run, wherever its log states it."""
    stated = run.facts["config"] | run.facts | run.result
    return stated.get("tokens" if key == "tokens_trained" else key)


def folder_name(run: Run) -> str:
    return run.path.parent.name


def class_of(rows: dict[str, int] | None, vocab_size: int) -> str | None:
    """plain or table, by the rows of the tables; None where they are not known."""
    if not rows:
        return None
    return "table" if max(rows.values()) > PLAIN_ROWS * vocab_size else "plain"


def problems(sides: dict[str, Side], stated: dict[str, Any], folder: Path) -> Iterator[Problem]:
    """Why these runs cannot stand in one record, or cannot be an entry of its track."""
    if predicts(stated):
        yield from prediction.problems(folder, stated)
        return

    runs = [run for side in sides.values() for run in side.reading.runs]
    for run in runs:
        yield from unfit(run)
    yield from same_files(runs)
    yield from left_out(runs, folder / "logs")
    if stated["kind"] == "ablation" and stated["base"] != ablate.BASELINE:
        yield "groups", [*sides], f"one of them {ablate.BASELINE}"
    yield from mixtures(runs, sides, stated["track"])
    if stated["kind"] == "entry":
        yield from misfits(sides, stated)


def unfit(run: Run) -> Iterator[Problem]:
    if run.void or not run.finished or not math.isfinite(run.loss):
        found = run.void or run.aborted or [run.loss, *run.notes]
        yield folder_name(run), found, "a finished run whose clock counts"


def same_files(runs: list[Run]) -> Iterator[Problem]:
    seen: dict[str, Run] = {}
    for run in runs:
        first = seen.setdefault(sha256(run.path), run)
        if first is not run:
            yield folder_name(run), f"the same log as {folder_name(first)}", "each run once"


def left_out(runs: list[Run], logs: Path) -> Iterator[Problem]:
    """Runs that the record has, or whose manifest has them, and that no group has."""
    for line in lines(logs / MANIFEST, "end"):
        if line["outcome"] == "done" and not (logs / line["folder"]).exists():
            yield "runs of the manifest", f"{line['folder']} is done and left out", "all that are done"

    read = {run.path.parent for run in runs}
    there = {path.parent for path in logs.rglob(LOG)}
    for log in there - read:
        yield "logs", f"{log.name} is in no group", "each run in a group"


def mixtures(runs: list[Run], sides: dict[str, Side], track: str | None) -> Iterator[Problem]:
    """Facts that differ and must not: some throughout the record, most of them within a group."""
    for key in ALIKE:
        yield from mixed("the record", runs, key)

    settings = {key for run in runs for key in compare.config(run)}
    for name, side in sides.items():
        for key in ("source_sha256", "steps", *sorted(settings)):
            if key in FITTED and track == "budget":
                continue
            yield from mixed(f"group {name!r}", side.runs, key)


def mixed(where: str, runs: list[Run], key: str) -> Iterator[Problem]:
    found = {json.dumps(value(run, key)): folder_name(run) for run in runs}
    if len(found) > 1:
        yield f"mixed {key} in {where}", short_hashes(found), "one"


def misfits(sides: dict[str, Side], stated: dict[str, Any]) -> Iterator[Problem]:
    """Which rules of its track an entry breaks, as far as logs can show it."""
    track = TRACKS.get(stated["track"])
    groups = 2 if stated["base"] else 1
    if not track or len(sides) != groups:
        found = f"track {stated['track']}, groups {[*sides]}"
        yield "entry", found, f"one of {[*TRACKS]}, one group beside a baseline"
        return
    for run in sides[stated["main"]].runs:
        yield from unlike_track(run, stated, track)


def unlike_track(run: Run, stated: dict[str, Any], track: Track) -> Iterator[Problem]:
    name = folder_name(run)
    if stated["track"] == "budget":
        budget_s = value(run, "budget_s") or math.inf
        if abs(run.seconds / budget_s - 1) > BUDGET_OFF:
            yield f"{name}, seconds", run.seconds, f"within 3 % of --time_budget ({budget_s} s)"

    for key, needed in track.needs.items():
        found = value(run, key)
        if found != needed:
            yield f"{name}, {key}", found, f"{needed} on track {stated['track']}"

    for key in ENTRY:
        found = value(run, key)
        by_hand = key in stated["entry"]
        if (found is None) != by_hand:
            yield f"{name}, {key}", found, f"logged, else --entry {key}=VALUE, not both"
