"""Changes one token of a module at random and runs the module's tests, which should then fail.

    pip install cosmic-ray
    python -m tests.mutants --output mutants.md                       # the sample of mutants.json
    python -m tests.mutants --output mutants.md --only zerolm/data    # what it has in a folder
    python -m tests.mutants --output again.md --retry mutants.md      # the survivors of that table

Cosmic Ray makes the mutants: other comparisons, operators and numbers, `and` for `or`, a `not`
more, True for False, break for continue, an exception that is never raised. tests/mutants.json
names the modules and the tests of each. A position in the code is drawn first, then one of its
mutants, since an arithmetic operator has eleven and `and` has one; annotations are left out.

Works in a copy of the checkout. One process imports what is slow to import, and forks for each
mutant.
"""

import argparse
import importlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests import ROOT

CONFIG = ROOT / "tests" / "mutants.json"
SLOW_IMPORTS = (
    "torch", "transformers", "deepspeed", "matplotlib.pyplot", "datasets", "hypothesis", "pytest",
    "xdist.plugin", "pytest_timeout", "_hypothesis_pytestplugin",
)  # fmt: skip
PYTEST = ["-x", "-p", "no:cacheprovider", "-p", "no:anyio", "-p", "no:unraisableexception"]
NOT_ONE_TOKEN = re.compile("RemoveDecorator|ZeroIterationForLoop|Variable")
ROW = re.compile(
    r"^\| (?P<path>\S+):(?P<line>\d+) \| `(?P<old>.*)` \| `(?P<new>.*)` \| (?P<outcome>\w+) \|$"
)
OUTPUT = "output.txt"  # of the tests that ran last
KILLED, SURVIVED, TOO_LONG = "killed", "survived", "timeout"


class Mutant(NamedTuple):
    """A module with one changed line."""

    path: str
    line: int
    old: str
    new: str


# ---- What to change


def positions(text: str) -> dict[tuple[int, int], list[tuple[Any, int]]]:
    """Return the mutants at each position: pairs of an operator and its occurrence in the file."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.plugins import get_operator, operator_names

    nodes, found = list(ast_nodes(get_ast(text))), {}
    for name in sorted(operator_names()):
        if NOT_ONE_TOKEN.search(name):
            continue
        operator = get_operator(name)()
        places = [(node, start) for node in nodes for start, _ in operator.mutation_positions(node)]
        for occurrence, (node, start) in enumerate(places):
            if not in_annotation(node):
                found.setdefault(start, []).append((operator, occurrence))
    return found


def in_annotation(node: Any) -> bool:
    """Whether a node of Cosmic Ray's syntax tree is in an annotation, which has no effect."""
    while node.parent is not None:
        before = node.get_previous_sibling()
        if node.parent.type in ("annassign", "tfpdef", "funcdef") and before in (":", "->"):
            return node.type not in ("suite", "simple_stmt")
        node = node.parent
    return False


def draw(paths: list[str], number: int, seed: int) -> list[Mutant]:
    """Draw mutants at random, each position of the modules once at most."""
    from cosmic_ray.mutating import mutate_code

    texts = {path: (ROOT / path).read_text(encoding="utf-8") for path in paths}
    places = [
        (path, options) for path in paths for _, options in sorted(positions(texts[path]).items())
    ]
    rng, mutants = random.Random(seed), []
    rng.shuffle(places)
    for path, options in places:
        operator, occurrence = rng.choice(options)
        code = mutate_code(texts[path], operator, occurrence)
        pairs = zip(texts[path].splitlines(), code.splitlines(), strict=False)
        changed = [(line, *pair) for line, pair in enumerate(pairs, 1) if pair[0] != pair[1]]
        if changed:
            mutants.append(Mutant(path, *changed[0]))
        if len(mutants) == number:
            break
    return mutants


def survivors(table: Path) -> Iterator[Mutant]:
    """Yield the survivors of a table where their lines still exist, wherever they are today."""
    for (path, number, old, new), outcome in outcomes_of(table).items():
        if outcome != SURVIVED:
            continue
        lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
        same = [place for place, line in enumerate(lines, 1) if line.strip() == old]
        if not same:
            print(f"{path}:{number}: this line is gone: {old}", flush=True)
            continue
        nearest = min(same, key=lambda place: abs(place - number))
        line = lines[nearest - 1]
        indent = line[: len(line) - len(line.lstrip())]
        yield Mutant(path, nearest, line, indent + new)


# ---- The tests of a mutant


def outcome_of(copy: Path, mutant: Mutant, arguments: list[str], timeout_seconds: float) -> str:
    """Run the tests with the changed module in a forked process; the file is restored after it."""
    file = copy / mutant.path
    lines = (ROOT / mutant.path).read_text(encoding="utf-8").splitlines()
    lines[mutant.line - 1] = mutant.new
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    child = os.fork()
    if child == 0:
        os.setsid()
        os._exit(run_tests(arguments, copy / OUTPUT))
    try:
        return outcome_of_process(child, timeout_seconds)
    finally:
        shutil.copy2(ROOT / mutant.path, file)


def outcome_of_process(pid: int, timeout_seconds: float) -> str:
    until = time.monotonic() + timeout_seconds
    while time.monotonic() < until:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return SURVIVED if os.waitstatus_to_exitcode(status) == 0 else KILLED
        time.sleep(0.02)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return TOO_LONG


def run_tests(arguments: list[str], output: Path) -> int:
    """Run pytest in this process, with its output in a file."""
    import pytest

    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(file, stream)
    try:
        return int(pytest.main([*PYTEST, *arguments]))
    except BaseException:
        return 1


def make_copy(folder: Path) -> Path:
    """Copy the files of the checkout, and make this process import them from there."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in names.splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix, "torch_extensions")))
    os.environ["PYTHONPATH"] = str(folder)
    os.chdir(folder)
    sys.path = [str(folder), *(each for each in sys.path if each not in ("", str(ROOT)))]
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    return folder


# ---- The table


def escaped(line: str) -> str:
    return line.strip().replace("|", "\\|")


def outcomes_of(table: Path) -> dict[Mutant, str]:
    """Return the outcomes in a table; the lines in it have no indentation."""
    matches = map(ROW.match, table.read_text(encoding="utf-8").splitlines())
    return {
        Mutant(
            match["path"], int(match["line"]),
            match["old"].replace("\\|", "|"), match["new"].replace("\\|", "|"),
        ): match["outcome"]
        for match in matches if match
    }  # fmt: skip


def table_of(outcomes: list[tuple[Mutant, str]], command: str) -> str:
    count = Counter(outcome for _, outcome in outcomes)
    dead = len(outcomes) - count[SURVIVED]
    head = f"{len(outcomes)} mutants, {dead} killed ({count[TOO_LONG]} by a timeout), "
    rows = [
        f"| {each.path}:{each.line} | `{escaped(each.old)}` | `{escaped(each.new)}` | {outcome} |"
        for each, outcome in sorted(outcomes)
    ]
    lines = ["# Mutants", "", "```bash", command, "```", ""]
    lines += [head + f"score {dead / max(1, len(outcomes)):.3f}.", ""]
    return "\n".join([*lines, "| where | was | became | outcome |", "|---|---|---|---|", *rows, ""])


def main(argv: list[str]) -> int:
    config = json.loads(CONFIG.read_text(encoding="utf-8"))
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument(
        "--output", type=Path, required=True, help="the table, in Markdown; what it has is not run"
    )
    parser.add_argument("--number", type=int, default=config["number"])
    parser.add_argument("--seed", type=int, default=config["seed"])
    parser.add_argument("--only", default="", help="modules whose path begins so")
    parser.add_argument("--retry", type=Path, help="a table whose survivors are tried again")
    arguments = parser.parse_args(argv)
    output = arguments.output.absolute()
    paths = [path for path in config["tests"] if path.startswith(arguments.only)]
    mutants = (
        [each for each in survivors(arguments.retry) if each.path in paths]
        if arguments.retry
        else draw(paths, arguments.number, arguments.seed)
    )
    for name in SLOW_IMPORTS:
        importlib.import_module(name)
    selections = {
        path: [*tests, *(f"--deselect={name}" for name in config["deselect"])]
        for path, tests in config["tests"].items()
    }
    known = outcomes_of(output) if output.exists() else {}
    outcomes: list[tuple[Mutant, str]] = []
    limits: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        copy = make_copy(Path(folder))
        for path in sorted({mutant.path for mutant in mutants}):
            first = (copy / path).read_text(encoding="utf-8").splitlines()[0]
            start = time.monotonic()
            outcome = outcome_of(copy, Mutant(path, 1, first, first), selections[path], 900)
            limits[path] = config["timeout_seconds"] + 2 * (time.monotonic() - start)
            if outcome != SURVIVED:
                print((copy / OUTPUT).read_text(encoding="utf-8", errors="replace"))
                print(f"{path}: its tests fail without a change", file=sys.stderr)
                return 1
        # The tests are compiled by now; a changed module must not be, or it could stay.
        sys.dont_write_bytecode, os.environ["PYTHONDONTWRITEBYTECODE"] = True, "1"
        for mutant in mutants:
            bare = mutant._replace(old=mutant.old.strip(), new=mutant.new.strip())
            if bare in known:
                outcomes.append((mutant, known[bare]))
                continue
            start = time.monotonic()
            outcome = outcome_of(copy, mutant, selections[mutant.path], limits[mutant.path])
            outcomes.append((mutant, outcome))
            seconds = time.monotonic() - start
            print(f"{len(outcomes)}/{len(mutants)} {mutant.path}:{mutant.line} {outcome}, "
                  f"{seconds:.1f} s: {mutant.new.strip()}", flush=True)  # fmt: skip
            text = table_of(outcomes, f"python -m tests.mutants {' '.join(argv)}")
            output.write_text(text, encoding="utf-8")
    print(text.partition("score ")[2].splitlines()[0])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
