"""Significance tests, their levels and the order of runs, as pure functions on names and lists of numbers.

tests/records/bench_words.py simulates how often a verdict is false. scipy.stats is imported inside the functions that
use it, because the import takes a second.
"""
import math
import random
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

ALPHA = 0.01                       # probability of a false verdict
INTERVAL = 1 - ALPHA
SAME_MARGIN = 0.001                # `same`: the interval of the relative difference is within +- this
FEWEST_PAIRS = 3                   # fewest pairs for a verdict and for an interval in a bench
# Level of p for a verdict on time, by number of pairs; the last one applies to all larger numbers. Three pairs need a
# stricter level: a change of speed in their middle affects the sides unevenly, and causes 6 % false verdicts at 1 %.
TIME_LEVELS = {3: 0.001, 4: 0.0095, 5: 0.008, 6: 0.007}
LOOKS = (4, 6, 10, 16, 26, 42, 68, 110)      # numbers of pairs after which a bench tests
EARLY_SHARE, LATE_SHARE = 0.0025, 0.0005     # sums of the levels of all tests before, and of all after, the planned end
# Which of two sides runs first, by pair; each group of pairs ends with a test. In each group each side is first equally
# often, which cancels a constant difference between the first and the second run of a pair, and a linear drift. Of all
# such orders, this one has the fewest false verdicts if the speed changes in the middle of pairs.
FIRST_SIDES = "AABB", "BA", "AABB", "AAABBB"

@dataclass
class Summary:
    n: int
    mean: float
    sd: float                      # sample standard deviation (n - 1); nan for n < 2

@dataclass
class Difference:
    """B minus A: mean, 99 % interval and two-sided p. Interval and p are None if there is no test."""
    mean: float
    low: float | None = None
    high: float | None = None
    p: float | None = None

def summary(values: Sequence[float]) -> Summary:
    values = [*map(float, values)]
    mean = statistics.mean(values) if values else math.nan                   # exact: equal values have sd 0
    sd = statistics.stdev(values) if len(values) > 1 and math.isfinite(mean) else math.nan
    return Summary(len(values), mean, sd)

def difference(a: Sequence[float], b: Sequence[float]) -> Difference | None:
    """Test the difference of two means, b minus a; None if a side is empty, no test if all values of a side are equal.

    Uses the weaker of Welch's and Student's tests. Welch's test underestimates the spread of a small sample next to a
    large one: at 3 against 20 values it has 3 % false positives at a nominal 1 %. Student's test is wrong if the
    smaller sample has the larger spread.
    """
    if not len(a) or not len(b):
        return None
    mean = summary(b).mean - summary(a).mean
    if min(len(set(a)), len(set(b))) < 2:
        return Difference(mean)
    from scipy import stats
    tests = [stats.ttest_ind(b, a, equal_var=equal) for equal in (False, True)]
    intervals = [test.confidence_interval(INTERVAL) for test in tests]
    low = min(interval.low for interval in intervals)
    high = max(interval.high for interval in intervals)
    return Difference(mean, float(low), float(high), float(max(test.pvalue for test in tests)))

def paired_difference(changes: Sequence[float]) -> Difference | None:
    """Test the mean of the differences within pairs (t-test); None without pairs, no test of few or of equal ones."""
    found = summary(changes)
    if not found.n:
        return None
    if found.n < FEWEST_PAIRS or found.sd == 0:
        return Difference(found.mean)
    from scipy import stats
    test = stats.ttest_1samp(changes, 0)
    return Difference(found.mean, *map(float, test.confidence_interval(INTERVAL)), float(test.pvalue))

def skewness(values: Sequence[float]) -> float:
    if len(values) < 3 or len(set(values)) < 2:
        return math.nan
    from scipy import stats
    return float(stats.skew(values, bias=False))

def below(losses: Sequence[float], target: float) -> float:
    """Return the one-sided p of the hypothesis that the mean is not below the target (t-test); nan if n < 2 or sd 0."""
    if len(set(losses)) < 2:
        return math.nan
    from scipy import stats
    return float(stats.ttest_1samp(losses, target, alternative="less").pvalue)

def critical_t(level: float, free: int) -> float:
    from scipy import stats
    return float(stats.t.isf(level / 2, free))

def band(values: Sequence[float], level: float = ALPHA, runs: float = 1) -> tuple[float, float] | None:
    """Return the interval that contains the mean of `runs` more values with probability 1 - level; None if n < 2."""
    found = summary(values)
    if found.n < 2:
        return None
    half = critical_t(level, found.n - 1) * found.sd * math.sqrt(1 / runs + 1 / found.n)
    return found.mean - half, found.mean + half

def pair_order(names: Iterable[str], pair: int) -> list[str]:
    """Return the order of the sides in a pair: a permutation drawn per group, reversed in half of its pairs."""
    positions = [(group, first) for group, letters in enumerate(FIRST_SIDES) for first in letters]
    cycle, index = divmod(pair - 1, len(positions))
    group, first = positions[index]
    order = sorted(names)
    random.Random(f"cycle {cycle}, group {group}").shuffle(order)
    return order if first == "A" else order[::-1]

def in_turn(seconds: Sequence[float], is_b: Sequence[int], level: float = ALPHA) -> Difference | None:
    """Estimate the relative difference of B's time from A's, in interleaved runs.

    seconds, is_b: one value per run in order of time. Fits log time to side and order by least squares, which cancels a
    linear drift. level: of the interval. Returns None without a degree of freedom.
    """
    from scipy import stats
    order = np.linspace(-1, 1, len(seconds))
    design = np.column_stack([np.ones(len(seconds)), np.asarray(is_b, float), order])
    free = len(seconds) - 3
    if free < 1 or np.linalg.matrix_rank(design) < 3:
        return None
    values = np.log(seconds)
    fit = np.linalg.lstsq(design, values, rcond=None)[0]
    variance = float(np.sum((values - design @ fit) ** 2)) / free
    error = math.sqrt(variance * np.linalg.inv(design.T @ design)[1, 1])
    log_ratio = float(fit[1])
    half = critical_t(level, free) * error
    p = float(2 * stats.t.sf(abs(log_ratio) / error, free)) if error > 1e-12 else float(abs(log_ratio) < 1e-12)
    return Difference(math.expm1(log_ratio), math.expm1(log_ratio - half), math.expm1(log_ratio + half), p)

def look_level(pairs: int, planned: int | None = None) -> float:
    """Return the level of a bench's test after so many of its planned pairs; 0: none. All levels add up to ALPHA."""
    planned = planned or LOOKS[-1]
    early = sum(look < planned for look in LOOKS)
    if pairs < FEWEST_PAIRS or pairs not in (*LOOKS, planned):
        return 0.0
    if pairs < planned:
        return EARLY_SHARE / early
    if pairs == planned:
        return ALPHA - LATE_SHARE - EARLY_SHARE * bool(early)
    return LATE_SHARE / 2 ** sum(planned < look <= pairs for look in LOOKS)

def time_level(pairs: int, look: float = ALPHA) -> float:
    """Return the level below which p decides on time; 0: no verdict at so many pairs. look: the level of this test."""
    return min(look, TIME_LEVELS.get(pairs, TIME_LEVELS[max(TIME_LEVELS)])) if pairs >= FEWEST_PAIRS else 0.0

def time_word(test: Difference | None, level: float) -> str:
    if test is None or test.p is None:
        return "undecided"
    if test.p < level:
        return "faster" if test.mean < 0 else "slower"
    if -SAME_MARGIN <= test.low and test.high <= SAME_MARGIN:
        return "same"
    return "undecided"
