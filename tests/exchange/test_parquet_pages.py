"""The sizes of a Parquet file's pages, before anything is unpacked."""

import io
import random
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from farm.exchange.parquet_pages import DamagedPage, page_sizes

TABLE = pa.table(
    {
        "text": [f"text {number}" * 20 for number in range(5000)],
        "list": [[float(number)] * 3 for number in range(5000)],
        "flag": [number % 3 == 0 for number in range(5000)],
        "none": pa.nulls(5000, pa.int64()),
    }
)


def chunks(metadata):
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        yield from (group.column(at) for at in range(group.num_columns))


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("compression", ["none", "zstd"])
@pytest.mark.parametrize("dictionary", [True, False])
def test_the_pages_have_the_size_that_the_metadata_state(version, compression, dictionary):
    written = io.BytesIO()
    options = {
        "use_dictionary": dictionary,
        "write_page_checksum": dictionary,
        "write_page_index": dictionary,
    }
    pq.write_table(
        TABLE,
        written,
        2000,
        data_page_version=version,
        compression=compression,
        data_page_size=10_000,
        **options,
    )
    for chunk in chunks(pq.read_metadata(written)):
        pages = list(page_sizes(written, chunk))
        headers = chunk.total_uncompressed_size - sum(pages)
        assert 0 < headers < 500 * len(pages)


def test_damaged_headers_are_refused():
    written = io.BytesIO()
    pq.write_table(TABLE, written)
    chunk = next(chunks(pq.read_metadata(written)))
    begin, chance, refused = chunk.dictionary_page_offset, random.Random(1), 0
    for _ in range(500):
        damaged = bytearray(written.getvalue())
        for _ in range(3):
            damaged[begin + chance.randrange(60)] = chance.randrange(256)
        try:
            list(page_sizes(io.BytesIO(damaged), chunk))
        except DamagedPage:
            refused += 1
    assert refused > 50


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"\x15",
        b"\x00",
        b"\x19\xfc" * 100,
        b"\x1c" * 100,
        b"\x15" + b"\xff" * 100,
        b"\x1b\x01\x88\x01\x02",
    ],
)
def test_what_is_no_header_is_refused(header):
    chunk = SimpleNamespace(
        data_page_offset=0, has_dictionary_page=False, total_compressed_size=len(header) or 1
    )
    with pytest.raises(DamagedPage):
        list(page_sizes(io.BytesIO(header), chunk))
