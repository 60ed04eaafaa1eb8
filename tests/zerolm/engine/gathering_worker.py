"""One rank of test_gathering.py: the same steps of ZeRO-3, with weights gathered in several ways.

    RANK=0 WORLD_SIZE=2 ... python gathering_worker.py REPORT.json

Rank 0 writes, for each way and recomputation: `losses` and `norms` of the steps; `gathers`, of the
last step; `late`, which part of the weights was gathered only when its module began, in the forward
pass and in the backward pass; `peak`, how many values were gathered at a time.
"""

import json
import os
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.zero import partitioned_param_coordinator
from transformers import AutoConfig, AutoModelForCausalLM

from tests.zerolm.ds_config.ds_cases import shipped
from zerolm.features.gathered_blocks import GatheredBlocks
from zerolm.model.activation_checkpointing import checkpoint_kwargs
from zerolm.model.model import Model

WIDTH, STEPS = 32, 4
CONFIG = AutoConfig.for_model(
    "llama", hidden_size=WIDTH, intermediate_size=88, num_hidden_layers=6, num_attention_heads=2,
    num_key_value_heads=2, vocab_size=64, max_position_embeddings=32, use_cache=False,
)  # fmt: skip
Coordinator = partitioned_param_coordinator.PartitionedParameterCoordinator
GATHER = "_PartitionedParameterCoordinator__all_gather_params"
LIVE = "_PartitionedParameterCoordinator__n_available_params"


def engine_of(way: str, recompute: str) -> Any:
    """Return an engine that gathers by layer, or by block with the bucket for layers or blocks."""
    model = Model.from_config(CONFIG)
    block = model.block_sizes if way == "blocks" else ()
    config = shipped(
        "zero3.json",
        hidden_size=WIDTH,
        micro_batch_size=2,
        accumulation=1,
        replicas=int(os.environ["WORLD_SIZE"]),
        gathered_block=block,
    )
    # Release weights at once, as those of a large model are.
    config["zero_optimization"].update(
        stage3_max_live_parameters=3 * sum(model.block_sizes), stage3_max_reuse_distance=1
    )
    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=config):
        built = AutoModelForCausalLM.from_config(CONFIG, dtype=torch.bfloat16)
    if recompute:
        built.gradient_checkpointing_enable(checkpoint_kwargs(recompute))
    if way != "layers":
        GatheredBlocks(SimpleNamespace(settings=None)).change_model(built)
    engine, *_ = deepspeed.initialize(
        model=built.train(), model_parameters=list(built.parameters()), config=config
    )
    return engine


def report_of(way: str, recompute: str) -> dict[str, Any]:
    engine, counts, peak = engine_of(way, recompute), Counter(), 0
    usual = getattr(Coordinator, GATHER)

    def gather(self: Any, parameters: Any, forward: bool) -> None:
        nonlocal peak
        caller = sys._getframe(1).f_locals
        kind = "ahead" if parameters is caller.get("params_to_prefetch") else "late"
        missing = [one.ds_numel for one in parameters if one.ds_status.name == "NOT_AVAILABLE"]
        counts["gathers"] += bool(missing)
        counts[kind, forward and torch._C._current_graph_task_id() == -1] += sum(missing)
        usual(self, parameters, forward)
        peak = max(peak, getattr(self, LIVE))

    setattr(Coordinator, GATHER, gather)
    losses, norms = [], []
    for step in range(STEPS):
        counts.clear()
        generator = torch.Generator().manual_seed(10 * step + int(os.environ["RANK"]))
        ids = torch.randint(0, CONFIG.vocab_size, (2, 16), generator=generator)
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        norms.append(float(engine.get_global_grad_norm()))
    setattr(Coordinator, GATHER, usual)
    engine.destroy()
    late = [
        counts["late", forward] / (counts["late", forward] + counts["ahead", forward])
        for forward in (True, False)
    ]
    gathers = counts["gathers"]
    return {"losses": losses, "norms": norms, "gathers": gathers, "late": late, "peak": peak}


def main(output: str) -> None:
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo", verbose=False)
    found = {
        f"{way} {recompute}".strip(): report_of(way, recompute)
        for way in ("layers", "blocks, bucket for layers", "blocks")
        for recompute in ("", "full", "selective")
    }
    if int(os.environ["RANK"]) == 0:
        Path(output).write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
