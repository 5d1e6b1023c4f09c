"""Proves packs on the installed transformers: a small random model computes samples packed and alone, on the CPU.

A way of keeping samples apart is proven if logits and gradients of a pack equal those of its samples, and if no sample
changes when another does. The verdict is remembered per user, for these versions, this model and its attention.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from vlmdata.errors import UsageError
from vlmdata.format.atomic import write_atomically
from vlmdata.storage.cache import cache_folder

_log = logging.getLogger("vlmdata.integrations.proof")
#: Largest difference that counts as rounding in float32, relative to the largest logit or to the norm of gradients.
TOLERANCE = 1e-4
#: Part of the key of remembered verdicts: what was computed for them.
_FORMAT = 2
#: What a way does to a model, as a context.
Way = Callable[[Any], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Verdict:
    """What a proof found.

    Attributes:
        way: The first way whose packs equal their samples; empty if there is none.
        difference: What was found of the ways before it, in words.
        images: Whether the samples had images; else text alone was compared.
    """

    way: str
    difference: str
    images: bool


def verdict_of(inner: Any, small: Callable[[Any], Any], ways: dict[str, Way]) -> Verdict:
    """Proves the ways for a model in their order, or reads the remembered verdict.

    Args:
        inner: A model of transformers, of any size, on any device. It is not computed.
        small: Makes the configuration of a small model of a configuration.
        ways: The ways to try, by name.

    Returns:
        The verdict. A warning says if it is of text alone.

    Raises:
        UsageError: If no small model can be made or computed.
    """
    found = _verdict(inner, small, ways)
    if found.way and not found.images:
        warnings.warn(
            f"packed: packs of {type(inner).__name__} were proven with text alone, because no pixels could be made for "
            "its small model. Compare the losses of a pack with images and of its samples before you train.",
            stacklevel=4,
        )
    return found


def _verdict(inner: Any, small: Callable[[Any], Any], ways: dict[str, Way]) -> Verdict:
    """Returns the remembered verdict, or proves the ways and remembers it."""
    name = type(inner).__name__
    try:
        config = small(inner.config)
        key = _key(inner, config, list(ways))
        file = cache_folder().parent / "proofs" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
        if (known := _read(file, key)) is not None:
            return known
        _log.info("packed: proving packs of %s on this version of transformers; this takes seconds", name)
        with _alone_on_cpu():
            found = _prove(_model(inner, config), ways)
    except UsageError:
        raise
    except Exception as error:  # a configuration of any kind is cut, and code of any version runs
        reason = (str(error).strip().splitlines() or [""])[0]
        raise UsageError(
            f"packed: packs of {name} cannot be proven on transformers {_transformers()}: the small model of its "
            f"configuration fails with {type(error).__name__}: {reason:.300}. Pass allow_unproven=True and compare "
            "losses."
        ) from error
    with suppress(OSError):  # it is proven again then
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps({"key": key, **vars(found)}).encode())
    return found


def _transformers() -> str:
    import transformers

    return transformers.__version__


def attention_of(inner: Any) -> str:
    """The attention that a proof on the CPU has: that of the model, or SDPA in the place of a kernel for GPUs."""
    return "eager" if inner.config.get_text_config()._attn_implementation == "eager" else "sdpa"


def _key(inner: Any, config: Any, ways: Sequence[str]) -> str:
    values = config.to_json_string(use_diff=False)
    return json.dumps(
        {
            "format": _FORMAT,
            "transformers": _transformers(),
            "torch": torch.__version__,
            "model": type(inner).__name__,
            "attention": attention_of(inner),
            "ways": list(ways),
            "configuration": hashlib.sha256(values.encode()).hexdigest(),
        },
        sort_keys=True,
    )


def _read(file: Any, key: str) -> Verdict | None:
    try:
        values = json.loads(file.read_bytes())
        if values.pop("key") != key or set(values) != {"way", "difference", "images"}:
            return None
        return Verdict(str(values["way"]), str(values["difference"]), bool(values["images"]))
    except (OSError, ValueError, KeyError, AttributeError):
        return None


@contextmanager
def _alone_on_cpu() -> Iterator[None]:
    """Float32 on the CPU, whatever the caller has set; the caller's random numbers stay as they were."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with (
            torch.random.fork_rng(devices=[]),
            torch.device("cpu"),
            torch.autocast("cpu", enabled=False),
            torch.inference_mode(False),
            torch.enable_grad(),
        ):
            torch.manual_seed(0)
            yield
    finally:
        torch.set_default_dtype(dtype)


def _model(inner: Any, config: Any) -> Any:
    kind = next(each for each in type(inner).__mro__ if each.__module__.startswith("transformers.models."))
    model: Any = kind._from_config(config, attn_implementation=attention_of(inner)).float().eval()  # type: ignore[attr-defined]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):  # a state that decays within a token would hide what runs on
                parameter.uniform_(0.05, 0.5).log_()
            else:  # tables and gates that begin as zeros or ones would hide what they are for
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
            if name.endswith("q_norm.weight"):
                parameter.mul_(0.3)  # else softmax may choose one token, and rounding with it
    return model


@dataclass(frozen=True, eq=False)
class _Sample:
    """A sample: ids (L,), positions (axes, L) or None, and tensors that are concatenated along axis 0."""

    ids: torch.Tensor
    marks: torch.Tensor
    positions: torch.Tensor | None
    images: dict[str, torch.Tensor]


def _prove(model: Any, ways: dict[str, Way]) -> Verdict:
    image = _image(model)
    samples = [_sample(model, length, count, image) for length, count in ((23, 1), (30, 2), (17, 0))]
    alone = [_alone(model, sample) for sample in samples]
    loss = sum(_loss(logits, sample.ids) for logits, sample in zip(alone, samples, strict=True))
    expected = _gradients(model, loss)
    wanted = torch.cat([each.detach() for each in alone])
    said: list[str] = []
    for name, way in ways.items():
        try:
            with way(model):
                difference = _difference(model, samples, wanted, expected)
        except UsageError:
            raise
        except Exception as error:  # a way may not fit the model's code at all
            difference = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]:.200}"
        if not difference:
            return Verdict(name, "; ".join(said), image is not None)
        said.append(f"{name}: {difference}")
    return Verdict("", "; ".join(said), image is not None)


def _difference(model: Any, samples: list[_Sample], wanted: torch.Tensor, expected: dict[str, torch.Tensor]) -> str:
    logits = _packed(model, samples)
    lengths = [len(each.ids) for each in samples]
    parts = torch.split(logits, lengths)
    gradients = _gradients(model, sum(_loss(part, each.ids) for part, each in zip(parts, samples, strict=True)))
    apart = float((logits.detach() - wanted).abs().max() / wanted.abs().max())
    if not apart <= TOLERANCE:
        return f"logits of a pack differ from those of its samples by {apart:.1e} of the largest"
    norm = sum(float(each.square().sum()) for each in expected.values()) ** 0.5
    wrong = sum(float((gradients[name] - each).square().sum()) for name, each in expected.items()) ** 0.5
    if not wrong <= TOLERANCE * norm or gradients.keys() != expected.keys():
        return f"gradients of a pack differ from those of its samples by {wrong / norm:.1e} of their norm"
    for number, sample in enumerate(samples[:2]):
        others = [*samples[:number], _changed(sample), *samples[number + 1 :]]
        with torch.no_grad():
            moved = (_packed(model, others) - logits.detach()).abs().amax(dim=-1)
        rows = enumerate(torch.split(moved, lengths))
        leak = max(float(each.max()) for place, each in rows if place != number)
        if not leak <= TOLERANCE * float(wanted.abs().max()):
            return f"a change of one sample moves logits of another by {leak:.1e}"
    return ""


def _changed(sample: _Sample) -> _Sample:
    ids = torch.where(sample.marks == 0, sample.ids.flip(0).clamp(min=_TEXT), sample.ids)
    ids = torch.where((sample.marks == 0) & (ids >= _TEXT + _TEXTS), _TEXT, ids)
    images = {name: -each if each.is_floating_point() else each for name, each in sample.images.items()}
    return _Sample(ids, sample.marks, sample.positions, images)


#: Ids of text in small models: those below are special, see ``cut.reduced_of_any``.
_TEXT, _TEXTS = 256, 200


def _sample(model: Any, length: int, count: int, image: tuple[int, dict[str, torch.Tensor]] | None) -> _Sample:
    low = min(_TEXT, model.config.get_text_config().vocab_size // 2)
    ids, marks = torch.randint(low, low + _TEXTS, (length,)), torch.zeros(length, dtype=torch.long)
    images: dict[str, torch.Tensor] = {}
    if image is not None and count:
        tokens, tensors = image
        for _ in range(count):
            own = torch.full((tokens,), _image_token(model))
            middle = torch.randint(low, low + _TEXTS, (3,))
            ids = torch.cat([ids[:5], own, middle, ids[5:]])
            marks = torch.cat([marks[:5], torch.ones_like(own), torch.zeros_like(middle), marks[5:]])
        for name, each in tensors.items():
            made = [torch.randn_like(each) if each.is_floating_point() else each for _ in range(count)]
            images[name] = _joined(made)
    positions = None
    count_positions = getattr(model.model, "get_rope_index", None)
    if count_positions is not None:
        given = _wanted(count_positions, _tokens(model, ids, marks) | images | {"mm_token_type_ids": marks[None]})
        given["attention_mask"] = torch.ones_like(ids)[None]
        positions = count_positions(**given)[0][:, 0]
    return _Sample(ids, marks, positions, images)


def _joined(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(tensors, dim=1 if tensors[0].ndim == 5 else 0)  # (1, images, channels, height, width)


def _image_token(model: Any) -> int:
    config = model.config
    return int(getattr(config, "image_token_id", None) or config.image_token_index)


def _image(model: Any) -> tuple[int, dict[str, torch.Tensor]] | None:
    """The number of tokens of an image and its tensors; None if no image can be made without the processor."""
    features = getattr(model.model, "get_image_features", None)
    vision = getattr(model.config, "vision_config", None)
    if features is None or vision is None:
        return None
    for tensors in _images(model, vision, inspect.signature(features).parameters):
        with suppress(Exception), torch.no_grad():  # another kind of pixels
            found = features(**_wanted(features, tensors), return_dict=True).pooler_output
            parts = found if isinstance(found, list | tuple) else [found]
            return sum(each.flatten(0, -2).shape[0] for each in parts), tensors
    return None


def _images(model: Any, vision: Any, taken: Any) -> Iterator[dict[str, torch.Tensor]]:
    patch: Any = getattr(vision, "patch_size", 14)
    if "image_grid_thw" in taken and isinstance(patch, int):
        channels: Any = getattr(vision, "in_channels", None) or getattr(vision, "num_channels", 3)
        for frames in {int(getattr(vision, "temporal_patch_size", None) or 1), 1}:
            side = 2 * int(getattr(vision, "spatial_merge_size", 1))
            columns = channels * frames * patch**2
            yield {"pixel_values": torch.randn(side**2, columns), "image_grid_thw": torch.tensor([[1, side, side]])}
        return
    if "image_position_ids" in taken and hasattr(vision, "pooling_kernel_size"):
        side = 2 * vision.pooling_kernel_size
        places = torch.cartesian_prod(torch.arange(side), torch.arange(side))
        yield {"pixel_values": torch.randn(1, side**2, 3 * patch**2), "image_position_ids": places[None]}
        return
    if "spatial_shapes" in taken:
        side = 2 * int(getattr(model.config, "downsample_factor", 1))
        pixels = {"pixel_values": torch.randn(1, side**2, 3 * patch**2), "spatial_shapes": torch.tensor([[side, side]])}
        yield pixels | {"pixel_attention_mask": torch.ones(1, side**2, dtype=torch.long)}
        return
    size = getattr(vision, "image_size", None) or 4 * patch
    height, width = (size, size) if isinstance(size, int) else (int(each) for each in size)
    sizes = {"image_sizes": torch.tensor([[height, width]])}
    for shape in ((1, 3, height, width), (1, 1, 3, height, width)):
        for more in (sizes, {}) if "image_sizes" in taken else ({},):  # encoders of some kinds alone take sizes
            yield {"pixel_values": torch.randn(shape)} | more


def _wanted(function: Any, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    taken = inspect.signature(function).parameters
    return {name: value for name, value in given.items() if name in taken}


def _tokens(model: Any, ids: torch.Tensor, marks: torch.Tensor) -> dict[str, torch.Tensor]:
    """The arguments of a forward that have an entry per token: (1, T)."""
    taken = {**inspect.signature(model.forward).parameters, **inspect.signature(model.model.forward).parameters}
    names = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")
    return {"input_ids": ids[None]} | {name: marks[None] for name in names if name in taken}


def _alone(model: Any, sample: _Sample) -> torch.Tensor:
    if hasattr(model.model, "rope_deltas"):
        model.model.rope_deltas = None
    inputs = _tokens(model, sample.ids, sample.marks) | sample.images
    logits: torch.Tensor = model(**inputs, attention_mask=torch.ones_like(sample.ids)[None], use_cache=False).logits
    return logits[0]


def _packed(model: Any, samples: Sequence[_Sample]) -> torch.Tensor:
    ids, marks = (torch.cat([getattr(each, name) for each in samples]) for name in ("ids", "marks"))
    positions = torch.cat([torch.arange(len(each.ids)) for each in samples])[None]
    own = [each.positions for each in samples if each.positions is not None]
    if own:
        positions = torch.cat([positions, torch.cat(own, dim=1)])[:, None]
    names = dict.fromkeys(name for each in samples for name in each.images)
    images = {name: _joined([each.images[name] for each in samples if each.images]) for name in names}
    inputs = _tokens(model, ids, marks) | images
    logits: torch.Tensor = model(**inputs, position_ids=positions, use_cache=False).logits
    return logits[0]


def _loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return cross_entropy(logits[:-1].float(), ids[1:], reduction="sum")


def _gradients(model: Any, loss: Any) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    loss.backward()
    found = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    model.zero_grad(set_to_none=True)
    return found
