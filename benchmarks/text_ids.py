"""Train a tokenizer of each kind on the farm's corpus, and write the corpus as ids of each kind.

    python benchmarks/text_ids.py        # writes farm/models/texts/*.npz; needs the extra
    `language`

The farm reads only the ids, so they are equal on every host and with every version of `tokenizers`.
A token's number is its rank by frequency: 0 is the most frequent token. `farm.models.texts`
converts ranks to a model's ids."""

from __future__ import annotations

import collections
import json
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from farm.models import texts

#: Entries of each vocabulary, so that a word has about 1.3 tokens, as with large vocabularies in
#: English.
ENTRIES = {"wordpiece": 5000, "byte_level": 5000, "unigram": 4000, "bpe": 5000}


def corpus() -> list[str]:
    """The paragraphs of the corpus, for the training of the tokenizers."""
    return [
        part
        for part in (texts.FOLDER / "corpus.txt").read_text(encoding="utf-8").split("\n\n")
        if part.strip()
    ]


def _wordpiece() -> tuple[Tokenizer, Any]:
    """Like BERT's: lower case, words and punctuation separated."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer, trainers.WordPieceTrainer(
        vocab_size=ENTRIES["wordpiece"], special_tokens=["[UNK]"], show_progress=False
    )


def _byte_level() -> tuple[Tokenizer, Any]:
    """Like GPT-2's, RoBERTa's and Llama 3's: every byte has a token, spaces belong to the following
    word.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return tokenizer, trainers.BpeTrainer(
        vocab_size=ENTRIES["byte_level"], initial_alphabet=alphabet, show_progress=False
    )


def _unigram() -> tuple[Tokenizer, Any]:
    """Like T5's, ALBERT's and XLNet's: the most likely segmentation of a sentence."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return tokenizer, trainers.UnigramTrainer(
        vocab_size=ENTRIES["unigram"],
        unk_token="<unk>",
        special_tokens=["<unk>"],
        show_progress=False,
    )


def _bpe() -> tuple[Tokenizer, Any]:
    """Like Llama 2's and Mistral's: pairs of characters, and bytes for unknown characters."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.ByteFallback()
    special = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    return tokenizer, trainers.BpeTrainer(
        vocab_size=ENTRIES["bpe"], special_tokens=special, limit_alphabet=400, show_progress=False
    )


_MAKERS = {"wordpiece": _wordpiece, "byte_level": _byte_level, "unigram": _unigram, "bpe": _bpe}


def trained(kind: str, paragraphs: list[str]) -> Tokenizer:
    tokenizer, trainer = _MAKERS[kind]()
    tokenizer.train_from_iterator(paragraphs, trainer)
    return tokenizer


def ranks(tokenizer: Tokenizer, paragraphs: list[str]) -> dict[str, np.ndarray]:
    """Return the stored arrays of a kind: the corpus as ranks, the end of each paragraph, and the
    frequency of each rank."""
    rows = [encoding.ids for encoding in tokenizer.encode_batch(paragraphs)]
    found = collections.Counter(number for row in rows for number in row).most_common()
    rank_of = {number: rank for rank, (number, _) in enumerate(found)}
    return {
        "ranks": np.array([rank_of[number] for row in rows for number in row], dtype="<u2"),
        "ends": np.cumsum([len(row) for row in rows], dtype="<u4"),
        "occurrences": np.array([count for _, count in found], dtype="<u2"),
    }


if __name__ == "__main__":
    paragraphs = corpus()
    words = sum(len(paragraph.split()) for paragraph in paragraphs)
    for kind in texts.KINDS:
        tokenizer = trained(kind, paragraphs)
        made = ranks(tokenizer, paragraphs)
        np.savez_compressed(texts.FOLDER / f"{kind}.npz", **made)
        tokens = len(made["ranks"])
        print(
            json.dumps(
                {
                    "kind": kind,
                    "entries": tokenizer.get_vocab_size(),
                    "tokens": tokens,
                    "used": len(made["occurrences"]),
                    "at_least_5": int((made["occurrences"] >= 5).sum()),
                    "tokens_per_word": round(tokens / words, 2),
                    "most": made["occurrences"][:5].tolist(),
                }
            )
        )
