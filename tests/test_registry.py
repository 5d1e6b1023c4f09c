"""Extensions are found by name, entry point, module and file; a dataset's own words find only what is trusted here."""

from __future__ import annotations

import linecache
import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import vlmdata
from tests.chat_rows import write_jsonl
from tests.conftest import build_dataset, tree_bytes
from tests.loader.rows import chat_rows
from tests.preprocess.extend_pages import write_named_file
from vlmdata import registry
from vlmdata.errors import ConfigMismatchError, DatasetFormatError, SourceError, UsageError
from vlmdata.families import REGISTRY as FAMILIES
from vlmdata.families import Family
from vlmdata.format.manifest import Manifest
from vlmdata.media.codecs import REGISTRY, codec, libraries_of
from vlmdata.preprocess.config import ImageConfig
from vlmdata.preprocess.recode.run import recode_dataset
from vlmdata.preprocess.shards.fingerprints import source_fingerprint
from vlmdata.verify.dataset import verify_dataset

OPTIONS = {"recipe": "chat", "image": ImageConfig(1024, 16384), "rows_per_shard": 6}
#: Leaves a mark when it is run.
TRAP = "from pathlib import Path\nPath(__file__).with_suffix('.ran').touch()\nCODEC = FAMILY = None\n"


@pytest.fixture(autouse=True)
def _forgets() -> Iterator[None]:
    """What a test gives is unknown to the next one, as in another process."""
    yield
    for each in (REGISTRY, FAMILIES):
        each._given.clear()
    registry._installed.cache_clear()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The codec of docs/extend/codec.md, in a file of its own."""
    folder = tmp_path_factory.mktemp("page")
    write_named_file("codec.md", "zlib_patches.py", folder)
    return folder / "zlib_patches.py"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("rows") / "chat.jsonl", chat_rows(12))


@pytest.fixture(scope="module")
def made(file: Path, source: Path) -> Path:
    """A dataset made with it, by file."""
    return build_dataset(source, source.with_name("zlib"), pixels=f"{file}:CODEC", **OPTIONS)


def install(monkeypatch: pytest.MonkeyPatch, group: str, **points: str) -> None:
    """Makes entry points, as installed packages have them."""
    made = [EntryPoint(name, value, group) for name, value in points.items()]
    monkeypatch.setattr(registry, "entry_points", lambda group: [each for each in made if each.group == group])
    registry._installed.cache_clear()


class TestACodecFromAFile:
    def test_is_recorded_by_its_name_with_the_hash_of_its_source(self, made: Path, file: Path) -> None:
        REGISTRY.find(f"{file}:CODEC")
        manifest = Manifest.read(made)
        assert manifest.config["options"]["pixels"] == "zlib"
        assert len(manifest.config["fingerprints"]["codec_source"]) == 64
        assert "patches-zlib" in manifest.features
        assert str(file.parent) not in (made / "manifest.json").read_text()

    def test_is_missing_elsewhere_and_the_error_says_how_to_give_it(self, made: Path) -> None:
        with pytest.raises(DatasetFormatError, match=r"lacks: patches-zlib\. Codec zlib is neither") as caught:
            vlmdata.open_dataset(made)
        assert "VLMDATA_CODECS=path/to/file.py:attribute" in str(caught.value)
        assert "entry point of vlmdata.codecs" in str(caught.value)

    @pytest.mark.parametrize("way", ["environment", "installed", "module"])
    def test_opens_where_it_is_given(
        self, made: Path, file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: Path, way: str
    ) -> None:
        monkeypatch.syspath_prepend(file.parent)
        if way == "environment":
            monkeypatch.setenv("VLMDATA_CODECS", f"{file}:CODEC")
        elif way == "installed":
            install(monkeypatch, "vlmdata.codecs", zlib="zlib_patches:CODEC")
        else:
            REGISTRY.find("zlib_patches:CODEC")
        assert verify_dataset(made, workers=1).faults == []
        again = build_dataset(source, tmp_path / "again", pixels="zlib", **OPTIONS)
        assert tree_bytes(again) == tree_bytes(made)
        sys.modules.pop("zlib_patches", None)

    def test_is_taken_by_recode(self, made: Path, file: Path, source: Path, tmp_path: Path) -> None:
        raw = build_dataset(source, tmp_path / "raw", **OPTIONS)
        recode_dataset(raw, tmp_path / "recoded", f"{file}:CODEC")
        assert tree_bytes(tmp_path / "recoded") == tree_bytes(made)

    def test_may_lie_in_another_folder_when_the_run_is_continued(
        self, made: Path, file: Path, source: Path, tmp_path: Path
    ) -> None:
        copy = tmp_path / file.name
        shutil.copy(file, copy)
        begun = Path(shutil.copytree(made, tmp_path / "begun"))
        (begun / "shard-000000.tar").unlink()
        build_dataset(source, begun, pixels=f"{copy}:CODEC", **OPTIONS)
        assert tree_bytes(begun) == tree_bytes(made)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The page's family as a package is installed: a module, and metadata with its entry point."""
    folder = tmp_path / "site-packages"
    (folder / "my_vl-1.0.dist-info").mkdir(parents=True)
    (folder / "my_vl-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: my-vl\nVersion: 1.0\n")
    (folder / "my_vl-1.0.dist-info" / "entry_points.txt").write_text("[vlmdata.families]\nmy_vl = my_vl:FAMILY\n")
    write_named_file("family.md", "vlmdata/families/my_vl.py", folder)
    monkeypatch.syspath_prepend(folder)
    registry._installed.cache_clear()
    yield folder / "my_vl.py"
    sys.modules.pop("my_vl", None)


def test_a_family_of_an_installed_package_works_from_the_row_to_the_batch(
    package: Path, source: Path, tmp_path: Path
) -> None:
    made = build_dataset(source, tmp_path / "out", family="my_vl", **OPTIONS)
    assert verify_dataset(made, workers=1).faults == []
    manifest = Manifest.read(made)
    assert manifest.family == "my_vl"
    assert str(package.parent) not in (made / "manifest.json").read_text()
    with vlmdata.StreamingLoader(made, capacity=1024, global_batch=1) as loader:
        batches = list(loader)
    assert sum(batch.num_samples for batch in batches) == len(vlmdata.open_dataset(made))
    assert {batch.family.name for batch in batches} == {"my_vl"}
    package.write_text(package.read_text() + "# edited\n")
    sys.modules.pop("my_vl")
    with pytest.raises(ConfigMismatchError, match="family"):
        build_dataset(source, made, family="my_vl", **OPTIONS)


class TestADatasetsOwnWords:
    @pytest.mark.parametrize("name", ["trap:CODEC", "{folder}/trap.py:CODEC", "trap.py:CODEC", "trap"])
    @pytest.mark.parametrize("kind", ["codec", "family"])
    def test_run_nothing(
        self, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, name: str
    ) -> None:
        (tmp_path / "trap.py").write_text(TRAP)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.chdir(tmp_path)
        dataset, named = Path(shutil.copytree(made, tmp_path / "dataset")), name.format(folder=tmp_path)
        text = (dataset / "manifest.json").read_text()
        if kind == "codec":
            text = text.replace("patches-zlib", f"patches-{named}")
        else:
            text = text.replace("patches-zlib", "patches-zstd").replace('"qwen3_5"', f'"{named}"')
        (dataset / "manifest.json").write_text(text)
        with pytest.raises(DatasetFormatError, match="neither built in nor installed here"):
            vlmdata.open_dataset(dataset)
        assert not (tmp_path / "trap.ran").exists()
        with pytest.raises(UsageError, match=r"unknown|is not run"):
            codec(named)

    @given(name=st.text(max_size=30))
    def test_find_only_known_names(self, name: str) -> None:
        for each in (REGISTRY, FAMILIES):
            assert each.knows(name) == (name in each.names())


class TestNames:
    @pytest.mark.parametrize(
        ("name", "wrong"), [("raw", "but another codec has this name"), ("a:b", "but names have no colon")]
    )
    def test_of_other_codecs_are_refused(self, file: Path, tmp_path: Path, name: str, wrong: str) -> None:
        own = tmp_path / "own.py"
        own.write_text(file.read_text().replace('name = "zlib"', f'name = "{name}"'))
        with pytest.raises(UsageError, match=f"its name is '{name}', {wrong}"):
            REGISTRY.find(f"{own}:CODEC")

    def test_of_an_entry_point_and_its_codec_are_one(self, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        install(monkeypatch, "vlmdata.codecs", deflate=f"{file}:CODEC")
        with pytest.raises(UsageError, match=r"--pixels deflate: .*:CODEC has the name .zlib.\. Give both the same"):
            REGISTRY.find("deflate")

    def test_of_entry_points_are_listed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        install(monkeypatch, "vlmdata.codecs", other="other:CODEC")
        with pytest.raises(UsageError, match=r"unknown codec\. Known: raw, .*, other; or"):
            REGISTRY.find("nope")

    def test_of_every_codec_and_family_are_their_own(self) -> None:
        assert [codec(name).name for name in REGISTRY] == list(REGISTRY)
        assert [FAMILIES.named(name).name for name in FAMILIES] == list(FAMILIES)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("CODEC = 3", "it is no codec: it has no decode and no encode"),
        ("class CODEC: name = 'mine'", "it is a class, not an instance of it"),
    ],
)
def test_what_is_no_codec_is_refused(tmp_path: Path, text: str, wrong: str) -> None:
    (tmp_path / "own.py").write_text(text)
    with pytest.raises(UsageError, match=f"own.py:CODEC: {wrong}"):
        REGISTRY.find(f"{tmp_path / 'own.py'}:CODEC")


@pytest.mark.parametrize(
    ("returned", "wrong"),
    [
        ("{'zlib': 1 / 0}", r"codec zlib: its `libraries` failed: ZeroDivisionError: .* \(own\.py, line \d+\)\."),
        ("None", r"codec zlib: its `libraries` returned None; it must return versions as text by name"),
        ("{'zlib': 1.3}", r"returned \{'zlib': 1\.3\}; it must"),
    ],
)
def test_versions_that_a_codec_does_not_tell_are_an_error_of_the_codec(
    file: Path, tmp_path: Path, returned: str, wrong: str
) -> None:
    own = tmp_path / "own.py"
    own.write_text(file.read_text().replace('return {"zlib": zlib.ZLIB_RUNTIME_VERSION}', f"return {returned}"))
    with pytest.raises(UsageError, match=wrong):
        libraries_of(REGISTRY.find(f"{own}:CODEC"))


class TestTheVariable:
    def test_may_have_spaces_after_its_commas(
        self, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        other = tmp_path / "other.py"
        other.write_text(file.read_text().replace('name = "zlib"', 'name = "other"'))
        monkeypatch.setenv("VLMDATA_CODECS", f"{file}:CODEC, {other}:CODEC,")
        assert [codec(name).name for name in ("zlib", "other")] == ["zlib", "other"]

    @pytest.mark.parametrize(
        ("given", "wrong"),
        [
            ("own.py:CODEC", "VLMDATA_CODECS=own.py:CODEC: cannot load own.py:CODEC: "),
            ("own.py", r"VLMDATA_CODECS=own.py: it names no attribute\. Write own\.py:NAME\."),
        ],
    )
    def test_is_named_in_errors(self, monkeypatch: pytest.MonkeyPatch, given: str, wrong: str) -> None:
        monkeypatch.setenv("VLMDATA_CODECS", given)
        with pytest.raises(UsageError, match=wrong):
            codec("zlib")


def test_an_error_names_the_line_of_the_users_file_not_of_a_library(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("import json\n\nCODEC = json.loads('{')\n")
    with pytest.raises(UsageError, match=r"JSONDecodeError: .* \(own\.py, line 3\)\."):
        REGISTRY.find(f"{tmp_path / 'own.py'}:CODEC")


def test_a_family_from_a_file_is_recorded_by_its_name(source: Path, tmp_path: Path) -> None:
    file = tmp_path / "own_family.py"
    file.write_text(
        "from dataclasses import replace\nfrom vlmdata.families.qwen3_5 import FAMILY as OTHER\n"
        "FAMILY = replace(OTHER, name='own')\n"
    )
    out = build_dataset(source, tmp_path / "out", family=f"{file}:FAMILY", **OPTIONS)
    assert Manifest.read(out).family == Manifest.read(out).config["options"]["family"] == "own"
    assert isinstance(vlmdata.open_dataset(out).family, Family)
    FAMILIES._given.clear()
    with pytest.raises(DatasetFormatError, match="Family own is neither built in nor installed here"):
        vlmdata.open_dataset(out)


@pytest.mark.parametrize("how", ["file", "module"])
def test_a_module_beside_the_users_file_is_part_of_its_fingerprint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_family_of_rules.py").write_text(
        "from dataclasses import replace\nimport own_rules\nimport own_empty\n"
        "from vlmdata.families.qwen3_5 import FAMILY as OTHER\nFAMILY = replace(OTHER, name='own')\n"
    )
    (tmp_path / "own_empty.py").write_text("")  # has no source code to inspect
    target = f"{tmp_path}/own_family_of_rules.py:FAMILY" if how == "file" else "own_family_of_rules:FAMILY"
    hashes = []
    for text in ("SIDE = 2\n", "SIDE = 34\n", "SIDE = 2\n"):
        (tmp_path / "own_rules.py").write_text(text)
        linecache.clearcache()
        hashes.append(source_fingerprint(target, FAMILIES.find(target)))
    assert hashes[0] == hashes[2] != hashes[1]
    for name in [name for name in sys.modules if name.startswith("own_")]:
        del sys.modules[name]


def test_rules_of_a_users_family_that_fail_are_named_before_the_run(source: Path, tmp_path: Path) -> None:
    own = tmp_path / "own_family.py"
    own.write_text(
        "from dataclasses import fields\nfrom vlmdata.families.qwen3_5 import FAMILY as OTHER\n\n\n"
        "class Own(type(OTHER)):\n    def image_size(self, *sides, **options):\n        return {}['side']\n\n\n"
        "FAMILY = Own(**{each.name: getattr(OTHER, each.name) for each in fields(OTHER)} | {'name': 'own'})\n"
    )
    words = r"its rules cannot encode a trial sample: KeyError: 'side' \(own_family\.py, line 7\)"
    with pytest.raises(SourceError, match=words):
        build_dataset(source, tmp_path / "out", family=f"{own}:FAMILY", **OPTIONS)
