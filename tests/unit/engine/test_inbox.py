import threading

from jaxserve.engine.inbox import Abort, Inbox, Stop


def test_commands_are_taken_in_order_and_once() -> None:
    inbox = Inbox()
    assert inbox.put(Abort(request_id="a"))
    assert inbox.put(Stop())
    assert inbox.take(block=True) == [Abort(request_id="a"), Stop()]
    assert inbox.take(block=False) == []


def test_a_sleeping_taker_wakes_for_a_command() -> None:
    inbox = Inbox()
    taken: list[object] = []
    taker = threading.Thread(target=lambda: taken.extend(inbox.take(block=True)))
    taker.start()
    inbox.put(Stop())
    taker.join(timeout=10)
    assert taken == [Stop()]


def test_a_closed_inbox_returns_what_was_left_and_refuses_the_rest() -> None:
    inbox = Inbox()
    inbox.put(Abort(request_id="a"))
    assert inbox.close() == [Abort(request_id="a")]
    assert not inbox.put(Stop())
    assert inbox.close() == []


def test_every_command_of_racing_senders_is_returned_or_refused() -> None:
    inbox = Inbox()
    accepted: list[list[str]] = [[], []]

    def send(number: int) -> None:
        for i in range(500):
            request_id = f"{number}-{i}"
            if inbox.put(Abort(request_id=request_id)):
                accepted[number].append(request_id)

    senders = [threading.Thread(target=send, args=(number,)) for number in range(2)]
    for sender in senders:
        sender.start()
    received = [*inbox.take(block=True), *inbox.take(block=False), *inbox.close()]
    for sender in senders:
        sender.join()
    ids = sorted(command.request_id for command in received if isinstance(command, Abort))
    assert ids == sorted(accepted[0] + accepted[1])
