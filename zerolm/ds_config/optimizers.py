"""Which optimizers and schedulers a DeepSpeed config can name, and on which machine they run.

DeepSpeed finds out when it builds them, after the model is there. Versions: DeepSpeed 0.19.8.
"""

import importlib.util
from collections.abc import Mapping
from inspect import signature
from typing import Any

from zerolm import muon
from zerolm.ds_config import block, optimizer_offload, optimizer_type
from zerolm.ds_schema import AUTO
from zerolm.errors import did_you_mean
from zerolm.settings import Settings
from zerolm.values import shown

# DeepSpeed matches these in any case (deepspeed/runtime/config.py, DEEPSPEED_OPTIMIZERS) and
# everything else as an attribute of torch.optim.
OPTIMIZERS = ("Adam", "AdamW", "Adagrad", "Lamb", "Lion", "Muon", "MuAdam", "MuAdamW", "MuSGD")
ADAM = frozenset({"adam", "adamw"})
WITHOUT_BETAS = frozenset({"adagrad", "musgd"})
# Their arithmetic is that of whole parameters. ZeRO hands an optimizer flat cuts, of several
# parameters at stages 1 and 2, so that another curve is learned on another number of ranks.
# tests/zerolm/test_ds_optimizers.py steps every optimizer of torch whole and cut in two.
NOT_BY_VALUE = {
    "adafactor": "factors matrices and scales its step by the norms of whole parameters",
    "lamb": "scales the step of each parameter by the norms of the whole parameter",
    "lbfgs": "calls the model several times in a step",
    "sparseadam": "takes sparse gradients only",
}
# Wanted by many, and nowhere to be had: neither in DeepSpeed nor in torch.optim.
NOWHERE = {
    "sophia": "needs a second backward pass through the gradient for its Hessian, which ZeRO's "
    "reduction of gradients has not"
}
NEEDS_MUP = frozenset({"muadam", "muadamw", "musgd"})
# deepspeed/ops/*/cpu_*.py; Muon's arithmetic is ZeRO's, that of its other parameters is CPUAdam's
WITH_CPU_OFFLOAD = frozenset({"adam", "adamw", "adagrad", "lion", "muon"})
ADAM_PARAMS = ("lr", "betas", "eps", "weight_decay", "adam_w_mode", "torch_adam")
FUSED_ADAM_PARAMS = ("bias_correction", "fp32_optimizer_states", "amsgrad")
TORCH_ADAM_PARAMS = (
    "fp32_optimizer_states",
    "foreach",
    "fused",
    "amsgrad",
    "maximize",
    "capturable",
)
SCHEDULERS = {
    "WarmupLR": "warmup_min_lr warmup_max_lr warmup_num_steps warmup_type",
    "WarmupDecayLR": "total_num_steps warmup_min_lr warmup_max_lr warmup_num_steps warmup_type",
    "WarmupCosineLR": "total_num_steps warmup_min_ratio warmup_num_steps cos_min_ratio warmup_type",
    "OneCycle": "cycle_min_lr cycle_max_lr decay_lr_rate cycle_first_step_size "
    "cycle_second_step_size cycle_first_stair_count cycle_second_stair_count decay_step_size "
    "cycle_momentum cycle_min_mom cycle_max_mom decay_mom_rate",
    "LRRangeTest": "lr_range_test_min_lr lr_range_test_step_size lr_range_test_step_rate "
    "lr_range_test_staircase",
}

# What "auto" can stand for, as in Hugging Face's Trainer.
AUTO_PARAMS = muon.AUTO_PARAMS
AUTO_SCHEDULER_PARAMS = (
    "warmup_min_lr",
    "warmup_max_lr",
    "warmup_num_steps",
    "total_num_steps",
    "cos_min_ratio",
)


def takes_betas(ds_config: Mapping[str, Any]) -> bool:
    """Tell whether the optimizer has betas; True for one that nobody knows, which is refused."""
    kind = optimizer_type(ds_config).lower()
    if kind in map(str.lower, OPTIMIZERS):
        return kind not in WITHOUT_BETAS
    import torch

    optimizer = getattr(torch.optim, optimizer_type(ds_config), None)
    return not isinstance(optimizer, type) or "betas" in signature(optimizer).parameters


def beta_problems(ds_config: Mapping[str, Any], settings: Settings, name: str) -> list[str]:
    """Refuse flags for betas of an optimizer that has none.

    Args:
        name: of the JSON file, for the messages.
    """
    if takes_betas(ds_config):
        return []
    kind = optimizer_type(ds_config)
    return [
        f"{settings.where(flag)}: {getattr(settings, flag)}, but {kind} has no betas ({name}: "
        f"optimizer.type). Remove the flag, or use AdamW."
        for flag in ("beta1", "beta2")
        if flag in settings.explicit
    ]


def optimizer_problems(ds_config: Mapping[str, Any], on_gpu: bool) -> list[str]:
    """Find optimizers and parameters of theirs that this machine or ZeRO cannot run."""
    written = optimizer_type(ds_config)
    kind, offload = written.lower(), optimizer_offload(ds_config)
    problems = [
        f"optimizer.params.{key}: auto, is not one of the settings. Give a value."
        for key, value in block(ds_config, "optimizer", "params").items()
        if value == AUTO and key not in AUTO_PARAMS
    ]
    if "betas" in block(ds_config, "optimizer", "params") and not takes_betas(ds_config):
        problems.append(f"optimizer.params.betas: {written} has none. Remove the key.")
    if "optimizer" in ds_config and "type" not in block(ds_config, "optimizer"):
        problems.append('optimizer.type: missing. Write for example "type": "AdamW".')
    if why := NOT_BY_VALUE.get(kind):
        return [
            *problems,
            f"optimizer.type: {written}, {why}; ZeRO gives it flat cuts, of which it would make "
            f"another curve for each world size. Use AdamW, Muon or Lion.",
        ]
    if kind not in map(str.lower, OPTIMIZERS):
        return problems + _torch_optimizer_problems(ds_config, written)
    if kind in NEEDS_MUP and importlib.util.find_spec("mup") is None:
        problems.append(
            f"optimizer.type: {written}, needs the mup package. Install it or use AdamW."
        )
    if offload != "none" and kind not in WITH_CPU_OFFLOAD:
        problems.append(
            f"optimizer.type: {written}, has no version for offload_optimizer. Use AdamW, Lion or "
            f"Adagrad, or remove zero_optimization.offload_optimizer."
        )
    elif not on_gpu and kind == "lion" and offload == "none":
        problems.append(
            f"optimizer.type: {written}, needs a GPU, or zero_optimization.offload_optimizer. Use "
            f"AdamW or add the block."
        )
    if kind == "muon":
        problems += muon.problems(ds_config)
    if kind in ADAM:
        problems += _adam_param_problems(ds_config, on_gpu)
    return problems


def _torch_optimizer_problems(ds_config: Mapping[str, Any], written: str) -> list[str]:
    import torch

    optimizer = getattr(torch.optim, written, None)
    missing = next((why for name, why in NOWHERE.items() if written.lower().startswith(name)), "")
    if missing:
        return [
            f"optimizer.type: {written}, is neither DeepSpeed's nor torch.optim's, and {missing}. "
            f"Use AdamW, Muon or Lion."
        ]
    if not (isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer)):
        choices = [*OPTIMIZERS, *(name for name in dir(torch.optim) if name[0].isupper())]
        hint = did_you_mean(written, choices) or " Use AdamW."
        return [f"optimizer.type: {written}, is neither DeepSpeed's nor torch.optim's.{hint}"]
    if optimizer_offload(ds_config) != "none":
        return [
            f"optimizer.type: {written}, has no version for offload_optimizer. Use AdamW, Lion or "
            f"Adagrad, or remove zero_optimization.offload_optimizer."
        ]
    return _untested(ds_config, written)


def _untested(ds_config: Mapping[str, Any], written: str) -> list[str]:
    if ds_config.get("zero_allow_untested_optimizer") is True:
        return []
    return [
        f"optimizer.type: {written}, ZeRO refuses it untested. Use AdamW, or set "
        f"zero_allow_untested_optimizer to true."
    ]


def _adam_param_problems(ds_config: Mapping[str, Any], on_gpu: bool) -> list[str]:
    params = block(ds_config, "optimizer", "params")
    problems = []
    if "max_grad_norm" in params:
        problems.append(
            f"optimizer.params.max_grad_norm: {shown(params['max_grad_norm'])}, belongs to the top "
            f'level. Write "gradient_clipping": {shown(params["max_grad_norm"])} instead.'
        )
    plain_cpu = not on_gpu and optimizer_offload(ds_config) == "none"
    torch_adam = params.get("torch_adam", plain_cpu)
    # With torch_adam on a plain CPU, resolve() leaves out what only the fused kernels take.
    more = TORCH_ADAM_PARAMS if torch_adam else FUSED_ADAM_PARAMS
    known = (*ADAM_PARAMS, *more, *(FUSED_ADAM_PARAMS if plain_cpu else ()), "max_grad_norm")
    for key in params:
        if key not in known:
            hint = did_you_mean(key, known) or " Remove it."
            problems.append(f"optimizer.params.{key}: not a parameter of this optimizer.{hint}")
    for key in ("lr", "eps", "weight_decay"):
        value = params.get(key, 0)
        if value != AUTO and (isinstance(value, bool) or not isinstance(value, (int, float))):
            problems.append(f'optimizer.params.{key}: {shown(value)}, must be a number or "auto".')
    if params.get("amsgrad") and not torch_adam:
        problems.append("optimizer.params.amsgrad: true, needs torch_adam. Remove it.")
    if params.get("bias_correction") is False and torch_adam:
        problems.append(
            "optimizer.params.bias_correction: false, torch's Adam has it always. Remove the key."
        )
    betas = params.get("betas", AUTO)
    if betas != AUTO and not (
        isinstance(betas, (list, tuple))
        and len(betas) == 2
        and all(isinstance(beta, (int, float)) and 0 <= beta < 1 for beta in betas)
    ):
        problems.append(
            f"optimizer.params.betas: {shown(betas)}, must be two numbers from 0 to below 1, or "
            f'"auto". Write for example [0.9, 0.95].'
        )
    return problems


def scheduler_problems(ds_config: Mapping[str, Any]) -> list[str]:
    """Find schedulers and parameters of theirs that DeepSpeed does not have."""
    if "scheduler" not in ds_config:
        return []
    kind = str(block(ds_config, "scheduler").get("type"))
    if kind not in SCHEDULERS:
        hint = did_you_mean(kind, SCHEDULERS) or f" Use one of {', '.join(SCHEDULERS)}."
        return [f"scheduler.type: {kind}, DeepSpeed has no such scheduler.{hint}"]
    params = block(ds_config, "scheduler", "params")
    known = (*SCHEDULERS[kind].split(), "last_batch_iteration")
    problems = [
        f"scheduler.params.{key}: not a parameter of {kind}."
        f"{did_you_mean(key, known) or ' Remove it.'}"
        for key in params
        if key not in known
    ]
    problems += [
        f"scheduler.params.{key}: auto, is not one of the settings. Give a value."
        for key, value in params.items()
        if value == AUTO and key not in AUTO_SCHEDULER_PARAMS
    ]
    if "total_num_steps" in known and "total_num_steps" not in params:
        problems.append(
            f'scheduler.params.total_num_steps: missing, {kind} needs it. Write "auto".'
        )
    steps = params.get("warmup_num_steps", 1)
    if steps != AUTO and (isinstance(steps, bool) or not isinstance(steps, int) or steps < 1):
        problems.append(
            f"scheduler.params.warmup_num_steps: {shown(steps)}, must be a positive whole number. "
            f"Write 1 for no warm-up."
        )
    return problems
