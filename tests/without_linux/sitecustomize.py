"""Takes away what only Linux has, in each process that Python starts with this folder on its path.

What stands for a Mac: no ``/proc``, no memfd, seals or glibc, no scheduling of cores, other advice for memory,
processes that are spawned, and neither Triton nor CUDA's libraries.
"""

import ctypes
import fcntl
import mmap
import multiprocessing
import os
import sys
import time

_GONE = {
    os: (
        *("memfd_create", "sched_", "posix_f", "MFD_", "SCHED_", "POSIX_FADV_", "eventfd", "EFD_", "pidfd_open"),
        *("copy_file_range", "splice", "SPLICE_", "getxattr", "setxattr", "O_TMPFILE", "O_PATH", "O_DIRECT"),
        *("getrandom", "GRND_", "unshare", "setns", "CLONE_", "pipe2", "process_cpu_count"),
    ),
    fcntl: ("F_ADD_SEALS", "F_GET_SEALS", "F_SEAL_", "F_OFD_", "F_NOTIFY", "F_SETPIPE_SZ", "F_GETPIPE_SZ"),
    mmap: (
        "MADV_REMOVE",
        "MADV_DONTFORK",
        "MADV_DOFORK",
        "MADV_HUGEPAGE",
        "MADV_NOHUGEPAGE",
        "MADV_POPULATE",
        "MAP_POPULATE",
    ),
    time: ("CLOCK_BOOTTIME",),
}
_OF_GLIBC = ("gnu_get_libc_version", "mallopt", "malloc_trim", "stderr")


class _Library(ctypes.CDLL):
    def __init__(self, name=None, *args, **options):
        if name is not None and str(name).startswith("libcuda"):
            raise OSError(f"{name}: not of this system")
        super().__init__(name, *args, **options)

    def __getattr__(self, name):
        if name in _OF_GLIBC:
            raise AttributeError(name)
        return super().__getattr__(name)


def _no_proc(event, arguments):
    of_linux = event in ("open", "os.listdir", "os.scandir") and str(arguments[0]).startswith(("/proc", "/sys"))
    if of_linux and "psutil" not in sys._getframe(1).f_code.co_filename:  # which knows each system
        raise FileNotFoundError(2, "No such file or directory", arguments[0])


def _without_proc(function):
    def called(path, *args, **options):
        if str(path).startswith(("/proc", "/sys")):
            raise FileNotFoundError(2, "No such file or directory", path)
        return function(path, *args, **options)

    return called


for _module, _names in _GONE.items():
    for _name in [name for name in dir(_module) if name.startswith(_names)]:
        delattr(_module, _name)
ctypes.CDLL = _Library
os.readlink, os.stat = map(_without_proc, (os.readlink, os.stat))
sys.addaudithook(_no_proc)
sys.modules["triton"] = None
multiprocessing.set_start_method("spawn")
