"""Checks output directories: a stage never overwrites other files, and is never written inside its
input, where a later command would read the output as part of the input.
"""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from data_prep.read.readers import Input
from data_prep.read.stage_files import STAGE_SUFFIX, is_stage
from zerolm.common.url import is_url


def output_problems(output: Path, where: str = "--output") -> list[str]:
    """Return why a stage cannot be written to a directory; it must be new, empty or a stage."""
    existing = output
    while not os.path.lexists(existing):
        existing = existing.parent
    if not existing.is_dir():
        problem = "is a file" if existing == output else f"{existing} is not a directory"
        return [f"{where} {output}: {problem}. Give a new directory."]
    if not os.access(existing, os.W_OK | os.X_OK):
        return [f"{where} {output}: {existing} is not writable. Choose another directory."]
    names = {path.name for path in output.iterdir()} if output.is_dir() else set()
    is_started = names & {"records", "stage.json"} or (output / "work" / "records").is_dir()
    if names - {"work"} and not is_started:
        return [f"{where} {output}: is neither empty nor a stage. Give a new directory."]
    return []


def overlap_problems(
    directory: Path, arguments: Iterable[str], inputs: Sequence[Input] = (), where: str = "--output"
) -> list[str]:
    """Return why a directory cannot be written while reading these inputs; see `Outputs`."""
    return Outputs([directory]).problems(arguments, inputs, where)


class Outputs:
    """The directories that a command will write."""

    def __init__(self, directories: Iterable[Path]):
        self.targets = {each.resolve(): each for each in directories}
        self.inside = {above: each for path, each in self.targets.items() for above in path.parents}

    def problems(
        self, arguments: Iterable[str], inputs: Sequence[Input] = (), where: str = "--output"
    ) -> list[str]:
        """Return why the directories cannot be written while reading these inputs.

        Args:
            arguments: values of --input; a directory that is not a stage includes all files below
                it.
        """
        for argument in arguments:
            path = Path(argument).resolve()
            if path in self.targets:
                return [f"{where} {self.targets[path]}: is also --input. Give a new directory."]
            if path in self.inside and path.is_dir() and not is_stage(path):
                return [
                    f"{where} {self.inside[path]}: is inside --input {argument}, so its files "
                    "would be read as input. Give a directory outside the input."
                ]
        local = [each for each in inputs if each.suffix != "hub" and not is_url(each.name)]
        by_directory = {Path(each.name).parent: each for each in local}
        for parent, each in by_directory.items():
            for path in ((real := parent.resolve()), *real.parents):
                if path in self.targets:
                    return [
                        f"{where} {self.targets[path]}: contains {each.name}, which --input "
                        f"{each.argument} reads. Give another directory, or a narrower --input."
                    ]
        return []


def dropped_problems(directory: Path, output: Path) -> list[str]:
    """Return why dropped documents cannot be written to a directory; only a resumed run may reuse
    it.
    """
    flag = f"--keep_dropped {directory}"
    target, stage = directory.resolve(), output.resolve()
    if target == stage or target in stage.parents:
        return [
            f"{flag}: is the same directory as --output, or contains it. Give another directory."
        ]
    if directory.is_dir():
        is_resumed = (output / "records").is_dir()
        names = [path.name for path in directory.iterdir()]
        if not all(is_resumed and STAGE_SUFFIX in name for name in names):
            return [f"{flag}: is not empty. Give a new directory."]
        return []
    return output_problems(directory, "--keep_dropped")
