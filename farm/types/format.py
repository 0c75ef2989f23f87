"""Formats numbers and text for users: suitable units, as many digits as the interval supports; text without passwords
and control characters.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Sequence
from typing import Protocol
from urllib.parse import quote, quote_plus, unquote


class ValueWithInterval(Protocol):
    """A value and the half-width of its interval; `farm.verdict.figures.Figure` is one."""

    @property
    def value(self) -> float: ...
    @property
    def half_width(self) -> float: ...


Units = Sequence[tuple[str, float]]  # (unit, factor to the base unit), largest unit first

TIME: Units = (("s", 1e6), ("ms", 1e3), ("µs", 1.0))  # base: µs
ENERGY: Units = (("kJ", 1e6), ("J", 1e3), ("mJ", 1.0), ("µJ", 1e-3))  # base: mJ
POWER: Units = (("W", 1.0),)
_COUNT = (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3), ("", 1.0))

NOTHING = "–"


def quantity(value: float | None, units: Units, digits: int = 3) -> str:
    """Format a value in the base unit: ``5.31 ms``; None as a dash."""
    if value is None:
        return NOTHING
    unit, factor = fitting_unit(value, units)
    return f"{_rounded(value / factor, digits)} {unit}"


def interval(figure: ValueWithInterval | None, units: Units) -> str:
    """Format ``7.460 ± 0.021 ms``: two significant digits for the half-width, as many decimals for the value."""
    if figure is None:
        return NOTHING
    unit, factor = fitting_unit(figure.value, units)
    value, half_width = figure.value / factor, figure.half_width / factor
    if half_width <= 0 or not math.isfinite(half_width):
        return f"{_rounded(value, 4)} {unit}"
    decimals = min(4, max(0, 1 - math.floor(math.log10(half_width))))
    return f"{value:.{decimals}f} ± {half_width:.{decimals}f} {unit}"


def percent(fraction: float | None, decimals: int = 1) -> str:
    """Format ``99.7 %``. Only exactly 1 is shown as 100 %, and only exactly 0 as 0 %."""
    if fraction is None:
        return NOTHING
    scaled = fraction * 100
    if scaled > 0 and round(scaled, decimals) == 0:
        return f"<{10**-decimals:.{decimals}f} %"
    if scaled < 100 and round(scaled, decimals) >= 100:
        scaled = math.floor(scaled * 10**decimals) / 10**decimals
    return f"{scaled:.{decimals}f} %"


def gap(figure: ValueWithInterval | None) -> str:
    """Format a relative gap with its sign: ``+0.3 ± 0.4 %``."""
    return NOTHING if figure is None else f"{figure.value * 100:+z.1f} ± {figure.half_width * 100:.1f} %"


def count_of(number: float | None, unit: str) -> str:
    """Format a count with decimal prefixes: ``4.09 GFLOP``, ``102 MB``."""
    if number is None:
        return NOTHING
    prefix, factor = fitting_unit(number, _COUNT)
    if not prefix:
        return f"{number:.0f} {unit}"
    return f"{_rounded(number / factor, 3)} {prefix}{unit}"


def span(seconds: float | None) -> str:
    """Format a duration: ``8 s``, ``3 min 20 s``, ``2 h 5 min``, ``4 d 3 h``."""
    if seconds is None:
        return NOTHING
    whole = max(0, round(seconds))
    for size, unit, smaller, smaller_unit in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            rest = whole % size // smaller
            return f"{whole // size} {unit}" + (f" {rest} {smaller_unit}" if rest else "")
    return f"{whole} s"


def part_of(part: int, whole: int) -> str:
    """Format ``3/5``; if both numbers are 5, ``5``."""
    return str(whole) if part == whole else f"{part}/{whole}"


def plural(word: str, number: int) -> str:
    """Return the word for a number of things: ``tuple`` or ``tuples``."""
    return word if number == 1 else f"{word}s"


def fitting_unit(value: float, units: Units) -> tuple[str, float]:
    """Choose a unit for a value in the base unit. Return the unit and its factor."""
    return next(((unit, factor) for unit, factor in units if abs(value) >= factor), units[-1])


def _rounded(value: float, digits: int) -> str:
    if not value or not math.isfinite(value):
        return f"{value:.0f}"
    return f"{value:.{max(0, digits - 1 - math.floor(math.log10(abs(value))))}f}"


# ----- text from elsewhere: URLs without passwords, and text without control characters

UNREADABLE_URL = "<a URL that cannot be read>"
_SQLITE_FILE = re.compile(r"sqlite(?:\+\w+)?:///[^?]*")
# The password ends at the last @ before the path. A URL with another @ may have a part of its password behind the host.
_URL = re.compile(
    r"(?P<scheme>[A-Za-z][\w+.-]*)://(?:(?P<user>[^:@/?#\s]*)(?::(?P<password>[^/?#]*))?@)?"
    r"(?P<place>(?:[\w.%-]*|\[[0-9A-Fa-f:.]+\])(?::\d*)?(?:/[\w.~%/+-]*)?)(?:\?[^@#]*)?"
)
#: Options of a URL whose values are no secrets, and schemes.
_PLAIN_TEXT = """application_name connect_timeout db dbname host hostaddr mode options port ssl_ca_certs ssl_cert_reqs
    ssl_certfile ssl_check_hostname ssl_keyfile sslcert sslkey sslmode sslrootcert timeout uri user
    http postgres postgresql redis rediss socket sqlite unix"""
_PLAIN_WORDS = frozenset(_PLAIN_TEXT.split())
_OPTION = re.compile(r"([\w.-]+)\s*=\s*('[^']*'|[^&]*?)(?=&|\Z|\s+\w+\s*=|\s*\Z)")
_SHORTEST_SECRET = 3
_secrets: set[str] = set()


def shown_url(url: str) -> str:
    """The harmless parts of a URL: scheme, user, host, port, and database or path; a fixed text if they are unclear.

    The user of a broker without a password is hidden: in ``redis://word@host``, a colon is often missing.
    """
    if found := _SQLITE_FILE.match(url):
        return found[0]
    if not (found := _URL.fullmatch(url)):
        return UNREADABLE_URL
    user, password = found["user"], found["password"]
    if user and not password and found["scheme"].startswith("redis"):
        user = "***"
    account = "" if user is None else f"{user}:***@" if password else f"{user}@"
    return f"{found['scheme']}://{account}{found['place']}"


def keep_secret(value: str) -> None:
    """Let `without_secrets` hide a URL or ``user:password``: the value, its password and the values of its options.

    What `shown_url` shows is not hidden. A URL that cannot be read has its password between the first colon and the
    last @.
    """
    shown, words = shown_url(value), set()
    for part in re.split(r"[;,](?=[A-Za-z+]+://)", value):
        _, has_scheme, rest = part.rpartition("://")
        options = _OPTION.findall(part.partition("?")[2] if has_scheme else part)
        words |= {text.strip("'") for name, text in options if name not in _PLAIN_WORDS}
        account, at, _ = rest.rpartition("@")
        if not at and shown == UNREADABLE_URL and not options:  # the password may stand in the place of the host
            account = rest
        user, colon, password = account.partition(":")
        words.add(password if colon else user)
    words |= {piece for word in words for text in (word, unquote(word)) for piece in re.split(r"\W+", text)}
    for word in words - _PLAIN_WORDS | {value}:
        for form in (word, unquote(word), quote(word, safe=""), quote_plus(word)):
            if len(form) >= _SHORTEST_SECRET and (form == value or form not in shown):
                _secrets.update((form, repr(form)[1:-1], json.dumps(form)[1:-1], printable(form)))
    _secrets.discard(shown)
    _pattern_of_secrets.cache_clear()


@functools.cache
def _pattern_of_secrets() -> re.Pattern[str]:
    longest_first = sorted(_secrets, key=len, reverse=True)
    return re.compile("|".join(re.escape(one) if len(one) > 5 else rf"\b{re.escape(one)}\b" for one in longest_first))


def without_secrets(text: str) -> str:
    """A text, such as the error of a client, with ``***`` in place of all that `keep_secret` got."""
    return _pattern_of_secrets().sub("***", text) if _secrets else text


# Control characters (also 8-bit), line ends of all kinds, and characters that change the writing direction.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def printable(text: str, *, keep: str = "") -> str:
    r"""Replace control characters by JSON escapes such as ``\u001b`` or ``\n``.

    Titles, labels and ids come from files, the broker and the database. They must not control a terminal or start a
    new line in a log.

    Args:
        keep: control characters that are not replaced.
    """
    return _CONTROL.sub(lambda found: found[0] if found[0] in keep else json.dumps(found[0])[1:-1], text)
