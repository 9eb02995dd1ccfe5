"""When may one stop? A t-test of paired differences that is looked at more than once, and keeps its error rate.

After 4, 6, 10, 16, 26, 42, ... pairs there is a look: a two-sided t-test at a share of the level. The shares add up to
one, so the chance that any look ever rejects what is true is at most the level, whatever makes one stop or go on
(Bonferroni over the looks; by draws 0.40 % at a level of 0.5 %, for the looks have much in common). Differences are
taken as independent and normal, of unknown spread. Half of the level is spent at the first look: that is what four
pairs need to tell five standard deviations. An e-value that is valid after every pair takes a pair more for that, and
has a chance of 1 in 20 in four."""
from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tools.verdict import ALPHA, POWER, SHARE, Difference, summary

FIRST = {4: 0.5, 6: 0.1, 10: 0.25, 16: 0.08}     # pairs at a look: its share of the level
GROWTH = 1.6                       # from then on, and each look has half of what is left
MOST_PAIRS = 1000                  # more are not worth a number


class Look(NamedTuple):
    pairs: int
    share: float                   # of the level


def looks(most: int = MOST_PAIRS) -> Iterator[Look]:
    """Those at up to `most` pairs."""
    left = 1.0
    pairs = 0
    for pairs, share in FIRST.items():
        if pairs > most:
            return
        left -= share
        yield Look(pairs, share)
    while True:
        pairs = round(pairs * GROWTH)
        if pairs > most:
            return
        left /= 2
        yield Look(pairs, left)


def last_look(pairs: int) -> Look | None:
    """At so many pairs or fewer; None before the first."""
    found = None
    for look in looks(pairs):
        found = look
    return found


def next_look(pairs: int) -> Look:
    """At more pairs than these."""
    for look in looks(math.ceil(pairs * GROWTH) + max(FIRST)):
        if look.pairs > pairs:
            return look
    raise ValueError(f"no look after {pairs} pairs")


def reach(look: Look, level: float) -> float:
    """How many standard errors from zero a look rejects at this level."""
    from scipy import stats
    return float(stats.t.isf(level * look.share / 2, look.pairs - 1))


def paired(differences: Sequence[float]) -> Difference:
    """Mean of the differences at the last look, its interval at 1 - ALPHA, and p of "their mean is 0"; interval and p
    hold at all looks at once. p is 1 before the first look."""
    from scipy import stats
    look = last_look(len(differences))
    if look is None:
        return Difference(summary(differences).mean, -math.inf, math.inf, 1.0)

    _, mean, sd = summary(differences[:look.pairs])
    error = sd / math.sqrt(look.pairs)
    half = reach(look, ALPHA) * error
    if error == 0:
        p = float(mean == 0)
    else:
        p = 2 * float(stats.t.sf(abs(mean) / error, look.pairs - 1)) / look.share
    return Difference(mean, mean - half, mean + half, min(1.0, p))


def pairs_needed(mean: float, sd: float, margin: float) -> int | None:
    """Pairs at which a look decides with a chance of POWER, if mean and spread are these: that the differences are not
    0, or that they lie within the margin. None: more than MOST_PAIRS."""
    for look in looks():
        if sd == 0 or power(look, abs(mean) / sd) >= POWER:
            return look.pairs
        half = reach(look, ALPHA) * sd / math.sqrt(look.pairs)
        if abs(mean) + half <= margin:
            return look.pairs
    return None


def power(look: Look, effect: float) -> float:
    """Chance that this look alone rejects 0. effect: the mean over the standard deviation."""
    from scipy import stats
    limit = reach(look, SHARE)
    if not effect:
        return SHARE * look.share
    return float(stats.nct.sf(limit, look.pairs - 1, effect * math.sqrt(look.pairs)))
