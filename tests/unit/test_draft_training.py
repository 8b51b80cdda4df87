"""What a draft head is trained on is what it computes when it serves."""

import pytest
import torch
import torch.nn.functional as F

from minserve.models.causal_lm import AuxStates
from minserve.spec.draft_kv import DraftKV
from minserve.weights.eagle3 import load_eagle3
from tests.unit.dense_attend import DenseAttend
from tests.unit.draft_training_model import DRAFT_VOCAB, disturb, make_head, make_target, random_texts
from tools.draft_training.attention import ChainAttention, ChainMasks
from tools.draft_training.examples import batches, choose_vocabulary, collate
from tools.draft_training.head import save_head, standard_aux_layers, take_values, unroll
from tools.draft_training.loss import soft_cross_entropy, target_probabilities
from tools.draft_training.trainer import Recipe, Trainer

QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "head_dim": 8, "tie_word_embeddings": False}
BIASED = {"attention_bias": True, "mlp_bias": True}
YARN = {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}}


@pytest.fixture(autouse=True)
def _deterministic():
    torch.manual_seed(0)


# ---- attention ----


@pytest.mark.parametrize("piece", [16, 48, None])
@pytest.mark.parametrize("window", [32, 64, 2048])
def test_a_chain_sees_the_text_before_it_as_far_as_a_head_keeps_it_and_its_own_steps(window, piece):
    num_tokens, heads, kv_heads, width = 144, 4, 2, 8
    attention = ChainAttention(ChainMasks(window, "cpu", piece))
    keys, values = [], []
    for _ in range(3):
        q, k, v = (torch.randn(2, num_tokens, count, width) for count in (heads, kv_heads, kv_heads))
        keys.append(k)
        values.append(v)
        out = attention(q, k, v)
        for row in (0, 15, 16, 31, 50, 97, 143):
            oldest = (row // 16 - window // 16) * 16
            seen = [at for at in range(row + 1) if at < 16 or at >= oldest]
            for head in range(heads):
                shared = head // (heads // kv_heads)
                k_of = torch.cat([keys[0][0, seen, shared], *(k[0, row : row + 1, shared] for k in keys[1:])])
                v_of = torch.cat([values[0][0, seen, shared], *(v[0, row : row + 1, shared] for v in values[1:])])
                expected = (k_of @ q[0, row, head] / width**0.5).softmax(0) @ v_of
                torch.testing.assert_close(out[0, row, head], expected, atol=1e-5, rtol=1e-5)


def test_the_window_in_training_is_the_window_in_serving(tmp_path):
    target = make_target(tmp_path)
    kv = DraftKV(make_head(target).config, 1, 64, torch.float32, "cpu")
    masks = ChainMasks(64, "cpu")
    for row in range(256):
        view = kv.view(torch.tensor([0]), torch.tensor([0]), torch.tensor([row]))
        num_seen = int(row + 1 - view.shift[0])
        assert num_seen == int(masks.mask(row, row + 1, 0).sum())


# ---- the head ----


@pytest.mark.parametrize("changes", [{}, QWEN3, BIASED, YARN], ids=["llama", "qwen3", "biases", "yarn"])
def test_every_row_of_the_unrolled_steps_is_a_chain_of_the_head_that_serves(tmp_path, changes):
    target = make_target(tmp_path, **changes)
    head = disturb(make_head(target, intermediate_size=40))
    head.share_with(target.model)
    token_ids = torch.randint(target.config.vocab_size, (2, 20))
    aux = target.states(token_ids).aux
    num_steps = 4
    rows = target.lm_head[head.target_ids]
    with torch.no_grad():
        steps = list(unroll(head, target.model, token_ids, aux, num_steps, ChainMasks(2048, "cpu"), rows))
        for text, start in ((0, 0), (0, 9), (1, 15)):
            attend = DenseAttend(head)
            before = aux.view(2, 20, -1)[text, : start + 1]
            hidden = head(token_ids[text, 1 : start + 2], head.combine(before), attend)[-1:]
            for step, unrolled in enumerate(steps):
                if step:
                    hidden = head(token_ids[text, start + 1 + step : start + 2 + step], hidden, attend)
                ours = unrolled.hidden.view(2, 20, -1)[text, start] @ unrolled.lm_head.T
                torch.testing.assert_close(ours, head.logits(hidden)[0], atol=1e-4, rtol=1e-4)


def test_states_of_texts_side_by_side_are_those_of_each_alone(tmp_path):
    target = make_target(tmp_path, **QWEN3)
    token_ids = torch.randint(target.config.vocab_size, (3, 17))
    states = target.states(token_ids)
    for text in range(3):
        aux = torch.empty(17, 3 * target.config.hidden_size)
        hidden = target.model(token_ids[text], DenseAttend(target.model), AuxStates(target.aux_layers, aux))
        torch.testing.assert_close(states.aux.view(3, 17, -1)[text], aux, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(states.hidden.view(3, 17, -1)[text], hidden, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("size", [48, 100])
def test_a_new_head_begins_as_the_last_layer_of_its_target(tmp_path, size):
    target = make_target(tmp_path)
    head = make_head(target, intermediate_size=size)
    head.share_with(target.model)
    token_ids = torch.randint(target.config.vocab_size, (10,))
    states = torch.randn(10, target.config.hidden_size)
    aux = torch.cat((torch.randn(10, 2 * target.config.hidden_size), states), dim=-1)
    with torch.no_grad():
        ours = head(token_ids, head.combine(aux), DenseAttend(head))
        x, residual = target.model.layers[-1](states, None, lambda layer, *rest: DenseAttend(target.model)(0, *rest))
    torch.testing.assert_close(ours, x + residual, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("own_lm_head", [False, True])
@pytest.mark.parametrize("changes", [{}, QWEN3, BIASED, YARN], ids=["llama", "qwen3", "biases", "yarn"])
def test_a_saved_head_is_loaded_as_it_was(tmp_path, changes, own_lm_head):
    target = make_target(tmp_path, **changes)
    head = disturb(make_head(target, window=64, own_lm_head=own_lm_head))
    num_bytes = save_head(head, tmp_path / "head", 256, torch.float32)
    loaded = load_eagle3(tmp_path / "head", target.config, device="cpu", dtype=torch.float32)
    assert num_bytes == (tmp_path / "head" / "model.safetensors").stat().st_size
    assert loaded.config == head.config
    assert torch.equal(loaded.target_ids, head.target_ids)
    for name, parameter in head.named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter), name


def test_training_may_begin_where_another_head_of_the_same_shape_is(tmp_path):
    target = make_target(tmp_path)
    head, other, wider = make_head(target), make_head(target), make_head(target, intermediate_size=64)
    disturb(other)
    take_values(head, other)
    for own, value in zip(head.parameters(), other.parameters(), strict=True):
        assert torch.equal(own, value)
    with pytest.raises(SystemExit, match=r"mlp\.down_proj\.weight, .*mlp\.gate_up_proj\.weight"):
        take_values(wider, other)


def test_the_three_layers_are_the_published_rule_where_there_are_enough():
    assert standard_aux_layers(30) == (2, 15, 27)
    assert standard_aux_layers(2) == (0, 1, 2)


# ---- loss ----


def test_the_loss_and_its_gradients_are_those_of_the_formula(monkeypatch):
    monkeypatch.setattr("tools.draft_training.loss.ROWS", 5)
    hidden, lm_head = torch.randn(12, 6, requires_grad=True), torch.randn(9, 6, requires_grad=True)
    probabilities = target_probabilities(torch.randn(20, 6), torch.randn(9, 6))
    rows, weights = torch.randperm(20)[:12], torch.rand(12)
    gradients = []
    losses = []
    formula = -(weights[:, None] * probabilities[rows] * F.linear(hidden, lm_head).log_softmax(-1)).sum()
    for loss in (soft_cross_entropy(hidden, lm_head, probabilities, rows, weights), formula):
        losses.append(loss)
        gradients.append(torch.autograd.grad(3.0 * loss, (hidden, lm_head)))
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*gradients)


# ---- texts ----


def test_a_batch_weighs_what_was_answered_more_than_what_was_asked():
    texts = random_texts(50, 2, 12, start=5)
    batch = collate(texts, prompt_weight=0.25)
    rows, weights = batch.rows(0)
    width = batch.token_ids.shape[1]
    # Row 3 takes token 4, the last that was asked, and drafts token 5.
    assert weights[:11].tolist() == [0.25] * 4 + [1.0] * 7
    assert rows.tolist() == [*range(11), *range(width, width + 11)]
    assert batch.rows(4)[0].tolist() == [*range(7), *range(width, width + 7)]


def test_each_text_comes_once_before_any_comes_again_and_batches_are_as_large_as_wanted():
    texts = [text for length in (10, 70, 130, 200) for text in random_texts(50, 10, length)]
    endless = batches(texts, 512, document_share=0.0, seed=1)
    seen = []
    while len(seen) < len(texts):
        batch = next(endless)
        seen += [id(text) for text in batch]
        width = collate(batch, 0.1).token_ids.shape[1]
        assert width * len(batch) <= 512
    assert sorted(seen) == sorted(id(text) for text in texts)


def test_the_vocabulary_is_what_the_target_says_most_often():
    [text] = random_texts(50, 1, 8, start=4)
    text.ids[:] = [9, 9, 9, 9, 7, 7, 3, 3]
    assert choose_vocabulary([text], 3, 50).tolist() == [3, 7, 9]
    assert choose_vocabulary([text], 2, 50).tolist() == [3, 7]
    assert choose_vocabulary([text], 100, 50).tolist() == list(range(50))


# ---- the loop ----


def new_trainer(folder, steps, target):
    recipe = Recipe(steps=steps, batch_tokens=128, unroll=3, learning_rate=2e-3, document_share=0.3)
    return Trainer(target, make_head(target), folder, recipe)


def test_an_interrupted_training_goes_on_as_if_it_had_not_been(tmp_path):
    target = make_target(tmp_path / "model")
    vocab_size = target.config.vocab_size
    texts = random_texts(vocab_size, 12, 30) + random_texts(vocab_size, 4, 60, kind="document")
    (tmp_path / "whole").mkdir()
    (tmp_path / "parts").mkdir()
    whole = new_trainer(tmp_path / "whole", 8, target)
    assert not whole.load()
    whole.run(texts, progress=False)

    first = new_trainer(tmp_path / "parts", 8, target)
    train, stops = first.train, iter([False] * 5 + [True])

    def stop_in_the_sixth(batch):
        if next(stops):
            raise KeyboardInterrupt
        loss = train(batch)
        first.step += 1
        first.save()
        first.step -= 1
        return loss

    first.train = stop_in_the_sixth
    with pytest.raises(KeyboardInterrupt):
        first.run(texts, progress=False)
    second = new_trainer(tmp_path / "parts", 8, target)
    assert second.load()
    assert second.step == 5
    second.run(texts, progress=False)
    for ours, theirs in zip(second.head.parameters(), whole.head.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_the_learning_rate_rises_and_falls_with_the_time_that_is_spent():
    recipe = Recipe(seconds=100.0, learning_rate=1.0)
    rates = [recipe.rate(recipe.progress(step=0, seconds=seconds)) for seconds in range(0, 111, 5)]
    top = rates.index(max(rates))
    assert 0 < top <= 1
    assert rates[0] < 0.1
    assert rates[top:] == sorted(rates[top:], reverse=True)
    assert rates[-1] == pytest.approx(0.01)
    assert sum(recipe.weight(step) for step in range(recipe.unroll)) == pytest.approx(1.0)


def test_a_head_that_knows_only_what_its_target_never_says_agrees_never(tmp_path):
    target = make_target(tmp_path)
    texts = random_texts(target.config.vocab_size, 3, 40)
    trainer = new_trainer(tmp_path, 1, target)
    shares = trainer.agreement(texts)
    assert len(shares) == 3
    assert 1.0 >= shares[0] >= shares[1] >= shares[2] >= 0.0
    states = target.states(torch.tensor([text.ids for text in texts]))
    said = set(target.model.logits(states.hidden).argmax(dim=-1).tolist())
    unsaid = sorted(set(range(target.config.vocab_size)) - said)[:DRAFT_VOCAB]
    trainer.head.target_ids.copy_(torch.tensor(unsaid))
    assert trainer.agreement(texts) == [0.0, 0.0, 0.0]
