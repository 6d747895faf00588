"""Fetches a file of a data set: complete, or rejected with a single line of advice."""

import hashlib
import os
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from recipes import MissingDataError
from recipes.download import fetch

CONTENT = bytes(range(256)) * 4096
MD5 = hashlib.md5(CONTENT).hexdigest()


class Handler(BaseHTTPRequestHandler):
    """Serves ``data.bin`` up to the server's ``break_after``."""

    def do_GET(self):
        self.server.requests.append(dict(self.headers))
        if self.path != "/data.bin":
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(CONTENT)))
        self.end_headers()
        self.wfile.write(CONTENT[: self.server.break_after])

    def log_message(self, *args):
        pass


@pytest.fixture(autouse=True)
def without_proxy(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture
def server():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.requests, server.break_after = [], None
    server.url = f"http://127.0.0.1:{server.server_port}/data.bin"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "folder" / "data.bin"


@pytest.mark.parametrize("md5", [MD5, None])
def test_a_file_is_fetched_once(server, path, md5, capfd):
    for _ in range(2):
        assert fetch(server.url, path, md5=md5) == path
        assert path.read_bytes() == CONTENT
        assert os.listdir(path.parent) == ["data.bin"]
    assert "data.bin: 100%" in capfd.readouterr().err
    [headers] = server.requests
    assert "ython" not in headers["User-Agent"]


def test_a_wrong_file_is_named_and_kept(server, path):
    path.parent.mkdir()
    path.write_bytes(CONTENT[:1000])
    with pytest.raises(MissingDataError, match=rf"data\.bin is another file or incomplete: .* {MD5}\. Delete it"):
        fetch(server.url, path, md5=MD5)
    assert path.read_bytes() == CONTENT[:1000]
    assert server.requests == []


def fails(url, path, reason, md5=None):
    with pytest.raises(MissingDataError, match=reason) as caught:
        fetch(url, path, md5=md5)
    message = str(caught.value)
    assert message.startswith("data.bin is missing and could not be fetched: ")
    assert f"Put the file from {url} at {path}." in message
    assert "\n" not in message
    assert not path.parent.is_dir() or os.listdir(path.parent) == []


def test_failures_leave_nothing_and_name_address_and_path(server, path, monkeypatch):
    fails(server.url, path, f"the server's file has md5 {MD5}, expected {'0' * 32}", md5="0" * 32)
    fails(server.url.replace("data.bin", "other.bin"), path, "404 Client Error: Not Found")
    server.break_after = 300_000
    fails(server.url, path, "300000 bytes read, 748576 more expected")
    monkeypatch.setattr("recipes.download.TIMEOUT_SECONDS", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        fails(f"http://127.0.0.1:{silent.getsockname()[1]}/data.bin", path, "timed out")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound but not listening, which reserves the port
        fails(f"http://127.0.0.1:{unused.getsockname()[1]}/data.bin", path, "Connection refused")
    path.parent.rmdir()
    path.parent.write_text("a file")
    fails(server.url, path, "folder")
