"""The tables of docs/scaling.md have the current figures of `python -m launch plan`."""

import json
import re
import subprocess
import sys

import pytest

from tests.launching import ROOT

GUIDE = (ROOT / "docs/scaling.md").read_text(encoding="utf-8")
CLOSE = 0.03  # what rounding and a newer table of hardware may change
# {column of a table: its figure in the plan's JSON}
GIB = 1 << 30
STATES = ("weights", "gradients", "optimizer", "master")
FIGURES = {
    "states, GiB a device": lambda plan: sum(plan["memory"][part] for part in STATES) / GIB,
    "in all, GiB": lambda plan: plan["memory"]["used"] / GIB,
    "in all, GiB a device": lambda plan: plan["memory"]["used"] / GIB,
    "host, GiB a device": lambda plan: plan["memory"]["host"] / GIB,
    "tokens per second": lambda plan: plan["tokens_per_second"],
    "MFU": lambda plan: 100 * plan["mfu"],
    "days for 135 B tokens": lambda plan: plan["days"],
}


def rows() -> list[tuple[list[str], dict[str, str]]]:
    """Return (flags of the plan, {column: value}) of each row of a marked table."""
    found = []
    for about, table in re.findall(r"<!-- plan: (.*?) -->\n((?:\|.*\n)+)", GUIDE):
        header, _, *lines = [
            [cell.strip() for cell in line.strip("|\n").split("|")]
            for line in table.splitlines()
        ]  # fmt: skip
        for cells in lines:
            row = dict(zip(header, cells, strict=True))
            profile = row.get("profile") or ("zero3" if "zero3" in about else "")
            devices = row.get("devices") or re.search(r"(\d+) devices", about)[1]  # type: ignore
            flags = ["--model_config", "model_configs/llama-7b.json", "--devices", devices]
            flags += ["--deepspeed_config", f"ds_configs/{profile}.json"]
            if "checkpointing" in about or row.get("checkpointing") == "yes":
                flags.append("--gradient_checkpointing")
            if "micro-batch" in row:
                flags += ["--micro_batch_size", row["micro-batch"]]
            flags += re.findall(r"--inter_node|\d+e\d+", about)
            found.append((flags, row))
    return found


def test_every_marked_table_of_the_guide_is_parsed():
    assert len(rows()) == 21 and GUIDE.count("<!-- plan:") == 4
    assert all(set(row) & set(FIGURES) for _, row in rows())


@pytest.mark.soak
@pytest.mark.parametrize(("flags", "row"), rows(), ids=lambda value: None)
def test_the_guide_has_the_figures_of_the_plan(flags, row):
    command = [sys.executable, "-m", "launch", "plan", "--json", "--hardware", "H100", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    for column, figure in FIGURES.items():
        if column in row:
            written = float(row[column].rstrip("%").replace(",", ""))
            assert written == pytest.approx(figure(plan), rel=CLOSE, abs=0.06), column
    if "micro-batch x accumulation" in row:
        micro, accumulation = row["micro-batch x accumulation"].split(" x ")
        assert (plan["micro_batch_size"], plan["accumulation"]) == (int(micro), int(accumulation))
