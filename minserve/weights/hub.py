"""From what the user calls a model to a local folder: a folder, a GGUF file, or a name on the Hugging Face Hub.

Owns: telling these apart, what is downloaded and what never is (code, and pickles but for a draft head's), what a
folder must hold, and saying what to do when there is no such model. Does not know: what is in the files. No torch here.
HF_TOKEN, HF_HOME, HF_ENDPOINT and HF_HUB_OFFLINE are read by huggingface_hub when it is imported.
"""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

from minserve.errors import ConfigError
from minserve.weights.gguf import converted_folder

_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("chat_template.jinja", "additional_chat_templates/*.jinja"),
)
_CONFIG_FILES = ("config.json", "generation_config.json")
_WEIGHTS_FILES = ("*.safetensors", "*.safetensors.index.json")
_PICKLED_WEIGHTS_FILES = ("pytorch_model*.bin", "pytorch_model.bin.index.json")
# Other formats' copies of the same weights: in subfolders, and the one file of Mistral's own layout.
_IGNORED = (*(f"*/{pattern}" for pattern in _WEIGHTS_FILES), "consolidated*")


def resolve_model(
    name_or_path: str, *, revision: str | None = None, progress: bool = True, need_weights: bool = True
) -> Path:
    """The local folder with config.json, tokenizer.json and (if need_weights) safetensors of this model.

    Downloads what the hub's cache lacks and converts a .gguf file. Raises ConfigError, saying what to do.
    """
    patterns = _CONFIG_FILES + _TOKENIZER_FILES + (_WEIGHTS_FILES if need_weights else ())
    folder = _locate(name_or_path, revision, progress, patterns)
    missing = [name for name in ("config.json", "tokenizer.json") if not (folder / name).is_file()]
    if need_weights and not any(folder.glob("*.safetensors")):
        missing.append("*.safetensors")
    _refuse_if_missing(name_or_path, folder, missing)
    return folder


def resolve_draft(name_or_path: str, *, revision: str | None = None, progress: bool = True) -> Path:
    """The local folder with config.json and the weights of this draft head, which needs no tokenizer.

    Weights are safetensors; where there are none, pytorch_model.bin. Raises ConfigError, saying what to do.
    """
    if name_or_path.lower().endswith(".gguf"):
        raise ConfigError(f"{name_or_path}: a draft head is a folder or a Hugging Face name, no .gguf file")
    # Some repositories have both, and then the pickle is not even downloaded.
    for weights in (_WEIGHTS_FILES, _PICKLED_WEIGHTS_FILES):
        folder = _locate(name_or_path, revision, progress, ("config.json", *weights))
        if any(folder.glob(weights[0])):
            _refuse_if_missing(name_or_path, folder, [] if (folder / "config.json").is_file() else ["config.json"])
            return folder
    raise ConfigError(f"{name_or_path} ({folder}) lacks weights: model.safetensors, or else pytorch_model.bin")


def resolve_tokenizer(name_or_path: str, *, progress: bool = True) -> Path:
    """The local folder with tokenizer.json and what belongs to it, for a tokenizer that is not the model's own."""
    folder = _locate(name_or_path, None, progress, _TOKENIZER_FILES)
    _refuse_if_missing(name_or_path, folder, [] if (folder / "tokenizer.json").is_file() else ["tokenizer.json"])
    return folder


def _locate(name_or_path: str, revision: str | None, progress: bool, patterns: tuple[str, ...]) -> Path:
    if not name_or_path.strip():
        raise ConfigError("the model's name is empty: give a folder, a .gguf file or a Hugging Face name")
    local = os.path.expanduser(name_or_path)
    is_gguf = local.lower().endswith(".gguf")
    # os.path's tests, unlike pathlib's, never raise: the name may be anything.
    if not os.path.exists(local):
        if is_gguf or _looks_like_path(name_or_path):
            raise ConfigError(f"there is no such model folder or file: {local}")
        return _download(name_or_path, revision, progress, patterns)
    if revision is not None:
        raise ConfigError(f"revision {revision!r} is for models on the Hugging Face Hub, and {local} is local")
    if os.path.isdir(local):
        return Path(local)
    if not is_gguf:
        raise ConfigError(f"{local} is a file; a model is a folder, a .gguf file or a Hugging Face name")
    return converted_folder(Path(local), progress)


def _looks_like_path(name: str) -> bool:
    """Whether the user can only have meant a place on this machine, which is nobody else's business."""
    return name.startswith((".", "/", "~")) or name.endswith("/") or name.count("/") > 1 or "\\" in name


def _download(name: str, revision: str | None, progress: bool, patterns: tuple[str, ...]) -> Path:
    try:
        with _progress_bars(progress):
            folder = snapshot_download(
                name, revision=revision, allow_patterns=list(patterns), ignore_patterns=list(_IGNORED)
            )
    # The library lets the exceptions of its HTTP client through, which is not the same in all its versions.
    except Exception as error:
        raise ConfigError(_explain(name, revision, error)) from error
    return Path(folder)


@contextlib.contextmanager
def _progress_bars(wanted: bool) -> Iterator[None]:
    """The library draws its bars unless a switch of its own says no: set it for this one download."""
    if wanted or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def _explain(name: str, revision: str | None, error: Exception) -> str:
    endpoint = constants.ENDPOINT
    if isinstance(error, HFValidationError):
        return f"{name!r} is neither a local folder nor a Hugging Face name (such as Qwen/Qwen3-8B): {error}"
    if isinstance(error, GatedRepoError):
        return f"{name} is gated: accept its terms at {endpoint}/{name}, and set HF_TOKEN to a token that may read it"
    if isinstance(error, RepositoryNotFoundError):
        return f"{name} is neither a local folder nor a model at {endpoint}; if it is private there, set HF_TOKEN"
    if isinstance(error, RevisionNotFoundError):
        return f"{name} has no revision {revision!r} at {endpoint}"
    if isinstance(error, LocalEntryNotFoundError):
        if constants.HF_HUB_OFFLINE:
            return f"{name} is not complete in {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE forbids to download it"
        reason = error.__cause__ or error
        return f"{name} could not be downloaded from {endpoint}, and is not complete in the cache: {reason}"
    if isinstance(error, HfHubHTTPError):
        hint = "; set HF_TOKEN to a token that may read it" if error.response.status_code in (401, 403) else ""
        return f"{name} could not be downloaded from {endpoint}: {error}{hint}"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"the disk is full: {name} could not be written to {constants.HF_HUB_CACHE}; "
            "free some space, or set HF_HOME to another disk"
        )
    return f"{name} could not be downloaded from {endpoint}: {type(error).__name__}: {error}"


def _refuse_if_missing(name: str, folder: Path, missing: list[str]) -> None:
    if not missing:
        return
    hints = []
    if any(folder.glob("*.gguf")):
        hints.append("it holds .gguf files: name one of them")
    if "*.safetensors" in missing and any(folder.glob("*.bin")):
        hints.append("its .bin files are pickles, which are not loaded")
    if "tokenizer.json" in missing and (folder / "tokenizer.model").is_file():
        hints.append("SentencePiece's tokenizer.model is not supported")
    raise ConfigError(f"{name} ({folder}) lacks {', '.join(missing)}" + "".join(f"; {hint}" for hint in hints))
