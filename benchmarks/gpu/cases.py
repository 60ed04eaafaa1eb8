"""The cases of benchmarks/gpu, most important first, and their commands."""

import argparse
import copy
import functools
import importlib.util
import json
import re
import sys
import tempfile
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.contenders import LOOPS, argv, launcher, pretrain

OURS, TRAINER, PLAIN = "pretrain.py", "Trainer + DeepSpeed", "plain PyTorch, compiled"
BASE = "--compile"  # the reference for single options
EXACT = "--compile zero_optimization.stage=1"  # every option that helps and changes no loss
PROFILED = f"{EXACT} --profile 3:3"
FP8 = f"{EXACT} --fp8"
SAVING = f"{EXACT} --checkpoint_interval 6 --checkpoint_keep 1"
LARGEST_MICRO_BATCH = 16  # at 2,048 tokens a sequence
STEPS = 1_000_000  # more than a case can take: it is killed before
MODELS = {
    "1.3B": "model_configs/llama-1.3b.json",
    "160M": "model_configs/llama-160m.json",
    "1.6B MoE": "model_configs/moe-1.6b.json",
    "1.3B, 16 heads": "model_configs/llama-1.3b-h128.json",
}
TOY_MODELS = {"1.3B": "model_configs/tiny.json", "160M": "model_configs/tiny.json"}
TOY_MODELS |= {"1.6B MoE": "model_configs/mixtral-tiny.json"}
TOY_MODELS |= {"1.3B, 16 heads": "model_configs/tiny.json"}
FUSED_ADAM = "fused_adam"
FIRST_CASES = 5  # of the 1.3B, before the checks
JSON = r"\d+|true|false"
# Changes to BASE, one at a time, the most effective first on one GPU. On Hopper torch 2.11 prefers
# cuDNN's attention, unless this variable is set (pytorch, aten/src/ATen/native/transformers/cuda/
# sdp_utils.cpp, `check_prefer_cudnn_attention`).
FIRST_CHANGES = (
    ("", "nothing is compiled"),
    ("--compile TORCH_CUDNN_SDPA_DEPRIORITIZED=1", "torch's FlashAttention, not cuDNN's"),
)
CHANGES = (
    ("--compile micro/2", "half of the micro-batch"),
    ("--compile micro*2", "twice the micro-batch"),
    ("--compile --loss_chunk_tokens 2048", "the loss in chunks"),
    ("--compile timers.throughput.enabled=true", "DeepSpeed's throughput timer"),
    ("--compile zero_optimization.reduce_bucket_size=500000000", "ten times the bucket"),
    (
        "--compile data_types.grad_accum_dtype=bf16 communication_data_type=bf16",
        "gradients summed in bf16: less exact",
    ),
    ("--gradient_checkpointing=selective", "recomputing norms and activation functions"),
    ("--compile --gradient_checkpointing", "recomputing complete blocks"),
)
SDPA = ("--compile --attn_implementation sdpa", "torch's attention, not FlashAttention's package")
# Other profiles, of the 160M: whether they train on a GPU at all.
PROFILES = (
    ("--compile profile=zero3", "gathered weights beside compiled blocks"),
    ("--compile profile=zero3 --fp8", "the same in fp8"),
    ("--compile profile=zero3_offload", "states and weights in host memory"),
    ("--compile profile=zero1_muon", "Muon"),
)
# By its kernel, and what `auto` takes; of the 160M.
MASKS = tuple(
    (f"--compile --document_mask --attn_implementation {kernel}", "documents apart")
    for kernel in ("auto", "varlen", "sdpa", "flex_attention")
)
LAST_CHANGE = (f"--compile {FUSED_ADAM}", "DeepSpeed's FusedAdam, which nvcc builds first")


@dataclass(frozen=True)
class Case:
    """One contender on one model.

    Attributes:
        model: a name of `MODELS`.
        words: options, separated by spaces: flags, keys of the JSON (`a.b=value`), environment
            variables (`A=value`), `micro/2`, `micro*2`, `profile=NAME` of ds_configs, and
            `FUSED_ADAM` for DeepSpeed's instead of torch's.
        about: description of what the case shows.
    """

    model: str
    seq_len: int
    contender: str
    words: str = ""
    about: str = ""

    @property
    def title(self) -> str:
        return f"{self.model}, {self.seq_len}: {self.contender} {self.words}".strip()

    @property
    def compiles(self) -> bool:
        """Whether its model is compiled, which takes longest the first time."""
        return "--compile" in self.words or self.contender == PLAIN

    @property
    def builds(self) -> bool:
        """Whether an optimizer of DeepSpeed is built first, FusedAdam or CPUAdam."""
        return FUSED_ADAM in self.words or "offload" in self.words


@dataclass
class Options:
    """The options of a case, by kind."""

    flags: list[str] = field(default_factory=list)
    keys: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    micro_factor: float = 1.0
    profile: str | None = None
    deepspeeds_adam: bool = False


def parse_options(text: str) -> Options:
    """Sort the options of a case by kind."""
    options = Options()
    for option in text.split():
        name, equals, value = option.partition("=")
        if option == FUSED_ADAM:
            options.deepspeeds_adam = True
        elif option in ("micro/2", "micro*2"):
            options.micro_factor = 2.0 if "*" in option else 0.5
        elif name == "profile":
            options.profile = f"ds_configs/{value}.json"
        elif equals and name.isupper():
            options.environment[name] = value
        elif equals and not option.startswith("-"):
            options.keys[name] = json.loads(value) if re.fullmatch(JSON, value) else value
        else:
            options.flags.append(option)
    return options


def cases(lengths: tuple[int, int]) -> list[Case]:
    """Return all cases, the most important first."""
    short, long = lengths
    found = [
        Case("1.3B", short, OURS, PROFILED, "operators by their time; fills the compiler's cache"),
        Case("1.3B", short, OURS, EXACT, "the fastest here"),
        Case("1.3B", short, OURS, BASE, "gradients are sharded: more copies of them"),
        Case("1.3B", short, TRAINER, "", "as most people train"),
        Case("1.3B", short, PLAIN, "", "a hand-written script"),
    ]
    for model in ("160M", "1.6B MoE"):
        found += [Case(model, short, OURS, EXACT), Case(model, short, TRAINER)]
        found.append(Case(model, short, PLAIN))
    found.append(Case("1.3B", short, OURS, FP8, "linear layers in fp8: rounds differently"))
    packages = any(map(importlib.util.find_spec, ("flash_attn", "flash_attn_interface")))
    changes = (*CHANGES, SDPA) if packages else CHANGES  # without them `auto` means sdpa
    found += [Case("1.3B", short, OURS, *change) for change in (*FIRST_CHANGES, *changes)]
    found += [Case("160M", short, OURS, *change) for change in PROFILES]
    found.append(Case("1.3B", short, OURS, SAVING, "stalls of the first save and of the next"))
    found += [Case("160M", length, OURS, *mask) for length in lengths for mask in MASKS]
    for model in ("1.3B", "160M", "1.6B MoE"):
        found += [Case(model, long, OURS, EXACT), Case(model, long, TRAINER)]
        found.append(Case(model, long, PLAIN))
    found.append(Case("1.3B", short, TRAINER, "--compile", "Trainer with torch_compile"))
    found.append(Case("1.3B", short, OURS, *LAST_CHANGE))
    return found


def first_cases(length: int) -> list[Case]:
    """Return the cases for ten minutes on a card: options not measured yet, one at a time."""
    exact = partial(Case, "1.3B", length, OURS)
    return [
        exact(PROFILED, "operators by their time; fills the compiler's cache"),
        exact(EXACT, "the baseline"),
        Case("1.3B, 16 heads", length, OURS, EXACT, "heads of 128, as peers have"),
        exact(FP8, "linear layers in fp8: rounds differently"),
        exact(f"{EXACT} TORCH_CUDNN_SDPA_DEPRIORITIZED=1", "torch's FlashAttention, not cuDNN's"),
        exact(f"{EXACT} TORCHINDUCTOR_MAX_AUTOTUNE_GEMM=1", "products chosen by measuring"),
        exact(f"{EXACT} ZEROLM_AGAIN=1", "the baseline again: how far the clock drifts"),
    ]


def command(
    case: Case, micro_batch: int, accumulation: int, arguments: argparse.Namespace, scratch: Path
) -> list[str]:
    """Return the argv of a case; model, batch, JSON and tokens are the same for every contender."""
    options = parse_options(case.words)
    tokens = case.seq_len * micro_batch * accumulation
    model = str(model_file(case, arguments.toy, scratch))
    common = argv(
        model_config=model,
        seq_len=case.seq_len,
        log_interval=arguments.log_interval,
        micro_batch_size=micro_batch,
    )
    shards = shards_of(case, scratch)
    peer = argv(shard=shards / "shard-00000.bin", steps=STEPS, accumulation=accumulation)
    if case.contender == PLAIN:
        return [sys.executable, f"{LOOPS}/plain_loop.py", *common, *peer, *options.flags]
    profile = scratch / "profile.json"
    profile.write_text(json.dumps(ds_config(arguments.deepspeed_config, options)))
    start = launcher(1, arguments.port)
    common += argv(deepspeed_config=profile)
    if case.contender == TRAINER:
        return [*start, f"{LOOPS}/hf_trainer.py", *common, *peer, *options.flags]
    saves = {} if "--checkpoint_interval" in options.flags else {"checkpoint_interval": STEPS}
    own = pretrain(tokens, STEPS, scratch / "run", shards, **saves)
    return [*start, *own, *common, *options.flags]


def shards_of(case: Case, scratch: Path) -> Path:
    return scratch / f"shards-{case.model.replace(' ', '-')}"


def model_file(case: Case, toy: bool, scratch: Path) -> Path:
    """Return the model config, with enough positions for the case: rotary ones cost nothing."""
    path = Path((TOY_MODELS if toy else MODELS)[case.model])
    config = json.loads(path.read_text())
    if config["max_position_embeddings"] >= case.seq_len:
        return path
    longer = scratch / path.name
    longer.write_text(json.dumps(config | {"max_position_embeddings": case.seq_len}))
    return longer


def ds_config(path: str, options: Options) -> dict[str, Any]:
    """Return the profile with the keys of a case, and torch's AdamW.

    Weights are bf16, on a CPU float32 unless fp8 needs bf16. DeepSpeed's own AdamW,
    which an option chooses, takes a minute to compile on first use.
    """
    import torch

    config = copy.deepcopy(json.loads(Path(options.profile or path).read_text()))
    config["bf16"] = {"enabled": torch.cuda.is_available() or "--fp8" in options.flags}
    config.setdefault("optimizer", {"type": "AdamW", "params": {}})
    if not options.profile:
        ours = not options.deepspeeds_adam
        config["optimizer"]["params"] |= {"torch_adam": ours, **({"fused": True} if ours else {})}
    for dotted, value in options.keys.items():
        *blocks, key = dotted.split(".")
        inner = config
        for block in blocks:
            inner = inner.setdefault(block, {})
        inner[key] = value
    return config


@functools.cache
def peak_flops() -> float:
    """Return the FLOP/s of the device; where they are timed, all cases use one measurement."""
    import torch

    from zerolm.plan.peak_flops import device_peak_flops

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return device_peak_flops(device, "bf16")[0]


def planned_bytes(
    case: Case, config: Any, shapes: Any, arguments: argparse.Namespace, micro_batch: int
) -> int:
    """Return the bytes that a run's plan estimates for its device."""
    from zerolm.distributed.layout import Layout
    from zerolm.ds_config.profile import Profile
    from zerolm.plan import memory

    options = parse_options(case.words)
    profile = Profile.parse(ds_config(arguments.deepspeed_config, options), "profile.json")
    states = memory.model_states(shapes, profile, Layout(1))
    kept = memory.activation_bytes(
        config,
        case.seq_len,
        profile.precision,
        checkpointing=False,
        sequences=micro_batch,
        compiled=case.compiles,
    )
    return int(states.device + sum(memory.buffer_bytes(shapes, profile)) + kept)


def model_figures(case: Case, arguments: argparse.Namespace) -> tuple[dict[str, Any], float]:
    """Return (FLOPs and a micro-batch that fits every contender, peak FLOP/s of the device)."""
    import torch

    from zerolm.distributed.layout import Layout
    from zerolm.ds_config.profile import Profile
    from zerolm.model import flops
    from zerolm.model.architecture import parameter_shapes
    from zerolm.model.config_file import load_model_config
    from zerolm.plan import memory

    with tempfile.TemporaryDirectory() as scratch:
        config = load_model_config(model_file(case, arguments.toy, Path(scratch)))
    shapes = parameter_shapes(config)
    micro = 2
    if torch.cuda.is_available():
        micro = memory.fitting_micro_batch(
            LARGEST_MICRO_BATCH * 2048 // max(2048, case.seq_len),
            case.seq_len,
            config=config,
            shapes=shapes,
            profile=Profile.read(arguments.deepspeed_config),
            layout=Layout(1),
            memory_bytes=int(0.85 * torch.cuda.get_device_properties(0).total_memory),
            checkpointing=False,
        )
    model = {
        "flops_per_token": flops.flops_per_token(config, shapes, case.seq_len),
        "micro_batch": micro,
        "planned_bytes": functools.partial(planned_bytes, case, config, shapes, arguments),
    }
    return model, peak_flops()
