"""A run keeps the versions of its datasets: it is resumed with these, also when there are newer ones."""

from __future__ import annotations

import json
import pickle
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from tests.changing_source import Team, row
from vlmdata.errors import ConfigMismatchError
from vlmdata.loader.loader import StreamingLoader
from vlmdata.loader.run_record import LoaderChoice, RunRecord


@pytest.fixture
def team(tmp_path: Path) -> Team:
    team = Team(tmp_path)
    team.run()
    return team


def stream(data: Any, **options: Any) -> StreamingLoader:
    return StreamingLoader(data, capacity=128, global_batch=1, **options)


def keys(loader: StreamingLoader, batches: int | None = None) -> list[str]:
    origins = [origin for batch in islice(loader, batches) for origin in batch.origins]
    return [loader.datasets[each.dataset].index.key(each.index) for each in origins]


def test_a_state_is_resumed_with_its_version(team: Team) -> None:
    with stream(team.out) as loader:
        begun = keys(loader, 3)
        state = json.loads(json.dumps(loader.state_dict()))
        expected = keys(loader)
    team.run([*team.rows[2:], row("new"), row("newer")])
    with stream(team.out) as loader:
        assert "000000008" in loader.datasets[0].index.keys.to_pylist()
        loader.load_state_dict(state)
        assert keys(loader) == expected
        assert len({*begun, *expected}) == 7
        assert loader.datasets[0].name == f"{team.out}@1"
        state = loader.state_dict()
    with stream([f"{team.out}@1"]) as loader:
        loader.load_state_dict(state)
    with stream(team.out) as loader:
        newest = loader.state_dict()
        loader.load_state_dict(newest)
        assert loader.datasets[0].name == str(team.out / "versions/2")
        again = pickle.loads(pickle.dumps(loader))
        team.run(team.rows[1:])
        assert pickle.loads(pickle.dumps(again)).datasets[0].name == str(team.out / "versions/2")


def test_a_version_that_was_named_is_kept(team: Team) -> None:
    with stream(team.out) as loader:
        state = loader.state_dict()
    team.run(team.rows[1:])
    with stream(f"{team.out}@2") as loader, pytest.raises(ConfigMismatchError, match="dataset 0"):
        loader.load_state_dict(state)
    with stream([f"{team.out}@1", team.out]) as loader:
        loader.load_state_dict(state, change=True)
        assert [dataset.name for dataset in loader.datasets] == [f"{team.out}@1", str(team.out / "versions/2")]


def test_a_mixture_file_names_versions(team: Team) -> None:
    team.run(team.rows[1:])
    file = team.out.parent / "mixture.toml"
    file.write_text('[datasets.old]\npath = "out@1"\n[datasets.new]\npath = "out"\n')
    with stream(file) as loader:
        assert [len(dataset) for dataset in loader.datasets] == [7, 6]


def test_the_record_of_a_run_means_its_version(team: Team, tmp_path: Path) -> None:
    with stream(team.out) as loader:
        RunRecord.of(loader, tmp_path).write()
    team.run(team.rows[1:])
    record = RunRecord.read(str(tmp_path))
    assert LoaderChoice({}, record).data([]) == [f"{team.out}@1"]
