"""Commands in processes of their own that share one import of their libraries, which is what a start costs.

:class:`Forked` is a :class:`subprocess.Popen` whose process is forked from a server that has imported what commands
import, in place of a new interpreter: 0.1 s of CPU time, not 8. All else is that of a process: its number, arguments,
environment, folder, session, files, signals and exit status. Python's own server of processes does it, with modules of
our choice. The server of workers that a command starts is forked, too: from a process that the command forks at its
start and that waits until it is asked to.

A test of the start itself, of imports or of the interpreter uses :class:`subprocess.Popen`.
"""

from __future__ import annotations

import ast
import atexit
import contextlib
import faulthandler
import io
import os
import pickle
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from multiprocessing import forkserver, reduction, resource_tracker, util
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
#: What servers of processes import, and the variable with the address of one that all workers of pytest share.
COMMANDS, MODELS = "tests.preloaded_commands", "tests.model.preloaded"
SHARED = {COMMANDS: "VLMDATA_TESTS_COMMANDS", MODELS: "VLMDATA_TESTS_MODELS"}
#: What the shared server of :data:`MODELS` imports: workers of pytest are forked from it, too.
TESTS = "tests.preloaded_tests"
_servers: dict[str, forkserver.ForkServer] = {}
_owner = 0
_shared: list[forkserver.ForkServer] = []


def share_servers(cache: Path) -> None:
    """Starts both servers for all processes that this one starts from now on; they end with this one.

    Args:
        cache: Where what is forked keeps what it downloads and extracts, unless its environment says otherwise.
    """
    for module, variable in SHARED.items():
        server: Any = forkserver.ForkServer()
        with mock.patch.dict(os.environ, {"VLMDATA_CACHE": str(cache)}):
            _start(server, TESTS if module == MODELS else module)
        os.environ[variable] = server._forkserver_address
        _shared.append(server)


def connected_to_shared(server: Any, module: str) -> bool:
    """Makes a server that is not started stand for the shared one with a module, if there is one."""
    address = os.environ.get(SHARED[module])
    if address is None:
        return False
    server._forkserver_address = address
    reading, server._forkserver_alive_fd = os.pipe()  # what is forked inherits one, and closes it
    os.close(reading)
    server.ensure_running = lambda: None
    return True


def _start(server: forkserver.ForkServer, module: str) -> None:
    server.set_forkserver_preload([module])
    with contextlib.chdir(ROOT):  # where it finds that
        server.ensure_running()


def _running_server(module: str) -> forkserver.ForkServer:
    """The server with a module which programs of this process are forked from."""
    global _owner
    if _owner != os.getpid():
        _servers.clear()
        _owner = os.getpid()
    if module not in _servers:
        _servers[module] = forkserver.ForkServer()
        if not connected_to_shared(_servers[module], module):
            _start(_servers[module], module)
    return _servers[module]


def server_address(module: str) -> str:
    """The address of the server with a module, for processes that shall use it, too."""
    server: Any = _running_server(module)
    return str(server._forkserver_address)


class Forked(subprocess.Popen[str]):
    """A process that calls a function as its program.

    Args:
        target: ``module:function``, or the path of a script.
        arguments: Of the command line, the name of the program first.
        server: The module with which the server was started that forks it.
        nurseries: How many servers of workers the program may start, one after the other, that are forked, too.
        options: Of :class:`subprocess.Popen`: ``stdin``, ``stdout``, ``stderr``, ``env``, ``cwd`` and
            ``start_new_session``.
    """

    def __init__(
        self, target: str, arguments: Sequence[str], *, server: str = COMMANDS, nurseries: int = 1, **options: Any
    ):
        unknown = set(options) - {"stdin", "stdout", "stderr", "env", "cwd", "start_new_session", "text"}
        assert not unknown, f"a forked command has no {unknown}"
        self._target, self._server, self._nurseries = target, server, nurseries
        super().__init__(list(arguments), **options)

    def _execute_child(self, args: Any, *given: Any) -> None:
        # The order is that of `Popen`'s own: preexec_fn, close_fds, …
        cwd, env = given[4], given[5]
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite = given[9:15]
        program = _Program(
            self._target,
            list(map(os.fspath, args)),
            dict(os.environ if env is None else env),
            os.path.abspath(cwd or os.getcwd()),
            session=given[20],
            nurseries=self._nurseries,
        )
        files = [own if own != -1 else number for number, own in enumerate((p2cread, c2pwrite, errwrite))]
        self._status, data = _running_server(self._server).connect_to_new_process(files)
        with open(data, "wb") as pipe:
            pickle.dump({}, pipe)
            pickle.dump(program, pipe)
        self.pid = forkserver.read_signed(self._status)
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]

    def _internal_poll(self, _deadstate: int | None = None, *_: Any) -> int | None:
        if self.returncode is None and self._waitpid_lock.acquire(False):  # type: ignore[attr-defined]
            try:
                self._look(0)
            finally:
                self._waitpid_lock.release()  # type: ignore[attr-defined]
        return self.returncode

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        """As of `Popen`: what ``os.waitpid`` says of a child, which this process is not."""
        self._look(0 if wait_flags else None)
        if self.returncode is None:
            return 0, 0
        code, self.returncode = self.returncode, None
        return self.pid, -code if code < 0 else code << 8

    def _look(self, seconds: float | None) -> None:
        """Takes the exit status, if the server sends one in time."""
        if self.returncode is None and self._status != -1 and select.select([self._status], [], [], seconds)[0]:
            try:
                self.returncode = forkserver.read_signed(self._status)
            finally:
                os.close(self._status)
                self._status = -1


def completed(process: subprocess.Popen[str], timeout: float) -> subprocess.CompletedProcess[str]:
    """Waits for a process with its outputs in pipes; kills it if it takes longer than ``timeout`` seconds."""
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    except BaseException:
        process.kill()
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def run_forked(
    target: str, *arguments: object, timeout: float = 550, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Runs a program to its end, as :func:`subprocess.run` does; its outputs are caught."""
    caught: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
    return completed(Forked(target, [target, *map(str, arguments)], **caught), timeout)


@dataclass
class _Program:
    """What a forked process does; the server of processes calls ``_bootstrap``."""

    target: str
    arguments: list[str]
    environment: dict[str, str]
    folder: str
    session: bool
    nurseries: int

    def _bootstrap(self, parent_sentinel: int) -> int:
        os.close(parent_sentinel)
        self._be_a_program()
        code = 1
        try:
            code = self._call()
        finally:
            with contextlib.suppress(BaseException):
                threading._shutdown()  # type: ignore[attr-defined]
            with contextlib.suppress(BaseException):
                atexit._run_exitfuncs()
            for file in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError):
                    file.flush()
        return code

    def _be_a_program(self) -> None:
        """Makes this process what a new interpreter would be."""
        if self.session:
            os.setsid()
        own, inherited = forkserver._forkserver, forkserver._forkserver._inherited_fds  # type: ignore[attr-defined]
        os.close(own._forkserver_alive_fd)
        for number, file in enumerate(inherited):
            os.dup2(file, number)
        for file in {*inherited} - {0, 1, 2}:
            os.close(file)
        own._forkserver_address = own._forkserver_alive_fd = own._forkserver_pid = own._inherited_fds = None
        tracker: Any = resource_tracker._resource_tracker
        os.close(tracker._fd)
        tracker._fd = tracker._pid = None
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        util._finalizer_registry.clear()  # type: ignore[attr-defined]
        util._run_after_forkers()  # type: ignore[attr-defined]
        os.chdir(self.folder)
        os.environ.clear()
        os.environ.update(self.environment)
        sys.path[:] = [*filter(None, self.environment.get("PYTHONPATH", "").split(os.pathsep)), *filter(None, sys.path)]
        sys.argv = self.arguments
        sys.stdin, sys.stdout, sys.stderr = (_open(number) for number in range(3))
        for name in ("stdin", "stdout", "stderr"):
            setattr(sys, f"__{name}__", getattr(sys, name))
        if os.environ.get("PYTHONFAULTHANDLER"):
            faulthandler.enable(sys.stderr)
        for _ in range(self.nurseries):
            _Nursery().install()

    def _call(self) -> int:
        """The exit code of the program, as the interpreter forms it."""
        try:
            if ":" in self.target:
                module, function = self.target.split(":")
                getattr(import_module(module), function)()
            else:
                sys.path.insert(0, os.path.dirname(os.path.abspath(self.target)))
                runpy.run_path(self.target, run_name="__main__")
        except SystemExit as end:
            if end.code is None or isinstance(end.code, int):
                return (end.code or 0) & 0xFF
            print(end.code, file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            traceback.print_exc()
            sys.stderr.flush()
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            return 1
        return 0


def _open(number: int) -> Any:
    """A standard file, buffered as the interpreter would."""
    terminal = os.isatty(number)
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    binary = io.FileIO(number, "r" if number == 0 else "w", closefd=False)
    if number == 0:
        return io.TextIOWrapper(io.BufferedReader(binary), encoding="utf-8", errors="strict")
    return io.TextIOWrapper(
        io.BufferedWriter(binary),
        encoding="utf-8",
        errors="backslashreplace" if number == 2 else "strict",
        line_buffering=terminal or number == 2,
        write_through=unbuffered,
    )


class _Nursery:
    """A process that waits to become a server of workers of the program that forked it, or ends with it."""

    def __init__(self) -> None:
        here, there = socket.socketpair()
        self._pid = os.fork()
        if self._pid:
            there.close()
            self._pipe: socket.socket | None = here
            os.set_inheritable(here.fileno(), False)
        else:
            code = 1
            try:
                here.close()
                _wait_and_serve(there)
                code = 0
            except SystemExit:
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)

    def install(self) -> None:
        """Has a server of workers be made of the process; once it is, the next one is started as before."""
        util.spawnv_passfds = partial(self._start, util.spawnv_passfds)

    def _start(self, usual: Any, path: Any, args: Any, passed: Sequence[int]) -> int:
        call = os.fsdecode(args[-1])
        if self._pipe is None or "multiprocessing.forkserver" not in call:
            return int(usual(path, args, passed))
        pipe, self._pipe = self._pipe, None
        message = pickle.dumps((call, dict(os.environ), os.getcwd()))
        with pipe:
            pipe.sendall(len(message).to_bytes(8, "little") + message)
            reduction.sendfds(pipe, [*passed, 1, 2])
        return self._pid


def fork_server_of_workers() -> None:
    """Has the first server of workers that this process starts be forked from it, with what it has imported."""
    _Nursery().install()


def _wait_and_serve(pipe: socket.socket) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as of the server
    with pipe, pipe.makefile("rb", buffering=0) as file:
        head = file.read(8)
        if not head:
            return
        message = b""
        while len(message) < int.from_bytes(head, "little"):
            message += file.read(int.from_bytes(head, "little") - len(message)) or b""
        call, environment, folder = pickle.loads(message)
        listener, alive, *outputs = reduction.recvfds(pipe, 4)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for number, output in zip((1, 2), outputs, strict=True):
        os.dup2(output, number)
        os.close(output)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    # from multiprocessing.forkserver import main; main(LISTENER, ALIVE, [MODULE…], **{…})
    tree = ast.parse(call).body[-1]
    assert isinstance(tree, ast.Expr)
    assert isinstance(tree.value, ast.Call)
    preload = ast.literal_eval(tree.value.args[2])
    given = ast.literal_eval(tree.value.keywords[0].value)
    forkserver.main(listener, alive, preload, **given)
