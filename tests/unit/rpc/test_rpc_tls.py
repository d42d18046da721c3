"""TLS without sockets: what the config has to be, and bytes that come in any pieces."""

from __future__ import annotations

import random
import ssl

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tls_authority import DAY, Authority, unchecked

from pd_core.config import TlsConfig, parse_config
from pd_core.errors import AuthenticationFailed, ConfigError, KvrelayError, ProtocolError
from pd_rpc import tls_session
from pd_rpc.auth import Side
from pd_rpc.frames import FrameReader
from pd_rpc.tls import Tls, load_tls
from pd_rpc.wire import HANDSHAKE_DECODER, Close, decode


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("other"), "other")


@pytest.fixture(scope="module")
def tls(authority: Authority) -> Tls:
    loaded = load_tls(authority.issue())
    assert loaded is not None
    return loaded


def refused(config: TlsConfig, **fields: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_tls(msgspec.structs.replace(config, **fields))
    assert caught.value.param is not None
    assert caught.value.message.startswith(f"{caught.value.param}: ")
    return caught.value


def test_without_a_config_there_is_no_tls():
    assert load_tls(None) is None


@pytest.mark.parametrize("field", ["certificate", "key", "authority"])
def test_a_file_that_is_missing_or_no_file_is_an_error_that_names_the_field_and_the_path(field, authority, tmp_path):
    for path in (tmp_path / "nowhere.pem", tmp_path):
        error = refused(authority.issue(), **{field: str(path)})
        assert error.param == f"tls.{field}"
        assert str(path) in error.message


@pytest.mark.parametrize("field", ["certificate", "key", "authority"])
@pytest.mark.parametrize(
    "content",
    [b"", b"\xff\xfe" * 50, b"-----BEGIN CERTIFICATE-----\nAAAA\n", bytes(2 << 20)],
    ids=["empty", "no text", "cut", "too long"],
)
def test_a_file_with_something_else_is_an_error_that_names_the_field(field, content, authority, tmp_path):
    (tmp_path / "odd.pem").write_bytes(content)
    assert refused(authority.issue(), **{field: str(tmp_path / "odd.pem")}).param == f"tls.{field}"


def test_a_key_of_another_certificate_is_an_error_about_the_key(authority):
    error = refused(authority.issue(), key=authority.issue().key)
    assert (error.param, "is not the key of" in error.message) == ("tls.key", True)


def test_a_key_with_a_password_is_refused_and_nobody_is_asked_for_it(authority):
    error = refused(authority.issue(password=b"secret"))
    assert (error.param, "encrypted" in error.message) == ("tls.key", True)


def test_a_certificate_that_our_own_peers_would_refuse_is_found_when_it_is_loaded(authority, other):
    assert "expired" in refused(authority.issue(left=-DAY)).message
    assert "issuer" in refused(authority.issue(), authority=str(other.path)).message


def test_paths_are_absolute_because_every_process_has_a_folder_of_its_own():
    files = {"certificate": "/a.pem", "key": "/a.key", "authority": "ca.pem"}
    with pytest.raises(ConfigError, match="absolute") as caught:
        parse_config({"tls": files})
    assert caught.value.param == "tls.authority"


class Line:
    """Two sessions, and the bytes between them in pieces of any size."""

    def __init__(self, client: Tls, server: Tls, seed: int = 0) -> None:
        self.client, self.server = client.session(Side.CLIENT), server.session(Side.SERVER)
        self._random = random.Random(seed)
        self.client.start()

    def carry(self) -> tuple[bytes, bytes]:
        """Until nothing is under way; what client and server could read. Raises what either raises."""
        read = {id(self.client): b"", id(self.server): b""}
        is_moving = True
        while is_moving:
            is_moving = False
            for source, target in ((self.client, self.server), (self.server, self.client)):
                data = source.take_outgoing()
                while data:
                    is_moving = True
                    size = self._random.choice([1, 7, 100, 5000, 100_000])
                    target.feed(data[:size])
                    read[id(target)] += target.read()
                    data = data[size:]
        return read[id(self.client)], read[id(self.server)]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1 << 30), st.lists(st.integers(0, 70_000), max_size=5))
def test_bytes_come_out_as_they_went_in_whatever_the_pieces(tls, seed, sizes):
    line = Line(tls, tls, seed)
    line.carry()
    assert line.client.is_open and line.server.is_open
    sent = [random.Random(size).randbytes(size) for size in sizes]
    for piece in sent:
        line.client.write(piece)
        line.server.write(piece[::-1])
    at_client, at_server = line.carry()
    assert at_server == b"".join(sent)
    assert at_client == b"".join(piece[::-1] for piece in sent)


def test_nothing_follows_the_handshake_by_itself(tls):
    """A data connection's client takes any byte for the end: a session ticket would be one."""
    client, server = tls.session(Side.CLIENT), tls.session(Side.SERVER)
    client.start()
    server.feed(client.take_outgoing())
    client.feed(server.take_outgoing())
    server.feed(client.take_outgoing())
    assert server.is_open
    assert server.take_outgoing() == b""


def both_fail(client: Tls, server: Tls) -> tuple[KvrelayError, KvrelayError]:
    """What client and server say of the same handshake."""
    line = Line(client, server)
    errors: dict[str, KvrelayError] = {}
    for _ in range(5):
        for name, source, target in (
            ("server", line.client, line.server),
            ("client", line.server, line.client),
        ):
            if name not in errors:
                try:
                    target.feed(source.take_outgoing())
                    target.read()
                except KvrelayError as error:
                    errors[name] = error
    return errors["client"], errors["server"]


def test_an_unknown_authority_is_named_on_both_sides(tls, other):
    strange = unchecked(other.issue())
    at_client, at_server = both_fail(strange, tls)
    assert isinstance(at_client, AuthenticationFailed) and isinstance(at_server, AuthenticationFailed)
    assert "its certificate is not accepted" in at_client.message
    assert "it does not accept our certificate: unknown ca" in at_server.message


def test_a_client_whose_certificate_the_server_does_not_accept_hears_of_it(tls, authority, other):
    half = unchecked(msgspec.structs.replace(other.issue(), authority=str(authority.path)))
    at_client, at_server = both_fail(half, tls)
    assert "it does not accept our certificate" in at_client.message
    assert "its certificate is not accepted" in at_server.message


def test_an_expired_certificate_is_called_that_on_both_sides(tls, authority):
    old = unchecked(authority.issue(left=-DAY))
    at_client, at_server = both_fail(old, tls)
    assert "it does not accept our certificate: certificate expired" in at_client.message
    assert "its certificate is not accepted: certificate has expired" in at_server.message
    at_client, at_server = both_fail(tls, old)
    assert "its certificate is not accepted: certificate has expired" in at_client.message
    assert "it does not accept our certificate: certificate expired" in at_server.message


def test_a_client_without_a_certificate_is_refused(tls, authority):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(str(authority.path))
    _, at_server = both_fail(Tls(context, context), tls)
    assert "it showed no certificate" in at_server.message


def test_an_older_tls_is_refused(tls, authority):
    config = authority.issue()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.load_verify_locations(str(authority.path))
    context.load_cert_chain(config.certificate, config.key)
    at_client, at_server = both_fail(Tls(context, context), tls)
    assert "protocol version" in at_client.message
    assert "unsupported protocol" in at_server.message


@given(st.binary(min_size=1, max_size=300))
@settings(deadline=None)
def test_what_is_no_tls_is_a_protocol_error_and_answered_in_plain_frames(tls, data):
    session = tls.session(Side.SERVER)
    if data[0] in range(0x14, 0x18):
        data = b"K" + data
    with pytest.raises(ProtocolError, match="does not speak TLS"):
        session.feed(data)
    reader = FrameReader(1 << 16)
    reader.feed(session.take_outgoing())
    body = reader.next_body()
    assert body is not None
    message = decode(HANDSHAKE_DECODER, body)
    assert isinstance(message, Close) and message.error is not None
    assert "speaks TLS" in message.error.message


@given(st.binary(min_size=1, max_size=300))
@settings(deadline=None)
def test_garbage_that_looks_like_tls_is_a_protocol_error_or_waits_for_more(tls, data):
    session = tls.session(Side.SERVER)
    try:
        session.feed(b"\x16" + data)
    except ProtocolError:
        return
    assert not session.is_open
    assert session.read() == b""


@given(st.integers(0, 1 << 30))
@settings(max_examples=30, deadline=None)
def test_a_flipped_bit_is_an_error_and_nothing_of_its_record_is_handed_out(tls, seed):
    line = Line(tls, tls)
    line.carry()
    line.client.write(bytes(1000))
    record = bytearray(line.client.take_outgoing())
    bit = random.Random(seed).randrange(8 * len(record))
    record[bit // 8] ^= 1 << bit % 8
    handed_out = b""
    try:
        line.server.feed(bytes(record))
        handed_out = line.server.read()
    except ProtocolError:
        pass
    assert handed_out == b""


def test_a_session_is_worn_after_so_many_bytes(tls, monkeypatch):
    line = Line(tls, tls)
    line.carry()
    monkeypatch.setattr(tls_session, "MAX_BYTES", 1000)
    line.client.write(bytes(999))
    assert not line.client.is_worn
    line.client.write(b"x")
    assert line.client.is_worn
