"""The import ladder, read from the source of every module: one line per subpackage.

A subpackage imports lower rungs only, never one of its own rung, and has no import cycle inside.
`data_prep` and `launch` may import `zerolm` below the training loop; `zerolm` imports neither,
except for the list of all commands, `zerolm/__main__.py`.

    python -m tests.test_ladder    # prints the table
"""

import ast
import configparser
import functools
import importlib.util
import re
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests import ROOT, tracked

LADDER = {
    "zerolm.common": 0,
    "zerolm.engine": 1,
    "zerolm.run_dir": 1,
    "zerolm.distributed": 2,
    "zerolm.ds_files": 2,
    "zerolm.optim": 2,
    "zerolm.config": 3,
    "zerolm.ds_config": 4,
    "zerolm.integrity": 4,
    "zerolm.model": 4,
    "zerolm.shards": 4,
    "zerolm.watchdog": 4,
    "zerolm.attention": 5,
    "zerolm.data": 5,
    "zerolm.fp8": 5,
    "zerolm.health": 5,
    "zerolm.pretrained": 5,
    "zerolm.routers": 5,
    "zerolm.plan": 6,
    "zerolm.checkpoint": 7,
    "zerolm.features": 8,
    "zerolm.evaluate": 9,
    "zerolm.parts": 10,
    "zerolm.export": 11,
    "zerolm.tracking": 11,
    "zerolm.report": 12,
    "zerolm.upload": 12,
    "zerolm.preflight": 13,
    "zerolm.train": 14,
    "zerolm.cli": 15,
    "data_prep.files": 0,
    "data_prep.tasks": 0,
    "data_prep.formats": 1,
    "data_prep.read": 2,
    "data_prep.stages": 3,
    "data_prep.tokenizer": 3,
    "data_prep.dedup": 4,
    "data_prep.encode": 4,
    "data_prep.filters": 4,
    "data_prep.finished_shards": 5,
    "data_prep.pipeline": 5,
    "data_prep.cli": 6,
    "launch.command": 0,
    "launch.demo": 0,
    "launch.estimate": 1,
    "launch.supervise": 1,
    "launch.doctor": 2,
    "launch.render": 2,
    "launch.experiments": 3,
}
ENTRY_POINTS = 16  # pretrain.py and the modules directly in a package
ALL = ("pretrain", "zerolm.__main__")  # entry points of all three packages
SHARED = 13  # the highest rung of zerolm that data_prep and launch may import
PACKAGES = ("zerolm", "data_prep", "launch")
HEAVY = {"torch", "deepspeed", "transformers", "datasets"}


def modules() -> dict[str, Path]:
    """Return {dotted name: file} of every module and subpackage of the project."""
    found = {"pretrain": ROOT / "pretrain.py"}
    for package in PACKAGES:
        for path in tracked(f"{package}/**/*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts).removesuffix(".__init__")] = path
    return {name: path for name, path in found.items() if name not in PACKAGES}


MODULES = modules()


def room(name: str) -> str:
    """Return the subpackage of a module, or the module itself where it is an entry point."""
    return name.rpartition(".")[0] if name.count(".") > 1 else name


def rung(name: str) -> int:
    return LADDER.get(room(name), ENTRY_POINTS)


def imports_of(name: str) -> set[str]:
    """Return the project's modules that a module imports: in functions and for types, too."""
    named = set()
    for node in ast.walk(ast.parse(MODULES[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            named |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: use absolute imports"
            modules = {f"{node.module}.{alias.name}" for alias in node.names} & set(MODULES)
            named |= modules
            if len(modules) < len(node.names):
                named.add(node.module or "")
    return named & set(MODULES) - {name}


@functools.cache
def all_imports() -> dict[str, set[str]]:
    return {name: imports_of(name) for name in MODULES}


def upward_imports() -> list[str]:
    """Return each import that the ladder forbids."""
    found = []
    for name, imported in all_imports().items():
        for target in imported:
            package, other = name.partition(".")[0], target.partition(".")[0]
            if room(name) == room(target) or name in ALL:
                allowed = True
            elif package == other:
                allowed = rung(target) < rung(name) or rung(name) == ENTRY_POINTS
            else:
                allowed = other == "zerolm" and package != "zerolm" and rung(target) <= SHARED
            if not allowed:
                found.append(f"{name} (rung {rung(name)}) imports {target} (rung {rung(target)})")
    return found


def cycle() -> list[str]:
    """Return the modules of an import cycle; empty if there is none."""
    try:
        list(TopologicalSorter(all_imports()).static_order())
    except CycleError as error:
        return list(error.args[1])
    return []


def test_every_subpackage_is_on_the_ladder():
    rooms = {room(name) for name in MODULES if name.count(".") > 1}
    assert rooms == set(LADDER), "add new subpackages to LADDER"


def test_every_imported_module_exists():
    """mypy does not say so: it ignores missing imports, for optional packages."""
    missing = []
    for path in (*MODULES.values(), *tracked("tests/**/*.py", "benchmarks/**/*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                top = node.module.partition(".")[0]
                ours = top in (*PACKAGES, "tests", "benchmarks")
                if ours and importlib.util.find_spec(node.module) is None:
                    missing.append(f"{path.relative_to(ROOT)}:{node.lineno}: {node.module}")
    assert not missing


@functools.cache
def names_in(path: Path) -> set[str]:
    """Return every name that a module binds anywhere in its source."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.alias):
            found.add(node.asname or node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


@pytest.mark.parametrize("directory", ["tests", "benchmarks"])
def test_what_tests_take_from_each_other_exists(directory):
    """mypy does not check them, and a soak test runs seldom."""
    missing = []
    for path in tracked(f"{directory}/**/*.py"):
        tree, modules = ast.parse(path.read_text(encoding="utf-8")), {}
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("tests"):
                continue
            package = ROOT / node.module.replace(".", "/")
            module = package / "__init__.py" if package.is_dir() else package.with_suffix(".py")
            for each in node.names:
                if (package / f"{each.name}.py").exists():
                    modules[each.asname or each.name] = package / f"{each.name}.py"
                elif each.name not in names_in(module):
                    missing.append(f"{path.name}:{node.lineno}: {each.name}")
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                module = modules.get(node.value.id)
                if module is not None and node.attr not in names_in(module):
                    missing.append(f"{path.name}:{node.lineno}: {node.value.id}.{node.attr}")
    assert not missing


def test_what_is_imported_at_once_is_installed_without_an_extra():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    required = re.findall(r"^[\w-]+", setup["options"]["install_requires"], re.M)
    with_transformers = {"huggingface_hub", "safetensors"}
    known = {*PACKAGES, *sys.stdlib_module_names, *required, *with_transformers}
    unknown = []
    for name, path in MODULES.items():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            named = [node.module] if isinstance(node, ast.ImportFrom) else []
            named += [each.name for each in node.names] if isinstance(node, ast.Import) else []
            unknown += [
                (name, each) for each in named if (each or "").partition(".")[0] not in known
            ]
    assert not unknown


def test_every_subpackage_has_tests_in_the_folder_of_its_name():
    tested = {path.parent.relative_to(ROOT / "tests") for path in tracked("tests/**/test_*.py")}
    by_command = {"zerolm.cli"}  # in tests/end_to_end and the folders of what a command calls
    assert {name for name in LADDER if Path(*name.split(".")) not in tested} == by_command


def test_imports_run_downward():
    assert not upward_imports()


def test_there_is_no_import_cycle():
    assert not cycle()


@pytest.mark.parametrize("name", sorted(LADDER))
def test_a_subpackage_is_documented(name):
    """Its docstring states its purpose, and what it must not depend on."""
    text = (ROOT / name.replace(".", "/") / "__init__.py").read_text(encoding="utf-8")
    docstring = ast.get_docstring(ast.parse(text)) or ""
    assert len(docstring.splitlines()) >= 2, f"{name}/__init__.py: state its purpose and limits"


@pytest.mark.parametrize(
    "command",
    [
        ["data_prep", "--help"],
        ["data_prep", "tokenize", "--help"],
        ["launch.demo.corpus", "--help"],
        ["launch", "supervise", "--help"],
        ["launch", "plan", "--help"],
        ["launch", "doctor", "--help"],
        ["launch", "render", "--help"],
        ["zerolm", "--help"],
        ["zerolm", "status", "--help"],
        ["zerolm", "report", "--help"],
        ["zerolm", "train", "--help"],
        ["zerolm", "data", "tokenize", "--help"],
        ["zerolm", "plan", "--help"],
    ],
    ids=" ".join,
)
def test_help_needs_no_heavy_import(command):
    result = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", *command],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert "argparse" in imported, "the list of imports is empty"
    assert not HEAVY & imported


def ladder_table() -> str:
    """Return the ladder as a Markdown table: each subpackage with what its docstring says it is."""
    text = "\n| rung | subpackage | purpose |\n|---|---|---|\n"
    for name, number in LADDER.items():
        path = name.replace(".", "/")
        source = (ROOT / path / "__init__.py").read_text(encoding="utf-8")
        docstring = ast.get_docstring(ast.parse(source)) or ""
        purpose = " ".join(docstring.partition("\n\n")[0].split()).rstrip(".")
        text += f"| {number} | `{path}/` | {purpose} |\n"
    return text + "\n"


def table() -> str:
    """Return the ladder as text: each subpackage with its numbers of modules and lines."""
    lines = [f"{'rung':<6}{'subpackage':<24}{'modules':>7}{'lines':>8}"]
    for name, number in LADDER.items():
        files = [path for module, path in MODULES.items() if room(module) == name]
        count = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)
        lines.append(f"{number:<6}{name:<24}{len(files):>7}{count:>8,}")
    edges = sum(map(len, all_imports().values()))
    lines.append(f"{edges:,} imports, {len(upward_imports())} upward, {len(cycle())} in a cycle")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
