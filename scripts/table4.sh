#!/usr/bin/env bash
# Table 4: ResNet-18 from scratch on CIFAR-100, each method over the six P_K, two seeds: 46 rows, added to
# results/table4.csv. With P_K = 1 0 0 0 0 nothing is sorted, so that this row, softmax cross-entropy, is there once and
# not once per relaxed method; the smooth top-k loss has one k, hence its two rows. Rows that scripts/table1.sh has
# finished are recorded without training again; the two must not run at the same time. Arguments as in table1.sh; of
# --short, too, two seeds, to results/table4_short.csv.
. "$(dirname "${BASH_SOURCE[0]}")/begin.sh"

name=table4 schedule="" others=()
for word; do
  if [ "$word" = --short ]; then
    name=table4_short schedule=" --n_epochs 16 --lr_schedule cosine --precision bf16"
  else
    others+=("$word")
  fi
done
train=".venv/bin/python experiments/train_cifar100.py"
rows() {
  for seed in 0 1; do
    record="--seed $seed --results results/$name.csv$schedule"
    echo "$train --method softmax_cross_entropy --p_k 1. 0. 0. 0. 0. $record"
    for p_k in "1. 0. 0. 0. 0." "0. 0. 0. 0. 1."; do
      echo "$train --method smooth_hard_topk --inverse_temperature 1. --p_k $p_k $record"
    done
    for p_k in "0. 0. 0. 0. 1." ".5 0. 0. 0. .5" ".25 0. 0. 0. .75" ".1 0. 0. 0. .9" ".2 .2 .2 .2 .2"; do
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
