"""Config files that are edited or deleted while a run trains: its restarts read what they were."""

from launch.supervise.config_files import ConfigFiles
from zerolm.run_dir.files import RunFiles


def test_files_that_change_are_replaced_by_copies_until_they_are_as_before(tmp_path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    settings, profile, config = (
        tmp_path / "settings.json", tmp_path / "ds.json", model / "config.json",
    )  # fmt: skip
    settings.write_text(f'{{"deepspeed_config": "{profile}", "seed": 1}}')
    profile.write_text("{}")
    config.write_text('{"model_type": "llama"}')
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    command = ["deepspeed", "pretrain.py", "--settings", str(settings), "--model_config"]
    command += [str(model), "--run_dir", str(run_dir)]
    lines: list[str] = []
    files = ConfigFiles(command, run_dir, lines.append)
    assert files.pinned(command) == command and not RunFiles(run_dir).configs.exists()

    original = settings.read_text()
    settings.write_text(original[:9])
    profile.unlink()
    config.write_text("{}")
    copies = {name: RunFiles(run_dir).kept_config(name) for name in
              ("deepspeed_config", "model_config", "settings")}  # fmt: skip
    for _ in range(2):
        added = [word for name, path in copies.items() for word in (f"--{name}", str(path))]
        assert files.pinned(command) == command + added
    assert copies["settings"].read_text() == original
    assert copies["deepspeed_config"].read_text() == "{}"
    assert "llama" in copies["model_config"].read_text()
    assert len(lines) == 3 and f"{profile} has changed or cannot be read" in lines[0]

    settings.write_text(original)
    profile.write_text("{}")
    assert files.pinned(command) == [*command, "--model_config", str(copies["model_config"])]


def test_the_runs_own_record_and_missing_files_are_left_to_the_run(tmp_path) -> None:
    record = RunFiles(tmp_path).record
    record.write_text(f'{{"settings": {{"run_dir": "{tmp_path}", "deepspeed_config": "gone"}}}}')
    command = ["deepspeed", "pretrain.py", "--settings", str(record)]
    files = ConfigFiles(command, tmp_path, print)
    record.write_text("{}")
    assert files.pinned(command) == command
