"""GET /: the page for people.

Owns: the policy that the page is sent under: nothing runs there but its own script, and it talks to this server only.
Does not know: what is on the page (page.html). It holds no data and needs no key; what it asks of other routes does.
"""

import base64
import hashlib
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

from aiohttp import web

PATH = Path(__file__).with_name("page.html")

_INLINE = {
    "script-src": re.compile(r"<script[^>]*>(.*?)</script>", re.DOTALL),
    "style-src": re.compile(r"<style>(.*?)</style>", re.DOTALL),
}
_POLICY = (
    "default-src 'none'; {inline}; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
"""img-src is for the icon, which is in the page. trusted-types: no text becomes HTML, not even by a mistake of ours."""

_HEADERS = {
    "Cache-Control": "no-cache",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class Page(NamedTuple):
    body: bytes
    policy: str


@cache
def read_page() -> Page:
    """The file as it stands, and the policy that names the digests of its script and its style."""
    body = PATH.read_bytes()
    text = body.decode("utf-8")
    inline = "; ".join(f"{name} '{_digest(pattern, text)}'" for name, pattern in _INLINE.items())
    return Page(body, _POLICY.format(inline=inline))


def _digest(pattern: re.Pattern[str], text: str) -> str:
    [content] = pattern.findall(text)
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode("utf-8")).digest()).decode("ascii")


async def show_page(_request: web.Request) -> web.Response:
    """The page: a chat, and the server as it works."""
    page = read_page()
    headers = _HEADERS | {"Content-Security-Policy": page.policy}
    return web.Response(body=page.body, content_type="text/html", charset="utf-8", headers=headers)
