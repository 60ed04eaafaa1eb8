"""`--branch`: what a branch takes from its trunk, how it may differ, and what is refused."""

import json
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest

from launch.__main__ import main
from tests.launching import LLAMA, write_json
from tests.manifests import WRITTEN
from tests.zerolm.preflight.preflight_inputs import PROFILES, command, shards, write_record
from tests.zerolm.pretrained.small_models import save_model
from zerolm.checkpoint import branch, directory
from zerolm.checkpoint.manifest import FORMAT, VERSION, Progress
from zerolm.common import machine
from zerolm.common.errors import ConfigError
from zerolm.common.files import sha256_file
from zerolm.ds_config import topology
from zerolm.preflight import check, run_record
from zerolm.run_dir.files import MANIFEST, RunFiles, checkpoint_name
from zerolm.tracking.wandb_identity import identity
from zerolm.train import run_directory

STEP_TOKENS = 512
WSD = "--schedule wsd --warmup_tokens 1024 --upload_to off --wandb_name ours"


def add_checkpoint(run_dir, plan, step):
    """Publish a checkpoint of a plan's run with one small file."""
    temporary = run_dir / "checkpoints" / f".tmp-{checkpoint_name(step)}"
    temporary.mkdir(parents=True)
    (temporary / "states.pt").write_bytes(b"states of step %d" % step)
    listed = {"file": "states.pt", "size_bytes": (temporary / "states.pt").stat().st_size}
    listed["sha256"] = sha256_file(temporary / "states.pt")
    progress = Progress(step=step, position=16 * step, tokens=STEP_TOKENS * step)
    manifest = {
        **WRITTEN,
        "format": FORMAT, "version": VERSION, "files": [listed], "progress": vars(progress),
        "world_size": plan.world_size, "zero_stage": plan.ds.zero_stage,
        "optimizer": topology.optimizer_kind(plan.ds), "precision": plan.ds.precision,
        "cut": topology.sharding(plan.ds, plan.layout), "order": run_record.data_order(plan),
    }  # fmt: skip
    return directory.publish(temporary, manifest)


def make_run(inputs, run_dir, change, steps=(10, 20, 30)):
    plan = check.check(command(inputs, f"--run_dir {run_dir} {change}"), {})
    for step in steps:
        add_checkpoint(run_dir, plan, step)
    rows = [{"step": n, "tokens": n * STEP_TOKENS, "train/loss": 1 / n} for n in range(1, 36)]
    RunFiles(run_dir).metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_record(run_dir, plan)
    return plan


@pytest.fixture
def trunk(inputs, tmp_path):
    make_run(inputs, tmp_path / "trunk", WSD)
    return tmp_path / "trunk"


def plan_of(trunk, *flags, run="branch"):
    flags = [part for flag in flags for part in flag.split()]
    if not any(flag == "--branch" for flag in flags):
        flags = ["--branch", f"{trunk}@20", *flags]
    return check.check([*flags, "--run_dir", str(trunk.parent / run)], {})


def refused(trunk, *flags, run="branch"):
    with pytest.raises(ConfigError) as caught:
        plan_of(trunk, *flags, run=run)
    return caught.value.problems


def test_a_total_is_all_that_a_decay_from_a_trunk_needs(trunk) -> None:
    plan, old = plan_of(trunk, "--total_tokens 15360"), json.loads((trunk / "run.json").read_text())
    changed = {
        name for name, value in plan.settings.to_json().items() if value != old["settings"][name]
    }
    own = {"run_dir", "branch", "wandb_name", "wandb_group", "upload_to"}
    assert changed == {*own, "total_tokens", "decay_tokens"}
    assert plan.learning_rate(20 * STEP_TOKENS) == plan.learning_rate.peak
    assert plan.learning_rate(21 * STEP_TOKENS) < plan.learning_rate.peak
    assert plan.learning_rate(15360) == plan.learning_rate.minimum
    assert plan.settings.branch == f"{trunk}@20" and plan.settings.wandb_name is None
    assert plan.settings.wandb_group == "ours", "the name of the trunk in W&B"
    assert plan.derived["branch"] == "of trunk at step 20, 5,120 tokens from there to the end"
    assert any("settings.total_tokens: 51200 -> 15360" in notice for notice in plan.notices)
    assert not any("jumps" in notice for notice in plan.notices)


def test_a_schedule_of_its_own_decays_from_the_branch_point(inputs, tmp_path) -> None:
    make_run(inputs, tmp_path / "trunk", "--schedule constant --learning_rate 1e-3")
    plan = plan_of(tmp_path / "trunk", "--schedule wsd", "--total_tokens 15360")
    assert plan.settings.decay_tokens == 15360 - 20 * STEP_TOKENS
    assert plan.learning_rate(15360) == pytest.approx(1e-4)
    plan = plan_of(tmp_path / "trunk", "--total_tokens 102400")
    assert plan.settings.schedule == "constant" and plan.settings.decay_tokens is None


def test_a_decay_of_the_trunk_before_the_branch_point_and_a_jump_are_reported(trunk) -> None:
    plan = plan_of(trunk, "--schedule cosine")
    assert plan.settings.decay_tokens is None
    assert any("jumps at the branch point, from" in notice for notice in plan.notices)
    early = json.loads((trunk / "run.json").read_text())
    early["settings"] |= {"total_tokens": 12288, "decay_tokens": 4096}
    write_json(trunk / "run.json", early)
    notices = " ".join(plan_of(trunk, "--total_tokens 15360").notices)
    assert "the trunk's decay began at 8,192 tokens" in notices and "jumps" in notices


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        ("--total_tokens 10240", ["must exceed the 10240 tokens", "--total_tokens"]),
        ("--branch {trunk}@15", ["no complete checkpoint of step 15", "10, 20, 30"]),
        ("--branch {trunk}-gone", ["--branch", "there is no", "run.json"]),
        ("--model_config {other}", ["model_config.hidden_size: 64 -> 32", "cannot change"]),
        ("--deepspeed_config {inputs}/fp32.json", ["precision: bf16 -> fp32", "cannot change"]),
        (f"--deepspeed_config {PROFILES}/zero1_muon.json", ["optimizer"]),
    ],
)  # fmt: skip
def test_what_a_branch_cannot_be_is_refused(inputs, trunk, flags, parts) -> None:
    other = write_json(trunk.parent / "other.json", {**LLAMA, "hidden_size": 32})
    problems = refused(trunk, flags.format(inputs=inputs, trunk=trunk, other=other))
    assert all(any(part in problem for problem in problems) for part in parts), problems
    if "@15" in flags:
        assert len(problems) == 1 and problems[0].count("@15") == 1, problems
    if "gone" in flags:
        assert len(problems) == 1, "the settings are in the trunk, and are not missing"


def test_a_directory_with_another_run_is_refused(inputs, trunk) -> None:
    assert any("is the --run_dir itself" in line for line in refused(trunk, run="trunk"))
    make_run(inputs, trunk.parent / "other", WSD)
    (problem,) = refused(trunk, run="other")
    assert "contains a run that did not start there" in problem


def begin(trunk, *flags, run="branch"):
    """Begin a branch as rank 0 of pretrain.py does; return its plan."""
    plan = plan_of(trunk, *flags, run=run)
    RunFiles(plan.run_dir).checkpoints.mkdir(parents=True, exist_ok=True)
    branch.begin(plan, lambda: run_directory.record(plan), lambda line: None)
    return plan


def test_a_branch_that_has_begun_is_a_run_of_its_own(trunk) -> None:
    begin(trunk, "--total_tokens 15360")
    run_dir, step = trunk.parent / "branch", checkpoint_name(20)
    ours, theirs = (RunFiles(each).checkpoint(step) / "states.pt" for each in (run_dir, trunk))
    assert ours.samefile(theirs), "linked, not copied"
    assert directory.read(ours.parent).digest == directory.read(theirs.parent).digest
    rows = (run_dir / "metrics.jsonl").read_bytes()
    assert rows.count(b"\n") == 20 and (trunk / "metrics.jsonl").read_bytes().startswith(rows)
    event = json.loads((run_dir / "events.jsonl").read_text())
    assert (event["event"], event["step"], event["run"]) == ("branched", 20, str(trunk))
    assert event["changes"]["settings.total_tokens"] == [51200, 15360]
    shutil.rmtree(trunk)
    assert directory.verify_files(directory.newest(run_dir)) == []
    again = plan_of(trunk, "--total_tokens 15360")
    assert again.branch_from is None and again.branch["step"] == 20 and not again.changed
    assert plan_of(trunk, f"--branch {trunk}").settings.total_tokens == 15360
    same = check.check(["--settings", str(run_dir / "run.json")], {})
    assert same.settings.to_json() == again.settings.to_json() and same.branch == again.branch
    (problem,) = refused(trunk, f"--branch {trunk}@10")
    assert "began from step 20" in problem
    (problem,) = refused(trunk, "--total_tokens 20480")
    assert "settings.total_tokens: 15360 -> 20480" in problem and "--accept_changes" in problem


def test_a_beginning_that_was_killed_is_repeated(trunk, monkeypatch) -> None:
    class Killed(Exception):
        pass

    def kill(point: str, step: int) -> None:
        if point == "checkpoint.rename":
            raise Killed

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(directory, "fault_point", kill)
        begin(trunk, "--total_tokens 15360")
    run_dir = trunk.parent / "branch"
    assert (run_dir / "run.json").is_file() and directory.newest(run_dir) is None
    begin(trunk, "--total_tokens 15360")
    assert directory.newest(run_dir).progress.step == 20
    assert (run_dir / "events.jsonl").read_text().count("branched") == 1
    names = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    assert names == ["latest", checkpoint_name(20)]


def test_a_damaged_checkpoint_begins_nothing(trunk) -> None:
    states = RunFiles(trunk).checkpoint(checkpoint_name(20)) / "states.pt"
    states.write_bytes(b"States of step 20")
    with pytest.raises(ConfigError) as caught:
        begin(trunk, "--total_tokens 15360")
    assert "SHA-256" in caught.value.problems[0] and "another step" in caught.value.problems[-1]
    run_dir = trunk.parent / "branch"
    assert [path.name for path in run_dir.rglob("*")] == ["checkpoints"]
    manifest = states.with_name(MANIFEST)
    manifest.write_text(manifest.read_text().replace('"step": 20', '"step": 21'))
    assert any("digest" in problem for problem in refused(trunk, "--total_tokens 15360"))


def test_a_checkpoint_that_a_rollback_is_about_to_remove_is_refused(trunk) -> None:
    entry = {"number": 1, "from_step": 35, "to_step": 10, "skipped_windows": [[100, 200]]}
    entry |= {"skipped_steps": 0, "spikes": 6}
    write_json(trunk / "rollbacks.json", {"rollbacks": [entry]})
    assert any("was rolled back" in line for line in refused(trunk, "--total_tokens 15360"))
    assert plan_of(trunk, f"--branch {trunk}@10", "--total_tokens 15360").branch["step"] == 10


def test_files_are_copied_to_another_file_system(trunk) -> None:
    shared = Path("/dev/shm")
    if not shared.is_dir() or machine.same_file_system(shared, trunk):
        pytest.skip("no other file system here")
    with tempfile.TemporaryDirectory(dir=shared) as other:
        begin(trunk, "--total_tokens 15360", run=f"{other}/branch")
        found = directory.newest(f"{other}/branch")
        assert directory.verify_files(found) == []
        states = RunFiles(trunk).checkpoint(checkpoint_name(20)) / "states.pt"
        assert not (found.directory / "states.pt").samefile(states)


def test_other_weights_and_sources_are_a_stage_from_the_branch_point(inputs, trunk) -> None:
    new = shards(trunk.parent / "anneal", seed=9)
    flags = f"--data {inputs}/web=1 --data {new}=3"
    plan = begin(trunk, flags, "--total_tokens 25600")
    old = check.check(command(inputs, f"--run_dir {trunk} {WSD}"), {})
    start = 16 * 20  # sequences
    assert [blend.start for blend in plan.mixture.blends] == [0, start]
    assert plan.mixture.blends[1].weights == (1.0, 3.0)
    numbers = np.arange(start, start + 640)
    ours, theirs = plan.order()(numbers), old.order()(numbers)
    web = ours.window[ours.source == 0]
    assert len(web) == 160 and set(web) == set(theirs.window[:160]), "continues in web"
    again = plan_of(trunk, flags, "--total_tokens 25600")
    assert again.mixture == plan.mixture and not again.changed


def test_a_branch_of_a_branch_knows_its_family(trunk) -> None:
    begin(trunk, "--total_tokens 15360")
    plan = begin(trunk, f"--branch {trunk.parent}/branch", "--total_tokens 20480", run="second")
    assert plan.derived["branch"].startswith("of branch at step 20, of trunk at step 20,")
    content = json.loads((trunk.parent / "second" / "run.json").read_text())
    record = content["branch"]
    assert record["branch"]["run"] == str(trunk) and record["run"] == str(trunk.parent / "branch")
    shown = identity(trunk.parent / "second", content)
    assert (shown.name, shown.group) == ("second", "ours")
    assert shown.tags == ("branch", "of branch@20", "of trunk@20")


def test_a_branch_needs_no_initial_weights_of_its_trunk(inputs, tmp_path) -> None:
    save_model(tmp_path / "model")
    make_run(inputs, tmp_path / "trunk", f"{WSD} --init_from {tmp_path}/model ---model_config")
    shutil.rmtree(tmp_path / "model")
    plan = plan_of(tmp_path / "trunk", "--total_tokens 15360")
    assert plan.initial.weights is None and plan.settings.init_from == f"{tmp_path}/model"
    (problem,) = refused(tmp_path / "trunk", f"--init_from {tmp_path}/trunk@10")
    assert "settings.init_from" in problem and "cannot change" in problem


def test_a_branch_and_existing_weights_are_planned_without_a_model_config(trunk, capsys) -> None:
    def planned(*words, code: int = 0) -> str:
        assert main(["plan", "--json", "--devices", "2", *map(str, words)]) == code
        printed = capsys.readouterr()
        return printed.err if code else printed.out

    batch = json.loads((trunk / "run.json").read_text())["settings"]["batch_tokens"]
    found = json.loads(planned("--branch", f"{trunk}@20", "--total_tokens", 15360))
    assert found["total_tokens"] == 15360 and found["batch_tokens"] == batch
    assert found["steps"] == (15360 - 20 * STEP_TOKENS) / batch
    assert found["total_flops"] == found["flops_per_token"] * (15360 - 20 * STEP_TOKENS)
    model = trunk.parent / "model"
    save_model(model)
    plans = [
        json.loads(planned(*words, "--seq_len", 32))
        for words in (["--init_from", model], ["--model_config", model / "config.json"])
    ]
    assert plans[0].pop("model") + "/config.json" == plans[1].pop("model")
    assert plans[0] == plans[1]
    refusal = planned("--branch", f"{trunk}@15", code=2)
    assert f"--branch: {trunk}@15: {trunk} has no complete checkpoint of step 15" in refusal
    assert "gone: no such" in planned("--init_from", trunk.parent / "gone", code=2)
