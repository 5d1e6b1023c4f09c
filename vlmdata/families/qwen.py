"""What the families of Qwen share: ChatML turns, and images and videos between vision marks."""

from dataclasses import replace

from vlmdata.families.chat import IMAGE, VIDEO, ChatFormat, Expansion

CHATML = ChatFormat(
    turn_start="<|im_start|>",
    turn_end="<|im_end|>",
    assistant_header="assistant\n",
    think=("<think>\n", "\n</think>\n\n"),
)
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
