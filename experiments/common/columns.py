"""What the columns of results/*.csv mean; the meanings of flags are in --help of their scripts."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments.common.settings import BY_NAME

# Ranks, beams, splits, splits that are evaluated, and packages that a name with a placeholder stands for.
PLACES = {"{k}": (1, 3, 5, 10, 20), "{b}": (1, 4, 8), "{split}": ("train", "valid", "test")}
PLACES |= {"{evaluated}": ("valid", "test", "clean"), "{package}": ("python", "torchvision", "numpy")}
COLUMNS = {
    "run_id": "name of the configuration and of its folder in runs/: the readable part, then a hash",
    "num_classes": "number of classes n",
    "{split}_images": "images in the split; those that train, after --limit_train",
    "clean_images": "images of validation whose correct labels are known beside the wrong ones",
    "embeddings": "content of the embeddings: classes x dimensions, then eight digits of a hash of all rows",
    "embedding_dtype": "floating-point type of the embeddings in the file; training is in float32 or --precision",
    "embeddings_checksum": "of older runs: checksum of the published file: sha256, etag or unverified",
    "backbone": "network that made the embeddings, where it is known",
    "resolution": "pixels of the images' sides when the embeddings were made, where it is known",
    "labels": "labels of the embeddings: human, right, or the share of random, among how many classes, random seed",
    "noise_matrix_id": "content of --noise_matrix: classes x classes, then eight digits of a hash",
    "batch_source": "of older runs: where the training batches came from: device, ram or stream (from the disk)",
    "processes": "processes of torchrun that divided a batch (2, then 1: resumed by 1); peak_memory_mib: of the first",
    "num_heads": "of older runs: heads trained in the last pass over the data; its seconds are those of all",
    "epoch": "of table1_epochs.csv: passes over the training split so far",
    "train_top1": "of table1_epochs.csv: accuracy on the epoch's augmented training images, fraction in [0, 1]",
    "test_top{k}": "test top-k accuracy, fraction in [0, 1], where validation's was best for this k",
    "test_top{k}_epoch": "the epoch of that evaluation, counted from 1; the earliest of equals",
    "test_top{k}_step": "the optimizer step of that evaluation, counted from 1; the earliest of equals",
    "valid_top{k}": "best validation top-k accuracy, fraction in [0, 1]",
    "last_test_top{k}": "test top-k accuracy of the last evaluation, fraction in [0, 1]",
    "last_valid_top{k}": "validation top-k accuracy of the last evaluation, fraction in [0, 1]",
    "last_clean_top{k}": "top-k accuracy of the last evaluation, validation images with correct labels, in [0, 1]",
    "last_train_loss": "mean training loss over the last epoch, nats (--eval_freq 0: over all epochs; beam search: "
    "since the last but one validation)",
    "last_{evaluated}_loss": "mean loss of the last evaluation, nats; clean: validation images with correct labels",
    "last_inverse_temperature": "where inverse_temperature is auto or from:to, what it was at the end",
    "last_{evaluated}_logit_std": "standard deviation of the logits over the classes, mean over the split: a head's",
    "{split}_words": "words in the split",
    "test_per_beam{b}": "phoneme error rate of the best hypothesis, edits per phoneme; test, beam of 1, 4, 8",
    "test_wer_beam{b}": "word error rate, share of words whose best hypothesis is no reading; test, beam of 1, 4, 8",
    "test_gold_beam{b}": "share of words of which the last beam holds a reading; test, beam of 1, 4, 8",
    "last_valid_per": "phoneme error rate of the best hypothesis, edits per phoneme; at the end, on validation",
    "last_valid_wer": "word error rate, share of words whose best hypothesis is no reading; at the end, on validation",
    "last_valid_gold": "share of words of which the last beam holds a reading; at the end, on validation",
    "test_forced_accuracy": "of older runs: share of right phonemes by position, the right ones before it given",
    "test_free_accuracy": "of older runs: share of right phonemes by position after the model's own, of beam 1",
    "pretrained": "folder in runs/ of the pretraining that the run went on from",
    "pretrain_seconds": "wall-clock seconds of that pretraining, evaluation and saving excluded",
    "train_seconds": "wall-clock seconds spent in training epochs (compilation, too), evaluation and saving excluded",
    "eval_seconds": "wall-clock seconds spent in evaluation",
    "images_per_second": "of older runs: training images per second of train_seconds",
    "peak_memory_mib": "peak memory in MiB: tensors on the GPU, or the whole process on the CPU",
    "device_name": "model of the GPU or CPU; a, then b: resumed on b",
    "torch_version": "PyTorch; a, then b: resumed under b",
    "{package}_version": "of older runs: Python, torchvision, NumPy",
    "git_commit": "commit of this repository; -dirty: files differed; a+b: trained on a, then on b; *_epochs.csv: none",
    "times_resumed": "how often the run was continued from a checkpoint",
    "started_utc": "when the run began, UTC, ISO 8601",
    "finished_utc": "when the row was written, UTC, ISO 8601",
}


def names_of(column: str) -> list[str]:
    """The columns that a name with placeholders stands for."""
    for place, values in PLACES.items():
        if place in column:
            return [name for value in values for name in names_of(column.replace(place, str(value)))]
    return [column]


def as_markdown() -> str:
    """The table of all columns and their meanings."""
    rows = [f"| {', '.join(f'`{name}`' for name in names_of(key))} | {meaning} |" for key, meaning in COLUMNS.items()]
    return "\n".join(["| column | meaning |", "|---|---|", *rows])


def differing_settings(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """The settings in which rows differ, with columns that are not explained here, as of another version."""
    explained = [name for key in COLUMNS for name in names_of(key)]
    names = dict.fromkeys(name for row in rows for name in row)
    found = []
    for name in names:
        is_setting = name in BY_NAME or name not in explained
        if is_setting and len({row.get(name, "") for row in rows}) > 1:
            found.append(name)
    return found


def about_repeats(path: Path, rows: Sequence[Mapping[str, str]]) -> str:
    """Why runs of one line with one seed are refused: which they are, and in what they differ."""
    first = rows[0]
    found = f"{path} has {len(rows)} runs of {first['method']} with seed {first.get('seed', '')} in one line"
    names = differing_settings(rows)
    if not names:
        return f"{found}, which no column tells apart: delete all but one"
    return f"{found}, which differ in {', '.join(names)}: move all but one to another file"
