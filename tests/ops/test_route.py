"""Routing: the reference against float64 and transformers, the kernel against the reference, NaN in every place."""

import numpy as np
import pytest
from operator_runs import kernel, reference, run_both

from dsr1build.graph.model import TensorType
from dsr1build.ops.route import ROUTE
from kernel_runner import compile_text

# DeepSeek-V3 scaled down, DeepSeek-V2's greedy choice within groups, V2-Lite without groups.
V3 = {"scoring": "sigmoid", "top_k": 4, "groups": 4, "top_groups": 2, "group_score": "top2", "normalize": 1, "routed_scale": 2.5}
V2 = {"scoring": "softmax", "top_k": 3, "groups": 4, "top_groups": 2, "group_score": "max", "normalize": 0, "routed_scale": 16.0}
LITE = {"scoring": "softmax", "top_k": 6, "groups": 1, "top_groups": 1, "group_score": "max", "normalize": 0, "routed_scale": 1.0}
EXPERTS = 16


def types_of(biased, experts=EXPERTS):
    return TensorType("f32", ("tokens", experts)), TensorType("f32", (experts,)) if biased else None


def best(values, count):
    """Ids of the largest values; of equal ones the lower id first."""
    return sorted(range(len(values)), key=lambda i: (-values[i], i))[:count]


def route_in_float64(logits, bias, a):
    """By sorting, token by token."""
    x = logits.astype(np.float64)
    if a["scoring"] == "sigmoid":
        scores = 1 / (1 + np.exp(-x))
    else:
        scores = np.exp(x - x.max(1, keepdims=True))
        scores /= scores.sum(1, keepdims=True)
    weights, mask = np.zeros_like(scores), np.zeros(scores.shape, np.int32)
    for t, s in enumerate(scores):
        choice = s if bias is None else s + bias.astype(np.float64)
        members = np.split(np.arange(len(s)), a["groups"])
        group = [sum(sorted(choice[m])[-2:]) if a["group_score"] == "top2" else max(choice[m]) for m in members]
        allowed = np.concatenate([members[g] for g in best(group, a["top_groups"])])
        allowed.sort()
        chosen = allowed[best(choice[allowed], a["top_k"])]
        mask[t, chosen] = 1
        weights[t, chosen] = s[chosen] / ((s[chosen].sum() + 1e-20) if a["normalize"] else 1) * a["routed_scale"]
    return weights, mask


def arrays_of(tokens, biased, seed=0):
    rng = np.random.default_rng(seed)
    arrays = {"logits": rng.standard_normal((tokens, EXPERTS), dtype=np.float32) * 2}
    if biased:
        # So low that every biased score is below zero: a masked score of 0 would win over all of them.
        arrays["bias"] = (rng.standard_normal(EXPERTS) / 4 - 3).astype(np.float32)
    return arrays


@pytest.mark.parametrize("attributes", [V3, V2, LITE], ids=["v3", "v2", "lite"])
@pytest.mark.parametrize("biased", [True, False])
def test_reference_chooses_as_sorting_does(attributes, biased):
    arrays = arrays_of(50, biased)
    weights, mask = reference(ROUTE, types_of(biased), attributes, arrays)
    expected_weights, expected_mask = route_in_float64(arrays["logits"], arrays.get("bias"), attributes)
    assert (mask == expected_mask).all()
    assert mask.sum(1).tolist() == [attributes["top_k"]] * 50
    assert np.abs(weights - expected_weights).max() / expected_weights.max() < ROUTE.tolerance


def test_equal_scores_go_to_the_lower_group_and_the_lower_expert():
    weights, mask = reference(ROUTE, types_of(False), V3, {"logits": np.zeros((1, EXPERTS), np.float32)})
    assert np.flatnonzero(mask[0]).tolist() == [0, 1, 2, 3]
    assert weights[0, :4].tolist() == [0.625] * 4
    logits = np.zeros((1, EXPERTS), np.float32)
    logits[0, [5, 14]] = 1.0
    _, mask = reference(ROUTE, types_of(False), V3, {"logits": logits})
    assert np.flatnonzero(mask[0]).tolist() == [4, 5, 6, 14]


def test_reference_agrees_with_transformers():
    torch = pytest.importorskip("torch")
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    config = DeepseekV3Config(
        hidden_size=EXPERTS,
        moe_intermediate_size=8,
        intermediate_size=8,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=4,
        n_group=4,
        topk_group=2,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
    )
    router = DeepseekV3TopkRouter(config)
    arrays = arrays_of(20, True)
    with torch.no_grad():
        router.weight.copy_(torch.eye(EXPERTS))
        router.e_score_correction_bias.copy_(torch.from_numpy(arrays["bias"]))
        _, values, ids = router(torch.from_numpy(arrays["logits"]))
    expected = np.zeros((20, EXPERTS), np.float32)
    np.put_along_axis(expected, ids.numpy(), values.numpy(), 1)
    weights, mask = reference(ROUTE, types_of(True), V3, arrays)
    assert ((expected != 0) == mask).all()
    assert np.abs(weights - expected).max() / expected.max() < ROUTE.tolerance


def rows_with_nan():
    """Logits with NaN: one in the best group, one in the worst group, a whole group, everywhere."""
    logits = np.tile(np.arange(EXPERTS, dtype=np.float32)[::-1] / 4, (4, 1))
    logits[0, 1] = np.nan
    logits[1, 15] = np.nan
    logits[2, 8:12] = np.nan
    logits[3] = np.nan
    return logits


def nan_is_visible(weights, mask, top_k):
    """For each row: the mask has another number of entries than top_k, or a selected weight is NaN."""
    return (mask.sum(1) != top_k) | np.array([np.isnan(w[m != 0]).any() for w, m in zip(weights, mask, strict=True)])


@pytest.mark.parametrize("attributes", [V3, V2, LITE], ids=["v3", "v2", "lite"])
@pytest.mark.parametrize("biased", [True, False])
def test_nan_is_visible_in_the_reference(attributes, biased):
    arrays = {"logits": rows_with_nan(), "bias": arrays_of(1, True)["bias"]}
    weights, mask = reference(ROUTE, types_of(biased), attributes, arrays)
    assert nan_is_visible(weights, mask, attributes["top_k"]).all()
    assert (mask.sum(1) > attributes["top_k"]).all()


def test_attributes_that_do_not_fit_are_named():
    logits, bias = types_of(True)
    cases = [
        ((logits, bias), V3 | {"scoring": "sqrtsoftplus"}, "Route: scoring must be 'sigmoid' or 'softmax', not 'sqrtsoftplus'"),
        ((logits, bias), V3 | {"groups": 3}, "Route: 16 experts do not divide into 3 groups"),
        ((logits, bias), V3 | {"top_groups": 5}, "Route: top_groups must be in 1..4, not 5"),
        ((logits, bias), V3 | {"top_k": 9}, "Route: top_k must be in 1..8, not 9"),
        ((logits, bias), V3 | {"group_score": "mean"}, "Route: group_score must be 'top2' or 'max', not 'mean'"),
        (
            (logits, bias),
            V3 | {"groups": 16, "top_groups": 16},
            "Route: group_score 'top2' needs at least two experts in a group",
        ),
        ((logits, TensorType("bf16", (16,))), V3, "Route: bias must be f32[16], not bf16[16]"),
        ((TensorType("bf16", ("tokens", 16)), None), V3, "Route: logits must be f32 [tokens, experts], not bf16[tokens, 16]"),
    ]
    for types, attributes, message in cases:
        with pytest.raises(ValueError) as error:
            ROUTE.infer(types, attributes)
        assert str(error.value) == message


@pytest.mark.parametrize("tokens", [1, None], ids=["tokens=1", "tokens=1.."])
@pytest.mark.parametrize(
    ("attributes", "biased"), [(V3, True), (V3, False), (V2, True), (LITE, False)], ids=["v3", "v3-unbiased", "v2", "lite"]
)
def test_kernel_gives_what_the_reference_gives(attributes, biased, tokens, tmp_path):
    types = types_of(biased)
    compiled = compile_text(*kernel(ROUTE, types, attributes, tokens), tmp_path)
    for count in [1] if tokens else [1, 3, 5, 40]:
        arrays = arrays_of(count, biased, seed=count)
        (weights, mask), (expected, expected_mask) = run_both(ROUTE, types, attributes, compiled, arrays, {"tokens": count})
        assert (mask == expected_mask).all()
        assert np.abs(weights - expected).max() / expected.max() < ROUTE.tolerance
    # Few different scores: nearly every choice is a tie.
    ties = {"logits": np.random.default_rng(7).integers(0, 3, (1 if tokens else 40, EXPERTS)).astype(np.float32)}
    ties |= {"bias": np.full(EXPERTS, -2, np.float32)} if biased else {}
    (_, mask), (_, expected_mask) = run_both(ROUTE, types, attributes, compiled, ties, {"tokens": len(ties["logits"])})
    assert (mask == expected_mask).all()
    # NaN: each row as one token and, where the kernel takes several, all together.
    arrays = arrays | {"logits": rows_with_nan()}
    for rows in np.split(arrays["logits"], 4) if tokens else [arrays["logits"]]:
        results, _ = run_both(ROUTE, types, attributes, compiled, arrays | {"logits": rows}, {"tokens": len(rows)})
        assert nan_is_visible(*results, attributes["top_k"]).all()
        assert (results[1].sum(1) > attributes["top_k"]).all()
