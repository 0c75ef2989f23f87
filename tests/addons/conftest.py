"""Fixtures of the command line, for the commands of add-ons."""

from tests.cli.conftest import farm  # noqa: F401
