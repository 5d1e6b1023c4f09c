"""Debian's chromium, driven headless. ``make test`` installs it where it may; elsewhere these tests are skipped."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

SCREENSHOTS = Path(__file__).resolve().parents[2] / "build" / "screenshots"


def chromium() -> str:
    """The browser's path; skips the test where there is none."""
    pytest.importorskip("playwright", reason="playwright is not installed (it comes with the extra dev)")
    found = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    if not found:
        pytest.skip("no chromium here: `apt-get install chromium`, or set CHROMIUM to a browser's path")
    return found


@contextmanager
def launched() -> Iterator[Any]:
    """A browser."""
    path = chromium()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # No sandbox: CI runs as root in a container, where chromium's own cannot start. All it opens is ours.
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        try:
            yield browser
        finally:
            browser.close()


class Visit:
    """A page that remembers what it complained of and what it asked for."""

    def __init__(self, browser: Any, url: str, **options: Any):
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page = browser.new_page(**{"viewport": {"width": 1400, "height": 900}, **options})
        self.page.set_default_timeout(120_000)
        self.page.on("console", lambda message: self.complaints.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.complaints.append(f"error: {error}"))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("dialog", lambda dialog: (self.complaints.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        self.url = url
        self.page.goto(url)

    def restart(self) -> None:
        """Opens the page anew, for a third of what another tab takes."""
        self.page.mouse.move(0, 0)
        self.page.goto("about:blank")
        self.complaints.clear()
        self.requests.clear()
        self.page.goto(self.url)

    def shot(self, name: str) -> None:
        """Keeps a screenshot as a build artefact."""
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=SCREENSHOTS / f"{name}.png")

    def open_sample(self, index: int) -> None:
        """Shows a sample by its address."""
        self.page.evaluate(f"location.hash = '#samples/{index}'")
        self.page.wait_for_selector(f".detail[data-index='{index}'] .tokens")

    def field(self, name: str) -> str:
        """A field of the strip that tells of the current token."""
        text: str = self.page.inner_text(f'#strip [data-field="{name}"]')
        return text
