"""URLs of directories in stores, used like paths."""

import re
from pathlib import Path, PurePosixPath
from typing import Any

EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "http": "s3", "https": "s3"}
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")


class Url(PurePosixPath):
    """The URL of a directory or an object in a store: `/` goes down, str() is the URL."""

    def __str__(self) -> str:
        scheme, _, rest = super().__str__().partition(":/")
        return f"{scheme}://{'/' * (scheme in ('file', 'local'))}{rest}"

    @property
    def scheme(self) -> str:
        return str(self).partition("://")[0]


def is_url(text: Any) -> bool:
    """Tell a URL from a path."""
    return isinstance(text, Url) or bool(_URL.match(str(text)))


def place(text: str) -> "Path | Url":
    """Return what a user wrote as the path, or the URL, that it is."""
    return Url(text) if is_url(text) else Path(text)


def url_problem(url: str) -> str | None:
    """Say what is wrong with a URL, without any network; None when nothing is."""
    import fsspec

    scheme, separator, rest = url.partition("://")
    if not separator or not rest.strip("/"):
        return "is not a URL. Write s3://bucket/first, gs://bucket/first or file:///backup/first."
    if "@" in rest.split("/")[0] or "?" in rest:
        return (
            "carries credentials or a query, which would stand in run.json and in every list of "
            "processes. Leave them to the environment or the files of the store's library."
        )
    try:
        fsspec.get_filesystem_class(scheme)
    except ValueError:
        return f"{scheme}:// is not known to fsspec. Use s3://, gs://, hf:// or file://."
    except ImportError as error:
        extra = EXTRAS.get(scheme)
        fix = f"pip install 'zerolm[{extra}]'" if extra else "Install it"
        return f"needs a package that is not installed ({error}). {fix}."
    return None
