"""The reference of a family: a training loop in plain PyTorch and transformers, in one process.

It shares the order of the data and the weight-decay groups with zerolm, which have tests of their
own. With documents kept apart, each document is a row of its own, without a mask or positions.
"""

import hashlib
import importlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_tie_weights

from tests.end_to_end.plain_pytorch import cosine, read_tokens
from zerolm.data.order import Order
from zerolm.model.initialization import InitialWeights
from zerolm.model.loss import IGNORED
from zerolm.optim.parameter_groups import parameter_groups

RANKS = 2
# Their constructors draw values that `_init_weights` leaves: the reference takes them from the run.
CONSTRUCTED = frozenset({"openai-gpt"})


@dataclass
class Recipe:
    """What the reference and the runs have in common."""

    shards: Path
    eos_id: int
    seq_len: int = 32
    batch: int = 4
    micro_batch: int = 1
    steps: int = 3
    seed: int = 7
    peak: float = 1e-3
    minimum: float = 1e-4
    weight_decay: float = 0.1
    clipping: float = 1.0


@dataclass
class Routers:
    """Collects the router logits of documents that ran one by one, for one auxiliary loss.

    The loss is a product of means over the tokens of a micro-batch, so it is not a mean over
    documents. All families that have one compute it by a function of this name.
    """

    model: Any
    calls: list[tuple[Any, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.module = importlib.import_module(type(self.model).__module__)
        self.original = getattr(self.module, "load_balancing_loss_func", None)

    def collecting(self) -> Any:
        if self.original is None:
            return mock.patch.object(self, "calls", self.calls)
        return mock.patch.object(self.module, "load_balancing_loss_func", self._collect)

    def _collect(self, logits: Any, *arguments: Any, **more: Any) -> torch.Tensor:
        self.calls.append((logits, arguments, more))
        return torch.zeros(())

    def loss(self) -> torch.Tensor | None:
        if not self.calls:
            return None
        layers = zip(*(logits for logits, _, _ in self.calls), strict=True)
        joined = tuple(torch.cat(list(layer)) for layer in layers)
        _, arguments, more = self.calls[0]
        return self.original(joined, *arguments[:2], **more | {"attention_mask": None})


def initial_model(directory: Path, seed: int) -> Any:
    """Build a model with the weights that docs/initialization.md specifies."""
    config = AutoConfig.from_pretrained(directory)
    with no_tie_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    owners: dict[str, Any] = {}
    for name, module in model.named_modules():
        parent = owners.get(name.rpartition(".")[0], model)
        owners[name] = module if isinstance(module, PreTrainedModel) else parent
        for tensor in [*module.parameters(), *module.buffers(), module]:
            tensor._is_hf_initialized = False
        if isinstance(module, torch.nn.Embedding) and "Position" not in type(module).__name__:
            module.padding_idx = None
    with torch.no_grad():
        for name, module in reversed(list(model.named_modules())):
            digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
            torch.manual_seed(int.from_bytes(digest[:4], "little"))
            owners[name]._init_weights(module)
    model.tie_weights()
    if config.model_type in CONSTRUCTED:
        model.load_state_dict(run_weights(config, seed), strict=False)  # tied weights once
    model.config.use_cache = False
    return model.train()


def run_weights(config: Any, seed: int) -> dict[str, torch.Tensor]:
    """Return the initial values of a run."""
    weights = InitialWeights(config, seed)
    units = (weights.compute(unit, torch.float32) for unit in range(len(weights.units)))
    return {name: value for unit in units for name, value in unit.items()}


def documents(text: np.ndarray, eos_id: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield inputs and targets of each document of a row."""
    inputs, targets = text[:-1], text[1:].copy()
    targets[inputs == eos_id] = IGNORED
    ends = np.flatnonzero(inputs == eos_id) + 1
    for part in np.split(np.arange(len(inputs)), ends):
        if len(part):
            yield inputs[part], targets[part]


def summed_loss(
    model: Any, rows: np.ndarray, recipe: Recipe, apart: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the sum of the losses of a micro-batch, and the router loss."""
    total, routers = torch.zeros(()), Routers(model)
    if not apart:
        batch = torch.from_numpy(rows)
        outputs = model(input_ids=batch[:, :-1], use_cache=False)
        losses = torch.nn.functional.cross_entropy(
            outputs.logits.float().flatten(0, 1), batch[:, 1:].flatten(), reduction="sum"
        )
        return losses, getattr(outputs, "aux_loss", None)
    with routers.collecting():
        for row in rows:
            for inputs, targets in documents(row, recipe.eos_id):
                outputs = model(input_ids=torch.from_numpy(inputs)[None], use_cache=False)
                total = total + torch.nn.functional.cross_entropy(
                    outputs.logits[0].float(), torch.from_numpy(targets), reduction="sum"
                )
    return total, routers.loss()


def coefficient(config: Any) -> float:
    for holder, key in (
        (config, "router_aux_loss_coef"),
        (config, "aux_loss_coef"),
        (getattr(config, "ffn_config", None), "moe_loss_weight"),
    ):
        if getattr(holder, key, None) is not None:
            return getattr(holder, key)
    raise AssertionError(f"{config.model_type}: no weight of the router loss")


def train(directory: Path, recipe: Recipe, apart: bool = False) -> list[float]:
    """Train the model of a config.json; return the cross-entropy of each step.

    Args:
        apart: whether documents are kept apart.
    """
    model = initial_model(directory, recipe.seed)
    optimizer = torch.optim.AdamW(
        parameter_groups(model, recipe.weight_decay), betas=(0.9, 0.95), eps=1e-8
    )
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    tokens, seq_len, batch = read_tokens(recipe.shards), recipe.seq_len, recipe.batch
    order = Order([(len(tokens) - 1) // seq_len], [1.0], recipe.seed)
    curve = []
    for step in range(recipe.steps):
        windows = order(np.arange(step * batch, (step + 1) * batch)).window
        text = np.stack([tokens[w * seq_len : w * seq_len + seq_len + 1] for w in windows])
        counted = int((text[:, :-1] != recipe.eos_id).sum()) if apart else text[:, 1:].size
        loss = 0.0
        for rank in range(RANKS):  # dropout and random routing: seeded as docs/data_order.md says
            digest = hashlib.sha256(f"{recipe.seed}/step/{step * batch}/{rank}".encode()).digest()
            torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            for rows in np.split(text, batch // recipe.micro_batch)[rank::RANKS]:
                summed, router_loss = summed_loss(model, rows, recipe, apart)
                objective = summed / counted
                if router_loss is not None:
                    share = recipe.micro_batch / batch
                    objective = objective + coefficient(model.config) * router_loss * share
                objective.backward()
                loss += float(summed.detach().double()) / counted
        torch.nn.utils.clip_grad_norm_(trained, recipe.clipping)
        done, total = (step + 1) * batch * seq_len, recipe.steps * batch * seq_len
        for group in optimizer.param_groups:
            group["lr"] = cosine(done, total, 0, recipe.peak, recipe.minimum)
        optimizer.step()
        optimizer.zero_grad()
        curve.append(loss)
    assert all(math.isfinite(loss) for loss in curve), curve
    return curve


def leak(directory: Path, kernel: str, recipe: Recipe) -> float:
    """Return how much a document's logits change with another one, by the change without a mask.

    Rows of three documents run with two versions of the middle one, through the inputs that a run
    with --document_mask gives to the model.
    """
    from zerolm.model.document_mask import isolating_inputs, isolating_masks

    config = AutoConfig.from_pretrained(directory)
    model: Any = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation=kernel
    ).eval()
    parts = (recipe.seq_len // 4, recipe.seq_len // 2, recipe.seq_len // 4)
    tokens = torch.from_numpy(read_tokens(recipe.shards)[: 2 * recipe.seq_len])
    tokens = torch.where(tokens == recipe.eos_id, 9, tokens)
    first, other = tokens[None, : recipe.seq_len], tokens[None, : recipe.seq_len].clone()
    middle = slice(parts[0], parts[0] + parts[1])
    other[0, middle] = tokens[recipe.seq_len :][middle]
    batch = {
        "document_ids": torch.repeat_interleave(torch.arange(3), torch.tensor(parts))[None],
        "position_ids": torch.cat([torch.arange(part) for part in parts])[None],
    }
    masked, plain = [], []
    with torch.no_grad():
        for ids in (first, other):
            rows = batch | {"input_ids": ids}
            with isolating_masks(rows, model):
                inputs = isolating_inputs(rows, model)
                masked.append(model(**inputs, input_ids=ids, use_cache=False).logits[0])
            plain.append(model(input_ids=ids, use_cache=False).logits[0])
    kept = torch.ones(recipe.seq_len, dtype=torch.bool)
    kept[middle] = False
    changed, without = (float((b - a)[kept].abs().max()) for a, b in (masked, plain))
    return changed / without if without else 0.0
