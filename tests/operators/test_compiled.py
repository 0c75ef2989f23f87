"""Compiled models: which launches a pass has, and that a rebuilt kernel computes the same as in the
model.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import operator
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from farm.benchmark.cache import InPlacePass
from farm.benchmark.subjects import compiled_tuple, operator_tuple
from farm.errors import CaptureError, TupleRejected, UsageError
from farm.operators import compiler, compiler_cache
from farm.operators.compiled import EAGER, CompiledPass, CompiledStep
from farm.operators.rebuild import rebuild
from farm.settings import settings
from farm.subjects import kernel as kernels
from farm.subjects.parsing import parse
from farm.subjects.registry import kind_of
from farm.training.step import Loss, TrainingStep
from farm.types.tuple import OperatorTuple
from tests import slow
from tests.operators.compiled_models import Halves, Picked, Refused, Sorted, Two, needs_compiler

CPU = torch.device("cpu")
PARTS = ("forward", "loss", "backward", "optimizer")


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    with torch.no_grad():
        yield
    kernels.forget_all()
    torch._dynamo.reset()


def compiled(model: nn.Module, *arguments: Any, **options: Any) -> CompiledPass:
    return CompiledPass(model.eval(), arguments, CPU, mode="default", **options)


def kernels_of(compiled_pass: CompiledPass) -> list[OperatorTuple]:
    return [spec for spec in compiled_pass.capture().tuples.values() if spec.kind == "kernel"]


# ------------------------------------------------------------------------------------------------
# the capture


@needs_compiler
def test_each_launch_is_one_call_with_its_module_and_another_compilation_has_the_same_ids() -> None:
    values = torch.randn(4, 16)
    first = compiled(Two(), values)
    capture = first.capture()
    assert not capture.gaps
    owners = [(capture.tuples[call.tuple_id].operator, call.module_path) for call in capture.calls]
    assert owners[0] == ("aten.addmm.default", "first") or "addmm" in owners[0][0]
    assert [operator for operator, _ in owners if operator.startswith("cpp.")] == ["cpp.fused"]
    assert {path for _, path in owners} >= {"first", "second"}
    assert len(capture.slots) == len(capture.calls)
    assert sorted(one for one in capture.slots if one is not None) == list(
        range(len(capture.calls))
    )
    assert first.facts()["graph_breaks"] == {}

    again = compiled(Two(), values, choices=first.facts()["choices"], cached=False)
    assert [call.tuple_id for call in again.capture().calls] == [
        call.tuple_id for call in capture.calls
    ]
    torch.testing.assert_close(first.run(), first.model(values))


@needs_compiler
@slow.COMPILER
def test_a_graph_break_is_counted_with_its_reason_and_what_runs_between_graphs_is_a_call() -> None:
    blocks = nn.Sequential(Halves(8), Halves(8))
    broken = compiled(blocks, torch.randn(4, 8))
    breaks = broken.facts()["graph_breaks"]
    assert sum(breaks.values()) >= 1
    assert "graph_break()" in " ".join(breaks)
    capture = broken.capture()
    libraries = [
        call.module_path
        for call in capture.calls
        if "addmm" in capture.tuples[call.tuple_id].operator
    ]
    assert libraries == [
        "0.first",
        "0.second",
        "1.first",
        "1.second",
    ]  # one graph serves both blocks

    between = compiled(Sorted(), torch.randn(4, 16))
    capture = between.capture()
    eager = [
        capture.tuples[call.tuple_id].operator for call in capture.calls if call.owner == EAGER
    ]
    assert eager == ["aten.sort.default"]
    assert sum(between.facts()["graph_breaks"].values()) >= 1
    positions = [call.owner == EAGER for call in capture.calls]
    assert not positions[0]
    assert not positions[-1]


@slow.COMPILER
@needs_compiler
def test_the_backward_has_module_paths_and_a_compiled_optimizer_computes_as_the_eager_one() -> None:
    values = torch.randn(4, 16)

    def step(optimizer: str) -> TrainingStep:
        torch.manual_seed(0)
        loss = Loss("mean", (), lambda output, _: output.square().mean())
        made = TrainingStep(Two().train(), (values,), optimizer=optimizer, make_loss=lambda _: loss)
        with torch.enable_grad():
            made.run()
        return made

    chosen, eager = step("adamw-compiled"), step("adamw-foreach")
    whole = CompiledStep(chosen, CPU, mode="default")
    runs = int(next(iter(chosen.optimizer.state.values()))["step"].item())
    with torch.enable_grad():
        for _ in range(runs - 1):
            eager.run()
    for mine, reference in zip(chosen.model.parameters(), eager.model.parameters(), strict=True):
        for name, value in eager.optimizer.state[reference].items():
            torch.testing.assert_close(chosen.optimizer.state[mine][name], value)

    capture = whole.capture()
    assert not capture.gaps
    kinds = {
        part: {capture.tuples[call.tuple_id].kind for call in capture.calls if call.part == part}
        for part in PARTS
    }
    assert kinds["optimizer"] == {"kernel"}
    assert kinds["loss"] == {"aten"}
    paths = {
        path
        for call in capture.calls
        if call.part == "backward"
        for path in call.module_path.split(", ")
    }
    assert paths >= {"first", "second"}


@needs_compiler
@slow.COMPILER
def test_the_same_kernel_in_two_models_has_one_id() -> None:
    class Deeper(Two):
        def forward(self, values: torch.Tensor) -> torch.Tensor:
            return torch.tanh(super().forward(values))

    values = torch.randn(4, 16)
    plain = {spec.id: spec for spec in kernels_of(compiled(Two(), values))}
    deeper = {spec.id: spec for spec in kernels_of(compiled(Deeper(), values))}
    (shared,) = plain.keys() & deeper.keys()
    assert "relu" in plain[shared].parameters["fused"]
    assert len(deeper) == 2


@needs_compiler
def test_the_capture_of_a_step_of_several_passes_does_not_change_the_results() -> None:
    model, values = Two(), torch.randn(4, 16)
    one = compiled(model, values)
    seen: list[Any] = []
    one.capture(look=lambda tuple_id, tensors: seen.append((tuple_id, len(tensors))))
    assert [tuple_id for tuple_id, _ in seen] == [call.tuple_id for call in one.capture().calls]
    torch.testing.assert_close(one.run(), model(values))


# ------------------------------------------------------------------------------------------------
# rebuilt kernels


@needs_compiler
@pytest.mark.parametrize("model", [Two, Picked])
def test_a_rebuilt_kernel_with_copied_values_computes_what_it_computes_in_the_model(
    model: type[nn.Module],
) -> None:
    arguments = torch.randint(10, (2, 3)) if model is Picked else torch.randn(4, 16)
    whole = compiled(model(), arguments)
    (spec,) = kernels_of(whole)
    before = whole.copies_of(spec.id)
    assert before is not None
    rebuilt = rebuild(parse(spec.to_json()), CPU)
    compiled_tuple.copy_values(rebuilt, whole)
    for index, (mine, value) in enumerate(zip(rebuilt.tensors, before, strict=True)):
        if index not in kind_of(spec).outputs(spec):  # the memory of an output has any values
            torch.testing.assert_close(mine, value)
    if model is Picked:
        (words,) = (one for one in rebuilt.tensors if one.dtype == torch.int64)
        assert torch.equal(words.flatten(), arguments.flatten())
    rebuilt.run()

    after: list[torch.Tensor] = []
    written = sorted(kind_of(spec).written(spec))

    def after_launch(kernel: Any, args: tuple[Any, ...], launch: Any) -> Any:
        found = launch()
        after.extend(args[at].clone() for at in written)
        return found

    with whole.compiled.observed(after_launch):
        whole.run()
    for at, value in zip(written, after, strict=False):
        torch.testing.assert_close(rebuilt.tensors[at], value)


@needs_compiler
def test_a_kernel_that_changes_its_inputs_gets_them_again_before_each_run() -> None:
    whole = compiled(Two(), torch.randn(4, 16))
    (spec,) = kernels_of(whole)
    rebuilt = rebuild(spec, CPU)
    compiled_tuple.copy_values(rebuilt, whole)
    assert rebuilt.changed_memory, "relu runs in the memory of the product"
    call = operator_tuple._restoring(rebuilt)
    assert isinstance(call, InPlacePass)
    (memory,) = rebuilt.changed_memory
    given = memory.clone()
    call()
    assert not torch.equal(memory, given)
    call.restore()
    assert torch.equal(memory, given)
    memory.fill_(-1.0)
    call()
    assert memory.max() > 0


@needs_compiler
def test_a_kernel_that_was_not_compiled_here_is_refused_and_nothing_runs() -> None:
    (spec,) = kernels_of(compiled(Two(), torch.randn(4, 16)))
    forged = parse(
        {**spec.to_json(), "parameters": {**spec.to_json()["parameters"], "source": "0" * 32}}
    )
    assert forged.id != spec.id
    with pytest.raises(TupleRejected, match="does not generate the kernel") as caught:
        rebuild(forged, CPU).run()
    assert "\n" not in caught.value.message
    assert "--compile" in caught.value.next_step


# ------------------------------------------------------------------------------------------------
# the compiler


#: Module -> the private names in it that `farm.operators.compiler` and
#: `farm.operators.foreseen_kernels` use.
PRIVATE_NAMES = {
    "torch._inductor.compile_fx": "compile_fx",
    "torch._inductor.output_code": "CompiledFxGraph.__call__",
    "torch._inductor.async_compile": (
        "AsyncCompile.cpp_pybinding AsyncCompile.wait AsyncCompile.triton"
    ),
    "torch._inductor.codecache": (
        "LambdaFuture PersistentCache.lookup PyCodeCache.load_by_key_path"
    ),
    "torch._inductor.config": (
        "assume_aligned_inputs compile_threads size_asserts alignment_asserts nan_asserts"
    ),
    "torch._inductor.scheduler": "has_triton",
    "torch._inductor.runtime.hints": "DeviceProperties.create.__wrapped__",
    "torch._inductor.select_algorithm": "log",
    "torch._inductor.utils": "log",
    "torch._dynamo.trace_rules": "get_torch_obj_rule_map",
    "torch._inductor.fx_passes.misc_patterns": "_misc_patterns_init",
    "torch.utils._triton": "triton_hash_with_backend",
    "torch.fx.experimental.proxy_tensor": "CONSTANT_NUMEL_LIMIT",
    "torch._dynamo.device_interface": (
        "CudaInterface.get_device_properties CudaInterface.Worker.get_device_properties "
        "CudaInterface.get_compute_capability CudaInterface.is_bf16_supported "
        "CudaInterface.current_device"
    ),
    "torch.cuda": "_DeviceGuard _lazy_init",
    "torch": (
        "_C._conv_determine_backend_memory_format _C._dynamo.guards._empty_strided_cuda "
        "_C._dynamo.guards._reinterpret_tensor "
        "ops.aten.scaled_dot_product_attention.default.py_kernels"
    ),
    "torch._inductor.debug": (
        "dump_inductor_provenance_info create_node_mapping_kernel_to_post_grad "
        "_inductor_triton_kernel_to_post_grad_node_info"
    ),
    "torch._inductor.virtualized": "V",
    "torch._inductor.runtime.triton_heuristics": (
        "CachingAutotuner.run CachingAutotuner.precompile CachingAutotuner._precompile_config "
        "CachingAutotuner._make_launchers CachingAutotuner._dynamic_scale_rblock"
    ),
    "torch._dynamo": "reset utils.counters",
    "torch.utils._python_dispatch": "TorchDispatchMode.ignore_compile_internals",
    "torch._subclasses.fake_tensor": "init_gpu_context FakeTensorMode.avoid_device_init",
    "torch._inductor.fx_passes.pad_mm": "get_cached_should_pad",
    "torch._inductor.fx_passes.joint_graph": "UniformValueConstantFolder._deduce_value",
    "torch._inductor.runtime.benchmarking": ("benchmarker.benchmark benchmarker.benchmark_gpu"),
}


def missing_names() -> list[str]:
    """The private names of the compiler that this version of PyTorch lacks."""
    missing = []
    for module, names in PRIVATE_NAMES.items():
        for name in names.split():
            try:
                operator.attrgetter(name)(importlib.import_module(module))
            except (ImportError, AttributeError):
                missing.append(f"{module}.{name}")
    return missing


def test_this_pytorch_has_all_private_names_and_a_missing_one_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    triton = "torch._inductor.runtime.triton_heuristics"
    expected = set()
    if importlib.util.find_spec("triton") is None:
        expected = {f"{triton}.{name}" for name in PRIVATE_NAMES[triton].split()}
    assert set(missing_names()) <= expected
    monkeypatch.setitem(PRIVATE_NAMES, "torch._dynamo", "reset of_no_version")
    monkeypatch.setitem(PRIVATE_NAMES, "torch._no_module", "name")
    assert {"torch._dynamo.of_no_version", "torch._no_module.name"} <= set(missing_names())
    assert "torch._dynamo.reset" not in missing_names()


def test_the_source_of_the_autotuner_has_the_names_and_arguments_that_the_farm_uses() -> None:
    """Without Triton the module cannot be imported, so this reads its source."""
    source = Path(torch.__file__).parent / "_inductor" / "runtime" / "triton_heuristics.py"
    tree = ast.parse(source.read_text())
    (autotuner,) = (
        one for one in tree.body if isinstance(one, ast.ClassDef) and one.name == "CachingAutotuner"
    )
    methods = {one.name: one for one in autotuner.body if isinstance(one, ast.FunctionDef)}
    assert methods.keys() >= {"run", "precompile", "_precompile_config", "__init__"}
    assert methods.keys() >= {"_make_launchers", "_dynamic_scale_rblock"}
    named = [one.arg for one in (*methods["run"].args.args, *methods["run"].args.kwonlyargs)]
    assert {"stream", "benchmark_run"} <= set(named)
    assert methods["run"].args.vararg is not None
    assigned = {one.attr for one in ast.walk(autotuner) if isinstance(one, ast.Attribute)}
    assert {"launchers", "inductor_meta", "triton_meta", "filename", "fn"} <= assigned
    (made,) = (
        one
        for one in tree.body
        if isinstance(one, ast.ClassDef) and one.name == "TritonCompileResult"
    )
    assert "make_launcher" in {one.name for one in made.body if isinstance(one, ast.FunctionDef)}
    assert "found_by_coordesc" in source.read_text()


@needs_compiler
def test_a_model_that_the_compiler_refuses_gives_one_line_with_the_reason() -> None:
    with pytest.raises(CaptureError) as caught:
        compiled(Refused(), torch.randn(2, 8))
    first, *more = caught.value.message.splitlines()
    assert first.endswith("RuntimeError: no shape is known.")
    assert "and this is the second line" in " ".join(more)
    assert "without --compile" in caught.value.next_step


def test_without_a_compiler_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(UsageError, match="needs a C\\+\\+ compiler") as caught:
        compiled(Two(), torch.randn(4, 16))
    assert "Install g++" in caught.value.next_step


# ------------------------------------------------------------------------------------------------
# the compiler's cache


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("FARM_COMPILER_CACHE_DIR", str(tmp_path / "new" / "cache"))
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, "")
    settings.cache_clear()
    return tmp_path / "new" / "cache"


def test_only_this_user_can_read_the_cache_folder(folder: Path) -> None:
    assert compiler.prepare_folder() == folder
    assert folder.stat().st_mode & 0o777 == 0o700
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(folder)


@pytest.mark.parametrize("mode", [0o770, 0o702])
def test_a_cache_folder_that_others_can_write_to_is_refused(folder: Path, mode: int) -> None:
    folder.mkdir(parents=True)
    folder.chmod(mode)
    with pytest.raises(UsageError, match="Another user can write to the folder") as caught:
        compiler.prepare_folder()
    assert f"chmod 700 {folder}" in caught.value.next_step
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == ""
    folder.chmod(0o755)
    compiler.prepare_folder()


def test_a_cache_folder_of_another_user_is_refused(folder: Path) -> None:
    folder.mkdir(parents=True)
    if os.getuid() != 0:
        pytest.skip("only root can give a folder to another user")
    os.chown(folder, 12345, 12345)
    with pytest.raises(UsageError, match="Another user can write to the folder"):
        compiler.prepare_folder()


def test_a_cache_folder_that_cannot_be_created_is_an_error_of_one_line(folder: Path) -> None:
    folder.parent.write_text("a file")
    with pytest.raises(UsageError, match="cannot be created") as caught:
        compiler.prepare_folder()
    assert "FARM_COMPILER_CACHE_DIR" in caught.value.next_step


def test_the_files_that_were_used_longest_ago_are_removed(folder: Path) -> None:
    (folder / "inner").mkdir(parents=True)
    for age, name in enumerate(("newest", "inner/middle", "oldest")):
        (folder / name).write_bytes(bytes(100))
        os.utime(folder / name, (1e9 - age, 1e9 - age))
    compiler_cache.limit_size(folder, 250)
    assert {path.name for path in folder.rglob("*") if path.is_file()} == {"newest", "middle"}
    compiler_cache.limit_size(folder, 100)
    assert {path.name for path in folder.rglob("*") if path.is_file()} == {"newest"}


def test_the_files_of_a_kernel_are_removed_together(folder: Path) -> None:
    for age, name in enumerate(("used", "unused")):
        kernel = folder / "triton" / name
        kernel.mkdir(parents=True)
        for later, kind in enumerate(("json", "ttir", "cubin")):
            (kernel / f"k.{kind}").write_bytes(bytes(100))
            os.utime(kernel / f"k.{kind}", (1e9 - 10 * age + later, 1e9))
    compiler_cache.limit_size(folder, 500)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    assert [(path.parent.name, path.suffix) for path in files] == [
        ("used", ".cubin"),
        ("used", ".json"),
        ("used", ".ttir"),
    ]
