"""Killed at any file that it writes, a command that is given again ends with the bits of one that nobody disturbed."""

import shlex
import signal

import pytest

from experiments import extract_embeddings, finetune_imagenet, train_beam_search, train_cifar100, train_knn
from tests.experiments import scripts
from tests.experiments.forks import fork
from tests.experiments.scripts import MACHINE, SCRIPTS, name_of, outcome
from topk_losses import METHODS
from topk_losses.temperature import MOST

EXTRACT = "--dataset digits --backbone test_resnet --weights none --resolution 32 --shard_rows 300 --workers 0"
# Commands that, with those of SCRIPTS, have every part of a state: what a checkpoint must restore.
CIFAR = "--dataset digits --limit_train 60 --batch_size 16 --n_epochs 3"
HEADS = "-d EMBEDDINGS --batch_size 25 --n_epochs 2 --eval_freq 2 --lr .01"
KNN = "--dataset digits --limit_train 80 --batch_size 20 --num_candidates 20 --n_epochs 3 --model linear --k 3"
BEAM = (
    "--dataset reversal --max_letters 3 --hidden_dim 8 --batch_size 16 --beam_size 3 --pretrain_updates 2 "
    "--n_updates 3 --eval_freq 1"
)
STATES = {
    **{name_of(script): (script, flags) for script, flags in SCRIPTS.items()},
    "images_auto": (
        train_cifar100,
        f"{CIFAR} --lr 3 --method softsort --inverse_temperature auto --label_noise .5 --precision bf16",
    ),
    "images_schedule": (
        train_cifar100,
        f"{CIFAR} --method imbalanced_noised_topk --inverse_temperature .5:2 --weight_decay .1 --eval_freq 2",
    ),
    "heads_auto": (
        finetune_imagenet,
        f"{HEADS} --lr 1 --method lapsum --inverse_temperature auto --mixup .5 --hidden_dims 5 --apply_dropout",
    ),
    "heads_schedule": (finetune_imagenet, f"{HEADS} --method softsort --stream --inverse_temperature 2:.5"),
    "neighbours_auto": (train_knn, f"{KNN} --method softsort --inverse_temperature auto"),
    "neighbours_schedule": (
        train_knn,
        f"{KNN} --method neuralsort --inverse_temperature .05:.5 --loss log_mass",
    ),
    "neighbours_network": (
        train_knn,
        f"{KNN.replace('--num_candidates 20 ', '')} --method softmax_cross_entropy --prediction network",
    ),
    "soft_beam": (train_beam_search, f"{BEAM} --arm soft_beam --method softsort"),
    "control": (train_beam_search, f"{BEAM} --arm cross_entropy --method softmax_cross_entropy"),
}


def killed_at_each_file(script, words: list[str]) -> int:
    """Kill a command at the first file that it writes, then at the second, and so on; return how often."""
    number = 0
    status = fork(script, words, killed_at=0)
    while status == -signal.SIGKILL:
        number += 1
        status = fork(script, words, killed_at=number)
    assert status == 0
    return number


@pytest.mark.parametrize("state", STATES)
def test_training(state, tmp_path, monkeypatch):
    script, flags = STATES[state]
    monkeypatch.setattr(train_cifar100, "resnet_cifar", scripts.small_network)
    monkeypatch.setenv("TOPK_LOSSES_BACKEND", "torch")  # kernels would take longer to compile
    flags = flags.replace("EMBEDDINGS", str(scripts.embeddings(tmp_path / "e.pt")))
    words = [*shlex.split(flags), *MACHINE.split()]
    whole, killed = (tmp_path / name for name in ("whole", "killed"))
    assert script.main([*words, "--results", str(whole / "r.csv")]) == 0
    assert killed_at_each_file(script, [*words, "--results", str(killed / "r.csv")]) > 3
    assert outcome(killed / "r.csv") == outcome(whole / "r.csv")
    assert max(int(row["times_resumed"]) for row in scripts.rows_of(killed / "r.csv")) > 0
    if state.endswith("_auto"):  # at its bound it would be the same without what a checkpoint restores
        (row,) = scripts.rows_of(killed / "r.csv")
        assert float(row["last_inverse_temperature"]) < MOST * METHODS[row["method"]].inverse_temperature
    found, expected = ({path.relative_to(folder) for path in folder.rglob("*")} for folder in (killed, whole))
    assert found == expected


def test_extraction(tmp_path):
    words = [*EXTRACT.split(), "--device", "cpu", "--threads", "1"]
    whole = tmp_path / "w"
    killed = tmp_path / "k"
    assert extract_embeddings.main([*words, "--output", str(whole / "e.pt")]) == 0
    assert killed_at_each_file(extract_embeddings, [*words, "--output", str(killed / "e.pt")]) > 3
    assert (killed / "e.pt").read_bytes() == (whole / "e.pt").read_bytes()
    assert [path.name for path in killed.iterdir()] == ["e.pt"]
