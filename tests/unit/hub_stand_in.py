"""A stand-in for the Hugging Face Hub's HTTP API on 127.0.0.1: enough of it for huggingface_hub to download a model."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler

from tests.unit.http_stand_in import running

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class StandInHub:
    """repos: repository name -> file path -> bytes. tokens: repositories that answer only to "Bearer TOKEN"."""

    repos: Mapping[str, Mapping[str, bytes]]
    tokens: Mapping[str, str] = field(default_factory=dict)
    gated: frozenset[str] = frozenset()
    url: str = ""
    requested: list[str] = field(default_factory=list)

    def downloaded(self) -> set[str]:
        """The files whose bytes, not only headers, were asked for."""
        return {path.split("/resolve/")[1].split("/", 1)[1] for path in self.requested if "/resolve/" in path}

    @contextmanager
    def running(self) -> Iterator["StandInHub"]:
        hub = self

        class Handler(_Handler):
            stand_in = hub

        with running(Handler) as self.url:
            yield self


class _Handler(BaseHTTPRequestHandler):
    stand_in: StandInHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_HEAD(self):
        self._answer(with_body=False)

    def do_GET(self):
        self.stand_in.requested.append(self.path)
        self._answer(with_body=True)

    def _answer(self, with_body):
        path = self.path.split("?")[0].lstrip("/")
        is_api = path.startswith("api/models/")
        path = path.removeprefix("api/models/")
        repo = next((name for name in self.stand_in.repos if f"{path}/".startswith(f"{name}/")), None)
        if repo is None or not self._authorized(repo):
            self._send(
                401, b"{}", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}, with_body
            )
            return
        rest = path.removeprefix(repo).strip("/").split("/")
        if is_api:
            self._answer_api(repo, rest, with_body)
        elif repo in self.stand_in.gated:
            self._send(403, b"{}", {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted"}, with_body)
        else:
            content = self.stand_in.repos[repo]["/".join(rest[2:])]
            etag = hashlib.sha1(content).hexdigest()
            self._send(200, content, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT}, with_body)

    def _answer_api(self, repo, rest, with_body):
        if rest[0] in ("revision", "tree") and rest[1] not in ("main", COMMIT):
            self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"}, with_body)
            return
        files = self.stand_in.repos[repo]
        if rest[0] == "tree":
            reply = [
                {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for path, content in files.items()
            ]
        else:
            reply = {"id": repo, "sha": COMMIT, "siblings": [{"rfilename": path} for path in files]}
        self._send(200, json.dumps(reply).encode(), {"Content-Type": "application/json"}, with_body)

    def _authorized(self, repo):
        token = self.stand_in.tokens.get(repo)
        return token is None or self.headers.get("Authorization") == f"Bearer {token}"

    def _send(self, status, body, headers, with_body):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)
