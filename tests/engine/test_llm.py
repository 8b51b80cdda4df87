"""The engine in a script, on a tiny random model: what comes back, and what is refused."""

import json

import pytest
from msgspec.structs import replace

from minserve import LLM, SamplingParams, SparseParams
from minserve.errors import ConfigError, RequestError
from minserve.protocol import MAX_REQUEST_STOP_TOKEN_IDS, Delta, Outputs, SparseUsage, Stats
from tests.api.tiny import write_model_folder
from tests.engine.heads import write_head
from tests.engine.tiny import CONFIG

TINY = {"load_format": "dummy", "device": "cpu", "dtype": "float32", "kv_cache_memory": 2**22}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = write_model_folder(tmp_path_factory.mktemp("tiny"))
    (folder / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": 272}))
    return folder


@pytest.fixture(scope="module")
def llm(folder):
    return LLM(str(folder), **TINY)


@pytest.fixture
def default_model(folder, tmp_path, monkeypatch):
    """The folder takes the default model's place, and a head for it that of the default model's head."""
    head = write_head(tmp_path / "head", vocab=272)
    monkeypatch.setattr("minserve.llm.ensure_default_model", lambda: folder)
    monkeypatch.setattr("minserve.weights.default_model.DEFAULT_HEAD", head)
    return head


def test_the_default_model_drafts_with_its_own_head_and_says_the_same_without(default_model):
    drafting, plain = LLM(**TINY), LLM(draft="none", **TINY)
    assert drafting.engine.info.draft.startswith("EAGLE-3 head (SpecForge)")
    assert plain.engine.info.draft == ""
    [ours], [theirs] = (llm.generate("hello", max_tokens=20, ignore_eos=True) for llm in (drafting, plain))
    assert ours.token_ids == theirs.token_ids
    assert ours.draft_tokens > 0
    assert theirs.draft_tokens == 0


def test_the_default_models_head_is_used_with_no_other_model_unless_it_is_named(default_model, folder):
    assert LLM(str(folder), **TINY).engine.info.draft == ""
    assert LLM(str(folder), draft=str(default_model), **TINY).engine.info.draft != ""


def test_prompts_are_texts_or_token_ids_one_or_many(llm):
    ids = llm.tokenizer.encode("hello", add_special_tokens=True)
    [text], [one], many = llm.generate("hello"), llm.generate(ids), llm.generate(["hello", ids])
    assert text.prompt_token_ids == ids
    assert text.token_ids == one.token_ids == many[0].token_ids == many[1].token_ids
    assert llm.generate([]) == []


def test_a_text_is_what_its_tokens_spell_and_ends_at_max_tokens(llm):
    [completion] = llm.generate("hello", max_tokens=12, ignore_eos=True, logprobs=2)
    assert len(completion.token_ids) == len(completion.logprobs) == 12
    assert completion.text == llm.tokenizer.decode(completion.token_ids)
    assert (completion.finish_reason, completion.stop_reason) == ("length", None)


def test_a_stop_string_ends_text_tokens_and_logprobs_and_the_request(llm):
    [free] = llm.generate("hello", max_tokens=12, ignore_eos=True)
    stop = llm.tokenizer.token_text(free.token_ids[5])
    first = next(i for i, token_id in enumerate(free.token_ids) if stop in llm.tokenizer.token_text(token_id))
    [completion] = llm.generate("hello", max_tokens=12, ignore_eos=True, logprobs=0, stop=stop)
    assert completion.token_ids == free.token_ids[: first + 1]
    assert len(completion.logprobs) == first + 1
    assert completion.text == free.text[: free.text.index(stop)]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    llm.engine.step()
    assert not llm.engine.has_work


def test_one_stop_string_is_not_a_list_of_its_characters(llm):
    [free] = llm.generate("hello", max_tokens=12, ignore_eos=True)
    [completion] = llm.generate("hello", max_tokens=12, ignore_eos=True, stop=free.text + "!")
    assert completion.text == free.text


def test_as_many_stop_tokens_as_are_allowed_are_served(llm):
    ids = list(range(MAX_REQUEST_STOP_TOKEN_IDS))
    [completion] = llm.generate("hello", max_tokens=4, stop_token_ids=ids, min_tokens=4)
    assert len(completion.token_ids) == 4


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"bogus": 1}, "bogus"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"min_p": 2.0}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"seed": 2**63}, "seed"),
        ({"logprobs": 21}, "logprobs"),
        ({"logit_bias": {1: 1000.0}}, "logit_bias"),
        ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "logit_bias"),
        ({"stop_token_ids": tuple(range(MAX_REQUEST_STOP_TOKEN_IDS + 1))}, "stop_token_ids"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"max_tokens": 10_000}, "max_tokens"),
    ],
)
def test_an_option_that_cannot_be_served_is_refused_by_name_and_nothing_is_left_behind(llm, options, named):
    with pytest.raises(RequestError) as caught:
        llm.generate(["hello", "world"], **options)
    assert caught.value.param.removesuffix("[...]") == named
    stop = {"stop": options["stop"]} if "stop" in options else {}
    if named not in ("bogus", "stop"):
        with pytest.raises(RequestError):
            llm.generate("hello", SamplingParams(**{"max_tokens": 4} | options), **stop)
    assert len(llm.generate("hello", max_tokens=4, ignore_eos=True)[0].token_ids) == 4


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"bogus": 1}, "bogus"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_model_len": -1}, "max_model_len"),
        ({"kv_cache_memory": "4GiB"}, "kv_cache_memory"),
        ({"dtype": "int8"}, "dtype"),
        ({"eos_token_ids": list(range(33))}, "33 end tokens"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused_by_name(folder, options, named):
    with pytest.raises(ConfigError, match=named):
        LLM(str(folder), **TINY | options)


def test_chat_answers_the_prompt_that_the_template_writes(llm):
    messages = [{"role": "user", "content": "hi"}]
    completion = llm.chat(messages, max_tokens=3, ignore_eos=True)
    prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert llm.tokenizer.decode(completion.prompt_token_ids, skip_special_tokens=False) == prompt
    assert len(completion.token_ids) == 3


@pytest.mark.parametrize("messages", ["hello", ["hello"]])
def test_messages_that_are_no_messages_are_refused(llm, messages):
    with pytest.raises(RequestError) as error:
        llm.chat(messages)
    assert error.value.param == "messages"


@pytest.mark.parametrize(
    ("sparse", "named"),
    [
        ({"blocks": 4}, "sparse.blocks"),
        ({"cap": 0}, "sparse.cap"),
        (SparseParams(cap=0), "sparse.cap"),
        ({"mode": "always"}, "sparse.mode"),  # this engine has no host memory for it
    ],
)
def test_what_cannot_be_asked_of_a_working_set_is_refused_by_name(llm, sparse, named):
    with pytest.raises(RequestError) as caught:
        llm.generate("hello", sparse=sparse)
    assert caught.value.param == named


def test_what_is_asked_of_a_working_set_reaches_the_engine_and_what_it_did_comes_back(llm, monkeypatch):
    used = SparseUsage(
        from_token=9, steps=3, retries=0, hits=5, misses=1, cut_misses=0, surprises=0, asked=6, bytes_fetched=64
    )
    submits = []

    class Scripted:
        info = replace(llm.engine.info, num_working_set_blocks=8)
        submit = staticmethod(submits.append)

        def step(self):
            delta = Delta(request_id=submits[-1].request_id, token_ids=[65], finish_reason="length", sparse=used)
            return Outputs(deltas=[delta], stats=Stats())

        def abort(self, request_id):
            pass

    monkeypatch.setattr(llm, "engine", Scripted())
    for sparse in ({"mode": "always", "cap": 4}, SparseParams(mode="always", cap=4)):
        [completion] = llm.generate("hello", sparse=sparse)
        assert completion.sparse == used
    assert [submit.sparse for submit in submits] == [SparseParams(mode="always", cap=4)] * 2
    llm.generate("hello")
    assert submits[-1].sparse is None
