"""Deepstack: features of images and videos that the first decoder layers add to their outputs.

Mirrors ``_deepstack_process`` of transformers' ``Qwen3VLTextModel``. The features of a placeholder are the merged
outputs of some blocks of the vision tower, one for each of the first layers.

Shapes: tokens on this rank t, placeholders among them m, layers that still add features k, hidden H.
"""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from vlmdata.model.parallel.packed import PackParams


class DeepstackLayer(TransformerLayer):
    """A decoder layer that adds the first of the remaining features and hands on the others.

    megatron-core passes ``context`` from layer to layer, beside the hidden states and through recomputation, for
    cross-attention. These layers have none, so it is free for the features.
    """

    def forward(self, *args: Any, context: Tensor | None = None, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Computes the layer.

        Args:
            args: See ``TransformerLayer.forward``.
            context: (m, k, H), features in the order of ``packed_seq_params.item_tokens``; None without any.
            kwargs: See ``TransformerLayer.forward``; ``packed_seq_params`` must be the pack.

        Returns:
            Hidden states (t, 1, H), and the features of the layers that follow, or None.
        """
        hidden, _ = super().forward(*args, **kwargs)
        if context is None:
            return hidden, None
        pack = kwargs["packed_seq_params"]
        assert isinstance(pack, PackParams)
        assert pack.item_tokens is not None
        hidden = hidden.index_add(0, pack.item_tokens, context[:, :1])
        return hidden, context[:, 1:] if context.shape[1] > 1 else None
