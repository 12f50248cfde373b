#!/usr/bin/env bash
# How the best inverse temperature moves with the number of classes and of sorted scores: heads as those of
# temperature.sh, for five methods with P_K .5 0 0 0 .5, on sets made of its embeddings: their 100 classes as they are,
# ten at a time as one, and each in ten parts, by which of ten random directions a row lies furthest along from the mean
# of its class. Rows are added to results/temperature_classes_10.csv, _100.csv and _1000.csv. The first argument names
# the store; others as in table1.sh:
#   scripts/temperature_classes.sh cifar100.store --jobs 2
. "$(dirname "${BASH_SOURCE[0]}")/begin.sh"
if [ $# -eq 0 ] || [[ $1 == -* ]]; then
  echo "error: the first argument must be a store of embeddings, as scripts/temperature.sh takes with -d" >&2
  exit 2
fi
store=$1 && shift

rows() {
  .venv/bin/python - "$store" <<'PYTHON'
import sys
from pathlib import Path

import torch

from data.atomic_file import atomic_write
from data.embeddings import EmbeddingStore, open_or_fetch
from data.program import ProgramError
from topk_losses import METHODS

FACTORS = (0.1, 0.25, 0.5, 1, 2, 4, 10)
SCORES = {10: (10,), 100: (16, 50, 100), 1000: (16, 50, 1000)}  # sorted, by number of classes


def relabelled(store: EmbeddingStore, num_classes: int, path: Path) -> Path:
    """Write the rows with other labels to a file of tensors, if it is not there, and return its path."""
    if path.exists():
        return path
    directions = torch.randn(store.dim, 10, generator=torch.Generator().manual_seed(0))
    tensors, means = {}, None
    for split in ("train", "test"):
        rows, labels = store[split].read(torch.arange(len(store[split]))), store[split].labels()
        if means is None:
            means = torch.stack([rows[labels == c].float().mean(0) for c in range(store.num_classes)])
        part = ((rows.float() - means[labels]) @ directions).argmax(1)
        labels = labels // 10 if num_classes < store.num_classes else 10 * labels + part
        tensors |= {f"{split}_embeddings": rows, f"{split}_labels": labels}
    with atomic_write(path, "wb") as file:
        torch.save(tensors, file)
    return path


try:
    store = open_or_fetch(sys.argv[1])
except ProgramError as error:
    sys.exit(f"error: {error}")
if store.num_classes != 100:
    sys.exit(f"error: the sets are made of 100 classes, and {sys.argv[1]} has {store.num_classes}; give another store")
for num_classes, scores in SCORES.items():
    same = num_classes == store.num_classes
    data = sys.argv[1] if same else relabelled(store, num_classes, Path(f"{sys.argv[1]}-of-{num_classes}.pt"))
    for method in ("neuralsort", "softsort", "lml", "subset_topk", "splitter_selection"):
        for m in scores:
            betas = [f"{factor * METHODS[method].inverse_temperature:g}" for factor in FACTORS] + ["auto"]
            heads = [f"--method {method} --p_k .5 0 0 0 .5 --inverse_temperature {beta} --m {m}" for beta in betas]
            also = "".join(f' --also "{head}"' for head in heads[1:])
            print(
                f".venv/bin/python experiments/finetune_imagenet.py {heads[0]}{also} --seeds 0 1 2 --n_epochs 5 "
                f"-d {data} --results results/temperature_classes_{num_classes}.csv"
            )
PYTHON
}
commands=$(rows) || exit 2
exec .venv/bin/python scripts/launch.py --name temperature_classes --row-per-core "$@" <<< "$commands"
