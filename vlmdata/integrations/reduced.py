"""Small models with every kind of layer of a configuration, which need no weights and no GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vlmdata.integrations.supported import ONE_AXIS

#: Width of the hidden states of a small model; the vision tower has half.
_WIDTH = 128


def reduced(config: Any) -> Any:
    """Returns the configuration of a small model with every kind of layer: widths, heads and experts are cut, too.

    What decides how samples are told apart stays: patches, windows, head sizes, rotary sections, kernel sizes, the
    vocabulary.
    """
    values = config.to_dict()
    text, vision = values["text_config"], values["vision_config"]
    own_head_size = text["model_type"] not in ("qwen2_5_vl_text", "qwen2")  # which divide the width by the heads
    if values["model_type"] == "gemma4":
        text |= _of_full_layers(config.text_config)
        del text["per_layer_config"]
        values["audio_config"] = None
    _reduce_text(text, max(4, len(vision.get("deepstack_visual_indexes") or ()) + 1), own_head_size)
    if values["model_type"] in ONE_AXIS:
        _reduce_rows(vision)
    else:
        _reduce_vision(vision, text["hidden_size"])
    for part in (values, text, vision):
        for name in ("dtype", "torch_dtype", "_attn_implementation", "_name_or_path", "transformers_version"):
            part.pop(name, None)
        part["initializer_range"] = 0.1
    return type(config).from_dict(values)


def _reduce_text(text: dict[str, Any], layers: int, own_head_size: bool) -> None:
    head = text["hidden_size"] // text["num_attention_heads"]
    if own_head_size:
        head = text.get("head_dim") or head
    groups = text["num_attention_heads"] // text["num_key_value_heads"]
    heads = min(2, text["num_key_value_heads"]) if own_head_size else 1
    queries = heads * min(groups, 2)
    kinds = _kinds_of_layers(text)
    distinct = list(dict.fromkeys(kinds))
    chosen = [distinct[number % len(distinct)] for number in range(max(layers, 2 * len(distinct)))]
    if "layer_types" in text:
        text["layer_types"] = [kind for kind, _ in chosen]
    if "mlp_only_layers" in text:
        text["mlp_only_layers"] = [number for number, (_, dense) in enumerate(chosen) if dense]
        text["decoder_sparse_step"] = 1
    text |= {
        "num_hidden_layers": len(chosen),
        "hidden_size": _WIDTH if own_head_size else queries * head,
        "head_dim": head,
        "num_key_value_heads": heads,
        "num_attention_heads": queries,
        "intermediate_size": 2 * _WIDTH,
    }
    if text.get("num_kv_shared_layers"):
        text["num_kv_shared_layers"] = len(chosen) // 2  # layers with keys of each kind, and as many that share them
    if text.get("hidden_size_per_layer_input"):
        text["hidden_size_per_layer_input"] = min(16, text["hidden_size_per_layer_input"])
    if text.get("num_global_key_value_heads"):
        text["num_global_key_value_heads"] = min(heads, text["num_global_key_value_heads"])
    if "linear_num_key_heads" in text:
        ratio = text["linear_num_value_heads"] // text["linear_num_key_heads"]
        keys = min(2, text["linear_num_key_heads"])
        text |= {"linear_num_key_heads": keys, "linear_num_value_heads": keys * min(ratio, 2)}
    if text.get("num_experts"):
        text["num_experts"] = min(8, text["num_experts"])
        for chosen_experts in ("num_experts_per_tok", "top_k_experts"):
            if text.get(chosen_experts):
                text[chosen_experts] = min(2, text[chosen_experts])
        text |= {"moe_intermediate_size": _WIDTH // 2}
        if text.get("shared_expert_intermediate_size"):
            text["shared_expert_intermediate_size"] = _WIDTH // 2


def _of_full_layers(text: Any) -> dict[str, Any]:
    """What Gemma's layers without a window have of their own, as its configuration takes it."""
    full = text.per_layer_config["full_attention"]
    heads = full.num_key_value_heads if text.attention_k_eq_v else None
    return {"global_head_dim": full.head_dim, "num_global_key_value_heads": heads}


def _kinds_of_layers(text: dict[str, Any]) -> Sequence[tuple[str, bool]]:
    """The kind of attention of each layer, and whether it is without experts although others have some."""
    count = text["num_hidden_layers"]
    types = text.get("layer_types") or ["full_attention"] * count
    dense, every = set(text.get("mlp_only_layers") or ()), text.get("decoder_sparse_step") or 1
    return [(types[n], n in dense or ("mlp_only_layers" in text and (n + 1) % every != 0)) for n in range(count)]


def _reduce_vision(vision: dict[str, Any], width: int) -> None:
    deepstack = vision.get("deepstack_visual_indexes")
    depth = max(2, len(deepstack or ()) + 1)
    if deepstack:
        vision["deepstack_visual_indexes"] = list(range(len(deepstack)))
    if vision.get("fullatt_block_indexes"):
        depth = 4
        vision["fullatt_block_indexes"] = [1, 3]
    vision |= {
        "depth": min(depth, vision["depth"]) if not deepstack else depth,
        "hidden_size": _WIDTH // 2,
        "intermediate_size": _WIDTH,
        "num_heads": 2,
        "out_hidden_size": width,
    }


def _reduce_rows(vision: dict[str, Any]) -> None:
    """An encoder that computes images in rows; heads of Gemma's keep their size, of which its rotary axes are parts."""
    vision |= {
        "num_hidden_layers": 2,
        "hidden_size": _WIDTH // 2,
        "intermediate_size": _WIDTH,
        "num_attention_heads": 2,
    }
    if "num_key_value_heads" in vision:
        vision["num_key_value_heads"] = 2


def reduced_of_any(config: Any) -> Any:
    """Returns the configuration of a small model of any kind, as far as its parts have the usual names.

    Windows and chunks are cut, too, so that samples of few tokens are longer than they are.
    """
    values = config.to_dict()
    text, vision = values["text_config"], values.get("vision_config") or {}
    text["num_key_value_heads"] = text.get("num_key_value_heads") or text["num_attention_heads"]
    _reduce_text(text, 2, bool(text.get("head_dim")))
    for name, most in (("sliding_window", 8), ("attention_chunk_size", 16)):
        if text.get(name):
            text[name] = min(most, text[name])
    if "depth" in vision:
        _reduce_vision(vision, text["hidden_size"])
    elif {"num_hidden_layers", "hidden_size"} <= vision.keys():
        _reduce_rows(vision)
        if vision.get("head_dim"):
            vision["head_dim"] = _WIDTH // 4
    for part in (values, text, vision):
        for name in ("dtype", "torch_dtype", "_attn_implementation", "_name_or_path", "transformers_version"):
            part.pop(name, None)
        part["initializer_range"] = 0.1
    return type(config).from_dict(values)
