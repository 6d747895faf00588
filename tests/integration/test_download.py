import hashlib
import os
import re
import socket
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from recipes import MissingDataError
from recipes.download import fetch

CONTENT = bytes(range(256)) * 4096
MD5 = hashlib.md5(CONTENT).hexdigest()


class Handler(BaseHTTPRequestHandler):
    """Serves the server's content; what it does wrong is set on the server."""

    def do_GET(self):
        server = self.server
        server.requests.append(dict(self.headers))
        if self.path != "/data.bin":
            self.send_error(404)
            return
        start = 0
        same = self.headers.get("If-Range", server.etag) == server.etag
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if asked and server.ranges and same:
            start = int(asked[1])
            if start >= len(server.content):
                self.send_error(416)
                return
            self.send_response(206)
            last = len(server.content) - 1
            self.send_header("Content-Range", f"bytes {start}-{last}/{len(server.content)}")
        else:
            self.send_response(200)
        if server.etag:
            self.send_header("ETag", server.etag)
        body = server.content[start:]
        if server.announce:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        with suppress(ConnectionError):  # a client that has seen enough
            self.wfile.write(body if server.break_after is None else body[: server.break_after])

    def log_message(self, *args):
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.content, server.requests, server.etag = CONTENT, [], None
    server.ranges, server.announce, server.break_after = True, True, None
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


def part_of(path):
    return path.with_name("data.bin.part")


def names(path):
    return sorted(os.listdir(path.parent))


@pytest.mark.parametrize("md5", [MD5, None])
def test_whole(server, path, md5, capfd):
    assert fetch(server.url, path, md5=md5) == path
    assert path.read_bytes() == CONTENT
    assert names(path) == ["data.bin"]
    assert "data.bin: 100%" in capfd.readouterr().err
    assert "Python" not in server.requests[0]["User-Agent"]
    assert "Range" not in server.requests[0]


def test_user_agent(server, path):
    fetch(server.url, path, user_agent="curl/8")
    assert server.requests[0]["User-Agent"] == "curl/8"


class TestAlreadyThere:
    @pytest.mark.parametrize("md5", [MD5, None])
    def test_is_taken_without_a_request(self, server, path, md5):
        path.parent.mkdir()
        path.write_bytes(CONTENT)
        before = path.stat().st_mtime_ns
        assert fetch(server.url, path, md5=md5) == path
        assert path.stat().st_mtime_ns == before
        assert server.requests == []
        assert names(path) == ["data.bin"]

    def test_wrong_file_is_named_and_kept(self, server, path):
        path.parent.mkdir()
        path.write_bytes(CONTENT[:1000])
        with pytest.raises(MissingDataError, match=rf"data\.bin is there but is not the right .* {MD5}\. Delete it"):
            fetch(server.url, path, md5=MD5)
        assert path.read_bytes() == CONTENT[:1000]
        assert server.requests == []

    def test_whole_but_not_renamed(self, server, path):
        path.parent.mkdir()
        part_of(path).write_bytes(CONTENT)
        assert fetch(server.url, path, md5=MD5).read_bytes() == CONTENT
        assert server.requests == []
        assert names(path) == ["data.bin"]


class TestBrokenConnection:
    def break_once(self, server, path):
        server.break_after = 300_000
        with pytest.raises(MissingDataError, match=r"ended after 300,000 of 1,048,576 bytes.* first 300,000 bytes"):
            fetch(server.url, path, md5=MD5)
        assert names(path) == ["data.bin.part"]
        server.break_after = None

    def test_is_resumed(self, server, path):
        self.break_once(server, path)
        assert fetch(server.url, path, md5=MD5).read_bytes() == CONTENT
        assert [request.get("Range") for request in server.requests] == [None, "bytes=300000-"]
        assert names(path) == ["data.bin"]

    def test_is_resumed_more_than_once(self, server, path):
        self.break_once(server, path)
        server.break_after = 200_000
        with pytest.raises(MissingDataError, match="ended after 500,000 of 1,048,576 bytes"):
            fetch(server.url, path, md5=MD5)
        server.break_after = None
        assert fetch(server.url, path, md5=MD5).read_bytes() == CONTENT
        assert server.requests[-1]["Range"] == "bytes=500000-"

    def test_starts_again_where_the_server_ignores_ranges(self, server, path):
        server.ranges = False
        self.break_once(server, path)
        assert fetch(server.url, path, md5=MD5).read_bytes() == CONTENT
        assert len(server.requests) == 2

    def test_starts_again_when_the_half_was_of_another_file(self, server, path):
        path.parent.mkdir()
        part_of(path).write_bytes(b"old" * 1000)
        assert fetch(server.url, path, md5=MD5).read_bytes() == CONTENT
        assert [request.get("Range") for request in server.requests] == ["bytes=3000-", None]

    def test_starts_again_when_the_half_is_longer_than_the_file(self, server, path):
        path.parent.mkdir()
        part_of(path).write_bytes(CONTENT + b"more")
        assert fetch(server.url, path, md5=MD5).read_bytes() == CONTENT
        assert [request.get("Range") for request in server.requests] == [f"bytes={len(CONTENT) + 4}-", None]

    def test_is_resumed_without_md5_where_the_server_names_its_version(self, server, path):
        server.etag, server.break_after = '"one"', 300_000
        with pytest.raises(MissingDataError, match=r"The first 300,000 bytes are in data\.bin\.part"):
            fetch(server.url, path)
        server.break_after = None
        assert fetch(server.url, path).read_bytes() == CONTENT
        assert server.requests[-1]["Range"] == "bytes=300000-"
        assert names(path) == ["data.bin"]

    def test_starts_again_without_md5_where_the_server_has_another_version(self, server, path):
        server.etag, server.break_after = '"one"', 300_000
        with pytest.raises(MissingDataError):
            fetch(server.url, path)
        server.break_after, server.etag, server.content = None, '"two"', CONTENT[::-1]
        assert fetch(server.url, path).read_bytes() == CONTENT[::-1]

    def test_is_not_resumed_without_md5_by_a_weak_version(self, server, path):
        server.etag, server.break_after = 'W/"one"', 300_000
        with pytest.raises(MissingDataError):
            fetch(server.url, path)
        server.break_after = None
        fetch(server.url, path)
        assert "Range" not in server.requests[-1]

    def test_is_not_resumed_without_md5(self, server, path):
        server.break_after = 300_000
        with pytest.raises(MissingDataError, match=r"ended after 300,000 of 1,048,576 bytes"):
            fetch(server.url, path)
        assert not path.exists()
        server.break_after, server.content = None, CONTENT[::-1]
        assert fetch(server.url, path).read_bytes() == CONTENT[::-1]
        assert "Range" not in server.requests[-1]


class TestFailure:
    def fails(self, url, path, reason, md5=MD5):
        with pytest.raises(MissingDataError, match=reason) as caught:
            fetch(url, path, md5=md5)
        message = str(caught.value)
        assert message.startswith("data.bin is missing and could not be fetched: ")
        assert f"Put the file from {url} at {path}." in message
        assert "\n" not in message
        assert names(path) == []

    def test_wrong_md5(self, server, path):
        self.fails(server.url, path, f"what the server sends has md5 {MD5}, expected {'0' * 32}", md5="0" * 32)

    def test_not_found(self, server, path):
        self.fails(server.url.replace("data.bin", "other.bin"), path, "404: Not Found")

    def test_refused_connection(self, path, monkeypatch):
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))  # bound but not listening: nobody else gets the port meanwhile
            self.fails(f"http://127.0.0.1:{unused.getsockname()[1]}/data.bin", path, "Connection refused")

    def test_silent_server(self, path, monkeypatch):
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        monkeypatch.setattr("recipes.download.READ_TIMEOUT_SECONDS", 0.05)
        with socket.create_server(("127.0.0.1", 0)) as silent:
            self.fails(f"http://127.0.0.1:{silent.getsockname()[1]}/data.bin", path, "timed out")

    def test_unknown_length(self, server, path):
        server.announce = False
        self.fails(server.url, path, "does not say how long the file is")

    def test_folder_that_cannot_be_made(self, server, tmp_path):
        (tmp_path / "folder").write_text("a file")
        with pytest.raises(MissingDataError, match=r"data\.bin is missing and could not be fetched: .*folder"):
            fetch(server.url, tmp_path / "folder" / "data.bin", md5=MD5)


def test_two_at_once_fetch_it_once(server, path):
    threads = [threading.Thread(target=fetch, args=(server.url, path), kwargs={"md5": MD5}) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert path.read_bytes() == CONTENT
    assert len(server.requests) == 1
    assert names(path) == ["data.bin"]
