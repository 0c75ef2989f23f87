"""What a job gets where nothing was said."""

import pytest

from farm.errors import UsageError
from farm.requests.partial_request import PartialRequest, complete, operator_names
from farm.types.request import Request, Sweep
from farm.types.variant import Variant


def test_a_gpu_gets_a_large_batch_in_graphs_and_a_cpu_a_small_one_eagerly():
    on_gpu = complete(PartialRequest(model="resnet18", input_size=224), "cuda", target=0.9)
    on_cpu = complete(PartialRequest(model="resnet18", input_size=224), "cpu", target=0.9)
    assert (on_gpu.variant.batch, on_gpu.protocol.launch) == (32, "graph")
    assert (on_cpu.variant.batch, on_cpu.protocol.launch) == (4, "eager")
    assert on_cpu.stopping.maximum_s < on_gpu.stopping.maximum_s
    assert on_gpu.target == 0.9


def test_what_was_said_wins_also_when_it_is_false_or_zero():
    below = PartialRequest(batch=8, tf32=True, warm_up_s=1.0)
    assert PartialRequest(tf32=False, warm_up_s=0.0).over(below) == PartialRequest(
        batch=8, tf32=False, warm_up_s=0.0
    )


@pytest.mark.parametrize(
    ("partial", "kind", "message"),
    [
        (PartialRequest(model="resnet18", batch=0), "cuda", "batch is 0"),
        (PartialRequest(model="resnet18", dtype="int3"), "cuda", "dtype 'int3' is unknown"),
        (PartialRequest(model="resnet18", launch="graph"), "cpu", "no CUDA graphs"),
        (PartialRequest(model="resnet18", maximum_s=0.0), "cpu", "maximum_s is 0.0"),
        (
            PartialRequest(model="resnet18", minimum_s=3.0, maximum_s=1.0),
            "cpu",
            "longer than the longest",
        ),
        (PartialRequest(model="resnet18", target=1.5), "cpu", "The target is 1.5"),
        (PartialRequest(model="vit_b_16", input_size=160), "cpu", "takes images of 224 px only"),
        (PartialRequest(model="resnet18", input_size=0), "cpu", "not 0 px"),
        (PartialRequest(), "cpu", "A job needs either a model or a sweep"),
        (PartialRequest(model="resnet18", within=0.01), "cpu", "--within and --budget need a GPU"),
        (
            PartialRequest(model="resnet18", within=1.0),
            "cuda",
            "--within is 1; it must be above 0 and below 1",
        ),
        (PartialRequest(model="resnet18", budget_s=-1.0), "cuda", "--budget is -1"),
        (
            PartialRequest(model="resnet18", within=0.01, budget_s=60.0),
            "cuda",
            "both decide how precise",
        ),
        (
            PartialRequest(model="resnet18", within=0.01, placements="all"),
            "cuda",
            "does not work with --placements",
        ),
        (
            PartialRequest(sweep=Sweep("ReLU", {"shape": (1,)}), budget_s=60.0),
            "cuda",
            "a sweep has none",
        ),
    ],
)
def test_wrong_values_are_named(partial, kind, message):
    with pytest.raises(UsageError) as caught:
        complete(partial, kind, target=0.95)
    assert message in caught.value.message
    assert caught.value.next_step


def test_operator_names_are_split_and_kept_in_order():
    assert operator_names("Conv2d, Linear,Conv2d") == ("Conv2d", "Linear")
    with pytest.raises(UsageError, match="mixes 'auto'"):
        operator_names("auto,Conv2d")


def test_the_command_that_repeats_a_reading_of_somebodys_own_text_asks_for_the_text():
    variant = Variant("bert-base", 2, 0, length=8, phase="encode", text="0" * 32)
    assert " --text FILE --tokenizer FOLDER " in Request(variant=variant).command()
