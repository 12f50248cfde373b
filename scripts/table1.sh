#!/usr/bin/env bash
# Table 1: ResNet-18 from scratch on CIFAR-100 with each loss at its published settings, two seeds: 20 rows, added to
# results/table1.csv. Works from any directory; paths in arguments are relative to the repository.
#   scripts/table1.sh --short                        # 16 epochs, cosine and bf16 in place of 200 epochs, constant and
#                                                    # fp32; three seeds, to results/table1_short.csv
#   scripts/table1.sh --dry-run                      # print the command lines and their number
#   scripts/table1.sh --jobs 2                       # flags of scripts/launch.py (--help) are the launcher's,
#   scripts/table1.sh --n_epochs 5 --limit_train 5000     # every other argument goes to every row
# What was stopped or killed continues when the same call is given again.
. "$(dirname "${BASH_SOURCE[0]}")/begin.sh"

name=table1 seeds="0 1" schedule="" others=()
for word; do
  if [ "$word" = --short ]; then
    name=table1_short seeds="0 1 2" schedule=" --n_epochs 16 --lr_schedule cosine --precision bf16"
  else
    others+=("$word")
  fi
done
train=".venv/bin/python experiments/train_cifar100.py"
rows() {
  for seed in $seeds; do
    record="--seed $seed --results results/$name.csv$schedule"
    echo "$train --method softmax_cross_entropy --p_k 1. 0. 0. 0. 0. $record"
    echo "$train --method smooth_hard_topk --inverse_temperature 1. --p_k 0. 0. 0. 0. 1. $record"
    for p_k in "0. 0. 0. 0. 1." ".2 .2 .2 .2 .2"; do
      for method in \
        "neuralsort --inverse_temperature 0.0625" \
        "softsort --inverse_temperature 0.0625" \
        "sinkhorn_sort" \
        "splitter_selection --distribution logistic_phi --inverse_temperature .5 --art_lambda .5"; do
        echo "$train --method $method --p_k $p_k $record"
      done
    done
  done
}
exec .venv/bin/python scripts/launch.py --name $name --row-per-core ${others[@]+"${others[@]}"} < <(rows)
