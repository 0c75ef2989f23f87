"""The contract of add-ons that write pages (`farm.report.pages.ResultPages`)."""

import inspect

import pytest

from farm import extensions
from farm.errors import UsageError
from farm.extensions import result_pages
from farm.report.pages import ResultPages

METHODS = [name for name in vars(ResultPages) if not name.startswith("_")]


@pytest.mark.parametrize("name", METHODS)
def test_the_writer_of_pages_has_the_functions_of_the_interface(name):
    _, *expected = inspect.signature(getattr(ResultPages, name)).parameters
    assert list(inspect.signature(getattr(result_pages("--html"), name)).parameters) == expected


def test_without_a_writer_the_option_is_refused(monkeypatch):
    monkeypatch.setattr(extensions, "add_ons", dict)
    with pytest.raises(UsageError, match="--png needs the add-on 'pages'"):
        result_pages("--png")
