"""Compares a model's packs with their samples alone: as they are, and module by module."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from vlmdata.errors import UsageError
from vlmdata.integrations.check.compare import FORWARD, Difference, Forced, Tolerance
from vlmdata.integrations.check.diagnose import (
    Diagnosis,
    Leak,
    Scene,
    backward_finding,
    findings_of,
    probed_places,
)
from vlmdata.integrations.check.expected import Spot
from vlmdata.integrations.check.kernels import one_configuration, without_kernels
from vlmdata.integrations.check.outcomes import (
    Whole,
    explained,
    gradient_errors,
    output_errors,
    reached_by_tokens,
    scalar_error,
)
from vlmdata.integrations.check.own import Checked, Computed
from vlmdata.integrations.check.packs import CheckData, SampleBatch
from vlmdata.integrations.check.record import Site, is_router, mixes_tokens
from vlmdata.integrations.check.run import (
    Alone,
    Bench,
    ForwardError,
    Gradients,
    exact_float32,
    is_default,
    weight_shares,
)
from vlmdata.integrations.check.summary import Comparison, comparisons_of

#: Float32: rounding reaches about a tenth of these.
_EXACT = Tolerance(local=1e-4, mean=1e-5, whole=1e-3, gradients=1e-3)
#: In low precision, a pack may be this many times as far from its samples as these are from float32.
_FACTOR = 3.0
#: The same for gradients of routers: a token whose best experts are a rounding apart goes to another one in a pack,
#: which changes the sum by a step. Four times was seen, with two layers and few tokens.
_ROUTER_FACTOR = 12.0


@dataclass(frozen=True, eq=False)
class Result:
    """What a check found.

    Attributes:
        findings: Faults, the first in the computation first.
        comparisons: The largest difference of each part that was compared.
        reference: What computed the samples alone, in words.
    """

    findings: tuple[Diagnosis, ...]
    comparisons: tuple[Comparison, ...]
    reference: str


@dataclass(frozen=True, eq=False)
class _Compared:
    """A pack, compared module by module."""

    scene: Scene
    differences: Mapping[Spot, Difference]
    outcome: Computed


def check(
    build: Callable[[], Checked],
    data: CheckData,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    *,
    gradients: bool = True,
) -> Result:
    """Compares packs with their samples alone.

    Args:
        build: Makes the model. Called again only if a forward pass of the user's has a fault.
        data: The samples and packs.
        dtype: Of the parameters. In bfloat16 and float16, the tolerances are measured: three times the error of the
            samples alone against float32.
        device: Where to compute.
        gradients: Whether to compare these, too.

    Raises:
        UsageError: If the forward pass fails.
    """
    with exact_float32(), one_configuration(torch.device(device)):
        return _Check(build, data, dtype, torch.device(device), gradients).result()


class _Check:
    def __init__(
        self,
        build: Callable[[], Checked],
        data: CheckData,
        dtype: torch.dtype,
        device: torch.device,
        with_gradients: bool,
    ):
        self.build, self.data, self.dtype, self.device = build, data, dtype, device
        self.with_gradients = with_gradients
        self.bench = Bench(build(), device, dtype)
        self.shares = weight_shares(data.alone)
        try:
            self.alone, self.gradients = self._references()
        except ForwardError as error:
            raise UsageError(f"check-model: a sample alone cannot be computed: {error}") from error
        self.tolerance = _EXACT if dtype == torch.float32 else self._measured()

    def result(self) -> Result:
        """Compares all packs."""
        findings: list[Diagnosis] = []
        compared: list[_Compared] = []
        wholes: list[Whole] = []
        for number, pack in enumerate(self.data.packs):
            try:
                wholes.append(self._whole(pack))
                compared.append(self._compared(self.bench, pack))
            except ForwardError as error:
                findings.append(self._of_error(pack, number, error))
                continue
            found = self._findings(self.bench, compared[-1])
            if found and self._is_right_when_first(pack):
                found = [_stale(found[0], number)]
            findings += found or self._hidden(pack, compared[-1], wholes[-1])
        if not findings and not self.bench.plain and not is_default(self.bench.checked):
            findings += self._repeated()
        first = {finding.kind: finding for finding in reversed(findings)}
        unique = tuple(each for each in findings if first[each.kind] is each)
        return Result(unique, comparisons_of(compared_differences(compared), wholes, self.tolerance), self._reference())

    def _references(self) -> tuple[tuple[Alone, ...], Gradients]:
        """Computes the samples alone, and the gradients of their weighted mean loss."""
        samples = []
        for sample, share in zip(self.data.alone, self.shares, strict=True):
            with torch.set_grad_enabled(self.with_gradients):
                found = self.bench.recorded(sample)
                if self.with_gradients:
                    (found.outcome.objective(sample.batch) * share).backward()  # type: ignore[no-untyped-call]
            samples.append(replace(found, outcome=found.outcome.detached()))
        return tuple(samples), self.bench.gradients()

    def _measured(self) -> Tolerance:
        """The tolerances of low precision: how far samples alone are from float32."""
        eps = torch.finfo(self.dtype).eps
        spots: dict[Spot, float] = {}
        self.bench.set_dtype(torch.float32)
        with without_kernels(self.bench.inner):
            exact, gradients = self._references()
            local = [self._forced_by(sample, low) for sample, low in zip(self.data.alone, self.alone, strict=True)]
        for sample, low, high, forced in zip(self.data.alone, self.alone, exact, local, strict=True):
            whole = output_errors(low.outcome, [high.outcome], sample, [1.0])
            whole["mean"] = scalar_error(low.outcome.averaged(sample.batch), [high.outcome], sample, [1.0])
            for name, error in whole.items():
                spot = Spot(FORWARD, True, name)
                spots[spot] = max(spots.get(spot, 0.0), _FACTOR * error)
            for spot, difference in forced.differences.items():
                spots[spot] = max(spots.get(spot, 0.0), _FACTOR * difference.error)
        errors = gradient_errors(self.gradients, gradients)
        usual = float(np.quantile(list(errors.values()), 0.9)) if errors else 0.0  # one sum says little of rounding
        routers = tuple(f"{name}." for name, each in self.bench.model.named_modules() if is_router(each))
        for name, error in errors.items():
            factor = _ROUTER_FACTOR if name.startswith(routers) else _FACTOR
            spots[Spot(name, False, "gradient")] = factor * max(error, usual)
        self.bench.set_dtype(self.dtype)
        return Tolerance(local=2 * eps, mean=eps / 4, whole=2 * eps, gradients=4 * eps, measured=spots)

    def _forced_by(self, sample: SampleBatch, low: Alone) -> Forced:
        """Computes a sample anew, with the inputs that each module had in another dtype."""
        forced = Forced(sample, [low.calls])
        with torch.no_grad():
            forced.finish(self.bench.alone(sample, forced), [low.outcome])
        return forced

    def _in_order(self, pack: SampleBatch) -> list[Alone]:
        return [self.alone[number] for number in pack.samples]

    def _whole(self, pack: SampleBatch) -> Whole:
        """Computes a pack as it is, forward and backward."""
        outcomes = [each.outcome for each in self._in_order(pack)]
        with torch.set_grad_enabled(self.with_gradients):
            outcome = self.bench.pack(pack)
            if self.with_gradients:
                outcome.objective(pack.batch).backward()  # type: ignore[no-untyped-call]
        errors = output_errors(outcome.detached(), outcomes, pack, self._shares_of(pack))
        found = self.bench.gradients()
        return Whole(errors, gradient_errors(found, self.gradients) if self.with_gradients else {})

    def _shares_of(self, pack: SampleBatch) -> list[float]:
        return [self.shares[number] for number in pack.samples]

    def _compared(self, bench: Bench, pack: SampleBatch, again: bool = True) -> _Compared:
        """Computes a pack with right inputs for each module; if some are wrong, again, to see how far samples reach."""
        alone = self._in_order(pack)
        probed = self._always_probed(bench)
        while True:
            forced = Forced(pack, [each.calls for each in alone], probed, self._ends())
            with torch.no_grad():
                outcome = bench.pack(pack, forced)
            forced.finish(outcome, [each.outcome for each in alone])
            compared = _Compared(Scene(pack, forced.places, forced.influences), forced.differences, outcome)
            more = probed_places(self._wrong(compared), forced.places)
            if more <= probed or not again:
                return compared
            probed |= more

    def _always_probed(self, bench: Bench) -> frozenset[str]:
        """In low precision, all places that mix tokens: a leak may be smaller than rounding, but noise shows it."""
        if self.dtype == torch.float32:
            return frozenset()
        names = {name for name, module in bench.model.named_modules() if mixes_tokens(Site(name, module))}
        heard = {name for each in self.alone for name in each.calls if name.rpartition(".")[0] in names}
        return frozenset(names | {name for name in heard if name.rpartition(".")[2] not in _children(bench, name)})

    def _ends(self) -> int:
        return max(len(each.outcome.mtp) for each in self.alone)

    def _wrong(self, compared: _Compared) -> list[Difference]:
        return [each for spot, each in compared.differences.items() if each.error > self.tolerance.of(spot)]

    def _findings(self, bench: Bench, compared: _Compared) -> list[Diagnosis]:
        """Faults of the forward pass, module by module, and of the loss."""
        pack = compared.scene.data
        outcomes = [each.outcome for each in self._in_order(pack)]
        wrong = self._wrong(compared)
        if any(each.spot == Spot(FORWARD, False, "logits") for each in wrong) or not _shows_modules(compared):
            return findings_of([each for each in wrong if each.spot.place != FORWARD], compared.scene, self.tolerance)
        found = findings_of(wrong, compared.scene, self.tolerance)
        error = scalar_error(compared.outcome, outcomes, pack, self._shares_of(pack))
        allowed = max(self.tolerance.mean, self.tolerance.measured.get(Spot(FORWARD, True, "mean"), 0.0))
        if error > allowed and compared.outcome.losses.ndim == 0:
            found.append(Diagnosis(Leak.LABELS, FORWARD, "output loss", "forward", error, allowed))
        for number, each in enumerate(found):
            if each.kind is Leak.LABELS and each.place == FORWARD:
                crosses, words = explained(compared.outcome, pack)
                if words:
                    found[number] = replace(each, crosses=crosses, evidence=words)
        return found

    def _hidden(self, pack: SampleBatch, compared: _Compared, whole: Whole) -> list[Diagnosis]:
        """Faults that no module shows: those of the backward pass, and of forward passes that show no modules."""
        for name, error in whole.outputs.items():
            allowed = max(self.tolerance.whole, self.tolerance.measured.get(Spot(FORWARD, True, name), 0.0))
            if error > allowed:
                crosses = reached_by_tokens(self.bench, pack)
                evidence = "" if crosses is None else "other text in one sample changes another" if crosses else ""
                detail = f"output {name}; no module shows a difference"
                return [
                    Diagnosis(
                        Leak.OTHER, FORWARD, detail, "forward", error, allowed, crosses=crosses, evidence=evidence
                    )
                ]
        wrong = {
            name: (error, allowed)
            for name, error in whole.gradients.items()
            if error > (allowed := self.tolerance.of_gradient(name))
        }
        return [backward_finding(wrong, whole.gradients, compared.scene)] if wrong else []

    def _is_right_when_first(self, pack: SampleBatch) -> bool:
        """Whether a new model computes a pack rightly, before any other."""
        if is_default(self.bench.checked):
            return False
        fresh = Bench(self.build(), self.device, self.dtype)
        fresh.model.load_state_dict(self.bench.model.state_dict(), strict=False)
        try:
            return not self._findings(fresh, self._compared(fresh, pack, again=False))
        except ForwardError:
            return False

    def _of_error(self, pack: SampleBatch, number: int, error: ForwardError) -> Diagnosis:
        """A fault, if the pack can be computed before any other; else an error of the user's."""
        if not self._is_right_when_first(pack):
            keys = ", ".join(pack.batch.sample_keys)
            raise UsageError(f"check-model: the pack of samples {keys} cannot be computed: {error}") from error
        return _stale(Diagnosis(Leak.STALE, FORWARD, str(error), "forward", float("inf"), 0.0), number)

    def _repeated(self) -> list[Diagnosis]:
        """Computes the first sample again: the reference is the forward under test, which may keep something."""
        sample, reference = self.data.alone[0], self.alone[0]
        forced = Forced(sample, [reference.calls], ends=self._ends())
        with torch.no_grad():
            forced.finish(self.bench.alone(sample, forced), [reference.outcome])
        scene = Scene(sample, forced.places, {})
        wrong = [each for spot, each in forced.differences.items() if each.error > self.tolerance.of(spot)]
        found = findings_of(wrong, scene, self.tolerance)
        return [_stale(found[0], len(self.data.packs))] if found else []

    def _reference(self) -> str:
        if self.bench.plain:
            return "the plain forward of transformers"
        return (
            "the model's own `alone`" if self.bench.checked.alone else "the model's own forward, one sample per batch"
        )


def _shows_modules(compared: _Compared) -> bool:
    """Whether the forward pass called modules of the model; one that is compiled does not."""
    return any(spot.place != FORWARD for spot in compared.differences)


def _children(bench: Bench, name: str) -> set[str]:
    """Names of the modules of the module that a place belongs to."""
    return {child for child, _ in bench.model.get_submodule(name.rpartition(".")[0]).named_children()}


def compared_differences(compared: Sequence[_Compared]) -> list[tuple[Difference, Scene]]:
    """All differences with the pack they are of."""
    return [(each, one.scene) for one in compared for each in one.differences.values()]


def _stale(finding: Diagnosis, calls: int) -> Diagnosis:
    return replace(
        finding,
        kind=Leak.STALE,
        crosses=True,
        evidence=f"pack {calls + 1} is right in a new model, and wrong after other calls",
    )
