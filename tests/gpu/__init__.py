"""Tests on a real NVIDIA card, one at a time. Skipped without one."""

import pytest
import torch

NEEDS_A_CARD = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA card"),
]
