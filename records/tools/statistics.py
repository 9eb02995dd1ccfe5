"""Tests and the levels of their words, as pure functions on lists of numbers (seconds, nats per token).

False words were drawn (tests/records/bench_words.py): both orders of alternation, drift, steps of speed, skew, spikes,
from 3 pairs on. scipy.stats is imported where it is used: that takes a second."""
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

ALPHA = 0.01                       # chance of a false word
INTERVAL = 1 - ALPHA
SAME_MARGIN = 0.001                # `same`: times differ by surely less than this share
FEWEST_PAIRS = 3                   # of runs in turn, for a word
MOST_SEEDS = 100                   # a proof that needs more is none
POWER = 0.8                        # chance that as many seeds as `seeds_needed` says prove it
# p below which times in turn make a word, by pairs; the last one holds for all more. Three pairs are few: a step of
# speed in their middle falls on the sides unevenly, and makes 6 % of false words at a level of 1 %.
TIME_LEVELS = {3: 0.001, 4: 0.0095, 5: 0.008, 6: 0.007}
LOOKS = (4, 6, 10, 16, 26, 42, 68, 110)      # pairs at which a bench may stop
EARLY_SHARE, LATE_SHARE = 0.0025, 0.0005     # of the level, for all looks before, and for all after the planned end

class Summary(NamedTuple):
    n: int
    mean: float
    sd: float                      # of a sample (n - 1); nan for n < 2

class Difference(NamedTuple):
    """B minus A; interval at 99 % and two-sided p, None without a test."""
    mean: float
    low: float | None = None
    high: float | None = None
    p: float | None = None

def summary(values: Sequence[float]) -> Summary:
    n = len(values)
    if not n:
        return Summary(0, math.nan, math.nan)
    mean = math.fsum(values) / n
    if min(values) == max(values):
        mean = float(values[0])                                              # equal values have exactly no spread
    if n < 2:
        return Summary(n, mean, math.nan)
    return Summary(n, mean, math.sqrt(math.fsum((x - mean) ** 2 for x in values) / (n - 1)))

def difference(a: Sequence[float], b: Sequence[float]) -> Difference | None:
    """Mean of b minus mean of a; None if a side is empty, no test if one has a single value.

    The weaker of Welch's and Student's tests: a few values beside many look tighter than they are (Welch at 3 against
    20 is wrong in 3 % at a nominal 1 %), and Student's test is wrong where the smaller sample spreads more."""
    from scipy import stats
    if not len(a) or not len(b):
        return None
    apart = summary(b).mean - summary(a).mean
    if min(len(a), len(b)) < 2:
        return Difference(apart)
    if len(set(a)) == len(set(b)) == 1:
        return Difference(apart, apart, apart, float(apart == 0))
    tests = [stats.ttest_ind(b, a, equal_var=equal) for equal in (False, True)]
    intervals = [test.confidence_interval(INTERVAL) for test in tests]
    low = min(interval.low for interval in intervals)
    high = max(interval.high for interval in intervals)
    return Difference(apart, float(low), float(high), float(max(test.pvalue for test in tests)))

def below(losses: Sequence[float], target: float) -> float:
    """One-sided p of "the mean is not below the target" (t-test); nan for n < 2 or without spread."""
    from scipy import stats
    if len(set(losses)) < 2:
        return math.nan
    return float(stats.ttest_1samp(losses, target, alternative="less").pvalue)

def seeds_needed(margin: float, sd: float, alpha: float = ALPHA) -> int | None:
    """Seeds whose one-sided t-test sees a mean so far below the target with chance POWER; None: over MOST_SEEDS."""
    from scipy import stats
    if not margin > 0 or not sd >= 0:
        return None
    for n in range(2, MOST_SEEDS + 1):
        reach = stats.t.isf(alpha, n - 1)
        if sd == 0 or stats.nct.sf(reach, n - 1, margin / sd * math.sqrt(n)) >= POWER:
            return n
    return None

def hopeless(losses: Sequence[float], target: float) -> bool:
    """True if the mean is proven to be above the target (p > 0.99), or if at the favourable end of its one-sided 99 %
    interval more than MOST_SEEDS would be needed for a proof."""
    from scipy import stats
    n, mean, sd = summary(losses)
    if n < 2 or mean < target or not sd > 0:
        return False
    best = mean - stats.t.isf(ALPHA, n - 1) * sd / math.sqrt(n)
    return best >= target or seeds_needed(target - best, sd) is None

def band(values: Sequence[float], level: float = ALPHA) -> tuple[float, float] | None:
    """Where one more value of the same kind lies with chance 1 - level; None for n < 2."""
    from scipy import stats
    n, mean, sd = summary(values)
    if n < 2:
        return None
    half = float(stats.t.isf(level / 2, n - 1)) * sd * math.sqrt(1 + 1 / n)
    return mean - half, mean + half

def pairs_in_turn(sides: str) -> list[int] | None:
    """Places of the runs that form pairs of neighbours of both sides; None if they do not alternate. sides: a letter
    for each run in the order of time, as "ABBAAB". Of an odd number one may be without a partner."""
    paired: list[int] = []
    place = 0
    while place + 1 < len(sides):
        if sides[place] != sides[place + 1]:
            paired += [place, place + 1]
            place += 1
        place += 1
    if not paired or len(sides) - len(paired) > len(sides) % 2:
        return None
    return paired

def in_turn(seconds: Sequence[float], is_b: Sequence[bool]) -> Difference | None:
    """B's time over A's, less 1: least squares of log time over side and order. None if there is no degree of freedom.
    seconds: in the order of time. A straight drift cancels."""
    from scipy import stats
    order = np.linspace(-1, 1, len(seconds))
    design = np.column_stack([np.ones(len(seconds)), np.asarray(is_b, float), order])
    free = len(seconds) - 3
    if free < 1 or np.linalg.matrix_rank(design) < 3:
        return None
    values = np.log(seconds)
    fit = np.linalg.lstsq(design, values, rcond=None)[0]
    left = float(np.sum((values - design @ fit) ** 2)) / free
    error = math.sqrt(left * np.linalg.inv(design.T @ design)[1, 1])
    apart = float(fit[1])
    half = float(stats.t.isf(ALPHA / 2, free)) * error
    p = float(2 * stats.t.sf(abs(apart) / error, free)) if error > 1e-12 else float(abs(apart) < 1e-12)
    return Difference(math.expm1(apart), math.expm1(apart - half), math.expm1(apart + half), p)

def time_level(pairs: int, planned: int | None = None, looks: bool = False) -> float:
    """Below which p a word on time is spoken, for at most 1 % of false words; 0: no word at so many pairs.
    looks: the runs were stopped when they decided; planned: the pairs at which that was to end, else the last look."""
    if pairs < FEWEST_PAIRS:
        return 0.0
    if planned is None:
        planned = LOOKS[-1]
    if not looks or pairs == planned:
        return TIME_LEVELS.get(pairs, TIME_LEVELS[max(TIME_LEVELS)])
    if pairs not in LOOKS:
        return 0.0
    if pairs < planned:
        return EARLY_SHARE / sum(look < planned for look in LOOKS)
    return LATE_SHARE / 2 ** sum(planned < look <= pairs for look in LOOKS)

def time_word(test: Difference | None, level: float, margin: float = SAME_MARGIN) -> str:
    """faster, slower, same, or undecided."""
    if test is None or test.p is None or not level:
        return "undecided"
    if test.p < level:
        return "faster" if test.mean < 0 else "slower"
    if -margin <= test.low and test.high <= margin:
        return "same"
    return "undecided"
