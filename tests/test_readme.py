"""The Python of README.md and docs/ runs as it stands.

scripts/docs.sh runs the blocks that need a package of docs/requirements.txt.
"""

import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from experiments import finetune_imagenet
from experiments.common.rows import read_rows
from scripts import study
from scripts.pages import PART
from topk_losses import METHODS, __all__

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
ELSEWHERE = {"cleanlab", "ignite", "lightning", "skorch", "torchmetrics", "transformers"}  # of docs/requirements.txt
FENCE = re.compile(r"^```(\w*)$", re.MULTILINE)
NUMBER = re.compile(r"[-+]?\d+\.\d+")
CONTINUES = re.compile(r"^#.*\b(continued|continues|as above)\b", re.IGNORECASE)


class Block(NamedTuple):
    """A ```python block: its page, the line where its code begins, and the block that its first line continues."""

    page: Path
    line: int
    code: str
    before: "Block | None" = None
    printed: str = ""  # by the block itself, in a ```text block after it


def blocks(page: Path, text: str) -> list[Block]:
    """Every block of a page."""
    fences = list(FENCE.finditer(text))
    assert len(fences) % 2 == 0, f"{page}: a fence is left open"
    found: list[Block] = []
    for opening, closing in zip(fences[::2], fences[1::2]):
        if opening[1] == "python":
            code = text[opening.end() + 1 : closing.start()]
            before = found[-1] if found and CONTINUES.match(code) else None
            found.append(Block(page, text[: opening.end()].count("\n") + 2, code, before))
        elif opening[1] == "text" and found and "print(" in found[-1].code:
            found[-1] = found[-1]._replace(printed=text[opening.end() + 1 : closing.start()])
    return found


def after(block: Block) -> dict[str, object]:
    """The names that there are when a block has run: its own, and those of the blocks that it continues.

    A failure shows the line of the page.
    """
    namespace = after(block.before) if block.before else {}
    exec(compile("\n" * (block.line - 1) + block.code, str(block.page), "exec"), namespace)
    return namespace


def cases(chosen: Iterable[Block]) -> list:
    """The parameters of a test of blocks, with a mark where one needs packages of docs/requirements.txt."""
    found = []
    for block in chosen:
        name = f"{block.page.stem}-line{block.line}"
        packages = sorted(ELSEWHERE & imports(block))
        marks = [pytest.mark.docs(*packages)] if packages else []
        found.append(pytest.param(block, id=name, marks=marks))
    return found


def imports(block: Block) -> set[str]:
    """The packages that a block and those that it continues import."""
    found = set(re.findall(r"^(?:import|from) (\w+)", block.code, re.MULTILINE))
    if block.before:
        found |= imports(block.before)
    return found


BLOCKS = [block for page in PAGES for block in blocks(page, page.read_text(encoding="utf-8"))]
LAST = [block for block in BLOCKS if block not in {block.before for block in BLOCKS}]  # which run those before


@pytest.fixture(autouse=True)
def nothing_stays(tmp_path, monkeypatch):
    """What a snippet writes, it writes elsewhere; a method that it registers is gone afterwards."""
    monkeypatch.chdir(tmp_path)
    digits = load_digits()
    names = np.array([*"abcdefghij"])[digits.target]
    for ending, part in (("", slice(1000)), ("_checked", slice(1000, None))):
        np.save(f"X{ending}.npy", digits.data[part])  # what the guide on wrong labels asks its reader for
        np.save(f"y{ending}.npy", names[part])
    torch.manual_seed(0)
    before = {*METHODS}
    yield
    for name in {*METHODS} - before:
        del METHODS[name]


def test_there_are_blocks():
    assert {"README.md", "integrations.md", "extending.md"} <= {block.page.name for block in BLOCKS}


@pytest.mark.filterwarnings("ignore")  # those of other packages are theirs
@pytest.mark.parametrize("block", cases(LAST))
def test_a_block_runs_computes_no_nan_and_prints_what_the_page_shows(block, capsys):
    names = after(block)
    printed = capsys.readouterr().out
    if block.printed:  # accuracies in percent, which differ a little between processors
        printed = "".join(printed.splitlines(keepends=True)[-block.printed.count("\n") :])  # without earlier blocks'
        assert NUMBER.sub("#", printed) == NUMBER.sub("#", block.printed)
        shown = [float(number) for number in NUMBER.findall(block.printed)]
        assert [float(number) for number in NUMBER.findall(printed)] == pytest.approx(shown, abs=3)
    tensors = [value for value in names.values() if isinstance(value, torch.Tensor)]
    tensors += [value.grad for value in tensors if value.is_leaf and value.grad is not None]
    assert not any(value.isnan().any() for value in tensors)


def test_the_loss_of_the_readme_falls_along_its_gradient():
    (block,) = (block for block in BLOCKS if block.page.name == "README.md")
    names = after(block)
    loss, logits, labels = (names[name] for name in ("loss", "logits", "labels"))
    own = logits.grad.gather(1, labels.unsqueeze(1))
    assert (own < 0).all()  # each true class is pulled up
    assert logits.grad.sum(1).abs().max() < 1e-6  # by as much as others are pushed down
    assert names["loss_fn"](logits - logits.grad, labels) < loss
    right = 20 * torch.nn.functional.one_hot(labels, logits.shape[1])
    assert names["loss_fn"](logits + right, labels) < loss / 3


def test_the_tutorial_ends_as_its_text_says():
    accuracy = after([block for block in BLOCKS if block.page.stem == "tutorial"][-1])["accuracy"]
    cross_entropy, both, alone = (values[0] for values in accuracy.values())
    assert min(cross_entropy, both) > alone + 5  # points of top-1
    assert cross_entropy > both - 1
    assert Path("top_k_accuracy.svg").stat().st_size > 5000


def test_the_guide_goes_from_arrays_to_the_study_of_their_file(capsys):
    guide = ROOT / "docs/guides/wrong-labels.md"
    after([block for block in BLOCKS if block.page == guide][-1])
    (command,) = re.findall(r"^```shell\n(.*?)^```$", guide.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    script, *words = shlex.split(command)
    assert 'exec .venv/bin/python scripts/study.py own_features "$@"' in (ROOT / script).read_text(encoding="utf-8")
    assert study.main(["own_features", *words, "--dry-run"]) == 0
    first, *others = [line for line in capsys.readouterr().out.splitlines() if line.startswith(".venv/bin/python")]
    assert len(others) == 6 * 3 - 1  # six losses, three numbers of epochs
    assert (
        finetune_imagenet.main([*shlex.split(first)[2:], "--n_epochs", "1", "--device", "cpu", "--threads", "1"]) == 0
    )
    runs = read_rows(Path("results/own_features/own_trials.csv"))
    assert {(run["num_classes"], run["train_images"], run["valid_images"], run["test_images"]) for run in runs} == {
        ("10", "800", "200", "797")  # the names of the classes became numbers from 0
    }


@pytest.mark.docs("transformers")
def test_a_trainer_with_accumulated_micro_batches_takes_the_step_of_the_whole_batch(tmp_path):
    """The loss function of docs/integrations.md, in Hugging Face's Trainer."""
    from transformers import Trainer, TrainingArguments, set_seed

    (block,) = [block for block in BLOCKS if "num_items_in_batch" in block.code]
    names = after(block)
    weights = []
    for size, micro_batches in ((8, 1), (3, 3)):  # 3 + 3 + 2 images
        set_seed(0)
        model = type(names["model"])(names["config"])
        settings = TrainingArguments(
            output_dir=str(tmp_path), max_steps=1, per_device_train_batch_size=size, optim="sgd", max_grad_norm=0.0,
            gradient_accumulation_steps=micro_batches, use_cpu=True, save_strategy="no", report_to=[],
            learning_rate=1.0,
        )  # fmt: skip
        data = names["images"][:8]
        Trainer(model, settings, train_dataset=data, compute_loss_func=names["top_k_loss"]).train()
        weights.append(model.classifier.weight.detach())
    torch.testing.assert_close(*weights, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_no_paragraph_stands_twice(page):
    typed = PART.sub("", page.read_text(encoding="utf-8"))
    paragraphs = [" ".join(part.split()) for part in typed.split("\n\n")]
    long = [text for text in paragraphs if len(text) > 80]
    assert sorted({text for text in long if long.count(text) > 1}) == []


def test_the_api_page_has_every_export():
    text = (ROOT / "docs/api.md").read_text(encoding="utf-8")
    assert [name for name in __all__ if f"`{name}`" not in text and f"topk_losses.{name}\n" not in text] == []
