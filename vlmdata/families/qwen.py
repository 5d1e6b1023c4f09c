"""What the families of Qwen share: ChatML turns, images and videos between vision marks, boxes and points."""

from dataclasses import replace

from vlmdata.families.chat import IMAGE, VIDEO, ChatFormat, Expansion
from vlmdata.families.grounding import Grounding

CHATML = ChatFormat(
    turn_start="<|im_start|>",
    turn_end="<|im_end|>",
    assistant_header="assistant\n",
    think=("<think>\n", "\n</think>\n\n"),
    markup=("object_ref", "box", "quad"),
)
#: Boxes and points of Qwen2.5-VL, in pixels of the resized image. The tokens are those of Qwen2-VL, which later
#: tokenizers have too. Sources: the cookbooks of Qwen2.5-VL and Qwen3-VL for JSON, ms-swift for the tokens.
GROUNDING = Grounding(
    scale=None,
    box_marks=("<|box_start|>", "<|box_end|>"),
    label_marks=("<|object_ref_start|>", "<|object_ref_end|>"),
)
#: Boxes and points of Qwen3-VL and later models: thousandths of the image's sides.
GROUNDING_OF_1000 = replace(GROUNDING, scale=1000)
ITEMS = (
    Expansion(IMAGE, "<|image_pad|>", before=("<|vision_start|>",), after=("<|vision_end|>",)),
    Expansion(VIDEO, "<|video_pad|>", before=("<|vision_start|>",), after=("<|vision_end|>",)),
)
#: Items of the families that tell the time of each temporal patch of a video.
ITEMS_WITH_TIMES = (ITEMS[0], replace(ITEMS[1], caption="<{seconds:.1f} seconds>"))
#: Settings of a tokenizer that may name another token.
TOKEN_SETTINGS = (
    ("<|image_pad|>", "image_token"),
    ("<|video_pad|>", "video_token"),
    ("<|vision_start|>", "vision_bos_token"),
    ("<|vision_end|>", "vision_eos_token"),
)
