"""Remove credentials from displayed values: secret settings, passwords in URLs, known tokens."""

import re
from typing import Any

HIDDEN = "(hidden)"
SECRET_KEY = re.compile(
    r"(^|_|\b)(api_?key|key|secret|password|passwd|credentials?|auth|access_token|token)$", re.I
)
URL_PASSWORD = re.compile(r"(\w+://)[^/@\s]*@")
SECRET_VALUE = re.compile(r"\b(hf_|sk-|ghp_|AKIA|local-)[A-Za-z0-9_-]{12,}")


def redacted(name: str, value: Any) -> str:
    """Return a setting as text in which secrets are replaced by `HIDDEN`.

    Args:
        name: dotted key of the setting; the last part decides whether its value is a secret.
        value: lists and tuples are joined by commas.
    """
    if isinstance(value, str) and SECRET_KEY.search(name.rpartition(".")[2]):
        return HIDDEN
    if isinstance(value, (list, tuple)):
        return ", ".join(redacted(name, part) for part in value)
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return SECRET_VALUE.sub(HIDDEN, URL_PASSWORD.sub(rf"\1{HIDDEN}@", text))
