"""A dataset of conversations with images and clips, encoded and written with a tokenizer's files of another dataset."""

from __future__ import annotations

import shutil
from pathlib import Path

import xxhash

from tests.conftest import encoded_image
from tests.loader.synthetic import DESCRIBED, describe
from tests.media.video.clips import clip
from vlmdata.format.dataset import VlmDataset
from vlmdata.format.index_row import IndexRow
from vlmdata.format.manifest import Manifest, ShardInfo
from vlmdata.format.schema import sample_key, shard_name
from vlmdata.format.shard import EncodedItem, ShardWriter
from vlmdata.preprocess.chat.tokenizer import load_tokenizer
from vlmdata.preprocess.config import EMBEDDED, ImageConfig, PreprocessConfig, VideoConfig
from vlmdata.preprocess.conversation import Conversation, ImagePart, Message, TextPart, VideoPart
from vlmdata.preprocess.encode import EncodedSample, Encoder


def conversations() -> list[Conversation]:
    """A clip of 15 temporal patches between two images, and two clips, of which one has a frame of its own."""
    image = ImagePart(encoded_image(64, 96, seed=1))
    long, short = VideoPart(clip(count=300, rate=10)), VideoPart(clip(count=2, rate=10))
    return [
        Conversation((Message("user", parts), Message("assistant", (TextPart(answer),))))
        for parts, answer in (
            ((image, long, image, TextPart("Which numbers?")), "All up to 299."),
            ((short, short, TextPart("And now?")), "Two, and two again."),
        )
    ]


def write_clips(folder: Path, like: Path, family: str = "qwen3_5") -> Path:
    """Writes them as a dataset, whose tokenizer is that of another one."""
    config = PreprocessConfig(
        family=family, image=ImageConfig(4096, 40_000), video=VideoConfig(min_pixels=4096, max_pixels=400_000)
    )
    encoder = Encoder(config, load_tokenizer(EMBEDDED, None, family))
    shutil.copytree(like, folder, ignore=shutil.ignore_patterns("shard-*"))
    rows: list[IndexRow] = []
    with ShardWriter(folder / shard_name(0)) as writer:
        rows += [_row(writer, encoder.encode(each), number) for number, each in enumerate(conversations())]
        size, sha256 = writer.close()
    before = vars(VlmDataset(like).manifest)
    kept = {name: before[name] for name in Manifest.__dataclass_fields__ if name not in DESCRIBED}
    return describe(folder, rows, [ShardInfo(shard_name(0), 0, len(rows), len(rows), 0, size, sha256)], **kept)


def _row(writer: ShardWriter, sample: EncodedSample, row: int) -> IndexRow:
    members = {name: [array] for name, array in sample.to_sample("").arrays().items() if name != "patches"}
    items = [
        EncodedItem(item.patches, item.shape, "raw", xxhash.xxh3_64_intdigest(item.patches)) for item in sample.items
    ]
    metadata = {"key": sample_key(row), "images": [dict(item.origin) for item in sample.items]}
    return IndexRow(
        key=sample_key(row),
        source_row=row,
        shard=0,
        placement=writer.add(sample_key(row), metadata, members, items),
        length=sample.length,
        padded_length=len(sample.input_ids),
        num_targets=int(sample.loss_mask.sum()),
        target_turns=sample.target_turns,
        truncated=False,
        item_starts=sample.item_starts,
    )
