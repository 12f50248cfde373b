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
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import nll_loss, pad
from torch.nn.utils import clip_grad_norm_
from tqdm import tqdm

from data.cmudict import DATASETS, END, Reading, Words, WordSplit, load_words
from data.splits import epoch_order
from experiments.common import door, flags
from experiments.common.objective import build_loss, build_operator, check_finite, fill_in_loss, published_p_k, seed_all
from experiments.common.operators import BoundOperator
from experiments.common.processes import Processes
from experiments.common.run import Run
from experiments.common.settings import BEAM, CALL, CROSS_ENTROPY, OWN_SETTINGS, PRETRAINING, identifying, with_role
from models.beam_search import beam_search, marginals, search, soft_beam
from models.encoder_decoder import Encoded, EncoderDecoder
from topk_losses import RELAXATIONS
from topk_losses.numerics import guarded_log

# model, encoded words, phonemes (batch, T) and their labels (batch, T) -> the loss of an arm, ()
ArmLoss = Callable[[EncoderDecoder, Encoded, Tensor, Tensor], Tensor]
Operators = Callable[[int], BoundOperator]  # of any number of scores

READABLE = "{dataset}-{arm}-{method}-beam{beam_size}-{n_updates}updates-seed{seed}"
READABLE_PRETRAINING = "{dataset}-pretrained-{pretrain_updates}updates-seed{seed}"
LARGEST_NORM = 1.0  # gradients are clipped to it
ARMS = ("cross_entropy", "retain", "soft_beam")
# Chosen on a batch that no row uses, with a pretrained network: as sharp as possible while few right phonemes have no
# gradient. Other methods have the library's default. SOFT top-k squashes the candidates into [0, 1] first.
SOFT_BEAM_INVERSE_TEMPERATURES = {"neuralsort": 1.0, "softsort": 1.0, "soft_topk": 100.0}
M = 16  # scores that retain keeps
IGNORED = -100  # label of padding
BEAMS = (1, 4, 8)
MAX_STEPS = 30  # no reading of CMUdict is longer
EVAL_BATCH = 500  # words at once; the result does not depend on it
MAX_LETTERS = {"cmudict": 8, "reversal": 4}
MOST_REVERSED = 7  # letters: 97,655 words


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = flags.make_parser(__doc__)
    methods = (CROSS_ENTROPY, *RELAXATIONS)
    flags.add_method_flags(parser, methods, p_k="for retain half top-1, half top-BEAM_SIZE")
    flags.add_run_flags(parser, results="beam_search.csv")
    parser.add_argument(
        "--arm",
        choices=ARMS,
        required=True,
        help="control; top-k loss of --method on the beam's candidates; or its operator as the top-k of the beam",
    )
    parser.add_argument(
        "--pretrain_updates",
        type=flags.positive_int,
        default=2600,
        help="updates by cross-entropy first (default: %(default)s)",
    )
    parser.add_argument("--n_updates", type=flags.positive_int, default=650, help="updates of the arm (default: 650)")
    parser.add_argument("--batch_size", type=flags.positive_int, default=128, help="words of an update (default: 128)")
    parser.add_argument(
        "--eval_freq",
        type=flags.positive_int,
        default=325,
        help="updates between validations (default: %(default)s)",
    )
    parser.add_argument("--beam_size", type=flags.positive_int, default=4, help="hypotheses kept (default: 4)")
    parser.add_argument("--hidden_dim", type=flags.positive_int, default=128, help="width of a layer (default: 128)")
    parser.add_argument("--max_letters", type=flags.positive_int, help="longest word (default: 8; reversal: 4)")
    parser.add_argument(
        "--pretrain_lr",
        type=flags.positive_float,
        default=2e-3,
        help="learning rate of pretraining (default: %(default)s)",
    )
    parser.add_argument("--lr", type=flags.positive_float, default=5e-4, help="learning rate (default: 0.0005)")
    parser.add_argument(
        "--nll_weight",
        type=flags.non_negative_float,
        default=0.3,
        help="weight of the cross-entropy added to retain and soft_beam (default: %(default)s)",
    )
    parser.add_argument("--limit_train", type=flags.positive_int, help="number of training words (default: all)")
    parser.add_argument("--dataset", choices=DATASETS, default="cmudict", help="words and readings (default: cmudict)")
    args = parser.parse_args(argv)
    if args.max_letters is None:
        args.max_letters = MAX_LETTERS[args.dataset]
    problem = misuse(args) or misplaced(args.arm, flags.given(parser, argv, args))
    if problem:
        parser.error(problem)
    if args.arm == "retain" and args.p_k is None:
        args.p_k = first_and_last(args.beam_size)
    return args


def misuse(args: argparse.Namespace) -> str:
    """Say which flags exclude one another; "" if none do."""
    if args.dataset == "reversal" and args.max_letters > MOST_REVERSED:
        return f"--max_letters of reversal must be at most {MOST_REVERSED}, got {args.max_letters}"
    allowed = RELAXATIONS
    if args.arm == "cross_entropy":
        allowed = (CROSS_ENTROPY,)
    if args.method not in allowed:
        return f"--arm {args.arm} goes with --method {', '.join(allowed)}; got {args.method}"
    if args.arm == "cross_entropy" and args.p_k not in (None, published_p_k(CROSS_ENTROPY)):
        return "--p_k is of --arm retain: the control has cross-entropy alone, whose P_K is 1 0 0 0 0"
    if isinstance(args.inverse_temperature, str):
        return "--inverse_temperature must be a number: candidates are no logits, and do not grow as they do"
    return ""


def misplaced(arm: str, given: Collection[str]) -> str:
    """Say which flag that is given does nothing for the arm; "" if none."""
    for name in ("p_k", "m", "top1_mode"):
        if name in given and arm == "soft_beam":
            return f"--{name} shapes a loss, and soft_beam uses the operator alone"
        if name in given and name != "p_k" and arm == "cross_entropy":
            return f"--{name} is of --arm retain: the control has cross-entropy alone"
    if "nll_weight" in given and arm == "cross_entropy":
        return "--nll_weight is of retain and soft_beam: the control has cross-entropy alone"
    return ""


def first_and_last(beam_size: int) -> list[float]:
    """P_K of retain: half top-1, half top-K."""
    if beam_size == 1:
        return [1.0]
    return [0.5, *[0.0] * (beam_size - 2), 0.5]


def configuration(args: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Every setting of one run by name, defaults filled in; None for one that does not apply to the arm.

    Raises:
        ValueError: settings that do not fit.
    """
    temperatures = {}
    if args.arm == "soft_beam":
        temperatures = SOFT_BEAM_INVERSE_TEMPERATURES
    config = vars(args) | fill_in_loss(args, top1_mode="sm", inverse_temperatures=temperatures, m=M)
    config["seed"] = seed
    if args.arm == "soft_beam":
        config |= {"p_k": None, "m": None, "top1_mode": None}
    if args.arm == "cross_entropy":
        config["nll_weight"] = None
    return {name: value for name, value in config.items() if name not in OWN_SETTINGS}


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
    choices, _ = soft_beam(model, encoded, phonemes.shape[1], operators)
    q = marginals(choices, counted.sum(1)).gather(2, phonemes.unsqueeze(2)).squeeze(2)  # (batch, T)
    return -guarded_log(q[counted].clamp(0, 1)).mean()


def build_arm_loss(config: dict[str, Any], V: int, device: torch.device) -> ArmLoss | None:
    """Build the loss of an arm for V phonemes; None for the control. Raises ValueError for settings that do not fit."""
    K = config["beam_size"]
    if K > V:
        raise ValueError(f"--beam_size must not exceed the {V} phonemes, the end among them, got {K}")
    if config["arm"] == "cross_entropy":
        return None
    if config["arm"] == "retain":
        loss_fn = build_loss(config, None, device, reduction="sum")
        return partial(retain, K=K, loss_fn=loss_fn)
    operators = cache(lambda n: build_operator(config, n, K, sorted=config["method"] == "soft_topk"))
    operators(V)  # settings are checked before the training
    return partial(soft_beam_loss, K=K, operators=operators)


def train(config: dict[str, Any], processes: Processes) -> None:
    """Train and record one run."""
    device = processes.device
    run = Run(BEAM, READABLE, config, processes, clock="update")
    if not run.start():
        return
    words = load_words(config["dataset"], config["max_letters"], config["limit_train"])
    arm_loss = build_arm_loss(config, len(words.symbols), device)
    pretraining = start_pretraining(config, processes)
    torch.manual_seed(config["seed"])
    model = EncoderDecoder(words.num_letters, len(words.symbols), config["hidden_dim"]).to(device)
    fit(pretraining, Phase(config, model, words, None, 0, config["pretrain_updates"], config["pretrain_lr"]))
    pretraining.release()
    run.builds_on(pretraining)
    fit(run, Phase(config, model, words, arm_loss, config["pretrain_updates"], config["n_updates"], config["lr"]))

    started = time.perf_counter()
    columns: dict[str, Any] = {
        "pretrained": pretraining.name,
        "train_words": len(words.train),
        "valid_words": len(words.valid),
        "test_words": len(words.test),
    }
    for beam_size in BEAMS:
        if beam_size <= model.num_phonemes:
            for rate, value in error_rates(model, words.test, beam_size, device).items():
                columns[f"test_{rate}_beam{beam_size}"] = value
    columns["pretrain_seconds"] = math.fsum(entry["train_seconds"] for entry in pretraining.history)
    run.history[-1]["eval_seconds"] += time.perf_counter() - started
    run.record(columns)


def start_pretraining(config: dict[str, Any], processes: Processes) -> Run:
    """Lock the pretraining of a seed: its first arm makes the weights, and the others wait here."""
    names = [setting.name for setting in [*identifying(PRETRAINING), *with_role(CALL)]]
    shared = {name: config[name] for name in names if name in config}
    shared["force"] = False  # --force repeats the arm alone
    run = Run(PRETRAINING, READABLE_PRETRAINING, shared, processes, clock="update")
    run.start(wait=True)
    return run


@dataclass
class Phase:
    """Pretraining, or the updates of an arm."""

    config: dict[str, Any]
    model: EncoderDecoder
    words: Words
    arm_loss: ArmLoss | None  # None: cross-entropy alone
    before: int  # updates of the phase before, whose batches these follow
    num_updates: int
    lr: float


def fit(run: Run, phase: Phase) -> None:
    """Train for the updates of a phase; validate, and save."""
    config = phase.config
    model = phase.model
    device = run.processes.device
    optimizer = torch.optim.Adam(model.parameters(), phase.lr)
    run.resume(model=model, optimizer=optimizer)
    letters, phonemes = phase.words.train.pairs()
    pairs = Pairs(letters.to(device), phonemes.to(device), config)
    while run.done < phase.num_updates:
        started = time.perf_counter()
        end = min(run.done + config["eval_freq"], phase.num_updates)
        step_losses = []
        for update in tqdm(range(run.done, end), leave=False, disable=None):
            optimizer.param_groups[0]["lr"] = phase.lr * (1 + math.cos(math.pi * update / phase.num_updates)) / 2
            seed_all(config["seed"], phase.before + update)  # for the methods that draw noise
            loss = loss_of(*pairs.batch(phase.before + update), phase)

            optimizer.zero_grad()
            loss.backward()
            clip_grad_norm_(model.parameters(), LARGEST_NORM)
            optimizer.step()
            step_losses.append(loss.detach())
        mean_loss = math.fsum(torch.stack(step_losses).tolist()) / len(step_losses)
        check_finite(mean_loss, f"before update {end}")
        trained = time.perf_counter()
        entry: dict[str, Any] = {"update": end, "train_loss": mean_loss}
        for rate, value in error_rates(model, phase.words.valid, config["beam_size"], device).items():
            entry[f"valid_{rate}"] = value
        entry["train_seconds"] = trained - started
        entry["eval_seconds"] = time.perf_counter() - trained
        run.save(entry, last=end == phase.num_updates, message=f"update {end}/{phase.num_updates}")


class Pairs:
    """The training pairs of a word and a reading, in batches: letters (M, L), phonemes (M, T)."""

    def __init__(self, letters: Tensor, phonemes: Tensor, config: dict[str, Any]) -> None:
        self.letters = letters
        self.phonemes = phonemes
        self.batch_size: int = config["batch_size"]
        if self.batch_size > len(letters):
            raise ValueError(f"--batch_size {self.batch_size} exceeds the {len(letters)} training pairs")
        self.order = cache(lambda epoch: epoch_order(len(letters), config["seed"], epoch).to(letters.device))

    def batch(self, update: int) -> tuple[Tensor, Tensor]:
        """Letters (batch, L) and phonemes (batch, T), with an END behind the longest reading."""
        epoch, place = divmod(update, len(self.letters) // self.batch_size)
        chosen = self.order(epoch)[place * self.batch_size : (place + 1) * self.batch_size]
        right = self.phonemes[chosen]
        longest = int((right != END).sum(1).max())
        return self.letters[chosen], right[:, : longest + 1]


def loss_of(letters: Tensor, right: Tensor, phase: Phase) -> Tensor:
    """The loss, (), of letters (batch, L) and their phonemes (batch, T): cross-entropy, and that of the arm."""
    behind = pad(right[:, :-1] == END, (1, 0))  # (batch, T), behind the first END
    labels = right.masked_fill(behind, IGNORED)
    encoded = phase.model.encode(letters)
    loss_of_arm = None
    if phase.arm_loss is not None:
        loss_of_arm = phase.arm_loss(phase.model, encoded, right, labels)
    log_probs = phase.model.forced(encoded, right)  # (batch, T, V), given the right phonemes before
    nll = nll_loss(log_probs.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
    if loss_of_arm is None:
        return nll
    return loss_of_arm + phase.config["nll_weight"] * nll


def edit_distance(first: Sequence[int], second: Sequence[int]) -> int:
    """The smallest number of insertions, deletions and replacements from one sequence to the other."""
    row = list(range(len(second) + 1))
    for number, left in enumerate(first, start=1):
        above = row
        row = [number]
        for place, right in enumerate(second, start=1):
            row.append(min(above[place] + 1, row[-1] + 1, above[place - 1] + (left != right)))
    return row[-1]


def nearest(hypothesis: Reading, readings: Sequence[Reading]) -> tuple[int, int]:
    """The edit distance to the nearest reading, relative to its length, and its length."""
    distances = [(edit_distance(hypothesis, reading), len(reading)) for reading in readings]
    return min(distances, key=lambda pair: pair[0] / pair[1])


@torch.no_grad()
def error_rates(model: EncoderDecoder, split: WordSplit, beam_size: int, device: torch.device) -> dict[str, float]:
    """Error rates of beam search.

    per: edits per phoneme; wer: share of words whose best hypothesis is no reading; gold: share of words with a reading
    among the hypotheses.
    """
    edits = 0
    phonemes = 0
    wrong = 0
    in_beam = 0
    for hypotheses, readings in searched(model, split, beam_size, device):
        distance, length = nearest(hypotheses[0], readings)
        edits += distance
        phonemes += length
        wrong += hypotheses[0] not in readings
        in_beam += any(hypothesis in readings for hypothesis in hypotheses)
    return {"per": edits / phonemes, "wer": wrong / len(split), "gold": in_beam / len(split)}


def searched(
    model: EncoderDecoder, split: WordSplit, beam_size: int, device: torch.device
) -> Iterator[tuple[list[Reading], list[Reading]]]:
    """The hypotheses of each word, best first, and its readings."""
    for begin in range(0, len(split), EVAL_BATCH):
        letters = split.letters[begin : begin + EVAL_BATCH].to(device)
        beam = beam_search(model, model.encode(letters), beam_size, MAX_STEPS)
        for found, readings in zip(beam.phonemes.tolist(), split.readings[begin : begin + EVAL_BATCH]):
            yield [until_end(phonemes) for phonemes in found], readings


def until_end(phonemes: list[int]) -> Reading:
    if END in phonemes:
        phonemes = phonemes[: phonemes.index(END)]
    return tuple(phonemes)


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    processes = Processes(args.device, args.threads)
    if processes.count > 1:
        raise ValueError("train_beam_search.py is one process: leave torchrun out")
    for seed in args.seed:
        train(configuration(args, seed), processes)
    return 0


if __name__ == "__main__":
    sys.exit(door.call(main))
