"""The page in a real browser: from a file and served."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.inspect.browser import Visit
from tests.inspect.conftest import HOSTILE, Command
from tests.inspect.raw import RawSample
from tests.inspect.serving import Client, serving
from vlmdata.cli.main import app
from vlmdata.inspect.text import visible
from vlmdata.storage.open import open_dataset

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def served(demo: Path, browser: Any) -> Iterator[Client]:
    with serving(demo) as client:
        yield client


@pytest.fixture(scope="module")
def demo_file(demo: Path, tmp_path_factory: pytest.TempPathFactory, browser: Any) -> str:
    page = tmp_path_factory.mktemp("page") / "demo.html"
    app(["inspect", str(demo), "--html", str(page), "--cp", "2", "--capacity", "2048"], standalone_mode=False)
    return page.as_uri()


@pytest.fixture(scope="module", params=["file", "served"])
def tab(request: pytest.FixtureRequest, browser: Any) -> Iterator[Visit]:
    """A tab of the browser for the demo dataset's page, both ways."""
    url = request.getfixturevalue("demo_file") if request.param == "file" else request.getfixturevalue("served").home
    found = Visit(browser, url)
    yield found
    found.page.close()


@pytest.fixture
def visit(tab: Visit) -> Iterator[Visit]:
    """The page, just opened."""
    tab.restart()
    yield tab
    assert tab.complaints == []


def spot(page: Any) -> list[float]:
    """The mark on the picture, in patches: x, y, width, height; empty while there is none."""
    value: list[float] = page.evaluate(
        "(() => { const s = document.querySelector('.spot'); return s.getAttribute('visibility') === 'visible'"
        " ? ['x', 'y', 'width', 'height'].map((n) => Number(s.getAttribute(n))) : []; })()"
    )
    return value


def test_every_view_opens_without_a_complaint(visit: Visit, request: pytest.FixtureRequest) -> None:
    page = visit.page
    name = "served" if page.url.startswith("http") else "file"
    assert page.inner_text(".tile b >> nth=0") == "8"
    visit.shot(f"overview-{name}")
    visit.open_sample(0)
    page.wait_for_function("() => document.querySelector('.picture img')?.naturalWidth > 0")
    visit.shot(f"sample-{name}")
    page.keyboard.press("t")
    assert page.locator("#token-table tbody tr").count() > 50
    page.keyboard.press("p")
    page.wait_for_selector(".pack")
    visit.shot(f"packs-{name}")
    if name == "file":
        assert [url for url in visit.requests if not url.startswith(("file:", "data:"))] == []
    else:
        assert [url for url in visit.requests if not url.startswith((visit.page.url.split("#")[0], "data:"))] == []


def test_a_token_marks_its_patch_and_a_patch_its_token(visit: Visit, demo_raw: list[RawSample]) -> None:
    page, raw = visit.page, demo_raw[3]
    _, high, wide = raw.grids[0].tolist()
    across = wide // 2
    start = int((raw.ids == raw.ids[4]).argmax())
    visit.open_sample(3)
    assert spot(page) == []

    page.keyboard.press("u")
    row, column = 2, 1
    number = row * across + column
    page.hover(f".cell[data-i='{start + number}']")
    assert spot(page) == [2 * column, 2 * row, 2, 2]
    assert visit.field("token") == f"{start + number}"
    assert visit.field("id") == str(raw.ids[start + number])
    assert visit.field("label").startswith("−100")
    assert visit.field("t h w") == " ".join(map(str, raw.positions[:, start + number].tolist()))

    row, column = high // 2 - 1, across - 1
    box = page.locator(".picture svg").bounding_box()
    x, y = (column + 0.5) / across * box["width"], (row + 0.5) / (high / 2) * box["height"]
    page.mouse.move(box["x"] + x, box["y"] + y)
    last = start + row * across + column
    assert visit.field("token") == f"{last:,}"
    assert page.get_attribute(".cell.current", "data-i") == str(last)
    assert f"{across * high // 2:,} of" in page.inner_text(".fold.current")
    visit.shot("patch-and-token")


def test_a_text_token_tells_id_label_mask_and_position(visit: Visit, demo_raw: list[RawSample]) -> None:
    page, raw = visit.page, demo_raw[1]
    visit.open_sample(1)
    first = int(raw.mask.argmax())
    page.hover(f".tok[data-i='{first}']")
    assert (visit.field("token"), visit.field("id")) == (f"{first:,}", str(raw.ids[first]))
    assert visit.field("label") == str(raw.ids[first + 1])
    assert visit.field("mask") == "1 (target)"
    assert "target" in (page.get_attribute(f".tok[data-i='{first}']", "class") or "")
    assert "target" not in (page.get_attribute(f".tok[data-i='{first - 1}']", "class") or "")
    assert page.locator(".tokens .tok.target").count() == int(raw.mask.sum())
    page.keyboard.press("ArrowRight")
    assert visit.field("token") == f"{first + 1:,}"
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    assert visit.field("mask") == "0"


def test_positions_are_plotted_as_stored(visit: Visit, demo_raw: list[RawSample]) -> None:
    page, raw = visit.page, demo_raw[2]
    visit.open_sample(2)
    for axis, name in enumerate("thw"):
        path = page.get_attribute(f".plot path.{name}", "d")
        points = [point.split(" ") for point in path.removeprefix("M").split("L")]
        assert [int(x) for x, _ in points] == list(range(raw.length))
        assert [-int(y) for _, y in points] == raw.positions[axis].tolist()
    page.click(".frames button >> nth=1")
    start = int((raw.ids == raw.ids[4]).argmax())
    assert (page.get_attribute(".plot svg", "viewBox") or "").startswith(f"{start} ")
    page.hover(".plot svg")
    assert len(spot(page)) == 4  # the middle of the image's frame is one of its tokens


def test_search_and_filters_select_the_same_both_ways(visit: Visit, demo_raw: list[RawSample]) -> None:
    page = visit.page
    page.keyboard.press("/")
    page.wait_for_selector("#search:focus")
    median = sorted(sample.length for sample in demo_raw)[4]
    cases = {
        f"length<{median}": [s.key for s in demo_raw if s.length < median],
        "row=5": ["000000005"],
        "00000000": [s.key for s in demo_raw],
        "target>=20% row<6": [s.key for s in demo_raw[:6] if s.mask.mean() >= 0.2],
        "DESCRIBE this": [s.key for s in demo_raw],
        "nothing of the kind": [],
    }
    for text, expected in cases.items():
        page.fill("#search", text)
        page.wait_for_function(
            "(n) => document.querySelectorAll('#items a').length === n && document.querySelector('#found').textContent"
            " === `${n} found`",
            arg=len(expected),
        )
        assert sorted(page.locator("#items .key").all_inner_texts()) == sorted(expected)
    page.fill("#search", "")
    page.select_option(".list select", "longest")
    longest = sorted(demo_raw, key=lambda s: (-s.length, s.key))
    page.wait_for_function(
        "(keys) => [...document.querySelectorAll('#items .key')].map((n) => n.textContent).join() === keys",
        arg=",".join(s.key for s in longest),
    )


def test_a_wrong_filter_is_reported_on_the_served_page(browser: Any, served: Client) -> None:
    visit = Visit(browser, f"{served.home}/#samples")
    visit.page.fill("#search", "is:odd")
    visit.page.wait_for_selector("#items .error")
    assert "is:truncated" in visit.page.inner_text("#items .error")
    visit.page.close()


def test_the_keyboard_reaches_everything(visit: Visit) -> None:
    page = visit.page
    page.keyboard.press("s")
    page.keyboard.press("j")
    page.wait_for_selector(".detail .tokens")
    first = page.inner_text(".detail h2 >> nth=0")
    page.keyboard.press("j")
    page.wait_for_function("(key) => document.querySelector('.detail h2').textContent !== key", arg=first)
    page.keyboard.press("k")
    page.wait_for_function("(key) => document.querySelector('.detail h2').textContent === key", arg=first)
    theme = page.get_attribute("html", "data-theme")
    page.keyboard.press("d")
    assert page.get_attribute("html", "data-theme") != theme
    page.keyboard.press("?")
    assert page.locator("#keys").is_visible()
    page.keyboard.press("Escape")
    assert not page.locator("#keys").is_visible()
    page.keyboard.press("g")
    assert "bare" in (page.get_attribute(".picture", "class") or "")


def test_packs_show_segments_and_ranks(visit: Visit) -> None:
    page = visit.page
    page.keyboard.press("p")
    page.wait_for_selector(".pack")
    bars = page.locator(".pack >> nth=0")
    rows = bars.locator("details table >> nth=0").locator("tbody tr").count()
    assert bars.locator(".seg").count() == rows
    ranks = {bars.locator(".cp").nth(i).get_attribute("data-rank") for i in range(bars.locator(".cp").count())}
    assert ranks == {"0", "1"}
    bars.locator("details a >> nth=0").click()
    page.wait_for_selector(".detail .tokens")


def test_a_pack_shows_its_empty_room(visit: Visit) -> None:
    page = visit.page
    page.keyboard.press("p")
    page.wait_for_selector(".pack")
    room = page.locator(".pack >> nth=0").locator(".room")
    text = page.inner_text(".pack >> nth=0")
    filled = float(room.get_attribute("x")) / 1000
    tokens, padding = re.search(r"([\d,]+) tokens \+ (\d+) padding", text).groups()  # type: ignore[union-attr]
    assert filled == pytest.approx((int(tokens.replace(",", "")) + int(padding)) / 2048)
    assert filled + float(room.get_attribute("width")) / 1000 == pytest.approx(1)


def test_the_list_shows_a_picture_and_the_first_words(visit: Visit, demo_raw: list[RawSample]) -> None:
    page = visit.page
    page.keyboard.press("s")
    page.wait_for_function("(n) => document.querySelectorAll('#items .thumb').length === n", arg=len(demo_raw))
    page.wait_for_function(
        "() => [...document.querySelectorAll('#items .thumb')].every((i) => i.naturalWidth > 20 && i.naturalWidth < 97)"
    )
    words = page.locator("#items .words").all_inner_texts()
    assert all(text.startswith(("<s_", "{")) for text in words), words
    visit.shot(f"list-{'served' if page.url.startswith('http') else 'file'}")


def test_more_is_promised_where_not_all_was_looked_at(mixed: Path, browser: Any) -> None:
    with serving(mixed) as client:
        visit = Visit(browser, f"{client.home}/#overview")
        held: list[Any] = []  # the first page of the list says that there is more; then nothing answers
        first = {"rows": [], "searched": 1, "candidates": 9, "done": False}
        visit.page.route("**/api/samples?*", lambda route: held.append(route) if held else _answer(held, route, first))
        visit.page.evaluate("location.hash = '#samples'")
        visit.page.wait_for_function("() => document.querySelector('#items .more').textContent === 'scroll for more'")
        visit.page.close()


def _answer(held: list[Any], route: Any, body: object) -> None:
    held.append(route)
    route.fulfill(json=body)


def test_rejected_rows_stand_beside_a_clean_bill(mixed: Path, browser: Any) -> None:
    with serving(mixed) as client:
        visit = Visit(browser, client.home)
        panel = visit.page.locator(".panel", has_text="Nothing suspicious in the samples")
        assert "rejected" in panel.locator(".rejects").inner_text()
        panel.locator("button").click()
        visit.page.wait_for_function(
            "() => document.querySelector('#rejects').getBoundingClientRect().top < innerHeight"
        )
        visit.shot("overview-rejects")
        assert visit.complaints == []
        visit.page.close()


def test_notes_that_hold_for_most_samples_are_folded(browser: Any, documents: Path) -> None:
    with serving(documents) as client:
        visit = Visit(browser, client.home)
        notes = visit.page.locator("#overview details.notes")
        assert notes.get_attribute("open") is None
        assert "1 note" in notes.locator("summary").inner_text()
        assert notes.locator(".finding.note").count() == 1
        visit.open_sample(0)
        assert visit.page.locator(".detail details.notes .finding").count() == 1
        visit.page.close()


def test_on_a_phone_text_comes_before_a_tall_picture(browser: Any, served: Client, demo_raw: list[RawSample]) -> None:
    visit = Visit(browser, served.home, viewport={"width": 360, "height": 740})
    for i, raw in enumerate(demo_raw):
        visit.open_sample(i)
        tops = [
            visit.page.locator(chosen).bounding_box()["y"]
            for chosen in (".detail .tokens", ".detail .picture >> nth=0")
        ]
        _, high, wide = raw.grids[0].tolist()
        assert (tops[0] < tops[1]) == (high > wide), (i, tops)
    visit.page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_schemes_can_be_read_and_a_narrow_window_shows_all(browser: Any, served: Client, scheme: str) -> None:
    visit = Visit(browser, served.home, color_scheme=scheme, viewport={"width": 360, "height": 740})
    page = visit.page
    assert page.get_attribute("html", "data-theme") == scheme
    for fragment in ("overview", "samples", "samples/2", "versions", "mixture", "packs"):
        page.evaluate(f"location.hash = '#{fragment}'")
        page.wait_for_function("() => document.querySelector('.view:not([hidden])').textContent.length > 100")
        assert page.evaluate("document.documentElement.scrollWidth") <= 360, fragment
    page.evaluate("location.hash = '#samples/2'")
    page.wait_for_selector(".detail .tokens")
    visit.shot(f"narrow-{scheme}")
    assert_text_can_be_read(page)
    assert visit.complaints == []
    page.close()


def assert_text_can_be_read(page: Any) -> None:
    """Contrast of at least 4.5 (WCAG AA) for tokens of every kind."""
    for chosen in (".tok.text", ".tok.target", ".tok.special", ".turn h3", ".fold", ".detail .soft", ".items .soft"):
        colours = page.evaluate(
            """(chosen) => {
                let node = document.querySelector(chosen);
                const ink = getComputedStyle(node).color;
                let paper = getComputedStyle(node).backgroundColor;
                const clear = () => /rgba\\(.*, 0\\)|transparent/.test(paper);
                while (clear()) {
                    node = node.parentElement;
                    paper = getComputedStyle(node).backgroundColor;
                }
                return [ink, paper].map((c) => c.match(/\\d+/g).slice(0, 3).map(Number));
            }""",
            chosen,
        )
        assert contrast(*colours) >= 4.5, (chosen, colours)


def contrast(one: list[int], other: list[int]) -> float:
    """Contrast of two sRGB colours. Source: WCAG 2.2, relative luminance."""

    def luminance(colour: list[int]) -> float:
        parts = [c / 255 for c in colour]
        red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("way", ["file", "served"])
def test_hostile_text_stays_text(hostile: Path, tmp_path: Path, command: Command, browser: Any, way: str) -> None:
    dataset = open_dataset(hostile)
    if way == "file":
        assert command(hostile, "--html", tmp_path / "page.html")[0] == 0
        look(browser, (tmp_path / "page.html").as_uri(), len(dataset))
    else:
        with serving(hostile) as client:
            look(browser, client.home, len(dataset))


def look(browser: Any, url: str, samples: int) -> None:
    """Looks at everything in a hostile page: nothing runs, nothing is asked for, the text is there."""
    visit = Visit(browser, url)
    page = visit.page
    page.keyboard.press("p")
    page.wait_for_selector(".pack")
    allowed = page.evaluate("document.querySelectorAll('script').length")
    for i in range(samples):
        visit.open_sample(i)
        page.keyboard.press("t")
        answer = "".join(page.locator(".turn.assistant .tok.target").all_text_contents())
        plain = visible(HOSTILE[i].strip())
        if plain.isascii():
            assert plain in answer
        page.hover(".tokens .tok.target >> nth=0")
    assert page.evaluate("window.pwned") is None
    assert page.evaluate("document.querySelectorAll('script').length") == allowed
    assert (
        page.evaluate("document.querySelectorAll('#main img:not(.picture img, .thumb), iframe, object, embed').length")
        == 0
    )
    assert not [link for link in page.locator("a").all() if not (link.get_attribute("href") or "").startswith("#")]
    assert [u for u in visit.requests if not u.startswith((url.split("#")[0], "data:"))] == []
    assert visit.complaints == []
    page.close()


def test_nothing_is_parsed_before_it_is_looked_at(visit: Visit) -> None:
    """So opening does not depend on the number of samples."""
    visit.page.wait_for_selector(".tile")
    assert visit.page.locator(".tok, .picture img").count() == 0
    assert not [url for url in visit.requests if "/api/" in url]
    visit.open_sample(1)
    assert visit.page.locator(".detail .tok").count() > 20
