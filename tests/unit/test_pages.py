"""Counted places: who holds them, who may write."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentspec.rollout.pages import Places


@given(st.lists(st.tuples(st.sampled_from(["take", "share", "give"]), st.integers(0, 9))))
def test_places_are_free_when_the_last_holder_gives_them_back(ops):
    places: Places = Places(5)
    held: list[int] = []
    for act, which in ops:
        if act == "take" and len(set(held)) < 5:
            place = places.take("me")
            assert place not in held
            held.append(place)
        elif act == "share" and held:
            places.share([held[which % len(held)]])
            held.append(held[which % len(held)])
        elif act == "give" and held:
            places.give_back([held.pop(which % len(held))])
        assert places.n_used == len(set(held)) and places.n_free == 5 - len(set(held))
        assert places.n_shared == sum(held.count(place) > 1 for place in set(held))


def test_who_may_write():
    places = Places(2)
    page = places.take("parent")
    places.share([page])
    assert places.may_write(page, "parent") and not places.may_write(page, "child")
    places.disown(page, "parent")
    assert not places.may_write(page, "parent")
    places.give_back([page])
    assert places.may_write(page, "child")
    with pytest.raises(ValueError, match="place 1 is free"):
        places.share([1])
    with pytest.raises(ValueError, match="place 1 is free"):
        places.give_back([1])
