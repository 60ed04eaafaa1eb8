"""README and docs match the code, and no file contains paths of a machine."""

import json
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

from tests import ROOT
from tests.documents import (
    DOCUMENTS,
    LAUNCHER,
    PRETRAIN,
    README,
    blocks,
    commands,
    flags_of_command,
    flags_of_script,
    name_of,
    problems,
    prose,
    spelled,
    text_of,
)
from zerolm.__main__ import COMMANDS
from zerolm.common.command_line import Group

MAX_README_BYTES = 12_000
MACHINE_PATHS = re.compile(r"(?<![\w.~}])/(?:" + "|".join(("work", "root", "home")) + r")/")
# Flags in prose that are an example, of lm-eval, and of docker.
FOREIGN = {"--flag", "--limit", "--shm_size"}


@cache
def tracked_files() -> list[str]:
    """Return the files that git tracks, and those that it would add."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    if result.returncode != 0:
        pytest.skip("not a git checkout")
    return [name for name in result.stdout.splitlines() if (ROOT / name).is_file()]


def anchors(path: Path) -> set[str]:
    """Return the anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", prose(text_of(path)), re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return {heading.replace(" ", "-") for heading in plain}


def test_the_readme_is_short():
    assert len(README.read_bytes()) <= MAX_README_BYTES


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(text_of(path))):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        file = (path.parent / name).resolve() if name else path
        assert file.exists(), target
        if anchor:
            assert anchor in anchors(file), target


def test_the_index_names_every_document():
    linked = set(re.findall(r"\]\(([\w.]+\.md)\)", text_of(ROOT / "docs" / "README.md")))
    assert linked == {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}


def test_the_layout_in_the_readme_exists():
    (layout,) = [block for block in blocks(text_of(README), "text") if "pretrain.py  " in block]
    parent, named = "", set()
    for line in layout.splitlines():
        for name in re.findall(r"(?:^| )(\w+/)(?= )", line.split("  :")[0]):
            parent = name if not line.startswith(" ") else parent
            named.add(name if not line.startswith(" ") else parent + name)
    missing = [name for name in named if not (ROOT / name).is_dir()]
    assert len(named) > 25 and not missing
    folders = {f"{Path(name).parts[0]}/" for name in tracked_files() if "/" in name}
    assert not {name for name in folders if name[0] != "."} - named


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_the_commands_of_a_document_exist_with_their_flags_and_files(path):
    assert not [problem for shown in commands(path) for problem in problems(shown)]


def test_there_are_commands_to_check():
    assert sum(len(commands(path)) for path in DOCUMENTS) > 140


def all_flags() -> set[str]:
    found = PRETRAIN | LAUNCHER | FOREIGN
    for name, command in COMMANDS.commands.items():
        inner = [(name, each) for each in command.commands] if isinstance(command, Group) else []
        for words in inner or [(name,)]:
            found |= flags_of_command(tuple(words)) or set()
    for path in (*(ROOT / "benchmarks").glob("*.py"), ROOT / "tests" / "soak.py"):
        found |= flags_of_script(name_of(path))
    return found


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_the_flags_in_the_prose_of_a_document_exist(path):
    code = re.findall(r"`([^`\n]+)`", prose(text_of(path)))
    flags = {spelled(flag) for text in code for flag in re.findall(r"(?<!\S)(--[a-z][\w-]+)", text)}
    unknown = flags - all_flags()
    assert not unknown


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_the_files_that_a_document_names_exist(path):
    folders = "zerolm|data_prep|launch|tests|benchmarks|docs|ds_configs|model_configs"
    named = re.findall(rf"`((?:{folders})/[\w/.-]+)`", prose(text_of(path)))
    missing = [name for name in named if not (ROOT / name).exists()]
    assert not missing


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_json_in_a_document_parses(path):
    for block in blocks(text_of(path), "json"):
        try:
            json.loads(block)
        except ValueError:  # a JSON Lines file
            for line in block.splitlines():
                json.loads(line)


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
