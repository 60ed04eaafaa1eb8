"""Removes credentials from everything that is printed or written, through `masked`.

`masked` is called wherever text leaves the program: errors shown to users, rank 0's log lines,
events, the supervisor's log, tracebacks, the report, and the command in a manifest.
"""

import os
import re
import sys
import traceback
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from zerolm.common.values import printable

HIDDEN = "(hidden)"
SECRET_KEY = re.compile(
    r"(^|_|\b)(api_?key|key|secret|password|passwd|credentials?|auth|access_token|token)$", re.I
)
# Names of variables whose values are secrets, unless the value is a file name.
SECRET_NAME = re.compile(
    r"SECRET|TOKEN|PASSW|CREDENTIAL|CONNECTION_STRING|SAS|(API|ACCESS|ACCOUNT|STORAGE|PRIVATE)_KEY"
)
FILE_NAME = re.compile(r"_(FILE|PATH|DIR|HOME)$|APPLICATION_CREDENTIALS$")
MIN_SECRET_LENGTH = 8  # a shorter value could be part of any word
SECRET_VALUE = re.compile(r"\b(hf_|sk-|ghp_|AKIA|local-)[A-Za-z0-9_-]{12,}")
# A URL up to white space, a quote or the next URL; `Path` shortens it to "s3:/bucket".
_SCHEME = r"[A-Za-z][A-Za-z0-9+.-]+:/{1,2}"
_URL = re.compile(rf"({_SCHEME})((?:(?!{_SCHEME})[^\s'\"`<>|])+)")
_QUERY_SECRET = re.compile(
    r"([?&][^=&\s]*(?:sig|signature|token|key|secret|password|credential|sas|auth)[^=&\s]*=)[^&\s]+",
    re.I,
)


def masked(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """Return a text with credentials hidden: in URLs, known tokens, and values of secret variables.

    Args:
        environment: environment variables; values of variables whose names match `SECRET_NAME` are
            hidden.
    """
    text = SECRET_VALUE.sub(HIDDEN, _URL.sub(_mask_url, text))
    for name, value in environment.items():
        secret = SECRET_NAME.search(name.upper()) and not FILE_NAME.search(name.upper())
        if secret and len(value) >= MIN_SECRET_LENGTH:
            text = text.replace(value, HIDDEN)
    return text


def masked_values(value: Any) -> Any:
    """Return a JSON value with every string masked."""
    if isinstance(value, str):
        return masked(value)
    if isinstance(value, dict):
        return {key: masked_values(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [masked_values(part) for part in value]
    return value


def redacted(name: str, value: Any) -> str:
    """Return a setting as text, with secrets replaced by `HIDDEN`.

    Args:
        name: dotted key of the setting; its last part decides whether the value is a secret.
        value: lists and tuples are joined by commas.
    """
    if isinstance(value, str) and SECRET_KEY.search(name.rpartition(".")[2]):
        return HIDDEN
    if isinstance(value, (list, tuple)):
        return ", ".join(redacted(name, part) for part in value)
    return masked(f"{value:g}" if isinstance(value, float) else str(value))


def has_credentials(text: str) -> bool:
    """Return whether a text contains a URL with a user, a password or a signed query."""
    return _URL.sub(_mask_url, text) != text


def mask_tracebacks() -> None:
    """Install a hook that masks secrets in the tracebacks of uncaught exceptions."""

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        text = masked("".join(traceback.format_exception(kind, error, trace)))
        sys.stderr.write(printable(text, "\n\t"))

    sys.excepthook = show


def _mask_url(match: re.Match[str]) -> str:
    scheme, rest = match.groups()
    host = rest.partition("/")[0]
    _, colon, port = host.partition(":")
    end = host.rfind("@")
    if end < 0 and colon and not port.isdigit():  # the secret may contain a slash
        end = rest.rfind("@")
    if end > 0:
        rest = f"{HIDDEN}{rest[end:]}"
    return scheme + _QUERY_SECRET.sub(rf"\1{HIDDEN}", rest)
