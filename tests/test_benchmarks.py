"""Benchmarks need no more than a run to start, and name the rest before they measure."""

import ast
import configparser
import re
import sys
from pathlib import Path

import pytest

from benchmarks import require
from benchmarks.training_speed import describe
from tests import ROOT, tracked

OTHERS = {"zerolm", "data_prep", "launch", "pretrain", "benchmarks", "tests"}
OTHERS |= {"packaging"}  # which transformers needs
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in tracked("benchmarks/**/*.py", "tests/**/*.py")
}
COMMANDS = sorted(
    name for name, path in MODULES.items()
    if name.startswith("benchmarks") and '__name__ == "__main__"' in path.read_text("utf-8")
)  # fmt: skip


def imported_at_start(path: Path) -> list[str]:
    """Return the modules, and names in them, that a file imports before any function runs."""
    names = []
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return names


@pytest.mark.parametrize("command", COMMANDS)
def test_a_benchmark_starts_with_the_requirements_of_a_run(command):
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    lines = parser["options"]["install_requires"].split("\n")
    required = {re.split(r"[<>=;]", line)[0].replace("pyyaml", "yaml") for line in lines}
    waiting, seen = [command], set[str]()
    while waiting:
        name = waiting.pop()
        if name in seen or name not in MODULES:
            continue
        seen.add(name)
        for each in imported_at_start(MODULES[name]):
            top = each.partition(".")[0]
            waiting.append(each)
            known = top in sys.stdlib_module_names | OTHERS | required
            assert known, f"{name} imports {each}: import it in a function, after `require`"


def test_what_is_absent_is_named_with_the_command_that_installs_it():
    require("json", "torch")
    with pytest.raises(SystemExit, match=r"needs absent_module: bash launch/setup.sh dev$"):
        require("json", "absent_module")


def test_the_table_of_training_speed_names_the_precision():
    seconds = {"pretrain.py": [1.0, 1.0], "bare DeepSpeed loop": [2.0, 2.0]}
    assert "all in fp32; " in describe(seconds, 4096, "fp32")[1]
