"""Structure of the graphs: names, calls, operands, states; both modes from one list of nodes."""

from collections import Counter
from collections.abc import Callable

import pytest
from model_sources import MODELS, config_of, random_model

from dsr1build.graph.model import Graph, Model, Node, RandomTensor, TensorType
from dsr1build.graph.validate import check_graph
from dsr1build.ops.registry import OPERATORS

ALL_MODELS = sorted(path.name for path in MODELS.iterdir())


def node(graph: Graph, name: str) -> Node:
    return next(n for n in graph.nodes if n.name == name)


@pytest.mark.parametrize("name", ALL_MODELS)
def test_graphs_are_sound(name: str) -> None:
    model = random_model(name)
    assert list(model.graphs) == ["prefill", "decode"]
    for mode, graph in model.graphs.items():
        assert graph.mode == mode
        types = check_graph(graph, OPERATORS)
        assert types["logits"] == TensorType("f32", ("tokens", model.vocabulary))
        assert set(graph.weights) == set(model.sources)
        called = {n.op for n in graph.nodes if n.domain == "module"}
        assert called == set(graph.functions)
    used = {i for n in model.graphs["decode"].nodes for i in n.inputs}
    assert set(model.graphs["decode"].weights) <= used


def test_r1_in_numbers() -> None:
    graph = random_model("deepseek-r1").graphs["prefill"]
    calls = Counter(n.op for n in graph.nodes)
    assert calls == {
        "Embedding": 1,
        "RMSNorm": 2 * 61 + 1,
        "self_attn": 61,
        "mlp": 3,
        "gate": 58,
        "expert": 58 * 257,
        "CombineExperts": 58,
        "Linear": 1,
    }
    # A norm belongs to the partition of the module that reads it, and the last one to the head.
    assert len(graph.nodes) - calls["RMSNorm"] == 15_088
    assert len(graph.functions) == 4


def test_modes_differ_in_the_attention_alone() -> None:
    model = random_model("r1-mini")
    prefill, decode = model.graphs["prefill"], model.graphs["decode"]
    assert prefill.nodes is decode.nodes
    assert [name for name in prefill.functions if prefill.functions[name] != decode.functions[name]] == ["self_attn"]
    operators = [[n.op for n in graph.functions["self_attn"].nodes] for graph in (prefill, decode)]
    before = ["Linear", "RMSNorm", "Linear", "RotaryEmbedding", "Linear", "LatentRows", "CacheInsert"]
    assert operators == [[*before, f"LatentAttention{form}", "Linear"] for form in ("Expanded", "Absorbed")]
    plain = random_model("r1-mini-no-q-lora").graphs["decode"]
    assert [n.op for n in plain.functions["self_attn"].nodes] == ["Linear", *operators[1][3:]]
    assert "model.layers.0.self_attn.q_proj.weight" in plain.weights


def test_names_of_a_layer_with_experts() -> None:
    graph = random_model("r1-mini").graphs["decode"]
    layer = "model.layers.2"
    names = [n.name for n in graph.nodes if n.name.startswith(f"{layer}.")]
    assert names == [
        f"{layer}.input_layernorm",
        f"{layer}.self_attn",
        f"{layer}.post_attention_layernorm",
        f"{layer}.mlp.gate",
        *(f"{layer}.mlp.experts.{e}" for e in range(16)),
        f"{layer}.mlp.shared_experts",
        f"{layer}.mlp.combine",
    ]
    combine = node(graph, f"{layer}.mlp.combine")
    assert combine.op == "CombineExperts"
    assert combine.inputs[:4] == (
        f"{layer}.self_attn",
        f"{layer}.mlp.shared_experts",
        f"{layer}.mlp.gate.weights",
        f"{layer}.mlp.experts.0",
    )
    assert node(graph, f"{layer}.mlp.shared_experts").op == node(graph, f"{layer}.mlp.experts.3").op == "expert"
    assert node(graph, "model.layers.0.mlp").op == "mlp"
    assert graph.states[f"{layer}.self_attn.cache"] == TensorType("f32", ("context", 40))
    assert graph.weights["rope.cos"] == TensorType("f32", ("context", 4))


def test_router_attributes(load_config: Callable[..., Model]) -> None:
    def route(model: Model) -> Node:
        return model.graphs["decode"].functions["gate"].nodes[1]

    common = {"normalize": 1, "routed_scale": 2.5, "top_k": 4}
    grouped = {"scoring": "sigmoid", "groups": 4, "top_groups": 2, "group_score": "top2"}
    ungrouped = {"groups": 1, "top_groups": 1, "group_score": "max"}
    assert dict(route(random_model("r1-mini")).attributes) == {**common, **grouped}
    softmax = random_model("r1-mini-softmax")
    assert dict(route(softmax).attributes) == {**common, **ungrouped, "scoring": "softmax"}
    assert route(softmax).inputs == ("logits",)
    assert not any(name.endswith("e_score_correction_bias") for name in softmax.sources)
    limited = load_config("r1-mini", scoring_func="softmax", topk_method="group_limited_greedy", norm_topk_prob=False)
    expected = {**common, **grouped, "scoring": "softmax", "group_score": "max", "normalize": 0}
    assert dict(route(limited).attributes) == expected
    # All groups chosen is no group at all.
    assert dict(route(load_config("r1-mini", topk_group=4)).attributes) == {**common, **ungrouped, "scoring": "sigmoid"}


@pytest.mark.parametrize(("dense", "frequency"), [(0, 1), (2, 1), (4, 1), (9, 1), (0, 2), (1, 3)])
def test_which_layers_have_experts(load_config: Callable[..., Model], dense: int, frequency: int) -> None:
    graph = load_config("r1-mini", first_k_dense_replace=dense, moe_layer_freq=frequency).graphs["prefill"]
    mixtures = [layer for layer in range(4) if any(n.name == f"model.layers.{layer}.mlp.gate" for n in graph.nodes)]
    assert mixtures == [layer for layer in range(dense, 4) if layer % frequency == 0]
    assert ("mlp" in graph.functions) == (len(mixtures) < 4)
    assert ("gate" in graph.functions) == ("expert" in graph.functions) == bool(mixtures)
    check_graph(graph, OPERATORS)


def test_shared_experts(load_config: Callable[..., Model]) -> None:
    two = load_config("r1-mini", n_shared_experts=2).graphs["decode"]
    assert two.weights["model.layers.1.mlp.shared_experts.gate_proj.weight"].shape == (128, 128)
    for absent in (0, None):
        none = load_config("r1-mini", n_shared_experts=absent).graphs["decode"]
        assert node(none, "model.layers.1.mlp.combine").inputs[1] == ""
        assert not any("shared" in name for name in none.weights)
        check_graph(none, OPERATORS)


def test_biases(load_config: Callable[..., Model]) -> None:
    def biases(model: Model) -> list[str]:
        prefix = "model.layers.0.self_attn."
        return [n.removeprefix(prefix) for n in model.sources if n.startswith(prefix) and n.endswith(".bias")]

    assert biases(random_model("qwen2-mini")) == ["q_proj.bias", "k_proj.bias", "v_proj.bias"]
    assert biases(random_model("llama-mini")) == []
    llama = load_config("llama-mini", attention_bias=True)
    assert biases(llama) == ["q_proj.bias", "k_proj.bias", "v_proj.bias", "o_proj.bias"]
    latent = load_config("r1-mini", attention_bias=True)
    assert biases(latent) == ["q_a_proj.bias", "kv_a_proj_with_mqa.bias", "o_proj.bias"]
    for model in (llama, latent):
        check_graph(model.graphs["decode"], OPERATORS)


def test_rotation_not_interleaved(load_config: Callable[..., Model]) -> None:
    nodes = load_config("r1-mini", rope_interleave=False).graphs["decode"].functions["self_attn"].nodes
    assert [n.attribute("interleaved") for n in nodes if n.op in ("RotaryEmbedding", "LatentRows")] == [0, 0]


def test_head_width_of_its_own(load_config: Callable[..., Model]) -> None:
    graph = load_config("llama-mini", head_dim=48).graphs["decode"]
    assert graph.weights["model.layers.0.self_attn.q_proj.weight"].shape == (4 * 48, 128)
    assert graph.states["model.layers.0.self_attn.v_cache"].shape == ("context", 2 * 48)
    check_graph(graph, OPERATORS)


def test_tied_head_reads_the_embedding() -> None:
    graph = random_model("r1-mini-tied").graphs["prefill"]
    assert node(graph, "lm_head").inputs == ("model.norm", "model.embed_tokens.weight")
    assert "lm_head.weight" not in graph.weights


def test_random_weights() -> None:
    model = random_model("r1-mini")
    layer = "model.layers.1."
    assert model.sources[f"{layer}input_layernorm.weight"] == RandomTensor(0, 1.0, 0.02)
    assert model.sources[f"{layer}mlp.experts.0.up_proj.weight"] == RandomTensor(0, 0.0, 0.02)
    assert model.sources[f"{layer}mlp.gate.e_score_correction_bias"] == RandomTensor(0, 0.0, 0.1)
    weights = model.graphs["decode"].weights
    assert weights[f"{layer}mlp.gate.e_score_correction_bias"].dtype == "f32"
    assert weights[f"{layer}mlp.gate.weight"].dtype == "bf16"
    assert (model.bos_token_ids, model.eos_token_ids, model.directory) == ((0,), (1,), "")


def test_dtype_defaults_to_bfloat16(load_config: Callable[..., Model]) -> None:
    assert load_config("qwen2-mini", torch_dtype=...).graphs["decode"].weights["lm_head.weight"].dtype == "bf16"
    assert load_config("qwen2-mini", torch_dtype="float16").graphs["decode"].weights["lm_head.weight"].dtype == "f16"
    assert load_config("qwen2-mini", torch_dtype=..., dtype="float32").graphs["decode"].weights["lm_head.weight"].dtype == "f32"


def test_context() -> None:
    assert random_model("r1-mini").max_context == config_of("r1-mini")["max_position_embeddings"] == 2560
    short = random_model("r1-mini", context=64)
    assert short.max_context == 64
    assert short.graphs == random_model("r1-mini").graphs
