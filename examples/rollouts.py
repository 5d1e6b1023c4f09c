"""Rollouts: verl and slime get finished prompts by key from a collation service, and process no image again.

    python examples/rollouts.py --out build/rollouts

`KeyedPrompts` is a dataset for verl, and `Loop`, `Worker` and `Manager` put what was fetched in the place of what verl
would make of messages and images. Without verl installed, stand-ins take the place of its classes. `slime_sample` fills
the fields of slime's `Sample` from which its `generate` takes the text, the images and the tensors to train on. No
rollout is made here, since that needs an inference engine and a GPU.
"""

# %% What to make
import argparse
import asyncio
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoTokenizer

from vlmdata import open_dataset
from vlmdata.integrations.prompts import Prompts
from vlmdata.integrations.verl import KeyedLoop, KeyedPrompts, KeyedWorker, prompts_of

try:
    import ray
    from verl.experimental.agent_loop.agent_loop import AgentLoopManager, AgentLoopWorker
    from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
except ImportError:
    ray, AgentLoopManager, AgentLoopWorker, SingleTurnAgentLoop = None, object, object, object

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--out", type=Path, default=Path("build/rollouts"))
parser.add_argument("--rows", type=int, default=12)


# %% verl: in a module of your own, say my_rollouts.py, and in its configuration
#     data.train_files=grpc://… +data.longest=8192 data.custom_cls.path=my_rollouts.py data.custom_cls.name=Rewarded
#     actor_rollout_ref.rollout.agent.default_agent_loop=keyed
#     actor_rollout_ref.rollout.agent.agent_loop_config_path=loops.yaml  # - {name: keyed, _target_: my_rollouts.Loop}
#     actor_rollout_ref.rollout.agent.agent_loop_manager_class=my_rollouts.Manager
class Rewarded(KeyedPrompts):
    """Adds to a row what the reward needs, by key."""

    def fields(self, key: str) -> dict[str, Any]:
        """The right answer."""
        return {"reward_model": {"style": "rule", "ground_truth": f"the answer of {key}"}}


class Loop(KeyedLoop, SingleTurnAgentLoop):
    """Asks the engine with the ids and images that were fetched."""


class Worker(KeyedWorker, AgentLoopWorker):
    """Trains on the pixels that were fetched."""


class Manager(AgentLoopManager):
    """Starts such workers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.agent_loop_workers_class = ray.remote(Worker)
        super().__init__(*args, **kwargs)


# %% slime: a data source (`--data-source-path`) makes its samples so
def slime_sample(prompts: Prompts, key: str, sample: Any, tokenizer: Any) -> Any:
    """Fills a `slime.utils.types.Sample`: `generate` keeps tokens and tensors that are there already."""
    prompt = prompts.get(key)
    sample.prompt = tokenizer.decode(prompt.engine_ids)  # slime sends the text if there are images, else the tokens
    sample.tokens = list(prompt.ids)
    sample.multimodal_inputs = (
        {"images": [Image.fromarray(image) for image in prompt.images]} if prompt.images else None
    )
    sample.multimodal_train_inputs = prompt.model_inputs or None
    return sample


def run(out: Path, rows: int) -> None:
    """Makes a dataset, serves it, fetches each prompt as verl and slime would, and compares it with the dataset."""
    # Draw receipts, convert them, and serve them: once, on a machine with CPU cores
    vlmdata = Path(sys.executable).with_name("vlmdata")
    size = ["--min-pixels", "50176", "--max-pixels", "100352"]
    subprocess.run([vlmdata, "preprocess", "demo", "--limit", str(rows), *size, "--out", out], check=True)
    server = subprocess.Popen([vlmdata, "serve", out, "--port", "0", "--ahead", "0", "--workers", "1"],
                              stdout=subprocess.PIPE, text=True)  # fmt: skip
    try:
        url = server.stdout.readline().split()[-1]
        compare(url, out)
    finally:
        server.terminate()
        server.wait()


def awaited(coroutine: Any) -> Any:
    """Runs a coroutine in a thread: Jupyter has an event loop of its own in this one."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, coroutine).result()


def compare(url: str, out: Path) -> None:
    """Ids and pixels are those of the dataset, to the last bit, and rollouts of a prompt share them."""
    dataset, stored = Rewarded([url], config={"longest": 4096}), open_dataset(out)
    loop, worker = object.__new__(Loop), object.__new__(Worker)  # verl gives them its configuration
    loop.rollout_config, worker.processor = SimpleNamespace(prompt_length=4096), None
    tokenizer, tokens = AutoTokenizer.from_pretrained(out / "tokenizer"), 0
    for number in range(len(dataset)):
        row = dataset[number]
        several = [awaited(loop.ct_build_initial_tokens(row["raw_prompt"])) for _ in range(4)]
        (ids,) = {tuple(each) for each in several}
        images = awaited(loop.process_multi_modal_info(row["raw_prompt"]))["images"]
        output = SimpleNamespace(extra_fields={"raw_prompt": row["raw_prompt"]})
        inputs = worker._compute_multi_modal_inputs(output, torch.tensor([ids]))
        again = worker._compute_multi_modal_inputs(output, torch.tensor([ids]))
        assert inputs["pixel_values"] is again["pixel_values"]

        sample = stored.sample(row["index"])
        assert list(ids) == sample.input_ids[: len(ids)].tolist()
        assert np.flatnonzero(sample.loss_mask)[0] == len(ids)
        patches = torch.from_numpy(sample.patches.copy())
        assert torch.equal(inputs["pixel_values"], stored.family.pixel_values(patches))
        assert inputs["image_grid_thw"].tolist() == sample.image_grid_thw.tolist()
        patch = stored.family.patch_size
        assert [image.size for image in images] == [(w * patch, h * patch) for _, h, w in sample.image_grid_thw]
        filled = slime_sample(prompts_of(url, 4096), row["index"], SimpleNamespace(), tokenizer)
        assert filled.tokens == list(ids)
        assert filled.prompt.count("<|image_pad|>") == len(images)
        tokens += len(ids)
    prompts_of(url, 4096).close()
    print(f"{len(dataset)} prompts of {tokens} tokens came from the service by key, equal to the stored samples")


if __name__ == "__main__":
    given = parser.parse_args()
    run(given.out, given.rows)
