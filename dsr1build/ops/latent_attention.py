"""Multi-head latent attention over the latent cache, in the unabsorbed and in the absorbed form.

Every cache row is [latent | rotated key of all heads]; ``w_kvb`` holds for each head its rows W_UK (nope), then W_UV (value).
The two forms are the same function (DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.1 and appendix C)::

    expanded:  k[l] = W_UK latent[l],  v[l] = W_UV latent[l],  s[l] = (q_nope . k[l] + q_rope . k_rope[l]) * scale,  y = P v
    absorbed:  u = q_nope W_UK,        s[l] = (u . latent[l] + q_rope . k_rope[l]) * scale,  y = W_UV (P latent)

The expanded form costs the expansion of all rows once for each head, the absorbed form more for each query: the first is
for many tokens, the second for few.
"""

from collections.abc import Callable

from dsr1build.graph.model import TensorType
from dsr1build.ops.attention import causal_softmax_reference
from dsr1build.ops.dense import widened_weight
from dsr1build.ops.latent_lowering import LatentShape, latent_shape, lower_absorbed, lower_expanded
from dsr1build.ops.operator import Attributes, Operator, Types, activation, required


def _infer(types: Types, attributes: Attributes) -> tuple[TensorType, ...]:
    shape = latent_shape(types, attributes)
    return (TensorType("f32", (activation(types[0], "q")[0], shape.heads * shape.value)),)


def _reference(types: Types, attributes: Attributes, context: Callable[[LatentShape], str]) -> str:
    """What both forms share, then ``context``: the statements from the scores to ``y``."""
    s = latent_shape(types, attributes)
    w_kvb = required(types[2], "w_kvb")
    return f"""
        first = Constant <value_ints = [0]> ()
        last = Constant <value_ints = [-1]> ()
        heads_shape = Constant <value_ints = [-1, {s.heads}, {s.nope + s.rope}]> ()
        q_parts = Constant <value_ints = [{s.nope}, {s.rope}]> ()
        q_heads = Reshape (q, heads_shape)
        q_by_head = Transpose <perm = [1, 0, 2]> (q_heads)
        q_nope, q_rope = Split <axis = 2> (q_by_head, q_parts)
        count = Shape <start = 0, end = 1> (q)
        begin = Reshape (past, last)
        length = Add (begin, count)
        rows = Slice (cache, first, length, first)
        cache_parts = Constant <value_ints = [{s.latent}, {s.rope}]> ()
        latent, k_rope = Split <axis = 1> (rows, cache_parts)
        k_rope_turned = Transpose <perm = [1, 0]> (k_rope)
        {widened_weight("wide", "w_kvb", w_kvb, "scale_kvb")}
        wide_shape = Constant <value_ints = [{s.heads}, {s.nope + s.value}, {s.latent}]> ()
        wide_parts = Constant <value_ints = [{s.nope}, {s.value}]> ()
        wide_heads = Reshape (wide, wide_shape)
        w_uk, w_uv = Split <axis = 1> (wide_heads, wide_parts)
        w_uv_turned = Transpose <perm = [0, 2, 1]> (w_uv)
        rope_scores = MatMul (q_rope, k_rope_turned)
        {context(s)}
    """


def _softmax(s: LatentShape) -> str:
    return f"""
        both_scores = Add (nope_scores, rope_scores)
        {causal_softmax_reference("both_scores", "p", s.scale)}
"""


def _result(s: LatentShape) -> str:
    return f"""
        by_token = Transpose <perm = [1, 0, 2]> (attended)
        y_shape = Constant <value_ints = [-1, {s.heads * s.value}]> ()
        y = Reshape (by_token, y_shape)
"""


def _reference_expanded(types: Types, attributes: Attributes) -> str:
    def context(s: LatentShape) -> str:
        return f"""
        w_uk_turned = Transpose <perm = [0, 2, 1]> (w_uk)
        k = MatMul (latent, w_uk_turned)
        k_turned = Transpose <perm = [0, 2, 1]> (k)
        nope_scores = MatMul (q_nope, k_turned)
        {_softmax(s)}
        v = MatMul (latent, w_uv_turned)
        attended = MatMul (p, v)
        {_result(s)}"""

    return _reference(types, attributes, context)


def _reference_absorbed(types: Types, attributes: Attributes) -> str:
    def context(s: LatentShape) -> str:
        return f"""
        latent_turned = Transpose <perm = [1, 0]> (latent)
        q_latent = MatMul (q_nope, w_uk)
        nope_scores = MatMul (q_latent, latent_turned)
        {_softmax(s)}
        mixed = MatMul (p, latent)
        attended = MatMul (mixed, w_uv_turned)
        {_result(s)}"""

    return _reference(types, attributes, context)


_INPUTS = ("q", "cache", "w_kvb", "past", "scale_kvb?")
_ATTRIBUTES = ("heads", "nope", "rope", "value", "scale")

LATENT_ATTENTION_EXPANDED = Operator(
    name="LatentAttentionExpanded",
    inputs=_INPUTS,
    outputs=("y",),
    attributes=_ATTRIBUTES,
    infer=_infer,
    reference=_reference_expanded,
    lower=lower_expanded,
    tolerance=2e-6,
    row_independent=False,
)

LATENT_ATTENTION_ABSORBED = Operator(
    name="LatentAttentionAbsorbed",
    inputs=_INPUTS,
    outputs=("y",),
    attributes=_ATTRIBUTES,
    infer=_infer,
    reference=_reference_absorbed,
    lower=lower_absorbed,
    tolerance=2e-6,
    row_independent=False,
)

OPERATORS = (LATENT_ATTENTION_EXPANDED, LATENT_ATTENTION_ABSORBED)
