"""A variant that reads somebody's own text: what goes into the model, and what is refused in one
line.
"""

import dataclasses

import pytest

from farm.errors import UsageError
from farm.models import catalog
from farm.settings import user_models
from farm.types.variant import Variant
from tests.own_text import WORDS, write_own_text


@pytest.fixture
def own(tmp_path):
    pytest.importorskip("tokenizers")
    text, tokenizer = write_own_text(tmp_path)
    return {"text": text, "tokenizer": tokenizer}


def read(variant):
    """What goes into the model, in words."""
    ids = catalog.example_inputs(variant, device="cpu")[0]
    return [" ".join(WORDS[number] for number in row) for row in ids.tolist()]


def test_an_encoder_reads_it_with_what_the_tokenizer_puts_around_a_row(own):
    variant = catalog.variant("bert-base", 2, length=6, **own)
    assert read(variant) == ["[CLS] the cat sat on [SEP]", "[CLS] the mat . a [SEP]"]
    assert str(variant) == f"bert-base 2x6 tokens float32 text {variant.text[:8]}"
    assert (
        variant
        == catalog.variant("bert-base", 2, length=6, **own)
        != catalog.variant("bert-base", 2, length=6)
    )


def test_without_a_length_rows_are_as_long_as_the_model_reads_by_itself(own):
    own["text"].write_text("The cat sat. " * 200)
    assert catalog.variant("bert-base", 2, **own).length == 128


def test_padding_and_mask_come_as_the_paragraphs_do(own):
    _, mask = catalog.example_inputs(
        catalog.variant("bert-base", 3, length=9, padded=True, **own), device="cpu"
    )
    assert mask.sum(1).tolist() == [9, 9, 5]


def test_in_decode_each_row_reads_one_token_of_it(own):
    assert read(catalog.variant("gpt2", 3, phase="decode", cache=16, **own)) == [
        "the",
        "cat",
        "sat",
    ]


def test_what_a_decoder_reads_beside_a_text_is_how_that_goes_on(own):
    text, beside, *_ = catalog.example_inputs(
        catalog.variant("t5-small", 1, length=6, **own), device="cpu"
    )
    assert [WORDS[row[1]] for row in (*text.tolist(), *beside.tolist())] == ["the", "the"]
    assert [WORDS[row[2]] for row in (*text.tolist(), *beside.tolist())] == ["cat", "mat"]


def test_with_another_batch_it_begins_again(own):
    variant = catalog.variant("bert-base", 1, length=6, **own)
    assert read(dataclasses.replace(variant, batch=2)) == ["[CLS] the cat sat on [SEP]"] * 2


def test_it_is_extracted_as_any_other(own):
    from farm.training.extract import extract

    said = {"length": 6, "layers": 1, "padded": True}
    tuples = [
        extract(catalog.variant("bert-base", 2, **said, **more)).capture.tuples
        for more in ({}, own)
    ]
    assert [*tuples[0]] == [*tuples[1]]


@pytest.mark.parametrize(
    ("model", "leave_out", "problem"),
    [
        ("bert-base", "tokenizer", "--text needs --tokenizer"),
        ("bert-base", "text", "--tokenizer needs --text"),
        ("resnet18", "", "resnet18 takes no tokens and no text"),
        ("wav2vec2-base", "", "takes no tokens"),
        ("bert-base", "", "has 18 tokens, but a row of 128 needs 126"),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_line(own, model, leave_out, problem):
    own.pop(leave_out, None)
    with pytest.raises(UsageError, match=problem) as caught:
        catalog.variant(model, 2, **own)
    assert caught.value.next_step


def test_ids_that_are_not_at_hand_or_of_another_size_are_refused(own):
    with pytest.raises(UsageError, match="are not stored here") as caught:
        catalog.example_inputs(
            Variant("bert-base", 2, 0, length=6, phase="encode", text="0" * 32), device="cpu"
        )
    assert "--tokenizer" in caught.value.next_step
    variant = catalog.variant("bert-base", 2, length=6, **own)
    with pytest.raises(UsageError, match="a row has 6 tokens"):
        catalog.example_inputs(dataclasses.replace(variant, length=7), device="cpu")


def test_a_process_that_is_given_ids_each_time_keeps_the_last(own):
    first, second = (
        catalog.variant("bert-base", 2, length=length, **own).text for length in (6, 7)
    )
    ids = user_models.text(second)
    user_models.forget_texts()
    user_models.add_text(second, ids)
    assert user_models.has_text(second)
    assert not user_models.has_text(first)
