"""Cards side by side: the same model on each, with the memory and the price."""

import json

import pytest

from farm.addons.predict.floor import IdlePower
from farm.addons.predict.side_by_side import prices_of
from farm.errors import UsageError
from farm.models import catalog
from farm.types.format import count_of
from tests.addons.predict.test_predictions import MODEL, own, transferred  # noqa: F401
from tests.cli.conftest import farm  # noqa: F401
from tests.types.test_card_file import CARD

ASKED = MODEL[:-1]


def test_cards_are_shown_side_by_side_with_time_memory_and_price(transferred, tmp_path):
    file = tmp_path / "my_card.toml"
    file.write_text(CARD)
    words = (*ASKED, "H200,B200", "--card-file", str(file), "--price", "h200=3.6,B200=7.2")
    found = json.loads(transferred(*words, "--json").stdout)
    h200, b200, described = found["cards"]
    assert [one["card_model"] for one in found["cards"]] == ["NVIDIA H200", "B200", "RTX 4090 D"]
    # Two samples in time_us: 3.6 an hour are 1e-9 a microsecond.
    assert h200["price_per_million"] == pytest.approx(h200["time_us"] * 1e-9 / 2 * 1e6)
    assert b200["price_per_million_high"] == pytest.approx(b200["time_high_us"] * 2e-9 / 2 * 1e6)
    assert (b200["price_is_for"], described["price_per_million"]) == ("samples", None)
    assert (h200["transfer"], b200["transfer"]["readings"]) == (None, 0)
    assert described["transfer"]["data_sheet"] == str(file)
    assert all(one["memory"]["fits"] for one in found["cards"][1:])

    said = " ".join(transferred(*words).stdout.split())
    assert "fits into measured" in said
    assert "RTX 4090 D: from a data sheet" in said
    assert "nothing measured on this card" in said


def test_one_card_from_a_data_sheet_says_how_wide_its_figures_are(transferred):
    said = " ".join(transferred(*ASKED, "B200", "--price", "4").stdout.split())
    assert "B200: from a data sheet (" in said
    assert "% in time, -" in said
    assert "for a million samples" in said


def test_sizes_and_cards_are_rows(transferred):
    found = transferred(*MODEL[:2], "-b", "2,3", "--input-size", "64", "--card", "B200,A10")
    assert [found.stdout.count(name) for name in ("resnet18 2x64", "resnet18 3x64")] == [2, 2]


IMAGES = """
import torch
def cnn(): return torch.nn.Conv2d(3, 4, 3), torch.randn(16, 3, 256, 192)
"""


def test_an_own_model_has_the_sizes_of_its_inputs_in_every_title(transferred, tmp_path):
    file = tmp_path / "titled_nets.py"
    file.write_text(IMAGES)
    title = "titled_nets:cnn 16x3x256x192 float32"
    asked = ("estimate", f"{file}:cnn", "--card")
    cards = transferred(*asked, "H200,B200").stdout
    assert cards.splitlines()[0] == title
    assert transferred(*asked, "B200", "--why").stdout.startswith(f"{title} on B200, estimated")
    curve = transferred(*asked, "B200", "-b", "4,16").stdout
    assert (title in curve, title.replace(" 16x", " 4x") in curve) == (True, True)
    refused = transferred(*asked, "H200", "--fill", "none")
    assert f"No tuple of {title} has a reading" in refused.stderr
    refused = transferred(*asked, "H200", "--fill", "none", "--compile")
    assert f"The kernels of {title} compiled default are unknown" in refused.stderr


def test_the_memory_of_a_pass_that_fits_is_shown(transferred):
    words = (*ASKED, "B200")
    shown = json.loads(transferred(*words, "--json").stdout)["memory"]
    assert (shown["fits"], shown["needed_bytes"]) == (True, None), "the JSON builds no model"
    (line,) = [row for row in transferred(*words).stdout.splitlines() if "  memory " in row]
    # The images, and the input and output of the first normalisation.
    activations_bytes = 4 * (2 * 3 * 64 * 64 + 2 * (2 * 64 * 32 * 32))
    weights_bytes = sum(one.nbytes for one in catalog.build("resnet18").state_dict().values())
    needed = count_of(weights_bytes + activations_bytes, "B")
    assert f"about {needed} (weights {count_of(weights_bytes, 'B')}, activations 1.15 MB)" in line
    assert line.rstrip().endswith("GB of one B200")
    assert transferred(*ASKED, "B200,A10").stdout.count(f"yes ({needed})") == 2


def test_a_low_end_that_is_the_energy_of_an_idle_card_is_told(transferred, monkeypatch):
    before = json.loads(transferred(*ASKED, "B200", "--json").stdout)
    assert not [note for note in before["notes"] if "idle card" in note]
    power_w = 1.2e3 * before["energy_low_mj"] / before["time_low_us"]
    power = IdlePower(power_w, "measured on this card model")
    monkeypatch.setattr("farm.addons.predict.estimating.idle_power", lambda *_: power)
    told = json.loads(transferred(*ASKED, "B200", "--json").stdout)
    assert told["energy_low_mj"] == pytest.approx(1.2 * before["energy_low_mj"])
    assert told["energy_mj"] >= before["energy_mj"]
    (note,) = [note for note in told["notes"] if "idle card" in note]
    assert f"({power_w:.0f} W, measured on this card model)" in note


@pytest.mark.parametrize("option", [("--measure", "1"), ("--generate", "4"), ("--png", "a.png")])
def test_what_needs_one_card_refuses_several(transferred, option):
    said = transferred(*ASKED, "H200,B200", *option)
    assert (said.code, said.stdout) == (2, "")
    assert "need one card" in said.stderr


def test_prices_are_by_the_names_of_the_cards():
    assert prices_of("", ["H100"]) == {}
    assert prices_of("2.5", ["H100", "A10"]) == {"H100": 2.5, "A10": 2.5}
    assert prices_of("h100=2.5, A10=0.7", ["H100", "A10"]) == {"H100": 2.5, "A10": 0.7}
    for wrong in ("H100=-1", "H100=x", "H100=inf", "B200=3"):
        with pytest.raises(UsageError):
            prices_of(wrong, ["H100"])


def test_an_estimate_is_explained_as_a_report(own):
    found = json.loads(own(*MODEL, "--why", "--json").stdout)
    estimate = json.loads(own(*MODEL, "--json").stdout)
    origins = {row["origin"] for row in found["rows"]}
    assert origins == {"reused", "estimated"}
    predicted = sum(row["time_us"] for row in found["rows"] if row["origin"] == "estimated")
    assert predicted == pytest.approx(estimate["predicted_us"], rel=0.2)
    assert {row["bound"] for row in found["rows"]} <= {"compute", "memory", "launch"}
    assert found["causes"] == sorted(found["causes"], key=lambda cause: -cause["saves_us"])
    assert "fusion" in {cause["topic"] for cause in found["causes"]}
    said = own(*MODEL, "--why").stdout
    assert "  sum of the operators: ~" in said
    assert f" on {found['card_model']}\n" in said
    assert "It saves at most" in said
    refused = own(*MODEL, "--why", "--generate", "3")
    assert "--why explains one size on one card" in refused.stderr
