"""Loads a model from a checkpoint or model directory in one process, without an engine."""

from pathlib import Path
from typing import Any, NamedTuple

from zerolm.checkpoint.directory import locate, verify_files
from zerolm.common.errors import CheckpointError, ConfigError
from zerolm.distributed.device import inference_device
from zerolm.evaluate.text_coder import TextCoder
from zerolm.export.export import DTYPES, check_logits
from zerolm.export.tokenizer import first_source, missing_tokenizer


class LoadedModel(NamedTuple):
    """A model in evaluation mode.

    Attributes:
        coder: the model's tokenizer, which begins texts as the training data do.
        about: one line about the model for the user.
    """

    model: Any
    coder: TextCoder
    about: str


def load_model(reference: str | Path, device: str | None = None) -> LoadedModel:
    """Load a model directory, or a checkpoint found by `locate`, in its own precision.

    If no device is given, use a GPU if available.
    """
    device, directory = inference_device(device), Path(reference)
    if (directory / "config.json").is_file():
        return _load_directory(directory, device)
    return _load_checkpoint(reference, device)


def _load_directory(directory: Path, device: str) -> LoadedModel:
    from transformers.utils import logging

    from zerolm.evaluate.exported_model import load_directory

    logging.disable_progress_bar()
    model = load_directory(directory)
    about = f"{directory}: {model.num_parameters():,} parameters, {model.dtype}, on {device}"
    return LoadedModel(model.to(device).eval(), TextCoder(directory), about)


def _load_checkpoint(reference: str | Path, device: str) -> LoadedModel:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    from zerolm.ds_files.zero_files import Weights
    from zerolm.export.weights import fitting

    checkpoint = locate(reference)
    if problems := verify_files(checkpoint):
        raise CheckpointError(problems)
    run_dir, manifest = checkpoint.directory.parent.parent, checkpoint.manifest
    source = first_source(run_dir)
    if source is None or not source.tokenizer_directory().is_dir():
        raise ConfigError(
            f"{missing_tokenizer(run_dir)}. Restore the shards with their tokenizer, or export the "
            f"run and add a tokenizer to the model directory."
        )
    settings, precision = dict(manifest["model_config"]), manifest["precision"]
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    config.use_cache = True
    with no_init_weights():
        model: Any = AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, DTYPES[precision]), trust_remote_code=False
        )
    model.tie_weights()
    weights = Weights(checkpoint.directory, manifest)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(fitting(name, weights[name], parameter))
        # Replace the buffers, because the checkpoint may store them in a higher precision (router
        # biases).
        for name in set(weights.buffers) & set(model.state_dict()):
            path, _, leaf = name.rpartition(".")
            model.get_submodule(path)._buffers[leaf] = weights[name].clone()
    weights.release()
    checked = check_logits(model, manifest.get("probe", {}).get("logits"), precision, reference)
    progress = checkpoint.progress
    about = (
        f"{checkpoint.directory}: step {progress.step:,}, {progress.tokens:,} tokens, "
        f"{model.num_parameters():,} parameters, {model.dtype}, on {device}; {checked}"
    )
    return LoadedModel(model.to(device).eval(), TextCoder.of_shards(source), about)
