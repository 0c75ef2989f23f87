"""Run an operator with some of its inputs and outputs in slow memory.

Inputs are copied to slow memory once. Outputs are written to slow memory with the first possible of
three methods:

- Call the out-variant of each aten operator that creates an output, if the out-variant runs the
  kernel directly. Many out-variants in PyTorch are generated: they allocate as usual and then copy.
  They are not used (`torch.Tag.generated`, or no kernel for the device).
- Call an equivalent operator with an out-variant (`_RULES`). For example, a convolution is cuDNN's
  kernel plus a bias.
- On a GPU, use a memory pool for all allocations of a pass. A first pass shows which request to the
  pool contains the output. A second pool serves this request with slow memory and all others with
  fast memory.

With the first two methods, workspaces stay in fast memory; with a pool, only if each has a request
of its own.

Python selects the memory of the outputs during a pass. A CUDA graph does not contain this Python,
an eager pass does. So an eager pass calls only the out-variants, which are found before; if this is
not possible, the outputs are not placed."""

from __future__ import annotations

import ctypes
import functools
import itertools
import operator
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from farm.addons.memory.memory_tier import SlowMemory, slow_memory_of
from farm.benchmark.passes import Offloaded, Pass
from farm.errors import Unmeasurable
from farm.operators.rebuild import Rebuilt, new_storages
from farm.subjects.allow_list import registered
from farm.subjects.encoding import storage_key, tensors_in
from farm.types.details import Details, MemoryUse
from farm.types.placement import Placement
from farm.types.protocol import Protocol

# runs an operator that writes its results to these tensors
Write = Callable[[Sequence[torch.Tensor]], object]
# returns a function that runs a rebuilt operator, or a replica of it, once
PassOf = Callable[[Rebuilt], Pass]

_aten = torch.ops.aten


@dataclass(frozen=True)
class Outputs:
    """How to run an operator with outputs in slow memory."""

    run: PassOf
    workspaces: str  # "fast", or "may be with the output" (in slow memory)
    pool: Any = None  # the memory pool that a CUDA graph must allocate from; None: any pool
    # as `run`, without Python that selects memory; None: not possible
    direct: PassOf | None = None


def offload(rebuilt: Rebuilt, protocol: Protocol, memory: SlowMemory | None = None) -> Offloaded:
    """Put tensors of an operator in slow memory, as the protocol's placement selects them; by
    default in that of the operator's device. Raises `Unmeasurable`: rejected (the operator has no
    such input), not_available or out_of_memory."""
    placement = Placement.parse(protocol.placement)
    memory = memory or slow_memory_of(rebuilt.device)
    if missing := sorted(placement.inputs - set(range(len(rebuilt.storages)))):
        count = len(rebuilt.storages)
        raise Unmeasurable(
            "rejected", f"The placement names in{missing[0]}, but the operator has {count} inputs."
        )
    moved = rebuilt.placed(placement.inputs, memory.copied) if placement.inputs else rebuilt
    run = operator.attrgetter("run")
    outputs = Outputs(run, "fast", direct=run)
    if placement.outputs:
        outputs = slow_outputs(moved, sorted(placement.outputs), memory)
    details = Details(memory=MemoryUse(slow_memory=memory.name, workspaces=outputs.workspaces))
    is_graph = rebuilt.device.type == "cuda" and protocol.launch == "graph"
    if is_graph:
        return Offloaded(moved, outputs.run, details, outputs.pool, memory)
    if outputs.direct is None:
        text = (
            "The output cannot be in slow memory with eager launch: the time would include Python "
            "code that selects the memory."
        )
        raise Unmeasurable("not_available", text, "On a GPU, give --launch graph.")
    return Offloaded(moved, outputs.direct, details, outputs.pool, memory)


def slow_outputs(rebuilt: Rebuilt, numbers: Sequence[int], memory: SlowMemory) -> Outputs:
    """Find out how to write the outputs ``numbers`` of an operator to slow memory. Raises
    `Unmeasurable` (not_available) if the operator has no such output, or cannot write it to memory
    of the caller."""
    with _Watching() as watched:
        output = rebuilt.run()
    outputs = new_storages(output, frozenset(map(storage_key, rebuilt.inputs)))
    if missing := [number for number in numbers if number >= len(outputs)]:
        text = f"The placement names out{missing[0]}, but the operator has {len(outputs)} outputs."
        raise Unmeasurable("not_available", text)
    keys = [storage_key(outputs[number]) for number in numbers]
    if not watched.makers.keys() >= set(keys):
        text = "The output cannot be in slow memory: no operator of aten creates it."
        raise Unmeasurable("not_available", text)
    makers = [watched.makers[key] for key in keys]
    fixed = {
        str(watched.calls[call].func) for call, _ in makers if not watched.calls[call].writable
    }
    if not fixed:
        into: dict[int, list[torch.Tensor]] = {}
        for call, position in makers:
            results = watched.calls[call].results
            into.setdefault(call, list(results))[position] = memory.like(results[position])
        others = [call for index, call in enumerate(watched.calls) if index not in into]
        return Outputs(
            run=lambda operator: functools.partial(_redirected, operator, into),
            workspaces="fast",
            direct=(
                None
                if any(call.computes for call in others)
                else functools.partial(_direct, into=into)
            ),
        )
    if rebuilt.device.type != "cuda":
        why = f"{', '.join(sorted(fixed))} writes only to memory that it allocates"
        raise Unmeasurable("not_available", f"The output cannot be in slow memory: {why}.")
    del watched, output, outputs  # `_pooled` measures the memory of a pass
    return _pooled(rebuilt, numbers, memory)


class _WatchedCall(NamedTuple):
    func: Any
    writable: bool
    computes: bool  # False: it makes views of its arguments, or only allocates memory
    results: list[torch.Tensor]  # references, so that no address is reused


class _Watching(TorchDispatchMode):
    """Records the aten calls of a pass, and for each new storage the call that creates it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_WatchedCall] = []
        # storage -> index of the call, position in its results
        self.makers: dict[int, tuple[int, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        argument_storages = set(map(storage_key, tensors_in((args, kwargs))))
        writable = _writer(func, args, kwargs) is not None
        out = func(*args, **kwargs)
        results = list(tensors_in(out))
        created = [
            position
            for position, tensor in enumerate(results)
            if storage_key(tensor) not in argument_storages
        ]
        for position in created:
            self.makers.setdefault(storage_key(results[position]), (len(self.calls), position))
        makes_views = bool(results) and not created and not func._schema.is_mutable
        computes = not makes_views and func not in _ALLOCATING
        self.calls.append(_WatchedCall(func, writable, computes, results))
        return out


class _Redirecting(TorchDispatchMode):
    """Writes the results of selected aten calls to given tensors. `into`: index of the call in the
    pass -> tensors.
    """

    def __init__(self, into: Mapping[int, Sequence[torch.Tensor]]) -> None:
        super().__init__()
        self._into, self._calls = into, itertools.count()
        self.writes: list[Pass] = []  # the calls that were redirected, to be repeated

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (results := self._into.get(next(self._calls))) is None:
            return func(*args, **kwargs)
        write = _writer(func, args, kwargs)
        assert write is not None, "a writer for this call was found when the call was recorded"
        self.writes.append(functools.partial(write, results))
        return write(results)


def _redirected(rebuilt: Rebuilt, into: Mapping[int, Sequence[torch.Tensor]]) -> object:
    with _Redirecting(into):
        return rebuilt.run()


def _direct(rebuilt: Rebuilt, into: Mapping[int, Sequence[torch.Tensor]]) -> Pass:
    """Return a pass that only calls the writers of the outputs. The other calls of the operator do
    not compute. Their views stay valid: the tensors of `rebuilt` and `into` keep their memory."""
    with _Redirecting(into) as redirecting:
        output = rebuilt.run()

    def run() -> object:
        for write in redirecting.writes:
            write()
        return output

    return run


def _writer(func: Any, args: Any, kwargs: Any) -> Write | None:
    """Return a function that runs an operator into given tensors; None if the operator always
    allocates its results.
    """
    if (rule := _RULES.get(func)) is not None:
        return rule(*args, **kwargs)
    like = next(tensors_in((args, kwargs)), None)
    variant = _out_variant(
        func, "CUDA" if like is not None and like.device.type == "cuda" else "CPU"
    )
    if variant is None:
        return None
    overload, names = variant
    return lambda outs: overload(*args, **kwargs, **dict(zip(names, outs, strict=True)))


_ALLOCATING = frozenset({_aten.empty.memory_format, _aten.empty_strided.default})

#: Operators whose out-variants crash the process: torch 2.11 fails an assertion in
#: pyobject_preservation.cpp.
_CRASHING = frozenset({_aten.cudnn_batch_norm.default})


@functools.cache
def _out_variant(func: Any, key: str) -> tuple[Any, tuple[str, ...]] | None:
    """Return the out-variant of an operator and the names of its out-arguments; None if it does not
    run the kernel.
    """
    names = [argument.name for argument in func._schema.arguments]
    packet = getattr(func, "overloadpacket", None)
    if func in _CRASHING or packet is None or func.namespace != "aten":
        return None
    for name in packet.overloads():
        variant = registered(f"{packet.__name__}.{name}")
        if torch.Tag.generated in variant.tags:
            continue
        written = [argument.name for argument in variant._schema.arguments if argument.is_out]
        inputs = [argument.name for argument in variant._schema.arguments if not argument.is_out]
        same = inputs == names and len(written) == len(func._schema.returns) > 0
        if same and torch._C._dispatch_has_kernel_for_dispatch_key(variant.name(), key):  # type: ignore[attr-defined]
            return variant, tuple(written)
    return None


def _convolution(
    image: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *more: Any
) -> Write | None:
    """Return a writer for a convolution with cuDNN or the depthwise kernel; None if
    `at::convolution` runs another.

    ``more``: stride, padding, dilation, transposed, output_padding, groups.
    """
    stride, padding, dilation, _, _, groups = more
    if image.device.type != "cuda" or image.dim() not in (4, 5):
        return None
    backend = torch._C._select_conv_backend(image, weight, bias, *more, None)  # type: ignore[attr-defined]
    backends = torch._C._ConvBackend  # type: ignore[attr-defined]
    if backend == backends.CudaDepthwise2d:
        return lambda outs: _aten._conv_depthwise2d.out(
            image.contiguous(),
            weight,
            list(weight.shape[2:]),
            bias,
            stride,
            padding,
            dilation,
            out=outs[0],
        )
    if backend != backends.Cudnn:
        return None
    cudnn = torch.backends.cudnn

    def write(outs: Sequence[torch.Tensor]) -> torch.Tensor:
        last = torch.channels_last if image.dim() == 4 else torch.channels_last_3d
        form = torch.contiguous_format if outs[0].is_contiguous() else last
        factors = (image.contiguous(memory_format=form), weight.contiguous(memory_format=form))
        flags = (cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32)
        _aten.cudnn_convolution.out(
            *factors, padding, stride, dilation, groups, *flags, out=outs[0]
        )
        if bias is not None:
            outs[0].add_(bias.reshape([1, -1] + [1] * (image.dim() - 2)))
        return outs[0]

    return write


#: Operators without an out-variant -> function that returns a writer with an equivalent operator.
_RULES: Mapping[Any, Callable[..., Write | None]] = {
    _aten.convolution.default: _convolution,
    _aten.clone.default: lambda source, **_: lambda outs: outs[0].copy_(source),
    _aten._to_copy.default: lambda source, **_: lambda outs: outs[0].copy_(source),
    _aten.relu.default: lambda source: lambda outs: _aten.clamp_min.out(source, 0, out=outs[0]),
    _aten._adaptive_avg_pool2d.default: lambda source, size: (
        None
        if source.device.type == "cpu"
        else lambda outs: _aten.adaptive_avg_pool2d.out(source, size, out=outs[0])
    ),
}

_SEGMENT_BYTES = 20 * 2**20  # the caching allocator's request for a tensor between 1 and 10 MiB
_ALIGNED_BYTES = 2 * 2**20
_SETTLES = 3
_TRIES = 8
_MIXED = (
    "The output cannot be in slow memory: it cannot be told apart from the workspaces in the "
    "allocator's pool."
)


class _Pool:
    """A CUDA memory pool that serves some requests with slow memory. `slow`: index of the request
    -> slow memory.
    """

    def __init__(
        self, device: torch.device, fast_bytes: int, slow: Mapping[int, torch.UntypedStorage]
    ) -> None:
        """``fast_bytes`` is the size of the fast memory that serves all other requests."""
        self.requests: list[tuple[int, int]] = []  # address and size
        self._slow, self._device = slow, device
        self._room = torch.empty(fast_bytes + _ALIGNED_BYTES, dtype=torch.uint8, device=device)
        # The address must differ from the room's address, by which the caching allocator finds the
        # block to free.
        self._next = (self._room.data_ptr() // _ALIGNED_BYTES + 1) * _ALIGNED_BYTES
        here = weakref.ref(self)  # a weak reference, because the callbacks live forever

        def allocate(size_bytes: int, *_: Any) -> int | None:
            return pool._allocate(size_bytes) if (pool := here()) is not None else None

        arguments = (ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)  # size, device, stream
        take = ctypes.CFUNCTYPE(ctypes.c_void_p, *arguments)(allocate)
        # This object owns the memory, so the callback frees nothing.
        give = ctypes.CFUNCTYPE(None, ctypes.c_void_p, *arguments)(lambda *_: None)
        addresses = [ctypes.cast(function, ctypes.c_void_p).value or 0 for function in (take, give)]
        allocator = torch._C._cuda_customAllocator(*addresses)
        # A destroyed pool still calls them to free memory: they stay until the process ends.
        kept = (take, give, allocator)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
        try:
            # each request serves one tensor
            self.pool = torch.cuda.MemPool(allocator, no_split=True)
        except TypeError:  # older torch
            self.pool = torch.cuda.MemPool(allocator)

    def _allocate(self, size_bytes: int) -> int | None:
        if (
            storage := self._slow.get(len(self.requests))
        ) is not None and storage.nbytes() >= size_bytes:
            address = storage.data_ptr()
        elif self._next + size_bytes <= self._room.data_ptr() + self._room.nbytes:
            address = self._next
            self._next += -(-size_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
        else:
            return None
        self.requests.append((address, size_bytes))
        return address

    def run(self, one: Pass) -> object:
        # the graph already allocates from `Outputs.pool`
        if torch.cuda.is_current_stream_capturing():
            return one()
        with torch.cuda.use_mem_pool(self.pool, self._device):
            return one()

    def request_of(self, tensor: torch.Tensor) -> int | None:
        address = tensor.untyped_storage().data_ptr()
        places = (
            place
            for place, (first, size) in enumerate(self.requests)
            if first <= address < first + size
        )
        return next(places, None)


def _pooled(rebuilt: Rebuilt, numbers: Sequence[int], memory: SlowMemory) -> Outputs:
    device = rebuilt.device
    input_storages = frozenset(map(storage_key, rebuilt.inputs))
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_stats(device)
    rebuilt.run()
    torch.cuda.synchronize(device)
    after = torch.cuda.memory_stats(device)
    allocations = after["allocation.all.allocated"] - before["allocation.all.allocated"]
    peak_bytes = after["allocated_bytes.all.peak"] - before["allocated_bytes.all.current"]
    fast_bytes = 2 * peak_bytes + (2 * allocations + 1) * _SEGMENT_BYTES

    first = _Pool(device, fast_bytes, {})
    outputs = _settled(first, rebuilt, input_storages)
    number_of_outputs = len(outputs)
    places = []
    for number in numbers:
        place = first.request_of(outputs[number])
        if place is None:
            text = "The output cannot be in slow memory: PyTorch's allocator does not allocate it."
            raise Unmeasurable("not_available", text)
        places.append(place)
    sizes = [size for _, size in first.requests]
    del outputs, first
    storages = [memory.storage(sizes[place]) for place in places]

    def separated(output: object, one: Rebuilt) -> bool:
        """True if the wanted outputs and no others are in slow memory."""
        slow = []
        for number, tensor in enumerate(
            new_storages(output, frozenset(map(storage_key, one.inputs)))
        ):
            address = tensor.untyped_storage().data_ptr()
            if any(
                storage.data_ptr() <= address < storage.data_ptr() + storage.nbytes()
                for storage in storages
            ):
                slow.append(number)
        return slow == sorted(numbers)

    for chosen in itertools.islice(_alike(places, sizes), _TRIES):
        pool = _Pool(device, fast_bytes, dict(zip(chosen, storages, strict=True)))
        if separated(_settled(pool, rebuilt, input_storages), rebuilt):
            break
    else:
        raise Unmeasurable("not_available", _MIXED)

    def run(one: Rebuilt) -> object:
        output = pool.run(one.run)
        if not separated(output, one):
            raise Unmeasurable("not_available", _MIXED)
        return output

    # A request serves the output alone if nothing else was allocated, or each allocation had one.
    alone = allocations == number_of_outputs or len(sizes) == allocations
    return Outputs(
        lambda one: functools.partial(run, one),
        "fast" if alone else "may be with the output",
        pool.pool,
    )


def _settled(pool: _Pool, rebuilt: Rebuilt, input_storages: frozenset[int]) -> list[torch.Tensor]:
    """Run a few passes until the pool reuses its freed blocks, and return the outputs of the last
    pass.
    """
    for _ in range(_SETTLES):
        output = None  # frees the memory of the previous pass
        output = pool.run(rebuilt.run)
    torch.cuda.synchronize(rebuilt.device)
    return new_storages(output, input_storages)


def _alike(places: Sequence[int], sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield candidates for the requests of the outputs: first the observed requests, then others of
    the same size.
    """
    same = [
        sorted(
            (place for place, size in enumerate(sizes) if size == sizes[output_place]),
            key=lambda place: place != output_place,
        )
        for output_place in places
    ]
    return (chosen for chosen in itertools.product(*same) if len(set(chosen)) == len(chosen))
