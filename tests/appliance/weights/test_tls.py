"""TLS: which CA is trusted, what goes through a proxy, and no redirect that leaves TLS."""

import contextlib
import datetime
import ipaddress
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import hostile_server as hostile
import pytest
from hostile_server import HostileServer
from weights_models import fetch, publish, same_bytes, sums_of

from appliance.errors import SourceError, UsageError
from appliance.settings import read_network, read_settings
from appliance.weights.network import Network


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Key and self-signed certificate of 127.0.0.1 in one file."""
    x509 = pytest.importorskip("cryptography.x509")
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(address, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    path = tmp_path_factory.mktemp("tls") / "both.pem"
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        + made.public_bytes(serialization.Encoding.PEM)
    )
    return path


@pytest.fixture
def secure(certificate: Path, model: Path) -> Iterator[tuple[HostileServer, str]]:
    """The model behind TLS, and its address."""
    server = HostileServer()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    server.socket = context.wrap_socket(
        server.socket, server_side=True, do_handshake_on_connect=False
    )
    publish(server, model)
    server.files["/m/SHA256SUMS"] = sums_of(model)
    yield server, server.url.replace("http:", "https:")
    server.close()


class Tunnel:
    """A proxy that does CONNECT and nothing else; `asked` are the requests' first lines."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.asked: list[str] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self.listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client:
            head = b""
            while b"\r\n\r\n" not in head:
                head += client.recv(4096)
            self.asked.append(head.decode())
            host, port = head.split()[1].decode().split(":")
            with socket.create_connection((host, int(port))) as upstream:
                client.sendall(b"HTTP/1.1 200 fine\r\n\r\n")
                back = threading.Thread(target=pump, args=(upstream, client), daemon=True)
                back.start()
                pump(client, upstream)
                back.join()


def pump(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


def test_a_certificate_of_an_unknown_ca_is_refused_with_the_way_out(store, secure):
    with pytest.raises(SourceError, match="certificate is not trusted") as caught:
        fetch(store, f"{secure[1]}/m")
    assert "SSL_CERT_FILE" in caught.value.fix


def test_the_ca_of_the_environment_is_trusted(store, secure, certificate, model):
    network = read_network(read_settings({}), {"SSL_CERT_FILE": str(certificate), "HOME": "/"})
    pulled = fetch(store, f"{secure[1]}/m", network)
    assert same_bytes(store.release_folder(pulled.release), model)


def test_a_ca_file_that_does_not_exist_is_named():
    with pytest.raises(UsageError, match="/no/such/ca"):
        read_network(read_settings({}), {"SSL_CERT_FILE": "/no/such/ca", "HOME": "/"})


def test_tls_goes_through_the_proxy_in_a_tunnel_with_its_password(
    store, secure, certificate, model
):
    tunnel = Tunnel()
    port = tunnel.listener.getsockname()[1]
    environment = {
        "https_proxy": f"http://me:word@127.0.0.1:{port}",
        "SSL_CERT_FILE": str(certificate),
        "HOME": "/",
    }
    try:
        pulled = fetch(store, f"{secure[1]}/m", read_network(read_settings({}), environment))
    finally:
        tunnel.listener.close()
    assert same_bytes(store.release_folder(pulled.release), model)
    assert tunnel.asked
    assert all(head.startswith("CONNECT 127.0.0.1:") for head in tunnel.asked)
    assert all("Proxy-Authorization: Basic bWU6d29yZA==" in head for head in tunnel.asked)


def test_a_redirect_out_of_tls_is_refused(store, secure, certificate, server):
    secure[0].fails(hostile.redirect_to(server.url), times=99)
    with pytest.raises(SourceError, match="out of TLS: refused"):
        fetch(store, f"{secure[1]}/m", Network(ca_file=str(certificate)))
    assert server.requests == []
