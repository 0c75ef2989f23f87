"""A process that captures models creates no context on the card, whatever packages it imports."""

import subprocess
import sys

import pytest

from tests.gpu import NEEDS_A_CARD

pytestmark = NEEDS_A_CARD

CAPTURE = """
import os
import pynvml
from farm.models.card_questions import without_context
{imports}
pynvml.nvmlInit()
processes = {{
    process.pid
    for index in range(pynvml.nvmlDeviceGetCount())
    for process in pynvml.nvmlDeviceGetComputeRunningProcesses(
        pynvml.nvmlDeviceGetHandleByIndex(index)
    )
}}
print("on the card" if os.getpid() in processes else "not on the card")
"""
TRANSFORMERS = "from farm.models import transformers; transformers._package()"
ASKS = "import torch\nwith without_context(): print(torch.cuda.get_device_capability())"
USES = "import torch; torch.zeros(1, device='cuda')"


def run(imports: str) -> str:
    command = [sys.executable, "-c", CAPTURE.format(imports=imports)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("imports", [TRANSFORMERS, ASKS], ids=["transformers", "asks"])
def test_imports_and_questions_leave_the_card_alone(imports: str) -> None:
    assert "not on the card" in run(imports)


def test_the_driver_names_a_process_that_uses_the_card() -> None:
    assert "not on the card" not in run(USES)
