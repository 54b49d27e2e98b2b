"""The form of BUILD.yaml, recipes, targets and cache profiles.

The descriptions of the fields are the user's reference: `docs/build-yaml.md` and the JSON Schemas are made from them.
All models are frozen; lists are tuples; a key that is not named here is an error.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from dsr1build.config.scalars import shown_text

Kind: TypeAlias = Literal["embedding", "norm", "attention", "ffn", "expert", "gating", "combine", "head", "other"]
KindOrAll: TypeAlias = Literal["all", "embedding", "norm", "attention", "ffn", "expert", "gating", "combine", "head", "other"]
ScheduleName: TypeAlias = Literal["map1", "map2", "map3", "dot", "serial"]
ScheduleOption: TypeAlias = Literal["rows", "tokens"]
PassGroup: TypeAlias = Literal["parse", "bufferize", "lower", "optimize", "codegen"]

NAME_PATTERN = r"[A-Za-z0-9_][A-Za-z0-9._-]*"
PLACEHOLDER_PATTERN = r"\{([a-z][a-z0-9_]*)\}"
MODULE_PATTERN = r"([A-Za-z0-9_]+|\{[a-z][a-z0-9_]*\})(\.([A-Za-z0-9_]+|\{[a-z][a-z0-9_]*\}))*"
FEATURE_PATTERN = r"[+-][A-Za-z0-9._-]+"
LARGEST_TOKENS = 65536
REMOTE_SCHEMES = ("grpc", "grpcs", "http", "https", "s3", "gs", "az", "file")


def fault(message: str, hint: str = "", at: tuple[str | int, ...] = ()) -> PydanticCustomError:
    """An error raised by a validator; ``at`` leads from the validated value to the part that is wrong."""
    return PydanticCustomError("fault", "{message}", {"message": message, "hint": hint, "at": at})


def _text(pattern: str, what: str, hint: str, longest: int = 200) -> Any:
    """A field that holds text of one form, checked with a message in words and described by a pattern in the schema."""

    def check(value: str) -> str:
        if not re.fullmatch(pattern, value) or len(value) > longest:
            raise fault(f"`{shown_text(value)}` is not {what}", hint)
        return value

    schema = {"type": "string", "pattern": f"^{pattern}$", "maxLength": longest}
    return (AfterValidator(check), WithJsonSchema(schema))


def _check_path(value: str) -> str:
    if not value:
        raise fault("the path is empty", "Write a path, relative to this file or absolute.")
    if not value.isprintable():
        raise fault("the path holds a control character", "Write the path on one line, without escapes.")
    return value


def _check_version(value: int) -> int:
    if value != 1:
        raise fault(f"version {value} of this form is unknown", "Write `version: 1`, or use a newer dsr1build.")
    return value


def _check_block_size(value: int) -> int:
    if value not in (1, 2, 4, 8, 16, 32, 64):
        raise fault(f"{value} is not a block size", "Write a power of two from 1 to 64.")
    return value


def _check_passes(value: str) -> str:
    if not value.isprintable():
        raise fault("the passes hold a line end or a control character", "Write them on one line, or fold them with `>-`.")
    return value


def _check_tokens(value: Any) -> int | str:
    if value == "chunk" or (type(value) is int and 1 <= value <= LARGEST_TOKENS):
        return "chunk" if value == "chunk" else int(value)
    raise fault(f"{describe(value)} is not a number of tokens", f"Write a whole number from 1 to {LARGEST_TOKENS}, or `chunk`.")


def parse_bytes(value: object) -> int:
    """A number of bytes, or such a text as `20 GB` or `512 MiB`, in bytes. Raises ValueError for anything else."""
    if type(value) is int and 0 <= value < 1 << 63:
        return value
    match = (
        re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,6})?) ?(B|kB|MB|GB|TB|KiB|MiB|GiB|TiB)", value)
        if isinstance(value, str)
        else None
    )
    if match is None:
        raise ValueError(f"{describe(value)} is not a number of bytes")
    unit = match[2]
    base = 1024 if unit.endswith("iB") else 1000
    return int(float(match[1]) * base ** ("B", "k", "M", "G", "T").index(unit[0].replace("K", "k")))


def _check_bytes(value: Any) -> int:
    try:
        return parse_bytes(value)
    except ValueError as error:
        raise fault(str(error), "Write a whole number of bytes, or a number with its unit: 20 GB, 512 MiB.") from None


def _check_url(value: str) -> str:
    """A URL without credentials: what is in a profile is in version control, logs and messages."""
    scheme, found, rest = value.partition("://")
    if not found or scheme not in REMOTE_SCHEMES:
        raise fault(
            f"`{shown_text(value)}` is not the address of a shared cache",
            f"An address begins with {', '.join(f'{name}://' for name in REMOTE_SCHEMES[:-1])} or {REMOTE_SCHEMES[-1]}:///.",
        )
    authority = rest.partition("/")[0]
    if "@" in authority or "?" in rest or "#" in rest:
        raise fault(
            "the address holds credentials or a query",
            "Put credentials into an environment variable and name it in `headers_from_env`.",
        )
    if not rest.isprintable() or " " in authority or "\\" in rest or (not authority) != (scheme == "file") or rest == "/":
        raise fault(f"`{shown_text(value)}` is not the address of a shared cache", "Example: https://cache.example.org/dsr1.")
    return value


def describe(value: object) -> str:
    """A value of a file in words, for a message."""
    if isinstance(value, bool):
        return f"the boolean {'true' if value else 'false'}"
    if isinstance(value, int | float):
        return f"the number {value}"
    if isinstance(value, str):
        return f'the text "{shown_text(value)}"'
    if isinstance(value, tuple):
        return "a list"
    if isinstance(value, dict):
        return "a mapping"
    return "empty"


_NAME_CHECKS = _text(
    NAME_PATTERN, "a name", "A name is made of letters, digits, `.`, `_` and `-`, and begins with a letter, digit or `_`.", 100
)
Name: TypeAlias = Annotated[str, _NAME_CHECKS[0], _NAME_CHECKS[1]]
_MODULE_CHECKS = _text(
    MODULE_PATTERN, "a module pattern", "Write a module path, with placeholders for numbers: model.layers.{n}.self_attn."
)
ModulePattern: TypeAlias = Annotated[str, _MODULE_CHECKS[0], _MODULE_CHECKS[1]]
_FEATURE_CHECKS = _text(FEATURE_PATTERN, "a CPU feature", "Write `+name` to switch a feature on, `-name` to switch it off.")
Feature: TypeAlias = Annotated[str, _FEATURE_CHECKS[0], _FEATURE_CHECKS[1]]
_WORD_CHECKS = _text(NAME_PATTERN, "a name that LLVM knows", "Examples: x86_64-unknown-linux-gnu, x86-64-v3, native.")
ToolWord: TypeAlias = Annotated[str, _WORD_CHECKS[0], _WORD_CHECKS[1]]
PathText: TypeAlias = Annotated[str, AfterValidator(_check_path), WithJsonSchema({"type": "string", "minLength": 1})]
Tokens: TypeAlias = Annotated[
    int | Literal["chunk"],
    PlainValidator(_check_tokens),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1, "maximum": LARGEST_TOKENS}, {"const": "chunk"}]}),
]
Version: TypeAlias = Annotated[int, AfterValidator(_check_version), WithJsonSchema({"const": 1})]
BlockSize: TypeAlias = Annotated[
    int, AfterValidator(_check_block_size), WithJsonSchema({"type": "integer", "enum": [1, 2, 4, 8, 16, 32, 64]})
]
PassText: TypeAlias = Annotated[str, AfterValidator(_check_passes), WithJsonSchema({"type": "string"})]
_KEY_CHECKS = _text(r"ed25519:[0-9a-f]{64}", "a public key", "Copy the line that `dsr1build cache key new` prints.")
PublicKey: TypeAlias = Annotated[str, _KEY_CHECKS[0], _KEY_CHECKS[1]]
_HEADER_CHECKS = _text(r"[A-Za-z0-9-]+", "the name of a header", "Example: authorization.")
HeaderName: TypeAlias = Annotated[str, _HEADER_CHECKS[0], _HEADER_CHECKS[1]]
_VARIABLE_CHECKS = _text(
    r"[A-Za-z_][A-Za-z0-9_]*",
    "the name of an environment variable",
    "Write the variable's name; its value, a secret perhaps, does not belong in the file.",
)
VariableName: TypeAlias = Annotated[str, _VARIABLE_CHECKS[0], _VARIABLE_CHECKS[1]]
_INSTANCE_CHECKS = _text(r"([A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)*)?", "an instance name", "Example: main.")
InstanceName: TypeAlias = Annotated[str, _INSTANCE_CHECKS[0], _INSTANCE_CHECKS[1]]
RemoteUrl: TypeAlias = Annotated[
    str, AfterValidator(_check_url), WithJsonSchema({"type": "string", "pattern": f"^({'|'.join(REMOTE_SCHEMES)})://.+$"})
]
Bytes: TypeAlias = Annotated[
    int,
    PlainValidator(_check_bytes),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "minimum": 0},
                {"type": "string", "pattern": "^[0-9]{1,12}(\\.[0-9]{1,6})? ?(B|kB|MB|GB|TB|KiB|MiB|GiB|TiB)$"},
            ]
        }
    ),
]
Seconds: TypeAlias = Annotated[float, Field(gt=0, le=3600)]
ContextLength: TypeAlias = Annotated[int, Field(ge=1, le=1 << 30)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class RandomWeights(_Section):
    """Reproducible random weights."""

    seed: Annotated[int, Field(ge=0, lt=1 << 63)] = Field(
        description="Seed of the generator. Equal seeds give equal weights on every machine.", examples=[0]
    )


class Weights(_Section):
    """Where the weights of a model come from that is given by its `config.json` alone."""

    random: RandomWeights = Field(description="Generate reproducible random weights when linking.")


class ModelSource(_Section):
    """What is built. Exactly one of `checkpoint`, `config` and `onnx` is given."""

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [
                {"required": ["checkpoint"]},
                {"required": ["config", "weights"]},
                {"required": ["onnx"]},
            ],
            "not": {"required": ["checkpoint", "weights"]},
        }
    )

    checkpoint: PathText | None = Field(
        default=None,
        description="Directory of a Hugging Face checkpoint: `config.json` and `*.safetensors`.",
        examples=["models/DeepSeek-R1"],
    )
    config: PathText | None = Field(
        default=None,
        description="A `config.json` alone; needs `weights`. For trying, testing and timing a model without a download.",
        examples=["models/r1-mini/config.json"],
    )
    weights: Weights | None = Field(default=None, description="The weights that go with `config`.")
    onnx: PathText | None = Field(default=None, description="An ONNX file. Recognised, but not supported yet.")

    @model_validator(mode="after")
    def _one_source(self) -> "ModelSource":
        given = [name for name in ("checkpoint", "config", "onnx") if getattr(self, name) is not None]
        if not given:
            raise fault("the model has no source", "Add one of `checkpoint`, `config` and `onnx`.")
        if len(given) > 1:
            raise fault(f"`{given[0]}` and `{given[1]}` exclude each other", "Keep one of the two.", (given[1],))
        if self.onnx is not None:
            raise fault(
                "an ONNX file as the source of a model is not supported yet",
                "Use `checkpoint` or `config`.",
                ("onnx",),
            )
        if self.config is not None and self.weights is None:
            raise fault(
                "`config` alone has no weights",
                "Add `weights: {random: {seed: 0}}`, or name a checkpoint directory with `checkpoint`.",
                ("config",),
            )
        if self.checkpoint is not None and self.weights is not None:
            raise fault("a checkpoint brings its own weights", "Remove `weights`.", ("weights",))
        return self


class BuildFile(_Section):
    """BUILD.yaml: what to build, how, for which targets, and where to."""

    version: Version = Field(description="Version of this form.", examples=[1])
    name: Name = Field(description="Name of the build; bundles go to `<output>/<name>/<target>/`.", examples=["r1-mini"])
    model: ModelSource = Field(description="What is built.")
    recipe: PathText = Field(
        description="How the model is cut and specialized: path of a recipe, or the name of one that ships with the package.",
        examples=["recipes/deepseek_v3.yaml", "deepseek_v3"],
    )
    targets: Annotated[tuple[PathText, ...], Field(min_length=1)] = Field(
        description="What to compile for: paths of targets, or names of targets that ship with the package.",
        examples=[["targets/x86-64-v3.yaml"]],
    )
    context: ContextLength | None = Field(
        default=None,
        description="Longest context, in tokens. Default: the recipe's. Another value recompiles nothing.",
        examples=[512],
    )
    cache: PathText = Field(
        default="local",
        description="Which caches to use: path of a profile, or the name of one that ships with the package.",
        examples=["cache/local.yaml"],
    )
    output: PathText = Field(default="dist", description="Directory for the bundles.", examples=["dist"])


class PartitionRule(_Section):
    """Which modules become partitions of which kind.

    A module pattern is the path of a module; a placeholder such as `{n}` stands for one component of it. For each choice
    of placeholder values for which every pattern of the rule has a module in the model, these modules become one partition.
    """

    kind: Kind = Field(description="Kind of the partitions.", examples=["attention"])
    modules: Annotated[tuple[ModulePattern, ...], Field(min_length=1)] = Field(
        description="Patterns of the modules that form one partition. All use the same placeholders.",
        examples=[["model.norm", "lm_head"]],
    )

    @model_validator(mode="after")
    def _same_placeholders(self) -> "PartitionRule":
        first = placeholders(self.modules[0])
        for index, pattern in enumerate(self.modules):
            if pattern in self.modules[:index]:
                raise fault(f"the pattern `{pattern}` appears twice in one rule", "Remove one of them.", ("modules", index))
            if placeholders(pattern) != first:
                raise fault(
                    f"the patterns `{self.modules[0]}` and `{pattern}` have different placeholders",
                    "All patterns of a rule use the same placeholders; make it two rules.",
                    ("modules", index),
                )
        return self


def placeholders(pattern: str) -> frozenset[str]:
    """The names of the placeholders of a module pattern, without braces."""
    return frozenset(re.findall(PLACEHOLDER_PATTERN, pattern))


class SpecializationRule(_Section):
    """A number of tokens that kernels are compiled for beside the variant that takes any number."""

    tokens: Tokens = Field(description="Number of tokens, or `chunk` for the recipe's `chunk`.", examples=[1, "chunk"])
    pad: bool = Field(
        default=False,
        description="Also use the variant for fewer tokens, padding with rows of zeros. Kernels that write state or mix rows"
        " are never padded.",
    )


class Specializations(_Section):
    """For which numbers of tokens kernels are compiled specially.

    A variant for any number of tokens is always added; the runtime takes the tightest variant that fits.
    """

    decode: tuple[SpecializationRule, ...] = Field(default=(SpecializationRule(tokens=1),), description="Kernels of decode.")
    prefill: tuple[SpecializationRule, ...] = Field(
        default=(SpecializationRule(tokens="chunk"),), description="Kernels of prefill."
    )
    expert: tuple[SpecializationRule, ...] = Field(
        default=(SpecializationRule(tokens=1),),
        description="Kernels of routed experts, in both modes: an expert gets those tokens that chose it, not all.",
    )

    @model_validator(mode="after")
    def _distinct(self) -> "Specializations":
        for name in ("decode", "prefill", "expert"):
            rules: tuple[SpecializationRule, ...] = getattr(self, name)
            for index, rule in enumerate(rules):
                if rule.tokens in [earlier.tokens for earlier in rules[:index]]:
                    raise fault(f"`tokens: {rule.tokens}` appears twice", "Remove one of them.", (name, index))
        return self


Schedules: TypeAlias = Mapping[ScheduleName, Mapping[ScheduleOption, BlockSize]]
Passes: TypeAlias = Mapping[PassGroup, PassText]


class Pipeline(_Section):
    """How kernels are compiled, where it differs from the target's defaults."""

    schedules: Schedules = Field(
        default_factory=dict,
        description="Block sizes of the loop schedules: for `dot`, the `rows` of weights of one work item and the `tokens`"
        " of one block.",
        examples=[{"dot": {"rows": 4, "tokens": 2}}],
    )
    passes: Passes = Field(
        default_factory=dict,
        description="Replacements of pass groups: `parse`, `bufferize` and `lower` are lists of MLIR passes, `optimize` and"
        " `codegen` the options of LLVM's `opt` and `llc`.",
        examples=[{"optimize": "-O2"}],
    )


class Recipe(_Section):
    """A recipe: how a model is cut into partitions and for which sizes its kernels are compiled."""

    version: Version = Field(description="Version of this form.", examples=[1])
    name: Name = Field(description="Name of the recipe.", examples=["deepseek_v3"])
    architectures: Annotated[tuple[Name, ...], Field(min_length=1)] = Field(
        description="The `model_type`s that the recipe is for.", examples=[["deepseek_v3"]]
    )
    context: ContextLength = Field(
        default=4096,
        description="Longest context, in tokens, of builds that do not name one; the model's own longest context where that"
        " is shorter.",
    )
    chunk: Annotated[int, Field(ge=1, le=LARGEST_TOKENS)] = Field(
        default=64, description="Longest chunk, in tokens, that prefill processes at once. Memory for activations grows with it."
    )
    dispatch: Literal["sparse"] = Field(
        default="sparse", description="How routed experts run: `sparse` runs only those experts that were chosen."
    )
    partitions: Annotated[tuple[PartitionRule, ...], Field(min_length=1)] = Field(
        description="The rules that cut the model, in order: a module belongs to the first rule that applies to it."
    )
    specializations: Specializations = Field(
        default_factory=Specializations, description="For which numbers of tokens kernels are compiled specially."
    )
    pipelines: Mapping[Name, Mapping[KindOrAll, Pipeline]] = Field(
        default_factory=dict,
        description="Changes to the target's defaults, by the target's name and by the kind of partition (or `all`; a kind"
        " goes before `all`, and both before the target).",
        examples=[{"x86-64-v3": {"ffn": {"schedules": {"dot": {"rows": 8}}}}}],
    )


class Target(_Section):
    """A target: what to compile for, and with which toolchain."""

    version: Version = Field(description="Version of this form.", examples=[1])
    name: Name = Field(description="Name of the target, and of the bundle's directory.", examples=["x86-64-v3"])
    triple: ToolWord = Field(description="LLVM target triple.", examples=["x86_64-unknown-linux-gnu"])
    cpu: ToolWord = Field(
        default="x86-64-v3",
        description="LLVM CPU name. `native` is the CPU of the machine that builds; it is resolved before anything is cached.",
    )
    features: tuple[Feature, ...] = Field(
        default=(), description="CPU features to add to or take from what the CPU has.", examples=[["+avx512f"]]
    )
    toolchain: Literal["llvm-cpu"] = Field(
        default="llvm-cpu", description="The toolchain: `llvm-cpu` is upstream MLIR and LLVM for the CPU."
    )
    schedules: Schedules = Field(
        default_factory=dict, description="Block sizes of the loop schedules, in place of the toolchain's own; as in a recipe."
    )
    passes: Passes = Field(default_factory=dict, description="Replacements of the toolchain's own pass groups; as in a recipe.")


class LocalCache(_Section):
    """The cache on this machine."""

    directory: PathText | None = Field(
        default=None,
        description="Directory of the cache. Default: `$XDG_CACHE_HOME/dsr1build`, or else `~/.cache/dsr1build`.",
        examples=["~/.cache/dsr1build"],
    )
    max_bytes: Bytes = Field(
        default=20_000_000_000,
        description="The most room that the cache may take, in bytes or with a unit. What costs least to make again for its"
        " size, and was not used lately, is evicted first; what a running build uses never is.",
        examples=["20 GB"],
    )
    max_files: Annotated[int, Field(ge=0, lt=1 << 63)] = Field(
        default=1_000_000, description="The most files that the cache may have: file systems and quotas limit their number, too."
    )


class RemoteTimeouts(_Section):
    """How long a shared cache may take. The first request that takes longer is the last one of the build."""

    connect: Seconds = Field(default=2.0, description="Seconds until a connection stands.")
    request: Seconds = Field(default=10.0, description="Seconds until a whole request is answered.")


class RemoteCache(_Section):
    """A cache that several machines share."""

    url: RemoteUrl = Field(
        description="Address: `grpc://` or `grpcs://` for the Remote Execution API, `http://` or `https://` for Bazel's HTTP"
        " layout, `s3://`, `gs://`, `az://` or `file:///` for an object store.",
        examples=["grpcs://cache.example.org:443", "https://cache.example.org/dsr1", "s3://bucket/prefix"],
    )
    mode: Literal["read", "read-write"] = Field(
        default="read", description="`read-write` also uploads what was built here; builds of pull requests only read."
    )
    instance: InstanceName = Field(
        default="", description="Instance name, for `grpc://` and `grpcs://` servers that hold several caches.", examples=["main"]
    )
    headers_from_env: Mapping[HeaderName, VariableName] = Field(
        default_factory=dict,
        description="Headers to send with each request, and the environment variables that hold their values. A header whose"
        " variable is not set is not sent.",
        examples=[{"authorization": "CACHE_AUTHORIZATION"}],
    )
    timeouts: RemoteTimeouts = Field(default_factory=RemoteTimeouts, description="How long the cache may take.")

    @model_validator(mode="after")
    def _keys_fit_the_protocol(self) -> "RemoteCache":
        scheme = self.url.partition("://")[0]
        if self.instance and scheme not in ("grpc", "grpcs"):
            raise fault(f"a cache at {scheme}:// has no instances", "Remove `instance`, or put it into the path.", ("instance",))
        if self.headers_from_env and scheme not in ("grpc", "grpcs", "http", "https"):
            raise fault(
                f"requests to {scheme}:// carry no headers of yours",
                "Give credentials as the provider's own tools take them, for example in AWS_ACCESS_KEY_ID.",
                ("headers_from_env",),
            )
        return self


class Trust(_Section):
    """Whose results are used. A result is signed by the machine that made it."""

    keys: tuple[PublicKey, ...] = Field(
        default=(),
        description="Public keys, as `dsr1build cache key new` prints them; results of other signers are not used. The public"
        " key that belongs to `signing_key` counts as one of them.",
    )
    unsigned: Literal["accept", "refuse"] | None = Field(
        default=None,
        description="Whether results without a signature are used that come from a shared cache. Default: `refuse` as soon as"
        " there is a key, else `accept`. Those of the cache on this machine are used always.",
    )
    signing_key: PathText | None = Field(
        default=None,
        description="File of the private key that signs what is uploaded; `DSR1_CACHE_KEY_FILE` names another one. Only its"
        " owner may be able to read it.",
        examples=["~/.config/dsr1build/signing.pem"],
    )

    @model_validator(mode="after")
    def _refusal_needs_keys(self) -> "Trust":
        if self.unsigned == "refuse" and not self.keys and self.signing_key is None:
            raise fault(
                "without a trusted key, anybody's signature would do",
                "Add the public keys that you trust to `keys`, or remove `unsigned`.",
                ("unsigned",),
            )
        return self


class Profile(_Section):
    """A cache profile: which caches to use."""

    version: Version = Field(description="Version of this form.", examples=[1])
    name: Name = Field(description="Name of the profile.", examples=["local"])
    local: LocalCache = Field(default_factory=LocalCache, description="The cache on this machine.")
    remotes: tuple[RemoteCache, ...] = Field(default=(), description="Shared caches, in the order in which they are asked.")
    trust: Trust = Field(default_factory=Trust, description="Whose results are used.")
    pull_requests: Literal["read", "read-write"] = Field(
        default="read",
        description="`read-write` lets builds of pull requests upload, too. It counts only in a profile outside of the"
        " workspace that is named on the command line with `--cache`, for a pull request can change all the others.",
    )

    @model_validator(mode="after")
    def _distinct_remotes(self) -> "Profile":
        addresses = [(remote.url, remote.instance) for remote in self.remotes]
        for index, address in enumerate(addresses):
            if address in addresses[:index]:
                raise fault(f"the remote `{address[0]}` is listed twice", "Remove one of them.", ("remotes", index, "url"))
        return self
