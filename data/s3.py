"""Ranges of objects in S3, by boto3: it finds the bucket's region, and the credentials; without any, unsigned."""

from collections.abc import Callable
from typing import NamedTuple

TIMEOUT = 30  # seconds without a byte


class Answer(NamedTuple):
    """Bytes of a file, and the whole file's size and version."""

    content: bytes
    size: int
    version: str


Read = Callable[[int, int, str], Answer]  # bytes [begin, end) of this version of the file ("": any)


class Again(Exception):
    """A failure that may pass."""


def s3_reader(address: str, requester_pays: bool) -> Read:
    """A function that reads ranges of an object at an s3:// address. It raises SystemExit and Again."""
    import boto3
    from botocore import UNSIGNED
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError, IncompleteReadError

    bucket, _, key = address.removeprefix("s3://").partition("/")
    session = boto3.Session()
    unsigned = session.get_credentials() is None
    config = Config(signature_version=UNSIGNED if unsigned else None, read_timeout=TIMEOUT, connect_timeout=TIMEOUT)
    region = session.region_name or "us-east-1"
    client = session.client("s3", region_name=region, config=config)
    payer = {"RequestPayer": "requester"} if requester_pays else {}

    def read(begin: int, end: int, version: str) -> Answer:
        match = {"IfMatch": version} if version else {}
        try:
            answer = client.get_object(Bucket=bucket, Key=key, Range=f"bytes={begin}-{end - 1}", **match, **payer)
            content = answer["Body"].read()
        except ClientError as error:
            code, status = error.response["Error"]["Code"], error.response["ResponseMetadata"]["HTTPStatusCode"]
            if status == 429 or status >= 500:
                raise Again(f"{code} ({status})") from None
            if code in ("PreconditionFailed", "412"):
                raise SystemExit(f"error: {address} has changed on the server: give the command again") from None
            who = "no credentials were found" if unsigned else "with the credentials that boto3 finds"
            raise SystemExit(
                f"error: {address}: {code}: {error.response['Error'].get('Message', '')} (region {region}; {who}; "
                "AWS_PROFILE, AWS_DEFAULT_REGION and AWS_ENDPOINT_URL choose others, --requester_pays pays)"
            ) from None
        except (HTTPClientError, IncompleteReadError) as error:
            raise Again(type(error).__name__) from None
        except BotoCoreError as error:
            raise SystemExit(f"error: {address}: {error}") from None
        except Exception as error:  # urllib3: the connection broke
            raise Again(type(error).__name__) from None
        return Answer(content, int(answer["ContentRange"].rpartition("/")[2]), answer["ETag"])

    return read
