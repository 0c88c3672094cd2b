"""A source as a tree: one expression is replaced, and all around it stays as it was."""

import libcst as cst
import pytest

from stablenum.diagnosis.edits.tree import Tree, code_of

SOURCE = '''"""Doc."""
import math

RATE = 0.1  # of the optimizer


class Net:
    def __init__(self, width=4):
        self.eps = 1e-5

    def forward(self, x):
        y = (x - 1) * 2
        return y / math.sqrt(self.eps)


def step(x):
    y = RATE * x
    z = y + 1
    return z


def forgotten(x):
    return x
'''


def expression(tree, line, text):
    statement = tree.statement_at(line)
    return next(n for n in tree.expressions(statement) if code_of(n) == text)


@pytest.mark.parametrize(
    ("line", "old", "new", "expected"),
    [
        (4, "0.1", "0.2", "RATE = 0.2  # of the optimizer"),
        (12, "(x - 1)", "x + 1", "y = (x + 1) * 2"),
        (12, "x", "a + b", "y = ((a + b) - 1) * 2"),
        (13, "y", "f(y)", "return f(y) / math.sqrt(self.eps)"),
        (13, "self.eps", "a + b", "return y / math.sqrt(a + b)"),
        (13, "math.sqrt(self.eps)", "a * b", "return y / (a * b)"),
    ],
)
def test_an_expression_is_replaced_with_parentheses_where_it_needs_them(line, old, new, expected):
    tree = Tree(SOURCE)
    after = tree.with_node(expression(tree, line, old), cst.parse_expression(new))
    changed = [(a, b) for a, b in zip(SOURCE.splitlines(), after.splitlines(), strict=True) if a != b]
    assert [b.strip() for _, b in changed] == [expected]


def test_names_of_attributes_and_keywords_are_no_expressions():
    tree = Tree("f(x.size, axis=k)\n")
    assert [code_of(n) for n in tree.expressions(tree.statement_at(1))] == [
        "f(x.size, axis=k)", "f", "x.size", "x", "k",
    ]  # fmt: skip


def test_what_is_read_is_defined_in_the_function_or_else_in_the_module():
    tree = Tree(SOURCE)
    lines = [tree.range_of(s).start.line for s in tree.definitions(tree.statement_at(17))]
    assert lines == [4]  # not line 12, which gives another y a value
    assert [tree.range_of(s).start.line for s in tree.definitions(tree.statement_at(18))] == [17]
    assert [tree.range_of(s).start.line for s in tree.definitions(tree.statement_at(13))] == [12, 9]


def test_readers_are_those_of_the_same_function():
    tree = Tree(SOURCE)
    assert [tree.range_of(s).start.line for s in tree.readers(tree.statement_at(17))] == [18]


def test_variables_and_functions_that_nothing_uses():
    tree = Tree(SOURCE)
    assert tree.variables_at(18) == ("z", "y", "x")
    assert tree.unused == ("step", "forgotten")


@pytest.mark.parametrize(
    ("source", "runs"),
    [
        ("y = f(x)\n", True),
        ("print(x)\n", False),
        ("shutil.rmtree(folder)\n", False),
        ("ok = os.replace(a, b)\n", False),
        ("x = torch.load(open(name))\n", False),
        ("done = model.save_weights(path)\n", False),
        ("if x > limit:\n    y = 1\n", True),
        ("with open(name) as file:\n    y = 1\n", False),
    ],
)
def test_what_acts_on_files_is_not_run_with_a_change(source, runs):
    tree = Tree(source)
    assert tree.may_run_otherwise(tree.statements[0]) is runs


def test_a_form_feed_ends_no_line():
    tree = Tree("a = 1\n\x0c\nb = 2\nc = 30\n")
    assert tree.with_node(expression(tree, 4, "30"), cst.Integer("7")) == "a = 1\n\x0c\nb = 2\nc = 7\n"


def test_a_statement_comes_after_the_next_one():
    tree = Tree("x = f(1)  # one\ny = g(\n    x,\n)\nfor i in y:\n    pass\n")
    expected = "y = g(\n    x,\n)  # one\nx = f(1)\nfor i in y:\n    pass\n"
    comments = Tree("a = 1  # of a\n\nb = 2  # of b\n")
    assert comments.with_next_first(comments.statement_at(1)) == "b = 2  # of b\n\na = 1  # of a\n"
    assert tree.with_next_first(tree.statement_at(1)) == expected
    assert tree.with_next_first(tree.statement_at(2)) == ""  # a loop follows
    assert tree.with_next_first(tree.statement_at(6)) == ""


def test_constants_that_nothing_reads_were_forgotten():
    assert Tree("RATE = 0.1\nEPS = 1e-5\nprint(RATE)\n").forgotten == ("EPS",)


def test_attributes_that_nothing_reads_were_forgotten():
    text = (
        "class A:\n    def f(self, x):\n        self.a = x\n        self.b: int = 2\n        return self.a\n"
    )
    assert Tree(text).kept == ("b",)


def test_what_acts_on_files_is_neither_moved_nor_called_nor_given_something_else():
    tree = Tree(
        "folder = root / name\nshutil.rmtree(folder)\ny = f(1)\n\n\n"
        "def export(x):\n    with open(x) as file:\n        return file\n\n\n"
        "def plain(x):\n    return x\n"
    )
    folder, remove, plain = map(tree.statement_at, (1, 2, 3))
    assert tree.with_next_first(folder) == tree.with_next_first(remove) == ""
    assert not tree.may_run_otherwise(folder)  # rmtree reads it
    assert not tree.may_run_otherwise(remove)
    assert tree.may_run_otherwise(plain)
    assert tree.unused == ("plain",)


def test_a_buffer_that_is_registered_is_no_attribute_that_was_forgotten():
    text = 'class A:\n    def f(self, x):\n        self.register_buffer("m", x, persistent=False)\n'
    assert Tree(text).kept == ()
