"""Read a pickle into objects of our own, so that nothing it says can be abused.

A pickle calls what ``find_class`` returns, sets attributes of it, and uses what it made as keys. So no class
and no function of Python, NumPy or torch is handed out: each name has a stand-in, which is called with
checked arguments or keeps what it is given. Instructions that no checkpoint needs are refused. The unpickler
is the one in Python, since that in C reserves memory for whatever index or length an instruction claims.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from stablenum.commands.verify.contents import NotCheckedError
from stablenum.commands.verify.leaves import Ordered
from stablenum.commands.verify.limits import Limits

__all__ = ["Built", "Function", "Record", "RestrictedUnpickler", "Sealed", "needs_code", "text_of"]

# Keys are names, numbers and small tuples. Chosen, not measured: a tuple that shares its parts would take a
# time that doubles with each level to be hashed.
_LARGEST_KEY = 64
# What one reference in a container takes, in bytes.
_REFERENCE = 8
# The texts of protocol 0, what makes instances in ways of its own, and what refers to things outside.
_REFUSED = """INT LONG FLOAT STRING UNICODE PERSID INST OBJ NEWOBJ_EX EXT1 EXT2 EXT4 DUP
    NEXT_BUFFER READONLY_BUFFER"""


# The one in Python, which its stub describes in part.
_Unpickler: Any = pickle._Unpickler


class Sealed(type):
    """A class of which nothing can be set."""

    def __setattr__(cls, name: str, value: object) -> None:
        raise AttributeError(f"{name} of a stand-in cannot be set")


class Record(metaclass=Sealed):
    """What stands for an object of a class: its state, by the names of the fields."""

    __slots__ = ("_fields",)
    _fields: Mapping[Any, Any]

    def __new__(cls, *arguments: object) -> Record:
        made = super().__new__(cls)
        object.__setattr__(made, "_fields", dict(enumerate(arguments)))
        return made

    def take(self, state: object) -> None:
        """Take a state: fields by name, or in their order."""
        known = (
            state if isinstance(state, dict) else dict(enumerate(state if isinstance(state, tuple) else ()))
        )
        object.__setattr__(self, "_fields", known)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{name} of a stand-in cannot be set")

    def get(self, name: Any) -> Any:
        """Return a field; None if there is none of this name."""
        return self._fields.get(name)


class Function:
    """What stands for a callable; it holds no number."""

    __slots__ = ("made",)

    def __init__(self, made: Callable[..., Any]) -> None:
        self.made = made


class Built:
    """What stands for an object that is made first, and gets its state afterwards."""

    __slots__ = ()

    def take(self, state: Any) -> None:
        """Take the state."""
        raise NotImplementedError


def needs_code(name: str) -> NotCheckedError:
    """Return what is said of a pickle that wants more than its numbers."""
    return NotCheckedError("unreadable", f"needs arbitrary code ({name:.100}); it was not run")


def text_of(value: object) -> str:
    """Return a text as it is.

    Raises:
        TypeError: it is none.
    """
    if type(value) is not str:
        raise TypeError(f"a text is needed, not {type(value).__name__}")
    return value


def _refused(reader: Any) -> None:
    raise pickle.UnpicklingError("it has an instruction that no checkpoint needs")


class RestrictedUnpickler(_Unpickler):  # type: ignore[misc]
    """Reads a pickle into stand-ins.

    Args:
        data: the pickle, and what lies behind it.
        limits: how much the stand-ins may make.
        stored: the bytes of the file.
    """

    dispatch = _Unpickler.dispatch | {getattr(pickle, name)[0]: _refused for name in _REFUSED.split()}

    def __init__(self, data: io.BytesIO, limits: Limits, stored: int) -> None:
        super().__init__(data, encoding="utf-8")
        self._limits, self._stored, self._made = limits, stored, 0
        self._stand_ins: dict[tuple[str, str], Any] = {}

    def stand_in(self, module: str, name: str) -> Any:
        """Return what stands for a name; None if nothing does."""
        module = {"__builtin__": "builtins"}.get(module, module)
        known: dict[tuple[str, str], Callable[..., Any]] = {
            ("builtins", "bytearray"): self._bytes,
            ("builtins", "bytes"): self._bytes,
            ("builtins", "complex"): _complex,
            ("builtins", "frozenset"): lambda *items: frozenset(self.keys(*items)),
            ("builtins", "set"): lambda *items: set(self.keys(*items)),
            ("_codecs", "encode"): self._bytes,
            ("collections", "Counter"): self._ordered,
            ("collections", "OrderedDict"): self._ordered,
        }
        return Function(known[module, name]) if (module, name) in known else None

    def charge(self, size: int) -> None:
        """Take note of bytes before a stand-in makes them.

        Raises:
            NotCheckedError: all together, they are more than the limits allow.
        """
        self._made += size
        self._limits.check_bytes(self._made, self._stored, "what its pickle makes")

    # --- what is called ----------------------------------------------------------------------

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._stand_ins:
            found = self.stand_in(module, name)
            if found is None:
                raise needs_code(f"{module}.{name}")
            self._stand_ins[module, name] = found
        return self._stand_ins[module, name]

    def persistent_load(self, pid: Any) -> Any:
        raise NotCheckedError("unreadable", "it refers to something outside the file")

    def called(self, function: Any, arguments: Any) -> Any:
        """Return what a stand-in makes of arguments."""
        if type(arguments) is not tuple:
            raise TypeError(f"arguments are a tuple, not {type(arguments).__name__}")
        if type(function) is Function:
            return function.made(*arguments)
        if type(function) is Sealed:
            return function(*arguments)
        raise needs_code(f"a call of a value of type {type(function).__name__}")

    def load_reduce(self) -> None:
        arguments = self.stack.pop()
        self.stack[-1] = self.called(self.stack[-1], arguments)

    def load_build(self) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        if isinstance(target, Ordered) and isinstance(state, dict):
            target.attributes = state
        elif isinstance(target, Record | Built):
            target.take(state)
        else:
            raise needs_code(f"a state of a value of type {type(target).__name__}")

    # --- containers --------------------------------------------------------------------------

    def load_appends(self) -> None:
        items = self.pop_mark()
        self._only(list).extend(items)

    def load_append(self) -> None:
        item = self.stack.pop()
        self._only(list).append(item)

    def load_additems(self) -> None:
        items = self.pop_mark()
        self._only(set).update(self.keys(items))

    def load_frozenset(self) -> None:
        self.append(frozenset(self.keys(self.pop_mark())))

    def load_dict(self) -> None:
        items = self.pop_mark()
        self.append(dict(zip(self.keys(items[::2]), items[1::2], strict=True)))

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._put(key, value)

    def load_setitems(self) -> None:
        items = self.pop_mark()
        for key, value in zip(items[::2], items[1::2], strict=True):
            self._put(key, value)

    def _put(self, key: Any, value: Any) -> None:
        _check_key(key)
        self._only(dict)[key] = value

    def _only(self, kind: type[Any]) -> Any:
        """Return what is on the stack, which is to be of a kind."""
        if not isinstance(self.stack[-1], kind):
            raise TypeError(f"{kind.__name__} is needed, not {type(self.stack[-1]).__name__}")
        return self.stack[-1]

    dispatch.update(
        {
            pickle.REDUCE[0]: load_reduce,
            pickle.NEWOBJ[0]: load_reduce,  # the stand-in of a class is called
            pickle.BUILD[0]: load_build,
            pickle.BYTEARRAY8[0]: _Unpickler.load_binbytes8,
            pickle.APPEND[0]: load_append,
            pickle.APPENDS[0]: load_appends,
            pickle.ADDITEMS[0]: load_additems,
            pickle.FROZENSET[0]: load_frozenset,
            pickle.DICT[0]: load_dict,
            pickle.SETITEM[0]: load_setitem,
            pickle.SETITEMS[0]: load_setitems,
        }
    )

    # --- stand-ins of Python's own -----------------------------------------------------------

    def keys(self, items: Any = ()) -> Iterable[Any]:
        """Return the parts of a container, which may be keys."""
        if not isinstance(items, list | tuple | set | frozenset):
            raise TypeError(f"keys come in a list, not in {type(items).__name__}")
        self.charge(_REFERENCE * len(items))
        for item in items:
            _check_key(item)
        return items

    def _ordered(self, items: Any = ()) -> Ordered:
        pairs = list(items.items()) if isinstance(items, dict) else [(key, value) for key, value in items]
        self.keys([key for key, _ in pairs])
        return Ordered(pairs)

    def _bytes(self, value: Any = b"", encoding: Any = "latin1") -> bytes:
        if isinstance(value, str) and encoding in ("latin1", "latin-1"):
            self.charge(len(value))
            return value.encode("latin1")
        if not isinstance(value, bytes):
            raise TypeError(f"bytes are needed, not {type(value).__name__}")
        return value


def _complex(real: Any, imaginary: Any = 0.0) -> complex:
    for part in (real, imaginary):
        if not isinstance(part, int | float):
            raise TypeError(f"a number is needed, not {type(part).__name__}")
    return complex(real, imaginary)


def _check_key(key: Any) -> None:
    """Check that a key is hashed in bounded time.

    Raises:
        TypeError: it is a large tuple, or one that shares its parts.
    """
    if not isinstance(key, tuple):
        return
    waiting, count = [key], 0
    while waiting:
        parts = waiting.pop()
        count += 1 + len(parts)
        if count > _LARGEST_KEY:
            raise TypeError(f"a key is a tuple of more than {_LARGEST_KEY} parts")
        waiting.extend(part for part in parts if isinstance(part, tuple))
