r"""45 planted faults, each of which some test must see: python tests/mutants.py [name ...]

Each fault is planted in a copy of the working tree, and the tests that should see it run there without it and with
it. Prints killed, survived, broken (the tests fail without it) or stale (the text it changes is not there), and a
total; the status is 1 unless all are killed. pytest does not collect this file; tests/test_mutants.py asks for stale.

A fault is its name and what it is (#), the text that stands once in a file (-), and what takes its place (+). Above
the faults of a file stand the file and the tests that should see them (@).
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
LEFT_OUT = (".git", ".venv", "__pycache__", ".pytest_cache", ".hypothesis", ".ruff_cache", "runs", "logs", "site")
LIMIT_SECONDS = 600
FAULTS = r"""
@ experiments/train_cifar100.py: tests/experiments/test_oracle_train_cifar100.py
# swapped_splits: an evaluation takes the test images for validation, and the other way round
- ("valid", data.valid), ("test", data.test),
+ ("valid", data.test), ("test", data.valid),

# label_noise_not_applied: --label_noise is recorded, and the labels stay right
- "label_noise": args.label_noise
+ "label_noise": 0.0

# same_crops: every epoch sees the crops of the first
- epoch_generator(config["seed"], epoch, device)
+ epoch_generator(config["seed"], 1, device)

# same_noise: every epoch has the loss noise of the first
- seed_noise(loss_fn, device, config["seed"], epoch, processes.rank)
+ seed_noise(loss_fn, device, config["seed"], 1, processes.rank)

# bf16_ignored: --precision bf16 is recorded, and the network computes in fp32
- enabled=args.precision == "bf16"):
+ enabled=False):

# average_not_evaluated: with --ema the trained weights are evaluated instead of their average
- evaluated, more = average.module,
+ evaluated, more = model,

# constant_cosine: the cosine schedule stays at its beginning
- (1 + math.cos(math.pi * progress)) / 2
+ (1 + math.cos(math.pi * 0)) / 2

# no_weight_decay: --weight_decay is recorded and not applied to networks
- config["lr"], weight_decay=args.weight_decay, fused=True)
+ config["lr"], weight_decay=0.0, fused=True)

# temperature_of_imagenet: sorts of all 100 scores have the temperature published for 16
- **dict.fromkeys(("neuralsort", "softsort"), 0.0625),
+ **dict.fromkeys(("neuralsort", "softsort"), 0.5),

# statistics_of_the_batch: evaluation normalises by the statistics of its batch
- model.eval()
+ model.train()

@ experiments/train_cifar100.py: tests/experiments/test_killed.py
# epoch_repeated: a resumed run takes its last epoch again
- range(run.done + 1, args.n_epochs + 1)
+ range(max(run.done, 1), args.n_epochs + 1)

@ experiments/train_beam_search.py: tests/experiments/test_oracle_train_beam_search.py
# test_rates_of_validation: the error rates of test words are those of the words that validate
- error_rates(model, words.test, beam_size, device)
+ error_rates(model, words.valid, beam_size, device)

# long_gradients: the gradients of sequence models are not clipped
- LARGEST_NORM = 1.0
+ LARGEST_NORM = 1e9

# no_likelihood: --nll_weight is recorded and not applied
- nll_weight = args.nll_weight if arm_loss else 1.0
+ nll_weight = 0.0 if arm_loss else 1.0

# same_batches_again: the updates of an arm take the batches of its pretraining
- fit(run, model, arm_loss, words, args.pretrain_updates, args.n_updates, args.lr)
+ fit(run, model, arm_loss, words, 0, args.n_updates, args.lr)

@ scripts/sweeps.py: tests/scripts/test_published_rows.py
# temperatures_exchanged: on ImageNet-1K sorts have the temperature of networks, and networks that of sorts
- "table2_3_imagenet1k", [K5, HALF], ".5", "1."
+ "table2_3_imagenet1k", [K5, HALF], "1.", ".5"

# half_on_k_4: on ImageNet-21K half of P_K is on k = 4 instead of k = 5
- "table2_3_imagenet21k", [K5, HALF]
+ "table2_3_imagenet21k", [K5, ".5 0. 0. .5 0."]

# p_k_reversed: in Table 5 three quarters of P_K are on k = 1 instead of k = 5
- quarter, k_even = "--p_k .25 0. 0. 0. .75"
+ quarter, k_even = "--p_k .75 0. 0. 0. .25"

@ scripts/reporting/runs.py: tests/scripts/test_heads_trials.py
# best_by_top_5: the best trial of a method is the one with the highest validation top-5
- score = trials[f"{split}_top1"].astype(float) + trials
+ score = trials

@ scripts/reporting/runs.py: tests/scripts/test_report.py
# counted_twice: a run that stands twice in a file of results is counted twice
- runs = runs.drop_duplicates(keys, keep="last")
+ runs = runs.copy()

# narrow_interval: an interval divides by the number of differences instead of its root
- * std / number**0.5
+ * std / number

@ scripts/sweeps.py: tests/scripts/test_heads_trials.py
# trials_of_k_4: trials of top-5 alone are of top-4 alone
- P_KS = (".5 0 0 0 .5", ".2 .2 .2 .2 .2", "0 0 0 0 1")
+ P_KS = (".5 0 0 0 .5", ".2 .2 .2 .2 .2", "0 0 0 1 0")

@ scripts/reporting/figures.py: tests/scripts/test_what_figures_show.py
# top_5_in_the_panel_of_top_1: both panels of accuracy over epochs show top-5
- rows.groupby(x, sort=False)[y]
+ rows.groupby(x, sort=False)[list(ys)[-1]]

# longer_epochs: seconds per epoch are of 470 steps
- STEPS_PER_EPOCH = 371
+ STEPS_PER_EPOCH = 470

@ scripts/launch.py: tests/scripts/test_launch.py::test_a_run_that_outlives_its_killed_launcher_holds_the_sweep
# rows_outlive_the_launcher: a row goes on when its launcher is killed, and the sweep can begin beside it
- "pass_fds": [lock]
+ "pass_fds": []

@ data/embeddings.py: tests/experiments/test_oracle_finetune_imagenet.py tests/data/test_embeddings.py
# partial_batch_trains: the last, smaller batch of an epoch of embeddings is not dropped
- range(start * batch_size, len(order) - batch_size + 1, batch_size)
+ range(start * batch_size, len(order), batch_size)

@ data/embeddings.py: tests/experiments/test_oracle_finetune_imagenet.py
# labels_reversed: the labels of embeddings are read from the end
- splits[name] = Split(rows, labels.long())
+ splits[name] = Split(rows, labels.long().flip(0))

@ experiments/finetune_imagenet.py: tests/experiments/test_oracle_finetune_imagenet.py
# no_weight_decay_of_heads: --weight_decay is recorded and not applied to heads
- config["lr"], weight_decay=options.weight_decay, fused=True)
+ config["lr"], weight_decay=0.0, fused=True)

# same_order: heads see the embeddings in the order of the first epoch
- read(data["train"], rows["train"], batch_size, epoch, seed, device, first)
+ read(data["train"], rows["train"], batch_size, 1, seed, device, first)

# validation_trains: the rows that validate are trained on, too
- rows |= {"train": train[learn], "valid": train[valid]}
+ rows |= {"valid": train[valid]}

@ data/cifar.py: tests/data/test_cifar.py::test_a_seed_chooses_the_images_that_validate
# one_split_for_all_seeds: the same images validate, whatever the seed
- generator=seeded(SPLIT, seed)
+ generator=seeded(SPLIT, 0)

@ data/cifar.py: tests/data/test_cifar.py::test_digits_need_no_files
# too_many_validate: a tenth of the training images validates
- VALID_SHARE = 0.05
+ VALID_SHARE = 0.1

@ data/cifar.py: tests/data/test_cifar.py::test_pixels_are_normalised_by_the_numbers_of_the_published_code
# wrong_deviation: pixels are divided by another standard deviation than the published code's
- CIFAR_STD: Rgb = (0.2023, 0.1994, 0.2010)
+ CIFAR_STD: Rgb = (0.2470, 0.2435, 0.2616)

@ experiments/common/metrics.py: tests/experiments/test_oracle_train_cifar100.py
# test_chooses: the epoch of a row is the one where test accuracy is best
- key=lambda entry: entry[f"valid_top{k}"]
+ key=lambda entry: entry.get(f"test_top{k}", 0)

@ experiments/common/metrics.py: tests/experiments/test_oracle_finetune_imagenet.py
# one_rank_fewer: top-k accuracy counts the k - 1 largest scores
- (ranks <= min(k, n)).sum()
+ (ranks < min(k, n)).sum()

@ models/beam_search.py: tests/experiments/test_oracle_train_beam_search.py
# beam_of_one: beam search holds one hypothesis, whatever --beam_size says
- enumerate(search(model, encoded, K), start=1)
+ enumerate(search(model, encoded, 1), start=1)

# right_hypothesis_lost: where it falls off the beam in training, the right hypothesis does not come back
- torch.where(lost, gold, kept[:, -1])
+ kept[:, -1]

@ experiments/train_knn.py: tests/experiments/test_oracle_train_knn.py
# fewer_neighbours_vote: the majority is of the k - 1 nearest
- args.k)])
+ args.k)[:, :-1]])

# no_momentum: the nearest-neighbour classifier is trained without momentum
- momentum=0.9
+ momentum=0.0

# a_query_meets_itself: a query counts among its own candidates without --self_match
- same = None if args.self_match else
+ same = None if not args.self_match else

# candidates_are_the_queries: candidates come in the order of the queries
- epoch_order(len(train), seed, 2 * epoch + number)
+ epoch_order(len(train), seed, 2 * epoch)

@ experiments/common/losses.py: tests/experiments/test_losses.py
# linear_schedule: an inverse temperature such as 0.25:4 goes evenly, not evenly in its logarithm
- ends[0] * (ends[1] / ends[0]) ** progress
+ ends[0] + (ends[1] - ends[0]) * progress

@ experiments/finetune_imagenet21k.py: tests/experiments/test_oracle_finetune_imagenet.py
# scores_of_imagenet_1k: heads on ImageNet-21K keep 16 scores instead of 50
- m=50,
+ m=16,

@ scripts/reporting/runs.py: tests/scripts/test_report.py
# narrow_deviation: the standard deviation of a table divides by the number of seeds instead of one fewer
- {values.std():.2f}
+ {values.std(ddof=0):.2f}

@ data/cmudict.py: tests/data/test_cmudict.py
# validation_words_train: the words that validate are trained on, too
- train := order[num_test + num_valid :]
+ train := order[num_test:]
"""


class Fault(NamedTuple):
    name: str
    what: str
    path: str
    old: str
    new: str
    tests: tuple[str, ...]


def read_faults() -> list[Fault]:
    faults = []
    for line in FAULTS.splitlines():
        mark, text = line[:1], line[2:]
        if mark == "@":
            path, tests = text.split(": ", 1)
        elif mark == "#":
            name, what = text.split(": ", 1)
        elif mark == "-":
            old = text
        elif mark == "+":
            faults.append(Fault(name, what, path, old, text, tuple(tests.split())))
    return faults


def is_stale(fault: Fault) -> bool:
    """Whether the text that the fault changes does not occur exactly once in its file, or its tests are not there."""
    path, tests = ROOT / fault.path, [ROOT / test.partition("::")[0] for test in fault.tests]
    return not all(map(Path.is_file, (path, *tests))) or path.read_text(encoding="utf-8").count(fault.old) != 1


@cache
def status_of(tree: Path, tests: tuple[str, ...], planted: str = "") -> int:
    """The status of pytest in a tree, planted: the name of the fault that is there; a test that hangs has failed."""
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        return subprocess.run(command, cwd=tree, env=environment, capture_output=True, timeout=LIMIT_SECONDS).returncode
    except subprocess.TimeoutExpired:
        return 1


def outcome_of(fault: Fault, tree: Path) -> str:
    """Plant the fault in a copy of the tree, run its tests, and take the fault out again."""
    if is_stale(fault):
        return "stale"
    if status_of(tree, fault.tests):
        return "broken"
    path = tree / fault.path
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(fault.old, fault.new), encoding="utf-8")
    status = status_of(tree, fault.tests, fault.name)
    path.write_text(text, encoding="utf-8")
    return "killed" if status else "survived"


def main(names: list[str]) -> int:
    faults = {fault.name: fault for fault in read_faults()}
    if unknown := [name for name in names if name not in faults]:
        sys.exit(f"error: there is no fault {unknown[0]}; there are {', '.join(faults)}")
    counts = dict.fromkeys(("killed", "survived", "broken", "stale"), 0)
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(*LEFT_OUT))
        (tree / ".venv").symlink_to(ROOT / ".venv")  # of the scripts in scripts/
        for fault in map(faults.get, names or faults):
            started = time.perf_counter()
            outcome = outcome_of(fault, tree)
            counts[outcome] += 1
            print(f"{outcome:8}  {time.perf_counter() - started:4.0f} s  {fault.name}: {fault.what}", flush=True)
    print(", ".join(f"{number} {outcome}" for outcome, number in counts.items()))
    return int(counts["killed"] < len(names or faults))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
