"""A fast Hugging Face tokenizer with the data that encoding needs, and the family that its files name."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from vlmdata.errors import SourceError
from vlmdata.families import DEFAULT_FAMILY, REGISTRY, Family, family
from vlmdata.families.chat import IMAGE, VIDEO
from vlmdata.format.tokenizer_files import fingerprint_of
from vlmdata.format.tokenizer_info import (
    ItemTokens,
    TokenizerInfo,
    TurnTokens,
    flat,
    nested,
    special_ids,
    special_texts,
)
from vlmdata.preprocess.assets import EMBEDDED_TOKENIZER
from vlmdata.preprocess.chat.bounded import not_ending
from vlmdata.preprocess.chat.template_files import ChosenTemplate, chosen_template, read_json
from vlmdata.preprocess.config import EMBEDDED
from vlmdata.preprocess.hub import hub_or_cache
from vlmdata.preprocess.reject import RowRejected
from vlmdata.reasons import Reason
from vlmdata.wording import counted

#: Shorter texts are tokenized whole at once: in characters, and in characters for each token allowed.
_SHORT, _CHARACTERS_PER_TOKEN = 1 << 17, 8
_PIECE = 1 << 15
#: Pieces are tokenized to count only, as tokens at their ends may be split. So only texts are rejected that are over
#: the limit by this factor.
_CERTAIN = 2
#: Files that identify a family, and their field: the model type in a config, else the processor class.
_FILES = (("config.json", "model_type"), ("preprocessor_config.json", "processor_class"),
          ("processor_config.json", "processor_class"), ("tokenizer_config.json", "processor_class"))  # fmt: skip
#: Ends the model type of the language model in a model, whose tokenizer is the model's.
_TEXT_PART = "_text"


@dataclass(frozen=True, eq=False)
class ChatTokenizer:
    """A tokenizer, its special ids, and its chat template.

    Attributes:
        hf: The transformers tokenizer.
        family: The family whose conversations it writes.
        info: Ids and fingerprints, as written to the manifest.
        reserved: Texts of turns, media and the end of text, which data must not be able to forge. Those that
            the code relies on are reserved even if the tokenizer does not flag them special.
        specials: Texts of all tokens flagged special, and ``reserved``.
        template: Where its chat template is from.
    """

    hf: Any
    family: Family
    info: TokenizerInfo
    reserved: frozenset[str]
    specials: frozenset[str]
    template: ChosenTemplate = field(default_factory=ChosenTemplate)

    @property
    def image_text(self) -> str:
        """Text of the image placeholder token."""
        return str(self.hf.convert_ids_to_tokens(self.info.image))

    @cached_property
    def placeholders(self) -> dict[str, int]:
        """Id of the placeholder of each kind of items."""
        return {kind: tokens.token for kind, tokens in self.info.items.items()}

    @cached_property
    def templates(self) -> tuple[str, ...]:
        """Texts of its chat templates, of which tools may choose one."""
        found = self.hf.chat_template
        return (found,) if isinstance(found, str) else tuple(found.values())

    def item_texts(self, kind: str) -> tuple[str, ...]:
        """Texts of the tokens of an item, with one placeholder."""
        return tuple(self.hf.convert_ids_to_tokens(list(self.info.items[kind].ids)))

    @property
    def written_image(self) -> str | None:
        """Text of the token that the template writes for an image; None if it writes all of them."""
        image = self.family.image
        return self.item_texts(IMAGE)[image.texts.index(image.written)] if image.written else None

    @property
    def captioned_video(self) -> str | None:
        """Text of the placeholder that the template writes for a video; None if the family tells no times."""
        captioned = any(each.kind == VIDEO and each.caption for each in self.family.items)
        return str(self.hf.convert_ids_to_tokens(self.info.items[VIDEO].token)) if captioned else None

    @cached_property
    def is_reserved(self) -> npt.NDArray[np.bool_]:
        """Whether an id is that of one of ``reserved``, bool (V,)."""
        reserved = self.hf.convert_tokens_to_ids(list(self.reserved))
        table = np.zeros(max(self.hf.get_vocab().values()) + 1, np.bool_)
        table[reserved] = True
        return table

    @cached_property
    def plain_backend(self) -> Tokenizer:
        """A copy of the tokenizer that treats ``specials`` as ordinary text. Created on first use."""
        fields = json.loads(self.hf.backend_tokenizer.to_str())
        for token in fields["added_tokens"]:
            token["special"] = token["special"] or token["content"] in self.reserved
        plain = Tokenizer.from_str(json.dumps(fields))
        plain.encode_special_tokens = True
        return plain

    def save(self, directory: Path) -> None:
        """Writes the tokenizer's files, for ``AutoTokenizer.from_pretrained(directory)``."""
        self.hf.save_pretrained(directory)


def load_tokenizer(
    name: str = EMBEDDED, revision: str | None = None, family_name: str | Family = DEFAULT_FAMILY
) -> ChatTokenizer:
    """Loads a tokenizer by hub id or folder, for a family or its name.

    Raises:
        SourceError: If the tokenizer cannot be loaded, is not fast, or lacks special tokens of the family.
    """
    with nullcontext() if name == EMBEDDED or Path(name).exists() else hub_or_cache():
        return _read_tokenizer(name, revision, family_name if isinstance(family_name, Family) else family(family_name))


def _read_tokenizer(name: str, revision: str | None, made: Family) -> ChatTokenizer:
    try:
        hf = _loaded(name, revision)
    except (OSError, ValueError, ImportError) as error:
        raise SourceError(
            f"--tokenizer {name}: cannot load it{_why_not_loaded(name, error)}\n"
            "Give a hub id such as Qwen/Qwen3.5-9B, a folder with tokenizer.json, or `embedded` (small, for trials)."
        ) from error
    if not getattr(hf, "is_fast", False):
        raise SourceError(f"--tokenizer {name}: exact offsets need a fast tokenizer (tokenizer.json)")
    template = ChosenTemplate(hf.chat_template)
    if name != EMBEDDED:
        template = chosen_template(name, revision, hf.chat_template)
        hf.chat_template = template.text
    if not hf.chat_template:
        raise SourceError(f"--tokenizer {name}: it has no chat template, which is needed to find targets")
    if name != EMBEDDED and (problem := not_ending(hf)):
        raise SourceError(
            f"--tokenizer {name}: its chat template is stopped: {problem}. Give a tokenizer with another template."
        )
    if name != EMBEDDED:
        # Disables truncation and padding settings of tokenizer.json, which would apply to every row.
        hf.backend_tokenizer.no_truncation()
        hf.backend_tokenizer.no_padding()
    info = _describe(hf, name, made)
    relied = _relied_tokens(hf, info, made)
    flagged = frozenset(token.content for token in hf.added_tokens_decoder.values() if token.special)
    reserved = relied | {text for text in flagged if not any(part in text for part in made.chat.markup)}
    if short := sorted(text for text in reserved if len(text) < 2):
        raise SourceError(
            f"--tokenizer {name}: its special token {short[0]!r} is an ordinary character, which occurs in text; set "
            "another one in its tokenizer_config.json (pad_token: <|endoftext|>)"
        )
    return ChatTokenizer(hf, made, info, reserved, flagged | reserved, template)


def _loaded(name: str, revision: str | None) -> Any:
    if name == EMBEDDED:
        return _embedded()
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=False)


@cache
def _embedded() -> Any:
    """The embedded tokenizer, loaded once. Its files do not change, and it has no setting that loading must undo."""
    # The class that AutoTokenizer finds, without importing the models that it knows: that takes 0.7 s.
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(EMBEDDED_TOKENIZER, trust_remote_code=False)


def _describe(hf: Any, name: str, made: Family) -> TokenizerInfo:
    ids = special_ids(hf.backend_tokenizer, made, lambda setting: getattr(hf, setting, None))
    for place, texts in special_texts(made).items():
        for text, id in zip(texts, _ids(ids[place]), strict=True):
            if id is None:
                raise SourceError(
                    f"--tokenizer {name}: it has no token {text}, so it is not a tokenizer of the family {made.name}"
                )
    text = made.chat.turn_start + made.chat.assistant_header
    if hf.backend_tokenizer.encode(text, add_special_tokens=False).offsets[-1][1] != len(text):
        raise SourceError(
            f"--tokenizer {name}: it drops the newline at the end of {text!r}, so answers cannot be separated from "
            "headers; remove whitespace stripping (normalizer) from its tokenizer.json"
        )
    pad = hf.pad_token_id if hf.pad_token_id is not None else hf.eos_token_id
    if pad is None:
        raise SourceError(
            f"--tokenizer {name}: it has neither a pad token nor an end token to fill sequences with; set pad_token in "
            "its tokenizer_config.json"
        )
    fields = nested(ids)
    return TokenizerInfo(
        name=name,
        fingerprint=fingerprint_of(hf.backend_tokenizer),
        chat_template=hashlib.sha256(_template_text(hf).encode()).hexdigest(),
        vocab_size=len(hf),
        pad=int(pad),
        turns=TurnTokens(**fields["turns"]),
        items={kind: ItemTokens(**tokens) for kind, tokens in fields["items"].items()},
        special_tokens=dict(hf.special_tokens_map),
        end_of_text=fields["end_of_text"],
    )


def _ids(value: int | tuple[int, ...]) -> tuple[int, ...]:
    return value if isinstance(value, tuple) else (value,)


#: What a token is for, by the last words of its place.
_ROLES = {
    "turns.start": "the turn's start",
    "turns.end": "the turn's end",
    "turns.begin": "the beginning of texts",
    "turns.response": "the response of a tool",
    "before": "the mark before items",
    "token": "the {kind} placeholder",
    "after": "the mark after items",
    "between": "a token between placeholders",
}


def _relied_tokens(hf: Any, info: TokenizerInfo, made: Family) -> frozenset[str]:
    """Returns the texts of the tokens for turns, items and padding.

    Raises:
        SourceError: If one of them cannot be distinguished from text or from another one.
    """
    found, roles = flat(dataclasses.asdict(info)), dict[str, tuple[str, int]]()
    for place, texts in special_texts(made).items():
        _, kind, *last = place.split(".")
        role = _ROLES.get(place) or _ROLES[last[0]].format(kind=kind)
        for text, id in zip(texts, _ids(found[place]), strict=True):
            roles.setdefault(text, (role, id))  # kinds of items may share their marks
    end = info.turns.end
    padding = [("padding", info.pad)]
    shared = [(a, b) for a, b in combinations(roles.values(), 2) if a[1] == b[1]]
    shared += [(padding[0], each) for each in roles.values() if each[1] == info.pad != end]
    if shared:
        (a, id), (b, _) = shared[0]
        token = hf.convert_ids_to_tokens(id)
        raise SourceError(f"--tokenizer {info.name}: it uses {token} for both {a} and {b}; each needs its own token")
    for role, id in (*roles.values(), *padding):
        token = hf.added_tokens_decoder.get(id)
        text = hf.convert_ids_to_tokens(id)
        if token is None:
            raise SourceError(
                f"--tokenizer {info.name}: {text!r}, its token for {role}, is an ordinary entry of the vocabulary, so "
                "text could spell it; make it an added token (pad_token in tokenizer_config.json may name another one)"
            )
        if token.lstrip or token.rstrip or token.single_word:
            raise SourceError(
                f"--tokenizer {info.name}: {text} is marked lstrip, rstrip or single_word, so it absorbs adjacent text "
                "or is not always found; set all three to false in its tokenizer.json"
            )
    return frozenset(hf.convert_ids_to_tokens([*(id for _, id in roles.values()), info.pad]))


def _template_text(hf: Any) -> str:
    template = hf.chat_template
    return template if isinstance(template, str) else repr(sorted(template.items()))


def _why_not_loaded(name: str, error: BaseException) -> str:
    """Continues the sentence ``cannot load it``: transformers takes a path that does not exist for a hub id."""
    path = Path(name)
    if "trust_remote_code" in str(error):
        return (
            ": it names code of its own, which is never run. If its tokenizer.json is enough, as is usual, remove "
            "auto_map from its tokenizer_config.json and give PreTrainedTokenizerFast as tokenizer_class."
        )
    if path.is_file():
        return ": it is a file, not a folder."
    if path.is_dir():
        has = (path / "tokenizer.json").exists()
        return f" from the folder: {_first_line(error) if has else 'it has no tokenizer.json.'}"
    if path.is_absolute() or name.startswith((".", "~")) or len(path.parts) > 2:
        return ": there is no such folder."
    return f" from the hub (is the network reachable?), and there is no such folder: {_first_line(error)}"


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def require_length(tokenizer: ChatTokenizer, text: str, most: int | None, hint: str = "") -> None:
    """Rejects a text of more than twice the allowed number of tokens.

    Raises:
        RowRejected: OVERLONG.
    """
    if most is None or len(text) <= max(_SHORT, _CHARACTERS_PER_TOKEN * most):
        return
    tokens = 0
    for start in range(0, len(text), _PIECE):
        tokens += len(tokenizer.hf.backend_tokenizer.encode(text[start : start + _PIECE], add_special_tokens=False))
        if tokens > _CERTAIN * most:
            raise RowRejected(
                Reason.OVERLONG,
                f"more than {_CERTAIN * most} tokens of text ({counted(len(text), 'character')}), over --max-length "
                f"{most}{hint}",
            )


def family_of(tokenizer: str, revision: str | None = None) -> str:
    """Returns the family in a tokenizer's files, or :data:`DEFAULT_FAMILY` if they specify none.

    Raises:
        SourceError: If the files are those of a model of no family.
    """
    return told_family(tokenizer, revision) or DEFAULT_FAMILY


def told_family(tokenizer: str, revision: str | None = None) -> str | None:
    """Returns the family in a tokenizer's files; None if they specify none.

    Raises:
        SourceError: If the files are those of a model of no family.
    """
    known = {name: family(name) for name in REGISTRY.names()}
    types = {kind: name for name, each in known.items() for kind in (*each.model_types, *each.processors)}
    for file, key in _FILES:
        value = read_json(tokenizer, file, revision).get(key)
        if not isinstance(value, str):
            continue
        found = types.get(value) or types.get(value.removesuffix(_TEXT_PART))
        if found is not None:
            return found
        raise SourceError(
            f"--tokenizer {tokenizer}: its {file} says {key} {value!r}, which is of none of the families "
            f"{', '.join(REGISTRY.names())}, so samples may not fit the model. If the model takes the images and "
            "positions of one of them, or rows without images, give it as --family; else add a family "
            "(docs/extend/family.md)."
        )
    return None
