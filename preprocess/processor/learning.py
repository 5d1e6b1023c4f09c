"""Loads a processor, and learns by trying it how its tensors join and how they are stored."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vlmdata.errors import SourceError
from vlmdata.families.processor import ProcessorFamily, TensorRule
from vlmdata.families.tensors import JoinError, Records, channels_of, record_of, restored, rule_for
from vlmdata.preprocess.hub import hub_or_cache
from vlmdata.preprocess.processor.model import ModelRules, model_rules
from vlmdata.preprocess.processor.running import NotFollowed, Processed, Runner, keep_texts
from vlmdata.preprocess.processor.template import NotLearned, learned_chat, learned_image

#: Heights and widths of the trial images: of several aspect ratios, so that each becomes other sizes.
_SIZES = ((90, 130), (200, 111), (64, 64), (120, 300))
#: An image of one colour tells which values are of which channel.
_COLOUR = (10, 100, 200)


@dataclass(frozen=True, eq=False)
class Processor:
    """A processor and what was learned of it.

    Attributes:
        family: What readers need.
        runner: Runs it.
        model: What its model tells.
        settings: sha256 of its settings.
        written: Tokens that it writes for images, or reads as their placeholder.
    """

    family: ProcessorFamily
    runner: Runner
    model: ModelRules
    settings: str
    written: frozenset[str]


def load_processor(name: str, revision: str | None = None, trust_remote_code: bool = False) -> Processor:
    """Loads a processor by hub id or folder, and learns what readers need of it. The result is kept in this process.

    Args:
        name: Folder or hub id of the model.
        revision: Branch, tag or commit on the hub.
        trust_remote_code: Whether code of the folder or repository may run.

    Raises:
        SourceError: If it cannot be loaded, or its text or a tensor cannot be learned; it tells what was seen.
    """
    return _load(name, revision, trust_remote_code)


@cache
def _load(name: str, revision: str | None, trust_remote_code: bool) -> Processor:
    with nullcontext() if Path(name).exists() else hub_or_cache():
        processor = _loaded(name, revision, trust_remote_code)
        model = model_rules(name, revision, trust_remote_code)
    try:
        return learned(processor, model)
    except (NotLearned, NotFollowed, JoinError) as error:
        what = "its chat template is not learned" if isinstance(error, NotLearned) else "it cannot be packed"
        raise SourceError(
            f"--processor {name}: {what}: {error}. docs/any-processor.md lists what is supported."
        ) from error


def _loaded(name: str, revision: str | None, trust_remote_code: bool) -> Any:
    from transformers import AutoProcessor

    try:
        processor = AutoProcessor.from_pretrained(name, revision=revision, trust_remote_code=trust_remote_code)
    except Exception as error:  # each processor reads its own files
        line = (str(error).strip() or type(error).__name__).splitlines()[0]
        own_code = "trust_remote_code" in str(error)
        remedy = (
            "It has code of its own; if you trust it, give --trust-remote-code."
            if own_code
            else "Give the folder or hub id of a model with a processor."
        )
        raise SourceError(f"--processor {name}: cannot load it: {line.rstrip('.')}. {remedy}") from error
    tokenizer = getattr(processor, "tokenizer", None)
    if not getattr(tokenizer, "is_fast", False) or getattr(processor, "image_processor", None) is None:
        raise SourceError(
            f"--processor {name}: {type(processor).__name__} has no image processor, or no fast tokenizer "
            "(tokenizer.json). For a model of text give --tokenizer."
        )
    return processor


def learned(processor: Any, model: ModelRules) -> Processor:
    """Learns what readers need of a loaded processor, by rendering its template and running it on trial images.

    Raises:
        NotLearned, NotFollowed, JoinError: If something cannot be learned; with what was seen.
    """
    tokenizer = processor.tokenizer
    template = processor.chat_template or tokenizer.chat_template
    if not isinstance(template, str):
        raise NotLearned("there is none, or several of which none is the default")
    tokens = [token.content for token in tokenizer.added_tokens_decoder.values()]

    def render(messages: list[dict[str, Any]]) -> str:
        try:
            return str(tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False))
        except Exception as error:  # jinja2 errors, and errors of the template's filters
            raise NotLearned(f"it refuses a conversation: {type(error).__name__}: {error}") from error

    begin = tokenizer.bos_token or ""
    chat = learned_chat(render, tokens, begin, template)
    named = [getattr(each, "image_token", None) for each in (processor, tokenizer)]
    image = learned_image(render, tokens, [token for token in named if isinstance(token, str)])
    plain = tokenizer("a")["input_ids"]
    if not chat.begin and plain != tokenizer("a", add_special_tokens=False)["input_ids"]:
        raise NotLearned(
            f"it does not begin with {begin or 'the token'} that the tokenizer adds to texts, so it is not clear "
            "whether the model wants it"
        )
    settings = hashlib.sha256(json.dumps(processor.to_dict(), sort_keys=True, default=str).encode()).hexdigest()
    keep_texts(tokenizer)
    arguments = model.arguments - {"input_ids", "attention_mask", "position_ids", "labels"}
    runner = _runner(processor, image, arguments)
    rules, colours = _learned_tensors(runner, processor)
    written = _run(runner, image, [next(_trial_images())]).text
    family = ProcessorFamily.learned(
        model_type=model.model_type,
        chat=chat,
        image=image,
        axes=1 if model.positions is None else 3,
        tensors=rules,
        colours=colours,
    )
    return Processor(
        family, runner, model, settings, frozenset(token for token in tokens if token in written) | {image}
    )


def _runner(processor: Any, image: str, arguments: frozenset[str]) -> Runner:
    """Returns what runs a processor; with the types of tokens, if it tells them on demand."""
    options = {"return_mm_token_type_ids": True} if "mm_token_type_ids" in arguments else {}
    runner = Runner(processor, image, options, arguments)
    trial = next(_trial_images())
    try:
        runner.call([image], [[trial]])
    except Exception:  # it does not take the option, or the image
        runner = replace(runner, options={})
    return runner


def _trial_images() -> Iterator[npt.NDArray[np.uint8]]:
    random = np.random.default_rng(0)
    for height, width in _SIZES:
        blocks = random.integers(0, 256, (height // 8 + 1, width // 8 + 1, 3), dtype=np.uint8)
        yield np.ascontiguousarray(blocks.repeat(8, 0).repeat(8, 1)[:height, :width])


def _learned_tensors(runner: Runner, processor: Any) -> tuple[tuple[TensorRule, ...], tuple[tuple[float, ...], ...]]:
    """Learns the rules of all tensors from samples of one, two and one images, alone and together."""
    image, images = runner.image, list(_trial_images())
    texts = (f"Look: {image} at this.\n", f"{image}, or {image} rather?\n", f"No, this one: {image}\n")
    groups = (images[:1], images[1:3], images[3:])
    alone = [_run(runner, text, group) for text, group in zip(texts, groups, strict=True)]
    lengths = [len(each.ids) for each in alone]
    together = _together(runner, texts, groups, sum(lengths))
    names = dict.fromkeys(name for each in alone for name in each.tensors)
    if partial := [name for name in names if any(name not in each.tensors for each in alone)]:
        raise JoinError(f"{partial[0]}: some trial images have it and others not")
    rules = [rule_for(name, [each.tensors[name] for each in alone], together.get(name), lengths) for name in names]
    colours = _colours(processor.image_processor)
    if colours:
        rules = _with_channels(runner, rules, alone, colours)
    family = replace(_blank(), tensors=tuple(rules), colours=colours)
    for each in alone:  # what is not restored here would not be later
        record = record_of(family, each.tensors)
        (back,) = restored(family, Records.of(family, torch.from_numpy(record), [len(record)]))
        for name, value in each.tensors.items():
            if not torch.equal(back[name], value):
                raise JoinError(f"{name}: it is not restored bit for bit")
    if not any(rule.channels for rule in rules):
        colours = ()
    return tuple(rules), colours


def _blank() -> ProcessorFamily:
    from vlmdata.families.processor import FAMILY

    return FAMILY


def _run(runner: Runner, text: str, images: Sequence[npt.NDArray[np.uint8]]) -> Processed:
    try:
        return runner.run(text, images)
    except (NotFollowed, JoinError):
        raise
    except Exception as error:  # each processor has its own errors
        sizes = ", ".join(f"{image.shape[1]}x{image.shape[0]}" for image in images)
        line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise NotFollowed(f"it fails for the trial images {sizes}: {type(error).__name__}: {line}") from error


def _together(
    runner: Runner,
    texts: Sequence[str],
    groups: Sequence[Sequence[npt.NDArray[np.uint8]]],
    tokens: int,
) -> dict[str, torch.Tensor]:
    """Returns the tensors of all trial images in one sample; or of a batch of the samples, if images change by company.

    Args:
        runner: Runs the processor.
        texts: Text of each sample.
        groups: Images of each.
        tokens: Tokens of all samples alone.
    """
    whole = _run(runner, "".join(texts), [image for group in groups for image in group])
    if len(whole.ids) == tokens:
        return dict(whole.tensors)
    return runner.batch(texts, groups)


def _colours(image_processor: Any) -> tuple[tuple[float, ...], ...]:
    """Returns the value of each 8-bit value by channel, as the processor normalises it; () if it does not tell."""

    def setting(name: str, default: Any) -> Any:
        value = getattr(image_processor, name, None)
        return default if value is None else value

    factor, mean, std = (
        setting("rescale_factor", 1 / 255),
        setting("image_mean", [0.0] * 3),
        setting("image_std", [1.0] * 3),
    )
    rescales, normalises = setting("do_rescale", True), setting("do_normalize", True)
    ramp = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 3, 16, 16)
    try:
        if hasattr(image_processor, "rescale_and_normalize"):
            values = image_processor.rescale_and_normalize(ramp, rescales, factor, normalises, mean, std)
        else:  # with numpy
            values = ramp[0].numpy()
            values = image_processor.rescale(values, factor) if rescales else values
            values = torch.from_numpy(image_processor.normalize(values, mean, std) if normalises else values)
        table = values.float().reshape(3, 256)
    except Exception:  # it has other methods; the values are stored as they are
        return ()
    rising = (table[:, 1:] > table[:, :-1]).all()
    return tuple(map(tuple, table.tolist())) if rising else ()


def _with_channels(
    runner: Runner,
    rules: Sequence[TensorRule],
    alone: Sequence[Processed],
    colours: tuple[tuple[float, ...], ...],
) -> list[TensorRule]:
    """Adds the channels of the values of the largest tensor, which an image of one colour tells."""
    floats = [rule for rule in rules if rule.dtype in ("float32", "bfloat16", "float16")]
    if not floats:
        return list(rules)
    largest = max(floats, key=lambda rule: alone[0].tensors[rule.name].numel())
    plain = np.broadcast_to(np.array(_COLOUR, np.uint8), (*_SIZES[0], 3))
    value = _run(runner, runner.image, [np.ascontiguousarray(plain)]).tensors[largest.name]
    found = channels_of(value, colours, _COLOUR)
    if found is None:
        return list(rules)
    coloured = replace(largest, channels=found[0], channel_axis=found[1])
    return [coloured if rule is largest else rule for rule in rules]
