"""The option --check-every of `farm worker`."""

import pytest


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["24x"], "--check-every is '24x'; it must be a time."),
        (["5min"], "--check-every is '5min'; it must be at least 10min."),
        (["nan"], "--check-every is 'nan'; it must be at least 10min."),
        (["24h", "--card", "cpu"], "Only GPUs are checked, and this card is a CPU."),
    ],
)
def test_a_period_that_is_wrong_is_refused(farm, words, message):
    said = farm("worker", "--check-every", *words)
    assert said.code == 2
    assert message in said.stderr
