"""Forks commands from a process that has imported everything, so that starting one takes no time.

Reads a request a line, answers a line. A script, not a test.
"""

import io
import json
import os
import signal
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from touching import Touches

import cswe.training.commands
import cswe.training.vector_commands  # noqa: F401
from cswe.cli import main


def child(arguments, environment, told, touches):
    if touches is not None:
        Touches(partial(os.kill, os.getpid(), signal.SIGKILL)).count(*touches)
    # Whoever started the tests in the background has them ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update(environment)
    sys.stdout = io.StringIO()
    sys.stderr = open(told, "w", encoding="utf-8")  # noqa: SIM115
    code = main(arguments)
    sys.stderr.flush()
    os._exit(code)


def serve(request):
    with tempfile.TemporaryDirectory() as folder:
        told = [f"{folder}/{number}" for number in range(len(request["environments"]))]
        started = time.perf_counter()
        children = []
        for environment, file in zip(request["environments"], told, strict=True):
            pid = os.fork()
            if pid == 0:
                try:
                    child(request["arguments"], environment, file, request["touches"])
                except SystemExit as stop:
                    os._exit(stop.code)
                finally:
                    os._exit(99)
            children.append(pid)
        if request["when"] is not None:
            file = Path(request["when"])
            while not (file.exists() and file.stat().st_size):
                time.sleep(0.002)
        if request["after"] is not None:
            time.sleep(request["after"])
        if request["when"] is not None or request["after"] is not None:
            for pid in children:
                os.kill(pid, getattr(signal, "SIG" + request["signal"]))
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
        said = [Path(file).read_text(encoding="utf-8") if Path(file).exists() else "" for file in told]
        return {"codes": codes, "said": said, "seconds": time.perf_counter() - started}


if __name__ == "__main__":
    loaded = sorted({name.split(".")[0] for name in sys.modules})
    import torch._dynamo  # noqa: F401  # what a torch optimiser imports when it is first made

    print(json.dumps(loaded), flush=True)
    for line in sys.stdin:
        print(json.dumps(serve(json.loads(line))), flush=True)
