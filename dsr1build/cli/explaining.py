"""What the verbs `build` and `explain` share: earlier actions that the cache knows, and the record that a build leaves."""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dsr1build.cache.store import LocalStore
    from dsr1build.execute.events import Emit
    from dsr1build.plan.action import Action
    from dsr1build.plan.explain import Known
    from dsr1build.plan.record import BuildRecord, Done

# So many entries of the cache, the youngest first, are searched for an earlier form of an action.
EARLIER_ENTRIES = 256


def earlier_entries(store: "LocalStore", seen: Mapping[str, bytes]) -> "Callable[[], list[Known]]":
    """Gives what the youngest entries of the cache were made of, without those whose encoded fields are in ``seen``: they
    are not earlier. The cache is read at the first call."""
    found: list[Known] | None = None

    def load() -> "Iterator[Known]":
        from dsr1build.cache.blobs import BlobLost
        from dsr1build.digest import BlobRef, sha256_hex
        from dsr1build.plan.explain import Known

        now = set(map(sha256_hex, seen.values()))
        entries = [(entry.used, key, entry.label) for key, entry in store.entries().items() if key not in now]
        for _, key, label in sorted(entries, reverse=True)[:EARLIER_ENTRIES]:
            try:
                yield Known.from_encoded(store.read_blob(BlobRef(key)), "cache", "", label)
            except (BlobLost, ValueError):
                continue

    def entries() -> "list[Known]":
        nonlocal found
        if found is None:
            found = list(load())
        return found

    return entries


def follow(emit: "Emit", done: "dict[str, Done]") -> "Emit":
    """Passes events on to ``emit`` and notes in ``done`` what became of each action."""
    from dsr1build.execute.events import Event, Failed, Finished, Hit
    from dsr1build.plan.record import Done

    def followed(event: Event) -> None:
        if isinstance(event, Hit):
            done[event.action] = Done("local hit" if event.source == "local" else "remote hit")
        elif isinstance(event, Finished):
            done[event.action] = Done("ran", round(event.seconds, 3))
        elif isinstance(event, Failed):
            done[event.action] = Done("failed")
        emit(event)

    return followed


def explained_record(
    name: str,
    actions: "Mapping[str, Action]",
    seen: Mapping[str, bytes],
    done: "Mapping[str, Done]",
    last: "BuildRecord | None",
    earlier: "Callable[[], list[Known]] | None",
) -> "BuildRecord":
    """The record of a build with an explanation for each action that was not in the cache.

    ``earlier`` is None for a build that did not look into the cache.
    """
    from dsr1build.plan.explain import Explanation, Known, explain_miss
    from dsr1build.plan.record import make_record

    known = list(last.known("last build")) if last else []
    explanations: dict[str, Explanation] = {}
    for id, became in done.items():
        if became.outcome in ("ran", "failed") and id in seen:
            if earlier is None:
                explanations[id] = Explanation("unread")
            else:
                now = Known.from_encoded(seen[id], "this build", id, actions[id].label)
                explanations[id] = explain_miss(now, known, earlier)
    return make_record(name, actions, seen, done, explanations, last)
