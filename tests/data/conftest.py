"""Servers on loopback for what is fetched, and nothing of whoever runs the tests in their way."""

import os

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
    monkeypatch.setenv("AWS_ENDPOINT_URL", moto)
    client = boto3.client("s3")
    client.create_bucket(Bucket="store")
    return client
