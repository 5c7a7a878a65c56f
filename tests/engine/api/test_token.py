"""make test: no process is needed.

Position tokens: what is written is read again, merging is a least upper bound, and nothing else is taken for one.
"""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from projections.engine.views.token import LONGEST, BadToken, OtherLog, Token

TOPIC = "mVYkg7c0Qx6B6y3zTnAz-w"
OTHER = "AAAAAAdbzRX_______5-Mw"

offsets = st.integers(0, 10**18 - 1)
partitions = st.dictionaries(st.integers(0, 40), offsets, min_size=1)
tokens = st.builds(Token, st.dictionaries(st.sampled_from([TOPIC, OTHER, "-", "0"]), partitions))


def test_what_a_token_looks_like() -> None:
    assert str(Token.of(TOPIC, {5: 12345})) == f"1~{TOPIC}.5-12345"
    assert str(Token.of(TOPIC, {2: 7, 0: 1, 1: 3, 9: 4})) == f"1~{TOPIC}.0-1-3-7.9-4"
    assert str(Token({TOPIC: {0: 1}, OTHER: {1: 2}})) == f"1~{OTHER}.1-2~{TOPIC}.0-1"
    assert str(Token({})) == "1"


@given(tokens)
@settings(deadline=None)
def test_what_is_written_is_read_again_and_needs_no_quoting(token: Token) -> None:
    assert Token.parse(str(token)) == token
    assert re.fullmatch(r"[A-Za-z0-9._~-]+", str(token))  # unreserved in URLs, RFC 3986 §2.3


def test_the_positions_of_the_most_partitions_have_room() -> None:
    token = Token.of(TOPIC, dict.fromkeys(range(4096), 10**12))
    assert Token.parse(str(token)) == token


@given(tokens, tokens, tokens)
@settings(deadline=None)
def test_merging_is_the_least_that_covers_both(one: Token, two: Token, three: Token) -> None:
    both = one.merge(two)
    assert one.covered_by(both)
    assert two.covered_by(both)
    assert both == two.merge(one)
    assert both.merge(three) == one.merge(two.merge(three))
    if one.covered_by(three) and two.covered_by(three):
        assert both.covered_by(three)


@given(tokens, st.data())
@settings(deadline=None)
def test_one_record_less_does_not_cover(token: Token, data: st.DataObject) -> None:
    asked = [(t, p) for t, offsets in token.positions.items() for p, offset in offsets.items() if offset]
    assert token.covered_by(token)
    if asked:
        topic, partition = data.draw(st.sampled_from(asked))
        less = {t: dict(offsets) for t, offsets in token.positions.items()}
        less[topic][partition] -= 1
        assert not token.covered_by(Token(less))
        del less[topic]
        assert not token.covered_by(Token(less))


NO_TOKENS = [
    *("", "0", "2", f"2~{TOPIC}.0-1", "1~", "~", f"1~{TOPIC}.0-1\n", f" 1~{TOPIC}.0-1", f"1~{TOPIC}é.0-1"),
    *(
        f"1~{TOPIC}" + rest
        for rest in ("", ".", ".0", ".0-", ".-1", ".0--1", ".0-1.", ".0-01", f".0-{10**18}", ".0-1e3")
    ),
    *(f"1~{TOPIC}" + rest for rest in (".0-٣", ".0-1.0-2", ".0-1-1.1-2", f".0-1~{TOPIC}.1-1", ".0" + "-1" * LONGEST)),
    *("x" * 10_000, "\0", "\ud800"),
]


@pytest.mark.parametrize("text", NO_TOKENS, ids=lambda text: f"{text[:40]!a}")
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(BadToken):
        Token.parse(text)


@given(st.text(st.sampled_from("1~.-09aZ_"), max_size=30))
@settings(deadline=None)
def test_whatever_is_read_was_written_by_us_or_is_refused(text: str) -> None:
    try:
        token = Token.parse(text)
    except BadToken:
        return
    assert Token.parse(str(token)) == token


def test_a_token_of_another_log_is_told_from_one_of_this() -> None:
    Token({}).require_log(TOPIC, 4)
    Token.of(TOPIC, {3: 1}).require_log(TOPIC, 4)
    for other in (Token.of(OTHER, {0: 1}), Token({TOPIC: {0: 1}, OTHER: {0: 1}}), Token.of(TOPIC, {4: 1})):
        with pytest.raises(OtherLog):
            other.require_log(TOPIC, 4)


def test_an_id_of_a_topic_may_hold_a_plus_and_a_slash() -> None:
    """As librdkafka writes about every other one."""
    topic_id = "mVYkg7c0Qx6B6y3z/nAz+w"
    token = Token.of(topic_id, {0: 7})
    assert str(token) == "1~mVYkg7c0Qx6B6y3z_nAz-w.0-7"
    handed_back = Token.parse(str(token))
    assert handed_back.covered_by(Token({topic_id: {0: 7}}))
    handed_back.require_log(topic_id, 4)
    with pytest.raises(OtherLog):
        handed_back.require_log(topic_id.lower(), 4)
