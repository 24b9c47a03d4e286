"""What can be tested of the network on one host; `tests/hosts` has two."""

from __future__ import annotations

import os
import socket

import pytest
import torch.distributed as dist

from camshaft.distributed.backends.native import network as native_network
from camshaft.distributed.backends.native.network import find_interface, gloo_on

VARIABLE = "GLOO_SOCKET_IFNAME"


@pytest.fixture
def named_for_the_loopback(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")


def store_at(address: str) -> dist.TCPStore:
    return dist.TCPStore(address, 0, 2, is_master=True, wait_for_workers=False)


@pytest.mark.usefixtures("named_for_the_loopback")
def test_ranks_that_meet_on_the_loopback_interface_need_no_other_interface():
    store = dist.PrefixStore("attempt", store_at("127.0.0.1"))
    store.set("camshaft/address/1", "127.0.0.1")
    assert find_interface(store, 0, 2) is None


@pytest.mark.usefixtures("named_for_the_loopback")
def test_only_ranks_beside_the_store_read_the_addresses_of_the_others(monkeypatch):
    monkeypatch.setattr(native_network, "_address_towards", lambda host: "10.0.0.1")
    monkeypatch.setattr(native_network, "_interface_with", lambda address: f"interface with {address}")
    store = store_at("127.0.0.1")  # rank 1 tells it nothing
    assert find_interface(store, 0, 2) == "interface with 10.0.0.1"
    assert store.get("camshaft/address/0") == b"10.0.0.1"


@pytest.mark.usefixtures("named_for_the_loopback")
def test_ranks_beside_the_store_use_the_interface_towards_another_node(monkeypatch):
    """Their own name for it is a loopback address."""
    towards = {"127.0.0.1": "127.0.0.1", "10.0.0.2": "10.0.0.1"}
    monkeypatch.setattr(native_network, "_address_towards", towards.__getitem__)
    monkeypatch.setattr(native_network, "_interface_with", lambda address: f"interface with {address}")
    store = store_at("127.0.0.1")
    store.set("camshaft/address/1", "10.0.0.2")
    assert find_interface(store, 0, 2) == "interface with 10.0.0.1"


@pytest.mark.usefixtures("named_for_the_loopback")
def test_the_interface_of_the_user_is_kept_and_the_address_is_published(monkeypatch):
    monkeypatch.setenv(VARIABLE, "theirs")
    monkeypatch.setattr(native_network, "_address_towards", lambda host: "10.0.0.1")
    store = store_at("127.0.0.1")
    assert find_interface(store, 0, 2) is None
    assert store.get("camshaft/address/0") == b"10.0.0.1"


def test_one_process_and_stores_without_an_address_need_no_interface():
    assert find_interface(dist.HashStore(), 0, 2) is None
    assert find_interface(store_at("127.0.0.1"), 0, 1) is None


def test_an_unknown_host_is_not_an_error():
    assert native_network._address_towards("x" * 64) == ""  # no such name can be


@pytest.mark.parametrize(("before", "meanwhile"), [(None, "eth7"), ("", "eth7"), ("theirs", "theirs")])
def test_the_variable_is_set_only_for_the_block_unless_the_user_has_set_it(monkeypatch, before, meanwhile):
    monkeypatch.delenv(VARIABLE, raising=False)
    if before is not None:
        monkeypatch.setenv(VARIABLE, before)
    with pytest.raises(LookupError), gloo_on("eth7"):
        assert os.environ[VARIABLE] == meanwhile
        raise LookupError
    assert os.environ.get(VARIABLE) == before


def test_without_an_interface_there_is_no_variable(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    with gloo_on(None):
        assert VARIABLE not in os.environ
