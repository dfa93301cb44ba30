//! `railhead_buffer_*` and `railhead_unbound_*`, for C programs: memory that messages go to and come from. Casts and checks; what the operations do is
//! `mesh`'s business. On the threads of the host program, which a wait may block up to its timeout.

// What callers owe stands in the header's words, which are these functions' documentation: C's callers do not read "# Safety".
#![allow(clippy::missing_safety_doc)]

use std::ffi::{c_int, c_void};
use std::sync::Arc;
use std::time::Duration;

use crate::abi::boundary::{Out, slice};
use crate::abi::mesh::{Object, railhead_mesh_t, the};
use crate::abi::objects::Objects;
use crate::abi::status::{call, railhead_status_t};
use crate::base::error::{Error, Result};
use crate::base::mem::UserMemory;
use crate::mesh::{Buffer, UnboundBuffer, Waited};

/// One end of a slot between two ranks: an opaque handle, ended by railhead_buffer_close. Threads: any, several at a time.
#[allow(non_camel_case_types)]
pub struct railhead_buffer_t(());

/// Memory for messages with tags: an opaque handle, ended by railhead_unbound_close. Threads: any, several at a time.
#[allow(non_camel_case_types)]
pub struct railhead_unbound_t(());

/// As a number of bytes: all there are from the offset on. The header has it from build.rs.
pub const RAILHEAD_REST: usize = usize::MAX;

/// Behind a handle.
struct Bound {
    buffer: Buffer,
    timeout: Duration,
}

/// Behind a handle.
struct Unbound {
    buffer: UnboundBuffer,
    mesh: Arc<Object>,
}

static BUFFERS: Objects<Bound> = Objects::new(0xb9, "buffer");
static UNBOUND: Objects<Unbound> = Objects::new(0xba, "unbound buffer");

/// Makes the sending end of a slot: `bytes` at `memory`, of which messages are sent into the buffer that `peer` has for this slot and this rank. Both ends may
/// be made in any order.
///
/// `slot`: any number; between two ranks, each way, one buffer at a time has it. The memory must stay until railhead_buffer_close.
///
/// RAILHEAD_USAGE: a rank that is not another one, or a slot that another buffer of this rank sends to; RAILHEAD_NETWORK: the rank is lost.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn railhead_buffer_send_to(
    mesh: *mut railhead_mesh_t,
    peer: i64,
    slot: u64,
    memory: *const c_void,
    bytes: usize,
    buffer: *mut *mut railhead_buffer_t,
) -> railhead_status_t {
    // SAFETY: the header asks the caller for memory, and for a place for a handle.
    call(|| unsafe {
        let (out, object) = (Out::new(buffer, "buffer")?, the(mesh)?);
        let memory = given(memory.cast_mut(), bytes)?;
        let buffer = Buffer::send_to(&object.mesh, object.rank("peer", peer)?, slot, memory)?;
        out.set(BUFFERS.insert(Bound { buffer, timeout: object.timeout }));
        Ok(())
    })
}

/// Makes the receiving end of a slot: `peer` may write to the memory from now until railhead_buffer_close.
///
/// RAILHEAD_USAGE: a rank that is not another one, or a slot that another buffer of this rank receives into; RAILHEAD_NETWORK: the rank is lost.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn railhead_buffer_recv_from(
    mesh: *mut railhead_mesh_t,
    peer: i64,
    slot: u64,
    memory: *mut c_void,
    bytes: usize,
    buffer: *mut *mut railhead_buffer_t,
) -> railhead_status_t {
    // SAFETY: the header asks the caller for memory, and for a place for a handle.
    call(|| unsafe {
        let (out, object) = (Out::new(buffer, "buffer")?, the(mesh)?);
        let buffer = Buffer::recv_from(&object.mesh, object.rank("peer", peer)?, slot, given(memory, bytes)?)?;
        out.set(BUFFERS.insert(Bound { buffer, timeout: object.timeout }));
        Ok(())
    })
}

/// Sends `bytes` (or RAILHEAD_REST) at `offset` of the buffer to `remote_offset` of the peer's. Returns at once; the bytes must not change before
/// railhead_buffer_wait_send has told of it. Messages of a slot come in the order in which they were sent.
///
/// RAILHEAD_USAGE: bytes outside the buffer, or a buffer that receives. What does not fit into the peer's is said by the wait.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn railhead_buffer_send(
    buffer: *mut railhead_buffer_t,
    offset: usize,
    bytes: usize,
    remote_offset: usize,
) -> railhead_status_t {
    call(|| Ok(BUFFERS.get(buffer)?.buffer.send(offset, part(bytes), remote_offset as u64)?))
}

/// Waits until one of the sends of this buffer is done, which no wait has told of yet.
///
/// `timeout_ms`: 0 or less: what the mesh was given. RAILHEAD_TIMEOUT: nothing was done in time, and the mesh has failed; RAILHEAD_NETWORK: the rank is
/// lost; RAILHEAD_USAGE: the message did not fit into the peer's buffer, or this one was closed meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn railhead_buffer_wait_send(buffer: *mut railhead_buffer_t, timeout_ms: i64) -> railhead_status_t {
    call(|| {
        let bound = BUFFERS.get(buffer)?;
        bound.buffer.wait_send(bound.time(timeout_ms))?;
        Ok(())
    })
}

/// Waits until a message is in the buffer which no wait has told of yet.
///
/// `timeout_ms` and errors: as for railhead_buffer_wait_send.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn railhead_buffer_wait_recv(buffer: *mut railhead_buffer_t, timeout_ms: i64) -> railhead_status_t {
    call(|| {
        let bound = BUFFERS.get(buffer)?;
        bound.buffer.wait_recv(bound.time(timeout_ms))?;
        Ok(())
    })
}

/// Ends a buffer. What was asked for and has not begun is not sent any more; what is on its way is waited for. Afterwards nobody reads or writes the memory.
///
/// RAILHEAD_TIMEOUT: the peer did not answer within the mesh's time, and the mesh has failed. The buffer is closed in any case.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn railhead_buffer_close(buffer: *mut railhead_buffer_t) -> railhead_status_t {
    call(|| {
        let bound = BUFFERS.remove(buffer)?;
        Ok(bound.buffer.close(bound.timeout)?)
    })
}

/// Makes a buffer of `bytes` at `memory`, which must stay until railhead_unbound_close.
///
/// RAILHEAD_SYSTEM: memory that cannot be registered.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn railhead_unbound_create(
    mesh: *mut railhead_mesh_t,
    memory: *mut c_void,
    bytes: usize,
    buffer: *mut *mut railhead_unbound_t,
) -> railhead_status_t {
    // SAFETY: the header asks the caller for memory, and for a place for a handle.
    call(|| unsafe {
        let (out, mesh) = (Out::new(buffer, "buffer")?, the(mesh)?);
        let buffer = UnboundBuffer::new(&mesh.mesh, given(memory, bytes)?)?;
        out.set(UNBOUND.insert(Unbound { buffer, mesh }));
        Ok(())
    })
}

/// Sends `bytes` (or RAILHEAD_REST) at `offset` to `rank`, which receives as many with this tag: between two ranks, the first sent with a tag is the first
/// received with it. Any tag will do; collectives have others. Returns at once; the bytes must not change before railhead_unbound_wait_send has told
/// of it.
///
/// RAILHEAD_USAGE: bytes outside the buffer, or a rank that is not another one; RAILHEAD_NETWORK: it is lost.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn railhead_unbound_send(
    buffer: *mut railhead_unbound_t,
    rank: i64,
    tag: u64,
    offset: usize,
    bytes: usize,
) -> railhead_status_t {
    call(|| {
        let unbound = UNBOUND.get(buffer)?;
        Ok(unbound.buffer.send(unbound.mesh.rank("rank", rank)?, tag, offset, part(bytes))?)
    })
}

/// Receives a message of just `bytes` (or RAILHEAD_REST) with this tag to `offset`, from whichever of the `count` ranks at `ranks` has one first. Returns at
/// once. Two receives whose bytes overlap must not be outstanding together.
///
/// RAILHEAD_USAGE: bytes outside the buffer, no rank, or one that is not another one; RAILHEAD_NETWORK: all of them are lost.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn railhead_unbound_recv(
    buffer: *mut railhead_unbound_t,
    ranks: *const i64,
    count: usize,
    tag: u64,
    offset: usize,
    bytes: usize,
) -> railhead_status_t {
    // SAFETY: the header asks the caller for so many ranks.
    call(|| unsafe {
        let unbound = UNBOUND.get(buffer)?;
        let ranks = slice(ranks, count, "ranks")?.iter().map(|rank| unbound.mesh.rank("ranks", *rank)).collect::<Result<Vec<_>>>()?;
        Ok(unbound.buffer.recv(&ranks, tag, offset, part(bytes))?)
    })
}

/// Waits until one of the sends of this buffer is done, which no wait has told of yet. `rank` (may be NULL) becomes the one that it went to.
///
/// `timeout_ms`: 0 or less: what the mesh was given. RAILHEAD_ABORTED: railhead_unbound_abort_send was called; RAILHEAD_TIMEOUT: nothing was done in time,
/// and the mesh has failed; RAILHEAD_NETWORK: a rank that is waited for is lost; RAILHEAD_USAGE: a rank receives another number of bytes, or the buffer was
/// closed meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn railhead_unbound_wait_send(buffer: *mut railhead_unbound_t, rank: *mut i64, timeout_ms: i64) -> railhead_status_t {
    // SAFETY: the header asks the caller for a place, or NULL.
    unsafe { wait(rank, || UNBOUND.get(buffer).and_then(|unbound| unbound.buffer.wait_send(unbound.mesh.time(timeout_ms)))) }
}

/// Waits until one of the receives of this buffer is done, which no wait has told of yet. `rank` (may be NULL) becomes the one that sent.
///
/// `timeout_ms` and errors: as for railhead_unbound_wait_send, and railhead_unbound_abort_recv.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn railhead_unbound_wait_recv(buffer: *mut railhead_unbound_t, rank: *mut i64, timeout_ms: i64) -> railhead_status_t {
    // SAFETY: the header asks the caller for a place, or NULL.
    unsafe { wait(rank, || UNBOUND.get(buffer).and_then(|unbound| unbound.buffer.wait_recv(unbound.mesh.time(timeout_ms)))) }
}

/// Whether one of the sends of this buffer is done, which neither a wait nor this has told of yet: `done` becomes 1, and `rank` (may be NULL) the one that
/// it went to; or else 0. Returns at once.
///
/// Errors: as for railhead_unbound_wait_send, but for the time and an abort.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn railhead_unbound_test_send(
    buffer: *mut railhead_unbound_t,
    rank: *mut i64,
    done: *mut c_int,
) -> railhead_status_t {
    // SAFETY: the header asks the caller for a place, and for another, or NULL.
    unsafe { test(rank, done, || UNBOUND.get(buffer).and_then(|unbound| unbound.buffer.test_send())) }
}

/// Whether one of the receives of this buffer is done, which neither a wait nor this has told of yet: `done` becomes 1, and `rank` (may be NULL) the one
/// that sent; or else 0. Returns at once.
///
/// Errors: as for railhead_unbound_wait_recv, but for the time and an abort.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn railhead_unbound_test_recv(
    buffer: *mut railhead_unbound_t,
    rank: *mut i64,
    done: *mut c_int,
) -> railhead_status_t {
    // SAFETY: the header asks the caller for a place, and for another, or NULL.
    unsafe { test(rank, done, || UNBOUND.get(buffer).and_then(|unbound| unbound.buffer.test_recv())) }
}

/// Ends one railhead_unbound_wait_send with RAILHEAD_ABORTED: the one that goes on, or else the next. What it waited for is outstanding still.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn railhead_unbound_abort_send(buffer: *mut railhead_unbound_t) -> railhead_status_t {
    call(|| {
        UNBOUND.get(buffer)?.buffer.abort_send();
        Ok(())
    })
}

/// Ends one railhead_unbound_wait_recv with RAILHEAD_ABORTED: the one that goes on, or else the next. What it waited for is outstanding still.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn railhead_unbound_abort_recv(buffer: *mut railhead_unbound_t) -> railhead_status_t {
    call(|| {
        UNBOUND.get(buffer)?.buffer.abort_recv();
        Ok(())
    })
}

/// Ends a buffer. Sends and receives that nothing has come of are taken back; what is on its way is waited for. Afterwards nobody reads or writes the memory.
///
/// RAILHEAD_TIMEOUT: a rank did not answer within the mesh's time, and the mesh has failed. The buffer is closed in any case.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn railhead_unbound_close(buffer: *mut railhead_unbound_t) -> railhead_status_t {
    call(|| {
        let unbound = UNBOUND.remove(buffer)?;
        Ok(unbound.buffer.close(unbound.mesh.timeout)?)
    })
}

impl Bound {
    fn time(&self, ms: i64) -> Duration {
        crate::abi::mesh::milliseconds(ms).unwrap_or(self.timeout)
    }
}

/// # Safety
/// Unless NULL, `memory` must be valid for what is done to so many bytes until the buffer is closed.
unsafe fn given(memory: *mut c_void, bytes: usize) -> Result<UserMemory> {
    if memory.is_null() && bytes > 0 {
        return Err(Error::internal("argument 'memory' is NULL"));
    }
    if bytes > isize::MAX as usize {
        return Err(Error::usage(format!("bytes: {bytes}; more than memory has")));
    }
    // SAFETY: the caller's promise.
    Ok(unsafe { UserMemory::new(memory.cast(), bytes) })
}

fn part(bytes: usize) -> Option<usize> {
    (bytes != RAILHEAD_REST).then_some(bytes)
}

/// # Safety
/// Unless NULL or misaligned, `rank` must be valid for writes.
unsafe fn wait(rank: *mut i64, waited: impl FnOnce() -> Result<Waited>) -> railhead_status_t {
    let mut aborted = false;
    let status = call(|| {
        // SAFETY: the caller's promise.
        let out = unsafe { Out::optional(rank, "rank") }?;
        match waited()? {
            Waited::Done { rank, .. } => {
                if let Some(out) = out {
                    out.set(rank as i64);
                }
            }
            Waited::Aborted => aborted = true,
        }
        Ok(())
    });
    if aborted { railhead_status_t::RAILHEAD_ABORTED } else { status }
}

/// # Safety
/// Unless NULL or misaligned, `rank` and `done` must be valid for writes.
unsafe fn test(rank: *mut i64, done: *mut c_int, tested: impl FnOnce() -> Result<Option<Waited>>) -> railhead_status_t {
    call(|| {
        // SAFETY: the caller's promise.
        let (rank_out, done) = unsafe { (Out::optional(rank, "rank")?, Out::new(done, "done")?) };
        let tested = tested()?;
        done.set(tested.is_some().into());
        if let (Some(Waited::Done { rank, .. }), Some(out)) = (tested, rank_out) {
            out.set(rank as i64);
        }
        Ok(())
    })
}
