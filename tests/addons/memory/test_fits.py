"""Whether a module fits: its tensors, checked with measured peaks, and the largest batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from sqlmodel import select
from torch import nn

import farm
from farm.addons.memory.fits import CONTEXT_BYTES, most_bytes
from farm.addons.memory.step_memory import largest_batch
from farm.errors import CaptureError, UsageError
from farm.exchange.packaged import packaged_database
from farm.models import catalog
from farm.store import tables
from farm.training.module_memory import batch_of, pass_of, step_of, with_batch
from farm.training.tensor_lifetime import allocated_peak_bytes
from farm.types.details import Details
from tests.types.test_card_file import CARD


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.head = nn.Linear(16, 10)

    def forward(self, image, scale=1.0):
        return self.head(torch.relu(self.norm(self.conv(image * scale))).mean((2, 3)))


def measured_use(variant):
    """The memory that the packaged readings have of a whole model."""
    reading = tables.ReadingRow
    with packaged_database().read() as session:
        for row in session.exec(select(reading).where(reading.subject_id == variant.id)):
            use = Details.from_json(row.details).memory
            if use.activation_peak_bytes is not None:
                return use
    raise AssertionError(f"no peak of {variant} is packaged")


@pytest.mark.parametrize(
    ("name", "batch", "fields", "least"),
    [
        ("squeezenet1_1", 32, {}, 0.999),
        ("vgg11", 32, {}, 0.39),  # workspaces of its convolutions: 2.0 GB
        ("resnet18", 32, {}, 0.87),
        ("alexnet", 32, {}, 0.74),
        ("bert-base", 8, {"length": 512, "dtype": "bfloat16"}, 0.999),
        ("gpt2", 8, {"length": 1024, "dtype": "bfloat16", "phase": "prefill"}, 0.999),
    ],
)
def test_a_measured_peak_of_a_forward_pass_lies_between_both_ends(name, batch, fields, least):
    variant = catalog.variant(name, batch, **fields)
    use = measured_use(variant)
    resolved = catalog.resolve(name)
    inputs = resolved.meta_inputs(variant)
    input_bytes = sum(value.nbytes for value in inputs if isinstance(value, torch.Tensor))
    measured = use.parameter_bytes + use.activation_peak_bytes + input_bytes
    captured = pass_of(resolved.build(variant, device="meta"), inputs, {})
    tensors = allocated_peak_bytes(captured)
    assert least <= tensors / measured < 1.002
    assert measured < most_bytes(captured) - CONTEXT_BYTES


@pytest.mark.parametrize(
    ("name", "batch", "least"), [("alexnet", 128, 0.83), ("resnet18", 32, 0.86)]
)
def test_a_measured_peak_of_a_step_lies_between_both_ends(name, batch, least):
    variant = catalog.variant(name, batch, step="training")
    resolved = catalog.resolve(name)
    measured = measured_use(variant).allocated_peak_bytes
    model, inputs = resolved.build(variant, device="meta"), resolved.meta_inputs(variant)
    captured = step_of(model, inputs, {}, optimizer=variant.optimizer)
    assert least <= allocated_peak_bytes(captured) / measured < 1.002
    assert measured < most_bytes(captured) - CONTEXT_BYTES


def test_a_module_fits_and_is_unchanged():
    module, image = Net().eval(), torch.randn(2, 3, 32, 32)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    found = farm.fits(module, {"image": image}, card="RTX 4090", optimizer="sgd", amp="bfloat16")
    assert (found.card, found.card_bytes) == ("RTX 4090", 24_000_000_000)
    assert (found.inference.fits, found.training.fits) == (True, True)
    assert found.training.tensors_bytes > found.inference.tensors_bytes > 2 * 16 * 32 * 32 * 4
    assert not module.training
    after = module.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert all(parameter.grad is None for parameter in module.parameters())
    assert "inference with batch 2: fits" in str(found)
    assert found.to_json()["training"]["fits"] is True


def test_the_largest_batch_fits_and_a_larger_one_does_not(tmp_path):
    file = Path(tmp_path / "card.toml")
    file.write_text(CARD.replace("memory_gb = 24", "memory_gb = 1"))
    module, image = Net(), torch.randn(2, 3, 32, 32)
    inference = farm.fits(module, image, card=file).inference
    args = (image,)

    def most_of(batch):
        return most_bytes(pass_of(module, *with_batch((args, {}), batch)))

    assert most_of(inference.largest_batch) <= 1e9 < most_of(inference.largest_batch + 1)


def test_weights_that_do_not_fit_have_no_batch(tmp_path):
    file = Path(tmp_path / "card.toml")
    file.write_text(CARD.replace("memory_gb = 24", "memory_gb = 0.5"))
    with torch.device("meta"):
        module = nn.Linear(2**14, 2**14)
    found = farm.fits(module, torch.empty(4, 2**14, device="meta"), card=file)
    assert (found.inference.fits, found.inference.largest_batch) == (False, 0)
    assert (found.training.fits, found.training.largest_batch) == (False, 0)


def test_inputs_get_another_batch():
    values = (torch.randn(2, 3), torch.tensor([5, 7]), torch.randn(4), {"scale": 2.0})
    image, tokens, other, options = with_batch(values, 5)
    assert (image.shape, image.device.type) == ((5, 3), "meta")
    assert tokens.tolist() == [5, 7, 5, 7, 5]
    assert other is values[2]
    assert (options, batch_of(values), batch_of(())) == ({"scale": 2.0}, 2, 1)


def test_what_cannot_be_answered_is_refused():
    module, image = Net(), torch.randn(2, 3, 8, 8)
    with pytest.raises(UsageError, match="no data sheet"):
        farm.fits(module, image, card="RTX 9999")
    with pytest.raises(UsageError, match="autocast"):
        farm.fits(module, image, card="A10", amp="int8")
    for empty in (image[:0], {"image": image[:0]}):
        with pytest.raises(UsageError, match="an empty batch"):
            farm.fits(module, empty, card="A10")
    with pytest.raises(UsageError, match="an empty batch"):
        with_batch(torch.zeros(0, 3, dtype=torch.int64), 2)
    for optimizer in ("lamb", "rmsprop", "SGD", "adam-fused", "adamw-compiled", ""):
        with pytest.raises(UsageError, match=f"no optimizer '{optimizer}'") as caught:
            farm.fits(module, image, card="A10", optimizer=optimizer)
        assert caught.value.next_step == "Give one of sgd, adam, adamw."
    with pytest.raises(CaptureError):
        farm.fits(module, torch.randn(2, 4, 8, 8), card="A10")


def test_a_memory_that_grows_faster_from_some_batch_on_has_its_largest_batch():
    def peak_bytes(batch):
        return 10**9 + 2_000 * batch + 26_000 * max(0, batch - 300)

    fit = largest_batch(peak_bytes, 150 * 10**9, 64)
    assert peak_bytes(fit.batch) <= 150 * 10**9 < peak_bytes(fit.batch + 1)
