"""What UCX is told: where it is reached, and how a block is moved."""

import pytest

from kv_transport import ucx_settings as settings_module
from kv_transport.ucx_library import where_loaded_from
from kv_transport.ucx_settings import interface_of, rdma_devices, ucx_settings
from pd_core.errors import ConfigError


def test_ucx_is_bound_to_the_interface_of_the_configured_address_alone():
    assert interface_of("127.0.0.1") == interface_of("localhost") == "lo"
    assert ucx_settings("127.0.0.1", {})["NET_DEVICES"] == "lo"


@pytest.mark.parametrize("host", ["192.0.2.1", "2001:db8::1", "no such name"])
def test_an_address_that_is_not_ours_is_refused_naming_the_setting(host):
    with pytest.raises(ConfigError, match=r"transfer\.host") as raised:
        ucx_settings(host, {})
    assert raised.value.param == "transfer.host"


def test_no_block_is_put_into_our_memory_by_the_other_side_nor_sent_before_its_receive():
    settings = ucx_settings("127.0.0.1", {})
    assert settings["TCP_PUT_ENABLE"] == "n"
    assert settings["RNDV_SCHEME"] == "am"
    assert settings["RNDV_THRESH"] == "0"
    assert settings["TLS"] == "tcp"


def test_rdma_is_used_where_there_is_any_and_its_ports_stand_beside_the_interface(monkeypatch):
    monkeypatch.setattr(settings_module, "rdma_devices", lambda: ["mlx5_0:1", "mlx5_1:1"])
    settings = ucx_settings("127.0.0.1", {})
    assert settings["TLS"] == "rc,dc,ud,tcp"
    assert settings["NET_DEVICES"] == "mlx5_0:1,mlx5_1:1,lo"
    assert settings["RNDV_SCHEME"] == "get_zcopy"


def test_what_an_operator_says_through_ucxs_own_variables_is_left_to_them():
    settings = ucx_settings("127.0.0.1", {"UCX_TLS": "tcp,sysv", "UCX_NET_DEVICES": "eth9", "UCX_RNDV_SCHEME": "x"})
    assert "TLS" not in settings
    assert "NET_DEVICES" not in settings
    assert settings["RNDV_SCHEME"] == "am"  # on that the quarantine rests


def test_only_ports_that_are_up_count_as_rdma_devices(tmp_path):
    for device, port, state in (("mlx5_1", "1", "4: ACTIVE"), ("mlx5_0", "2", "4: ACTIVE"), ("mlx5_0", "1", "1: DOWN")):
        folder = tmp_path / device / "ports" / port
        folder.mkdir(parents=True)
        (folder / "state").write_text(f"{state}\n")
    assert rdma_devices(tmp_path) == ["mlx5_0:2", "mlx5_1:1"]
    assert rdma_devices(tmp_path / "nowhere") == []


def test_the_library_that_is_loaded_is_read_from_the_process():
    maps = "7f00-7f01 r-xp 0 08:01 42  /usr/lib/libucp.so.0.0.0\n7f02-7f03 r--p 0 08:01 43  /usr/lib/libucs.so.0\n"
    assert where_loaded_from(maps) == "/usr/lib/libucp.so.0.0.0"
    assert where_loaded_from("7f00-7f01 r-xp 0 08:01 42  /usr/lib/libc.so.6\n") == ""
