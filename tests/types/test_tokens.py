"""Token ids survive every way that they travel, and what is none is refused before it is
unpacked.
"""

import base64
import json
import zlib

import pytest

from farm.types.tokens import MOST_TOKENS, Tokens, TokensRejected

RIGHT = Tokens.of_rows([[5, 6, 7], [8]], 4, pad=0, padding="right")
LEFT = Tokens.of_rows([[5, 6, 7], [8]], 4, pad=9, padding="left")


def test_rows_are_padded_on_their_side_and_the_mask_says_where():
    assert RIGHT.ids.tolist() == [[5, 6, 7, 0], [8, 0, 0, 0]]
    assert RIGHT.mask.tolist() == [[1, 1, 1, 0], [1, 0, 0, 0]]
    assert LEFT.ids.tolist() == [[9, 5, 6, 7], [9, 9, 9, 8]]
    assert LEFT.mask.tolist() == [[0, 1, 1, 1], [0, 0, 0, 1]]
    assert (LEFT.padded, LEFT.largest) == (True, 9)


def test_they_travel_as_json_and_keep_their_id():
    again = Tokens.from_json(json.loads(json.dumps(LEFT.to_json())))
    assert again == LEFT
    assert again.id == LEFT.id != RIGHT.id
    assert RIGHT.id == "ae2756fab663f1ef7d217c8994248801"  # the same on every machine


@pytest.mark.parametrize(
    "change",
    [
        {"batch": 3},
        {"batch": "2"},
        {"batch": 0},
        {"length": -1},
        {"batch": 2**40},
        {"length": True},
        {"row_lengths": [3, 5]},
        {"row_lengths": 3},
        {"padding": "middle"},
        {"ids": "?"},
        {"ids": None},
        {"ids": base64.b64encode(b"no zlib").decode()},
        {"ids": base64.b64encode(zlib.compress(bytes(33))).decode()},
        {"ids": base64.b64encode(zlib.compress(b"\xff" * 32)).decode()},
        {"more": 1},
    ],
)
def test_what_is_no_tokens_is_refused(change):
    with pytest.raises(TokensRejected):
        Tokens.from_json({**RIGHT.to_json(), **change})


def test_no_more_is_taken_than_fits():
    with pytest.raises(TokensRejected, match="are allowed"):
        Tokens.from_json({**RIGHT.to_json(), "batch": 2, "length": MOST_TOKENS})
