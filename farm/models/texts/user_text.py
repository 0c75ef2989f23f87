"""Tokenize a user's text with a user's tokenizer, a folder with a `tokenizer.json`.

No code of the folder runs, no other file of it is opened, and nothing is downloaded. The library
`tokenizers` (the extra `language`) reads the file in a separate process
(`farm.models.texts.encode`)."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from farm.errors import SettingsError, UsageError
from farm.models.texts import Specials, in_rows, room_for_text, row_spans
from farm.types.tokens import Tokens, check_size

if TYPE_CHECKING:
    import numpy as np

MOST_TEXT_BYTES = 16 * 2**20
MOST_TOKENIZER_BYTES = 64 * 2**20
MOST_MEMORY_BYTES = 4 * 2**30
MOST_S = 60.0
_ENCODE = Path(__file__).with_name("encode.py")
_TOKENIZER_STEP = (
    "Give the folder of a tokenizer of Hugging Face's tokenizers, with its tokenizer.json."
)


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

    `farm.models.texts.row_spans` cuts the rows; a text that is too short for all rows starts again.
    The tokenizer gives the special ids around each row (``bare``: none); the model's ``specials``
    give the padding.

    Raises:
        UsageError: a file is missing, too large or malformed; the text is too short for one row, or
            does not fit the model.
        SettingsError: the library `tokenizers` is not installed.
    """
    import numpy as np

    check_size(batch, length)
    text_file, folder = Path(text_file), Path(tokenizer_folder)
    text = _read(text_file, "The text", MOST_TEXT_BYTES).replace("\r\n", "\n")
    pieces = _paragraphs(text, padded)
    if not pieces:
        raise UsageError(f"The text {text_file} is empty.", "Give a file that contains text.")
    ids, ends, first, last = _encode(folder, pieces, batch * length)
    tokens = len(ids)
    if not tokens:
        raise UsageError(
            f"The tokenizer in {folder} finds no tokens in {text_file}.", "Give another text."
        )
    if bare:
        first, last = (), ()
    specials = replace(specials or Specials(), first=first, last=last)
    largest = max(*first, *last, specials.pad, int(ids.max()))
    if largest >= vocabulary:
        raise UsageError(
            f"The tokenizer in {folder} gives the id {largest}, but the model's vocabulary ends "
            f"at {vocabulary - 1}.",
            "Give the tokenizer that belongs to the model.",
        )
    room = room_for_text(length, specials.around)
    if not padded and tokens < room:
        problem = (
            f"The text {text_file} has {tokens} tokens, but a row of {length} needs {room} tokens "
            "of text."
        )
        raise UsageError(
            problem,
            f"Give a longer text, --length {tokens + specials.around} or less, or --padded.",
        )
    spans = row_spans(ends, batch, room, padded=padded)
    return in_rows([ids[np.arange(*span) % tokens] for span in spans], length, specials)


def _read(path: Path, what: str, most_bytes: int) -> str:
    """The text of a regular file of at most ``most_bytes``."""
    try:
        if not path.is_file():
            reason = "is not a regular file" if path.exists() else "does not exist"
            if path.is_dir():
                reason = "is a folder"
            raise UsageError(f"{what} {path} {reason}.", "Give the path of a file.")
        with path.open("rb") as file:
            data = file.read(most_bytes + 1)
    except OSError as error:
        problem = f"{what} {path} cannot be read: {error.strerror or error}."
        raise UsageError(problem, "Check the path and the permissions of the file.") from error
    if len(data) > most_bytes:
        raise UsageError(
            f"{what} {path} is larger than {most_bytes // 2**20} MiB.", "Give a smaller file."
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        problem = f"{what} {path} is not UTF-8: byte {error.start} is invalid."
        raise UsageError(problem, "Save the file as UTF-8.") from error


def _paragraphs(text: str, padded: bool) -> list[str]:
    """The parts of the text between empty lines, or its lines if there are none; with the
    separators, unless padded.
    """
    separator = r"\n\n" if "\n\n" in text.strip() else r"\n"
    parts = re.split(rf"(?<={separator})(?=[^\n])", text)
    return [part.strip("\n") if padded else part for part in parts if part.strip()]


def _encode(
    folder: Path, paragraphs: list[str], needed: int
) -> tuple[np.ndarray, np.ndarray, tuple[int, ...], tuple[int, ...]]:
    """Run the tokenizer of a folder in another process. Return the token ids of the paragraphs (at
    least `needed` if the text is long enough), the end position of each paragraph, and the special
    ids that begin and end a row."""
    import numpy as np

    path = folder / "tokenizer.json"
    if not folder.is_dir():
        reason = "is a file" if folder.exists() else "does not exist"
        raise UsageError(f"The tokenizer's folder {folder} {reason}.", _TOKENIZER_STEP)
    if not path.exists():
        raise UsageError(f"The folder {folder} has no tokenizer.json.", _TOKENIZER_STEP)
    request = {
        "paragraphs": paragraphs,
        "needed": needed,
        "most_bytes": MOST_MEMORY_BYTES,
        "tokenizer": _read(path, "The tokenizer", MOST_TOKENIZER_BYTES),
    }
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("FARM_")
    }
    environment["TOKENIZERS_PARALLELISM"] = "false"
    # -P: no file in the script's folder replaces a module
    command = [sys.executable, "-P", str(_ENCODE)]
    try:
        done = subprocess.run(
            command,
            input=json.dumps(request).encode(),
            capture_output=True,
            timeout=MOST_S,
            env=environment,
        )
    except subprocess.TimeoutExpired as error:
        problem = f"The tokenizer in {folder} took more than {MOST_S:g} s for the text."
        raise UsageError(problem, "Give a shorter text.") from error
    line, _, ids = done.stdout.partition(b"\n")
    if done.returncode or not line:
        raise UsageError(
            f"The process that loaded the tokenizer in {folder} ended with exit status "
            f"{done.returncode}. The tokenizer may need more memory than is allowed.",
            _TOKENIZER_STEP,
        )
    answer = json.loads(line)
    if answer.get("absent"):
        problem = "A text of your own needs the library 'tokenizers', which is not installed."
        raise SettingsError(problem, "Install it with pip install 'operator-farm[language]'.")
    if "error" in answer:
        raise UsageError(
            f"The tokenizer.json in {folder} cannot be read: {answer['error']}.", _TOKENIZER_STEP
        )
    ends = np.cumsum([count for count in answer["counts"] if count], dtype=np.int64)
    return (
        np.frombuffer(ids, dtype=np.int32).astype(np.int64),
        ends,
        tuple(answer["first"]),
        tuple(answer["last"]),
    )
