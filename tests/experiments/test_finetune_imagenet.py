"""Fine-tuning as a user meets it: rows per seed, protocol, resume, sources, refusals with a sentence."""

import itertools
import math
import subprocess
import sys
from functools import partial
from pathlib import Path

import boto3
import pytest
import torch
from data.transfers.object_store import PUBLISHED
from experiments.shared import finetune_flags
from experiments.shared.checkpoint import CURRENT, read_checkpoint
from experiments.shared.metrics import TOP_K
from experiments.shared.run_record import read_rows
from torch import nn

from data.embeddings import EmbeddingBatches, StoreWriter, open_store, split_rows
from experiments import finetune_imagenet as script
from experiments.finetune_imagenet21k import IMAGENET_21K
from models.heads import head
from tests.experiments import runs
from tests.experiments.runs import check_columns, check_history, check_refused, check_resumes, only_run
from topk_losses import METHODS

ROOT = Path(__file__).parent.parent.parent
NUM_CLASSES, DIM, TRAIN, TEST = 24, 12, 640, 103
QUICK = ["--batch_size", "50", "--eval_freq", "5", "--nloglr", "2", "--num_valid", "32"]
QUICK += ["--device", "cpu", "--threads", "1"]


def rows_and_labels(seed=0):
    """Class centres and noise: something a head can learn."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(NUM_CLASSES, DIM, generator=generator)
    for name, rows in (("train", TRAIN), ("test", TEST)):
        labels = torch.arange(rows) % NUM_CLASSES
        yield name, (centres[labels] + torch.randn(rows, DIM, generator=generator)).half(), labels


def made_store(folder, change=lambda name, embeddings: None, splits=("train", "test")):
    """A store of these splits, valid of the rows of test; `change` may spoil them."""
    writer = StoreWriter(folder, dim=DIM, dtype=torch.float16, backbone="synthetic", resolution=32)
    made = {name: rows for name, *rows in rows_and_labels()}
    for name, (embeddings, labels) in {**made, "valid": made["test"]}.items():
        if name in splits:
            change(name, embeddings)
            writer.write(name, 0, embeddings, labels)
    writer.finish()
    return folder


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return made_store(tmp_path_factory.mktemp("stores") / "made.store")


def command(store, results, flags="", method="neuralsort", n_epochs=2):
    flags = f"-d {store} --method {method} --n_epochs {n_epochs} --results {results} {flags}"
    return [*QUICK, *flags.split()]


COMPARED = {"file": "evaluations.csv", "apart": ["num_heads"]}  # heads that a kill left at other steps go on apart
outcome = partial(runs.outcome, **COMPARED)


# The record.


def test_a_run_leaves_a_row_and_a_folder(store, results, capsys):
    assert script.main(command(store, results)) == 0
    printed = capsys.readouterr().out
    (row,) = read_rows(results)
    assert row["run_id"].startswith(f"{NUM_CLASSES}x{DIM}-")
    assert "-neuralsort-pk_0.2_0.2_0.2_0.2_0.2-2epochs-seed0-" in row["run_id"]
    assert str(results) in printed
    assert "train: ram: " in printed  # where the batches are kept

    # 32 validate, 12 steps of 50 make an epoch: the first, the fifth, the tenth and the last are evaluated.
    history = check_history(results, row, "step", "evaluations.csv")
    assert [(each["epoch"], each["step"]) for each in history] == [
        *((1, 1), (1, 5), (1, 10), (1, 12)),
        *((2, 13), (2, 17), (2, 22), (2, 24)),
    ]
    assert [each["train_steps"] for each in history] == [1, 4, 5, 2] * 2
    assert (row["train_images"], row["valid_images"], row["test_images"]) == ("608", "32", "103")
    assert (row["backbone"], row["resolution"], row["embedding_dtype"]) == ("synthetic", "32", "float16")
    assert float(row["test_top5"]) > 0.5  # something was learnt: chance is .21
    check_columns(script, row, script.UNRECORDED)
    assert sorted(path.name for path in only_run(results).iterdir()) == [
        CURRENT,
        "config.json",
        "evaluations.csv",
        "run.lock",
    ]


def test_the_figures_are_those_of_a_plain_training_loop(store, results):
    """Written anew with nothing but PyTorch and the order of the batches."""
    script.main(command(store, results, "--num_valid 40 --split_seed 3", "softmax_cross_entropy"))
    (row,) = read_rows(results)

    made = open_store(store)
    train_rows, valid_rows = split_rows(TRAIN, 40, 3)
    torch.manual_seed(0)
    model = nn.Linear(DIM, NUM_CLASSES)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    batches = EmbeddingBatches(made["train"], 50, rows=train_rows)
    losses = []
    for epoch in (1, 2):
        for embeddings, labels in batches.epoch(epoch):
            loss = nn.functional.cross_entropy(model(embeddings.float()), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    everything = {name: (embeddings.float(), labels) for name, embeddings, labels in rows_and_labels()}
    everything["valid"] = tuple(each[valid_rows] for each in everything["train"])
    for split in ("valid", "test"):
        embeddings, labels = everything[split]
        logits = model(embeddings).detach()
        loss = nn.functional.cross_entropy(logits, labels)
        assert float(row[f"last_{split}_loss"]) == pytest.approx(loss.item(), rel=1e-4)
        for k in TOP_K:
            hits = (logits.topk(k).indices == labels[:, None]).any(1)
            assert float(row[f"last_{split}_top{k}"]) == pytest.approx(hits.float().mean().item(), abs=1.5 / len(hits))
    assert float(row["last_train_loss"]) == pytest.approx(sum(losses[12:]) / 12, rel=1e-4)


@pytest.mark.parametrize(
    "flags",
    [
        *(f"--method {method} --seeds 0 1" for method in METHODS),
        # Published commands, as they stand.
        "--nloglr 4.5 --p_k .2 .2 .2 .2 .2  --m 16  --method bitonic  --distribution logistic_phi "
        "--inverse_temperature 1.  --art_lambda .5",
        "--nloglr 4.5 --p_k .25 .0 .0 .0 .75  --m 16  --method splitter_selection  --distribution logistic "
        "--inverse_temperature .5",
        "-m 16 --nloglr 4.5 --method softmax_cross_entropy --p_k 1.  0. 0. 0. 0.",
        "--m 16 --nloglr 4.5 --method softsort --inverse_temperature 0.5 --p_k .5  0. 0. 0. .5 --seed 3 --device cpu",
    ],
)
def test_every_method_and_what_is_published_train(store, results, flags):
    short = f"-d {store} {flags} --n_epochs 1 --batch_size 300 --results {results}"
    assert script.main(short.split()) == 0
    assert len(read_rows(results)) == 1 + ("--seeds" in flags)


@pytest.mark.parametrize(
    ("defaults", "num_rows", "flags", "filled"),
    [
        # As published.
        (script.IMAGENET_1K, 1_231_167, "", "--batch_size 500 --n_epochs 20 --nloglr 4.5"),
        (IMAGENET_21K, 10_960_223, "", "--batch_size 500 --n_epochs 40 --nloglr 4"),
        (script.IMAGENET_1K, 1900, "", "--batch_size 95 --n_epochs 100 --lr 0.001"),
        (script.IMAGENET_1K, 47_500, "", "--batch_size 500 --n_epochs 22 --lr 0.001"),
        (script.IMAGENET_1K, 1, "", "--batch_size 1 --n_epochs 100 --lr 0.02"),
        # What is given counts for the rest.
        (script.IMAGENET_1K, 1900, "--batch_size 500", "--n_epochs 100 --lr 0.007"),
        (script.IMAGENET_1K, 1900, "--n_epochs 5", "--batch_size 95 --lr 0.02"),
        (script.IMAGENET_1K, 1900, "--nloglr 4.5", "--batch_size 95 --n_epochs 100"),
        (script.IMAGENET_1K, 1900, "--batch_size 500 --n_epochs 20 --lr 1", ""),
    ],
)
def test_defaults_are_published_and_fit_the_number_of_rows(defaults, num_rows, flags, filled):
    args = script.parse_arguments(["--method", "softsort", "--also", "--method neuralsort", *flags.split()], defaults)
    assert (args.data_path, args.results.name) == (defaults.data_path, defaults.results)
    assert (args.eval_freq, args.seeds, args.precision) == (100, [0], "fp32")
    assert script.settle(args, defaults, num_rows) == filled
    for name in ("batch_size", "n_epochs", "lr", "nloglr"):
        assert getattr(args.also[0], name) == getattr(args, name)


@pytest.mark.parametrize(("defaults", "m"), [(script.IMAGENET_1K, "16"), (IMAGENET_21K, "")])
def test_defaults_of_a_smaller_set_learn_and_are_printed(store, results, capsys, monkeypatch, defaults, m):
    monkeypatch.setattr(finetune_flags, "MIN_BATCHES", 5)
    monkeypatch.setattr(finetune_flags, "MIN_STEPS", 100)
    words = f"-d {store} --method softsort --device cpu --threads 1 --results {results}".split()
    assert script.main(words, defaults) == 0
    (row,) = read_rows(results)
    assert (row["m"], row["top1_mode"], row["valid_images"]) == (m, "sm", "128")
    n_epochs, lr = {20: ("20", "0.02"), 40: ("40", "0.01")}[defaults.n_epochs]
    assert (row["batch_size"], row["n_epochs"], row["lr"], row["nloglr"]) == ("102", n_epochs, lr, "")
    told = f"defaults for 512 training rows: --batch_size 102 --n_epochs {n_epochs} --lr {lr}"
    assert told in capsys.readouterr().out
    assert float(row["test_top5"]) > 0.5  # chance is .21


def test_heads_have_label_smoothing_weight_decay_and_a_margin_of_their_own(store, results):
    own = (
        "softmax_cross_entropy",
        "softmax_cross_entropy --label_smoothing .2",
        "softmax_cross_entropy --weight_decay 3",
    )
    also = [f"--also=--method {each}" for each in (*own, "ldr_kl --margin .5", "ldr_kl --margin 0")]
    assert script.main([*command(store, results, method="ldr_kl --inverse_temperature 2"), *also]) == 0
    rows = read_rows(results)
    columns = ("label_smoothing", "weight_decay", "margin")
    assert [tuple(row[column] for column in columns) for row in rows] == [
        *(("", "", ""), ("", "", ""), ("0.2", "", ""), ("", "3.0", ""), ("", "", "0.5"), ("", "", "")),
    ]
    losses = [float(row["last_train_loss"]) for row in rows]
    assert losses[5] == pytest.approx(losses[1] - math.log(NUM_CLASSES), rel=1e-5)  # as cross-entropy, but for log n
    assert len({*losses[1:4]}) == 3
    assert len({row["run_id"] for row in rows}) == 6


def test_validation_has_the_published_size_where_the_set_is_large(store):
    made = open_store(store)
    args = script.parse_arguments(["--method", "softsort", "--batch_size", "50"])
    small = script.Defaults(**{**vars(script.IMAGENET_1K), "num_valid": 30})
    rows = script.rows_of(made, args, small)
    assert {name: len(each) for name, each in rows.items()} == {"train": TRAIN - 30, "valid": 30, "test": TEST}
    assert sorted(torch.cat([rows["train"], rows["valid"]]).tolist()) == list(range(TRAIN))
    for limit, valid in ((7, 1), (500, 100), (6000, 1000), (40000, 2000)):  # of few rows a fifth, of many 5 %
        assert finetune_flags.share_that_validates(limit, 50_000) == valid


def test_a_head_of_several_layers_on_a_part_of_the_rows(store, results):
    flags = "--hidden_dims 9 7 --apply_relu --apply_dropout --limit_train 300 --limit_test 50 --deterministic"
    assert script.main(command(store, results, f"--seeds 3 4 {flags}")) == 0
    first, second = read_rows(results)
    assert first["last_test_loss"] != second["last_test_loss"]
    weights = read_checkpoint(results.parent / "runs" / first["run_id"] / CURRENT)["model"]
    head(DIM, NUM_CLASSES, (9, 7), apply_relu=True, apply_dropout=True).load_state_dict(weights)
    assert (first["train_images"], first["valid_images"], first["test_images"]) == ("268", "32", "50")


def test_where_the_batches_are_kept_changes_nothing(store, tmp_path):
    files = [tmp_path / mode / "r.csv" for mode in ("ram", "stream")]
    for file in files:
        assert script.main(command(store, file, f"--batches {file.parent.name}")) == 0
    first, second = (outcome(file, "seed")["0"] for file in files)
    assert first[1:] == second[1:]
    assert (first[0]["batch_source"], second[0]["batch_source"]) == ("ram", "stream")
    assert first[0]["run_id"] == second[0]["run_id"]


def test_the_official_loss_gives_the_same_row(store, results):
    for implementation in ("ours", "difftopk"):
        flags = f"--p_k .5 0 0 0 .5 --distribution logistic --seeds 0 1 --implementation {implementation}"
        assert script.main(command(store, results, flags, "splitter_selection")) == 0
    rows = read_rows(results)
    for ours, official in zip(rows[:2], rows[2:]):
        assert (ours["implementation"], official["implementation"]) == ("ours", "difftopk")
        for column in ("last_train_loss", "last_test_loss"):
            assert float(ours[column]) == pytest.approx(float(official[column]), rel=1e-3)


# Several seeds and configurations.

ALSO = ("--method softsort --p_k .5 0 0 0 .5", "--method softmax_cross_entropy --nloglr 3")
STATEFUL = ("--method perturbed_topk", *(f"--method lml --inverse_temperature {each}" for each in ("auto", ".1:2")))


def with_also(*configurations):
    return [word for text in configurations for word in ("--also", text)]


@pytest.mark.parametrize(
    ("flags", "alone"),
    [
        ("--apply_dropout", "--order_seed 5"),
        ("--order_seed own --hidden_dims 8 --apply_dropout", ""),
        ("--precision bf16", "--order_seed 5"),
    ],
)
def test_heads_trained_in_one_pass_have_the_bits_of_separate_runs(store, tmp_path, flags, alone):
    together, separate = tmp_path / "together" / "r.csv", tmp_path / "separate" / "r.csv"
    losses = ("--method neuralsort", *ALSO, *STATEFUL)
    assert script.main([*command(store, together, f"{flags} --seeds 5 1"), *with_also(*losses[1:])]) == 0
    for loss, seed in itertools.product(losses, (5, 1)):
        assert script.main([*command(store, separate, f"{flags} --seed {seed} {alone}"), *loss.split()]) == 0
    rows, others = read_rows(together), read_rows(separate)
    assert [row["run_id"] for row in rows] == [row["run_id"] for row in others]
    assert [row["num_heads"] for row in (*rows, *others)] == ["12"] * 12 + ["1"] * 12
    found, expected = outcome(together), outcome(separate)
    for row, other in zip(rows, others):  # lml's kernel rounds by where rows lie in memory
        assert row["method"] == "lml" or found[row["run_id"]] == expected[row["run_id"]]
        assert float(row["last_test_loss"]) == pytest.approx(float(other["last_test_loss"]), rel=1e-5)
    assert [row["nloglr"] for row in rows[:6:2]] == ["2.0", "2.0", "3.0"]
    assert len({row["last_test_loss"] for row in rows}) == 12


def test_recorded_configurations_are_skipped_and_force_repeats_them(store, results, capsys):
    script.main([*command(store, results), *with_also(ALSO[0])])
    before = read_rows(results)
    capsys.readouterr()
    assert script.main([*command(store, results), *with_also(*ALSO)]) == 0
    assert capsys.readouterr().out.count("skipped: ") == 2
    after = read_rows(results)
    assert after[:2] == before
    assert [row["num_heads"] for row in after] == ["2", "2", "1"]
    assert script.main([*command(store, results), *with_also(*ALSO), "--force"]) == 0
    repeated = read_rows(results)
    assert [row["num_heads"] for row in repeated] == ["3", "3", "3"]
    assert min(row["started_utc"] for row in repeated) > after[2]["finished_utc"]


# Resume.


@pytest.mark.parametrize("splits", [("train", "valid", "test"), ("train", "valid"), ("train",)])
def test_rows_of_the_store_s_own_validate_and_a_test_can_be_missing(tmp_path, capsys, splits):
    made = made_store(tmp_path / "own.store", splits=splits)

    def words(results: Path) -> list[str]:
        return [word for word in command(made, results, n_epochs=3) if word not in ("--num_valid", "32")]

    row = check_resumes(script, words, ("evaluate", 3), tmp_path, capsys, **COMPARED)
    counts = [row.get(f"{name}_images") or 0 for name in ("train", "valid", "test")]
    assert list(map(int, counts)) == [
        640 if "valid" in splits else 512,
        TEST if "valid" in splits else 128,
        TEST * ("test" in splits),
    ]
    assert row.get("test_top1", row["valid_top1"]) == row["valid_top1"]  # the same rows
    assert ("test_top1" in row, "last_test_loss" in row) == ("test" in splits,) * 2
    assert f"{'test' if 'test' in splits else 'valid'} top-1 {float(row['valid_top1']):.4f}" in capsys.readouterr().out


# Sources.


LAYOUTS = {
    "wsl-32x48d-320": ("train_embeddings", "train_labels", "test_embeddings", "test_labels"),
    "efficientnet-l2-800": ("train_embeddings", "train_labels", "val_embeddings", "val_labels"),
    "wsl-32x48d-224-21k": tuple(
        f"imagenet21k_{name}" for name in ("train_embeddings", "train_labels", "val_embeddings", "val_labels")
    ),
}


def pickle_in_layout(path, layout):
    tensors = [each for _, embeddings, labels in rows_and_labels() for each in (embeddings, labels)]
    torch.save(dict(zip(LAYOUTS[layout], tensors)), path)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_published_file_arrives_by_itself(name, s3, store, tmp_path, results):
    """By its short name from a bucket, by hand from the disk: the same embeddings, so the same row."""
    file = tmp_path / PUBLISHED[name]
    pickle_in_layout(file, name)
    client = boto3.client("s3", endpoint_url=s3)
    client.create_bucket(Bucket="publicdata1")
    client.upload_file(str(file), "publicdata1", PUBLISHED[name], ExtraArgs={"ACL": "public-read"})
    flags = f"--endpoint_url {s3} --cache_dir {tmp_path / 'cache'}"
    assert script.main(command(name, results, flags, n_epochs=1)) == 0
    (row,) = read_rows(results)
    assert row["data_path"] == name
    assert row["resolution"] in ("320", "800", "224")
    other = results.with_name("by_hand.csv")
    assert script.main(command(file, other, n_epochs=1)) == 0
    by_hand = read_rows(other)[0]
    for column in ("run_id", "last_test_loss", "backbone", "resolution"):
        assert by_hand[column] == row[column]
    # Once it is converted, neither the object nor the downloaded file is needed.
    client.delete_object(Bucket="publicdata1", Key=PUBLISHED[name])
    next((tmp_path / "cache").glob("*.p")).unlink()
    assert script.main(command(name, tmp_path / "again.csv", flags)) == 0


def test_a_file_of_another_layout_is_answered_with_the_command_that_reads_it(tmp_path, results, capsys):
    tensors = [each for _, embeddings, labels in rows_and_labels() for each in (embeddings, labels)]
    torch.save(dict(zip("abcd", tensors)), tmp_path / "own.p")
    named = "python -m data.embeddings convert FILE FOLDER --train_embeddings KEY"
    check_refused(script.main, command(tmp_path / "own.p", results), named, capsys, status=1)


# Refusals.


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--method softsort --order_seed their", "got 'their'"),
        ("--method softsort --num_valid 640", "must leave 1 to train"),
        ("--method softsort --margin 1", "--margin is of ldr_kl: leave it out, with softsort"),
        ("--method softsort --label_smoothing 1", "label_smoothing must lie in [0, 1), got 1"),
        ("--method softsort --label_smoothing .1 --implementation difftopk", "difftopk has no label_smoothing"),
        ("--method softsort --limit_train 641", "--limit_train must not exceed the 640 rows"),
        ("--method softsort --batch_size 609", "--batch_size must not exceed the 608 training rows"),
        ("--method softsort --hidden_dims 9 99999999999", "heads of widths 12 9 99999999999 24, with"),
        ("--method softsort -d nowhere/at/all.store", "there is no file nowhere/at/all.store"),
        ("--method softsort -d wsl-32x48d-32", "did you mean 'wsl-32x48d-320'"),
        (f"--method softsort -d ./{PUBLISHED['efficientnet-l2-800']}", "give the short name efficientnet-l2-800"),
        ("--method softsort -d http://[::1/x.pt", "a source is s3://bucket/key"),
        ("--method softsort -d s3://bucket/x.pt --endpoint_url garbage", "must be an address"),
    ],
)
def test_a_wrong_command_line_is_answered_with_a_sentence(store, tmp_path, results, capsys, flags, message):
    words = [*QUICK, "-d", str(store), "--results", str(results), *flags.split()]
    check_refused(script.main, words, message, capsys)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("--method softsrt", "--also '--method softsrt': argument --method: unknown method"),
        ("--p_k .5 0 0 0 .5", "required: --method"),
        ("--method softsort --seeds 1", "--seeds belongs to the whole command; within are --"),
        ("--method softsort --p_k .5 .6", "--also '--method softsort --p_k .5 .6': p_k must"),
        ("--method 'softsort", "No closing quotation"),
        ("--method neuralsort --lr .01 --p_k .2 .2 .2 .2 .2", "the command has this configuration already"),
    ],
)
def test_a_wrong_configuration_is_answered_with_a_sentence(store, tmp_path, results, capsys, text, message):
    check_refused(script.main, [*command(store, results), "--also", text], message, capsys)
    assert list(tmp_path.iterdir()) == []


def test_a_loss_that_cannot_be_is_refused_before_anything_is_downloaded(tmp_path, results, capsys, monkeypatch):
    monkeypatch.setattr(script, "open_store_of", lambda *_: pytest.fail("asked for data"))
    check_refused(script.main, command("nowhere", results, "--p_k .5"), "sum to 1", capsys)


def test_a_damaged_store_is_answered_with_a_sentence(tmp_path, results, capsys):
    half = made_store(tmp_path / "half.store", splits=("test",))
    check_refused(script.main, command(half, results), "has no split 'train'", capsys, status=1)
    folder = made_store(tmp_path / "damaged.store")
    shard = next(folder.glob("test*.labels.npy"))
    shard.write_bytes(shard.read_bytes()[:-8] + (10**6).to_bytes(8, "little"))
    named = f"test: labels must be in [0, 23], since num_classes is 24; row {TEST - 1} has 1000000"
    check_refused(script.main, command(folder, results), named, capsys, status=1)
    shard = next(folder.glob("train*.embeddings.npy"))
    shard.write_bytes(shard.read_bytes()[:-10])
    check_refused(script.main, command(folder, results), shard.name, capsys, status=1)
    assert not results.exists()


@pytest.mark.parametrize(
    ("split", "row", "value", "method"),
    [
        ("train", int(split_rows(TRAIN, 32, 0)[0][123]), math.nan, "neuralsort"),
        ("train", int(split_rows(TRAIN, 32, 0)[1][30]), -math.inf, "neuralsort"),
        ("test", 0, math.inf, "neuralsort"),
        *(("test", 102, math.nan, method) for method in METHODS),
    ],
)
def test_a_row_that_is_not_finite_is_named(tmp_path, results, capsys, split, row, value, method):
    def spoil(name, embeddings):
        if name == split:
            embeddings[row, 3] = value

    broken = made_store(tmp_path / "broken.store", spoil)
    named = f"error: row {row} of the split {split} of {broken} holds {value}: "
    check_refused(script.main, command(broken, results, "--seeds 0 1", method, 1), named, capsys, status=1)
    assert not results.exists()


def test_a_loss_that_is_not_finite_ends_the_run_with_a_sentence_that_names_its_head(store, results, capsys):
    words = [*command(store, results, "--seeds 3 4"), "--also", "--method softsort --lr 1e38"]
    named = "on the valid rows after epoch 1 step 1/12, seed 3, with method softsort"
    check_refused(script.main, words, named, capsys, status=1)
    assert not results.exists()


def test_the_21k_script_runs_as_a_program(store, results):
    program = [sys.executable, str(ROOT / "experiments" / "finetune_imagenet21k.py")]
    done = subprocess.run(
        [*program, *command(store, results, n_epochs=1)], capture_output=True, text=True, cwd=results.parent
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert len(read_rows(results)) == 1
