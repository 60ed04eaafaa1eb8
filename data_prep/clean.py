"""Clean: documents through filters, unit by unit, into the files of a stage.

Task i reads unit i of the inputs and writes file i, so the next stages have a file a task. What was
dropped is counted by reason, with examples, and kept in files of its own if that is asked for.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from data_prep.bad_input import Tally, check_bad_fraction
from data_prep.documents import Document, InputRules
from data_prep.filters import Filters, build, identity
from data_prep.phases import Executor, Phase, fingerprint, run_phase
from data_prep.stage_counts import Counts, merge_counts
from data_prep.stage_files import (
    STAGE,
    StageWriter,
    publish_stage,
    read_stage,
    stage_file,
)
from data_prep.units import Unit, plan_units, read_batches
from data_prep.units import fingerprint as inputs_fingerprint
from zerolm.errors import ConfigError

ID = "id"

Json = dict[str, Any]


@dataclass(frozen=True)
class CleanOptions:
    """How documents are read and which are kept."""

    filters: tuple[Json, ...] = ()  # as in the recipe, checked by `filters.filter_problems`
    rules: InputRules = field(default_factory=lambda: InputRules(keep_records=True))
    unit_bytes: int | None = None  # of input for a task; None: from the size of all inputs
    keep_dropped: Path | None = None  # a directory


@dataclass(frozen=True)
class CleanTask:
    """Filters one unit; see `Phase.run`."""

    inputs: tuple[Any, ...]
    units: tuple[Unit, ...]
    options: CleanOptions
    output: Path

    def __call__(self, task: int) -> Json:
        """Write file `task` of the stage.

        Raises:
            ConfigError: bad input under the policy "fail".
        """
        options, counts, tally = self.options, Counts(), Tally()
        filters = _filters(_Frozen(options.filters))
        with ExitStack() as stack:
            kept = stack.enter_context(StageWriter(self.output / stage_file(task)))
            dropped = None
            if options.keep_dropped is not None:
                path = options.keep_dropped / stage_file(task)
                dropped = stack.enter_context(StageWriter(path))
            for batch in read_batches(self.inputs, self.units[task], options.rules, tally):
                for document in batch.documents:
                    self._judge(filters, document, counts, kept, dropped)
            if dropped is not None:
                dropped.close()
            entry = kept.close()
        files = {entry["file"]: entry["size_bytes"]}
        return {**counts.record(), "files": files, "entry": entry, "reading": tally.record()}

    def _judge(
        self,
        filters: Filters,
        document: Document,
        counts: Counts,
        kept: StageWriter,
        dropped: StageWriter | None,
    ) -> None:
        field_name = self.options.rules.text_field
        record = dict(document.record or {})
        identity = record.setdefault(ID, f"{self.inputs[document.input].name}:{document.start}")
        size = len(document.utf8)
        counts.came_in(size)
        others = {key: value for key, value in record.items() if key not in (field_name, ID)}
        verdict = filters.judge(document.text, str(identity), others)
        if verdict.kept:
            for name in verdict.changed:
                counts.changed(name)
            if verdict.changed:
                size = len(verdict.text.encode("utf-8"))
            if not verdict.text:
                counts.dropped("emptied", len(document.utf8), identity, document.text)
                return
            counts.went_out(size)
            kept.write(_with_text(record, field_name, verdict.text) | verdict.added, size)
            return
        counts.dropped(verdict.reason, size, identity, verdict.text)
        if dropped is not None:
            dropped.write(
                {**_with_text(record, field_name, document.text), "dropped_by": verdict.reason},
                size,
            )


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
            return published
        raise ConfigError(
            f"{output}: is a stage already, from other inputs or filters. Choose another "
            f"directory, or remove this one."
        )
    records = run_phase(phase, executor)
    tally = Tally.from_records([record["reading"] for record in records])
    check_bad_fraction(inputs, tally, options.rules)
    return publish_stage(
        output,
        "clean",
        [record["entry"] for record in records],
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
    key = fingerprint(
        [inputs_fingerprint(inputs, options.rules), units, filters, options.keep_dropped]
    )
    task = CleanTask(tuple(inputs), tuple(units), options, output)
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
