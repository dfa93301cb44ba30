"""What torch's programs give: whether tensors can be taken, where their elements are, and how they are reduced. Used by railhead.torch."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from railhead.mesh import DTYPES, OPS

BYTES = DTYPES["u8"][0]
SUM = OPS["sum"]
# Those whose elements are reduced.
_REDUCED = {
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.uint32: "u32",
    torch.int64: "i64",
    torch.uint64: "u64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float32: "f32",
    torch.float64: "f64",
    torch.bool: "u8",
}
_REDUCTIONS = {
    dist.ReduceOp.SUM: SUM,
    dist.ReduceOp.AVG: SUM,
    dist.ReduceOp.PRODUCT: OPS["product"],
    dist.ReduceOp.MIN: OPS["min"],
    dist.ReduceOp.MAX: OPS["max"],
}
# Those that no function of the library does: each rank does them to what all have given.
_BITWISE: dict[Any, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    dist.ReduceOp.BAND: torch.bitwise_and,
    dist.ReduceOp.BOR: torch.bitwise_or,
    dist.ReduceOp.BXOR: torch.bitwise_xor,
}
# Of booleans, which are bytes of 0 and 1.
_OF_BOOLEANS = {
    dist.ReduceOp.SUM: OPS["max"],
    dist.ReduceOp.PRODUCT: OPS["min"],
    dist.ReduceOp.MIN: OPS["min"],
    dist.ReduceOp.MAX: OPS["max"],
    dist.ReduceOp.BAND: OPS["min"],
    dist.ReduceOp.BOR: OPS["max"],
}


def checked(tensors: Sequence[torch.Tensor], written: bool = False) -> None:
    """Whether tensors have elements in this process's memory, one each where they are `written`."""
    for tensor in tensors:
        if not tensor.is_cpu:
            raise NotImplementedError(f"a tensor on {tensor.device}; this backend takes those of the CPU")
        if tensor.layout is not torch.strided or tensor.is_nested:
            raise NotImplementedError(f"a tensor of layout {'nested' if tensor.is_nested else tensor.layout}; this backend takes {torch.strided}")
        if tensor.is_quantized:
            raise NotImplementedError(f"a tensor of {tensor.dtype}, whose scale is not sent; this backend takes no quantized ones")
        if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            raise NotImplementedError(f"a {type(tensor).__name__}, which has no memory of its own; this backend takes plain tensors")
        if written and not tensor.is_contiguous():
            sizes_and_strides = list(zip(tensor.shape, tensor.stride(), strict=True))
            if any(size > 1 and stride == 0 for size, stride in sizes_and_strides):
                raise ValueError(f"a tensor of strides {tensor.stride()}, whose elements share memory; expected one that can be written to")


def single(tensors: torch.Tensor | Sequence[torch.Tensor], written: bool = False) -> torch.Tensor:
    """The tensor of a list of one, which need not be in a list."""
    if isinstance(tensors, torch.Tensor):
        tensors = [tensors]
    if len(tensors) != 1:
        raise ValueError(f"{len(tensors)} tensors; expected 1")
    checked(tensors, written)
    return tensors[0]


def one_each(lists: Sequence[Any], like: torch.Tensor, ranks: int, written: bool = False) -> list[torch.Tensor]:
    """The tensors of the list in a list of one, which it need not be in: one for each rank, of the elements that `like` has."""
    tensors = list(lists if lists and isinstance(lists[0], torch.Tensor) else lists[0] if len(lists) == 1 else lists)
    if len(tensors) != ranks or not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
        raise ValueError(f"{len(tensors)} tensors or lists; expected one list of {ranks} tensors, one for each rank")
    checked(tensors, written)
    same_type([*tensors, like])
    for rank, tensor in enumerate(tensors):
        if tensor.numel() != like.numel():
            raise ValueError(
                f"{tensor.numel()} elements for rank {rank}, in shape {tuple(tensor.shape)}; expected {like.numel()}, as in the other tensor"
            )
    return tensors


def same_type(tensors: Sequence[torch.Tensor]) -> None:
    for tensor in tensors[1:]:
        if tensor.dtype != tensors[0].dtype:
            raise ValueError(f"a tensor of {tensor.dtype} beside one of {tensors[0].dtype}; expected one type")


def fits(whole: torch.Tensor, part: torch.Tensor, ranks: int) -> None:
    """Whether one tensor has as many elements as this part of all ranks."""
    if whole.numel() != part.numel() * ranks or whole.dtype != part.dtype:
        raise ValueError(
            f"{whole.numel()} elements of {whole.dtype} for {ranks} parts of {part.numel()} of {part.dtype}; "
            f"expected {part.numel() * ranks} of that type"
        )


def pairs(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    checked(outputs, written=True)
    checked(inputs)
    if len(outputs) != len(inputs):
        raise ValueError(f"{len(outputs)} outputs; expected one for each of {len(inputs)} inputs")
    return list(zip(outputs, inputs, strict=True))


def splits(tensor: torch.Tensor, rows: Sequence[int], ranks: int) -> list[int]:
    """The bytes of a tensor's part of each rank, of so many rows, or of equal ones if none are given."""
    if not tensor.dim():
        raise ValueError("a tensor without dimensions; expected rows to split")
    total = tensor.shape[0]
    if not rows:
        if total % ranks:
            raise ValueError(f"{total} rows for {ranks} ranks; expected a multiple, or the sizes of their parts")
        rows = [total // ranks] * ranks
    if len(rows) != ranks or sum(rows) != total or min(rows) < 0:
        raise ValueError(f"parts of {list(rows)} rows; expected one for each of {ranks} ranks, {total} in all")
    row = tensor.nbytes // total if total else 0
    return [part * row for part in rows]


def own_parts(sent: int, received: int, rank: int) -> None:
    if sent != received:
        raise ValueError(f"{sent} bytes from rank {rank} to itself, of which it takes {received}; expected as many")


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor whose bytes are its elements, one behind the other: not of a conjugate or a negative view, whose bytes are something else."""
    return tensor if _is_plain(tensor) else tensor.detach().resolve_conj().resolve_neg().contiguous()


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()


def write(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """As the library writes, which asks neither for gradients nor for the mode that a tensor was made in."""
    with torch.inference_mode():
        tensor.copy_(values)


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two contiguous tensors share memory."""
    return one.data_ptr() < other.data_ptr() + other.nbytes and other.data_ptr() < one.data_ptr() + one.nbytes


def address(tensor: torch.Tensor) -> int | None:
    return tensor.data_ptr() if tensor.nbytes else None


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The elements of tensors, one behind the other."""
    return torch.cat([plain(tensor).detach().view(-1) for tensor in tensors])


class Flat:
    """A tensor's elements one behind the other: the tensor itself, where they lie so."""

    def __init__(self, tensor: torch.Tensor, is_read: bool = True) -> None:
        self._tensor = tensor
        if _is_plain(tensor):
            self.flat = tensor
        elif is_read:
            self.flat = plain(tensor)
        else:
            self.flat = torch.empty(tensor.shape, dtype=tensor.dtype)

    @property
    def addr(self) -> int | None:
        return address(self.flat)

    def written(self) -> None:
        if self.flat is not self._tensor:
            write(self._tensor, self.flat)


class Parts:
    """Tensors of one type that are written one behind the other: in place, where they lie so."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors = tensors
        self.sizes = [tensor.nbytes for tensor in tensors]
        ends = [tensor.data_ptr() + tensor.nbytes for tensor in tensors]
        self._in_place = all(map(_is_plain, tensors)) and all(end == after.data_ptr() for end, after in zip(ends, tensors[1:], strict=False))
        self._whole = torch.empty(0 if self._in_place else sum(self.sizes), dtype=torch.uint8)
        self.addr = (tensors[0] if self._in_place else self._whole).data_ptr() if sum(self.sizes) else None

    def written(self) -> None:
        if not self._in_place:
            parts = self._whole.split(self.sizes)  # type: ignore[no-untyped-call]
            for tensor, part in zip(self._tensors, parts, strict=True):
                if tensor.nbytes:
                    write(tensor, part.view(tensor.dtype).view(tensor.shape))


class Reduction:
    """How elements of a type are reduced."""

    def __init__(self, op: Any, dtype: torch.dtype) -> None:
        # Of complex numbers both parts are added.
        name = _REDUCED.get(dtype.to_real() if dtype.is_complex else dtype)
        library = (_OF_BOOLEANS if dtype is torch.bool else _REDUCTIONS).get(op)
        is_whole = not (dtype.is_floating_point or dtype.is_complex)
        self._is_mean = op == dist.ReduceOp.AVG
        self.bitwise = None if library is not None else _BITWISE.get(op)
        if op not in _REDUCTIONS and op not in _BITWISE:
            raise NotImplementedError(f"{op}; expected one of {', '.join(map(str, [*_REDUCTIONS, *_BITWISE]))}")
        if self._is_mean and is_whole:
            raise NotImplementedError(f"the average of {dtype}; expected floating point")
        if dtype.is_complex and op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise NotImplementedError(f"{op} of {dtype}; expected a sum")
        if self.bitwise and not is_whole:
            raise NotImplementedError(f"{op} of {dtype}; expected integers or booleans")
        if name is None and self.bitwise is None:
            raise NotImplementedError(f"a reduction of {dtype}; expected one of {', '.join(map(str, _REDUCED))}")
        self.dtype = DTYPES[name or "u8"][0]
        self.op = SUM if library is None else library
        self.per_element = 2 if dtype.is_complex else 1
        # Ranks that reduce another type, or in another way, do not take what this one sends.
        self.tag = zlib.crc32(f"{dtype} {op}".encode())

    def finish(self, tensor: torch.Tensor, ranks: int) -> None:
        if self._is_mean:
            with torch.inference_mode():
                tensor.div_(ranks)


_reduction = functools.cache(Reduction)


def reduction(op: Any, tensor: torch.Tensor) -> Reduction:
    return _reduction(getattr(op, "op", op), tensor.dtype)
