"""The environment that `deepspeed` hands on to other hosts, on the command line of ssh.

Everybody on those hosts can read that, so it is no place for a secret.
"""

import os
import re
from pathlib import Path

# deepspeed/launcher/runner.py 0.19.8: EXPORT_ENVS, and what its accelerators add
PREFIXES = ("MLFLOW", "PYTHON", "MV2", "UCX", "NCCL", "LD_LIBRARY_PATH")
SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL", re.IGNORECASE)


def looks_secret(name: str) -> bool:
    """Tell whether a variable of this name holds what nobody else should read."""
    return SECRET.search(name) is not None


def environment_files() -> dict[Path, dict[str, str]]:
    """Return {file: its variables} of those that DeepSpeed reads, in its order."""
    found = {}
    for directory in (Path.home(), Path.cwd()):
        file = directory / os.environ.get("DS_ENV_FILE", ".deepspeed_env")
        if file.is_file():
            pairs = (line.partition("=") for line in file.read_text().splitlines())
            found[file] = {
                name.strip(): value.strip().strip("\"'") for name, equals, value in pairs if equals
            }
    return found


def forwarded_environment() -> dict[str, str]:
    """Return what ranks on other hosts would have in their environment from here."""
    found = {name: value for name, value in os.environ.items() if name.startswith(PREFIXES)}
    path = os.environ.get("PYTHONPATH")
    found["PYTHONPATH"] = str(Path.cwd()) + (f":{path}" if path else "")
    for variables in environment_files().values():
        found |= variables
    return found
