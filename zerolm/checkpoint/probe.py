"""The loss of a fixed batch, kept with every checkpoint and measured again after it was loaded.

The batch is the first window of each training source, the same on every rank and for any number of
ranks. It is measured without dropout and without gradients, so that nothing of training changes;
every rank measures it whole, so that weights that differ on one rank are seen. Training goes on
only if each rank comes to the loss that is in the manifest.

Beside it stand some logits of the batch's first tokens, for an export to be compared with.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from zerolm.common.errors import CheckpointError
from zerolm.common.faults import fault_point
from zerolm.config.settings import CONCAT
from zerolm.distributed.collectives import gather_objects
from zerolm.model.compile import eager
from zerolm.model.loss import IGNORED, token_losses
from zerolm.plan.plan import Plan

MOST_SEQUENCES = 8  # of as many sources; a micro-batch costs the same anyway
LOGIT_TOKENS, LOGIT_POSITIONS, LOGIT_IDS = 64, 8, 16  # at most: they are numbers in a JSON file
# Largest relative difference after a change of topology or machine, where sums are made in another
# order or by other kernels: in float32 about 1e-7 for each of them, of which a few dozen follow
# each other; with 16-bit weights half a unit in the last place of bf16, which every logit may move
# by, and their mean by less.
TOLERANCES = {"fp32": 1e-5, "bf16": 2.0**-9, "fp16": 2.0**-9}


def num_sequences(plan: Plan) -> int:
    """Return how many sequences a probe has."""
    return min(MOST_SEQUENCES, len(plan.sources))


def measure(engine: Any, batches: Iterable[Mapping[str, torch.Tensor]], plan: Plan) -> dict:
    """Return a manifest's entry: the loss, in hex too, and what decides it. Every rank must call.

    Args:
        engine: the DeepSpeed engine; it is in training mode afterwards.
        batches: the fixed batch in micro-batches, the same ones on every rank.
        plan: of the run.
    """
    total, count = 0.0, 0
    logits: dict[str, Any] = {}
    engine.eval()
    with torch.no_grad(), eager():
        for batch in batches:
            losses_BT, _ = token_losses(engine, dict(batch))
            total += float(losses_BT.double().sum())
            count += int((batch["targets"] != IGNORED).sum())
            logits = logits or some_logits(engine, batch)
    engine.train()
    loss = total / count
    return {
        "loss": loss,
        "loss_hex": loss.hex(),
        "data": _data(plan),
        "made_by": _made_by(plan),
        "logits": {**logits, "precision": plan.profile.compute_precision},
    }


def some_logits(model: Any, batch: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return the first tokens of a micro-batch, of one document, and some of their logits.

    They go through the model alone, without a mask or positions, as an exported model is used: an
    export that computes them in the same shape can come to the same bits.

    Args:
        model: a causal LM or a DeepSpeed engine around one, in evaluation mode.
        batch: a micro-batch on its device.
    """
    ids_T = batch["input_ids"][0, :LOGIT_TOKENS]
    if "document_ids" in batch:
        documents_T = batch["document_ids"][0, :LOGIT_TOKENS]
        ids_T = ids_T[documents_T == documents_T[0]]
    with eager():
        logits_TV = model(input_ids=ids_T[None], use_cache=False).logits[0].float()
    positions = _spread(len(ids_T), LOGIT_POSITIONS)
    token_ids = _spread(logits_TV.shape[1], LOGIT_IDS)
    return {
        "input_ids": ids_T.tolist(),
        "positions": positions,
        "token_ids": token_ids,
        "values": logits_TV[positions][:, token_ids].tolist(),
    }


def _spread(size: int, count: int) -> list[int]:
    """Return at most `count` different indices from the first to the last of `size`."""
    count = min(size, count)
    return sorted({round(each * (size - 1) / max(count - 1, 1)) for each in range(count)})


def check(
    engine: Any,
    batches: Iterable[Mapping[str, torch.Tensor]],
    plan: Plan,
    manifest: Mapping[str, Any],
    where: Path,
) -> str:
    """Measure the probe on a loaded engine and compare it with the manifest. Every rank must call.

    Args:
        where: the manifest's path.

    Returns:
        What to say about it.

    Raises:
        CheckpointError: on every rank: a rank's loss is another one than when it was saved.
    """
    saved = manifest.get("probe")
    if saved is None:
        return "the checkpoint has none"
    if saved["data"] != _data(plan):
        return "not compared, since its sequences are not in this run's data"
    if fault_point("resume.probe", manifest["progress"]["step"]) == "x10":
        for parameter in engine.module.parameters():
            parameter.data.mul_(10)
            if hasattr(parameter, "ds_tensor"):  # ZeRO-3: what the next gathering gets
                parameter.ds_tensor.data.mul_(10)
    now = measure(engine, batches, plan)
    exact = not plan.resharded(manifest) and plan.device == "cpu"
    exact = exact and now["made_by"] == saved["made_by"]
    tolerance = 0.0 if exact else TOLERANCES[plan.profile.compute_precision]
    before, after = float.fromhex(saved["loss_hex"]), now["loss"]
    differs = not abs(after - before) <= tolerance * abs(before)  # NaN differs
    found = gather_objects((after, differs))
    problems = [
        f"{where}: probe.loss: {before} ({saved['loss_hex']}) when it was saved, {loss} "
        f"({loss.hex()}) on rank {rank} after loading, where {_allowed(tolerance)}. The weights in "
        f"memory are not those of the checkpoint. Check that machine, or resume as it was saved."
        for rank, (loss, wrong) in enumerate(found)
        if wrong
    ]
    if problems:
        raise CheckpointError(problems)
    same = "to the bit" if after == before else f"to {abs(after - before) / abs(before):.1e}"
    return f"{after:.6f}, {same} as when it was saved"


def _allowed(tolerance: float) -> str:
    return f"they may differ by {tolerance:.1e} of it" if tolerance else "they must be equal"


def _data(plan: Plan) -> dict[str, Any]:
    """Return what decides which tokens the probe has."""
    return {
        "fingerprint": plan.data_fingerprint,
        "seq_len": plan.settings.seq_len,
        "document_mask": plan.settings.document_mask,
        **({"packing": plan.settings.packing} if plan.settings.packing != CONCAT else {}),
        "sequences": num_sequences(plan),
    }


def _made_by(plan: Plan) -> dict[str, Any]:
    """Return what decides the rounding, beside the topology: equal on CPUs gives equal bits."""
    return {
        "micro_batch_size": plan.settings.micro_batch_size,
        "attention": plan.settings.attn_implementation,
        "loss_chunk_tokens": plan.settings.loss_chunk_tokens,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
    }
