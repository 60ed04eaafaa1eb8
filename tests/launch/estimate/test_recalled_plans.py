"""`zerolm plan` with what an earlier command has found: the same text, without the libraries."""

import subprocess
import sys

import pytest

from tests import ROOT
from zerolm.common.remembered import VARIABLE

SEARCH = ["--devices", "16", "--search"]
COMMANDS = {
    "dense": ["--model_config", "model_configs/llama-160m.json"],
    "mixture": ["--model_config", "model_configs/moe-1.6b.json", "--devices", "8"],
    "others": ["--model_config", "model_configs/gpt2.json", "--compile", "--json"],
    "search": ["--model_config", "model_configs/tiny.json", *SEARCH],
    "refused": ["--model_config", "model_configs/tiny.json", "--seq_len", "1000000"],
}
PROGRAM = """import sys
from launch.__main__ import main
code = main(["plan", *sys.argv[1:]])
print(sorted({"torch", "transformers", "deepspeed"} & sys.modules.keys()), code)
"""


def plan(words, cache, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(cache))
    command = [sys.executable, "-c", PROGRAM, *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    *lines, libraries = done.stdout.splitlines()
    return [lines, done.stderr], libraries


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_a_recalled_plan_is_the_same_and_imports_none_of_the_libraries(
    words, tmp_path, monkeypatch
):
    plain, _ = plan(words, "off", monkeypatch)
    first, libraries = plan(words, tmp_path / "cache", monkeypatch)
    again, none = plan(words, tmp_path / "cache", monkeypatch)
    assert plain == first == again and (plain[0] or plain[1])
    assert "torch" in libraries and none.startswith("[] ")
