"""What the families of Qwen share: ChatML turns, and images and videos between vision marks."""

from vlmdata.families.chat import IMAGE, ChatFormat, Expansion

CHATML = ChatFormat(
    turn_start="<|im_start|>",
    turn_end="<|im_end|>",
    assistant_header="assistant\n",
    think=("<think>\n", "\n</think>\n\n"),
)
ITEMS = (
    Expansion(IMAGE, "<|image_pad|>", before=("<|vision_start|>",), after=("<|vision_end|>",)),
    Expansion("video", "<|video_pad|>", before=("<|vision_start|>",), after=("<|vision_end|>",)),
)
#: Settings of a tokenizer that may name another token.
TOKEN_SETTINGS = (
    ("<|image_pad|>", "image_token"),
    ("<|video_pad|>", "video_token"),
    ("<|vision_start|>", "vision_bos_token"),
    ("<|vision_end|>", "vision_eos_token"),
)
