"""Writes a kernel as portable MLIR text: tensors and linalg only (docs/architecture.md, "Kernel source").

Every linalg.generic carries one attribute, ``tag = "p<phase>/<schedule>/<role>"``. Ops with the same phase number are
meant to be fused into one loop nest, anchored at the last of them; the schedule names the recipe by which a toolchain
does that (``dsr1build/toolchains``). The text has no loops and no buffers of its own, so any compiler may ignore the tags.
"""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dsr1build.graph.model import Dim, DType, TensorType
from dsr1build.graph.signature import Signature

MLIR_DTYPE: dict[DType, str] = {
    "f32": "f32",
    "bf16": "bf16",
    "f16": "f16",
    "f8e4m3fn": "i8",
    "i64": "i64",
    "i32": "i32",
    "i8": "i8",
}


# An e4m3fn (exponent bias 7) whose bits are read as an f16 (bias 15) is smaller by this factor.
E4M3_REBIAS = 256.0


def mlir_type(type_: TensorType) -> str:
    """``tensor<?x4xf32>``: named dimensions are dynamic."""
    dims = "".join(("?" if isinstance(d, str) else str(d)) + "x" for d in type_.shape)
    return f"tensor<{dims}{MLIR_DTYPE[type_.dtype]}>"


@dataclass(frozen=True, slots=True)
class Value:
    """An SSA tensor value and its type, named dimensions included."""

    name: str
    type: TensorType

    @property
    def mlir(self) -> str:
        return mlir_type(self.type)


class Body:
    """The scalar region of a linalg.generic. Methods append one operation and return the name of its result."""

    def __init__(self, emitter: "Emitter") -> None:
        self._emitter = emitter
        self.lines: list[str] = []

    def _op(self, text: str) -> str:
        name = self._emitter.fresh("s")
        self.lines.append(f"      {name} = {text}")
        return name

    def constant(self, value: float) -> str:
        return self._emitter.constant(value, "f32")

    def integer(self, value: int, type_: str = "i32") -> str:
        return self._emitter.constant(value, type_)

    def add(self, a: str, b: str) -> str:
        return self._op(f"arith.addf {a}, {b} : f32")

    def sub(self, a: str, b: str) -> str:
        return self._op(f"arith.subf {a}, {b} : f32")

    def mul(self, a: str, b: str) -> str:
        return self._op(f"arith.mulf {a}, {b} : f32")

    def div(self, a: str, b: str) -> str:
        return self._op(f"arith.divf {a}, {b} : f32")

    def neg(self, a: str) -> str:
        return self._op(f"arith.negf {a} : f32")

    def maximum(self, a: str, b: str) -> str:
        return self._op(f"arith.maximumf {a}, {b} : f32")

    def exp(self, a: str) -> str:
        return self._op(f"math.exp {a} : f32")

    def sqrt(self, a: str) -> str:
        return self._op(f"math.sqrt {a} : f32")

    def mac(self, acc: str, a: str, b: str) -> str:
        """``acc + a * b``"""
        return self.add(acc, self.mul(a, b))

    def widen(self, a: str, dtype: DType, scale: str = "") -> str:
        """An element of a stored weight as f32, exactly. FP8 takes ``scale``, the scale of its block times E4M3_REBIAS,
        and gives the dequantised weight, rounded once."""
        if dtype == "f8e4m3fn":
            return self.mul(self._extend_e4m3(a), scale)
        return a if dtype == "f32" else self._op(f"arith.extf {a} : {MLIR_DTYPE[dtype]} to f32")

    def _extend_e4m3(self, a: str) -> str:
        """The byte of an e4m3fn as f32, its value over E4M3_REBIAS; exact for all 256 codes, NaN and -0 among them.

        The bits of e4m3fn are those of an f16 without three bits of exponent and seven of mantissa. Processors widen f16
        in hardware, subnormal or not; an f32 that is subnormal would cost some of them 100 cycles. All bits set, which
        the two NaN codes (magnitude 0x7F) become, is a NaN in f16 too.
        """
        wide = self._op(f"arith.extsi {a} : i8 to i16")
        shifted = self._op(f"arith.shli {wide}, {self.integer(7, 'i16')} : i16")
        bits = self._op(f"arith.andi {shifted}, {self.integer(0xBF80 - 0x10000, 'i16')} : i16")
        magnitude = self._op(f"arith.andi {bits}, {self.integer(0x3F80, 'i16')} : i16")
        is_nan = self.compare_int("eq", magnitude, self.integer(0x3F80, "i16"), "i16")
        half = self._op(f"arith.bitcast {self.select(is_nan, self.integer(-1, 'i16'), bits, 'i16')} : i16 to f16")
        return self._op(f"arith.extf {half} : f16 to f32")

    def compare(self, predicate: str, a: str, b: str) -> str:
        """Ordered comparison of two f32: ``ogt``, ``oeq``, ``olt``. False where either is NaN."""
        return self._op(f"arith.cmpf {predicate}, {a}, {b} : f32")

    def compare_int(self, predicate: str, a: str, b: str, type_: str = "index") -> str:
        return self._op(f"arith.cmpi {predicate}, {a}, {b} : {type_}")

    def both(self, a: str, b: str) -> str:
        return self._op(f"arith.andi {a}, {b} : i1")

    def either(self, a: str, b: str) -> str:
        return self._op(f"arith.ori {a}, {b} : i1")

    def select(self, condition: str, a: str, b: str, type_: str = "f32") -> str:
        return self._op(f"arith.select {condition}, {a}, {b} : {type_}")

    def add_int(self, a: str, b: str, type_: str = "i32") -> str:
        return self._op(f"arith.addi {a}, {b} : {type_}")

    def mul_int(self, a: str, b: str, type_: str = "index") -> str:
        return self._op(f"arith.muli {a}, {b} : {type_}")

    def div_int(self, a: str, b: str, type_: str = "index") -> str:
        """Quotient of two unsigned integers, rounded down."""
        return self._op(f"arith.divui {a}, {b} : {type_}")

    def rem_int(self, a: str, b: str, type_: str = "index") -> str:
        """Remainder of two unsigned integers."""
        return self._op(f"arith.remui {a}, {b} : {type_}")

    def flag(self, condition: str, type_: str = "i32") -> str:
        """1 where the condition holds, else 0."""
        return self._op(f"arith.extui {condition} : i1 to {type_}")

    def index(self, loop: int) -> str:
        """The value of loop ``loop`` of this generic."""
        return self._op(f"linalg.index {loop} : index")

    def to_index(self, a: str, type_: str = "i64") -> str:
        return self._op(f"arith.index_cast {a} : {type_} to index")

    def extract(self, tensor: Value, indices: Sequence[str]) -> str:
        """One element of a tensor at computed indices (a gather)."""
        return self._op(f"tensor.extract {tensor.name}[{', '.join(indices)}] : {tensor.mlir}")


Emit = Callable[..., str]


class Emitter:
    """Collects the text of one kernel function. One instance is one kernel; ``dsr1build.lower`` drives it."""

    def __init__(self, signature: Signature, bound_tokens: int | None) -> None:
        """``signature`` is already specialized; ``bound_tokens`` is the constant that replaced ``tokens``, if any."""
        self.signature = signature
        self._bound_tokens = bound_tokens
        self._constants: dict[tuple[str, str], str] = {}
        self._lines: list[str] = []
        self._count = 0
        self._phase = -1
        self._schedule = ""
        self._sizes: dict[str, str] = {d: f"%{d}" for d in signature.dims}
        self._destinations: list[Value | None] = []

    # -- names, constants, sizes ---------------------------------------------------------------------------------

    def fresh(self, prefix: str = "v") -> str:
        self._count += 1
        return f"%{prefix}{self._count}"

    def line(self, text: str) -> None:
        self._lines.append("  " + text)

    def constant(self, value: float, type_: str) -> str:
        """A scalar constant at the top of the function; equal constants are one value."""
        text = f32_literal(value) if type_ == "f32" else str(int(value))
        key = (text, type_)
        if key not in self._constants:
            self._constants[key] = f"%c{len(self._constants)}"
        return self._constants[key]

    def size(self, dim: Dim) -> str:
        """A dimension as it stands in a size list: a number, or the SSA name of an index."""
        return str(dim) if isinstance(dim, int) else self._sizes[dim]

    def size_value(self, dim: Dim) -> str:
        """A dimension as an SSA index."""
        return self.constant(dim, "index") if isinstance(dim, int) else self._sizes[dim]

    @property
    def tokens(self) -> Dim:
        """The outermost dimension of activations: ``"tokens"``, or its constant in an exact or padded variant."""
        return "tokens" if self._bound_tokens is None else self._bound_tokens

    def length(self) -> Dim:
        """``past + tokens``, the number of valid cache rows after the insert, as the named dimension ``length``."""
        if "length" not in self._sizes:
            name = self.fresh("n")
            self.line(f"{name} = arith.addi %past, {self.size_value(self.tokens)} : index")
            self._sizes["length"] = name
        return "length"

    # -- phases and destinations -----------------------------------------------------------------------------------

    def phase(self, schedule: str) -> None:
        """Start a new phase: the generics that follow are fused into one loop nest by this schedule."""
        self._phase += 1
        self._schedule = schedule

    def set_destinations(self, destinations: Sequence[Value | None]) -> None:
        """For the results of the next op: the output argument that each is written to, or None for a temporary."""
        self._destinations = list(destinations)

    def destination(self, result: int, type_: TensorType) -> Value:
        """The tensor that result ``result`` of the current op is computed into: its output argument, or a new one."""
        given = self._destinations[result] if result < len(self._destinations) else None
        if given is None:
            return self.empty(type_)
        self._destinations[result] = None
        return given

    def untaken_destinations(self) -> tuple[Value | None, ...]:
        """The destinations that the op did not ask for: results that must be copied there."""
        return tuple(self._destinations)

    # -- tensor operations ------------------------------------------------------------------------------------------

    def empty(self, type_: TensorType) -> Value:
        name = self.fresh()
        dynamic = ", ".join(self.size(d) for d in type_.shape if isinstance(d, str))
        self.line(f"{name} = tensor.empty({dynamic}) : {mlir_type(type_)}")
        return Value(name, type_)

    def fill(self, into: Value, value: float) -> Value:
        """``into`` with every element set. A new fill for each use: fills are fused one by one."""
        element = MLIR_DTYPE[into.type.dtype]
        name = self.fresh()
        scalar = f"{self.constant(value, element)} : {element}"
        self.line(f"{name} = linalg.fill ins({scalar}) outs({into.name} : {into.mlir}) -> {into.mlir}")
        return Value(name, into.type)

    def filled(self, type_: TensorType, value: float = 0.0) -> Value:
        return self.fill(self.empty(type_), value)

    def generic(
        self, role: str, loops: str, ins: Sequence[tuple[Value, str]], out: tuple[Value, str], iterators: str, body: Emit
    ) -> Value:
        """One linalg.generic with one result.

        ``loops`` is ``"t, n, k"``; each operand comes with the loops that index it; ``iterators`` has one letter a loop,
        ``p`` parallel or ``r`` reduction; ``body(b, *elements, accumulator)`` returns the value to yield.
        """
        scalars = Body(self)
        names = [self.fresh("e") for _ in ins] + [self.fresh("e")]
        result = body(scalars, *names)
        element = MLIR_DTYPE[out[0].type.dtype]
        operands = [*ins, out]
        maps = ", ".join(f"affine_map<({loops}) -> ({m})>" for _, m in operands)
        kinds = ", ".join({"p": '"parallel"', "r": '"reduction"'}[c] for c in iterators)
        block = ", ".join(f"{n}: {MLIR_DTYPE[v.type.dtype]}" for n, (v, _) in zip(names, operands, strict=True))
        name = self.fresh()
        self.line(f"{name} = linalg.generic {{indexing_maps = [{maps}], iterator_types = [{kinds}]}}")
        if ins:
            self.line(f"  ins({', '.join(v.name for v, _ in ins)} : {', '.join(v.mlir for v, _ in ins)})")
        self.line(f'  outs({out[0].name} : {out[0].mlir}) attrs = {{tag = "p{self._phase}/{self._schedule}/{role}"}} {{')
        self.line(f"  ^bb0({block}):")
        self._lines += scalars.lines
        self.line(f"    linalg.yield {result} : {element}")
        self.line(f"  }} -> {out[0].mlir}")
        return Value(name, out[0].type)

    def expand(self, value: Value, groups: Sequence[Sequence[int]], shape: Sequence[Dim]) -> Value:
        """A view with more dimensions. Only arguments and whole results of earlier phases: a view inside stops fusion."""
        type_ = TensorType(value.type.dtype, tuple(shape))
        name = self.fresh()
        sizes = ", ".join(self.size(d) for d in shape)
        view = f"{value.name} {_groups(groups)} output_shape [{sizes}]"
        self.line(f"{name} = tensor.expand_shape {view} : {value.mlir} into {mlir_type(type_)}")
        return Value(name, type_)

    def collapse(self, value: Value, groups: Sequence[Sequence[int]], shape: Sequence[Dim]) -> Value:
        type_ = TensorType(value.type.dtype, tuple(shape))
        name = self.fresh()
        self.line(f"{name} = tensor.collapse_shape {value.name} {_groups(groups)} : {value.mlir} into {mlir_type(type_)}")
        return Value(name, type_)

    def slice(
        self,
        value: Value,
        offsets: Sequence[Dim],
        sizes: Sequence[Dim],
        strides: Sequence[int] | None = None,
        drop: Sequence[int] = (),
    ) -> Value:
        """``tensor.extract_slice``; dimensions listed in ``drop`` have size 1 and vanish from the result."""
        type_ = TensorType(value.type.dtype, tuple(s for k, s in enumerate(sizes) if k not in drop))
        name = self.fresh()
        window = self._window(offsets, sizes, strides)
        self.line(f"{name} = tensor.extract_slice {value.name}{window} : {value.mlir} to {mlir_type(type_)}")
        return Value(name, type_)

    def insert(
        self, value: Value, into: Value, offsets: Sequence[Dim], sizes: Sequence[Dim], strides: Sequence[int] | None = None
    ) -> Value:
        name = self.fresh()
        window = self._window(offsets, sizes, strides)
        self.line(f"{name} = tensor.insert_slice {value.name} into {into.name}{window} : {value.mlir} into {into.mlir}")
        return Value(name, into.type)

    def _window(self, offsets: Sequence[Dim], sizes: Sequence[Dim], strides: Sequence[int] | None) -> str:
        rows = (map(self.size, offsets), map(self.size, sizes), map(str, strides or [1] * len(offsets)))
        return " ".join(f"[{', '.join(row)}]" for row in rows)

    # -- the whole text ---------------------------------------------------------------------------------------------

    def finish(self, results: Sequence[Value]) -> str:
        """The function ``@kernel``: tensor arguments, then run-time dimensions; returns states and outputs in order."""
        arguments = [
            f"%{a.name}: {mlir_type(a.type)}" + (" {bufferization.writable = true}" if a.role in ("state", "output") else "")
            for a in self.signature.arguments
        ]
        arguments += [f"%{d}: index" for d in self.signature.dims]
        types = ", ".join(v.mlir for v in results)
        constants = [f"  {name} = arith.constant {text} : {type_}" for (text, type_), name in self._constants.items()]
        lines = [
            f"func.func @kernel({', '.join(arguments)}) -> ({types}) {{",
            *constants,
            *self._lines,
            f"  return {', '.join(v.name for v in results)} : {types}",
            "}",
        ]
        return "\n".join(lines) + "\n"


def _groups(groups: Sequence[Sequence[int]]) -> str:
    return "[" + ", ".join("[" + ", ".join(map(str, g)) + "]" for g in groups) + "]"


def f32_literal(value: float) -> str:
    """An f32 constant as MLIR text; nine significant digits determine it."""
    rounded = struct.unpack("<f", struct.pack("<f", value))[0]
    if rounded in (float("inf"), float("-inf")):
        return "0x7F800000" if rounded > 0 else "0xFF800000"
    return f"{rounded:.9e}"
