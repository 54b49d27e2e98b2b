"""DeepseekV3ForCausalLM (V3, R1): multi-head latent attention, a few dense layers, then mixtures of experts.

Prefill expands the latent cache to keys and values, decode absorbs the projection into the query: two functions with the
same interface and the same weights.
"""

from dataclasses import dataclass

from dsr1build.frontends.checkpoint import blueprint as bp
from dsr1build.frontends.checkpoint.config_fields import Fields
from dsr1build.frontends.checkpoint.rope import read_rope
from dsr1build.graph.model import Function, Mode, Node

# The norms inside of the attention do not take the configuration's epsilon; transformers leaves them at its default.
INNER_EPSILON = 1e-6

# transformers derives these from other fields and ignores what the file says.
DERIVED = ("head_dim", "qk_head_dim")


@dataclass(frozen=True, slots=True)
class _Latent:
    """The sizes of latent attention. ``query_rank`` is 0 where q has a single projection."""

    heads: int
    query_rank: int
    latent: int
    nope: int
    rope: int
    value: int
    bias: bool
    interleaved: int


@dataclass(frozen=True, slots=True)
class _Experts:
    """The mixture of experts; ``shared`` is the intermediate width of the shared expert, 0 for none."""

    count: int
    intermediate: int
    shared: int
    selection_bias: bool
    route: Node


def read_deepseek_v3(fields: Fields) -> bp.Blueprint:
    """The blueprint of a DeepSeek-V3 configuration. Raises InvalidInput for unsupported values, by name."""
    common = bp.read_common(fields, "DeepseekV3ForCausalLM")
    latent = _read_latent(fields, common)
    rope = read_rope(fields, latent.rope, common.max_positions)
    experts = _read_experts(fields)
    first_expert_layer = fields.integer("first_k_dense_replace", 3, low=0)
    frequency = fields.integer("moe_layer_freq", 1)
    if experts.count * common.layers > bp.MOST_EXPERT_CALLS:
        message = f"{common.layers} layers of {experts.count} experts are more than {bp.MOST_EXPERT_CALLS} experts in all"
        fields.refuse("num_hidden_layers", message, "Correct the value.")
    fp8 = _read_quantization(fields)
    # `num_mtp_layers` is the newer name.
    mtp = fields.integer("num_nextn_predict_layers", fields.integer("num_mtp_layers", 0, low=0), low=0, high=64)
    bp.check_all_fields(fields, DERIVED)

    draft = bp.Draft(fp8=fp8)
    value = bp.embed(draft, common)
    expert_layers = 0
    for layer in range(common.layers):
        prefix = f"model.layers.{layer}"
        attention = f"{prefix}.self_attn"
        normed = bp.norm(draft, common, f"{prefix}.input_layernorm", value)
        _attention(draft, attention, latent, common.hidden, normed, value)
        normed = bp.norm(draft, common, f"{prefix}.post_attention_layernorm", attention)
        if layer >= first_expert_layer and layer % frequency == 0:
            value = _mixture(draft, f"{prefix}.mlp", experts, common.hidden, normed, attention)
            expert_layers += 1
        else:
            value = bp.feed_forward(draft, f"{prefix}.mlp", normed, common.hidden, common.intermediate, attention)
    bp.head(draft, common, value)

    scale = (latent.nope + latent.rope) ** -0.5 * rope.softmax_scale
    shared: list[Function] = []
    if expert_layers < common.layers:
        shared.append(bp.feed_forward_function(residual=True, fp8=fp8))
    if expert_layers:
        shared += [_gate_function(experts), bp.feed_forward_function(residual=False, fp8=fp8)]
    functions: dict[Mode, tuple[Function, ...]] = {
        "prefill": (_attention_function("LatentAttentionExpanded", latent, scale, fp8), *shared),
        "decode": (_attention_function("LatentAttentionAbsorbed", latent, scale, fp8), *shared),
    }
    return bp.finish(
        "deepseek_v3",
        common,
        draft,
        rope,
        functions,
        extra_layers=tuple(range(common.layers, common.layers + mtp)),
    )


def _read_latent(fields: Fields, common: bp.Common) -> _Latent:
    heads = common.heads
    kv_heads = fields.integer("num_key_value_heads", heads)
    if kv_heads != heads:
        message = f"num_key_value_heads {kv_heads} is not supported: latent attention has no groups"
        fields.refuse("num_key_value_heads", message, f"Supported: the same as num_attention_heads, {heads}.")
    rope = fields.integer("qk_rope_head_dim", 64)
    bp.require_even(fields, "qk_rope_head_dim", rope)
    has_query_rank = "q_lora_rank" not in fields.values or fields.present("q_lora_rank")
    return _Latent(
        heads=heads,
        # An absent field has R1's value, null means a single projection.
        query_rank=fields.integer("q_lora_rank", 1536) if has_query_rank else 0,
        latent=fields.integer("kv_lora_rank", 512),
        nope=fields.integer("qk_nope_head_dim", 128),
        rope=rope,
        value=fields.integer("v_head_dim", 128),
        bias=fields.boolean("attention_bias", False),
        interleaved=int(fields.boolean("rope_interleave", True)),
    )


def _read_experts(fields: Fields) -> _Experts:
    """The router as DeepSeek-V3 defines it, by field.

    ``greedy`` and ``group_limited_greedy`` come from V2 and have no selection bias. Scores are positive, so masking other
    groups by 0, as V2 does, and by -inf, as V3 does, choose the same experts as long as the groups hold enough of them.
    """
    count = fields.integer("n_routed_experts", 256, high=bp.MOST_EXPERTS)
    top_k = fields.integer("num_experts_per_tok", 8)
    groups = fields.integer("n_group", 8)
    top_groups = fields.integer("topk_group", 4)
    method = fields.choice("topk_method", "noaux_tc", ("noaux_tc", "greedy", "group_limited_greedy"))
    scoring = fields.choice("scoring_func", "sigmoid", ("sigmoid", "softmax"))
    normalize = fields.boolean("norm_topk_prob", True)
    routed_scale = fields.number("routed_scaling_factor", 2.5)
    width = fields.integer("moe_intermediate_size", 2048)
    has_shared = "n_shared_experts" not in fields.values or fields.present("n_shared_experts")
    shared = fields.integer("n_shared_experts", 1, low=0) if has_shared else 0
    if method == "greedy":
        groups = top_groups = 1
    if count % groups:
        message = f"n_routed_experts {count} is not a multiple of n_group {groups}"
        fields.refuse("n_group", message, "Correct the value.")
    if top_groups > groups:
        fields.refuse("topk_group", f"topk_group {top_groups} is greater than n_group {groups}", "Correct the value.")
    size = count // groups
    if method == "noaux_tc" and groups > 1 and size < 2:
        message = f"n_group {groups} leaves {size} expert in a group; the score of a group is the sum of its two best"
        fields.refuse("n_group", message, "Correct the value.")
    if top_k > top_groups * size:
        message = f"num_experts_per_tok {top_k} is greater than the {top_groups * size} experts that can be chosen"
        fields.refuse("num_experts_per_tok", message, "Correct the value.")
    if top_groups == groups:
        # Every group is chosen: the same function as no groups at all, and so the same kernel.
        groups = top_groups = 1
    selection_bias = method == "noaux_tc"
    route = bp.operator(
        "Route",
        ("logits", "bias" if selection_bias else ""),
        "weights",
        "mask",
        scoring=scoring,
        top_k=top_k,
        groups=groups,
        top_groups=top_groups,
        group_score="top2" if selection_bias and groups > 1 else "max",
        normalize=int(normalize),
        routed_scale=routed_scale,
    )
    return _Experts(count, width, shared * width, selection_bias, route)


def _read_quantization(fields: Fields) -> bool:
    """Whether the checkpoint holds FP8 matrices with a scale for each 128 x 128 block, as R1's own does."""
    quantization = fields.nested("quantization_config")
    if quantization is None:
        return False
    quantization.choice("quant_method", "", ("fp8",))
    quantization.choice("fmt", "e4m3", ("e4m3",))
    quantization.choice("activation_scheme", "dynamic", ("dynamic",))
    # `ue8m0` says that the scales are powers of two; they are stored as f32 all the same.
    quantization.choice("scale_fmt", "ue8m0", ("ue8m0",))
    block = quantization.raw("weight_block_size")
    if block != [bp.FP8_BLOCK, bp.FP8_BLOCK]:
        message = f"quantization_config.weight_block_size {block} is not supported"
        quantization.refuse("weight_block_size", message, f"Supported: [{bp.FP8_BLOCK}, {bp.FP8_BLOCK}].")
    quantization.refuse_unknown()
    return True


def _attention(draft: bp.Draft, name: str, latent: _Latent, hidden: int, value: str, residual: str) -> None:
    """Add one call of ``self_attn``; operands in the order of ``_attention_inputs``."""
    query_width = latent.heads * (latent.nope + latent.rope)
    rows_width = latent.latent + latent.rope
    output_width = latent.heads * latent.value
    weights: dict[str, str] = {}

    def matrix(formal: str, module: str, rows: int, columns: int, bias: bool = False) -> None:
        names = draft.matrices((f"{name}.{module}.weight", rows, columns))
        weights.update(zip((f"w_{formal}", f"scale_{formal}"), names, strict=False))
        if bias:
            weights[f"b_{formal}"] = draft.bias(f"{name}.{module}.bias", rows)

    if latent.query_rank:
        matrix("q_a", "q_a_proj", latent.query_rank, hidden, latent.bias)
        weights["gamma_q"] = draft.gain(f"{name}.q_a_layernorm.weight", latent.query_rank)
        matrix("q_b", "q_b_proj", query_width, latent.query_rank)
    else:
        matrix("q", "q_proj", query_width, hidden)
    matrix("kv_a", "kv_a_proj_with_mqa", rows_width, hidden, latent.bias)
    weights["gamma_kv"] = draft.gain(f"{name}.kv_a_layernorm.weight", latent.latent)
    matrix("kv_b", "kv_b_proj", latent.heads * (latent.nope + latent.value), latent.latent)
    matrix("o", "o_proj", hidden, output_width, latent.bias)
    cache = f"{name}.cache"
    draft.states[cache] = rows_width
    inputs = (value, residual, *(weights[formal] for formal in _attention_weights(latent, draft.fp8)))
    outputs = (name, f"{cache}.next")
    draft.call("self_attn", (*inputs, "rope.cos", "rope.sin", "past", cache), outputs, name)


def _attention_weights(latent: _Latent, fp8: bool) -> tuple[str, ...]:
    """Formal names of the weights of ``self_attn``; ``w_``, ``scale_`` and ``b_`` of each projection, gains between."""
    query = ("q_a", "gamma_q", "q_b") if latent.query_rank else ("q",)
    biased = ("q_a", "kv_a", "o") if latent.bias else ()
    names: list[str] = []
    for part in (*query, "kv_a", "gamma_kv", "kv_b", "o"):
        if part.startswith("gamma"):
            names.append(part)
            continue
        names.append(f"w_{part}")
        if fp8:
            names.append(f"scale_{part}")
        if part in biased:
            names.append(f"b_{part}")
    return tuple(names)


def _attention_function(op: str, latent: _Latent, scale: float, fp8: bool) -> Function:
    """Latent attention with the residual, over a cache of normed latents and rotated keys."""
    weights = _attention_weights(latent, fp8)

    def given(name: str) -> str:
        return name if name in weights else ""

    def linear(value: str, part: str, output: str, residual: str = "") -> Node:
        return bp.operator("Linear", (value, f"w_{part}", given(f"b_{part}"), residual, given(f"scale_{part}")), output)

    if latent.query_rank:
        query = [
            linear("x", "q_a", "q_latent"),
            bp.operator("RMSNorm", ("q_latent", "gamma_q"), "q_normed", epsilon=INNER_EPSILON),
            linear("q_normed", "q_b", "q"),
        ]
    else:
        query = [linear("x", "q", "q")]
    head_dim = latent.nope + latent.rope
    nodes = (
        *query,
        bp.operator(
            "RotaryEmbedding",
            ("q", "cos", "sin", "past"),
            "q_rotated",
            heads=latent.heads,
            head_dim=head_dim,
            offset=latent.nope,
            interleaved=latent.interleaved,
        ),
        linear("x", "kv_a", "kv"),
        bp.operator(
            "LatentRows",
            ("kv", "gamma_kv", "cos", "sin", "past"),
            "rows",
            latent=latent.latent,
            epsilon=INNER_EPSILON,
            interleaved=latent.interleaved,
        ),
        bp.operator("CacheInsert", ("cache", "rows", "past"), "cache_next"),
        bp.operator(
            op,
            ("q_rotated", "cache_next", "w_kv_b", "past", given("scale_kv_b")),
            "context",
            heads=latent.heads,
            nope=latent.nope,
            rope=latent.rope,
            value=latent.value,
            scale=scale,
        ),
        linear("context", "o", "y", "residual"),
    )
    inputs = ("x", "residual", *weights, "cos", "sin", "past", "cache")
    return Function("self_attn", inputs, ("y", "cache_next"), nodes)


def _mixture(draft: bp.Draft, name: str, experts: _Experts, hidden: int, value: str, residual: str) -> str:
    """Router, routed experts, shared experts and the weighted sum of one layer."""
    gate = f"{name}.gate"
    router = [draft.matrix(f"{gate}.weight", experts.count, hidden)]
    if experts.selection_bias:
        bias = f"{gate}.e_score_correction_bias"
        draft.tensors[bias] = bp.expected((experts.count,), "selection_bias")
        router.append(bias)
    weights, mask = f"{gate}.weights", f"{gate}.mask"
    draft.call("gate", (value, *router), (weights, mask), gate)
    width = experts.intermediate
    routed = [bp.feed_forward(draft, f"{name}.experts.{e}", value, hidden, width) for e in range(experts.count)]
    shared = bp.feed_forward(draft, f"{name}.shared_experts", value, hidden, experts.shared) if experts.shared else ""
    combine = f"{name}.combine"
    return draft.operator("CombineExperts", (residual, shared, weights, *routed), combine, combine)


def _gate_function(experts: _Experts) -> Function:
    inputs = ("x", "w", "bias") if experts.selection_bias else ("x", "w")
    nodes = (bp.operator("Linear", ("x", "w"), "logits"), experts.route)
    return Function("gate", inputs, ("weights", "mask"), nodes)
