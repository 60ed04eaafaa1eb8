"""Reads exports of every family with other programs; writes their outcomes.

    python -m tests.readers --output /tmp/readers --write             # all, and the tables
    python -m tests.readers --output /tmp/readers --readers mlx --families llama,gpt2

The programs are installed in `.cache/readers` first; llama.cpp is built from source there.
"""

import argparse
import json
from pathlib import Path

import torch

from tests.readers import environment, models, table
from tests.readers.limits import LIMITS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--output", type=Path, required=True, help="for the models; those that are there are kept"
    )
    parser.add_argument("--readers", default=",".join(table.READERS))
    parser.add_argument(
        "--families", help="separated by commas; by default all that can be trained"
    )
    parser.add_argument(
        "--write", action="store_true", help="write the results, their table and docs/readers.md"
    )
    arguments = parser.parse_args()
    names = arguments.families.split(",") if arguments.families else table.families()
    output = arguments.output
    if (output / "ours.pt").exists():
        ours = torch.load(output / "ours.pt", weights_only=True)
    else:
        output.mkdir(parents=True, exist_ok=True)
        ours = models.write_models(names, output)
        torch.save(ours, output / "ours.pt")
    results = table.load()
    for reader in arguments.readers.split(","):
        (environment.install_llama if reader == "llama_cpp" else environment.install)()
        found = table.read(reader, output, tuple(name for name in names if name in ours))
        outcomes = {name: table.outcome(value, ours[name]) for name, value in found.items()}
        results[reader] = {**results.get(reader, {}), **outcomes}
        for name, what in outcomes.items():
            if what and (arguments.families or not what.startswith("equal")):
                print(f"{reader} {name}: {what}", flush=True)
    if arguments.write:
        table.RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
        table.write_tables(results, LIMITS)


if __name__ == "__main__":
    main()
