"""Servers on loopback for what is fetched, and nothing of whoever runs the tests in their way."""

import errno
import os
from contextlib import contextmanager

import boto3
import pytest

from tests.data.object_store_servers import FaultyServer


@pytest.fixture
def own_network(monkeypatch):
    """No credentials, proxies or cache of the user's."""
    for name in [name for name in os.environ if name.startswith("AWS_") or name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.delenv("TOPK_CACHE", raising=False)


@pytest.fixture
def disk_that_fills_up(monkeypatch):
    """A context in which the tenth file that is synchronised finds no room."""

    @contextmanager
    def full():
        fsync, calls = os.fsync, []

        def failing(descriptor):
            calls.append(descriptor)
            if len(calls) > 9:
                raise OSError(errno.ENOSPC, "No space left on device")
            fsync(descriptor)

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", failing)
            yield

    return full


@pytest.fixture
def server():
    """A server of whatever a test gives it as `content`."""
    running = FaultyServer(b"")
    yield running
    running.close()


@pytest.fixture
def bucket(moto, own_network, monkeypatch):
    """A client with credentials, and an empty private bucket `store`."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "user")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    client = boto3.client("s3", endpoint_url=moto)
    client.create_bucket(Bucket="store")
    return client
