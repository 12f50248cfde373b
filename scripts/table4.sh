#!/usr/bin/env bash
# Table 4: ResNet-18 from scratch on CIFAR-100, each method over the six P_K, two seeds: 46 rows, added to
# results/table4.csv. With P_K = 1 0 0 0 0 nothing is sorted, so that this row, softmax cross-entropy, is there once and
# not once per relaxed method; the smooth top-k loss has one k, hence its two rows. Rows that scripts/table1.sh has
# finished are recorded without training again; the two must not run at the same time. Arguments as in table1.sh; of
# --short, too, two seeds, to results/table4_short.csv.
. "$(dirname "${BASH_SOURCE[0]}")/begin.sh"
. scripts/published.sh

name=table4 smooth=("1. 0. 0. 0. 0." "0. 0. 0. 0. 1.")
options "--n_epochs 16 --lr_schedule cosine --precision bf16" "$@"
rows() {
  published ".venv/bin/python experiments/train_cifar100.py" 0.0625 .5 \
    "0. 0. 0. 0. 1." ".5 0. 0. 0. .5" ".25 0. 0. 0. .75" ".1 0. 0. 0. .9" ".2 .2 .2 .2 .2"
}
exec .venv/bin/python scripts/launch.py --name $name --row-per-core ${others[@]+"${others[@]}"} < <(rows)
