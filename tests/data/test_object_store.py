"""data/transfers/object_store.py against moto's S3 server and a server that fails, both on loopback.

The claims: nothing but the right file ever reaches the cache; what has arrived is not fetched again; every error
says what to do. No test depends on how long anything takes.
"""

import contextlib
import gzip
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections import deque
from pathlib import Path
from types import SimpleNamespace

import pytest
from data.transfers import object_store
from data.transfers.object_store import (
    PUBLISHED,
    ObjectStoreError,
    checksum_of,
    etag_part_sizes,
    fetch,
    resolve,
    upload,
)
from hypothesis import given
from hypothesis import strategies as st

from tests.data.object_store_servers import PROBE
from tests.processes import wait_for

ROOT = Path(__file__).parent.parent.parent
PART = 64 * 1024
QUICK = {"CONNECTIONS": 3, "PART_BYTES": PART, "TIMEOUT": 60, "RETRIES": 6, "BACKOFF": 0.001}
CONTENT = random.Random(0).randbytes(15 * PART + 1003)
OTHER = random.Random(1).randbytes(15 * PART + 1003)
SHA256 = hashlib.sha256(CONTENT).hexdigest()
PARTS = 16
MIB = 2**20


@pytest.fixture(autouse=True)
def quick(own_network, monkeypatch):
    """Small parts and short waits."""
    for name, value in QUICK.items():
        monkeypatch.setattr(object_store, name, value)


@pytest.fixture
def server(server):
    server.content = CONTENT
    return server


@pytest.fixture
def get(server, tmp_path):
    """Fetch the failing server's file into a folder of this test's, with options."""
    return lambda folder="cache", sha256=None: fetch(resolve(server.url, tmp_path / folder), sha256)


def partial(path, ending):
    return path.parent / ".partial" / (path.name + ending)


def assert_nothing_cached(cache):
    assert [file for file in cache.glob("*") if file.is_file()] == []


# Names, places, parts


def test_published_names_resolve_to_the_published_bucket():
    location = resolve("wsl-32x48d-320")
    key = "ImageNet_embeddings_labels_train_test_IGAM_Resnext101_32x48d_320.p"
    assert (location.uri, location.anonymous) == (f"s3://publicdata1/{key}", True)
    assert location.address == f"https://nyc3.digitaloceanspaces.com/publicdata1/{key}"
    assert resolve("wsl-32x48d-320", endpoint_url="http://mirror").endpoint_url == "http://mirror"
    assert len(set(PUBLISHED.values())) == 6
    assert resolve("wsl-32x48d-320").path == resolve(location.address).path


def test_cached_names_differ_between_sources_and_are_readable(tmp_path, monkeypatch):
    names = [f"s3://{name}" for name in ("a/x.p", "b/x.p", "a/y/x.p", "a/x%2Fp", "a/x/p")]
    names += ["https://a/x.p", "https://a/x.p?v=2"]
    paths = [resolve(source, tmp_path).path for source in names]
    paths.append(resolve("s3://a/x.p", tmp_path, endpoint_url="http://elsewhere").path)
    assert len(set(paths)) == len(paths)
    assert {path.parent for path in paths} == {tmp_path}
    assert (paths[0].name[:2], paths[0].suffix) == ("x-", ".p")
    assert len(resolve("https://a/" + "é/.. " * 99, tmp_path).path.name) < 200
    assert resolve("s3://a/x.p").path.parent == ROOT / "data" / "downloads" / "embeddings"
    monkeypatch.setenv("TOPK_CACHE", str(tmp_path / "variable"))
    assert resolve("s3://a/x.p").path.parent == tmp_path / "variable"


@given(st.integers(1, 10**11), st.sampled_from([5, 8, 15, 16, 64]))
def test_part_sizes_of_an_etag_include_the_true_one(size, mib):
    count = -(-size // (mib * MIB))
    found = etag_part_sizes(size, count)
    assert all(-(-size // part) == count for part in found)
    assert (mib * MIB if count > 1 else size) in found


WRONG = {
    **dict.fromkeys(
        ("gs://b/k", "ftp://h/f", "https://", "s3://", "http://[::1/x", "s3://[x/y", "http://a b/x.pt"),
        "a source is s3://",
    ),
    "wsl-32x48-320": "did you mean 'wsl-32x48d-320'",
    next(iter(PUBLISHED.values())): "give the short name",
    "no/such/file": "check the path",
    "s3://bucket": "without a key",
}


@pytest.mark.parametrize(("source", "message"), WRONG.items())
def test_a_wrong_source_is_a_sentence(tmp_path, source, message):
    with pytest.raises(ObjectStoreError, match=message):
        fetch(resolve(source, tmp_path))


@pytest.mark.parametrize("endpoint", ["localhost:9000", "http://[::1", "http://a b", "http://host:port", "garbage"])
def test_a_wrong_endpoint_is_a_sentence(monkeypatch, endpoint):
    with pytest.raises(ObjectStoreError, match=r"endpoint_url .* is http.* got"):
        resolve("s3://bucket/key", endpoint_url=endpoint)
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    with pytest.raises(ObjectStoreError, match="AWS_ENDPOINT_URL"):
        resolve("s3://bucket/key")


ENVIRONMENT = {
    "AWS_METADATA_SERVICE_TIMEOUT": "abc",
    "AWS_EC2_METADATA_SERVICE_ENDPOINT": "http://[bad",
    "AWS_PROFILE": "nobody",
}


@pytest.mark.parametrize(("name", "value"), ENVIRONMENT.items())
def test_a_wrong_environment_is_a_sentence(tmp_path, monkeypatch, name, value):
    monkeypatch.delenv("AWS_EC2_METADATA_DISABLED")
    monkeypatch.setenv(name, value)
    with pytest.raises(ObjectStoreError, match=r"the variables AWS_.*AWS_PROFILE"):
        fetch(resolve("s3://bucket/key", tmp_path))


# Downloads


def test_fetch_brings_the_file_once(server, get, capsys, monkeypatch):
    monkeypatch.setattr(type(sys.stderr), "isatty", lambda _: True)  # the bar is for terminals
    path = get()
    drawn = capsys.readouterr().err
    assert all(words in drawn for words in ("file-", "B/s", "100%", "984k/984k"))
    assert path.read_bytes() == CONTENT
    assert sorted(server.part_spans) == [(i * PART, min((i + 1) * PART, len(CONTENT))) for i in range(PARTS)]
    assert server.sent == len(CONTENT) + 1  # and the probe's byte
    assert not partial(path, ".part").exists()
    requests = len(server.spans)
    assert get() == path
    assert len(server.spans) == requests
    server.content = CONTENT[: PART + 1]
    assert get("other").read_bytes() == CONTENT[: PART + 1]


@pytest.mark.parametrize("fault", ["503", "truncate", "reset"])
def test_passing_failures_are_retried_from_where_they_were(server, get, fault):
    server.faults.extend([fault, None, fault, fault, None, fault])
    server.probe_faults.extend(["503", "503"])
    assert get().read_bytes() == CONTENT
    # Only what lay between the last chunk read and the break may come twice.
    assert server.sent <= len(CONTENT) + 4 * PART + 3


def test_a_stalled_connection_is_given_up_and_the_rest_fetched(server, get, monkeypatch):
    server.faults.extend(["stall", None, "stall"])
    monkeypatch.setattr(object_store, "TIMEOUT", 1.0)
    monkeypatch.setattr(object_store, "RETRIES", 50)
    assert get().read_bytes() == CONTENT


def test_retries_end_with_a_sentence_and_keep_the_parts(server, get, tmp_path, monkeypatch):
    server.faults.extend([None] * 5 + ["503"] * 1000)
    monkeypatch.setattr(object_store, "CONNECTIONS", 1)
    with pytest.raises(ObjectStoreError, match=r"503.*7 failures in a row.*finished parts are kept.*by hand"):
        get()
    assert_nothing_cached(tmp_path / "cache")
    server.faults.clear()
    server.spans.clear()
    assert get().read_bytes() == CONTENT
    assert len(server.part_spans) == PARTS - 5


def test_a_line_that_breaks_in_every_part_still_brings_the_file(server, get, monkeypatch):
    """More failures than retries, each after some progress."""
    server.faults.extend(["truncate"] * 12)
    monkeypatch.setattr(object_store, "PART_BYTES", 16 * MIB)
    monkeypatch.setattr(object_store, "RETRIES", 2)
    server.content = random.Random(2).randbytes(3 * MIB)
    path = get()
    assert path.read_bytes() == server.content
    starts = [start for start, _ in server.part_spans]
    assert starts == sorted(starts)
    assert len(starts) > 3


@pytest.mark.parametrize("without", ["ranges", "etag"])
def test_a_server_without_ranges_or_versions_is_read_in_one_stream(server, get, tmp_path, without):
    setattr(server, without, None)
    server.faults.extend(["truncate", "reset", "503"])
    assert get().read_bytes() == CONTENT
    assert server.spans == [PROBE, None, None, None, None]
    server.faults.extend(["page"])
    with pytest.raises(ObjectStoreError, match="something else than was asked for"):
        get("wrong")
    for length in (len(CONTENT) + 7, len(CONTENT) - 7, "abc", "", "1e3"):  # lies, or no numbers
        server.length_header = length
        with pytest.raises(ObjectStoreError):
            get("wrong", sha256=SHA256)
    assert_nothing_cached(tmp_path / "wrong")


def test_a_server_that_tells_no_length_needs_a_checksum(server, get):
    server.ranges, server.framed = False, False
    with pytest.raises(ObjectStoreError, match="tells no length"):
        get()
    server.faults.append("truncate")
    with pytest.raises(ObjectStoreError, match="SHA-256"):
        get(sha256=SHA256)
    assert get(sha256=SHA256).read_bytes() == CONTENT


DATES = ("Wed, 21 Oct 2015 07:28:00 GMT", "Thu, 22 Oct 2015 07:28:00 GMT")


@pytest.mark.parametrize("if_match", [True, False])
@pytest.mark.parametrize("versions", [('"1"', '"2"'), ('W/"1"', 'W/"2"'), DATES], ids=["strong", "weak", "date"])
def test_of_a_file_that_changes_under_way_no_old_part_is_kept(server, get, tmp_path, if_match, versions):
    server.if_match, server.etag, header = if_match, None, "last_modified" if versions is DATES else "etag"
    setattr(server, header, versions[0])

    def change(number):
        if number == 5:
            server.content = OTHER
            setattr(server, header, versions[1])

    server.on_request = change
    with pytest.raises(ObjectStoreError, match="the file changed there meanwhile"):
        get()
    assert_nothing_cached(tmp_path / "cache")
    assert get().read_bytes() == OTHER


@pytest.mark.parametrize("fault", ["page", "shifted"])
def test_other_bytes_than_those_asked_for_cost_no_part(server, get, tmp_path, fault):
    server.faults.extend([None] * 8 + [fault])
    with pytest.raises(ObjectStoreError, match="something else than was asked for"):
        get()
    path = resolve(server.url, tmp_path / "cache").path
    kept = partial(path, ".part").read_bytes()
    for part in json.loads(partial(path, ".json").read_text())["done"]:
        assert kept[part * PART :][:PART] == CONTENT[part * PART :][:PART]
    server.spans.clear()
    assert get().read_bytes() == CONTENT
    assert len(server.part_spans) < PARTS


@pytest.mark.parametrize("count", [None, 1])
def test_garbage_of_the_right_length_is_not_accepted(server, get, tmp_path, count):
    server.faults.extend([None, None, "garbage"])
    with pytest.raises(ObjectStoreError, match=r"SHA-256.*by hand"):
        get(sha256=SHA256)
    server.headers, digest = {"x-amz-request-id": "1"}, hashlib.md5(CONTENT)
    etag = f"{hashlib.md5(digest.digest()).hexdigest()}-1" if count else digest.hexdigest()
    server.etag = f'"{etag}"'
    server.faults.extend([None, None, "garbage"])
    with pytest.raises(ObjectStoreError, match="another MD5 sum than the server's ETag"):
        get()
    assert_nothing_cached(tmp_path / "cache")
    assert checksum_of(get()) == f"etag {etag}"


REFUSALS = {
    **dict.fromkeys(
        ("203", "204", "205", "299", "300", "304", "404", "416"), "the server answered .*Check bucket, key"
    ),
    "403": "403.*Check the credentials",
    "400": "400 .Wrong: expecting 'eu-west-1'.*AWS_DEFAULT_REGION",
}


@pytest.mark.parametrize(("status", "message"), REFUSALS.items())
def test_other_answers_than_the_file_are_refused(server, get, tmp_path, status, message):
    server.error = (
        b"" if status in ("204", "304") else b"<Error><Code>Wrong</Code><Message>expecting 'eu-west-1'</Message>"
    )
    server.probe_faults.append(status)
    with pytest.raises(ObjectStoreError, match=f"{message}.*To place the file by hand") as caught:
        get()
    assert server.url in str(caught.value)
    assert len(server.spans) == 1  # no use in a second try
    assert_nothing_cached(tmp_path / "cache")


def test_no_server_no_address_no_plain_file(server, get, tmp_path, bucket):
    server.content, server.headers = gzip.compress(CONTENT), {"Content-Encoding": "gzip"}
    with pytest.raises(ObjectStoreError, match="sends the file encoded as gzip"):
        get()
    server.headers = {"Location": "http://[::1"}
    server.probe_faults.extend(["302"] * 10)
    with pytest.raises(ObjectStoreError, match="failures in a row"):
        get()
    server.close()
    for source in (server.url, "s3://store/x"):
        with pytest.raises(ObjectStoreError, match=r"4 failures in a row.*Check the network") as caught:
            fetch(resolve(source, tmp_path / "cache", endpoint_url=server.endpoint))
        assert "X-Amz" not in str(caught.value)  # no signature is shown
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ObjectStoreError, match="choose another folder by cache_dir"):
        get("file/cache")


WRONG_SIDECARS = [{"size": 12}, {"version": 3}, {"done": "abc"}, {"done": None}, {"done": [99]}, {"done": [0.0]}]


@pytest.mark.parametrize("damage", [*WRONG_SIDECARS, "[]", '{"size": 12, "do', "\0"], ids=str)
def test_a_damaged_sidecar_starts_again(server, get, tmp_path, damage):
    path = resolve(server.url, tmp_path / "cache").path
    partial(path, ".part").parent.mkdir(parents=True)
    partial(path, ".part").write_bytes(bytes(len(CONTENT)))
    whole = {"size": len(CONTENT), "version": server.etag, "part_bytes": PART, "done": [0]}
    partial(path, ".json").write_text(damage if isinstance(damage, str) else json.dumps({**whole, **damage}))
    assert get().read_bytes() == CONTENT


@pytest.mark.parametrize("seed", range(4))
def test_whatever_goes_wrong_the_file_is_right_or_absent(server, get, tmp_path, seed):
    chance = random.Random(seed)
    server.headers = {"x-amz-request-id": "1"}
    server.etag = f'"{hashlib.md5(CONTENT).hexdigest()}"'
    kinds = [None, "503", "truncate", "reset", "shifted", "garbage", "403"]
    weights = [20, 4, 4, 4, 1, 1, 1]
    for _ in range(3):
        server.faults = deque(chance.choices(kinds, weights, k=30))
        try:
            assert get().read_bytes() == CONTENT
        except ObjectStoreError:
            assert_nothing_cached(tmp_path / "cache")
    server.faults.clear()
    with contextlib.suppress(ObjectStoreError):  # garbage in a part that was kept costs all of them
        get()
    assert get().read_bytes() == CONTENT


# What is found in the cache


def test_a_file_that_is_there_is_checked_and_used(server, get, tmp_path):
    path = resolve(server.url, tmp_path / "cache").path
    path.parent.mkdir()
    path.write_bytes(CONTENT)  # by hand
    assert get() == get(sha256=SHA256.upper()) == fetch(resolve(path), SHA256) == fetch(resolve(str(path))) == path
    for source in (server.url, path):
        with pytest.raises(ObjectStoreError, match=f"{SHA256} instead of {'0' * 64}.*must be deleted before"):
            fetch(resolve(source, tmp_path / "cache"), "0" * 64)
    with pytest.raises(ObjectStoreError, match="sha256 is 64 hexadecimal digits, got 'abc'"):
        get(sha256="abc")
    with pytest.raises(ObjectStoreError, match="is a folder"):
        fetch(resolve(tmp_path), "0" * 64)
    assert server.spans == []


def test_a_sum_is_taken_again_only_after_the_file_was_touched(get):
    path = get(sha256=SHA256)
    came = path.stat()
    path.write_bytes(OTHER)
    os.utime(path, ns=(came.st_atime_ns, came.st_mtime_ns))  # as if nobody had been here
    assert get(sha256=SHA256) == path
    os.utime(path, (1, 1))
    with pytest.raises(ObjectStoreError, match="SHA-256"):
        get(sha256=SHA256)


def test_a_disk_too_small_is_found_before_the_download(server, get, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(ObjectStoreError, match=r"0\.00 GB are still to come.*TOPK_CACHE"):
        get()
    assert server.spans == [PROBE]
    assert not list(tmp_path.rglob("*.part"))


def test_a_disk_that_fills_up_keeps_the_parts(server, get, monkeypatch, disk_that_fills_up):
    monkeypatch.setattr(object_store, "CONNECTIONS", 1)
    told = r"No space left.*TOPK_CACHE.*finished parts are kept"
    with pytest.raises(ObjectStoreError, match=told), disk_that_fills_up():
        get()
    server.spans.clear()
    assert get().read_bytes() == CONTENT
    assert 0 < len(server.part_spans) < PARTS


# Several processes, and their sudden end

PROGRAM = """
import json, resource, sys
from data import program
program.begin()
from data.transfers import object_store
for name, value in json.loads(sys.argv[3]).items():
    setattr(object_store, name, value)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
def main():
    path = object_store.fetch(object_store.resolve(sys.argv[1], sys.argv[2]))
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024, path)
    return 0
program.end(program.finish(main, "kept"))
"""


def start(server, cache, **settings):
    settings = json.dumps({**QUICK, "CONNECTIONS": 2, "TIMEOUT": 600, **settings})
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, server.url, str(cache), settings],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("sent", ["SIGKILL", "SIGINT"])
def test_a_killed_download_goes_on_from_its_parts(server, get, tmp_path, sent):
    """Stopped at once, while the server says nothing for longer than any test lasts."""
    server.gate_from = 7
    path = resolve(server.url, tmp_path / "cache").path
    sidecar = partial(path, ".json")
    process = start(server, tmp_path / "cache")
    wait_for(
        lambda: sidecar.is_file() and len(json.loads(sidecar.read_text())["done"]) == 7,
        lambda: process.poll() is None,
        process.stderr.read,
    )
    process.send_signal(getattr(signal, sent))
    _, error = process.communicate(timeout=120)
    assert (process.returncode, error) == ((130, "\nstopped: kept\n") if sent == "SIGINT" else (-9, ""))
    assert_nothing_cached(tmp_path / "cache")
    done = json.loads(sidecar.read_text())["done"]
    assert len(done) == 7
    server.gate.set()
    server.spans.clear()
    assert get() == path
    assert path.read_bytes() == CONTENT
    assert sorted(start // PART for start, _ in server.part_spans) == sorted(set(range(PARTS)) - set(done))


def test_two_processes_download_once(server, tmp_path):
    server.gate_from = 0
    first = start(server, tmp_path)
    wait_for(lambda: server.part_spans, lambda: first.poll() is None, first.stderr.read)
    second = start(server, tmp_path)
    assert "another process is fetching" in second.stderr.readline()
    server.gate.set()
    outputs = [process.communicate(timeout=120)[0].split()[-1] for process in (first, second)]
    assert outputs[0] == outputs[1]
    assert Path(outputs[0]).read_bytes() == CONTENT
    assert len(server.spans) == PARTS + 1


def test_memory_does_not_grow_with_the_file(server, tmp_path):
    server.content = bytes(200 * MIB)
    process = start(server, tmp_path, CONNECTIONS=8, PART_BYTES=16 * MIB)
    output, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    assert int(output.split()[0]) < 100
    assert resolve(server.url, tmp_path).path.stat().st_size == 200 * MIB


# A real S3 server


@pytest.fixture
def options(moto, tmp_path):
    return {"cache_dir": tmp_path / "cache", "endpoint_url": moto}


def test_s3_objects_of_any_name_come_verified(bucket, options):
    bucket.put_object(Bucket="store", Key="a b/é#?.p", Body=CONTENT)
    path = fetch(resolve("s3://store/a b/é#?.p", **options))
    assert path.read_bytes() == CONTENT
    assert checksum_of(path) == f"etag {hashlib.md5(CONTENT).hexdigest()}"


def test_s3_multipart_etag_is_verified(bucket, options):
    content = random.Random(3).randbytes(6 * MIB)
    started = bucket.create_multipart_upload(Bucket="store", Key="big")
    place = {"Bucket": "store", "Key": "big", "UploadId": started["UploadId"]}
    pieces = (content[: 5 * MIB], content[5 * MIB :])
    parts = [
        {"PartNumber": i, "ETag": bucket.upload_part(**place, PartNumber=i, Body=piece)["ETag"]}
        for i, piece in enumerate(pieces, start=1)
    ]
    etag = bucket.complete_multipart_upload(**place, MultipartUpload={"Parts": parts})["ETag"]
    assert etag.endswith('-2"')
    path = fetch(resolve("s3://store/big", **options))
    assert path.read_bytes() == content
    assert checksum_of(path) == f"etag {etag[1:-1]}"


def test_s3_refusals_with_and_without_credentials(bucket, options, monkeypatch):
    bucket.put_object(Bucket="store", Key="public", Body=CONTENT, ACL="public-read")
    bucket.put_object(Bucket="store", Key="private", Body=CONTENT)
    for address, message in (("store/nothing", r"NoSuchKey.*Check bucket.*by hand"), ("nothing/x", "NoSuchBucket")):
        with pytest.raises(ObjectStoreError, match=message):
            fetch(resolve(f"s3://{address}", **options))
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    assert fetch(resolve("s3://store/public", **options)).read_bytes() == CONTENT
    with pytest.raises(ObjectStoreError, match=r"403.*AWS_PROFILE"):
        fetch(resolve("s3://store/private", **options))


def test_uploads(bucket, options, tmp_path, monkeypatch):
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in ("a.json", "b.bin", ".hidden"):
        (folder / name).write_bytes(b"x")
    up = {"endpoint_url": options["endpoint_url"]}
    with pytest.raises(ObjectStoreError, match=r"NoSuchBucket.*Check bucket"):
        upload(folder, "s3://nothing/x", **up)
    upload(folder, "s3://store/x", **up)
    assert [each["Key"] for each in bucket.list_objects_v2(Bucket="store")["Contents"]] == ["x/a.json", "x/b.bin"]
    with monkeypatch.context() as patch:
        patch.delenv("AWS_ACCESS_KEY_ID")
        patch.delenv("AWS_SECRET_ACCESS_KEY")
        with pytest.raises(ObjectStoreError, match="credentials"):
            upload(folder, "s3://store/x", **up)
    sent = []
    client = SimpleNamespace(upload_file=lambda file, *_, **__: sent.append(Path(file).name))
    monkeypatch.setattr(object_store, "_client", lambda *_, **__: client)
    upload(folder, "s3://store/x", **up)
    assert sent == ["b.bin", "a.json"]  # which speaks of the other
