"""Captures one forward pass: records its operator calls, and checks that none is missed.

The owner of an aten operator is the leaf module of ``torch.nn`` that runs it, or the outermost call
of a function of PyTorch's public API. The owner has the *slot* until it returns; calls inside it
belong to it. If no tuple can describe the owner's call (a function that is not in the allow-list,
an argument of another type, autocast, a transform such as `torch.vmap`), the capture goes *one
level down*: each of its aten operators is a call of the owner's module.

`Recorder` has what both recorders share: the description of a call, its storages, what it ran.
They stay two, because they differ in what a call is. Here it is the call of a leaf or a public
function, a repeated call does not run, and its operators have one owner by nesting. In a training
step (`farm.training.capture`) it is each operator of the dispatcher, the owner follows from
autograd's sequence numbers, and the life of each tensor counts.

`Recorder` watches a forward pass or a training step; `farm.operators.profiler` compares a watched
pass with an unwatched one.

The device and the grad mode decide which operators run, so a capture records both. `predict`
computes nothing: it runs the model on fake tensors of that device. On meta tensors PyTorch would
run other operators."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

# nn.MultiheadAttention uses it while a dispatch mode is active
import torch.fx.experimental.proxy_tensor
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_only

from farm.errors import (
    CaptureError,
    TupleRejected,
    UnseenOperators,
    error_text,
    location_of_model,
)
from farm.operators import deciding_values, higher_order
from farm.operators.captured import CallTrace, CapturedCall, CapturedPass, CapturedTensor
from farm.operators.cost import new_bytes, operator_flops, shapes_of
from farm.operators.fake_outputs import as_computed
from farm.operators.fake_pass import (
    MOST_MADE_BYTES,
    STANDS_FOR_A_CARD,
    FakeTensors,
    RepeatedCalls,
    actual_device,
    fake_pass,
    held_tensors,
)
from farm.operators.unseen import NOT_COMPILED, Unseen, raised_by_model
from farm.subjects import encoding, leaf, libraries
from farm.subjects.allow_list import RETURNS_TO_HOST
from farm.subjects.encoding import (
    DescribedCall,
    Layout,
    NotEncodable,
    TensorTable,
    is_encodable,
    storage_key,
    tensors_in,
)
from farm.subjects.label import label_of
from farm.subjects.registry import KINDS, kind_of, recorded_as
from farm.types import torch_settings
from farm.types.program_state import seeded
from farm.types.replacement import replaced
from farm.types.tensor_kinds import (
    WRAPPERS,
    is_composite,
    is_plain,
    only_views,
    parts_of,
    refusal,
)
from farm.types.tuple import OperatorTuple

#: Operators that PyTorch runs as another one.
_AS_RUN = {
    torch.ops.aten.__or__.Tensor: torch.ops.aten.bitwise_or.Tensor,
    torch.ops.aten.__lshift__.Scalar: torch.ops.aten.bitwise_left_shift.Tensor_Scalar,
    torch.ops.aten.__lshift__.Tensor: torch.ops.aten.bitwise_left_shift.Tensor,
    torch.ops.aten.__rshift__.Scalar: torch.ops.aten.bitwise_right_shift.Tensor_Scalar,
    torch.ops.aten.__rshift__.Tensor: torch.ops.aten.bitwise_right_shift.Tensor,
    torch.ops.aten.__ilshift__.Scalar: torch.ops.aten.bitwise_left_shift_.Tensor_Scalar,
    torch.ops.aten.__ilshift__.Tensor: torch.ops.aten.bitwise_left_shift_.Tensor,
    torch.ops.aten.__irshift__.Scalar: torch.ops.aten.bitwise_right_shift_.Tensor_Scalar,
    torch.ops.aten.__irshift__.Tensor: torch.ops.aten.bitwise_right_shift_.Tensor,
}
#: One call in a forward pass, because PyTorch chooses its operators by the device. A backward needs
#: these operators.
ATTENTION = torch.nn.functional.scaled_dot_product_attention
#: Called after each operator call with its module path, its operator, its activations, and the
#: buffers and parameters among its arguments (such as caches; not a leaf module's own). Each tensor
#: comes with True if the call wrote to it.
Watch = Callable[[str, str, list[tuple[torch.Tensor, bool]], list[tuple[torch.Tensor, bool]]], None]
#: Returns the context to enter around an operator, given the operator's position in
#: `CapturedPass.slots`.
Around = Callable[[int], contextlib.AbstractContextManager[Any]]


class Recorder:
    """Records one pass of ``model``. Subclasses decide which call gets the slot and which calls are
    recorded. Their functions ``call_module``, ``call_function`` and ``call_aten`` intercept each
    call and run it."""

    def __init__(
        self,
        model: nn.Module,
        device_type: str,
        around: Around | None = None,
        fakes: FakeTensors | None = None,
    ) -> None:
        self.model, self.device_type, self.fakes = model, device_type, fakes
        self.on_host = (
            fakes.on_host if fakes else lambda one: one.device.type == "cpu" != device_type
        )
        self.around = around or (lambda number: contextlib.nullcontext())
        self.path = ""  # path of the module that runs
        # path of the module that raised an error; None: no error, or the model has caught it
        self.raised_at: str | None = None
        self.paths = {id(module): name for name, module in model.named_modules()}
        self.unseen = Unseen()
        self.tuples: dict[str, OperatorTuple] = {}
        self.calls: list[CapturedCall] = []
        self.slots: list[int | None] = []
        self.gaps: list[str] = []
        self.overlaps: list[str] = []
        self.traces: dict[str, CallTrace] = {}  # of the first call of each tuple
        self.mismatches: dict[str, str] = {}
        self.storages = Storages()
        self.settings = torch_settings.expected_from(torch_settings.unseen())
        self._specs: dict[tuple[str, tuple[Layout, ...]], OperatorTuple] = {}
        self._knows = fakes.knows if fakes else lambda tensor: True

    @contextlib.contextmanager
    def within(self, module: nn.Module) -> Iterator[None]:
        """While active, `path` is that of ``module``, or that of its caller if the model does not
        have this module. The model may catch an error of the block and go on."""
        outer, self.path = self.path, self.paths.get(id(module), self.path)
        self.raised_at = None
        try:
            yield
            self.raised_at = None
        except BaseException:
            if self.raised_at is None:
                self.raised_at = self.path
            raise
        finally:
            self.path = outer

    def views_special(self, func: Any, tree: Any) -> bool:
        """True if an aten operator only makes a view of a special tensor in ``tree``, its arguments
        or its output.

        Raises:
            UnsupportedTensor: it computes with a special tensor.
        """
        special = next((tensor for tensor in tensors_in(tree) if not is_plain(tensor)), None)
        if special is not None and not only_views(func, special):
            raise refusal(special, self.location(func))
        return special is not None

    def refuse_special_mask(self, args: Any, kwargs: Any) -> None:
        """Raises `UnsupportedTensor` if attention gets a special tensor that does not consist of
        others, such as a mask of `torch.nn.attention.bias`."""
        for tensor in tensors_in((args, kwargs)):
            if not is_plain(tensor) and not is_composite(type(tensor)):
                raise refusal(tensor, self.location(ATTENTION.__name__))

    def location(self, func: Any) -> str:
        """The call that runs an aten operator, for messages: "A call of linear at 'layers.0'"."""
        return _location(str(func), self.path)

    def costs_something(self, func: Any, args: Any, kwargs: Any, out: Any) -> bool:
        """False also for an operator that only uses memory of the host, or only brings values from
        there.
        """
        tensors = list(tensors_in((args, kwargs))) or list(tensors_in(out))
        return not (tensors and all(map(self.on_host, tensors))) and encoding.costs_something(
            func, args, kwargs, out
        )

    def placed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs a function; in a fake pass, on the device of the pass."""
        return (
            self.fakes.placed(func, args, kwargs)
            if self.fakes is not None
            else func(*args, **kwargs)
        )

    def describe(
        self,
        name: str,
        kind: str,
        args: Any,
        kwargs: Any,
        table: TensorTable,
        parameters: dict[str, Any] | None = None,
        training: bool = False,
    ) -> DescribedCall:
        """Describes a call as a tuple. ``table`` already contains the leaf module's own tensors.

        Raises:
            NotEncodable: a tuple cannot contain one of the arguments.
        """
        if KINDS[kind].public and (self.fakes or self.device_type != "cpu"):
            args, kwargs = tree_map_only(torch.Tensor, self._number_of_host, (tuple(args), kwargs))
        args = encoding.with_host_integers(name, tuple(args))
        arguments = tuple(encoding.encode(value, table) for value in args)
        keywords = {key: encoding.encode(value, table) for key, value in kwargs.items()}
        layouts, storages = table.layouts()
        key = repr((name, kind, parameters, arguments, keywords, training)), layouts
        if key not in self._specs:
            tensors = tuple(map(encoding.tensor_spec, layouts))
            self._specs[key] = OperatorTuple(
                name, kind, parameters or {}, arguments, keywords, tensors, training
            )
        spec = deciding_values.recorded(self._specs[key], table.tensors, self._knows)
        return DescribedCall(key, spec, table.tensors, storages)

    def describe_operator(self, func: Any, args: Any, kwargs: Any) -> DescribedCall:
        """Describes a call of an aten operator as a tuple.

        Raises:
            NotEncodable: a tuple cannot contain one of the arguments.
        """
        roles = {id(tensor): self.role_of(tensor) for tensor in tensors_in((args, kwargs))}
        name = str(_AS_RUN.get(func, func))
        if func.namespace == "aten":
            return self.describe(name, "aten", args, kwargs, TensorTable(roles))
        entry = libraries.listed(name)
        version = {"version": libraries.version_of(entry.library) if entry else ""}
        return self.describe(name, "library", args, kwargs, TensorTable(roles), version)

    def run_parts(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs the operators of which an operator of aten consists. Code below autograd, such as
        that of a composite tensor, calls such operators without taking them apart."""
        with WatchedOperators(self.call_aten):
            return func.decompose(*args, **kwargs)

    def call_aten(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs an aten operator of the pass."""
        raise NotImplementedError

    def role_of(self, tensor: torch.Tensor) -> str:
        """The role of a tensor in the tuple of an aten operator. Also views of a weight are
        weights.
        """
        raise NotImplementedError

    def _number_of_host(self, tensor: torch.Tensor) -> torch.Tensor | float:
        """The value of a number in the memory of the host: an operator of a card runs as with a
        Python number.
        """
        plain = (
            not tensor.dim() and tensor.is_floating_point() and not isinstance(tensor, FakeTensor)
        )
        if not plain or not self.on_host(tensor):
            return tensor
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            return tensor.item()

    def add_call(self, call: CapturedCall, spec: OperatorTuple) -> None:
        self.tuples.setdefault(spec.id, spec)
        self.calls.append(call)
        changed = torch_settings.changed(self.settings, torch_settings.unseen())
        if changed:
            text = f"it runs with another value of {' and '.join(changed)} than a worker has"
            self.mismatches.setdefault(spec.id, text)
        for number in dict.fromkeys((*call.reads, *call.writes)):
            self.storages.uses[number].append(call.index)

    def module_elsewhere(
        self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any
    ) -> Any:
        """Runs a module that another thread calls; if it is one of the model, the capture ends with
        an error.
        """
        if id(module) in self.paths:
            self.unseen.note_thread(f"the module '{self.paths[id(module)]}'")
        return original(module, *args, **kwargs)

    def note_trace(
        self, given: DescribedCall, operators: Iterable[str], out: Any, flops: int
    ) -> None:
        """Records what a call ran and returned. All calls of a tuple must agree, since it has one
        reading.
        """
        trace = CallTrace(
            tuple(operators),
            encoding.texts_of_outputs(out),
            flops,
            shapes_of(out),
            new_bytes(out, given.storages),
            encoding.bits_of_inputs(given.tensors),
            torch.is_inference_mode_enabled(),
            encoding.are_trained(given.tensors),
            encoding.have_values(given.tensors),
        )
        first = self.traces.setdefault(given.spec.id, trace)
        difference = first.difference(trace, "one call", "another call with equal arguments")
        if difference and first.inference == trace.inference:  # other names in inference mode
            self.mismatches.setdefault(given.spec.id, difference)

    def captured_pass(self, **more: Any) -> CapturedPass:
        """Returns the recorded pass. ``more`` gives the fields of `CapturedPass` that this class
        does not record.
        """
        stored = zip(self.storages.tensors, self.storages.uses, strict=True)
        return CapturedPass(
            tuples=self.tuples,
            calls=tuple(self.calls),
            tensors=tuple(dataclasses.replace(tensor, uses=tuple(uses)) for tensor, uses in stored),
            gaps=tuple(self.gaps),
            overlaps=tuple(self.overlaps),
            device_type=self.device_type,
            slots=tuple(self.slots),
            traces=self.traces,
            mismatches=self.mismatches,
            integers=self.storages.integers,
            **more,
        )


@functools.cache
def consists_of_others(func: Any) -> bool:
    """True if an aten operator only runs other operators, on a CPU and on a card."""
    if func.namespace != "aten" or func in _AS_RUN:
        return False
    keys = torch._C.DispatchKey
    has_kernel = map(func.has_kernel_for_dispatch_key, (keys.CPU, keys.CUDA))
    return func.has_kernel_for_dispatch_key(keys.CompositeImplicitAutograd) and not any(has_kernel)


def _name_of(function: Any) -> str:
    """The name of a function that is not in the allow-list, for messages."""
    name = getattr(function, "__name__", "") or str(function)
    qualified: str = getattr(function, "__qualname__", "")
    if qualified.startswith("_VariableFunctionsClass."):  # the functions of the module torch
        return f"torch.{name}"
    return qualified if qualified and not qualified.startswith("pybind11") else name


def _location(what: str, path: str) -> str:
    return f"A call of {what} at '{path}'" if path else f"A call of {what} in the model"


class Storages:
    """Numbers the storages of a pass in order of appearance, and stores a `CapturedTensor` for
    each.
    """

    def __init__(self) -> None:
        self.numbers: dict[int, int] = {}  # address of a live storage -> its number
        self.references: list[
            StorageWeakRef
        ] = []  # a weak reference keeps the address from being used again
        self.held: set[int] = set()  # numbers of storages that are not known to be released
        self.tensors: list[CapturedTensor] = []  # without their uses
        self.uses: list[list[int]] = []
        self.integers: dict[int, torch.UntypedStorage] = {}

    def add(self, tensor: torch.Tensor, name: str, role: str, born: int = -1) -> int:
        """Returns the number of the tensor's storage; adds the storage if it is new."""
        key = storage_key(tensor)
        if key not in self.numbers:
            storage, number = tensor.untyped_storage(), len(self.tensors)
            self.numbers[key] = number
            self.references.append(StorageWeakRef(storage))
            self.held.add(number)
            shape, dtype = tuple(map(int, tensor.shape)), str(tensor.dtype).removeprefix("torch.")
            self.tensors.append(
                CapturedTensor(number, name, role, shape, dtype, storage.nbytes(), born, None, ())
            )
            self.uses.append([])
        return self.numbers[key]

    def change(self, number: int, **values: Any) -> None:
        self.tensors[number] = dataclasses.replace(self.tensors[number], **values)


class WatchedFunctions(TorchFunctionMode):
    """Passes each call of a public function to ``call(function, args, kwargs)``."""

    def __init__(self, call: Callable[[Any, Any, Any], Any]) -> None:
        super().__init__()
        self.call = call

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.call(func, args, kwargs or {})

    @contextlib.contextmanager
    def hidden_from_modules(self) -> Iterator[None]:
        """While active, modules of `torch.nn` that ask for function modes do not find this one.
        They would choose other
        operators: `nn.TransformerEncoder` would not make a nested tensor of its input."""
        original = torch.overrides.has_torch_function

        def has_torch_function(arguments: Any) -> bool:
            asks = sys._getframe(1).f_globals.get("__name__", "")
            if (
                not asks.startswith("torch.nn.modules.")
                or torch.overrides._get_current_function_mode() is not self
            ):
                return original(arguments)
            with torch.overrides._pop_mode_temporarily():
                return original(arguments)

        with replaced(torch.overrides, "has_torch_function", has_torch_function):
            yield


class WatchedOperators(TorchDispatchMode):
    """Passes each aten operator to ``call(operator, args, kwargs)``."""

    def __init__(self, call: Callable[[Any, Any, Any], Any]) -> None:
        super().__init__()
        self.call = call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__name__ in WRAPPERS or is_composite(kind) for kind in types):
            # PyTorch then runs the operators of this rank or of the parts, which come here again
            return NotImplemented
        # the most frequent call on fake tensors; it runs nothing
        if func is torch.ops.prim.device.default:
            return actual_device(args[0])
        return self.call(func, args, kwargs or {})


@contextlib.contextmanager
def watched_modules(call: Callable[..., Any]) -> Iterator[None]:
    """While active, passes each call of a module to ``call(original, module, args, kwargs)``, and
    runs the Python code of scripted functions, which hide the public functions that they call."""
    scripted: Any = torch.jit.ScriptFunction
    original, run = nn.Module.__call__, scripted.__call__

    def inlined(function: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(function, "_torchdynamo_inline", functools.partial(run, function))(
            *args, **kwargs
        )

    watched = replaced(
        nn.Module, "__call__", lambda module, *args, **kwargs: call(original, module, args, kwargs)
    )
    with watched, replaced(scripted, "__call__", inlined):
        yield


class FunctionAsModel(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function(*inputs)


#: Longer passes, such as a scan of 4,096 steps, run once: a second pass takes as long as the first.
MOST_REPEATED_CALLS = 20_000
_READ_VALUE = "aten._local_scalar_dense.default"
#: Makes a tensor of zeros that has no memory.
_WITHOUT_MEMORY = torch.ops.aten._efficientzerotensor.default


def capture(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    device_type: str = "cpu",
    grad_enabled: bool = False,
    watch: Watch | None = None,
) -> CapturedPass:
    """Captures one forward pass of ``model`` with its present tensors, real or fake.

    Raises:
        CaptureError: the model is compiled or scripted, or raises an error.
    """
    refuse_opaque(model)
    return _captured(ForwardRecorder(model, device_type, watch), model, args, kwargs, grad_enabled)


def predict(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    device_type: str = "cpu",
    grad_enabled: bool = False,
    watch: Watch | None = None,
    made: int = MOST_MADE_BYTES,
) -> CapturedPass:
    """Captures a forward pass on fake tensors, which compute nothing; equal calls run only once.

    ``model`` and its arguments are typically on meta; they are unchanged afterwards. Fake CUDA
    tensors need a CUDA context, and this function does not open one: without a context it captures
    for the CPU and sets ``CapturedPass.device_type`` to "cpu". ``watch`` gets the original tensors
    of the model, and fake tensors for all others.

    Raises:
        CaptureError: see `capture`.
    """
    device = device_type
    if device_type == "cuda" and not torch.cuda.is_initialized():
        device, device_type = STANDS_FOR_A_CARD, "cpu"
    refuse_opaque(model)  # a scripted module does not let its tensors be replaced
    with fake_pass(model, args, kwargs, device, made=made) as (fakes, fake_args, fake_kwargs):
        seen: list[list[tuple[Any, ...]]] = []  # what ``watch`` sees, of each pass

        def look(path: str, operator: str, *groups: list[tuple[torch.Tensor, bool]]) -> None:
            originals = fakes.originals()
            shown = [
                [(originals.get(id(tensor), tensor), is_written) for tensor, is_written in group]
                for group in groups
            ]
            seen[-1].append((path, operator, *shown))

        def one_pass() -> CapturedPass:
            seen.append([])
            recorder = ForwardRecorder(
                model, device_type, watch and look, repeated=RepeatedCalls(fakes)
            )
            return _captured(recorder, model, fake_args, fake_kwargs, grad_enabled)

        captured = settled(model, one_pass)
        for call in seen[captured.passes_before]:
            if watch is not None:
                watch(*call)
        return captured


def settled(model: nn.Module, one_pass: Callable[[], CapturedPass]) -> CapturedPass:
    """The capture of a pass as it runs again and again.

    A model may do something only in its first pass, such as compute a table of positions or
    initialize a weight. Then the second pass is captured; the first one if the second one raises.
    Each pass draws the same random numbers. A pass of more than `MOST_REPEATED_CALLS` calls runs
    again only if the model has kept new tensors.

    Raises:
        UnseenOperators: the third pass does not cost the same as the second one.
    """
    before = held_tensors(model)
    with seeded():
        first = one_pass()
    if len(first.calls) > MOST_REPEATED_CALLS and not held_tensors(model).keys() > before.keys():
        return first
    try:
        with seeded():
            second = one_pass()
        if not _difference(first, second):
            return first
        with seeded():
            third = one_pass()
    except CaptureError:
        return first
    difference = _difference(second, third)
    if difference:
        raise passes_differ(difference)
    return dataclasses.replace(second, passes_before=1)


def passes_differ(difference: str) -> UnseenOperators:
    """The error for a model or a step that does not cost the same each time."""
    return UnseenOperators(
        "The passes of the model differ, because it keeps a state or writes to its inputs: "
        f"{difference}. The farm repeats one pass many times, so each pass must cost the same.",
        "Reset the state at the beginning of forward. Give a cache a fixed size, such as that of "
        "StaticCache of transformers.",
    )


def _difference(before: CapturedPass, after: CapturedPass) -> str:
    """The first call of a pass that does not cost the same as in the pass before it, in words; ""
    if there is none."""
    for call, later in itertools.zip_longest(before.calls, after.calls):
        if call is None or later is None or _cost_of(before, call) != _cost_of(after, later):
            texts = _in_words(before, call), _in_words(after, later)
            return f"one runs {texts[0]}, the next one {texts[1]}"
    return ""


def _cost_of(captured: CapturedPass, call: CapturedCall) -> tuple[Any, ...]:
    """What decides the cost of a call. Numbers and places in a storage, such as a position in a
    cache, are left out.
    """
    spec = captured.tuples[call.tuple_id]
    layouts = [(tensor.shape, tensor.dtype, tensor.strides) for tensor in spec.tensors]
    trace = captured.traces.get(call.tuple_id)
    ran = trace and (trace.operators, trace.outputs)
    return call.module_path, spec.operator, layouts, ran


def _in_words(captured: CapturedPass, call: CapturedCall | None) -> str:
    if call is None:
        return "no further operator"
    where = f" at '{call.module_path}'" if call.module_path else ""
    return f"{label_of(captured.tuples[call.tuple_id])}{where}"


def run_with_owners(
    model: nn.Module,
    args: tuple[Any, ...],
    *,
    device_type: str,
    grad_enabled: bool = False,
    around: Around,
) -> None:
    """Runs one pass and enters ``around(number)`` around every call that gets the slot, in order.

    Calls are not recorded and aten operators are not watched, so a call takes about as long as in
    an unwatched pass. The numbers are positions in `CapturedPass.slots` of a capture of the same
    pass."""
    recorder = ForwardRecorder(model, device_type)
    recorder.around = around
    # In this order: set_grad_enabled is a watched function, too.
    enabled = torch.set_grad_enabled(grad_enabled)
    with enabled, recorder.watching_calls(), higher_order.in_python():
        model(*args)


def _captured(
    recorder: ForwardRecorder,
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    grad_enabled: bool,
) -> CapturedPass:
    try:
        operators = WatchedOperators(recorder.call_aten)
        recorder.is_watching = True
        modes = (
            recorder.unseen.watching(),
            torch.set_grad_enabled(grad_enabled),
            operators,
            recorder.watching_calls(),
        )
        with contextlib.ExitStack() as stack:
            for mode in modes:
                stack.enter_context(mode)
            model(*args, **(kwargs or {}))
    except CaptureError:
        raise
    except (Exception, SystemExit) as error:
        where = f" at '{recorder.raised_at}'" if recorder.raised_at else ""
        raise raised_by_model(
            f"The model raised{where}",
            error,
            "Check that the model runs on this input. Shapes that depend on values cannot be "
            "captured.",
        ) from error
    return recorder.captured_pass(
        grad_enabled=grad_enabled, training=model.training, operators=recorder.operators
    )


def refuse_opaque(model: nn.Module) -> None:
    for path, module in model.named_modules():
        text = (
            f"The module '{path or type(module).__name__}' is {{}}, so its operators cannot be "
            "captured."
        )
        if isinstance(module, torch.jit.ScriptModule):
            raise UnseenOperators(text.format("scripted"), "Use the model without torch.jit.")
        if (
            type(module).__module__.startswith("torch._dynamo")
            or module._compiled_call_impl is not None
        ):
            raise UnseenOperators(text.format("compiled"), NOT_COMPILED)


@dataclass(slots=True)
class _OpenCall:
    """The call that has the slot; it owns the aten operators that run inside it.

    ``is_divided``: no tuple describes it, so each of its aten operators is a call."""

    what: str
    path: str
    number: int
    is_divided: bool = False
    costly: list[str] = field(default_factory=list)  # aten operators that cost anything
    flops: int = 0
    written: set[int] = field(default_factory=set)  # addresses of the storages that it wrote
    # (tensor, value) that the host read
    values_read: list[tuple[torch.Tensor, Any]] = field(default_factory=list)


class ForwardRecorder(Recorder):
    def __init__(
        self,
        model: nn.Module,
        device_type: str,
        watch: Watch | None = None,
        repeated: RepeatedCalls | None = None,
    ) -> None:
        super().__init__(model, device_type, fakes=repeated.fakes if repeated else None)
        self.watch, self.repeated = watch, repeated
        self.open_calls: list[_OpenCall] = []
        self.operators: Counter[str] = Counter()
        self.roles: dict[int, str] = {}
        self.is_watching = False  # aten operators
        self.leaves: dict[int, dict[str, Any] | None] = {}
        for module in model.modules():
            self.roles.update((id(tensor), "parameter") for tensor in module._parameters.values())
            self.roles.update((id(tensor), "buffer") for tensor in module._buffers.values())
            self.leaves[id(module)] = leaf.describe_leaf(module)
        # now: a transform may replace parameters by tensors without memory while the model runs
        with torch._C._DisableTorchDispatch():
            self.roles_by_storage = self._roles_by_storage()

    def _roles_by_storage(self) -> dict[int, str]:
        roles: dict[int, str] = {}
        for role, tensors in (
            ("buffer", self.model.buffers()),
            ("parameter", self.model.parameters()),
        ):
            parts = itertools.chain.from_iterable(map(parts_of, tensors))
            roles.update((storage_key(part), role) for part in parts)
        return roles

    def role_of(self, tensor: torch.Tensor) -> str:
        return self.roles_by_storage.get(storage_key(tensor), "activation")

    @contextlib.contextmanager
    def watching_calls(self) -> Iterator[None]:
        functions = WatchedFunctions(self.call_function)
        with watched_modules(self.call_module), functions, functions.hidden_from_modules():
            yield

    def call_module(
        self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any
    ) -> Any:
        if self.unseen.in_other_thread():
            return self.module_elsewhere(original, module, args, kwargs)
        if self.open_calls:
            return original(module, *args, **kwargs)
        with self.within(module):
            return self._run_module(original, module, args, kwargs)

    def _run_module(
        self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any
    ) -> Any:
        is_known = id(module) in self.leaves  # False if the model created it during the pass
        parameters = self.leaves[id(module)] if is_known else leaf.describe_leaf(module)
        if parameters is None or leaf.has_replaced_parameters(module):
            out = original(module, *args, **kwargs)
        else:
            name = type(module).__name__
            tensors = [*module.parameters(), *module.buffers()]
            is_divided = self._is_divided(name, (args, tensors), kwargs)
            slot = self._slot(name, is_divided=is_divided)
            # functions of a composite run as in an unwatched pass
            hidden = contextlib.nullcontext() if is_divided else torch._C.DisableTorchFunction()
            with slot as call, hidden:
                describe = functools.partial(
                    self._describe,
                    call,
                    "module",
                    f"torch.nn.{name}",
                    args,
                    kwargs,
                    parameters=parameters,
                    module=module,
                )
                repeated = None if is_divided or leaf.is_changed(module) else self.repeated
                described = describe() if repeated is not None else None
                is_repeated, out = self._run(
                    call, described, functools.partial(original, module, *args, **kwargs)
                )
                if call.costly and described is None:
                    described = describe()
                if call.costly and described is not None:
                    self._close(call, described, out, repeated=is_repeated)
                    if repeated is not None and not is_repeated:
                        repeated.learn(described, call.costly, call.written, out)
        return out

    def call_function(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self.open_calls:
            return func(*args, **kwargs)
        if func is torch._nested_tensor_from_mask:
            raise UnseenOperators(
                f"The module '{self.path}' makes a nested tensor of its input, because it gets a "
                "padding mask. An "
                "operator tuple cannot describe nested tensors.",
                "Build nn.TransformerEncoder with enable_nested_tensor=False.",
            )
        kind, name = recorded_as(func)
        run = functools.partial(self.placed, func, args, kwargs)
        called = name or _name_of(func)
        is_divided = self._is_divided(name, args, kwargs)
        with self._slot(called, is_divided=is_divided) as call:
            if func is ATTENTION:
                self.refuse_special_mask(args, kwargs)
            described = None
            if not is_divided and self.repeated is not None and name in self.repeated.functions:
                described = self._describe(call, kind, name, args, kwargs)
            is_repeated, out = self._run(call, described, run)
            if is_repeated and described is not None:
                self._close(call, described, out, repeated=True)
            elif call.costly:
                if call.values_read and name not in RETURNS_TO_HOST:
                    (args, kwargs), described = self._split_off_reads(call, args, kwargs), None
                if call.costly and (
                    described := described or self._describe(call, kind, name, args, kwargs)
                ):
                    self._close(call, described, out)
                    repeated = None if call.values_read else self.repeated
                    if repeated is not None and repeated.learn(
                        described, call.costly, call.written, out
                    ):
                        repeated.functions.add(name)
        return out

    def _is_divided(self, name: str, args: Any, kwargs: Any) -> bool:
        """True if no tuple can describe a call."""
        is_autocast = torch.is_autocast_enabled(self.device_type)
        return not name or is_autocast or not is_encodable((args, kwargs))

    @contextlib.contextmanager
    def _slot(self, what: str, *, is_divided: bool) -> Iterator[_OpenCall]:
        call = _OpenCall(what, self.path, len(self.slots), is_divided)
        if not is_divided:
            self.slots.append(None)
        self.open_calls.append(call)
        try:
            yield call
        except Exception:
            self._gap(call, "the call raised an error afterwards, which the model caught")
            raise
        finally:
            self.open_calls.pop()

    def _run(
        self, call: _OpenCall, given: DescribedCall | None, run: Callable[[], Any]
    ) -> tuple[bool, Any]:
        """Runs a call unless it repeats an earlier one. Returns whether it repeats one, and its
        output.
        """
        effect = (
            self.repeated.repeat(given) if self.repeated is not None and given is not None else None
        )
        if effect is None and call.is_divided:
            watches = not self.is_watching  # `run_with_owners` watches only these operators
            with WatchedOperators(self.call_aten) if watches else contextlib.nullcontext():
                return False, run()
        if effect is None:
            with self.around(call.number):
                return False, run()
        operators, written, out = effect
        self.operators.update(operators)
        call.costly.extend(operators)
        call.written.update(written)
        return True, out

    def call_aten(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self.views_special(func, (args, kwargs)):
            return func(*args, **kwargs)
        if func is _WITHOUT_MEMORY:
            raise self._forward_derivative()
        if self.open_calls and self.open_calls[-1].is_divided:
            return self._run_operator(self.open_calls[-1], func, args, kwargs)
        out, name = func(*args, **kwargs), str(func)
        self.views_special(func, out)
        with torch._C.DisableTorchFunction():
            if self.fakes is not None:
                out = as_computed(func, args, out, on_card=self.fakes.stands)
            if name == _READ_VALUE and self.open_calls:
                self.open_calls[-1].values_read.append((args[0], out))
            if not self.costs_something(func, args, kwargs, out):
                return out
            self.operators[name] += 1
            if not self.open_calls:
                self.gaps.append(
                    f"{name} at '{self.path}': called outside all public PyTorch functions and "
                    "modules"
                )
                return out
            if len(self.open_calls) > 1:
                self.overlaps.append(
                    f"{name} at '{self.path}': "
                    f"{' and '.join(call.what for call in self.open_calls)}"
                )
            call = self.open_calls[-1]
            call.costly.append(name)
            call.flops += operator_flops(func, args, kwargs, out)
            call.written.update(map(storage_key, encoding.written_tensors(func, args, kwargs)))
        return out

    def _run_operator(self, owner: _OpenCall, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs and records an aten operator of a call that no tuple describes."""
        if consists_of_others(func):
            return self.run_parts(func, args, kwargs)
        call = _OpenCall(str(_AS_RUN.get(func, func)), owner.path, len(self.slots))
        self.slots.append(None)
        with self.around(call.number):
            out = func(*args, **kwargs)
        self.views_special(func, out)
        with torch._C.DisableTorchFunction():
            if self.fakes is not None:
                out = as_computed(func, args, out, on_card=self.fakes.stands)
            if not self.costs_something(func, args, kwargs, out):
                return out
            self.operators[call.what] += 1
            call.costly.append(call.what)
            call.flops = operator_flops(func, args, kwargs, out)
            call.written.update(map(storage_key, encoding.written_tensors(func, args, kwargs)))
            try:
                described = self.describe_operator(func, args, kwargs)
                kind_of(described.spec).admit(described.spec)
            except (NotEncodable, TupleRejected) as error:
                reason = error.message if isinstance(error, TupleRejected) else error_text(error)
                self.gaps.append(f"{call.what} at '{owner.path}' in {owner.what}: {reason}")
            else:
                self._close(call, described, out)
        return out

    def _forward_derivative(self) -> UnseenOperators:
        return UnseenOperators(
            f"The model computes derivatives in forward mode{location_of_model()}. Parameters "
            "without a derivative then get one without memory, and PyTorch computes with it in "
            "another way while a capture sees the operators.",
            "Compute them in reverse mode: torch.func.vjp for jvp, jacrev for jacfwd, "
            "jacrev(jacrev(...)) for hessian.",
        )

    def location(self, func: Any) -> str:
        if not self.open_calls:
            return super().location(func)
        call = self.open_calls[-1]
        return _location(call.what, call.path)

    def _split_off_reads(self, call: _OpenCall, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Replaces tensors that a call passes as numbers (``x[:length]``) by their values.

        Output sizes depend on such a value, and a tuple stores no tensor values. So the read of the
        value is recorded as a separate call."""
        values = {id(tensor): value for tensor, value in call.values_read}
        passed: set[int] = set()

        def replace(entry: Any) -> Any:
            if id(entry) in values:
                passed.add(id(entry))
                return values[id(entry)]
            if isinstance(entry, slice):
                return slice(replace(entry.start), replace(entry.stop), replace(entry.step))
            if type(entry) in (tuple, list):
                return type(entry)(map(replace, entry))
            if type(entry) is dict:
                return {key: replace(value) for key, value in entry.items()}
            return entry

        args, kwargs = replace(tuple(args)), replace(dict(kwargs))
        for tensor, _ in call.values_read:
            if id(tensor) in passed and not self.on_host(tensor):
                call.costly.remove(_READ_VALUE)
                read = _OpenCall("item", call.path, call.number)
                read.costly.append(_READ_VALUE)
                described = self._describe(read, "function", "torch.Tensor.item", (tensor,), {})
                if described is not None:
                    self._close(read, described, None)
        return args, kwargs

    def _gap(self, call: _OpenCall, reason: str) -> None:
        self.gaps.extend(
            f"{name} at '{call.path}' in {call.what}: {reason}" for name in call.costly
        )

    def _describe(
        self,
        call: _OpenCall,
        kind: str,
        name: str,
        args: Any,
        kwargs: Any,
        parameters: dict[str, Any] | None = None,
        module: nn.Module | None = None,
    ) -> DescribedCall | None:
        """Describes the call as a tuple; None if no tuple can: its aten operators become gaps of
        the capture.
        """
        table = TensorTable(self.roles)
        kwargs = {key: value for key, value in kwargs.items() if key != "_stacklevel"}
        try:
            if module is None:
                return self.describe(name, kind, args, kwargs, table)
            table.add_module(module)
            return self.describe(name, kind, args, kwargs, table, parameters, module.training)
        except NotEncodable as error:
            self._gap(call, error_text(error))
            return None

    def _close(
        self, call: _OpenCall, described: DescribedCall, out: Any, *, repeated: bool = False
    ) -> None:
        spec, stored, index = described.spec, self.storages, len(self.calls)
        if not repeated:
            self.note_trace(described, call.costly, out, call.flops)
        before = len(stored.tensors)
        shown = list(zip(described.tensors, described.storages, spec.tensors, strict=True))
        behind = {stored.add(tensor, "", layout.role): tensor for tensor, _, layout in shown}
        for number, tensor in behind.items():
            if (
                number >= before
                and not tensor.is_floating_point()
                and type(tensor) is not FakeTensor
            ):
                stored.integers[number] = tensor.untyped_storage()
        writes = {stored.numbers[key] for key in call.written if key in described.storages}
        for tensor in tensors_in(out):
            if storage_key(tensor) not in described.storages:
                writes.add(stored.add(tensor, "", "activation", index))
        if self.watch is not None:
            activations, weights = [], []
            for tensor, key, layout in shown:
                if layout.role == "activation":
                    activations.append((tensor, key in call.written))
                elif layout.held:
                    weights.append((tensor, key in call.written))
            self.watch(call.path, spec.operator, activations, weights)
        self.slots[call.number] = index
        self.add_call(
            CapturedCall(index, call.path, spec.id, tuple(behind), tuple(sorted(writes))), spec
        )
