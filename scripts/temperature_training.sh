#!/usr/bin/env bash
# What the inverse temperature does to a whole network: three methods and two P_K over the temperatures of
# scripts/temperature.sh, "auto" and two schedules, and softmax cross-entropy, ResNet-18 from scratch on CIFAR-100 for 6
# epochs, two seeds: 122 rows of experiments/train_cifar100.py, added to results/temperature_training.csv. Arguments as in
# table1.sh.
. "$(dirname "${BASH_SOURCE[0]}")/begin.sh"

rows() {
  local row=".venv/bin/python experiments/train_cifar100.py"
  for seed in 0 1; do
    local record="--n_epochs 6 --lr_schedule cosine --precision bf16 --seed $seed --results results/temperature_training.csv"
    echo "$row --method softmax_cross_entropy --p_k 1. 0. 0. 0. 0. $record"
    for p_k in ".2 .2 .2 .2 .2" "0 0 0 0 1"; do
      for temperature in .1 .25 .5 1 2 4 10 auto .25:4 4:.25; do
        for method in neuralsort softsort splitter_selection; do
          middle=1
          [ $method = splitter_selection ] || middle=.5
          [ $temperature = auto ] && beta=auto ||
            beta=$(awk -v middle=$middle '{ for (i = 1; i <= NF; i++) printf "%s%g", (i > 1 ? ":" : ""), $i * middle }' \
              FS=: <<< $temperature)
          echo "$row --method $method --p_k $p_k --inverse_temperature $beta $record"
        done
      done
    done
  done
}
exec .venv/bin/python scripts/launch.py --name temperature_training --row-per-core "$@" < <(rows)
