"""Settings of PyTorch that the code of a model changes."""

import torch._inductor.config as compiler
from torch import nn

from farm.models.quantization import SCHEMES
from farm.types.torch_settings import restored


def test_settings_of_the_compiler_are_restored() -> None:
    """`torchao.quantization.quantize_` sets them for the whole process."""
    compiler.max_autotune_gemm_backends = before = "ATEN"
    searches = compiler.coordinate_descent_tuning
    with restored() as changed:
        compiler.coordinate_descent_tuning = not searches
        compiler.triton.unique_kernel_names = not compiler.triton.unique_kernel_names
        compiler.max_autotune_gemm_backends = "TRITON"
    assert compiler.coordinate_descent_tuning == searches
    assert compiler.max_autotune_gemm_backends == before
    assert list(changed) == ["torch._inductor.config"]


def test_a_scheme_leaves_the_compiler_as_it_is() -> None:
    from torchao import quantization

    model = nn.Sequential(nn.Linear(32, 32))
    with restored() as changed:
        quantization.quantize_(model, SCHEMES["int8-weights"].configuration(quantization))
    assert not changed
    for scheme in SCHEMES.values():
        assert not scheme.configuration(quantization).set_inductor_config
