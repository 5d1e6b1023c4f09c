"""What the documentation site needs beyond MkDocs: links out of `docs/`, navigation by pattern, tables of options.

Pages are written to be read in the repository, where `../benchmarks/results/x.md` is a link. The site has no such
files, except for the results of benchmarks, which it takes along.
"""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel

from vlmdata.options import option_table

_ROOT = Path(__file__).resolve().parents[2]
_RESULTS, _SHOWN = "benchmarks/results", (".md", ".png")
_OPTIONS = re.compile(r"^(options|names): ([\w.]+):(\w+)$", re.MULTILINE)
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(((?:\.\./)+)([^)#]+)(#[^)]*)?\)")


def on_config(config: Any) -> Any:
    """Replaces a `folder/*.md` in the navigation by the pages of that folder."""
    docs = Path(config.docs_dir)
    for entry in config.nav:
        for title, value in entry.items():
            if isinstance(value, str) and "*" in value:
                entry[title] = [path.relative_to(docs).as_posix() for path in sorted(docs.glob(value))]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Adds the results of benchmarks as pages under `results/`."""
    for path in sorted((_ROOT / _RESULTS).iterdir()):
        if path.suffix in _SHOWN:
            made = File.generated(config, f"results/{path.name}", abs_src_path=str(path))
            made.inclusion = InclusionLevel.NOT_IN_NAV
            files.append(made)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turns links that leave `docs/` into links to results or file names, and lines for tables into tables.

    `options: module:Class` has the options of a command, `names: module:Class` those of Python.
    """
    depth = page.file.src_uri.count("/")

    def changed(link: re.Match[str]) -> str:
        mark, text, up, target, anchor = link.groups()
        if up.count("..") <= depth:
            return link[0]
        if not (_ROOT / target).exists():
            raise PluginError(f"{page.file.src_uri}: the link to {up}{target} leads to no file of the repository")
        if target.startswith(_RESULTS) and Path(target).suffix in _SHOWN:
            return f"{mark}[{text}]({'../' * depth}results/{Path(target).name}{anchor or ''})"
        return text if text.startswith("`") else f"{text} (`{target}`)"

    return _LINK.sub(changed, _OPTIONS.sub(_table, markdown))


def _table(options: re.Match[str]) -> str:
    return option_table(getattr(import_module(options[2]), options[3]), flags=options[1] == "options")
