"""Tokens to visible text: no half characters, nothing of a stop string, nothing lost (REQ-04)."""

import json

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from headrace.errors import InvalidRequest, ModelError
from headrace.text.chat import ChatTemplate
from headrace.text.detokenizer import MAX_WINDOW, IncrementalDetokenizer
from headrace.text.stop import StopMatcher
from headrace.text.stream import TextStream
from headrace.text.tokenizer import Tokenizer

LINES = [
    "the water wheel turns and the water runs",
    "Wasser läuft über das Rad, mögen täten",
    "水は水車を回す 🙂🙃 and so on, abab abab aab",
    "def wheel(x):\n    return x\n\n",
]


def byte_level():
    """Return a small byte-level BPE with a special and an ordinary added token."""
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>", "<|start|>"],
        show_progress=False,
    )
    inner.train_from_iterator(LINES, trainer)
    inner.add_tokens([AddedToken("<tool call>", special=False)])
    return inner


def byte_fallback():
    """Return a vocabulary of words with metaspaces and single bytes, as older Llama models have."""
    words = ["<unk>", "</s>", "▁", "▁the", "the", "▁a", "b", "ab", "é", "\ufffd"]
    vocab = {word: place for place, word in enumerate(words)}
    vocab |= {f"<0x{byte:02X}>": len(words) + byte for byte in range(256)}
    inner = tokenizers.Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    inner.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    inner.add_special_tokens(["</s>"])
    return inner


BYTE_LEVEL = Tokenizer(byte_level())
BYTE_FALLBACK = Tokenizer(byte_fallback())
TOKENIZERS = {"byte_level": BYTE_LEVEL, "byte_fallback": BYTE_FALLBACK}

texts = st.text(st.sampled_from("ab ü水🙂\n.é\ufffd"), max_size=30)


def ids_of(tokenizer):
    """Any tokens: whole words, pieces of characters, bytes that are no UTF-8, special ones."""
    return st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40)


def byte_ids(text):
    """One token for each byte of a text."""
    alphabet = BYTE_LEVEL._inner.pre_tokenizer.pre_tokenize_str(text)
    return [BYTE_LEVEL._inner.token_to_id(char) for piece, _ in alphabet for char in piece]


def stream_all(tokenizer, ids):
    detokenizer = IncrementalDetokenizer(tokenizer)
    return [detokenizer.push(token) for token in ids], detokenizer.finish()


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
def test_deltas_add_up_to_the_whole_text(name, data):
    """REQ-04."""
    tokenizer = TOKENIZERS[name]
    ids = data.draw(ids_of(tokenizer))
    deltas, rest = stream_all(tokenizer, ids)
    assert "".join(deltas) + rest == tokenizer.decode(ids)


@given(texts)
def test_text_split_into_bytes_never_shows_half_a_character(text):
    """REQ-04."""
    ids = byte_ids(text)
    deltas, rest = stream_all(BYTE_LEVEL, ids)
    assert "".join(deltas) + rest == text
    shown = ""
    for position, delta in enumerate(deltas):
        shown += delta
        assert text.startswith(shown)
        # What is certain is shown at once, except a character that looks like a broken one.
        certain = bytes(text, "utf-8")[: position + 1].decode(errors="ignore")
        assert shown in (certain, certain.removesuffix("\ufffd"))


@pytest.mark.parametrize("byte", ["€", "€"[:1]])
def test_long_garbage_is_cut_and_still_exact(byte):
    """A model that went wrong: thousands of bytes that are no UTF-8, in linear time."""
    lead, *_ = byte_ids(byte)
    ids = [lead] * (20 * MAX_WINDOW) + byte_ids("ok")
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL)
    shown = []
    for token in ids:
        shown.append(detokenizer.push(token))
        assert len(detokenizer._window) <= MAX_WINDOW + 1
    assert "".join(shown) + detokenizer.finish() == BYTE_LEVEL.decode(ids)


@given(
    st.lists(
        st.sampled_from([b"\xff", b"\xe2", b"\x82", b"\xac", b"\xf0", b"\x9f", b"a"]), max_size=200
    )
)
def test_long_mixed_garbage_is_exact(pieces):
    """REQ-04."""
    table = {byte: char for char, byte in zip(*_byte_alphabet(), strict=True)}
    ids = [BYTE_LEVEL._inner.token_to_id(table[piece[0]]) for piece in pieces]
    deltas, rest = stream_all(BYTE_LEVEL, ids)
    assert "".join(deltas) + rest == b"".join(pieces).decode(errors="replace")


@pytest.mark.parametrize("shift", [0, 1, 2])
def test_cut_does_not_split_a_character(shift):
    """Real U+FFFD characters, a token a byte, at every offset to the place of the cut."""
    lead, *_ = byte_ids("€")
    ids = [lead] * shift + byte_ids("\ufffd" * MAX_WINDOW)
    deltas, rest = stream_all(BYTE_LEVEL, ids)
    assert "".join(deltas) + rest == "\ufffd" * (shift + MAX_WINDOW)


def _byte_alphabet():
    """Characters of a byte-level vocabulary and the bytes they stand for."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    chars = [chr(byte) for byte in printable] + [chr(256 + n) for n in range(len(others))]
    return chars, printable + others


def test_special_tokens_give_no_text_even_inside_a_character():
    special = BYTE_LEVEL._inner.token_to_id("<|end|>")
    first, second = byte_ids("ü")
    deltas, rest = stream_all(BYTE_LEVEL, [first, special, second, special])
    assert deltas == ["", "", "ü", ""]
    assert rest == ""
    shown = IncrementalDetokenizer(BYTE_LEVEL, skip_special=False)
    assert shown.push(special) == "<|end|>"


def naive_stop(text, stops):
    """Read the text one character at a time; stop at the first stop string that is complete."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, None


stop_lists = st.lists(st.text(st.sampled_from("abü. "), min_size=1, max_size=5), max_size=4)


@given(st.lists(st.text(st.sampled_from("abü. "), max_size=4), max_size=20), stop_lists)
def test_stop_strings_do_not_depend_on_the_pieces(pieces, stops):
    """REQ-04: over several pieces, inside one, overlapping themselves."""
    text = "".join(pieces)
    expected, stop = naive_stop(text, stops)
    matcher = StopMatcher(stops)
    shown = ""
    for piece in pieces:
        shown += matcher.feed(piece)
        assert expected.startswith(shown)
    shown += matcher.finish()
    assert (shown, matcher.matched) == (expected, stop)


@pytest.mark.parametrize(
    ("stops", "pieces", "shown", "matched"),
    [
        (["abab"], ["aba", "bab"], "", "abab"),
        (["aab"], ["a", "a", "a", "b"], "a", "aab"),
        (["abc", "b"], ["ab"], "a", "b"),
        (["ab", "b"], ["x", "ab"], "x", "ab"),
        (["END"], ["an E", "N", "T"], "an ENT", None),
        (["END"], ["an EN"], "an EN", None),
        (["üb"], ["ü", "bel"], "", "üb"),
    ],
)
def test_stop_examples(stops, pieces, shown, matched):
    """REQ-04."""
    matcher = StopMatcher(stops)
    text = "".join(matcher.feed(piece) for piece in pieces) + matcher.finish()
    assert (text, matcher.matched) == (shown, matched)


def test_text_that_cannot_become_a_stop_is_shown_at_once():
    matcher = StopMatcher(["\n\nUser:"])
    assert matcher.feed("hello\n") == "hello"
    assert matcher.feed("you") == "\nyou"


def read_stream(ids, stops, min_tokens=0):
    """Push until a stop string appears: what an engine does. Returns text, stop, tokens used."""
    stream = TextStream(BYTE_LEVEL, stops, min_tokens=min_tokens)
    shown = ""
    for used, token in enumerate(ids, start=1):
        delta, stopped = stream.push(token)
        shown += delta
        if stopped is not None:
            return shown + stream.finish(), stopped, used
    return shown + stream.finish(), stream.stopped, len(ids)


@given(texts, stop_lists, st.booleans())
def test_streamed_text_is_the_final_text(text, stops, by_bytes):
    """REQ-04: tokens of several characters, and UTF-8 split over tokens."""
    ids = byte_ids(text) if by_bytes else BYTE_LEVEL.encode(text)
    shown, stopped, used = read_stream(ids, stops)
    assert (shown, stopped) == naive_stop(text, stops)
    if stopped is not None:  # it ended with the token that completed the stop string
        assert naive_stop(BYTE_LEVEL.decode(ids[: used - 1]), stops)[1] is None


@given(st.data())
def test_streamed_text_is_the_final_text_for_any_tokens(data):
    """REQ-04."""
    ids = data.draw(ids_of(BYTE_LEVEL))
    stops = data.draw(stop_lists)
    whole = BYTE_LEVEL.decode(ids)
    if whole:
        start = data.draw(st.integers(0, len(whole) - 1))
        stops = [*stops, whole[start : start + data.draw(st.integers(1, 6))]]
    assert read_stream(ids, stops)[:2] == naive_stop(whole, stops)


@given(texts, stop_lists, st.integers(0, 8))
def test_text_of_the_first_min_tokens_is_not_searched(text, stops, min_tokens):
    """REQ-04."""
    ids = byte_ids(text)
    free = IncrementalDetokenizer(BYTE_LEVEL)
    exempt = "".join(free.push(token) for token in ids[:min_tokens])
    if len(ids) < min_tokens:
        exempt += free.finish()
    rest, stop = naive_stop(text[len(exempt) :], stops)
    assert read_stream(ids, stops, min_tokens)[:2] == (exempt + rest, stop)


def test_nothing_comes_after_a_stop():
    stream = TextStream(BYTE_LEVEL, ["b"])
    tokens = byte_ids("abab")
    assert [stream.push(token) for token in tokens] == [
        ("a", None),
        ("", "b"),
        ("", "b"),
        ("", "b"),
    ]
    assert stream.finish() == ""
    assert stream.stopped == "b"


@pytest.fixture
def model_folder(tmp_path):
    byte_level().save(str(tmp_path / "tokenizer.json"))
    settings = {
        "bos_token": "<|start|>",
        "eos_token": {"content": "<|end|>", "special": True},
        "chat_template": "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 0]}')
    (tmp_path / "config.json").write_text('{"eos_token_id": 9}')
    return tmp_path


def test_tokenizer_knows_what_its_files_say(model_folder):
    tokenizer = Tokenizer.from_file(model_folder / "tokenizer.json")
    assert tokenizer.eos_ids == (7, 0, 9)
    assert tokenizer.vocab_size == BYTE_LEVEL.vocab_size
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}]) == "<|start|>x"
    (model_folder / "chat_template.jinja").write_text("own file")
    assert Tokenizer.from_file(model_folder).apply_chat_template([{"role": "a"}]) == "own file"


@given(texts)
def test_encode_and_decode_are_inverse(text):
    assert BYTE_LEVEL.decode(BYTE_LEVEL.encode(text)) == text


def test_damaged_or_missing_files_are_named(model_folder):
    with pytest.raises(ModelError, match=r"missing/tokenizer\.json"):
        Tokenizer.from_file(model_folder / "missing" / "tokenizer.json")
    (model_folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json"):
        Tokenizer.from_file(model_folder)
    (model_folder / "config.json").write_text("[]")
    with pytest.raises(ModelError, match=r"config\.json.*object"):
        Tokenizer.from_file(model_folder)
    (model_folder / "tokenizer.json").write_text("nonsense")
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        Tokenizer.from_file(model_folder)


@pytest.mark.parametrize("text", [None, 5, b"x", "a\ud800"])
def test_prompt_must_be_valid_text(text):
    """REQ-05."""
    with pytest.raises(InvalidRequest, match="prompt"):
        BYTE_LEVEL.encode(text)


def test_model_without_a_template_says_so():
    assert not BYTE_LEVEL.has_chat_template
    with pytest.raises(InvalidRequest, match="no chat template"):
        BYTE_LEVEL.apply_chat_template([{"role": "user", "content": "x"}])


USER = [{"role": "user", "content": "<hi> & 'ü'"}]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (
            "{% for m in messages %}\n  {% if true %}\n[{{ m.role }}]\n  {% endif %}\n{% endfor %}",
            "[user]\n",
        ),
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "<hi> & \'ü\'"}'),
        ("{{ {'b': 1, 'a': [1]} | tojson(indent=1) }}", '{\n "b": 1,\n "a": [\n  1\n ]\n}'),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{{ strftime_now('%Y') if strftime_now is defined else 'never' }}", "never"),
        ("{% generation %}{{ bos }}x{% endgeneration %}{{ add_generation_prompt }}", "BxTrue"),
        ("{{ tools is none }}{{ enable_thinking }}", "Trueno"),
    ],
)
def test_template_features(source, expected):
    template = ChatTemplate(source, {"bos": "B"})
    assert template.render(USER, variables={"enable_thinking": "no"}) == expected


def test_template_gets_its_date_from_the_caller():
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}")
    assert template.render(USER, strftime_now=lambda form: f"<{form}>") == "<%d %b %Y>"
    with pytest.raises(InvalidRequest, match="strftime_now"):
        template.render(USER)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{{ range(10**9) | list }}", "OverflowError"),
    ],
)
def test_failing_template_is_an_invalid_request(source, message):
    with pytest.raises(InvalidRequest, match=message):
        ChatTemplate(source).render(USER)


def test_broken_template_names_its_line():
    with pytest.raises(InvalidRequest, match="line 2"):
        ChatTemplate("x\n{% if %}")


@pytest.mark.parametrize("messages", [[], None, "hi", {"role": "user"}, [5], [{"content": "x"}]])
def test_bad_messages_are_refused(messages):
    """REQ-05."""
    with pytest.raises(InvalidRequest, match="messages"):
        ChatTemplate("").render(messages)
