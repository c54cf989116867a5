from sweeps.run.crew import FACTOR, FLOOR_SECONDS, Leases


def test_what_was_never_seen_may_take_the_longest():
    assert Leases(600.0).seconds("train") == 600.0


def test_a_deadline_follows_the_longest_call_of_its_kind():
    leases = Leases(600.0)
    for seconds in (1.0, 17.0, 2.0):
        leases.learn("train", seconds)
    assert leases.seconds("train") == FACTOR * 17.0
    assert leases.seconds("end") == 600.0


def test_floor_and_ceiling():
    leases = Leases(600.0)
    leases.learn("quick", 0.01)
    leases.learn("slow", 500.0)
    assert leases.seconds("quick") == FLOOR_SECONDS
    assert leases.seconds("slow") == 600.0
    short = Leases(5.0)
    short.learn("quick", 0.01)
    assert short.seconds("quick") == 5.0, "the ceiling is the caller's word"


def test_whoever_was_given_up_gets_twice_as_long_the_next_time():
    leases = Leases(600.0)
    leases.learn("train", 15.0)
    found = []
    for _ in range(6):
        found.append(leases.seconds("train"))
        leases.missed("train")
    assert found == [150.0, 300.0, 600.0, 600.0, 600.0, 600.0]
