"""How long workers wait for each other to save."""

from datetime import timedelta

from lightning_sparse.checkpointing.saving import is_in_trouble, patience_of


def test_others_are_waited_for_less_long_where_they_may_not_come():
    timeouts = (None, timedelta(seconds=40), timedelta(seconds=3))
    assert [patience_of(timeout) for timeout in timeouts] == [300, 40, 3]
    assert [patience_of(timeout, is_broken_off=True) for timeout in timeouts] == [15, 15, 3]


def test_an_exception_that_is_being_handled_is_trouble():
    assert not is_in_trouble()
    try:
        raise ValueError
    except ValueError:
        assert is_in_trouble()
        assert patience_of(None) == 15
    assert not is_in_trouble()
