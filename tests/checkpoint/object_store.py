"""An S3 server (moto) on 127.0.0.1 in a process of its own, which is slow and fails on demand.

`open_store` runs this file as a script, which serves. Rules are set over HTTP, from any rank.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import fsspec
import pytest

ROOT = Path(__file__).parents[2]
MISSING = [name for name in ("moto", "s3fs", "flask") if not importlib.util.find_spec(name)]
needs_s3 = pytest.mark.skipif(bool(MISSING), reason=f"pip install 'titanlite[dev]': {MISSING}")
LATENCY_SECONDS = 0.005


class Store:
    """A client of the server; only an address, so that it can be sent to any rank."""

    def __init__(self, address: str):
        self.address = address

    @property
    def environ(self) -> dict[str, str]:
        """Environment variables for s3fs: the server's address, and few retries."""
        return {
            "AWS_ENDPOINT_URL": self.address,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_MAX_ATTEMPTS": "1",
        }

    def set_environment(self) -> None:
        """Let s3fs of this process find the server."""
        os.environ.update(self.environ)

    def add_rule(
        self, method: str, part: str, action: str, times: int = -1, seconds: float = 0
    ) -> None:
        """Apply `action` to the next `times` requests whose path contains `part`; -1: to all.

        refuse: answer 403, which s3fs does not retry. busy: answer 503, which it does.
        lose: execute the request, but answer 503. delay: answer after `seconds`.
        drop: send the first half of the answer's body, then close the connection.
        """
        self._post(
            "/rules",
            {"method": method, "part": part, "action": action, "times": times, "seconds": seconds},
        )

    def reset(self) -> None:
        """Remove all rules, and clear the log of requests."""
        self._post("/rules", None)

    def requests(self) -> list[str]:
        """Method and path of every request since `reset`; COPY for a put that copies."""
        return self._post("/log", None)

    def _post(self, path: str, body) -> list:
        request = urllib.request.Request(
            f"{self.address}/__test__{path}", json.dumps(body).encode(), method="POST"
        )
        with urllib.request.urlopen(request, timeout=30) as response:
            return json.loads(response.read())


@contextmanager
def open_store() -> Iterator[Store]:
    """A server with the bucket `bucket`."""
    # fsspec keeps the clients of this process, and those of an earlier server have its address
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    server = subprocess.Popen(
        [sys.executable, __file__], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        address = server.stdout.readline().strip()
        assert address, "the server did not start: python tests/checkpoint/object_store.py"
        yield Store(address)
    finally:
        server.kill()
        server.wait()


class FaultyApplication:
    """A WSGI application that applies rules to requests before it calls moto's."""

    def __init__(self, inner):
        self.inner, self.rules, self.log, self.lock = inner, [], [], threading.Lock()

    def __call__(self, environ, start_response):
        path = environ["PATH_INFO"]
        if path.startswith("/__test__"):
            return self._control(path, environ, start_response)
        method = "COPY" if "HTTP_X_AMZ_COPY_SOURCE" in environ else environ["REQUEST_METHOD"]
        target = f"{path}?{environ.get('QUERY_STRING', '')}"
        with self.lock:
            self.log.append(f"{method} {path}")
            rule = next((r for r in self.rules if self._applies(r, method, target)), None)
            if rule:
                rule["times"] -= 1
        time.sleep(rule["seconds"] if rule else LATENCY_SECONDS)
        if rule is None or rule["action"] == "delay":
            return self.inner(environ, start_response)
        if rule["action"] == "drop":
            return self._send_half(environ, start_response)
        if rule["action"] == "lose":
            b"".join(self.inner(environ, lambda *_: None))
        else:
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        code, name = {"refuse": ("403 Forbidden", "AccessDenied")}.get(
            rule["action"], ("503 Slow Down", "SlowDown")
        )
        start_response(code, [("Content-Type", "application/xml")])
        return [
            f"<Error><Code>{name}</Code><Message>{name}, by the test</Message></Error>".encode()
        ]

    def _send_half(self, environ, start_response):
        """Half of the body, with the Content-Length of all of it."""
        body = b"".join(self.inner(environ, start_response))
        return [body[: len(body) // 2]]

    @staticmethod
    def _applies(rule, method: str, target: str) -> bool:
        return rule["times"] != 0 and rule["method"] == method and rule["part"] in target

    def _control(self, path, environ, start_response):
        body = json.loads(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"])))
        with self.lock:
            if path.endswith("/rules") and body is None:
                self.rules, self.log = [], []
            elif path.endswith("/rules"):
                self.rules.append(body)
            log = list(self.log)
        start_response("200 OK", [("Content-Type", "application/json")])
        return [json.dumps(log).encode()]


def serve() -> None:
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    moto = DomainDispatcherApplication(create_backend_app)
    server = make_server("127.0.0.1", 0, FaultyApplication(moto), threaded=True)
    address = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever).start()
    urllib.request.urlopen(urllib.request.Request(f"{address}/bucket", method="PUT")).read()
    print(address, flush=True)


if __name__ == "__main__":
    serve()
