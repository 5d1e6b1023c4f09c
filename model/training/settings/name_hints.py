"""Suggests the setting for an unknown name: the name in another trainer, or the closest spelling."""

from __future__ import annotations

import difflib
from collections.abc import Collection

#: Names in Hugging Face's Trainer and Megatron-LM that are not close to ours in spelling.
_WORDS: dict[str, str] = {
    "data.paths": "data_path train_data_path dataset_name train_file",
    "data.capacity": "seq_length max_length max_seq_length model_max_length cutoff_len",
    "data.global_batch": "micro_batch_size per_device_train_batch_size gradient_accumulation_steps",
    "data.eval_paths": "eval_dataset valid_data_path validation_file",
    "model.hf": "model_name_or_path pretrained_model_name_or_path",
    "model.weights": "load pretrained_checkpoint init_from",
    "model.recompute": "gradient_checkpointing activation_checkpointing",
    "model.backend": "attn_implementation attention_backend transformer_impl",
    "lora.rank": "lora_r r lora_rank",
    "lora.targets": "target_modules lora_target lora_target_modules",
    "lora.rslora": "use_rslora",
    "lora.weights": "adapter_name_or_path",
    "lora.base": "qlora load_in_4bit quantization_bit quant_method bnb_4bit_quant_type",
    "parallel.tp": "tensor_model_parallel_size tensor_parallel_size",
    "parallel.vision_tp": "encoder_tensor_model_parallel_size",
    "parallel.sp": "sequence_parallel",
    "parallel.cp": "context_parallel_size",
    "parallel.pp": "pipeline_model_parallel_size pipeline_parallel_size",
    "parallel.ep": "expert_model_parallel_size expert_parallel_size",
    "optimizer.lr": "learning_rate",
    "optimizer.warmup_steps": "lr_warmup_iters warmup_ratio",
    "optimizer.decay_steps": "lr_decay_iters",
    "optimizer.schedule": "lr_scheduler_type lr_decay_style",
    "optimizer.clip_grad": "max_grad_norm gradient_clip_val",
    "optimizer.distributed": "use_distributed_optimizer zero_stage",
    "run.out": "output_dir save_dir checkpoint_dir save",
    "run.steps": "max_steps train_iters num_train_epochs epochs",
    "run.precision": "bf16 fp16 dtype torch_dtype",
    "run.save_every": "save_steps save_interval",
    "run.eval_every": "eval_steps eval_interval",
    "run.keep_best": "load_best_model_at_end",
    "run.keep": "save_total_limit",
    "run.wandb": "report_to",
    "run.timeout_minutes": "ddp_timeout",
}

#: Notes for settings that differ in meaning from the other trainer's.
_NOTES: dict[str, str] = {
    "data.capacity": "the largest number of tokens in a pack of samples",
    "data.global_batch": "packs per step over all ranks; a micro-batch is one pack of up to data.capacity tokens, and "
    "each data-parallel rank processes its share one by one",
    "run.steps": "total optimizer steps; a run prints the steps per epoch at the start",
    "optimizer.warmup_steps": "in steps",
}

_MEANT = {word: setting for setting, words in _WORDS.items() for word in words.split()}


def meant(name: str, known: Collection[str]) -> str:
    """Returns a suggestion for an unknown name, for an error message."""
    last = name.rpartition(".")[2].strip("-").replace("-", "_").lower()
    same = sorted(each for each in known if each.partition(".")[2] == last)
    if not same and last in _MEANT:
        same = [_MEANT[last]]
    if same:
        note = f" ({_NOTES[same[0]]})" if same[0] in _NOTES else ""
        return f"it is {' or '.join(map(repr, same))}{note}"
    by_key = _MEANT | {each.partition(".")[2]: each for each in sorted(known)}
    near = [by_key[each] for each in difflib.get_close_matches(last, by_key, 1, 0.75)]
    return f"the nearest is {(near or difflib.get_close_matches(name, known, 1, 0.0))[0]!r}"
