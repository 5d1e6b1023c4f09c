"""Joins template, stylesheet and script to one self-contained HTML document."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from vlmdata.errors import ResourceError
from vlmdata.format.atomic import write_atomically
from vlmdata.inspect.serialise import to_json
from vlmdata.version import __version__

_HERE = Path(__file__).parent
#: The parts of the script, in order, in one function scope.
_SCRIPTS = ("dom", "store", "overview", "list", "tokens", "picture", "sample", "packs", "main")


@dataclass(frozen=True)
class HtmlPage:
    """A page and its Content-Security-Policy, which allows only its own script and style, by hash, and its images."""

    html: str
    policy: str


def build_page(boot: Mapping[str, Any], samples: Mapping[int, Mapping[str, Any]], *, served: bool) -> HtmlPage:
    """Builds the page from the script's initial data (card, sample list, packs) and samples by position.

    Samples are parsed when opened. If ``served``, a server provides further samples.
    """
    style, script = _read("style.css"), _script()
    # frame-ancestors has no effect in a meta element; the server's header has it.
    images, connect = ("'self' data:", "'self'") if served else ("data:", "'none'")
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src {images}; "
        f"connect-src {connect}; base-uri 'none'; form-action 'none'"
    )
    jinja = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    html = jinja.from_string(_read("templates/page.html.j2")).render(
        title=boot["card"]["name"],
        version=__version__,
        policy=policy,
        style=Markup(style),
        script=Markup(script),
        boot=json_block(boot),
        samples=[(index, json_block(sample)) for index, sample in samples.items()],
    )
    return HtmlPage(html, policy)


def json_block(value: Any) -> Markup:
    """Returns JSON for a ``<script type="application/json">``: ASCII, without HTML special characters."""
    text = to_json(value)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def write_page(path: Path, document: HtmlPage) -> None:
    """Writes a document atomically.

    Raises:
        ResourceError: If the file cannot be written.
    """
    try:
        write_atomically(path, document.html.encode())
    except OSError as error:
        raise ResourceError(f"--html {path}: cannot write the page: {error.strerror or error}") from error


def _script() -> str:
    parts = [_read(f"script/{name}.js") for name in _SCRIPTS]
    return '"use strict";\n(() => {\n' + "\n".join(parts) + "})();\n"


def _read(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
