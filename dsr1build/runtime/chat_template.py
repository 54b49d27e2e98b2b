"""Renders one chat template: a JSON request on standard input, the text on standard output.

Run as a program of its own because a template is code from a stranger: Jinja's immutable sandbox keeps it from reaching
Python objects, and the limits below keep a loop in it from exhausting the machine. The environment is the one that
Hugging Face checkpoints are written for
(https://huggingface.co/docs/transformers/chat_templating): trimmed blocks, ``raise_exception``, ``tojson``,
``strftime_now``.
"""

import json
import resource
import sys
from datetime import datetime
from typing import Any, NoReturn

CPU_SECONDS = 5
MEMORY_BYTES = 1 << 30
LONGEST_TEXT = 16 << 20


def raise_exception(message: str) -> NoReturn:
    import jinja2

    raise jinja2.TemplateError(message)


def tojson(value: Any, indent: int | None = None, **options: Any) -> str:
    """JSON without the HTML escapes that Jinja's own filter adds."""
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def render(template: str, variables: dict[str, Any]) -> str:
    """Render ``template``; raises jinja2.TemplateError for every fault in it."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(template).render(**variables)


def main() -> int:
    import jinja2

    request = json.load(sys.stdin)
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    try:
        text = render(request["template"], request["variables"])
    except (jinja2.TemplateError, TypeError, ValueError, RecursionError, MemoryError, OverflowError) as error:
        print(f"{type(error).__name__}: {error}".splitlines()[0], file=sys.stderr)
        return 1
    if len(text) > LONGEST_TEXT:
        print(f"it wrote {len(text)} characters, more than {LONGEST_TEXT}", file=sys.stderr)
        return 1
    sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
