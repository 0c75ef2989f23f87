"""No piece of a password is shown, however it is written into a URL, and no control character that
others wrote.
"""

from __future__ import annotations

import json
import re

import pytest

from farm.errors.safe_text import (
    UNREADABLE_URL,
    cell,
    keep_secret,
    printable,
    shown_url,
    without_secrets,
)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://:secret@h:6379/0", "redis://:***@h:6379/0"),
        ("redis://farm:sec@ret@h:6379/0", "redis://farm:***@h:6379/0"),
        ("redis://farm:sec ret;\n@h:6379/0", "redis://farm:***@h:6379/0"),
        ("redis://secret@h:6379/0", "redis://***@h:6379/0"),
        ("redis://secret:@h:6379/0", "redis://***@h:6379/0"),
        ("rediss://farm:sec/ret#1@h/0", UNREADABLE_URL),
        ("redis://a:secret@h/0;redis://b:secret@i/0", UNREADABLE_URL),
        ("redis+socket://farm:secret@/run/x.sock", "redis+socket://farm:***@/run/x.sock"),
        ("farm:secret@/run/x.sock", UNREADABLE_URL),
        ("host=h password=secret", UNREADABLE_URL),
        ("postgresql://farm:secret:5432/farm", UNREADABLE_URL),
        ("postgresql://farm:secret/farm", UNREADABLE_URL),
        ("postgresql://h/farm?user=farm&password=secret", "postgresql://h/farm"),
        ("postgresql://h:1/farm?password=sec@ret&user=farm", UNREADABLE_URL),
        (
            "postgresql://[::1]:5432/f?sslpassword=secret&PASSFILE=/secret",
            "postgresql://[::1]:5432/f",
        ),
        ("postgresql://farm@h/farm", "postgresql://farm@h/farm"),
        ("sqlite:////var/lib/farm/farm.db?key=secret", "sqlite:////var/lib/farm/farm.db"),
        ("sqlite:////home/a@b/farm.db", "sqlite:////home/a@b/farm.db"),
        ("sqlite:///farm:secret@h/farm", UNREADABLE_URL),
        ("postgresql://farm;secret@h/farm", "postgresql://***@h/farm"),
        ("postgresql://farm%3Asecret@h/farm", "postgresql://***@h/farm"),
        ("postgresql://farm%3Asecret%40h/farm", UNREADABLE_URL),
        ("postgresql://h/farm%3Fpassword%3Dsecret", UNREADABLE_URL),
        ("postgresql://farm:secret%40h/farm", UNREADABLE_URL),
        ("postgresql://farm:123456789/farm", UNREADABLE_URL),
        ("postgresql://farm,secret:x@h/farm", "postgresql://***:***@h/farm"),
        ("postgresql://farm@%2Fvar%2Frun/farm", "postgresql://farm@%2Fvar%2Frun/farm"),
        ("'postgresql://farm:secret@h/farm'", UNREADABLE_URL),
        ("postgresql://farm:secret@h/farm\n", UNREADABLE_URL),
        ("REDIS://secret@h:6379/0", "REDIS://***@h:6379/0"),
        ("valkey://secret@h:6379/0", "valkey://***@h:6379/0"),
        ("redis://h:6379/0#secret", UNREADABLE_URL),
        ("farm;secret@h", UNREADABLE_URL),
    ],
)
def test_the_harmless_parts_of_a_url_are_shown(url, shown):
    assert shown_url(url) == shown


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("redis://:p4ss w0rd@h/0", "cannot use redis://:p4ss w0rd@h/0"),
        ("redis://:p4ss%20w0rd@h/0", "wrong: 'p4ss w0rd'"),
        ("redis://:p4ss/w0rd@h/0", "Port could not be cast to integer value as 'p4ss'"),
        ("redis://:p4ss\nw0rd@h/0", "b'p4ss\\nw0rd'"),
        ("redis://h/0?pasword=p4ssw0rd", "p4ssw0rd is no option"),
        ("host=h password=p4ssw0rd", "in 'p4ssw0rd'"),
        ("farm:p4ssw0rd", "p4ssw0rd"),
        ("p4ssw0rd", "p4ssw0rd"),
        ("farm;p4ssw0rd@h", "p4ssw0rd"),
        ("postgresql://farm;p4ssw0rd@h/farm", 'role "farm;p4ssw0rd" does not exist'),
        ("postgresql://farm%3Ap4ssw0rd@h/farm", 'role "farm:p4ssw0rd" does not exist'),
        (
            "postgresql://farm%3Ap4ssw0rd%40h/farm",
            "cannot resolve 'farm%3Ap4ssw0rd%40h' or 'farm:p4ssw0rd@h'",
        ),
        ("sqlite:///farm:p4ssw0rd@h/farm", "unable to open farm:p4ssw0rd@h/farm"),
        ("'postgresql://farm:p4ssw0rd@h/farm'", "p4ssw0rd"),
    ],
)
def test_texts_of_others_have_no_secrets(value, text):
    keep_secret(value)
    assert not re.search("p4ss|w0rd", without_secrets(text))
    assert (
        without_secrets("`farm run` connects to the database")
        == "`farm run` connects to the database"
    )


def test_control_characters_are_written_out_and_mean_the_same_in_json():
    hostile = "\x1b]0;t\x07 \x9b31m a\r\nb\u2028c\u202ed é→"
    told = printable(hostile)
    assert told.isprintable()
    assert told.startswith("\\u001b]0;t\\u0007 \\u009b31m a\\r\\nb")
    assert told.endswith(" é→")
    assert json.loads(f'"{told}"') == hostile
    assert printable("a\nb", keep="\n") == "a\nb"


@pytest.mark.parametrize(
    "text", ["=1+1", "+cmd", "-2+3", "@SUM(A1)", "\t=1", "\r=1", "\n=1", "\uff1d1", "-1e9x"]
)
def test_a_cell_is_never_a_formula(text):
    assert cell(text) == f"'{text}"


@pytest.mark.parametrize("text", ["", "-1", "+1.5", "-1.5e-07", "Conv2d 3->64", "a=1", "1-2"])
def test_a_cell_with_a_number_or_another_text_is_unchanged(text):
    assert cell(text) == text
