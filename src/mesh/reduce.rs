//! Element types and reductions. Pure; any thread.
//!
//! Peers may write to what is reduced, so it is loaded once, line by line, into registers; for a caller's function, block by block into memory that is
//! nobody else's.

use std::ops::Range;

use half::{bf16, f16};

use crate::base::mem::{Compute, LINE, Vectors, with_widest};
use crate::fabric::RegionView;

use super::protocol::Small;

/// Type of the elements. The numbers are part of the C interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum DataType {
    /// 8 bits, signed.
    I8 = 0,
    /// 8 bits, unsigned.
    U8 = 1,
    /// 32 bits, signed.
    I32 = 2,
    /// 32 bits, unsigned.
    U32 = 3,
    /// 64 bits, signed.
    I64 = 4,
    /// 64 bits, unsigned.
    U64 = 5,
    /// IEEE binary16.
    F16 = 6,
    /// The upper half of a binary32.
    Bf16 = 7,
    /// IEEE binary32.
    F32 = 8,
    /// IEEE binary64.
    F64 = 9,
}

impl DataType {
    /// All, by number.
    pub const ALL: [DataType; 10] = [
        DataType::I8,
        DataType::U8,
        DataType::I32,
        DataType::U32,
        DataType::I64,
        DataType::U64,
        DataType::F16,
        DataType::Bf16,
        DataType::F32,
        DataType::F64,
    ];

    /// Bytes of an element.
    pub fn size(self) -> usize {
        match self {
            DataType::I8 | DataType::U8 => 1,
            DataType::F16 | DataType::Bf16 => 2,
            DataType::I32 | DataType::U32 | DataType::F32 => 4,
            DataType::I64 | DataType::U64 | DataType::F64 => 8,
        }
    }
}

/// How two elements become one. Integers wrap around. The numbers are part of the C interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Op {
    /// Their sum.
    Sum = 0,
    /// Their product.
    Product = 1,
    /// The lesser one.
    Min = 2,
    /// The greater one.
    Max = 3,
}

impl Op {
    /// All, by number.
    pub const ALL: [Op; 4] = [Op::Sum, Op::Product, Op::Min, Op::Max];
}

/// A caller's own function: the first elements become those of both. Associative and commutative, of whole elements.
pub type Custom<'a> = &'a (dyn Fn(&mut [u8], &[u8]) + Sync);

/// What becomes of the elements of two ranks.
#[derive(Clone, Copy)]
pub enum Reduction<'a> {
    /// One of ours.
    Of(DataType, Op),
    /// The caller's, of elements of so many bytes.
    Custom(usize, Custom<'a>),
}

/// Bytes of a block: two of them, and what else is in use, fit a first-level cache.
const BLOCK: usize = 8192;

/// Aligned for whatever a caller's function takes its elements for.
#[repr(align(64))]
struct Block<const N: usize>([u8; N]);

/// Bytes of an element of a caller's own at most: some fit a block.
pub(super) const MAX_ELEMENT: usize = BLOCK;

/// What is done with a function of two elements of `N` bytes.
trait Pass {
    fn over<const N: usize>(self, f: impl Fn([u8; N], [u8; N]) -> [u8; N]);
}

/// Replaces each element of the first block.
struct Blocks<'a>(&'a mut [u8], &'a [u8]);

impl Pass for Blocks<'_> {
    #[inline(always)]
    fn over<const N: usize>(self, f: impl Fn([u8; N], [u8; N]) -> [u8; N]) {
        let (a, _) = self.0.as_chunks_mut::<N>();
        let (b, _) = self.1.as_chunks::<N>();
        for (a, b) in a.iter_mut().zip(b) {
            *a = f(*a, *b);
        }
    }
}

/// Reduces the operands to the results, as many lines of each: they are in registers meanwhile.
struct Lines<'a> {
    operands: &'a [RegionView<'a>],
    results: &'a [RegionView<'a>],
    lines: usize,
}

impl Pass for Lines<'_> {
    fn over<const N: usize>(self, f: impl Fn([u8; N], [u8; N]) -> [u8; N]) {
        with_widest(ByLine(self, f));
    }
}

/// A pass with a function.
struct ByLine<'a, const N: usize, F>(Lines<'a>, F);

impl<const N: usize, F: Fn([u8; N], [u8; N]) -> [u8; N]> Compute for ByLine<'_, N, F> {
    #[inline(always)]
    fn run(self, vectors: impl Vectors) {
        let ByLine(Lines { operands, results, lines }, f) = self;
        let Some((first, others)) = operands.split_first() else { return };
        for i in 0..lines {
            let Some(mut line) = first.line(i, vectors) else { return };
            for other in others {
                let Some(other) = other.line(i, vectors) else { return };
                Blocks(&mut line, &other).over(&f);
            }
            for result in results {
                result.set_line(i, line, vectors);
            }
        }
    }
}

/// Of integers, which wrap around.
macro_rules! integers {
    ($type:ty, $op:expr, $pass:expr) => {{
        let (from, to) = (<$type>::from_ne_bytes, <$type>::to_ne_bytes);
        match $op {
            Op::Sum => $pass.over(|a, b| to(from(a).wrapping_add(from(b)))),
            Op::Product => $pass.over(|a, b| to(from(a).wrapping_mul(from(b)))),
            Op::Min => $pass.over(|a, b| to(from(a).min(from(b)))),
            Op::Max => $pass.over(|a, b| to(from(a).max(from(b)))),
        }
    }};
}

/// Of floats, in single precision where they are half as long. Of a number and none, the first that is none wins.
macro_rules! floats {
    ($type:ty, $op:expr, $pass:expr, $wide:expr, $narrow:expr) => {{
        let (from, to) = (<$type>::from_ne_bytes, <$type>::to_ne_bytes);
        let (wide, narrow) = ($wide, $narrow);
        match $op {
            Op::Sum => $pass.over(|a, b| to(narrow(wide(from(a)) + wide(from(b))))),
            Op::Product => $pass.over(|a, b| to(narrow(wide(from(a)) * wide(from(b))))),
            Op::Min => {
                $pass.over(|a, b| if wide(from(b)) < wide(from(a)) || (wide(from(b)).is_nan() && !wide(from(a)).is_nan()) { b } else { a })
            }
            Op::Max => {
                $pass.over(|a, b| if wide(from(b)) > wide(from(a)) || (wide(from(b)).is_nan() && !wide(from(a)).is_nan()) { b } else { a })
            }
        }
    }};
}

/// One pass of one of our own operations.
fn run(data_type: DataType, op: Op, pass: impl Pass) {
    match data_type {
        DataType::I8 => integers!(i8, op, pass),
        DataType::U8 => integers!(u8, op, pass),
        DataType::I32 => integers!(i32, op, pass),
        DataType::U32 => integers!(u32, op, pass),
        DataType::I64 => integers!(i64, op, pass),
        DataType::U64 => integers!(u64, op, pass),
        DataType::F32 => floats!(f32, op, pass, |x: f32| x, |x: f32| x),
        DataType::F64 => floats!(f64, op, pass, |x: f64| x, |x: f64| x),
        DataType::F16 => floats!(f16, op, pass, f16::to_f32, f16::from_f32),
        DataType::Bf16 => floats!(bf16, op, pass, bf16::to_f32, bf16::from_f32),
    }
}

impl Reduction<'_> {
    /// Bytes of an element.
    pub fn element(&self) -> usize {
        match self {
            Reduction::Of(data_type, _) => data_type.size(),
            Reduction::Custom(size, _) => *size,
        }
    }

    /// The results, which may be operands, become the reduction of the operands, in this order. Where it is the same on all ranks, so are the bits: of
    /// equal ones, 0.0 and -0.0, the first wins. All have as many bytes.
    pub(super) fn reduce(&self, operands: &[RegionView<'_>], results: &[RegionView<'_>]) {
        let len = operands.iter().chain(results).map(RegionView::len).min().unwrap_or(0);
        let lines = match self {
            Reduction::Of(data_type, op) if len >= LINE => {
                run(*data_type, *op, Lines { operands, results, lines: len / LINE });
                len / LINE
            }
            _ => 0,
        };
        match lines * LINE..len {
            none if none.is_empty() => {}
            // A long block takes longer to clear than a few elements to reduce.
            few if few.len() <= LINE => self.blocks::<LINE>(operands, results, few),
            rest => self.blocks::<BLOCK>(operands, results, rest),
        }
    }

    /// Block by block, of `N` bytes: elements have no more.
    fn blocks<const N: usize>(&self, operands: &[RegionView<'_>], results: &[RegionView<'_>], range: Range<usize>) {
        let (mut reduced, mut next) = (Block([0; N]), Block([0; N]));
        let step = (N - N % self.element().max(1)).max(1);
        for offset in (range.start..range.end).step_by(step) {
            let len = step.min(range.end - offset);
            let (Some(reduced), Some(next)) = (reduced.0.get_mut(..len), next.0.get_mut(..len)) else { return };
            for (i, operand) in operands.iter().filter_map(|view| view.part(offset, len)).enumerate() {
                if i == 0 {
                    operand.read(reduced);
                } else {
                    operand.read(next);
                    self.block(reduced, next);
                }
            }
            results.iter().filter_map(|view| view.part(offset, len)).for_each(|result| result.write(reduced));
        }
    }

    /// The reduction of two small messages of the same length.
    pub(super) fn small(&self, a: &Small, b: &Small) -> Small {
        let (mut reduced, next) = (Block(*a.padded()), Block(*b.padded()));
        let len = a.len().min(b.len());
        let (Some(reduced), Some(next)) = (reduced.0.get_mut(..len), next.0.get(..len)) else { return Small::NONE };
        self.block(reduced, next);
        Small::new(len, |bytes| bytes.copy_from_slice(reduced)).unwrap_or(Small::NONE)
    }

    fn block(&self, a: &mut [u8], b: &[u8]) {
        match self {
            Reduction::Custom(_, function) => function(a, b),
            Reduction::Of(data_type, op) => run(*data_type, *op, Blocks(a, b)),
        }
    }
}
