"""Settings of PyTorch that choose operators, kernels, dtypes or threads for the whole process.

A tuple does not contain them: a worker measures with PyTorch's defaults, apart from the flags of
the protocol. So settings that a user's code changes must not reach other models of the process, and
a call that runs while the model has changed one is not measured."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.backends import cuda, mha

_read_precision: Any = torch._C._get_fp32_precision_getter  # type: ignore[attr-defined]
_write_precision: Any = torch._C._set_fp32_precision_setter  # type: ignore[attr-defined]
_C: Any = torch._C


@dataclass(frozen=True)
class _Setting:
    """``is_seen``: the operators or the dtypes of a call show it."""

    read: Callable[[], Any]
    write: Callable[[Any], Any]
    is_seen: bool = False


def _precision(backend: str, operators: str) -> _Setting:
    return _Setting(
        partial(_read_precision, backend, operators), partial(_write_precision, backend, operators)
    )


def _compiler_settings() -> dict[str, Any]:
    """The settings of torch.compile's compiler that differ from their defaults; {} if it is not
    imported. `torchao.quantization.quantize_` changes some of them."""
    config: Any = sys.modules.get(_COMPILER)
    if config is None:
        return {}
    values: dict[str, Any] = config.get_config_copy()
    return {name: value for name, value in values.items() if not config._is_default(name)}


def _write_compiler_settings(values: Mapping[str, Any]) -> None:
    config: Any = sys.modules.get(_COMPILER)
    for name in _compiler_settings().keys() - values.keys():
        setattr(config, name, config._config[name].default)
    for name, value in values.items():
        setattr(config, name, value)


_COMPILER = "torch._inductor.config"
_DETERMINISM = "torch.use_deterministic_algorithms"
#: The setting, as a user writes it, and how to read and write it.
_SETTINGS: dict[str, _Setting] = {
    _DETERMINISM: _Setting(torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    "torch.set_num_threads": _Setting(torch.get_num_threads, torch.set_num_threads),
    _COMPILER: _Setting(_compiler_settings, _write_compiler_settings, is_seen=True),
    "torch.backends.cudnn.enabled": _Setting(_C._get_cudnn_enabled, _C._set_cudnn_enabled),
    "torch.backends.cudnn.benchmark": _Setting(_C._get_cudnn_benchmark, _C._set_cudnn_benchmark),
    "torch.backends.cudnn.deterministic": _Setting(
        _C._get_cudnn_deterministic, _C._set_cudnn_deterministic
    ),
    "torch.backends.cudnn.conv.fp32_precision": _precision("cuda", "conv"),
    "torch.backends.cuda.matmul.fp32_precision": _precision("cuda", "matmul"),
    "torch.backends.mkldnn.enabled": _Setting(_C._get_mkldnn_enabled, _C._set_mkldnn_enabled),
    "torch.backends.mkldnn.matmul.fp32_precision": _precision("mkldnn", "matmul"),
    "torch.set_default_dtype": _Setting(torch.get_default_dtype, torch.set_default_dtype, True),
    "torch.backends.mha.set_fastpath_enabled": _Setting(
        mha.get_fastpath_enabled, mha.set_fastpath_enabled, True
    ),
    "torch.backends.cuda.enable_flash_sdp": _Setting(
        cuda.flash_sdp_enabled, cuda.enable_flash_sdp, True
    ),
    "torch.backends.cuda.enable_mem_efficient_sdp": _Setting(
        cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp, True
    ),
    "torch.backends.cuda.enable_math_sdp": _Setting(
        cuda.math_sdp_enabled, cuda.enable_math_sdp, True
    ),
    "torch.backends.cuda.enable_cudnn_sdp": _Setting(
        cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp, True
    ),
}
_UNSEEN = {name: setting for name, setting in _SETTINGS.items() if not setting.is_seen}


def unseen() -> dict[str, Any]:
    """The values of the settings that the operators of a call do not show."""
    return {name: setting.read() for name, setting in _UNSEEN.items()}


def expected_from(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values with which a worker measures a pass that begins with ``values``: it sets the flags
    of the protocol for the whole model, too, but never determinism."""
    return {**values, _DETERMINISM: 0}


def changed(values: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that differ from ``values``, with their values in ``later``."""
    return {name: value for name, value in later.items() if value != values[name]}


def write(values: Mapping[str, Any]) -> None:
    """Change settings."""
    for name, value in values.items():
        _SETTINGS[name].write(value)


@contextlib.contextmanager
def restored() -> Iterator[dict[str, Any]]:
    """Restores all settings at the end. The dictionary then has those that were changed, with the
    values that they had."""
    before = {name: setting.read() for name, setting in _SETTINGS.items()}
    differences: dict[str, Any] = {}
    try:
        yield differences
    finally:
        later = {name: setting.read() for name, setting in _SETTINGS.items()}
        differences.update(changed(before, later))
        write({name: before[name] for name in differences})
