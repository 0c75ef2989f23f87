"""Uses the compiler of PyTorch (Dynamo and Inductor): compiles a model, and observes the kernels
that it generated.

This module and `farm.operators.foreseen_kernels` use private names of the compiler; a test lists
them. The compiler unpickles its cache and loads it as code. So the cache lies in a folder of this
user (mode 0700), is filled only by compiling on this host, and nothing of it goes to the database,
the broker or another host."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import itertools
import json
import math
import operator
import os
import re
import shutil
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from farm.errors import CaptureError, UsageError, error_text
from farm.operators.compiler_cache import limit_size, remove_damaged
from farm.settings import settings
from farm.settings.shared_files import why_not_own
from farm.subjects import kernel as kernels
from farm.types.replacement import replaced

MOST_TIMES = 8  # algorithms of an operation whose times are stored
_PARAMETER = re.compile(r"(\w+)\s*(?:,|\)|$)")


@dataclass(frozen=True)
class GeneratedKernel:
    """A generated kernel with its chosen launch configuration."""

    operator: (
        str  # the language and the kind: ``triton.pointwise``, ``triton.template``, ``cpp.fused``
    )
    name: str  # the compiler's name, which differs between models
    text: str
    fused: str  # names of the aten operators that it computes, joined by underscores
    config: Mapping[str, Any]  # block sizes, warps and stages of a Triton kernel
    parameters: tuple[str, ...]  # their names, in order
    run: Callable[..., Any]  # launches the kernel with the arguments, on the current stream
    compiler: str = ""  # version of Triton; "" for C++

    @functools.cached_property
    def source(self) -> str:
        """Hash of the source without the name."""
        return _hash(self.text)

    def written(self, position: int) -> bool:
        return self._parameter(position).startswith(("out_ptr", "in_out_ptr"))

    def only_written(self, position: int) -> bool:
        return self._parameter(position).startswith("out_ptr")

    def _parameter(self, position: int) -> str:
        return self.parameters[position] if position < len(self.parameters) else ""


#: Called for each launch of a generated kernel with the kernel, its arguments and a function that
#: launches it.
Observer = Callable[[GeneratedKernel, tuple[Any, ...], Callable[[], Any]], Any]


class Graph:
    """One compiled graph."""

    def __init__(self, provenance: str | None, modules: Mapping[str, str]) -> None:
        """``provenance`` is the compiler's JSON: for each launch, the nodes of the model's graph
        that it computes; for a backward, the paths of the modules (`_provenance_with_paths`).
        ``modules``: the module path of each node."""
        data = json.loads(provenance) if provenance else {}
        nodes_of, paths = data.get("postToPre", {}), data.get("module_paths", {})
        self.backward = "module_paths" in data  # True if it computes gradients
        for key, fused in data.get("cppCodeToPost", {}).items():
            nodes = itertools.chain.from_iterable(nodes_of.get(node, ()) for node in fused)
            paths[key] = [modules.get(node) for node in nodes]
        # Name of a launch -> for each launch with this name, the paths of the modules that it
        # computes
        self.launches: dict[str, list[list[str]]] = defaultdict(list)
        for key in sorted(paths, key=lambda key: int(key.rpartition(":")[2])):
            name = key.rpartition(":")[0]
            self.launches[name].append(
                [path for path in dict.fromkeys(paths[key]) if path is not None]
            )

    def paths(self, name: str, number: int) -> list[str]:
        entries = self.launches.get(name, [])
        return entries[number] if number < len(entries) else []


def _provenance_with_paths(original: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The compiler's provenance of the graph that it compiles. A backward has none: add the paths
    of its modules.
    """
    from torch._inductor import debug
    from torch._inductor.virtualized import V

    data = original()
    if "cppCodeToPost" in data:
        return data
    paths = _module_paths(V.graph.module)
    launches = debug.create_node_mapping_kernel_to_post_grad(
        debug._inductor_triton_kernel_to_post_grad_node_info
    )
    nodes_of_kernels = launches.get("cppCodeToPost", {}).items()
    return {
        **data,
        "module_paths": {
            key: [paths.get(node) for node in nodes] for key, nodes in nodes_of_kernels
        },
    }


def triton_kernel(
    name: str,
    text: str,
    parameters: Iterable[str],
    mutated: Iterable[str],
    launch: Callable[..., Any],
    **more: Any,
) -> GeneratedKernel:
    """Describe a Triton kernel.

    Args:
        name: the compiler's name, such as ``triton_poi_fused_add_relu_0``.
        text: its source without the name.
        mutated: the parameters that it changes, whatever their names are.
        more: other fields of the kernel.
    """
    _, kind, *fused = name.split("_") if name.startswith("triton_") else ("", "user", name)
    changed = set(mutated)

    def named(parameter: str) -> str:  # a user's kernel has its own names
        is_renamed = parameter in changed and not parameter.startswith(("in_out_ptr", "out_ptr"))
        return f"in_out_ptr_{parameter}" if is_renamed else parameter

    operators = _without_number([name_part for name_part in fused if name_part != "fused"])
    return GeneratedKernel(
        operator=f"triton.{kernels.TRITON_KINDS.get(kind, 'user')}",
        name=name,
        text=text,
        fused="_".join(operators),
        parameters=tuple(map(named, parameters)),
        run=launch,
        **{"config": {}, **more},
    )


class CompiledModel:
    """A compiled model. The first calls compile it."""

    def __init__(
        self,
        model: nn.Module,
        mode: str,
        device: torch.device,
        choices: Mapping[str, Any] | None = None,
        cached: bool = True,
        only_fills_cache: bool = False,
    ) -> None:
        """``only_fills_cache``: the model has fake tensors; a call compiles it and runs nothing.

        Raises `UsageError` if no compiler is installed."""
        self.check_compiler(device)
        self.model = model
        self._only_fills_cache = only_fills_cache
        self.graphs: dict[int, Graph] = {}
        self.breaks: Counter[str] = Counter()  # graph breaks by reason
        self.given: Mapping[str, Any] = choices or {}
        # What autotuning chose, as JSON: ``kernels`` (source -> configuration) and ``algorithms``
        # (key of an operation -> algorithm -> time in ms, for the fastest algorithms). Give them to
        # another compilation to get the same kernels.
        self.choices: dict[str, dict[str, Any]] = {
            "kernels": {},
            "algorithms": dict(self.given.get("algorithms", {})),
        }
        self.observer: Observer | None = None
        self._graph: Graph | None = None
        #: For each forward graph of a pass, in order, the path of the module that it belongs to,
        #: and a dot.
        self._beginnings = [""]
        self._modules = frozenset(
            path for path, _ in model.named_modules(remove_duplicate=False) if path
        )
        self._owners = {
            id(parameter): name.rpartition(".")[0] for name, parameter in model.named_parameters()
        }
        self._met: Counter[str] = Counter()  # launches of the running graph
        self._settled: dict[int, GeneratedKernel] = {}  # id of a Triton kernel -> the kernel
        options = "max-autotune-no-cudagraphs" if mode == "max-autotune" else "default"
        self._options = dict(torch._inductor.list_mode_options(options))
        self._options["trace.provenance_tracking_level"] = 1
        if not cached:
            self._options["force_disable_caches"] = True
        prepare_folder()
        torch._dynamo.reset()
        self._compiled = self.compile(model)

    def __call__(self, *args: Any) -> Any:
        return self._compiled(*args)

    def check_compiler(self, device: torch.device) -> None:
        """Raise `UsageError` if the compiler for the generated code is not installed."""
        check_compiler(device)

    def compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Compile a function whose launches belong to the model's passes. The first call compiles
        it.
        """
        return torch.compile(function, backend=self._backend, dynamic=False)

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """While active, the first calls of the model may compile it. Raises `CaptureError` if the
        compiler refuses the model; the lines after the first one contain its whole reason."""
        torch._dynamo.utils.counters.clear()
        try:
            with self._hooks():
                yield
        except _refusals() as error:
            why = (
                f"torch.compile cannot compile the model: {first_reason(error).removesuffix('.')}."
            )
            raise CaptureError(f"{why}\n{error_text(error).strip()[:1500]}", _NEXT_STEP) from error
        remove_damaged(settings().compiler_cache_dir)  # lists the new files
        self.breaks.update(torch._dynamo.utils.counters["graph_break"])

    @contextlib.contextmanager
    def observed(self, observer: Observer) -> Iterator[None]:
        """While active, each launch of a generated kernel goes through ``observer``."""
        self.observer = observer
        self._beginnings = []
        try:
            with self._hooks():
                yield
        finally:
            self.observer = self._graph = None

    def paths_of(self, name: str) -> list[str]:
        """The module paths of the next launch with this name in the graph that runs.

        They are [] between graphs, and in a backward if there are several forward graphs: each has
        its own beginning."""
        if self._graph is None or (self._graph.backward and len(self._beginnings) > 1):
            return []
        self._met[name] += 1
        beginning = self._beginnings[-1]
        paths = [
            f"{beginning}{path}".removesuffix(".")
            for path in self._graph.paths(name, self._met[name] - 1)
        ]
        return [path for path in paths if path in self._modules]

    def paths_of_library(self, operator: str) -> list[str]:
        """As `paths_of`, for a library call: the compiler names it by the aten operator or by its
        own wrapper.
        """
        name = operator.split(".")[1]
        launches = () if self._graph is None else self._graph.launches
        for launch in launches:
            if name in launch.split("."):
                return self.paths_of(launch)
        return []

    @property
    def between_graphs(self) -> bool:
        return self._graph is None

    def _backend(self, graph: Any, inputs: Any) -> Any:
        from torch._inductor.compile_fx import compile_fx

        self._newest = modules = _module_paths(graph)
        inputs_of = [
            modules.get(node.name, "") for node in graph.graph.nodes if node.op == "placeholder"
        ]
        compiled: Any = compile_fx(graph, inputs, config_patches=self._options)
        if self._only_fills_cache:
            return graph  # it runs on the fake tensors; the kernels cannot

        def run(*args: Any) -> Any:
            if self.observer is not None:  # one graph can serve several modules with the same code
                self._beginnings.append(self._beginning(inputs_of, args))
            return compiled(*args)

        return run

    def _beginning(self, paths: Iterable[str], args: Iterable[Any]) -> str:
        """The beginning of the paths of a graph's modules, from the first parameter that shows
        it.
        """
        for path, argument in zip(paths, args, strict=False):
            owner = self._owners.get(id(argument), "")
            if path and owner.endswith(path):
                return owner.removesuffix(path)
        return ""

    @contextlib.contextmanager
    def _hooks(self) -> Iterator[None]:
        """While active, functions of the compiler are replaced: each hook gets the original and the
        arguments.
        """
        hooks = self._hook_list()
        with contextlib.ExitStack() as stack:
            for owner, name, hook in hooks:
                stack.enter_context(replaced(owner, name, _hooked(getattr(owner, name), hook)))
            yield

    def _hook_list(self) -> list[tuple[Any, str, Callable[..., Any]]]:
        """For each hook: the class or module, the name of its function, and the replacement."""
        from torch._inductor import async_compile, codecache, debug, output_code

        hooks: list[tuple[Any, str, Callable[..., Any]]] = [
            (output_code.CompiledFxGraph, "__call__", self._run_graph),
            (async_compile.AsyncCompile, "cpp_pybinding", self._bind),
            (async_compile.AsyncCompile, "wait", _wait_for_kernels),
            (codecache.PersistentCache, "lookup", self._look_up),
            (debug, "dump_inductor_provenance_info", _provenance_with_paths),
        ]
        if torch.cuda.is_available() and importlib.util.find_spec("triton") is not None:
            from torch._inductor.runtime.triton_heuristics import CachingAutotuner

            hooks.append((CachingAutotuner, "run", self._run_triton))
        return hooks

    def _run_graph(self, call: Callable[..., Any], graph: Any, inputs: Any) -> Any:
        if id(graph) not in self.graphs:
            self.graphs[id(graph)] = Graph(graph.inductor_provenance_mapping_str, self._newest)
        outer = self._graph, self._met
        self._graph, self._met = self.graphs[id(graph)], Counter()
        try:
            return call(graph, inputs)
        finally:
            self._graph, self._met = outer

    def _bind(
        self, bind: Callable[..., Any], compiler: Any, argument_types: Any, source: str
    ) -> Any:
        from torch._inductor.codecache import LambdaFuture

        made = bind(compiler, argument_types, source)
        return LambdaFuture(
            lambda: _CppKernel(
                self, made.result() if isinstance(made, LambdaFuture) else made, source
            )
        )

    def _look_up(
        self,
        look_up: Callable[..., Any],
        cache: Any,
        choices: Any,
        op: str,
        inputs: str,
        *rest: Any,
        **more: Any,
    ) -> Any:
        key = _hash(f"{op} {inputs}")
        earlier = self.given.get("algorithms", {}).get(key, {})
        by_hash = {_hash(choice.hash_key(), 16): choice for choice in choices}
        if earlier.keys() & by_hash.keys():
            return {choice: earlier.get(hash_, math.inf) for hash_, choice in by_hash.items()}
        times = look_up(cache, choices, op, inputs, *rest, **more)
        if times:
            measured = {
                hash_: times[choice]
                for hash_, choice in by_hash.items()
                if math.isfinite(times[choice])
            }
            self.choices["algorithms"][key] = dict(
                sorted(measured.items(), key=operator.itemgetter(1))[:MOST_TIMES]
            )
        return times

    def _run_triton(
        self,
        run: Callable[..., Any],
        autotuner: Any,
        /,
        *args: Any,
        benchmark_run: bool = False,
        **more: Any,
    ) -> Any:
        if benchmark_run:
            return run(autotuner, *args, benchmark_run=True, **more)
        self._use_given_config(autotuner)
        launch = functools.partial(run, autotuner, *args, **more)
        return (
            launch()
            if self.observer is None
            else self.observer(self._triton_kernel(autotuner), args, launch)
        )

    def _triton_kernel(self, autotuner: Any) -> GeneratedKernel:
        if id(autotuner) not in self._settled:
            name, text = _name_and_text(autotuner)
            config = (
                _config_of(autotuner.launchers[0].config) if len(autotuner.launchers) == 1 else {}
            )

            def launch(*args: Any) -> Any:
                return autotuner.run(*args, stream=torch.cuda.current_stream().cuda_stream)

            import triton

            self._settled[id(autotuner)] = triton_kernel(
                name,
                text,
                autotuner.triton_meta.get("signature", ()),
                autotuner.inductor_meta.get("mutated_arg_names") or (),
                launch,
                config=config,
                compiler=triton.__version__,
            )
            self.choices["kernels"][self._settled[id(autotuner)].source] = config
        return self._settled[id(autotuner)]

    def _use_given_config(self, autotuner: Any) -> None:
        """Before the first launch of a Triton kernel, choose the given configuration instead of the
        fastest one.
        """
        if not self.given.get("kernels") or id(autotuner) in self._settled:
            return
        _, text = _name_and_text(autotuner)
        if (wanted := self.given["kernels"].get(_hash(text))) is None:
            return
        if not autotuner.launchers:
            autotuner.precompile()
        same = [
            launcher for launcher in autotuner.launchers if _config_of(launcher.config) == wanted
        ]
        if not same:
            import triton

            values = dict(wanted)
            warps, stages = values.pop("num_warps"), values.pop("num_stages")
            config = triton.Config(values, num_warps=warps, num_stages=stages)
            same = [autotuner._precompile_config(config).make_launcher()]
        same[0].config.found_by_coordesc = True  # no further tuning
        autotuner.launchers = same[:1]


class _CppKernel:
    """A C++ kernel of a compiled graph: launches it, through the observer if there is one."""

    def __init__(self, model: CompiledModel, function: Callable[..., Any], source: str) -> None:
        self.model, self.function, self.source, self.name = model, function, source, ""

    def __call__(self, *args: Any) -> Any:
        if kernels.at_launch is not None:
            kernels.at_launch()
        if self.model.observer is None:
            return self.function(*args)
        return self.model.observer(self.kernel, args, functools.partial(self.function, *args))

    @functools.cached_property
    def kernel(self) -> GeneratedKernel:
        signature = self.source.partition("kernel(")[2].partition("{")[0]
        fused = [name_part for name_part in self.name.split("_")[1:] if name_part != "fused"]
        return GeneratedKernel(
            "cpp.template" if "cpp_template" in self.name or "gemm" in self.name else "cpp.fused",
            self.name,
            self.source,
            "_".join(_without_number(fused)),
            {},
            tuple(_PARAMETER.findall(signature.rpartition(")")[0])),
            self.function,
        )


class NeedsCard(Exception):
    """Raised if the compiler wants to time operators on the card while it may not use the card."""


@contextlib.contextmanager
def without_card() -> Iterator[None]:
    """While active, the compiler makes code for fake tensors on a card and does not use the card.

    - PyTorch creates no CUDA context for fake tensors, and no tensor of a number is copied to the
      card.
    - Dynamo does not ask for the current stream.
    - Operators on constants, which the compiler runs to find uniform tensors, run on the host.
    - Generated kernels are compiled and not loaded. Further configurations that depend on the
      registers of a loaded kernel are compiled at its first launch.
    - If the compiler wants to time operators on the card, it gets the exception `NeedsCard`, and
      refuses the model.
    """
    from torch._inductor.fx_passes import pad_mm
    from torch._inductor.fx_passes.joint_graph import UniformValueConstantFolder as folder
    from torch._inductor.runtime import benchmarking
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner
    from torch._subclasses import fake_tensor

    def nothing(*_: Any) -> None:
        """Do nothing."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise NeedsCard("the compiler times operators on the card")

    def timed_before(original: Callable[..., Any], key: Any) -> Any:
        answer = original(key)
        return refuse() if answer is None else answer

    def on_host(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with _ConstantsOnHost():
            return original(*args, **kwargs)

    replacements: list[tuple[Any, str, Any]] = [
        (fake_tensor, "init_gpu_context", nothing),
        (fake_tensor.FakeTensorMode, "avoid_device_init", True),
        (CachingAutotuner, "_make_launchers", nothing),
        (CachingAutotuner, "_dynamic_scale_rblock", nothing),
        (pad_mm, "get_cached_should_pad", _hooked(pad_mm.get_cached_should_pad, timed_before)),
        (type(benchmarking.benchmarker), "benchmark", refuse),
        (type(benchmarking.benchmarker), "benchmark_gpu", refuse),
        (torch.accelerator, "is_available", lambda: False),
        (folder, "__init__", _hooked(folder.__init__, on_host)),
        (folder, "_deduce_value", _hooked(folder._deduce_value, on_host)),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, value in replacements:
            stack.enter_context(replaced(owner, name, value))
        yield


class _ConstantsOnHost(TorchDispatchMode):
    """While active, operators that name a card run on the host."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map_only(torch.device, _host_instead, (args, kwargs or {}))
        return func(*args, **kwargs)


def _host_instead(device: torch.device) -> torch.device:
    return torch.device("cpu") if device.type == "cuda" else device


def _hooked(original: Callable[..., Any], hook: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: hook(original, *args, **kwargs)


def _wait_for_kernels(wait: Callable[..., None], compiler: Any, scope: dict[str, Any]) -> None:
    from torch._inductor.codecache import LambdaFuture

    wait(compiler, scope)
    for name, value in list(scope.items()):
        if isinstance(value, LambdaFuture):
            scope[name] = value = value.result()
        if isinstance(value, _CppKernel):
            value.name = name


def _without_number(words: list[str]) -> list[str]:
    return words[:-1] if words and words[-1].isdigit() else words


def _hash(text: str, digits: int = 32) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:digits]


def _config_of(config: Any) -> dict[str, Any]:
    plain = {
        name: value for name, value in config.kwargs.items() if isinstance(value, int | str | bool)
    }
    return {**plain, "num_warps": config.num_warps, "num_stages": config.num_stages}


def _name_and_text(autotuner: Any) -> tuple[str, str]:
    """The name of a Triton kernel, and its source without the name."""
    name = autotuner.inductor_meta.get("kernel_name") or autotuner.fn.__name__
    try:
        text = Path(autotuner.filename).read_text()
    except (OSError, TypeError):
        text = str(autotuner.fn.src)
    return name, text.replace(name, "triton_")


def _module_paths(graph: Any) -> dict[str, str]:
    """Name of a node of a graph -> path of its module."""
    metas = ((node.name, node.meta) for node in graph.graph.nodes)
    stacks = (
        (name, meta.get("fwd_nn_module_stack") or meta.get("nn_module_stack"))
        for name, meta in metas
    )
    return {name: _path_of(list(stack.values())[-1][0]) for name, stack in stacks if stack}


def _path_of(text: str) -> str:
    """'layer1.0.conv1' from Dynamo's "L['self']._modules['layer1']._modules['0'].conv1"."""
    path = re.sub(r"\[['\"]?([^'\"\]]+)['\"]?\]", r".\1", text.replace("._modules", ""))
    return re.sub(r"^L\.\w+\.?", "", path).replace("..", ".")


def check_compiler(device: torch.device) -> None:
    """Raise `UsageError` if the compiler for the generated code is not installed."""
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        raise UsageError(
            "torch.compile needs Triton, which is not installed.", "Run `pip install triton`."
        )
    if device.type == "cpu" and shutil.which(os.environ.get("CXX", "g++")) is None:
        text = "torch.compile needs a C++ compiler, and none is installed."
        raise UsageError(
            text,
            "Install g++ (Debian: `apt install g++`), or name another compiler in the variable "
            "CXX.",
        )


def _refusals() -> tuple[type[BaseException], ...]:
    """The exceptions with which the compiler refuses a model. Not at import: Dynamo takes a second
    to load.
    """
    return torch._dynamo.exc.TorchDynamoException, torch._inductor.exc.InductorError


_NEXT_STEP = (
    "Check that `torch.compile(model)(*inputs)` runs, or measure the model without --compile."
)


def first_reason(error: BaseException) -> str:
    """The first line of the compiler's reason. Dynamo's own first line is general, so that of its
    cause is used.
    """
    while isinstance(error, _refusals()):
        cause = getattr(error, "inner_exception", None) or error.__cause__ or error.__context__
        if cause is None:
            break
        error = cause
    lines = [line.strip() for line in error_text(error).splitlines() if line.strip()]
    return " ".join([f"{type(error).__name__}:", *lines[:1]])[:400].removesuffix(":")


def prepare_folder() -> Path:
    """Create the folder of the compiler's cache, remove its damaged files and the oldest ones above
    the size limit, and select it. Raises `UsageError` if the folder cannot be created, or another
    user can change its files."""
    folder = settings().compiler_cache_dir
    try:
        problem = why_not_own(folder)
    except OSError as error:
        text = (
            f"The folder of the compiler's cache, {folder}, cannot be created: "
            f"{error.strerror or error}."
        )
        raise UsageError(text, "Name another folder in FARM_COMPILER_CACHE_DIR.") from error
    if problem:
        raise UsageError(
            f"Another user can write to the folder of the compiler's cache, {folder}, and PyTorch "
            "runs its files: "
            f"{problem}.",
            f"Run `chmod 700 {folder}`, or name a folder of your own in FARM_COMPILER_CACHE_DIR.",
        )
    remove_damaged(folder)
    limit_size(folder, round(settings().compiler_cache_gib * 2**30))
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    os.environ["TRITON_CACHE_DIR"] = str(folder / "triton")
    return folder
