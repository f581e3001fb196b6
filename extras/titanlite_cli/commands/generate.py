"""Generate text: titanlite generate --checkpoint outputs/checkpoint/step-100

With --chat QUESTION, answer it; with --chat alone, each line of stdin is a question of one
conversation.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterable, Iterator

from titanlite.distributed.process_group import choose_device
from titanlite.errors import (
    EXIT_DONE,
    EXIT_USER_ERROR,
    CheckpointError,
    UserError,
    format_error,
    printable,
)
from titanlite.log import configure_log, log_waiting
from titanlite.storage import StorageFolder
from titanlite_corpus.chat.encode import ChatEncoder
from titanlite_corpus.chat.template import open_chat_template
from titanlite_lab.checkpoints import find_newest_checkpoint
from titanlite_lab.generate import Sampling, TextGenerator, generate, load_generator


def generate_arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--checkpoint",
        required=True,
        metavar="FOLDER",
        help="a step-N folder, or the folder of a run, whose newest valid checkpoint is used",
    )
    parser.add_argument(
        "--prompt", default="", help="text to continue (default: empty, which begins a document)"
    )
    parser.add_argument(
        "--chat", nargs="?", const="", metavar="QUESTION", help="answer with a chat template"
    )
    parser.add_argument(
        "--template",
        metavar="NAME",
        help="of --chat: llama3, chatml, or the path of a tokenizer_config.json or .jinja (default:"
        " that of the Hugging Face folder that the training began with)",
    )
    parser.add_argument("--max-new-tokens", type=int, default=200, metavar="N", help="default: 200")
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        help="default: 0.8; 0: always the most likely token",
    )
    parser.add_argument(
        "--top-k",
        type=int,
        default=0,
        metavar="K",
        help="sample from the K most likely tokens (default: 0, all)",
    )
    parser.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="sample from the most likely tokens with total probability P (default: 1.0)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling (default: 0)")
    parser.add_argument(
        "--tokenizer", metavar="FILE", help="needed if the checkpoint has no copy of its tokenizer"
    )
    parser.add_argument(
        "--device",
        choices=["auto", "cpu", "cuda"],
        default="auto",
        help="default: auto, which is cuda if there is a GPU",
    )
    return parser.parse_args(argv)


def open_encoder(generator: TextGenerator, template: str | None) -> ChatEncoder:
    """Conversations as the model was trained on them; raises CheckpointError or DataError."""
    if template:
        return ChatEncoder(generator.tokenizer, open_chat_template(template, generator.tokenizer))
    if not generator.published.get("chat_template"):
        raise CheckpointError(
            "--chat: the checkpoint has no chat template.",
            fix="Give that of the fine-tuning recipe: --template llama3, for example.",
        )
    from titanlite_corpus.chat.jinja import template_of_config  # needs an optional package

    name, tokenizer = "the checkpoint's chat template", generator.tokenizer
    return ChatEncoder(tokenizer, template_of_config(generator.published, name, tokenizer))


def answer_questions(
    generator: TextGenerator, args: argparse.Namespace, sampling: Sampling, questions: Iterable[str]
) -> Iterator[str]:
    """Yield the answer to each question of one conversation."""
    encoder, tokenizer = open_encoder(generator, args.template), generator.tokenizer
    messages: list[dict[str, str]] = []
    for question in questions:
        messages.append({"role": "user", "content": question.rstrip("\n")})
        prompt, ends = encoder.encode_prompt(messages)
        ids = generate(
            generator.model,
            prompt,
            args.max_new_tokens,
            sampling,
            ends=ends | generator.end_ids,
            vocab_size=tokenizer.vocab_size,
        )
        with log_waiting("answering"):
            messages.append({"role": "assistant", "content": tokenizer.decode(list(ids))})
        yield messages[-1]["content"]


def main(argv: list[str]) -> int:
    configure_log()
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # libraries rely on it
    args = generate_arguments(argv)
    try:
        sampling = Sampling(args.temperature, args.top_k, args.top_p, args.seed)
        checkpoint = find_newest_checkpoint(StorageFolder(args.checkpoint))
        with log_waiting(f"loading {checkpoint}"):
            generator = load_generator(checkpoint, choose_device(args.device), args.tokenizer)
        if args.chat is None:
            with log_waiting("generating"):
                text = generator.complete(args.prompt, args.max_new_tokens, sampling)
            texts: Iterable[str] = [args.prompt + text]
        else:
            texts = answer_questions(
                generator, args, sampling, [args.chat] if args.chat else sys.stdin
            )
        for text in texts:
            # End quietly if `| head` closes stdout.
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            # a model may write sequences that control a terminal
            print(printable(text) if sys.stdout.isatty() else text, flush=True)
            signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    except UserError as error:
        print(format_error(error), file=sys.stderr)
        return EXIT_USER_ERROR
    return EXIT_DONE
