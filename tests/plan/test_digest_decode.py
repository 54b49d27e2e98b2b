import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsr1build.digest import DEEPEST, BlobRef, blob_refs, decode, encode, key_of

text = st.text(st.characters(exclude_categories=["Cs"]))
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | text
    | st.binary()
    | st.binary(min_size=32, max_size=32).map(lambda b: BlobRef(b.hex())),
    lambda inner: st.lists(inner, max_size=4).map(tuple) | st.dictionaries(text, inner, max_size=4),
    max_leaves=20,
)  # fmt: skip


def typed(value):
    """The value with the type of each part, for Python holds 1, 1.0 and True equal, and 0.0 and -0.0."""
    if isinstance(value, dict):
        return ("M", sorted((k, typed(v)) for k, v in value.items()))
    if isinstance(value, tuple):
        return ("L", [typed(v) for v in value])
    return (type(value).__name__, repr(value))


@given(values)
def test_decode_is_the_inverse_of_encode(value):
    assert typed(decode(encode(value))) == typed(value)


@given(values, values)
def test_different_values_have_different_encodings(a, b):
    assert (encode(a) == encode(b)) == (typed(a) == typed(b))


@given(values, st.data())
def test_what_decode_accepts_is_canonical(value, data):
    """Any byte changed, dropped or added is refused or is the one encoding of another value."""
    good = encode(value)
    at = data.draw(st.integers(0, len(good) - 1))
    for changed in (good[:at] + bytes([data.draw(st.integers(0, 255))]) + good[at + 1 :], good[:at], good + b"N"):
        try:
            other = decode(changed)
        except ValueError:
            continue
        assert encode(other) == changed


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"X",
        b"I\x02\0\0\0\0\0\0\x0007",
        b"I\x01\0\0\0\0\0\0\0 ",
        b"S\xff\xff\xff\xff\xff\xff\xff\xffa",
        b"D\0\0\0\0\0\0\xf8\x7f",
        b"L\xff\0\0\0\0\0\0\0",
        b"M\x02\0\0\0\0\0\0\0" + b"\x01\0\0\0\0\0\0\0bN" + b"\x01\0\0\0\0\0\0\0aN",
        b"M\x02\0\0\0\0\0\0\0" + b"\x01\0\0\0\0\0\0\0aN" + b"\x01\0\0\0\0\0\0\0aN",
    ],
)
def test_other_spellings_are_refused(data):
    with pytest.raises(ValueError):
        decode(data)


def test_keys_do_not_depend_on_the_order_of_a_mapping():
    assert key_of({"a": 1, "b": {"x": 1, "y": 2}}) == key_of({"b": {"y": 2, "x": 1}, "a": 1})


def test_blob_refs_are_found_everywhere_once_in_order():
    a, b = BlobRef("aa" * 32), BlobRef("bb" * 32)
    assert blob_refs({"z": a, "y": [b, {"k": a}, "aa" * 32, 1, None]}) == [b, a]


@pytest.mark.parametrize("levels", [DEEPEST + 1, 100_000])
def test_deeper_values_are_refused(levels):
    deepest: tuple = ()
    for _ in range(DEEPEST):
        deepest = (deepest,)
    assert decode(encode(deepest)) == deepest
    level = encode((None,))[:-1]
    with pytest.raises(ValueError, match="nested too deeply"):
        decode(level * levels + b"N")
