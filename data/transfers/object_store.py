"""Files and folders from S3, HTTPS or this disk, by way of a cache: in ranged parts, resumable, verified.

    fetch(resolve("wsl-32x48d-320"))             a published embedding file, by its short name
    fetch(resolve("s3://bucket/key"))            any object; with the user's credentials, unsigned where there are none
    fetch(resolve("https://host/file.p"), sha)   any address; a local path is checked and returned as it is
    fetch_folder(resolve("s3://bucket/set/"))    the files below a prefix that an index among them lists
    upload("set/", "s3://bucket/set/")           the way back

Everything comes by HTTP; boto3 signs the addresses of S3, and sends. Whatever is found under a file's name in the cache
is used as it is, without a look at the network; so a file can also be put there by hand.

Parts go to their places in `.partial/NAME.part`; `.partial/NAME.json` tells which are complete, so that a kill or a
broken line costs the unfinished ones alone. Only a file that is whole and verified takes its name. Verified is always
the length; SHA-256 where the caller knows it; otherwise the ETag of S3 where it is an MD5 sum, or an MD5 sum of MD5
sums whose part size can be guessed (objects above 5 GiB have no other).
"""

import difflib
import errno
import hashlib
import os
import random
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote, urlsplit

import requests
import urllib3
from tqdm import tqdm

from data.atomic_file import sync_folder
from data.checked_json import JsonError, read_json, write_json
from data.file_lock import held
from data.program import ProgramError
from data.published import PUBLISHED, PUBLISHED_BUCKET, PUBLISHED_ENDPOINT

CACHE_VARIABLE, PARTIAL = "TOPK_CACHE", ".partial"
DEFAULT_CACHE = Path(__file__).parents[1] / "downloads" / "embeddings"
CONNECTIONS, PART_BYTES = 8, 16 * 2**20  # parts under way at once; requests keeps 10 connections open at most
TIMEOUT, BACKOFF, LONGEST_WAIT = 30.0, 1.0, 30.0  # seconds: without a byte, before the first retry, before any
# Failures in a row, without a byte between them; fewer before anything has answered: no network is told in seconds.
RETRIES, FIRST_RETRIES = 8, 3
UPLOAD_MIB = (8, 5, 15, 16, 32, 50, 64, 100, 128, 256, 512, 1024)  # sizes of parts in which programs upload
ADDRESS = re.compile(r"(s3|https?)://([^\s/@]+@)?(\[[\da-fA-F:]+\]|[^\s/\[\]:@]+)(:[1-9]\d{0,4})?([/?#].*)?", re.I)
CHECK_ADDRESS = "Check bucket, key, address, endpoint_url and AWS_DEFAULT_REGION"
CHECK_CREDENTIALS = (
    "Check the credentials (AWS_PROFILE, AWS_ACCESS_KEY_ID), or give the https:// address of a public object; some "
    "servers say the same of a key that does not exist"
)
CHANGED = "the server sent something else than was asked for: the file changed there meanwhile. Start again"


class ObjectStoreError(ProgramError):
    """A file could not be brought or sent; the message says why and how to mend it."""


class RetryError(Exception):
    """A failure that may pass."""


@dataclass
class Location:
    """Where a file is. uri: s3://bucket/key, http(s)://..., or a local path. endpoint_url: of the S3 server, None for
    the one in AWS_ENDPOINT_URL or Amazon's. anonymous: None for unsigned requests where no credentials are found.
    cache_dir: None for $TOPK_CACHE, or data/downloads/embeddings of this repository where that is not set.

    scheme: s3, http, https, or "" for a local path. address: by HTTPS, the same for an object named by s3:// and by its
    path-style address. path: where it is kept here, by its own name with eight digits of its address's SHA-256; a local
    path is its own place. Raises ObjectStoreError for other addresses.
    """

    uri: str
    endpoint_url: str | None = None
    anonymous: bool | None = None
    cache_dir: str | Path | None = None

    def __post_init__(self) -> None:
        self.scheme = self.uri.partition("://")[0].lower() if "://" in self.uri else ""
        if self.scheme and not ADDRESS.fullmatch(self.uri):
            raise ObjectStoreError(
                f"a source is s3://bucket/key, http(s)://host/file, a local path or a short name, got {self.uri!r}"
            )
        variables = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL") if self.scheme == "s3" else ()
        self.endpoint_url = asked = self.endpoint_url or next(filter(None, map(os.environ.get, variables)), None)
        if asked and not (ADDRESS.fullmatch(asked) and asked.lower().startswith("http")):
            raise ObjectStoreError(
                f"endpoint_url (without it AWS_ENDPOINT_URL) is http(s)://host of an S3 server, got {asked!r}"
            )
        self.bucket, _, self.key = self.uri.partition("://")[2].partition("/")
        self.address, self.path = self.uri, Path(self.uri)
        if self.scheme == "s3":
            self.address = f"{(asked or 'https://s3.amazonaws.com').rstrip('/')}/{quote(f'{self.bucket}/{self.key}')}"
        if self.scheme:
            last = urlsplit(self.address).path.rstrip("/").rpartition("/")[2]
            name = Path(re.sub(r"[^\w.-]+", "_", last, flags=re.ASCII).lstrip(".") or "file")
            digest = hashlib.sha256(self.address.encode()).hexdigest()[:8]
            cache = Path(os.path.expanduser(self.cache_dir or os.environ.get(CACHE_VARIABLE) or DEFAULT_CACHE))
            # File systems allow 255 bytes; `.part` and `.json` are still to come.
            self.path = cache / f"{name.stem[:150]}-{digest}{name.suffix[:20]}"


def resolve(source: str | Path, cache_dir: str | Path | None = None, *, endpoint_url: str | None = None) -> Location:
    """The location of a short name of PUBLISHED, an s3:// or http(s):// address, or a local path.

    Short names lie in the published bucket and are read unsigned. Raises ObjectStoreError for an address of another
    kind, and for a path or name that does not exist.
    """
    source = os.fspath(source)
    if source in PUBLISHED:
        uri = f"s3://{PUBLISHED_BUCKET}/{PUBLISHED[source]}"
        return Location(uri, endpoint_url or PUBLISHED_ENDPOINT, True, cache_dir)
    path = Path(os.path.expanduser(source))
    if "://" in source or (source and path.exists()):
        return Location(source if "://" in source else str(path), endpoint_url, None, cache_dir)
    names = {key: name for name, key in PUBLISHED.items()}
    if path.name in names:
        hint = f"give the short name {names[path.name]}, and it is downloaded"
    elif path.suffix or len(path.parts) > 1:
        hint = "check the path"
    else:
        nearest = difflib.get_close_matches(source, PUBLISHED, 1, cutoff=0)[0]
        hint = f"did you mean {nearest!r}? Published are {', '.join(PUBLISHED)}"
    raise ObjectStoreError(f"there is no file {source}: {hint}")


def fetch(location: Location, sha256: str | None = None) -> Path:
    """The path of a file on this disk, downloaded into the cache unless it is there.

    sha256: 64 hexadecimal digits the file must have. Processes that ask for the same file download it once. Ctrl-C
    keeps what has arrived for the next start. Raises ObjectStoreError.
    """
    if sha256 is not None and not re.fullmatch("[0-9a-fA-F]{64}", sha256):
        raise ObjectStoreError(f"sha256 is 64 hexadecimal digits, got {sha256!r}")
    if location.scheme and not location.path.is_file():
        _Download(location, location.path, sha256).run()
    if sha256 is not None:
        if location.path.is_dir():
            raise ObjectStoreError(f"{location.path} is a folder, and sha256 speaks of a file: leave it out")
        _check_sha256(location.path, sha256)
    return location.path


def fetch_folder(location: Location, index: str, damaged: Callable[[Path, Path], Iterable[str]]) -> Path:
    """The path of a folder on this disk with the files of s3://bucket/prefix/ that its index lists.

    index: the name of the file that says what the folder holds; `upload` sends it last, and here, too, it takes its
    name last. damaged(index, folder): the names of the files that are not in the folder as that index says; all are
    looked at before and after they come, so that what is fetched is one version, and what is there already is kept.
    Raises ObjectStoreError.
    """
    folder, new = location.path, location.path / PARTIAL / "index" / index
    with held(folder / PARTIAL / "folder.lock", waiting=f"another process is fetching {folder.name}; waiting for it"):
        for old in (folder / index, new):  # each may be of another version than what comes now
            old.unlink(missing_ok=True)
        try:
            _Download(replace(location, uri=location.uri + index), new).run()
        except ObjectStoreError as error:
            raise ObjectStoreError(
                f"{location.uri} has no {index} that can be read: it may be another folder, or a "
                f"store whose upload has not ended, as that file is sent last. {error}"
            ) from error
        for name in damaged(new, folder):
            (folder / name).unlink(missing_ok=True)
            _Download(replace(location, uri=location.uri + name), folder / name).run()
        if wrong := [*damaged(new, folder)]:
            raise ObjectStoreError(
                f"{location.uri}: {', '.join(wrong)} did not come as {index} says. Start again when the folder is no "
                "longer being written, or send it again"
            )
        os.replace(new, folder / index)
        sync_folder(folder)
    return folder


def upload(folder: Path, destination: str, *, endpoint_url: str | None = None) -> None:
    """Send a folder's files below s3://bucket/prefix, one after another in the order of their names.

    A .json file goes last, so that what it says there is of files already in place. Hidden files and folders stay
    behind. Raises ObjectStoreError; OSError of a file that cannot be read passes through.
    """
    location = Location(destination.rstrip("/"), endpoint_url)
    files = [file for file in folder.glob("[!.]*") if file.is_file()]
    with _sentences(location), _bar(sum(file.stat().st_size for file in files), 0, folder.name) as bar:
        client = _client(location, unsigned=False)
        for file in sorted(files, key=lambda file: (file.suffix == ".json", file.name)):
            key = f"{location.key}/{file.name}".lstrip("/")
            client.upload_file(str(file), location.bucket, key, Callback=bar.update)


def checksum_of(path: Path) -> str | None:
    """What a fetched file was verified by, "sha256 ..." or "etag ...", as long as it is untouched; else None."""
    record = _recorded(path.parent / PARTIAL / f"{path.name}.json")
    return record.get("checksum") if path.is_file() and {**record, **_stamp(path)} == record else None


class _Download:
    """One file on its way to `path`."""

    def __init__(self, location: Location, path: Path, sha256: str | None = None) -> None:
        self.location, self.path, self.sha256 = location, path, sha256
        self.folder = path.parent / PARTIAL
        self.part, self.sidecar = (self.folder / f"{path.name}{ending}" for ending in (".part", ".json"))
        self.session, self.stop, self.guard = requests.Session(), threading.Event(), threading.Lock()

    def run(self) -> None:
        """Return with the verified file at `path`. Raises ObjectStoreError."""
        uri, waiting = self.location.uri, f"another process is fetching {self.path.name}; waiting for it"
        try:
            with held(self.folder / f"{self.path.name}.lock", waiting=waiting):
                if not self.path.is_file():
                    self._download()
        except ObjectStoreError as error:
            raise ObjectStoreError(
                f"{uri}: {error}. To place the file by hand, get {self.location.address} in any other way and move it "
                f"to {self.path}: it is used as it is found"
            ) from error
        except OSError as error:
            raise ObjectStoreError(
                f"{uri} could not be written to {self.path.parent}: {error}. Free space there, mend its permissions, "
                f"or choose another folder by cache_dir or ${CACHE_VARIABLE}; finished parts are kept"
            ) from error

    def _download(self) -> None:
        self.address = _addresses(self.location)
        _retrying(self._probe, FIRST_RETRIES)
        if self.size is None and not self.sha256:
            raise ObjectStoreError(
                "the server tells no length, so that a file cut short would pass: give its checksum by sha256"
            )
        size = self.size or 0
        plan = {"size": size, "version": self.version, "part_bytes": PART_BYTES}
        known = _recorded(self.sidecar)
        whole = self.ranged and self.part.is_file() and self.part.stat().st_size == size
        done = known.pop("done", None)
        if not (whole and known == plan and isinstance(done, list)):
            self._discard()
            done = []
        missing = [part for part in range(-(-size // PART_BYTES)) if part not in done] if self.ranged else [0]
        to_come = sum(min(PART_BYTES, size - part * PART_BYTES) for part in missing) if self.ranged else size
        if (free := shutil.disk_usage(self.folder).free) < to_come:
            raise OSError(errno.ENOSPC, f"{to_come / 1e9:.2f} GB are still to come, {free / 1e9:.2f} GB are free")
        with open(self.part, "ab") as file:
            file.truncate(size)
        self.bar = _bar(self.size, size - to_come, self.path.name)
        # The pool's threads are daemons: Ctrl-C need not wait for the timeout of a silent server.
        with self.bar, ThreadPool(CONNECTIONS) as pool:
            try:
                for part in pool.imap_unordered(self._bring, missing):
                    if self.ranged and not self.stop.is_set():  # else another has failed, and this one ended early
                        done.append(part)
                        write_json(self.sidecar, {**plan, "done": done})
            finally:
                self.stop.set()
        checksum = self._verify()
        os.replace(self.part, self.path)
        sync_folder(self.path.parent)
        write_json(self.sidecar, {**_stamp(self.path), "checksum": checksum})

    def _probe(self) -> None:
        """Ask for the first byte: unlike HEAD, this is allowed wherever the file is, and shows whether ranges work."""
        with self._open({"Range": "bytes=0-0"}) as answer:
            headers, self.version = answer.headers, _version(answer)
            span = re.fullmatch(r"bytes 0-0/(\d+)", headers.get("content-range", ""))
            size = span[1] if span else headers.get("content-length", "")
            self.size = int(size) if size.isdecimal() else None
            self.ranged = bool(span and self.version)  # without a version, parts could be of two
            # S3's ETag is an MD5 sum, but for what it has encrypted with a key of the user's.
            sealed = "kms" in headers.get("x-amz-server-side-encryption", "")
            sealed = sealed or "x-amz-server-side-encryption-customer-algorithm" in headers
            of_s3 = "x-amz-request-id" in headers or "X-Amz-Date=" in answer.url
            self.etag = headers.get("etag", "") if of_s3 and not sealed else ""

    def _bring(self, part: int) -> int:
        # A descriptor of its own: a thread that Ctrl-C left behind can never write into another file.
        with open(self.part, "r+b") as file:
            file.seek(part * PART_BYTES)
            end = min((part + 1) * PART_BYTES, self.size) if self.ranged else self.size
            try:
                _retrying(lambda: self._attempt(file, end), RETRIES, file.tell if self.ranged else int)
            except BaseException:
                self.stop.set()
                raise
            file.flush()
            os.fsync(file.fileno())  # before the sidecar says so
        return part

    def _attempt(self, file: IO[bytes], end: int | None) -> None:
        """Go on after a broken connection from the last byte that came; with a stream, from its start."""
        if self.stop.is_set():
            return
        headers, header, expected = {}, "content-length", None if end is None else str(end)
        if self.ranged:
            headers["Range"] = f"bytes={file.tell()}-{end - 1}"
            header, expected = "content-range", f"bytes {file.tell()}-{end - 1}/{self.size}"
            if self.version.startswith('"'):  # a weak ETag or a date cannot be asked for
                headers["If-Match"] = self.version
        else:
            file.seek(0)
            file.truncate()
        with self._open(headers) as answer:
            if answer.headers.get(header) != expected or _version(answer) != self.version:
                raise ObjectStoreError(CHANGED)
            for chunk in answer.raw.stream(2**16, decode_content=False):
                if self.stop.is_set():
                    return
                if end is not None and len(chunk) > end - file.tell():
                    raise ObjectStoreError(CHANGED)
                file.write(chunk)
                with self.guard:
                    self.bar.update(len(chunk))
        if end not in (None, file.tell()):
            raise RetryError(f"the connection ended after {file.tell()} of {end} bytes")

    @contextmanager
    def _open(self, headers: dict[str, str]) -> Iterator[requests.Response]:
        """The answer to a request, 200 or 206. Raises RetryError for what may pass, ObjectStoreError."""
        # Offsets count the bytes of the file, not of a compressed stream.
        headers = {"Accept-Encoding": "identity", **headers}
        try:
            with self.session.get(self.address(), headers=headers, stream=True, timeout=TIMEOUT) as answer:
                status, encoding = answer.status_code, answer.headers.get("content-encoding", "").lower()
                if status == 412:
                    raise ObjectStoreError(CHANGED)
                if status not in (200, 206):
                    # S3's own words, which name the region of a bucket that is elsewhere.
                    told = re.findall(rb"<(?:Code|Message)>([^<]*)<", answer.raw.read(4096) or b"")
                    words = b": ".join(told).decode(errors="replace") or answer.reason or "no reason given"
                    if status in (408, 425, 429) or status >= 500:
                        raise RetryError(f"the server answered {status} ({words})")
                    advice = CHECK_CREDENTIALS if status in (401, 403) else CHECK_ADDRESS
                    raise ObjectStoreError(f"the server answered {status} ({words}). {advice}")
                if encoding not in ("", "identity", "aws-chunked"):  # the last: what some uploads leave behind
                    raise ObjectStoreError(f"the server sends the file encoded as {encoding}, though asked not to")
                yield answer
        except (requests.RequestException, urllib3.exceptions.HTTPError, ValueError) as error:
            raise RetryError(re.sub(r"X-Amz-[\w-]+=[^&\s)]*&?", "", str(error))) from None  # no signature on a screen

    def _verify(self) -> str | None:
        """Discard the .part file unless it is what the server and the caller say; return by which sum it is."""
        try:
            if self.sha256:
                _check_sha256(self.part, self.sha256)
                return f"sha256 {self.sha256.lower()}"
            if not (found := re.fullmatch(r'"([0-9a-f]{32})(?:-(\d+))?"', self.etag)):
                return None
            count = int(found[2] or 0)  # 0: the sum of the bytes; n: the sum of the sums of n parts
            for part_bytes in etag_part_sizes(self.part.stat().st_size, count):
                sums = _digests(self.part, "md5", part_bytes)
                if (hashlib.md5(b"".join(sums), usedforsecurity=False).digest() if count else sums[0]).hex() == found[
                    1
                ]:
                    return f"etag {self.etag[1:-1]}"
            if count < 2:
                raise ObjectStoreError(f"what came has another MD5 sum than the server's ETag {self.etag}. Start again")
            return None  # a part size is a guess, and no hit no proof of damage
        except ObjectStoreError:
            self._discard()
            raise

    def _discard(self) -> None:
        self.sidecar.unlink(missing_ok=True)  # first: it must never speak of another .part file
        self.part.unlink(missing_ok=True)


def etag_part_sizes(size: int, count: int) -> list[int]:
    """Part sizes in bytes, likely ones first, by which an upload of `size` bytes has `count` parts (ETag md5-count)."""
    if count < 2:
        return [size]
    least, most = -(-size // count), (size - 1) // (count - 1)
    likely = (*UPLOAD_MIB, -(-least // 2**20))  # the last, whole MiB, is the one that fits many parts
    return list(dict.fromkeys(mib * 2**20 for mib in likely if least <= mib * 2**20 <= most))


def _retrying(attempt: Callable[[], None], retries: int, position: Callable[[], int] = int) -> None:
    """Call `attempt`, again after each failure that may pass. position: bytes that have come."""
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


def _version(answer: requests.Response) -> str | None:
    return answer.headers.get("etag") or answer.headers.get("last-modified")


def _check_sha256(path: Path, sha256: str) -> None:
    """Raise ObjectStoreError unless a file has this sum. One verified holds as long as the file is untouched."""
    if checksum_of(path) != f"sha256 {sha256.lower()}":
        found = _digests(path, "sha256", path.stat().st_size)[0].hex()
        if found != sha256.lower():
            raise ObjectStoreError(
                f"{path} has SHA-256 {found} instead of {sha256}: another file, or a damaged one. Check sha256; a file "
                "in the cache must be deleted before it is fetched again"
            )


def _digests(path: Path, algorithm: str, part_bytes: int) -> list[bytes]:
    """The digest of each `part_bytes` bytes of a file; one digest of an empty file."""
    digests = []
    with open(path, "rb") as file, _bar(path.stat().st_size, 0, "verifying") as bar:
        while not digests or file.tell() < bar.total:
            digest, left = hashlib.new(algorithm, usedforsecurity=False), part_bytes
            while chunk := file.read(min(left, 2**20)):
                digest.update(chunk)
                bar.update(len(chunk))
                left -= len(chunk)
            digests.append(digest.digest())
    return digests


def _bar(total: int | None, initial: int, name: str) -> tqdm:
    """A bar that counts bytes, drawn on a terminal alone."""
    return tqdm(total=total, initial=initial, desc=name[:40], unit="B", unit_scale=True, disable=None)


def _recorded(path: Path) -> dict[str, Any]:
    """What a sidecar says; {} where there is none."""
    try:
        return read_json(path, dict[str, list[int] | int | str | None])
    except (OSError, JsonError):
        return {}


def _stamp(path: Path) -> dict[str, int]:
    return {"size": path.stat().st_size, "mtime_ns": path.stat().st_mtime_ns}


def _addresses(location: Location) -> Callable[[], str]:
    """Returns the address to ask: of S3 signed anew each time, since signatures end."""
    if location.scheme != "s3":
        return partial(str, location.uri)
    if not location.key:
        raise ObjectStoreError("an object is named s3://bucket/key, got an address without a key")
    with _sentences(location):
        client = _client(location, unsigned=location.anonymous)
    place = {"Bucket": location.bucket, "Key": location.key}
    return _sentences(location)(partial(client.generate_presigned_url, "get_object", place))


def _client(location: Location, unsigned: bool | None) -> Any:
    import boto3  # takes half a second, which what is on this disk does without
    from botocore import UNSIGNED
    from botocore.config import Config

    session = boto3.Session()
    unsigned = session.get_credentials() is None if unsigned is None else unsigned
    # Checksums of Amazon's newer kind are refused by some servers that speak S3.
    config = Config(signature_version=UNSIGNED if unsigned else "s3v4", request_checksum_calculation="when_required")
    return session.client("s3", endpoint_url=location.endpoint_url, config=config)


@contextmanager
def _sentences(location: Location) -> Iterator[None]:
    """The errors of boto3, which have no common class, as ObjectStoreError."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise ObjectStoreError(
            f"{location.uri}: {error}. {CHECK_ADDRESS}, the variables AWS_... and the network. {CHECK_CREDENTIALS}"
        ) from error
