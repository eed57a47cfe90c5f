"""Run an origin and an operation on quantized tensors and on plain ones, and compare everything."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from origin_operations import OPERATIONS, Operation
from origin_worlds import CONFIGS, Config, World
from origins import ORIGINS, Origin, mode_of
from origins_of_ranks import RANK_ORIGINS
from torch import Tensor, nn
from torch.nn import functional as F

import qtensor
from qtensor.storage.tensor import QuantizedTensor

EVERY_ORIGIN = {**ORIGINS, **RANK_ORIGINS}
RIGHT, REFUSED = "right", "refused"


class FaultError(AssertionError):
    """Says what is wrong with a cell."""


@cache
def activations(columns: int) -> Tensor:
    """Return small integers, (3, columns): their products with the values of a world are exact."""
    g = torch.Generator().manual_seed(0)
    return torch.randint(0, 4, (3, columns), generator=g).float()


@cache
def one_usage(quantizer: Any, usage: str) -> Any:
    return quantizer.with_usage(rowwise=usage == "rowwise", columnwise=usage == "columnwise")


def alone(t: Any, usage: str) -> Tensor:
    """Return the values that the data of one usage hold."""
    quantizer = one_usage(t.quantizer, usage)
    buffers = [getattr(t, slot.name) for slot in quantizer.slots]
    return quantizer.assemble(buffers, t.shape, t.dtype, bare=True).dequantize()


def values_of(t: Any) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Yield each way to read the values of a quantized tensor, and the call."""
    yield "dequantize", t.dequantize
    usages = t.get_usages()
    if all(usages.values()):
        for usage in usages:
            yield f"{usage} data", lambda u=usage: alone(t, u)


def products_of(t: Any, plain: Tensor) -> Iterator[tuple[str, Callable[[], Tensor], Tensor]]:
    """Yield products with a quantized tensor: name, call, and product of its plain twin."""
    if t.dtype == torch.float32 and t.ndim > 1:
        x = activations(t.shape[-2]).expand(*t.shape[:-2], -1, -1)
        yield "x @ t", lambda: x @ t, x @ plain
        if t.ndim == 2:
            y = activations(t.shape[-1])
            yield "linear", lambda: F.linear(y, t), F.linear(y, plain)


def difference(got: Tensor, want: Tensor, bound: float = 0.0) -> str:
    """Return how two tensors differ by more than ``bound``, or an empty string."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"{got.dtype} {tuple(got.shape)}, wanted {want.dtype} {tuple(want.shape)}"
    if torch.equal(got, want):
        return ""
    wrong = ~((got - want).abs() <= bound)
    return f"{int(wrong.sum())} of {want.numel()} values differ" if wrong.any() else ""


def attempt(way: str, read: Callable[[], Tensor], want: Tensor, bound: float = 0.0) -> str:
    """Return what is wrong with a reading, or an empty string; only values cannot be refused."""
    try:
        text = difference(read(), want, bound)
    except qtensor.QTensorError as error:
        text = str(error) if way == "dequantize" else ""
    except Exception as error:  # noqa: BLE001 - a read that fails is what this looks for
        text = f"{type(error).__name__}: {error}"
    return text and f"{way}: {text}"


@dataclass
class Member:
    """A quantized tensor and its plain twin."""

    name: str
    tensor: Any
    plain: Any

    @property
    def is_quantized(self) -> bool:
        return isinstance(self.tensor, QuantizedTensor)

    @property
    def is_copy(self) -> bool:
        """Whether the library says that the tensor is a copy where torch has a view.

        Swizzled factors have no views of their columns. Writes to such a tensor are refused; it
        does not show later writes to the whole.
        """
        return self.is_quantized and self.tensor._origin.is_copy

    def check(self) -> str:
        """Return what is wrong with the values, or an empty string."""
        if self.is_quantized:
            found = (attempt(way, read, self.plain) for way, read in values_of(self.tensor))
            return next(filter(None, found), "")
        # torch reads the plain results of an operation. A ``FlatView`` cannot be read.
        is_plain = type(self.tensor) in (Tensor, nn.Parameter)
        return difference(self.tensor, self.plain) if is_plain else ""

    def check_products(self) -> str:
        """Return what is wrong with products of the tensor, or an empty string."""
        if not self.is_quantized:
            return ""
        for way, product, want in products_of(self.tensor, self.plain):
            # Some products multiply each sum with the factor of the tensor, and round.
            bound = 2**-20 * want.abs().max().item() if want.numel() else 0.0
            if text := attempt(way, product, want, bound):
                return text
        return ""


@dataclass
class Cell:
    """One origin and one operation; its members are the tensors that are alive."""

    config: Config
    members: list[Member] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.worlds = World(self.config, self.config.unit), World(None, self.config.unit)

    def both(
        self, program: Operation, member: Member | None = None
    ) -> list[tuple[Any, Any]] | None:
        """Run a program in both worlds, and return its results in pairs; None if it is refused.

        Raises:
            FaultError: only quantized tensors raise an error that is not one of ours.
        """
        quantized, plain = self.worlds
        step, draws = quantized.step + 1, max(quantized.draws, plain.draws)
        for world in self.worlds:
            world.step, world.draws = step, draws
        twins = (None, None) if member is None else (member.tensor, member.plain)
        try:
            got = program(quantized, twins[0])
        except qtensor.QTensorError:
            return None
        except Exception as error:
            try:
                program(plain, twins[1])
            except Exception:  # noqa: BLE001 - torch refuses it too
                return None
            raise FaultError(f"{type(error).__name__}: {str(error)[:200]}") from error
        try:
            want = program(plain, twins[1])
        except Exception:  # noqa: BLE001 - more than torch allows; nothing may have changed
            return None
        return list(zip(_listed(got), _listed(want), strict=True))

    def add(self, pairs: list[tuple[Any, Any]], name: str) -> list[Member]:
        """Add new tensors to the members, and return them."""
        known = {(id(member.tensor), id(member.plain)) for member in self.members}
        added = []
        for tensor, plain in pairs:
            if (id(tensor), id(plain)) not in known:
                known.add((id(tensor), id(plain)))
                added.append(Member(f"{name} {len(added)}", tensor, plain))
        self.members += added
        return added

    def check(self, after: str, products: bool = False, copies: bool = True) -> None:
        """Check the values of every member, and products with it on request.

        Args:
            after: what has happened.
            products: whether products are checked, too.
            copies: whether copies are checked that the library marks.

        Raises:
            FaultError: a member has other values than its twin.
        """
        for member in self.members:
            if member.is_copy and not copies:
                continue
            if text := member.check() or (member.check_products() if products else ""):
                raise FaultError(f"after {after}, {member.name}: {text}")

    def settle(self, member: Member) -> None:
        """Take over values that saturated, because a part shares its factor with other values."""
        is_part = member.plain.untyped_storage().nbytes() > member.plain.nbytes
        shares = self.config.shares_factors and is_part
        if member.is_quantized and (shares or self.config.format == "fp8_delayed"):
            largest = member.tensor.dequantize().abs().max().item()
            member.plain.clamp_(-largest, largest)


def _listed(results: Any) -> list[Any]:
    if results is None:
        return []
    return list(results) if isinstance(results, list | tuple) else [results]


def run(origin: Origin, operation: Operation, config: Config) -> str:
    """Return ``"right"``, ``"refused"`` for an error of ours, or what is wrong.

    After the operation, each tensor is overwritten in turn: the new values show in its views, and
    nowhere else.
    """
    cell = Cell(config)
    try:
        made = cell.both(lambda w, _: origin(w))
        if made is None:
            return REFUSED
        tested, *others = cell.add(made, "member")
        cell.check("the origin", products=True)
        results = cell.both(operation, tested)
        if results is not None and operation is OPERATIONS["larger values"]:
            cell.settle(tested)
        new = cell.add(results or [], "result")
        cell.check("the operation", products=True)
        for member in (*new, tested, *others):
            cell.both(lambda w, t: t.copy_(w.values(*t.shape)) and None, member)
            is_last = member is cell.members[-1]
            cell.check(f"a write to {member.name}", products=is_last, copies=False)
    except FaultError as fault:
        return str(fault)
    return REFUSED if results is None else RIGHT


def sweep(
    name: str, config: Config, operations: Iterable[str] = OPERATIONS
) -> dict[str, list[str]]:
    """Return operations on the result of an origin, by what ``run`` returns."""
    found: dict[str, list[str]] = {}
    if name.startswith("compiled"):
        torch._dynamo.reset()
    for operation in operations:
        with mode_of(name):
            result = run(EVERY_ORIGIN[name], OPERATIONS[operation], config)
        found.setdefault(result, []).append(operation)
    return found


def faults(name: str, config: Config, operations: Iterable[str] = OPERATIONS) -> str:
    """Return what is wrong with operations on the result of an origin, a line for each fault."""
    found = sweep(name, config, operations)
    wrong = [text for text in found if text not in (RIGHT, REFUSED)]
    return "".join(f"\n{config}, {', '.join(found[text])}: {text}" for text in wrong)


def faults_of_format(name: str, fmt: str) -> str:
    """Return what is wrong with every operation, for each config of a format."""
    return "".join(faults(name, config) for config in CONFIGS if config.format == fmt)
