"""The command line of the whole project, and the module that it is made with."""

import argparse
import ast
import importlib
import os
import re
import subprocess
import sys
import types
from importlib import metadata

import pytest

import data_prep.__main__
from tests import ROOT
from tests.launching import environment, run_here
from zerolm.__main__ import COMMANDS, main
from zerolm.common import command_line
from zerolm.common.command_line import Command, Group, Parser, run_program
from zerolm.common.errors import ConfigError
from zerolm.common.values import parse_real
from zerolm.engine.launcher_options import LAUNCHER_FLAGS
from zerolm.parts.settings import FLAGS


def leaves(group, *before):
    """Return {words: command} of every command of a group, also of those that are not listed."""
    found = {}
    for name, command in group.commands.items():
        inner = (*before, name)
        found |= leaves(command, *inner) if isinstance(command, Group) else {inner: command}
    return found


ALL = leaves(COMMANDS)
HEAVY = {"torch", "deepspeed", "transformers", "datasets", "pyarrow"}


def parser_of(*words):
    parser = Parser(" ".join(words), "")
    importlib.import_module(ALL[words].module).add_flags(parser)
    return parser


# -------------------------------------------------------------------------------------------------
# Help


@pytest.mark.parametrize("words", ALL, ids=" ".join)
def test_every_command_prints_its_help(words, capsys):
    assert main([*words, "--help"]) == 0
    assert re.match(rf"usage: .*zerolm {' '.join(words)} ", capsys.readouterr().out)


@pytest.mark.parametrize("words", [[], ["data"]], ids=["zerolm", "zerolm data"])
def test_the_help_lists_every_command_by_topic(words, capsys):
    assert main([*words, "--help"]) == 0
    text = capsys.readouterr().out
    for name, command in ALL.items():
        if list(name[: len(words)]) == words:
            listed = f"\n    {' '.join(name[len(words) :])} "
            assert (listed in text) == bool(command.help), name
    if not words:
        topics = ("prepare data:", "plan and check:", "train:", "during and after a run:")
        places = [text.index(f"\n{topic}\n") for topic in topics]
        assert places == sorted(places)


@pytest.mark.parametrize(
    ("asked", "flag"),
    [
        (["help"], ["--help"]),
        (["help", "data"], ["data", "--help"]),
        (["data", "help"], ["data", "--help"]),
        (["help", "data", "tokenize"], ["data", "tokenize", "--help"]),
        (["help", "train"], ["train", "--help"]),
    ],
    ids=lambda words: " ".join(words),
)
def test_help_may_be_asked_for_as_a_command(asked, flag, capsys):
    assert main(asked) == 0
    text = capsys.readouterr().out
    assert main(flag) == 0
    assert text == capsys.readouterr().out


@pytest.mark.parametrize("words", [[], ["data"]], ids=["zerolm", "zerolm data"])
def test_without_a_command_the_help_is_shown_and_the_exit_code_is_that_of_a_refusal(words, capsys):
    assert main([*words, "--help"]) == 0
    text = capsys.readouterr().out
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith(text) and err.endswith(": a command is missing.\n")


@pytest.mark.parametrize(
    "line",
    ["-m zerolm", "-m zerolm train", "-m zerolm data tokenize", "-m launch", "pretrain.py"],
)
def test_the_version_is_that_of_the_metadata_and_no_package_is_imported(line):
    result = subprocess.run(
        [sys.executable, "-X", "importtime", *line.split(), "--version"],
        cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    for name in ("torch", "DeepSpeed", "transformers"):
        assert f"{name} {metadata.version(name)}\n" in result.stdout
    assert result.stdout.startswith("zerolm ")
    imported = set(re.findall(r"\| +(\w+)$", result.stderr, re.MULTILINE))
    assert "textwrap" in imported and not HEAVY & imported


def switches_of(words):
    """Return the flags of a command that take no value, and are shown."""
    if not ALL[words].own_parser:
        shown = [one for one in parser_of(*words)._actions if one.help != argparse.SUPPRESS]
        return [one.option_strings[0] for one in shown if one.const is True]
    names = [name for name, about in FLAGS.items() if about["kind"] == "switch"]
    names += [name for name, flag in LAUNCHER_FLAGS.items() if not flag.metavar]
    return [f"--{name}" for name in names]


@pytest.mark.parametrize("words", [words for words in ALL if switches_of(words)], ids=" ".join)
def test_every_switch_states_its_default(words, capsys):
    assert main([*words, "--help", *(["all"] if ALL[words].own_parser else [])]) == 0
    text = capsys.readouterr().out
    for flag in switches_of(words):
        row = re.search(rf"^  {flag}\b(.*?)(?=^  -|^\S|\Z)", text, re.MULTILINE | re.DOTALL)
        assert row and "(default: o" in " ".join(row[1].split()), flag


def test_no_help_imports_anything_heavy():
    """The help of a command does not wait for torch, nor for what imports it."""
    modules = sorted({command.module for command in ALL.values()})
    script = f"import importlib, sys\nfor name in {modules}: importlib.import_module(name)\n"
    script += "print(sorted({name.partition('.')[0] for name in sys.modules}))"
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=environment(), capture_output=True, text=True,
        timeout=120, check=True,
    )  # fmt: skip
    imported = set(ast.literal_eval(result.stdout))
    assert "argparse" in imported
    assert not HEAVY & imported


# -------------------------------------------------------------------------------------------------
# Flags


def test_flags_have_underscores_or_dashes_and_an_equals_sign_or_a_space():
    words = ["--input", "a-b", "c", "--input=d-e", "--output", "o"]
    parser = parser_of("data", "train-tokenizer")
    one = parser.parse([*words, "--vocab_size", "300", "--text_field", "x-y"])
    two = parser.parse([*words, "--vocab-size=300", "--text-field=x-y"])
    assert one == two and one.input == ["a-b", "c", "d-e"] and one.text_field == "x-y"
    plan = parser_of("plan")
    assert plan.parse(["--no_async_checkpoint"]) == plan.parse(["--no-async-checkpoint"])


def test_an_abbreviation_is_no_flag():
    with pytest.raises(SystemExit):
        parser_of("plan").parse(["--dev", "8"])


@pytest.mark.parametrize(
    ("words", "start", "hint"),
    [
        (["data_prep", "tokenize", "--ouput", "x"], "data_prep tokenize", '"--output"'),
        (["data_prep", "tokenize", "--output_dir", "x"], "data_prep tokenize", '"--output"'),
        (["data_prep", "tokenize", "--num_proc=3"], "data_prep tokenize", '"--workers"'),
        (["data_prep", "tokenise"], "data_prep", '"tokenize"'),
        (["launch", "plan", "--device=8"], "launch plan", '"--devices"'),
        (["launch", "plan", "--block_size=8"], "launch plan", '"--seq_len"'),
        (["launch", "plam"], "launch", '"plan"'),
        (["launch", "supervise", "--max-restart", "3", "--", "x"], "supervise", '"--max_restarts"'),
        (["zerolm", "export", "a", "b", "--precission", "bf16"], "zerolm export", '"--precision"'),
        (["zerolm", "exprot"], "zerolm", '"export"'),
        (["zerolm", "tokenize"], "zerolm", '"data tokenize"'),
        (["zerolm", "data", "divide"], "data", '"split"'),
        (["zerolm", "data", "tokenize", "--workes", "2"], "data tokenize", '"--workers"'),
        (["zerolm", "train", "--num_gpu", "2"], "zerolm train", '"--num_gpus"'),
        (["zerolm", "train", "--total-token=2B"], "zerolm train", '"--total_tokens"'),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistyped_word_is_one_line_with_the_nearest_name(words, start, hint):
    program = importlib.import_module(f"{words[0]}.__main__")
    result = run_here(program.main, *words[1:])
    assert result.returncode == 2 and result.stdout == ""
    heading, *rest = result.stderr.replace(": refused\ncommand line", "", 1).splitlines()
    assert f"{start}: " in heading and f"Did you mean {hint}?" in heading and not rest


def test_a_missing_flag_is_one_line():
    result = run_here(data_prep.__main__.main, "tokenize", "--input", "a", "--output", "b")
    assert result.returncode == 2
    assert result.stderr.splitlines() == [
        "python -m data_prep tokenize: the following arguments are required: --tokenizer. "
        "See python -m data_prep tokenize --help."
    ]


@pytest.mark.parametrize(
    "words",
    ["export {} out", "export {}@3 out", "generate {}", "merge {} out", "verify-checkpoint {}",
     "evaluate {} --hellaswag x", "plot {} --output a.png"],
)  # fmt: skip
def test_a_run_that_is_not_there_is_named_as_the_user_wrote_it(words, tmp_path, capsys):
    run = tmp_path / "nope"
    assert main(words.format(run).split()) == 2
    assert f"{run}: no such directory. " in capsys.readouterr().err
    if "@" not in words:
        run.mkdir()
        assert main(words.format(run).split()) == 2
        assert "MANIFEST" not in capsys.readouterr().err


@pytest.mark.parametrize("words", [["plan"], ["generate", "x"], ["evaluate", "x"]], ids=" ".join)
def test_settings_of_a_run_are_refused_all_at_once_by_every_command(words, capsys):
    wrong = {"seq_len": "0", "eval_tokens": "many", "packing": "tight", "seed": "-1", "top_p": "0"}
    wrong |= {"model_config": "\t", "ema_tokens": "1.5"}
    known = {f"--{name}" for name in wrong} & set(parser_of(words[0])._option_string_actions)
    assert main([*words, *(f"{flag}={wrong[flag[2:]]}" for flag in known)]) == 2
    err = capsys.readouterr().err
    assert len(known) > 1 and all(f"\ncommand line: {flag}: " in err for flag in known)


def test_unknown_flags_are_all_listed(capsys):
    with pytest.raises(SystemExit) as ended:
        parser_of("data", "verify").parse(["s", "--quick", "--sead=1"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.count("no such flag") == 2


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [
        (command_line.count, "15M", 15_000_000),
        (command_line.count, "3e9", 3_000_000_000),
        (command_line.count_from_zero, "0", 0),
        (command_line.number, "0.5", 0.5),
        (command_line.number, "2B", 2e9),
        (command_line.size_bytes, "5GB", 5 * 10**9),
        (command_line.size_bytes, "500mb", 500 * 10**6),
        (command_line.size_bytes, "32GiB", 32 << 30),
        (command_line.size_bytes, "1.5KiB", 1536),
        (command_line.size_bytes, "5e9", 5 * 10**9),
        (command_line.duration, "3h50m", 13_800.0),
        (command_line.duration, "1e3", 1000.0),
    ],
)
def test_numbers_have_one_syntax(read, text, value):
    assert read(text) == value and type(read(text)) is type(value)


@pytest.mark.parametrize(
    ("read", "text"),
    [
        *((command_line.count, text) for text in ("0", "1.5", "-3", "x", "", "nan", "5GB")),
        *((command_line.count_from_zero, text) for text in ("-1", "0.5")),
        *((command_line.number, text) for text in ("0", "-1", "inf")),
        *((command_line.flag_type(parse_real, maximum=1), text) for text in ("1.5", "hot")),
        *((command_line.size_bytes, text) for text in ("0", "1.0001KiB", "5GBB", "GiB", "-5GB")),
        *((command_line.duration, text) for text in ("5x", "m", "h5", "1e3h2")),
    ],
)
def test_what_is_no_number_is_refused(read, text):
    with pytest.raises(argparse.ArgumentTypeError, match=repr(text).replace(".", r"\.")):
        read(text)


# -------------------------------------------------------------------------------------------------
# How a command ends


def program(monkeypatch, run):
    """Return a program with one command."""
    module = types.ModuleType("one_command")
    module.add_flags, module.run = lambda parser: None, run
    monkeypatch.setitem(sys.modules, "one_command", module)
    return Group("", {"go": Command("go", "one_command")})


def raising(error):
    def run(arguments):
        raise error

    return run


def test_ctrl_c_ends_a_command_with_130_and_one_line(monkeypatch, capsys):
    assert run_program(program(monkeypatch, raising(KeyboardInterrupt)), ["go"], "p") == 130
    assert capsys.readouterr().err == "p: interrupted\n"


def test_a_refusal_shows_every_problem_under_the_name_of_the_command(monkeypatch, capsys):
    group = program(monkeypatch, raising(ConfigError(["a: wrong.", "b: wrong."])))
    assert run_program(group, ["go"], "p") == 2
    assert capsys.readouterr().err == "p go: refused\na: wrong.\nb: wrong.\n"


def test_a_bug_keeps_its_traceback(monkeypatch):
    with pytest.raises(ZeroDivisionError):
        run_program(program(monkeypatch, raising(ZeroDivisionError)), ["go"], "p")


def test_the_code_of_a_command_is_the_code_of_the_program(monkeypatch):
    assert run_program(program(monkeypatch, lambda arguments: 75), ["go"], "p") == 75
    assert run_program(program(monkeypatch, lambda arguments: None), ["go"], "p") == 0
    assert run_program(program(monkeypatch, lambda arguments: sys.exit(3)), ["go"], "p") == 3


@pytest.mark.parametrize(
    "words",
    [
        ("zerolm", "train", "--help", "all"),
        ("data_prep", "tokenize", "--help"),
        ("launch", "plan", "--budget", "1e22"),
        ("zerolm.lines", "go"),
    ],
    ids=" ".join,
)
def test_a_closed_output_ends_a_command_without_a_traceback(words, tmp_path):
    """As `| head` does: at the end of a short output, and in the middle of a long one."""
    line = [sys.executable, "-m", *words]
    if words[0] == "zerolm.lines":
        (tmp_path / "lines.py").write_text(
            "def add_flags(parser): pass\ndef run(arguments):\n"
            "    for number in range(100_000): print(number)\n"
        )
        script = (
            "import sys\nfrom zerolm.common.command_line import Command, Group, run_program\n"
            "sys.exit(run_program(Group('', {'go': Command('go', 'lines')}), ['go'], 'p'))"
        )
        line = [sys.executable, "-c", script]
    reader, writer = os.pipe()
    path = os.pathsep.join((str(ROOT), str(tmp_path)))
    process = subprocess.Popen(
        line, cwd=ROOT, env=environment(PYTHONPATH=path, PYTHONUNBUFFERED=""), stdout=writer,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    os.close(writer)
    os.close(reader)
    _, errors = process.communicate(timeout=120)
    assert errors == ""
    if words[-1] == "--help":  # argparse drops the error of a write, if the buffer cannot take it
        assert process.returncode in (0, 141)
    else:
        assert process.returncode == 141


@pytest.mark.parametrize("form", ["{}", "--output={}"])
def test_a_file_whose_name_forges_a_line_of_output_is_refused(tmp_path, capsys, form):
    path = tmp_path / "a\nzerolm: done"
    path.mkdir()
    assert main(["status", form.format(path)]) == 2
    error = capsys.readouterr().err
    assert r"a\nzerolm: done': contains a line break. Rename it." in error
    assert "\nzerolm: done" not in error
