"""Muon and Lion in plain PyTorch, from their papers, on whole parameters."""

import math

import torch

PRECISION = torch.float64  # of the Newton-Schulz iteration


def muon(ratio: float = 1.0, tables: tuple[str, ...] = ("embed", "lm_head")):
    """Return what makes Muon for matrices, with torch's AdamW for the rest.

    Args:
        ratio: learning rate of the matrices in units of the others'.
        tables: parts of the names of matrices that are not Muon's.
    """

    def of(masters: dict[str, torch.Tensor], weight_decay: float) -> torch.optim.Optimizer:
        matrices = {
            name: master
            for name, master in masters.items()
            if master.ndim >= 2 and not any(table in name for table in tables)
        }
        rest = {name: master for name, master in masters.items() if name not in matrices}
        tall = [master for master in rest.values() if master.ndim >= 2]
        flat = [master for master in rest.values() if master.ndim < 2]
        groups = [
            {"params": list(matrices.values()), "ratio": ratio, "decay": weight_decay},
            {"params": tall, "decay": weight_decay},
            {"params": flat, "decay": 0.0},
        ]
        return Muon([group for group in groups if group["params"]])

    return of


class Muon(torch.optim.Optimizer):
    """Jordan et al. 2024; the first group's parameters are matrices, or stacks of them."""

    def __init__(self, groups):
        super().__init__(groups, {"lr": 0.0})
        others = [
            {"params": group["params"], "weight_decay": group["decay"]}
            for group in self.param_groups[1:]
        ]
        self.adamw = torch.optim.AdamW(others, betas=(0.9, 0.95), eps=1e-8)

    @torch.no_grad()
    def step(self):
        for ours, its in zip(self.param_groups[1:], self.adamw.param_groups, strict=True):
            its["lr"] = ours["lr"]
        self.adamw.step()
        group = self.param_groups[0]
        for matrix in group["params"]:
            state = self.state[matrix]
            momentum = state.setdefault("momentum", torch.zeros_like(matrix, dtype=torch.float64))
            gradient = matrix.grad.double()
            momentum.copy_(0.95 * momentum + 0.05 * gradient)
            update = 0.05 * gradient + 0.95 * momentum  # Nesterov's
            stack = update.view(-1, *matrix.shape[-2:])
            update = torch.stack([orthogonal(each) for each in stack]).view_as(matrix)
            matrix.mul_(1 - group["lr"] * group["decay"])
            matrix.sub_(group["lr"] * update.to(matrix.dtype))


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """Return nearly U V^T of U S V^T, by five steps of the quintic Newton-Schulz iteration."""
    rows, columns = matrix.shape
    x = matrix.T if rows > columns else matrix
    x = (x / (x.norm() + 1e-7)).to(PRECISION)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    x = (x.T if rows > columns else x).double()
    return x * math.sqrt(max(1.0, rows / columns))


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023 (arXiv 2302.06675), algorithm 2."""

    def __init__(self, groups):
        super().__init__(groups, {"lr": 0.0})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                momentum = state.setdefault("momentum", torch.zeros_like(parameter))
                state["blend"] = 0.9 * momentum + 0.1 * parameter.grad
                update = state["blend"].sign()
                parameter.sub_(group["lr"] * (update + group["decay"] * parameter))
                momentum.copy_(0.99 * momentum + 0.01 * parameter.grad)


def lion(masters: dict[str, torch.Tensor], weight_decay: float) -> torch.optim.Optimizer:
    matrices = [master for master in masters.values() if master.ndim >= 2]
    others = [master for master in masters.values() if master.ndim < 2]
    return Lion([{"params": matrices, "decay": weight_decay}, {"params": others, "decay": 0.0}])
