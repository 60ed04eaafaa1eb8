"""Clean: documents through filters, unit by unit, into the files of a stage.

Task i reads unit i of the inputs and writes file i, or several of them where the unit is large, as
a compressed file is. What was dropped is counted by reason, with examples, and kept in files of its
own if that is asked for.
"""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from data_prep.bad_input import Tally, check_bad_fraction
from data_prep.documents import Document, InputRules
from data_prep.filters import Filters, build, identity
from data_prep.phases import Executor, Phase, fingerprint, run_phase
from data_prep.progress import TaskProgress
from data_prep.sieve import Sieve
from data_prep.stage_counts import merge_counts
from data_prep.stage_files import (
    STAGE,
    json_line,
    publish_stage,
    read_stage,
    remove_others,
    stage_file,
)
from data_prep.units import Batch, Unit, plan_units, read_batches
from data_prep.units import fingerprint as inputs_fingerprint
from zerolm.errors import ConfigError
from zerolm.files import write_json

ID = "id"
RECORDS = "records/clean"
PIECES = f"{RECORDS}/pieces"  # records of files whose task has not ended
# A minute of filters such as Gopher's and FineWeb's, which a stopped task does again at most, and
# what the tasks of the next stages read.
PIECE_BYTES = 1 << 27

Json = dict[str, Any]


@dataclass(frozen=True)
class CleanOptions:
    """How documents are read and which are kept."""

    filters: tuple[Json, ...] = ()  # as in the recipe, checked by `filters.filter_problems`
    rules: InputRules = field(default_factory=lambda: InputRules(keep_records=True))
    unit_bytes: int | None = None  # of input for a task; None: from the size of all inputs
    keep_dropped: Path | None = None  # a directory
    piece_bytes: int = PIECE_BYTES  # of text read, for a file


@dataclass(frozen=True)
class CleanTask:
    """Filters one unit; see `Phase.run`.

    A unit becomes files of about `piece_bytes` of text read. Each has a record of its own, so a
    task that was stopped goes on behind the last: no file depends on where it was stopped.
    """

    inputs: tuple[Any, ...]
    units: tuple[Unit, ...]
    options: CleanOptions
    output: Path
    key: str  # of the phase: pieces of another one are made again

    def __call__(self, task: int) -> Json:
        """Write the files of a unit that are not there.

        Raises:
            ConfigError: bad input under the policy "fail".
        """
        options = self.options
        pieces = self._read_pieces(task)
        tally = Tally.from_records([piece["reading"] for piece in pieces[-1:]])
        start = pieces[-1]["next"] if pieces else None
        unit = self.units[task]
        note = TaskProgress(self.output / RECORDS / f"{task:05d}.running", unit.size_bytes)
        note.add(tally.input_bytes, tally.num_documents, 0)
        batches = read_batches(self.inputs, unit, options.rules, tally, start=start)
        more = True
        while more:
            with self._sieve(task, len(pieces)) as sieve:
                end = self._fill(sieve, batches, note)
                more = end is not None
                if more or not pieces or sieve.counts.sums["documents_in"]:
                    piece = {**sieve.close(), "inputs": self.key, "next": end}
                    piece["reading"] = tally.record()
                    pieces.append(piece)
                    if more:
                        write_json(
                            self._piece_path(task, len(pieces) - 1), piece, many_writers=True
                        )
        return {
            **merge_counts(pieces),
            "files": {name: size for piece in pieces for name, size in piece["files"].items()},
            "entries": [piece["entry"] for piece in pieces],
            "reading": tally.record(),
        }

    def _fill(
        self, sieve: Sieve, batches: Iterator[Batch], note: TaskProgress
    ) -> Sequence[int] | None:
        """Judge documents until a file is full; return where to go on, or None at the end."""
        filters = _filters(_Frozen(self.options.filters))
        for batch in batches:
            for document in batch.documents:
                self._judge(filters, document, sieve)
            note.add(batch.input_bytes, len(batch.documents), 0)
            if sieve.counts.sums["text_bytes_in"] >= self.options.piece_bytes:
                return batch.next
        return None

    def _sieve(self, task: int, piece: int) -> Sieve:
        name = stage_file(task, piece)
        dropped = self.options.keep_dropped
        return Sieve(self.output, self.output / name, None if dropped is None else dropped / name)

    def _piece_path(self, task: int, piece: int) -> Path:
        return self.output / PIECES / f"{task:05d}_{piece:05d}.json"

    def _read_pieces(self, task: int) -> list[Json]:
        """Return the records of the files that a task has finished, from the first on."""
        found: list[Json] = []
        while True:
            try:
                piece = json.loads(self._piece_path(task, len(found)).read_bytes())
                if piece["inputs"] != self.key:
                    return found
                for name, size in piece["files"].items():
                    if (self.output / name).stat().st_size != size:
                        return found
            except (OSError, ValueError, KeyError, TypeError):
                return found
            found.append(piece)

    def _judge(self, filters: Filters, document: Document, sieve: Sieve) -> None:
        field_name = self.options.rules.text_field
        record = dict(document.record or {})
        identity = record.setdefault(ID, f"{self.inputs[document.input].name}:{document.start}")
        size = len(document.utf8)
        others = {key: value for key, value in record.items() if key not in (field_name, ID)}
        verdict = filters.judge(document.text, str(identity), others)
        reason, shown = verdict.reason, verdict.text
        if verdict.kept and not verdict.text:
            reason, shown = "emptied", document.text
        if reason:
            note = {**_with_text(record, field_name, document.text), "dropped_by": reason}
            sieve.leave_out(reason, size, identity, shown, note)
            return
        for name in verdict.changed:
            sieve.counts.changed(name)
        size_out = len(verdict.text.encode()) if verdict.changed else size
        kept = _with_text(record, field_name, verdict.text) | verdict.added
        sieve.keep(json_line(kept), size, size_out)


def run_clean(
    options: CleanOptions,
    inputs: Sequence[Any],
    output: Path,
    executor: Executor,
    provenance: Mapping[str, Any],
) -> Json:
    """Filter all inputs into a stage, and return its `stage.json`; begun before, it goes on.

    Args:
        inputs: what `sources.find_inputs` returned.
        provenance: what `stage.json` says about the inputs.

    Raises:
        ConfigError: bad input under the policy "fail", or too much of it under "skip"; or the
            output is another stage.
        ZerolmError: a task was lost.
    """
    phase = clean_phase(options, inputs, output)
    if (output / STAGE).exists():
        published = read_stage(output).manifest
        if published["inputs"] == phase.inputs:
            tally = Tally.from_records([published["reading"]])
            check_bad_fraction(inputs, tally, options.rules)  # the limit may be another one now
            return published
        raise ConfigError(
            f"{output}: is a stage already, from other inputs or filters. Choose another "
            f"directory, or remove this one."
        )
    (output / PIECES).mkdir(parents=True, exist_ok=True)
    records = run_phase(phase, executor)
    tally = Tally.from_records([record["reading"] for record in records])
    check_bad_fraction(inputs, tally, options.rules)
    shutil.rmtree(output / PIECES)
    entries = [entry for record in records for entry in record["entries"]]
    if options.keep_dropped is not None:
        remove_others(options.keep_dropped, {entry["file"] for entry in entries})
    return publish_stage(
        output,
        "clean",
        entries,
        inputs=phase.inputs,
        text_field=options.rules.text_field,
        counts=merge_counts(records),
        options={"filters": list(options.filters)},
        before=provenance,
        reading=tally.record(),
    )


def clean_phase(options: CleanOptions, inputs: Sequence[Any], output: Path) -> Phase:
    """Return the phase that writes the files."""
    units = plan_units(inputs, options.unit_bytes)
    names = [_unit_name(inputs, unit) for unit in units]
    filters = [options.filters, identity(options.filters)]
    layout = [units, options.piece_bytes, options.keep_dropped]
    key = fingerprint([inputs_fingerprint(inputs, options.rules), filters, layout])
    task = CleanTask(tuple(inputs), tuple(units), options, output, key)
    return Phase("clean", output, len(units), task, key, names)


def _unit_name(inputs: Sequence[Any], unit: Unit) -> str:
    first = unit.pieces[0]
    more = f" and {len(unit.pieces) - 1} more" if len(unit.pieces) > 1 else ""
    return f"{inputs[first.input].name} from {first.start:,}{more}"


def _with_text(record: Json, field_name: str, text: str) -> Json:
    """Return a record with another text; a field with dots may be a path into objects."""
    if field_name in record or "." not in field_name:
        return {**record, field_name: text}
    first, _, rest = field_name.partition(".")
    return {**record, first: _with_text(record.get(first, {}), rest, text)}


class _Frozen:
    """Filters as a key of the cache: by their content."""

    def __init__(self, filters: Sequence[Json]):
        self.filters, self.key = filters, fingerprint(list(filters))

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Frozen) and self.key == other.key


@lru_cache(1)
def _filters(filters: _Frozen) -> Filters:
    """Make the filters once in a process: models and spaCy's rules take a second to load."""
    return build(filters.filters)
