//! The collectives, for C programs. Casts and checks; what they do is `mesh`'s business. On the threads of the host program, which a collective may
//! block up to its timeout.

// What callers owe stands in the header's words, which are these functions' documentation: C's callers do not read "# Safety".
#![allow(clippy::missing_safety_doc)]

use std::ffi::c_void;
use std::sync::Arc;

use crate::abi::boundary::{read, slice};
use crate::abi::mesh::{Object, railhead_mesh_t, sized, the};
use crate::abi::status::{call, railhead_status_t};
use crate::abi::store::convert::User;
use crate::base::error::{Error, Result};
use crate::base::mem::{self, UserMemory};
use crate::mesh::{Algorithm, DataType, Mesh, Op, Options, Reduction};

/// Type of the elements of a collective.
#[allow(non_camel_case_types)]
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub enum railhead_dtype_t {
    /// 8 bits, signed.
    RAILHEAD_I8 = 0,
    /// 8 bits, unsigned.
    RAILHEAD_U8 = 1,
    /// 32 bits, signed.
    RAILHEAD_I32 = 2,
    /// 32 bits, unsigned.
    RAILHEAD_U32 = 3,
    /// 64 bits, signed.
    RAILHEAD_I64 = 4,
    /// 64 bits, unsigned.
    RAILHEAD_U64 = 5,
    /// IEEE binary16.
    RAILHEAD_F16 = 6,
    /// bfloat16.
    RAILHEAD_BF16 = 7,
    /// IEEE binary32.
    RAILHEAD_F32 = 8,
    /// IEEE binary64.
    RAILHEAD_F64 = 9,
}

/// How elements are reduced. Integers wrap around; of a number and none, the result is none.
#[allow(non_camel_case_types)]
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub enum railhead_op_t {
    /// Their sum.
    RAILHEAD_SUM = 0,
    /// Their product.
    RAILHEAD_PRODUCT = 1,
    /// The least.
    RAILHEAD_MIN = 2,
    /// The greatest.
    RAILHEAD_MAX = 3,
    /// What the caller's own function says.
    RAILHEAD_CUSTOM = 1000,
}

/// How an allreduce is done.
#[allow(non_camel_case_types)]
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub enum railhead_algorithm_t {
    /// Whichever is faster for so many bytes.
    RAILHEAD_AUTO = 0,
    /// Around a ring.
    RAILHEAD_RING = 1,
    /// By recursive doubling.
    RAILHEAD_DOUBLING = 2,
    /// By recursive halving and doubling; around a ring, if the number of ranks is no power of two, or for more than 1 GiB.
    RAILHEAD_HALVING = 3,
    /// Straight between all ranks.
    RAILHEAD_DIRECT = 4,
}

/// A caller's own reduction: `count` elements at `into` become those of both. It must be associative and commutative, as ranks' elements
/// are taken in any order, and must not throw; the elements at `from` are not
/// changed. Called on the thread that waits for the collective. The two do not overlap, are aligned for any type, and are not the
/// caller's memory.
#[allow(non_camel_case_types)]
pub type railhead_reduce_callback_t = Option<unsafe extern "C" fn(user: *mut c_void, into: *mut c_void, from: *const c_void, count: usize)>;

/// What collectives take. All of it but `timeout_ms`, `custom` and `user` is the same on all ranks.
#[allow(non_camel_case_types)]
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct railhead_collective_t {
    /// sizeof(railhead_collective_t).
    pub size: usize,
    /// Tells it from other collectives that run at once on the mesh.
    pub tag: u32,
    /// A railhead_dtype_t.
    pub dtype: u32,
    /// A railhead_op_t.
    pub op: u32,
    /// A railhead_algorithm_t, for an allreduce.
    pub algorithm: u32,
    /// The rank from which or to which all goes, where there is one.
    pub root: i64,
    /// How long it may take; 0 or less: what the mesh was given.
    pub timeout_ms: i64,
    /// For RAILHEAD_CUSTOM.
    pub custom: railhead_reduce_callback_t,
    /// Handed to `custom`.
    pub user: *mut c_void,
}

const _: () = assert!(size_of::<railhead_collective_t>() == 56 && std::mem::offset_of!(railhead_collective_t, custom) == 40);

/// `count` elements at `out` become the reduction of those at `in` of all ranks, with the same bits on each. `in` and `out` may be the same; where they
/// are not, `in` is not changed.
///
/// Of this and all other collectives: every rank calls it, with the same counts and collective. The memory may be any of the process, and is the library's
/// until the call returns. RAILHEAD_USAGE, before anything is sent: a number that is none of its kind, counts that do not fit together. After any other
/// error the mesh has failed: RAILHEAD_NETWORK names the rank that is lost, RAILHEAD_TIMEOUT those that are waited for; RAILHEAD_USAGE: a rank gave another
/// count.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn railhead_allreduce(
    mesh: *mut railhead_mesh_t,
    collective: *const railhead_collective_t,
    r#in: *const c_void,
    out: *mut c_void,
    count: usize,
) -> railhead_status_t {
    // SAFETY: the header asks the caller for a collective, and for `count` elements in two places.
    call(|| unsafe {
        let asked = Asked::new(mesh, collective)?;
        let (from, to) = (asked.input(r#in, count)?, asked.output(out, count)?);
        asked.reduce(|mesh, reduction| {
            if from.addr() != to.addr() {
                // Both hold as many bytes, as the caller says; they may overlap.
                mem::copy(from.addr() as *const u8, to.addr() as *mut u8, to.len());
            }
            mesh.allreduce(to, reduction, asked.options)
        })
    })
}

/// `count` elements at `out` of the root become the reduction of those at `in` of all ranks. `out` of the others may be NULL. `in` and `out` may be the same
/// on the root.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn railhead_reduce(
    mesh: *mut railhead_mesh_t,
    collective: *const railhead_collective_t,
    r#in: *const c_void,
    out: *mut c_void,
    count: usize,
) -> railhead_status_t {
    // SAFETY: the header asks the caller for a collective, and for `count` elements in two places, of which other ranks need the first alone.
    call(|| unsafe {
        let asked = Asked::new(mesh, collective)?;
        let (from, to) = (asked.input(r#in, count)?, asked.output(out, asked.at_root(count)?)?);
        asked.reduce(|mesh, reduction| mesh.reduce(from, to, reduction, asked.root()?, asked.options))
    })
}

/// `counts[rank]` elements at `out` of each rank become its part of the reduction of all ranks' `in`, where the parts lie one behind the other.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn railhead_reduce_scatter(
    mesh: *mut railhead_mesh_t,
    collective: *const railhead_collective_t,
    r#in: *const c_void,
    out: *mut c_void,
    counts: *const usize,
) -> railhead_status_t {
    // SAFETY: the header asks the caller for a collective, a count per rank, and as many elements in two places.
    call(|| unsafe {
        let asked = Asked::new(mesh, collective)?;
        let lens = asked.lens(counts, "counts")?;
        let (from, to) = (asked.bytes(r#in.cast_mut(), "in", total(&lens)?)?, asked.bytes(out, "out", asked.own(&lens))?);
        asked.reduce(|mesh, reduction| mesh.reduce_scatter(from, to, &lens, reduction, asked.options))
    })
}

/// `count` elements at `memory` become those of the root.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn railhead_broadcast(
    mesh: *mut railhead_mesh_t,
    collective: *const railhead_collective_t,
    memory: *mut c_void,
    count: usize,
) -> railhead_status_t {
    // SAFETY: the header asks the caller for a collective, and for `count` elements.
    call(|| unsafe {
        let asked = Asked::new(mesh, collective)?;
        let memory = asked.output(memory, count)?;
        Ok(asked.object.mesh.broadcast(memory, asked.root()?, asked.options)?)
    })
}

/// `out` becomes the `counts[rank]` elements at `in` of each rank, one behind the other. This rank's may lie in their place in `out` already.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn railhead_allgather(
    mesh: *mut railhead_mesh_t,
    collective: *const railhead_collective_t,
    r#in: *const c_void,
    out: *mut c_void,
    counts: *const usize,
) -> railhead_status_t {
    // SAFETY: the header asks the caller for a collective, a count per rank, and as many elements in two places.
    call(|| unsafe {
        let asked = Asked::new(mesh, collective)?;
        let lens = asked.lens(counts, "counts")?;
        let (from, to) = (asked.bytes(r#in.cast_mut(), "in", asked.own(&lens))?, asked.bytes(out, "out", total(&lens)?)?);
        Ok(asked.object.mesh.allgather(from, to, &lens, asked.options)?)
    })
}

/// The elements at `in` are parts for each rank, one behind the other, of `send_counts[rank]` elements; `out` becomes the parts that each rank has for this
/// one, of `recv_counts[rank]`. The two do not overlap.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn railhead_alltoall(
    mesh: *mut railhead_mesh_t,
    collective: *const railhead_collective_t,
    r#in: *const c_void,
    out: *mut c_void,
    send_counts: *const usize,
    recv_counts: *const usize,
) -> railhead_status_t {
    // SAFETY: the header asks the caller for a collective, two counts per rank, and as many elements in two places.
    call(|| unsafe {
        let asked = Asked::new(mesh, collective)?;
        let (out_lens, in_lens) = (asked.lens(send_counts, "send_counts")?, asked.lens(recv_counts, "recv_counts")?);
        let (from, to) = (asked.bytes(r#in.cast_mut(), "in", total(&out_lens)?)?, asked.bytes(out, "out", total(&in_lens)?)?);
        Ok(asked.object.mesh.alltoall(from, to, &out_lens, &in_lens, asked.options)?)
    })
}

/// `out` of the root becomes the `counts[rank]` elements at `in` of each rank, one behind the other. `out` of the others may be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn railhead_gather(
    mesh: *mut railhead_mesh_t,
    collective: *const railhead_collective_t,
    r#in: *const c_void,
    out: *mut c_void,
    counts: *const usize,
) -> railhead_status_t {
    // SAFETY: the header asks the caller for a collective, a count per rank, and as many elements in two places.
    call(|| unsafe {
        let asked = Asked::new(mesh, collective)?;
        let lens = asked.lens(counts, "counts")?;
        let (from, to) = (asked.bytes(r#in.cast_mut(), "in", asked.own(&lens))?, asked.bytes(out, "out", asked.at_root(total(&lens)?)?)?);
        Ok(asked.object.mesh.gather(from, to, &lens, asked.root()?, asked.options)?)
    })
}

/// `counts[rank]` elements at `out` of each rank become its part of the root's `in`, where the parts lie one behind the other. `in` of the others may be
/// NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn railhead_scatter(
    mesh: *mut railhead_mesh_t,
    collective: *const railhead_collective_t,
    r#in: *const c_void,
    out: *mut c_void,
    counts: *const usize,
) -> railhead_status_t {
    // SAFETY: the header asks the caller for a collective, a count per rank, and as many elements in two places.
    call(|| unsafe {
        let asked = Asked::new(mesh, collective)?;
        let lens = asked.lens(counts, "counts")?;
        let (from, to) = (asked.bytes(r#in.cast_mut(), "in", asked.at_root(total(&lens)?)?)?, asked.bytes(out, "out", asked.own(&lens))?);
        Ok(asked.object.mesh.scatter(from, to, &lens, asked.root()?, asked.options)?)
    })
}

/// Returns once all ranks have called it. `collective` may be NULL; its element type and reduction are not looked at.
///
/// Errors: as railhead_allreduce.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn railhead_barrier(mesh: *mut railhead_mesh_t, collective: *const railhead_collective_t) -> railhead_status_t {
    // SAFETY: the header asks the caller for a collective or NULL.
    call(|| unsafe {
        let object = the(mesh)?;
        let collective = if collective.is_null() { None } else { Some(given(collective)?) };
        let options = options(&object, collective.as_ref())?;
        Ok(object.mesh.barrier(options)?)
    })
}

fn options(object: &Object, collective: Option<&railhead_collective_t>) -> Result<Options> {
    let Some(collective) = collective else {
        return Ok(Options { algorithm: Algorithm::Auto, tag: 0, timeout: object.timeout });
    };
    let algorithm = numbered("algorithm", collective.algorithm, &Algorithm::ALL)?;
    Ok(Options { algorithm, tag: collective.tag, timeout: object.time(collective.timeout_ms) })
}

/// What a collective was asked for.
struct Asked {
    object: Arc<Object>,
    collective: railhead_collective_t,
    element: DataType,
    options: Options,
}

impl Asked {
    /// # Safety
    /// Unless NULL or misaligned, `collective` must be valid for reads.
    unsafe fn new(mesh: *mut railhead_mesh_t, collective: *const railhead_collective_t) -> Result<Asked> {
        let object = the(mesh)?;
        // SAFETY: the caller's promise.
        let collective = unsafe { given(collective) }?;
        let options = options(&object, Some(&collective))?;
        let element = numbered("dtype", collective.dtype, &DataType::ALL)?;
        Ok(Asked { object, collective, element, options })
    }

    fn root(&self) -> Result<usize> {
        let root = usize::try_from(self.collective.root).ok().filter(|root| *root < self.object.mesh.size());
        root.ok_or_else(|| Error::usage(format!("root: {}; expected 0 to {}", self.collective.root, self.object.mesh.size() - 1)))
    }

    /// Elements of the root, or none.
    fn at_root(&self, count: usize) -> Result<usize> {
        Ok(if self.object.mesh.rank() == self.root()? { count } else { 0 })
    }

    /// This rank's bytes.
    fn own(&self, lens: &[usize]) -> usize {
        lens.get(self.object.mesh.rank()).copied().unwrap_or(0)
    }

    /// A count per rank, as bytes.
    ///
    /// # Safety
    /// Unless NULL or misaligned, `counts` must be valid for reads of a number per rank.
    unsafe fn lens(&self, counts: *const usize, what: &'static str) -> Result<Vec<usize>> {
        // SAFETY: the caller's promise.
        let counts = unsafe { slice(counts, self.object.mesh.size(), what) }?;
        counts.iter().map(|count| sized_in_bytes(*count, self.element.size())).collect()
    }

    /// # Safety
    /// Unless NULL, `memory` must be valid for reads of `count` elements until the call is over.
    unsafe fn input(&self, memory: *const c_void, count: usize) -> Result<UserMemory> {
        // SAFETY: the caller's promise; what is input is not written to.
        unsafe { self.bytes(memory.cast_mut(), "in", sized_in_bytes(count, self.element.size())?) }
    }

    /// # Safety
    /// Unless NULL, `memory` must be valid for writes of `count` elements until the call is over.
    unsafe fn output(&self, memory: *mut c_void, count: usize) -> Result<UserMemory> {
        // SAFETY: the caller's promise.
        unsafe { self.bytes(memory, "out", sized_in_bytes(count, self.element.size())?) }
    }

    /// # Safety
    /// Unless NULL, `memory` must be valid for what is done to so many bytes until the call is over.
    unsafe fn bytes(&self, memory: *mut c_void, what: &'static str, bytes: usize) -> Result<UserMemory> {
        if memory.is_null() && bytes > 0 {
            return Err(Error::internal(format!("argument '{what}' is NULL")));
        }
        // SAFETY: the caller's promise.
        Ok(unsafe { UserMemory::new(memory.cast(), bytes) })
    }

    /// Does what needs a reduction.
    fn reduce(&self, run: impl FnOnce(&Mesh, Reduction<'_>) -> Result<()>) -> crate::store::Result<()> {
        const CUSTOM: u32 = railhead_op_t::RAILHEAD_CUSTOM as u32;
        let (size, user) = (self.element.size(), User(self.collective.user));
        let mesh = &self.object.mesh;
        Ok(match (self.collective.op, self.collective.custom) {
            (CUSTOM, Some(custom)) => {
                let function = |into: &mut [u8], from: &[u8]| {
                    let user = &user;
                    // SAFETY: the caller gave the function for these arguments: as many elements in two places of ours.
                    unsafe { custom(user.0, into.as_mut_ptr().cast(), from.as_ptr().cast(), into.len() / size) };
                };
                run(mesh, Reduction::Custom(size, &function))
            }
            (CUSTOM, None) => Err(Error::usage("op: RAILHEAD_CUSTOM, and custom is NULL")),
            (op, _) => run(mesh, Reduction::Of(self.element, numbered("op", op, &Op::ALL)?)),
        }?)
    }
}

/// # Safety
/// Unless NULL or misaligned, `collective` must be valid for reads of as many bytes as its first field says.
unsafe fn given(collective: *const railhead_collective_t) -> Result<railhead_collective_t> {
    // SAFETY: the caller's promise; all of it is read only if it is as long as ours.
    unsafe {
        sized("collective", read(collective.cast(), "collective")?, size_of::<railhead_collective_t>())?;
        read(collective, "collective")
    }
}

fn sized_in_bytes(count: usize, size: usize) -> Result<usize> {
    let bytes = count.checked_mul(size).filter(|bytes| *bytes <= isize::MAX as usize);
    bytes.ok_or_else(|| Error::usage(format!("{count} elements of {size} bytes are more than memory has")))
}

fn total(lens: &[usize]) -> Result<usize> {
    let total = lens.iter().try_fold(0usize, |sum, len| sum.checked_add(*len)).filter(|total| *total <= isize::MAX as usize);
    total.ok_or_else(|| Error::usage("counts: more elements than memory has"))
}

fn numbered<T: Copy>(what: &str, number: u32, all: &[T]) -> Result<T> {
    all.get(number as usize).copied().ok_or_else(|| Error::usage(format!("{what}: {number}; expected 0 to {}", all.len() - 1)))
}
