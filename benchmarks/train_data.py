"""Made-up data for the trainer's benchmarks: texts of very different lengths, and chats with few, small images.

    python benchmarks/train_data.py texts --out T    # 700 chats of 20 to 5,000 words, without images
    python benchmarks/train_data.py chats --out C    # 500 chats, two in five with one or three small images
    python benchmarks/train_data.py documents --out D    # 12 documents of 4 to 60 pages, about 1,000 tokens each
    python benchmarks/train_data.py books --out B    # 2 texts of about 130,000 tokens

Receipts, which the others need, are yours:

    vlmdata preprocess naver-clova-ix/cord-v2 --tokenizer embedded --out R

The source is written beside the dataset, which `vlmdata preprocess` makes of it with the embedded tokenizer too.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from loader_data import preprocess
from PIL import Image, ImageDraw

WORDS = """total tax paid cash change item price receipt shop the of and is what how much was bread milk tea coffee two
three blue red large small card date time street city"""


def words(drawn: np.random.Generator, typical: float, spread: float, least: int, most: int) -> str:
    """So many words that their number is long-tailed (log-normal)."""
    return " ".join(drawn.choice(WORDS.split(), int(np.clip(drawn.lognormal(typical, spread), least, most))))


def texts(rows: int, _: Path) -> list[dict[str, Any]]:
    drawn = np.random.default_rng(3)
    made = []
    for _ in range(rows):
        text = words(drawn, 6.2, 1.1, 20, 5000)
        cut = len(text) // 2
        asked, answered = {"role": "user", "content": text[:cut]}, {"role": "assistant", "content": text[cut:]}
        made.append({"messages": [asked, answered]})
    return made


def chats(rows: int, images: Path) -> list[dict[str, Any]]:
    """Neighbours with many, few and no images: the shares of context-parallel ranks are uneven and often empty."""
    images.mkdir(parents=True, exist_ok=True)
    drawn = np.random.default_rng(4)
    made = []
    for row in range(rows):
        content: list[dict[str, str]] = []
        for _ in range((1, 0, 3, 0, 0)[row % 5]):
            file = images / f"{row}-{len(content)}.png"
            height, width = drawn.choice([64, 96, 128], 2)
            Image.fromarray(drawn.integers(0, 256, (height, width, 3), np.uint8)).save(file)
            content.append({"type": "image", "image": str(file.relative_to(images.parent))})
        content.append({"type": "text", "text": words(drawn, 2.5, 0.8, 2, 60)})
        answer = {"role": "assistant", "content": words(drawn, 4.8, 1.0, 4, 500)}
        made.append({"messages": [{"role": "user", "content": content}, answer]})
    return made


#: Words of a book: with the template, about 130,000 tokens of the embedded tokenizer.
BOOK = 129_500


def books(rows: int, _: Path) -> list[dict[str, Any]]:
    """Texts that nearly fill a pack of 131,072 tokens each."""
    drawn = np.random.default_rng(6)
    made = []
    for _ in range(rows):
        asked = {"role": "user", "content": " ".join(drawn.choice(WORDS.split(), BOOK - 2000))}
        answered = {"role": "assistant", "content": " ".join(drawn.choice(WORDS.split(), 2000))}
        made.append({"messages": [asked, answered]})
    return made


#: Width and height of a page in pixels: 56 x 72 patches, 1,008 tokens.
PAGE = (896, 1152)


def documents(rows: int, images: Path) -> list[dict[str, Any]]:
    """Documents of many pages, for packs of 65,536 tokens: one long document, or several short ones."""
    images.mkdir(parents=True, exist_ok=True)
    drawn = np.random.default_rng(5)
    made = []
    for row in range(rows):
        pages: list[dict[str, str]] = []
        for number in range(60 if row % 4 == 0 else int(drawn.integers(4, 40))):
            page = Image.new("RGB", PAGE, "white")
            ImageDraw.Draw(page).multiline_text(
                (40, 40), "\n".join(words(drawn, 2.2, 0.3, 4, 14) for _ in range(70)), 0
            )
            file = images / f"{row}-{number}.jpg"
            page.save(file, quality=85)
            pages.append({"type": "image", "image": str(file.relative_to(images.parent))})
        asked = {"role": "user", "content": [*pages, {"type": "text", "text": "What was bought?"}]}
        made.append({"messages": [asked, {"role": "assistant", "content": words(drawn, 6.0, 0.6, 100, 2000)}]})
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=["texts", "chats", "documents", "books"])
    parser.add_argument("--rows", type=int, help="default: 700 texts, 500 chats, 12 documents, 2 books")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    kinds = {"texts": (texts, 700), "chats": (chats, 500), "documents": (documents, 12), "books": (books, 2)}
    make, rows = kinds[options.kind]
    folder = options.out.absolute().with_name(f"{options.out.name}-source")
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / f"{options.kind}.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in make(options.rows or rows, folder / "images")))
    # Small images stay small: train_faults.py's packs have 1,024 tokens.
    most = PAGE[0] * PAGE[1] if options.kind == "documents" else 65536
    longest = 131_072 if options.kind == "books" else 65_536
    pixels = ("--min-pixels", "4096", "--max-pixels", str(most), "--max-length", str(longest))
    preprocess(str(source), options.out, "--recipe", "chat", "--pad-multiple", "1", "--rows-per-shard", "100", *pixels)


if __name__ == "__main__":
    main()
