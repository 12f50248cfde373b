"""The table scripts: their rows, and that a sweep that is killed ends with the rows of an undisturbed one."""

import os
import re
import shlex
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pandas as pd
import pytest
import torch

from data.embeddings import load_embeddings, split_rows
from experiments import finetune_imagenet, train_beam_search, train_cifar100, train_knn
from experiments.common import losses
from experiments.finetune_imagenet import BATCH_SIZE, IMAGENET_1K
from experiments.finetune_imagenet21k import IMAGENET_21K
from scripts.shared.run_record import read_rows
from scripts.sweeping import heads, relabel
from tests.processes import wait_for
from topk_losses import METHODS, RELAXATIONS
from topk_losses.methods import SINGLE_K

ROOT = Path(__file__).parents[2]
EVIDENCE = ROOT / "scripts" / "evidence.sh"
NUM_ROWS = {
    **{"table1": 20, "table2_3_imagenet1k": 20, "table2_3_imagenet21k": 20, "table4": 46, "table5": 12},
    **{"strong": 6, "temperature_training": 122, "scratch": 30, "implementation": 8},
}
HEADS = "experiments/finetune_imagenet.py"
PARSE = {
    "experiments/train_cifar100.py": train_cifar100.parse_arguments,
    HEADS: finetune_imagenet.parse_arguments,
    "experiments/finetune_imagenet21k.py": lambda words: finetune_imagenet.parse_arguments(words, IMAGENET_21K),
}
P_KS = ["1. 0. 0. 0. 0.", "0. 0. 0. 0. 1.", ".5 0. 0. 0. .5", ".25 0. 0. 0. .75", ".1 0. 0. 0. .9", ".2 .2 .2 .2 .2"]


def recipes_of(args, protocol, num_classes: int) -> list[dict]:
    """The loss settings of each head of a command, each of which can be built."""
    found = []
    for each in (args, *getattr(args, "also", [])):
        settings = losses.loss_settings(each, top1_mode="sm", inverse_temperatures={}, m=protocol.m)
        losses.build_loss(settings, num_classes, torch.device("cpu"), each.implementation)
        found.append({**settings, "lr": each.lr, "weight_decay": each.weight_decay or None})
    return found


def embeddings(path: Path, labels: torch.Tensor, dim: int, *more: str) -> Path:
    content = {"info": {"backbone": "some"}}
    for split in ("train", "test", *more):
        content |= {f"{split}_embeddings": torch.randn(len(labels), dim).half(), f"{split}_labels": labels}
    torch.save(content, path)
    return path


def commands(table: str, *flags: str) -> list[str]:
    """The rows that the table's script would run, called in another folder than its own."""
    done = subprocess.run(
        [ROOT / "scripts" / f"{table}.sh", *flags, "--dry-run"], capture_output=True, text=True, cwd="/", check=True
    )
    *rows, total = done.stdout.splitlines()
    assert total == f"# {len(rows)} rows"
    return rows


@pytest.fixture(scope="module")
def rows_of() -> dict[str, list[str]]:
    return {table: commands(table) for table in NUM_ROWS}


@pytest.mark.parametrize("table", NUM_ROWS)
def test_every_row_is_a_command_of_its_script_for_its_file(rows_of, table):
    rows = rows_of[table]
    assert len(rows) == len(set(rows)) == NUM_ROWS[table]
    for row in rows:
        words = shlex.split(row)
        assert words[0] == ".venv/bin/python"
        args = PARSE[words[1]](words[2:])
        assert str(args.results) == f"results/{table}.csv"
        recipes_of(args, IMAGENET_1K, 1000)
    # Each row is there with both seeds, and no other; in scratch.sh with one, what was chosen with three.
    of_scratch = table == "scratch"
    without_seed = Counter(re.sub(r"--seed \d", "", row) for row in rows)
    assert set(without_seed.values()) == ({1, 3} if of_scratch else {2})
    assert {re.search(r"--seed (\d)", row)[1] for row in rows} == ({"0", "1", "2"} if of_scratch else {"0", "1"})


def test_table_1_is_what_the_documentation_says(rows_of):
    told = re.findall(r"^\$train (--method .*)$", (ROOT / "docs" / "reproduce.md").read_text(), re.MULTILINE)
    ran = {re.search(r"(--method .*) --seed 0", row)[1] for row in rows_of["table1"] if "--seed 0" in row}
    assert ran == set(told)


def test_table_4_has_each_method_over_the_six_p_k(rows_of):
    over = {}
    for row in rows_of["table4"]:
        method, p_k = re.search(r"--method (\w+) .*--p_k (.*) --seed", row).groups()
        over.setdefault(method, []).append(p_k)
    assert over.pop("softmax_cross_entropy") == [P_KS[0]] * 2
    assert over.pop("smooth_hard_topk") == P_KS[:2] * 2
    assert sorted(over) == ["neuralsort", "sinkhorn_sort", "softsort", "splitter_selection"]
    assert all(p_ks == P_KS[1:] * 2 for p_ks in over.values())
    # Table 1's rows are among them.
    assert {row.replace("table1", "table4") for row in rows_of["table1"]} <= set(rows_of["table4"])


@pytest.mark.parametrize("table", ["table2_3_imagenet1k", "table2_3_imagenet21k", "table5"])
def test_the_settings_of_the_heads_are_the_published_ones_and_those_of_a_seed_can_be_one_command(rows_of, table):
    """In the rows, and what the scripts do without being told; the losses of all but the first in --also."""
    script, *words = shlex.split(rows_of[table][0])[1:]
    defaults = IMAGENET_21K if "21k" in script else IMAGENET_1K

    def recipes(words: list[str]) -> list[dict]:
        args = PARSE[script](words)
        assert (args.m, args.nloglr) == (defaults.m, defaults.nloglr)
        # None: what `settle` fills in, of published data that
        assert args.n_epochs in (None, defaults.n_epochs)
        assert args.batch_size in (None, BATCH_SIZE)
        return recipes_of(args, defaults, defaults.num_classes)

    rows = [shlex.split(row)[2:] for row in rows_of[table] if "--seed 0" in row]
    alone = [recipes(words) for words in rows]
    assert {len(each) for each in alone} == {1}
    if table != "table5":  # which has two data sets
        losses = [re.search(r"(--method .*) --seed", row)[1] for row in rows_of[table] if "--seed 0" in row]
        together = recipes([*words, *(word for loss in losses[1:] for word in ("--also", loss))])
        assert together == [each for (each,) in alone]
        assert len(together) == 10


def test_the_nearest_neighbours_have_every_relaxation_both_losses_and_the_baselines():
    """Of data sets by name, and of a store: rows of one and of the other, each seed with the same."""
    words = [ROOT / "scripts" / "knn.sh", "digits", "a folder/some.pt", "--n_epochs", "3", "--dry-run"]
    *rows, total = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
    lines = {"digits": [], "a folder/some.pt": []}
    for row in rows:
        python, script, *flags = shlex.split(row)
        assert (python, script) == (".venv/bin/python", "experiments/train_knn.py")
        args = train_knn.parse_arguments(flags)
        train_knn.configuration(args, args.seed, torch.device("cpu"))
        assert (str(args.results), args.n_epochs) == ("results/knn.csv", 3)
        loss = args.loss if args.method in RELAXATIONS else ""
        lines[args.dataset or args.data_path].append((args.seed, args.method, loss, args.sorted, args.prediction))
    relaxed = [(method, False) for method in RELAXATIONS] + [("soft_topk", True)]
    expected = {(method, loss, order, "neighbours") for method, order in relaxed for loss in ("mass", "log_mass")}
    expected |= {(method, "", False, "neighbours") for method in ("inputs", "pca", "softmax_cross_entropy")}
    expected |= {("softmax_cross_entropy", "", False, "network")}
    for each in lines.values():
        assert sorted(each) == sorted((seed, *line) for seed in (0, 1, 2) for line in expected)
    assert total == f"# {6 * len(expected)} rows"


def test_temperatures_are_heads_of_every_method_and_none_is_refused():
    seen = set()
    for row in commands("temperature", "-d", "some.pt"):
        args = finetune_imagenet.parse_arguments(shlex.split(row)[2:])
        recipes = recipes_of(args, IMAGENET_1K, 100)
        seen |= {recipe["method"] for recipe in recipes}
        assert len(recipes) == 1 + len(args.also)
    assert seen == set(METHODS)


def test_heads_are_the_best_trial_of_each_method_and_none_is_refused(tmp_path):
    finals, path = tmp_path / "heads.csv", tmp_path / "heads_trials.csv"
    path_of_embeddings = embeddings(tmp_path / "e.pt", torch.arange(9), 2)
    methods = [name for name in METHODS if name != "imbalanced_noised_topk"]

    def asked(stage: str, results: Path = finals) -> dict[str, tuple]:
        rows = [shlex.split(row)[2:] for row in heads.rows_of(stage, str(path_of_embeddings), methods, results)]
        found = [(args, recipes_of(args, IMAGENET_1K, 100)) for args in map(PARSE[HEADS], rows)]
        return {args.method: (args, recipes) for args, recipes in found}

    def trial(flags: dict, n_epochs: int, top5: float) -> dict:
        cells = {name: flags[name] for name in ("method", *heads.SETTINGS, "lr")}
        return {**cells, "p_k": " ".join(map(str, flags["p_k"])), "n_epochs": n_epochs, "valid_top5": top5}

    trials, chosen = [], {}
    for method, (args, flags) in asked("trials").items():
        assert (args.n_epochs, args.seeds, {each["lr"] for each in flags}) == (5, [0], set(heads.RATES))
        assert (args.data_path, args.num_valid) == (str(path_of_embeddings), heads.NUM_VALID)
        chosen[method] = trial(flags[-2], 5, 0.9)
        trials += [chosen[method], *(trial(each, 5, 0.5) for each in flags if each is not flags[-2])]
    pd.DataFrame(trials, dtype=object).assign(valid_top1=0.6).to_csv(path, index=False)
    assert list(chosen) == methods
    for method, (args, flags) in asked("longer").items():
        again = [{**chosen[method], "lr": lr} for lr in heads.RATES]
        assert [trial(each, 5, 0.9) for each in flags] == again
        assert args.n_epochs == 22
        trials.append({**again[0], "n_epochs": 22, "valid_top5": 0.95 if method == "lapsum" else 0.85})
    pd.DataFrame(trials, dtype=object).assign(valid_top1=0.6).to_csv(path, index=False)
    for method, (args, (flags,)) in asked("finals").items():
        n_epochs, lr = (22, 0.0005) if method == "lapsum" else (5, 0.002)
        assert (args.n_epochs, args.seeds) == (n_epochs, list(range(1, 11)))
        assert trial(flags, 5, 0.9) == {**chosen[method], "lr": lr}
    more, asked_more = tmp_path / "heads_more.csv", []
    for method, (args, flags) in asked("more", more).items():
        assert (args.n_epochs, args.seeds, args.results.name) == (22, [0], "heads_more_trials.csv")
        kept = [(each["lr"], trial(each, 5, 0.9)["p_k"], each["m"], each["weight_decay"]) for each in flags]
        around = [
            (lr, chosen[method]["p_k"], chosen[method]["m"], decay) for decay in (None, 1) for lr in heads.MORE_RATES
        ]
        assert kept[:30] == 5 * around
        assert method not in SINGLE_K
        without = [each for each in flags if each["inverse_temperature"] == heads.LEVEL]
        assert (len(flags), len(without)) == ((60, 30) if method == "lapsum" else (30, 0))
        best = [flags[7], *without[-1:]]
        asked_more += [trial(each, 22, 0.9 if each in best else 0.5) for each in flags]
    pd.DataFrame(asked_more, dtype=object).assign(valid_top1=0.6).to_csv(
        tmp_path / "heads_more_trials.csv", index=False
    )
    found = [trial(each, 22, 0.9) for _, flags in asked("finals", more).values() for each in flags]
    assert found == [each for each in asked_more if each["valid_top5"] == 0.9]
    with pytest.raises(SystemExit, match=r"none_trials.csv has no trial of neuralsort: run heads.sh with it"):
        next(heads.rows_of("more", str(path_of_embeddings), ["neuralsort"], tmp_path / "none_more.csv"))


def test_temperatures_over_classes_are_of_sets_made_of_the_same_rows(tmp_path):
    labels = torch.arange(300) % 100
    path = embeddings(tmp_path / "some.pt", labels, 6)
    rows = [finetune_imagenet.parse_arguments(shlex.split(row)[2:]) for row in commands("temperature_classes", path)]
    asked = Counter((str(args.results), args.m) for args in rows)
    assert asked == {
        (f"results/temperature_classes_{n}.csv", m): 5
        for n, scores in ((10, (10,)), (100, (16, 50, 100)), (1000, (16, 50, 1000)))
        for m in scores
    }
    few, many = (load_embeddings(tmp_path / f"some_of_{n}.pt") for n in (10, 1000))
    for split in ("train", "test"):
        assert torch.equal(few[split].labels, labels // 10)
        assert torch.equal(many[split].labels // 10, labels)
    for arguments, words in (([], "the first argument"), ([tmp_path / "none.pt"], "error: there is no file")):
        done = subprocess.run(
            [ROOT / "scripts" / "temperature_classes.sh", *arguments], capture_output=True, text=True, check=False
        )
        assert done.returncode == 2
        assert words in done.stderr
        assert "Traceback" not in done.stderr


def test_wrong_labels_are_of_the_same_block_and_of_the_rows_that_train(tmp_path, capsys):
    labels = torch.arange(15_000) % 10
    path = embeddings(tmp_path / "some.pt", labels, 2)
    assert relabel.main([str(path), "0.4"]) == 0
    made = tmp_path / "some_noise_.4.pt"
    assert capsys.readouterr().out == f"{made}\n"
    clean, noisy = load_embeddings(path), load_embeddings(made)
    train, valid = split_rows(15_000, heads.NUM_VALID, seed=0)
    found = noisy["train"].labels
    assert torch.equal(found[valid], labels[valid])
    assert torch.equal(found // 5, labels // 5)
    wrong = (found != labels)[train].double().mean().item()
    assert wrong == pytest.approx(0.4 * 4 / 5, abs=0.02)  # of those drawn anew a fifth stays
    for split in ("train", "test"):
        assert torch.equal(noisy[split].embeddings, clean[split].embeddings)
    assert torch.equal(noisy["test"].labels, labels)
    assert noisy.info["backbone"] == "some"
    assert relabel.main([str(path), ".4:10"]) == 0
    found = load_embeddings(tmp_path / "some_noise_.4_of_10.pt")["train"].labels
    assert (found != labels)[train].double().mean().item() == pytest.approx(0.4 * 9 / 10, abs=0.02)
    assert set((found - labels).tolist()) == {*range(-9, 10)}
    for wrong_noise in (".4:", "2", ".4:0"):
        with pytest.raises(SystemExit):
            relabel.main([str(path), wrong_noise])
    # Where a store says which rows validate, all of train do train.
    rows = heads.rows_of(
        "trials", str(embeddings(tmp_path / "divided.pt", labels, 2, "valid")), ["softmax_cross_entropy"], made
    )
    assert "--num_valid" not in next(rows)
    found = relabel.wrong_labels(load_embeddings(tmp_path / "divided.pt"), 1.0)
    assert (found["train"] != labels)[valid].any()
    assert torch.equal(found["valid"], labels)
    with pytest.raises(SystemExit, match="5 classes do not divide 7 classes"):
        relabel.wrong_labels(load_embeddings(embeddings(tmp_path / "seven.pt", labels % 7, 2)), 0.4)


@pytest.mark.parametrize(("flags", "file"), [([], "beam_search"), (["--short"], "beam_search_short")])
def test_each_arm_of_beam_search_has_five_seeds_and_a_pretraining_with_the_others(flags, file):
    rows = [train_beam_search.parse_arguments(shlex.split(row)[2:]) for row in commands("beam_search", *flags)]
    assert {str(row.results) for row in rows} == {f"results/{file}.csv"}
    resolved = [vars(row) for row in rows]
    arms = Counter((row["arm"], row["method"]) for row in resolved)
    assert set(arms.values()) == {5}
    assert ("cross_entropy", "softmax_cross_entropy") in arms
    pretrainings = Counter(tuple(row[name] for name in train_beam_search.PRETRAINING) for row in resolved)
    assert list(pretrainings.values()) == [len(arms)] * 5


SHORT = " --n_epochs 16 --lr_schedule cosine --precision bf16"


@pytest.mark.parametrize(("table", "seeds"), [("table1", "012"), ("table4", "01")])
def test_short_rows_are_the_tables_but_for_schedule_and_precision(rows_of, table, seeds):
    of_one_seed = [row for row in rows_of[table] if "--seed 0" in row]
    expected = [
        row.replace("--seed 0", f"--seed {seed}").replace(f"{table}.csv", f"{table}_short.csv") + SHORT
        for seed in seeds
        for row in of_one_seed
    ]
    assert commands(table, "--short") == expected


def test_evidence_comes_in_the_order_of_what_is_asked_for_most(rows_of):
    rows = commands("evidence")
    published = [row.replace(" --precision bf16", "") for row in rows if "--n_epochs" not in row]
    assert rows[: len(published)] == [row for row in rows if "--n_epochs" not in row]
    smoothed = published.pop(6)
    assert smoothed == f"{published[4].replace('table1.csv', 'table1_smoothing.csv')} --label_smoothing .1"
    assert sorted(published) == sorted([*published[:2], *rows_of["table1"]])
    first = [re.search(r"--method (\w+).* --p_k (\S+).*--seed (\d)", row).groups() for row in published[:8]]
    assert first == [
        ("softmax_cross_entropy", "1.", "2"),
        ("splitter_selection", ".2", "2"),
        ("softmax_cross_entropy", "1.", "1"),
        ("splitter_selection", ".2", "1"),
        ("softmax_cross_entropy", "1.", "0"),
        ("splitter_selection", ".2", "0"),
        ("softsort", ".2", "0"),
        ("sinkhorn_sort", "0.", "0"),
    ]
    short = [*commands("table1", "--short"), *(row for row in commands("table4", "--short") if "--seed 0" in row)]
    assert rows[len(published) + 1 :] == [*rows_of["scratch"], *short, *rows_of["strong"]]


def test_evidence_runs_at_low_priority_and_says_where_it_stands(tmp_path):
    flags = [*QUICK.split(), "--jobs", "1", "--logs", tmp_path / "logs", "--results", tmp_path / "r.csv"]

    def status() -> list[str]:
        done = subprocess.run([EVIDENCE, "--status", *flags], capture_output=True, text=True, check=True)
        return [line.rpartition(": ")[2] for line in done.stdout.splitlines()]

    number = len(commands("evidence"))
    assert status() == ["waiting"] * number + [f"# 0 of {number} rows done"]
    process = subprocess.Popen([EVIDENCE, *flags], stdout=subprocess.PIPE, text=True)
    try:
        wait_for(lambda: len(read_rows(tmp_path / "r.csv")) >= 2, seconds=300)
        assert os.getpriority(os.PRIO_PROCESS, process.pid) == 19
    finally:
        process.terminate()
    process.communicate(timeout=60)
    assert status()[0] == "done"
    assert status()[-2] == "waiting"


# Killed in the middle.

QUICK = "--dataset digits --limit_train 24 --batch_size 8 --n_epochs 3 --device cpu --threads 1"
# What a clock decides, and what a continued run says of itself.
TIMES = (
    *("train_seconds", "eval_seconds", "images_per_second", "peak_memory_mib", "started_utc", "finished_utc"),
    *("times_resumed", "git_commit"),
)


def outcome(results: Path) -> list[dict[str, str]]:
    rows = sorted(read_rows(results), key=lambda row: row["run_id"])
    return [{name: cell for name, cell in row.items() if name not in TIMES} for row in rows]


def children(pid: int) -> list[int]:
    threads = Path(f"/proc/{pid}/task").glob("*/children")
    return sorted(int(child) for thread in threads for child in thread.read_text().split())


@pytest.mark.skipif(sys.platform != "linux", reason="finds the rows' processes in /proc")
def test_a_sweep_killed_in_the_middle_ends_with_the_same_rows(tmp_path):
    results, undisturbed = tmp_path / "r.csv", tmp_path / "undisturbed" / "r.csv"
    flags = [f"--method {method} {QUICK}".split() for method in ("softsort", "neuralsort")]
    (tmp_path / "rows").write_text(
        "\n".join(f"{sys.executable} {train_cifar100.__file__} {' '.join(row)} --results {results}" for row in flags)
    )

    def start() -> subprocess.Popen:
        with (tmp_path / "rows").open() as file:
            command = [sys.executable, ROOT / "scripts" / "launch.py", "--logs", tmp_path / "logs", "--jobs", "2"]
            return subprocess.Popen(command, stdin=file, stdout=subprocess.PIPE, text=True, cwd=tmp_path)

    def says(text: str, number: int) -> bool:
        logs = (tmp_path / "logs").glob(f"{number:02}-*.log")
        return any(text in log.read_text() for log in logs)

    first = start()
    wait_for(lambda: says("epoch 1/3", 1), seconds=300)
    os.kill(children(first.pid)[0], signal.SIGKILL)  # row 1, which is tried again
    wait_for(lambda: says("epoch 1/3", 2) and says("epoch 2/3", 1), seconds=300)
    first.kill()
    first.communicate()

    second = start()
    printed = second.communicate(timeout=120)[0]
    assert second.returncode == 0, printed
    assert "FAILED" not in printed

    for row in flags:
        assert train_cifar100.main([*row, "--results", str(undisturbed)]) == 0
    assert outcome(results) == outcome(undisturbed)


SOURCED = ("begin.sh", "environment.sh", "help.sh", "published.sh")


@pytest.mark.parametrize("script", sorted((ROOT / "scripts").glob("*.sh")), ids=lambda path: path.name)
def test_help_says_what_a_script_does_and_does_nothing(script, tmp_path):
    if script.name in SOURCED:
        pytest.skip("other scripts source it")
    (tmp_path / "scripts").mkdir()  # without a virtual environment: nothing is installed, and nothing begins
    names = (script.name, "begin.sh", "help.sh")
    for name in names:
        (tmp_path / "scripts" / name).write_bytes((ROOT / "scripts" / name).read_bytes())
    done = subprocess.run(["bash", f"scripts/{script.name}", "--help"], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    lines = script.read_text().splitlines()
    assert done.stdout.splitlines()[0] == lines[1].removeprefix("# ")
    assert len(done.stdout.splitlines()) == next(i for i, line in enumerate(lines) if not line.startswith("#")) - 1
    assert sorted(path.name for path in tmp_path.rglob("*")) == sorted(["scripts", *names])
