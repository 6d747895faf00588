"""Fetches a file of a data set: complete, resumed, or rejected with a single line of advice."""

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
    """Serves the content of the server, with the faults that its attributes select."""

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
        with suppress(ConnectionError):  # the client may close early
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
def test_fetches_a_whole_file(server, path, md5, capfd):
    assert fetch(server.url, path, md5=md5) == path
    assert path.read_bytes() == CONTENT
    assert names(path) == ["data.bin"]
    assert "data.bin: 100%" in capfd.readouterr().err
    assert "Python" not in server.requests[0]["User-Agent"]
    assert "Range" not in server.requests[0]


class TestAlreadyThere:
    @pytest.mark.parametrize("md5", [MD5, None])
    def test_an_existing_file_needs_no_request(self, server, path, md5):
        path.parent.mkdir()
        path.write_bytes(CONTENT)
        before = path.stat().st_mtime_ns
        assert fetch(server.url, path, md5=md5) == path
        assert path.stat().st_mtime_ns == before
        assert server.requests == []
        assert names(path) == ["data.bin"]

    def test_a_wrong_file_is_named_and_kept(self, server, path):
        path.parent.mkdir()
        path.write_bytes(CONTENT[:1000])
        with pytest.raises(MissingDataError, match=rf"data\.bin is another file or incomplete: .* {MD5}\. Delete it"):
            fetch(server.url, path, md5=MD5)
        assert path.read_bytes() == CONTENT[:1000]
        assert server.requests == []

    def test_a_complete_partial_file_is_renamed(self, server, path):
        path.parent.mkdir()
        part_of(path).write_bytes(CONTENT)
        assert fetch(server.url, path, md5=MD5).read_bytes() == CONTENT
        assert server.requests == []
        assert names(path) == ["data.bin"]


BROKEN = {
    # md5, ETag, whether the server sends ranges, later changes of the server, range of the last request
    "md5": (MD5, None, True, {}, "bytes=300000-"),
    "md5, no ranges": (MD5, None, False, {}, "bytes=300000-"),
    "the same version": (None, '"first"', True, {}, "bytes=300000-"),
    "another version": (None, '"first"', True, {"etag": '"second"', "content": CONTENT[::-1]}, "bytes=300000-"),
    "a weak version": (None, 'W/"first"', True, {}, None),
    "no version": (None, None, True, {"content": CONTENT[::-1]}, None),
}


@pytest.mark.parametrize(("md5", "etag", "ranges", "later", "asked"), BROKEN.values(), ids=BROKEN)
def test_a_broken_download_resumes_if_both_halves_belong_to_the_same_file(
    server, path, md5, etag, ranges, later, asked
):
    server.etag, server.ranges, server.break_after = etag, ranges, 300_000
    with pytest.raises(MissingDataError, match="ended after 300,000 of 1,048,576 bytes") as caught:
        fetch(server.url, path, md5=md5)
    assert ("The first 300,000 bytes are in data.bin.part" in str(caught.value)) == (asked is not None)
    assert not path.exists()
    server.break_after = None
    vars(server).update(later)
    assert fetch(server.url, path, md5=md5).read_bytes() == server.content
    assert [request.get("Range") for request in server.requests] == [None, asked]
    assert names(path) == ["data.bin"]


def test_is_resumed_more_than_once(server, path):
    for first, last in ((300_000, 300_000), (200_000, 500_000)):
        server.break_after = first
        with pytest.raises(MissingDataError, match=f"ended after {last:,} of 1,048,576 bytes"):
            fetch(server.url, path, md5=MD5)
        assert names(path) == ["data.bin.part"]
    server.break_after = None
    assert fetch(server.url, path, md5=MD5).read_bytes() == CONTENT
    assert server.requests[-1]["Range"] == "bytes=500000-"


@pytest.mark.parametrize("left", [b"old" * 1000, CONTENT + b"more"], ids=["of another file", "longer than the file"])
def test_restarts_if_the_partial_file_is_wrong(left, server, path):
    path.parent.mkdir()
    part_of(path).write_bytes(left)
    assert fetch(server.url, path, md5=MD5).read_bytes() == CONTENT
    assert [request.get("Range") for request in server.requests] == [f"bytes={len(left)}-", None]


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
        self.fails(server.url, path, f"the server's file has md5 {MD5}, expected {'0' * 32}", md5="0" * 32)

    def test_not_found(self, server, path):
        self.fails(server.url.replace("data.bin", "other.bin"), path, "404: Not Found")

    def test_refused_connection(self, path, monkeypatch):
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))  # bound but not listening, which reserves the port
            self.fails(f"http://127.0.0.1:{unused.getsockname()[1]}/data.bin", path, "Connection refused")

    def test_silent_server(self, path, monkeypatch):
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        monkeypatch.setattr("recipes.download.READ_TIMEOUT_SECONDS", 0.05)
        with socket.create_server(("127.0.0.1", 0)) as silent:
            self.fails(f"http://127.0.0.1:{silent.getsockname()[1]}/data.bin", path, "timed out")

    def test_unknown_length(self, server, path):
        server.announce = False
        self.fails(server.url, path, "does not send the file's length")

    def test_an_impossible_folder_raises(self, server, tmp_path):
        (tmp_path / "folder").write_text("a file")
        with pytest.raises(MissingDataError, match=r"data\.bin is missing and could not be fetched: .*folder"):
            fetch(server.url, tmp_path / "folder" / "data.bin", md5=MD5)


def test_concurrent_processes_fetch_the_file_once(server, path):
    threads = [threading.Thread(target=fetch, args=(server.url, path), kwargs={"md5": MD5}) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert path.read_bytes() == CONTENT
    assert len(server.requests) == 1
    assert names(path) == ["data.bin"]
