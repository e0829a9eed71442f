"""The order in which bytes leave: control first, streams in turn, within credit, everything in the end."""

from hypothesis import given
from hypothesis import strategies as st

from atoll.fabric.connection import Connection, ConnectionSettings
from atoll.fabric.payload import encode_payload
from atoll.fabric.send_queue import INLINE_BYTES, OutgoingMessage, SendQueue
from tests.fabric.parsing import Silent, feed_in_pieces


def message(stream: int, size: int, sent: list[tuple[int, int]], name: int) -> OutgoingMessage:
    buffers = [memoryview(bytes(size))] if size > INLINE_BYTES else []
    return OutgoingMessage(stream, b"h", buffers, size, lambda: sent.append((stream, name)))


@given(st.lists(st.tuples(st.integers(1, 5), st.sampled_from([0, 1000, INLINE_BYTES, INLINE_BYTES + 1, 300_000, 2_000_000])), max_size=40))
def test_everything_is_sent_once_in_its_streams_order_within_credit(messages: list[tuple[int, int]]) -> None:
    queue, sent, unread = SendQueue(600_000, 100_000, 400_000), [], []
    outgoing = [message(stream, size, sent, number) for number, (stream, size) in enumerate(messages)]
    for each in outgoing:
        queue.add(each)
    while queue.waiting:
        while (frame := queue.take_small() or queue.take_bulk()) is not None:
            before = len(sent)
            if frame.on_sent is not None:
                frame.on_sent()
            unread += [outgoing[name] for _, name in sent[before:]]
            bulk = [each.cost for each in unread if each.bulk]
            assert sum(bulk) <= 600_000 or len(bulk) == 1
        for each in unread:  # the reader wakes up and takes all
            queue.credit(each.stream, each.cost, each.bulk)
        unread.clear()
    assert sorted(name for _, name in sent) == list(range(len(messages)))
    for stream in range(1, 6):
        names = [name for other, name in sent if other == stream]
        assert names == sorted(names)
    assert not queue.waiting


def connected() -> tuple[Connection, Connection, Silent, Silent]:
    ours, theirs = Silent(), Silent()
    one = Connection(ConnectionSettings(name="oslo"), ours, lambda: 0.0, dialled=True)
    two = Connection(ConnectionSettings(name="rome"), theirs, lambda: 0.0, dialled=False)
    exchange(one, two)
    return one, two, ours, theirs


def exchange(one: Connection, two: Connection, size: int = 1 << 30) -> None:
    """Moves everything both ways, until there is nothing more."""
    while one.waiting or two.waiting:
        for sender, receiver in (one, two), (two, one):
            data = b"".join(sender.outgoing(size))[:size]
            sender.sent(len(data))
            feed_in_pieces(receiver, data)


def test_a_control_message_overtakes_a_large_tensor_that_was_begun() -> None:
    import torch

    one, two, ours, theirs = connected()
    one.open("large", 60.0, encode_payload([torch.zeros(8_000_000)]), ours, end=True)
    part = b"".join(one.outgoing(1 << 20))[:300_000]
    one.sent(len(part))  # the large one is on its way, mid-frame
    feed_in_pieces(two, part)
    one.open("small", 60.0, encode_payload(bytes(4096)), ours, end=True)
    exchange(one, two, 1 << 16)
    assert [len(message.payload) > 4000 for message in theirs.messages] == [True, False]
    assert theirs.messages[1].tensors[0].shape == (8_000_000,)


def test_large_tensors_share_the_wire_in_turn() -> None:
    import torch

    one, two, ours, theirs = connected()
    for size in 8_000_000, 1_000_000, 3_000_000:
        one.open("m", 60.0, encode_payload([torch.zeros(size // 4)]), ours, end=True)
    exchange(one, two, 1 << 16)
    assert [message.size_bytes // 1_000_000 for message in theirs.messages] == [1, 3, 8]


def test_a_cancelled_call_frees_its_stream_and_its_credit_on_both_sides() -> None:
    import torch

    one, two, ours, theirs = connected()
    for _ in range(20):  # far more in sum than the window
        stream = one.open("m", 60.0, encode_payload([torch.zeros(16_000_000)]), ours, end=True)
        part = b"".join(one.outgoing(1 << 20))[:700_000]
        one.sent(len(part))
        feed_in_pieces(two, part)
        one.cancel(stream, "no longer wanted")
        exchange(one, two)
    assert not one._streams
    assert not two._streams
    assert len(theirs.failures) == 20
    assert not theirs.messages
    assert one.estimate.queued_bytes == 0
    one.open("m", 60.0, encode_payload([torch.zeros(16_000_000)]), ours, end=True)
    exchange(one, two)
    assert len(theirs.messages) == 1
