"""What users of other servers reported of speculation, each as a test that names the report by repository and number.

Drafts come from an oracle, so that many are right, and the others as wrong as they can be; or from a random head.
"""

import json
import urllib.request

import pytest
import torch

from minserve import LLM
from minserve.protocol import MAX_DRAFT_TOKENS
from tests.api.real import RealServer
from tests.engine.heads import Oracle, drafts_anew, write_head
from tests.engine.tiny import CONFIG, VOCAB, finish, submit, tiny_engine

THE, HA, YES, OU = 260, 421, 9805, 279
"""SmolLM2's tokens " the", " ha", " yes" and "ou"; 279 is " the" in Llama 3's vocabulary."""

REAL = {"device": "cpu", "dtype": "float32", "kv_cache_memory": 2**28, "max_num_seqs": 2}


def write_smollm2_head(folder, **options):
    return write_head(
        folder, hidden=576, head_dim=64, vocab=49152, eagle_aux_hidden_state_layer_ids=[2, 15, 27], **options
    )


@pytest.fixture(scope="module")
def plain(smollm2):
    """SmolLM2 without drafts."""
    return LLM(str(smollm2), **REAL)


@pytest.fixture(scope="module")
def with_head(smollm2, tmp_path_factory):
    head = write_smollm2_head(tmp_path_factory.mktemp("smollm2") / "head")
    return LLM(str(smollm2), draft=str(head), num_draft_tokens=3, **REAL)


@pytest.fixture
def drafting(with_head):
    """SmolLM2 with three drafts of a random head a step, unless a test puts an oracle in its place."""
    runner = with_head.engine._runner
    head = runner._drafter
    yield with_head
    runner._drafter = runner._decode._drafter = head


def foretell(llm, token_ids, wrong=THE, share_right=1.0):
    """Let an oracle draft for the next request, whose text is known."""
    Oracle(llm.engine, {f"llm-{llm._num_requests + 1}": token_ids}, share_right, wrong=lambda token: wrong)


def tokens_of(deltas):
    return [token for delta in deltas for token in delta.token_ids]


@pytest.mark.slow
def test_text_tokens_and_logprobs_end_where_a_stop_does_inside_accepted_drafts(plain, drafting):
    """vllm-project/vllm#47616"""
    prompt, options = "ha " * 8 + "ha", {"max_tokens": 16, "temperature": 0.0, "logprobs": 2}
    [free] = plain.generate(prompt, **options)
    begin = next(at for at in range(16) if free.token_ids[at : at + 3] == [HA] * 3)
    for share_right in (0.0, 1.0):
        foretell(drafting, free.token_ids, share_right=share_right)
        [stopped] = drafting.generate(prompt, stop=" ha ha ha", **options)
        assert stopped.text == drafting.tokenizer.decode(free.token_ids[:begin])
        assert stopped.token_ids == free.token_ids[: begin + 3]
        assert [entry.token_id for entry in stopped.logprobs] == stopped.token_ids
        assert (stopped.finish_reason, stopped.stop_reason) == ("stop", " ha ha ha")
    assert stopped.accepted_tokens >= 3


@pytest.mark.slow
def test_an_answers_text_logprobs_and_usage_end_where_a_stop_does_inside_accepted_drafts(smollm2, tmp_path):
    """vllm-project/vllm#47616, through HTTP. The head always drafts " ha", which is what the model says."""
    head = write_smollm2_head(tmp_path / "head", ids=[HA])
    server = RealServer("--dtype", "float32", "--draft", str(head), "--num-draft-tokens", "3")
    try:
        body = {"prompt": "ha " * 8 + "ha", "max_tokens": 16, "temperature": 0, "logprobs": 2, "stop": " ha ha ha"}
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{server.url}/v1/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=60) as response:
            answer = json.load(response)
    finally:
        server.end()
    [choice], usage = answer["choices"], answer["usage"]
    said = choice["logprobs"]["tokens"]
    assert "".join(said) == choice["text"] + " ha ha ha"
    assert said[-3:] == [" ha"] * 3
    assert " ha ha ha" not in "".join(said[:-1])
    assert len(said) == len(choice["logprobs"]["token_logprobs"]) == len(choice["logprobs"]["top_logprobs"])
    assert usage["completion_tokens"] == len(said)
    assert usage["draft_tokens_details"]["accepted_tokens"] >= 3
    assert any(str(head) in line for line in server.lines)


@pytest.mark.parametrize("drafter", ["random head", "oracle"])
def test_the_second_turn_of_a_chat_finds_as_much_of_the_first_with_drafts_as_without(tmp_path, drafter):
    """sgl-project/sglang#32459"""
    prompt = list(range(40))

    def second_turn(engine):
        first = tokens_of(finish(engine, submit("first", prompt, max_tokens=40, temperature=0.0))["first"])
        second = submit("second", [*prompt, *first, 1, 2, 3], max_tokens=5, temperature=0.0)
        deltas = finish(engine, second)["second"]
        return deltas[0].cached_tokens, first, tokens_of(deltas)

    plain = second_turn(tiny_engine(tmp_path))
    assert plain[0] == 64
    engine = tiny_engine(tmp_path, draft_path=str(write_head(tmp_path / "head")), num_draft_tokens=3)
    if drafter == "oracle":
        Oracle(engine, {"first": plain[1], "second": plain[2]}, share_right=0.7)
    assert second_turn(engine) == plain


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.9, "min_p": 0.1, "seed": 5}])
@pytest.mark.parametrize("banned", [OU, THE])
def test_a_token_that_is_biased_away_never_appears_though_it_is_drafted(plain, drafting, banned, sampling):
    """sgl-project/sglang#10617"""
    prompt = "The history of the city begins with the river, and"
    options = {"max_tokens": 40, "logit_bias": {banned: -100.0}, "logprobs": 1, **sampling}
    [without] = plain.generate(prompt, **options)
    # The draft is the banned token wherever the model alone would say it, and elsewhere too.
    wanted = [at for at, entry in enumerate(without.logprobs) if entry.top[0][0] == banned]
    assert (len(wanted) > 3) == (banned == THE)
    foretell(
        drafting,
        [banned if at in wanted or at % 4 == 3 else token for at, token in enumerate(without.token_ids)],
    )
    [completion] = drafting.generate(prompt, **options)
    assert banned not in completion.token_ids
    assert completion.token_ids == without.token_ids
    assert 0 < completion.accepted_tokens < completion.draft_tokens


@pytest.mark.slow
def test_a_repetition_penalty_holds_for_drafted_tokens(plain, drafting):
    """sgl-project/sglang#28179"""
    messages = [{"role": "user", "content": "Repeat yes: yes yes yes yes yes yes yes yes"}]
    options = {"max_tokens": 40, "temperature": 0.0, "repetition_penalty": 1.5}
    without = plain.chat(messages, **options)
    foretell(drafting, without.token_ids, wrong=YES, share_right=0.7)
    completion = drafting.chat(messages, **options)
    assert completion.token_ids == without.token_ids
    assert 0 < completion.accepted_tokens < completion.draft_tokens
    assert plain.chat(messages, max_tokens=40, temperature=0.0).token_ids != without.token_ids


@pytest.mark.slow
def test_log_probabilities_of_accepted_drafts_are_the_models(plain, drafting):
    """vllm-project/vllm#17876 and #34497, ggml-org/llama.cpp#27972"""
    prompt, options = "Once upon a time, in a land far away,", {"max_tokens": 40, "temperature": 0.0, "logprobs": 2}
    [without] = plain.generate(prompt, **options)
    foretell(drafting, without.token_ids, share_right=0.7)
    [completion] = drafting.generate(prompt, **options)
    assert completion.accepted_tokens > 10
    assert [entry.token_id for entry in completion.logprobs] == completion.token_ids == without.token_ids
    for ours, theirs in zip(completion.logprobs, without.logprobs, strict=True):
        assert ours.logprob < 0
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-3)
        assert [token for token, _ in ours.top] == [token for token, _ in theirs.top]
        assert [value for _, value in ours.top] == pytest.approx([value for _, value in theirs.top], abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("share_right", [None, 0.7, 1.0], ids=["random head", "some right", "all right"])
def test_a_greedy_text_is_the_same_with_drafts(plain, drafting, share_right):
    """vllm-project/vllm#41758 and #7627"""
    prompt, options = "serving " * 48, {"max_tokens": 40, "temperature": 0.0}
    [without] = plain.generate(prompt, **options)
    if share_right is not None:
        foretell(drafting, without.token_ids, share_right=share_right)
    [completion] = drafting.generate(prompt, **options)
    assert completion.token_ids == without.token_ids
    assert completion.draft_tokens > 0


LONG = {**CONFIG, "max_position_embeddings": 32768}


@pytest.mark.slow
def test_a_head_drafts_beyond_the_positions_that_its_config_counts(tmp_path):
    """vllm-project/vllm#48894 and #23072, sgl-project/sglang#6783"""
    head = write_head(tmp_path / "head", max_position_embeddings=2048)
    options = {"max_model_len": 4096, "max_num_seqs": 2}
    request = submit("a", [7 * at % VOCAB for at in range(3000)], max_tokens=4, temperature=0.0)
    plain = finish(tiny_engine(tmp_path, LONG, **options), request)["a"]
    engine = tiny_engine(tmp_path, LONG, draft_path=str(head), num_draft_tokens=3, draft_window=4096, **options)
    positions = engine._runner._drafter._head.rope_table.shape[0]
    assert positions == engine._runner._model.rope_table.shape[0] + 4 * MAX_DRAFT_TOKENS
    engine.submit(request)
    said = []
    while engine.has_work:
        said += [token for delta in engine.step().deltas for token in delta.token_ids]
        for running in engine._scheduler.running:
            if running.num_output_tokens:
                with torch.inference_mode():
                    drafts = drafts_anew(engine, running.token_ids, 3)
                assert engine._lanes.drafts[running.lane, :3].tolist() == drafts
    assert said == tokens_of(plain)


def test_a_heads_memory_does_not_grow_with_the_context(tmp_path):
    """vllm-project/speculators#684. That drafts are dropped where they are right too seldom, by the length of the text,
    is tests/unit/test_draft_lengths.py."""
    head = str(write_head(tmp_path / "head"))
    sizes = {
        tiny_engine(
            tmp_path, LONG, draft_path=head, max_num_seqs=2, max_model_len=length, kv_cache_memory=2**24
        )._runner._drafter.nbytes
        for length in (4096, 8192, 32768)
    }
    assert len(sizes) == 1


def test_a_text_of_many_times_the_window_is_the_same_with_drafts(tmp_path):
    """vllm-project/speculators#684"""
    requests = [
        submit(name, [at * at % 89 for at in range(length)], max_tokens=400, temperature=0.9, seed=length)
        for name, length in (("long", 5000), ("short", 30))
    ]
    options = {"max_num_seqs": 2, "max_model_len": 8192}
    plain = finish(tiny_engine(tmp_path, LONG, **options), *requests)
    head = str(write_head(tmp_path / "head"))
    engine = tiny_engine(tmp_path, LONG, draft_path=head, num_draft_tokens=3, draft_window=64, **options)
    drafted = finish(engine, *requests)
    for name in plain:
        assert tokens_of(drafted[name]) == tokens_of(plain[name])
        assert drafted[name][-1].accepted_tokens > 20
