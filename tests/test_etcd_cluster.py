"""The etcd members that tests start leave nothing behind."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

from .etcd_cluster import PATIENCE_S, EtcdCluster
from .rendezvous.conftest import needs_etcd

pytestmark = needs_etcd


def test_members_die_with_the_process_that_started_them(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from tests.etcd_cluster import EtcdCluster\n"
        "cluster = EtcdCluster(directory=Path(sys.argv[1]))\n"
        "cluster.start()\n"
        "print(cluster.pid(0), flush=True)\n"
        "sys.stdin.read()\n"
    )
    root = Path(__file__).parent.parent
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as starter:
        assert starter.stdout
        pid = int(starter.stdout.readline())
        member = os.pidfd_open(pid)
        starter.send_signal(signal.SIGKILL)
    try:
        assert select.select([member], [], [], PATIENCE_S)[0], "etcd lives on"  # readable once it has ended
    finally:
        os.close(member)


def test_a_cluster_removes_its_files() -> None:
    with EtcdCluster() as cluster:
        directory = cluster.directory
        assert cluster.log(0).exists()
        assert cluster.leader() == 0
        assert cluster.metrics(0)["etcd_server_has_leader"] == 1
    assert not directory.exists()
