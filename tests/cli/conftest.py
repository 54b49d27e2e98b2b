"""A bundle of the toy model for the verbs that take one."""

from toy_fixtures import toy_bundle, toy_library

__all__ = ["toy_bundle", "toy_library"]
