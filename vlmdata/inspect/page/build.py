"""Builds the page: one self-contained HTML document, for a file with chosen samples or for a server."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from vlmdata.errors import DatasetFormatError, ResourceError
from vlmdata.format.atomic import write_atomically
from vlmdata.format.dataset import VlmDataset
from vlmdata.inspect.dataset import DatasetCard
from vlmdata.inspect.findings import Severity
from vlmdata.inspect.frames import shown_frames
from vlmdata.inspect.page.payload import dataset_name, dataset_payload, sample_payload, summary_payload
from vlmdata.inspect.sample import FRAME_SIDE, PAGE_SIDE, THUMBNAIL_SIDE, SampleDescriber
from vlmdata.inspect.serialise import to_json
from vlmdata.media.image_file import image_file
from vlmdata.version import __version__

_HERE = Path(__file__).parent
#: The parts of the script, in order, in one function scope.
_SCRIPTS = ("dom", "store", "overview", "list", "tokens", "picture", "sample", "packs", "mixture", "main")
_FINDINGS_FIRST = 3
#: Frames of a video in a page of one file.
_PAGE_FRAMES = 12


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
        title=boot["name"],
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


def page_document(
    dataset: VlmDataset,
    card: DatasetCard,
    chosen: Mapping[int, str],
    packs: Mapping[str, Any],
    mixture: Mapping[str, Any],
) -> HtmlPage:
    """Builds a page with the samples at some positions, each with the reason for showing it, packs and the mixture."""
    describe = SampleDescriber(dataset)
    boot = {
        "mode": "file",
        "name": dataset_name(dataset),
        "card": dataset_payload(dataset, card),
        "samples": [
            summary_payload(describe, i, why, _image_uri(describe, i, 0, THUMBNAIL_SIDE)) for i, why in chosen.items()
        ],
        "packs": packs,
        "mixture": mixture,
    }
    return build_page(boot, {i: _with_images(describe, i) for i in chosen}, served=False)


def mixture_document(name: str, packs: Mapping[str, Any], mixture: Mapping[str, Any]) -> HtmlPage:
    """Builds a page of several datasets: the mixture over the steps, and packs."""
    boot: dict[str, Any] = {
        "mode": "file",
        "name": name,
        "card": None,
        "samples": [],
        "packs": packs,
        "mixture": mixture,
    }
    return build_page(boot, {}, served=False)


def _with_images(describe: SampleDescriber, i: int) -> dict[str, Any]:
    payload = sample_payload(describe(i))
    for image in payload["images"]:
        frames = image["frames"]
        for patch in shown_frames(len(frames), _PAGE_FRAMES):
            frames[patch]["src"] = _image_uri(describe, i, image["number"], FRAME_SIDE, patch)
        if not frames:
            image["src"] = _image_uri(describe, i, image["number"], PAGE_SIDE)
    return payload


def _image_uri(describe: SampleDescriber, i: int, number: int, longest: int, patch: int = 0) -> str | None:
    """Returns an image or a frame as a ``data:`` URL; None if missing or damaged (its findings report damage)."""
    try:
        pixels = describe.image(i, number, patch)
    except (IndexError, DatasetFormatError):
        return None
    return f"data:image/webp;base64,{base64.b64encode(image_file(pixels, 'webp', longest)).decode()}"


def choose_samples(card: DatasetCard, total: int, count: int, seed: int) -> dict[int, str]:
    """Returns the positions of at most ``count`` samples of ``total``, with the reason for each."""
    reasons: dict[int, list[str]] = {}
    for group in card.findings:
        shown = group.examples if group.severity is not Severity.NOTE else group.examples[:_FINDINGS_FIRST]
        for example in shown:
            reasons.setdefault(example.index, []).append(group.kind.replace("_", " "))
    for extremes in card.extremes:
        for sample in extremes.samples:
            reasons.setdefault(sample.index, []).append(extremes.title)
    chosen = {index: ", ".join(dict.fromkeys(why)) for index, why in list(reasons.items())[:count]}
    # Draw twice as many as needed: at most half of them are already chosen.
    for index in np.random.default_rng(seed).permutation(total)[: 2 * count].tolist():
        if len(chosen) >= min(count, total):
            break
        chosen.setdefault(index, "random")
    return chosen
