"""The embedded tokenizer, which `tools/embedded_tokenizer` builds."""

from importlib.resources import files
from pathlib import Path

# transformers needs a real directory, which exists in a checkout and in an installed wheel.
EMBEDDED_TOKENIZER: Path = Path(str(files(__name__).joinpath("tokenizer")))
