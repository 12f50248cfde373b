#!/usr/bin/env bash
# Tables 2 and 3, ImageNet-1K: a new linear head on embeddings of ResNeXt-101 32x48d WSL, each loss at its published
# settings, two seeds: 20 rows, added to results/table2_3_imagenet1k.csv. Arguments as in table1.sh. The embeddings (11
# GB) are best there before:
#   .venv/bin/python -m data.download wsl-32x48d-320
. "$(dirname "${BASH_SOURCE[0]}")/begin.sh"
. scripts/published.sh

name=table2_3_imagenet1k
finetune=".venv/bin/python experiments/finetune_imagenet.py -d wsl-32x48d-320 --m 16 --nloglr 4.5"
exec .venv/bin/python scripts/launch.py --name $name "$@" < <(published "$finetune" .5 1. "0. 0. 0. 0. 1." ".5 0. 0. 0. .5")
