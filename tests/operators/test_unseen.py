"""A model whose operators run where a capture does not see them is refused, with the line of the
user's code.
"""

import concurrent.futures
import queue
import threading

import pytest
import torch
from torch import nn

import farm
from farm.errors import CaptureError, UnseenOperators
from farm.operators.capture import capture
from farm.operators.profiler import verify_on_device
from farm.training.capture import capture_step
from farm.training.step import TrainingStep, loss_of

VALUES = torch.randn(4, 8)


class Model(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, values):
        return self.function(self, values)


def model(function):
    return Model(function).eval()


# ---- threads


@pytest.fixture(scope="module", autouse=True)
def workers():
    """A pool and a thread with a queue that exist before any capture."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        Workers.pool = pool
        pool.submit(int).result()
        thread = threading.Thread(target=Workers.work)
        thread.start()
        yield
        Workers.asked.put(None)
        thread.join()


class Workers:
    pool: concurrent.futures.ThreadPoolExecutor
    asked: queue.Queue = queue.Queue()
    done: queue.Queue = queue.Queue()

    @classmethod
    def work(cls):
        while (call := cls.asked.get()) is not None:
            cls.done.put(call())

    @classmethod
    def ask(cls, call):
        cls.asked.put(call)
        return cls.done.get()


def branches(model, values):
    results = {}

    def run(name):
        results[name] = getattr(model, name)(values)  # here

    threads = [threading.Thread(target=run, args=(name,)) for name in ("first", "second")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results["first"] + results["second"]


def function_in_thread(model, values):
    results = []
    thread = threading.Thread(target=lambda: results.append(values @ model.weight))  # here
    thread.start()
    thread.join()
    return results[0] + 1


def noise_in_thread(model, values):
    results = []
    thread = threading.Thread(target=lambda: results.append(torch.randn(8, 8) * 2))  # here
    thread.start()
    thread.join()
    return values @ results[0]


def new_pool(model, values):
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        return sum(pool.map(lambda layer: layer(values), [model.first, model.second]))  # here


def old_pool(model, values):
    return Workers.pool.submit(lambda: values @ model.weight).result() + 1  # here


def old_thread(model, values):
    return Workers.ask(lambda: values @ model.weight) + 1  # here


def old_thread_in_place(model, values):
    made = torch.zeros(4, 8)
    Workers.ask(lambda: made.copy_(values @ model.weight))  # here
    return made + 1


def reads_a_value(model, values):
    """It cannot run on fake tensors."""
    return values if values.sum() > 1e9 else old_pool(model, values)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    "function",
    [
        branches,
        function_in_thread,
        noise_in_thread,
        new_pool,
        old_pool,
        old_thread,
        old_thread_in_place,
        reads_a_value,
    ],
)
def test_operators_of_another_thread_are_refused(function, grad):
    with pytest.raises(
        UnseenOperators, match=r"another thread \(.*test_unseen.py, line \d+: .*# here\)"
    ) as caught:
        farm.capture_model(model(function), VALUES, grad=grad)
    assert "in the thread that calls the model" in caught.value.next_step


def without_operators(model, values):
    shapes = []
    thread = threading.Thread(target=lambda: shapes.append(values.shape))
    thread.start()
    thread.join()
    return model.first(values.view(shapes[0]))


def forked(model, values):
    """PyTorch runs it at once, in the same thread."""
    return torch.jit.wait(torch.jit.fork(model.first, values))


@pytest.mark.parametrize("function", [without_operators, forked])
def test_another_thread_without_operators_is_no_reason(function):
    found = farm.capture_model(model(function), VALUES)
    assert [spec.short_name for spec in found.tuples] == ["Linear"]


def test_another_thread_may_call_other_models():
    other, ended = nn.Linear(8, 8), threading.Event()

    def serve():
        while not ended.is_set():
            other(VALUES)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        found = farm.capture_model(nn.Sequential(*(nn.Linear(8, 8) for _ in range(20))), VALUES)
    finally:
        ended.set()
        thread.join()
    assert found.counts == {found.tuples[0].id: 20}


def test_threads_and_pools_are_as_before():
    before = threading.Thread.start, concurrent.futures.ThreadPoolExecutor.submit
    with pytest.raises(UnseenOperators):
        capture(model(branches), (VALUES,))
    assert (threading.Thread.start, concurrent.futures.ThreadPoolExecutor.submit) == before
    assert torch.equal(Workers.pool.submit(lambda: VALUES + 1).result(), VALUES + 1)


def test_a_verification_on_a_device_is_refused():
    with pytest.raises(UnseenOperators, match="in another thread"):
        verify_on_device(model(branches), (VALUES,), "cpu")


def test_a_training_step_is_refused():
    step = TrainingStep(
        model(old_pool).train(),
        (VALUES,),
        optimizer="sgd",
        make_loss=lambda output: loss_of(
            output, causal=False, masked=False, device=torch.device("cpu")
        ),
    )
    with pytest.raises(UnseenOperators, match="in another thread"):
        capture_step(step)


# ---- compiled functions


class Backend:
    """A backend of torch.compile that counts the graphs that it gets."""

    def __init__(self):
        self.graphs = 0

    def __call__(self, graph, _):
        self.graphs += 1
        return graph.forward


backend = Backend()


def product(values, weight):
    return torch.sin(values @ weight)


def compiled_once(**options):
    """A compiled function of its own, so that each test sees it compiled."""

    def function(values, weight):
        return product(values, weight)

    return torch.compile(function, backend=backend, **options)


def helper(**options):
    function = compiled_once(**options)
    return lambda model, values: function(values, model.weight)  # here


def module_outside_of_the_model():
    layer = torch.compile(nn.Sequential(nn.Linear(8, 8)), backend=backend)
    return lambda model, values: layer(values)  # here


def compiled_in_the_pass():
    def run(model, values):
        compiled = torch.compile(product, backend=backend)
        return compiled(values, model.weight)  # here

    return run


def with_a_value():
    function = compiled_once()

    def run(model, values):
        if values.sum() > 1e9:
            return values
        return function(values, model.weight)  # here

    return run


@pytest.mark.parametrize(
    "make",
    [
        helper,
        lambda: helper(fullgraph=True),
        module_outside_of_the_model,
        compiled_in_the_pass,
        with_a_value,
    ],
)
def test_a_compiled_function_is_refused_and_stays_compiled(make):
    net = model(make())
    before = backend.graphs
    with pytest.raises(
        UnseenOperators, match=r"compiled \(.*test_unseen.py, line \d+: .*# here\)"
    ) as caught:
        farm.capture_model(net, VALUES)
    assert "--compile" in caught.value.next_step
    assert backend.graphs == before
    net(VALUES)
    assert backend.graphs > before, "the user's function is not compiled after a capture"
    torch.compiler.reset()


def test_a_compiled_function_is_captured_if_the_user_switches_the_compiler_off():
    net = model(helper())
    with torch.compiler.set_stance("force_eager"):
        found = farm.capture_model(net, VALUES)
    assert [spec.short_name for spec in found.tuples] == ["matmul", "sin"]


def test_a_function_that_is_excluded_from_compilation_is_captured():
    function = torch.compiler.disable(product)
    found = farm.capture_model(model(lambda model, values: function(values, model.weight)), VALUES)
    assert [spec.short_name for spec in found.tuples] == ["matmul", "sin"]


def compiled_in_place(module):
    module.compile(backend=backend)
    return module


@pytest.mark.parametrize(
    "net",
    [
        torch.compile(nn.Linear(8, 8), backend=backend),
        nn.Sequential(torch.compile(nn.Linear(8, 8), backend=backend)),
        compiled_in_place(nn.Linear(8, 8)),
        nn.Sequential(compiled_in_place(nn.Linear(8, 8))),
    ],
    ids=["the model", "a part", "in place", "a part in place"],
)
def test_a_compiled_module_is_refused(net):
    with pytest.raises(CaptureError, match="is compiled") as caught:
        farm.capture_model(net.eval(), VALUES)
    assert "--compile" in caught.value.next_step


# ---- a padding mask


class Padded(nn.Module):
    def __init__(self, **options):
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, **options)

    def forward(self, values, mask):
        return self.encoder(values, src_key_padding_mask=mask)


def mask_of(hidden):
    mask = torch.zeros(2, 8, dtype=torch.bool)
    mask[1, hidden] = True
    return mask


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_of_an_encoder_are_refused_with_a_way_out():
    with pytest.raises(CaptureError, match="nested tensor") as caught:
        farm.capture_model(Padded().eval(), (torch.randn(2, 8, 32), mask_of(slice(4, None))))
    assert "enable_nested_tensor=False" in caught.value.next_step


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    ("options", "hidden"), [({"enable_nested_tensor": False}, slice(4, None)), ({}, slice(None, 4))]
)
def test_an_encoder_with_a_mask_runs_the_same_observed(options, hidden):
    inputs = torch.randn(2, 8, 32), mask_of(hidden)
    found = farm.capture_model(Padded(**options).eval(), inputs)
    assert [spec.short_name for spec in found.tuples].count("TransformerEncoderLayer") == 1
    assert verify_on_device(Padded(**options).eval(), inputs, "cpu").differences == []
