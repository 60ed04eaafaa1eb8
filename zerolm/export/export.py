"""Exports a checkpoint to a Hugging Face model directory that `from_pretrained` loads.

The weights are the optimizer's float32 master weights, assembled from the shards of all ranks, so
an export depends neither on the ZeRO stage nor on the world size. The written model is reloaded as
a user would load it, and its logits are compared with the training engine's. `write_model` writes
given weights in place of those of a checkpoint.
"""

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from zerolm.common.errors import CheckpointError, ConfigError
from zerolm.common.files import (
    make_directories,
    set_default_modes,
    sync_directory,
    sync_tree,
)
from zerolm.common.values import shown_bytes
from zerolm.shards.tokenizer import TOKENIZER_FILE, load_auto_tokenizer, make_portable

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
MAX_SHARD_BYTES = 5 * 10**9
# Maximum difference between two logits, relative to the largest logit. Kernels on another machine
# sum in a different order; with 16-bit weights or activations, each layer has a relative rounding
# error of 2^-9.
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
    *,
    state: str | None = None,
    source: Mapping[str, Any] | None = None,
) -> str:
    """Write the Hugging Face model directory of a checkpoint.

    Args:
        checkpoint_dir: a verified checkpoint.
        state: optimizer state to write instead of the weights, such as their moving average.
            Checkpoints contain no engine logits with which to compare such a state.

    The other arguments, the result and the errors are the same as for `write_model`.
    """
    from zerolm.ds_files.zero_files import MASTER, Weights

    logits = None if state else manifest.get("probe", {}).get("logits")
    return write_model(
        Weights(checkpoint_dir, manifest, state=state or MASTER),
        manifest,
        output,
        precision,
        tokenizer_dir,
        eos_id,
        model_card,
        lambda directory, precision: compare_logits(directory, logits, precision),
        max_shard_bytes,
        source,
    )


class WeightsByName(Protocol):
    """A model's weights, loaded one tensor at a time."""

    def __getitem__(self, name: str) -> Any: ...

    def release(self) -> None:
        """Close open files; the caller no longer uses tensors returned earlier."""


def write_model(
    weights: WeightsByName,
    manifest: Mapping[str, Any],
    output: Path,
    precision: str | None,
    tokenizer_dir: Path | None,
    eos_id: int | None,
    model_card: Callable[[int], Mapping[str, bytes]],
    check: Callable[[Path, str], str],
    max_shard_bytes: int = MAX_SHARD_BYTES,
    source: Mapping[str, Any] | None = None,
) -> str:
    """Write a Hugging Face model directory: safetensors, config, tokenizer, model card.

    Needs host memory for one safetensors file and one decoder block, regardless of model size.

    Args:
        manifest: the checkpoint manifest with the model's config and training precision.
        output: must not exist; created only when complete.
        precision: "bf16", "fp16" or "fp32"; None for the training precision.
        tokenizer_dir: files to copy into the model directory.
        eos_id: token id that ends generation; None leaves the config unchanged.
        model_card: takes the number of parameters; returns {file name: content} for README.md and
            its images.
        check: takes the model directory and precision; returns a line about the result, or raises
            an error to refuse the model.
        max_shard_bytes: maximum size of a safetensors file.
        source: generation config from the run's initial weights, if any.

    Returns:
        The lines to print: the result, and any notes.
    """
    import torch
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM

    from zerolm.export.generation import (
        position_notices,
        set_for_inference,
        set_special_ids,
        with_values_of,
        zeroes_padding_row,
    )
    from zerolm.export.older_keys import add_older_keys, drop_idle_share, set_tied
    from zerolm.export.weights import write_weights

    notices: list[str] = []
    by_file: list[str] = []  # reasons to load the tokenizer from its file
    precision = precision or manifest["precision"]
    dtype = getattr(torch, DTYPES[precision])
    settings = dict(manifest["model_config"])
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    config.use_cache = True
    if eos_id is not None:
        notices += set_special_ids(config, eos_id, tokenizer_dir, source)
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, trust_remote_code=False
        )
    skeleton.tie_weights()
    if zeroes_padding_row(skeleton):
        config.get_text_config().pad_token_id = skeleton.config.pad_token_id = None
    # A config may have parts other than its text part; `AutoModelForCausalLM` may support only the
    # full config.
    known = type(skeleton.config) in MODEL_FOR_CAUSAL_LM_MAPPING
    saved = skeleton.config if known else config
    notices += set_for_inference(saved)
    set_tied(saved, skeleton)
    notices += drop_idle_share(saved, skeleton)
    saved.dtype = dtype
    saved.architectures = [type(skeleton).__name__]
    check_room(output, skeleton.num_parameters() * dtype.itemsize)
    make_directories(output.parent)
    temporary = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    temporary.mkdir()
    try:
        saved.save_pretrained(temporary)
        notices += add_older_keys(temporary, saved)
        notices += position_notices(skeleton)
        if skeleton.can_generate():
            generation, left_out = with_values_of(source or {}, skeleton.generation_config)
            generation.save_pretrained(temporary)
            notices += left_out
        size_bytes = write_weights(
            skeleton, weights.__getitem__, weights.release, temporary, dtype, max_shard_bytes
        )
        if tokenizer_dir is not None and tokenizer_dir.is_dir():
            shutil.copytree(tokenizer_dir, temporary, dirs_exist_ok=True)
            make_portable(temporary)
            by_file = _tokenizer_notices(temporary)
            notices += by_file
        for name, content in model_card(skeleton.num_parameters()).items():
            if by_file:
                content = content.replace(b"AutoTokenizer", b"PreTrainedTokenizerFast")
            (temporary / name).write_bytes(content)
        set_default_modes(temporary)
        result = check(temporary, precision)
        sync_tree(temporary)
        os.replace(temporary, output)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync_directory(output.absolute().parent)
    notes = (f"\nnote: {line}".replace(str(temporary), str(output)) for line in notices)
    return f"{precision}, {shown_bytes(size_bytes)} of weights; {result}" + "".join(notes)


def _tokenizer_notices(directory: Path) -> list[str]:
    """Return a line if AutoTokenizer produces different ids next to this model than without it."""
    notices: list[str] = []
    if (directory / TOKENIZER_FILE).is_file():
        load_auto_tokenizer(str(directory), local=True, notices=notices)
    return notices


def check_room(output: Path, needed_bytes: int) -> None:
    """Check that an output path does not exist and that its disk has enough space.

    Raises:
        ConfigError: the output exists, or the disk has too little space.
    """
    if output.exists():
        raise ConfigError(f"{output}: already exists. Choose another directory, or remove it.")
    above = next(parent for parent in output.absolute().parents if parent.is_dir())
    free_bytes = shutil.disk_usage(above).free
    if free_bytes < needed_bytes:
        raise ConfigError(
            f"{output}: needs {shown_bytes(needed_bytes)}, but {above} has "
            f"{shown_bytes(free_bytes)} "
            f"free. Choose another disk, or free space."
        )


def compare_logits(directory: Path, saved: Mapping[str, Any] | None, precision: str) -> str:
    """Load a model directory as a user would, and compare its logits with the training engine's.

    Args:
        saved: the training engine's logits from `probe.sample_logits`, and its precision; None for
            a checkpoint written by a version that did not save them.
        precision: precision of the weights in the directory.

    Returns:
        The result, to be printed.
    """
    return check_logits(load_exported(directory), saved, precision, directory)


def check_logits(
    model: Any, saved: Mapping[str, Any] | None, precision: str, where: str | Path
) -> str:
    """Compare a model's logits with the training engine's, as recorded in a checkpoint.

    Args:
        saved, precision: see `compare_logits`.
        where: name of the model in messages.

    Returns:
        The result, to be printed.
    """
    import torch

    if saved is None:
        return "the checkpoint contains no logits of the training engine to compare with"
    with torch.no_grad():
        ids_BT = torch.tensor([saved["input_ids"]], device=model.device)
        logits_TV = model.eval()(input_ids=ids_BT, use_cache=False).logits[0].float().cpu()
    found = logits_TV[saved["positions"]][:, saved["token_ids"]]
    trained = torch.tensor(saved["values"])
    difference = float((found - trained).abs().max())
    share = difference / max(float(trained.abs().max()), 1e-6)
    allowed = max(LOGIT_TOLERANCES[precision], LOGIT_TOLERANCES[saved["precision"]])
    what = f"{trained.numel()} logits of the training engine and of the reloaded model"
    if not share <= allowed:  # NaN fails too
        raise CheckpointError(
            f"{where}: {what} differ by {share:.2e} of the largest logit, but rounding explains "
            f"only {allowed:.2e}, so this is not the trained model. Please report this with "
            f"the model's config."
        )
    if difference == 0:
        return f"{what} are bit-identical"
    return f"{what} agree to within {share:.1e} of the largest"


def load_exported(directory: Path) -> Any:
    """Load a model directory as a user would. On a CPU, its files are memory-mapped, not read."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        directory,
        dtype="auto",
        output_loading_info=True,
        local_files_only=True,
        trust_remote_code=False,
    )
    model, loading = loaded
    wrong = {key: sorted(map(str, loading[key])) for key in loading if loading[key]}
    if wrong:
        raise CheckpointError(
            f"{directory}: from_pretrained reports problems with the exported model: {wrong}"
        )
    return model
