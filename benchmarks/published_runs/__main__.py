"""Prints benchmarks/results/published_runs.md, or each row with its prediction.

python -m benchmarks.published_runs > benchmarks/results/published_runs.md
python -m benchmarks.published_runs --json
"""

import json

from benchmarks.published_runs import document
from benchmarks.tables import parser


def main() -> None:
    flags = parser(__doc__, has_table=False)
    flags.add_argument("--json", action="store_true", help="print each row as JSON")
    if flags.parse_args().json:
        print(json.dumps(document.to_json(), indent=1))
    else:
        print(document.document())


if __name__ == "__main__":
    main()
