"""Weight files that are missing, damaged or of another kind are refused with their names."""

import json
import os

import pytest
import torch

from tests.zerolm.pretrained.small_models import change_tensors, save_model
from zerolm.common.errors import ConfigError
from zerolm.pretrained.safetensors_files import INDEX, SafetensorsFiles

FIRST = "model-00001-of-0000{}.safetensors"


@pytest.fixture
def sharded(tmp_path):
    save_model(tmp_path, size="12KB")
    return tmp_path, sorted(tmp_path.glob("*.safetensors"))


def refusal(directory) -> str:
    with pytest.raises(ConfigError) as refused:
        SafetensorsFiles(directory)
    return str(refused.value)


@pytest.mark.parametrize("cut", [4, 100, -8])
def test_a_truncated_file_is_named(sharded, cut) -> None:
    directory, files = sharded
    os.truncate(files[2], cut if cut > 0 else files[2].stat().st_size + cut)
    assert f"{files[2]}: damaged or truncated" in refusal(directory)


def test_a_missing_file_is_named(sharded) -> None:
    directory, files = sharded
    files[1].unlink()
    assert f"{files[1].name}: no such file" in refusal(directory)


def test_an_index_that_differs_from_the_files_is_refused(sharded) -> None:
    directory, files = sharded
    index = json.loads((directory / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = files[0].name
    (directory / INDEX).write_text(json.dumps(index))
    assert "lists model.norm.weight in" in refusal(directory)


def test_an_index_cannot_leave_the_directory(sharded) -> None:
    directory, _ = sharded
    index = {"weight_map": {"model.norm.weight": "../other/model.safetensors"}}
    (directory / INDEX).write_text(json.dumps(index))
    assert "is not the name of a safetensors file" in refusal(directory)


def test_a_tensor_in_two_files_is_refused(sharded) -> None:
    directory, files = sharded
    files[1].write_bytes(files[0].read_bytes())
    assert f"also in {files[0]}" in refusal(directory)


def test_pickles_adapters_and_empty_directories_are_refused_with_the_fix(tmp_path) -> None:
    assert "contains neither model.safetensors nor" in refusal(tmp_path)
    torch.save({}, tmp_path / "pytorch_model.bin")
    assert "pickles (pytorch_model.bin)" in refusal(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "contains an adapter" in refusal(tmp_path)


@pytest.mark.parametrize("complete_bytes", [1 << 26, 0])
def test_the_digest_depends_on_values(tmp_path, monkeypatch, complete_bytes) -> None:
    monkeypatch.setattr("zerolm.pretrained.safetensors_files.COMPLETE_BYTES", complete_bytes)
    save_model(tmp_path)
    digest = SafetensorsFiles(tmp_path).digest()
    assert SafetensorsFiles(tmp_path).digest() == digest
    weight = SafetensorsFiles(tmp_path)["model.norm.weight"].clone()
    weight[5] += 1
    change_tensors(tmp_path, **{"model.norm.weight": weight})
    assert SafetensorsFiles(tmp_path).digest() != digest
