"""Flags of sparse requests and of host memory: how they are spelled, where they go, and which cannot be together."""

import pytest

from minserve.cli import engine_config_of, main
from minserve.config import MOST_AUTO_DRAFTS, EngineConfig
from minserve.errors import ConfigError
from minserve.flags import parse_args
from minserve.spec.lengths import AdaptiveLength


def config_of(tmp_path, *argv, head=False):
    """What the engine is built from, by a command line. head: a draft head is there."""
    folder = tmp_path / "head" if head else None
    return engine_config_of(parse_args(argv), tmp_path, eos_token_ids=(2,), token_id_ranges=(), draft_folder=folder)


def who(tmp_path, *argv):
    config = config_of(tmp_path, "--host-kv", "1GiB", *argv)
    return config.sparse, config.sparse_above


@pytest.mark.parametrize(
    "argv", [["--sparse", "above", "4k"], ["--sparse", "above 4k"], ["--sparse", "above:4000"], ["--sparse=above:4k"]]
)
def test_above_some_length_is_two_words_or_one_with_a_colon(tmp_path, argv):
    assert who(tmp_path, *argv) == ("above", 4000)


def test_under_pressure_is_the_default_and_never_is_said_so(tmp_path):
    assert who(tmp_path) == who(tmp_path, "--sparse", "pressure") == ("pressure", 0)
    assert who(tmp_path, "--sparse", "never") == ("never", 0)


def test_above_zero_is_everybody(tmp_path):
    assert who(tmp_path, "--sparse", "above", "0", "--working-set-blocks", "8") == ("above", 0)


def test_the_others_reach_the_engine(tmp_path):
    config = config_of(
        tmp_path,
        *["--host-kv", "auto", "--host-kv-dtype", "fp8", "--working-set-blocks", "64"],
        *["--fetch", "fixed", "--fetch-ratio", "0.1"],
        *["--lookahead", "draft", "--verify-drafts", "2", "--miss-policy", "recall", "--num-draft-tokens", "3"],
        head=True,
    )
    assert (config.host_kv, config.host_kv_dtype, config.working_set_blocks) == ("auto", "fp8", 64)
    assert (config.fetch, config.fetch_ratio) == ("fixed", 0.1)
    assert (config.lookahead, config.verify_drafts, config.miss_policy) == ("draft", 2, "recall")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--sparse", "above"], "none of never, pressure, above N (such as above 4k)"),
        (["--sparse", "sometimes"], "'sometimes' is none of"),
        (["--sparse", "never", "4k"], "'never 4k' is none of"),
        (["--sparse", "above", "4k", "5k"], "'4k 5k' is not a size"),
        (["--sparse", "above:-1"], "'-1' is not a size"),
        (["--sparse"], "at least one argument"),
        (["--working-set-blocks", "0"], "from 1 to 4096"),
        (["--working-set-blocks", "4097"], "from 1 to 4096"),
        (["--fetch", "all"], "choose from"),
        (["--fetch-ratio", "0"], "from 0.001 to 1"),
        (["--fetch-ratio", "1.1"], "from 0.001 to 1"),
        (["--lookahead", "both"], "choose from"),
        (["--verify-drafts", "9"], "from 0 to 8"),
        (["--miss-policy", "ignore"], "choose from"),
        (["--host-kv", "some"], "or auto, or 0"),
        (["--host-kv-dtype", "fp4"], "choose from"),
    ],
)
def test_a_value_that_is_none_is_refused_in_one_line_with_what_is_allowed(capsys, argv, words):
    with pytest.raises(SystemExit) as exit_info:
        main(argv)
    err = capsys.readouterr().err
    assert exit_info.value.code == 2
    assert err.startswith(f"minserve: argument {argv[0].partition('=')[0]}: ")
    assert words in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "flag", "allowed"),
    [
        (["--sparse", "above", "4k"], "--sparse above needs --host-kv", "choose --sparse pressure or never"),
        (
            ["--sparse", "above", "4k", "--host-kv", "1GiB", "--no-enable-prefix-caching"],
            "--sparse above needs prefix caching",
            "--sparse never needs none",
        ),
        (
            ["--host-kv", "1GiB", "--no-enable-prefix-caching"],
            "--host-kv needs prefix caching",
            "leave --no-enable-prefix-caching out",
        ),
        (["--host-kv-dtype", "fp8"], "--host-kv-dtype fp8 needs --host-kv", "leave --host-kv-dtype out"),
        (["--lookahead", "draft"], "--lookahead draft needs --draft", "--lookahead current is allowed"),
        (["--verify-drafts", "1"], "--verify-drafts 1 needs --draft", "only 0 is allowed"),
    ],
)
def test_what_cannot_be_together_is_refused_with_the_flag_and_what_is_allowed(tmp_path, argv, flag, allowed):
    with pytest.raises(ConfigError, match=flag) as caught:
        config_of(tmp_path, *argv)
    assert allowed in str(caught.value)


def test_a_step_cannot_accept_more_drafts_than_it_has(tmp_path):
    with pytest.raises(ConfigError, match=r"--verify-drafts 3: .* at most 2 drafts .* allowed are 0 to 2"):
        config_of(tmp_path, "--verify-drafts", "3", "--num-draft-tokens", "2", head=True)
    assert config_of(tmp_path, "--verify-drafts", "2", "--num-draft-tokens", "2", head=True).verify_drafts == 2
    with pytest.raises(ConfigError, match="at most 3 drafts"):
        config_of(tmp_path, "--verify-drafts", "4", head=True)
    assert AdaptiveLength.most == MOST_AUTO_DRAFTS


def test_what_asks_for_nothing_needs_nothing(tmp_path):
    config_of(tmp_path, "--no-enable-prefix-caching")
    config_of(tmp_path, "--no-enable-prefix-caching", "--sparse", "never")
    config_of(tmp_path, "--verify-drafts", "0", "--lookahead", "current", "--host-kv-dtype", "auto")


def test_a_script_is_held_to_the_same():
    with pytest.raises(ConfigError, match="needs --host-kv"):
        EngineConfig.checked(model_path="x", sparse="above", sparse_above=4096)
    with pytest.raises(ConfigError, match='sparse_above 4096 needs sparse to be "above"'):
        EngineConfig.checked(model_path="x", sparse_above=4096)
    for name, value in (
        ("sparse", "always"),
        ("host_kv", "8GiB"),
        ("host_kv_dtype", "int8"),
        ("host_kv", -1),
        ("fetch_ratio", 0),
    ):
        with pytest.raises(ConfigError, match=f"^{name}: "):
            EngineConfig.checked(model_path="x", **{name: value})
