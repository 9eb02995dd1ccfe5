"""Which tests of the times must agree, and why times may not be trusted; pure functions on runs as `Timed`.

1. Pairs of a `bench`: a t-test that may be looked at more than once (sequential.py), for a bench stops when it knows.
2. Runs that alternate in time within a rental (one machine, without a long pause): each run with both its neighbours
   by clock. A drift pulls pairs with A first and pairs with B first the opposite ways, so that it cancels.
3. Other runs of one rental: unpaired, and beside a straight drift over their order where that is known. They are not
   trusted if they drift, fall in two groups further apart than the sides, or may all of a side be in one.
4. Runs of several rentals, or of unknown ones: unpaired, and not trusted below a floor, for one program differs from
   machine to machine and from day to day; unless another number of steps alone explains the difference.
5. Runs that do not say their machine or clock are not trusted at all, unless the user states that they are one's."""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tools import sequential, verdict
from tools.verdict import Difference, mean, summary

RENTAL_PAUSE_S = 4 * 3600              # a longer pause between two runs may be another rental
FLOOR = 0.02                           # of the time: one source on machines of one kind, 0.1 to 1.8 % (public pools)
KIND_FLOOR = 0.08                      # on other kinds or versions: H200 for H100 5.1 %, torch 2.4 to 2.5 7.8 %
STEPS_REST = 0.5                       # steps explain a difference if the rest is at most this share of theirs
MODES_APART = 0.015                    # of the time: what two modes of a public machine are apart (0.012), and noise
PAIRED_SHARE = 0.75                    # of the runs in pairs by clock: fewer do not alternate
FEWEST_PAIRS = 3                       # by clock
DRIFTS = "times drift by {:+.3%} a run; measure in pairs (python records bench)"
NOT_SAID = ("the machine or the clock of {} is not said, and unknown is not equal (--same-machine states that all ran "
            "on one, in one rental)")


class Timed(NamedTuple):
    """One run's time, and what its log says of when and where it ran."""
    seconds: float
    steps: int | None = None
    started: float | None = None       # s on its machine's clock
    machine: str | None = None         # with kind and clock; None: not said
    pair: int | None = None            # of a bench
    place: int | None = None           # of a bench: its number


@dataclass
class Timing:
    """Differences are B minus A in s; the first test is the one to report."""
    tests: list[Difference] = field(default_factory=list)
    sd: float = math.nan               # of a run, that the tests rest on
    method: str = "no test"
    doubts: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    floor: float | None = None         # share of the time below which runs of other rentals say nothing
    least: float = 0.0                 # the same in s; 0 where steps explain the difference, and within a rental
    paired: bool = False


def pairs_in_words(count: int) -> str:
    """Those that the last look took in: it is at 4, 6, 10, ... of them."""
    look = sequential.last_look(count)
    if look is None or look.pairs == count:
        return f"{count} interleaved pairs"
    return f"the first {look.pairs} of {count} interleaved pairs"


def timing(a: Sequence[Timed], b: Sequence[Timed], stated: bool = False, floor: float = FLOOR) -> Timing:
    """stated  the user says that all ran on one machine in one rental, where logs do not say
    floor   of differences between rentals, as a share of the time"""
    pairs = bench_pairs(a, b)
    if len(pairs) > 1:
        shares = [b_seconds / a_seconds - 1 for a_seconds, b_seconds in pairs]
        per_run = summary(shares).sd * mean(seconds_of(a)) / math.sqrt(2)
        test = of_share(sequential.paired(shares), a)
        return Timing([test], per_run, pairs_in_words(len(pairs)), notes=groups_in_words(a, b), paired=True)

    if all(run.place is not None for run in (*a, *b)):                       # a bench without complete pairs
        return unpaired(a, b, [run.place for run in (*a, *b)])
    rentals = rentals_of([*a, *b])
    if None not in rentals:
        alternating = paired_by_clock(a, b)
        if alternating is not None:
            return alternating
        if len(set(rentals)) == 1:
            return unpaired(a, b, in_order(a, b))
    elif stated and not contradicted(a, b):
        return unpaired(a, b, None)
    return of_several_rentals(a, b, stated, floor)


def seconds_of(runs: Sequence[Timed]) -> list[float]:
    return [run.seconds for run in runs]


# ---- Rentals --------------------------------------------------------------------------------------------------------

def rentals_of(runs: Sequence[Timed]) -> list[int | None]:
    """A number for each run: runs of one machine that follow each other without a long pause share it. None: its
    machine or start is not said. Runs that overlap are of two machines, or disturbed each other: also apart."""
    numbers: list[int | None] = [None] * len(runs)
    known = [place for place, run in enumerate(runs) if run.machine is not None and run.started is not None]
    last: dict[str, tuple[int, float, float]] = {}                            # by machine: rental, start and end
    rental = 0
    for place in sorted(known, key=lambda place: runs[place].started):
        run = runs[place]
        number, start, end = last.get(run.machine, (0, -math.inf, -math.inf))
        one_process = run.started == start                                    # whose runs share a date
        follows = end <= run.started <= end + RENTAL_PAUSE_S
        if not (one_process or follows):
            rental += 1
            number = rental
        numbers[place] = number
        last[run.machine] = (number, run.started, max(end, run.started + run.seconds))
    return numbers


def contradicted(a: Sequence[Timed], b: Sequence[Timed]) -> bool:
    """Whether logs name more than one machine, or more than one rental of it: no statement changes that."""
    runs = [*a, *b]
    machines = {run.machine for run in runs} - {None}
    return len(machines) > 1 or len(set(rentals_of(runs)) - {None}) > 1


def rental_shift(runs: Sequence[Timed]) -> float:
    """Largest difference of mean times between rentals of one program, as a share; 0 where there is but one."""
    by_rental: dict[int, list[float]] = {}
    for run, rental in zip(runs, rentals_of(runs)):
        if rental is not None:
            by_rental.setdefault(rental, []).append(run.seconds)
    means = [mean(times) for times in by_rental.values()]
    return max(means) / min(means) - 1 if len(means) > 1 else 0.0


def of_several_rentals(a: Sequence[Timed], b: Sequence[Timed], stated: bool, floor: float) -> Timing:
    test = verdict.two_samples(seconds_of(a), seconds_of(b))
    share = test.mean / mean(seconds_of(a))
    found = Timing([test], pooled_sd(a, b), "unpaired, of several rentals", floor=floor)
    found.notes = groups_in_words(a, b)

    for name, runs in (("A", a), ("B", b)):
        if not stated and any(run.machine is None for run in runs):
            found.doubts.append(NOT_SAID.format(name))
    if steps_explain(a, b, share):
        found.notes.append(f"other days or machines: the number of steps alone explains {share:+.2%} of the time")
        return found
    found.least = floor * mean(seconds_of(a))
    if abs(share) < floor:
        found.doubts.append(f"times of other days or machines, or of unknown ones, differ by {share:+.2%}: one program "
                            f"differs by up to {floor:.1%} between them; measure in pairs (python records bench)")
    return found


def steps_explain(a: Sequence[Timed], b: Sequence[Timed], share: float) -> bool:
    """Whether B's time differs as its number of steps does: same direction, and little is left."""
    before = steps_of(a)
    after = steps_of(b)
    if before is None or after is None or before <= 0 or after == before:
        return False
    by_steps = after / before - 1
    return abs(share - by_steps) <= STEPS_REST * abs(by_steps)


def steps_of(runs: Sequence[Timed]) -> int | None:
    """Of all of them; None where they differ, or are not said."""
    counts = {run.steps for run in runs}
    return counts.pop() if len(counts) == 1 else None


# ---- Pairs ----------------------------------------------------------------------------------------------------------

Pair = tuple[float, float]             # seconds of A, of B


def bench_pairs(a: Sequence[Timed], b: Sequence[Timed]) -> list[Pair]:
    """Mean times of the pairs that both sides have, in their order."""
    of_a = by_pair(a)
    of_b = by_pair(b)
    shared = sorted(set(of_a) & set(of_b))
    return [(mean(of_a[pair]), mean(of_b[pair])) for pair in shared]


def by_pair(runs: Sequence[Timed]) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for run in runs:
        if run.pair is not None:
            found.setdefault(run.pair, []).append(run.seconds)
    return found


def of_share(share: Difference, a: Sequence[Timed]) -> Difference:
    """A difference of b / a - 1 in s of A's mean time."""
    base = mean(seconds_of(a))
    return Difference(share.mean * base, share.low * base, share.high * base, share.p)


Series = list[tuple[str, float]]       # (side, seconds) of runs in the order of time


def disjoint_pairs(series: Series) -> int:
    """Neighbours of both sides, each run in one pair at most."""
    pairs = 0
    at = 0
    while at + 1 < len(series):
        if series[at][0] == series[at + 1][0]:
            at += 1
        else:
            pairs += 1
            at += 2
    return pairs


def neighbours(series: Series) -> tuple[list[float], list[float]]:
    """b / a - 1 of all neighbours of both sides: those with A first, and those with B first."""
    a_first = []
    b_first = []
    for (side, seconds), (next_side, next_seconds) in zip(series, series[1:]):
        if (side, next_side) == ("A", "B"):
            a_first.append(next_seconds / seconds - 1)
        elif (side, next_side) == ("B", "A"):
            b_first.append(seconds / next_seconds - 1)
    return a_first, b_first


def in_order(a: Sequence[Timed], b: Sequence[Timed]) -> list[int]:
    """Places in time of a's, then of b's runs. Runs of one process keep their order."""
    runs = [*a, *b]
    by_clock = sorted(range(len(runs)), key=lambda place: runs[place].started)
    places = [0] * len(runs)
    for place, run in enumerate(by_clock):
        places[run] = place
    return places


def series_of(a: Sequence[Timed], b: Sequence[Timed]) -> list[Series]:
    """One of each rental, by clock."""
    sides = ["A"] * len(a) + ["B"] * len(b)
    times = seconds_of([*a, *b])
    series: dict[int | None, list[tuple[int, str, float]]] = {}
    for rental, place, side, seconds in zip(rentals_of([*a, *b]), in_order(a, b), sides, times):
        series.setdefault(rental, []).append((place, side, seconds))
    found = []
    for runs in series.values():
        found.append([(side, seconds) for _, side, seconds in sorted(runs)])
    return found


def paired_by_clock(a: Sequence[Timed], b: Sequence[Timed]) -> Timing | None:
    """None if the sides do not alternate. The spread is that of the differences of neighbours around their mean, with
    A and with B first; as many count as there are disjoint pairs, for each run is a neighbour twice."""
    pairs = 0
    a_first = []
    b_first = []
    for series in series_of(a, b):
        pairs += disjoint_pairs(series)
        with_a_first, with_b_first = neighbours(series)
        a_first += with_a_first
        b_first += with_b_first
    if pairs < FEWEST_PAIRS or 2 * pairs < PAIRED_SHARE * (len(a) + len(b)) or not (a_first and b_first):
        return None

    ups = mean(a_first)                                                       # B's difference and one step of drift
    downs = mean(b_first)                                                     # B's difference less that
    squares = math.fsum((x - ups) ** 2 for x in a_first) + math.fsum((x - downs) ** 2 for x in b_first)
    sd = math.sqrt(squares / (len(a_first) + len(b_first) - 2))
    share = verdict.difference((ups + downs) / 2, sd / math.sqrt(pairs), pairs - 1)
    per_run = sd * mean(seconds_of(a)) / math.sqrt(2)
    return Timing([of_share(share, a)], per_run, f"{pairs} pairs by clock", notes=groups_in_words(a, b), paired=True)


# ---- Unpaired -------------------------------------------------------------------------------------------------------

def pooled_sd(a: Sequence[Timed], b: Sequence[Timed]) -> float:
    sds = [summary(seconds_of(runs)).sd for runs in (a, b)]
    return math.hypot(*sds) / math.sqrt(2)


def groups(a: Sequence[Timed], b: Sequence[Timed]) -> dict[str, tuple[list[float], list[float]]]:
    """The two groups in which a side's times fall, by side; without sides that have one."""
    found = {}
    for name, runs in (("A", a), ("B", b)):
        two = verdict.modes(seconds_of(runs))
        if two is not None:
            found[name] = two
    return found


def groups_in_words(a: Sequence[Timed], b: Sequence[Timed]) -> list[str]:
    notes = []
    for name, two in groups(a, b).items():
        sizes = ", ".join(f"{len(xs)} near {mean(xs):.5g} s" for xs in two)
        notes.append(f"{name}'s times fall in two groups: {sizes}")
    return notes


def unpaired(a: Sequence[Timed], b: Sequence[Timed], order: Sequence[int] | None) -> Timing:
    """Runs of one machine in one rental; order: their places in time, a's, then b's, None where that is unknown."""
    first = seconds_of(a)
    second = seconds_of(b)
    base = mean(first)
    found = Timing([verdict.two_samples(first, second)], pooled_sd(a, b), "unpaired")
    found.notes = groups_in_words(a, b)
    if order is None:
        found.notes.append("order of the runs in time unknown: a drift cannot be seen")
    else:
        test, drift = verdict.without_drift(first, second, order)
        if math.isfinite(test.mean):
            found.tests.append(test)
            found.method = "unpaired, and beside a drift over the order of runs"
        if drift.p < verdict.ALPHA:
            found.doubts.append(DRIFTS.format(drift.mean / base))

    apart = abs(found.tests[0].mean)
    if any(mean(high) - mean(low) > apart for low, high in groups(a, b).values()):
        found.doubts.append("a side's times fall in two groups further apart than the sides")
    chance_of_one_mode_each = 2.0 ** (1 - len(first) - len(second))
    if chance_of_one_mode_each > verdict.ALPHA and apart < MODES_APART * base:
        found.doubts.append("the sides may have met two modes of the machine: a difference so small takes four runs a "
                            "side")
    return found
