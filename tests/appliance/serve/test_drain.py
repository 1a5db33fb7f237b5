"""1,000 requests while it drains: every accepted one finishes, every other one is told so."""

import threading

from drain_load import FINISHED, REFUSED, TRUNCATED, UNREACHABLE, ask, send

from appliance.serve.client import Client
from appliance.serve.drain import admit, drain
from appliance.serve.keys import first_key

TOKENS = 4


def whole(tokens: int):
    return lambda text: text.count("data: {}") == tokens and text.endswith("data: [DONE]\n\n")


def client_of(running):
    key = first_key(running.spec.files.keys)

    def one(tokens: int = TOKENS) -> str:
        body = {"prompt": [1], "max_tokens": tokens, "stream": True}
        return ask(running.spec.host, running.spec.port, key, body, whole(tokens))

    return one


def test_of_1000_requests_during_a_drain_every_accepted_one_finishes(supervised):
    running = supervised(drain_seconds=60.0)
    running.wait_for("ready")
    one = client_of(running)
    # One long answer keeps the drain going while the others come.
    long_one: list[str] = []
    long = threading.Thread(target=lambda: long_one.append(one(200)))
    long.start()

    def after(count: int) -> None:
        if count == 300:
            running.stop.count = 1

    outcomes = send(1000, 24, one, after)
    long.join()
    assert long_one == [FINISHED]
    assert outcomes[TRUNCATED] == 0 and outcomes[FINISHED] >= 300, outcomes
    assert outcomes[REFUSED] > 100, outcomes
    assert set(outcomes) <= {FINISHED, REFUSED, UNREACHABLE}, outcomes
    assert running.wait_for("stopped").message == "every accepted request finished"


def test_what_was_drained_waits_for_its_requests_and_takes_them_again_when_told_to(supervised):
    running = supervised()
    running.wait_for("ready")
    one = client_of(running)
    ended: list[str] = []
    stream = threading.Thread(target=lambda: ended.append(one(40)))
    stream.start()
    control = Client(
        running.spec.host, running.spec.port, first_key(running.spec.files.control_key)
    )
    while not control.get("/gateway/state")["in_flight"]:
        pass
    assert drain(running.spec.files, 30.0)
    stream.join()
    assert ended == [FINISHED] and one() == REFUSED
    assert admit(running.spec.files)
    assert one() == FINISHED
