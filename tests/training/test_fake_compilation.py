"""The compiler's cache is filled with fake tensors, and a compilation with real ones uses it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from farm.benchmark.subjects import compiled_model
from farm.errors import CaptureError, Unmeasurable
from farm.models import catalog
from farm.operators.compiled import CompiledPass
from farm.settings import settings
from farm.training import fake_compilation
from farm.types.protocol import Protocol
from farm.types.subject import Subject
from farm.types.variant import Variant
from tests import slow
from tests.operators.compiled_models import needs_compiler

CPU = torch.device("cpu")
FOLDER = Path(__file__).parent.parent / "operators"


@pytest.fixture(autouse=True)
def _models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    models = {name: f"compiled_models:{name}" for name in ("two", "refused")}
    monkeypatch.setenv("FARM_MODELS", json.dumps(models))
    monkeypatch.setenv("FARM_MODELS_PATH", str(FOLDER))
    monkeypatch.setenv("FARM_COMPILER_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    monkeypatch.setenv("TRITON_CACHE_DIR", "")
    settings.cache_clear()
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def variant(name: str, **fields: object) -> Variant:
    return dataclasses.replace(catalog.variant(name, batch=4), compile="default", **fields)  # type: ignore[arg-type]


@slow.COMPILER
@needs_compiler
def test_a_compilation_with_real_tensors_finds_the_code_that_one_with_fake_tensors_made() -> None:
    asked = variant("two")
    torch.set_num_threads(1)
    counters.clear()
    fake_compilation.compile_on_fakes(asked, CPU, grad=False)
    assert counters["inductor"]["fxgraph_cache_miss"] == 1
    counters.clear()
    model, arguments = (
        catalog.build(asked, device="cpu"),
        catalog.example_inputs(asked, device="cpu"),
    )
    with torch.no_grad():
        compiled = CompiledPass(model, arguments, CPU, mode="default")
        assert counters["inductor"]["fxgraph_cache_hit"] == 1
        assert counters["inductor"]["fxgraph_cache_miss"] == 0
        torch.testing.assert_close(compiled.run(), model(*arguments))


@needs_compiler
def test_a_refused_model_is_an_outcome_with_the_reason_of_the_compiler() -> None:
    asked = variant("refused")
    with pytest.raises(CaptureError, match="no shape is known"):
        fake_compilation.compile_on_fakes(asked, CPU, grad=False)
    subject = Subject("variant", asked.id, asked.to_json(), None, {"variant": asked.to_json()})
    with pytest.raises(Unmeasurable) as caught:
        compiled_model.fill_cache(subject, Protocol(launch="eager"), CPU)
    assert caught.value.reason == "raised"
