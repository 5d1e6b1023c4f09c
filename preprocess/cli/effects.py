"""Rejects options without effect before anything is opened."""

from __future__ import annotations

import glob
from collections.abc import Collection, Iterator
from pathlib import Path

from vlmdata.errors import SourceError
from vlmdata.locations import is_url
from vlmdata.preprocess.config import EMBEDDED, Overlong, PreprocessConfig
from vlmdata.preprocess.conversation import Conversation, Document
from vlmdata.preprocess.own_options import constructor_takes, make_options
from vlmdata.preprocess.recipes.base import PARTS
from vlmdata.preprocess.registries import RECIPES
from vlmdata.preprocess.sources.open import DEMO
from vlmdata.wording import either

_TURN_OPTIONS = frozenset({"train_turns", "train_think", "chat_template_kwargs"})
_MEDIA_OPTIONS = frozenset({"image_root", "allow_urls", "allow_private_host"})
#: Options of the command that have no effect with some recipes.
RECIPE_DEPENDENT = _TURN_OPTIONS | _MEDIA_OPTIONS


def require_tokenizer(spec: str, given: Collection[str]) -> None:
    """Raises a SourceError if neither tokenizer nor processor is given, except for the demo."""
    if spec != DEMO and not {"tokenizer", "processor"} & set(given):
        raise SourceError(
            f"SOURCE {spec}: give the tokenizer of your model, e.g. --tokenizer Qwen/Qwen3.5-9B. "
            f"(--tokenizer {EMBEDDED} selects a small one for trials, which fits no published model.)"
        )


def refuse_without_effect(spec: str, tokenizer: str, given: Collection[str]) -> None:
    """Raises a SourceError for the first option without effect with this source or tokenizer."""
    for names, why in _without_effect(spec, tokenizer):
        for name in names:
            if name in given:
                raise SourceError(f"{flag(name)} has no effect: {why}. Omit it.")


def refuse_foreign_options(config: PreprocessConfig, given: Collection[str]) -> None:
    """Raises a SourceError for the first option without effect with the recipe, or unknown to it."""
    recipe = config.recipe
    make_options(RECIPES, recipe, config.recipe_options)
    for name in sorted((RECIPE_DEPENDENT - obeyed(recipe)).intersection(given)):
        others = either([other for other in RECIPES if name in obeyed(other)])
        raise SourceError(f"{flag(name)} has no effect with --recipe {recipe}. Omit it, or choose --recipe {others}.")
    if config.overlong == Overlong.SPLIT and Document not in _makes(recipe):
        raise SourceError(
            f"--overlong split has no effect with --recipe {recipe}: it makes conversations, which are not split. "
            "Omit it to reject long ones, or use --overlong truncate."
        )
    if config.overlong == Overlong.DROP_TURNS and Conversation not in _makes(recipe):
        raise SourceError(
            f"--overlong drop-turns has no effect with --recipe {recipe}: it makes documents, which have no turns. "
            "Omit it to reject long ones, or use --overlong split."
        )


def obeyed(recipe: str) -> frozenset[str]:
    """Returns the options of :data:`RECIPE_DEPENDENT` that have an effect with a recipe."""
    turns = _TURN_OPTIONS if Conversation in _makes(recipe) else frozenset()
    media = _MEDIA_OPTIONS if "media" in constructor_takes(RECIPES, recipe, PARTS) else frozenset()
    return turns | media


def _makes(recipe: str) -> tuple[type, ...]:
    """Returns what a recipe makes. A recipe without ``makes`` may make both."""
    makes: tuple[type, ...] = getattr(RECIPES.find(recipe), "makes", (Conversation, Document))
    return makes


def flag(name: str) -> str:
    """Returns an option's name on the command line."""
    return f"--{name.replace('_', '-')}"


def _without_effect(spec: str, tokenizer: str) -> Iterator[tuple[tuple[str, ...], str]]:
    path = Path(spec)
    if spec == DEMO:
        yield ("split", "subset", "revision", "reader"), "the demo has one split, drawn on this machine"
        yield ("image_root", "allow_urls", "allow_private_host"), "the demo's rows contain their images"
    elif is_url(spec):
        yield ("subset", "revision"), f"SOURCE {spec} is a URL; they belong to hub datasets"
    elif path.exists() or glob.has_magic(spec):
        yield ("revision",), f"SOURCE {spec} is local; revisions belong to hub datasets"
        if not path.is_dir() or (path / "dataset_dict.json").exists() or (path / "state.json").exists():
            yield ("subset",), f"SOURCE {spec} has no configurations; hub datasets and similar folders do"
    if tokenizer == EMBEDDED or Path(tokenizer).exists():
        where = "is included in vlmdata" if tokenizer == EMBEDDED else "is a local folder"
        yield ("tokenizer_revision",), f"the tokenizer {tokenizer} {where}; revisions belong to the hub"
