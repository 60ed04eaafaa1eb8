"""Find the weights that `--init_from` names; check them against the model config and the data.

Reads configs, headers and tokenizers, but no weight values. A run that has a checkpoint no longer
needs the source, which is then neither read nor checked.
"""

import copy
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerolm.checkpoint import directory as checkpoints
from zerolm.common.errors import CheckpointError, ConfigError, Findings, RecordError, reason
from zerolm.common.records import read_json
from zerolm.common.values import shown_bytes
from zerolm.config.settings import Settings
from zerolm.ds_config import topology
from zerolm.export.generation import id_list
from zerolm.export.tokenizer import first_source, generation_of
from zerolm.features import completep
from zerolm.model.model import Model
from zerolm.plan.plan import Plan
from zerolm.preflight import run_record, separators
from zerolm.pretrained import hub, source_config
from zerolm.pretrained.initial_source import InitialSource
from zerolm.run_dir.files import MANIFEST, RunFiles, checkpoint_directories, run_of
from zerolm.run_dir.records import find_run_json, read_run_json
from zerolm.shards.reader import Source
from zerolm.upload.rules import stored_record

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from zerolm.pretrained.safetensors_files import Tensors


@dataclass(frozen=True)
class Opened:
    """A source whose config and headers were read.

    Attributes:
        entry: fields of `InitialSource`.
        config: the source's model config.
        tensors: the source's weights; None if the run resumes.
        tokenizer: directory of the source's tokenizer; None if unknown.
        shards: token shards of the source, if it is a run and they are found.
    """

    entry: InitialSource
    config: "PretrainedConfig"
    tensors: "Tensors | None" = None
    tokenizer: Path | None = None
    shards: Source | None = None


def open_source(settings: Settings, found: Findings) -> Opened | None:
    """Open the source that `--init_from` names.

    Returns None if the source is refused; the reasons are added to `found`.
    """
    name = settings.init_from
    assert name is not None
    try:
        record = _resumed_record(settings)
        if record is not None:
            return _recorded(record)
        path = Path(name).expanduser()
        run, step = checkpoints.split_step(path)
        is_run = RunFiles(run).checkpoints.is_dir() or (path / MANIFEST).is_file()
        if is_run or (step is not None and run.is_dir()):
            return _open_checkpoint(name, path)
        if path.is_dir():
            return _open_model(name, path, "", str(path))
        above = path.parent != Path() and path.parent.is_dir()  # so it is not a hub id
        if path.exists() or above or hub.split_id(name) is None:
            kind = "is a file" if path.exists() else "no such directory"
            raise ConfigError(
                f"--init_from {name}: {kind}. Give a Hugging Face model directory or hub id, or "
                f"RUN[@STEP] of a run."
            )
        directory, hub_id, exact = hub.fetch(name)
        return _open_model(name, directory, hub_id, exact)
    except ConfigError as error:
        found.problems += error.problems
        return None


def _resumed_record(settings: Settings) -> Mapping[str, Any] | None:
    """Return the run.json of a run that starts from a checkpoint of its own or of its trunk, else
    None.
    """
    if settings.run_dir is None:
        return None
    try:
        if checkpoint_directories(RunFiles(settings.run_dir).checkpoints):
            record: Mapping[str, Any] | None = find_run_json(settings.run_dir)
        elif settings.branch is not None:  # starts from the trunk's checkpoint
            record = find_run_json(run_of(settings.branch)[0])
        else:
            stored = stored_record(settings, [])
            record = stored[1] if stored else None
    except RecordError:
        return None  # reported when the run is compared
    return record if record and record.get("initial_weights") else None


def _recorded(record: Mapping[str, Any]) -> Opened:
    return Opened(
        InitialSource.recorded(record["initial_weights"]), config_of(record["model_config"])
    )


def config_of(values: Mapping[str, Any]) -> "PretrainedConfig":
    """Return the config recorded in the `model_config` entry of run.json or a checkpoint's
    manifest.
    """
    from transformers import AutoConfig

    settings = dict(values)
    return AutoConfig.for_model(settings.pop("model_type"), **settings)


def _open_checkpoint(name: str, path: Path) -> Opened:
    """Open the float32 master weights in a run's checkpoint."""
    from zerolm.ds_files.zero_files import Weights

    checkpoint = checkpoints.locate(path)
    directory, manifest = checkpoint.directory, checkpoint.manifest
    if problems := checkpoints.verify_files(checkpoint, checksums=False):
        raise CheckpointError(problems)
    try:
        weights = Weights(directory, manifest)
    except CheckpointError:
        raise
    except Exception as error:  # torch.load may raise anything for a damaged file
        why = reason(error, named=False)
        raise CheckpointError(f"{directory}: its weights cannot be read ({why}).") from None
    run_dir, progress = directory.parent.parent, checkpoint.progress
    entry = InitialSource(
        given=name,
        source=f"{run_dir}@{progress.step}",
        hub_id="",
        digest=checkpoint.digest,
        about=f"step {progress.step:,}, {progress.tokens:,} tokens, float32",
        vocab_size=0,
        checkpoint=directory,
        generation=generation_of(run_dir) or {},
        parametrization=completep.recorded(find_run_json(run_dir) or {}),
        verify=partial(checkpoints.verify_files, checkpoint),
    )
    shards = tokenizer = None
    with suppress(ConfigError):  # the run's token shards have been moved or damaged
        shards = first_source(run_dir)
        tokenizer = None if shards is None else shards.tokenizer_directory()
    return Opened(entry, config_of(manifest["model_config"]), weights, tokenizer, shards)


def _open_model(name: str, path: Path, hub_id: str, exact: str) -> Opened:
    """Open a Hugging Face model directory."""
    from zerolm.model.config_file import load_model_config
    from zerolm.pretrained.safetensors_files import SafetensorsFiles

    problems: list[str] = []
    config = files = None
    try:
        config = load_model_config(path)
    except ConfigError as error:
        problems += error.problems
    try:
        files = SafetensorsFiles(path)
    except ConfigError as error:
        problems += error.problems
    if config is None or files is None:
        raise ConfigError(problems)
    dtypes = sorted({tensor.dtype for tensor in files.listed.values()})
    size = sum(file.stat().st_size for file in files.files)
    about = f"{len(files.files)} file(s), {shown_bytes(size)}, {', '.join(dtypes)}"
    entry = InitialSource(
        name, exact, hub_id, files.digest(), about, 0, generation=_generation(path)
    )
    return Opened(entry, config, files, path)


def _generation(path: Path) -> dict[str, Any]:
    """Return the generation settings from a model directory's files, without the version
    entries.
    """
    file = path / "generation_config.json"
    values = read_json(file, "a generation config") if file.is_file() else {}
    config = read_json(path / "config.json", "a model config")
    config |= config.get("text_config") or {}
    values.setdefault("bos_token_id", config.get("bos_token_id"))
    ends = [number for each in (values, config) for number in id_list(each.get("eos_token_id"))]
    values["eos_token_id"] = list(dict.fromkeys(ends))
    unwanted = ("transformers_version", "_from_model_config")
    return {key: value for key, value in values.items() if key not in unwanted}


def model_of(opened: Opened, given: Model | None, found: Findings) -> Model | None:
    """Return the model given by `--model_config`, or by default the source's model."""
    where = opened.entry.source
    if given is None:
        if opened.tensors is not None and opened.entry.checkpoint is None:
            found.notices += source_config.router_notices(opened.config, where)
        return Model.from_config(opened.config, where)
    if opened.tensors is None:
        return given
    result = source_config.compare(given.config, given.path, opened.config, where)
    found.problems += result.problems
    found.notices += result.notices
    return None if result.problems else given


def complete(
    opened: Opened,
    model: Model,
    sources: Sequence[Source],
    settings: Settings,
    found: Findings,
) -> tuple[Model, InitialSource | None]:
    """Check the source against the token shards; return the run's model and the plan's entry for
    the initial weights.

    Without `--model_config`, a vocabulary smaller than the shards' is enlarged to their size.
    """
    entry = opened.entry
    if opened.tensors is None:
        return model, entry
    old_size = opened.config.get_text_config().vocab_size
    largest = max((source.vocab_size for source in sources), default=0)
    if settings.model_config is None and largest > old_size:
        config = copy.deepcopy(opened.config)
        config.get_text_config().vocab_size = largest
        model = Model.from_config(config, model.path)
    found.problems += _tokenizer_problems(opened, sources, found)
    if sources:
        found.notices += separators.weights_notices(
            f"--init_from {entry.source}",
            entry.generation,
            opened.shards,
            opened.tokenizer,
            sources[0],
        )
    from zerolm.pretrained.loaded_weights import LoadedWeights

    try:
        weights = LoadedWeights(
            model.config, opened.config, opened.tensors, entry.source, settings.seed
        )
    except ConfigError as error:
        found.problems += error.problems
        return model, None
    return model, replace(entry, vocab_size=old_size, weights=weights)


def _tokenizer_problems(opened: Opened, sources: Sequence[Source], found: Findings) -> list[str]:
    """Compare the shards' tokenizer with the source's, and return a problem if they differ."""
    from zerolm.pretrained.vocabulary import difference, vocabulary

    try:
        theirs = vocabulary(opened.tokenizer) if opened.tokenizer else None
        if theirs is None:
            found.notices.append(
                f"--init_from {opened.entry.source}: has no tokenizer, so it cannot be checked "
                "that the ids in the token shards mean the same tokens"
            )
            return []
        if not sources:
            return []
        first = sources[0]  # all sources have the same tokenizer
        ours = vocabulary(first.tokenizer_directory())
        if ours is None:
            found.notices.append(
                f"{first.directory}: has no copy of its tokenizer to compare with that of "
                f"--init_from {opened.entry.source}"
            )
        elif text := difference(ours, theirs):
            return [
                f"{first.directory}: its tokenizer differs from that of --init_from "
                f"{opened.entry.source}: {text}. Tokenize the text with the latter."
            ]
        return []
    except ConfigError as error:
        return error.problems


def optimizer_problems(plan: Plan) -> list[str]:
    """Return the problems that prevent `--init_optimizer` from loading the source's optimizer
    states.
    """
    settings, initial = plan.settings, plan.initial
    if not settings.init_optimizer or (initial is not None and initial.weights is None):
        return []
    where = settings.where("init_optimizer")
    if initial is None or initial.checkpoint is None:
        return [
            f"{where}: needs --init_from RUN[@STEP], a zerolm run, because only its checkpoints "
            "contain optimizer states. Remove the flag, or name a run."
        ]
    if plan.ds.scheduler:
        return [
            f"{where}: the scheduler in {plan.ds.name} would resume at the source's step. "
            "Remove this block from the file, and use --schedule."
        ]
    checkpoint = checkpoints.read(initial.checkpoint)
    path = checkpoint.directory / MANIFEST
    record = read_run_json(checkpoint.directory.parents[1])
    # These settings describe how the source itself started.
    begins = ("settings.init", "initial_weights")
    problems = [
        f"{where}: {path}: {one} ({one.where}): {one.obstacle}. Use the old value, or remove "
        f"--init_optimizer."
        for one in run_record.differences(record, plan, 0)
        if one.obstacle and not one.key.startswith(begins)
    ]
    if not problems and plan.resharded(checkpoint.manifest):
        problems = topology.problems(checkpoint.manifest, str(path), plan.ds)
    return problems
