"""Text to token ids and back, with the tokenizer and chat template that came with the checkpoint.

The files are data from elsewhere: ``tokenizer.json`` is read by the ``tokenizers`` library, the chat template is rendered
in a process of its own (``chat_template.py``) with limits on time and memory.
"""

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TEMPLATE_SECONDS = 10.0
LARGEST_FILE_BYTES = 256 << 20


class TextError(ValueError):
    """The bundle has no usable tokenizer or chat template, or the template failed."""


@dataclass(frozen=True, slots=True)
class TextCodec:
    """The tokenizer of a bundle and what its ``tokenizer_config.json`` says about special tokens."""

    directory: Path
    tokenizer: "Tokenizer"
    bos: str
    add_bos: bool
    settings: dict[str, Any]


def load_text_codec(bundle: Path) -> TextCodec:
    """Read ``tokenizer/tokenizer.json`` (and its settings) of a bundle. Raises TextError with what is missing."""
    directory = bundle / "tokenizer"
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise TextError(
            f"{bundle} has no tokenizer (tokenizer/tokenizer.json), so text cannot be used; give token ids with --ids instead, "
            "or put the model's tokenizer.json into the checkpoint directory and build again"
        )
    from tokenizers import Tokenizer

    _check_size(path)
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # The library raises plain Exception for every malformed file.
        raise TextError(f"{path} is not a tokenizer that can be read: {error}") from error
    settings: dict[str, Any] = {}
    settings_path = directory / "tokenizer_config.json"
    if settings_path.is_file():
        _check_size(settings_path)
        try:
            loaded = json.loads(settings_path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise TextError(f"{settings_path} is not JSON: {error}") from error
        settings = loaded if isinstance(loaded, dict) else {}
    return TextCodec(
        directory, tokenizer, _token_text(settings.get("bos_token")), settings.get("add_bos_token") is True, settings
    )


def encode_prompt(codec: TextCodec, text: str) -> list[int]:
    """Token ids of ``text`` with exactly one BOS where the checkpoint asks for one."""
    return _one_bos(codec, codec.tokenizer.encode(text).ids, wanted=codec.add_bos)


def encode_chat(codec: TextCodec, message: str) -> list[int]:
    """Token ids of one user message under the checkpoint's chat template, ready for the assistant's answer.

    The template writes BOS as text, so none is added here. Raises TextError if there is no template or it fails.
    """
    rendered = _render(
        _chat_template(codec),
        {
            "messages": [{"role": "user", "content": message}],
            "add_generation_prompt": True,
            "bos_token": codec.bos,
            "eos_token": _token_text(codec.settings.get("eos_token")),
        },
    )
    return _one_bos(codec, codec.tokenizer.encode(rendered, add_special_tokens=False).ids, wanted=False)


def stream_text(codec: TextCodec, ids: Iterable[int], prompt: Sequence[int] = ()) -> Iterator[str]:
    """The text of ``ids`` piece by piece; a piece is held back while it ends inside a multi-byte character.

    Blanks between words depend on the token before, so decoding starts from the end of ``prompt``.
    """
    context = list(prompt[-8:])
    shown = codec.tokenizer.decode(context)
    for token in ids:
        context.append(token)
        text = codec.tokenizer.decode(context)
        if text.endswith("\N{REPLACEMENT CHARACTER}") or len(text) <= len(shown):
            continue
        yield text[len(shown) :]
        # Restart from a short context so that a long answer costs linear, not quadratic, time.
        context = context[-8:]
        shown = codec.tokenizer.decode(context)
    rest = codec.tokenizer.decode(context)
    if len(rest) > len(shown):
        yield rest[len(shown) :]


def _one_bos(codec: TextCodec, ids: list[int], *, wanted: bool) -> list[int]:
    bos = codec.tokenizer.token_to_id(codec.bos) if codec.bos else None
    if bos is None:
        return ids
    start = 0
    while start < len(ids) and ids[start] == bos:
        start += 1
    return ([bos] if wanted or start else []) + ids[start:]


def _chat_template(codec: TextCodec) -> str:
    path = codec.directory / "chat_template.jinja"
    if path.is_file():
        _check_size(path)
        return path.read_text(encoding="utf-8")
    template = codec.settings.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default", next(iter(named.values()), None))
    if not isinstance(template, str):
        raise TextError(
            "the checkpoint has no chat template (chat_template.jinja or tokenizer_config.json); use --prompt instead"
        )
    return template


def _render(template: str, variables: dict[str, Any]) -> str:
    request = json.dumps({"template": template, "variables": variables})
    command = [sys.executable, "-I", str(Path(__file__).with_name("chat_template.py"))]
    try:
        child = subprocess.run(command, input=request, capture_output=True, text=True, timeout=TEMPLATE_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise TextError(f"the chat template did not finish within {TEMPLATE_SECONDS:.0f} seconds") from None
    if child.returncode != 0:
        lines = child.stderr.strip().splitlines() or [f"it ended with status {child.returncode}"]
        raise TextError(f"the chat template failed: {lines[-1]}")
    return child.stdout


def _token_text(entry: Any) -> str:
    """A special token is written as a string or as an object with ``content``."""
    if isinstance(entry, dict):
        entry = entry.get("content")
    return entry if isinstance(entry, str) else ""


def _check_size(path: Path) -> None:
    size = path.stat().st_size
    if size > LARGEST_FILE_BYTES:
        raise TextError(f"{path} has {size} bytes, more than the {LARGEST_FILE_BYTES} that a tokenizer file may have")
