"""The portable subset of MLIR that every toolchain's parser accepts (docs/architecture.md, "Kernel source")."""

import re

_DIALECTS = {
    "linalg": "fill generic index yield",
    "tensor": "empty extract extract_slice insert_slice expand_shape collapse_shape",
    "arith": "constant addf subf mulf divf negf maximumf extf cmpf addi subi muli divui remui cmpi andi ori select extui extsi"
    " index_cast bitcast shli",
    "math": "exp sqrt",
}
PORTABLE_OPS = frozenset(
    {"func.func", "return"} | {f"{dialect}.{name}" for dialect, names in _DIALECTS.items() for name in names.split()}
)

_OPERATION = re.compile(r"^\s*(?:%\w+ = )?([a-z]\w*(?:\.\w+)?)\b")
_CONTINUATION = re.compile(r"^\s*(?:ins\(|outs\(|\^bb0\(|\})")


def check_portable(text: str) -> None:
    """Raises ValueError naming the first line that holds an operation outside of the portable subset.

    The emitter writes one operation a line, so a line is either an operation, one of the continuations of
    ``linalg.generic`` (``ins``, ``outs``, its block), or a closing brace.
    """
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or _CONTINUATION.match(line):
            continue
        match = _OPERATION.match(line)
        if match is None or match.group(1) not in PORTABLE_OPS:
            raise ValueError(f"line {number} is outside of the portable subset: {line.strip()}")
