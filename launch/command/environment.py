"""The environment variables that `deepspeed` forwards to other hosts on ssh's command line.

Every user on those hosts can read that command line, so it must not contain secrets.
"""

import os
import re

from zerolm.common.errors import ConfigError
from zerolm.common.secrets import FILE_NAME
from zerolm.engine.launcher_options import FORWARDED_PREFIXES, change_of, deepspeed_env_files

# Matches whole words of a name, so neither NCCL_IB_PKEY nor TOKENIZERS_PARALLELISM is a secret.
SECRET_NAME = re.compile(
    r"(^|_)((API)?KEYS?|TOKENS?|SECRETS?|PASSWORD|PASSWD|CREDENTIALS?)(_|$)", re.IGNORECASE
)


def is_secret_name(name: str) -> bool:
    """Return whether a variable with this name probably holds a secret."""
    return bool(SECRET_NAME.search(name)) and not FILE_NAME.search(name)


def forwarded_environment() -> dict[str, str]:
    """Return the environment variables that DeepSpeed would set for ranks on other hosts."""
    forwarded = {
        name: value for name, value in os.environ.items() if name.startswith(FORWARDED_PREFIXES)
    }
    for variables in deepspeed_env_files().values():
        forwarded |= variables
    return forwarded


def environment_problems(num_hosts: int) -> list[str]:
    """Return a problem for each environment variable that ssh would alter or expose.

    With a single host, nothing is forwarded, so only DeepSpeed's environment files are checked: a
    later launch on several hosts would forward them.
    """
    sources: dict[str, dict[str, str]] = {}
    problems = []
    try:
        sources = {str(file): variables for file, variables in deepspeed_env_files().items()}
    except ConfigError as error:
        problems += error.problems
    if num_hosts > 1:
        forwarded = (name for name in os.environ if name.startswith(FORWARDED_PREFIXES))
        sources["environment"] = {name: os.environ[name] for name in forwarded}
        problems += [
            f"environment: {name}: {change}"
            for name, value in sources["environment"].items()
            if (change := change_of(value.strip()))
        ]
    return problems + [
        f"{source}: {name}: would be visible on ssh's command line on every host. Remove it; "
        f"wandb login and ~/.aws/credentials on the first host store such values."
        for source, variables in sources.items()
        for name in variables
        if is_secret_name(name)
    ]
