#!/usr/bin/env bash
# pyarrow 26.0.1: for a column of Parquet's type JSON in a file without Arrow's schema (as DuckDB
# writes), metadata.schema.to_arrow_schema() says string, and ParquetFile.schema_arrow, which the
# read columns have, says extension<arrow.json>; arrow_extensions_enabled changes the second only.
# Seen: metadata string, file extension<arrow.json>, column extension<arrow.json>
set -euo pipefail
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q pyarrow==26.0.1
"$folder/venv/bin/python" - "$folder/a.parquet" <<'PY'
import sys

import pyarrow as pa
import pyarrow.parquet as pq

column = pa.ExtensionArray.from_storage(pa.json_(), pa.array(['{"a": 1}']))
pq.write_table(pa.table({"j": column}), sys.argv[1], store_schema=False)
file = pq.ParquetFile(sys.argv[1])
types = (
    file.metadata.schema.to_arrow_schema().field("j").type,
    file.schema_arrow.field("j").type,
    file.read().column("j").type,
)
print("metadata {}, file {}, column {}".format(*types))
sys.exit(len({str(each) for each in types}) == 1)
PY
