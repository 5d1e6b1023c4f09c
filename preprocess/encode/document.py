"""Encodes a document to samples: all text is learned, with images in between, and long documents are split."""

from __future__ import annotations

from itertools import chain, pairwise

import numpy as np
import numpy.typing as npt

from vlmdata.families.chat import IMAGE
from vlmdata.families.processor import PROCESSOR
from vlmdata.preprocess.chat.agreement import require_reserved
from vlmdata.preprocess.chat.render import Renderer
from vlmdata.preprocess.chat.targets import tokenize
from vlmdata.preprocess.chat.tokenizer import require_length
from vlmdata.preprocess.config import SHORTENING, Overlong, PreprocessConfig
from vlmdata.preprocess.conversation import Document
from vlmdata.preprocess.encode.image import encode_images, image_tokens
from vlmdata.preprocess.encode.sample import EncodedSample, WeightedTokens, blocks_of, document_weight, finish_sample
from vlmdata.preprocess.reject import RowRejected
from vlmdata.reasons import Reason
from vlmdata.wording import counted

#: An image's tokens with its vision tokens, ``[start, stop)``.
Block = tuple[int, int]


def encode_document(
    document: Document, renderer: Renderer, config: PreprocessConfig
) -> list[EncodedSample | RowRejected]:
    """Encodes a document.

    Targets are all tokens except the first, which has no predecessor to predict it, and images with their vision
    tokens. The last token is the end of text.

    Returns:
        One sample, or the pieces of a document over ``max_length`` that ``overlong`` splits. A piece with images only
        is replaced by its rejection.

    Raises:
        RowRejected: If the document cannot be encoded.
    """
    if not document.text.strip():
        raise RowRejected(Reason.EMPTY_DOCUMENT, f"no text to learn, and {counted(len(document.images), 'image')}")
    if document.images and config.family == PROCESSOR:
        raise RowRejected(
            Reason.UNSUPPORTED_CONTENT,
            f"a document with {counted(len(document.images), 'image')}: in the family {PROCESSOR}, only conversations "
            "have images",
        )
    weight = document_weight(document)
    info = renderer.tokenizer.info
    # Text first: it is cheap, and rejected documents need no image decoding.
    ids, parts = _ids(document, renderer), document.images
    tokens_of_images = image_tokens(parts, config, more_than=config.max_length - len(ids) + len(parts))
    if tokens_of_images is not None and config.overlong in {Overlong.REJECT, *SHORTENING}:
        raise _overlong(len(ids) - len(parts) + tokens_of_images, len(parts), config)
    images = encode_images(parts, config)
    learned = ~np.isin(ids, info.items[IMAGE].ids)
    tokens = WeightedTokens(ids, learned * np.float32(weight)).with_items(images, config.model_family, info)
    items = blocks_of(list(chain.from_iterable(images)), config.model_family, info)
    of_images = np.cumsum([0, *map(len, images)])  # number of the first view of each
    firsts, lasts = items.firsts[of_images[:-1]], items.firsts[of_images[1:] - 1]
    starts = items.locate(tokens.ids)
    before, after = (len(marks) for marks in (info.items[IMAGE].before, info.items[IMAGE].after))
    stops = starts + items.counts
    blocks = list(zip((starts[firsts] - before).tolist(), (stops[lasts] + after).tolist(), strict=True))
    pieces: list[EncodedSample | RowRejected] = []
    for start, stop in pairwise(_bounds(len(tokens), blocks, config)):
        within = [views for views, block in zip(images, blocks, strict=True) if start <= block[0] < stop]
        piece = tokens[start:stop]
        piece.weights[0] = 0
        if piece.weights.any():
            pieces.append(finish_sample(piece, within, config, info, truncated=stop < len(tokens)))
        else:
            what = f"tokens {start:,} to {stop - 1:,} of {len(tokens):,} of the document"
            found = f"{what} have {counted(len(within), 'image')} and no text to learn"
            pieces.append(RowRejected(Reason.NO_TARGETS, found))
    return pieces


def _ids(document: Document, renderer: Renderer) -> npt.NDArray[np.int64]:
    """Tokenizes a document, with one placeholder per image."""
    rendered, tokenizer = renderer.render_document(document), renderer.tokenizer
    hint = "; --overlong split makes several samples of such documents"
    require_length(tokenizer, rendered.text, renderer.most_tokens, hint)
    tokens = tokenize(tokenizer, rendered)
    require_reserved(rendered, tokens, tokenizer)
    return tokens.ids


def _bounds(length: int, blocks: list[Block], config: PreprocessConfig) -> list[int]:
    """Returns the bounds of the pieces."""
    most = config.max_length
    if length <= most:
        return [0, length]
    if config.overlong in {Overlong.REJECT, *SHORTENING}:
        raise _overlong(length, len(blocks), config)
    bounds = cut(length, blocks, most)
    return bounds[:2] if config.overlong == Overlong.TRUNCATE else bounds


def _overlong(length: int, images: int, config: PreprocessConfig) -> RowRejected:
    return RowRejected(
        Reason.OVERLONG,
        f"{length} tokens ({counted(images, 'image')}), over --max-length {config.max_length}; --overlong split makes "
        "several samples of such documents",
    )


def cut(length: int, blocks: list[Block], most: int) -> list[int]:
    """Cuts a sequence into pieces of at most ``most`` tokens, each as long as possible, without splitting blocks.

    The last piece is not a single token if avoidable, since it would have no predecessor to predict it.

    Args:
        length: Tokens of the sequence.
        blocks: Ranges that must stay whole, in order and disjoint.
        most: Largest number of tokens in a piece.

    Returns:
        0, the cuts, and ``length``.

    Raises:
        RowRejected: OVERLONG if a block is longer than ``most``.
    """

    def before(end: int) -> int:
        return next((start for start, stop in blocks if start < end < stop), end)

    bounds = [0]
    while length - bounds[-1] > most:
        end = before(bounds[-1] + most)
        if length - end == 1 and before(end - 1) > bounds[-1]:
            end = before(end - 1)
        if end <= bounds[-1]:
            size = next(stop for start, stop in blocks if start == end) - end
            what = f"an image of {size} tokens with its vision tokens"
            raise RowRejected(Reason.OVERLONG, f"{what} does not fit in --max-length {most}")
        bounds.append(end)
    return [*bounds, length]
