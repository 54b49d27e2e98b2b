"""``Route``: which experts a token goes to, and with what weight.

Selection is by rank, not by sorting: rank(i) is the number of j with b_j > b_i, or b_j = b_i and j < i, so ties go to the
lower id, and i is selected when its rank is below ``top_k``. Groups are ranked in the same way by their scores. The bias
takes part in the selection alone; the weights are made of the unbiased scores
(DeepSeek-V3 technical report, https://arxiv.org/abs/2412.19437, section 2.1.2).

NaN is never hidden. Every comparison with a NaN is false, so the rank of a NaN score is 0: it is always selected, and so is
its group, whose score is NaN too. A row with a NaN logit therefore has a selected weight that is NaN, and, wherever
enough other experts are left, more than ``top_k`` entries in its mask.
"""

from collections.abc import Callable
from dataclasses import dataclass

from dsr1build.graph.model import TensorType
from dsr1build.ops.emitter import Body, Emitter, Value
from dsr1build.ops.operator import Attributes, Operands, Operator, Types, integer, real, text

# Added to the sum of the selected scores before the division, as in DeepSeek's own inference code.
NORMALIZE_EPSILON = 1e-20


@dataclass(frozen=True, slots=True)
class _Routing:
    """The attributes of one Route, checked against its number of experts."""

    scoring: str
    experts: int
    top_k: int
    groups: int
    top_groups: int
    group_score: str
    normalize: bool
    routed_scale: float

    @property
    def members(self) -> int:
        return self.experts // self.groups


def _routing(types: Types, attributes: Attributes) -> _Routing:
    logits, bias = types[0], types[1] if len(types) > 1 else None
    if logits is None or logits.dtype != "f32" or len(logits.shape) != 2 or not isinstance(logits.shape[1], int):
        raise ValueError(f"Route: logits must be f32 [tokens, experts], not {logits}")
    experts = logits.shape[1]
    if bias is not None and bias != TensorType("f32", (experts,)):
        raise ValueError(f"Route: bias must be f32[{experts}], not {bias}")
    routing = _Routing(
        text(attributes, "scoring"),
        experts,
        integer(attributes, "top_k"),
        integer(attributes, "groups"),
        integer(attributes, "top_groups"),
        text(attributes, "group_score"),
        bool(integer(attributes, "normalize")),
        real(attributes, "routed_scale"),
    )
    if routing.scoring not in ("sigmoid", "softmax"):
        raise ValueError(f"Route: scoring must be 'sigmoid' or 'softmax', not {routing.scoring!r}")
    if routing.groups < 1 or experts % routing.groups:
        raise ValueError(f"Route: {experts} experts do not divide into {routing.groups} groups")
    if not 1 <= routing.top_groups <= routing.groups:
        raise ValueError(f"Route: top_groups must be in 1..{routing.groups}, not {routing.top_groups}")
    if not 1 <= routing.top_k <= routing.top_groups * routing.members:
        raise ValueError(f"Route: top_k must be in 1..{routing.top_groups * routing.members}, not {routing.top_k}")
    if routing.groups > 1 and routing.group_score not in ("top2", "max"):
        raise ValueError(f"Route: group_score must be 'top2' or 'max', not {routing.group_score!r}")
    if routing.groups > 1 and routing.group_score == "top2" and routing.members < 2:
        raise ValueError("Route: group_score 'top2' needs at least two experts in a group")
    return routing


def infer(types: Types, attributes: Attributes) -> tuple[TensorType, ...]:
    """Weights f32 [tokens, experts] and mask i32 [tokens, experts]. Raises ValueError where the operands do not fit."""
    _routing(types, attributes)
    logits = types[0]
    assert logits is not None
    return TensorType("f32", logits.shape), TensorType("i32", logits.shape)


def _reference_rank(name: str, scores: str, size: int) -> list[str]:
    """Statements that set ``name`` to the rank of each entry of ``scores`` along its last axis, of length ``size``."""
    ids = ", ".join(map(str, range(size)))
    return [
        f"{name}_ids = Constant <value_ints = [{ids}]> ()",
        f"{name}_mine = Constant <value_ints = [-1]> ()",
        f"{name}_other = Constant <value_ints = [-2]> ()",
        f"{name}_id_i = Unsqueeze ({name}_ids, {name}_mine)",
        f"{name}_id_j = Unsqueeze ({name}_ids, {name}_other)",
        f"{name}_lower = Less ({name}_id_j, {name}_id_i)",
        f"{name}_i = Unsqueeze ({scores}, {name}_mine)",
        f"{name}_j = Unsqueeze ({scores}, {name}_other)",
        f"{name}_greater = Greater ({name}_j, {name}_i)",
        f"{name}_equal = Equal ({name}_j, {name}_i)",
        f"{name}_tie = And ({name}_equal, {name}_lower)",
        f"{name}_beaten = Or ({name}_greater, {name}_tie)",
        f"{name}_count = Cast <to = 7> ({name}_beaten)",
        f"{name} = ReduceSum <keepdims = 0> ({name}_count, {name}_mine)",
    ]


def reference(types: Types, attributes: Attributes) -> str:
    """The ONNX function body, by ranks as described above."""
    r = _routing(types, attributes)
    lines = [
        "zero = Constant <value_float = 0.0> ()",
        "s = Sigmoid (logits)" if r.scoring == "sigmoid" else "s = Softmax <axis = -1> (logits)",
        "b = Add (s, bias)" if len(types) > 1 and types[1] is not None else "b = Identity (s)",
    ]
    if r.groups > 1 or r.normalize:
        lines.append("last = Constant <value_ints = [-1]> ()")
    if r.groups > 1:
        lines += [
            f"grouped_shape = Constant <value_ints = [-1, {r.groups}, {r.members}]> ()",
            f"flat_shape = Constant <value_ints = [-1, {r.experts}]> ()",
            f"top_groups = Constant <value_int = {r.top_groups}> ()",
            "grouped = Reshape (b, grouped_shape)",
        ]
        if r.group_score == "top2":
            lines += [
                *_reference_rank("member_rank", "grouped", r.members),
                "two = Constant <value_int = 2> ()",
                "is_top2 = Less (member_rank, two)",
                "top2 = Where (is_top2, grouped, zero)",
                "group_score = ReduceSum <keepdims = 0> (top2, last)",
            ]
        else:
            lines.append("group_score = ReduceMax <keepdims = 0> (grouped, last)")
        lines += [
            *_reference_rank("group_rank", "group_score", r.groups),
            "minus_inf = Constant <value = float {-inf}> ()",
            "group_kept = Less (group_rank, top_groups)",
            "group_kept_3d = Unsqueeze (group_kept, last)",
            "kept = Where (group_kept_3d, grouped, minus_inf)",
            "candidates = Reshape (kept, flat_shape)",
        ]
    else:
        lines.append("candidates = Identity (b)")
    lines += [
        *_reference_rank("rank", "candidates", r.experts),
        f"top_k = Constant <value_int = {r.top_k}> ()",
        "selected = Less (rank, top_k)",
        "mask = Cast <to = 6> (selected)",
        "picked = Where (selected, s, zero)",
        f"scale = Constant <value_float = {r.routed_scale!r}> ()",
    ]
    if r.normalize:
        lines += [
            "total = ReduceSum <keepdims = 1> (picked, last)",
            f"tiny = Constant <value_float = {NORMALIZE_EPSILON!r}> ()",
            "divisor = Add (total, tiny)",
            "share = Div (picked, divisor)",
        ]
    else:
        lines.append("share = Identity (picked)")
    return "\n".join([*lines, "weights = Mul (share, scale)"])


def _scores(e: Emitter, logits: Value, scoring: str) -> Value:
    """f32 [t, group, member]: sigmoid of each logit, or softmax over the experts. NaN stays NaN whatever exp does with it."""
    each = [(logits, "t, g, i")]
    if scoring == "sigmoid":

        def sigmoid(b: Body, x: str, _: str) -> str:
            one = b.constant(1.0)
            return b.select(b.compare("oeq", x, x), b.div(one, b.add(one, b.exp(b.neg(x)))), x)

        return e.generic("score", "t, g, i", each, (e.empty(logits.type), "t, g, i"), "ppp", sigmoid)

    row = TensorType("f32", logits.type.shape[:1])
    top = e.generic("score_max", "t, g, i", each, (e.filled(row, float("-inf")), "t"), "prr", lambda b, x, acc: b.maximum(acc, x))

    def exponential(b: Body, x: str, largest: str, _: str) -> str:
        shifted = b.sub(x, largest)
        return b.select(b.compare("oeq", shifted, shifted), b.exp(shifted), shifted)

    exps = e.generic("score_exp", "t, g, i", [*each, (top, "t")], (e.empty(logits.type), "t, g, i"), "ppp", exponential)
    total = e.generic("score_sum", "t, g, i", [(exps, "t, g, i")], (e.filled(row), "t"), "prr", lambda b, x, acc: b.add(acc, x))
    return e.generic(
        "score",
        "t, g, i",
        [(exps, "t, g, i"), (total, "t")],
        (e.empty(logits.type), "t, g, i"),
        "ppp",
        lambda b, x, s, _: b.div(x, s),
    )


def _rank(e: Emitter, role: str, scores: Value, loops: str, mine: str, other: str, members: int = 0) -> Value:
    """i32, shaped as ``scores``: how many entries beat this one.

    The loops are those of ``mine``, then those of ``other`` without t. With ``members`` the id of an entry is
    group * members + member, else it is the last loop alone.
    """
    count = len(loops.split(","))
    rank = scores.type.shape

    def identifier(b: Body, last: int) -> str:
        if not members:
            return b.index(last)
        return b.add_int(b.mul_int(b.index(last - 1), b.integer(members, "index")), b.index(last), "index")

    def beats(b: Body, own: str, rival: str, acc: str) -> str:
        lower = b.compare_int("ult", identifier(b, count - 1), identifier(b, len(rank) - 1))
        tie = b.both(b.compare("oeq", rival, own), lower)
        return b.add_int(acc, b.flag(b.either(b.compare("ogt", rival, own), tie)))

    start = e.filled(TensorType("i32", rank))
    iterators = "p" * len(rank) + "r" * (count - len(rank))
    return e.generic(role, loops, [(scores, mine), (scores, other)], (start, mine), iterators, beats)


def _candidates(e: Emitter, biased: Value, r: _Routing) -> Value:
    """The biased scores, -inf outside the best groups (0 would win over negative biased scores)."""
    per_group = TensorType("f32", biased.type.shape[:2])
    if r.group_score == "top2":
        member_rank = _rank(e, "member_rank", biased, "t, g, i, j", "t, g, i", "t, g, j")

        def add_top2(b: Body, x: str, rank: str, acc: str) -> str:
            return b.select(b.compare_int("ult", rank, b.integer(2), "i32"), b.add(acc, x), acc)

        operands = [(biased, "t, g, i"), (member_rank, "t, g, i")]
        score = e.generic("group_score", "t, g, i", operands, (e.filled(per_group), "t, g"), "ppr", add_top2)
    else:
        lowest = e.filled(per_group, float("-inf"))
        operands = [(biased, "t, g, i")]
        score = e.generic("group_score", "t, g, i", operands, (lowest, "t, g"), "ppr", lambda b, x, acc: b.maximum(acc, x))
    group_rank = _rank(e, "group_rank", score, "t, g, h", "t, g", "t, h")

    def keep(b: Body, x: str, rank: str, _: str) -> str:
        return b.select(b.compare_int("ult", rank, b.integer(r.top_groups), "i32"), x, b.constant(float("-inf")))

    operands = [(biased, "t, g, i"), (group_rank, "t, g")]
    return e.generic("candidates", "t, g, i", operands, (e.empty(biased.type), "t, g, i"), "ppp", keep)


def lower(e: Emitter, operands: Operands, attributes: Attributes) -> tuple[Value, ...]:
    """Two phases over tokens: the mask, then the weights of what it selects."""
    r = _routing([v.type if v else None for v in operands], attributes)
    logits, bias = operands[0], operands[1] if len(operands) > 1 else None
    assert logits is not None
    weights_type, mask_type = infer([v.type if v else None for v in operands], attributes)
    t = logits.type.shape[0]
    split, grouped = ((0,), (1, 2)), (t, r.groups, r.members)
    logits3 = e.expand(logits, split, grouped)
    mask_out = e.expand(e.destination(1, mask_type), split, grouped)
    weights_out = e.expand(e.destination(0, weights_type), split, grouped)

    e.phase("map1")
    biased = _scores(e, logits3, r.scoring)
    if bias is not None:
        bias2 = e.expand(bias, ((0, 1),), (r.groups, r.members))
        with_bias = [(biased, "t, g, i"), (bias2, "g, i")]
        biased = e.generic(
            "biased", "t, g, i", with_bias, (e.empty(biased.type), "t, g, i"), "ppp", lambda b, x, y, _: b.add(x, y)
        )
    candidates = _candidates(e, biased, r) if r.groups > 1 else biased
    rank = _rank(e, "rank", candidates, "t, g, i, h, j", "t, g, i", "t, h, j", r.members)
    mask3 = e.generic(
        "mask",
        "t, g, i",
        [(rank, "t, g, i")],
        (mask_out, "t, g, i"),
        "ppp",
        lambda b, x, _: b.flag(b.compare_int("ult", x, b.integer(r.top_k), "i32")),
    )

    e.phase("map1")
    scores = _scores(e, logits3, r.scoring)

    chosen = [(scores, "t, g, i"), (mask3, "t, g, i")]

    def pick(scale: float) -> Callable[[Body, str, str, str], str]:
        return lambda b, s, m, _: b.select(
            b.compare_int("ne", m, b.integer(0), "i32"), b.mul(s, b.constant(scale)), b.constant(0.0)
        )

    if r.normalize:
        picked = e.generic("picked", "t, g, i", chosen, (e.empty(scores.type), "t, g, i"), "ppp", pick(1.0))
        # One running sum in the order of the experts' ids: zeros in between change nothing.
        row = TensorType("f32", (t,))
        total = e.generic("total", "t, g, i", [(picked, "t, g, i")], (e.filled(row), "t"), "prr", lambda b, x, acc: b.add(acc, x))

        def share(b: Body, x: str, s: str, _: str) -> str:
            return b.mul(b.div(x, b.add(s, b.constant(NORMALIZE_EPSILON))), b.constant(r.routed_scale))

        weights3 = e.generic("weights", "t, g, i", [(picked, "t, g, i"), (total, "t")], (weights_out, "t, g, i"), "ppp", share)
    else:
        weights3 = e.generic("weights", "t, g, i", chosen, (weights_out, "t, g, i"), "ppp", pick(r.routed_scale))
    return e.collapse(weights3, split, weights_type.shape), e.collapse(mask3, split, mask_type.shape)


ROUTE = Operator(
    name="Route",
    inputs=("logits", "bias?"),
    outputs=("weights", "mask"),
    attributes=("scoring", "top_k", "groups", "top_groups", "group_score", "normalize", "routed_scale"),
    infer=infer,
    reference=reference,
    lower=lower,
    tolerance=1e-6,
    row_independent=True,
)

OPERATORS = (ROUTE,)
