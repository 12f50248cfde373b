"""Files and folders from S3, HTTPS or this disk, by way of a cache: resumable, verified, one download at a time.

    fetch("wsl-32x48d-320")                      a published embedding file, by its short name
    fetch("s3://bucket/key", endpoint_url=...)   any object; with the user's credentials, unsigned where there are none
    fetch("https://host/file.p", sha256=...)     any address; a local path is checked and returned as it is
    fetch_folder("s3://bucket/store/", ...)      the files below a prefix that an index among them lists
    upload("store/", "s3://bucket/store/")       the way back

A file comes in ranged parts over several connections, written to their places in `.partial/NAME.part`; the small
`.partial/NAME.json` beside it tells which parts are complete, so that a kill or a broken line costs the unfinished
parts alone. Only a file that is whole and verified moves to its name in the cache, and whatever is found under
that name is used as it is, without a look at the network; so a file can also be put there by hand.

What is verified: always the length; SHA-256 where the caller knows it; otherwise the ETag of S3 where it is an MD5
sum, or an MD5 sum of MD5 sums whose part size can be guessed (objects above 5 GiB have no other). Where an ETag can
be neither, the length stands alone.
"""

import difflib
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from urllib.parse import urlsplit

from boto3.s3.transfer import TransferConfig

from data.atomic_file import sync_folder
from data.file_lock import held
from data.transfers.download import PARTIAL, STARTS, Download, checksum_of, progress_bar
from data.transfers.remote import (
    CACHE_VARIABLE,
    DEFAULT_TRANSFER,
    ChecksumError,
    Location,
    MissingObjectError,
    NetworkError,
    NoSpaceError,
    ObjectStoreError,
    PermissionDeniedError,
    SourceChangedError,
    Transfer,
    s3_client,
    s3_sentences,
)

__all__ = [
    "PUBLISHED",
    "ChecksumError",
    "Location",
    "MissingObjectError",
    "NetworkError",
    "NoSpaceError",
    "ObjectStoreError",
    "PermissionDeniedError",
    "SourceChangedError",
    "Transfer",
    "cached_path",
    "checksum_of",
    "fetch",
    "fetch_folder",
    "resolve",
    "upload",
]

PUBLISHED_ENDPOINT = "https://nyc3.digitaloceanspaces.com"
PUBLISHED_BUCKET = "publicdata1"
_IMAGENET = "ImageNet_embeddings_labels_train_test_"
PUBLISHED: dict[str, str] = {  # short name -> key
    "wsl-32x48d-320": f"{_IMAGENET}IGAM_Resnext101_32x48d_320.p",
    "wsl-32x32d-320": f"{_IMAGENET}IGAM_Resnext101_32x32d_320.p",
    "wsl-32x16d-320": f"{_IMAGENET}IGAM_Resnext101_32x16d_320.p",
    "wsl-32x8d-320": f"{_IMAGENET}IGAM_Resnext101_32x8d_320.p",
    "efficientnet-l2-800": f"{_IMAGENET}tf_efficientnet_l2_ns_timm_transform_800_float16.p",
    "wsl-32x48d-224-21k": "ImageNet21K-P_embeddings_labels_train_test_IGAM_Resnext101_32x48d_224_float16.p",
}
DEFAULT_CACHE = Path(__file__).parents[1] / "downloads" / "embeddings"


def resolve(source: str | Path, *, endpoint_url: str | None = None, anonymous: bool | None = None) -> Location:
    """The location of a short name of PUBLISHED, an s3:// or http(s):// address, or a local path.

    Short names lie in the published bucket and are read unsigned, unless the arguments say otherwise. Raises
    ObjectStoreError for an address of another kind, MissingObjectError for a path or name that does not exist.
    """
    source = os.fspath(source)
    if source in PUBLISHED:
        uri = f"s3://{PUBLISHED_BUCKET}/{PUBLISHED[source]}"
        return Location(uri, endpoint_url or PUBLISHED_ENDPOINT, True if anonymous is None else anonymous)
    location = Location(source, endpoint_url, anonymous)
    if location.scheme:
        return location
    path = Path(os.path.expanduser(source))
    if source and path.exists():
        return Location(str(path))
    published = next((name for name, key in PUBLISHED.items() if key == path.name), None)
    if published is not None:
        raise MissingObjectError(f"there is no file {source}: give the short name {published}, and it is downloaded")
    if path.suffix or len(path.parts) > 1:
        raise MissingObjectError(f"there is no file {source}: check the path")
    nearest = difflib.get_close_matches(source, PUBLISHED, 1, cutoff=0)[0]
    raise MissingObjectError(
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
    anonymous: bool | None = None,
    sha256: str | None = None,
    size: int | None = None,
    transfer: Transfer = DEFAULT_TRANSFER,
    progress: bool = True,
) -> Path:
    """The path of a file on this disk, downloaded into the cache unless it is there.

    source: as for `resolve`. cache_dir: as for `cached_path`. anonymous: True for unsigned S3 requests, False for the
    user's credentials, None for these where they exist. sha256: 64 hexadecimal digits the file must have; size: its
    bytes. progress: whether to draw a bar. Processes that ask for the same file download it once. Ctrl-C keeps what
    has arrived for the next start.

    Raises ObjectStoreError, by its subclasses for what can be mended.
    """
    location = resolve(source, endpoint_url=endpoint_url, anonymous=anonymous)
    path = cached_path(source, cache_dir, endpoint_url=endpoint_url)
    if location.scheme == "s3" and not location.key:
        raise ObjectStoreError(f"an object is named s3://bucket/key, got {source!r} without a key")
    if sha256 is not None and not re.fullmatch("[0-9a-fA-F]{64}", sha256):
        raise ObjectStoreError(f"sha256 is 64 hexadecimal digits, got {sha256!r}")
    download = Download(location, path, size, sha256, transfer, progress)
    if location.scheme:
        download.run()
    elif (size is not None or sha256 is not None) and not download.is_there():
        raise MissingObjectError(f"{path} is a folder, and size and sha256 speak of a file: leave them out")
    return path


def fetch_folder(
    source: str | Path,
    cache_dir: str | Path | None = None,
    *,
    index: str,
    listed: Callable[[Path], Iterable[tuple[str, int, str]]],
    endpoint_url: str | None = None,
    anonymous: bool | None = None,
    transfer: Transfer = DEFAULT_TRANSFER,
    progress: bool = True,
) -> Path:
    """The path of a folder on this disk with the files of s3://bucket/prefix/ that its index lists, or a local folder.

    index: the name of the file that says what the folder holds; `upload` sends it last, and here, too, it takes its
    name last. listed: reads it, by its path, as name, bytes and SHA-256 of each file, and raises ValueError for one
    that is damaged. Every file is verified, so that what is fetched is one version, the index's. A folder that is
    whole is used as it is; one begun and left is completed. Other arguments and errors as for `fetch`.
    """
    location = resolve(str(source).rstrip("/") + "/" if "://" in str(source) else source)
    if not location.scheme and Path(location.uri).is_dir():
        return Path(location.uri)
    if location.scheme != "s3":
        raise ObjectStoreError(f"a folder is s3://bucket/prefix/ or a local folder, got {str(source)!r}")
    folder = cached_path(location.uri, cache_dir, endpoint_url=endpoint_url)
    new = folder / PARTIAL / "index" / index

    def bring(path: Path, size: int | None = None, sha256: str | None = None) -> None:
        part = Location(location.uri + path.name, endpoint_url, anonymous)
        Download(part, path, size, sha256, transfer, progress, replace=True).run()

    if _is_whole(folder, index, listed):  # without the lock: the cache may be another's, read-only
        return folder
    with held(folder / PARTIAL / "folder.lock", waiting=f"another process is fetching {folder.name}; waiting for it"):
        if _is_whole(folder, index, listed):
            return folder
        (folder / index).unlink(missing_ok=True)  # it may be of another version than what comes now
        before, failure = None, None
        for _ in range(STARTS):
            shutil.rmtree(new.parent, ignore_errors=True)
            try:
                bring(new)
            except MissingObjectError as error:
                raise MissingObjectError(
                    f"{location.uri} has no {index}: it is another folder, or one whose upload has not ended, since "
                    f"that file is sent last. {error}"
                ) from error
            if new.read_bytes() == before:
                raise failure
            before = new.read_bytes()
            try:
                for name, size, sha256 in listed(new):
                    bring(folder / name, size, sha256)
            except (ChecksumError, MissingObjectError) as error:  # another version is taking the place of this one
                failure = error
            else:
                os.replace(new, folder / index)
                sync_folder(folder)
                return folder
        raise SourceChangedError(
            f"{location.uri} changed during each of {STARTS} downloads. {SourceChangedError.advice}"
        )


def _is_whole(folder: Path, index: str, listed: Callable[[Path], Iterable[tuple[str, int, str]]]) -> bool:
    try:
        return all((folder / name).stat().st_size == size for name, size, _ in listed(folder / index))
    except (OSError, ValueError):
        return False


def upload(
    path: str | Path,
    destination: str,
    *,
    endpoint_url: str | None = None,
    last: str | None = None,
    transfer: Transfer = DEFAULT_TRANSFER,
    progress: bool = True,
) -> list[str]:
    """Send a file to s3://bucket/key (or below s3://bucket/prefix/), or a folder's files below s3://bucket/prefix.

    Files go one after another in the order of their names, `last` (a name relative to the folder, such as that of a
    manifest) at the end, so that what stands there speaks of files already in place. Hidden files stay behind.
    Returns the addresses in that order. Raises ObjectStoreError, by its subclasses for what can be mended; OSError
    of a file that cannot be read passes through.
    """
    path = Path(path)
    location = Location(destination, endpoint_url, False)
    if location.scheme != "s3" or not location.bucket:
        raise ObjectStoreError(f"a destination is s3://bucket/prefix, got {destination!r}")
    if path.is_dir():
        relative = (file.relative_to(path) for file in path.rglob("*") if file.is_file())
        names = sorted(name.as_posix() for name in relative if not any(part[0] == "." for part in name.parts))
        prefix = f"{location.key.rstrip('/')}/".lstrip("/")
        files = {prefix + name: path / name for name in sorted(names, key=lambda name: name == last)}
        if last is not None and last not in names:
            raise MissingObjectError(f"there is no {last} in {path} to send at the end: check the folder")
    elif path.is_file():
        files = {location.key + path.name if location.key.endswith("/") or not location.key else location.key: path}
    else:
        files = {}
    if not files:
        raise MissingObjectError(f"there is no file at or in {path} to send: check the path")
    total = sum(file.stat().st_size for file in files.values())
    with s3_sentences(location.uri), progress_bar(total, 0, path.name, progress) as shown:
        client = s3_client(location, transfer, attempts=transfer.retries + 1)
        for key, file in files.items():
            config = TransferConfig(max_concurrency=transfer.connections)
            client.upload_file(str(file), location.bucket, key, Config=config, Callback=shown.update)
    return [f"s3://{location.bucket}/{key}" for key in files]
