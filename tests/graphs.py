"""Small graphs written by hand: a decoder with grouped attention and routed experts, and a recipe that cuts it."""

from collections.abc import Mapping
from dataclasses import replace

from dsr1build.config.schema import PartitionRule, Recipe
from dsr1build.graph.model import Attribute, Counts, Function, Graph, Mode, Model, Node, TensorType

HIDDEN, WIDTH, EXPERTS, TOP_K, VOCABULARY = 8, 12, 4, 2, 16


def op(name: str, inputs: str, outputs: str, module: str = "", **attributes: Attribute) -> Node:
    """An operator; operands and results are written with blanks between, ``-`` for an absent operand."""
    operands = tuple("" if part == "-" else part for part in inputs.split())
    return Node(name, operands, tuple(outputs.split()), tuple(sorted(attributes.items())), name=module)


def call(function: str, inputs: str, outputs: str, module: str) -> Node:
    return replace(op(function, inputs, outputs, module), domain="module")


ATTENTION = Function(
    "attention",
    ("x", "residual", "w_q", "w_k", "w_v", "w_o", "past", "k_cache", "v_cache"),
    ("y", "k_next", "v_next"),
    (
        op("Linear", "x w_q", "q"),
        op("Linear", "x w_k", "k"),
        op("Linear", "x w_v", "v"),
        op("CacheInsert", "k_cache k past", "k_next"),
        op("CacheInsert", "v_cache v past", "v_next"),
        op("GroupedAttention", "q k_next v_next past", "mixed", heads=2, kv_heads=1, scale=0.5),
        op("Linear", "mixed w_o - residual", "y"),
    ),
)
GATE = Function(
    "gate",
    ("x", "w", "bias"),
    ("weights", "mask"),
    (
        op("Linear", "x w", "logits"),
        op(
            "Route",
            "logits bias",
            "weights mask",
            scoring="sigmoid",
            top_k=TOP_K,
            groups=1,
            top_groups=1,
            group_score="max",
            normalize=1,
            routed_scale=1.0,
        ),
    ),
)
FFN = Function(
    "ffn",
    ("x", "w_gate", "w_up", "w_down"),
    ("y",),
    (op("SwiGLU", "x w_gate w_up", "inner"), op("Linear", "inner w_down", "y")),
)


def decoder(layers: int = 2, mode: Mode = "prefill", experts: int = EXPERTS) -> Graph:
    weights: dict[str, TensorType] = {}
    states: dict[str, TensorType] = {}
    nodes: list[Node] = []

    def weight(name: str, *shape: int) -> str:
        weights[name] = TensorType("f32", shape)
        return name

    def ffn(name: str, value: str) -> str:
        matrices = [weight(f"{name}.{w}", WIDTH, HIDDEN) for w in ("gate", "up")] + [weight(f"{name}.down", HIDDEN, WIDTH)]
        nodes.append(call("ffn", f"{value} {' '.join(matrices)}", name, name))
        return name

    def norm(name: str, value: str) -> str:
        nodes.append(op("RMSNorm", f"{value} {weight(name + '.weight', HIDDEN)}", name, name, epsilon=1e-6))
        return name

    nodes.append(op("Embedding", f"ids {weight('embed.weight', VOCABULARY, HIDDEN)}", "embed", "embed"))
    value = "embed"
    for n in range(layers):
        layer = f"layers.{n}"
        normed = norm(f"{layer}.norm", value)
        shapes = {"q": (HIDDEN, HIDDEN), "k": (HIDDEN // 2, HIDDEN), "v": (HIDDEN // 2, HIDDEN), "o": (HIDDEN, HIDDEN)}
        matrices = [weight(f"{layer}.attn.{part}", *shape) for part, shape in shapes.items()]
        caches = [f"{layer}.attn.{part}" for part in ("keys", "values")]
        states.update(dict.fromkeys(caches, TensorType("f32", ("context", HIDDEN // 2))))
        attn = f"{layer}.attn"
        inputs = f"{normed} {value} {' '.join(matrices)} past {' '.join(caches)}"
        nodes.append(call("attention", inputs, f"{attn} {' '.join(c + '.next' for c in caches)}", attn))
        normed = norm(f"{layer}.post", attn)
        gate = f"{layer}.gate"
        router = f"{weight(gate + '.weight', experts, HIDDEN)} {weight(gate + '.bias', experts)}"
        nodes.append(call("gate", f"{normed} {router}", f"{gate}.weights {gate}.mask", gate))
        routed = [ffn(f"{layer}.experts.{e}", normed) for e in range(experts)]
        shared = ffn(f"{layer}.shared", normed)
        value = f"{layer}.combine"
        nodes.append(op("CombineExperts", f"{attn} {shared} {gate}.weights {' '.join(routed)}", value, value))
    normed = norm("norm", value)
    nodes.append(op("Linear", f"{normed} {weight('head.weight', VOCABULARY, HIDDEN)}", "logits", "head"))
    return Graph(
        mode,
        {"ids": TensorType("i64", ("tokens",)), "past": TensorType("i64", ())},
        states,
        weights,
        {"logits": TensorType("f32", ("tokens", VOCABULARY))},
        tuple(nodes),
        {f.name: f for f in (ATTENTION, GATE, FFN)},
        {state: f"{state}.next" for state in states},
    )


def rule(kind: str, *modules: str) -> PartitionRule:
    return PartitionRule.model_validate({"kind": kind, "modules": modules})


RULES = (
    rule("embedding", "embed"),
    rule("attention", "layers.{n}.norm", "layers.{n}.attn"),
    rule("gating", "layers.{n}.post", "layers.{n}.gate"),
    rule("expert", "layers.{n}.experts.{e}"),
    rule("expert", "layers.{n}.shared"),
    rule("combine", "layers.{n}.combine"),
    rule("head", "norm", "head"),
)


def recipe(rules: tuple[PartitionRule, ...] = RULES, **more: object) -> Recipe:
    return Recipe.model_validate({"version": 1, "name": "by-hand", "architectures": ("by_hand",), "partitions": rules, **more})


def model(graphs: Mapping[Mode, Graph]) -> Model:
    return Model("by_hand", graphs, {}, Counts(0, 0, 0), VOCABULARY, HIDDEN, 64)


def both_modes(layers: int = 2) -> Model:
    return model({"prefill": decoder(layers), "decode": decoder(layers, "decode")})


def with_node(graph: Graph, module: str, **changes: object) -> Graph:
    """The graph with the node of this name changed."""
    return replace(graph, nodes=tuple(replace(n, **changes) if n.name == module else n for n in graph.nodes))  # type: ignore[arg-type]


def with_function(graph: Graph, function: Function) -> Graph:
    return replace(graph, functions={**graph.functions, function.name: function})
