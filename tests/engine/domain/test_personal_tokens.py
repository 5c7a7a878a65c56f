"""make test: pure. Tokens: what is sealed is opened again; what is altered, or has no key, shows its fallback only."""

import json
import re
from collections.abc import Mapping
from string import ascii_letters, digits
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from domain.engine.personal.tokens import FALLBACK, PREFIX, key_ids, opened, opened_text, opened_value, sealed

ID, OTHER_ID = "0123456789abcdef", "fedcba9876543210"
KEY, OTHER_KEY = bytes(range(32)), bytes(range(32, 64))
KEYS = {ID: KEY, OTHER_ID: OTHER_KEY}

texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)  # a lone surrogate is no text
command_ids = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


def seal(plain: str, key_id: str = ID, *, command: str = "c1", number: int = 0, fallback: str = FALLBACK) -> str:
    return sealed(plain, key_id, KEYS[key_id], command_id=command, number=number, fallback=fallback)


def shown(value: Any, keys: Mapping[str, bytes | None]) -> Any:
    """A value by way of JSON, as rows and bodies are opened; the three ways to open it must agree."""
    result = json.loads(opened(json.dumps(value, ensure_ascii=False).encode(), keys))
    assert result == opened_value(value, keys)
    assert json.loads(opened(json.dumps(value).encode(), keys)) == result  # whichever way its neighbours are escaped
    return result


def test_what_a_token_looks_like() -> None:
    for fallback, end in ((FALLBACK, ""), ("someone", "c29tZW9uZQ")):
        assert re.fullmatch(rf"~Personal~1~{ID}~[A-Za-z0-9_-]{{44}}~{end}~", seal("Ada!!", fallback=fallback))
    # in the log for ever: neither its form nor its derivation may change
    assert seal("Ada") == "~Personal~1~0123456789abcdef~H-r4ejn6PBPrvvJh5WgppYEW2RAIVjtdr1xCG9wQeQ~~"


@given(texts, command_ids, st.integers(0, 10_000), texts)
def test_what_is_sealed_is_opened_again_and_without_its_key_is_the_fallback(
    plain: str, command: str, number: int, fallback: str
) -> None:
    token = seal(plain, command=command, number=number, fallback=fallback)
    assert json.dumps(token) == f'"{token}"'
    assert shown(token, {ID: KEY}) == plain
    assert opened_text(token, {ID: KEY}) == plain
    for keys in ({}, {ID: None}, {ID: OTHER_KEY}, {OTHER_ID: KEY}):
        assert shown(token, keys) == fallback


@given(texts, texts, texts, texts, texts)
def test_tokens_may_be_a_part_of_a_text(one: str, two: str, before: str, between: str, after: str) -> None:
    first, second = seal(one), seal(two, OTHER_ID, fallback="someone")
    assert shown(before + first + between + second + after, KEYS) == before + one + between + two + after
    assert shown(first + second + first, KEYS) == one + two + one
    assert shown(first + second, {ID: KEY}) == one + "someone"
    assert key_ids(before + first + second + after) == {ID, OTHER_ID}
    assert key_ids(f"{first}{second}".encode()) == {ID, OTHER_ID}


@given(texts, st.data())
def test_an_altered_token_shows_nothing_of_a_person(plain: str, data: st.DataObject) -> None:
    token = seal(plain, fallback="someone")
    place = data.draw(st.integers(len(PREFIX), len(token) - 2))
    other = data.draw(st.sampled_from("0123456789abcdefghXYZ_-").filter(lambda letter: letter != token[place]))
    altered = token[:place] + other + token[place + 1 :]
    keys = dict.fromkeys(key_ids(altered), KEY)
    result = opened_text(altered, keys)
    if keys:
        assert PREFIX not in result or PREFIX in plain
        assert result != plain or plain in ("someone", FALLBACK)
    else:  # it is not a token any more
        assert result == altered


def test_every_bit_of_a_token_counts() -> None:
    """Of base64's last character not all bits do, unless they are looked at."""
    for plain in ("x", "xx", "xxx"):
        token = seal(plain)
        altered = {token[:-3] + letter + "~~" for letter in f"{ascii_letters}{digits}-_"}
        assert [opened_text(one, KEYS) for one in altered - {token}] == [FALLBACK] * 63


def test_a_repeated_command_has_the_same_tokens_and_another_one_has_others() -> None:
    again = seal("Ada"), seal("Ada", command="c1", number=0)
    others = [seal("Bob"), seal("Ada", command="c2"), seal("Ada", number=1), seal("Ada", command="c", number=10)]
    assert len({*again, *others, seal("Ada", OTHER_ID)}) == 6


def test_no_nonce_is_used_for_two_messages() -> None:
    """Not even where only the fallback differs: with AES-GCM that would give the authentication key away."""
    messages = [
        seal(plain, command=command, number=number, fallback=fallback)
        for plain in ("Ada", "Bob")
        for command in ("c1", "c11")
        for number in (0, 1, 11)
        for fallback in (FALLBACK, "someone", "no one")
    ]
    nonces = {message.split("~")[4][:16] for message in messages}
    assert len(nonces) == len(messages)


PARTS = ("", ID, f"{ID}~", f"{ID}~AAAA~", f"{ID.upper()}~AAAA~~", f"{ID}~AA AA~~")


@pytest.mark.parametrize(
    "text", ["", "Ada", "~Personal~", *(PREFIX + part for part in PARTS), f"~Personal~2~{ID}~AAAA~~"]
)
def test_what_is_no_token_stays_as_it_is(text: str) -> None:
    assert key_ids(text) == set() == key_ids(text.encode())
    assert shown(text, KEYS) == text
    assert opened(text.encode(), KEYS) == text.encode()


@pytest.mark.parametrize("data", ["A", "AAAA", "A" * 16, "A" * 37, "A" * 38, "A" * 400])
def test_rubbish_in_a_tokens_form_shows_the_fallback(data: str) -> None:
    not_utf8, not_base64 = "_w", "A"
    for tail, fallback in (("", FALLBACK), ("c29tZW9uZQ", "someone"), (not_utf8, FALLBACK), (not_base64, FALLBACK)):
        assert shown(f"{PREFIX}{ID}~{data}~{tail}~", KEYS) == fallback


def test_values_in_objects_and_lists() -> None:
    token = seal('A "q"\n')
    value = {"name": token, "n": 1, "list": [token, None, True, {"x": f"<{token}>"}]}
    assert shown(value, KEYS) == {"name": 'A "q"\n', "n": 1, "list": ['A "q"\n', None, True, {"x": '<A "q"\n>'}]}


def test_an_empty_fallback_is_refused() -> None:
    with pytest.raises(ValueError, match="fallback"):
        seal("Ada", fallback="")
