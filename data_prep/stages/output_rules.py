"""Where a stage may be written: never over files that are not its own, nor among its input.

An output below an input directory would be read as input by the command that goes on with it.
"""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from data_prep.readers import Input
from data_prep.stage_files import SUFFIX, is_stage


def output_problems(output: Path, where: str = "--output") -> list[str]:
    """Say why a stage cannot be written there: only a stage of ours is gone on with.

    Args:
        where: flag or key, for messages.
    """
    existing = output
    while not os.path.lexists(existing):
        existing = existing.parent
    if not existing.is_dir():
        what = "is a file" if existing == output else f"{existing} is not a directory"
        return [f"{where} {output}: {what}. Give a new directory."]
    if not os.access(existing, os.W_OK | os.X_OK):
        return [f"{where} {output}: {existing} is not writable. Choose another directory."]
    names = {path.name for path in output.iterdir()} if output.is_dir() else set()
    begun = names & {"records", "stage.json"} or (output / "work" / "records").is_dir()
    if names - {"work"} and not begun:
        return [f"{where} {output}: is not empty, and no stage. Give a new directory."]
    return []


def overlap_problems(
    directory: Path, arguments: Iterable[str], inputs: Sequence[Input] = (), where: str = "--output"
) -> list[str]:
    """Say why a directory cannot be written while these inputs are read.

    Args:
        arguments: as given; a directory means all that is below it, but for a stage.
        inputs: what they were found to be.
    """
    target = directory.resolve()
    for argument in arguments:
        given = Path(argument).resolve()
        if given == target:
            return [f"{where} {directory}: is --input too. Give a new directory."]
        if given in target.parents and given.is_dir() and not is_stage(given):
            return [
                f"{where} {directory}: is inside --input {argument}, so that what is written there "
                f"would be read. Give a directory outside of it."
            ]
    of_directories = {Path(each.name).parent: each for each in inputs if each.suffix != "hub"}
    for parent, each in of_directories.items():
        if target in (real := parent.resolve()).parents or target == real:
            return [
                f"{where} {directory}: {each.name} is in it, which is read by --input "
                f"{each.argument}. Give another directory, or a narrower --input."
            ]
    return []


def dropped_problems(directory: Path, output: Path) -> list[str]:
    """Say why dropped documents cannot be kept there; what a command has begun is gone on with."""
    flag = f"--keep_dropped {directory}"
    one, other = directory.resolve(), output.resolve()
    if one == other or one in other.parents:
        return [f"{flag}: is --output, or --output is inside of it. Give another directory."]
    if directory.is_dir():
        ours = (output / "records").is_dir()
        names = [path.name for path in directory.iterdir()]
        if not all(ours and SUFFIX in name for name in names):
            return [f"{flag}: is not empty. Give a new directory."]
        return []
    return output_problems(directory, "--keep_dropped")
