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


def disagreements(recordings: list[Recording]) -> list[str]:
    """What does not fit together, one line each; empty if everything does. Recordings by rank."""
    found = []
    for rank in sorted(range(len(recordings)), key=lambda rank: recordings[rank]["ended"]):    # the first is the cause
        if recordings[rank]["error"]:
            found.append(f"rank {rank} ended early: {recordings[rank]['error']}")
    for group in groups_of(recordings):
        sequences = [of_group(recording, group) for recording in recordings]
        ended = [len(sequence) for sequence, recording in zip(sequences, recordings) if recording["error"]]
        found += in_group(sequences, min(ended, default=max(map(len, sequences))))
        for rank, sequence in enumerate(sequences):
            for position, launch in enumerate(sequence):
                if not launch["awaited"] and not recordings[rank]["error"]:
                    found.append(f"wait: rank {rank} never waits for collective {position} of {group}: "
                                 f"{described(launch)}")
    return found


def groups_of(recordings: list[Recording]) -> list[str]:
    """In the order in which they first appear."""
    return list(dict.fromkeys(launch["group"] for recording in recordings for launch in recording["launches"]))


def of_group(recording: Recording, group: str) -> list[Launch]:
    return [launch for launch in recording["launches"] if launch["group"] == group]


def in_group(sequences: list[list[Launch]], length: int) -> list[str]:
    """Up to the first place where the ranks are not at the same collective: after it nothing meets its own.

    length: of a recording that is whole, or of the shortest that is not
    """
    found = []
    for position in range(length):
        launches = [sequence[position] if position < len(sequence) else None for sequence in sequences]
        strays = out_of_order(position, launches)
        if strays:
            return found + strays
        wrong = wrong_lists if launches[0]["name"] == LISTS else wrong_sizes
        for rank, line in wrong(launches):
            told = described(launches[rank])
            found.append(f"{line}, collective {position} of {launches[0]['group']}: {told}")
    return found


def kind_of(launch: Launch | None) -> tuple | None:
    """What has to be alike on all ranks."""
    if launch is None:
        return None
    lengths = 1 if launch["name"] == LISTS else 0             # leading axes that are a rank's own
    shapes = [(launch[side][0], tuple(launch[side][1][lengths:])) for side in ("out", "in")]
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
    words += [f"{side} {launch[side][0]}{tuple(launch[side][1])}" for side in ("in", "out")]
    told = " ".join(word for word in words if word)
    return f"{told} in {launch['place']}, {launch['line']}"


# ---- Sizes: (rank, what is wrong)
def wrong_sizes(launches: list[Launch]) -> Iterator[tuple[int, str]]:
    """A gather gives each rank what all put in, a scatter its share of the sum."""
    grows = dict(all_gather_into_tensor=len(launches), reduce_scatter_tensor=1 / len(launches))
    for rank, launch in enumerate(launches):
        expected = math.prod(launch["in"][1]) * grows.get(launch["name"], 1)
        arriving = math.prod(launch["out"][1])
        if arriving != expected:
            yield rank, f"size: rank {rank}: {arriving:,} numbers come, room for {expected:,.0f} expected"


def rows_by_rank(launch: Launch, side: str, world: int) -> list[int]:
    equal = [launch[side][1][0] // world] * world
    return equal if launch[f"{side}_splits"] is None else launch[f"{side}_splits"]


def wrong_lists(launches: list[Launch]) -> Iterator[tuple[int, str]]:
    """Each rank sends to each other as many rows as that one expects of it, also where these are none."""
    world = len(launches)
    whole = True
    for rank, launch in enumerate(launches):
        for side in ("in", "out"):
            counts = rows_by_rank(launch, side, world)
            rows = launch[side][1][0]
            if len(counts) != world or sum(counts) != rows:
                whole = False
                yield rank, f"size: rank {rank}: counts {counts} of {rows:,} rows for {world} ranks"
    for sender, reader, sent, expected in pairs(launches) if whole else ():
        if sent != expected:
            yield sender, f"count: rank {sender} sends {sent:,} rows to rank {reader}, which expects {expected:,}"


def pairs(launches: list[Launch]) -> Iterator[tuple[int, int, int, int]]:
    """(sender, reader, rows sent, rows expected) of every two ranks, and of each with itself."""
    world = len(launches)
    leaving = [rows_by_rank(launch, "in", world) for launch in launches]
    arriving = [rows_by_rank(launch, "out", world) for launch in launches]
    for sender in range(world):
        for reader in range(world):
            yield sender, reader, leaving[sender][reader], arriving[reader][sender]


def empty_lists(recordings: list[Recording], group: str) -> int:
    """How often a rank has nothing for another one, in recordings that agree."""
    empty = 0
    for launches in zip(*(of_group(recording, group) for recording in recordings), strict=True):
        if launches[0]["name"] == LISTS:
            empty += sum(sent == 0 for _, _, sent, _ in pairs(list(launches)))
    return empty
