"""HTTPS, from the command line's options to handshakes."""

import asyncio
import contextlib
import logging
import ssl
from pathlib import Path

import httpx
import pytest
import trustme

from rayllm.errors import ConfigError
from rayllm.serving import tls
from rayllm.serving.http_server import HttpServer, bind, url_of
from rayllm.serving.tls import make_context

from ..options import serve_settings

LISTED, UNLISTED = "ECDHE-ECDSA-AES256-GCM-SHA384", "ECDHE-ECDSA-AES128-GCM-SHA256"


class Authority:
    """Signs certificates, and stands for everything that a client trusts."""

    def __init__(self, folder):
        self._ca, self._folder = trustme.CA(), folder
        self.file = str(folder / f"ca-{id(self)}.pem")
        self._ca.cert_pem.write_to_path(self.file)

    def sign(self, name):
        """Files of a certificate for this machine and its key."""
        signed = self._ca.issue_cert("127.0.0.1")
        cert, key = str(self._folder / f"{name}.crt"), str(self._folder / f"{name}.key")
        signed.cert_chain_pems[0].write_to_path(cert)
        signed.private_key_pem.write_to_path(key)
        return cert, key

    def client(self, pair=None):
        """What a client needs that trusts this authority, and may have a certificate itself."""
        context = ssl.create_default_context(cafile=self.file)
        if pair is not None:
            context.load_cert_chain(*pair)
        return context


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path)


@pytest.fixture
def pair(authority):
    return authority.sign("server")


def flags(pair, *more):
    return ("--ssl-certfile", pair[0], "--ssl-keyfile", pair[1], *more)


@contextlib.asynccontextmanager
async def serving(*arguments):
    http = serve_settings("--host", "127.0.0.1", "--port", "0", "--uvicorn-log-level", "critical", *arguments).http
    listener = bind(http)
    server = HttpServer(hello, http, listener)
    server.start()
    try:
        yield url_of(listener, "https")
    finally:
        await server.stop()


async def hello(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": scope["scheme"].encode()})


async def said(url, context):
    """The answer on a new connection, or None if there is none."""
    try:
        async with httpx.AsyncClient(verify=context) as client:
            return (await client.get(url)).text
    except httpx.TransportError:
        return None


async def shown(url):
    """The server's certificate, as in a file."""
    host, port = url.removeprefix("https://").split(":")
    return await asyncio.to_thread(ssl.get_server_certificate, (host, int(port)))


def content(pair):
    return ssl.DER_cert_to_PEM_cert(ssl.PEM_cert_to_DER_cert(Path(pair[0]).read_text()))


@pytest.mark.option("ssl-keyfile", "ssl-certfile")
async def test_https_and_no_plain_http(authority, pair):
    async with serving(*flags(pair)) as url:
        assert await said(url, authority.client()) == "https"
        assert await said(url.replace("https", "http"), True) is None
        assert await shown(url) == content(pair)


async def test_the_key_may_be_in_the_file_of_the_certificate(authority, pair, tmp_path):
    both = tmp_path / "both.pem"
    both.write_text("".join((tmp_path / name).read_text() for name in ("server.key", "server.crt")))
    async with serving("--ssl-certfile", str(both)) as url:
        assert await said(url, authority.client()) == "https"


async def test_over_a_unix_socket(authority, pair, tmp_path):
    path = str(tmp_path / "socket")
    async with serving(*flags(pair), "--uds", path):
        transport = httpx.AsyncHTTPTransport(uds=path, verify=authority.client())
        async with httpx.AsyncClient(transport=transport) as client:
            assert (await client.get("https://127.0.0.1/")).text == "https"


@pytest.mark.option("ssl-ca-certs", "ssl-cert-reqs")
async def test_certificates_of_clients(authority, pair, tmp_path):
    stranger = Authority(tmp_path).sign("stranger")
    friend = authority.sign("friend")
    for wanted, answers in (("2", (None, "https", None)), ("1", ("https", "https", None))):
        async with serving(*flags(pair, "--ssl-ca-certs", authority.file, "--ssl-cert-reqs", wanted)) as url:
            assert await said(url, authority.client()) == answers[0]
            assert await said(url, authority.client(friend)) == answers[1]
            assert await said(url, authority.client(stranger)) == answers[2]
    async with serving(*flags(pair, "--ssl-cert-reqs", "0")) as url:
        assert await said(url, authority.client()) == "https"


@pytest.mark.option("ssl-ciphers")
async def test_ciphers(authority, pair):
    async def offers(cipher, url):
        context = authority.client()
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        context.set_ciphers(cipher)
        return await said(url, context)

    async with serving(*flags(pair, "--ssl-ciphers", LISTED)) as url:
        assert await offers(LISTED, url) == "https"
        assert await offers(UNLISTED, url) is None
    async with serving(*flags(pair)) as url:
        assert await offers(UNLISTED, url) == "https"


@pytest.mark.option("enable-ssl-refresh")
async def test_changed_files_are_loaded_again(authority, pair, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(tls, "REFRESH_S", 0.02)
    monkeypatch.setattr(logging.getLogger("rayllm"), "propagate", True)
    other = Authority(tmp_path)
    friend, stranger = authority.client(authority.sign("friend")), authority.client(other.sign("stranger"))
    more = ("--ssl-ca-certs", authority.file, "--ssl-cert-reqs", "1")
    async with serving(*flags(pair, *more, "--enable-ssl-refresh")) as url, serving(*flags(pair, *more)) as fixed:

        async def is_new():
            return await shown(url) == content(pair)

        old = content(pair)
        assert await shown(url) == await shown(fixed) == old
        authority.sign("server")
        await until(is_new)
        assert await shown(fixed) == old != content(pair)

        # Files that cannot be used, such as half written ones, change nothing.
        Path(pair[1]).write_text("no key")

        async def is_noticed():
            return f"{pair[1]} holds no key" in caplog.text

        await until(is_noticed)
        assert await is_new()
        authority.sign("server")
        await until(is_new)

        # The authorities that sign clients' certificates change as well.
        async def is_believed():
            return await said(url, stranger) == "https"

        assert await said(url, friend) == "https"
        assert not await is_believed()
        Path(authority.file).write_bytes(Path(other.file).read_bytes())
        await until(is_believed)
        assert await said(url, friend) is None


async def until(condition):
    async with asyncio.timeout(10):
        while not await condition():
            await asyncio.sleep(0.01)


@pytest.mark.option("ssl-keyfile", "ssl-certfile", "ssl-ca-certs", "ssl-ciphers")
def test_what_cannot_be_used_is_named_at_the_start(authority, pair, tmp_path):
    cert, key = pair
    other_key = authority.sign("other")[1]
    ours = ("--ssl-ca-certs", authority.file, "--ssl-cert-reqs", "2")
    for option, arguments in (
        ("--ssl-keyfile", ("--ssl-certfile", cert, "--ssl-keyfile", "/no/such")),
        ("--ssl-keyfile", ("--ssl-certfile", cert, "--ssl-keyfile", other_key)),
        ("--ssl-keyfile", ("--ssl-certfile", cert, "--ssl-keyfile", cert)),
        ("--ssl-certfile", ("--ssl-certfile", "/no/such", "--ssl-keyfile", key)),
        ("--ssl-certfile", ("--ssl-certfile", key, "--ssl-keyfile", key)),
        ("--ssl-certfile", ("--ssl-certfile", cert)),
        ("--ssl-ca-certs", (*flags(pair), "--ssl-ca-certs", "/no/such", "--ssl-cert-reqs", "2")),
        ("--ssl-ca-certs", (*flags(pair), "--ssl-ca-certs", key, "--ssl-cert-reqs", "2")),
        ("--ssl-ciphers", (*flags(pair), *ours, "--ssl-ciphers", "NONE-SUCH")),
        ("--ssl-keyfile", ("--ssl-keyfile", key)),
        ("--ssl-cert-reqs", ("--ssl-cert-reqs", "2")),
        ("--ssl-cert-reqs", (*flags(pair), "--ssl-cert-reqs", "2")),
        ("--ssl-ca-certs", (*flags(pair), "--ssl-ca-certs", authority.file)),
        ("--ssl-ciphers", ("--ssl-ciphers", LISTED)),
        ("--enable-ssl-refresh", ("--enable-ssl-refresh",)),
    ):
        with pytest.raises(ConfigError, match=f"^{option}: "):
            make_context(serve_settings(*arguments).http.tls)
