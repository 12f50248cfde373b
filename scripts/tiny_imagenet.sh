#!/usr/bin/env bash
# The rows of Table 3 on Tiny-ImageNet-200: scripts/tiny_imagenet.sh FOLDER, which has train/WNID/ and test/WNID/
folder=$(CDPATH= cd -- "${1:?the folder of the images}" && pwd) || exit 2
shift
. "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/begin.sh"
features=data/downloads/embeddings/tiny_imagenet.pt trials=results/tiny_imagenet_trials.csv
extract=(.venv/bin/python experiments/extract_embeddings.py --dataset "$folder" --backbone tf_efficientnet_lite0
    --weights efficientnet-lite0 --resolution 128 --precision bf16 --output "$features")
if [[ " $* " == *" --dry-run "* || " $* " == *" --status "* ]]; then
  printf '%q ' "${extract[@]}" && echo
  [ -f "$features" ] || { echo "# linear classifiers: known when this has run"; exit; }
else
  "${extract[@]}"
fi
heads=(.venv/bin/python scripts/heads.py -d "$features" --num_valid 2000)
"${heads[@]}" table3 finals --per_p_k --methods softmax_cross_entropy smooth_hard_topk neuralsort softsort \
    sinkhorn_sort splitter_selection --trials "$trials" --results results/tiny_imagenet.csv "$@"
[ -f "$trials" ] || { echo "# table3_more: known when table3 has run"; exit; }
"${heads[@]}" table3_more finals --methods softmax_cross_entropy splitter_selection --around "$trials" \
    --trials results/tiny_imagenet_more_trials.csv --results results/tiny_imagenet_more.csv "$@"
