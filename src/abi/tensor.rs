//! `railhead_tensor_*`, for C programs: named tensors that workers produce and consume, step by step. Casts and checks; what the operations do is
//! `tensor`'s business. On the threads of the host program, which a wait may block up to its timeout.

// What callers owe stands in the header's words, which are these functions' documentation: C's callers do not read "# Safety".
#![allow(clippy::missing_safety_doc)]

use std::ffi::{CString, c_char, c_void};
use std::ptr;
use std::time::Duration;

use crate::abi::boundary::{Out, bad_pointer, read};
use crate::abi::mesh::{milliseconds, sized};
use crate::abi::objects::Objects;
use crate::abi::status::{call, railhead_status_t};
use crate::abi::store::convert::{User, answer, bytes, text, texts, timeout};
use crate::abi::store::{found, railhead_bytes_t, railhead_store_t};
use crate::base::config::Config;
use crate::base::error::{Error, Result};
use crate::base::mem::UserMemory;
use crate::link::device::Device;
use crate::tensor::{Key, Manager, MemoryHandle, Mode, Rendezvous, Tensor};

/// A worker's end of the channels to all others: an opaque handle. Made by railhead_tensor_manager_create, ended by railhead_tensor_manager_close.
///
/// Threads: any, several at a time. In a forked child the parent's handles are refused.
#[allow(non_camel_case_types)]
pub struct railhead_tensor_manager_t(());

/// A step of a worker: an opaque handle. Made by railhead_tensor_step, ended by railhead_tensor_release. Threads: any, several at a time.
#[allow(non_camel_case_types)]
pub struct railhead_tensor_rendezvous_t(());

/// What keeps the bytes of a tensor that was received: an opaque handle.
#[allow(non_camel_case_types)]
pub struct railhead_tensor_owner_t(());

/// Memory that is registered for tensors: an opaque handle. Made by railhead_tensor_register, ended by railhead_tensor_deregister. Threads: any.
#[allow(non_camel_case_types)]
pub struct railhead_tensor_memory_t(());

/// How tensors go from worker to worker.
#[allow(non_camel_case_types)]
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub enum railhead_tensor_mode_t {
    /// Through a buffer of their name on either side: two copies.
    RAILHEAD_TENSOR_BUFFERED = 0,
    /// Straight from the producer's memory into the consumer's, if that of the producer is registered, or comes with a `release`.
    RAILHEAD_TENSOR_DIRECT = 1,
}

/// What railhead_tensor_manager_create takes.
#[allow(non_camel_case_types)]
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct railhead_tensor_config_t {
    /// sizeof(railhead_tensor_config_t).
    pub size: usize,
    /// This worker's name: one of `workers`. In keys it is what stands before "/device:".
    pub worker: *const c_char,
    /// The names of all workers, in any order: 1 to 512 bytes each, without a semicolon, and without "/device:".
    pub workers: *const *const c_char,
    /// How many there are.
    pub count: usize,
    /// What connecting may take; 0 or less: 30 s.
    pub timeout_ms: i64,
    /// 0: a tensor stays until its step is cleaned up, and may be received again, as TensorFlow has it; 1: it is received once.
    pub flags: u64,
    /// A railhead_tensor_mode_t, the same on all workers.
    pub mode: u64,
}

const _: () = assert!(size_of::<railhead_tensor_config_t>() == 56 && std::mem::offset_of!(railhead_tensor_config_t, mode) == 48);

/// Called once, with what stands beside it, when the bytes of a tensor are not needed any more. On a thread that calls railhead_tensor_manager_run or
/// _close; for a tensor that somebody still holds after that, railhead_tensor_free. May call any function of this header; must not throw.
#[allow(non_camel_case_types)]
pub type railhead_tensor_release_t = Option<unsafe extern "C" fn(user: *mut c_void)>;

/// A tensor.
#[allow(non_camel_case_types)]
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct railhead_tensor_t {
    /// sizeof(railhead_tensor_t).
    pub size: usize,
    /// A number of the users' own, such as TensorFlow's DataType: it is carried, and means nothing here.
    pub dtype: u32,
    /// How many dimensions there are: at most 16.
    pub rank: u32,
    /// The dimensions: 0 or more. They are carried as well.
    pub dims: [i64; 16],
    /// The contents.
    pub data: *const c_void,
    /// Their bytes: of one that goes to another worker, at most 1 GiB - 768.
    pub bytes: usize,
    /// Not 0: its producer has nothing to send, as of a branch that is not taken; there are no contents then, and no dimensions.
    pub is_dead: i32,
    /// Of one that was received, for railhead_tensor_free; NULL otherwise.
    pub owner: *mut railhead_tensor_owner_t,
    /// Of one that is sent: NULL, and `data` is copied; or `data` is the library's, and must not change, until this is called.
    pub release: railhead_tensor_release_t,
    /// What `release` is called with.
    pub user: *mut c_void,
}

const _: () = assert!(size_of::<railhead_tensor_t>() == 192 && std::mem::offset_of!(railhead_tensor_t, release) == 176);

/// The parts of a key, all of which are inside of it.
#[allow(non_camel_case_types)]
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct railhead_tensor_key_t {
    /// The producer's device.
    pub src_device: railhead_bytes_t,
    /// The consumer's.
    pub dst_device: railhead_bytes_t,
    /// Which of the tensors between them.
    pub edge: railhead_bytes_t,
    /// The incarnation of the producer's device.
    pub src_incarnation: u64,
    /// Of a loop.
    pub frame: u64,
    /// The time around it.
    pub iter: i64,
}

/// Called once with a tensor that was received, or with the reason why it does not come: `status` is RAILHEAD_OK and `why` is "", or `tensor` is
/// NULL. Both are the library's, until the callback returns. On a thread that calls railhead_tensor_manager_run or _close. May call any function of
/// this header; must not throw.
#[allow(non_camel_case_types)]
pub type railhead_tensor_callback_t =
    Option<unsafe extern "C" fn(user: *mut c_void, status: railhead_status_t, why: *const c_char, tensor: *const railhead_tensor_t)>;

/// The same for several tensors, in the order of their keys; `tensors` is NULL and `count` is 0 if one does not come.
#[allow(non_camel_case_types)]
pub type railhead_tensor_all_callback_t = Option<
    unsafe extern "C" fn(user: *mut c_void, status: railhead_status_t, why: *const c_char, tensors: *const railhead_tensor_t, count: usize),
>;

/// Behind a handle.
struct Object {
    manager: Manager,
    timeout: Duration,
}

static MANAGERS: Objects<Object> = Objects::new(0xbb, "tensor manager");
static STEPS: Objects<Rendezvous> = Objects::new(0xbc, "tensor rendezvous");
static OWNERS: Objects<Tensor> = Objects::new(0xbd, "tensor owner");
static MEMORIES: Objects<MemoryHandle> = Objects::new(0xc1, "tensor memory");

/// As for meshes.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(30);

/// Makes a worker's end, not connected yet. `device`: as for railhead_mesh_create.
///
/// RAILHEAD_USAGE: names that cannot be, a device that there is not, a size, flags or a mode of another version.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn railhead_tensor_manager_create(
    config: *const railhead_tensor_config_t,
    device: *const c_char,
    manager: *mut *mut railhead_tensor_manager_t,
) -> railhead_status_t {
    // SAFETY: the header asks the caller for a configuration with strings, a string or NULL, and a place for a handle.
    call(|| unsafe {
        let out = Out::new(manager, "manager")?;
        sized("config", read(config.cast(), "config")?, size_of::<railhead_tensor_config_t>())?;
        let config = read(config, "config")?;
        if config.flags > 1 {
            return Err(Error::usage(format!("flags: {:#x}; expected 0 or 1", config.flags)).into());
        }
        let mode = match config.mode {
            0 => Mode::Buffered,
            1 => Mode::Direct,
            other => return Err(Error::usage(format!("mode: {other}; expected 0 or 1")).into()),
        };
        let (worker, workers) = (text(config.worker, "worker")?, texts(config.workers, config.count)?);
        let device = Device::open(Config::from_env(), if device.is_null() { "" } else { text(device, "device")? })?;
        let manager = Manager::new(device, worker, &workers, config.flags == 0, mode)?;
        out.set(MANAGERS.insert(Object { manager, timeout: milliseconds(config.timeout_ms).unwrap_or(DEFAULT_TIMEOUT) }));
        Ok(())
    })
}

/// Connects to all other workers, each of which calls it, through a store whose keys nobody else uses (railhead_store_prefix makes one of any).
/// From then on a thread answers the others. After an error all workers may try again, with another prefix.
///
/// RAILHEAD_TIMEOUT: a worker did not come in time; RAILHEAD_USAGE: it is connected already, workers were given other names or modes, or are on
/// different fabrics; RAILHEAD_NETWORK: the store or a worker is lost, or of another release.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn railhead_tensor_manager_connect(
    manager: *mut railhead_tensor_manager_t,
    store: *mut railhead_store_t,
) -> railhead_status_t {
    call(|| {
        let (object, store) = (MANAGERS.get(manager)?, found(store)?);
        Ok(object.manager.connect(&*store, object.timeout)?)
    })
}

/// Runs the callbacks of receives that are over, on this thread; if there are none, it waits for the first, for at most `timeout_ms` (less than 0:
/// for ever). `ran`: how many it has run, or NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn railhead_tensor_manager_run(
    manager: *mut railhead_tensor_manager_t,
    timeout_ms: i64,
    ran: *mut usize,
) -> railhead_status_t {
    // SAFETY: the header asks the caller for a place or NULL.
    call(|| unsafe {
        let out = Out::optional(ran, "ran")?;
        let count = MANAGERS.get(manager)?.manager.run(timeout(timeout_ms));
        if let Some(out) = out {
            out.set(count);
        }
        Ok(())
    })
}

/// Ends a handle, and the connections to the other workers: what waits fails with RAILHEAD_USAGE, and callbacks that were not called are called
/// now. Those that other threads are calling are over when this returns, unless it is called by one of them while another thread closes the manager,
/// too. A worker that waits for this one gets RAILHEAD_NETWORK. It waits for a worker of this host that is in the middle of a write to this one's
/// memory, be it stopped. Steps are released by railhead_tensor_release, before or after.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn railhead_tensor_manager_close(manager: *mut railhead_tensor_manager_t) -> railhead_status_t {
    call(|| {
        MANAGERS.remove(manager)?.manager.close();
        Ok(())
    })
}

/// Finds a step, or makes it. What is received of it waits for railhead_tensor_initialize.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn railhead_tensor_step(
    manager: *mut railhead_tensor_manager_t,
    id: u64,
    rendezvous: *mut *mut railhead_tensor_rendezvous_t,
) -> railhead_status_t {
    // SAFETY: the header asks the caller for a place for a handle.
    call(|| unsafe { answer(rendezvous, "rendezvous", || Ok(STEPS.insert(MANAGERS.get(manager)?.manager.step(id)))) })
}

/// Lets what was asked for before begin.
///
/// RAILHEAD_USAGE: the step was cleaned up.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn railhead_tensor_initialize(rendezvous: *mut railhead_tensor_rendezvous_t) -> railhead_status_t {
    call(|| Ok(STEPS.get(rendezvous)?.initialize()?))
}

/// Registers memory, so that no tensor in it has to be, whoever sends it or receives into it: for memory that is used again and again. railhead_alloc
/// gives some that is faster yet on one host.
///
/// RAILHEAD_USAGE: no bytes, or some that are registered already; RAILHEAD_SYSTEM: memory that cannot be registered.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn railhead_tensor_register(
    manager: *mut railhead_tensor_manager_t,
    data: *mut c_void,
    bytes: usize,
    memory: *mut *mut railhead_tensor_memory_t,
) -> railhead_status_t {
    // SAFETY: the header asks the caller for memory that stays until it is deregistered, and for a place for a handle.
    call(|| unsafe {
        let out = Out::new(memory, "memory")?;
        let registered = MANAGERS.get(manager)?.manager.register(given(data, bytes)?)?;
        out.set(MEMORIES.insert(registered));
        Ok(())
    })
}

/// Ends that, before the memory is given away; before railhead_tensor_manager_close or after. Nobody reads or writes it afterwards.
///
/// RAILHEAD_USAGE: there are tensors in it that were not released, or not received yet; it stays registered.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn railhead_tensor_deregister(memory: *mut railhead_tensor_memory_t) -> railhead_status_t {
    call(|| {
        MEMORIES.get(memory)?.deregister()?;
        Ok(MEMORIES.remove(memory).map(drop)?)
    })
}

/// Produces a tensor. Never waits. Its contents are copied, or, with a `release`, sent from where they are: straight out of memory that is registered, or
/// that is so for this tensor (up to 16 KiB are copied instead).
///
/// RAILHEAD_USAGE: no key, or one whose producer is another worker; "Duplicated send"; the step was cleaned up; the manager is closed. The status
/// with which the step was aborted. After an error `release` is not called: the contents are the caller's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn railhead_tensor_send(
    rendezvous: *mut railhead_tensor_rendezvous_t,
    key: *const c_char,
    tensor: *const railhead_tensor_t,
) -> railhead_status_t {
    // SAFETY: the header asks the caller for a string, a tensor, as many bytes as that says, which stay until a release is called, and for a function
    // that may be called then.
    call(|| unsafe {
        let step = STEPS.get(rendezvous)?;
        sized("tensor", read(tensor.cast(), "tensor")?, size_of::<railhead_tensor_t>())?;
        let (given, key) = (read(tensor, "tensor")?, text(key, "key")?);
        let shape = given.dims.get(..given.rank as usize);
        let shape = shape.ok_or_else(|| Error::usage(format!("tensor: {} dimensions; at most {}", given.rank, given.dims.len())))?;
        if given.is_dead == 0 && given.bytes > isize::MAX as usize {
            return Err(Error::usage(format!("bytes: no memory for {}", given.bytes)).into());
        }
        let user = User(given.user);
        let release = given.release.map(|release| {
            move || {
                let user = &user;
                release(user.0);
            }
        });
        match release {
            Some(release) if given.is_dead != 0 => {
                step.send(key, Tensor::dead())?;
                step.release(Box::new(release));
            }
            None if given.is_dead != 0 => step.send(key, Tensor::dead())?,
            None => step.send_copy(key, given.dtype, shape, bytes(given.data, given.bytes, "data")?)?,
            Some(release) => {
                let memory = self::given(given.data.cast_mut(), given.bytes)?;
                step.send_from(key, given.dtype, shape, memory, Box::new(release))?;
            }
        }
        Ok(())
    })
}

/// Receives a tensor, which may not be produced yet, and waits for it for at most `timeout_ms` (0 or less: for ever). railhead_tensor_free gives it
/// back.
///
/// RAILHEAD_TIMEOUT: "Timed out waiting for notification"; RAILHEAD_USAGE: no key, or one whose consumer is another worker, or whose producer there
/// is not; the step was cleaned up, there too; the manager is closed. RAILHEAD_NETWORK: the producer's worker is lost. The status with which the
/// step was aborted, here or there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn railhead_tensor_recv(
    rendezvous: *mut railhead_tensor_rendezvous_t,
    key: *const c_char,
    timeout_ms: i64,
    tensor: *mut railhead_tensor_t,
) -> railhead_status_t {
    // SAFETY: the header asks the caller for a string and a place.
    call(|| unsafe {
        let out = Out::new(tensor, "tensor")?;
        let tensor = STEPS.get(rendezvous)?.recv(text(key, "key")?, milliseconds(timeout_ms).unwrap_or(Duration::MAX))?;
        let shown = shown(&tensor);
        out.set(railhead_tensor_t { owner: OWNERS.insert(tensor), ..shown });
        Ok(())
    })
}

/// The same into `bytes` at `data`, which become the tensor's `data`; there is nothing to free, and `owner` is NULL. Nobody writes there any more when this
/// returns: if its time is over, it waits until the producer's worker, which may be writing, has answered. In Direct mode the tensor is written there
/// by the producer, and memory of more than 16 KiB that is not registered is so for this call.
///
/// RAILHEAD_USAGE: the tensor has more bytes; and as for railhead_tensor_recv.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn railhead_tensor_recv_into(
    rendezvous: *mut railhead_tensor_rendezvous_t,
    key: *const c_char,
    data: *mut c_void,
    bytes: usize,
    timeout_ms: i64,
    tensor: *mut railhead_tensor_t,
) -> railhead_status_t {
    // SAFETY: the header asks the caller for a string, memory that is the library's during the call, and a place.
    call(|| unsafe {
        let (out, into) = (Out::new(tensor, "tensor")?, given(data, bytes)?);
        let step = STEPS.get(rendezvous)?;
        out.set(shown(&step.recv_into(text(key, "key")?, into, milliseconds(timeout_ms).unwrap_or(Duration::MAX))?));
        Ok(())
    })
}

/// Receives a tensor, for which `callback` is called with `user`, once. What goes wrong is said to the callback, as railhead_tensor_recv would.
///
/// RAILHEAD_USAGE: the manager is closed; the callback is not called then.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn railhead_tensor_recv_async(
    rendezvous: *mut railhead_tensor_rendezvous_t,
    key: *const c_char,
    callback: railhead_tensor_callback_t,
    user: *mut c_void,
) -> railhead_status_t {
    // SAFETY: the header asks the caller for a string, and for a function that may be called later on, on a thread of the caller's.
    call(|| unsafe {
        let callback = told(callback, user, false)?;
        Ok(STEPS.get(rendezvous)?.recv_async(text(key, "key")?, callback)?)
    })
}

/// Receives several tensors, for which `callback` is called with `user`, once, when the last of them has come or has failed. If any has failed, or its
/// producer had nothing to send ("The tensor returned for KEY was not valid."), it gets the first error and no tensor. The keys are copied.
///
/// RAILHEAD_USAGE: the manager is closed; the callback is not called then.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn railhead_tensor_recv_all_async(
    rendezvous: *mut railhead_tensor_rendezvous_t,
    keys: *const *const c_char,
    count: usize,
    callback: railhead_tensor_all_callback_t,
    user: *mut c_void,
) -> railhead_status_t {
    // SAFETY: the header asks the caller for so many strings, and for a function that may be called later on, on a thread of the caller's.
    call(|| unsafe {
        let callback = callback.ok_or_else(|| bad_pointer(0, "callback", 1))?;
        let user = User(user);
        let tell = move |result: Result<Vec<Tensor>>| {
            let user = &user;
            match result {
                Ok(tensors) => {
                    let shown: Vec<railhead_tensor_t> = tensors.iter().map(shown).collect();
                    callback(user.0, railhead_status_t::RAILHEAD_OK, c"".as_ptr(), shown.as_ptr(), shown.len());
                }
                Err(error) => callback(user.0, (&error).into(), words(&error).as_ptr(), ptr::null(), 0),
            }
        };
        Ok(STEPS.get(rendezvous)?.recv_all_async(&texts(keys, count)?, tell)?)
    })
}

/// The same into `bytes` at `data`, as railhead_tensor_recv_into: the memory is the library's until `callback` is called, and the tensor's `data` then.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn railhead_tensor_recv_into_async(
    rendezvous: *mut railhead_tensor_rendezvous_t,
    key: *const c_char,
    data: *mut c_void,
    bytes: usize,
    callback: railhead_tensor_callback_t,
    user: *mut c_void,
) -> railhead_status_t {
    // SAFETY: the header asks the caller for a string, memory that is the library's until the callback is called, and a function as above.
    call(|| unsafe {
        let (callback, into) = (told(callback, user, true)?, given(data, bytes)?);
        Ok(STEPS.get(rendezvous)?.recv_into_async(text(key, "key")?, into, callback)?)
    })
}

/// Gives a tensor back that railhead_tensor_recv has filled in: its `data` is not to be read any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn railhead_tensor_free(tensor: *const railhead_tensor_t) -> railhead_status_t {
    // SAFETY: the header asks the caller for a tensor.
    call(|| unsafe { Ok(OWNERS.remove(read(tensor, "tensor")?.owner).map(drop)?) })
}

/// Ends all receives of this step that wait, here and on workers that have asked this one, and all sends and receives that come later: they get
/// `status`, RAILHEAD_INTERNAL, RAILHEAD_USAGE, RAILHEAD_NETWORK or RAILHEAD_TIMEOUT, and the first 256 bytes of `why`. The first call counts.
///
/// RAILHEAD_USAGE: another status; the step was cleaned up.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn railhead_tensor_abort(
    rendezvous: *mut railhead_tensor_rendezvous_t,
    status: i32,
    why: *const c_char,
) -> railhead_status_t {
    // SAFETY: the header asks the caller for a string.
    call(|| unsafe {
        let why = text(why, "why")?;
        let error = match status {
            3 => Error::internal(why),
            5 => Error::usage(why),
            6 => Error::remote(why),
            8 => Error::timeout(why),
            other => return Err(Error::usage(format!("status: {other}; expected 3, 5, 6 or 8")).into()),
        };
        Ok(STEPS.get(rendezvous)?.abort(&error)?)
    })
}

/// Ends a handle. The step goes on.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn railhead_tensor_release(rendezvous: *mut railhead_tensor_rendezvous_t) -> railhead_status_t {
    call(|| Ok(STEPS.remove(rendezvous).map(drop)?))
}

/// Ends a step: what waits for it here or on other workers, and what comes later, fails with RAILHEAD_USAGE and "Cleanup ID"; its tensors are
/// forgotten. Numbers of steps should rise, and not be used again: others may be late.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn railhead_tensor_cleanup(manager: *mut railhead_tensor_manager_t, id: u64) -> railhead_status_t {
    call(|| {
        MANAGERS.get(manager)?.manager.cleanup(id);
        Ok(())
    })
}

/// Ends all steps that there are.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn railhead_tensor_cleanup_all(manager: *mut railhead_tensor_manager_t) -> railhead_status_t {
    call(|| {
        MANAGERS.get(manager)?.manager.cleanup_all();
        Ok(())
    })
}

/// Writes the key of a tensor and a 0 behind it: "SRC_DEVICE;INCARNATION;DST_DEVICE;EDGE;FRAME:ITER", at most 512 bytes, in TensorFlow's form.
/// `*len`: the bytes at `key`; becomes those of the key, with the 0.
///
/// RAILHEAD_USAGE: a part that is empty or has a semicolon; a key that is too long; too few bytes, and `*len` is what it takes then.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn railhead_tensor_key_create(
    src_device: *const c_char,
    src_incarnation: u64,
    dst_device: *const c_char,
    edge: *const c_char,
    frame: u64,
    iter: i64,
    key: *mut c_char,
    len: *mut usize,
) -> railhead_status_t {
    // SAFETY: the header asks the caller for strings, so many bytes, and their number.
    call(|| unsafe {
        let has = read(len, "len")?;
        let made =
            Key::new(text(src_device, "src_device")?, src_incarnation, text(dst_device, "dst_device")?, text(edge, "edge")?, frame, iter)?;
        let made = made.text();
        Out::new(len, "len")?.set(made.len() + 1);
        if has <= made.len() {
            return Err(Error::usage(format!("len: {has}; the key has {} bytes, with the 0 behind it", made.len() + 1)).into());
        }
        Out::new(key, "key")?;
        ptr::copy_nonoverlapping(made.as_ptr(), key.cast(), made.len());
        key.add(made.len()).write(0);
        Ok(())
    })
}

/// Reads a key. The parts point into it.
///
/// RAILHEAD_USAGE: a text that is no key.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn railhead_tensor_key_parse(key: *const c_char, parsed: *mut railhead_tensor_key_t) -> railhead_status_t {
    // SAFETY: the header asks the caller for a string and a place.
    call(|| unsafe {
        let out = Out::new(parsed, "parsed")?;
        let given = text(key, "key")?;
        let key = Key::parse(given)?;
        let part = |offset: usize, len: usize| railhead_bytes_t { data: given.as_ptr().wrapping_add(offset).cast(), size: len };
        let dst = key.src_device().len() + 1 + 16 + 1;
        out.set(railhead_tensor_key_t {
            src_device: part(0, key.src_device().len()),
            dst_device: part(dst, key.dst_device().len()),
            edge: part(dst + key.dst_device().len() + 1, key.edge().len()),
            src_incarnation: key.src_incarnation,
            frame: key.frame,
            iter: key.iter,
        });
        Ok(())
    })
}

/// The argument `data`, with so many bytes.
///
/// # Safety
/// As for [`UserMemory::new`].
unsafe fn given(data: *mut c_void, bytes: usize) -> Result<UserMemory> {
    if data.is_null() && bytes > 0 {
        return Err(bad_pointer(0, "data", 1));
    }
    // SAFETY: the requirement is the caller's own.
    Ok(unsafe { UserMemory::new(data.cast(), bytes) })
}

/// What calls a callback of C's, whose tensor is in memory of its own, or in the library's.
///
/// # Safety
/// Unless NULL, it must be a function that may be called with `user` until it was, on another thread.
unsafe fn told(
    callback: railhead_tensor_callback_t,
    user: *mut c_void,
    owns: bool,
) -> Result<impl FnOnce(Result<Tensor>) + Send + 'static> {
    let callback = callback.ok_or_else(|| bad_pointer(0, "callback", 1))?;
    let user = User(user);
    Ok(move |result: Result<Tensor>| {
        let user = &user;
        match result {
            Ok(tensor) => {
                let shown = shown(&tensor);
                // Memory of its own is not the library's any more.
                let _kept = (!owns).then_some(tensor);
                // SAFETY: the requirement is the caller's own.
                unsafe { callback(user.0, railhead_status_t::RAILHEAD_OK, c"".as_ptr(), &shown) };
            }
            Err(error) => {
                // SAFETY: as above.
                unsafe { callback(user.0, (&error).into(), words(&error).as_ptr(), ptr::null()) };
            }
        }
    })
}

/// An error as C reads it.
fn words(error: &Error) -> CString {
    CString::new(error.to_string().replace('\0', "?")).unwrap_or_default()
}

/// A tensor as C sees it, as long as it lives.
fn shown(tensor: &Tensor) -> railhead_tensor_t {
    let meta = tensor.meta();
    railhead_tensor_t {
        size: size_of::<railhead_tensor_t>(),
        dtype: meta.data_type,
        rank: meta.rank.into(),
        dims: meta.dims,
        data: tensor.as_ptr().cast(),
        bytes: tensor.len(),
        is_dead: tensor.is_dead().into(),
        owner: ptr::null_mut(),
        release: None,
        user: ptr::null_mut(),
    }
}
