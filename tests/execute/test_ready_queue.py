from dsr1build.execute.ready_queue import ReadyQueue, critical_paths

GB = 1 << 30


def test_the_longest_chain_that_begins_with_an_action():
    inputs = {"a": (), "b": (), "c": ("a",), "d": ("b", "c"), "e": ("b",)}
    seconds = {"a": 1.0, "b": 5.0, "c": 2.0, "d": 4.0, "e": 0.5}
    assert critical_paths(inputs, seconds) == {"a": 7.0, "b": 9.0, "c": 6.0, "d": 4.0, "e": 0.5}


def taken(queue, jobs):
    found = []
    while (id := queue.take(jobs)) is not None:
        found.append(id)
    return found


def test_what_most_work_waits_for_comes_first_and_equals_in_order():
    queue = ReadyQueue(GB)
    for id, priority in (("low", 1.0), ("high", 9.0), ("first", 5.0), ("second", 5.0)):
        queue.add(id, priority, 0)
    assert taken(queue, 3) == ["high", "first", "second"]
    assert queue.take(3) is None
    queue.end("first")
    assert queue.take(3) == "low"


def test_memory_is_shared_and_smaller_ones_fill_what_is_left():
    queue = ReadyQueue(10 * GB)
    queue.add("large", 9.0, 8 * GB)
    queue.add("larger", 8.0, 9 * GB)
    queue.add("small", 1.0, 2 * GB)
    queue.add("tiny", 0.5, GB)
    assert taken(queue, 8) == ["large", "small"]
    queue.end("small")
    assert taken(queue, 8) == ["tiny"]
    queue.end("large")
    assert taken(queue, 8) == ["larger"]


def test_one_that_needs_more_than_there_is_runs_with_nothing_beside_it():
    queue = ReadyQueue(GB)
    queue.add("huge", 9.0, 50 * GB)
    queue.add("small", 1.0, 1)
    assert taken(queue, 8) == ["huge"]
    queue.end("huge")
    assert taken(queue, 8) == ["small"]


def test_alone_waits_for_all_and_lets_none_start():
    queue = ReadyQueue(10 * GB)
    queue.add("a", 5.0, GB)
    assert queue.take(2) == "a"
    queue.add("alone", 9.0, GB, alone=True)
    assert queue.take(2) is None
    queue.end("a")
    queue.add("b", 99.0, GB)
    assert taken(queue, 2) == ["b"]
    queue.end("b")
    assert taken(queue, 2) == ["alone"]


def test_a_large_one_is_not_put_off_for_ever():
    queue = ReadyQueue(10 * GB)
    queue.add("first", 9.0, 6 * GB)
    assert queue.take(8) == "first"
    queue.add("large", 8.0, 9 * GB)
    for number in range(20):
        queue.add(f"small{number}", 1.0, GB)
    started = []
    while (id := queue.take(8)) is not None:
        started.append(id)
        queue.end(id)
    assert started == [f"small{number}" for number in range(8)]
    queue.end("first")
    assert queue.take(8) == "large"
