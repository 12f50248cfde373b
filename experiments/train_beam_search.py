"""Sequence models trained through their beam search: grapheme to phoneme on CMUdict, against cross-entropy.

    python experiments/train_beam_search.py --arm cross_entropy --method softmax_cross_entropy
    python experiments/train_beam_search.py --arm retain --method splitter_selection
    python experiments/train_beam_search.py --arm soft_beam --method softsort
    python experiments/train_beam_search.py --arm retain --method softsort --dataset reversal --max_letters 4 # a toy

A bidirectional GRU reads the letters, a GRU with attention says the phonemes. All arms of a seed go on from the same
weights, pretrained by cross-entropy (2600 updates of 128 words, four passes), with as many updates (650) of the same
batches: cross_entropy, the control; retain, the top-k cross-entropy of this library on the beam's K V candidates, P_K
on 1 and K, so that the right one leads or stays; soft_beam, in which a relaxed top-k operator chooses the hypotheses,
and the best one's phonemes are compared with the right ones (Xie et al. 2020; Goyal et al. 2018). The last two add .3
times cross-entropy. Neither paper's setting is known in full: model, data and every number here are ours.

A row reports the last weights on the test words, beams of 1, 4 and 8, any reading counting; no epoch is chosen. It is
added to results/beam_search.csv (--results); config.json, updates.csv and the checkpoint lie in results/runs/<run id>/,
those of pretraining in a folder of its own, which the first arm makes and the others wait for. A command that was
stopped, killed even, continues when it is given again; on the CPU, with as many threads, it ends with the same bits. A
configuration that the file already has is skipped (--force repeats it, from the same pretrained weights).
"""

if __name__ == "__main__":
    from data import program

    program.begin()

import math
import time
from typing import Any

import torch
from torch import Tensor

from data.cifar100 import epoch_order
from data.cmudict import END, CmudictUnavailableError, Words, load_words
from experiments.shared import command_line as cli
from experiments.shared.beam_objectives import Objective, cross_entropy
from experiments.shared.beam_search_flags import Flags, build_objective, configuration, parse_arguments
from experiments.shared.ranks import Ranks
from experiments.shared.reading_metrics import BEAMS, error_rates, token_accuracies
from experiments.shared.run import Run, Steps
from models.encoder_decoder import EncoderDecoder

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
MEASURED = ("train_loss", "valid_per", "valid_wer", "valid_gold", "train_seconds", "eval_seconds", "peak_memory_mib")
RUN = {"clock": "update", "history_file": "updates.csv", "measured": MEASURED}
LARGEST_NORM = 1.0  # of a gradient; a longer one is shortened


def train(args: Flags, ranks: Ranks) -> int:
    """Train one arm with one seed and record its row; return the exit status."""
    # Loss and name. First what can be refused, before a folder is made.
    device = cli.training_device(args.device, ranks)
    settings, flags = configuration(args)
    run = Run(args, flags, IDENTITY, READABLE, device, ranks, **RUN)
    with cli.refusing(CmudictUnavailableError):
        words = load_words(args.dataset, args.max_letters, args.limit_train, args.limit_test)
    objective = build_objective(args, settings, len(words.symbols), device)

    with run:
        # The other arms of this seed wait here.
        readable = "{dataset}-pretrained-{pretrain_updates}updates-seed{seed}"
        of_all = {**{flag: flags[flag] for flag in PRETRAINING}, "method": "cross_entropy", "inverse_temperature": None}
        pretraining = Run(args, of_all, PRETRAINING, readable, device, ranks, **RUN, wait=True)
        with pretraining:  # only the initialisation draws
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
        eval_seconds = time.perf_counter() - started
        rates = ", ".join(f"{measured[f'test_wer_beam{K}']:.4f} (beam {K})" for K in BEAMS if model.num_phonemes >= K)
        columns = {
            "pretrained": pretraining.name,
            **{f"{split}_words": len(getattr(words, split)) for split in ("train", "valid", "test")},
            **measured,
            **{f"last_valid_{rate}": run.history[-1][f"valid_{rate}"] for rate in ("per", "wer", "gold")},
            "pretrain_seconds": math.fsum(each["train_seconds"] for each in pretraining.history),
            "train_seconds": math.fsum(each["train_seconds"] for each in run.history),
            "eval_seconds": math.fsum(each["eval_seconds"] for each in run.history) + eval_seconds,
            "peak_memory_mib": max(each["peak_memory_mib"] for each in run.history),
        }
        run.record(columns, f"test word error rate {rates}")
    return 0


def fit(
    run: Run, model: EncoderDecoder, objective: Objective, words: Words, before: int, num_updates: int, lr: float
) -> None:
    """Train for so many updates, whose batches are those that follow the first `before`; validate, and save.

    Raises Diverged if a loss is not finite.
    """
    optimizer = torch.optim.Adam(model.parameters(), lr)
    run.track(model, {"model": model, "optimizer": optimizer}, end=num_updates)
    steps = Steps(run, optimizer, None, num_updates, 1, lr_schedule="cosine", largest_norm=LARGEST_NORM)
    letters, phonemes = (each.to(run.device) for each in words.train.pairs())
    batch_size, frequency = min(run.args.batch_size, len(letters)), run.args.eval_freq
    per_epoch = len(letters) // batch_size

    def batch_loss(chosen: Tensor) -> tuple[Tensor, None]:
        """The loss () of words, by their rows (batch,)."""
        right = phonemes[chosen]
        right = right[:, : int((right != END).sum(1).max()) + 1]  # (batch, T), an END behind the longest
        return objective(model, letters[chosen], right), None

    order_of = None
    while run.done < num_updates:
        started = time.perf_counter()
        for update in steps.of(1, run.done, min(run.done + frequency, num_updates)):
            epoch, place = divmod(before + update, per_epoch)
            if order_of != epoch:
                order_of, order = epoch, epoch_order(len(letters), run.args.seed, epoch).to(run.device)
            torch.manual_seed(run.args.seed + (before + update << 32))  # for the methods that draw noise
            steps.take(batch_loss, order[place * batch_size : (place + 1) * batch_size])
        loss, done = steps.mean(), steps.step + 1
        trained, started = time.perf_counter() - started, time.perf_counter()
        rates = error_rates(model, words.valid, run.args.beam_size, run.device)
        evaluated = time.perf_counter() - started
        measured = {
            **{"update": done, "train_loss": loss},
            **{f"valid_{rate}": value for rate, value in rates.items()},
            **{"train_seconds": trained, "eval_seconds": evaluated},
        }
        line = f"update {done}/{num_updates}  train loss {loss:.4f}  valid word error {rates['wer']:.4f}, "
        line += f"phoneme error {rates['per']:.4f}  trained {trained:.1f} s, evaluated {evaluated:.1f} s"
        run.save(measured, line)


def main(argv: list[str] | None = None) -> int:
    """Run the script; return its exit status (see experiments/shared/command_line.py)."""
    saved = "what the last line reported is saved in its run folder; the same command continues after it"
    return cli.finish(lambda ranks: train(parse_arguments(argv), ranks), stopped=saved)


if __name__ == "__main__":
    program.end(main())
