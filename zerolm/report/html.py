"""`report.html`: one self-contained HTML file about a run, or about several side by side.

`zerolm.report.run_history` reads the run directories, `zerolm.report.report_data` turns them into
JSON, and the scripts in `assets/` draw it in the browser. The report loads nothing, and its content
security policy forbids loading. Text from a run is inserted as text, never as markup.
Standard library only.
"""

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zerolm.common.errors import ConfigError
from zerolm.common.files import write_atomically
from zerolm.common.run_files import RunFiles
from zerolm.common.values import strict_json
from zerolm.report.report_data import report_data
from zerolm.report.run_history import read_runs

ASSETS = Path(__file__).parent / "assets"
STYLES, SCRIPTS = (
    ("page.css",),
    ("format.js", "axis.js", "view.js", "elements.js", "chart.js", "sections.js", "page.js"),
)

Json = dict[str, Any]


def write_report(run_dirs: Sequence[str | Path], output: str | Path | None = None) -> Path:
    """Write the report of one run, or of several compared.

    Args:
        run_dirs: run directories; the runs may still be in progress.
        output: default: `report.html` in the first run directory.

    Returns:
        The path of the report.

    Raises:
        ConfigError: a directory is not a run directory (each one is named), or the report cannot
            be written.
    """
    runs = read_runs(run_dirs)
    output = Path(output) if output is not None else RunFiles(runs[0].run_dir).report
    text = render(report_data(runs))
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(output, text.encode(), many_writers=True)
    except OSError as error:
        raise ConfigError(
            f"{output}: cannot be written: {error.strerror}. Choose another --output."
        ) from error
    return output


def render(data: Json) -> str:
    """Return the HTML that draws the data of a report."""
    style = "\n".join((ASSETS / name).read_text(encoding="utf-8") for name in STYLES)
    script = "\n".join((ASSETS / name).read_text(encoding="utf-8") for name in SCRIPTS)
    script = f"'use strict';(() => {{\n{script}\n}})();"
    policy = (
        f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; "
        f"base-uri 'none'; form-action 'none'"
    )
    parts = {"POLICY": policy, "STYLE": style, "SCRIPT": script, "DATA": json_in_html(data)}
    template = (ASSETS / "page.html").read_text(encoding="utf-8")
    pieces = template.split("%%")  # text, NAME, text, NAME, ... text
    pieces[1::2] = [parts[name] for name in pieces[1::2]]
    return "".join(pieces)


def json_in_html(data: Json) -> str:
    """Return JSON that cannot close the HTML element it is placed in."""
    text = strict_json(data, ensure_ascii=True, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
