"""A user's own optimizer, which a DeepSpeed config names by its path. Equals torch's RMSprop."""

import torch


class ScaledGradient(torch.optim.Optimizer):
    """Divides the gradient by its root mean square; multiplies the learning rate by `scale`."""

    def __init__(
        self,
        params,
        lr: float = 1e-3,
        decay: float = 0.95,
        eps: float = 1e-6,
        scale: float = 1.0,
        weight_decay: float = 0.0,
    ):
        defaults = {"lr": lr, "decay": decay, "eps": eps, "scale": scale}
        super().__init__(params, {**defaults, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                gradient = parameter.grad.add(parameter, alpha=group["weight_decay"])
                state = self.state[parameter]
                if "mean_square" not in state:
                    state["mean_square"] = torch.zeros_like(parameter)
                square = state["mean_square"].mul_(group["decay"])
                square.addcmul_(gradient, gradient, value=1 - group["decay"])
                rate = -group["lr"] * group["scale"]
                parameter.addcdiv_(gradient, square.sqrt().add_(group["eps"]), value=rate)
