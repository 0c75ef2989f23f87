"""An example of each layer of torch.nn and each function of torch.nn.functional, for the table of
`docs/results/layers.md` (`benchmarks/layer_table.py`) and for forged tuples (`benchmarks/forged_tuples.py`).

An example is a module with a linear layer, whose output has the shapes of `Inputs`: so every input
of the layer or function has a gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class Inputs:
    """The output of the linear layer, (4, 1024), in the shapes that layers take, and fixed targets."""

    def __init__(self, computed: torch.Tensor, fixed: dict[str, torch.Tensor]) -> None:
        flat = computed.reshape(-1)
        self.rows = computed[:, :8]
        self.signal = flat[:64].view(2, 4, 8)
        self.image = flat[:512].view(2, 4, 8, 8)
        self.volume = flat.view(2, 4, 8, 8, 8)
        self.sequence = flat[:80].view(5, 2, 8)
        self.scores = flat[:80].view(8, 2, 5).log_softmax(2)
        self.classes, self.words, self.labels = fixed["classes"], fixed["words"], fixed["labels"]
        self.places, self.signs, self.shares = fixed["places"], fixed["signs"], fixed["shares"]


class Example(nn.Module):
    """A linear layer, and a layer or function on its output."""

    def __init__(self, layer: nn.Module | None, call: Callable[..., Any]) -> None:
        super().__init__()
        self.linear, self.layer, self.call = nn.Linear(8, 1024), layer, call
        fixed = {
            "classes": torch.arange(4),
            "words": torch.arange(12).view(4, 3),
            "labels": torch.tensor([[1, 2, 3], [1, 2, 3]]),
            "places": (2 * torch.arange(64)).view(1, 1, 8, 8).repeat(2, 4, 1, 1),
            "signs": torch.tensor([1.0, -1.0, 1.0, -1.0]),
            "shares": torch.full((4, 8), 0.125),
        }
        for name, tensor in fixed.items():
            self.register_buffer(name, tensor)

    def forward(self, x: torch.Tensor) -> Any:
        inputs = Inputs(self.linear(x), dict(self.named_buffers(recurse=False)))
        return self.call(inputs) if self.layer is None else self.call(self.layer, inputs)


def example_of(name: str) -> tuple[nn.Module, torch.Tensor]:
    """The example of a layer (`Conv2d`) or a function (`conv2d`), and its input."""
    if name in LAYERS:
        build, call = LAYERS[name]
        return Example(build(), call), torch.randn(4, 8)
    return Example(None, FUNCTIONS[name]), torch.randn(4, 8)


#: Layer -> a function that builds it, and one that calls it.
LAYERS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any]]] = {
    "AdaptiveAvgPool1d": (lambda: nn.AdaptiveAvgPool1d(4), lambda f, i: f(i.signal)),
    "AdaptiveAvgPool2d": (lambda: nn.AdaptiveAvgPool2d(4), lambda f, i: f(i.image)),
    "AdaptiveAvgPool3d": (lambda: nn.AdaptiveAvgPool3d(2), lambda f, i: f(i.volume)),
    "AdaptiveLogSoftmaxWithLoss": (
        lambda: nn.AdaptiveLogSoftmaxWithLoss(8, 20, [5, 10]),
        lambda f, i: f(i.rows, i.classes),
    ),
    "AdaptiveMaxPool1d": (lambda: nn.AdaptiveMaxPool1d(4), lambda f, i: f(i.signal)),
    "AdaptiveMaxPool2d": (lambda: nn.AdaptiveMaxPool2d(4), lambda f, i: f(i.image)),
    "AdaptiveMaxPool3d": (lambda: nn.AdaptiveMaxPool3d(2), lambda f, i: f(i.volume)),
    "AlphaDropout": (lambda: nn.AlphaDropout(), lambda f, i: f(i.rows)),
    "AvgPool1d": (lambda: nn.AvgPool1d(2), lambda f, i: f(i.signal)),
    "AvgPool2d": (lambda: nn.AvgPool2d(2), lambda f, i: f(i.image)),
    "AvgPool3d": (lambda: nn.AvgPool3d(2), lambda f, i: f(i.volume)),
    "BCELoss": (lambda: nn.BCELoss(), lambda f, i: f(i.rows.sigmoid(), i.shares)),
    "BCEWithLogitsLoss": (lambda: nn.BCEWithLogitsLoss(), lambda f, i: f(i.rows, i.shares)),
    "BatchNorm1d": (lambda: nn.BatchNorm1d(4), lambda f, i: f(i.signal)),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(4), lambda f, i: f(i.image)),
    "BatchNorm3d": (lambda: nn.BatchNorm3d(4), lambda f, i: f(i.volume)),
    "Bilinear": (lambda: nn.Bilinear(8, 8, 3), lambda f, i: f(i.rows, i.rows)),
    "CELU": (lambda: nn.CELU(), lambda f, i: f(i.rows)),
    "CTCLoss": (lambda: nn.CTCLoss(), lambda f, i: f(i.scores, i.labels, (8, 8), (3, 2))),
    "ChannelShuffle": (lambda: nn.ChannelShuffle(2), lambda f, i: f(i.image)),
    "CircularPad1d": (lambda: nn.CircularPad1d(1), lambda f, i: f(i.signal)),
    "CircularPad2d": (lambda: nn.CircularPad2d(1), lambda f, i: f(i.image)),
    "CircularPad3d": (lambda: nn.CircularPad3d(1), lambda f, i: f(i.volume)),
    "ConstantPad1d": (lambda: nn.ConstantPad1d(1, 0.5), lambda f, i: f(i.signal)),
    "ConstantPad2d": (lambda: nn.ConstantPad2d(1, 0.5), lambda f, i: f(i.image)),
    "ConstantPad3d": (lambda: nn.ConstantPad3d(1, 0.5), lambda f, i: f(i.volume)),
    "Conv1d": (lambda: nn.Conv1d(4, 6, 3), lambda f, i: f(i.signal)),
    "Conv2d": (lambda: nn.Conv2d(4, 6, 3), lambda f, i: f(i.image)),
    "Conv3d": (lambda: nn.Conv3d(4, 6, 3), lambda f, i: f(i.volume)),
    "ConvTranspose1d": (lambda: nn.ConvTranspose1d(4, 6, 3), lambda f, i: f(i.signal)),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(4, 6, 3), lambda f, i: f(i.image)),
    "ConvTranspose3d": (lambda: nn.ConvTranspose3d(4, 6, 3), lambda f, i: f(i.volume)),
    "CosineEmbeddingLoss": (
        lambda: nn.CosineEmbeddingLoss(),
        lambda f, i: f(i.rows, i.rows.flip(0), i.signs),
    ),
    "CosineSimilarity": (lambda: nn.CosineSimilarity(), lambda f, i: f(i.rows, i.rows.flip(0))),
    "CrossEntropyLoss": (lambda: nn.CrossEntropyLoss(), lambda f, i: f(i.rows, i.classes)),
    "CrossMapLRN2d": (lambda: nn.CrossMapLRN2d(2), lambda f, i: f(i.image)),
    "Dropout": (lambda: nn.Dropout(), lambda f, i: f(i.rows)),
    "Dropout1d": (lambda: nn.Dropout1d(), lambda f, i: f(i.signal)),
    "Dropout2d": (lambda: nn.Dropout2d(), lambda f, i: f(i.image)),
    "Dropout3d": (lambda: nn.Dropout3d(), lambda f, i: f(i.volume)),
    "ELU": (lambda: nn.ELU(), lambda f, i: f(i.rows)),
    "Embedding": (lambda: nn.Embedding(20, 8), lambda f, i: f(i.words)),
    "EmbeddingBag": (lambda: nn.EmbeddingBag(20, 8), lambda f, i: f(i.words)),
    "FeatureAlphaDropout": (lambda: nn.FeatureAlphaDropout(), lambda f, i: f(i.image)),
    "Flatten": (lambda: nn.Flatten(), lambda f, i: f(i.image)),
    "Fold": (lambda: nn.Fold(4, 2), lambda f, i: f(i.volume.reshape(2, 16, 128)[:, :, :9])),
    "FractionalMaxPool2d": (
        lambda: nn.FractionalMaxPool2d(2, output_size=4),
        lambda f, i: f(i.image),
    ),
    "FractionalMaxPool3d": (
        lambda: nn.FractionalMaxPool3d(2, output_size=2),
        lambda f, i: f(i.volume),
    ),
    "GELU": (lambda: nn.GELU(), lambda f, i: f(i.rows)),
    "GLU": (lambda: nn.GLU(), lambda f, i: f(i.rows)),
    "GRU": (lambda: nn.GRU(8, 6), lambda f, i: f(i.sequence)),
    "GRUCell": (lambda: nn.GRUCell(8, 6), lambda f, i: f(i.rows)),
    "GaussianNLLLoss": (
        lambda: nn.GaussianNLLLoss(),
        lambda f, i: f(i.rows, i.shares, i.shares + 1),
    ),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4), lambda f, i: f(i.image)),
    "Hardshrink": (lambda: nn.Hardshrink(), lambda f, i: f(i.rows)),
    "Hardsigmoid": (lambda: nn.Hardsigmoid(), lambda f, i: f(i.rows)),
    "Hardswish": (lambda: nn.Hardswish(), lambda f, i: f(i.rows)),
    "Hardtanh": (lambda: nn.Hardtanh(), lambda f, i: f(i.rows)),
    "HingeEmbeddingLoss": (
        lambda: nn.HingeEmbeddingLoss(),
        lambda f, i: f(i.rows, i.signs[:, None].expand(4, 8)),
    ),
    "HuberLoss": (lambda: nn.HuberLoss(), lambda f, i: f(i.rows, i.shares)),
    "Identity": (lambda: nn.Identity(), lambda f, i: f(i.rows)),
    "InstanceNorm1d": (lambda: nn.InstanceNorm1d(4, affine=True), lambda f, i: f(i.signal)),
    "InstanceNorm2d": (lambda: nn.InstanceNorm2d(4, affine=True), lambda f, i: f(i.image)),
    "InstanceNorm3d": (lambda: nn.InstanceNorm3d(4, affine=True), lambda f, i: f(i.volume)),
    "KLDivLoss": (
        lambda: nn.KLDivLoss(reduction="batchmean"),
        lambda f, i: f(i.rows.log_softmax(1), i.shares),
    ),
    "L1Loss": (lambda: nn.L1Loss(), lambda f, i: f(i.rows, i.shares)),
    "LPPool1d": (lambda: nn.LPPool1d(2, 2), lambda f, i: f(i.signal)),
    "LPPool2d": (lambda: nn.LPPool2d(2, 2), lambda f, i: f(i.image)),
    "LPPool3d": (lambda: nn.LPPool3d(2, 2), lambda f, i: f(i.volume)),
    "LSTM": (lambda: nn.LSTM(8, 6), lambda f, i: f(i.sequence)),
    "LSTMCell": (lambda: nn.LSTMCell(8, 6), lambda f, i: f(i.rows)),
    "LayerNorm": (lambda: nn.LayerNorm(8), lambda f, i: f(i.rows)),
    "LeakyReLU": (lambda: nn.LeakyReLU(), lambda f, i: f(i.rows)),
    "Linear": (lambda: nn.Linear(8, 6), lambda f, i: f(i.rows)),
    "LinearCrossEntropyLoss": (
        lambda: nn.LinearCrossEntropyLoss(8, 6),
        lambda f, i: f(i.rows, i.classes),
    ),
    "LocalResponseNorm": (lambda: nn.LocalResponseNorm(2), lambda f, i: f(i.image)),
    "LogSigmoid": (lambda: nn.LogSigmoid(), lambda f, i: f(i.rows)),
    "LogSoftmax": (lambda: nn.LogSoftmax(1), lambda f, i: f(i.rows)),
    "MSELoss": (lambda: nn.MSELoss(), lambda f, i: f(i.rows, i.shares)),
    "MarginRankingLoss": (
        lambda: nn.MarginRankingLoss(),
        lambda f, i: f(i.rows[:, 0], i.rows[:, 1], i.signs),
    ),
    "MaxPool1d": (lambda: nn.MaxPool1d(2), lambda f, i: f(i.signal)),
    "MaxPool2d": (lambda: nn.MaxPool2d(2), lambda f, i: f(i.image)),
    "MaxPool3d": (lambda: nn.MaxPool3d(2), lambda f, i: f(i.volume)),
    "MaxUnpool1d": (lambda: nn.MaxUnpool1d(2), lambda f, i: f(i.signal, i.places[:, :, 0])),
    "MaxUnpool2d": (lambda: nn.MaxUnpool2d(2), lambda f, i: f(i.image, i.places)),
    "MaxUnpool3d": (
        lambda: nn.MaxUnpool3d(2),
        lambda f, i: f(i.volume, i.places[:, :, :, :, None].expand(2, 4, 8, 8, 8).contiguous()),
    ),
    "Mish": (lambda: nn.Mish(), lambda f, i: f(i.rows)),
    "MultiLabelMarginLoss": (
        lambda: nn.MultiLabelMarginLoss(),
        lambda f, i: f(i.rows, i.classes[:, None].expand(4, 8)),
    ),
    "MultiLabelSoftMarginLoss": (
        lambda: nn.MultiLabelSoftMarginLoss(),
        lambda f, i: f(i.rows, i.shares),
    ),
    "MultiMarginLoss": (lambda: nn.MultiMarginLoss(), lambda f, i: f(i.rows, i.classes)),
    "MultiheadAttention": (
        lambda: nn.MultiheadAttention(8, 2),
        lambda f, i: f(i.sequence, i.sequence, i.sequence),
    ),
    "NLLLoss": (lambda: nn.NLLLoss(), lambda f, i: f(i.rows.log_softmax(1), i.classes)),
    "NLLLoss2d": (
        lambda: nn.NLLLoss2d(),
        lambda f, i: f(i.image.log_softmax(1), i.places[:, 0] % 4),
    ),
    "PReLU": (lambda: nn.PReLU(), lambda f, i: f(i.rows)),
    "PairwiseDistance": (lambda: nn.PairwiseDistance(), lambda f, i: f(i.rows, i.rows.flip(0))),
    "PixelShuffle": (lambda: nn.PixelShuffle(2), lambda f, i: f(i.image)),
    "PixelUnshuffle": (lambda: nn.PixelUnshuffle(2), lambda f, i: f(i.image)),
    "PoissonNLLLoss": (lambda: nn.PoissonNLLLoss(), lambda f, i: f(i.rows, i.shares)),
    "RMSNorm": (lambda: nn.RMSNorm(8), lambda f, i: f(i.rows)),
    "RNN": (lambda: nn.RNN(8, 6), lambda f, i: f(i.sequence)),
    "RNNCell": (lambda: nn.RNNCell(8, 6), lambda f, i: f(i.rows)),
    "RReLU": (lambda: nn.RReLU(), lambda f, i: f(i.rows)),
    "ReLU": (lambda: nn.ReLU(), lambda f, i: f(i.rows)),
    "ReLU6": (lambda: nn.ReLU6(), lambda f, i: f(i.rows)),
    "ReflectionPad1d": (lambda: nn.ReflectionPad1d(1), lambda f, i: f(i.signal)),
    "ReflectionPad2d": (lambda: nn.ReflectionPad2d(1), lambda f, i: f(i.image)),
    "ReflectionPad3d": (lambda: nn.ReflectionPad3d(1), lambda f, i: f(i.volume)),
    "ReplicationPad1d": (lambda: nn.ReplicationPad1d(1), lambda f, i: f(i.signal)),
    "ReplicationPad2d": (lambda: nn.ReplicationPad2d(1), lambda f, i: f(i.image)),
    "ReplicationPad3d": (lambda: nn.ReplicationPad3d(1), lambda f, i: f(i.volume)),
    "SELU": (lambda: nn.SELU(), lambda f, i: f(i.rows)),
    "SiLU": (lambda: nn.SiLU(), lambda f, i: f(i.rows)),
    "Sigmoid": (lambda: nn.Sigmoid(), lambda f, i: f(i.rows)),
    "SmoothL1Loss": (lambda: nn.SmoothL1Loss(), lambda f, i: f(i.rows, i.shares)),
    "SoftMarginLoss": (
        lambda: nn.SoftMarginLoss(),
        lambda f, i: f(i.rows, i.signs[:, None].expand(4, 8)),
    ),
    "Softmax": (lambda: nn.Softmax(1), lambda f, i: f(i.rows)),
    "Softmax2d": (lambda: nn.Softmax2d(), lambda f, i: f(i.image)),
    "Softmin": (lambda: nn.Softmin(1), lambda f, i: f(i.rows)),
    "Softplus": (lambda: nn.Softplus(), lambda f, i: f(i.rows)),
    "Softshrink": (lambda: nn.Softshrink(), lambda f, i: f(i.rows)),
    "Softsign": (lambda: nn.Softsign(), lambda f, i: f(i.rows)),
    "Tanh": (lambda: nn.Tanh(), lambda f, i: f(i.rows)),
    "Tanhshrink": (lambda: nn.Tanhshrink(), lambda f, i: f(i.rows)),
    "Threshold": (lambda: nn.Threshold(0.1, 0.0), lambda f, i: f(i.rows)),
    "Transformer": (lambda: nn.Transformer(8, 2, 1, 1, 16), lambda f, i: f(i.sequence, i.sequence)),
    "TransformerDecoder": (
        lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16), 1),
        lambda f, i: f(i.sequence, i.sequence),
    ),
    "TransformerDecoderLayer": (
        lambda: nn.TransformerDecoderLayer(8, 2, 16),
        lambda f, i: f(i.sequence, i.sequence),
    ),
    "TransformerEncoder": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 1),
        lambda f, i: f(i.sequence),
    ),
    "TransformerEncoderLayer": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16),
        lambda f, i: f(i.sequence),
    ),
    "TripletMarginLoss": (
        lambda: nn.TripletMarginLoss(),
        lambda f, i: f(i.rows, i.rows.flip(0), i.shares),
    ),
    "TripletMarginWithDistanceLoss": (
        lambda: nn.TripletMarginWithDistanceLoss(),
        lambda f, i: f(i.rows, i.rows.flip(0), i.shares),
    ),
    "Unflatten": (lambda: nn.Unflatten(1, (2, 4)), lambda f, i: f(i.rows)),
    "Unfold": (lambda: nn.Unfold(2), lambda f, i: f(i.image)),
    "Upsample": (lambda: nn.Upsample(scale_factor=2), lambda f, i: f(i.image)),
    "UpsamplingBilinear2d": (
        lambda: nn.UpsamplingBilinear2d(scale_factor=2),
        lambda f, i: f(i.image),
    ),
    "UpsamplingNearest2d": (
        lambda: nn.UpsamplingNearest2d(scale_factor=2),
        lambda f, i: f(i.image),
    ),
    "ZeroPad1d": (lambda: nn.ZeroPad1d(1), lambda f, i: f(i.signal)),
    "ZeroPad2d": (lambda: nn.ZeroPad2d(1), lambda f, i: f(i.image)),
    "ZeroPad3d": (lambda: nn.ZeroPad3d(1), lambda f, i: f(i.volume)),
}

#: Classes of torch.nn that are no layers, or become another class before the first pass.
NO_LAYERS: dict[str, str] = {
    "containers": "Container Module ModuleDict ModuleList ParameterDict ParameterList Sequential",
    "bases": "RNNBase RNNCellBase",
    "spread over several cards": "DataParallel SyncBatchNorm",
    "become the class without Lazy": "LazyBatchNorm1d LazyBatchNorm2d LazyBatchNorm3d LazyConv1d LazyConv2d LazyConv3d "
    "LazyConvTranspose1d LazyConvTranspose2d LazyConvTranspose3d LazyInstanceNorm1d LazyInstanceNorm2d "
    "LazyInstanceNorm3d LazyLinear",
}


#: Function -> a call of it.
FUNCTIONS: dict[str, Callable[[Inputs], Any]] = {
    "adaptive_avg_pool1d": lambda i: F.adaptive_avg_pool1d(i.signal, 4),
    "adaptive_avg_pool2d": lambda i: F.adaptive_avg_pool2d(i.image, 4),
    "adaptive_avg_pool3d": lambda i: F.adaptive_avg_pool3d(i.volume, 2),
    "adaptive_max_pool1d": lambda i: F.adaptive_max_pool1d(i.signal, 4),
    "adaptive_max_pool1d_with_indices": lambda i: F.adaptive_max_pool1d_with_indices(i.signal, 4)[
        0
    ],
    "adaptive_max_pool2d": lambda i: F.adaptive_max_pool2d(i.image, 4),
    "adaptive_max_pool2d_with_indices": lambda i: F.adaptive_max_pool2d_with_indices(i.image, 4)[0],
    "adaptive_max_pool3d": lambda i: F.adaptive_max_pool3d(i.volume, 2),
    "adaptive_max_pool3d_with_indices": lambda i: F.adaptive_max_pool3d_with_indices(i.volume, 2)[
        0
    ],
    "affine_grid": lambda i: F.affine_grid(i.rows.reshape(-1)[:12].view(2, 2, 3), (2, 1, 4, 4)),
    "alpha_dropout": lambda i: F.alpha_dropout(i.rows, training=True),
    "avg_pool1d": lambda i: F.avg_pool1d(i.signal, 2),
    "avg_pool2d": lambda i: F.avg_pool2d(i.image, 2),
    "avg_pool3d": lambda i: F.avg_pool3d(i.volume, 2),
    "batch_norm": lambda i: F.batch_norm(i.rows, None, None, training=True),
    "bilinear": lambda i: F.bilinear(i.rows, i.rows, torch.ones(3, 8, 8)),
    "binary_cross_entropy": lambda i: F.binary_cross_entropy(i.rows.sigmoid(), i.shares),
    "binary_cross_entropy_with_logits": lambda i: F.binary_cross_entropy_with_logits(
        i.rows, i.shares
    ),
    "celu": lambda i: F.celu(i.rows),
    "celu_": lambda i: F.celu_(i.rows + 1),
    "channel_shuffle": lambda i: F.channel_shuffle(i.image, 2),
    "conv1d": lambda i: F.conv1d(i.signal, torch.ones(6, 4, 3)),
    "conv2d": lambda i: F.conv2d(i.image, torch.ones(6, 4, 3, 3)),
    "conv3d": lambda i: F.conv3d(i.volume, torch.ones(6, 4, 3, 3, 3)),
    "conv_tbc": lambda i: F.conv_tbc(i.sequence, torch.ones(3, 8, 6), torch.ones(6)),
    "conv_transpose1d": lambda i: F.conv_transpose1d(i.signal, torch.ones(4, 6, 3)),
    "conv_transpose2d": lambda i: F.conv_transpose2d(i.image, torch.ones(4, 6, 3, 3)),
    "conv_transpose3d": lambda i: F.conv_transpose3d(i.volume, torch.ones(4, 6, 3, 3, 3)),
    "cosine_embedding_loss": lambda i: F.cosine_embedding_loss(i.rows, i.rows.flip(0), i.signs),
    "cosine_similarity": lambda i: F.cosine_similarity(i.rows, i.rows.flip(0)),
    "cross_entropy": lambda i: F.cross_entropy(i.rows, i.classes),
    "ctc_loss": lambda i: F.ctc_loss(i.scores, i.labels, (8, 8), (3, 2)),
    "dropout": lambda i: F.dropout(i.rows),
    "dropout1d": lambda i: F.dropout1d(i.signal),
    "dropout2d": lambda i: F.dropout2d(i.image),
    "dropout3d": lambda i: F.dropout3d(i.volume),
    "elu": lambda i: F.elu(i.rows),
    "elu_": lambda i: F.elu_(i.rows + 1),
    "embedding": lambda i: F.embedding(i.words, i.rows.repeat(5, 1)),
    "embedding_bag": lambda i: F.embedding_bag(i.words, i.rows.repeat(5, 1)),
    "feature_alpha_dropout": lambda i: F.feature_alpha_dropout(i.image, training=True),
    "fold": lambda i: F.fold(i.volume.reshape(2, 16, 128)[:, :, :9], 4, 2),
    "fractional_max_pool2d": lambda i: F.fractional_max_pool2d(i.image, 2, output_size=4),
    "fractional_max_pool2d_with_indices": lambda i: F.fractional_max_pool2d_with_indices(
        i.image, 2, output_size=4
    )[0],
    "fractional_max_pool3d": lambda i: F.fractional_max_pool3d(i.volume, 2, output_size=2),
    "fractional_max_pool3d_with_indices": lambda i: F.fractional_max_pool3d_with_indices(
        i.volume, 2, output_size=2
    )[0],
    "gaussian_nll_loss": lambda i: F.gaussian_nll_loss(i.rows, i.shares, i.shares + 1),
    "gelu": lambda i: F.gelu(i.rows),
    "glu": lambda i: F.glu(i.rows),
    "grid_sample": lambda i: F.grid_sample(i.image, torch.zeros(2, 4, 4, 2), align_corners=False),
    "group_norm": lambda i: F.group_norm(i.image, 2),
    "grouped_mm": lambda i: F.grouped_mm(
        i.rows.bfloat16(),
        torch.ones(2, 8, 8, dtype=torch.bfloat16),
        offs=torch.tensor([2, 4], dtype=torch.int32),
    ),
    "gumbel_softmax": lambda i: F.gumbel_softmax(i.rows),
    "hardshrink": lambda i: F.hardshrink(i.rows),
    "hardsigmoid": lambda i: F.hardsigmoid(i.rows),
    "hardswish": lambda i: F.hardswish(i.rows),
    "hardtanh": lambda i: F.hardtanh(i.rows),
    "hardtanh_": lambda i: F.hardtanh_(i.rows + 1),
    "hinge_embedding_loss": lambda i: F.hinge_embedding_loss(i.rows, i.signs[:, None].expand(4, 8)),
    "huber_loss": lambda i: F.huber_loss(i.rows, i.shares),
    "instance_norm": lambda i: F.instance_norm(i.signal),
    "interpolate": lambda i: F.interpolate(i.image, scale_factor=2),
    "kl_div": lambda i: F.kl_div(i.rows.log_softmax(1), i.shares, reduction="batchmean"),
    "l1_loss": lambda i: F.l1_loss(i.rows, i.shares),
    "layer_norm": lambda i: F.layer_norm(i.rows, (8,)),
    "leaky_relu": lambda i: F.leaky_relu(i.rows),
    "leaky_relu_": lambda i: F.leaky_relu_(i.rows + 1),
    "linear": lambda i: F.linear(i.rows, torch.ones(6, 8)),
    "linear_cross_entropy": lambda i: F.linear_cross_entropy(i.rows, torch.ones(8, 8), i.classes),
    "local_response_norm": lambda i: F.local_response_norm(i.image, 2),
    "log_softmax": lambda i: F.log_softmax(i.rows, 1),
    "logsigmoid": lambda i: F.logsigmoid(i.rows),
    "lp_pool1d": lambda i: F.lp_pool1d(i.signal, 2, 2),
    "lp_pool2d": lambda i: F.lp_pool2d(i.image, 2, 2),
    "lp_pool3d": lambda i: F.lp_pool3d(i.volume, 2, 2),
    "margin_ranking_loss": lambda i: F.margin_ranking_loss(i.rows[:, 0], i.rows[:, 1], i.signs),
    "max_pool1d": lambda i: F.max_pool1d(i.signal, 2),
    "max_pool1d_with_indices": lambda i: F.max_pool1d_with_indices(i.signal, 2)[0],
    "max_pool2d": lambda i: F.max_pool2d(i.image, 2),
    "max_pool2d_with_indices": lambda i: F.max_pool2d_with_indices(i.image, 2)[0],
    "max_pool3d": lambda i: F.max_pool3d(i.volume, 2),
    "max_pool3d_with_indices": lambda i: F.max_pool3d_with_indices(i.volume, 2)[0],
    "max_unpool1d": lambda i: F.max_unpool1d(i.signal, i.places[:, :, 0], 2),
    "max_unpool2d": lambda i: F.max_unpool2d(i.image, i.places, 2),
    "max_unpool3d": lambda i: F.max_unpool3d(
        i.volume, i.places[:, :, :, :, None].expand(2, 4, 8, 8, 8).contiguous(), 2
    ),
    "mish": lambda i: F.mish(i.rows),
    "mse_loss": lambda i: F.mse_loss(i.rows, i.shares),
    "multi_head_attention_forward": lambda i: F.multi_head_attention_forward(
        i.sequence,
        i.sequence,
        i.sequence,
        8,
        2,
        torch.ones(24, 8),
        torch.ones(24),
        None,
        None,
        False,
        0.0,
        torch.ones(8, 8),
        torch.ones(8),
    )[0],
    "multi_margin_loss": lambda i: F.multi_margin_loss(i.rows, i.classes),
    "multilabel_margin_loss": lambda i: F.multilabel_margin_loss(
        i.rows, i.classes[:, None].expand(4, 8)
    ),
    "multilabel_soft_margin_loss": lambda i: F.multilabel_soft_margin_loss(i.rows, i.shares),
    "native_channel_shuffle": lambda i: F.native_channel_shuffle(i.image, 2),
    "nll_loss": lambda i: F.nll_loss(i.rows.log_softmax(1), i.classes),
    "normalize": lambda i: F.normalize(i.rows),
    "one_hot": lambda i: F.one_hot(i.classes, 8) * i.rows,
    "pad": lambda i: F.pad(i.image, (1, 1, 1, 1), mode="reflect"),
    "pairwise_distance": lambda i: F.pairwise_distance(i.rows, i.rows.flip(0)),
    "pdist": lambda i: F.pdist(i.rows),
    "pixel_shuffle": lambda i: F.pixel_shuffle(i.image, 2),
    "pixel_unshuffle": lambda i: F.pixel_unshuffle(i.image, 2),
    "poisson_nll_loss": lambda i: F.poisson_nll_loss(i.rows, i.shares),
    "prelu": lambda i: F.prelu(i.rows, torch.full((1,), 0.2)),
    "relu": lambda i: F.relu(i.rows),
    "relu6": lambda i: F.relu6(i.rows),
    "relu_": lambda i: F.relu_(i.rows + 1),
    "rms_norm": lambda i: F.rms_norm(i.rows, (8,)),
    "rrelu": lambda i: F.rrelu(i.rows, training=True),
    "rrelu_": lambda i: F.rrelu_(i.rows + 1, training=True),
    "scaled_dot_product_attention": lambda i: F.scaled_dot_product_attention(
        i.image, i.image, i.image
    ),
    "selu": lambda i: F.selu(i.rows),
    "selu_": lambda i: F.selu_(i.rows + 1),
    "sigmoid": lambda i: F.sigmoid(i.rows),
    "silu": lambda i: F.silu(i.rows),
    "smooth_l1_loss": lambda i: F.smooth_l1_loss(i.rows, i.shares),
    "soft_margin_loss": lambda i: F.soft_margin_loss(i.rows, i.signs[:, None].expand(4, 8)),
    "softmax": lambda i: F.softmax(i.rows, 1),
    "softmin": lambda i: F.softmin(i.rows, 1),
    "softplus": lambda i: F.softplus(i.rows),
    "softshrink": lambda i: F.softshrink(i.rows),
    "softsign": lambda i: F.softsign(i.rows),
    "tanh": lambda i: F.tanh(i.rows),
    "tanhshrink": lambda i: F.tanhshrink(i.rows),
    "threshold": lambda i: F.threshold(i.rows, 0.1, 0.0),
    "threshold_": lambda i: F.threshold_(i.rows + 1, 0.1, 0.0),
    "triplet_margin_loss": lambda i: F.triplet_margin_loss(i.rows, i.rows.flip(0), i.shares),
    "triplet_margin_with_distance_loss": lambda i: F.triplet_margin_with_distance_loss(
        i.rows, i.rows.flip(0), i.shares
    ),
    "unfold": lambda i: F.unfold(i.image, 2),
    "upsample": lambda i: F.upsample(i.image, scale_factor=2),
    "upsample_bilinear": lambda i: F.upsample_bilinear(i.image, scale_factor=2),
    "upsample_nearest": lambda i: F.upsample_nearest(i.image, scale_factor=2),
}

#: Functions of torch.nn.functional that are left out of the table, and why.
NO_FUNCTIONS: dict[str, str] = {
    "checks of arguments": "assert_int_or_pair boolean_dispatch handle_torch_function has_torch_function "
    "has_torch_function_unary has_torch_function_variadic",
    "run only on some cards": "scaled_mm scaled_grouped_mm",
}


# As `farm operators benchmarks/layer_examples.py:Conv2d` names them.
for _name in (*LAYERS, *FUNCTIONS):
    globals()[_name] = functools.partial(example_of, _name)
