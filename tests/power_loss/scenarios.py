"""Writers whose power is cut, and what must be true of every disk that this may leave.

`Run` is pretrain.py on two ranks, killed once and resumed: its checkpoints and its records.
`Shards` is a tokenization with held-out documents, `Divided` a copy of its shards.
"""

import copy
import gzip
import json
import shutil
import subprocess
import sys
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from tests import ROOT
from tests.data_prep.encode.golden_corpus import golden_texts, write_golden_tokenizer
from tests.end_to_end.recipe import profile, recipe
from tests.fuzz.guard import call
from tests.launching import LLAMA, environment, launch, write_json, write_shards
from tests.power_loss.disk import Disk, Tree, read_directory, tree_of, write_tree
from tests.power_loss.recording import Operation, Recorder
from zerolm.checkpoint import load
from zerolm.preflight import check
from zerolm.run_dir.files import CHECKPOINT_NAME, MANIFEST, RunFiles, checkpoint_step
from zerolm.run_dir.jsonl import EventRow, MetricsRow, parse_row, read_rows
from zerolm.run_dir.records import find_run_json, read_rollbacks
from zerolm.tracking.run_log import RunLog

STEPS, SAVE, KILLED = 12, 2, 7
SLOW_CHECKS = 20  # disks, of which one is also given to `status` and `--check`
NUM_DOCUMENTS = 300


class Scenario(ABC):
    """A writer and its checks.

    Attributes:
        operations: what it has done, all below `directory`.
    """

    name = ""

    def __init__(self, work: Path):
        self.work, self.directory = work, work / "recorded"
        self.directory.mkdir(parents=True)
        self.prepare()
        self._before = read_directory(self.directory)
        recorder = Recorder(work, self.directory)
        self.write(recorder.variables)
        self.operations: list[Operation] = recorder.operations()
        disk = self.disk()
        while disk.at < len(self.operations):
            disk.advance()
        assert disk.tree() == tree_of(self.directory), "something was not recorded"
        self.operations = [each for each in self.operations if self.matters(each.path)]
        self.directory.rename(work / "final")
        self.learn()

    def disk(self) -> Disk:
        """Return the disk before the first operation."""
        return Disk(self.operations, copy.deepcopy(self._before))

    def recovers(self, tree: Tree, at: int) -> str:
        """Let the next start find what a power loss after `at` operations has left.

        Returns:
            What became of it.

        Raises:
            AssertionError, ZerolmError: it is not what it must be.
        """
        write_tree(tree, self.directory)
        try:
            return self.check(at)
        finally:
            shutil.rmtree(self.directory)

    # ---- Of each writer

    @abstractmethod
    def prepare(self) -> None:
        """Write its inputs, outside of the directory."""

    @abstractmethod
    def write(self, variables: dict[str, str]) -> None:
        """Let it write, in processes with these variables."""

    def matters(self, path: str) -> bool:
        """Return whether the next start depends on a path."""
        return True

    @abstractmethod
    def learn(self) -> None:
        """Note what it has published, and when."""

    @abstractmethod
    def check(self, at: int) -> str:
        """Do as `recovers`, with the directory in place."""


# ---- A run


class Run(Scenario):
    """A run on two ranks that is killed, and started again to its end."""

    name = "checkpoints and records of a run"

    def prepare(self) -> None:
        inputs = self.work / "inputs"
        inputs.mkdir()
        llama = write_json(inputs / "llama.json", LLAMA)
        corpus = write_shards(inputs / "corpus")
        ds_json = profile(inputs / "ds.json", 2, bf16=False)
        self.run_dir = self.directory / "runs" / "first"
        self.flags = [
            *recipe(llama, corpus, self.run_dir, ds_json, STEPS, micro=2),
            "--checkpoint_interval", SAVE, "--checkpoint_keep", 2, "--wandb", "off",
            "--val_data", write_shards(inputs / "held_out", 40, seed=1), "--eval_interval", 4,
        ]  # fmt: skip

    def write(self, variables: dict[str, str]) -> None:
        killed = launch(2, *self.flags, FAULT=f"step.begin:0:{KILLED}:kill", **variables)
        assert killed.returncode != 0, killed.stdout[-3000:]
        done = launch(2, *self.flags, **variables)
        assert done.returncode == 0, done.stdout[-3000:]

    def matters(self, path: str) -> bool:
        return "/ranks/" not in path  # heartbeats, one a second

    def learn(self) -> None:
        """Note each checkpoint as it was published, and when the run had said so."""
        self.checks = 0
        self.published: dict[str, list[Tree]] = {}
        self.announced: list[tuple[int, int]] = []
        prefix = str((self.run_dir / "checkpoints").relative_to(self.directory))
        disk = self.disk()
        while disk.at < len(self.operations):
            operation = disk.advance()
            name = Path(operation.other or operation.path).name
            if operation.kind == "r" and operation.other == f"{prefix}/{name}":
                tree = {
                    path.removeprefix(f"{operation.other}/"): content
                    for path, content in disk.tree().items()
                    if path.startswith(f"{operation.other}/")
                }
                if MANIFEST in tree and CHECKPOINT_NAME.fullmatch(name):
                    self.published.setdefault(name, []).append(tree)
            for line in operation.data.splitlines() if name == "events.jsonl" else []:
                row = parse_row(line, EventRow)
                if row["event"] == "checkpoint":
                    self.announced.append((disk.at, row["step"]))
        final = self.work / "final" / self.run_dir.relative_to(self.directory)
        self.losses = _losses(final)
        assert len(self.announced) >= STEPS // SAVE - 2, self.announced
        assert len(self.losses) == STEPS, self.losses

    def check(self, at: int) -> str:
        promised = max((step for when, step in self.announced if when <= at), default=0)
        files = RunFiles(self.run_dir)
        if not self.run_dir.is_dir():
            assert not promised, f"step {promised} was announced, and there is no run"
            return "no run yet"
        read_rollbacks(self.run_dir)
        record = find_run_json(self.run_dir)
        found, damage = load.newest_complete(self.run_dir, 0, 1)
        assert not damage, f"published, but damaged: {damage}"
        step = found.progress.step if found is not None else 0
        assert step >= promised, f"step {promised} was announced, and step {step} is found"
        if found is not None:
            tree = tree_of(found.directory)
            assert tree in self.published[found.directory.name], f"{found.directory} differs"
            assert record is not None, f"{files.record} is missing, with a checkpoint"
        if files.latest.exists():
            checkpoint_step(files.latest.read_text().strip())
        log = RunLog(self.run_dir, step, writes=True)
        log.close("")
        assert log.lacks_rows is None, log.lacks_rows
        losses = _losses(self.run_dir)
        wanted = {each: self.losses[each] for each in range(1, step + 1)}
        assert losses == wanted, f"metrics up to step {step}: {losses}, not {wanted}"
        self.checks += 1
        if self.checks % SLOW_CHECKS == 0:
            if record is not None:
                code, output = call("status", self.run_dir)
                assert code == 0, output
            check.check([str(flag) for flag in self.flags], {})
        return f"resumes at step {step}" if found else "starts anew"


def _losses(run_dir: Path) -> dict[int, float]:
    """Return {step: training loss} of the readable lines of a run."""
    rows = read_rows(RunFiles(run_dir).metrics, MetricsRow, key="train/loss")
    return {row["step"]: row["train/loss"] for row in rows}


# ---- Token shards


class Shards(Scenario):
    """A tokenization into two outputs, in two processes, with many parts and shards."""

    name = "token shards"
    outputs = ("shards", "held-out")

    def prepare(self) -> None:
        corpus = self.work / "corpus"
        corpus.mkdir()
        texts = golden_texts(NUM_DOCUMENTS, seed=5)
        for number in range(2):
            lines = "".join(json.dumps({"text": text}) + "\n" for text in texts[number::2])
            if number:
                content = gzip.compress(lines.encode(), 1, mtime=0)
                (corpus / f"{number}.jsonl.gz").write_bytes(content)
            else:
                (corpus / f"{number}.jsonl").write_bytes(lines.encode())
        write_golden_tokenizer(self.work / "tokenizer")
        (self.directory / "data").mkdir()
        data = self.directory / "data"
        self.words = [
            "tokenize", "--input", str(corpus), "--tokenizer", str(self.work / "tokenizer"),
            "--output", str(data / "shards"), "--val_output", str(data / "held-out"),
            "--val_fraction", "0.1",
            "--shard_tokens", "20000", "--workers", "2",
        ]  # fmt: skip
        self.again = [*self.words[:-1], "1"]

    def write(self, variables: dict[str, str]) -> None:
        _data_command(self.words, variables)

    def learn(self) -> None:
        final = self.work / "final" / "data"
        self.wanted = {name: _published(final / name) for name in self.outputs}

    def check(self, at: int) -> str:
        """Every output is complete or no data; the same command then makes it."""
        data = self.directory / "data"
        complete = []
        for name in self.outputs:
            if not (data / name / "manifest.json").exists():
                assert at < len(self.operations), f"{name} is lost after the command has ended"
                continue
            code, output = call("data", "verify", data / name)
            assert code == 0, f"published, but damaged: {output}"
            assert _published(data / name) == self.wanted[name], f"{name} differs"
            complete.append(name)
        if len(complete) == len(self.outputs):
            return "complete"
        for name in complete:  # as the command asks
            code, output = call("data", *self.again)
            assert code == 2 and "already holds token shards" in output, output
            shutil.rmtree(data / name)
        code, output = call("data", *self.again)
        assert code == 0, output
        assert {name: _published(data / name) for name in self.outputs} == self.wanted
        found = "some of the outputs are" if complete else "nothing is"
        resumed = "resuming" in output
        return f"{found} published, and the command {'resumes' if resumed else 'starts anew'}"


class Divided(Shards):
    """Finished shards, divided into two parts."""

    name = "shards of zerolm data split"
    outputs = ("parts/train", "parts/val")

    def prepare(self) -> None:
        super().prepare()
        source = self.work / "source"
        words = list(self.words)
        words[words.index("--output") + 1] = str(source)
        words[words.index("--val_output") + 1] = str(self.work / "source-val")
        _data_command(words, {})
        output = str(self.directory / "data" / "parts")
        parts = ["--parts", "train=0.7,val=0.3", "--shard_tokens", "9000"]
        self.words = ["split", str(source), "--output", output, *parts]
        self.again = self.words


def _data_command(words: list[str], variables: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "data_prep", *words], cwd=ROOT, env=environment(**variables),
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def _published(directory: Path) -> dict[str, Any]:
    """Return the files of an output, its manifest without what depends on the command."""
    tree = tree_of(directory)
    found: dict[str, Any] = {
        path: content
        for path, content in tree.items()
        if path.partition("/")[0] not in (".unfinished", "parts")  # removed after publishing
    }
    manifest = json.loads(found["manifest.json"])
    for key in ("command", "digest", "encoder"):
        manifest.pop(key, None)
    return {**found, "manifest.json": manifest}
