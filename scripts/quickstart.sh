#!/usr/bin/env bash
# A first look: installs into .venv, trains a small ResNet-18 with four losses on scikit-learn's digits (no download), and
# prints their accuracies beside this repository's. Under 2 minutes on 2 CPU cores after the installation. A second call
# only prints the table.
#   scripts/quickstart.sh [--force]                  # flags of scripts/study.py and experiments/train_cifar100.py
. "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/begin.sh"
. scripts/environment.sh

.venv/bin/python scripts/study.py quickstart "$@"
[[ ! " $* " =~ " --"(dry-run|status|commands)" " ]] || exit 0
cat <<'TEXT'

A line is a loss: softmax cross-entropy, then three with half top-1 and half top-3 (P_K). Next:
  .venv/bin/python experiments/train_cifar100.py --method splitter_selection --p_k .5 0 0 0 .5 --n_epochs 2   # CIFAR-100
TEXT
