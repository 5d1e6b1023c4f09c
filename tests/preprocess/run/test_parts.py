"""Parts of a run and ``vlmdata finish``: the same bytes as one run, whoever makes which part and when."""

from __future__ import annotations

import json
import random
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import cord_row, tree_bytes, write_cord_parquet
from tests.preprocess.command_line import SMALL_IMAGES, Ended
from vlmdata.errors import ConfigMismatchError, DatasetFormatError, ResourceError, UsageError
from vlmdata.preprocess.config import ImageConfig, PreprocessConfig
from vlmdata.preprocess.run.claim import Part, directory_claim, job_array, part_claim, whole_claim
from vlmdata.preprocess.run.dataset import PartResult, RunResult, preprocess_dataset, preprocess_part
from vlmdata.preprocess.run.finish import Missing, finish_dataset
from vlmdata.preprocess.sources.open import open_source
from vlmdata.storage import open_store
from vlmdata.verify.dataset import verify_dataset

CONFIG = PreprocessConfig(image=ImageConfig(1024, 65_536), rows_per_shard=2)
ROWS, SHARDS = 15, 8


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [cord_row(n, width=64, height=64) for n in range(ROWS)]
    rows[5]["ground_truth"] = rows[9]["ground_truth"] = "{"
    return write_cord_parquet(tmp_path_factory.mktemp("parts") / "train.parquet", rows)


@pytest.fixture(scope="module")
def whole(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The dataset of one run."""
    out = tmp_path_factory.mktemp("whole") / "out"
    preprocess_dataset(open_source(str(source)), out, CONFIG)
    return tree_bytes(out)


def make(source: Path, out: Path, number: int, of: int, **options: Any) -> PartResult:
    config = PreprocessConfig(image=CONFIG.image, **{"rows_per_shard": 2, **options})
    return preprocess_part(Part(number, of), open_source(str(source)), out, config)


class TestPart:
    @given(st.integers(1, 40), st.integers(0, 200))
    def test_each_shard_is_of_one_part(self, of: int, shard: int) -> None:
        parts = [Part(number, of) for number in range(1, of + 1) if Part(number, of).has(shard)]
        assert parts == [Part.for_shard(shard, of)]
        assert Part.parse(str(parts[0])) == parts[0]

    @pytest.mark.parametrize("text", ["0/4", "5/4", "1", "1/0", "a/b", "-1/4", "1/4/2", "٣/٤"])
    def test_refuses_what_names_none(self, text: str) -> None:
        with pytest.raises(UsageError, match="from 1/16 to 16/16"):
            Part.parse(text)

    @given(st.sets(st.integers(1, 60)))
    def test_an_array_names_exactly_its_parts(self, numbers: set[int]) -> None:
        spans = [span.partition("-") for span in job_array(Part(n, 60) for n in numbers).split(",") if span]
        assert {n for low, _, high in spans for n in range(int(low), int(high or low) + 1)} == numbers


class TestFinish:
    @pytest.mark.parametrize("of", [1, 3, 11])  # of 11 parts, three have no shard
    def test_parts_in_any_order_give_the_bytes_of_one_run(
        self, source: Path, tmp_path: Path, whole: dict[str, bytes], of: int
    ) -> None:
        order = list(range(1, of + 1))
        random.shuffle(order)
        for number in order:
            result = make(source, tmp_path, number, of)
            assert result.made == sum(Part(number, of).has(shard) for shard in range(SHARDS))
            assert not (tmp_path / "manifest.json").exists()
        result = finish_dataset(tmp_path)
        assert isinstance(result, RunResult)
        assert tree_bytes(tmp_path) == whole
        assert verify_dataset(tmp_path).faults == []

    def test_says_what_is_missing_and_by_which_part_and_changes_nothing(self, source: Path, tmp_path: Path) -> None:
        make(source, tmp_path, 1, 3)
        make(source, tmp_path, 3, 3)
        (tmp_path / "shard-000002.tar").write_bytes(b"cut")
        finish_dataset(tmp_path)
        before = tree_bytes(tmp_path)
        missing = finish_dataset(tmp_path)
        assert isinstance(missing, Missing)
        assert missing.by_part == {Part(2, 3): [1, 4, 7], Part(3, 3): [2]}
        assert tree_bytes(tmp_path) == before

    def test_a_part_again_is_harmless_before_and_after(
        self, source: Path, tmp_path: Path, whole: dict[str, bytes]
    ) -> None:
        assert make(source, tmp_path, 2, 2).made == 4
        again = make(source, tmp_path, 2, 2)
        assert (again.made, again.kept, again.finished) == (0, 4, False)
        make(source, tmp_path, 1, 2)
        finish_dataset(tmp_path)
        assert make(source, tmp_path, 2, 2).finished
        assert isinstance(finish_dataset(tmp_path), RunResult)
        assert tree_bytes(tmp_path) == whole

    def test_one_run_can_end_what_parts_began_and_parts_what_one_run_began(
        self, source: Path, tmp_path: Path, whole: dict[str, bytes]
    ) -> None:
        make(source, tmp_path / "a", 1, 4)
        result = preprocess_dataset(open_source(str(source)), tmp_path / "a", CONFIG)
        assert (result.made, result.kept) == (6, 2)
        shutil.copytree(tmp_path / "a", tmp_path / "b")
        assert tree_bytes(tmp_path / "a") == whole
        # As if one run had been killed after two shards: parts go on, even in another number than before.
        shutil.rmtree(tmp_path / "b")
        make(source, tmp_path / "b", 2, 4)
        for number in (1, 2, 3):
            make(source, tmp_path / "b", number, 3)
        assert isinstance(finish_dataset(tmp_path / "b"), RunResult)
        assert tree_bytes(tmp_path / "b") == whole

    def test_parts_side_by_side(self, source: Path, tmp_path: Path, whole: dict[str, bytes]) -> None:
        errors: list[BaseException] = []

        def run(number: int) -> None:
            try:
                make(source, tmp_path, number, 4)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=run, args=(number,)) for number in range(1, 5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        finish_dataset(tmp_path)
        assert tree_bytes(tmp_path) == whole

    def test_needs_a_run(self, tmp_path: Path) -> None:
        with pytest.raises(DatasetFormatError, match=r"has no manifest\.json and no record of a run"):
            finish_dataset(tmp_path)


class TestRefusals:
    def test_parts_with_other_options_or_sources_even_if_nothing_is_made_yet(
        self, source: Path, tmp_path: Path
    ) -> None:
        make(source, tmp_path, 8, 9)
        for shard in tmp_path.glob("**/shard-*"):
            shard.unlink()
        with pytest.raises(ConfigMismatchError, match="max_length: 8192 there, 4096 now"):
            make(source, tmp_path, 1, 9, max_length=4096)
        other = write_cord_parquet(tmp_path.with_name("other") / "train.parquet", [cord_row(3)])
        with pytest.raises(ConfigMismatchError, match="source"):
            make(other, tmp_path, 1, 9)
        assert (tmp_path / ".progress" / "run.json").exists()

    def test_who_works_beside_whom(self, source: Path, tmp_path: Path) -> None:
        make(source, tmp_path, 1, 2)
        with part_claim(open_store(tmp_path), Part(1, 2)):
            with pytest.raises(ResourceError, match="part 1/2 is already at work there"):
                make(source, tmp_path, 1, 2)
            with pytest.raises(ResourceError, match="part 1/2 at work there, which may make the same shards"):
                make(source, tmp_path, 1, 3)
            with pytest.raises(ResourceError, match="part 1/2 at work there"):
                preprocess_dataset(open_source(str(source)), tmp_path, CONFIG)
            missing = finish_dataset(tmp_path)
            assert isinstance(missing, Missing)
            assert missing.at_work == (Part(1, 2),)
            make(source, tmp_path, 2, 2)
            with pytest.raises(ResourceError, match="all shards are made, but part 1/2 still at work"):
                finish_dataset(tmp_path)

    def test_a_part_waits_a_while_for_a_whole_run_and_then_gives_up(
        self, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("vlmdata.preprocess.run.claim._SECONDS_FOR_A_RUN", 0.1)
        monkeypatch.setattr("vlmdata.preprocess.run.claim._SECONDS_OF_A_CHECK", 0.1)
        make(source, tmp_path, 1, 2)
        for claim in (whole_claim, directory_claim):
            with claim(open_store(tmp_path)):
                with pytest.raises(ResourceError, match="another `vlmdata preprocess` is using it"):
                    make(source, tmp_path, 1, 2)
                with pytest.raises(ResourceError, match="another `vlmdata preprocess` is using it"):
                    finish_dataset(tmp_path)

    def test_what_others_have_begun_to_write_stays_until_the_end(
        self, source: Path, tmp_path: Path, whole: dict[str, bytes]
    ) -> None:
        begun = [tmp_path / ".shard-000001.tar.7.tmp", tmp_path / ".progress" / ".shard-000003.parquet.7.tmp"]
        make(source, tmp_path, 1, 2)
        for path in begun:
            path.touch()
        make(source, tmp_path, 1, 2)
        make(source, tmp_path, 2, 2)
        assert all(path.exists() for path in begun)
        finish_dataset(tmp_path)
        assert tree_bytes(tmp_path) == whole

    def test_a_tokenizer_that_changed_since(
        self, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        make(source, tmp_path, 1, 1)
        path = tmp_path / ".progress" / "run.json"
        record = json.loads(path.read_bytes())
        record["config"]["fingerprints"]["tokenizer"] = "another"
        path.write_text(json.dumps(record))
        with pytest.raises(ConfigMismatchError, match='fingerprint: "another" there'):
            finish_dataset(tmp_path)


class TestCommand:
    def test_parts_then_finish(
        self, vlmdata: Callable[..., Ended], source: Path, tmp_path: Path, whole: dict[str, bytes]
    ) -> None:
        options = ("--recipe", "cord_v2", "--rows-per-shard", 2, "-j", 1, *SMALL_IMAGES)
        part = vlmdata("preprocess", source, "--out", tmp_path, *options, "--part", "1/2", "--json")
        assert part.code == 0, part.stderr
        summary = json.loads(part.stdout)
        assert (summary["part"], summary["shards_made"], summary["rows"]) == ("1/2", 4, 8)
        assert summary["rejects"] == {"malformed_ground_truth": 2}
        lines = [json.loads(line) for line in part.stderr.splitlines() if line.startswith("{")]
        assert lines[-1]["rows_done"] == 8
        assert lines[-1]["rejects"] == {"malformed_ground_truth": 2}

        early = vlmdata("finish", tmp_path)
        assert early.code == 1
        assert "4 of 8 shards missing part 2/2: 1, 3, 5, 7 next: make these parts again" in early.said
        told = vlmdata("finish", tmp_path, "--json")
        assert json.loads(told.stdout) == {
            "directory": str(tmp_path),
            "finished": False,
            "shards": 8,
            "parts": 2,
            "missing": {"2/2": [1, 3, 5, 7]},
            "array": "2",
            "at_work": [],
        }

        part = vlmdata("preprocess", source, "--out", tmp_path, *options, "--part", "2/2")
        assert part.code == 0, part.stderr
        assert f"next, when all 2 parts are made: vlmdata finish {tmp_path}" in part.stdout
        assert "part 2/2: 7 rows in 4 shards" in part.stderr
        done = vlmdata("finish", tmp_path)
        assert done.code == 1
        assert "2 of 15 rows rejected (13.3 %)" in done.stderr
        assert vlmdata("finish", tmp_path, "--max-reject-rate", 1).code == 0
        shards = {name: data for name, data in tree_bytes(tmp_path).items() if not name.startswith("manifest")}
        assert shards == {name: data for name, data in whole.items() if not name.startswith("manifest")}

    @pytest.mark.parametrize("options", [("--overwrite",), ("--trace", "0"), ("--engine-option", "address=auto")])
    def test_refuses_options_that_parts_do_not_go_with(
        self, vlmdata: Callable[..., Ended], source: Path, tmp_path: Path, options: tuple[str, ...]
    ) -> None:
        ended = vlmdata("preprocess", source, "--out", tmp_path / "out", *SMALL_IMAGES, "--part", "1/2", *options)
        assert ended.code == 2
        assert options[0] in ended.said
