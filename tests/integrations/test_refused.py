"""What packs in transformers' models refuse, because samples would mix."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.integrations.comparing import Packs, with_images
from tests.integrations.tiny_models import tiny_model
from vlmdata.batch import PackedBatch
from vlmdata.errors import UsageError
from vlmdata.integrations.transformers import packed, packed_inputs, token_losses


class TestRefused:
    @pytest.fixture
    def model(self) -> Any:
        return tiny_model("qwen3_5")

    @pytest.fixture
    def batch(self, packs: Packs) -> PackedBatch:
        return with_images(packs("qwen3_5"))

    def test_a_model_that_is_not_prepared(self, model: Any, batch: PackedBatch) -> None:
        with pytest.raises(UsageError, match=r"Qwen3_5ForConditionalGeneration is not prepared.*with packed\(model\)"):
            token_losses(model, batch)

    def test_other_models(self) -> None:
        with pytest.raises(UsageError, match=r"Linear has no ForConditionalGeneration.*qwen3_5_moe"):
            packed(torch.nn.Linear(1, 1))

    def test_attention_that_may_not_see_boundaries(self, model: Any) -> None:
        model.config.text_config._attn_implementation = "my_attention"
        with pytest.raises(UsageError, match="attn_implementation='my_attention'"):
            packed(model)

    @pytest.mark.parametrize("extra", [{"attention_mask": True}, {"use_cache": True}])
    def test_arguments_with_which_transformers_mixes_samples(
        self, model: Any, batch: PackedBatch, extra: dict[str, Any]
    ) -> None:
        if "attention_mask" in extra:
            extra = {"attention_mask": torch.ones_like(batch.padding_mask, dtype=torch.long)}
        with packed(model), pytest.raises(UsageError, match=r"pack of \d+ segments.*Pass neither"):
            model(**packed_inputs(batch) | extra)

    def test_packs_in_several_rows(self, model: Any, batch: PackedBatch) -> None:
        inputs = {"position_ids": packed_inputs(batch)["position_ids"].expand(4, 2, -1)}
        with packed(model), pytest.raises(UsageError, match="in 2 rows"):
            model(input_ids=torch.ones(2, batch.total_tokens, dtype=torch.long), use_cache=False, **inputs)

    def test_a_batch_of_another_family(self, model: Any, packs: Packs) -> None:
        with packed(model), pytest.raises(UsageError, match="'qwen3_5', and the batch is for the family 'qwen2_5_vl'"):
            token_losses(model, packs("qwen2_5_vl")[0])

    def test_a_slice_of_a_pack(self, model: Any, batch: PackedBatch) -> None:
        with packed(model), pytest.raises(UsageError, match="slice 0 of 2"):
            token_losses(model, batch.context_parallel_shard(0, 2))

    def test_a_batch_without_labels(self, model: Any, batch: PackedBatch) -> None:
        object.__setattr__(batch := batch.clone(), "labels", None)
        with packed(model), pytest.raises(UsageError, match="'tokens' and 'labels'"):
            token_losses(model, batch)

    def test_a_batch_without_pixels(self, model: Any, batch: PackedBatch) -> None:
        object.__setattr__(batch := batch.clone(), "patches", None)
        with packed(model), pytest.raises(ValueError, match="without the part 'pixels'"):
            token_losses(model, batch)


class TestOtherFamilies:
    """Gemma 4 and InternVL."""

    def test_flash_attention_where_images_see_themselves(self) -> None:
        model = tiny_model("gemma4-dense")
        model.config.text_config._attn_implementation = "flash_attention_2"
        with pytest.raises(UsageError, match="'flash_attention_2' does not let the tokens of an image see each other"):
            packed(model)

    def test_tokens_that_see_what_they_predict(self) -> None:
        model = tiny_model("gemma4-small")
        model.config.text_config.use_bidirectional_attention = "all"
        with pytest.raises(UsageError, match="use_bidirectional_attention is 'all'"):
            packed(model)

    def test_other_decoders_of_internvl(self) -> None:
        model = tiny_model("internvl-qwen3")
        model.config.text_config.model_type = "llama"
        with pytest.raises(UsageError, match=r"the decoder of this InternVL is 'llama'.*qwen2, qwen3, qwen3_moe"):
            packed(model)

    def test_a_pack_whose_images_are_not_told(self, packs: Packs) -> None:
        model, batch = tiny_model("gemma4-dense"), with_images(packs("gemma4-dense"))
        inputs = packed_inputs(batch)
        embeds = model.get_input_embeddings()(inputs.pop("input_ids"))
        for name in ("mm_token_type_ids", "pixel_values", "image_position_ids"):
            del inputs[name]
        with packed(model), pytest.raises(UsageError, match="neither mm_token_type_ids nor input_ids"):
            model(inputs_embeds=embeds, **inputs)

    @pytest.mark.parametrize("extra", [{"attention_mask": True}, {"use_cache": True}])
    @pytest.mark.parametrize("variant", ["gemma4-small", "internvl-qwen3"])
    def test_arguments_with_which_transformers_mixes_samples(
        self, variant: str, extra: dict[str, Any], packs: Packs
    ) -> None:
        model, batch = tiny_model(variant), with_images(packs(variant))
        if "attention_mask" in extra:
            extra = {"attention_mask": torch.ones_like(batch.padding_mask, dtype=torch.long)}
        with packed(model), pytest.raises(UsageError, match=r"pack of \d+ segments.*Pass neither"):
            model(**packed_inputs(batch) | extra)

    def test_a_batch_of_another_family(self, packs: Packs) -> None:
        model = tiny_model("gemma4-small")
        with packed(model), pytest.raises(UsageError, match="'gemma4', and the batch is for the family 'internvl'"):
            token_losses(model, packs("internvl-qwen3")[0])


def test_marks_of_images_that_are_missing_are_completed(packs: Packs) -> None:
    """transformers would compute causal attention without them."""
    batch = with_images(packs("gemma4-dense"))
    for implementation in ("sdpa", "eager"):
        model = tiny_model("gemma4-dense")
        model.set_attn_implementation(implementation)
        inputs = packed_inputs(batch)
        with packed(model), torch.no_grad():
            logits = model(**inputs).logits
            del inputs["mm_token_type_ids"]
            assert torch.equal(model(**inputs).logits, logits)
