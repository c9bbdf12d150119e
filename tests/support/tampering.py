"""A proxy that alters what a server says: somebody on the way, or the server itself."""

from __future__ import annotations

import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Alter = Callable[[str, bytes], bytes]
"""From a request's path and the body of its reply to the body that is sent on."""

HEADERS = ("Authorization", "Content-Type")


@contextmanager
def tampered(url: str, alter: Alter) -> Iterator[str]:
    """Serve the server at `url` with each reply's body as `alter` makes it; yields the proxy's URL."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def pass_on(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            sent = {name: self.headers[name] for name in HEADERS if name in self.headers}
            request = urllib.request.Request(url + self.path, data=body or None, headers=sent, method=self.command)
            try:
                with urllib.request.urlopen(request, timeout=60) as reply:
                    status, answer = reply.status, reply.read()
            except urllib.error.HTTPError as error:
                with error:
                    status, answer = error.code, error.read()
            answer = alter(self.path, answer)
            self.send_response(status)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        do_GET = do_POST = do_PUT = pass_on  # noqa: N815  (the names that http.server calls)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
