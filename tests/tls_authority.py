"""An authority of the tests' own, and what it signs."""

from __future__ import annotations

import datetime
import itertools
import ssl
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from pd_core.config import TlsConfig
from pd_rpc.tls import Tls, _context

DAY = datetime.timedelta(days=1)
_numbers = itertools.count()


class Authority:
    """Signs certificates into `folder`."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder = folder
        self._name = _name(name)
        self._key = ec.generate_private_key(ec.SECP256R1())
        builder = _certificate(self._name, self._name, self._key, 365 * DAY).add_extension(
            x509.BasicConstraints(ca=True, path_length=None), critical=True
        )
        self.path = folder / f"{name}-{next(_numbers)}.pem"
        self.path.write_bytes(builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))

    def issue(self, *, left: datetime.timedelta = DAY, password: bytes | None = None) -> TlsConfig:
        """A certificate that is good from two days ago for `left` from now on, as the config names it."""
        key = ec.generate_private_key(ec.SECP256R1())
        usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        builder = _certificate(_name("worker"), self._name, key, left).add_extension(usage, critical=False)
        stem = self._folder / f"worker-{next(_numbers)}"
        certificate, key_path = stem.with_suffix(".pem"), stem.with_suffix(".key")
        certificate.write_bytes(builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
        encryption = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
        key_path.write_bytes(
            key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)
        )
        return TlsConfig(str(certificate), str(key_path), str(self.path))


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, left: datetime.timedelta
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - 2 * DAY)
        .not_valid_after(now + left)
    )


def unchecked(config: TlsConfig) -> Tls:
    """What load_tls gives, without its doubts: for certificates that it refuses."""
    authority = Path(config.authority).read_text()
    return Tls(
        _context(ssl.PROTOCOL_TLS_CLIENT, config, authority), _context(ssl.PROTOCOL_TLS_SERVER, config, authority)
    )
