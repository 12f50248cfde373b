#!/usr/bin/env bash
# A first look: installs into .venv, trains a small ResNet-18 with four losses on scikit-learn's bundled digits (no
# download), two at a time on two cores, and prints their table. Under 2 minutes on 2 CPU cores after the installation.
# Works from any directory; a second call finds its rows in results/quickstart.csv and only prints them.
#   scripts/quickstart.sh [--force]                  # flags as in table1.sh
. "$(dirname "${BASH_SOURCE[0]}")/begin.sh"
. scripts/environment.sh

row() {
  echo ".venv/bin/python experiments/train_cifar100.py --dataset digits --n_epochs 3 --batch_size 32 --results results/quickstart.csv $*"
}
rows() {
  row --method softmax_cross_entropy
  for method in splitter_selection neuralsort soft_topk; do row --method $method --p_k .5 0 .5; done
}
.venv/bin/python scripts/launch.py --name quickstart --row-per-core "$@" < <(rows)
.venv/bin/python -c "import pandas; print(pandas.read_csv('results/quickstart.csv')['method p_k n_epochs test_top1 test_top3 train_seconds'.split()].to_string(index=False))"
cat <<'TEXT'

A row is a loss: softmax cross-entropy, then three that pay half for the first rank and half for the first three (P_K). test_top1 is
the share of test digits whose class has the highest score, test_top3 that of those whose class is among the three highest.
Three epochs on small digits compare nothing; they show that everything runs. Next:
  .venv/bin/python experiments/train_cifar100.py --method splitter_selection --p_k .5 0 0 0 .5 --n_epochs 2   # CIFAR-100
  .venv/bin/python scripts/report.py results/quickstart.csv                                                  # as a table
TEXT
