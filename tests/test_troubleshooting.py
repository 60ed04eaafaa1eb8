"""The messages that docs/troubleshooting.md quotes are in the code, and CITATION.cff is valid."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from itertools import chain

import pytest
import yaml

import zerolm.common.errors
from tests import ROOT, tracked
from tests.documents import flags_of_command, text_of

PAGE = ROOT / "docs" / "troubleshooting.md"
CODE = ("pretrain.py", "zerolm/**/*.py", "data_prep/**/*.py", "launch/**/*.py")
VALUE = "\0"  # stands for what a template fills in


def quoted_messages() -> list[str]:
    """Return the code in the first column of the page's tables that is a message: has a space."""
    rows = re.findall(r"^\| (.*?) \|", text_of(PAGE), re.MULTILINE)
    return [code for row in rows for code in re.findall(r"`([^`]+)`", row) if " " in code]


def strings(tree: ast.Module) -> Iterator[str]:
    """Return a module's strings, with `VALUE` for each value in them, but not its docstrings."""
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(
                str(part.value) if isinstance(part, ast.Constant) else VALUE for part in node.values
            )
        elif isinstance(node, ast.Constant) and id(node) not in alone:
            # Some are for str.format; numbers match no message.
            yield re.sub(r"\{\w+\}", VALUE, str(node.value))


@cache
def texts_in_code() -> list[str]:
    return [text for path in tracked(*CODE) for text in strings(ast.parse(text_of(path)))]


@cache
def templates() -> tuple[str, ...]:
    scripts = (text_of(path).splitlines() for path in tracked("launch/*.sh"))
    return (*texts_in_code(), *chain.from_iterable(scripts))


def is_in_code(message: str) -> bool:
    fragments = [re.escape(part) for part in re.split(r"\s*\.\.\.\s*", message) if part]
    pattern = re.compile(".*".join(fragments), re.DOTALL)
    return any(pattern.search(template) for template in templates())


def test_messages_are_quoted():
    assert len(quoted_messages()) > 80


@pytest.mark.parametrize("message", quoted_messages())
def test_a_quoted_message_is_in_the_code(message):
    assert len(message) >= 9 and is_in_code(message)


def test_other_texts_are_not_found_in_the_code():
    assert is_in_code("another run is writing to it now. Stop that run")
    assert not is_in_code("another run is writing to it now. Continue that run")
    assert not is_in_code("Limits on open files, memory, processes")  # a docstring


def commands_in_messages() -> set[str]:
    """Return the words of each `zerolm` command that a message tells the user to run."""
    pattern = r"(?:`|: |with |Run |by )zerolm ((?:[a-z][a-z-]+ ?){1,2})"
    return {words.strip() for text in templates() for words in re.findall(pattern, text)}


def test_the_commands_that_messages_name_exist():
    found = commands_in_messages()
    assert len(found) > 8
    for words in found:
        first, *more = words.split()
        known = flags_of_command((first, *more)) or flags_of_command((first,))
        assert known, f"zerolm {words}"


def test_messages_name_the_command_and_not_the_module_or_a_package_of_no_index():
    old = re.compile(
        r"data_prep [a-z]|python -m (?:data_prep|launch|zerolm) [a-z]|pip install '?zerolm"
    )
    assert not [text for text in texts_in_code() if old.search(text)]


def test_the_page_has_every_exit_code():
    known = vars(zerolm.common.errors)
    codes = {value for name, value in known.items() if name.startswith("EXIT_")}
    shown = re.findall(r"^\| (\d+) \|", text_of(PAGE), re.MULTILINE)
    assert {int(code) for code in shown} == codes


def test_the_citation_states_title_version_license_and_authors():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    setup = (ROOT / "setup.cfg").read_text(encoding="utf-8")
    assert {"cff-version", "message", "title", "type"} <= citation.keys()
    assert f"version = {citation['version']}\n" in setup
    assert f"license = {citation['license']}\n" in setup
    assert [author["name"] for author in citation["authors"]] == ["zerolm maintainers"]
