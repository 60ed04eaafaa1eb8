"""Muon, Lion and QK-clip in plain PyTorch, from their papers, on unsharded parameters."""

import math
from functools import partial

import numpy as np
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


class QkClip:
    """QK-clip (arXiv 2507.20534, algorithm 1) for models of Llama's kind, with all scores at once.

    Queries and keys are the outputs of `q_proj` and `k_proj`, rotated by RoFormer's formula
    (arXiv 2104.09864, equation 34). A key that several heads share is left alone.

    Attributes:
        largest: (layers, heads) largest scores since the last step.
    """

    def __init__(self, model: torch.nn.Module, threshold: float):
        config = model.config
        self.threshold = threshold
        self.heads, self.groups = config.num_attention_heads, config.num_key_value_heads
        self.largest = torch.full((config.num_hidden_layers, self.heads), -math.inf)
        for number, layer in enumerate(model.model.layers):
            found: dict[str, torch.Tensor] = {}

            def keep(module, args, output, name, found=found, number=number):
                found[name] = output.detach()
                if len(found) == 2:
                    self.add(number, found.pop("q"), found.pop("k"))

            for name in "qk":
                projection = getattr(layer.self_attn, f"{name}_proj")
                projection.register_forward_hook(partial(keep, name=name))

    def add(self, layer: int, queries: torch.Tensor, keys: torch.Tensor) -> None:
        batch, length, width = queries.shape
        dim = width // self.heads
        q = rotated(queries.view(batch, length, self.heads, dim))
        k = rotated(keys.view(batch, length, self.groups, dim))
        k = k.repeat_interleave(self.heads // self.groups, 2)
        scores = torch.einsum("bihd,bjhd->hbij", q, k) / math.sqrt(dim)
        scores = scores.masked_fill(torch.ones(length, length).tril() == 0, -math.inf)
        largest = scores.flatten(1).max(1).values
        self.largest[layer] = torch.maximum(self.largest[layer], largest.float())

    @torch.no_grad()
    def step(self, masters: dict[str, torch.Tensor]) -> tuple[float, int]:
        """Rescale the masters; return the largest score, and the number of clipped heads."""
        for (layer, head), largest in np.ndenumerate(self.largest.numpy()):
            if largest <= self.threshold:
                continue
            gamma = self.threshold / float(largest)
            prefix = f"model.layers.{layer}.self_attn."
            for name, own in (("q_proj", True), ("k_proj", self.heads == self.groups)):
                if not own:
                    continue
                for kind in ("weight", "bias"):
                    if (master := masters.get(f"{prefix}{name}.{kind}")) is not None:
                        rows = master.view(-1, len(master) // self.count(name), *master.shape[1:])
                        rows[head] *= gamma**0.5 if self.heads == self.groups else gamma
        result = float(self.largest.max()), int((self.largest > self.threshold).sum())
        self.largest.fill_(-math.inf)
        return result

    def count(self, projection: str) -> int:
        return self.heads if projection == "q_proj" else self.groups


def rotated(x: torch.Tensor, base: float = 10000.0) -> torch.Tensor:
    """Rotate pairs of values, dim / 2 apart, by the position: (batch, length, heads, dim)."""
    half = x.shape[-1] // 2
    angles = torch.outer(
        torch.arange(x.shape[1]).double(), base ** (-torch.arange(half).double() / half)
    )
    pairs = torch.complex(x[..., :half].double(), x[..., half:].double())
    turned = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat([turned.real, turned.imag], -1)
