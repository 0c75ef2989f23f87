"""Turn paragraphs into ids with a user's `tokenizer.json`, in a separate process: a script that
imports no farm.

A tokenizer's file may need too much time or memory (an endless regular expression, one character
that becomes a million), or crash the process that reads it. So a separate process reads it, within
limits.

Standard input: one JSON object with ``tokenizer`` (the text of the file), ``paragraphs``,
``needed`` (the number of ids after which no further paragraph is read) and ``most_bytes`` (of
memory). Standard output: a line of JSON with ``first`` and ``last`` (the ids that the tokenizer
puts around a row) and ``counts`` (the ids of each paragraph), or with ``error``; then all ids as
32-bit integers."""

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


def _encoded(request: dict[str, Any]) -> tuple[dict[str, Any], array.array[int]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(request["tokenizer"])
    tokenizer.no_truncation()
    tokenizer.no_padding()
    ids, counts = array.array("i"), []
    paragraphs = request["paragraphs"]
    for begin in range(0, len(paragraphs), PARAGRAPHS_AT_A_TIME):
        some = paragraphs[begin : begin + PARAGRAPHS_AT_A_TIME]
        for encoding in tokenizer.encode_batch(some, add_special_tokens=False):
            ids.extend(encoding.ids)
            counts.append(len(encoding.ids))
        if len(ids) >= request["needed"]:
            break
    around = tokenizer.encode(paragraphs[0])
    text = [position for position, special in enumerate(around.special_tokens_mask) if not special]
    first, last = (around.ids[: text[0]], around.ids[text[-1] + 1 :]) if text else ([], [])
    return {"first": first, "last": last, "counts": counts}, ids


def main() -> None:
    ids = array.array("i")
    try:
        request = json.load(sys.stdin.buffer)
        _limited(request["most_bytes"])
        answer, ids = _encoded(request)
    except KeyboardInterrupt:
        raise
    except ImportError:
        answer = {"error": "", "absent": True}
    except BaseException as error:  # a panic of the library is not an Exception
        answer = {"error": (str(error).strip() or type(error).__name__).splitlines()[0][:200]}
    sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n" + ids.tobytes())
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
