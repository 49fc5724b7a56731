"""TLS of gRPC servers, from the files of HTTPS."""

import logging
from dataclasses import dataclass
from pathlib import Path

import grpc

from rayllm.config.serve import TlsSettings
from rayllm.errors import ConfigError
from rayllm.serving.tls import make_context

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Pem:
    """What the files hold."""

    certificate: bytes
    key: bytes
    roots: bytes | None

    @classmethod
    def read(cls, tls: TlsSettings) -> "_Pem":
        certificate = Path(tls.certfile).read_bytes()
        key = certificate if tls.keyfile is None else Path(tls.keyfile).read_bytes()
        return cls(certificate, key, None if tls.ca_certs is None else Path(tls.ca_certs).read_bytes())

    def configuration(self) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([(self.key, self.certificate)], self.roots)


def credentials(tls: TlsSettings) -> grpc.ServerCredentials:
    """Credentials of a server, from files that `make_context` has found sound.

    With `tls.refresh` the files are read in each handshake, and if they cannot be used those before stay.
    """
    pem, needs_clients = _Pem.read(tls), bool(tls.cert_reqs)
    if not tls.refresh:
        return grpc.ssl_server_credentials([(pem.key, pem.certificate)], pem.roots, needs_clients)

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal pem
        try:
            found = _Pem.read(tls)
            if found == pem:
                return None
            make_context(tls)
        except (ConfigError, OSError) as error:
            log.warning("the TLS files changed and cannot be used, so the old ones stay: %s", error)
            return None
        pem = found
        log.info("loaded the changed TLS files")
        return pem.configuration()

    return grpc.dynamic_ssl_server_credentials(pem.configuration(), renewed, needs_clients)
