"""The steps of making a head, as commands.

    prepare    prompts and documents out of Debian's packages, into a file that travels (needs apt-get; some minutes)
    generate   the target's answers to them             OUT/answers.jsonl
    train      a head on these                          OUT/checkpoint.pt, OUT/training.jsonl, OUT/head/
    evaluate   tokens a step of the held-out prompts    OUT/evaluation.jsonl and a table
    run        generate, train and evaluate in --minutes

    tools/train_draft.py prepare --prompts prompts.xz
    tools/train_draft.py run --prompts prompts.xz --minutes 22 --out OUT --intermediate-size 3072 --max-mib 16

What is interrupted is gone on with when the same command is given again: answers from the last whole one, training from
a checkpoint of the last half minute, with the time that is left of its share.
"""

import argparse
import gc
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from minserve.config import EngineConfig
from minserve.engine.sizing import choose_device, choose_dtype
from minserve.llm import LLM
from minserve.models.config import ModelConfig
from minserve.weights.default_model import ensure_default_model
from minserve.weights.eagle3 import load_eagle3
from minserve.weights.hub import resolve_model

from .answers import Lengths, Text, generate, read_texts
from .evaluation import Row, evaluate, table, write_rows
from .examples import choose_vocabulary, padded
from .head import HeadShape, new_head, save_head, standard_aux_layers, take_values
from .prompts import read_prompts, write_prompts
from .sources import fetch, make_prompts
from .target import Target
from .trainer import Recipe, Trainer

SHARES = {"generate": 0.25, "train": 0.64}
"""Of the minutes of `run`; the rest is for evaluation."""

CONTEXTS = (1024, 2048, 4096, 8192)
NUM_DRAFTS = 3
EVALUATED_AT_ONCE = 64
CUDA_ANSWERED_AT_ONCE = 1024
"""A small model's steps take the same time for many texts as for few."""
AGREEMENT_TEXTS = {"chat": 24, "document": 8}
CUDA_KV_SHARE = 0.4
"""Of the GPU's memory: training comes after the engine, in the same process."""


def main(argv: list[str] | None = None) -> None:
    args = _parse(argv)
    if args.command == "prepare":
        prepare(args)
        return
    args.out.mkdir(parents=True, exist_ok=True)
    args.folder = resolve_model(args.model) if args.model else ensure_default_model()
    for step in (_generate, _train, _evaluate):
        if args.command in ("run", step.__name__[1:]):
            print(f"== {step.__name__[1:]}", flush=True)
            step(args)
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


def prepare(args: argparse.Namespace) -> None:
    files = fetch(args.packages)
    print("from", *files, sep="\n  ")
    prompts = make_prompts(args.packages, args.chats)
    write_prompts(args.prompts, prompts)
    held_out = sum(prompt.held_out for prompt in prompts)
    size = args.prompts.stat().st_size / 2**20
    print(f"{len(prompts)} prompts, {held_out} of them held out, {size:.1f} MiB: {args.prompts}")


def _generate(args: argparse.Namespace) -> None:
    """Until its share of the minutes is over, those of earlier calls counted in, or there are --texts."""
    used = args.out / "generation.json"
    before = json.loads(used.read_text())["seconds"] if used.exists() else 0.0
    if args.texts is None and before >= _seconds(args, "generate"):
        return
    begin = written = time.monotonic()
    prompts = read_prompts(args.prompts)
    options = _engine(args)
    if args.max_num_seqs is None and torch.cuda.is_available() and args.device != "cpu":
        options["max_num_seqs"] = CUDA_ANSWERED_AT_ONCE
    llm = LLM(str(args.folder), **options)

    def is_over(num_texts: int) -> bool:
        nonlocal written
        seconds = before + time.monotonic() - begin
        if time.monotonic() - written > 10.0:
            written = time.monotonic()
            used.write_text(json.dumps({"seconds": seconds}))
        return num_texts >= args.texts if args.texts is not None else seconds >= _seconds(args, "generate")

    num_texts = generate(llm, prompts, args.out / "answers.jsonl", _lengths(args), is_over=is_over)
    used.write_text(json.dumps({"seconds": before + time.monotonic() - begin, "texts": num_texts}))


def _train(args: argparse.Namespace) -> None:
    """A head on the answers, saved where `evaluate` and `minserve --draft` find it."""
    texts = read_texts(args.out / "answers.jsonl")
    own = [text for text in texts if not text.held_out]
    config = ModelConfig.from_folder(args.folder)
    trainer = make_trainer(args, config, own, padded(max(len(text.ids) for text in texts)) + args.unroll)
    if trainer.load():
        print(f"from step {trainer.step}, after {trainer.seconds:.0f} s")
    print(f"{len(own)} texts, {sum(len(text.ids) for text in own)} tokens; {trainer.head.describe()}", flush=True)
    trainer.run(own, _for_agreement(texts))
    num_bytes = save_head(trainer.head, args.out / "head", config.max_position_embeddings)
    print(f"{args.out / 'head'}: {num_bytes / 2**20:.2f} MiB")
    if args.max_mib and num_bytes > args.max_mib * 2**20:
        raise SystemExit(f"that is more than --max-mib {args.max_mib:g}: lower --intermediate-size or --draft-vocab")


def make_trainer(args: argparse.Namespace, config: ModelConfig, texts: list[Text], num_positions: int) -> Trainer:
    """With a new head; `Trainer.load` gives it its values, if it has some. Its vocabulary is that of the first call."""
    engine = EngineConfig.checked(model_path=str(args.folder), device=args.device, dtype=args.dtype)
    device = choose_device(engine)
    aux_layers = tuple(args.aux_layers or standard_aux_layers(config.num_layers))
    target = Target.from_folder(args.folder, aux_layers, device, choose_dtype(engine, config, device), num_positions)
    given = None
    if args.start_from is not None:
        given = load_eagle3(args.start_from, config, device=device, dtype=torch.float32)
    place = args.out / "vocabulary.json"
    if not place.exists():
        ids = choose_vocabulary(texts, args.draft_vocab or config.vocab_size, config.vocab_size)
        if given is not None and given.target_ids is not None:
            ids = given.target_ids
        place.write_text(json.dumps(ids.tolist()))
    target_ids = torch.tensor(json.loads(place.read_text()))
    shape = HeadShape(
        draft_vocab_size=len(target_ids),
        window=args.window,
        aux_layers=aux_layers,
        intermediate_size=args.intermediate_size or config.intermediate_size,
        own_lm_head=args.own_lm_head,
    )
    head = new_head(shape.config(config), target.model, target_ids.to(device))
    if given is not None:
        take_values(head, given)
    recipe = Recipe(
        seconds=None if args.steps is not None else _seconds(args, "train"),
        steps=args.steps,
        batch_tokens=args.batch_tokens,
        unroll=args.unroll,
        temperature=args.loss_temperature,
        learning_rate=args.learning_rate,
        document_share=args.document_share,
    )
    return Trainer(target, head, args.out, recipe)


def _evaluate(args: argparse.Namespace) -> None:
    """Tokens a step, by the engine with the head."""
    folder = args.head or args.out / "head"
    engine = {"draft_path": str(folder), "num_draft_tokens": NUM_DRAFTS, **_engine(args)}
    engine["max_num_seqs"] = args.max_num_seqs or EVALUATED_AT_ONCE
    llm = LLM(str(args.folder), **engine)
    contexts = [context for context in CONTEXTS if context <= args.longest] or [args.longest]
    rows: list[Row] = []
    for row in evaluate(
        llm,
        read_prompts(args.prompts),
        lengths=_lengths(args)._replace(chat=256, document=min(256, args.document_tokens)),
        contexts=contexts,
        num_chats=args.eval_chats,
        num_documents=args.eval_documents,
    ):
        rows.append(row)
        print(table([row]) if len(rows) == 1 else table([row]).splitlines()[1], flush=True)
    for place in {args.out, Path(os.environ.get("OUT", args.out))}:
        write_rows(place / "evaluation.jsonl", rows)


def _for_agreement(texts: list[Text]) -> list[Text]:
    """Some held-out texts of each kind."""
    held_out = sorted((text for text in texts if text.held_out), key=lambda text: text.prompt)
    return [text for kind, count in AGREEMENT_TEXTS.items() for text in [t for t in held_out if t.kind == kind][:count]]


def _engine(args: argparse.Namespace) -> dict[str, Any]:
    """Fields of EngineConfig."""
    options: dict[str, Any] = {"device": args.device, "dtype": args.dtype}
    options["max_model_len"] = min(args.longest, ModelConfig.from_folder(args.folder).max_position_embeddings)
    options["kv_cache_memory"] = args.kv_cache_memory
    if args.kv_cache_memory is None and torch.cuda.is_available() and args.device != "cpu":
        options["kv_cache_memory"] = int(CUDA_KV_SHARE * torch.cuda.mem_get_info()[1])
    options["max_num_seqs"] = args.max_num_seqs
    return options


def _lengths(args: argparse.Namespace) -> Lengths:
    return Lengths(chat=args.chat_tokens, document=args.document_tokens, longest=args.longest)


def _seconds(args: argparse.Namespace, step: str) -> float:
    """What a step has of the minutes: its share in `run`, alone all of them."""
    return float(60 * args.minutes * (SHARES[step] if args.command == "run" else 1.0))


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    adders: list[Callable[..., Any]] = []
    for name in ("prepare", "generate", "train", "evaluate", "run"):
        command = commands.add_parser(name)
        command.add_argument("--prompts", type=Path, required=True, metavar="FILE.xz")
        adders.append(command.add_argument)
    adders[0]("--packages", type=Path, default=Path("debian-texts"), metavar="DIR", help="where they are unpacked")
    adders[0]("--chats", type=int, default=60000, metavar="N")
    for add in adders[1:]:
        _add_flags(add)
    return parser.parse_args(argv)


def _add_flags(add: Callable[..., Any]) -> None:
    add("--model", help="folder, .gguf or hub name (default: the one that minserve serves without one)")
    add("--out", type=Path, required=True, metavar="DIR")
    add("--device", default="auto", choices=("auto", "cpu", "cuda"))
    add("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"))
    add("--minutes", type=float, default=22.0, help="default 22")
    add("--texts", type=int, metavar="N", help="generate: so many texts, however long it takes")
    add("--steps", type=int, metavar="N", help="train: so many steps, however long it takes")
    add("--longest", type=int, default=8192, metavar="TOKENS", help="of a document with its answer (default 8192)")
    add("--chat-tokens", type=int, default=320, metavar="N", help="of an answer at most (default 320)")
    add("--document-tokens", type=int, default=512, metavar="N", help="of a document's answer (default 512)")
    add("--max-num-seqs", type=int, metavar="N", help="as minserve's")
    add("--kv-cache-memory", type=int, metavar="BYTES", help="as minserve's (default: four tenths of a GPU)")
    add(
        "--draft-vocab", type=int, default=16384, metavar="N", help="tokens that the head knows (default 16384; 0: all)"
    )
    add("--window", type=int, default=2048, metavar="TOKENS", help="that it keeps beside the first 16 (default 2048)")
    add("--aux-layers", type=int, nargs=3, metavar="N", help="whose inputs it reads (default: 2, half, all but 3)")
    add("--intermediate-size", type=int, metavar="N", help="of its MLP (default: the target's)")
    add("--start-from", type=Path, metavar="DIR", help="train: a head of the same shape to go on from, a new schedule")
    add("--own-lm-head", action="store_true", help="train and store one, instead of using the target's rows")
    add("--max-mib", type=float, metavar="MIB", help="fail if the head's file is larger")
    add("--batch-tokens", type=int, default=16384, metavar="N")
    add("--unroll", type=int, default=4, metavar="N", help="drafts of each chain in training (default 4)")
    add("--loss-temperature", type=float, default=1.0, metavar="T", help="at which it imitates (default 1)")
    add("--learning-rate", type=float, default=1e-3, metavar="RATE")
    add("--document-share", type=float, default=0.35, metavar="SHARE", help="of the batches (default 0.35)")
    add("--head", type=Path, metavar="DIR", help="evaluate: another one than OUT/head")
    add("--eval-chats", type=int, default=64, metavar="N")
    add("--eval-documents", type=int, default=16, metavar="N")
