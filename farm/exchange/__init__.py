"""Results in files: export, import, and the packaged readings.

Read first: `export_rows` yields the rows of an export, `left_out` those that it lacks, and `export`
writes them as Parquet, CSV or a database. `importer` imports such files: `import_file` checks their
values with `column_types`, `import_rows` their rows, and `import_writers` writes them. `packaged`
opens the readings of the installed package, and `first_answer` queries them if the user's database
has no answer. `copies` copies SQLite files, and `parquet_pages` bounds the size of a Parquet file
before it is read."""
