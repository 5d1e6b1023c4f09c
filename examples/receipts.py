"""Receipts to a fine-tuned model: preprocess, look, train, convert, and load the result in transformers.

    python examples/receipts.py --out build/receipts

The receipts are drawn, the model is tiny and begins with random weights: the loss falls, but it reads no receipts.
"""

# %% What to make
import argparse
import json
import subprocess
import sys
from pathlib import Path

import torch
from transformers import AutoModelForImageTextToText

from vlmdata import StreamingLoader
from vlmdata.integrations.transformers import packed, token_losses

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--out", type=Path, default=Path("build/receipts"))
parser.add_argument("--rows", type=int, default=48)
parser.add_argument("--steps", type=int, default=20)
given = parser.parse_args()


def run(*command: object) -> None:
    """Runs a command and shows it."""
    print("$", *command, flush=True)
    subprocess.run([str(word) for word in command], check=True)


# %% Draw receipts and convert them to two datasets. Rows are held out by a hash of their content.
vlmdata = Path(sys.executable).with_name("vlmdata")
data = given.out / "data"
run(vlmdata, "preprocess", "demo", "--limit", given.rows, "--holdout", 0.2, "--max-pixels", 100_352,
    "--min-pixels", 50_176, "--out", data)  # fmt: skip
run(vlmdata, "verify", data / "train")

# %% What a packed batch holds
with StreamingLoader(data / "train", capacity=2048, global_batch=1) as loader:
    batch = next(iter(loader))
    print(f"{len(batch.sample_keys)} receipts in a pack of {batch.input_ids.numel()} tokens, ", end="")
    print(f"{int(batch.loss_mask.sum())} of them learned; segments {batch.cu_seqlens_padded.tolist()}")

# %% Train and evaluate. On GPUs: torchrun, --hf Qwen/Qwen3.5-9B and --capacity 16384.
trained = given.out / "run"
run(vlmdata, "train", "--data", data / "train", "--eval-data", data / "validation", "--preset", "tiny",
    "--capacity", 2048, "--global-batch", 1, "--steps", given.steps, "--lr", 2e-3, "--out", trained)  # fmt: skip
lines = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
losses = [line["loss"] for line in lines if "grad_norm" in line]
evaluated = [line["loss"] for line in lines if line.get("event") == "evaluation"]
print(f"loss {losses[0]:.2f} at the first step, {losses[-1]:.2f} at the last")

# %% Convert to Hugging Face's format
converted = given.out / "hf"
run(vlmdata, "convert", trained, "--out", converted, "--data", data / "train")

# %% Load it in transformers, and compute the held-out receipts there, packed
model = AutoModelForImageTextToText.from_pretrained(converted, dtype=torch.float32)
with torch.no_grad(), packed(model), StreamingLoader(data / "validation", capacity=2048, global_batch=1) as loader:
    sums = [(float((token_losses(model, batch) * batch.loss_weights).sum()), float(batch.loss_weights.sum()))
            for batch in loader]  # fmt: skip
loss = sum(each for each, _ in sums) / sum(weight for _, weight in sums)
print(f"held-out loss: {evaluated[-1]:.4f} in the trainer, {loss:.4f} in transformers")
assert abs(loss - evaluated[-1]) < 1e-3
