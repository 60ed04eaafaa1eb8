"""`--branch` with longer sequences: which windows it reads, and other rotary positions."""

import json
import shutil

import numpy as np
import pytest

from tests.launching import LLAMA, write_json
from tests.zerolm.preflight.preflight_inputs import command, shards
from tests.zerolm.preflight.test_branch import (
    STEP_TOKENS,
    WSD,
    add_checkpoint,
    begin,
    make_run,
    plan_of,
    refused,
)
from zerolm.checkpoint import directory
from zerolm.common.errors import ConfigError
from zerolm.preflight import check
from zerolm.report.run_order import open_run
from zerolm.run_dir.files import MANIFEST
from zerolm.train import resume

LATER = f"{WSD} --later_seq_len 128"
SEQ_LEN = 32  # of the trunk, with 16 sequences a step
LONG = {**LLAMA, "max_position_embeddings": 256, "rope_theta": 8e4}


@pytest.fixture
def long_config(inputs, tmp_path):
    return write_json(tmp_path / "long.json", LONG)


def tokens_read(plan, first, last):
    """Return {(source, epoch): starts of the spans of 32 tokens that some sequences consist of}."""
    placed, times = plan.order()(np.arange(first, last)), plan.settings.seq_len // SEQ_LEN
    read: dict[tuple, list[int]] = {}
    for source, window, epoch in zip(*(part.tolist() for part in placed), strict=True):
        spans = range(window * times, (window + 1) * times)
        read.setdefault((plan.source_names[source], epoch), []).extend(spans)
    return read


def num_spans(plan, name):
    source = plan.sources[plan.source_names.index(name)]
    return (source.num_tokens - 1) // 128 * (128 // SEQ_LEN)


def require_disjoint(plans, ranges, block=0):
    """Check that the runs read nothing twice, and of each source leave out less than one window.

    Args:
        ranges: first sequence of each run, and the one after its last.
        block: sequences of a mixing block that a run may have begun.
    """
    together: dict[tuple, list[int]] = {}
    for plan, (first, last) in zip(plans, ranges, strict=True):
        for key, spans in tokens_read(plan, first, last).items():
            together.setdefault(key, []).extend(spans)
    missing = dict.fromkeys(plans[-1].source_names, 0)
    for (name, epoch), spans in together.items():
        assert len(set(spans)) == len(spans), f"epoch {epoch} of {name} has text twice"
        if epoch < max(e for n, e in together if n == name):  # it is over
            missing[name] += len(set(range(num_spans(plans[-1], name))) - set(spans))
    window = plans[-1].settings.seq_len // SEQ_LEN
    assert all(count < window * (len(plans) - 1) + block for count in missing.values()), missing


@pytest.mark.parametrize("steps", [9, 20, 60])
@pytest.mark.parametrize("data", ["web", "web=3 --data code=1"])
def test_a_longer_branch_reads_what_the_trunk_has_not(
    inputs, tmp_path, long_config, data, steps
) -> None:
    run = f"{LATER} --data {data}"
    trunk = make_run(inputs, tmp_path / "trunk", run, steps=(steps,))
    flags = f"--seq_len 128 --model_config {long_config} --total_tokens 102400"
    plan = begin(tmp_path / "trunk", f"--branch {tmp_path}/trunk@{steps}", flags)
    start = -(-16 * steps * 32 // 128)
    blend = plan.mixture.blends[-1]
    assert blend.start == start
    in_block = 64 if 16 * steps % 64 and "code" in data else 0
    counts = trunk.order().counts(16 * steps).tolist()
    assert list(blend.consumed) == [-(-count // 4) for count in counts] or in_block
    require_disjoint([trunk, plan], [(0, 16 * steps), (start, start + 640)], in_block)
    (notice,) = [line for line in plan.notices if "sequences of 128 tokens instead of 32" in line]
    assert notice.endswith(
        "only sequences that the trunk has not read; each source loses less than one"
    )
    shutil.rmtree(tmp_path / "trunk")
    again = plan_of(tmp_path / "trunk", f"--branch {tmp_path}/trunk@{steps}", flags)
    assert again.mixture == plan.mixture and not again.changed, "the record alone gives the order"
    numbers = np.arange(start, start + 100)
    shown = open_run(plan.run_dir).order(numbers)
    assert all((a == b).all() for a, b in zip(shown, plan.order()(numbers), strict=True))
    found = check.check(["--settings", str(plan.run_dir / "run.json")], {})
    linked = resume.position_after(found, directory.newest(plan.run_dir))
    assert linked == start, "the position in tokens stays"


def test_two_longer_stages_follow_each_other(inputs, tmp_path, long_config) -> None:
    trunk = make_run(inputs, tmp_path / "trunk", f"{LATER} --data web=3 --data code=1", steps=(8,))
    flags = f"--model_config {long_config} --total_tokens 102400"
    first = begin(tmp_path / "trunk", f"--branch {tmp_path}/trunk@8", "--seq_len 64", flags)
    assert first.mixture.group == 2
    _add(tmp_path / "branch", first, 16)
    last = begin(
        tmp_path / "trunk", f"--branch {tmp_path}/branch@16", "--seq_len 128", flags, run="last"
    )
    assert last.mixture.group == 1
    assert [blend.start for blend in last.mixture.blends] == [0, 32, 64]
    require_disjoint([trunk, first, last], [(0, 128), (64, 128), (64, 704)])
    # A branch of the same length keeps the windows that were consumed before the longer blend.
    _add(tmp_path / "last", last, 20)
    decay = begin(
        tmp_path / "trunk", f"--branch {tmp_path}/last@20", "--total_tokens 51200", run="decay"
    )
    assert decay.mixture == last.mixture


def _add(run_dir, plan, step):
    """Publish a checkpoint of a plan's run, at the position of its sequence length."""
    checkpoint = add_checkpoint(run_dir, plan, step)
    path = checkpoint / MANIFEST
    manifest = json.loads(path.read_text())
    manifest["progress"]["position"] = STEP_TOKENS * step // plan.settings.seq_len
    shutil.rmtree(checkpoint)
    temporary = checkpoint.with_name(f".tmp-{checkpoint.name}")
    temporary.mkdir()
    (temporary / "states.pt").write_bytes(b"states of step %d" % step)
    return directory.publish(temporary, manifest)


def test_other_data_and_later_stages_of_a_longer_branch(inputs, tmp_path, long_config) -> None:
    late = "--data web=1 --data code=0 --data_stage 5000:web=1,code=1 --data_stage 20k:code=1"
    trunk = make_run(inputs, tmp_path / "trunk", f"{LATER} {late}", steps=(20,))
    flags = f"--seq_len 128 --model_config {long_config}"
    same = plan_of(tmp_path / "trunk", flags)
    consumed = tuple(-(-count // 4) for count in trunk.order().ends(320).tolist())
    assert [(s.start, s.weights, s.consumed) for s in same.mixture.blends] == [
        (0, (1.0, 0.0), None), (40, (1.0, 1.0), None), (80, (1.0, 1.0), consumed),
        (157, (0.0, 1.0), None),
    ]  # fmt: skip
    new = shards(tmp_path / "books", seed=9)
    more = plan_of(tmp_path / "trunk", flags, f"--data {new}=3 --data {inputs}/code=1")
    assert more.source_names == ["web", "code", "books"]
    blend = more.mixture.blends[-1]
    assert (blend.start, blend.weights, blend.consumed) == (80, (0.0, 1.0, 3.0), (*consumed, 0))
    ours = tokens_read(more, 80, 140)
    theirs = tokens_read(trunk, 0, 320)
    assert not set(ours["code", 0]) & set(theirs["code", 0]) and ("web", 0) not in ours


@pytest.mark.parametrize(
    ("run", "flags", "part"),
    [
        (WSD, "--seq_len 128", "the trunk reads them in random order"),
        (LATER, "--seq_len 256", "Branch from a run with --later_seq_len 256"),
        (LATER, "--seq_len 80", "this does not divide 80. Choose 64"),
        (LATER, "--seq_len 16", "does not divide 16"),
        (f"{WSD} --later_seq_len 100", "", "must be a multiple of --seq_len 32"),
        (f"{WSD} --later_seq_len 32000", "", "must be at least --later_seq_len + 1 = 32001"),
    ],
)
def test_a_length_that_cannot_continue_is_refused(
    inputs, tmp_path, long_config, run, flags, part
) -> None:
    if not flags:
        with pytest.raises(ConfigError) as caught:
            check.check(command(inputs, run), {})
        assert any(part in problem for problem in caught.value.problems)
        return
    make_run(inputs, tmp_path / "trunk", run)
    config = f"--model_config {long_config}"
    assert any(part in problem for problem in refused(tmp_path / "trunk", flags, config))
    anew = plan_of(tmp_path / "trunk", flags, config, "--seed 3 --batch_tokens 1280")
    assert any("all data is reordered, so text" in notice for notice in anew.notices)


def test_other_positions_are_named_and_other_keys_refused_at_once(inputs, tmp_path) -> None:
    make_run(inputs, trunk := tmp_path / "trunk", WSD)
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    config = write_json(tmp_path / "l.json", {**LONG, "rope_theta": 1e4, "rope_scaling": yarn})
    notices = plan_of(trunk, f"--model_config {config}").notices
    where = f"{trunk / 'run.json'} has"
    assert any(f"l.json: max_position_embeddings: 256, {where} 64: the l" in n for n in notices)
    assert any(f'.rope_type: "yarn", {where} "default": divides low' in n for n in notices)
    changes = {"vocab_size": 640, "hidden_act": "gelu", "rope_scaling": {**yarn}}
    del changes["rope_scaling"]["original_max_position_embeddings"]
    config = write_json(tmp_path / "bad.json", {**LONG, **changes})
    problems = refused(trunk, f"--model_config {config}")
    for part in ("vocab_size: 512 -> 640", "hidden_act: silu -> gelu", "Give the length that"):
        assert any(part in problem for problem in problems), problems
    assert not any("model_config.rope" in problem for problem in problems)
    partial = {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5}
    config = write_json(tmp_path / "partial.json", {**LLAMA, "rope_parameters": partial})
    assert any(
        "partial_rotary_factor: 0.5" in line for line in refused(trunk, f"--model_config {config}")
    )
    # The run itself keeps its model.
    config = write_json(tmp_path / "long.json", LONG)
    same = f"--run_dir {trunk} {WSD} --model_config {config} --accept_changes"
    with pytest.raises(ConfigError) as caught:
        check.check(command(inputs, same), {})
    assert any("model_config.rope_parameters" in problem for problem in caught.value.problems)
