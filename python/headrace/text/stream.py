"""The visible text of one request: detokenizer and stop strings in one object.

Owns both. Invariant: the deltas, with `finish`, are the final text of the request.
"""

from collections.abc import Sequence

from headrace.text.detokenizer import IncrementalDetokenizer
from headrace.text.stop import StopMatcher
from headrace.text.tokenizer import Tokenizer


class TextStream:
    """Turns the tokens of one request into the text shown to its user.

    Parameters
    ----------
    stops
        Stop strings; the text ends before the first one that appears.
    min_tokens
        The text that the first `min_tokens` tokens complete is shown at once and never searched.
    skip_special
        Leave out the text of special tokens.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str] = (),
        *,
        min_tokens: int = 0,
        skip_special: bool = True,
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special=skip_special)
        self._matcher = StopMatcher(stops)
        self._num_unsearched = min_tokens

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text, None while there was none."""
        return self._matcher.matched

    def push(self, token_id: int) -> tuple[str, str | None]:
        """Return the text this token makes certain, and the stop string that has appeared."""
        if self.stopped is not None:
            return "", self.stopped
        delta = self._detokenizer.push(token_id)
        if self._num_unsearched > 0:
            self._num_unsearched -= 1
            return delta, None
        return self._matcher.feed(delta), self.stopped

    def finish(self) -> str:
        """Return the rest of the text of a request that ended for another reason.

        A stop string may still appear in it, if it ends in an incomplete character; `stopped`
        tells. After a stop string there is no rest.
        """
        if self.stopped is not None:
            return ""
        rest = self._detokenizer.finish()
        if self._num_unsearched > 0:
            return rest
        return self._matcher.feed(rest) + self._matcher.finish()
