"""Records what NumPy answers to index expressions: get, set and accumulate. Run with `python3 record.py`, which writes answers.json beside it.

An answer holds the shape of an iota tensor, the index and NumPy's result. In an index a number is an integer, `{"slice": [start, stop, step]}` a slice,
"..." the ellipsis, null a new axis, true and false masks without dimensions, `{"mask": ...}` and `{"places": ...}` arrays as [shape, elements].
"""

import json
import pathlib
import random

import numpy as np


def array(a):
    return [list(a.shape), [int(v) for v in a.ravel()]]


def entry(e):
    if isinstance(e, slice):
        return {"slice": [e.start, e.stop, e.step]}
    if e is Ellipsis:
        return "..."
    if isinstance(e, np.ndarray):
        return {"mask" if e.dtype == bool else "places": array(e)}
    return e


def answer(shape, index, value=None):
    x = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    out = {"shape": list(shape), "index": [entry(e) for e in index]}
    try:
        got = x[index]
    except IndexError:
        return {**out, "error": True}
    out["get"] = array(np.asarray(got))
    if value is None:
        sizes = [1 if random.random() < 0.25 else n for n in np.shape(got)]
        sizes = sizes[random.randrange(len(sizes) + 1) if random.random() < 0.3 else 0 :]
        value = 100 + np.arange(np.prod(sizes, dtype=int)).reshape(sizes)
    try:
        changed, added = x.copy(), x.copy().ravel()
        changed[index] = value
        # `np.add.at` reads past the end of a value that is broadcast to an index of several dimensions (seen in NumPy 2.4.6), so it adds one by one.
        for place, addend in zip(np.ravel(got), np.broadcast_to(value, np.shape(got)).ravel()):
            added[place] += addend
    except (ValueError, TypeError):
        # Assignment through a single mask takes fewer shapes of values than other indices do.
        return out
    return {**out, "value": array(value), "set": array(changed)[1], "add": array(added)[1]}


def random_slice(n):
    bound = lambda: None if random.random() < 0.3 else random.randint(-n - 2, n + 2)
    return slice(bound(), bound(), random.choice([None, 1, 1, 2, 3, -1, -1, -2, -3]))


def random_index(shape):
    batch = [random.choice([1, 2, 2, 3, 3, 4, 0][: 7 if random.random() < 0.15 else 6]) for _ in range(random.choice([0, 1, 1, 1, 2, 2]))]
    index, axis, dots = [], 0, False
    while axis < len(shape) and random.random() < 0.9:
        n, kind = shape[axis], random.random()
        if kind < 0.05 and not dots:
            index.append(Ellipsis)
            dots = True
            axis += random.randint(0, len(shape) - axis)
            continue
        if kind < 0.13:
            index.append(random.choice([None, None, True, False, np.array(True)]))
            continue
        if kind < 0.28 and n > 0:
            index.append(random.randint(-n, n - 1))
        elif kind < 0.5:
            index.append(random_slice(n))
        elif kind < 0.65:
            sizes = shape[axis : axis + random.randint(1, 2)]
            count = int(np.prod(sizes))
            mask = np.zeros(count, dtype=bool)
            wanted = batch[-1] if batch and batch[-1] <= count else random.randint(0, count)
            mask[random.sample(range(count), wanted)] = True
            index.append(mask.reshape(sizes))
            axis += len(sizes) - 1
        else:
            sizes = [1 if random.random() < 0.2 else s for s in batch]
            sizes = sizes[random.randrange(len(sizes) + 1) if random.random() < 0.2 else 0 :]
            low, high = (-n, n - 1) if n else (0, 0)
            high += random.random() < 0.02
            places = [random.randint(low, high) for _ in range(int(np.prod(sizes)))]
            index.append(np.array(places, dtype=int).reshape(sizes))
        axis += 1
    return tuple(index)


def main():
    random.seed(4)
    a = lambda *v: np.array(v, dtype=int)
    special = [
        ((2, 3, 4), (0, slice(None), a(1, 2))),
        ((2, 3, 4), (a(0, 1), None, a(1, 2))),
        ((5, 3, 4), (slice(None), a(0, 1), Ellipsis, a(1, 2))),
        ((2, 3, 4), (0, None, True)),
        ((2, 3, 4), (slice(None), np.array(1), None, np.array(2))),
        ((2, 3, 4), (slice(None), True, None, True)),
        ((2, 3), (False,)),
        ((), (True,)),
        ((), (Ellipsis, None)),
        ((), (np.array(False),)),
        ((), ()),
        ((0, 3), (a(0),)),
        ((0, 0), (a(0),)),
        ((3, 0), (a(7),)),
        ((0, 3), (np.zeros((0, 2), dtype=int),)),
        ((0, 3), (np.zeros(0, dtype=int), a(5))),
        ((2, 3, 4), (np.zeros((2, 3), dtype=bool), a(9))),
        ((2, 3, 4), (np.zeros((2, 3), dtype=bool), 9)),
        ((2, 3, 4), (np.ones((3, 3), dtype=bool),)),
        ((4,), (a(1, 1, 3, 1),)),
        ((2, 2, 2, 2, 2, 2), tuple(a(0, 1, 1) for _ in range(6))),
        ((3, 4), (slice(10, None, -2), slice(None, None, -3))),
    ]
    answers = [answer(*case) for case in special]
    while len(answers) < 400:
        shape = [0 if random.random() < 0.03 else random.randint(1, 4) for _ in range(random.choice([0, 1, 2, 2, 3, 3, 4]))]
        if np.prod(shape, dtype=int) <= 48:
            answers.append(answer(tuple(shape), random_index(shape)))
    lines = ",\n".join(json.dumps(a, separators=(",", ":")) for a in answers)
    pathlib.Path(__file__).with_name("answers.json").write_text(f'{{"numpy":"{np.__version__}","answers":[\n{lines}\n]}}\n')
    print(len(answers), "answers,", sum("error" in a for a in answers), "errors,", sum("set" in a for a in answers), "with set")


main()
