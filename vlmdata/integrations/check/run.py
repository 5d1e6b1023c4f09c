"""Computes samples alone and packs, with a model and its forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.functional import pad

from vlmdata.batch import PackedBatch
from vlmdata.errors import UsageError, VlmdataError
from vlmdata.integrations.check.own import Checked, Computed, outcome_of, targets_of
from vlmdata.integrations.check.packs import SampleBatch
from vlmdata.integrations.check.record import Listener, Record, RecordedCall, listening
from vlmdata.integrations.supported import MARK_IMAGES, conditional_model, has_one_axis, pixel_dtype

type Gradients = dict[str, torch.Tensor]


@dataclass(frozen=True, eq=False)
class Alone:
    """A sample, computed alone.

    Attributes:
        calls: Its tensors, by name of the module.
        outcome: What the forward pass returned.
    """

    calls: Mapping[str, list[RecordedCall]]
    outcome: Computed


class ForwardError(Exception):
    """The forward pass under test raised an error, which is the cause of this one."""


class Bench:
    """A model under test.

    Attributes:
        model: The model.
        plain: Whether a sample alone is computed by the plain forward of transformers.
    """

    def __init__(self, checked: Checked, device: torch.device, dtype: torch.dtype):
        self.checked, self.device = checked, device
        self.model = checked.model.eval().to(device)
        self.inner = transformers_model(self.model)
        self.plain = checked.alone is None and self.inner is not None
        self.set_dtype(dtype)

    def set_dtype(self, dtype: torch.dtype) -> None:
        """Changes the dtype of all parameters. Buffers, such as rotary frequencies, keep theirs, as when loaded."""
        for parameter in self.model.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)

    def pack(self, data: SampleBatch, listener: Listener | None = None) -> Computed:
        """Computes a pack by the forward under test.

        Raises:
            ForwardError: If it fails.
        """
        return self._run(self.checked.forward, data, listener)

    def alone(self, data: SampleBatch, listener: Listener | None = None) -> Computed:
        """Computes a sample alone, by the reference."""
        if not self.plain:
            return self._run(self.checked.alone or self.checked.forward, data, listener)
        if has_one_axis(self.inner):
            return self._run(partial(self._plain_forward_in_rows, longest=data.longest_image), data, listener)
        return self._run(partial(self._plain_forward, seconds=data.seconds), data, listener)

    def recorded(self, data: SampleBatch) -> Alone:
        """Computes a sample alone, and records all tensors.

        What only the forward under test computes, such as multi-token prediction, is recorded from it.
        """
        record = Record()
        outcome = self.alone(data, record)
        calls = record.finish()
        if self.plain and not is_default(self.checked):
            own = Record()
            theirs = self.pack(data, own)
            calls = own.finish() | calls
            outcome = Computed(outcome.losses, outcome.logits, theirs.mtp, outcome.full)
        return Alone(calls, outcome)

    def gradients(self) -> Gradients:
        """Takes the gradients away from the parameters: float32, on the CPU."""
        found = {}
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                found[name] = parameter.grad.float().cpu()
                parameter.grad = None
        return found

    def _run(self, forward: Callable[[PackedBatch], Any], data: SampleBatch, listener: Listener | None) -> Computed:
        batch = data.batch.to(self.device)
        try:
            if listener is None:
                return outcome_of(forward(batch), batch)
            with listening(self.model, listener):
                found = forward(batch)
        except VlmdataError:
            raise
        except Exception as error:
            raise ForwardError(f"{type(error).__name__}: {error}") from error
        return outcome_of(found, batch)

    def _plain_forward(self, batch: PackedBatch, seconds: Sequence[float]) -> dict[str, Any]:
        """The forward pass of transformers for one sample, which computes its positions by itself."""
        inner = self.inner
        assert batch.input_ids is not None
        inner.model.rope_deltas = None
        inputs: dict[str, Any] = {"input_ids": batch.input_ids, "attention_mask": torch.ones_like(batch.input_ids)}
        ids, kinds = batch.input_ids, inner.config
        if len(batch.host.image_grid_thw) or batch.video_grid_thw is not None:
            inputs["mm_token_type_ids"] = (ids == kinds.image_token_id).int() + 2 * (ids == kinds.video_token_id).int()
        if len(batch.host.image_grid_thw):
            inputs["image_grid_thw"] = batch.image_grid_thw
            inputs["pixel_values"] = batch.pixel_values(inner.model.visual.dtype)
        if batch.video_grid_thw is not None:
            inputs["video_grid_thw"] = batch.video_grid_thw
            inputs["pixel_values_videos"] = batch.pixel_values_videos(inner.model.visual.dtype)
            if kinds.model_type == "qwen2_5_vl":
                inputs["second_per_grid_ts"] = torch.tensor(seconds, device=ids.device)
        return {"logits": inner(**inputs, use_cache=False, logits_to_keep=targets_of(batch)).logits}

    def _plain_forward_in_rows(self, batch: PackedBatch, longest: int) -> dict[str, Any]:
        """The same of models whose positions have one axis. Images have as many rows of patches as in packs."""
        inner, ids = self.inner, batch.input_ids
        assert ids is not None
        inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if inner.config.model_type in MARK_IMAGES:
            inputs["mm_token_type_ids"] = (ids == inner.config.image_token_id).long()
        if len(batch.host.image_grid_thw):
            inputs |= batch.image_inputs(pixel_dtype(inner))
        for name, filling in (("image_position_ids", -1), ("pixel_values", 0)):
            if "image_position_ids" in inputs:
                missing = longest - inputs[name].shape[1]
                inputs[name] = pad(inputs[name], (0, 0, 0, missing), value=filling)
        return {"logits": inner(**inputs, use_cache=False, logits_to_keep=targets_of(batch)).logits}


def transformers_model(model: torch.nn.Module) -> Any:
    """Returns the model of transformers within a model, or None."""
    try:
        return conditional_model(model)
    except UsageError:
        return None


def is_default(checked: Checked) -> bool:
    """Whether the forward is vlmdata's own for models of transformers."""
    return getattr(checked.forward, "is_default", False)


@contextmanager
def exact_float32() -> Iterator[None]:
    """Turns off TF32, which rounds like bfloat16."""
    convolutions, products = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = convolutions, products


def weight_shares(alone: Sequence[SampleBatch]) -> list[float]:
    """The share of each sample in the weight of all targets."""
    weights = [float(each.batch.loss_weights.sum()) for each in alone if each.batch.loss_weights is not None]
    total = sum(weights) or 1.0
    return [each / total for each in weights]
