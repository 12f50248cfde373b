"""The published embedding files: where they lie, and what is known of them."""

from pathlib import Path

PUBLISHED = "https://nyc3.digitaloceanspaces.com/publicdata1/"
_IMAGENET = "ImageNet_embeddings_labels_train_test_"
_L2 = f"{_IMAGENET}tf_efficientnet_l2_ns_timm_transform_800_float16.p"
_21K = "ImageNet21K-P_embeddings_labels_train_test_IGAM_Resnext101_32x48d_224_float16.p"
# Short name -> file, the network that made it, pixels, and about how many GB.
PUBLISHED_FILES: dict[str, tuple[str, str, int, int]] = {
    **{
        f"wsl-{size}-320": (f"{_IMAGENET}IGAM_Resnext101_{size}_320.p", f"resnext101_{size}_wsl", 320, 11)
        for size in ("32x48d", "32x32d", "32x16d", "32x8d")
    },
    "efficientnet-l2-800": (_L2, "tf_efficientnet_l2_ns", 800, 14),
    "wsl-32x48d-224-21k": (_21K, "resnext101_32x48d_wsl", 224, 50),
}


def published_info(source: str) -> dict[str, str | int]:
    """The backbone and resolution of a published file, by its short name or its file name."""
    names = {file: name for name, (file, *_) in PUBLISHED_FILES.items()}
    known = PUBLISHED_FILES.get(names.get(Path(source).name, source))
    return {"backbone": known[1], "resolution": known[2]} if known else {}
