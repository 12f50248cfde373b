"""The statistics of all tables, against SciPy; verdicts are right as often as they say."""

import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from reporting.compare import (
    Interval,
    Pool,
    Spread,
    agreement,
    belongs_to,
    interval,
    p_value,
    paired,
    pooled_spread,
    spread,
)


def drawn(number: int, seed: int = 0, mean: float = 60.0, std: float = 0.3) -> pd.Series:
    return pd.Series(np.random.default_rng(seed).normal(mean, std, number))


@pytest.mark.parametrize(("n", "m"), [(2, 2), (3, 3), (3, 10), (10, 3)])
def test_two_groups_have_the_interval_of_the_t_test(n, m):
    yours = drawn(n, 1)
    repository = drawn(m, 2)
    expected = stats.ttest_ind(yours, repository).confidence_interval(0.95)
    found = agreement(yours, repository)
    assert found.difference.mean - found.difference.half == pytest.approx(expected.low)
    assert found.difference.mean + found.difference.half == pytest.approx(expected.high)


def test_one_run_has_the_prediction_interval_of_a_new_one():
    repository = drawn(10)
    found = agreement(pd.Series([61.0]), repository)
    half = stats.t.ppf(0.975, 9) * repository.std() * math.sqrt(1 + 1 / 10)
    assert found.difference == Interval(pytest.approx(61 - repository.mean()), pytest.approx(half))


def test_where_nothing_is_known_there_is_no_verdict():
    one = pd.Series([60.0])
    assert agreement(one, pd.Series([61.0])).verdict == "no verdict"
    assert agreement(one, one.iloc[:0]).verdict == ""
    assert agreement(one.iloc[:0], one).verdict == ""


def test_an_empty_accuracy_is_no_run():
    own = drawn(3, 1)
    repository = drawn(4, 2)
    more = pd.concat([own, pd.Series([math.nan])])
    assert spread(more) == spread(own)
    assert agreement(more, repository) == agreement(own, repository)
    assert agreement(repository, more) == agreement(repository, own)
    assert agreement(pd.Series([math.nan]), own).verdict == ""


@pytest.mark.parametrize(("n", "m"), [(1, 3), (1, 10), (3, 3), (10, 10)])
def test_five_percent_differ_by_chance(n, m):
    """Also with a pooled spread of ten configurations."""
    generator = np.random.default_rng(0)
    draws = 1500
    differing = {"own": 0, "pooled": 0}
    for _ in range(draws):
        yours = pd.Series(generator.normal(60, 0.3, n))
        lines = [pd.Series(generator.normal(60, 0.3, m)) for _ in range(10)]
        pool = pooled_spread([spread(line) for line in lines])
        differing["own"] += agreement(yours, lines[0]).verdict == "differs"
        differing["pooled"] += agreement(yours, lines[0], pool).verdict == "differs"
    error = 4 * math.sqrt(0.05 * 0.95 / draws)
    for kind, count in differing.items():
        assert abs(count / draws - 0.05) < error + 0.01, kind


def test_a_pool_is_the_root_of_the_mean_square_and_leaves_out_what_spreads_more():
    calm = [spread(drawn(3, seed)) for seed in range(9)]
    squares = sum(item.degrees * item.std**2 for item in calm)
    pool = pooled_spread(calm)
    assert pool == Pool(pytest.approx(math.sqrt(squares / 18)), 18, max(calm).std)
    wild = spread(drawn(3, 100, std=8.0))
    assert pooled_spread([*calm, wild]) == pool
    assert not belongs_to(wild, pool)
    assert belongs_to(calm[0], pool)
    assert math.isnan(pooled_spread([Spread(math.nan, 0)]).std)


def runs(**columns) -> pd.DataFrame:
    return pd.DataFrame({"method": "lml", "lr": 0.1, **columns})


def test_differences_are_of_paired_seeds():
    own = runs(seed=[0.0, 1.0, 2.0, 7.0], top1=[62.1, 62.4, 63.8, 20.0])
    base = runs(seed=[0.0, 1.0, 2.0, 3.0], top1=[61.0, 62.5, 60.4, 75.0])
    gains = np.array([1.1, -0.1, 3.4])
    low, high = stats.t.interval(0.95, 2, loc=gains.mean(), scale=stats.sem(gains))
    found = paired(own, base, ["top1"])["top1"]
    assert found.to_numpy() == pytest.approx(gains)
    assert interval(found) == pytest.approx((gains.mean(), (high - low) / 2))
    assert p_value(found) == pytest.approx(stats.ttest_1samp(gains, 0).pvalue)


def test_a_metric_that_one_side_lacks_leaves_the_others():
    """As of data without a test split."""
    own = runs(seed=[0.0, 1.0, 2.0], top1=[62.1, 62.4, 63.8], test=[50.0, 51.0, 52.0])
    base = runs(seed=[0.0, 1.0, 2.0], top1=[61.0, 62.5, 60.4], test=math.nan)
    found = paired(own, base, ["top1", "test"])
    assert found["top1"].to_numpy() == pytest.approx([1.1, -0.1, 3.4])
    assert interval(found["top1"]) == interval(found["top1"].reset_index(drop=True))
    assert math.isnan(interval(found["test"]).mean)
    assert math.isnan(p_value(found["test"]))
    none = paired(own, base.assign(seed=[7.0, 8.0, 9.0]), ["top1", "test"])
    assert none.empty


def test_a_difference_of_several_settings_is_refused():
    mixed = runs(seed=[0.0, 1.0], top1=[1.0, 2.0]).assign(lr=[0.1, 0.2])
    with pytest.raises(ValueError, match="several lr"):
        paired(mixed, runs(seed=[0.0], top1=[1.0]), ["top1"])


@pytest.mark.parametrize(
    ("values", "verdict"), [([1.0, 1.1], "gain"), ([-1.0, -1.1], "loss"), ([-1.0, 1.1], "no clear difference")]
)
def test_a_verdict_is_whether_the_interval_excludes_zero(values, verdict):
    assert interval(pd.Series(values)).verdict == verdict
    assert not Interval(1.0, math.nan).is_clear
