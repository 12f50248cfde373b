#!/usr/bin/env bash
# Table 1's network from scratch in 16 epochs, as table1.sh --short has it, with other settings than the published ones
# beside those, cross-entropy's too: 28 rows of two seeds, an hour of a core each, added to results/scratch.csv.
# Validation chooses among the settings of a method. Arguments as in table1.sh.
. "$(dirname "${BASH_SOURCE[0]}")/begin.sh"

rows() {
  local row=".venv/bin/python experiments/train_cifar100.py"
  local softmax="--method softmax_cross_entropy --p_k 1. 0. 0. 0. 0. --lr"
  for seed in 0 1; do
    local record="--seed $seed --results results/scratch.csv --n_epochs 16 --lr_schedule cosine --precision bf16"
    for setting in "splitter_selection .5" "splitter_selection .1" "lapsum .1" "splitter_selection .25" "lapsum .25" \
      "splitter_selection .05" "df_topk .1" "df_topk .25" "softsort 1" "softsort 2"; do
      echo "$row --method ${setting/ / --p_k .5 0 0 0 .5 --inverse_temperature } $record"
    done
    for setting in .001 ".001 --label_smoothing .1" .0005 .002; do echo "$row $softmax $setting $record"; done
  done
}
exec .venv/bin/python scripts/launch.py --name scratch --row-per-core "$@" < <(rows)
