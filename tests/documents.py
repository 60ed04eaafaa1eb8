"""The documents of the project, and the commands that they show."""

import re
import shlex
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import zerolm.__main__
from tests import ROOT, tracked
from zerolm.common.command_line import Command, Group, Parser
from zerolm.engine.launcher_options import LAUNCHER_FLAGS
from zerolm.parts.settings import FLAGS

README = ROOT / "README.md"
DOCUMENTS = (
    README,
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *tracked("docs/*.md"),
    ROOT / "benchmarks" / "README.md",
    ROOT / "model_configs" / "README.md",
)
PROGRAMS = ("zerolm ", "python ", "deepspeed ", "bash ", "until ")
SYNTAX = re.compile(r"\[|\.\.\.")  # in inline code that shows the syntax of a command
PRETRAIN = (
    {f"--{name}" for name in FLAGS} | {f"--no_{name}" for name in FLAGS} | {"--help", "--version"}
)
LAUNCHER = {f"--{name}" for name in LAUNCHER_FLAGS}
FOLDERS = ("ds_configs/", "model_configs/", "launch/", "data_prep/")
CHECKED = ("benchmarks/", "tests/")  # folders whose modules are commands
SCRIPTS = ("pretrain.py", "tests/run.sh")
FENCE = r"^```{}\n(.*?)^```"
# `python -m MODULE` is `zerolm` with these words.
MODULES = {"data_prep": ["data"], "launch": [], "zerolm": []}


class Shown(NamedTuple):
    """A command in a document."""

    document: str
    line: str

    @property
    def argv(self) -> list[str]:
        """Its words; of an `until` loop those of the command that it repeats."""
        line = re.sub(r"^until (.*); do .*", r"\1", self.line)
        return shlex.split(line, comments=True)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def blocks(text: str, language: str) -> list[str]:
    return re.findall(FENCE.format(language), text, re.MULTILINE | re.DOTALL)


def prose(text: str) -> str:
    return re.sub(FENCE.format(r"\w*"), "", text, flags=re.MULTILINE | re.DOTALL)


def commands(path: Path) -> list[Shown]:
    """Return the commands of a document in order: of its shell blocks, and of its inline code."""
    pattern = r"^```bash\n(?P<block>.*?)^```|^```.*?^```|`(?P<inline>[^`\n]+)`"
    found = []
    for match in re.finditer(pattern, text_of(path), re.MULTILINE | re.DOTALL):
        if match["block"]:
            lines = [line.strip() for line in match["block"].replace("\\\n", " ").splitlines()]
            found += [line for line in lines if line and line[0] != "#"]
        elif (match["inline"] or "").startswith(PROGRAMS) and not SYNTAX.search(match["inline"]):
            found.append(match["inline"])
    return [Shown(name_of(path), line) for line in found]


# ---- What the flags of a command may be


@cache
def flags_of_command(words: tuple[str, ...]) -> set[str] | None:
    """Return the flags of `zerolm WORDS`, None if there is no such command."""
    found: Command | Group | None = zerolm.__main__.COMMANDS
    for word in words:
        if not isinstance(found, Group):
            return None
        found = found.commands.get(word)
    if not isinstance(found, Command):
        return None if found is None else {"--help", "--version"}
    if found.own_parser:  # `train`, which takes those of two programs
        return PRETRAIN | LAUNCHER
    parser = Parser("", "")
    import_module(found.module).add_flags(parser)
    own = {spelled(flag) for action in parser._actions for flag in action.option_strings}
    return own | PRETRAIN | LAUNCHER if found.passes_on else own


@cache
def flags_of_script(path: str) -> set[str]:
    """Return the flags that a script's source adds."""
    source = text_of(ROOT / path)
    return {spelled(flag) for flag in re.findall(r'"(--[a-z][\w-]*)"', source)} | {"--help"}


def spelled(flag: str) -> str:
    return flag[:2] + flag[2:].replace("-", "_")


def known_flags(argv: list[str]) -> set[str] | None:
    """Return the flags that a program takes; None for a program that is not ours.

    Raises:
        LookupError: the program or its subcommand does not exist.
    """
    program = argv[2].replace(".", "/") if argv[:2] == ["python", "-m"] else argv[1]
    if argv[0] == "zerolm" or program in MODULES:
        words = argv[1:] if argv[0] == "zerolm" else [*MODULES[program], *argv[3:]]
        length = 2 if words[:1] == ["data"] else 1
        known = flags_of_command(tuple(word for word in words[:length] if word[0] != "-"))
        if known is None:
            raise LookupError("no such command")
        return known
    if argv[0] == "deepspeed" or program in ("pretrain.py", "launch/multinode.sh"):
        return PRETRAIN | LAUNCHER
    for script in (program, f"{program}.py", f"{program}/__main__.py"):
        if argv[0] == "python" and script.endswith(".py") and (ROOT / script).is_file():
            return flags_of_script(script)
    if argv[0] == "python" and (argv[1] != "-m" or program.startswith(CHECKED)):
        raise LookupError("no such script")
    return None


def problems(shown: Shown) -> list[str]:
    """Return what is wrong with a command: a program, a flag or a file that does not exist."""
    argv = shown.argv
    end = argv.index("--") if "--" in argv else len(argv)
    try:
        found = unknown_flags(argv[:end], known_flags(argv))
    except LookupError as error:
        return [f"{shown.document}: {shown.line}: {error}"]
    found += unknown_flags(argv[end + 1 :], PRETRAIN | LAUNCHER)
    ours = (word for word in argv if word.startswith(FOLDERS) or word in SCRIPTS)
    found += [f"{word}: no such file" for word in ours if not (ROOT / word).exists()]
    return [f"{shown.document}: {shown.line}: {problem}" for problem in found]


def unknown_flags(words: list[str], known: set[str] | None) -> list[str]:
    flags = [spelled(word.partition("=")[0]) for word in words if word.startswith("--")]
    return [f"{flag}: no such flag" for flag in flags if known is not None and flag not in known]
