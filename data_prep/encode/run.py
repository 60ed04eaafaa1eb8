"""Runs tokenization, from inputs to published shards, as two phases of tasks.

The tasks of `tokenize.encode` encode units of the input into parts, the tasks of
`tokenize.assemble` copy parts into shards, and the manifests are written last. Until they exist,
parts and records remain in `parts/` of the first output, so an interrupted run can resume. The
tasks can run on any executor. Independent of the command line and of pipelines.
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from data_prep.encode import manifests as shard_manifests
from data_prep.encode import parts, resume
from data_prep.encode.assemble import BackgroundAssembly, Entry, run_assembly
from data_prep.encode.encode_documents import DocumentEncoder
from data_prep.encode.encode_units import ENCODED_DIRECTORY, EncodeUnits, units_of
from data_prep.encode.held_out import HELD_OUT_HASH
from data_prep.encode.options import TokenizeOptions
from data_prep.files.inputs import Input, total_bytes
from data_prep.read.bad_input import Tally, check_bad_fraction, describe_problems, summary_lines
from data_prep.read.readers import require_unchanged
from data_prep.read.work_units import WorkUnit
from data_prep.tasks.phases import (
    RECORDS,
    Executor,
    LocalExecutor,
    Phase,
    Record,
    fingerprint,
    run_phase,
    valid_records,
)
from data_prep.tasks.progress import Progress, ProgressWatcher
from data_prep.tokenizer import encoders
from data_prep.tokenizer.encoder_choice import EncoderChoice, choose_backend
from data_prep.tokenizer.load import Tokenizer, require_bos
from data_prep.tokenizer.vocabulary import unknown_id
from zerolm.common.errors import ConfigError, ZerolmError
from zerolm.shards.directory import PARTS, ShardDirectory
from zerolm.shards.manifest import TOKENIZER_DIRECTORY, new_manifest, token_dtype
from zerolm.shards.origins import MAX_INPUTS


@dataclass
class Summary:
    """The result of a tokenization.

    Attributes:
        input_lines: messages about skipped input and bad input.
        note: reason why the fast encoder was not used.
    """

    manifests: list[dict[str, Any]]
    records: list[Record]
    input_lines: list[str]
    note: str | None
    seconds: float


def run_tokenization(
    inputs: Sequence[Input],
    tokenizer: Tokenizer,
    outputs: Sequence[Path],
    options: TokenizeOptions,
    executor: Executor,
    provenance: dict[str, Any],
) -> Summary:
    """Write all documents of the inputs to shards, resuming an interrupted run if there is one.

    Args:
        outputs: directories for the training shards and, with `val_fraction`, the held-out shards.
    """
    if len(inputs) > MAX_INPUTS:
        raise ConfigError(
            f"--input: {len(inputs):,} files are more than {MAX_INPUTS:,}. Join small files."
        )
    if options.bos:
        require_bos(tokenizer)
    directories: list[ShardDirectory] = []
    progress = Progress("tokenize", total_bytes(inputs))
    run = _Run(inputs, tokenizer, options, directories, progress)
    keep_parts = True
    try:
        for output in outputs:
            directories.append(ShardDirectory(output))
        records = run.encode(executor)
        keep_parts = False
        shard_manifests.refuse_empty(outputs, records)
        keep_parts = True
        shards = run.assemble(executor, records)
        manifests = run.publish(records, shards, provenance)
    except PermissionError:
        raise
    except OSError as error:
        raise ZerolmError(
            f"{outputs[0]}: cannot be written ({error}). Nothing was published."
        ) from error
    finally:
        progress.close()
        run.close(keep_parts)
    tally = Tally.from_records([record["tally"] for record in records])
    lines = summary_lines(inputs, tally, options.rules)
    return Summary(manifests, records, lines, run.choice.note, progress.seconds)


class _Run:
    """The steps of tokenization; the caller fills `directories` before the first step."""

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
        self.bos_id = tokenizer.bos_id if options.bos else None
        self.settings = resume.parts_settings(
            options.rules, options.val_fraction, tokenizer.fingerprint, self.bos_id
        )
        self.token_bytes = token_dtype(tokenizer.vocab_size).itemsize
        self.tokenizer_entry: dict[str, Any] = {}
        self.choice = EncoderChoice("", "")
        self.assembled: dict[tuple[Path, int], Entry] = {}  # shards assembled in the background

    @property
    def parts(self) -> Path:
        """The parts directory, which exists until the manifests are published."""
        return self.directories[0].directory / PARTS

    def encode(self, executor: Executor) -> list[Record]:
        """Run the first phase, and return its task records."""
        resume.resume_or_clear(self.directories, self.inputs, self.settings)
        for output in self.directories:
            copy = output.directory / TOKENIZER_DIRECTORY
            shutil.rmtree(copy, ignore_errors=True)
            self.tokenizer_entry = self.tokenizer.write_copy(copy)
        copy = self.directories[0].directory / TOKENIZER_DIRECTORY
        self.choice = choose_backend(
            copy, self.options.encoder, input_bytes=self.progress.total_bytes
        )
        phase = self._encode_phase(copy)
        job = phase.run
        assert isinstance(job, EncodeUnits)
        resume.discard_damaged(
            phase,
            lambda task, record: (
                record["fingerprint"] == job.units[task][1]  # otherwise, an input has changed
                and parts.is_record_intact(self.parts, record)
            ),
        )
        if isinstance(executor, LocalExecutor):
            records = self._run_locally(phase, executor)
        else:
            with ProgressWatcher(self.progress, phase.records, phase.labels):
                records = run_phase(phase, executor)
        tally = Tally.from_records([record["tally"] for record in records])
        # Parts of an earlier run may have skipped bad input that this run must refuse.
        if tally.bad and self.options.rules.on_bad_input == "fail":
            raise ConfigError(describe_problems(self.inputs, tally.examples, self.options.rules))
        check_bad_fraction(self.inputs, tally, self.options.rules)
        require_unchanged(self.inputs)
        shard_manifests.refuse_unknown(self.tokenizer.name, records, self.options.max_unknown)
        return records

    def _encode_phase(self, copy: Path) -> Phase:
        units = units_of(self.inputs, self.options.unit_bytes)
        fingerprints = [resume.unit_fingerprint(self.settings, self.inputs, unit) for unit in units]
        name = "tokenize.encode"
        job = EncodeUnits(
            self.parts,
            self.inputs,
            tuple(zip(units, fingerprints, strict=True)),
            self.options.rules,
            partial(encoders.load_encoder, copy, self.choice),
            DocumentEncoder(
                self.tokenizer.eos_id,
                self.tokenizer.vocab_size,
                self.options.val_fraction,
                unknown_id(copy),
                self.bos_id,
            ),
            self.parts / RECORDS / name,
            self.options.part_seconds,
        )
        labels = [self._label(unit) for unit in units]
        inputs = fingerprint(self.settings)
        return Phase(name, self.parts, len(units), job, inputs, labels, sync=False)

    def _label(self, unit: WorkUnit) -> str:
        name = self.inputs[unit.ranges[0].input].name
        return name + (f" and {len(unit.ranges) - 1} more" if len(unit.ranges) > 1 else "")

    def _run_locally(self, phase: Phase, executor: LocalExecutor) -> list[Record]:
        """Run the first phase in local processes while threads in this process assemble shards."""
        before = valid_records(phase)
        assert isinstance(phase.run, EncodeUnits)
        if None in before:
            phase.run.load()
        assembly = BackgroundAssembly(
            self._output_directories(), self.parts, self.options.shard_tokens, self.token_bytes
        )
        watch = ProgressWatcher(self.progress, phase.records, phase.labels, is_started=False)

        def on_start() -> None:
            watch.start()
            assembly.start()
            for record in before:
                if record is not None:
                    assembly.add(record)

        def on_record(phase: Phase, record: Record) -> None:
            assembly.add(record)
            if executor.on_record is not None:
                executor.on_record(phase, record)

        with watch, assembly:
            records = run_phase(phase, replace(executor, on_start=on_start, on_record=on_record))
            self.assembled = assembly.finish()
        return records

    def assemble(self, executor: Executor, records: Sequence[Record]) -> list[list[Entry]]:
        """Run the second phase, and return the manifest entries of each output's shards."""
        return run_assembly(
            self._output_directories(),
            self.parts,
            records,
            self.options.shard_tokens,
            self.token_bytes,
            self.assembled,
            executor,
        )

    def _output_directories(self) -> list[Path]:
        return [output.directory.absolute() for output in self.directories]

    def publish(
        self, records: Sequence[Record], shards: Sequence[list[Entry]], provenance: dict[str, Any]
    ) -> list[dict[str, Any]]:
        """Publish the outputs by writing their manifests, and return the manifests."""
        keys = shard_manifests.input_keys(self.inputs, records, self.options.rules)
        keys["encoder"] = shard_manifests.encoder_entry(records, self.choice.record())
        text_bytes = shard_manifests.split_totals(records, "text_bytes", len(self.directories))
        manifests = []
        for split, output in enumerate(self.directories):
            input_files = shard_manifests.write_input_list(output.directory, self.inputs)
            manifest = new_manifest(
                self.tokenizer.vocab_size,
                self.tokenizer.eos_id,
                self.tokenizer_entry,
                shards[split],
                text_bytes=text_bytes[split],
                **({} if self.bos_id is None else {"bos_id": self.bos_id}),
                **keys,
                input_files=input_files,
                **provenance,
            )
            if self.options.val_fraction is not None:
                manifest["split"] = {
                    "part": ("training", "validation")[split],
                    "val_fraction": self.options.val_fraction,
                    "hash": HELD_OUT_HASH,
                }
            manifests.append(manifest)
        shard_manifests.publish_all(self.directories[::-1], manifests[::-1])
        return manifests

    def close(self, keep_parts: bool) -> None:
        """Release the unpublished outputs, and either keep their parts for a later run or remove
        them.
        """
        unpublished = [output for output in self.directories if output.is_locked]
        encoded = (f"{ENCODED_DIRECTORY}/*/*.json", f"{RECORDS}/*/*.json")
        has_parts = unpublished and any(path for each in encoded for path in self.parts.glob(each))
        if not (keep_parts and has_parts):
            for output in unpublished:
                output.remove()
            return
        for output in unpublished:
            output.release()
        resume.log(
            f"{self.directories[0].directory}: nothing is published. The encoded parts are kept, "
            f"and the same command resumes from them."
        )
