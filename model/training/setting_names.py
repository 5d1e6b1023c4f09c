"""What somebody means who names a setting that there is not: the word of another trainer, or a slip."""

from __future__ import annotations

import difflib
from collections.abc import Collection

#: Words of Hugging Face's Trainer, of Megatron-LM and of common speech, by the setting they mean.
_WORDS: dict[str, str] = {
    "data.paths": "data data_path data_dir train_data train_data_path train_file dataset dataset_name dataset_path",
    "data.blend": "weights_of_data data_weights dataset_weights mixture_weights interleave_probs",
    "data.capacity": "seq_length seq_len max_length max_seq_length max_seq_len sequence_length model_max_length "
    "block_size cutoff_len context_length max_tokens",
    "data.global_batch": "batch_size global_batch_size train_batch_size micro_batch_size per_device_train_batch_size "
    "gradient_accumulation_steps grad_accumulation_steps accumulate_grad_batches",
    "data.workers": "num_workers dataloader_num_workers",
    "model.preset": "size model_size",
    "model.hf": "model_name model_name_or_path pretrained_model_name_or_path model_path hf_model",
    "model.weights": "load init_from load_from checkpoint pretrained_checkpoint from_pretrained",
    "model.freeze": "frozen freeze_vision freeze_vision_tower freeze_vit freeze_llm freeze_language freeze_projector",
    "model.recompute": "gradient_checkpointing activation_checkpointing recompute_granularity recompute_activations",
    "model.mtp": "mtp_num_layers mtp_num_hidden_layers multi_token_prediction",
    "model.moe_aux_loss": "moe_aux_loss_coeff router_aux_loss_coef",
    "model.backend": "attn_implementation attention_backend transformer_impl",
    "parallel.tp": "tensor_model_parallel_size tensor_parallel_size tensor_parallel tp_size",
    "parallel.vision_tp": "encoder_tensor_model_parallel_size vision_tensor_parallel vision_tensor_parallel_size",
    "parallel.sp": "sequence_parallel",
    "parallel.cp": "context_parallel_size context_parallel cp_size",
    "parallel.pp": "pipeline_model_parallel_size pipeline_parallel_size pipeline_parallel pp_size",
    "parallel.ep": "expert_model_parallel_size expert_parallel_size expert_parallel ep_size",
    "parallel.cp_comm": "cp_comm_type",
    "optimizer.lr": "learning_rate max_lr peak_lr",
    "optimizer.min_lr": "min_learning_rate end_lr final_lr",
    "optimizer.warmup_steps": "num_warmup_steps lr_warmup_iters lr_warmup_steps warmup_iters warmup_ratio warmup",
    "optimizer.decay_steps": "lr_decay_iters lr_decay_steps",
    "optimizer.schedule": "lr_scheduler_type lr_scheduler lr_decay_style scheduler",
    "optimizer.weight_decay": "wd decay",
    "optimizer.beta1": "adam_beta1",
    "optimizer.beta2": "adam_beta2",
    "optimizer.eps": "adam_epsilon adam_eps epsilon",
    "optimizer.clip_grad": "max_grad_norm grad_clip gradient_clip_val gradient_clipping clip_grad_norm",
    "optimizer.distributed": "use_distributed_optimizer distributed_optimizer zero zero_stage",
    "optimizer.overlap": "overlap_grad_reduce",
    "run.out": "output_dir out_dir save save_dir checkpoint_dir logging_dir",
    "run.steps": "max_steps train_iters train_steps num_train_steps num_steps total_steps max_iters iterations "
    "num_train_epochs num_epochs epochs max_epochs",
    "run.precision": "bf16 fp16 fp32 dtype torch_dtype mixed_precision params_dtype",
    "run.save_every": "save_steps save_interval checkpoint_interval",
    "data.eval_paths": "eval_data eval_dataset eval_file validation_data validation_file val_data val_dataset "
    "valid_data_path valid_data",
    "run.eval_every": "eval_steps eval_interval eval_strategy val_check_interval validation_steps",
    "run.keep_best": "load_best_model_at_end save_best save_best_model",
    "run.keep": "save_total_limit keep_last",
    "run.wandb": "wandb_project report_to",
    "run.tensorboard": "tensorboard_dir",
    "run.timeout_minutes": "ddp_timeout distributed_timeout_minutes",
}

#: Where the setting is not just another word for the same.
_NOTES: dict[str, str] = {
    "data.capacity": "the most tokens of a pack, in which samples lie side by side",
    "data.global_batch": "packs per step over all ranks; a micro-batch is one pack of up to data.capacity tokens, and "
    "each data-parallel rank makes its share of them one after the other",
    "run.steps": "optimizer steps in all; a run begins by saying how many make an epoch",
    "optimizer.warmup_steps": "in steps",
}

_MEANT = {word: setting for setting, words in _WORDS.items() for word in words.split()}


def meant(name: str, known: Collection[str]) -> str:
    """What to write instead of a name, for an error message.

    Args:
        name: What was written, with or without a group.
        known: All settings, as ``group.name``.
    """
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
