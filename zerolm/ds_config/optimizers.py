"""Checks the `optimizer` and `scheduler` blocks of a DeepSpeed JSON.

Finds names and parameters that DeepSpeed would reject only after the model is built, and optimizers
that compute wrong updates on ZeRO's shards. `rules` calls this module. Versions: DeepSpeed 0.19.8.
"""

import importlib.util

from zerolm.common.errors import did_you_mean
from zerolm.common.values import shown
from zerolm.config.settings import Settings
from zerolm.ds_config import muon
from zerolm.ds_config.profile import AUTO, Profile, is_number

# DeepSpeed matches these names case-insensitively (deepspeed/runtime/config.py,
# DEEPSPEED_OPTIMIZERS) and looks up every other name in torch.optim.
OPTIMIZERS = ("Adam", "AdamW", "Adagrad", "Lamb", "Lion", "Muon", "MuAdam", "MuAdamW", "MuSGD")
ADAM = frozenset({"adam", "adamw"})
WITHOUT_BETAS = frozenset({"adagrad", "musgd"})
# These optimizers need full parameters to compute their updates. ZeRO passes flat shards to an
# optimizer (at stages 1 and 2, shards of several parameters), so the loss curve would depend on the
# number of ranks. A test compares a step of every torch optimizer on full parameters and on their
# halves.
NOT_ELEMENTWISE = {
    "adafactor": "factorizes matrices and scales its step by the norms of full parameters",
    "lamb": "scales the step of each parameter by the norms of the full parameter",
    "lbfgs": "calls the model several times in a step",
    "sparseadam": "supports only sparse gradients",
}
# Optimizers that are often requested, but available neither in DeepSpeed nor in torch.optim.
UNAVAILABLE = {
    "sophia": "needs a second backward pass through the gradient for its Hessian, which ZeRO's "
    "gradient reduction does not support"
}
NEEDS_MUP = frozenset({"muadam", "muadamw", "musgd"})
# deepspeed/ops/*/cpu_*.py. ZeRO computes Muon's update; CPUAdam updates the other parameters.
WITH_CPU_OFFLOAD = frozenset({"adam", "adamw", "adagrad", "lion", "muon"})
# zero/stage_1_and_2.py, initialize_optimizer_states; zero/stage3.py, initialize_optimizer_states.
NEEDS_OFFLOAD = (
    "needs zero_optimization.offload_optimizer: otherwise DeepSpeed's ZeRO makes torch's Adagrad "
    "anew with one parameter group, and fails in the first step. Add the block, or use AdamW."
)
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
WARMUP_TYPES = ("log", "linear")
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

# Parameters that may be "auto", as with the Hugging Face Trainer.
AUTO_PARAMS = muon.AUTO_PARAMS
AUTO_SCHEDULER_PARAMS = (
    "warmup_min_lr",
    "warmup_max_lr",
    "warmup_num_steps",
    "total_num_steps",
    "cos_min_ratio",
)


def takes_betas(profile: Profile) -> bool:
    """Return whether the optimizer has betas; True for unknown ones, refused elsewhere."""
    optimizer_name, kind = profile.optimizer.name, profile.optimizer.kind
    if kind in map(str.lower, OPTIMIZERS):
        return kind not in WITHOUT_BETAS
    from zerolm.optim import custom

    return custom.takes_betas(optimizer_name)


def cycles_betas(profile: Profile) -> bool:
    """Return whether the scheduler sets the optimizer's betas, as DeepSpeed's OneCycle does."""
    return (
        profile.scheduler == "OneCycle"
        and profile.scheduler_params.get("cycle_momentum", True) is not False
        and takes_betas(profile)
        and not profile.uses_muon  # DeepSpeed looks for betas in the optimizer's defaults
    )


def beta_problems(profile: Profile, settings: Settings) -> list[str]:
    """Refuse explicit `--beta1` and `--beta2` flags for an optimizer without betas, or with a
    scheduler that sets them.
    """
    if cycles_betas(profile):
        return [
            f"{settings.where(flag)}: {getattr(settings, flag)}, but OneCycle sets the betas in "
            f"each step ({profile.name}: scheduler.params.cycle_momentum, true by default). Remove "
            f"the flag, or set the key to false."
            for flag in ("beta1", "beta2")
            if flag in settings.explicit
        ]
    if takes_betas(profile):
        return []
    return [
        f"{settings.where(flag)}: {getattr(settings, flag)}, but {profile.optimizer.name} has no "
        f"betas ({profile.name}: optimizer.type). Remove the flag, or use AdamW."
        for flag in ("beta1", "beta2")
        if flag in settings.explicit
    ]


def master_problems(profile: Profile, where: str, done: str, what: str) -> list[str]:
    """Refuse a flag that changes master weights if these are not float32 values in memory.

    Args:
        where: start of the message: `flag: value`.
        done, what: words that describe the change in messages, such as "averaged" and "an average".
    """
    problems = [
        f"{where}, but {profile.name} has zero_optimization.{block} on NVMe, where weights cannot "
        f'be {done} after each step. Use "device": "cpu", or remove the flag.'
        for block, device in profile.offloads.items()
        if device == "nvme"
    ]
    if profile.master_bytes < 4:
        problems.append(
            f"{where}, but the master weights of {profile.name} have 16 bits, which {what} moves "
            f"by less than their rounding. Remove bf16_master_weights_and_grads, or the flag."
        )
    return problems


def uses_torch_adam(profile: Profile) -> bool:
    """Return whether torch's Adam is used instead of DeepSpeed's own, which must be compiled.

    On both CPUs and GPUs, torch's Adam is the default unless the optimizer is offloaded.
    """
    return bool(profile.optimizer.params.get("torch_adam", profile.optimizer_offload == "none"))


def optimizer_problems(profile: Profile, on_gpu: bool) -> list[str]:
    """Find optimizers and optimizer parameters that this machine or ZeRO does not support."""
    written, kind, params = profile.optimizer.name, profile.optimizer.kind, profile.optimizer.params
    offload = profile.optimizer_offload
    problems = [
        f'optimizer.params.{key}: "auto", but no setting supplies this value. Give one.'
        for key, value in params.items()
        if value == AUTO and key not in AUTO_PARAMS
    ]
    if "betas" in params and not takes_betas(profile):
        problems.append(f"optimizer.params.betas: {written} has none. Remove the key.")
    if "optimizer" in profile.json and "type" not in profile.block("optimizer"):
        problems.append('optimizer.type: missing. Write for example "type": "AdamW".')
    if why := NOT_ELEMENTWISE.get(kind):
        return [
            *problems,
            f"optimizer.type: {written} {why}, but ZeRO passes flat shards, so the loss curve "
            f"would depend on the world size. Use AdamW, Muon or Lion.",
        ]
    if kind == "adagrad" and offload == "none" and profile.zero_stage:
        problems.append(f"optimizer.type: {written} {NEEDS_OFFLOAD}")
    if kind not in map(str.lower, OPTIMIZERS):
        return problems + _torch_optimizer_problems(profile)
    if kind in NEEDS_MUP and importlib.util.find_spec("mup") is None:
        problems.append(
            f"optimizer.type: {written} needs the mup package. Install it, or use AdamW."
        )
    if offload != "none" and kind not in WITH_CPU_OFFLOAD:
        problems.append(
            f"optimizer.type: {written} does not support offload_optimizer. Use AdamW, Lion or "
            f"Adagrad, or remove zero_optimization.offload_optimizer."
        )
    elif not on_gpu and kind == "lion" and offload == "none":
        problems.append(
            f"optimizer.type: {written} needs a GPU or zero_optimization.offload_optimizer. Use "
            f"AdamW, or add the block."
        )
    if kind == "muon":
        problems += muon.problems(profile)
    if kind in ADAM:
        problems += _adam_param_problems(profile)
    return problems


def _torch_optimizer_problems(profile: Profile) -> list[str]:
    """Check an optimizer from torch.optim, or a user's own class given as a dotted path."""
    import torch

    from zerolm.optim import custom

    name, params = profile.optimizer.name, profile.optimizer.params
    unavailable = (why for word, why in UNAVAILABLE.items() if name.lower().startswith(word))
    if why := next(unavailable, ""):
        return [
            f"optimizer.type: {name} is neither in DeepSpeed nor in torch.optim, and {why}. Use "
            f"AdamW, Muon or Lion."
        ]
    try:
        optimizer = custom.optimizer_class(name)
    except ValueError as error:
        if custom.is_dotted(name):
            return [f"optimizer.type: {name} {error}"]
        choices = [*OPTIMIZERS, *(name for name in dir(torch.optim) if name[0].isupper())]
        hint = did_you_mean(name, choices) or " Use AdamW."
        return [f"optimizer.type: {name} is neither in DeepSpeed nor in torch.optim.{hint}"]
    if profile.optimizer_offload != "none":
        return [
            f"optimizer.type: {name} does not support offload_optimizer. Use AdamW, Lion or "
            f"Adagrad, or remove zero_optimization.offload_optimizer."
        ]
    if profile.json.get("zero_allow_untested_optimizer") is not True:
        return [
            f"optimizer.type: {name} is not tested with ZeRO, so DeepSpeed refuses it. Set "
            f"zero_allow_untested_optimizer to true, or use AdamW."
        ]
    if profile.zero_stage and issubclass(optimizer, torch.optim.Adagrad):
        return [f"optimizer.type: {name} derives from torch's Adagrad, which {NEEDS_OFFLOAD}"]
    if not custom.is_dotted(name):
        return []
    known = custom.parameter_names(optimizer)
    unknown = [
        f"optimizer.params.{key}: not a parameter of {name}."
        f"{did_you_mean(key, known or []) or ' Remove it.'}"
        for key in params
        if known is not None and key not in known
    ]
    return unknown or _trial_problems(profile)


def _trial_problems(profile: Profile) -> list[str]:
    """Try out whether a user's own optimizer has the same curve on shards, and when resumed."""
    from zerolm.optim import trial

    name = profile.optimizer.name
    problem = trial.trial_problem(name, profile.optimizer.params, profile.zero_stage)
    return [f"optimizer.type: {name} {problem}."] if problem else []


def _adam_param_problems(profile: Profile) -> list[str]:
    params = profile.optimizer.params
    problems = []
    if "max_grad_norm" in params:
        problems.append(
            f"optimizer.params.max_grad_norm: {shown(params['max_grad_norm'])} is a top-level "
            f'key. Write "gradient_clipping": {shown(params["max_grad_norm"])} instead.'
        )
    torch_adam, offloaded = uses_torch_adam(profile), profile.optimizer_offload != "none"
    # Without offload, `resolve` removes parameters that only DeepSpeed's Adam accepts.
    more = TORCH_ADAM_PARAMS if torch_adam else FUSED_ADAM_PARAMS
    known = (*ADAM_PARAMS, *more, *(() if offloaded else FUSED_ADAM_PARAMS), "max_grad_norm")
    for key in params:
        if key not in known:
            hint = did_you_mean(key, known) or " Remove it."
            problems.append(f"optimizer.params.{key}: not a parameter of this optimizer.{hint}")
    for key in ("lr", "eps", "weight_decay"):
        value = params.get(key, 0)
        if value != AUTO and (isinstance(value, bool) or not isinstance(value, (int, float))):
            problems.append(f'optimizer.params.{key}: {shown(value)} must be a number or "auto".')
    if params.get("amsgrad") and not torch_adam:
        problems.append("optimizer.params.amsgrad: true needs torch_adam. Remove it.")
    if params.get("bias_correction") is False and torch_adam:
        problems.append(
            "optimizer.params.bias_correction: false, but torch's Adam always corrects bias. "
            "Remove the key, or set torch_adam to false for DeepSpeed's."
        )
    betas = params.get("betas", AUTO)
    if betas != AUTO and not (
        isinstance(betas, (list, tuple))
        and len(betas) == 2
        and all(isinstance(beta, (int, float)) and 0 <= beta < 1 for beta in betas)
    ):
        problems.append(
            f"optimizer.params.betas: {shown(betas)} must be two numbers from 0 up to, but not "
            "including, 1, or "
            f'"auto". Write for example [0.9, 0.95].'
        )
    return problems


def scheduler_problems(profile: Profile) -> list[str]:
    """Find schedulers and scheduler parameters that DeepSpeed does not support."""
    if "scheduler" not in profile.json:
        return []
    kind, params = str(profile.scheduler), profile.scheduler_params
    if kind not in SCHEDULERS:
        hint = did_you_mean(kind, SCHEDULERS) or f" Use one of {', '.join(SCHEDULERS)}."
        return [f"scheduler.type: {kind}, but DeepSpeed has no such scheduler.{hint}"]
    known = (*SCHEDULERS[kind].split(), "last_batch_iteration")
    problems = [
        f"scheduler.params.{key}: not a parameter of {kind}."
        f"{did_you_mean(key, known) or ' Remove it.'}"
        for key in params
        if known is not None and key not in known
    ]
    problems += [
        f'scheduler.params.{key}: "auto", but no setting supplies this value. Give one.'
        for key, value in params.items()
        if value == AUTO and key not in AUTO_SCHEDULER_PARAMS
    ]
    if "total_num_steps" in known and "total_num_steps" not in params:
        problems.append(
            f'scheduler.params.total_num_steps: missing, but {kind} needs it. Write "auto".'
        )
    if "warmup_type" in known and (shape := params.get("warmup_type", "log")) not in WARMUP_TYPES:
        problems.append(
            f"scheduler.params.warmup_type: {shown(shape)} must be log or linear: for any other "
            "value, DeepSpeed uses log. Correct it."
        )
    if cycles_betas(profile) and profile.optimizer.params.get("betas", AUTO) != AUTO:
        problems.append(
            f"optimizer.params.betas: {shown(profile.optimizer.params['betas'])}, but OneCycle "
            f"sets the betas in each step. Remove it, or set scheduler.params.cycle_momentum to "
            f"false."
        )
    steps = params.get("warmup_num_steps", 1)
    if steps != AUTO and not (is_number(steps) and steps >= 0 and steps == int(steps)):
        problems.append(
            f"scheduler.params.warmup_num_steps: {shown(steps)} must be a whole number of at least "
            "0. Correct it."
        )
    return problems
