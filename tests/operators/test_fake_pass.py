"""In a pass that computes nothing small integers keep their values, and a model that reads them
goes the way that it runs."""

import pytest
import torch
from torch import nn

from farm.errors import CaptureError
from farm.operators import self_check
from farm.operators.capture import capture, predict
from farm.operators.fake_pass import MOST_BYTES, MOST_MADE_BYTES


class _Model(nn.Module):
    def __init__(self, function, **held):
        super().__init__()
        self.function = function
        self.linear = nn.Linear(4, 4)
        for name, value in held.items():
            setattr(self, name, value)

    def forward(self, *inputs):
        return self.function(self, *inputs)


def alike(function, *inputs, **held):
    """The prediction, which is what runs; inputs and what is held are left as they were."""
    model = _Model(function, **held).eval()
    before = [value.clone() for value in inputs]
    predicted = predict(model.to_empty(device="meta") if not held else model, inputs)
    assert all(map(torch.equal, before, inputs))
    ran = capture(_Model(function, **held).eval(), inputs)
    assert [call.tuple_id for call in predicted.calls] == [call.tuple_id for call in ran.calls]
    assert [(call.reads, call.writes) for call in predicted.calls] == [
        (call.reads, call.writes) for call in ran.calls
    ]
    assert not predicted.gaps
    assert not predicted.overlaps
    return [predicted.tuples[call.tuple_id].short_name for call in predicted.calls]


X = torch.randn(2, 6, 4)


def _masked(model, x, mask):
    x = model.linear(x)
    return x if mask.bool().all() else x.masked_fill(mask[:, :, None] == 0, 0)


def _until(model, x, length):
    return model.linear(x[:, : length.max() + 1])


def _marked(model, x, mask):
    return model.linear(x[mask.bool()])


def _placed(model, x, mask):
    x[mask.bool()] = 0
    return torch.where(mask.bool())[0] + 1


def _listed(model, x, sizes):
    return [model.linear(part) for part in x.split([int(size) for size in sizes], dim=1)]


def _divided(model, x, ids):
    chunks = torch.div(x.shape[1], 2, rounding_mode="trunc")
    return x.new_zeros(x.shape[0], chunks + 1), x.view(2, chunks, -1)


def _counted(model, x, ids):
    ids += 1  # its own, not those that were given
    out = x.repeat_interleave(ids.sum(-1), dim=0), 3 in ids
    ids -= 1  # each pass must cost the same
    return out


@pytest.mark.parametrize(
    ("function", "values"),
    [
        (_masked, torch.ones(2, 6, dtype=torch.long)),
        (_masked, torch.eye(2, 6, dtype=torch.long)),
        (_until, torch.tensor([3, 1])),
        (_marked, torch.eye(2, 6, dtype=torch.long)),
        (_placed, torch.eye(2, 6, dtype=torch.long)),
        (_listed, torch.tensor([1, 2, 3])),
        (_divided, torch.tensor([1])),
        (_counted, torch.tensor([[1, 2], [0, 1]])),
    ],
)
def test_what_is_read_decides_as_when_it_runs(function, values):
    alike(function, X.clone(), values)


def test_a_tensor_in_the_place_of_a_number_is_read_by_a_call_of_its_own():
    assert alike(_until, X, torch.tensor([3, 1])) == ["max", "add", "item", "Linear"]


def test_what_is_kept_is_a_plain_tensor():
    seen = []
    alike(
        lambda model, x, ids: seen.append((type(x + 1), type(ids + 1), type(torch.arange(3)))),
        X,
        torch.ones(2).long(),
    )
    assert seen[0][1:] == (torch.Tensor, torch.Tensor)
    assert seen[0][0] is not torch.Tensor


def test_views_of_one_memory_stay_views_of_one():
    ids = torch.arange(12).view(2, 6)

    def both(model, first, second):
        first.add_(1)
        return second + 1 if second.max() >= 6 else second - 1

    found = predict(_Model(both), (ids, ids[:1]))
    assert [found.tuples[call.tuple_id].short_name for call in found.calls][-1] == "add"
    assert found.calls[0].writes == found.calls[1].reads[:1]


def test_what_a_fake_tensor_was_written_to_is_known_no_more():
    def overwritten(model, x, ids):
        ids[:, 0] = x[:, 0, 0].long()
        return ids[:, 1:].max().item()

    model = _Model(overwritten)
    with pytest.raises(CaptureError, match="_local_scalar_dense"):
        predict(model, (X, torch.ones(2, 6).long()))


def test_large_tensors_and_random_ones_are_not_computed():
    side = int(MOST_MADE_BYTES**0.5) + 1
    large = _Model(lambda model, x: torch.ones(side, side, dtype=torch.bool).all().item())
    given = _Model(lambda model, x: x.max().item())
    drawn = _Model(lambda model, x: torch.randint(9, (3,)).max().item())
    state = torch.random.get_rng_state()
    for model, x in (
        (large, X),
        (given, torch.zeros(MOST_BYTES + 1, dtype=torch.int8)),
        (drawn, X),
    ):
        with pytest.raises(CaptureError, match="_local_scalar_dense"):
            predict(model, (x,))
    assert torch.equal(state, torch.random.get_rng_state())


class _Cache:
    def __init__(self):
        self.layers = [{"keys": torch.zeros(2, 8, 4), "used": torch.tensor(3)}]
        self.itself = self


def test_an_empty_tensor_may_be_resized_to_be_like_another():
    def forward(model, values):
        made = values.new()
        made.resize_as_(values)
        torch.mul(values, values, out=made)
        return values.new().resize_(2, 4).copy_(made)

    assert alike(forward, torch.randn(2, 4)) == ["mul", "copy_"]


def test_objects_that_hold_tensors_stand_in_and_stay_as_they_were():
    def cached(model, x):
        layer = model.cache.itself.layers[0]
        layer["keys"].index_copy_(1, torch.arange(6 - 4) + layer["used"], model.linear(x[:, :2]))
        layer["used"].fill_(5)
        return layer["keys"][:, : int(layer["used"])].relu()

    cache = _Cache()
    model = _Model(cached, cache=cache).eval()
    predicted = predict(model, (X,))
    assert model.cache is cache
    assert int(cache.layers[0]["used"]) == 3
    assert not cache.layers[0]["keys"].any()
    assert [call.tuple_id for call in predicted.calls] == [
        call.tuple_id for call in capture(model, (X,)).calls
    ]
    assert predicted.tuples[predicted.calls[-1].tuple_id].input_shapes == ((2, 5, 4),)


@torch.jit.script
def scripted(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x) + 1


def test_a_scripted_function_is_looked_into():
    assert alike(lambda model, x: scripted(x), X) == ["relu", "add"]


def _both(model, x, ids):
    on_card = torch.arange(4, device=ids.device) + x.new_tensor([1.0, 2, 3, 4])
    on_host = torch.arange(4) * torch.tensor(2).sqrt()
    return on_card + on_host.to(x.device).exp() + ids.to(x.device)[0, :4].type_as(ids).neg()


def test_a_prediction_for_a_card_leaves_out_what_the_host_computes():
    found = predict(_Model(_both), (X, torch.ones(2, 6, dtype=torch.long)), device_type="cuda")
    names = [found.tuples[call.tuple_id].short_name for call in found.calls]
    assert names == ["arange", "add", "exp", "add", "neg", "add"]
    assert found.device_type == "cpu"


class AsksForTheDevice(nn.Module):
    """Runs other operators on a card than on a CPU, as the experts of transformers."""

    def forward(self, x):
        made = torch.ones(4, device=x.device) + torch.arange(4).to(x.device, x.dtype)
        moved = torch.zeros(4).to(x.device) + torch.tensor(2.0, device=x.device)
        places = (x + made + moved).topk(2).indices
        is_card = x.is_cuda and not x.is_cpu and x.get_device() == 0
        is_card = is_card and x.device.type == places.device.type == "cuda"
        is_card = is_card and torch.cuda.get_device_capability(x.device) >= (8, 0)
        counted = places.int() if is_card else places.float()
        return torch.histc(counted, bins=4, min=0, max=3).cumsum(0)


@pytest.mark.parametrize(("device_type", "dtype"), [("cpu", torch.float32), ("cuda", torch.int32)])
def test_a_model_that_asks_for_the_device_sees_the_card(device_type, dtype):
    found = predict(AsksForTheDevice(), (torch.zeros(4),), device_type=device_type)
    assert found.gaps == ()
    histogram = next(spec for spec in found.tuples.values() if spec.short_name == "histc")
    assert histogram.tensors[0].dtype == str(dtype).removeprefix("torch.")
    assert self_check.checked(found, device_type).mismatches == {}


def test_a_model_on_the_host_sees_the_host_in_a_pass_on_a_card():
    class OnHost(nn.Module):
        def forward(self, x):
            on_host = torch.arange(4)
            assert not on_host.is_cuda
            assert on_host.device.type == "cpu"
            return x + on_host.to(x.device)

    predict(OnHost(), (torch.zeros(4),), device_type="cuda")


def test_autocast_of_a_card_is_predicted_on_a_host_without_one():
    class Mixed(nn.Linear):
        def forward(self, x):
            with torch.autocast(x.device.type, torch.bfloat16, enabled=True):
                return super().forward(x)

    found = predict(Mixed(4, 4), (torch.zeros(2, 4),), device_type="cuda")
    assert found.gaps == ()
    product = next(spec for spec in found.tuples.values() if spec.short_name == "addmm")
    assert {tensor.dtype for tensor in product.tensors} == {"bfloat16"}


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x * 2

    @staticmethod
    def backward(context, gradient):
        return gradient * 2


def test_autograd_itself_does_not_see_the_card():
    class Custom(nn.Linear):
        def forward(self, x):
            return Twice.apply(super().forward(x))

    found = predict(Custom(4, 4), (torch.zeros(2, 4),), device_type="cuda", grad_enabled=True)
    assert [spec.short_name for spec in found.tuples.values()] == ["linear", "mul"]


def _scanned(model, x):
    """Each step reads other places of the input, so its views differ."""
    state, states = x[:, 0], []
    for step in range(x.shape[1]):
        left, right = x[:, step].chunk(2, -1)
        state = state * model.linear.weight[0] + torch.cat([right, left], -1)
        states.append(state.t().unsqueeze(0))
    return torch.cat(states)


def test_views_of_other_places_are_those_of_a_pass_with_values():
    assert alike(_scanned, X).count("cat") == 7


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[1, :, 1::2],
        lambda x: x.transpose(0, 2)[1:],
        lambda x: x.unbind(1)[3],
        lambda x: x.expand(3, 2, 6, 4)[2],
        lambda x: x.diagonal(0, 1, 2),
        lambda x: x.as_strided((2, 2), (4, 1), 3),
        lambda x: x.view(torch.int32),
        lambda x: torch.view_as_complex(x.view(2, 6, 2, 2)).conj(),
    ],
)
def test_a_view_of_a_fake_tensor_is_that_of_a_real_one(view):
    found = []

    def viewed(_, x):
        made = view(x)
        found.append((made.shape, made.stride(), made.storage_offset(), made.dtype, made.is_conj()))
        return made + made

    alike(viewed, X)
    assert found[0] == found[1]
