"""Tables 2, 3 and 5: new heads on frozen ImageNet-1K embeddings, trained with each loss and each P_K.

    python experiments/finetune_imagenet.py --method softmax_cross_entropy --p_k 1. 0. 0. 0. 0.
    python experiments/finetune_imagenet.py -d efficientnet-l2-800 --method splitter_selection \\
        --distribution logistic --inverse_temperature .5 --p_k .25 .0 .0 .0 .75
    python experiments/finetune_imagenet.py -d FOLDER --method neuralsort --p_k .5 0 0 0 .5 --seeds 0 1 2
    python experiments/finetune_imagenet.py --method softsort --seeds 0 1 --also "--method neuralsort" # in one pass
    torchrun --nproc_per_node 2 -- experiments/finetune_imagenet.py --method softsort --m 16           # two GPUs

-d takes a published file by its short name (downloaded once, 11 to 50 GB), a torch file, an address or a store.
Protocol: a random 50,000 of the training rows for validation, one linear layer, m 16, batch 500, Adam with learning
rate 10^-4.5, 20 epochs; evaluation at the first step of an epoch, every 100 steps and at its last; a row reports test
accuracy where validation accuracy was best, per k.

One row per configuration and seed is added to results/imagenet1k.csv (--results); config.json, evaluations.csv and
the checkpoint lie in results/runs/<run id>/. Stopping, killing, skipping and --force are as in train_cifar100.py.
"""

if __name__ == "__main__":  # from here on, what goes wrong is a sentence
    from data import program

    program.begin()

import itertools
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from copy import deepcopy

import torch
from torch import Tensor
from tqdm import tqdm

from data.embeddings import EmbeddingBatches
from data.program import ProgramError
from experiments.shared import command_line as cli
from experiments.shared.environment import set_up_device
from experiments.shared.finetune_flags import (
    IMAGENET_1K,
    Defaults,
    Flags,
    Recipe,
    columns_of,
    open_store_of,
    parse_arguments,
    recipes_of,
    rows_of,
    settle,
)
from experiments.shared.loss_state import count_classes, is_stateless, seed_noise, temperature_of
from experiments.shared.metrics import TOP_K, count_hits, hit_fractions
from experiments.shared.ranks import Ranks
from experiments.shared.run import Diverged, Run, Steps, check_finite
from models.heads import Head, head

# What makes it another experiment: see train_cifar100.py. The data are known by their content, not by their place.
IDENTITY = (
    *("embeddings", "limit_train", "limit_test", "num_valid", "split_seed", "order_seed"),
    *("hidden_dims", "apply_relu", "apply_dropout", "precision"),
    *("method", "p_k", "m", "inverse_temperature", "distribution", "art_lambda", "top1_mode"),
    *cli.CLASSIFIER_FLAGS,
    *("implementation", "lr", "weight_decay", "batch_size", "n_epochs", "eval_freq", "seed"),
)
READABLE = "{embeddings}-{method}-pk_{p_k}-{n_epochs}epochs-seed{seed}"  # the run id, before its hash
UNRECORDED = ("seeds", "also", "cache_dir", "endpoint_url")  # another place changes nothing


class HeadRun:
    """One seed's head of a configuration, on the device: restored, or initialised under its seed."""

    def __init__(self, run: Run, recipe: Recipe, made: Head, num_steps: int) -> None:
        """made: a fresh head, on the device. num_steps: of an epoch."""
        args = run.args
        # One that draws noise, or whose temperature changes, has a state: company changes nothing.
        self.own_loss = run.flags["implementation"] != "ours" or not is_stateless(run.flags)
        self.run, self.head = run, made
        self.loss_fn = deepcopy(recipe.loss_fn) if self.own_loss else recipe.loss_fn
        decay = run.flags["weight_decay"] or 0
        optimizer = torch.optim.AdamW(made.parameters(), run.flags["lr"], weight_decay=decay, fused=True)
        training = {"model": made, "optimizer": optimizer, "loss": self.loss_fn}
        run.track(made, training, end=args.n_epochs * num_steps)
        self.steps = Steps(run, optimizer, self.loss_fn, num_steps, args.n_epochs)
        # On a CPU, the last layer would not look at its gradient if it were compiled, which gains more.
        self.training_head = torch.compile(made) if args.compile and run.device.type == "cuda" else made
        self.training_loss = torch.compile(self.loss_fn) if args.compile and not self.own_loss else self.loss_fn

    def batch_loss(self, embeddings: Tensor, labels: Tensor, kept: Tensor | None, weight: float) -> tuple[Tensor, None]:
        """The loss () of embeddings (share, d) float32, of which dropout keeps some; its share of the batch's mean."""
        with self.run.autocast():
            logits = self.training_head(embeddings, kept)  # (share, n)
        return self.training_loss(logits.float(), labels).mean() * weight, None

    def seed_noise(self, *numbers: int) -> None:
        if self.own_loss:
            seed_noise(self.loss_fn, self.run.device, self.run.flags["seed"], *numbers)


def finetune(args: Flags, defaults: Defaults, ranks: Ranks) -> int:
    """Train each configuration with each seed and record the rows; return the exit status."""
    # What can be refused is refused before data is downloaded: tried with as many classes as the flags may need.
    device = cli.training_device(args, ranks)
    with cli.refusing():
        most = max(each.m or 0 for each in (args, *args.also))
        recipes_of(args, defaults, max(defaults.num_classes, most), torch.device("cpu"))

    # Data: the store, which rank 0 downloads for all, and the losses for its classes.
    ranks.follow_first()
    store = open_store_of(args.data_path, args.cache_dir, args.endpoint_url)
    ranks.let_follow()
    rows = rows_of(store, args, defaults)
    counts = {name: len(each) for name, each in rows.items()}
    filled_in = settle(args, defaults, counts["train"])
    fewest = min(args.batch_size, *(count for name, count in counts.items() if name != "train"))
    told = "processes divide each batch, the rows that validate and those of test"
    cli.check(ranks.count <= fewest, f"{ranks.count} {told}: there are {fewest}; lower --nproc_per_node")
    try:
        recipes = recipes_of(args, defaults, store.num_classes, device)
    except ValueError as error:
        told = f"{error} (the labels of {args.data_path} have {store.num_classes} classes)"
        raise cli.CommandLineError(told) from None

    # Runs, one per configuration and seed, without those that are recorded.
    runs: list[tuple[Run, Recipe]] = []
    for recipe, seed in itertools.product(recipes, args.seeds):
        order = args.seeds[0] if args.order_seed is None else seed if args.order_seed == "own" else args.order_seed
        flags = {name: value for name, value in recipe.flags.items() if name not in UNRECORDED}
        flags |= {**columns_of(store, args.data_path), "num_valid": counts["valid"], "seed": seed, "order_seed": order}
        with suppress(cli.AlreadyRecorded):
            runs.append((Run(args, flags, IDENTITY, READABLE, device, ranks, clock="step"), recipe))
    if not runs:
        return 0

    # Batches. On each machine one process after another: what memory is free, the others have left.
    set_up_device(device, args.threads, args.deterministic)
    for turn in range(max(ranks.gathered(ranks.local_count))):
        if turn == ranks.local_rank:
            batches = EmbeddingBatches(store["train"], args.batch_size, device, rows=rows["train"], mode=args.batches)
            splits = {  # of each, this process's share
                name: EmbeddingBatches(split, args.batch_size, device, rows=rows[name][ranks.share(counts[name])])
                for name, split in ((name, store.splits.get(name, store["train"])) for name in rows if name != "train")
            }
        ranks.gathered(0)
    labels = store["train"].labels()[rows["train"]].to(device)
    for recipe in recipes:
        count_classes(recipe.loss_fn, recipe.flags["method"], labels, store.num_classes)
    told = f"{counts['test']} test" if "test" in counts else "no test split: the row has validation accuracy alone"
    ranks.say(f"{store.path}: {counts['train']} training rows, {counts['valid']} validate, {told}")
    ranks.say("\n".join(f"  {name}: {each.description}" for name, each in {"train": batches, **splits}.items()))
    if filled_in:
        ranks.say(f"defaults for {counts['train']} training rows: {filled_in}")

    with ExitStack() as held:
        # Heads and optimizers.
        heads = []
        for run, recipe in runs:
            with suppress(cli.AlreadyRecorded):
                held.enter_context(run.held())
                torch.manual_seed(run.flags["seed"])
                shape = {"apply_relu": args.apply_relu, "apply_dropout": args.apply_dropout}
                made = head(store.dim, store.num_classes, args.hidden_dims or (), **shape).to(device)
                heads.append(HeadRun(run, recipe, made, len(batches)))

        # Loop: heads that stand at the same step share the batches, those that lag behind first.
        last_step = args.n_epochs * len(batches)
        try:
            while (step := min((each.run.done for each in heads), default=last_step)) < last_step:
                train_epoch([each for each in heads if each.run.done == step], batches, splits)
        except Diverged:
            for each in (batches, *splits.values()):
                refuse_broken_rows(each, ranks)
            raise

        columns = {"processes": ranks.count, "batch_source": batches.mode, "num_classes": store.num_classes}
        columns |= {f"{name}_images": count for name, count in counts.items()}
        for run in [each.run for each in heads]:
            run.record({**columns, "num_heads": run.history[-1]["num_heads"]}, last_step * args.batch_size)
    return 0


def train_epoch(group: Sequence[HeadRun], batches: EmbeddingBatches, splits: dict[str, EmbeddingBatches]) -> None:
    """Train heads that stand at the same step to the end of its epoch, evaluating and saving on the way.

    Losses stay on the device until an evaluation, so that no step waits for a GPU. Raises Diverged.
    """
    args, ranks = group[0].run.args, group[0].run.ranks
    share, weight = ranks.share(args.batch_size), ranks.weight(args.batch_size)
    num_steps, done = len(batches), group[0].run.done
    epoch, first = done // num_steps + 1, done % num_steps
    # Heads with the same order share each batch; otherwise each has its own.
    orders = list(dict.fromkeys(each.run.flags["order_seed"] for each in group))
    streams = zip(*(batches.epoch(epoch, start=first, seed=seed) for seed in orders))
    hidden = not (sys.stderr.isatty() and ranks.is_first)
    bar = tqdm(streams, f"epoch {epoch}", num_steps, initial=first, unit="batch", leave=False, disable=hidden)
    started = time.perf_counter()
    for step, parts in enumerate(bar, first):
        parts = {order: (rows[share].float(), labels[share]) for order, (rows, labels) in zip(orders, parts)}
        number = (epoch - 1) * num_steps + step + 1  # of all steps, from 1
        for each in group:
            # Drawn for the whole batch, so that any number of processes drops the same.
            kept = each.head.dropout_mask(args.batch_size, each.run.flags["seed"], number)
            each.seed_noise(0, number, ranks.rank)
            each.steps.begin(epoch, step)
            embeddings, labels = parts[each.run.flags["order_seed"]]
            each.steps.take(each.batch_loss, embeddings, labels, kept if kept is None else kept[share], weight)
        if not (step == 0 or (step + 1) % args.eval_freq == 0 or step + 1 == num_steps):
            continue

        # Evaluation.
        where = f"epoch {epoch} step {step + 1}/{num_steps}"
        train_steps = len(group[0].steps.losses)
        means = [each.steps.mean() for each in group]
        train_seconds = time.perf_counter() - started
        for each, train_loss, result in zip(group, means, evaluate(group, splits, where)):
            measured = {
                **{"epoch": epoch, "step": number, "train_loss": train_loss, **result},
                **temperature_of(each.loss_fn, each.run.flags["inverse_temperature"]),
                **{"num_heads": len(group), "train_steps": train_steps, "train_seconds": train_seconds},
            }
            p_k = " ".join(f"{p:g}" for p in each.run.flags["p_k"])
            told = f"{each.run.flags['method']} {p_k} {where} (of {args.n_epochs} epochs)"
            each.run.save(measured, told if step + 1 == num_steps else "")
        started = time.perf_counter()


@torch.no_grad()
def evaluate(group: Sequence[HeadRun], splits: dict[str, EmbeddingBatches], where: str) -> list[dict[str, float]]:
    """Return, for each head, mean loss and accuracies (fractions) on the whole of each split. Raises Diverged.

    splits: this process's share of each. where: in training, to be said.
    """
    started, ranks = time.perf_counter(), group[0].run.ranks
    results: list[dict[str, float]] = [{} for _ in group]
    for each in group:
        each.head.eval()
        each.loss_fn.eval()
    for name, split in splits.items():
        num_rows = sum(ranks.gathered(len(split.rows)))
        # Sums over the rows: of losses, of the spread of the logits over the classes, of hits.
        sums = torch.zeros(len(group), 2 + len(TOP_K), dtype=torch.float64, device=split.device)
        for number, (embeddings, labels) in enumerate(split.in_order()):
            embeddings = embeddings.float()  # (batch, d)
            for each, of_head in zip(group, sums):
                with each.run.autocast():
                    logits = each.head(embeddings)  # (batch, n)
                logits = logits.float()
                each.seed_noise(1, number, ranks.rank)
                of_head[0] += each.loss_fn(logits, labels).mean() * len(labels)
                of_head[1] += logits.std(1).sum()
                of_head[2:] += count_hits(logits, labels)
        for each, result, (loss, spread, *hits) in zip(group, results, ranks.total(sums).tolist()):
            check_finite(each.run, loss, f"on the {name} rows after {where}")
            result |= {f"{name}_loss": loss / num_rows, f"{name}_logit_std": spread / num_rows}
            result |= hit_fractions(name, hits, num_rows)
    for each in group:
        each.head.train()
        each.loss_fn.train()
    return [{**result, "eval_seconds": time.perf_counter() - started} for result in results]


def refuse_broken_rows(rows: EmbeddingBatches, ranks: Ranks) -> None:
    """Raise ProgramError, which names it, where one of the rows holds a number that is not finite."""
    broken = ""
    for number, (embeddings, _) in enumerate(rows.in_order()):
        places = (~embeddings.isfinite()).nonzero()  # (numbers, 2)
        if len(places) and not broken:
            which, column = places[0].tolist()
            broken = (
                f"row {int(rows.rows[number * rows.batch_size + which])} of the split {rows.split.name} of "
                f"{rows.split.folder} holds {embeddings[which, column].item()}: nothing is recorded. Make these "
                "embeddings again, or leave such rows out"
            )
    for each in filter(None, ranks.gathered(broken)):
        raise ProgramError(each)


def main(argv: list[str] | None = None, defaults: Defaults = IMAGENET_1K) -> int:
    return cli.finish(lambda ranks: finetune(parse_arguments(argv, defaults), defaults, ranks))


if __name__ == "__main__":
    program.end(main())
