#!/usr/bin/env bash
# How the best inverse temperature moves with the number of classes and of sorted scores: heads as those of
# temperature.sh, for five methods with P_K .5 0 0 0 .5, on sets made of its embeddings: their 100 classes as they are,
# ten at a time as one, and each in ten parts, by which of ten random directions a row lies furthest along from the mean
# of its class. Rows are added to results/temperature_classes_10.csv, _100.csv and _1000.csv. The first argument names
# the file; others as in table1.sh:
#   scripts/temperature_classes.sh cifar100.pt --jobs 2
. "$(dirname "${BASH_SOURCE[0]}")/begin.sh"
if [ $# -eq 0 ] || [[ $1 == -* ]]; then
  echo "error: the first argument must be a file of embeddings, as scripts/temperature.sh takes with -d" >&2
  exit 2
fi
store=$1 && shift

rows() {
  .venv/bin/python - "$store" <<'PYTHON'
import sys
from pathlib import Path

import torch

from data.embeddings import Embeddings, load_embeddings
from scripts.sweeping.heads import command
from scripts.sweeping.relabel import relabelled
from topk_losses import METHODS

FACTORS = (0.1, 0.25, 0.5, 1, 2, 4, 10)
SCORES = {10: (10,), 100: (16, 50, 100), 1000: (16, 50, 1000)}  # sorted, by number of classes


def other_labels(store: Embeddings, num_classes: int) -> dict[str, torch.Tensor]:
    """Ten classes in one, or a tenth of one."""
    labels = {name: split.labels for name, split in store.splits.items()}
    if num_classes < store.num_classes:
        return {name: each // 10 for name, each in labels.items()}
    directions = torch.randn(store.dim, 10, generator=torch.Generator().manual_seed(0))
    rows = {name: split.embeddings for name, split in store.splits.items()}
    means = torch.stack([rows["train"][labels["train"] == c].float().mean(0) for c in range(store.num_classes)])
    return {name: 10 * labels[name] + ((rows[name].float() - means[labels[name]]) @ directions).argmax(1) for name in rows}


store = load_embeddings(Path(sys.argv[1]))
if store.num_classes != 100:
    sys.exit(f"error: the sets are made of 100 classes, and {sys.argv[1]} has {store.num_classes}; give another store")
for num_classes, scores in SCORES.items():
    same = num_classes == store.num_classes
    path = Path(f"{sys.argv[1].removesuffix('.pt')}_of_{num_classes}.pt")
    data = sys.argv[1] if same else relabelled(store, other_labels(store, num_classes), path)
    for method in ("neuralsort", "softsort", "lml", "subset_topk", "splitter_selection"):
        for m in scores:
            betas = [f"{factor * METHODS[method].inverse_temperature:g}" for factor in FACTORS] + ["auto"]
            heads = [f"--method {method} --p_k .5 0 0 0 .5 --inverse_temperature {beta} --m {m}" for beta in betas]
            results = f"results/temperature_classes_{num_classes}.csv"
            print(command(heads, f"--seeds 0 1 2 --n_epochs 5 -d {data} --results {results}"))
PYTHON
}
commands=$(rows) || exit 2
exec .venv/bin/python scripts/launch.py --name temperature_classes --row-per-core "$@" <<< "$commands"
