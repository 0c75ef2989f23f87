"""The peaks of a card model are those of a typical card, not of the first one."""

from farm.types.roofline import median_fingerprint


def fingerprint(float32, bytes_per_s=3e12):
    return {
        "copy_bytes_per_s": bytes_per_s,
        "matmul_flops_per_s": {"float32": float32},
        "driver": "580",
    }


def test_an_outlier_among_the_cards_does_not_set_the_peaks():
    cards = [fingerprint(34e12), fingerprint(51e12), fingerprint(52e12)]
    assert median_fingerprint(cards) == {
        "copy_bytes_per_s": 3e12,
        "matmul_flops_per_s": {"float32": 51e12},
    }


def test_cards_without_a_fingerprint_do_not_count():
    assert median_fingerprint([None, {}]) == {}
    assert median_fingerprint([None, fingerprint(50e12)])["matmul_flops_per_s"] == {
        "float32": 50e12
    }


def test_a_figure_that_is_not_a_number_does_not_count():
    cards = [{"copy_bytes_per_s": None}, {"copy_bytes_per_s": True}, fingerprint(50e12)]
    assert median_fingerprint(cards)["copy_bytes_per_s"] == 3e12
