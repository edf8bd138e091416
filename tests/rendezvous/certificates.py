"""Certificates for tests, made with the openssl program."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.etcd_cluster import TlsFiles

_EC = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def make_certificates(directory: Path) -> TlsFiles:
    """A CA, a server certificate for 127.0.0.1 and localhost, and a client certificate for the user ``agent``."""
    directory.mkdir(parents=True, exist_ok=True)
    _openssl(
        directory, "req", "-x509", *_EC, "-days", "2", "-subj", "/CN=test CA", "-keyout", "ca.key", "-out", "ca.pem"
    )
    _signed(directory, "server", "/CN=etcd", "subjectAltName=IP:127.0.0.1,DNS:localhost")
    _signed(directory, "client", "/CN=agent", "extendedKeyUsage=clientAuth")
    return TlsFiles(*(directory / name for name in ("ca.pem", "server.pem", "server.key", "client.pem", "client.key")))


def _signed(directory: Path, name: str, subject: str, extension: str) -> None:
    _openssl(directory, "req", *_EC, "-subj", subject, "-keyout", f"{name}.key", "-out", f"{name}.csr")
    (directory / f"{name}.ext").write_text(extension + "\n")
    signing = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", f"{name}.ext")
    _openssl(directory, "x509", "-req", "-in", f"{name}.csr", *signing, "-out", f"{name}.pem")


def _openssl(directory: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=directory, check=True, capture_output=True, timeout=30)
