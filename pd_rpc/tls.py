"""What `tls` in the config stands for: mutual TLS 1.3 between the processes of one cluster.

Workers are reached by address, and addresses change: the names inside certificates are not looked at. Whoever shows a
certificate that the cluster's authority has signed may speak, and then still has to prove that it knows the cluster's
secret (pd_rpc.auth).
"""

from __future__ import annotations

import ssl
from pathlib import Path

import msgspec

from pd_core.config import TlsConfig
from pd_core.errors import ConfigError, KvrelayError
from pd_rpc.auth import Side
from pd_rpc.tls_session import TlsSession

MAX_FILE_BYTES = 1 << 20


class Tls(msgspec.Struct, frozen=True):
    """Contexts of one process, good for any number of connections."""

    client_context: ssl.SSLContext
    server_context: ssl.SSLContext

    def session(self, side: Side) -> TlsSession:
        """For one new connection."""
        is_server = side is Side.SERVER
        return TlsSession(self.server_context if is_server else self.client_context, is_server)


def load_tls(config: TlsConfig | None) -> Tls | None:
    """Reads the files and has the result shake hands with itself; None without a config.

    Raises ConfigError naming the field: a file that cannot be read or holds something else, a key of another
    certificate, a certificate that a peer with this very config would not accept.
    """
    if config is None:
        return None
    texts = {field: _read(field, getattr(config, field)) for field in ("certificate", "key", "authority")}
    for field in ("certificate", "authority"):
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=texts[field])
        except (ssl.SSLError, ValueError) as error:
            raise _wrong(field, f"{getattr(config, field)} holds no certificate in PEM form") from error
    tls = Tls(
        _context(ssl.PROTOCOL_TLS_CLIENT, config, texts["authority"]),
        _context(ssl.PROTOCOL_TLS_SERVER, config, texts["authority"]),
    )
    _try(tls, config)
    return tls


def _context(protocol: ssl._SSLMethod, config: TlsConfig, authority: str) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # see above
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=authority)
    if protocol is ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # nobody resumes, and a data connection on which something comes counts as broken

    def no_password() -> str:
        raise _wrong("key", f"{config.key} is encrypted; nobody is there to give its password")

    try:
        context.load_cert_chain(config.certificate, config.key, no_password)
    except OSError as error:  # an SSLError too
        if getattr(error, "reason", None) == "KEY_VALUES_MISMATCH":
            raise _wrong("key", f"{config.key} is not the key of {config.certificate}") from error
        raise _wrong("key", f"{config.key} holds no private key in PEM form") from error
    return context


def _try(tls: Tls, config: TlsConfig) -> None:
    client, server = tls.session(Side.CLIENT), tls.session(Side.SERVER)
    try:
        client.start()
        while data := client.take_outgoing():
            server.feed(data)
            client.feed(server.take_outgoing())
        client.read()  # where the server says what it thinks of the client's certificate
        server.read()
    except KvrelayError as error:
        raise _wrong("certificate", f"{config.certificate}, by {config.authority}: {error.message}") from error


def _read(field: str, path: str) -> str:
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        raise _wrong(field, f"{path!r} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if len(data) > MAX_FILE_BYTES:
        raise _wrong(field, f"{path} has more than {MAX_FILE_BYTES >> 20} MiB")
    return data.decode("ascii", errors="ignore")  # what else there is around PEM is commentary


def _wrong(field: str, what: str) -> ConfigError:
    return ConfigError(f"tls.{field}: {what}", param=f"tls.{field}")
