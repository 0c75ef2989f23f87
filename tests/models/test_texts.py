"""Language models read ids of a text's distribution: of the farm's corpus, or of a user's own
text.
"""

import json
import os

import numpy as np
import pytest

from farm.errors import DamagedPackage, SettingsError, UsageError
from farm.models import texts
from farm.models.texts import FOLDER, KINDS, Specials, token_ids, user_text
from tests.own_text import WORDS, tokenizer_json, write_own_text

BERT = Specials((101,), (102,), pad=0, others=(100, 103))


def occurrences(tokens):
    return np.sort(np.bincount(tokens.ids.ravel()))[::-1]


@pytest.mark.parametrize(
    ("kind", "vocabulary"), list(zip(KINDS, (30522, 50257, 32128, 32000), strict=True))
)
def test_ids_have_a_texts_distribution_over_the_models_own_vocabulary(kind, vocabulary):
    tokens = token_ids(kind, vocabulary, 64, 512)
    found = occurrences(tokens)
    assert 0.02 < found[0] / found.sum() < 0.08  # "the", or a comma
    assert found[:100].sum() / found.sum() > 0.35
    assert 3000 < (found > 0).sum() < 8000  # uniform ids would be 15,000 others and more
    assert vocabulary * 0.95 < tokens.largest < vocabulary


def test_a_longer_text_has_new_words_ever_more_slowly():
    new = [
        (occurrences(token_ids("byte_level", 128256, batch, 4096)) > 0).sum()
        for batch in (8, 32, 128)
    ]
    assert new[0] * 1.5 < new[1] < new[0] * 3
    assert new[1] * 1.5 < new[2] < new[1] * 3


def test_ids_are_the_same_wherever_they_are_asked_for():
    assert (
        token_ids("wordpiece", 30522, 2, 16, specials=BERT).id == "b309529e06e6d8bf9e878cd09c1f6937"
    )
    assert (
        token_ids("unigram", 32128, 64, 2048, padded=True).id == "9a16eb15acc93ee4b193f042870d2d31"
    )


def test_without_padding_each_row_is_full_and_goes_on_where_the_last_one_ended():
    tokens = token_ids("wordpiece", 30522, 8, 128, specials=BERT)
    assert not tokens.padded
    assert set(tokens.ids[:, 0]) == {101}
    assert set(tokens.ids[:, -1]) == {102}
    text = tokens.ids[:, 1:-1]
    assert not np.isin(text, list(BERT.all)).any()
    assert (
        token_ids("wordpiece", 30522, 4, 254, specials=BERT).ids[:, 1:-1].ravel()
        == text.ravel()[: 4 * 252]
    ).all()


@pytest.mark.parametrize("padding", ["left", "right"])
def test_with_padding_rows_are_as_long_as_paragraphs_come(padding):
    specials = Specials((1,), (2,), pad=3, padding=padding)
    tokens = token_ids("bpe", 32000, 32, 128, padded=True, specials=specials)
    assert len(set(tokens.row_lengths)) > 10
    assert 0.25 < sum(tokens.row_lengths) / (32 * 128) < 0.75
    assert ((tokens.ids == 3) == (tokens.mask == 0)).all()
    assert (tokens.ids[:, 0 if padding == "left" else -1] == 3).any()
    assert (tokens.ids == 1).sum() == (tokens.ids == 2).sum() == 32


def test_a_vocabulary_smaller_than_the_corpus_has_is_enough():
    assert token_ids("bpe", 99, 8, 128).largest < 99


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (("wordpeice", 30522, 1, 8), "no built-in tokenizer 'wordpeice'"),
        (("wordpiece", 30522, 0, 8), "The batch is 0"),
        (
            ("wordpiece", 30522, 1, 2),
            "no room for a text, because 2 of its tokens are special tokens",
        ),
        (("wordpiece", 90, 1, 8), "special id 100 is outside the vocabulary of 90 ids"),
        (("wordpiece", 30522, 2**12, 2**13), "are allowed"),
    ],
)
def test_what_cannot_be_had_is_refused_in_one_line(wanted, message):
    with pytest.raises(UsageError, match=message) as caught:
        token_ids(*wanted, specials=BERT)
    assert "\n" not in caught.value.message
    assert caught.value.next_step


@pytest.mark.parametrize("kind", KINDS)
def test_the_ids_that_ship_are_those_of_a_tokenizer_trained_on_the_corpus(kind):
    pytest.importorskip("tokenizers")
    from benchmarks.text_ids import corpus, ranks, trained

    paragraphs = corpus()
    made = ranks(trained(kind, paragraphs), paragraphs)
    with np.load(FOLDER / f"{kind}.npz") as stored:
        assert len(stored["ends"]) == len(paragraphs)
        # Trained twice, a tokenizer may choose another of two equally frequent pieces.
        assert len(made["ranks"]) == pytest.approx(len(stored["ranks"]), rel=0.01)
        assert made["occurrences"][:100] == pytest.approx(stored["occurrences"][:100], rel=0.05)


@pytest.fixture
def own(tmp_path):
    """A text and a tokenizer's folder, and a function that reads them."""
    text, folder = write_own_text(tmp_path)

    def read(batch=2, length=6, vocabulary=100, **more):
        pytest.importorskip("tokenizers")
        return user_text.tokenize(text, folder, vocabulary, batch, length, **more)

    read.text, read.folder = text, folder
    return read


def words(tokens):
    return [" ".join(WORDS[number] for number in row) for row in tokens.ids]


def test_a_users_text_is_read_by_the_users_tokenizer(own):
    assert words(own(batch=4)) == [
        "[CLS] the cat sat on [SEP]",
        "[CLS] the mat . a [SEP]",
        "[CLS] dog did not . [SEP]",
        "[CLS] it ran . the [SEP]",
    ]


def test_a_users_text_that_is_too_short_for_all_rows_begins_again(own):
    assert words(own(batch=2, length=15)) == [
        "[CLS] the cat sat on the mat . a dog did not . it [SEP]",
        "[CLS] ran . the end . the cat sat on the mat . a [SEP]",
    ]


def test_a_users_paragraphs_are_padded_as_the_model_pads(own):
    rows = own(batch=4, length=9, padded=True, specials=Specials(pad=99, padding="left"))
    assert rows.row_lengths == (9, 9, 5, 9)
    assert rows.ids[2].tolist() == [99] * 4 + [
        WORDS.index(word) for word in ["[CLS]", "the", "end", ".", "[SEP]"]
    ]


def test_a_users_text_without_empty_lines_has_its_lines_for_paragraphs(own):
    own.text.write_text("The cat.\nThe dog.\r\nIt ran.\n")
    assert own(batch=3, length=5, padded=True).row_lengths == (5, 5, 5)


def test_the_files_own_truncation_and_padding_do_not_count(own):
    cut = {"max_length": 2, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    (own.folder / "tokenizer.json").write_text(json.dumps(tokenizer_json(truncation=cut)))
    assert words(own(batch=1)) == ["[CLS] the cat sat on [SEP]"]


def refusal(own, **asked):
    with pytest.raises(UsageError) as caught:
        own(**asked)
    assert "\n" not in caught.value.message
    assert caught.value.next_step
    return caught.value.message


def test_a_text_that_is_none_is_refused(own):
    own.text.write_text(" \n\n")
    assert "is empty" in refusal(own)
    own.text.write_bytes(b"caf\xe9")
    assert "is not UTF-8: byte 3" in refusal(own)
    own.text.write_bytes(b"x" * (user_text.MOST_TEXT_BYTES + 1))
    assert "larger than 16 MiB" in refusal(own)
    own.text.unlink()
    assert "does not exist" in refusal(own)
    os.mkfifo(own.text)
    assert "is not a regular file" in refusal(own)


def test_a_text_too_short_for_a_row_says_how_long_it_is(own):
    assert "18 tokens, but a row of 64 needs 62" in refusal(own, length=64)


def test_a_tokenizer_of_another_model_is_refused(own):
    assert "id 15, but the model's vocabulary ends at 11" in refusal(own, vocabulary=12)


@pytest.mark.parametrize(
    "content",
    [
        "no JSON",
        "[" * 100_000,
        '{"version": "1.0"}',
        json.dumps(tokenizer_json(model={"type": "Pickle", "path": "model.pkl"})),
        json.dumps(
            tokenizer_json(
                pre_tokenizer={"type": "Split", "pattern": {"Regex": "("}, "behavior": "Removed"}
            )
        ),
        # Each character becomes a thousand, five times over.
        json.dumps(
            tokenizer_json(
                normalizer={
                    "type": "Sequence",
                    "normalizers": [
                        {"type": "Replace", "pattern": {"Regex": "."}, "content": "x" * 1000}
                    ]
                    * 5,
                }
            )
        ),
    ],
    ids=["no JSON", "deep", "nothing", "unknown", "expression", "bomb"],
)
def test_a_tokenizer_that_is_none_or_hostile_is_refused(own, content, monkeypatch):
    monkeypatch.setattr(user_text, "MOST_MEMORY_BYTES", 2**30)
    (own.folder / "tokenizer.json").write_text(content)
    assert str(own.folder) in refusal(own)


def test_a_folder_that_is_no_tokenizers_is_refused(own):
    (own.folder / "tokenizer.json").write_bytes(b"\xff")
    assert "is not UTF-8" in refusal(own)
    (own.folder / "tokenizer.json").unlink()
    (own.folder / "tokenizer.py").write_text("raise SystemExit('code of the folder is run')")
    assert "has no tokenizer.json" in refusal(own)
    own.folder = own.folder / "tokenizer.py"


def test_without_the_extra_the_line_that_installs_it_is_told(own, tmp_path, monkeypatch):
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "tokenizers.py").write_text("raise ImportError")
    monkeypatch.setenv("PYTHONPATH", str(hidden))
    with pytest.raises(SettingsError, match="not installed") as caught:
        own()
    assert "operator-farm[language]" in caught.value.next_step


def test_a_damaged_text_of_the_package_is_named(tmp_path, monkeypatch):
    (tmp_path / "unigram.npz").write_bytes((texts.FOLDER / "unigram.npz").read_bytes()[:20_000])
    monkeypatch.setattr(texts, "FOLDER", tmp_path)
    texts._corpus.cache_clear()
    with pytest.raises(DamagedPackage, match=r"unigram\.npz' of the installed package") as caught:
        texts._corpus("unigram")
    assert "Install the package again" in caught.value.next_step
