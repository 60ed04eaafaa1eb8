"""Check on a small copy of a mixture that dividing its experts over ranks changes nothing.

For `--expert_parallel`. Threads of this process are the ranks of an expert group: each has its
slice of the experts and its own rows, and they exchange tokens in memory. Logits and the gradient
of every parameter are compared with those of a copy with whole experts that gets all rows, so no
list of model types is needed. With `pipeline.stages`, each rank's copy is also cut into stages.
`model_proof` must have found no problem.
"""

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from zerolm.common.errors import reason
from zerolm.config.settings import Settings
from zerolm.ds_config.profile import Profile, block
from zerolm.model.architecture import ConfigKey, num_experts
from zerolm.model.model import Model
from zerolm.preflight import stage_proof
from zerolm.preflight.model_proof import computable_copy, kernels, trial_tokens, was_proven
from zerolm.run_dir.records import find_run_json

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

# Largest difference of a logit or gradient, relative to the largest in its tensor. Of the 55 fused
# mixtures of transformers 5.23, the largest is 1.1e-6 (docs/experts.md).
TOLERANCE = 1e-4
SECONDS = 60.0  # until a thread that waits for the others gives up


def problems(
    model: Model, settings: Settings, found: Any, profile: Profile | None = None
) -> list[str]:
    """Return why the experts cannot be divided, unless the run's record says that they can."""
    if settings.expert_parallel is None or found.problems:
        return []
    stages = 1 if profile is None else min(stage_proof.STAGES, profile.stages)
    if not settings.check and was_proven(model, settings) and _was_divided(settings, stages):
        return []
    from zerolm.preflight.observed_model import quiet  # imports torch

    where = f"{settings.where('expert_parallel')}: {settings.expert_parallel}"
    how = "with divided experts" + (" in pipeline stages" if stages > 1 else "")
    with quiet():
        small, tokens = computable_copy(ConfigKey.of(model.config), trial_tokens(settings.seq_len))
        try:
            wrong = differences(small, tokens, stages)
        except Exception as error:  # any class: a model's own code may not run divided
            text = f"a small copy {how} cannot be computed ({reason(error)})"
        else:
            if not wrong:
                return []
            names = ", ".join(list(wrong)[:4])
            text = f"{how}, {names} of a small copy differ by {max(wrong.values()):.1e}"
    return [
        f"{where}: {model.path}: {model.config.model_type}: {text}. Use ZeRO-3 instead of the flag."
    ]


def _was_divided(settings: Settings, stages: int) -> bool:
    """Return whether the run's record has divided experts, in stages if it shall have some."""
    record = (find_run_json(settings.run_dir) if settings.run_dir else None) or {}
    in_stages = stages == 1 or len(stage_proof.proven_layers(settings)) > 1
    return in_stages and block(record, "settings").get("expert_parallel") is not None


def differences(config: "PretrainedConfig", tokens: int, stages: int = 1) -> dict[str, float]:
    """Return {parameter, "logits" or "loss": difference} of divided from whole experts, where it
    exceeds `TOLERANCE`, relative to the largest value.

    Args:
        tokens: in a row.
        stages: number of pipeline stages into which the model is cut too.
    """
    import torch

    from zerolm.model.experts import expert_parameters
    from zerolm.preflight.observed_model import build_with_large_weights

    experts, _ = num_experts(config)
    degree = next(size for size in range(2, (experts or 2) + 1) if (experts or 2) % size == 0)
    config = stage_proof.deep_enough(config, stages)
    whole = build_with_large_weights(config, kernels(config)[0]).eval()
    batch = stage_proof.batch_of(whole, tokens, 2 * degree)
    ranks = _divided(whole, degree, stages)
    right = _outputs(whole, batch, stages)
    parts: list[Any] = [None] * degree

    def compute(rank: int) -> None:
        rows = {name: each[2 * rank :][:2] for name, each in batch.items()}
        parts[rank] = _outputs(ranks[rank], rows, stages)

    _in_threads(compute, degree)
    joined = {*expert_parameters(whole), "logits"}
    apart = {}
    for name, expected in right.items():
        values = [part[name] for part in parts]
        got = torch.cat(values) if name in joined else torch.stack(values).sum(0)
        largest = expected.abs().max().clamp_min(1e-30)
        apart[name] = float((got - expected).abs().max() / largest)
    return {name: each for name, each in apart.items() if not each <= TOLERANCE}


def _outputs(model: Any, batch: dict[str, "torch.Tensor"], stages: int) -> dict[str, Any]:
    """Return the logits, or with stages the loss, and the gradient of each parameter of a loss that
    is a sum over rows.

    Args:
        model: a list of stages, if it is cut.
    """
    import torch

    with torch.enable_grad():
        if isinstance(model, list):
            return stage_proof.in_stages(model, batch)[0]
        if stages > 1:
            return stage_proof.of_whole(model, batch)
        logits = model(input_ids=batch["input_ids"], use_cache=False).logits.float()
        losses = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), batch["targets"].flatten(), reduction="sum"
        )
        losses.backward()
    return {"logits": logits.detach(), **stage_proof.gradients(model)}


def _divided(whole: Any, degree: int, stages: int) -> list[Any]:
    """Return a model for each rank, or a list of its stages, with its slices of the whole model's
    experts.
    """
    import copy

    import torch

    from zerolm.model.experts import divide, expert_parameters

    names, group, ranks = set(expert_parameters(whole)), _Group(degree), []
    for rank in range(degree):
        models = [copy.deepcopy(whole)] if stages == 1 else stage_proof.stages_of(whole, stages)
        for model in models:
            divide(model, degree, group.of(rank))
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if name in names:
                        parameter.copy_(whole.get_parameter(name).chunk(degree)[rank])
        ranks.append(models if stages > 1 else models[0])
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
