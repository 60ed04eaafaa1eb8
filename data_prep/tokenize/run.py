"""A tokenization from its inputs to published shards: two phases, that any executor runs.

`tokenize.encode` turns each unit of the input into parts, `tokenize.assemble` copies the parts into
shards, and the manifests come last. Everything is kept in `parts/` of the first output meanwhile;
the same call again goes on from there. data_prep/commands_tokenize.py is the command, and
data_prep/recipe.py makes it the last stage of a pipeline.
"""

import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from data_prep import encoders, parts, shard_manifests, tokenization_state
from data_prep.assemble import AssembleAhead, run_assembly
from data_prep.bad_input import Tally, check_bad_fraction, describe, summary_lines
from data_prep.documents import InputRules
from data_prep.encoder_choice import Choice, choose_backend
from data_prep.phases import (
    Executor,
    LocalExecutor,
    Phase,
    Record,
    completed,
    fingerprint,
    run_phase,
)
from data_prep.progress import Progress, Watch
from data_prep.readers import Input
from data_prep.reuse import keep_whole
from data_prep.shard_manifests import sums
from data_prep.tokenize import ENCODED, PART_SECONDS, DocumentEncoder, EncodeUnits
from data_prep.tokenizers import Tokenizer
from data_prep.units import Unit, plan_units
from zerolm.errors import ConfigError, ZerolmError
from zerolm.manifest import TOKENIZER_DIRECTORY, token_dtype
from zerolm.origins import MAX_INPUTS
from zerolm.shard_directory import PARTS, ShardDirectory
from zerolm.shard_writer import DEFAULT_SHARD_TOKENS


@dataclass(frozen=True)
class TokenizeOptions:
    """What decides the shards, beside the inputs and the tokenizer; and which encoder is asked."""

    rules: InputRules = field(default_factory=InputRules)
    encoder: str = "auto"
    val_fraction: float | None = None
    shard_tokens: int = DEFAULT_SHARD_TOKENS
    unit_bytes: int | None = None
    part_seconds: float = PART_SECONDS


@dataclass
class Summary:
    """What was done."""

    manifests: list[dict[str, Any]]
    records: list[Record]  # of the units
    input_lines: list[str]  # what was skipped, and what was bad
    notes: tuple[str, ...]  # why which encoders were not used
    seconds: float


def run_tokenization(
    inputs: Sequence[Input],
    tokenizer: Tokenizer,
    outputs: Sequence[Path],
    options: TokenizeOptions,
    executor: Executor,
    provenance: dict[str, Any],
) -> Summary:
    """Write shards of all documents of the inputs, or go on with that.

    Args:
        outputs: for training documents, and for those held out if there is a `val_fraction`.
        provenance: further keys of the manifests.

    Raises:
        ConfigError: an output that cannot be written, or input that cannot be read.
        ZerolmError: a worker died, a disk is full, or only a part of the outputs is published.
    """
    if len(inputs) > MAX_INPUTS:
        raise ConfigError(
            f"--input: {len(inputs):,} files are more than {MAX_INPUTS:,}. Join small files."
        )
    directories: list[ShardDirectory] = []
    sizes = [each.size_bytes for each in inputs]
    total = None if None in sizes else sum(size or 0 for size in sizes)
    progress = Progress("tokenize", total)
    run = _Run(inputs, tokenizer, options, directories, progress)
    kept = f"{ENCODED}/*/*.json"  # what is worth going on from: any part
    try:
        for output in outputs:
            directories.append(ShardDirectory(output))
        records = run.encode(executor)
        kept = ""
        shard_manifests.refuse_empty(outputs, records)
        kept = f"{ENCODED}/*/*.json"
        shards = run.assemble(executor, records)
        manifests = run.publish(records, shards, provenance)
    except OSError as error:
        raise ZerolmError(
            f"{outputs[0]}: cannot be written ({error}). Nothing was published."
        ) from error
    finally:
        progress.close()
        run.leave(kept)
    tally = Tally.from_records([record["tally"] for record in records])
    lines = summary_lines(inputs, tally, options.rules)
    return Summary(manifests, records, lines, run.choice.notes, progress.seconds)


class _Run:
    """One go at a tokenization; `directories` are claimed before the first method is called."""

    def __init__(
        self,
        inputs: Sequence[Input],
        tokenizer: Tokenizer,
        options: TokenizeOptions,
        directories: list[ShardDirectory],
        progress: Progress,
    ):
        self.inputs, self.tokenizer, self.options = tuple(inputs), tokenizer, options
        self.directories, self.progress = directories, progress
        self.entry: dict[str, Any] = {}
        self.choice = Choice("", "")
        self.made: dict[tuple[Path, int], dict[str, Any]] = {}  # entries of shards, made ahead

    @property
    def parts(self) -> Path:
        """The directory of what is kept until the manifests are there."""
        return self.directories[0].directory / PARTS

    @property
    def token_bytes(self) -> int:
        """Of an id in parts and shards."""
        return token_dtype(self.tokenizer.vocab_size).itemsize

    def encode(self, executor: Executor) -> list[Record]:
        """Run the first phase, and return its records.

        Raises:
            ConfigError: input that cannot be read.
        """
        tokenization_state.begin(
            self.directories,
            self.inputs,
            tokenization_state.settings(
                self.options.rules, self.options.val_fraction, self.tokenizer.fingerprint
            ),
        )
        for claim in self.directories:
            copy = claim.directory / TOKENIZER_DIRECTORY
            shutil.rmtree(copy, ignore_errors=True)
            self.entry = self.tokenizer.write_copy(copy)
        copy = self.directories[0].directory / TOKENIZER_DIRECTORY
        self.choice = choose_backend(
            copy, self.options.encoder, input_bytes=self.progress.total_bytes
        )
        phase = self._encode_phase(copy)
        keep_whole(phase, lambda task, record: parts.are_whole(self.parts, record))
        if isinstance(executor, LocalExecutor):
            records = self._run_locally(phase, executor)
        else:
            with Watch(self.progress, phase.records, phase.labels):
                records = run_phase(phase, executor)
        tally = Tally.from_records([record["tally"] for record in records])
        if tally.bad and self.options.rules.on_bad_input == "fail":  # an earlier run has skipped it
            raise ConfigError(describe(self.inputs, tally.examples, self.options.rules))
        check_bad_fraction(self.inputs, tally, self.options.rules)
        return records

    def _encode_phase(self, copy: Path) -> Phase:
        units = plan_units(self.inputs, self.options.unit_bytes)
        settings = tokenization_state.settings(
            self.options.rules, self.options.val_fraction, self.tokenizer.fingerprint
        )
        prints = [
            tokenization_state.unit_fingerprint(settings, self.inputs, each) for each in units
        ]
        phase = Phase(
            name="tokenize.encode",
            directory=self.parts,
            num_tasks=len(units),
            run=lambda task: {},
            inputs=fingerprint(prints),
            labels=[self._label(unit) for unit in units],
            sync=False,
        )
        job = EncodeUnits(
            self.parts,
            self.inputs,
            tuple(zip(units, prints, strict=True)),
            self.options.rules,
            partial(encoders.load_encoder, copy, self.choice),
            DocumentEncoder(
                self.tokenizer.eos_id, self.tokenizer.vocab_size, self.options.val_fraction
            ),
            phase.records,
            self.options.part_seconds,
        )
        return replace(phase, run=job)

    def _label(self, unit: Unit) -> str:
        name = self.inputs[unit.pieces[0].input].name
        return name + (f" and {len(unit.pieces) - 1} more" if len(unit.pieces) > 1 else "")

    def _run_locally(self, phase: Phase, executor: LocalExecutor) -> list[Record]:
        """Run the first phase in processes of this machine, and assemble shards meanwhile."""
        before = completed(phase)
        assert isinstance(phase.run, EncodeUnits)
        if None in before:
            phase.run.load()
        ahead = AssembleAhead(
            [claim.directory.absolute() for claim in self.directories],
            self.parts,
            self.options.shard_tokens,
            self.token_bytes,
        )
        watch = Watch(self.progress, phase.records, phase.labels, is_started=False)

        def start() -> None:
            watch.start()
            ahead.start()
            for record in before:
                if record is not None:
                    ahead.add(record)

        def take(phase: Phase, record: Record) -> None:
            ahead.add(record)
            if executor.on_record is not None:
                executor.on_record(phase, record)

        with watch, ahead:
            records = run_phase(phase, replace(executor, on_start=start, on_record=take))
            self.made = ahead.finish()
        return records

    def assemble(self, executor: Executor, records: Sequence[Record]) -> list[list[dict[str, Any]]]:
        """Run the second phase, and return the manifests' entries of the shards of each output."""
        return run_assembly(
            [claim.directory.absolute() for claim in self.directories],
            self.parts,
            records,
            self.options.shard_tokens,
            self.token_bytes,
            self.made,
            executor,
        )

    def publish(
        self,
        records: Sequence[Record],
        shards: Sequence[list[dict[str, Any]]],
        provenance: dict[str, Any],
    ) -> list[dict[str, Any]]:
        """Write the manifests, which makes the outputs data, and return them.

        Raises:
            ZerolmError: only a part of the outputs could be published.
        """
        keys = shard_manifests.source_keys(self.inputs, records, self.options.rules)
        keys["encoder"] = shard_manifests.encoder_key(records, self.choice.record())
        text_bytes = sums(records, "text_bytes", len(self.directories))
        manifests = []
        for split, claim in enumerate(self.directories):
            listed = shard_manifests.write_inputs(claim.directory, self.inputs)
            manifest = shard_manifests.manifest(
                self.tokenizer.vocab_size,
                self.tokenizer.eos_id,
                self.entry,
                shards[split],
                text_bytes[split],
                **keys,
                input_files=listed,
                **provenance,
            )
            if self.options.val_fraction is not None:
                manifest["split"] = {
                    "part": ("training", "validation")[split],
                    "val_fraction": self.options.val_fraction,
                    "hash": shard_manifests.HELD_OUT_HASH,
                }
            manifests.append(manifest)
        shard_manifests.publish_all(self.directories[::-1], manifests[::-1])
        return manifests

    def leave(self, pattern: str) -> None:
        """Unless all is published, keep what a later run can go on from, or remove everything.

        Args:
            pattern: of files below `parts` that are worth it; none if it is empty.
        """
        open_ones = [claim for claim in self.directories if claim.held]
        kept = bool(open_ones and pattern and any(self.parts.glob(pattern)))
        for claim in open_ones:
            if kept:
                claim.leave()
            else:
                claim.remove()
        if kept:
            say(
                f"{self.directories[0].directory}: nothing is published. What is encoded is kept: "
                f"the same command goes on from there."
            )


def say(line: str) -> None:
    """Tell people, on standard error."""
    print(line, file=sys.stderr, flush=True)
