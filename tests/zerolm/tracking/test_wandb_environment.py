"""Every variable of W&B is obeyed, named in a notice, or refused."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import wandb
import wandb.env

from tests.wandb_reader import of_kind, wandb_runs
from tests.zerolm.preflight.preflight_inputs import command, write_inputs, write_record
from tests.zerolm.tracking.tracked_runs import unused_run
from zerolm.common.errors import ConfigError
from zerolm.preflight import check
from zerolm.tracking.wandb import WandbTracker
from zerolm.tracking.wandb_environment import (
    NAMES,
    OTHERS,
    RENAMED,
    REPLACED,
    name_problems,
    notices,
)
from zerolm.tracking.wandb_sync import wandb_sync

SPECIAL = {  # wandb/sdk/wandb_settings.py, update_from_env_vars
    "app_url_override": "WANDB_APP_URL", "root_dir": "WANDB_DIR", "run_name": "WANDB_NAME",
    "run_notes": "WANDB_NOTES", "run_tags": "WANDB_TAGS", "run_job_type": "WANDB_JOB_TYPE",
    "x_graphql_timeout_seconds": "WANDB_HTTP_TIMEOUT", "email": "WANDB_USER_EMAIL",
    "x_file_transfer_timeout_seconds": "WANDB_FILE_PUSHER_TIMEOUT",
    "x_service_transport": "WANDB_SERVICE_TRANSPORT",
}  # fmt: skip
NAMING = {variable for variables in NAMES.values() for variable in variables}
CHOSEN_BY_ZEROLM = {"WANDB_MODE", "WANDB_INIT_TIMEOUT"}  # from the same variables


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def variables_of(field: str) -> set[str]:
    name = f"_{field[2:]}" if field.startswith("x_") else field
    return {f"WANDB_{name}".upper()} | ({SPECIAL[field]} if field in SPECIAL else set())


def test_each_setting_that_zerolm_passes_to_wandb_has_its_variables_obeyed_or_named(
    tmp_path, monkeypatch
) -> None:
    """Walks all of `wandb.Settings`: what zerolm passes would silently replace the variable."""
    run_dir, passed = unused_run(tmp_path / "run", monkeypatch), {}

    def init(settings: wandb.Settings, **arguments: Any) -> None:
        passed.update(arguments, fields=settings.model_fields_set)
        raise StopIteration

    monkeypatch.setattr(wandb, "init", init)
    for variable in REPLACED:
        monkeypatch.setenv(variable, "x")
    with pytest.raises(StopIteration):
        WandbTracker(run_dir).open()
    fields = {"group": "run_group", "name": "run_name", "tags": "run_tags", "id": "run_id"}
    fields |= {"dir": "root_dir"}
    taken = {fields.get(name, name) for name in passed} | passed["fields"]
    explained = NAMING | REPLACED.keys() | CHOSEN_BY_ZEROLM
    for field in wandb.Settings.model_fields:
        if field in taken:
            assert variables_of(field) <= explained, field
        else:  # W&B reads the variable itself, and no notice denies it
            for variable in variables_of(field) - explained:
                assert not notices({variable: "1"}, {}, "offline"), variable
    import os

    assert not REPLACED.keys() & os.environ.keys(), "W&B would fail on or follow some of these"


def test_each_variable_of_wandb_env_is_read_or_named() -> None:
    """A constant that only `wandb/env.py` mentions has no effect, which a notice says."""
    package = Path(wandb.__file__).parent
    constants = {
        value: name
        for name, value in vars(wandb.env).items()
        if isinstance(value, str) and value.startswith("WANDB_")
    }
    fields = {each for field in wandb.Settings.model_fields for each in variables_of(field)}
    others = constants.keys() - fields - NAMING - REPLACED.keys()
    sources = "\n".join(
        path.read_text(errors="replace")
        for path in package.rglob("*.py")
        if path.name != "env.py" and "vendor" not in path.parts
    )
    own = (package / "env.py").read_text()
    for variable in others:
        name = constants[variable]
        uses = rf"\benv\.{name}\b|\b{variable}\b"
        is_read = re.search(uses, sources) or re.search(rf"\w\(\s*{name}\b", own)
        named = bool(notices({variable: "1"}, {}, "offline"))
        assert named or is_read, variable
        assert variable in OTHERS or named
    assert not OTHERS & fields


def test_a_variable_that_nothing_reads_is_named_with_what_to_use() -> None:
    found = notices({"WANDB_DISABLED": "true", "WANDB_PROJET": "x"}, {}, "offline")
    assert found == [
        f"environment: WANDB_DISABLED has no effect: {RENAMED['WANDB_DISABLED']}",
        "environment: WANDB_PROJET has no effect: W&B has no such variable",
    ]
    assert not notices({"WANDB_MODE": "dryrun"}, {}, "offline")
    assert notices({"WANDB_MODE": "shared"}, {}, "online")


@pytest.mark.parametrize(
    "name", ["team/proj", "a:b", "a\\b", "50%", "why?", "#1", "p" * 129, "p" * 128, "a b", "ü-1"]
)
def test_a_project_is_refused_exactly_if_wandb_refuses_it(name) -> None:
    try:
        wandb.Settings(project=name)
        accepted = True
    except Exception:
        accepted = False
    assert (not name_problems({"wandb_project": ("--wandb_project", name)})) == accepted


@pytest.mark.parametrize("tags", ["a, b", "t" * 64, "a," + "t" * 65])
def test_tags_are_refused_exactly_if_wandb_refuses_them(tags) -> None:
    try:
        wandb.Settings(run_tags=[each.strip() for each in tags.split(",")])
        accepted = True
    except Exception:
        accepted = False
    assert (not name_problems({"wandb_tags": ("--wandb_tags", tags)})) == accepted


def test_flags_precede_the_environment_which_precedes_the_resumed_run(inputs, tmp_path) -> None:
    base = {"WANDB_MODE": "offline", "WORLD_SIZE": "1"}
    flags = f"--run_dir {tmp_path}/run"
    first = {**base, "WANDB_PROJECT": "mine", "WANDB_NAME": "one", "WANDB_RUN_GROUP": "seeds"}
    plan = check.check(command(inputs, f"{flags} --wandb_group given"), first)
    assert plan.settings.wandb_project == "mine" and plan.settings.wandb_name == "one"
    assert plan.settings.wandb_group == "given"
    (line,) = [line for line in plan.notices if "WANDB_RUN_GROUP" in line]
    assert "has no effect" in line and "--wandb_group is given" in line
    (tmp_path / "run").mkdir()
    write_record(tmp_path / "run", plan)
    resumed = check.check(command(inputs, flags), base).settings
    assert (resumed.wandb_project, resumed.wandb_name) == ("mine", "one")
    again = check.check(command(inputs, flags), {**base, "WANDB_PROJECT": "other"}).settings
    assert again.wandb_project == "other"
    replayed = command(inputs, f"--settings {tmp_path}/run/run.json --run_dir {tmp_path}/new")
    plan = check.check(replayed, {**base, "WANDB_PROJECT": "other"})
    assert plan.settings.wandb_project == "mine", "the file chose it"
    assert any("WANDB_PROJECT has no effect" in line for line in plan.notices)


def test_values_that_wandb_or_its_server_refuses_are_refused_before_the_run(inputs) -> None:
    """Some in the environment, also for another machine; W&B would end at the first of them."""
    bad = {
        "WANDB_PROJECT": "team/proj", "WANDB_ENTITY": "team/x", "WANDB_NAME": "n" * 129,
        "WANDB_RUN_GROUP": "g" * 200, "WANDB_TAGS": "t" * 65, "WANDB_JOB_TYPE": "j" * 65,
        "WANDB_BASE_URL": "wandb.example", "WANDB_STRICT": "maybe", "WANDB_API_KEY": " secret",
        "WANDB__SKIP_TRANSACTION_LOG": "true",
    }  # fmt: skip
    with pytest.raises(ConfigError) as refused:
        check.check(command(inputs, "--check --world_size 2 --wandb offline"), bad)
    lines = refused.value.problems
    for variable in bad:
        assert sum(line.startswith(f"environment: {variable}:") for line in lines) == 1, variable
    assert len(lines) == len(bad) and "secret" not in str(refused.value)
    check.check(command(inputs, "--check --world_size 2 --wandb off"), bad)


def test_the_copy_of_a_run_has_its_names_or_those_of_the_environment(tmp_path, monkeypatch) -> None:
    run_dir, lines = unused_run(tmp_path / "run", monkeypatch), []
    row = {"step": 1, "tokens": 10, "train/loss": 2.0}
    (run_dir / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    for name, value in (("NAME", "second"), ("PROJECT", "other"), ("NOTES", "a seed")):
        monkeypatch.setenv(f"WANDB_{name}", value)
    monkeypatch.setenv("WANDB_RUN_ID", "abc")
    (run_id,) = wandb_sync(run_dir, mode="offline", entity="team", log=lines.append)
    run = of_kind(wandb_runs(run_dir)[run_id], "run")[-1]
    assert (run.project, run.entity, run.display_name) == ("mine", "team", "second")
    assert run.notes == "a seed" and run_id != "abc"
    assert [line for line in lines if "WANDB_PROJECT has no effect: run.json" in line]
    assert [line for line in lines if "WANDB_RUN_ID has no effect" in line]
    with pytest.raises(ConfigError, match="--project: a/b: W&B refuses /"):
        wandb_sync(run_dir, mode="offline", project="a/b")


def test_the_project_of_wandbs_own_settings_file_is_used(tmp_path, monkeypatch) -> None:
    """`wandb init` writes it; a default of zerolm's would replace it."""
    run_dir = unused_run(tmp_path / "run", monkeypatch)
    record = json.loads((run_dir / "run.json").read_text())
    del record["settings"]["wandb_project"]
    (run_dir / "run.json").write_text(json.dumps(record))
    (run_dir / "metrics.jsonl").write_text('{"step": 1, "tokens": 10}\n')
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "settings").write_text("[default]\nproject = from-file\n")
    (first,) = wandb_sync(run_dir, mode="offline", log=lambda line: None)
    (tmp_path / "wandb" / "settings").unlink()
    (second,) = wandb_sync(run_dir, mode="offline", log=lambda line: None)
    runs = wandb_runs(run_dir)
    projects = [of_kind(runs[run_id], "run")[-1].project for run_id in (first, second)]
    assert projects == ["from-file", "zerolm"]
