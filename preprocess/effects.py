"""Options that would change nothing are refused before anything is opened."""

from __future__ import annotations

import glob
from collections.abc import Collection
from pathlib import Path

from preprocess.config import EMBEDDED, Overlong, PreprocessConfig
from preprocess.recipes.base import RECIPE_OPTIONS, REGISTRY, recipe_class
from preprocess.sources.open import DEMO
from vlmdata.errors import SourceError


def require_tokenizer(spec: str, given: Collection[str]) -> None:
    """Only the demo may go without a named tokenizer.

    Args:
        spec: The source.
        given: Names of the options that the user gave.

    Raises:
        SourceError: If another source has none.
    """
    if spec != DEMO and "tokenizer" not in given:
        raise SourceError(
            f"SOURCE {spec}: name the tokenizer of your model, e.g. --tokenizer Qwen/Qwen3.5-9B. "
            f"(--tokenizer {EMBEDDED} takes a small one for trials, which no published model shares.)"
        )


def refuse_without_effect(spec: str, tokenizer: str, given: Collection[str]) -> None:
    """Refuses options that this source or tokenizer leaves without effect.

    Raises:
        SourceError: For the first such option.
    """
    for names, why in _without_effect(spec, tokenizer):
        for name in names:
            if name in given:
                raise SourceError(f"{flag(name)} has no effect: {why}. Leave it out.")


def refuse_foreign_options(config: PreprocessConfig, given: Collection[str]) -> None:
    """Refuses options that the config's recipe does not obey. One that does not say what it obeys may obey all.

    Raises:
        SourceError: For the first such option.
    """
    recipe = config.recipe
    obeyed = getattr(recipe_class(recipe), "options", RECIPE_OPTIONS)
    for name in sorted((RECIPE_OPTIONS - obeyed).intersection(given)):
        others = " or ".join(other for other in REGISTRY if name in recipe_class(other).options)
        elsewhere = f", or choose --recipe {others}" if others else ""
        raise SourceError(f"{flag(name)} has no effect with --recipe {recipe}. Leave it out{elsewhere}.")
    if config.overlong == Overlong.SPLIT and not getattr(recipe_class(recipe), "documents", True):
        raise SourceError(
            f"--overlong split has no effect with --recipe {recipe}: it makes conversations, which are not split. "
            "Leave it out to reject long ones, or give --overlong truncate."
        )


def flag(name: str) -> str:
    """An option's name as it is typed."""
    return f"--{name.replace('_', '-')}"


def _without_effect(spec: str, tokenizer: str) -> list[tuple[tuple[str, ...], str]]:
    found: list[tuple[tuple[str, ...], str]] = []
    path = Path(spec)
    if spec == DEMO:
        found.append((("split", "subset", "revision"), "the demo has one split, drawn on this machine"))
        found.append((("image_root", "allow_urls"), "the demo's rows hold their images themselves"))
    elif path.exists() or glob.has_magic(spec):
        found.append((("revision",), f"SOURCE {spec} is local; revisions belong to hub datasets"))
        if not path.is_dir() or (path / "dataset_dict.json").exists() or (path / "state.json").exists():
            found.append((("subset",), f"SOURCE {spec} has no configurations; hub datasets and folders like them do"))
    if tokenizer == EMBEDDED or Path(tokenizer).exists():
        where = "comes with vlmdata" if tokenizer == EMBEDDED else "is a local folder"
        found.append((("tokenizer_revision",), f"the tokenizer {tokenizer} {where}; revisions belong to the hub"))
    return found
