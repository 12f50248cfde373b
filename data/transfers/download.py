"""One file on its way into the cache: in parts over several connections, resumable, verified.

The parts are written to their places in `.partial/NAME.part`; the small `.partial/NAME.json` beside it tells which of
them are complete, so that a kill or a broken line costs the unfinished parts alone. Only a file that is whole and
verified moves to its name.
"""

import errno
import hashlib
import json
import os
import random
import re
import shutil
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeVar

from filelock import FileLock, Timeout
from tqdm import tqdm

from data.atomic_file import atomic_write, sync_folder
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
_LONGEST_WAIT = 30.0  # seconds between two attempts
_FIRST_RETRIES = 3  # before anything has answered, so that a machine without a network is told so within seconds
_STARTS = 3  # downloads of a file that keeps changing
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


@dataclass
class Parts:
    """The sidecar: which parts of which version of the file are in the .part file."""

    size: int
    version: str
    part_bytes: int
    done: list[int] = field(default_factory=list)

    def span(self, part: int) -> tuple[int, int]:
        """First byte, and the one after the last."""
        return part * self.part_bytes, min((part + 1) * self.part_bytes, self.size)

    def missing(self) -> list[int]:
        return sorted(set(range(-(-self.size // self.part_bytes))) - set(self.done))

    def bytes_done(self) -> int:
        return sum(stop - start for start, stop in map(self.span, self.done))


@dataclass
class Download:
    """One file on its way to `path`. version: the ETag that a file found there must have come with, if recorded."""

    location: Location
    path: Path
    size: int | None
    sha256: str | None
    version: str | None
    transfer: Transfer
    progress: bool

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
            self.lock_file.parent.mkdir(parents=True, exist_ok=True)
            lock = FileLock(self.lock_file)
            try:
                lock.acquire(timeout=0)
            except Timeout:
                print(f"another process is fetching {self.path.name}; waiting for it", file=sys.stderr)
                lock.acquire()
            try:
                # It may have come while this process waited.
                if not self.is_there():
                    self._download()
            finally:
                lock.release()
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
        """Whether `path` exists; raises ChecksumError where it is not the file asked for."""
        if not self.path.is_file():
            return False
        found, record = self.path.stat(), read_json(self.sidecar)
        if self.version and record.get("version", self.version) != self.version:
            return False
        if self.size not in (None, found.st_size):
            raise ChecksumError(
                f"{self.path} has {found.st_size} bytes instead of {self.size}: another file, or a damaged one"
            )
        # A sum once verified holds as long as the file is untouched: hashing 50 GB takes minutes.
        if self.sha256 and (record.get("sha256"), record.get("mtime_ns")) != (self.sha256, found.st_mtime_ns):
            self._check_sha256(self.path)
        return True

    def _download(self) -> None:
        self.transport = (S3 if self.location.scheme == "s3" else Http)(self.location, self.transfer)
        for _ in range(_STARTS):
            try:
                remote = self._fetch()
                break
            except ChangedError:
                print(f"{self.path.name} changed on the server; starting again", file=sys.stderr)
        else:
            raise SourceChangedError(f"the file changed on the server during each of {_STARTS} downloads")
        try:
            self._verify(remote)
        except ChecksumError:
            self._discard()
            raise
        os.replace(self.part_file, self.path)
        sync_folder(self.path.parent)
        found = self.path.stat()
        record = {"source": self.location.uri, "size": found.st_size, "mtime_ns": found.st_mtime_ns}
        write_json(self.sidecar, {**record, "version": remote.version, "sha256": self.sha256})

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
        return self._retrying(self._fetch_whole, self.transfer.retries)

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
                        write_json(self.sidecar, asdict(parts))
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
        kept = read_json(self.sidecar)
        if kept.keys() == Parts.__dataclass_fields__.keys() and self.part_file.is_file():
            parts = Parts(**kept)
            if (parts.size, parts.version, self.part_file.stat().st_size) == (remote.size, remote.version, remote.size):
                return parts
        self._discard()
        self._check_space(remote.size)
        with open(self.part_file, "wb") as file:
            file.truncate(remote.size)
        parts = Parts(remote.size, remote.version, self.transfer.part_bytes)
        write_json(self.sidecar, asdict(parts))
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

    def _fetch_whole(self) -> Remote:
        """Bring the file as one stream, from its start: all that a server without ranges or versions allows."""
        with self.transport.open(None, None) as (status, headers, chunks):
            seen = Remote.of(status, headers)
            if not seen.framed and self.size is None and self.sha256 is None:
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

    def _verify(self, remote: Remote) -> None:
        """Raise ChecksumError unless the .part file is what the server and the caller say, as far as they do."""
        size = self.part_file.stat().st_size
        for expected in (remote.size, self.size):
            if expected not in (None, size):
                raise ChecksumError(f"{size} bytes came instead of {expected}")
        found = re.fullmatch(r'"([0-9a-f]{32})(?:-(\d+))?"', remote.version or "") if remote.s3_etag else None
        if self.sha256:
            self._check_sha256(self.part_file)
        elif found and found[2] is None:
            (md5,) = self._digests(self.part_file, "md5", size)
            if md5.hex() != found[1]:
                raise ChecksumError(f"what came has MD5 {md5.hex()} instead of {found[1]}, the server's ETag")
        elif found:
            for part_bytes in etag_part_sizes(size, int(found[2])):
                md5s = b"".join(self._digests(self.part_file, "md5", part_bytes))
                if hashlib.md5(md5s, usedforsecurity=False).hexdigest() == found[1]:
                    return
            # A part size is a guess, and no hit no proof of damage.
            print(f"{self.path.name}: length verified; ETag {found[0]} is of unknown parts", file=sys.stderr)

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


def read_json(path: Path) -> dict:
    """Empty where there is no such file, or no JSON object in it."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def write_json(path: Path, content: dict) -> None:
    with atomic_write(path) as file:
        json.dump(content, file)
