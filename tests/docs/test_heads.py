"""What the pages say of heads on stored features is what their rows say."""

import math

import pandas as pd
import pytest
import torch

from scripts.heads import LEVEL
from scripts.reporting.runs import half_width, mean_std
from tests.docs.claims import (
    FIFTH,
    METRICS,
    SOFTMAX,
    SPLITTER,
    both,
    less,
    pair,
    rows,
    short,
    signed,
    span,
    stands,
    where,
    written,
)
from topk_losses import METHODS, ForwardCorrectionLoss, TopKCrossEntropyLoss
from topk_losses.methods import SINGLE_K


def gains_of_heads(name):
    """Of each method minus cross-entropy, by ten seeds: means, half intervals, and both as pages write them."""
    runs = where(name).set_index(["method", "seed"])[METRICS]
    gains = runs.drop(index=SOFTMAX, level="method").sub(runs.loc[SOFTMAX], level="seed").dropna().groupby("method")
    assert set(gains.size()) == {10}
    assert len(gains) == runs.index.unique("method").size - 1
    trials = where(f"{name}_trials")
    for method, found in where(name).groupby("method"):
        best = trials.loc[trials[trials.method == method].valid.idxmax()]
        assert {(best.lr, best.n_epochs)} == set(zip(found.lr, found.n_epochs))
    means, halves = gains.mean(), half_width(gains.std(), 10)
    return means, halves, {method: written(found) for method, found in gains}


def test_heads_with_wrong_labels():
    means, halves, told = gains_of_heads("heads_noise_.2")
    gains = {method: " | ".join(each if each[0] == "−" else f"+{each}" for each in of) for method, of in told.items()}
    _, _, of_all = gains_of_heads("heads_noise_.2_of_100")
    assert (means.loc[["lapsum", SPLITTER]] > halves.loc[["lapsum", SPLITTER]]).all(axis=None)
    lost = [
        pair(less(both(where("heads", method=method)), both(where(name, method=method))))
        for name in ("heads_noise_.2", "heads_noise_.2_of_100")
        for method in (SOFTMAX, "lapsum")
    ]
    counts, again = (rows(f"heads_noise_.2{of}_trials").groupby("method").size() for of in ("", "_of_100"))
    assert counts.drop("smooth_topk").equals(again)
    assert counts["lapsum"] == counts[SPLITTER]
    stands(
        "docs/evidence/heads.md",
        f"`lapsum` gains {gains['lapsum']}, the splitter network {gains[SPLITTER]}",
        f"`smooth_topk`, k = 5 alone: {' | '.join(told['smooth_topk'])}. `ldr_kl`: {' | '.join(told['ldr_kl'])}",
        f"cost cross-entropy {lost[0]}, `lapsum` {lost[1]}",
        f"Cross-entropy has {counts[SOFTMAX]} trials here, `ldr_kl` {counts['ldr_kl']}, `smooth_topk` "
        f"{counts['smooth_topk']}, the other two {counts['lapsum']}",
        f"gains +{' | +'.join(of_all['lapsum'])}, `ldr_kl` +{' | +'.join(of_all['ldr_kl'])}, the splitter network "
        f"+{' | +'.join(of_all[SPLITTER])}",
        f"cost cross-entropy {lost[2]} here, `lapsum` {lost[3]}",
        f"Trials: cross-entropy {counts[SOFTMAX]}, `ldr_kl` {counts['ldr_kl']}, `lapsum` and the splitter network "
        f"{counts['lapsum']}.",
    )


def test_heads_with_30_trials_more_of_each_method():
    names = clean, blocks, every = "heads", "heads_noise_.2", "heads_noise_.2_of_100"
    settings = ["p_k", "m", "inverse_temperature", "label_smoothing", "weight_decay", "margin", "lr"]
    arms, gains, best = (SPLITTER, "lapsum", "without", "ldr_kl"), {}, {}
    for name in names:
        trials, finals = (
            found.assign(arm=found.method.where(found.inverse_temperature != LEVEL, "without"))
            for found in (
                where(f"{name}_{of}").fillna(dict.fromkeys(settings[1:], 0)) for of in ("more_trials", "more")
            )
        )
        assert set(trials.n_epochs) == {22}
        assert trials.groupby("arm").size().to_dict() == dict.fromkeys((SOFTMAX, *arms), 30)
        best[name] = trials.loc[trials.groupby("arm").valid.idxmax()].set_index("arm")[settings]
        assert (finals.set_index("arm")[settings] == best[name].loc[finals.arm]).all(axis=None)
        runs = finals.set_index(["arm", "seed"])[METRICS].unstack("arm").swaplevel(axis=1)
        assert len(runs) == 10
        gains[name] = {arm: runs[arm] - runs[SOFTMAX] for arm in arms}
        stands("docs/evidence/heads.md", f"| {' | '.join(signed(gains[name][arm]) for arm in arms)} |")
        if name == clean:
            decay = written(runs[SOFTMAX] - where("heads", method=SOFTMAX).set_index("seed")[METRICS])
    assert best[clean].loc[SOFTMAX, ["label_smoothing", "weight_decay"]].tolist() == [0, 1]
    assert best[clean].loc["ldr_kl", ["inverse_temperature", "weight_decay"]].tolist() == [1, 1]
    assert [best[name].loc["without", "p_k"].split()[0] for name in names] == ["0.95", "0.8", "0.8"]
    shares = {name: best[name].inverse_temperature[[SPLITTER, "lapsum"]] / [1, 0.25] for name in names}
    assert (max(map(max, (shares[blocks], shares[every]))), set(shares[clean])) == (1 / 4, {1, 1 / 4})
    assert min(map(min, (shares[blocks], shares[every]))) == 1 / 16
    assert shares[blocks][SPLITTER] == shares[every][SPLITTER] == 1 / 8
    order = {
        (name, arm): signed(gains[name][arm] - gains[name]["without"])
        for name in (blocks, every)
        for arm in (SPLITTER, "lapsum")
    }
    stands(
        "docs/evidence/heads.md",
        f"gains {' | '.join(decay)} on the one above",
        f"is {' | '.join(written(gains[clean]['ldr_kl']))} before",
        f"minus forward correction is {order[blocks, SPLITTER]} within blocks and {order[every, SPLITTER]} among "
        f"all; `lapsum` minus forward correction is {order[blocks, 'lapsum']} and {order[every, 'lapsum']}.",
    )
    wrong = {arm: " and ".join(signed(gains[name][arm]) for name in (blocks, every)) for arm in arms}
    stands(
        "docs/evidence/verdict.md",
        f"with 30 trials more each +{written(gains[clean]['ldr_kl'])[0]}",
        f"decay of 1: {decay[0]} of top-1",
        f"`lapsum` {signed(gains[clean]['lapsum'])}, the splitter network {signed(gains[clean][SPLITTER])}",
        f"splitter network {wrong[SPLITTER]}; `lapsum` {wrong['lapsum']} |",
        f"| {wrong['without']} | the same | most of it is not: the splitter network minus forward correction is "
        f"{order[blocks, SPLITTER]} and {order[every, SPLITTER]} |",
    )


def test_lapsum_between_level_scores_is_forward_correction_up_to_a_constant():
    logits = 5 * torch.randn(64, 100, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(64)
    bounded = -(0.8 * logits.softmax(1)[labels, labels] + 0.01).log().mean()
    loss = TopKCrossEntropyLoss("lapsum", p_k={1: 0.8, 5: 0.2}, m=100, inverse_temperature=LEVEL)(logits, labels)
    assert loss.item() == pytest.approx(bounded.item(), rel=0.01)
    corrected = ForwardCorrectionLoss(noise_rate=5 / 9)(logits, labels) - math.log(0.8 * 9 / 4)
    assert corrected.item() == pytest.approx(bounded.item(), rel=1e-5)


def test_heads_on_pretrained_features():
    means, halves, told = gains_of_heads("heads")
    of_one_k = [method for method in means.index if method in SINGLE_K]
    topk = means.drop([*of_one_k, "ldr_kl", "odd_even"])
    assert (means.loc["odd_even"].abs() < 0.005).all()  # its part has no gradient: it is cross-entropy
    of_odd_even = where("heads_trials", method="odd_even", m=100, p_k=FIFTH)
    stands("docs/evidence/heads.md", f"alone on k = 5 it stays at {short(of_odd_even.test_top1.max())} %")
    several, alone, lost = len(topk), len(of_one_k), f"{span(-means.test_top1[of_one_k], 1)} points of top-1"
    robust = {method for method, spec in METHODS.items() if spec.family == "robust"}
    assert {*METHODS} - {*where("heads").method} == {"imbalanced_noised_topk", *robust}
    assert (topk.test_top1 + halves.test_top1[topk.index] < 0).all()
    ahead = topk.index[topk.test_top5 > halves.test_top5[topk.index]].drop("lapsum")
    assert means.test_top5["ldr_kl"] < halves.test_top5["ldr_kl"]
    assert set(means.test_top5[ahead].round(1)) == {0.1}
    (least, most), (lowest, highest) = ([found.idxmax(), found.idxmin()] for found in (topk.test_top1, -topk.test_top5))
    stands(
        "docs/evidence/heads.md",
        f"the {several} top-k losses with part of",
        f"by {told[least][0][1:]} (`{least}`) to {told[most][0][1:]} (`{most}`)",
        f"`lapsum` is ahead by {told['lapsum'][1]}, {', '.join(f'`{each}`' for each in ahead)} by .1",
        f"with {several} comparisons",
        f"gains {told['ldr_kl'][0]} of top-1",
        f"The {alone} losses of k = 5 alone",
        f"cost {lost}",
    )
    assert alone == 4
    stands("docs/evidence/verdict.md", f"| {lost} lost by four losses, ")
    stands("README.md", f"cross-entropy was ahead of {several + alone} top-k losses in top-1")
    assert (means.test_top5[of_one_k] < 0).all()
    least_rates = set(where("heads", lr=0.0005).method)
    assert SOFTMAX in least_rates
    stands(
        "docs/evidence/heads.md",
        f"cross-entropy and of {len(least_rates & set(topk.index))} top-k losses are the smallest",
    )
    stands(
        "docs/evidence/verdict.md",
        f"+{told['ldr_kl'][0]} | +{told['ldr_kl'][1]}",
        f"{several} of them: {told[least][0]} to {told[most][0]} | {told[lowest][1]} to +{told[highest][1]}",
        f"`smooth_topk`: {' | '.join(told['smooth_topk'])} | ten seeds; {alone} losses",
    )
    assert round(means.test_top1["ldr_kl"], 1) == 0.3
    assert round(means.test_top5["lapsum"], 1) == 0.1  # of verdict.md
    assert set(where("heads").n_epochs) == {22}
    trials = where("heads_trials")
    plain = trials[(trials.method == SOFTMAX) & (trials.n_epochs == 5)].fillna(
        {"label_smoothing": 0, "weight_decay": 0}
    )
    assert plain.loc[plain.valid.idxmax(), ["label_smoothing", "weight_decay"]].tolist() == [0, 0]
    counts = trials.groupby("method").size()
    stands(
        "docs/evidence/heads.md",
        f"up to {counts.max()} trials, cross-entropy {counts[SOFTMAX]}, `ldr_kl` {counts['ldr_kl']}",
    )


def test_heads_on_the_repositorys_own_features():
    others, no_decay = ("lapsum", SPLITTER, "ldr_kl"), {"weight_decay": 0.0}
    trials, finals = where("heads_resnet18_trials").fillna(no_decay), where("heads_resnet18").fillna(no_decay)
    runs = finals.set_index(["method", "weight_decay", "seed"])[METRICS].sort_index()
    assert (finals.groupby(["method", "weight_decay"]).size() == 10).all()
    best = trials.loc[trials.groupby("method").valid.idxmax()].set_index("method").weight_decay
    late = (trials.n_epochs == 22) & (trials.weight_decay > 0)
    for method, decays in trials[late].groupby("method").weight_decay:  # the same for each
        assert set(decays) == {0.1, 1, 10}, method

    base, most = runs.loc[SOFTMAX, best[SOFTMAX]], []
    for method in others:
        gains = runs.loc[method, best[method]] - base
        halves = half_width(gains.std(), len(gains))
        assert (gains.mean().abs() < halves).all()
        most.append(gains.mean() + halves)
        stands("docs/evidence/verdict.md", f"`{method}`: {signed(gains)}")
    most = pair(pd.DataFrame(most).max(), 2)
    stands("docs/evidence/verdict.md", f"gains up to {most} are not excluded")
    before = [" | ".join(written(runs.loc[name, 0] - runs.loc[SOFTMAX, 0.1])) for name in others]
    apart = " | ".join(written(base - runs.loc[SOFTMAX, 0.1]))
    network, counts = where("table1_epochs", method=SOFTMAX, seed=1, epoch=16), trials.groupby("method").size()
    stands(
        "docs/evidence/heads.md",
        f"row ({pair(both(network))} on test)",
        f"none gains more than {most.replace(' | ', ' of top-1 or ')} of top-5",
        f"put `lapsum` without it {before[0]} and the splitter network {before[1]} before a",
        f"two cross-entropies are {apart} apart",
        f"cross-entropy {counts[SOFTMAX]}, `lapsum` and the splitter network {counts['lapsum']}, "
        f"`ldr_kl` {counts['ldr_kl']}",
        f"are {pair(less(base.mean(), both(network)))} above its own last layer",
    )
    assert counts["lapsum"] == counts[SPLITTER]


def test_the_schedule_of_heads_that_suits_cross_entropy():
    few, every = where("own_images", limit_train=2000, batch_size=95), where("own_images", limit_train=None)
    published = where("own_images", limit_train=2000, n_epochs=20)
    stands(
        "docs/own-images.md",
        *(mean_std(list(each.test_top1)) for each in (few, published, every)),
        f"the first row has {few.last_test_top1.mean():.2f}, the accuracy where validation was best is "
        f"{(few.test_top1 - few.last_test_top1).mean():.1f} higher",
    )
    heads = both(where("temperature", method=SOFTMAX))
    stands("docs/findings/temperature-study.md", pair(heads, 2), pair(both(every), 2))
