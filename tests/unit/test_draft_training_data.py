"""Prompts, answers, and the whole way from them to a head that drafts."""

import json

import pytest

from minserve import LLM
from tests.unit.draft_training_model import write_model
from tools.draft_training import templates
from tools.draft_training.answers import Lengths, generate, read_texts, sampling
from tools.draft_training.command import main
from tools.draft_training.prompts import Prompt, is_held_out, read_prompts, write_prompts

LENGTHS = Lengths(chat=12, document=10, longest=60)
PROMPTS = [
    Prompt("chat", "chat", ["hello?"]),
    Prompt("chat", "chat", ["hello again?", "and then?"]),
    Prompt("document", "document", text="hello hello " * 40),
    Prompt("document", "document, asked", ["What is it?"], "hello " * 40, held_out=True),
    *(Prompt("chat", "chat", [f"hello {number}?"]) for number in range(12)),
]


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = write_model(tmp_path_factory.mktemp("model"), scale=5.0)
    return LLM(str(folder), device="cpu", dtype="float32", max_num_seqs=4, kv_cache_memory=2**22)


def answer(llm, path, prompts=PROMPTS, enough=1000):
    return generate(llm, prompts, path, LENGTHS, is_over=lambda num_texts: num_texts >= enough, progress=False)


def test_a_text_is_what_was_asked_and_what_the_engine_says_to_it(llm, tmp_path):
    assert answer(llm, tmp_path / "answers") == len(PROMPTS)
    texts = {text.prompt: text for text in read_texts(tmp_path / "answers")}
    assert set(texts) == set(range(len(PROMPTS)))
    for number, text in texts.items():
        assert (text.kind, text.held_out) == (PROMPTS[number].kind, PROMPTS[number].held_out)
        if len(PROMPTS[number].turns) < 2:
            params = sampling(number, LENGTHS.answer(PROMPTS[number]))
            [completion] = llm.generate([text.ids[: text.start]], params)
            assert completion.token_ids == text.ids[text.start :]


def test_a_document_and_its_answer_are_as_long_as_wanted(llm, tmp_path):
    answer(llm, tmp_path / "answers")
    texts = {text.prompt: text for text in read_texts(tmp_path / "answers")}
    plain, asked = texts[2], texts[3]
    assert plain.start == LENGTHS.longest - LENGTHS.document
    assert asked.start <= LENGTHS.longest - LENGTHS.document


def test_a_second_turn_is_asked_behind_the_first_answer(llm, tmp_path):
    answer(llm, tmp_path / "answers")
    [text] = (text for text in read_texts(tmp_path / "answers") if text.prompt == 1)
    whole = llm.tokenizer.decode(text.ids, skip_special_tokens=False)
    assert whole.index("hello again?") < whole.index("and then?")
    assert whole.index("hello again?") < len(llm.tokenizer.decode(text.ids[: text.start])) < whole.index("and then?")


def test_a_prompt_that_leaves_no_room_for_an_answer_is_left_out(llm, tmp_path):
    prompts = [Prompt("chat", "chat", ["hello " * 1000]), Prompt("chat", "chat", ["hello?"])]
    answer(llm, tmp_path / "answers", prompts)
    assert [text.prompt for text in read_texts(tmp_path / "answers")] == [1]


def test_what_was_interrupted_goes_on_behind_the_last_whole_line(llm, tmp_path):
    path = tmp_path / "answers"
    answer(llm, path, enough=6)
    first = read_texts(path)
    assert 6 <= len(first) < len(PROMPTS)
    with path.open("ab") as file:
        file.write(b'[3,"chat",fal')
    answer(llm, path)
    texts = read_texts(path)
    assert texts[: len(first)] == first
    assert sorted(text.prompt for text in texts) == sorted({text.prompt for text in texts})
    assert not llm.engine.has_work


def test_prompts_are_read_as_they_were_written(tmp_path):
    write_prompts(tmp_path / "prompts.xz", PROMPTS)
    assert read_prompts(tmp_path / "prompts.xz") == PROMPTS


def test_what_is_held_out_depends_on_its_name_alone():
    names = [f"name {number}" for number in range(5000)]
    held_out = [name for name in names if is_held_out(name)]
    assert 0.01 < len(held_out) / len(names) < 0.03
    assert all(is_held_out(name) for name in held_out)


def test_questions_written_by_hand_are_no_forms():
    forms = [form for group in (templates.TOPIC, templates.TERM, templates.PASSAGE, templates.QUOTE) for form in group]
    assert all("{x}" in form or "{p}" in form for form in forms)
    assert not any("{" in question for question in templates.WRITTEN)


@pytest.mark.slow
def test_a_trained_head_drafts_better_than_a_new_one(tmp_path):
    write_model(tmp_path / "model", scale=5.0, tie_word_embeddings=False)
    chats = [Prompt("chat", "chat", [f"hello {number}?"], held_out=number % 10 == 0) for number in range(80)]
    documents = [Prompt("document", "document", text=f"hello {n} " * 30, held_out=n % 5 == 0) for n in range(10)]
    write_prompts(tmp_path / "prompts.xz", chats + documents)
    options = ["--model", str(tmp_path / "model"), "--prompts", str(tmp_path / "prompts.xz"), "--device", "cpu"]
    options += ["--dtype", "float32", "--kv-cache-memory", str(2**23), "--texts", "90", "--chat-tokens", "40"]
    options += ["--document-tokens", "40", "--longest", "120", "--draft-vocab", "200", "--batch-tokens", "1024"]
    options += ["--learning-rate", "1e-2", "--max-num-seqs", "16"]

    def accepted(folder, steps):
        main(["run", "--out", str(folder), "--steps", str(steps), *options])
        rows = [json.loads(line) for line in (folder / "evaluation.jsonl").read_text().splitlines()]
        # At 0 such a model says the same few tokens over and over, and any head may happen to know them.
        return {row["group"]: row["tokens_per_step"] for row in rows if row["temperature"] == 0.7}

    new, trained = accepted(tmp_path / "new", 0), accepted(tmp_path / "trained", 100)
    lines = [json.loads(line) for line in (tmp_path / "trained" / "training.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < 0.8 * losses[0]
    assert trained["chat"] > new["chat"] + 0.2
    assert trained["document"] > new["document"] + 0.2
