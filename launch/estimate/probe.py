"""`plan --probe`: run three real steps on this machine, and compare them with the prediction.

pretrain.py runs under the `deepspeed` launcher on random tokens, counts the bytes of each rank's
tensors (zerolm/train/instrumentation.py) and times its steps. Its directory is removed afterwards.
"""

import json
import os
import signal
import subprocess
import tempfile
import uuid
from dataclasses import dataclass
from pathlib import Path

from launch.command.train import LAUNCHER
from zerolm.common import machine, processes
from zerolm.common.errors import ConfigError
from zerolm.common.records import read_json
from zerolm.common.shipped import SCRIPT, module_command
from zerolm.common.values import shown_bytes, shown_seconds
from zerolm.config.settings import Settings
from zerolm.ds_config.profile import Profile
from zerolm.model.activation_checkpointing import command_line_arguments
from zerolm.model.model import Model
from zerolm.parts.settings import FLAGS
from zerolm.plan import hardware, memory
from zerolm.plan.rank_share import config_of_rank, shapes_of_rank
from zerolm.run_dir.files import RunFiles

STEPS = 3
MARK = "ZEROLM_PROBE"
STATES = ("weights", "gradients", "optimizer", "master")


@dataclass(frozen=True)
class Probe:
    """Measured and predicted figures. Fields are JSON keys.

    Attributes:
        counted: bytes by component on the rank that uses the most.
        predicted: bytes of a rank's model states by component, on host and device together.
        peak_bytes: maximum of the device allocator over all ranks; None on a CPU.
        predicted_peak_bytes: prediction for the device, without the margin.
        step_seconds: time of the fastest step, since the first steps load kernels.
        checkpoint_bytes: size on disk.
        device: name that the driver reports, or "cpu".
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
        """Measured divided by predicted bytes of model states."""
        return sum(self.counted[name] for name in STATES) / sum(self.predicted.values())

    @property
    def memory_ratio(self) -> float:
        """Measured divided by predicted memory: the allocator's peak, or the states on a CPU."""
        if self.peak_bytes is None:
            return self.states_ratio
        return self.peak_bytes / self.predicted_peak_bytes

    @property
    def mfu(self) -> float | None:
        """Model FLOP/s utilization; None if the device is unknown."""
        found = hardware.recognize(self.device)
        peak = found.bf16 or found.fp16 if found is not None else None
        return None if peak is None else self.mfu_of(peak)

    def mfu_of(self, peak_flops: float) -> float:
        """Return the model FLOP/s utilization relative to a device's peak FLOP/s."""
        return self.flops_per_token * self.tokens_per_second / (self.ranks * peak_flops)


def probe(
    model: Model, settings: Settings, ds_path: str, ranks: int, timeout_seconds: float
) -> Probe:
    """Run the steps, and return measured and predicted figures.

    Args:
        settings: the plan's settings; budget, batch and schedule are replaced by a few short steps.
        timeout_seconds: time after which the run is killed.
    """
    with tempfile.TemporaryDirectory(prefix="zerolm-probe-") as name:
        directory = Path(name)
        flags = _prepare(model, settings, ds_path, ranks, directory)
        _launch(flags, ranks, directory, timeout_seconds)
        return _collect(model, directory, ranks, settings.kept_bytes())


def _prepare(
    model: Model, settings: Settings, ds_path: str, ranks: int, directory: Path
) -> list[str]:
    """Write token shards, and return pretrain.py's flags for three steps of two micro-batches."""
    seq_len = settings.seq_len or 128
    micro = settings.micro_batch_size or 1
    batch = 2 * micro * Profile.read(ds_path).layout(ranks).replicas * seq_len
    _write_tokens(directory / "shards", model, (STEPS + 2) * batch)
    (directory / "counts").mkdir()
    flags = ["--data", str(directory / "shards"), "--run_dir", str(directory / "run")]
    flags += ["--model_config", model.path, "--deepspeed_config", ds_path]
    flags += ["--seq_len", str(seq_len), "--micro_batch_size", str(micro)]
    flags += ["--batch_tokens", str(batch), "--total_tokens", str(STEPS * batch)]
    for name in (name for name, about in FLAGS.items() if about["probed"]):
        value = getattr(settings, name)
        if isinstance(value, bool):
            flags += [f"--{name}"] if value else []
        elif value is not None:
            flags += [f"--{name}", str(value)]
    flags += ["--log_interval", "1", "--checkpoint_interval", "1000", "--wandb", "off"]
    return flags + command_line_arguments(settings.gradient_checkpointing)


def _write_tokens(directory: Path, model: Model, count: int) -> None:
    """Write documents of uniformly random tokens; their values affect neither memory nor time."""
    import numpy as np

    from zerolm.shards.writer import ShardWriter

    vocabulary = model.config.get_text_config().vocab_size
    generator = np.random.default_rng(0)
    tokenizer = {"name": "random", "fingerprint": "random", "files": []}
    with ShardWriter(directory, vocab_size=vocabulary, eos_id=0, tokenizer=tokenizer) as writer:
        for start in range(0, count, 4096):
            ids = generator.integers(1, vocabulary, min(4096, count - start))
            writer.add(np.append(ids, 0))


def _launch(flags: list[str], ranks: int, directory: Path, timeout_seconds: float) -> None:
    """Run pretrain.py under the deepspeed launcher, and kill every process it leaves behind."""
    port = machine.free_port()
    command = module_command(LAUNCHER, "--num_gpus", ranks, "--master_port", port, SCRIPT, *flags)
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
        output, _ = process.communicate(timeout=timeout_seconds)
        code = process.returncode
    except subprocess.TimeoutExpired:
        output, code = "", None
    finally:
        for pid in processes.marked_pids(f"{MARK}={mark}"):  # some may outlive the launcher
            processes.signal_marked(pid, signal.SIGKILL, f"{MARK}={mark}")
        process.wait()
    if code is None:
        raise ConfigError(
            f"command line: --probe: the run did not finish within {timeout_seconds:g} s. Use a "
            f"smaller model, or raise --probe_timeout."
        )
    if code != 0:
        tail = "\n".join(output.strip().splitlines()[-15:])
        raise ConfigError(f"command line: --probe: the run failed with exit code {code}:\n{tail}")


def _collect(model: Model, directory: Path, ranks: int, kept_bytes: int) -> Probe:
    """Read the figures from a finished run, and predict the same figures."""
    files = RunFiles(directory / "run")
    record = read_json(files.record, "the record of the probe's run")
    profile, settings = Profile.parse(record["ds_config"]), record["settings"]
    counts = [json.loads(path.read_text()) for path in (directory / "counts").glob("rank-*.json")]
    counted = max(counts, key=lambda one: sum(one[name] for name in STATES))
    rows = [json.loads(line) for line in files.metrics.read_text().splitlines()]
    seconds = [row["throughput/step_seconds"] for row in rows if "throughput/step_seconds" in row]
    peaks = [row["memory/peak_bytes"] for row in rows if row.get("memory/peak_bytes")]
    layout = profile.layout(ranks)
    states = memory.model_states(model.shapes, profile, ranks, kept_bytes=kept_bytes)
    shapes, _ = shapes_of_rank(model.shapes, layout)
    activation_bytes = memory.activation_bytes(
        config_of_rank(model.config, layout),
        settings["seq_len"] // layout.sequence,
        profile.precision,
        settings["gradient_checkpointing"],
        settings["micro_batch_size"],
        settings.get("loss_chunk_tokens") or 0,
        settings.get("compile") or False,
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
        predicted_peak_bytes=states.device
        + sum(memory.buffer_bytes(shapes, profile))
        + activation_bytes,
        activation_bytes=activation_bytes,
        step_seconds=min(seconds),
        batch_tokens=settings["batch_tokens"],
        flops_per_token=flops_per_token(model.config, model.shapes, settings["seq_len"]),
        checkpoint_bytes=sum(path.stat().st_size for path in checkpoints),
        predicted_checkpoint_bytes=memory.checkpoint_bytes(
            model.shapes, profile, kept_bytes=kept_bytes
        ),
        device=device,
    )


def _device_name() -> str:
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu"


def local_ranks() -> int:
    """Return the number of devices of this machine, 1 without GPUs."""
    import torch

    return max(1, torch.cuda.device_count())


def as_text(found: Probe) -> str:
    """Return a table of predicted and measured figures."""
    lines = [f"probe: {STEPS} steps on {found.ranks} x {found.device}"]
    lines.append(f"{'bytes per rank':<24}{'predicted':>12}{'measured':>12}{'error':>9}")

    def row(name: str, predicted: float, measured: float) -> None:
        error = f"{predicted / measured - 1:+.2%}" if measured else ""
        cells = f"{shown_bytes(predicted):>12}{shown_bytes(measured):>12}{error:>9}"
        lines.append(f"{name:<24}{cells}")

    for name in STATES:
        row(name, found.predicted[name], found.counted[name])
    row("model states", sum(found.predicted.values()), sum(found.counted[n] for n in STATES))
    if found.peak_bytes is not None:
        row("device, peak", found.predicted_peak_bytes, found.peak_bytes)
    row("checkpoint, all ranks", found.predicted_checkpoint_bytes, found.checkpoint_bytes)
    rate = f"{found.tokens_per_second:,.0f} tokens/s"
    mfu = f", {found.mfu:.1%} MFU" if found.mfu is not None else ""
    lines.append(f"step {shown_seconds(found.step_seconds)}, {rate}{mfu}")
    return "\n".join(lines)
