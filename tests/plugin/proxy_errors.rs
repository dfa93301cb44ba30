//! An error from every function of a plugin's table, at its first, its second and a later call, while a proxy uses it (tests/c/fake_net.c): it is told
//! with the function's name, nothing hangs, and everything is closed once.

use std::ffi::{CStr, CString, c_char, c_long, c_void};
use std::process::Command;

use crate::support;
use railhead::abi::connector::{railhead_connector_config_t, railhead_listener_close};
use railhead::abi::status::railhead_last_error;
use support::proxy::*;
use support::{Ctx, Role, World, until};

pub const ROLES: &[(&str, Role)] = &[("errors", errors)];

#[test]
fn an_error_of_any_function_is_told_and_everything_is_closed_once() {
    let directory = tempfile::tempdir().expect("a directory");
    let library = directory.path().join("libfake12.so");
    let built = Command::new("cc")
        .args(["-std=c11", "-Wall", "-Wextra", "-Werror", "-O2", "-shared", "-fPIC", "-DFAKE_ABI=12", "-o"])
        .args([&library, &std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/c/fake_net.c")])
        .output()
        .expect("a C compiler");
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    World::new("errors", 1).env("RHT_FAKE", &library.to_string_lossy()).spawn().finish();
}

/// The fake plugin, and its record.
struct Fake {
    table: *const c_void,
    reset: extern "C" fn(),
    fail: extern "C" fn(*const c_char, c_long),
    calls: extern "C" fn(*const c_char) -> c_long,
    holds: extern "C" fn(*mut c_long),
}

impl Fake {
    fn load() -> Fake {
        let path = CString::new(std::env::var("RHT_FAKE").expect("RHT_FAKE")).expect("a path");
        // SAFETY: a library that this test built.
        let library = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        assert!(!library.is_null());
        let symbol = |name: &CStr| {
            // SAFETY: a valid library and name.
            let found = unsafe { libc::dlsym(library, name.as_ptr()) };
            assert!(!found.is_null(), "{name:?}");
            found
        };
        // SAFETY: tests/c/fake_net.c gives them these types.
        unsafe {
            Fake {
                table: symbol(c"ncclNetPlugin_v12"),
                reset: std::mem::transmute::<*mut c_void, extern "C" fn()>(symbol(c"fake_reset")),
                fail: std::mem::transmute::<*mut c_void, extern "C" fn(*const c_char, c_long)>(symbol(c"fake_fail")),
                calls: std::mem::transmute::<*mut c_void, extern "C" fn(*const c_char) -> c_long>(symbol(c"fake_calls")),
                holds: std::mem::transmute::<*mut c_void, extern "C" fn(*mut c_long)>(symbol(c"fake_holds")),
            }
        }
    }

    /// Contexts, listeners, senders, receivers, registrations; misuses.
    fn holds(&self) -> [c_long; 6] {
        let mut holds = [-1; 6];
        (self.holds)(holds.as_mut_ptr());
        holds
    }
}

/// How the proxy ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ending {
    /// stop, then every connector is closed, then destroy.
    Stop,
    /// abort, then the same.
    Abort,
    /// destroy alone.
    Destroy,
}

const PAIRS: u64 = 2;
const MESSAGES: u64 = 12;

fn last_error() -> String {
    // SAFETY: a C string of this thread.
    unsafe { CStr::from_ptr(railhead_last_error()) }.to_string_lossy().into_owned()
}

/// One connection of the proxy to itself; every connector that was made before something failed goes to `made`.
fn connect(proxy: Proxy, made: &mut Vec<Connector>, told: &mut Vec<String>) -> Option<(Connector, Connector)> {
    let config = railhead_connector_config_t { flush: 1, ..slots(1024) };
    let mut handle = [0u8; 128];
    let mut listener = std::ptr::null_mut();
    // SAFETY: 128 bytes and a place for the listener.
    let status = unsafe { railhead::abi::connector::railhead_proxy_listen(proxy.0, 0, handle.as_mut_ptr().cast(), &raw mut listener) };
    if status != RAILHEAD_OK {
        told.push(last_error());
        return None;
    }
    let (mut send, mut recv) = (None, None);
    let both = until("a connection, or an error", || {
        for (end, tried) in [(&mut send, proxy.connect(&mut handle, &config)), (&mut recv, accept(listener, &config))] {
            match tried {
                Ok(connector) if end.is_none() => *end = connector,
                Ok(_) => {}
                Err(status) => {
                    assert_eq!(status, RAILHEAD_NETWORK);
                    return Some(None);
                }
            }
        }
        send.zip(recv).map(Some)
    });
    if both.is_none() {
        told.push(last_error());
    }
    if railhead_listener_close(listener) != RAILHEAD_OK {
        told.push(last_error());
    }
    made.extend([send, recv].into_iter().flatten());
    both
}

/// Everything that a proxy does, to its end. Returns what was told of errors, once each.
fn play(fake: &Fake, ending: Ending) -> Vec<String> {
    let proxy = Proxy::over(fake.table, std::ptr::null()).expect("a proxy");
    let (mut made, mut told) = (Vec::new(), Vec::new());
    let pairs: Vec<_> = (0..PAIRS).filter_map(|_| connect(proxy, &mut made, &mut told)).collect();
    for (send, recv) in &pairs {
        send.append(&operation(MESSAGES, 1, 1, SIMPLE)).expect("append");
        recv.append(&operation(MESSAGES, 1, 1, SIMPLE)).expect("append");
    }
    proxy.start().expect("start");
    let mut programs: Vec<_> = pairs.iter().map(|(send, recv)| (send.producer(), recv.consumer(), 0, 0)).collect();
    until("the messages, or an error", || {
        for (filler, emptier, filled, emptied) in &mut programs {
            if *filled < MESSAGES && filler.put(1, &[7; 100]) {
                *filled += 1;
            }
            *emptied += u64::from(emptier.take(1).is_some());
        }
        let state = proxy.state();
        (state.failed == 1 || state.done == 2 * pairs.len() as u64).then_some(())
    });
    let (status, words) = proxy.error();
    if status != RAILHEAD_OK {
        assert_eq!(status, RAILHEAD_NETWORK);
        assert!(words.starts_with("operation ") && words.contains(" of connector "), "{words}");
        // Every further call says so.
        assert_eq!((proxy.start(), last_error().contains(&words)), (Err(status), true));
        told.push(words);
    }
    if ending != Ending::Destroy {
        let ended = if ending == Ending::Stop { proxy.stop() } else { proxy.abort() };
        assert!(ended.is_ok() || (ended == Err(status) && ending == Ending::Stop), "{ended:?}");
        assert_eq!(proxy.state().ended, 1);
        for connector in made {
            if connector.close().is_err() {
                told.push(last_error());
            }
            assert_eq!(connector.close(), Err(RAILHEAD_INTERNAL), "closed once");
        }
    }
    if proxy.destroy().is_err() {
        told.push(last_error());
    }
    assert_eq!(fake.holds(), [0; 6]);
    told
}

fn errors(_: &Ctx) {
    let fake = Fake::load();
    // How often each is called at least.
    let functions = [
        (c"init", 1),
        (c"listen", 2),
        (c"connect", 2),
        (c"accept", 2),
        (c"regMr", 4),
        (c"deregMr", 4),
        (c"isend", 24),
        (c"irecv", 24),
        (c"iflush", 24),
        (c"test", 48),
        (c"closeSend", 2),
        (c"closeRecv", 2),
        (c"closeListen", 2),
        (c"finalize", 1),
    ];
    for ending in [Ending::Stop, Ending::Abort, Ending::Destroy] {
        (fake.reset)();
        assert_eq!(play(&fake, ending), [""; 0]);
        for (function, least) in functions {
            let made = (fake.calls)(function.as_ptr());
            assert!(made >= least, "{function:?}: {made} calls");
        }
        for (function, least) in functions {
            for call in [1, 2, 3, 9, least] {
                if call > least {
                    continue;
                }
                (fake.reset)();
                (fake.fail)(function.as_ptr(), call);
                let told = play(&fake, ending);
                let name = function.to_str().expect("ASCII");
                assert!((fake.calls)(function.as_ptr()) >= call, "{name} was not called {call} times");
                // Whoever destroys a proxy has no use for an error of finalize; the log has it.
                let expected = usize::from(name != "finalize");
                let words = format!("{name} of plugin Fake: ncclRemoteError (6)");
                assert!(
                    told.len() == expected && told.iter().all(|told| told.contains(&words)),
                    "{name}, call {call}, {ending:?}: {told:?}"
                );
            }
        }
    }
}
