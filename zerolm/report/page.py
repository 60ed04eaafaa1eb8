"""HTML pages: single files in a common style that load no other resources.

A page is rendered from a Jinja template that extends `assets/document.html`. Values are inserted as
text, never as markup, and a content security policy forbids loading other resources.
"""

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from zerolm.common.values import strict_json

ASSETS = Path(__file__).parent / "assets"


def page(
    template: Path, styles: Sequence[str] = (), scripts: Sequence[str] = (), **values: Any
) -> str:
    """Return the HTML of a page.

    Args:
        styles, scripts: names of files in `assets/` to embed; every page also contains
            `document.css`.
        values: the template's variables, including `title`.
    """
    environment = Environment(
        loader=FileSystemLoader([template.parent, ASSETS]),
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.policies["json.dumps_function"] = strict_json
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    environment.filters["count"] = "{:,}".format
    style = _joined(("document.css", *styles))
    script = f"'use strict';(() => {{\n{_joined(scripts)}\n}})();"
    policy = (
        f"default-src 'none'; img-src data:; style-src '{_digest(style)}'; "
        f"script-src '{_digest(script)}'; base-uri 'none'; form-action 'none'"
    )
    return environment.get_template(template.name).render(
        policy=Markup(policy), style=Markup(style), script=Markup(script), **values
    )


def _joined(names: Sequence[str]) -> str:
    return "\n".join((ASSETS / name).read_text(encoding="utf-8") for name in names)


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
