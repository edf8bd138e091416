"""The files that lead into etcd are looked at before anything starts."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from dlaunch.errors import ConfigurationError
from dlaunch.launcher.preflight import check_rendezvous_files
from dlaunch.spec import RendezvousSpec

PEM = "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n"


@pytest.fixture
def pem(tmp_path: Path) -> Path:
    path = tmp_path / "good.pem"
    path.write_text("subject=etcd\n" + PEM)
    return path


@pytest.mark.parametrize(("flag", "field"), [("ca", "ca_file"), ("cert", "cert_file"), ("key", "key_file")])
@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ("nowhere", "no such file or directory"),
        (".", "it is not a regular file"),
        ("pipe", "it is not a regular file"),
        ("good.pem/x", "not a directory"),
        ("text", "it is not PEM"),
        ("a\0b", "a bad name"),
    ],
)
def test_a_file_of_tls_that_cannot_be_used_is_taken(
    tmp_path: Path, pem: Path, flag: str, field: str, bad: str, reason: str
) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "text").write_text("no certificate")
    files = {"ca_file": pem, "cert_file": pem, "key_file": pem, field: tmp_path / bad}
    spec = dataclasses.replace(RendezvousSpec(2, 2, ("e1:2379",)), **files)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError) as refusal:
        check_rendezvous_files(spec)
    sentence = refusal.value.sentence
    assert sentence.startswith(f"--rdzv-{flag} ")
    assert sentence.endswith(f" cannot be used: {reason}.")


def test_a_good_file_is_refused(tmp_path: Path, pem: Path) -> None:
    password = tmp_path / "password"
    password.write_text("hunter2\n")
    password.chmod(0o600)
    check_rendezvous_files(RendezvousSpec(2, 2, ("e1:2379",)))
    check_rendezvous_files(
        RendezvousSpec(
            2,
            2,
            ("no-such-host.invalid:2379",),
            ca_file=pem,
            cert_file=pem,
            key_file=pem,
            user="root",
            password_file=password,
        )
    )


def test_a_password_file_that_others_can_read_is_taken(tmp_path: Path) -> None:
    password = tmp_path / "password"
    password.write_text("hunter2\n")
    password.chmod(0o644)
    with pytest.raises(ConfigurationError, match="chmod"):
        check_rendezvous_files(RendezvousSpec(2, 2, ("e1:2379",), user="root", password_file=password))
