"""Families: operators with similar kernels, and models that are variants of one architecture.

If an operator type has few readings, a predictor uses readings of other types of its family. Evaluations leave out
whole families of models, because the tuples of resnet18 resemble those of resnet34.
"""

from __future__ import annotations

import re

_FAMILIES = {
    "convolution": "conv1d conv2d conv3d convolution",
    "transposed convolution": "convtranspose1d convtranspose2d convtranspose3d",
    "product": "linear bilinear mm bmm matmul addmm baddbmm addbmm einsum mv dot _scaled_mm _grouped_mm",
    "attention": """
        scaled_dot_product_attention multiheadattention _scaled_dot_product_flash_attention
        _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention
        _scaled_dot_product_flash_attention_for_cpu
    """,
    "recurrent": "lstm gru rnn lstmcell grucell rnncell",
    "batch norm": """
        batchnorm1d batchnorm2d batchnorm3d native_batch_norm cudnn_batch_norm batch_norm _batch_norm_with_update
        frozenbatchnorm2d syncbatchnorm
    """,
    "row norm": """
        layernorm layernorm2d rmsnorm groupnorm instancenorm1d instancenorm2d layer_norm instancenorm3d rms_norm
        group_norm native_layer_norm native_group_norm _fused_rms_norm softmax log_softmax _softmax _log_softmax
        _safe_softmax softmax2d logsoftmax normalize localresponsenorm
    """,
    "reduction": """
        mean sum max min amax amin all any argmax argmin prod norm var std var_mean logsumexp cumsum cumprod
        linalg_vector_norm topk sort nll_loss_forward nll_loss2d_forward mse_loss crossentropyloss cross_entropy
        diff
    """,
    "pooling": """
        maxpool1d maxpool2d maxpool3d avgpool1d avgpool2d avgpool3d max_pool2d avg_pool2d adaptiveavgpool1d
        adaptiveavgpool2d adaptiveavgpool3d adaptivemaxpool2d adaptive_avg_pool1d adaptive_avg_pool2d
        adaptive_avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d max_pool1d max_pool2d_with_indices
        max_pool3d_with_indices adaptive_max_pool2d avg_pool3d max_pool3d upsample interpolate upsample_nearest2d
        upsample_bilinear2d upsample_bicubic2d unfold fold im2col col2im
    """,
    "indexing": """
        embedding gather index index_select index_copy scatter scatter_add index_put index_add embeddingbag take
        take_along_dim masked_select getitem setitem _unsafe_index select_scatter slice_scatter masked_scatter
        _index_put_impl where
    """,
    "copy": """
        cat to contiguous clone float half bfloat16 reshape stack type_as copy _to_copy long int bool roll flip
        repeat pad constant_pad_nd pixel_shuffle expand pixel_unshuffle channel_shuffle type flatten permute
        transpose repeat_interleave concat zeropad2d channelshuffle pixelshuffle double tril triu meshgrid view
        unflatten
    """,
    "creation": """
        arange full ones zeros full_like ones_like zeros_like new_ones new_zeros new_full new_empty empty fill zero
        eye linspace scalar_tensor rand randn randint normal uniform bernoulli exponential rand_like randn_like
        randperm new_tensor tensor
    """,
}
#: Operator type -> names of the modules, functions and aten operators that run its kernels.
_SAME_WORK = {
    "convolution": "conv1d conv2d conv3d",
    "native_layer_norm": "layernorm layer_norm",
    "native_group_norm": "groupnorm group_norm",
    "_softmax": "softmax _safe_softmax",
    "_log_softmax": "log_softmax logsoftmax",
    "maxpool2d": "max_pool2d max_pool2d_with_indices",
    "adaptiveavgpool2d": "adaptive_avg_pool2d _adaptive_avg_pool2d",
    "scaled_dot_product_attention": """
        _scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention
    """,
    "to": "_to_copy",
    "avgpool2d": "avg_pool2d",
    "hardtanh": "relu6",
}
_FAMILY_OF, _TYPE_OF = (
    {name: group for group, names in groups.items() for name in names.split()} for groups in (_FAMILIES, _SAME_WORK)
)
_BACKWARD = re.compile(r"_backward(_data)?$")


def operator_type(short_name: str) -> str:
    """Return the common name of modules, functions and aten operators with equal kernels: `ReLU`, `relu_` -> `relu`."""
    name = short_name.lower()
    name = name.rstrip("_") or name
    return _TYPE_OF.get(name, name)


def operator_family(short_name: str) -> str:
    """Return the kind of kernels that an operator runs; `pointwise` for unknown operators.

    A backward operator has a separate family (``convolution backward``), because it runs different kernels.
    """
    name = short_name.lower()
    name = name.rstrip("_") or name
    if name.startswith(("_foreach_", "_fused_adam", "_fused_sgd", "_fused_adagrad", "_amp_")):
        return "optimizer"
    forward = _BACKWARD.sub("", name)
    if forward != name:
        backward_of = {"embedding_dense": "indexing", "threshold": "pointwise"}.get(forward) or operator_family(forward)
        return backward_of if backward_of in ("pointwise", "indexing") else f"{backward_of} backward"
    return _FAMILY_OF.get(name, "pointwise")


#: (pattern, architecture) for models whose names do not begin with the architecture.
_SAME_ARCHITECTURE = (
    (r"res2?ne[xs]?t|wide_resnet", "resnet"),
    (r"(distil|ro|xlm-ro|cam)?bert(a)?(?![a-z])", "bert"),
    (r"(tiny)?llama|mistral", "llama"),
    (r"(deit|vit)", "vit"),
    (r"inception|googlenet", "inception"),
)


def model_family(model: str) -> str:
    """Return the architecture of a model from its name: `resnet` for `resnet18` and `wide_resnet50_2`.

    For other names, it is the letters at the beginning; after a single letter also the number: `t5`.
    """
    name = model.rsplit("/", 1)[-1].lower()
    first = re.match(r"[a-z]{2,}|[a-z]\d*", name)
    known = (family for pattern, family in _SAME_ARCHITECTURE if re.match(pattern, name))
    return next(known, first[0] if first else name)
