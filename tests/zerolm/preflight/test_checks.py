"""The checks in order: what each needs, what a host can do without a rank, and what is printed."""

import json
from inspect import signature
from pathlib import Path

import pytest
import torch

from tests.zerolm.preflight.preflight_inputs import command
from zerolm import features
from zerolm.common.errors import ConfigError, Findings
from zerolm.distributed import device
from zerolm.preflight import check, checks

RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE")
GOLDEN = json.loads(Path(__file__).with_name("golden_problems.json").read_text())


@pytest.mark.parametrize("number", range(len(GOLDEN)))
def test_everything_is_printed_in_the_same_order_as_ever(inputs, number, monkeypatch):
    """Problems of files come between those that only a rank can find."""
    monkeypatch.setattr(device, "bf16_ratio", lambda where: 0.5)
    golden = GOLDEN[number]
    try:
        lines = check.check(command(inputs, golden["change"]), golden["environment"]).notices
    except ConfigError as error:
        lines = error.problems
    expected = golden.get("problems") or golden["notices"]
    assert [line.replace(str(inputs), "INPUTS") for line in lines] == expected


def test_what_a_host_reads_needs_no_rank_no_device_and_no_process_group(inputs, monkeypatch):
    from deepspeed.accelerator import get_accelerator

    def forbidden(*_: object, **__: object) -> bool:
        raise AssertionError("a host has no rank, device or process group")

    class OfHost(dict):
        def __contains__(self, name: object) -> bool:
            return forbidden() if name in RANK else super().__contains__(name)

        def get(self, name: object, default: object = None) -> object:
            return forbidden() if name in RANK else super().get(name, default)

    for module, names in (
        (get_accelerator(), "device_count total_memory set_device is_bf16_supported is_available"),
        (torch.cuda, "init is_available device_count get_device_properties set_device"),
        (torch.distributed, "init_process_group TCPStore is_initialized"),
        (device, "local_device this_cpu"),
        (check.hosts, "detect local_device"),
    ):
        for name in names.split():
            monkeypatch.setattr(module, name, forbidden)
    words = command(inputs, "--val_data val --document_mask --deepspeed_config ds_trackers.json")
    given = check.of_host(words, OfHost())
    assert given.inputs.model is not None and given.inputs.all_sources
    assert not [*given.found.problems, *given.inputs.in_configs.problems]
    with pytest.raises(AssertionError, match="a host has no rank"):
        check.of_rank(given, {})


def test_what_a_host_has_read_is_the_same_for_each_of_its_ranks(inputs):
    given = check.of_host(command(inputs, "--model_config dropout.json --val_data val"), {})
    ranks = [
        check.of_rank(given, {"WORLD_SIZE": "2", "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(2)
    ]
    alone = check.check(command(inputs, "--model_config dropout.json --val_data val"),
                        {"WORLD_SIZE": "2"})  # fmt: skip
    assert {plan.fingerprint() for plan in ranks} == {alone.fingerprint()}
    assert ranks[0].notices == ranks[1].notices == alone.notices


def test_each_check_needs_what_is_known_by_that_name():
    of_model = {*features.Case._fields, "case", "model", "precision", "sources", "found"}
    of_model |= {"world_size"}
    of_plan = {"plan", "profile", "environment", "found"}
    for listed, known in ((checks.OF_MODEL, of_model), (checks.OF_PLAN, of_plan)):
        for kind, each in listed:
            assert kind in ("problems", "notices") and signature(each).parameters.keys() <= known


def test_a_check_is_left_out_if_what_it_needs_is_unknown():
    found = Findings()
    listed = (
        ("problems", lambda model: [f"model {model}"]),
        ("notices", lambda device, model=None: [f"{device} with {model}"]),
        ("problems", lambda device, found: [f"{device} after {len(found.notices)}"]),
    )
    checks.run(listed, found, model=None, device="cpu")
    assert (found.problems, found.notices) == (["cpu after 1"], ["cpu with None"])
