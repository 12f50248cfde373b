"""Files and folders from S3, HTTPS or this disk, by way of a cache: resumable, verified, one download at a time.

    fetch("wsl-32x48d-320")                      a published embedding file, by its short name
    fetch("s3://bucket/key", endpoint_url=...)   any object; with the user's credentials, unsigned where there are none
    fetch("https://host/file.p", sha256=...)     any address; a local path is checked and returned as it is
    fetch_folder("s3://bucket/store/", ...)      the files below a prefix that an index among them lists
    upload("store/", "s3://bucket/store/")       the way back

Everything comes by HTTP (download.py); boto3 signs the addresses of S3, and sends. Whatever is found under a file's
name in the cache is used as it is, without a look at the network; so a file can also be put there by hand.

What is verified: always the length; SHA-256 where the caller knows it; otherwise the ETag of S3 where it is an MD5
sum, or an MD5 sum of MD5 sums whose part size can be guessed (objects above 5 GiB have no other). Where an ETag can
be neither, the length stands alone.
"""

import difflib
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from data.atomic_file import sync_folder
from data.file_lock import held
from data.published import PUBLISHED, PUBLISHED_BUCKET, PUBLISHED_ENDPOINT
from data.transfers.download import (
    CACHE_VARIABLE,
    CHECK_ADDRESS,
    CHECK_CREDENTIALS,
    PARTIAL,
    STARTS,
    Download,
    ObjectStoreError,
    check_sha256,
    progress_bar,
)

DEFAULT_CACHE = Path(__file__).parents[1] / "downloads" / "embeddings"


@dataclass(frozen=True)
class Location:
    """Where a file is. uri: s3://bucket/key, http(s)://..., or a local path. endpoint_url: of the S3 server, None for
    Amazon's or the one in AWS_ENDPOINT_URL. anonymous: None for unsigned requests where no credentials are found.
    Raises ObjectStoreError for other addresses.
    """

    uri: str
    endpoint_url: str | None = None
    anonymous: bool | None = None

    def __post_init__(self) -> None:
        if self.scheme and not (self.scheme in ("s3", "http", "https") and _has_host(self.uri)):
            raise ObjectStoreError(
                f"a source is s3://bucket/key, http(s)://host/file, a local path or a short name, got {self.uri!r}"
            )
        asked = self.endpoint if self.scheme == "s3" else self.endpoint_url
        if asked and not (re.match("https?://", asked) and _has_host(asked)):
            raise ObjectStoreError(
                f"endpoint_url (without it AWS_ENDPOINT_URL) is http(s)://host of an S3 server, got {asked!r}"
            )

    @property
    def scheme(self) -> str:
        """s3, http, https, or "" for a local path."""
        return self.uri.partition("://")[0].lower() if "://" in self.uri else ""

    @property
    def bucket_and_key(self) -> tuple[str, str]:
        """Of an s3:// address."""
        bucket, _, key = self.uri.partition("://")[2].partition("/")
        return bucket, key

    @property
    def endpoint(self) -> str | None:
        """endpoint_url, or what the environment says in its place."""
        return self.endpoint_url or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")

    @property
    def address(self) -> str:
        """The HTTPS address, the same for an object named by s3:// and by its path-style address."""
        if self.scheme != "s3":
            return self.uri
        return f"{(self.endpoint or 'https://s3.amazonaws.com').rstrip('/')}/{quote('/'.join(self.bucket_and_key))}"


def _has_host(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return bool(parts.hostname) and parts.port != 0 and not re.search(r"\s", parts.netloc)
    except ValueError:  # a bracket or a port that is none
        return False


def resolve(source: str | Path, *, endpoint_url: str | None = None) -> Location:
    """The location of a short name of PUBLISHED, an s3:// or http(s):// address, or a local path.

    Short names lie in the published bucket and are read unsigned. Raises ObjectStoreError for an address of another
    kind, and for a path or name that does not exist.
    """
    source = os.fspath(source)
    if source in PUBLISHED:
        return Location(f"s3://{PUBLISHED_BUCKET}/{PUBLISHED[source]}", endpoint_url or PUBLISHED_ENDPOINT, True)
    location = Location(source, endpoint_url)
    path = Path(os.path.expanduser(source))
    if location.scheme:
        return location
    if source and path.exists():
        return Location(str(path))
    published = next((name for name, key in PUBLISHED.items() if key == path.name), None)
    if published is not None:
        raise ObjectStoreError(f"there is no file {source}: give the short name {published}, and it is downloaded")
    if path.suffix or len(path.parts) > 1:
        raise ObjectStoreError(f"there is no file {source}: check the path")
    nearest = difflib.get_close_matches(source, PUBLISHED, 1, cutoff=0)[0]
    raise ObjectStoreError(
        f"{source!r} is neither a file nor a published set: did you mean {nearest!r}? Published are "
        f"{', '.join(PUBLISHED)}"
    )


def cached_path(source: str | Path, cache_dir: str | Path | None = None, *, endpoint_url: str | None = None) -> Path:
    """Where `fetch` puts a file, and looks for it first: its own name with eight digits of its address's SHA-256.

    cache_dir: None for $TOPK_CACHE, or data/downloads/embeddings of this repository where that is not set. A local
    path is its own place. Raises as `resolve` does.
    """
    location = resolve(source, endpoint_url=endpoint_url)
    if not location.scheme:
        return Path(location.uri)
    cache = Path(os.path.expanduser(cache_dir or os.environ.get(CACHE_VARIABLE) or DEFAULT_CACHE))
    last = urlsplit(location.address).path.rstrip("/").rpartition("/")[2]
    name = Path(re.sub(r"[^\w.-]+", "_", last, flags=re.ASCII).lstrip(".") or "file")
    digest = hashlib.sha256(location.address.encode()).hexdigest()[:8]
    # File systems allow 255 bytes; `.part` and `.json` are still to come.
    return cache / f"{name.stem[:150]}-{digest}{name.suffix[:20]}"


def fetch(
    source: str | Path,
    cache_dir: str | Path | None = None,
    *,
    endpoint_url: str | None = None,
    sha256: str | None = None,
    progress: bool = True,
) -> Path:
    """The path of a file on this disk, downloaded into the cache unless it is there.

    source: as for `resolve`. cache_dir: as for `cached_path`. sha256: 64 hexadecimal digits the file must have.
    progress: whether to draw a bar. Processes that ask for the same file download it once. Ctrl-C keeps what has
    arrived for the next start. Raises ObjectStoreError.
    """
    location = resolve(source, endpoint_url=endpoint_url)
    path = cached_path(source, cache_dir, endpoint_url=endpoint_url)
    if sha256 is not None and not re.fullmatch("[0-9a-fA-F]{64}", sha256):
        raise ObjectStoreError(f"sha256 is 64 hexadecimal digits, got {sha256!r}")
    if location.scheme and not path.is_file():
        _bring(location, path, sha256, progress)
    elif sha256 is not None:
        if path.is_dir():
            raise ObjectStoreError(f"{path} is a folder, and sha256 speaks of a file: leave it out")
        check_sha256(path, sha256, progress)
    return path


def fetch_folder(
    source: str,
    cache_dir: str | Path | None = None,
    *,
    index: str,
    damaged: Callable[[Path, Path], Iterable[str]],
    endpoint_url: str | None = None,
    progress: bool = True,
) -> Path:
    """The path of a folder on this disk with the files of s3://bucket/prefix/ that its index lists.

    index: the name of the file that says what the folder holds; `upload` sends it last, and here, too, it takes its
    name last. damaged(index, folder): the names of the files that are not in the folder as that index says; all are
    looked at before and after they come, so that what is fetched is one version, and what is there already is kept.
    Other arguments and errors as for `fetch`.
    """
    location = resolve(source.rstrip("/") + "/", endpoint_url=endpoint_url)
    folder = cached_path(location.uri, cache_dir, endpoint_url=endpoint_url)
    new = folder / PARTIAL / "index" / index
    with held(folder / PARTIAL / "folder.lock", waiting=f"another process is fetching {folder.name}; waiting for it"):
        (folder / index).unlink(missing_ok=True)  # it may be of another version than what comes now
        for _ in range(STARTS):
            shutil.rmtree(new.parent, ignore_errors=True)
            try:
                _bring(replace(location, uri=location.uri + index), new, None, progress)
            except ObjectStoreError as error:
                raise ObjectStoreError(
                    f"{location.uri} has no {index} that can be read: it may be another folder, a store in an earlier "
                    "format, to be converted where it was made and sent again, or one whose upload has not ended, as "
                    f"that file is sent last. {error}"
                ) from error
            for name in damaged(new, folder):
                (folder / name).unlink(missing_ok=True)
                _bring(replace(location, uri=location.uri + name), folder / name, None, progress)
            if not (wrong := [*damaged(new, folder)]):
                os.replace(new, folder / index)
                sync_folder(folder)
                return folder
        raise ObjectStoreError(
            f"{location.uri}: {', '.join(wrong)} did not come as {index} says, {STARTS} times. Start again when the "
            "folder is no longer being written, or send it again"
        )


def upload(
    folder: str | Path,
    destination: str,
    *,
    endpoint_url: str | None = None,
    last: str | None = None,
    progress: bool = True,
) -> list[str]:
    """Send a folder's files below s3://bucket/prefix, one after another in the order of their names.

    last: the name of one that goes at the end, so that what stands there speaks of files already in place. Hidden files
    and folders stay behind. Returns the addresses in that order. Raises ObjectStoreError; OSError of a file that cannot
    be read passes through.
    """
    folder, location = Path(folder), Location(destination.rstrip("/"), endpoint_url)
    if location.scheme != "s3":
        raise ObjectStoreError(f"a destination is s3://bucket/prefix, got {destination!r}")
    files = sorted(file for file in folder.glob("[!.]*") if file.is_file())
    files.sort(key=lambda file: file.name == last)
    if not files or last not in (None, files[-1].name):
        raise ObjectStoreError(f"there is no {last or 'file'} in {folder} to send: check the path")
    bucket, prefix = location.bucket_and_key
    total = sum(file.stat().st_size for file in files)
    with _sentences(location), progress_bar(total, 0, folder.name, progress) as bar:
        client = _client(location, unsigned=False)
        for file in files:
            client.upload_file(str(file), bucket, f"{prefix}/{file.name}".lstrip("/"), Callback=bar.update)
    return [f"{location.uri}/{file.name}" for file in files]


def _bring(location: Location, path: Path, sha256: str | None, progress: bool) -> None:
    """Download a file to `path`: one of S3 by an address that is signed anew for each request, since signatures end."""
    address = partial(str, location.uri)
    if location.scheme == "s3":
        bucket, key = location.bucket_and_key
        if not key:
            raise ObjectStoreError(f"an object is named s3://bucket/key, got {location.uri!r} without a key")
        with _sentences(location):
            client = _client(location, unsigned=location.anonymous)
        sign = partial(client.generate_presigned_url, "get_object", {"Bucket": bucket, "Key": key})
        address = _sentences(location)(sign)
    Download(location.uri, location.address, address, path, sha256, progress).run()


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
    """boto3's errors, and those of senseless variables in the environment, as ObjectStoreError."""
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        yield
    except (Boto3Error, BotoCoreError, ClientError, ValueError) as error:
        raise ObjectStoreError(
            f"{location.uri}: {error}. {CHECK_ADDRESS}, the variables AWS_... and the network. {CHECK_CREDENTIALS}"
        ) from error
