"""Which of the packages in a process may belong to the user's models."""

from __future__ import annotations

import sys

#: Packages whose modules are never those of a user's model.
NOT_OF_USERS = frozenset({*sys.stdlib_module_names, "torch", "numpy", "farm", "tasks", "cli"})
