"""A process of its own that turns paragraphs into ids with somebody's `tokenizer.json`: run as a script, imports no farm.

A tokenizer's file is data, and yet may ask for more time or memory than there is (an expression that never ends, one
character that becomes a million), or end the process that reads it: so it is this one, and within limits.

Standard input: one JSON object, ``tokenizer`` (the text of the file), ``paragraphs``, ``wanted`` (ids after which no
further paragraph is read) and ``most_bytes`` (of memory). Standard output: a line of JSON, ``first`` and ``last`` (what the tokenizer puts around a row)
and ``counts`` (ids of each paragraph read), or ``error``, and then all ids as 32-bit integers.
"""

from __future__ import annotations

import array
import json
import sys
from typing import Any

PARAGRAPHS_AT_A_TIME = 64


def _limited(most_bytes: int) -> None:
    try:
        import resource
    except ImportError:  # Windows has none
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = most_bytes if hard == resource.RLIM_INFINITY else min(hard, most_bytes)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))


def _encoded(asked: dict[str, Any]) -> tuple[dict[str, Any], array.array[int]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(asked["tokenizer"])
    tokenizer.no_truncation()
    tokenizer.no_padding()
    ids, counts = array.array("i"), []
    paragraphs = asked["paragraphs"]
    for begin in range(0, len(paragraphs), PARAGRAPHS_AT_A_TIME):
        for encoding in tokenizer.encode_batch(
            paragraphs[begin : begin + PARAGRAPHS_AT_A_TIME], add_special_tokens=False
        ):
            ids.extend(encoding.ids)
            counts.append(len(encoding.ids))
        if len(ids) >= asked["wanted"]:
            break
    around = tokenizer.encode(paragraphs[0])
    text = [place for place, special in enumerate(around.special_tokens_mask) if not special]
    first, last = (around.ids[: text[0]], around.ids[text[-1] + 1 :]) if text else ([], [])
    return {"first": first, "last": last, "counts": counts}, ids


def main() -> None:
    ids = array.array("i")
    try:
        asked = json.load(sys.stdin.buffer)
        _limited(asked["most_bytes"])
        told, ids = _encoded(asked)
    except KeyboardInterrupt:
        raise
    except ImportError:
        told = {"error": "", "absent": True}
    except BaseException as error:  # a panic of the library is no Exception
        lines = (str(error).strip() or type(error).__name__).splitlines()
        told = {"error": lines[0][:200]}
    sys.stdout.buffer.write(json.dumps(told).encode() + b"\n" + ids.tobytes())
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
