#!/usr/bin/env bash
# A first look: installs into .venv, trains a small ResNet-18 with four losses on scikit-learn's bundled digits (no
# download) and prints their table. Under 3 minutes on 2 CPU cores after the installation. Works from any directory;
# a second call finds its rows in results/quickstart.csv and only prints them (further arguments go to every row).
#   scripts/quickstart.sh [--force]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/environment.sh

row() {
  .venv/bin/python experiments/train_cifar100.py --dataset digits --n_epochs 3 --batch_size 32 --results results/quickstart.csv "$@"
}
row --method softmax_cross_entropy "$@"
row --method splitter_selection --p_k .5 0 0 0 .5 "$@"
row --method neuralsort --p_k .5 0 0 0 .5 "$@"
row --method soft_topk --p_k .5 0 0 0 .5 "$@"
.venv/bin/python -m experiments.run_record show results/quickstart.csv --columns method p_k n_epochs test_top1 test_top5 train_seconds
