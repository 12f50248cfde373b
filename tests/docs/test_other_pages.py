"""Neighbours, beam search, benchmarks, README and the API page: what they say is what rows and code say."""

import inspect
import re
from functools import partial

import pytest
import torch

import topk_losses
from tests.docs.claims import METRICS, ROOT, SOFTMAX, SPLITTER, page, rows, short, span, stands, where
from topk_losses import (
    ForwardCorrectionLoss,
    GeneralizedCrossEntropyLoss,
    LDRKLLoss,
    NCEAndRCELoss,
    NoisedTopKLoss,
    PHuberCrossEntropyLoss,
    SmoothHardTopKLoss,
    SmoothTopKLoss,
    SymmetricCrossEntropyLoss,
    TopKCrossEntropyLoss,
    TruncatedEntropyLoss,
)

LOSSES = (TopKCrossEntropyLoss, SmoothTopKLoss, SmoothHardTopKLoss, TruncatedEntropyLoss, NoisedTopKLoss, LDRKLLoss)
ROBUST = (ForwardCorrectionLoss, GeneralizedCrossEntropyLoss, SymmetricCrossEntropyLoss, NCEAndRCELoss)


def test_odd_even_lets_nothing_of_the_true_class_through_100_layers():
    logits = 3 * torch.randn(8, 120, generator=torch.Generator().manual_seed(0))
    labels = logits.argmax(1)
    logits[range(8), labels] += 3
    logits.requires_grad_()
    losses = [TopKCrossEntropyLoss("odd_even", p_k=5, m=m)(logits, labels) for m in (16, 100)]
    (gradient,) = torch.autograd.grad(losses[1], logits)
    assert gradient.abs().max() < 1e-6
    assert losses[0] < 3
    stands("docs/methods/networks.md", f"at its ceiling, {losses[1]:.1f} =")


def test_nearest_neighbours():
    means = where("knn", dataset=None).fillna({"sorted": False})
    means = means.groupby(["method", "sorted", "prediction", "loss"], dropna=False)[["test_top1", "valid_top1"]].mean()
    loss = means.test_top1.unstack("loss")
    gains = (loss["log_mass"] - loss["mass"]).dropna()
    gaps = means.valid_top1 - means.test_top1
    assert (sum(gains > 0), len(gains)) == (9, 16)
    digits = where("knn", dataset="digits")
    worst = digits[digits.method == "perturbed_topk"].last_test_top1
    for name, label in (("mnist", "MNIST"), ("fashion_mnist", "Fashion-MNIST"), ("cifar10", "CIFAR-10")):
        paper = where(f"paper/knn_{name}").set_index("method").test_top1
        cells = [f"{paper[each]:.1f}" if each in paper else "" for each in ("neuralsort", "soft_topk", SOFTMAX)]
        stands("docs/knn.md", re.sub(" +", " ", f"| {label} | {' | '.join(cells)} | not run |"))
    stands(
        "docs/knn.md",
        f"up to {short(gains.max())} points above `mass` for nine of sixteen",
        f"is {gaps.min():.0f} to {gaps.max():.0f} points above test",
        f"{digits.train_images[0]:,} images train, {digits.test_images[0]} test",
        f"is {short(100 / digits.test_images[0], 2)} points:",
        f"({worst.min():.0f} to {worst.max():.0f} % at the end)",
    )


def test_beam_search():
    means = where("beam_search").groupby(["arm", "method"]).mean(numeric_only=True)
    errors, seconds = means.last_valid_wer, means.train_seconds / means.train_seconds["cross_entropy", SOFTMAX]
    assert {round(2 * gain) for gain in (means.test_wer_beam1 - means.test_wer_beam4)} == {1}
    stands(
        "docs/beam_search.md",
        f"{errors['cross_entropy', SOFTMAX]:.1f} % by cross-entropy, {errors['retain', 'softsort']:.1f} % by `retain`, "
        f"{errors['soft_beam', 'softsort']:.1f} % by `soft_beam` with `softsort` and "
        f"{errors['soft_beam', 'soft_topk']:.1f} % with `soft_topk`",
        f"an update of an arm {seconds['retain', 'softsort']:.0f} (`retain`, `softsort`) to "
        f"{seconds['soft_beam', 'soft_topk']:.0f} times (`soft_topk`) as long",
    )


def test_the_times_of_the_benchmarks():
    readme, networks = partial(stands, "benchmarks/README.md"), ("odd_even", "bitonic", SPLITTER)
    machine = rows("benchmarks/machine").set_index("quantity").value
    small = where("benchmarks/losses", batch=128, n=100).set_index("method").ms
    for method in networks:
        count = re.search(rf"\| {method} \| ([\d,]+) \|", page("benchmarks/README.md"))[1]
        visits = 128 * int(count.replace(",", ""))
        moving, exponentials = 24 * visits / machine["copy within the cache"], visits / machine["exponentials"]
        readme(f"| {method} | {count} | {moving / 1e6:.2g} ms | {exponentials / 1e6:.2g} ms | {small[method]:.3g} ms |")
    step, kernel, torch_alone = (
        rows(f"benchmarks/training_step{name}").set_index("method") for name in ("", "_h100", "_h100_torch")
    )
    slow = step.over_softmax[step.over_softmax > 1.05]
    assert list(slow.index) == ["sinkhorn_sort"]
    for method in networks:
        before, now = torch_alone.loc[method], kernel.loc[method]
        readme(
            f"| {method} | {before.ms_per_step:.1f} | {before.over_softmax:.2f} | {now.ms_per_step:.2f} | "
            f"{now.over_softmax:.2f} |"
        )
    of_h100, iterated = torch_alone.over_softmax, ("sinkhorn_sort", "soft_topk", "lml", "perturbed_topk", "subset_topk")
    readme(
        f"row but `sinkhorn_sort` ({slow.iloc[0]:.2f})",
        f"The augmentation takes {step.ms_per_step['augmentation']:g} ms",
        f"{torch_alone.ms_per_step[SOFTMAX]:.1f} ms for the softmax row",
        ", ".join(f"`{name}` {of_h100[name]:.1f}" for name in iterated) + " times softmax",
    )
    stands(
        "docs/speed.md",
        f"from {of_h100[SPLITTER]:.1f} to {kernel.over_softmax[SPLITTER]:.2f} times softmax",
        f"`odd_even` from {of_h100['odd_even']:.0f} to {kernel.over_softmax['odd_even']:.2f})",
    )

    steps = where("benchmarks/finetuning", heads=1).groupby("n").ms.agg(["min", "max"])
    stands(
        "docs/evidence/verdict.md",
        f"49,000 steps of {steps['min'][1000]:.0f} to {steps['max'][1000]:.0f} ms",
        f"880,000 steps of {span(steps.loc[10450] / 1000)} s",
    )

    def of(column, batch, n, m=None, file="losses"):
        return where(f"benchmarks/{file}", batch=batch, n=n, m=m).set_index("method")[column]

    many, kept = of("official_over_ours", 128, 1000), of("official_over_ours", 500, 1000, 16)[[*networks]]
    wide, memory = of("ours_over_cross_entropy", 500, 10450, file="losses_scripts"), of("peak_mib", 128, 10450)
    of_masks = ("capped_softmax", "lapsum", "sparse_topk", "lml", "subset_topk")
    readme(
        f"NeuralSort takes {many['neuralsort']:.0f} and its SoftSort {many['softsort']:,.0f} times",
        f"that of the networks is {kept.min():.0f} to {kept.max():.0f}:",
        f"recall_surrogate takes {wide['recall_surrogate']:.1f} times cross-entropy, "
        + ", ".join(f"{name} {wide[name]:.1f}" for name in of_masks),
        f"splitter_selection {memory[SPLITTER]:.1f} MiB (at most 200 were asked for), softsort "
        f"{memory['softsort']:.1f}, smooth_topk {memory['smooth_topk']:.1f};",
    )


def test_rows_without_a_commit_are_counted():
    for name, file, commit in (("knn", "knn", "ca715aee"), ("beam_search", "beam_search_short", "7028b2af")):
        count = sum(rows(file).git_commit.str.startswith(commit))
        stands(f"docs/{name}.md", f"{count} of the {len(rows(file))} rows")


def test_the_results_table_of_the_readme():
    found = where("table1_short").groupby(["method", "p_k"])[METRICS].agg(["mean", "std", "count"])
    text = page("README.md").replace("\\|", "|")
    published = rows("paper/table1")
    for (method, p_k), row in found.iterrows():
        assert row["test_top1", "count"] == 3
        paper = published[(published.method == method) & (published.p_k == p_k)].iloc[0]
        ours = " | ".join(f"{row[column, 'mean']:.2f} ± {short(row[column, 'std'], 2)}" for column in METRICS)
        line = f"| {100 * paper.test_top1:.2f} | {100 * paper.test_top5:.2f} | {ours} |"
        assert line in text
        if method in (SOFTMAX, SPLITTER):
            stands("docs/index.md", line)


def test_the_speed_table_of_the_readme():
    table = rows("benchmarks/losses").fillna({"m": 0})
    text = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Speed")[2].partition("## ")[0]
    labels = {"NeuralSort": "neuralsort", "SoftSort": "softsort", "splitter selection": SPLITTER}
    lines = re.findall(
        r"^\| ([\w ]+) \| (\d+), ([\d,]+), (\w+) \| (\S+) ms \| (\S+) ms \| (\d+) \| (\S+) \|$", text, re.MULTILINE
    )
    assert len(lines) == 5
    of_row = table.set_index(["method", "batch", "n", "m"])
    for label, batch, n, m, *shown in lines:
        row = of_row.loc[labels[label], int(batch), int(n.replace(",", "")), 0 if m == "all" else int(m)]
        values = row[["ms", "official_ms", "official_over_ours", "ours_over_cross_entropy"]]
        assert [float(cell) for cell in shown] == pytest.approx(values.tolist(), rel=0.02)
    assert set(table.device) == {"AMD EPYC"}
    here, h100 = (
        rows(f"benchmarks/{name}").set_index("method").over_softmax[SPLITTER]
        for name in ("training_step", "training_step_h100")
    )
    stands(
        "README.md",
        f"the ratio is {table.official_over_ours.min():.1f} to {table.official_over_ours.max():,.0f} over",
        f"{here:.3f} times cross-entropy's there with splitter selection, and {h100:.2f} times on an H100",
    )


def test_the_picture_of_the_readme():
    """docs/figures/one_sample.svg shows what permutation_figure.relaxed_sort gives for splitter_selection."""
    from scripts.reporting import permutation_figure

    matrix, weights, p = permutation_figure.relaxed_sort(SPLITTER, permutation_figure.SCORES, permutation_figure.P_K)
    true = permutation_figure.TRUE
    first, second = (short(value, 2) for value in matrix[:2, true].tolist())
    assert weights.tolist() == [1, 0.5, 0, 0]
    stands("README.md", f"p = {first} · 1 + {second} · .5 = {short(p[true].item(), 2)}, and")
    shown = re.findall(r"<!-- (\S+) -->", (ROOT / "docs/figures/one_sample.svg").read_text(encoding="utf-8"))
    assert {short(value, 2) for value in matrix.flatten().tolist()} <= set(shown)


def test_the_api_page_has_every_argument_and_its_default():
    text = (ROOT / "docs/api.md").read_text(encoding="utf-8")
    listed = set()
    for names, defaults, of in re.findall(r"^\| (`\w+`.*?) \| (.+?) \| (.+?) \|", text, re.MULTILINE):
        for name, default in zip(re.findall(r"`(\w+)`", names), re.findall(r"`(.+?)`", defaults) or ["no default"]):
            listed.add((name, default.replace('"', "'"), of))
    for loss in (*LOSSES, *ROBUST, PHuberCrossEntropyLoss):
        for name, parameter in inspect.signature(loss).parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:  # those of every loss
                continue
            default = "no default" if parameter.default is parameter.empty else repr(parameter.default)
            ofs = [of for one, value, of in listed if (one, value) == (name, default)]
            assert any(loss.__name__ in of or of in ("every loss", "losses of one k") for of in ofs), (
                loss,
                name,
                default,
            )


def test_the_api_page_has_every_export():
    pattern = r"^::: topk_losses\.(\w+)$|^\| `([A-Z\d_]+)` \|"
    shown = set(re.findall(pattern, (ROOT / "docs/api.md").read_text(encoding="utf-8"), re.MULTILINE))
    assert {"".join(names) for names in shown} >= {*topk_losses.__all__}
