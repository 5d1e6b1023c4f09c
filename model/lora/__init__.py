"""Low-rank adapters (LoRA): what they adapt, how they are computed, and PEFT's files of them."""
