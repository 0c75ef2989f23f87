"""Questions about a card's capability while packages and models are imported."""

import torch

from farm.models.card_questions import without_context


def test_without_a_card_pytorch_answers() -> None:
    asked = torch.cuda.get_device_capability
    with without_context():
        try:
            torch.cuda.get_device_capability()
        except (AssertionError, RuntimeError) as error:
            answer = type(error)
    assert torch.cuda.get_device_capability is asked
    if not torch.cuda.is_available():
        assert answer in (AssertionError, RuntimeError)
