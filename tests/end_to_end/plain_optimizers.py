"""Muon and Lion in plain PyTorch, from their papers, on unsharded parameters."""

import math

import torch

PRECISION = torch.float64  # of the Newton-Schulz iteration


def muon(ratio: float = 1.0, tables: tuple[str, ...] = ("embed", "lm_head")):
    """Return a function that creates Muon for matrices, with torch's AdamW for other parameters.

    Args:
        ratio: learning rate of the matrices, divided by that of the other parameters.
        tables: substrings of the names of matrices that AdamW trains.
    """

    def create(masters: dict[str, torch.Tensor], weight_decay: float) -> torch.optim.Optimizer:
        matrices = {
            name: master
            for name, master in masters.items()
            if master.ndim >= 2 and not any(table in name for table in tables)
        }
        rest = {name: master for name, master in masters.items() if name not in matrices}
        table_weights = [master for master in rest.values() if master.ndim >= 2]
        vectors = [master for master in rest.values() if master.ndim < 2]
        groups = [
            {"params": list(matrices.values()), "ratio": ratio, "decay": weight_decay},
            {"params": table_weights, "decay": weight_decay},
            {"params": vectors, "decay": 0.0},
        ]
        return Muon([group for group in groups if group["params"]])

    return create


def rmsprop(ratio: float):
    """Return a function that creates torch's RMSprop, at `ratio` times the learning rate."""

    def create(masters: dict[str, torch.Tensor], weight_decay: float) -> torch.optim.Optimizer:
        matrices = [master for master in masters.values() if master.ndim >= 2]
        vectors = [master for master in masters.values() if master.ndim < 2]
        groups = [
            {"params": matrices, "weight_decay": weight_decay, "ratio": ratio},
            {"params": vectors, "weight_decay": 0.0, "ratio": ratio},
        ]
        return torch.optim.RMSprop(groups, alpha=0.95, eps=1e-6)

    return create


class Muon(torch.optim.Optimizer):
    """Muon (Jordan et al. 2024). The first group's parameters are matrices, or stacks of them."""

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
    """Return approximately U V^T for U S V^T: five steps of the quintic Newton-Schulz iteration."""
    rows, columns = matrix.shape
    x = matrix.T if rows > columns else matrix
    x = (x / (x.norm() + 1e-7)).to(PRECISION)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    x = (x.T if rows > columns else x).double()
    return x * math.sqrt(max(1.0, rows / columns))


class Lion(torch.optim.Optimizer):
    """Lion (Chen et al. 2023, arXiv 2302.06675, algorithm 2)."""

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
