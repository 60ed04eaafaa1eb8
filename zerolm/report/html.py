"""`report.html`: one self-contained page of a run, or of several side by side.

Comes after training, or beside it: what it knows is in the files of a run directory, read by
zerolm/run_history.py and becomes the data of the page in zerolm/page_data.py; the script in
zerolm/page/ draws it in the browser.
The page loads nothing and may not: its own policy forbids it. All text in it is data, never
markup. Standard library only; must not know torch.
"""

import base64
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zerolm import run_history
from zerolm.errors import ConfigError
from zerolm.files import write_atomically
from zerolm.page_data import data_of

PAGE = "report.html"
PAGE_DIRECTORY = Path(__file__).parent / "page"
STYLES, SCRIPTS = (
    ("page.css",),
    ("format.js", "axis.js", "view.js", "elements.js", "chart.js", "sections.js", "page.js"),
)

Json = dict[str, Any]


def write_report(run_dirs: Sequence[str | Path], output: str | Path | None = None) -> Path:
    """Write the page of one run, or of several compared.

    Args:
        run_dirs: of runs, which may be going on.
        output: default: `report.html` in the directory of the first.

    Returns:
        The path of the page.

    Raises:
        ConfigError: directories that are not of runs, each one named; or nothing can be written.
    """
    histories = run_history.read_all(run_dirs)
    output = Path(output) if output is not None else histories[0].run_dir / PAGE
    text = page(data_of(histories))
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(output, lambda file: file.write(text.encode()), many_writers=True)
    except OSError as error:
        raise ConfigError(
            f"{output}: cannot be written: {error.strerror}. Choose another --output."
        ) from error
    return output


def page(data: Json) -> str:
    """Return the HTML of the page for its data."""
    style = "\n".join((PAGE_DIRECTORY / name).read_text(encoding="utf-8") for name in STYLES)
    script = "\n".join((PAGE_DIRECTORY / name).read_text(encoding="utf-8") for name in SCRIPTS)
    script = f"'use strict';(() => {{\n{script}\n}})();"
    policy = (
        f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; "
        f"base-uri 'none'; form-action 'none'"
    )
    parts = {"POLICY": policy, "STYLE": style, "SCRIPT": script, "DATA": embedded(data)}
    template = (PAGE_DIRECTORY / "page.html").read_text(encoding="utf-8")
    pieces = template.split("%%")  # text, NAME, text, NAME, ... text
    pieces[1::2] = [parts[name] for name in pieces[1::2]]
    return "".join(pieces)


def embedded(data: Json) -> str:
    """Return JSON that cannot end the element which it stands in."""
    text = json.dumps(data, allow_nan=False, ensure_ascii=True, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
