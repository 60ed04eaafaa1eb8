"""README and docs match the code, and no file contains paths of a machine."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT, tracked
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
# Flags in prose that are an example, of lm-eval, and of docker; and what first_change.md adds.
FOREIGN = {"--flag", "--limit", "--shm_size", "--centering"}
ADDED = {"zerolm.features.centering", "zerolm.features.centering.Centering"}


OURS = "zerolm|data_prep|launch|benchmarks|tests"


def tracked_files() -> list[str]:
    """Return the names of all files; a directory that is not a checkout has others, too."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    return [name_of(path) for path in tracked("**")]


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
    linked = set(re.findall(r"\]\(([\w.-]+\.md)\)", text_of(ROOT / "docs" / "README.md")))
    assert linked == {path.name for path in tracked("docs/*.md")} - {"README.md"}


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
    for path in tracked("benchmarks/**/*.py", "tests/*/__main__.py"):
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


def is_defined(name: str) -> bool:
    """Return whether `package.module.name` is a module, or a module defines the last part."""
    path = ROOT / name.replace(".", "/")
    if path.is_dir() or path.with_suffix(".py").is_file():
        return True
    package = path.parent / "__init__.py"
    module = package if package.is_file() else path.parent.with_suffix(".py")
    definition = rf"^(?:(?:async )?def |class )?{path.name}\b(?: *[=:(]|$)"
    return module.is_file() and bool(re.search(definition, text_of(module), re.MULTILINE))


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_the_python_names_of_a_document_exist(path):
    """Dotted ones anywhere, what its blocks import, and in architecture.md every identifier."""
    text = text_of(path)
    named = set(re.findall(rf"(?<![\w/.-])(?:{OURS})(?:\.[A-Za-z_]\w*)+(?!\.?\w)", text))
    for block in blocks(text, "python"):
        for module, names in re.findall(rf"from ((?:{OURS})[\w.]*) import ([\w, ]+)", block):
            named |= {f"{module}.{name.strip()}" for name in names.split(",")}
    endings = (".py", ".md", ".json", ".MODULE")
    named = {name for name in named - ADDED if not name.endswith(endings)}
    assert not {name for name in named if not is_defined(name)}
    if path.name == "architecture.md":
        code = {word for each in tracked("**/*.py") for word in re.findall(r"\w+", text_of(each))}
        assert not set(re.findall(r"`([A-Za-z_]\w*)(?:\(\))?`", prose(text))) - code


def test_the_readme_of_the_benchmarks_names_every_command():
    text = text_of(ROOT / "benchmarks" / "README.md")
    modules = [path for path in tracked("benchmarks/*.py") if "__main__" in text_of(path)]
    names = [
        *(path.stem for path in modules),
        *(path.parent.name for path in tracked("benchmarks/*/__main__.py")),
    ]
    assert len(names) > 6
    missing = [n for n in names if f"benchmarks.{n}" not in text and f"/{n}.py" not in text]
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


def test_no_process_of_ours_imports_files_of_the_working_directory():
    """`shipped.module_command` starts modules, `code_command` code; `-I` does it, too."""
    argv = re.compile(r"""(?<!"-I", )["']-m["'],|executable, ["']-[mc]["']""")
    allowed = {"zerolm/common/shipped.py", "zerolm/engine/launcher.py"}
    product = {"pretrain.py", *map(name_of, tracked("zerolm/**/*.py", "launch/**/*.py"))}
    product |= set(map(name_of, tracked("data_prep/**/*.py")))
    found = [name for name in sorted(product - allowed) if argv.search(text_of(ROOT / name))]
    # The directory's path is in place of the import path that Python would begin with; one is for
    # the shell of a user.
    assert found == ["data_prep/cli/input_flags.py", "data_prep/formats/pages.py"]


# ---- Files that are not the project's

STRAY = {
    "notes.txt": f"a path of a machine: /{'home'}/me/data",
    "scratch.py": "x = 1 ;y=",
    "scratch/deep/own.py": "import zerolm.nothing",
    "with space/é.md": "[a link](nowhere.md) to `zerolm/nothing.py`",
    "docs/mine.md": "`zerolm train --no_such_flag 1`",
    "benchmarks/mine.py": "def broken(:",
    "model_configs/mine.json": "{",
    "ds_configs/mine.json": "{",
    "data_prep/recipes/mine.json": "{",
    "data_prep/mine.json": "{}",
    "launch/mine.sh": "if",
    "launch/hostfile": "worker-1 slots=8",
    "zerolm/mine/__init__.py": "",
    "zerolm/common/mine.py": "from zerolm.train import run; x = 'run.json'",
    "zerolm/report/assets/mine.js": "(",
    "tests/mine.py": "from tests import nothing",
}
# Everything that goes through the files of the checkout.
THOROUGH = (
    "tests/test_ladder.py", "tests/test_repository.py", "tests/test_tables.py",
    "tests/test_wheel.py", "tests/launch/test_scripts.py", "tests/launch/estimate/test_command.py",
    "tests/zerolm/run_dir/test_files.py", "tests/zerolm/ds_config/test_resolve.py",
    "tests/zerolm/model/test_architecture.py", "tests/data_prep/pipeline/test_recipe.py",
)  # fmt: skip


def write_stray_files(directory: Path) -> None:
    for name, text in STRAY.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text, encoding="utf-8")
    (directory / "stray.bin").write_bytes(b"\xff\xfe")
    (directory / "dangling").symlink_to("nowhere")
    (directory / "loop").symlink_to(".")
    os.mkfifo(directory / "pipe")


def clone(directory: Path) -> Path:
    """Return a clone of the checkout's last commit."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    command = ["git", "clone", "--quiet", "--depth", "1", ROOT.as_uri(), directory]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    return directory


def listed(directory: Path) -> list[str]:
    """Return the names of the files that the tests of a directory go through."""
    script = "from tests import ROOT, tracked; print(*(p.relative_to(ROOT) for p in tracked('**')))"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=directory, env={**os.environ, "PYTHONPATH": "."},
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    return done.stdout.split()


def test_no_test_reads_a_text_that_comes_with_the_interpreter():
    """Its pages and its library differ between versions of Python: tests/manual.py has a text."""
    texts = re.compile("pydoc_" + r"data|get_paths\(\)\[.stdlib.\]|" + r"getdoc\(")
    found = [name_of(path) for path in tracked("tests/**/*.py") if texts.search(text_of(path))]
    assert not found


def test_stray_files_of_a_checkout_are_not_tested(tmp_path):
    """What a commit will contain is tested: what git tracks, as it is on disk."""
    checkout = clone(tmp_path / "checkout")
    before = listed(checkout)
    write_stray_files(checkout)
    assert listed(checkout) == before and "zerolm/train/run.py" in before
    subprocess.run(["git", "add", "notes.txt"], cwd=checkout, check=True, timeout=60)
    (checkout / "ruff.toml").unlink()
    assert {*listed(checkout)} == {*before, "notes.txt"} - {"ruff.toml"}
    (checkout / ".git").rename(tmp_path / "git")  # an archive: everything is the project's
    assert {*STRAY} - {"with space/é.md"} <= {*listed(checkout)}


@pytest.mark.soak
def test_stray_files_of_many_kinds_fail_no_test(tmp_path):
    checkout = clone(tmp_path / "checkout")
    write_stray_files(checkout)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *THOROUGH,
         "--deselect", f"{THOROUGH[7]}::test_shipped_profiles_reduce_gradients_exactly"],
        cwd=checkout, env={**os.environ, "PYTHONPATH": "."}, capture_output=True, text=True,
        timeout=550,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:]
