"""The version of the farm. `pyproject.toml` reads it from here."""

__version__ = "0.1.0"
