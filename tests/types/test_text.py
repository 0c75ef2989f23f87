"""No piece of a password is shown, however it is written into a URL, and no control character that others wrote."""

from __future__ import annotations

import json

import pytest

from farm.types.format import masked, printable


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://:secret@h:6379/0", "redis://:***@h:6379/0"),
        ("redis://farm:sec@ret@h:6379/0", "redis://farm:***@h:6379/0"),
        ("rediss://farm:sec/ret#1@h/0", "rediss://farm:***@h/0"),
        ("redis+socket://farm:secret@/run/x.sock", "redis+socket://farm:***@/run/x.sock"),
        ("farm:secret@/run/x.sock", "farm:***@/run/x.sock"),
        ("postgresql://h/farm?user=farm&password=secret", "postgresql://h/farm?user=farm&password=***"),
        ("postgresql://h:1/farm?password=sec@ret&user=farm", "postgresql://h:1/farm?password=***&user=farm"),
        ("postgresql://h/f?sslpassword=secret&PASSFILE=/secret", "postgresql://h/f?sslpassword=***&PASSFILE=***"),
        ("postgresql://farm@h/farm", "postgresql://farm@h/farm"),
        ("sqlite:////var/lib/farm/farm.db", "sqlite:////var/lib/farm/farm.db"),
        ("/var/lib/farm", "/var/lib/farm"),
    ],
)
def test_passwords_are_masked_and_the_rest_is_told(url, shown):
    assert masked(url) == shown


def test_control_characters_are_written_out_and_mean_the_same_in_json():
    hostile = "\x1b]0;t\x07 \x9b31m a\r\nb\u2028c\u202ed é→"
    told = printable(hostile)
    assert told.isprintable()
    assert told.startswith("\\u001b]0;t\\u0007 \\u009b31m a\\r\\nb")
    assert told.endswith(" é→")
    assert json.loads(f'"{told}"') == hostile
    assert printable("a\nb", keep="\n") == "a\nb"
