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

import argparse
import math
import time
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from torch.nn.utils import clip_grad_norm_

from data.cifar100 import epoch_order
from data.cmudict import END, CmudictUnavailableError, Words, load_words
from experiments.shared import command_line as cli
from experiments.shared.beam_objectives import Objective, cross_entropy
from experiments.shared.beam_search_flags import build_objective, configuration, parse_arguments
from experiments.shared.checkpoint import (
    PREVIOUS,
    RUN,
    WEIGHTS,
    history_of,
    load_checkpoint,
    remove_checkpoints,
    save_checkpoint,
)
from experiments.shared.environment import describe_environment, git_commit, peak_memory_mib, set_up_device
from experiments.shared.ranks import Ranks
from experiments.shared.reading_metrics import BEAMS, error_rates, token_accuracies
from experiments.shared.run_record import open_run, run_id, utc_now, write_config, write_history, write_row
from experiments.shared.training_run import diverged, recorded, restoring, saved_state, say
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
# What the checkpoints hold, among others: of pretraining, and of an arm.
PRETRAINED = {
    **WEIGHTS,
    "run_id": str,
    "optimizer": dict[str, Any] | None,
    "history": history_of(("update", "train_loss", "valid_wer", "train_seconds", "eval_seconds", "peak_memory_mib")),
}
CHECKPOINT = {**RUN, "history": PRETRAINED["history"]}
LARGEST_NORM = 1.0  # of a gradient; a longer one is shortened


def train(args: argparse.Namespace, ranks: Ranks) -> int:
    """Train one arm with one seed and record its row; return the exit status."""
    # Loss and name. First what can be refused, before a folder is made.
    device = cli.training_device(args.device, ranks)
    settings, flags = configuration(args)
    name = run_id({flag: flags[flag] for flag in IDENTITY}, READABLE)
    if recorded(args.results, name, args.force):
        return 0

    # Seed and data; only the initialisation draws.
    set_up_device(device, args.threads, deterministic=False)
    flags |= {"device": str(device), "threads": torch.get_num_threads()}
    try:
        words = load_words(args.dataset, args.max_letters, args.limit_train, args.limit_test)
    except CmudictUnavailableError as error:
        raise cli.RunError(str(error)) from None
    objective = build_objective(args, settings, len(words.symbols), device)
    torch.manual_seed(args.seed)
    model = EncoderDecoder(words.num_letters, len(words.symbols), args.hidden_dim).to(device)

    folder = args.results.parent / "runs" / name
    with open_run(folder):
        # Asked again: another process may have finished this configuration before the folder was ours.
        if recorded(args.results, name, args.force):
            return 0
        environment, commit = describe_environment(device), git_commit()
        pretrained = pretrain(model, words, flags, args.results.parent / "runs")
        write_config(folder, {"run_id": name, **flags, **environment, "git_commit": commit})
        saved = saved_state(folder, args.results, name, CHECKPOINT)
        begun = {"started_utc": utc_now(), "times_resumed": 0, "git_commits": [commit]}
        if saved:
            commits = list(dict.fromkeys([*saved["git_commits"], commit]))
            begun = {**saved, "times_resumed": saved["times_resumed"] + 1, "git_commits": commits}
        say(
            f"{name}: {'continuing' if saved else 'beginning'} on {environment['device_name']}, "
            f"{flags['threads']} threads"
        )
        model.load_state_dict(pretrained["model"])
        state = fit(model, objective, words, flags, folder, (args.pretrain_updates, args.n_updates), args.lr, begun)

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
        history = state["history"]
        del flags["results"], flags["force"]
        row = {
            "run_id": name,
            **flags,
            "pretrained": pretrained["run_id"],
            **{f"{split}_words": len(getattr(words, split)) for split in ("train", "valid", "test")},
            **measured,
            **{f"last_valid_{rate}": history[-1][f"valid_{rate}"] for rate in ("per", "wer", "gold")},
            "pretrain_seconds": math.fsum(each["train_seconds"] for each in pretrained["history"]),
            "train_seconds": math.fsum(each["train_seconds"] for each in history),
            "eval_seconds": math.fsum(each["eval_seconds"] for each in history) + eval_seconds,
            "peak_memory_mib": max(each["peak_memory_mib"] for each in history),
            **environment,
            "git_commit": "+".join(filter(None, state["git_commits"])),
            **{each: state[each] for each in ("times_resumed", "started_utc")},
            "finished_utc": utc_now(),
        }
        write_row(args.results, row)
        remove_checkpoints(folder, (PREVIOUS,))
    rates = ", ".join(f"{row[f'test_wer_beam{K}']:.4f} (beam {K})" for K in BEAMS if f"test_wer_beam{K}" in row)
    say(f"{name}: test word error rate {rates}, {row['train_seconds']:.1f} s of training")
    say(f"row: {args.results}\nrun: {folder}")
    return 0


def pretrain(model: EncoderDecoder, words: Words, flags: dict[str, Any], runs: Path) -> dict[str, Any]:
    """Return the state after pretraining: what a folder of its own holds, or trained now and left there."""
    identity = {flag: flags[flag] for flag in PRETRAINING}
    name = run_id(identity, "{dataset}-pretrained-{pretrain_updates}updates-seed{seed}")
    folder = runs / name
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "pretraining.lock"):  # the other arms of this seed wait here
        saved = load_checkpoint(folder, PRETRAINED)
        if not saved:
            write_config(folder, {"run_id": name, **identity})
            say(f"{name}: beginning")
        updates = (0, flags["pretrain_updates"])
        begun = saved or {"run_id": name}
        state = fit(model, cross_entropy, words, flags, folder, updates, flags["pretrain_lr"], begun)
        remove_checkpoints(folder, (PREVIOUS,))
    return state


def fit(
    model: EncoderDecoder,
    objective: Objective,
    words: Words,
    flags: dict[str, Any],
    folder: Path,
    updates: tuple[int, int],
    lr: float,
    begun: dict[str, Any],
) -> dict[str, Any]:
    """Train for updates[1] updates, whose batches are those that follow the first updates[0]; return the last state.

    begun: the state from which to go on, or what is to stand in every state besides. A state is saved in the folder
    after each eval_freq updates. Raises RunError if a loss is not finite.
    """
    device = next(model.parameters()).device
    before, num_updates = updates
    history = begun.get("history", [])
    optimizer = torch.optim.Adam(model.parameters(), lr)
    if history:
        with restoring(folder):
            model.load_state_dict(begun["model"])
            if begun["optimizer"] is not None:
                optimizer.load_state_dict(begun["optimizer"])
    letters, phonemes = (each.to(device) for each in words.train.pairs())
    batch_size = min(flags["batch_size"], len(letters))
    per_epoch = len(letters) // batch_size
    state, done, order_of = begun, history[-1]["update"] if history else 0, None
    while done < num_updates:
        started, losses = time.perf_counter(), []
        for update in range(done, min(done + flags["eval_freq"], num_updates)):
            epoch, place = divmod(before + update, per_epoch)
            if order_of != epoch:
                order_of, order = epoch, epoch_order(len(letters), flags["seed"], epoch).to(device)
            chosen = order[place * batch_size : (place + 1) * batch_size]
            right = phonemes[chosen]
            right = right[:, : int((right != END).sum(1).max()) + 1]  # (batch, T), an END behind the longest
            optimizer.param_groups[0]["lr"] = lr * (1 + math.cos(math.pi * update / num_updates)) / 2
            optimizer.zero_grad(set_to_none=True)
            torch.manual_seed(flags["seed"] + (before + update << 32))  # for the methods that draw noise
            loss = objective(model, letters[chosen], right)
            losses.append(loss.item())
            if not math.isfinite(losses[-1]):
                raise diverged(flags["method"], losses[-1], f"in update {update + 1} of {num_updates}")
            loss.backward()
            clip_grad_norm_(model.parameters(), LARGEST_NORM)
            optimizer.step()
        done += len(losses)
        trained, started = time.perf_counter() - started, time.perf_counter()
        rates = error_rates(model, words.valid, flags["beam_size"], device)
        entry = {
            **{"update": done, "train_loss": math.fsum(losses) / len(losses)},
            **{f"valid_{rate}": value for rate, value in rates.items()},
            **{"train_seconds": trained, "eval_seconds": time.perf_counter() - started},
            "peak_memory_mib": peak_memory_mib(device),
        }
        history = [*history, entry]
        state = {
            **begun,
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict() if done < num_updates else None,
            "history": history,
        }
        save_checkpoint(folder, state)
        write_history(folder, history, "updates.csv")
        say(
            f"update {done}/{num_updates}  train loss {entry['train_loss']:.4f}  "
            f"valid word error {rates['wer']:.4f}, phoneme error {rates['per']:.4f}  "
            f"trained {trained:.1f} s, evaluated {entry['eval_seconds']:.1f} s"
        )
    return state


def main(argv: list[str] | None = None) -> int:
    """Run the script; return its exit status (see experiments/shared/command_line.py)."""
    saved = "what the last line reported is saved in its run folder; the same command continues after it"
    return cli.finish(lambda ranks: train(parse_arguments(argv), ranks), stopped=saved)


if __name__ == "__main__":
    program.end(main())
