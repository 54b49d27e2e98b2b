"""Tokenizer and chat template of a bundle: one BOS, whole characters, and templates that cannot do harm."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from dsr1build.runtime.text import TextError, encode_chat, encode_prompt, load_text_codec, stream_text


def make_bundle(directory: Path, template: str | None = None, post_bos: bool = False, **settings: object) -> Path:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<s>": 0, "</s>": 1, **{token: i + 2 for i, token in enumerate(alphabet)}}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    if post_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    folder = directory / "tokenizer"
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, **settings}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize("post_bos", (False, True))
@pytest.mark.parametrize("text", ("hello", "<s>hello", "<s><s>hello"))
def test_one_bos_where_the_checkpoint_asks_for_it(tmp_path: Path, post_bos: bool, text: str) -> None:
    codec = load_text_codec(make_bundle(tmp_path, post_bos=post_bos, add_bos_token=True))
    ids = encode_prompt(codec, text)
    assert ids.count(0) == 1
    assert ids[0] == 0
    assert len(ids) == 6


def test_no_bos_where_it_does_not(tmp_path: Path) -> None:
    assert 0 not in encode_prompt(load_text_codec(make_bundle(tmp_path, add_bos_token=False)), "hello")


def test_chat_has_one_bos_and_the_template_text(tmp_path: Path) -> None:
    template = (
        "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m['content'] }}{% endfor %}\n"
        "{% if add_generation_prompt %}<think>\n{% endif %}"
    )
    codec = load_text_codec(make_bundle(tmp_path, template, post_bos=True))
    ids = encode_chat(codec, "hi")
    assert ids[0] == 0
    assert ids.count(0) == 1
    assert codec.tokenizer.decode(ids) == "<user>hi<think>\n"


def test_named_templates_use_the_default(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path, chat_template=[{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}])
    codec = load_text_codec(bundle)
    assert codec.tokenizer.decode(encode_chat(codec, "hi")) == "D"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('no system role') }}", "the chat template failed: TemplateError: no system role"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "the chat template failed: SecurityError: access to attribute"),
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "the chat template "),
        ("{{ 'x' * 999999999999 }}", "the chat template failed"),
        ("{% if %}", "the chat template failed: TemplateSyntaxError"),
    ],
    ids=["raises", "escapes", "endless", "huge", "syntax"],
)
def test_bad_templates_are_one_clear_error(tmp_path: Path, template: str, message: str) -> None:
    codec = load_text_codec(make_bundle(tmp_path, template))
    with pytest.raises(TextError) as caught:
        encode_chat(codec, "hi")
    assert message in str(caught.value)


def test_missing_template_and_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(TextError, match="has no tokenizer"):
        load_text_codec(tmp_path)
    with pytest.raises(TextError, match="has no chat template"):
        encode_chat(load_text_codec(make_bundle(tmp_path)), "hi")


@pytest.mark.parametrize("settings", [b"[" * 200_000, b"\xff", b"{", b""])
def test_malformed_settings(tmp_path: Path, settings: bytes) -> None:
    bundle = make_bundle(tmp_path)
    (bundle / "tokenizer" / "tokenizer_config.json").write_bytes(settings)
    with pytest.raises(TextError, match=r"tokenizer_config\.json is not JSON: "):
        load_text_codec(bundle)


@pytest.mark.parametrize(
    "template", [1, {"a": 1}, [], [1], [{"name": [1]}], [{"name": {"a": 1}, "template": 3}], [{"template": None}]]
)
def test_templates_of_another_type_count_as_absent(tmp_path: Path, template: object) -> None:
    with pytest.raises(TextError, match="has no chat template"):
        encode_chat(load_text_codec(make_bundle(tmp_path, chat_template=template)), "hi")


def test_text_and_templates_that_are_not_unicode(tmp_path: Path) -> None:
    codec = load_text_codec(make_bundle(tmp_path, "{{ messages[0].content }}"))
    for encode in (encode_prompt, encode_chat):
        with pytest.raises(TextError, match=r"^character 3 of the text is not Unicode; write the text in UTF-8$"):
            encode(codec, "hi\udcff")
    (codec.directory / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(TextError, match=r"chat_template\.jinja is not UTF-8: "):
        encode_chat(codec, "hi")


def test_a_text_that_the_vocabulary_has_no_token_for(tmp_path: Path) -> None:
    (tmp_path / "tokenizer").mkdir()
    tokenizer = Tokenizer(models.WordPiece({"a": 0}, unk_token="[UNK]"))
    tokenizer.save(str(tmp_path / "tokenizer" / "tokenizer.json"))
    with pytest.raises(TextError, match=r"tokenizer\.json cannot encode the text: "):
        encode_prompt(load_text_codec(tmp_path), "b")


def test_chat_does_not_depend_on_the_locale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    codec = load_text_codec(make_bundle(tmp_path, "{{ messages[0].content }}"))
    for name, value in (("LC_ALL", "C"), ("PYTHONUTF8", "0"), ("PYTHONCOERCECLOCALE", "0"), ("PYTHONIOENCODING", "latin-1")):
        monkeypatch.setenv(name, value)
    assert codec.tokenizer.decode(encode_chat(codec, "naïve 東京")) == "naïve 東京"


def test_malformed_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{")
    with pytest.raises(TextError, match="not a tokenizer that can be read"):
        load_text_codec(tmp_path)


@pytest.mark.parametrize("text", ("plain words", "naïve — 東京 🙂!", "a  b\n\nc"))
def test_streaming_gives_whole_characters_and_the_whole_text(tmp_path: Path, text: str) -> None:
    codec = load_text_codec(make_bundle(tmp_path))
    ids = codec.tokenizer.encode(text).ids
    pieces = list(stream_text(codec, ids))
    assert "".join(pieces) == text
    assert all("\N{REPLACEMENT CHARACTER}" not in piece for piece in pieces)
