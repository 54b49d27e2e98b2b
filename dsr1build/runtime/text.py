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
        except (ValueError, RecursionError) as error:
            raise TextError(f"{settings_path} is not JSON: {error}") from error
        settings = loaded if isinstance(loaded, dict) else {}
    return TextCodec(
        directory, tokenizer, _token_text(settings.get("bos_token")), settings.get("add_bos_token") is True, settings
    )


def encode_prompt(codec: TextCodec, text: str) -> list[int]:
    """Token ids of ``text`` with exactly one BOS where the checkpoint asks for one. Raises TextError where there are none."""
    return _one_bos(codec, _encode(codec, text), wanted=codec.add_bos)


def encode_chat(codec: TextCodec, message: str) -> list[int]:
    """Token ids of one user message under the checkpoint's chat template, ready for the assistant's answer.

    The template writes BOS as text, so none is added here. Raises TextError if there is no template or it fails.
    """
    _check_unicode(message)
    rendered = _render(
        _chat_template(codec),
        {
            "messages": [{"role": "user", "content": message}],
            "add_generation_prompt": True,
            "bos_token": codec.bos,
            "eos_token": _token_text(codec.settings.get("eos_token")),
        },
    )
    return _one_bos(codec, _encode(codec, rendered, add_special_tokens=False), wanted=False)


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


def _encode(codec: TextCodec, text: str, *, add_special_tokens: bool = True) -> list[int]:
    _check_unicode(text)
    try:
        ids: list[int] = codec.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
    except Exception as error:  # The library raises plain Exception where a vocabulary lacks the token that it needs.
        raise TextError(f"{codec.directory / 'tokenizer.json'} cannot encode the text: {error}") from error
    return ids


def _check_unicode(text: str) -> None:
    """Bytes of the command line that are not UTF-8 arrive as lone surrogates, which no tokenizer takes."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise TextError(f"character {error.start + 1} of the text is not Unicode; write the text in UTF-8") from None


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
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise TextError(f"{path} is not UTF-8: {error}") from None
    template = codec.settings.get("chat_template")
    if isinstance(template, list):
        named = [(entry.get("name"), entry.get("template")) for entry in template if isinstance(entry, dict)]
        named.sort(key=lambda pair: pair[0] != "default")
        template = named[0][1] if named else None
    if not isinstance(template, str):
        raise TextError(
            "the checkpoint has no chat template (chat_template.jinja or tokenizer_config.json); use --prompt instead"
        )
    return template


def _render(template: str, variables: dict[str, Any]) -> str:
    request = json.dumps({"template": template, "variables": variables})
    # -I ignores the environment, so UTF-8 on all streams is asked for here.
    command = [sys.executable, "-I", "-X", "utf8", str(Path(__file__).with_name("chat_template.py"))]
    try:
        child = subprocess.run(
            command, input=request, capture_output=True, encoding="utf-8", errors="replace", timeout=TEMPLATE_SECONDS, check=False
        )
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
