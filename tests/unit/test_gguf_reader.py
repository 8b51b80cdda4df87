"""Whatever a GGUF file holds, reading it gives its content or a WeightsError, soon."""

import contextlib
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minserve.errors import ConfigError, WeightsError
from minserve.weights.gguf import convert_gguf
from minserve.weights.gguf_reader import GGUFFile
from tests.unit.gguf_files import tiny_model, write_gguf

_UINT8, _UINT32, _FLOAT32, _STRING, _ARRAY = 0, 4, 6, 8, 9


def string(text):
    encoded = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def key(name, kind, value):
    return string(name) + struct.pack("<I", kind) + value


def array(kind, length, items=b""):
    return struct.pack("<IQ", kind, length) + items


def tensor_info(name="t", shape=(4,), kind=0, offset=0):
    return string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def header(keys=(), tensors=(), *, magic=b"GGUF", version=3, num_keys=None, num_tensors=None):
    counts = (len(tensors) if num_tensors is None else num_tensors, len(keys) if num_keys is None else num_keys)
    content = magic + struct.pack("<IQQ", version, *counts) + b"".join(keys) + b"".join(tensors)
    return content + b"\0" * (-len(content) % 32)


@pytest.fixture
def read(tmp_path):
    def read(content):
        (tmp_path / "model.gguf").write_bytes(content)
        return GGUFFile(tmp_path / "model.gguf")

    return read


def test_metadata_and_tensors_are_read(read):
    keys = [
        key("name", _STRING, string("é")),
        key("eps", _FLOAT32, struct.pack("<f", 1e-5)),
        key("sizes", _ARRAY, array(_UINT8, 2, b"\x07\x09")),
        key("words", _ARRAY, array(_STRING, 2, string("a") + string(""))),
    ]
    values = np.arange(6, dtype=np.float32)
    file = read(header(keys, [tensor_info("t", shape=(3, 2))]) + values.tobytes())
    assert file.metadata == {"name": "é", "eps": 1e-5, "sizes": [7, 9], "words": ["a", ""]}
    tensor = file.tensors["t"]
    assert tensor.shape == (2, 3)
    np.testing.assert_array_equal(tensor.rows.view(np.float32), values.reshape(2, 3))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot be read"),
        (b"GG", "ends inside its header"),
        (header(magic=b"PK\x03\x04"), "does not begin with 'GGUF'"),
        (header(version=1), "version 0x1; versions 2 and 3"),
        (header(version=0x03000000), "version 0x3000000; .*little-endian"),
        (header(num_keys=2**63), "ends inside its header"),
        (header(num_tensors=2**63), "ends inside its header"),
        (header([key("k", _ARRAY, array(_UINT8, 2**60))]), "ends inside its header"),
        (header([key("k", _ARRAY, array(_STRING, 2**60))]), "ends inside its header"),
        (header([key("k", _ARRAY, array(_ARRAY, 1, array(_UINT8, 0)))]), "unknown value type 9"),
        (header([key("k", 77, b"")]), "unknown value type 77"),
        (header([key("k", _STRING, struct.pack("<Q", 2**64 - 1))]), "ends inside its header"),
        (header([key("k", _STRING, string(b"\xff"))]), "is not UTF-8"),
        (header([key("k", _UINT8, b"\0")] * 2), "the key 'k' appears twice"),
        (header([key("general.alignment", _UINT32, struct.pack("<I", 0))]), "alignment is 0, not a power of two"),
        (header([key("general.alignment", _STRING, string("32"))]), "alignment must be of type int"),
        (header([], [tensor_info(shape=())]), "has 0 dimensions"),
        (header([], [tensor_info(shape=(1,) * 5)]), "has 5 dimensions"),
        (header([], [tensor_info(kind=9999)]), "has the unknown type 9999"),
        (header([], [tensor_info(shape=(0,))]), r"has the shape \(0,\)"),
        (header([], [tensor_info(kind=2, shape=(31,))]), r"of type Q4_0 has the shape \(31,\)"),
        (header([], [tensor_info()]), "is the download complete"),
        (header([], [tensor_info(shape=(2**63, 2**63))]), "is the download complete"),
        (header([], [tensor_info(offset=2**63)]), "is the download complete"),
        (header([], [tensor_info()] * 2) + bytes(64), "the tensor 't' appears twice"),
    ],
)
def test_a_malformed_file_is_refused_with_its_fault(read, content, message):
    with pytest.raises(WeightsError, match=message):
        read(content)


def test_a_folder_is_no_gguf_file(tmp_path):
    with pytest.raises(WeightsError, match="cannot be read"):
        GGUFFile(tmp_path)


@pytest.fixture(scope="module")
def intact(tmp_path_factory):
    """A whole, valid file."""
    return write_gguf(tmp_path_factory.mktemp("gguf") / "model.gguf", tiny_model("llama")).read_bytes()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("damaged")


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_cut_file_is_refused(intact, folder, data):
    length = data.draw(st.integers(0, len(intact) - 1))
    (folder / "model.gguf").write_bytes(intact[:length])
    with pytest.raises(WeightsError):
        GGUFFile(folder / "model.gguf")


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_an_overwritten_header_converts_or_is_refused_with_a_config_error(intact, folder, data):
    # Before and after the token list, of which most bytes are text.
    tokens, after = intact.index(b"tokenizer.ggml.tokens"), intact.index(b"tokenizer.ggml.bos_token_id")
    end_of_header = intact.rindex(b"ffn_") + 64
    places = st.one_of(st.integers(0, tokens + 40), st.integers(after, end_of_header))
    damaged = bytearray(intact)
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(places)] = data.draw(st.integers(0, 255))
    (folder / "model.gguf").write_bytes(damaged)
    with contextlib.suppress(ConfigError):
        convert_gguf(folder / "model.gguf", folder, progress=False)
