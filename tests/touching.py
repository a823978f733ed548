"""Hearing of every touch of the files of a folder, so that a process can end at any of them, and always at the same."""

import sys
from pathlib import Path

TOUCHES = frozenset({"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "shutil.rmtree"})


class Touches:
    """Calls `then` at a touch of a folder after so many others, and at every one from there on."""

    def __init__(self, then):
        self._then, self._folder, self._left = then, None, 0
        sys.addaudithook(self._heard)  # for good, but at rest while there is no folder

    def count(self, folder, touches):
        self._folder, self._left = folder, touches

    def rest(self):
        self._folder = None

    def _heard(self, event, values):
        if self._folder is None or event not in TOUCHES or isinstance(values[0], int):
            return
        if Path(str(values[0])).is_relative_to(self._folder):
            self._left -= 1
            if self._left < 0:
                self._then()
