"""What holds for each training script: its row, a second and a forced time, seeds, locks, damage, refusals."""

import contextlib
import json
import re
import resource
import shlex
import shutil

import pytest
import torch
from filelock import FileLock

from experiments import finetune_imagenet, train_beam_search, train_cifar100, train_knn
from experiments.common import provenance
from experiments.common.door import EXPECTED
from experiments.common.rows import read_rows
from experiments.common.run import Run
from experiments.common.settings import cell, identifying
from experiments.common.torch_files import save_torch_file
from studies.runs import command_of
from tests.experiments import scripts
from tests.experiments.scripts import MACHINE, SCRIPTS, name_of, outcome, rows_of

each_script = pytest.mark.parametrize("script", SCRIPTS, ids=name_of)


@pytest.fixture(scope="module")
def embeddings(tmp_path_factory):
    return scripts.embeddings(tmp_path_factory.mktemp("set") / "e.pt")


@pytest.fixture
def run(embeddings, monkeypatch, tmp_path):
    """Run a script in this process, quickly; more: further flags."""
    monkeypatch.setattr(train_cifar100, "resnet_cifar", scripts.small_network)

    def call(script, more="", flags=None, results=tmp_path / "r.csv"):
        words = shlex.split((flags or SCRIPTS[script]).replace("EMBEDDINGS", str(embeddings)))
        words = [*MACHINE.split(), "--results", str(results), *words, *more.split()]
        assert script.main(words) == 0
        return rows_of(results)

    return call


@each_script
def test_a_row_has_its_flags_and_a_second_command_is_skipped(run, script, tmp_path, capsys):
    rows = run(script)
    for row in rows:
        assert {item.name for item in identifying(name_of(script))} <= row.keys()
        assert not {"results", "force", "also", "checkpoint_seconds"} & row.keys()
        assert (row["device"], row["threads"], row["seed"]) == ("cpu", "1", "0")
        assert (tmp_path / "runs" / row["run_id"] / "config.json").exists()
    before = (tmp_path / "r.csv").read_bytes()
    capsys.readouterr()
    assert run(script) == rows
    assert (tmp_path / "r.csv").read_bytes() == before
    assert capsys.readouterr().out.count("skipped:") == len(rows)
    assert rows == read_rows(tmp_path / "r.csv")


@each_script
def test_force_repeats_the_run_with_the_same_bits(run, script, tmp_path):
    rows = run(script)
    first = outcome(tmp_path / "r.csv")
    again = run(script, "--force")
    assert outcome(tmp_path / "r.csv") == first
    assert [row["times_resumed"] for row in again] == ["0"] * len(rows)
    assert {row["started_utc"] for row in again}.isdisjoint({row["started_utc"] for row in rows})


class Stopped(Exception):
    """As by a time limit."""


@each_script
def test_the_configuration_of_a_run_that_continued_elsewhere_says_what_its_row_says(run, script, tmp_path, monkeypatch):
    """Also between the start of a command and the training, where it may be killed once more."""

    def stop(*_, **others) -> None:
        raise Stopped

    def write_and_stop(run, last: bool, real=Run._write_checkpoint) -> None:
        real(run, last)
        if "pretrained" not in run.name:
            raise Stopped

    def on(device: str, **methods) -> None:
        """Start the command on a device, until one of these methods of Run stops it."""
        with monkeypatch.context() as patch, contextlib.suppress(Stopped):
            patch.setattr(provenance, "device_name", lambda _: device)
            for name, method in methods.items():
                patch.setattr(Run, name, method)
            run(script)

    on("Xeon", resume=stop)  # before there is anything to continue
    on("Xeon", _write_checkpoint=write_and_stop)
    paths = [path for path in tmp_path.glob("runs/*/config.json") if "pretrained" not in path.parent.name]
    assert len(paths) == len(list(tmp_path.glob("runs/*"))) - (script is train_beam_search)
    before = [path.read_text() for path in paths]
    on("EPYC", resume=stop)
    assert [path.read_text() for path in paths] == before
    on("EPYC")
    rows = rows_of(tmp_path / "r.csv")
    for row in rows:
        config = json.loads((tmp_path / "runs" / row["run_id"] / "config.json").read_text())
        assert {"device_name", "git_commit", "times_resumed", "seed"} <= config.keys() & row.keys()
        for name in config.keys() & row.keys():
            assert cell(config[name]) == row[name], name
    assert ("Xeon, then EPYC", "1") in {(row["device_name"], row["times_resumed"]) for row in rows}


@each_script
def test_seeds_are_runs_of_their_own(run, script, tmp_path):
    run(script, "--seeds 2 5")
    together = outcome(tmp_path / "r.csv")
    apart = {}
    for seed in (5, 2):
        run(script, f"--seed {seed}", results=tmp_path / str(seed) / "r.csv")
        apart |= outcome(tmp_path / str(seed) / "r.csv")
    assert together == apart
    assert len({str(weights) for _, _, weights in together.values()}) == len(together)


@each_script
def test_a_run_that_another_process_has_is_refused(run, script, tmp_path):
    rows = run(script)
    (tmp_path / "r.csv").unlink()
    lock = FileLock(tmp_path / "runs" / rows[0]["run_id"] / "run.lock")
    with lock, pytest.raises(EXPECTED, match="is being run by another process"):
        run(script)
    assert not (tmp_path / "r.csv").exists()


@each_script
@pytest.mark.parametrize("damage", ["truncated", "other weights", "no file of torch"])
def test_a_checkpoint_that_does_not_load_names_the_folder_to_delete(run, script, tmp_path, damage):
    folder = tmp_path / "runs" / run(script)[0]["run_id"]
    (tmp_path / "r.csv").unlink()
    path = folder / "checkpoint.pt"
    if damage == "truncated":
        path.write_bytes(path.read_bytes()[:-100])
    elif damage == "no file of torch":
        path.write_text("nothing")
    else:
        saved = torch.load(path, weights_only=True)
        saved["model"].popitem()
        torch.save(saved, path)
    with pytest.raises(EXPECTED, match="delete") as error:
        run(script)
    assert str(folder) in str(error.value)
    assert not (tmp_path / "r.csv").exists()


DIVERGING = {train_beam_search: "--pretrain_lr 3e37 --lr 3e37"}


@each_script
def test_what_is_not_finite_is_never_recorded(run, script, tmp_path):
    with pytest.raises(EXPECTED, match=r"(loss|weights|embedding).* Try a smaller --lr"):
        run(script, DIVERGING.get(script, "--lr 1e38"))
    assert not (tmp_path / "r.csv").exists()
    for path in tmp_path.rglob("checkpoint.pt"):
        assert all(tensor.isfinite().all() for tensor in torch.load(path, weights_only=True)["model"].values())


@each_script
def test_a_disk_that_is_full_is_a_sentence_and_the_command_continues(run, script, tmp_path):
    """The system refuses files above 4 KB, as a full disk refuses any."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, limits[1]))
    try:
        with pytest.raises(EXPECTED, match=r"cannot write .*bytes are free"):
            run(script)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not (tmp_path / "r.csv").exists()
    run(script)
    assert not list(tmp_path.rglob("*.tmp"))


NEITHER = "--method splitter_selection"
TOY = "--arm retain --method softsort --dataset reversal"
# Of train_knn, and a value of each; flags of the schedule are those of a whole list of runs.
VALUES = {
    "inverse_temperature": "1",
    "distribution": "cauchy",
    "art_lambda": "0.5",
    "loss": "mass",
    "sorted": "",
    "num_candidates": "100",
    "self_match": "",
    "model": "cnn",
    "dim": "128",
    "hidden_dims": "8",
    "lr": "0.001",
    "nloglr": "3",
    "weight_decay": "0.0005",
    "compile": "",
}
BASELINES = [name for name in train_knn.METHODS if name not in train_knn.RELAXATIONS]
FLAGS_WITHOUT_EFFECT = []
for name in train_knn.RELAXED_COLUMNS:
    for method in BASELINES:
        words = f"--dataset digits --method {method} --{name} {VALUES[name]}"
        FLAGS_WITHOUT_EFFECT.append((train_knn, words, f"--{name} is of"))
for name in [*sorted({*train_knn.TRAINING_COLUMNS} - {*train_knn.SCHEDULE}), "compile"]:
    for method in train_knn.UNTRAINED:
        words = f"--dataset digits --method {method} --{name} {VALUES[name]}"
        FLAGS_WITHOUT_EFFECT.append((train_knn, words, f"--{name} is of"))
for flag in ("--p_k .5 0 0 .5", "--m 16", "--top1_mode sm", "--nll_weight 0.3"):
    words = f"--arm cross_entropy --method softmax_cross_entropy --dataset reversal {flag}"
    FLAGS_WITHOUT_EFFECT.append((train_beam_search, words, f"{flag.split()[0]} is of"))
FLAGS_WITHOUT_EFFECT.append((finetune_imagenet, f"-d EMBEDDINGS {NEITHER} --device cpu --compile", "leave it out"))
REFUSED = [
    (train_cifar100, "--dataset digits --method softsort --p_k .5 .2", "must sum to 1|sum"),
    (train_cifar100, "--dataset digits --method softmax_cross_entropy --p_k 0 1", "softmax_cross_entropy"),
    (train_cifar100, "--dataset digits --method neuralsort --p_k .5 0 0 0 .5 --m 3", "m"),
    (train_cifar100, "--dataset digits --method softsort --distribution cauchy", "distribution applies to"),
    (train_cifar100, "--dataset digits --method softmax_cross_entropy --margin 1", "does not take"),
    (train_cifar100, "--dataset digits --method splitter_selecton", "did you mean splitter_selection"),
    (train_cifar100, f"--dataset digits --batch_size 2000 {NEITHER}", "2000 exceeds the 1365 training images"),
    (train_cifar100, f"--dataset digits --device cuda:9 {NEITHER}", "this machine has . GPUs"),
    (train_cifar100, f"--dataset digits --ema 1 {NEITHER}", "--ema: 1 is not between 0.001 and 0.999999"),
    (train_cifar100, f"--dataset digits --lr 0 {NEITHER}", "--lr"),
    (train_cifar100, f"--dataset digits --lr much {NEITHER}", "--lr: 'much' is no number"),
    (train_cifar100, f"--dataset digits --n_epochs 1.5 {NEITHER}", "--n_epochs: '1.5' is no whole number"),
    (train_cifar100, f"--noisy_labels /nowhere/h.pt {NEITHER}", "--noisy_labels: there is no file /nowhere/h.pt"),
    (train_cifar100, "--dataset digits --implementation difftopk --method lml", "difftopk has no lml"),
    (train_cifar100, "--dataset digits --implementation difftopk --method ldr_kl --margin 1", "difftopk has no margin"),
    (train_cifar100, "--dataset digits --method sinkhorn_sort --inverse_temperature 1:2:3", "--inverse_temperature"),
    (finetune_imagenet, f"-d EMBEDDINGS --batch_size 500 {NEITHER}", "500 exceeds the .* training rows"),
    (finetune_imagenet, f"-d EMBEDDINGS --limit_train 500 {NEITHER}", "500 exceeds the 130 training rows"),
    (
        finetune_imagenet,
        f"-d EMBEDDINGS --num_valid 130 {NEITHER}",
        "--num_valid 130 leaves none of the 130 rows to train: give fewer",
    ),
    (
        finetune_imagenet,
        f"-d EMBEDDINGS --num_valid 5000 --limit_train 50 {NEITHER}",
        "--num_valid 5000 leaves none of the 50 rows to train: give fewer",
    ),
    (finetune_imagenet, f"-d /nowhere/e.pt {NEITHER}", "there is no file /nowhere/e.pt"),
    (finetune_imagenet, f"-d EMBEDDINGS --sha256 00 {NEITHER}", "has the SHA-256"),
    (finetune_imagenet, f'-d EMBEDDINGS {NEITHER} --also "--method softsort --n_epochs 3"', "unrecognized arguments"),
    (finetune_imagenet, f'-d EMBEDDINGS {NEITHER} --also "--method softsort --inv .5"', "unrecognized arguments"),
    (finetune_imagenet, f'-d EMBEDDINGS {NEITHER} --also "--method softsort --p_k .1"', "sum"),
    (finetune_imagenet, "-d EMBEDDINGS --method softsort --p_k 0 0 0 0 0 0 0 0 1", "p_k|m"),
    (train_knn, "--dataset digits --method inputs --distribution cauchy", "is of a relaxed top-k, not of"),
    (train_knn, "--dataset digits --method neuralsort --prediction network", "--prediction network is of"),
    (train_knn, "--dataset digits --method inputs --data_dir caf\udce9", "data_dir would be .*in the results file"),
    (train_knn, "--dataset digits --method neuralsort --sorted", "--sorted is of soft_topk alone"),
    (train_knn, "--dataset digits --method neuralsort --k 100", "--k must be below --num_candidates"),
    (train_knn, "--dataset digits --method neuralsort --dim 3", "--dim is of linear and mlp"),
    (train_knn, "--dataset digits --method neuralsort --limit_train 50", "exceeds the 45 training points"),
    (train_knn, "--dataset digits -d EMBEDDINGS --method neuralsort", "by --dataset or by -d"),
    (train_knn, "--dataset digits --method inputs --sha256 00", "--sha256 is of a file, given by -d"),
    (train_knn, "--dataset digits --method inputs --requester_pays", "--requester_pays is of a file, given by -d"),
    (train_knn, "--method inputs --cache_dir FOLDER", "--cache_dir is of a file, given by -d"),
    (train_knn, "-d EMBEDDINGS --method inputs --data_dir FOLDER", "--data_dir is of --dataset, not of -d"),
    (
        train_knn,
        "-d EMBEDDINGS --method neuralsort --model cnn --num_candidates 20 --batch_size 20",
        "cnn takes images",
    ),
    (train_knn, "--dataset digits --method softmax_cross_entrop", "did you mean softmax_cross_entropy"),
    (train_beam_search, "--arm retain --method softmax_cross_entropy", "--arm retain goes with --method"),
    (train_beam_search, "--arm soft_beam --method softsort --m 4", "soft_beam uses the operator alone"),
    *FLAGS_WITHOUT_EFFECT,
    (train_beam_search, "--arm retain --method softsort --inverse_temperature auto", "must be a number"),
    (train_beam_search, "--arm retain --method softsort --noise_rate .1", "unrecognized arguments: --noise_rate"),
    (train_beam_search, f"{TOY} --max_letters 9", "at most 7, got 9"),
    (train_beam_search, f"{TOY} --max_letters 2", "128 exceeds the 27 training pairs"),
    (train_beam_search, f"{TOY} --limit_train 999", "999 exceeds the 721 training words"),
    (train_beam_search, f"{TOY} --beam_size 9", "must not exceed the 6 phonemes"),
]


@pytest.mark.parametrize(("script", "flags", "message"), REFUSED, ids=[f"{name_of(s)} {f}" for s, f, _ in REFUSED])
def test_a_command_that_cannot_be_is_refused_with_a_sentence(run, script, flags, message, tmp_path, capsys):
    with pytest.raises((SystemExit, *EXPECTED)) as error:
        run(script, flags=flags)
    output = f"{error.value} {capsys.readouterr().err}"
    assert re.search(message, output), output
    assert not (tmp_path / "r.csv").exists()


def test_embeddings_with_a_row_that_is_not_finite_are_named(run, embeddings, tmp_path):
    for script in (finetune_imagenet, train_knn):
        content = torch.load(embeddings, weights_only=True)
        content["test_embeddings"][7] = torch.nan
        torch.save(content, tmp_path / "e.pt")
        flags = f"-d {tmp_path / 'e.pt'} --method softsort --batch_size 20"
        flags += " --num_candidates 20 --k 3" if script is train_knn else ""
        with pytest.raises(EXPECTED, match=r"test.* not finite"):
            run(script, flags=flags)
        assert not (tmp_path / "r.csv").exists()


@pytest.mark.parametrize("flag", ["--num_valid 9", "--split_seed 3"])
def test_flags_of_the_split_are_refused_where_the_file_has_its_own(run, embeddings, flag, tmp_path):
    content = torch.load(embeddings, weights_only=True)
    content |= {"valid_embeddings": content["test_embeddings"], "valid_labels": content["test_labels"]}
    torch.save(content, tmp_path / "e.pt")
    flags = f"-d {tmp_path / 'e.pt'} --batch_size 20 --n_epochs 1 {NEITHER}"
    with pytest.raises(EXPECTED, match=f"{flag.split()[0]}: .*e.pt has 40 rows that validate"):
        run(finetune_imagenet, flags=f"{flags} {flag}")
    assert not (tmp_path / "r.csv").exists()
    (row,) = run(finetune_imagenet, flags=flags)
    assert "--num_valid 40" in command_of(row)  # its number is no contradiction
    assert run(finetune_imagenet, flags=f"{flags} --num_valid 40") == [row]


def test_a_results_file_with_a_damaged_line_or_semicolons_is_not_rewritten(run, tmp_path):
    run(train_knn)
    text = (tmp_path / "r.csv").read_text()
    (tmp_path / "r.csv").write_text(text + "cut,sho")
    with pytest.raises(EXPECTED, match=r"line 3 of .*repair or delete"):
        run(train_knn, "--seed 1")
    assert (tmp_path / "r.csv").read_text() == text + "cut,sho"
    (tmp_path / "r.csv").write_text(text.replace(",", ";"))
    with pytest.raises(EXPECTED, match="saved as CSV with commas"):
        run(train_knn, "--seed 1")
    assert (tmp_path / "r.csv").read_text() == text.replace(",", ";")


@pytest.mark.parametrize(
    ("name", "value"),
    [("resolution", (224, 224)), ("resolution", 224.0), ("backbone", "a\n"), ("labels", torch.ones(9))],
)
def test_what_a_file_says_of_itself_writes_no_row_that_cannot_be_read(run, tmp_path, name, value):
    path = scripts.embeddings(tmp_path / "own.pt")
    content = torch.load(path) | {"info": {name: value}}
    torch.save(content, path)
    with pytest.raises(EXPECTED, match=f"{name} would be |says that its {name} is "):
        run(finetune_imagenet, flags=f"-d {path} --batch_size 25 --n_epochs 1 --method softmax_cross_entropy")
    assert not (tmp_path / "r.csv").exists()


def test_the_schedule_of_heads_goes_by_the_number_of_rows(run):
    flags = "-d EMBEDDINGS --eval_freq 0 --method softmax_cross_entropy"
    row, also = run(finetune_imagenet, flags=f'{flags} --n_epochs 2 --also "--method softsort --lr .5"')
    names = ("train_images", "valid_images", "test_images", "batch_size", "m")
    # Of 130 rows a fifth validates; a twentieth of the rest is a batch.
    assert [[found[name] for name in names] for found in (row, also)] == [["104", "26", "40", "5", ""]] * 2
    assert (row["lr"], row["nloglr"], also["lr"]) == ("0.05", "", "0.5")  # 2 / steps
    *_, row = run(finetune_imagenet, "--nloglr 2 --n_epochs 1", flags=flags)
    assert (row["lr"], row["nloglr"], row["n_epochs"]) == ("0.01", "2.0", "1")
    args = finetune_imagenet.parse_arguments(shlex.split(flags))
    for rows, expected in ((104, (5, 100, 0.001)), (1_200_000, (500, 20, 10**-4.5))):  # 2,000 steps; as published
        schedule = finetune_imagenet.fill_in_schedule(args, finetune_imagenet.IMAGENET_1K, rows)
        assert (schedule["batch_size"], schedule["n_epochs"], schedule["lr"]) == expected


def test_streamed_embeddings_give_the_same_row(run, tmp_path):
    run(finetune_imagenet)
    run(finetune_imagenet, "--stream", results=tmp_path / "streamed" / "r.csv")
    assert outcome(tmp_path / "r.csv") == outcome(tmp_path / "streamed" / "r.csv")


def test_baselines_of_neighbours_and_untrained_ones(run, tmp_path):
    flags = "--dataset digits --limit_train 300 --k 3 --method "
    for method in ("inputs", "pca"):
        (row,) = run(train_knn, flags=flags + method, results=tmp_path / method / "r.csv")
        assert float(row["test_top1"]) > 0.8
        assert (row["lr"], row["n_epochs"], row["loss"], row["last_train_loss"]) == ("", "", "", "")


def test_arms_of_a_seed_share_their_pretraining(run, tmp_path):
    base = SCRIPTS[train_beam_search].partition("--arm")[0]
    arms = ("cross_entropy --method softmax_cross_entropy", "soft_beam --method softsort", "retain --method neuralsort")
    for arm in arms:
        rows = run(train_beam_search, flags=f"{base} --arm {arm}")
    assert len({row["pretrained"] for row in rows}) == 1
    assert len(list((tmp_path / "runs").iterdir())) == 1 + len(arms)
    histories = [(tmp_path / "runs" / row["pretrained"] / "updates.csv").read_text() for row in rows]
    assert len(set(histories)) == 1


@each_script
def test_what_a_command_says_of_training_a_finished_run_again_is_true(run, script, tmp_path, capsys):
    """Also of a pretraining, which --force alone does not repeat."""
    run(script)
    if script is not train_beam_search:
        (tmp_path / "r.csv").unlink()
    capsys.readouterr()
    run(script, "--force" if script is train_beam_search else "")
    advice = re.compile(r"^(\S+): finished after .* not trained again \(to train it delete (.*) and give --force\) on ")
    found = [match for match in map(advice.match, capsys.readouterr().out.splitlines()) if match]
    assert found
    for match in found:
        shutil.rmtree(match[2])
    run(script, "--force")
    printed = capsys.readouterr().out
    assert all(f"{match[1]}: starting on" in printed for match in found)


def test_an_arm_names_the_commit_of_its_pretraining(run, tmp_path):
    base = SCRIPTS[train_beam_search].partition("--arm")[0]
    (control,) = run(train_beam_search, flags=f"{base} --arm cross_entropy --method softmax_cross_entropy")
    path = tmp_path / "runs" / control["pretrained"] / "checkpoint.pt"
    saved = torch.load(path)
    saved["info"]["git_commit"] = "1234-dirty"
    save_torch_file(path, saved)
    *_, arm = run(train_beam_search, flags=f"{base} --arm soft_beam --method softsort")
    assert arm["git_commit"] == "+".join(filter(None, ["1234-dirty", control["git_commit"]]))


def printed_by(store, capsys, *losses):
    """The lines of a pass of cross-entropy and other losses over small embeddings."""
    words = f"-d {store} --batch_size 25 --n_epochs 1 --num_valid 20 --eval_freq 0 --device cpu --threads 1".split()
    for loss in losses:
        words += ["--also", loss]
    results = store.with_name("printed.csv")
    assert finetune_imagenet.main([*words, "--method", "softmax_cross_entropy", "--results", str(results)]) == 0
    return capsys.readouterr().out.splitlines(), read_rows(results)


@pytest.mark.parametrize(
    ("losses", "count"),
    [
        (["--method softmax_cross_entropy"], 1),
        (["--method ldr_kl", "--method ldr_kl"], 2),
        (["--method ldr_kl --lr .1", "--method ldr_kl --nloglr 1", "--method ldr_kl --lr 0.10"], 2),
        (["--method ldr_kl", "--method softsort"], 3),
    ],
)
def test_a_loss_that_an_also_repeats_is_named_and_trains_once(losses, count, tmp_path, capsys):
    lines, rows = printed_by(scripts.embeddings(tmp_path / "e.pt"), capsys, *losses)
    repeated = [line for line in lines if line.startswith("repeated: an --also has the settings of another loss, and ")]
    assert len(rows) == count
    assert len(repeated) == 1 + len(losses) - count
    names = {row["run_id"] for row in rows}
    assert all(line.removesuffix(" trains once").split()[-1] in names for line in repeated)


def test_log_lines_of_one_method_have_the_settings_in_which_they_differ(tmp_path, capsys):
    losses = [
        "--method generalized_cross_entropy --q 0.3",
        "--method generalized_cross_entropy --q 0.7 --lr 0.25",
        "--method softsort --p_k .2 .8",
        "--method softsort --p_k .5 .5 --inverse_temperature 2",
        "--method lapsum",
    ]
    lines, _ = printed_by(scripts.embeddings(tmp_path / "e.pt"), capsys, *losses)
    shown = [line.partition(" epoch 1/1 ")[0] for line in lines if " epoch 1/1 " in line]
    rate = shown[1].rpartition(" lr ")[2]
    assert float(rate) != 0.25
    assert shown == [
        "softmax_cross_entropy",
        f"generalized_cross_entropy q 0.3 lr {rate}",
        "generalized_cross_entropy q 0.7 lr 0.25",
        "softsort p_k 0.2 0.8 inverse_temperature 0.5",
        "softsort p_k 0.5 0.5 inverse_temperature 2.0",
        "lapsum",
    ]
