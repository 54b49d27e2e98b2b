"""When a remote is given up: after its first failure, for the rest of the build, and with one line to the user.

A remote that asks for a pause (429) gets one, if that ends within the time-out of a request; a second time it is given up.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from dsr1build.cache.remote import RemoteBusy, RemoteUnavailable, Timeouts

# The pause for a remote that asks for one and does not say how long.
_PAUSE_SECONDS = 1.0


@dataclass(slots=True)
class Breaker:
    """The state of one remote in one build. Times are seconds of a monotonic clock; ``warn`` takes one line of text.

    ``given_up``: nothing is asked of the remote any more. ``resume_at``: nothing is sent before this time.
    """

    name: str
    timeouts: Timeouts
    warn: Callable[[str], None]
    given_up: bool = False
    resume_at: float = field(default=0.0)
    _paused: bool = False

    @property
    def limit(self) -> float:
        """How long one call may take in all, in seconds."""
        return self.timeouts.connect + self.timeouts.request

    def may_repeat(self, error: RemoteUnavailable, sent: float, now: float) -> bool:
        """Whether a call, first sent at ``sent``, that failed with ``error`` is to be sent again (not before ``resume_at``).

        If not, the remote is given up.
        """
        if self.given_up:
            return False
        if isinstance(error, RemoteBusy):
            # Calls that were under way together are turned away together: that is one request for a pause, not several.
            if self._paused and sent < self.resume_at:
                return True
            pause = error.retry_after or min(_PAUSE_SECONDS, self.timeouts.request)
            if not self._paused and pause <= self.timeouts.request and now + pause < sent + self.limit:
                self._paused = True
                self.resume_at = now + pause
                return True
        self.give_up(str(error))
        return False

    def give_up(self, reason: str) -> None:
        if not self.given_up:
            self.given_up = True
            self.warn(f"the shared cache {self.name} is not used for the rest of this build: {reason}")
