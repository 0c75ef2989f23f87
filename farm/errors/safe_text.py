"""Texts that are safe to show: only the harmless parts of a URL, no known secrets, no control
characters.

It imports nothing of the farm, so that errors and settings can use it.
"""

from __future__ import annotations

import functools
import json
import re
from urllib.parse import quote, quote_plus, unquote

UNREADABLE_URL = "<a URL that cannot be read>"
# A path with an account before it is a URL of a server with a wrong scheme.
_SQLITE_FILE = re.compile(r"(?!.*:.*:.*@)sqlite(?:\+\w+)?:///[^?]*")
# The password ends at the last @ before the path. A URL with another @ may have a part of its
# password behind the host.
_URL = re.compile(
    r"(?P<scheme>[A-Za-z][A-Za-z\d.+-]*)://"
    r"(?:(?P<user>[^:@/?#\s]*)(?::(?P<password>[^/?#]*))?@)?"
    r"(?P<host>[\w.%-]*|\[[0-9A-Fa-f:.]+\])(?P<port>:\d{0,5})?(?P<path>/[^?#]*)?"
    r"(?:\?[^@#]*)?"
)
_USER = re.compile(r"[\w.~-]*")
#: A database or a path, decoded. Other characters may separate a password.
_PATH = re.compile(r"[\w.~/+-]*")
#: Options of a URL whose values are no secrets, and schemes.
_PLAIN_TEXT = """application_name connect_timeout db dbname farm host hostaddr mode options port
    ssl_ca_certs ssl_cert_reqs ssl_certfile ssl_check_hostname ssl_keyfile sslcert sslkey sslmode
    sslrootcert timeout uri user http postgres postgresql redis rediss socket sqlite unix"""
_PLAIN_WORDS = frozenset(_PLAIN_TEXT.split())
_OPTION = re.compile(r"([\w.-]+)\s*=\s*('[^']*'|[^&]*?)(?=&|\Z|\s+\w+\s*=|\s*\Z)")
_SHORTEST_SECRET = 3
_secrets: set[str] = set()


def shown_url(url: str) -> str:
    """The harmless parts of a URL: scheme, user, host, port, and database or path; a fixed text if
    they are unclear.

    The user of a broker's URL is hidden if the URL has no password: in ``redis://word@host``,
    `word` is often the password, because a person omitted the colon before it. A user with other
    characters than those of a name is hidden, because one of them may stand for the colon."""
    sqlite = _SQLITE_FILE.match(url)
    if sqlite:
        return sqlite[0]
    match = _URL.fullmatch(url)
    if not match or not _is_clear(match["host"], match["path"] or ""):
        return UNREADABLE_URL
    address = match["host"] + (match["port"] or "") + (match["path"] or "")
    return f"{match['scheme']}://{_shown_account(match)}{address}"


def _is_clear(host: str, path: str) -> bool:
    """True if a host and a path, decoded, have no characters that may separate a password."""
    decoded = unquote(host)
    if "%" in host and not decoded.startswith("/"):  # only the folder of a socket needs codes
        return False
    is_address = host.startswith("[")
    return bool((is_address or _PATH.fullmatch(decoded)) and _PATH.fullmatch(unquote(path)))


def _shown_account(found: re.Match[str]) -> str:
    user, password = found["user"], found["password"]
    if user is None:
        return ""
    is_name = _USER.fullmatch(user) and (password or found["scheme"].lower().startswith("postgres"))
    if user and not is_name:
        user = "***"
    return f"{user}:***@" if password else f"{user}@"


def keep_secret(value: str) -> None:
    """Let `without_secrets` hide a URL or ``user:password``: the value, its password and the values
    of its options.

    What `shown_url` shows is not hidden. A URL that cannot be read has its password between the
    first colon and the last @."""
    shown, words = shown_url(value), set[str]()
    for part in re.split(r"[;,](?=[A-Za-z+]+://)", value):
        for text in (part, unquote(part)):  # a person may have encoded the colon or the @, too
            words |= _secret_words(text, shown)
    for word in list(words):
        words.update(re.split(r"\W+", word), re.split(r"\W+", unquote(word)))
    whole = {value}
    if shown == UNREADABLE_URL:
        whole.add(value.rpartition("://")[2].partition("/")[0])  # a client may name it as the host
    for word in words - _PLAIN_WORDS | whole:
        for form in (word, unquote(word), quote(word, safe=""), quote_plus(word)):
            if len(form) >= _SHORTEST_SECRET and (form in whole or form not in shown):
                _secrets.update((form, repr(form)[1:-1], json.dumps(form)[1:-1], printable(form)))
    _secrets.discard(shown)
    _pattern_of_secrets.cache_clear()


def _secret_words(url: str, shown: str) -> set[str]:
    """The password, or what may be one, and the values of the options of a URL, of which `shown` is
    shown.
    """
    _, has_scheme, rest = url.rpartition("://")
    options = _OPTION.findall(url.partition("?")[2] if has_scheme else url)
    words = {text.strip("'") for name, text in options if name not in _PLAIN_WORDS}
    account, at, _ = rest.rpartition("@")
    # the password may stand in the place of the host
    if not at and shown == UNREADABLE_URL and not options:
        account = rest
    user, colon, password = account.partition(":")
    return words | {password if colon else user}


@functools.cache
def _pattern_of_secrets() -> re.Pattern[str]:
    longest_first = sorted(_secrets, key=len, reverse=True)
    return re.compile(
        "|".join(
            re.escape(secret) if len(secret) > 5 else rf"\b{re.escape(secret)}\b"
            for secret in longest_first
        )
    )


def without_secrets(text: str) -> str:
    """A text, such as the error of a client, with ``***`` in place of every secret that
    `keep_secret` received.
    """
    return _pattern_of_secrets().sub("***", text) if _secrets else text


#: The beginning of a text that a spreadsheet may take as a formula; the last four are wide forms of
#: the first four.
FORMULA = "^[=+\\-@\t\r\n\uff1d\uff0b\uff0d\uff20]"
_FORMULA = re.compile(FORMULA)
_NUMBER = re.compile(r"[+-]?\d+(\.\d+)?([eE][+-]?\d+)?")


def cell(text: str) -> str:
    """A text for a CSV file. One that a spreadsheet may take as a formula gets an apostrophe in
    front; a number does not."""
    if _FORMULA.match(text) and not _NUMBER.fullmatch(text):
        return f"'{text}"
    return text


# Control characters (also 8-bit), line ends of all kinds, and characters that change the writing
# direction.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def printable(text: str, *, keep: str = "") -> str:
    r"""Replace control characters, except those in ``keep``, by JSON escapes such as ``\u001b``.

    Titles, labels and ids come from files, the broker and the database. They must not control a
    terminal or start a new line in a log.
    """
    return _CONTROL.sub(
        lambda found: found[0] if found[0] in keep else json.dumps(found[0])[1:-1], text
    )
