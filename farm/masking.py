"""URLs for people: without what lets others in. Rather too much is hidden than a piece of a password shown."""

from __future__ import annotations

import re

_IN_QUERY = re.compile(r"([?&](?:password|sslpassword|passfile)=)[^&\s]*", re.IGNORECASE)
# Up to the last @, for a password that holds one. A URL may come without its scheme, as Celery keeps a socket's.
_BEFORE_HOST = re.compile(r"(://|^(?!\S*://))([^:/@\s]*):\S*@")


def masked(url: str) -> str:
    """A URL, or a text with one in it, with every password in it as ``***``."""
    return _BEFORE_HOST.sub(r"\1\2:***@", _IN_QUERY.sub(r"\1***", url))
