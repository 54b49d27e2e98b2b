"""Qwen2ForCausalLM: grouped-query attention with biases on q, k and v; tied or untied embeddings."""

from dsr1build.frontends.checkpoint import blueprint as bp
from dsr1build.frontends.checkpoint.config_fields import Fields
from dsr1build.frontends.checkpoint.grouped_query import build


def read_qwen2(fields: Fields) -> bp.Blueprint:
    """The blueprint of a Qwen2 configuration. Raises InvalidInput for unsupported values, such as sliding windows."""
    common = bp.read_common(fields, "Qwen2ForCausalLM")
    head_dim = bp.read_head_dim(fields, common)
    if fields.boolean("use_mrope", False):
        fields.refuse("use_mrope", "use_mrope true is not supported", "Supported: false.")
    _refuse_sliding_window(fields, common.layers)
    draft, rope, functions = build(fields, "qwen2", common, head_dim=head_dim, qkv_bias=True, output_bias=False)
    bp.check_all_fields(fields)
    return bp.finish("qwen2", common, draft, rope, {"prefill": functions, "decode": functions})


def _refuse_sliding_window(fields: Fields, layers: int) -> None:
    """A window is in effect in layers from ``max_window_layers`` on, or where ``layer_types`` says so."""
    sliding = fields.boolean("use_sliding_window", False)
    fields.raw("sliding_window")
    first = fields.integer("max_window_layers", 28, low=0)
    types = fields.raw("layer_types")
    hint = "Supported: full attention in every layer."
    if types is None:
        if sliding and first < layers:
            message = f"use_sliding_window true is not supported: layers {first} to {layers - 1} would use a window"
            fields.refuse("use_sliding_window", message, hint)
        return
    if not isinstance(types, list) or len(types) != layers:
        fields.refuse("layer_types", f"layer_types must be a list with one entry for each of the {layers} layers", hint)
    for layer, kind in enumerate(types):
        if kind != "full_attention":
            fields.refuse("layer_types", f"layer_types {kind!r} of layer {layer} is not supported", hint)
