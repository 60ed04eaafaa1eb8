"""Copies in memory: their size in the plan, and refusals where a host has no room for them."""

from dataclasses import replace

import pytest

from tests.launching import LLAMA, write_json
from tests.zerolm.preflight.preflight_inputs import PROFILES, command, refusal, write_inputs
from zerolm.checkpoint import memory
from zerolm.common import machine
from zerolm.common.values import shown_bytes
from zerolm.features import memory_copies
from zerolm.preflight import check

FLAG = "--memory_checkpoint_interval 5"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def num_parameters() -> int:
    hidden, heads = LLAMA["hidden_size"], LLAMA["num_attention_heads"]
    width = hidden + hidden * LLAMA["num_key_value_heads"] // heads
    block = 2 * hidden * width + 3 * hidden * LLAMA["intermediate_size"] + 2 * hidden
    return 2 * LLAMA["vocab_size"] * hidden + LLAMA["num_hidden_layers"] * block + hidden


@pytest.mark.parametrize(("profile", "shared"), [("zero2", 2), ("zero3", 0)])
def test_the_plan_has_the_bytes_of_both_copies(base, profile, shared) -> None:
    ds = f"--deepspeed_config {PROFILES / profile}.json"
    plan = check.check(command(base, f"{FLAG} {ds} --check --world_size 8 --hardware H100"), {})
    values = num_parameters()
    line = f"every 5 steps, /dev/shm: 2 x {shown_bytes(12 * values // 8)} per rank"
    line += f" and 2 x {shown_bytes(shared * values)} per host" if shared else ""
    assert plan.derived["copies in memory"] == line
    assert "copies in memory" not in check.check(command(base), {}).derived


def test_a_host_has_the_weights_of_its_pipeline_stages(base, tmp_path, monkeypatch) -> None:
    """The last stage is the larger one, by a norm; four ranks of a host have both stages."""
    config = {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}}
    config["data_types"] = {"grad_accum_dtype": "fp32"}
    path = write_json(tmp_path / "ds.json", {**config, "pipeline": {"stages": 2}})
    flags = f"{FLAG} --deepspeed_config {path} --check --world_size 4 --hardware H100"
    plan = check.check(command(base, flags), {})
    values = (num_parameters() + LLAMA["hidden_size"]) // 2
    line = f"every 5 steps, /dev/shm: 2 x {shown_bytes(12 * values // 2)} per rank"
    line += f" and 2 x {shown_bytes(2 * values)} per stage on a host"
    assert plan.derived["copies in memory"] == line
    monkeypatch.setattr(memory_copies, "free_memory", lambda: 1)
    for ranks, stages in ((2, 1), (4, 2)):
        *_, problem = memory_copies.MemoryCopies.host_problems(
            replace(plan, device="cpu"), {"LOCAL_SIZE": str(ranks)}
        )
        needed = 2 * (ranks * 12 * values // 2 + stages * 2 * values)
        assert f"2 copies of {ranks} rank(s) need {shown_bytes(needed)}" in problem


def test_a_host_without_room_is_refused_with_both_sizes(base, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(memory_copies, "free_memory", lambda: 1 << 20)
    free = machine.free_bytes
    monkeypatch.setattr(
        machine, "free_bytes", lambda path: 65536 if path == memory.SHARED_MEMORY else free(path)
    )
    (tmp, host) = refusal(base, FLAG)
    needed = shown_bytes(2 * 14 * num_parameters())
    for line, place in ((tmp, "/dev/shm has 64 KiB free"), (host, "memory of this host has 1 MiB")):
        assert f"5: 2 copies of 1 rank(s) need {needed}, but {place}" in line, line


def test_the_limit_of_a_container_counts(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(memory_copies, "CGROUP", tmp_path)
    unlimited = memory_copies.free_memory()
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("400000\n")
    assert unlimited is not None and unlimited > memory_copies.free_memory() == 600_000


def test_states_on_nvme_are_refused(base) -> None:
    plan = check.check(command(base, FLAG), {})

    on_disk = replace(plan, ds=replace(plan.ds, optimizer_offload="nvme"))
    [line] = memory_copies.MemoryCopies.host_problems(on_disk, {})
    assert "states on NVMe cannot be copied to memory" in line
