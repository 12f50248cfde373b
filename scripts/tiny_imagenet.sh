#!/usr/bin/env bash
# The rows of Table 3 on Tiny-ImageNet-200: scripts/tiny_imagenet.sh FOLDER, which has train/WNID/ and test/WNID/
folder=$(CDPATH= cd -- "${1:?the folder of the images}" && pwd) || exit 2
shift
. "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/begin.sh"
features=data/downloads/embeddings/tiny_imagenet.pt
extract=(.venv/bin/python experiments/extract_embeddings.py --dataset "$folder" --backbone tf_efficientnet_lite0
    --weights efficientnet-lite0 --resolution 128 --precision bf16 --output "$features")
if [[ " $* " =~ " --"(dry-run|status|commands)" " ]]; then
  printf '%q ' "${extract[@]}" && echo
  [ -f "$features" ] || { echo "# linear classifiers: known when this has run"; exit; }
else
  "${extract[@]}"
fi
.venv/bin/python scripts/study.py tiny_imagenet "$@"
.venv/bin/python scripts/study.py tiny_imagenet_more "$@"
.venv/bin/python scripts/study.py tiny_imagenet_equal "$@"
