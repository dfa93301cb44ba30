//! A table whose author was in a strange mood: what it does becomes a value or an error, never a crash.

use std::cell::Cell;

use super::*;

thread_local! {
    /// What every function returns.
    static CODE: Cell<c_int> = const { Cell::new(0) };
    /// What every function unwinds with instead.
    static UNWINDS: Cell<Option<&'static str>> = const { Cell::new(None) };
    /// What comes out of every function that makes something.
    static MADE: Cell<usize> = const { Cell::new(0x1000) };
    /// What `test` says of the size.
    static SIZE: Cell<c_int> = const { Cell::new(0) };
    /// Contexts made, contexts finalized.
    static LIVES: Cell<(u32, u32)> = const { Cell::new((0, 0)) };
}

fn mood() -> c_int {
    if let Some(words) = UNWINDS.get() {
        std::panic::panic_any(words);
    }
    CODE.get()
}

fn make(out: *mut Pointer) -> c_int {
    // SAFETY: the places that `Table` passes.
    unsafe { out.write(std::ptr::without_provenance_mut(MADE.get())) };
    mood()
}

unsafe extern "C-unwind" fn init(
    ctx: *mut Pointer,
    _id: u64,
    _config: *mut ncclNetCommConfig_t,
    _logger: Option<ncclDebugLogger_t>,
    _profiler: Option<unsafe extern "C" fn()>,
) -> c_int {
    LIVES.set((LIVES.get().0 + 1, LIVES.get().1));
    make(ctx)
}

unsafe extern "C-unwind" fn finalize(_ctx: Pointer) -> c_int {
    LIVES.set((LIVES.get().0, LIVES.get().1 + 1));
    mood()
}

unsafe extern "C-unwind" fn listen(_ctx: Pointer, _dev: c_int, handle: Pointer, comm: *mut Pointer) -> c_int {
    // SAFETY: NCCL_NET_HANDLE_MAXSIZE bytes.
    unsafe { handle.cast::<u8>().write_bytes(0x77, 128) };
    make(comm)
}

unsafe extern "C-unwind" fn connect(_ctx: Pointer, _dev: c_int, _handle: Pointer, comm: *mut Pointer, _device: *mut Pointer) -> c_int {
    make(comm)
}

unsafe extern "C-unwind" fn accept(_listener: Pointer, comm: *mut Pointer, _device: *mut Pointer) -> c_int {
    make(comm)
}

unsafe extern "C-unwind" fn reg_mr(_comm: Pointer, _data: Pointer, _bytes: usize, kind: c_int, mr: *mut Pointer) -> c_int {
    assert!([1, 2].contains(&kind));
    make(mr)
}

unsafe extern "C-unwind" fn dereg_mr(_comm: Pointer, _mr: Pointer) -> c_int {
    mood()
}

unsafe extern "C-unwind" fn isend(
    _comm: Pointer,
    _data: Pointer,
    _bytes: usize,
    _tag: c_int,
    _mr: Pointer,
    _profiler: Pointer,
    request: *mut Pointer,
) -> c_int {
    make(request)
}

unsafe extern "C-unwind" fn irecv(
    _comm: Pointer,
    n: c_int,
    data: *mut Pointer,
    bytes: *mut usize,
    tags: *mut c_int,
    mrs: *mut Pointer,
    profilers: *mut Pointer,
    request: *mut Pointer,
) -> c_int {
    // SAFETY: arrays of one each.
    let seen = unsafe { (*data, *bytes, *tags, *mrs, *profilers) };
    assert_eq!((n, seen), (1, (pointer(0x4000), 64, 5, pointer(0x1000), null_mut())));
    make(request)
}

unsafe extern "C-unwind" fn iflush(
    _comm: Pointer,
    n: c_int,
    _data: *mut Pointer,
    bytes: *mut c_int,
    _mrs: *mut Pointer,
    request: *mut Pointer,
) -> c_int {
    // SAFETY: an array of one.
    assert_eq!((n, unsafe { *bytes }), (1, 64));
    make(request)
}

unsafe extern "C-unwind" fn test(_request: Pointer, done: *mut c_int, sizes: *mut c_int) -> c_int {
    // SAFETY: the place, and room for the 8 sizes that some plugin may write.
    unsafe {
        done.write(c_int::from(MADE.get() != 0));
        (0..8).for_each(|i| sizes.add(i).write(SIZE.get()));
    }
    mood()
}

unsafe extern "C-unwind" fn close(_comm: Pointer) -> c_int {
    mood()
}

fn functions() -> Functions {
    Functions {
        name: c"Moody".as_ptr(),
        init: Some(init),
        devices: 0,
        getProperties: 0,
        listen: Some(listen),
        connect: Some(connect),
        accept: Some(accept),
        regMr: Some(reg_mr),
        regMrDmaBuf: 0,
        deregMr: Some(dereg_mr),
        isend: Some(isend),
        irecv: Some(irecv),
        iflush: Some(iflush),
        test: Some(test),
        closeSend: Some(close),
        closeRecv: Some(close),
        closeListen: Some(close),
        getDeviceMr: 0,
        irecvConsumed: 0,
        makeVDevice: 0,
        finalize: Some(finalize),
        setNetAttr: 0,
    }
}

fn table_of(functions: &Functions) -> Result<Table> {
    // SAFETY: a table as above, which stays for the test.
    unsafe { Table::new((&raw const *functions).cast(), null_mut(), None) }
}

fn comm() -> Comm {
    // SAFETY: this table takes anything.
    unsafe { Comm::new(0x2000) }
}

fn buffer() -> Buffer {
    // SAFETY: never touched.
    unsafe { Buffer::new(0x4000, 64) }
}

/// Every function once; the words of each that failed.
fn everything(table: &Table) -> Vec<String> {
    // SAFETY: this table takes anything.
    let (mr, mut request) = unsafe { (Mr::new(0x1000), Some(NetRequest::new(0x3000))) };
    let results = [
        table.listen(0).map(drop),
        table.connect(0, &mut ListenHandle::default()).map(drop),
        table.accept(&comm()).map(drop),
        table.reg_mr(&comm(), buffer(), true).map(drop),
        table.isend(&comm(), buffer(), 5, &mr).map(drop),
        table.irecv(&comm(), buffer(), 5, &mr).map(drop),
        table.iflush(&comm(), buffer(), &mr).map(drop),
        table.test(&mut request).map(drop),
        table.dereg_mr(&comm(), mr),
        table.close_send(comm()),
        table.close_recv(comm()),
        table.close_listen(comm()),
    ];
    results.into_iter().filter_map(|result| result.err().map(|error| error.to_string())).collect()
}

#[test]
fn every_code_becomes_an_error_of_its_kind() {
    let functions = functions();
    let table = table_of(&functions).unwrap();
    assert_eq!(table.name(), "Moody");
    assert_eq!(everything(&table), Vec::<String>::new());
    for (code, kind) in
        [(1, "Internal"), (2, "System"), (3, "Internal"), (4, "Usage"), (5, "Usage"), (6, "Remote"), (7, "Internal"), (-1, "Internal")]
    {
        CODE.set(code);
        let messages = everything(&table);
        assert_eq!(messages.len(), 12, "{messages:?}");
        assert!(messages.iter().all(|m| m.contains(" of plugin Moody: ") && m.ends_with(&format!("({code})"))), "{messages:?}");
        let error = table.accept(&comm()).unwrap_err();
        assert!(format!("{error:?}").starts_with(kind), "{code}: {error:?}");
    }
    CODE.set(0);
}

#[test]
fn a_function_that_unwinds_is_an_error() {
    let functions = functions();
    let table = table_of(&functions).unwrap();
    UNWINDS.set(Some("on purpose"));
    let messages = everything(&table);
    UNWINDS.set(None);
    // The context could not be made either, so listen and connect failed in init.
    assert_eq!(messages.len(), 12, "{messages:?}");
    assert!(messages.iter().all(|m| m.ends_with("of plugin Moody unwound: on purpose")), "{messages:?}");
    assert_eq!(LIVES.get(), (2, 0));
}

#[test]
fn null_is_again_later_or_done_already_but_no_listener() {
    let functions = functions();
    let table = table_of(&functions).unwrap();
    MADE.set(0);
    // SAFETY: this table takes anything.
    let (mr, mut request) = unsafe { (Mr::new(0x1000), Some(NetRequest::new(0x3000))) };
    assert!(table.connect(0, &mut ListenHandle::default()).unwrap().is_none());
    assert!(table.accept(&comm()).unwrap().is_none());
    assert!(table.isend(&comm(), buffer(), 0, &mr).unwrap().is_none());
    assert!(table.irecv(&comm(), buffer(), 5, &mr).unwrap().is_none());
    assert!(table.iflush(&comm(), buffer(), &mr).unwrap().is_none());
    assert!(table.test(&mut request).unwrap().is_none() && request.is_some());
    assert!(table.listen(0).unwrap_err().to_string().contains("no listener, and no error"));
    MADE.set(0x1000);
    assert_eq!(table.test(&mut None).unwrap(), Some(0));
}

#[test]
fn a_complete_request_is_gone_and_its_size_is_checked() {
    let functions = functions();
    let table = table_of(&functions).unwrap();
    for (size, expected) in [(0, Some(0)), (77, Some(77)), (-1, None)] {
        SIZE.set(size);
        // SAFETY: this table takes anything.
        let mut request = Some(unsafe { NetRequest::new(0x3000) });
        assert_eq!(table.test(&mut request).ok().flatten(), expected);
        assert!(request.is_none());
    }
    assert_eq!(table.listen(0).unwrap().1.0, [0x77; 128]);
}

#[test]
fn a_context_is_made_once_and_finalized_once_unless_it_is_the_callers() {
    let functions = functions();
    LIVES.set((0, 0));
    let table = table_of(&functions).unwrap();
    assert_eq!(LIVES.get(), (0, 0), "given comms need none");
    everything(&table);
    everything(&table);
    drop(table);
    assert_eq!(LIVES.get(), (1, 1));
    // SAFETY: a table as above; it takes any context.
    let table = unsafe { Table::new((&raw const functions).cast(), pointer(0x5000), None) }.unwrap();
    everything(&table);
    drop(table);
    assert_eq!(LIVES.get(), (1, 1));
}

#[test]
fn a_table_with_holes_is_refused_where_the_hole_is() {
    for (name, hole) in [
        ("regMr", Functions { regMr: None, ..functions() }),
        ("deregMr", Functions { deregMr: None, ..functions() }),
        ("isend", Functions { isend: None, ..functions() }),
        ("irecv", Functions { irecv: None, ..functions() }),
        ("iflush", Functions { iflush: None, ..functions() }),
        ("test", Functions { test: None, ..functions() }),
        ("closeSend", Functions { closeSend: None, ..functions() }),
        ("closeRecv", Functions { closeRecv: None, ..functions() }),
    ] {
        assert_eq!(table_of(&hole).err().unwrap().to_string(), format!("plugin Moody has no {name}"));
    }
    let hole = Functions { name: std::ptr::null(), init: None, accept: None, finalize: None, closeListen: None, ..functions() };
    let table = table_of(&hole).unwrap();
    let messages = everything(&table);
    assert_eq!(messages.len(), 4, "{messages:?}");
    assert!(messages.iter().all(|m| m.starts_with("plugin without a name has no ")), "{messages:?}");
    // SAFETY: a misaligned pointer is refused unread.
    assert!(unsafe { Table::new(std::ptr::without_provenance(0x1001), null_mut(), None) }.is_err());
}

#[test]
fn null_is_our_own_table() {
    // SAFETY: NULL.
    let table = unsafe { Table::new(std::ptr::null(), null_mut(), None) }.unwrap();
    assert_eq!(table.name(), "Railhead");
    // A comm that never was one is the table's own refusal.
    let error = table.close_send(comm()).unwrap_err().to_string();
    assert!(error.contains("closeSend of plugin Railhead: "), "{error}");
}
