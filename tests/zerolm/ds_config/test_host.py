"""The profiles for GPU kernels and for disks: what they resolve to, and what is refused."""

import json
from pathlib import Path

import pytest

from zerolm import nvme
from zerolm.ds_config import load_ds_config
from zerolm.ds_resolve import resolve
from zerolm.ds_rules import rule_notices, rule_problems
from zerolm.ds_schema import schema_problems
from zerolm.flags import parse_settings

PROFILES = Path(__file__).parent.parent.parent / "ds_configs"


def resolved(config, settings):
    sizes = {"hidden_size": 64, "micro_batch_size": 2, "accumulation": 4, "replicas": 8}
    return resolve(config, settings, **sizes, on_gpu=True)


def problems_of(config, on_gpu=True):
    found = schema_problems(config, "ds.json")
    return found + rule_problems(config, "ds.json", on_gpu=on_gpu, world_size=8)


def test_zeropp_resolves_for_gpus_and_says_that_its_curve_is_another():
    config = load_ds_config(PROFILES / "zeropp.json")
    assert problems_of(config) == []
    assert '"auto"' not in json.dumps(resolved(config, parse_settings([])[0]))
    (notice,) = [
        line
        for line in rule_notices(config, "ds.json", on_gpu=True, world_size=8)
        if "another curve" in line
    ]
    assert "zero_quantized_weights" in notice and "zero_quantized_gradients" in notice
    on_cpu = "\n".join(problems_of(config, on_gpu=False))
    assert on_cpu.count("needs a GPU. Remove the key.") == 2
    (problem,) = rule_problems(config, "ds.json", on_gpu=True, world_size=12)
    assert "must divide the world size 12" in problem


def test_nvme_path_is_the_users_and_stands_in_what_is_resolved(tmp_path):
    config = load_ds_config(PROFILES / "zero3_nvme.json")
    settings, problems = parse_settings(["--nvme_path", str(tmp_path / "disk")])
    found = nvme.with_path(config, settings, "ds.json", problems)
    assert problems == [] and problems_of(found) == []
    zero = resolved(found, settings)["zero_optimization"]
    for what in ("offload_optimizer", "offload_param"):
        assert zero[what]["nvme_path"] == str(tmp_path / "disk")
        assert config["zero_optimization"][what]["nvme_path"] == "auto", "the profile is unchanged"


@pytest.mark.parametrize(
    ("profile", "words", "complaints"),
    [
        ("zero3_nvme", [], ["offload_optimizer.nvme_path: auto", "offload_param", "--nvme_path"]),
        ("zero2", ["--nvme_path", "/disk"], ["offloads nothing to NVMe", "zero3_nvme.json"]),
    ],
)
def test_a_path_that_is_missing_or_not_used_is_refused(profile, words, complaints):
    settings, problems = parse_settings(words)
    nvme.with_path(load_ds_config(PROFILES / f"{profile}.json"), settings, "ds.json", problems)
    for complaint in complaints:
        assert complaint in "\n".join(problems)


def test_a_path_that_contradicts_the_flag_and_a_host_without_libaio_are_refused(
    tmp_path, monkeypatch
):
    settings, problems = parse_settings(["--nvme_path", "/disk"])
    config = {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}
    config["zero_optimization"]["offload_param"]["nvme_path"] = "/other"
    nvme.with_path(config, settings, "ds.json", problems)
    assert "/other, contradicts command line: --nvme_path /disk" in "\n".join(problems)
    (tmp_path / "file").write_text("")
    config["zero_optimization"]["offload_param"]["nvme_path"] = str(tmp_path / "file")
    monkeypatch.setattr(nvme, "has_asynchronous_io", lambda: False)
    not_there, no_library = nvme.host_problems(config, "ds.json")
    assert "is not a directory" in not_there
    assert "libaio" in no_library and "zero3_offload.json" in no_library
