"""Attributes that are replaced for a time."""

import types

from farm.types.replacement import replaced


def test_an_attribute_is_as_before_also_if_it_was_none_or_inherited():
    module = types.ModuleType("some")
    module.hook = None

    class Base:
        def name(self) -> str:
            return "base"

    class Derived(Base):
        pass

    with replaced(module, "hook", print), replaced(Derived, "name", lambda self: "other"):
        assert (module.hook, Derived().name()) == (print, "other")
    assert module.hook is None
    assert Derived().name() == "base"
    assert "name" not in vars(Derived)
