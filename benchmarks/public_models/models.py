"""Models and layers of public packages, at small sizes with random weights.

The list was chosen before the farm was tried on any of them, and it is not changed to fit the
outcome. Each function returns a module and its example inputs, as for ``farm operators
models.py:name``. `PACKAGES` has the versions that `requirements.txt` pins."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from farm.models.torchvision import torchvision_models

torchvision_models()  # defines operators that PyTorch's CPU build lacks, before other packages import torchvision

IMAGE = (2, 3, 64, 64)


def image(size: int = 64, batch: int = 2, channels: int = 3) -> torch.Tensor:
    return torch.randn(batch, channels, size, size)


def tokens(length: int = 16, batch: int = 2, vocabulary: int = 100) -> torch.Tensor:
    return torch.randint(0, vocabulary, (batch, length))


def built(module: nn.Module, *inputs: Any, **named: Any) -> Any:
    """The module in eval mode with its example inputs."""
    module = module.eval()
    if named:
        return module, (inputs, named)
    return module, inputs


class Call(nn.Module):
    """A module that calls a function on its inputs, with other modules as its parts."""

    def __init__(self, function: Any, **parts: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, *inputs: Any) -> Any:
        return self.function(self, *inputs)


# ----- torchvision


def torchvision_s3d() -> Any:
    from torchvision.models.video import s3d

    return built(s3d(weights=None), torch.randn(1, 3, 16, 224, 224))


def torchvision_retinanet() -> Any:
    from torchvision.models.detection import retinanet_resnet50_fpn

    model = retinanet_resnet50_fpn(weights=None, weights_backbone=None, min_size=64, max_size=96)
    return built(model, [torch.rand(3, 64, 64)])


def torchvision_fcn() -> Any:
    from torchvision.models.segmentation import fcn_resnet50

    return built(fcn_resnet50(weights=None, weights_backbone=None), image())


def torchvision_deeplab() -> Any:
    from torchvision.models.segmentation import deeplabv3_mobilenet_v3_large

    return built(deeplabv3_mobilenet_v3_large(weights=None, weights_backbone=None), image())


def torchvision_r2plus1d() -> Any:
    from torchvision.models.video import r2plus1d_18

    return built(r2plus1d_18(weights=None), torch.randn(1, 3, 4, 32, 32))


def torchvision_mvit() -> Any:
    from torchvision.models.video import mvit_v1_b

    return built(mvit_v1_b(weights=None), torch.randn(1, 3, 16, 224, 224))


def torchvision_squeeze_excitation() -> Any:
    from torchvision.ops import SqueezeExcitation

    return built(SqueezeExcitation(16, 4), torch.randn(2, 16, 16, 16))


def torchvision_feature_pyramid() -> Any:
    from torchvision.ops import FeaturePyramidNetwork

    return built(
        FeaturePyramidNetwork([8, 16], 8),
        {"low": torch.randn(1, 8, 32, 32), "high": torch.randn(1, 16, 16, 16)},
    )


# ----- timm


def timm_model(name: str, size: int, **options: Any) -> Any:
    import timm

    return built(timm.create_model(name, pretrained=False, **options), image(size))


def timm_levit() -> Any:
    return timm_model("levit_128s", 224)


def timm_coatnet() -> Any:
    return timm_model("coatnet_nano_rw_224", 224)


def timm_xcit() -> Any:
    return timm_model("xcit_nano_12_p16_224", 224)


def timm_volo() -> Any:
    return timm_model("volo_d1_224", 224)


def timm_nfnet() -> Any:
    return timm_model("dm_nfnet_f0", 64)


def timm_eva02() -> Any:
    return timm_model("eva02_tiny_patch14_224", 224)


def timm_hiera() -> Any:
    return timm_model("hiera_tiny_224", 224)


def timm_ghostnet() -> Any:
    return timm_model("ghostnetv2_100", 64)


def timm_mambaout() -> Any:
    return timm_model("mambaout_femto", 64)


def timm_selecsls() -> Any:
    return timm_model("selecsls42b", 64)


# ----- transformers


def from_config(
    class_name: str,
    config_name: str,
    *inputs: Any,
    named: dict[str, Any] | None = None,
    **sizes: Any,
) -> Any:
    import transformers

    config = getattr(transformers, config_name)(**sizes)
    return built(getattr(transformers, class_name)(config), *inputs, **(named or {}))


SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 100,
}


def transformers_roberta() -> Any:
    return from_config("RobertaModel", "RobertaConfig", tokens(), **SMALL)


def transformers_albert() -> Any:
    return from_config("AlbertModel", "AlbertConfig", tokens(), embedding_size=16, **SMALL)


def transformers_xlnet() -> Any:
    return from_config(
        "XLNetModel",
        "XLNetConfig",
        tokens(),
        vocab_size=100,
        d_model=32,
        n_layer=2,
        n_head=4,
        d_inner=64,
    )


def transformers_bart() -> Any:
    return from_config(
        "BartModel",
        "BartConfig",
        tokens(),
        vocab_size=100,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )


def transformers_gemma2() -> Any:
    return from_config(
        "Gemma2Model", "Gemma2Config", tokens(), num_key_value_heads=2, head_dim=8, **SMALL
    )


def transformers_phi3() -> Any:
    return from_config(
        "Phi3Model", "Phi3Config", tokens(), num_key_value_heads=2, pad_token_id=0, **SMALL
    )


def transformers_jamba() -> Any:
    return from_config(
        "JambaModel",
        "JambaConfig",
        tokens(),
        num_key_value_heads=2,
        num_experts=4,
        use_mamba_kernels=False,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        **SMALL,
    )


def transformers_gpt_oss() -> Any:
    return from_config(
        "GptOssModel",
        "GptOssConfig",
        tokens(),
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        **SMALL,
    )


def transformers_qwen3_next() -> Any:
    return from_config(
        "Qwen3NextModel",
        "Qwen3NextConfig",
        tokens(),
        num_key_value_heads=2,
        head_dim=8,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        layer_types=["linear_attention", "full_attention"],
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        **SMALL,
    )


def transformers_switch() -> Any:
    return from_config(
        "SwitchTransformersEncoderModel",
        "SwitchTransformersConfig",
        tokens(),
        vocab_size=100,
        d_model=32,
        d_ff=64,
        d_kv=8,
        num_layers=2,
        num_sparse_encoder_layers=1,
        num_heads=4,
        num_experts=4,
    )


def transformers_vits() -> Any:
    return from_config(
        "VitsModel",
        "VitsConfig",
        tokens(vocabulary=38),
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        ffn_dim=32,
        flow_size=32,
        spectrogram_bins=33,
        upsample_initial_channel=64,
        upsample_rates=[4, 4],
        upsample_kernel_sizes=[8, 8],
        resblock_kernel_sizes=[3],
        resblock_dilation_sizes=[[1]],
        prior_encoder_num_flows=1,
        posterior_encoder_num_wavenet_layers=1,
        prior_encoder_num_wavenet_layers=1,
    )


def transformers_hubert() -> Any:
    return from_config(
        "HubertModel",
        "HubertConfig",
        torch.randn(1, 4000),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        conv_dim=(16,) * 7,
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
    )


def transformers_segformer() -> Any:
    return from_config(
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        image(),
        hidden_sizes=[8, 16, 24, 32],
        depths=[1, 1, 1, 1],
    )


def transformers_dinov2() -> Any:
    return from_config(
        "Dinov2Model",
        "Dinov2Config",
        image(56),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=56,
    )


def transformers_detr() -> Any:
    return from_config(
        "YolosForObjectDetection",
        "YolosConfig",
        image(64),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        image_size=[64, 64],
        num_detection_tokens=10,
    )


def transformers_blip() -> Any:
    return from_config(
        "BlipTextModel",
        "BlipTextConfig",
        tokens(),
        encoder_hidden_size=32,
        is_decoder=False,
        **SMALL,
    )


def transformers_time_series() -> Any:
    return from_config(
        "PatchTSTModel",
        "PatchTSTConfig",
        torch.randn(2, 32, 3),
        num_input_channels=3,
        context_length=32,
        patch_length=4,
        patch_stride=4,
        d_model=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        ffn_dim=64,
    )


def transformers_bloom() -> Any:
    return from_config(
        "BloomModel", "BloomConfig", tokens(), vocab_size=100, hidden_size=32, n_layer=2, n_head=4
    )


def transformers_bigbird() -> Any:
    return from_config(
        "BigBirdModel", "BigBirdConfig", tokens(), attention_type="original_full", **SMALL
    )


def transformers_funnel() -> Any:
    return from_config(
        "FunnelBaseModel",
        "FunnelConfig",
        tokens(),
        vocab_size=100,
        block_sizes=[1, 1],
        d_model=32,
        n_head=4,
        d_head=8,
        d_inner=64,
    )


# ----- diffusers


def diffusers_unet2d() -> Any:
    from diffusers import UNet2DModel

    model = UNet2DModel(
        sample_size=16,
        block_out_channels=(32, 64),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        layers_per_block=1,
    )
    return built(model, image(16), 10)


def diffusers_flux() -> Any:
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    )
    return built(
        model,
        hidden_states=torch.randn(1, 16, 16),
        encoder_hidden_states=torch.randn(1, 8, 32),
        pooled_projections=torch.randn(1, 32),
        timestep=torch.tensor([1.0]),
        img_ids=torch.zeros(16, 3),
        txt_ids=torch.zeros(8, 3),
    )


def diffusers_vq() -> Any:
    from diffusers import VQModel

    return built(
        VQModel(block_out_channels=(32,), norm_num_groups=8, num_vq_embeddings=16), image(16)
    )


def diffusers_controlnet() -> Any:
    from diffusers import ControlNetModel

    model = ControlNetModel(
        block_out_channels=(32, 64),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=8,
        layers_per_block=1,
        conditioning_embedding_out_channels=(16, 32),
    )
    return built(
        model, torch.randn(1, 4, 16, 16), 10, torch.randn(1, 8, 32), torch.randn(1, 3, 32, 32)
    )


def diffusers_temporal_unet() -> Any:
    from diffusers import UNet1DModel

    model = UNet1DModel(
        sample_size=64,
        in_channels=14,
        out_channels=14,
        block_out_channels=(32, 64),
        down_block_types=("DownResnetBlock1D", "DownResnetBlock1D"),
        up_block_types=("UpResnetBlock1D",),
        mid_block_type="MidResTemporalBlock1D",
        out_block_type="OutConv1DBlock",
        act_fn="mish",
        time_embedding_type="positional",
        flip_sin_to_cos=False,
        freq_shift=1,
        use_timestep_embedding=True,
        layers_per_block=1,
    )
    return built(model, torch.randn(1, 14, 16), torch.tensor([3]))


# ----- segmentation_models_pytorch


def smp_model(name: str, **options: Any) -> Any:
    import segmentation_models_pytorch

    model = getattr(segmentation_models_pytorch, name)(
        "resnet18", encoder_weights=None, classes=3, **options
    )
    return built(model, image())


def smp_fpn() -> Any:
    return smp_model("FPN")


def smp_unetplusplus() -> Any:
    return smp_model("UnetPlusPlus")


def smp_manet() -> Any:
    return smp_model("MAnet")


def smp_pspnet() -> Any:
    return smp_model("PSPNet")


def smp_linknet() -> Any:
    return smp_model("Linknet")


# ----- monai


def monai_swin_unetr() -> Any:
    from monai.networks.nets import SwinUNETR

    return built(
        SwinUNETR(in_channels=1, out_channels=2, feature_size=12, spatial_dims=3),
        torch.randn(1, 1, 64, 64, 64),
    )


def monai_segresnet() -> Any:
    from monai.networks.nets import SegResNet

    return built(
        SegResNet(spatial_dims=3, init_filters=8, in_channels=1, out_channels=2),
        torch.randn(1, 1, 16, 16, 16),
    )


def monai_vnet() -> Any:
    from monai.networks.nets import VNet

    return built(VNet(spatial_dims=3, in_channels=1, out_channels=2), torch.randn(1, 1, 32, 32, 32))


def monai_dynunet() -> Any:
    from monai.networks.nets import DynUNet

    model = DynUNet(2, 1, 2, kernel_size=[3, 3, 3], strides=[1, 2, 2], upsample_kernel_size=[2, 2])
    return built(model, torch.randn(1, 1, 32, 32))


def monai_unetr() -> Any:
    from monai.networks.nets import UNETR

    model = UNETR(1, 2, (32, 32, 32), feature_size=8, hidden_size=48, mlp_dim=64, num_heads=4)
    return built(model, torch.randn(1, 1, 32, 32, 32))


# ----- torch_geometric


def graph(
    nodes: int = 20, edges: int = 60, features: int = 16
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(nodes, features), torch.randint(0, nodes, (2, edges))


def geometric_layer(name: str, **options: Any) -> Any:
    import torch_geometric.nn

    return built(getattr(torch_geometric.nn, name)(16, 8, **options), *graph())


def geometric_gcn() -> Any:
    return geometric_layer("GCNConv")


def geometric_gat() -> Any:
    return geometric_layer("GATConv", heads=2)


def geometric_gatv2() -> Any:
    return geometric_layer("GATv2Conv", heads=2)


def geometric_graph_conv() -> Any:
    return geometric_layer("GraphConv")


def geometric_transformer() -> Any:
    return geometric_layer("TransformerConv", heads=2)


def geometric_edge_conv() -> Any:
    import torch_geometric.nn

    return built(torch_geometric.nn.EdgeConv(nn.Linear(32, 8)), *graph())


def geometric_gin() -> Any:
    import torch_geometric.nn

    return built(torch_geometric.nn.GIN(16, 32, num_layers=2), *graph())


def geometric_pooled() -> Any:
    import torch_geometric.nn

    def classify(
        module: nn.Module, features: torch.Tensor, edges: torch.Tensor, batch: torch.Tensor
    ) -> torch.Tensor:
        hidden = module.convolution(features, edges).relu()
        return module.head(torch_geometric.nn.global_mean_pool(hidden, batch))

    parts = {"convolution": torch_geometric.nn.SAGEConv(16, 8), "head": nn.Linear(8, 2)}
    return built(Call(classify, **parts), *graph(), torch.arange(20) // 10)


# ----- x_transformers, vit_pytorch


def x_transformers_encoder() -> Any:
    from x_transformers import Encoder, TransformerWrapper

    return built(
        TransformerWrapper(
            num_tokens=100, max_seq_len=32, attn_layers=Encoder(dim=32, depth=2, heads=4)
        ),
        tokens(),
    )


def x_transformers_rotary() -> Any:
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(dim=32, depth=2, heads=4, rotary_pos_emb=True, ff_glu=True, use_rmsnorm=True)
    return built(TransformerWrapper(num_tokens=100, max_seq_len=32, attn_layers=layers), tokens())


def x_transformers_flash() -> Any:
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(dim=32, depth=2, heads=4, attn_flash=True, attn_kv_heads=2)
    return built(TransformerWrapper(num_tokens=100, max_seq_len=32, attn_layers=layers), tokens())


def x_transformers_alibi() -> Any:
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(dim=32, depth=2, heads=4, alibi_pos_bias=True)
    return built(TransformerWrapper(num_tokens=100, max_seq_len=32, attn_layers=layers), tokens())


VIT = {
    "image_size": 64,
    "patch_size": 16,
    "num_classes": 10,
    "dim": 32,
    "depth": 2,
    "heads": 4,
    "mlp_dim": 64,
}


def vit_simple() -> Any:
    from vit_pytorch.simple_vit import SimpleViT

    return built(SimpleViT(**VIT), image())


def vit_navit() -> Any:
    from vit_pytorch.na_vit import NaViT

    return built(
        NaViT(**VIT), [[torch.randn(3, 64, 32), torch.randn(3, 32, 32)], [torch.randn(3, 64, 64)]]
    )


def vit_cait() -> Any:
    from vit_pytorch.cait import CaiT

    return built(CaiT(cls_depth=1, **VIT), image())


def vit_cross() -> Any:
    from vit_pytorch.cct import CCT

    return built(
        CCT(img_size=64, embedding_dim=32, num_layers=2, num_heads=4, num_classes=10), image()
    )


def vit_three_dimensions() -> Any:
    from vit_pytorch.vit_3d import ViT

    sizes = VIT | {"image_patch_size": 16, "frames": 4, "frame_patch_size": 2}
    sizes.pop("patch_size")
    return built(ViT(**sizes), torch.randn(1, 3, 4, 64, 64))


# ----- peft, lightning, torchdiffeq, torchsde


def peft_lora() -> Any:
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=100, n_embd=32, n_layer=2, n_head=4))
    return built(get_peft_model(model, LoraConfig(r=4, target_modules=["c_attn"])), tokens())


def peft_dora() -> Any:
    from peft import LoraConfig, get_peft_model
    from transformers import BertConfig, BertModel

    model = BertModel(BertConfig(**SMALL))
    return built(
        get_peft_model(model, LoraConfig(r=4, target_modules=["query"], use_dora=True)), tokens()
    )


def peft_ia3() -> Any:
    from peft import IA3Config, get_peft_model
    from transformers import BertConfig, BertModel

    config = IA3Config(
        target_modules=["key", "value", "output.dense"], feedforward_modules=["output.dense"]
    )
    return built(get_peft_model(BertModel(BertConfig(**SMALL)), config), tokens())


def peft_prompt_tuning() -> Any:
    from peft import PromptTuningConfig, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=100, n_embd=32, n_layer=2, n_head=4))
    return built(
        get_peft_model(model, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)),
        tokens(),
    )


def lightning_module() -> Any:
    import lightning

    class Classifier(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(
                nn.Flatten(), nn.Linear(3 * 64 * 64, 32), nn.ReLU(), nn.Linear(32, 10)
            )

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return self.layers(images)

    return built(Classifier(), image())


class Dynamics(nn.Module):
    """A vector field of an ordinary or a stochastic differential equation."""

    noise_type = "diagonal"
    sde_type = "ito"

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))

    def forward(self, time: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        return self.layers(state)

    f = forward

    def g(self, time: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(state)


def ode(method: str) -> Any:
    from torchdiffeq import odeint

    def solve(module: nn.Module, state: torch.Tensor) -> torch.Tensor:
        return odeint(module.dynamics, state, torch.linspace(0.0, 1.0, 4), method=method)

    return built(Call(solve, dynamics=Dynamics()), torch.randn(4, 8))


def torchdiffeq_dopri5() -> Any:
    return ode("dopri5")


def torchdiffeq_euler() -> Any:
    return ode("euler")


def torchsde_euler() -> Any:
    import torchsde

    def solve(module: nn.Module, state: torch.Tensor) -> torch.Tensor:
        return torchsde.sdeint(
            module.dynamics, state, torch.linspace(0.0, 1.0, 3), dt=0.25, method="euler"
        )

    return built(Call(solve, dynamics=Dynamics()), torch.randn(4, 8))


# ----- kornia


def kornia_gaussian() -> Any:
    from kornia.filters import GaussianBlur2d

    return built(GaussianBlur2d((5, 5), (1.5, 1.5)), image())


def kornia_hardnet() -> Any:
    from kornia.feature import HardNet

    return built(HardNet(pretrained=False), torch.rand(4, 1, 32, 32))


def kornia_canny() -> Any:
    from kornia.filters import Canny

    return built(Canny(), torch.rand(IMAGE))


def kornia_ssim() -> Any:
    from kornia.losses import SSIMLoss

    return built(SSIMLoss(5), torch.rand(IMAGE), torch.rand(IMAGE))


def kornia_warp() -> Any:
    from kornia.geometry.transform import warp_perspective

    def warp(module: nn.Module, images: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
        return warp_perspective(images, matrices, (48, 48))

    return built(Call(warp), torch.rand(IMAGE), torch.eye(3).expand(2, 3, 3).contiguous())


# ----- neuralop, e3nn, gpytorch, nflows


def neuralop_fno() -> Any:
    from neuralop.models import FNO

    return built(
        FNO(n_modes=(8, 8), in_channels=1, out_channels=1, hidden_channels=16, n_layers=2),
        torch.randn(2, 1, 32, 32),
    )


def neuralop_tfno() -> Any:
    from neuralop.models import TFNO

    model = TFNO(
        n_modes=(8, 8), in_channels=1, out_channels=1, hidden_channels=16, n_layers=2, rank=0.5
    )
    return built(model, torch.randn(2, 1, 32, 32))


def neuralop_uno() -> Any:
    from neuralop.models import UNO

    model = UNO(
        in_channels=1,
        out_channels=1,
        hidden_channels=16,
        n_layers=3,
        uno_out_channels=[16, 16, 16],
        uno_n_modes=[[4, 4]] * 3,
        uno_scalings=[[1.0, 1.0], [0.5, 0.5], [2.0, 2.0]],
        channel_mlp_skip="linear",
    )
    return built(model, torch.randn(2, 1, 32, 32))


def e3nn_tensor_product() -> Any:
    from e3nn import o3

    product = o3.FullyConnectedTensorProduct("4x0e + 2x1o", "1x0e + 1x1o", "4x0e + 2x1o")
    return built(product, torch.randn(5, 10), torch.randn(5, 4))


def e3nn_spherical_harmonics() -> Any:
    from e3nn import o3

    return built(o3.SphericalHarmonics([0, 1, 2], normalize=True), torch.randn(5, 3))


def e3nn_linear() -> Any:
    from e3nn import o3

    return built(o3.Linear("4x0e + 2x1o", "2x0e + 4x1o"), torch.randn(5, 10))


def gpytorch_kernel() -> Any:
    import gpytorch

    def covariance(module: nn.Module, points: torch.Tensor) -> torch.Tensor:
        return module.kernel(points).to_dense()

    return built(
        Call(covariance, kernel=gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())),
        torch.randn(20, 3),
    )


def gpytorch_matern() -> Any:
    import gpytorch

    def covariance(module: nn.Module, points: torch.Tensor) -> torch.Tensor:
        return module.kernel(points).to_dense()

    return built(Call(covariance, kernel=gpytorch.kernels.MaternKernel(nu=1.5)), torch.randn(20, 3))


def nflows_maf() -> Any:
    from nflows.transforms import MaskedAffineAutoregressiveTransform

    return built(
        MaskedAffineAutoregressiveTransform(features=8, hidden_features=16), torch.randn(4, 8)
    )


def nflows_spline() -> Any:
    from nflows.transforms import MaskedPiecewiseRationalQuadraticAutoregressiveTransform

    model = MaskedPiecewiseRationalQuadraticAutoregressiveTransform(
        features=8, hidden_features=16, tails="linear", tail_bound=3.0
    )
    return built(model, torch.randn(4, 8))


# ----- denoising_diffusion_pytorch, lpips, open_clip, efficientnet_pytorch, whisper, ultralytics


def diffusion_unet() -> Any:
    from denoising_diffusion_pytorch import Unet

    return built(Unet(dim=16, dim_mults=(1, 2)), image(32), torch.tensor([1, 2]))


def diffusion_karras() -> Any:
    from denoising_diffusion_pytorch import KarrasUnet

    return built(
        KarrasUnet(image_size=32, dim=16, dim_max=32, num_downsamples=1, channels=3),
        image(32),
        torch.tensor([1.0, 2.0]),
    )


def lpips_alex() -> Any:
    import lpips

    return built(
        lpips.LPIPS(net="alex", pretrained=False, pnet_rand=True, verbose=False), image(), image()
    )


def open_clip_vit() -> Any:
    import open_clip

    model = open_clip.model.CLIP(
        embed_dim=32,
        vision_cfg={"image_size": 32, "layers": 2, "width": 64, "patch_size": 16, "head_width": 16},
        text_cfg={"context_length": 16, "vocab_size": 100, "width": 32, "heads": 2, "layers": 2},
    )
    return built(model, image(32), tokens())


def open_clip_resnet() -> Any:
    from open_clip.modified_resnet import ModifiedResNet

    return built(
        ModifiedResNet([1, 1, 1, 1], output_dim=32, heads=4, image_size=64, width=16), image()
    )


def efficientnet_b0() -> Any:
    from efficientnet_pytorch import EfficientNet

    return built(EfficientNet.from_name("efficientnet-b0"), image())


def whisper_encoder() -> Any:
    import whisper

    dims = whisper.model.ModelDimensions(
        n_mels=80,
        n_audio_ctx=50,
        n_audio_state=32,
        n_audio_head=2,
        n_audio_layer=2,
        n_vocab=100,
        n_text_ctx=16,
        n_text_state=32,
        n_text_head=2,
        n_text_layer=2,
    )
    return built(whisper.model.Whisper(dims), torch.randn(1, 80, 100), tokens(batch=1))


def ultralytics_model(name: str) -> Any:
    from ultralytics import YOLO

    return built(YOLO(name).model, torch.rand(1, 3, 64, 64))


def ultralytics_yolov8() -> Any:
    return ultralytics_model("yolov8n.yaml")


def ultralytics_yolo11() -> Any:
    return ultralytics_model("yolo11n.yaml")


def ultralytics_segment() -> Any:
    return ultralytics_model("yolov8n-seg.yaml")


# ----- tables


def rtdl_ft_transformer() -> Any:
    from rtdl_revisiting_models import FTTransformer

    model = FTTransformer(
        n_cont_features=4,
        cat_cardinalities=[3, 5],
        d_out=1,
        **FTTransformer.get_default_kwargs(n_blocks=1),
    )
    return built(
        model,
        torch.randn(8, 4),
        torch.stack([torch.randint(0, 3, (8,)), torch.randint(0, 5, (8,))], 1),
    )


def rtdl_resnet() -> Any:
    from rtdl_revisiting_models import ResNet

    model = ResNet(
        d_in=8,
        d_out=1,
        n_blocks=2,
        d_block=16,
        d_hidden=None,
        d_hidden_multiplier=2.0,
        dropout1=0.1,
        dropout2=0.0,
    )
    return built(model, torch.randn(8, 8))


def tab_transformer() -> Any:
    from tab_transformer_pytorch import TabTransformer

    model = TabTransformer(
        categories=(3, 5), num_continuous=4, dim=16, depth=2, heads=2, dim_out=1, mlp_act=nn.ReLU()
    )
    return built(
        model,
        torch.stack([torch.randint(0, 3, (8,)), torch.randint(0, 5, (8,))], 1),
        torch.randn(8, 4),
    )


def tabnet_encoder() -> Any:
    from pytorch_tabnet.tab_network import TabNet

    return built(
        TabNet(8, 2, n_d=4, n_a=4, n_steps=2, group_attention_matrix=torch.eye(8)),
        torch.randn(16, 8),
    )


# ----- attention and quantisation layers


def perceiver() -> Any:
    from perceiver_pytorch import Perceiver

    model = Perceiver(
        num_freq_bands=2,
        depth=1,
        max_freq=4.0,
        input_channels=3,
        num_latents=8,
        latent_dim=16,
        num_classes=10,
    )
    return built(model, torch.randn(1, 32, 32, 3))


def perceiver_io() -> Any:
    from perceiver_pytorch import PerceiverIO

    return built(
        PerceiverIO(dim=16, queries_dim=16, depth=1, num_latents=8, latent_dim=16),
        torch.randn(1, 32, 16),
    )


def local_attention() -> Any:
    from local_attention import LocalTransformer

    return built(
        LocalTransformer(
            num_tokens=100, dim=32, depth=2, max_seq_len=64, local_attn_window_size=16
        ),
        tokens(64),
    )


def linformer() -> Any:
    from linformer import Linformer

    return built(Linformer(dim=32, seq_len=64, depth=2, heads=4, k=16), torch.randn(1, 64, 32))


def soft_moe() -> Any:
    from soft_moe_pytorch import SoftMoE

    return built(SoftMoE(dim=32, seq_len=16, num_experts=4), torch.randn(1, 16, 32))


def vector_quantize() -> Any:
    from vector_quantize_pytorch import VectorQuantize

    return built(VectorQuantize(dim=16, codebook_size=32), torch.randn(1, 24, 16))


def residual_vector_quantize() -> Any:
    from vector_quantize_pytorch import ResidualVQ

    return built(ResidualVQ(dim=16, num_quantizers=2, codebook_size=32), torch.randn(1, 24, 16))


def finite_scalar_quantize() -> Any:
    from vector_quantize_pytorch import FSQ

    return built(FSQ([8, 5, 5]), torch.randn(1, 24, 3))


def reformer() -> Any:
    from reformer_pytorch import ReformerLM

    return built(
        ReformerLM(num_tokens=100, dim=32, depth=2, max_seq_len=128, heads=4, bucket_size=32),
        tokens(128),
    )


def conformer() -> Any:
    from conformer import ConformerBlock

    return built(ConformerBlock(dim=32, dim_head=8, heads=4), torch.randn(1, 24, 32))


def nystrom_attention() -> Any:
    from nystrom_attention import NystromAttention

    return built(
        NystromAttention(dim=32, dim_head=8, heads=4, num_landmarks=8), torch.randn(1, 64, 32)
    )


def axial_attention() -> Any:
    from axial_attention import AxialAttention

    return built(
        AxialAttention(dim=8, dim_index=1, heads=2, num_dimensions=2), torch.randn(1, 8, 8, 8)
    )


def performer() -> Any:
    from performer_pytorch import PerformerLM

    return built(PerformerLM(num_tokens=100, max_seq_len=64, dim=32, depth=2, heads=4), tokens(64))


# ----- sequences and spikes


def crf_decode() -> Any:
    from torchcrf import CRF

    return built(CRF(5, batch_first=True), torch.randn(2, 8, 5), tokens(8, vocabulary=5))


def snntorch_leaky() -> Any:
    import snntorch

    def spike(module: nn.Module, steps: torch.Tensor) -> torch.Tensor:
        membrane = module.neuron.init_leaky()
        spikes = []
        for step in steps:
            spike_now, membrane = module.neuron(module.layer(step), membrane)
            spikes.append(spike_now)
        return torch.stack(spikes)

    return built(
        Call(spike, layer=nn.Linear(8, 16), neuron=snntorch.Leaky(beta=0.9)), torch.randn(5, 2, 8)
    )


def snntorch_synaptic() -> Any:
    import snntorch

    def spike(module: nn.Module, steps: torch.Tensor) -> torch.Tensor:
        current, membrane = module.neuron.init_synaptic()
        for step in steps:
            spike_now, current, membrane = module.neuron(module.layer(step), current, membrane)
        return spike_now

    return built(
        Call(spike, layer=nn.Linear(8, 16), neuron=snntorch.Synaptic(alpha=0.9, beta=0.8)),
        torch.randn(5, 2, 8),
    )


# ----- PyTorch itself: what public models do with it


def torch_packed_lstm() -> Any:
    from torch.nn.utils.rnn import pack_padded_sequence

    sequence = pack_padded_sequence(
        torch.randn(4, 10, 8), torch.tensor([10, 8, 5, 2]), batch_first=True
    )
    return built(nn.LSTM(8, 16, batch_first=True), sequence)


def torch_embedding_bag() -> Any:
    return built(nn.EmbeddingBag(50, 16), torch.randint(0, 50, (20,)), torch.tensor([0, 4, 10]))


def torch_masked_encoder() -> Any:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    mask = torch.arange(12) >= torch.tensor([[12], [7]])
    return built(nn.TransformerEncoder(layer, 2), torch.randn(2, 12, 32), src_key_padding_mask=mask)


def torch_per_sample_gradients() -> Any:
    from torch.func import functional_call, grad, vmap

    def gradients(module: nn.Module, inputs: torch.Tensor) -> Any:
        weights = dict(module.layer.named_parameters())

        def loss(weights: Any, sample: torch.Tensor) -> torch.Tensor:
            return functional_call(module.layer, weights, (sample,)).square().sum()

        return vmap(grad(loss), in_dims=(None, 0))(weights, inputs)

    return built(Call(gradients, layer=nn.Linear(8, 4)), torch.randn(6, 8))


def torch_forces() -> Any:
    def forces(module: nn.Module, positions: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            positions = positions.detach().requires_grad_()
            energy = module.layers(positions).sum()
            return -torch.autograd.grad(energy, positions)[0]

    layers = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))
    return built(Call(forces, layers=layers), torch.randn(10, 3))


def torch_cond() -> Any:
    def branch(module: nn.Module, values: torch.Tensor) -> torch.Tensor:
        return torch.cond(
            values.sum() > 0,
            lambda v: module.layer(v).relu(),
            lambda v: module.layer(v).tanh(),
            (values,),
        )

    return built(Call(branch, layer=nn.Linear(8, 8)), torch.randn(4, 8))


def torch_flex_attention() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    def attend(
        module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        return flex_attention(query, key, value)

    return built(Call(attend), *(torch.randn(1, 2, 16, 16) for _ in range(3)))


def torch_checkpoint() -> Any:
    from torch.utils.checkpoint import checkpoint

    def recompute(module: nn.Module, values: torch.Tensor) -> torch.Tensor:
        return checkpoint(module.layer, values, use_reentrant=False)

    return built(
        Call(recompute, layer=nn.Sequential(nn.Linear(8, 8), nn.ReLU())), torch.randn(4, 8)
    )


def torch_autocast() -> Any:
    def mixed(module: nn.Module, values: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return module.layer(values)

    return built(
        Call(mixed, layer=nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))), torch.randn(4, 8)
    )


def torch_scan_loop() -> Any:
    def scan(module: nn.Module, values: torch.Tensor) -> torch.Tensor:
        state = torch.zeros_like(values[0])
        states = []
        for value in values:
            state = torch.tanh(module.layer(state) + value)
            states.append(state)
        return torch.stack(states)

    return built(Call(scan, layer=nn.Linear(8, 8)), torch.randn(256, 2, 8))


def torch_selected_rows() -> Any:
    def select(module: nn.Module, values: torch.Tensor) -> torch.Tensor:
        return module.layer(values[values[:, 0] > 0])

    return built(Call(select, layer=nn.Linear(8, 8)), torch.randn(16, 8))


def torch_distributions() -> Any:
    def sample(module: nn.Module, values: torch.Tensor) -> torch.Tensor:
        mean, spread = module.layer(values).chunk(2, -1)
        return torch.distributions.Normal(mean, spread.exp()).rsample()

    return built(Call(sample, layer=nn.Linear(8, 8)), torch.randn(4, 8))


def torch_dict_output() -> Any:
    def heads(module: nn.Module, batch: dict[str, torch.Tensor]) -> Any:
        hidden = module.layer(batch["features"]).relu()
        return SimpleNamespace(logits=hidden, names=["a", "b"], sums={"rows": hidden.sum(1)})

    return built(
        Call(heads, layer=nn.Linear(8, 8)), {"features": torch.randn(4, 8), "names": ["a", "b"]}
    )


def torch_spectral_norm() -> Any:
    return built(nn.utils.parametrizations.spectral_norm(nn.Conv2d(3, 8, 3)), image(16))


def torch_exported() -> Any:
    layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    program = torch.export.export(layers, (torch.randn(4, 8),))
    return program.module(), (torch.randn(4, 8),)


def torch_complex_filter() -> Any:
    def filtered(module: nn.Module, values: torch.Tensor) -> torch.Tensor:
        spectrum = torch.fft.rfft(module.layer(values))
        return torch.fft.irfft(
            spectrum * torch.exp(1j * torch.ones(spectrum.shape[-1])), n=values.shape[-1]
        )

    return built(Call(filtered, layer=nn.Linear(16, 16)), torch.randn(4, 16))
