"""What an architecture says of a model before it is known where the weights come from, and the parts that all share.

A decoder is: embedding, layers (norm, attention, norm, feed-forward; both with the residual inside), norm, head. The
nodes of the main graph are the same for prefill and decode; the modes differ in the bodies of the functions they call.
"""

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from dsr1build.frontends.checkpoint.config_fields import WITHOUT_EFFECT, Fields
from dsr1build.frontends.checkpoint.rope import Rope
from dsr1build.graph.model import Attribute, DType, Function, Mode, Node

Role: TypeAlias = Literal["gain", "matrix", "bias", "selection_bias", "fp8_matrix", "fp8_scale"]

# The layers of every known model stay far below; a wrong number must not make a graph that fills the memory.
MOST_LAYERS = 4096
MOST_EXPERTS = 4096
MOST_EXPERT_CALLS = 1_000_000
FP8_BLOCK = 128


@dataclass(frozen=True, slots=True)
class Expected:
    """A tensor that the checkpoint must hold. ``gain`` is a norm's weight; ``selection_bias`` is stored in f32."""

    shape: tuple[int, ...]
    role: Role


@functools.cache
def expected(shape: tuple[int, ...], role: Role) -> Expected:
    """The one object for this shape and role: R1 has 90,000 tensors of some thirty kinds."""
    return Expected(shape, role)


@dataclass(frozen=True, slots=True)
class Blueprint:
    """``states`` gives the width of each KV cache. ``extra_layers`` are numbers of stored layers that are not run (MTP)."""

    architecture: str
    vocabulary: int
    hidden: int
    max_positions: int
    dtype: DType
    deviation: float
    tied: bool
    rope: Rope
    tensors: Mapping[str, Expected]
    nodes: tuple[Node, ...]
    functions: Mapping[Mode, Mapping[str, Function]]
    states: Mapping[str, int]
    bos_token_ids: tuple[int, ...]
    eos_token_ids: tuple[int, ...]
    extra_layers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Common:
    """The fields that every decoder has."""

    vocabulary: int
    hidden: int
    layers: int
    intermediate: int
    heads: int
    epsilon: float
    max_positions: int
    dtype: DType
    deviation: float
    tied: bool
    bos_token_ids: tuple[int, ...]
    eos_token_ids: tuple[int, ...]


@dataclass(slots=True)
class Draft:
    """A graph in the making: tensors in the order of the model's definition and nodes in topological order.

    With ``fp8`` every quantised matrix is followed by its block scales, and the operators take them.
    """

    fp8: bool = False
    tensors: dict[str, Expected] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)
    states: dict[str, int] = field(default_factory=dict)

    def gain(self, name: str, width: int) -> str:
        self.tensors[name] = expected((width,), "gain")
        return name

    def bias(self, name: str, width: int) -> str:
        self.tensors[name] = expected((width,), "bias")
        return name

    def matrix(self, name: str, rows: int, columns: int) -> str:
        """A matrix [rows, columns] that is never quantised."""
        self.tensors[name] = expected((rows, columns), "matrix")
        return name

    def matrices(self, *shapes: tuple[str, int, int]) -> tuple[str, ...]:
        """Names of the matrices and, in an FP8 checkpoint, of their scales after them, in the same order."""
        scales = []
        for name, rows, columns in shapes:
            self.tensors[name] = expected((rows, columns), "fp8_matrix" if self.fp8 else "matrix")
            if self.fp8:
                scale = name + "_scale_inv"
                self.tensors[scale] = expected((-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK)), "fp8_scale")
                scales.append(scale)
        return (*(name for name, _, _ in shapes), *scales)

    def operator(self, op: str, inputs: Iterable[str], output: str, name: str, **attributes: Attribute) -> str:
        self.nodes.append(operator(op, inputs, output, name=name, **attributes))
        return output

    def call(self, function: str, inputs: Iterable[str], outputs: tuple[str, ...], name: str) -> None:
        self.nodes.append(Node(function, tuple(inputs), outputs, domain="module", name=name))


def operator(op: str, inputs: Iterable[str], *outputs: str, name: str = "", **attributes: Attribute) -> Node:
    """A node of the ``dsr1`` domain; absent operands at the end are left out."""
    operands = list(inputs)
    while operands and not operands[-1]:
        operands.pop()
    return Node(op, tuple(operands), outputs, tuple(sorted(attributes.items())), name=name)


def read_common(fields: Fields, causal_lm: str) -> Common:
    """Take the fields that all architectures share; ``causal_lm`` is the only class of models that is supported."""
    architectures = fields.raw("architectures")
    if architectures is not None and (not isinstance(architectures, list) or causal_lm not in architectures):
        hint = f"Supported: [{causal_lm!r}]."
        fields.refuse("architectures", f"architectures {architectures!r} is not supported", hint)
    fields.choice("hidden_act", "silu", ("silu", "swish"))
    if fields.boolean("is_encoder_decoder", False):
        fields.refuse("is_encoder_decoder", "an encoder-decoder model is not supported", "Supported: decoder-only models.")
    # `dtype` is the newer name of `torch_dtype`; transformers reads either.
    dtype_field = "dtype" if fields.present("dtype") else "torch_dtype"
    fields.raw("torch_dtype")
    dtypes: dict[str, DType] = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
    return Common(
        vocabulary=fields.integer("vocab_size"),
        hidden=fields.integer("hidden_size"),
        layers=fields.integer("num_hidden_layers", high=MOST_LAYERS),
        intermediate=fields.integer("intermediate_size"),
        heads=fields.integer("num_attention_heads"),
        epsilon=fields.number("rms_norm_eps", 1e-6),
        max_positions=fields.integer("max_position_embeddings"),
        dtype=dtypes[fields.choice(dtype_field, "bfloat16", tuple(dtypes))],
        deviation=fields.number("initializer_range", 0.02),
        tied=fields.boolean("tie_word_embeddings", False),
        bos_token_ids=fields.token_ids("bos_token_id"),
        eos_token_ids=fields.token_ids("eos_token_id"),
    )


def read_head_dim(fields: Fields, common: Common) -> int:
    """The width of a head: ``head_dim``, or else an equal share of the hidden size."""
    if fields.present("head_dim"):
        return fields.integer("head_dim")
    if common.hidden % common.heads:
        message = f"hidden_size {common.hidden} is not a multiple of num_attention_heads {common.heads}"
        fields.refuse("num_attention_heads", message, "Correct the value, or give head_dim.")
    return common.hidden // common.heads


def require_even(fields: Fields, name: str, width: int) -> None:
    """RoPE rotates pairs."""
    if width % 2:
        fields.refuse(name, f"the rotated width of a head must be even, not {width}", "Correct the value.")


def check_all_fields(fields: Fields, without_effect: Iterable[str] = ()) -> None:
    """Refuse what was not read. ``without_effect`` adds the architecture's own fields to the general ones."""
    fields.taken.add("model_type")
    fields.refuse_unknown(WITHOUT_EFFECT.union(without_effect))


def embed(draft: Draft, common: Common) -> str:
    table = draft.matrix("model.embed_tokens.weight", common.vocabulary, common.hidden)
    return draft.operator("Embedding", ("ids", table), "model.embed_tokens", "model.embed_tokens")


def norm(draft: Draft, common: Common, name: str, value: str) -> str:
    gamma = draft.gain(f"{name}.weight", common.hidden)
    return draft.operator("RMSNorm", (value, gamma), name, name, epsilon=common.epsilon)


def head(draft: Draft, common: Common, value: str) -> None:
    """Final norm and language head; a tied head reads the embedding's own tensor."""
    normed = norm(draft, common, "model.norm", value)
    weight = "model.embed_tokens.weight"
    if not common.tied:
        weight = draft.matrix("lm_head.weight", common.vocabulary, common.hidden)
    draft.operator("Linear", (normed, weight), "logits", "lm_head")


def feed_forward(draft: Draft, name: str, value: str, hidden: int, intermediate: int, residual: str = "") -> str:
    """down(silu(gate x) * up x), with the residual added in a dense layer; calls ``mlp`` or ``expert``."""
    weights = draft.matrices(
        (f"{name}.gate_proj.weight", intermediate, hidden),
        (f"{name}.up_proj.weight", intermediate, hidden),
        (f"{name}.down_proj.weight", hidden, intermediate),
    )
    inputs = (value, residual, *weights) if residual else (value, *weights)
    draft.call("mlp" if residual else "expert", inputs, (name,), name)
    return name


def feed_forward_function(residual: bool, fp8: bool) -> Function:
    """The function behind ``feed_forward``; one for all dense layers, one for all routed and shared experts."""
    scales = ("scale_gate", "scale_up", "scale_down") if fp8 else ("", "", "")
    inputs = ("x", *(("residual",) if residual else ()), "w_gate", "w_up", "w_down", *(s for s in scales if s))
    nodes = (
        operator("SwiGLU", ("x", "w_gate", "w_up", scales[0], scales[1]), "gated"),
        operator("Linear", ("gated", "w_down", "", "residual" if residual else "", scales[2]), "y"),
    )
    return Function("mlp" if residual else "expert", inputs, ("y",), nodes)


def finish(
    architecture: str,
    common: Common,
    draft: Draft,
    rope: Rope,
    functions: Mapping[Mode, Iterable[Function]],
    *,
    extra_layers: tuple[int, ...] = (),
) -> Blueprint:
    return Blueprint(
        architecture=architecture,
        vocabulary=common.vocabulary,
        hidden=common.hidden,
        max_positions=common.max_positions,
        dtype=common.dtype,
        deviation=common.deviation,
        tied=common.tied,
        rope=rope,
        tensors=draft.tensors,
        nodes=tuple(draft.nodes),
        functions={mode: {f.name: f for f in group} for mode, group in functions.items()},
        states=draft.states,
        bos_token_ids=common.bos_token_ids,
        eos_token_ids=common.eos_token_ids,
        extra_layers=extra_layers,
    )
