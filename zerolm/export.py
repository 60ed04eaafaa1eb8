"""From a checkpoint to a Hugging Face model directory that `from_pretrained` loads.

The weights are the float32 master copies that the optimizer holds, put together from the shards of
every rank, so that an export does not depend on the ZeRO stage or the world size.
"""

import os
import shutil
from pathlib import Path
from typing import Any

from zerolm.errors import ConfigError
from zerolm.files import sync_directory

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def export(
    checkpoint_dir: Path,
    manifest: dict[str, Any],
    output: Path,
    precision: str | None,
    tokenizer_dir: Path | None,
    eos_id: int | None,
) -> None:
    """Write a Hugging Face model directory: safetensors, config, generation config, tokenizer.

    Args:
        checkpoint_dir: a checkpoint whose files were compared with its manifest already.
        manifest: that manifest.
        output: must not exist; it appears whole or not at all.
        precision: "bf16", "fp16" or "fp32" of the written weights; None for that of the training.
        tokenizer_dir: whose files are put beside the model; None for none.
        eos_id: ends generation; None leaves the config as it is.

    Raises:
        ConfigError: `output` exists.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    from zerolm.zero_files import whole_weights

    if output.exists():
        raise ConfigError(f"{output}: exists already. Choose another directory, or remove it.")
    settings = dict(manifest["model_config"])
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    config.use_cache = True
    if eos_id is not None:
        config.eos_token_id, config.bos_token_id, config.pad_token_id = eos_id, None, None
    state = whole_weights(checkpoint_dir, manifest)
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(state, strict=True)
    model.tie_weights()
    dtype = getattr(torch, DTYPES[precision or manifest["precision"]])
    for parameter in model.parameters():  # buffers, such as the rotary table, stay float32
        parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype
    temporary = output.with_name(output.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    model.save_pretrained(temporary)
    if tokenizer_dir is not None and tokenizer_dir.is_dir():
        shutil.copytree(tokenizer_dir, temporary, dirs_exist_ok=True)
    os.replace(temporary, output)
    sync_directory(output.absolute().parent)
