"""What a release carries besides code: its version, its history, and how to cite it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import click
import pytest
import typer
import yaml

from vlmdata import __version__
from vlmdata.cli.main import app

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_open_version_is_the_first_of_the_history_and_the_cited_one_the_last_closed() -> None:
    versions = re.findall(r"^## (\d+\.\d+\.\d+) \((.+)\)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions[0] == (__version__.partition(".dev")[0], "not released") or (
        versions[0][0] == __version__ and versions[0][1] != "not released"
    )
    closed = next(each for each in versions if each[1] != "not released")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], str(citation["date-released"])) == closed
    assert citation["license"] == PROJECT["license"]
    assert citation["repository-code"] == PROJECT["urls"]["Homepage"]


def test_the_workflows_test_each_python_that_is_classified() -> None:
    classified = {each.rpartition(" ")[2] for each in PROJECT["classifiers"] if ":: 3." in each}
    workflows = "".join(path.read_text() for path in (ROOT / ".github" / "workflows").iterdir())
    tested = {(ROOT / ".python-version").read_text().strip(), *re.findall(r"3\.\d\d\b", workflows)}
    assert classified == tested
    assert PROJECT["requires-python"] == f">=3.12,<3.{max(int(each[2:]) for each in classified) + 1}"


LAUNCH = ROOT / "docs" / "launch"
SERVER, BUDGET, SERVERS = "Service", "PodDisruptionBudget", "Deployment"


def kubernetes() -> dict[str, dict[str, Any]]:
    """The objects of the manifest, by kind."""
    return {each["kind"]: each for each in yaml.safe_load_all((LAUNCH / "kubernetes-serve.yaml").read_text())}


def test_servers_on_kubernetes_have_few_rights_and_end_one_by_one() -> None:
    objects = kubernetes()
    pod = objects[SERVERS]["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    labels = pod["metadata"]["labels"]
    assert objects[SERVER]["spec"]["selector"] == objects[BUDGET]["spec"]["selector"]["matchLabels"] == labels
    assert {each["labelSelector"]["matchLabels"]["app"] for each in pod["spec"]["topologySpreadConstraints"]} == {
        "vlmdata"
    }
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert container["startupProbe"]["httpGet"] == container["readinessProbe"]["httpGet"]
    user = re.search(r"^USER (\d+):", (LAUNCH / "data.Dockerfile").read_text(), re.MULTILINE)
    assert user is not None
    assert pod["spec"]["securityContext"]["runAsUser"] == int(user[1])
    mounted = {each["mountPath"] for each in container["volumeMounts"] if not each.get("readOnly")}
    assert mounted == {"/cache", "/tmp"}, "all that the server may write to"


def commands() -> dict[str, list[str]]:
    """What the launch files give to the image's ``vlmdata``, by its place."""
    (container,) = kubernetes()[SERVERS]["spec"]["template"]["spec"]["containers"]
    services = yaml.safe_load((LAUNCH / "compose.yaml").read_text())["services"]
    found = {name: each["command"] for name, each in services.items() if "entrypoint" not in each}
    return {"kubernetes": container["args"], **found}


@pytest.mark.parametrize("place", ["kubernetes", "preprocess", "serve"])
def test_commands_of_launch_files_are_understood(place: str) -> None:
    words = commands()[place]
    group: Any = typer.main.get_command(app)
    command = group.get_command(click.Context(group), words[0])
    assert command.make_context(words[0], words[1:]).params


def test_the_context_of_the_images_holds_what_they_copy() -> None:
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for name in ("data", "train"):
        copied = re.findall(r"^COPY (?!--from)(.+) \S+$", (LAUNCH / f"{name}.Dockerfile").read_text(), re.MULTILINE)
        assert {file for each in copied for file in each.split()} == kept
    program = yaml.safe_load((LAUNCH / "compose.yaml").read_text())["services"]["loader"]["command"][0]
    compile(program, "compose.yaml", "exec")
