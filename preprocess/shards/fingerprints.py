"""Fingerprints of code and libraries, which determine a dataset's bytes, and what differs between two runs."""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
import sysconfig
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

from vlmdata.families import REGISTRY as FAMILIES
from vlmdata.families import Family, family
from vlmdata.families.processor import ProcessorFamily
from vlmdata.format.manifest import canonical_hash, differences
from vlmdata.format.schema import KIND_FEATURES, SCHEMA_VERSION
from vlmdata.format.tokenizer_info import TokenizerInfo, tokenizer_to_json
from vlmdata.media.codecs import RAW, VIDEO, libraries_of
from vlmdata.media.codecs import REGISTRY as CODECS
from vlmdata.media.versions import decoder_versions, video_versions
from vlmdata.preprocess.config import PreprocessConfig, VideoConfig
from vlmdata.preprocess.own_options import make_options
from vlmdata.preprocess.registries import RECIPES
from vlmdata.registry import code_digest, module_named, shown_name
from vlmdata.version import __version__

#: Libraries that can change pixels (decoders, resize) or tokens (tokenizer, template engine).
_LIBRARIES = ("jinja2", "pillow", "tokenizers", "torch", "torchvision", "transformers")

_FAMILY_SOURCE, _CODEC, _CODEC_SOURCE = "family_source", "codec", "codec_source"
#: Versions of the decoder of videos, and the options of videos. Manifests of datasets without videos lack the former,
#: and the latter if they are the defaults.
_VIDEO_DECODERS, _VIDEO_OPTIONS = "video_decoders", "video"
_VIDEO_CODEC, _VIDEO_CODEC_SOURCE = "video_codec", "video_codec_source"
#: Fingerprints of runs with videos alone.
_OF_VIDEOS = frozenset({_VIDEO_DECODERS, _VIDEO_CODEC, _VIDEO_CODEC_SOURCE})
#: Fingerprints that earlier versions did not record, or that not every dataset needs.
_LATER = (_FAMILY_SOURCE, _CODEC_SOURCE, _VIDEO_DECODERS, _VIDEO_CODEC, _VIDEO_CODEC_SOURCE)
_TOUCHED = (
    "(source files were touched since the run began; whether their bytes changed is known only of runs that began with "
    "--hash-source. Copies that keep the times, as cp -p and rsync -t make them, do.)"
)
_OTHER_MARKS = "(runs of earlier versions, and with --hash-source, know a source by its bytes: give --hash-source)"
#: What helps for a difference, by the beginning of its line; the first that fits.
_REMEDIES = (
    ("config.options", "repeat the earlier options"),
    ("config.fingerprints.recipe", "restore the recipe's code"),
    ("config.fingerprints.processor", "restore the processor's files"),
    ("config.fingerprints.family_source", "restore the code of the family's rules"),
    ("config.fingerprints.codec_source", "restore the codec's code"),
    ("config.fingerprints.video_codec_source", "restore the code of the videos' codec"),
    ("config.fingerprints.tokenizer", "restore the tokenizer's files"),
    ("config.fingerprints.chat_template", "restore the tokenizer's files"),
    ("tokenizer", "restore the tokenizer's files"),
    ("config.fingerprints", "install the earlier versions"),
    ("source.reader_source", "restore the reader's code"),
    ("source", "restore the source"),
)
_ADDED = (
    "If all else is as before, a finished dataset takes added, changed and removed rows of its source as a new version."
)
#: Packages whose modules hold rules that a family's or codec's module takes from elsewhere.
_PACKAGES = ("vlmdata.families", "vlmdata.media.codecs")


def fingerprints(config: PreprocessConfig, tokenizer: TokenizerInfo) -> dict[str, Any]:
    """Returns fingerprints as JSON values. Equal fingerprints, options and source guarantee equal bytes."""
    made = config.model_family
    return {
        "vlmdata": __version__,
        "schema": SCHEMA_VERSION,
        "tokenizer": tokenizer.fingerprint,
        "chat_template": tokenizer.chat_template,
        "recipe": recipe_fingerprint(config.recipe),
        _FAMILY_SOURCE: source_fingerprint(FAMILIES.target(config.family), made),
        "processor": _processor_fingerprint(config, made),
        "libraries": {name: version(name) for name in _LIBRARIES},
        "decoders": decoder_versions(),
        **({} if made.video is None else {_VIDEO_DECODERS: video_versions()}),
        **({} if made.video is None else video_codec_fingerprints(config.pixels, config.video_codec.name)),
    } | codec_fingerprints(config.pixels)


def _processor_fingerprint(config: PreprocessConfig, made: Family) -> dict[str, Any]:
    """Returns what makes pixels of images: the family's rules, or the settings of a processor and what was learned."""
    if isinstance(made, ProcessorFamily):
        kind = type(config.learned.runner.processor).__name__
        return {"class": kind, "settings": config.learned.settings, "learned": canonical_hash(made.to_json())}
    return {
        "patch_size": made.patch_size,
        "merge_size": made.merge_size,
        "temporal_patch_size": made.temporal_patch_size,
        "resize": f"torchvision {made.resample} antialias uint8",
        "image_mean": list(made.image_mean),
        "image_std": list(made.image_std),
    }


def codec_fingerprints(name: str) -> dict[str, Any]:
    """Returns the versions of the libraries that encode pixels, if any, and the hash of the codec's source code.

    Empty for ``raw``, whose items are written without it.
    """
    if name == RAW:
        return {}
    made = CODECS.find(name)
    libraries = libraries_of(made)
    return ({_CODEC: libraries} if libraries else {}) | {_CODEC_SOURCE: source_fingerprint(CODECS.target(name), made)}


def video_codec_fingerprints(pixels: str, videos: str) -> dict[str, Any]:
    """Returns the same of the codec of videos; empty if it is that of images, whose fingerprints are enough."""
    if CODECS.find(pixels).name == videos:
        return {}
    names = {_CODEC: _VIDEO_CODEC, _CODEC_SOURCE: _VIDEO_CODEC_SOURCE}
    return {names[name]: found for name, found in codec_fingerprints(videos).items()}


def run_identity(
    config: PreprocessConfig,
    tokenizer: TokenizerInfo,
    source: Mapping[str, Any],
    times: Mapping[str, str],
    block: bool = False,
) -> dict[str, Any]:
    """Returns what a run must share with the run that it continues, as JSON values.

    Args:
        config: The options.
        tokenizer: The current tokenizer.
        source: Identity of the source.
        times: Modification times of source files whose bytes the identity does not tell. They say nothing of a
            finished dataset, whose shards are known by hash.
        block: Whether ``--train-think auto`` learns empty think blocks, as the prompt of inference opens them. Earlier
            versions did not learn them, so their runs are not continued.
    """
    made = fingerprints(config, tokenizer) | ({"think_block": "opened by the prompt"} if block else {})
    return {
        **({"source_times": dict(times)} if times else {}),
        "config": {"options": _options(config), "fingerprints": made},
        "source": dict(source),
        "tokenizer": tokenizer_identity(tokenizer),
    }


def _options(config: PreprocessConfig) -> dict[str, Any]:
    """Returns all options, including the recipe's own with defaults."""
    return config.to_json() | {"recipe_options": asdict(make_options(RECIPES, config.recipe, config.recipe_options))}


def tokenizer_identity(tokenizer: TokenizerInfo) -> dict[str, Any]:
    """Returns the tokenizer data that can change a dataset, besides the fingerprints: ids and named tokens.

    ``special_tokens`` is absent for datasets of format 1.0, whose manifest does not record it.
    """
    told_elsewhere = ("name", "fingerprint", "chat_template")
    fields = tokenizer_to_json(tokenizer, SCHEMA_VERSION)
    return {name: value for name, value in fields.items() if name not in told_elsewhere}


def as_recorded(config: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a run's ``config`` without what ``before`` does not record: it did not matter, or was not known yet."""
    known = before.get("fingerprints", {})
    left_out = {name for name in _LATER if name not in known}
    found = {name: value for name, value in config["fingerprints"].items() if name not in left_out}
    recorded = {**config, "fingerprints": found}
    return recorded if _VIDEO_OPTIONS in before.get("options", {}) else _without_default_videos(recorded)


def of_samples(config: Mapping[str, Any], features: Collection[str]) -> dict[str, Any]:
    """Returns the ``config`` of a run as the manifest of a dataset with these features records it.

    Without videos, their decoder and codec are left out, and their options if they are the defaults: a run that needs
    none makes the same manifest with every decoder.
    """
    if KIND_FEATURES[VIDEO] in features:
        return dict(config)
    kept = {name: value for name, value in config["fingerprints"].items() if name not in _OF_VIDEOS}
    return _without_default_videos({**config, "fingerprints": kept})


def _without_default_videos(config: dict[str, Any]) -> dict[str, Any]:
    options = config.get("options", {})
    if _VIDEO_OPTIONS not in options:
        return config
    default = VideoConfig().to_json(family(options["family"]), CODECS.named(options["pixels"]))
    if options[_VIDEO_OPTIONS] != default:
        return config
    return {**config, "options": {name: value for name, value in options.items() if name != _VIDEO_OPTIONS}}


def identity_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Lists the differences between two runs' identities, one line each; empty if one can continue the other.

    Ignores what earlier versions did not record.
    """
    known = dict(now)
    if "source_times" not in before:
        known.pop("source_times", None)
    if "tokenizer" not in before:
        del known["tokenizer"]
    else:
        known["tokenizer"] = {name: value for name, value in now["tokenizer"].items() if name in before["tokenizer"]}
    known["config"] = as_recorded(now["config"], before.get("config", {}))
    return differences(before, json.loads(json.dumps(known)))


def refusal(
    place: object, finished: bool, changed: Sequence[str], before: Mapping[str, Any], now: Mapping[str, Any]
) -> str:
    """Says that a run cannot be continued, with the differences and what helps."""
    lines = list(changed)
    same_source = before.get("source") == json.loads(json.dumps(now["source"]))
    if same_source and any(line.startswith("source_times") for line in changed):
        lines.append(_TOUCHED)
    elif _other_marks(before.get("source"), now["source"]):
        lines.append(_OTHER_MARKS)
    listed = "\n".join(f"  {line}" for line in lines)
    # Another recipe, codec, family or tokenizer has other fingerprints too.
    options = any(line.startswith("config.options") for line in changed)
    follow = ("config.fingerprints", "tokenizer") if options else ()
    remedy = " and ".join(dict.fromkeys(_remedy(line) for line in changed if not line.startswith(follow)))
    added = "" if same_source else f"\n{_ADDED}"
    # Nobody is advised to remove a dataset that is sound.
    other = "or give another --out" if finished else "give another --out, or use --overwrite to start over"
    return (
        f"{place}: contains {'a finished dataset' if finished else 'an unfinished run'} of another configuration:\n"
        f"{listed}\n{remedy[:1].upper()}{remedy[1:]} to continue it, {other}.{added}"
    )


def _remedy(line: str) -> str:
    return next((remedy for beginning, remedy in _REMEDIES if line.startswith(beginning)), "repeat the earlier command")


def _other_marks(before: Any, now: Mapping[str, Any]) -> bool:
    """True if two identities of a source may be of the same files, known by other marks."""
    files, others = (side.get("files") if isinstance(side, Mapping) else None for side in (before, now))
    if not files or not others or len(files) != len(others):
        return False
    told = ("name", "bytes")
    same = all(one.get(name) == other.get(name) for one, other in zip(files, others, strict=True) for name in told)
    kinds = [{name for file in side for name in file if name not in told} for side in (files, others)]
    return same and kinds[0] != kinds[1]


#: Folders of installed modules.
_INSTALLED = frozenset(Path(sysconfig.get_path(kind)).resolve() for kind in ("purelib", "platlib"))


def source_fingerprint(target: str, made: object) -> str:
    """Returns the sha256 of the source code of a family or codec.

    The source code is the module, the modules of the classes that ``made`` is derived from, and what these modules
    import by name from their own package, from :mod:`vlmdata.families` or from :mod:`vlmdata.media.codecs`. A module
    without a package has those in its folder, unless it is installed: that folder has the modules of others.

    Args:
        target: Its ``module:attribute`` or ``file.py:attribute``.
        made: The family or codec in it.
    """
    start = module_named(target.partition(":")[0])
    found: dict[str, ModuleType] = {}
    waiting = [start, *(module for module in _modules_of(type(made).__mro__) if not _is_pythons(module))]
    own = {*_PACKAGES, *(module.__package__ for module in waiting if module.__package__)}
    folders = {_folder(module) for module in waiting if not module.__package__} - {None, *_INSTALLED}
    while waiting:
        module = waiting.pop()
        if module.__name__ not in found:
            found[module.__name__] = module
            waiting += [each for each in _modules_of(vars(module).values()) if _holds_rules(each, own, folders)]
    digest = hashlib.sha256()
    for module in sorted(found.values(), key=lambda each: shown_name(each.__name__)):
        source = _source(module)
        digest.update(f"{shown_name(module.__name__)} {len(source)}\n".encode() + source)
    return digest.hexdigest()


def recipe_fingerprint(name: str) -> str:
    """Returns the sha256 of a recipe's source code: of the file that defines it, or of all files of its package."""
    return code_digest(RECIPES.find(name), RECIPES.target(name).partition(":")[0])


def _modules_of(values: Any) -> Iterator[ModuleType]:
    """Yields the modules among some values, and those that define classes and functions among them."""
    for value in tuple(values):
        module = value if isinstance(value, ModuleType) else inspect.getmodule(value) if callable(value) else None
        if module is not None:
            yield module


def _is_pythons(module: ModuleType) -> bool:
    return module.__name__.partition(".")[0] in sys.stdlib_module_names


def _source(module: ModuleType) -> bytes:
    """Returns the source code of a module; of one that has none, such as a compiled one, its file."""
    try:
        return inspect.getsource(module).encode()
    except (OSError, TypeError):
        return Path(str(module.__file__)).read_bytes()


def _folder(module: ModuleType) -> Path | None:
    file = getattr(module, "__file__", None)
    return Path(file).resolve().parent if file else None


def _holds_rules(module: ModuleType, packages: set[str], folders: set[Path | None]) -> bool:
    """True for modules of some packages or folders, except packages, whose registries list other modules."""
    beside = not module.__package__ and _folder(module) in folders
    return (beside or module.__package__ in packages) and not hasattr(module, "__path__")
