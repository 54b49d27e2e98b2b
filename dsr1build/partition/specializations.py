"""For which numbers of tokens each kernel is compiled."""

from collections.abc import Iterable, Mapping

from dsr1build.config.schema import Recipe, SpecializationRule
from dsr1build.graph.model import Mode
from dsr1build.graph.signature import Specialization
from dsr1build.partition.model import Kernel, PartitionedModel


def kernel_variants(partitioned: PartitionedModel, recipe: Recipe) -> Mapping[str, tuple[Specialization, ...]]:
    """The specializations of every kernel, by kernel id, in the order of first use.

    A kernel takes the recipe's list of each way in which it is used: ``expert`` for routed experts, else the list of the
    mode. Exact ones come first, then padded ones, each by increasing tokens, then the range variant.
    """
    routed = {mode: {name for d in dispatches for name in d.experts} for mode, dispatches in partitioned.dispatches.items()}
    uses: dict[str, set[Mode | str]] = {id_: set() for id_ in partitioned.kernels}
    for mode, partitions in partitioned.partitions.items():
        for partition in partitions:
            uses[partition.kernel].add("expert" if partition.name in routed[mode] else mode)
    return {id_: variants(partitioned.kernels[id_], recipe, used) for id_, used in uses.items()}


def variants(kernel: Kernel, recipe: Recipe, uses: Iterable[Mode | str]) -> tuple[Specialization, ...]:
    """The specializations of a kernel with these uses: ``prefill``, ``decode`` and ``expert`` (a routed expert).

    A kernel that is used in decode alone sees no number of tokens but 1, so it gets a range variant only where the recipe
    names none for 1 token. A head gets one for 1 token in prefill too: only the last row's logits may be asked for.
    """
    lists = {
        "prefill": recipe.specializations.prefill,
        "decode": recipe.specializations.decode,
        "expert": recipe.specializations.expert,
    }
    uses = set(uses)
    rules: list[SpecializationRule] = [rule for use in sorted(uses) for rule in lists[use]]
    if kernel.kind == "head":
        rules.append(SpecializationRule(tokens=1))
    padded: set[int] = set()
    exact: set[int] = set()
    for rule in rules:
        tokens = recipe.chunk if rule.tokens == "chunk" else rule.tokens
        assert isinstance(tokens, int)
        # One token has nothing to pad; a kernel that writes state or mixes rows must not be padded.
        (padded if rule.pad and kernel.row_independent and tokens > 1 else exact).add(tokens)
    out = [Specialization("exact", tokens) for tokens in sorted(exact - padded)]
    out += [Specialization("padded", tokens) for tokens in sorted(padded)]
    if uses != {"decode"} or 1 not in exact:
        out.append(Specialization("range"))
    return tuple(out)
