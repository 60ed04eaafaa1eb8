"""Resuming a run with changed settings: which are allowed, refused, or need --accept_changes."""

import json
from types import SimpleNamespace

import pytest

from tests.launching import LLAMA, write_json
from tests.manifests import WRITTEN
from tests.zerolm.preflight.preflight_inputs import PROFILES, command, refusal, write_record
from zerolm.checkpoint import directory
from zerolm.checkpoint.manifest import FORMAT, VERSION, Progress
from zerolm.common import machine
from zerolm.common.errors import Findings
from zerolm.distributed import device
from zerolm.ds_config import topology
from zerolm.optim.schedule import SCHEDULES
from zerolm.plan import memory
from zerolm.preflight import check, existing_run, run_record
from zerolm.upload import uploader


def test_with_a_router_loss_micro_batch_and_world_size_cannot_change(inputs, tmp_path):
    change = f"--run_dir {tmp_path} --model_config mixtral.json --micro_batch_size 2"
    write_record(tmp_path, check.check(command(inputs, change), {}))
    check.check(command(inputs, change), {})
    other = change.replace("size 2", "size 4")
    (problem,) = refusal(inputs, other)
    assert "settings.micro_batch_size: 2 -> 4" in problem
    (problem,) = refusal(inputs, change, WORLD_SIZE="2")
    assert "world_size: 1 -> 2 (output_router_logits)" in problem


def test_with_the_router_loss_of_the_global_batch_they_can_change(inputs, tmp_path):
    change = f"--run_dir {tmp_path} --model_config mixtral.json --global_router_loss"
    plan = check.check(command(inputs, f"{change} --micro_batch_size 2"), {})
    assert not any("output_router_logits" in notice for notice in plan.notices)
    write_record(tmp_path, plan)
    check.check(command(inputs, f"{change} --micro_batch_size 4"), {"WORLD_SIZE": "2"})
    (problem,) = refusal(inputs, change.replace("--global_router_loss", "--micro_batch_size 2"))
    assert "settings.global_router_loss: true -> false" in problem


def test_disk_too_small_for_one_checkpoint_is_refused_and_for_all_reported(inputs, tmp_path):
    keep = check.check(command(inputs, "--checkpoint_keep 1000000000"), {})
    assert any("its file system has" in notice for notice in keep.notices)
    assert keep.derived["checkpoint size"]
    huge = {**LLAMA, "hidden_size": 1 << 20, "intermediate_size": 1 << 24}
    model = write_json(tmp_path / "huge.json", huge)
    (problem,) = refusal(inputs, f"--model_config {model}")
    assert "a checkpoint needs about" in problem and "TiB" in problem and "--run_dir" in problem


def test_a_branch_on_another_file_system_needs_room_for_its_copy(inputs, a_run, monkeypatch):
    plan = check.check(command(inputs), {})
    trunk = SimpleNamespace(directory=a_run, size_bytes=1)
    size = memory.checkpoint_bytes(plan.model.shapes, plan.ds)
    monkeypatch.setattr(existing_run, "checkpoint_room", lambda *_: (size, 0))
    for copied, refused in ((False, 0), (True, 1)):
        monkeypatch.setattr(machine, "same_file_system", lambda *_, same=not copied: same)
        found = Findings([])
        existing_run._check_disk(plan, found, trunk)
        assert len(found.problems) == refused


def test_what_takes_the_place_of_a_file_of_the_run_is_refused(inputs, tmp_path):
    for name in ("metrics.jsonl", "report.html"):
        (tmp_path / name).mkdir()
    (tmp_path / "ranks").write_text("x")
    problems = refusal(inputs, f"--run_dir {tmp_path}")
    assert [problem.partition(": ")[0] for problem in problems] == [
        str(tmp_path / name) for name in ("metrics.jsonl", "report.html", "ranks")
    ]


@pytest.fixture
def a_run(inputs, tmp_path):
    """A run directory with the run.json of the good command."""
    write_record(tmp_path, check.check(command(inputs, f"--run_dir {tmp_path}"), {}))
    return tmp_path


def add_checkpoint(run_dir, plan, position=16, **cut):
    """Publish a checkpoint of a plan's run, without states; `cut` changes how they are sharded."""
    temporary = run_dir / "checkpoints" / ".tmp-step-00000005"
    temporary.mkdir(parents=True)
    progress = Progress(step=5, position=position, tokens=32 * position)
    manifest = {
        **WRITTEN,
        "format": FORMAT, "version": VERSION, "files": [], "progress": vars(progress),
        "world_size": plan.world_size, "zero_stage": plan.ds.zero_stage,
        "optimizer": topology.optimizer_kind(plan.ds),
        "cut": {**topology.sharding(plan.ds, plan.layout), **cut},
    }  # fmt: skip
    directory.publish(temporary, manifest)


@pytest.mark.parametrize(
    "change",
    [
        "",
        "--micro_batch_size 1 --num_workers 2 --log_interval 3 --checkpoint_interval 7",
        f"--deepspeed_config {PROFILES / 'zero3.json'}",
        "--val_data val",
    ],
)
def test_settings_that_do_not_affect_the_curve_may_change(inputs, a_run, change):
    check.check(command(inputs, f"--run_dir {a_run} {change}".strip()), {})


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ("--seed 1", ["settings.seed: 0 -> 1 (command line: --seed). "]),
        ("--learning_rate 0.5", ["settings.learning_rate", "0.5", "settings.min_learning_rate"]),
        ("--total_tokens 102400", ["settings.total_tokens: 51200", "102400"]),
        ("--fp8", ["settings.fp8: false -> true (command line: --fp8). "]),
        ("--data code", ["data_fingerprint"]),
        ("--model_config dropout.json", ["model_config.attention_dropout", "0.1"]),
        ("--deepspeed_config fp32.json", ["ds_config precision: bf16", "fp32", "clipping: 1.0"]),
    ],
)
def test_changes_that_affect_the_curve_are_refused(inputs, a_run, change, parts):
    text = "\n".join(refusal(inputs, f"--run_dir {a_run} {change}"))
    for part in parts:
        assert part in text
    assert f"{a_run}/run.json: " in text and "another --run_dir" in text


def test_a_setting_that_this_version_no_longer_has_is_refused_if_it_was_on(inputs, a_run):
    path = a_run / "run.json"
    record = json.loads(path.read_text())
    record["settings"]["adaptive_clip"] = 0.0
    write_json(path, record)
    check.check(command(inputs, f"--run_dir {a_run}"), {})
    record["settings"]["adaptive_clip"] = 0.5
    write_json(path, record)
    (problem,) = refusal(inputs, f"--run_dir {a_run}")
    assert "settings.adaptive_clip: 0.5 -> null (this version no longer has this set" in problem
    plan = check.check(command(inputs, f"--run_dir {a_run} --accept_changes"), {})
    assert plan.changed == {"settings.adaptive_clip": (0.5, None)}


@pytest.mark.parametrize("kind", SCHEDULES)
def test_only_a_schedule_that_ignores_the_total_can_be_extended(inputs, tmp_path, kind):
    change = f"--run_dir {tmp_path} --schedule {kind} --learning_rate 1e-3 --warmup_tokens 512"
    change += " --decay_tokens 5k" if SCHEDULES[kind].uses_decay_tokens else ""
    write_record(tmp_path, check.check(command(inputs, change), {}))
    longer = f"{change} --total_tokens 102400"
    if not SCHEDULES[kind].needs_total:
        assert check.check(command(inputs, longer), {}).total_steps == 200
    else:
        (problem,) = refusal(inputs, longer)
        assert f"a {kind} schedule depends on it" in problem


def test_changes_that_affect_the_curve_are_allowed_if_accepted(inputs, a_run):
    change = f"--run_dir {a_run} --seed 1 --seq_len 16 --data code --accept_changes"
    plan = check.check(command(inputs, change), {})
    assert plan.changed["settings.seed"] == (0, 1)
    assert set(plan.changed) == {"settings.seed", "settings.seq_len", "data_fingerprint"}
    assert f"note: changed since {a_run}/run.json: settings.seed: 0 -> 1" in plan.summary()
    assert "accept_changes" not in plan.settings.to_json(), "it is no standing permission"


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ("--model_config dropout.json", "attention_dropout: 0.0 -> 0.1 (--model_config) cannot"),
        (
            "--deepspeed_config fp32.json",
            "precision: bf16 -> fp32 (--deepspeed_config; the run started",
        ),
    ],
)
def test_changes_that_invalidate_the_states_are_refused_even_if_accepted(
    inputs, a_run, change, part
):
    (problem,) = refusal(inputs, f"--run_dir {a_run} {change} --accept_changes")
    assert part in problem and "--accept_changes" not in problem


def test_a_run_keeps_its_precision_on_another_kind_of_cpu(inputs, tmp_path, monkeypatch):
    change = f"--run_dir {tmp_path} --deepspeed_config {PROFILES / 'zero2.json'}"
    cpu(monkeypatch, "EPYC 9455", 0.5)
    first = check.check(command(inputs, change), {})
    assert first.ds.precision == "bf16" and not any("bf16" in one for one in first.notices)
    write_record(tmp_path, first)
    cpu(monkeypatch, "EPYC 7763", 57.0)
    second = check.check(command(inputs, change), {})
    assert second.ds == first.ds
    notices = "\n".join(second.notices)
    assert (
        f"since the run of {tmp_path}/run.json started with it on EPYC 9455; a new run" in notices
    )
    assert "bf16 is 57 times slower than float32 on EPYC 7763" in notices
    (problem,) = refusal(inputs, f"{change} --precision fp32")
    assert "precision: bf16 -> fp32 (" in problem
    assert "the run started on EPYC 9455, this is EPYC 7763" in problem
    new = check.check(command(inputs, f"{change} --run_dir {tmp_path / 'new'}"), {})
    assert new.ds.precision == "fp32"
    assert "EPYC 7763 multiplies bf16 57 times slower than float32" in "\n".join(new.notices)


def test_a_run_in_bf16_is_refused_on_a_device_without_it_and_both_are_named(
    inputs, tmp_path, monkeypatch
):
    change = f"--run_dir {tmp_path} --deepspeed_config {PROFILES / 'zero2.json'}"
    cpu(monkeypatch, "EPYC 9455", 0.5)
    write_record(tmp_path, check.check(command(inputs, change), {}))
    old = device.Device("cpu", None, False, "an old device", "does not support bf16")
    monkeypatch.setattr("zerolm.preflight.host.local_device", lambda *_: old)
    (problem,) = refusal(inputs, change)
    assert "bf16: enabled, but an old device does not support it" in problem
    assert f"the run in {tmp_path}/run.json began in bf16 on EPYC 9455" in problem


def cpu(monkeypatch, name, ratio):
    monkeypatch.setattr(device, "cpu_name", lambda: name)
    monkeypatch.setattr(device, "bf16_ratio", lambda where: ratio)


def test_settings_from_run_json_give_the_same_plan(inputs, a_run, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("replay")
    first = check.check(command(inputs, f"--run_dir {a_run}"), {})
    words = ["--settings", str(a_run / "run.json"), "--run_dir", str(elsewhere)]
    again = check.check(words, {})
    assert again.ds == first.ds
    old, new = first.settings.to_json(), again.settings.to_json()
    assert {key for key in old if old[key] != new[key]} == {"run_dir"}


def test_a_checkpoint_records_the_order_of_the_data_and_later_stages_if_there_are_any(inputs):
    plan = check.check(command(inputs, "--seed 7"), {})
    assert run_record.data_order(plan) == {
        "seq_len": plan.settings.seq_len, "packing": plan.settings.packing, "seed": 7,
        "weights": [20_000.0], "data_fingerprint": plan.data_fingerprint,
    }  # fmt: skip


def test_only_rank_0_compares_the_command_with_the_run_in_the_store(inputs, tmp_path):
    lost, store = tmp_path / "lost", f"file://{tmp_path}/store"
    plan = check.check(command(inputs, f"--run_dir {lost}"), {})
    add_checkpoint(lost, plan)
    write_record(lost, plan)
    uploader.upload(lost, store, keep=0)
    flags = f"--run_dir {tmp_path}/again --upload_to {store}"
    plan = check.check(command(inputs, flags), {})
    assert existing_run.compare(plan, {"RANK": "0"}, Findings([])).resumes
    (problem,) = refusal(inputs, f"{flags} --seed 1")
    assert problem.startswith(f"{store}/step-00000005/record/run.json: settings.seed: 0 -> 1")
    plan = check.check(command(inputs, f"{flags} --seed 1"), {"RANK": "1"})
    assert existing_run.compare(plan, {"RANK": "1"}, Findings([])) == existing_run.NO_RUN


def test_another_topology_is_a_notice(inputs, a_run):
    plan = check.check(command(inputs, f"--run_dir {a_run}"), {})
    add_checkpoint(a_run, plan, torch_adam="another")
    found = Findings([])
    assert existing_run.compare(plan, {}, found).resumes
    assert found.problems == [] and len(found.notices) == 1
    assert all("resharded: torch_adam another -> " in notice for notice in found.notices)


def test_a_mixture_may_change_only_in_stages_that_have_not_started(inputs, tmp_path):
    flags = f"--run_dir {tmp_path} --data web --data val"
    plan = check.check(command(inputs, flags), {})
    write_record(tmp_path, plan)
    (problem,) = refusal(inputs, f"{flags} --mixture_temperature 2")
    assert "mixture: [20000.0, 1000.0] from sequence 0 -> [" in problem
    add_checkpoint(tmp_path, plan, position=640)
    check.check(command(inputs, f"{flags} --data_stage 32k:web=1"), {})
    (problem,) = refusal(inputs, f"{flags} --data_stage 16k:web=1")
    assert "[1.0, 0.0] from sequence 500 (command line: --data_stage)" in problem
    record = json.loads((tmp_path / "run.json").read_text())
    del record["mixture"]  # as in the record of an old run, which had one blend
    write_json(tmp_path / "run.json", record)
    check.check(command(inputs, flags), {})
