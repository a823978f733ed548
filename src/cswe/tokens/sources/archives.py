"""Zip files from anywhere: read in place, never unpacked, and refused when they are a trap."""

import os
import stat
import zipfile
import zlib
from pathlib import Path, PurePosixPath

from cswe.tokens.errors import BadItemError

# An image of a real data set is far below these; what is above is there to fill the memory.
MAX_MEMBER_BYTES = 256 * 2**20
MAX_RATIO = 500
_RATIO_MATTERS_ABOVE = 2**20
_ENCRYPTED = 1  # the bit of a member's flags


def safe_members(archive: zipfile.ZipFile, *, of_images: bool = True) -> list[zipfile.ZipInfo]:
    """List the files of an archive; refuse names that lead outside, links, and, where images are expected, bombs.

    Nothing is unpacked, so a bad name could do no harm here; but an archive that has one is not what it says it is.
    """
    members = []
    for member in archive.infolist():
        path = PurePosixPath(member.filename)
        where = f"{archive.filename}: member {member.filename!r}"
        if path.is_absolute() or ".." in path.parts or "\\" in member.filename or ":" in "".join(path.parts[:1]):
            raise ValueError(f"{where}: expected a path inside the archive; the archive is not to be trusted")
        if stat.S_ISLNK(member.external_attr >> 16):
            raise ValueError(f"{where}: expected a file but got a link; the archive is not to be trusted")
        if member.is_dir():
            continue
        ratio = member.file_size / max(member.compress_size, 1)
        large = member.file_size > MAX_MEMBER_BYTES or (member.file_size > _RATIO_MATTERS_ABOVE and ratio > MAX_RATIO)
        if of_images and large:
            raise ValueError(
                f"{where}: expected at most {MAX_MEMBER_BYTES} bytes, packed at most {MAX_RATIO} to 1, but it says "
                f"{member.file_size} bytes, packed {ratio:.0f} to 1; the archive is not to be trusted"
            )
        members.append(member)
    return members


def open_zip(path: Path) -> zipfile.ZipFile:
    """Open a zip file, or say that it is none."""
    try:
        return zipfile.ZipFile(path)
    except zipfile.BadZipFile as error:
        raise ValueError(f"{path}: expected a zip file but it cannot be read ({error}); download it again") from None


class FilePool:
    """Bytes of files in folders and in zips. Zips are opened once in every process, since handles cannot be shared."""

    def __init__(self) -> None:
        self._open: dict[Path, zipfile.ZipFile] = {}
        self._process = os.getpid()

    def __getstate__(self) -> dict[str, object]:
        return {}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__init__()  # type: ignore[misc]

    def read(self, container: Path, member: str) -> bytes:
        """Read a member of a zip, or a file below a folder."""
        if container.is_dir():
            try:
                return (container / member).read_bytes()
            except OSError as error:
                raise BadItemError(f"cannot be read ({error.strerror})") from None
        try:
            archive = self._zip(container)
            if archive.getinfo(member).flag_bits & _ENCRYPTED:
                raise BadItemError("is encrypted; unpack its archive with the password first")
            return archive.read(member)
        except BadItemError:
            raise
        except (zipfile.BadZipFile, zlib.error, OSError, EOFError, ValueError, NotImplementedError, KeyError) as error:
            raise BadItemError(f"cannot be read from its archive ({type(error).__name__})") from None

    def stamp(self, container: Path, member: str) -> bytes:
        """Return what is known of a file without reading it: its size and, in a zip, its checksum."""
        if not container.is_dir():
            info = self._zip(container).getinfo(member)
            return f"{info.file_size} {info.CRC}".encode()
        try:
            return str((container / member).stat().st_size).encode()
        except OSError:
            return b"cannot be read"

    def _zip(self, container: Path) -> zipfile.ZipFile:
        if self._process != os.getpid():  # forked: the parent's file position is not ours
            self._open, self._process = {}, os.getpid()
        if container not in self._open:
            self._open[container] = open_zip(container)
        return self._open[container]
