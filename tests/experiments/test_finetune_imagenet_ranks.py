"""Several processes, as torchrun starts them, fine-tune what one process does: rows, resume, refusals."""

import os
import signal
from functools import partial

import pytest
import torch
from experiments.shared import run as run_module
from experiments.shared.run_record import read_rows

from experiments import finetune_imagenet as script
from tests.experiments.runs import believe_in, check_refused, outcome
from tests.experiments.test_finetune_imagenet import made_store
from tests.processes import together, torchrun

# Shares are 26 and 25 of a batch, 15 and 16 of the validation rows, 51 and 52 of the test rows.
FLAGS = "--batch_size 51 --num_valid 31 --eval_freq 5 --n_epochs 12 --device cpu --threads 1 --seeds 5 1"
HEADS = "--nloglr 2 --method neuralsort --hidden_dims 8 --apply_dropout"
ALSO = "--method softmax_cross_entropy --nloglr 3"


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return made_store(tmp_path_factory.mktemp("stores") / "made.store")


def command(store, results, heads=HEADS):
    return [*f"-d {store} --results {results} {FLAGS} {heads}".split(), "--also", ALSO]


@pytest.fixture(scope="module")
def undisturbed(store, tmp_path_factory):
    """The results file of two processes that nobody stopped, and what they printed."""
    results = tmp_path_factory.mktemp("undisturbed") / "r.csv"
    done = torchrun(script.__file__, command(store, results))
    assert done.returncode == 0, done.stderr
    return results, done.stdout


def test_two_processes_give_the_rows_of_one(store, undisturbed, tmp_path):
    results, output = undisturbed
    alone = tmp_path / "r.csv"
    assert script.main(command(store, alone)) == 0
    ours, expected = outcome(results, file="evaluations.csv"), outcome(alone, file="evaluations.csv")
    assert ours.keys() == expected.keys()
    assert len(ours) == 4
    for name, (_, history, weights) in ours.items():
        _, other_history, other_weights = expected[name]
        assert len(history) == len(other_history) == 12 * 4
        for each, other in zip(history, other_history):
            assert each.keys() == other.keys()
            for column in ("train_loss", "valid_loss", "test_loss"):
                assert float(each[column]) == pytest.approx(float(other[column]), rel=1e-5)
        torch.testing.assert_close(
            [torch.tensor(weight) for name, weight in weights.items() if "state" not in name],
            [torch.tensor(weight) for name, weight in other_weights.items() if "state" not in name],
            rtol=1e-4,
            atol=1e-5,
        )
    rows = read_rows(results)
    assert {row["processes"] for row in rows} == {"2"}
    assert {row["processes"] for row in read_rows(alone)} == {"1"}
    assert min(float(row["test_top5"]) for row in rows if row["method"] == "neuralsort") > 0.5  # chance is .21
    # One of them speaks.
    assert output.count("609 training rows, 31 validate, 103 test") == 1
    assert output.count(": beginning on ") == 4
    assert "2 processes, 1 threads" in output


def dying(words):
    """The script, of whose processes that of rank 1 is killed at its eleventh evaluation."""
    run_module.SAVE_SECONDS = -1
    evaluate, evaluations = script.evaluate, []

    def die(*arguments):
        evaluations.append(1)
        if len(evaluations) == 11 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return evaluate(*arguments)

    script.evaluate = die
    return script.main(words)


def test_when_one_process_is_killed_all_continue_with_the_same_bits(store, undisturbed, tmp_path):
    results = tmp_path / "results" / "r.csv"
    words = command(store, results)
    assert together(2, tmp_path, partial(dying, words))[0] == [1, -signal.SIGKILL]
    assert not results.exists()
    statuses, outputs = together(2, tmp_path, partial(script.main, words))
    assert statuses == [0, 0], outputs
    assert outputs[0].count("continuing after step 27 of 132") == 4
    found, expected = (outcome(each, file="evaluations.csv") for each in (results, undisturbed[0]))
    assert found == expected


def test_what_goes_wrong_is_said_once(store, tmp_path):
    results = tmp_path / "results" / "r.csv"
    words = command(store, results, "--method softsort --lr 1e38")
    statuses, outputs = together(2, tmp_path, partial(script.main, words))
    (told,) = [line for line in "".join(outputs).splitlines() if line.startswith("error: ")]
    assert "with method softsort" in told
    assert statuses == [1, 1]
    assert not results.exists()


@pytest.mark.parametrize(("flag", "fewest"), [("--batch_size", 32), ("--num_valid", 39), ("--limit_test", 38)])
def test_more_processes_than_there_is_to_divide_are_refused(store, tmp_path, monkeypatch, capsys, flag, fewest):
    believe_in(40, monkeypatch)
    few = [*command(store, tmp_path / "r.csv"), "--num_valid", "60", flag, str(fewest)]
    check_refused(script.main, few, f"there are {fewest}; lower --nproc_per_node", capsys)
    assert list(tmp_path.iterdir()) == []
