#!/usr/bin/env bash
# Tables 2 and 3, ImageNet-21K-P: a new linear head on embeddings of ResNeXt-101 32x48d WSL, each loss at its published
# settings, two seeds: 20 rows, added to results/table2_3_imagenet21k.csv. Arguments as in table1.sh. The embeddings (50
# GB) are best there before:
#   .venv/bin/python -m data.embeddings fetch wsl-32x48d-224-21k --convert
. "$(dirname "${BASH_SOURCE[0]}")/begin.sh"

finetune=".venv/bin/python experiments/finetune_imagenet21k.py -d wsl-32x48d-224-21k --m 50 --nloglr 4 --n_epochs 40"
rows() {
  for seed in 0 1; do
    record="--seed $seed --results results/table2_3_imagenet21k.csv"
    echo "$finetune --method softmax_cross_entropy --p_k 1. 0. 0. 0. 0. $record"
    echo "$finetune --method smooth_hard_topk --inverse_temperature 1. --p_k 0. 0. 0. 0. 1. $record"
    for p_k in "0. 0. 0. 0. 1." ".5 0. 0. 0. .5"; do
      for method in \
        "neuralsort --inverse_temperature .5" \
        "softsort --inverse_temperature .5" \
        "sinkhorn_sort" \
        "splitter_selection --distribution logistic_phi --inverse_temperature 1. --art_lambda .5"; do
        echo "$finetune --method $method --p_k $p_k $record"
      done
    done
  done
}
exec .venv/bin/python scripts/launch.py --name table2_3_imagenet21k "$@" < <(rows)
