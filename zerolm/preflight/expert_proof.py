"""Check on a small copy of a mixture that dividing its experts over ranks changes nothing.

For `--expert_parallel`. Threads of this process are the ranks of an expert group: each has its
slice of the experts and its own rows, and they exchange tokens in memory. Logits and the gradient
of every parameter are compared with those of a copy with whole experts that gets all rows, so no
list of model types is needed. `model_proof` must have found no problem.
"""

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from zerolm.common.errors import reason
from zerolm.config.settings import Settings
from zerolm.model.architecture import ConfigKey, num_experts
from zerolm.model.model import Model
from zerolm.preflight.model_proof import computable_copy, kernels, trial_tokens, was_proven

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

# Largest difference of a logit or gradient, relative to the largest in its tensor. Of the 55 fused
# mixtures of transformers 5.23, the largest is 1.1e-6 (docs/experts.md).
TOLERANCE = 1e-4
SECONDS = 60.0  # until a thread that waits for the others gives up


def problems(model: Model, settings: Settings, found: Any) -> list[str]:
    """Return why the experts cannot be divided, unless the run's record says that they can."""
    if settings.expert_parallel is None or found.problems:
        return []
    if not settings.check and was_proven(model, settings):
        return []
    from zerolm.preflight.observed_model import quiet  # imports torch

    where = f"{settings.where('expert_parallel')}: {settings.expert_parallel}"
    with quiet():
        small, tokens = computable_copy(ConfigKey.of(model.config), trial_tokens(settings.seq_len))
        try:
            wrong = differences(small, tokens)
        except Exception as error:  # any class: a model's own code may not run divided
            text = f"a small copy with divided experts cannot be computed ({reason(error)})"
        else:
            if not wrong:
                return []
            names = ", ".join(list(wrong)[:4])
            text = (
                f"with divided experts, {names} of a small copy differ by {max(wrong.values()):.1e}"
            )
    return [
        f"{where}: {model.path}: {model.config.model_type}: {text}. Use ZeRO-3 instead of the flag."
    ]


def differences(config: "PretrainedConfig", tokens: int) -> dict[str, float]:
    """Return {parameter, or "logits": difference} of divided from whole experts, where it exceeds
    `TOLERANCE`, relative to the largest value.

    Args:
        tokens: in a row.
    """
    import torch

    from zerolm.engine.experts import divided_parameters
    from zerolm.preflight.observed_model import build_with_large_weights

    experts, _ = num_experts(config)
    degree = next(size for size in range(2, (experts or 2) + 1) if (experts or 2) % size == 0)
    whole = build_with_large_weights(config, kernels(config)[0]).eval()
    generator = torch.Generator().manual_seed(0)
    vocabulary = config.get_text_config().vocab_size
    ids = torch.randint(0, vocabulary, (2 * degree, tokens), generator=generator)
    expected = _outputs(whole, ids)
    ranks = _divided(whole, degree)
    parts: list[Any] = [None] * degree
    _in_threads(
        lambda rank: parts.__setitem__(rank, _outputs(ranks[rank], ids[2 * rank :][:2])), degree
    )
    found = {"logits": torch.cat([logits for logits, _ in parts])}
    divided = divided_parameters(ranks[0])
    for name in expected[1]:
        gradients = [part[name] for _, part in parts]
        found[name] = torch.cat(gradients) if name in divided else torch.stack(gradients).sum(0)
    right = {"logits": expected[0], **expected[1]}
    apart = {
        name: float((values - right[name]).abs().max() / right[name].abs().max().clamp_min(1e-30))
        for name, values in found.items()
    }
    return {name: each for name, each in apart.items() if not each <= TOLERANCE}


def _outputs(model: Any, ids: "torch.Tensor") -> tuple["torch.Tensor", dict[str, "torch.Tensor"]]:
    """Return the logits, and the gradient of each parameter of a loss that is a sum over rows."""
    import torch

    with torch.enable_grad():
        logits = model(input_ids=ids, use_cache=False).logits.float()
        losses = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum"
        )
        losses.backward()
    gradients = {
        name: torch.zeros_like(each) if each.grad is None else each.grad
        for name, each in model.named_parameters()
    }
    return logits.detach(), gradients


def _divided(whole: Any, degree: int) -> list[Any]:
    """Return a model for each rank, with its slices of the whole model's experts."""
    import copy

    import torch

    from zerolm.model.experts import divide, expert_parameters

    names, group, ranks = set(expert_parameters(whole)), _Group(degree), []
    for rank in range(degree):
        model = copy.deepcopy(whole)
        model.zero_grad()
        divide(model, degree, group.of(rank))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name in names:
                    parameter.copy_(whole.get_parameter(name).chunk(degree)[rank])
        ranks.append(model)
    return ranks


class _Group:
    """Threads that exchange rows."""

    def __init__(self, size: int) -> None:
        self._size, self._barrier = size, threading.Barrier(size, timeout=SECONDS)
        self._rows: list[Any] = [()] * size
        self.abort = self._barrier.abort

    def of(self, rank: int) -> Callable[..., "torch.Tensor"]:
        """Return a rank's `Exchange`."""

        def exchange(
            rows: "torch.Tensor", sent: Sequence[int] = (), received: Sequence[int] = ()
        ) -> "torch.Tensor":
            import torch

            self._rows[rank] = rows.split([*sent] or len(rows) // self._size)
            self._barrier.wait()
            found = torch.cat([each[rank] for each in self._rows])
            self._barrier.wait()
            return found

        return exchange


def _in_threads(work: Callable[[int], None], count: int) -> None:
    """Call `work` in a thread for each rank; raise the first error."""
    errors: list[Exception] = []

    def run(rank: int) -> None:
        try:
            work(rank)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next(
            (each for each in errors if not isinstance(each, threading.BrokenBarrierError)),
            errors[0],
        )
