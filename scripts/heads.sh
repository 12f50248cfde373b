#!/usr/bin/env bash
# Do top-k losses help on pretrained features? Linear heads for CIFAR-100 on an ImageNet network whose weights a package
# brings along: extraction (5 minutes of a core), the same trials for each method, cross-entropy included (rates and
# epochs: scripts/sweeping/heads.py), then ten seeds of each method's best, and their differences to cross-entropy's. Rows
# are added to results/heads_trials.csv and results/heads.csv. --data_dir: where the images are, or are downloaded to. Flags
# after these are the launcher's; another file, as the first argument, has results files of its own name:
#   scripts/heads.sh                                 # four methods, ten minutes on two cores
#   scripts/heads.sh --all                           # every method, four hours
#   scripts/heads.sh --label_noise .2 --all          # training labels partly wrong: results/heads_noise_.2.csv
#   scripts/heads.sh --label_noise .2:100            # not among five classes but among all
#   scripts/heads.sh --more                          # then 30 trials more of each: results/heads_more.csv
#   scripts/heads.sh own.pt --all --jobs 1        # results/heads_own.csv
. "$(dirname "${BASH_SOURCE[0]}")/begin.sh"

store="" images=() noise=() more="" stages="trials longer finals"
methods="--methods softmax_cross_entropy ldr_kl lapsum splitter_selection"
if [ $# -gt 0 ] && [[ $1 != -* ]]; then store=$1 && shift; fi
while [ $# -gt 0 ]; do
  case $1 in
    --data_dir) images=("${@:1:2}") && shift $(($# > 1)) ;;
    --label_noise) noise=("${@:1:2}") && shift $(($# > 1)) ;;
    --more) more=_more stages="more finals" ;;
    --all) methods="" ;;
    *) break ;;
  esac
  shift
done
if [ -z "$store" ]; then
  store=data/downloads/embeddings/heads.pt
  .venv/bin/python experiments/extract_embeddings.py --dataset cifar100 --backbone tf_efficientnet_lite0 \
    --weights efficientnet-lite0 --resolution 128 --precision bf16 --output $store ${images[@]+"${images[@]}"}
fi
if [ ${#noise[@]} -gt 0 ]; then
  store=$(.venv/bin/python -m scripts.sweeping.relabel "$store" "${noise[@]:1}")
fi
name=$(basename "$store" .pt)$more
[[ $name == heads* ]] || name=heads_$name
results=results/$name.csv
for stage in $stages; do
  rows=$(.venv/bin/python -m scripts.sweeping.heads $stage "$store" --results "$results" $methods)
  .venv/bin/python scripts/launch.py --name "${name}_$stage" --row-per-core "$@" <<< "$rows"
done
.venv/bin/python scripts/report.py "$results" --paired softmax_cross_entropy
