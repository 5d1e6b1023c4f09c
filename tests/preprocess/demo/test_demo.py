"""The demo: the same on every run, sums that hold, ground truth and answers equal to what is drawn."""

import hashlib
import io
import json
import os
import subprocess
import sys
import threading
from collections import Counter
from functools import cache
from itertools import combinations, pairwise
from pathlib import Path
from random import Random

import numpy as np
import PIL
import pytest
from PIL import Image, ImageOps

from vlmdata.preprocess.demo import DEMO_VERSION, ensure_demo_dataset
from vlmdata.preprocess.demo.chat import KINDS as CHAT_KINDS
from vlmdata.preprocess.demo.chat import demo_conversation
from vlmdata.preprocess.demo.compose import LOCALES, Receipt, gt_parse, locale_named
from vlmdata.preprocess.demo.photo import KINDS, MAX_SIZE, encode, shoot
from vlmdata.preprocess.demo.row import DemoReceipt, demo_content, demo_page, demo_receipt

BLOCK = 32  # every kind of image is dealt within so many rows


@cache
def drawn_block() -> list[DemoReceipt]:
    return [demo_receipt(row) for row in range(BLOCK)]


def opened(receipt: DemoReceipt) -> Image.Image:
    return Image.open(io.BytesIO(receipt.file.data))


def as_grey(image: Image.Image) -> np.ndarray:
    if image.mode == "I;16":
        return np.asarray(image) >> 8
    flat = Image.new("RGBA", image.size, "white")
    flat.alpha_composite(image.convert("RGBA"))
    return np.asarray(flat.convert("L"))


def leaves(parse: object) -> list[str]:
    """Every string in a ground truth."""
    if isinstance(parse, str):
        return [parse]
    inner = parse.values() if isinstance(parse, dict) else parse
    assert not isinstance(inner, (int, float)), "values are strings"
    return [leaf for entry in inner for leaf in leaves(entry)]


def as_list(value: object) -> list:
    return value if isinstance(value, list) else [value]


def amount(text: str) -> int:
    """Minor units of a printed amount: its digits, because every style prints all decimals."""
    digits = int("".join(ch for ch in text if ch.isdigit()))
    return -digits if "-" in text or "(" in text else digits


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


# --- the same on every run ---


def test_row_is_the_same_alone_and_in_sequence() -> None:
    in_sequence = [sha(drawn_block()[row].file.data) for row in (0, 3, 7)]
    program = (
        "import hashlib; from vlmdata.preprocess.demo.row import demo_receipt\n"
        "for row in (7, 3, 0): print(hashlib.sha256(demo_receipt(row).file.data).hexdigest())"
    )
    # Another process with another hash seed: nothing may depend on the order of a set or on warm caches.
    environment = os.environ | {"PYTHONHASHSEED": "12345"}
    alone = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert alone.stdout.split() == in_sequence[::-1]


def test_rows_differ() -> None:
    assert len({receipt.file.data for receipt in drawn_block()}) == BLOCK


def test_version_is_raised_when_the_texts_change() -> None:
    # If this fails, raise DEMO_VERSION and pin the new digest: cached datasets are named by the version.
    said = [gt_parse(demo_content(row)) for row in range(64)]
    looks = [repr(demo_page(row)[2]) for row in range(16)]
    talks = [demo_conversation(row) for row in range(32)]
    digest = sha(json.dumps([said, looks, talks]).encode())
    assert (DEMO_VERSION, digest[:16]) == (3, "508ddaf5d55d08ec")


@pytest.mark.skipif(
    PIL.__version__ != "13.0.0", reason="pinned with Pillow 13.0.0: another FreeType may draw otherwise"
)
def test_version_is_raised_when_the_print_changes() -> None:
    digest = sha(b"".join(demo_page(row)[0].print().tobytes() for row in range(12)))
    assert (DEMO_VERSION, digest[:16]) == (3, "00feaadd41703efa")


# --- content ---


def check_sums(receipt: Receipt) -> set[str]:
    """Asserts that the printed amounts add up; returns the keys seen."""
    parse = gt_parse(receipt)
    lines = 0
    for item in as_list(parse["menu"]):
        lines += amount(item["price"]) + amount(item.get("discountprice", "0"))
        lines += sum(amount(sub.get("price", "0")) for sub in as_list(item.get("sub", [])))
        if "unitprice" in item:
            assert amount(item["cnt"]) * amount(item["unitprice"]) == amount(item["price"])
    sub, total = parse.get("sub_total", {}), parse["total"]
    assert amount(sub.get("subtotal_price", str(lines))) == lines
    rated = {figure.key: figure.label.split()[-1] for figure in receipt.figures if "%" in figure.label}
    rates = {key: float(rate[:-1].replace(",", ".")) / 100 for key, rate in rated.items()}
    base = lines + amount(sub.get("discount_price", "0"))
    if "service_price" in sub:
        assert amount(sub["service_price"]) == pytest.approx(base * rates["service_price"], abs=0.51)
        base += amount(sub["service_price"])
    keys = [figure.key for figure in receipt.figures]
    if "tax_price" in sub:
        rate = rates["tax_price"]
        included = keys.index("tax_price") > keys.index("total_price")
        assert amount(sub["tax_price"]) == pytest.approx(base * rate / (1 + rate * included), abs=0.51)
        base += 0 if included else amount(sub["tax_price"])
    base += amount(sub.get("etc", "0"))
    assert amount(total["total_price"]) == receipt.total == base
    assert amount(total.get("creditcardprice", str(base))) == base
    if "cashprice" in total:
        assert amount(total["cashprice"]) - amount(total["changeprice"]) == base
    if "menuqty_cnt" in total:
        assert int(total["menuqty_cnt"]) == sum(item.quantity for item in receipt.items)
    return {*keys, *(key for item in as_list(parse["menu"]) for key in item)}


@pytest.mark.parametrize("first", [0, 200])
def test_money_adds_up(first: int) -> None:
    receipts = [demo_content(row) for row in range(first, first + 200)]
    seen = set().union(*map(check_sums, receipts))
    items = {"nm", "num", "unitprice", "cnt", "discountprice", "price", "sub"}
    charges = {"subtotal_price", "discount_price", "service_price", "tax_price", "etc"}
    paid = {"total_price", "cashprice", "changeprice", "creditcardprice", "menuqty_cnt"}
    assert seen == items | charges | paid
    assert {receipt.locale for receipt in receipts} == set(LOCALES)
    assert {1, 26} <= {len(receipt.items) for receipt in receipts}
    assert all(repr(locale_named(code)).isascii() for code in LOCALES), "the fonts have no other letters"


# --- drawing ---


def test_ground_truth_is_what_is_drawn() -> None:
    for row, receipt in enumerate(drawn_block()):
        truth = json.loads(receipt.ground_truth)
        for parse in truth.get("gt_parses") or [truth["gt_parse"]]:
            missing = Counter(leaves(parse)) - Counter(receipt.texts)
            assert not missing, (row, missing)
    assert sum("gt_parses" in receipt.ground_truth for receipt in drawn_block()) == 2


def test_text_is_printed_apart_and_on_the_paper() -> None:
    wrapped = 0
    for row in range(100):
        page, em, look = demo_page(row)
        assert em >= 13
        margin = round(page.width * look.margin)
        runs = [(x, y, x + face.width(text), y + face.height) for x, y, text, face in page.runs]
        boxes = runs + [(x, y, x + mask.width, y + mask.height) for x, y, mask in page.pictures]
        for x0, y0, x1, y1 in boxes:
            assert margin <= x0 < x1 <= page.width - margin, row
            assert margin <= y0 < y1 <= page.height - margin, row
        for a, b in combinations(boxes, 2):
            assert not (a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]), (row, a, b)
        # What was placed in pieces is there as a whole: the words of all runs are those of the texts and the marks.
        words = Counter(word for _, _, text, _ in page.runs for word in text.split())
        assert not Counter(word for text in page.texts for word in text.split()) - words
        wrapped += any(text not in {run[2] for run in page.runs} for text in page.texts)
        if row < 8:
            ink = np.asarray(page.print())
            assert all(ink[y0:y1, x0:x1].min() < 128 for x0, y0, x1, y1 in boxes)
    assert wrapped > 10, "long names wrap"


def test_modes_formats_and_sizes() -> None:
    assert Counter(receipt.kind for receipt in drawn_block()) == KINDS
    aspects = []
    for receipt in drawn_block():
        image = opened(receipt)
        upright = ImageOps.exif_transpose(image).size
        size = json.loads(receipt.ground_truth)["meta"]["image_size"]
        assert (size["width"], size["height"]) == upright == receipt.file.upright
        assert (image.getexif().get(0x0112, 1) != 1) == (receipt.kind == "jpeg_exif")
        assert 200 <= min(upright) <= max(upright) <= max(MAX_SIZE)
        aspects.append(upright[1] / upright[0])
        # Somewhere dark and somewhere bright, whatever the mode: the print is not lost.
        dark, bright = np.quantile(as_grey(image), (0.005, 0.9))
        assert bright - dark > 80, receipt.kind
        if receipt.kind == "png_ink":
            assert np.asarray(image.convert("RGB")).max() < 128, "without alpha, dark on dark"
    images = [opened(receipt) for receipt in drawn_block()]
    assert {image.mode for image in images} == {"RGB", "L", "P", "1", "RGBA", "CMYK", "I;16"}
    assert {image.format for image in images} == {"JPEG", "PNG", "WEBP"}
    assert max(aspects) > 3
    assert min(aspects) < 0.8


def test_exif_rotation_undoes_the_turn() -> None:
    paper = Image.new("L", (400, 600), 255)
    paper.paste(0, (0, 0, 200, 150))
    for seed in range(8):
        file = encode(paper, 30, (20, 20, 20), "jpeg_exif", Random(seed), np.random.default_rng(0))
        seen = ImageOps.exif_transpose(Image.open(io.BytesIO(file.data)))
        assert file.upright == seen.size
        left, right, below = (seen.convert("L").resize((8, 8)).getpixel(at) for at in ((2, 1), (5, 1), (2, 6)))
        assert left < min(right, below) - 40


@pytest.mark.parametrize("camera", ["photo", "cut_out", "scan"])
def test_whole_paper_is_in_the_picture(camera: str) -> None:
    for seed in range(6):
        width, height = Random(seed).randrange(350, 1950), Random(-seed).randrange(350, 2800)
        paper = Image.new("L", (width, height), 255)
        shot = shoot(paper, 30, (20, 20, 20), camera, Random(seed), np.random.default_rng(seed))
        alpha = np.asarray(shot.alpha, np.float64) / 255
        room = max(shot.alpha.width / MAX_SIZE[0], shot.alpha.height / MAX_SIZE[1])
        assert room <= 1
        # What is cut off would be missing here; skewed paper looks smaller by some percent.
        assert room > 0.99 or alpha.sum() == pytest.approx(width * height, rel=0.07)


@pytest.mark.parametrize("camera", ["photo", "cut_out", "scan", "crisp"])
def test_paper_above_the_largest_size_is_made_smaller(camera: str) -> None:
    paper = Image.new("L", (400, 3300), 255)
    for y in (40, 3160):
        paper.paste(0, (0, y, 400, y + 100))
    for seed in range(3):
        shot = shoot(paper, 30, (20, 20, 20), camera, Random(seed), np.random.default_rng(seed))
        assert shot.alpha.height <= MAX_SIZE[1]
        rows = np.asarray(shot.brightness, np.float64)[:, shot.alpha.width // 2]
        assert rows[:250].min() < 130
        assert rows[-250:].min() < 130


# --- chat ---


def test_chat_rows_are_well_formed() -> None:
    talks = [demo_conversation(row) for row in range(64)]
    counts, thinking = Counter(), 0
    for messages, shown in talks:
        roles = [message["role"] for message in messages]
        roles = roles[1:] if roles[0] == "system" else roles
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        parts = [(message["role"], part) for message in messages for part in message["content"]]
        images = [(role, part) for role, part in parts if part["type"] == "image"]
        assert all(role == "user" and part["text"] is None for role, part in images)
        assert all(part["text"] for _, part in parts if part["type"] == "text")
        assert len(images) == len(shown)
        counts[len(shown)] += 1
        reasoned = {message["role"] for message in messages if message["reasoning_content"]}
        assert reasoned <= {"assistant"}
        thinking += bool(reasoned)
    assert counts == {0: 8, 1: 40, 2: 16}
    assert thinking == 4 * CHAT_KINDS["thinking"]
    every = [number for _, shown in talks for number in shown]
    assert len(every) == len(set(every)), "no receipt is in two conversations"


def truth_about(question: str, receipts: list[Receipt]) -> str | None:
    """The answer as the ground truth has it, or None for other questions."""
    parse = gt_parse(receipts[0])
    menu, totals = as_list(parse["menu"]), [gt_parse(receipt)["total"]["total_price"] for receipt in receipts]
    if question.startswith("What is the price of the line"):
        return next(item["price"] for item in menu if item["nm"] == question.split('"')[1])
    if question == "Which of the two receipts has the higher total?":
        which, low, high = ["first", "second"], *sorted(totals, key=amount)
        return f"The {which[totals.index(high)]}: {high} against {low}."
    return {
        "What is the total?": totals[0],
        "How many different items are on this receipt?": str(len(menu)),
        "How much change was given?": parse["total"].get("changeprice"),
        "Transcribe the whole receipt as JSON.": json.dumps(parse),
        "What are the two totals?": f"First: {totals[0]}. Second: {totals[-1]}.",
    }.get(question)


def test_chat_answers_are_true() -> None:
    asked: Counter[str] = Counter()
    for row in range(400):
        messages, shown = demo_conversation(row)
        receipts = [demo_content(number) for number in shown]
        for user, assistant in pairwise(messages):
            question = [part["text"] for part in user["content"] if part["text"]][-1]
            truth = truth_about(question, receipts) if shown and user["role"] == "user" else None
            if truth is not None:
                assert [part["text"] for part in assistant["content"]] == [truth], (row, question)
                asked[question.split('"')[0]] += 1
    assert len(asked) == 7
    assert min(asked.values()) >= 3, asked


# --- datasets ---


@pytest.mark.parametrize("layout", ["cord_v2", "chat"])
def test_datasets_are_byte_identical_and_read(layout: str, tmp_path: Path) -> None:
    from datasets import Features, List, Value, load_dataset
    from datasets import Image as ImageFeature

    seen: list[int] = []
    first, second = (
        ensure_demo_dataset(layout, 5, cache_dir=tmp_path / name, progress=seen.append) for name in ("a", "b")
    )
    files = [path for path in first.rglob("*") if path.is_file()]
    assert [str(path.relative_to(first)) for path in files] == ["data/train-00000-of-00001.parquet"]
    assert files[0].read_bytes() == (second / "data/train-00000-of-00001.parquet").read_bytes()
    assert seen == [1, 2, 3, 4, 5] * 2
    data = load_dataset("parquet", data_files=str(files[0]), cache_dir=str(tmp_path), split="train")
    if layout == "cord_v2":
        assert data.features == Features({"image": ImageFeature(), "ground_truth": Value("string")})
        assert data[3]["ground_truth"] == drawn_block()[3].ground_truth
        assert np.array_equal(data[3]["image"], ImageOps.exif_transpose(opened(drawn_block()[3])))
    else:
        assert data.features["images"] == List(ImageFeature())
        for row, stored in enumerate(data):
            messages, shown = demo_conversation(row)
            assert stored["messages"] == messages
            assert len(stored["images"]) == len(shown)


def test_cache_is_drawn_once_by_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLMDATA_CACHE", str(tmp_path))
    stale = tmp_path / "demo" / f".v{DEMO_VERSION}-cord_v2-2.partial" / "data"
    stale.mkdir(parents=True)
    (stale / "junk").write_text("left by a killed process")
    drawn: list[int] = []
    found: list[Path] = []

    def ask() -> None:
        found.append(ensure_demo_dataset("cord_v2", rows=2, progress=drawn.append))

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert drawn == [1, 2]
    assert found == [tmp_path / "demo" / f"v{DEMO_VERSION}-cord_v2-2"] * 3
    assert not (found[0] / "data" / "junk").exists()


def test_interrupted_drawing_leaves_no_dataset(tmp_path: Path) -> None:
    def interrupt(done: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ensure_demo_dataset("cord_v2", rows=1, cache_dir=tmp_path, progress=interrupt)
    assert not list((tmp_path / "demo").glob("v*"))
    path = ensure_demo_dataset("cord_v2", rows=1, cache_dir=tmp_path)
    assert (path / "data/train-00000-of-00001.parquet").is_file()


def test_bad_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="row must be 0 or more, got -1"):
        demo_receipt(-1)
    with pytest.raises(ValueError, match="1 row or more, got 0"):
        ensure_demo_dataset("cord_v2", rows=0, cache_dir=tmp_path)
    with pytest.raises(ValueError, match="unknown demo layout 'donut'; known: cord_v2, chat"):
        ensure_demo_dataset("donut", rows=1, cache_dir=tmp_path)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())
