"""dsr1build: a declarative build system for compiled large language models.

``load`` is the one name of the Python interface that a deployed bundle needs; everything else is reached through the
command line. It is imported on first use because the command line must start in milliseconds.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsr1build.runtime.session import load as load

__version__ = "0.1.0"
__all__ = ["__version__", "load"]


def __getattr__(name: str) -> Any:
    if name == "load":
        from dsr1build.runtime.session import load

        return load
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
