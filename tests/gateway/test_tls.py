"""TLS at the door: a private authority, and callers that have to show a certificate of theirs."""

from __future__ import annotations

import subprocess
from pathlib import Path

import grpc
import pytest

from tests.gateway.conftest import Code, MakeGateway, refused
from tests.topology.conftest import tls
from timeslice.errors import UsageError
from timeslice.gateway.server import Tls
from timeslice.torture.fleet import Tls as Files

__all__ = ["tls"]  # a fixture: an authority, and a certificate of it for 127.0.0.1

pytestmark = pytest.mark.usefixtures("clean_environment", "lock")


@pytest.fixture
def member(tls: Files, tmp_path: Path) -> tuple[bytes, bytes]:
    """Key and certificate of a caller."""
    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-noenc")
    ca_key = str(tls.ca.with_name("ca.key"))
    for arguments in (
        ("req", *new_key, "-keyout", "client.key", "-out", "client.csr", "-subj", "/CN=a caller"),
        ("x509", "-req", "-in", "client.csr", "-CA", str(tls.ca), "-CAkey", ca_key, "-days", "2", "-out", "client.pem"),
    ):
        subprocess.run(["openssl", *arguments], cwd=tmp_path, check=True, capture_output=True, timeout=60)
    return (tmp_path / "client.key").read_bytes(), (tmp_path / "client.pem").read_bytes()


async def test_a_caller_that_knows_the_authority_is_answered(make_gateway: MakeGateway, tls: Files) -> None:
    """It may listen where others reach it; who speaks no TLS, or does not trust the authority, gets nowhere."""
    gateway = await make_gateway(tls=Tls(cert=tls.certificate, key=tls.key))
    trusting = grpc.ssl_channel_credentials(tls.ca.read_bytes())
    assert (await gateway.caller(trusting).acquire("a")).success
    for credentials in (None, grpc.ssl_channel_credentials()):
        assert (await refused(gateway.caller(credentials).acquire("b")))[0] == Code.UNAVAILABLE


async def test_only_members_are_answered_where_that_is_asked(
    make_gateway: MakeGateway, tls: Files, member: tuple[bytes, bytes]
) -> None:
    """With a client authority, a caller without a certificate of it takes nothing."""
    gateway = await make_gateway(tls=Tls(cert=tls.certificate, key=tls.key, client_ca=tls.ca))
    ca = tls.ca.read_bytes()
    assert (await refused(gateway.caller(grpc.ssl_channel_credentials(ca)).acquire("b")))[0] == Code.UNAVAILABLE
    assert (await gateway.caller(grpc.ssl_channel_credentials(ca, *member)).acquire("a")).success


async def test_files_that_are_no_certificate_are_refused_at_start(make_gateway: MakeGateway, tls: Files) -> None:
    """gRPC itself would start, and fail each caller without a word."""
    for files in (
        Tls(cert=tls.certificate, key=tls.ca),
        Tls(cert=tls.certificate, key=tls.key, client_ca=Path(__file__)),
    ):
        with pytest.raises(UsageError, match="can't be used"):
            await make_gateway(tls=files)
