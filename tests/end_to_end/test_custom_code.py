"""`yes | COMMAND` on tokenizers, models and exports with Python code: nothing runs or asks."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import malicious, texts
from tests.end_to_end.recipe import profile, recipe
from tests.launching import LLAMA, ROOT, command, environment, run_ranks, write_json

PYTHON = [sys.executable, "-m"]
STEPS = 2


@pytest.fixture(scope="module")
def attacked(tmp_path_factory) -> Path:
    """A trained and exported run, and copies of all that it was made of, with code."""
    base = tmp_path_factory.mktemp("attacked")
    good = texts.write_tokenizer(base / "tokenizer")
    documents = "".join(json.dumps({"text": text}) + "\n" for text in texts.paragraphs()[:400])
    (base / "text.jsonl").write_text(documents)
    call(PYTHON, "data_prep", "tokenize", "--input", base / "text.jsonl", "--tokenizer", good,
         "--output", base / "shards")  # fmt: skip
    write_json(base / "model.json", LLAMA)
    profile(base / "ds.json", 2, bf16=False)
    done = run_ranks(1, *flags(base, "run"))
    assert done.returncode == 0, done.stdout
    call(PYTHON, "zerolm", "export", base / "run", base / "model")

    mark = base / "mark"
    shutil.copytree(good, base / "evil_tokenizer")
    malicious.add_code(base / "evil_tokenizer", mark)
    malicious.model_config(base / "evil_config", mark, "custom")
    malicious.model_config(base / "evil_llama", mark, "llama")
    shutil.copytree(base / "model", base / "evil_model")
    malicious.add_code(base / "evil_model", mark, "llama")
    shutil.copytree(base / "shards", base / "evil_shards")
    malicious.add_code(base / "evil_shards" / "tokenizer", mark)
    shutil.copytree(base / "run", base / "evil_run")
    record = json.loads((base / "run" / "run.json").read_text())
    record["settings"]["data"] = [str(base / "evil_shards")]
    record["settings"]["run_dir"] = str(base / "evil_run")
    write_json(base / "evil_run" / "run.json", record)
    (base / "prompts.txt").write_text("The for statement\n")
    tokenize = {"tokenizer": str(base / "evil_tokenizer"), "val_fraction": 0.2}
    sources = {"web": {"input": [str(base / "text.jsonl")]}}
    write_json(base / "recipe.json", {"output": "out", "sources": sources, "tokenize": tokenize})
    texts.write_items(base / "items.jsonl", 4)
    texts.write_task(base / "tasks", base / "items.jsonl")
    return base


def flags(base: Path, run: str, shards: str = "shards", model: str = "model.json") -> list[object]:
    return recipe(base / model, base / shards, base / run, base / "ds.json", STEPS, micro=4)


def call(*words: object) -> None:
    argv = [str(word) for part in words for word in (part if isinstance(part, list) else [part])]
    done = subprocess.run(
        argv, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def attacks(base: Path) -> dict[str, tuple[list[object], str]]:
    """Return {name: (command, what its output says)}."""
    data, zerolm, launcher = ([*PYTHON, name] for name in ("data_prep", "zerolm", "launch"))
    tokenizer = ["--input", base / "text.jsonl", "--tokenizer", base / "evil_tokenizer"]
    pretrain = [sys.executable, ROOT / "pretrain.py"]
    no_code, no_model = (
        "auto_map: refers to the tokenizer's Python code",
        "named in auto_map is never executed",
    )
    other_files = "custom.py: is not in the manifest"
    prompts = ["--prompts", base / "prompts.txt"]
    hellaswag = ["--hellaswag", base / "items.jsonl"]
    tasks = ["--tasks", "local_hellaswag", "--eval_task_path", base / "tasks"]
    return {
        "data tokenize": ([*data, "tokenize", *tokenizer, "--output", base / "out"], no_code),
        "data compare-tokenizers": ([*data, "compare-tokenizers", *tokenizer], no_code),
        "data run --check": ([*data, "run", base / "recipe.json", "--check"], no_code),
        "data run": ([*data, "run", base / "recipe.json"], no_code),
        "data verify": ([*data, "verify", base / "evil_shards"], other_files),
        "data inspect": ([*data, "inspect", base / "evil_shards", "--document", 3], other_files),
        "data stats": ([*data, "stats", base / "evil_shards"], ""),
        "pretrain.py --check": (
            [*pretrain, *flags(base, "new", model="evil_config/config.json"), "--check"], no_model
        ),
        "pretrain.py --check, a type of transformers": (
            [*pretrain, *flags(base, "new", model="evil_llama/config.json"), "--check"],
            "the model's code, which is never executed",
        ),
        "pretrain.py --check --prompts": (
            [*pretrain, *flags(base, "new", "evil_shards"), *prompts, "--check"], other_files
        ),
        "deepspeed pretrain.py --prompts": (
            command(1, *flags(base, "new", "evil_shards"), *prompts), other_files
        ),
        "plan": (
            [*launcher, "plan", "--model_config", base / "evil_config/config.json",
             "--deepspeed_config", base / "ds.json", "--devices", 8], no_model,
        ),
        "doctor": (
            [*launcher, "doctor", "--",
             *flags(base, "new", "evil_shards", "evil_llama/config.json")], "",
        ),
        "render slurm": (
            [*launcher, "render", "slurm", "--nodes", 1, "--devices_per_node", 8, "--",
             *flags(base, "new", model="evil_config/config.json")], "",
        ),
        "export": ([*zerolm, "export", base / "evil_run", base / "exported"], other_files),
        "evaluate --hellaswag": ([*zerolm, "evaluate", base / "evil_model", *hellaswag], no_code),
        "evaluate --tasks": ([*zerolm, "evaluate", base / "evil_model", *tasks], no_code),
        "decode-batch": ([*zerolm, "decode-batch", base / "evil_run", "--step", 1], other_files),
        "report": ([*zerolm, "report", base / "evil_run"], ""),
        "upload": ([*zerolm, "upload", base / "evil_run", f"file://{base}/store"], ""),
        "restore": ([*zerolm, "restore", f"file://{base}/store", base / "restored"], ""),
    }  # fmt: skip


@pytest.mark.soak
def test_nothing_runs_and_nothing_asks(attacked) -> None:
    """For each command: its exit code, and the line that names the code."""
    failures = []
    for name, (argv, expected) in attacks(attacked).items():
        yes = subprocess.Popen(["yes"], stdout=subprocess.PIPE)
        try:
            done = subprocess.run(
                list(map(str, argv)), cwd=ROOT, env=environment(), stdin=yes.stdout, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300, check=False,
            )  # fmt: skip
        finally:
            yes.kill()
            yes.wait()
            yes.stdout.close()
        executed = (attacked / "mark").exists()
        (attacked / "mark").unlink(missing_ok=True)
        asked = "[y/N]" in done.stdout or "trust_remote_code" in done.stdout
        line = next((each for each in done.stdout.splitlines() if expected in each), "")
        print(f"| {name} | {done.returncode} | executed: {executed} | asked: {asked} | "
              f"{line.replace(str(attacked), '')[:110] if expected else ''} |")  # fmt: skip
        refused = bool(expected) and "a type of" not in name  # its code is not needed
        if executed or asked or not line or refused != bool(done.returncode):
            failures.append(f"{name}: exit code {done.returncode}\n{done.stdout[-2000:]}")
    assert not failures, "\n".join(failures)
