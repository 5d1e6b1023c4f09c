import json

import numpy as np
import pytest

from vlmdata.packing import Blend, Change, CostModel, PlanConfig, Stage, config_differences, cost_model


def test_fingerprint_is_pinned() -> None:
    # Checkpoints hold it: it may change only together with the algorithm's version or the settings' names.
    config = PlanConfig(8192, 32, cost=CostModel(1, 2, 3, 4, 5))
    assert config.fingerprint() == "d14b1048475c05ebf566d2fa77db32c61c43d723e11599cadebe1695c1c3c864"


def test_the_windows_version_is_no_part_of_plans_without_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, windowed = PlanConfig(8192, 32).to_dict(), PlanConfig(8192, 32, shuffle_window=4).to_dict()
    monkeypatch.setattr("vlmdata.packing.config.WINDOWS_VERSION", 99)
    assert config_differences(plain, PlanConfig(8192, 32)) == []
    assert config_differences(windowed, PlanConfig(8192, 32, shuffle_window=4)) == ["windows_algorithm: 2 -> 99"]


def test_every_setting_is_in_the_fingerprint() -> None:
    base = PlanConfig(8192, 32)
    changed = [
        PlanConfig(8193, 32),
        PlanConfig(8192, 33),
        PlanConfig(8192, 32, alignment=2),
        PlanConfig(8192, 32, max_patches=100),
        PlanConfig(8192, 32, pad_to_capacity=True),
        PlanConfig(8192, 32, last="keep"),
        PlanConfig(8192, 32, shuffle_window=4),
        PlanConfig(8192, 32, seed=1),
        PlanConfig(8192, 32, blend=Blend("epochs", (1,))),
        PlanConfig(8192, 32, balance=False),
        PlanConfig(8192, 32, cost=cost_model("9b")),
        PlanConfig(8192, 32, schedule=(Change(5, None),)),
        PlanConfig(8192, 32, earlier=(Stage(base, (0,), 1, 0),)),
    ]
    assert len(changed) == len(PlanConfig.__slots__)
    assert len({config.fingerprint() for config in [base, *changed]}) == len(changed) + 1
    assert all(config_differences(base, config) for config in changed)


def test_equal_settings_have_equal_fingerprints() -> None:
    ints = PlanConfig(8192, 32, blend=Blend("tokens", (1, 2)))
    floats = PlanConfig(np.int64(8192), 32, blend=Blend("tokens", (1.0, 2.0)))  # type: ignore[arg-type]
    assert ints == floats
    assert ints.fingerprint() == floats.fingerprint()
    assert config_differences(ints, floats) == []


def test_differences_survive_a_checkpoint() -> None:
    saved = json.loads(json.dumps(PlanConfig(8192, 32, blend=Blend("epochs", (1, 2.5))).to_dict()))
    now = PlanConfig(4096, 32, max_patches=9, blend=Blend("epochs", (1, 2)))
    assert config_differences(saved, now) == [
        "blend.weights: [1.0, 2.5] -> [1.0, 2.0]",
        "capacity: 8192 -> 4096",
        "max_patches: None -> 9",
    ]
    del saved["seed"]
    assert "seed: absent -> 0" in config_differences(saved, now)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"capacity": 0}, "capacity is 0"),
        ({"global_batch": 0}, "global_batch is 0"),
        ({"max_patches": 0}, "max_patches is 0"),
        ({"shuffle_window": -1}, "shuffle_window is -1"),
        ({"last": "maybe"}, "last is 'maybe'"),
        ({"capacity": 8, "alignment": 16}, "capacity 8 is below the alignment 16"),
        ({"alignment": 6, "pad_to_capacity": True}, "multiple of the alignment 6, got 64; use 60 or 66"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PlanConfig(**{"capacity": 64, "global_batch": 2, **settings})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("by", "weights"),
    [("epochs", ()), ("epochs", (-1, 2)), ("tokens", (0, 0)), ("rows", (1,)), ("samples", (float("nan"),))],
)
def test_bad_blends_are_refused(by: str, weights: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="blend"):
        Blend(by, weights)  # type: ignore[arg-type]
