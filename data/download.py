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
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import requests
from filelock import FileLock
from tqdm import tqdm

from data.published import PUBLISHED, PUBLISHED_FILES

DEFAULT_CACHE = Path(__file__).parent / "downloads" / "embeddings"
CONNECTIONS, PART_BYTES, RETRIES = 8, 16 * 2**20, 8
TIMEOUT = 30  # seconds without a byte


class Answer(NamedTuple):
    """What a server answers to a request for a range of bytes. reason: of a refusal."""

    status: int
    headers: Mapping[str, str]
    content: bytes
    reason: str


Request = Callable[[int, int], Answer]  # asks for bytes [begin, end)


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
        is_s3 = address.startswith("s3://")
        server = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL", "")
        place = f"{server} {address}" if is_s3 else address
        path = cache / f"{hashlib.sha256(place.encode()).hexdigest()[:8]}-{name}"
        try:
            cache.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{path}.lock"):  # commands that start together download once
                if not path.exists():
                    fetch(s3_request(address, requester_pays) if is_s3 else http_request(address), path, shown(address))
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


def http_request(address: str) -> Request:
    """Requests to an http:// or https:// address."""
    # Some servers refuse a request with both a signature and a login from ~/.netrc.
    auth = (lambda request: request) if "Signature=" in address else None

    def request(begin: int, end: int) -> Answer:
        headers = {"Range": f"bytes={begin}-{end - 1}", "Accept-Encoding": "identity"}
        with requests.get(address, headers=headers, timeout=TIMEOUT, auth=auth, stream=True) as answer:
            content = answer.content if answer.status_code == 206 else b""
            return Answer(answer.status_code, answer.headers, content, answer.reason)

    return request


def s3_request(address: str, requester_pays: bool) -> Request:
    """Requests by boto3, which finds the bucket's region, and the credentials; without any, unsigned."""
    import boto3
    from botocore import UNSIGNED
    from botocore.config import Config
    from botocore.exceptions import ClientError

    bucket, _, key = address.removeprefix("s3://").partition("/")
    session = boto3.Session()
    unsigned = session.get_credentials() is None
    config = Config(signature_version=UNSIGNED if unsigned else None, read_timeout=TIMEOUT, connect_timeout=TIMEOUT)
    region = session.region_name or "us-east-1"
    client = session.client("s3", region_name=region, config=config)
    payer = {"RequestPayer": "requester"} if requester_pays else {}
    who = "no credentials were found" if unsigned else "with the credentials that boto3 finds"
    advice = "AWS_PROFILE, AWS_DEFAULT_REGION and AWS_ENDPOINT_URL choose others, --requester_pays pays"

    def request(begin: int, end: int) -> Answer:
        reason, content = "", b""
        try:
            answer = client.get_object(Bucket=bucket, Key=key, Range=f"bytes={begin}-{end - 1}", **payer)
            content = answer["Body"].read()
        except ClientError as error:
            answer, problem = error.response, error.response["Error"]
            reason = f"{problem['Code']}: {problem.get('Message', '')} (region {region}; {who}; {advice})"
        about = answer["ResponseMetadata"]
        return Answer(about["HTTPStatusCode"], about["HTTPHeaders"], content, reason)

    return request


def read(request: Request, begin: int, end: int, version: str, name: str) -> Answer:
    """Read a range of this version of the file ("": any), again after a failure that may pass.

    Raises:
        SystemExit: the server refuses, sends something else, or fails again and again.
    """
    problem = ""
    for attempt in range(RETRIES):
        time.sleep(min(0.25 * 2**attempt, 30) if attempt else 0)
        try:
            answer = request(begin, end)
        except Exception as error:  # a connection that broke raises errors of three libraries
            private = r"\?[^\s)']*|(?<=//)[^/\s]*@"  # signatures, and logins
            problem = f"{type(error).__name__}: {re.sub(private, '', str(error))}"
            continue
        status, headers = answer.status, answer.headers
        if status in (408, 425, 429) or status >= 500:
            problem = f"the server answered {status} {answer.reason}"
            continue
        if status not in (200, 206):
            raise SystemExit(f"error: {name}: the server answered {status} {answer.reason}")
        is_range = f"bytes {begin}-" in headers.get("content-range", "")
        if is_range and version not in ("", version_of(answer)):
            raise SystemExit(f"error: {name} has changed on the server: give the command again")
        if not is_range or not version_of(answer) or "text/html" in headers.get("content-type", ""):
            kind = headers.get("content-type", "other things")
            message = f"the server sends no ranges of a file with a version but {kind}"
            raise SystemExit(f"error: {name}: {message}. Download it by other means, and give its path")
        if len(answer.content) == end - begin:
            return answer
        problem = f"{len(answer.content)} bytes came instead of {end - begin}"
    raise SystemExit(f"error: {name}: {problem}. Finished parts are kept: give the command again")


def version_of(answer: Answer) -> str:
    return answer.headers.get("etag") or answer.headers.get("last-modified") or ""


def fetch(request: Request, path: Path, name: str) -> None:
    """Download a file part by part, from where an earlier process was stopped."""
    first = read(request, 0, 1, "", name)
    size, version = int(first.headers["content-range"].rpartition("/")[2]), version_of(first)
    partial, progress = path.with_name(f"{path.name}.part"), path.with_name(f"{path.name}.parts")
    header = f"{size} {PART_BYTES} {version}"
    lines = progress.read_text().splitlines() if progress.exists() else []
    if lines[:1] != [header] or not partial.exists():  # no parts, or parts of another version
        lines = []
        partial.unlink(missing_ok=True)
        progress.write_text(f"{header}\n")
    done = {int(line) for line in lines[1:] if len(line) == 8}  # a line that was cut short is shorter or longer
    missing = [number for number in range(-(-size // PART_BYTES)) if number not in done]
    sizes = {number: min(PART_BYTES, size - number * PART_BYTES) for number in missing}
    to_come, free = sum(sizes.values()), shutil.disk_usage(path.parent).free
    if free < to_come:
        raise SystemExit(f"error: {name}: {to_come:,} bytes are to come, and {free:,} are free in {path.parent}")
    with open(partial, "ab") as file:
        file.truncate(size)

    def bring(number: int) -> int:
        begin = number * PART_BYTES
        answer = read(request, begin, begin + sizes[number], version, name)
        with open(partial, "r+b") as file:
            file.seek(begin)
            file.write(answer.content)
            file.flush()
            os.fsync(file.fileno())
        with open(progress, "a") as log:
            log.write(f"{number:08}\n")
        return sizes[number]

    pool = ThreadPoolExecutor(CONNECTIONS)
    try:
        with tqdm(total=size, initial=size - to_come, unit="B", unit_scale=True, disable=None) as bar:
            for future in as_completed([pool.submit(bring, number) for number in missing]):
                bar.update(future.result())
    finally:
        pool.shutdown(cancel_futures=True)
    os.replace(partial, path)
    progress.unlink()


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
    message = "folder for the file (default: $TOPK_CACHE, or data/downloads/embeddings)"
    parser.add_argument("--cache_dir", type=Path, help=message)
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
