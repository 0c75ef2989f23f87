"""Notices what a capture cannot see: operators in other threads, and functions that torch.compile
compiled.

The modes of a capture belong to one thread. PyTorch's compiler does not compile while they are
active, and then leaves the function uncompiled for the rest of the process. So such a model is
refused, with the line of the user's code. A compiled function runs uncompiled until then, without
the compiler: the user's program stays as it was.

Operators of other threads are noticed in three places:

- A fake tensor in a thread without modes is handled by its class, whichever thread it is.
- Modules of the model are called through `torch.nn.Module`.
- Threads that the model starts, and functions that it submits to a pool, run under a mode of their
  own. It stays active in a thread that outlives the capture, and then does nothing.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from farm.errors import (
    CaptureError,
    UnseenOperators,
    UnsupportedTensor,
    error_text,
    location_in,
    location_of_model,
    next_step_after,
    told,
)
from farm.operators import higher_order
from farm.subjects.encoding import costs_something, tensors_in
from farm.types.replacement import replaced
from farm.types.tensor_kinds import PLAIN_MASK

NOT_COMPILED = (
    "Measure the whole model compiled, with --compile. Or measure it uncompiled: leave out "
    "torch.compile, or set "
    "TORCH_COMPILE_DISABLE=1."
)
_EVAL_FRAME = "torch._dynamo.eval_frame"
#: PyTorch's error for `torch.Tensor.__new__(Class, tensor)` while a dispatch mode is active.
_NOT_MADE = re.compile(r"Creating a new Tensor subclass (\w+) but the raw Tensor object")
_Call = Callable[..., Any]


def raised_by_model(what: str, error: BaseException, next_step: str) -> CaptureError:
    """The error for an error of the user's model. ``what`` says what raised it, ``next_step`` what
    to do if the error has no next step of its own."""
    special = _NOT_MADE.search(error_text(error))
    if special is None:
        return CaptureError(f"{what}: {told(error)}", next_step_after(error, next_step))
    location = location_in(traceback.extract_tb(error.__traceback__))
    return UnsupportedTensor(
        f"The model makes a tensor of the class {special[1]}{location}. PyTorch cannot make it "
        "while a capture watches the operators.",
        PLAIN_MASK if special[1] == "CausalBias" else "Use a plain tensor there.",
    )


class Unseen:
    """Notices calls of one pass, made by the thread that creates this object."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.active = False
        self.modes: Sequence[TorchDispatchMode] = ()  # those of the fake pass
        self.refusal: UnseenOperators | None = None
        self._lock = threading.RLock()  # fake tensors are not made for several threads
        self._dispatching = False

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """While active, notices. Raises `UnseenOperators` at the end, also instead of another
        error.
        """
        self.active, self.modes = True, _get_current_dispatch_mode_stack()
        try:
            noticing = self._threads(), self._fake_tensors(), self._compiled_functions()
            with contextlib.ExitStack() as stack:
                for context in (*noticing, higher_order.in_python()):
                    stack.enter_context(context)
                yield
        except (Exception, SystemExit) as error:
            if self.refusal is not None:
                raise self.refusal from error
            raise
        finally:
            self.active = False
        if self.refusal is not None:
            raise self.refusal

    def in_other_thread(self) -> bool:
        """True in another thread than that of the capture."""
        return threading.get_ident() != self.thread

    def note_thread(self, what: str) -> None:
        """Notes that the model runs a module or an operator in this thread."""
        if self.active and self.refusal is None:
            location = location_in(traceback.extract_stack())
            self.refusal = UnseenOperators(
                f"The model calls {what} in another thread{location}. A capture sees only those "
                "of the thread that "
                "calls the model.",
                "Call them one after the other, in the thread that calls the model.",
            )

    def _operator(self, func: Any, args: Any, kwargs: Any, run: _Call) -> Any:
        """Runs an operator of another thread."""
        with self._lock:
            out = run()
        if self.active and costs_something(func, args, kwargs, out):
            self.note_thread(f"operators ({func})")
        return out

    def _has_own_fakes(self, arguments: Any) -> bool:
        """True if there is a fake tensor of this pass among the arguments, not of another one in
        another thread.
        """
        fakes = (tensor for tensor in tensors_in(arguments) if isinstance(tensor, FakeTensor))
        return any(tensor.fake_mode in self.modes for tensor in fakes)

    @contextlib.contextmanager
    def _fake_tensors(self) -> Iterator[None]:
        original = FakeTensor.__dict__["__torch_dispatch__"].__func__

        def dispatched(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if not (self.in_other_thread() and self.active and self._has_own_fakes((args, kwargs))):
                return original(cls, func, types, args, kwargs)
            with self._lock, contextlib.ExitStack() as stack:
                if self._dispatching:
                    return original(cls, func, types, args, kwargs)
                stack.enter_context(replaced(self, "_dispatching", True))
                for mode in self.modes:
                    stack.enter_context(mode)
                return self._operator(
                    func, args, kwargs or {}, functools.partial(func, *args, **kwargs or {})
                )

        with replaced(FakeTensor, "__torch_dispatch__", classmethod(dispatched)):
            yield

    @contextlib.contextmanager
    def _threads(self) -> Iterator[None]:
        executor = concurrent.futures.ThreadPoolExecutor
        start, submit = threading.Thread.start, executor.submit
        submitting = False

        def started(thread: threading.Thread) -> None:
            if not (submitting or self.in_other_thread()):
                thread.run = self._watched(thread.run)  # type: ignore[method-assign]
            start(thread)

        def submitted(pool: Any, function: _Call, /, *args: Any, **kwargs: Any) -> Any:
            nonlocal submitting
            if self.in_other_thread():
                return submit(pool, function, *args, **kwargs)
            submitting = True  # the thread that it may start works for other functions, too
            try:
                return submit(pool, self._watched(function), *args, **kwargs)
            finally:
                submitting = False

        with replaced(threading.Thread, "start", started), replaced(executor, "submit", submitted):
            yield

    def _watched(self, function: _Call) -> _Call:
        def run(*args: Any, **kwargs: Any) -> Any:
            with _OperatorsOfThread(self._operator):
                return function(*args, **kwargs)

        return run

    @contextlib.contextmanager
    def _compiled_functions(self) -> Iterator[None]:
        """Loads the compiler only if the model does: the import takes a second."""
        if _EVAL_FRAME in sys.modules:
            with self._calls_of_compiled():
                yield
            return
        original, is_noticing = torch.compile, False
        with contextlib.ExitStack() as stack:

            def compiled(*args: Any, **kwargs: Any) -> Any:
                nonlocal is_noticing
                function = original(*args, **kwargs)
                if not is_noticing and _EVAL_FRAME in sys.modules:
                    is_noticing = True
                    stack.enter_context(self._calls_of_compiled())
                return function

            stack.enter_context(replaced(torch, "compile", compiled))
            yield

    @contextlib.contextmanager
    def _calls_of_compiled(self) -> Iterator[None]:
        eval_frame = sys.modules[_EVAL_FRAME]
        original = eval_frame._callback_from_stance

        def callback_of(callback: Any) -> Any:
            """The compiler's callback for a call: none, so that the function runs uncompiled."""
            if self.in_other_thread():
                return original(callback)
            compiles = callback not in (None, False) and original(callback) is not None
            if compiles and self.refusal is None and not torch._dynamo.config.disable:
                location = location_of_model()
                self.refusal = UnseenOperators(
                    f"The model calls a function that torch.compile compiled{location}. Its "
                    "operators are not those that "
                    "run: the compiler replaces them by its own kernels.",
                    NOT_COMPILED,
                )
            return None

        with replaced(eval_frame, "_callback_from_stance", callback_of):
            yield


class _OperatorsOfThread(TorchDispatchMode):
    def __init__(self, call: Callable[[Any, Any, Any, _Call], Any]) -> None:
        super().__init__()
        self.call = call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return self.call(func, args, kwargs, functools.partial(func, *args, **kwargs))
