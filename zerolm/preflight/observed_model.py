"""Observe a small model: which tokens its logits depend on, and which parameters learn.

All models run in float32 on the CPU, and the state of torch's random generator is preserved.
`model_proof` judges the results. Must not depend on the settings of a run.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from logging import CRITICAL, getLogger
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import cross_entropy

from zerolm.engine import replaced
from zerolm.model.build import build_model, construct

if TYPE_CHECKING:
    from transformers import PretrainedConfig

FEW_ROWS = 4
MANY_ROWS = 32
STEPS = 3
RATE = 1e-3  # AdamW's learning rate in these steps
EXPORTING = (
    "is_torchdynamo_exporting"  # transformers calls this to decide whether to use torch's operators
)


@dataclass(frozen=True)
class Sight:
    """Changes of the logits when one token changes, relative to the logits' standard deviation.

    Attributes:
        future: the largest change at positions before the token; NaN if a logit is not finite.
        own, previous: for each changed token, the change at its own position and at the next one.
    """

    future: float
    own: tuple[float, ...]
    previous: tuple[float, ...]


@dataclass(frozen=True)
class Beginning:
    """Results of the first training steps from a run's initial weights.

    Attributes:
        loss: loss of the first step.
        broken: describes the first loss or gradient that was not finite; empty if there was none.
        silent: parameters whose gradient was zero or missing in every step.
    """

    loss: float
    broken: str
    silent: frozenset[str]


def build(config: "PretrainedConfig", kernel: str) -> Any:
    """Build a model on this rank alone, with the weights that a run with seed 0 starts from."""
    return build_model(
        config,
        seed=0,
        dtype=torch.float32,
        zero3_config=None,
        attn_implementation=kernel,
        gradient_checkpointing="",
        device="cpu",
        alone=True,
    )


def without_noise(config: "PretrainedConfig") -> "PretrainedConfig":
    """Return the config without dropout and with the usual standard deviation for initial
    weights.
    """
    config = copy.deepcopy(config)
    text = config.get_text_config()
    for key, value in vars(text).items():
        if "drop" in key and isinstance(value, float):
            setattr(text, key, 0.0)
    if isinstance(getattr(text, "initializer_range", None), float):
        text.initializer_range = 0.02
    return config


def build_with_large_weights(config: "PretrainedConfig", kernel: str) -> Any:
    """Build a model whose weights are so large that each part's effect far exceeds rounding
    errors.
    """
    model = build(without_noise(config), kernel)
    enlarge(model)
    return model


def enlarge(model: Any) -> None:
    """Add large random values to a model's parameters."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            size = max(1, parameter.shape[-1]) ** -0.5 if parameter.ndim > 1 else 0.1
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=size)


def with_weights_of(model: Any, config: "PretrainedConfig", kernel: str) -> Any | None:
    """Build a model with the weights of another one; return None if its parameters are others."""
    new = construct(config, torch.float32, kernel)
    given, own = ({n: p.data for n, p in each.named_parameters()} for each in (model, new))
    if {n: p.shape for n, p in given.items()} != {n: p.shape for n, p in own.items()}:
        return None
    for name, value in own.items():
        value.copy_(given[name])
    return new.train()


def logits(model: Any, tokens: int) -> torch.Tensor:
    """Return the logits of a few rows of random tokens."""
    with torch.no_grad():
        return _logits(model, _random_ids(model, FEW_ROWS, tokens, seed=0), seed=0)


def sight(model: Any, tokens: int, seed: int) -> Sight:
    """Change one token in each row, and compare the logits."""
    count = min(tokens, MANY_ROWS)
    ids = _random_ids(model, count, tokens, seed)
    places = torch.linspace(0, tokens - 1, count).long()
    rows, other = torch.arange(count), ids.clone()
    size = _vocabulary(model)
    shift = torch.randint(1, max(2, size), (count,), generator=_generator(seed))
    other[rows, places] = (ids[rows, places] + shift) % size
    with torch.no_grad():
        before, after = _logits(model, ids, seed), _logits(model, other, seed)
    change = (after - before).abs().amax(-1) / before.std()
    earlier = change[torch.arange(tokens) < places[:, None]]
    is_finite = bool(before.isfinite().all() and after.isfinite().all())
    inner = places < tokens - 1
    return Sight(
        float(earlier.max()) if is_finite and len(earlier) else 0.0 if is_finite else float("nan"),
        tuple(change[rows, places].tolist()),
        tuple(change[rows[inner], places[inner] + 1].tolist()),
    )


def sensitivities(model: Any, tokens: int, seed: int) -> dict[str, float | None]:
    """Return |gradient| * |parameter| for each trained parameter; None if the loss does not use it.

    The product measures how a relative change of the parameter affects the loss.
    """
    model.zero_grad()
    _loss(model, tokens, seed).backward()
    return {
        name: float(value.grad.norm() * value.norm()) if value.grad is not None else None
        for name, value in model.named_parameters()
        if value.requires_grad
    }


def beginning(model: Any, tokens: int) -> Beginning:
    """Train for a few steps, and record the first loss and the parameters that get no gradient."""
    parameters = {name: each for name, each in model.named_parameters() if each.requires_grad}
    optimizer = torch.optim.AdamW(parameters.values(), lr=RATE)
    silent, first = set(parameters), float("nan")
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = _loss(model, tokens, seed=step)
        if not loss.isfinite():
            return Beginning(first, f"the loss of step {step + 1} is {float(loss)}", frozenset())
        first = float(loss) if step == 0 else first
        loss.backward()
        gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
        for name, gradient in gradients.items():
            if not gradient.isfinite().all():
                broken = f"the gradient of {name} is not finite in step {step + 1}"
                return Beginning(first, broken, frozenset())
            if gradient.any():
                silent.discard(name)
        optimizer.step()
    return Beginning(first, "", frozenset(silent))


def _loss(model: Any, tokens: int, seed: int) -> torch.Tensor:
    ids = _random_ids(model, FEW_ROWS, tokens + 1, seed)
    logits = _logits(model, ids[:, :-1], seed)
    return cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def _logits(model: Any, ids: torch.Tensor, seed: int) -> torch.Tensor:
    # Use the same dropout and sampled experts in each call; leave GPU generators unchanged.
    torch.default_generator.manual_seed(seed)
    logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits
    return logits.float()


def _random_ids(model: Any, rows: int, tokens: int, seed: int) -> torch.Tensor:
    shape = (rows, tokens)
    return torch.randint(0, _vocabulary(model), shape, generator=_generator(seed))


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _vocabulary(model: Any) -> int:
    size: int = model.config.get_text_config().vocab_size
    return size


@contextmanager
def quiet() -> Iterator[None]:
    """Run the context with one thread, torch's own operators and no output from transformers.

    Torch's random state and all settings are restored afterwards.

    Where causal-conv1d, flash-linear-attention and mamba-ssm are installed, transformers calls
    their kernels even for CPU tensors, which the kernels reject. During an export transformers does
    not call them, so this context simulates one.
    """
    import warnings

    from transformers.integrations import hub_kernels
    from transformers.utils import logging

    level, threads = logging.get_verbosity(), torch.get_num_threads()
    fake_tensors = getLogger("torch._subclasses.fake_tensor")  # prints a traceback of each error
    known = fake_tensors.level
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    fake_tensors.setLevel(CRITICAL)
    try:
        with (
            replaced.installed(hub_kernels, EXPORTING, lambda: True),
            torch.random.fork_rng(devices=[]),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        torch.set_num_threads(threads)
        fake_tensors.setLevel(known)
