"""Stop strings in a stream of text, wherever the borders of its pieces fall.

Owns the end of the text that could still become a stop string. The match is the one that ends
first, of several that end together the longest: what a reader of single characters would find, so
it does not depend on how the text is cut into tokens.
"""

from collections.abc import Sequence


class StopMatcher:
    """Finds the first stop string in pieces of text.

    Examples
    --------
    >>> matcher = StopMatcher(["END"])
    >>> matcher.feed("the E"), matcher.feed("ND of it"), matcher.matched
    ('the ', '', 'END')
    """

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string matches everywhere"
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None

    def feed(self, delta: str) -> str:
        """Return the text that is certain to come before any stop string.

        After a match, `matched` names the stop string and nothing more is returned.
        """
        if self.matched is not None:
            return ""
        text = self._held + delta
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, start, self.matched = min(found)
            self._held = ""
            return text[:start]
        certain = len(text) - self._num_open(text)
        self._held = text[certain:]
        return text[:certain]

    def finish(self) -> str:
        """Return the text withheld; no stop string came of it."""
        held, self._held = self._held, ""
        return held

    def _num_open(self, text: str) -> int:
        """Length of the longest end of `text` that is the beginning of a stop string."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest
