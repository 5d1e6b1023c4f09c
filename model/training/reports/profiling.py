"""A torch profile of some steps: a Chrome trace and a table for each rank."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import torch


class Profiler:
    """Profiles a range of steps, from 1, on CPU and a CUDA device; does nothing without a range.

    A run that starts within the range profiles the rest of it. A run that ends within it writes a partial profile: the
    trace ``path``, and a table with the suffix ``.txt``.
    """

    def __init__(self, steps: tuple[int, ...], path: Path, device: torch.device):
        self._first, self._last = steps or (1, 0)
        self._path, self._device = path, device
        self._profile: torch.profiler.profile | None = None

    def covers(self, step: int) -> bool:
        """Whether a step is to be profiled."""
        return self._first <= step <= self._last

    @contextlib.contextmanager
    def at(self, step: int) -> Iterator[None]:
        """Wraps a step."""
        if self._profile is None and self.covers(step):
            activities = [torch.profiler.ProfilerActivity.CPU]
            if self._device.type == "cuda":
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            self._profile = torch.profiler.profile(activities=activities, record_shapes=True)
            self._profile.start()
        yield
        if step == self._last:
            self.close()

    def close(self) -> None:
        """Ends the current profile, if any, and writes it. A full disk causes only a warning."""
        profile, self._profile = self._profile, None
        if profile is None:
            return
        profile.stop()
        by = "self_cuda_time_total" if self._device.type == "cuda" else "self_cpu_time_total"
        table = profile.key_averages().table(sort_by=by, row_limit=40, max_name_column_width=80)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            profile.export_chrome_trace(str(self._path))
            if not self._path.exists():  # torch logs a failure, raises nothing, and leaves a partial file
                self._path.with_name(self._path.name + ".tmp").unlink(missing_ok=True)
                raise OSError("torch could not write the trace")
            self._path.with_suffix(".txt").write_text(table)
        except OSError as error:
            folder = next(each for each in self._path.absolute().parents if each.is_dir())
            free = shutil.disk_usage(folder).free / 1e6
            warning = (
                f"warning: {self._path}: no profile of these steps: {error.strerror or error} ({free:,.1f} MB free). "
                "The run continues. Free space or fix permissions, and profile later steps with run.profile"
            )
            print(warning, file=sys.stderr, flush=True)
