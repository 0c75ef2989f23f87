"""torchvision's models: classification, segmentation and video, and the reasons why the others are refused.

The names are listed here; a test compares the list with torchvision.
"""

from __future__ import annotations

import functools
import importlib
import sys
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from farm.models.entry import SMALLEST_OF_ALL, ModelEntry, costs_of

if TYPE_CHECKING:
    import torch
    from torch import nn

    from farm.types.protocol import Variant

NAME = PACKAGE = "torchvision"
EXTRA = ""

_CLASSIFICATION = """
alexnet convnext_base convnext_large convnext_small convnext_tiny densenet121 densenet161 densenet169 densenet201
efficientnet_b0 efficientnet_b1 efficientnet_b2 efficientnet_b3 efficientnet_b4 efficientnet_b5 efficientnet_b6
efficientnet_b7 efficientnet_v2_l efficientnet_v2_m efficientnet_v2_s googlenet inception_v3 maxvit_t mnasnet0_5
mnasnet0_75 mnasnet1_0 mnasnet1_3 mobilenet_v2 mobilenet_v3_large mobilenet_v3_small regnet_x_16gf regnet_x_1_6gf
regnet_x_32gf regnet_x_3_2gf regnet_x_400mf regnet_x_800mf regnet_x_8gf regnet_y_128gf regnet_y_16gf regnet_y_1_6gf
regnet_y_32gf regnet_y_3_2gf regnet_y_400mf regnet_y_800mf regnet_y_8gf resnet101 resnet152 resnet18 resnet34
resnet50 resnext101_32x8d resnext101_64x4d resnext50_32x4d shufflenet_v2_x0_5 shufflenet_v2_x1_0 shufflenet_v2_x1_5
shufflenet_v2_x2_0 squeezenet1_0 squeezenet1_1 swin_b swin_s swin_t swin_v2_b swin_v2_s swin_v2_t vgg11 vgg11_bn
vgg13 vgg13_bn vgg16 vgg16_bn vgg19 vgg19_bn vit_b_16 vit_b_32 vit_h_14 vit_l_16 vit_l_32 wide_resnet101_2
wide_resnet50_2
"""
_SEGMENTATION = """
deeplabv3_mobilenet_v3_large deeplabv3_resnet101 deeplabv3_resnet50 fcn_resnet101 fcn_resnet50
lraspp_mobilenet_v3_large
"""
_VIDEO = "mc3_18 mvit_v1_b mvit_v2_s r2plus1d_18 r3d_18 s3d swin3d_b swin3d_s swin3d_t"
_DETECTION = """
fasterrcnn_mobilenet_v3_large_320_fpn fasterrcnn_mobilenet_v3_large_fpn fasterrcnn_resnet50_fpn
fasterrcnn_resnet50_fpn_v2 fcos_resnet50_fpn keypointrcnn_resnet50_fpn maskrcnn_resnet50_fpn
maskrcnn_resnet50_fpn_v2 retinanet_resnet50_fpn retinanet_resnet50_fpn_v2 ssd300_vgg16
ssdlite320_mobilenet_v3_large
"""
_QUANTIZED = """
quantized_googlenet quantized_inception_v3 quantized_mobilenet_v2 quantized_mobilenet_v3_large quantized_resnet18
quantized_resnet50 quantized_resnext101_32x8d quantized_resnext101_64x4d quantized_shufflenet_v2_x0_5
quantized_shufflenet_v2_x1_0 quantized_shufflenet_v2_x1_5 quantized_shufflenet_v2_x2_0
"""
_FLOW = "raft_large raft_small"

_REASONS = {
    _DETECTION: "a detection model: the shapes of its tensors depend on the content of the image",
    _QUANTIZED: "a quantized model: torchvision's quantized operators run on the CPU only",
    _FLOW: "an optical-flow model: it takes pairs of images, and the catalog describes single images only",
}

_FRAMES = 16
# Models whose input size differs from the default of their task, or is fixed.
_SIZES: dict[str, int] = {"inception_v3": 299, "mvit_v1_b": 224, "mvit_v2_s": 224, "s3d": 224}
_SIZES |= {"swin3d_b": 224, "swin3d_s": 224, "swin3d_t": 224}
_FIXED = frozenset({"vit_b_16", "vit_b_32", "vit_h_14", "vit_l_16", "vit_l_32", "maxvit_t", "mvit_v1_b", "mvit_v2_s"})
_SMALLEST = {"alexnet": 63, "inception_v3": 75}

_TORCHVISION = {
    name: ModelEntry(
        name=name,
        task=task,
        input_size=_SIZES.get(name, default_size),
        smallest_size=_SMALLEST.get(name, SMALLEST_OF_ALL),
        fixed_size=name in _FIXED,
        **costs_of(NAME).get(name, {}),
    )
    for task, default_size, names in (
        ("classification", 224, _CLASSIFICATION),
        ("segmentation", 520, _SEGMENTATION),
        ("video", 112, _VIDEO),
    )
    for name in names.split()
}
REFUSED = {name: reason for names, reason in _REASONS.items() for name in names.split()}


def entries() -> Mapping[str, ModelEntry]:
    return _TORCHVISION


def make(entry: ModelEntry, variant: Variant, device: torch.device) -> nn.Module:
    from farm.models.building import dtype_of

    backbone = {"weights_backbone": None} if entry.task == "segmentation" else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # googlenet and inception_v3 announce a change of a default
        return torchvision_models().get_model(variant.model, weights=None, **backbone).to(dtype_of(variant))


def inputs(entry: ModelEntry, variant: Variant, device: torch.device, seed: int) -> tuple[torch.Tensor]:
    """Images, or clips of shape (batch, 3, 16, size, size)."""
    from farm.models.building import dtype_of, images, random_normal

    if entry.task != "video":
        return (images(variant, device, seed),)
    shape = (variant.batch, 3, _FRAMES, variant.input_size, variant.input_size)
    return (random_normal(shape, dtype_of(variant), device, seed),)


@functools.cache
def torchvision_models() -> Any:
    """Imports ``torchvision.models``, even if torchvision lacks its compiled operators.

    A torchvision from the package index fails on import with a CPU build of torch, because ``torchvision::nms`` does
    not exist. In that case this function defines the schemas of the two missing operators; no model here calls them.
    """
    import torch

    try:
        import torchvision.models as models
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "DEF")
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _libraries.append(library)  # the definitions live as long as it
        import torchvision.models as models
    return models


_libraries: list[Any] = []


def imported_after_torchvision(package: str) -> Any:
    """Imports a package that imports torchvision; applies the fix of `torchvision_models` first."""
    torchvision_models()
    return importlib.import_module(package)
