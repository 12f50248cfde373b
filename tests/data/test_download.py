"""data/download.py: the file that the server has comes whole, through faults and kills, or a sentence says why not."""

import functools
import hashlib
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import requests

from data import download as module
from data.download import download, main, s3_server
from data.published import PUBLISHED_FILES, published_info
from tests.processes import wait_for

PART = 10_000
hooks = []  # called with each audit event; a hook itself stays for as long as the process


def _call_hooks(event, arguments):
    for hook in hooks:
        hook(event, arguments)


sys.addaudithook(_call_hooks)


@pytest.fixture(autouse=True)
def _small_parts_and_short_waits(monkeypatch, own_network):
    monkeypatch.setattr(module, "PART_BYTES", PART)
    monkeypatch.setattr(module, "TIMEOUT", 1)
    monkeypatch.setattr(time, "sleep", functools.partial(lambda sleep, seconds: sleep(seconds / 100), time.sleep))


@pytest.fixture
def body():
    return random.Random(0).randbytes(8 * PART + 17)


@pytest.fixture
def source(server, body):
    server.content = body
    return server


def left(cache: Path) -> set[str]:
    return {path.suffix for path in cache.iterdir()} - {".lock"}


def test_a_file_comes_once_and_is_then_used_without_the_network(source, body, tmp_path):
    path = download(source.url, tmp_path)
    assert path.read_bytes() == body
    assert path.name.endswith("-file.bin")
    asked = len(source.spans)
    source.close()
    assert download(source.url, tmp_path) == path
    assert len(source.spans) == asked
    assert left(tmp_path) == {".bin"}


FAULTS = ["503", "429", "500", "408", "truncate", "stall", "reset"]


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_that_pass_are_tried_again(source, body, tmp_path, fault):
    source.faults.extend([fault] * 5)
    source.probe_faults.extend([fault] * 2)
    assert download(source.url, tmp_path).read_bytes() == body


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.faults.extend(["404"] * 9), "the server answered 404"),
        (lambda s: s.faults.extend(["503"] * 99), "the server answered 503.*Finished parts are kept"),
        (lambda s: s.faults.append("page"), "Download it by other means"),
        (lambda s: s.faults.append("shifted"), "Download it by other means|changed"),
        (lambda s: setattr(s, "ranges", False), "sends no ranges"),
        (lambda s: setattr(s, "etag", None), "sends no ranges of a file with a version"),
        (lambda s: s.headers.update({"Content-Type": "text/html; charset=utf-8"}), "text/html"),
    ],
)
def test_what_is_no_file_does_not_stay(source, tmp_path, change, message):
    change(source)
    with pytest.raises((ValueError, OSError), match=message):
        download(source.url, tmp_path)
    assert ".bin" not in left(tmp_path)


@pytest.mark.parametrize("by", ["etag", "weak etag", "date", "etag in S3"])
def test_parts_of_another_version_are_never_mixed(source, body, tmp_path, monkeypatch, by):
    monkeypatch.setenv("AWS_ENDPOINT_URL", source.endpoint)
    address = "s3://store/own.bin" if by == "etag in S3" else source.url
    if by == "date":
        source.etag = None
        source.last_modified = "Mon, 01 Jan 2024 00:00:00 GMT"
    if by == "weak etag":
        source.etag = 'W/"1"'
    other = random.Random(1).randbytes(len(body))

    def replace_file(number):
        if number == 3:
            source.content = other
            source.etag = {"weak etag": 'W/"2"', "date": None}.get(by, '"2"')
            source.last_modified = "Mon, 01 Jan 2023 00:00:00 GMT" if by == "date" else None  # older than before

    source.on_request = replace_file
    with pytest.raises((ValueError, OSError), match="has changed on the server"):
        download(address, tmp_path)
    assert download(address, tmp_path).read_bytes() == other


def test_finished_parts_are_not_asked_for_again(source, body, tmp_path):
    source.faults.extend([None] * 4 + ["404"] * 99)
    with pytest.raises((ValueError, OSError)):
        download(source.url, tmp_path)
    source.faults.clear()
    before = {span for span in source.part_spans[:4]}
    source.spans.clear()
    assert download(source.url, tmp_path).read_bytes() == body
    assert not before & set(source.part_spans)


def test_a_sha256_decides_wherever_the_file_comes_from(source, body, tmp_path):
    right = hashlib.sha256(body).hexdigest()
    wrong = "0" * 64
    path = download(source.url, tmp_path, right.upper())
    for place in (source.url, str(path)):
        assert download(place, tmp_path, right) == path
        with pytest.raises((ValueError, OSError), match=f"has the SHA-256 {right}, not {wrong}"):
            download(place, tmp_path, wrong)


def test_messages_show_neither_passwords_nor_signatures(tmp_path):
    for address in (
        "http://user:secret@127.0.0.1:9/file.bin",
        "http://127.0.0.1:9/file.bin?X-Amz-Signature=secret&X-Amz-Credential=secret",
    ):
        with pytest.raises((ValueError, OSError)) as error:
            download(address, tmp_path)
        assert "secret" not in str(error.value)
        assert "127.0.0.1:9/file.bin" in str(error.value)


def test_a_part_is_noted_when_it_is_written(source, body, tmp_path):
    """At every file that is opened the noted parts are in their places: a process killed there leaves no hole."""
    wrong = []
    checking = threading.local()

    def check(event, arguments):
        if event != "open" or getattr(checking, "now", False) or not str(arguments[0]).startswith(str(tmp_path)):
            return
        checking.now = True
        for notes in tmp_path.glob("*.parts"):
            noted = [int(line) for line in notes.read_text().splitlines()[1:]]  # before the bytes, which come first
            partial = notes.with_suffix(".part")
            content = partial.read_bytes() if noted else b""
            wrong.extend(n for n in noted if content[n * PART : (n + 1) * PART] != body[n * PART : (n + 1) * PART])
        seen.append(arguments[0])
        checking.now = False

    seen = []
    hooks.append(check)
    try:
        assert download(source.url, tmp_path).read_bytes() == body
    finally:
        hooks.remove(check)
    assert len(seen) > 2 * len(body) // PART
    assert wrong == []


def start(source, cache: Path) -> subprocess.Popen:
    """The download as a program."""
    program = f"import data.download as d; d.PART_BYTES = {PART}; d.main({[source.url, '--cache_dir', str(cache)]})"
    return subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.DEVNULL)


def test_two_processes_download_once(source, body, tmp_path):
    source.gate_from = 2
    both = [start(source, tmp_path) for _ in range(2)]
    wait_for(lambda: len(source.part_spans) > 2)
    source.gate.set()
    assert [process.wait(60) for process in both] == [0, 0]
    (path,) = (path for path in tmp_path.iterdir() if path.suffix == ".bin")
    assert path.read_bytes() == body
    assert len(source.part_spans) == len(set(source.part_spans))


def test_killed_it_continues(source, tmp_path):
    source.content = random.Random(2).randbytes(40 * PART)
    for number in (3, 11, 19):
        source.spans.clear()
        source.gate_from = number
        process = start(source, tmp_path)
        wait_for(lambda number=number: len(source.part_spans) > number)
        process.kill()
        process.wait()
    source.gate.set()
    assert download(source.url, tmp_path).read_bytes() == source.content
    assert left(tmp_path) == {".bin"}


def test_a_local_path_is_returned_and_an_unknown_name_lists_the_published(tmp_path):
    (tmp_path / "own.pt").touch()
    assert download(str(tmp_path / "own.pt")) == tmp_path / "own.pt"
    with pytest.raises((ValueError, OSError), match="Published are wsl-32x48d-320"):
        download("wsl-32x48d-32")


# README of the official package difftopk 0.2.0: the files' addresses; their names say network and pixels.
STORE = "https://nyc3.digitaloceanspaces.com/publicdata1/"
OF_1K = "ImageNet_embeddings_labels_train_test"
PUBLISHED = {  # short name -> address, network, pixels, GB
    "wsl-32x48d-320": (f"{STORE}{OF_1K}_IGAM_Resnext101_32x48d_320.p", "resnext101_32x48d_wsl", 320, 11),
    "wsl-32x32d-320": (f"{STORE}{OF_1K}_IGAM_Resnext101_32x32d_320.p", "resnext101_32x32d_wsl", 320, 11),
    "wsl-32x16d-320": (f"{STORE}{OF_1K}_IGAM_Resnext101_32x16d_320.p", "resnext101_32x16d_wsl", 320, 11),
    "wsl-32x8d-320": (f"{STORE}{OF_1K}_IGAM_Resnext101_32x8d_320.p", "resnext101_32x8d_wsl", 320, 11),
    "efficientnet-l2-800": (
        f"{STORE}{OF_1K}_tf_efficientnet_l2_ns_timm_transform_800_float16.p", "tf_efficientnet_l2_ns", 800, 14,
    ),
    "wsl-32x48d-224-21k": (
        f"{STORE}ImageNet21K-P_embeddings_labels_train_test_IGAM_Resnext101_32x48d_224_float16.p",
        "resnext101_32x48d_wsl", 224, 50,
    ),
}  # fmt: skip


def test_every_published_file_is_known():
    assert PUBLISHED_FILES.keys() == PUBLISHED.keys()


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_file_is_what_its_source_says(name, monkeypatch, tmp_path, capsys):
    address, backbone, pixels, gigabytes = PUBLISHED[name]
    for source in (name, f"/somewhere/{address.rpartition('/')[2]}"):
        assert published_info(source) == {"backbone": backbone, "resolution": pixels}
    main(["--list"])
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.split()[0] == name)
    assert line.split()[1:] == [str(gigabytes), "GB", backbone, "at", str(pixels), "pixels"]
    asked = []

    def refuse(url, **options):
        asked.append(url)
        raise requests.ConnectionError(url)

    monkeypatch.setattr(requests, "get", refuse)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    with pytest.raises(OSError, match="ConnectionError"):
        download(name, tmp_path)
    assert set(asked) == {address}


def test_of_another_file_nothing_is_known():
    assert published_info("own.pt") == {}


# S3


def test_an_object_comes_with_the_user_s_credentials(bucket, body, tmp_path):
    bucket.put_object(Bucket="store", Key="some folder/own.pt", Body=body)
    path = download("s3://store/some folder/own.pt", tmp_path)
    assert path.read_bytes() == body
    assert path.name.endswith("-own.pt")


@pytest.mark.parametrize(
    ("address", "code"), [("s3://store/absent.pt", "NoSuchKey"), ("s3://nowhere/a", "NoSuchBucket")]
)
def test_a_refusal_names_reason_region_and_what_to_set(bucket, tmp_path, address, code):
    with pytest.raises((ValueError, OSError), match=rf"{address}: .*{code}.*region us-east-1.*AWS_PROFILE") as error:
        download(address, tmp_path)
    assert "--requester_pays" in str(error.value)
    assert left(tmp_path) == set()


@pytest.mark.parametrize("kind", ["https", "s3"])
def test_no_login_of_netrc_goes_beside_a_signature_and_who_pays_is_told(source, tmp_path, monkeypatch, kind):
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password secret\n")
    names = ("NETRC", "AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    for name, value in zip(names, (str(tmp_path / "netrc"), source.endpoint, "user", "secret")):
        monkeypatch.setenv(name, value)
    address = "s3://store/own.pt" if kind == "s3" else f"{source.url}?X-Amz-Signature=abc"
    assert download(address, tmp_path, requester_pays=True).read_bytes() == source.content
    assert {headers.get("x-amz-request-payer") for headers in source.seen} == {"requester" if kind == "s3" else None}
    assert not any(headers.get("authorization", "").startswith("Basic") for headers in source.seen)


def test_an_expired_token_is_named(source, tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", source.endpoint)
    source.probe_faults.extend(["400"] * 9)
    source.error = b"<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"
    with pytest.raises(
        (ValueError, OSError), match=r"ExpiredToken: The provided token has expired.*no credentials were found"
    ):
        download("s3://store/own.pt", tmp_path)


def test_the_same_address_on_another_server_is_another_file(bucket, source, body, tmp_path, monkeypatch):
    bucket.put_object(Bucket="store", Key="own.pt", Body=b"first")
    first = download("s3://store/own.pt", tmp_path)
    monkeypatch.setenv("AWS_ENDPOINT_URL", source.endpoint)
    second = download("s3://store/own.pt", tmp_path)
    assert (first.read_bytes(), second.read_bytes()) == (b"first", body)


def test_so_is_that_of_the_server_of_another_profile(bucket, moto, source, body, tmp_path, monkeypatch):
    bucket.put_object(Bucket="store", Key="own.pt", Body=b"first")
    config = f"[profile a]\nendpoint_url = {moto}\n[profile b]\nendpoint_url = {source.endpoint}\n"
    (tmp_path / "config").write_text(config)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    found = []
    for profile in ("a", "b"):
        monkeypatch.setenv("AWS_PROFILE", profile)
        found.append(download("s3://store/own.pt", tmp_path).read_bytes())
    assert found == [b"first", body]


def test_amazons_own_server_has_no_name(own_network, monkeypatch):
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    assert s3_server() == ""
