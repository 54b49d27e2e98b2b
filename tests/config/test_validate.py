"""Everything that can be wrong with the keys and values of the four kinds of files: one message each, verbatim."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from dsr1build.config.document import parse_document
from dsr1build.config.json_schema import FILES, json_schema
from dsr1build.config.schema import BuildFile, Profile, Recipe, SpecializationRule, Target, placeholders
from dsr1build.config.validate import validate
from dsr1build.errors import InvalidInput

BUILD = """version: 1
name: r1
model:
  checkpoint: m
recipe: qwen2
targets: [x86-64-v3]
"""
RECIPE = """version: 1
name: r
architectures: [qwen2]
partitions:
  - kind: ffn
    modules: [model.mlp]
"""
TARGET = """version: 1
name: t
triple: x86_64-unknown-linux-gnu
"""
PROFILE = """version: 1
name: p
"""


def message(schema: type[BaseModel], text: str) -> str:
    with pytest.raises(InvalidInput) as caught:
        validate(parse_document(text.encode(), "f.yaml"), schema)
    assert caught.value.exit_code == 2
    return caught.value.render()


def golden(place: str, text: str, line: str, hint: str) -> str:
    column = int(place.split(":")[1])
    return f"f.yaml:{place}: error: {text}\n    {line}\n    {' ' * (column - 1)}^\nhelp: {hint}"


CHECKPOINT = "  checkpoint: m\n"
BUILD_KEYS = "The keys here are version, name, model, recipe, targets, context, cache, output."
NAME_HINT = "A name is made of letters, digits, `.`, `_` and `-`, and begins with a letter, digit or `_`."
KINDS = "embedding, norm, attention, ffn, expert, gating, combine, head, other"
KIND_CHOICES = ", ".join(f"`{kind}`" for kind in KINDS.split(", "))

GOLDEN: dict[str, tuple[type[BaseModel], str, str]] = {
    "unknown key": (
        BuildFile,
        BUILD + "contxt: 512\n",
        golden("7:1", "unknown key `contxt`", "contxt: 512", f"Did you mean `context`? {BUILD_KEYS}"),
    ),
    "unknown key, none near": (
        BuildFile,
        BUILD + "zzz: 512\n",
        golden("7:1", "unknown key `zzz`", "zzz: 512", BUILD_KEYS),
    ),
    "a misspelt key is not reported as a missing one": (
        BuildFile,
        BUILD.replace("recipe", "recpie"),
        golden("5:1", "unknown key `recpie`", "recpie: qwen2", f"Did you mean `recipe`? {BUILD_KEYS}"),
    ),
    "unknown key inside": (
        BuildFile,
        BUILD.replace("checkpoint", "chekpoint"),
        golden(
            "4:3",
            "unknown key `chekpoint` in `model`",
            "  chekpoint: m",
            "Did you mean `checkpoint`? The keys here are checkpoint, config, weights, onnx.",
        ),
    ),
    "missing key": (
        BuildFile,
        BUILD.replace("recipe: qwen2\n", ""),
        golden(
            "1:1",
            "the key `recipe` is missing",
            "version: 1",
            "Add `recipe:`. How the model is cut and specialized: path of a recipe, or the name of one that ships with the"
            " package.",
        ),
    ),
    "missing key inside": (
        BuildFile,
        BUILD.replace(CHECKPOINT, "  config: c\n  weights: {random: {}}\n"),
        golden(
            "5:13",
            "the key `seed` is missing in `model.weights.random`",
            "  weights: {random: {}}",
            "Add `seed:`. Seed of the generator. Equal seeds give equal weights on every machine.",
        ),
    ),
    "no value": (
        BuildFile,
        BUILD + "context:\n",
        golden("7:9", "`context` has no value", "context:", "Write a value, or remove the line for the default."),
    ),
    "null": (
        BuildFile,
        BUILD + "context: null\n",
        golden("7:10", "`context` has no value", "context: null", "Write a value, or remove the line for the default."),
    ),
    "text for a number": (
        BuildFile,
        BUILD + 'context: "512"\n',
        golden("7:10", '`context` must be a whole number, but is the text "512"', 'context: "512"', "Write 512 without quotes."),
    ),
    "boolean for a number": (
        BuildFile,
        BUILD + "context: true\n",
        golden("7:10", "`context` must be a whole number, but is the boolean true", "context: true", "Write a whole number."),
    ),
    "fraction for a number": (
        BuildFile,
        BUILD + "context: 1.5\n",
        golden("7:10", "`context` must be a whole number, but is the number 1.5", "context: 1.5", "Write a whole number."),
    ),
    "number for text": (
        BuildFile,
        BUILD.replace("r1", "1.5"),
        golden("2:7", "`name` must be text, but is the number 1.5", "name: 1.5", 'Put it in quotes for the text: "1.5".'),
    ),
    "boolean for text": (
        BuildFile,
        BUILD.replace("r1", "true"),
        golden("2:7", "`name` must be text, but is the boolean true", "name: true", 'Put it in quotes for the text: "true".'),
    ),
    "text for a list": (
        BuildFile,
        BUILD.replace("[x86-64-v3]", "x86-64-v3"),
        golden("6:10", '`targets` must be a list, but is the text "x86-64-v3"', "targets: x86-64-v3", "Write [x86-64-v3]."),
    ),
    "text for a mapping": (
        BuildFile,
        BUILD.replace("\n" + CHECKPOINT, " m\n"),
        golden("3:8", '`model` must be a mapping, but is the text "m"', "model: m", "Write a mapping."),
    ),
    "mapping for text": (
        BuildFile,
        BUILD + "output: {a: b}\n",
        golden("7:9", "`output` must be text, but is a mapping", "output: {a: b}", "Write text."),
    ),
    "wrong item of a list": (
        BuildFile,
        BUILD.replace("[x86-64-v3]", "[x86-64-v3, 3]"),
        golden(
            "6:22",
            "`targets[1]` must be text, but is the number 3",
            "targets: [x86-64-v3, 3]",
            'Put it in quotes for the text: "3".',
        ),
    ),
    "empty list": (
        BuildFile,
        BUILD.replace("[x86-64-v3]", "[]"),
        golden("6:10", "`targets` must not be an empty list", "targets: []", "Add an item."),
    ),
    "version": (
        BuildFile,
        BUILD.replace("version: 1", "version: 2"),
        golden("1:10", "version 2 of this form is unknown", "version: 2", "Write `version: 1`, or use a newer dsr1build."),
    ),
    "version as text": (
        BuildFile,
        BUILD.replace("version: 1", 'version: "1"'),
        golden("1:10", '`version` must be a whole number, but is the text "1"', 'version: "1"', "Write 1 without quotes."),
    ),
    "version as a boolean": (
        BuildFile,
        BUILD.replace("version: 1", "version: true"),
        golden("1:10", "`version` must be a whole number, but is the boolean true", "version: true", "Write a whole number."),
    ),
    "name that escapes": (
        BuildFile,
        BUILD.replace("r1", "../r1"),
        golden("2:7", "`../r1` is not a name", "name: ../r1", NAME_HINT),
    ),
    "name of dots": (BuildFile, BUILD.replace("r1", ".."), golden("2:7", "`..` is not a name", "name: ..", NAME_HINT)),
    "name over two lines": (
        BuildFile,
        BUILD.replace("r1", '"a\\nb"'),
        golden("2:7", "`a\\nb` is not a name", 'name: "a\\nb"', NAME_HINT),
    ),
    "name too long": (
        BuildFile,
        BUILD.replace("r1", "a" * 101),
        golden("2:7", f"`{'a' * 57}...` is not a name", f"name: {'a' * 101}", NAME_HINT),
    ),
    "context zero": (
        BuildFile,
        BUILD + "context: 0\n",
        golden("7:10", "`context` must be at least 1, but is 0", "context: 0", "Write a number within the bounds."),
    ),
    "context too large": (
        BuildFile,
        BUILD + "context: 9999999999\n",
        golden(
            "7:10",
            "`context` must be at most 1073741824, but is 9999999999",
            "context: 9999999999",
            "Write a number within the bounds.",
        ),
    ),
    "seed too large": (
        BuildFile,
        BUILD.replace(CHECKPOINT, "  config: c\n  weights: {random: {seed: 9223372036854775808}}\n"),
        golden(
            "5:28",
            "`model.weights.random.seed` must be less than 9223372036854775808, but is 9223372036854775808",
            "  weights: {random: {seed: 9223372036854775808}}",
            "Write a number within the bounds.",
        ),
    ),
    "empty path": (
        BuildFile,
        BUILD + "output: ''\n",
        golden("7:9", "the path is empty", "output: ''", "Write a path, relative to this file or absolute."),
    ),
    "path with a zero byte": (
        BuildFile,
        BUILD + 'output: "a\\0b"\n',
        golden("7:9", "the path holds a control character", 'output: "a\\0b"', "Write the path on one line, without escapes."),
    ),
    "no source": (
        BuildFile,
        BUILD.replace("\n" + CHECKPOINT, " {}\n"),
        golden("3:8", "the model has no source", "model: {}", "Add one of `checkpoint`, `config` and `onnx`."),
    ),
    "two sources": (
        BuildFile,
        BUILD.replace(CHECKPOINT, CHECKPOINT + "  config: c\n"),
        golden("5:11", "`checkpoint` and `config` exclude each other", "  config: c", "Keep one of the two."),
    ),
    "config without weights": (
        BuildFile,
        BUILD.replace("checkpoint", "config"),
        golden(
            "4:11",
            "`config` alone has no weights",
            "  config: m",
            "Add `weights: {random: {seed: 0}}`, or name a checkpoint directory with `checkpoint`.",
        ),
    ),
    "checkpoint with weights": (
        BuildFile,
        BUILD.replace(CHECKPOINT, CHECKPOINT + "  weights: {random: {seed: 0}}\n"),
        golden("5:12", "a checkpoint brings its own weights", "  weights: {random: {seed: 0}}", "Remove `weights`."),
    ),
    "onnx": (
        BuildFile,
        BUILD.replace("checkpoint: m", "onnx: m.onnx"),
        golden(
            "4:9",
            "an ONNX file as the source of a model is not supported yet",
            "  onnx: m.onnx",
            "Use `checkpoint` or `config`.",
        ),
    ),
    "kind": (
        Recipe,
        RECIPE.replace("ffn", "fnn"),
        golden(
            "5:11",
            f'`partitions[0].kind` must be one of {KIND_CHOICES}, but is the text "fnn"',
            "  - kind: fnn",
            "Did you mean `ffn`?",
        ),
    ),
    "module pattern": (
        Recipe,
        RECIPE.replace("model.mlp", "model.*.mlp"),
        golden(
            "6:15",
            "`model.*.mlp` is not a module pattern",
            "    modules: [model.*.mlp]",
            "Write a module path, with placeholders for numbers: model.layers.{n}.self_attn.",
        ),
    ),
    "different placeholders": (
        Recipe,
        RECIPE.replace("[model.mlp]", "['a.{n}', 'b.{m}']"),
        golden(
            "6:24",
            "the patterns `a.{n}` and `b.{m}` have different placeholders",
            "    modules: ['a.{n}', 'b.{m}']",
            "All patterns of a rule use the same placeholders; make it two rules.",
        ),
    ),
    "pattern twice": (
        Recipe,
        RECIPE.replace("[model.mlp]", "[a, b, a]"),
        golden("6:21", "the pattern `a` appears twice in one rule", "    modules: [a, b, a]", "Remove one of them."),
    ),
    "no rules": (
        Recipe,
        RECIPE.split("partitions")[0] + "partitions: []\n",
        golden("4:13", "`partitions` must not be an empty list", "partitions: []", "Add an item."),
    ),
    "rule that is text": (
        Recipe,
        RECIPE.split("partitions")[0] + "partitions: [ffn]\n",
        golden("4:14", '`partitions[0]` must be a mapping, but is the text "ffn"', "partitions: [ffn]", "Write a mapping."),
    ),
    "dense dispatch": (
        Recipe,
        RECIPE + "dispatch: dense\n",
        golden("7:11", '`dispatch` must be `sparse`, but is the text "dense"', "dispatch: dense", "Write `sparse`."),
    ),
    "tokens": (
        Recipe,
        RECIPE + "specializations:\n  decode: [{tokens: any}]\n",
        golden(
            "8:21",
            'the text "any" is not a number of tokens',
            "  decode: [{tokens: any}]",
            "Write a whole number from 1 to 65536, or `chunk`.",
        ),
    ),
    "pad": (
        Recipe,
        RECIPE + "specializations:\n  expert: [{tokens: 8, pad: 1}]\n",
        golden(
            "8:29",
            "`specializations.expert[0].pad` must be true or false, but is the number 1",
            "  expert: [{tokens: 8, pad: 1}]",
            "Write true or false.",
        ),
    ),
    "tokens twice": (
        Recipe,
        RECIPE + "specializations:\n  expert: [{tokens: 8}, {tokens: 8, pad: true}]\n",
        golden("8:25", "`tokens: 8` appears twice", "  expert: [{tokens: 8}, {tokens: 8, pad: true}]", "Remove one of them."),
    ),
    "pipeline of an unknown kind": (
        Recipe,
        RECIPE + "pipelines:\n  x86-64-v3: {exprt: {}}\n",
        golden(
            "8:15",
            "unknown key `exprt` in `pipelines.x86-64-v3`",
            "  x86-64-v3: {exprt: {}}",
            f"Did you mean `expert`? The keys here are all, {KINDS}.",
        ),
    ),
    "pipeline of a target that is no name": (
        Recipe,
        RECIPE + "pipelines:\n  a/b: {all: {}}\n",
        golden("8:3", "`a/b` is not a name", "  a/b: {all: {}}", NAME_HINT),
    ),
    "unknown key of a pipeline": (
        Recipe,
        RECIPE + "pipelines: {t: {all: {pass: x}}}\n",
        golden(
            "7:23",
            "unknown key `pass` in `pipelines.t.all`",
            "pipelines: {t: {all: {pass: x}}}",
            "Did you mean `passes`? The keys here are schedules, passes.",
        ),
    ),
    "schedule": (
        Target,
        TARGET + "schedules: {dit: {rows: 4}}\n",
        golden(
            "4:13",
            "unknown key `dit` in `schedules`",
            "schedules: {dit: {rows: 4}}",
            "Did you mean `dot`? The keys here are map1, map2, map3, dot, serial.",
        ),
    ),
    "schedule option": (
        Target,
        TARGET + "schedules: {dot: {row: 4}}\n",
        golden(
            "4:19",
            "unknown key `row` in `schedules.dot`",
            "schedules: {dot: {row: 4}}",
            "Did you mean `rows`? The keys here are rows, tokens.",
        ),
    ),
    "block size": (
        Target,
        TARGET + "schedules: {dot: {rows: 3}}\n",
        golden("4:25", "3 is not a block size", "schedules: {dot: {rows: 3}}", "Write a power of two from 1 to 64."),
    ),
    "pass group": (
        Target,
        TARGET + "passes: {optimise: -O2}\n",
        golden(
            "4:10",
            "unknown key `optimise` in `passes`",
            "passes: {optimise: -O2}",
            "Did you mean `optimize`? The keys here are parse, bufferize, lower, optimize, codegen.",
        ),
    ),
    "feature": (
        Target,
        TARGET + "features: [avx2]\n",
        golden(
            "4:12",
            "`avx2` is not a CPU feature",
            "features: [avx2]",
            "Write `+name` to switch a feature on, `-name` to switch it off.",
        ),
    ),
    "toolchain": (
        Target,
        TARGET + "toolchain: llvm-gpu\n",
        golden(
            "4:12",
            '`toolchain` must be `llvm-cpu`, but is the text "llvm-gpu"',
            "toolchain: llvm-gpu",
            "Did you mean `llvm-cpu`?",
        ),
    ),
    "profile": (
        Profile,
        PROFILE + "local: {direktory: /tmp}\n",
        golden(
            "3:9",
            "unknown key `direktory` in `local`",
            "local: {direktory: /tmp}",
            "Did you mean `directory`? The keys here are directory, max_bytes, max_files.",
        ),
    ),
    "scheme of a remote": (
        Profile,
        PROFILE + "remotes:\n  - url: ftp://cache\n",
        golden(
            "4:10",
            "`ftp://cache` is not the address of a shared cache",
            "  - url: ftp://cache",
            "An address begins with grpc://, grpcs://, http://, https://, s3://, gs://, az:// or file:///.",
        ),
    ),
    "credentials in a remote": (
        Profile,
        PROFILE + "remotes:\n  - url: https://me:secret@cache/\n",
        golden(
            "4:10",
            "the address holds credentials or a query",
            "  - url: https://*********@cache/",
            "Put credentials into an environment variable and name it in `headers_from_env`.",
        ),
    ),
    "secret in place of a variable": (
        Profile,
        PROFILE + "remotes:\n  - url: https://cache\n    headers_from_env: {authorization: Bearer xyz}\n",
        golden(
            "5:39",
            "`Bearer ***` is not the name of an environment variable",
            "    headers_from_env: {authorization: Bearer ***}",
            "Write the variable's name; its value, a secret perhaps, does not belong in the file.",
        ),
    ),
    "headers of an object store": (
        Profile,
        PROFILE + "remotes:\n  - url: s3://bucket\n    headers_from_env: {authorization: TOKEN}\n",
        golden(
            "5:23",
            "requests to s3:// carry no headers of yours",
            "    headers_from_env: {authorization: TOKEN}",
            "Give credentials as the provider's own tools take them, for example in AWS_ACCESS_KEY_ID.",
        ),
    ),
    "instance of an HTTP cache": (
        Profile,
        PROFILE + "remotes:\n  - url: http://cache\n    instance: main\n",
        golden(
            "5:15", "a cache at http:// has no instances", "    instance: main", "Remove `instance`, or put it into the path."
        ),
    ),
    "remote twice": (
        Profile,
        PROFILE + "remotes:\n  - url: https://cache\n  - url: https://cache\n    mode: read-write\n",
        golden("5:10", "the remote `https://cache` is listed twice", "  - url: https://cache", "Remove one of them."),
    ),
    "public key": (
        Profile,
        PROFILE + "trust:\n  keys: [ed25519:12]\n",
        golden(
            "4:10",
            "`ed25519:12` is not a public key",
            "  keys: [ed25519:12]",
            "Copy the line that `dsr1build cache key new` prints.",
        ),
    ),
    "unsigned without keys": (
        Profile,
        PROFILE + "trust:\n  unsigned: refuse\n",
        golden(
            "4:13",
            "without a trusted key, anybody's signature would do",
            "  unsigned: refuse",
            "Add the public keys that you trust to `keys`, or remove `unsigned`.",
        ),
    ),
}


@pytest.mark.parametrize("case", GOLDEN)
def test_message(case: str) -> None:
    schema, text, expected = GOLDEN[case]
    assert message(schema, text) == expected


def test_models_are_frozen() -> None:
    build = validate(parse_document(BUILD.encode(), "f"), BuildFile)
    with pytest.raises(ValidationError):
        build.name = "other"  # type: ignore[misc]


def test_defaults() -> None:
    build = validate(parse_document(BUILD.encode(), "f"), BuildFile)
    assert (build.context, build.cache, build.output) == (None, "local", "dist")
    recipe = validate(parse_document(RECIPE.encode(), "f"), Recipe)
    assert (recipe.context, recipe.chunk, recipe.dispatch, recipe.pipelines) == (4096, 64, "sparse", {})
    assert recipe.specializations.decode == (SpecializationRule(tokens=1),)
    assert recipe.specializations.prefill == (SpecializationRule(tokens="chunk"),)
    target = validate(parse_document(TARGET.encode(), "f"), Target)
    assert (target.cpu, target.features, target.toolchain) == ("x86-64-v3", (), "llvm-cpu")
    assert validate(parse_document(PROFILE.encode(), "f"), Profile).local.directory is None


def test_a_full_recipe() -> None:
    text = RECIPE + (
        "specializations:\n  expert: [{tokens: 1}, {tokens: 8, pad: true}, {tokens: chunk}]\n"
        "pipelines:\n  x86-64-v3:\n    all: {passes: {optimize: -O2}}\n    ffn: {schedules: {dot: {rows: 8, tokens: 2}}}\n"
    )
    recipe = validate(parse_document(text.encode(), "f"), Recipe)
    assert recipe.specializations.expert[1] == SpecializationRule(tokens=8, pad=True)
    assert recipe.pipelines["x86-64-v3"]["ffn"].schedules == {"dot": {"rows": 8, "tokens": 2}}
    assert recipe.pipelines["x86-64-v3"]["all"].passes == {"optimize": "-O2"}


def test_placeholders() -> None:
    assert placeholders("model.layers.{n}.mlp.experts.{e}") == {"n", "e"}
    assert placeholders("lm_head") == frozenset()


def _sections(schema: dict[str, Any]) -> list[dict[str, Any]]:
    return [schema, *schema.get("$defs", {}).values()]


# Every key of every file, so that deep sections are reached, and one that is unknown everywhere.
KEYS = st.sampled_from(
    sorted(
        {key for name in FILES for part in _sections(json_schema(name)) for key in part["properties"]}
        | {"all", "dot", "rows", "optimize", "x"}
    )
)
LEAVES = st.none() | st.booleans() | st.integers(-2, 70) | st.floats() | st.sampled_from(["x", "", "a.{n}", "chunk", "\x1b\n"])
VALUES: st.SearchStrategy[Any] = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4), max_leaves=12
)


@given(st.sampled_from(sorted(FILES)), st.dictionaries(KEYS, VALUES, max_size=8))
def test_any_tree_is_valid_or_gives_one_message(name: str, data: dict[str, Any]) -> None:
    # JSON is YAML, but for the numbers that JSON does not know.
    text = json.dumps(data).replace("Infinity", ".inf").replace("NaN", ".nan")
    try:
        value = validate(parse_document(text.encode(), "f"), FILES[name])
    except InvalidInput as error:
        assert error.position is not None and error.message and error.hint
        assert error.message.isprintable()
    else:
        assert isinstance(value, FILES[name])


def test_a_full_profile() -> None:
    key = "ed25519:" + "0a" * 32
    text = PROFILE + (
        "remotes:\n"
        "  - url: grpcs://cache.example.org:443\n    mode: read-write\n    instance: main/dsr1\n"
        "    headers_from_env: {authorization: CACHE_AUTHORIZATION}\n    timeouts: {connect: 1, request: 2.5}\n"
        "  - url: file:///srv/cache\n"
        f"trust:\n  keys: [{key}]\n  signing_key: ~/key.pem\npull_requests: read-write\n"
    )
    profile = validate(parse_document(text.encode(), "f"), Profile)
    first, second = profile.remotes
    assert (first.mode, first.instance, first.timeouts.connect, first.timeouts.request) == ("read-write", "main/dsr1", 1.0, 2.5)
    assert first.headers_from_env == {"authorization": "CACHE_AUTHORIZATION"}
    assert (second.mode, second.timeouts.connect, second.timeouts.request) == ("read", 2.0, 10.0)
    assert (profile.trust.keys, profile.trust.unsigned, profile.pull_requests) == ((key,), None, "read-write")


@pytest.mark.parametrize(
    "url", ["https://", "https:cache", "file://host/x", "file:///", "https://a?b=c", "https://a/#b", "https://a b/", "HTTPS://a"]
)
def test_other_addresses_are_refused(url: str) -> None:
    with pytest.raises(InvalidInput):
        validate(parse_document((PROFILE + f"remotes: [{{url: '{url}'}}]\n").encode(), "f"), Profile)
