"""From a model's name to a module and an example input: torchvision's models and the user's own (`farm.models.own`).

The names are written down here, so that listing and checking them needs no torch; a test holds the list against
torchvision. Torch is imported only by the functions that build. Nothing is ever downloaded: weights are random,
seeded, and equal wherever the same torch builds them.
"""

from __future__ import annotations

import fnmatch
import functools
import json
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from farm.errors import SettingsError, UnknownModel, UnsupportedModel, UsageError
from farm.models import own
from farm.models.entry import SMALLEST_OF_ALL, ModelEntry

if TYPE_CHECKING:
    import torch
    from torch import nn

    from farm.words.protocol import Variant

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
    "detection": "a detection model: the shapes of its operators depend on what it finds in the image",
    "quantized": "a quantized model: torchvision's quantized operators run on the CPU only",
    "flow": "an optical-flow model: it takes a pair of images and iterates, which this catalog does not describe",
}

_DEFAULT_SIZE = {"classification": 224, "segmentation": 520, "video": 112}
_FRAMES = 16
_MOST_SIZES = 2  # of a model's own inputs that stand in a title
# Where a model needs another size than its task's default, or only one.
_SIZES: dict[str, int] = {"inception_v3": 299, "mvit_v1_b": 224, "mvit_v2_s": 224, "s3d": 224}
_SIZES |= {"swin3d_b": 224, "swin3d_s": 224, "swin3d_t": 224}
_FIXED = frozenset({"vit_b_16", "vit_b_32", "vit_h_14", "vit_l_16", "vit_l_32", "maxvit_t", "mvit_v1_b", "mvit_v2_s"})
_SMALLEST = {"alexnet": 63, "inception_v3": 75}

#: name -> parameters, and FLOPs of one pass at batch 1 and the default size; made by benchmarks/model_costs.py.
_COSTS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("costs.json").read_text())

DTYPES = ("float32", "float16", "bfloat16")
MEMORY_FORMATS = ("contiguous", "channels_last")
MODES = ("eval", "train")


def _entries(text: str, task: str) -> dict[str, ModelEntry]:
    return {
        name: ModelEntry(
            name=name,
            task=task,
            input_size=_SIZES.get(name, _DEFAULT_SIZE[task]),
            smallest_size=_SMALLEST.get(name, SMALLEST_OF_ALL),
            fixed_size=name in _FIXED,
            **_COSTS.get(name, {}),
        )
        for name in text.split()
    }


_TORCHVISION = (
    _entries(_CLASSIFICATION, "classification") | _entries(_SEGMENTATION, "segmentation") | _entries(_VIDEO, "video")
)
_REFUSED = {
    name: reason
    for text, reason in (
        (_DETECTION, _REASONS["detection"]),
        (_QUANTIZED, _REASONS["quantized"]),
        (_FLOW, _REASONS["flow"]),
    )
    for name in text.split()
}


def _own() -> dict[str, str]:
    """The user's models of this host's settings: name -> 'module:function'.

    Raises:
        SettingsError: one is malformed, or has the name of a model of torchvision.
    """
    models = own.targets()
    if taken := [name for name in models if name in _TORCHVISION or name in _REFUSED]:
        raise SettingsError(
            f"The setting 'models' names '{taken[0]}', which is a model of torchvision.", "Choose another name for it."
        )
    return models


def names(task: str | None = None) -> list[str]:
    """All models that can be measured, sorted; needs no torch. ``task`` narrows them."""
    entries = [*_TORCHVISION.values(), *(own.entry(name) for name in _own())]
    return sorted(entry.name for entry in entries if task in (None, entry.task))


def is_pattern(name: str) -> bool:
    """Whether a name stands for several, as in a shell: none of a model holds these marks."""
    return any(mark in name for mark in "*?[")


def matching(name: str) -> list[str]:
    """The models that a pattern such as ``resnet*`` means, whatever the case; what is no pattern means itself.

    Raises:
        UnknownModel: no model's name fits the pattern.
    """
    if not is_pattern(name):
        return [name]
    if found := [known for known in names() if fnmatch.fnmatchcase(known.lower(), name.lower())]:
        return found
    raise UnknownModel(f"No model's name fits '{name}'.", "List the models with `farm models`.")


def find(name: str) -> ModelEntry:
    """The entry of a model; needs no torch.

    Raises:
        UnknownModel: there is none; the nearest names are suggested.
        UnsupportedModel: torchvision has it, but it is refused, with the reason.
    """
    if name in _TORCHVISION:
        return _TORCHVISION[name]
    if name in _own():
        return own.entry(name)
    if name in _REFUSED:
        raise UnsupportedModel(f"{name} is {_REFUSED[name]}.", "List the models with `farm models`.")
    raise UnknownModel.named(name, names())


def size_for(name: str, input_size: int | None) -> int:
    """The input size for a model where a person asked for one, or for none (None). Imports torch for a user's model that was
    given a size.

    Raises:
        UsageError: the model does not take it, or has no use for one.
        UnknownModel, UnsupportedModel: see `find`.
    """
    entry = find(name)
    if entry.origin == "user" and input_size is not None:
        own.refuse_size(name)
    return entry.check_size(input_size)


# ------------------------------------------------------------------------------------------------- building


def build(
    name: str,
    *,
    weights: str = "random",
    device: str | torch.device = "meta",
    dtype: str = "float32",
    memory_format: str = "contiguous",
    mode: str = "eval",
    seed: int = 0,
    real_buffers: bool = False,
) -> nn.Module:
    """The model's module. On meta it has shapes and no memory; elsewhere its weights are random by ``seed``.

    With ``real_buffers`` what a model on meta makes other than by ``torch.empty`` (caches, masks) stays as it is made.

    Raises:
        UsageError: unknown weights, dtype, memory format or mode, or a model that is not in the catalog.
    """
    import torch

    entry = find(name)
    if weights != "random":
        raise UsageError(
            f"The weights '{weights}' are unknown.",
            "Use 'random': nothing is downloaded, and time depends little on it.",
        )
    torch_dtype, torch_format = _dtype(dtype), _memory_format(memory_format)
    _check(mode, MODES, "mode")
    device = torch.device(device)
    if device.type == "meta":
        with _EmptyOnMeta():
            model = _make(entry)
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = _make(entry)
    if not (real_buffers and device.type == "meta"):
        model = model.to(device=device, dtype=torch_dtype)
    if torch_format is not torch.contiguous_format and entry.task != "video":
        model = model.to(memory_format=torch_format)  # type: ignore[call-overload]
    return model.train(mode == "train")


def example_inputs(
    name: str,
    batch: int = 1,
    input_size: int | None = None,
    *,
    dtype: str = "float32",
    device: str | torch.device = "meta",
    memory_format: str = "contiguous",
    seed: int = 0,
) -> tuple[torch.Tensor, ...]:
    """Positional arguments for what `build` returns: images of shape (batch, 3, size, size), or clips of 16 frames.

    Values are standard normal by ``seed``. A user's model may bring its own inputs: ``input_size`` is then ignored,
    and tensors whose first dimension is that of the first one are repeated or cut to ``batch``.

    Raises:
        UsageError: batch below 1, or a size that the model does not take.
    """
    import torch

    entry = find(name)
    size = entry.check_size(input_size)
    if batch < 1:
        raise UsageError(f"The batch is {batch}; it must be at least 1.", "Give a batch of 1 or more.")
    torch_dtype, torch_format = _dtype(dtype), _memory_format(memory_format)
    if entry.origin == "user" and (given := own.inputs(name)) is not None:
        return tuple(_like(value, torch_dtype, torch.device(device), seed) for value in _batched(given, batch))
    shape = (batch, 3, _FRAMES, size, size) if entry.task == "video" else (batch, 3, size, size)
    tensor = _random(shape, torch_dtype, torch.device(device), seed)
    if torch_format is not torch.contiguous_format and tensor.dim() == 4:
        tensor = tensor.contiguous(memory_format=torch_format)
    return (tensor,)


def title_of(variant: Variant) -> str:
    """What people call a variant. A user's model that brings its own inputs is titled by their sizes: 'bert 8x128 float32'.

    Imports torch for a user's model alone.
    """
    given = own.inputs(variant.model) if find(variant.model).origin == "user" else None
    if given is None:
        return str(variant)
    return titled_by(variant, _batched(given, variant.batch))


def titled_by(variant: Variant, inputs: Sequence[Any]) -> str:
    """What people call a variant that has inputs of its own: by the sizes of these."""
    sizes = ["x".join(map(str, value.shape)) for value in inputs if getattr(value, "shape", ())]
    shown = list(dict.fromkeys(sizes))
    more = ["…"] if len(shown) > _MOST_SIZES else []
    return variant.titled("+".join(shown[:_MOST_SIZES] + more) or str(variant.batch))


def _random(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int) -> torch.Tensor:
    import torch

    if device.type == "meta":
        return torch.empty(shape, dtype=dtype, device=device)
    generator = torch.Generator(device=device).manual_seed(seed)
    return torch.randn(shape, dtype=torch.float32, device=device, generator=generator).to(dtype)


def _batched(given: Sequence[Any], batch: int) -> list[Any]:
    """A user's own example inputs: tensors whose first dimension is that of the first one are repeated or cut to the batch."""
    import torch

    tensors = [value for value in given if isinstance(value, torch.Tensor) and value.dim()]
    own_batch = tensors[0].shape[0] if tensors else 0

    def fitted(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.dim() == 0 or value.shape[0] != own_batch or not own_batch:
            return value
        return value.repeat(-(-batch // own_batch), *[1] * (value.dim() - 1))[:batch]

    return [fitted(value) for value in given]


def _like(value: Any, dtype: torch.dtype, device: torch.device, seed: int) -> Any:
    """A user's own example input, brought to the dtype and device; what is on meta is filled at random."""
    import torch

    if not isinstance(value, torch.Tensor):
        return value
    wanted = dtype if value.is_floating_point() else value.dtype
    if value.device.type == "meta" and device.type != "meta":
        if value.is_floating_point():
            return _random(tuple(value.shape), wanted, device, seed)
        return torch.zeros(value.shape, dtype=wanted, device=device)
    return value.to(device=device, dtype=wanted)


def _make(entry: ModelEntry) -> nn.Module:
    if entry.origin == "user":
        return own.make(entry.name)
    models = torchvision_models()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # googlenet and inception_v3 announce another default of theirs
        if entry.task == "segmentation":
            return models.get_model(entry.name, weights=None, weights_backbone=None)
        return models.get_model(entry.name, weights=None)


@functools.cache
def torchvision_models() -> Any:
    """``torchvision.models``, also where torchvision lacks its compiled operators.

    A torchvision of the package index beside a CPU build of torch fails on import because ``torchvision::nms`` does
    not exist. Only then are the schemas of the two operators that it asks for defined; no model here calls them.
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
        _kept.append(library)  # the definitions live as long as it
        import torchvision.models as models
    return models


_kept: list[Any] = []


def _EmptyOnMeta() -> Any:
    """While active, ``torch.empty`` makes meta tensors.

    That is where modules get their parameters from; everything else (the stochastic-depth schedules that read
    values back, index buffers) is computed for real and moved afterwards. ``torch.device("meta")`` as a context
    fails on 15 of 80 models, this on none.
    """
    import torch
    from torch.overrides import TorchFunctionMode

    class EmptyOnMeta(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if func is torch.empty and kwargs.get("device") is None:
                kwargs = kwargs | {"device": "meta"}
            elif func is torch.Tensor.normal_ and args[0].is_meta:
                return args[0]  # fills nothing, and takes torch a millisecond: half of the time to build a model
            return func(*args, **kwargs)

    return EmptyOnMeta()


def _check(value: str, known: tuple[str, ...], what: str) -> None:
    if value not in known:
        raise UsageError(f"The {what} '{value}' is unknown.", f"Use one of {', '.join(known)}.")


def _dtype(name: str) -> torch.dtype:
    import torch

    _check(name, DTYPES, "dtype")
    return getattr(torch, name)


def _memory_format(name: str) -> torch.memory_format:
    import torch

    _check(name, MEMORY_FORMATS, "memory format")
    return torch.channels_last if name == "channels_last" else torch.contiguous_format
