"""An option, declared once, as a key of a recipe and as a flag."""

import json
from argparse import ArgumentParser
from dataclasses import dataclass

import pytest

from data_prep.dedup.dedup import band_layout
from data_prep.dedup.options import DedupOptions
from data_prep.stages.options import (
    SWITCH,
    add_option_flags,
    option,
    options_of_flags,
    parse_options,
    share,
)
from zerolm.common.errors import ConfigError


@dataclass(frozen=True)
class Options:
    words: int = option(help="words of a piece", low=1, high=1000)
    most: float = share(0.5, "largest share")
    above: float = option(0.8, "lowest similarity", above=0, high=1)
    held_out: float = option(0.0, low=0, below=1)
    kind: str = option("text", "what is compared", choices=("text", "words", "lines"))
    memory_bytes: int = option(1 << 30, "memory", flag="memory", low=1 << 20)
    near: bool = option(True, "near ones too", SWITCH)
    code: bool = option(False, "read as code")
    names: tuple[str, ...] = option((), "names", "NAME")

    def problems(self):
        if self.names and not self.near:
            yield "names", "needs near."


def of_flags(*argv):
    parser = ArgumentParser()
    add_option_flags(parser, Options)
    return options_of_flags(Options, parser.parse_args(argv))


def test_flags_and_keys_give_the_same_options():
    flags = ["--words", "1e2", "--memory", "2GiB", "--near", "off", "--code", "--kind", "lines"]
    given = {"words": "1e2", "memory_bytes": "2GiB", "near": False, "code": True, "kind": "lines"}
    assert of_flags(*flags) == (parse_options(Options, given, "r"), [])
    options, problems = of_flags("--words", "5", "--names", "a", "b", "--names", "c")
    assert options == Options(5, names=("a", "b", "c")) and problems == []


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("words", "0", "a whole number from 1 to 1,000"),
        ("words", "1.5", "a whole number from 1 to 1,000"),
        ("most", "nan", "a number from 0 to 1"),
        ("above", "0", "a number above 0 and at most 1"),
        ("held_out", "1", "a number of at least 0 and below 1"),
        ("kind", "bytes", "text, words or lines"),
        ("memory_bytes", "9", "a whole number from 1,048,576 up"),
    ],
)
def test_a_wrong_value_is_refused_with_the_same_rule(key, value, rule):
    with pytest.raises(ConfigError) as caught:
        parse_options(Options, {"words": 5, key: value}, "r.json: dedup")
    assert caught.value.problems == [f"r.json: dedup.{key}: {value!r} is not {rule}."]
    if key != "held_out":  # without a help it is no flag
        flag = "memory" if key == "memory_bytes" else key
        words = () if key == "words" else ("--words", "5")
        assert of_flags(f"--{flag}", value, *words)[1] == [f"--{flag} {value}: is not {rule}."]


def test_all_problems_are_found_at_once():
    given = {"wrds": 1, "most": 2, "near": False, "names": ["a"], "code": "yes"}
    with pytest.raises(ConfigError) as caught:
        parse_options(Options, given, "r")
    unknown, most, code, missing = caught.value.problems
    assert 'wrds: is not an option. Did you mean "words"?' in unknown and "r.words" in missing
    assert "r.most: 2" in most and code == "r.code: 'yes' is not true or false."
    problems = of_flags("--words", "0", "--near", "off", "--names", "a")[1]
    assert problems == ["--words 0: is not a whole number from 1 to 1,000.", "--names: needs near."]


def test_the_help_has_the_defaults():
    parser = ArgumentParser()
    add_option_flags(parser, Options)
    shown = " ".join(parser.format_help().split())
    for piece in ("(default: 0.5)", "(default: 1GiB)", "near ones too (default: on)"):
        assert piece in shown
    assert "--held_out" not in shown and "--code read as code" in shown


def test_integers_may_be_written_as_1e9():
    options = parse_options(
        DedupOptions, {"memory_bytes": 1e9, "permutations": 64.0, "shingle_words": 5.0}, "r"
    )
    assert [type(value) for value in (options.memory_bytes, options.permutations)] == [int, int]
    assert band_layout(options) is not None


def test_numbers_may_be_written_as_in_flags():
    given = {"memory_bytes": "2GiB", "shingle_words": "1e1", "permutations": "0.5k"}
    options = parse_options(DedupOptions, {**given, "threshold": "0.5"}, "r")
    assert options.memory_bytes == 2 << 30 and options.threshold == 0.5
    assert (options.shingle_words, options.permutations) == (10, 500)
    with pytest.raises(ConfigError, match=r"r\.memory_bytes: '2XB' is not a whole number"):
        parse_options(DedupOptions, {"memory_bytes": "2XB"}, "r")


@pytest.mark.parametrize("number", ["NaN", "1e999", "-Infinity", "1e30", "true", "1.5"])
@pytest.mark.parametrize("key", ["memory_bytes", "shingle_words", "permutations"])
def test_invalid_numbers_are_refused(number, key):
    with pytest.raises(ConfigError, match=f"r.{key}: .* is not a whole number"):
        parse_options(DedupOptions, {key: json.loads(number)}, "r")
