"""Texts under a grammar, on a random model of a few layers: it would never write any of them by itself."""

import json
import re

import pytest

from minserve.config import EngineConfig
from minserve.engine.build import build_engine
from minserve.errors import RequestError
from minserve.protocol import SamplingParams, Submit
from minserve.text import grammars
from minserve.text.tokenizer import Tokenizer
from minserve.text.toolcalls import HermesParser
from tests.api.tiny import write_model_folder, write_random_model
from tests.engine.heads import Oracle, write_head
from tests.engine.tiny import finish

COLOURS = ["red", "green", "blue"]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": COLOURS}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
PART = {
    "json": grammars.json_part(SCHEMA),
    "regex": grammars.regex_part(r"^[a-c]{2,5}-\d{3}$"),
    "choice": grammars.choice_part(COLOURS),
    "lark": grammars.grammar_part('start: "x" (" and x")~0..3'),
    "gbnf": grammars.grammar_part('root ::= "y" rest?\nrest ::= " or y"'),
    "call": {"tool": SCHEMA},
}
KINDS = list(PART)


def grammar_of(kind):
    if kind == "call":
        tools = [grammars.Tool("first", SCHEMA), grammars.Tool("second", {"type": "object", "maxProperties": 0})]
        return grammars.whole(None, tools, HermesParser.call_format, several=False, begin="closed")
    return grammars.canonical(grammars.alone(PART[kind]))


def fits(kind, text):
    if kind == "json":
        return is_valid(json.loads(text))
    if kind == "call":
        call = json.loads(re.fullmatch(r"<tool_call>\n(.*)\n</tool_call>", text, re.DOTALL)[1])
        return is_valid(call["arguments"]) if call["name"] == "first" else call == {"name": "second", "arguments": {}}
    if kind == "choice":
        return text in COLOURS
    pattern = {"regex": r"[a-c]{2,5}-\d{3}", "lark": "x( and x){0,3}", "gbnf": "y( or y)?"}[kind]
    return re.fullmatch(pattern, text) is not None


def is_valid(value):
    assert sorted(value) == ["age", "name", "tags"]
    assert len(value["name"]) <= 6
    assert 0 <= value["age"] <= 150
    return len(value["tags"]) <= 2 and set(value["tags"]) <= set(COLOURS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = write_model_folder(tmp_path_factory.mktemp("model"))
    write_random_model(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder):
    return Tokenizer.from_folder(folder)


@pytest.fixture
def engine_of(folder, tokenizer):
    """engine_of(...) -> an engine of the random model."""

    def start(**options):
        defaults = {"load_format": "dummy", "device": "cpu", "dtype": "float32", "kv_cache_memory": 2**22}
        of_model = {"model_path": str(folder), "tokenizer_path": str(folder)}
        of_tokens = {"eos_token_ids": tokenizer.eos_token_ids, "token_id_ranges": tokenizer.token_id_ranges}
        return build_engine(EngineConfig.checked(**(defaults | of_model | of_tokens | options)))

    return start


def submit(request_id, kind, prompt=(1, 2, 3), **params):
    params = {"max_tokens": 600, "seed": sum(map(ord, request_id))} | params
    grammar = None if kind is None else grammar_of(kind)
    return Submit(
        request_id=request_id, prompt_token_ids=list(prompt), params=SamplingParams(**params), grammar=grammar
    )


def tokens_of(deltas):
    return [token for delta in deltas for token in delta.token_ids]


def text_of(tokenizer, deltas):
    return tokenizer.decode(tokens_of(deltas))


@pytest.mark.slow
@pytest.mark.parametrize("run_ahead", [0, 1])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_kind_of_grammar_holds_beside_each_other_and_beside_texts_without(
    engine_of, tokenizer, temperature, run_ahead
):
    engine = engine_of(run_ahead=run_ahead)
    names = [(f"{kind}-{number}", kind) for kind in [*KINDS, None] for number in range(3)]
    deltas = finish(engine, *(submit(name, kind, temperature=temperature) for name, kind in names))
    for name, kind in names:
        if kind is not None:
            assert deltas[name][-1].finish_reason == "stop"
            assert fits(kind, text_of(tokenizer, deltas[name])), name


@pytest.mark.parametrize("kind", KINDS)
def test_the_text_is_the_same_alone_and_run_ahead_beside_others(engine_of, tokenizer, kind):
    alone = text_of(tokenizer, finish(engine_of(run_ahead=0), submit("a", kind))["a"])
    deltas = finish(engine_of(run_ahead=1), submit("b", None, max_tokens=90), submit("a", kind), submit("c", "json"))
    assert text_of(tokenizer, deltas["a"]) == alone


def test_others_run_ahead_while_a_text_under_a_grammar_waits_for_its_token(engine_of):
    engine = engine_of(run_ahead=1)
    engine.submit(submit("free", None, max_tokens=40, ignore_eos=True))
    engine.submit(submit("bound", "json"))
    num_tokens = {"free": [], "bound": []}
    for _ in range(24):
        counts = {delta.request_id: len(delta.token_ids) for delta in engine.step().deltas}
        for name, own in num_tokens.items():
            own.append(counts.get(name, 0))
    # The first result is there after the second step; from then on one of them misses no step.
    assert num_tokens["free"] == [0] + [1] * 23
    assert num_tokens["bound"] == [0] + [1, 0] * 11 + [1]


@pytest.mark.parametrize(
    "params",
    [
        {"logit_bias": dict.fromkeys(range(60, 90), 100.0)},
        {"repetition_penalty": 3.0, "presence_penalty": -2.0, "frequency_penalty": 2.0},
        {"min_tokens": 500},
        {"ignore_eos": True},
        {"top_k": 1, "min_p": 0.9, "temperature": 5.0},
        {"logprobs": 3},
    ],
)
def test_what_else_a_request_asks_for_cannot_break_its_grammar(engine_of, tokenizer, params):
    kinds = [kind for kind in KINDS if kind != "lark"]  # may end early, and min_tokens bars that where it can
    deltas = finish(engine_of(), *(submit(kind, kind, **params) for kind in kinds))
    for kind in kinds:
        assert deltas[kind][-1].finish_reason == "stop"
        assert fits(kind, text_of(tokenizer, deltas[kind]))


def test_an_end_token_ends_a_text_only_where_the_grammar_may_end(engine_of, tokenizer):
    [end] = tokenizer.eos_token_ids
    wants_end = {"logit_bias": {end: 100.0}, "temperature": 0.0}
    deltas = finish(engine_of(), submit("lark", "lark", **wants_end), submit("json", "json", **wants_end))
    assert text_of(tokenizer, deltas["lark"]) == "x"
    assert deltas["lark"][-1].stop_token_id == end
    assert is_valid(json.loads(text_of(tokenizer, deltas["json"])))


def test_min_tokens_bars_an_end_that_the_grammar_leaves_open(engine_of, tokenizer):
    [end] = tokenizer.eos_token_ids
    deltas = finish(
        engine_of(), submit("a", "lark", min_tokens=300, logit_bias={end: 100.0}), submit("b", "lark", ignore_eos=True)
    )
    assert [text_of(tokenizer, deltas[name]) for name in "ab"] == ["x and x and x and x"] * 2


def test_blanks_between_the_tokens_of_json_are_bounded_for_a_model_that_wants_nothing_else(engine_of, tokenizer):
    blanks = {token: 100.0 for blank in " \n" for token in tokenizer.encode(blank, add_special_tokens=False)}
    text = text_of(tokenizer, finish(engine_of(), submit("a", "json", logit_bias=blanks, max_tokens=900))["a"])
    assert is_valid(json.loads(text))
    assert max(map(len, re.findall(r"\s+", text))) == 40


def test_a_text_that_is_whole_needs_no_end_token(engine_of, tokenizer):
    deltas = finish(engine_of(), submit("a", "choice"))["a"]
    assert deltas[-1].stop_token_id is None
    assert deltas[-1].finish_reason == "stop"


def test_max_tokens_cuts_a_text_short(engine_of):
    [*_, last] = finish(engine_of(), submit("a", "json", max_tokens=5))["a"]
    assert last.finish_reason == "length"


def test_a_text_that_is_whole_with_its_last_token_has_not_been_cut(engine_of, tokenizer):
    whole = [token for delta in finish(engine_of(), submit("a", "choice"))["a"] for token in delta.token_ids]
    [*_, last] = finish(engine_of(), submit("a", "choice", max_tokens=len(whole)))["a"]
    assert last.finish_reason == "stop"


@pytest.mark.parametrize("run_ahead", [0, 1])
@pytest.mark.parametrize("host_kv", [0, 2**22])
def test_a_preempted_text_goes_on_where_it_was_in_its_grammar(engine_of, tokenizer, run_ahead, host_kv):
    page = 16 * 2 * 2 * 2 * 8 * 4  # tokens, K and V, layers, heads, head_dim, float32
    roomy, tight = (
        engine_of(run_ahead=run_ahead),
        engine_of(run_ahead=run_ahead, kv_cache_memory=46 * page, max_model_len=704, host_kv=host_kv),
    )
    requests = [submit(f"{kind}-{number}", kind, prompt=range(100)) for number in range(4) for kind in ("json", "call")]
    requests += [submit("free", None, prompt=range(50), max_tokens=200)]
    expected, deltas = finish(roomy, *requests), finish(tight, *requests)
    assert tight.step().stats.num_preemptions > 0
    for request in requests:
        name = request.request_id
        assert text_of(tokenizer, deltas[name]) == text_of(tokenizer, expected[name])


def test_an_aborted_text_leaves_the_others_and_their_lanes_alone(engine_of, tokenizer):
    engine = engine_of(run_ahead=1, max_num_seqs=2)
    for name, kind in (("gone", "json"), ("a", "json"), ("b", None), ("c", "choice")):
        engine.submit(submit(name, kind, max_tokens=60 if kind is None else 600))
    deltas = {}
    while engine.has_work:
        for delta in engine.step().deltas:
            deltas.setdefault(delta.request_id, []).append(delta)
        engine.abort("gone")
        engine.check()
    assert deltas["gone"][-1].finish_reason == "abort"
    assert fits("json", text_of(tokenizer, deltas["a"]))
    assert fits("choice", text_of(tokenizer, deltas["c"]))
    alone = finish(engine_of(), submit("b", None, max_tokens=60))
    assert text_of(tokenizer, deltas["b"]) == text_of(tokenizer, alone["b"])


def test_a_cached_prompt_gives_the_same_text(engine_of, tokenizer):
    engine = engine_of()
    cold, warm = (finish(engine, submit("a", "json", prompt=range(64)))["a"] for _ in range(2))
    assert (cold[0].cached_tokens, warm[0].cached_tokens) == (0, 48)
    assert text_of(tokenizer, cold) == text_of(tokenizer, warm)


@pytest.mark.slow
@pytest.mark.parametrize("run_ahead", [0, 1])
@pytest.mark.parametrize("drafter", ["random head", "oracle"])
def test_with_drafts_the_texts_are_the_same(engine_of, tokenizer, tmp_path, drafter, run_ahead):
    write_head(tmp_path, vocab=265)
    engine = engine_of(draft_path=str(tmp_path), num_draft_tokens=3, run_ahead=run_ahead)
    options = [{}, {"temperature": 0.0}, {"min_tokens": 40}, {"ignore_eos": True, "repetition_penalty": 1.5}]
    kinds = [*KINDS, None]
    requests = [
        submit(f"{kind}-{number}", kind, max_tokens=300, **own) for kind in kinds for number, own in enumerate(options)
    ]
    expected = {name: tokens_of(deltas) for name, deltas in finish(engine_of(), *requests).items()}
    if drafter == "oracle":
        Oracle(engine, expected, share_right=0.7, wrong=lambda token: (token + 1) % 265)
    deltas = finish(engine, *requests)
    assert {name: tokens_of(own) for name, own in deltas.items()} == expected
    if drafter == "oracle":
        for name, own in deltas.items():
            if len(expected[name]) > 20:
                assert own[-1].accepted_tokens > len(expected[name]) // 4, name


def test_a_grammar_that_comes_to_nothing_ends_in_an_error(engine_of):
    grammar = grammars.canonical(grammars.alone(grammars.choice_part(["<|im_end|>"])))
    engine = engine_of()
    with pytest.raises(RequestError, match="cannot be compiled"):
        engine.submit(Submit("a", [1], SamplingParams(max_tokens=9), grammar='{"grammars": [{"lark_grammar": "("}]}'))
    assert not engine.has_work
    # The same letters as a special token's, but spelled out.
    deltas = finish(engine, Submit("b", [1], SamplingParams(max_tokens=90), grammar=grammar))["b"]
    assert len([token for delta in deltas for token in delta.token_ids]) == len("<|im_end|>")


def test_a_text_whose_grammar_turns_out_to_cost_too_much_ends_in_an_error_that_says_so(engine_of):
    source = "start: T\nT: /(.*[ab]){900}/ & ~/.*c.{900}/"
    grammar = grammars.canonical(grammars.alone(grammars.grammar_part(source)))
    engine = engine_of()
    deltas = finish(engine, Submit("a", [1], SamplingParams(max_tokens=90), grammar=grammar), submit("b", "json"))
    assert deltas["a"][-1].finish_reason == "error"
    assert "too many" in deltas["a"][-1].error
    assert deltas["b"][-1].finish_reason == "stop"


def test_an_engine_without_a_tokenizer_says_so(engine_of):
    engine = engine_of(tokenizer_path=None)
    with pytest.raises(RequestError, match="no tokenizer"):
        engine.submit(submit("a", "json"))
