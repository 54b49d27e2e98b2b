"""All operators of the ``dsr1`` domain, by name."""

from collections.abc import Mapping
from types import MappingProxyType

from dsr1build.ops import attention, cache, combine, dense, embedding, latent_attention, latent_rows, norm, rotary, route
from dsr1build.ops.operator import Operator

_FAMILIES = (
    attention,
    cache,
    combine,
    dense,
    embedding,
    latent_attention,
    latent_rows,
    norm,
    rotary,
    route,
)

OPERATORS: Mapping[str, Operator] = MappingProxyType({op.name: op for family in _FAMILIES for op in family.OPERATORS})
