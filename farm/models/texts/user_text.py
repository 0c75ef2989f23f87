"""Tokenizes a user's text with a user's tokenizer, a folder with a `tokenizer.json`.

No code of the folder is run, none of its other files is opened, and nothing is downloaded. The library `tokenizers`
(the extra `language`) reads the file in a separate process (`farm.models.texts.encode`).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from farm.errors import SettingsError, UsageError
from farm.models.texts import Specials, in_rows, paragraph_rows, room_for_text
from farm.types.tokens import Tokens, check_size

if TYPE_CHECKING:
    import numpy as np

MOST_TEXT_BYTES = 16 * 2**20
MOST_TOKENIZER_BYTES = 64 * 2**20
MOST_MEMORY_BYTES = 4 * 2**30
MOST_S = 60.0
_ENCODE = Path(__file__).with_name("encode.py")
_INSTALL = "Install it with pip install 'operator-farm[language]'."
_TOKENIZER_STEP = "Give the folder of a tokenizer of Hugging Face's tokenizers, with its tokenizer.json."


@dataclass(frozen=True)
class _Encoded:
    """The ids of the paragraphs, the end of each, and the ids that the tokenizer puts around a row."""

    ids: np.ndarray
    ends: np.ndarray
    first: tuple[int, ...]
    last: tuple[int, ...]


def tokenize(
    text_file: str | Path,
    tokenizer_folder: str | Path,
    vocabulary: int,
    batch: int,
    length: int,
    *,
    padded: bool = False,
    specials: Specials | None = None,
    bare: bool = False,
) -> Tokens:
    """``batch`` rows of ``length`` ids of a text, for a model of ``vocabulary`` entries.

    Rows are cut as in `farm.models.texts.token_ids`; a text that is too short for all of them starts again. The
    tokenizer decides what surrounds a row, unless it is ``bare``; the model's ``specials`` say how rows are padded.

    Raises:
        UsageError: a file is missing, too large or malformed; the text is too short for one row, or does not fit the
            model.
        SettingsError: the library `tokenizers` is not installed.
    """
    import numpy as np

    check_size(batch, length)
    text_file, tokenizer_folder = Path(text_file), Path(tokenizer_folder)
    text = _text(text_file)
    pieces = _paragraphs(text, padded)
    if not pieces:
        raise UsageError(f"The text {text_file} is empty.", "Give a file with a text in it.")
    encoded = _encode(tokenizer_folder, pieces, batch * length)
    if not len(encoded.ids):
        raise UsageError(f"The tokenizer in {tokenizer_folder} makes no token of {text_file}.", "Give another text.")
    first, last = ((), ()) if bare else (encoded.first, encoded.last)
    specials = replace(specials or Specials(), first=first, last=last)
    _check_vocabulary(tokenizer_folder, [*first, *last, int(encoded.ids.max())], vocabulary)
    _check_vocabulary(tokenizer_folder, [specials.pad], vocabulary)
    room = room_for_text(length, specials.around)
    tokens = len(encoded.ids)
    if padded:
        places = [(begin, min(end, begin + room)) for begin, end in paragraph_rows(encoded.ends, batch, room)]
    elif tokens < room:
        raise UsageError(
            f"The text {text_file} has {tokens} tokens, and a row of {length} needs {room}.",
            f"Give a longer text, a length of {tokens + specials.around} or less, or ask for padding.",
        )
    else:
        places = [(row * room, (row + 1) * room) for row in range(batch)]
    return in_rows([encoded.ids[np.arange(begin, end) % tokens] for begin, end in places], length, specials)


def _check_vocabulary(folder: Path, ids: list[int], vocabulary: int) -> None:
    if (largest := max(ids)) >= vocabulary:
        raise UsageError(
            f"The tokenizer in {folder} gives the id {largest}, beyond the model's vocabulary of {vocabulary}.",
            "Give the tokenizer that belongs to the model.",
        )


def _read(path: Path, what: str, most_bytes: int) -> str:
    """The text of a regular file of at most ``most_bytes``."""
    try:
        if not path.is_file():
            reason = "is a folder" if path.is_dir() else "is not a regular file" if path.exists() else "does not exist"
            raise UsageError(f"{what} {path} {reason}.", "Give the path of a file.")
        with path.open("rb") as file:
            data = file.read(most_bytes + 1)
    except OSError as error:
        raise UsageError(
            f"{what} {path} cannot be read: {error.strerror or error}.", "Check its path and rights."
        ) from error
    if len(data) > most_bytes:
        raise UsageError(f"{what} {path} is larger than {most_bytes // 2**20} MiB.", "Give a smaller one.")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{what} {path} is not UTF-8: byte {error.start} is invalid.", "Save it as UTF-8.") from error


def _text(path: Path) -> str:
    return _read(path, "The text", MOST_TEXT_BYTES).replace("\r\n", "\n")


def _tokenizer(folder: Path) -> str:
    if not folder.is_dir():
        reason = "is a file" if folder.exists() else "does not exist"
        raise UsageError(f"The tokenizer's folder {folder} {reason}.", _TOKENIZER_STEP)
    path = folder / "tokenizer.json"
    if not path.exists():
        raise UsageError(f"The folder {folder} has no tokenizer.json.", _TOKENIZER_STEP)
    return _read(path, "The tokenizer", MOST_TOKENIZER_BYTES)


def _paragraphs(text: str, padded: bool) -> list[str]:
    """The parts of the text between empty lines, or its lines if there are none; with the separators, unless padded."""
    parts = re.split(r"(?<=\n)(?=[^\n])" if "\n\n" not in text.strip() else r"(?<=\n\n)(?=[^\n])", text)
    return [part.strip("\n") if padded else part for part in parts if part.strip()]


def _encode(folder: Path, paragraphs: list[str], needed: int) -> _Encoded:
    import numpy as np

    request = {
        "tokenizer": _tokenizer(folder),
        "paragraphs": paragraphs,
        "needed": needed,
        "most_bytes": MOST_MEMORY_BYTES,
    }
    answer, ids = _run_encoder(request, folder)
    if answer.get("absent"):
        raise SettingsError("A text of your own needs the library 'tokenizers', which is not installed.", _INSTALL)
    if "error" in answer:
        raise UsageError(f"The tokenizer.json in {folder} cannot be read: {answer['error']}.", _TOKENIZER_STEP)
    return _Encoded(
        np.frombuffer(ids, dtype=np.int32).astype(np.int64),
        np.cumsum([count for count in answer["counts"] if count], dtype=np.int64),
        tuple(answer["first"]),
        tuple(answer["last"]),
    )


def _run_encoder(request: dict[str, Any], folder: Path) -> tuple[dict[str, Any], bytes]:
    settings = {name: value for name, value in os.environ.items() if not name.startswith("FARM_")}
    try:
        done = subprocess.run(
            [sys.executable, "-P", str(_ENCODE)],  # -P: no file in the script's folder replaces a module
            input=json.dumps(request).encode(),
            capture_output=True,
            timeout=MOST_S,
            env={**settings, "TOKENIZERS_PARALLELISM": "false"},
        )
    except subprocess.TimeoutExpired as error:
        raise UsageError(
            f"The tokenizer in {folder} took more than {MOST_S:g} s for the text.", "Give a shorter text."
        ) from error
    line, _, ids = done.stdout.partition(b"\n")
    if done.returncode or not line:
        raise UsageError(
            f"The tokenizer in {folder} ended the process that read it (exit status {done.returncode}), for "
            "example because it needs more memory than there is.",
            _TOKENIZER_STEP,
        )
    return json.loads(line), ids
