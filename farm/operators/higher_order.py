"""Runs higher-order operators (`torch.cond`, `while_loop`, `flex_attention` and others) in a
capture as eager mode runs them: as Python code.

In eager mode PyTorch compiles such a call with the backend "eager", which makes no kernels: it
checks the functions of the call, and then runs the operator's implementation. This is Python code
that calls the functions, such as ``if predicate: ...``. So a capture runs this code without the
compiler, and its calls are calls of the model: those of the branch that is taken, and of each
iteration.

With gradients PyTorch traces the functions in each pass, runs other operators, and computes the
functions again in the backward. A capture refuses that.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._ops import HigherOrderOperator

from farm.errors import UnseenOperators, location_of_model
from farm.types.replacement import replaced

#: The operators that eager mode runs as Python code, by the names that PyTorch gives them.
_PYTHON = frozenset(
    {"cond", "while_loop", "scan", "associative_scan", "map_impl", "flex_attention"}
)
_EAGER = torch._C.DispatchKey.CompositeExplicitAutograd
#: The modules of PyTorch that compile the call of a higher-order operator.
_CALLERS = ("torch._higher_order_ops.", "torch.nn.attention.flex_attention")


@contextlib.contextmanager
def in_python() -> Iterator[None]:
    """While active, higher-order operators that this thread calls run as Python code.

    Raises:
        UnseenOperators: such an operator is called while gradients are enabled.
    """
    thread, run, compiles = threading.get_ident(), HigherOrderOperator.__call__, torch.compile

    def called(operator: Any, /, *args: Any, **kwargs: Any) -> Any:
        is_other = operator.name() not in _PYTHON or threading.get_ident() != thread
        # a transform calls the operator again, for the tensors below it
        if is_other or torch._C._functorch.peek_interpreter_stack() is not None:
            return run(operator, *args, **kwargs)
        if torch.is_grad_enabled():
            raise _refusal(operator.name())
        implementation = operator.py_kernels[_EAGER]
        with _accepting_modes(implementation):
            return implementation(*args, **kwargs)

    def compiled(*args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller.startswith(_CALLERS) and threading.get_ident() == thread:
            return args[0]
        return compiles(*args, **kwargs)

    with replaced(HigherOrderOperator, "__call__", called), replaced(torch, "compile", compiled):
        yield


def _accepting_modes(implementation: Callable[..., Any]) -> contextlib.AbstractContextManager[None]:
    """While active, the implementation of an operator accepts that a dispatch mode is active."""
    module = sys.modules[implementation.__module__]
    if not hasattr(module, "_get_current_dispatch_mode"):
        return contextlib.nullcontext()
    return replaced(module, "_get_current_dispatch_mode", lambda: None)


def _refusal(name: str) -> UnseenOperators:
    return UnseenOperators(
        f"The model calls the higher-order operator '{name}' while gradients are "
        f"enabled{location_of_model()}. PyTorch then traces its functions in each pass and runs "
        "other operators.",
        "Measure the forward pass without gradients. Or write this part with `if` and loops of "
        "Python.",
    )
