"""URLs of directories in object stores, used like paths, and names on the Hugging Face hub."""

import contextlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from zerolm.common.errors import reason
from zerolm.common.secrets import has_credentials

EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "http": "s3", "https": "s3"}
HUB_SECONDS = 10.0
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")


class Url(PurePosixPath):
    """The URL of a directory or object in a store.

    `/` appends a name, and `str()` returns the URL.
    """

    def __str__(self) -> str:
        scheme, _, rest = super().__str__().partition(":/")
        return f"{scheme}://{'/' * (scheme in ('file', 'local'))}{rest}"

    @property
    def scheme(self) -> str:
        return str(self).partition("://")[0]


def is_url(text: Any) -> bool:
    """Return whether a value is a URL rather than a local path."""
    return isinstance(text, Url) or bool(_URL.match(str(text)))


def path_or_url(text: str) -> "Path | Url":
    """Parse a location given by a user."""
    return Url(text) if is_url(text) else Path(text)


def url_problem(url: str) -> str | None:
    """Return what is wrong with a store's URL, or None. Does not access the network."""
    import fsspec

    scheme, separator, rest = url.partition("://")
    if not separator or not rest.strip("/"):
        return "is not a URL. Write s3://bucket/first, gs://bucket/first or file:///backup/first."
    if has_credentials(url) or "?" in rest:
        return (
            "contains credentials or a query, which would be visible in run.json and in process "
            "listings. Put them in the environment or the configuration of the store's library."
        )
    try:
        fsspec.get_filesystem_class(scheme)
    except ValueError:
        return f"{scheme}:// is not supported by fsspec. Use s3://, gs://, hf:// or file://."
    except ImportError as error:
        extra = EXTRAS.get(scheme)
        fix = f"Run: bash launch/setup.sh {extra}" if extra else "Install it"
        return f"needs a package that is not installed ({error}). {fix}."
    return None


def ask_hub(name: str, revision: str | None = None, kind: str = "model") -> str | None:
    """Check with a single query that the hub contains a name; first print a line about the query.

    Otherwise the hub's client and transformers would query many files one by one, and retry for
    minutes.

    Returns:
        Why the query failed, in which case only the cache can be used; None if the hub contains the
        name, or if HF_HUB_OFFLINE is set.
    """
    from huggingface_hub import HfApi, constants

    if constants.HF_HUB_OFFLINE:
        return None
    announce_hub(name)
    try:
        HfApi().repo_info(name, revision=revision, repo_type=kind, timeout=HUB_SECONDS)
    except Exception as error:  # any class: from the network, from the hub, or for an invalid name
        return reason(error)
    return None


def announce_hub(name: str, fact: str = "no local file has this name") -> None:
    """Print on rank 0 that the hub is queried for a name, and the reason."""
    from huggingface_hub import constants

    if os.environ.get("RANK", "0") == "0":
        line = f"{name}: {fact}; asking the hub, {constants.ENDPOINT}"
        print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def hub_client(name: str, fact: str = "no local file has this name") -> Iterator[None]:
    """Print a line and query the hub once; if it does not answer, let its clients read only caches.

    This is for libraries whose clients would retry each request for half a minute.
    """
    import datasets
    import httpx
    from huggingface_hub import constants

    clients: tuple[Any, ...] = (constants, datasets.config)
    before = [client.HF_HUB_OFFLINE for client in clients]
    if not before[0]:
        announce_hub(name, fact)
        try:
            httpx.head(constants.ENDPOINT, timeout=HUB_SECONDS)
        except httpx.HTTPError:
            for client in clients:
                client.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        for client, value in zip(clients, before, strict=True):
            client.HF_HUB_OFFLINE = value
