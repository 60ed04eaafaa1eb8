"""No credential is printed or written, wherever it was planted."""

import ast
import re
import subprocess
import sys

import pytest

import pretrain
from data_prep.__main__ import main as data_prep
from data_prep.formats import parquet
from data_prep.read import discovery
from launch.__main__ import main as launch
from tests import tracked
from tests.documents import name_of, text_of
from tests.launching import environment, run_ranks, write_json
from tests.zerolm.preflight.preflight_inputs import command, write_inputs
from zerolm.common.errors import ConfigError, ZerolmError, reason
from zerolm.common.secrets import HIDDEN, has_credentials, masked
from zerolm.common.store import StoreError
from zerolm.common.url import url_problem
from zerolm.evaluate import hellaswag
from zerolm.export import hub as export_hub
from zerolm.parts.settings import FLAGS
from zerolm.pretrained import hub as pretrained_hub
from zerolm.run_dir import events
from zerolm.shards.tokenizer import load_auto_tokenizer

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
    events.append_event(tmp_path, "resume", 1, reason=f"at {URL}", ranks=[{"reason": URL}])
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


SECRET = "wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEYxx"
FORMS = {"value": "denied for {} in eu", "URL": "denied for https://user:{}@host/x"}


def error_at(place: int, form: str) -> OSError:
    """Return an error in which a secret begins before a character and ends after it."""
    prefix = FORMS[form].partition("{")[0]
    filling = "x" * (place - len(prefix) - 20)
    return OSError(f"{filling} {FORMS[form].format(SECRET)}")


def parts_of_a_secret(text: str) -> list[str]:
    return [SECRET[at : at + 8] for at in range(len(SECRET) - 7) if SECRET[at : at + 8] in text]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("place", [40, 100, 200, 290, 300, 500])
def test_a_secret_that_a_cut_would_shorten_is_hidden(monkeypatch, form, place):
    if form == "value":
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    for shown in (reason(error_at(place, form)), reason(str(error_at(place, form)))):
        assert len(shown) <= 300 and not parts_of_a_secret(shown)
        assert place < 500 or shown.endswith("...")


def test_a_reason_is_one_line_with_the_type_or_the_text():
    assert reason(OSError("a\n  b")) == "OSError: a b"
    assert reason(OSError("a\n  b"), named=False) == reason("a\n b") == "a b"
    assert reason(OSError(), named=False) == reason(OSError()) == "OSError"


def refuse(error: Exception):
    def call(*args, **kwargs):
        raise error

    return call


def of_the_hub_of_models(patch, error, tmp_path):
    patch.setattr("huggingface_hub.HfApi.repo_info", lambda *_, **options: None)
    patch.setattr("huggingface_hub.snapshot_download", refuse(error))
    pretrained_hub.fetch("a/b")


def of_what_the_hub_has(patch, error, tmp_path):
    patch.setattr("huggingface_hub.HfApi.repo_info", refuse(error))
    pretrained_hub.fetch("a/b")


def of_the_hub_of_data(patch, error, tmp_path):
    patch.setattr("huggingface_hub.HfApi.dataset_info", refuse(error))
    problems: list[str] = []
    list(
        discovery._find_hub(
            "a/b", re.match("(?P<name>a/b)(?P<config>)(?P<split>)", "a/b"), problems
        )
    )
    raise ConfigError(problems)


def of_a_tokenizer(patch, error, tmp_path):
    patch.setattr("huggingface_hub.HfApi.repo_info", lambda *_, **options: None)
    patch.setattr("transformers.AutoTokenizer.from_pretrained", refuse(error))
    load_auto_tokenizer("a/b", local=False)


def of_parquet(patch, error, tmp_path):
    raise ConfigError(parquet._failure(error).detail)


def of_a_push(patch, error, tmp_path):
    patch.setattr("huggingface_hub.HfApi.create_repo", refuse(error))
    export_hub.push(tmp_path, "a/b", public=False)


def of_an_item(patch, error, tmp_path):
    patch.setattr("datasets.load_dataset", refuse(error))
    hellaswag.read_items("a/b")


CALLERS = (
    of_the_hub_of_models, of_what_the_hub_has, of_the_hub_of_data, of_a_tokenizer, of_parquet,
    of_a_push, of_an_item,
)  # fmt: skip


@pytest.mark.parametrize("caller", CALLERS)
@pytest.mark.parametrize("place", [200, 275, 300])
def test_callers_show_no_part_of_a_secret(monkeypatch, caller, place, tmp_path):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with pytest.raises(ZerolmError) as refused:
        caller(monkeypatch, error_at(place, "value"), tmp_path)
    assert "x" * 50 in str(refused.value) and not parts_of_a_secret(str(refused.value))


def cuts_of_errors(source: str) -> list[int]:
    """Return the lines that cut the text of an error, directly or by a name that it was given."""
    found = []
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        errors = {each.name for each in ast.walk(function) if isinstance(each, ast.ExceptHandler)}
        errors |= {
            each.arg
            for each in function.args.args
            if each.annotation is not None
            and re.search("Error|Exception", ast.unparse(each.annotation))
        }

        def is_text(node: ast.AST, errors: set = errors) -> bool:
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("reason", "masked"):
                return False
            if isinstance(node, ast.Name):
                return node.id in errors
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                return False  # error.args
            return any(is_text(each) for each in ast.iter_child_nodes(node))

        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and is_text(node.value):
                errors |= {each.id for each in node.targets if isinstance(each, ast.Name)}
        found += [
            node.lineno
            for node in ast.walk(function)
            if isinstance(node, ast.Subscript)
            and isinstance(node.slice, ast.Slice)
            and is_text(node.value)
        ]
    return found


def test_the_text_of_an_error_is_cut_by_reason_only():
    """A credential that was cut is not recognised when the text is masked."""
    code = "def f():\n try: ...\n except OSError as error:\n  {}"
    for line in (
        "x = str(error)[:9]",
        '" ".join(f"{error}".split())[:9]',
        "x = repr(error)\n  x[:9]",
    ):
        assert cuts_of_errors(code.format(line).replace("{}", "")), line
    assert not cuts_of_errors(code.format("x = masked(str(error))[:9], error.args[1:]"))
    found = {
        name_of(path): lines
        for path in tracked("pretrain.py", "zerolm/**/*.py", "data_prep/**/*.py", "launch/**/*.py")
        if path.name != "errors.py" and (lines := cuts_of_errors(text_of(path)))
    }
    assert not found, "use zerolm.common.errors.reason"
