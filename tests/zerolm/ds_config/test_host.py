"""The profiles for GPU kernels and NVMe disks: what they resolve to, and what is refused."""

import json

import pytest

from tests import ROOT
from zerolm.ds_config import host
from zerolm.ds_config.profile import Profile
from zerolm.ds_config.resolve import resolve_profile
from zerolm.ds_config.rules import rule_notices, rule_problems
from zerolm.engine import operators
from zerolm.parts.parse import parse_settings

PROFILES = ROOT / "ds_configs"


def resolved(profile, settings):
    sizes = {
        "hidden_size": 64,
        "micro_batch_size": 2,
        "accumulation": 4,
        "replicas": 8,
        "warmup_steps": 1,
        "total_steps": 1,
    }
    return resolve_profile(profile, settings, **sizes).json


def problems_of(profile, on_gpu=True):
    return profile.problems + rule_problems(profile, on_gpu=on_gpu, world_size=8)


def test_zeropp_resolves_for_gpus_with_a_notice_about_its_loss_curve():
    profile = Profile.read(PROFILES / "zeropp.json")
    assert problems_of(profile) == []
    assert '"auto"' not in json.dumps(resolved(profile, parse_settings([])[0]))
    (notice,) = [
        line
        for line in rule_notices(profile, on_gpu=True, world_size=8)
        if "changes the loss curve" in line
    ]
    assert "zero_quantized_weights" in notice and "zero_quantized_gradients" in notice
    on_cpu = "\n".join(problems_of(profile, on_gpu=False))
    assert on_cpu.count("needs a GPU. Remove the key.") == 2
    (problem,) = rule_problems(profile, on_gpu=True, world_size=12)
    assert "must divide the world size 12" in problem


def test_the_resolved_profile_has_the_users_nvme_path(tmp_path):
    profile = Profile.read(PROFILES / "zero3_nvme.json")
    settings, problems = parse_settings(["--nvme_path", str(tmp_path / "disk")])
    found = host.with_nvme_path(profile, settings, problems)
    assert problems == [] and problems_of(found) == []
    zero = resolved(found, settings)["zero_optimization"]
    for what in ("offload_optimizer", "offload_param"):
        assert zero[what]["nvme_path"] == str(tmp_path / "disk")
        assert profile.zero[what]["nvme_path"] == "auto", "the profile is unchanged"


@pytest.mark.parametrize(
    ("profile", "words", "complaints"),
    [
        ("zero3_nvme", [], ['offload_optimizer.nvme_path: "auto"', "offload_param", "--nvme_path"]),
        ("zero2", ["--nvme_path", "/disk"], ["offloads nothing to NVMe", "zero3_nvme.json"]),
    ],
)
def test_a_missing_or_unused_path_is_refused(profile, words, complaints):
    settings, problems = parse_settings(words)
    host.with_nvme_path(Profile.read(PROFILES / f"{profile}.json"), settings, problems)
    for complaint in complaints:
        assert complaint in "\n".join(problems)


def test_a_contradicting_path_and_a_host_without_libaio_are_refused(tmp_path, monkeypatch):
    settings, problems = parse_settings(["--nvme_path", "/disk"])
    config = {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}
    config["zero_optimization"]["offload_param"]["nvme_path"] = "/other"
    host.with_nvme_path(Profile.parse(config), settings, problems)
    assert '/other" contradicts command line: --nvme_path /disk' in "\n".join(problems)
    (tmp_path / "file").write_text("")
    config["zero_optimization"]["offload_param"]["nvme_path"] = str(tmp_path / "file")
    monkeypatch.setattr(operators, "has_asynchronous_io", lambda: False)
    not_there, no_library = host.nvme_problems(Profile.parse(config))
    assert "is not a directory" in not_there
    assert "libaio" in no_library and "zero3_offload.json" in no_library
