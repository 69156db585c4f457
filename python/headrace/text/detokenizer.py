"""Token ids to text one token at a time, never showing half a character.

Owns the newest ids of one request. Invariant: the deltas so far are a prefix of the text of all ids
so far, and together with `finish` they equal it.

Decoding starts at an anchor a few tokens back, because the text of a token depends on the tokens
before it (bytes of one character, a space that is dropped at the start), and going back to the
first one each time would be quadratic.
"""

from headrace.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
# A window that has not moved on by then is full of bytes that are no UTF-8; it is cut.
MAX_WINDOW = 64
# Tokens left after a cut, and characters they must have: UTF-8 looks back three bytes at most.
CUT_TAIL = 8
CUT_TAIL_CHARS = 4


class IncrementalDetokenizer:
    """Turns the tokens of one request into text as they come.

    Special tokens give no text unless `skip_special` is false.

    Examples
    --------
    >>> detokenizer = IncrementalDetokenizer(tokenizer)  # doctest: +SKIP
    >>> "".join(map(detokenizer.push, ids)) + detokenizer.finish()  # doctest: +SKIP
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._window: list[int] = []
        self._num_context = 0  # leading ids of the window whose text was given before
        self._num_shown = 0  # leading characters of the window's text that were given

    def push(self, token_id: int) -> str:
        """Return the text that this token makes certain; "" while a character is incomplete."""
        if self._skip_special and self._tokenizer.is_special(token_id):
            return ""
        self._window.append(token_id)
        if self._tokenizer.is_byte(token_id):
            # A run of byte tokens is decoded as a whole: one bad byte alters the text of them all.
            return ""
        text = self._decode(self._window)
        # The last replacement character may be the start of a character still to come.
        end = len(text) - text.endswith(REPLACEMENT)
        delta = text[self._num_shown : end]
        self._num_shown = max(self._num_shown, end)
        if delta and end == len(text):
            self._move_anchor()
        elif len(self._window) > MAX_WINDOW:
            self._cut(text)
        return delta

    def finish(self) -> str:
        """Return what was withheld; an incomplete character becomes U+FFFD. No push after it."""
        text = self._decode(self._window)
        delta = text[self._num_shown :]
        self._num_shown = len(text)
        return delta

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special=self._skip_special)

    def _move_anchor(self) -> None:
        """Keep the ids that gave the newest text as the context of what follows."""
        self._window = self._window[self._num_context :]
        self._num_context = len(self._window)
        self._num_shown = len(self._decode(self._window))

    def _cut(self, text: str) -> None:
        """Drop the head of a window that ends in no whole character, where this alters nothing."""
        head = self._decode(self._window[:-CUT_TAIL])
        tail = self._decode(self._window[-CUT_TAIL:])
        if len(tail) >= CUT_TAIL_CHARS and head + tail == text and self._num_shown >= len(head):
            self._window = self._window[-CUT_TAIL:]
            self._num_context = 0
            self._num_shown -= len(head)
