"""A name that is of no operator, or of none of the model's, is refused before anything starts, with
what was meant.
"""

import pytest


@pytest.mark.parametrize(
    ("arguments", "message", "next_step"),
    [
        (
            "run resnet18 --operators Conv",
            "There is no operator named 'Conv'.",
            "Did you mean Conv2d?",
        ),
        (
            "run vit_b_16 --operators layernrm",
            "There is no operator named 'layernrm'.",
            "Did you mean LayerNorm?",
        ),
        (
            "run resnet18 --operators conv2d,linear",
            "has none of the operators conv2d, linear.",
            "Did you mean Conv2d? It",
        ),
        (
            "run resnet18 alexnet --operators BatchNorm2d",
            "alexnet 2x224 float32 has none",
            "Its operators are AdaptiveAvgPool2d, ",
        ),
        ("db significant --add Conv", "There is no operator named 'Conv'.", "Did you mean Conv2d?"),
    ],
)
def test_a_name_that_nothing_has_is_refused_before_anything_starts(
    farm, monkeypatch, arguments, message, next_step
):
    monkeypatch.setenv("FARM_SIMULATED_CARDS", "1")
    said = farm(*arguments.split(), *(["-b", "2"] if arguments.startswith("run") else []))
    assert said.code == 2
    first, second = said.stderr.strip().splitlines()
    assert message in first
    assert second.startswith(f"→ {next_step}")
