"""Sequence models trained through their beam search: grapheme to phoneme on CMUdict, against cross-entropy.

    python experiments/train_beam_search.py --arm cross_entropy --method softmax_cross_entropy
    python experiments/train_beam_search.py --arm retain --method splitter_selection
    python experiments/train_beam_search.py --arm soft_beam --method softsort
    python experiments/train_beam_search.py --arm retain --method softsort --dataset reversal     # a toy

All arms of a seed start from the same weights, pretrained by cross-entropy, and see the same batches:
- cross_entropy, the control;
- retain: a top-k loss on the beam's K V candidates, half top-1, half top-K, so that the right one leads or stays;
- soft_beam: a relaxed top-k operator chooses the hypotheses, and the loss compares the best one with the right reading
  (Xie et al. 2020; Goyal et al. 2018). Model, data and settings are ours (docs/beam_search.md).

Adam, cosine schedule to 0. A row of results/beam_search.csv has the errors of the last weights on the test words, with
beams of 1, 4 and 8; any reading counts. The first arm of a seed makes its pretraining, a run of its own, and the others
wait. A command that was stopped or killed continues when it is repeated.
"""

import argparse
import math
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import nll_loss, pad
from torch.nn.utils import clip_grad_norm_
from tqdm import tqdm

from data.cifar import epoch_order
from data.cmudict import DATASETS, END, Reading, Words, WordSplit, load_words
from experiments.common import flags, losses
from experiments.common.processes import Processes
from experiments.common.run import Run
from models.beam_search import beam_search, marginals, search, soft_beam
from models.encoder_decoder import Encoded, EncoderDecoder
from topk_losses import RELAXATIONS, TopKOperator
from topk_losses.operator import guarded_log

# model, encoded words, phonemes (batch, T) and their labels (batch, T) -> the loss of an arm, ()
ArmLoss = Callable[[EncoderDecoder, Encoded, Tensor, Tensor], Tensor]
Operators = Callable[[int], TopKOperator]  # of any number of scores

# Settings on which the names of pretraining and of the run depend.
PRETRAINING = (
    *("dataset", "max_letters", "limit_train", "hidden_dim", "batch_size"),
    *("pretrain_updates", "pretrain_lr", "seed"),
)
IDENTITY = (
    *PRETRAINING,
    *("arm", "method", "p_k", "m", "inverse_temperature", "distribution", "art_lambda", "top1_mode"),
    *("beam_size", "nll_weight", "n_updates", "lr"),
)
READABLE = "{dataset}-{arm}-{method}-beam{beam_size}-{n_updates}updates-seed{seed}"
READABLE_PRETRAINING = "{dataset}-pretrained-{pretrain_updates}updates-seed{seed}"
LARGEST_NORM = 1.0  # gradients are clipped to it
CROSS_ENTROPY = "softmax_cross_entropy"  # the method of the control
ARMS = ("cross_entropy", "retain", "soft_beam")
# Chosen on a batch that no row uses, with a pretrained network: as sharp as possible while few right phonemes have no
# gradient. Other methods have the library's default. SOFT top-k squashes the candidates into [0, 1] first.
SOFT_BEAM_INVERSE_TEMPERATURES = {"neuralsort": 1.0, "softsort": 1.0, "soft_topk": 100.0}
M = 16  # scores that retain keeps
IGNORED = -100  # label of padding
BEAMS = (1, 4, 8)
MAX_STEPS = 30  # no reading of CMUdict is longer
EVAL_BATCH = 500  # words at once; the result does not depend on it
MOST_REVERSED = 7  # letters: 97,655 words


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = flags.make_parser(__doc__)
    methods = (CROSS_ENTROPY, *RELAXATIONS)
    flags.add_method_flags(parser, methods, p_k="for retain half top-1, half top-BEAM_SIZE")
    flags.add_run_flags(parser, results="beam_search.csv")
    message = "control; top-k loss of --method on the beam's candidates; or its operator as the top-k of the beam"
    parser.add_argument("--arm", choices=ARMS, required=True, help=message)
    message = "updates by cross-entropy first (default: %(default)s)"
    parser.add_argument("--pretrain_updates", type=flags.positive_int, default=2600, help=message)
    parser.add_argument("--n_updates", type=flags.positive_int, default=650, help="updates of the arm (default: 650)")
    parser.add_argument("--batch_size", type=flags.positive_int, default=128, help="words of an update (default: 128)")
    message = "updates between validations (default: %(default)s)"
    parser.add_argument("--eval_freq", type=flags.positive_int, default=325, help=message)
    parser.add_argument("--beam_size", type=flags.positive_int, default=4, help="hypotheses kept (default: 4)")
    parser.add_argument("--hidden_dim", type=flags.positive_int, default=128, help="width of a layer (default: 128)")
    parser.add_argument("--max_letters", type=flags.positive_int, help="longest word (default: 8; reversal: 4)")
    message = "learning rate of pretraining (default: %(default)s)"
    parser.add_argument("--pretrain_lr", type=flags.positive_float, default=2e-3, help=message)
    parser.add_argument("--lr", type=flags.positive_float, default=5e-4, help="learning rate (default: 0.0005)")
    message = "weight of the cross-entropy added to retain and soft_beam (default: %(default)s)"
    parser.add_argument("--nll_weight", type=flags.non_negative_float, default=0.3, help=message)
    parser.add_argument("--limit_train", type=flags.positive_int, help="number of training words (default: all)")
    parser.add_argument("--dataset", choices=DATASETS, default="cmudict", help="words and readings (default: cmudict)")
    flags.add_seed_flag(parser)
    args = parser.parse_args(argv)
    args.max_letters = args.max_letters or (4 if args.dataset == "reversal" else 8)
    if args.dataset == "reversal" and args.max_letters > MOST_REVERSED:
        parser.error(f"--max_letters of reversal must be at most {MOST_REVERSED}, got {args.max_letters}")
    allowed = (CROSS_ENTROPY,) if args.arm == "cross_entropy" else RELAXATIONS
    if args.method not in allowed:
        parser.error(f"--arm {args.arm} goes with --method {', '.join(allowed)}; got {args.method}")
    if isinstance(args.inverse_temperature, str):
        parser.error("--inverse_temperature must be a number: candidates are no logits, and do not grow as they do")
    if args.arm == "soft_beam" and (args.p_k or args.m or args.top1_mode):
        parser.error("--p_k, --m and --top1_mode shape a loss, and soft_beam uses the operator alone")
    if args.arm == "retain" and not args.p_k:
        args.p_k = [1.0] if args.beam_size == 1 else [0.5, *[0.0] * (args.beam_size - 2), 0.5]
    return args


def retain(
    model: EncoderDecoder, encoded: Encoded, phonemes: Tensor, labels: Tensor, K: int, loss_fn: nn.Module
) -> Tensor:
    """Mean over the steps of a top-k loss on the scores of the beam's candidates.

    The right candidate is put back where it fell off the beam. loss_fn sums over the batch.
    """
    total = torch.zeros((), device=phonemes.device)
    for number, step in enumerate(search(model, encoded, K, phonemes)):
        total = total + loss_fn(step.candidates, step.gold.masked_fill(labels[:, number] == IGNORED, IGNORED))
    return total / (labels != IGNORED).sum()


def soft_beam_loss(
    model: EncoderDecoder, encoded: Encoded, phonemes: Tensor, labels: Tensor, K: int, operators: Operators
) -> Tensor:
    """Mean of -log q of each phoneme; q: the distribution of the soft beam's best hypothesis when the reading ends."""
    counted = labels != IGNORED  # (batch, T)
    choices, _ = soft_beam(model, encoded, K, phonemes.shape[1], operators)
    q = marginals(choices, counted.sum(1)).gather(2, phonemes.unsqueeze(2)).squeeze(2)  # (batch, T)
    return -guarded_log(q[counted].clamp(0, 1)).mean()


def build_loss(args: argparse.Namespace, settings: dict[str, Any], V: int, device: torch.device) -> ArmLoss | None:
    """Build the loss of an arm for V phonemes; None for the control. Raises SystemExit for settings that do not fit."""
    K = args.beam_size
    if K > V:
        raise SystemExit(f"error: --beam_size must not exceed the {V} phonemes, the end among them, got {K}")
    if args.arm == "cross_entropy":
        return None
    if args.arm == "retain":
        # The first step has V candidates.
        loss_fn = losses.build_loss({**settings, "m": min(settings["m"], V), "reduction": "sum"}, None, device)
        return partial(retain, K=K, loss_fn=loss_fn)
    operators = cache(lambda n: losses.build_operator(settings, n, K, sorted=args.method == "soft_topk"))
    operators(V)  # settings are checked before the training
    return partial(soft_beam_loss, K=K, operators=operators)


def train(args: argparse.Namespace, seed: int, processes: Processes) -> None:
    device = processes.device
    temperatures = SOFT_BEAM_INVERSE_TEMPERATURES if args.arm == "soft_beam" else {}
    settings = losses.loss_settings(args, top1_mode="sm", inverse_temperatures=temperatures, m=M)
    config = vars(args) | settings | {"seed": seed}
    config |= {"p_k": None, "m": None, "top1_mode": None} if args.arm == "soft_beam" else {}
    config["nll_weight"] = None if args.arm == "cross_entropy" else args.nll_weight
    config = {name: config[name] for name in config if name not in losses.OWN_SETTINGS}
    run = Run(args, config, IDENTITY, READABLE, processes, clock="update")
    if not run.begin():
        return
    words = load_words(args.dataset, args.max_letters, args.limit_train)
    arm_loss = build_loss(args, settings, len(words.symbols), device)

    # The first arm of a seed makes the pretrained weights; the others wait here.
    shared = {name: config[name] for name in PRETRAINING}
    pretraining = Run(args, shared, PRETRAINING, READABLE_PRETRAINING, processes, clock="update")
    pretraining.begin(wait=True)
    torch.manual_seed(seed)
    model = EncoderDecoder(words.num_letters, len(words.symbols), args.hidden_dim).to(device)
    fit(pretraining, model, None, words, 0, args.pretrain_updates, args.pretrain_lr)
    pretraining.lock.release()
    fit(run, model, arm_loss, words, args.pretrain_updates, args.n_updates, args.lr)

    started = time.perf_counter()
    columns: dict[str, Any] = {"pretrained": pretraining.name}
    columns |= {f"{split}_words": len(getattr(words, split)) for split in ("train", "valid", "test")}
    for beam_size in (size for size in BEAMS if size <= model.num_phonemes):
        rates = error_rates(model, words.test, beam_size, device)
        columns |= {f"test_{rate}_beam{beam_size}": value for rate, value in rates.items()}
    columns["pretrain_seconds"] = math.fsum(entry["train_seconds"] for entry in pretraining.history)
    run.history[-1]["eval_seconds"] += time.perf_counter() - started
    run.record(columns)


def fit(
    run: Run, model: EncoderDecoder, arm_loss: ArmLoss | None, words: Words, before: int, num_updates: int, lr: float
) -> None:
    """Train for num_updates, on the batches that follow the first `before`; validate, and save."""
    args, seed, device = run.args, run.config["seed"], run.processes.device
    nll_weight = args.nll_weight if arm_loss else 1.0
    optimizer = torch.optim.Adam(model.parameters(), lr)
    run.resume(model=model, optimizer=optimizer)
    letters, phonemes = (part.to(device) for part in words.train.pairs())  # (M, L), (M, T)
    if args.batch_size > len(letters):
        raise SystemExit(f"error: --batch_size {args.batch_size} exceeds the {len(letters)} training pairs")
    per_epoch = len(letters) // args.batch_size
    epoch_rows = cache(lambda epoch: epoch_order(len(letters), seed, epoch).to(device))
    while run.done < num_updates:
        started, step_losses = time.perf_counter(), []
        end = min(run.done + args.eval_freq, num_updates)
        for update in tqdm(range(run.done, end), leave=False, disable=None):
            optimizer.param_groups[0]["lr"] = lr * (1 + math.cos(math.pi * update / num_updates)) / 2
            epoch, place = divmod(before + update, per_epoch)
            losses.seed_all(seed, before + update)  # for the methods that draw noise
            chosen = epoch_rows(epoch)[place * args.batch_size : (place + 1) * args.batch_size]
            right = phonemes[chosen]
            right = right[:, : int((right != END).sum(1).max()) + 1]  # (batch, T), an END behind the longest
            behind = pad(right[:, :-1] == END, (1, 0))  # (batch, T), behind the first END
            labels = right.masked_fill(behind, IGNORED)
            encoded = model.encode(letters[chosen])
            loss = arm_loss(model, encoded, right, labels) if arm_loss else 0.0
            log_probs = model.forced(encoded, right)  # (batch, T, V), given the right phonemes before
            loss = loss + nll_weight * nll_loss(log_probs.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)

            optimizer.zero_grad()
            loss.backward()
            clip_grad_norm_(model.parameters(), LARGEST_NORM)
            optimizer.step()
            step_losses.append(loss.detach())
        mean_loss = math.fsum(torch.stack(step_losses).tolist()) / len(step_losses)
        losses.check_finite(mean_loss, f"before update {end}")
        trained = time.perf_counter()
        rates = error_rates(model, words.valid, args.beam_size, device)
        entry = {"update": end, "train_loss": mean_loss} | {f"valid_{rate}": value for rate, value in rates.items()}
        entry |= {"train_seconds": trained - started, "eval_seconds": time.perf_counter() - trained}
        run.save(entry, last=end == num_updates, message=f"update {end}/{num_updates}")


def edit_distance(first: Sequence[int], second: Sequence[int]) -> int:
    """The smallest number of insertions, deletions and replacements from one sequence to the other."""
    row = list(range(len(second) + 1))
    for number, left in enumerate(first, start=1):
        above, row = row, [number]
        for place, right in enumerate(second, start=1):
            row.append(min(above[place] + 1, row[-1] + 1, above[place - 1] + (left != right)))
    return row[-1]


def nearest(hypothesis: Reading, readings: Sequence[Reading]) -> tuple[int, int]:
    """The edit distance to the nearest reading, relative to its length, and its length."""
    distances = ((edit_distance(hypothesis, reading), len(reading)) for reading in readings)
    return min(distances, key=lambda pair: pair[0] / pair[1])


@torch.no_grad()
def error_rates(model: EncoderDecoder, split: WordSplit, beam_size: int, device: torch.device) -> dict[str, float]:
    """Error rates of beam search.

    per: edits per phoneme; wer: share of words whose best hypothesis is no reading; gold: share of words with a reading
    among the hypotheses.
    """
    edits = phonemes = wrong = in_beam = 0
    for begin in range(0, len(split), EVAL_BATCH):
        letters = split.letters[begin : begin + EVAL_BATCH].to(device)
        beam = beam_search(model, model.encode(letters), beam_size, MAX_STEPS)
        for found, readings in zip(beam.phonemes.tolist(), split.readings[begin : begin + EVAL_BATCH]):
            hypotheses = [tuple(beam[: beam.index(END)] if END in beam else beam) for beam in found]
            distance, length = nearest(hypotheses[0], readings)
            edits, phonemes = edits + distance, phonemes + length
            wrong += hypotheses[0] not in readings
            in_beam += any(hypothesis in readings for hypothesis in hypotheses)
    return {"per": edits / phonemes, "wer": wrong / len(split), "gold": in_beam / len(split)}


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    processes = Processes(args.device, args.threads)
    if processes.count > 1:
        raise SystemExit("error: train_beam_search.py is one process: leave torchrun out")
    for seed in args.seed:
        train(args, seed, processes)
    return 0


if __name__ == "__main__":
    main()
