"""What the pages say of temperatures and of m is what their rows say."""

from functools import cache

import pandas as pd

from tests.docs.claims import EVEN, FIFTH, HALF, METRICS, SPLITTER, both, less, pair, rows, short, span, stands, where
from topk_losses import METHODS


@cache
def means_of(file, p_k):
    """By method, m (0: all scores) and temperature: mean accuracies over the seeds, and what validation chooses by."""
    found = where(file, p_k=p_k)
    found = found.assign(
        m=found.m.where(found.m < found.num_classes, 0).fillna(0),
        inverse_temperature=found.inverse_temperature.astype(str),
    )
    means = found.groupby(["method", "m", "inverse_temperature"])[[*METRICS, "valid_top1", "valid_top5"]].mean()
    first = float(p_k.split()[0])
    return means.assign(aim=first * means.valid_top1 + (1 - first) * means.valid_top5)


def best_of(file, p_k, method, m=0, schedule=False):
    """The constant inverse temperature, or the schedule, that validation prefers."""
    heads = means_of(file, p_k).loc[method, m]
    chosen = heads[heads.index.str.contains(":") if schedule else ~heads.index.str.contains(":|auto")]
    return both(chosen.loc[[chosen.aim.idxmax()]]) if len(chosen) else None


def differences(p_k, schedule=False):
    """By method: test accuracies of "auto", or of the schedule, above the best constant, and above the default."""
    found = {}
    for method in means_of("temperature", p_k).index.unique("method"):
        if METHODS[method].spread:
            heads = means_of("temperature", p_k).loc[method, 0]
            chosen = best_of("temperature", p_k, method, schedule=True) if schedule else both(heads.loc[["auto"]])
            if chosen:
                default = both(heads.loc[[str(METHODS[method].inverse_temperature)]])
                found[method] = (less(chosen, best_of("temperature", p_k, method)), less(chosen, default))
    return found


def test_what_auto_loses():
    auto = {p_k: differences(p_k) for p_k in (HALF, EVEN, FIFTH)}
    others = {p_k: [auto[p_k][name] for name in auto[p_k] if name != "neuralsort"] for p_k in (HALF, EVEN)}
    for p_k, bound in ((HALF, 0.25), (EVEN, 0.4)):
        assert len(others[p_k]) == 11
        assert -bound < min(min(best) for best, _ in others[p_k]) < -bound + 0.05
    alone = {name: best[0] for name, (best, _) in auto[FIFTH].items()}
    fine = {name for name in alone if min(auto[FIFTH][name][0]) > -0.35}
    assert set(alone) - fine == {"imbalanced_noised_topk", "neuralsort", "softsort", "bitonic", SPLITTER}
    neural = auto[EVEN]["neuralsort"][0]
    against = [each for found in others.values() for _, default in found for each in default]
    stands(
        "docs/findings/temperature-study.md",
        f"NeuralSort loses {short(-auto[HALF]['neuralsort'][0][0], 2)} of top-1",
        f"NeuralSort loses {short(-neural[0])} of top-1 and gains {short(neural[1])} of top-5",
        f"`imbalanced_noised_topk` loses {short(-alone['imbalanced_noised_topk'], 2)} of top-1",
        f"the splitter network {short(-alone[SPLITTER])}, the bitonic network {short(-alone['bitonic'])}",
        f"SoftSort loses {-alone['softsort']:.0f} points",
        f"gains up to {short(max(against), 2)} and loses at most {short(-min(against), 2)}.",
    )


def test_what_schedules_gain():
    masks = ("lml", "lapsum", "capped_softmax", "subset_topk")
    half, even, fifth = (differences(p_k, schedule=True) for p_k in (HALF, EVEN, FIFTH))
    alone, with_even = (list(zip(*(each[name][0] for name in masks))) for each in (fifth, even))
    others = span(best[0] for name, (best, _) in half.items() if name != "sparse_topk")

    def best(method, schedule=False):
        return pair(best_of("temperature", FIFTH, method, schedule=schedule), 2)

    stands(
        "docs/findings/temperature-study.md",
        f"NeuralSort reaches {best('neuralsort', True)} (constant: {best('neuralsort')}) and SoftSort "
        f"{best('softsort', True)}.",
        f"gain {span(alone[0])} of top-1 and up to {short(max(alone[1]), 2)} of",
        f"{span(with_even[0])} and {span(with_even[1])}.",
        f"gain {pair(fifth['noised_topk'][0], 2)} and {pair(fifth['imbalanced_noised_topk'][0], 2)}.",
        f"moves top-1 by {others}, and `sparse_topk`'s by {short(half['sparse_topk'][0][0], 2)}",
        f"the schedule is {-even['bitonic'][0][0]:.2f} worse",
    )


def test_auto_with_other_numbers_of_classes():
    def against(classes, m, default=False):
        """By method: `auto` minus the best constant, or the default."""
        file, found = f"temperature_classes_{classes}", {}
        for method in means_of(file, HALF).index.unique("method"):
            heads = means_of(file, HALF).loc[method, m]
            other = both(heads.loc[[str(METHODS[method].inverse_temperature)]])
            found[method] = less(both(heads.loc[["auto"]]), other if default else best_of(file, HALF, method, m))
        return pd.DataFrame(found, METRICS).T

    def but(method, *found):
        return -min(each.drop(method).min().min() for each in found), -min(each.loc[method].min() for each in found)

    few, many = ([against(classes, m) for m in (16, 50)] for classes in (100, 1000))
    (others, neural), (of_many, neural_of_many) = but("neuralsort", *few), but("neuralsort", *many)
    every, ten, over = against(1000, 0), against(10, 0), against(10, 0, default=True).test_top1[["lml", "subset_topk"]]
    assert set(over.round(1)) == {1.6}
    assert others < 0.2
    assert (every.drop(["neuralsort", SPLITTER]) > -0.7).all(axis=None)
    stands(
        "docs/findings/temperature-study.md",
        f"NeuralSort's at most {short(neural, 2)}.",
        f"{short(over.min())} points of top-1 above the default of `lml` and `subset_topk`",
        f"NeuralSort loses {short(-ten.test_top1['neuralsort'])} against its best β, and the splitter network "
        f"{-ten.test_top1[SPLITTER]:.1f}.",
        f"at most {short(of_many)} below the best constant, but for NeuralSort, which loses {neural_of_many:.0f}.",
        f"{pair(-every.loc[SPLITTER])} below for the splitter network",
    )


def test_temperatures_of_whole_networks():
    file, methods, best, behind, gains = "temperature_training", (SPLITTER, "neuralsort", "softsort"), {}, {}, {}
    for key in ((p_k, method) for p_k in (EVEN, FIFTH) for method in methods):
        found = means_of(file, key[0]).loc[key[1], 0]
        constant = found[~found.index.str.contains(":|auto")]
        best[key] = [set(constant[metric].nlargest(2).index) for metric in METRICS]
        behind[key] = constant.test_top1.max() - found.test_top1
        gains[key] = less(best_of(file, *key, schedule=True), best_of(file, *key))
    softer = [behind[EVEN, method][~behind[EVEN, method].index.str.contains(":|auto")] for method in methods[:2]]
    assert all(each.loc[sorted(each.index, key=float)].is_monotonic_increasing for each in softer)
    assert best[EVEN, "softsort"] == best[FIFTH, "softsort"] == [{"1.0", "2.0"}] * 2
    assert behind[FIFTH, SPLITTER].drop("auto").idxmin() == "2.0"
    neural = means_of(file, FIFTH).loc["neuralsort", 0].test_top1
    assert behind[EVEN, "neuralsort"].idxmin() == "0.05"
    assert {key for key, gain in gains.items() if max(gain) > 0} == {(FIFTH, "neuralsort")}
    assert (round(gains[FIFTH, "neuralsort"][0]), gains[FIFTH, "neuralsort"][1] < 0) == (1, True)
    assert max(behind[EVEN, "softsort"]["auto"], behind[FIFTH, SPLITTER]["auto"]) < 0.05
    network, sort = behind[EVEN, SPLITTER], behind[EVEN, "softsort"]
    stands(
        "docs/findings/temperature-study.md",
        f"by {softer[0].max():.0f} and {softer[1].max():.0f} points of top-1 from end to end",
        f"NeuralSort has {neural.max():.0f} of top-1 at most, at {short(float(neural.idxmax()), 2)}.",
        f"{sort['0.05']:.0f} to {sort['0.125']:.0f} points of top-1 below it for SoftSort, and {network['0.5']:.0f}",
        f"it is {network['auto']:.0f} points of top-1 below the best for the network and "
        f"{behind[EVEN, 'neuralsort']['auto']:.0f} for NeuralSort",
    )


def test_what_learning_costs():
    table = rows("benchmarks/learned_temperature").set_index(["method", "p_k", "inverse_temperature"])[["top1", "top5"]]
    cost = table.xs("auto", level=2) - table.xs("learned", level=2)
    masks, soft, network = (
        span(cost.loc[names].to_numpy().ravel())
        for names in (["lml", "subset_topk"], [("softsort", HALF), ("softsort", EVEN)], [SPLITTER])
    )

    def alone(method, mode):
        return pair(table.loc[method, FIFTH, mode], 2)

    stands(
        "docs/findings/temperature-study.md",
        f"costs `lml` and `subset_topk` {masks} points against `auto`,",
        f"SoftSort {soft} and the splitter network {network} where",
        *(f"{alone(name, 'learned')} instead of {alone(name, 'auto')}" for name in ("softsort", "neuralsort")),
    )


def test_auto_at_learning_rates_that_were_chosen():
    trials = where("heads_trials", n_epochs=5)
    trials = trials.assign(auto=trials.inverse_temperature == "auto")
    keys = ["method", "p_k", "m", "auto"]
    best = trials.loc[trials.groupby(keys).valid.idxmax()].set_index(keys)[METRICS]
    gains = (best.xs(True, level="auto") - best.xs(False, level="auto")).dropna()
    methods, p_ks = ["lapsum", "lml", "df_topk", "softsort", "neuralsort", SPLITTER], [HALF, EVEN, FIFTH]
    for method in methods:
        found = gains.loc[[(method, p_k, m) for p_k in p_ks for m in (16, 100)]]
        cells = [("+" if gain >= 0 else "−") + short(abs(gain), 2) for gain in found.to_numpy().ravel()]
        stands("docs/findings/temperature-study.md", f"| `{method}` | {' | '.join(cells)} |")
    assert (gains.loc[(methods[:4], p_ks[:2]), :].abs() < 1).all(axis=None)
    assert (gains.loc[SPLITTER] < 0).all(axis=None)
    assert gains.loc["softsort", FIFTH].test_top1.min() > 5
    assert gains.loc["neuralsort", HALF].test_top1.min() > 1


def test_what_m_costs():
    costs = {}
    for method in ("neuralsort", "softsort", "lml", "subset_topk", SPLITTER):
        few, every, few_of_many, many = (
            best_of(f"temperature_classes_{classes}", HALF, method, m) for classes in (100, 1000) for m in (16, 0)
        )
        cells = [pair(each, 2) for each in (few, every, few_of_many, many)]
        stands("docs/which-loss.md", f"| `{method}` | {' | '.join(cells)} |")
        costs[method] = less(every, few), less(many, few_of_many)
    assert [method for method, (cost, _) in costs.items() if max(cost) > 0] == ["neuralsort"]
    top1, top5 = (span(each, 1) for each in zip(*(cost for _, cost in costs.values())))
    stands(
        "docs/which-loss.md",
        f"but for NeuralSort {short(costs['neuralsort'][0][0])} of top-1",
        f"it costs {top1} of top-1 and {top5.replace('1.0', '1')} of top-5.",
    )
