"""The command: flags, aliases, sizes, refusals, exit codes."""

import subprocess
import sys

import pytest

from minserve import __version__
from minserve.cli import engine_config_of, main, server_config_of
from minserve.errors import ConfigError
from minserve.flag_values import parse_size
from minserve.flags import NOT_SUPPORTED, parse_args


@pytest.fixture(autouse=True)
def no_key_in_the_environment(monkeypatch):
    monkeypatch.delenv("MINSERVE_API_KEY", raising=False)


def configs(tmp_path, *argv):
    args = parse_args(argv)
    server = server_config_of(args, args.model or "default", tmp_path)
    engine = engine_config_of(args, tmp_path, eos_token_ids=(2,), token_id_ranges=((0, 9),))
    return server, engine


def refusal(capsys, *argv):
    """What is printed to stderr by a command line that is refused with exit code 2."""
    with pytest.raises(SystemExit) as exit_info:
        main(argv)
    assert exit_info.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8192", 8192),
        ("64k", 64_000),
        ("64K", 65_536),
        ("1.5k", 1500),
        ("8G", 8 * 2**30),
        ("8g", 8 * 10**9),
        ("8GiB", 8 * 2**30),
        ("8GB", 8 * 10**9),
        ("512MiB", 2**29),
        ("100B", 100),
    ],
)
def test_sizes_are_spelled_as_in_vllm_and_by_the_standards(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "k", "-1", "0", "1.5", "64kk", "64 parsecs", "1e3", "0x10"])
def test_what_is_no_size_is_refused(capsys, text):
    assert "--max-model-len" in refusal(capsys, f"--max-model-len={text}")


def test_the_defaults_are_those_of_the_configuration(tmp_path):
    server, engine = configs(tmp_path)
    assert server == type(server)(model_path=str(tmp_path), served_model_names=("default",))
    assert engine == type(engine)(model_path=str(tmp_path), eos_token_ids=(2,), token_id_ranges=((0, 9),))


def test_flags_of_the_command_itself(tmp_path):
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages }}")
    args = parse_args([])
    assert (args.host, args.port, args.chat_template, args.log_level) == ("127.0.0.1", 8000, None, "info")
    args = parse_args(
        ["--host", "0.0.0.0", "--port", "9000", "--chat-template", str(template), "--log-level", "warning"]
    )
    assert (args.host, args.port, args.chat_template, args.log_level) == ("0.0.0.0", 9000, "{{ messages }}", "warning")


def test_every_flag_of_the_processes_reaches_their_configuration(tmp_path):
    server, engine = configs(
        tmp_path,
        *["--model", "org/name", "--served-model-name", "a", "b"],
        *["--api-key", "k1", "k2", "--api-key", "k3"],
        *["--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--max-num-waiting", "5"],
        *["--reasoning-parser", "deepseek_r1", "--max-request-bytes", "1MiB", "--no-page", "--shutdown-timeout", "2.5"],
        *["--load-format", "dummy", "--dtype", "float32", "--device", "cpu", "--max-model-len", "64k"],
        *["--max-num-seqs", "7", "--max-num-batched-tokens", "512", "--kv-cache-memory", "8GiB"],
        *["--gpu-memory-utilization", "0.5", "--no-enable-prefix-caching", "--seed", "3", "-tp", "1"],
        *["--rope-scaling", '{"rope_type": "yarn", "factor": 4.0}', "--quantization", "fp8"],
    )
    assert server.served_model_names == ("a", "b")
    assert (server.api_keys, server.tool_call_parser) == (("k1", "k2", "k3"), "hermes")
    assert server.reasoning_parser == "deepseek_r1"
    assert server.page is False
    assert (server.max_num_waiting, server.max_request_bytes, server.shutdown_timeout_s) == (5, 2**20, 2.5)
    assert (engine.load_format, engine.dtype, engine.device) == ("dummy", "float32", "cpu")
    assert (engine.max_model_len, engine.max_num_seqs, engine.max_num_batched_tokens) == (64_000, 7, 512)
    assert (engine.kv_cache_memory, engine.gpu_memory_utilization) == (8 * 2**30, 0.5)
    assert (engine.enable_prefix_caching, engine.seed, engine.quantization) == (False, 3, "fp8")
    assert engine.rope_scaling == {"rope_type": "yarn", "factor": 4.0}


def test_sglangs_names_are_taken_too(tmp_path):
    server, engine = configs(
        tmp_path,
        *["--model-path", "org/name", "--context-length", "4096", "--mem-fraction-static", "0.8"],
        *["--max-running-requests", "3", "--chunked-prefill-size", "256", "--tp-size", "1", "--disable-radix-cache"],
    )
    assert server.served_model_names == ("org/name",)
    assert (engine.max_model_len, engine.gpu_memory_utilization) == (4096, 0.8)
    assert (engine.max_num_seqs, engine.max_num_batched_tokens, engine.enable_prefix_caching) == (3, 256, False)


def test_a_draft_head_is_a_folder_and_its_drafts_are_auto_or_a_number(tmp_path):
    assert configs(tmp_path)[1].draft_path is None
    engine = configs(tmp_path, "--draft", "x", "--num-draft-tokens", "3", "--draft-window", "1024")[1]
    assert (engine.num_draft_tokens, engine.draft_window) == (3, 1024)
    assert configs(tmp_path, "--draft", "x", "--num-draft-tokens", "auto")[1].num_draft_tokens is None


@pytest.mark.parametrize("text", ["0", "9", "1.5", "some"])
def test_a_number_of_drafts_is_auto_or_1_to_8(capsys, text):
    assert "or auto" in refusal(capsys, "--num-draft-tokens", text)


@pytest.mark.parametrize("text", ["0", "16", "100", "2M"])
def test_a_draft_window_is_in_whole_blocks(capsys, text):
    assert "--draft-window" in refusal(capsys, "--draft-window", text)


def test_a_key_may_come_from_the_environment_and_the_flag_wins(tmp_path, monkeypatch):
    monkeypatch.setenv("MINSERVE_API_KEY", "from-env")
    assert configs(tmp_path)[0].api_keys == ("from-env",)
    assert configs(tmp_path, "--api-key", "k")[0].api_keys == ("k",)


@pytest.mark.parametrize("key", [" k", "k\n", "  ", "a\tb"])
def test_a_key_that_no_header_can_carry_is_refused_wherever_it_comes_from(tmp_path, monkeypatch, capsys, key):
    assert "--api-key" in refusal(capsys, "--api-key", key)
    monkeypatch.setenv("MINSERVE_API_KEY", key)
    with pytest.raises(ConfigError, match="MINSERVE_API_KEY"):
        configs(tmp_path)


@pytest.mark.parametrize("seconds", ["inf", "nan", "-1", "1e400"])
def test_a_time_limit_is_a_finite_number(capsys, seconds):
    assert "--shutdown-timeout" in refusal(capsys, f"--shutdown-timeout={seconds}")


def test_a_revision_without_a_model_is_refused_rather_than_ignored(capsys):
    assert "--model" in refusal(capsys, "--revision", "v2")


@pytest.mark.parametrize("name", sorted(NOT_SUPPORTED))
@pytest.mark.parametrize("value", [(), ("x",)])
def test_a_flag_that_is_not_here_yet_is_refused_in_one_line(capsys, name, value):
    err = refusal(capsys, name, *value)
    assert err.startswith(f"minserve: {name}: not supported by this version")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["-tp", "2"], "only 1 is supported by this version"),
        (["--quantization", "awq"], "choose from"),
        (["--port", "70000"], "from 0 to 65535"),
        (["--port", "http"], "not a number"),
        (["--gpu-memory-utilization", "1.5"], "from 0.01 to 1"),
        (["--dtype", "int3"], "float32"),
        (["--max-num-seqs", "0"], "from 1"),
        (["--modle", "x"], "--modle"),
        (["--max-model"], "--max-model"),
        (["--shutdown-timeout", "nan"], "at least 0"),
        (["--rope-scaling", "{"], "not JSON"),
        (["--rope-scaling", "[]"], "must be a JSON object"),
        (["--chat-template", "/no/such/file"], "/no/such/file: No such file"),
        (["--enable-auto-tool-choice"], "belong together"),
        (["--tool-call-parser", "hermes"], "belong together"),
        (["--api-key", ""], "--api-key"),
    ],
)
def test_a_wrong_flag_or_value_is_refused_in_one_line(capsys, argv, words):
    err = refusal(capsys, *argv)
    assert words in err
    assert err.count("\n") == 1


def test_a_configuration_error_is_one_line_and_exit_code_2(capsys):
    assert main(["--port", "0", "--model", "/no/such/folder"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("minserve: ")
    assert err.count("\n") == 1
    assert "/no/such/folder" in err
    assert "Traceback" not in err


def test_an_unknown_tool_call_parser_is_told_with_those_there_are(capsys):
    assert main(["--enable-auto-tool-choice", "--tool-call-parser", "morse"]) == 2
    assert "hermes" in capsys.readouterr().err


def test_an_unknown_reasoning_parser_is_told_with_those_there_are(capsys):
    assert main(["--reasoning-parser", "morse"]) == 2
    assert "auto, none, deepseek" in capsys.readouterr().err


def test_help_has_one_line_an_option_and_is_short(capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(["--help"])
    assert exit_info.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 71
    assert not [line for line in lines if line.startswith("   ")], "an option's help runs over its line"
    assert all(len(line) <= 120 for line in lines)
    assert [line for line in lines if line.endswith(":") and not line.startswith(" ")] == [
        "model:",
        "server:",
        "engine:",
        "speculation:",
        "sparse requests:",
        "general:",
    ]


def test_python_dash_m_minserve_is_the_command_and_needs_no_torch_to_say_its_version():
    code = """
import runpy, sys
sys.argv = ["minserve", "--version"]
try:
    runpy.run_module("minserve", run_name="__main__")
except SystemExit as end:
    assert end.code == 0
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"minserve {__version__}\n"


def test_limits_and_origins_reach_the_server(tmp_path):
    server, _ = configs(
        tmp_path,
        *("--api-key", "a", "b", "--max-requests-per-key", "3", "--max-connections", "9"),
        *("--max-request-bytes", "1MiB", "--allowed-origins", "https://a.example", '["https://b.example:8080"]'),
    )
    assert server.api_keys == ("a", "b")
    assert (server.max_requests_per_key, server.max_connections, server.max_request_bytes) == (3, 9, 2**20)
    assert server.allowed_origins == ("https://a.example", "https://b.example:8080")


@pytest.mark.parametrize("origin", ["a.example", "https://", "https://a/b", "[1]", "[", "", "https://a b"])
def test_what_is_no_origin_is_refused(capsys, origin):
    assert "--allowed-origins" in refusal(capsys, "--allowed-origins", origin)


def test_a_limit_for_each_key_needs_keys(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="--max-requests-per-key needs --api-key"):
        configs(tmp_path, "--max-requests-per-key", "3")
    monkeypatch.setenv("MINSERVE_API_KEY", "k")
    assert configs(tmp_path, "--max-requests-per-key", "3")[0].max_requests_per_key == 3
