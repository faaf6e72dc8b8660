"""A stand-in for the Hugging Face hub: the answers that `lld.data get` needs, and faults to order.

Large files are described and redirected to another host name, as the hub does with its storage; small ones
are answered at once, with git's checksum.
"""

import hashlib
import re
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "c0ffee" * 6 + "beef"
LARGE = 1000  # bytes; from here on a file is stored and described as a large one


class Hub:
    """Serves {"owner/name/path": bytes}; `sent` counts the bytes sent of each file."""

    def __init__(self, files: dict[str, bytes]):
        self.files, self.sent, self.starts = files, Counter(), []
        self.damaged: set[str] = set()  # files whose next download has one wrong byte
        self.cut: dict[str, int] = {}  # the next download of a file breaks off after so many bytes
        self.stalled: dict[str, int] = {}  # downloads of a file stop after so many bytes, until `resume`
        self.resume = threading.Event()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def do_HEAD(self):
                hub.answer(self, body=False)

            def do_GET(self):
                hub.answer(self, body=True)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def close(self) -> None:
        self.resume.set()
        self.server.shutdown()
        self.server.server_close()

    def answer(self, request: BaseHTTPRequestHandler, body: bool) -> None:
        if match := re.fullmatch(r"/datasets/([^/]+/[^/]+)/resolve/(main|[0-9a-f]{40})/(.+)", request.path):
            name = f"{match[1]}/{match[3]}"
            if name not in self.files:
                return self._send(request, 404, {"X-Error-Code": "EntryNotFound", "Content-Length": "0"})
            data, headers = self.files[name], {"X-Repo-Commit": COMMIT}
            if len(data) >= LARGE:
                headers |= {
                    "Location": f"http://localhost:{self.server.server_port}/storage/{name}",
                    "X-Linked-Etag": f'"{hashlib.sha256(data).hexdigest()}"',
                    "X-Linked-Size": str(len(data)),
                    "Content-Length": "0",
                }
                return self._send(request, 302, headers)
            etag = hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()
            return self._give(request, name, headers | {"ETag": f'"{etag}"'}, body)
        return self._give(request, request.path.removeprefix("/storage/"), {}, body)

    def _send(self, request, code: int, headers: dict[str, str]) -> None:
        request.send_response(code)
        for name, value in headers.items():
            request.send_header(name, value)
        request.end_headers()

    def _give(self, request, name: str, headers: dict[str, str], body: bool) -> None:
        data = self.files[name]
        ranged = re.fullmatch(r"bytes=(\d+)-", request.headers.get("Range", ""))
        start = int(ranged[1]) if ranged else 0
        headers["Content-Length"] = str(len(data) - start)
        if ranged:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        self._send(request, 206 if ranged else 200, headers)
        if body:
            self.starts.append((name, start))
            self._write(request, name, start)

    def _write(self, request, name: str, start: int) -> None:
        data, end = self.files[name], self.cut.pop(name, len(self.files[name]))
        if name in self.damaged:
            self.damaged.remove(name)
            data = data[:-1] + bytes([data[-1] ^ 1])
        while start < end:
            if start >= self.stalled.get(name, len(data)):
                self.resume.wait()
                return
            block = data[start : min(start + 65536, end)]
            request.wfile.write(block)
            self.sent[name] += len(block)
            start += len(block)
        request.close_connection = end < len(data)
