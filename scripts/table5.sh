#!/usr/bin/env bash
# Table 5, our rows: new linear heads on embeddings of ResNeXt-101 32x48d WSL and of Noisy Student EfficientNet-L2, each
# with its published settings, two seeds: 12 rows, added to results/table5.csv. The P_K published for SinkhornSort is
# not known: it has that of the networks here. Arguments as in table1.sh. The embeddings (11 and 14 GB) are best there
# before:
#   .venv/bin/python -m data.download wsl-32x48d-320
#   .venv/bin/python -m data.download efficientnet-l2-800
. "$(dirname "${BASH_SOURCE[0]}")/begin.sh"

finetune=".venv/bin/python experiments/finetune_imagenet.py --m 16 --nloglr 4.5"
rows() {
  for seed in 0 1; do
    record="--seed $seed --results results/table5.csv"
    for method in \
      "softmax_cross_entropy --p_k 1. 0. 0. 0. 0." \
      "sinkhorn_sort --p_k .2 .2 .2 .2 .2" \
      "splitter_selection --distribution logistic_phi --inverse_temperature 1. --art_lambda .5 --p_k .2 .2 .2 .2 .2"; do
      echo "$finetune -d wsl-32x48d-320 --method $method $record"
    done
    for method in \
      "softmax_cross_entropy --p_k 1. 0. 0. 0. 0." \
      "sinkhorn_sort --p_k .25 0. 0. 0. .75" \
      "splitter_selection --distribution logistic --inverse_temperature .5 --p_k .25 0. 0. 0. .75"; do
      echo "$finetune -d efficientnet-l2-800 --method $method $record"
    done
  done
}
exec .venv/bin/python scripts/launch.py --name table5 "$@" < <(rows)
