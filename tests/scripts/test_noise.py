"""The study of wrong labels: the labels that are written, equal trials of each loss, and which of them is chosen."""

import itertools
import re
import shlex
import shutil

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats

from data.embeddings import load_embeddings, split_rows
from experiments.common.rows import read_rows, write_rows
from experiments.common.settings import OWN_SETTINGS, cell
from experiments.finetune_imagenet import parse_arguments
from reporting.noise import kept_by_holm, noise_answer, noise_table
from scripts import relabel, study
from studies import noise
from studies.runs import parse_flags
from studies.tuning import Sobol
from tests.scripts.test_relabel import is_written
from tests.scripts.trained import LABELS, changed

CLASSES = 20
ROWS = 30_000
VALID = 6000


@pytest.fixture(scope="module")
def right(tmp_path_factory):
    """A file of embeddings, each of which holds its row's number, and labels drawn at random."""
    folder = tmp_path_factory.mktemp("right")
    generator = torch.Generator().manual_seed(5)
    labels = torch.randint(CLASSES, (ROWS + 1000,), generator=generator)
    rows = torch.arange(ROWS + 1000).view(-1, 1).float().expand(-1, 2)
    content = {"train_embeddings": rows[:ROWS], "train_labels": labels[:ROWS]}
    content |= {"test_embeddings": rows[ROWS:], "test_labels": labels[ROWS:], "info": {"num_classes": CLASSES}}
    torch.save(content, folder / "right.pt")
    by_people = torch.where(torch.rand(ROWS, generator=generator) < 0.3, (labels[:ROWS] + 1) % CLASSES, labels[:ROWS])
    arrays = {"clean_label": labels[:ROWS].numpy(), "noisy_label": by_people.numpy()}
    torch.save(arrays, folder / "human.pt")
    return folder / "right.pt", folder / "human.pt", labels, by_people


def relabelled(right, tmp_path, *words):
    """The new file and its two matrices."""
    output = tmp_path / f"new{len([*tmp_path.iterdir()])}.pt"
    assert relabel.main([str(right[0]), *words, "--num_valid", str(VALID), "--output", str(output)]) == 0
    matrices = [torch.load(path, weights_only=True) for path in relabel.matrix_files(output).values()]
    return load_embeddings(output), *matrices


def expected_matrix(rate, among):
    """T of symmetric noise within groups of so many consecutive classes, entry by entry."""
    return torch.tensor(
        [[(1 - rate) * (i == j) + rate / among * (i // among == j // among) for j in range(CLASSES)]
         for i in range(CLASSES)], dtype=torch.float64,
    )  # fmt: skip


@pytest.mark.parametrize(("rate", "among"), [(0.4, 20), (0.2, 5), (0.0, 20)])
def test_labels_that_train_and_that_validate_are_wrong_alike(right, tmp_path, rate, among):
    data, true, estimated = relabelled(
        right, tmp_path, "--label_noise", str(rate), "--among", str(among), "--noisy_valid"
    )
    learn, valid = split_rows(ROWS, VALID, 0)
    labels = right[2]
    for name, rows in (("train", learn), ("valid", valid), ("clean", valid)):
        assert torch.equal(data[name].inputs[:, 0].long(), rows)
        if name == "clean":
            assert torch.equal(data[name].labels, labels[rows])
            continue
        counts = torch.zeros(CLASSES, CLASSES)
        for was, now in zip(labels[rows].tolist(), data[name].labels.tolist()):
            counts[was, now] += 1
        shares = counts.double() / counts.sum(1, keepdim=True)
        torch.testing.assert_close(shares, expected_matrix(rate, among), rtol=0, atol=0.11)
        wrong = float((labels[rows] != data[name].labels).double().mean())
        assert wrong == pytest.approx(rate * (among - 1) / among, abs=0.02)
    assert torch.equal(data["test"].labels, labels[ROWS:])
    torch.testing.assert_close(true, expected_matrix(rate, among))
    torch.testing.assert_close(estimated.sum(1), torch.ones(CLASSES, dtype=torch.float64))
    assert float((estimated - true).abs().max()) < 0.2
    assert bool((estimated > 0).all()) or rate == 0


def test_labels_that_validate_stay_right_and_classes_are_joined_or_split(right, tmp_path):
    labels = right[2]
    before = right[0].read_bytes()
    data = relabelled(right, tmp_path, "--label_noise", "0.4")[0]
    train, valid = split_rows(ROWS, VALID, 0)
    found = data["train"].labels
    assert torch.equal(found[valid], labels[valid])
    assert torch.equal(found // 5, labels[:ROWS] // 5)  # of the same block
    wrong = (found[train] != labels[train]).double().mean().item()
    assert wrong == pytest.approx(0.4 * 4 / 5, abs=0.01)  # some noisy labels are the right ones
    assert torch.equal(data["test"].labels, labels[ROWS:])
    assert torch.equal(data["train"].inputs[:, 0], torch.arange(ROWS).float())
    for num_classes, joined, split in ((2, 10, 1), (200, 1, 10)):
        output = tmp_path / f"of_{num_classes}.pt"
        assert relabel.main([str(right[0]), "--num_classes", str(num_classes), "--output", str(output)]) == 0
        assert torch.equal(load_embeddings(output)["test"].labels // split, labels[ROWS:] // joined)
    for wrong_call in (["--output", str(right[0]), "--label_noise", ".1"], ["--output", "x.pt"]):
        with pytest.raises(SystemExit, match="2"):
            relabel.main([str(right[0]), *wrong_call])
    assert right[0].read_bytes() == before


def test_another_draw_is_other_noise_and_the_same_division(right, tmp_path):
    draws = []
    for draw in ("0", "1", "0"):
        words = ("--label_noise", "0.4", "--among", "20", "--noisy_valid", "--draw", draw)
        draws.append(relabelled(right, tmp_path, *words)[0])
    first, second, again = draws
    assert torch.equal(first["train"].labels, again["train"].labels)
    assert not torch.equal(first["train"].labels, second["train"].labels)
    assert torch.equal(first["clean"].labels, second["clean"].labels)
    assert {draw.info["labels"] for draw in draws} == {"0.4 among 20, draw 0", "0.4 among 20, draw 1"}


def test_labels_by_people_and_the_matrix_that_5_percent_of_right_labels_give(right, tmp_path):
    data, true, estimated = relabelled(right, tmp_path, "--human", str(right[1]), "--noisy_valid")
    _, _, labels, by_people = right
    for name in ("train", "valid"):
        assert torch.equal(data[name].labels, by_people[data[name].inputs[:, 0].long()])
    assert data.info["labels"] == "human"
    shares = [float((by_people[labels[:ROWS] == c] == c).double().mean()) for c in range(CLASSES)]
    torch.testing.assert_close(true.diag(), torch.tensor(shares, dtype=torch.float64))
    assert float(true.diag().mean()) == pytest.approx(0.7, abs=0.02)
    assert int((true > 0).sum()) == 2 * CLASSES  # the right label and the next class
    torch.testing.assert_close(true.sum(1), torch.ones(CLASSES, dtype=torch.float64))
    learn = split_rows(ROWS, VALID, 0)[0]
    known = learn[split_rows(len(learn), len(learn) // 20, 0)[1]]
    c = 3
    own = by_people[known][labels[known] == c]
    wrong = float((by_people[known] != labels[known]).double().mean())
    expected = (int((own == c).sum()) + 10 * (1 - wrong)) / (len(own) + 10)
    assert float(estimated[c, c]) == pytest.approx(expected)
    assert float(estimated[c, c + 5]) == pytest.approx(10 * wrong / (CLASSES - 1) / (len(own) + 10))  # never seen
    torch.save({"clean_label": labels.flip(0).numpy(), "noisy_label": labels.numpy()}, tmp_path / "other.pt")
    with pytest.raises(ValueError, match="are not those of"):
        relabelled(right, tmp_path, "--human", str(tmp_path / "other.pt"), "--noisy_valid")


def test_the_labels_that_are_known_are_drawn_by_the_draw_as_well(right, tmp_path):
    """Labels by people are the same in each draw, so that only what is known of them moves."""
    found = [relabelled(right, tmp_path, "--human", str(right[1]), "--draw", draw) for draw in ("0", "1", "0")]
    (data, true, first), (other_data, other_true, second), (*_, again) = found
    assert torch.equal(data["train"].labels, other_data["train"].labels)
    assert torch.equal(true, other_true)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


def test_every_loss_has_the_same_trials_but_for_its_own_numbers():
    common = set()
    study = noise.noise("human")
    (sobol,) = study.rounds
    assert isinstance(sobol, Sobol)
    for candidate in study.space:
        trials = sobol.of(candidate, None)
        assert [trial.n_epochs for trial in trials] == [4] * 15 + [12] * 15
        parsed = [parse_flags(trial.flags) for trial in trials]
        common.add(tuple((values["lr"], values["weight_decay"]) for values in parsed))
        for name, numbers in candidate.ranges.items():  # the range is used
            values = [run[name] for run in parsed]
            assert numbers.low <= min(values) <= max(values) <= numbers.high
            middle = (numbers.low + numbers.high) / 2 if numbers.linear else (numbers.low * numbers.high) ** 0.5
            assert 13 <= sum(value < middle for value in values) <= 17
            assert len(set(values)) > 27
    assert len(common) == 1


FIRST = {"test_top1": 0.5, "test_top5": 0.7}
GAINS = {"softmax_cross_entropy": 0.0, "generalized_cross_entropy": 0.006, "phuber_cross_entropy": 0.004}
GAINS |= {"lapsum": 0.009, "lapsum, corrected": 0.012, "smooth_topk": -0.02}


NAMES = {
    "cross_entropy": "softmax_cross_entropy",
    "gce": "generalized_cross_entropy",
    "phuber": "phuber_cross_entropy",
    "lapsum": "lapsum",
    "lapsum_forward": "lapsum, corrected",
    "smooth_topk": "smooth_topk",
}


@pytest.fixture
def files(trained, tmp_path):
    """Trials of six losses on two kinds of labels, and ten seeds of what each validation chose."""
    random = np.random.default_rng(3)
    every = []
    for labels in LABELS:
        rows = {row["method"]: row for row in read_rows(trained / "noise" / f"{labels}_trials.csv")}
        trials = []
        finals = []
        plan = noise.noise(labels)
        for candidate in plan.space:
            if candidate.name not in NAMES:
                continue
            name = NAMES[candidate.name]
            tried = plan.rounds[0].of(candidate, None)
            for place, trial in enumerate((tried[0], tried[1], tried[29])):
                values = {key: cell(value) for key, value in parse_flags(trial.flags).items()}
                plain = dict.fromkeys(OWN_SETTINGS, "") | {"batch_size": "500", "eval_freq": "0"}
                run = changed(rows[values["method"]], **plain | values, n_epochs=trial.n_epochs)
                high = {"valid": place == 0, "clean": place == (name == "lapsum")}  # the last is bad
                cells = {f"last_{part}_top{k}": 0.4 + GAINS[name] + 0.1 * high[part] for part in high for k in (1, 5)}
                trials.append(changed(run, run_id=f"{labels}-{candidate.name}-{place}", seed=0, **cells))
                for seed in range(1, 11) if place < 2 else ():
                    level = GAINS[name] + 0.01 * place + 0.003 * seed
                    cells = {metric: value + level + random.normal(0, 0.004) for metric, value in FIRST.items()}
                    cells |= {"run_id": f"{labels}-{candidate.name}-{place}-{seed}", "seed": seed, "order_seed": seed}
                    finals.append(changed(run, **cells))
                    every.append({**finals[-1], "name": name, "labels": labels, "place": place})
        write_rows(tmp_path / f"{labels}_trials.csv", trials)
        write_rows(tmp_path / f"{labels}.csv", finals)
    return tmp_path, pd.DataFrame(every)


def plain_difference(runs, labels, one, other, metric, place=0):
    """The differences of ten seeds in points, as an array."""
    runs = runs[(runs["labels"] == labels) & (runs["place"] == place)].astype({"seed": int}).sort_values("seed")
    first, second = (100 * runs[runs["name"] == name][metric].astype(float).to_numpy() for name in (one, other))
    return first - second


def test_differences_are_of_paired_seeds_and_holm_counts_all_of_them(files):
    folder, runs = files
    lines = noise_table(folder, "human").splitlines()
    (row,) = (line for line in lines if line.startswith("| LapSum  ") and lines.index(line) < len(lines) / 2)
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    expected = []
    p_values = []
    for labels, other in itertools.product(LABELS, ("softmax_cross_entropy", "generalized_cross_entropy")):
        for one in set(runs["name"]) - {other, "softmax_cross_entropy"}:  # each pair once
            for metric in FIRST:
                values = plain_difference(runs, labels, one, other, metric)
                t = values.mean() / (values.std(ddof=1) / 10**0.5)
                p_values.append(2 * stats.t.sf(abs(t), 9))
                if (labels, one) == ("human", "lapsum"):
                    low, high = stats.t.interval(0.95, 9, values.mean(), values.std(ddof=1) / 10**0.5)
                    expected.append((f"{values.mean():+.2f} ± {(high - low) / 2:.2f}", p_values[-1]))
    assert len(p_values) == 36
    kept = {}
    passes = {}
    alive = True
    for place, p in enumerate(sorted(p_values)):  # the smallest first, each against its share of 5 %
        passes[p] = bool(p <= 0.05 / (36 - place))
        alive = alive and passes[p]
        kept[p] = bool(alive)
    assert {True, False} == set(kept.values())
    assert kept != passes  # one that would pass comes after one that does not
    assert sum(kept_by_holm(folder).values()) == sum(kept[p] for p in p_values)
    assert cells[3:] == [text.replace("-", "−") + "\\*" * kept[p] for text, p in expected]
    assert "36 differences" in lines[0]


def test_the_answer_is_the_best_top_k_loss_minus_the_best_robust_loss_by_noisy_validation(files):
    folder, runs = files
    first, second = noise_answer(folder).split("<summary>")
    assert first.startswith("Best of 7 top-k losses minus best of 5 robust losses")
    titles = {"lapsum, corrected": "LapSum, forward correction", "lapsum": "LapSum"}
    shown = ("labels by people", "40 % drawn among all classes, draw 2")
    for (loss, title), table in zip(titles.items(), (first, second)):
        rows = [line for line in table.splitlines() if "LapSum" in line]
        for labels, name, row in zip(LABELS, shown, rows, strict=True):
            assert name in row
            assert [cell.strip() for cell in row.split("|")[2:4]] == [title, "GCE"]
            values = plain_difference(runs, labels, loss, "generalized_cross_entropy", "test_top1")
            half = stats.t.ppf(0.975, 9) * values.std(ddof=1) / 10**0.5
            verdict = "no clear difference" if abs(values.mean()) < half else "gain" if values.mean() > 0 else "loss"
            assert f"{values.mean():+.2f} ± {half:.2f}".replace("-", "−") in row
            assert f"({verdict})" in row.split("|")[4]


def test_clean_validation_has_its_own_table_and_a_missing_final_run_is_named(files, tmp_path_factory):
    folder, runs = files
    text = noise_table(folder, "human")
    noisy, clean = text[text.index("Chosen by noisy") :].split("Chosen by clean")
    lapsum = runs[(runs["labels"] == "human") & (runs["name"] == "lapsum")].astype({"test_top1": float})
    gain = 100 * lapsum.groupby("place")["test_top1"].mean()
    assert f"{gain[0]:.2f} ± " in noisy
    assert f"{gain[1]:.2f} ± " in clean
    assert clean.count("the same trial") == 2 * 5  # of all but LapSum
    other = tmp_path_factory.mktemp("other")
    write_rows(other / "human_trials.csv", read_rows(folder / "human_trials.csv"))
    kept = runs.query("labels == 'human' and (place == 0 or name != 'lapsum')").drop(
        columns=["name", "place", "labels"]
    )
    write_rows(other / "human.csv", kept.to_dict("records"))
    with pytest.raises(ValueError, match="human: what clean validation chose of lapsum has no final run"):
        noise_table(other, "human")


def test_every_kind_of_labels_has_its_file_and_two_passes_of_15_trials_for_each_loss(right, tmp_path, capsys):
    folder = tmp_path / "labels of mine"  # a path that needs quotes
    words = ["noise", str(right[0]), "--folder", str(folder), "--labels", "blocks_.2", "right", "--dry-run"]
    assert study.main(words) == 0
    assert not folder.exists()  # a dry run starts nothing
    lines = [shlex.split(line) for line in capsys.readouterr().out.splitlines() if line[0] != "#"]
    for _, script, *flags in lines:
        if script == "scripts/relabel.py":
            assert not is_written(flags)
            folder.mkdir(exist_ok=True)
            assert relabel.main(flags) == 0
            assert is_written(flags)
    passes = [parse_arguments(flags) for _, script, *flags in lines if script != "scripts/relabel.py"]
    for labels, number in (("blocks_.2", 18), ("right", 16)):  # the matrices of right labels are the identity
        own = [args for args in passes if args.data_path == str(folder / f"{labels}.pt")]
        assert len(own) == 2 * number
        assert {(1 + len(args.also), *args.seed, args.eval_freq, str(args.results)) for args in own} == {
            (15, 0, 0, f"results/noise/{labels}_trials.csv")
        }
        assert {args.n_epochs for args in own} == {4, 12}
        matrices = {args.noise_matrix for args in own} - {None}
        assert len(matrices) == 2 * (labels == "blocks_.2")
        assert all(matrix.is_file() for matrix in matrices)
    assert load_embeddings(folder / "right.pt").info["labels"] == "right"
    with pytest.raises(ValueError, match="--human must name"):
        study.main(["noise", str(right[0]), "--folder", str(folder), "--dry-run"])


def test_a_cached_file_of_labels_that_is_of_other_embeddings_is_written_again(right, tmp_path):
    other = tmp_path / "other.pt"
    content = torch.load(right[0], weights_only=True)
    torch.save(content | {"train_embeddings": content["train_embeddings"] + 1}, other)
    output = tmp_path / "noisy.pt"

    def words(data, *more):
        return [str(data), "--label_noise", ".2", "--noisy_valid", *more, "--output", str(output)]

    assert relabel.main(words(other)) == 0
    assert is_written(words(other))
    assert not is_written(words(right[0]))
    assert not is_written(words(other, "--draw", "1"))


def test_a_study_writes_its_labels_again_and_replaces_no_file_of_the_user(right, tmp_path):
    """It writes again what relabel.py wrote of other embeddings."""
    args = study.parse_arguments(["noise", str(right[0]), "--folder", str(tmp_path)])[0]
    labels = noise.LABELS["blocks_.2"]
    output = tmp_path / "blocks_.2.pt"
    shutil.copy(right[0], tmp_path / "own.pt")
    content = torch.load(right[0], weights_only=True)
    torch.save(content | {"info": content["info"] | {"source": "folders"}}, tmp_path / "extracted.pt")
    torch.save(torch.eye(CLASSES, dtype=torch.float64), tmp_path / "matrix.pt")
    (tmp_path / "text.pt").write_text("of the user")
    places = (output, *relabel.matrix_files(output).values())
    for name, place in itertools.product(("own", "extracted", "matrix", "text"), places):
        shutil.copy(tmp_path / f"{name}.pt", place)
        with pytest.raises(ValueError, match=rf"{re.escape(str(place))} .*: delete or rename it"):
            study.write_labels(labels, output, args)
        assert sorted(tmp_path.glob("blocks*.pt")) == [place]
        assert place.read_bytes() == (tmp_path / f"{name}.pt").read_bytes()
        place.unlink()
    torch.save(content | {"train_embeddings": content["train_embeddings"] + 1}, tmp_path / "other.pt")
    words = ["--label_noise", ".2", "--among", "5", "--noisy_valid", "--output", str(output)]
    assert relabel.main([str(tmp_path / "other.pt"), *words]) == 0
    study.write_labels(labels, output, args)
    assert is_written([str(right[0]), *words])


def test_labels_that_are_wrong_already_are_refused(right, tmp_path):
    relabelled(right, tmp_path, "--label_noise", "0.4", "--among", "20", "--noisy_valid")
    source = str(tmp_path / "new0.pt")
    for noisy in ("--label_noise", "0"), ("--human", str(right[1])):
        with pytest.raises(ValueError, match="has wrong labels already"):
            relabel.main([source, *noisy, "--output", str(tmp_path / "newer.pt")])
    words = [source, "--num_classes", "200", "--output", str(tmp_path / "classes.pt")]
    assert relabel.main(words) == 0
    data = load_embeddings(tmp_path / "classes.pt")
    for name in ("train", "valid", "clean", "test"):
        assert 100 < int(data[name].labels.max()) < 200
