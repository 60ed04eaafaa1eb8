"""The comparison of logits by family has the answers that are recorded."""

import re

import pytest

from tests import ROOT
from tests.launching import run_module

RECORDED = ROOT / "benchmarks" / "results" / "same_logits.md"
SAMPLE = ("bart", "gpt_oss", "llama", "musicgen", "nemotron", "phimoe", "xlm")


def exceptions(page: str) -> dict[tuple[str, str], set[str]]:
    """Return the families of the sample in each row of a page's second table that has any."""
    found = {}
    for row in re.finditer(
        r"^\| (equal|refused|said) \| ([^|]+) \| ([^|]+) \|$", page, re.MULTILINE
    ):
        if names := set(re.findall("`([^`]+)`", row[3])) & {*SAMPLE}:
            found[row[1], row[2]] = names
    return found


@pytest.mark.soak
def test_families_have_the_recorded_answers(tmp_path):
    page = tmp_path / "page.md"
    argv = ["--state", tmp_path / "state.jsonl", "--output", page, "--only", ",".join(SAMPLE)]
    done = run_module("tests.model_families.same_logits", *argv, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    assert exceptions(page.read_text()) == exceptions(RECORDED.read_text()) != {}
