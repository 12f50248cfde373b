"""Large files from https:// and s3:// addresses: eight connections at a time, and a killed download continues.

    python -m data.download --list                                    # the published embedding files
    python -m data.download wsl-32x48d-320                            # into $TOPK_CACHE, or data/downloads/embeddings
    python -m data.download s3://bucket/own.pt --requester_pays       # with the credentials of boto3
    python -m data.download https://host/own.pt --sha256 HEX

Parts go to their places in NAME.part; NAME.parts says which version of the file they are of, and which are complete. A
file takes its own name when it is whole, and whatever has that name is used without asking the network. The version is
the server's ETag, or else the time of the file's last change there. Which S3 server: AWS_ENDPOINT_URL, AWS_PROFILE.
"""

import argparse
import hashlib
import os
import re
import shutil
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from urllib.parse import urlsplit

import requests
from filelock import FileLock
from tqdm import tqdm

from data.published import PUBLISHED, PUBLISHED_FILES
from data.s3 import TIMEOUT, Again, Answer, Read, s3_reader

DEFAULT_CACHE = Path(__file__).parent / "downloads" / "embeddings"
CONNECTIONS, PART_BYTES, RETRIES = 8, 16 * 2**20, 8


def download(source: str, cache: Path | None = None, sha256: str | None = None, requester_pays: bool = False) -> Path:
    """Return the local path of a file, downloaded unless it is in the cache or local.

    Args:
        source: a short name of PUBLISHED_FILES, an s3:// or https:// address, or a path.
        sha256: SHA-256 that the file must have, also a local one.
        requester_pays: pay for the transfer from the bucket.

    Raises:
        SystemExit: there is no such file, or it cannot be downloaded.
    """
    address = PUBLISHED + PUBLISHED_FILES[source][0] if source in PUBLISHED_FILES else source
    if "://" not in address:
        path = Path(address).expanduser()
        if not path.is_file():
            raise SystemExit(f"error: there is no file {path}. Published are {', '.join(PUBLISHED_FILES)}")
    else:
        cache = cache or Path(os.environ.get("TOPK_CACHE") or DEFAULT_CACHE).expanduser()
        name = re.sub(r"[^\w.-]+", "_", Path(urlsplit(address).path).name, flags=re.ASCII)[-150:] or "file"
        server = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL", "")
        place = address if not address.startswith("s3://") else f"{server} {address}"
        path = cache / f"{hashlib.sha256(place.encode()).hexdigest()[:8]}-{name}"
        try:
            cache.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{path}.lock"):  # commands that start together download once
                if not path.exists():
                    is_s3 = address.startswith("s3://")
                    fetch(s3_reader(address, requester_pays) if is_s3 else http_reader(address), path, shown(address))
        except OSError as error:
            raise SystemExit(f"error: cannot write {path}: {error.strerror}; finished parts are kept") from None
    if sha256 and (found := sha256_of(path)) != sha256.lower():
        advice = "delete it to download it again" if "://" in address else "it is another file, or a damaged one"
        raise SystemExit(f"error: {path} has the SHA-256 {found}, not {sha256}: {advice}")
    return path


def shown(address: str) -> str:
    """An address without its password and its signature."""
    parts = urlsplit(address)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def fetch(read: Read, path: Path, name: str) -> None:
    """Download a file part by part, from where an earlier process was stopped."""
    stop = threading.Event()
    _, size, version = read_patiently(read, 0, 1, "", name, stop)
    partial, progress = path.with_name(f"{path.name}.part"), path.with_name(f"{path.name}.parts")
    header = f"{size} {PART_BYTES} {version}\n"
    lines = progress.read_text().splitlines(keepends=True) if progress.exists() else []
    if (
        lines[:1] != [header] or not partial.exists() or partial.stat().st_size != size
    ):  # no parts, or parts of another version
        lines = [header]
        partial.unlink(missing_ok=True)
        progress.write_text(header)
    lines = [line for line in lines if line.endswith("\n")]  # a kill may cut the last one short
    os.truncate(progress, len("".join(lines).encode()))
    done = {int(line) for line in lines[1:]}
    missing = [number for number in range(-(-size // PART_BYTES)) if number not in done]
    sizes = {number: min(PART_BYTES, size - number * PART_BYTES) for number in missing}
    to_come, free = sum(sizes.values()), shutil.disk_usage(path.parent).free
    if free < to_come:
        raise SystemExit(f"error: {name}: {to_come:,} bytes are to come, and {free:,} are free in {path.parent}")
    with open(partial, "ab") as file:
        file.truncate(size)

    def bring(number: int) -> int:
        begin = number * PART_BYTES
        answer = read_patiently(read, begin, begin + sizes[number], version, name, stop)
        with open(partial, "r+b") as file:
            file.seek(begin)
            file.write(answer.content)
            file.flush()
            os.fsync(file.fileno())
        with open(progress, "a") as log:
            log.write(f"{number}\n")
        return sizes[number]

    pool = ThreadPoolExecutor(CONNECTIONS)
    try:
        with tqdm(total=size, initial=size - to_come, unit="B", unit_scale=True, disable=None) as bar:
            for future in as_completed([pool.submit(bring, number) for number in missing]):
                bar.update(future.result())
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)
    os.replace(partial, path)
    progress.unlink()


def read_patiently(read: Read, begin: int, end: int, version: str, name: str, stop: threading.Event) -> Answer:
    """Read a range, again after a failure that may pass, until the event is set. Raises SystemExit."""
    problem = ""
    for attempt in range(RETRIES):
        time.sleep(min(0.25 * 2**attempt, 30) if attempt else 0)
        if stop.is_set():
            raise SystemExit("another part has failed")
        try:
            answer = read(begin, end, version)
            if len(answer.content) == end - begin:
                return answer
            problem = f"{len(answer.content)} bytes came instead of {end - begin}"
        except Again as error:
            problem = str(error)
    raise SystemExit(f"error: {name}: {problem}. Finished parts are kept: give the command again")


def http_reader(address: str) -> Read:
    """A function that reads ranges of a file at an http:// or https:// address."""
    name = shown(address)
    # Some servers refuse a request with both a signature and a login from ~/.netrc.
    auth = (lambda request: request) if "Signature=" in address else None

    def read(begin: int, end: int, version: str) -> Answer:
        headers = {"Range": f"bytes={begin}-{end - 1}", "Accept-Encoding": "identity"}
        if version.startswith('"'):  # a weak ETag or a date is no If-Match
            headers["If-Match"] = version
        try:
            with requests.get(address, headers=headers, timeout=TIMEOUT, auth=auth, stream=True) as answer:
                status, found = answer.status_code, answer.headers
                content = answer.content if status == 206 else b""
        except (requests.ConnectionError, requests.Timeout, requests.exceptions.ChunkedEncodingError) as error:
            raise Again(re.sub(r"\?[^\s)']*", "", str(error))) from None  # without the signature
        except requests.RequestException as error:
            raise SystemExit(f"error: {name}: {type(error).__name__}") from None
        if status in (408, 425, 429) or status >= 500:
            raise Again(f"the server answered {status}")
        size = re.fullmatch(rf"bytes {begin}-\d+/(\d+)", found.get("Content-Range", ""))
        now = found.get("ETag") or found.get("Last-Modified") or ""
        if status == 412 or (size and version not in ("", now)):
            raise SystemExit(f"error: {name} has changed on the server: give the command again")
        if status not in (200, 206):
            raise SystemExit(f"error: {name}: the server answered {status} {answer.reason}")
        if not size or not now or "text/html" in found.get("Content-Type", "") or found.get("Content-Encoding"):
            kind = found.get("Content-Type", "other things")
            message = f"the server sends no ranges of a file with a version but {kind}"
            raise SystemExit(f"error: {name}: {message}. Download it by other means, and give its path")
        return Answer(content, int(size[1]), now)

    return read


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(2**20):
            digest.update(chunk)
    return digest.hexdigest()


def main(argv: list[str] | None = None) -> int:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m data.download", description=__doc__, formatter_class=formatter)
    parser.add_argument("source", nargs="?", help="published name or address")
    parser.add_argument("--list", action="store_true", help="list the published files")
    parser.add_argument("--cache_dir", type=Path, help="folder for the file (default: $TOPK_CACHE, or data/downloads)")
    parser.add_argument("--sha256", help="SHA-256 that the file must have")
    parser.add_argument("--requester_pays", action="store_true", help="pay for the transfer from an s3:// bucket")
    args = parser.parse_args(argv)
    if args.list or not args.source:
        for name, (_, backbone, resolution, gigabytes) in PUBLISHED_FILES.items():
            print(f"{name:22}{gigabytes:3} GB  {backbone} at {resolution} pixels")
        return 0
    print(download(args.source, args.cache_dir, args.sha256, args.requester_pays))
    return 0


if __name__ == "__main__":
    sys.exit(main())
