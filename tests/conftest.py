"""What holds for all tests: Hypothesis under CI, Ctrl-C in the background, threads of several workers, garbage, `docs`.

Hypothesis draws new examples on every run, except under CI, where a run must not depend on luck.
"""

import gc
import os
import signal
from urllib.request import ProxyHandler, Request, build_opener

import pytest
from hypothesis import settings

settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")

# In the background of a script ("scripts/test.sh &") Ctrl-C comes ignored, and so would the programs that tests start.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# With pytest -n, the workers and the programs that they start share the cores. PyTorch reads this when it is imported.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")


# A million objects of imported packages live on, and each full collection would look at all of them.
gc.set_threshold(50_000, 20, 100)


def pytest_collection_finish():
    """Leave out of all collections what the tests have imported."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item):
    """Skip a test with the mark `docs` where one of the packages that it names is absent."""
    for mark in item.iter_markers("docs"):
        for package in mark.args:
            pytest.importorskip(package, reason="scripts/docs.sh installs it and runs this")


@pytest.fixture(scope="session")
def moto_server():
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    yield "http://{}:{}".format(*server.get_host_and_port())
    server.stop()


@pytest.fixture
def moto(moto_server):
    """The address of an S3 server that holds nothing yet."""
    yield moto_server
    build_opener(ProxyHandler({})).open(Request(f"{moto_server}/moto-api/reset", method="POST")).close()
