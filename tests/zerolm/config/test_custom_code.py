"""Code that comes with a tokenizer or a model is neither executed nor offered for execution."""

import json
import shutil

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from data_prep.tokenizer.load import load_tokenizer
from tests import malicious
from tests.launching import LLAMA
from tests.texts import write_tokenizer
from zerolm.common.errors import ConfigError
from zerolm.config.custom_code import kernel_problems, tokenizer_problem
from zerolm.data.window_text import load_decoder
from zerolm.evaluate.exported_model import evaluate_export
from zerolm.evaluate.text_coder import TextCoder
from zerolm.model.architecture import meta_model
from zerolm.model.config_file import load_model_config
from zerolm.parts.settings import RunSettings


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer") / "t")


@pytest.fixture(scope="module")
def exported(tmp_path_factory, tokenizer):
    directory = tmp_path_factory.mktemp("exported") / "model"
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**LLAMA))
    model.save_pretrained(directory)
    return shutil.copytree(tokenizer, directory, dirs_exist_ok=True)


@pytest.fixture
def mark(tmp_path, monkeypatch):
    """A file that the code would create. Someone answers every question with yes."""
    asked = []
    monkeypatch.setattr("builtins.input", lambda question="": asked.append(question) or "y")
    yield tmp_path / "mark"
    assert not asked, "it asks whether to execute code"
    assert not (tmp_path / "mark").exists(), "it has executed code"


@pytest.mark.parametrize("load", [load_tokenizer, TextCoder])
def test_the_code_of_a_tokenizer_is_refused_and_named(load, tokenizer, tmp_path, mark):
    directory = shutil.copytree(tokenizer, tmp_path / "t")
    malicious.add_code(directory, mark)
    refusal = r"tokenizer_config\.json: auto_map: refers to the tokenizer's Python code"
    with pytest.raises(ConfigError, match=refusal):
        load(str(directory) if load is load_tokenizer else directory)


def test_ids_are_decoded_without_the_code_of_a_tokenizer(tokenizer, tmp_path, mark):
    directory = shutil.copytree(tokenizer, tmp_path / "t")
    malicious.add_code(directory, mark)
    assert load_decoder(directory)(TextCoder(tokenizer).encode("as before")) == "as before"
    (directory / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match="auto_map"):
        load_decoder(directory)


@pytest.mark.parametrize("code", [["a.B", None], {"AutoTokenizer": ["a.B", "a.C"]}])
def test_both_formats_of_a_reference_to_code_are_known(code, tmp_path):
    malicious.change(tmp_path / "tokenizer_config.json", {"auto_map": code})
    assert "a.B" in tokenizer_problem(tmp_path)


def test_a_tokenizer_may_be_beside_a_model_with_code(tokenizer, tmp_path, mark):
    directory = shutil.copytree(tokenizer, tmp_path / "t")
    malicious.model_config(tmp_path / "model", mark, "custom")
    shutil.copy(tmp_path / "model" / "config.json", directory)
    assert load_tokenizer(str(directory)).fingerprint == load_tokenizer(str(tokenizer)).fingerprint


def test_the_code_of_an_exported_model_is_refused_and_named(exported, tmp_path, mark):
    directory = shutil.copytree(exported, tmp_path / "m")
    malicious.add_code(directory, mark, "llama")
    with pytest.raises(ConfigError) as caught:
        evaluate_export(directory, RunSettings(hellaswag="items.jsonl"))
    assert [line.split(": ")[1] for line in caught.value.problems] == ["auto_map", "auto_map"]


@pytest.mark.parametrize(
    ("file", "values", "named"),
    [
        ("config.json", {"attn_implementation": "org/kernel"}, "attn_implementation"),
        ("config.json", {"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config"),
        ("adapter_config.json", {"peft_type": "LORA"}, "adapter"),
    ],
)
def test_an_exported_model_that_needs_other_code_is_refused(
    file, values, named, exported, tmp_path
):
    directory = shutil.copytree(exported, tmp_path / "m")
    malicious.change(directory / file, values)
    with pytest.raises(ConfigError, match=named):
        evaluate_export(directory, RunSettings(hellaswag="items.jsonl"))


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"attn_implementation": "org/kernel"}, "attn_implementation"),
        ({"_attn_implementation": "kernels-community/flash-attn2@v1:f"}, "_attn_implementation"),
        ({"attn_implementation": {"": "sdpa", "text_config": "org/k"}}, "attn_implementation"),
        ({"attn_implementation": "paged|org/kernel"}, "attn_implementation"),
        ({"experts_implementation": "sonicmoe"}, "experts_implementation"),
        ({"_experts_implementation": "deepgemm"}, "_experts_implementation"),
        (
            {"parts": [{"text_config": {"attn_implementation": "o/k"}}]},
            "parts.0.text_config.attn_implementation",
        ),
    ],
)
def test_a_config_cannot_name_a_kernel_to_download(values, named, tmp_path):
    file = tmp_path / "config.json"
    assert [line.split(": ")[1] for line in kernel_problems(file, values)] == [named]
    file.write_text(json.dumps({**LLAMA, **values}))
    with pytest.raises(ConfigError, match=f"config.json: {named}: .*would be downloaded"):
        load_model_config(file)


@pytest.mark.parametrize("name", ["eager", "sdpa", "flash_attention_2"])
def test_an_attention_implementation_of_transformers_is_no_obstacle(name, tmp_path):
    malicious.change(tmp_path / "config.json", {**LLAMA, "_attn_implementation": name})
    assert meta_model(load_model_config(tmp_path)).config.model_type == "llama"
