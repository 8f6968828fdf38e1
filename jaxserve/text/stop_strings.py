"""Find the first stop string in a text that arrives in parts, holding back what may belong to one.

Generation ends at the first character with which any stop string is complete; of several that end
there, the longest counts. So the result does not depend on how the text is cut into parts; only may
a part be one in which none may end. An automaton over all stop strings (Aho and Corasick's) reads
each character once; the sequences of a request share it.
"""

from collections import deque
from collections.abc import Sequence

from jaxserve.errors import InvariantError


class StopAutomaton:
    """All stop strings of a request; state 0 has read nothing.

    Every other state stands for a beginning of a stop string.

    Attributes:
        depths: by state, how many characters it stands for.
        matches: by state, the longest stop string with which it ends, or None.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.depths = [0]
        self.matches: list[str | None] = [None]
        self._children: list[dict[str, int]] = [{}]
        self._fallbacks = [0]
        for stop in stops:
            if not stop:
                raise InvariantError("an empty stop string")
            self._insert(stop)
        self._link()

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to look for."""
        return len(self.depths) == 1

    def step(self, state: int, character: str) -> int:
        """Return the state after one more character."""
        while state and character not in self._children[state]:
            state = self._fallbacks[state]
        return self._children[state].get(character, 0)

    def open_state(self, state: int) -> int:
        """Return the longest end of a state that is not yet all of the stop strings it begins."""
        while state and not self._children[state]:
            state = self._fallbacks[state]
        return state

    def _insert(self, stop: str) -> None:
        state = 0
        for character in stop:
            child = self._children[state].get(character)
            if child is None:
                child = len(self.depths)
                self._children[state][character] = child
                self._children.append({})
                self._fallbacks.append(0)
                self.depths.append(self.depths[state] + 1)
                self.matches.append(None)
            state = child
        self.matches[state] = stop

    def _link(self) -> None:
        """Set each state's fallback: the state of its longest proper end."""
        # Breadth first: a fallback is shorter than its state, so it is complete before it is used.
        queue = deque(self._children[0].values())
        while queue:
            state = queue.popleft()
            if self.matches[state] is None:
                self.matches[state] = self.matches[self._fallbacks[state]]
            for character, child in self._children[state].items():
                self._fallbacks[child] = self.step(self._fallbacks[state], character)
                queue.append(child)


class StopStrings:
    """The search in one sequence; without stop strings, text passes through untouched.

    Attributes:
        hit: the stop string that was found, or None so far.
    """

    def __init__(self, automaton: StopAutomaton) -> None:
        self.hit: str | None = None
        self._automaton = automaton
        self._state = 0
        self._held = ""

    def push(self, text: str, *, may_end: bool = True) -> str:
        """Return what the arrival of `text` releases; after a hit, nothing any more.

        Where not `may_end`, no stop string ends in `text`, though one may begin there.
        """
        automaton = self._automaton
        if automaton.is_empty:
            return text
        if self.hit is not None:
            return ""
        seen = self._held + text
        for end, character in enumerate(text, len(self._held) + 1):
            self._state = automaton.step(self._state, character)
            if not may_end:
                # What is complete here is none, and not to be held back.
                self._state = automaton.open_state(self._state)
                continue
            self.hit = automaton.matches[self._state]
            if self.hit is not None:
                self._held = ""
                return seen[: end - len(self.hit)]
        # The state's depth is the length of the longest end of the text that begins a stop string.
        released = len(seen) - automaton.depths[self._state]
        self._held = seen[released:]
        return seen[:released]

    def finish(self) -> str:
        """Return what is still held back: the text ends here, so it is no stop string."""
        held, self._held = self._held, ""
        return held
