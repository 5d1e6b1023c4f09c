"""Rollouts: verl and slime get finished prompts by key from a collation service, and process no image again.

    python examples/rollouts.py --out build/rollouts

`KeyedPrompts` is a dataset for verl; without verl installed, it derives from torch's `Dataset`, and batches are joined
as verl's `collate_fn` does. `slime_sample` fills the fields of slime's `Sample` from which its `generate` takes the ids
and the tensors to train on. No rollout is made here, since that needs an inference engine and a GPU.
"""

# %% What to make
import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from vlmdata import open_dataset
from vlmdata.integrations.prompts import Prompts

try:
    from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn
except ImportError:  # what verl asks of a dataset, and how it joins rows
    from torch.utils.data import Dataset as RLHFDataset

    def collate_fn(rows: list[dict[str, Any]]) -> dict[str, Any]:
        """Stacks tensors, and makes object arrays of all else."""
        columns = {name: [row[name] for row in rows] for name in rows[0]}
        tensors = {name: torch.stack(each) for name, each in columns.items() if isinstance(each[0], torch.Tensor)}
        return {name: np.fromiter(each, object, len(each)) for name, each in columns.items()} | tensors


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--out", type=Path, default=Path("build/rollouts"))
parser.add_argument("--rows", type=int, default=12)
given = parser.parse_args()

# %% Draw receipts, convert them, and serve them: once, on a machine with CPU cores
vlmdata = Path(sys.executable).with_name("vlmdata")
size = ["--min-pixels", "50176", "--max-pixels", "100352"]
subprocess.run([vlmdata, "preprocess", "demo", "--limit", str(given.rows), *size, "--out", given.out], check=True)
server = subprocess.Popen([vlmdata, "serve", given.out, "--port", "0", "--ahead", "0", "--workers", "1"],
                          stdout=subprocess.PIPE, text=True)  # fmt: skip
url = server.stdout.readline().split()[-1]


# %% verl: `data.custom_cls.path=examples/rollouts.py data.custom_cls.name=KeyedPrompts data.train_files=grpc://…`
class KeyedPrompts(RLHFDataset):
    """A row for each prompt. Which answer is right, and how it is judged, may stand in `extra_info` under the key."""

    def __init__(self, data_files: Any, tokenizer: Any = None, config: Any = None, processor: Any = None, **_: Any):
        self.prompts = Prompts(data_files if isinstance(data_files, str) else data_files[0], longest=4096)
        self.config, self.tokenizer, self.processor = config, tokenizer, processor

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, number: int) -> dict[str, Any]:
        prompt = self.prompts[number]
        return {
            "index": prompt.key,
            "raw_prompt_ids": prompt.ids,  # for the engine, with the images
            "multi_modal_data": {"image": [Image.fromarray(image) for image in prompt.images]},
            "multi_modal_inputs": prompt.model_inputs,  # for the actor's forward pass
            "dummy_tensor": torch.tensor([0], dtype=torch.uint8),
        }


# %% slime: a data source (`--data-source-path`) makes its samples so
def slime_sample(prompts: Prompts, key: str, sample: Any) -> Any:
    """Fills a `slime.utils.types.Sample`: `generate` keeps tokens and tensors that are there already."""
    prompt = prompts.get(key)
    sample.tokens = prompt.ids
    sample.multimodal_inputs = (
        {"images": [Image.fromarray(image) for image in prompt.images]} if prompt.images else None
    )
    sample.multimodal_train_inputs = prompt.model_inputs or None
    return sample


# %% What was promised: ids and pixels are those of the dataset, to the last bit
try:
    dataset, stored = KeyedPrompts(url), open_dataset(given.out)
    batch = collate_fn([dataset[number] for number in range(len(dataset))])
    for key, ids, inputs in zip(batch["index"], batch["raw_prompt_ids"], batch["multi_modal_inputs"], strict=True):
        sample = stored.sample(key)
        assert ids == sample.input_ids[: len(ids)].tolist()
        assert np.flatnonzero(sample.loss_mask)[0] == len(ids)
        assert torch.equal(inputs["pixel_values"], stored.family.pixel_values(torch.from_numpy(sample.patches.copy())))
        assert inputs["image_grid_thw"].tolist() == sample.image_grid_thw.tolist()
    filled = slime_sample(dataset.prompts, batch["index"][0], argparse.Namespace())
    assert filled.tokens == batch["raw_prompt_ids"][0]
    dataset.prompts.close()
finally:
    server.terminate()
    server.wait()
tokens = sum(map(len, batch["raw_prompt_ids"]))
print(f"{len(batch['index'])} prompts of {tokens} tokens came from the service by key, equal to the stored samples")
