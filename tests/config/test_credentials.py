"""Credentials that somebody wrote into an address reach no message, no excerpt and no annotation."""

import pytest

from dsr1build.config.load import load_profile
from dsr1build.errors import InvalidInput, Position, without_credentials
from dsr1build.execute.ci import error_annotation

ADDRESSES = [
    "http://me:S3CRET@127.0.0.1:9/c",
    "https://S3CRET@cache.example.org/c",
    "http://h/c?token=S3CRET",
    "http://me:S3CRET@h/c?token=S3CRET&x=S3CRET",
    "ftp://me:S3CRET@h/",
    "http:/me:S3CRET@h",
    '"http://me:S3CRET@h/ x"',
    "[http://me:S3CRET@h]",
    "grpc://me:S3CRET@h:9",
    "s3://AKIA:S3CRET@bucket/p",
    "gs://bucket/p?key=S3CRET",
]


@pytest.mark.parametrize("address", ADDRESSES)
def test_in_a_profile(tmp_path, address):
    file = tmp_path / "profile.yaml"
    file.write_text(f"version: 1\nname: x\nremotes:\n  - url: {address}\n")
    with pytest.raises(InvalidInput) as caught:
        load_profile(str(file))
    error = caught.value
    for text in (str(error), error.message, error.hint, error.where, repr(error), error_annotation(error, {})):
        assert "S3CRET" not in text
    assert "*" in error.render()


def test_the_caret_stands_where_it_stood():
    line = "  - url: http://me:pass@h/c?q=1 # here"
    error = InvalidInput("bad", position=Position("f", 1, 36, line))
    assert error.render() == ("f:1:36: error: bad\n      - url: http://*******@h/c?*** # here\n    " + " " * 35 + "^")


def test_nothing_else_is_hidden():
    for text in ("dist/a@b/c", "me@example.org", "what? file:///a/b", "https://example.org/a, see x@y", "a:/b"):
        assert without_credentials(text) == text
