"""Multi-token prediction equals a reference of transformers' layers, put together as vLLM's ``qwen3_5_mtp.py`` does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.model.conftest import Pair
from tests.model.helpers import Sample, mixed_samples, pack, relative
from vlmdata.batch import IGNORE_INDEX

SCALE = 0.3
TOLERANCE = 2e-5  # 1.1e-5 on an AMD EPYC, in the experts' bias of the delta rule


class Reference(torch.nn.Module):
    """``mtp.*`` of a checkpoint, by transformers' classes."""

    def __init__(self, pair: Pair) -> None:
        super().__init__()
        text = copy.deepcopy(pair.theirs.config.text_config)
        if pair.architecture.language.moe is None:
            from transformers.models.qwen3_5 import modeling_qwen3_5 as code

            layer, norm = code.Qwen3_5DecoderLayer, code.Qwen3_5RMSNorm
        else:
            from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as code

            layer, norm = code.Qwen3_5MoeDecoderLayer, code.Qwen3_5MoeRMSNorm
        width = text.hidden_size
        self.fc = torch.nn.Linear(2 * width, width, bias=False)
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.norm = norm(width), norm(width), norm(width)
        self.layers = torch.nn.ModuleList([layer(text, text.layer_types.index("full_attention"))])
        self.load_state_dict({name[4:]: tensor for name, tensor in pair.weights.items() if name.startswith("mtp.")})

    def forward(self, hidden: torch.Tensor, embeddings: torch.Tensor, rotary: Any) -> torch.Tensor:
        following = F.pad(embeddings[:, 1:], (0, 0, 0, 1))
        x = self.fc(torch.cat([self.pre_fc_norm_embedding(following), self.pre_fc_norm_hidden(hidden)], -1))
        x = self.layers[0](x, position_embeddings=rotary, attention_mask=None)
        return self.norm(x[0] if isinstance(x, tuple) else x)


def reference_losses(pair: Pair, reference: Reference, sample: Sample) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Main loss, loss of the token after the next, and what the tokens of the second weigh together."""
    seen: dict[str, Any] = {}
    hook = pair.theirs.model.language_model.register_forward_pre_hook(
        lambda _m, _a, kwargs: seen.update(kwargs), with_kwargs=True
    )
    hidden = pair.theirs.model(**sample.transformers_inputs(), use_cache=False).last_hidden_state
    hook.remove()
    rotary = pair.theirs.model.language_model.rotary_emb(hidden, sample.positions[:, None])
    predicted = reference(hidden, seen["inputs_embeds"], rotary)
    after = torch.cat([sample.labels[1:], torch.tensor([IGNORE_INDEX])])
    weights_after = torch.cat([sample.weights[1:], torch.zeros(1)])
    losses = [
        (
            F.cross_entropy(pair.theirs.lm_head(x)[0], labels, ignore_index=IGNORE_INDEX, reduction="none") * weights
        ).sum()
        for x, labels, weights in ((hidden, sample.labels, sample.weights), (predicted, after, weights_after))
    ]
    return losses[0], losses[1], float(weights_after.sum())


@pytest.mark.parametrize("kind", ["dense", "moe", "tied", "weighted"])
def test_loss_and_all_gradients(kind: str, make_pair: Callable[..., Pair]) -> None:
    from vlmdata.model.weight_names.table import canonical_names

    pair = make_pair(moe=kind == "moe", tied=kind == "tied", mtp=1, mtp_loss_scale=SCALE, moe_aux_loss=0.0)
    reference, samples = Reference(pair), mixed_samples(weighted=kind == "weighted")
    pair.ours(pack(samples, tail=24)).sum().backward()
    total, extra, count = torch.tensor(0.0), torch.tensor(0.0), 0.0
    for sample in samples:
        main, after_next, counted = reference_losses(pair, reference, sample)
        total, extra, count = total + main, extra + after_next, count + counted
    (total + SCALE * extra).backward()
    assert pair.ours.metrics.pop(("mtp_loss",))["mtp_loss"] == pytest.approx(float(extra) / count, rel=TOLERANCE)
    theirs = {name: parameter.grad for name, parameter in pair.theirs.named_parameters()}
    theirs |= {f"mtp.{name}": parameter.grad for name, parameter in reference.named_parameters()}
    names = canonical_names(pair.ours)
    assert {names[name] for name, _ in pair.ours.named_parameters()} == set(pair.maps)
    for name, parameter in pair.ours.named_parameters():
        entry = pair.maps[names[name]]
        wanted = entry.to_mcore([source.take(theirs[source.name]) for source in entry.sources])
        assert relative(parameter.grad, wanted) < TOLERANCE, name


def test_the_loss_may_be_divided_before_the_backward_pass(make_pair: Callable[..., Pair]) -> None:
    pair, batch = make_pair(mtp=1, mtp_loss_scale=SCALE), pack(mixed_samples(), tail=24)
    found = []
    for divisor in (1, 1024):
        pair.ours.zero_grad()
        (pair.ours(batch).sum() / divisor).backward()
        found.append({name: each.grad.clone() * divisor for name, each in pair.ours.named_parameters()})
    assert all(relative(found[1][name], found[0][name]) < TOLERANCE for name in found[0])


def test_image_embeddings_are_seen(make_pair: Callable[..., Pair]) -> None:
    """A token before an image is given the picture's embedding, not the placeholder's: other pixels, another loss."""
    pair = make_pair(mtp=1)
    sample = mixed_samples()[0]
    seen = []
    pair.ours.language.predictor.register_forward_pre_hook(lambda _m, inputs: seen.append(inputs[1].detach()))
    for patches in (sample.patches, 255 - sample.patches):
        pair.ours(pack([Sample(**{**vars(sample), "patches": patches})]))
    changed = (seen[0] != seen[1]).any(-1).flatten().nonzero().flatten()
    start, tokens = int(sample.starts[0]), 4 * 6 // 4
    assert changed.tolist() == list(range(start - 1, start - 1 + tokens))


def test_it_can_be_left_out(make_pair: Callable[..., Pair]) -> None:
    from vlmdata.model.families.qwen3_5.build import build_model
    from vlmdata.model.families.qwen3_5.names import parameter_maps
    from vlmdata.model.network.settings import ModelSettings
    from vlmdata.model.weight_names.table import canonical_names

    pair = make_pair(mtp=1)
    without = build_model(pair.architecture, ModelSettings(mtp_layers=0))
    assert set(canonical_names(without).values()) == set(parameter_maps(pair.architecture, mtp=False))
