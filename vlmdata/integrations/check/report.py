"""What ``vlmdata check-model`` prints, as text and as JSON."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from vlmdata.integrations.check.check import Result
from vlmdata.integrations.check.diagnose import Diagnosis
from vlmdata.wording import counted


@dataclass(frozen=True)
class Subject:
    """What was tested.

    Attributes:
        model: The model as the user named it.
        model_type: ``model_type`` of transformers, or the class of another model.
        layers: Layers of the language model; 0 if not known.
        of_layers: Layers of the configuration.
        weights: ``random`` or ``checkpoint`` or ``own``.
        dtype: Dtype of the parameters.
        device: Where it was computed.
        data: The dataset as the user named it.
        samples: Keys of the samples.
        tokens: Tokens of a pack.
        notes: What differs between the dataset and the model's video processor, in lines.
    """

    model: str
    model_type: str
    layers: int
    of_layers: int
    weights: str
    dtype: str
    device: str
    data: str
    samples: tuple[str, ...]
    tokens: int
    notes: tuple[str, ...] = ()


def as_dict(subject: Subject, result: Result) -> dict[str, Any]:
    """The report for ``--json``."""
    return {
        "equal": not result.findings,
        **dataclasses.asdict(subject),
        "reference": result.reference,
        "compared": [dataclasses.asdict(each) | {"equal": each.equal} for each in result.comparisons],
        "findings": [
            dataclasses.asdict(each) | {"kind": each.kind.value, "error": _finite(each.error), "remedy": each.remedy}
            for each in result.findings
        ],
    }


def _finite(number: float) -> float | None:
    """JSON has no infinity."""
    return number if abs(number) != float("inf") and number == number else None


def headline(subject: Subject, result: Result) -> list[str]:
    """What was tested, in lines."""
    layers = ""
    if subject.layers:
        layers = (
            f", {subject.layers} layers"
            if subject.weights != "random"
            else (f", {subject.layers} layers for {subject.of_layers}, random weights")
        )
    return [
        f"{subject.model}: {subject.model_type}{layers}, {subject.dtype} on {subject.device}",
        f"{subject.data}: {counted(len(subject.samples), 'sample')}, alone and in packs of {subject.tokens:,} tokens",
        f"alone: {result.reference}",
        *subject.notes,
    ]


def finding_lines(finding: Diagnosis) -> list[str]:
    """A fault, in lines: kind and place, numbers, evidence, remedy."""
    places = f" and {counted(finding.places - 1, 'other place')}" if finding.places > 1 else ""
    where = f"{finding.place}{places}" if finding.phase == "forward" else f"{finding.place}, backward"
    numbers = f"relative error {finding.error:.1e}, allowed {finding.tolerance:.1e}"
    if finding.sample:
        at = f"{finding.unit} {finding.row} of sample {finding.sample}"
        numbers += f"; {counted(finding.rows, 'row')} differ, the most {at}"
    lines = [f"{finding.kind.value}: {where}", f"{finding.detail}: {numbers}"]
    if finding.evidence:
        lines.append(finding.evidence)
    return [*lines, finding.remedy]


def verdict(result: Result) -> str:
    """The last line."""
    if not result.findings:
        return "equal: each sample of a pack is computed as if it were alone"
    kinds = ", ".join(dict.fromkeys(each.kind.value for each in result.findings))
    return f"{counted(len(result.findings), 'fault')}: {kinds}"
