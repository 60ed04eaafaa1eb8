"""Command lines with subcommands: dispatch, help by topic, errors, exit codes.

A command is a module that is imported only when the command is used, so `--help` is instant. The
module has two functions:

    add_flags(parser)    describes the command and adds its flags
    run(arguments)       does the work and returns the exit code; None means 0

Must not depend on what the commands do.
"""

import argparse
import importlib
import io
import os
import re
import select
import signal
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn, TextIO

from zerolm.common import interrupts
from zerolm.common.errors import (
    EXIT_DONE,
    EXIT_REFUSED,
    ConfigError,
    ZerolmError,
    did_you_mean,
    reason,
)
from zerolm.common.files import barrier, write_problem
from zerolm.common.provenance import version_text
from zerolm.common.secrets import mask_tracebacks, masked
from zerolm.common.values import (
    parse_bytes,
    parse_count,
    parse_duration,
    parse_path,
    parse_real,
    printable,
    within,
)

EXIT_INTERRUPTED = 128 + signal.SIGINT
EXIT_OUTPUT_CLOSED = 128 + signal.SIGPIPE
CURSOR_UP = "\x1b[A"
WIDTH = 100
SYNTAX = (
    "Write flags with underscores or dashes; numbers as 3e9, 3B, 15M or 2k; bytes as 5GB or 32GiB; "
    "durations as 3h50m or 90s."
)

SYNONYMS = {  # {name in other programs: our name}; suggested by each command that has the flag
    **dict.fromkeys(("output_dir", "out_dir", "output_prefix", "save_dir", "out"), "output"),
    **dict.fromkeys(("input_dir", "input_path", "files", "dataset", "data_path"), "input"),
    **dict.fromkeys(("num_proc", "num_workers", "nproc", "processes", "jobs"), "workers"),
    **dict.fromkeys(("tokenizer_name", "tokenizer_path", "tokenizer_model"), "tokenizer"),
    **dict.fromkeys(("text_column", "text_key", "json_keys", "content_field"), "text_field"),
    **dict.fromkeys(("model_config_path", "config"), "model_config"),
    **dict.fromkeys(("gpus", "num_gpus", "n_gpus"), "devices"),
    **dict.fromkeys(("sequence_length", "block_size", "max_length", "seq_length"), "seq_len"),
    **dict.fromkeys(("dtype", "torch_dtype", "bf16", "fp16"), "precision"),
}


@dataclass(frozen=True)
class Command:
    """One command.

    Attributes:
        help: one line for the list of commands; empty if the command is not listed, because only
            zerolm itself starts it.
        module: dotted name of the module with `add_flags` and `run`.
        topic: heading under which the command is listed.
        takes_run: whether the command that starts a run may follow `--`. `run` receives it as the
            list `arguments.run_command`, or None without `--`.
        own_parser: whether `run` receives argv as a list and parses it itself.
        passes_on: whether other arguments are for another command. `run` receives them as the list
            `arguments.others`.
    """

    help: str
    module: str
    topic: str = "commands"
    takes_run: bool = False
    own_parser: bool = False
    passes_on: bool = False


@dataclass(frozen=True)
class Group:
    """All commands of a program, or a group of its commands such as `zerolm data ...`.

    Attributes:
        topic: heading under which the commands are listed in the help of an outer group.
        around: returns a context in which to run a command, given the command line's arguments.
    """

    description: str
    commands: Mapping[str, "Command | Group"]
    topic: str = "commands"
    around: Callable[[Sequence[str]], AbstractContextManager[None]] = lambda argv: nullcontext()


def commands_in(package: str, topics: Mapping[str, Mapping[str, str]]) -> dict[str, Command]:
    """Return the commands of a package in which each command has a module of the same name.

    Args:
        topics: {topic: {name of a command: its line of help}}.
    """
    return {
        name: Command(text, f"{package}.{name.replace('-', '_')}", topic)
        for topic, lines in topics.items()
        for name, text in lines.items()
    }


def run_program(group: Group, argv: Sequence[str], program: str) -> int:
    """Run the command given by `argv`, and return its exit code.

    Args:
        program: what the user typed to start the program, such as `zerolm`, for usage and messages.
    """
    open_standard_streams()
    streams: Any = sys.stdout, sys.stderr
    if isinstance(sys.stdout, io.TextIOWrapper):  # the terminal may not support every character
        sys.stdout.reconfigure(errors="backslashreplace")
    shown: Any = PrintableOutput(sys.stdout, "\n\t"), PrintableOutput(sys.stderr, "\n\r\t")
    sys.stdout, sys.stderr = shown
    mask_tracebacks()
    try:
        return _exit_code(group, argv, program)
    finally:
        sys.stdout, sys.stderr = streams


def _exit_code(group: Group, argv: Sequence[str], program: str) -> int:
    try:
        code = _run(group, argv, program)
    except BrokenPipeError:
        if not _output_is_closed():  # caused by one of our own pipes, not by `| head`
            raise
        code = EXIT_OUTPUT_CLOSED
    except SystemExit as end:
        if isinstance(end.code, str):
            raise
        code = end.code or EXIT_DONE
    except (KeyboardInterrupt, Exception) as error:
        # numpy's extension turns an interrupt during its import into an ImportError
        replaced = isinstance(error, ImportError) and interrupts.was_raised()
        if not isinstance(error, KeyboardInterrupt) and not replaced:
            raise
        interrupts.end_on_interrupt()
        print(f"{program}: interrupted", file=sys.stderr)
        code = EXIT_INTERRUPTED
    return code if flush_output() else code or EXIT_OUTPUT_CLOSED


class PrintableOutput:
    """A standard stream that escapes control characters, since printed text may come from a file.

    Attributes:
        stream: the original stream, for commands that draw on the terminal.
    """

    def __init__(self, stream: TextIO, kept: str):
        self.stream, self.kept = stream, kept

    def write(self, text: str) -> int:
        is_move = not text.replace(CURSOR_UP, "")  # tqdm's sequence that moves up to another bar
        self.stream.write(text if is_move else printable(text, self.kept))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def open_standard_streams() -> None:
    """Open /dev/null for each closed standard stream, as daemons may have.

    Python represents a closed stream as None, which cannot be flushed. The next file to be opened
    would receive the stream's descriptor, and C libraries and the processes of a run would write
    their messages into that file.
    """
    for descriptor, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is not None:
            continue
        try:
            os.fstat(descriptor)
        except OSError:
            # `os.open` returns the lowest free descriptor.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        setattr(sys, name, open(os.devnull, mode))


def flush_output() -> bool:
    """Flush stdout. If the reader of the output has exited, as in `| head`, discard the rest
    without an error, and return False.
    """
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return False
    return True


def _output_is_closed() -> bool:
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def _run(group: Group, argv: Sequence[str], program: str) -> int:
    """Find the command, parse its flags, run it, and print its errors."""
    remaining, name, groups = list(argv), program, []
    if remaining[-1:] == ["--version"] and "--" not in remaining:
        print(version_text())
        return EXIT_DONE
    found: Command | Group = group
    while isinstance(found, Group):
        groups.append(found)
        word = remaining.pop(0) if remaining else ""
        if word == "help" and remaining:  # help COMMAND
            remaining.append("--help")
            continue
        if word in ("-h", "--help", "help"):
            print(help_text(found, name))
            return EXIT_DONE
        if (command := found.commands.get(word.replace("_", "-"))) is None:
            _refuse_command(found, word, name)
        found, name = command, f"{name} {word.replace('_', '-')}"
    try:
        refuse_line_breaks(remaining)
        with ExitStack() as contexts:
            for outer in groups:
                contexts.enter_context(outer.around(remaining))
            module = importlib.import_module(found.module)
            arguments = remaining if found.own_parser else _parse(found, module, remaining, name)
            interrupts.raise_on_interrupt()  # from here on, the command may have to clean up
            return module.run(arguments) or EXIT_DONE
    except ZerolmError as error:
        heading = "refused\n" if error.exit_code == EXIT_REFUSED else ""
        print(f"{name}: {heading}{error}", file=sys.stderr)
        return error.exit_code
    except PermissionError as error:
        named = error.filename is not None  # None if a library in another language opened the file
        cause = f"{barrier(error.filename)}: {error.strerror}" if named else reason(error)
        fix = "Change its permissions, or name another."
        print(f"{name}: refused\n{cause}. {fix}", file=sys.stderr)
        return EXIT_REFUSED


def refuse_line_breaks(argv: Sequence[str]) -> None:
    """Refuse paths of existing files that contain line breaks, since they could forge output."""
    paths = (part for argument in argv for part in (argument, argument.partition("=")[2]))
    found = [path for path in paths if {"\n", "\r"} & set(path) and os.path.lexists(path)]
    if found:
        raise ConfigError(f"{path!a}: contains a line break. Rename it." for path in found)


def _parse(command: Command, module: Any, argv: list[str], name: str) -> argparse.Namespace:
    run_command = None
    if command.takes_run and "--" in argv:
        place = argv.index("--")
        argv, run_command = argv[:place], argv[place + 1 :]
    parser = Parser(name, f"{command.help[:1].upper()}{command.help[1:]}.")
    module.add_flags(parser)
    others: list[str] = []
    if command.passes_on:
        argv, others = parser.split(argv)
    arguments = parser.parse(argv)
    if command.takes_run:
        arguments.run_command = run_command
    if command.passes_on:
        arguments.others = others
    return arguments


def _refuse_command(group: Group, word: str, program: str) -> NoReturn:
    if not word:
        print(f"{help_text(group, program)}\n\n{program}: a command is missing.", file=sys.stderr)
        sys.exit(EXIT_REFUSED)
    rows = [row for rows in _listed(group).values() for row in rows]
    does = (name for name, text in rows if word in re.findall(r"[\w-]+", text))
    near = did_you_mean(word, [name for name, _ in rows])
    near = near or "".join(f' Did you mean "{name}"?' for name in islice(does, 1))
    print(f"{program}: {word}: no such command.{near} See {program} --help.", file=sys.stderr)
    sys.exit(EXIT_REFUSED)


# -------------------------------------------------------------------------------------------------
# Help


def help_text(group: Group, program: str) -> str:
    """Return the text of `--help`: one line for each command, by topic."""
    topics = _listed(group)
    column = 6 + max(len(name) for rows in topics.values() for name, _ in rows)
    lines = [f"usage: {program} COMMAND [flags]", "", *textwrap.wrap(group.description, WIDTH)]
    for topic, rows in topics.items():
        lines += ["", f"{topic}:"]
        for name, text in rows:
            first, *rest = textwrap.wrap(text, WIDTH - column)
            lines += [f"    {name:<{column - 4}}{first}", *(" " * column + part for part in rest)]
    closing = f"`{program} COMMAND --help` shows the flags of a command. {SYNTAX}"
    return "\n".join([*lines, "", *textwrap.wrap(closing, WIDTH)])


def _listed(group: Group) -> dict[str, list[tuple[str, str]]]:
    """Return {topic: [(name, help line), ...]}; commands in a group are named `GROUP NAME`."""
    topics: dict[str, list[tuple[str, str]]] = {}
    for name, command in group.commands.items():
        rows = topics.setdefault(command.topic, [])
        if isinstance(command, Group):
            inner = [row for rows in _listed(command).values() for row in rows]
            rows += [(f"{name} {second}", text) for second, text in inner]
        elif command.help:
            rows.append((name, command.help))
    return {topic: rows for topic, rows in topics.items() if rows}


# -------------------------------------------------------------------------------------------------
# Flags of a single command


class Parser(argparse.ArgumentParser):
    """Parses the flags of one command, with dashes or underscores; suggests the most similar flag.

    Args:
        program: program and command, for usage and messages.
        more: additional arguments for argparse.
    """

    def __init__(self, program: str, description: str, **more: Any):
        super().__init__(
            program, description=description, allow_abbrev=False, formatter_class=_Formatter, **more
        )

    def split(self, argv: Sequence[str]) -> tuple[list[str], list[str]]:
        """Separate the command's own flags and their values from all other arguments."""
        takes_value = {
            _with_underscores(flag): action.nargs != 0
            for action in self._actions
            for flag in action.option_strings
        }
        own: list[str] = []
        others: list[str] = []
        remaining = list(argv)
        while remaining:
            word = remaining.pop(0)
            written, equals, _ = word.partition("=")
            name = _with_underscores(written)
            (own if name in takes_value else others).append(word)
            if takes_value.get(name) and not equals:
                own += remaining[:1]
                del remaining[:1]
        return own, others

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse the arguments after the command's name.

        Raises:
            SystemExit: `--help` (code 0), or an invalid flag or value (code 2).
        """
        arguments, unknown = list(argv), []
        flags = [flag for action in self._actions for flag in action.option_strings]
        spellings = {_with_underscores(flag): flag for flag in flags}
        for place, argument in enumerate(arguments):
            if argument == "--":
                break
            if argument.startswith("--"):
                written, equals, value = argument.partition("=")
                name = _with_underscores(written)
                if (flag := spellings.get(name)) is None:
                    near = did_you_mean(f"--{SYNONYMS.get(name[2:], name[2:])}", spellings)
                    unknown.append(f"{written}: no such flag.{near}")
                else:
                    arguments[place] = flag + equals + parse_path(value)
        if unknown:
            self.error("\n".join(unknown))
        return self.parse_args(arguments)

    def error(self, message: str) -> NoReturn:
        """Print a message without secrets, one line per problem, and exit."""
        for line in masked(message).splitlines():
            end = "" if line.endswith((".", "?")) else "."
            print(f"{self.prog}: {line}{end} See {self.prog} --help.", file=sys.stderr)
        sys.exit(EXIT_REFUSED)


class _Formatter(argparse.HelpFormatter):
    """Adds each switch's default to its help, and does not break lines at dashes in flags."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=40, width=WIDTH)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if isinstance(action.default, bool):
            return f"{action.help} (default: {'on' if action.default else 'off'})"
        return action.help

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if isinstance(action, argparse.BooleanOptionalAction):
            return action.option_strings[0]
        return super()._format_action_invocation(action)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False)


def _with_underscores(flag: str) -> str:
    return flag[:2] + flag[2:].replace("-", "_")


def flag_type(parse: Callable[[str], Any], **bounds: float) -> Callable[[str], Any]:
    """Return a converter for argparse's `type` that parses a value and checks its bounds."""

    def read(text: str) -> Any:
        try:
            return within(parse(text), **bounds)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r} {error}") from None

    return read


count = flag_type(parse_count, minimum=1)
count_from_zero = flag_type(parse_count, minimum=0)
number = flag_type(parse_real, above=0)
size_bytes = flag_type(parse_bytes, minimum=1)
duration = flag_type(parse_duration)  # in seconds


def file_to_write(text: str) -> Path:
    """Convert a flag's value to the path of a file, after checking that the file can be written."""
    if problem := write_problem(Path(text)):
        raise argparse.ArgumentTypeError(problem)
    return Path(text)
