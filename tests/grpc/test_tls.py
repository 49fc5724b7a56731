"""gRPC over TLS: what the options for HTTPS do here."""

from pathlib import Path

import grpc
import pytest
import trustme

from rayllm.config.serve import HttpSettings, TlsSettings
from rayllm.grpc.rayllm_pb2_grpc import LLMStub

from .conftest import completion_request

pytestmark = pytest.mark.option("grpc")


@pytest.fixture
def authority():
    return trustme.CA()


def write(authority, folder):
    """Files of a new certificate for this machine, its key, and the authority."""
    signed = authority.issue_cert("127.0.0.1")
    paths = [str(folder / name) for name in ("cert.pem", "key.pem", "ca.pem")]
    for path, pem in zip(paths, (signed.cert_chain_pems[0], signed.private_key_pem, authority.cert_pem), strict=True):
        pem.write_to_path(path)
    return paths


@pytest.fixture
def files(authority, tmp_path):
    return write(authority, tmp_path)


def over_tls(**kwargs):
    return HttpSettings(grpc=True, host="127.0.0.1", port=0, tls=TlsSettings(**kwargs))


async def answers(served, channel_credentials):
    """Whether a new connection gets an answer."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.secure_channel(served.address, channel_credentials, options) as channel:
        try:
            return bool((await LLMStub(channel).Complete(completion_request(), timeout=10)).choices)
        except grpc.aio.AioRpcError:
            return False


@pytest.mark.option("ssl-certfile", "ssl-keyfile")
async def test_only_over_tls(make_served, authority, files, tmp_path):
    both = tmp_path / "both.pem"
    both.write_text(Path(files[1]).read_text() + Path(files[0]).read_text())
    for tls in ({"certfile": files[0], "keyfile": files[1]}, {"certfile": str(both)}):
        served = await make_served(http=over_tls(**tls))
        assert await answers(served, grpc.ssl_channel_credentials(authority.cert_pem.bytes()))
        assert not await answers(served, grpc.ssl_channel_credentials(trustme.CA().cert_pem.bytes()))
        with pytest.raises(grpc.aio.AioRpcError):
            await served.complete()


@pytest.mark.option("ssl-ca-certs", "ssl-cert-reqs")
async def test_clients_with_a_certificate(make_served, authority, files):
    cert, key, roots = files
    served = await make_served(http=over_tls(certfile=cert, keyfile=key, ca_certs=roots, cert_reqs=2))
    root = authority.cert_pem.bytes()
    own, other = authority.issue_cert("client"), trustme.CA().issue_cert("client")
    for pair, good in ((own, True), (other, False)):
        parts = (pair.private_key_pem.bytes(), pair.cert_chain_pems[0].bytes())
        assert await answers(served, grpc.ssl_channel_credentials(root, *parts)) == good
    assert not await answers(served, grpc.ssl_channel_credentials(root))


@pytest.mark.option("enable-ssl-refresh")
async def test_renewed_files_are_taken_up(make_served, authority, files, tmp_path, caplog):
    fixed = await make_served(http=over_tls(certfile=files[0], keyfile=files[1]))
    served = await make_served(http=over_tls(certfile=files[0], keyfile=files[1], refresh=True))
    newer = trustme.CA()
    trust = grpc.ssl_channel_credentials(newer.cert_pem.bytes())
    assert not await answers(served, trust)
    Path(files[1]).write_text("no key")
    assert await answers(served, grpc.ssl_channel_credentials(authority.cert_pem.bytes()))
    assert "so the old ones stay" in caplog.text
    write(newer, tmp_path)
    assert await answers(served, trust)
    assert not await answers(fixed, trust)
