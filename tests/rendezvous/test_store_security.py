"""TLS with client certificates, and users with passwords, on real etcd."""

from __future__ import annotations

import base64
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dlaunch.errors import ConfigurationError
from dlaunch.rendezvous.etcd import EtcdSettings, EtcdStore
from dlaunch.rendezvous.store import (
    GrantLease,
    KeepAlive,
    LeaseAlive,
    Put,
    Range,
    RangeAnswer,
    StoreError,
    Trouble,
    Txn,
)
from tests.etcd_cluster import EtcdCluster, TlsFiles

from .certificates import make_certificates
from .conftest import needs_etcd
from .owner import Owner, sure

pytestmark = needs_etcd
PASSWORD = "correct horse"
Open = Callable[[EtcdSettings], EtcdStore]


@pytest.fixture
def open_store(owner: Owner) -> Iterator[Open]:
    stores: list[EtcdStore] = []

    def open_one(settings: EtcdSettings) -> EtcdStore:
        stores.append(EtcdStore(settings, owner.deliver))
        return stores[-1]

    yield open_one
    for store in stores:
        store.close()


def refused(owner: Owner, store: EtcdStore, trouble: Trouble) -> str:
    """The sentence of a lasting refusal, which comes long before the time is up."""
    answer, took_s = owner.timed(store, Range("a"), 20.0)
    error = sure(StoreError, answer)
    assert error.trouble is trouble, error.sentence
    assert error.is_lasting
    assert took_s < 5
    assert PASSWORD not in repr(error)
    return error.sentence


# --- TLS -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl program to make certificates with")
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def locked(certificates: TlsFiles) -> Iterator[EtcdCluster]:
    with EtcdCluster(tls=certificates) as cluster:
        yield cluster


def settings_of(cluster: EtcdCluster, files: TlsFiles) -> EtcdSettings:
    return EtcdSettings(cluster.endpoints, str(files.ca), str(files.client_cert), str(files.client_key))


def test_a_client_certificate_lets_us_in(
    locked: EtcdCluster, certificates: TlsFiles, owner: Owner, open_store: Open
) -> None:
    store = open_store(settings_of(locked, certificates))
    heard = owner.watch(store, "k", 1)
    owner.put(store, "k", b"1")
    assert [change.value for change in heard.until(1)] == [b"1"]
    by_name = settings_of(locked, certificates)._replace(
        endpoints=(locked.endpoints[0].replace("127.0.0.1", "localhost"),)
    )
    assert sure(RangeAnswer, owner.ask(open_store(by_name), Range("k"))).count == 1


def test_no_client_certificate_is_named(
    locked: EtcdCluster, certificates: TlsFiles, owner: Owner, open_store: Open
) -> None:
    store = open_store(EtcdSettings(locked.endpoints, ca=str(certificates.ca)))
    assert "client certificate" in refused(owner, store, Trouble.DENIED)


def test_a_server_of_another_ca_is_not_trusted(
    locked: EtcdCluster, certificates: TlsFiles, owner: Owner, open_store: Open, tmp_path: Path
) -> None:
    others = make_certificates(tmp_path)
    store = open_store(settings_of(locked, certificates)._replace(ca=str(others.ca)))
    sentence = refused(owner, store, Trouble.DENIED)
    assert "not trusted" in sentence
    assert locked.endpoints[0] in sentence
    store = open_store(settings_of(locked, others)._replace(ca=str(certificates.ca)))
    assert "client certificate" in refused(owner, store, Trouble.DENIED)


def test_tls_on_one_side_only_is_named(
    locked: EtcdCluster, etcd: EtcdCluster, certificates: TlsFiles, owner: Owner, open_store: Open
) -> None:
    assert "TLS" in refused(owner, open_store(EtcdSettings(locked.endpoints)), Trouble.WRONG_SERVER)
    assert "TLS" in refused(owner, open_store(settings_of(etcd, certificates)), Trouble.WRONG_SERVER)


def test_files_that_cannot_be_used_are_named_at_once(certificates: TlsFiles, owner: Owner, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.pem"
    damaged.write_text("no certificate")
    good = (str(certificates.client_cert), str(certificates.client_key))
    for settings, words in {
        EtcdSettings(("a",), ca=str(tmp_path / "absent.pem")): "absent.pem .* cannot be read",
        EtcdSettings(("a",), cert=good[0]): "without its key",
        EtcdSettings(("a",), key=good[1]): "without its certificate",
        EtcdSettings(("a",), ca=str(damaged)): "no certificates",
        EtcdSettings(("a",), cert=good[0], key=str(certificates.key)): "no certificates",
    }.items():
        with pytest.raises(ConfigurationError, match=words):
            EtcdStore(settings, owner.deliver)


# --- users -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def guarded() -> Iterator[EtcdCluster]:
    """Users root, and agent who may use /job/ only; a token lives for a second when it is not used."""
    with EtcdCluster(arguments=("--auth-token-ttl=1", "--bcrypt-cost=4")) as cluster:
        for user in ("root", "agent"):
            cluster.post(0, "auth/user/add", {"name": user, "password": PASSWORD})
            cluster.post(0, "auth/role/add", {"name": user})
            cluster.post(0, "auth/user/grant", {"user": user, "role": user})
        key, end = (base64.b64encode(text).decode() for text in (b"/job/", b"/job0"))
        permission = {"permType": "READWRITE", "key": key, "range_end": end}
        cluster.post(0, "auth/role/grant", {"name": "agent", "perm": permission})
        cluster.post(0, "auth/enable", {})
        yield cluster


def test_a_user_with_a_password_is_let_in(guarded: EtcdCluster, owner: Owner, open_store: Open) -> None:
    key = f"/job/{uuid.uuid4().hex}/"
    store = open_store(EtcdSettings(guarded.endpoints, user="agent", password=PASSWORD))
    heard = owner.watch(store, key, 1)
    lease = owner.lease(store, 30)
    owner.put(store, key, b"1", lease)
    heard.until(1)
    assert sure(LeaseAlive, owner.ask(store, KeepAlive(lease))).ttl_s == 30


@pytest.mark.parametrize("first", ["write", "read", "watch"])
def test_a_token_that_etcd_has_forgotten_is_renewed(
    guarded: EtcdCluster, owner: Owner, open_store: Open, first: str
) -> None:
    """Whatever is asked first; and a watch that runs goes on."""
    key = f"/job/{uuid.uuid4().hex}/"
    store = open_store(EtcdSettings(guarded.endpoints, user="agent", password=PASSWORD))
    start = owner.put(store, key, b"0")
    running = owner.watch(store, key, start)
    running.until(1)
    guarded.restart(0)  # it keeps tokens in memory only
    if first == "read":
        assert owner.range(store, Range(key)).count == 1
    elif first == "watch":
        assert [change.value for change in owner.watch(store, key, start).until(1)] == [b"0"]
    owner.put(store, key, b"1")
    assert [change.value for change in running.until(2)] == [b"0", b"1"]


def test_wrong_users_and_passwords_and_permissions_are_named(
    guarded: EtcdCluster, owner: Owner, open_store: Open
) -> None:
    settings = EtcdSettings(guarded.endpoints, user="agent", password=PASSWORD)
    assert "password" in refused(owner, open_store(settings._replace(password="wrong")), Trouble.DENIED)
    assert "password" in refused(owner, open_store(settings._replace(user="nobody")), Trouble.DENIED)
    assert "asks for a user" in refused(owner, open_store(EtcdSettings(guarded.endpoints)), Trouble.DENIED)
    store = open_store(settings)
    assert "may not use" in refused(owner, store, Trouble.DENIED)
    error = sure(StoreError, owner.ask(store, Txn((), (Put("/other", b""),))))
    assert (error.trouble, error.maybe_done) == (Trouble.DENIED, False)
    lost = owner.watch(store, "/other", 1)
    owner.until(lambda: lost.lost is not None)
    assert lost.lost
    assert "permission denied" in lost.lost.sentence
    owner.put(store, "/job/x", b"")  # the refusals have not harmed what is allowed


def test_a_user_where_etcd_has_none_does_no_harm(etcd: EtcdCluster, owner: Owner, open_store: Open) -> None:
    store = open_store(EtcdSettings(etcd.endpoints, user="agent", password=PASSWORD))
    assert not isinstance(owner.ask(store, GrantLease(5)), StoreError)


def test_the_text_of_the_settings_hides_the_password() -> None:
    settings = EtcdSettings(("a:1",), user="agent", password=PASSWORD)
    assert PASSWORD not in f"{settings} {settings!r}"
    assert "agent" in repr(settings)
