//! Element types and reductions. Pure; any thread.
//!
//! Peers may write to what is reduced, so blocks of it are copied out, reduced, and copied back: they stay in the first-level cache meanwhile.

use half::{bf16, f16};

use crate::fabric::RegionView;

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

/// The same where there is no more than this: a long block takes longer to clear than a few elements to reduce.
const SHORT_BLOCK: usize = 64;

/// Aligned for whatever a caller's function takes its elements for.
#[repr(align(64))]
struct Block<const N: usize>([u8; N]);

/// Bytes of an element of a caller's own at most: some fit a block.
pub(super) const MAX_ELEMENT: usize = BLOCK;

/// Which of two operands comes first. The order is the same on all ranks, so the bits of the result are, too, where an operation minds it: the lesser of
/// 0.0 and -0.0, say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Order {
    MineFirst,
    TheirsFirst,
}

/// Replaces each element of `a`.
#[inline(always)]
fn each<const N: usize>(a: &mut [u8], b: &[u8], f: impl Fn([u8; N], [u8; N]) -> [u8; N]) {
    let (a, _) = a.as_chunks_mut::<N>();
    let (b, _) = b.as_chunks::<N>();
    for (a, b) in a.iter_mut().zip(b) {
        *a = f(*a, *b);
    }
}

/// Of integers, which wrap around.
macro_rules! integers {
    ($type:ty, $op:expr, $a:expr, $b:expr) => {{
        let (from, to) = (<$type>::from_ne_bytes, <$type>::to_ne_bytes);
        match $op {
            Op::Sum => each($a, $b, |a, b| to(from(a).wrapping_add(from(b)))),
            Op::Product => each($a, $b, |a, b| to(from(a).wrapping_mul(from(b)))),
            Op::Min => each($a, $b, |a, b| to(from(a).min(from(b)))),
            Op::Max => each($a, $b, |a, b| to(from(a).max(from(b)))),
        }
    }};
}

/// Of floats, in single precision where they are half as long. Of a number and none, the first that is none wins.
macro_rules! floats {
    ($type:ty, $op:expr, $a:expr, $b:expr, $wide:expr, $narrow:expr) => {{
        let (from, to) = (<$type>::from_ne_bytes, <$type>::to_ne_bytes);
        let (wide, narrow) = ($wide, $narrow);
        match $op {
            Op::Sum => each($a, $b, |a, b| to(narrow(wide(from(a)) + wide(from(b))))),
            Op::Product => each($a, $b, |a, b| to(narrow(wide(from(a)) * wide(from(b))))),
            Op::Min => {
                each(
                    $a,
                    $b,
                    |a, b| if wide(from(b)) < wide(from(a)) || (wide(from(b)).is_nan() && !wide(from(a)).is_nan()) { b } else { a },
                )
            }
            Op::Max => {
                each(
                    $a,
                    $b,
                    |a, b| if wide(from(b)) > wide(from(a)) || (wide(from(b)).is_nan() && !wide(from(a)).is_nan()) { b } else { a },
                )
            }
        }
    }};
}

impl Reduction<'_> {
    /// Bytes of an element.
    pub fn element(&self) -> usize {
        match self {
            Reduction::Of(data_type, _) => data_type.size(),
            Reduction::Custom(size, _) => *size,
        }
    }

    /// `mine` becomes the reduction of itself and of as much of `theirs`.
    pub(super) fn apply(&self, mine: RegionView<'_>, theirs: RegionView<'_>, order: Order) {
        if mine.len() <= SHORT_BLOCK { self.blocks::<SHORT_BLOCK>(mine, theirs, order) } else { self.blocks::<BLOCK>(mine, theirs, order) }
    }

    /// Block by block, of `N` bytes: elements have no more.
    fn blocks<const N: usize>(&self, mine: RegionView<'_>, theirs: RegionView<'_>, order: Order) {
        let (mut a, mut b) = (Block([0; N]), Block([0; N]));
        let step = N - N % self.element().max(1);
        for offset in (0..mine.len()).step_by(step.max(1)) {
            let len = step.min(mine.len() - offset);
            let (Some(block), Some(other)) = (mine.part(offset, len), theirs.part(offset, len)) else { return };
            let (Some(a), Some(b)) = (a.0.get_mut(..len), b.0.get_mut(..len)) else { return };
            block.read(a);
            other.read(b);
            match order {
                Order::MineFirst => {
                    self.block(a, b);
                    block.write(a);
                }
                Order::TheirsFirst => {
                    self.block(b, a);
                    block.write(b);
                }
            }
        }
    }

    fn block(&self, a: &mut [u8], b: &[u8]) {
        match self {
            Reduction::Custom(_, function) => function(a, b),
            Reduction::Of(data_type, op) => match data_type {
                DataType::I8 => integers!(i8, *op, a, b),
                DataType::U8 => integers!(u8, *op, a, b),
                DataType::I32 => integers!(i32, *op, a, b),
                DataType::U32 => integers!(u32, *op, a, b),
                DataType::I64 => integers!(i64, *op, a, b),
                DataType::U64 => integers!(u64, *op, a, b),
                DataType::F32 => floats!(f32, *op, a, b, |x: f32| x, |x: f32| x),
                DataType::F64 => floats!(f64, *op, a, b, |x: f64| x, |x: f64| x),
                DataType::F16 => floats!(f16, *op, a, b, f16::to_f32, f16::from_f32),
                DataType::Bf16 => floats!(bf16, *op, a, b, bf16::to_f32, bf16::from_f32),
            },
        }
    }
}
