"""Statement tests of `code`: right code of many kinds passes, and cheats do not."""

# ruff: noqa: E501

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import areal_gym
from areal_gym.envs.code.plain_values import NotPlainError, decode, encode, parse
from areal_gym.envs.code.statements import order_of

DOUBLE = {
    "text": "Write a function to double a number.",
    "code": "def double(x):\n    return 2 * x",
    "test_list": [
        "assert set([double(2)]) == {4}",
        "import math\nassert math.isclose(double(3), 6)",
    ],
}
CHECKED = {
    "prompt": 'def helper(x):\n    return x + 1\n\n\ndef double(x):\n    """Twice x."""\n',
    "entry_point": "double",
    "canonical_solution": "    return 2 * x\n",
    "test": "def check(candidate):\n    for x in range(4):\n"
    "        assert helper(candidate(x)) == 2 * x + 1",
}


def graded(tmp_path, row, code):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row))
    env = areal_gym.make("code", tasks={"data": path, "test": path})
    env.reset(options={"split": "test", "index": 0})
    step = env.step(f"```python\n{code}\n```")
    return step.reward, step.info["metrics"]


def with_tests(*tests):
    return {
        "text": "Write f.",
        "code": "def f(): pass",
        "test_list": [f"True\n{test}" for test in tests],
    }


CHEATS = {
    "exec": "exec = lambda *a, **k: None",
    "builtins": "import builtins\nbuiltins.exec = builtins.compile = lambda *a, **k: None\n"
    "builtins.set = lambda *a: type('E', (), {'__eq__': lambda s, o: True})()",
    "equal": "class E(int):\n    def __eq__(self, other): return True\n"
    "    def __hash__(self): return 4\ndef double(x): return E(0)",
    "object": "class E:\n    def __eq__(self, other): return True\n"
    "    def __hash__(self): return 4\n    def __float__(self): return 6.0\n"
    "def double(x): return E()",
    "float": "class E(float):\n    __eq__ = __le__ = __ge__ = lambda s, o: True\n"
    "    __sub__ = __rsub__ = __abs__ = lambda s, *o: 0.0\n    __hash__ = lambda s: 4\n"
    "def double(x): return E(1)",
    "json": 'import json\njson.loads = lambda *a, **k: []\njson.dumps = lambda *a, **k: \'{"end": "passed"}\'',
    "math": "import math\nmath.isclose = lambda *a, **k: True",
    "exit": "import sys\nsys.exit(0)",
    "late exit": "import os\ndef double(x): os._exit(0)",
    "raise exit": "def double(x): raise SystemExit(0)",
    "atexit": "import atexit, os\natexit.register(os._exit, 0)\nimport sys\nsys.exit()",
    "stop": "def double(x): raise StopIteration",
    "assert": "import sys, builtins\nclass AssertionError(Exception): pass\n"
    "builtins.AssertionError = AssertionError\nsys.excepthook = lambda *a: None",
    "harness": "import sys\nfor module in list(sys.modules.values()):\n"
    "    for name in ('__areal__', 'Server', 'encode', 'parse'):\n"
    "        if hasattr(module, name): setattr(module, name, lambda *a, **k: ['passed'])",
    "served": 'class S:\n    def serve(self, text): return \'17:{"end": "passed"}\'\n__areal__ = S()',
    "wrong form": "class S:\n    def serve(self, text): return '9:{\"value\":'\n__areal__ = S()",
    "endless": "class S:\n    def serve(self, text): return '999999:'\n    def more(self): return ''\n"
    "__areal__ = S()",
    "frames": "import sys\ndef double(x):\n    frame = sys._getframe()\n    while frame:\n"
    "        for name, value in list(frame.f_globals.items()):\n"
    "            if callable(value): frame.f_globals[name] = lambda *a, **k: True\n"
    "        frame = frame.f_back\n    return True",
    "garbage": "import gc\nfor thing in gc.get_objects():\n"
    "    if type(thing) is dict and '__areal__' in thing: thing['__areal__'] = None",
    "output": 'import os\nfor fd in range(1, 10):\n    try: os.write(fd, b\'{"end": "passed"}\')\n'
    "    except OSError: pass",
    "nothing": "pass",
    "unreadable": "def double(x): return [[]] * 10**6",
    "deep": "def double(x):\n    value = []\n    for _ in range(10**4): value = [value]\n    return value",
    "circle": "def double(x):\n    value = []\n    value.append(value)\n    return value",
    "nan": "def double(x): return float('nan')",
}


@pytest.mark.parametrize("row", [DOUBLE, CHECKED], ids=["mbpp", "humaneval"])
@pytest.mark.parametrize("cheat", CHEATS.values(), ids=CHEATS.keys())
def test_statement_tests_resist_cheats(tmp_path, row, cheat):
    if "def double" not in cheat and "exit" not in cheat:
        cheat = f"{cheat}\ndef double(x): return -1"
    assert graded(tmp_path, row, cheat)[0] == 0.0


@pytest.mark.parametrize("row", [DOUBLE, CHECKED], ids=["mbpp", "humaneval"])
def test_right_code_passes_statement_tests(tmp_path, row):
    assert graded(tmp_path, row, "def double(x):\n    return 2 * x")[0] == 1.0


@pytest.mark.parametrize(
    ("code", "test"),
    [
        ("def f(): return [1, (2.5, 'x', b'y', None, True), {3}, {'a': 1j}, frozenset([4])]",
         "assert f() == [1, (2.5, 'x', b'y', None, True), {3}, {'a': 1j}, frozenset([4])]"),
        ("def f(x): return x", "assert f(2**300) == 2**300 and f('\\ud800\\x00') == '\\ud800\\x00'"),
        ("def f(n): return 'ab' * n", "assert f(30000) == 'ab' * 30000"),
        ("def f(xs): xs.sort()", "xs = [3, 1, 2]\nassert f(xs) is None\nassert xs == [1, 2, 3]"),
        ("def f(xs):\n    xs[0].append(1)\n    return 5",
         "inner = []\nxs = [inner]\nf(xs)\nassert inner == [1] and xs == [[1]]"),
        ("def f(d, *, k=1): d['k'] = k", "d = {}\nf(d, k=2)\nassert d == {'k': 2}"),
        ("def f(n):\n    for i in range(n): yield i * i", "assert list(f(4)) == [0, 1, 4, 9]"),
        ("def f(d): return d.keys()", "assert sorted(f({'b': 1, 'a': 2})) == ['a', 'b']"),
        ("from collections import Counter\ndef f(s): return Counter(s)",
         "assert f('aab') == {'a': 2, 'b': 1}"),
        ("from collections import namedtuple\nP = namedtuple('P', 'x y')\ndef f(): return P(1, 2)",
         "assert f() == (1, 2)"),
        ("from fractions import Fraction\nfrom decimal import Decimal\nimport datetime\n"
         "def f(): return Fraction(1, 3), Decimal('1.10'), datetime.date(2024, 2, 29)",
         "from fractions import Fraction\nfrom decimal import Decimal\nimport datetime\n"
         "assert f() == (Fraction(1, 3), Decimal('1.1'), datetime.date(2024, 2, 29))"),
        ("def f(x): raise KeyError('no ' + x)",
         "try:\n    f('x')\nexcept KeyError as e:\n    assert e.args == ('no x',)\n"
         "else:\n    assert False"),
        ("class MyError(ValueError): pass\ndef f(): raise MyError",
         "try:\n    f()\nexcept ValueError:\n    pass\nelse:\n    assert False"),
        ("class Node:\n    def __init__(self, v):\n        self.v, self.left = v, None\n"
         "def f(n): return n.v + (f(n.left) if n.left else 0)",
         "root = Node(1)\nroot.left = Node(2)\nassert f(root) == 3"),
        ("class Stack:\n    def __init__(self): self.items = []\n"
         "    def push(self, x): self.items.append(x)\n    def __len__(self): return len(self.items)\n"
         "def f(): return Stack()",
         "s = f()\nassert not s\ns.push(3)\nassert len(s) == 1 and s.items == [3] and s"),
        ("def f(t): return t('7')", "assert f(int) == 7"),
        ("import math\ndef f(r): return math.pi * r", "assert math.isclose(f(1), 3.14159, rel_tol=1e-3)"),
        ("def f(x):\n    print('noise' * 100)\n    return x", "assert f(1) == 1"),
        ("def f(x): return x + 1", "for i in range(30):\n    assert f(i) == i + 1"),
    ],
)  # fmt: skip
def test_statement_tests_verify_many_kinds_of_values(tmp_path, code, test):
    assert graded(tmp_path, with_tests(test), code)[0] == 1.0


@pytest.mark.parametrize(
    ("code", "test"),
    [
        ("class E:\n    def __eq__(self, o): return True\ndef f(): return E()",
         "try:\n    assert f() == 3\nexcept:\n    pass"),
        ("def close(a, b): return True\ndef f(): return 1", "assert close(f(), 2)"),
        ("def f(g): return 3", "assert f(lambda x: x) == 3"),
        ("class E:\n    def __hash__(self): return 3\ndef f(): return E()", "assert f() in {3}"),
    ],
)  # fmt: skip
def test_unverifiable_results_are_wrong_and_counted(tmp_path, code, test):
    row = {**with_tests(test), "test_list": [f"True\n{test}", "assert f() == 'never'"]}
    reward, metrics = graded(tmp_path, row, code)
    assert reward == 0.0
    assert metrics["tests_unverifiable"] >= 1


def test_mutating_arguments_does_not_change_the_expected_value(tmp_path):
    cheat = "def f(xs):\n    xs.clear()\n    return []"
    assert graded(tmp_path, with_tests("xs = [2, 1]\nassert f(xs) == sorted(xs)"), cheat)[0] == 0.0


def test_implicit_imports_of_tests_do_not_come_from_the_policy():
    order = order_of("assert isclose(np.abs(f(math.pi)), g(1)) and len(x)", "", "f")
    assert order.imports == {
        "isclose": ("math", "isclose"),
        "np": ("numpy", ""),
        "math": ("math", ""),
    }
    assert sorted(order.remote) == ["g", "x"]
    assert not order.mutates
    assert order_of("f(xs)", "", "f").mutates


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
    | st.binary() | st.complex_numbers(allow_nan=False) | st.fractions() | st.dates(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(plain)
def test_plain_values_round_trip(value):
    decoded = decode(parse(json.dumps(encode(value))), int)
    assert decoded == value
    assert type(decoded) is type(value)


nodes = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
    | st.sampled_from(["list", "dict", "set", "ref", "int", "float", "date", "builtin", "range"]),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=20,
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(nodes)
def test_non_plain_values_raise_not_plain_error(node):
    try:
        decode(node, lambda number: object())
    except NotPlainError:
        return
    # What is accepted can be written again.
    assert isinstance(json.dumps(node), str)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "NaN", "9" * 5_000, "", "{" * 9, '"' + "x" * 2**20]
)
def test_parse_refuses_oversized_messages(text):
    with pytest.raises(NotPlainError):
        parse(text)
