"""Prompts fetched by key against those that verl makes, with verl's own dataset, agent loop and worker.

Skipped without verl: ``make adapters NAMES=verl`` installs it. No engine answers: a stand-in returns three tokens.
"""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from vlmdata.cli.main import main
from vlmdata.errors import UsageError
from vlmdata.integrations.prompts import Prompts
from vlmdata.integrations.verl import KeyedLoop, KeyedPrompts, KeyedWorker, prompts_of

pytest.importorskip("verl", reason="make adapters NAMES=verl")

from verl.experimental.agent_loop.agent_loop import AgentLoopWorker, DictConfigWrap
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn
from verl.utils.tokenizer import hf_processor, hf_tokenizer
from verl.workers.rollout.replica import TokenOutput

ANSWER = [11, 12, 13]
#: Width and height of the images of each row. qwen-vl-utils leaves these sizes as they are.
SIZES: list[list[tuple[int, int]]] = [[(256, 320)], [], [(288, 288), (320, 256)], [(512, 96)], [(128, 160)] * 3]
PIXELS = {"shortest_edge": 16_384, "longest_edge": 131_072}
CHAT = {"enable_thinking": False}  # as in the samples: no thought before the answer


class Loop(KeyedLoop, SingleTurnAgentLoop):
    """As a user writes it."""


class Worker(KeyedWorker, AgentLoopWorker):
    """As a user writes it."""


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    """Questions about images, with the bytes of the images and an answer."""
    generator, made = np.random.default_rng(0), []
    for number, sizes in enumerate(SIZES):
        images = []
        for width, height in sizes:
            stream = io.BytesIO()
            Image.fromarray(generator.integers(0, 256, (height, width, 3), np.uint8)).save(stream, "PNG")
            images.append(stream.getvalue())
        made.append({"text": "<image>" * len(sizes) + f"Which number is {number}?", "images": images})
    return made


@pytest.fixture(scope="module")
def data(rows: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The dataset of the rows, for Qwen3-VL. An answer is wanted, and prompts end before it."""
    folder = tmp_path_factory.mktemp("verl")
    lines = []
    for number, row in enumerate(rows):
        names = [f"{number}-{place}.png" for place in range(len(row["images"]))]
        for name, image in zip(names, row["images"], strict=True):
            (folder / name).write_bytes(image)
        turns = [{"role": "user", "content": row["text"]}, {"role": "assistant", "content": "-"}]
        lines.append(json.dumps({"messages": turns, "images": names}))
    (folder / "rows.jsonl").write_text("\n".join(lines))
    limits = ["--min-pixels", str(PIXELS["shortest_edge"]), "--max-pixels", str(PIXELS["longest_edge"])]
    chosen = ["--family", "qwen3_vl", "--tokenizer", "embedded", *limits]
    command = [
        "vlmdata",
        "preprocess",
        folder / "rows.jsonl",
        "--image-root",
        folder,
        *chosen,
        "--out",
        folder / "data",
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", [str(word) for word in command])
        with pytest.raises(SystemExit) as ended:
            main()
    assert not ended.value.code
    return folder / "data"


@pytest.fixture(scope="module")
def model(data: Path) -> Path:
    """A folder with the configuration and the processor of a Qwen3-VL that has the dataset's tokenizer."""
    from transformers import (
        AutoTokenizer,
        Qwen2VLImageProcessor,
        Qwen3VLConfig,
        Qwen3VLProcessor,
        Qwen3VLVideoProcessor,
    )

    folder, tokenizer = data.with_name("model"), AutoTokenizer.from_pretrained(data / "tokenizer")
    half = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    images = Qwen2VLImageProcessor(patch_size=16, merge_size=2, size=PIXELS, **half)
    template = tokenizer.chat_template
    Qwen3VLProcessor(images, tokenizer, Qwen3VLVideoProcessor(), chat_template=template).save_pretrained(folder)
    tokens = {"image": "<|image_pad|>", "video": "<|video_pad|>", "vision_start": "<|vision_start|>"}
    ids = {f"{name}_token_id": tokenizer.convert_tokens_to_ids(token) for name, token in tokens.items()}
    Qwen3VLConfig(**ids).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def config() -> Any:
    from omegaconf import OmegaConf

    rollout = {"prompt_length": 512, "response_length": 8}
    data = {"apply_chat_template_kwargs": CHAT, "filter_overlong_prompts": False, "longest": 512}
    return OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}, "data": data})


@pytest.fixture(scope="module")
def theirs(rows: list[dict[str, Any]], model: Path, config: Any) -> Any:
    """The same rows in verl's own dataset."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = [
        {
            "prompt": [{"role": "user", "content": row["text"]}],
            "images": [{"bytes": image} for image in row["images"]],
            "data_source": "rows",
        }
        for row in rows
    ]
    path = model.with_name("rows.parquet")
    pq.write_table(pa.Table.from_pylist(table), path)
    config.data.cache_dir = str(model.with_name("cache"))
    return RLHFDataset(str(path), hf_tokenizer(model), config.data, hf_processor(model))


def rollouts(loop: type, worker: type, dataset: Any, model: Path, config: Any, times: int = 1) -> list[list[Any]]:
    """What verl's workers make of each row, several times."""

    async def generate(**asked: Any) -> TokenOutput:
        return TokenOutput(token_ids=ANSWER)

    async def all_of() -> list[list[Any]]:
        tokenizer, processor = hf_tokenizer(model), hf_processor(model)
        made = loop(
            trainer_config=DictConfigWrap(config),
            server_manager=SimpleNamespace(generate=generate),
            tokenizer=tokenizer,
            processor=processor,
            dataset_cls=type(dataset),
            data_config=DictConfigWrap(config.data),
            hf_model_type="qwen3_vl",
        )
        working = object.__new__(worker)  # its constructor loads a model's configuration
        vars(working).update(tokenizer=tokenizer, processor=processor, rollout_config=config.actor_rollout_ref.rollout)
        vars(working).update(reward_loop_worker_handles=None, distillation_enabled=False, mm_processor_kwargs={})
        found = []
        for number in range(len(dataset)):
            batch = collate_fn([dataset[number]] * times)
            fields = [{name: batch[name][i] for name in batch if name != "dummy_tensor"} for i in range(times)]
            outputs = await asyncio.gather(*(made.run({}, **each) for each in fields))
            found.append(
                [
                    await working._agent_loop_postprocess(output, False, **each)
                    for output, each in zip(outputs, fields, strict=True)
                ]
            )
        return found

    return asyncio.run(all_of())


def test_fetched_prompts_are_those_that_verl_makes(data: Path, theirs: Any, model: Path, config: Any) -> None:
    """Ids, positions and inputs of the model, of the prompt with an answer."""
    keyed = KeyedPrompts(str(data), config=config.data)
    ours = rollouts(Loop, Worker, keyed, model, config)
    own = rollouts(SingleTurnAgentLoop, AgentLoopWorker, theirs, model, config)
    images = 0
    for (fetched,), (made,), sizes in zip(ours, own, SIZES, strict=True):
        for name in ("prompt_ids", "response_ids", "input_ids", "attention_mask", "position_ids"):
            assert torch.equal(getattr(fetched, name), getattr(made, name)), name
        assert fetched.multi_modal_inputs.keys() == made.multi_modal_inputs.keys()
        for name, tensor in made.multi_modal_inputs.items():
            assert torch.equal(fetched.multi_modal_inputs[name], tensor), name
        pixels = [np.asarray(image) for image in fetched.multi_modal_data.get("images") or ()]
        assert [each.shape[1::-1] for each in pixels] == sizes
        for image, other in zip(pixels, made.multi_modal_data.get("images") or (), strict=True):
            assert np.array_equal(image, np.asarray(other))
        images += len(pixels)
    assert images == sum(map(len, SIZES))


def test_rollouts_of_a_prompt_share_one_fetch(
    data: Path, model: Path, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts_of.cache_clear()
    fetched: list[int] = []
    fetch = Prompts._fetch
    monkeypatch.setattr(Prompts, "_fetch", lambda self, number: fetched.append(number) or fetch(self, number))
    keyed = KeyedPrompts([str(data)], config=config.data)
    found = rollouts(Loop, Worker, keyed, model, config, times=4)
    assert sorted(fetched) == list(range(len(SIZES)))
    assert all(torch.equal(each.input_ids, several[0].input_ids) for several in found for each in several)


def test_a_prompt_that_is_too_long_is_named(data: Path, model: Path, config: Any) -> None:
    from omegaconf import OmegaConf

    short = OmegaConf.merge(config, {"actor_rollout_ref": {"rollout": {"prompt_length": 8}}})
    keyed = KeyedPrompts(str(data), config=config.data)
    with pytest.raises(UsageError, match=r"tokens, and verl's rollout\.prompt_length is 8"):
        rollouts(Loop, Worker, keyed, model, short)
    with pytest.raises(UsageError, match="data_files has 2 entries"):
        KeyedPrompts([str(data), str(data)])
