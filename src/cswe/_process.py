"""The memory of this process, as the system tells it."""

import sys


def resident_bytes() -> int | None:
    """Give the memory that is resident now; ``None`` where nobody says."""
    return _status("VmRSS")


def peak_bytes() -> int | None:
    """Give the largest resident memory so far; ``None`` where nobody says."""
    peak = _status("VmHWM")
    if peak is not None:
        return peak
    try:
        import resource
    except ImportError:  # pragma: no cover
        return None
    # Not the first choice: on Linux it begins with what the parent of this process had.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def forget_peak() -> bool:
    """Let the peak begin anew, where that is allowed: some systems do not let a process do so."""
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        return False
    return True


def _status(field: str) -> int | None:
    try:
        with open("/proc/self/status") as file:
            return next((int(line.split()[1]) << 10 for line in file if line.startswith(field)), None)
    except OSError:
        return None
