"""A lock that ends with its process: whoever is killed holds nothing any more.

The operating system keeps it, so that there is no stale lock to guess about; on network file systems it needs one that
knows locks (NFS from version 4, Lustre mounted with ``flock``).
"""

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import sleep
from typing import IO, Any


class Lock:
    """A file that one process at a time can hold.

    Parameters
    ----------
    file
        The lock's file; made if need be, and left where it is.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     one, two = Lock(Path(folder) / "lock"), Lock(Path(folder) / "lock")
    ...     print(one.take(), two.take())
    ...     one.release()
    ...     print(two.take())
    ...     two.release()
    True False
    True
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self._stream: IO[str] | None = None

    def take(self) -> bool:
        """Try to take the lock; say whether it worked."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        stream = self.file.open("a+", encoding="utf-8")
        # The file may have been removed, and made anew by another, between opening and locking it.
        if not _lock(stream) or not self._still_there(stream):
            stream.close()
            return False
        stream.truncate(0)
        stream.write(json.dumps(_this_process()))
        stream.flush()
        self._stream = stream
        return True

    def wait(self, seconds_between: float = 0.01) -> None:
        """Take the lock as soon as it is free."""
        while not self.take():
            sleep(seconds_between)

    def release(self, *, remove: bool = False) -> None:
        """Let go; remove the file, too, if nobody will ask for this lock again."""
        if self._stream is None:
            return
        if remove and os.name == "posix":  # elsewhere an open file cannot be removed
            self.file.unlink(missing_ok=True)
        self._stream.close()
        self._stream = None

    def is_held_here(self) -> bool:
        """Say whether it is this very process that holds the lock, by another object."""
        try:
            return bool(json.loads(self.file.read_text(encoding="utf-8")) == _this_process())
        except (OSError, ValueError):  # let go meanwhile, or about to be written
            return False

    def _still_there(self, stream: IO[str]) -> bool:
        try:
            return os.path.samestat(os.fstat(stream.fileno()), self.file.stat())
        except FileNotFoundError:
            return False


def _this_process() -> dict[str, Any]:
    return {"pid": os.getpid(), "host": socket.gethostname()}


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Hold a lock for the length of a block, waiting for it first."""
    lock = Lock(file)
    lock.wait()
    try:
        yield
    finally:
        lock.release()


def _lock(stream: IO[str]) -> bool:
    if os.name == "posix":
        import fcntl

        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
    import msvcrt  # pragma: no cover

    try:  # pragma: no cover
        stream.seek(0)
        msvcrt.locking(stream.fileno(), msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
    except OSError:
        return False
    return True
