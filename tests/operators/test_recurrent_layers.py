"""The recurrent layers of cuDNN trust sizes of weights and steps, so a tuple's are compared first."""

import pytest

from farm.errors import TupleRejected
from farm.operators.output_sizes import trial
from farm.operators.rebuild import rebuild
from farm.types.tuple import OperatorTuple, TensorSpec

LSTM, GRU = 2, 3


def floats(*shape, storage):
    return TensorSpec("activation", "", shape, "float32", storage=storage)


def layer(*, steps=(), rows=(5, 3), hidden=4, mode=LSTM, gates=4, weights=4, input_size=6):
    """A layer of cuDNN with an input of so many rows, in train mode."""
    shapes = [(gates * hidden, input_size), (gates * hidden, hidden), *[(gates * hidden,)] * 2]
    tensors = [floats(*rows, 6, storage=0)]
    tensors += [floats(*shape, storage=number + 1) for number, shape in enumerate(shapes[:weights])]
    batch = steps[0] if steps else rows[-1]
    tensors += [floats(1, batch, hidden, storage=number) for number in (weights + 1, weights + 2)]
    names = [{"tensor": number} for number in range(len(tensors))]
    state = names[-1] if mode == LSTM else None
    arguments = (
        *(names[0], names[1 : weights + 1], weights, None, names[-2], state, mode, hidden, 0),
        *(1, False, 0.0, True, False, list(steps), None),
    )
    if state is None:
        tensors.pop()
    return OperatorTuple("aten._cudnn_rnn.default", "aten", {}, arguments, {}, tuple(tensors))


@pytest.mark.parametrize(
    "spec",
    [layer(), layer(weights=2), layer(mode=GRU, gates=3), layer(rows=(9,), steps=(4, 3, 2))],
    ids=["LSTM", "without biases", "GRU", "packed"],
)
def test_a_layer_is_known_on_meta(spec):
    assert trial(spec).new_bytes > 0


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (layer(gates=3), "the weight 0 has the shape"),
        (layer(input_size=5), "the weight 0 has the shape"),
        (layer(weights=1), "the layer has 1 weights"),
        (layer(mode=7), "no valid mode"),
        (layer(hidden=0), "no valid mode or size"),
        (layer(rows=(9,), steps=(4, 3, 3)), "steps of the packed sequence"),
        (layer(rows=(9,), steps=(2, 3, 4)), "steps of the packed sequence"),
        (layer(rows=(9,), steps=(9, 1, -1)), "steps of the packed sequence"),
        (layer(rows=(9,)), "the input has 2 dimensions"),
    ],
)
def test_sizes_that_do_not_belong_together_are_refused(spec, why):
    with pytest.raises(TupleRejected, match=why):
        rebuild(spec, "meta")
