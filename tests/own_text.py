"""A small text, and a tokenizer with a few words for it."""

import json

TEXT = "The cat sat on the mat.\n\nA dog did not.\nIt ran.\n\nThe end.\n"
WORDS = [
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "the",
    "cat",
    "sat",
    "on",
    "mat",
    "a",
    "dog",
    "did",
    "not",
    "it",
    "ran",
    "end",
    ".",
]


def tokenizer_json(**changes):
    special = {"id": "[CLS]", "type_id": 0}, {"id": "[SEP]", "type_id": 0}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": {"type": "Lowercase"},
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": special[0]},
                {"Sequence": {"id": "A", "type_id": 0}},
                {"SpecialToken": special[1]},
            ],
            "pair": [],
            "special_tokens": {
                name: {"id": name, "ids": [WORDS.index(name)], "tokens": [name]}
                for name in ("[CLS]", "[SEP]")
            },
        },
        "decoder": None,
        "model": {
            "type": "WordLevel",
            "vocab": {word: number for number, word in enumerate(WORDS)},
            "unk_token": "[UNK]",
        },
    } | changes


def write_own_text(folder):
    """Write both into an existing folder; return (file of the text, folder of the tokenizer)."""
    text, tokenizer = folder / "text.txt", folder / "tokenizer"
    text.write_text(TEXT)
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text(json.dumps(tokenizer_json()))
    return text, tokenizer
