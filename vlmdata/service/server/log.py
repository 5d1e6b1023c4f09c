"""The log of ``vlmdata serve``: what strangers cause is bounded, and a stream that nobody reads holds up no server."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from typing import TextIO

#: Lines of one kind (the same message, whatever its fields), and the seconds after which as many more are written.
_LINES, _SECONDS = 20, 10.0
#: Lines that wait for the stream. Further ones are left out.
_MOST_WAITING = 1000
_SECONDS_TO_CLOSE = 1.0
_LEFT_OUT = "lines left out"


class LogHandler(logging.Handler):
    """Writes records in a thread of its own, a line each, and says how many lines it left out."""

    def __init__(self, stream: TextIO, as_json: bool):
        super().__init__()
        self.setFormatter(LineFormat(as_json))
        self._stream = stream
        self._news = threading.Condition()
        self._lines: deque[str] = deque()
        self._written: dict[str, int] = {}  # in this period, by message
        self._left_out = 0
        self._closing = False
        self._thread = threading.Thread(target=self._write_all, name="vlmdata-log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Hands a line over to the thread, or leaves it out. Never waits for the stream."""
        with self._news:
            if self._written.get(record.msg, 0) >= _LINES or len(self._lines) >= _MOST_WAITING:
                self._left_out += 1
                return
            self._written[record.msg] = self._written.get(record.msg, 0) + 1
            self._lines.append(self.format(record))
            self._news.notify()

    def close(self) -> None:
        """Writes what waits, unless the stream does not take it."""
        with self._news:
            self._closing = True
            self._news.notify()
        self._thread.join(_SECONDS_TO_CLOSE)
        super().close()

    def _write_all(self) -> None:
        begun = time.monotonic()
        while True:
            with self._news:
                self._news.wait_for(lambda: self._lines or self._closing, max(begun + _SECONDS - time.monotonic(), 0))
                if self._closing or time.monotonic() >= begun + _SECONDS:
                    begun = time.monotonic()
                    self._end_of_period()
                lines, closing = list(self._lines), self._closing
                self._lines.clear()
            try:
                for line in lines:
                    self._stream.write(line + "\n")
                self._stream.flush()
            except (OSError, ValueError):  # nobody reads it any more, or it is closed: there is no place to say so
                return
            if closing:
                return

    def _end_of_period(self) -> None:
        self._written.clear()
        if self._left_out:
            fields = {"msg": _LEFT_OUT, "lines": self._left_out, "levelno": logging.WARNING, "levelname": "WARNING"}
            self._lines.append(self.format(logging.makeLogRecord(fields)))
            self._left_out = 0


class LineFormat(logging.Formatter):
    """One line a record: time, level, message and fields."""

    _KNOWN = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}

    def __init__(self, as_json: bool):
        super().__init__()
        self._as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        """Returns the line of a record."""
        fields = {name: value for name, value in record.__dict__.items() if name not in self._KNOWN}
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        time = self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z")
        if self._as_json:
            values = {"time": time, "level": record.levelname.lower(), "message": record.getMessage(), **fields}
            return json.dumps(values, default=str)
        words = [time, record.levelname, record.getMessage(), *(f"{name}={value}" for name, value in fields.items())]
        return " ".join(words)
