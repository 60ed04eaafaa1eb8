"""Try every causal-LM family of the installed transformers at toy size.

    python -m tests.model_families --output /tmp/families            # all, about half an hour
    python -m tests.model_families --output /tmp/families --only llama,gpt2 --again

Each family goes through the preflight, three steps of ZeRO-2 and ZeRO-3 on two ranks, three steps
with --document_mask, and export; docs/models.md says with what it is compared. A sweep that is
started again tries what is missing; tracebacks are in DIRECTORY/FAMILY/errors.txt.
"""

import argparse
import shutil
from pathlib import Path

from tests.model_families import table
from tests.model_families.sweep import FAMILIES, sweep
from tests.model_families.table import PHASES


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--output", type=Path, required=True, help="directory of the results, which are kept")
    add("--only", help="comma-separated model types (default: all)")
    add("--again", action="store_true", help="forget earlier results of these families")
    add(
        "--phases",
        default=PHASES,
        type=lambda text: text.split(","),
        help="comma-separated phases (default: %(default)s)",
    )
    add("--write", action="store_true", help="record these families, and update docs/models.md")
    arguments = parser.parse_args()
    families = arguments.only.split(",") if arguments.only else list(FAMILIES)
    for family in families if arguments.again else ():
        shutil.rmtree(arguments.output / family, ignore_errors=True)
    sweep(families, arguments.output, arguments.phases)
    rows = {family: table.cells(table.outcomes(arguments.output, family)) for family in families}
    print(table.summary(rows))
    if arguments.write:
        table.write(rows)


if __name__ == "__main__":
    main()
