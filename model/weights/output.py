"""Writes converted weights completely or not at all, and explains what stopped a conversion."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from torch.distributed.checkpoint.api import CheckpointException

from vlmdata.errors import ResourceError, VlmdataError
from vlmdata.model.weights.hf_files import WeightsError
from vlmdata.model.weights.places import temporary_of

_REFUSED = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.ENOTDIR)


@contextlib.contextmanager
def writing_to(out: Path) -> Iterator[Path]:
    """Yields a temporary folder that becomes ``out`` at the end, and is removed if the conversion fails.

    It lies beside ``out``, or in ``out`` if that exists, as it may be the root of another disk. What a killed
    conversion left there is removed first.
    """
    folder = temporary_of(out)
    try:
        with _explained(folder, out):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            yield folder
            if folder.parent != out:
                os.rename(folder, out)
                return
            for path in sorted(folder.iterdir(), key=lambda each: each.name == "config.json"):  # the config at last
                os.rename(path, out / path.name)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def reading_from(source: Path) -> Iterator[None]:
    """Converts what torch and others raise for damaged files of a distributed checkpoint to a :class:`WeightsError`."""
    try:
        yield
    except VlmdataError:
        raise
    except (Exception, CheckpointException) as error:
        cause = _cause(error)
        if not isinstance(cause, Exception):  # the user interrupts
            raise cause from error
        if not (source / ".metadata").exists():
            raise WeightsError(
                f"{source} was removed while it was read, as a run removes old checkpoints (run.keep). Convert "
                "a newer one"
            ) from error
        raise WeightsError(
            f"{source} cannot be read; its files seem damaged: {described(cause)}. Use another checkpoint, or restore "
            "this one"
        ) from error


@contextlib.contextmanager
def _explained(folder: Path, out: Path) -> Iterator[None]:
    try:
        yield
    except VlmdataError:
        raise
    except (Exception, CheckpointException) as error:
        cause = _cause(error)
        # Errors of tensors that are made while they are written, and interruptions.
        if isinstance(cause, VlmdataError) or not isinstance(cause, Exception):
            raise cause from error
        refusal = _refusal_of(folder, cause)
        if refusal is None and isinstance(cause, OSError) and cause.filename is not None:
            raise WeightsError(f"{os.fsdecode(cause.filename)} cannot be read: {cause.strerror}") from error
        if refusal is None:
            raise cause from error
        shutil.rmtree(folder, ignore_errors=True)
        place = next(each for each in (out, *out.absolute().parents) if each.is_dir())
        free = shutil.disk_usage(place).free / 1e6
        raise ResourceError(
            f"{out} could not be written: {refusal}; {free:,.1f} MB free. Nothing was left there. Free space, fix "
            "permissions or choose another --out"
        ) from error


def described(error: BaseException) -> str:
    """Formats an error as one line: its kind, and the first line of its text."""
    first = next((line.strip().rstrip(".") for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def _cause(error: BaseException) -> BaseException:
    """Returns the error of a rank, which torch wraps."""
    if isinstance(error, CheckpointException) and error.failures:
        found: BaseException = next(iter(error.failures.values()))[0]
        return found
    return error


def _refusal_of(folder: Path, cause: BaseException) -> str | None:
    """Returns the system's reason why files cannot be written, which torch hides; None if they can."""
    if isinstance(cause, OSError) and cause.errno in _REFUSED and _is_in(cause, folder):
        return cause.strerror
    refusal = refusal_of(folder / "probe")
    return None if refusal is None else refusal.strerror


def refusal_of(probe: Path) -> OSError | None:
    """Returns the error with which the system refuses a file of 1 MiB, which torch hides; None if it takes one."""
    try:
        with probe.open("wb") as file:
            file.write(bytes(1 << 20))
            file.flush()
            os.fsync(file.fileno())
        probe.unlink()
    except OSError as error:
        return error
    return None


def _is_in(error: OSError, folder: Path) -> bool:
    """Whether an error may concern the output: it names a path there or none, or the disk is full."""
    names = [os.fspath(each) for each in (error.filename, error.filename2) if isinstance(each, str | Path)]
    return error.errno == errno.ENOSPC or not names or any(str(folder.parent) in name for name in names)
