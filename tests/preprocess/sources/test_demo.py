import dataclasses
import hashlib
import io
import json
import os
import subprocess
import sys
import threading
from collections import Counter
from functools import cache
from itertools import combinations
from pathlib import Path
from random import Random

import numpy as np
import PIL
import pyarrow.parquet as pq
import pytest
from PIL import Image, ImageOps

from preprocess.sources.demo import (
    DEMO_VERSION,
    DemoReceipt,
    demo_content,
    demo_conversation,
    demo_receipt,
    ensure_demo_dataset,
    glyphs,
    write_demo_dataset,
)
from preprocess.sources.demo import chat as chat_module
from preprocess.sources.demo import encode as encode_module
from preprocess.sources.demo import receipt as receipt_module
from preprocess.sources.demo.compose import LOCALES
from preprocess.sources.demo.content import Receipt, figures, gt_parse
from preprocess.sources.demo.draw import Drawing, draw_receipt
from preprocess.sources.demo.geometry import MAX_SIZE, Pose, flat_pose, tilted_pose
from preprocess.sources.demo.layout import lay_out
from preprocess.sources.demo.look import SHAPES, Look, choose_look

BLOCK = 32  # every kind of image is dealt within this many rows


@cache
def drawn_block() -> list[DemoReceipt]:
    return [demo_receipt(row) for row in range(BLOCK)]


def look_of(row: int, seed: int = 0) -> Look:
    shape = receipt_module.deal("shapes", SHAPES, row, seed)
    return choose_look(receipt_module.stream("look", row, seed), shape)


def drawing_of(row: int) -> Drawing:
    return draw_receipt(demo_content(row), look_of(row), row)


def opened(receipt: DemoReceipt) -> Image.Image:
    return Image.open(io.BytesIO(receipt.image_bytes))


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
    """Minor units of a printed amount: its digits, as every style prints all decimals."""
    digits = int("".join(ch for ch in text if ch.isdigit()))
    return -digits if "-" in text or "(" in text else digits


def rate(label: str) -> float:
    """The percentage at the end of a label, as a fraction."""
    return float(label.split()[-1].rstrip("%").replace(",", ".")) / 100


# --- determinism ---


def test_row_is_the_same_alone_and_in_sequence() -> None:
    in_sequence = [hashlib.sha256(drawn_block()[row].image_bytes).hexdigest() for row in (0, 3, 7)]
    program = (
        "import hashlib; from preprocess.sources.demo.receipt import demo_receipt\n"
        "for row in (7, 3, 0): print(hashlib.sha256(demo_receipt(row).image_bytes).hexdigest())"
    )
    # Another process with another hash seed: nothing may hang on the order of a set or on warm caches.
    environment = os.environ | {"PYTHONHASHSEED": "12345"}
    alone = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert alone.stdout.split() == in_sequence[::-1]


def test_rows_and_seeds_differ() -> None:
    images = {receipt.image_bytes for receipt in drawn_block()} | {demo_receipt(4, seed=1).image_bytes}
    assert len(images) == BLOCK + 1


def test_version_is_raised_when_the_demo_changes() -> None:
    # Text, layout choices and conversations of some rows. If this fails, raise DEMO_VERSION and pin the new digest:
    # cached datasets are named by the version.
    said = [gt_parse(demo_content(row)) for row in range(64)]
    looks = [repr(look_of(row)) for row in range(64)]
    talks = [repr(demo_conversation(row)) for row in range(32)]
    digest = hashlib.sha256(json.dumps([said, looks, talks]).encode()).hexdigest()
    assert (DEMO_VERSION, digest[:16]) == (1, "2e9998b7023c58f3")


@pytest.mark.skipif(
    PIL.__version__ != "13.0.0", reason="pinned with Pillow 13.0.0: another FreeType may draw otherwise"
)
def test_version_is_raised_when_the_print_changes() -> None:
    digest = hashlib.sha256(b"".join(drawing_of(row).coverage.tobytes() for row in range(12))).hexdigest()
    assert (DEMO_VERSION, digest[:16]) == (1, "fd1b62fad121725c")


# --- content ---


@pytest.mark.parametrize("seed", [0, 1])
def test_money_adds_up(seed: int) -> None:
    checked: Counter[str] = Counter()
    for row in range(100):
        receipt = demo_content(row, seed)
        parse = gt_parse(receipt)
        lines = 0
        for item in as_list(parse["menu"]):
            lines += amount(item["price"]) + amount(item.get("discountprice", "0"))
            lines += sum(amount(sub.get("price", "0")) for sub in as_list(item.get("sub", [])))
            if "cnt" in item and "unitprice" in item:
                assert amount(item["cnt"]) * amount(item["unitprice"]) == amount(item["price"])
                checked["unit"] += 1
        sub, total = parse.get("sub_total", {}), parse["total"]
        if "subtotal_price" in sub:
            assert amount(sub["subtotal_price"]) == lines
            checked["subtotal"] += 1
        added = ["discount_price", "service_price", "etc"] + ([] if receipt.tax_included else ["tax_price"])
        paid = lines + sum(amount(sub.get(key, "0")) for key in added)
        assert amount(total["total_price"]) == paid
        if "cashprice" in total:
            assert amount(total["cashprice"]) - amount(total["changeprice"]) == paid
            checked["change"] += 1
        if "creditcardprice" in total:
            assert amount(total["creditcardprice"]) == paid
        if "menuqty_cnt" in total and receipt.printing.show_counts:
            assert int(total["menuqty_cnt"]) == sum(amount(item["cnt"]) for item in as_list(parse["menu"]))
            checked["quantity"] += 1
        checked.update(key for key in (*added, "tax_price") if key in sub)
        labels = {figure.key: figure.label for figure in figures(receipt)}
        if "service_price" in sub:
            base = lines + amount(sub.get("discount_price", "0"))
            assert amount(sub["service_price"]) == pytest.approx(base * rate(labels["service_price"]), abs=0.51)
        if "tax_price" in sub:
            share = rate(labels["tax_price"])
            base = lines + sum(amount(sub.get(key, "0")) for key in ("discount_price", "service_price"))
            tax = base * share / (1 + share) if receipt.tax_included else base * share
            assert amount(sub["tax_price"]) == pytest.approx(tax, abs=0.51)
    assert not [key for key in ("unit", "subtotal", "change", "quantity") if checked[key] < 5], checked
    assert not [key for key in ("discount_price", "service_price", "tax_price", "etc") if not checked[key]], checked


def test_content_varies() -> None:
    receipts = [demo_content(row) for row in range(200)]
    assert {receipt.locale for receipt in receipts} == set(LOCALES)
    counts = [len(receipt.items) for receipt in receipts]
    assert min(counts) == 1
    assert max(counts) == 30
    assert {receipt.payment for receipt in receipts} == {"cash", "card", "none"}
    keys = {key for receipt in receipts for item in as_list(gt_parse(receipt)["menu"]) for key in item}
    assert keys == {"nm", "num", "unitprice", "cnt", "discountprice", "price", "sub"}
    assert any(isinstance(gt_parse(receipt)["menu"], dict) for receipt in receipts)


def test_every_word_can_be_drawn() -> None:
    def words(value: object) -> list[str]:
        if isinstance(value, str):
            return [value, value.upper()]
        if dataclasses.is_dataclass(value):
            return words([getattr(value, field.name) for field in dataclasses.fields(value)])
        return [word for part in value for word in words(part)] if isinstance(value, (list, tuple)) else []

    letters = {ch for locale in LOCALES.values() for word in words(locale) for ch in word}
    assert "é" in letters
    assert "€" in letters
    assert not [ch for ch in letters if not glyphs.drawable(ch)]
    specs = [glyphs.FaceSpec("sans", 24), glyphs.FaceSpec("dots", 24)]
    for spec in specs:
        inks = {}
        for ch in sorted(letters - {" "}):
            canvas = np.zeros((60, 60), np.uint8)
            glyphs.face(spec).draw(canvas, 15, 10, ch)
            assert canvas.max() > 128, ch
            inks[ch] = canvas.tobytes()
        # An accent or sign that came out as the bare letter would be a second one of the same look.
        assert len(set(inks.values())) == len(inks)


def test_undrawable_character_is_refused() -> None:
    with pytest.raises(ValueError, match=r"U\+5186"):
        glyphs.face(glyphs.FaceSpec("sans", 20)).length("円")


# --- drawing ---


def test_ground_truth_is_what_is_drawn() -> None:
    for receipt in drawn_block():
        truth = json.loads(receipt.ground_truth)
        drawn = Counter(receipt.texts)
        for parse in truth.get("gt_parses") or [truth["gt_parse"]]:
            missing = Counter(leaves(parse)) - drawn
            assert not missing, (receipt.row, missing)
        assert truth["gt_parse" if "gt_parse" in truth else "gt_parses"]


def test_layout_keeps_text_apart_and_on_the_paper() -> None:
    wrapped = 0
    for row in range(120):
        look = look_of(row)
        page = lay_out(demo_content(row), look, row)
        margin = round(page.width * look.margin)
        boxes = [run.box for run in page.runs()] + [picture.box for picture in page.pictures]
        for x0, y0, x1, y1 in boxes:
            assert margin <= x0 < x1 <= page.width - margin, row
            assert margin <= y0 < y1 <= page.height - margin, row
        boxes.sort(key=lambda box: box[1])
        for a, b in combinations(boxes, 2):
            assert not (a[0] < b[2] and b[0] < a[2] and b[1] < a[3]), (row, a, b)
        wrapped += any(len(field.runs) > 1 for field in page.fields)
    assert wrapped > 10, "long names wrap"


def test_runs_leave_ink() -> None:
    for row in range(8):
        drawing = drawing_of(row)
        for run in drawing.page.runs():
            x0, y0, x1, y1 = run.box
            assert drawing.coverage[y0:y1, x0:x1].max() >= 128, (row, run)
        assert (drawing.coverage == 0).mean() > 0.5


def test_modes_formats_and_sizes() -> None:
    block = drawn_block()
    assert Counter(receipt.kind for receipt in block) == encode_module.KINDS
    for receipt in block:
        image = opened(receipt)
        declared = (receipt.image_format, (receipt.width, receipt.height), receipt.mode)
        assert (image.format, image.size, image.mode) == declared
        assert image.getexif().get(0x0112, 1) == receipt.orientation
        upright = ImageOps.exif_transpose(image).size
        size = json.loads(receipt.ground_truth)["meta"]["image_size"]
        assert (size["width"], size["height"]) == upright
        assert min(upright) >= 200
        assert upright[0] <= MAX_SIZE[0]
        assert upright[1] <= MAX_SIZE[1]
        # Somewhere dark and somewhere bright, whatever the mode: the print is not lost.
        levels = np.asarray(as_gray(image), np.float64)
        dark, bright = np.quantile(levels, 0.005), np.quantile(levels, 0.9)
        assert bright - dark > 80, (receipt.row, receipt.kind)
    assert {receipt.mode for receipt in block} == {"RGB", "L", "P", "1", "RGBA", "CMYK", "I;16"}
    assert {receipt.image_format for receipt in block} == {"JPEG", "PNG", "WEBP"}
    aspects = [receipt.height / receipt.width for receipt in block if receipt.orientation == 1]
    assert max(aspects) > 3
    assert min(aspects) < 0.8
    assert sum("gt_parses" in receipt.ground_truth for receipt in block) == 2


def as_gray(image: Image.Image) -> Image.Image:
    if image.mode == "I;16":
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode == "RGBA":
        flat = Image.new("RGBA", image.size, "white")
        flat.alpha_composite(image)
        image = flat
    return image.convert("RGB").convert("L")


def test_black_and_white_keeps_small_print() -> None:
    for row in (14, 40, 98, 126):
        drawing = drawing_of(row)
        assert drawing.em <= 16
        encoded = encode_module.encode(drawing, "png_bilevel", Random(row), np.random.default_rng(row))
        dark = (~np.asarray(Image.open(io.BytesIO(encoded.data)))).sum()
        assert 0.8 < dark / (drawing.coverage > 100).sum() < 1.25, row


@pytest.mark.parametrize("orientation", range(2, 9))
def test_exif_rotation_undoes_the_turn(orientation: int) -> None:
    upright = Image.new("RGB", (96, 64), "white")
    upright.paste("black", (0, 0, 40, 16))
    encoded = encode_module._save_turned(upright, orientation, quality=95)
    stored = Image.open(io.BytesIO(encoded.data))
    assert (stored.size != upright.size) == (orientation >= 5)
    seen = ImageOps.exif_transpose(stored)
    assert seen.size == upright.size
    assert np.abs(np.asarray(seen, int) - np.asarray(upright, int)).mean() < 3


def test_ink_on_nothing_needs_its_alpha() -> None:
    (row,) = [receipt.row for receipt in drawn_block() if receipt.kind == "png_ink"]
    image = opened(drawn_block()[row])
    assert np.asarray(image.convert("RGB").convert("L")).max() < 128, "without alpha, dark on dark"
    assert np.asarray(as_gray(image)).max() == 255


def test_whole_paper_is_in_the_picture() -> None:
    rng = Random(0)
    tilted = 0
    for _ in range(200):
        paper = (rng.randrange(350, 1950), rng.randrange(350, 2800))
        pose = tilted_pose(paper, rng, degrees=5.0, skew=0.012, margins=(0.0, 0.14))
        assert pose.size[0] <= MAX_SIZE[0]
        assert pose.size[1] <= MAX_SIZE[1]
        flat = flat_pose(paper).quad
        for corner, seen in zip(flat, pose.quad, strict=True):
            assert -1e-6 <= seen[0] <= pose.size[0] + 1e-6
            assert -1e-6 <= seen[1] <= pose.size[1] + 1e-6
            assert pose.to_picture(corner) == pytest.approx(seen, abs=1e-6)
        tilted += abs(pose.quad[0][1] - pose.quad[1][1]) > 5
    assert tilted > 100


def test_projection_puts_a_mark_where_the_pose_says() -> None:
    paper = Image.new("L", (200, 300), 255)
    paper.paste(0, (140, 40, 160, 60))
    pose = Pose(paper.size, ((30.0, 12.0), (250.0, 40.0), (235.0, 330.0), (14.0, 310.0)), (270, 340))
    seen = np.asarray(pose.project(paper, Image.Resampling.BILINEAR), np.float64)
    ys, xs = np.nonzero((seen < 128) & (np.asarray(pose.region([(0, 0), (200, 0), (200, 300), (0, 300)])) > 250))
    assert (xs.mean() + 0.5, ys.mean() + 0.5) == pytest.approx(pose.to_picture((150, 50)), abs=0.5)


# --- chat ---


def test_chat_rows_are_well_formed() -> None:
    talks = [demo_conversation(row) for row in range(64)]
    assert Counter(talk.kind for talk in talks) == {kind: 4 * n for kind, n in chat_module.KINDS.items()}
    for talk in talks:
        roles = [turn.role for turn in talk.turns]
        if roles[0] == "system":
            roles = roles[1:]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        messages = [turn.as_message() for turn in talk.turns]
        marks = [(m["role"], part) for m in messages for part in m["content"] if part["type"] == "image"]
        assert all(role == "user" and part["text"] is None for role, part in marks)
        assert len(marks) == len(talk.receipts)
        texts = [part["text"] for m in messages for part in m["content"] if part["type"] == "text"]
        assert all(texts)
        reasoned = [m for m in messages if m["reasoning_content"]]
        assert bool(reasoned) == (talk.kind == "thinking")
        assert all(m["role"] == "assistant" for m in reasoned)
    shown = [number for talk in talks for number in talk.receipts]
    assert len(shown) == len(set(shown)), "no receipt is in two conversations"
    assert {len(talk.receipts) for talk in talks} == {0, 1, 2}


def truth_about(question: str, receipt: Receipt) -> str | None:
    """The answer as the ground truth has it, or None for other questions."""
    parse = gt_parse(receipt)
    menu = as_list(parse["menu"])
    prices = {item["nm"]: item["price"] for item in menu}
    if question.startswith("What is the price of the line"):
        return prices[question.split('"')[1]]
    if question.startswith("How many different"):
        return str(len(menu))
    return {
        "What is the total?": parse["total"]["total_price"],
        "How much change was given?": parse["total"].get("changeprice"),
        "Transcribe the whole receipt as JSON.": json.dumps(parse, ensure_ascii=False),
    }.get(question)


def test_chat_answers_are_true() -> None:
    asked: Counter[str] = Counter()
    for row in range(96):
        talk = demo_conversation(row)
        if len(talk.receipts) != 1:
            continue
        receipt = demo_content(talk.receipts[0])
        turns = [turn for turn in talk.turns if turn.role != "system"]
        for user, assistant in zip(turns[::2], turns[1::2], strict=True):
            question = next(part for part in user.parts if part is not None)
            truth = truth_about(question, receipt)
            if truth is not None:
                assert assistant.parts == (truth,), (row, question)
                asked[question.split('"')[0]] += 1
    assert len(asked) == 5
    assert min(asked.values()) >= 3, asked


def test_higher_total_is_named() -> None:
    found = 0
    for row in range(300):
        talk = demo_conversation(row)
        for user, assistant in zip(talk.turns, talk.turns[1:], strict=False):
            if "Which of the two receipts has the higher total?" in user.parts:
                first, second = (demo_content(number) for number in talk.receipts)
                assert first.currency == second.currency
                answer = assistant.parts[0] or ""
                assert answer.startswith("The first:" if first.total > second.total else "The second:")
                found += 1
    assert found >= 3


# --- datasets ---


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("demo")
    return {
        "cord_v2": write_demo_dataset(root / "cord", "cord_v2", rows=5),
        "chat": write_demo_dataset(root / "chat", "chat", rows=5),
    }


@pytest.mark.parametrize("layout", ["cord_v2", "chat"])
def test_parquet_is_byte_identical(layout: str, written: dict[str, Path], tmp_path: Path) -> None:
    seen: list[int] = []
    again = write_demo_dataset(tmp_path, layout, rows=5, progress=seen.append)
    assert again.read_bytes() == written[layout].read_bytes()
    assert seen == [1, 2, 3, 4, 5]
    files = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert files == ["README.md", "data/train-00000-of-00001.parquet"]


def test_row_groups_are_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("preprocess.sources.demo.dataset._ROWS_PER_GROUP", 2)
    file = pq.ParquetFile(write_demo_dataset(tmp_path, "cord_v2", rows=3))
    assert [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)] == [2, 1]


def test_datasets_reads_both_layouts(written: dict[str, Path], tmp_path: Path) -> None:
    from datasets import Features, List, Value, load_dataset
    from datasets import Image as ImageFeature

    cord = load_dataset("parquet", data_files=str(written["cord_v2"]), cache_dir=str(tmp_path), split="train")
    assert cord.features == Features({"image": ImageFeature(), "ground_truth": Value("string")})
    assert cord[3]["ground_truth"] == drawn_block()[3].ground_truth
    expected = ImageOps.exif_transpose(opened(drawn_block()[3]))
    assert np.array_equal(np.asarray(cord[3]["image"]), np.asarray(expected))

    chat = load_dataset("parquet", data_files=str(written["chat"]), cache_dir=str(tmp_path), split="train")
    assert chat.features["images"] == List(ImageFeature())
    for row, stored in enumerate(chat):
        talk = demo_conversation(row)
        assert stored["messages"] == [turn.as_message() for turn in talk.turns]
        assert len(stored["images"]) == len(talk.receipts)


def test_cache_is_drawn_once_by_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLMDATA_CACHE", str(tmp_path))
    stale = tmp_path / "demo" / f".v{DEMO_VERSION}-cord_v2-2-seed0.partial" / "data"
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
    assert found == [tmp_path / "demo" / f"v{DEMO_VERSION}-cord_v2-2-seed0"] * 3
    assert pq.read_metadata(found[0] / "data/train-00000-of-00001.parquet").num_rows == 2
    assert not (found[0] / "data" / "junk").exists()


def test_interrupted_drawing_leaves_no_dataset(tmp_path: Path) -> None:
    def interrupt(done: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ensure_demo_dataset("cord_v2", rows=1, cache_dir=tmp_path, progress=interrupt)
    assert not list(tmp_path.rglob("*.parquet"))
    path = ensure_demo_dataset("cord_v2", rows=1, cache_dir=tmp_path)
    assert (path / "data/train-00000-of-00001.parquet").is_file()


def test_bad_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="row must be 0 or more, got -1"):
        demo_receipt(-1)
    with pytest.raises(ValueError, match="1 row or more, got 0"):
        write_demo_dataset(tmp_path, "cord_v2", rows=0)
    with pytest.raises(ValueError, match="unknown demo layout 'donut'; known: cord_v2, chat"):
        ensure_demo_dataset("donut", rows=1, cache_dir=tmp_path)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())
