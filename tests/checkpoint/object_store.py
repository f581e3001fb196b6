"""An S3 server in a process of its own, slow and faulty on demand: moto's, over HTTP on 127.0.0.1.

As a script it serves; `open_store` starts it. Rules are put by HTTP, so that any rank can.
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

import pytest

ROOT = Path(__file__).parents[2]
MISSING = [name for name in ("moto", "s3fs", "flask") if not importlib.util.find_spec(name)]
needs_s3 = pytest.mark.skipif(bool(MISSING), reason=f"pip install 'titanlite[dev]': {MISSING}")
LATENCY_SECONDS = 0.005


class Store:
    """The server, as a client sees it; made of its address alone, so that it goes to any rank."""

    def __init__(self, address: str):
        self.address = address

    @property
    def environ(self) -> dict[str, str]:
        """What lets s3fs of a process find the server, and not repeat a request for long."""
        return {
            "AWS_ENDPOINT_URL": self.address,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_MAX_ATTEMPTS": "1",
        }

    def enter(self) -> None:
        """Let s3fs of this process find the server."""
        os.environ.update(self.environ)

    def rule(self, method: str, part: str, act: str, times: int = -1, seconds: float = 0) -> None:
        """From now on `act` on `times` requests whose path has `part`; -1: on all.

        refuse: answer 403, which is not repeated. busy: 503, which is. lose: do it, and answer 503.
        delay: answer after `seconds`.
        """
        self._ask(
            "/rules",
            {"method": method, "part": part, "act": act, "times": times, "seconds": seconds},
        )

    def forget(self) -> None:
        """Drop every rule, and the log."""
        self._ask("/rules", None)

    def requests(self) -> list[str]:
        """Method and path of every request since `forget`; COPY for a put that copies."""
        return self._ask("/log", None)

    def _ask(self, path: str, body) -> list:
        request = urllib.request.Request(
            f"{self.address}/__test__{path}", json.dumps(body).encode(), method="POST"
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.loads(answer.read())


@contextmanager
def open_store() -> Iterator[Store]:
    """A server with the bucket `bucket`."""
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
    """A WSGI application in front of moto's, which follows the rules it was given."""

    def __init__(self, inner):
        self.inner, self.rules, self.log, self.lock = inner, [], [], threading.Lock()

    def __call__(self, environ, answer):
        path = environ["PATH_INFO"]
        if path.startswith("/__test__"):
            return self._obey(path, environ, answer)
        method = "COPY" if "HTTP_X_AMZ_COPY_SOURCE" in environ else environ["REQUEST_METHOD"]
        asked = f"{path}?{environ.get('QUERY_STRING', '')}"
        with self.lock:
            self.log.append(f"{method} {path}")
            rule = next((r for r in self.rules if self._applies(r, method, asked)), None)
            if rule:
                rule["times"] -= 1
        time.sleep(rule["seconds"] if rule else LATENCY_SECONDS)
        if rule is None or rule["act"] == "delay":
            return self.inner(environ, answer)
        if rule["act"] == "lose":
            b"".join(self.inner(environ, lambda *_: None))
        else:
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        code, name = {"refuse": ("403 Forbidden", "AccessDenied")}.get(
            rule["act"], ("503 Slow Down", "SlowDown")
        )
        answer(code, [("Content-Type", "application/xml")])
        return [
            f"<Error><Code>{name}</Code><Message>{name}, by the test</Message></Error>".encode()
        ]

    @staticmethod
    def _applies(rule, method: str, asked: str) -> bool:
        return rule["times"] != 0 and rule["method"] == method and rule["part"] in asked

    def _obey(self, path, environ, answer):
        body = json.loads(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"])))
        with self.lock:
            if path.endswith("/rules") and body is None:
                self.rules, self.log = [], []
            elif path.endswith("/rules"):
                self.rules.append(body)
            log = list(self.log)
        answer("200 OK", [("Content-Type", "application/json")])
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
