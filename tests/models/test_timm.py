"""timm's models by name, beside torchvision's of the same name."""

import runpy
from pathlib import Path

from farm.models import catalog, timm

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_the_written_names_and_sizes_are_timms():
    written = runpy.run_path(str(BENCHMARKS / "timm_names.py"))["by_size"]()
    told = {name: size for size, names in written.items() for name in names}
    assert told == {
        name: f"{entry.input_size} only" if entry.fixed_size else f"{entry.input_size}"
        for name, entry in timm.Timm().entries().items()
    }


def test_a_bare_name_that_both_have_means_torchvisions():
    assert catalog.find("resnet50").origin == "torchvision"
    assert catalog.find("timm/resnet50").name == "timm/resnet50"
    assert catalog.find("timm/mobilevit_s").name == "mobilevit_s"
    assert catalog.matching("resnet1?") == ["resnet18"]
    assert "timm/resnet18" in catalog.matching("timm/resnet1?")
    assert catalog.matching("mobilevit_x*") == ["mobilevit_xs", "mobilevit_xxs"]


def test_a_model_is_made_for_the_size_that_it_is_asked_for():
    from farm.training.extract import extract

    apart = extract(catalog.variant("timm/resnet18", 2, input_size=64))
    assert apart.flops == apart.model_flops > 0
    assert apart.refusal("timm/resnet18") is None
