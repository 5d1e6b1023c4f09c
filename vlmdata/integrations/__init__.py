"""Packed batches in other people's models and trainers. Nothing else in vlmdata imports this package.

- :mod:`vlmdata.integrations.transformers` computes packs with the models of transformers.
- :mod:`vlmdata.integrations.trainer` trains transformers' ``Trainer``, and trainers built on it, on packs.
- :mod:`vlmdata.integrations.megatron_bridge` makes batches of Megatron-Bridge.
- :mod:`vlmdata.integrations.prompts` gets single samples by key, for rollouts.
- :mod:`vlmdata.integrations.steps` groups batches into optimizer steps, and weighs their losses.
"""
