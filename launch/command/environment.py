"""The environment variables that `deepspeed` forwards to other hosts on ssh's command line.

Every user of those hosts can read that command line, so a secret must not be among them.
"""

import os
import re
from pathlib import Path

# deepspeed/launcher/runner.py 0.19.8: EXPORT_ENVS, and the prefixes its accelerators add
FORWARDED_PREFIXES = ("MLFLOW", "PYTHON", "MV2", "UCX", "NCCL", "LD_LIBRARY_PATH")
SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL", re.IGNORECASE)


def is_secret_name(name: str) -> bool:
    """Return whether a variable with this name probably holds a secret."""
    return SECRET_NAME.search(name) is not None


def deepspeed_env_files() -> dict[Path, dict[str, str]]:
    """Return {file: its variables} for each `.deepspeed_env` that DeepSpeed reads, in its order."""
    files = {}
    for directory in (Path.home(), Path.cwd()):
        file = directory / os.environ.get("DS_ENV_FILE", ".deepspeed_env")
        if file.is_file():
            pairs = (line.partition("=") for line in file.read_text().splitlines())
            files[file] = {
                name.strip(): value.strip().strip("\"'") for name, equals, value in pairs if equals
            }
    return files


def forwarded_environment() -> dict[str, str]:
    """Return the variables that DeepSpeed would set for ranks on other hosts."""
    forwarded = {
        name: value for name, value in os.environ.items() if name.startswith(FORWARDED_PREFIXES)
    }
    path = os.environ.get("PYTHONPATH")
    forwarded["PYTHONPATH"] = str(Path.cwd()) + (f":{path}" if path else "")
    for variables in deepspeed_env_files().values():
        forwarded |= variables
    return forwarded
