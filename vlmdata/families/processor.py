"""The general family: samples that a Hugging Face processor made, with its tensors as it gave them.

The family knows no model. What it knows of one is learned by running its processor, and stands in the manifest: how the
chat template writes turns, and for each tensor how those of several samples join to that of a pack, and how it is
stored. :mod:`vlmdata.families.tensors` stores, restores and joins them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from vlmdata.families.base import CHANNELS, Family, ImageBoundsError
from vlmdata.families.chat import IMAGE, ChatFormat, Expansion

#: Name of the family in manifests and options.
PROCESSOR = "processor"
#: Kind of the item that holds the tensors of a sample.
TENSORS = "tensors"
#: Rules by which the tensors of samples join to that of a pack.
PER_TOKEN, CONCATENATED = "token", "concatenated"
#: Dtypes of tensors, by name.
DTYPES = ("float32", "bfloat16", "float16", "int64", "int32", "uint8", "bool")
#: Most dimensions of a tensor.
MOST_DIMENSIONS = 6
_VALUES = 256
_SIDE = 8


@dataclass(frozen=True)
class TensorRule:
    """What is known of one tensor of a processor, by its name, an argument of the model.

    Attributes:
        name: Its name.
        dtype: Its dtype, one of :data:`DTYPES`.
        dimensions: Number of its dimensions.
        rule: ``token``: (1, L, …), an entry per token. ``concatenated``: along ``axis``.
        axis: Axis along which the tensors of samples are concatenated.
        filler: What fills the other axes up to the largest of them.
        channels: Channel of the values, if they are colours that 8 bits hold: runs of (channel, length) along
            ``channel_axis``. Empty for other values.
        channel_axis: The axis that ``channels`` are along, from the end: -1 is the last.
    """

    name: str
    dtype: str
    dimensions: int
    rule: str
    axis: int = 0
    filler: float = 0.0
    channels: tuple[tuple[int, int], ...] = ()
    channel_axis: int = -1

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES or self.rule not in (PER_TOKEN, CONCATENATED):
            raise TypeError(f"tensors.{self.name} has the dtype {self.dtype!r} and the rule {self.rule!r}")
        if not (0 <= self.axis < self.dimensions <= MOST_DIMENSIONS and -self.dimensions <= self.channel_axis < 0):
            raise TypeError(f"tensors.{self.name} has {self.dimensions} dimensions, and joins along axis {self.axis}")
        if any(channel not in range(CHANNELS) or count < 1 for channel, count in self.channels):
            raise TypeError(f"tensors.{self.name} has the channels {self.channels!r:.80}")

    @property
    def described(self) -> str:
        """The rule in words, as ``float32, concatenated along axis 0, stored as uint8``."""
        joins = "per token" if self.rule == PER_TOKEN else f"concatenated along axis {self.axis}"
        if self.rule == CONCATENATED and self.filler:
            joins += f", filled with {self.filler:g}"
        return f"{self.dtype}, {joins}" + (", stored as uint8" if self.channels else "")


@dataclass(frozen=True)
class ProcessorFamily(Family):
    """What was learned of a processor.

    A sample with images has one item of the kind ``tensors``: the record of all its tensors, in rows of
    :attr:`patch_bytes` bytes (docs/any-processor.md).

    Attributes:
        tensors: The tensors, in the order of the records.
        colours: Value of each 8-bit value of each channel after rescaling and normalising, (3, 256); empty if the
            processor does not tell them.
    """

    tensors: tuple[TensorRule, ...] = ()
    colours: tuple[tuple[float, ...], ...] = ()

    def expansion(self, kind: str) -> Expansion:
        """See :meth:`Family.expansion`; the item of tensors has no placeholders of its own."""
        return Expansion(TENSORS, "") if kind == TENSORS else super().expansion(kind)

    def token_counts(self, grid_thw: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
        """Returns zeros: the processor alone knows which tokens are of an image."""
        return np.zeros(len(np.asarray(grid_thw).reshape(-1, 3)), np.int64)

    def position_ids(
        self,
        length: int,
        starts: npt.NDArray[np.integer],
        grids: npt.NDArray[np.integer],
        steps: npt.NDArray[np.number] | None = None,
    ) -> npt.NDArray[np.int32]:
        """Returns the order of the tokens on each axis: what a sample without images has."""
        return np.broadcast_to(np.arange(length, dtype=np.int32), (len(self.position_axes), length))

    def require_bounds(self, min_pixels: int, max_pixels: int) -> None:
        """Refuses bounds of a run or of data: the processor has its own.

        Raises:
            ImageBoundsError: If they are not the defaults.
        """
        if (min_pixels, max_pixels) != (self.min_pixels, self.max_pixels):
            raise ImageBoundsError(
                f"min_pixels and max_pixels have no effect in the family {self.name}: the processor sets the sizes of "
                "images, by its preprocessor_config.json; drop them"
            )

    def patchify(self, image: npt.NDArray[np.uint8], out: npt.NDArray[np.uint8] | None = None) -> npt.NDArray[np.uint8]:
        """Returns the rows of a record that codecs take for a picture: its bytes in order."""
        rows = np.broadcast_to(image, (CHANNELS, *image.shape[1:])).reshape(-1, self.patch_bytes)
        if out is None:
            return np.ascontiguousarray(rows)
        out[...] = rows
        return out

    def unpatchify(self, patches: npt.NDArray[np.uint8], grid_h: int, grid_w: int) -> npt.NDArray[np.uint8]:
        """Returns the bytes of a record as a picture, for codecs."""
        return patches.reshape(CHANNELS, grid_h * self.patch_size, grid_w * self.patch_size).copy()

    def to_json(self) -> dict[str, Any]:
        """Returns what was learned, for a manifest, as it is read from one."""
        made: dict[str, Any] = {
            "model_type": self.model_types[0],
            "position_axes": len(self.position_axes),
            "chat": asdict(self.chat),
            "image": self.image.token,
            "tensors": [asdict(each) for each in self.tensors],
            "colours": self.colours,
        }
        read: dict[str, Any] = json.loads(json.dumps(made))
        return read

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """Returns the family of :meth:`to_json`. A manifest may be a stranger's: nothing in it is run.

        Raises:
            KeyError, TypeError: If a field is missing or has another form.
        """
        chat = dict(_typed(fields["chat"], Mapping))
        pairs = {name: chat[name] if chat[name] is None else _texts(chat[name]) for name in ("think", "tool_response")}
        texts = {name: _typed(chat[name], str) for name in _CHAT_TEXTS}
        axes = _typed(fields["position_axes"], int)
        if axes not in (1, 3):
            raise TypeError(f"processor.position_axes is {axes!r}")
        return cls.learned(
            model_type=_typed(fields["model_type"], str),
            chat=ChatFormat(**texts, **pairs, markup=_texts(chat["markup"])),
            image=_typed(fields["image"], str),
            axes=axes,
            tensors=tuple(_rule(_typed(each, Mapping)) for each in _typed(fields["tensors"], list)),
            colours=tuple(tuple(map(float, _typed(each, list))) for each in _typed(fields["colours"], list)),
        )

    @classmethod
    def learned(
        cls,
        *,
        model_type: str,
        chat: ChatFormat,
        image: str,
        axes: int,
        tensors: tuple[TensorRule, ...],
        colours: tuple[tuple[float, ...], ...],
    ) -> Self:
        """Returns the family of a processor.

        Args:
            model_type: ``model_type`` of the model.
            chat: How its template writes turns.
            image: The token that its template writes for an image.
            axes: Axes of positions: 1 or 3.
            tensors: Its tensors.
            colours: See :class:`ProcessorFamily`.
        """
        if colours and [len(values) for values in colours] != [_VALUES] * CHANNELS:
            raise TypeError(f"processor.colours has {[len(values) for values in colours]} values")
        names = [each.name for each in tensors]
        if len(set(names)) < len(names) or (not colours and any(each.channels for each in tensors)):
            raise TypeError(f"processor.tensors are {names!r:.200}")
        return replace(
            cls(**_UNLEARNED),
            model_types=(model_type,),
            chat=chat,
            items=(Expansion(IMAGE, image),),
            position_axes=("t", "h", "w") if axes == CHANNELS else ("position",),
            tensors=tensors,
            colours=colours,
        )


def learned_of(family: Family) -> dict[str, Any]:
    """Returns what a manifest records of a family: what was learned of a processor; nothing of other families."""
    return family.to_json() if isinstance(family, ProcessorFamily) else {}


_CHAT_TEXTS = ("turn_start", "turn_end", "assistant_header", "begin", "end_of_text")


def _typed(value: Any, kind: type) -> Any:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise TypeError(f"processor: {value!r:.80} is not of the type {kind.__name__}")
    return value


def _texts(values: Any) -> Any:
    return tuple(_typed(each, str) for each in _typed(values, list | tuple))  # type: ignore[arg-type]


def _rule(fields: Mapping[str, Any]) -> TensorRule:
    whole = {name: _typed(fields[name], int) for name in ("dimensions", "axis", "channel_axis")}
    texts = {name: _typed(fields[name], str) for name in ("name", "dtype", "rule")}
    runs = tuple((_typed(channel, int), _typed(count, int)) for channel, count in _typed(fields["channels"], list))
    return TensorRule(**texts, **whole, filler=float(fields["filler"]), channels=runs)


_UNLEARNED: dict[str, Any] = {
    "name": PROCESSOR,
    "model_types": (),
    "chat": ChatFormat(turn_start="<|im_start|>", turn_end="<|im_end|>", assistant_header="assistant\n"),
    "items": (Expansion(IMAGE, "<image>"),),
    "patch_size": _SIDE,  # 192 bytes: a row of a record, a multiple of 64
    "merge_size": 1,
    "temporal_patch_size": 1,
    "image_mean": (0.0, 0.0, 0.0),
    "image_std": (1.0, 1.0, 1.0),
    "min_pixels": _SIDE**2,
    "max_pixels": 1 << 40,
    "max_aspect_ratio": float("inf"),
    "position_axes": ("position",),
}
#: The family before anything is learned. Datasets have a learned one.
FAMILY = ProcessorFamily(**_UNLEARNED)
