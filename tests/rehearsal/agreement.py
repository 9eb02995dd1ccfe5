"""Whether ranks that went through a run side by side have said to one another what each expects of the others.

A recording is what one rank has launched, in its order, the error that ended it, if one did, and when (s):

    {"launches": [LAUNCH, ...], "error": "", "ended": 0.0}

LAUNCH: `group` that it belongs to, `name` of the collective, `settings` such as its reduction, `subject` (what it is
about: a parameter), `out` and `in`: [dtype, shape], `out_splits` and `in_splits`: rows by rank, or None for equal
parts, `place` in the run, `line` of the trainer, `awaited` by which line, empty if by none.

Groups are independent of one another; inside a group a rank's n-th launch meets the n-th of all others.
"""
from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

Launch = dict[str, Any]
Recording = dict[str, Any]
LISTS = "all_to_all_single"              # the one collective whose sizes differ from rank to rank
# How many times its input a rank gets; a fraction of it where negative. In ranks.
GROWS = {"all_gather_into_tensor": 1, "reduce_scatter_tensor": -1}


def disagreements(recordings: list[Recording]) -> list[str]:
    """What does not fit together, one line each; empty if everything does. Recordings by rank."""
    by_end = sorted(range(len(recordings)), key=lambda rank: recordings[rank]["ended"])    # the first one is the cause
    found = []
    for rank in by_end:
        if recordings[rank]["error"]:
            found.append(f"rank {rank} ended early: {recordings[rank]['error']}")
    for group in groups_of(recordings):
        sequences = [of_group(recording, group) for recording in recordings]
        ended = [len(sequence) for sequence, recording in zip(sequences, recordings) if recording["error"]]
        found += in_group(sequences, min(ended, default=max(map(len, sequences))))
    for rank, recording in enumerate(recordings):
        found += never_awaited(rank, recording)
    return found


def groups_of(recordings: list[Recording]) -> list[str]:
    """In the order in which they first appear."""
    names: dict[str, None] = {}
    for recording in recordings:
        for launch in recording["launches"]:
            names[launch["group"]] = None
    return list(names)


def of_group(recording: Recording, group: str) -> list[Launch]:
    return [launch for launch in recording["launches"] if launch["group"] == group]


def in_group(sequences: list[list[Launch]], length: int) -> list[str]:
    """Up to the first place where the ranks are not at the same collective: after it nothing meets its own.

    length: of a recording that is whole, or of the shortest that is not
    """
    found = []
    for position in range(length):
        launches = []
        for sequence in sequences:
            launches.append(sequence[position] if position < len(sequence) else None)
        strays = out_of_order(position, launches)
        if strays:
            return found + strays
        if launches[0]["name"] == LISTS:
            found += wrong_lists(position, launches)
        else:
            found += wrong_sizes(position, launches)
    return found


# ---- Order
def kind_of(launch: Launch | None) -> tuple | None:
    """What has to be alike on all ranks."""
    if launch is None:
        return None
    lengths = 1 if launch["name"] == LISTS else 0             # leading axes that are a rank's own
    shapes = []
    for side in ("out", "in"):
        dtype, shape = launch[side]
        shapes.append((dtype, tuple(shape[lengths:])))
    return launch["name"], launch["settings"], launch["subject"], *shapes


def out_of_order(position: int, launches: list[Launch | None]) -> list[str]:
    """Ranks whose n-th collective is not what most ranks have there."""
    kinds = [kind_of(launch) for launch in launches]
    usual, _ = Counter(kinds).most_common(1)[0]
    other = kinds.index(usual)
    group = next(launch["group"] for launch in launches if launch)
    found = []
    for rank, launch in enumerate(launches):
        if kinds[rank] != usual:
            found.append(f"order: rank {rank}, collective {position} of {group}: {described(launch)}; "
                         f"rank {other} has {described(launches[other])}")
    return found


def described(launch: Launch | None) -> str:
    if launch is None:
        return "nothing more"
    words = [launch["name"], launch["settings"], launch["subject"]]
    for side in ("in", "out"):
        dtype, shape = launch[side]
        words.append(f"{side} {dtype}{tuple(shape)}")
    told = " ".join(word for word in words if word)
    return f"{told} in {launch['place']}, {launch['line']}"


# ---- Sizes
def wrong_sizes(position: int, launches: list[Launch]) -> list[str]:
    """A gather gives each rank what all put in, a scatter its share of the sum."""
    world = len(launches)
    found = []
    for rank, launch in enumerate(launches):
        leaving = math.prod(launch["in"][1])
        expected = leaving
        if GROWS.get(launch["name"], 0) > 0:
            expected = leaving * world
        elif GROWS.get(launch["name"], 0) < 0:
            expected = leaving / world
        arriving = math.prod(launch["out"][1])
        if arriving != expected:
            found.append(f"size: rank {rank}, collective {position} of {launch['group']}: {arriving:,} numbers come, "
                         f"room for {expected:,} expected: {described(launch)}")
    return found


def rows_by_rank(launch: Launch, side: str, world: int) -> list[int]:
    given = launch[f"{side}_splits"]
    if given is not None:
        return given
    rows = launch[side][1][0]
    return [rows // world] * world


def wrong_lists(position: int, launches: list[Launch]) -> list[str]:
    """Each rank sends to each other as many rows as that one expects of it, also where these are none."""
    world = len(launches)
    found = []
    for rank, launch in enumerate(launches):
        for side in ("in", "out"):
            counts = rows_by_rank(launch, side, world)
            rows = launch[side][1][0]
            if len(counts) != world or sum(counts) != rows:
                found.append(f"size: rank {rank}, collective {position} of {launch['group']}: counts {counts} of "
                             f"{rows:,} rows for {world} ranks: {described(launch)}")
    if found:
        return found

    for sender, reader, sent, expected in pairs(launches):
        if sent != expected:
            found.append(f"count: rank {sender} sends {sent:,} rows to rank {reader}, which expects {expected:,}, "
                         f"collective {position} of {launches[sender]['group']}: {described(launches[sender])}")
    return found


def pairs(launches: list[Launch]) -> Iterator[tuple[int, int, int, int]]:
    """(sender, reader, rows sent, rows expected) of every two ranks, and of each with itself."""
    world = len(launches)
    leaving = [rows_by_rank(launch, "in", world) for launch in launches]
    arriving = [rows_by_rank(launch, "out", world) for launch in launches]
    for sender in range(world):
        for reader in range(world):
            yield sender, reader, leaving[sender][reader], arriving[reader][sender]


# ---- Waits
def never_awaited(rank: int, recording: Recording) -> Iterator[str]:
    positions: Counter = Counter()
    for launch in recording["launches"]:
        position = positions[launch["group"]]
        positions[launch["group"]] += 1
        if not launch["awaited"] and not recording["error"]:
            yield f"wait: rank {rank} never waits for collective {position} of {launch['group']}: {described(launch)}"


def empty_lists(recordings: list[Recording], group: str) -> int:
    """How often a rank has nothing for another one, in recordings that agree."""
    empty = 0
    for launches in zip(*(of_group(recording, group) for recording in recordings), strict=True):
        if launches[0]["name"] == LISTS:
            empty += sum(sent == 0 for _, _, sent, _ in pairs(list(launches)))
    return empty
