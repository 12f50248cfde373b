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
. scripts/published.sh

name=table1
options "--n_epochs 16 --lr_schedule cosine --precision bf16" "$@"
[ $name = table1 ] || seeds="0 1 2"
rows() {
  published ".venv/bin/python experiments/train_cifar100.py" 0.0625 .5 "0. 0. 0. 0. 1." ".2 .2 .2 .2 .2"
}
exec .venv/bin/python scripts/launch.py --name $name --row-per-core ${others[@]+"${others[@]}"} < <(rows)
