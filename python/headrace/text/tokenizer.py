"""Text to token ids and back: one tokenizer with what its files say about it.

Owns a `tokenizers.Tokenizer`, the end-of-text ids and the source of the chat template. Thread-safe
after construction: nothing changes, except that the chat template is compiled on its first use.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import tokenizers

from headrace.errors import InvalidRequest, ModelError
from headrace.text.chat import ChatTemplate

_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")


class Tokenizer:
    """A tokenizer of one model.

    Parameters
    ----------
    inner
        The tokenizer proper.
    eos_ids
        Ids that end a text, as the model's files say.
    chat_template
        Jinja source, None if the model has none.
    special_tokens
        Names a chat template may use, such as `bos_token`, with their text.
    """

    def __init__(
        self,
        inner: tokenizers.Tokenizer,
        *,
        eos_ids: Sequence[int] = (),
        chat_template: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        self._inner = inner
        # Left on, these would silently shorten a prompt or fill it up.
        inner.no_truncation()
        inner.no_padding()
        self._chat_source = chat_template
        self._chat: ChatTemplate | None = None
        self._special_tokens = dict(special_tokens or {})
        self.eos_ids = tuple(dict.fromkeys(eos_ids))
        self.vocab_size = inner.get_vocab_size(with_added_tokens=True)
        self._special_ids = frozenset(
            token_id
            for token_id, token in inner.get_added_tokens_decoder().items()
            if token.special
        )
        self._byte_ids = frozenset(
            token_id
            for token, token_id in inner.get_vocab(with_added_tokens=False).items()
            if _BYTE_TOKEN.fullmatch(token)
        )

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        """Load `tokenizer.json`, and from its folder what the files beside it say.

        These are `tokenizer_config.json` and `chat_template.jinja` for the chat template,
        `generation_config.json`, `config.json` and `tokenizer_config.json` for end-of-text ids (all
        that are named in any of them). Each may be missing.

        Raises
        ------
        ModelError
            If the file is missing or damaged; names it.
        """
        path = Path(path)
        if path.is_dir():
            path = path / "tokenizer.json"
        if not path.is_file():
            raise ModelError(f"{path}: no such tokenizer file")
        try:
            inner = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise ModelError(f"{path}: not a tokenizer file: {error}") from error
        folder = path.parent
        settings = _read_json(folder / "tokenizer_config.json")
        special = {
            name: text
            for name, value in settings.items()
            if name.endswith("_token") and (text := _token_text(value)) is not None
        }
        eos_ids: list[int] = []
        for name in ("generation_config.json", "config.json"):
            eos_ids += _ids(_read_json(folder / name).get("eos_token_id"))
        eos_id = inner.token_to_id(special["eos_token"]) if "eos_token" in special else None
        return cls(
            inner,
            eos_ids=[*eos_ids, *_ids(eos_id)],
            chat_template=_chat_source(folder, settings),
            special_tokens=special,
        )

    @classmethod
    def from_json(
        cls, text: str, *, eos_ids: Sequence[int] = (), chat_template: str | None = None
    ) -> Self:
        """Load the content of a `tokenizer.json`; `ModelError` if it is damaged."""
        try:
            inner = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises plain Exception
            raise ModelError(f"not a tokenizer: {error}") from error
        return cls(inner, eos_ids=eos_ids, chat_template=chat_template)

    @property
    def has_chat_template(self) -> bool:
        """Whether `apply_chat_template` can be used."""
        return self._chat_source is not None

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Return the ids of `text`, with the model's own prefix (such as BOS) if `add_special`.

        Turn `add_special` off for the text of a chat template, which has them already.
        `InvalidRequest` if it is not a string of valid Unicode.
        """
        if not isinstance(text, str):
            raise InvalidRequest(f"prompt={text!r}: accepted is a string")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"prompt: lone surrogate at character {error.start}; accepted is valid Unicode"
            ) from None
        return self._inner.encode(text, add_special_tokens=add_special).ids

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Return the text of ids; bytes that are not UTF-8 become U+FFFD, unknown ids nothing."""
        return self._inner.decode(list(token_ids), skip_special_tokens=skip_special)

    def is_special(self, token_id: int) -> bool:
        """Whether `decode` leaves this id out by default."""
        return token_id in self._special_ids

    def is_byte(self, token_id: int) -> bool:
        """Whether the id stands for one byte (`<0xE2>`) of a byte-fallback vocabulary."""
        return token_id in self._byte_ids

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        strftime_now: Callable[[str], str] | None = None,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """Return the prompt text for a conversation; `ChatTemplate.render` has the details."""
        if self._chat is None:
            if self._chat_source is None:
                raise InvalidRequest("messages: this model has no chat template; give a prompt")
            self._chat = ChatTemplate(self._chat_source, self._special_tokens)
        return self._chat.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            strftime_now=strftime_now,
            variables=variables,
        )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path}: not a JSON object")
    return content


def _token_text(value: object) -> str | None:
    # Either the text itself or the fields of an added token.
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _ids(value: object) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [item for item in values if isinstance(item, int) and not isinstance(item, bool)]


def _chat_source(folder: Path, settings: Mapping[str, Any]) -> str | None:
    own_file = folder / "chat_template.jinja"
    if own_file.is_file():
        return own_file.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several named ones
        named = {entry.get("name"): entry.get("template") for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None
