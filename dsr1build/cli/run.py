"""``dsr1build run``: generate from a bundle."""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dsr1build.errors import Dsr1Error, EnvironmentUnfit, InvalidInput

NAME = "run"
SUMMARY = "generate text or token ids from a bundle"
EPILOG = """examples:
  dsr1build run dist/r1-mini/x86-64-v3 --ids 1,2,3 --max-new 16
  dsr1build run dist/glassllm-en/x86-64-v3 --prompt "Alice was beginning to" --max-new 40
  dsr1build run BUNDLE --chat "Why is the sky blue?" --temperature 0.6 --top-p 0.95 --seed 1
"""

_IDS: dict[str, Any] = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_COUNT: dict[str, Any] = {"type": "integer", "minimum": 0}
_SECONDS: dict[str, Any] = {"type": "number", "minimum": 0}
_SPEED: dict[str, Any] = {
    "prefill_tokens": _COUNT,
    "prefill_seconds": _SECONDS,
    "decode_steps": _COUNT,
    "decode_seconds": _SECONDS,
}
RUN_SCHEMA: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "Output of `dsr1build run --json`",
    "type": "object",
    "properties": {
        "prompt_ids": _IDS,
        "ids": {**_IDS, "description": "The generated tokens; an end-of-sequence token that ended them is the last."},
        "text": {"type": ["string", "null"], "description": "The text of `ids`; null where the prompt was given as ids."},
        "speed": {"type": "object", "properties": _SPEED, "required": list(_SPEED), "additionalProperties": False},
    },
    "required": ["prompt_ids", "ids", "text", "speed"],
    "additionalProperties": False,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", type=Path, help="directory of a bundle, as printed by `dsr1build build`")
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="continue this text")
    prompt.add_argument("--chat", metavar="TEXT", help="answer this message under the checkpoint's chat template")
    prompt.add_argument("--ids", metavar="1,2,3", help="continue these token ids; prints token ids")
    parser.add_argument("--max-new", type=int, default=128, metavar="N", help="generate at most N tokens (default: 128)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 takes the most likely token (default: 0)")
    parser.add_argument(
        "--top-p", type=float, default=1.0, help="sample from the smallest set with this probability (default: 1)"
    )
    parser.add_argument("--top-k", type=int, default=0, help="sample from the K most likely tokens; 0 is all (default: 0)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampler (default: 0)")
    parser.add_argument("--ignore-eos", action="store_true", help="do not stop at the model's end-of-sequence token")
    parser.add_argument("--threads", type=int, metavar="N", help="threads of the runtime (default: all CPUs that may be used)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(arguments: argparse.Namespace) -> int:
    from dsr1build.runtime.session import MOST_THREADS, BundleError, load
    from dsr1build.runtime.text import TextError, encode_chat, encode_prompt, load_text_codec, stream_text

    bundle: Path = arguments.bundle
    check_options(arguments, MOST_THREADS)
    try:
        codec = None if arguments.ids is not None else load_text_codec(bundle)
        if codec is None:
            prompt = parse_ids(arguments.ids)
        elif arguments.chat is not None:
            prompt = encode_chat(codec, arguments.chat)
        else:
            prompt = encode_prompt(codec, arguments.prompt)
        if not prompt:
            raise InvalidInput("the prompt is empty", where="run", hint="give at least one token")
        session = load(bundle, threads=arguments.threads)
    except TextError as error:
        raise InvalidInput(str(error), where=str(bundle)) from None
    except BundleError as error:
        failure: type[Dsr1Error] = EnvironmentUnfit if error.environment else InvalidInput
        raise failure(str(error), where=str(bundle)) from None
    with session:
        room = session.context - len(prompt)
        if room < 1:
            raise InvalidInput(
                f"the prompt has {len(prompt)} tokens, the bundle's context has room for {session.context}",
                where=str(bundle),
                hint="shorten the prompt, or raise `context` in BUILD.yaml and build again (nothing is recompiled)",
            )
        clock = Clock()
        try:
            tokens = clock.watch(
                session.stream(
                    prompt,
                    min(arguments.max_new, room),
                    temperature=arguments.temperature,
                    top_p=arguments.top_p,
                    top_k=arguments.top_k,
                    seed=arguments.seed,
                    stop_at_eos=not arguments.ignore_eos,
                )
            )
            if arguments.json:
                text = "".join(stream_text(codec, tokens, prompt)) if codec else None
                for _ in tokens:
                    pass
                print(json.dumps({"prompt_ids": prompt, "ids": clock.tokens, "text": text, "speed": clock.speed(len(prompt))}))
            elif codec:
                if arguments.prompt is not None:
                    sys.stdout.write(arguments.prompt)
                write_pieces(stream_text(codec, tokens, prompt))
            else:
                write_pieces(f"{',' if number else ''}{token}" for number, token in enumerate(tokens))
        except ValueError as error:
            raise InvalidInput(str(error), where=str(bundle)) from None
        except BundleError as error:
            raise Dsr1Error(str(error), where=str(bundle)) from None
    if not arguments.json:
        print(clock.summary(len(prompt)), file=sys.stderr)
    return 0


def check_options(arguments: argparse.Namespace, most_threads: int) -> None:
    """Refuse options out of range, each by name."""
    checks = (
        ("--max-new", arguments.max_new >= 1, "at least 1"),
        ("--temperature", 0.0 <= arguments.temperature < float("inf"), "0 or more"),
        ("--top-p", 0.0 < arguments.top_p <= 1.0, "more than 0 and at most 1"),
        ("--top-k", arguments.top_k >= 0, "0 or more"),
        ("--seed", arguments.seed >= 0, "0 or more"),
        ("--threads", arguments.threads is None or 1 <= arguments.threads <= most_threads, f"1 to {most_threads}"),
    )
    for option, good, expected in checks:
        if not good:
            value = getattr(arguments, option[2:].replace("-", "_"))
            raise InvalidInput(f"{option} is {value}, expected {expected}", where="run")


def parse_ids(text: str) -> list[int]:
    """``1,2,3`` as a list. Raises InvalidInput naming the entry that is not a number."""
    ids: list[int] = []
    for position, entry in enumerate(text.split(","), start=1):
        stripped = entry.strip()
        if not stripped.isascii() or not stripped.isdigit() or len(stripped) > 10:
            raise InvalidInput(
                f"--ids entry {position} is {stripped!r}, expected a token id", where="run", hint="write them like --ids 1,2,3"
            )
        ids.append(int(stripped))
    return ids


def write_pieces(pieces: Iterator[str]) -> None:
    for piece in pieces:
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
    sys.stdout.flush()


class Clock:
    """Times a stream of tokens: the first one ends the prefill, the others are decode steps."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.start = time.perf_counter()
        self.first = self.start
        self.last = self.start

    def watch(self, stream: Iterator[int]) -> Iterator[int]:
        for token in stream:
            self.last = time.perf_counter()
            if not self.tokens:
                self.first = self.last
            self.tokens.append(token)
            yield token

    def speed(self, prompt: int) -> dict[str, float | int]:
        """Tokens, seconds, and tokens a second of prefill and decode."""
        prefill, decode, steps = self.first - self.start, self.last - self.first, max(0, len(self.tokens) - 1)
        return {
            "prefill_tokens": prompt,
            "prefill_seconds": round(prefill, 6),
            "decode_steps": steps,
            "decode_seconds": round(decode, 6),
        }

    def summary(self, prompt: int) -> str:
        speed = self.speed(prompt)

        def rate(count: float, seconds: float) -> str:
            return f"{count / seconds:.1f} tokens/s" if count and seconds > 0 else "-"

        return (
            f"prefill {prompt} tokens in {speed['prefill_seconds']:.3f} s ({rate(prompt, speed['prefill_seconds'])}), "
            f"decode {speed['decode_steps']} steps in {speed['decode_seconds']:.3f} s "
            f"({rate(speed['decode_steps'], speed['decode_seconds'])})"
        )
