"""`FileKinds`, the rules that determine from a file's name whether the file is read."""

import glob
import os
from collections.abc import Callable
from fnmatch import fnmatch
from typing import NamedTuple

from data_prep.formats import shown_endings, suffix_of
from data_prep.formats.source_code import CODE, language_of
from zerolm.common.url import is_url

DATASET_CARD = "README.md"  # describes the files next to it
# Files created by desktops, archives and network disks.
JUNK = {"thumbs.db", "desktop.ini", "__macosx", "@eadir", "$recycle.bin", "lost+found"}


class FileKinds(NamedTuple):
    """Rules that determine from a file's name whether the file is read.

    Attributes:
        suffix: function from a file's path to the suffix of the input; None if the file is not
            read.
        shown: description of the names that are read, for messages.
        hidden: name prefixes of files and directories that are left out.
        card: name of files that describe the other files in their directory, and are not read.
    """

    suffix: Callable[[str], str | None]
    shown: str
    hidden: tuple[str, ...]
    card: str = ""

    def hides(self, name: str) -> bool:
        """Return whether a file or directory below an --input is left out because of its name.

        Spark, Hive and pyarrow hide the same names, except column partitions (`_day=1`).
        """
        is_hidden = name.startswith(self.hidden) and not (name[0] == "_" and "=" in name)
        return is_hidden or name == self.card or name.lower() in JUNK

    def hides_below(self, argument: str, name: str) -> bool:
        """Return whether a file that an --input contains or matches is left out.

        A file is kept if the argument itself contains its name, as in the globs `_*/a.txt` and
        `*.md`.
        """
        path = argument if is_url(argument) else os.path.normpath(argument)  # without `//`, `./`
        name = name if is_url(name) else os.path.normpath(name)
        top, patterns = path.rstrip("/").split("/"), list[str]()
        while top and glob.has_magic("/".join(top)):
            patterns.append(top.pop())
        return name != path and any(
            self.hides(part)
            and not (patterns and part == self.card)
            and not any(each[:1] == part[:1] and fnmatch(part, each) for each in patterns)
            for part in name.split("/")[len(top) :]
        )


def _code_suffix(path: str) -> str | None:
    return CODE.endings[0] if language_of(path) is not None else None


DATA_FILES = FileKinds(
    suffix_of,
    f"{shown_endings()}. Convert or rename them, or read source code with --code.",
    (".", "_", "~$"),
    DATASET_CARD,
)
CODE_FILES = FileKinds(
    _code_suffix, "the names of text files that identify knows (.py, .c, Makefile, ...).", (".",)
)
