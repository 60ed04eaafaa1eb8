"""The repository itself: the README is true, and nothing names the machine it was written on."""

import json
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
# Directories whose every file the tree of the README names; of the others it names the directory.
LISTED = ("zerolm", "data_prep", "launch", "ds_configs", "model_configs", "benchmarks", "docs")
UNLISTED = {"benchmarks/results", "docs/figures"}
MACHINE_PATHS = re.compile(r"(?<![\w.~}])/(?:" + "|".join(("work", "root", "home")) + r")/")


@cache
def tracked_files() -> list[str]:
    """Return what git tracks, or will once it is added."""
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


def test_pictures_and_links_of_the_readme_exist():
    for target in re.findall(r"\]\(([^)#\s]+)\)", README):
        if "://" not in target:
            assert (ROOT / target).exists(), target


def test_no_file_names_the_machine_it_was_written_on():
    found = []
    for name in tracked_files():
        try:
            text = (ROOT / name).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # a picture
        for number, line in enumerate(text.splitlines(), start=1):
            if MACHINE_PATHS.search(line):
                found.append(f"{name}:{number}: {line.strip()}")
    assert not found


def readme_commands() -> list[list[str]]:
    """Return the words of each command in the README's shell blocks."""
    text = "\n".join(blocks("bash")).replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line and line[0] != "#"]


@cache
def help_of(*words: str) -> str:
    result = subprocess.run(
        [sys.executable, *words, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def program_of(words: list[str]) -> tuple[tuple[str, ...], list[str]] | None:
    """Return what prints the help of the command, and the words that the help must explain."""
    if words[:3] == ["python", "-m", "launch"]:
        end = words.index("--") if "--" in words else len(words)
        return ("-m", "launch", words[3]), words[4:end]
    if "pretrain.py" in words:
        return ("pretrain.py",), words[words.index("pretrain.py") + 1 :]
    if "launch/multinode.sh" in words:
        return ("pretrain.py",), words[words.index("launch/multinode.sh") + 3 :]
    if words[:2] == ["python", "-m"]:
        if words[2] in ("data_prep", "zerolm"):
            return ("-m", words[2], words[3]), words[4:]
        return ("-m", words[2]), words[3:]
    if words[0] == "python":
        return (words[1],), words[2:]
    return None


def test_every_flag_of_a_readme_command_exists():
    unknown = []
    commands = readme_commands()
    for words in commands:
        program = program_of(words)
        if program is None:
            continue
        explained = help_of(*program[0]).replace("-", "_")
        for word in program[1]:
            flag = word.partition("=")[0]
            if flag.startswith("--") and flag.replace("-", "_") not in explained:
                unknown.append(f"{flag} of {' '.join(program[0])}")
    assert commands and not unknown


@pytest.mark.parametrize("package", ["data_prep", "launch", "zerolm"])
def test_the_tree_of_the_readme_names_every_command(package):
    _, _, named = README.partition(f"  __main__.py                python -m {package} ")
    commands = re.findall(r"^    ([a-z][a-z-]+)(?: |$)", help_of("-m", package), re.MULTILINE)
    assert commands and sorted(commands) == sorted(named.partition("\n")[0].split(" | "))


def test_every_file_of_a_readme_command_exists():
    for words in readme_commands():
        for word in words:
            is_file = word.startswith(("ds_configs/", "model_configs/", "launch/", "benchmarks/"))
            if is_file or word in ("pretrain.py", "tests/run.sh"):
                assert (ROOT / word).exists(), f"{word} in: {' '.join(words)}"


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
    """pytest imports them by their names alone."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))
