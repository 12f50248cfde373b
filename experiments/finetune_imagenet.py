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
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from tqdm import tqdm

from data.download import download
from data.embeddings import (
    SPLITS,
    Embeddings,
    batches,
    check_rows,
    limited_rows,
    load_embeddings,
    mixup,
    split_rows,
    streamed_batches,
)
from data.torch_file import load_torch_file
from experiments.common import flags, losses
from experiments.common.metrics import TOP_K, count_hits, hit_fractions
from experiments.common.processes import Processes
from experiments.common.run import Run
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
# Settings on which a run's name depends; embeddings are named by their content.
IDENTITY = (
    *("embeddings", "limit_train", "num_valid", "split_seed", "order_seed"),
    *("hidden_dims", "apply_relu", "apply_dropout", "precision"),
    *("method", "p_k", "m", "inverse_temperature", "distribution", "art_lambda", "top1_mode"),
    *(*losses.OWN_SETTINGS, "mixup", "noise_matrix_id"),
    *("implementation", "lr", "weight_decay", "batch_size", "n_epochs", "eval_freq", "seed"),
)
BATCH_SIZE = 500  # published
READABLE = "{embeddings}-{method}-pk_{p_k}-{n_epochs}epochs-seed{seed}"


def parse_arguments(argv: list[str] | None = None, protocol: Protocol = IMAGENET_1K) -> argparse.Namespace:
    parser = flags.make_parser(__doc__)
    flags.add_loss_flags(parser)
    add_noise_flags(parser)
    flags.add_optimization_flags(parser, n_epochs=None, batch_size=None)
    flags.add_network_flags(parser)
    flags.add_run_flags(parser, results=protocol.results)
    flags.add_embedding_flags(parser)
    parser.set_defaults(data_path=protocol.data_path)
    parser.add_argument("--stream", action="store_true", help="read a file larger than memory ahead from the disk")
    message = "number of training rows that validate (default: by their number, at most the published one)"
    parser.add_argument("--num_valid", type=flags.positive_int, help=message)
    parser.add_argument("--limit_train", type=flags.positive_int, help="number of training rows (default: all)")
    parser.add_argument("--split_seed", type=flags.seed, default=0, help="seed of the validation split (default: 0)")
    message = "widths of hidden layers (default: no hidden layer)"
    parser.add_argument("--hidden_dims", type=flags.positive_int, nargs="+", help=message)
    parser.add_argument("--apply_relu", action="store_true", help="ReLU on the embeddings")
    parser.add_argument("--apply_dropout", action="store_true", help="dropout of 0.5 on the embeddings")
    message = "steps between evaluations; 0: at the end of training only (default: %(default)s)"
    parser.add_argument("--eval_freq", type=flags.number(int, 0), default=100, help=message)
    message = "flags of another loss, trained in the same pass over the data; repeatable"
    parser.add_argument("--also", action="append", default=[], metavar='"FLAGS"', help=message)
    args = parser.parse_args(argv)
    args.also = [parse_also(text, args) for text in args.also]
    return args


def add_noise_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of mixup and forward correction."""
    message = "mix rows in pairs, labels too, with shares from Beta(ALPHA, ALPHA) (default: no mixing)"
    parser.add_argument("--mixup", type=flags.positive_float, metavar="ALPHA", help=message)
    message = "matrix T of forward_correction, a torch file that scripts/relabel.py writes (default: by --noise_rate)"
    parser.add_argument("--noise_matrix", type=flags.path, metavar="FILE", help=message)


def load_noise_matrix(path: Path) -> tuple[Tensor, str]:
    """Load T; return it and a name by its content. Raises SystemExit."""
    matrix = load_torch_file(path, "a torch file of a matrix").double()
    digest = hashlib.sha256(matrix.contiguous().numpy().tobytes()).hexdigest()[:8]
    return matrix, f"{'x'.join(map(str, matrix.shape))}-{digest}"


def parse_also(text: str, args: argparse.Namespace) -> argparse.Namespace:
    """The command's flags with the loss flags of one --also, and its learning rate and weight decay if given."""
    parser = argparse.ArgumentParser(prog=f"--also {text!r}", usage="loss flags, --lr, --weight_decay", add_help=False)
    flags.add_loss_flags(parser)
    add_noise_flags(parser)
    flags.add_rate_flags(parser)
    parser.set_defaults(weight_decay=args.weight_decay)
    also = parser.parse_args(shlex.split(text))
    if also.lr is None and also.nloglr is None:
        also.lr, also.nloglr = args.lr, args.nloglr
    return argparse.Namespace(**vars(args) | vars(also))


def fill_in_schedule(args: argparse.Namespace, protocol: Protocol, num_rows: int) -> dict[str, float | None]:
    """Fill in batch size and epochs that were not given by the number of training rows; return lr and nloglr.

    The published ones are for a million rows. A smaller set gets smaller batches and more epochs, until there are 2,000
    steps, and a learning rate of 2 / steps: with Adam a weight can then move as far as in the published runs.
    """
    args.batch_size = args.batch_size or max(min(num_rows // 20, BATCH_SIZE), 1)
    if args.batch_size > num_rows:
        raise SystemExit(f"error: --batch_size {args.batch_size} exceeds the {num_rows} training rows")
    steps_per_epoch = num_rows // args.batch_size
    args.n_epochs = args.n_epochs or max(protocol.n_epochs, -(-2000 // max(steps_per_epoch, 20)))
    if num_rows >= 1_000_000:
        return {"lr": 10**-protocol.nloglr, "nloglr": protocol.nloglr}
    return {"lr": float(f"{2 / (args.n_epochs * steps_per_epoch):.1g}"), "nloglr": None}


def choose_rows(data: Embeddings, args: argparse.Namespace, protocol: Protocol) -> dict[str, Tensor]:
    """The rows of each split that are used. Without a valid split of its own, some of train validate."""
    rows = {name: torch.arange(len(split)) for name, split in data.splits.items()}
    rows["train"] = limited_rows(len(rows["train"]), args.limit_train, args.split_seed)
    if "valid" not in rows:
        train = rows["train"]
        few = max(len(train) // 20, min(len(train) // 5, 1000), 1)
        num_valid = args.num_valid or (protocol.num_valid if len(train) >= 20 * protocol.num_valid else few)
        learn, valid = split_rows(len(train), num_valid, args.split_seed)
        rows |= {"train": train[learn], "valid": train[valid]}
    elif args.num_valid:
        raise SystemExit(f"error: --num_valid: {args.data_path} has {len(rows['valid'])} rows that validate")
    return {name: rows[name] for name in SPLITS if name in rows}


@dataclass
class Candidate:
    """A head with its loss and its optimizer, which becomes a row."""

    run: Run
    head: Head
    network: nn.Module  # the head, possibly compiled
    loss_fn: nn.Module
    optimizer: torch.optim.Optimizer
    step: int  # steps done
    losses: list[Tensor] = field(default_factory=list)  # of the steps since the last evaluation
    train_seconds: float = 0.0  # since the last evaluation

    config = property(lambda self: self.run.config)


def finetune(
    args: argparse.Namespace, seed: int, protocol: Protocol, data: Embeddings, about: dict, processes: Processes
) -> None:
    """Train the command's heads with one seed, all on the same batches, and record their rows."""
    device = processes.device
    rows = choose_rows(data, args, protocol)
    counts = {name: len(chosen) for name, chosen in rows.items()}
    default_rate = fill_in_schedule(args, protocol, counts["train"])
    shown = ", ".join(f"{count} {name}" for name, count in counts.items())
    processes.print(f"{shown} rows; batch size {args.batch_size}, {args.n_epochs} epochs")
    m = protocol.m if data.num_classes > protocol.m else None
    candidates = []
    for options in [args, *args.also]:
        settings = losses.loss_settings(options, top1_mode="sm", inverse_temperatures={}, m=m)
        matrix, matrix_id = load_noise_matrix(options.noise_matrix) if options.noise_matrix else (None, None)
        loss_fn = losses.build_loss(settings | {"T": matrix}, data.num_classes, device, options.implementation)
        rate = flags.learning_rate(options, 0.0) if options.lr or options.nloglr is not None else default_rate
        config = vars(options) | settings | rate | about | {"seed": seed, "order_seed": seed}
        config |= {"num_valid": counts["valid"], "weight_decay": options.weight_decay or None}
        config |= {"batch_size": args.batch_size, "n_epochs": args.n_epochs, "noise_matrix_id": matrix_id}
        run = Run(args, config, IDENTITY, READABLE, processes, clock="step")
        if any(run.name == candidate.run.name for candidate in candidates) or not run.begin():
            continue
        labels = data["train"].labels[rows["train"].to(data["train"].labels.device)].to(device)
        losses.count_classes(loss_fn, options.method, labels, data.num_classes)
        torch.manual_seed(seed)
        shape = {"apply_relu": args.apply_relu, "apply_dropout": args.apply_dropout}
        model = head(data.dim, data.num_classes, args.hidden_dims or (), **shape).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), config["lr"], weight_decay=options.weight_decay, fused=True)
        run.resume(model=model, optimizer=optimizer, loss=loss_fn)
        # On a CPU LastLinear is faster without torch.compile.
        network = torch.compile(model) if args.compile and device.type == "cuda" else model
        candidates.append(Candidate(run, model, network, loss_fn, optimizer, run.done))

    # Heads that are at the same step share the batches; those that lag behind go first.
    last_step = args.n_epochs * (counts["train"] // args.batch_size)
    while (done := min((candidate.step for candidate in candidates), default=last_step)) < last_step:
        group = [candidate for candidate in candidates if candidate.step == done]
        train_epoch(group, data, rows)
    sizes = {f"{name}_images": count for name, count in counts.items()}
    for candidate in candidates:
        candidate.run.record({"num_classes": data.num_classes, "processes": processes.count, **sizes})


def train_epoch(group: list[Candidate], data: Embeddings, rows: dict[str, Tensor]) -> None:
    """Train heads that are at the same step to the end of its epoch, with evaluations on the way."""
    run, args, seed = group[0].run, group[0].run.args, group[0].config["seed"]
    processes, device, batch_size = run.processes, run.processes.device, args.batch_size
    num_steps, done = len(rows["train"]) // batch_size, group[0].step
    epoch, first = done // num_steps + 1, done % num_steps
    share, weight = processes.share(batch_size), processes.weight(batch_size)
    read = streamed_batches if args.stream else batches
    stream = read(data["train"], rows["train"], batch_size, epoch, seed, device, first)
    hidden = None if processes.is_first else True
    bar = tqdm(stream, f"epoch {epoch}", num_steps, initial=first, leave=False, disable=hidden)
    started = time.perf_counter()
    for step, (embeddings, labels) in enumerate(bar, first):
        number = (epoch - 1) * num_steps + step + 1  # counted over all epochs, from 1
        embeddings = embeddings.float()  # (batch, d)
        progress = (epoch - 1 + step / num_steps) / args.n_epochs
        for candidate in group:
            config, loss_fn, inputs = candidate.config, candidate.loss_fn, embeddings
            if config["mixup"]:
                kept_share, partners = mixup(batch_size, config["mixup"], seed, number)
                inputs = kept_share * embeddings + (1 - kept_share) * embeddings[partners]
            losses.set_temperature(loss_fn, config["inverse_temperature"], progress)
            if losses.is_stochastic(config["method"]):
                losses.seed_noise(loss_fn, device, seed, 0, number, processes.rank)
            kept = candidate.head.dropout_mask(batch_size, seed, number)  # for the whole batch, as with one process
            with torch.autocast(device.type, torch.bfloat16, enabled=args.precision == "bf16"):
                logits = candidate.network(inputs[share], None if kept is None else kept[share])  # (share, num_classes)
            loss = loss_fn(logits.float(), labels[share])
            if config["mixup"]:  # losses are linear in the label
                loss = kept_share * loss + (1 - kept_share) * loss_fn(logits.float(), labels[partners][share])
            loss = loss * weight

            candidate.optimizer.zero_grad()
            loss.backward()
            processes.sum_gradients(candidate.head.parameters())
            candidate.optimizer.step()
            candidate.losses.append(loss.detach())
            candidate.step = number
        is_last = number == args.n_epochs * num_steps
        is_due = args.eval_freq and (step in (0, num_steps - 1) or (step + 1) % args.eval_freq == 0)
        if not (is_due or is_last):
            continue

        trained = [processes.sum(torch.stack(candidate.losses)).tolist() for candidate in group]  # waits for a GPU
        seconds = time.perf_counter() - started
        for candidate, step_losses, result in zip(group, trained, evaluate(group, data, rows)):
            losses.check_convergence(candidate.loss_fn)
            mean_loss = math.fsum(step_losses) / len(step_losses)
            entry = {"epoch": epoch, "step": number, "train_steps": len(step_losses), "train_loss": mean_loss, **result}
            for value in (value for name, value in entry.items() if name.endswith("_loss")):
                if not math.isfinite(value):
                    check_rows(data, rows)
                losses.check_finite(value, f"in epoch {epoch}, step {step + 1}, of {candidate.run.name}")
            entry["train_seconds"] = candidate.train_seconds + seconds
            entry |= losses.current_temperature(candidate.loss_fn, candidate.config["inverse_temperature"])
            message = f"{candidate.config['method']} epoch {epoch}/{args.n_epochs}" if step + 1 == num_steps else ""
            candidate.run.save(entry, last=is_last, message=message)
            candidate.losses, candidate.train_seconds = [], 0.0
        started = time.perf_counter()
    for candidate in group:
        candidate.train_seconds += time.perf_counter() - started  # for the next evaluation, in a later epoch


@torch.no_grad()
def evaluate(group: list[Candidate], data: Embeddings, rows: dict[str, Tensor]) -> list[dict[str, float]]:
    """For each head the mean loss, standard deviation of the logits and accuracies on the whole of valid and test."""
    started, run, args, seed = time.perf_counter(), group[0].run, group[0].run.args, group[0].config["seed"]
    processes, device = run.processes, run.processes.device
    results: list[dict[str, float]] = [{} for _ in group]
    modules = nn.ModuleList(part for candidate in group for part in (candidate.head, candidate.loss_fn)).eval()
    for name in (name for name in rows if name != "train"):
        split, chosen = data.splits.get(name, data["train"]), rows[name][processes.share(len(rows[name]))]
        sums = torch.zeros(len(group), 2 + len(TOP_K), dtype=torch.float64, device=device)  # losses, deviations, hits
        for number, some in enumerate(chosen.to(split.inputs.device).split(args.batch_size)):
            embeddings, labels = (part.to(device) for part in split.batch(some))
            embeddings = embeddings.float()  # (rows, d)
            for candidate, total in zip(group, sums):
                with torch.autocast(device.type, torch.bfloat16, enabled=args.precision == "bf16"):
                    logits = candidate.head(embeddings).float()  # (rows, num_classes)
                if losses.is_stochastic(candidate.config["method"]):
                    losses.seed_noise(candidate.loss_fn, device, seed, 1, number, processes.rank)
                total[0] += candidate.loss_fn(logits, labels) * len(labels)
                total[1] += logits.std(1).sum()
                total[2:] += count_hits(logits, labels)
        for result, (loss, deviation, *hits) in zip(results, processes.sum(sums).tolist()):
            result |= {f"{name}_loss": loss / len(rows[name]), f"{name}_logit_std": deviation / len(rows[name])}
            result |= hit_fractions(name, hits, len(rows[name]))
    modules.train()
    return [{**result, "eval_seconds": time.perf_counter() - started} for result in results]


def main(argv: list[str] | None = None, protocol: Protocol = IMAGENET_1K) -> int:
    args = parse_arguments(argv, protocol)
    processes = Processes(args.device, args.threads)
    device = processes.device
    for options in [args, *args.also]:  # settings are checked before a download
        settings = losses.loss_settings(options, top1_mode="sm", inverse_temperatures={}, m=options.m or protocol.m)
        losses.build_loss(settings, max(protocol.num_classes, settings["m"] or 0), device, options.implementation)
    path = processes.from_first(lambda: download(args.data_path, args.cache_dir, args.sha256, args.requester_pays))
    data = load_embeddings(path)
    processes.print(f"{path}: {data.num_classes} classes, {data.dim} dimensions")
    about = processes.from_first(lambda: data.about(args.data_path))
    num_bytes = sum(split.inputs.nbytes for split in data.splits.values())
    if device.type == "cuda" and not args.stream and num_bytes < 0.8 * torch.cuda.mem_get_info(device)[0]:
        data = data.to(device)
    for seed in args.seed:
        finetune(args, seed, protocol, data, about, processes)
    processes.close()
    return 0


if __name__ == "__main__":
    main()
