"""How long workers wait for each other to save."""

from datetime import timedelta

from lightning_sparse.checkpointing.together import is_in_trouble, patience_of, shortened


def test_others_are_waited_for_less_long_where_they_may_not_come():
    assert [patience_of(timeout) for timeout in (None, timedelta(seconds=40), timedelta(hours=1))] == [300, 40, 300]
    assert [shortened(patience) for patience in (300.0, 40.0, 3.0)] == [15, 15, 3]


def test_an_exception_that_is_being_handled_is_trouble():
    assert not is_in_trouble()
    try:
        raise ValueError
    except ValueError:
        assert is_in_trouble()
    assert not is_in_trouble()
