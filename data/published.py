"""The published embedding files: where they lie, and what is known of them; and how an address is shown."""

from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

PUBLISHED = "https://nyc3.digitaloceanspaces.com/publicdata1/"


class PublishedFile(NamedTuple):
    """A file below PUBLISHED, the network that made it, pixels of a side, and about how many GB."""

    file: str
    backbone: str
    resolution: int
    gigabytes: int


def _imagenet_1k(size: str) -> PublishedFile:
    file = f"ImageNet_embeddings_labels_train_test_IGAM_Resnext101_{size}_320.p"
    return PublishedFile(file, f"resnext101_{size}_wsl", 320, 11)


PUBLISHED_FILES = {
    "wsl-32x48d-320": _imagenet_1k("32x48d"),
    "wsl-32x32d-320": _imagenet_1k("32x32d"),
    "wsl-32x16d-320": _imagenet_1k("32x16d"),
    "wsl-32x8d-320": _imagenet_1k("32x8d"),
    "efficientnet-l2-800": PublishedFile(
        "ImageNet_embeddings_labels_train_test_tf_efficientnet_l2_ns_timm_transform_800_float16.p",
        "tf_efficientnet_l2_ns",
        800,
        14,
    ),
    "wsl-32x48d-224-21k": PublishedFile(
        "ImageNet21K-P_embeddings_labels_train_test_IGAM_Resnext101_32x48d_224_float16.p",
        "resnext101_32x48d_wsl",
        224,
        50,
    ),
}


def published_info(source: str) -> dict[str, str | int]:
    """The backbone and resolution of a published file, by its short name or its file name."""
    for name, known in PUBLISHED_FILES.items():
        if source == name or Path(source).name == known.file:
            return {"backbone": known.backbone, "resolution": known.resolution}
    return {}


def without_secrets(source: str) -> str:
    """An address without its password and its signature; a path or a short name as it is."""
    if "://" not in source:
        return source
    parts = urlsplit(source)
    host = parts.netloc.rpartition("@")[2]
    return f"{parts.scheme}://{host}{parts.path}"
