"""`gguf` calls a converter of llama.cpp's kind with the name of the tokenizer's split."""

import json
import subprocess
import sys

import pytest

from data_prep.tokenizer.bpe import BpeOptions, train_bpe
from data_prep.tokenizer.llama_cpp import convert, pre_tokenizer
from tests import ROOT
from zerolm.common.errors import ConfigError

BASE = """
class TextModel:
    def get_vocab_base_pre(self, tokenizer):
        raise NotImplementedError("BPE pre-tokenizer was not recognized")
"""
SCRIPT = """
import json, sys
{source}
def main():
    print(json.dumps([TextModel().get_vocab_base_pre(None), *sys.argv[1:]]))
if __name__ == "__main__":
    main()
"""
SPLITS = [
    ({"split": "gpt2"}, "gpt-2"),
    ({"split": "llama3"}, "llama-bpe"),
    ({"split": "llama3", "digits": "1"}, "qwen2"),
    ({"split": "o200k"}, "gpt-4o"),
]


@pytest.mark.parametrize(("options", "name"), SPLITS)
def test_each_split_has_the_name_of_llama_cpp(options, name, tmp_path):
    train_bpe(["some text"] * 9, BpeOptions(260, **options), tmp_path, progress=False)
    assert pre_tokenizer(tmp_path) == name


@pytest.mark.parametrize("options", [{"digits": "1"}, {"whitespace": "single"}])
def test_a_split_that_llama_cpp_has_not_is_refused(options, tmp_path):
    train_bpe(["some text"] * 9, BpeOptions(260, **options), tmp_path, progress=False)
    with pytest.raises(
        ConfigError, match=r"tokenizer.json: pre_tokenizer: .* has no code for this split"
    ):
        pre_tokenizer(tmp_path)


@pytest.mark.parametrize("layout", ["package", "script"])
def test_the_converter_runs_with_the_name(layout, tmp_path):
    train_bpe(["some text"] * 9, BpeOptions(260, split="llama3"), tmp_path / "m", progress=False)
    source = BASE
    if layout == "package":
        (tmp_path / "conversion").mkdir()
        (tmp_path / "conversion" / "__init__.py").touch()
        (tmp_path / "conversion" / "base.py").write_text(BASE)
        source = "from conversion.base import TextModel"
    converter = tmp_path / "convert_hf_to_gguf.py"
    converter.write_text(SCRIPT.format(source=source))
    command = [sys.executable, "-m", "data_prep", "gguf", converter, tmp_path / "m"]
    command += ["--", "--outtype", "f32"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ["llama-bpe", str(tmp_path / "m"), "--outtype", "f32"]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("class Other: pass\ndef main(): pass", "other.py: has no class TextModel, so it is not"),
        ("class TextModel: pass", "other.py: has no class TextModel, so it is not"),
        ("import no_such_package.part", "other.py: needs the package no_such_package"),
        ("class TextModel: pass\ndef main(): import absent", "other.py: needs the package absent"),
    ],
)
def test_another_script_is_refused_in_one_line(source, expected, tmp_path, monkeypatch):
    train_bpe(["some text"] * 9, BpeOptions(260, split="llama3"), tmp_path, progress=False)
    (tmp_path / "other.py").write_text(source)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(ConfigError) as refused:
        convert(tmp_path / "other.py", tmp_path, [])
    assert expected in str(refused.value) and len(refused.value.problems) == 1
