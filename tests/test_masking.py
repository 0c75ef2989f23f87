"""No piece of a password is shown, however it is written into a URL."""

from __future__ import annotations

import pytest

from farm.masking import masked


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
