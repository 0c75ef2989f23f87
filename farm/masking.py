"""Texts for people: URLs without what lets others in, and whatever others wrote without what a terminal would obey.

Rather too much is hidden than a piece of a password shown.
"""

from __future__ import annotations

import json
import re

_IN_QUERY = re.compile(r"([?&](?:password|sslpassword|passfile)=)[^&\s]*", re.IGNORECASE)
# Up to the last @, for a password that holds one. A URL may come without its scheme, as Celery keeps a socket's.
_BEFORE_HOST = re.compile(r"(://|^(?!\S*://))([^:/@\s]*):\S*@")


def masked(url: str) -> str:
    """A URL, or a text with one in it, with every password in it as ``***``."""
    return _BEFORE_HOST.sub(r"\1\2:***@", _IN_QUERY.sub(r"\1***", url))


# Escape sequences and their 8-bit forms, line ends of all kinds, and what turns the direction of writing around.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def printable(text: str, *, keep: str = "") -> str:
    r"""A text with its control characters written out, as in ``\u001b`` or ``\n``: in JSON, they mean the same.

    Titles, labels and ids come from files, the broker and the database. On a terminal they must not do more than stand
    there, nor in a log begin a line of their own.

    Args:
        keep: those that may stay.
    """
    return _CONTROL.sub(lambda found: found[0] if found[0] in keep else json.dumps(found[0])[1:-1], text)
