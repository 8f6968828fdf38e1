"""Who is live: the queue, the running requests and the slots. Device thread only.

It moves requests between these and knows nothing of pages or of what a step does. Invariants:
`waiting` and `running` are in order of priority, then of arrival; a slot belongs to one running
request or is free; a live request either waits or runs.
"""

from bisect import insort_left, insort_right
from collections import deque

from jaxserve.engine.request import Request, RequestStatus
from jaxserve.errors import InvariantError


def _order(request: Request) -> tuple[int, float]:
    return request.priority, request.arrival_s


class Roster:
    """All requests that have had no terminal event."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._live: dict[str, Request] = {}

    @property
    def num_running(self) -> int:
        """Requests that hold a slot."""
        return len(self.running)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue, preempted ones included."""
        return len(self.waiting)

    @property
    def num_free_slots(self) -> int:
        """Slots for requests that wait."""
        return len(self._free_slots)

    @property
    def running_slots(self) -> set[int]:
        """Slots that running requests hold."""
        return {request.slot for request in self.running}

    @property
    def has_live(self) -> bool:
        """Whether there is any request."""
        return bool(self._live)

    def live_ids(self) -> list[str]:
        """List the ids of all requests."""
        return list(self._live)

    def find(self, request_id: str) -> Request | None:
        """Return a live request."""
        return self._live.get(request_id)

    def add(self, request: Request) -> None:
        """Queue a new request."""
        if request.request_id in self._live:
            raise InvariantError(f"request id {request.request_id!r} is live already")
        self._live[request.request_id] = request
        insort_right(self.waiting, request, key=_order)

    def admit(self) -> Request:
        """Give the head of the queue a slot; there has to be one free."""
        request = self.waiting.popleft()
        request.status = RequestStatus.RUNNING
        request.slot = self._free_slots.pop()
        insort_right(self.running, request, key=_order)
        return request

    def send_back(self, request: Request) -> None:
        """Take a running request's slot, and queue it before those that came after it."""
        self._leave_slot(request)
        request.status = RequestStatus.PREEMPTED
        insort_left(self.waiting, request, key=_order)

    def end(self, request: Request) -> None:
        """Let a request be live no more."""
        if request.status is RequestStatus.RUNNING:
            self._leave_slot(request)
        else:
            self.waiting.remove(request)
        request.status = RequestStatus.FINISHED
        del self._live[request.request_id]

    def check_integrity(self) -> None:
        """Raise InvariantError unless slots and requests add up."""
        slots = sorted([*self._free_slots, *(request.slot for request in self.running)])
        if slots != list(range(self.num_slots)):
            raise InvariantError(f"free and running slots are {slots}, of {self.num_slots}")
        if len(self._live) != len(self.running) + len(self.waiting):
            raise InvariantError("a live request neither waits nor runs")

    def _leave_slot(self, request: Request) -> None:
        self.running.remove(request)
        self._free_slots.append(request.slot)
