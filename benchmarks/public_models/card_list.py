"""Models of the list in `models.py`, at sizes whose pass is expected above 1 ms on an H200.

The list was chosen and committed before any of them was measured on a card. `on_card.py` measures
them in this order. Those without a package of `WHEELS` need only PyTorch, torchvision, timm,
transformers, torch_geometric, torchdiffeq, einops, e3nn, gpytorch and peft.

With ``PUBLIC_MODELS_TINY=1`` the sizes are so small that a CPU measures a model in seconds."""

from __future__ import annotations

import os
from typing import Any, TypeVar

import torch
from torch import nn

from benchmarks.public_models.models import Call, built, from_config, graph, image, tokens

Size = TypeVar("Size")

TINY = os.environ.get("PUBLIC_MODELS_TINY") == "1"
#: Name of a model -> packages that it needs beside those of the first docstring.
WHEELS = {
    "open_clip_vit": ("open-clip-torch", "ftfy", "wcwidth"),
    "diffusers_unet2d": ("diffusers",),
    "x_transformers_rotary": (
        "x-transformers",
        "torch-einops-utils",
        "einx",
        "frozendict",
        "loguru",
    ),
    "monai_segresnet": ("monai",),
    "smp_fpn": ("segmentation-models-pytorch",),
    "vit_simple": ("vit-pytorch",),
    "rtdl_ft_transformer": ("rtdl-revisiting-models",),
    "kornia_hardnet": ("kornia", "kornia-rs"),
    "lpips_alex": ("lpips",),
    "conformer": ("conformer",),
    "diffusers_controlnet": ("diffusers",),
}


def sized(on_card: Size, tiny: Size) -> Size:
    return tiny if TINY else on_card


BATCH = sized(16, 2)
WIDTH = sized(768, 32)
HEADS = sized(12, 4)
LAYERS = sized(4, 1)
HIDDEN = sized(3072, 64)
VOCABULARY = sized(8192, 100)
LENGTH = sized(256, 16)
TEXT = {
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": HIDDEN,
    "vocab_size": VOCABULARY,
}


def text() -> torch.Tensor:
    return tokens(LENGTH, BATCH, VOCABULARY)


# ----- without further packages


def torchvision_fcn() -> Any:
    from torchvision.models.segmentation import fcn_resnet50

    return built(
        fcn_resnet50(weights=None, weights_backbone=None), image(sized(256, 32), sized(8, 2))
    )


def transformers_roberta() -> Any:
    return from_config("RobertaModel", "RobertaConfig", text(), **TEXT)


def timm_hiera() -> Any:
    return timm_model("hiera_tiny_224", sized(32, 1))


def geometric_gat() -> Any:
    return geometric_layer("GATConv", heads=4)


def transformers_gemma2() -> Any:
    return from_config(
        "Gemma2Model",
        "Gemma2Config",
        text(),
        num_key_value_heads=HEADS // 2,
        head_dim=sized(64, 8),
        **TEXT,
    )


def torchvision_r2plus1d() -> Any:
    from torchvision.models.video import r2plus1d_18

    side = sized(112, 16)
    return built(r2plus1d_18(weights=None), torch.randn(sized(8, 1), 3, sized(8, 4), side, side))


def timm_mambaout() -> Any:
    return timm_model("mambaout_femto", sized(128, 1))


def transformers_segformer() -> Any:
    return from_config(
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        image(sized(512, 64), sized(8, 1)),
        depths=[2, 2, 2, 2],
    )


def geometric_transformer() -> Any:
    return geometric_layer("TransformerConv", heads=4)


def transformers_albert() -> Any:
    return from_config("AlbertModel", "AlbertConfig", text(), embedding_size=WIDTH // 4, **TEXT)


def timm_eva02() -> Any:
    return timm_model("eva02_tiny_patch14_224", sized(64, 1))


def transformers_dinov2() -> Any:
    side = sized(224, 56)
    return from_config(
        "Dinov2Model",
        "Dinov2Config",
        image(side, BATCH),
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        image_size=side,
    )


def geometric_gin() -> Any:
    import torch_geometric.nn

    features = sized(128, 16)
    model = torch_geometric.nn.GIN(features, features, num_layers=3)
    return built(model, *large_graph())


def transformers_hubert() -> Any:
    return from_config(
        "HubertModel",
        "HubertConfig",
        torch.randn(sized(8, 1), sized(64000, 4000)),
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=HIDDEN,
        conv_dim=(sized(512, 16),) * 7,
    )


def peft_lora() -> Any:
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS)
    adapted = LoraConfig(r=16, target_modules=["c_attn"], fan_in_fan_out=True)
    return built(get_peft_model(GPT2LMHeadModel(config), adapted), text())


def timm_xcit() -> Any:
    return timm_model("xcit_nano_12_p16_224", sized(128, 1))


def transformers_time_series() -> Any:
    length = sized(512, 32)
    return from_config(
        "PatchTSTModel",
        "PatchTSTConfig",
        torch.randn(sized(64, 2), length, sized(16, 3)),
        num_input_channels=sized(16, 3),
        context_length=length,
        patch_length=sized(16, 4),
        patch_stride=sized(16, 4),
        d_model=sized(256, 32),
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        ffn_dim=sized(1024, 64),
    )


def transformers_bart() -> Any:
    return from_config(
        "BartModel",
        "BartConfig",
        text(),
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS,
        encoder_ffn_dim=HIDDEN,
        decoder_ffn_dim=HIDDEN,
    )


def torchdiffeq_euler() -> Any:
    from torchdiffeq import odeint

    width = sized(2048, 8)

    def solve(module: nn.Module, state: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        return odeint(module.dynamics, state, times, method="euler")

    states, times = torch.randn(sized(1024, 8), width), torch.linspace(0.0, 1.0, 4)
    return built(Call(solve, dynamics=Dynamics(width)), states, times)


def e3nn_tensor_product() -> Any:
    from e3nn import o3

    product = o3.FullyConnectedTensorProduct("32x0e + 16x1o", "1x0e + 1x1o", "32x0e + 16x1o")
    rows = sized(524_288, 5)
    return built(product, torch.randn(rows, 80), torch.randn(rows, 4))


def gpytorch_kernel() -> Any:
    import gpytorch

    def covariance(module: nn.Module, points: torch.Tensor) -> torch.Tensor:
        return module.kernel(points).to_dense()

    kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())
    return built(Call(covariance, kernel=kernel), torch.randn(sized(16384, 20), 8))


def timm_levit() -> Any:
    return timm_model("levit_128s", sized(256, 1))


def torchvision_deeplab() -> Any:
    from torchvision.models.segmentation import deeplabv3_mobilenet_v3_large

    return built(
        deeplabv3_mobilenet_v3_large(weights=None, weights_backbone=None),
        image(sized(256, 64), sized(16, 2)),
    )


# ----- with further packages


def open_clip_vit() -> Any:
    import open_clip

    side = sized(224, 32)
    model = open_clip.model.CLIP(
        embed_dim=sized(512, 32),
        vision_cfg={
            "image_size": side,
            "layers": LAYERS,
            "width": WIDTH,
            "patch_size": 16,
            "head_width": WIDTH // HEADS,
        },
        text_cfg={
            "context_length": sized(77, 16),
            "vocab_size": VOCABULARY,
            "width": sized(512, 32),
            "heads": sized(8, 2),
            "layers": LAYERS,
        },
    )
    return built(model, image(side, BATCH), tokens(sized(77, 16), BATCH, VOCABULARY))


def diffusers_unet2d() -> Any:
    from diffusers import UNet2DModel

    model = UNet2DModel(
        sample_size=sized(64, 16),
        block_out_channels=sized((128, 256), (32, 64)),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        layers_per_block=1,
    )
    return built(model, image(sized(64, 16), sized(8, 1)), 10)


def x_transformers_rotary() -> Any:
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(
        dim=WIDTH, depth=LAYERS, heads=HEADS, rotary_pos_emb=True, ff_glu=True, use_rmsnorm=True
    )
    model = TransformerWrapper(num_tokens=VOCABULARY, max_seq_len=LENGTH, attn_layers=layers)
    return built(model, text())


def monai_segresnet() -> Any:
    from monai.networks.nets import SegResNet

    side = sized(96, 16)
    model = SegResNet(spatial_dims=3, init_filters=16, in_channels=1, out_channels=2)
    return built(model, torch.randn(1, 1, side, side, side))


def smp_fpn() -> Any:
    import segmentation_models_pytorch

    model = segmentation_models_pytorch.FPN("resnet18", encoder_weights=None, classes=3)
    return built(model, image(sized(256, 64), sized(16, 2)))


def vit_simple() -> Any:
    from vit_pytorch.simple_vit import SimpleViT

    side = sized(224, 64)
    model = SimpleViT(
        image_size=side,
        patch_size=16,
        num_classes=1000,
        dim=WIDTH,
        depth=LAYERS,
        heads=HEADS,
        mlp_dim=HIDDEN,
    )
    return built(model, image(side, BATCH))


def rtdl_ft_transformer() -> Any:
    from rtdl_revisiting_models import FTTransformer

    model = FTTransformer(
        n_cont_features=20,
        cat_cardinalities=[3, 5, 100],
        d_out=1,
        **FTTransformer.get_default_kwargs(n_blocks=3),
    )
    rows = sized(4096, 8)
    return built(
        model,
        torch.randn(rows, 20),
        torch.stack([torch.randint(0, size, (rows,)) for size in (3, 5, 100)], 1),
    )


def kornia_hardnet() -> Any:
    from kornia.feature import HardNet

    return built(HardNet(pretrained=False), torch.rand(sized(4096, 4), 1, 32, 32))


def lpips_alex() -> Any:
    import lpips

    model = lpips.LPIPS(net="alex", pretrained=False, pnet_rand=True, verbose=False)
    side, batch = sized(256, 64), sized(32, 1)
    return built(model, image(side, batch), image(side, batch))


def conformer() -> Any:
    from conformer import ConformerBlock

    width = sized(512, 32)
    block = ConformerBlock(dim=width, dim_head=sized(64, 8), heads=sized(8, 4))
    return built(block, torch.randn(sized(16, 1), sized(512, 24), width))


def diffusers_controlnet() -> Any:
    from diffusers import ControlNetModel

    model = ControlNetModel(
        block_out_channels=sized((128, 256), (32, 64)),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        cross_attention_dim=sized(256, 32),
        attention_head_dim=8,
        layers_per_block=1,
        conditioning_embedding_out_channels=(16, 32),
    )
    side, batch = sized(64, 16), sized(8, 1)
    return built(
        model,
        torch.randn(batch, 4, side, side),
        10,
        torch.randn(batch, sized(77, 8), sized(256, 32)),
        torch.randn(batch, 3, 2 * side, 2 * side),
    )


# ----- parts


def timm_model(name: str, batch: int) -> Any:
    import timm

    return built(timm.create_model(name, pretrained=False), image(224, batch))


def large_graph() -> tuple[torch.Tensor, torch.Tensor]:
    return graph(sized(150_000, 20), sized(1_500_000, 60), sized(128, 16))


def geometric_layer(name: str, heads: int) -> Any:
    import torch_geometric.nn

    width = sized(128, 16)
    layer = vars(torch_geometric.nn)[name](width, width // heads, heads=heads)
    return built(layer, *large_graph())


class Dynamics(nn.Module):
    """A vector field of an ordinary differential equation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, 2 * width), nn.Tanh())
        self.back = nn.Linear(2 * width, width)

    def forward(self, time: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        return self.back(self.layers(state))
