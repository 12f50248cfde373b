"""One file on its way into the cache: in parts over several connections, resumable, verified.

The parts are written to their places in `.partial/NAME.part`; the small `.partial/NAME.json` beside it tells which of
them are complete, so that a kill or a broken line costs the unfinished parts alone. Only a file that is whole and
verified moves to its name.
"""

import errno
import hashlib
import os
import random
import re
import shutil
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import Field
from tqdm import tqdm

from data.atomic_file import sync_folder
from data.checked_json import JsonError, read_json, write_json
from data.file_lock import held
from data.transfers.remote import (
    CACHE_VARIABLE,
    S3,
    ChangedError,
    ChecksumError,
    Http,
    Location,
    NetworkError,
    NoRangesError,
    NoSpaceError,
    ObjectStoreError,
    PermissionDeniedError,
    Remote,
    RetryError,
    SourceChangedError,
    StoppedError,
    Transfer,
)

PARTIAL = ".partial"

_MIB = 2**20
_MOST_PARTS = 10**6
_LONGEST_WAIT = 30.0  # seconds between two attempts
_FIRST_RETRIES = 3  # before anything has answered, so that a machine without a network is told so within seconds
STARTS = 3  # downloads of a file that keeps changing
_FAREWELL = 2.0  # seconds left to the threads to end after Ctrl-C

T = TypeVar("T")


def etag_part_sizes(size: int, count: int) -> list[int]:
    """Part sizes in bytes, likely ones first, by which an upload of `size` bytes has `count` parts (ETag md5-count).

    Those of the usual programs, and the least whole number of MiB: of large files with many parts no other fits.
    """
    if count < 2:
        return [size] * count
    least, most = -(-size // count), (size - 1) // (count - 1)
    usual = [mib * _MIB for mib in (8, 5, 15, 16, 32, 50, 64, 100, 128, 256, 512, 1024)]
    fitting = [part for part in [*usual, -(-least // _MIB) * _MIB] if least <= part <= most]
    return list(dict.fromkeys(fitting))


_Bytes = Annotated[int, Field(ge=0, lt=2**63)]


@dataclass
class Parts:
    """The sidecar: which parts of which version of the file are in the .part file."""

    size: _Bytes
    version: str
    part_bytes: Annotated[int, Field(ge=1, lt=2**63)]
    done: list[_Bytes] = field(default_factory=list)

    def are_of(self, remote: Remote) -> bool:
        """Whether they are parts of this version, in a number that can be."""
        count = -(-self.size // self.part_bytes)
        known = (self.size, self.version) == (remote.size, remote.version) and count <= _MOST_PARTS
        return known and len(set(self.done)) == len(self.done) and max(self.done, default=-1) < count

    def span(self, part: int) -> tuple[int, int]:
        """First byte, and the one after the last."""
        return part * self.part_bytes, min((part + 1) * self.part_bytes, self.size)

    def missing(self) -> list[int]:
        return sorted(set(range(-(-self.size // self.part_bytes))) - set(self.done))

    def bytes_done(self) -> int:
        return sum(stop - start for start, stop in map(self.span, self.done))


@dataclass
class Arrived:
    """The sidecar of a file that is whole. checksum: what it was verified by, "sha256 ..." or "etag ...", or None."""

    source: str
    size: _Bytes
    mtime_ns: int
    version: str | None
    checksum: str | None


def checksum_of(path: Path) -> str | None:
    """What a fetched file was verified by, as long as it is untouched; None where nothing was known but its length."""
    record = _recorded(path.parent / PARTIAL / f"{path.name}.json", Arrived)
    if record is None or not path.is_file():
        return None
    found = path.stat()
    return record.checksum if (record.size, record.mtime_ns) == (found.st_size, found.st_mtime_ns) else None


@dataclass
class Download:
    """One file on its way to `path`. replace: whether another file that is found there is fetched anew."""

    location: Location
    path: Path
    size: int | None
    sha256: str | None
    transfer: Transfer
    progress: bool
    replace: bool = False

    def __post_init__(self) -> None:
        self.sha256 = self.sha256.lower() if self.sha256 else None
        files = (self.path.parent / PARTIAL / (self.path.name + ending) for ending in (".part", ".json", ".lock"))
        self.part_file, self.sidecar, self.lock_file = files
        self.guard, self.stop = threading.Lock(), threading.Event()

    def run(self) -> None:
        """Return with the verified file at `path`, or raise ObjectStoreError."""
        try:
            if self.is_there():
                return
            waiting = f"another process is fetching {self.path.name}; waiting for it"
            # It may have come while this process waited.
            with held(self.lock_file, waiting=waiting):
                if not self.is_there():
                    self._download()
        except ObjectStoreError as error:
            raise type(error)(
                f"{self.location.uri}: {error}. {error.advice}. To place the file by hand, get "
                f"{self.location.address} in any other way and move it to {self.path}: it is used as it is found"
            ) from error
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
            kind = NoSpaceError if full else PermissionDeniedError
            raise kind(
                f"{self.location.uri} could not be written to {self.path.parent}: {error}. Free space there, mend its "
                f"permissions, or choose another folder by cache_dir or ${CACHE_VARIABLE}; finished parts are kept"
            ) from error

    def is_there(self) -> bool:
        """Whether `path` exists; unless it may be replaced, raises ChecksumError where it is not the file asked for."""
        if not self.path.is_file():
            return False
        size = self.path.stat().st_size
        try:
            if self.size not in (None, size):
                raise ChecksumError(
                    f"{self.path} has {size} bytes instead of {self.size}: another file, or a damaged one"
                )
            # A sum once verified holds as long as the file is untouched: hashing 50 GB takes minutes.
            if self.sha256 and checksum_of(self.path) != f"sha256 {self.sha256}":
                self._check_sha256(self.path)
        except ChecksumError:
            if self.replace:
                return False
            raise
        return True

    def _download(self) -> None:
        self.transport = (S3 if self.location.scheme == "s3" else Http)(self.location, self.transfer)
        for _ in range(STARTS):
            try:
                remote = self._fetch()
                break
            except ChangedError:
                print(f"{self.path.name} changed on the server; starting again", file=sys.stderr)
        else:
            raise SourceChangedError(f"the file changed on the server during each of {STARTS} downloads")
        try:
            checksum = self._verify(remote)
        except ChecksumError:
            self._discard()
            raise
        os.replace(self.part_file, self.path)
        sync_folder(self.path.parent)
        found = self.path.stat()
        record = Arrived(self.location.uri, found.st_size, found.st_mtime_ns, remote.version, checksum)
        write_json(self.sidecar, record)

    def _fetch(self) -> Remote:
        """Fill the .part file. Raises ChangedError, after which everything must start again."""
        remote = self._retrying(self._probe, min(_FIRST_RETRIES, self.transfer.retries))
        if remote.size is not None and self.size not in (None, remote.size):
            raise ChecksumError(f"the server's file has {remote.size} bytes instead of {self.size}")
        # The parts of a file that tells no version could be of two versions.
        if remote.ranges and remote.version:
            try:
                self._fetch_parts(remote)
                return remote
            except NoRangesError:
                pass
        self._discard()
        return self._retrying(partial(self._fetch_whole, remote), self.transfer.retries)

    def _probe(self) -> Remote:
        """Ask for the first byte: unlike HEAD, this is allowed wherever the file is, and shows whether ranges work."""
        try:
            with self.transport.open((0, 1), None) as (status, headers, _):
                return Remote.of(status, headers)
        except (ChangedError, NoRangesError):  # the former: an empty file has no first byte
            return Remote(None, None)

    def _fetch_parts(self, remote: Remote) -> None:
        """Bring the missing parts, several at once. Whatever ends this early, the complete ones stay on record."""
        parts = self._kept_parts(remote)
        self._check_space(remote.size - parts.bytes_done())
        pending, failures = iter(parts.missing()), []

        def work() -> None:
            try:
                while True:
                    with self.guard:
                        part = next(pending, None)
                    if part is None or self.stop.is_set():
                        return
                    self._fetch_part(remote, *parts.span(part), bar)
                    with self.guard:
                        parts.done.append(part)
                        write_json(self.sidecar, parts)
            except BaseException as error:  # raised again by the main thread
                failures.append(error)
                self.stop.set()

        # Daemons, so that Ctrl-C need not wait until the timeout of a silent server.
        threads = [threading.Thread(target=work, daemon=True) for _ in range(self.transfer.connections)]
        with progress_bar(remote.size, parts.bytes_done(), self.path.name, self.progress) as bar:
            try:
                for thread in threads:
                    thread.start()
                for thread in threads:
                    while thread.is_alive():
                        thread.join(0.5)  # without a number Ctrl-C would not be heard on Windows
            except BaseException:
                self.stop.set()
                for thread in threads:
                    if thread.ident is not None:
                        thread.join(_FAREWELL / len(threads))
                raise
        if failures:
            self.stop.clear()  # all threads have ended; what follows waits on it between attempts
            raise failures[0]

    def _kept_parts(self, remote: Remote) -> Parts:
        """The parts an earlier start left, where they are of this version; else an empty .part file of full size."""
        parts = _recorded(self.sidecar, Parts)
        if parts and parts.are_of(remote) and self.part_file.is_file() and self.part_file.stat().st_size == remote.size:
            return parts
        self._discard()
        self._check_space(remote.size)
        with open(self.part_file, "wb") as file:
            file.truncate(remote.size)
        parts = Parts(remote.size, remote.version, self.transfer.part_bytes)
        write_json(self.sidecar, parts)
        return parts

    def _fetch_part(self, remote: Remote, start: int, stop: int, bar: tqdm) -> None:
        """Bring bytes start to stop - 1, going on after a broken connection from the last byte that came."""

        def attempt() -> None:
            span = file.tell(), stop
            with self.transport.open(span, remote.strong_etag) as (status, headers, chunks):
                seen = Remote.of(status, headers)
                if not seen.ranges or seen.start != span[0] or not seen.version:
                    raise NoRangesError
                if (seen.size, seen.version) != (remote.size, remote.version):
                    raise ChangedError
                for chunk in chunks:
                    if self.stop.is_set():
                        raise StoppedError
                    if len(chunk) > stop - file.tell():
                        raise NoRangesError
                    file.write(chunk)
                    with self.guard:
                        bar.update(len(chunk))
            if file.tell() < stop:
                raise RetryError("the connection ended early")

        # A descriptor of its own: a thread that Ctrl-C left behind can never write into another file.
        with open(self.part_file, "r+b") as file:
            file.seek(start)
            self._retrying(attempt, self.transfer.retries, file.tell)
            file.flush()
            os.fsync(file.fileno())  # before the sidecar says so

    def _fetch_whole(self, probed: Remote) -> Remote:
        """Bring the file as one stream, from its start: all that a server without ranges or versions allows."""
        with self.transport.open(None, None) as (status, headers, chunks):
            if status != 200:
                raise RetryError(f"the server answered {status} where the whole file was asked for")
            seen = Remote.of(status, headers)
            # What the probe told of the file holds for the stream as well.
            seen = replace(seen, size=probed.size if seen.size is None else seen.size)
            if probed.size not in (None, seen.size) or probed.version not in (None, seen.version):
                raise ChangedError
            if seen.size is None and not seen.framed and self.size is None and self.sha256 is None:
                raise ChecksumError(
                    "the server tells no length, so that a file cut short would pass: give size or sha256"
                )
            self._check_space(seen.size or self.size or 0)
            with open(self.part_file, "wb") as file, progress_bar(seen.size, 0, self.path.name, self.progress) as bar:
                for chunk in chunks:
                    file.write(chunk)
                    bar.update(len(chunk))
                if seen.size not in (None, file.tell()):
                    raise RetryError(f"the connection ended after {file.tell()} of {seen.size} bytes")
                file.flush()
                os.fsync(file.fileno())
        return seen

    def _retrying(self, attempt: Callable[[], T], retries: int, position: Callable[[], int] = int) -> T:
        """What `attempt` returns, called again after each failure that may pass. position: bytes that have come."""
        failures, reached = 0, position()
        while True:
            try:
                return attempt()
            except RetryError as error:
                if position() > reached:
                    failures, reached = 0, position()
                failures += 1
                if failures > retries:
                    raise NetworkError(f"{error} ({failures} failures in a row)") from error
                wait = self.transfer.backoff * 2 ** (failures - 1) * random.uniform(0.5, 1)
                if self.stop.wait(min(max(wait, error.wait), _LONGEST_WAIT)):
                    raise StoppedError from error

    def _check_space(self, needed: int) -> None:
        free = shutil.disk_usage(self.part_file.parent).free
        if free < needed:
            raise NoSpaceError(
                f"{needed / 1e9:.2f} GB are still to come and {self.path.parent} has {free / 1e9:.2f} GB"
            )

    def _verify(self, remote: Remote) -> str | None:
        """Raise ChecksumError unless the .part file is what the server and the caller say; return by which sum."""
        size = self.part_file.stat().st_size
        for expected in (remote.size, self.size):
            if expected not in (None, size):
                raise ChecksumError(f"{size} bytes came instead of {expected}")
        if self.sha256:
            self._check_sha256(self.part_file)
            return f"sha256 {self.sha256}"
        found = re.fullmatch(r'"(([0-9a-f]{32})(?:-(\d+))?)"', remote.version or "") if remote.s3_etag else None
        if not found:
            return None
        etag, digest, number = found.groups()
        count = int(number or 0)  # 0: the sum of the bytes; n: the sum of the sums of n parts
        for part_bytes in etag_part_sizes(size, max(count, 1)):
            sums = self._digests(self.part_file, "md5", part_bytes)
            if (hashlib.md5(b"".join(sums), usedforsecurity=False).digest() if count else sums[0]).hex() == digest:
                return f"etag {etag}"
        if count < 2:
            raise ChecksumError(f"what came has another MD5 sum than the server's ETag {etag}")
        # A part size is a guess, and no hit no proof of damage.
        print(f"{self.path.name}: length verified; ETag {etag} is of unknown parts", file=sys.stderr)
        return None

    def _check_sha256(self, path: Path) -> None:
        (found,) = self._digests(path, "sha256", path.stat().st_size)
        if found.hex() != self.sha256:
            raise ChecksumError(
                f"{path} has SHA-256 {found.hex()} instead of {self.sha256}: another file, or a damaged one"
            )

    def _digests(self, path: Path, algorithm: str, part_bytes: int) -> list[bytes]:
        """The digest of each `part_bytes` bytes of a file; one digest of an empty file."""
        digests = []
        with open(path, "rb") as file, progress_bar(path.stat().st_size, 0, "verifying", self.progress) as bar:
            while not digests or file.tell() < bar.total:
                digest, left = hashlib.new(algorithm, usedforsecurity=False), part_bytes
                while chunk := file.read(min(left, _MIB)):
                    digest.update(chunk)
                    bar.update(len(chunk))
                    left -= len(chunk)
                digests.append(digest.digest())
        return digests

    def _discard(self) -> None:
        self.sidecar.unlink(missing_ok=True)  # first: it must never speak of another .part file
        self.part_file.unlink(missing_ok=True)


def progress_bar(total: int | None, initial: int, name: str, progress: bool) -> tqdm:
    return tqdm(total=total, initial=initial, desc=name[:40], unit="B", unit_scale=True, disable=not progress)


def _recorded(path: Path, kind: type[T]) -> T | None:
    """What a sidecar says; None where there is none of this kind."""
    try:
        return read_json(path, kind)
    except (FileNotFoundError, NotADirectoryError, JsonError):
        return None
