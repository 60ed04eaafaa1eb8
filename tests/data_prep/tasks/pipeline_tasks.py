"""Tasks that other processes import, for tests of executors."""

from dataclasses import dataclass
from pathlib import Path

from zerolm.common.errors import ConfigError


@dataclass(frozen=True)
class Cubes:
    """Logs its number, and returns its cube."""

    directory: Path

    def __call__(self, task: int) -> dict:
        if (self.directory / f"refuse-{task}").exists():
            raise ConfigError(f"input {task}: is bad.")
        with open(self.directory / "log", "a") as log:
            log.write(f"{task}\n")
        return {"cube": task**3}
