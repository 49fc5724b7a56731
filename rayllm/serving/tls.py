"""HTTPS: the TLS context of an HTTP server, and its renewal when its files change."""

import asyncio
import logging
import os
import ssl

from rayllm.config.serve import TlsSettings
from rayllm.errors import ConfigError

log = logging.getLogger(__name__)

REFRESH_S = 1.0


def make_context(tls: TlsSettings) -> ssl.SSLContext:
    """A context for servers.

    Raises:
        ConfigError: a file cannot be read or holds something else, or the ciphers are unknown.
    """
    _check_certificate(tls.certfile)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    key_option, keyfile = ("--ssl-certfile", tls.certfile) if tls.keyfile is None else ("--ssl-keyfile", tls.keyfile)
    try:
        # An empty password: else OpenSSL would ask the terminal for that of an encrypted key.
        context.load_cert_chain(tls.certfile, tls.keyfile, password="")
    except OSError as error:
        raise ConfigError(key_option, f"{keyfile} holds no key of the certificate: {_reason(error)}") from None
    context.verify_mode = ssl.VerifyMode(tls.cert_reqs)
    if tls.ca_certs is not None:
        try:
            context.load_verify_locations(tls.ca_certs)
        except OSError as error:
            raise ConfigError("--ssl-ca-certs", f"{tls.ca_certs} holds no certificate: {_reason(error)}") from None
    if tls.ciphers is not None:
        try:
            context.set_ciphers(tls.ciphers)
        except ssl.SSLError as error:
            raise ConfigError("--ssl-ciphers", f"{tls.ciphers!r}: {_reason(error)}") from None
    return context


def _check_certificate(path: str) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(path)
    except OSError as error:
        raise ConfigError("--ssl-certfile", f"{path} holds no certificate: {_reason(error)}") from None


def _reason(error: OSError) -> str:
    """Also of `ssl.SSLError`, which is one."""
    return error.strerror or str(error)


class Certificates:
    """A context that stays the same object while what it shows and checks may be renewed."""

    def __init__(self, tls: TlsSettings) -> None:
        """Load the files.

        Raises:
            ConfigError: one of them cannot be used.
        """
        self._tls, self._seen = tls, _stamps(tls)
        self._newest = self.context = make_context(tls)
        if tls.refresh:
            self.context.sni_callback = self._renew

    async def watch(self) -> None:
        """Load the files again when they change, until cancelled. New connections get what is new."""
        while True:
            await asyncio.sleep(REFRESH_S)
            await asyncio.to_thread(self._load_what_changed)

    def _load_what_changed(self) -> None:
        # Looked at by name, not by notification: secrets are renewed by renaming, by links and over networks.
        stamps = _stamps(self._tls)
        if stamps == self._seen:
            return
        self._seen = stamps
        try:
            self._newest = make_context(self._tls)
            log.info("loaded the changed TLS files")
        except ConfigError as error:
            log.warning("the TLS files changed and cannot be used, so the old ones stay: %s", error)

    def _renew(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        """Called by OpenSSL in each handshake, before a certificate is chosen."""
        connection.context = self._newest


def _stamps(tls: TlsSettings) -> list[tuple[int, int, int] | None]:
    return [_stamp(path) for path in (tls.certfile, tls.keyfile, tls.ca_certs) if path is not None]


def _stamp(path: str) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
