"""The documents of the golden corpus: what the farm says about fixed models and about the packaged
readings.

A test compares a digest of each document with the digest on file (`test_corpus.py`). To see what a
change does to the documents themselves, write them before and after the change, and compare the
folders:

    python -m tests.corpus.documents before
    git switch my-change
    python -m tests.corpus.documents after
    diff -r before after
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import yaml
from rich.console import Console
from sqlmodel import Session, select

from cli import report_tables
from farm.exchange.export import as_table
from farm.exchange.packaged import packaged_database
from farm.models import catalog
from farm.report import layers, report
from farm.store import tables
from farm.subjects.label import label_of
from farm.training.extract import extract
from farm.types.variant import Variant

Document = dict[str, Any]

FOLDER = Path(__file__).parent
WIDTH = 100
#: The age of a reading depends on the day on which a report is made.
AGE = re.compile(r"measured\s(?:\d+\s\w+\s)+ago")


def variants(part: str) -> list[Variant]:
    """Return the variants of `variants.yml` in one of its two parts, ``quick`` or ``slow``."""
    listed = yaml.safe_load((FOLDER / "variants.yml").read_text())[part]
    return [catalog.variant(fields.pop("model"), **fields) for fields in map(dict, listed)]


def capture_document(variant: Variant) -> Document:
    """Return the capture of a variant: its calls, its tuples with their costs, and its tensors."""
    extraction = extract(variant)
    captured = extraction.capture
    tuples = {}
    for tuple_id, spec in captured.tuples.items():
        cost = extraction.costs[tuple_id]
        tuples[tuple_id] = [label_of(spec), captured.counts[tuple_id], cost.flops, cost.bytes]
    return {
        "variant": [variant.id, str(variant)],
        "model_flops": extraction.model_flops,
        "refusal": str(extraction.refusal(variant.model)),
        "tuples": tuples,
        "calls": [asdict(call) for call in captured.calls],
        "tensors": [asdict(tensor) for tensor in captured.tensors],
        "operators": dict(sorted(captured.operators.items())),
    }


def packaged_jobs(session: Session) -> list[str]:
    """Return the ids of all packaged jobs, sorted."""
    return sorted(session.exec(select(tables.Job.id)))


def job_document(session: Session, job_id: str) -> Document:
    """Return the report of a job as JSON and as text, and its cost by module."""
    built = report.build(session, job_id)
    console = Console(width=WIDTH, record=True, file=io.StringIO(), color_system=None)
    console.print(report_tables.report(built))
    words = AGE.sub("", console.export_text()).split()
    document = {"report": built.to_json(), "text": " ".join(words)}
    if built.kind == "model":
        document["layers"] = layers.layers(session, built, "module", 1, outputs=False).to_json()
    return document


def export_document(session: Session, table: str) -> Document:
    """Return the digest of each column of an exported table of the packaged readings, sorted by its
    first columns.
    """
    arrow = as_table(session, table)  # type: ignore[arg-type]
    columns = {name: _encoded(arrow[name]) for name in sorted(arrow.column_names)}
    rows = [", ".join(texts) + "}" for texts in zip(*columns.values(), strict=True)]
    order = sorted(range(arrow.num_rows), key=rows.__getitem__)
    return {
        name: _digest_of(f'{{"column": [{", ".join(texts[row] for row in order)}]}}')
        for name, texts in columns.items()
    }


def _encoded(column: pa.ChunkedArray) -> list[str]:
    """Return each value of a column as JSON. Most columns have few texts or integers, many times."""
    encode = json.JSONEncoder(sort_keys=True, default=str).encode
    if pa.types.is_string(column.type) or pa.types.is_integer(column.type):
        encode = functools.cache(encode)
    return list(map(encode, column.to_pylist()))


def digest(document: Document) -> str:
    """Return a short content id of a document."""
    return _digest_of(json.dumps(document, sort_keys=True, default=str))


def _digest_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def all_documents() -> Iterator[tuple[str, Document]]:
    """Yield the name and the content of each document of the corpus."""
    for part in ("quick", "slow"):
        for variant in variants(part):
            yield f"captures/{variant}", capture_document(variant)
    with packaged_database().read() as session:
        for job_id in packaged_jobs(session):
            yield f"jobs/{job_id}", job_document(session, job_id)
        for table in ("readings", "calls"):
            yield f"exports/{table}", export_document(session, table)


def write(folder: Path) -> None:
    """Write each document to its own file in a folder."""
    for name, document in all_documents():
        path = folder / f"{name.replace('timm/', 'timm-')}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=1, sort_keys=True, default=str))
        sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
