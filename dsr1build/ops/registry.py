"""All operators of the ``dsr1`` domain, by name."""

from collections.abc import Mapping
from types import MappingProxyType

from dsr1build.ops import dense, norm
from dsr1build.ops.operator import Operator

_FAMILIES = (dense, norm)

OPERATORS: Mapping[str, Operator] = MappingProxyType({op.name: op for family in _FAMILIES for op in family.OPERATORS})
