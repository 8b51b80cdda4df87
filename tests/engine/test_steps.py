"""What a step of the engine costs: how often the model is run."""

from tests.engine.tiny import submit, tiny_engine


def test_a_step_reads_the_weights_once_whether_it_reads_prompts_decodes_or_both(tmp_path):
    engine = tiny_engine(tmp_path, max_num_seqs=4, max_num_batched_tokens=16, run_ahead=0)
    seen = []
    engine._runner._model.register_forward_pre_hook(lambda model, args: seen.append(len(args[0])))
    engine.submit(submit("a", [5] * 10, max_tokens=6))
    engine.step()
    engine.submit(submit("b", [6] * 40, max_tokens=2))
    while engine.has_work:
        engine.step()
    assert seen == [10, 1 + 16, 1 + 16, 1 + 8, 2, 1]
