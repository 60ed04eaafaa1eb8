"""`plan --probe`: three real steps of the real profile on this machine, beside what was predicted.

pretrain.py runs under the `deepspeed` launcher on tokens made up for it, counts what each rank
keeps (zerolm/train/instrumentation.py) and times its steps. Its directory is removed afterwards.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
from dataclasses import dataclass
from pathlib import Path

from launch.plan import hardware
from zerolm.common import processes
from zerolm.common.errors import ConfigError
from zerolm.common.run_files import RunFiles
from zerolm.common.shipped import SCRIPT
from zerolm.common.values import read_json, shown_bytes
from zerolm.config.settings import Settings
from zerolm.ds_config.profile import Profile
from zerolm.model.activation_checkpointing import flag_words
from zerolm.model.model import Model
from zerolm.plan import memory
from zerolm.plan.rank_share import config_of_rank, shapes_of_rank

STEPS = 3
MARK = "ZEROLM_PROBE"
STATES = ("weights", "gradients", "optimizer", "master")


@dataclass(frozen=True)
class Probe:
    """What was measured, and what was predicted of it.

    Attributes:
        counted: bytes of the rank that keeps most, by component.
        predicted: bytes of model states of a rank by component, host and device together.
        peak_bytes: most that the device's allocator gave a rank; None on a CPU.
        predicted_peak_bytes: of the device, without the margin.
        step_seconds: of the fastest step: the first ones load kernels.
        checkpoint_bytes: on the disk.
        device: the name that its driver gives it, "cpu" on a CPU.
    """

    ranks: int
    counted: dict[str, int]
    predicted: dict[str, int]
    peak_bytes: int | None
    predicted_peak_bytes: int
    activation_bytes: int
    step_seconds: float
    batch_tokens: int
    flops_per_token: float
    checkpoint_bytes: int
    predicted_checkpoint_bytes: int
    device: str

    @property
    def tokens_per_second(self) -> float:
        return self.batch_tokens / self.step_seconds

    @property
    def states_ratio(self) -> float:
        """Return measured over predicted model states."""
        return sum(self.counted[name] for name in STATES) / sum(self.predicted.values())

    @property
    def memory_ratio(self) -> float:
        """Return measured over predicted memory: the allocator's peak, or the states on a CPU."""
        if self.peak_bytes is None:
            return self.states_ratio
        return self.peak_bytes / self.predicted_peak_bytes

    @property
    def mfu(self) -> float | None:
        """Return the share of the peak of a known device, None on others."""
        found = hardware.recognise(self.device)
        peak = found.bf16 or found.fp16 if found is not None else None
        if peak is None:
            return None
        return self.flops_per_token * self.tokens_per_second / (self.ranks * peak)


def probe(
    model: Model, settings: Settings, ds_path: str, ranks: int, timeout_seconds: float
) -> Probe:
    """Run the steps, and compare.

    Args:
        settings: as given for the plan; of its sizes the sequence and the micro-batch are kept.
        ranks: devices of this machine to use.
        timeout_seconds: after which the run is ended.

    Raises:
        ConfigError: the run did not come to its end; what it said is in it.
    """
    with tempfile.TemporaryDirectory(prefix="zerolm-probe-") as name:
        directory = Path(name)
        words = _words(model, settings, ds_path, ranks, directory)
        _launch(words, ranks, directory, timeout_seconds)
        return _measured(model, directory, ranks)


def _words(
    model: Model, settings: Settings, ds_path: str, ranks: int, directory: Path
) -> list[str]:
    """Return pretrain.py's flags for three steps of two micro-batches, and write their tokens."""
    seq_len = settings.seq_len or 128
    micro = settings.micro_batch_size or 1
    batch = 2 * micro * Profile.read(ds_path).layout(ranks).replicas * seq_len
    _write_tokens(directory / "shards", model, (STEPS + 2) * batch)
    (directory / "counts").mkdir()
    words = ["--data", str(directory / "shards"), "--run_dir", str(directory / "run")]
    words += ["--model_config", model.path, "--deepspeed_config", ds_path]
    words += ["--seq_len", str(seq_len), "--micro_batch_size", str(micro)]
    words += ["--batch_tokens", str(batch), "--total_tokens", str(STEPS * batch)]
    words += ["--attn_implementation", settings.attn_implementation]
    words += ["--log_interval", "1", "--checkpoint_interval", str(1000), "--wandb", "off"]
    return words + flag_words(settings.gradient_checkpointing)


def _write_tokens(directory: Path, model: Model, count: int) -> None:
    """Write documents of uniformly random tokens: what they are changes neither memory nor time."""
    import numpy as np

    from zerolm.shards.writer import ShardWriter

    vocabulary = model.config.get_text_config().vocab_size
    generator = np.random.default_rng(0)
    about = {"name": "made up", "fingerprint": "made up", "files": []}
    with ShardWriter(directory, vocab_size=vocabulary, eos_id=0, tokenizer=about) as writer:
        for start in range(0, count, 4096):
            ids = generator.integers(1, vocabulary, min(4096, count - start))
            writer.add(np.append(ids, 0))


def _launch(words: list[str], ranks: int, directory: Path, timeout_seconds: float) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", str(ranks)]
    command += ["--master_port", str(port), str(SCRIPT), *words]
    mark = uuid.uuid4().hex
    environment = {**os.environ, MARK: mark, "ZEROLM_MEMORY_PROBE": str(directory / "counts")}
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=timeout_seconds)
        code = process.returncode
    except subprocess.TimeoutExpired:
        said, code = "", None
    finally:
        for pid in processes.marked_pids(f"{MARK}={mark}"):  # also what outlived its launcher
            processes.signal_marked(pid, signal.SIGKILL, f"{MARK}={mark}")
        process.wait()
    if code is None:
        raise ConfigError(
            f"command line: --probe: no end after {timeout_seconds:g} s. Use a smaller model, or "
            f"give --probe_timeout."
        )
    if code != 0:
        kept = "\n".join(said.strip().splitlines()[-15:])
        raise ConfigError(f"command line: --probe: the run ended with exit code {code}:\n{kept}")


def _measured(model: Model, directory: Path, ranks: int) -> Probe:
    files = RunFiles(directory / "run")
    record = read_json(files.record, "the record of the probe's run")
    profile, settings = Profile.parse(record["ds_config"]), record["settings"]
    counts = [json.loads(path.read_text()) for path in (directory / "counts").glob("rank-*.json")]
    counted = max(counts, key=lambda one: sum(one[name] for name in STATES))
    rows = [json.loads(line) for line in files.metrics.read_text().splitlines()]
    seconds = [row["throughput/step_seconds"] for row in rows if "throughput/step_seconds" in row]
    peaks = [row["memory/peak_bytes"] for row in rows if row.get("memory/peak_bytes")]
    states, layout = memory.model_states(model.shapes, profile, ranks), profile.layout(ranks)
    shapes, _ = shapes_of_rank(model.shapes, layout)
    kept = memory.activation_bytes(
        config_of_rank(model.config, layout),
        settings["seq_len"] // layout.sequence,
        profile.precision,
        settings["gradient_checkpointing"],
        settings["micro_batch_size"],
        settings.get("loss_chunk_tokens") or 0,
    )
    checkpoints = (path for path in files.checkpoints.rglob("*") if path.is_file())
    device = _device_name()
    from zerolm.model.flops import flops_per_token

    return Probe(
        ranks=ranks,
        counted={name: counted[name] for name in (*STATES, "buffers")},
        predicted={
            name: getattr(states, name) + getattr(states, f"host_{name}") for name in STATES
        },
        peak_bytes=int(max(peaks)) if peaks and device != "cpu" else None,
        predicted_peak_bytes=states.device + sum(memory.buffer_bytes(shapes, profile)) + kept,
        activation_bytes=kept,
        step_seconds=min(seconds),
        batch_tokens=settings["batch_tokens"],
        flops_per_token=flops_per_token(model.config, model.shapes, settings["seq_len"]),
        checkpoint_bytes=sum(path.stat().st_size for path in checkpoints),
        predicted_checkpoint_bytes=memory.checkpoint_bytes(model.shapes, profile),
        device=device,
    )


def _device_name() -> str:
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu"


def local_ranks() -> int:
    """Return how many devices this machine has, 1 on a CPU."""
    import torch

    return max(1, torch.cuda.device_count())


def as_text(found: Probe) -> str:
    """Return what was measured beside what was predicted, a line each."""
    lines = [f"probe: {STEPS} steps on {found.ranks} x {found.device}"]
    lines.append(f"{'bytes of a rank':<24}{'predicted':>12}{'measured':>12}{'error':>9}")

    def row(name: str, predicted: float, measured: float) -> None:
        error = f"{predicted / measured - 1:+.2%}" if measured else ""
        said = f"{shown_bytes(predicted):>12}{shown_bytes(measured):>12}{error:>9}"
        lines.append(f"{name:<24}{said}")

    for name in STATES:
        row(name, found.predicted[name], found.counted[name])
    row("model states", sum(found.predicted.values()), sum(found.counted[n] for n in STATES))
    if found.peak_bytes is not None:
        row("device, at its peak", found.predicted_peak_bytes, found.peak_bytes)
    row("checkpoint, all ranks", found.predicted_checkpoint_bytes, found.checkpoint_bytes)
    rate = f"{found.tokens_per_second:,.0f} tokens/s"
    share = f", {found.mfu:.1%} of the peak" if found.mfu is not None else ""
    lines.append(f"step {found.step_seconds:.3g} s, {rate}{share}")
    return "\n".join(lines)
