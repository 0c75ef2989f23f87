"""The operators that may be called: a fixed list of leaf modules, public functions and aten overloads.

The farm looks up an operator name of a tuple only in this list. It never imports a module or reads an attribute by such
a name, so a forged tuple can only call an operator of this list. Captures of forward passes consist of modules and
functions, captures of training steps of aten overloads.
"""

from __future__ import annotations

import functools
import inspect
import operator
from typing import Any

import torch
from torch import nn
from torch.overrides import get_overridable_functions, resolve_name

from farm.errors import TupleRejected
from farm.types.tuple import OperatorTuple, tensor_references, words

# ------------------------------------------------------------------------------------------------ modules and functions

# Not leaves: modules that only combine other modules, choose by data which child runs, or have state that a tuple
# cannot store. The capture descends into them and records their children and the functions that they call.
_COMPOSITE = words(
    """
    Module Sequential ModuleList ModuleDict ParameterList ParameterDict Container Transformer TransformerEncoder
    TransformerDecoder TransformerDecoderLayer AdaptiveLogSoftmaxWithLoss DataParallel LinearCrossEntropyLoss
    SyncBatchNorm TripletMarginWithDistanceLoss FractionalMaxPool2d FractionalMaxPool3d RNNBase RNNCellBase
    """
)

#: Classes whose modules are recorded as one operator. The capture descends into subclasses: they may compute anything.
LEAF_CLASSES: frozenset[type[nn.Module]] = frozenset(
    member
    for name, member in vars(nn).items()
    if inspect.isclass(member)
    and issubclass(member, nn.Module)
    and name not in _COMPOSITE
    and member.__name__ == name
    and not name.startswith("Lazy")
)

# Functions that torch does not list as overridable, although a function mode sees them: most create tensors. The last
# three are private: matrix products of eight-bit floats and of a mixture of experts, and the function that
# parametrizations.weight_norm calls.
_NOT_LISTED = """
    Tensor.new_full Tensor.new_ones Tensor.new_tensor Tensor.new_zeros arange eye full linspace logspace ones rand
    randint randn randperm tensor tril_indices triu_indices zeros _scaled_mm _grouped_mm _weight_norm
"""

# Overridable functions that are not operators: they access files, processes, memory, Python callbacks or gradients.
_NOT_OPERATORS = {"", "torch.autocast", "torch.from_file"} | {
    f"torch.Tensor.{name}"
    for name in words(
        """
        apply_ map_ map2_ backward register_hook register_post_accumulate_grad_hook module_load numpy tolist
        share_memory_ storage untyped_storage data_ptr set_ resize_ resize_as_ resize resize_as cuda xpu ipu
        pin_memory record_stream __reduce_ex__ __setstate__ __deepcopy__ __array__ __dlpack__ __repr__
        __format__
        """
    )
}

#: function -> its name
FUNCTION_NAMES: dict[Any, str] = {
    function: name
    for functions in get_overridable_functions().values()
    for function in functions
    if (name := resolve_name(function) or "") not in _NOT_OPERATORS and not name.endswith((".__set__", ".__delete__"))
} | {operator.attrgetter(name)(torch): f"torch.{name}" for name in _NOT_LISTED.split()}

#: name -> leaf class or function
ALLOWED_OPERATORS: dict[str, Any] = {name: function for function, name in FUNCTION_NAMES.items()} | {
    f"torch.nn.{leaf.__name__}": leaf for leaf in LEAF_CLASSES
}

#: Operators that return a value to the host. On meta there is no value to return; only the bytes that the operator
#: reads count as moved.
RETURNS_TO_HOST = {"torch.equal", "torch.allclose", "torch.is_nonzero", "aten._local_scalar_dense.default"} | {
    f"torch.Tensor.{name}"
    for name in words("item tolist equal allclose is_nonzero __bool__ __contains__ __int__ __float__ __index__")
}

# ------------------------------------------------------------------------------------------------ aten overloads

# A name without a dot means the overload `default`. The list contains the operators seen in captures on the CPU and in
# audits on cards, and related ones. It contains no operator that accesses files, processes or memory handles, that is
# dispatched to other operators, or whose output size depends on values.
_OVERLOADS = """
abs add.Scalar add.Tensor add_.Scalar add_.Tensor addbmm addcdiv addcdiv_ addcmul addcmul_ addmm addmm.out all all.dim
amax amin any any.dim arange arange.start arange.start_step argmax atan2 baddbmm baddbmm.out bernoulli bernoulli.p
bernoulli_.float bitwise_and.Scalar bitwise_and.Tensor bitwise_not bitwise_or.Scalar bitwise_or.Tensor
bitwise_xor.Scalar bitwise_xor.Tensor bmm bmm.out cat channel_shuffle clamp clamp.Tensor clamp_ clamp_max clamp_max_
clamp_min clamp_min_ clone constant_pad_nd copy copy_ cos cosh cumsum div.Scalar div.Tensor div.Scalar_mode
div.Tensor_mode div_.Scalar div_.Tensor dot elu elu_ elu_backward eq.Scalar eq.Tensor erf exp expm1 exponential_ eye
fill.Scalar fill.Tensor fill_.Scalar fill_.Tensor flip floor full full_like gather ge.Scalar ge.Tensor gelu gelu_
gelu_backward glu glu_backward gt.Scalar gt.Tensor hardsigmoid hardsigmoid_ hardsigmoid_backward hardswish hardswish_
hardswish_backward hardtanh hardtanh_ hardtanh_backward im2col col2im index.Tensor index_add index_add_ index_copy
index_copy_ index_fill.int_Scalar index_fill_.int_Scalar index_put index_put_ index_select isnan le.Scalar le.Tensor
leaky_relu leaky_relu_ leaky_relu_backward lerp.Scalar lerp.Tensor lerp_.Scalar lerp_.Tensor linalg_vector_norm linspace
log log10 log1p log2 log_sigmoid_backward log_sigmoid_forward logical_and logical_not logical_or logical_xor logsumexp
lt.Scalar lt.Tensor masked_fill.Scalar masked_fill.Tensor masked_fill_.Scalar masked_fill_.Tensor max max.dim maximum
mean mean.dim min min.dim minimum mish mish_ mish_backward mm mm.out mse_loss mse_loss_backward mul.Scalar mul.Tensor
mul.out mul_.Scalar mul_.Tensor mv ne.Scalar ne.Tensor neg neg_ new_empty new_full new_ones new_zeros norm.ScalarOpt_dim
normal_ ones ones_like pixel_shuffle pixel_unshuffle pow.Scalar pow.Tensor_Scalar pow.Tensor_Tensor prod prod.dim_int
rand rand_like randint randint.low_out randn randn_like randperm reciprocal reflection_pad2d reflection_pad2d_backward
relu relu_ repeat replication_pad2d replication_pad2d_backward roll round rsqrt rsub.Scalar rsub.Tensor scalar_tensor
scatter.src scatter.value scatter_.src scatter_.value scatter_add scatter_add_ scatter_reduce.two select_backward
select_scatter sgn sigmoid sigmoid_ sigmoid_backward sign silu silu_ silu_backward sin sinh slice_backward slice_scatter
smooth_l1_loss smooth_l1_loss_backward softplus softplus_backward sort sqrt stack std.correction sub.Scalar sub.Tensor
sub_.Scalar sub_.Tensor sum sum.dim_IntList tan tanh tanh_ tanh_backward threshold threshold_backward topk tril triu
uniform_ upsample_bicubic2d upsample_bicubic2d_backward upsample_bilinear2d upsample_bilinear2d_backward
upsample_nearest2d upsample_nearest2d_backward var.correction var_mean.correction where.self zero_ zeros zeros_like
_adaptive_avg_pool2d _adaptive_avg_pool2d_backward _adaptive_avg_pool3d _adaptive_avg_pool3d_backward
adaptive_max_pool2d adaptive_max_pool2d_backward avg_pool2d avg_pool2d_backward avg_pool3d avg_pool3d_backward
max_pool2d_with_indices max_pool2d_with_indices_backward max_pool3d_with_indices max_pool3d_with_indices_backward
convolution convolution_backward cudnn_batch_norm cudnn_batch_norm_backward native_batch_norm native_batch_norm_backward
batch_norm_backward _batch_norm_with_update native_group_norm native_group_norm_backward native_layer_norm
native_layer_norm_backward _fused_rms_norm _fused_rms_norm_backward native_dropout native_dropout_backward _log_softmax
_log_softmax_backward_data _softmax _softmax_backward_data _safe_softmax _weight_norm_interface
_weight_norm_interface_backward embedding embedding_dense_backward nll_loss_forward nll_loss_backward nll_loss2d_forward
nll_loss2d_backward binary_cross_entropy_with_logits _unsafe_index.Tensor _unsafe_index_put _index_put_impl_
_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_backward _scaled_dot_product_efficient_attention
_scaled_dot_product_efficient_attention_backward _scaled_dot_product_cudnn_attention
_scaled_dot_product_cudnn_attention_backward _scaled_dot_product_flash_attention_for_cpu
_scaled_dot_product_flash_attention_for_cpu_backward _local_scalar_dense _to_copy _addmm_activation
_addmm_activation.out _foreach_add.List _foreach_add.Scalar _foreach_add.ScalarList _foreach_add_.List
_foreach_add_.Scalar _foreach_add_.ScalarList _foreach_add_.Tensor _foreach_addcdiv.Scalar _foreach_addcdiv.ScalarList
_foreach_addcdiv_.Scalar _foreach_addcdiv_.ScalarList _foreach_addcdiv_.Tensor _foreach_addcmul.Scalar
_foreach_addcmul.ScalarList _foreach_addcmul_.Scalar _foreach_addcmul_.ScalarList _foreach_addcmul_.Tensor
_foreach_copy_ _foreach_div.List _foreach_div.Scalar _foreach_div.ScalarList _foreach_div_.List _foreach_div_.Scalar
_foreach_div_.ScalarList _foreach_div_.Tensor _foreach_lerp.List _foreach_lerp.Scalar _foreach_lerp_.List
_foreach_lerp_.Scalar _foreach_lerp_.ScalarList _foreach_maximum.List _foreach_maximum_.List _foreach_mul.List
_foreach_mul.Scalar _foreach_mul.ScalarList _foreach_mul.Tensor _foreach_mul_.List _foreach_mul_.Scalar
_foreach_mul_.ScalarList _foreach_mul_.Tensor _foreach_neg _foreach_neg_ _foreach_norm.Scalar _foreach_pow.List
_foreach_pow.Scalar _foreach_pow.ScalarAndTensor _foreach_pow.ScalarList _foreach_reciprocal _foreach_reciprocal_
_foreach_sqrt _foreach_sqrt_ _foreach_sub.List _foreach_sub.Scalar _foreach_sub_.List _foreach_sub_.Scalar
_foreach_zero_ split_with_sizes_copy.out _chunk_cat.out _fused_adam_ _fused_adam_.tensor_lr _fused_adamw_
_fused_adamw_.tensor_lr _fused_sgd_ _fused_sgd_.tensor_lr _fused_adagrad_ _amp_foreach_non_finite_check_and_unscale_
_amp_update_scale_
"""

ATEN_OVERLOADS: frozenset[str] = frozenset(
    f"aten.{name}" if "." in name else f"aten.{name}.default" for name in _OVERLOADS.split()
)


@functools.cache
def overload_of(name: str) -> Any:
    """The aten overload with a name such as ``aten.mul.Tensor``. Raises `TupleRejected` if the name is not in the list,
    or this torch has no such operator."""
    if name not in ATEN_OVERLOADS:
        text = f"'{name}' is not in this version's allow-list of operators."
        raise TupleRejected(text, "Capture the model again with this version.")
    _, packet, overload = name.split(".")
    try:
        return getattr(getattr(torch.ops.aten, packet), overload)
    except AttributeError:
        text = f"PyTorch {torch.__version__} on this host has no operator '{name}'."
        raise TupleRejected(text, "Install a newer PyTorch on this host.") from None


@functools.lru_cache(maxsize=8192)
def arguments_of(spec: OperatorTuple) -> dict[str, Any]:
    """Schema name of each argument -> its value as a JSON tree; arguments that the call does not pass are absent.
    Raises `TupleRejected` if the schema has no such argument."""
    arguments = overload_of(spec.operator)._schema.arguments
    names = [argument.name for argument in arguments]
    positional = [argument.name for argument in arguments if not argument.kwarg_only]
    by_position = dict(zip(positional, spec.arguments, strict=False))
    if len(spec.arguments) > len(positional) or not set(spec.keywords) <= set(names) - set(by_position):
        text = f"The stored arguments do not fit '{spec.operator}'."
        raise TupleRejected(text, "Capture the model again with this PyTorch.")
    return by_position | dict(spec.keywords)


@functools.lru_cache(maxsize=8192)
def tensor_arguments(spec: OperatorTuple) -> tuple[tuple[tuple[str, int], ...], ...]:
    """Return for each tensor of the tuple the arguments that contain the tensor.

    Each argument is a pair: its name, and the tensor's position if the argument is a list (else 0).
    """
    found: list[list[tuple[str, int]]] = [[] for _ in spec.tensors]
    for name, tree in arguments_of(spec).items():
        for position, entry in enumerate(tree if isinstance(tree, list) else [tree]):
            for index in tensor_references(entry):
                found[index].append((name, position))
    return tuple(map(tuple, found))


def written_by_schema(spec: OperatorTuple) -> frozenset[int]:
    """Indices of the tensors whose memory the call writes according to the operator's schema."""
    schema = overload_of(spec.operator)._schema
    names = {one.name for one in schema.arguments if one.alias_info is not None and one.alias_info.is_write}
    if spec.short_name in ("native_batch_norm", "cudnn_batch_norm") and arguments_of(spec).get("training"):
        names |= {"running_mean", "running_var"}  # the schema does not mark them as written
    storages = _storages_passed_as(spec, names)
    return frozenset(index for index, tensor in enumerate(spec.tensors) if tensor.storage in storages)


def read_by_host(spec: OperatorTuple) -> frozenset[int]:
    """Numbers of the storages that a CUDA operator reads on the host. While a CUDA graph is recorded, its kernel reads
    them instead."""
    if spec.short_name != "_scaled_dot_product_efficient_attention_backward":
        return frozenset()
    return _storages_passed_as(spec, {"philox_seed", "philox_offset"})


def _storages_passed_as(spec: OperatorTuple, names: set[str]) -> frozenset[int]:
    """Numbers of the storages of the tensors that the call passes as one of the arguments ``names``."""
    passed = zip(spec.tensors, tensor_arguments(spec), strict=True)
    return frozenset(tensor.storage for tensor, arguments in passed if any(name in names for name, _ in arguments))
