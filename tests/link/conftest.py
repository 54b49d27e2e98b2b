"""The toy model's shared object, linked once."""

from toy_fixtures import toy_library

__all__ = ["toy_library"]
