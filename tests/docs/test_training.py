"""What the pages say of networks trained from scratch is what their rows say."""

from functools import cache, partial
from itertools import pairwise
from math import nan

import pandas as pd
import pytest

from scripts.reporting import epochs_figure
from scripts.reporting.paired import half_width
from scripts.shared.run_record import chosen_rows
from tests.docs.claims import (
    EVEN,
    FIFTH,
    HALF,
    METRICS,
    ONE,
    RESULTS,
    SOFTMAX,
    SPLITTER,
    both,
    in_16_epochs,
    less,
    pair,
    plus,
    rows,
    short,
    signed,
    span,
    stands,
    where,
)


@cache
def published():
    """The paper's Table 1, first hand: test top-1 and top-5 in percent by method and P_K."""
    return where("paper/table1", second_hand=False).groupby(["method", "p_k"])[METRICS].first()


def published_ends():
    """Of it cross-entropy and the splitter network, [.2 x5]."""
    return published().loc[SOFTMAX, ONE], published().loc[SPLITTER, EVEN]


def test_other_temperatures_from_scratch():
    clean = partial(where, "scratch", label_noise=0)
    first = clean(seed=0)
    counts = first.groupby("method").size()
    assert counts.to_dict() == {SOFTMAX: 4, SPLITTER: 4, "df_topk": 2, "softsort": 2, "lapsum": 2}
    # What validation prefers of each method's settings.
    chosen = first.loc[first.groupby("method").valid.idxmax()].set_index("method")
    softmax = chosen.loc[SOFTMAX]
    assert (softmax.lr, softmax.isna().label_smoothing) == (0.001, True)
    temperatures = {SPLITTER: 0.1, "df_topk": 0.1, "softsort": 1, "lapsum": 0.25}
    assert chosen.inverse_temperature.drop(SOFTMAX).to_dict() == temperatures
    assert (first[first.method != SOFTMAX][METRICS] < softmax[METRICS]).all(axis=None)
    base = clean(method=SOFTMAX, lr=0.001, label_smoothing=None).set_index("seed")[METRICS]
    apart = {
        method: clean(method=method, inverse_temperature=beta).set_index("seed")[METRICS] - base
        for method, beta in temperatures.items()
    }
    assert all(set(each.dropna().index) == {0, 1, 2} for each in apart.values())
    lost = {method: list(each.mean() < -half_width(each.std(), 3)) for method, each in apart.items()}
    same = [False, False]
    assert lost == {SPLITTER: same, "df_topk": same, "softsort": [True, False], "lapsum": [True, False]}
    apart = {method: signed(each) for method, each in apart.items()}
    of_all = "; ".join(f"`{method}` {each}" for method, each in apart.items())
    half = where("table4_short", method=SPLITTER, p_k=HALF)
    at_published = less(both(where("table4_short", method=SOFTMAX)), both(half))
    noised = where("scratch", label_noise=0.2, seed=0).set_index(["method", "label_smoothing", "inverse_temperature"])
    preferred = noised.groupby(level=0).valid.idxmax()
    assert (preferred[SOFTMAX][1], preferred[SPLITTER][2]) == (pytest.approx(nan, nan_ok=True), 0.025)
    assert noised.valid.idxmax()[0] == SPLITTER
    noised = noised[METRICS] - noised.loc[SOFTMAX].iloc[0][METRICS]
    assert [best[:2] for best in noised.idxmax()] == [(SOFTMAX, 0.1)] * 2
    assert (noised.loc[SPLITTER].sort_index(level=1).diff().iloc[1:] < 0).all(axis=None)  # the softer the better

    smoothed, laplace, *of_network = (
        signed(noised.loc[[setting]])
        for setting in (
            (SOFTMAX, 0.1, nan),
            ("lapsum", nan, 0.1),
            *((SPLITTER, nan, beta) for beta in (0.1, 0.05, 0.025)),
        )
    )
    network = "{}, with β = .05 {}, with β = .025 {}".format(*of_network)
    stands(
        "docs/evidence/table1.md",
        f"it is {pair(at_published)} behind",
        f"differences in three pairs of seeds are: {of_all}.",
        f"with smoothing of .1 {smoothed}, the splitter network with β = .1 {network}, `lapsum` with β = .1 {laplace}.",
    )
    stands(
        "docs/evidence/verdict.md",
        f"| {of_all} |",
        f"splitter network {network}; `lapsum` {laplace}; cross-entropy with label smoothing {smoothed} |",
    )
    stands("README.md", f"{apart[SPLITTER]} and {apart['df_topk']}, three seeds")


def test_the_stronger_recipe():
    softmax, splitter, soft = (both(where("strong", method=name)) for name in (SOFTMAX, SPLITTER, "softsort"))
    best, highest = both(where("paper/table1", published_name="Lap-Top-k")), published().max()
    four = published().test_top1.nlargest(4)
    before = less(in_16_epochs(SOFTMAX, ONE), in_16_epochs(SPLITTER, EVEN))
    deviations = where("table1_short").groupby(["method", "p_k"])[METRICS].std()
    ranges = [
        span(cells, 1) for _, cells in deviations.loc[[(SOFTMAX, ONE), (SPLITTER, EVEN), ("softsort", EVEN)]].items()
    ]
    stands(
        "docs/evidence/strong.md",
        f"They are {pair(highest, 2)} (the paper, top-1 and top-5 of different rows) and {pair(best, 2)} (LapSum",
        f"Softmax cross-entropy is {pair(less(softmax, best))} above",
        f"the splitter network {pair(less(splitter, best))}.",
        f"{pair(less(softmax, published_ends()[0]))} more than its published row",
        f"{pair(less(softmax, splitter))} behind, where it was {pair(before)}.",
        f"of {ranges[0]} in top-1 and {ranges[1]} in top-5",
    )
    assert max(less(soft, highest)) < 0
    assert four.max() - four.min() < 0.6


def in_pairs(this, that):
    """The differences by seed between two rows of table1_short, (method, P_K) each."""
    this, that = (
        where("table1_short", method=method, p_k=p_k).set_index("seed")[METRICS] for method, p_k in (this, that)
    )
    return this - that


def test_table_1_in_16_epochs():
    methods = ("neuralsort", "softsort", "sinkhorn_sort", SPLITTER)
    gains = [less(in_16_epochs(method, EVEN), in_16_epochs(method, FIFTH)) for method in methods]
    ranges = [f"{min(each):.0f} to {max(each):.0f} " for each in zip(*gains)]
    neural = where("table1_short", method="neuralsort", p_k=FIFTH).test_top1
    sinkhorn = where("table1_short", method="sinkhorn_sort", p_k=FIFTH)

    def at(method, p_k, beta):
        found = where("temperature_training", seed=0, method=method, p_k=p_k, inverse_temperature=beta)
        return both(found)[0]

    stands(
        "docs/evidence/table1.md",
        f"gains {ranges[0]}points of top-1",
        f"{ranges[1]}of top-5",
        f"from {neural.min():.0f} to {neural.max():.0f}.",
        f"has {sinkhorn.test_top5.mean():.2f} here",
        f"Softmax's lead of {pair(less(in_16_epochs(SOFTMAX, ONE), in_16_epochs(SPLITTER, EVEN)))} over",
        f"an interval of ± {pair(half_width(in_pairs((SPLITTER, EVEN), (SOFTMAX, ONE)).std(), 3))}",
        f"is {at(SPLITTER, EVEN, '0.1') - at(SPLITTER, EVEN, '0.5'):.1f} of top-1 better at β = .1",
        f"it is {at(SPLITTER, FIFTH, '2.0') - at(SPLITTER, FIFTH, '0.5'):.1f} better at 2",
    )
    for p_k in (EVEN, FIFTH):
        assert at("softsort", p_k, "1.0") > max(at("softsort", p_k, "0.05"), at("softsort", p_k, "0.125"))


def test_table_1_beside_the_paper():
    ours = where("table1_short").groupby(["method", "p_k"])[METRICS]
    theirs, rerun = published().drop(index=SOFTMAX, level="method"), where("paper/table1", second_hand=False)
    rerun = rerun[rerun.source.str.contains("rerun")].set_index("method")[METRICS]
    gains, others = theirs - published_ends()[0], ours.mean().drop(index=SOFTMAX, level="method")
    assert (gains > 0).sum().tolist() == [4, 4]
    assert max(less(others.max(), in_16_epochs(SOFTMAX, ONE))) < 0
    here, there = (found.test_top1.nlargest(2) for found in (others, theirs))
    assert here.index[0] == there.index[0] == (SPLITTER, EVEN)
    assert others.test_top5.idxmax() == (SPLITTER, EVEN)
    margins = [found.iloc[0] - found.iloc[1] for found in (here, there)]
    stands("README.md", f"in the paper four do in 200, by {span(gains.test_top1.nlargest(4), 1)} of top-1")
    deviations = sorted(ours.std().to_numpy().ravel())
    stands(
        "docs/evidence/table1.md",
        f"{pair(rerun.loc[SPLITTER], 2)} and {pair(rerun.loc['sinkhorn_sort'], 2)}, are nearer to",
        f"as in the paper, by {margins[0]:.0f} points instead of {short(margins[1])}, and here in top-5 too",
        f"best of all in top-5 ({theirs.test_top5.max():.2f}), has",
        f"failed in the paper ({pair(theirs.loc['softsort', FIFTH], 2)}) and",
        f"over seeds are {span(deviations[:-1], 1)} (NeuralSort's top-1 with k = 5: {deviations[-1]:.1f})",
    )


def test_table_1_on_a_cpu():
    of_cpu, of_gpu = (where(name, seed=0).set_index(["method", "p_k"]) for name in ("table1_short_cpu", "table1_short"))
    apart = (of_cpu[METRICS] - of_gpu.loc[of_cpu.index, METRICS]).abs().droplevel("p_k")
    far, hours = apart.loc[["sinkhorn_sort", "neuralsort"]], of_cpu.train_seconds / 3600
    near, of_seeds = apart.drop(far.index).max(), where("table1_short", p_k=FIFTH).groupby("method")[METRICS]
    spread = (of_seeds.max() - of_seeds.min()).loc[far.index]
    stands(
        "docs/evidence/table1.md",
        f"took {hours.min():.1f} to {hours.max():.0f} hours of training a row",
        f"agree with those of the GPU to {near.test_top1:.1f} points in top-1 and {short(near.test_top5)} in top-5, "
        f"but for SinkhornSort ({pair(far.iloc[0])}) and NeuralSort ({pair(far.iloc[1])}) with k = 5 alone, whose "
        f"seeds lie {pair(spread.iloc[0])} and {pair(spread.iloc[1])} apart",
    )


def test_table_4_in_16_epochs():
    copies = set(rows("table4_short").run_id) & set(rows("table1_short").run_id)
    assert (len(copies), len(rows("table4_short"))) == (10, 23)
    found = where("table4_short").set_index(["p_k", "method"])[METRICS].unstack("p_k").swaplevel(axis=1)
    sorts = found.loc[["neuralsort", "softsort", "sinkhorn_sort", SPLITTER]]
    quarter, alone = "0.25 0 0 0 0.75", found[FIFTH].dropna()
    steps = [sorts[after] - sorts[before] for before, after in pairwise((HALF, quarter, "0.1 0 0 0 0.9", FIFTH))]
    rises = [(index, method) for index, step in enumerate(steps) for method in step.index[(step > 0).any(axis=1)]]
    assert rises == [(2, "softsort")]
    assert steps[2].test_top1["softsort"] < 0
    near = (sorts[EVEN] - sorts[quarter]).test_top1
    assert near.drop("softsort").abs().max() < 0.5
    for p_k in {*sorts.columns.unique(0)} - {ONE, FIFTH}:
        assert (sorts[p_k].idxmax() == SPLITTER).all()
    best, margin = alone.test_top1.nlargest(2), found.loc["smooth_hard_topk"]
    assert list(best.index) == ["smooth_hard_topk", "sinkhorn_sort"]
    softmax = found.loc[SOFTMAX, ONE]
    assert all((sorts[p_k].dropna() < softmax).all(axis=None) for p_k in sorts.columns.unique(0))
    stands(
        "docs/evidence/table4.md",
        "Ten of the 23 rows are copies",
        f"within .5 of top-1 for all but SoftSort ({short(near['softsort'])})",
        f"its `[.5, 0, 0, 0, .5]`, {pair(sorts[HALF].loc[SPLITTER], 2)}, comes closest to softmax cross-entropy, "
        f"{pair(softmax, 2)},",
        f"is the best, {pair(margin[FIFTH], 2)}, {best.iloc[0] - best.iloc[1]:.0f} points of top-1 before",
        f"its margin, {pair(margin[ONE], 2)}, is as good",
    )


@cache
def curves(name):
    path = RESULTS / f"{name}.csv"
    return epochs_figure.read(path, chosen_rows(path)).astype({"seed": int}).set_index(["method", "seed", "epoch"])


def after(end, method, seed=0, name="table1_epochs", kind="mean"):
    """The mean test accuracies of the five epochs that end there; kind "chosen": where validation was best so far."""
    return tuple(curves(name).loc[(method, seed, end), [f"{kind}_{metric}" for metric in METRICS]])


def test_the_published_schedule_so_far():
    ends = curves("table1_epochs").reset_index().groupby(["seed", "method"]).epoch.max().groupby("seed").min()
    last = ends.min()  # what all three have
    assert len(ends) == 3

    def leads(kind):
        reached = ((after(last, method, seed, kind=kind) for method in (SPLITTER, SOFTMAX)) for seed in ends.index)
        return pd.DataFrame([less(*each) for each in reached], columns=METRICS)

    at_end, chosen = leads("mean"), leads("chosen")
    stands("docs/evidence/verdict.md", f"after {last} epochs {signed(chosen)}, three | ")
    stands(
        "README.md",
        f"After {last} of the 200 epochs and three seeds the difference is {signed(chosen)}: ahead in top-5",
    )
    best = [
        where("table1_epochs", method=SOFTMAX, seed=seed).set_index("epoch").valid_top5[:last].idxmax()
        for seed in ends.index
    ]
    name = "table1_smoothing_epochs"
    latest = curves(name).index.get_level_values("epoch").max()
    smoothed, plain = ([after(end, SOFTMAX, name=each) for end in (25, latest)] for each in (name, "table1_epochs"))
    of_choice = after(latest, SOFTMAX, name=name, kind="chosen"), after(latest, SPLITTER, kind="chosen")
    assert smoothed[1][1] < smoothed[0][1]
    ahead = [less(smoothed[1], plain[1]), less(after(latest, SPLITTER), smoothed[1])]
    ahead = [pair(each).replace("-", "−") for each in ahead]
    claimed = less(*reversed(published_ends()))
    pairs_for = [
        next(number for number in range(2, 99) if half_width(std, number) <= of)
        for std, of in zip(chosen.std(), claimed)
    ]
    stands(
        "docs/evidence/table1.md",
        f"After {last} epochs of three seeds the network minus cross-entropy is {signed(at_end)} at the "
        f"end, and {signed(chosen)} where validation chooses",
        f"top-5 was best on validation in epochs {best[0]}, {best[1]} and {best[2]}",
        f"standard deviations of {pair(chosen.std(), 2)}",
        f"an interval of ± {pair([half_width(std, 2) for std in chosen.std()])} around their mean",
        f"{plus(claimed)} takes {pairs_for[0]} | {pairs_for[1]} pairs",
        f"seed 0, {latest} epochs so far) cross-entropy went from {pair(smoothed[0])} after 25 epochs to "
        f"{pair(smoothed[1])} after {latest}, without from {pair(plain[0])} to {pair(plain[1])}.",
        f"after {latest} epochs it has {ahead[0]} more than without, and the network minus that is {ahead[1]}:",
        f"Where validation chooses, it has {pair(of_choice[0])} and the network {pair(of_choice[1])}.",
    )


def test_the_pair_that_has_all_200_epochs():
    softmax, splitter = (where("table1", method=method, seed=2) for method in (SOFTMAX, SPLITTER))
    assert (len(softmax), len(splitter), softmax.n_epochs.item(), splitter.n_epochs.item()) == (1, 1, 200, 200)
    of_paper = published_ends()

    ours, theirs = plus(less(both(splitter), both(softmax))), plus(less(*reversed(of_paper)))
    ends = [[after(end, method, 2) for end in (73, 200)] for method in (SOFTMAX, SPLITTER)]
    moves = [f"from {pair(at_73)} to {pair(at_200)}" for at_73, at_200 in ends]
    right = where("table1_epochs", seed=2, epoch=200).set_index("method").train_top1
    of_16 = where("table1_short", method=SOFTMAX)[METRICS].agg(["mean", "std"]).T.to_numpy()
    of_16 = " | ".join(f"{mean:.2f} ± {short(std, 2)}" for mean, std in of_16)
    epochs = [" and ".join(str(each[f"{metric}_epoch"].item()) for metric in METRICS) for each in (softmax, splitter)]
    stands(
        "docs/evidence/table1.md",
        f"cross-entropy has {pair(both(softmax), 2)}, by epochs {epochs[0]}, and the splitter network "
        f"{pair(both(splitter), 2)}, by epochs {epochs[1]}; published, with two seeds, are {pair(of_paper[0], 2)} and "
        f"{pair(of_paper[1], 2)}. So the network is {ours} ahead, in the paper {theirs}; at the end, five epochs' "
        f"mean, {plus(less(ends[1][1], ends[0][1]), 1)}.",
        f"cross-entropy goes {moves[0]}, the network {moves[1]}. In epoch 200 cross-entropy was right on "
        f"{right[SOFTMAX]:.0f} % of the training images, as they are augmented, and the network on "
        f"{right[SPLITTER]:.0f} %",
        f"three seeds on an H100, cross-entropy has {of_16}",
    )
    stands("README.md", f"splitter selection minus cross-entropy is {ours}, in the paper {theirs}.")
    of_16 = in_16_epochs(SOFTMAX, ONE)
    assert max(map(abs, less(both(splitter), of_16))) < 0.2
    stands(
        "docs/evidence/verdict.md",
        f"paper: {theirs} for the same row; here {ours}, one pair;",
        f"Cross-entropy has {pair(of_16)} in 16",
    )


def test_what_is_not_a_setting_of_the_loss():
    """The first five epochs of a published row by other means, beside those of table1_epochs.csv."""
    columns, found = ["train_top1", *METRICS], {}
    by_row = {run: each.set_index("epoch")[columns] for run, each in where("implementation_epochs").groupby("run_id")}
    for seed in (0, 1):
        found["ours, bf16", seed] = (
            where("table1_epochs", seed=seed, method=SPLITTER).set_index("epoch")[columns].loc[:5]
        )
    for row in rows("implementation").itertuples():
        name = "the official package's loss" if row.implementation == "difftopk" else "ours"
        key = f"{name}{', mode sm' if row.top1_mode == 'sm' else ''}, {row.precision}", row.seed
        assert found.setdefault(key, by_row[row.run_id]).equals(by_row[row.run_id])  # seed 1 of ours ran twice
    names = list(dict.fromkeys(name for name, _ in found))
    assert len(found) == 2 * len(names) == 8
    for name in names:
        last = [found[name, seed].loc[5] for seed in (0, 1)]
        cells = " | ".join(f"{pair(each[columns[:1]])} | {pair(each[METRICS])}" for each in last)
        stands("docs/evidence/table1.md", f"| {name} | {cells} |")
    official, fp32, sm = (
        [found[name, seed] - found["ours, bf16", seed] for seed in (0, 1)]
        for name in ("the official package's loss, bf16", "ours, fp32", "ours, mode sm, bf16")
    )
    softmax = where("table1_epochs", method=SOFTMAX).set_index(["seed", "epoch"])[METRICS]
    swing = (softmax.loc[0].loc[1:16] - softmax.loc[1].loc[1:16]).abs().max()

    def ahead(of_seeds):
        return " and ".join(signed(each.loc[[5], METRICS]) for each in of_seeds)

    training = pd.concat([each.train_top1.abs() for each in official], keys=(0, 1))
    fourth = [found[name, 1].train_top1[4] for name in ("the official package's loss, bf16", "ours, bf16")]
    assert (training > 1).sum() == 2
    stands(
        "docs/evidence/table1.md",
        f"the official loss minus ours is {ahead(official)}; ours in fp32 minus that in bf16 {ahead(fp32)}.",
        f"two seeds lie up to {pair(swing)} apart in one of their first 16",
        f"in fp32 is within {max(each.train_top1.abs().max() for each in fp32):.1f} of",
        f"is within {training[training < 1].max():.1f} in eight; in the fourth of seed 1 it falls back to "
        f"{fourth[0]:.1f} where ours has {fourth[1]:.1f},",
        f"`sm` is {' and '.join(f'{-each.train_top1[5]:.1f}' for each in sm)} of training top-1 behind",
    )
    for of_seeds in (official, fp32):
        last = pd.concat([each.loc[[5], METRICS] for each in of_seeds])
        assert ((last.min() < 0) & (last.max() > 0)).all()


def test_the_verdict():
    softmax, alone = in_16_epochs(SOFTMAX, ONE), where("table1_short", p_k=FIFTH).groupby("method")
    strong = less(*(both(where("strong", method=method)) for method in (SOFTMAX, SPLITTER)))
    lost = [less(softmax, both(found)) for _, found in alone]
    stands(
        "docs/evidence/verdict.md",
        f"{signed(in_pairs((SPLITTER, EVEN), (SOFTMAX, ONE)))} | [three seeds]",
        f"the same: −{pair(strong).replace('| ', '| −')}",
        f"{min(lost)[0]:.0f} to {max(lost)[0]:.0f} by five, and no top-5",
    )
    assert (len(lost), min(top5 for _, top5 in lost) > 0) == (5, True)  # and no top-5 gained
    assert min(alone.test_top1.mean().to_dict().items(), key=lambda pair: -pair[1])[0] == "smooth_hard_topk"
    learned = pd.read_csv(RESULTS / "benchmarks" / "learned_temperature.csv")
    learned = learned[learned.p_k != FIFTH].set_index(["method", "p_k", "inverse_temperature"])[["top1", "top5"]]
    below = (learned.xs("learned", level=2) < learned.xs("auto", level=2)).groupby("method").all().all(axis=1)
    assert (below.sum(), len(below)) == (4, 5)
