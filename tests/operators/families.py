"""Small models of transformers' architectures, made of their own configurations: two layers, 32
wide, 99 tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from farm.models.torchvision import torchvision_models

_WIDE: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_BERT = _WIDE | {"intermediate_size": 64, "vocab_size": 99}
_GROUPED = _BERT | {"num_key_value_heads": 2}
_GPT: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 99}
_T5: dict[str, Any] = {
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
    "vocab_size": 99,
}
_BART: dict[str, Any] = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "vocab_size": 99,
}
_IMAGE = _WIDE | {"intermediate_size": 64, "image_size": 32, "patch_size": 8}
_AUDIO = _WIDE | {
    "intermediate_size": 64,
    "conv_dim": [16, 16, 16],
    "conv_stride": [5, 2, 2],
    "conv_kernel": [10, 3, 3],
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
}
_NUMBERED = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0, "decoder_start_token_id": 0}
_RELATIVE = _BERT | {
    "relative_attention": True,
    "pos_att_type": ["c2p", "p2c"],
    "position_biased_input": False,
    "type_vocab_size": 0,
}

#: name -> the model's class, its configuration, and what it is given
FAMILIES: dict[str, tuple[str, dict[str, Any], str]] = {
    "albert": ("AlbertModel", _BERT | {"embedding_size": 16}, "tokens"),
    "bart": ("BartModel", _BART, "both"),
    "beit": (
        "BeitModel",
        _IMAGE | {"use_relative_position_bias": True, "out_indices": [1, 2]},
        "image",
    ),
    "bert": ("BertModel", _BERT, "tokens"),
    "bigbird": ("BigBirdModel", _BERT | {"attention_type": "original_full"}, "tokens"),
    "bloom": (
        "BloomForCausalLM",
        {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 99},
        "tokens",
    ),
    "camembert": ("CamembertModel", _BERT, "tokens"),
    "clip": ("CLIPModel", {"text_config": _BERT, "vision_config": _IMAGE}, "captioned"),
    "codegen": ("CodeGenForCausalLM", _GPT | {"rotary_dim": 4}, "tokens"),
    "convbert": ("ConvBertModel", _BERT | {"embedding_size": 16}, "tokens"),
    "ctrl": ("CTRLModel", _GPT | {"dff": 64}, "tokens"),
    "deberta": ("DebertaModel", _RELATIVE | {"max_relative_positions": 64}, "tokens"),
    "deberta_v2": (
        "DebertaV2Model",
        _RELATIVE | {"position_buckets": 8, "norm_rel_ebd": "layer_norm", "share_att_key": True},
        "tokens",
    ),
    "deit": ("DeiTModel", _IMAGE, "image"),
    "distilbert": (
        "DistilBertModel",
        {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "vocab_size": 99},
        "tokens",
    ),
    "electra": ("ElectraModel", _BERT | {"embedding_size": 16}, "tokens"),
    "falcon": ("FalconForCausalLM", _WIDE | {"vocab_size": 99}, "tokens"),
    "fnet": (
        "FNetModel",
        {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 99},
        "tokens alone",
    ),
    "funnel": (
        "FunnelModel",
        {
            "block_sizes": [1, 1],
            "d_model": 32,
            "n_head": 4,
            "d_head": 8,
            "d_inner": 64,
            "vocab_size": 99,
        },
        "tokens",
    ),
    "gemma": ("GemmaForCausalLM", _BERT | {"num_key_value_heads": 1, "head_dim": 8}, "tokens"),
    "gpt2": ("GPT2LMHeadModel", _GPT, "tokens"),
    "gpt_neo": (
        "GPTNeoForCausalLM",
        {
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 4,
            "vocab_size": 99,
        },
        "tokens",
    ),
    "gpt_neox": ("GPTNeoXForCausalLM", _BERT, "tokens"),
    "gptj": ("GPTJForCausalLM", _GPT | {"rotary_dim": 4}, "tokens"),
    "led": ("LEDModel", _BART | {"attention_window": 4}, "both"),
    "llama": ("LlamaForCausalLM", _GROUPED, "tokens"),
    "longformer": ("LongformerModel", _BERT | {"attention_window": 4}, "tokens"),
    "mamba": (
        "MambaForCausalLM",
        {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, "vocab_size": 99},
        "tokens",
    ),
    "marian": ("MarianModel", _BART | _NUMBERED, "both"),
    "mbart": ("MBartModel", _BART, "both"),
    "mistral": ("MistralForCausalLM", _GROUPED | {"sliding_window": 4}, "tokens"),
    "mixtral": ("MixtralForCausalLM", _GROUPED | {"num_local_experts": 4}, "tokens"),
    "mobilebert": (
        "MobileBertModel",
        _BERT | {"intermediate_size": 32, "embedding_size": 16, "intra_bottleneck_size": 16},
        "tokens",
    ),
    "modernbert": (
        "ModernBertModel",
        _BERT
        | {
            "local_attention": 4,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "cls_token_id": 1,
            "sep_token_id": 2,
        },
        "tokens",
    ),
    "mpnet": ("MPNetModel", _BERT, "tokens"),
    "olmo": ("OlmoForCausalLM", _BERT, "tokens"),
    "openai_gpt": ("OpenAIGPTLMHeadModel", _GPT, "tokens"),
    "openai_gpt_double": ("OpenAIGPTDoubleHeadsModel", _GPT, "choices"),
    "opt": (
        "OPTForCausalLM",
        _WIDE | {"ffn_dim": 64, "word_embed_proj_dim": 32, "vocab_size": 99},
        "tokens",
    ),
    "pegasus": ("PegasusModel", _BART, "both"),
    "phi": ("PhiForCausalLM", _BERT, "tokens"),
    "qwen2": ("Qwen2ForCausalLM", _GROUPED, "tokens"),
    "qwen3": ("Qwen3ForCausalLM", _GROUPED | {"head_dim": 8}, "tokens"),
    "roberta": ("RobertaModel", _BERT, "tokens"),
    "squeezebert": ("SqueezeBertModel", _BERT | {"embedding_size": 32}, "tokens"),
    "stablelm": ("StableLmForCausalLM", _BERT | {"num_key_value_heads": 4}, "tokens"),
    "t5": ("T5ForConditionalGeneration", _T5, "both"),
    "t5_encoder": ("T5EncoderModel", _T5, "tokens"),
    "vit": ("ViTModel", _IMAGE, "image"),
    "wav2vec2": ("Wav2Vec2Model", _AUDIO, "sound"),
    "whisper": (
        "WhisperModel",
        _BART | _NUMBERED | {"max_source_positions": 20, "num_mel_bins": 8},
        "spectrum",
    ),
    "xlm": ("XLMModel", {"emb_dim": 32, "n_layers": 2, "n_heads": 4, "vocab_size": 99}, "tokens"),
    "xlm_roberta": ("XLMRobertaModel", _BERT, "tokens"),
    "xlnet": (
        "XLNetModel",
        {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64, "vocab_size": 99},
        "tokens",
    ),
}


def make(name: str, **others: Any) -> nn.Module:
    """With ``others`` in its configuration; in evaluation mode, in single precision; a mixture of
    experts in bfloat16, as its grouped products ask for."""
    torchvision_models()  # where it lacks its operators, transformers cannot import it either
    import transformers

    class_name, given, _ = FAMILIES[name]
    model_class = getattr(transformers, class_name)
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**given | others)).eval()
    return model.to(torch.bfloat16) if name == "mixtral" else model


def inputs(name: str, *, padded: bool = False) -> dict[str, torch.Tensor]:
    """Two samples; ``padded`` hides the second half of the first one's tokens."""
    kind = FAMILIES[name][2]
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(5, 90, (2, 16), generator=generator)
    mask = torch.ones(2, 16, dtype=torch.long)
    if padded:
        mask[0, 8:] = 0
    image = torch.randn(2, 3, 32, 32, generator=generator)
    return {
        "tokens": {"input_ids": tokens, "attention_mask": mask},
        "tokens alone": {"input_ids": tokens},
        "choices": {
            "input_ids": tokens[:, None].repeat(1, 2, 1),
            "mc_token_ids": torch.full((2, 2), 15),
        },
        "both": {"input_ids": tokens, "attention_mask": mask, "decoder_input_ids": tokens[:, :8]},
        "image": {"pixel_values": image},
        "captioned": {"input_ids": tokens, "attention_mask": mask, "pixel_values": image},
        "sound": {"input_values": torch.randn(2, 800, generator=generator)},
        "spectrum": {
            "input_features": torch.randn(2, 8, 40, generator=generator),
            "decoder_input_ids": tokens[:, :4],
        },
    }[kind]
