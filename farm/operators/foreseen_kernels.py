"""Lists the kernels that the compiler would generate for a card, without the card.

The compiler of PyTorch itself lowers, fuses and schedules the model, and writes its program. It
does so on fake tensors, which have shapes, strides and a device, but no memory. The program is then
run on the fake tensors: its kernels do nothing, and each launch is listed as on a card
(`farm.operators.compiled`). Neither a card, nor CUDA, nor Triton is needed.

What the compiler asks a card for is answered here. These answers, and the functions that need a
card, are replaced while `foreseen` is active:

- the number of multiprocessors, which decides how reductions are split. Nothing else differs, so
  cards with the same number have the same kernels;
- the choice of attention (the caller gives it) and the memory format of convolutions, by the rules
  of PyTorch for cuDNN;
- the code of each kernel, which is not compiled; nothing is timed, so that products keep their
  sizes and no configuration is chosen;
- the guard with which PyTorch selects a card before an operator (`_unguarded_card`).

This module uses private names of the compiler, as `farm.operators.compiler`; the same test lists
them."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import re
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch._prims_common import suggest_memory_format
from torch.utils._python_dispatch import TorchDispatchMode

from farm.errors import CaptureError
from farm.operators.compiled import CompiledPass
from farm.operators.compiler import CompiledModel, GeneratedKernel, triton_kernel, without_card
from farm.types.card_kind import ASSUMED_CAPABILITY
from farm.types.replacement import replaced

#: Of a multiprocessor: registers, threads; of a block: threads; of a warp: threads.
_REGISTERS, _THREADS, _BLOCK_THREADS, _WARP_THREADS = 65536, 2048, 1024, 32
#: Index of a kind of device in PyTorch's table of guards (`c10::DeviceType`), and the table's size.
_CUDA, _META, _KINDS = 1, 14, 20
_GUARDS = "_ZN3c104impl26device_guard_impl_registryE"
_MUTATED = re.compile(r"'mutated_arg_names': \[([^\]]*)\]")
_SIGNATURE = re.compile(r"^def \w+\(([^)]*)\)", re.MULTILINE)
_COPY: Any = torch.ops.aten.copy_.default

#: A function with the arguments of `torch.nn.functional.scaled_dot_product_attention`.
Attention = Callable[..., torch.Tensor]
#: The owner of a name, the name, and its value while `foreseen` is active.
Replacement = tuple[Any, str, Any]


class ForeseenModel(CompiledModel):
    """A compiled model whose kernels are listed and never compiled."""

    def check_compiler(self, device: torch.device) -> None:
        """No compiler is needed."""

    def _hook_list(self) -> list[tuple[Any, str, Callable[..., Any]]]:
        from torch._inductor.async_compile import AsyncCompile

        return [*super()._hook_list(), (AsyncCompile, "triton", self._list_triton)]

    def _list_triton(
        self, compile: Callable[..., Any], compiler: Any, name: str, source: str, *_: Any, **__: Any
    ) -> _ListedKernel:
        mutated = _MUTATED.search(source)
        signature = _SIGNATURE.search(source)
        parameters = signature.group(1).split(",") if signature else []
        kernel = triton_kernel(
            name,
            source.replace(name, "triton_"),
            [parameter.partition(":")[0].strip() for parameter in parameters],
            re.findall(r"'(\w+)'", mutated.group(1)) if mutated else (),
            _nothing,
        )
        return _ListedKernel(self, kernel)

    def _bind(
        self, bind: Callable[..., Any], compiler: Any, argument_types: Any, source: str
    ) -> Any:
        """A kernel of the host inside the graph of a card: it costs the card nothing."""
        return _nothing


class ForeseenPass(CompiledPass):
    """A pass of a compiled model on fake tensors; `foreseen` is active.

    Example:
        with foreseen(132, attention), fake_mode, Unwritten(), torch.no_grad():
            captured = ForeseenPass(model, inputs, device, mode="default", cached=False).capture()
    """

    compiled_model = ForeseenModel


class _ListedKernel:
    """Stands for a Triton kernel in the compiler's program."""

    def __init__(self, model: ForeseenModel, kernel: GeneratedKernel) -> None:
        self.model, self.kernel = model, kernel

    def run(self, *args: Any, **_: Any) -> None:
        if self.model.observer is not None:
            self.model.observer(self.kernel, args, _nothing)


class Unwritten(TorchDispatchMode):
    """While active, operators that write into a given tensor return it and do nothing."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("out") is not None:
            return kwargs["out"]
        return args[0] if func is _COPY else func(*args, **kwargs)


@contextlib.contextmanager
def foreseen(multiprocessors: int, attention: Attention) -> Iterator[None]:
    """While active, a `ForeseenPass` can be made and run on fake tensors of a card.

    Args:
        multiprocessors: of the card.
        attention: the attention that PyTorch chooses on the card.

    Raises:
        CaptureError: this build of PyTorch has no table of device guards.
    """
    from torch._dynamo import trace_rules
    from torch._inductor import config, select_algorithm, utils

    options = {
        "assume_aligned_inputs": True,
        "compile_threads": 1,
        "size_asserts": False,
        "alignment_asserts": False,
        "nan_asserts": False,
    }
    replacements = [*_compiler_without_card(), *_answers(multiprocessors)]
    # Dynamo's table of the functions of PyTorch must have those of `torch.cuda`, not these.
    trace_rules.get_torch_obj_rule_map()
    with contextlib.ExitStack() as stack:
        # Warnings are about the model's source and about timing, not about its cost.
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        for module in (select_algorithm, utils):
            stack.enter_context(replaced(module.log, "disabled", True))
        stack.enter_context(without_card())
        stack.enter_context(_unguarded_card())
        stack.enter_context(_attention(attention))
        stack.enter_context(config.patch(options))
        for owner, name, value in replacements:
            stack.enter_context(replaced(owner, name, value))
        yield


def _compiler_without_card() -> list[Replacement]:
    """The functions of the compiler that need a card or Triton."""
    from torch._inductor import scheduler
    from torch._inductor.codecache import PyCodeCache
    from torch._inductor.fx_passes import misc_patterns, pad_mm
    from torch._inductor.runtime.hints import DeviceProperties
    from torch.fx.experimental import proxy_tensor
    from torch.utils import _triton

    guards = torch._C._dynamo.guards
    create: Any = functools.cache(vars(DeviceProperties)["create"].__func__.__wrapped__)
    load = PyCodeCache.load_by_key_path

    def with_triton(*args: Any, **kwargs: Any) -> Any:
        with _stand_in_for_triton():
            return load(*args, **kwargs)

    return [
        (scheduler, "has_triton", lambda: True),
        (_triton, "triton_hash_with_backend", lambda *_: ""),
        (PyCodeCache, "load_by_key_path", with_triton),
        # Constants of a card would be computed on it.
        (proxy_tensor, "CONSTANT_NUMEL_LIMIT", -1),
        (pad_mm, "get_cached_should_pad", lambda _: False),
        # Its patterns are traced with tensors of random indices, which need a card.
        (misc_patterns, "_misc_patterns_init", _nothing),
        # The compiler keeps the answers of the first card of a process.
        (DeviceProperties, "create", classmethod(create)),
        (torch._C, "_conv_determine_backend_memory_format", _format_of_convolution),
        (guards, "_empty_strided_cuda", _empty_strided),
        (guards, "_reinterpret_tensor", _view),
        (guards, "copy_if_misaligned", lambda tensor: tensor),
    ]


def _answers(multiprocessors: int) -> list[Replacement]:
    """What the compiler asks a card for."""
    from torch._dynamo.device_interface import CudaInterface

    card = SimpleNamespace(
        name="",
        gcnArchName="",
        major=ASSUMED_CAPABILITY[0],
        minor=ASSUMED_CAPABILITY[1],
        multi_processor_count=multiprocessors,
        regs_per_multiprocessor=_REGISTERS,
        max_threads_per_multi_processor=_THREADS,
        max_threads_per_block=_BLOCK_THREADS,
        warp_size=_WARP_THREADS,
    )

    capability = "".join(map(str, ASSUMED_CAPABILITY))

    def properties(*_: Any) -> Any:
        return card

    return [
        (CudaInterface, "get_device_properties", staticmethod(properties)),
        (CudaInterface.Worker, "get_device_properties", staticmethod(properties)),
        (CudaInterface, "get_compute_capability", staticmethod(lambda *_: capability)),
        (CudaInterface, "is_bf16_supported", staticmethod(lambda *_, **__: True)),
        (CudaInterface, "current_device", staticmethod(lambda: 0)),
        (torch.cuda, "get_device_properties", properties),
        (torch.cuda, "get_device_capability", lambda *_: ASSUMED_CAPABILITY),
        (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "set_device", lambda _: None),
        (torch.cuda, "_lazy_init", lambda: None),
        (torch.cuda, "_DeviceGuard", lambda _: contextlib.nullcontext()),
        (torch._C, "_cuda_getCurrentRawStream", lambda _: 0),
    ]


def _nothing(*_: Any, **__: Any) -> None:
    """Do nothing."""


def _format_of_convolution(x: Any, weight: Any, _: Any) -> torch.memory_format:
    """The memory format of a convolution by cuDNN: channels last if an operand has it."""
    formats = (suggest_memory_format(x), suggest_memory_format(weight))
    return next((chosen for chosen in formats if chosen != torch.contiguous_format), formats[0])


def _empty_strided(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device="cuda:0")


def _view(tensor: torch.Tensor, size: Any, stride: Any, offset: int = 0) -> torch.Tensor:
    return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)


@contextlib.contextmanager
def _attention(attention: Attention) -> Iterator[None]:
    """While active, the compiler decomposes attention as on the card."""
    operator: Any = torch.ops.aten.scaled_dot_product_attention.default
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    operator.py_kernels[key] = lambda *args, **kwargs: attention(*args, **kwargs)
    operator._dispatch_cache.clear()
    try:
        yield
    finally:
        del operator.py_kernels[key]
        operator._dispatch_cache.clear()


@contextlib.contextmanager
def _stand_in_for_triton() -> Iterator[None]:
    """While active, a program that the compiler wrote can import Triton, also if it is missing."""
    if importlib.util.find_spec("triton") is not None:
        yield
        return
    modules = {name: types.ModuleType(name) for name in ("triton", "triton.language")}
    modules["triton"].language = modules["triton.language"]  # type: ignore[attr-defined]
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]


@contextlib.contextmanager
def _unguarded_card() -> Iterator[None]:
    """While active, PyTorch does not select a card before an operator on a fake tensor of a card.

    A build without CUDA has no guard that selects cards, and one with CUDA fails without a card.
    The guard of meta tensors does nothing, so it replaces that of CUDA. If this process already has
    a CUDA context, the guard works, and stays."""
    if torch.cuda.is_initialized():
        yield
        return
    try:
        (library,) = (Path(torch.__file__).parent / "lib").glob("libc10.*")
        table = (ctypes.c_void_p * _KINDS).in_dll(ctypes.CDLL(str(library)), _GUARDS)
    except (OSError, ValueError) as error:
        raise CaptureError(
            "This build of PyTorch cannot list the kernels of a compiled model without a card: "
            f"{error}.",
            "Use PyTorch for Linux, or compile and measure the model on a card.",
        ) from error
    before = table[_CUDA]
    table[_CUDA] = table[_META]
    try:
        yield
    finally:
        table[_CUDA] = before
