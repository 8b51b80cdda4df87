"""Making an EAGLE-3 draft head for a model that minserve serves: prompts, answers, training, and what came of it.

    prompts   from sources: a file of chat prompts and documents, some of them held out
    answers   what the target says to them, by the engine
    examples  batches of these
    target    the target's states, computed in training         head, attention, loss, trainer   the training itself
    evaluation  tokens a step, by the engine with the head       command   the steps of it as one command

The engine itself learns nothing of this: a head is a folder of files like any other.
"""
