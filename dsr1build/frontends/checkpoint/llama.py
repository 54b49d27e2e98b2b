"""LlamaForCausalLM: grouped-query attention, optional biases on all four attention projections."""

from dsr1build.frontends.checkpoint import blueprint as bp
from dsr1build.frontends.checkpoint.config_fields import Fields
from dsr1build.frontends.checkpoint.grouped_query import build


def read_llama(fields: Fields) -> bp.Blueprint:
    """The blueprint of a Llama configuration. Raises InvalidInput for unsupported values, such as biases in the MLP."""
    common = bp.read_common(fields, "LlamaForCausalLM")
    head_dim = bp.read_head_dim(fields, common)
    bias = fields.boolean("attention_bias", False)
    if fields.boolean("mlp_bias", False):
        fields.refuse("mlp_bias", "mlp_bias true is not supported", "Supported: false.")
    draft, rope, functions = build(fields, "llama", common, head_dim=head_dim, qkv_bias=bias, output_bias=bias)
    bp.check_all_fields(fields)
    return bp.finish("llama", common, draft, rope, {"prefill": functions, "decode": functions})
