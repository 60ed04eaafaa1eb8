"""The probe: the loss on a fixed batch, saved with each checkpoint and compared after loading.

The batch is the first sequence of each training source (up to `MAX_SEQUENCES`), the same for any
world size. The probe runs in evaluation mode without gradients, so it does not affect training.
Every rank computes the complete batch, so wrong weights on a single rank are detected. Training
resumes only if the loss on each rank matches the one in the manifest. Some logits are also saved,
so `export` can check the exported model.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from zerolm.common.errors import CheckpointError
from zerolm.common.faults import fault_point
from zerolm.config.settings import CONCAT
from zerolm.distributed.collectives import gather_objects
from zerolm.engine.parameters import multiply
from zerolm.engine.protocol import Engine
from zerolm.model.compile import eager
from zerolm.model.forward import next_logits, on_every_stage, token_losses
from zerolm.model.loss import IGNORED
from zerolm.plan.plan import Plan
from zerolm.pretrained.source_config import is_position

MAX_SEQUENCES = 8  # at most one from each source
LOGIT_TOKENS, LOGIT_POSITIONS, LOGIT_IDS = 64, 8, 16  # upper limits; the logits are stored as JSON
# Relative difference allowed after a change of topology or machine, when sums are computed in
# another order or by other kernels. float32: about 1e-7 for each of a few dozen consecutive sums.
# 16-bit weights: half a unit in the last place of bf16, by which each logit may change; their mean
# changes by less.
TOLERANCES = {"fp32": 1e-5, "bf16": 2.0**-9, "fp16": 2.0**-9}


def num_sequences(plan: Plan) -> int:
    """Return the number of sequences in the probe's batch."""
    return min(MAX_SEQUENCES, len(plan.sources))


def measure(engine: Engine, batches: Iterable[Mapping[str, torch.Tensor]], plan: Plan) -> dict:
    """Measure the probe; return the manifest's entry `probe`. All ranks call this.

    The entry contains the loss, some logits, and what both depend on.

    Args:
        engine: the DeepSpeed engine; in training mode afterwards.
        batches: the fixed batch as micro-batches, the same on every rank.
    """
    total, count = torch.zeros((), dtype=torch.float64, device=engine.device), 0
    logits: dict[str, Any] = {}
    engine.eval()
    with torch.no_grad(), eager():
        for batch in batches:
            losses_BT, _ = token_losses(engine, dict(batch))
            total += losses_BT.double().sum()
            count += int((batch["targets"] != IGNORED).sum())
            logits = logits or sample_logits(engine, batch)
    engine.train()
    loss = float(on_every_stage(engine, total)) / count
    return {
        "loss": loss,
        "loss_hex": loss.hex(),
        "data": _data_identity(plan),
        "made_by": _numerics(plan),
        "logits": {**logits, "precision": plan.ds.compute_precision},
    }


def sample_logits(model: Any, batch: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return the first tokens of a micro-batch's first document, and some of their logits.

    The model receives only the tokens, without a mask or positions, as an exported model does. So
    an export check with the same shape can get bit-identical logits.

    Args:
        model: a causal LM or a DeepSpeed engine around one, in evaluation mode.
        batch: a micro-batch on its device.
    """
    ids_T = batch["input_ids"][0, :LOGIT_TOKENS]
    if "document_ids" in batch:
        documents_T = batch["document_ids"][0, :LOGIT_TOKENS]
        ids_T = ids_T[documents_T == documents_T[0]]
    with eager():
        logits_TV = next_logits(model, ids_T[None])[0].float()
    positions = _spaced_indices(len(ids_T), LOGIT_POSITIONS)
    token_ids = _spaced_indices(logits_TV.shape[1], LOGIT_IDS)
    return {
        "input_ids": ids_T.tolist(),
        "positions": positions,
        "token_ids": token_ids,
        "values": logits_TV[positions][:, token_ids].tolist(),
    }


def _spaced_indices(size: int, count: int) -> list[int]:
    """Return at most `count` distinct indices, evenly spaced from 0 to `size` - 1."""
    count = min(size, count)
    return sorted({round(each * (size - 1) / max(count - 1, 1)) for each in range(count)})


def check(
    engine: Engine,
    batches: Iterable[Mapping[str, torch.Tensor]],
    plan: Plan,
    manifest: Mapping[str, Any],
    where: Path,
) -> str:
    """Measure the probe on a loaded engine, and compare its loss with the manifest.

    All ranks call this.

    Args:
        where: path of the manifest, for messages.

    Returns:
        The result as a line for the log.

    Raises:
        CheckpointError: on every rank, if the loss on any rank differs from the saved loss.
    """
    saved = manifest.get("probe")
    if saved is None:
        return "not in this checkpoint"
    if saved["data"] != _data_identity(plan):
        return "not compared, because this run's data yields other sequences"
    branch: Mapping[str, Any] = plan.branch or {}
    begins = branch.get("step") == manifest["progress"]["step"]
    if begins and any(map(is_position, branch.get("changes", ()))):
        return "not compared, because the branch's positions differ from its trunk's"
    if fault_point("resume.probe", manifest["progress"]["step"]) == "x10":
        for parameter in engine.module.parameters():
            multiply(parameter, 10)
    now = measure(engine, batches, plan)
    exact = not plan.resharded(manifest) and plan.device == "cpu"
    exact = exact and now["made_by"] == saved["made_by"]
    tolerance = 0.0 if exact else TOLERANCES[plan.ds.compute_precision]
    before, after = float.fromhex(saved["loss_hex"]), now["loss"]
    differs = not abs(after - before) <= tolerance * abs(before)  # NaN differs
    found = gather_objects((after, differs))
    problems = [
        f"{where}: probe.loss: {before} ({saved['loss_hex']}) when it was saved, but {loss} "
        f"({loss.hex()}) on rank {rank} after loading; {_rule(tolerance)}. The weights in memory "
        f"differ from the checkpoint. Check the machine of that rank, or resume with the topology "
        f"and versions of the save."
        for rank, (loss, wrong) in enumerate(found)
        if wrong
    ]
    if problems:
        raise CheckpointError(problems)
    if after == before:
        return f"{after:.6f}, bit-identical to the saved one"
    return f"{after:.6f}, within {abs(after - before) / abs(before):.1e} of the saved one"


def _rule(tolerance: float) -> str:
    return f"the relative difference may be {tolerance:.1e}" if tolerance else "they must be equal"


def _data_identity(plan: Plan) -> dict[str, Any]:
    """Return the data fingerprint and the settings that determine the probe's tokens."""
    return {
        "fingerprint": plan.data_fingerprint,
        "seq_len": plan.settings.seq_len,
        "document_mask": plan.settings.document_mask,
        **({"packing": plan.settings.packing} if plan.settings.packing != CONCAT else {}),
        "sequences": num_sequences(plan),
    }


def _numerics(plan: Plan) -> dict[str, Any]:
    """Return what, in addition to the topology, determines how the probe's loss is rounded.

    On CPUs, equal values and topologies give bit-identical losses.
    """
    return {
        "micro_batch_size": plan.settings.micro_batch_size,
        "attention": plan.settings.attn_implementation,
        "loss_chunk_tokens": plan.settings.loss_chunk_tokens,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
    }
