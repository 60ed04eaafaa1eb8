"""The repository: the README matches the code, and no file contains paths of a machine."""

import json
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import data_prep.__main__
import launch.__main__
import zerolm.__main__
from tests import ROOT
from zerolm.common.command_line import Group, help_text

README = (ROOT / "README.md").read_text(encoding="utf-8")
# Directories whose every file the tree of the README names; of the others it names the directory.
LISTED = ("zerolm", "data_prep", "launch", "ds_configs", "model_configs", "benchmarks", "docs")
UNLISTED = {"benchmarks/results", "docs/figures"}
MACHINE_PATHS = re.compile(r"(?<![\w.~}])/(?:" + "|".join(("work", "root", "home")) + r")/")

CALLED = r"(?:^|`)(?:python -m (data_prep|launch|zerolm)|(zerolm)) ([a-z][\w-]+)(?: ([a-z][\w-]+))?"


@cache
def tracked_files() -> list[str]:
    """Return the files that git tracks, and those that it would add."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    if result.returncode != 0:
        pytest.skip("not a git checkout")
    return [name for name in result.stdout.splitlines() if (ROOT / name).is_file()]


def blocks(language: str) -> list[str]:
    """Return the README's fenced blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def tree_entries() -> set[str]:
    """Return the paths that the README's tree draws; a directory ends in a slash."""
    (tree,) = [block for block in blocks("text") if block.startswith("pretrain.py")]
    entries, parents = set(), [""]
    for line in tree.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        name = line.split()[0]
        entries.add("".join(parents[: depth + 1]) + name)
        if name.endswith("/"):
            parents[depth + 1 :] = [name]
    return entries


def test_the_tree_of_the_readme_names_every_file():
    missing = []
    entries = tree_entries()
    for name in tracked_files():
        path = Path(name)
        if name.startswith(".") or path.name == "__init__.py":
            continue
        top = path.parts[0]
        if len(path.parts) > 1 and top + "/" not in entries:
            missing.append(top + "/")
        listed = top in LISTED and not any(name.startswith(f"{skip}/") for skip in UNLISTED)
        if (len(path.parts) == 1 or listed) and name not in entries:
            missing.append(name)
    assert not missing


def test_the_tree_of_the_readme_names_nothing_else():
    known = set(tracked_files())
    known |= {f"{parent}/" for name in known for parent in Path(name).parents}
    assert not tree_entries() - known


def test_json_in_the_readme_parses():
    for block in blocks("json"):
        json.loads(block)


def test_images_and_links_of_the_readme_exist():
    for target in re.findall(r"\]\(([^)#\s]+)\)", README):
        if "://" not in target:
            assert (ROOT / target).exists(), target


def test_no_file_contains_a_path_of_a_machine():
    found = []
    for name in tracked_files():
        try:
            text = (ROOT / name).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # an image
        for number, line in enumerate(text.splitlines(), start=1):
            if MACHINE_PATHS.search(line):
                found.append(f"{name}:{number}: {line.strip()}")
    assert not found


def readme_commands() -> list[list[str]]:
    """Return the argv of each command in the README's shell blocks."""
    text = "\n".join(blocks("bash")).replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line and line[0] != "#"]


@cache
def help_of(*argv: str) -> str:
    result = subprocess.run(
        [sys.executable, *argv, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def program_of(words: list[str]) -> tuple[tuple[str, ...], list[str]] | None:
    """Return what prints the help of the command, and the words that the help must explain."""
    if words[0] == "zerolm":
        words = ["python", "-m", *words]
    if words[:3] in (["python", "-m", "launch"], ["python", "-m", "zerolm"]):
        end = words.index("--") if "--" in words else len(words)
        first = 4 if words[3] == "data" else 3
        return ("-m", *words[2 : first + 1]), words[first + 1 : end]
    if "pretrain.py" in words:
        return ("pretrain.py",), words[words.index("pretrain.py") + 1 :]
    if "launch/multinode.sh" in words:
        return ("pretrain.py",), words[words.index("launch/multinode.sh") + 3 :]
    if words[:2] == ["python", "-m"]:
        if words[2] == "data_prep":
            return ("-m", words[2], words[3]), words[4:]
        return ("-m", words[2]), words[3:]
    if words[0] == "python":
        return (words[1],), words[2:]
    return None


def test_every_flag_of_a_readme_command_exists():
    unknown = []
    commands = readme_commands()
    for argv in commands:
        program = program_of(argv)
        if program is None:
            continue
        explained = help_of(*program[0]).replace("-", "_")
        for argument in program[1]:
            flag = argument.partition("=")[0]
            if flag.startswith("--") and flag.replace("-", "_") not in explained:
                unknown.append(f"{flag} of {' '.join(program[0])}")
    assert commands and not unknown


def test_every_command_that_is_named_exists():
    """In README and docs: `zerolm data tokenize ...`, `python -m launch plan ...`."""
    groups = {"zerolm": zerolm.__main__, "launch": launch.__main__, "data_prep": data_prep.__main__}
    named = []
    for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        text = path.read_text(encoding="utf-8")
        for module, script, first, second in re.findall(CALLED, text, re.MULTILINE):
            command = groups[module or script].COMMANDS.commands.get(first)
            named.append(f"{module or script} {first}")
            if isinstance(command, Group) and second:
                command, named[-1] = command.commands.get(second), f"{named[-1]} {second}"
            assert command is not None, f"{path.name}: {named[-1]}"
    assert len(named) > 20


def test_the_list_of_commands_in_the_docs_is_the_help():
    text = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    assert help_text(zerolm.__main__.COMMANDS, "zerolm") in text, "paste zerolm --help"


def test_every_file_of_a_readme_command_exists():
    for argv in readme_commands():
        for argument in argv:
            is_file = argument.startswith(
                ("ds_configs/", "model_configs/", "launch/", "benchmarks/")
            )
            if is_file or argument in ("pretrain.py", "tests/run.sh"):
                assert (ROOT / argument).exists(), f"{argument} in: {' '.join(argv)}"


def test_every_flag_in_the_prose_of_the_readme_exists():
    prose = re.sub(r"^```.*?^```", "", README, flags=re.MULTILINE | re.DOTALL)
    flags = {flag.replace("-", "_") for flag in re.findall(r"`(--[a-z][\w-]*)", prose)}
    explained = help_of("pretrain.py") + "--num_nodes --num_gpus --hostfile"
    for program in ("supervise", "render", "node", "doctor"):
        explained += help_of("-m", "launch", program)
    for program in ("train-tokenizer", "tokenize", "verify", "inspect"):
        explained += help_of("-m", "data_prep", program)
    assert not {flag for flag in flags if flag not in explained.replace("-", "_")}


def test_no_two_test_files_have_one_name() -> None:
    """pytest imports test files by their names only."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))
