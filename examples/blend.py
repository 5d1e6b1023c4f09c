"""Three sources of chats in one training: shares of tokens, a resume in mid-epoch, and another mixture from there on.

    python examples/blend.py --out build/blend

The chats are invented here: photographs with questions, tables as text, and long reasoning.
"""

# %% What to make
import argparse
import json
import random
import subprocess
import sys
from collections import Counter
from itertools import islice
from pathlib import Path

from PIL import Image

from vlmdata import Blend, StreamingLoader

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--out", type=Path, default=Path("build/blend"))
parser.add_argument("--rows", type=int, default=60)
given = parser.parse_args()
given.out.mkdir(parents=True, exist_ok=True)
drawn = random.Random(0)
NAMES = ("photos", "tables", "reasoning")


# %% Three JSONL files, each in a common form of chats
def photo(number: int) -> dict[str, object]:
    """A question about a picture, as LLaVA has it."""
    colour = drawn.choice(["red", "green", "blue"])
    image = given.out / f"{number}.png"
    Image.new("RGB", (drawn.randrange(200, 400), 260), colour).save(image)
    turns = [{"from": "human", "value": "<image>\nWhich colour is it?"}, {"from": "gpt", "value": f"It is {colour}."}]
    return {"image": image.name, "conversations": turns}


def table(_: int) -> dict[str, object]:
    """A sum over lines of text, as OpenAI has it."""
    prices = [drawn.randrange(1, 100) for _ in range(drawn.randrange(5, 30))]
    question = "Sum up:\n" + "\n".join(f"item {i}: {price}" for i, price in enumerate(prices))
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": str(sum(prices))}]}


def reasoning(_: int) -> dict[str, object]:
    """An answer with its reasoning."""
    steps = " ".join(f"Then {drawn.randrange(100)} follows." for _ in range(drawn.randrange(20, 200)))
    answer = {"role": "assistant", "content": "So it is true.", "reasoning_content": steps}
    return {"messages": [{"role": "user", "content": "Is it true?"}, answer]}


vlmdata = Path(sys.executable).with_name("vlmdata")
for name, make in zip(NAMES, (photo, table, reasoning), strict=True):
    rows = given.out / f"{name}.jsonl"
    rows.write_text("".join(json.dumps(make(number)) + "\n" for number in range(given.rows)))
    command = [vlmdata, "preprocess", rows, "--tokenizer", "embedded", "--out", given.out / name]
    subprocess.run(command, check=True)

# %% Half of all tokens are photographs, and a fifth are tables
blend = Blend("tokens", (0.5, 0.2, 0.3))
options = {"capacity": 4096, "global_batch": 2, "blend": blend, "seed": 1}
data = [given.out / name for name in NAMES]
tokens: Counter[str] = Counter()
with StreamingLoader(data, **options) as loader:
    for batch in loader:
        lengths = batch.cu_seqlens.diff().tolist()
        for origin, length in zip(batch.origins, lengths, strict=False):
            tokens[NAMES[origin.dataset]] += length
for name in NAMES:
    print(f"{name}: {tokens[name] / tokens.total():.1%} of {tokens.total():,} tokens")

# %% A state of a few hundred bytes goes into the checkpoint; another loader goes on from there, exactly
with StreamingLoader(data, **options) as loader:
    for _ in islice(loader, 2):
        pass
    state = loader.state_dict()
    rest = [batch.sample_keys for batch in loader]
with StreamingLoader(data, num_workers=2, **options) as resumed:
    resumed.load_state_dict(state)
    assert [batch.sample_keys for batch in resumed] == rest
print(f"resumed after 2 packs: the same {len(rest)} packs follow ({len(json.dumps(state))} bytes of state)")

# %% From that step on, no more tables: each dataset continues where it was
with StreamingLoader(data, **{**options, "blend": Blend("tokens", (0.7, 0, 0.3))}) as changed:
    changed.load_state_dict(state, change=True)
    following = [batch for epoch in range(2) for batch in changed]
used = Counter(NAMES[origin.dataset] for batch in following for origin in batch.origins)
assert not used["tables"]
print(f"changed after 2 packs: {used['photos']} photos and {used['reasoning']} texts of reasoning follow")
