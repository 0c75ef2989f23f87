"""The kinds of operator tuples, one class in one file each: how tuples are validated, labelled,
built and counted. `farm.subjects.base` is their interface."""

from __future__ import annotations

from farm.subjects.aten import Aten
from farm.subjects.collective import Collective
from farm.subjects.function import Function
from farm.subjects.kernel import Kernel
from farm.subjects.library import Library
from farm.subjects.module import Module
from farm.subjects.registry import register

for _kind in (Module(), Function(), Aten(), Library(), Kernel(), Collective()):
    register(_kind)
