"""finetune_imagenet21k.py takes every flag as finetune_imagenet.py does: the same words give the same figures."""

import hashlib
import runpy
import shlex
import sys
from pathlib import Path

import pytest
import torch

from experiments import finetune_imagenet, finetune_imagenet21k
from tests.experiments import scripts
from tests.experiments.scripts import flags_of, rows_of

SCRIPT = Path(finetune_imagenet21k.__file__)
BASE = "-d e.pt --batch_size 25 --n_epochs 2 --device cpu --threads 1 --results r.csv"
# Each flag in at least one; some exclude one another.
COMMANDS = [
    "--method splitter_selection --p_k .5 .5 --m 5 --inverse_temperature .5 --distribution logistic --top1_mode sort "
    "--lr .01 --weight_decay .1 --precision bf16 --seed 3 --num_valid 20 --limit_train 100 --split_seed 1 "
    "--hidden_dims 5 --apply_relu --apply_dropout --eval_freq 2 --checkpoint_seconds 0 --force --stream",
    "--method forward_correction --noise_matrix matrix.pt --mixup .2 --nloglr 2 --sha256 SUM --cache_dir . "
    "--requester_pays --also '--method forward_correction --noise_rate .3'",
    "--method bitonic --art_lambda .3 --also '--method ldr_kl --margin 1 --label_smoothing .1' "
    "--also '--method generalized_cross_entropy --q .3' --also '--method phuber_cross_entropy --tau 2' "
    "--also '--method symmetric_cross_entropy --alpha 2 --beta 2' --also '--method softsort --implementation difftopk'",
]


class TwentyOneK:
    """The script as one calls it."""

    @staticmethod
    def main(words: list[str]) -> int:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", [str(SCRIPT), *words])
            with pytest.raises(SystemExit) as end:
                runpy.run_path(str(SCRIPT), run_name="__main__")
        if end.value.code:
            raise RuntimeError(f"status {end.value.code}")
        return 0


@pytest.fixture
def figures(tmp_path, monkeypatch):
    """The cells of the rows that a script writes, without times."""
    scripts.embeddings(tmp_path / "e.pt")
    torch.save(torch.eye(8, dtype=torch.float64) * 0.6 + 0.05, tmp_path / "matrix.pt")
    digest = hashlib.sha256((tmp_path / "e.pt").read_bytes()).hexdigest()
    monkeypatch.chdir(tmp_path)

    def call(main, words: str) -> list[dict[str, str]]:
        Path("r.csv").unlink(missing_ok=True)
        assert main(shlex.split(f"{BASE} {words.replace('SUM', digest)} --force")) == 0
        found = []
        for row in rows_of(Path("r.csv")):
            found.append({name: cell for name, cell in row.items() if name not in scripts.TIMES})
        return found

    return call


@pytest.mark.parametrize("words", COMMANDS)
def test_the_same_words_give_the_same_figures(words, figures):
    ours = figures(TwentyOneK.main, words)
    assert ours == figures(finetune_imagenet.main, words)
    assert len(ours) == 1 + words.count("--also")


def test_every_flag_of_the_script_is_among_the_words():
    given = " ".join([BASE.replace("-d ", "--data_path "), *COMMANDS])
    missing = {*flags_of(TwentyOneK)} - {*shlex.split(given.replace("'", " "))}
    assert missing == {"--compile"}  # which is refused on a CPU
    assert flags_of(TwentyOneK) == flags_of(finetune_imagenet)
