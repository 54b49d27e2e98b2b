"""The decoder with grouped-query attention and dense feed-forward layers that Qwen2 and Llama share."""

from dsr1build.frontends.checkpoint import blueprint as bp
from dsr1build.frontends.checkpoint.config_fields import Fields
from dsr1build.frontends.checkpoint.rope import Rope, read_rope
from dsr1build.graph.model import Function, Node


def build(
    fields: Fields, architecture: str, common: bp.Common, *, head_dim: int, qkv_bias: bool, output_bias: bool
) -> tuple[bp.Draft, Rope, tuple[Function, ...]]:
    """The layers of the model. Takes the fields of KV heads and RoPE.

    Raises InvalidInput where the heads do not divide into groups.
    """
    kv_heads = fields.integer("num_key_value_heads", common.heads)
    if common.heads % kv_heads:
        message = f"num_attention_heads {common.heads} is not a multiple of num_key_value_heads {kv_heads}"
        fields.refuse("num_key_value_heads", message, "Correct the value.")
    bp.require_even(fields, "head_dim", head_dim)
    rope = read_rope(fields, head_dim, common.max_positions)
    draft = bp.Draft()
    value = bp.embed(draft, common)
    for layer in range(common.layers):
        prefix = f"model.layers.{layer}"
        attention = f"{prefix}.self_attn"
        normed = bp.norm(draft, common, f"{prefix}.input_layernorm", value)
        weights = []
        for letter, width in (("q", common.heads * head_dim), ("k", kv_heads * head_dim), ("v", kv_heads * head_dim)):
            weights.append(draft.matrix(f"{attention}.{letter}_proj.weight", width, common.hidden))
            if qkv_bias:
                weights.append(draft.bias(f"{attention}.{letter}_proj.bias", width))
        weights.append(draft.matrix(f"{attention}.o_proj.weight", common.hidden, common.heads * head_dim))
        if output_bias:
            weights.append(draft.bias(f"{attention}.o_proj.bias", common.hidden))
        caches = (f"{attention}.k_cache", f"{attention}.v_cache")
        draft.states.update(dict.fromkeys(caches, kv_heads * head_dim))
        outputs = (attention, *(f"{cache}.next" for cache in caches))
        draft.call("self_attn", (normed, value, *weights, "rope.cos", "rope.sin", "past", *caches), outputs, attention)
        normed = bp.norm(draft, common, f"{prefix}.post_attention_layernorm", attention)
        value = bp.feed_forward(draft, f"{prefix}.mlp", normed, common.hidden, common.intermediate, attention)
    bp.head(draft, common, value)
    functions = (
        attention_function(common.heads, kv_heads, head_dim, qkv_bias, output_bias),
        bp.feed_forward_function(residual=True, fp8=False),
    )
    return draft, rope, functions


def attention_function(heads: int, kv_heads: int, head_dim: int, qkv_bias: bool, output_bias: bool) -> Function:
    """Grouped-query attention with half-rotation RoPE and the residual, over caches of rotated keys and of values."""
    biases = tuple(f"b_{letter}" if qkv_bias else "" for letter in "qkv")
    b_o = "b_o" if output_bias else ""
    weights = [n for pair in zip(("w_q", "w_k", "w_v", "w_o"), (*biases, b_o), strict=True) for n in pair if n]
    inputs = ("x", "residual", *weights, "cos", "sin", "past", "k_cache", "v_cache")

    def rotate(value: str, count: int, output: str) -> Node:
        operands = (value, "cos", "sin", "past")
        return bp.operator("RotaryEmbedding", operands, output, heads=count, head_dim=head_dim, offset=0, interleaved=0)

    nodes = (
        bp.operator("Linear", ("x", "w_q", biases[0]), "q"),
        bp.operator("Linear", ("x", "w_k", biases[1]), "k"),
        bp.operator("Linear", ("x", "w_v", biases[2]), "v"),
        rotate("q", heads, "q_rotated"),
        rotate("k", kv_heads, "k_rotated"),
        bp.operator("CacheInsert", ("k_cache", "k_rotated", "past"), "k_next"),
        bp.operator("CacheInsert", ("v_cache", "v", "past"), "v_next"),
        bp.operator(
            "GroupedAttention",
            ("q_rotated", "k_next", "v_next", "past"),
            "context",
            heads=heads,
            kv_heads=kv_heads,
            scale=head_dim**-0.5,
        ),
        bp.operator("Linear", ("context", "w_o", b_o, "residual"), "y"),
    )
    return Function("self_attn", inputs, ("y", "k_next", "v_next"), nodes)
