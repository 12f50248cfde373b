#!/usr/bin/env bash
# What the inverse temperature does: a linear head on frozen embeddings for each method, P_K and inverse temperature, of
# which there are seven over two decades, "auto", and two schedules around the default, three seeds: rows of
# experiments/finetune_imagenet.py, added to results/temperature.csv. A method's temperatures and seeds are heads of one
# command, which read each batch once. A head sorts the scores of all 100 classes; those of sinkhorn_sort the 50
# largest, as all would take hours. Embeddings of CIFAR-100 by a finished row:
#   .venv/bin/python experiments/train_cifar100.py --method softmax_cross_entropy --n_epochs 16 --lr_schedule cosine
#   .venv/bin/python experiments/extract_embeddings.py --help
#   scripts/temperature.sh -d cifar100.pt         # flags as in table1.sh
. "$(dirname "${BASH_SOURCE[0]}")/begin.sh"

rows() {
  .venv/bin/python - <<'PYTHON'
from scripts.sweeping.heads import command
from topk_losses import METHODS, RELAXATIONS
from topk_losses.methods import TOP1

FACTORS = (0.1, 0.25, 0.5, 1, 2, 4, 10)
MIDDLE = {"neuralsort": 0.5, "softsort": 0.5, "sinkhorn_sort": 100, "soft_topk": 10}  # of the others 1
slow = ("sinkhorn_sort", "perturbed_topk", "odd_even")  # last
for method in sorted(METHODS, key=lambda method: method in slow):
    has_temperature = METHODS[method].inverse_temperature is not None
    temperatures = [f" --inverse_temperature {factor * MIDDLE.get(method, 1):g}" for factor in FACTORS]
    temperatures += [" --inverse_temperature auto"] if METHODS[method].spread else []
    middle = METHODS[method].inverse_temperature or 1
    annealed = [f" --inverse_temperature {ends[0] * middle:g}:{ends[1] * middle:g}" for ends in ((0.25, 4), (4, 0.25))]
    temperatures += annealed if METHODS[method].spread and method not in slow else []
    temperatures = temperatures if has_temperature else [""]
    # A method whose masks have zeros wants the softmax's part; a loss of a single k takes one.
    has_zeros = getattr(METHODS[method].operator, "has_zeros", False)
    p_ks = [".2 .2 .2 .2 .2", ".5 0 0 0 .5", *(() if has_zeros else ("0 0 0 0 1",))]
    if method not in RELAXATIONS:
        p_ks = ["1" if method in TOP1 else "0 0 0 0 1"]
    for p_k in p_ks:
        m = 50 if method == "sinkhorn_sort" else 100
        heads = [f"--method {method} --p_k {p_k}{temperature} --m {m}" for temperature in temperatures]
        print(command(heads, "--seeds 0 1 2 --n_epochs 5 --results results/temperature.csv"))
PYTHON
}
exec .venv/bin/python scripts/launch.py --name temperature --row-per-core "$@" < <(rows)
