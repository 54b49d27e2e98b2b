"""Rotary position embeddings as a configuration describes them: frequencies, table scale, softmax scale.

Formulas follow transformers 5.24 (``modeling_rope_utils.py``), which applies YaRN at every length. Both spellings are read:
``rope_scaling`` with ``type`` beside ``rope_theta``, and ``rope_parameters`` with ``rope_type`` and ``rope_theta`` inside.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dsr1build.frontends.checkpoint.config_fields import Fields

ROPE_TYPES = ("default", "linear", "yarn", "llama3")


@dataclass(frozen=True, slots=True)
class Rope:
    """``inverse_frequencies`` has half the rotated width; ``table_scale`` multiplies cos and sin.

    ``softmax_scale`` is the square of YaRN's m(factor, mscale_all_dim). Only MLA multiplies its scores by it: there the
    part of a head that is not rotated has to be scaled too, which the tables cannot do.
    """

    inverse_frequencies: tuple[float, ...]
    table_scale: float
    softmax_scale: float


def read_rope(fields: Fields, width: int, max_positions: int) -> Rope:
    """Take the RoPE fields of a configuration. ``width`` is the rotated width of a head, an even number.

    Raises InvalidInput for a type other than ``ROPE_TYPES`` and for parameters that are unknown or out of range.
    """
    if fields.present("rope_scaling") and fields.present("rope_parameters"):
        hint = "Keep one of rope_scaling and rope_parameters."
        fields.refuse("rope_scaling", "rope_scaling and rope_parameters are both given", hint)
    theta_outside = fields.number("rope_theta", 10000.0)
    if fields.number("partial_rotary_factor", 1.0) != 1.0:
        hint = "Supported: 1.0, where the whole head is rotated."
        fields.refuse("partial_rotary_factor", "partial_rotary_factor other than 1.0 is not supported", hint)
    original_outside = fields.integer("original_max_position_embeddings", 0)
    parameters = fields.nested("rope_scaling") or fields.nested("rope_parameters")
    if parameters is None:
        return Rope(_frequencies(width, theta_outside), 1.0, 1.0)

    theta = parameters.number("rope_theta", theta_outside)
    if parameters.number("partial_rotary_factor", 1.0) != 1.0:
        hint = "Supported: 1.0, where the whole head is rotated."
        parameters.refuse("partial_rotary_factor", "partial_rotary_factor other than 1.0 is not supported", hint)
    spelling = "rope_type" if parameters.present("rope_type") else "type"
    old_spelling = parameters.raw("type")
    kind = parameters.choice(spelling, "default", ROPE_TYPES)
    if old_spelling is not None and old_spelling != kind:
        message = f"{parameters.label('type')} {old_spelling!r} and rope_type {kind!r} contradict each other"
        parameters.refuse("type", message, "Keep one of the two.")
    frequencies = _frequencies(width, theta)
    original = original_outside or max_positions
    if kind in ("yarn", "llama3"):
        inside = parameters.integer("original_max_position_embeddings", max_positions)
        # transformers gives the field outside of the parameters priority over the one inside.
        original = original_outside or inside
    if kind == "linear":
        factor = _factor(parameters)
        rope = Rope(tuple(f / factor for f in frequencies), 1.0, 1.0)
    elif kind == "yarn":
        rope = _yarn(parameters, frequencies, theta, original, max_positions)
    elif kind == "llama3":
        rope = Rope(_llama3(parameters, frequencies, original), 1.0, 1.0)
    else:
        rope = Rope(frequencies, 1.0, 1.0)
    parameters.refuse_unknown()
    return rope


def _frequencies(width: int, theta: float) -> tuple[float, ...]:
    return tuple(theta ** (-2.0 * j / width) for j in range(width // 2))


def _factor(parameters: Fields) -> float:
    factor = parameters.number("factor")
    if factor < 1.0:
        parameters.refuse("factor", f"{parameters.label('factor')} must be at least 1, not {factor}", "Correct the value.")
    return factor


def yarn_magnitude(factor: float, weight: float) -> float:
    """YaRN's m(s, a) = 0.1 a ln s + 1 for s > 1, else 1 (``get_mscale`` in transformers)."""
    return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0


def _yarn(parameters: Fields, frequencies: Sequence[float], theta: float, original: int, max_positions: int) -> Rope:
    factor = _factor(parameters) if parameters.present("factor") else max_positions / original
    beta_fast = parameters.number("beta_fast", 32.0)
    beta_slow = parameters.number("beta_slow", 1.0)
    mscale = parameters.number("mscale", 0.0, positive=False)
    mscale_all_dim = parameters.number("mscale_all_dim", 0.0, positive=False)
    truncate = parameters.boolean("truncate", True)
    inferred = yarn_magnitude(factor, 1.0)
    if mscale and mscale_all_dim:
        inferred = yarn_magnitude(factor, mscale) / yarn_magnitude(factor, mscale_all_dim)
    table_scale = parameters.number("attention_factor", inferred)
    softmax_scale = yarn_magnitude(factor, mscale_all_dim) ** 2 if mscale_all_dim else 1.0

    half = len(frequencies)
    if theta <= 1.0:
        parameters.refuse("rope_theta", f"YaRN needs rope_theta greater than 1, not {theta}", "Correct the value.")

    def turning_dim(rotations: float) -> float:
        """The dimension whose wave turns this often within the original context."""
        return 2 * half * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = turning_dim(beta_fast), turning_dim(beta_slow)
    if truncate:
        low, high = float(math.floor(low)), float(math.ceil(high))
    low, high = max(low, 0.0), min(high, 2.0 * half - 1)
    if low == high:
        high += 0.001
    blended = []
    for j, frequency in enumerate(frequencies):
        ramp = min(max((j - low) / (high - low), 0.0), 1.0)
        blended.append(frequency * (1.0 - ramp) + frequency / factor * ramp)
    return Rope(tuple(blended), table_scale, softmax_scale)


def _llama3(parameters: Fields, frequencies: Sequence[float], original: int) -> tuple[float, ...]:
    factor = _factor(parameters)
    low = parameters.number("low_freq_factor")
    high = parameters.number("high_freq_factor")
    if high <= low:
        message = f"{parameters.label('high_freq_factor')} must be greater than low_freq_factor {low}, not {high}"
        parameters.refuse("high_freq_factor", message, "Correct the value.")
    scaled = []
    for frequency in frequencies:
        wavelength = 2 * math.pi / frequency
        if wavelength < original / high:
            scaled.append(frequency)
        elif wavelength > original / low:
            scaled.append(frequency / factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            scaled.append((1 - smooth) * frequency / factor + smooth * frequency)
    return tuple(scaled)
