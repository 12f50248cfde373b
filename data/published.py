"""The published embedding files: where they lie, and what is known of them."""

from dataclasses import dataclass

PUBLISHED_ENDPOINT = "https://nyc3.digitaloceanspaces.com"
PUBLISHED_BUCKET = "publicdata1"
_IMAGENET = "ImageNet_embeddings_labels_train_test_"


@dataclass(frozen=True)
class PublishedSet:
    """key in the bucket; layout (one of data/embeddings/formats.py), backbone, pixels, and roughly its size in GB."""

    key: str
    layout: str
    backbone: str
    resolution: int
    gigabytes: int


PUBLISHED_SETS: dict[str, PublishedSet] = {
    **{
        f"wsl-{size}-320": PublishedSet(
            f"{_IMAGENET}IGAM_Resnext101_{size}_320.p", "wsl", f"resnext101_{size}_wsl", 320, 11
        )
        for size in ("32x48d", "32x32d", "32x16d", "32x8d")
    },
    "efficientnet-l2-800": PublishedSet(
        f"{_IMAGENET}tf_efficientnet_l2_ns_timm_transform_800_float16.p",
        *("efficientnet-l2", "tf_efficientnet_l2_ns", 800, 14),
    ),
    "wsl-32x48d-224-21k": PublishedSet(
        "ImageNet21K-P_embeddings_labels_train_test_IGAM_Resnext101_32x48d_224_float16.p",
        *("imagenet21k", "resnext101_32x48d_wsl", 224, 50),
    ),
}
PUBLISHED: dict[str, str] = {name: known.key for name, known in PUBLISHED_SETS.items()}
