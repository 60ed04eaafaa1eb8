"""Everything that can be known before a process group exists: every problem at once, or the plan.

The first thing that each rank of pretrain.py does, and all that `--check` does. It reads the three
files, the data's manifests and the machine; it writes nothing. All ranks see the same files and
come to the same plan.
"""

import importlib.util
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerolm import (
    budget,
    checkpoint_directory,
    data_cache,
    defaults,
    ds_config,
    epoch_plan,
    evaluation_rules,
    loss_chunks,
    machine,
    memory,
    mixture_settings,
    muon,
    nvme,
    parallel,
    parallel_rules,
    resources,
    rollback,
    run_record,
    skipped,
    topology,
)
from zerolm.architecture import (
    causal_lm_class,
    load_model_config,
    num_parameters,
    parameter_shapes,
)
from zerolm.ds_optimizers import beta_problems, takes_betas
from zerolm.ds_resolve import resolve
from zerolm.ds_rules import rule_notices, rule_problems
from zerolm.ds_schema import schema_problems
from zerolm.errors import CheckpointError, ConfigError
from zerolm.flags import parse_settings
from zerolm.flops import flops_per_token
from zerolm.model_rules import (
    attention_problems,
    dropout_notices,
    has_router_loss,
    matmul_problems,
    max_positions,
    model_problems,
    router_notices,
)
from zerolm.order import MAX_SEQUENCES
from zerolm.packing import data_fingerprint, num_rows
from zerolm.plan import Plan, figures
from zerolm.schedule import BatchSchedule
from zerolm.settings import FLAGS
from zerolm.sources import find_source, open_sources, source_names, source_problems
from zerolm.upload_rules import stored_record, upload_problems
from zerolm.values import read_json, shown_bytes

if TYPE_CHECKING:
    from transformers import PretrainedConfig

REQUIRED = {
    "data": "token shards: --data PATH[=WEIGHT]",
    "model_config": "a model: --model_config config.json",
    "deepspeed_config": "a ZeRO profile: --deepspeed_config ds_configs/zero2.json",
    "run_dir": "a directory of its own: --run_dir runs/first",
}
SIZES = frozenset({"seq_len", "batch_tokens", "micro_batch_size", "total_tokens"})
BUCKET_KEYS = (
    "reduce_bucket_size",
    "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold",
)


def check(argv: Sequence[str], environment: Mapping[str, str] = os.environ) -> Plan:
    """Check a command line on this machine.

    Args:
        argv: flags, without the program's name.
        environment: of the launcher: `WORLD_SIZE`, `LOCAL_RANK`, ...

    Raises:
        ConfigError: every problem that was found, a line each.
    """
    return _Check(argv, environment).plan()


class _Check:
    """One pass over the input, which gathers problems and goes on as far as it can."""

    def __init__(self, argv: Sequence[str], environment: Mapping[str, str]):
        self.argv, self.environment = argv, environment
        self.notices: list[str] = []
        self.changed: dict[str, tuple[Any, Any]] = {}
        self.settings, self.problems = parse_settings(argv)
        # What was refused, or may have been meant by a typo: nothing is concluded from its absence.
        self.refused = {
            name
            for name in FLAGS
            for problem in self.problems
            if f"--{name}" in problem or f"settings.{name}:" in problem
        }
        for name, what in REQUIRED.items():
            if not getattr(self.settings, name) and name not in self.refused:
                self.problems.append(f"command line: --{name}: missing, a run needs {what}.")

    def plan(self) -> Plan:
        self._look_at_machine()
        self._read_model()
        self._read_ds_config()
        before = len(self.problems)
        self.sources = open_sources(self.settings, self.problems)
        self._prepare_sources()
        self.sources_are_sound = len(self.problems) == before and "data" not in self.refused
        self._resolve_settings()
        vocab_size = self.text_config.vocab_size if self.model_config is not None else None
        found = source_problems(self.sources, self.settings, vocab_size, self.settings.seq_len)
        self.problems += found
        if not found:
            self._resolve_mixture()
        self._check_model()
        self.problems += evaluation_rules.problems(self.settings)
        self.resumes = False
        self._check_run_dir()
        missing = evaluation_rules.missing(
            self.settings, self.sources.training, self.model_config, self.environment
        )
        if self.resumes:  # what only observes a run does not keep it from going on
            self.notices += [f"the run goes on without: {line}" for line in missing]
        else:
            self.problems += missing
        if self.problems:
            raise ConfigError(list(dict.fromkeys(self.problems)))
        return self._plan()

    def _prepare_sources(self) -> None:
        """Give what is in stores its cache, and say what is not checked as it is read."""
        every = [*self.sources.training, *self.sources.validation]
        self.problems += data_cache.prepare(self.settings, every)
        self.notices += [
            f"{source.directory} has no sums of blocks: only the sizes of its files are checked, "
            f"not what is read. Shards of this release have them"
            for source in every
            if not source.has_sums
        ]

    # ---- The machine

    def _look_at_machine(self) -> None:
        environment, settings = self.environment, self.settings
        self.world_size = 1
        for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
            value = environment.get(name, "1" if name == "WORLD_SIZE" else "0")
            if not value.isdigit() or (name == "WORLD_SIZE" and value == "0"):
                self.problems.append(
                    f"environment: {name}: {value!r}, must be a whole number. Start the run with "
                    f"deepspeed, or unset it."
                )
                self.device = machine.Device("cpu", None, True)
                return
        self.device = machine.local_device(environment, self.problems)
        if settings.check and settings.world_size:
            self.world_size = settings.world_size
            if not self.device.is_gpu:
                self.device = machine.Device("absent", machine.ASSUMED_DEVICE_BYTES, True)
                gibibytes = machine.ASSUMED_DEVICE_BYTES >> 30
                self.notices.append(
                    f"the devices of this run are not here: {gibibytes} GiB each are assumed"
                )
            return
        self.world_size = int(environment.get("WORLD_SIZE", 1))
        problem = machine.launcher_problem(self.argv, environment)
        if problem:
            self.problems.append(problem)
        stale, fresh = machine.build_locks(environment)
        self.problems += [
            f"{lock}: left by a build that was killed: every rank would wait for it forever. "
            f"Delete it."
            for lock in stale
        ]
        self.notices += [
            f"{lock}: another process builds an operator; this run waits for it. If there is no "
            f"such process, stop this run and delete the lock"
            for lock in fresh
        ]
        self._look_at_host(environment)
        if settings.wandb == "online" and not machine.has_wandb_key(environment):
            self.problems.append(
                f"{settings.where('wandb')}: online, but no key is configured. Run wandb login, "
                f"set WANDB_API_KEY, or use --wandb offline."
            )
        if settings.tensorboard and importlib.util.find_spec("tensorboard") is None:
            self.problems.append(
                f"{settings.where('tensorboard')}: true, needs the package tensorboard. Install "
                f"it with pip install 'zerolm[tensorboard]', or leave the flag out."
            )

    def _look_at_host(self, environment: Mapping[str, str]) -> None:
        """Look at what the ranks of this host share; the other hosts' ranks look at theirs."""
        ranks = environment.get("LOCAL_WORLD_SIZE") or environment.get("LOCAL_SIZE", "1")
        shared = resources.shared_memory()
        if shared is not None and ranks.isdigit():
            problem = resources.shared_memory_problem(shared[0], int(ranks))
            self.notices += [problem] if problem else []
        port = environment.get("MASTER_PORT", "")
        # Where an agent of torchrun holds the store, the port is rightly in use.
        own = environment.get("TORCHELASTIC_USE_AGENT_STORE", "False") != "True"
        if port.isdigit() and environment.get("RANK") == "0" and own:
            problem = resources.port_problem(int(port))
            self.problems += [f"environment: MASTER_PORT: {problem}"] if problem else []

    # ---- The three files

    def _read_model(self) -> None:
        self.model_config: PretrainedConfig | None = None
        if self.settings.model_config is None:
            return
        try:
            self.model_config = load_model_config(self.settings.model_config)
            self.text_config = self.model_config.get_text_config()
            self.shapes = parameter_shapes(self.model_config)
            self.num_parameters = num_parameters(self.shapes)
        except ConfigError as error:
            self.model_config = None
            self.problems += error.problems

    def _read_ds_config(self) -> None:
        self.raw_ds: dict[str, Any] = {}
        self.layout = parallel.Layout(self.world_size)
        path = self.settings.deepspeed_config
        if path is None:
            return
        try:
            self.raw_ds = ds_config.load_ds_config(path)
        except ConfigError as error:
            self.problems += error.problems
            return
        self.raw_ds = nvme.with_path(self.raw_ds, self.settings, path, self.problems)
        if self.device.kind != "absent":
            self.problems += nvme.host_problems(self.raw_ds, path)
        self.layout = parallel.layout_of(self.raw_ds, self.world_size)
        self.problems += schema_problems(self.raw_ds, path)
        self.problems += rule_problems(
            self.raw_ds, path, on_gpu=self.device.is_gpu, world_size=self.world_size
        )
        if ds_config.compute_precision(self.raw_ds) == "bf16" and not self.device.supports_bf16:
            self.problems.append(
                f"{path}: bf16 is asked for, this {self.device.kind} device has no bf16. Use "
                f"fp16, or a newer device."
            )
        self.notices += rule_notices(
            self.raw_ds, path, on_gpu=self.device.is_gpu, world_size=self.world_size
        )
        zero = ds_config.block(self.raw_ds, "zero_optimization")
        auto = [key for key in BUCKET_KEYS if zero.get(key) == "auto"]
        if auto and self.model_config is not None and not memory.hidden_size(self.model_config):
            self.problems.append(
                f"{path}: zero_optimization.{auto[0]}: auto, but the model config has no "
                f"hidden_size to derive it from. Give a number."
            )

    # ---- Settings

    def _resolve_settings(self) -> None:
        """Fill in what was left open, as far as the three files could be read."""
        settings, name = self.settings, str(self.settings.deepspeed_config)
        if self.refused & SIZES:
            self.problems += budget.schedule_problems(settings)
            return
        if settings.seq_len is None and self.model_config is not None:
            positions = max_positions(self.model_config) or defaults.SEQ_LEN
            settings = replace(settings, seq_len=min(defaults.SEQ_LEN, positions))
        problems: list[str] = []
        if settings.seq_len is not None:
            fixed, problems = ds_config.fixed_settings(
                self.raw_ds, seq_len=settings.seq_len, world_size=self.layout.replicas
            )
            problems = [f"{name}: {problem}" for problem in problems]
            problems += ds_config.contradictions(fixed, settings, name)
            self.problems += problems
            settings = budget.apply_fixed(settings, fixed, name)
        self.flops = 0.0
        if self.model_config is not None and settings.seq_len is not None:
            self.flops = flops_per_token(self.model_config, self.shapes, settings.seq_len)
            settings = budget.fill_batch(settings, self.num_parameters, self.flops)
        self.settings = settings
        if not problems:  # else the batch has two sizes: its own rules would only repeat it
            problems = budget.batch_problems(settings, self.layout.replicas)
            self.problems += problems
        if self.flops and not problems:
            self._resolve_schedule(name)
            self._resolve_micro_batch(name)
        self.problems += budget.schedule_problems(self.settings)

    def _resolve_schedule(self, name: str) -> None:
        schedule, seq_len = budget.batch_schedule(self.settings), self.settings.seq_len
        assert seq_len is not None
        fixed, problems = ds_config.fixed_tokens(
            self.raw_ds,
            self.settings,
            lambda steps: budget.sequences_after(schedule, steps) * seq_len,
        )
        self.problems += [f"{name}: {problem}" for problem in problems]
        kind = ds_config.block(self.raw_ds, "scheduler").get("type")
        self.problems += beta_problems(self.raw_ds, self.settings, name)
        self.problems += muon.setting_problems(self.raw_ds, self.settings)
        lion = ds_config.optimizer_type(self.raw_ds).lower() == "lion"
        betas = defaults.LION_BETAS if lion else defaults.BETAS
        self.settings = budget.fill_rest(
            budget.apply_fixed(self.settings, fixed, name),
            schedule,
            num_parameters=self.num_parameters,
            flops_per_token=self.flops,
            has_validation=bool(self.settings.val_data),
            json_schedules=kind is not None and str(kind) not in ds_config.SCHEDULES,
            betas=betas if takes_betas(self.raw_ds) else None,
        )

    def _resolve_micro_batch(self, name: str) -> None:
        settings = self.settings
        assert settings.seq_len is not None and settings.batch_tokens is not None
        assert self.model_config is not None
        batch = settings.batch_tokens // settings.seq_len
        per_rank = (settings.batch_ramp_start or settings.batch_tokens) // settings.seq_len
        replicas = self.layout.replicas
        per_rank //= replicas
        accumulation = ds_config.count(self.raw_ds, "gradient_accumulation_steps")
        if accumulation and settings.micro_batch_size is None:
            if (batch // replicas) % accumulation == 0 and not settings.batch_ramp_start:
                micro = batch // replicas // accumulation
            else:
                micro = 0
        else:
            micro = settings.micro_batch_size or memory.fitting_micro_batch(
                per_rank,
                settings.seq_len // self.layout.sequence,
                config=self.model_config,
                shapes=self.shapes,
                ds=self.raw_ds,
                world_size=self.world_size,
                memory_bytes=self.device.memory_bytes,
                checkpointing=settings.gradient_checkpointing,
                loss_chunk_tokens=settings.loss_chunk_tokens or 0,
            )
        wanted = settings.loss_chunk_tokens
        if wanted is None and self.layout.tensor > 1:
            wanted = 0  # the head is DeepSpeed's
        self.settings = replace(
            settings,
            micro_batch_size=micro or 1,
            loss_chunk_tokens=loss_chunks.chunk_tokens(
                self.model_config, (micro or 1) * settings.seq_len, wanted
            ),
        )
        if accumulation and micro * accumulation * replicas != batch:
            self.problems.append(
                f"{name}: gradient_accumulation_steps: {accumulation}, contradicts "
                f"{settings.where('batch_tokens')} {settings.batch_tokens}: {batch} sequences / "
                f'({replicas} rank(s) x micro-batch {micro or "auto"}). Set it to "auto", '
                f"or change the batch."
            )

    def _resolve_mixture(self) -> None:
        """Make stages of the weights, and look how often the run would read each source."""
        settings, sources = self.settings, self.sources.training
        if settings.seq_len is None or not self.sources_are_sound or not sources:
            return
        sizes = [num_rows(source, settings.seq_len, settings.packing) for source in sources]
        if not all(sizes):
            return
        known = len(self.problems)
        self.mixture = mixture_settings.resolve(
            settings,
            self.sources.weights,
            lambda name: find_source(name, sources),
            sizes,
            self.problems,
        )
        if len(self.problems) > known or not (settings.total_tokens and settings.batch_tokens):
            return
        if not budget.batch_problems(settings, self.layout.replicas):
            problems, notices = epoch_plan.cap_problems(
                self.mixture,
                self.mixture.order(sizes, settings.seed),
                source_names(sources),
                self._total_sequences(),
                settings,
            )
            self.problems += problems
            self.notices += notices

    # ---- What fits together

    def _check_model(self) -> None:
        self.problems += attention_problems(self.settings, self.device.kind)
        precision = ds_config.compute_precision(self.raw_ds)
        if self.raw_ds:
            self.problems += matmul_problems(self.settings, precision, self.device.kind)
        if self.model_config is None:
            return
        self.problems += model_problems(self.settings, self.model_config, self.device.kind)
        self.problems += parallel_rules.model_problems(
            self.settings, self.model_config, self.raw_ds, self.world_size
        )
        name = str(self.settings.deepspeed_config)
        self.problems += muon.shape_problems(self.raw_ds, self.shapes, name)
        self.notices += dropout_notices(self.settings, self.model_config)
        self.notices += router_notices(self.settings, self.model_config)
        if self.settings.document_mask and self.settings.attn_implementation == "auto":
            # Flash attention would take the mask for one of padding.
            sdpa = causal_lm_class(self.model_config)._supports_sdpa
            chosen = "sdpa" if sdpa else "eager"
            self.settings = replace(self.settings, attn_implementation=chosen)

    def _check_run_dir(self) -> None:
        settings = self.settings
        if settings.run_dir is None:
            return
        problem = machine.unwritable(settings.run_dir)
        if problem:
            self.problems.append(f"{settings.where('run_dir')}: {settings.run_dir}, {problem}")
            return
        self.problems += upload_problems(settings)
        if self.problems:
            return
        self._check_disk(settings.run_dir)
        path = Path(settings.run_dir) / "run.json"
        first = self.environment.get("RANK", "0") == "0"
        stored = stored_record(settings, self.problems) if first else None
        checkpoints = Path(settings.run_dir, "checkpoints")
        self.resumes = stored is not None or any(checkpoints.glob("step-*"))
        if stored is not None:
            where, record = stored
        elif path.is_file():
            try:
                where = str(path)
                record = read_json(path, "a --run_dir that a run has made, or a new one")
            except ConfigError as error:
                self.problems += error.problems
                return
        else:
            return
        assert self.model_config is not None
        found = run_record.differences(
            record,
            settings,
            model_config=self.model_config.to_diff_dict(),
            ds_config=self._resolved_ds(),
            data_fingerprint=self._data_fingerprint(),
            stages=self.mixture.stages,
            begun=self._begun(Path(settings.run_dir)),
            world_size=self.world_size,
            router_loss=has_router_loss(self.model_config),
        )
        accepted = settings.accept_changes
        self.problems += run_record.problems(found, where, accepted=accepted)
        self.changed = {one.key: (one.old, one.new) for one in found}
        self.notices += [f"changed since {where}: {one}" for one in found if accepted]
        self._look_at_checkpoint(Path(settings.run_dir))

    def _begun(self, run_dir: Path) -> int:
        """Return the sequence number up to which the run's order must stay what it was."""
        try:
            found = checkpoint_directory.newest(run_dir)
            done = rollback.entries(run_dir)
        except (CheckpointError, ConfigError):
            return MAX_SEQUENCES  # named when the run begins, which may go on from an older one
        if found is None:  # of a store it may have more; the first weights stay in any case
            return MAX_SEQUENCES if self.settings.upload_to else 1
        progress = rollback.carried_over(found.progress, done)
        return max(1, skipped.reached(progress.position, progress.skipped_windows))

    def _look_at_checkpoint(self, run_dir: Path) -> None:
        """Say what a resume will cut anew, and refuse what it cannot."""
        try:
            found = checkpoint_directory.newest(run_dir)
        except CheckpointError:
            return  # named when the run begins, which may go on from an older one
        if found is None:
            return
        resolved = self._resolved_ds()
        changes = topology.changes(
            found.manifest,
            world_size=self.world_size,
            zero_stage=ds_config.zero_stage(resolved),
            ds_config=resolved,
        )
        if changes:
            where = str(found.directory / checkpoint_directory.MANIFEST)
            self.problems += topology.problems(found.manifest, where, resolved)
            self.notices.append(
                f"{found.directory.name} was cut for another topology, its states will be cut "
                f"anew: {', '.join(changes)}"
            )

    def _check_disk(self, run_dir: str) -> None:
        """Compare the checkpoints to come with the free space."""
        size = memory.checkpoint_bytes(self.shapes, self.raw_ds)
        free, wanted = resources.checkpoint_room(run_dir, size, self.settings.checkpoint_keep)
        if free < 0 or self.device.kind == "absent":
            return
        where = f"{self.settings.where('run_dir')}: {run_dir}"
        has = f"its file system has {shown_bytes(free)} free"
        if free < size:
            self.problems.append(
                f"{where}, {has}, a checkpoint needs about {shown_bytes(size)}. Free some, or "
                f"choose another directory."
            )
        elif free < wanted:
            self.notices.append(
                f"{where}: {has}, but --checkpoint_keep {self.settings.checkpoint_keep} needs "
                f"about {shown_bytes(wanted)} more"
            )

    # ---- The plan

    def _data_fingerprint(self) -> str:
        settings = self.settings
        return data_fingerprint(self.sources.training, settings.seq_len, settings.packing)

    def _steps(self, tokens: int) -> int:
        assert self.settings.seq_len is not None
        schedule = budget.batch_schedule(self.settings)
        return schedule.steps(0, math.ceil(tokens / self.settings.seq_len))

    def _total_sequences(self) -> int:
        assert self.settings.total_tokens
        schedule = budget.batch_schedule(self.settings)
        return budget.sequences_after(schedule, self._steps(self.settings.total_tokens))

    def _resolved_ds(self) -> dict[str, Any]:
        settings = self.settings
        assert settings.seq_len and settings.batch_tokens and settings.micro_batch_size
        assert settings.total_tokens and self.model_config is not None
        batch = settings.batch_tokens // settings.seq_len
        return resolve(
            self.raw_ds,
            settings,
            hidden_size=memory.hidden_size(self.model_config),
            micro_batch_size=settings.micro_batch_size,
            accumulation=batch // (settings.micro_batch_size * self.layout.replicas),
            replicas=self.layout.replicas,
            on_gpu=self.device.is_gpu,
            warmup_steps=self._steps(settings.warmup_tokens or 0),
            total_steps=self._steps(settings.total_tokens),
        )

    def _plan(self) -> Plan:
        settings, config = self.settings, self.model_config
        assert config is not None and settings.seq_len and settings.batch_tokens
        assert settings.micro_batch_size and settings.total_tokens
        assert settings.weight_decay is not None
        schedule: BatchSchedule = budget.batch_schedule(settings)
        steps = self._steps(settings.total_tokens)
        windows = sum(
            num_rows(source, settings.seq_len, settings.packing)
            for source in self.sources.validation
        )
        resolved = self._resolved_ds()
        plan = Plan(
            settings=settings,
            model_config=config,
            shapes=self.shapes,
            num_parameters=self.num_parameters,
            flops_per_token=self.flops,
            ds_config=resolved,
            zero_stage=ds_config.zero_stage(resolved),
            precision=ds_config.precision(resolved),
            compute_precision=ds_config.compute_precision(resolved),
            sources=self.sources.training,
            source_names=source_names(self.sources.training),
            weights=self.sources.weights,
            mixture=self.mixture,
            val_sources=self.sources.validation,
            val_source_names=source_names(self.sources.validation),
            val_sequences=min((settings.eval_tokens or 0) // settings.seq_len, windows),
            world_size=self.world_size,
            layout=self.layout,
            device=self.device.kind,
            micro_batch_size=settings.micro_batch_size,
            accumulation=resolved["gradient_accumulation_steps"],
            batch_sequences=schedule.batch_sequences,
            batch_schedule=schedule,
            learning_rate=None if "scheduler" in resolved else budget.learning_rate(settings),
            weight_decay=settings.weight_decay,
            total_sequences=self._total_sequences(),
            total_steps=steps,
            data_fingerprint=self._data_fingerprint(),
            derived={},
            notices=self.notices,
            changed=self.changed,
        )
        every = [*plan.sources, *plan.val_sources]
        return replace(plan, derived=figures(plan) | data_cache.figures(every))
