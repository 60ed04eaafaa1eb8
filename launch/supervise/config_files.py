"""Keep the JSON files named in a command, so each restart reads the content of the first start.

During the hours that a run takes, its files may be deleted or edited for the next run.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from launch.command.deepspeed_command import pretrain_flags
from zerolm.common.files import write_atomically
from zerolm.common.shipped import find_config
from zerolm.parts.parse import parse_settings
from zerolm.run_dir.files import RunFiles

NAMES = ("settings", "deepspeed_config", "model_config")


class ConfigFiles:
    """The contents of a command's settings, DeepSpeed and model JSON files, read on creation.

    Unreadable files are ignored, since pretrain.py refuses them. The run's own run.json is not kept
    either, since each start rewrites it.
    """

    def __init__(self, command: Sequence[str], run_dir: Path, log: Callable[[str], None]):
        self.files, self.log = RunFiles(run_dir), log
        settings, _ = parse_settings(pretrain_flags(command))
        given = {name: getattr(settings, name) for name in NAMES}
        self._paths = {name: _file_of(path) for name, path in given.items() if path is not None}
        read = {name: _content(path) for name, path in self._paths.items()}
        self._kept = {
            name: content
            for name, content in read.items()
            if content is not None and not _is_same(self._paths[name], self.files.record)
        }
        self._replaced: set[str] = set()

    def pinned(self, command: Sequence[str]) -> list[str]:
        """Return the command with each changed file replaced by a copy in the run directory.

        Raises:
            OSError: a copy cannot be written.
        """
        changed = {name for name, kept in self._kept.items() if _content(self._paths[name]) != kept}
        pinned = list(command)
        for name in sorted(changed):
            copy = self.files.kept_config(name)
            copy.parent.mkdir(exist_ok=True)
            write_atomically(copy, self._kept[name])
            pinned += [f"--{name}", str(copy)]  # the last value of a flag takes effect
            if name not in self._replaced:
                self.log(
                    f"{self._paths[name]} has changed or cannot be read: this run continues with "
                    f"{copy}, which has the original content. To use the new content, "
                    f"stop the supervisor and start it again"
                )
        self._replaced = changed
        return pinned


def _file_of(path: str) -> Path:
    """Return the file that pretrain.py reads if given the path of a file or model directory."""
    file = find_config(path)
    return file / "config.json" if file.is_dir() else file


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None


def _is_same(path: Path, other: Path) -> bool:
    return path.resolve() == other.resolve()
