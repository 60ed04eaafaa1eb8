"""From a checkpoint to a Hugging Face model directory that `from_pretrained` loads.

The weights are the float32 master copies that the optimizer holds, put together from the shards of
every rank, so that an export does not depend on the ZeRO stage or the world size. What was written
is loaded again, as a user would, and compared with logits that the training engine had.
"""

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from zerolm.common.errors import CheckpointError, ConfigError
from zerolm.common.files import sync_directory
from zerolm.common.values import shown_bytes

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
MAX_SHARD_BYTES = 5 * 10**9
# Largest difference of a logit, as a share of the largest one: kernels of another machine sum in
# another order; with 16-bit weights or activations each layer rounds to 2^-9 of its values.
LOGIT_TOLERANCES = {"fp32": 1e-4, "bf16": 2.0**-5, "fp16": 2.0**-5}


def export(
    checkpoint_dir: Path,
    manifest: dict[str, Any],
    output: Path,
    precision: str | None,
    tokenizer_dir: Path | None,
    eos_id: int | None,
    model_card: Callable[[int], Mapping[str, bytes]],
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> str:
    """Write a Hugging Face model directory: safetensors, config, tokenizer, model card.

    Host memory is that of one safetensors file and one decoder block, whatever the model's size.

    Args:
        checkpoint_dir: a checkpoint whose files were compared with its manifest already.
        manifest: that manifest.
        output: must not exist; it appears whole or not at all.
        precision: "bf16", "fp16" or "fp32" of the written weights; None for that of the training.
        tokenizer_dir: whose files are put beside the model; None for none.
        eos_id: ends generation; None leaves the config as it is.
        model_card: returns {file name: content} of README.md and its pictures, given the number of
            parameters.
        max_shard_bytes: of a safetensors file.

    Returns:
        What to say about it.

    Raises:
        ConfigError: `output` exists, or there is no room for it.
        CheckpointError: the written model has other logits than the training engine had.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from zerolm.checkpoint.zero_files import Weights
    from zerolm.export.weights import write_weights

    precision = precision or manifest["precision"]
    dtype = getattr(torch, DTYPES[precision])
    settings = dict(manifest["model_config"])
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    config.use_cache = True
    if eos_id is not None:
        config.eos_token_id, config.bos_token_id, config.pad_token_id = eos_id, None, None
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    skeleton.tie_weights()
    skeleton.config.dtype = dtype
    skeleton.config.architectures = [type(skeleton).__name__]
    check_room(output, skeleton.num_parameters() * dtype.itemsize)
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    temporary.mkdir()
    try:
        skeleton.config.save_pretrained(temporary)
        if skeleton.can_generate():
            skeleton.generation_config.save_pretrained(temporary)
        weights = Weights(checkpoint_dir, manifest)
        size_bytes = write_weights(
            skeleton, weights.__getitem__, weights.release, temporary, dtype, max_shard_bytes
        )
        if tokenizer_dir is not None and tokenizer_dir.is_dir():
            shutil.copytree(tokenizer_dir, temporary, dirs_exist_ok=True)
        for name, content in model_card(skeleton.num_parameters()).items():
            (temporary / name).write_bytes(content)
        compared = compare_logits(temporary, manifest.get("probe", {}).get("logits"), precision)
        os.replace(temporary, output)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync_directory(output.absolute().parent)
    return f"{precision}, {shown_bytes(size_bytes)} of weights; {compared}"


def check_room(output: Path, needed_bytes: int) -> None:
    """Refuse an output that exists, or that its disk has no room for.

    Raises:
        ConfigError: every problem found.
    """
    if output.exists():
        raise ConfigError(f"{output}: exists already. Choose another directory, or remove it.")
    above = next(parent for parent in output.absolute().parents if parent.is_dir())
    free_bytes = shutil.disk_usage(above).free
    if free_bytes < needed_bytes:
        raise ConfigError(
            f"{output}: needs {shown_bytes(needed_bytes)}, {above} has {shown_bytes(free_bytes)} "
            f"free. Choose another disk, or make room."
        )


def compare_logits(directory: Path, saved: Mapping[str, Any] | None, precision: str) -> str:
    """Load a model directory as a user would, and compare it with the engine that was saved.

    Args:
        saved: what `probe.sample_logits` returned there, with the precision that it computed in;
            None for checkpoints of versions that kept none.
        precision: of the weights in the directory.

    Returns:
        What to say about it.

    Raises:
        CheckpointError: it cannot be loaded whole, or a logit differs by more than rounding does.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        directory, dtype="auto", output_loading_info=True
    )
    model, loading = loaded
    wrong = {key: sorted(map(str, loading[key])) for key in loading if loading[key]}
    if wrong:
        raise CheckpointError(f"{directory}: from_pretrained says of what was exported: {wrong}")
    if saved is None:
        return "the checkpoint has no logits to compare it with"
    with torch.no_grad():
        ids_BT = torch.tensor([saved["input_ids"]])
        logits_TV = model.eval()(input_ids=ids_BT, use_cache=False).logits[0].float()
    ours = logits_TV[saved["positions"]][:, saved["token_ids"]]
    theirs = torch.tensor(saved["values"])
    difference = float((ours - theirs).abs().max())
    share = difference / max(float(theirs.abs().max()), 1e-6)
    allowed = max(LOGIT_TOLERANCES[precision], LOGIT_TOLERANCES[saved["precision"]])
    what = f"{theirs.numel()} logits of the training engine and of the reloaded model"
    if not share <= allowed:  # NaN differs
        raise CheckpointError(
            f"{directory}: {what} differ by {share:.2e} of the largest, where {allowed:.2e} is "
            f"rounding. Nothing was exported. Please report it, with the model's config."
        )
    return f"{what} are equal to {'the bit' if difference == 0 else f'{share:.1e} of the largest'}"
