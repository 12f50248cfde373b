"""Large files from https:// and s3:// addresses: eight connections at a time, and a killed download continues.

    python -m data.download --list                                    # the published embedding files
    python -m data.download wsl-32x48d-320                            # into $TOPK_CACHE, or data/downloads/embeddings
    python -m data.download s3://bucket/own.pt --requester_pays       # with the credentials of boto3
    python -m data.download https://host/own.pt --sha256 HEX

Parts go to their places in NAME.part; NAME.parts says which version of the file they are of, and which are complete. A
file takes its own name when it is whole, and whatever has that name is used without asking the network. The version is
the server's ETag, or else the time of the file's last change there; where --sha256 is given it decides alone, since the
servers of one address may differ in the others. Which S3 server: AWS_ENDPOINT_URL, AWS_PROFILE.
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
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import requests
from filelock import FileLock
from tqdm import tqdm

from data.published import PUBLISHED, PUBLISHED_FILES, without_secrets

DEFAULT_CACHE = Path(__file__).parent / "downloads" / "embeddings"
CONNECTIONS = 8
PART_BYTES = 16 * 2**20
RETRIES = 8
TIMEOUT = 30  # seconds without a byte
PRIVATE = re.compile(r"\?[^\s)']*|(?<=//)[^/\s]*@")  # signatures, and logins


class Answer(NamedTuple):
    """What a server answers to a request for a range of bytes. reason: of a refusal."""

    status: int
    headers: Mapping[str, str]
    content: bytes
    reason: str

    @property
    def version(self) -> str:
        return self.headers.get("etag") or self.headers.get("last-modified") or ""


Request = Callable[[int, int], Answer]  # asks for bytes [begin, end)


def download(source: str, cache: Path | None = None, sha256: str | None = None, requester_pays: bool = False) -> Path:
    """Return the local path of a file, downloaded unless it is in the cache or local.

    Args:
        source: a short name of PUBLISHED_FILES, an s3:// or https:// address, or a path.
        sha256: SHA-256 that the file must have, also a local one.
        requester_pays: pay for the transfer from the bucket.

    Raises:
        OSError: there is no such file, or it cannot be downloaded.
        ValueError: it has another SHA-256.
    """
    address = source
    if source in PUBLISHED_FILES:
        address = PUBLISHED + PUBLISHED_FILES[source].file
    advice = "it is another file, or a damaged one"
    if "://" in address:
        advice = "delete it to download it again"
        path = cached_path(address, cache)
        fetch_once(address, path, sha256, requester_pays)
    else:
        path = Path(address).expanduser()
        if not path.is_file():
            raise FileNotFoundError(f"there is no file {path}. Published are {', '.join(PUBLISHED_FILES)}")
    if sha256:
        found = sha256_of(path)
        if found != sha256.lower():
            raise ValueError(f"{path} has the SHA-256 {found}, not {sha256}: {advice}")
    return path


def cached_path(address: str, cache: Path | None) -> Path:
    """Where the file of an address lies in the cache: by the whole address, and of S3 by the server, too."""
    folder = cache or Path(os.environ.get("TOPK_CACHE") or DEFAULT_CACHE).expanduser()
    name = re.sub(r"[^\w.-]+", "_", Path(urlsplit(address).path).name, flags=re.ASCII)[-150:] or "file"
    place = address
    if address.startswith("s3://"):
        place = f"{s3_server()} {address}"
    digest = hashlib.sha256(place.encode()).hexdigest()
    return folder / f"{digest[:8]}-{name}"


def s3_server() -> str:
    """The server that boto3 asks for an s3:// address, by the environment or the profile; "" for Amazon's."""
    named = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if named:
        return named
    import boto3

    address: str = boto3.Session().client("s3", region_name="us-east-1").meta.endpoint_url
    if address.endswith(".amazonaws.com"):
        return ""
    return address


def fetch_once(address: str, path: Path, sha256: str | None, requester_pays: bool) -> None:
    """Download a file that is not there. Commands that start together download once. Raises OSError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock"):
            if path.exists():
                return
            if address.startswith("s3://"):
                request = s3_request(address, requester_pays)
            else:
                request = http_request(address)
            Download(request, path, without_secrets(address), sha256).run()
    except OSError as error:
        if error.errno is None:  # ours
            raise
        raise OSError(f"cannot write {path}: {error.strerror}; finished parts are kept") from None


def unsigned(request: Any) -> Any:
    """Send a request without a login. Some servers refuse one with both a signature and a login from ~/.netrc."""
    return request


def http_request(address: str) -> Request:
    """Requests to an http:// or https:// address."""
    auth = unsigned if "Signature=" in address else None

    def request(begin: int, end: int) -> Answer:
        headers = {"Range": f"bytes={begin}-{end - 1}", "Accept-Encoding": "identity"}
        with requests.get(address, headers=headers, timeout=TIMEOUT, auth=auth, stream=True) as answer:
            content = b""
            if answer.status_code == 206:
                content = answer.content
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
    region = session.region_name or "us-east-1"
    who = "with the credentials that boto3 finds"
    options: dict[str, Any] = {}
    if session.get_credentials() is None:
        who = "no credentials were found"
        options["signature_version"] = UNSIGNED
    # A store may answer a range with the checksum of the whole file, which boto3 would compare with the part's.
    config = Config(
        read_timeout=TIMEOUT, connect_timeout=TIMEOUT, response_checksum_validation="when_required", **options
    )
    client = session.client("s3", region_name=region, config=config)
    payer = {}
    if requester_pays:
        payer["RequestPayer"] = "requester"
    advice = "AWS_PROFILE, AWS_DEFAULT_REGION and AWS_ENDPOINT_URL choose others, --requester_pays pays"

    def request(begin: int, end: int) -> Answer:
        reason = ""
        content = b""
        try:
            answer = client.get_object(Bucket=bucket, Key=key, Range=f"bytes={begin}-{end - 1}", **payer)
            content = answer["Body"].read()
        except ClientError as error:
            answer = error.response
            problem = answer["Error"]
            reason = f"{problem['Code']}: {problem.get('Message', '')} (region {region}; {who}; {advice})"
        about = answer["ResponseMetadata"]
        return Answer(about["HTTPStatusCode"], about["HTTPHeaders"], content, reason)

    return request


class Download:
    """A download, part by part, from where an earlier process was stopped.

    Args:
        request: asks the server.
        path: where the whole file goes.
        name: for messages.
        sha256: decides whether the parts are of one file; None: the version does, which the server says.
    """

    def __init__(self, request: Request, path: Path, name: str, sha256: str | None) -> None:
        self.request = request
        self.path = path
        self.name = name
        self.sha256 = sha256
        self.partial = path.with_name(f"{path.name}.part")
        self.progress = path.with_name(f"{path.name}.parts")
        self.version = ""
        self.size = 0

    def run(self) -> None:
        """Bring the parts that are missing, and give the file its name. Raises OSError."""
        first = self.read(0, 1)
        self.size = int(first.headers["content-range"].rpartition("/")[2])
        self.version = first.version
        done = self.finished_parts()
        missing = [number for number in range(-(-self.size // PART_BYTES)) if number not in done]
        to_come = sum(self.part_size(number) for number in missing)
        free = shutil.disk_usage(self.path.parent).free
        if free < to_come:
            raise OSError(f"{self.name}: {to_come:,} bytes are to come, and {free:,} are free in {self.path.parent}")
        with open(self.partial, "ab") as file:
            file.truncate(self.size)
        pool = ThreadPoolExecutor(CONNECTIONS)
        try:
            with tqdm(total=self.size, initial=self.size - to_come, unit="B", unit_scale=True, disable=None) as bar:
                for future in as_completed([pool.submit(self.bring, number) for number in missing]):
                    bar.update(future.result())
        finally:
            pool.shutdown(cancel_futures=True)
        os.replace(self.partial, self.path)
        self.progress.unlink()

    def finished_parts(self) -> set[int]:
        """The parts that an earlier process brought; none of another version."""
        header = f"{self.size} {PART_BYTES} {self.sha256 or self.version}"
        lines = []
        if self.progress.exists():
            lines = self.progress.read_text().splitlines()
        if lines[:1] != [header] or not self.partial.exists():
            self.partial.unlink(missing_ok=True)
            self.progress.write_text(f"{header}\n")
            return set()
        return {int(line) for line in lines[1:] if len(line) == 8}  # a line that was cut short is shorter or longer

    def part_size(self, number: int) -> int:
        return min(PART_BYTES, self.size - number * PART_BYTES)

    def bring(self, number: int) -> int:
        """Write a part to its place; return its size."""
        begin = number * PART_BYTES
        answer = self.read(begin, begin + self.part_size(number))
        with open(self.partial, "r+b") as file:
            file.seek(begin)
            file.write(answer.content)
            file.flush()
            os.fsync(file.fileno())
        with open(self.progress, "a") as log:
            log.write(f"{number:08}\n")
        return self.part_size(number)

    def read(self, begin: int, end: int) -> Answer:
        """Read a range, again after a failure that may pass.

        Raises:
            OSError: the server refuses, sends something else, or fails again and again.
        """
        problem = ""
        for attempt in range(RETRIES):
            if attempt:
                time.sleep(min(0.25 * 2**attempt, 30))
            try:
                answer = self.request(begin, end)
            except Exception as error:  # a connection that broke raises errors of three libraries
                problem = f"{type(error).__name__}: {PRIVATE.sub('', str(error))}"
                continue
            if answer.status in (408, 425, 429) or answer.status >= 500:
                problem = f"the server answered {answer.status} {answer.reason}"
                continue
            self.check(answer, begin)
            if len(answer.content) == end - begin:
                return answer
            problem = f"{len(answer.content)} bytes came instead of {end - begin}"
        raise OSError(f"{self.name}: {problem}. Finished parts are kept: give the command again")

    def check(self, answer: Answer, begin: int) -> None:
        """Raise OSError for an answer that is no part of this version of the file."""
        if answer.status not in (200, 206):
            raise OSError(f"{self.name}: the server answered {answer.status} {answer.reason}")
        is_range = re.fullmatch(rf"bytes {begin}-\d+/\d+", answer.headers.get("content-range", ""))
        has_version = answer.version != ""
        if self.sha256:
            has_version = True
        elif is_range and self.version not in ("", answer.version):
            raise OSError(f"{self.name} has changed on the server: give the command again")
        if not is_range or not has_version or "text/html" in answer.headers.get("content-type", ""):
            kind = answer.headers.get("content-type", "other things")
            raise OSError(
                f"{self.name}: the server sends no ranges of a file with a version but {kind}. Download it by other "
                "means, and give its path"
            )


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(2**20):
            digest.update(chunk)
    return digest.hexdigest()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m data.download", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", nargs="?", help="published name or address")
    parser.add_argument("--list", action="store_true", help="list the published files")
    parser.add_argument(
        "--cache_dir", type=Path, help="folder for the file (default: $TOPK_CACHE, or data/downloads/embeddings)"
    )
    parser.add_argument("--sha256", help="SHA-256 that the file must have")
    parser.add_argument("--requester_pays", action="store_true", help="pay for the transfer from an s3:// bucket")
    args = parser.parse_args(argv)
    if args.list or not args.source:
        for name, known in PUBLISHED_FILES.items():
            print(f"{name:22}{known.gigabytes:3} GB  {known.backbone} at {known.resolution} pixels")
        return 0
    try:
        cache_dir = args.cache_dir and args.cache_dir.expanduser()
        print(download(args.source, cache_dir, args.sha256, args.requester_pays))
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
