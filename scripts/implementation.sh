#!/usr/bin/env bash
# What is not a setting of the loss, parted: the first 5 epochs of a published row (splitter network, .2 on each k) in
# bf16, by the official package's loss, in mode sm, and in fp32 as published: 8 rows of two seeds, 20 minutes of a core
# each, added to results/implementation.csv. Arguments as in table1.sh.
. "$(dirname "${BASH_SOURCE[0]}")/begin.sh"

rows() {
  local row=".venv/bin/python experiments/train_cifar100.py --method splitter_selection --p_k .2 .2 .2 .2 .2 --n_epochs 5"
  for seed in 0 1; do
    for setting in bf16 "bf16 --implementation difftopk" "bf16 --top1_mode sm" fp32; do
      echo "$row --seed $seed --results results/implementation.csv --precision $setting"
    done
  done
}
exec .venv/bin/python scripts/launch.py --name implementation --row-per-core "$@" < <(rows)
