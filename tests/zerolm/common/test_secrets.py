"""No credential is printed or written, wherever it was planted."""

import subprocess
import sys

import pytest

import pretrain
from data_prep.__main__ import main as data_prep
from launch.__main__ import main as launch
from tests.launching import environment, run_ranks, write_json
from tests.zerolm.preflight.preflight_inputs import command, write_inputs
from zerolm.common import jsonl
from zerolm.common.errors import ConfigError, ZerolmError
from zerolm.common.secrets import HIDDEN, has_credentials, masked
from zerolm.common.store import StoreError
from zerolm.common.url import url_problem
from zerolm.config.settings import FLAGS

PLANTED = "Wjalr/XUtnFEMI+K7MDENG"  # as the keys of S3, it may contain a slash
URL = f"s3://AKIDEXAMPLE:{PLANTED}@bucket/first"
VARIABLES = {
    "AWS_SECRET_ACCESS_KEY": "planted-aws-secret",
    "HF_TOKEN": "planted-hf-token",
    "WANDB_API_KEY": "planted0" * 5,
    "HTTPS_PROXY": f"http://user:{PLANTED}@127.0.0.1:1",
    "COMET_API_KEY": "planted-comet-key",
    "AZURE_STORAGE_CONNECTION_STRING": "planted;AccountKey=planted",
}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"{URL}: no", f"s3://{HIDDEN}@bucket/first: no"),
        ("https://u:p@host:8080/a?b=1", f"https://{HIDDEN}@host:8080/a?b=1"),
        ("https://token@host/a", f"https://{HIDDEN}@host/a"),
        (f"{URL}=0.7,{URL}=0.3", f"s3://{HIDDEN}@bucket/first=0.7,s3://{HIDDEN}@bucket/first=0.3"),
        (f"'{URL}', next", f"'s3://{HIDDEN}@bucket/first', next"),
        (f"s3:/A:{PLANTED}@bucket/x", f"s3:/{HIDDEN}@bucket/x"),  # as Path writes it
        ("https://h/a?sig=abc&x=1", f"https://h/a?sig={HIDDEN}&x=1"),
        ("https://h/a?X-Amz-Signature=abc", f"https://h/a?X-Amz-Signature={HIDDEN}"),
        ("use hf_abcdefghijklmnop here", f"use {HIDDEN} here"),
        ("the value planted-hf-token", f"the value {HIDDEN}"),
    ],
)
def test_credentials_are_masked(text, shown):
    assert masked(text, VARIABLES) == shown
    assert masked(shown, VARIABLES) == shown


@pytest.mark.parametrize(
    "text",
    [
        "s3://bucket/path@v1",
        "https://host:8080/a@b",
        "mail user@example.com",
        "org/kernel@v1:function",
        "ratio 3:4@5",
        "hf://datasets/org/name",
        "/etc/file: no such file",
    ],
)
def test_other_text_is_not_changed(text):
    files = {"HF_TOKEN_PATH": "/etc/file", "TOKENIZERS_PARALLELISM": "false"}
    assert masked(text, files) == text and not has_credentials(text)


@pytest.mark.parametrize("kind", [ConfigError, ZerolmError, StoreError])
def test_every_error_for_users_is_masked(kind):
    assert PLANTED not in str(kind(f"{URL}: does not exist"))


@pytest.mark.parametrize("url", [URL, "s3://u:p@b/x", "https://h/x?sig=1", "s3://key@b/x"])
def test_a_url_with_credentials_is_refused(url):
    assert "contains credentials" in url_problem(url)


def test_events_and_tracebacks_are_masked(tmp_path):
    jsonl.append_event(tmp_path, "resume", 1, reason=f"at {URL}", ranks=[{"reason": URL}])
    assert PLANTED not in (tmp_path / "events.jsonl").read_text()
    script = f"from zerolm.common.secrets import mask_tracebacks as m; m(); open({URL!r})"
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment(), capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1 and "FileNotFoundError" in done.stderr
    assert PLANTED not in done.stderr and HIDDEN in done.stderr


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def test_no_flag_of_a_run_shows_a_credential(inputs, tmp_path, monkeypatch, capsys):
    """Each flag that takes text, and a file of settings, given to --check."""
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    texts = [name for name, about in FLAGS.items() if about["kind"] == "text"]
    shown = {}
    for name in ("data", "val_data", *texts):
        pretrain.main(["--check", *command(inputs, f"--{name} {URL}")])
        shown[name] = "".join(capsys.readouterr())
    write_json(tmp_path / "settings.json", {"upload_to": URL, "data": [URL]})
    pretrain.main(["--check", "--settings", str(tmp_path / "settings.json")])
    shown["file"] = "".join(capsys.readouterr())
    assert not {key: text for key, text in shown.items() if PLANTED in text or "planted" in text}
    assert sum(HIDDEN in text for text in shown.values()) > 8


@pytest.mark.parametrize(
    ("main", "words"),
    [
        (data_prep, ["tokenize", "--input", URL, "--tokenizer", "t", "--output", "o"]),
        (data_prep, ["tokenize", "--input", "x", "--tokenizer", URL, "--output", URL]),
        (data_prep, ["run", URL, "--check"]),
        (data_prep, ["verify", URL]),
        (data_prep, ["inspect", URL, "--document", "0"]),
        (launch, ["plan", "--model_config", URL, "--deepspeed_config", URL]),
        (launch, ["plan", "--hardware", URL]),
        (launch, ["doctor", "--", "--data", URL, "--upload_to", URL]),
        (launch, ["render", "slurm", "--nodes", "1", "--devices_per_node", "1", "--",
                  "--run_dir", "r", "--data", URL]),
        (launch, ["supervise", "--", "deepspeed", "pretrain.py", "--run_dir", URL, "--data", URL]),
    ],
)  # fmt: skip
def test_no_command_shows_a_credential(main, words, capfd, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(words) != 0
    shown = "".join(capfd.readouterr())
    assert shown and PLANTED not in shown
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or PLANTED not in path.read_text(errors="replace"), path


@pytest.mark.soak
def test_a_run_writes_no_credential(inputs, tmp_path):
    """Everything that a run, its trackers and its report write, with secrets in the environment."""
    done = run_ranks(
        1, *command(inputs, f"--run_dir {tmp_path}/run --total_tokens 2048 --wandb offline"),
        **VARIABLES,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert len(files) > 10
    for secret in (PLANTED, *VARIABLES.values()):
        assert secret not in done.stdout
        assert not [path for path in files if secret.encode() in path.read_bytes()]
