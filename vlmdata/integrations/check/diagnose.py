"""Names the kind of fault behind each difference between a pack and its samples."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import torch

from vlmdata.integrations.check.compare import FORWARD, Difference, Tolerance
from vlmdata.integrations.check.expected import Spot
from vlmdata.integrations.check.packs import UNITS_OF, SampleBatch
from vlmdata.integrations.check.probe import Influence
from vlmdata.integrations.check.record import CONVOLUTION, Site, is_linear_attention, mixes_tokens


class Leak(StrEnum):
    """What is wrong."""

    STATE = "state"
    CONVOLUTION = "convolution"
    ATTENTION = "attention"
    POSITION = "position"
    PIXELS = "pixels"
    DEEPSTACK = "deepstack"
    TOKENS = "tokens"
    LABELS = "labels"
    MTP = "mtp"
    STALE = "stale"
    OTHER = "other"


#: Usual cause of each kind, and what to do.
REMEDIES: Mapping[Leak, str] = {
    Leak.STATE: "The delta rule starts without cu_seqlens, so the state of a sample runs on into the next. Pass "
    "batch.cu_seqlens_padded to the kernel, or call it once per sample.",
    Leak.CONVOLUTION: "The short convolution ignores the borders of samples. Give it seq_idx or cu_seqlens, put "
    "zeros between samples, or call it once per sample.",
    Leak.ATTENTION: "Attention sees the whole pack. Pass batch.cu_seqlens_padded to a flash attention, or a "
    "block-diagonal causal mask to another. If images see themselves in both directions, the mask must let them.",
    Leak.POSITION: "The rotary positions are not those of the sample alone. Pass batch.position_ids unmodified; they "
    "start at 0 in each sample.",
    Leak.PIXELS: "Image tokens hold the features of other pixels. Pass pixel_values and image_grid_thw in the order of "
    "the batch, and put the features at the image tokens in that order.",
    Leak.DEEPSTACK: "The deepstack features are added to other rows than their image tokens. Use the mask of the "
    "image tokens of this pack, and features in the order of the batch.",
    Leak.TOKENS: "The model embeds other tokens than those of the batch. Pass batch.input_ids unmodified.",
    Leak.LABELS: "The loss has other targets or weights than the samples. batch.labels is already shifted: compare "
    "token i's logits with label i, and weigh by batch.loss_weights.",
    Leak.MTP: "Multi-token prediction reaches over the border of a sample. Shift tokens and labels within each "
    "sample, and take no loss of its last tokens.",
    Leak.STALE: "The forward pass used something that an earlier call left behind, such as the lengths of another "
    "pack. Compute it from the batch of each call.",
    Leak.OTHER: "A module computes something else in a pack than alone. Look at the code of the named place.",
}


@dataclass(frozen=True)
class Diagnosis:
    """A fault of the model with packs.

    Attributes:
        kind: What is wrong.
        place: The first module or function that is wrong.
        detail: Which of its tensors, in words.
        phase: ``forward`` or ``backward``.
        error: Largest relative error.
        tolerance: The largest error that would be no fault.
        places: How many places have a fault of this kind.
        sample: Key of the sample with the largest error, or "".
        row: Number of the row in that sample, or -1.
        unit: What a row is.
        rows: How many rows are wrong.
        crosses: Whether values of one sample reach another; None: not known.
        evidence: How that was found out, in words.
    """

    kind: Leak
    place: str
    detail: str
    phase: str
    error: float
    tolerance: float
    places: int = 1
    sample: str = ""
    row: int = -1
    unit: str = ""
    rows: int = 0
    crosses: bool | None = None
    evidence: str = ""

    @property
    def remedy(self) -> str:
        """Usual cause, and what to do."""
        return REMEDIES[self.kind]


@dataclass(frozen=True, eq=False)
class Scene:
    """What is known of a pack when its differences are named.

    Attributes:
        data: The pack.
        places: Its places by name.
        influences: How far samples reach into others, by name of a place.
    """

    data: SampleBatch
    places: Mapping[str, Site]
    influences: Mapping[str, Influence]


def owner_of(difference: Difference) -> str:
    """Name of the place whose code made a wrong tensor: of an input, the caller's."""
    spot = difference.spot
    return difference.caller if spot.given else spot.place


def kind_of(difference: Difference, scene: Scene, tolerance: Tolerance) -> Leak:
    """Names the kind of a difference."""
    spot, unit = difference.spot, difference.unit
    place = scene.places.get(spot.place)
    if place is None:  # what the forward pass returned
        by_path = {"loss": Leak.LABELS, "logits": Leak.OTHER}
        return by_path.get(spot.path, Leak.MTP)
    if place.function:
        return _by_function(place.function)
    if "mtp" in spot.place:
        return Leak.MTP
    for found in (_by_path(spot.path, spot.given, unit), _by_module(place.module, spot.given, spot.place)):
        if found is not None:
            return found
    wrong = difference.rows > tolerance.of(spot)
    images = wrong & _image_rows(scene.data, unit)
    if spot.path == "inputs_embeds":
        return Leak.PIXELS if bool(images.any()) else Leak.TOKENS
    return _by_owner(owner_of(difference), scene, bool(images.any()), bool(images.any()) and torch.equal(images, wrong))


def _by_path(path: str, given: bool, unit: str) -> Leak | None:
    if unit == "target":
        return Leak.LABELS
    if path == "image_hidden_states":
        return Leak.PIXELS
    if not given:
        return None
    if "deepstack" in path or path == "visual_pos_masks":
        return Leak.DEEPSTACK
    if "position_ids" in path or "position_embeddings" in path:
        return Leak.PIXELS if unit == "image" else Leak.POSITION
    return None


def _by_module(module: torch.nn.Module, given: bool, name: str) -> Leak | None:
    kind = type(module).__name__
    if "Rotary" in kind:
        return Leak.POSITION
    if given and name.rpartition(".")[2] in ("visual", "vision_model", "vision_tower", "patch_embed", "patch_embedder"):
        return Leak.PIXELS
    if given and isinstance(module, torch.nn.Embedding):
        return Leak.PIXELS if _is_vision(name) else Leak.TOKENS
    return None


def _by_owner(owner: str, scene: Scene, at_images: bool, only_images: bool) -> Leak:
    """Names the kind of a wrong tensor by the module whose code made it, and by whether rows of images are wrong."""
    place = scene.places.get(owner)
    if place is None:
        return Leak.PIXELS if only_images else Leak.OTHER
    kind = type(place.module).__name__
    if is_linear_attention(place.module):
        influence = scene.influences.get(owner)
        only_near = influence is not None and influence.near and not influence.far
        return Leak.CONVOLUTION if only_near else Leak.STATE
    if "Attention" in kind:
        return Leak.ATTENTION
    if _is_vision(owner):
        return Leak.PIXELS
    if at_images and hasattr(place.module, "layers"):
        return Leak.DEEPSTACK
    return Leak.OTHER


def _is_vision(name: str) -> bool:
    return any(part.startswith(("visual", "vision", "embed_vision", "multi_modal")) for part in name.split("."))


def _image_rows(data: SampleBatch, unit: str) -> torch.Tensor:
    if unit == "token":
        return data.vision_tokens
    return torch.full((data.totals[unit],), any(unit in units for units in UNITS_OF.values()))


def probed_places(differences: Sequence[Difference], places: Mapping[str, Site]) -> frozenset[str]:
    """Places of which to find out how far samples reach into others: wrong ones that mix tokens, of attention one."""
    found: dict[str, None] = {}
    attention = ""
    for difference in sorted(differences, key=lambda each: each.order):
        name = owner_of(difference)
        place = places.get(name)
        if place is not None and mixes_tokens(place):
            attention = attention or ("" if is_linear_attention(place.module) else name)
            if is_linear_attention(place.module) or name == attention:
                found[name] = None
    return frozenset(found)


def findings_of(differences: Sequence[Difference], scene: Scene, tolerance: Tolerance) -> list[Diagnosis]:
    """Groups the differences of a pack by kind, in order of the first of each."""
    groups: dict[Leak, list[Difference]] = {}
    for difference in sorted(differences, key=lambda each: each.order):
        groups.setdefault(kind_of(difference, scene, tolerance), []).append(difference)
    found = [_finding(kind, group, scene, tolerance) for kind, group in groups.items()]
    return found + [each for each in _reaching(scene) if each.kind not in groups]


def _reaching(scene: Scene) -> list[Diagnosis]:
    """Faults of places through which samples reach others by less than the tolerance."""
    reaching = {name: each for name, each in scene.influences.items() if each.crosses}
    found: dict[Leak, Diagnosis] = {}
    for name in sorted(reaching, key=list(scene.places).index):
        place, influence = scene.places[name], reaching[name]
        if not place.function and any(other.startswith(f"{name}.") for other in scene.influences):
            continue  # one of its functions is the place
        kind = _by_function(place.function) if place.function else _by_owner(name, scene, False, False)
        by_kind = {kind: influence}
        if kind is Leak.STATE and influence.convolution is not None:
            by_kind[Leak.CONVOLUTION] = influence.convolution
        for kind, influence in by_kind.items():
            places = found[kind].places + 1 if kind in found else 1
            first = found.get(kind) or Diagnosis(kind, name, "its output", "forward", influence.largest, 0.0)
            found[kind] = replace(
                first, places=places, crosses=True, evidence=first.evidence or _reach_words(influence)
            )
    return list(found.values())


def _by_function(name: str) -> Leak:
    return Leak.CONVOLUTION if CONVOLUTION.search(name) else Leak.STATE


def _finding(kind: Leak, group: Sequence[Difference], scene: Scene, tolerance: Tolerance) -> Diagnosis:
    first = group[0]
    spot, owner = first.spot, owner_of(first)
    crosses, evidence = _evidence(first, scene)
    allowed = tolerance.of(spot)
    return Diagnosis(
        kind=kind,
        place=owner or "forward",
        detail=_words(spot),
        phase="forward",
        error=first.error,
        tolerance=allowed,
        places=len({owner_of(each) for each in group}),
        sample=scene.data.rows[first.sample].key,
        row=first.row,
        unit=first.unit,
        rows=int((first.rows > allowed).sum()),
        crosses=crosses,
        evidence=evidence,
    )


def _words(spot: Spot) -> str:
    if spot.given:
        return f"argument {spot.path} of {spot.place}"
    return f"output {spot.path}" if spot.place == FORWARD else "its output"


def _evidence(difference: Difference, scene: Scene) -> tuple[bool | None, str]:
    """Whether values of one sample reach another, and how that was found out."""
    key = scene.data.rows[difference.sample].key
    influence = scene.influences.get(owner_of(difference))
    if influence is not None:
        if not influence.crosses:
            return False, "noise in one sample changes no other: the values are wrong, but nothing leaks"
        return True, _reach_words(influence)
    if difference.source:
        return True, f"{difference.unit} {difference.row} of sample {key} has the values of sample {difference.source}"
    if difference.values:
        return None, f"{difference.unit} {difference.row} of sample {key} has {difference.values}"
    last = scene.data.rows[difference.sample].count(difference.unit) - 1
    if difference.spot.path == "loss" and difference.row == last:
        return True, f"the last token of sample {key} has a target, which is of the next sample"
    return None, ""


def _reach_words(influence: Influence) -> str:
    one, other = influence.pairs[0]
    part = {(True, False): "the last tokens of "}.get((influence.near, influence.far), "")
    return f"noise in {part}sample {one} changes sample {other}"


def backward_finding(wrong: Mapping[str, tuple[float, float]], parameters: Collection[str], scene: Scene) -> Diagnosis:
    """Names the first fault of a backward pass whose forward pass is right.

    Args:
        wrong: Error and tolerance of each parameter with a wrong gradient.
        parameters: All parameters with a gradient. If the last of them is wrong, so is the loss.
        scene: The pack. Its places are in the order of the forward pass.
    """
    order = {name: number for number, name in enumerate(scene.places)}

    def when(parameter: str) -> int:
        name = parameter.rpartition(".")[0]
        while name and name not in order:
            name = name.rpartition(".")[0]
        return order.get(name, -1)

    last = max(wrong, key=when)  # the backward pass begins at the end
    error, allowed = wrong[last]
    place = last.rpartition(".")[0]
    if when(last) == max(map(when, parameters)):
        detail = f"gradient of {last}, the last in the forward pass"
        return Diagnosis(Leak.LABELS, FORWARD, detail, "backward", error, allowed, places=len(wrong))
    owner = place
    while owner and not mixes_tokens(scene.places.get(owner)):
        owner = owner.rpartition(".")[0]
    kind = _by_owner(owner, scene, False, False) if owner else Leak.OTHER
    return Diagnosis(kind, owner or place, f"gradient of {last}", "backward", error, allowed, places=len(wrong))
