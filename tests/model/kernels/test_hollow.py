"""Single modules are imported without the rest of their packages, which can be imported afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Packages like flash-linear-attention's."""
    files = {
        "fla/__init__": "",
        "fla/utils": "",
        "fla/modules/__init__": "from fla.modules.convolution import convolve\nimport fla.modules.other",
        "fla/modules/convolution": "from fla.ops.utils import scale\ndef convolve(x): return scale * x",
        "fla/modules/l2norm": "",
        "fla/modules/other": "",
        "fla/ops/__init__": "from .gated_delta_rule import rule\nfrom .other import another",
        "fla/ops/gated_delta_rule/__init__": "from fla.modules.l2norm import __name__ as norm\ndef rule(): return norm",
        "fla/ops/utils": "scale = 3",
        "fla/ops/other": "another = 5",
    }
    for name, code in files.items():
        file = tmp_path / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(code)
    return tmp_path


def run(site: Path, code: str) -> None:
    start = "import sys\nfrom vlmdata.model.kernels.hollow import hollow, import_flash_linear_attention\n"
    done = subprocess.run(
        [sys.executable, "-c", start + textwrap.dedent(code)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(site), str(Path(__file__).parents[3])])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_what_a_delta_net_needs_comes_without_the_rest(site: Path) -> None:
    run(
        site,
        """
        import_flash_linear_attention()
        assert not {"fla.ops.other", "fla.modules.other", "fla.ops", "fla.modules"} & set(sys.modules)
        from fla.modules.convolution import convolve
        from fla.ops.gated_delta_rule import rule
        assert (convolve(2), rule()) == (6, "fla.modules.l2norm")
        assert "fla.ops.other" not in sys.modules, "as megatron-core imports"
        import fla.ops, fla.modules
        assert fla.ops.rule is rule and fla.ops.another == 5 and fla.modules.convolve is convolve
        """,
    )


def test_packages_that_are_imported_are_left_alone(site: Path) -> None:
    run(
        site,
        """
        import fla.ops
        import_flash_linear_attention()
        assert sys.modules["fla.ops"] is fla.ops and fla.ops.another == 5
        """,
    )


@pytest.mark.parametrize("code", ["from fla.ops import another", "import fla\nfla.ops.gone", "import fla.ops.missing"])
def test_another_version_is_imported_in_full(site: Path, code: str) -> None:
    (site / "fla/modules/l2norm.py").write_text(code if "missing" not in code else "")
    if "missing" in code:
        (site / "fla/modules/l2norm.py").unlink()
        (site / "fla/ops/gated_delta_rule/__init__.py").write_text("def rule(): return 0")
    run(
        site,
        """
        import_flash_linear_attention()
        assert "fla.modules.convolution" not in sys.modules
        try:
            import fla.ops
        except (ImportError, AttributeError):
            pass
        """,
    )


def test_nothing_happens_without_the_package(tmp_path: Path) -> None:
    run(tmp_path, "import_flash_linear_attention()\nassert not [name for name in sys.modules if name[:3] == 'fla']")


def test_a_package_that_does_not_exist_is_an_error(site: Path) -> None:
    run(
        site,
        """
        try:
            with hollow("fla.ops", "fla.nothing"):
                pass
        except ImportError as error:
            assert "fla.nothing" in str(error)
        else:
            raise SystemExit("no error")
        assert "fla.ops" not in sys.modules
        """,
    )
