"""Statistics of a comparison, as pure functions on lists of numbers (seconds, nats per token), and the verdict.

The rule, for B against A; the chance of a wrong word is at most ALPHA in all, for independent runs with normal noise:
1. Losses are tested at ALPHA / 2 (Welch, over seeds). If no difference shows and the sides train for as many steps, the
   time alone decides; the reason says what losses may yet be worth. Else the time at equal loss does: a run's time plus
   what its loss is worth by the slope of A's curve near its end, and also by half of it (as on public runs).
2. Time is tested at ALPHA / 2: of interleaved pairs by an e-value, which is valid whenever one stops; else by Welch,
   and where the order of the runs is known also with a straight drift taken out. All must give the same word.
3. same: losses do not differ, and the whole interval of the time difference lies within the margin.
4. undecided: all else; fewer than two seeds (one if losses equal to the last bit) or times on a side; unpaired times
   that drift, fall in two modes further apart than the difference, or may all of a side be in one; a run that diverged.
5. not comparable: other data, one side of several recipes, or clocks of different machines or environments."""
from __future__ import annotations

import math, warnings
from collections.abc import Iterable, Sequence
from typing import NamedTuple

ALPHA = 0.01                       # chance of a wrong verdict
SHARE = ALPHA / 2                  # of its two tests, loss and time, each
POWER = 0.8                        # chance that as many runs as `runs_needed` says settle it
MAX_RUNS = 1000                    # more are not worth a number
SAME_MARGIN = 0.001                # `same`: the time difference is surely less than this share of the time
DRAWS = 1999                       # Monte Carlo draws behind the p-value of two modes
PRIOR = 10.0                       # variance of the effect, in units of the differences' variance, that e-values bet on

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
    word: str                      # faster, slower, same, undecided, not comparable
    reason: str

def summary(xs: Sequence[float]) -> Summary:
    n = len(xs)
    mean = math.nan if not n else xs[0] if min(xs) == max(xs) else math.fsum(xs) / n    # equal: exactly no sd
    return Summary(n, mean, math.sqrt(math.fsum((x - mean) ** 2 for x in xs) / (n - 1)) if n > 1 else math.nan)

def mean(xs: Iterable[float]) -> float:
    return summary(list(xs)).mean

def one_sample(xs: Sequence[float], target: float) -> float:
    """One-sided p of "the mean is not below the target" (t-test); nan where n < 2 or the spread is 0."""
    from scipy import stats
    if summary(xs).n < 2 or not summary(xs).sd > 0:
        return math.nan
    return float(stats.ttest_1samp(xs, target, alternative="less").pvalue)

def welch(a: Sequence[float], b: Sequence[float]) -> Difference:
    """Mean of b minus mean of a for unpaired samples of unequal variances; infinite interval where n < 2."""
    from scipy import stats
    one, other = summary(a), summary(b)
    mean = other.mean - one.mean
    if min(one.n, other.n) < 2:
        return Difference(mean, -math.inf, math.inf, 1.0)
    if one.sd == other.sd == 0:
        return Difference(mean, mean, mean, float(mean == 0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)                      # one side may have equal values
        test = stats.ttest_ind(b, a, equal_var=False)
        return Difference(mean, *map(float, test.confidence_interval(1 - ALPHA)), float(test.pvalue))

def paired_e_value(differences: Sequence[float]) -> float:
    """Evidence against "the differences have mean 0", valid at any stopping time: reject at e >= 1 / level.
    Normal differences of unknown variance; the effect in units of their sd is mixed over N(0, PRIOR) and the sd over
    its right Haar measure, so that e is a martingale under the null (Lai 1976; Wang and Ramdas 2023). 1 for n < 2."""
    n, mean = len(differences), summary(differences).mean
    squares = math.fsum(x * x for x in differences)
    if n < 2 or squares == 0:
        return 1.0
    shrink = 1 + n * PRIOR
    rest = squares - n * mean * mean * (1 - 1 / shrink)
    log_e = n / 2 * math.log(squares / rest) - math.log(shrink) / 2
    return math.exp(min(log_e, 700.0))                                       # 700: the largest that a float holds

def confidence_sequence(differences: Sequence[float], level: float = ALPHA) -> tuple[float, float]:
    """Means that `paired_e_value` does not reject at `level`: an interval that covers at all times at once."""
    n, mean = len(differences), summary(differences).mean
    if n < 2:
        return -math.inf, math.inf
    shrink = 1 + n * PRIOR
    ratio = math.exp(2 / n * (math.log(1 / level) + math.log(shrink) / 2))
    if ratio >= shrink:
        return -math.inf, math.inf
    rest = math.fsum((x - mean) ** 2 for x in differences)
    half = math.sqrt((ratio - 1) * rest / (n * (1 - ratio / shrink)))
    return mean - half, mean + half

def paired(differences: Sequence[float]) -> Difference:
    """Mean of b - a over interleaved pairs; interval and p (1 / e) hold at any stopping time."""
    return Difference(summary(differences).mean, *confidence_sequence(differences),
                      min(1.0, 1 / paired_e_value(differences)))

def without_drift(a: Sequence[float], b: Sequence[float], order: Sequence[float]) -> tuple[Difference, Difference]:
    """b - a beside a straight drift, and the drift per unit of `order` (places in time of a's, then b's values).
    Least squares on side and order. If all of a ran before all of b, the interval is about twice Welch's: a drift and a
    difference then look alike."""
    import numpy as np
    from scipy import stats
    side = np.repeat([0.0, 1.0], [len(a), len(b)])
    design, values = np.column_stack([np.ones(len(side)), side, np.asarray(order, float)]), np.array([*a, *b])
    free = len(values) - 3
    if min(len(a), len(b)) < 2 or free < 1 or np.linalg.matrix_rank(design) < 3:
        nothing = Difference(math.nan, -math.inf, math.inf, 1.0)
        return nothing, nothing
    fit = np.linalg.lstsq(design, values, rcond=None)[0]
    variance = np.sum((values - design @ fit) ** 2) / free * np.diag(np.linalg.inv(design.T @ design))
    half = stats.t.isf(ALPHA / 2, free) * np.sqrt(variance)
    p = 2 * stats.t.sf(np.abs(fit) / np.sqrt(np.maximum(variance, 1e-300)), free)
    return tuple(Difference(*map(float, (fit[k], fit[k] - half[k], fit[k] + half[k], p[k]))) for k in (1, 2))

def modes(xs: Sequence[float]) -> tuple[list[float], list[float]] | None:
    """The groups on either side of the widest gap, if a normal sample of this size has a gap that fills as much of its
    range less often than ALPHA (Monte Carlo, fixed seed). None for n < 4. A single outlier counts as a group."""
    import numpy as np
    if len(xs) < 4 or min(xs) == max(xs):
        return None
    share = lambda rows: np.diff(np.sort(rows)).max(axis=-1) / np.ptp(rows, axis=-1)
    normal = share(np.random.default_rng(0).standard_normal((DRAWS, len(xs))))
    if (1 + np.sum(normal >= share(np.array(xs, float)))) / (DRAWS + 1) >= ALPHA:
        return None
    values = sorted(xs)
    cut = 1 + int(np.argmax(np.diff(values)))
    return values[:cut], values[cut:]

def runs_needed(effect: float, sd: float, sides: int = 2, alpha: float = SHARE) -> int | None:
    """Runs (per side) for a t-test to see `effect` with chance POWER; None: more than MAX_RUNS.
    sides  2: Welch's two samples of equal sd, two-sided; 1: one sample against a fixed number, one-sided"""
    import numpy as np
    from scipy import stats
    if not (sd > 0 and effect):
        return None if sd > 0 or not effect else 2
    n = np.arange(2, MAX_RUNS + 1)
    free, shift = sides * (n - 1), abs(effect) / sd * np.sqrt(n / sides)
    enough = stats.nct.sf(stats.t.isf(alpha / sides, free), free, shift) >= POWER
    return int(n[enough.argmax()]) if enough.any() else None

def runs_to_settle(time: Difference, sd: float, room: float) -> int | None:
    """Runs per side that make an undecided time difference significant or `same`, if it is as measured."""
    from scipy import stats
    found = [runs_needed(time.mean, sd) or math.inf]
    if abs(time.mean) < room:
        found.append(math.ceil(2 * (stats.norm.isf(ALPHA / 2) * sd / (room - abs(time.mean))) ** 2))
    return max(2, min(found)) if min(found) <= MAX_RUNS else None

def decide(loss: Difference | None, times: Sequence[Difference], at_equal_loss: Sequence[Difference], room: float,
           doubts: Sequence[str] = (), same_steps: bool = True) -> Verdict:
    """The rule above, on tests that are done; room: half the width of `same`, in s; doubts: why times are not trusted.
    loss           b - a in nats per token; None: fewer than two seeds on a side
    times          every test of b - a in s that must agree; none: no time was measured
    at_equal_loss  the same at equal loss, by price of loss; none: no curve says what loss is worth"""
    if loss is None:
        return Verdict("undecided", "fewer than two seeds on a side: a loss is judged by its spread over seeds")
    if doubts:
        return Verdict("undecided", doubts[0])
    if not any(math.isfinite(time.high - time.low) for time in times):
        return Verdict("undecided", "too few times that count for an interval")
    if loss.p >= SHARE and same_steps:
        if all(-room <= time.low and time.high <= room for time in times):
            return Verdict("same", f"no difference of losses shows, and that of times lies within {room:.3g} s")
        word = _agreed(times)
        return Verdict(word or "undecided", "no difference of losses shows, and " + (
            f"B takes {abs(times[0].mean):.4g} s {'less' if word == 'faster' else 'more'}" if word else
            "the interval of the time difference holds 0, and more than the margin of `same`"))
    other = f"B's loss is {'lower' if loss.mean < 0 else 'higher'}" if loss.p < SHARE else "B trains other steps"
    word = _agreed(at_equal_loss or [*times, loss])        # without a price only if time and loss point the same way
    if word:
        return Verdict(word, f"{other}, and " + ("the time at equal loss speaks" if at_equal_loss else
                                                 "loss and time speak") + f" for {'AB'[word == 'faster']}")
    return Verdict("undecided", f"{other}, and at equal loss the times do not differ for sure" if at_equal_loss else
                   f"{other}, and no curve says what that is worth")

def _agreed(tests: Sequence[Difference]) -> str | None:
    words = {("faster" if test.mean < 0 else "slower") if test.p < SHARE else None for test in tests}
    return words.pop() if len(words) == 1 else None
