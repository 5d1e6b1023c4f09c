"""Families of a user's own file whose tokens are not one per merged patch, through every command and reader."""

from __future__ import annotations

import dataclasses
import json
import shutil
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import vlmdata
from tests.chat_rows import MIXED_ACCEPTED, image_item, mixed_rows, turn, write_jsonl
from tests.conftest import encoded_image
from tests.families import other_counts
from tests.families.other_counts import BREAK, ONE_MORE, ROWS
from tests.inspect.browser import Visit, launched
from tests.inspect.serving import serving as inspecting
from tests.media.video.clips import clip
from tests.service.servers import assert_equal, serving
from vlmdata import families
from vlmdata.cli.main import app
from vlmdata.families.blocks import Blocks
from vlmdata.format.dataset import VlmDataset
from vlmdata.inspect.batch import describe_batch
from vlmdata.inspect.findings import IndexFindings
from vlmdata.inspect.page.payload import sample_payload
from vlmdata.inspect.sample import SpanKind, describe_sample
from vlmdata.integrations.prompts import Prompts
from vlmdata.preprocess.chat.tokenizer import load_tokenizer
from vlmdata.preprocess.config import ImageConfig, Overlong, PreprocessConfig
from vlmdata.preprocess.conversation import Document, ImagePart, TextPart
from vlmdata.preprocess.encode import EncodedSample, Encoder
from vlmdata.verify.sample import SampleRules, audit_sample

FAMILIES = {"one_more": ONE_MORE, "rows": ROWS}
LOADER: dict[str, Any] = {"capacity": 512, "global_batch": 1, "num_workers": 0}
PADS = ("<|image_pad|>", "<|video_pad|>", BREAK)


class Place:
    """A user's folder with the file of a family and a dataset, in which commands run."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name, self.family = folder, name, FAMILIES[name]
        shutil.copy(other_counts.__file__, folder / "mine.py")
        self.attribute = f"{folder / 'mine.py'}:{name.upper()}"
        self.options = ["--family", self.attribute, "--tokenizer", "embedded", "--recipe", "chat", "-j", "1"]
        self.options += ["--min-pixels", "1024", "--max-pixels", "65536"]
        rows = [mixed_rows()[number] for number in chain(*MIXED_ACCEPTED)]
        if self.family.video is not None:
            self.options += ["--video-max-pixels", "16384"]
            (folder / "clip.mp4").write_bytes(clip("libx264", 8, 2))
            video = {"type": "video", "video": "clip.mp4"}
            rows.append({"messages": [turn("user", image_item(seed=8), video, "?"), turn("assistant", "Bars.")]})
        write_jsonl(folder / "rows.jsonl", rows)

    def run(self, *words: Any) -> str:
        done = CliRunner().invoke(app, [*map(str, words)])
        assert done.exit_code == 0, done.output
        return done.stdout

    def preprocess(self, *words: Any) -> str:
        return self.run("preprocess", "rows.jsonl", *self.options, *words)

    def blocks(self, sample: Any) -> list[list[str]]:
        """The tokens that each block of a sample should have, written anew."""
        found = []
        for item in sample.items:
            _, rows, columns = (side // 2 for side in item.grid)
            row = [f"<|{item.kind}_pad|>"] * columns
            block = row * rows + row[:1] if self.name == "one_more" else [*row, BREAK] * (rows - 1) + row
            found += [block] * item.grid[0]
        return found


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    made = Place(tmp_path_factory.mktemp("other"), request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(made.folder)
        patch.setenv("VLMDATA_FAMILIES", made.attribute)
        patch.setenv("COLUMNS", "200")
        made.preprocess("--out", "data", "--rows-per-shard", "4")
        yield made


@pytest.fixture(scope="module")
def data(place: Place) -> VlmDataset:
    return vlmdata.open_dataset("data")


def test_samples_have_the_tokens_of_the_family(place: Place, data: VlmDataset) -> None:
    spell, seen = load_tokenizer().hf.convert_ids_to_tokens, 0
    for number, sample in enumerate(data):
        ids = sample.to_torch()["input_ids"].flatten()[: sample.length]
        texts, blocks = np.array(spell(ids.tolist())), place.blocks(sample)
        pads = np.isin(texts, PADS)
        assert texts[pads].tolist() == [text for block in blocks for text in block]
        assert not sample.loss_mask[: sample.length][pads].any()
        for start in data.index.row(number).item_starts:
            assert texts[start - 1] == "<|vision_start|>"
        assert (texts == "<|vision_end|>").sum() == len(blocks) + any(item.kind == "video" for item in sample.items)
        seen += len(blocks)
    assert seen >= 4
    tokens = json.loads((place.folder / "data" / "manifest.json").read_text())["tokenizer"]["items"]["image"]
    assert tokens.get("between") == (None if place.name == "one_more" else load_tokenizer().hf.encode(BREAK))


def test_commands_count_them(place: Place, data: VlmDataset) -> None:
    place.run("verify", "data", "-j", 1)
    place.run("plan", "data", "--capacity", "512")
    place.run("inspect", "data", "--html", "page.html")
    place.run("inspect", "data", "--pack", "0", "--capacity", "512")
    count = len(place.blocks(data[0])[0])
    assert f"<|image_pad|> × {count}" in place.run("inspect", "data", "--sample", "0")
    assert json.loads(place.run("inspect", "data", "--sample", "0", "--json"))["images"][0]["tokens"] == count
    assert f"{count} tokens" in place.preprocess("--trace", "0")
    lengths, images = json.loads(place.preprocess("--lengths", "4096", "--json")), 0
    for sample in data:
        images += sum(len(block) for block in place.blocks(sample) if PADS[0] in block)
    assert (lengths["longest"], lengths["tokens"]) == (data.index.lengths.max(), data.index.lengths.sum())
    assert lengths["image_tokens"] == images


def test_copies_have_the_same_samples(place: Place, data: VlmDataset) -> None:
    place.run("select", "data", "--where", "num_images > 0", "--out", "some")
    place.run("recode", "data", "--pixels", "zstd", "--out", "zstd", "-j", 1)
    place.run("retokenize", "data", "--tokenizer", "embedded", "--source", "rows.jsonl", "--out", "again", "-j", 1)
    place.run("diff", "data", "zstd")
    (place.folder / "again" / "index.parquet").unlink()
    place.preprocess("--out", "again", "--rows-per-shard", "4")  # from the shards
    for part in ("1/2", "2/2"):
        place.preprocess("--out", "parts", "--rows-per-shard", "4", "--part", part)
    place.run("finish", "parts")
    place.run("select", "data", "--where", "num_images == 0", "--out", "others")
    place.run("join", "some", "others", "--out", "joined")
    place.run("verify", "joined", "-j", 1)
    assert sorted(map(_ids, vlmdata.open_dataset("joined"))) == sorted(map(_ids, data))
    for name in ("some", "zstd", "again", "parts"):
        place.run("verify", name, "-j", 1)
        copy = vlmdata.open_dataset(name)
        assert len(copy) == (data.index.item_counts > 0).sum() if name == "some" else len(data)
        for sample in copy:
            same = data.sample(sample.key)
            assert np.array_equal(sample.input_ids, same.input_ids)
            assert np.array_equal(sample.position_ids, same.position_ids)
            assert np.array_equal(sample.patches, same.patches)
    assert (place.folder / "again" / "index.parquet").read_bytes() == (
        place.folder / "data" / "index.parquet"
    ).read_bytes()


def _ids(sample: Any) -> list[int]:
    ids: list[int] = sample.input_ids.tolist()
    return ids


def test_batches_have_them_and_a_server_gives_the_same(place: Place, data: VlmDataset) -> None:
    with (
        serving("data", "-j", 1, "--memory", "64M") as server,
        vlmdata.StreamingLoader("data", **LOADER | {"num_workers": 1}) as loader,
        vlmdata.StreamingLoader(server.url, **LOADER) as served,
    ):
        batches = list(zip(loader, served, strict=True))
    assert sum(batch.num_samples for batch, _ in batches) == len(data)
    for batch, other in batches:
        assert_equal(batch, other)
        samples = [data.sample(key) for key in batch.sample_keys]
        for sample, start in zip(samples, batch.cu_seqlens_padded.tolist(), strict=False):
            own = slice(start, start + sample.length)
            assert batch.input_ids[0, own].tolist() == sample.input_ids[: sample.length].tolist()
            assert batch.position_ids[:, 0, own].tolist() == sample.position_ids[:, : sample.length].tolist()
        shown = describe_batch(batch, cost=loader.plan_config.cost)
        blocks = [len(block) for sample in samples for block in place.blocks(sample)]
        assert sum(image.tokens for image in shown.images) == sum(blocks)


def test_a_damaged_sample_is_masked_with_its_tokens(place: Place, data: VlmDataset) -> None:
    shutil.copytree("data", "damaged")
    row = data.index.row(int(np.argmax(data.index.item_counts)))
    shard = place.folder / "damaged" / data.manifest.shards[row.shard].name
    content = bytearray(shard.read_bytes())
    content[row.placement.arrays["input_ids"].offset + 1] ^= 255
    shard.write_bytes(content)
    with vlmdata.StreamingLoader("damaged", on_damage="mask", **LOADER) as loader:
        (batch,) = [each for each in loader if row.key in each.sample_keys]
    begin = batch.cu_seqlens_padded[batch.sample_keys.index(row.key)]
    ids = batch.input_ids[0, begin : begin + row.length].tolist()
    found = [text for text in load_tokenizer().hf.convert_ids_to_tokens(ids) if text in PADS]
    assert found == [text for block in place.blocks(data.sample(row.key)) for text in block]


def test_inspect_shows_what_each_token_stands_for(place: Place, data: VlmDataset) -> None:
    findings = IndexFindings(data.index, place.family)
    for number, sample in enumerate(data):
        shown, blocks = describe_sample(data, number), place.blocks(sample)
        assert findings.image_tokens[number] == sum(map(len, blocks))
        assert [found for found in shown.findings if found.severity == "fault"] == []
        spans = [span for span in shown.spans if span.kind is SpanKind.IMAGE]
        assert [span.stop - span.start for span in spans] == list(map(len, blocks))
        numbers = [span.image for span in spans]
        assert numbers == [item for item, shape in enumerate(sample.items) for _ in range(shape.grid[0])]
        if not spans:
            continue
        image, texts, block = shown.images[0], sample_payload(shown)["tokens"]["text"], blocks[0]
        own = slice(image.start, image.start + image.tokens)
        assert texts[own] == [None if text == PADS[0] else text for text in block]
        if place.name == "one_more":
            assert image.cells == (*range(len(block) - 1), -1)
        else:
            assert image.cells is not None or BREAK not in block
            assert [cell for cell in image.cells or () if cell >= 0] == list(range(block.count(PADS[0])))
        for frame, of_frame in zip(shown.images[-1].frames, blocks[1:], strict=False):
            assert frame.tokens == len(of_frame)


@pytest.mark.slow
def test_the_page_marks_the_patches_of_a_token_and_the_token_of_a_patch(place: Place, data: VlmDataset) -> None:
    image = describe_sample(data, 0).images[0]
    _, rows, columns = (side // 2 for side in image.grid)
    assert rows > 1
    second = image.start + columns + (place.name == "rows")  # the first token of the second row of patches
    none = image.start + (image.tokens - 1 if place.name == "one_more" else columns)
    with launched() as browser, inspecting(place.folder / "data") as client:
        visit = Visit(browser, client.home)
        visit.open_sample(0)
        visit.page.keyboard.press("u")
        visit.page.hover(f".cell[data-i='{second}']")
        spot = visit.page.locator(".spot")
        assert [spot.get_attribute(name) for name in ("x", "y", "visibility")] == ["0", "2", "visible"]
        assert visit.field("image") == "0, patch rows 2–3, columns 0–1"
        visit.page.hover(f".cell[data-i='{none}']")
        assert spot.get_attribute("visibility") == "hidden"
        assert visit.field("image") == "0, no patches"
        box = visit.page.locator(".picture svg").bounding_box()
        assert box is not None
        visit.page.mouse.move(box["x"] + 2, box["y"] + 1.5 * box["height"] / rows)
        assert visit.field("token") == f"{second}"
        assert visit.complaints == []


def test_a_lost_token_is_found(place: Place, data: VlmDataset) -> None:
    sample, rules = data[0], SampleRules.of(data.manifest)
    for token in data.manifest.tokenizer.items["image"].placeholders:
        ids = sample.input_ids.copy()
        ids[np.flatnonzero(ids == token)[0]] = ids[0]
        found = audit_sample(dataclasses.replace(sample, input_ids=ids), data.index.row(0), rules)
        assert "image_block" in {check for check, _ in found}
    if len(pair := data.manifest.tokenizer.items["image"].placeholders) > 1:
        ids = sample.input_ids.copy()
        at = np.flatnonzero(ids == pair[1])[0]
        ids[at - 1 : at + 1] = ids[at - 1 : at + 1][::-1].copy()
        found = audit_sample(dataclasses.replace(sample, input_ids=ids), data.index.row(0), rules)
        assert "image_block" in {check for check, _ in found}


def test_prompts_have_one_placeholder_for_an_engine(place: Place, data: VlmDataset) -> None:
    image = data.manifest.tokenizer.image
    place.run("select", "data", "--where", "num_videos == 0", "--out", "plain")
    prompts = Prompts("plain", longest=1024)
    for key in prompts.keys:
        prompt, sample = prompts.get(key), data.sample(key)
        pads = [token for block in place.blocks(sample) for token in block]
        assert len(prompt.ids) - len(prompt.engine_ids) <= len(pads)
        assert prompt.engine_ids.count(image) == len(prompt.images)
        assert not set(prompt.engine_ids) & set(data.manifest.tokenizer.items["image"].between)
    prompts.close()


def test_check_model_knows_their_features(place: Place) -> None:
    checked = place.run("check-model", f"mine.py:{place.name}", "--data", "data", "--tokens", "1024")
    assert "equal: each sample of a pack is computed as if it were alone" in checked


def test_a_document_is_not_cut_within_an_image(place: Place) -> None:
    config = PreprocessConfig(
        family=place.name, image=ImageConfig(4096, 65_536), max_length=24, overlong=Overlong.SPLIT, pad_multiple=1
    )
    encoder = Encoder(config, load_tokenizer("embedded", None, place.name))
    picture = ImagePart(encoded_image(64, 96))
    made = encoder.encode_all(Document((TextPart("word " * 20), picture, TextPart("word " * 9))))
    pieces = [piece for piece in made if isinstance(piece, EncodedSample)]
    assert len(pieces) == len(made) > 1
    (whole,) = [piece for piece in pieces if piece.items]
    texts = encoder.tokenizer.hf.convert_ids_to_tokens(whole.input_ids.tolist())
    assert [text for text in texts if text in PADS] == place.blocks(whole)[0]


def test_rules_that_contradict_each_other_are_named() -> None:
    one = dataclasses.replace(ROWS, name="few")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(one), "token_counts", families.Family.token_counts)
        with pytest.raises(
            ValueError, match=r"family few: it has 5 placeholders for images of \[1, 4, 4\] patches, but"
        ):
            Blocks.of(one, [("image", (1, 4, 4))], {"image": (1, 2)})
    other = dataclasses.replace(ROWS, items=(dataclasses.replace(ROWS.image, between=("<b>",)),))
    with pytest.raises(ValueError, match=r"its placeholders have '<\|vision_pad\|>'; write it in the `between`"):
        Blocks.of(other, [("image", (1, 4, 4))], {"image": (1, 2)})
    with pytest.raises(NotImplementedError, match=r"family rows: .* define position_ids"):
        dataclasses.replace(ROWS, position_axes=("t", "h", "w")).position_ids(9, np.zeros(1), np.array([[1, 4, 4]]))
