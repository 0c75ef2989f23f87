"""What the farm said before a change of its structure, it says after it: captures, reports and
exports.

`digests.json` holds a digest of each document (`documents.py`). If a change is meant to alter a
document, regenerate the file with `--regenerate-golden`, and say in the commit which documents
changed and why."""

import json
from pathlib import Path

import pytest
import torch

from farm.exchange.packaged import packaged_database
from tests import slow
from tests.corpus import documents
from tests.statements import rows_in_order

FILE = Path(__file__).parent / "digests.json"
DIGESTS = json.loads(FILE.read_text()) if FILE.exists() else {"torch": "", "documents": {}}

#: A capture lists the operators of one version of PyTorch.
of_this_torch = pytest.mark.skipif(
    DIGESTS["torch"] not in ("", torch.__version__.partition("+")[0]),
    reason="the captures are of another torch",
)


@pytest.fixture
def compare(request):
    """Compare digests of documents with those on file, or write them to the file."""

    def compare(current):
        if request.config.getoption("--regenerate-golden"):
            stored = json.loads(FILE.read_text()) if FILE.exists() else {"documents": {}}
            stored["torch"] = torch.__version__.partition("+")[0]
            stored["documents"] = dict(sorted({**stored["documents"], **current}.items()))
            FILE.write_text(json.dumps(stored, indent=1) + "\n")
            return
        expected = {name: DIGESTS["documents"].get(name) for name in current}
        changed = sorted(name for name in current if current[name] != expected[name])
        assert not changed, (
            "compare the documents with those of an earlier commit (tests/corpus/documents.py)"
        )

    return compare


@of_this_torch
@pytest.mark.parametrize("variant", documents.variants("quick"), ids=str)
def test_the_capture_of_a_variant_is_the_one_on_file(variant, compare):
    compare({f"captures/{variant}": documents.digest(documents.capture_document(variant))})


@of_this_torch
@slow.ALIKE
@pytest.mark.parametrize("variant", documents.variants("slow"), ids=str)
def test_the_capture_of_another_variant_is_the_one_on_file(variant, compare):
    compare({f"captures/{variant}": documents.digest(documents.capture_document(variant))})


@pytest.mark.parametrize(
    "part",
    [
        0,
        *(pytest.param(part, marks=slow.ALIKE) for part in range(1, 8)),
    ],
)
def test_the_reports_of_the_packaged_jobs_are_those_on_file(part, compare):
    """In each second part, the database returns rows in the reverse order."""
    database = packaged_database()
    with rows_in_order(database, part % 2), database.read() as session:
        jobs = documents.packaged_jobs(session)[part::8]
        compare(
            {f"jobs/{job}": documents.digest(documents.job_document(session, job)) for job in jobs}
        )


def test_a_report_does_not_depend_on_the_order_of_rows(compare):
    """Of a job on two cards together: its readings have two rows of software."""
    database = packaged_database()
    with rows_in_order(database, 1), database.read() as session:
        document = documents.job_document(session, "3r7vg8q8")
    compare({"jobs/3r7vg8q8": documents.digest(document)})


@slow.MEASURED
@pytest.mark.parametrize("table", ["readings", "calls"])
def test_the_exported_columns_of_the_packaged_readings_are_those_on_file(table, compare):
    with packaged_database().read() as session:
        columns = documents.export_document(session, table)
    compare({f"exports/{table}/{name}": digest for name, digest in columns.items()})
