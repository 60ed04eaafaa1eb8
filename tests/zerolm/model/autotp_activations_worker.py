"""One of two AutoTP ranks: prints the bytes that autograd saves for a sequence."""

import deepspeed
import torch
from transformers import AutoConfig

from tests.launching import LLAMA, VOCABULARY
from zerolm.model.build import build_model
from zerolm.model.forward import token_losses
from zerolm.optim.parameter_groups import parameter_groups

SEQ_LEN = 64
CONFIG = AutoConfig.for_model(**LLAMA)
DS = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 1},
    "bf16": {"enabled": True},
    "data_types": {"grad_accum_dtype": "fp32"},
    "tensor_parallel": {"autotp_size": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
}


def main() -> None:
    deepspeed.init_distributed("gloo")
    model = build_model(
        CONFIG, seed=0, dtype=torch.bfloat16, zero3_config=None,
        attn_implementation="sdpa", gradient_checkpointing=False, device=torch.device("cpu"),
    )  # fmt: skip
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=parameter_groups(model, 0.1), config=DS
    )
    engine.train()
    kept = list(engine.module.parameters())
    seen = {one.untyped_storage()._cdata for one in kept}
    sizes = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            kept.append(tensor)
            sizes.append(storage.nbytes())
        return tensor

    torch.manual_seed(0)  # the same for both, which DeepSpeed asserts
    ids = torch.randint(0, VOCABULARY, (1, SEQ_LEN))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one):
        token_losses(engine, {"input_ids": ids, "targets": ids})
    if torch.distributed.get_rank() == 0:
        print(f"counted={sum(sizes)}", flush=True)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
