"""What any test may ask for."""

import pytest

from tests.touching import Touches


class KilledError(BaseException):
    """What nothing catches, as nothing catches a kill."""


class Killer:
    """Breaks a call off where it touches a file of a folder for the n-th time, and lets it touch none afterwards."""

    def __init__(self):
        self._touches = Touches(self._kill)

    def _kill(self):
        raise KilledError

    def __call__(self, folder, touches, call, *arguments, **options):
        """Call, and say whether it was broken off."""
        self._touches.count(folder, touches)
        try:
            call(*arguments, **options)
        except KilledError:
            return True
        finally:
            self._touches.rest()
        return False


@pytest.fixture(scope="session")
def killer():
    return Killer()
