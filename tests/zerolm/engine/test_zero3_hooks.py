"""DeepSpeed's hooks of ZeRO-3, as this project changes them."""

from types import SimpleNamespace

import torch
from deepspeed.runtime.zero import parameter_offload

from zerolm.engine.zero3_hooks import fit_zero3_to_recomputation


def test_modules_that_a_recomputation_has_left_are_forgotten(monkeypatch) -> None:
    """It ends by an exception, in the middle of a block, so the block's last hooks do not run."""
    offload, model = parameter_offload.DeepSpeedZeRoOffload, torch.nn.Linear(2, 2)
    stack = [model]
    monkeypatch.setattr(parameter_offload, "FWD_MODULE_STACK", stack)
    monkeypatch.setattr(
        offload, "pre_sub_module_forward_function", lambda self, module: stack.append(module)
    )
    monkeypatch.setattr(offload, "post_sub_module_forward_function", lambda *_: None)
    monkeypatch.setattr(
        parameter_offload,
        "register_external_parameter",
        parameter_offload.register_external_parameter,
    )
    fit_zero3_to_recomputation()
    fit_zero3_to_recomputation()  # as for a second model of the process
    hook, hooks = offload.pre_sub_module_forward_function, SimpleNamespace(module=model)
    for _ in range(3):
        hook(hooks, model)
        hook(hooks, torch.nn.Linear(2, 2))  # never left
    assert len(stack) == 3
