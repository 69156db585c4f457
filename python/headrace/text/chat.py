"""Chat templates: a conversation to the text a model was trained on.

A template is a Jinja program out of a model's files, so it runs in a sandbox that can change
nothing, and without a clock: the date is an argument. No locks, no state after construction.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from headrace.errors import InvalidRequest


class _Generation(Extension):
    """`{% generation %}` marks the answer for training; for a prompt it changes nothing."""

    tags = {"generation"}  # noqa: RUF012  # Jinja declares it as a set

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes <, > and & for HTML, which no model was trained on.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _check_message(position: int, message: object) -> None:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequest(
            f"messages[{position}]={message!r}: accepted is a mapping with a `role` string"
        )


class ChatTemplate:
    """A compiled chat template.

    Parameters
    ----------
    source
        Jinja source.
    special_tokens
        Names such as `bos_token` the template may use, with their text.

    Raises
    ------
    InvalidRequest
        If the source is not valid Jinja; names the line.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        self._special_tokens = dict(special_tokens or {})
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise InvalidRequest(f"chat template, line {error.lineno}: {error.message}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        strftime_now: Callable[[str], str] | None = None,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """Return the prompt text of a conversation.

        Parameters
        ----------
        messages
            At least one mapping with a `role`, from the oldest to the newest.
        add_generation_prompt
            End with the opening of the model's answer.
        tools
            Descriptions of functions the model may call, as JSON schemas.
        strftime_now
            Formats the present date, for templates that print it; the caller owns the clock.
        variables
            More names for the template, such as `enable_thinking`.

        Raises
        ------
        InvalidRequest
            If a message has no role, the template refuses the conversation, or it fails on it.
        """
        if isinstance(messages, str | Mapping) or not messages:
            raise InvalidRequest(f"messages={messages!r}: accepted is a non-empty list of messages")
        for position, message in enumerate(messages):
            _check_message(position, message)
        names: dict[str, object] = {**self._special_tokens, **(variables or {})}
        names.update(
            messages=list(messages),
            tools=None if tools is None else list(tools),
            add_generation_prompt=add_generation_prompt,
        )
        if strftime_now is not None:
            # Left undefined otherwise: templates test for it and fall back to a fixed date.
            names["strftime_now"] = strftime_now
        try:
            return self._template.render(names)
        except Exception as error:  # whatever its filters raise on content they did not expect
            raise InvalidRequest(f"chat template: {type(error).__name__}: {error}") from error
