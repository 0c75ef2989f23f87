"""One card in full."""

from __future__ import annotations

import re

from cli.cards import lines

ROW = {
    "id": "GPU-1234",
    "index": 0,
    "model": "NVIDIA H200",
    "driver": "580.65",
    "memory_bytes": 150 * 2**30,
    "fingerprint": {
        "copy_bytes_per_s": 4.1e12,
        "matmul_flops_per_s": {"float32": 5.1e13, "bfloat16": 7.9e14},
        "power_average": {"lag_s": 0.55, "rise_s": 0.8},
        "base_w_per_c": {"value": 0.9, "half_width": 0.2, "at_w": 127.0},
        "w_per_c": {"value": 1.5, "half_width": 0.4, "at_w": 650.0},
    },
}


def test_a_fingerprint_is_shown_with_its_units() -> None:
    shown = dict(lines(ROW))
    assert shown["copy within its memory"] == "4100 GB/s, counting bytes read and bytes written"
    assert shown["matrix product, bfloat16"] == "790 TFLOP/s"
    sensor = shown["averaged power sensor, after a step of the load"]
    assert re.findall(r"\d.\d+ s", sensor) == ["0.55 s", "0.80 s"]
    assert shown["rise of power with temperature, under load"] == "1.5 ± 0.4 W/°C"
    assert shown["rise of power with temperature, without work"] == "0.9 ± 0.2 W/°C"
    assert "not measured yet" in dict(lines({**ROW, "fingerprint": {}}))["fingerprint"]


def test_a_figure_within_its_interval_is_not_told_as_one() -> None:
    for value, half_width in ((1.9, 28.9), (-0.3, 0.4)):
        shown = dict(
            lines({**ROW, "fingerprint": {"w_per_c": {"value": value, "half_width": half_width}}})
        )
        assert (
            shown["rise of power with temperature, under load"]
            == f"no clear effect ({value} ± {half_width} W/°C)"
        )
    shown = dict(lines({**ROW, "fingerprint": {"w_per_c": {"value": -1.5, "half_width": 0.4}}}))
    assert shown["rise of power with temperature, under load"] == "-1.5 ± 0.4 W/°C"


def test_a_card_that_is_left_out_says_why_in_full() -> None:
    assert "not usable" not in dict(lines(ROW))
    reason = "the driver says 'GPU is lost'; reset the card or restart the host"
    assert dict(lines({**ROW, "state": "refused", "state_reason": reason}))["not usable"] == reason


def test_what_a_card_does_and_runs_is_shown() -> None:
    software = {
        "id": "abcd",
        "torch": "2.11.0+cu130",
        "cuda": "13.0",
        "cudnn": "",
        "python": "3.11.2",
    }
    shown = dict(
        lines(
            {
                **ROW,
                "waiting": 7,
                "deferred": 2,
                "done_last_hour": 1500,
                "queue": "card.GPU-1234",
                "software": software,
            }
        )
    )
    assert shown["software"] == "torch 2.11.0+cu130, CUDA 13.0, Python 3.11.2 (abcd)"
    assert shown["queue"] == "card.GPU-1234"
    assert shown["items waiting"].startswith("7; 2 of them wait ")
    assert shown["items measured in the last hour"] == "1500"
    assert "worker" not in shown
    assert not {"items waiting", "software", "queue"} & set(dict(lines(ROW)))
