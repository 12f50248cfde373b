#!/usr/bin/env bash
# Table 1's network from scratch in 16 epochs, as table1.sh --short has it, with other settings than the published ones
# beside those, cross-entropy's too: 14 with one seed, two more seeds of what validation prefers of each method, and six
# rows whose training labels are wrong in part. An hour of a core each, added to results/scratch.csv. Arguments as in
# table1.sh.
. "$(dirname "${BASH_SOURCE[0]}")/begin.sh"

rows() {
  local row=".venv/bin/python experiments/train_cifar100.py --results results/scratch.csv --n_epochs 16"
  local half="--p_k .5 0 0 0 .5 --inverse_temperature" softmax="softmax_cross_entropy --p_k 1. 0. 0. 0. 0. --lr"
  local splitter="splitter_selection $half" lapsum="lapsum $half" df="df_topk $half" softsort="softsort $half"
  run() { for setting in "${@:2}"; do echo "$row --lr_schedule cosine --precision bf16 --method $setting --seed $1"; done; }
  run 0 "$splitter .5" "$splitter .1" "$lapsum .1" "$splitter .25" "$lapsum .25" "$splitter .05" "$df .1" "$df .25" \
    "$softsort 1" "$softsort 2" "$softmax .001" "$softmax .001 --label_smoothing .1" "$softmax .0005" "$softmax .002"
  for seed in 1 2; do run $seed "$softmax .001" "$splitter .1" "$df .1" "$softsort 1" "$lapsum .25"; done
  run "0 --label_noise .2" "$softmax .001" "$splitter .1" "$softmax .001 --label_smoothing .1" "$lapsum .1" "$splitter .05" \
    "$splitter .025"
}
exec .venv/bin/python scripts/launch.py --name scratch --row-per-core "$@" < <(rows)
