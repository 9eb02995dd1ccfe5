"""Statistics of a comparison, as pure functions on lists of numbers (seconds, nats per token), and the verdict.

The rule, for B against A; the chance of a wrong word is at most ALPHA in all, for independent runs whose noise is alike
on both sides, or normal. Which tests of the times must agree, and when times are not trusted, is in timing.py.

With a target, the target decides:
1. no record: B's mean loss is not below the target, whatever its time. undecided: it is below, and p of a one-sided
   t-test over seeds is not below ALPHA.
2. faster: B proves the target so, and its time is lower with p < ALPHA, whatever A's loss.
3. slower, same: both prove the target; time alone decides. What their losses may be worth is a remark.

Without one, loss and time share ALPHA:
1. Losses are tested at SHARE over seeds. If no difference shows and the sides train for as many steps, time alone
   decides, at SHARE. Else the time at equal loss does: a run's time plus what its loss is worth by the slope of A's
   curve near its end, and also by half of it (as on public runs).
2. same: losses do not differ, and the whole interval of the time difference lies within the margin.

Always: several tests must give the same word; undecided is all else, also fewer than two seeds (one if losses equal to
the last bit) or times on a side, and a run that diverged. same program: source, flags and software are equal, so that
no word on speed is right. not comparable: other data, one side of several recipes or sources, other machines."""
from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

ALPHA = 0.01                       # chance of a wrong verdict
SHARE = ALPHA / 2                  # of its two tests, loss and time, each
POWER = 0.8                        # chance that as many runs as `runs_needed` says settle it
MAX_RUNS = 1000                    # more are not worth a number
SAME_MARGIN = 0.001                # `same`: the time difference is surely less than this share of the time
DRAWS = 1999                       # Monte Carlo draws behind the p-value of two modes
FEWEST_FOR_MODES = 4
TINY = 1e-300                      # instead of a variance of 0
# Exit status of `compare` and `show` by verdict; 1 and 2 are errors.
STATUS = {"faster": 0, "slower": 3, "same": 4, "same program": 5, "no record": 6, "undecided": 7, "not comparable": 8}


class Summary(NamedTuple):
    n: int
    mean: float
    sd: float                      # of a sample (n - 1); nan for n < 2


class Difference(NamedTuple):
    """b - a, its interval at 1 - ALPHA, and the two-sided p of "no difference"."""
    mean: float
    low: float
    high: float
    p: float


class Verdict(NamedTuple):
    word: str                      # a key of STATUS
    reason: str


class Proof(NamedTuple):
    """How the losses of a side stand to the target: their mean, and p of "the mean is not below it"."""
    mean: float
    p: float


class Target(NamedTuple):
    loss: float                    # nats per token
    a: Proof
    b: Proof


class Evidence(NamedTuple):
    """All that a verdict rests on; tests that are done, differences b - a."""
    loss: Difference | None                        # nats per token; None: fewer than two seeds on a side
    times: Sequence[Difference]                    # every test in s that must agree; none: no time was measured
    room: float                                    # half the width of `same`, s
    at_equal_loss: Sequence[Difference] = ()       # as times, by price of loss; none: no curve says what loss is worth
    least: float = 0.0                             # s: differences at equal loss count from here on
    same_steps: bool = True
    diverged: Sequence[str] = ()                   # runs without a finite loss
    doubts: Sequence[str] = ()                     # why times are not trusted
    target: Target | None = None


# ---- Samples --------------------------------------------------------------------------------------------------------

def summary(xs: Sequence[float]) -> Summary:
    n = len(xs)
    if not n:
        return Summary(0, math.nan, math.nan)
    mean = math.fsum(xs) / n
    if min(xs) == max(xs):
        mean = xs[0]                                                         # equal values have exactly no spread
    if n < 2:
        return Summary(n, mean, math.nan)
    squares = math.fsum((x - mean) ** 2 for x in xs)
    return Summary(n, mean, math.sqrt(squares / (n - 1)))


def mean(xs: Iterable[float]) -> float:
    return summary(list(xs)).mean


def two_sided(t: float, free: float) -> float:
    """p of a t statistic with `free` degrees of freedom."""
    from scipy import special
    return float(2 * special.stdtr(free, -abs(t)))


def reach(free: float, level: float = ALPHA) -> float:
    """Half the width of an interval at 1 - level, in standard errors."""
    from scipy import special
    return float(special.stdtrit(free, 1 - level / 2))


def difference(mean: float, error: float, free: float) -> Difference:
    """A t-test: a mean difference, its standard error and degrees of freedom."""
    if error == 0:
        return Difference(mean, mean, mean, float(mean == 0))
    half = reach(free) * error
    return Difference(mean, mean - half, mean + half, two_sided(mean / error, free))


def one_sample(xs: Sequence[float], target: float) -> float:
    """One-sided p of "the mean is not below the target" (t-test); nan where n < 2 or the spread is 0."""
    from scipy import special
    n, mean, sd = summary(xs)
    if n < 2 or not sd > 0:
        return math.nan
    return float(special.stdtr(n - 1, (mean - target) / (sd / math.sqrt(n))))


def welch(a: Sequence[float], b: Sequence[float]) -> Difference:
    """Mean of b minus mean of a for unpaired samples of unequal variances; infinite interval where n < 2."""
    one = summary(a)
    other = summary(b)
    apart = other.mean - one.mean
    if min(one.n, other.n) < 2:
        return Difference(apart, -math.inf, math.inf, 1.0)
    square_a = one.sd ** 2 / one.n                                           # of the mean's standard error
    square_b = other.sd ** 2 / other.n
    square = square_a + square_b
    if square == 0:
        return difference(apart, 0.0, 1.0)
    free = square ** 2 / (square_a ** 2 / (one.n - 1) + square_b ** 2 / (other.n - 1))
    return difference(apart, math.sqrt(square), free)


def student(a: Sequence[float], b: Sequence[float]) -> Difference:
    """As `welch`, for equal variances: the spread is that of both samples together."""
    one = summary(a)
    other = summary(b)
    apart = other.mean - one.mean
    if min(one.n, other.n) < 2:
        return Difference(apart, -math.inf, math.inf, 1.0)
    free = one.n + other.n - 2
    variance = ((one.n - 1) * one.sd ** 2 + (other.n - 1) * other.sd ** 2) / free
    return difference(apart, math.sqrt(variance * (1 / one.n + 1 / other.n)), free)


def two_samples(a: Sequence[float], b: Sequence[float]) -> Difference:
    """The weaker of `welch` and `student`, with the wider interval.

    A few runs beside many look tighter than they are, most of all where times are skewed: at 3 against 20 Welch alone
    is wrong at a nominal 1 % in 3 % of normal and 6 % of exponential draws. Student alone is wrong where the smaller
    sample spreads more. Both together keep the level in either case; with equal n they differ little."""
    tests = (welch(a, b), student(a, b))
    low = min(test.low for test in tests)
    high = max(test.high for test in tests)
    return Difference(tests[0].mean, low, high, max(test.p for test in tests))


# ---- Drift, modes, outliers -----------------------------------------------------------------------------------------

def without_drift(a: Sequence[float], b: Sequence[float], order: Sequence[float]) -> tuple[Difference, Difference]:
    """b - a beside a straight drift, and the drift per unit of `order` (places in time of a's, then b's values).
    Least squares on side and order. If all of a ran before all of b, the interval is about twice Welch's: a drift and a
    difference then look alike."""
    import numpy as np
    side = np.repeat([0.0, 1.0], [len(a), len(b)])
    design = np.column_stack([np.ones(len(side)), side, np.asarray(order, float)])
    values = np.array([*a, *b])
    free = len(values) - 3
    if min(len(a), len(b)) < 2 or free < 1 or np.linalg.matrix_rank(design) < 3:
        nothing = Difference(math.nan, -math.inf, math.inf, 1.0)
        return nothing, nothing

    fit = np.linalg.lstsq(design, values, rcond=None)[0]
    left = np.sum((values - design @ fit) ** 2) / free
    errors = np.sqrt(np.maximum(left * np.diag(np.linalg.inv(design.T @ design)), TINY))
    _, apart, drift = (difference(float(x), float(error), free) for x, error in zip(fit, errors))
    return apart, drift


def drift_of(xs: Sequence[float]) -> Difference:
    """Slope per place of values in their order in time."""
    n = len(xs)
    if n < 3:
        return Difference(math.nan, -math.inf, math.inf, 1.0)
    places = [k - (n - 1) / 2 for k in range(n)]
    spread = math.fsum(place * place for place in places)
    slope = math.fsum(place * x for place, x in zip(places, xs)) / spread
    middle = summary(xs).mean
    left = math.fsum((x - middle - slope * place) ** 2 for place, x in zip(places, xs))
    return difference(slope, math.sqrt(left / (n - 2) / spread), n - 2)


def widest_gap(rows):
    """Share of its range that the widest gap of each row fills."""
    import numpy as np
    gaps = np.diff(np.sort(rows))
    return gaps.max(axis=-1) / np.ptp(rows, axis=-1)


@functools.cache
def gaps_of_normal(n: int):
    """`widest_gap` of DRAWS normal samples of a size (fixed seed)."""
    import numpy as np
    return widest_gap(np.random.default_rng(0).standard_normal((DRAWS, n)))


def modes(xs: Sequence[float]) -> tuple[list[float], list[float]] | None:
    """The groups on either side of the widest gap, if a normal sample of this size has a gap that fills as much of its
    range less often than ALPHA (Monte Carlo). None for n < 4. A single outlier counts as a group."""
    import numpy as np
    if len(xs) < FEWEST_FOR_MODES or min(xs) == max(xs):
        return None
    as_wide = np.sum(gaps_of_normal(len(xs)) >= widest_gap(np.array(xs, float)))
    if (1 + as_wide) / (DRAWS + 1) >= ALPHA:
        return None
    values = sorted(xs)
    cut = 1 + int(np.argmax(np.diff(values)))
    return values[:cut], values[cut:]


def band(xs: Sequence[float], level: float = ALPHA) -> tuple[float, float]:
    """Where one more value of the same kind lies with chance 1 - level; infinite for n < 2."""
    n, mean, sd = summary(xs)
    if n < 2:
        return -math.inf, math.inf
    half = reach(n - 1, level) * sd * math.sqrt(1 + 1 / n)
    return mean - half, mean + half


def outliers(xs: Sequence[float]) -> list[int]:
    """Places of values outside the band of the others, at ALPHA for all together (Grubbs' test of each). From n = 4."""
    found = []
    if len(xs) < FEWEST_FOR_MODES:
        return found
    for place, x in enumerate(xs):
        others = [*xs[:place], *xs[place + 1:]]
        low, high = band(others, ALPHA / len(xs))
        if not low <= x <= high:
            found.append(place)
    return found


# ---- How many runs --------------------------------------------------------------------------------------------------

def runs_needed(effect: float, sd: float, sides: int = 2, alpha: float = SHARE) -> int | None:
    """Runs (per side) for a t-test to see `effect` with chance POWER; None: more than MAX_RUNS.
    sides  2: Welch's two samples of equal sd, two-sided; 1: one sample against a fixed number, one-sided"""
    import numpy as np
    from scipy import special                                                # scipy.stats takes a second to import
    if not effect:
        return None
    if not sd > 0:
        if math.isnan(sd):
            return None
        return 2
    n = np.arange(2, MAX_RUNS + 1)
    free = sides * (n - 1)
    shift = abs(effect) / sd * np.sqrt(n / sides)
    enough = special.nctdtr(free, shift, special.stdtrit(free, 1 - alpha / sides)) <= 1 - POWER
    return int(n[enough.argmax()]) if enough.any() else None


def runs_to_settle(time: Difference, sd: float, room: float) -> int | None:
    """Runs per side that make an undecided time difference significant or `same`, if it is as measured."""
    from scipy import special
    found = []
    different = runs_needed(time.mean, sd)
    if different is not None:
        found.append(different)
    if abs(time.mean) < room:
        errors = special.ndtri(1 - ALPHA / 2) * sd / (room - abs(time.mean))
        found.append(max(2, math.ceil(2 * errors ** 2)))
    fewest = min(found, default=math.inf)
    return fewest if fewest <= MAX_RUNS else None


# ---- The verdict ----------------------------------------------------------------------------------------------------

def decide(evidence: Evidence) -> Verdict:
    """The rule above, on tests that are done."""
    if evidence.diverged:
        return Verdict("undecided", evidence.diverged[0])
    if evidence.target is not None:
        return decide_by_target(evidence)
    if evidence.loss is None:
        return Verdict("undecided", "fewer than two seeds with different losses on a side: a loss is judged by its "
                                    "spread over seeds")
    untimed = why_no_times(evidence)
    if untimed:
        return Verdict("undecided", untimed)
    if evidence.loss.p >= SHARE and evidence.same_steps:
        return decide_by_time(evidence, SHARE, "no difference of losses shows")
    return decide_at_equal_loss(evidence)


def decide_by_target(evidence: Evidence) -> Verdict:
    target, a, b = evidence.target
    if math.isnan(b.mean):
        return Verdict("undecided", "B's losses are not said")
    if not b.mean < target:
        return Verdict("no record", f"B's mean loss of {b.mean:.5f} is not below the target of {target:g}")
    if not b.p < ALPHA:
        how = "p takes two seeds with different losses" if math.isnan(b.p) else f"p {b.p:.2g} is not below {ALPHA:g}"
        return Verdict("undecided", f"B's mean loss is below the target of {target:g}, but does not prove it: {how}")
    untimed = why_no_times(evidence)
    if untimed:
        return Verdict("undecided", f"B proves the target (p {b.p:.2g}); {untimed}")
    if a.p < ALPHA:
        return decide_by_time(evidence, ALPHA, f"both sides prove the target of {target:g}")

    found = decide_by_time(evidence, ALPHA, f"B proves the target of {target:g} and A does not")
    if found.word == "faster":
        return found
    return Verdict("undecided", f"B proves the target of {target:g} and A does not, but B does not surely take less "
                                "time, and what A would take to the target is not measured")


def why_no_times(evidence: Evidence) -> str:
    """Why nothing can be said of the times; "" if something can."""
    if evidence.doubts:
        return evidence.doubts[0]
    if not any(math.isfinite(time.high - time.low) for time in evidence.times):
        return "too few times that count for an interval"
    return ""


def decide_by_time(evidence: Evidence, level: float, given: str) -> Verdict:
    times = evidence.times
    if all(-evidence.room <= time.low and time.high <= evidence.room for time in times):
        return Verdict("same", f"{given}, and times differ by less than {evidence.room:.3g} s for sure")
    word = agreed(times, level)
    if word == "undecided":
        return Verdict(word, f"{given}, and times neither differ for sure nor are surely within {evidence.room:.3g} s")
    amount = "less" if word == "faster" else "more"
    return Verdict(word, f"{given}, and B takes {abs(times[0].mean):.4g} s {amount}")


def decide_at_equal_loss(evidence: Evidence) -> Verdict:
    """Losses differ, or the sides train other steps. Without a price of loss, both must point the same way."""
    other = "B trains other steps"
    if evidence.loss.p < SHARE:
        other = f"B's loss is {'lower' if evidence.loss.mean < 0 else 'higher'}"
    priced = evidence.at_equal_loss
    if any(abs(test.mean) < evidence.least for test in priced):
        return Verdict("undecided", f"{other}, and at equal loss times of other days or machines differ by less than "
                                    f"{evidence.least:.3g} s, which one program does too")
    word = agreed(priced or [*evidence.times, evidence.loss], SHARE)
    if word != "undecided":
        speaks = "the time at equal loss speaks" if priced else "loss and time speak"
        return Verdict(word, f"{other}, and {speaks} for {'B' if word == 'faster' else 'A'}")
    if priced:
        return Verdict(word, f"{other}, and at equal loss the times do not differ for sure")
    return Verdict(word, f"{other}, and no curve says what that is worth")


def agreed(tests: Sequence[Difference], level: float) -> str:
    """The word that every test gives at a level, else "undecided"."""
    words = set()
    for test in tests:
        if not test.p < level:
            return "undecided"
        words.add("faster" if test.mean < 0 else "slower")
    return words.pop() if len(words) == 1 else "undecided"
