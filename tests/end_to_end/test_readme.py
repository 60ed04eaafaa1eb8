"""The README's commands, run in order, as a new user would, on one or two processes of this CPU.

Then those of docs/commands.md, which has more rows of its table.

python -m pytest -s -m "soak or not soak" tests/end_to_end/test_readme.py    # prints what was run
"""

import re
import shutil
import time
from pathlib import Path

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests import ROOT
from tests.documents import README, commands
from tests.end_to_end.document_commands import changed, link_project, run
from tests.texts import paragraphs, write_items

# What makes a command small enough for two cores, or lets it run without a network.
CHANGES = {
    r"--vocab_size 32000": "--vocab_size 1000",
    r"--val_fraction 0.001": "--val_fraction 0.1",
    r"--seq_len 2048": "--seq_len 64",
    r"--total_tokens 3B --run_dir": "--total_tokens 8k --seq_len 64 --batch_tokens 512 "
    "--checkpoint_interval 8 --run_dir",  # two checkpoints, for a merge
    r"--profile 20:23": "--profile 2:3",
    r"llama-160m.json +--data": "tiny.json --data",
    r"--data_stage 2B": "--data_stage 4k",
    r"trunk@8000 --schedule wsd --total_tokens 5B": "first --schedule wsd --total_tokens 12k",
    r"s3://": "file://{directory}/",
    r"nanogpt/train.bin": "shards/web/shard-00000.bin",  # the same format
    r"--set seed=0,1 ": "--jobs 2 ",
    r"zerolm train (?!--check)": "zerolm train --num_gpus 2 --master_port {port} ",
}
NOT_RUN = {
    "bash launch/demo.sh": "sets up .venv and takes three minutes; run by hand for docs/demo.md",
    "bash tests/run.sh": "runs this test",
    "zerolm data tokenize --input HuggingFaceFW/": "needs a network, and hours",
    "bash launch/setup.sh": "run by tests/run.sh",
    "bash launch/multinode.sh": "needs two hosts: tests/end_to_end/test_hosts_agree.py makes them",
    "python -m tests.test_tables": "writes the documents",
    "zerolm train --num_gpus 8": "needs eight devices",
    "python benchmarks/": "takes many minutes on a quiet machine",
}


def write_inputs(directory: Path) -> None:
    """Write the texts that the README's commands read."""
    link_project(directory)
    # Copied, not linked, because the paths in a recipe are relative to the file.
    shutil.copytree(ROOT / "data_prep" / "recipes", directory / "data_prep" / "recipes")
    texts = paragraphs()
    lines = b"\n".join(orjson.dumps({"text": text}) for text in texts)
    for folder in ("web", "code"):
        (directory / "corpus" / folder).mkdir(parents=True)
    (directory / "corpus" / "web" / "part.jsonl").write_bytes(lines)
    pq.write_table(pa.table({"text": texts[::2]}), directory / "corpus" / "code" / "part.parquet")
    write_items(directory / "hellaswag_val.jsonl", 20)


# From raw text to an exported model; what comes after it takes twice as long.
FIRST = "zerolm export"


@pytest.mark.timeout(900)
@pytest.mark.parametrize("how_many", ["first", pytest.param("all", marks=pytest.mark.soak)])
def test_the_commands_of_the_readme_run_in_order(tmp_path, capsys, how_many):
    write_inputs(tmp_path)
    # A name of a command in the prose, without a flag or a path, is not there to be run.
    every = [*commands(README), *commands(ROOT / "docs" / "commands.md")]
    shown = [each.line for each in every if re.search(r" -|/", each.line)]
    last = next(place for place, line in enumerate(shown) if line.startswith(FIRST))
    ranks = 1 if how_many == "first" else 2
    for line in shown[: last + 1] if how_many == "first" else shown:
        if line.startswith(tuple(NOT_RUN)):
            continue
        if "s3://bucket/shards" in line:
            shutil.copytree(tmp_path / "shards", tmp_path / "bucket" / "shards")
        start = time.monotonic()
        small = changed(line, CHANGES, tmp_path).replace("--num_gpus 2", f"--num_gpus {ranks}")
        run(small, tmp_path)
        with capsys.disabled():
            where = small.replace(str(tmp_path), "DIRECTORY")
            print(f"\nran in {time.monotonic() - start:4.1f} s: {where}", end="")
    unused = [start for start in NOT_RUN if not any(line.startswith(start) for line in shown)]
    assert not unused
    assert (tmp_path / "exported" / "first" / "model.safetensors").stat().st_size > 0
    if how_many == "first":
        return
    for name in ("both.html", "results.json", "run.sbatch"):
        assert (tmp_path / name).stat().st_size > 0
    assert any((tmp_path / "bucket" / "first").iterdir())
