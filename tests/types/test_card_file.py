"""A card that a user describes: its figures get the units of a data sheet, and wrong ones are
refused with what to write.
"""

import pytest

from farm.errors import UsageError
from farm.types.card_file import card_of_file
from farm.types.data_sheets import data_sheet, data_sheets, sheet_name_of

CARD = """
name = "RTX 4090 D"
float32_tflop_per_s = 73.5
half_tflop_per_s = 147
bandwidth_gb_per_s = 1008
memory_gb = 24
multiprocessors = 114
l2_mb = 72
power_limit_w = 425
"""


def card_of(text, folder):
    path = folder / "my_card.toml"
    path.write_text(text)
    return card_of_file(path)


def test_a_card_of_a_file_is_a_name_with_its_own_sheet(tmp_path):
    card = card_of(CARD, tmp_path)
    assert (card, sheet_name_of(card)) == ("RTX 4090 D", "RTX 4090 D")
    sheet = data_sheet("cuda", card)
    assert (sheet.float32, sheet.tf32, sheet.half) == (73.5e12, 73.5e12, 147e12)
    assert (sheet.bytes_per_s, sheet.memory_bytes, sheet.l2_bytes) == (1008e9, 24e9, 72_000_000)
    assert (sheet.multiprocessors, sheet.power_limit_w, sheet.launch_floor_us) == (114, 425, 2.5)
    # The name alone, such as that of a card in an imported database, has no sheet.
    assert sheet_name_of(str(card).upper()) == ""


@pytest.mark.parametrize(
    ("old", "new", "message", "step"),
    [
        ("memory_gb = 24", "memory_gb = 24e9", "is not a number from 0.5 to 10,000 GB", "in GB"),
        ("memory_gb = 24", "memory_gb = '24'", "memory_gb = 24 is not a number", "in GB"),
        ("memory_gb = 24", "memory_gb = nan", "memory_gb = nan is not a number", "in GB"),
        ("l2_mb = 72", "", "lacks l2_mb", "from 0.1 to 10,000 MB"),
        ("l2_mb", "l2_m", "an unknown key 'l2_m'", "l2_mb"),
        ("RTX 4090 D", "RTX 4090", "of which the farm has a data sheet", "--card 'RTX 4090'"),
        ('name = "RTX 4090 D"', "", "does not name the card", "name ="),
        ("name =", "name", "is not TOML", "memory_gb = 24"),
    ],
)
def test_a_wrong_figure_is_refused_with_what_to_write(tmp_path, old, new, message, step):
    with pytest.raises(UsageError) as refused:
        card_of(CARD.replace(old, new), tmp_path)
    assert message in refused.value.message
    assert step in refused.value.next_step


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(UsageError, match="cannot be read"):
        card_of_file(tmp_path / "nothing.toml")


def test_every_sheet_has_the_memory_of_its_card():
    for sheet in data_sheets().values():
        assert 15.8e9 <= sheet.memory_bytes <= 256e9
