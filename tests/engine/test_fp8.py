"""An engine whose projections are in 8 bits."""

from tests.engine.tiny import tiny_engine, tokens


def test_it_serves_and_tells_how_much_its_weights_take(tmp_path):
    plain, fp8 = tiny_engine(tmp_path), tiny_engine(tmp_path, quantization="fp8")
    # Two layers of qkv [64, 32], o [32, 32], gate and up [128, 32], down [32, 64], with a scale for each row.
    rows, numbers = 2 * (64 + 32 + 128 + 32), 2 * 32 * (64 + 32 + 128 + 64)
    assert plain.info.weights_bytes - fp8.info.weights_bytes == 4 * numbers - (numbers + 4 * rows)
    assert len(tokens(fp8, [5, 6, 7])) == 8
