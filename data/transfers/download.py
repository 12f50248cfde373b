"""One file on its way into the cache: in ranged parts over several connections, resumable, verified.

The parts are written to their places in `.partial/NAME.part`; the small `.partial/NAME.json` beside it tells which of
them are complete, so that a kill or a broken line costs the unfinished parts alone. Only a file that is whole and
verified moves to its name. A server without ranges, or that tells no version of the file, is read as one stream.
"""

import errno
import hashlib
import os
import random
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import IO, Annotated, NamedTuple, TypeVar

import requests
import urllib3
from pydantic import Field
from tqdm import tqdm

from data.atomic_file import sync_folder
from data.checked_json import JsonError, read_json, write_json
from data.file_lock import held
from data.program import ProgramError

CACHE_VARIABLE, PARTIAL = "TOPK_CACHE", ".partial"
CONNECTIONS = 8  # parts under way at once; requests keeps 10 connections open at most
PART_BYTES = 16 * 2**20  # a download taken up again keeps the part size it began with
TIMEOUT, BACKOFF, LONGEST_WAIT = 30.0, 1.0, 30.0  # seconds: without a byte, before the first retry, before any
# Failures in a row, without a byte between them; fewer before anything has answered: no network is told in seconds.
RETRIES, FIRST_RETRIES = 8, 3
STARTS = 3  # downloads of a file that keeps changing
CHECK_ADDRESS = "Check bucket, key, address and endpoint_url"
CHECK_CREDENTIALS = (
    "Check the credentials (AWS_PROFILE, AWS_ACCESS_KEY_ID), or give the https:// address of a public object; some "
    "servers say the same of a key that does not exist"
)

T = TypeVar("T")
_Bytes = Annotated[int, Field(ge=0, lt=2**63)]


class ObjectStoreError(ProgramError):
    """A file could not be brought or sent; the message says why and how to mend it."""


class RetryError(Exception):
    """A failure that may pass."""


class ChangedError(Exception):
    """The server holds another file than at the start, or sends other bytes than those asked for."""


@dataclass
class Parts:
    """The sidecar of a file under way: the numbers of the parts, of one version, that are in the .part file."""

    size: _Bytes
    version: str
    part_bytes: Annotated[int, Field(ge=512)]
    done: list[_Bytes] = field(default_factory=list)


@dataclass
class Arrived:
    """The sidecar of a file that is whole. checksum: what it was verified by, "sha256 ..." or "etag ...", or None."""

    size: _Bytes
    mtime_ns: int
    checksum: str | None


class Remote(NamedTuple):
    """What an answer tells of a file. version: its ETag or the time of its last change. start: the range's first byte.

    framed: whether the body's end differs from a broken line. sum: the ETag where it follows S3's rule, an MD5 sum.
    """

    size: int | None = None
    version: str | None = None
    start: int | None = None
    framed: bool = False
    sum: str = ""

    @classmethod
    def of(cls, answer: requests.Response) -> "Remote":
        headers, start = answer.headers, None
        length = headers.get("content-length", "")
        if answer.status_code == 206:
            if not (found := re.fullmatch(r"bytes (\d+)-\d+/(\d+)", headers.get("content-range", ""))):
                raise ChangedError
            start, length = int(found[1]), found[2]
        size = int(length) if length.isdecimal() else None
        framed = size is not None or headers.get("transfer-encoding", "").lower() == "chunked"
        version = headers.get("etag") or headers.get("last-modified")
        encrypted = "kms" in headers.get("x-amz-server-side-encryption", "")
        encrypted = encrypted or "x-amz-server-side-encryption-customer-algorithm" in headers
        plain = ("x-amz-request-id" in headers or "X-Amz-Date=" in answer.url) and not encrypted
        return cls(size, version, start, framed, headers.get("etag", "") if plain else "")


def checksum_of(path: Path) -> str | None:
    """What a fetched file was verified by, as long as it is untouched; None where nothing was known but its length."""
    record = _recorded(path.parent / PARTIAL / f"{path.name}.json", Arrived)
    if record is None or not path.is_file():
        return None
    found = path.stat()
    return record.checksum if (record.size, record.mtime_ns) == (found.st_size, found.st_mtime_ns) else None


def check_sha256(path: Path, sha256: str, progress: bool) -> None:
    """Raise ObjectStoreError unless a file has this sum. One verified holds as long as the file is untouched."""
    if checksum_of(path) != f"sha256 {sha256.lower()}":
        found = _digests(path, "sha256", path.stat().st_size, progress)[0].hex()
        if found != sha256.lower():
            raise ObjectStoreError(
                f"{path} has SHA-256 {found} instead of {sha256}: another file, or a damaged one. Check sha256; a file "
                "in the cache must be deleted before it is fetched again"
            )


@dataclass
class Download:
    """One file on its way to `path`.

    name, public: what messages call it, and the address by which a person can get it. address: returns the one to ask,
    signed anew each time where need be. sha256: of the file, None where it is not known.
    """

    name: str
    public: str
    address: Callable[[], str]
    path: Path
    sha256: str | None
    progress: bool

    def run(self) -> None:
        """Return with the verified file at `path`. Raises ObjectStoreError."""
        files = (self.path.parent / PARTIAL / (self.path.name + ending) for ending in (".part", ".json", ".lock"))
        self.part_file, self.sidecar, lock_file = files
        try:
            if not self.path.is_file():  # else without the lock: the cache may be another's, read-only
                with held(lock_file, waiting=f"another process is fetching {self.path.name}; waiting for it"):
                    if not self.path.is_file():
                        self._download()
            if self.sha256:
                check_sha256(self.path, self.sha256, self.progress)
        except ObjectStoreError as error:
            raise ObjectStoreError(
                f"{self.name}: {error}. To place the file by hand, get {self.public} in any other way and move it to "
                f"{self.path}: it is used as it is found"
            ) from error
        except OSError as error:
            raise ObjectStoreError(
                f"{self.name} could not be written to {self.path.parent}: {error}. Free space there, mend its "
                f"permissions, or choose another folder by cache_dir or ${CACHE_VARIABLE}; finished parts are kept"
            ) from error

    def _download(self) -> None:
        self.session = requests.Session()
        for _ in range(STARTS):
            try:
                remote = self._fetch()
                break
            except ChangedError:
                print(f"{self.path.name} changed on the server; starting again", file=sys.stderr)
        else:
            raise ObjectStoreError(
                f"the file changed on the server during each of {STARTS} downloads. Start again later"
            )
        try:
            checksum = self._verify(remote)
        except ObjectStoreError:
            self._discard()
            raise
        os.replace(self.part_file, self.path)
        sync_folder(self.path.parent)
        found = self.path.stat()
        write_json(self.sidecar, Arrived(found.st_size, found.st_mtime_ns, checksum))

    def _fetch(self) -> Remote:
        """Fill the .part file, several parts at once. Whatever ends this early, the complete ones stay on record.

        Raises ChangedError, after which everything must start again.
        """
        remote = _retrying(self._probe, FIRST_RETRIES)
        ranged = remote.start is not None and bool(remote.version)  # else parts could be of two versions
        parts = self._kept_parts(remote) if ranged else self._no_parts(remote.size or 0, "", 2**62)
        missing = sorted({*range(-(-parts.size // parts.part_bytes))} - {*parts.done}) if ranged else [0]
        to_come = sum(min(parts.part_bytes, parts.size - part * parts.part_bytes) for part in missing)
        if (free := shutil.disk_usage(self.part_file.parent).free) < to_come:
            raise OSError(errno.ENOSPC, f"{to_come / 1e9:.2f} GB are still to come, {free / 1e9:.2f} GB are free")
        if not self.part_file.is_file():
            with open(self.part_file, "wb") as file:
                file.truncate(parts.size)
        guard, stop = threading.Lock(), threading.Event()

        def bring(part: int) -> int:
            # A descriptor of its own: a thread that Ctrl-C left behind can never write into another file.
            with open(self.part_file, "r+b") as file:
                file.seek(part * parts.part_bytes)
                end = min((part + 1) * parts.part_bytes, parts.size) if ranged else remote.size
                try:
                    _retrying(lambda: attempt(file, end), RETRIES, file.tell if ranged else int)
                except BaseException:
                    stop.set()
                    raise
                file.flush()
                os.fsync(file.fileno())  # before the sidecar says so
            return part

        def attempt(file: IO[bytes], end: int | None) -> None:
            """Go on after a broken connection from the last byte that came; with a stream, from its start."""
            if stop.is_set():
                return
            if not ranged:
                file.seek(0)
                file.truncate()
            with self._open((file.tell(), end) if ranged else None, remote.version) as answer:
                seen = Remote.of(answer)
                if not ranged and seen.start is not None:
                    raise RetryError("the server answered 206 where the whole file was asked for")
                told = [(a, b) for a, b in zip(seen[:2], remote[:2]) if ranged or None not in (a, b)]
                if any(a != b for a, b in told) or seen.start != (file.tell() if ranged else None):
                    raise ChangedError
                if end is None and not seen.framed and not self.sha256:
                    raise ObjectStoreError(
                        "the server tells no length, so that a file cut short would pass: give its checksum by sha256"
                    )
                end = seen.size if end is None else end
                for chunk in answer.raw.stream(2**16, decode_content=False):
                    if stop.is_set():
                        return
                    if ranged and len(chunk) > end - file.tell():
                        raise ChangedError
                    file.write(chunk)
                    with guard:
                        bar.update(len(chunk))
            if end not in (None, file.tell()):
                raise RetryError(f"the connection ended after {file.tell()} of {end} bytes")

        name, size = self.path.name, remote.size
        # The pool's threads are daemons: Ctrl-C need not wait for the timeout of a silent server.
        with progress_bar(size, parts.size - to_come, name, self.progress) as bar, ThreadPool(CONNECTIONS) as pool:
            try:
                for part in pool.imap_unordered(bring, missing):
                    parts.done.append(part)
                    if ranged:
                        write_json(self.sidecar, parts)
            finally:
                stop.set()
        return remote

    def _probe(self) -> Remote:
        """Ask for the first byte: unlike HEAD, this is allowed wherever the file is, and shows whether ranges work."""
        try:
            with self._open((0, 1)) as answer:
                return Remote.of(answer)
        except ChangedError:  # an empty file has no first byte
            return Remote()

    def _kept_parts(self, remote: Remote) -> Parts:
        """The parts an earlier start left, where they are of this version; else an empty .part file of full size."""
        kept = _recorded(self.sidecar, Parts)
        there = self.part_file.stat().st_size if self.part_file.is_file() else None
        if kept and (kept.size, there, kept.version) == (remote.size, remote.size, remote.version):
            kept.done = [part for part in kept.done if part * kept.part_bytes < kept.size]
            return kept
        return self._no_parts(remote.size, remote.version, PART_BYTES)

    def _no_parts(self, size: int, version: str, part_bytes: int) -> Parts:
        self._discard()
        return Parts(size, version, part_bytes)

    @contextmanager
    def _open(self, span: tuple[int, int] | None, version: str | None = None) -> Iterator[requests.Response]:
        """Ask for bytes span[0] to span[1] - 1, or for all, of this version. What may pass is a RetryError."""
        headers = {"Accept-Encoding": "identity"}  # offsets count the bytes of the file, not of a compressed stream
        if span:
            headers["Range"] = f"bytes={span[0]}-{span[1] - 1}"
        if version and version.startswith('"'):
            headers["If-Match"] = version
        try:
            with self.session.get(self.address(), headers=headers, stream=True, timeout=TIMEOUT) as answer:
                _check_status(answer)
                yield answer
        except (requests.RequestException, urllib3.exceptions.HTTPError, ValueError) as error:
            raise RetryError(re.sub(r"X-Amz-[\w-]+=[^&\s)]*&?", "", str(error))) from None  # no signature on a screen

    def _verify(self, remote: Remote) -> str | None:
        """Raise ObjectStoreError unless the .part file is what the server and the caller say; return by which sum."""
        if self.sha256:
            check_sha256(self.part_file, self.sha256, self.progress)
            return f"sha256 {self.sha256.lower()}"
        found = re.fullmatch(r'"(([0-9a-f]{32})(?:-(\d+))?)"', remote.sum)
        if not found:
            return None
        etag, digest, number = found.groups()
        count = int(number or 0)  # 0: the sum of the bytes; n: the sum of the sums of n parts
        for part_bytes in etag_part_sizes(self.part_file.stat().st_size, count):
            sums = _digests(self.part_file, "md5", part_bytes, self.progress)
            if (hashlib.md5(b"".join(sums), usedforsecurity=False).digest() if count else sums[0]).hex() == digest:
                return f"etag {etag}"
        if count < 2:
            raise ObjectStoreError(f"what came has another MD5 sum than the server's ETag {etag}. Start again")
        # A part size is a guess, and no hit no proof of damage.
        print(f"{self.path.name}: length verified; ETag {etag} is of unknown parts", file=sys.stderr)
        return None

    def _discard(self) -> None:
        self.sidecar.unlink(missing_ok=True)  # first: it must never speak of another .part file
        self.part_file.unlink(missing_ok=True)


def etag_part_sizes(size: int, count: int) -> list[int]:
    """Part sizes in bytes, likely ones first, by which an upload of `size` bytes has `count` parts (ETag md5-count).

    Those of the usual programs, and the least whole number of MiB: of large files with many parts no other fits.
    """
    if count < 2:
        return [size]
    least, most = -(-size // count), (size - 1) // (count - 1)
    usual = (8, 5, 15, 16, 32, 50, 64, 100, 128, 256, 512, 1024, -(-least // 2**20))
    return list(dict.fromkeys(mib * 2**20 for mib in usual if least <= mib * 2**20 <= most))


def progress_bar(total: int | None, initial: int, name: str, progress: bool) -> tqdm:
    """A bar that counts bytes."""
    return tqdm(total=total, initial=initial, desc=name[:40], unit="B", unit_scale=True, disable=not progress)


def _retrying(attempt: Callable[[], T], retries: int, position: Callable[[], int] = int) -> T:
    """What `attempt` returns, called again after each failure that may pass. position: bytes that have come."""
    failures, reached = 0, position()
    while True:
        try:
            return attempt()
        except RetryError as error:
            failures, reached = 1 if position() > reached else failures + 1, position()
            if failures > retries:
                raise ObjectStoreError(
                    f"{error} ({failures} failures in a row). Check the network and the address and start again: "
                    "finished parts are kept"
                ) from error
            time.sleep(min(BACKOFF * 2 ** (failures - 1), LONGEST_WAIT) * random.uniform(0.5, 1))


def _check_status(answer: requests.Response) -> None:
    status = answer.status_code
    if status in (412, 416):
        raise ChangedError
    if status not in (200, 206):
        body = answer.raw.read(4096) or b""
        code, region = (re.search(rb"<%s>([\w-]+)</" % name, body) for name in (b"Code", b"Region"))  # S3's own words
        said = f"the server answered {status} ({code[1].decode() if code else answer.reason or 'no reason given'})"
        if status in (408, 425, 429) or status >= 500:
            raise RetryError(said)
        advice = CHECK_CREDENTIALS if status in (401, 403) else CHECK_ADDRESS
        if status in (301, 400) and region:
            advice = f"Set AWS_DEFAULT_REGION={region[1].decode()}, where the bucket is"
        raise ObjectStoreError(f"{said}. {advice}")
    encoding = answer.headers.get("content-encoding", "").lower()
    if encoding not in ("", "identity", "aws-chunked"):  # the last: what some uploads leave behind
        raise ObjectStoreError(f"the server sends the file encoded as {encoding}, which it was asked not to do")


def _digests(path: Path, algorithm: str, part_bytes: int, progress: bool) -> list[bytes]:
    """The digest of each `part_bytes` bytes of a file; one digest of an empty file."""
    digests = []
    with open(path, "rb") as file, progress_bar(path.stat().st_size, 0, "verifying", progress) as bar:
        while not digests or file.tell() < bar.total:
            digest, left = hashlib.new(algorithm, usedforsecurity=False), part_bytes
            while chunk := file.read(min(left, 2**20)):
                digest.update(chunk)
                bar.update(len(chunk))
                left -= len(chunk)
            digests.append(digest.digest())
    return digests


def _recorded(path: Path, kind: type[T]) -> T | None:
    """What a sidecar says; None where there is none of this kind."""
    try:
        return read_json(path, kind)
    except (FileNotFoundError, NotADirectoryError, JsonError):
        return None
