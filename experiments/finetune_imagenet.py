"""Tables 2, 3 and 5: linear classifiers (heads) on frozen ImageNet-1K embeddings, with each loss and each P_K.

    python experiments/finetune_imagenet.py --method softmax_cross_entropy                      # downloads 11 GB once
    python experiments/finetune_imagenet.py -d efficientnet-l2-800 --method splitter_selection --p_k .25 0 0 0 .75
    python experiments/finetune_imagenet.py -d own.pt --method neuralsort --p_k .5 0 0 0 .5 --seeds 0 1 2
    python experiments/finetune_imagenet.py --method softsort --also "--method neuralsort"      # two heads in one pass
    torchrun --nproc_per_node 2 -- experiments/finetune_imagenet.py --method softsort           # two GPUs, one row

-d takes a published file by its short name, a torch file (data/embeddings.py), or the https:// or s3:// address of one.
A split "clean" of the file has the rows that validate with correct labels, where those are wrong: columns last_clean_*.
Protocol: a random 50,000 training rows validate, one linear layer, m 16, batch 500, Adam with learning rate 10^-4.5,
20 epochs; evaluation at the first step of an epoch, every 100 steps and at its last. Fewer than a million training rows
get a schedule of their own (`fill_in_schedule`), which is printed. The row in results/imagenet1k.csv has, for each k,
the test accuracy where validation accuracy was best. A command that was stopped or killed continues when it is
repeated.
"""

import argparse
import hashlib
import math
import shlex
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from tqdm import tqdm

from data.download import download
from data.embeddings import (
    SPLITS,
    Embeddings,
    batches,
    check_right_rows,
    check_rows,
    limited_rows,
    load_embeddings,
    mixup,
    split_rows,
    streamed_batches,
)
from data.splits import Split
from data.torch_file import load_torch_file
from experiments.common import door, flags
from experiments.common.metrics import TOP_K, count_hits, hit_fractions
from experiments.common.objective import Objective, build_loss, check_finite, fill_in_loss
from experiments.common.paths import user_path
from experiments.common.processes import Processes
from experiments.common.run import Run
from experiments.common.settings import HEADS, LOSS, TRAINING, cell, with_role
from models.heads import Head, head


class Protocol(NamedTuple):
    """The published settings of a data set."""

    data_path: str
    results: str
    num_classes: int
    m: int
    nloglr: float
    n_epochs: int
    num_valid: int


IMAGENET_1K = Protocol("wsl-32x48d-320", "imagenet1k.csv", 1000, m=16, nloglr=4.5, n_epochs=20, num_valid=50_000)
BATCH_SIZE = 500  # published
READABLE = "{embeddings}-{method}-pk_{p_k}-{n_epochs}epochs-seed{seed}"


def parse_arguments(argv: list[str] | None = None, protocol: Protocol = IMAGENET_1K) -> argparse.Namespace:
    parser = flags.make_parser(__doc__)
    flags.add_loss_flags(parser)
    add_noise_flags(parser)
    flags.add_optimization_flags(parser, n_epochs=None, batch_size=None)
    flags.add_network_flags(parser)
    flags.add_run_flags(parser, results=protocol.results)
    flags.add_embedding_flags(parser, default=protocol.data_path)
    parser.add_argument("--stream", action="store_true", help="read a file larger than memory ahead from the disk")
    parser.add_argument(
        "--num_valid",
        type=flags.positive_int,
        help="number of training rows that validate (default: by their number, at most the published one)",
    )
    parser.add_argument("--limit_train", type=flags.positive_int, help="number of training rows (default: all)")
    parser.add_argument("--split_seed", type=flags.seed, default=0, help="seed of the validation split (default: 0)")
    parser.add_argument(
        "--hidden_dims", type=flags.positive_int, nargs="+", help="widths of hidden layers (default: no hidden layer)"
    )
    parser.add_argument("--apply_relu", action="store_true", help="ReLU on the embeddings")
    parser.add_argument("--apply_dropout", action="store_true", help="dropout of 0.5 on the embeddings")
    parser.add_argument(
        "--eval_freq",
        type=flags.number(int, 0),
        default=100,
        help="steps between evaluations; 0: at the end only, and no checkpoint before (default: %(default)s)",
    )
    parser.add_argument(
        "--also",
        action="append",
        default=[],
        metavar='"FLAGS"',
        help="flags of another loss, trained in the same pass; --lr and --weight_decay are the first one's unless "
        "given; repeatable",
    )
    args = parser.parse_args(argv)
    args.also = [parse_also(text, args) for text in args.also]
    return args


def add_noise_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of mixup and forward correction."""
    parser.add_argument(
        "--mixup",
        type=flags.positive_float,
        metavar="ALPHA",
        help="mix rows in pairs, labels too, with shares from Beta(ALPHA, ALPHA) (default: no mixing)",
    )
    parser.add_argument(
        "--noise_matrix",
        type=user_path,
        metavar="FILE",
        help="matrix T of forward_correction, a tensor (classes, classes) saved by torch.save, of which row j has the "
        "shares of the labels of class j (default: by --noise_rate)",
    )


def parse_also(text: str, args: argparse.Namespace) -> argparse.Namespace:
    """The command's flags with the loss flags of one --also, and its learning rate and weight decay if given."""
    usage = "loss flags, --lr, --weight_decay"
    parser = argparse.ArgumentParser(prog=f"--also {text!r}", usage=usage, add_help=False, allow_abbrev=False)
    flags.add_loss_flags(parser)
    add_noise_flags(parser)
    flags.add_learning_rate_flags(parser, args.weight_decay)
    also = parser.parse_args(shlex.split(text))
    if also.lr is None and also.nloglr is None:
        also.lr = args.lr
        also.nloglr = args.nloglr
    return argparse.Namespace(**vars(args) | vars(also))


@dataclass(frozen=True)
class Source:
    """The embeddings of a command.

    Attributes:
        data: their splits.
        rows: the rows of each split that are used; without a valid split of its own, some of train validate.
        columns: what rows of results say of the file.
    """

    data: Embeddings
    rows: dict[str, Tensor]
    columns: dict[str, Any]

    @property
    def counts(self) -> dict[str, int]:
        return {name: len(chosen) for name, chosen in self.rows.items()}

    def split(self, name: str) -> Split:
        """The split of which the rows of this name are."""
        return self.data.splits.get(name, self.data["train"])

    def train_labels(self) -> Tensor:
        labels = self.data["train"].labels
        return labels[self.rows["train"].to(labels.device)]  # (train,)


def open_source(args: argparse.Namespace, protocol: Protocol, processes: Processes) -> Source:
    """Download the embeddings if they are not here, and choose their rows; on a GPU if they fit."""
    path = processes.from_first(lambda: download(args.data_path, args.cache_dir, args.sha256, args.requester_pays))
    data = load_embeddings(path)
    processes.print(f"{path}: {data.num_classes} classes, {data.dim} dimensions")
    columns = processes.from_first(lambda: data.about(args.data_path))
    rows = choose_rows(data, args, protocol)
    device = processes.device
    if device.type == "cuda" and not args.stream:
        num_bytes = sum(split.inputs.nbytes for split in data.splits.values())
        free, _ = torch.cuda.mem_get_info(device)
        if num_bytes < 0.8 * free:
            data = data.to(device)
    return Source(data, rows, columns)


def choose_rows(data: Embeddings, args: argparse.Namespace, protocol: Protocol) -> dict[str, Tensor]:
    """The rows of each split that are used."""
    rows = {name: torch.arange(len(split)) for name, split in data.splits.items()}
    train = limited_rows(len(rows["train"]), args.limit_train, args.split_seed)
    rows["train"] = train
    if "valid" in rows:
        count = len(rows["valid"])
        of_file = f"{args.data_path} has {count} rows that validate"
        if args.num_valid not in (None, count):  # a command of a row says how many there are
            raise ValueError(f"--num_valid: {of_file}")
        if args.split_seed and not args.limit_train:
            raise ValueError(f"--split_seed: {of_file}")
    else:
        num_valid = args.num_valid or published_num_valid(len(train), protocol)
        if num_valid >= len(train):
            raise ValueError(f"--num_valid {num_valid} leaves none of the {len(train)} rows to train: give fewer")
        learn, valid = split_rows(len(train), num_valid, args.split_seed)
        rows["train"] = train[learn]
        rows["valid"] = train[valid]
        check_right_rows(data, rows["valid"])
    return {name: rows[name] for name in SPLITS if name in rows}


def published_num_valid(num_rows: int, protocol: Protocol) -> int:
    """The published number of rows that validate, or fewer of a small set: 1,000, a fifth, but at least a twentieth."""
    if num_rows >= 20 * protocol.num_valid:
        return protocol.num_valid
    return max(num_rows // 20, min(num_rows // 5, 1000), 1)


def fill_in_schedule(args: argparse.Namespace, protocol: Protocol, num_rows: int) -> dict[str, Any]:
    """The settings batch_size, n_epochs, lr and nloglr; where they are not given, by the number of training rows.

    The published ones are for a million rows. A smaller set gets smaller batches and more epochs, at most 100, until
    there are 2,000 steps, and a learning rate of 2 / steps: with Adam a weight can then move as far as in the published
    runs.
    """
    batch_size = args.batch_size or max(min(num_rows // 20, BATCH_SIZE), 1)
    if batch_size > num_rows:
        raise ValueError(f"--batch_size {batch_size} exceeds the {num_rows} training rows")
    steps_per_epoch = num_rows // batch_size
    n_epochs = args.n_epochs or max(protocol.n_epochs, -(-2000 // max(steps_per_epoch, 20)))
    schedule = {"batch_size": batch_size, "n_epochs": n_epochs}
    if args.lr is not None or args.nloglr is not None or num_rows >= 1_000_000:
        return schedule | flags.learning_rate(args, protocol.nloglr)
    rate = float(f"{2 / (n_epochs * steps_per_epoch):.1g}")
    return schedule | {"lr": rate, "nloglr": None}


def configuration(args: argparse.Namespace, seed: int, protocol: Protocol, source: Source) -> dict[str, Any]:
    """Every setting of one classifier by name, defaults filled in. Raises ValueError for settings that do not fit."""
    m = None
    if source.data.num_classes > protocol.m:
        m = protocol.m
    config = vars(args).copy()
    del config["also"]
    config |= fill_in_loss(args, top1_mode="sm", inverse_temperatures={}, m=m)
    config |= fill_in_schedule(args, protocol, source.counts["train"])
    config |= source.columns
    config["num_valid"] = source.counts["valid"]
    config["seed"] = seed
    config["order_seed"] = seed
    config["noise_matrix_id"] = None
    if args.noise_matrix is not None:
        config["noise_matrix_id"] = name_of_matrix(load_noise_matrix(args.noise_matrix))
    return config


def load_noise_matrix(path: Path) -> Tensor:
    """Load T, float64. Raises ValueError."""
    matrix = load_torch_file(path, "a torch file of a matrix")
    if not isinstance(matrix, Tensor) or matrix.dim() != 2:
        raise ValueError(f"{path} is not a torch file of a matrix: it holds a {type(matrix).__name__}")
    return matrix.double()


def name_of_matrix(matrix: Tensor) -> str:
    """A name by shape and content."""
    shape = "x".join(str(size) for size in matrix.shape)
    digest = hashlib.sha256(matrix.contiguous().numpy().tobytes()).hexdigest()
    return f"{shape}-{digest[:8]}"


def check_losses(args: argparse.Namespace, protocol: Protocol, processes: Processes) -> None:
    """Raise ValueError for losses that cannot be, before a download."""
    for options in [args, *args.also]:
        config = vars(options) | fill_in_loss(options, "sm", inverse_temperatures={}, m=options.m or protocol.m)
        build_loss(config, max(protocol.num_classes, config["m"] or 0), processes.device)


@dataclass(eq=False)
class Classifier:
    """A linear classifier, or one with hidden layers, with its loss and its optimizer, which becomes a row."""

    title: str  # of its log lines
    config: dict[str, Any]
    run: Run
    model: Head
    network: nn.Module  # the model, possibly compiled
    objective: Objective
    optimizer: torch.optim.Optimizer
    step: int  # steps done
    step_losses: list[Tensor] = field(default_factory=list)  # since the last evaluation
    train_seconds: float = 0.0  # since the last evaluation


@dataclass
class Pass:
    """What the classifiers share that are trained on the same batches.

    Attributes:
        config: settings of one of them, of which those of the batches and the schedule are read.
        failures: a sentence for each classifier that diverged.
    """

    config: dict[str, Any]
    source: Source
    processes: Processes
    failures: list[str] = field(default_factory=list)

    @property
    def steps_per_epoch(self) -> int:
        return len(self.source.rows["train"]) // self.config["batch_size"]

    @property
    def last_step(self) -> int:
        return self.config["n_epochs"] * self.steps_per_epoch

    def autocast(self) -> torch.autocast:
        is_bf16 = self.config["precision"] == "bf16"
        return torch.autocast(self.processes.device.type, torch.bfloat16, enabled=is_bf16)


def finetune(configs: Sequence[dict[str, Any]], source: Source, processes: Processes) -> list[str]:
    """Train classifiers on the same batches, and record their rows; return a sentence for each that diverged."""
    shared = Pass(configs[0], source, processes)
    classifiers: dict[str, Classifier] = {}
    for config in configs:
        run = Run(HEADS, READABLE, config, processes, clock="step")
        if run.name in classifiers:
            processes.print(f"repeated: an --also has the settings of another loss, and {run.name} trains once")
        elif run.start():
            classifiers[run.name] = build_classifier(title_of(config, configs), config, run, source)

    # Those at the same step share the batches; those that lag behind go first.
    training = list(classifiers.values())
    while training:
        done = min(classifier.step for classifier in training)
        if done == shared.last_step:
            break
        group = [classifier for classifier in training if classifier.step == done]
        for diverged in train_epoch(group, shared):
            training.remove(diverged)
            diverged.run.release()
    columns = {"num_classes": source.data.num_classes}
    for name, count in source.counts.items():
        columns[f"{name}_images"] = count
    source.data.check_unchanged()
    for classifier in training:
        classifier.run.record(columns)
    return shared.failures


def title_of(config: dict[str, Any], configs: Sequence[dict[str, Any]]) -> str:
    """The method of a classifier, with the settings in which others of the method differ in its pass."""
    words = [config["method"]]
    for setting in with_role(LOSS, TRAINING):
        value = config.get(setting.name)
        others = [other.get(setting.name) for other in configs if other["method"] == config["method"]]
        if setting.flag and value is not None and any(other != value for other in others):
            words.append(f"{setting.name} {cell(value)}")
    return " ".join(words)


def build_classifier(title: str, config: dict[str, Any], run: Run, source: Source) -> Classifier:
    """Build a classifier with its loss and optimizer, where its checkpoint left them."""
    device = run.processes.device
    matrix = {}
    if config["noise_matrix"] is not None:
        matrix["T"] = load_noise_matrix(config["noise_matrix"])
    loss_fn = build_loss(config, source.data.num_classes, device, **matrix)
    objective = Objective(config, loss_fn, device)
    objective.count_classes(source.train_labels().to(device), source.data.num_classes)
    torch.manual_seed(config["seed"])
    model = head(
        source.data.dim,
        source.data.num_classes,
        config["hidden_dims"] or (),
        apply_relu=config["apply_relu"],
        apply_dropout=config["apply_dropout"],
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), config["lr"], weight_decay=config["weight_decay"], fused=True)
    run.resume(model=model, optimizer=optimizer, loss=loss_fn)
    network: nn.Module = model
    if config["compile"]:
        network = torch.compile(model)
    return Classifier(title, config, run, model, network, objective, optimizer, run.done)


def train_epoch(group: list[Classifier], shared: Pass) -> list[Classifier]:
    """Train classifiers that are at the same step to the end of its epoch, with evaluations on the way.

    Returns:
        Those that diverged, which `group` does not have any more.
    """
    config = shared.config
    processes = shared.processes
    num_steps = shared.steps_per_epoch
    epoch = group[0].step // num_steps + 1
    first = group[0].step % num_steps
    diverged: list[Classifier] = []
    started = time.perf_counter()
    for step, (embeddings, labels) in enumerate(training_batches(epoch, first, shared), first):
        number = (epoch - 1) * num_steps + step + 1  # counted over all epochs, from 1
        for classifier in group:
            classifier.objective.set_progress((epoch - 1 + step / num_steps) / config["n_epochs"])
            loss = loss_of(classifier, embeddings, labels, number, shared)
            loss = loss * processes.weight(config["batch_size"])

            classifier.optimizer.zero_grad()
            loss.backward()
            processes.sum_gradients(classifier.model.parameters())
            classifier.optimizer.step()
            classifier.step_losses.append(loss.detach())
            classifier.step = number
        if is_due(step, number, shared):
            diverged += evaluate_and_save(group, epoch, started, shared)
            if not group:
                return diverged
            started = time.perf_counter()
    for classifier in group:
        classifier.train_seconds += time.perf_counter() - started  # for the next evaluation, in a later epoch
    return diverged


def training_batches(epoch: int, first: int, shared: Pass) -> Iterable[tuple[Tensor, Tensor]]:
    """Embeddings (batch, d) float32 and labels (batch,) of the steps of an epoch, from the step `first`."""
    config = shared.config
    processes = shared.processes
    read = streamed_batches if config["stream"] else batches
    stream = read(
        shared.source.data["train"],
        shared.source.rows["train"],
        config["batch_size"],
        epoch,
        config["seed"],
        processes.device,
        first,
    )
    hidden = None if processes.is_first else True
    bar = tqdm(stream, f"epoch {epoch}", shared.steps_per_epoch, initial=first, leave=False, disable=hidden)
    for embeddings, labels in bar:
        yield embeddings.float(), labels


def loss_of(classifier: Classifier, embeddings: Tensor, labels: Tensor, number: int, shared: Pass) -> Tensor:
    """The mean loss, (), of this process's share of a batch: embeddings (batch, d), labels (batch,).

    Args:
        number: the step, counted over all epochs from 1, by which noise is drawn.
    """
    config = classifier.config
    seed = config["seed"]
    share = shared.processes.share(len(labels))
    objective = classifier.objective
    inputs = embeddings
    if config["mixup"] is not None:
        kept_share, partners = mixup(len(labels), config["mixup"], seed, number)
        inputs = kept_share * embeddings + (1 - kept_share) * embeddings[partners]
    objective.draw_noise_by(seed, 0, number, shared.processes.rank)
    kept = classifier.model.dropout_mask(len(labels), seed, number)  # for the whole batch, as with one process
    if kept is not None:
        kept = kept[share]
    with shared.autocast():
        logits = classifier.network(inputs[share], kept)  # (share, num_classes)
    loss = objective(logits.float(), labels[share])
    if config["mixup"] is None:
        return loss
    # Losses are linear in the label. Each has its own cast, whose gradient is rounded before the sum.
    return kept_share * loss + (1 - kept_share) * objective(logits.float(), labels[partners][share])


def is_due(step: int, number: int, shared: Pass) -> bool:
    """Whether an evaluation follows this step of an epoch, counted from 0; number: over all epochs, from 1."""
    if number == shared.last_step:
        return True
    every = shared.config["eval_freq"]
    if every == 0:
        return False
    return step in (0, shared.steps_per_epoch - 1) or (step + 1) % every == 0


def evaluate_and_save(group: list[Classifier], epoch: int, started: float, shared: Pass) -> list[Classifier]:
    """Evaluate and checkpoint each classifier; take those that diverged out of `group`, and return them.

    Args:
        started: when the training since the last evaluation began.

    Raises:
        ValueError: the file of embeddings has changed.
    """
    trained = []
    for classifier in group:
        trained.append(shared.processes.sum(torch.stack(classifier.step_losses)).tolist())  # waits for a GPU
    seconds = time.perf_counter() - started
    results = evaluate(group, shared)
    shared.source.data.check_unchanged()
    diverged = []
    for classifier, step_losses, result in zip(list(group), trained, results):
        classifier.train_seconds += seconds
        entry = {
            "epoch": epoch,
            "step": classifier.step,
            "train_steps": len(step_losses),
            "train_loss": math.fsum(step_losses) / len(step_losses),
            **result,
            "train_seconds": classifier.train_seconds,
        }
        try:
            save(classifier, entry, shared)
        except FloatingPointError as error:
            shared.failures.append(str(error))
            shared.processes.print(f"dropped: {error}")
            diverged.append(classifier)
            group.remove(classifier)
        classifier.step_losses = []
        classifier.train_seconds = 0.0
    return diverged


def save(classifier: Classifier, entry: dict[str, Any], shared: Pass) -> None:
    """Add an evaluation to a classifier's history. Raises FloatingPointError where it is not finite."""
    epoch = entry["epoch"]
    for name, value in entry.items():
        if name.endswith("_loss"):
            if not math.isfinite(value):
                check_rows(shared.source.data, shared.source.rows)
            step = entry["step"] - (epoch - 1) * shared.steps_per_epoch
            check_finite(value, f"in epoch {epoch}, step {step}, of {classifier.run.name}")
    entry |= classifier.objective.temperature()
    message = ""
    if entry["step"] == epoch * shared.steps_per_epoch:
        message = f"{classifier.title} epoch {epoch}/{shared.config['n_epochs']}"
    classifier.run.save(entry, last=entry["step"] == shared.last_step, message=message)


@torch.no_grad()
def evaluate(group: Sequence[Classifier], shared: Pass) -> list[dict[str, float]]:
    """For each classifier the mean loss, standard deviation of the logits and accuracies on the whole of each split."""
    started = time.perf_counter()
    for classifier in group:
        classifier.model.eval()
        classifier.objective.eval()
    results: list[dict[str, float]] = [{} for _ in group]
    for name, count in shared.source.counts.items():
        if name == "train":
            continue
        for result, sums in zip(results, sums_over(name, group, shared).tolist()):
            loss, deviation, *hits = sums
            result[f"{name}_loss"] = loss / count
            result[f"{name}_logit_std"] = deviation / count
            result |= hit_fractions(name, hits, count)
    for classifier in group:
        classifier.model.train()
        classifier.objective.train()
    seconds = time.perf_counter() - started
    for result in results:
        result["eval_seconds"] = seconds
    return results


def sums_over(name: str, group: Sequence[Classifier], shared: Pass) -> Tensor:
    """The sums over a split of losses, standard deviations of logits and hits, (classifiers, 2 + TOP_K) float64."""
    processes = shared.processes
    device = processes.device
    seed = shared.config["seed"]
    split = shared.source.split(name)
    rows = shared.source.rows[name]
    rows = rows[processes.share(len(rows))].to(split.inputs.device)
    sums = torch.zeros(len(group), 2 + len(TOP_K), dtype=torch.float64, device=device)
    for number, some in enumerate(rows.split(shared.config["batch_size"])):
        embeddings, labels = split.batch(some)
        embeddings = embeddings.to(device).float()  # (rows, d)
        labels = labels.to(device)
        for classifier, total in zip(group, sums):
            with shared.autocast():
                logits = classifier.model(embeddings)
            logits = logits.float()  # (rows, num_classes)
            classifier.objective.draw_noise_by(seed, 1, number, processes.rank)
            total[0] += classifier.objective(logits, labels) * len(labels)
            total[1] += logits.std(1).sum()
            total[2:] += count_hits(logits, labels)
    return processes.sum(sums)


def main(argv: list[str] | None = None, protocol: Protocol = IMAGENET_1K) -> int:
    args = parse_arguments(argv, protocol)
    processes = Processes(args.device, args.threads, args.precision)
    if args.compile and processes.device.type != "cuda":
        raise ValueError("--compile: on a CPU linear classifiers are faster as they are; leave it out")
    check_losses(args, protocol, processes)
    source = open_source(args, protocol, processes)
    counts = ", ".join(f"{count} {name}" for name, count in source.counts.items())
    failures = []
    for seed in args.seed:
        configs = [configuration(options, seed, protocol, source) for options in [args, *args.also]]
        processes.print(f"{counts} rows; batch size {configs[0]['batch_size']}, {configs[0]['n_epochs']} epochs")
        failures += finetune(configs, source, processes)
    processes.close()
    if failures:
        raise FloatingPointError("; ".join(failures))
    return 0


if __name__ == "__main__":
    sys.exit(door.call(main))
