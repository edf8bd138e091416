"""Gloo is told an interface only where it would offer its peers a loopback address."""

from __future__ import annotations

from dlaunch.agent.interface import gloo_variables, interface_of


def test_the_interface_of_an_address_is_found() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") is None


def test_nodes_that_are_all_on_one_host_need_nothing() -> None:
    assert gloo_variables("127.0.0.1", {}) == {}
    assert gloo_variables("::1", {}) == {}


def test_the_users_own_choice_stands() -> None:
    assert gloo_variables("192.0.2.1", {"GLOO_SOCKET_IFNAME": "eth7"}) == {}
