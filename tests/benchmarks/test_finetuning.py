"""The benchmarks of fine-tuning run, and what they compare is equal where it should be."""

import csv
import multiprocessing
import pathlib
import sys
from subprocess import CompletedProcess
from types import SimpleNamespace

import pytest

from benchmarks import batch_sources, finetuning, published_formats
from experiments import finetune_imagenet
from experiments.finetune_imagenet21k import IMAGENET_21K
from tests.processes import run

ROOT = pathlib.Path(__file__).parent.parent.parent


def rows_of(done, output):
    """The rows of a benchmark that succeeded."""
    assert done.returncode == 0, done.stderr
    rows = list(csv.DictReader(output.open()))
    assert all(row["git_commit"] or not (ROOT / ".git").exists() for row in rows)
    return rows


def test_a_step_beside_softmax_and_difftopk(tmp_path):
    output = tmp_path / "finetuning.csv"
    methods = ["softsort", "splitter_selection", "sinkhorn_sort", "smooth_topk"]
    flags = ["--turns", 2, "--steps", 1, "--threads", 1, "--device", "cpu", "--output", output]
    done = run(finetuning.main, "--methods", *methods, "--sizes", "8x16x40m8", "8x16x12", "--heads", 2, *flags)
    rows = rows_of(done, output)
    # Softmax is what the others are measured by.
    every = ["softmax_cross_entropy", *methods]
    assert [(row["n"], row["heads"], row["method"]) for row in rows] == [
        (n, heads, method) for n in ("40", "12") for heads in ("1", "2") for method in every
    ]
    for row in rows:
        alone, relaxed = row["heads"] == "1", row["method"] in methods[:3]
        assert float(row["ms"]) > 0
        assert row["m"] == ("8" if row["n"] == "40" and relaxed else "")
        assert bool(row["over_separate"]) != alone
        assert bool(row["loss"]) == alone
        if row["method"] == "softmax_cross_entropy":
            assert float(row["over_softmax"]) == 1
        if alone and row["method"] in ("softsort", "splitter_selection", "smooth_topk"):
            assert float(row["official_loss"]) == pytest.approx(float(row["loss"]), rel=1e-4)
            assert float(row["official_over_ours"]) > 0
        else:
            assert row["official_ms"] == row["official_loss"] == ""
        assert row["method"] in done.stdout


def test_the_sources_give_the_same_batches(tmp_path):
    output = tmp_path / "batch_sources.csv"
    sources = ["ram", "stream", "stream cold", "dataloader", "whole file"]
    flags = ["--batch_size", 100, "--threads", 1, "--device", "cpu", "--folder", tmp_path, "--output", output]
    done = run(batch_sources.main, "--mib", 1, "--dim", 512, "--sources", *sources, *flags)
    rows = rows_of(done, output)
    assert [row["source"] for row in rows] == ["convert", *sources]
    assert {(row["rows"], row["dim"], row["batch"]) for row in rows} == {("1024", "512", "100")}
    for row in rows:
        assert float(row["process_mib"]) > float(row["above_start_mib"]) >= 0
        if row["source"] != "convert":
            assert float(row["rows_per_second_1"]) > 0
            assert float(row["gib_per_second_2"]) > 0
        assert row["source"] in done.stdout
    checksums = {row["source"]: row["epoch1_crc32"] for row in rows}
    assert checksums["ram"] == checksums["stream"] == checksums["stream cold"] != ""
    assert [path.name for path in tmp_path.iterdir()] == [output.name]  # the set is gone


def fine_tune(words, **_):
    """In the place of subprocess.run: the script in a fork, which need not import what is here already."""
    script, *flags = words[1:]
    defaults = IMAGENET_21K if "21k" in script else finetune_imagenet.IMAGENET_1K
    process = multiprocessing.get_context("fork").Process(target=end_with, args=(flags, defaults))
    process.start()
    process.join()
    return CompletedProcess(words, process.exitcode, "", "")


def end_with(flags, defaults):
    sys.exit(finetune_imagenet.main(flags, defaults))


def formats_without_imports():
    published_formats.subprocess = SimpleNamespace(run=fine_tune)
    return published_formats.main()


def test_the_published_formats_pass_from_the_server_to_a_head(tmp_path):
    output = tmp_path / "published_formats.csv"
    flags = ["--n_epochs", 1, "--threads", 1, "--device", "cpu", "--folder", tmp_path, "--output", output]
    size = ["--rows_share", 0.001, "--rows_21k", 1000]
    rows = rows_of(run(formats_without_imports, "--methods", "softmax_cross_entropy", *size, *flags), output)
    assert [
        tuple(row[name] for name in ("format", "rows", "test_rows", "dim", "num_classes", "dtype")) for row in rows
    ] == [
        ("wsl-32x48d-320", "1281", "50", "2048", "1000", "float32"),
        ("efficientnet-l2-800", "1281", "50", "5504", "1000", "float16"),
        ("wsl-32x48d-224-21k", "1000", "40", "2048", "10450", "float16"),
    ]
    for row in rows:
        embeddings = 4 if row["dtype"] == "float32" else 2
        content = (int(row["rows"]) + int(row["test_rows"])) * (int(row["dim"]) * embeddings + 8) / 2**20
        assert float(row["file_mib"]) == pytest.approx(content, abs=0.1)
        assert 0 <= float(row["test_top1"]) <= float(row["test_top5"]) <= 1
        assert (row["method"], row["n_epochs"]) == ("softmax_cross_entropy", "1")
    assert [path.name for path in tmp_path.iterdir()] == [output.name]


@pytest.mark.parametrize(
    ("benchmark", "flags", "sentence"),
    [
        (finetuning, ["--sizes", "500x1000"], "BATCHxDIMxN"),
        (finetuning, ["--sizes", "8x16x20m1"], "m must be an integer of at least 2"),
        (finetuning, ["--turns", "0"], "at least 1"),
        (batch_sources, ["--mib", "1"], "--mib must hold a batch of 500 rows"),
        (batch_sources, ["--device", "cpu", "--sources", "device"], "needs a GPU"),
        (batch_sources, ["--folder", "nowhere"], "--folder: must exist"),
        (published_formats, ["--rows_share", "0.0001"], "600 training rows"),
        (published_formats, ["--device", "tpu"], "argument --device: must be auto"),
        (published_formats, ["--folder", "nowhere"], "--folder: must exist"),
    ],
)
def test_mistakes_are_answered_before_anything_is_made(benchmark, flags, sentence, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmark", *flags, "--output", str(tmp_path / "table.csv")])
    with pytest.raises(SystemExit) as stopped:
        benchmark.main()
    assert stopped.value.code == 2
    assert sentence in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
