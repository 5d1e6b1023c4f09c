"""Packed batches in a model of transformers, with a training loop of your own.

    python examples/transformers_packs.py --out build/packs

The loss of a pack is that of its samples: nothing leaks from one sample into the next. A tiny Qwen3.5 with random
weights stands for `AutoModelForImageTextToText.from_pretrained("Qwen/Qwen3.5-9B")`.
"""

# %% What to make
import argparse
import subprocess
import sys
from itertools import islice
from pathlib import Path

import torch
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

from vlmdata import StreamingLoader
from vlmdata.integrations.steps import optimizer_steps, step_loss, step_weight
from vlmdata.integrations.transformers import packed, token_losses

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--out", type=Path, default=Path("build/packs"))
parser.add_argument("--rows", type=int, default=24)
parser.add_argument("--steps", type=int, default=8)
given = parser.parse_args()

# %% Draw receipts and convert them
vlmdata = Path(sys.executable).with_name("vlmdata")
size = ["--min-pixels", "50176", "--max-pixels", "100352"]
subprocess.run([vlmdata, "preprocess", "demo", "--limit", str(given.rows), *size, "--out", given.out], check=True)

# %% A model whose ids fit the dataset's tokenizer
loader = StreamingLoader(given.out, capacity=2048, global_batch=1)
tokenizer = loader.datasets[0].manifest.tokenizer
torch.manual_seed(0)
model = Qwen3_5ForConditionalGeneration(
    Qwen3_5Config(
        image_token_id=tokenizer.image,
        text_config={
            "vocab_size": tokenizer.vocab_size,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 64,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2],
                                "mrope_interleaved": True, "partial_rotary_factor": 0.25},
        },
        vision_config={"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64,
                       "num_position_embeddings": 256},
    )
)  # fmt: skip

# %% Train: one optimizer step after another, with the mean loss over all targets of the step
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
packed(model)
for number, batches in enumerate(islice(optimizer_steps(loader), given.steps), start=1):
    weight = step_weight(batches)
    losses = [step_loss(token_losses(model, batch), batch, weight) for batch in batches]
    for loss in losses:
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    mean, receipts = sum(loss.item() for loss in losses), sum(len(batch.sample_keys) for batch in batches)
    print(f"step {number}: loss {mean:.3f}, {receipts} receipts")


# %% What was promised: whatever shares its pack, a receipt has the same loss
@torch.no_grad()
def loss_of_each(capacity: int) -> dict[str, float]:
    """The sum of the losses of each receipt, in packs of this capacity."""
    found = {}
    with StreamingLoader(given.out, capacity=capacity, global_batch=1) as loader:
        for batch in loader:
            losses, bounds = token_losses(model, batch), batch.cu_seqlens_padded.tolist()
            for number, key in enumerate(batch.sample_keys):
                found[key] = float(losses[bounds[number] : bounds[number + 1]].sum())
    return found


one, two = loss_of_each(capacity=2048), loss_of_each(capacity=4096)
furthest = max(abs(one[key] - two[key]) / one[key] for key in one)
print(f"{len(one)} receipts, in packs of 2,048 and of 4,096 tokens: their losses differ by at most {furthest:.1e}")
assert furthest < 1e-4
