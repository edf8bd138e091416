"""What torchrun's keys of ``--rdzv-conf`` mean: a table over a pure function."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dlaunch.errors import UsageError
from dlaunch.launcher.rdzv_conf import KEYS, Conf, read_conf
from dlaunch.launcher.settings import Setting

PATHS = {"ca_cert", "cacert", "ssl_cert", "cert", "ssl_cert_key", "key"}  # any text may be one
NOTHING = Conf(None, None, None, None, None, None, None, None, None)


def read(text: str) -> Conf:
    return read_conf(Setting(text, "--rdzv-conf"))


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        ("join_timeout=60", "timeout_s", 60.0),
        ("timeout=90", "timeout_s", 90.0),
        ("timeout=90,join_timeout=60", "timeout_s", 60.0),
        ("last_call_timeout=30", "settle_s", 30.0),
        ("last_call_timeout=0", "settle_s", 0.0),
        ("keep_alive_interval=4", "lease_ttl_s", 12.0),
        ("keep_alive_max_attempt=5", "lease_ttl_s", 25.0),
        ("keep_alive_interval=1,keep_alive_max_attempt=1", "lease_ttl_s", 2.0),
        ("is_host=true", "is_host", True),
        ("is_host=0", "is_host", False),
        ("protocol=https", "https", True),
        ("protocol=http", "https", False),
        ("ca_cert=a.pem", "ca_file", Path("a.pem")),
        ("cacert=a.pem", "ca_file", Path("a.pem")),
        ("ssl_cert=a.pem", "cert_file", Path("a.pem")),
        ("cert=a.pem", "cert_file", Path("a.pem")),
        ("ssl_cert_key=a.pem", "key_file", Path("a.pem")),
        ("key=a.pem", "key_file", Path("a.pem")),
        ("etcd_prefix=team/a/", "key_prefix", "/team/a"),
    ],
)
def test_a_key_means_something_else(text: str, field: str, value: Any) -> None:
    assert read(text) == NOTHING._replace(**{field: value})


@pytest.mark.parametrize(
    "text", ["", "close_timeout=30", "heartbeat_timeout=5", "read_timeout=60", "store_type=tcp", "store_type=TCP"]
)
def test_a_key_without_effect_has_one(text: str) -> None:
    assert read(text) == NOTHING


@pytest.mark.parametrize("key", sorted({*KEYS} - PATHS))
def test_a_value_that_makes_no_sense_is_taken(key: str) -> None:
    with pytest.raises(UsageError) as refusal:
        read(f"{key}=//")
    assert refusal.value.sentence == f"--rdzv-conf {key} is '//'."


@pytest.mark.parametrize(
    "text",
    ["join_timeout=0", "timeout=-1", "last_call_timeout=-1", "keep_alive_max_attempt=0", "read_timeout=0"],
)
def test_a_time_that_torchrun_refuses_is_taken(text: str) -> None:
    with pytest.raises(UsageError, match=f"--rdzv-conf {text.partition('=')[0]} is"):
        read(text)


def test_a_store_of_files_is_ignored() -> None:
    with pytest.raises(UsageError, match="over the network only"):
        read("store_type=file")


@pytest.mark.parametrize(
    ("key", "fix"), [("join_timeot", "Did you mean join_timeout?"), ("zzz", f"Give one of {', '.join(KEYS)}.")]
)
def test_a_slip_in_a_key_is_ignored(key: str, fix: str) -> None:
    with pytest.raises(UsageError) as refusal:
        read(f"{key}=secret")
    assert str(refusal.value) == f"--rdzv-conf has no key {key!r}. {fix}"
