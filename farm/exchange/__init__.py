"""Results in files: export, import, and the packaged readings.

Read first: `tidy` yields the rows of an export, `left_out` those that it lacks, and `export` writes
them as Parquet, CSV or a database. `column_types` checks the values of an import, and `importer`
writes them. `packaged` opens the readings of the installed package, `copies` copies SQLite files,
and `parquet_pages` bounds the size of a Parquet file before it is read."""
