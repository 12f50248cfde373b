"""The statistics of all tables: differences of paired seeds, and two groups of runs of one configuration."""

import math
from collections.abc import Hashable, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple, TypeVar

import numpy as np
import pandas as pd

# The quantile of F, and the distribution function and the quantile of t: scipy.stats takes a second to import.
from scipy.special import fdtri, stdtr, stdtrit

from reporting.frames import differing

CONFIDENCE = 0.95
FEW_SEEDS = 10  # with fewer, the spread of a configuration is pooled over those of its table
ERROR = 0.05  # family-wise, of Holm's method
OUTLIER = 0.01  # probability at which a configuration is found to spread more than others of its table

Key = TypeVar("Key", bound=Hashable)


class Interval(NamedTuple):
    """A mean difference, and half of its 95 % interval: NaN of a single one."""

    mean: float
    half: float

    @property
    def is_clear(self) -> bool:
        """Whether the interval excludes 0."""
        return abs(self.mean) > self.half

    @property
    def verdict(self) -> str:
        """Gain, loss or no clear difference."""
        if not self.is_clear:
            return "no clear difference"
        if self.mean > 0:
            return "gain"
        return "loss"


def mean(values: pd.Series) -> float:
    """The exactly rounded mean; NaN of none. Two decimals of it do not depend on the order of the values."""
    if values.empty:
        return math.nan
    return fmean(values)


def quantile(degrees: float) -> float:
    """How many standard errors make half of an interval; NaN without a degree of freedom."""
    if degrees < 1:
        return math.nan
    return float(stdtrit(degrees, (1 + CONFIDENCE) / 2))


def half_width(std: float, n: int) -> float:
    """Half of the interval of a mean of n values with this sample standard deviation."""
    return quantile(n - 1) * std / math.sqrt(max(n, 1))


def interval(values: pd.Series) -> Interval:
    """The mean of values with its interval; NaN is no value."""
    values = values.dropna()
    return Interval(mean(values), half_width(values.std(), len(values)))


def over_draws(draws: Sequence[pd.Series]) -> Interval:
    """The mean over draws of the data, each the mean of its seeds, with an interval for other draws."""
    return interval(pd.Series([mean(values) for values in draws]))


def over_seeds(draws: Sequence[pd.Series]) -> Interval:
    """The mean over draws of the data with an interval for other seeds on these draws: it leaves out their spread."""
    squared_errors = [values.var() / len(values) for values in draws]
    degrees = sum(len(values) - 1 for values in draws)
    error = math.sqrt(sum(squared_errors)) / len(draws)
    return Interval(fmean(mean(values) for values in draws), quantile(degrees) * error)


def p_value(values: pd.Series) -> float:
    """Of a t test of no difference; NaN is no value."""
    values = values.dropna()
    n = len(values)
    with np.errstate(divide="ignore", invalid="ignore"):
        statistic = abs(np.divide(values.mean(), values.std() / math.sqrt(max(n, 1))))
    return float(2 * stdtr(n - 1, -statistic))


def holm(p_values: Mapping[Key, float]) -> dict[Key, bool]:
    """Whether Holm's method keeps each difference of a family, by its p-value (NaN: there is no difference)."""
    ordered = sorted(p_values, key=lambda key: (math.isnan(p_values[key]), p_values[key]))
    kept = {}
    are_kept = True
    for place, key in enumerate(ordered):
        are_kept = are_kept and p_values[key] <= ERROR / (len(ordered) - place)
        kept[key] = are_kept
    return kept


def paired(runs: pd.DataFrame, baseline: pd.DataFrame, metrics: Sequence[str]) -> pd.DataFrame:
    """The runs of a configuration minus those of another, a row per seed that both have.

    A metric that one of both lacks is NaN: data without a test split, or with too few phonemes for a beam of 8.

    Raises:
        ValueError: the runs are of several configurations.
    """
    for side in (runs, baseline):
        several = differing(side)
        if several:
            raise ValueError(f"a difference is between two settings, got runs with several {several[0]}")
    own = runs.groupby("seed")[list(metrics)].mean()
    base = baseline.groupby("seed")[list(metrics)].mean()
    return (own - base).dropna(how="all")


class Spread(NamedTuple):
    """A standard deviation of runs that differ in the seed, and its degrees of freedom."""

    std: float
    degrees: float


def spread(runs: pd.Series) -> Spread:
    """The spread of runs; an empty accuracy is no run."""
    return Spread(runs.std(), max(runs.count() - 1, 0))


class Pool(NamedTuple):
    """The spread that configurations share, and the largest of theirs."""

    std: float
    degrees: float
    largest: float


def pooled_spread(groups: Sequence[Spread]) -> Pool:
    """The spread that configurations share.

    Those that spread more than the others are left out, one after another: an F test of the largest variance against
    the others', at 1 % divided by the number of configurations. They keep a spread of their own.
    """
    known = sorted(group for group in groups if group.degrees > 0)
    while len(known) > 2:
        *others, last = known
        probability = OUTLIER / len(known)
        limit = fdtri(last.degrees, degrees_of(others), 1 - probability) * variance_of(others)
        if last.std**2 <= limit:
            break
        known = others
    if not known:
        return Pool(math.nan, 0, math.nan)
    return Pool(math.sqrt(variance_of(known)), degrees_of(known), known[-1].std)


def degrees_of(groups: Sequence[Spread]) -> float:
    return sum(group.degrees for group in groups)


def variance_of(groups: Sequence[Spread]) -> float:
    squares = sum(group.degrees * group.std**2 for group in groups)
    return squares / degrees_of(groups)


def belongs_to(own: Spread, pool: Pool) -> bool:
    """Whether a configuration spreads no more than those of the pool."""
    return own.degrees == 0 or own.std <= pool.largest


class Agreement(NamedTuple):
    """Your runs of a configuration beside the repository's: the difference of their means, and a verdict.

    Attributes:
        difference: in points, with half of its 95 % interval.
        verdict: "agrees", "differs", "no verdict" (no spread is known) or "" (one of the two has no run).
    """

    difference: Interval
    verdict: str


def agreement(yours: pd.Series, repository: pd.Series, pool: Spread | Pool | None = None) -> Agreement:
    """Compare two groups of runs of one configuration.

    The interval is that of a difference of two means: of one run of yours it is the prediction interval of a new run.
    An empty accuracy, as of data without a test split, is no run.

    Args:
        pool: the standard deviation to use; by default that of both groups together, which is then the t test of two
            groups with one standard deviation.
    """
    yours = yours.dropna()
    repository = repository.dropna()
    n = len(yours)
    m = len(repository)
    if n == 0 or m == 0:
        return Agreement(Interval(math.nan, math.nan), "")
    difference = mean(yours) - mean(repository)
    if pool is None:
        squares = ((yours - yours.mean()) ** 2).sum() + ((repository - repository.mean()) ** 2).sum()
        degrees = n + m - 2
        pool = Spread(math.sqrt(squares / max(degrees, 1)), degrees)
    half = quantile(pool.degrees) * pool.std * math.sqrt(1 / n + 1 / m)
    if math.isnan(half):
        return Agreement(Interval(difference, half), "no verdict")
    verdict = "differs"
    if abs(difference) <= half + 1e-9:
        verdict = "agrees"
    return Agreement(Interval(difference, half), verdict)


def from_published(yours: pd.Series, published: float, n_seeds: float, pool: Spread | Pool) -> Interval:
    """The mean of your runs minus a published mean, in points.

    The interval holds if the published runs spread over seeds as the pool does. It is NaN where the number of published
    seeds is, or where the pool has no degree of freedom.

    Args:
        n_seeds: number of published seeds; NaN if it is not known.
    """
    if yours.empty:
        return Interval(math.nan, math.nan)
    half = quantile(pool.degrees) * pool.std * math.sqrt(1 / len(yours) + 1 / n_seeds)
    return Interval(mean(yours) - published, half)
