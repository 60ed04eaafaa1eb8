"""A run of a tiny model in this process, without the launcher.

Each start writes its own profile and model config below a directory; the corpus is shared.
"""

import os
from pathlib import Path
from typing import Any

import torch

from tests.launching import LLAMA, free_port, write_json, write_shards

SEQ_LEN, BATCH = 32, 8


def flags(directory: Path, name: str, *more: object, **model_config: object) -> list[str]:
    if not (directory / "corpus").exists():
        write_shards(directory / "corpus", num_documents=4000)
    model_config = {**LLAMA, "attention_dropout": 0.1, **model_config}
    model = write_json(directory / f"{name}.model.json", model_config)
    config = {
        "zero_optimization": {"stage": 2},
        "bf16": {"enabled": "fp32" not in name},
        "data_types": {"grad_accum_dtype": "fp32"},
        "gradient_clipping": 1.0,
    }
    profile = write_json(directory / f"{name}.ds.json", config)
    given = [
        "--deepspeed_config", profile, "--model_config", model, "--data", directory / "corpus",
        "--run_dir", directory / name, "--seq_len", SEQ_LEN, "--batch_tokens", BATCH * SEQ_LEN,
        "--micro_batch_size", BATCH, "--total_tokens", 100_000_000, "--learning_rate", 1e-3,
        "--warmup_tokens", 20_000, "--log_interval", 100, "--checkpoint_interval", 1_000_000_000,
        "--wandb", "off", "--report_interval", "1000h", "--num_workers", 0,
        "--corruption_checks", *more,
    ]  # fmt: skip
    return [str(each) for each in given]


def start(argv: list[str]) -> Any:
    """Return a `Run` in this process, with what precedes the training loop done."""
    import pretrain
    from zerolm.distributed import process_group
    from zerolm.preflight import check
    from zerolm.train import stability
    from zerolm.train.run import Run

    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    plan = check.check(argv, {k: v for k, v in os.environ.items() if k != "MASTER_PORT"})
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    _, _, device = process_group.init() if not torch.distributed.is_initialized() else (0, 1, CPU)
    plan.run_dir.joinpath("checkpoints").mkdir(parents=True, exist_ok=True)
    engine = pretrain.build_engine(plan, device, lambda *values: None)
    run = Run(plan, engine, device, stability.StopRequest(None))
    run.journal.print_rank0 = run.print_rank0 = lambda *values: None
    run.start()
    return run


CPU = torch.device("cpu")
