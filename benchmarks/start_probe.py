"""Runs train.py in this process and records where the time until its first step goes, for `cold_start.py`.

    python benchmarks/start_probe.py REPORT.json STEPS -- --data DIR --preset 2b …
    START_PROBE_WITHOUT=small_gradients,weight_copies python benchmarks/start_probe.py …

It ends the process after so many steps, without the final checkpoint. The report has seconds since the start of the
process for each phase, each compilation of Triton (kernel, seconds, whether it was cached) and of FlashAttention 4 (in
this process), each build of C code, seconds in autotuners and in torch's compiler, and how often functions were found
on the stack of the main thread, or of the one that it waits for in a backward pass, every 20 ms until the end of the
first step.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)

TICKS = os.sysconf("SC_CLK_TCK")
#: Pieces of the trainer that are switched off: ahead, small_gradients, weight_copies.
WITHOUT = set(filter(None, os.environ.get("START_PROBE_WITHOUT", "").split(",")))
BORN = float(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / TICKS  # seconds after boot


def age() -> float:
    """Seconds since this process started."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - BORN


class Sampler(threading.Thread):
    """Counts functions on the stacks that are at work."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.phase = "start"
        self.counts: dict[str, Counter[str]] = {}
        self.samples: Counter[str] = Counter()
        self.stopped = False

    def run(self) -> None:
        main = threading.main_thread().ident
        while not self.stopped:
            time.sleep(0.02)
            frames = sys._current_frames()
            names = self.names(frames[main])
            if any(name.endswith("_engine_run_backward") for name in names):
                for number, frame in frames.items():
                    if number not in (main, self.ident):
                        others = self.names(frame)
                        if not any(name.endswith((":wait", ":select", ":_wait_for_tstate_lock")) for name in others):
                            names |= others
            self.counts.setdefault(self.phase, Counter()).update(names)
            self.samples[self.phase] += 1

    @staticmethod
    def names(frame: FrameType | None) -> set[str]:
        found = set()
        while frame is not None:
            code = frame.f_code
            found.add(f"{'/'.join(code.co_filename.split('/')[-3:])}:{code.co_name}")
            frame = frame.f_back
        return found

    def most(self) -> dict[str, Any]:
        return {
            phase: {"samples": self.samples[phase], "functions": counts.most_common(150)}
            for phase, counts in self.counts.items()
        }


class Probe:
    """What is recorded."""

    def __init__(self, report: Path, steps: int):
        self.report, self.steps = report, steps
        self.phases: list[tuple[str, float]] = []
        self.compiled: list[dict[str, Any]] = []
        self.flash: list[tuple[str, float]] = []
        self.built: list[tuple[str, float]] = []
        self.tuned: Counter[str] = Counter()
        self.dynamo: list[tuple[str, float]] = []
        self.step_seconds: list[float] = []
        self.sampler = Sampler()
        self.sampler.start()

    def mark(self, phase: str) -> None:
        """Ends a phase."""
        self.phases.append((phase, round(age(), 2)))
        self.sampler.phase = f"after {phase}"
        print(f"[{age():6.1f} s] {phase}", flush=True)

    def after(self, where: Any, name: str, phase: str) -> None:
        """Ends a phase when a function returns for the first time."""
        original = getattr(where, name)

        def marked(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if phase not in dict(self.phases):
                self.mark(phase)
            return result

        setattr(where, name, marked)

    def watch_triton(self) -> None:
        from triton import knobs
        from triton.runtime import build
        from triton.runtime.autotuner import Autotuner

        def listener(*, src: Any, times: Any, cache_hit: bool, **_: Any) -> None:
            seconds = times.total / 1e6
            self.compiled.append({"kernel": src.name, "cached": cache_hit, "seconds": seconds, "at": round(age(), 1)})

        knobs.compilation.listener = listener
        self.timed(build, "_build", lambda args: args[0], lambda name, s: self.built.append((name, s)))
        self.timed(Autotuner, "_bench", lambda args: args[0].base_fn.__name__, self.add_tuned)

    def add_tuned(self, name: str, seconds: float) -> None:
        self.tuned[name] += seconds

    @staticmethod
    def timed(where: Any, name: str, label: Callable[[Any], str], note: Callable[[str, float], None]) -> None:
        original = getattr(where, name)

        def measured(*args: Any, **kwargs: Any) -> Any:
            begun = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                note(label(args), round(time.perf_counter() - begun, 3))

        setattr(where, name, measured)

    def watch_flash(self) -> None:
        cute = sys.modules.get("cutlass.cute")  # Transformer Engine imports FlashAttention 4 where it is installed
        if cute is not None:
            self.timed(cute, "compile", lambda args: type(args[0]).__name__, lambda *note: self.flash.append(note))

    def watch_dynamo(self) -> None:
        from torch._dynamo import callback

        begun: list[float] = []
        callback.callback_handler.register_start_callback(lambda *_: begun.append(time.perf_counter()))
        callback.callback_handler.register_end_callback(
            lambda given: self.dynamo.append((str(given), round(time.perf_counter() - begun.pop(), 3)))
        )

    def watch_trainer(self) -> None:
        import vlmdata.model.training.loop as loop
        from vlmdata.model.training.step import Stepper

        self.mark("imports of megatron-core and Transformer Engine")
        switch_off(WITHOUT - {"ahead"})
        self.after(loop, "architecture_of", "process groups")
        self.after(loop, "open_loader", "data opened and planned")
        self.after(loop, "build", "model built")
        self.after(loop, "build_learner", "optimizer built")
        self.after(loop, "by_leaders", "kernels awaited")
        self.watch_dynamo()
        self.watch_flash()
        finish = Stepper.finish

        def counted(stepper: Stepper, launched: Any) -> Any:
            result = finish(stepper, launched)
            self.step_seconds.append(round(result.seconds, 4))
            if len(self.step_seconds) == 1:
                self.mark("first step")
                self.sampler.stopped = True
            if len(self.step_seconds) == self.steps:
                self.end(result)
            return result

        Stepper.finish = counted  # type: ignore[method-assign]

    def end(self, result: Any) -> None:
        """Writes the report and ends the process."""
        import torch

        found = {
            "phases": self.phases,
            "steps": self.step_seconds,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
            "triton": self.compiled,
            "flash": self.flash,
            "built": self.built,
            "tuned": dict(self.tuned),
            "dynamo": self.dynamo,
            "stacks": self.sampler.most(),
        }
        self.report.write_text(json.dumps(found))
        sys.stdout.flush()
        os._exit(0)


def switch_off(pieces: set[str]) -> None:
    """Replaces pieces of the trainer by what megatron-core and Triton do without them."""
    if unknown := pieces - {"ahead", "small_gradients", "weight_copies"}:
        raise SystemExit(f"START_PROBE_WITHOUT: unknown {min(unknown)}")
    if "ahead" in pieces:
        import vlmdata.model.training.kernels as kernels

        kernels.compile_ahead = lambda config: None
    if pieces - {"ahead"}:
        from megatron.core.distributed import DistributedDataParallel

        import vlmdata.model.training.optimizer.learner as learner

        if "small_gradients" in pieces:
            learner.GradientBuffers = DistributedDataParallel  # type: ignore[misc, assignment]
        if "weight_copies" in pieces:
            learner.copy_weights_at_once = lambda optimizer: None


def main() -> None:
    report, steps, separator, *arguments = sys.argv[1:]
    assert separator == "--"
    probe = Probe(Path(report), int(steps))
    switch_off(WITHOUT & {"ahead"})
    import vlmdata.model.parallel.environment as environment

    prepare = environment.before_megatron

    def prepared(**options: Any) -> None:
        probe.mark("configuration checked")
        probe.after(environment, "_load_bundled_cudnn", "torch imported")
        prepare(**options)
        import importlib.util

        if importlib.util.find_spec("triton") is not None:
            probe.watch_triton()
        probe.watch_trainer()

    environment.before_megatron = prepared
    sys.argv = ["train.py", *arguments]
    import train

    train.app()


if __name__ == "__main__":
    main()
