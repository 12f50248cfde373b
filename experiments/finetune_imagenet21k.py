"""Tables 2 and 3: new heads on frozen ImageNet-21K-P embeddings (10,450 classes).

    python experiments/finetune_imagenet21k.py --method splitter_selection --distribution logistic_phi \\
        --inverse_temperature 1. --art_lambda .5 --p_k .5 0. 0. 0. .5

Everything is as in finetune_imagenet.py but what stands below: the data, m 50, learning rate 10^-4, 40 epochs, a
random 100,000 rows for validation. Rows go to results/imagenet21k.csv.
"""

if __name__ == "__main__":  # from here on, what goes wrong is a sentence
    from data import program

    program.begin()

from experiments.finetune_imagenet import Defaults, main

IMAGENET_21K = Defaults(
    data_path="wsl-32x48d-224-21k",
    results="imagenet21k.csv",
    num_classes=10_450,
    m=50,
    nloglr=4.0,
    n_epochs=40,
    num_valid=100_000,
)

if __name__ == "__main__":
    program.end(main(defaults=IMAGENET_21K))
