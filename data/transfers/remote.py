"""Where files are and how they are read: locations, errors, and byte ranges by HTTP and by S3.

Both transports answer alike: `open` gives the status, the headers and the body of a byte span or of the whole file, and
raises RetryError for what may pass, ChangedError where the server holds another file than the one asked for, and the
errors meant for the user for the rest.
"""

import os
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from urllib.parse import quote, urlsplit

import boto3
import requests
import urllib3
from boto3.exceptions import Boto3Error
from botocore import UNSIGNED
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    EndpointConnectionError,
    HTTPClientError,
    IncompleteReadError,
    NoCredentialsError,
)
from botocore.parsers import ResponseParserError

from data.program import ProgramError

CACHE_VARIABLE = "TOPK_CACHE"

_MIB = 2**20
_CHUNK = 64 * 1024  # bytes held in memory per connection
_session_guard = threading.Lock()


class ObjectStoreError(ProgramError):
    """A file could not be brought or sent; the message says why and how to mend it. advice: its last words."""

    advice = "Check the arguments"


class MissingObjectError(ObjectStoreError):
    """No such bucket, key, address or local file."""

    advice = "Check bucket, key, address and endpoint_url"


class PermissionDeniedError(ObjectStoreError):
    """The server refuses these credentials, or the cache folder cannot be written."""

    advice = (
        "Check the credentials (AWS_PROFILE, AWS_ACCESS_KEY_ID), or pass anonymous=True for a public bucket; some "
        "servers say the same of a key that does not exist"
    )


class NoSpaceError(ObjectStoreError):
    """The disk is too small; what has been downloaded stays for the next start."""

    advice = f"Free space there or choose another folder by cache_dir or ${CACHE_VARIABLE}; finished parts are kept"


class NetworkError(ObjectStoreError):
    """No answer, or no complete one, after all attempts; what has been downloaded stays for the next start."""

    advice = "Check the network and the address and start again: finished parts are kept"


class ChecksumError(ObjectStoreError):
    """Size, SHA-256 or ETag differ from what they must be."""

    advice = "Check size and sha256 where you gave them; a file in the cache must be deleted before it is fetched again"


class SourceChangedError(ObjectStoreError):
    """The file changed under every download."""

    advice = "Start again when it is no longer being written"


class RetryError(Exception):
    """A failure that may pass. wait: seconds the server asked for."""

    def __init__(self, reason: str, wait: float = 0.0) -> None:
        super().__init__(reason)
        self.wait = wait


class ChangedError(Exception):
    """The server holds another file than at the start."""


class NoRangesError(Exception):
    """The server sends other bytes than the range asked for."""


class StoppedError(Exception):
    """Another thread failed, or the user pressed Ctrl-C."""


@dataclass(frozen=True)
class Transfer:
    """How to move bytes.

    connections: parts under way at once, at least 1. part_bytes: bytes per part; a download taken up again keeps
    the part size it began with. timeout: seconds without a byte after which a connection is given up. retries:
    failures in a row, without a byte between them, after which the download is given up. backoff: seconds before the
    first retry, doubled with each up to 30, times a random number in [0.5, 1].
    """

    connections: int = 8
    part_bytes: int = 16 * _MIB
    timeout: float = 30.0
    retries: int = 8
    backoff: float = 1.0

    def __post_init__(self) -> None:
        if self.connections < 1 or self.part_bytes < 1 or self.timeout <= 0 or self.retries < 0 or self.backoff < 0:
            raise ValueError(
                "connections and part_bytes must be at least 1, timeout above 0, retries and backoff at least 0, "
                f"got {self}"
            )


DEFAULT_TRANSFER = Transfer()


@dataclass(frozen=True)
class Location:
    """Where a file is. uri: s3://bucket/key, http(s)://..., or a local path. endpoint_url: of the S3 server, None for
    Amazon's or the one in AWS_ENDPOINT_URL. anonymous: None for unsigned requests where no credentials are found.
    """

    uri: str
    endpoint_url: str | None = None
    anonymous: bool | None = None

    def __post_init__(self) -> None:
        if self.scheme and not (self.scheme in ("s3", "http", "https") and _is_address(self.uri)):
            raise ObjectStoreError(
                f"a source is s3://bucket/key, http(s)://host/file, a local path or a short name, got {self.uri!r}"
            )
        asked = self.endpoint if self.scheme == "s3" else self.endpoint_url
        if asked and not (re.match("https?://", asked) and _is_address(asked)):
            raise ObjectStoreError(
                f"endpoint_url (without it AWS_ENDPOINT_URL) is http(s)://host of an S3 server, got {asked!r}"
            )

    @property
    def scheme(self) -> str:
        """s3, http, https, or "" for a local path."""
        return self.uri.partition("://")[0].lower() if "://" in self.uri else ""

    @property
    def bucket(self) -> str:
        """The host, of an http(s) address."""
        return self.uri.partition("://")[2].partition("/")[0]

    @property
    def key(self) -> str:
        return self.uri.partition("://")[2].partition("/")[2]

    @property
    def endpoint(self) -> str | None:
        """endpoint_url, or what the environment says in its place."""
        return self.endpoint_url or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")

    @property
    def address(self) -> str:
        """The HTTPS address, the same for an object named by s3:// and by its path-style address."""
        if self.scheme != "s3":
            return self.uri
        return f"{(self.endpoint or 'https://s3.amazonaws.com').rstrip('/')}/{self.bucket}/{quote(self.key)}"


def _is_address(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return bool(parts.hostname) and parts.port != 0 and not re.search(r"\s", parts.netloc)
    except ValueError:  # a bracket or a port that is none
        return False


@dataclass(frozen=True)
class Remote:
    """What a response tells of the whole file. size: bytes, None if not told. version: the ETag with its quotes, else
    the time of the last change, None if neither is told. start: the body's first byte. framed: whether the end of
    the body differs from a broken line. s3_etag: whether the ETag follows S3's rule.
    """

    size: int | None
    version: str | None
    start: int = 0
    ranges: bool = False
    framed: bool = True
    s3_etag: bool = False

    @classmethod
    def of(cls, status: int, headers: Mapping[str, str]) -> "Remote":
        version = headers.get("etag") or headers.get("last-modified")
        s3_etag = "x-amz-request-id" in headers and "kms" not in headers.get("x-amz-server-side-encryption", "")
        s3_etag = s3_etag and "x-amz-server-side-encryption-customer-algorithm" not in headers
        if status == 206:
            found = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", headers.get("content-range", ""))
            if not found:
                raise NoRangesError
            return cls(int(found[2]), version, int(found[1]), ranges=True, s3_etag=s3_etag)
        length = headers.get("content-length", "")
        framed = length.isdecimal() or headers.get("transfer-encoding", "").lower() == "chunked"
        return cls(int(length) if length.isdecimal() else None, version, framed=framed, s3_etag=s3_etag)

    @property
    def strong_etag(self) -> str | None:
        return self.version if self.version and self.version.startswith('"') else None


_Answer = tuple[int, Mapping[str, str], Iterator[bytes]]  # status, headers, body


class Http:
    """Reads by requests. open: status, headers and body of a byte span (first, one after the last) or of all."""

    def __init__(self, location: Location, transfer: Transfer) -> None:
        self._url, self._timeout = location.uri, transfer.timeout
        self._session = requests.Session()
        for scheme in ("http://", "https://"):
            self._session.mount(scheme, requests.adapters.HTTPAdapter(pool_maxsize=transfer.connections))

    @contextmanager
    def open(self, span: tuple[int, int] | None, etag: str | None) -> Iterator[_Answer]:
        headers = {"Accept-Encoding": "identity"}  # offsets count the bytes of the file, not of a compressed stream
        if span:
            headers["Range"] = f"bytes={span[0]}-{span[1] - 1}"
        if etag:
            headers["If-Match"] = etag
        with _answers():
            response = self._session.get(self._url, headers=headers, stream=True, timeout=self._timeout)
        with response:
            _check_status(response.status_code, response.reason or "", response.headers)
            body = response.raw.stream(_CHUNK, decode_content=False)
            yield response.status_code, response.headers, _guarded(body)


class S3:
    """Reads by boto3; as Http."""

    def __init__(self, location: Location, transfer: Transfer) -> None:
        self._object = {"Bucket": location.bucket, "Key": location.key}
        with _answers():
            self._client = s3_client(location, transfer, attempts=1)

    @contextmanager
    def open(self, span: tuple[int, int] | None, etag: str | None) -> Iterator[_Answer]:
        options = {"Range": f"bytes={span[0]}-{span[1] - 1}"} if span else {}
        if etag:
            options["IfMatch"] = etag
        with _answers():
            answer = self._client.get_object(**self._object, **options)
        meta = answer["ResponseMetadata"]
        with closing(answer["Body"]) as body:
            _check_status(meta["HTTPStatusCode"], "", meta["HTTPHeaders"])
            yield meta["HTTPStatusCode"], meta["HTTPHeaders"], _guarded(body.iter_chunks(_CHUNK))


@lru_cache(maxsize=1)
def _s3_session(settings: tuple[tuple[str, str], ...]) -> boto3.Session:
    """One session for as long as the AWS_ variables stay as they are: its first client costs 0.1 s, the next little."""
    return boto3.Session()


def s3_client(location: Location, transfer: Transfer, attempts: int) -> Any:
    settings = tuple(sorted(pair for pair in os.environ.items() if pair[0].startswith("AWS_")))
    with _session_guard:  # a session, unlike a client, must not be used by two threads at once
        session = _s3_session(settings)
        try:
            anonymous = session.get_credentials() is None if location.anonymous is None else location.anonymous
            config = Config(
                signature_version=UNSIGNED if anonymous else None,
                connect_timeout=transfer.timeout,
                read_timeout=transfer.timeout,
                retries={"total_max_attempts": attempts, "mode": "standard"},
                max_pool_connections=transfer.connections,
                # Checksums of Amazon's newer kind are refused by some servers that speak S3.
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
            )
            return session.client("s3", endpoint_url=location.endpoint_url, config=config)
        except ValueError as error:
            raise ObjectStoreError(f"endpoint_url or a variable AWS_... has a wrong value ({error})") from error


@contextmanager
def _answers() -> Iterator[None]:
    """The errors of boto3 and requests as those of _check_status; answers that they cannot read may pass."""
    try:
        yield
    except (Boto3Error, BotoCoreError, ClientError) as error:
        cause = error.__context__ if isinstance(error, Boto3Error) else error  # uploads hide the reason
        if isinstance(cause, ClientError):
            meta, said = cause.response["ResponseMetadata"], cause.response.get("Error", {})
            _check_status(meta["HTTPStatusCode"], f"{said.get('Code')}: {said.get('Message')}", meta["HTTPHeaders"])
        if isinstance(cause, NoCredentialsError):
            raise PermissionDeniedError(str(cause)) from error
        if isinstance(cause, (EndpointConnectionError, HTTPClientError, IncompleteReadError)):
            raise RetryError(str(cause)) from error
        raise ObjectStoreError(str(error)) from error
    except (requests.RequestException, urllib3.exceptions.HTTPError, ResponseParserError, ValueError) as error:
        raise RetryError(str(error)) from error


def _guarded(body: Iterator[bytes]) -> Iterator[bytes]:
    with _answers():
        yield from body


@contextmanager
def s3_sentences(uri: str) -> Iterator[None]:
    """boto3's errors as sentences, where boto3 itself tries again."""
    try:
        with _answers():
            yield
    except RetryError as error:
        raise NetworkError(f"{uri}: {error}. {NetworkError.advice}") from error
    except ObjectStoreError as error:
        raise type(error)(f"{uri}: {error}. {error.advice}") from error


def _check_status(status: int, reason: str, headers: Mapping[str, str]) -> None:
    said = f"the server answered {status} ({reason})"
    if status in (404, 410):
        raise MissingObjectError(said)
    if status in (401, 403) or reason.startswith(("ExpiredToken", "InvalidToken")):
        raise PermissionDeniedError(said)
    if status in (412, 416):
        raise ChangedError
    if status in (408, 425, 429) or status >= 500:
        wait = headers.get("retry-after", "")
        raise RetryError(said, float(wait) if wait.isdecimal() else 0.0)
    if status not in (200, 206):
        raise ObjectStoreError(said)
    encoding = headers.get("content-encoding", "").lower()
    if encoding not in ("", "identity", "aws-chunked"):  # the last: what some uploads leave behind
        raise ObjectStoreError(f"the server sends the file encoded as {encoding}, which it was asked not to do")
