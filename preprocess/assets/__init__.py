"""Files that ship with the package: the embedded tokenizer and the scripts that make it."""

from importlib.resources import files
from pathlib import Path

# transformers needs a real directory: it is one in a checkout and in a wheel alike, for installers unpack it.
EMBEDDED_TOKENIZER: Path = Path(str(files(__name__).joinpath("tokenizer")))
